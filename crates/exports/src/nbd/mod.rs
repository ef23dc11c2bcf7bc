//! The NBD export: connections in their transmission phase, on one reactor thread.
//!
//! Handshakes and TLS happen elsewhere; a connection arrives here with its [`Session`]. Requests are parsed
//! in the memory to which the ring received them: the payload of a small write goes to the backend from
//! there, a large one is received into its own memory. Each request gets a tag of the device's hardware
//! queue; all replies of a turn are sent with one call per connection.
//!
//! *Invariant:* only complete requests in the stack hold a receive chunk, so a client that stalls holds
//! none. *Invariant:* a connection has at most [`UNANSWERED_MAX`] unanswered requests that move at most
//! [`HELD_MAX`] bytes; beyond that it is not read. All connections of a reactor share one memory budget
//! (`crate::budget`).
//!
//! Not here: the handshake, listeners, TLS, and backends.

mod connection;
mod intake;
mod reply;

use crate::Turn;
pub use crate::budget::{Alarm, Cut, CutReason, FLOOR, GRACE, LimitCounts, Limits};
use crate::budget::{Budget, charge_of};
use crate::chunk_uses::ChunkUses;
pub use crate::facts::DeviceFacts;
use block::{Bytes, Data, Segment};
use connection::{Connection, Input, Receiving};
pub use connection::{HELD_MAX, UNANSWERED_MAX};
use proto::nbd::extents::StatusQuery;
use proto::nbd::{Command, Request, Session};
use queue::{Done, Nanos, QueueId, Ring};
use ring::{Chunk, Event, KernelRing, ReceiveEnd};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Front-end state of a request that is in the stack.
#[derive(Clone, Copy, Debug)]
struct Pdu {
    request: Request,
    /// The query of a block status request; `None` for other requests.
    query: Option<StatusQuery>,
    memory: Memory,
    /// Bytes charged to the connection for memory that the next step needs.
    reserved: u64,
    stage: Stage,
}

impl Pdu {
    const VACANT: Pdu = Pdu {
        request: Request::new(Command::Flush, 0, 0, 0),
        query: None,
        memory: Memory::None,
        reserved: 0,
        stage: Stage::Only,
    };
}

/// Memory of a request's data.
#[derive(Clone, Copy, Debug)]
enum Memory {
    None,
    /// Memory allocated from the arena.
    Own(Segment),
    /// Part of a received chunk.
    Chunk(Chunk, Segment),
}

impl Memory {
    fn data(self) -> Data {
        match self {
            Memory::None => Data::NONE,
            Memory::Own(segment) | Memory::Chunk(_, segment) => Data::One(segment),
        }
    }
}

/// Stage of a request.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// The request's only stage.
    Only,
    /// A large structured read that first queries extents.
    Map,
    /// A large structured read whose extents are known, and stored in this segment.
    Mapped(Segment),
}

struct ServedQueue {
    facts: DeviceFacts,
    pdus: Box<[Pdu]>,
    /// Number of connections, for the control plane.
    connections: Arc<AtomicU32>,
    /// Counts of events in which limits took effect.
    counts: Arc<LimitCounts>,
}

/// The NBD connections of one reactor.
#[derive(Default)]
pub struct Front {
    connections: Vec<Option<Connection>>,
    queues: Vec<Option<ServedQueue>>,
    chunk_uses: ChunkUses,
    /// Connections with something to send or to continue in this turn.
    dirty: Vec<u32>,
    /// Connections that wait for a tag of their queue, in order of arrival.
    starved: VecDeque<u32>,
    /// The empty vector that is swapped with `dirty`.
    spare_list: Vec<u32>,
    /// Buffer for block status replies.
    status_reply: Vec<u8>,
    budget: Budget,
}

impl Front {
    /// Starts serving connections to the device of this queue, which has `depth` tags. `connections` counts
    /// the connections.
    pub fn add_queue(&mut self, queue: QueueId, depth: u16, facts: DeviceFacts, connections: Arc<AtomicU32>) {
        let index = usize::from(queue.0);
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        let (pdus, counts) = (vec![Pdu::VACANT; depth.into()].into(), Arc::default());
        self.queues[index] = Some(ServedQueue { facts, pdus, connections, counts });
    }

