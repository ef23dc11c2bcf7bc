//! Node of an NBD export: requests become commands on the node's own connection.
//!
//! A request is held until the server has answered its last command. Without a connection, requests wait in
//! order; requests that a lost connection had not answered return to their place and are sent again. If
//! that lasts too long they fail, and so do new ones, until there is a connection again.
//!
//! *Invariant:* a request completes only when neither the ring nor data from the server can access its
//! memory any more: its command was sent and answered, or its connection is closed.
//! *Invariant:* a node holds no memory of the ring while it sends nothing.

use super::connection::Connection;
use super::flight::{Flight, Plan, State, plan};
use super::link::{Connected, ConnectionChannel, Connector, Loss};
use super::shared::{ServerTimeouts, Shared, style_number};
use crate::segments::one_extent;
use block::{Cookie, Extent, Request, Status, Tag};
use queue::{Cx, Nanos, Node, NodeEvent, NodeId, QueueWaker, SocketEvent, Sockets, Verdict};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Minimum time to wait for the first connection of a queue, in nanoseconds, even if later ones are given
/// less. It does not apply if nothing listens at the address.
const FIRST_NS: u64 = 10_000_000_000;
/// Number of checks within a timeout.
const CHECKS: u64 = 8;
const CHECK_NS_MIN: u64 = 1_000_000;
const CHECK_NS_MAX: u64 = 250_000_000;
/// Multiple of the timeout after which a server that answers other requests, but not this one, is given up.
const FORGOTTEN: u64 = 4;
/// Lifetime in nanoseconds below which a connection counts as a failed attempt, whatever it transferred.
const OF_USE_NS: u64 = 1_000_000_000;
/// Maximum time for sending NBD_CMD_DISC, in nanoseconds.
const GOODBYE_NS: u64 = 1_000_000_000;

/// State of the connection.
pub(super) enum Link {
    /// Not connected.
    Down,
    /// Connected.
    Up(Box<Connection>),
    /// The ring is closing a connection that was lost or is no longer needed.
    Closing(Box<Connection>),
}

/// The node of an NBD export in one hardware queue.
pub struct NbdNode<S> {
    pub(super) shared: Arc<Shared>,
    channel: Arc<ConnectionChannel<S>>,
    connector: Arc<dyn Connector<S>>,
    waker: QueueWaker,
    /// Held requests by tag; `None` if the node does not hold the request.
    pub(super) flights: Box<[Option<Flight>]>,
    in_flight: usize,
    /// Tags of requests to send, in order.
    pub(super) waiting: VecDeque<Tag>,
    pub(super) link: Link,
    /// Start of the time without a connection; `None` while there is one, and before the first turn.
    down_since: Option<Nanos>,
    /// Whether there was a connection since the node was created or reopened.
    was_up: bool,
    /// Whether the connector was asked for a connection.
    asked: bool,
    /// Whether the last session supports block status; `true` before the first session.
    allocation: bool,
    has_alarm: bool,
    /// Whether the alarm was cancelled, but may still arrive.
    alarm_cancelled: bool,
    serial: u64,
    /// Whether the node was closed, and has received no request since.
    closing: bool,
    /// Whether this node has claimed the only connection that the server accepts.
    claimed: bool,
}

impl<S> NbdNode<S> {
    /// Creates a node that has already claimed its connection to the server. `first` is an existing
    /// connection.
    pub(super) fn new(
        shared: Arc<Shared>,
        connector: Arc<dyn Connector<S>>,
        waker: QueueWaker,
        first: Option<Connected<S>>,
    ) -> NbdNode<S> {
        let channel = Arc::new(ConnectionChannel::new(waker.clone()));
        let delivered = first.is_some_and(|first| channel.deliver(first).is_ok());
        NbdNode {
            shared,
            channel,
            connector,
            waker,
            flights: Box::default(),
            in_flight: 0,
            waiting: VecDeque::new(),
            link: Link::Down,
            down_since: None,
            was_up: false,
            asked: delivered,
            allocation: true,
            has_alarm: false,
            alarm_cancelled: false,
            serial: 0,
            closing: false,
            claimed: true,
        }
    }

    /// Reopens the node for a request that arrives after [`close`](Node::close): like a new node, it waits
    /// for a first connection. Returns `false` if another node has taken the server's only connection.
    fn reopen(&mut self) -> bool {
        if !self.claimed && !self.shared.claim() {
            return false;
        }
        self.channel = Arc::new(ConnectionChannel::new(self.waker.clone()));
        (self.claimed, self.closing, self.asked) = (true, false, false);
        (self.down_since, self.was_up) = (None, false);
        true
    }

    /// Returns how long requests wait for a connection, in nanoseconds.
    fn reconnect_ns(&self) -> u64 {
        let reconnect = self.shared.timeouts.reconnect.as_nanos() as u64;
        if self.was_up || self.channel.is_refused() { reconnect } else { reconnect.max(FIRST_NS) }
    }

