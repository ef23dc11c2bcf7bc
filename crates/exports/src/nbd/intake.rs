//! Turns bytes into requests: parses a client's input in place.
//!
//! Bytes come in chunks (the ring's memory, shared by all connections) or from the backlog (the connection's
//! memory, filled while a request was waiting). [`Front::consume`] processes them until they are used up or
//! the next request has to wait.

use super::connection::{Connection, HELD_MAX, Input, READ_AHEAD_MAX, Receiving};
use super::{DeviceFacts, Front, Memory, Pdu, Stage, Turn, drop_payload};
use crate::FrontNumber;
use crate::budget::{FLOOR, SLOW_STEP, charge_of};
use crate::outbox::Owed;
use block::{Bytes, Extent, Flags, Op, Request as BlockRequest, Segment};
use proto::nbd::extents::StatusQuery;
use proto::nbd::server::{self, Accepted, Refused, Submission};
use proto::nbd::{Command, CommandFlags, Request, request};
use queue::{Owner, Ring};
use ring::{Chunk, KernelRing};
use std::sync::atomic::Ordering::Relaxed;

/// A payload is received directly into its memory if at least this many bytes are still to come; fewer are
/// copied from chunks, which is cheaper than stopping and restarting the stream of chunks.
const DIRECT_FILL_MIN: u32 = 96 << 10;
/// Shortest read, in bytes, for which holes are queried first if the client accepts them in the reply.
const MAPPED_READ_MIN: u64 = 32 << 10;
/// Bytes of extent records for such a read: 32 extents; the rest counts as data.
const MAP_LEN: u32 = 512;
/// Bytes of extent records for BLOCK_STATUS: 512 extents per reply.
const STATUS_LEN: u32 = 8 << 10;
/// Maximum number of descriptors for those extents, with one more for a block that two extents share.
pub(super) const DESCRIPTORS_MAX: usize = STATUS_LEN as usize / Extent::RECORD_LEN + 1;

/// Copies `bytes` to arena memory.
pub(super) fn keep(bytes: &[u8], ring: &mut KernelRing) -> Option<Segment> {
    let len = u32::try_from(bytes.len()).ok()?;
    let memory = ring.allocate(len)?;
    ring.bytes_mut(memory).copy_from_slice(bytes);
    Some(memory)
}

/// Returns what the connection owes for this request.
pub(super) fn owed_for(request: &Request) -> Owed {
    let moves_data = matches!(request.command, Command::Read | Command::Write);
    Owed { replies: 1, bytes: if moves_data { request.len } else { 0 } }
}

/// Reason why a request waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wait {
    /// Replies have to be sent first.
    Room,
    /// Other connections hold the memory that it needs.
    Memory,
    /// No tag is free.
    Tag,
}

impl Front {
    /// Handles a chunk that the ring has received.
    pub(super) fn received(&mut self, index: u32, segment: Segment, chunk: Chunk, turn: &mut Turn<'_>) {
        self.chunk_uses.received(chunk);
        let waits = self.connection_mut(index).is_some_and(|c| {
            c.moved = true;
            c.paused || c.awaits_memory
        });
        let used = if waits { 0 } else { self.consume(index, segment, Some(chunk), turn) };
        if used < segment.len {
            self.put_aside(index, segment.slice(used, segment.len - used), turn);
        }
        self.release_chunk(chunk, turn.ring);
        self.fill_directly(index, turn);
    }

    /// Moves bytes that cannot be processed now to the backlog, and stops receiving.
    fn put_aside(&mut self, index: u32, rest: Segment, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if connection.ending {
            return;
        }
        let Some(memory) = turn.ring.allocate(rest.len) else { return self.end(index, turn) };
        turn.ring.copy(rest, memory);
        connection.backlog.push_back(memory);
        if connection.receiving == Receiving::Chunks {
            connection.receiving = Receiving::Stopping;
            turn.ring.receive_stop(connection.socket);
        }
        self.charge_anyway(index, charge_of(memory));
    }

