//! A writer: one connection with a few requests in flight, all of them in the [`Story`] of the disk.

use super::story::{Content, Pending, Promise, Story, stamp};
use crate::peer::Peer;
use proto::nbd::{Command, CommandFlags, NbdError, Request, TransmissionFlags};
use sim::Rng;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The mix of requests of a load, in permille; the rest are writes.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Flushes.
    pub flush: u32,
    /// Writes and zeroes that have FUA.
    pub fua: u32,
    /// Write zeroes.
    pub zero: u32,
    /// Trims.
    pub trim: u32,
    /// Reads that are checked.
    pub read: u32,
    /// The longest request, in sectors.
    pub sectors_max: u64,
    /// Requests in flight.
    pub depth: usize,
}

impl Default for Mix {
    fn default() -> Mix {
        Mix { flush: 40, fua: 60, zero: 100, trim: 80, read: 120, sectors_max: 48, depth: 4 }
    }
}

/// The result of a load.
#[derive(Clone, Default, Debug)]
pub struct Outcome {
    /// Requests that were answered without an error.
    pub answered: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// Flushes and FUA requests that failed.
    pub failed_syncs: u64,
    /// Errors because of lack of space, which are part of `errors`.
    pub no_space: u64,
    /// Reads that returned impossible content.
    pub wrong: Vec<String>,
    /// The server closed the connection before the load was complete.
    pub cut: bool,
}

impl Outcome {
    /// Adds the counts of another load.
    pub fn add(&mut self, other: Outcome) {
        self.answered += other.answered;
        self.errors += other.errors;
        self.failed_syncs += other.failed_syncs;
        self.no_space += other.no_space;
        self.wrong.extend(other.wrong);
        self.cut |= other.cut;
    }
}

enum SentRequest {
    Change(Pending, bool),
    Read(Pending),
    Flush(u64),
}

/// State shared by the writers of one disk.
pub struct Disk {
    /// The versions of its sectors.
    pub story: Mutex<Story>,
    /// Set to stop the writers.
    pub stop: AtomicBool,
    /// Requests that were answered.
    pub answered: AtomicU64,
}

impl Disk {
    /// Creates a disk without any requests so far.
    pub fn new(story: Story) -> Disk {
        Disk { story: Mutex::new(story), stop: AtomicBool::new(false), answered: AtomicU64::new(0) }
    }

