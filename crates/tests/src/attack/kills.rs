//! kill -9 of the real server during writes of several connections, and the data that the next server reads.

use super::Tally;
use super::clock::Clock;
use super::daemon::{Daemon, tail};
use super::load::{Disk, Mix, Outcome, drive};
use super::options::Options;
use super::rounds::{Round, over_stores};
use super::stores::Setup;
use super::story::{Damage, Promise, SECTOR};
use crate::peer::Peer;
use proto::nbd::client::HandshakeOptions;
use sim::Rng;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Kills of one setup before another is drawn.
const KILLS_EACH: u64 = 25;
/// Connections to each device.
const CONNECTIONS: usize = 3;

/// Runs `count` kills.
pub fn run(options: &Options) -> Tally {
    over_stores("kills", options, KILLS_EACH, &["kills", "lost", "wrong", "panics"], one)
}

fn one(round: &Round<'_>, tally: &mut Tally) -> Result<(), String> {
    let Round { options, store, seed, count: kills, ref replay } = *round;
    let mut rng = Rng::new(seed);
    let setup = Setup::draw(store, &mut rng);
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let (dir, socket) = (scratch.path(), scratch.path().join("s"));
    setup.prepare(dir).map_err(|why| why.to_string())?;
    let clock = Clock::default();
    let disks = setup.disks(&clock);
    let topology = dir.join("t.toml");
    std::fs::write(&topology, setup.alone(dir, &socket)).map_err(|why| why.to_string())?;
    let topology = topology.to_string_lossy().into_owned();
    let start = || Daemon::start(dir, &["up", &topology], setup.devices.len());
    for kill in 0..=kills {
        if rng.chance(100) {
            let daemon = Daemon::spawn(dir, &["up", &topology]).map_err(|refusal| refusal.log)?;
            std::thread::sleep(Duration::from_micros(rng.below(20_000)));
            drop(daemon);
        }
        let mut daemon = start().map_err(|refusal| format!("after {kill} kills: {}", tail(&refusal.log)))?;
        for (device, disk) in setup.devices.iter().zip(&disks) {
            let bytes = read_all(&socket, device.name, disk.story().sectors())?;
            let mut story = disk.story();
            let mut promise = store.kept_by_kill();
            if options.canary {
                // As if more data had been acknowledged: the last write of each sector, whatever its result.
                story.pretend_acknowledged();
                promise = Promise::Acknowledged;
            }
            let at = story.now() + 1;
            for complaint in story.check(0, &bytes, at, promise) {
                let kind = if complaint.damage == Damage::Lost { "lost" } else { "wrong" };
                tally.find(
                    kind,
                    format!("{replay}: {} {} after kill {kill}: {complaint}", setup.about, device.name),
                );
            }
            story.restart(&bytes);
        }
        if kill == kills {
            break;
        }
        let outcome = load_and_kill(&setup, &disks, &socket, &mut daemon, &mut rng)?;
        tally.count("kills", 1);
        tally.count("requests", outcome.answered);
        for wrong in outcome.wrong {
            tally.find("wrong", format!("{replay}: {} kill {kill}: {wrong}", setup.about));
        }
        if super::daemon::has_panicked(&daemon.log()) {
            tally.find("panics", format!("{replay}: {}", tail(&daemon.log())));
        }
        disks.iter().for_each(|disk| disk.story().abandon());
    }
    drop(start().map(|mut daemon| daemon.terminate()));
    if let Some(bad) = setup.check_images(dir) {
        tally.find("wrong", format!("{replay}: {bad}"));
    }
    Ok(())
}

fn load_and_kill(
    setup: &Setup,
    disks: &[Disk],
    socket: &Path,
    daemon: &mut Daemon,
    rng: &mut Rng,
) -> Result<Outcome, String> {
    let mut writers = Vec::new();
    for (device, disk) in setup.devices.iter().zip(disks) {
        disk.stop.store(false, Relaxed);
        for _ in 0..CONNECTIONS {
            let peer =
                Peer::with(socket, HandshakeOptions::new(device.name)).map_err(|why| why.to_string())?;
            writers.push((disk, peer, rng.fork()));
        }
    }
    let time = Duration::from_micros(500 + rng.below(25_000));
    let mix = Mix { depth: 1 + rng.below(8) as usize, ..Mix::default() };
    let mut total = Outcome::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = writers
            .into_iter()
            .map(|(disk, mut peer, mut rng)| {
                scope.spawn(move || drive(disk, &mut peer, &mut rng, u64::MAX, mix))
            })
            .collect();
        std::thread::sleep(time);
        daemon.kill();
        for thread in threads {
            match thread.join() {
                Ok(outcome) => total.add(outcome),
                Err(_) => total.wrong.push("the client was answered against the protocol".to_owned()),
            }
        }
    });
    Ok(total)
}

/// Reads a whole device.
pub fn read_all(socket: &Path, name: &str, sectors: u64) -> Result<Vec<u8>, String> {
    super::guarded(|| {
        let mut peer =
            Peer::with(socket, HandshakeOptions::new(name)).map_err(|why| format!("{name}: {why}"))?;
        let len = sectors * SECTOR as u64;
        peer.read(0, len).map_err(|why| format!("{name}: reading {len} bytes: {why}"))
    })
}
