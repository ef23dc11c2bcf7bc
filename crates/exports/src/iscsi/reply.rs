//! PDUs to the initiator: they are gathered per connection and turn, and numbered as they are encoded.

use super::memory::keep;
use super::session::Session;
use super::setup::{EndReason, SessionCounters};
use super::task::{Fate, Memory, NO_LUN, Phase, TaskId};
use super::{Front, Turn};
use crate::outbox::{NoMemory, Owed};
use block::Segment;
use proto::iscsi::digest;
use proto::iscsi::pdu::{
    BHS_LEN, Bhs, DIGEST_LEN, DataIn, Numbers, R2t, RESERVED_TAG, Reject, RejectReason, Residual,
    ScsiResponse, ServiceResponse, padding,
};
use proto::iscsi::transfer::ReadPlan;
use queue::Ring;
use ring::KernelRing;
use scsi::{Outcome, ScsiStatus, Sense};

/// Longest data segment, in bytes, that is copied behind its header.
const COPY_MAX: usize = 4096;

/// Data segment of a PDU.
#[derive(Clone, Copy)]
pub(super) enum Body<'a> {
    None,
    /// Data to copy, at most [`COPY_MAX`] bytes.
    Bytes(&'a [u8]),
    /// Data to send from its place in the arena.
    Memory(Segment),
}

impl super::connection::Connection {
    /// Gathers a PDU with its digests.
    #[inline]
    pub(super) fn push(&mut self, bhs: &Bhs, body: Body<'_>, ring: &mut KernelRing) -> Result<(), NoMemory> {
        let mut header = [0; BHS_LEN + DIGEST_LEN];
        header[..BHS_LEN].copy_from_slice(bhs);
        let mut header_len = BHS_LEN;
        if self.header_digest {
            header[BHS_LEN..].copy_from_slice(&digest::of(bhs));
            header_len += DIGEST_LEN;
        }
        let (len, mut data_digest) = (
            match body {
                Body::None => 0,
                Body::Bytes(bytes) => bytes.len() as u32,
                Body::Memory(segment) => segment.len,
            },
            digest::Digest::new(),
        );
        match body {
            Body::None => return self.outbox.push(&header[..header_len], None, ring),
            Body::Bytes(bytes) => {
                self.outbox.push(&header[..header_len], None, ring)?;
                self.outbox.push(bytes, None, ring)?;
                if self.data_digest {
                    data_digest.update(bytes);
                }
            }
            Body::Memory(segment) => {
                self.outbox.push(&header[..header_len], Some(segment), ring)?;
                if self.data_digest {
                    data_digest.update(ring.bytes(segment));
                }
            }
        }
        let mut trailer = [0; 3 + DIGEST_LEN];
        let mut trailer_len = padding(len) as usize;
        if self.data_digest {
            data_digest.pad(len);
            trailer[trailer_len..trailer_len + DIGEST_LEN].copy_from_slice(&data_digest.finish());
            trailer_len += DIGEST_LEN;
        }
        if trailer_len > 0 {
            self.outbox.push(&trailer[..trailer_len], None, ring)?;
        }
        Ok(())
    }

    /// Counts PDUs gathered since the last call as one reply that moves `bytes`.
    #[inline]
    fn pushed(&mut self, bytes: u64) {
        self.unsent.add(Owed { replies: 1, bytes });
        self.outbox.answered(bytes);
    }

    /// Counts memory that is kept until the last gathered PDU has been sent, as PDUs of [`COPY_MAX`] bytes.
    /// This bounds the bytes that the target keeps for a peer that never reads.
    fn keeps(&mut self, bytes: u32) {
        // If nothing is to be sent, the memory is freed at once: the command ended without a response.
        if self.outbox.is_empty() {
            return;
        }
        for _ in 0..bytes as usize / COPY_MAX {
            self.pushed(0);
        }
    }

