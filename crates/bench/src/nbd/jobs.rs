//! One round of one job on one server: the load, its result and its cost.
//!
//! For the lean client the counters are read twice during the steady load, from threads that live throughout.
//! fio and nbdcopy open and close their own connections, so their cost and their count are those of the whole
//! process over the whole run.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::client::{Connection, Count, Load, Pattern};
use super::servers::Server;
use super::{Error, Result};
use crate::proc;

/// Time for a load to become steady before it is measured.
const WARM_UP: Duration = Duration::from_millis(300);
/// The unit in which copies are counted.
const COPY_UNIT: u64 = 1 << 20;

/// The program that loads the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Client {
    /// The lean client in `client.rs`.
    Lean,
    /// fio's nbd engine.
    Fio,
    /// nbdcopy of the whole device to the server.
    CopyIn,
    /// nbdcopy of the whole device from the server.
    CopyOut,
}

/// One job of the plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Name in tables and on the command line.
    pub(super) name: &'static str,
    /// The program that loads the server.
    pub(super) client: Client,
    /// The access pattern; unused for copies.
    pub(super) pattern: Pattern,
    /// Bytes of each request; for copies, the unit of their count.
    pub(super) block: u32,
}

const fn job(name: &'static str, client: Client, pattern: Pattern, block: u32) -> Job {
    Job { name, client, pattern, block }
}

/// Fills the device with data.
pub(super) const FILL: Job = job("copy-in", Client::CopyIn, Pattern::Writes, COPY_UNIT as u32);

/// Every job, in the order of a round.
pub(super) const JOBS: &[Job] = &[
    FILL,
    job("copy-out", Client::CopyOut, Pattern::Reads, COPY_UNIT as u32),
    job("randrw-4k-lean", Client::Lean, Pattern::RandomMixed, 4 << 10),
    job("randrw-4k-fio", Client::Fio, Pattern::RandomMixed, 4 << 10),
    job("read-128k-lean", Client::Lean, Pattern::Reads, 128 << 10),
    job("write-128k-lean", Client::Lean, Pattern::Writes, 128 << 10),
    job("read-1m-lean", Client::Lean, Pattern::Reads, 1 << 20),
    job("write-1m-lean", Client::Lean, Pattern::Writes, 1 << 20),
];

/// The intensity of a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pressure {
    /// Connections at once.
    pub(super) connections: usize,
    /// Requests in flight on each.
    pub(super) depth: usize,
    /// Duration in seconds.
    pub(super) seconds: f64,
    /// Seed of random offsets.
    pub(super) seed: u64,
}

/// The measurements of one round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// Requests finished, or MiB copied.
    pub(super) count: u64,
    /// Duration in seconds.
    pub(super) seconds: f64,
    /// Processor time of the server.
    pub(super) server_cpu: f64,
    /// Processor time of the client.
    pub(super) client_cpu: f64,
    /// 99th percentile of the latency of reads, in microseconds, if the client reports it.
    pub(super) read_p99_us: Option<f64>,
    /// Share of the machine's processors that other programs used or the host took, 0 to 1.
    pub(super) foreign: f64,
}

impl Sample {
    /// Returns requests a second, or MiB a second for copies.
    pub(super) fn rate(&self) -> f64 {
        self.count as f64 / self.seconds
    }

    /// Returns the server's processor time for each request or MiB, in microseconds.
    pub(super) fn cost(&self) -> f64 {
        self.server_cpu * 1e6 / self.count.max(1) as f64
    }
}

/// The clocks and counters of the start of a measurement.
struct Mark {
    at: Instant,
    machine: proc::Machine,
}

impl Mark {
    fn now() -> Result<Self> {
        Ok(Self { at: Instant::now(), machine: proc::machine().map_err(Error::at(Path::new("/proc/stat")))? })
    }

    /// Returns the sample since this mark, from the count and the processor times.
    fn sample(&self, count: u64, server: Duration, client: Duration) -> Result<Sample> {
        let seconds = self.at.elapsed().as_secs_f64();
        let machine = proc::machine().map_err(Error::at(Path::new("/proc/stat")))?;
        let busy = (machine.busy - self.machine.busy).as_secs_f64();
        let stolen = (machine.stolen - self.machine.stolen).as_secs_f64();
        let own = (server + client).as_secs_f64();
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let foreign = ((busy - own).max(0.0) + stolen) / (seconds * processors);
        Ok(Sample {
            count,
            seconds,
            server_cpu: server.as_secs_f64(),
            client_cpu: client.as_secs_f64(),
            read_p99_us: None,
            foreign,
        })
    }
}

/// Runs `job` on `server` once.
pub(super) fn run(job: &Job, server: &Server, pressure: &Pressure, data: &Path) -> Result<Sample> {
    match job.client {
        Client::Lean => {
            let load =
                Load { pattern: job.pattern, block: job.block, depth: pressure.depth, seed: pressure.seed };
            under_lean_load(server, load, pressure.connections, |load| {
                std::thread::sleep(WARM_UP);
                measure(server, load, Duration::from_secs_f64(pressure.seconds))
            })
        }
        Client::Fio => fio(job, server, pressure),
        Client::CopyIn => copy(server, data, &data.to_string_lossy(), &server.uri()),
        Client::CopyOut => copy(server, data, &server.uri(), "null:"),
    }
}

/// The load of the lean client while it runs.
pub(super) struct Running<'a> {
    counts: &'a [Count],
    stop: &'a AtomicBool,
}

