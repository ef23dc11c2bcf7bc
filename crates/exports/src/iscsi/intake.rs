//! Turns bytes into PDUs: headers and data segments, with their digests, parsed in place.
//!
//! Bytes come in chunks (the ring's memory, shared by all connections), from the backlog (the connection's
//! memory, filled while too many PDUs wait to be sent), or directly into the memory of a task.

use super::connection::{DataInput, Input, Receiving, Sink, UNSENT_MAX};
use super::memory::keep;
use super::setup::{EndReason, SessionCounters};
use super::task::{Memory, Phase, TaskId};
use super::{Front, Turn};
use crate::budget::{SLOW_STEP, charge_of};
use block::Segment;
use proto::iscsi::digest::{self, Digest};
use proto::iscsi::pdu::{
    self, BHS_LEN, Bhs, DIGEST_LEN, Header, PduError, RejectReason, Request, lengths, padding,
};
use queue::Ring;
use ring::Chunk;

/// A data segment is received directly into its memory if at least this many bytes are still to come; fewer
/// are copied from chunks. Stopping and restarting the stream of chunks costs more than copying 256 KiB,
/// the longest segment of usual sessions (docs/benchmarks/iscsi.md).
const DIRECT_FILL_MIN: u32 = 320 << 10;

/// Location of a PDU's data.
#[derive(Clone, Copy)]
pub(super) struct Source {
    /// The complete data segment of a PDU.
    pub(super) data: Segment,
    /// The chunk that contains it; `None` if it is in memory of the connection, which is freed afterwards.
    pub(super) chunk: Option<Chunk>,
}

/// Result of handling a PDU's data segment.
pub(super) enum Taken {
    /// The data was processed in place.
    Done,
    /// The data is still to come, or was not kept: put it into this sink.
    Into(Sink),
}

impl Front {
    /// Handles a chunk that the ring has received.
    pub(super) fn received(&mut self, index: u32, segment: Segment, chunk: Chunk, turn: &mut Turn<'_>) {
        self.chunk_uses.received(chunk);
        let waits = self.connection_mut(index).is_none_or(|c| {
            (c.moved, c.heard) = (true, true);
            c.paused || c.ending
        });
        let used = if waits { 0 } else { self.consume(index, segment, Some(chunk), turn) };
        if used < segment.len {
            self.put_aside(index, segment.slice(used, segment.len - used), turn);
        }
        self.chunk_uses.release(chunk, turn.ring);
        self.fill_directly(index, turn);
    }

    /// Moves bytes that cannot be processed now to the backlog, and stops receiving.
    fn put_aside(&mut self, index: u32, rest: Segment, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if connection.ending {
            return;
        }
        let Some(memory) = turn.ring.allocate(rest.len) else {
            return self.lose(index, EndReason::Evicted, turn);
        };
        turn.ring.copy(rest, memory);
        connection.backlog.push_back(memory);
        if connection.receiving == Receiving::Chunks {
            connection.receiving = Receiving::Stopping;
            turn.ring.receive_stop(connection.socket);
        }
        self.charge_anyway(index, charge_of(memory));
    }

    /// Continues with the backlog, and then with the socket.
    pub(super) fn take_up(&mut self, index: u32, turn: &mut Turn<'_>) {
        loop {
            let Some(connection) = self.connection_mut(index) else { return };
            if connection.unsent.replies >= UNSENT_MAX {
                return;
            }
            connection.paused = false;
            let Some(segment) = connection.backlog.pop_front() else { break };
            let used = self.consume(index, segment, None, turn);
            let Some(connection) = self.connection_mut(index) else { return };
            let rest = segment.slice(used, segment.len - used);
            if rest.len > 0 && !connection.ending {
                // The arena frees whole blocks only, so the rest moves to its own block.
                match turn.ring.allocate(rest.len) {
                    Some(memory) => {
                        turn.ring.copy(rest, memory);
                        connection.backlog.push_front(memory);
                        self.charge_anyway(index, charge_of(memory));
                    }
                    None => self.lose(index, EndReason::Evicted, turn),
                }
                return self.release(index, segment, turn.ring);
            }
            self.release(index, segment, turn.ring);
        }
        self.fill_directly(index, turn);
        self.receive_on(index, turn);
    }

