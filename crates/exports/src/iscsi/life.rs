//! The end of connections, tasks and sessions.
//!
//! At ErrorRecoveryLevel 0 a session is lost with any of its connections, except one that logged out (RFC
//! 7143, section 7.1.4.4). Its tasks end without a response; the session is removed when the last of them
//! has left the stack.

use super::connection::{Connection, Input, Receiving, Sink};
use super::session::{HeldPdu, Life, Session};
use super::setup::{EndReason, SessionId};
use super::task::{Fate, Memory, Phase, TaskId, Work};
use super::{Front, Turn};
use crate::budget::charge_of;
use proto::iscsi::pdu::{AsyncEvent, AsyncMessage, Bhs};
use queue::QueueId;
use ring::{KernelRing, ReceiveEnd};
use scsi::Outcome;
use std::time::Duration;

/// Time that an initiator has for a requested logout.
pub(super) const LOGOUT_TIME: Duration = Duration::from_secs(3);

impl Front {
    /// Ends a session. For [`EndReason::Removed`] the initiator is first asked to log out, and has 3 s to
    /// do so; for all other reasons the connections are closed at once.
    pub fn end_session(&mut self, session: SessionId, why: EndReason, turn: &mut Turn<'_>) {
        let can_wait = why == EndReason::Removed && self.budget.has_alarm();
        let connections = match self.session_mut(session.0) {
            Some(alive) if alive.life == Life::Alive && can_wait && !alive.connections.is_empty() => {
                alive.life = Life::LogoutRequested(why, LOGOUT_TIME);
                alive.connections.clone()
            }
            Some(alive) if alive.is_alive() && !(can_wait && alive.life != Life::Alive) => {
                return self.finish_session(session.0, why, None, turn);
            }
            _ => return,
        };
        // The initiator may log out of the session on any of its connections (section 11.9.1).
        if let Some(first) = connections.first() {
            let event = AsyncEvent::RequestLogout { within: LOGOUT_TIME.as_secs() as u16 };
            let encode = |numbers, out: &mut Bhs| AsyncMessage { event, lun: 0, numbers }.encode(out, 0);
            self.send(*first, true, encode, &[], turn);
        }
        self.budget.check_within(super::tick::PING_CHECK);
    }

    /// Returns whether a session's connections are being closed, or it has ended.
    pub fn is_ending(&self, session: SessionId) -> bool {
        self.session(session.0).is_none_or(|session| !session.is_alive())
    }

    /// Ends the connection with this CID, because its initiator logged in again in its place (connection
    /// reinstatement, section 6.3.4). Its tasks end without a response; the session stays if it has another
    /// connection. Returns whether the connection existed.
    pub fn end_connection(&mut self, session: SessionId, cid: u16, turn: &mut Turn<'_>) -> bool {
        let connections = self.session(session.0).map(|session| session.connections.clone());
        let mut connections = connections.unwrap_or_default().into_iter();
        let found = connections.find(|index| {
            self.connection(*index).is_some_and(|connection| connection.cid == cid && !connection.closed)
        });
        if let Some(index) = found {
            self.end_tasks_of(session.0, index, turn);
            self.cut(index, turn);
        }
        found.is_some()
    }

    /// Ends the session of a connection that failed, or whose initiator violated the protocol.
    pub(super) fn lose(&mut self, index: u32, why: EndReason, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection(index) else { return };
        if connection.ending {
            // The connection has already logged out, or was cut.
            return self.cut(index, turn);
        }
        self.finish_session(connection.session, why, None, turn);
    }

    /// Ends the tasks of a session without a response and closes its connections, except one that still sends
    /// its logout response.
    pub(super) fn finish_session(
        &mut self,
        index: u32,
        why: EndReason,
        except: Option<u32>,
        turn: &mut Turn<'_>,
    ) {
        let Some(session) = self.session_mut(index).filter(|session| session.is_alive()) else { return };
        session.life = Life::Ending(why);
        self.abort_where(|task| task.session == index, Fate::Silent, turn);
        self.drop_held(index, |_| true, turn);
        let connections = self.session(index).map(|s| s.connections.clone()).unwrap_or_default();
        for connection in connections {
            if Some(connection) == except {
                self.end_after_sending(connection, turn);
            } else {
                self.cut(connection, turn);
            }
        }
        self.ending.push(index);
    }

    /// Drops held PDUs, except commands, of the connections that `of` selects.
    pub(super) fn drop_held(&mut self, session: u32, of: impl Fn(u32) -> bool, turn: &mut Turn<'_>) {
        let Some(session) = self.session_mut(session) else { return };
        let mut dropped = Vec::new();
        session.held.retain(|(_, held)| match *held {
            HeldPdu::Pdu(connection, _, data) if of(connection) => {
                dropped.extend(data.map(|data| (connection, data)));
                false
            }
            _ => true,
        });
        dropped.into_iter().for_each(|(connection, data)| self.release(connection, data, turn.ring));
    }

