//! Hostile clients, one way after the other, while one client that behaves writes, reads back and keeps time.

use super::super::Tally;
use super::super::daemon::{Daemon, tail};
use super::super::options::Options;
use super::ways::{CANARY, LEN, Scene, VICTIM, WAYS};
use crate::peer::Peer;
use crate::server::noise;
use proto::nbd::CommandFlags;
use proto::nbd::client::Wish;
use sim::Rng;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Threads that misbehave.
const THREADS: usize = 4;
/// The longest that the client that behaves may have to wait for anything: a bound that a busy machine holds, too.
const WORST: Duration = Duration::from_secs(5);
/// Most memory that the process may use, in KiB.
const MEMORY_KIB: u64 = 600 << 10;

/// Throughput and latency of the client that behaves.
#[derive(Clone, Copy, Default, Debug)]
struct Noticed {
    requests: u64,
    worst: Duration,
    connecting: Duration,
}

/// Goes through all ways, `count` of them, each for a while.
pub fn run(options: &Options) -> Tally {
    let mut tally = Tally::default();
    for figure in ["ways", "wrong", "slow", "panics"] {
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
    // As long for each as the options give in all.
    let ways = (options.count as usize).clamp(1, WAYS.len());
    let time = match options.until {
        Some(until) => until.saturating_duration_since(Instant::now()) / (ways as u32 + 1),
        None => Duration::from_secs(1),
    };
    let alone = behave(&socket, time)?;
    println!("  {:>7} requests, worst {:>7.1} ms: alone", alone.requests, ms(alone.worst));
    let mut worst = Noticed { requests: u64::MAX, ..Noticed::default() };
    let canary = options.canary.then_some(&CANARY);
    for (number, (name, way)) in canary.into_iter().chain(WAYS).take(ways).enumerate() {
        let seed = options.seed.wrapping_add(number as u64);
        let noticed = match one(&socket, *way, seed, time) {
            Ok(noticed) => noticed,
            Err(why) => {
                tally.find("wrong", format!("clients --seed={seed}: while one {name}: {why}"));
                continue;
            }
        };
        tally.count("ways", 1);
        let words = format!(
            "{:>7} requests, worst {:>7.1} ms, connected in {:>7.1} ms, {:>4} MiB: {name}",
            noticed.requests,
            ms(noticed.worst),
            ms(noticed.connecting),
            daemon.status_field("VmRSS") >> 10,
        );
        println!("  {words}");
        if noticed.worst > WORST || noticed.connecting > WORST || noticed.requests == 0 {
            tally.find("slow", format!("clients --seed={seed}: {words}"));
        }
        worst.requests = worst.requests.min(noticed.requests);
        worst.worst = worst.worst.max(noticed.worst);
        worst.connecting = worst.connecting.max(noticed.connecting);
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

fn one(socket: &Path, way: fn(&mut Scene<'_>), seed: u64, time: Duration) -> Result<Noticed, String> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let stop = &stop;
            scope.spawn(move || {
                let until = Instant::now() + time * 2;
                let mut scene = Scene { socket, rng: Rng::new(seed ^ (number as u64) << 40), until };
                while !stop.load(Relaxed) && Instant::now() < until {
                    way(&mut scene);
                }
            });
        }
        // They begin first.
        std::thread::sleep(time / 8);
        let noticed = super::super::guarded(|| behave(socket, time));
        stop.store(true, Relaxed);
        noticed
    })
}

/// Writes a page, reads it back, and now and then comes again on another connection.
fn behave(socket: &Path, time: Duration) -> Result<Noticed, String> {
    let (start, mut noticed) = (Instant::now(), Noticed::default());
    let mut turn = 0;
    while start.elapsed() < time {
        let begun = Instant::now();
        let mut peer = Peer::with(socket, Wish::new("honest")).map_err(|why| why.to_string())?;
        noticed.connecting = noticed.connecting.max(begun.elapsed());
        for _ in 0..200 {
            turn += 1;
            let (offset, data) = (turn % 256 * 4096, noise(turn, 4096));
            let begun = Instant::now();
            peer.write(offset, &data, CommandFlags::NONE).map_err(|why| format!("its write: {why}"))?;
            let written = Instant::now();
            let read = peer.read(offset, 4096).map_err(|why| format!("its read: {why}"))?;
            noticed.worst = noticed.worst.max(written - begun).max(written.elapsed());
            if read != data {
                return Err("it read what it had not written".to_owned());
            }
            noticed.requests += 2;
            if start.elapsed() >= time {
                break;
            }
        }
    }
    Ok(noticed)
}
