//! `./x bench nbd`: our NBD server compared with others, in one run, round by round.
//!
//! For each storage all servers are started once and stay; each round runs the jobs and, in each job, the
//! servers, beginning with another one every time, so that drift affects all. A figure is the median of the
//! rounds with its least and greatest; a ratio is the median of the rounds' own ratios. The run warns when
//! other programs kept the machine busy. It leaves only the report.

pub(crate) mod client;
mod facts;
mod jobs;
mod options;
mod report;
mod servers;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::error::{Error, Result};
use crate::figures::median;
use crate::realtime;
use jobs::{Job, Pressure, Sample};
use options::Options;
use servers::{Kind, Server, Site, Storage};

/// All rounds of one job on one server.
struct Series {
    storage: Storage,
    job: &'static Job,
    kind: Kind,
    samples: Vec<Sample>,
}

/// Runs `./x bench nbd` with these arguments.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let options = match Options::parse(arguments) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{}", options::help());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("bench nbd: {}\n\n{}", error.0, options::help());
            return ExitCode::from(2);
        }
    };
    if options.realtime {
        realtime::enter("nbd", arguments);
    }
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench nbd: {}", error.0);
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let site = options.site()?;
    let result = measure(options, &site);
    // The servers have exited by now, so their files can be removed.
    let _ = std::fs::remove_dir_all(&site.tmpfs);
    let _ = std::fs::remove_dir_all(&site.disk);
    let (series, facts) = result?;
    let report = report::Report { options, series: &series, facts: &facts, realtime: realtime::is_on() };
    println!("{}", report.table());
    report.write(&options.out)?;
    println!("written: {0}/nbd.csv {0}/nbd.json {0}/nbd.md", options.out.display());
    Ok(())
}

fn measure(options: &Options, site: &Site) -> Result<(Vec<Series>, Vec<facts::Facts>)> {
    announce(options);
    let data = site.tmpfs.join("data");
    fill(&data, site.size, options.seed)?;
    let (mut series, mut facts) = (Vec::new(), Vec::new());
    for storage in &options.storages {
        let kinds: Vec<Kind> = options.servers.iter().copied().filter(|kind| kind.serves(*storage)).collect();
        if options.with_facts {
            for kind in &kinds {
                progress(&format!(
                    "{} {}: start, memory, wake-ups, system calls",
                    storage.name(),
                    kind.name()
                ));
                facts.push(facts::gather(*kind, *storage, site, &options.pressure())?);
            }
        }
        series.extend(rounds(options, site, *storage, &kinds, &data)?);
    }
    progress("");
    Ok((series, facts))
}

/// Prints the expected duration: rounds of the given length, half a second around each, and the time for the
/// facts.
fn announce(options: &Options) {
    const FACTS_SECONDS: f64 = 14.0;
    let pairs = |storage: &Storage| options.servers.iter().filter(|kind| kind.serves(*storage)).count();
    let servers: usize = options.storages.iter().map(pairs).sum();
    let rounds = (options.rounds * options.jobs.len()) as f64 * (options.seconds + 0.5);
    let facts = if options.with_facts { FACTS_SECONDS } else { 0.0 };
    eprintln!("about {:.0} min", (servers as f64 * (rounds + facts) / 60.0).ceil());
}

/// Runs all rounds over one storage.
fn rounds(
    options: &Options,
    site: &Site,
    storage: Storage,
    kinds: &[Kind],
    data: &Path,
) -> Result<Vec<Series>> {
    let servers: Vec<Server> =
        kinds.iter().map(|kind| Server::start(*kind, storage, site)).collect::<Result<_>>()?;
    let mut series: Vec<Series> = options
        .jobs
        .iter()
        .flat_map(|job| {
            kinds.iter().map(move |kind| Series { storage, job, kind: *kind, samples: Vec::new() })
        })
        .collect();
    // An unmeasured copy allocates the pages, so that later reads find data instead of holes.
    for server in &servers {
        progress(&format!("{} {}: filling", storage.name(), server.kind.name()));
        jobs::run(&jobs::FILL, server, &options.pressure(), data)?;
    }
    for round in 0..options.rounds {
        for (index, job) in options.jobs.iter().enumerate() {
            for turn in 0..servers.len() {
                let at = (turn + round) % servers.len();
                let name = servers[at].kind.name();
                progress(&format!("{} {} round {}: {name}", storage.name(), job.name, round + 1));
                let pressure = Pressure { seed: options.seed + round as u64, ..options.pressure() };
                series[index * servers.len() + at].samples.push(jobs::run(
                    job,
                    &servers[at],
                    &pressure,
                    data,
                )?);
            }
        }
    }
    Ok(series)
}

/// Prints the progress on a terminal, over the previous line.
fn progress(what: &str) {
    use std::io::IsTerminal;
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        // Errors are ignored: a closed terminal does not stop the measurement.
        let _ = write!(stderr, "\r\x1b[K{what}");
    }
}

/// Fills a file with data that has no holes and cannot be compressed.
fn fill(path: &Path, size: u64, seed: u64) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let block: Vec<u8> = (0..(1 << 20) / 8).flat_map(|_| random.u64(..).to_le_bytes()).collect();
    let mut file = File::create(path).map_err(Error::at(path))?;
    let mut left = size;
    while left > 0 {
        let length = left.min(block.len() as u64);
        file.write_all(&block[..length as usize]).map_err(Error::at(path))?;
        left -= length;
    }
    Ok(())
}