    /// Aborts the tasks that `of` selects.
    pub(super) fn abort_where(
        &mut self,
        of: impl Fn(&super::task::Task) -> bool,
        fate: Fate,
        turn: &mut Turn<'_>,
    ) {
        let tasks: Vec<TaskId> = self.tasks.iter().filter(|(_, task)| of(task)).map(|(id, _)| id).collect();
        tasks.into_iter().for_each(|id| self.abort(id, fate, turn));
    }

    /// Aborts all tasks of a queue without a response.
    pub(super) fn abort_queue(&mut self, queue: QueueId, turn: &mut Turn<'_>) {
        let sessions = &self.sessions;
        let of = |id: &(TaskId, &super::task::Task)| {
            let session = sessions.get(id.1.session as usize).and_then(Option::as_ref);
            session.and_then(|session| session.lun(id.1.lun)).is_some_and(|lun| lun.queue == queue)
        };
        let tasks: Vec<TaskId> = self.tasks.iter().filter(of).map(|(id, _)| id).collect();
        tasks.into_iter().for_each(|id| self.abort(id, Fate::Silent, turn));
    }

    /// Ends a task with this fate, as soon as its block requests have left the stack.
    pub(super) fn abort(&mut self, id: TaskId, fate: Fate, turn: &mut Turn<'_>) {
        let Some(task) = self.tasks.find(id) else { return };
        let (phase, session, lun) = (task.phase, task.session, task.lun);
        let task = self.tasks.of_mut(id);
        if task.fate == Fate::Silent {
            return;
        }
        task.fate = fate;
        match phase {
            Phase::Numbered => {
                if let Some(session) = self.session_mut(session) {
                    session.held.retain(|(_, held)| !matches!(held, HeldPdu::Task(held) if *held == id));
                }
            }
            Phase::Ordered => {
                if let Some(unit) = self.session_mut(session).and_then(|session| session.lun_mut(lun)) {
                    unit.forget(id);
                    // Later tasks may have waited only for this one.
                    self.kicks.push((session, lun));
                }
            }
            Phase::Room => {
                let index = self.tasks.of(id).connection;
                if let Some(connection) = self.connection_mut(index) {
                    connection.room.retain(|&waiting| waiting != id);
                }
            }
            Phase::Memory => {
                self.budget.leave(id);
                self.stops_waiting(id);
            }
            Phase::Tag => {
                self.leave_starved(id);
                let task = self.tasks.of_mut(id);
                if task.in_stack > 0 {
                    task.phase = Phase::Stack;
                    return;
                }
            }
            Phase::Claim => self.withdraw_claim(id, turn),
            Phase::Stack => return,
            Phase::Vacant | Phase::Begun | Phase::Data | Phase::Ending | Phase::Detached => {}
        }
        self.detach_sink(id, turn);
        self.tasks.of_mut(id).work = Work::None;
        self.end_task(id, &Outcome::good(0), turn);
    }

    /// Skips the rest of the data segment that is arriving for a task. Memory that the kernel is writing to
    /// stays with the connection until that ends.
    fn detach_sink(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of_mut(id);
        if !std::mem::take(&mut task.filling) {
            return;
        }
        let index = task.connection;
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let _ = turn;
        let filled_by_kernel = matches!(connection.receiving, Receiving::Data(_));
        let Input::Data(data) = &mut connection.input else { return };
        data.pdu = None;
        data.sink = match (task.memory, filled_by_kernel) {
            (Memory::Own(memory), true) => {
                task.memory = Memory::None;
                // The memory stays charged to the connection.
                task.charged -= charge_of(memory);
                Sink::Own(memory)
            }
            _ => Sink::Discard,
        };
    }

    /// Accepts no more PDUs on a connection, and closes it once its replies are sent.
    pub(super) fn end_after_sending(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if std::mem::replace(&mut connection.ending, true) {
            return;
        }
        connection.paused = false;
        let mut freed = drop_backlog(connection, turn.ring);
        match connection.receiving {
            // The kernel is writing to that memory: `filled` or `closed` frees it.
            Receiving::Data(_) | Receiving::Header => {}
            receiving => {
                freed += drop_input(connection, turn.ring);
                if receiving == Receiving::Chunks {
                    connection.receiving = Receiving::Stopping;
                    turn.ring.receive_stop(connection.socket);
                }
            }
        }
        self.discharge(index, freed);
        self.mark(index);
    }

