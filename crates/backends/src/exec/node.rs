//! Node of an `exec:` device: requests become commands on the node's own connection, and their data moves
//! through slots of the connection's shared memory.
//!
//! A request is held until the program has answered its last command. Without a connection, requests wait
//! in order; requests that a lost connection had not answered return to their place and are sent again. If
//! that lasts too long they fail, and so do new ones, until there is a connection again.
//!
//! *Invariant:* the program never accesses the memory of a request, only a slot. No other request gets that
//! slot until the command is answered or the connection is closed.

use super::flight::{Flight, Plan, State, plan};
use super::shared::{SLOT_LEN, SLOTS, Shared};
use crate::nbd::{Connected, ConnectionChannel, Connector, Loss};
use crate::segments::one_extent;
use block::{Cookie, Extent, Op, Region, Request, Segment, Status, Tag};
use proto::exec::{REQUEST_LEN, Replies, Reply};
use queue::{
    Cx, Nanos, Node, NodeEvent, NodeId, QueueWaker, ReceiveEnd, SocketEvent, SocketId, Sockets, Verdict,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Memory for the commands of one send.
const HEADERS_LEN: u32 = 4096;
/// Time to wait for memory if none is free, in nanoseconds.
const MEMORY_NS: u64 = 1_000_000;
/// Minimum time to wait for the first connection of a queue, in nanoseconds.
const FIRST_NS: u64 = 10_000_000_000;
/// Number of checks within a timeout.
const CHECKS: u64 = 8;
const CHECK_NS_MIN: u64 = 1_000_000;
const CHECK_NS_MAX: u64 = 250_000_000;
/// Lifetime in nanoseconds below which a connection counts as a failed attempt, whatever it transferred.
const OF_USE_NS: u64 = 1_000_000_000;

/// A connection's shared memory, registered with the queue's ring.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Region of the ring, at least [`SLOTS`] times [`SLOT_LEN`] bytes long.
    pub region: Region,
}

impl From<Region> for Memory {
    fn from(region: Region) -> Memory {
        Memory { region }
    }
}

/// A connection.
struct Connection {
    socket: SocketId,
    replies: Replies,
    /// Memory of the commands that are being sent; `None` if no send is in flight.
    sending: Option<Segment>,
    since: Nanos,
    /// Whether the program has sent any answer.
    heard: bool,
}

/// State of the connection.
enum Link {
    Down,
    Up(Connection),
    /// The ring is closing a connection that was lost or is no longer needed.
    Closing(Connection),
}

/// The node of an `exec:` device in one hardware queue.
pub struct ExecNode<S> {
    shared: Arc<Shared>,
    memory: Memory,
    channel: Arc<ConnectionChannel<S, ()>>,
    connector: Arc<dyn Connector<S, ()>>,
    waker: QueueWaker,
    /// Held requests by tag; `None` if the node does not hold the request.
    flights: Box<[Option<Flight>]>,
    in_flight: usize,
    /// Tags of requests to send, in order.
    waiting: VecDeque<Tag>,
    /// Free slots; the last one is used first, so that few pages are in use.
    free: Vec<u16>,
    link: Link,
    /// Start of the time without a connection; `None` while there is one, and before the first turn.
    down_since: Option<Nanos>,
    was_up: bool,
    /// Whether the connector was asked for a connection.
    asked: bool,
    has_alarm: bool,
    /// Whether the alarm was cancelled, but may still arrive.
    alarm_cancelled: bool,
    serial: u64,
    /// Whether the node was closed, and has received no request since.
    closing: bool,
    claimed: bool,
}

impl<S> ExecNode<S> {
    /// Creates a node that has already claimed its connection to the program.
    pub(super) fn new(
        shared: Arc<Shared>,
        memory: Memory,
        connector: Arc<dyn Connector<S, ()>>,
        waker: QueueWaker,
    ) -> ExecNode<S> {
        let depth = shared.ready.depth_max.min(SLOTS) as u16;
        ExecNode {
            channel: Arc::new(ConnectionChannel::new(waker.clone())),
            shared,
            memory,
            connector,
            waker,
            flights: Box::default(),
            in_flight: 0,
            waiting: VecDeque::new(),
            free: (0..depth).rev().collect(),
            link: Link::Down,
            down_since: None,
            was_up: false,
            asked: false,
            has_alarm: false,
            alarm_cancelled: false,
            serial: 0,
            closing: false,
            claimed: true,
        }
    }

    /// Reopens the node for a request that arrives after [`close`](Node::close). Returns `false` if another
    /// node has taken the program's only connection.
    fn reopen(&mut self) -> bool {
        if !self.claimed && !self.shared.claim() {
            return false;
        }
        self.channel = Arc::new(ConnectionChannel::new(self.waker.clone()));
        (self.claimed, self.closing, self.asked) = (true, false, false);
        (self.down_since, self.was_up) = (None, false);
        true
    }

