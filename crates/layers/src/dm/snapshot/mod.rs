//! The targets `snapshot <origin> <COW device> <P|PO|N> <chunk> [<#feature args> <feature>…]` and
//! `snapshot-origin <device>`.
//!
//! A snapshot shows its origin as it was at one time. Its own writes go to the COW device. Writes to the
//! origin *through its snapshot-origin target* first copy the old chunk to the COW device. The format of a
//! persistent store (`P`) is that of the kernel, byte for byte ([`store`]).
//!
//! An origin copies for the snapshots that existed when its table was loaded; load it again after creating
//! another one. A write that did not copy for a newer snapshot makes that snapshot `Invalid`, as a full store
//! does.

mod copy;
mod invalidation;
#[cfg(test)]
mod invalidation_tests;
pub(super) mod origin;
mod registry;
mod store;
#[cfg(test)]
mod tests;

use super::background::{BackgroundWork, Disks};
use super::{
    Area, Args, Devices, Names, Simulated, Status, Target, TargetError, TargetRange, TargetRow, parse_u32,
    stack,
};
use crate::Layer;
use block::{Abilities, Bytes, Cookie, Fact, LimitsError, Op, Profile, Request, Sectors};
use copy::{ChunkCopy, Copier, Progress};
use invalidation::Invalidation;
use queue::{ChildKind, Cx, HeldRequests, Node, NodeId, Ring, Verdict};
use registry::{Lease, Member};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use store::{ChunkState, Header, Store, StoreKind};

/// The largest chunk, 16 MiB: half of the largest buffer of a ring.
const CHUNK_MAX: Sectors = Sectors(32768);

/// The chunk size of an empty store whose table line gives 0 (`DM_CHUNK_SIZE_DEFAULT_SECTORS`).
const CHUNK_DEFAULT: Sectors = Sectors(32);
/// The largest number of chunks, which bounds the exception table in memory.
const CHUNKS_MAX: u64 = 1 << 34;

pub(super) const ROW: TargetRow = TargetRow {
    name: "snapshot",
    version: [1, 16, 0],
    usage: "snapshot <origin> <COW device> <P|PO|N> <chunk> [<#feature args> <feature>…]",
    about: "a writable snapshot of an origin device",
    example: "0 2097152 snapshot disk.img changes.img P 16",
    singleton: false,
    immutable: false,
    simulated: Simulated::Apart,
};

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Features {
    zeroes: bool,
    passdown: bool,
}

/// The shared part of a snapshot. Children: the origin, the COW device.
struct Snapshot {
    len: Sectors,
    cow_len: Sectors,
    features: Features,
    store: Arc<Store>,
    /// The registration of the snapshot with its origin, for as long as this exists.
    lease: Lease,
    invalidation: Arc<Invalidation>,
}