    /// Closes a connection without sending its pending replies.
    pub(super) fn cut(&mut self, index: u32, turn: &mut Turn<'_>) {
        self.end_after_sending(index, turn);
        if let Some(connection) = self.connection_mut(index)
            && !std::mem::replace(&mut connection.closed, true)
        {
            turn.ring.close(connection.socket);
        }
    }

    pub(super) fn close_if_idle(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        // Closing ends a receive into memory; the initiator sends nothing more.
        if connection.ending
            && connection.outbox.is_empty()
            && !std::mem::replace(&mut connection.closed, true)
        {
            turn.ring.close(connection.socket);
        }
    }

    pub(super) fn receive_ended(&mut self, index: u32, end: ReceiveEnd, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        connection.receiving = Receiving::No;
        match end {
            ReceiveEnd::Stopped => self.mark(index),
            ReceiveEnd::Eof | ReceiveEnd::Error(_) => self.lose(index, EndReason::ConnectionLost, turn),
        }
    }

    pub(super) fn sent(&mut self, index: u32, result: i64, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        connection.moved = true;
        let (paid, freed) = connection.outbox.sent(turn.ring);
        connection.unsent.pay(paid);
        let wants_more = connection.paused
            || connection.ending
            || !connection.room.is_empty()
            || !connection.outbox.is_empty();
        self.discharge(index, freed);
        if result < 0 {
            self.lose(index, EndReason::ConnectionLost, turn);
        } else if wants_more {
            self.mark(index);
        }
    }

    /// Handles the end of a socket that the ring has closed. Tasks may still be in the stack: the
    /// connection is removed with the last of them.
    pub(super) fn closed(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        (connection.closed, connection.gone, connection.ending) = (true, true, true);
        connection.receiving = Receiving::No;
        let (unsent, sent) = connection.outbox.discard(turn.ring);
        connection.unsent.pay(unsent);
        let freed = sent + drop_backlog(connection, turn.ring) + drop_input(connection, turn.ring);
        connection.header.take().into_iter().for_each(|segment| queue::Ring::free(turn.ring, segment));
        let is_over = connection.tasks == 0;
        self.discharge(index, freed);
        if is_over {
            self.forget(index);
        }
    }

    pub(super) fn forget(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::take) else {
            return;
        };
        debug_assert_eq!(connection.held, 0, "all memory of a connection that is over was given back");
        self.budget.close(u32::MAX, connection.held);
        self.dirty.retain(|&waiting| waiting != index);
        let session_index = connection.session;
        self.connection_gone(index);
        if let Some(session) = self.session_mut(session_index) {
            session.forget_connection(index);
            if session.connections.is_empty() {
                if let Life::Alive | Life::LogoutRequested(..) = session.life {
                    // Its connections have logged out one by one.
                    session.life = Life::Ending(EndReason::Logout);
                }
                self.ending.push(session_index);
            }
        }
        if let Some(tell) = connection.when_gone {
            tell();
        }
    }

    /// Removes the sessions that have no connections and tasks left.
    pub(super) fn bury_sessions(&mut self) {
        for index in std::mem::take(&mut self.ending) {
            let over = |session: &&mut Option<Box<Session>>| {
                session.as_ref().is_some_and(|session| {
                    !session.is_alive() && session.tasks == 0 && session.connections.is_empty()
                })
            };
            let slot = self.sessions.get_mut(index as usize).filter(over);
            let Some(session) = slot.and_then(Option::take) else { continue };
            session.luns.iter().flatten().for_each(|lun| self.count_client(lun.queue, -1));
            self.live -= 1;
            if let (0, Some(inbox)) = (self.live, &self.inbox) {
                session.exchange.part(inbox);
            }
            self.session_gone(index);
            if let (Life::Ending(why), Some(tell)) = (session.life, session.when_gone) {
                tell(why);
            }
        }
    }
}

/// Frees the backlog, and returns the bytes charged for it.
fn drop_backlog(connection: &mut Connection, ring: &mut KernelRing) -> u64 {
    let mut freed = 0;
    for segment in connection.backlog.drain(..) {
        freed += charge_of(segment);
        queue::Ring::free(ring, segment);
    }
    if let Some(text) = connection.text.take() {
        drop(text);
    }
    freed
}

/// Ignores all further input, and returns the bytes charged for memory that was being filled.
fn drop_input(connection: &mut Connection, ring: &mut KernelRing) -> u64 {
    match std::mem::replace(&mut connection.input, Input::Over) {
        Input::Data(data) => match data.sink {
            Sink::Own(memory) => {
                queue::Ring::free(ring, memory);
                charge_of(memory)
            }
            Sink::Discard | Sink::Task(..) => 0,
        },
        Input::Header | Input::Over => 0,
    }
}
