//! `./x bench file`: the file backend without a socket in front, compared with fio's io_uring and libaio
//! engines.
//!
//! Every measurement is a process of its own that keeps a number of 4 KiB requests in flight at random
//! places of one file for a set time. Ours is this program with `--child`, which drives a queue over the
//! file backend on the kernel's ring with one thread, like a reactor. The figures are requests a second and
//! the process's processor time for a request, including io_uring's workers. Rounds are interleaved, each
//! beginning with another subject.

mod rig;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;

use crate::core::Mix;
use crate::error::{Error, Result};
use crate::figures::{ratio, spread};
use crate::options::{chosen, command, count, each};
use crate::{fio, proc, realtime, tools};

const USAGE: &str = "\
usage: ./x bench file [OPTIONS]
  --rounds N   (7)    --seconds N  of each measurement (2)
  --storage LIST      tmpfs,direct (both): a file in memory, and one past the page cache
  --mixes LIST        read,write,50/50 (all)    --depths LIST  requests in flight, 1..1024 (1,32,128)
  --dir PATH          where the direct file is (target/bench)    --mib N  each file's length (1024)
  --json              one object a line instead of a table
";

/// The location of the file, and how it is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Storage {
    /// A file in memory, through the page cache.
    Tmpfs,
    /// A file of a file system on a disk, with `O_DIRECT`.
    Direct,
}

/// The program that does the I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Subject {
    Blockyard,
    /// fio with registered files and buffers, submitting up to 16 requests at once.
    IoUring,
    Libaio,
}

const STORAGE: [Storage; 2] = [Storage::Tmpfs, Storage::Direct];
const SUBJECTS: [Subject; 3] = [Subject::Blockyard, Subject::IoUring, Subject::Libaio];
/// Requests that fio submits at once, if the depth allows it.
const BATCH: u16 = 16;

impl Storage {
    fn name(self) -> &'static str {
        match self {
            Storage::Tmpfs => "tmpfs",
            Storage::Direct => "direct",
        }
    }
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Subject::Blockyard => "blockyard",
            Subject::IoUring => "fio io_uring",
            Subject::Libaio => "fio libaio",
        }
    }
}

struct Options {
    rounds: usize,
    seconds: u32,
    storage: Vec<Storage>,
    mixes: Vec<Mix>,
    depths: Vec<u16>,
    folder: PathBuf,
    mib: u32,
    json: bool,
}

/// One row: the measurements of each subject, round by round.
struct Row {
    storage: Storage,
    mix: Mix,
    depth: u16,
    /// Requests a second, in the order of [`SUBJECTS`].
    rates: [Vec<f64>; SUBJECTS.len()],
    /// Processor time for a request, in microseconds.
    costs: [Vec<f64>; SUBJECTS.len()],
}

/// The load of a process.
struct Job<'a> {
    path: &'a Path,
    is_direct: bool,
    mix: Mix,
    depth: u16,
    time: Duration,
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    if let [child, rest @ ..] = arguments
        && child == "--child"
    {
        return rig::child(rest);
    }
    realtime::enter("file", arguments);
    let (is_json, arguments): (Vec<_>, Vec<_>) = arguments.iter().cloned().partition(|word| word == "--json");
    let parse = |arguments: &[String]| parse(arguments, !is_json.is_empty());
    command("file", USAGE, &arguments, parse, run)
}

fn parse(arguments: &[String], json: bool) -> Result<Options> {
    let mut options = Options {
        rounds: 7,
        seconds: 2,
        storage: STORAGE.to_vec(),
        mixes: Mix::ALL.to_vec(),
        depths: vec![1, 32, 128],
        folder: "target/bench".into(),
        mib: 1024,
        json,
    };
    each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = count(name, value)? as usize,
            "--seconds" => options.seconds = count(name, value)?,
            "--mib" => options.mib = count(name, value)?,
            "--storage" => options.storage = chosen(name, value, &STORAGE, |storage| storage.name())?,
            "--mixes" => options.mixes = chosen(name, value, &Mix::ALL, |mix| mix.name())?,
            "--dir" => options.folder = value.into(),
            "--depths" => {
                let depth = |word: &str| count(name, word).map(|depth| depth.min(1024) as u16);
                options.depths = value.split(',').map(depth).collect::<Result<_>>()?;
            }
            _ => return Err(Error(format!("unknown option {name}"))),
        }
        Ok(())
    })?;
    Ok(options)
}

/// A file that is removed when the measurement ends.
struct Scratch(PathBuf);

impl Scratch {
    /// Creates a file of random bytes, so that no block can be skipped or shared.
    fn new(folder: &Path, mib: u32) -> Result<Scratch> {
        let path = folder.join(format!("blockyard-bench-{}.img", std::process::id()));
        let fail = |error: std::io::Error| Error(format!("{}: {error}", path.display()));
        std::fs::create_dir_all(folder).map_err(fail)?;
        let file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(fail)?;
        let scratch = Scratch(path.clone());
        fill(file, mib).map_err(fail)?;
        Ok(scratch)
    }
}

