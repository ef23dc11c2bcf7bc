//! The node of a file: decides where to perform each request, and processes its result.
//!
//! `slots` has the phase of each request that the ring works on, from which `reap` continues. When a
//! request leaves this node by `Up`, `Busy` or `Blocked`, `settle` releases everything that it holds. After
//! `Busy` or `Blocked` the request starts again from the beginning, which is harmless because each of its
//! steps can be repeated.

use super::container::HEAD_LEN;
use super::extents::KnownData;
use super::facts::FileState;
use super::head::Step;
use super::pace::Pace;
use crate::segments::fill_zeroes;
use block::{Cookie, Data, Flags, Op, Region, Request, Segment, Status};
use queue::{
    Blocking, Claim, Cx, FileId, FileOp, HeldRequests, LockMember, Nanos, Node, NodeId, Ring, Stripes,
    Verdict,
};
use std::sync::Arc;

/// Operation of the ring for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// Reads or writes the request's own memory, or writes zeroes.
    Move,
    /// Reads or writes the request's own memory inline, in the ring's batch.
    Batched,
    /// Reads a window of whole blocks.
    WindowRead,
    /// Writes the window.
    WindowWrite,
    /// Calls `fallocate` with these mode bits.
    Allocate(i32),
    /// Syncs, as the last step.
    Sync,
    /// Waits for the sync of another request to end, or to try again.
    AwaitSync,
    /// Waits for the next turn.
    Pause,
    /// Prefetches; the result is ignored.
    Hint,
    /// Performs a step of a write to the head of a file: see [`head`](super::head).
    Head(Step),
}

/// State of a request, by tag.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// Bytes of the request that are done.
    pub(super) done: u64,
    pub(super) phase: Phase,
    /// Zeroes for a write-zeroes request that is done by writing; empty otherwise.
    pub(super) zeroes: Segment,
    /// Stripes of the range lock that the request holds shared.
    pub(super) entered: Option<Stripes>,
    /// Claim of the request to hold stripes of the range lock exclusively.
    pub(super) claim: Option<Claim>,
    /// Memory of the window; empty if there is none.
    pub(super) bounce: Segment,
    /// Start and end of the window, in bytes of the device.
    pub(super) window: (u64, u64),
    pub(super) window_done: u64,
    /// Whether a sync of `sync_file` must determine if the kernel lost data, because a durable write failed
    /// with ENOSPC, or a flush is for data that was written after a loss.
    checks_errors: bool,
    /// Whether the request has the right to write to the head.
    pub(super) claimed_head: bool,
    /// Ticket of the sync that serves the request: see [`SharedSync`](queue::SharedSync).
    ticket: u64,
}

impl Slot {
    const NEW: Slot = Slot {
        done: 0,
        phase: Phase::Move,
        zeroes: Segment::EMPTY,
        entered: None,
        claim: None,
        bounce: Segment::EMPTY,
        window: (0, 0),
        window_done: 0,
        checks_errors: false,
        claimed_head: false,
        ticket: 0,
    };

    /// Returns whether the request is a write zeroes that is done by writing.
    pub(super) fn is_zeroing(&self) -> bool {
        self.zeroes.len > 0
    }

    /// Returns whether the request holds anything that must be released.
    fn holds_any(&self) -> bool {
        self.zeroes.len > 0
            || self.bounce.len > 0
            || self.claim.is_some()
            || self.entered.is_some()
            || self.claimed_head
    }
}

/// Number of zero bytes written at a time if `fallocate` is not supported.
pub(super) const ZEROES_LEN: u32 = 256 << 10;
/// Time in nanoseconds after which a sync is retried that was interrupted, or for which the ring had no
/// space. No event reports the end of either condition.
const SYNC_AGAIN_NS: u64 = 1_000_000;
/// Number of such writes that are done inline before other requests get their turn.
const ZERO_WRITES: u32 = 16;