    /// Receives more, unless a receive is in progress: chunks, or, while large data segments follow each
    /// other, only the next header, so that the data can be received directly into its memory.
    fn receive_on(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if connection.receiving != Receiving::No || connection.paused || connection.ending {
            return;
        }
        if connection.bulk && matches!(connection.input, Input::Header) && connection.stash_len == 0 {
            let len = (BHS_LEN + if connection.header_digest { DIGEST_LEN } else { 0 }) as u32;
            connection.header = connection.header.or_else(|| turn.ring.allocate(len));
            if let Some(memory) = connection.header {
                connection.receiving = Receiving::Header;
                return turn.ring.receive_into(connection.socket, memory);
            }
        }
        connection.receiving = Receiving::Chunks;
        turn.ring.receive(connection.socket);
    }

    /// Processes as much of `segment` as possible; returns the number of bytes consumed.
    fn consume(&mut self, index: u32, segment: Segment, chunk: Option<Chunk>, turn: &mut Turn<'_>) -> u32 {
        let mut at = 0;
        loop {
            let Some(connection) = self.connection_mut(index) else { return segment.len };
            let rest = segment.slice(at, segment.len - at);
            match &mut connection.input {
                Input::Header => {
                    if connection.unsent.replies >= UNSENT_MAX {
                        connection.paused = true;
                        return at;
                    }
                    match self.take_header(index, rest, chunk, turn) {
                        Some(used) => at += used,
                        None => return segment.len,
                    }
                    if at == segment.len {
                        return at;
                    }
                }
                Input::Data(data) => {
                    let part = rest.len.min(data.len - data.filled);
                    let used = part + take_trailer(data, turn.ring.bytes(rest.slice(part, rest.len - part)));
                    at += used;
                    if part > 0 {
                        self.take_data(index, rest.slice(0, part), turn);
                    }
                    match self.connection(index).map(|c| &c.input) {
                        Some(Input::Data(data)) if data.is_whole() => self.data_complete(index, turn),
                        Some(Input::Data(_)) => {
                            self.budget.look();
                            return at;
                        }
                        _ => {}
                    }
                }
                Input::Over => return segment.len,
            }
        }
    }

    /// Takes a header, or part of one, from the start of `rest`, and the data segment after it if that is
    /// complete. Returns the number of bytes consumed, or `None` if the connection was lost.
    fn take_header(
        &mut self,
        index: u32,
        rest: Segment,
        chunk: Option<Chunk>,
        turn: &mut Turn<'_>,
    ) -> Option<u32> {
        let connection = self.connection_mut(index)?;
        let digest_len = if connection.header_digest { DIGEST_LEN } else { 0 };
        let bytes = turn.ring.bytes(rest);
        let have = usize::from(connection.stash_len);
        let mut bhs: Bhs = [0; BHS_LEN];
        if have == 0
            && let Some(start) = bytes.get(..BHS_LEN + digest_len)
            && start[4] == 0
        {
            bhs.copy_from_slice(&start[..BHS_LEN]);
            if digest_len > 0 && digest::of(&bhs) != start[BHS_LEN..] {
                self.header_digest_wrong(index, turn);
                return None;
            }
            let used = (BHS_LEN + digest_len) as u32;
            return self
                .header_complete(index, &bhs, 0, rest.slice(used, rest.len - used), chunk, turn)
                .map(|n| used + n);
        }
        // The header arrives in parts: its first 48 bytes determine its length.
        let mut want = BHS_LEN;
        let mut taken = 0;
        loop {
            let filled = have + taken;
            if filled >= BHS_LEN {
                want = BHS_LEN + usize::from(connection.stash[4]) * 4 + digest_len;
            }
            let part = (want - filled).min(bytes.len() - taken);
            connection.stash[filled..filled + part].copy_from_slice(&bytes[taken..taken + part]);
            taken += part;
            if have + taken < want {
                connection.stash_len = (have + taken) as u16;
                self.budget.look();
                return Some(taken as u32);
            }
            if want > BHS_LEN || have + taken > BHS_LEN {
                break;
            }
            // The header has exactly 48 bytes.
            if connection.stash[4] == 0 && digest_len == 0 {
                break;
            }
        }
        connection.stash_len = 0;
        let ahs_len = want - BHS_LEN - digest_len;
        bhs.copy_from_slice(&connection.stash[..BHS_LEN]);
        let covered = BHS_LEN + ahs_len;
        if digest_len > 0 && digest::of(&connection.stash[..covered]) != connection.stash[covered..want] {
            self.header_digest_wrong(index, turn);
            return None;
        }
        let used = taken as u32;
        let behind = rest.slice(used, rest.len - used);
        self.header_complete(index, &bhs, ahs_len, behind, chunk, turn).map(|n| used + n)
    }

