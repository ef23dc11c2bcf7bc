//! `./x bench iscsi`: our iSCSI target compared with tgtd, in one run, round by round.
//!
//! For each storage all targets are started once and stay; each round runs the jobs and, in each job, the
//! targets, beginning with another one every time, so that drift affects all. The load is the lean initiator
//! ([`client`]). A figure is the median of the rounds; a ratio is the median of the rounds' own ratios.
//! iscsi-perf and fio's libiscsi engine, where installed, check the rates with other initiators. Bare round trips
//! ([`bare`]) show what the network and the wake-ups cost where one command is in flight.

mod bare;
mod client;
mod servers;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::figures::{median, ratio, spread};
use crate::options::{chosen, command, count, each, number};
use crate::{proc, realtime};
use client::{Load, Session};
use servers::{KINDS, Kind, STORAGES, Server, Site, Storage};

const USAGE: &str = "\
usage: ./x bench iscsi [OPTIONS]
  --rounds N       (5)      --seconds S   of each measurement (2)
  --storage NAMES  ram,file (both)
  --servers NAMES  blockyard,tgtd-rdwr,tgtd-aio (all that are installed)
  --depths LIST    commands in flight of each session (1,32,128)
  --sessions LIST  (1,4)
  --blocks LIST    bytes of each command (4096,131072)
  --mib N          size of the unit (256)
  --dir PATH       for files on a disk (target/bench/iscsi)
  --tmpfs PATH     for files in memory (/dev/shm)
  --no-realtime    beside everything else that runs, not ahead of it
";

/// Length of the idle measurement.
const IDLE: Duration = Duration::from_secs(3);

struct Options {
    rounds: usize,
    seconds: f64,
    storages: Vec<Storage>,
    servers: Vec<Kind>,
    depths: Vec<usize>,
    sessions: Vec<u16>,
    blocks: Vec<u32>,
    mib: u32,
    dir: PathBuf,
    tmpfs: PathBuf,
}

/// One load on all targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Job {
    writes: bool,
    block: u32,
    depth: usize,
    sessions: u16,
}

impl Job {
    fn name(self) -> String {
        let verb = if self.writes { "write" } else { "read" };
        format!("{verb} {} KiB, {} x {}", self.block >> 10, self.sessions, self.depth)
    }

    /// Returns whether one command is in flight in all.
    fn is_lone(self) -> bool {
        self.sessions == 1 && self.depth == 1
    }
}

/// The rounds of one job on one target.
#[derive(Default)]
struct Series {
    /// Commands a second.
    rate: Vec<f64>,
    /// Processor time of the target for each command, in microseconds.
    cpu_us: Vec<f64>,
}

/// Measurements besides the jobs.
struct Facts {
    kind: Kind,
    /// Processor time in ticks of 10 ms, and waits, of an idle target with a session, in [`IDLE`].
    idle_ticks: f64,
    idle_waits: u64,
    /// Latency in microseconds of a read that finds the target asleep.
    lone_us: f64,
    /// System calls for each 4 KiB read, and for each write, at depth 32; `None` without strace.
    calls: [Option<f64>; 2],
    /// Commands a second, as iscsi-perf and fio report them for 4 KiB reads at depth 32.
    iscsi_perf: Option<f64>,
    fio: Option<f64>,
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let others: Vec<String> = arguments.iter().filter(|word| *word != "--no-realtime").cloned().collect();
    if others.len() == arguments.len() && !arguments.iter().any(|word| word == "--help") {
        realtime::enter("iscsi", arguments);
    }
    command("iscsi", USAGE, &others, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        rounds: 5,
        seconds: 2.0,
        storages: STORAGES.to_vec(),
        servers: KINDS.to_vec(),
        depths: vec![1, 32, 128],
        sessions: vec![1, 4],
        blocks: vec![4096, 131_072],
        mib: 256,
        dir: PathBuf::from("target/bench/iscsi"),
        tmpfs: PathBuf::from("/dev/shm"),
    };
    each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = count(name, value)? as usize,
            "--seconds" => options.seconds = number(name, value)?,
            "--storage" => options.storages = chosen(name, value, &STORAGES, |one| one.name())?,
            "--servers" => options.servers = chosen(name, value, &KINDS, |one| one.name())?,
            "--depths" => options.depths = list(name, value)?,
            "--sessions" => options.sessions = list(name, value)?,
            "--blocks" => options.blocks = list(name, value)?,
            "--mib" => options.mib = count(name, value)?,
            "--dir" => options.dir = value.into(),
            "--tmpfs" => options.tmpfs = value.into(),
            _ => return Err(Error(format!("no such option: {name}"))),
        }
        Ok(())
    })?;
    let is_block = |block: &u32| block.is_multiple_of(512) && (512..=8 << 20).contains(block);
    if !options.blocks.iter().all(is_block) {
        return Err(Error("--blocks: multiples of 512 up to 8388608".into()));
    }
    if options.depths.contains(&0) || options.sessions.contains(&0) {
        return Err(Error("--depths, --sessions: numbers from 1".into()));
    }
    if find("tgtd").is_none() {
        eprintln!("tgtd is not installed: left out (tgt)");
        options.servers.retain(|kind| *kind == Kind::Blockyard);
    }
    Ok(options)
}

