//! `./x bench ublk`: a comparison of block devices, in one guest.
//!
//! Each round runs the subjects, beginning with another one every time. Each subject is attached, runs the
//! jobs and is detached before the next one, so that none pays for another's memory or threads. A figure is
//! the median of the rounds with the least and the greatest; a ratio is the median of the rounds' own
//! ratios. It creates devices and file systems, so it runs in a guest only: `./x bench ublk` boots one for
//! it.

mod iscsi;
mod jobs;
mod multipath;
mod report;
mod spdk;
mod subjects;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::figures::median;
use crate::left_out;
use crate::options::{chosen, command, count, each};
use jobs::{JOBS, Job};
use subjects::{SUBJECTS, Site, Subject};

/// All rounds of one job on one subject.
struct Row {
    subject: &'static Subject,
    job: &'static str,
    samples: Vec<jobs::Sample>,
}

/// Times of one subject's attach and detach, in each round.
#[derive(Default)]
struct Life {
    attach: Vec<Duration>,
    detach: Vec<Duration>,
    facts: String,
    /// The reason why the subject has no further rounds; `None` while it has.
    over: Option<String>,
}

/// The options of the command line.
struct Options {
    rounds: usize,
    seconds: u32,
    site: Site,
    subjects: Vec<&'static Subject>,
    jobs: Vec<&'static Job>,
}

const USAGE: &str = "\
usage: ./x bench ublk [OPTIONS]
  --rounds N       (3)     --seconds N  of each run (2)     --size MIB  of each device (256)
  --queues N       of each server (1)
  --subjects A,B   whose names begin so, =A: that one alone (all)
  --jobs A,B       likewise
";

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    command("ublk", USAGE, arguments, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let site = Site { folder: "/tmp".into(), size: 256 << 20, queues: 1 };
    let (subjects, jobs) = (SUBJECTS.iter().collect(), JOBS.iter().collect());
    let mut options = Options { rounds: 3, seconds: 2, site, subjects, jobs };
    each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = count(name, value)? as usize,
            "--seconds" => options.seconds = count(name, value)?,
            "--size" => options.site.size = u64::from(count(name, value)?) << 20,
            "--queues" => options.site.queues = count(name, value)?,
            "--subjects" => {
                options.subjects = chosen(name, value, &options.subjects, |subject| subject.name)?;
            }
            "--jobs" => options.jobs = chosen(name, value, &options.jobs, |job| job.name)?,
            _ => return Err(Error(format!("no such option: {name}"))),
        }
        Ok(())
    })?;
    Ok(options)
}

fn run(options: &Options) -> Result<()> {
    if !Path::new("/job").is_dir() {
        return Err(Error("not in a guest (what to do: ./x bench ublk)".into()));
    }
    let pairs =
        options.jobs.iter().flat_map(|job| options.subjects.iter().map(move |subject| (job, subject)));
    let mut rows: Vec<Row> =
        pairs.map(|(job, subject)| Row { subject, job: job.name, samples: Vec::new() }).collect();
    let mut lives: Vec<Life> = options.subjects.iter().map(|_| Life::default()).collect();
    for round in 0..options.rounds {
        for turn in 0..options.subjects.len() {
            let at = (turn + round) % options.subjects.len();
            if lives[at].over.is_some() {
                continue;
            }
            let subject = options.subjects[at];
            eprintln!("round {} of {}: {}", round + 1, options.rounds, subject.name);
            if let Err(error) = visit(options, subject, &mut lives[at], &mut rows) {
                lives[at].over = Some(error.0);
            }
        }
    }
    print(options, &rows, &lives);
    let out = Path::new("/out/ublk.csv");
    std::fs::write(out, report::csv(&rows)).map_err(Error::at(out))?;
    let over = |(subject, life): (&&Subject, &Life)| Some((subject.name.to_owned(), life.over.clone()?));
    left_out::write(out, &options.subjects.iter().zip(&lives).filter_map(over).collect::<Vec<_>>())
}

/// Runs one subject's part of a round.
fn visit(options: &Options, subject: &'static Subject, life: &mut Life, rows: &mut [Row]) -> Result<()> {
    let device = subject.start(&options.site)?;
    life.attach.push(device.attach);
    life.facts = jobs::facts(&device);
    let mut samples = Vec::new();
    for job in options.jobs.iter().filter(|job| subject.keeps || !job.needs_files()) {
        samples.push((job.name, job.run(&device, &options.site, options.seconds)?));
    }
    // A round counts once all its jobs are done, so that rows have the same rounds and can be compared. A
    // device that cannot be removed afterwards keeps its figures.
    for (job, sample) in samples {
        let row = rows.iter_mut().find(|row| row.subject.name == subject.name && row.job == job);
        row.into_iter().for_each(|row| row.samples.push(sample));
    }
    life.detach.push(device.stop()?);
    Ok(())
}

fn print(options: &Options, rows: &[Row], lives: &[Life]) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "Linux {}, {cpus} processors, {} rounds of {} s, devices of {} MiB, {} queues; us of processor time a request",
        release.trim(),
        options.rounds,
        options.seconds,
        options.site.size >> 20,
        options.site.queues
    );
    for job in &options.jobs {
        println!("\n{}", report::table(job.name, rows));
    }
    println!("\n{:16} {:>10} {:>10}", "ms", "attach", "detach");
    let middle =
        |times: &[Duration]| median(&times.iter().map(|time| time.as_secs_f64() * 1e3).collect::<Vec<_>>());
    for (subject, life) in options.subjects.iter().zip(lives) {
        if !life.detach.is_empty() {
            let (attach, detach) = (middle(&life.attach), middle(&life.detach));
            println!("{:16} {attach:10.1} {detach:10.1}   {}", subject.name, life.facts);
        }
        if let Some(why) = &life.over {
            println!("{:16} no more after {} rounds: {why}", subject.name, life.attach.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn subjects_and_jobs_are_selected_by_prefix() {
        let options = parsed("--subjects rublk,null_blk --jobs randread-1 --size 64").expect("valid");
        assert!(
            options
                .subjects
                .iter()
                .all(|subject| subject.name.starts_with("rublk") || subject.name == "null_blk")
        );
        assert_eq!(options.jobs.len(), 1);
        assert_eq!(options.site.size, 64 << 20);
    }

    #[test]
    fn bad_options_are_refused() {
        for line in ["--rounds", "--rounds 0", "--no-such 1", "--jobs none"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