    /// Counts in `counts` how often limits take effect for the connections of this queue.
    pub fn count_limits(&mut self, queue: QueueId, counts: Arc<LimitCounts>) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue.0)) {
            served.counts = counts;
        }
    }

    /// Sets the limits of connections. `alarm` schedules [`tick`](Front::tick); without it no connection is
    /// closed by these limits.
    pub fn limit(&mut self, limits: Limits, alarm: Option<Alarm>) {
        self.budget.set(limits, alarm);
    }

    /// Returns whether connections to the device of this queue are served.
    pub fn has_queue(&self, queue: QueueId) -> bool {
        self.queues.get(usize::from(queue.0)).is_some_and(Option::is_some)
    }

    /// Updates the facts about the device of this queue and its size. Existing connections may use a larger
    /// size at once; their clients see it when they reconnect.
    pub fn update_queue(&mut self, queue: QueueId, facts: DeviceFacts, size: Bytes) {
        let Some(Some(served)) = self.queues.get_mut(usize::from(queue.0)) else { return };
        served.facts = facts;
        for connection in self.connections.iter_mut().flatten().filter(|c| c.queue == queue) {
            connection.session.size = size.0;
        }
    }

    fn count_connection(&mut self, queue: QueueId, by: i32) {
        if let Some(served) = &self.queues[usize::from(queue.0)] {
            served.connections.store(served.connections.load(Relaxed).wrapping_add_signed(by), Relaxed);
        }
    }

    /// Takes over a connection after its handshake. `leftover`: bytes that were already received after the
    /// handshake. Returns the connection's index, for [`when_gone`](Front::when_gone).
    ///
    /// # Errors
    /// The socket cannot be added to the ring.
    pub fn adopt(
        &mut self,
        fd: OwnedFd,
        session: Session,
        queue: QueueId,
        leftover: &[u8],
        turn: &mut Turn<'_>,
    ) -> std::io::Result<u32> {
        let index = self.connections.iter().position(Option::is_none).unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let socket = turn.ring.add_socket(fd, index as u32)?;
        let mut connection = Connection::new(socket, queue, session);
        if !leftover.is_empty() {
            let memory = intake::keep(leftover, turn.ring).ok_or(std::io::ErrorKind::OutOfMemory)?;
            connection.held = charge_of(memory);
            self.budget.add(connection.held);
            connection.backlog.push_back(memory);
            connection.paused = true;
        }
        self.connections[index] = Some(connection);
        self.count_connection(queue, 1);
        self.mark(index as u32);
        Ok(index as u32)
    }

    /// Calls `tell` on this thread when the just adopted connection is gone.
    pub fn when_gone(&mut self, connection: u32, tell: Box<dyn FnOnce() + Send>) {
        if let Some(connection) = self.connection_mut(connection) {
            connection.when_gone = Some(tell);
        }
    }

    fn connection(&self, index: u32) -> Option<&Connection> {
        self.connections.get(index as usize)?.as_ref()
    }

    fn connection_mut(&mut self, index: u32) -> Option<&mut Connection> {
        self.connections.get_mut(index as usize)?.as_mut()
    }

    fn mark(&mut self, index: u32) {
        let Some(connection) = self.connection_mut(index) else { return };
        if !std::mem::replace(&mut connection.dirty, true) {
            self.dirty.push(index);
        }
    }

    /// Accepts no more requests from this client.
    fn end(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if std::mem::replace(&mut connection.ending, true) {
            return;
        }
        connection.paused = false;
        let mut freed = drop_backlog(connection, turn.ring);
        match connection.receiving {
            // The kernel is writing to that memory: `filled` frees it.
            Receiving::Filling => {}
            receiving => {
                freed += drop_payload(connection, turn.ring);
                if receiving == Receiving::Chunks {
                    connection.receiving = Receiving::Stopping;
                    turn.ring.receive_stop(connection.socket);
                }
            }
        }
        if std::mem::take(&mut connection.awaits_memory) {
            self.budget.leave(index);
        }
        self.discharge(index, freed);
        self.mark(index);
    }

    /// Closes a connection without sending its outstanding replies.
    fn cut(&mut self, index: u32, turn: &mut Turn<'_>) {
        self.end(index, turn);
        if let Some(connection) = self.connection_mut(index)
            && !std::mem::replace(&mut connection.closed, true)
        {
            turn.ring.close(connection.socket);
        }
    }

    /// Handles the alarm: closes connections that hold memory others wait for, or that stalled in the
    /// middle of a request.
    pub fn tick(&mut self, now: Nanos, turn: &mut Turn<'_>) -> Vec<Cut> {
        let passed = self.budget.passed(now);
        let (wanted, stall) = (self.budget.wanted(), self.budget.limits.stall);
        let (mut cuts, mut owed, mut holders) = (Vec::new(), false, Vec::new());
        for index in 0..self.connections.len() as u32 {
            let Some(connection) = self.connection_mut(index).filter(|c| !c.closed) else { continue };
            let owes_input = connection.is_owed_input();
            let owes = owes_input || connection.outbox.is_sending();
            let moved = std::mem::take(&mut connection.moved) || !owes;
            connection.still = if moved { Duration::ZERO } else { connection.still + passed };
            let (still, held) = (connection.still, connection.held);
            connection.slow |= owes_input && !still.is_zero();
            if owes_input && stall.is_some_and(|stall| still >= stall) {
                cuts.push((index, Cut { queue: connection.queue, why: CutReason::Stalled, held, still }));
            } else if wanted.is_some() && held > 0 && still >= GRACE {
                holders.push((index, Cut { queue: connection.queue, why: CutReason::Evicted, held, still }));
            }
            owed |= owes_input;
        }
        // Connections without progress for the longest time are closed first.
        holders.sort_by_key(|(_, cut)| std::cmp::Reverse(cut.still));
        let mut wanted = wanted.unwrap_or(0);
        for (index, cut) in holders {
            if wanted == 0 {
                break;
            }
            wanted = wanted.saturating_sub(cut.held);
            cuts.push((index, cut));
        }
        for (index, cut) in &cuts {
            if let Some(served) = &self.queues[usize::from(cut.queue.0)] {
                let count = match cut.why {
                    CutReason::Stalled => &served.counts.stalled,
                    CutReason::Evicted => &served.counts.evicted,
                };
                count.fetch_add(1, Relaxed);
            }
            self.cut(*index, turn);
        }
        self.budget.schedule_next_check(owed);
        cuts.into_iter().map(|(_, cut)| cut).collect()
    }

    /// Charges a connection for memory that it is about to hold. `goes_on`: the memory is for the rest of a
    /// payload. Returns `false` if the connection has to wait.
    #[inline]
    fn charge(&mut self, index: u32, bytes: u64, goes_on: bool) -> bool {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return true;
        };
        let held = connection.held + bytes;
        if held > FLOOR && !self.budget.grants(index, bytes, connection.resumed, goes_on) {
            return false;
        }
        connection.held = held;
        self.budget.add(bytes);
        if std::mem::take(&mut connection.resumed) {
            self.budget.line_moves();
        }
        true
    }

    /// Charges a connection for memory, without a check of the budget.
    fn charge_anyway(&mut self, index: u32, bytes: u64) {
        if let Some(connection) = self.connection_mut(index) {
            connection.held += bytes;
            self.budget.add(bytes);
        }
    }

    /// Records that a connection has freed this many bytes.
    #[inline]
    fn discharge(&mut self, index: u32, bytes: u64) {
        if let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) {
            connection.held -= bytes;
            self.budget.give_back(index, bytes, connection.held);
        }
    }

    /// Frees memory charged to a connection.
    #[inline]
    fn release(&mut self, index: u32, memory: Segment, ring: &mut KernelRing) {
        ring.free(memory);
        self.discharge(index, charge_of(memory));
    }

    fn close_if_idle(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if connection.ending && connection.is_idle() && !std::mem::replace(&mut connection.closed, true) {
            turn.ring.close(connection.socket);
        }
    }

    fn receive_ended(&mut self, index: u32, end: ReceiveEnd, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        connection.receiving = Receiving::No;
        match end {
            ReceiveEnd::Stopped => self.mark(index),
            ReceiveEnd::Eof | ReceiveEnd::Error(_) => {
                self.end(index, turn);
                self.mark(index);
            }
        }
    }

    fn sent(&mut self, index: u32, result: i64, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        connection.moved = true;
        let (paid, mut freed) = connection.outbox.sent(turn.ring);
        connection.owed.pay(paid);
        if result < 0 {
            let (lost, more) = connection.outbox.discard(turn.ring);
            connection.owed.pay(lost);
            freed += more;
            self.end(index, turn);
        }
        self.discharge(index, freed);
        let Some(connection) = self.connection(index) else { return };
        if connection.paused || connection.ending || !connection.outbox.is_empty() {
            self.mark(index);
        }
    }

    /// Handles the end of a socket that the ring has closed. Requests may still be in the stack after an
    /// abort: the connection is removed when the last of them has completed.
    fn gone(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        connection.closed = true;
        connection.receiving = Receiving::No;
        let (_, sent) = connection.outbox.discard(turn.ring);
        let freed = sent + drop_backlog(connection, turn.ring) + drop_payload(connection, turn.ring);
        connection.header.take().into_iter().for_each(|segment| turn.ring.free(segment));
        let is_over = connection.in_stack == 0;
        self.discharge(index, freed);
        if is_over {
            self.forget(index);
        }
    }

    fn forget(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::take) else {
            return;
        };
        debug_assert_eq!(connection.held, 0, "all memory of a connection that is over was given back");
        self.budget.close(index, connection.held);
        self.starved.retain(|&waiting| waiting != index);
        self.dirty.retain(|&waiting| waiting != index);
        self.count_connection(connection.queue, -1);
        if let Some(tell) = connection.when_gone {
            tell();
        }
    }

    fn release_chunk(&mut self, chunk: Chunk, ring: &mut KernelRing) {
        self.chunk_uses.release(chunk, ring);
    }
}