/// The node of a file in one hardware queue.
#[derive(Debug)]
pub struct FileNode {
    pub(super) shared: Arc<FileState>,
    pub(super) file: FileId,
    /// A second open file description of the same file, for syncs only. The kernel reports each loss of
    /// data once to every open file description, so this one still gets a report that a durable write on
    /// `file` has received. If `None`, a durable write is done as a write and a sync.
    sync_file: Option<FileId>,
    /// A file in memory, for checking data in memory that only the kernel can access.
    pub(super) scratch_file: Option<FileId>,
    /// The file's head without the bytes of the one request that writes to it, while those are copied from
    /// memory that only the kernel can access; empty if clients may write any header.
    pub(super) head: Box<[u8]>,
    pub(super) slots: Box<[Slot]>,
    pub(super) known: KnownData,
    /// The file's own memory, and the time of the last search for data.
    pub(super) own: Option<(Region, Nanos)>,
    /// This queue's membership in the range lock; `None` before its first write past the page cache.
    member: Option<Arc<LockMember>>,
    /// Requests that wait for a sync to end, or for the head.
    pub(super) held: HeldRequests,
    /// Number of this node among those of the file, from 1.
    number: u32,
    pub(super) pace: Pace,
}

impl FileNode {
    /// Creates a node on a file with these facts. `file` is its number on the queue's ring.
    pub fn new(shared: Arc<FileState>, file: FileId) -> FileNode {
        let number = shared.number_node();
        let head = vec![0; if shared.facts.head > 0 { HEAD_LEN } else { 0 }].into();
        FileNode {
            shared,
            file,
            sync_file: None,
            scratch_file: None,
            head,
            slots: Box::default(),
            known: KnownData::NONE,
            own: None,
            member: None,
            held: HeldRequests::default(),
            number,
            pace: Pace::NEW,
        }
    }

    /// Sets a second open file description for syncs, from which no write can take the kernel's report of
    /// lost data: see [`File::sync_descriptor`](super::File::sync_descriptor).
    #[must_use]
    pub fn with_sync_file(self, file: FileId) -> FileNode {
        FileNode { sync_file: Some(file), ..self }
    }

    /// Sets a file in memory, through which data that only the kernel can access is copied when it must be
    /// checked.
    #[must_use]
    pub fn with_scratch_file(self, file: FileId) -> FileNode {
        FileNode { scratch_file: Some(file), ..self }
    }

    /// Sets the region of the file's own memory on the queue's ring: see
    /// [`File::memory`](super::File::memory).
    #[must_use]
    pub fn with_memory(self, own: Region) -> FileNode {
        FileNode { own: Some((own, Nanos(0))), ..self }
    }

    pub(super) fn slot(&mut self, io: Cookie) -> &mut Slot {
        &mut self.slots[io.tag.index()]
    }

    /// Returns whether a durable write is a single operation. Its ENOSPC is ambiguous, so without
    /// `sync_file` the file is synced separately.
    fn syncs_writes(&self) -> bool {
        self.sync_file.is_some()
    }

    /// Returns whether this request is written with durable writes.
    pub(super) fn is_durable(&self, req: &Request) -> bool {
        req.flags.contains(Flags::FUA) && !self.shared.facts.memory && self.syncs_writes()
    }

    /// Returns a nonzero key that is unique among all requests of all queues of the file.
    pub(super) fn key(&self, io: Cookie) -> u64 {
        u64::from(self.number) << 16 | u64::from(io.tag.0)
    }

    /// Performs an operation inline if that is faster. Returns `None` if it must be started on the ring.
    fn now<R: Ring>(
        &mut self,
        op: FileOp,
        data: Data,
        len: u64,
        flags: Flags,
        cx: &mut Cx<'_, R>,
    ) -> Option<i64> {
        let (file, now, memory) = (self.file, cx.now(), self.shared.facts.memory);
        let is_nowait = !memory && flags.contains(Flags::NOWAIT);
        let blocking = if is_nowait { Blocking::Never } else { self.blocking(op, now)? };
        if blocking == Blocking::Never {
            let result = cx.try_now(file, op, data, len, Blocking::Never);
            if result.is_some_and(|result| result != -i64::from(libc::EAGAIN)) {
                return result;
            }
            if is_nowait || !self.is_timed(op, now) {
                return None;
            }
        }
        if memory {
            return cx.try_now(file, op, data, len, Blocking::Allowed);
        }
        self.pace.time(now, || cx.try_now(file, op, data, len, Blocking::Allowed))
    }

    /// Returns the operation that reads or writes the rest of a request.
    pub(super) fn op(&mut self, io: Cookie, req: &Request) -> FileOp {
        let (done, zeroing) = (self.slot(io).done, self.slot(io).is_zeroing());
        let offset = self.shared.facts.start.0 + req.offset.0 + done;
        match req.op {
            Op::Read => FileOp::Read { offset },
            // Zeroes are synced once, at the end; a file in memory has nothing to sync.
            _ => FileOp::Write { offset, durable: !zeroing && self.is_durable(req) },
        }
    }

