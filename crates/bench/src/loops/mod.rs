//! `./x bench loop`: a comparison of block devices over files, on this kernel, as root.
//!
//! Every subject has its own image in one folder, with a file system on it, and is started once and stays.
//! A round runs the jobs and, within each, the subjects, beginning with another one every time. A figure is
//! the median of the rounds; a ratio is the median of the rounds' own ratios, which removes drift during a
//! run.

mod cgroups;
mod jobs;
mod report;
mod subjects;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::left_out::{self, LeftOut};
use crate::options::{chosen, command, count, each};
use jobs::{JOBS, Job, Sample};
use subjects::{Running, SUBJECTS, Subject};

/// All rounds of one job on one subject.
struct Row {
    subject: &'static str,
    job: &'static str,
    samples: Vec<Sample>,
}

struct Options {
    rounds: usize,
    seconds: u32,
    /// Bytes of each image.
    size: u64,
    folder: PathBuf,
    out: PathBuf,
    subjects: Vec<&'static Subject>,
    jobs: Vec<&'static Job>,
}

const USAGE: &str = "\
usage: ./x bench loop [OPTIONS]
  --rounds N       (5)     --seconds N  of each run (3)     --size MIB  of each image (1280)
  --dir PATH       where the images lie (/dev/shm)
  --out PATH       where loop.csv goes (target/bench)
  --subjects A,B   whose names begin so, =A: that one alone (all that are installed)
  --jobs A,B       likewise
";

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    command("loop", USAGE, arguments, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        rounds: 5,
        seconds: 3,
        size: 1280 << 20,
        folder: "/dev/shm".into(),
        out: "target/bench".into(),
        subjects: SUBJECTS.iter().collect(),
        jobs: JOBS.iter().collect(),
    };
    each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = count(name, value)? as usize,
            "--seconds" => options.seconds = count(name, value)?,
            "--size" => options.size = u64::from(count(name, value)?.max(512)) << 20,
            "--dir" => options.folder = value.into(),
            "--out" => options.out = value.into(),
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
    let mut running: Vec<Running> = Vec::new();
    let mut left_out: Vec<LeftOut> = Vec::new();
    for subject in &options.subjects {
        match subject.start(&options.folder, options.size) {
            Ok(one) => running.push(one),
            Err(error) => {
                eprintln!("{} is left out: {}", subject.name, error.0);
                left_out.push((subject.name.to_owned(), error.0));
            }
        }
    }
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..options.rounds {
        for job in &options.jobs {
            for turn in 0..running.len() {
                let one = &running[(turn + round) % running.len()];
                eprintln!("round {} of {}: {} on {}", round + 1, options.rounds, job.name, one.name);
                let sample = job.run(one, Duration::from_secs(options.seconds.into()))?;
                match rows.iter_mut().find(|row| row.subject == one.name && row.job == job.name) {
                    Some(row) => row.samples.push(sample),
                    None => rows.push(Row { subject: one.name, job: job.name, samples: vec![sample] }),
                }
            }
        }
        // The report is written after every round, so that an interrupted run leaves its finished rounds.
        std::fs::create_dir_all(&options.out).map_err(Error::at(&options.out))?;
        let csv = options.out.join("loop.csv");
        std::fs::write(&csv, report::csv(&rows)).map_err(Error::at(&csv))?;
        left_out::write(&csv, &left_out)?;
    }
    print!("{}", report::page(options, &running, &rows));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn subjects_and_jobs_are_selected_by_prefix() {
        let options = parsed("--subjects loop --jobs files-randrw --rounds 1").expect("valid");
        assert!(options.subjects.iter().all(|subject| subject.name.starts_with("loop")));
        assert_eq!((options.jobs.len(), options.rounds), (1, 1));
    }

    #[test]
    fn bad_options_are_refused() {
        for line in ["--rounds", "--rounds 0", "--no-such 1", "--jobs none"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
