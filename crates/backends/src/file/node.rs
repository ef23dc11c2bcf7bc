//! A file as one hardware queue sees it: where each request is done, and what is done about how it ended.
//!
//! A request that is done in place never shows up in `slots` for long. One that the ring carries has its
//! phase there, and `reap` goes on from that. Whenever a request leaves this node, by `Up`, `Busy` or
//! `Blocked`, what it had taken is given back in one place, `settle`; after the latter two it starts from the beginning, which is
//! harmless as all that was done of it can be done again.

use super::container::HEAD_LEN;
use super::exclusive::Gate;
use super::extents::KnownData;
use super::facts::Shared;
use super::head::Step;
use super::pace::Pace;
use crate::pieces::fill_zeroes;
use block::{Cookie, Data, Flags, Op, Region, Request, Segment, Status};
use queue::{Cx, FileId, FileOp, Nanos, Node, NodeId, Nudge, Patience, Ring, Verdict};
use std::sync::Arc;

/// What the ring is doing for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Reading or writing the request's own memory, or writing zeroes.
    Move,
    /// Reading a window of whole blocks.
    WindowRead,
    /// Writing it.
    WindowWrite,
    /// `fallocate` with these mode bits.
    Allocate(i32),
    /// The last thing: everything so far, onto stable storage.
    Sync,
    /// The same, once the sync of another request is over.
    AwaitSync,
    /// Nothing: a turn of the loop passes.
    Pause,
    /// A hint of which the end does not matter.
    Hint,
    /// What a write to the head of a file needs: see [`head`](super::head).
    Head(Step),
}

/// What we know of a request between its submit and its end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Bytes of the request that are done.
    pub(super) done: u64,
    pub(super) phase: Phase,
    /// Zeroes, where write zeroes is done by writing them; empty elsewhere.
    pub(super) zeroes: Segment,
    /// It was counted in at the gate.
    pub(super) entered: bool,
    /// It has claimed to be the only write.
    pub(super) claimed: bool,
    /// Memory for a window; empty when there is none.
    pub(super) bounce: Segment,
    /// The window, in bytes of the device, and how much of it is done.
    pub(super) window: (u64, u64),
    pub(super) window_done: u64,
    /// A sync through `error_file` decides whether the kernel lost data: a durable write ended with ENOSPC, or a flush
    /// is for what was written after data was lost.
    checks_errors: bool,
    /// It is the only request that writes to the head.
    pub(super) claimed_head: bool,
    /// Which sync will serve it: see [`Rounds`](queue::Rounds).
    promise: u64,
    /// How long it waits before it looks again.
    pub(super) look_ns: u64,
}

impl Slot {
    const NEW: Slot = Slot {
        done: 0,
        phase: Phase::Move,
        zeroes: Segment::EMPTY,
        entered: false,
        claimed: false,
        bounce: Segment::EMPTY,
        window: (0, 0),
        window_done: 0,
        checks_errors: false,
        claimed_head: false,
        promise: 0,
        look_ns: 0,
    };

    /// Write zeroes is done by writing them.
    pub(super) fn is_zeroing(&self) -> bool {
        self.zeroes.len > 0
    }

    /// It has taken something that it must give back.
    fn owes(&self) -> bool {
        self.zeroes.len > 0 || self.bounce.len > 0 || self.claimed || self.entered || self.claimed_head
    }
}

/// Zeroes for write zeroes where nothing better works: bytes a piece.
pub(super) const ZEROES_LEN: u32 = 256 << 10;
/// How long a flush waits before it looks whether the sync of another is over: twice as long each time, so
/// that a slow disk is not waited for with many looks, nor a fast one for long.
const SYNC_LOOK_NS_MIN: u64 = 50_000;
const SYNC_LOOK_NS_MAX: u64 = 10_000_000;
/// Pieces of them done in place before other requests get their turn.
const ZERO_PIECES: u32 = 16;

