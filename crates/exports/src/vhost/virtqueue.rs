//! A virtqueue: turns descriptor chains into requests, and completions into used entries.

use super::active::{Active, RingSetup, StartError};
use super::poll::PollBudget;
use super::zones::Report;
use super::{BOUNCE_MAX, Broken, REQUEST_MAX, SEGMENTS_MAX, Stopped, VirtqueueConfig, token};
use crate::facts::DeviceFacts;
use crate::fronts::{FrontNumber, Turn};
use block::{Bytes, Data, Flags, Op, Request, Segment, Tag};
use queue::{Done, Owner, QueueId, Ring};
use ring::KernelRing;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use virtio::blk::{self, Config, ID_LEN, Kind, Range, S_IOERR, S_OK, Ticket};
use virtio::memory::Span;

/// Maximum number of chains that are popped between two suppressions of kicks while the queue is polled:
/// the event index must be advanced before its 16 bits wrap.
const SUPPRESS_EVERY: u32 = 1 << 14;

/// A tag, and the request that it identifies.
#[derive(Clone, Copy)]
pub(super) struct TagSlot {
    pub(super) ticket: Ticket,
    /// Guest memory of the data.
    pub(super) guest: Data,
    /// Bytes of the data; for a zone report those of the report.
    pub(super) len: u32,
    pub(super) is_read: bool,
    /// The data is in guest memory itself.
    pub(super) is_direct: bool,
    /// Written data is made durable by a flush before the request completes.
    pub(super) flush_follows: bool,
    /// Memory of ours that holds the data; empty: none.
    pub(super) bounce: Segment,
    /// The request, without data.
    pub(super) req: Request,
}

impl TagSlot {
    pub(super) const FREE: TagSlot = TagSlot {
        ticket: Ticket { head: virtio::ring::Head::NONE, written: 0, has_data: false, status: Span::EMPTY },
        guest: Data::NONE,
        len: 0,
        is_read: false,
        is_direct: false,
        flush_follows: false,
        bounce: Segment::EMPTY,
        req: Request::flush(),
    };
}

/// What follows from a chain.
pub(super) enum Popped {
    /// Nothing: it was completed, or is in the stack.
    Taken,
    /// The request waits for memory; no further chain is popped until it has some.
    Starved,
    /// The driver violated the specification.
    Broken(Broken),
}

/// A virtqueue that is served, or can be.
pub(super) struct Virtqueue {
    pub(super) config: VirtqueueConfig,
    pub(super) slots: Box<[TagSlot]>,
    pub(super) free: Vec<u16>,
    /// By tag: where a zone append reports its sector. Empty unless the device is zoned.
    pub(super) append_sectors: Box<[Span]>,
    /// By tag: the status of a request of a zoned device that failed, while the state of its zone is read to
    /// find the status of the specification. Empty unless the device is zoned.
    pub(super) failures: Box<[Option<block::Status>]>,
    /// A request that waits for memory.
    starved: Option<u16>,
    /// Bytes of memory of ours that requests hold.
    pub(super) bounced: u64,
    pub(super) active: Option<Active>,
    generation: u32,
    budget: PollBudget,
    /// Whether the driver need not kick, because the queue is checked each turn.
    is_polled: bool,
    /// Number of chains popped since kicks were last suppressed.
    popped: u32,
    /// Requests completed that the driver does not see yet.
    pub(super) has_unpublished: bool,
    /// The front-end has it in its list.
    pub(super) is_listed: bool,
}

fn count(counter: &AtomicU64) {
    counter.store(counter.load(Relaxed) + 1, Relaxed);
}

/// Converts spans of guest memory to segments. There must be at most as many as `segments` has.
fn segments_of<'a>(spans: &[Span], segments: &'a mut [Segment]) -> &'a [Segment] {
    let segments = &mut segments[..spans.len()];
    for (segment, span) in segments.iter_mut().zip(spans) {
        *segment = span.segment();
    }
    segments
}

