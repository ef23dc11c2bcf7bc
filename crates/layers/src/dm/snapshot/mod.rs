//! `snapshot <origin> <COW device> <P|PO|N> <chunk> [<#features> <feature>…]` and `snapshot-origin <device>`.
//!
//! A snapshot shows its origin as it was: what is written to it goes to the COW device, and what is written to the origin
//! *through its snapshot-origin target* is copied there first. Persistent stores (`P`) are those of the kernel, byte for
//! byte ([`store`]).
//!
//! An origin copies for the snapshots that were made before its table was loaded, so load it again after making another
//! one. A snapshot that a write passes by because that was not done says `Invalid`, as it does when it is full.

mod copy;
mod loss;
#[cfg(test)]
mod lost_tests;
mod origin;
mod registry;
mod store;
#[cfg(test)]
mod tests;

pub(super) use origin::kind as origin_kind;

use super::chore::{Chore, Disks};
use super::{Area, Devices, Kind, Names, Place, Status, Target, TargetError, Words, number, stack};
use crate::Layer;
use block::{Abilities, Bytes, Cookie, Fact, LimitsError, Op, Profile, Request, Sectors};
use copy::{Copier, Copy, Progress};
use loss::Loss;
use queue::{ChildKind, Cx, Node, NodeId, Ring, Verdict};
use registry::{Lease, Member};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use store::{Found, Header, Keeping, Store};

/// The largest chunk: what a ring gives for one buffer, and half of it for another.
const CHUNK_MAX: Sectors = Sectors(32768);

/// Of an empty store whose line says 0 (`DM_CHUNK_SIZE_DEFAULT_SECTORS`).
const CHUNK_DEFAULT: Sectors = Sectors(32);
/// So many have a place in the tables in memory, which are pages of them.
const CHUNKS_MAX: u64 = 1 << 34;

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("snapshot", [1, 16, 0], make)
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Features {
    zeroes: bool,
    passdown: bool,
}

/// Children: the origin, the COW device.
struct Snapshot {
    len: Sectors,
    cow_len: Sectors,
    features: Features,
    store: Arc<Store>,
    /// The origin knows of it while this is there.
    lease: Lease,
    loss: Arc<Loss>,
}

fn features(words: &[&str]) -> Result<Features, TargetError> {
    let mut features = Features::default();
    let mut words = Words::new(words);
    if words.is_empty() {
        return Ok(features);
    }
    let count = words.count(2, "Invalid number of feature arguments")?;
    let mut args = words.take(count);
    while let Some(word) = args.take_next() {
        match word.to_ascii_lowercase().as_str() {
            "discard_zeroes_cow" => features.zeroes = true,
            "discard_passdown_origin" => features.passdown = true,
            _ => return Err(TargetError::new("Unrecognised feature requested")),
        }
    }
    if features.passdown && !features.zeroes {
        return Err(TargetError::new("discard_passdown_origin feature depends on discard_zeroes_cow"));
    }
    Ok(features)
}

fn keeping(word: &str) -> Option<Keeping> {
    match word.to_ascii_uppercase().as_str() {
        "P" => Some(Keeping::Persistent { overflow: false }),
        "PO" => Some(Keeping::Persistent { overflow: true }),
        "N" => Some(Keeping::Transient),
        _ => None,
    }
}

/// Whether chunks of that many sectors are whole blocks of both devices. 0: as the device says.
fn chunk_fits(chunk: Sectors, [origin, cow]: [&Profile; 2]) -> bool {
    let whole = |profile: &Profile| chunk.bytes().is_aligned(profile.limits.logical_block_size.0);
    chunk.0.is_power_of_two() && chunk <= CHUNK_MAX && whole(origin) && whole(cow)
}