fn list<T: std::str::FromStr>(name: &str, value: &str) -> Result<Vec<T>> {
    value.split(',').map(|word| number(name, word)).collect()
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

fn jobs(options: &Options) -> Vec<Job> {
    let mut jobs = Vec::new();
    for &block in &options.blocks {
        for writes in [false, true] {
            for &sessions in &options.sessions {
                for &depth in &options.depths {
                    jobs.push(Job { writes, block, depth, sessions });
                }
            }
        }
    }
    jobs
}

fn run(options: &Options) -> Result<()> {
    let own = format!("blockyard-iscsi.{}", std::process::id());
    let site = Site { tmpfs: options.tmpfs.join(&own), disk: options.dir.join(&own), mib: options.mib };
    for folder in [&site.tmpfs, &site.disk] {
        std::fs::create_dir_all(folder).map_err(Error::at(folder))?;
    }
    let measured = options.storages.iter().try_for_each(|storage| measure(options, &site, *storage));
    // The targets have exited by now.
    for folder in [&site.tmpfs, &site.disk] {
        let _ = std::fs::remove_dir_all(folder);
    }
    measured
}

fn measure(options: &Options, site: &Site, storage: Storage) -> Result<()> {
    let mut servers = Vec::new();
    for &kind in &options.servers {
        let server = Server::start(kind, storage, site)?;
        // An unmeasured write allocates the pages, so that reads find data instead of holes.
        let fill = Job { writes: true, block: 131_072, depth: 8, sessions: 1 };
        match load(&server, fill, 1.0, 0, |_| Ok(())) {
            Ok(_) => servers.push(server),
            // tgtd opens its file with O_DIRECT, which not every file system supports.
            Err(error) => eprintln!("{} {}: left out: {}", storage.name(), kind.name(), error.0),
        }
    }
    let jobs = jobs(options);
    let mut series: Vec<Vec<Series>> =
        jobs.iter().map(|_| servers.iter().map(|_| Series::default()).collect()).collect();
    let mut bare: Vec<Option<Series>> = jobs.iter().map(|job| job.is_lone().then(Series::default)).collect();
    for round in 0..options.rounds {
        for ((job, row), bare) in jobs.iter().zip(&mut series).zip(&mut bare) {
            if let Some(bare) = bare {
                let (rate, cpu_us) = bare::round_trips(job.block, job.writes, options.seconds)
                    .map_err(|why| Error(format!("bare round trips: {why}")))?;
                bare.rate.push(rate);
                bare.cpu_us.push(cpu_us);
            }
            for turn in 0..servers.len() {
                let at = (turn + round) % servers.len();
                eprint!(
                    "\r\x1b[K{} round {}: {}, {}",
                    storage.name(),
                    round + 1,
                    job.name(),
                    servers[at].kind.name()
                );
                let (rate, cpu_us) = load(&servers[at], *job, options.seconds, round as u64, |_| Ok(()))?;
                row[at].rate.push(rate);
                row[at].cpu_us.push(cpu_us);
            }
        }
    }
    eprint!("\r\x1b[K");
    println!("{}", table(storage, &jobs, &servers, &series));
    println!("{}", bare_table(&jobs, &servers, &series, &bare));
    let facts: Result<Vec<Facts>> = servers.iter().map(facts).collect();
    println!("{}", facts_table(storage, &facts?));
    Ok(())
}

/// Runs a job on a target for some seconds, and meanwhile calls `meanwhile` with the count of completed
/// commands. Returns the rate, and the target's processor time for each command in microseconds.
fn load(
    server: &Server,
    job: Job,
    seconds: f64,
    seed: u64,
    meanwhile: impl FnOnce(&dyn Fn() -> u64) -> Result<()>,
) -> Result<(f64, f64)> {
    let failed = |error: std::io::Error| Error(format!("{}: {}: {error}", server.kind.name(), job.name()));
    let sessions: std::io::Result<Vec<Session>> =
        (0..job.sessions).map(|number| Session::open(&server.url, number)).collect();
    let sessions = sessions.map_err(failed)?;
    let stop = AtomicBool::new(false);
    let counts: Vec<Count> = sessions.iter().map(|_| Count::default()).collect();
    let finished = || counts.iter().map(|count| count.0.load(Ordering::Relaxed)).sum::<u64>();
    let cpu = || proc::cpu_of_threads(server.pid()).map_err(failed);
    std::thread::scope(|scope| {
        let threads: Vec<_> = sessions
            .into_iter()
            .zip(&counts)
            .enumerate()
            .map(|(number, (session, count))| {
                let seed = seed * 100 + number as u64 + 1;
                let load = Load { writes: job.writes, block: job.block, depth: job.depth, seed };
                let stop = &stop;
                scope.spawn(move || session.run(load, stop, &count.0))
            })
            .collect();
        // The first commands, which find cold caches and a sleeping target, are not measured.
        std::thread::sleep(Duration::from_millis(100));
        let measured = (|| {
            let (started, before, cpu_before) = (Instant::now(), finished(), cpu()?);
            meanwhile(&finished)?;
            std::thread::sleep(Duration::from_secs_f64(seconds).saturating_sub(started.elapsed()));
            let requests = (finished() - before) as f64;
            let used = cpu()?.saturating_sub(cpu_before);
            Ok((requests / started.elapsed().as_secs_f64(), used.as_secs_f64() * 1e6 / requests.max(1.0)))
        })();
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| Error("a session's thread panicked".into()))?.map_err(failed)?;
        }
        measured
    })
}

