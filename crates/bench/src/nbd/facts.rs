//! Further costs of a server: start-up, idling, waking, a client that does not read, and system calls per
//! request.
//!
//! Each fact comes from the kernel's own counters. System calls are counted by perf if it is permitted (a
//! tracepoint, which costs little), else by strace, which slows the server and so makes its batches a little
//! larger.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::client::{Connection, Load, Pattern};
use super::jobs::{self, Pressure};
use super::servers::{Kind, Server, Site, Storage};
use super::{Error, Result, median};
use crate::proc;

/// How long an idle server is measured.
const IDLE: Duration = Duration::from_secs(2);
/// Number of single requests, and the pause before each: long enough for the server to sleep.
const LONE_REQUESTS: u32 = 200;
const LONE_PAUSE: Duration = Duration::from_millis(5);
/// The client that never reads: its requests and the bytes of each.
const UNREAD_REQUESTS: u64 = 1000;
const UNREAD_BYTES: u32 = 128 << 10;
/// Number of starts for the median.
const STARTS: usize = 5;

/// The facts about one server over one storage. `None` where it could not be measured.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// The server.
    pub(super) kind: Kind,
    /// Storage of the server.
    pub(super) storage: Storage,
    /// Time from the start of the program to its greeting, in milliseconds; the median.
    pub(super) ready_ms: f64,
    /// Memory when ready.
    pub(super) at_ready: proc::Memory,
    /// Memory after the load.
    pub(super) after_load: proc::Memory,
    /// Processor time in two idle seconds with open connections, in microseconds.
    pub(super) idle_us: f64,
    /// Wake-ups in the same two seconds.
    pub(super) idle_waits: u64,
    /// Processor time of the server for a single request, in microseconds.
    pub(super) lone_us: f64,
    /// Latency of a single request, in microseconds; the median.
    pub(super) lone_latency_us: f64,
    /// Growth of the server, in KiB, with a client that leaves a thousand answers unread.
    pub(super) unread_kib: u64,
    /// System calls per request with the lean client.
    pub(super) syscalls_lean: Option<f64>,
    /// System calls per request with fio.
    pub(super) syscalls_fio: Option<f64>,
}

/// Measures all facts.
pub(super) fn gather(kind: Kind, storage: Storage, site: &Site, pressure: &Pressure) -> Result<Facts> {
    let proc_error = || Error::at(Path::new("/proc"));
    let mut ready = Vec::new();
    for _ in 1..STARTS {
        ready.push(Server::start(kind, storage, site)?.ready.as_secs_f64() * 1e3);
    }
    let server = Server::start(kind, storage, site)?;
    ready.push(server.ready.as_secs_f64() * 1e3);
    let at_ready = proc::memory(server.pid()).map_err(proc_error())?;
    let (idle_us, idle_waits) = idle(&server, pressure.connections)?;
    let (lone_us, lone_latency_us) = lone(&server)?;
    let syscalls_lean = syscalls_lean(&server, pressure)?;
    let syscalls_fio = syscalls_fio(&server, pressure)?;
    let after_load = proc::memory(server.pid()).map_err(proc_error())?;
    let unread_kib = unread(&server)?;
    Ok(Facts {
        kind,
        storage,
        ready_ms: median(&ready),
        at_ready,
        after_load,
        idle_us,
        idle_waits,
        lone_us,
        lone_latency_us,
        unread_kib,
        syscalls_lean,
        syscalls_fio,
    })
}

fn open(server: &Server) -> Result<Connection> {
    Connection::open(&server.socket, &server.export).map_err(Error::at(&server.socket))
}

/// Measures processor time and wake-ups of a server with connected, idle clients.
fn idle(server: &Server, connections: usize) -> Result<(f64, u64)> {
    let proc_error = || Error::at(Path::new("/proc"));
    let clients: Result<Vec<_>> = (0..connections).map(|_| open(server)).collect();
    let _clients = clients?;
    // After this pause work for the handshakes is done, and a server that spins before it sleeps is asleep.
    std::thread::sleep(Duration::from_millis(500));
    let before = (
        proc::cpu_of_threads(server.pid()).map_err(proc_error())?,
        proc::waits(server.pid()).map_err(proc_error())?,
    );
    std::thread::sleep(IDLE);
    let cpu = proc::cpu_of_threads(server.pid()).map_err(proc_error())?.saturating_sub(before.0);
    let waits = proc::waits(server.pid()).map_err(proc_error())?.saturating_sub(before.1);
    Ok((cpu.as_secs_f64() * 1e6, waits))
}