/// The node.
#[derive(Debug)]
pub struct FileNode {
    pub(super) shared: Arc<Shared>,
    pub(super) file: FileId,
    /// The same file, opened a second time; it is synced only to find out whether the kernel lost data that was
    /// written. The kernel reports each loss once to every open file description, so this one still gets a
    /// report that a durable write on `file` has consumed. `None`: durable writes are a write and a sync.
    error_file: Option<FileId>,
    /// A file in memory, to look at what only the kernel reaches.
    pub(super) scratch_file: Option<FileId>,
    /// The file's head, without the bytes of the one request that writes to it, while these are copied. Empty where
    /// clients may write there what they like.
    pub(super) head: Box<[u8]>,
    pub(super) slots: Box<[Slot]>,
    pub(super) known: KnownData,
    /// The file's own memory, and when its data was last looked for.
    pub(super) own: Option<(Region, Nanos)>,
    pub(super) gate: Arc<Gate>,
    pace: Pace,
}

impl FileNode {
    /// A node on a file with these facts, which the queue's ring knows as `file`.
    pub fn new(shared: Arc<Shared>, file: FileId) -> FileNode {
        let gate = shared.exclusive.join();
        let head = vec![0; if shared.facts.head > 0 { HEAD_LEN } else { 0 }].into();
        FileNode {
            shared,
            file,
            error_file: None,
            scratch_file: None,
            head,
            slots: Box::default(),
            known: KnownData::NONE,
            own: None,
            gate,
            pace: Pace::NEW,
        }
    }

    /// Syncs through a second open file description of the file, which no write can take the kernel's report of lost data
    /// from: see [`File::error_descriptor`](super::File::error_descriptor).
    #[must_use]
    pub fn with_error_file(self, file: FileId) -> FileNode {
        FileNode { error_file: Some(file), ..self }
    }

    /// Copies what only the kernel reaches through a file in memory, where that has to be checked.
    #[must_use]
    pub fn with_scratch_file(self, file: FileId) -> FileNode {
        FileNode { scratch_file: Some(file), ..self }
    }

    /// Wakes the queue so when requests of it may go on that waited for those of other queues: its thread may sleep then.
    #[must_use]
    pub fn woken_by(self, nudge: Nudge) -> FileNode {
        self.shared.exclusive.wake_with(&self.gate, nudge);
        self
    }

    /// The same on a file whose own memory its ring knows as this region: see [`File::memory`](super::File::memory).
    #[must_use]
    pub fn lending(self, own: Region) -> FileNode {
        FileNode { own: Some((own, Nanos(0))), ..self }
    }

    pub(super) fn slot(&mut self, io: Cookie) -> &mut Slot {
        &mut self.slots[io.tag.index()]
    }

    /// One write that is synced by the kernel does. Its ENOSPC is ambiguous, so a file without `error_file` is synced
    /// separately.
    fn syncs_writes(&self) -> bool {
        self.error_file.is_some()
    }

    /// Whether a write of this request's data is to be synced with it.
    pub(super) fn is_durable(&self, req: &Request) -> bool {
        req.flags.has(Flags::FUA) && !self.shared.facts.memory && self.syncs_writes()
    }

    /// Not 0, and different for all requests of all queues of a file.
    pub(super) fn key(&self, io: Cookie) -> u64 {
        u64::from(self.gate.number) << 16 | u64::from(io.tag.0)
    }

