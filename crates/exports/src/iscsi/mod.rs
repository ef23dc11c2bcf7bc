//! The iSCSI target: sessions in their full feature phase, on one reactor thread (RFC 7143).
//!
//! Logins happen elsewhere; a session arrives here with its negotiated parameters and LUNs
//! ([`SessionSetup`]), and connections are added to it ([`ConnectionSetup`]). PDUs are parsed in the memory
//! to which the ring received them: the data of a small write goes to the device from there, longer data is
//! received into the memory of its task. `scsi::begin` decides what a command does; this module executes
//! it.
//!
//! *Bounds.* A session has at most `queue_depth` commands and [`IMMEDIATE_MAX`] immediate ones: MaxCmdSN
//! does not advance before a command has ended, nor while commands of the session wait for memory or tags.
//! R2Ts request data only when its memory is charged, so unsolicited data is at most FirstBurstLength per
//! command. More data than that, or a length that no device takes, gets no memory. Received chunks are held
//! only by complete writes in the stack. A connection with [`UNSENT_MAX`] unsent PDUs is not read. All
//! iSCSI connections of a reactor share one memory budget (`crate::budget`); one that stalls within a PDU,
//! or makes no progress while others wait for its memory, is closed.
//!
//! *Invariant:* a session ends (its `when_gone` is called) after its last task has left the stack.
//!
//! Not here: listeners, logins, access control, and the meaning of commands.

mod commands;
mod connection;
mod detached;
mod exchange;
mod intake;
mod life;
mod management;
mod memory;
mod pdus;
mod program;
mod reply;
mod session;
mod setup;
mod stack;
mod store;
mod task;
#[cfg(test)]
mod tests;
mod text;
mod tick;
mod trace;

use crate::budget::Budget;
pub use crate::budget::{Alarm, Limits};
use crate::chunk_uses::ChunkUses;
use crate::facts::DeviceFacts;
use crate::{FrontNumber, Turn};
use connection::Connection;
use detached::Detached;
use exchange::Inbox;
pub use exchange::{Exchange, Wake};
use management::Management;
use queue::{Done, Owner, QueueId};
use ring::Event;
use session::Session;
pub use setup::{
    ConnectionId, ConnectionSetup, EndReason, LunSetup, Pings, SendTargets, SessionCounters, SessionId,
    SessionSetup, WhenGone,
};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use task::{TaskId, Tasks};
pub use tick::Dropped;

#[cfg(doc)]
use {connection::UNSENT_MAX, session::IMMEDIATE_MAX};

/// The number of this front-end.
const FRONT: u8 = FrontNumber::Iscsi as u8;

struct ServedQueue {
    facts: DeviceFacts,
    /// Number of LUNs that refer to the device, for the control plane.
    clients: Arc<AtomicU32>,
    /// Tasks that wait for a tag, in order of arrival.
    starved: VecDeque<TaskId>,
    /// Whether the device is being removed: no more LUNs are added.
    closing: bool,
}

/// The iSCSI sessions of one reactor.
#[derive(Default)]
pub struct Front {
    sessions: Vec<Option<Box<Session>>>,
    connections: Vec<Option<Box<Connection>>>,
    tasks: Tasks,
    queues: Vec<Option<ServedQueue>>,
    chunk_uses: ChunkUses,
    /// Connections with something to send or to continue in this turn.
    dirty: Vec<u32>,
    /// The empty vector that is swapped with `dirty`.
    spare_list: Vec<u32>,
    /// Number of tasks that wait for a tag.
    starved: usize,
    budget: Budget,
    /// Task management functions whose affected tasks have not all ended.
    management: Vec<Management>,
    /// Token of the next function.
    next_token: u64,
    /// Counts R2Ts, for their tags.
    r2ts: u32,
    inbox: Option<Arc<Inbox>>,
    /// Storer of this reactor's reservations.
    storer: Option<store::Storer>,
    /// Tasks that wait for exclusive access to a range of their device.
    claims: Vec<TaskId>,
    /// Programs that continue without their command.
    detached: Vec<Option<Box<Detached>>>,
    /// Number of sessions.
    live: usize,
    /// Sessions to check, because they may have ended.
    ending: Vec<u32>,
    /// LUNs of sessions whose waiting tasks may begin.
    kicks: Vec<(u32, u16)>,
}

