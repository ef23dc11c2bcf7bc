//! Hostile clients, one kind after the other, while a well-behaved client writes, reads back and measures.

use super::super::Tally;
use super::super::daemon::{Daemon, tail};
use super::super::options::Options;
use super::kinds::{CANARY, KINDS, LEN, Scene, VICTIM};
use crate::peer::Peer;
use crate::server::noise;
use proto::nbd::CommandFlags;
use proto::nbd::client::HandshakeOptions;
use sim::Rng;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Threads of hostile clients.
const THREADS: usize = 4;
/// The longest allowed wait of the well-behaved client: a bound that also holds on a busy machine.
const WORST: Duration = Duration::from_secs(5);
/// Most memory that the process may use, in KiB.
const MEMORY_KIB: u64 = 600 << 10;

/// Throughput and latency of the well-behaved client.
#[derive(Clone, Copy, Default, Debug)]
struct Observed {
    requests: u64,
    worst: Duration,
    connecting: Duration,
}

/// Runs `count` kinds of hostile clients, each for a while.
pub fn run(options: &Options) -> Tally {
    let mut tally = Tally::default();
    for figure in ["kinds", "wrong", "slow", "panics"] {
        tally.count(figure, 0);
    }
    if let Err(why) = all(options, &mut tally) {
        tally.find("broken", format!("clients: {why}"));
    }
    tally
}

fn all(options: &Options, tally: &mut Tally) -> Result<(), String> {
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let (dir, socket) = (scratch.path(), scratch.path().join("s"));
    let mut text = String::new();
    for name in [VICTIM, "honest"] {
        let file = dir.join(name);
        let len = if name == VICTIM { LEN } else { 1 << 20 };
        std::fs::File::create(&file).and_then(|file| file.set_len(len)).map_err(|why| why.to_string())?;
        text += &format!("[device.{name}]\nstack = \"file:{}\"\n", file.display());
        text += &format!("[[export]]\ndevice = \"{name}\"\nnbd = \"unix:{}\"\n", socket.display());
    }
    let topology = dir.join("t.toml");
    std::fs::write(&topology, text).map_err(|why| why.to_string())?;
    let mut daemon =
        Daemon::start(dir, &["up", &topology.to_string_lossy()], 2).map_err(|refusal| refusal.log)?;
    // The time of the options is divided among the kinds.
    let kinds = (options.count as usize).clamp(1, KINDS.len());
    let time = match options.until {
        Some(until) => until.saturating_duration_since(Instant::now()) / (kinds as u32 + 1),
        None => Duration::from_secs(1),
    };
    let alone = run_client(&socket, time)?;
    println!("  {:>7} requests, worst {:>7.1} ms: alone", alone.requests, ms(alone.worst));
    let mut worst = Observed { requests: u64::MAX, ..Observed::default() };
    let canary = options.canary.then_some(&CANARY);
    for (number, (name, kind)) in canary.into_iter().chain(KINDS).take(kinds).enumerate() {
        let seed = options.seed.wrapping_add(number as u64);
        let observed = match one(&socket, *kind, seed, time) {
            Ok(observed) => observed,
            Err(why) => {
                tally.find("wrong", format!("clients --seed={seed}: while one {name}: {why}"));
                continue;
            }
        };
        tally.count("kinds", 1);
        let words = format!(
            "{:>7} requests, worst {:>7.1} ms, connected in {:>7.1} ms, {:>4} MiB: {name}",
            observed.requests,
            ms(observed.worst),
            ms(observed.connecting),
            daemon.status_field("VmRSS") >> 10,
        );
        println!("  {words}");
        if observed.worst > WORST || observed.connecting > WORST || observed.requests == 0 {
            tally.find("slow", format!("clients --seed={seed}: {words}"));
        }
        worst.requests = worst.requests.min(observed.requests);
        worst.worst = worst.worst.max(observed.worst);
        worst.connecting = worst.connecting.max(observed.connecting);
        if let Some(bad) = daemon.complaint() {
            tally.find("panics", format!("while one {name}: {bad}"));
            return Ok(());
        }
    }
    let peak = daemon.status_field("VmHWM");
    println!(
        "  fewest {} requests, worst {:.1} ms, slowest to connect {:.1} ms, {} MiB in memory at the peak",
        worst.requests,
        ms(worst.worst),
        ms(worst.connecting),
        peak >> 10
    );
    if peak > MEMORY_KIB {
        tally.find("wrong", format!("clients: {} MiB in memory", peak >> 10));
    }
    tally.count("worst_ms", worst.worst.max(worst.connecting).as_millis() as u64);
    match daemon.terminate() {
        Some(status) if status.success() => Ok(()),
        status => Err(format!("it ended with {status:?}: {}", tail(&daemon.log()))),
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn one(socket: &Path, kind: fn(&mut Scene<'_>), seed: u64, time: Duration) -> Result<Observed, String> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let stop = &stop;
            scope.spawn(move || {
                let until = Instant::now() + time * 2;
                let mut scene = Scene { socket, rng: Rng::new(seed ^ (number as u64) << 40), until };
                while !stop.load(Relaxed) && Instant::now() < until {
                    kind(&mut scene);
                }
            });
        }
        // The hostile clients start first.
        std::thread::sleep(time / 8);
        let observed = super::super::guarded(|| run_client(socket, time));
        stop.store(true, Relaxed);
        observed
    })
}

/// Writes a page, reads it back, and at times reconnects.
fn run_client(socket: &Path, time: Duration) -> Result<Observed, String> {
    let (start, mut observed) = (Instant::now(), Observed::default());
    let mut turn = 0;
    while start.elapsed() < time {
        let begun = Instant::now();
        let mut peer = Peer::with(socket, HandshakeOptions::new("honest")).map_err(|why| why.to_string())?;
        observed.connecting = observed.connecting.max(begun.elapsed());
        for _ in 0..200 {
            turn += 1;
            let (offset, data) = (turn % 256 * 4096, noise(turn, 4096));
            let begun = Instant::now();
            peer.write(offset, &data, CommandFlags::empty()).map_err(|why| format!("its write: {why}"))?;
            let written = Instant::now();
            let read = peer.read(offset, 4096).map_err(|why| format!("its read: {why}"))?;
            observed.worst = observed.worst.max(written - begun).max(written.elapsed());
            if read != data {
                return Err("it read what it had not written".to_owned());
            }
            observed.requests += 2;
            if start.elapsed() >= time {
                break;
            }
        }
    }
    Ok(observed)
}
