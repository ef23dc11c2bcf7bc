//! The load on each device: fio jobs, and their cost for the whole machine.

use std::time::Duration;

use super::subjects::Running;
use crate::error::{Error, Result};
use crate::fio;
use crate::tools::output;

/// One kind of load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Name in tables and on the command line.
    pub(super) name: &'static str,
    /// fio's options for files in a file system of its own.
    arguments: &'static [&'static str],
}

/// Similar jobs share their files, which are laid out once.
const ONE: &str = "--filename=one";
const MANY: &str = "--filename_format=many.$jobnum.$filenum";

/// The jobs of the loop driver's move to blk-mq: one job, 64 in flight.
macro_rules! deep {
    ($name:literal, $rw:literal $(, $more:literal)?) => {
        Job {
            name: $name,
            arguments: &[$rw, "--bs=4k", "--iodepth=64", "--numjobs=1", "--size=256M", ONE $(, $more)?],
        }
    };
}

/// The jobs of its move to direct I/O: 4 jobs, one request each.
macro_rules! plain {
    ($name:literal, $rw:literal $(, $more:literal)?) => {
        Job {
            name: $name,
            arguments: &[
                $rw, "--bs=4k", "--ioengine=psync", "--numjobs=4", "--nrfiles=8", MANY, "--size=200M"
                $(, $more)?
            ],
        }
    };
}

/// All jobs: those of the loop driver's own history, and large sequential requests.
pub(super) const JOBS: &[Job] = &[
    Job {
        name: "files-randrw",
        arguments: &[
            "--rw=randrw",
            "--bs=4k",
            "--iodepth=16",
            "--numjobs=4",
            "--nrfiles=8",
            MANY,
            "--size=200M",
            "--overwrite=1",
        ],
    },
    deep!("randread-64", "--rw=randread"),
    deep!("read-64", "--rw=read"),
    deep!("randwrite-64", "--rw=randwrite", "--overwrite=1"),
    deep!("write-64", "--rw=write", "--overwrite=1"),
    plain!("randread-psync-4", "--rw=randread"),
    plain!("read-psync-4", "--rw=read"),
    plain!("randwrite-psync-4", "--rw=randwrite", "--overwrite=1"),
    plain!("write-psync-4", "--rw=write", "--overwrite=1"),
    Job {
        name: "read-1m",
        arguments: &["--rw=read", "--bs=1m", "--iodepth=4", "--numjobs=1", "--size=256M", ONE],
    },
    Job {
        name: "write-1m",
        arguments: &[
            "--rw=write",
            "--bs=1m",
            "--iodepth=4",
            "--numjobs=1",
            "--size=256M",
            ONE,
            "--overwrite=1",
        ],
    },
];

/// The measurements of one run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) run: fio::Run,
    /// Growth of the page cache during the run in MiB, without that of tmpfs.
    pub(super) cached_mib: f64,
}

impl Job {
    /// Runs the job once, on files that the first run lays out.
    pub(super) fn run(&self, on: &Running, time: Duration) -> Result<Sample> {
        let folder = format!("--directory={}", on.mount.display());
        let runtime = format!("--runtime={}", time.as_secs());
        let name = match &on.groups {
            Some((_, log)) => format!("--name={}", log.display()),
            None => format!("--name={}", self.name),
        };
        let mut arguments =
            vec!["fio", &name, &folder, &runtime, "--direct=1", "--time_based", "--group_reporting"];
        arguments.extend(["--output-format=json", "--randrepeat=0", "--norandommap"]);
        if !self.arguments.iter().any(|word| word.starts_with("--ioengine")) {
            arguments.push("--ioengine=libaio");
        }
        arguments.extend(self.arguments);
        let fail = |error: std::io::Error| Error(format!("/proc: {error}"));
        if !on.mount.join(format!("{}.laid", self.name)).exists() {
            let mut lay: Vec<&str> = arguments.clone();
            lay.extend(["--create_only=1"]);
            output(&lay)?;
            std::fs::write(on.mount.join(format!("{}.laid", self.name)), "").map_err(fail)?;
        }
        let enter = on.groups.as_ref().map(|(groups, _)| groups.option());
        arguments.extend(enter.as_deref());
        let before = cached_kib().map_err(fail)?;
        let run = fio::run(&arguments, on.server)?;
        let after = cached_kib().map_err(fail)?;
        if let Some((groups, _)) = &on.groups {
            groups.clear()?;
        }
        Ok(Sample { run, cached_mib: (after - before) / 1024.0 })
    }
}

/// Returns the size of the page cache without files in memory.
fn cached_kib() -> std::io::Result<f64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    Ok(field("Cached:") + field("Buffers:") - field("Shmem:"))
}
