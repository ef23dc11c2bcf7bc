//! Options of `./x bench nbd`.

use std::path::{Path, PathBuf};

use super::jobs::{JOBS, Job, Pressure};
use super::servers::{self, KINDS, Kind, STORAGES, Site, Storage};
use super::{Error, Result};
use crate::options::{chosen, number};

/// The options of a run.
pub(super) struct Options {
    /// Rounds of each job on each server.
    pub(super) rounds: usize,
    /// Seconds of each round.
    pub(super) seconds: f64,
    /// Connections of each job.
    pub(super) connections: usize,
    /// Requests in flight on each connection.
    pub(super) depth: usize,
    /// The exports' length in bytes.
    pub(super) size: u64,
    /// Seed of random offsets.
    pub(super) seed: u64,
    /// Jobs to run.
    pub(super) jobs: Vec<&'static Job>,
    /// Servers to compare.
    pub(super) servers: Vec<Kind>,
    /// Storages of the servers.
    pub(super) storages: Vec<Storage>,
    /// Whether start-up, memory, wake-ups and system calls are measured too.
    pub(super) with_facts: bool,
    /// Whether to use the real-time class, if permitted.
    pub(super) realtime: bool,
    /// A folder in memory for sockets and files.
    pub(super) dir: PathBuf,
    /// A folder on a disk.
    pub(super) disk_dir: PathBuf,
    /// Folder of the report.
    pub(super) out: PathBuf,
}

/// Each option's name, value and meaning; `parse` and `help` use this table.
const TABLE: &[(&str, &str, &str)] = &[
    ("--rounds", "N", "rounds of each job on each server (5)"),
    ("--seconds", "S", "length of a round (3)"),
    ("--connections", "N", "connections (4)"),
    ("--depth", "N", "requests in flight on each, at most 32 (16)"),
    ("--size", "MIB", "length of the exports (1024)"),
    ("--seed", "N", "of offsets and data (1)"),
    ("--cases", "A,B", "jobs, by name or by how it begins (all)"),
    ("--servers", "A,B", "servers, by name or by how it begins (all that are installed)"),
    ("--storage", "A,B", "ram, tmpfs, disk, disk-direct, qcow2, overlay (ram,tmpfs)"),
    ("--no-facts", "", "leave out start-up, memory, wake-ups and system calls"),
    ("--only-facts", "", "leave out the jobs"),
    ("--no-realtime", "", "run in the normal scheduling class even where chrt is permitted"),
    ("--dir", "PATH", "a folder in memory (/dev/shm)"),
    ("--disk-dir", "PATH", "a folder on a disk (target/bench)"),
    ("--out", "PATH", "where nbd.csv, nbd.json and nbd.md go (target/bench)"),
];

/// The text of `--help`.
pub(super) fn help() -> String {
    let mut text = String::from("usage: ./x bench nbd [OPTIONS]\n\n");
    for (name, value, meaning) in TABLE {
        text += &format!("  {:22}{meaning}\n", format!("{name} {value}"));
    }
    let jobs: Vec<&str> = JOBS.iter().map(|job| job.name).collect();
    let kinds: Vec<&str> = KINDS.iter().map(|kind| kind.name()).collect();
    text += &format!("\ncases:   {}\nservers: {}\n", jobs.join(" "), kinds.join(" "));
    text + "NBDKIT, QEMU_NBD and BLOCKYARD_BIN name other programs than those on the path and beside this one.\n"
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rounds: 5,
            seconds: 3.0,
            connections: 4,
            depth: 16,
            size: 1 << 30,
            seed: 1,
            jobs: JOBS.iter().collect(),
            servers: Vec::new(),
            storages: vec![Storage::Ram, Storage::Tmpfs],
            with_facts: true,
            realtime: true,
            dir: "/dev/shm".into(),
            disk_dir: "target/bench".into(),
            out: "target/bench".into(),
        }
    }
}