fn features(args: &[&str]) -> Result<Features, TargetError> {
    let mut features = Features::default();
    let mut args = Args::new(args);
    if args.is_empty() {
        return Ok(features);
    }
    let count = args.count(2, "Invalid number of feature arguments")?;
    let mut features_left = args.take(count);
    while let Some(word) = features_left.take_next() {
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

fn store_kind(word: &str) -> Option<StoreKind> {
    match word.to_ascii_uppercase().as_str() {
        "P" => Some(StoreKind::Persistent { overflow: false }),
        "PO" => Some(StoreKind::Persistent { overflow: true }),
        "N" => Some(StoreKind::Transient),
        _ => None,
    }
}

/// Returns whether a chunk size is valid, and a multiple of the logical block size of both devices.
fn chunk_fits(chunk: Sectors, [origin, cow]: [&Profile; 2]) -> bool {
    let whole = |profile: &Profile| chunk.bytes().is_aligned(profile.limits.logical_block_size.0);
    chunk.0.is_power_of_two() && chunk <= CHUNK_MAX && whole(origin) && whole(cow)
}

/// Checks that the origin has this length and that its number of chunks is supported, before memory is
/// allocated for them.
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

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [origin_arg, cow_arg, kind, chunk, rest @ ..] = args else {
        return Err(TargetError::new("requires 4 or more arguments"));
    };
    let features = features(rest)?;
    let lookup = |text| move |why| TargetError::lookup(text, why);
    let origin = devices.open(origin_arg).map_err(lookup("Cannot get origin device"))?;
    let cow = devices.open(cow_arg).map_err(lookup("Cannot get COW device"))?;
    if devices.identity(origin) == devices.identity(cow) {
        return Err(TargetError::new("COW device cannot be the same as origin device"));
    }
    let no_store = TargetError::new("Couldn't create exception store");
    let kind = store_kind(kind).ok_or(no_store.clone())?;
    let chunk = Sectors(parse_u32(chunk).ok_or(no_store.clone())?.into());
    let profiles = [devices.profile(origin).clone(), devices.profile(cow).clone()];
    if chunk.0 != 0 && !chunk_fits(chunk, [&profiles[0], &profiles[1]]) {
        return Err(no_store);
    }
    check_len(place.len, chunk, origin_arg, &profiles[0])?;
    let cow_len = profiles[1].size.sectors();
    let [origin_is, cow_is] = [origin, cow].map(|device| devices.identity(device).to_owned());
    let lease = match registry::find(&cow_is) {
        Some(lease) => {
            check_handover(&lease, &origin_is, place.len, kind)?;
            lease
        }
        None => {
            let store = match kind {
                StoreKind::Transient if chunk.0 == 0 => return Err(TargetError::new("Chunk size not set")),
                StoreKind::Transient => Store::new(kind, chunk, cow_len, place.len),
                StoreKind::Persistent { .. } => open(kind, chunk, place.len, cow, &profiles, devices)?,
            };
            let fua = profiles[1].abilities.fua;
            registry::register(&origin_is, &cow_is, Member::new(Arc::new(store), cow_arg, place.len, fua))
        }
    };
    let store = lease.member.store.clone();
    if !chunk_fits(store.chunk, [&profiles[0], &profiles[1]]) {
        return Err(no_store);
    }
    let invalidation = Arc::new(Invalidation::new(store.clone(), cow_arg));
    Ok(Arc::new(Snapshot { len: place.len, cow_len, features, store, lease, invalidation }))
}

/// Checks that a store in use can be handed over to another table: same origin, same length, same kind of
/// store.
fn check_handover(lease: &Lease, origin: &str, len: Sectors, kind: StoreKind) -> Result<(), TargetError> {
    let Member { store, len: was, .. } = &*lease.member;
    let transient = |kind| kind == StoreKind::Transient;
    if lease.has_origin(origin) && *was == len && transient(store.kind) == transient(kind) {
        return Ok(());
    }
    Err(TargetError::new("Unable to hand over the store of another snapshot").with_errno(libc::EBUSY))
}

/// Reads the store of a COW device, or creates an empty one.
fn open(
    kind: StoreKind,
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
    // The chunk size in the header takes precedence over that of the table line.
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
    let store = Store::new(kind, chunk, cow_len, len);
    let mut area = vec![0; chunk.bytes().0 as usize];
    match header {
        None => {
            // The header is written last: a header on disk means that the first area is valid, not a remnant
            // of an older store.
            devices.write(cow, store.area_at(0), &area).map_err(io)?;
            devices.flush(cow).map_err(io)?;
            area[..16].copy_from_slice(&Header { valid: true, chunk }.encode());
            devices.write(cow, Bytes::ZERO, &area).map_err(io)?;
            devices.flush(cow).map_err(io)?;
        }
        Some(header) => {
            let last = if header.valid { read_areas(&store, cow, devices, &failed)? } else { None };
            if !profiles[1].read_only {
                // A killed process may have left a header and exceptions that are in the page cache only.
                // Writes to the origin would rely on them, and a power cut would lose them. Pages whose
                // writeback failed read back correctly, but no later flush stores them unless they are
                // written again.
                devices.write(cow, Bytes::ZERO, &first).map_err(io)?;
                if let Some(at) = last {
                    devices.read(cow, at, &mut area).map_err(io)?;
                    devices.write(cow, at, &area).map_err(io)?;
                }
            }
            devices.flush(cow).map_err(io)?;
            if !header.valid {
                store.invalidate();
                store.set_header_written();
            }
        }
    }
    Ok(store)
}

/// Reads the exceptions of a store. Returns the offset of the last area that has some: the areas before it
/// were durable before it was written.
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
        let is_full = store.load_area(&area).map_err(|()| failed())?;
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

    fn child_requests(&self, depth: u16) -> u16 {
        depth.max(2)
    }

    fn describe(&self) -> Vec<Fact> {
        self.invalidation.describe()
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        let copier = Copier {
            store: self.store.clone(),
            origin: below[0],
            cow: below[1],
            origin_len: self.len.bytes(),
            fua: self.lease.member.fua,
            for_origin: false,
            held: HeldRequests::default(),
        };
        Box::new(SnapshotNode {
            chunk: self.store.chunk.bytes().0,
            copier,
            features: self.features,
            requests: Box::default(),
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
                let kind = match self.store.kind {
                    StoreKind::Persistent { overflow: false } => "P",
                    StoreKind::Persistent { overflow: true } => "PO",
                    StoreKind::Transient => "N",
                };
                let features = match self.features {
                    Features { passdown: true, .. } => " 2 discard_zeroes_cow discard_passdown_origin",
                    Features { zeroes: true, .. } => " 1 discard_zeroes_cow",
                    _ => "",
                };
                let chunk = self.store.chunk.0;
                format!("{} {} {kind} {chunk}{features}", names.shown(0), names.shown(1))
            }
        }
    }

    fn prepare(&self, _: &mut dyn Disks) -> Result<(), TargetError> {
        self.store.set_cow_len(self.cow_len);
        self.lease.activate();
        Ok(())
    }

    fn notices(&self) -> Vec<String> {
        self.invalidation.notices()
    }

    fn background_work(&self) -> Option<Arc<dyn BackgroundWork>> {
        (self.store.kind != StoreKind::Transient)
            .then(|| self.invalidation.clone() as Arc<dyn BackgroundWork>)
    }

    fn events(&self) -> u32 {
        self.store.events.load(Relaxed)
    }
}