impl Running<'_> {
    /// Returns the number of requests completed so far.
    pub(super) fn finished(&self) -> u64 {
        self.counts.iter().map(|count| count.0.load(Ordering::Relaxed)).sum()
    }

    /// Returns whether a connection has failed; its error is reported at the end.
    pub(super) fn has_failed(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Runs `during` while `connections` lean clients load the server.
pub(super) fn under_lean_load<T>(
    server: &Server,
    load: Load,
    connections: usize,
    during: impl FnOnce(&Running<'_>) -> Result<T>,
) -> Result<T> {
    let opened: std::io::Result<Vec<_>> =
        (0..connections).map(|_| Connection::open(&server.socket, &server.export)).collect();
    let opened = opened.map_err(Error::at(&server.socket))?;
    let counts: Vec<Count> = (0..connections).map(|_| Count::default()).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (index, (connection, count)) in opened.into_iter().zip(&counts).enumerate() {
            let load = Load { seed: load.seed ^ ((index as u64 + 1) << 32), ..load };
            let stop = &stop;
            threads.push(scope.spawn(move || {
                let ended = connection.run(load, stop, &count.0);
                stop.store(true, Ordering::Relaxed);
                ended
            }));
        }
        let result = during(&Running { counts: &counts, stop: &stop });
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            let ended = thread.join().map_err(|_| Error("a client thread panicked".into()))?;
            ended.map_err(|error| Error(format!("{}: {error}", server.kind.name())))?;
        }
        result
    })
}

fn measure(server: &Server, load: &Running<'_>, time: Duration) -> Result<Sample> {
    let proc_error = || Error::at(Path::new("/proc"));
    let own = std::process::id();
    let mark = Mark::now()?;
    let count = load.finished();
    let server_cpu = proc::cpu_of_threads(server.pid()).map_err(proc_error())?;
    let client_cpu = proc::cpu_of_threads(own).map_err(proc_error())?;
    while mark.at.elapsed() < time && !load.has_failed() {
        std::thread::sleep(Duration::from_millis(20).min(time.saturating_sub(mark.at.elapsed())));
    }
    let count = load.finished() - count;
    let server_cpu = proc::cpu_of_threads(server.pid()).map_err(proc_error())?.saturating_sub(server_cpu);
    let client_cpu = proc::cpu_of_threads(own).map_err(proc_error())?.saturating_sub(client_cpu);
    mark.sample(count, server_cpu, client_cpu)
}

/// Runs another program as the client; `count` reads its output.
fn foreign_client(
    server: &Server,
    command: &mut Command,
    count: impl FnOnce(&str) -> Option<u64>,
) -> Result<Sample> {
    let name = command.get_program().to_string_lossy().into_owned();
    let before = proc::cpu_of_process(server.pid()).map_err(Error::at(Path::new("/proc")))?;
    let children = proc::cpu_of_children().map_err(Error::at(Path::new("/proc")))?;
    let mark = Mark::now()?;
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let output =
        child.and_then(std::process::Child::wait_with_output).map_err(Error::at(Path::new(&name)))?;
    let cpu =
        proc::cpu_of_process(server.pid()).map_err(Error::at(Path::new("/proc")))?.saturating_sub(before);
    let text = String::from_utf8_lossy(&output.stdout);
    match count(&text) {
        Some(count) if output.status.success() => {
            let client =
                proc::cpu_of_children().map_err(Error::at(Path::new("/proc")))?.saturating_sub(children);
            mark.sample(count, cpu, client)
        }
        _ => Err(Error(format!(
            "{name} on {} failed: {}",
            server.kind.name(),
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

fn fio(job: &Job, server: &Server, pressure: &Pressure) -> Result<Sample> {
    let pattern = match job.pattern {
        Pattern::RandomMixed => "randrw",
        Pattern::RandomReads => "randread",
        Pattern::Reads => "read",
        Pattern::Writes => "write",
    };
    let mut command = Command::new("fio");
    command.args([
        "--name=bench",
        "--ioengine=nbd",
        "--group_reporting",
        "--time_based",
        "--output-format=json",
    ]);
    command.arg(format!("--uri={}", server.uri())).arg(format!("--rw={pattern}"));
    command.arg(format!("--bs={}", job.block)).arg(format!("--iodepth={}", pressure.depth));
    command
        .arg(format!("--numjobs={}", pressure.connections))
        .arg(format!("--runtime={}", pressure.seconds.ceil()));
    command.arg(format!("--randseed={}", pressure.seed));
    let (mut seconds, mut p99) = (0.0, None);
    let mut sample = foreign_client(server, &mut command, |output| {
        let report: Value = serde_json::from_str(&output[output.find('{')?..]).ok()?;
        let job = &report["jobs"][0];
        if job["error"].as_u64()? != 0 {
            return None;
        }
        seconds = job["read"]["runtime"].as_f64()?.max(job["write"]["runtime"].as_f64()?) / 1e3;
        p99 = job["read"]["clat_ns"]["percentile"]["99.000000"].as_f64().map(|time| time / 1e3);
        Some(job["read"]["total_ios"].as_u64()? + job["write"]["total_ios"].as_u64()?)
    })?;
    // fio's own duration, without its start-up and its report.
    sample.seconds = seconds;
    sample.read_p99_us = p99;
    Ok(sample)
}

fn copy(server: &Server, data: &Path, from: &str, to: &str) -> Result<Sample> {
    let size = std::fs::metadata(data).map_err(Error::at(data))?.len();
    let mut command = Command::new("nbdcopy");
    command.args([from, to]);
    foreign_client(server, &mut command, |_| Some(size / COPY_UNIT))
}