    /// Continues reading or writing.
    pub(super) fn transfer<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = self.shared.facts;
        for turn in 0.. {
            let &mut Slot { done, zeroes, .. } = self.slot(io);
            let zeroing = zeroes.len > 0;
            let synced = !zeroing && self.syncs_writes();
            let left = req.len.0 - done;
            if left == 0 {
                return match req.flags.contains(Flags::FUA) {
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
            let op = self.op(io, req);
            if zeroing && turn == ZERO_WRITES {
                self.slot(io).phase = Phase::Pause;
                cx.timer(io, cx.now());
                return Verdict::Held;
            }
            if done == 0
                && !zeroing
                && !req.flags.contains(Flags::NOWAIT)
                && let Some(blocking) = self.blocking(op, cx.now())
                && cx.try_batched(io, self.file, op, data, len, blocking)
            {
                self.slot(io).phase = Phase::Batched;
                return Verdict::Held;
            }
            match self.now(op, data, len, req.flags, cx) {
                Some(result) => {
                    if let Some(verdict) = self.moved(io, req, result, cx) {
                        return verdict;
                    }
                }
                None if req.flags.contains(Flags::NOWAIT) => return Verdict::Up(Status::Again),
                None => return self.start(io, Phase::Move, op, data, len, cx),
            }
        }
        Verdict::Busy
    }

    /// Starts an operation on the ring.
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

    /// Processes the result of a read or write. Returns `None` to continue with the rest.
    pub(super) fn moved<R: Ring>(
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
        // A direct transfer that ends within a block has reached the end of the file.
        let at_end = result == 0 || done < req.len.0 && !(req.offset.0 + done).is_multiple_of(granularity);
        at_end.then(|| self.ended_early(req, done, cx))
    }

    /// Processes a failed read or write.
    #[cold]
    pub(super) fn not_moved<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let is_full = [libc::ENOSPC, libc::EDQUOT].contains(&i32::try_from(-result).unwrap_or(0));
        let is_durable = req.op == Op::Write && req.flags.contains(Flags::FUA) && !self.slot(io).is_zeroing();
        // Either the file system has no space for this write, or the sync of this write reports that
        // earlier data was lost, for example because a thin-provisioned disk under the file system is full.
        // Direct writes can fail so, too: a network file system, or one in user space, may keep them in
        // its own cache.
        if is_full && is_durable && !self.shared.facts.memory && self.sync_file.is_some() {
            self.slot(io).checks_errors = true;
            return self.flush(io, cx);
        }
        self.failed(req, result)
    }

    /// Fails a request that extends beyond the end of a truncated file. Fills missing bytes with zeroes
    /// (LOOP-4).
    pub(super) fn ended_early<R: Ring>(&self, req: &Request, done: u64, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Read {
            fill_zeroes(cx, req.data, done, req.len.0 - done);
        }
        Verdict::Up(Status::IoError)
    }

    /// Fails a request with the kernel's errno.
    pub(super) fn failed(&self, req: &Request, result: i64) -> Verdict {
        let errno = i32::try_from(-result).unwrap_or(libc::EIO);
        match errno {
            libc::EINTR => return Verdict::Busy,
            libc::EDQUOT | libc::EFBIG => return Verdict::Up(Status::NoSpace),
            // These errors mean that nothing was written or synced.
            libc::ENOSPC | libc::EAGAIN | libc::EINVAL | libc::EFAULT | libc::ENOMEM | libc::ECANCELED => {}
            // Data that a durable write could not store may also be lost from the page cache, which the
            // kernel reports with the disk's errno.
            _ if req.op == Op::Write && req.flags.contains(Flags::FUA) => self.shared.fail_flushes(),
            _ => {}
        }
        Verdict::Up(Status::from_errno(errno))
    }

