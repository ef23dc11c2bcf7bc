//! Applies the options of a `null:` device that limit or break requests: tags, faults, a budget, bad
//! blocks, a cache. They are separate, so that a device without such options needs only a few instructions
//! per request.
//!
//! The order is null_blk's: a tag, then faults that requeue, then the budget, then bad blocks, then the
//! data. A request whose completion is dropped transfers its data, and fails after null_blk's timeout.
//!
//! *Invariant:* a request that has a tag returns it when it completes or is parked.

use super::bad_blocks::{BadBlocks, KnownBad};
use super::cache::Cache;
use super::fault::{Chance, Fault};
use super::knobs::Knobs;
use super::tags::Tags;
use super::throttle::Budget;
use super::{Body, Completion, NullNode};
use block::{Bytes, Cookie, Flags, Op, Request, Sectors, Status};
use queue::{Cx, HeldRequests, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Time in nanoseconds after which the block layer cancels requests of null_blk.
const TIMEOUT_NS: u64 = 5_000_000_000;

/// State that all queues of a device share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) knobs: Knobs,
    pub(super) bad: BadBlocks,
    pub(super) cache: Option<Cache>,
    pub(super) timeout: Option<Fault>,
    pub(super) requeue: Option<Fault>,
    pub(super) init_hctx: Option<Fault>,
    budget: Option<Budget>,
    tags: Option<Arc<Tags>>,
    nodes: AtomicU64,
}

impl Shared {
    pub(super) fn new(knobs: &Knobs, size: Bytes) -> Shared {
        let bad = BadBlocks::new(knobs.badblocks.clone(), knobs.badblocks_once, knobs.badblocks_partial_io);
        Shared {
            knobs: knobs.clone(),
            bad,
            cache: knobs.cache_size.map(|most| Cache::new(size, most)),
            timeout: knobs.timeout.map(Fault::new),
            requeue: knobs.requeue.map(Fault::new),
            init_hctx: knobs.init_hctx.map(Fault::new),
            budget: knobs.mbps.map(Budget::new),
            tags: Tags::shared(knobs),
            nodes: AtomicU64::new(0),
        }
    }

    /// Returns a seed that is unique among the nodes of the device.
    pub(super) fn seed(&self) -> u64 {
        self.nodes.fetch_add(1, Relaxed)
    }
}

/// State of a held request: what it waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// It waits to start, or to start again.
    Enter,
    /// It waits for the budget.
    Budget,
    /// It waits for the backend with the data.
    Content,
    /// Its completion time has come; it ends with this status.
    Done(Status),
}

#[derive(Clone, Copy, Debug)]
struct State {
    stage: Stage,
    tagged: bool,
    /// Whether the completion is dropped, as for an injected timeout.
    forgotten: bool,
    /// Original length of a request that was shortened because it reaches a bad block.
    cut: Option<Bytes>,
}

impl State {
    const NEW: State = State { stage: Stage::Enter, tagged: false, forgotten: false, cut: None };
}

/// State of one queue.
#[derive(Debug)]
pub(super) struct Gate {
    shared: Arc<Shared>,
    tags: Arc<Tags>,
    known: KnownBad,
    chance: Chance,
    requeues: u64,
    states: Box<[State]>,
    /// Requests that wait for a tag.
    held: HeldRequests,
}

impl Drop for Gate {
    /// Returns the tags of requests in flight, for which other queues may wait.
    fn drop(&mut self) {
        self.states.iter().filter(|state| state.tagged).for_each(|_| self.tags.give_back(None));
    }
}

impl Gate {
    pub(super) fn new(shared: Arc<Shared>) -> Gate {
        let tags = shared.tags.clone().unwrap_or_default();
        let chance = Chance::new(shared.seed());
        Gate {
            shared,
            tags,
            known: KnownBad::default(),
            chance,
            requeues: 0,
            states: Box::default(),
            held: HeldRequests::default(),
        }
    }

    pub(super) fn attach(&mut self, tags: usize) {
        self.states = vec![State::NEW; tags].into();
        self.held.reserve(tags);
    }

    /// Resumes the requests that wait for a tag, if one was returned.
    pub(super) fn commit<R: Ring>(&mut self, cx: &mut Cx<'_, R>) {
        self.held.resume_woken(cx);
    }

    /// Ends a request that waits for a tag, or asks the ring to cancel the operation that it waits for.
    pub(super) fn cancel<R: Ring>(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        if !self.held.cancel(io, cx) {
            cx.cancel(io);
        }
    }

    fn state(&mut self, io: Cookie) -> &mut State {
        &mut self.states[io.tag.index()]
    }

    fn give_back(&mut self, io: Cookie) {
        if std::mem::take(&mut self.state(io).tagged) {
            self.tags.give_back(self.held.waiter());
        }
    }

    /// Returns the offset of the first bad sector in a request, in bytes.
    fn bad(&mut self, req: &Request) -> Option<Bytes> {
        if req.len == Bytes::ZERO {
            return None;
        }
        let first = req.offset.sectors().0;
        let bad = self.known.find(&self.shared.bad, first..req.end().0.div_ceil(512))?;
        let good = Sectors(bad.0 - first).bytes();
        Some(good.align_down(self.shared.knobs.blocksize.0))
    }