    /// Returns for how many nanoseconds a request is sent again: a server that accepts connections but
    /// never answers must also be given up.
    fn tries_ns(&self) -> u64 {
        let ServerTimeouts { timeout, reconnect } = self.shared.timeouts;
        timeout.map_or(u64::MAX, |timeout| timeout.saturating_add(reconnect).as_nanos() as u64)
    }

    /// Returns the time until the next check of the timeouts for answers and for connecting, in
    /// nanoseconds.
    fn check_ns(&self) -> u64 {
        let timeout = || self.shared.timeouts.timeout.map(|time| time.as_nanos() as u64);
        let too_long = if let Link::Down = self.link { Some(self.reconnect_ns()) } else { timeout() };
        let check_ns = too_long.map_or(CHECK_NS_MAX, |time_ns| time_ns / CHECKS);
        check_ns.clamp(CHECK_NS_MIN, CHECK_NS_MAX)
    }

    /// Returns whether there has been no connection for longer than requests wait for one.
    fn has_given_up(&self, now: Nanos) -> bool {
        self.down_since.is_some_and(|since| now.since(since) >= self.reconnect_ns())
    }

    /// Returns whether an answer of the server is overdue.
    fn is_silent(&self, connection: &Connection, now: Nanos) -> bool {
        let Some(timeout) = self.shared.timeouts.timeout else { return false };
        let timeout_ns = timeout.as_nanos() as u64;
        let sent = self.flights.iter().flatten().filter(|flight| flight.state != State::Waiting);
        let Some(oldest) = sent.map(|flight| flight.sent_at).min() else { return false };
        let forgotten = now.since(oldest) >= timeout_ns.saturating_mul(FORGOTTEN);
        forgotten || now.since(oldest.max(connection.heard_at)) >= timeout_ns
    }

    /// Returns whether the connection is being closed: NBD_CMD_DISC was sent or is about to be. No other
    /// command may be sent on it, even if one has arrived since.
    fn has_ended_session(&self) -> bool {
        self.closing || matches!(&self.link, Link::Up(connection) if connection.said_goodbye)
    }

    pub(super) fn connection(&mut self) -> Option<&mut Connection> {
        match &mut self.link {
            Link::Up(connection) => Some(connection),
            Link::Down | Link::Closing(_) => None,
        }
    }
}

