//! Task management (RFC 7143, sections 11.5 and 11.6; SAM-6, section 7).
//!
//! A function marks the tasks that it affects, on this reactor and, through the
//! [`Exchange`](super::Exchange), on others. Its response follows when the last of them has ended. Affected
//! tasks of the requesting session end without a response. So do those of other sessions, or with TASK
//! ABORTED if TAS is set in the control mode page.
//!
//! A function for immediate delivery applies to commands with smaller CmdSNs: while some of them have not
//! arrived on other connections, it waits for them (section 4.2.2.1). ABORT TASK does not wait: a command
//! that has not arrived counts as received, and is skipped when it arrives.

use super::exchange::{Inbox, Mail, Scope};
use super::setup::{EndReason, SessionId};
use super::task::{Fate, Task};
use super::{Front, Turn};
use proto::iscsi::pdu::{
    Bhs, RejectReason, TaskFunction, TaskManagement, TaskManagementResponse, TaskResult,
};
use proto::iscsi::sequence::{Arrival, before};
use scsi::{LogicalUnit, Lun, Reset};
use std::sync::Arc;

/// Maximum number of a session's functions that wait for tasks or commands; more are rejected.
const FUNCTIONS_MAX: usize = super::session::IMMEDIATE_MAX as usize;

/// Tasks that a function waits for.
#[derive(Clone, Debug)]
enum Affected {
    /// The tasks of a session and a LUN.
    Lun(u32, u16),
    /// One task of a session, by its order of arrival.
    Task(u64),
    /// All tasks of these logical units.
    Units(Vec<Arc<LogicalUnit>>),
}

/// Requester of a function, which waits for the function's end.
enum Origin {
    /// The initiator of this session, on this connection, with this task tag.
    Initiator { session: u32, connection: u32, itt: u32, ends_target: Option<String> },
    /// Another reactor, with its token.
    Reactor(Arc<Inbox>, u64),
}

/// A function whose affected tasks have not all ended, on this reactor or others.
pub(super) struct Management {
    token: u64,
    origin: Origin,
    affected: Affected,
    /// Order of arrival below which tasks are affected.
    before: u64,
    /// Number of reactors that have not answered.
    elsewhere: usize,
}

impl Front {
    /// Handles a task management function.
    pub(super) fn task_management(
        &mut self,
        index: u32,
        pdu: &TaskManagement,
        immediate: bool,
        turn: &mut Turn<'_>,
    ) {
        let Some(session_index) = self.connection(index).map(|connection| connection.session) else { return };
        let is_own = |waiting: &&Management| matches!(waiting.origin, Origin::Initiator { session, .. } if session == session_index);
        let waiting = self.management.iter().filter(is_own).count();
        let Some(session) = self.session_mut(session_index) else { return };
        if waiting + session.early_functions.len() >= FUNCTIONS_MAX {
            if immediate {
                return self.reject_current(index, RejectReason::ImmediateCommandReject, turn);
            }
            return self.answer_management(index, pdu.itt, TaskResult::Rejected, turn);
        }
        let waits = immediate
            && before(session.window.expected(), pdu.cmd_sn)
            && pdu.function != TaskFunction::AbortTask;
        if waits {
            session.early_functions.push((index, *pdu));
            return;
        }
        self.manage(index, session_index, pdu, turn);
    }

    /// Begins the functions whose awaited commands have arrived.
    pub(super) fn release_management(&mut self, session: u32, turn: &mut Turn<'_>) {
        loop {
            let Some(state) = self.session_mut(session) else { return };
            if state.early_functions.is_empty() {
                return;
            }
            let expected = state.window.expected();
            let ready = state.early_functions.iter().position(|(_, pdu)| !before(expected, pdu.cmd_sn));
            let Some(ready) = ready else { return };
            let (connection, pdu) = state.early_functions.remove(ready);
            self.manage(connection, session, &pdu, turn);
        }
    }