    fn reconnect_ns(&self) -> u64 {
        let reconnect = self.shared.timeouts.reconnect.as_nanos() as u64;
        if self.was_up { reconnect } else { reconnect.max(FIRST_NS) }
    }

    fn check_ns(&self) -> u64 {
        let timeout = || self.shared.timeouts.timeout.map(|time| time.as_nanos() as u64);
        let too_long = if let Link::Down = self.link { Some(self.reconnect_ns()) } else { timeout() };
        too_long.map_or(CHECK_NS_MAX, |ns| ns / CHECKS).clamp(CHECK_NS_MIN, CHECK_NS_MAX)
    }

    /// Returns whether there has been no connection for longer than requests wait for one.
    fn has_given_up(&self, now: Nanos) -> bool {
        self.down_since.is_some_and(|since| now.since(since) >= self.reconnect_ns())
    }

    /// Returns whether an answer of the program is overdue. The timeout applies to every command: a program
    /// that answers other commands but forgets one is not healthy.
    fn is_silent(&self, now: Nanos) -> bool {
        let Some(timeout) = self.shared.timeouts.timeout else { return false };
        let sent = self.flights.iter().flatten().filter(|flight| flight.state != State::Waiting);
        let oldest = sent.map(|flight| flight.sent_at).min();
        oldest.is_some_and(|oldest| now.since(oldest) >= timeout.as_nanos() as u64)
    }

    /// Returns the first `len` bytes of a slot.
    fn slot(&self, slot: u16, len: u64) -> Segment {
        let offset = u64::from(slot) * u64::from(SLOT_LEN);
        Segment { region: self.memory.region, offset, len: len as u32 }
    }
}