/// Whether the origin is there as far as that, and its chunks can be counted: there is memory for them next.
fn check_len(len: Sectors, chunk: Sectors, name: &str, origin: &Profile) -> Result<(), TargetError> {
    let size = origin.size.sectors();
    if len > size {
        let (len, size) = (len.0, size.0);
        let why = format!("{name} too small for target: start=0, len={len}, dev_size={size}");
        return Err(TargetError::of(why));
    }
    if chunk.0 != 0 && len.0.div_ceil(chunk.0) > CHUNKS_MAX {
        return Err(TargetError::new("Couldn't create exception store").with_errno(libc::ENOMEM));
    }
    Ok(())
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [origin_word, cow_word, kept, chunk, rest @ ..] = words else {
        return Err(TargetError::new("requires 4 or more arguments"));
    };
    let features = features(rest)?;
    let lookup = |text| move |why| TargetError::lookup(text, why);
    let origin = devices.open(origin_word).map_err(lookup("Cannot get origin device"))?;
    let cow = devices.open(cow_word).map_err(lookup("Cannot get COW device"))?;
    if devices.identity(origin) == devices.identity(cow) {
        return Err(TargetError::new("COW device cannot be the same as origin device"));
    }
    let no_store = TargetError::new("Couldn't create exception store");
    let keeping = keeping(kept).ok_or(no_store.clone())?;
    let chunk = Sectors(number(chunk).ok_or(no_store.clone())?.into());
    let profiles = [devices.profile(origin).clone(), devices.profile(cow).clone()];
    if chunk.0 != 0 && !chunk_fits(chunk, [&profiles[0], &profiles[1]]) {
        return Err(no_store);
    }
    check_len(place.len, chunk, origin_word, &profiles[0])?;
    let cow_len = profiles[1].size.sectors();
    let [origin_is, cow_is] = [origin, cow].map(|device| devices.identity(device).to_owned());
    let lease = match registry::used(&cow_is) {
        Some(lease) => {
            check_handover(&lease, &origin_is, place.len, keeping)?;
            lease
        }
        None => {
            let store = match keeping {
                Keeping::Transient if chunk.0 == 0 => return Err(TargetError::new("Chunk size not set")),
                Keeping::Transient => Store::new(keeping, chunk, cow_len, place.len),
                Keeping::Persistent { .. } => open(keeping, chunk, place.len, cow, &profiles, devices)?,
            };
            let fua = profiles[1].abilities.fua;
            registry::join(&origin_is, &cow_is, Member::new(Arc::new(store), cow_word, place.len, fua))
        }
    };
    let store = lease.member.store.clone();
    if !chunk_fits(store.chunk, [&profiles[0], &profiles[1]]) {
        return Err(no_store);
    }
    let loss = Arc::new(Loss::new(store.clone(), cow_word));
    Ok(Arc::new(Snapshot { len: place.len, cow_len, features, store, lease, loss }))
}

/// A store that is in use goes on as it is: with the same origin, as much of it, and kept in the same way.
fn check_handover(lease: &Lease, origin: &str, len: Sectors, keeping: Keeping) -> Result<(), TargetError> {
    let Member { store, len: was, .. } = &*lease.member;
    let transient = |keeping| keeping == Keeping::Transient;
    if lease.is_of(origin) && *was == len && transient(store.keeping) == transient(keeping) {
        return Ok(());
    }
    Err(TargetError::new("Unable to hand over the store of another snapshot").with_errno(libc::EBUSY))
}

/// Read what a COW device holds, or make it hold an empty store.
fn open(
    keeping: Keeping,
    wanted: Sectors,
    len: Sectors,
    cow: usize,
    profiles: &[Profile; 2],
    devices: &mut dyn Devices,
) -> Result<Store, TargetError> {
    let failed = || TargetError::new("Failed to read snapshot metadata");
    let io = |_| failed().with_errno(libc::EIO);
    let cow_len = profiles[1].size.sectors();
    let block = profiles[1].limits.logical_block_size.0 as usize;
    if cow_len.bytes().0 < block as u64 {
        return Err(failed());
    }
    let mut first = vec![0; block];
    devices.read(cow, Bytes::ZERO, &mut first).map_err(io)?;
    let header = Header::decode(&first).map_err(|()| failed().with_errno(libc::ENXIO))?;
    // What the device says is right, whatever the line says.
    let chunk = match header {
        Some(header) => header.chunk,
        None if wanted.0 == 0 => CHUNK_DEFAULT.max(profiles[1].limits.logical_block_size.sectors()),
        None => wanted,
    };
    if chunk.0 == 0 || len.0.div_ceil(chunk.0) > CHUNKS_MAX {
        return Err(failed());
    }
    if !chunk_fits(chunk, [&profiles[0], &profiles[1]]) || cow_len.0 < 2 * chunk.0 {
        return Err(failed());
    }
    let store = Store::new(keeping, chunk, cow_len, len);
    let mut area = vec![0; chunk.bytes().0 as usize];
    match header {
        None => {
            // The header last: one that is on disk vouches for the area, where an older store may have left its own.
            devices.write(cow, store.area_at(0), &area).map_err(io)?;
            devices.flush(cow).map_err(io)?;
            area[..16].copy_from_slice(&Header { valid: true, chunk }.encode());
            devices.write(cow, Bytes::ZERO, &area).map_err(io)?;
            devices.flush(cow).map_err(io)?;
        }
        Some(header) => {
            let last = if header.valid { read_areas(&store, cow, devices, &failed)? } else { None };
            if !profiles[1].read_only {
                // A process that was killed may have left header and exceptions that are written, and not on stable
                // storage: writes of the origin would rely on them, and after a power cut they would be gone. What a sync
                // has failed to store reads back, and no further sync stores it unless it is written again.
                devices.write(cow, Bytes::ZERO, &first).map_err(io)?;
                if let Some(at) = last {
                    devices.read(cow, at, &mut area).map_err(io)?;
                    devices.write(cow, at, &area).map_err(io)?;
                }
            }
            devices.flush(cow).map_err(io)?;
            if !header.valid {
                store.invalidate();
                store.recorded();
            }
        }
    }
    Ok(store)
}