    fn manage(&mut self, index: u32, session: u32, pdu: &TaskManagement, turn: &mut Turn<'_>) {
        let Some(state) = self.session(session) else { return };
        let lun = state.find(Lun(pdu.lun.to_be_bytes()));
        let has_lun = lun.is_some();
        let result = match pdu.function {
            TaskFunction::AbortTask => return self.abort_task(index, session, pdu, turn),
            TaskFunction::QueryTask => {
                let known = self.tasks.iter().any(|(_, task)| {
                    task.session == session && task.itt == pdu.referenced_itt && !task.is_aborted()
                });
                if known { TaskResult::Succeeded } else { TaskResult::Complete }
            }
            TaskFunction::TargetWarmReset => {
                let units = self.units_of(session);
                units.iter().for_each(|unit| unit.reset(Reset::Warm));
                return self.abort_units(index, session, pdu.itt, units, None, turn);
            }
            TaskFunction::TargetColdReset => {
                let units = self.units_of(session);
                units.iter().for_each(|unit| unit.reset(Reset::Cold));
                let target = state_target(self.session(session));
                return self.abort_units(index, session, pdu.itt, units, target, turn);
            }
            // At ErrorRecoveryLevel 0, tasks belong to connections.
            TaskFunction::TaskReassign => TaskResult::ReassignNotSupported,
            TaskFunction::ClearAca
            | TaskFunction::AbortTaskSet
            | TaskFunction::ClearTaskSet
            | TaskFunction::LogicalUnitReset
            | TaskFunction::QueryTaskSet
            | TaskFunction::QueryAsynchronousEvent
                if !has_lun =>
            {
                TaskResult::NoLun
            }
            // NormACA is 0 in the INQUIRY data, so auto contingent allegiance never exists.
            TaskFunction::ClearAca => TaskResult::NotSupported,
            TaskFunction::AbortTaskSet => {
                let Some(lun) = lun else { return };
                let limit = self.tasks.next_arrival();
                let of = |task: &Task| task.session == session && task.lun == lun && task.arrival < limit;
                self.abort_where(of, Fate::Silent, turn);
                let affected = Affected::Lun(session, lun);
                return self.await_tasks(self.initiator(index, session, pdu.itt), affected, turn);
            }
            TaskFunction::ClearTaskSet | TaskFunction::LogicalUnitReset => {
                let nexus = lun.and_then(|lun| state.lun(lun)).map(|lun| lun.nexus.clone());
                let Some(nexus) = nexus else { return };
                let unit = nexus.unit().clone();
                if pdu.function == TaskFunction::ClearTaskSet {
                    unit.clear_task_set(&nexus);
                } else {
                    unit.reset(Reset::Unit);
                }
                return self.abort_units(index, session, pdu.itt, vec![unit], None, turn);
            }
            TaskFunction::QueryTaskSet => {
                let mut tasks = self.tasks.iter();
                let any = tasks.any(|(_, task)| task.session == session && Some(task.lun) == lun);
                if any { TaskResult::Succeeded } else { TaskResult::Complete }
            }
            TaskFunction::QueryAsynchronousEvent => {
                let entry = lun.and_then(|lun| state.lun(lun));
                let pending = entry.and_then(|entry| entry.nexus.asynchronous_event());
                let result = if pending.is_some() { TaskResult::Succeeded } else { TaskResult::Complete };
                // Below iSCSIProtocolLevel 2 the field is reserved (RFC 7144, section 4.4).
                let additional = pending.filter(|_| state.protocol_level >= 2).unwrap_or_default();
                return self.answer_with(index, pdu.itt, result, additional, turn);
            }
            TaskFunction::ItNexusReset => {
                self.abort_where(|task| task.session == session, Fate::Silent, turn);
                let units = self.units_of(session);
                let origin = self.initiator(index, session, pdu.itt);
                return self.await_tasks(origin, Affected::Units(units), turn);
            }
            TaskFunction::Other(_) => TaskResult::NotSupported,
        };
        self.answer_management(index, pdu.itt, result, turn);
    }

    fn initiator(&self, connection: u32, session: u32, itt: u32) -> Origin {
        Origin::Initiator { session, connection, itt, ends_target: None }
    }

    fn units_of(&self, session: u32) -> Vec<Arc<LogicalUnit>> {
        let luns = self.session(session).into_iter().flat_map(|session| session.luns.iter().flatten());
        luns.map(|lun| lun.nexus.unit().clone()).collect()
    }