    /// Gathers the data of a read, with the status in its last PDU if one is given. Returns the number of
    /// PDUs.
    fn push_data_in(
        &mut self,
        itt: u32,
        data: Segment,
        burst_max: u32,
        status: Option<(u8, Residual)>,
        session: &Session,
        ring: &mut KernelRing,
    ) -> Result<u32, NoMemory> {
        let mut plan = ReadPlan::new(data.len, self.send_max, burst_max);
        let mut bhs = [0; BHS_LEN];
        for part in plan.by_ref() {
            let status = status.filter(|_| part.is_last);
            let stat_sn = if status.is_some() { self.status.take() } else { self.status.next() };
            let pdu = DataIn {
                is_final: part.is_final,
                acknowledge: false,
                status: status.map(|(status, _)| status),
                residual: status.map_or(Residual::None, |(_, residual)| residual),
                lun: 0,
                itt,
                ttt: RESERVED_TAG,
                numbers: session.window.numbers(stat_sn),
                data_sn: part.data_sn,
                offset: part.offset,
            };
            pdu.encode(&mut bhs, part.len);
            self.push(&bhs, Body::Memory(data.slice(part.offset, part.len)), ring)?;
        }
        Ok(plan.data_sn())
    }
}

/// The result of a task, as the initiator receives it.
struct Response<'a> {
    itt: u32,
    status: ScsiStatus,
    sense: &'a [u8],
    residual: Residual,
    /// Number of R2Ts sent.
    r2ts: u32,
}

impl Front {
    /// Gathers a PDU that `encode` writes with the session's numbers. `takes_status`: the PDU consumes a
    /// StatSN.
    pub(super) fn send(
        &mut self,
        index: u32,
        takes_status: bool,
        encode: impl FnOnce(Numbers, &mut Bhs),
        body: &[u8],
        turn: &mut Turn<'_>,
    ) {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let session = self.sessions.get(connection.session as usize).and_then(Option::as_ref);
        let Some(session) = session.filter(|_| !connection.closed) else { return };
        let status = &mut connection.status;
        let stat_sn = if takes_status { status.take() } else { status.next() };
        let mut bhs = [0; BHS_LEN];
        encode(session.window.numbers(stat_sn), &mut bhs);
        let pushed = match body {
            [] => connection.push(&bhs, Body::None, turn.ring),
            bytes if bytes.len() <= COPY_MAX => connection.push(&bhs, Body::Bytes(bytes), turn.ring),
            bytes => match keep(bytes, turn.ring) {
                Some(memory) => {
                    let pushed = connection.push(&bhs, Body::Memory(memory), turn.ring);
                    connection.held += u64::from(memory.len);
                    connection.keeps(memory.len);
                    self.budget.add(memory.len.into());
                    self.free_when_sent(index, memory, turn.ring);
                    pushed
                }
                None => Err(NoMemory),
            },
        };
        self.gathered(index, pushed, turn);
    }

    /// Finishes the gathering of a reply.
    fn gathered(&mut self, index: u32, pushed: Result<(), NoMemory>, turn: &mut Turn<'_>) {
        match pushed {
            Ok(()) => {
                if let Some(connection) = self.connection_mut(index) {
                    connection.pushed(0);
                }
                self.mark(index);
            }
            Err(NoMemory) => self.lose(index, EndReason::Evicted, turn),
        }
    }

    /// Sends a Reject that returns the PDU's header (section 11.17).
    pub(super) fn reject(&mut self, index: u32, bhs: &Bhs, reason: RejectReason, turn: &mut Turn<'_>) {
        if let Some(session) = self.connection(index).and_then(|c| self.session(c.session)) {
            SessionCounters::add(&session.counters.rejects, 1);
        }
        let encode = |numbers, out: &mut Bhs| Reject { reason, numbers, data_sn: 0 }.encode(out);
        self.send(index, true, encode, bhs, turn);
    }

    /// Sends an R2T for data of a write.
    pub(super) fn send_r2t(
        &mut self,
        id: TaskId,
        ttt: u32,
        order: proto::iscsi::transfer::R2tOrder,
        turn: &mut Turn<'_>,
    ) {
        let task = self.tasks.of_mut(id);
        task.open += 1;
        let (index, itt, lun) = (task.connection, task.itt, task.lun_field);
        let encode = |numbers, out: &mut Bhs| {
            let (r2t_sn, offset, desired_len) = (order.r2t_sn, order.offset, order.len);
            R2t { lun, itt, ttt, numbers, r2t_sn, offset, desired_len }.encode(out);
        };
        self.send(index, false, encode, &[], turn);
    }