    /// Drops the connection because a header digest is wrong: the lengths in the header cannot be trusted
    /// (RFC 7143, section 7.7).
    #[cold]
    fn header_digest_wrong(&mut self, index: u32, turn: &mut Turn<'_>) {
        self.count_digest_error(index);
        self.lose(index, EndReason::Protocol, turn);
    }

    fn count_digest_error(&self, index: u32) {
        if let Some(session) = self.connection(index).and_then(|c| self.session(c.session)) {
            SessionCounters::add(&session.counters.digest_errors, 1);
        }
    }

    /// Handles a complete header, whose additional headers are in the stash. Processes its PDU if all of
    /// its data is in `behind`; otherwise the data comes next. Returns the number of bytes of `behind`
    /// consumed.
    fn header_complete(
        &mut self,
        index: u32,
        bhs: &Bhs,
        ahs_len: usize,
        behind: Segment,
        chunk: Option<Chunk>,
        turn: &mut Turn<'_>,
    ) -> Option<u32> {
        let connection = self.connection_mut(index)?;
        let (_, len) = lengths(bhs);
        if len > connection.receive_max {
            // The data segment is longer than the target declared to accept (section 13.12).
            self.reject(index, bhs, RejectReason::ProtocolError, turn);
            self.lose_after_sending(index, EndReason::Protocol, turn);
            return None;
        }
        connection.bhs = *bhs;
        let parsed = pdu::parse(bhs);
        let has_digest = connection.data_digest;
        if len == 0 {
            match parsed {
                Ok(header) => {
                    self.dispatch(index, &header, ahs_len, None, turn);
                }
                Err(error) => self.refuse(index, bhs, error, turn),
            }
            return self.connection(index).map(|_| 0);
        }
        let pad = padding(len);
        let trailer_len = pad + if has_digest { DIGEST_LEN as u32 } else { 0 };
        if behind.len >= len + trailer_len {
            let (data, trailer) = (behind.slice(0, len), behind.slice(len, trailer_len));
            let whole = behind.slice(0, len + pad);
            let wrong =
                has_digest && digest::of(turn.ring.bytes(whole)) != turn.ring.bytes(trailer)[pad as usize..];
            match parsed {
                Ok(header) if wrong => self.data_digest_wrong(index, &header, ahs_len, turn),
                Ok(header) => {
                    self.dispatch(index, &header, ahs_len, Some(Source { data, chunk }), turn);
                }
                Err(error) => self.refuse(index, bhs, error, turn),
            }
            return self.connection(index).map(|_| len + trailer_len);
        }
        let (pdu, immediate, sink) = match parsed {
            Ok(header) => match self.dispatch(index, &header, ahs_len, None, turn) {
                Taken::Into(Sink::Task(id, _)) if !self.awaits_data(id, index, &header.pdu) => {
                    (None, false, Sink::Discard)
                }
                Taken::Into(sink) => (Some(header.pdu), header.immediate, sink),
                Taken::Done => (None, false, Sink::Discard),
            },
            Err(error) => {
                self.refuse(index, bhs, error, turn);
                (None, false, Sink::Discard)
            }
        };
        let connection = self.connection_mut(index)?;
        if connection.ending {
            return None;
        }
        connection.input = Input::Data(DataInput {
            pdu,
            immediate,
            sink,
            len,
            filled: 0,
            digest: Digest::new(),
            trailer: [0; 8],
            trailer_len: trailer_len as u8,
            trailer_filled: 0,
        });
        self.budget.look();
        Some(0)
    }

    /// Returns whether a task still awaits the data segment of a PDU that was dispatched. A management
    /// function that waited for the PDU's number may meanwhile have aborted the task, and its slot may have
    /// been reused.
    fn awaits_data(&self, id: TaskId, index: u32, pdu: &Request) -> bool {
        let itt = match pdu {
            Request::ScsiCommand(pdu) => pdu.itt,
            Request::DataOut(pdu) => pdu.itt,
            _ => return false,
        };
        self.tasks.find(id).is_some_and(|task| task.filling && task.connection == index && task.itt == itt)
    }

    /// Rejects a header that is not a valid PDU, and skips its data.
    fn refuse(&mut self, index: u32, bhs: &Bhs, error: PduError, turn: &mut Turn<'_>) {
        self.reject(index, bhs, error.reject_reason(), turn);
    }