    /// Do an operation in place, if that is the place for it. `None`: start it.
    fn now<R: Ring>(
        &mut self,
        op: FileOp,
        data: Data,
        len: u64,
        flags: Flags,
        cx: &mut Cx<'_, R>,
    ) -> Option<i64> {
        let facts = &self.shared.facts;
        if facts.memory {
            return cx.try_now(self.file, op, data, len, Patience::Unbounded);
        }
        if flags.has(Flags::NOWAIT) {
            return self.now_or_never(op, data, len, cx);
        }
        if facts.direct.is_some() {
            return None;
        }
        let FileOp::Write { durable, .. } = op else {
            return if facts.nowait_reads { self.now_or_never(op, data, len, cx) } else { None };
        };
        if durable {
            return None;
        }
        if facts.nowait_writes
            && let Some(result) = self.now_or_never(op, data, len, cx)
        {
            return Some(result);
        }
        let now = cx.now();
        if !facts.timed_writes || !self.pace.is_fast(now) {
            return None;
        }
        let file = self.file;
        self.pace.time(now, || cx.try_now(file, op, data, len, Patience::Unbounded))
    }

    fn now_or_never<R: Ring>(&self, op: FileOp, data: Data, len: u64, cx: &mut Cx<'_, R>) -> Option<i64> {
        let result = cx.try_now(self.file, op, data, len, Patience::None);
        result.filter(|&result| result != -i64::from(libc::EAGAIN))
    }

