//! Each call of the file system in turn fails (EIO, ENOSPC), hangs or is executed by half, once or
//! permanently.
//!
//! Every successful answer must be true: acknowledged data is read back, and data that a flush covered
//! survives a power cut in which a failed sync has lost its data, as on Linux. A device recovers when its
//! file system has space again.

use super::Tally;
use super::clock::Clock;
use super::daemon::{Daemon, Refusal, has_panicked, tail};
use super::fault::{Call, Faults, Verdict};
use super::kills::read_all;
use super::load::{Disk, Mix, drive};
use super::options::Options;
use super::recorder::Recorder;
use super::rounds::{Round, over_stores};
use super::stores::{Setup, Store};
use super::story::{Content, Damage, Promise, stamp};
use crate::peer::Peer;
use proto::nbd::CommandFlags;
use proto::nbd::client::HandshakeOptions;
use sim::Rng;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Error numbers of Linux.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// Requests of a script.
const REQUESTS: u64 = 40;
/// Most calls of a script; later ones are not tried.
const CALLS: u64 = 220;

/// Name, fault and number of the calls that have it.
const KINDS: [(&str, Verdict, u64); 6] = [
    ("eio", Verdict::Fail(EIO), 1),
    ("enospc", Verdict::Fail(ENOSPC), 1),
    ("eio-on", Verdict::Fail(EIO), 30),
    ("enospc-on", Verdict::Fail(ENOSPC), 30),
    ("hang", Verdict::Hang(Duration::from_millis(60)), 1),
    ("short", Verdict::Short, 5),
];

/// Tries `count` pairs of a call and a fault.
pub fn run(options: &Options) -> Tally {
    over_stores("faults", options, 1, &["faults", "fired", "lost", "wrong", "latched", "panics"], one)
}

/// The calls with a fault, and the fault. Consecutive seeds try each combination of call and kind in turn.
struct Plan {
    kind: &'static str,
    verdict: Verdict,
    faults: Faults,
    /// The plan takes effect before the server starts.
    while_starting: bool,
}

impl Plan {
    fn draw(seed: u64, rng: &mut Rng) -> Plan {
        let turn = seed / Store::ALL.len() as u64;
        let (kind, verdict, calls) = KINDS[(turn % KINDS.len() as u64) as usize];
        // Usually the server is ready before a call fails.
        let while_starting = rng.chance(150);
        let first = turn / KINDS.len() as u64 * 7 % if while_starting { 20 } else { CALLS };
        Plan { kind, verdict, faults: Faults::at(first, calls, verdict), while_starting }
    }

    fn is_harmless(&self) -> bool {
        matches!(self.verdict, Verdict::Hang(_) | Verdict::Short)
    }
}

/// A setup that is served from the recording file system.
struct Scene<'a> {
    round: &'a Round<'a>,
    setup: &'a Setup,
    plan: &'a Plan,
    recorder: &'a Recorder,
    disks: &'a [Disk],
    clock: &'a Clock,
    home: &'a Path,
}

fn one(round: &Round<'_>, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(round.seed);
    let mut setup = Setup::draw(round.store, &mut rng);
    let plan = Plan::draw(round.seed, &mut rng);
    // After a partial direct write to a FUSE file Linux does not advance the position, so io_uring, which
    // continues on its own, writes the rest at the wrong offset (seen on 6.18).
    setup.epoll |= plan.verdict == Verdict::Short;
    let scratch = round.options.scratch().map_err(|why| why.to_string())?;
    let clock = Clock::default();
    let recorder =
        Recorder::mount(&scratch.path().join("m"), clock.clone()).map_err(|why| why.to_string())?;
    setup.prepare(recorder.path()).map_err(|why| why.to_string())?;
    recorder.set_uncached(rng.chance(500));
    recorder.begin();
    if round.options.canary {
        recorder.set_dropped_syncs(2);
    }
    let disks = setup.disks(&clock);
    let home = scratch.path();
    let scene =
        Scene { round, setup: &setup, plan: &plan, recorder: &recorder, disks: &disks, clock: &clock, home };
    tally.count("faults", 1);
    let fired = scene.play(&mut rng, tally)?;
    tally.count("fired", u64::from(!fired.is_empty()));
    scene.aftermath(&fired, &mut rng, tally)
}

