//! Power cuts. A load runs on the real server over the recording file system. The recording determines which
//! states the disk can have after a power cut; the real server then serves states drawn from these.

use super::Tally;
use super::clock::Clock;
use super::daemon::{Daemon, has_panicked, tail};
use super::kills::read_all;
use super::load::{Disk, Mix, Outcome, drive};
use super::options::Options;
use super::recorder::{Recorder, Recording};
use super::rounds::{Round, over_stores};
use super::stores::{Setup, Store};
use super::story::{Damage, Promise, SECTOR, stamp};
use crate::peer::Peer;
use proto::nbd::CommandFlags;
use proto::nbd::client::HandshakeOptions;
use sim::Rng;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

/// States that one server serves at a time.
const BATCH: usize = 8;
/// Requests of each connection.
const REQUESTS: u64 = 120;
/// Connections to each device.
const CONNECTIONS: usize = 2;
/// The canary drops one sync in this many.
const CANARY_DROPS: u64 = 3;

/// Verifies `count` crash states.
pub fn run(options: &Options) -> Tally {
    over_stores("cuts", options, options.each, &["states", "lost", "wrong", "refused", "panics"], one)
}

fn one(round: &Round<'_>, tally: &mut Tally) -> Result<(), String> {
    let Round { options, store, seed, count: states, ref replay } = *round;
    let mut rng = Rng::new(seed);
    let setup = Setup::draw(store, &mut rng);
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let clock = Clock::default();
    let disks = setup.disks(&clock);
    let stage = Stage { round, setup: &setup, disks: &disks, scratch: scratch.path(), clock: &clock };
    let (recording, ready) = stage.record(&mut rng, tally)?;
    let verifier = Verifier { setup: &setup, disks: &disks, replay };
    let (end, boundaries) = (clock.now() + 1, recording.sync_boundaries());
    let boundaries: Vec<u64> = boundaries.into_iter().filter(|at| *at > ready).collect();
    let mut batch = Vec::new();
    for number in 0..states {
        let at = match (number % 3, boundaries.is_empty()) {
            (0, _) | (_, true) => rng.between(ready, end),
            _ => *rng.pick(&boundaries),
        };
        let files = recording.crash(at, &mut rng);
        let dir = scratch.path().join(format!("s{}", batch.len()));
        write_state(&dir, &files).map_err(|why| why.to_string())?;
        batch.push(State { number, at, dir });
        if batch.len() == BATCH || number + 1 == states {
            verifier.verify(scratch.path(), &batch, &mut rng, tally);
            for state in batch.drain(..) {
                let _ = std::fs::remove_dir_all(state.dir);
            }
            if options.is_over() {
                break;
            }
        }
    }
    Ok(())
}

/// Setup, disks and folders of a round while its load is recorded.
struct Stage<'a> {
    round: &'a Round<'a>,
    setup: &'a Setup,
    disks: &'a [Disk],
    scratch: &'a Path,
    clock: &'a Clock,
}