    /// Go on with reading or writing.
    pub(super) fn transfer<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = self.shared.facts;
        for turn in 0.. {
            let Slot { done, zeroes, .. } = *self.slot(io);
            let zeroing = zeroes.len > 0;
            let synced = !zeroing && self.syncs_writes();
            let left = req.len.0 - done;
            if left == 0 {
                return match req.flags.has(Flags::FUA) {
                    true if !synced => self.flush(io, cx),
                    true => self.stored(),
                    false => Verdict::Up(Status::Ok),
                };
            }
            let (data, len) = match done {
                _ if zeroing => (Data::One(zeroes), left.min(ZEROES_LEN.into())),
                0 => (req.data, left),
                _ => (cx.advance(req.data, done), left),
            };
            let at = req.offset.0 + done;
            if let Some(alignment) = facts.direct
                && !is_aligned(alignment, at, len, data, cx)
            {
                return self.start_window(io, req, alignment, cx);
            }
            let offset = facts.start.0 + at;
            let op = match req.op {
                Op::Read => FileOp::Read { offset },
                // Zeroes are synced once, at the end; memory has nothing to sync.
                _ => FileOp::Write { offset, durable: !zeroing && self.is_durable(req) },
            };
            if zeroing && turn == ZERO_PIECES {
                self.slot(io).phase = Phase::Pause;
                cx.timer(io, cx.now());
                return Verdict::Held;
            }
            match self.now(op, data, len, req.flags, cx) {
                Some(result) => {
                    if let Some(verdict) = self.moved(io, req, result, cx) {
                        return verdict;
                    }
                }
                None if req.flags.has(Flags::NOWAIT) => return Verdict::Up(Status::Again),
                None => return self.start(io, Phase::Move, op, data, len, cx),
            }
        }
        Verdict::Busy
    }

    /// Hand an operation to the ring.
    pub(super) fn start<R: Ring>(
        &mut self,
        io: Cookie,
        phase: Phase,
        op: FileOp,
        data: Data,
        len: u64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        self.slot(io).phase = phase;
        match cx.start(io, self.file, op, data, len) {
            Ok(()) => Verdict::Held,
            Err(queue::RingFull) => Verdict::Blocked,
        }
    }

    /// Reading or writing moved some bytes, or failed. `None`: go on.
    fn moved<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Option<Verdict> {
        if result < 0 {
            return Some(self.not_moved(io, req, result, cx));
        }
        let granularity = self.shared.facts.direct.map_or(1, |alignment| u64::from(alignment.offset));
        let slot = self.slot(io);
        slot.done = (slot.done + result as u64).min(req.len.0);
        let done = slot.done;
        // A direct transfer that ends within a block ends where the file does.
        let at_end = result == 0 || done < req.len.0 && !(req.offset.0 + done).is_multiple_of(granularity);
        at_end.then(|| self.ended_early(req, done, cx))
    }

    /// Reading or writing failed.
    #[cold]
    pub(super) fn not_moved<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let is_full = [libc::ENOSPC, libc::EDQUOT].contains(&i32::try_from(-result).unwrap_or(0));
        let is_durable = req.op == Op::Write && req.flags.has(Flags::FUA) && !self.slot(io).is_zeroing();
        // Either the file system has no room for this write, or the sync of this write reports that earlier data was lost,
        // for example because a thin-provisioned disk under the file system is full. Direct writes are no different: a
        // network file system, or one in user space, may keep them in a cache of its own.
        if is_full && is_durable && !self.shared.facts.memory && self.error_file.is_some() {
            self.slot(io).checks_errors = true;
            return self.flush(io, cx);
        }
        self.failed(req, result)
    }

    /// The file ends before the request does: it shrank. What is missing reads as zeroes, and as an error
    /// (LOOP-4).
    pub(super) fn ended_early<R: Ring>(&self, req: &Request, done: u64, cx: &mut Cx<'_, R>) -> Verdict {
        let opaque = matches!(req.data, Data::One(segment) if cx.ring.is_opaque(segment));
        if req.op == Op::Read && !opaque {
            fill_zeroes(cx, req.data, done, req.len.0 - done);
        }
        Verdict::Up(Status::IoError)
    }

    /// The kernel answered with an errno.
    pub(super) fn failed(&self, req: &Request, result: i64) -> Verdict {
        let errno = i32::try_from(-result).unwrap_or(libc::EIO);
        match errno {
            libc::EINTR => return Verdict::Busy,
            libc::EDQUOT | libc::EFBIG => return Verdict::Up(Status::NoSpace),
            // Nothing was written, nor synced.
            libc::ENOSPC | libc::EAGAIN | libc::EINVAL | libc::EFAULT | libc::ENOMEM | libc::ECANCELED => {}
            // What a durable write could not store may be gone from the page cache too, and the kernel tells of that with
            // whatever the disk said.
            _ if req.op == Op::Write && req.flags.has(Flags::FUA) => self.shared.fail_flushes(),
            _ => {}
        }
        Verdict::Up(Status::from_errno(errno))
    }

    fn flush<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = &self.shared.facts;
        if facts.memory || facts.read_only {
            return Verdict::Up(Status::Ok);
        }
        let promise = self.shared.syncs.promise();
        let slot = self.slot(io);
        (slot.promise, slot.look_ns) = (promise, SYNC_LOOK_NS_MIN);
        self.sync(io, cx)
    }

    /// Flush although a sync has failed. Only for a request that says that all it needs was written since.
    #[cold]
    fn flush_after_loss<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !req.flags.has(Flags::AFTER_LOSS) {
            return Verdict::Up(Status::IoError);
        }
        // A durable write under way on `file` could take the report of another loss.
        self.slot(io).checks_errors = true;
        self.flush(io, cx)
    }

    /// Sync, unless another request's sync has done it or is under way.
    fn sync<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let Slot { promise, checks_errors, .. } = *self.slot(io);
        // Another request's sync says nothing about a report that a durable write has consumed.
        if !checks_errors && self.shared.syncs.is_kept(promise) {
            return self.stored();
        }
        if !self.shared.syncs.begin() {
            return self.await_sync(io, cx);
        }
        // The kernel reports a loss once to each open file description. A durable write on `file` may have had the report
        // and not have come to us yet.
        let file = self.error_file.unwrap_or(self.file);
        self.slot(io).phase = Phase::Sync;
        if cx.start(io, file, FileOp::Sync, Data::NONE, 0).is_ok() {
            return Verdict::Held;
        }
        self.shared.syncs.withdraw();
        // After `Blocked` the write would be tried again, and might succeed without the check.
        if checks_errors { self.await_sync(io, cx) } else { Verdict::Blocked }
    }

    /// Try the sync again later.
    fn await_sync<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = self.slot(io);
        slot.phase = Phase::AwaitSync;
        let at = cx.now().after(slot.look_ns);
        slot.look_ns = (2 * slot.look_ns).min(SYNC_LOOK_NS_MAX);
        cx.timer(io, at);
        Verdict::Held
    }

    /// The sync through `error_file` is over. If a durable write ended with ENOSPC, this tells why.
    fn errors_checked<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match i32::try_from(-result).unwrap_or(libc::EIO) {
            // Everything written since `error_file` reported the loss is stored.
            0 if req.flags.has(Flags::AFTER_LOSS) => Verdict::Up(Status::Ok),
            // Nothing was lost: it was the write itself that found no room.
            0 if !self.shared.flush_failed() => Verdict::Up(Status::NoSpace),
            0 => Verdict::Up(Status::IoError),
            libc::EINTR => self.await_sync(io, cx),
            // What cannot be checked any more counts as lost.
            _ => {
                self.shared.fail_flushes();
                Verdict::Up(Status::IoError)
            }
        }
    }

    /// All of it is done: see to it that it stays, if that was asked for.
    pub(super) fn make_durable<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.flags.has(Flags::FUA) { self.flush(io, cx) } else { Verdict::Up(Status::Ok) }
    }

    /// After a sync that failed the kernel forgets what it could not write: the next one would succeed and
    /// say nothing of the loss. So none is tried again.
    fn synced(&self, result: i64) -> Verdict {
        match i32::try_from(-result).unwrap_or(libc::EIO) {
            0 => self.stored(),
            libc::EINTR => Verdict::Busy,
            // It was never begun.
            libc::ECANCELED => Verdict::Up(Status::IoError),
            _ => {
                self.shared.fail_flushes();
                Verdict::Up(Status::IoError)
            }
        }
    }

    /// The kernel says that it is on stable storage. Unless another sync failed meanwhile: that may have
    /// dropped what this one was for, and of those that run together only one is told.
    fn stored(&self) -> Verdict {
        Verdict::Up(if self.shared.flush_failed() { Status::IoError } else { Status::Ok })
    }

    fn prefetch<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = &self.shared.facts;
        if facts.memory || facts.direct.is_some() {
            return Verdict::Up(Status::Ok);
        }
        let op = FileOp::Prefetch { offset: facts.start.0 + req.offset.0, len: req.len.0 };
        match self.start(io, Phase::Hint, op, Data::NONE, 0, cx) {
            Verdict::Held => Verdict::Held,
            _ => Verdict::Up(Status::Ok),
        }
    }

    /// Whether it may begin: a request that changes blocks in place must not meet one that rewrites them.
    fn enter(&mut self, io: Cookie, req: &Request) -> Result<(), Verdict> {
        let facts = &self.shared.facts;
        let is_failed = self.shared.flush_failed() && !req.flags.has(Flags::AFTER_LOSS);
        if facts.read_only || is_failed {
            return Err(Verdict::Up(Status::IoError));
        }
        if facts.direct.is_some() {
            if !self.shared.exclusive.enter(&self.gate, self.key(io)) {
                let nowait = req.flags.has(Flags::NOWAIT);
                return Err(if nowait { Verdict::Up(Status::Again) } else { Verdict::Blocked });
            }
            self.slot(io).entered = true;
        }
        Ok(())
    }

    /// A request leaves, or waits to be offered again: give back what it had taken. A claim outlives
    /// waiting, or new writes would go before it for ever.
    #[cold]
    fn give_back<R: Ring>(&mut self, io: Cookie, verdict: Verdict, cx: &mut Cx<'_, R>) {
        let key = self.key(io);
        let slot = &mut self.slots[io.tag.index()];
        for memory in [&mut slot.bounce, &mut slot.zeroes] {
            if memory.len > 0 {
                cx.ring.free(std::mem::replace(memory, Segment::EMPTY));
            }
        }
        if slot.claimed && !matches!(verdict, Verdict::Busy | Verdict::Blocked) {
            slot.claimed = false;
            self.shared.exclusive.disclaim(&self.gate, key);
        }
        if std::mem::take(&mut slot.claimed_head) {
            self.shared.disclaim_head(key);
        }
        if std::mem::take(&mut slot.entered) {
            self.shared.exclusive.leave(&self.gate);
        }
    }

    #[inline]
    fn settle<R: Ring>(&mut self, io: Cookie, verdict: Verdict, cx: &mut Cx<'_, R>) -> Verdict {
        if verdict != Verdict::Held && self.slot(io).owes() {
            self.give_back(io, verdict, cx);
        }
        verdict
    }
}