    /// Continues with the waiting request, the backlog, and then the socket.
    pub(super) fn take_up(&mut self, index: u32, turn: &mut Turn<'_>) {
        loop {
            let Some(connection) = self.connection_mut(index) else { return };
            if connection.awaits_memory {
                return;
            }
            connection.paused = false;
            let Some(segment) = connection.backlog.pop_front() else { break };
            let used = self.consume(index, segment, None, turn);
            let Some(connection) = self.connection_mut(index) else { return };
            if used < segment.len && !connection.ending {
                // The arena frees whole blocks only, so the rest moves to its own block.
                return self.put_back(index, segment, used, turn);
            }
            let ends = connection.ending;
            self.release(index, segment, turn.ring);
            if ends {
                return;
            }
        }
        // A request may still wait with no bytes after it.
        self.consume(index, Segment::EMPTY, None, turn);
        self.fill_directly(index, turn);
        self.receive_on(index, turn);
    }

    /// Receives more, unless a receive is in progress: chunks, or, while large payloads follow each other,
    /// only the next header, so that the payload can be received directly into its memory.
    fn receive_on(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        let waits = connection.paused || connection.awaits_memory || connection.ending;
        if connection.receiving != Receiving::No || waits {
            return;
        }
        if connection.bulk && matches!(connection.input, Input::Header { have: 0, .. }) {
            let len = request::header_len(connection.session.extended()) as u32;
            connection.header = connection.header.or_else(|| turn.ring.allocate(len));
            if let Some(memory) = connection.header {
                (connection.receiving, connection.asked) = (Receiving::Filling, memory.len);
                return turn.ring.receive_into(connection.socket, memory);
            }
        }
        connection.receiving = Receiving::Chunks;
        turn.ring.receive(connection.socket);
    }

    fn put_back(&mut self, index: u32, segment: Segment, used: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if used == 0 {
            return connection.backlog.push_front(segment);
        }
        let rest = segment.slice(used, segment.len - used);
        match turn.ring.allocate(rest.len) {
            Some(memory) => {
                turn.ring.copy(rest, memory);
                connection.backlog.push_front(memory);
                self.charge_anyway(index, charge_of(memory));
            }
            None => self.end(index, turn),
        }
        self.release(index, segment, turn.ring);
    }

    /// Processes as much of `segment` as possible; returns the number of bytes consumed.
    fn consume(&mut self, index: u32, segment: Segment, chunk: Option<Chunk>, turn: &mut Turn<'_>) -> u32 {
        let mut at = 0;
        loop {
            let Some(connection) = self.connection_mut(index) else { return segment.len };
            let rest = segment.slice(at, segment.len - at);
            match &mut connection.input {
                Input::Header { stash, have } => {
                    let extended = connection.session.extended();
                    let (want, bytes) = (request::header_len(extended), turn.ring.bytes(rest));
                    let header = if *have == 0 && bytes.len() >= want {
                        at += want as u32;
                        &bytes[..want]
                    } else {
                        let filled = usize::from(*have);
                        let taken = bytes.len().min(want - filled);
                        stash[filled..filled + taken].copy_from_slice(&bytes[..taken]);
                        *have += taken as u8;
                        at += taken as u32;
                        &stash[..filled + taken]
                    };
                    match request::parse(header, extended) {
                        Ok(Some((request, _))) => connection.input = Input::Waiting(request),
                        Ok(None) => {
                            if matches!(connection.input, Input::Header { have: 1.., .. }) {
                                self.budget.look();
                            }
                            return at;
                        }
                        // The rest of the stream cannot be parsed.
                        Err(_) => {
                            self.end(index, turn);
                            return segment.len;
                        }
                    }
                }
                Input::Waiting(request) => {
                    let request = *request;
                    match self.admit(index, request, rest, chunk, turn) {
                        Ok(used) => at += used,
                        Err(wait) => {
                            self.pause(index, wait, turn);
                            return at;
                        }
                    }
                }
                Input::Payload { memory, filled, charged, .. } => {
                    let part = rest.len.min(memory.len - *filled);
                    turn.ring.copy(rest.slice(0, part), memory.slice(*filled, part));
                    *filled += part;
                    at += part;
                    let (is_whole, more) = (*filled == memory.len, filled.saturating_sub(*charged));
                    *charged += more;
                    // The payload arrived in a chunk, and is too small to be worth a wait.
                    if more > 0 {
                        self.charge_anyway(index, more.into());
                    }
                    if !is_whole {
                        self.budget.look();
                        return at;
                    }
                    if let Err(wait) = self.payload_complete(index, turn) {
                        self.pause(index, wait, turn);
                        return at;
                    }
                }
                Input::Refused { left, request, error } => {
                    let part = u64::from(rest.len).min(*left);
                    *left -= part;
                    at += part as u32;
                    if *left > 0 {
                        self.budget.look();
                        return at;
                    }
                    let (request, error) = (*request, *error);
                    connection.input = Input::START;
                    self.answer_at_once(index, &request, Some(error), turn);
                }
                Input::Over => return segment.len,
            }
        }
    }