/// Reads the exceptions of a store. Returns where the last area lies that has some: those before it were durable before it
/// was written.
fn read_areas(
    store: &Store,
    cow: usize,
    devices: &mut dyn Devices,
    failed: &dyn Fn() -> TargetError,
) -> Result<Option<Bytes>, TargetError> {
    let size = devices.profile(cow).size;
    let mut area = vec![0; store.chunk.bytes().0 as usize];
    let mut last = None;
    for number in 0.. {
        let at = store.area_at(number);
        if at.0 + area.len() as u64 > size.0 {
            break;
        }
        devices.read(cow, at, &mut area).map_err(|_| failed().with_errno(libc::EIO))?;
        let is_full = store.take_area(&area).map_err(|()| failed())?;
        if store.has_exceptions(&area) {
            last = Some(at);
        }
        if !is_full {
            break;
        }
    }
    Ok(last)
}

impl Snapshot {
    fn area(&self) -> Vec<Area> {
        let whole = |device, len| Area { device, start: Sectors(0), len };
        vec![whole(0, self.len), whole(1, self.cow_len)]
    }
}

impl<R: Ring> Layer<R> for Snapshot {
    fn name(&self) -> &'static str {
        "snapshot"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.len, &self.area(), below)?;
        let can = below[1].abilities;
        whole.abilities =
            Abilities { discard: self.features.zeroes, write_zeroes: false, fast_zero: false, ..can };
        whole.read_only = below[1].read_only;
        whole.limits.max_write_zeroes_sectors = Sectors(0);
        whole.limits.max_hw_wzeroes_unmap_sectors = Sectors(0);
        if self.features.zeroes {
            whole.limits.discard_granularity = self.store.chunk.bytes();
            whole.limits.max_hw_discard_sectors = self.store.chunk;
        } else {
            whole.limits.max_hw_discard_sectors = Sectors(0);
        }
        whole.limits.validate()?;
        (whole.bytewise, whole.opaque, whole.sparse) = (false, false, false);
        Ok(whole)
    }

    fn spares(&self, depth: u16) -> u16 {
        depth.max(2)
    }

    fn describe(&self) -> Vec<Fact> {
        self.loss.describe()
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        let copier = Copier {
            store: self.store.clone(),
            origin: below[0],
            cow: below[1],
            origin_len: self.len.bytes(),
            fua: self.lease.member.fua,
            for_origin: false,
        };
        Box::new(SnapshotNode {
            chunk: self.store.chunk.bytes().0,
            copier,
            features: self.features,
            slots: Box::default(),
        })
    }
}

impl<R: Ring> Target<R> for Snapshot {
    fn areas(&self) -> Vec<Area> {
        self.area()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(self.store.chunk)
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match what {
            Status::Info if !self.store.is_valid() => "Invalid".to_owned(),
            Status::Info if self.store.is_overflowed() => "Overflow".to_owned(),
            Status::Info => {
                let (used, all, metadata) = self.store.usage();
                format!("{used}/{all} {metadata}")
            }
            Status::Table => {
                let kept = match self.store.keeping {
                    Keeping::Persistent { overflow: false } => "P",
                    Keeping::Persistent { overflow: true } => "PO",
                    Keeping::Transient => "N",
                };
                let features = match self.features {
                    Features { passdown: true, .. } => " 2 discard_zeroes_cow discard_passdown_origin",
                    Features { zeroes: true, .. } => " 1 discard_zeroes_cow",
                    _ => "",
                };
                let chunk = self.store.chunk.0;
                format!("{} {} {kept} {chunk}{features}", names.shown(0), names.shown(1))
            }
        }
    }

    fn prepare(&self, _: &mut dyn Disks) -> Result<(), TargetError> {
        self.store.set_cow_len(self.cow_len);
        self.lease.activate();
        Ok(())
    }

    fn notices(&self) -> Vec<String> {
        self.loss.notices()
    }

    fn chore(&self) -> Option<Arc<dyn Chore>> {
        (self.store.keeping != Keeping::Transient).then(|| self.loss.clone() as Arc<dyn Chore>)
    }

    fn events(&self) -> u32 {
        self.store.events.load(Relaxed)
    }
}

/// What a request does.
#[derive(Clone, Copy)]
struct Slot {
    offset: Bytes,
    op: Op,
    /// It reads the origin for this chunk, and says so.
    reads: Option<u64>,
    copy: Copy,
    /// A discard that was handed to the origin.
    passing: bool,
}