    /// Ends a task successfully, whose block request read `data`.
    #[inline]
    pub(super) fn end_read(&mut self, id: TaskId, data: Segment, wanted: u64, turn: &mut Turn<'_>) {
        self.end(id, ScsiStatus::Good, wanted, &[], Some(data), turn);
    }

    /// Ends a task with an outcome.
    pub(super) fn end_task(&mut self, id: TaskId, outcome: &Outcome, turn: &mut Turn<'_>) {
        let mut sense = [0; Sense::LEN_MAX];
        let sense_len = outcome.sense_bytes(&mut sense);
        let task = self.tasks.of(id);
        let index = task.connection;
        let data_in = if task.is_aborted() { 0 } else { task.data_in() };
        let len = outcome.data.len().min(data_in as usize);
        let data = match &outcome.data[..len] {
            [] => None,
            bytes => match keep(bytes, turn.ring) {
                Some(memory) => Some(memory),
                None => return self.end(id, ScsiStatus::Busy, 0, &[], None, turn),
            },
        };
        if let Some(memory) = data {
            self.charge_anyway(index, memory.len.into());
        }
        self.end(id, outcome.status, outcome.wanted, &sense[..sense_len], data, turn);
        if let Some(memory) = data {
            if let Some(connection) = self.connection_mut(index).filter(|connection| !connection.closed) {
                connection.keeps(memory.len);
            }
            self.free_when_sent(index, memory, turn.ring);
        }
    }

    /// Ends a task: sends its response, and releases everything that it holds. `data` is sent before the
    /// status and must stay valid until then.
    fn end(
        &mut self,
        id: TaskId,
        status: ScsiStatus,
        wanted: u64,
        sense: &[u8],
        data: Option<Segment>,
        turn: &mut Turn<'_>,
    ) {
        self.check_epoch(id);
        let task = self.tasks.of(id);
        let (index, fate, data_in) = (task.connection, task.fate, task.data_in());
        let expected = if task.read || task.write { task.expected } else { 0 };
        let received = task.plan.map_or(0, |plan| plan.received());
        let mut response = Response {
            itt: task.itt,
            status,
            sense,
            residual: Residual::of(expected, wanted),
            r2ts: task.plan.map_or(0, |plan| plan.r2t_sn()),
        };
        let data = data.filter(|data| data.len > 0 && fate == Fate::Own);
        let data = data.map(|data| data.slice(0, data.len.min(data_in)));
        if fate == Fate::TaskAborted {
            (response.status, response.sense) = (ScsiStatus::TaskAborted, &[]);
            response.residual = Residual::of(expected, 0);
        }
        let session = task.session;
        let is_immediate = task.immediate;
        // If its CmdSN is not next yet, the number is skipped when it is, which opens the window.
        let has_turn = task.phase != Phase::Numbered;
        if task.is_traced {
            let (end, bytes) = ((response.status, response.sense), data.map_or(received, |data| data.len));
            self.trace_end(id, end, fate == Fate::Silent, bytes.into(), turn);
        }
        if let Some(session) = self.sessions.get_mut(session as usize).and_then(Option::as_mut) {
            session.tasks -= 1;
            if is_immediate {
                session.immediate -= 1;
            } else if has_turn {
                session.open_window();
            }
            let counters = &session.counters;
            SessionCounters::add(&counters.commands, 1);
            SessionCounters::add(&counters.bytes_read, data.map_or(0, |data| data.len.into()));
            SessionCounters::add(&counters.bytes_written, received.into());
            if response.status != ScsiStatus::Good {
                SessionCounters::add(&counters.errors, 1);
            }
            if fate != Fate::Own {
                SessionCounters::add(&counters.aborts, 1);
            }
            counters.set_window(&session.window);
            counters.in_progress.store(session.tasks.into(), std::sync::atomic::Ordering::Relaxed);
        }
        if fate != Fate::Silent {
            let pushed = self.push_response(index, session, &response, data, turn.ring);
            if pushed.is_ok() {
                self.mark(index);
            } else {
                self.lose(index, EndReason::Evicted, turn);
            }
        }
        self.drop_task(id, turn);
    }