    fn pause(&mut self, index: u32, wait: Wait, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        connection.paused = true;
        match wait {
            Wait::Tag => self.starved.push_back(index),
            Wait::Room => {}
            Wait::Memory => self.await_memory(index, turn),
        }
    }

    /// Queues a connection for memory.
    fn await_memory(&mut self, index: u32, turn: &mut Turn<'_>) {
        if !self.budget.is_used() {
            // No memory is in use that could be freed: the system is out of memory.
            return self.end(index, turn);
        }
        let Some(connection) = self.connections[index as usize].as_mut() else { return };
        connection.awaits_memory = true;
        let resumed = std::mem::take(&mut connection.resumed);
        self.budget.wait(index, resumed);
        if let (false, Some(served)) = (resumed, &self.queues[usize::from(connection.queue.0)]) {
            served.counts.waited.fetch_add(1, Relaxed);
        }
    }

    /// Accepts a request: checks it, allocates memory and, if its payload has arrived, a tag. Returns how
    /// many of the bytes after its header were consumed.
    fn admit(
        &mut self,
        index: u32,
        request: Request,
        rest: Segment,
        chunk: Option<Chunk>,
        turn: &mut Turn<'_>,
    ) -> Result<u32, Wait> {
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(0) };
        let served = self.queues[usize::from(connection.queue.0)].as_ref();
        let inline = served.is_some_and(|served| served.facts.inline);
        let held_max = if inline && request.command == Command::Read { READ_AHEAD_MAX } else { HELD_MAX };
        if !connection.has_room(owed_for(&request).bytes, held_max) {
            return Err(Wait::Room);
        }
        let submission = match server::check(&connection.session, &request) {
            Ok(Accepted::Submit(submission)) => submission,
            Ok(Accepted::Status(query)) => {
                self.submit_status(index, &request, query, turn)?;
                return Ok(0);
            }
            Ok(Accepted::StatusPayload) => return self.await_payload(index, request, None, turn),
            Ok(Accepted::Empty) => {
                connection.input = Input::START;
                self.answer_at_once(index, &request, None, turn);
                return Ok(0);
            }
            Ok(Accepted::Disconnect) | Err(Refused::Drop(_)) => {
                self.end(index, turn);
                return Ok(0);
            }
            Err(Refused::Reply(error)) if request.payload_len > 0 => {
                connection.input = Input::Refused { left: request.payload_len, request, error };
                return Ok(0);
            }
            Err(Refused::Reply(error)) => {
                connection.input = Input::START;
                self.answer_at_once(index, &request, Some(error), turn);
                return Ok(0);
            }
        };
        match chunk {
            _ if request.payload_len == 0 => {
                self.submit(index, &request, submission, Memory::None, turn)?;
                Ok(0)
            }
            Some(chunk) if u64::from(rest.len) >= request.payload_len => {
                self.chunk_uses.hold(chunk);
                let payload = rest.slice(0, request.payload_len as u32);
                let outcome = self.submit(index, &request, submission, Memory::Chunk(chunk, payload), turn);
                if outcome.is_err() {
                    self.release_chunk(chunk, turn.ring);
                }
                outcome.map(|()| payload.len)
            }
            _ => self.await_payload(index, request, Some(submission), turn),
        }
    }

    /// Allocates `len` bytes and charges them to the connection, together with `more` bytes for the
    /// request's next step.
    fn hold(&mut self, index: u32, len: u32, more: u64, turn: &mut Turn<'_>) -> Result<Segment, Wait> {
        if !self.charge(index, u64::from(len) + more, false) {
            return Err(Wait::Memory);
        }
        let memory = turn.ring.allocate(len);
        if memory.is_none() {
            self.discharge(index, u64::from(len) + more);
        }
        memory.ok_or(Wait::Memory)
    }

    /// Starts receiving the payload of a request into its own memory. Address space is allocated at once,
    /// pages as bytes arrive.
    fn await_payload(
        &mut self,
        index: u32,
        request: Request,
        submission: Option<Submission>,
        turn: &mut Turn<'_>,
    ) -> Result<u32, Wait> {
        let len = request.payload_len as u32;
        let mut charged = len.min(FLOOR as u32);
        if !self.charge(index, charged.into(), false) {
            return Err(Wait::Memory);
        }
        let Some((memory, resident)) = turn.ring.reserve(len) else {
            self.discharge(index, charged.into());
            return Err(Wait::Memory);
        };
        // Memory that already has pages is faster to reuse than to fault in anew.
        if resident && charged < len {
            let rest = u64::from(len - charged);
            if self.budget.is_calm(rest) {
                self.charge_anyway(index, rest);
                charged = len;
            } else {
                turn.ring.discard(memory);
            }
        }
        if let Some(connection) = self.connection_mut(index) {
            connection.input = Input::Payload { request, submission, memory, filled: 0, charged };
        }
        self.budget.look();
        Ok(0)
    }

    /// Submits a request whose payload is complete.
    fn payload_complete(&mut self, index: u32, turn: &mut Turn<'_>) -> Result<(), Wait> {
        let Some(connection) = self.connection_mut(index) else { return Ok(()) };
        let Input::Payload { request, submission, memory, .. } = connection.input else { return Ok(()) };
        match submission {
            Some(submission) => self.submit(index, &request, submission, Memory::Own(memory), turn),
            None => {
                let query = server::status_query(&connection.session, &request, turn.ring.bytes(memory));
                match query {
                    Ok(query) => self.submit_status(index, &request, query, turn)?,
                    Err(error) => {
                        connection.input = Input::START;
                        self.answer_at_once(index, &request, Some(error), turn);
                    }
                }
                self.release(index, memory, turn.ring);
                Ok(())
            }
        }
    }

    /// Submits a request to the stack.
    fn submit(
        &mut self,
        index: u32,
        request: &Request,
        submission: Submission,
        mut memory: Memory,
        turn: &mut Turn<'_>,
    ) -> Result<(), Wait> {
        let Some(connection) = self.connection(index) else { return Ok(()) };
        let Some(served) = &self.queues[usize::from(connection.queue.0)] else { return Ok(()) };
        let DeviceFacts { zero_copy_reads, allows_zero_copy, sparse, .. } = served.facts;
        let Submission { mut op, mut flags, offset, len } = submission;
        let (mut stage, mut reserved) = (Stage::Only, 0);
        if op == Op::Read {
            let mapped = sparse
                && len.0 >= MAPPED_READ_MIN
                && connection.session.structured()
                && !request.flags.contains(CommandFlags::DF);
            if mapped {
                (op, stage) = (Op::Extents, Stage::Map);
                // The read that follows must not wait for memory, because it would hold a tag during the
                // wait.
                reserved = if zero_copy_reads { 0 } else { len.0 };
                memory = Memory::Own(self.hold(index, MAP_LEN, reserved, turn)?);
            } else if zero_copy_reads {
                flags = flags.union(Flags::ZERO_COPY);
            } else {
                if allows_zero_copy {
                    flags = flags.union(Flags::ZERO_COPY);
                }
                memory = Memory::Own(self.hold(index, len.0 as u32, 0, turn)?);
            }
        }
        let req = BlockRequest { offset, len, data: memory.data(), op, flags };
        self.enter(index, Pdu { request: *request, query: None, memory, reserved, stage }, req, turn)
    }

    /// Submits a block status query to the stack.
    fn submit_status(
        &mut self,
        index: u32,
        request: &Request,
        query: StatusQuery,
        turn: &mut Turn<'_>,
    ) -> Result<(), Wait> {
        let room = if query.one { 4 * Extent::RECORD_LEN as u32 } else { STATUS_LEN };
        let memory = Memory::Own(self.hold(index, room, 0, turn)?);
        let mut req = BlockRequest::new(Op::Extents, Bytes(query.offset), Bytes(query.len));
        req.data = memory.data();
        self.enter(
            index,
            Pdu { request: *request, query: Some(query), memory, reserved: 0, stage: Stage::Only },
            req,
            turn,
        )
    }

    /// Takes a tag for a request and submits it. If no tag is free, frees the memory allocated for it.
    fn enter(&mut self, index: u32, pdu: Pdu, req: BlockRequest, turn: &mut Turn<'_>) -> Result<(), Wait> {
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(()) };
        let Some(served) = self.queues[usize::from(connection.queue.0)].as_mut() else { return Ok(()) };
        let queue = turn.queues.touch(connection.queue);
        let Some(tag) = queue.tag() else {
            let waits_in_input = matches!(connection.input, Input::Payload { submission: Some(_), .. });
            if let (Memory::Own(memory), false) = (pdu.memory, waits_in_input) {
                self.release(index, memory, turn.ring);
                self.discharge(index, pdu.reserved);
            }
            return Err(Wait::Tag);
        };
        served.pdus[tag.index()] = pdu;
        connection.input = Input::START;
        connection.in_stack += 1;
        connection.owed.add(owed_for(&pdu.request));
        queue.submit(tag, Owner::new(FrontNumber::Nbd as u8, index), req, turn.ring);
        Ok(())
    }

    /// Receives a payload directly into its memory, if much of it is still to come.
    fn fill_directly(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        let Input::Payload { memory, filled, .. } = connection.input else { return };
        let waits = connection.awaits_memory || connection.ending || !connection.backlog.is_empty();
        if memory.len - filled < DIRECT_FILL_MIN || waits {
            return;
        }
        match connection.receiving {
            Receiving::Chunks => {
                connection.receiving = Receiving::Stopping;
                turn.ring.receive_stop(connection.socket);
            }
            Receiving::No => {
                let step = self.next_step(index);
                let Some(connection) = self.connection_mut(index) else { return };
                if step == 0 {
                    return self.await_memory(index, turn);
                }
                (connection.receiving, connection.asked) = (Receiving::Filling, step);
                connection.bulk = true;
                turn.ring.receive_into(connection.socket, memory.slice(filled, step));
            }
            Receiving::Stopping | Receiving::Filling => {}
        }
    }

    /// Returns how many bytes of a payload to receive next: as many as have already arrived, at least 1
    /// MiB, but fewer from a slow client. Returns 0 if there is no memory yet.
    fn next_step(&mut self, index: u32) -> u32 {
        let Some(connection) = self.connection_mut(index) else { return 0 };
        let Input::Payload { memory, filled, charged, .. } = connection.input else { return 0 };
        let wanted = if connection.slow { SLOW_STEP } else { filled.max(FLOOR as u32) };
        let mut step = wanted.min(memory.len - filled);
        // The last step includes a rest that is too short for a direct receive.
        if memory.len - filled - step < DIRECT_FILL_MIN {
            step = memory.len - filled;
        }
        // A connection that has waited for part of its payload gets memory for all of it, so that it waits
        // only once.
        let end = if connection.resumed { memory.len } else { filled + step };
        let more = end.saturating_sub(charged);
        if more == 0 {
            return step;
        }
        if !self.charge(index, more.into(), true) {
            return charged - filled;
        }
        if let Some(Connection { input: Input::Payload { charged, .. }, .. }) = self.connection_mut(index) {
            *charged += more;
        }
        step
    }

    /// Handles the end of a receive into memory: the ring has filled it, or reached the end of the stream.
    pub(super) fn filled(&mut self, index: u32, result: i64, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        (connection.receiving, connection.moved) = (Receiving::No, true);
        let extended = connection.session.extended();
        let well = match (&mut connection.input, connection.header) {
            (Input::Payload { filled, .. }, _) => {
                *filled += connection.asked;
                connection.slow = !connection.still.is_zero();
                result == i64::from(connection.asked)
            }
            (Input::Header { .. }, Some(header)) if result == i64::from(header.len) => {
                match request::parse(turn.ring.bytes(header), extended) {
                    Ok(Some((request, _))) => {
                        connection.bulk = request.payload_len >= u64::from(DIRECT_FILL_MIN);
                        connection.input = Input::Waiting(request);
                        true
                    }
                    _ => false,
                }
            }
            _ => false,
        };
        if !connection.bulk {
            connection.header.take().into_iter().for_each(|header| turn.ring.free(header));
        }
        if connection.ending || !well {
            let freed = drop_payload(connection, turn.ring);
            connection.bulk = false;
            connection.header.take().into_iter().for_each(|header| turn.ring.free(header));
            self.discharge(index, freed);
            self.end(index, turn);
        }
        self.mark(index);
    }
}