    fn flush<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let facts = &self.shared.facts;
        if facts.memory || facts.read_only {
            return Verdict::Up(Status::Ok);
        }
        self.slot(io).ticket = self.shared.syncs.ticket();
        self.sync(io, cx)
    }

    /// Flushes after a failed sync. Only requests with AFTER_LOSS may, because all their data was written
    /// after the loss.
    #[cold]
    fn flush_after_loss<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !req.flags.contains(Flags::AFTER_LOSS) {
            return Verdict::Up(Status::IoError);
        }
        // It needs its own sync: one that began earlier may not cover its data.
        self.slot(io).checks_errors = true;
        self.flush(io, cx)
    }

    /// Returns whether another request's sync has served this one.
    fn is_synced(&mut self, io: Cookie) -> bool {
        let &mut Slot { ticket, checks_errors, .. } = self.slot(io);
        // Another request's sync does not repeat a report that a durable write has consumed.
        !checks_errors && self.shared.syncs.is_served(ticket)
    }

    /// Syncs, unless another request's sync has served this one or is running.
    fn sync<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        if self.is_synced(io) {
            return self.stored();
        }
        if !self.shared.syncs.begin() {
            // Listen first and check again afterwards, so that the end of the running sync cannot be
            // missed.
            self.held.listen(&self.shared.waiting, cx);
            if self.is_synced(io) {
                return self.stored();
            }
            if !self.shared.syncs.begin() {
                self.slot(io).phase = Phase::AwaitSync;
                return self.held.hold(io);
            }
        }
        // The kernel reports a loss once to each open file description. A durable write on `file` that has
        // not completed may have received the report, so sync the other description.
        let file = self.sync_file.unwrap_or(self.file);
        self.slot(io).phase = Phase::Sync;
        if cx.start(io, file, FileOp::Sync, Data::NONE, 0).is_ok() {
            return Verdict::Held;
        }
        self.shared.syncs.abandon();
        self.shared.waiting.wake(self.held.waiter());
        // After `Blocked` the write would be repeated, and might succeed without the check.
        if self.slot(io).checks_errors { self.sync_later(io, cx) } else { Verdict::Blocked }
    }

    /// Schedules another attempt to sync.
    #[cold]
    fn sync_later<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        self.slot(io).phase = Phase::AwaitSync;
        cx.timer(io, cx.now().after(SYNC_AGAIN_NS));
        Verdict::Held
    }

    /// Processes the end of a sync of `sync_file`, which reveals why a durable write failed with ENOSPC.
    fn errors_checked<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match i32::try_from(-result).unwrap_or(libc::EIO) {
            // Everything written after `sync_file` reported the loss is stored.
            0 if req.flags.contains(Flags::AFTER_LOSS) => Verdict::Up(Status::Ok),
            // Nothing was lost: the write itself found no space.
            0 if !self.shared.flush_failed() => Verdict::Up(Status::NoSpace),
            0 => Verdict::Up(Status::IoError),
            libc::EINTR => self.sync_later(io, cx),
            // If the check fails, the data counts as lost.
            _ => {
                self.shared.fail_flushes();
                Verdict::Up(Status::IoError)
            }
        }
    }

    /// Completes a request whose data is written, after a flush if it has FUA.
    pub(super) fn make_durable<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.flags.contains(Flags::FUA) { self.flush(io, cx) } else { Verdict::Up(Status::Ok) }
    }

    /// Processes the result of a sync. A failed sync is never repeated: the kernel forgets data that it could
    /// not write, so the next sync would succeed and hide the loss.
    fn synced(&self, result: i64) -> Verdict {
        match i32::try_from(-result).unwrap_or(libc::EIO) {
            0 => self.stored(),
            libc::EINTR => Verdict::Busy,
            // The sync was never started.
            libc::ECANCELED => Verdict::Up(Status::IoError),
            _ => {
                self.shared.fail_flushes();
                Verdict::Up(Status::IoError)
            }
        }
    }

    /// Completes a request whose data is on stable storage. If another sync has failed in the meantime, the
    /// data may be lost, because the kernel reports the loss to only one sync.
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

    /// Takes the range lock for a write. Returns the verdict if the write may not start.
    fn enter<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &Cx<'_, R>) -> Result<(), Verdict> {
        let facts = &self.shared.facts;
        let is_failed = self.shared.flush_failed() && !req.flags.contains(Flags::AFTER_LOSS);
        if facts.read_only || is_failed {
            return Err(Verdict::Up(Status::IoError));
        }
        if facts.direct.is_none() {
            return Ok(());
        }
        let member = match &self.member {
            Some(member) => member,
            None => self.member.insert(self.shared.range_lock.join_retrying(cx.waker().clone())),
        };
        let slot = &mut self.slots[io.tag.index()];
        // A granted claim covers the whole request, so the lock need not be held shared as well.
        let may_start = match &mut slot.claim {
            Some(claim) => self.shared.range_lock.acquire(member, claim),
            None => {
                let stripes = Stripes::of(req.offset.0, req.len.0);
                let entered = self.shared.range_lock.enter(member, stripes);
                slot.entered = entered.then_some(stripes);
                entered
            }
        };
        match may_start {
            true => Ok(()),
            false if req.flags.contains(Flags::NOWAIT) => Err(Verdict::Up(Status::Again)),
            false => Err(Verdict::Blocked),
        }
    }

    /// Claims the range of a write exclusively, instead of holding it shared. Returns `false` if the write
    /// has to wait.
    pub(super) fn claim(&mut self, io: Cookie, req: &Request) -> bool {
        let Some(member) = &self.member else { return false };
        let slot = &mut self.slots[io.tag.index()];
        if let Some(stripes) = slot.entered.take() {
            self.shared.range_lock.leave(member, stripes);
        }
        let claim = slot.claim.get_or_insert_with(|| Claim::new(Stripes::of(req.offset.0, req.len.0)));
        self.shared.range_lock.acquire(member, claim)
    }

    /// Releases everything that a request holds when it completes or is parked. A claim is kept while the
    /// request is parked; otherwise new writes would overtake it forever.
    #[cold]
    fn release<R: Ring>(&mut self, io: Cookie, verdict: Verdict, cx: &mut Cx<'_, R>) {
        let key = self.key(io);
        let slot = &mut self.slots[io.tag.index()];
        for memory in [&mut slot.bounce, &mut slot.zeroes] {
            if memory.len > 0 {
                cx.ring.free(std::mem::replace(memory, Segment::EMPTY));
            }
        }
        if let Some(member) = &self.member {
            if !matches!(verdict, Verdict::Busy | Verdict::Blocked)
                && let Some(claim) = slot.claim.take()
            {
                self.shared.range_lock.withdraw(member, &claim);
            }
            if let Some(stripes) = slot.entered.take() {
                self.shared.range_lock.leave(member, stripes);
            }
        }
        if std::mem::take(&mut slot.claimed_head) {
            self.shared.release_head(key);
            self.shared.waiting.wake(self.held.waiter());
        }
    }

    #[inline]
    fn settle<R: Ring>(&mut self, io: Cookie, verdict: Verdict, cx: &mut Cx<'_, R>) -> Verdict {
        if verdict != Verdict::Held && self.slot(io).holds_any() {
            self.release(io, verdict, cx);
        }
        verdict
    }
}

