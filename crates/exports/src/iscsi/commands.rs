//! SCSI commands, from the arrival of their PDU to their first block request, and their data-out.

use super::connection::Sink;
use super::intake::{Source, Taken};
use super::memory::DATA_MAX;
use super::session::{HeldPdu, IMMEDIATE_MAX};
use super::setup::EndReason;
use super::task::{CDB_MAX, Memory, NO_LUN, Phase, Task, TaskId, Work};
use super::{Front, Turn};
use block::Op;
use proto::iscsi::pdu::{Ahs, BHS_LEN, DataOut, Header, RejectReason, Request, ScsiCommand, TaskAttribute};
use proto::iscsi::sequence::Arrival;
use proto::iscsi::transfer::{Placement, WritePlan};
use queue::Ring;
use scsi::sense::Key;
use scsi::{Begin, Command, Lun, Outcome, Sense};

impl Front {
    /// Handles a SCSI command, whose immediate data is in `source` or still to come.
    pub(super) fn command(
        &mut self,
        index: u32,
        header: &Header<Request>,
        command: &ScsiCommand,
        ahs_len: usize,
        source: Option<Source>,
        turn: &mut Turn<'_>,
    ) -> Taken {
        let discard = Taken::Into(Sink::Discard);
        let Some(connection) = self.connection(index) else { return discard };
        let session_index = connection.session;
        let Some(session) = self.session_mut(session_index).filter(|session| session.is_alive()) else {
            return discard;
        };
        let arrival = if header.immediate {
            if session.immediate >= IMMEDIATE_MAX {
                let bhs = self.connection(index).map_or([0; BHS_LEN], |connection| connection.bhs);
                self.reject(index, &bhs, RejectReason::ImmediateCommandReject, turn);
                return discard;
            }
            Arrival::InOrder
        } else {
            session.window.receive(command.cmd_sn)
        };
        if arrival == Arrival::Ignored {
            return discard;
        }
        let Some(id) = self.accept(index, session_index, header, command, ahs_len) else {
            // There are more tasks than R2T tags can name, which no session's queue depth allows.
            self.lose(index, EndReason::Evicted, turn);
            return discard;
        };
        if arrival == Arrival::InOrder {
            self.begin_in_order(id, turn);
        } else if let Some(session) = self.session_mut(session_index) {
            session.held.push((command.cmd_sn, HeldPdu::Task(id)));
        }
        let taken = self.place_immediate(id, header.data_len, source, turn);
        self.advance(id, turn);
        if arrival == Arrival::InOrder && !header.immediate {
            self.release_held(session_index, turn);
        }
        taken
    }

