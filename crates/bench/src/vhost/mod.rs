//! `./x bench vhost`: our vhost-user export compared with that of qemu-storage-daemon, in one run, round by round.
//!
//! The load is the lean front-end ([`FrontEnd`]): virtqueues in shared memory, one thread for each, without
//! a virtual machine. It waits for interrupts like a guest, or polls. Each round runs the jobs and, in each
//! job, the servers, beginning with another one every time. A figure is the median of the rounds; a ratio
//! is the median of the rounds' own ratios.

mod servers;

use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blockyard_tests::vhost_user::{FrontEnd, Queue, await_event, event};
use virtio::blk::{Kind as Request, S_OK};

use crate::error::{Error, Result};
use crate::figures::{median, ratio, spread};
use crate::options::{chosen, command, count, each, number};
use crate::{proc, realtime};
use servers::{KINDS, Kind, STORAGES, Server, Site, Storage};

const USAGE: &str = "\
usage: ./x bench vhost [OPTIONS]
  --rounds N       (5)      --seconds S   of each measurement (1)
  --storage NAMES  null,ram,file (all); file is in memory
  --servers NAMES  blockyard,blockyard-adaptive,blockyard-poll,qsd,qsd-zeroes (all that are installed)
  --depths LIST    requests in flight of each virtqueue (1,32,128)
  --queues LIST    virtqueues (1,2)
  --tmpfs PATH     for files in memory (/dev/shm)
";

/// Bytes of a request.
const BLOCK: u32 = 4096;
/// Size of the device in MiB.
const MIB: u32 = 256;
/// Length of the idle measurement.
const IDLE: Duration = Duration::from_secs(2);
/// Round trips of the comparison with bare eventfds.
const ROUND_TRIPS: u32 = 20_000;

struct Options {
    rounds: usize,
    seconds: f64,
    storages: Vec<Storage>,
    servers: Vec<Kind>,
    depths: Vec<u16>,
    queues: Vec<u16>,
    tmpfs: PathBuf,
}

/// A load.
#[derive(Clone, Copy)]
struct Job {
    writes: bool,
    depth: u16,
    queues: u16,
}

impl Job {
    fn name(self) -> String {
        let what = if self.writes { "write" } else { "read" };
        format!("{what}, {} x {}", self.queues, self.depth)
    }
}

/// The figures of a server in a job, a value for each round.
#[derive(Default)]
struct Series {
    rate: Vec<f64>,
    cpu_us: Vec<f64>,
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    realtime::enter("vhost", arguments);
    command("vhost", USAGE, arguments, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        rounds: 5,
        seconds: 1.0,
        storages: STORAGES.to_vec(),
        servers: KINDS.to_vec(),
        depths: vec![1, 32, 128],
        queues: vec![1, 2],
        tmpfs: PathBuf::from("/dev/shm"),
    };
    each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = count(name, value)? as usize,
            "--seconds" => options.seconds = number(name, value)?,
            "--storage" => options.storages = chosen(name, value, &STORAGES, |one| one.name())?,
            "--servers" => options.servers = chosen(name, value, &KINDS, |one| one.name())?,
            "--depths" => options.depths = list(name, value)?,
            "--queues" => options.queues = list(name, value)?,
            "--tmpfs" => options.tmpfs = value.into(),
            _ => return Err(Error(format!("no such option: {name}"))),
        }
        Ok(())
    })?;
    if options.depths.iter().any(|depth| !(1..=256).contains(depth)) {
        return Err(Error("--depths: numbers from 1 to 256".into()));
    }
    if options.queues.iter().any(|queues| !(1..=16).contains(queues)) {
        return Err(Error("--queues: numbers from 1 to 16".into()));
    }
    if !servers::has_qemu() {
        eprintln!("qemu-storage-daemon is not installed: left out (qemu-system-common)");
        options.servers.retain(|kind| !kind.is_qemu());
    }
    Ok(options)
}

fn list(name: &str, value: &str) -> Result<Vec<u16>> {
    value.split(',').map(|word| number(name, word)).collect()
}

fn jobs(options: &Options) -> Vec<Job> {
    let mut jobs = Vec::new();
    for writes in [false, true] {
        for &queues in &options.queues {
            jobs.extend(options.depths.iter().map(|&depth| Job { writes, depth, queues }));
        }
    }
    jobs
}