/// A counter on its own cache line.
#[derive(Default)]
#[repr(align(128))]
struct Count(AtomicU64);

fn facts(server: &Server) -> Result<Facts> {
    let failed = |error: std::io::Error| Error(format!("{}: {error}", server.kind.name()));
    let mut session = Session::open(&server.url, 0).map_err(failed)?;
    std::thread::sleep(Duration::from_millis(500));
    let before =
        (proc::cpu_of_process(server.pid()).map_err(failed)?, proc::waits(server.pid()).map_err(failed)?);
    std::thread::sleep(IDLE);
    let cpu = proc::cpu_of_process(server.pid()).map_err(failed)?.saturating_sub(before.0);
    let idle_waits = proc::waits(server.pid()).map_err(failed)?.saturating_sub(before.1);
    let mut lone = Vec::new();
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(5));
        let sent = Instant::now();
        session.read_once().map_err(failed)?;
        lone.push(sent.elapsed().as_secs_f64() * 1e6);
    }
    drop(session);
    let mut calls = [None; 2];
    for (writes, calls) in [false, true].into_iter().zip(&mut calls) {
        let job = Job { writes, block: 4096, depth: 32, sessions: 1 };
        load(server, job, 1.0, 7, |finished| {
            *calls = calls_by_strace(server.pid(), finished);
            Ok(())
        })?;
    }
    Ok(Facts {
        kind: server.kind,
        idle_ticks: cpu.as_secs_f64() * 100.0,
        idle_waits,
        lone_us: median(&lone),
        calls,
        iscsi_perf: iscsi_perf(&server.url),
        fio: fio(&server.url),
    })
}

/// Returns calls per command by strace's summary, whose last line is the total.
fn calls_by_strace(pid: u32, finished: &dyn Fn() -> u64) -> Option<f64> {
    let before = finished();
    let output = Command::new("timeout")
        .args(["--signal=INT", "2", "strace", "-c", "-f", "-U", "calls,name", "-p", &pid.to_string()])
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let requests = finished() - before;
    let text = String::from_utf8_lossy(&output.stderr);
    let total = text.lines().find(|line| line.trim_end().ends_with(" total"))?;
    let calls: f64 = total.split_whitespace().next()?.parse().ok()?;
    Some(calls / requests as f64)
}