    /// Takes a slot for a command, and plans its data.
    fn accept(
        &mut self,
        index: u32,
        session: u32,
        header: &Header<Request>,
        command: &ScsiCommand,
        ahs_len: usize,
    ) -> Option<TaskId> {
        let connection = self.connections.get_mut(index as usize)?.as_mut()?;
        let session_state = self.sessions.get_mut(session as usize)?.as_mut()?;
        let (id, task) = self.tasks.take()?;
        session_state.tasks += 1;
        session_state.immediate += u32::from(header.immediate);
        connection.tasks += 1;
        task.session = session;
        task.connection = index;
        task.lun = NO_LUN;
        task.phase = Phase::Numbered;
        task.fate = super::task::Fate::Own;
        task.itt = command.itt;
        task.lun_field = command.lun;
        task.cmd_sn = command.cmd_sn;
        task.immediate = header.immediate;
        (task.read, task.write) = (command.read, command.write);
        task.attribute = command.attribute;
        task.running = false;
        (task.in_stack, task.reads_inline) = (0, false);
        (task.resumed, task.is_traced) = (false, false);
        task.cdb_len = 16;
        task.cdb[..16].copy_from_slice(&command.cdb);
        task.expected = command.expected_len;
        task.wanted = 0;
        task.plan = None;
        task.open = 0;
        task.filling = false;
        task.unsolicited = false;
        task.broken = None;
        task.data_sn = 0;
        task.memory = Memory::None;
        task.charged = 0;
        task.work = Work::None;
        let mut refused = None;
        if ahs_len > 0 {
            refused = add_headers(task, &connection.stash[BHS_LEN..][..ahs_len]).err();
        }
        if command.read && command.write && command.expected_len > 0 {
            // Bidirectional commands are obsolete, and no command here has both data-out and data-in.
            refused = Some(Sense::INVALID_FIELD_IN_CDB);
        }
        if command.attribute == TaskAttribute::Aca {
            refused = Some(ABORTED_INVALID_ATTRIBUTE);
        }
        if let Some(sense) = refused {
            task.work = Work::Ended(Box::new(Outcome::check(sense)));
        }
        if !command.is_final {
            // Even if the command is refused, Data-Out PDUs follow until the one with the F bit.
            (task.open, task.unsolicited) = (1, true);
            connection.unsolicited = Some(id);
        }
        let (expected, immediate) = (task.data_out(), header.data_len);
        if command.write {
            match WritePlan::begin(&session_state.rules, expected, expected, immediate, command.is_final) {
                Ok((plan, _)) => task.plan = Some(plan),
                Err(error) => task.broken = Some(error.sense()),
            }
        } else if immediate > 0 || !command.is_final {
            task.broken = Some(proto::iscsi::transfer::TransferError::UnsolicitedNotAllowed.sense());
        }
        Some(id)
    }

    /// Begins a command whose CmdSN is next, unless its logical unit makes it wait.
    fn begin_in_order(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of_mut(id);
        task.phase = Phase::Begun;
        let (index, attribute) = (task.session, task.attribute);
        let lun = Lun(task.lun_field.to_be_bytes());
        let Some(session) = self.sessions.get_mut(index as usize).and_then(Option::as_mut) else { return };
        if let Some(unit_index) = session.find(lun)
            && let Some(unit) = session.lun_mut(unit_index)
        {
            task.lun = unit_index;
            unit.tasks += 1;
            let is_outdated = !unit.is_refreshing && unit.nexus.unit().is_outdated();
            unit.is_refreshing |= is_outdated;
            if !unit.may_begin(id, attribute) {
                task.phase = Phase::Ordered;
                if is_outdated {
                    self.refresh(index, unit_index);
                }
                return;
            }
            task.running = true;
        }
        self.begin_command(id, turn);
    }

    /// Lets the logical unit decide what the command does.
    fn begin_command(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        if let Some(queue) = self.queue_of(id) {
            self.trace_begin(id, queue, turn);
        }
        let task = self.tasks.of_mut(id);
        if !matches!(task.work, Work::None) || task.broken.is_some() {
            return;
        }
        let Some(session) = self.sessions.get(task.session as usize).and_then(Option::as_ref) else { return };
        let command = Command {
            cdb: task.cdb(),
            data_in: task.data_in(),
            data_out: task.data_out(),
            attribute: attribute_of(task.attribute),
        };
        let begin = match session.lun(task.lun) {
            Some(unit) => {
                let epoch = unit.nexus.epoch();
                let begin = scsi::begin(&unit.nexus, &command, &**session);
                self.tasks.of_mut(id).epoch = epoch;
                begin
            }
            None => scsi::no_unit(Lun(task.lun_field.to_be_bytes()), &command, &**session).into(),
        };
        self.set_work(id, begin);
    }