fn run(options: &Options) -> Result<()> {
    let folder = options.tmpfs.join(format!("blockyard-vhost.{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
    let site =
        Site { folder: folder.clone(), mib: MIB, queues: options.queues.iter().copied().max().unwrap_or(1) };
    println!("eventfd round trip between two threads: {:.1} us\n", round_trip_us());
    let measured = options.storages.iter().try_for_each(|storage| measure(options, &site, *storage));
    // The servers have exited by now.
    let _ = std::fs::remove_dir_all(folder);
    measured
}

fn measure(options: &Options, site: &Site, storage: Storage) -> Result<()> {
    let kinds = options.servers.iter().filter(|kind| kind.has(storage));
    let servers = kinds.map(|kind| Server::start(*kind, storage, site)).collect::<Result<Vec<_>>>()?;
    let jobs = jobs(options);
    let mut series: Vec<Vec<Series>> =
        jobs.iter().map(|_| servers.iter().map(|_| Series::default()).collect()).collect();
    for server in &servers {
        // An unmeasured write allocates the pages, so that reads find data instead of holes.
        load(server, Job { writes: true, depth: 32, queues: 1 }, 0.5, 0)?;
    }
    for round in 0..options.rounds {
        for (job, row) in jobs.iter().zip(&mut series) {
            for turn in 0..servers.len() {
                let at = (turn + round) % servers.len();
                let (rate, cpu_us) = load(&servers[at], *job, options.seconds, round as u64 + 1)?;
                row[at].rate.push(rate);
                row[at].cpu_us.push(cpu_us);
            }
        }
    }
    println!("{}", table(storage, &jobs, &servers, &series));
    println!("{}", facts(storage, &servers)?);
    Ok(())
}

/// Runs a job on a server for some seconds. Returns the rate, and the server's processor time for each request in
/// microseconds.
fn load(server: &Server, job: Job, seconds: f64, seed: u64) -> Result<(f64, f64)> {
    let failed = |error: std::io::Error| Error(format!("{}: {}: {error}", server.kind.name(), job.name()));
    let memory = u64::from(job.queues) * (u64::from(job.depth) * 8192 + (1 << 20));
    let mut front = FrontEnd::connect(&server.socket, memory.next_multiple_of(1 << 21));
    // A chain has three descriptors.
    let size = (job.depth * 4).next_power_of_two().max(64);
    let queues: Vec<Queue> =
        (0..job.queues).map(|index| front.start_queue(index, size, job.depth, BLOCK)).collect();
    let stop = AtomicBool::new(false);
    let counts: Vec<Count> = queues.iter().map(|_| Count::default()).collect();
    let finished = || counts.iter().map(|count| count.0.load(Relaxed)).sum::<u64>();
    let cpu = || proc::cpu_of_threads(server.pid()).map_err(failed);
    let polls = server.kind.polls();
    let measured = std::thread::scope(|scope| {
        for (queue, count) in queues.into_iter().zip(&counts) {
            let stop = &stop;
            let seed = seed * 100 + u64::from(queue.index());
            scope.spawn(move || drive(queue, job, polls, seed, stop, &count.0));
        }
        // The first requests, which find cold caches and a sleeping server, are not measured.
        std::thread::sleep(Duration::from_millis(100));
        let measured = (|| {
            let (started, before, cpu_before) = (Instant::now(), finished(), cpu()?);
            std::thread::sleep(Duration::from_secs_f64(seconds));
            let requests = (finished() - before) as f64;
            let (time, used) = (started.elapsed(), cpu()?.saturating_sub(cpu_before));
            Ok((requests / time.as_secs_f64(), used.as_secs_f64() * 1e6 / requests.max(1.0)))
        })();
        stop.store(true, Relaxed);
        measured
    });
    drop(front);
    measured
}

/// Keeps a queue busy until `stop`.
fn drive(mut queue: Queue, job: Job, polls: bool, seed: u64, stop: &AtomicBool, finished: &AtomicU64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let blocks = u64::from(MIB) << 20 >> 12;
    let kind = if job.writes { Request::Write } else { Request::Read };
    let mut in_flight = 0u64;
    for slot in 0..job.depth {
        assert!(queue.add(slot, kind, random.u64(..blocks) * 8, BLOCK), "the queue has room for all slots");
        in_flight += 1;
    }
    if polls {
        queue.driver().suppress_interrupts();
    }
    queue.publish();
    let mut total = 0;
    while in_flight > 0 {
        let mut taken = 0;
        while let Some(completed) = queue.take() {
            assert_eq!(completed.status, S_OK);
            taken += 1;
            in_flight -= 1;
            if !stop.load(Relaxed) {
                assert!(queue.add(completed.slot, kind, random.u64(..blocks) * 8, BLOCK), "a slot is free");
                in_flight += 1;
            }
        }
        if taken > 0 {
            total += taken;
            finished.store(total, Relaxed);
            queue.publish();
        } else if polls {
            if total.is_multiple_of(1 << 14) {
                queue.driver().suppress_interrupts();
            }
            std::hint::spin_loop();
        } else if !queue.driver().enable_interrupts() {
            // The timeout only expires if the server has died.
            assert!(await_event(queue.call(), Duration::from_secs(10)), "no interrupt came");
        }
    }
}

/// A counter on its own cache line.
#[derive(Default)]
#[repr(align(128))]
struct Count(AtomicU64);

/// Measures the time in microseconds from a signal to a sleeping thread until its answer.
fn round_trip_us() -> f64 {
    let (ping, pong) = (event(), event());
    let signal = |event: &OwnedFd| {
        // The write cannot fail: the counter of the eventfd does not overflow, as it is read each time.
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..ROUND_TRIPS {
                await_event(&ping, Duration::from_secs(10));
                signal(&pong);
            }
        });
        let started = Instant::now();
        for _ in 0..ROUND_TRIPS {
            signal(&ping);
            await_event(&pong, Duration::from_secs(10));
        }
        started.elapsed().as_secs_f64() * 1e6 / f64::from(ROUND_TRIPS)
    })
}