impl Scene<'_> {
    fn words(&self, what: &str) -> String {
        let (Round { replay, .. }, Plan { kind, faults, .. }) = (self.round, self.plan);
        format!("{replay} ({}, {kind} at call {}): {what}", self.setup.about, faults.first)
    }

    fn socket(&self) -> PathBuf {
        self.home.join("s")
    }

    /// Serves the setup's files in a folder.
    fn serve(&self, dir: &Path) -> Result<Daemon, Refusal> {
        let topology = self.home.join("t.toml");
        let text = self.setup.alone(dir, &self.socket());
        std::fs::write(&topology, text).map_err(|why| Refusal { status: None, log: why.to_string() })?;
        Daemon::start(self.home, &["up", &topology.to_string_lossy()], self.setup.devices.len())
    }

    /// Starts the server. One that is refused because of the fault must start once the faults end.
    fn start(&self) -> Result<Daemon, String> {
        let Plan { faults, while_starting, .. } = self.plan;
        if *while_starting {
            self.recorder.set_faults(faults.clone());
        }
        let daemon = match self.serve(self.recorder.path()) {
            Err(refusal) if *while_starting && refusal.is_orderly() => {
                self.recorder.pause_faults();
                self.serve(self.recorder.path())
            }
            other => other,
        };
        let daemon =
            daemon.map_err(|refusal| self.words(&format!("it was not served: {}", tail(&refusal.log))))?;
        if !while_starting {
            self.recorder.set_faults(faults.clone());
        }
        Ok(daemon)
    }

    /// Runs the load; returns the calls that had the fault.
    fn play(&self, rng: &mut Rng, tally: &mut Tally) -> Result<Vec<Call>, String> {
        let mut daemon = self.start()?;
        for (device, disk) in self.setup.devices.iter().zip(self.disks) {
            let name = device.name;
            let mut peer = Peer::with(&self.socket(), HandshakeOptions::new(name))
                .map_err(|why| self.words(&why.to_string()))?;
            let mix = Mix { depth: 3, flush: 100, sectors_max: 80, ..Mix::default() };
            let outcome = drive(disk, &mut peer, rng, REQUESTS, mix);
            if self.plan.is_harmless() && outcome.errors > 0 {
                tally.find("wrong", self.words(&format!("{name}: {} errors", outcome.errors)));
            }
            if outcome.cut {
                tally.find("wrong", self.words(&format!("{name}: the connection was closed")));
            }
            for wrong in outcome.wrong {
                tally.find("wrong", self.words(&format!("{name}: {wrong}")));
            }
        }
        self.recorder.pause_faults();
        let fired = self.recorder.faults().fired;
        if must_recover(self.setup.store, self.plan.verdict, &fired) {
            for (device, disk) in self.setup.devices.iter().zip(self.disks) {
                if let Err(why) = super::guarded(|| write_through(&self.socket(), device.name, disk, rng)) {
                    tally.find("latched", self.words(&format!("{} after {fired:?}: {why}", device.name)));
                }
            }
        }
        if let Some(bad) = daemon.complaint() {
            tally.find("panics", self.words(&bad));
        }
        if rng.chance(300) {
            daemon.terminate();
            if has_panicked(&daemon.log()) {
                tally.find("panics", self.words(tail(&daemon.log())));
            }
        }
        daemon.kill();
        Ok(fired)
    }

    /// Checks the data that the next server reads: from the files as they are, and from the files after a
    /// power cut.
    fn aftermath(&self, fired: &[Call], rng: &mut Rng, tally: &mut Tally) -> Result<(), String> {
        let (at, recording) = (self.clock.now() + 1, self.recorder.recording());
        let killed = (self.recorder.contents(), self.setup.store.kept_by_kill(), "after a kill");
        let cut = (recording.crash(at, rng), Promise::Flushed, "after a power cut");
        // Mounted at the same path: a mirror identifies its devices by their names.
        self.recorder.unmount();
        let dir = self.recorder.path();
        for (files, promise, what) in [killed, cut] {
            super::cuts::write_state(dir, &files).map_err(|why| why.to_string())?;
            match self.serve(dir) {
                Ok(mut daemon) => {
                    self.read(at, promise, &format!("{fired:?}, {what}"), tally);
                    if let Some(bad) = daemon.complaint() {
                        tally.find("panics", self.words(&format!("{what}: {bad}")));
                    }
                    daemon.kill();
                }
                Err(refusal) => {
                    tally.find("wrong", self.words(&format!("{what}: refused: {}", tail(&refusal.log))));
                }
            }
            let _ = std::fs::remove_dir_all(dir);
        }
        Ok(())
    }

    fn read(&self, at: u64, promise: Promise, what: &str, tally: &mut Tally) {
        for (device, disk) in self.setup.devices.iter().zip(self.disks) {
            let (story, name) = (disk.story(), device.name);
            let bytes = match read_all(&self.socket(), name, story.sectors()) {
                Ok(bytes) => bytes,
                // A lost snapshot fails its reads.
                Err(_) if name == "snap" => continue,
                Err(why) => {
                    tally.find("lost", self.words(&format!("{what}: {why}")));
                    continue;
                }
            };
            let complaints = story.check(0, &bytes, at, promise);
            if let Some(first) = complaints.first() {
                let kind = if first.damage == Damage::Lost { "lost" } else { "wrong" };
                let count = complaints.len();
                tally.find(kind, self.words(&format!("{what}: {name}: {count} sectors, first {first}")));
            }
        }
    }
}

/// Returns whether the device must work once the faults end: no sync has failed, and the fault was lack of
/// space.
fn must_recover(store: Store, verdict: Verdict, fired: &[Call]) -> bool {
    let only_room = verdict == Verdict::Fail(ENOSPC) && !fired.contains(&Call::Sync);
    // A snapshot whose store is full is lost by design, a mirror drops the device, and log-writes ends its
    // log.
    only_room && matches!(store, Store::Raw | Store::Direct | Store::Overlay | Store::Qcow2 | Store::Backed)
}

/// Writes, flushes and reads; all of it must succeed.
fn write_through(socket: &Path, name: &str, disk: &Disk, rng: &mut Rng) -> Result<(), String> {
    let mut peer = Peer::with(socket, HandshakeOptions::new(name)).map_err(|why| why.to_string())?;
    let mut story = disk.story();
    for _ in 0..8 {
        let sector = rng.below(story.sectors() - 8);
        let Some(pending) = story.reserve(sector, 8) else { continue };
        let version = story.version();
        story.submit(pending, Content::Version(version), false);
        let data: Vec<u8> =
            (sector..sector + 8).flat_map(|sector| stamp(story.disk, sector, version)).collect();
        let result = peer.write(sector * 512, &data, CommandFlags::empty());
        story.end(pending, true, result.is_ok());
        result.map_err(|why| format!("a write: {why}"))?;
    }
    let sent = story.flush_begin();
    peer.flush().map_err(|why| format!("a flush: {why}"))?;
    story.flushed(sent);
    Ok(())
}