    /// Records the work of a command, and how much data-out that work takes.
    pub(super) fn set_work(&mut self, id: TaskId, begin: Begin) {
        let task = self.tasks.of_mut(id);
        let mut wanted = 0;
        task.work = match begin {
            Begin::Finished(outcome) => Work::Ended(Box::new(outcome)),
            Begin::Io(io) if io.len > u64::from(DATA_MAX) && matches!(io.op, Op::Read | Op::Write) => {
                Work::Ended(Box::new(Outcome::check(Sense::INVALID_FIELD_IN_CDB)))
            }
            Begin::Io(io) => {
                if io.op == Op::Write {
                    wanted = io.transfer;
                }
                Work::Io(io)
            }
            Begin::Parameters(parameters) => {
                wanted = parameters.len;
                Work::Parameters(Box::new(parameters))
            }
            Begin::Program(program) => {
                let running = super::program::Running::new(program);
                wanted = running.needs.data_out;
                Work::Program(running)
            }
            Begin::Store(store) => Work::Store(store),
        };
        if wanted > DATA_MAX {
            task.work = Work::Ended(Box::new(Outcome::check(Sense::INVALID_FIELD_IN_CDB)));
            wanted = 0;
        }
        // Data beyond the expected length never arrives, and other data must not be written in its place.
        if wanted > task.data_out() {
            task.work = Work::Ended(Box::new(Outcome::check(Sense::INVALID_TRANSFER)));
            wanted = 0;
        }
        task.wanted = wanted;
        if let Some(plan) = &mut task.plan {
            plan.want(wanted);
        }
    }

    /// Places the immediate data of a command.
    fn place_immediate(
        &mut self,
        id: TaskId,
        len: u32,
        source: Option<Source>,
        turn: &mut Turn<'_>,
    ) -> Taken {
        if len == 0 {
            return Taken::Done;
        }
        let task = self.tasks.of_mut(id);
        let has_begun = task.phase == Phase::Begun;
        let uses = task.plan.is_some() && task.broken.is_none() && !matches!(task.work, Work::Ended(_));
        let wanted = if has_begun { task.wanted } else { task.data_out() };
        if !uses || wanted == 0 {
            task.filling = source.is_none();
            return if source.is_none() { Taken::Into(Sink::Task(id, 0)) } else { Taken::Done };
        }
        let index = task.connection;
        let Some(source) = source else {
            task.filling = true;
            // Allocate space for all of the data if the budget permits, so that the data need not move.
            let (whole, least) = (wanted, len.min(wanted).max(1));
            let is_held = has_begun && self.try_hold(id, whole, turn);
            if !is_held && !self.hold_early(id, least, turn) {
                self.lose(index, EndReason::Evicted, turn);
            }
            return Taken::Into(Sink::Task(id, 0));
        };
        let data = source.data.slice(0, len.min(wanted));
        match source.chunk {
            Some(chunk) if has_begun && data.len == wanted && task.open == 0 => {
                self.chunk_uses.hold(chunk);
                task.memory = Memory::Chunk(chunk, data);
            }
            _ => {
                let is_held = has_begun && self.try_hold(id, wanted, turn);
                if !is_held && !self.hold_early(id, data.len, turn) {
                    self.lose(index, EndReason::Evicted, turn);
                } else if let Memory::Own(memory) = self.tasks.of(id).memory {
                    turn.ring.copy(data, memory.slice(0, data.len));
                }
            }
        }
        Taken::Done
    }

    /// Gives a task memory for all of its data, if that is possible without waiting.
    fn try_hold(&mut self, id: TaskId, len: u32, turn: &mut Turn<'_>) -> bool {
        match self.allocate_for(id, len, turn.ring) {
            Some(memory) => {
                self.tasks.of_mut(id).memory = Memory::Own(memory);
                true
            }
            None => false,
        }
    }