    /// Locks the story.
    pub fn story(&self) -> MutexGuard<'_, Story> {
        self.story.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends `count` requests; ends early when `stop` is set or the connection is lost.
pub fn drive(disk: &Disk, peer: &mut Peer, rng: &mut Rng, count: u64, mix: Mix) -> Outcome {
    let mut outcome = Outcome::default();
    let mut flying: HashMap<u64, SentRequest> = HashMap::new();
    let mut sent = 0;
    while (sent < count && !disk.stop.load(Relaxed)) || !flying.is_empty() {
        let may_send = sent < count && !disk.stop.load(Relaxed);
        if may_send && flying.len() < mix.depth {
            sent += 1;
            match send_one(disk, peer, rng, mix) {
                Ok(Some((cookie, asked))) => {
                    flying.insert(cookie, asked);
                    continue;
                }
                Ok(None) => {
                    if flying.is_empty() {
                        continue;
                    }
                }
                Err(_) => {
                    outcome.cut = true;
                    return outcome;
                }
            }
        }
        let Some(answer) = peer.try_receive() else {
            outcome.cut = true;
            return outcome;
        };
        let Some(asked) = flying.remove(&answer.cookie) else {
            outcome.wrong.push(format!("an answer to {}, which was not asked", answer.cookie));
            return outcome;
        };
        end_one(disk, &asked, answer.error, &answer.data, &mut outcome);
    }
    outcome
}

fn send_one(
    disk: &Disk,
    peer: &mut Peer,
    rng: &mut Rng,
    mix: Mix,
) -> std::io::Result<Option<(u64, SentRequest)>> {
    let draw = rng.below(1000) as u32;
    if draw < mix.flush {
        let begun = disk.story().flush_begin();
        let cookie = peer.try_send(Request::new(Command::Flush, 0, 0, 0), &[])?;
        return Ok(Some((cookie, SentRequest::Flush(begun))));
    }
    let draw = draw - mix.flush;
    let mut story = disk.story();
    let (sector, count) = place(rng, story.sectors(), mix.sectors_max);
    let Some(pending) = story.reserve(sector, count) else { return Ok(None) };
    let (offset, len) = (sector * 512, count * 512);
    let can = peer.session.flags;
    let fua = rng.chance(mix.fua);
    let flags = CommandFlags::empty().with_if(fua, CommandFlags::FUA);
    let (request, payload, asked) = if draw < mix.read {
        (Request::new(Command::Read, 0, offset, len), Vec::new(), SentRequest::Read(pending))
    } else if draw < mix.read + mix.trim && can.contains(TransmissionFlags::SEND_TRIM) {
        story.submit(pending, Content::Discarded, fua);
        (
            Request::new(Command::Trim, 0, offset, len).with_flags(flags),
            Vec::new(),
            SentRequest::Change(pending, fua),
        )
    } else if draw < mix.read + mix.trim + mix.zero && can.contains(TransmissionFlags::SEND_WRITE_ZEROES) {
        story.submit(pending, Content::Version(0), fua);
        let flags = flags.with_if(rng.chance(400), CommandFlags::NO_HOLE);
        let request = Request::new(Command::WriteZeroes, 0, offset, len).with_flags(flags);
        (request, Vec::new(), SentRequest::Change(pending, fua))
    } else {
        let version = story.version();
        story.submit(pending, Content::Version(version), fua);
        let payload =
            (sector..sector + count).flat_map(|sector| stamp(story.disk, sector, version)).collect();
        (Request::write(0, offset, len).with_flags(flags), payload, SentRequest::Change(pending, fua))
    };
    drop(story);
    let cookie = peer.try_send(request, &payload)?;
    Ok(Some((cookie, asked)))
}

/// Draws an offset and a length: whole pages, single sectors, and arbitrary ranges, often at the same
/// offsets.
fn place(rng: &mut Rng, sectors: u64, max: u64) -> (u64, u64) {
    let max = max.min(sectors);
    let count = match rng.below(4) {
        0 => 1,
        1 => 8.min(max),
        2 => 1 + rng.below(max.min(16)),
        _ => 1 + rng.below(max),
    };
    let room = if rng.chance(300) { sectors.min(256).max(count) } else { sectors };
    let at = rng.below(room - count + 1);
    let at = if rng.chance(500) { at / 8 * 8 } else { at };
    (at, count)
}

fn end_one(disk: &Disk, asked: &SentRequest, error: Option<NbdError>, data: &[u8], outcome: &mut Outcome) {
    let mut story = disk.story();
    let is_sync = match asked {
        SentRequest::Change(pending, fua) => {
            story.end(*pending, true, error.is_none());
            *fua
        }
        SentRequest::Read(pending) => {
            if error.is_none() {
                let at = story.now() + 1;
                let complaints = story.check(pending.sector, data, at, Promise::Acknowledged);
                outcome.wrong.extend(complaints.iter().map(|complaint| format!("live: {complaint}")));
            }
            story.end(*pending, false, error.is_none());
            false
        }
        SentRequest::Flush(begun) => {
            if error.is_none() {
                story.flushed(*begun);
            }
            true
        }
    };
    drop(story);
    disk.answered.fetch_add(1, Relaxed);
    match error {
        None => outcome.answered += 1,
        Some(error) => {
            outcome.errors += 1;
            outcome.failed_syncs += u64::from(is_sync);
            outcome.no_space += u64::from(error == NbdError::NoSpace);
        }
    }
}