/// Frees the backlog, and returns the bytes charged for it.
fn drop_backlog(connection: &mut Connection, ring: &mut KernelRing) -> u64 {
    let mut freed = 0;
    for segment in connection.backlog.drain(..) {
        freed += charge_of(segment);
        ring.free(segment);
    }
    freed
}

/// Frees the payload being received, which must not be written any more, and ignores all further input.
/// Returns the bytes charged for it.
fn drop_payload(connection: &mut Connection, ring: &mut KernelRing) -> u64 {
    match std::mem::replace(&mut connection.input, Input::Over) {
        Input::Payload { memory, charged, .. } => {
            ring.free(memory);
            charged.into()
        }
        _ => 0,
    }
}

impl crate::Front for Front {
    fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        match event {
            Event::Received { owner, segment, chunk, .. } => self.received(owner, segment, chunk, turn),
            Event::ReceiveEnded { owner, end, .. } => self.receive_ended(owner, end, turn),
            Event::Filled { owner, result, .. } => self.filled(owner, result, turn),
            Event::Sent { owner, result, .. } => self.sent(owner, result, turn),
            Event::Closed { owner, .. } => self.gone(owner, turn),
            Event::Io { .. } | Event::Ended { .. } | Event::Woken => {
                debug_assert!(false, "not a socket's event: {event:?}")
            }
        }
    }

    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        self.answer(queue, done, turn);
    }

    fn commit(&mut self, turn: &mut Turn<'_>) {
        for _ in 0..self.starved.len() {
            let Some(index) = self.starved.pop_front() else { break };
            self.mark(index);
        }
        if let Some(index) = self.budget.next_in_line() {
            if let Some(connection) = self.connection_mut(index) {
                (connection.awaits_memory, connection.resumed) = (false, true);
            }
            self.mark(index);
        }
        let mut list = std::mem::replace(&mut self.dirty, std::mem::take(&mut self.spare_list));
        for index in list.drain(..) {
            let Some(connection) = self.connection_mut(index) else { continue };
            connection.dirty = false;
            if connection.closed {
                continue;
            }
            connection.outbox.start(connection.socket, turn.ring);
            if connection.ending {
                self.close_if_idle(index, turn);
            } else {
                self.take_up(index, turn);
            }
        }
        self.spare_list = list;
    }

    fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || self.budget.has_next()
    }

    fn close_queue(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>) {
        for index in 0..self.connections.len() as u32 {
            match self.connection(index).is_some_and(|c| c.queue == queue) {
                true if now => self.cut(index, turn),
                true => self.end(index, turn),
                false => {}
            }
        }
    }

    fn is_open(&self, queue: QueueId) -> bool {
        let served = self.queues.get(usize::from(queue.0)).and_then(Option::as_ref);
        served.is_some_and(|served| served.connections.load(Relaxed) > 0)
    }

    fn remove_queue(&mut self, queue: QueueId, _: &mut Turn<'_>) {
        if let Some(served) = self.queues.get_mut(usize::from(queue.0)) {
            *served = None;
        }
    }
}