    /// Handles a Data-Out PDU, whose data is in `source` or still to come.
    pub(super) fn data_out(
        &mut self,
        index: u32,
        pdu: &DataOut,
        len: u32,
        source: Option<Source>,
        turn: &mut Turn<'_>,
    ) -> Taken {
        let discard = Taken::Into(Sink::Discard);
        let Some(id) = self.task_of(index, pdu) else {
            // The task was aborted or never existed: skip the data (section 11.7).
            return discard;
        };
        let task = self.tasks.of_mut(id);
        if task.broken.is_some() || task.plan.is_none() {
            return self.skip_data_out(id, pdu, source.is_some(), turn);
        }
        let Some(plan) = &mut task.plan else { return discard };
        let Placement { offset, keep, .. } = match plan.data_out(pdu, len) {
            Ok(placement) => placement,
            Err(error) => {
                task.broken = Some(error.sense());
                let bhs = self.connection(index).map_or([0; BHS_LEN], |connection| connection.bhs);
                self.reject(index, &bhs, error.reject_reason(), turn);
                return self.skip_data_out(id, pdu, source.is_some(), turn);
            }
        };
        if keep > 0 && !matches!(task.work, Work::Ended(_)) && !self.has_memory(id, offset + keep, turn) {
            self.lose(index, EndReason::Evicted, turn);
            return discard;
        }
        let task = self.tasks.of_mut(id);
        match source {
            Some(source) => {
                if let Memory::Own(memory) = task.memory {
                    let keep = keep.min(memory.len.saturating_sub(offset));
                    turn.ring.copy(source.data.slice(0, keep), memory.slice(offset, keep));
                }
                self.data_out_taken(id, pdu, turn);
                Taken::Done
            }
            None if len == 0 => {
                self.data_out_taken(id, pdu, turn);
                Taken::Done
            }
            None => {
                task.filling = true;
                Taken::Into(Sink::Task(id, offset))
            }
        }
    }

    /// Returns whether a task has memory for its data up to `end`; allocates it for unsolicited data.
    fn has_memory(&mut self, id: TaskId, end: u32, turn: &mut Turn<'_>) -> bool {
        match self.tasks.of(id).memory {
            Memory::Own(memory) if memory.len >= end => true,
            _ => {
                let task = self.tasks.of(id);
                let first_burst =
                    self.session(task.session).map_or(end, |session| session.rules.first_burst_length);
                let len = first_burst.min(task.data_out()).max(end);
                self.hold_early(id, len, turn)
            }
        }
    }

    /// Finds the task of a Data-Out PDU: by its target transfer tag, or, for unsolicited data, by its
    /// initiator task tag.
    fn task_of(&self, index: u32, pdu: &DataOut) -> Option<TaskId> {
        let is_it = |task: &Task| task.connection == index && task.itt == pdu.itt && task.open > 0;
        if pdu.ttt != proto::iscsi::pdu::RESERVED_TAG {
            let id = task_of_tag(pdu.ttt);
            return self.tasks.find(id).filter(|task| is_it(task)).map(|_| id);
        }
        // Usually the PDU belongs to the latest command.
        let recent = self.connection(index)?.unsolicited.filter(|id| self.tasks.find(*id).is_some_and(is_it));
        recent.or_else(|| self.tasks.iter().find(|(_, task)| is_it(task)).map(|(id, _)| id))
    }

    /// Skips a Data-Out PDU of a task that has failed.
    fn skip_data_out(&mut self, id: TaskId, pdu: &DataOut, is_here: bool, turn: &mut Turn<'_>) -> Taken {
        if is_here {
            self.data_out_taken(id, pdu, turn);
            return Taken::Done;
        }
        self.tasks.of_mut(id).filling = true;
        Taken::Into(Sink::Task(id, u32::MAX))
    }

    /// Records that the data of a Data-Out PDU has arrived.
    fn data_out_taken(&mut self, id: TaskId, pdu: &DataOut, turn: &mut Turn<'_>) {
        if pdu.is_final {
            let task = self.tasks.of_mut(id);
            if pdu.ttt == proto::iscsi::pdu::RESERVED_TAG {
                if std::mem::take(&mut task.unsolicited) {
                    task.open -= 1;
                }
            } else {
                task.open = task.open.saturating_sub(1);
            }
        }
        self.advance(id, turn);
    }

