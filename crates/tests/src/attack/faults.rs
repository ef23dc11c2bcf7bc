//! Each call of the file system in turn fails, hangs or does only a half: EIO, ENOSPC, also for ever.
//!
//! Whatever fails, an answer without an error is true: data that was acknowledged is read back, and what a flush covered
//! survives a power cut in which a failed sync has lost what it should have written, as on Linux. A disk that had no room
//! for a moment goes on when it has.

use super::Tally;
use super::clock::Clock;
use super::daemon::{Daemon, has_panicked, tail};
use super::fault::{Call, Faults, Verdict};
use super::kills::read_all;
use super::load::{Disk, Mix, drive};
use super::options::Options;
use super::recorder::Recorder;
use super::stores::{Setup, Store};
use super::story::{Content, Harm, Promise, stamp};
use crate::peer::Peer;
use proto::nbd::CommandFlags;
use proto::nbd::client::Wish;
use sim::Rng;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Numbers of Linux.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// Requests of a script.
const REQUESTS: u64 = 40;
/// Calls that a script makes at most; those after it are not tried.
const CALLS: u64 = 220;

/// What is done to a call, and to how many from it on.
const KINDS: [(&str, Verdict, u64); 6] = [
    ("eio", Verdict::Fail(EIO), 1),
    ("enospc", Verdict::Fail(ENOSPC), 1),
    ("eio-on", Verdict::Fail(EIO), 30),
    ("enospc-on", Verdict::Fail(ENOSPC), 30),
    ("hang", Verdict::Hang(Duration::from_millis(60)), 1),
    ("short", Verdict::Short, 5),
];

/// Tries `count` of the pairs of a call and what becomes of it.
pub fn run(options: &Options) -> Tally {
    let stores = options.stores();
    let (next, total) = (AtomicU64::new(0), Mutex::new(Tally::default()));
    std::thread::scope(|scope| {
        for _ in 0..options.workers {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= options.count || options.is_over() {
                        break;
                    }
                    let seed = options.seed.wrapping_add(number);
                    let store = stores[(seed % stores.len() as u64) as usize];
                    let mut tally = Tally::default();
                    for figure in ["faults", "fired", "lost", "wrong", "latched", "panics"] {
                        tally.count(figure, 0);
                    }
                    let replay = format!("faults --store={} --seed={seed} --count=1", store.name());
                    let work = || one(options, store, seed, &replay, &mut tally);
                    if let Err(why) = super::guarded(work) {
                        tally.find("broken", format!("{replay}: {why}"));
                    }
                    let mut total = total.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    total.add(tally);
                }
            });
        }
    });
    total.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn one(options: &Options, store: Store, seed: u64, replay: &str, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut setup = Setup::draw(store, &mut rng);
    // The seed walks through calls and kinds, so that a row of seeds tries each call in turn.
    let turn = seed / Store::ALL.len() as u64;
    let (kind, verdict, calls) = KINDS[(turn % KINDS.len() as u64) as usize];
    let first = turn / KINDS.len() as u64 * 7 % CALLS;
    // Linux does not advance the position of a part that a FUSE file did past the page cache, so that io_uring, which goes on
    // by itself, does the rest in the wrong place (seen on 6.18).
    setup.epoll |= verdict == Verdict::Short;
    let words = |what: &str| format!("{replay} ({}, {kind} at call {first}): {what}", setup.about);
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let clock = Clock::default();
    let recorder =
        Recorder::mount(&scratch.path().join("m"), clock.clone()).map_err(|why| why.to_string())?;
    setup.prepare(recorder.path()).map_err(|why| why.to_string())?;
    recorder.set_uncached(rng.chance(500));
    recorder.begin();
    if options.canary {
        recorder.set_dropped_syncs(2);
    }
    // Most of the time the server is up before anything fails.
    let while_starting = rng.chance(150);
    let plan = Faults::at(if while_starting { first % 20 } else { first }, calls, verdict);
    if while_starting {
        recorder.set_faults(plan.clone());
    }
    tally.count("faults", 1);
    let disks = setup.disks(&clock);
    let place = Place { setup: &setup, dir: recorder.path(), home: scratch.path() };
    let mut daemon = match place.serve() {
        Ok(daemon) => daemon,
        Err(refusal) if while_starting && refusal.is_orderly() => {
            tally.count("fired", u64::from(!recorder.faults().fired.is_empty()));
            recorder.set_faults(Faults::default());
            place.serve().map_err(|refusal| words(&format!("refused for good: {}", tail(&refusal.log))))?
        }
        Err(refusal) => return Err(words(&format!("it was not served: {}", tail(&refusal.log)))),
    };
    if !while_starting {
        recorder.set_faults(plan);
    }
    let harmless = matches!(verdict, Verdict::Hang(_) | Verdict::Short);
    for (device, disk) in setup.devices.iter().zip(&disks) {
        let mut peer =
            Peer::with(&place.socket(), Wish::new(device.name)).map_err(|why| words(&why.to_string()))?;
        let mix = Mix { depth: 3, flush: 100, sectors_max: 80, ..Mix::default() };
        let outcome = drive(disk, &mut peer, &mut rng, REQUESTS, mix);
        if harmless && outcome.errors > 0 {
            tally.find("wrong", words(&format!("{}: {} errors", device.name, outcome.errors)));
        }
        if outcome.cut {
            tally.find("wrong", words(&format!("{}: the connection was closed", device.name)));
        }
        for wrong in outcome.wrong {
            tally.find("wrong", words(&format!("{}: {wrong}", device.name)));
        }
    }
    let fired = recorder.faults().fired;
    tally.count("fired", u64::from(!fired.is_empty()));
    recorder.set_faults(Faults::default());
    if goes_on(store, verdict, &fired) {
        for (device, disk) in setup.devices.iter().zip(&disks) {
            if let Err(why) = super::guarded(|| write_through(&place.socket(), device.name, disk, &mut rng)) {
                tally.find("latched", words(&format!("{} after {fired:?}: {why}", device.name)));
            }
        }
    }
    if let Some(bad) = daemon.complaint() {
        tally.find("panics", words(&bad));
    }
    if rng.chance(300) {
        daemon.terminate();
        if has_panicked(&daemon.log()) {
            tally.find("panics", words(tail(&daemon.log())));
        }
    }
    daemon.kill();
    drop(daemon);
    aftermath(&place, &recorder, &disks, &clock, &mut rng, tally, &fired, &words)
}

