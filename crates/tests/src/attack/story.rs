//! The writer's record of a disk: for each sector every submitted version, which of them were acknowledged,
//! and which a flush or FUA has made durable. A read must return one of these.
//!
//! Each written sector contains its identity: a [`stamp`] of the disk, the sector's number and the version,
//! from which all 512 bytes follow. So a misplaced sector, an older version and a torn sector are
//! distinguished.
//!
//! Requests for one sector never overlap in time (the writer ensures that), so versions of a sector are
//! ordered.

use super::clock::Clock;
use std::fmt;

/// Versions up to this one are initial ones.
const FIRST_VERSION: u64 = 1 << 20;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// Returns the content of a sector in a version. The xorshift steps are a fixed pattern and no generator: any
/// process must recognise the sectors of any other.
pub fn stamp(disk: u64, sector: u64, version: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    let mut word = disk ^ sector.rotate_left(20) ^ version.rotate_left(40) ^ 0x5deece66d;
    bytes[..8].copy_from_slice(&disk.to_le_bytes());
    bytes[8..16].copy_from_slice(&sector.to_le_bytes());
    bytes[16..24].copy_from_slice(&version.to_le_bytes());
    for chunk in bytes[24..].chunks_exact_mut(8) {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The content of a sector that was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Found {
    /// This version; 0 is zeroes.
    Version(u64),
    /// Content that was never written there: disk (0 if it is this one), sector and version by its own stamp.
    Foreign(u64, u64, u64),
}

/// Reads a sector.
pub fn read_stamp(disk: u64, sector: u64, bytes: &[u8]) -> Found {
    if bytes.iter().all(|byte| *byte == 0) {
        return Found::Version(0);
    }
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
    let version = word(16);
    if bytes == stamp(disk, sector, version) {
        Found::Version(version)
    } else {
        Found::Foreign(word(0) ^ disk, word(8), version)
    }
}

/// The content that a request leaves in a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// A version; 0 is zeroes.
    Version(u64),
    /// Zeroes, or the earlier content.
    Discarded,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    content: Content,
    submitted: u64,
    /// `u64::MAX` until it is acknowledged.
    acked: u64,
    fua: bool,
}

/// The data that must be present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Promise {
    /// All acknowledged data.
    Acknowledged,
    /// All data that a flush or FUA covered.
    Flushed,
}

/// The kind of damage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Damage {
    /// The sector has an older version than the promised one.
    Lost,
    /// The sector has content that it never had.
    Wrong,
}

/// A sector with wrong content.
#[derive(Clone, Debug)]
pub struct Complaint {
    /// Its number.
    pub sector: u64,
    /// The kind of damage.
    pub damage: Damage,
    /// The content that was read.
    pub found: Found,
    /// The versions that it may have.
    pub allowed: Vec<u64>,
}

impl fmt::Debug for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (sector, entries) in self.sectors.iter().enumerate().filter(|(_, entries)| entries.len() > 1) {
            writeln!(f, "{sector}: {entries:?}")?;
        }
        writeln!(f, "flushes {:?}", self.flushes)
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Complaint { sector, damage, found, allowed } = self;
        write!(f, "sector {sector} {damage:?}: {found:?}, allowed {allowed:?}")
    }
}

/// A request of the writer's that changes sectors.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub count: u64,
}

/// A disk as its writer knows it.
#[derive(Clone)]
pub struct Story {
    /// The number of the disk in its stamps.
    pub disk: u64,
    clock: Clock,
    sectors: Vec<Vec<Entry>>,
    /// Flushes that were answered: when they were sent, and when they were answered.
    flushes: Vec<(u64, u64)>,
    busy: Vec<bool>,
    next_version: u64,
}

impl Story {
    /// Creates a disk with an initial version for each sector, 0 for zeroes.
    pub fn new(disk: u64, clock: Clock, versions: impl Iterator<Item = u64>) -> Story {
        let first =
            |version| vec![Entry { content: Content::Version(version), submitted: 0, acked: 0, fua: true }];
        let sectors: Vec<_> = versions.map(first).collect();
        let busy = vec![false; sectors.len()];
        let next_version = FIRST_VERSION;
        Story { disk, clock, sectors, flushes: Vec::new(), busy, next_version }
    }