    /// Handles the completion of a PDU's data segment that arrived in parts for this task.
    pub(super) fn task_data_complete(&mut self, id: TaskId, pdu: &Request, turn: &mut Turn<'_>) {
        match pdu {
            Request::DataOut(pdu) => self.data_out_taken(id, pdu, turn),
            _ => self.advance(id, turn),
        }
    }

    /// Advances a task as far as possible.
    pub(super) fn advance(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        loop {
            let Some(task) = self.tasks.find(id) else { return };
            match task.phase {
                Phase::Begun | Phase::Data | Phase::Ending => {}
                _ => return,
            }
            let (open, filling) = (task.open > 0, task.filling);
            if let Some((code, qualifier)) = task.broken {
                let sense = Sense::new(Key::AbortedCommand, code, qualifier);
                self.tasks.of_mut(id).work = Work::Ended(Box::new(Outcome::check(sense)));
            }
            let task = self.tasks.of_mut(id);
            if let Work::Ended(_) = task.work {
                task.phase = Phase::Ending;
                if open || filling {
                    return;
                }
                if let Work::Ended(outcome) = std::mem::replace(&mut task.work, Work::None) {
                    self.end_task(id, &outcome, turn);
                }
                return;
            }
            if task.wanted > 0 {
                let wanted = task.wanted;
                if !self.hold(id, wanted, turn) {
                    return;
                }
                self.request_data(id, turn);
                // The task may have been lost with its session.
                let Some(task) = self.tasks.find(id) else { return };
                let is_complete = task.plan.is_some_and(|plan| plan.is_complete());
                if task.filling || task.open > 0 || !is_complete {
                    self.tasks.of_mut(id).phase = Phase::Data;
                    // Tasks may hold a chunk for complete data only.
                    if !self.settle(id, turn) {
                        let index = self.tasks.of(id).connection;
                        self.lose(index, EndReason::Evicted, turn);
                    }
                    return;
                }
            } else if open || filling {
                // Wait for data that the command does not take.
                task.phase = Phase::Data;
                return;
            }
            let task = self.tasks.of_mut(id);
            task.phase = Phase::Begun;
            match &task.work {
                Work::Io(_) => return self.enter_stack(id, turn),
                Work::Program(_) => return self.start_program(id, turn),
                Work::Parameters(_) => self.begin_with_parameters(id, turn),
                Work::Store(_) => return self.store(id, turn),
                Work::None | Work::Ended(_) => return,
            }
        }
    }

    /// Sends as many R2Ts as may be outstanding.
    fn request_data(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        loop {
            let ttt = tag_of(id, self.r2ts);
            let task = self.tasks.of_mut(id);
            let Some(order) = task.plan.as_mut().and_then(|plan| plan.next_r2t(ttt)) else { return };
            self.r2ts = self.r2ts.wrapping_add(1);
            self.send_r2t(id, ttt, order, turn);
            if self.tasks.find(id).is_none() {
                return;
            }
        }
    }

    /// Begins a command again, now that its parameter list has arrived.
    fn begin_with_parameters(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of_mut(id);
        let Work::Parameters(parameters) = std::mem::replace(&mut task.work, Work::None) else { return };
        let list = match task.memory {
            Memory::Own(memory) | Memory::Chunk(_, memory) => {
                turn.ring.bytes(memory.slice(0, memory.len.min(parameters.len)))
            }
            Memory::None => &[],
        };
        let Some(session) = self.sessions.get(task.session as usize).and_then(Option::as_ref) else { return };
        let begin = parameters.begin(list, &**session);
        self.set_work(id, begin);
    }

    /// Begins waiting tasks of the LUNs in `kicks`, as far as their task attributes permit.
    pub(super) fn begin_waiting(&mut self, turn: &mut Turn<'_>) {
        for (session, lun) in std::mem::take(&mut self.kicks) {
            self.begin_waiting_of(session, lun, 0, turn);
        }
    }