    /// Takes part of a data segment.
    fn take_data(&mut self, index: u32, part: Segment, turn: &mut Turn<'_>) {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let Input::Data(data) = &mut connection.input else { return };
        if connection.data_digest {
            data.digest.update(turn.ring.bytes(part));
        }
        let (from, len) = (data.filled, part.len);
        data.filled += len;
        let (memory, offset) = match data.sink {
            Sink::Discard => return,
            Sink::Own(memory) => (memory, from),
            Sink::Task(id, offset) => match self.tasks.of(id).memory {
                Memory::Own(memory) => (memory, offset.saturating_add(from)),
                Memory::Chunk(..) | Memory::None => return,
            },
        };
        // Data beyond the memory is more than the command takes.
        let keeps = memory.len.saturating_sub(offset).min(len);
        if keeps > 0 {
            turn.ring.copy(part.slice(0, keeps), memory.slice(offset, keeps));
        }
    }

    /// Handles a data segment that has arrived in parts, with padding and digest.
    fn data_complete(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        let Input::Data(data) = std::mem::replace(&mut connection.input, Input::Header) else { return };
        let pad = usize::from(data.trailer_len & 3);
        let right = !connection.data_digest || {
            let mut digest = data.digest;
            digest.update(&data.trailer[..pad]);
            digest.finish() == data.trailer[pad..pad + DIGEST_LEN]
        };
        let bhs = connection.bhs;
        match (data.sink, data.pdu) {
            (Sink::Task(id, _), Some(pdu)) => {
                self.tasks.of_mut(id).filling = false;
                if !right {
                    self.reject_data(index, &bhs, turn);
                    self.tasks.of_mut(id).broken = Some(DIGEST_SENSE);
                }
                self.task_data_complete(id, &pdu, turn);
            }
            (Sink::Own(memory), Some(pdu)) if right => {
                let header = Header { pdu, immediate: data.immediate, ahs_len: 0, data_len: data.len };
                let source = Source { data: memory, chunk: None };
                self.dispatch(index, &header, 0, Some(source), turn);
                self.release(index, memory, turn.ring);
            }
            (sink, pdu) => {
                if let Sink::Own(memory) = sink {
                    self.release(index, memory, turn.ring);
                }
                if !right {
                    self.reject_data(index, &bhs, turn);
                    // A numbered PDU that was rejected is not counted as received: at ErrorRecoveryLevel 0
                    // it is never retransmitted, but only the initiator can know that.
                } else if let Some(pdu) = pdu {
                    self.skipped_data_complete(index, &pdu, data.immediate, turn);
                }
            }
        }
    }

    /// Handles a data segment whose digest is wrong: sends a Reject, and fails the command that the data
    /// belongs to (section 7.7).
    fn reject_data(&mut self, index: u32, bhs: &Bhs, turn: &mut Turn<'_>) {
        self.count_digest_error(index);
        self.reject(index, bhs, RejectReason::DataDigestError, turn);
    }

    fn data_digest_wrong(
        &mut self,
        index: u32,
        header: &Header<Request>,
        ahs_len: usize,
        turn: &mut Turn<'_>,
    ) {
        let Some(bhs) = self.connection(index).map(|connection| connection.bhs) else { return };
        self.reject_data(index, &bhs, turn);
        match header.pdu {
            Request::ScsiCommand(_) | Request::DataOut(_) => {
                if let Taken::Into(Sink::Task(id, _)) = self.dispatch(index, header, ahs_len, None, turn)
                    && self.awaits_data(id, index, &header.pdu)
                {
                    let task = self.tasks.of_mut(id);
                    (task.filling, task.broken) = (false, Some(DIGEST_SENSE));
                    self.task_data_complete(id, &header.pdu, turn);
                }
            }
            _ => {}
        }
    }

    /// Receives a data segment directly into its memory if much of it is still to come.
    fn fill_directly(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let Input::Data(data) = &connection.input else { return };
        let Sink::Task(id, offset) = data.sink else { return };
        let left = data.len - data.filled;
        if left < DIRECT_FILL_MIN || connection.ending || connection.paused || !connection.backlog.is_empty()
        {
            return;
        }
        let task = self.tasks.of(id);
        // Before this phase the memory may still be replaced.
        let (Phase::Data, Memory::Own(memory)) = (task.phase, task.memory) else { return };
        let at = offset.saturating_add(data.filled);
        if memory.len.saturating_sub(at) < left {
            return;
        }
        match connection.receiving {
            Receiving::Chunks => {
                connection.receiving = Receiving::Stopping;
                turn.ring.receive_stop(connection.socket);
            }
            Receiving::No => {
                let step =
                    if connection.slow && left >= SLOW_STEP + DIRECT_FILL_MIN { SLOW_STEP } else { left };
                let part = memory.slice(at, step);
                // Without padding and digest the next header can be received alone.
                connection.bulk = data.trailer_len == 0;
                connection.receiving = Receiving::Data(part);
                turn.ring.receive_into(connection.socket, part);
            }
            Receiving::Stopping | Receiving::Data(_) | Receiving::Header => {}
        }
    }