impl Stage<'_> {
    /// Runs the load; returns the recording, and the tick at which the server was ready.
    fn record(&self, rng: &mut Rng, tally: &mut Tally) -> Result<(Recording, u64), String> {
        let Stage { round, setup, scratch, clock, .. } = *self;
        let recorder = Recorder::mount(&scratch.join("m"), clock.clone()).map_err(|why| why.to_string())?;
        recorder.set_uncached(rng.chance(300));
        setup.prepare(recorder.path()).map_err(|why| why.to_string())?;
        recorder.begin();
        recorder.set_delay(*rng.pick(&[0, 3, 10]));
        if round.options.canary {
            recorder.set_dropped_syncs(CANARY_DROPS);
        }
        let (dir, socket) = (scratch.join("d"), scratch.join("s"));
        std::fs::create_dir_all(&dir).map_err(|why| why.to_string())?;
        let topology = dir.join("t.toml");
        let text = setup.alone(recorder.path(), &socket);
        std::fs::write(&topology, text).map_err(|why| why.to_string())?;
        let mut daemon = Daemon::start(&dir, &["up", &topology.to_string_lossy()], setup.devices.len())
            .map_err(|refusal| format!("it was not served: {}", tail(&refusal.log)))?;
        let ready = clock.now() + 1;
        let outcome = self.load(&socket, &dir, rng)?;
        let words = |what: &str| format!("{} ({}): {what}", round.replay, setup.about);
        for wrong in outcome.wrong {
            tally.find("wrong", words(&wrong));
        }
        if let Some(bad) = daemon.complaint() {
            tally.find("panics", words(&bad));
        }
        tally.count("requests", outcome.answered);
        tally.count("errors", outcome.errors);
        if rng.chance(300) {
            daemon.terminate();
        }
        daemon.kill();
        Ok((recorder.recording(), ready))
    }

    /// Runs several connections that write to each device; commits an overlay meanwhile if the store requires
    /// it.
    fn load(&self, socket: &Path, dir: &Path, rng: &mut Rng) -> Result<Outcome, String> {
        let mut writers = Vec::new();
        for (device, disk) in self.setup.devices.iter().zip(self.disks) {
            for _ in 0..CONNECTIONS {
                let peer =
                    Peer::with(socket, HandshakeOptions::new(device.name)).map_err(|why| why.to_string())?;
                writers.push((disk, peer, rng.fork()));
            }
        }
        let depth = 1 + rng.below(6) as usize;
        let mix = Mix { depth, flush: *rng.pick(&[10, 40, 120]), ..Mix::default() };
        let mut total = Outcome::default();
        std::thread::scope(|scope| {
            let drive = |(disk, mut peer, mut rng): (&Disk, Peer, Rng)| {
                drive(disk, &mut peer, &mut rng, REQUESTS, mix)
            };
            let threads: Vec<_> =
                writers.into_iter().map(|writer| scope.spawn(move || drive(writer))).collect();
            if self.setup.store == Store::Commit {
                self.commit(dir);
            }
            for thread in threads {
                match thread.join() {
                    Ok(outcome) => total.add(outcome),
                    Err(_) => total.wrong.push("the client was answered against the protocol".to_owned()),
                }
            }
        });
        Ok(total)
    }

    /// Commits the overlay when half of the load is done. A commit that comes too late is refused, which is
    /// ignored.
    fn commit(&self, dir: &Path) {
        let answered = || self.disks.iter().map(|disk| disk.answered.load(Relaxed)).sum::<u64>();
        crate::tools::until(crate::tools::PATIENCE, || (answered() >= REQUESTS / 2).then_some(()));
        let mut commit = std::process::Command::new(crate::server::binary());
        commit.args(["commit", "disk"]).env("BLOCKYARD_RUN", dir.join("run"));
        let _ = commit.output();
    }
}

struct State {
    number: u64,
    at: u64,
    dir: PathBuf,
}

/// Writes a state's files, holes as holes.
pub(crate) fn write_state(dir: &Path, files: &BTreeMap<OsString, Vec<u8>>) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    std::fs::create_dir_all(dir)?;
    for (name, content) in files {
        let file = std::fs::File::create(dir.join(name))?;
        file.set_len(content.len() as u64)?;
        for (index, page) in content.chunks(4096).enumerate() {
            if page.iter().any(|byte| *byte != 0) {
                file.write_all_at(page, index as u64 * 4096)?;
            }
        }
    }
    Ok(())
}

struct Verifier<'a> {
    setup: &'a Setup,
    disks: &'a [Disk],
    replay: &'a str,
}