impl Options {
    /// Reads the command line; `None` if it asks for help.
    pub(super) fn parse(arguments: &[String]) -> Result<Option<Self>> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            if matches!(argument.as_str(), "-h" | "--help") {
                return Ok(None);
            }
            let (name, given) = match argument.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let row = TABLE.iter().find(|row| row.0 == name);
            let (name, takes, _) = row.ok_or_else(|| Error(format!("no option {name}")))?;
            let value = match (takes.is_empty(), given) {
                (true, None) => String::new(),
                (true, Some(_)) => return Err(Error(format!("{name} takes no value"))),
                (false, Some(value)) => value,
                (false, None) => {
                    arguments.next().cloned().ok_or_else(|| Error(format!("{name} needs {takes}")))?
                }
            };
            options.set(name, &value)?;
        }
        if options.servers.is_empty() {
            options.servers = KINDS.iter().copied().filter(|kind| servers::present(*kind)).collect();
        }
        if let Some(missing) = options.servers.iter().find(|kind| !servers::present(**kind)) {
            return Err(Error(format!(
                "{} is not here: build or install it, or leave it out",
                missing.name()
            )));
        }
        if options.rounds == 0 || options.connections == 0 || !(1..=32).contains(&options.depth) {
            return Err(Error("--rounds and --connections are at least 1, --depth is 1 to 32".into()));
        }
        if options.size < 16 << 20 || options.seconds.is_nan() || options.seconds <= 0.0 {
            return Err(Error("--size is at least 16, --seconds more than 0".into()));
        }
        Ok(Some(options))
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        match name {
            "--rounds" => self.rounds = number(name, value)?,
            "--seconds" => self.seconds = number(name, value)?,
            "--connections" => self.connections = number(name, value)?,
            "--depth" => self.depth = number(name, value)?,
            "--size" => self.size = number::<u64>(name, value)? << 20,
            "--seed" => self.seed = number(name, value)?,
            "--cases" => {
                let all: Vec<&'static Job> = JOBS.iter().collect();
                self.jobs = chosen(name, value, &all, |job| job.name)?;
            }
            "--servers" => self.servers = chosen(name, value, KINDS, |kind| kind.name())?,
            "--storage" => {
                // `disk` selects only itself, not other names with that prefix.
                let words: Vec<&str> = value.split(',').collect();
                if let Some(word) = words.iter().find(|word| !STORAGES.iter().any(|one| one.name() == **word))
                {
                    return Err(Error(format!(
                        "{name} {word}: none of ram tmpfs disk disk-direct qcow2 overlay"
                    )));
                }
                self.storages = STORAGES.iter().copied().filter(|one| words.contains(&one.name())).collect();
            }
            "--no-facts" => self.with_facts = false,
            "--only-facts" => self.jobs.clear(),
            "--no-realtime" => self.realtime = false,
            "--dir" => self.dir = value.into(),
            "--disk-dir" => self.disk_dir = value.into(),
            "--out" => self.out = value.into(),
            _ => return Err(Error(format!("no option {name}"))),
        }
        Ok(())
    }

    /// Returns the intensity of the loads.
    pub(super) fn pressure(&self) -> Pressure {
        Pressure { connections: self.connections, depth: self.depth, seconds: self.seconds, seed: self.seed }
    }

    /// Creates the folders of this run, with this process in their names.
    pub(super) fn site(&self) -> Result<Site> {
        let folder = |base: &Path| {
            let path = base.join(format!("blockyard-bench.{}", std::process::id()));
            std::fs::create_dir_all(&path).map_err(Error::at(&path))?;
            path.canonicalize().map_err(Error::at(&path))
        };
        Ok(Site { tmpfs: folder(&self.dir)?, disk: folder(&self.disk_dir)?, size: self.size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Option<Options>> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words)
    }

    #[test]
    fn every_option_of_the_table_is_parsed() {
        let samples = "--rounds 7 --seconds=1.5 --connections 2 --depth 8 --size 64 --seed 3 --cases randrw \
            --servers baseline --storage ram,disk --no-facts --no-realtime --dir /tmp --disk-dir /tmp --out /tmp";
        let options = parse(samples).unwrap().unwrap();
        assert_eq!((options.rounds, options.connections, options.depth, options.size), (7, 2, 8, 64 << 20));
        assert_eq!(options.jobs.len(), 2);
        assert_eq!(options.storages, [Storage::Ram, Storage::Disk]);
        for (name, ..) in TABLE {
            assert!(samples.contains(name) || *name == "--only-facts", "{name} is not tried here");
        }
    }

    #[test]
    fn invalid_options_are_refused() {
        for text in
            ["--rounds 0", "--rounds x", "--rounds", "--servers apache", "--cases=", "--depth 33", "--faster"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("--help").unwrap().is_none());
    }
}