fn fill(mut file: File, mib: u32) -> std::io::Result<()> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut bytes = vec![0; 1 << 20];
    for _ in 0..mib {
        random.fill(&mut bytes);
        file.write_all(&bytes)?;
    }
    file.sync_all()
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn run(options: &Options) -> Result<()> {
    tools::run(&["fio", "--version"])?;
    for &storage in &options.storage {
        let folder = if storage == Storage::Tmpfs { Path::new("/dev/shm") } else { &options.folder };
        let file = Scratch::new(folder, options.mib)?;
        for &mix in &options.mixes {
            for &depth in &options.depths {
                let mut row =
                    Row { storage, mix, depth, rates: Default::default(), costs: Default::default() };
                let job = Job {
                    path: &file.0,
                    is_direct: storage == Storage::Direct,
                    mix,
                    depth,
                    time: Duration::from_secs(options.seconds.into()),
                };
                for round in 0..options.rounds {
                    for turn in 0..SUBJECTS.len() {
                        let subject = (round + turn) % SUBJECTS.len();
                        let (rate, cost) = measure(SUBJECTS[subject], &job)?;
                        row.rates[subject].push(rate);
                        row.costs[subject].push(cost);
                    }
                }
                print(&row, options.json);
            }
        }
    }
    Ok(())
}

/// Returns requests a second, and processor time for each in microseconds.
fn measure(subject: Subject, job: &Job<'_>) -> Result<(f64, f64)> {
    let look = || proc::cpu_of_children().map_err(|error| Error(format!("/proc: {error}")));
    let before = look()?;
    let (requests, rate) = match subject {
        Subject::Blockyard => rig::start(job)?,
        Subject::IoUring => by_fio(job, &["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"])?,
        Subject::Libaio => by_fio(job, &["--ioengine=libaio"])?,
    };
    Ok((rate, (look()? - before).as_secs_f64() * 1e6 / requests.max(1.0)))
}

fn by_fio(job: &Job<'_>, engine: &[&str]) -> Result<(f64, f64)> {
    let rw = match job.mix {
        Mix::Reads => "--rw=randread",
        Mix::Writes => "--rw=randwrite",
        Mix::Half => "--rw=randrw",
    };
    let batch = BATCH.min(job.depth);
    let words = [
        format!("--filename={}", job.path.display()),
        format!("--iodepth={}", job.depth),
        format!("--iodepth_batch_submit={batch}"),
        format!("--iodepth_batch_complete_max={}", job.depth),
        format!("--runtime={}", job.time.as_secs()),
        format!("--direct={}", u8::from(job.is_direct)),
    ];
    let mut all = vec!["fio", "--name=file", "--output-format=json", "--time_based", "--bs=4k", rw];
    all.extend(["--norandommap", "--randrepeat=0", "--overwrite=1", "--invalidate=0"]);
    all.extend(words.iter().map(String::as_str));
    all.extend(engine);
    let run = fio::run(&all, None)?;
    Ok((run.requests, run.rate))
}

fn print(row: &Row, is_json: bool) {
    if is_json {
        for (i, subject) in SUBJECTS.iter().enumerate() {
            let line = json!({
                "storage": row.storage.name(), "mix": row.mix.name(), "depth": row.depth,
                "subject": subject.name(), "rate": row.rates[i], "cpu_us": row.costs[i],
            });
            println!("{line}");
        }
        return;
    }
    println!("{}, {}, depth {}", row.storage.name(), row.mix.name(), row.depth);
    for (i, subject) in SUBJECTS.iter().enumerate() {
        let (rates, costs) = (spread(&row.rates[i]), spread(&row.costs[i]));
        let beside = match i {
            0 => String::new(),
            _ => format!(
                "   ours: {:.2} of the rate, {:.2} of the time",
                ratio(&row.rates[0], &row.rates[i]),
                ratio(&row.costs[0], &row.costs[i])
            ),
        };
        println!(
            "  {:<13}{:>8.1} k/s ({:.1}..{:.1})   {:.2} us ({:.2}..{:.2}){beside}",
            subject.name(),
            rates.1 / 1e3,
            rates.0 / 1e3,
            rates.2 / 1e3,
            costs.1,
            costs.0,
            costs.2
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_and_invalid_ones_refused() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let options = parse(&words("--storage tmpfs --depths 1,4096 --mixes 50/50"), true).expect("options");
        assert_eq!((options.storage, options.depths), (vec![Storage::Tmpfs], vec![1, 1024]));
        assert_eq!((options.mixes, options.json), (vec![Mix::Half], true));
        for wrong in ["--depths 0", "--storage disk", "--what 1", "--rounds"] {
            assert!(parse(&words(wrong), false).is_err(), "{wrong}");
        }
    }
}