fn table(storage: Storage, jobs: &[Job], servers: &[Server], series: &[Vec<Series>]) -> String {
    let mut text = format!(
        "### {}\n\n| job | server | IOPS | least to greatest | CPU us | IOPS to the last | CPU to the last |\n",
        storage.name()
    );
    text.push_str("|---|---|---|---|---|---|---|\n");
    for (job, row) in jobs.iter().zip(series) {
        for (server, own) in servers.iter().zip(row) {
            let (least, rate, greatest) = spread(&own.rate);
            let _ = write!(
                text,
                "| {} | {} | {rate:.0} | {least:.0} to {greatest:.0} | {:.3} |",
                job.name(),
                server.kind.name(),
                median(&own.cpu_us)
            );
            let last = row.last().unwrap_or(own);
            let (rates, cpus) = (ratio(&own.rate, &last.rate), ratio(&own.cpu_us, &last.cpu_us));
            let _ = writeln!(text, " {rates:.2} | {cpus:.2} |");
        }
    }
    text
}

/// Returns the idle processor time and the memory of each server, with a connected front-end.
fn facts(storage: Storage, servers: &[Server]) -> Result<String> {
    let mut text =
        format!("### {}: besides\n\n| server | idle ticks | idle waits | PSS, KiB |\n", storage.name());
    text.push_str("|---|---|---|---|\n");
    for server in servers {
        let failed = |error: std::io::Error| Error(format!("{}: {error}", server.kind.name()));
        let mut front = FrontEnd::connect(&server.socket, 4 << 20);
        let mut queue = front.start_queue(0, 64, 1, BLOCK);
        assert_eq!(queue.perform(Request::Read, 0, BLOCK), S_OK);
        std::thread::sleep(Duration::from_millis(500));
        let pid = server.pid();
        let sample = || Ok((proc::cpu_of_process(pid)?, proc::waits(pid)?));
        let before = sample().map_err(failed)?;
        std::thread::sleep(IDLE);
        let after = sample().map_err(failed)?;
        let ticks = after.0.saturating_sub(before.0).as_secs_f64() * 100.0;
        let (waits, memory) = (after.1 - before.1, proc::memory(pid).map_err(failed)?.pss_kib);
        let _ = writeln!(text, "| {} | {ticks:.0} | {waits} | {memory} |", server.kind.name());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn jobs_are_all_combinations() {
        let options = parsed("--depths 1,8 --queues 1,2,4").expect("it is valid");
        assert_eq!(jobs(&options).len(), 12);
        assert_eq!(jobs(&options)[0].name(), "read, 1 x 1");
    }

    #[test]
    fn bad_options_are_refused() {
        for line in ["--depths 0", "--depths 257", "--queues 0", "--no-such 1", "--servers spdk"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