struct SnapshotNode {
    chunk: u64,
    copier: Copier,
    features: Features,
    /// By tag.
    slots: Box<[Slot]>,
}

impl SnapshotNode {
    fn to_cow(&self, req: &mut Request, new: u64) -> Verdict {
        req.offset = Bytes(new * self.chunk + req.offset.0 % self.chunk);
        Verdict::Down(self.copier.cow)
    }

    fn read(&mut self, io: Cookie, req: &mut Request) -> Verdict {
        let (store, chunk) = (&self.copier.store, req.offset.0 / self.chunk);
        store.read_begins(chunk);
        if let Found::Copied(new) = store.find(chunk) {
            store.read_ends(chunk);
            return self.to_cow(req, new);
        }
        self.slots[io.tag.index()].reads = Some(chunk);
        Verdict::Down(self.copier.origin)
    }

    fn write<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.copier.store.is_overflowed() {
            return Verdict::Up(block::Status::IoError);
        }
        let chunk = req.offset.0 / self.chunk;
        if let Found::Copied(new) = self.copier.store.find(chunk) {
            return self.to_cow(req, new);
        }
        let copy = &mut self.slots[io.tag.index()].copy;
        let progress = self.copier.begin(copy, io, chunk, Some(req), cx);
        self.go_on(io, req, progress)
    }

    fn go_on(&mut self, io: Cookie, req: &mut Request, progress: Progress) -> Verdict {
        let copy = &self.slots[io.tag.index()].copy;
        match progress {
            Progress::Held => Verdict::Held,
            Progress::Failed(status) => Verdict::Up(status),
            // What was to be written went along.
            Progress::Done if copy.is_ours() => Verdict::Up(block::Status::Ok),
            Progress::Done => match self.copier.store.find(req.offset.0 / self.chunk) {
                Found::Copied(new) => self.to_cow(req, new),
                _ => Verdict::Up(block::Status::IoError),
            },
        }
    }

    /// Zero the copy of a whole chunk; nothing else is there to be discarded.
    fn discard(&mut self, req: &mut Request) -> Verdict {
        let whole = req.offset.is_aligned(self.chunk) && req.len.0 == self.chunk;
        match self.copier.store.find(req.offset.0 / self.chunk) {
            Found::Copied(new) if whole => {
                req.op = Op::WriteZeroes;
                self.to_cow(req, new)
            }
            _ => Verdict::Up(block::Status::Ok),
        }
    }
}

impl<R: Ring> Node<R> for SnapshotNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let none = Slot { offset: Bytes::ZERO, op: Op::Flush, reads: None, copy: Copy::NONE, passing: false };
        self.slots = vec![none; tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        *slot = Slot { offset: req.offset, op: req.op, reads: None, copy: Copy::NONE, passing: false };
        match req.op {
            Op::Flush => Verdict::Down(self.copier.cow),
            Op::Prefetch => Verdict::Up(block::Status::Ok),
            Op::Read | Op::Write | Op::Discard if !self.copier.store.is_valid() => {
                Verdict::Up(block::Status::IoError)
            }
            Op::Read => self.read(io, req),
            Op::Write => self.write(io, req, cx),
            Op::Discard if self.features.passdown => {
                if cx.spawn(io, self.copier.origin, ChildKind::Copy, *req).is_err() {
                    return Verdict::Blocked;
                }
                slot.passing = true;
                Verdict::Held
            }
            Op::Discard if self.features.zeroes => self.discard(req),
            _ => Verdict::Up(block::Status::NotSupported),
        }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        (req.offset, req.op) = (slot.offset, slot.op);
        if !status.is_ok() {
            self.copier.store.ended_badly(req, status);
        }
        let Some(chunk) = slot.reads.take() else { return Verdict::Up(status) };
        self.copier.store.read_ends(chunk);
        // Nobody waited for the read to write the origin, if the snapshot was lost meanwhile.
        let is_lost = status.is_ok() && !self.copier.store.is_valid();
        Verdict::Up(if is_lost { block::Status::IoError } else { status })
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, _: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let copy = &mut self.slots[io.tag.index()].copy;
        let progress = self.copier.look(copy, io, Some(req), cx);
        self.go_on(io, req, progress)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: block::Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        if std::mem::take(&mut slot.passing) {
            // An origin that cannot discard keeps what it has: a discard is a hint.
            return self.discard(req);
        }
        let progress = self.copier.child_ended(&mut slot.copy, io, Some(req), status, cx);
        self.go_on(io, req, progress)
    }

    /// Waiting is ours to end; what others have begun for all queues is not given up half done.
    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        cx.cancel(io);
    }
}