    /// Begins waiting tasks of a LUN. The unit's reservations have just been read for those that arrived
    /// before `refreshed`.
    pub(super) fn begin_waiting_of(&mut self, session: u32, lun: u16, refreshed: u64, turn: &mut Turn<'_>) {
        loop {
            let tasks = &self.tasks;
            let unit = self.sessions.get_mut(session as usize).and_then(Option::as_mut);
            let Some(unit) = unit.and_then(|session| session.lun_mut(lun)) else { return };
            let Some(first) = unit.waiting().next() else { return };
            if tasks.of(first).arrival >= refreshed && !unit.is_refreshing && unit.nexus.unit().is_outdated()
            {
                unit.is_refreshing = true;
                return self.refresh(session, lun);
            }
            let Some(id) = unit.next_waiting(|id| tasks.of(id).attribute) else { return };
            let task = self.tasks.of_mut(id);
            (task.phase, task.running) = (Phase::Begun, true);
            self.begin_command(id, turn);
            self.advance(id, turn);
        }
    }

    /// Processes the held PDUs whose predecessors have arrived.
    pub(super) fn release_held(&mut self, session: u32, turn: &mut Turn<'_>) {
        loop {
            let Some(state) = self.session_mut(session) else { return };
            let Some(cmd_sn) = state.window.take_held() else { break };
            match state.held.iter().position(|(held, _)| *held == cmd_sn) {
                Some(position) => match state.held.swap_remove(position).1 {
                    HeldPdu::Task(id) => {
                        self.begin_in_order(id, turn);
                        self.advance(id, turn);
                    }
                    HeldPdu::Pdu(connection, pdu, data) => {
                        self.held_pdu(session, connection, &pdu, data, turn);
                    }
                },
                // The command was aborted before it arrived, or was lost with its connection.
                None => state.open_window(),
            }
        }
        self.release_management(session, turn);
    }
}

/// Adds the rest of a long CDB from the additional headers.
fn add_headers(task: &mut Task, bytes: &[u8]) -> Result<(), Sense> {
    let ahs = Ahs::parse(bytes).map_err(|_| Sense::INVALID_FIELD_IN_CDB)?;
    if let Some(rest) = ahs.extended_cdb {
        let len = rest.len().min(CDB_MAX - 16);
        task.cdb[16..16 + len].copy_from_slice(&rest[..len]);
        task.cdb_len = 16 + len as u8;
    }
    if ahs.bidirectional_read_len.is_some() { Err(Sense::INVALID_FIELD_IN_CDB) } else { Ok(()) }
}

/// Sense for the ACA attribute: NACA is not supported.
const ABORTED_INVALID_ATTRIBUTE: Sense = Sense::new(Key::IllegalRequest, 0x49, 0x00);

fn attribute_of(attribute: TaskAttribute) -> scsi::TaskAttribute {
    match attribute {
        TaskAttribute::Untagged | TaskAttribute::Simple => scsi::TaskAttribute::Simple,
        TaskAttribute::Ordered => scsi::TaskAttribute::Ordered,
        TaskAttribute::HeadOfQueue => scsi::TaskAttribute::HeadOfQueue,
        TaskAttribute::Aca => scsi::TaskAttribute::Aca,
    }
}

/// Number of low bits of a target transfer tag that name the task. The remaining bits count R2Ts, so that a
/// late answer to an earlier R2T is recognised.
const TASK_BITS: u32 = 20;

/// Returns the tag of an R2T. The task's number is below 2^20 - 1, so no tag equals the reserved one.
fn tag_of(id: TaskId, r2ts: u32) -> u32 {
    r2ts << TASK_BITS | id
}

fn task_of_tag(ttt: u32) -> TaskId {
    ttt & ((1 << TASK_BITS) - 1)
}