impl Virtqueue {
    pub(super) fn new(config: VirtqueueConfig) -> Virtqueue {
        let zoned_tags = if config.config.is_zoned() { usize::from(config.depth) } else { 0 };
        Virtqueue {
            append_sectors: vec![Span::EMPTY; zoned_tags].into(),
            failures: vec![None; zoned_tags].into(),
            slots: vec![TagSlot::FREE; config.depth.into()].into(),
            free: (0..config.depth).rev().collect(),
            starved: None,
            bounced: 0,
            active: None,
            generation: 0,
            budget: PollBudget::new(config.poll_ns),
            is_polled: false,
            popped: 0,
            has_unpublished: false,
            is_listed: false,
            config,
        }
    }

    pub(super) fn queue(&self) -> QueueId {
        self.config.queue
    }

    /// Returns whether a ring is served, or requests of one are in flight.
    pub(super) fn is_active(&self) -> bool {
        self.active.is_some()
    }

    pub(super) fn start(&mut self, setup: RingSetup, turn: &mut Turn<'_>) -> Result<(), StartError> {
        debug_assert!(self.active.is_none(), "{:?} serves a ring already", self.config.queue);
        self.generation = self.generation.wrapping_add(1);
        let active = Active::new(setup, self.generation, turn)?;
        if let Some(kick) = active.kick() {
            turn.ring.watch_edges(token(self.config.queue, self.generation), kick);
        }
        self.config.shared.is_broken.store(false, Relaxed);
        self.active = Some(active);
        // Chains may have been made available, and kicked, before the watch started.
        self.wake(turn.ring);
        Ok(())
    }

    pub(super) fn stop(&mut self, stopped: Option<Stopped>, turn: &mut Turn<'_>) {
        let Some(active) = &mut self.active else { return };
        if active.is_running && active.kick().is_some() {
            turn.ring.watch_edges_end(token(self.config.queue, active.generation));
        }
        active.is_running = false;
        active.stopped = stopped.or(active.stopped.take());
    }

    pub(super) fn set_call(&mut self, call: Option<Arc<OwnedFd>>, turn: &mut Turn<'_>) {
        if let Some(active) = &mut self.active {
            active.set_call(call, turn.ring);
            // The driver may not have seen an interrupt that went to the old eventfd.
            if active.interrupt(turn.ring) {
                count(&self.config.shared.interrupts);
            }
        }
    }

    pub(super) fn set_err(&mut self, err: Option<Arc<OwnedFd>>, turn: &mut Turn<'_>) {
        self.active.iter_mut().for_each(|active| active.set_err(err.clone(), turn.ring));
    }

    pub(super) fn set_config(&mut self, config: Config) {
        self.config.config = config;
    }

    pub(super) fn refit(&mut self, facts: DeviceFacts, size: Bytes) {
        self.config.facts = facts;
        self.config.config.set_capacity(size);
    }

    /// Handles a kick of the driver. Returns whether it was for the ring that is being served.
    pub(super) fn kicked(&mut self, generation: u32, turn: &mut Turn<'_>) -> bool {
        let is_current =
            self.active.as_ref().is_some_and(|active| active.generation == generation && active.is_running);
        if is_current {
            count(&self.config.shared.kicks);
            self.wake(turn.ring);
            self.pump(turn);
        }
        is_current
    }

    /// Suppresses kicks, because the queue is checked each turn from now on.
    fn wake(&mut self, ring: &KernelRing) {
        if let Some(active) = &mut self.active {
            active.ring.suppress_kicks();
            self.is_polled = true;
            self.popped = 0;
            self.budget.found(ring.now());
        }
    }

    /// Pops chains as long as there are tags and memory. Returns whether any chain was popped.
    fn pump(&mut self, turn: &mut Turn<'_>) -> bool {
        let mut found = false;
        let Some(size) = self.active.as_ref().map(|active| active.ring.layout().size) else { return false };
        // Requests that complete at once take no tag: the limit gives other virtqueues their turn.
        for _ in 0..size {
            let Some(active) = self.active.as_mut().filter(|active| active.is_running) else { break };
            let Some(&tag) = self.free.last().filter(|_| self.starved.is_none()) else { break };
            let popped = match active.ring.pop(&mut active.chain) {
                Ok(false) => break,
                Ok(true) => self.take(tag, turn),
                Err(why) => Popped::Broken(Broken::Ring(why)),
            };
            found = true;
            match popped {
                Popped::Taken => {}
                Popped::Starved => break,
                Popped::Broken(why) => {
                    self.fail(why, turn);
                    break;
                }
            }
            self.popped += 1;
        }
        if self.popped >= SUPPRESS_EVERY
            && let Some(active) = &mut self.active
        {
            self.popped = 0;
            active.ring.suppress_kicks();
        }
        found
    }