impl<S: Send + 'static> ExecNode<S> {
    fn finish<R: Sockets<Stream = S>>(&mut self, tag: Tag, status: Status, cx: &mut Cx<'_, R>) {
        let Some(flight) = self.flights[tag.index()].take() else { return };
        self.in_flight -= 1;
        cx.resume(flight.io, -i64::from(status.errno()));
    }

    /// Copies data between a slot and the memory of a request, starting at the request's current position.
    fn copy<R: Sockets<Stream = S>>(&self, flight: &Flight, slot: u16, cx: &mut Cx<'_, R>) {
        let mut done = 0;
        while done < flight.len {
            let data = cx.advance(flight.req.data, flight.done + done);
            let Some(piece) = cx.segments(data, flight.len - done).next() else { return };
            let whole = self.slot(slot, flight.len);
            let place = Segment { offset: whole.offset + done, len: piece.len, ..whole };
            let (from, to) = if flight.req.op == Op::Read { (place, piece) } else { (piece, place) };
            cx.ring.copy(from, to);
            done += u64::from(piece.len);
        }
    }

    /// Processes a reply. Returns `false` if it belongs to no command that the program has.
    fn replied<R: Sockets<Stream = S>>(&mut self, reply: Reply, cx: &mut Cx<'_, R>) -> bool {
        let index = Flight::index_of(reply.tag);
        let Some(Some(flight)) = self.flights.get(index).copied() else { return false };
        let State::Sent(slot) = flight.state else { return false };
        if flight.wire_tag() != reply.tag {
            return false;
        }
        let status = Status::from_errno(i32::from(reply.errno));
        if status.is_ok() && flight.req.op == Op::Read && flight.moves_data() {
            self.copy(&flight, slot, cx);
        }
        self.free.push(slot);
        let tag = Tag(index as u16);
        let Some(flight) = self.flights[index].as_mut() else { return false };
        match flight.ended(status, &self.shared) {
            Some(status) => self.finish(tag, status, cx),
            None => {
                flight.state = State::Waiting;
                self.waiting.push_back(tag);
            }
        }
        true
    }

    fn received<R: Sockets<Stream = S>>(&mut self, segment: Segment, cx: &mut Cx<'_, R>) {
        let mut at = 0;
        while at < segment.len {
            let Link::Up(connection) = &mut self.link else { return };
            connection.heard = true;
            let (taken, reply) = connection.replies.take(cx.ring.bytes(segment.slice(at, segment.len - at)));
            at += taken as u32;
            let is_valid = match reply {
                None => true,
                Some(None) => false,
                Some(Some(reply)) => self.replied(reply, cx),
            };
            if !is_valid {
                return self.lose(Loss::Nonsense, cx);
            }
        }
    }

    /// Sends waiting requests, unless a send is in flight.
    fn send<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        match &self.link {
            Link::Up(connection)
                if connection.sending.is_none() && !self.waiting.is_empty() && !self.free.is_empty() => {}
            _ => return,
        }
        let Some(headers) = cx.ring.allocate(HEADERS_LEN) else { return self.set_alarm(MEMORY_NS, cx) };
        let mut used = 0;
        while used + REQUEST_LEN as u32 <= HEADERS_LEN && !self.free.is_empty() {
            let Some(tag) = self.waiting.pop_front() else { break };
            let Some(mut flight) = self.flights[tag.index()] else { continue };
            let Some(slot) = self.free.pop() else { break };
            flight.sent_at = cx.now();
            let wire = flight.command(&self.shared, slot, self.slot(slot, 0).offset);
            if flight.req.op == Op::Write && flight.moves_data() {
                self.copy(&flight, slot, cx);
            }
            self.flights[tag.index()] = Some(flight);
            wire.put(cx.ring.bytes_mut(headers.slice(used, REQUEST_LEN as u32)));
            used += REQUEST_LEN as u32;
        }
        let Link::Up(connection) = &mut self.link else { return cx.ring.free(headers) };
        if used == 0 {
            return cx.ring.free(headers);
        }
        connection.sending = Some(headers);
        cx.ring.send(connection.socket, &[headers.slice(0, used)]);
    }

    fn sent<R: Sockets<Stream = S>>(&mut self, result: i64, cx: &mut Cx<'_, R>) {
        let (Link::Up(connection) | Link::Closing(connection)) = &mut self.link else { return };
        connection.sending.take().into_iter().for_each(|headers| cx.ring.free(headers));
        if result < 0 {
            self.lose(Loss::Failed((-result) as i32), cx);
        } else if self.closing {
            self.let_go(cx);
        }
    }

    /// Closes a connection that failed, and requests another one.
    fn lose<R: Sockets<Stream = S>>(&mut self, loss: Loss, cx: &mut Cx<'_, R>) {
        let Link::Up(connection) = &self.link else { return };
        if self.closing {
            return self.let_go(cx);
        }
        let was_asked = self.flights.iter().flatten().any(|flight| flight.state != State::Waiting);
        let was_of_use = cx.now().since(connection.since) >= OF_USE_NS && (connection.heard || !was_asked);
        if was_of_use {
            self.channel.forget_failures();
        } else {
            self.channel.count_failure();
        }
        self.shared.counts.lost.fetch_add(1, Relaxed);
        self.let_go(cx);
        (self.down_since, self.asked) = (Some(cx.now()), true);
        self.connector.connect(self.channel.clone(), loss);
    }

    /// Makes the ring close the connection.
    fn let_go<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        match std::mem::replace(&mut self.link, Link::Down) {
            Link::Up(connection) => {
                self.shared.counts.connected.fetch_sub(1, Relaxed);
                cx.ring.close(connection.socket);
                self.link = Link::Closing(connection);
            }
            other => self.link = other,
        }
    }

    /// Handles the closed connection: unanswered requests are sent again on the next one.
    fn closed<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        if let Link::Closing(Connection { sending: Some(headers), .. }) =
            std::mem::replace(&mut self.link, Link::Down)
        {
            cx.ring.free(headers);
        }
        self.cancel_alarm(cx);
        let mut replayed = 0;
        for index in 0..self.flights.len() {
            let Some(flight) = self.flights[index].as_mut() else { continue };
            let tag = Tag(index as u16);
            let State::Sent(slot) = flight.state else { continue };
            flight.state = State::Waiting;
            self.free.push(slot);
            if flight.cancelled {
                self.finish(tag, Status::Timeout, cx);
            } else if flight.is_lost() {
                self.shared.counts.failed.fetch_add(1, Relaxed);
                self.finish(tag, Status::Transport, cx);
            } else {
                replayed += 1;
            }
        }
        self.shared.counts.replayed.fetch_add(replayed, Relaxed);
        self.waiting.clear();
        let waiting = self.flights.iter().enumerate().filter(|(_, flight)| flight.is_some());
        self.waiting.extend(waiting.map(|(index, _)| Tag(index as u16)));
        let flights = &self.flights;
        let serial = |tag: &Tag| flights[tag.index()].as_ref().map_or(0, |flight| flight.serial);
        self.waiting.make_contiguous().sort_unstable_by_key(serial);
        self.give_up_if_due(cx);
    }

    /// Fails requests that have waited for a connection for too long.
    fn give_up_if_due<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        if matches!(self.link, Link::Down) && self.has_given_up(cx.now()) {
            while let Some(tag) = self.waiting.pop_front() {
                self.shared.counts.failed.fetch_add(1, Relaxed);
                self.finish(tag, Status::Transport, cx);
            }
        }
    }

    fn look_for_connection<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        if self.closing || !matches!(self.link, Link::Down) {
            return;
        }
        if let Some(Connected { stream, session: () }) = self.channel.take() {
            let Ok(socket) = cx.ring.add_socket(stream, cx.socket_owner()) else {
                self.channel.count_failure();
                return self.connector.connect(self.channel.clone(), Loss::New);
            };
            self.shared.counts.connected.fetch_add(1, Relaxed);
            let (since, replies) = (cx.now(), Replies::default());
            self.link = Link::Up(Connection { socket, replies, sending: None, since, heard: false });
            (self.down_since, self.was_up, self.asked) = (None, true, false);
            return cx.ring.receive(socket);
        }
        self.down_since.get_or_insert(cx.now());
        if !std::mem::replace(&mut self.asked, true) {
            self.connector.connect(self.channel.clone(), Loss::New);
        }
    }

    fn alarm<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        (self.has_alarm, self.alarm_cancelled) = (false, false);
        match &self.link {
            _ if self.closing => self.let_go(cx),
            Link::Up(_) if self.is_silent(cx.now()) => self.lose(Loss::Silent, cx),
            Link::Down => self.give_up_if_due(cx),
            _ => {}
        }
    }

    fn set_alarm<R: Sockets<Stream = S>>(&mut self, after_ns: u64, cx: &mut Cx<'_, R>) {
        if !std::mem::replace(&mut self.has_alarm, true) {
            cx.alarm(cx.now().after(after_ns));
        }
    }

    fn cancel_alarm<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        if self.has_alarm && !std::mem::replace(&mut self.alarm_cancelled, true) {
            cx.cancel_alarm();
        }
    }
}