/// Returns the rate of iscsi-perf: random reads of eight blocks, 32 in flight, for two seconds.
fn iscsi_perf(url: &str) -> Option<f64> {
    let words = ["--max", "32", "--blocks", "8", "--runtime", "2", "--random", url];
    let output = Command::new("iscsi-perf").args(words).stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // finished: iops average 123 (4 MB/s)
    let (_, rest) = text.rsplit_once("iops average ")?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Returns the rate of fio's libiscsi engine; `None` where this fio has none.
fn fio(url: &str) -> Option<f64> {
    let file = format!("--filename={}", url.replace(':', "\\:"));
    let words = ["--name=job", "--ioengine=libiscsi", "--rw=randread", "--bs=4k", "--iodepth=32"];
    let more = ["--runtime=2", "--time_based", "--output-format=json", &file];
    let output = Command::new("fio").args(words).args(more).stdin(Stdio::null()).output().ok()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    report["jobs"][0]["read"]["iops"].as_f64().filter(|rate| *rate > 0.0)
}

fn table(storage: Storage, jobs: &[Job], servers: &[Server], series: &[Vec<Series>]) -> String {
    let mut text = format!(
        "### {}\n\n| job | target | IOPS | least to greatest | CPU us | IOPS to ours | CPU to ours |\n",
        storage.name()
    );
    text.push_str("|---|---|---|---|---|---|---|\n");
    for (job, row) in jobs.iter().zip(series) {
        for (server, own) in servers.iter().zip(row) {
            let (least, rate, greatest) = spread(&own.rate);
            let _ = write!(
                text,
                "| {} | {} | {rate:.0} | {least:.0} to {greatest:.0} | {:.2} |",
                job.name(),
                server.kind.name(),
                median(&own.cpu_us)
            );
            match row.first().filter(|_| servers.first().is_some_and(|first| first.kind == Kind::Blockyard)) {
                Some(ours) => {
                    let (rates, cpus) = (ratio(&own.rate, &ours.rate), ratio(&own.cpu_us, &ours.cpu_us));
                    let _ = writeln!(text, " {rates:.2} | {cpus:.2} |");
                }
                None => text.push_str(" | |\n"),
            }
        }
    }
    text
}

/// Returns the table of bare round trips; empty if no job has one command in flight.
fn bare_table(jobs: &[Job], servers: &[Server], series: &[Vec<Series>], bare: &[Option<Series>]) -> String {
    let mut text = String::new();
    for ((job, row), bare) in jobs.iter().zip(series).zip(bare) {
        let Some(bare) = bare else { continue };
        if text.is_empty() {
            text.push_str("### Bare TCP round trips\n\n| job | a second | least to greatest | CPU us | targets to it |\n");
            text.push_str("|---|---|---|---|---|\n");
        }
        let (least, rate, greatest) = spread(&bare.rate);
        let (name, cpu) = (job.name(), median(&bare.cpu_us));
        let _ = write!(text, "| {name} | {rate:.0} | {least:.0} to {greatest:.0} | {cpu:.2} |");
        for (server, own) in servers.iter().zip(row) {
            let _ = write!(text, " {} {:.2}", server.kind.name(), ratio(&own.rate, &bare.rate));
        }
        text.push_str(" |\n");
    }
    text
}

fn facts_table(storage: Storage, facts: &[Facts]) -> String {
    let mut text = format!(
        "### {}: besides\n\n| target | idle ticks | idle waits | lone read, us | calls a read | calls a write | iscsi-perf | fio |\n",
        storage.name()
    );
    text.push_str("|---|---|---|---|---|---|---|---|\n");
    let shown =
        |value: Option<f64>, places: usize| value.map_or("-".into(), |value| format!("{value:.places$}"));
    for one in facts {
        let _ = writeln!(
            text,
            "| {} | {:.0} | {} | {:.0} | {} | {} | {} | {} |",
            one.kind.name(),
            one.idle_ticks,
            one.idle_waits,
            one.lone_us,
            shown(one.calls[0], 2),
            shown(one.calls[1], 2),
            shown(one.iscsi_perf, 0),
            shown(one.fio, 0),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn jobs_are_all_combinations() {
        let options = parsed("--depths 1,8 --blocks 4096 --sessions 1,2,4").expect("it is valid");
        assert_eq!(jobs(&options).len(), 12);
        assert_eq!(jobs(&options)[0].name(), "read 4 KiB, 1 x 1");
    }

    #[test]
    fn bad_options_are_refused() {
        for line in ["--blocks 100", "--depths 0", "--sessions", "--no-such 1", "--servers lio"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