    /// Handles a violation of the specification by the driver: its ring stops until the device is reset.
    #[cold]
    fn fail(&mut self, why: Broken, turn: &mut Turn<'_>) {
        let Some(active) = &mut self.active else { return };
        active.is_running = false;
        if active.kick().is_some() {
            turn.ring.watch_edges_end(token(self.config.queue, active.generation));
        }
        active.report_error(turn.ring);
        self.config.shared.is_broken.store(true, Relaxed);
        (self.config.alarm)(why);
    }

    /// Turns the popped chain into a request under `tag`.
    #[inline]
    fn take(&mut self, tag: u16, turn: &mut Turn<'_>) -> Popped {
        let Some(Active { ring, chain, .. }) = &mut self.active else { return Popped::Taken };
        let request = match blk::parse(ring.memory(), chain) {
            Ok(request) => request,
            Err(why) => return Popped::Broken(Broken::Request(why)),
        };
        let config = &self.config;
        let status = match request.kind {
            Kind::Read | Kind::Write => match config.config.check_transfer(&request) {
                Ok((offset, len)) if len.0 <= REQUEST_MAX && request.data.len() <= SEGMENTS_MAX.into() => {
                    let mut segments = [Segment::EMPTY; SEGMENTS_MAX as usize];
                    let segments = segments_of(request.data, &mut segments);
                    let op = if request.kind == Kind::Read { Op::Read } else { Op::Write };
                    let ticket = request.ticket;
                    return self.transfer(tag, ticket, op, (offset, len), segments, turn);
                }
                Ok(_) => S_IOERR,
                Err(status) => status,
            },
            Kind::Flush => {
                let ticket = request.ticket;
                return self.submit_bare(tag, ticket, Request::flush(), turn);
            }
            Kind::GetId => {
                let mut rest = &config.id[..(request.len.min(ID_LEN.into())) as usize];
                for span in request.data {
                    let (part, after) = rest.split_at(rest.len().min(span.len() as usize));
                    let _ = ring.memory().write(*span, part);
                    rest = after;
                }
                S_OK
            }
            Kind::Discard | Kind::WriteZeroes => {
                let mut ranges = [Range::EMPTY];
                match config.config.read_ranges(ring.memory(), &request, &mut ranges) {
                    Ok((op, 1..)) => {
                        let Range { offset, len, flags } = ranges[0];
                        let ticket = request.ticket;
                        return self.submit_bare(
                            tag,
                            ticket,
                            Request { flags, ..Request::new(op, offset, len) },
                            turn,
                        );
                    }
                    Ok(_) => S_OK,
                    Err(status) => status,
                }
            }
            _ => match config.config.check_zone(&request) {
                Ok(zone) if zone.len.0 <= REQUEST_MAX || zone.op == Op::ReportZones => {
                    let mut segments = [Segment::EMPTY; SEGMENTS_MAX as usize];
                    if request.data.len() > segments.len() {
                        S_IOERR
                    } else {
                        let segments = segments_of(request.data, &mut segments);
                        let (ticket, sector, room) = (request.ticket, request.append_sector, request.len);
                        return self.zone_request(tag, ticket, zone, (sector, room), segments, turn);
                    }
                }
                Ok(_) => S_IOERR,
                Err(status) => status,
            },
        };
        let ticket = request.ticket;
        ring.complete(&ticket, status);
        self.has_unpublished = true;
        Popped::Taken
    }