impl<S: Send + 'static, R: Sockets<Stream = S>> Node<R> for ExecNode<S> {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.flights = vec![None; tags].into();
        self.waiting = VecDeque::with_capacity(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match plan(req, &self.shared) {
            Plan::Over(status) => return Verdict::Up(status),
            Plan::AllData => {
                one_extent(cx, req.data, Extent { len: req.len, hole: false, zero: false });
                return Verdict::Up(Status::Ok);
            }
            Plan::Send => {}
        }
        if self.closing && !self.reopen() || self.has_given_up(cx.now()) {
            return Verdict::Up(Status::Transport);
        }
        self.serial += 1;
        self.flights[io.tag.index()] = Some(Flight::new(io, *req, self.serial));
        self.in_flight += 1;
        self.waiting.push_back(io.tag);
        Verdict::Held
    }

    #[inline]
    fn reap(&mut self, _: Cookie, _: &mut Request, result: i64, _: &mut Cx<'_, R>) -> Verdict {
        Verdict::Up(Status::from_result(result, 0))
    }

    #[inline]
    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.look_for_connection(cx);
        self.send(cx);
        let watched = self.shared.timeouts.timeout.is_some() || !matches!(self.link, Link::Up(_));
        if self.in_flight > 0 && watched && !self.has_alarm {
            self.set_alarm(self.check_ns(), cx);
        }
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        let Some(flight) = &mut self.flights[io.tag.index()] else { return };
        if flight.state == State::Waiting {
            self.waiting.retain(|&waiting| waiting != io.tag);
            return self.finish(io.tag, Status::Timeout, cx);
        }
        // The protocol cannot cancel a command.
        flight.cancelled = true;
        self.lose(Loss::Cancelled, cx);
    }

    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, R>) {
        match event {
            NodeEvent::Alarm => self.alarm(cx),
            // The node watches no eventfd.
            NodeEvent::Signalled | NodeEvent::WatchEnded => {}
            NodeEvent::Socket(_, SocketEvent::Received { segment, chunk }) => {
                self.received(segment, cx);
                cx.ring.give_back(chunk);
            }
            NodeEvent::Socket(_, SocketEvent::ReceiveEnded(end)) => match end {
                ReceiveEnd::Eof => self.lose(Loss::Closed, cx),
                ReceiveEnd::Error(errno) => self.lose(Loss::Failed(errno), cx),
                ReceiveEnd::Stopped => {}
            },
            NodeEvent::Socket(_, SocketEvent::Filled(_)) => {}
            NodeEvent::Socket(_, SocketEvent::Sent(result)) => self.sent(result, cx),
            NodeEvent::Socket(_, SocketEvent::Closed) => self.closed(cx),
        }
    }

    fn close(&mut self, cx: &mut Cx<'_, R>) -> bool {
        self.closing = true;
        drop(self.channel.close());
        if let Link::Up(connection) = &self.link {
            if connection.sending.is_none() {
                self.let_go(cx);
            }
            return false;
        }
        self.cancel_alarm(cx);
        let closed = matches!(self.link, Link::Down) && !self.has_alarm;
        if closed && std::mem::take(&mut self.claimed) {
            self.shared.leave();
        }
        closed
    }
}

impl<S> Drop for ExecNode<S> {
    fn drop(&mut self) {
        drop(self.channel.close());
        if self.claimed {
            self.shared.leave();
        }
    }
}
