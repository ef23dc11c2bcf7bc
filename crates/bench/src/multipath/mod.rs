//! `./x bench multipath`: the cost of multipath, from outside and inside, compared with a version with one
//! mutex around its state.
//! Four parts: devices of the program under load from outside; their stacks, and variants with a lock,
//! behind a server of the harness's own; the stacks alone, inside one process; and one or two NBD servers,
//! behind multipath and without it. Figures are medians of rounds with the least and the greatest; ratios
//! are medians of the rounds' own ratios.

mod inside;
mod outside;
mod report;
mod served;
mod stacks;
mod stores;

pub(crate) use stacks::{Selector, Shared, Subject, selector_arguments};
pub(crate) use stores::check as check_stores;

use crate::realtime;
use outside::{Backs, Server, Site};
use report::Report;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "\
usage: ./x bench multipath [OPTIONS], or --stores alone: whether requests write what queues share (valgrind)
  --rounds N       (5)     --seconds S  of each load from outside (0.5)
  --parts A,B      of: outside, mutex, inside, servers (all)
  --dir PATH       where sockets lie (a new folder in /dev/shm)
  --csv FILE       a line for each measurement
  --no-realtime    beside everything else that runs, not ahead of it
";

#[derive(Debug)]
struct Options {
    rounds: usize,
    seconds: f64,
    parts: Vec<String>,
    folder: Option<PathBuf>,
    csv: Option<PathBuf>,
    realtime: bool,
}

const PARTS: [&str; 4] = ["outside", "mutex", "inside", "servers"];

fn parse(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options {
        rounds: 5,
        seconds: 0.5,
        parts: PARTS.map(str::to_owned).into(),
        folder: None,
        csv: None,
        realtime: true,
    };
    let mut arguments = arguments.iter();
    while let Some(word) = arguments.next() {
        if word == "--no-realtime" {
            options.realtime = false;
            continue;
        }
        let value = arguments.next().ok_or_else(|| format!("{word} needs a value"))?;
        let wrong = || format!("{word} {value} makes no sense");
        match word.as_str() {
            "--rounds" => {
                options.rounds = value.parse().ok().filter(|&rounds| rounds > 0).ok_or_else(wrong)?;
            }
            "--seconds" => {
                options.seconds =
                    value.parse().ok().filter(|seconds| (0.05..=60.0).contains(seconds)).ok_or_else(wrong)?;
            }
            "--parts" => {
                options.parts = value.split(',').map(str::to_owned).collect();
                if options.parts.iter().any(|part| !PARTS.contains(&part.as_str())) {
                    return Err(wrong());
                }
            }
            "--dir" => options.folder = Some(value.into()),
            "--csv" => options.csv = Some(value.into()),
            _ => return Err(format!("no such option: {word}")),
        }
    }
    Ok(options)
}

/// Returns the numbers of threads to measure on this number of processors: the powers of two up to it.
fn thread_counts(processors: usize) -> Vec<u16> {
    (0..=6).map(|bit| 1u16 << bit).filter(|&count| count == 1 || usize::from(count) <= processors).collect()
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    if arguments.first().is_some_and(|word| word == "--serve") {
        return ended(outside::serve(arguments));
    }
    match arguments {
        [word, selector] if word == "--stores-of" => return ended(stores::child(selector)),
        [word] if word == "--stores" => return ended(stores::check()),
        _ => {}
    }
    if arguments.iter().any(|word| word == "--help") {
        print!("{USAGE}");
        return ExitCode::SUCCESS;
    }
    let options = match parse(arguments) {
        Ok(options) => options,
        Err(why) => {
            eprintln!("bench multipath: {why}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if options.realtime {
        realtime::enter("multipath", arguments);
    }
    ended(run(&options))
}

fn ended(result: std::io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench multipath: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> std::io::Result<()> {
    let folder = options.folder.clone();
    let folder =
        folder.unwrap_or_else(|| format!("/dev/shm/blockyard-multipath.{}", std::process::id()).into());
    std::fs::create_dir_all(&folder)?;
    let own = std::env::current_exe()?;
    let blockyard =
        std::env::var_os("BLOCKYARD_BIN").map_or_else(|| own.with_file_name("blockyard"), PathBuf::from);
    let site = Site { folder, blockyard };
    let result = measure(options, &site);
    // The servers have exited by now, so their files can be removed.
    let _ = std::fs::remove_dir_all(&site.folder);
    let report = result?;
    print!("{}", report.page());
    options.csv.as_ref().map_or(Ok(()), |path| std::fs::write(path, report.csv()))
}

fn measure(options: &Options, site: &Site) -> std::io::Result<Report> {
    let began = Instant::now();
    let wants = |part: &str| options.parts.iter().any(|wanted| wanted == part);
    let threads = thread_counts(std::thread::available_parallelism().map_or(1, usize::from));
    let mut report = Report::new(options.rounds, options.seconds, realtime::is_on());
    let outside = |servers: &[Server]| {
        let one = |&threads: &u16| outside::measure(site, servers, threads, options.rounds, options.seconds);
        threads.iter().map(one).collect::<std::io::Result<Vec<_>>>()
    };
    if wants("outside") {
        let free = Subject::all().into_iter().filter(|subject| !matches!(subject, Subject::Locked(..)));
        report.outside = outside(&free.map(Server::Ours).collect::<Vec<_>>())?;
    }
    if wants("mutex") {
        let four = |subject: &Subject| match subject {
            Subject::Raw => true,
            Subject::Free(selector, paths) | Subject::Locked(selector, paths) => {
                Selector::SEEDS.contains(selector) && *paths == 4
            }
        };
        report.mutex =
            outside(&Subject::all().into_iter().filter(four).map(Server::Own).collect::<Vec<_>>())?;
    }
    if wants("inside") {
        // These rounds are short, so there are more of them.
        report.inside = inside::measure(&Subject::all(), &threads, 2 * options.rounds - 1);
    }
    if wants("servers") {
        report.servers = outside(&[
            Server::Direct,
            Server::Behind(Selector::RoundRobin, Backs::One),
            Server::Behind(Selector::RoundRobin, Backs::Twice),
            Server::Behind(Selector::RoundRobin, Backs::Two),
            Server::Behind(Selector::QueueLength, Backs::Two),
        ])?;
    }
    report.took_s = began.elapsed().as_secs();
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_parsed_and_invalid_ones_refused() {
        let options = parsed("--rounds 3 --seconds 0.2 --parts inside,servers").expect("valid");
        assert_eq!((options.rounds, options.parts.len(), options.seconds), (3, 2, 0.2));
        for line in ["--rounds", "--rounds 0", "--seconds 0", "--parts none", "--speed 1"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn threads_are_doubled_up_to_the_processors() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(12), [1, 2, 4, 8]);
        assert_eq!(thread_counts(500).last(), Some(&64));
    }

    #[test]
    fn several_threads_share_each_subject() {
        for series in inside::measure(&[Subject::Raw, Subject::Locked(Selector::QueueLength, 4)], &[2], 1) {
            assert!(series.mega_iops[0] > 0.0 && series.cpu_ns.len() == 1, "{}", series.subject.name());
        }
    }
}