    /// Starts a read, write or zone append.
    #[inline]
    pub(super) fn transfer(
        &mut self,
        tag: u16,
        ticket: Ticket,
        op: Op,
        (offset, len): (Bytes, Bytes),
        segments: &[Segment],
        turn: &mut Turn<'_>,
    ) -> Popped {
        let config = &self.config;
        let is_read = op == Op::Read;
        let is_durable = !is_read && config.has_write_cache && !config.config.is_write_back();
        let queue = turn.queues.touch(config.queue);
        // The hardware queue has this many segment entries for each tag.
        let guest = queue.run(Tag(tag), segments).unwrap_or(Data::NONE);
        // A region starts on a page boundary.
        let is_aligned =
            |segment: &Segment| (segment.offset | u64::from(segment.len)) & config.alignment_mask == 0;
        let is_direct = config.facts.opaque && segments.iter().all(is_aligned);
        let mut req = Request::new(op, offset, len);
        if is_durable && config.fua {
            req.flags = Flags::FUA;
        }
        self.slots[usize::from(tag)] = TagSlot {
            ticket,
            guest,
            len: len.0 as u32,
            is_read,
            is_direct,
            flush_follows: is_durable && !config.fua,
            bounce: Segment::EMPTY,
            req,
        };
        self.free.pop();
        if is_direct {
            self.submit(tag, guest, turn);
            return Popped::Taken;
        }
        self.provide(tag, turn)
    }