impl<S: Send + 'static> NbdNode<S> {
    /// Completes a request.
    pub(super) fn finish<R: Sockets<Stream = S>>(&mut self, tag: Tag, status: Status, cx: &mut Cx<'_, R>) {
        let Some(flight) = self.flights[tag.index()].take() else { return };
        self.in_flight -= 1;
        cx.resume(flight.io, -i64::from(status.errno()));
    }

    /// Processes the answer to a command.
    pub(super) fn command_ended<R: Sockets<Stream = S>>(
        &mut self,
        tag: Tag,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) {
        let Some(flight) = self.flights[tag.index()].as_mut() else { return };
        if flight.state == State::Sending {
            flight.answered = Some(status);
            return;
        }
        match flight.ended(status, &self.shared.export) {
            Some(status) => self.finish(tag, status, cx),
            None => {
                flight.state = State::Waiting;
                self.waiting.push_back(tag);
            }
        }
    }

    /// Processes the end of a send.
    fn sent<R: Sockets<Stream = S>>(&mut self, result: i64, cx: &mut Cx<'_, R>) {
        let (Link::Up(connection) | Link::Closing(connection)) = &mut self.link else { return };
        connection.batch.headers.take().into_iter().for_each(|headers| cx.ring.free(headers));
        if matches!(self.link, Link::Closing(_)) {
            return;
        }
        if result < 0 {
            return self.lose(Loss::Failed((-result) as i32), cx);
        }
        if self.has_ended_session() {
            return self.let_go(cx);
        }
        let Link::Up(connection) = &mut self.link else { return };
        let mut tags = std::mem::take(&mut connection.batch.tags);
        for tag in tags.drain(..) {
            let Some(flight) = self.flights[tag.index()].as_mut() else { continue };
            flight.state = State::Sent;
            if let Some(status) = flight.answered.take() {
                self.command_ended(tag, status, cx);
            }
        }
        if let Link::Up(connection) = &mut self.link {
            connection.batch.tags = tags;
        }
    }

    /// Closes a connection that failed, and requests another one.
    pub(super) fn lose<R: Sockets<Stream = S>>(&mut self, loss: Loss, cx: &mut Cx<'_, R>) {
        if !matches!(self.link, Link::Up(_)) {
            return;
        }
        if self.has_ended_session() {
            // A server may close the connection before we do.
            return self.let_go(cx);
        }
        self.shared.counts.lost.fetch_add(1, Relaxed);
        if self.was_of_use(cx.now()) {
            self.channel.forget_failures();
        } else {
            self.channel.count_failure();
        }
        self.let_go(cx);
        (self.down_since, self.asked) = (Some(cx.now()), true);
        self.connector.connect(self.channel.clone(), loss);
    }

    /// Returns whether the connection lasted for a while and answered its commands, so that the next
    /// attempt after its loss need not be delayed.
    fn was_of_use(&self, now: Nanos) -> bool {
        let Link::Up(connection) = &self.link else { return false };
        let was_asked = || self.flights.iter().flatten().any(|flight| flight.state != State::Waiting);
        now.since(connection.since) >= OF_USE_NS && (connection.heard || !was_asked())
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
        let link = std::mem::replace(&mut self.link, Link::Down);
        let heard = matches!(link, Link::Closing(connection) if connection.heard);
        // The alarm was set for an answer; the wait for a connection may end sooner.
        self.cancel_alarm(cx);
        let (mut replayed, now, tries_ns) = (0, cx.now(), self.tries_ns());
        for index in 0..self.flights.len() {
            let Some(flight) = self.flights[index].as_mut() else { continue };
            let tag = Tag(index as u16);
            if flight.cancelled {
                self.finish(tag, Status::Timeout, cx);
                continue;
            }
            let answered = flight.answered.take();
            let is_lost = answered.is_none() && flight.state != State::Waiting;
            if is_lost && flight.is_lost(now, tries_ns, heard) {
                self.finish(tag, Status::Transport, cx);
                continue;
            }
            if flight.state != State::Waiting {
                flight.state = if answered.is_some() { State::Sent } else { State::Waiting };
                replayed += u64::from(answered.is_none());
            }
            if let Some(status) = answered {
                self.command_ended(tag, status, cx);
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
                self.finish(tag, Status::Transport, cx);
            }
        }
    }

    /// Starts to use a connection.
    fn adopt<R: Sockets<Stream = S>>(&mut self, connected: Connected<S>, cx: &mut Cx<'_, R>) {
        let Connected { stream, session } = connected;
        let Ok(socket) = cx.ring.add_socket(stream, cx.socket_owner()) else {
            self.channel.count_failure();
            return self.connector.connect(self.channel.clone(), Loss::New);
        };
        self.allocation = session.base_allocation.is_some();
        self.shared.counts.structured.store(style_number(session.style), Relaxed);
        self.shared.counts.connected.fetch_add(1, Relaxed);
        self.link = Link::Up(Box::new(Connection::new(socket, session, cx.now())));
        (self.down_since, self.was_up, self.asked) = (None, true, false);
        cx.ring.receive(socket);
    }

    fn look_for_connection<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        if self.closing || !matches!(self.link, Link::Down) {
            return;
        }
        if let Some(connected) = self.channel.take() {
            return self.adopt(connected, cx);
        }
        self.down_since.get_or_insert(cx.now());
        if !std::mem::replace(&mut self.asked, true) {
            self.connector.connect(self.channel.clone(), Loss::New);
        }
        if !self.was_up && self.channel.is_refused() {
            self.give_up_if_due(cx);
        }
    }

    fn alarm<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        (self.has_alarm, self.alarm_cancelled) = (false, false);
        if self.has_ended_session() {
            return self.let_go(cx);
        }
        match &self.link {
            Link::Up(connection) if self.is_silent(connection, cx.now()) => self.lose(Loss::Silent, cx),
            Link::Down => self.give_up_if_due(cx),
            _ => {}
        }
    }

    pub(super) fn set_alarm<R: Sockets<Stream = S>>(&mut self, after_ns: u64, cx: &mut Cx<'_, R>) {
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

impl<S: Send + 'static, R: Sockets<Stream = S>> Node<R> for NbdNode<S> {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.flights = vec![None; tags].into();
        self.waiting = VecDeque::with_capacity(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        match plan(req, &self.shared.export, self.allocation) {
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
            NodeEvent::Socket(_, SocketEvent::ReceiveEnded(end)) => self.receive_ended(end, cx),
            NodeEvent::Socket(_, SocketEvent::Filled(result)) => self.filled(result, cx),
            NodeEvent::Socket(_, SocketEvent::Sent(result)) => self.sent(result, cx),
            NodeEvent::Socket(_, SocketEvent::Closed) => self.closed(cx),
        }
    }

    fn close(&mut self, cx: &mut Cx<'_, R>) -> bool {
        self.closing = true;
        drop(self.channel.close());
        if let Link::Up(connection) = &mut self.link {
            if !connection.said_goodbye && !connection.batch.is_under_way() {
                connection.said_goodbye = true;
                if self.say_goodbye(cx) {
                    self.set_alarm(GOODBYE_NS, cx);
                } else {
                    self.let_go(cx);
                }
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

impl<S> Drop for NbdNode<S> {
    fn drop(&mut self) {
        drop(self.channel.close());
        if self.claimed {
            self.shared.leave();
        }
    }
}