    fn push_response(
        &mut self,
        index: u32,
        session: u32,
        response: &Response<'_>,
        data: Option<Segment>,
        ring: &mut KernelRing,
    ) -> Result<(), NoMemory> {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return Ok(());
        };
        let session = self.sessions.get(session as usize).and_then(Option::as_ref);
        let Some(session) = session.filter(|_| !connection.closed) else { return Ok(()) };
        let (itt, status, residual) = (response.itt, response.status as u8, response.residual);
        let burst_max = session.rules.max_burst_length;
        let mut exp_data_sn = response.r2ts;
        let mut bytes = 0;
        if let Some(data) = data {
            bytes = data.len.into();
            // A status without sense data is sent with the last data (phase collapse, section 11.4).
            let last = response.sense.is_empty().then_some((status, residual));
            exp_data_sn += connection.push_data_in(itt, data, burst_max, last, session, ring)?;
            if last.is_some() {
                connection.pushed(bytes);
                return Ok(());
            }
        }
        let pdu = ScsiResponse {
            response: ServiceResponse::Completed,
            status,
            status_qualifier: 0,
            itt,
            numbers: session.window.numbers(connection.status.take()),
            exp_data_sn,
            residual,
        };
        let (mut bhs, mut sense) = ([0; BHS_LEN], [0; 2 + Sense::LEN_MAX]);
        let sense_len = response.sense.len();
        if sense_len == 0 {
            pdu.encode(&mut bhs, 0);
            connection.push(&bhs, Body::None, ring)?;
        } else {
            sense[..2].copy_from_slice(&(sense_len as u16).to_be_bytes());
            sense[2..2 + sense_len].copy_from_slice(response.sense);
            pdu.encode(&mut bhs, 2 + sense_len as u32);
            connection.push(&bhs, Body::Bytes(&sense[..2 + sense_len]), ring)?;
        }
        connection.pushed(bytes);
        Ok(())
    }

    /// Marks a command as aborted if another nexus has preempted or reset its nexus since it began.
    #[inline]
    fn check_epoch(&mut self, id: TaskId) {
        let task = self.tasks.of_mut(id);
        if task.fate != Fate::Own || !task.running {
            return;
        }
        let session = self.sessions.get(task.session as usize).and_then(Option::as_ref);
        let Some(unit) = session.and_then(|session| session.lun(task.lun)) else { return };
        if unit.nexus.epoch() != task.epoch {
            let reports = unit.nexus.unit().reports_aborted_tasks();
            task.fate = if reports { Fate::TaskAborted } else { Fate::Silent };
        }
    }

    /// Releases everything that a task holds, and frees its slot.
    fn drop_task(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of_mut(id);
        debug_assert!(task.in_stack == 0 && !task.filling && task.phase != Phase::Vacant);
        let (index, session, lun) = (task.connection, task.session, task.lun);
        let (attribute, running, was_aborted) = (task.attribute, task.running, task.is_aborted());
        let memory = std::mem::replace(&mut task.memory, Memory::None);
        let scratch = std::mem::replace(&mut task.scratch, Segment::EMPTY);
        task.running = false;
        match memory {
            Memory::Chunk(chunk, _) => self.chunk_uses.release(chunk, turn.ring),
            Memory::Own(memory) => {
                self.tasks.of_mut(id).charged -= u64::from(memory.len);
                self.free_when_sent(index, memory, turn.ring);
            }
            Memory::None => {}
        }
        if scratch.len > 0 {
            self.free_charged(id, scratch, turn.ring);
        }
        self.tasks.free(id);
        if lun != NO_LUN
            && let Some(entry) = self.session_mut(session)
        {
            if running && let Some(unit) = entry.lun_mut(lun) {
                unit.ended(attribute);
                if unit.has_waiting() {
                    self.kicks.push((session, lun));
                }
            }
            let dropped = self.session_mut(session).and_then(|session| session.release_lun(lun));
            dropped.into_iter().for_each(|queue| self.count_client(queue, -1));
        }
        if let Some(connection) = self.connection_mut(index) {
            connection.tasks -= 1;
            if connection.gone && connection.tasks == 0 {
                self.forget(index);
            }
        }
        if was_aborted {
            self.aborted_task_ended(turn);
        }
        if self.session(session).is_some_and(|session| !session.is_alive() && session.tasks == 0) {
            self.ending.push(session);
        }
    }
}