/// Whether the device has to go on once nothing fails any more: no sync has failed, and what failed was want of room.
fn goes_on(store: Store, verdict: Verdict, fired: &[Call]) -> bool {
    let only_room = verdict == Verdict::Fail(ENOSPC) && !fired.contains(&Call::Sync);
    // A store of a snapshot that has no room is lost by design, and a mirror drops the device; the log of log-writes ends.
    only_room && matches!(store, Store::Raw | Store::Direct | Store::Overlay | Store::Qcow2 | Store::Backed)
}

/// Writes, flushes and reads: all of it has to succeed.
fn write_through(socket: &Path, name: &str, disk: &Disk, rng: &mut Rng) -> Result<(), String> {
    let mut peer = Peer::with(socket, Wish::new(name)).map_err(|why| why.to_string())?;
    let mut story = disk.story();
    for _ in 0..8 {
        let sector = rng.below(story.sectors() - 8);
        let Some(pending) = story.reserve(sector, 8) else { continue };
        let version = story.version();
        story.submit(pending, Content::Version(version), false);
        let data: Vec<u8> =
            (sector..sector + 8).flat_map(|sector| stamp(story.disk, sector, version)).collect();
        let result = peer.write(sector * 512, &data, CommandFlags::NONE);
        story.end(pending, true, result.is_ok());
        result.map_err(|why| format!("a write: {why}"))?;
    }
    let sent = story.flush_begin();
    peer.flush().map_err(|why| format!("a flush: {why}"))?;
    story.flushed(sent);
    Ok(())
}

/// What the next server reads: of the files as they are, and of what a power cut leaves of them.
#[expect(clippy::too_many_arguments, reason = "what a round is made of")]
fn aftermath(
    place: &Place<'_>,
    recorder: &Recorder,
    disks: &[Disk],
    clock: &Clock,
    rng: &mut Rng,
    tally: &mut Tally,
    fired: &[Call],
    words: &dyn Fn(&str) -> String,
) -> Result<(), String> {
    let (at, recording) = (clock.now() + 1, recorder.recording());
    let states = [
        (recorder.contents(), place.setup.store.kept_by_kill()),
        (recording.crash(at, rng), Promise::Flushed),
    ];
    // A file takes nothing more after a sync failed, or a write that was to be durable: then the header of a snapshot's store
    // cannot say that it is lost, and nothing is promised of it (docs/testing.md).
    let harmless = |call: &Call| !matches!(call, Call::Sync | Call::Write);
    let is_vague = place.setup.store == Store::Snapshot && !fired.iter().all(harmless);
    for (number, (files, promise)) in states.into_iter().enumerate() {
        let dir = place.home.join(format!("a{number}"));
        super::cuts::write_state(&dir, &files, (number > 0).then_some(&mut *rng))
            .map_err(|why| why.to_string())?;
        let place = Place { setup: place.setup, dir: &dir, home: place.home };
        let what = if number == 0 { "after a kill" } else { "after a power cut" };
        let mut daemon = match place.serve() {
            Ok(daemon) => daemon,
            Err(refusal) => {
                tally.find("wrong", words(&format!("{what}: refused: {}", tail(&refusal.log))));
                continue;
            }
        };
        for (device, disk) in place.setup.devices.iter().zip(disks) {
            let story = disk.story();
            let bytes = match read_all(&place.socket(), device.name, story.sectors()) {
                Ok(bytes) => bytes,
                // A snapshot that was lost fails, and says so.
                Err(_) if place.setup.store == Store::Snapshot && device.name == "snap" => continue,
                Err(why) => {
                    tally.find("lost", words(&format!("{what}: {why}")));
                    continue;
                }
            };
            if is_vague && device.name == "snap" {
                continue;
            }
            let complaints = story.check(0, &bytes, at, promise);
            if let Some(first) = complaints.first() {
                let kind = if first.harm == Harm::Lost { "lost" } else { "wrong" };
                let (count, name) = (complaints.len(), device.name);
                tally
                    .find(kind, words(&format!("{fired:?}, {what}: {name}: {count} sectors, first {first}")));
            }
        }
        if let Some(bad) = daemon.complaint() {
            tally.find("panics", words(&format!("{what}: {bad}")));
        }
        daemon.kill();
    }
    Ok(())
}

/// Where a setup is served.
struct Place<'a> {
    setup: &'a Setup,
    dir: &'a Path,
    home: &'a Path,
}

impl Place<'_> {
    fn socket(&self) -> std::path::PathBuf {
        self.home.join("s")
    }

    fn serve(&self) -> Result<Daemon, super::daemon::Refusal> {
        let topology = self.home.join("t.toml");
        let text = self.setup.alone(self.dir, &self.socket());
        std::fs::write(&topology, text)
            .map_err(|why| super::daemon::Refusal { status: None, log: why.to_string() })?;
        Daemon::start(self.home, &["up", &topology.to_string_lossy()], self.setup.devices.len())
    }
}