    /// Gives new versions numbers that no other device of the setup uses: two may have the same disk number.
    #[must_use]
    pub fn numbered(mut self, device: u64) -> Story {
        self.next_version = FIRST_VERSION * (device + 1);
        self
    }

    /// Returns the length in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// Returns the bytes of sectors in their initial versions, to prepare a file.
    pub fn initial(disk: u64, versions: impl Iterator<Item = u64>) -> Vec<u8> {
        let sector = |(sector, version)| match version {
            0 => [0; SECTOR],
            _ => stamp(disk, sector as u64, version),
        };
        versions.enumerate().flat_map(sector).collect()
    }

    /// Reserves sectors for a request, if no request has one of them; with a new version if `content` has
    /// one.
    pub fn reserve(&mut self, sector: u64, count: u64) -> Option<Pending> {
        let range = sector as usize..(sector + count) as usize;
        if self.busy[range.clone()].iter().any(|busy| *busy) {
            return None;
        }
        self.busy[range].fill(true);
        Some(Pending { sector, count })
    }

    /// Returns a version that no sector had.
    pub fn version(&mut self) -> u64 {
        self.next_version += 1;
        self.next_version
    }

    /// Records a request that is about to be sent.
    pub fn submit(&mut self, pending: Pending, content: Content, fua: bool) {
        let submitted = self.clock.tick();
        for sector in pending.sector..pending.sector + pending.count {
            self.sectors[sector as usize].push(Entry { content, submitted, acked: u64::MAX, fua });
        }
    }

    /// Records the end of a request.
    pub fn end(&mut self, pending: Pending, is_change: bool, ok: bool) {
        let acked = if ok { self.clock.tick() } else { u64::MAX };
        let range = pending.sector as usize..(pending.sector + pending.count) as usize;
        self.busy[range.clone()].fill(false);
        if is_change {
            for entries in &mut self.sectors[range] {
                if let Some(last) = entries.last_mut() {
                    last.acked = acked;
                }
            }
        }
    }

    /// Records a flush that is about to be sent; returns the tick to pass to [`Story::flushed`].
    pub fn flush_begin(&mut self) -> u64 {
        self.clock.tick()
    }

    /// Records that the flush that was sent at `sent` was answered.
    pub fn flushed(&mut self, sent: u64) {
        let answered = self.clock.tick();
        self.flushes.push((sent, answered));
    }

    /// Returns the number of answered flushes.
    pub fn flushes(&self) -> usize {
        self.flushes.len()
    }

    /// Returns the tick up to which acknowledged data is flushed, as known at `at`.
    fn flushed_until(&self, at: u64) -> u64 {
        let known = self.flushes.iter().filter(|(_, answered)| *answered < at);
        known.map(|(sent, _)| *sent).max().unwrap_or(0)
    }

    fn allowed(&self, sector: u64, at: u64, until: u64, promise: Promise) -> Vec<u64> {
        let entries = &self.sectors[sector as usize];
        let holds = |entry: &Entry| match promise {
            Promise::Acknowledged => entry.acked < at,
            Promise::Flushed => entry.acked < at && (entry.acked == 0 || entry.acked < until || entry.fua),
        };
        let holds_alone = |entry: &Entry| holds(entry) && entry.content != Content::Discarded;
        let from = entries.iter().rposition(holds_alone).unwrap_or(0);
        let may_be = entries[from..].iter().filter(|entry| entry.submitted < at);
        let mut allowed: Vec<u64> = may_be
            .map(|entry| match entry.content {
                Content::Version(version) => version,
                Content::Discarded => 0,
            })
            .collect();
        allowed.dedup();
        allowed
    }