impl Verifier<'_> {
    /// Serves all states with one server. If it refuses, serves each state alone to find the faulty one.
    fn verify(&self, scratch: &Path, batch: &[State], rng: &mut Rng, tally: &mut Tally) {
        if let Err(refusal) = self.serve(scratch, batch, rng, tally) {
            if batch.len() > 1 {
                for state in batch {
                    self.verify(scratch, std::slice::from_ref(state), rng, tally);
                }
                return;
            }
            let kind = if has_panicked(&refusal) { "panics" } else { "refused" };
            tally.count("states", 1);
            tally.find(kind, self.words(&batch[0], &refusal));
        }
    }

    fn words(&self, state: &State, what: &str) -> String {
        format!("{} ({}) state {} at {}: {what}", self.replay, self.setup.about, state.number, state.at)
    }

    fn serve(&self, scratch: &Path, batch: &[State], rng: &mut Rng, tally: &mut Tally) -> Result<(), String> {
        let (dir, socket) = (scratch.join("v"), scratch.join("vs"));
        for state in batch {
            // Checked before the server changes the files: users may open an image with other programs first.
            if let Some(bad) = self.setup.check_images(&state.dir) {
                tally.find("wrong", self.words(state, &format!("before it is opened: {bad}")));
            }
        }
        std::fs::create_dir_all(&dir).map_err(|why| why.to_string())?;
        let texts = batch
            .iter()
            .enumerate()
            .map(|(index, state)| self.setup.topology(&state.dir, &format!("x{index}"), &socket));
        let text = format!("queues = 1\n{}{}", self.setup.head(), texts.collect::<String>());
        let topology = dir.join("t.toml");
        std::fs::write(&topology, text).map_err(|why| why.to_string())?;
        let exports = batch.len() * self.disks.len();
        let mut daemon = Daemon::start(&dir, &["up", &topology.to_string_lossy()], exports)
            .map_err(|refusal| tail(&refusal.log).to_owned())?;
        for (index, state) in batch.iter().enumerate() {
            tally.count("states", 1);
            for (device, disk) in self.setup.devices.iter().zip(self.disks) {
                let name = format!("x{index}{}", device.name);
                self.check_device(state, &socket, &name, disk, rng, tally);
            }
        }
        if let Some(bad) = daemon.complaint() {
            tally.find("panics", self.words(&batch[0], &bad));
        }
        let may_differ = !self.setup.images.is_empty();
        if may_differ {
            daemon.terminate();
            for state in batch {
                if let Some(bad) = self.setup.check_images(&state.dir) {
                    tally.find("wrong", self.words(state, &bad));
                }
            }
        }
        daemon.kill();
        Ok(())
    }

    /// Checks one device: its content, and that new writes change nothing else.
    fn check_device(
        &self,
        state: &State,
        socket: &Path,
        name: &str,
        disk: &Disk,
        rng: &mut Rng,
        tally: &mut Tally,
    ) {
        let story = disk.story();
        let bytes = match read_all(socket, name, story.sectors()) {
            Ok(bytes) => bytes,
            Err(why) => return tally.find("lost", self.words(state, &why)),
        };
        let complaints = story.check(0, &bytes, state.at, Promise::Flushed);
        if let Some(first) = complaints.first() {
            let kind = if first.damage == Damage::Lost { "lost" } else { "wrong" };
            let what = format!("{name}: {} sectors, first {first}", complaints.len());
            return tally.find(kind, self.words(state, &what));
        }
        if let Err(why) = super::guarded(|| check_writes(socket, name, story.disk, bytes, rng)) {
            tally.find("wrong", self.words(state, &format!("{name}: {why}")));
        }
    }
}

/// Writes to random places, and checks that all other sectors are unchanged.
fn check_writes(
    socket: &Path,
    name: &str,
    disk: u64,
    mut bytes: Vec<u8>,
    rng: &mut Rng,
) -> Result<(), String> {
    let mut peer = Peer::with(socket, HandshakeOptions::new(name)).map_err(|why| why.to_string())?;
    let sectors = (bytes.len() / SECTOR) as u64;
    for number in 0..6 {
        let (at, count) = (rng.below(sectors), 1 + rng.below(40));
        let count = count.min(sectors - at);
        let data: Vec<u8> = (at..at + count).flat_map(|sector| stamp(disk, sector, number + 1)).collect();
        peer.write(at * 512, &data, CommandFlags::empty())
            .map_err(|why| format!("a write after the cut: {why}"))?;
        bytes[(at * 512) as usize..][..data.len()].copy_from_slice(&data);
    }
    peer.flush().map_err(|why| format!("a flush after the cut: {why}"))?;
    let now = peer.read(0, bytes.len() as u64).map_err(|why| format!("a read after the cut: {why}"))?;
    let differs = now.chunks(SECTOR).zip(bytes.chunks(SECTOR)).position(|(now, before)| now != before);
    differs.map_or(Ok(()), |sector| Err(format!("sector {sector} changed by writes to others after the cut")))
}