    /// Executes ABORT TASK (section 11.5.1).
    fn abort_task(&mut self, index: u32, session: u32, pdu: &TaskManagement, turn: &mut Turn<'_>) {
        let found = self.tasks.iter().find(|(_, task)| {
            task.session == session && task.itt == pdu.referenced_itt && !task.is_aborted()
        });
        let found = found.map(|(id, task)| (id, task.arrival, task.lun_field));
        match found {
            Some((_, _, lun)) if lun != pdu.lun => {
                self.answer_management(index, pdu.itt, TaskResult::NoTask, turn);
            }
            Some((id, arrival, _)) => {
                self.abort(id, Fate::Silent, turn);
                let origin = self.initiator(index, session, pdu.itt);
                self.await_tasks(origin, Affected::Task(arrival), turn);
            }
            None => {
                let Some(state) = self.session_mut(session) else { return };
                // A command that is still in flight counts as received (section 11.5.4).
                let is_due =
                    before(pdu.ref_cmd_sn, pdu.cmd_sn) && !before(pdu.ref_cmd_sn, state.window.expected());
                let arrival = if is_due { state.window.receive(pdu.ref_cmd_sn) } else { Arrival::Ignored };
                match arrival {
                    Arrival::Ignored => self.answer_management(index, pdu.itt, TaskResult::NoTask, turn),
                    Arrival::Held => self.answer_management(index, pdu.itt, TaskResult::Complete, turn),
                    Arrival::InOrder => {
                        state.open_window();
                        self.answer_management(index, pdu.itt, TaskResult::Complete, turn);
                        self.release_held(session, turn);
                    }
                }
            }
        }
    }

    /// Aborts the tasks of logical units, of all sessions on all reactors. With `target`, all sessions of
    /// that target end afterwards.
    fn abort_units(
        &mut self,
        index: u32,
        session: u32,
        itt: u32,
        units: Vec<Arc<LogicalUnit>>,
        target: Option<String>,
        turn: &mut Turn<'_>,
    ) {
        self.abort_units_here(&units, Some(session), turn);
        let exchange = self.session(session).map(|session| session.exchange.clone());
        let own = self.inbox.clone();
        let others = match (&exchange, &own) {
            (Some(exchange), Some(own)) => exchange.others(own),
            _ => Vec::new(),
        };
        let origin = Origin::Initiator { session, connection: index, itt, ends_target: target };
        let token = self.await_tasks_elsewhere(origin, Affected::Units(units.clone()), others.len());
        for other in others {
            if let Some(from) = own.clone() {
                other.post(Mail::Abort { scope: Scope::Units(units.clone()), from, token });
            }
        }
        self.aborted_task_ended(turn);
    }

    /// Aborts the tasks of logical units in this reactor's sessions. `by` is the requesting session, if it
    /// is one of them.
    fn abort_units_here(&mut self, units: &[Arc<LogicalUnit>], by: Option<u32>, turn: &mut Turn<'_>) {
        let sessions = &self.sessions;
        let unit_of = |task: &Task| {
            let session = sessions.get(task.session as usize)?.as_ref()?;
            let unit = session.lun(task.lun)?.nexus.unit();
            units.iter().find(|other| Arc::ptr_eq(other, unit))
        };
        let mut aborted = Vec::new();
        for (id, task) in self.tasks.iter() {
            let Some(unit) = unit_of(task) else { continue };
            let reports = by != Some(task.session) && unit.reports_aborted_tasks();
            aborted.push((id, if reports { Fate::TaskAborted } else { Fate::Silent }));
        }
        aborted.into_iter().for_each(|(id, fate)| self.abort(id, fate, turn));
    }

    /// Makes `origin` wait until the affected tasks on this reactor have ended.
    fn await_tasks(&mut self, origin: Origin, affected: Affected, turn: &mut Turn<'_>) {
        self.await_tasks_elsewhere(origin, affected, 0);
        self.aborted_task_ended(turn);
    }

    fn await_tasks_elsewhere(&mut self, origin: Origin, affected: Affected, elsewhere: usize) -> u64 {
        self.next_token += 1;
        let (token, before) = (self.next_token, self.tasks.next_arrival());
        self.management.push(Management { token, origin, affected, before, elsewhere });
        token
    }

    /// Handles the end of an aborted task, or the answer of another reactor: answers the functions that
    /// waited for nothing else.
    pub(super) fn aborted_task_ended(&mut self, turn: &mut Turn<'_>) {
        let mut position = 0;
        while position < self.management.len() {
            if self.waits(&self.management[position]) {
                position += 1;
                continue;
            }
            let done = self.management.swap_remove(position);
            match done.origin {
                Origin::Reactor(inbox, token) => inbox.post(Mail::Aborted { token }),
                Origin::Initiator { session, connection, itt, ends_target } => {
                    let is_there =
                        self.connection(connection).is_some_and(|connection| connection.session == session);
                    if is_there {
                        self.answer_management(connection, itt, TaskResult::Complete, turn);
                    }
                    if let Some(target) = ends_target {
                        self.end_target_everywhere(&target, session, connection, turn);
                    }
                }
            }
        }
    }