    /// Checks whether the bytes from `first` on are a possible content of the disk at that tick.
    pub fn check(&self, first: u64, bytes: &[u8], at: u64, promise: Promise) -> Vec<Complaint> {
        let until = self.flushed_until(at);
        let mut complaints = Vec::new();
        for (index, bytes) in bytes.chunks_exact(SECTOR).enumerate() {
            let sector = first + index as u64;
            let found = read_stamp(self.disk, sector, bytes);
            let allowed = self.allowed(sector, at, until, promise);
            if let Found::Version(version) = found
                && allowed.contains(&version)
            {
                continue;
            }
            let was_there =
                |entry: &Entry| Found::Version(entry_version(entry)) == found && entry.submitted < at;
            let known = self.sectors[sector as usize].iter().any(was_there);
            let damage = if known { Damage::Lost } else { Damage::Wrong };
            complaints.push(Complaint { sector, damage, found, allowed });
        }
        complaints
    }

    /// Continues from the content found on the disk; afterwards every sector is known and free.
    pub fn restart(&mut self, bytes: &[u8]) {
        self.busy.fill(false);
        self.flushes.clear();
        let disk = self.disk;
        for (sector, bytes) in bytes.chunks_exact(SECTOR).enumerate() {
            if let Found::Version(version) = read_stamp(disk, sector as u64, bytes) {
                let content = Content::Version(version);
                self.sectors[sector] = vec![Entry { content, submitted: 0, acked: 0, fua: true }];
            }
        }
    }

    /// Frees sectors of requests that will not be answered any more.
    pub fn abandon(&mut self) {
        self.busy.fill(false);
    }

    /// A canary: treats all submitted data as acknowledged.
    pub fn pretend_acknowledged(&mut self) {
        let now = self.clock.tick();
        for entry in self.sectors.iter_mut().flatten().filter(|entry| entry.acked == u64::MAX) {
            entry.acked = now;
        }
    }

    /// Returns the last tick.
    pub fn now(&self) -> u64 {
        self.clock.now()
    }
}

fn entry_version(entry: &Entry) -> u64 {
    match entry.content {
        Content::Version(version) => version,
        Content::Discarded => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_write(story: &mut Story, fua: bool) -> (u64, Vec<u8>) {
        let pending = story.reserve(3, 1).expect("it is free");
        let version = story.version();
        story.submit(pending, Content::Version(version), fua);
        story.end(pending, true, true);
        (version, stamp(story.disk, 3, version).to_vec())
    }

    #[test]
    fn an_acknowledged_write_may_be_missing_until_it_is_flushed() {
        let mut story = Story::new(7, Clock::default(), std::iter::repeat_n(0, 8));
        let (_, bytes) = one_write(&mut story, false);
        let at = story.now() + 1;
        assert!(story.check(3, &[0; 512], at, Promise::Flushed).is_empty());
        assert!(story.check(3, &bytes, at, Promise::Flushed).is_empty());
        let lost = story.check(3, &[0; 512], at, Promise::Acknowledged);
        assert_eq!(lost[0].damage, Damage::Lost);
        let sent = story.flush_begin();
        story.flushed(sent);
        let at = story.now() + 1;
        assert_eq!(story.check(3, &[0; 512], at, Promise::Flushed)[0].damage, Damage::Lost);
        assert!(story.check(3, &bytes, at, Promise::Flushed).is_empty());
    }

    #[test]
    fn a_fua_write_is_durable_and_a_foreign_sector_is_reported() {
        let mut story = Story::new(7, Clock::default(), std::iter::repeat_n(0, 8));
        let (version, _) = one_write(&mut story, true);
        let at = story.now() + 1;
        assert_eq!(story.check(3, &[0; 512], at, Promise::Flushed)[0].damage, Damage::Lost);
        let elsewhere = stamp(7, 4, version);
        assert_eq!(story.check(3, &elsewhere, at, Promise::Flushed)[0].damage, Damage::Wrong);
    }

    #[test]
    fn a_write_is_not_visible_before_its_submission() {
        let mut story = Story::new(7, Clock::default(), std::iter::repeat_n(0, 8));
        let before = story.now() + 1;
        let (_, bytes) = one_write(&mut story, false);
        assert_eq!(story.check(3, &bytes, before, Promise::Flushed)[0].damage, Damage::Wrong);
    }
}