/// Whether direct I/O takes this as it is.
fn is_aligned<R: Ring>(alignment: super::Alignment, at: u64, len: u64, data: Data, cx: &Cx<'_, R>) -> bool {
    let (block, memory) = (u64::from(alignment.offset) - 1, u64::from(alignment.memory) - 1);
    (at | len) & block == 0
        && cx.segments(data, len).all(|piece| piece.offset & memory == 0 && u64::from(piece.len) & block == 0)
}

impl<R: Ring> Node<R> for FileNode {
    fn attach(&mut self, _id: NodeId, tags: usize) {
        self.slots = vec![Slot::NEW; tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = self.slot(io);
        (slot.done, slot.checks_errors) = (0, false);
        let writes = req.op.is_write() && !req.op.is_special();
        let may = if writes { self.enter(io, req) } else { Ok(()) };
        let verdict = match (may, req.op) {
            // It was asked for while there was more: the file was made shorter since.
            _ if req.end() > self.shared.facts.size => Verdict::Up(Status::IoError),
            (Err(verdict), _) => verdict,
            (_, Op::Read) if req.flags.has(Flags::MAY_LEND) && self.lend(req, cx) => Verdict::Up(Status::Ok),
            _ if writes && req.offset.0 < u64::from(self.shared.facts.head) => self.protect(io, req, cx),
            (_, Op::Read | Op::Write) => self.transfer(io, req, cx),
            (_, Op::Discard | Op::WriteZeroes) => self.clear(io, req, cx),
            (_, Op::Flush) if self.shared.flush_failed() => self.flush_after_loss(io, req, cx),
            (_, Op::Flush) => self.flush(io, cx),
            (_, Op::Prefetch) => self.prefetch(io, req, cx),
            (_, Op::Extents) => self.extents(req, cx),
            _ => Verdict::Up(Status::NotSupported),
        };
        self.settle(io, verdict, cx)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let phase = self.slot(io).phase;
        let verdict = match phase {
            Phase::Move => match self.moved(io, req, result, cx) {
                Some(verdict) => verdict,
                None => self.transfer(io, req, cx),
            },
            Phase::Pause => self.transfer(io, req, cx),
            Phase::WindowRead | Phase::WindowWrite => self.window_moved(io, req, result, cx),
            Phase::Allocate(mode) => self.cleared(io, req, mode, result, cx),
            Phase::Sync => {
                let checks = self.slot(io).checks_errors;
                let verdict = match checks {
                    true => self.errors_checked(io, req, result, cx),
                    false => self.synced(result),
                };
                match result {
                    0 => self.shared.syncs.end(),
                    // Nobody else is served by what was cancelled, interrupted or failed.
                    _ => self.shared.syncs.withdraw(),
                }
                verdict
            }
            Phase::AwaitSync if result < 0 && self.slot(io).checks_errors => {
                self.errors_checked(io, req, result, cx)
            }
            Phase::AwaitSync if result < 0 => Verdict::Up(Status::IoError),
            Phase::AwaitSync => self.sync(io, cx),
            Phase::Hint => Verdict::Up(Status::Ok),
            Phase::Head(step) => self.head_moved(io, req, step, result, cx),
        };
        self.settle(io, verdict, cx)
    }
}