/// The state of a request, by tag.
#[derive(Clone, Copy)]
struct RequestState {
    offset: Bytes,
    op: Op,
    /// The chunk for which the request is counted as a reader of the origin.
    reads: Option<u64>,
    copy: ChunkCopy,
    /// Whether the request is a discard that was passed down to the origin.
    passed_down: bool,
}

struct SnapshotNode {
    chunk: u64,
    copier: Copier,
    features: Features,
    requests: Box<[RequestState]>,
}

impl SnapshotNode {
    fn to_cow(&self, req: &mut Request, new: u64) -> Verdict {
        req.offset = Bytes(new * self.chunk + req.offset.0 % self.chunk);
        Verdict::Down(self.copier.cow)
    }

    fn read(&mut self, io: Cookie, req: &mut Request) -> Verdict {
        let (store, chunk) = (&self.copier.store, req.offset.0 / self.chunk);
        store.read_begins(chunk);
        if let ChunkState::Copied(new) = store.find(chunk) {
            store.read_ends(chunk, self.copier.held.waiter());
            return self.to_cow(req, new);
        }
        self.requests[io.tag.index()].reads = Some(chunk);
        Verdict::Down(self.copier.origin)
    }

    fn write<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.copier.store.is_overflowed() {
            return Verdict::Up(block::Status::IoError);
        }
        let chunk = req.offset.0 / self.chunk;
        if let ChunkState::Copied(new) = self.copier.store.find(chunk) {
            return self.to_cow(req, new);
        }
        let copy = &mut self.requests[io.tag.index()].copy;
        let progress = self.copier.begin(copy, io, chunk, Some(req), cx);
        self.progress(io, req, progress)
    }

    fn progress(&mut self, io: Cookie, req: &mut Request, progress: Progress) -> Verdict {
        let copy = &self.requests[io.tag.index()].copy;
        match progress {
            Progress::Held => Verdict::Held,
            Progress::Failed(status) => Verdict::Up(status),
            // The copy included the data of this write.
            Progress::Done if copy.has_claim() => Verdict::Up(block::Status::Ok),
            Progress::Done => match self.copier.store.find(req.offset.0 / self.chunk) {
                ChunkState::Copied(new) => self.to_cow(req, new),
                _ => Verdict::Up(block::Status::IoError),
            },
        }
    }

    /// Zeroes the copy of a whole chunk; any other discard has no effect.
    fn discard(&mut self, req: &mut Request) -> Verdict {
        let whole = req.offset.is_aligned(self.chunk) && req.len.0 == self.chunk;
        match self.copier.store.find(req.offset.0 / self.chunk) {
            ChunkState::Copied(new) if whole => {
                req.op = Op::WriteZeroes;
                self.to_cow(req, new)
            }
            _ => Verdict::Up(block::Status::Ok),
        }
    }
}

impl<R: Ring> Node<R> for SnapshotNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let none = RequestState {
            offset: Bytes::ZERO,
            op: Op::Flush,
            reads: None,
            copy: ChunkCopy::NONE,
            passed_down: false,
        };
        self.requests = vec![none; tags].into();
        self.copier.held.reserve(tags);
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let request = &mut self.requests[io.tag.index()];
        *request = RequestState {
            offset: req.offset,
            op: req.op,
            reads: None,
            copy: ChunkCopy::NONE,
            passed_down: false,
        };
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
                request.passed_down = true;
                Verdict::Held
            }
            Op::Discard if self.features.zeroes => self.discard(req),
            _ => Verdict::Up(block::Status::NotSupported),
        }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        let request = &mut self.requests[io.tag.index()];
        (req.offset, req.op) = (request.offset, request.op);
        if !status.is_ok() {
            self.copier.store.note_failure(req, status);
        }
        let Some(chunk) = request.reads.take() else { return Verdict::Up(status) };
        self.copier.store.read_ends(chunk, self.copier.held.waiter());
        // Writes to the origin do not wait for reads of an invalid snapshot, so this read may have seen new
        // data.
        let is_lost = status.is_ok() && !self.copier.store.is_valid();
        Verdict::Up(if is_lost { block::Status::IoError } else { status })
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let copy = &mut self.requests[io.tag.index()].copy;
        if result < 0 && !copy.has_claim() {
            return Verdict::Up(block::Status::from_result(result, 0));
        }
        let progress = self.copier.retry(copy, io, Some(req), cx);
        self.progress(io, req, progress)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: block::Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        // A child request is spare again.
        self.copier.held.resume_all();
        let request = &mut self.requests[io.tag.index()];
        if std::mem::take(&mut request.passed_down) {
            // Errors of the origin are ignored: a discard is a hint.
            return self.discard(req);
        }
        let progress = self.copier.child_ended(&mut request.copy, io, Some(req), status, cx);
        self.progress(io, req, progress)
    }

    /// Ends a wait. A copy or area write in progress continues, as requests of other queues depend on it.
    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        if !self.copier.held.cancel(io, cx) {
            cx.cancel(io);
        }
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.copier.held.resume_woken(cx);
    }
}