    /// Handles the end of a receive into memory: the ring has filled it, or reached the end of the stream.
    pub(super) fn filled(&mut self, index: u32, result: i64, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        (connection.moved, connection.heard) = (true, true);
        let receiving = std::mem::replace(&mut connection.receiving, Receiving::No);
        let memory = match (receiving, connection.header) {
            (Receiving::Data(memory), _) => memory,
            (Receiving::Header, Some(memory)) => memory,
            _ => return,
        };
        if connection.ending || result != i64::from(memory.len) {
            connection.bulk = false;
            connection.header.take().into_iter().for_each(|header| turn.ring.free(header));
            return self.fill_failed(index, turn);
        }
        match receiving {
            Receiving::Data(part) => {
                connection.slow = !connection.still.is_zero();
                let has_digest = connection.data_digest;
                if let Input::Data(data) = &mut connection.input {
                    if has_digest {
                        data.digest.update(turn.ring.bytes(part));
                    }
                    data.filled += part.len;
                    if data.is_whole() {
                        self.data_complete(index, turn);
                    }
                }
            }
            _ => {
                connection.bulk = lengths_of(turn.ring.bytes(memory)) >= DIRECT_FILL_MIN;
                // All of it is consumed: it is a header, or the start of one with additional headers.
                self.consume(index, memory, None, turn);
                if let Some(connection) = self.connection_mut(index)
                    && !connection.bulk
                {
                    connection.header.take().into_iter().for_each(|header| turn.ring.free(header));
                }
            }
        }
        self.mark(index);
    }

    /// Handles a failed receive into memory: the connection failed, or was ended before.
    fn fill_failed(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if connection.ending {
            if let Input::Data(DataInput { sink: Sink::Own(memory), .. }) =
                std::mem::replace(&mut connection.input, Input::Over)
            {
                self.release(index, memory, turn.ring);
            }
            self.mark(index);
        } else {
            self.lose(index, EndReason::ConnectionLost, turn);
        }
    }

    /// Allocates memory of the connection for a data segment that does not belong to a task.
    pub(super) fn own_sink(&mut self, index: u32, len: u32, turn: &mut Turn<'_>) -> Sink {
        match turn.ring.allocate(len) {
            Some(memory) => {
                self.charge_anyway(index, len.into());
                Sink::Own(memory)
            }
            None => {
                self.lose(index, EndReason::Evicted, turn);
                Sink::Discard
            }
        }
    }

    /// Copies a data segment, so that it outlives the chunk or memory that contains it.
    pub(super) fn keep_data(&mut self, index: u32, source: Source, turn: &mut Turn<'_>) -> Option<Segment> {
        let bytes = turn.ring.bytes(source.data).to_vec();
        let memory = keep(&bytes, turn.ring)?;
        self.charge_anyway(index, memory.len.into());
        Some(memory)
    }
}

/// Additional sense code and qualifier of a command whose data had a wrong digest: ABORTED COMMAND,
/// protocol service CRC error (section 11.4.7.2).
pub(super) const DIGEST_SENSE: (u8, u8) = (0x47, 0x05);

/// Returns the data segment length in the bytes of a header.
fn lengths_of(bytes: &[u8]) -> u32 {
    bytes.first_chunk::<BHS_LEN>().map_or(0, |bhs| lengths(bhs).1)
}

/// Consumes padding and digest from the bytes after the data. Returns how many bytes.
fn take_trailer(data: &mut DataInput, bytes: &[u8]) -> u32 {
    let at = usize::from(data.trailer_filled);
    let part = bytes.len().min(usize::from(data.trailer_len) - at);
    // These bytes can only follow the data if all of the data came before them.
    data.trailer[at..at + part].copy_from_slice(&bytes[..part]);
    data.trailer_filled += part as u8;
    part as u32
}