    /// Submits a request with memory of ours.
    pub(super) fn provide(&mut self, tag: u16, turn: &mut Turn<'_>) -> Popped {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.req.op == Op::Read && self.config.facts.zero_copy_reads {
            slot.req.flags = slot.req.flags.union(Flags::ZERO_COPY);
            count(&self.config.shared.copied);
            self.submit(tag, Data::NONE, turn);
            return Popped::Taken;
        }
        let len = slot.len;
        let fits = self.bounced == 0 || self.bounced + u64::from(len) <= BOUNCE_MAX;
        let memory = if fits { turn.ring.allocate(len) } else { None };
        let Some(memory) = memory else {
            self.starved = Some(tag);
            return Popped::Starved;
        };
        self.bounced += u64::from(len);
        slot.bounce = memory;
        count(&self.config.shared.copied);
        if !slot.is_read {
            let mut rest = memory;
            for piece in turn.queues.get_mut(self.config.queue).segments(slot.guest, len.into()) {
                let (part, after) = rest.split_at(piece.len);
                turn.ring.copy_any(piece, part);
                rest = after;
            }
        }
        // A report's header precedes the records of its zones.
        let data = if slot.req.op == Op::ReportZones { Report::records(memory) } else { memory };
        self.submit(tag, Data::One(data), turn);
        Popped::Taken
    }

    pub(super) fn submit_bare(
        &mut self,
        tag: u16,
        ticket: Ticket,
        req: Request,
        turn: &mut Turn<'_>,
    ) -> Popped {
        let is_durable =
            req.op != Op::Flush && self.config.has_write_cache && !self.config.config.is_write_back();
        self.slots[usize::from(tag)] = TagSlot { ticket, flush_follows: is_durable, req, ..TagSlot::FREE };
        self.free.pop();
        self.submit(tag, Data::NONE, turn);
        Popped::Taken
    }

    #[inline]
    pub(super) fn submit(&mut self, tag: u16, data: Data, turn: &mut Turn<'_>) {
        let req = Request { data, ..self.slots[usize::from(tag)].req };
        self.submit_as(tag, req, turn);
    }

    /// Submits another request than the one in the tag's slot.
    #[inline]
    pub(super) fn submit_as(&mut self, tag: u16, req: Request, turn: &mut Turn<'_>) {
        let owner = Owner::new(FrontNumber::VhostUser as u8, tag.into());
        turn.queues.touch(self.config.queue).submit(Tag(tag), owner, req, turn.ring);
    }

    /// Handles a request that the stack has completed.
    #[inline]
    pub(super) fn done(&mut self, done: Done, turn: &mut Turn<'_>) {
        let tag = done.tag.0;
        let slot = &mut self.slots[usize::from(tag)];
        if slot.len > 0 {
            self.move_data(done, turn);
        }
        if !self.failures.is_empty() {
            return self.zoned_done(done, turn);
        }
        self.settle(tag, done.status, blk::status_byte(done.status), turn);
    }

    /// Completes a request, or flushes what it wrote first.
    #[inline]
    pub(super) fn settle(&mut self, tag: u16, status: block::Status, byte: u8, turn: &mut Turn<'_>) {
        let slot = &mut self.slots[usize::from(tag)];
        if status.is_ok() && std::mem::take(&mut slot.flush_follows) {
            slot.req = Request::flush();
            return self.submit(tag, Data::NONE, turn);
        }
        self.free.push(tag);
        let Some(active) = &mut self.active else { return };
        active.ring.complete(&slot.ticket, byte);
        self.has_unpublished = true;
    }

    /// Copies data that was read to guest memory, and frees the bounce buffer.
    #[inline]
    fn move_data(&mut self, done: Done, turn: &mut Turn<'_>) {
        let slot = &mut self.slots[usize::from(done.tag.0)];
        if slot.req.op == Op::ReportZones && done.status.is_ok() {
            Report::encode(slot.bounce, turn);
        }
        let (len, guest) = (std::mem::take(&mut slot.len), slot.guest);
        let queue = turn.queues.get_mut(self.config.queue);
        if slot.is_read && done.status.is_ok() {
            if !slot.is_direct {
                let mut rest = match (slot.bounce.len, queue.request(done.tag).data) {
                    (1.., _) => slot.bounce,
                    (0, Data::One(data)) => data,
                    (0, _) => return,
                };
                for piece in queue.segments(guest, len.into()) {
                    let (part, after) = rest.split_at(piece.len);
                    turn.ring.copy_any(part, piece);
                    rest = after;
                }
            }
            let memory = self.active.as_ref().map(|active| active.ring.memory());
            if let Some(memory) = memory.filter(|memory| memory.log().is_some()) {
                queue.segments(guest, len.into()).for_each(|piece| memory.mark_segment(piece));
            }
        }
        let bounce = std::mem::replace(&mut slot.bounce, Segment::EMPTY);
        if bounce.len > 0 {
            self.bounced -= u64::from(len);
            turn.ring.free(bounce);
        }
    }

    /// Ends a turn: publishes completions, checks for requests, and tears down a stopped ring. Returns
    /// whether it must be called again in the next turn, without waiting for an event.
    pub(super) fn commit(&mut self, turn: &mut Turn<'_>) -> bool {
        if let Some(tag) = self.starved.take() {
            // Other requests may have freed memory.
            self.provide(tag, turn);
        }
        if std::mem::take(&mut self.has_unpublished) {
            self.publish(turn);
        }
        let Some(active) = &mut self.active else { return false };
        if !active.is_running {
            return self.take_down(turn);
        }
        if !self.is_polled {
            return false;
        }
        let now = turn.ring.now();
        if self.pump(turn) {
            self.budget.found(now);
            return true;
        }
        if self.free.is_empty() || self.starved.is_some() {
            // Completions put the virtqueue back into the list.
            return self.starved.is_some() && self.bounced == 0;
        }
        let Some(active) = self.active.as_mut().filter(|active| active.is_running) else { return true };
        if active.kick().is_none() || self.budget.goes_on(now) {
            return true;
        }
        if active.ring.enable_kicks() {
            // A chain was added in between, and its kick may have been suppressed.
            active.ring.suppress_kicks();
            return true;
        }
        self.is_polled = false;
        false
    }

    #[inline]
    fn publish(&mut self, turn: &mut Turn<'_>) {
        let Some(active) = &mut self.active else { return };
        active.ring.publish();
        if active.ring.should_interrupt() && active.interrupt(turn.ring) {
            count(&self.config.shared.interrupts);
        }
    }

    /// Tears down a stopped ring once its requests have completed. A broken ring stays until it is stopped.
    #[cold]
    fn take_down(&mut self, turn: &mut Turn<'_>) -> bool {
        let is_idle = self.free.len() == self.slots.len() && self.starved.is_none();
        let is_broken = self.config.shared.is_broken.load(Relaxed);
        let may_close = self.active.as_ref().is_some_and(|active| active.stopped.is_some() || !is_broken);
        if is_idle && may_close {
            self.is_polled = false;
            self.active.take().into_iter().for_each(|active| active.close(turn.ring));
        }
        false
    }
}