impl Front {
    /// Starts serving LUNs of the device of this queue. `clients` counts them. If programs need exclusive
    /// access to ranges, all queues of the device must be guarded by its range lock
    /// ([`Queue::guard`](queue::Queue::guard)) before the first command.
    pub fn add_queue(&mut self, queue: QueueId, facts: DeviceFacts, clients: Arc<AtomicU32>) {
        let index = usize::from(queue.0);
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        self.queues[index] = Some(ServedQueue { facts, clients, starved: VecDeque::new(), closing: false });
    }

    /// Returns whether LUNs of the device of this queue are served.
    pub fn has_queue(&self, queue: QueueId) -> bool {
        self.queues.get(usize::from(queue.0)).is_some_and(Option::is_some)
    }

    /// Returns the LUN counter of the device of this queue, which identifies the device, or `None` if no
    /// queue is served.
    pub fn queue_clients(&self, queue: QueueId) -> Option<&Arc<AtomicU32>> {
        let served = self.queues.get(usize::from(queue.0))?.as_ref()?;
        (!served.closing).then_some(&served.clients)
    }

    /// Updates the facts about the device of this queue. The size is known to its logical unit.
    pub fn update_queue(&mut self, queue: QueueId, facts: DeviceFacts) {
        if let Some(Some(served)) = self.queues.get_mut(usize::from(queue.0)) {
            served.facts = facts;
        }
    }

    /// Sets the limits of connections. `alarm` schedules [`tick`](Front::tick); without it no connection is
    /// closed and no ping is sent. `wake` schedules [`woken`](Front::woken), from any thread; without it
    /// task management reaches only the sessions of this reactor.
    pub fn limit(&mut self, limits: Limits, alarm: Option<Alarm>, wake: Option<Wake>) {
        self.budget.set(limits, alarm);
        self.inbox = wake.map(Inbox::new);
    }

    /// Starts a session. It has no connection yet, and ends with its last one; a session without any
    /// connection is ended by [`end_session`](Front::end_session).
    pub fn open_session(&mut self, setup: SessionSetup) -> SessionId {
        let index = self.sessions.iter().position(Option::is_none).unwrap_or_else(|| {
            self.sessions.push(None);
            self.sessions.len() - 1
        });
        if let Some(inbox) = &self.inbox {
            setup.exchange.join(inbox);
        }
        if setup.pings.is_some() {
            self.budget.check_within(tick::PING_CHECK);
        }
        let mut setup = setup;
        let luns = std::mem::take(&mut setup.luns);
        self.sessions[index] = Some(Box::new(Session::new(setup)));
        self.live += 1;
        let id = SessionId(index as u32);
        self.change_luns(id, luns);
        id
    }

    /// Adds a connection to a session after its login. `leftover`: bytes that were already received after
    /// the login.
    ///
    /// # Errors
    /// The session is ending or gone, or the socket cannot be added to the ring.
    pub fn adopt(
        &mut self,
        session: SessionId,
        fd: OwnedFd,
        setup: ConnectionSetup,
        leftover: &[u8],
        turn: &mut Turn<'_>,
    ) -> std::io::Result<ConnectionId> {
        if !self.session(session.0).is_some_and(Session::is_alive) {
            return Err(std::io::ErrorKind::NotConnected.into());
        }
        let index = self.connections.iter().position(Option::is_none).unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let socket = turn.ring.add_socket(fd, Owner::new(FRONT, index as u32).0)?;
        let mut connection = Box::new(Connection::new(socket, session.0, setup));
        if !leftover.is_empty() {
            let memory = memory::keep(leftover, turn.ring).ok_or(std::io::ErrorKind::OutOfMemory)?;
            connection.held = memory.len.into();
            self.budget.add(connection.held);
            connection.backlog.push_back(memory);
            connection.paused = true;
        }
        self.connections[index] = Some(connection);
        if let Some(session) = self.session_mut(session.0) {
            session.connections.push(index as u32);
        }
        self.mark(index as u32);
        Ok(ConnectionId(index as u32))
    }

    /// Replaces the LUNs of a session. Commands of removed LUNs are finished first; later ones end with
    /// LOGICAL UNIT NOT SUPPORTED.
    pub fn change_luns(&mut self, session: SessionId, luns: Vec<LunSetup>) {
        let mut luns = luns;
        self.keep_served(&mut luns);
        let Some(session) = self.session_mut(session.0) else { return };
        let (lost, got) = session.change_luns(luns);
        lost.into_iter().for_each(|queue| self.count_client(queue, -1));
        got.into_iter().for_each(|queue| self.count_client(queue, 1));
    }