/// Measures single requests, each of which finds the server asleep: the server's processor time for one,
/// and the client's latency.
fn lone(server: &Server) -> Result<(f64, f64)> {
    let proc_error = || Error::at(Path::new("/proc"));
    let mut client = open(server)?;
    let mut latencies = Vec::new();
    let before = proc::cpu_of_threads(server.pid()).map_err(proc_error())?;
    for _ in 0..LONE_REQUESTS {
        std::thread::sleep(LONE_PAUSE);
        let sent = Instant::now();
        client.read_once(4096).map_err(Error::at(&server.socket))?;
        latencies.push(sent.elapsed().as_secs_f64() * 1e6);
    }
    let cpu = proc::cpu_of_threads(server.pid()).map_err(proc_error())?.saturating_sub(before);
    Ok((cpu.as_secs_f64() * 1e6 / f64::from(LONE_REQUESTS), median(&latencies)))
}

/// Measures the growth of a server by a client that sends requests and never reads.
fn unread(server: &Server) -> Result<u64> {
    let proc_error = || Error::at(Path::new("/proc"));
    let mut client = open(server)?;
    let before = proc::memory(server.pid()).map_err(proc_error())?;
    client.send_reads(UNREAD_REQUESTS, UNREAD_BYTES).map_err(Error::at(&server.socket))?;
    let mut most = before.pss_kib;
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(100));
        most = most.max(proc::memory(server.pid()).map_err(proc_error())?.pss_kib);
    }
    Ok(most - before.pss_kib)
}

fn syscalls_lean(server: &Server, pressure: &Pressure) -> Result<Option<f64>> {
    let load =
        Load { pattern: Pattern::RandomMixed, block: 4096, depth: pressure.depth, seed: pressure.seed };
    jobs::under_lean_load(server, load, pressure.connections, |load| {
        std::thread::sleep(Duration::from_millis(300));
        let by_perf = calls_by_perf(server.pid(), Duration::from_secs(1), || load.finished());
        Ok(by_perf.or_else(|| calls_by_strace(server.pid(), || load.finished())))
    })
}

/// Measures with fio, which counts its own requests: perf over the middle of a run whose rate fio reports.
fn syscalls_fio(server: &Server, pressure: &Pressure) -> Result<Option<f64>> {
    let job =
        jobs::Job { name: "syscalls", client: jobs::Client::Fio, pattern: Pattern::RandomMixed, block: 4096 };
    let pressure = Pressure { seconds: 4.0, ..*pressure };
    std::thread::scope(|scope| {
        let fio = scope.spawn(|| jobs::run(&job, server, &pressure, Path::new("")));
        std::thread::sleep(Duration::from_millis(1500));
        let calls = perf(server.pid(), Duration::from_secs(2)).map(|calls| calls / 2.0);
        let sample = fio.join().map_err(|_| Error("the thread with fio panicked".into()))??;
        Ok(calls.map(|calls| calls / sample.rate()))
    })
}

/// Returns calls per request by perf's tracepoint, with `finished` as the count of requests.
fn calls_by_perf(pid: u32, time: Duration, finished: impl Fn() -> u64) -> Option<f64> {
    let (started, before) = (Instant::now(), finished());
    let calls = perf(pid, time)?;
    // perf itself takes time to start and end; the load is steady, so its average rate is valid.
    let rate = (finished() - before) as f64 / started.elapsed().as_secs_f64();
    Some(calls / time.as_secs_f64() / rate)
}

/// Counts system calls of all threads of `pid` in `time`; returns `None` where perf is missing or not
/// permitted.
fn perf(pid: u32, time: Duration) -> Option<f64> {
    let output = Command::new("perf")
        .args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", &pid.to_string(), "--", "sleep"])
        .arg(time.as_secs_f64().to_string())
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find(|line| line.contains("raw_syscalls"))?;
    line.split(',').next()?.parse().ok()
}

/// Returns calls per request by strace's summary, whose last line is the total.
fn calls_by_strace(pid: u32, finished: impl Fn() -> u64) -> Option<f64> {
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