    /// Updates the cache after a successful request.
    fn cached(&self, req: &Request) {
        let Some(cache) = &self.shared.cache else { return };
        let (at, len) = (req.offset.0, req.len.0);
        match req.op {
            Op::Flush => cache.flush(),
            Op::Discard => cache.passed_by(at, len),
            Op::Write | Op::WriteZeroes if req.flags.contains(Flags::FUA) => cache.passed_by(at, len),
            Op::Write | Op::WriteZeroes | Op::ZoneAppend => cache.written(at, len),
            _ => {}
        }
    }
}

/// Returns whether null_blk would receive the operation; other operations are queries without data.
fn is_work(op: Op) -> bool {
    !matches!(op, Op::Prefetch | Op::Extents | Op::ReportZones)
}

impl NullNode {
    fn gate(&mut self) -> &mut Gate {
        self.gate.as_mut().expect("only asked for where there is one")
    }

    /// Starts a request, or starts it again.
    pub(super) fn enter<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        *self.gate().state(io) = State::NEW;
        if !is_work(req.op) {
            return self.work(io, req, cx);
        }
        let gate = self.gate();
        if let Some(depth) = gate.shared.knobs.depth() {
            if !gate.tags.take(depth) {
                gate.held.listen(&gate.tags.waiting, cx);
                if !gate.tags.take(depth) {
                    return gate.held.hold(io);
                }
            }
            gate.state(io).tagged = true;
        }
        if gate.shared.requeue.as_ref().is_some_and(|fault| fault.strikes(&mut gate.chance)) {
            gate.give_back(io);
            // Alternates between parking and requeueing the request.
            gate.requeues += 1;
            if gate.requeues % 2 == 1 {
                return Verdict::Busy;
            }
            cx.timer(io, cx.now());
            return Verdict::Held;
        }
        let forgotten = gate.shared.timeout.as_ref().is_some_and(|fault| fault.strikes(&mut gate.chance));
        gate.state(io).forgotten = forgotten;
        if gate.shared.knobs.blocking {
            gate.state(io).stage = Stage::Budget;
            cx.timer(io, cx.now());
            return Verdict::Held;
        }
        self.spend(io, req, cx)
    }

    /// Continues once the budget allows it.
    fn spend<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let gate = self.gate();
        if let Some(budget) = &gate.shared.budget
            && let Err(then) = budget.take(req.len.0, cx.now())
        {
            gate.state(io).stage = Stage::Budget;
            cx.timer(io, then);
            return Verdict::Held;
        }
        if is_work(req.op)
            && let Some(good) = self.gate().bad(req)
        {
            let partial = self.gate().shared.bad.partial && req.op.moves_data();
            if !partial || good == Bytes::ZERO {
                return self.finish(io, Status::IoError, cx);
            }
            self.gate().state(io).cut = Some(req.len);
            req.len = good;
        }
        self.work(io, req, cx)
    }

    /// Transfers the data.
    fn work<R: Ring>(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.gate().state(io).stage = Stage::Content;
        let verdict = match &mut self.body {
            Body::Plain(content) => content.submit(io, req, cx),
            Body::Zoned(zoned) => zoned.submit(io, req, cx),
        };
        self.worked(io, req, verdict, cx)
    }

    fn worked<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        verdict: Verdict,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let gate = self.gate();
        let Verdict::Up(mut status) = verdict else {
            if matches!(verdict, Verdict::Busy | Verdict::Blocked) {
                gate.give_back(io);
                req.len = gate.state(io).cut.take().unwrap_or(req.len);
            }
            return verdict;
        };
        if status.is_ok() {
            gate.cached(req);
        }
        if let Some(whole) = gate.state(io).cut.take() {
            req.len = whole;
            status = Status::IoError;
        }
        self.finish(io, status, cx)
    }

    /// Completes a request, now or after its completion time.
    fn finish<R: Ring>(&mut self, io: Cookie, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        let completion = self.completion;
        let gate = self.gate();
        let (status, after) = match (gate.state(io).forgotten, completion) {
            (true, _) => (Status::Timeout, TIMEOUT_NS),
            (false, Completion::After(nanos)) => (status, nanos),
            (false, Completion::Instant) => {
                gate.give_back(io);
                return Verdict::Up(status);
            }
        };
        gate.state(io).stage = Stage::Done(status);
        cx.timer(io, cx.now().after(after));
        Verdict::Held
    }

    /// Continues a held request, or fails it if it was cancelled.
    pub(super) fn go_on<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        result: i64,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match self.gate().state(io).stage {
            Stage::Content => {
                let verdict = match &mut self.body {
                    Body::Plain(content) => content.reap(io, req, result, cx),
                    Body::Zoned(zoned) => zoned.reap(io, req, result, cx),
                };
                self.worked(io, req, verdict, cx)
            }
            Stage::Done(status) => {
                self.gate().give_back(io);
                Verdict::Up(status)
            }
            Stage::Enter | Stage::Budget if result < 0 => {
                self.gate().give_back(io);
                Verdict::Up(Status::from_result(result, 0))
            }
            Stage::Enter => self.enter(io, req, cx),
            Stage::Budget => self.spend(io, req, cx),
        }
    }
}