    /// Drops the LUNs whose device is not served here.
    fn keep_served(&self, luns: &mut Vec<LunSetup>) {
        luns.retain(|lun| {
            let served = self.queues.get(usize::from(lun.queue.0)).and_then(Option::as_ref);
            served.is_some_and(|served| !served.closing)
        });
    }

    fn count_client(&mut self, queue: QueueId, by: i32) {
        if let Some(Some(served)) = self.queues.get(usize::from(queue.0)) {
            served.clients.store(served.clients.load(Relaxed).wrapping_add_signed(by), Relaxed);
        }
    }

    #[inline]
    fn session(&self, index: u32) -> Option<&Session> {
        self.sessions.get(index as usize)?.as_deref()
    }

    #[inline]
    fn session_mut(&mut self, index: u32) -> Option<&mut Session> {
        self.sessions.get_mut(index as usize)?.as_deref_mut()
    }

    #[inline]
    fn connection(&self, index: u32) -> Option<&Connection> {
        self.connections.get(index as usize)?.as_deref()
    }

    #[inline]
    fn connection_mut(&mut self, index: u32) -> Option<&mut Connection> {
        self.connections.get_mut(index as usize)?.as_deref_mut()
    }

    #[inline]
    fn mark(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        if !std::mem::replace(&mut connection.dirty, true) {
            self.dirty.push(index);
        }
    }
}

impl crate::Front for Front {
    fn event(&mut self, event: Event, turn: &mut Turn<'_>) {
        let number = |owner: u32| Owner(owner).index();
        match event {
            Event::Received { owner, segment, chunk, .. } => {
                self.received(number(owner), segment, chunk, turn);
            }
            Event::ReceiveEnded { owner, end, .. } => self.receive_ended(number(owner), end, turn),
            Event::Filled { owner, result, .. } => self.filled(number(owner), result, turn),
            Event::Sent { owner, result, .. } => self.sent(number(owner), result, turn),
            Event::Closed { owner, .. } => self.closed(number(owner), turn),
            Event::Io { .. } | Event::Ended { .. } | Event::Woken => {
                debug_assert!(false, "not a socket's event: {event:?}")
            }
        }
    }

    fn done(&mut self, queue: QueueId, done: Done, turn: &mut Turn<'_>) {
        self.request_done(queue, done, turn);
    }

    fn commit(&mut self, turn: &mut Turn<'_>) {
        if self.starved > 0 {
            self.feed_starved(turn);
        }
        if !self.claims.is_empty() {
            self.retry_claims(turn);
        }
        if !self.detached.is_empty() {
            self.retry_detached(turn);
        }
        if let Some(task) = self.budget.next_in_line() {
            self.resume(task, turn);
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
                if !connection.room.is_empty() {
                    self.feed_room(index, turn);
                }
                self.take_up(index, turn);
            }
        }
        self.spare_list = list;
        if !self.kicks.is_empty() {
            self.begin_waiting(turn);
        }
        if !self.ending.is_empty() {
            self.bury_sessions();
        }
    }

    fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || self.budget.has_next() || !self.ending.is_empty() || !self.kicks.is_empty()
    }

    /// Stops accepting commands for LUNs of the device. With `now`, commands in progress end without a
    /// response.
    fn close_queue(&mut self, queue: QueueId, now: bool, turn: &mut Turn<'_>) {
        let Some(Some(served)) = self.queues.get_mut(usize::from(queue.0)) else { return };
        served.closing = true;
        if now {
            self.abort_queue(queue, turn);
        }
        self.drop_detached(queue, turn);
        let mut dropped = 0;
        for session in self.sessions.iter_mut().flatten() {
            dropped += session.remove_queue(queue);
        }
        (0..dropped).for_each(|_| self.count_client(queue, -1));
    }

    fn is_open(&self, queue: QueueId) -> bool {
        let served = self.queues.get(usize::from(queue.0)).and_then(Option::as_ref);
        served.is_some_and(|served| served.clients.load(Relaxed) > 0)
    }

    fn remove_queue(&mut self, queue: QueueId, _: &mut Turn<'_>) {
        if let Some(served) = self.queues.get_mut(usize::from(queue.0)) {
            *served = None;
        }
    }
}