    fn waits(&self, management: &Management) -> bool {
        if management.elsewhere > 0 {
            return true;
        }
        self.tasks.iter().any(|(_, task)| {
            task.is_aborted()
                && task.arrival < management.before
                && match &management.affected {
                    Affected::Task(arrival) => task.arrival == *arrival,
                    Affected::Lun(session, lun) => task.session == *session && task.lun == *lun,
                    Affected::Units(units) => {
                        let lun = self.session(task.session).and_then(|session| session.lun(task.lun));
                        lun.is_some_and(|lun| units.iter().any(|unit| Arc::ptr_eq(unit, lun.nexus.unit())))
                    }
                }
        })
    }

    fn answer_management(&mut self, index: u32, itt: u32, result: TaskResult, turn: &mut Turn<'_>) {
        self.answer_with(index, itt, result, [0; 3], turn);
    }

    fn answer_with(
        &mut self,
        index: u32,
        itt: u32,
        result: TaskResult,
        additional: [u8; 3],
        turn: &mut Turn<'_>,
    ) {
        let encode = |numbers, out: &mut Bhs| {
            TaskManagementResponse { result, additional, itt, numbers }.encode(out);
        };
        self.send(index, true, encode, &[], turn);
    }

    /// Ends all sessions of the target for TARGET COLD RESET; the requesting session ends after its
    /// response.
    fn end_target_everywhere(&mut self, target: &str, session: u32, connection: u32, turn: &mut Turn<'_>) {
        let exchange = self.session(session).map(|session| session.exchange.clone());
        if let (Some(exchange), Some(own)) = (exchange, self.inbox.clone()) {
            for other in exchange.others(&own) {
                let scope = Scope::Target(target.to_owned());
                other.post(Mail::Abort { scope, from: own.clone(), token: 0 });
            }
        }
        self.finish_session(session, EndReason::ColdReset, Some(connection), turn);
        self.end_target(target, turn);
    }

    fn end_target(&mut self, target: &str, turn: &mut Turn<'_>) {
        for index in 0..self.sessions.len() as u32 {
            if self.session(index).is_some_and(|session| session.target == target) {
                self.end_session(SessionId(index), EndReason::ColdReset, turn);
            }
        }
    }

    /// Reads the messages of other reactors.
    pub fn woken(&mut self, turn: &mut Turn<'_>) {
        let Some(inbox) = self.inbox.clone() else { return };
        for mail in inbox.take() {
            match mail {
                Mail::Abort { scope: Scope::Units(units), from, token } => {
                    self.abort_units_here(&units, None, turn);
                    self.await_tasks(Origin::Reactor(from, token), Affected::Units(units), turn);
                }
                Mail::Abort { scope: Scope::Target(target), .. } => self.end_target(&target, turn),
                Mail::Stored { id, arrival, outcome } => self.stored(id, arrival, outcome, turn),
                Mail::Refreshed { unit, session, lun, refreshed, is_ok } => {
                    if self.is_refreshing(session, lun, &unit) {
                        self.refreshed((session, lun), refreshed, is_ok, turn);
                    }
                }
                Mail::Aborted { token } => {
                    let waiting = self.management.iter_mut().find(|waiting| waiting.token == token);
                    if let Some(waiting) = waiting {
                        waiting.elsewhere -= 1;
                    }
                    self.aborted_task_ended(turn);
                }
            }
        }
    }

    /// Handles the removal of a connection: its functions need no response, and its number may be reused.
    pub(super) fn connection_gone(&mut self, index: u32) {
        for waiting in &mut self.management {
            if let Origin::Initiator { connection, .. } = &mut waiting.origin
                && *connection == index
            {
                *connection = u32::MAX;
            }
        }
    }

    /// Handles the removal of a session: its functions need no response, and its number may be reused.
    pub(super) fn session_gone(&mut self, index: u32) {
        self.management.retain(
            |waiting| !matches!(&waiting.origin, Origin::Initiator { session, .. } if *session == index),
        );
    }
}

fn state_target(session: Option<&super::session::Session>) -> Option<String> {
    session.map(|session| session.target.clone())
}