/// Returns whether direct I/O accepts this memory and range.
fn is_aligned<R: Ring>(alignment: super::Alignment, at: u64, len: u64, data: Data, cx: &Cx<'_, R>) -> bool {
    let (block, memory) = (u64::from(alignment.offset) - 1, u64::from(alignment.memory) - 1);
    (at | len) & block == 0
        && cx.segments(data, len).all(|piece| piece.offset & memory == 0 && u64::from(piece.len) & block == 0)
}

impl<R: Ring> Node<R> for FileNode {
    fn attach(&mut self, _id: NodeId, tags: usize) {
        self.slots = vec![Slot::NEW; tags].into();
        self.held.reserve(tags);
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = self.slot(io);
        (slot.done, slot.checks_errors) = (0, false);
        let writes = req.op.is_write() && !req.op.is_special();
        let may = if writes { self.enter(io, req, cx) } else { Ok(()) };
        let verdict = match (may, req.op) {
            // The device has become smaller since the request was submitted.
            _ if req.end() > self.shared.facts.size => Verdict::Up(Status::IoError),
            (Err(verdict), _) => verdict,
            (_, Op::Read) if req.flags.contains(Flags::ZERO_COPY) && self.lend(req, cx) => {
                Verdict::Up(Status::Ok)
            }
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
            Phase::Batched => self.batch_moved(io, req, result, cx),
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
                    0 => self.shared.syncs.succeed(),
                    // A sync that was cancelled, interrupted or failed does not serve other requests.
                    _ => self.shared.syncs.abandon(),
                }
                self.shared.waiting.wake(self.held.waiter());
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

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.held.resume_woken(cx);
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        if !self.held.cancel(io, cx) {
            cx.cancel(io);
        }
    }
}
