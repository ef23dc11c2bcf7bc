//! From bytes to requests: what a client sends, parsed where it lies.
//!
//! Bytes come as chunks (the ring's own memory, shared by all connections) or from the backlog (memory
//! of the connection's, filled while there was no room). Either way [`Front::consume`] walks over them
//! until they are used up or the next request has to wait.

use super::budget::{FLOOR, SLOW_STEP, charge_of};
use super::connection::{Connection, HELD_MAX, Input, READ_AHEAD_MAX, Receiving};
use super::outbox::Owed;
use super::{DeviceFacts, Front, Memory, Pdu, Stage, Turn, drop_payload};
use crate::FrontNumber;
use block::{Bytes, Extent, Flags, Op, Request as BlockRequest, Segment};
use proto::nbd::extents::StatusQuery;
use proto::nbd::server::{self, Accepted, Order, Refused};
use proto::nbd::{Command, CommandFlags, Request, request};
use queue::{Owner, Ring};
use ring::{Chunk, KernelRing};
use std::sync::atomic::Ordering::Relaxed;

/// A payload of which this much is still to come is received straight into its memory; less is copied
/// from chunks, which costs less than stopping and starting the stream of chunks.
const DIRECT_FILL_MIN: u32 = 96 << 10;
/// Reads from this length on are looked through for holes when the client can be told of them.
const MAPPED_READ_MIN: u64 = 32 << 10;
/// Bytes of extent records that a mapped read asks for: 32 stretches; what lies behind is data.
const MAP_LEN: u32 = 512;
/// Bytes of extent records for BLOCK_STATUS: 512 stretches a reply.
const STATUS_LEN: u32 = 8 << 10;
/// Descriptors that those can become, and one more for a part that belongs to two.
pub(super) const DESCRIPTORS_MAX: usize = STATUS_LEN as usize / Extent::RECORD_LEN + 1;

/// A copy of `bytes` in arena memory.
pub(super) fn keep(bytes: &[u8], ring: &mut KernelRing) -> Option<Segment> {
    let len = u32::try_from(bytes.len()).ok()?;
    let memory = ring.allocate(len)?;
    ring.bytes_mut(memory).copy_from_slice(bytes);
    Some(memory)
}

/// What taking in a request makes a connection owe.
pub(super) fn owed_for(request: &Request) -> Owed {
    let moves_data = matches!(request.command, Command::Read | Command::Write);
    Owed { replies: 1, bytes: if moves_data { request.len } else { 0 } }
}

/// Why bytes are left over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wait {
    /// For replies to be sent.
    Room,
    /// For memory that other connections hold.
    Memory,
    /// For a tag.
    Tag,
}

impl Front {
    /// The ring has received a chunk.
    pub(super) fn received(&mut self, index: u32, segment: Segment, chunk: Chunk, turn: &mut Turn<'_>) {
        if self.chunk_uses.len() <= chunk.index() {
            self.chunk_uses.resize(chunk.index() + 1, 0);
        }
        self.chunk_uses[chunk.index()] = 1;
        let waits = self.connection_mut(index).is_some_and(|c| {
            c.moved = true;
            c.paused || c.hungry
        });
        let used = if waits { 0 } else { self.consume(index, segment, Some(chunk), turn) };
        if used < segment.len {
            self.put_aside(index, segment.slice(used, segment.len - used), turn);
        }
        self.release_chunk(chunk, turn.ring);
        self.fill_directly(index, turn);
    }

    /// Keep what cannot be looked at now, and have no more come.
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

    /// Go on with what waited, then with what the socket has.
    pub(super) fn take_up(&mut self, index: u32, turn: &mut Turn<'_>) {
        loop {
            let Some(connection) = self.connection_mut(index) else { return };
            if connection.hungry {
                return;
            }
            connection.paused = false;
            let Some(segment) = connection.backlog.pop_front() else { break };
            let used = self.consume(index, segment, None, turn);
            let Some(connection) = self.connection_mut(index) else { return };
            if used < segment.len && !connection.ending {
                // The arena frees by the whole block, so what is left moves to one of its own.
                return self.put_back(index, segment, used, turn);
            }
            let ends = connection.ending;
            self.release(index, segment, turn.ring);
            if ends {
                return;
            }
        }
        // A request may still wait with nothing behind it.
        self.consume(index, Segment::EMPTY, None, turn);
        self.fill_directly(index, turn);
        self.receive_on(index, turn);
    }

    /// Have the next bytes come, if nothing does that yet: as chunks, or, while one large payload follows
    /// another, the next header alone, so that the payload behind it can go where it belongs.
    fn receive_on(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        let waits = connection.paused || connection.hungry || connection.ending;
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

    /// Use up as much of `segment` as there is room for; returns how much that was.
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
                        // The stream cannot be followed any further.
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
                    // It came in a chunk: too little to be worth a wait.
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

    /// Have a connection wait in line for memory.
    fn await_memory(&mut self, index: u32, turn: &mut Turn<'_>) {
        if !self.budget.is_used() {
            // Nobody will give any back: the system has none.
            return self.end(index, turn);
        }
        let Some(connection) = self.connections[index as usize].as_mut() else { return };
        connection.hungry = true;
        let resumed = std::mem::take(&mut connection.resumed);
        self.budget.wait(index, resumed);
        if let (false, Some(lane)) = (resumed, &self.lanes[usize::from(connection.queue.0)]) {
            lane.counts.waited.fetch_add(1, Relaxed);
        }
    }

    /// Take a request in: check it, give it memory and, when its payload is here, a tag. Returns how
    /// many of the bytes behind its header were used.
    fn admit(
        &mut self,
        index: u32,
        request: Request,
        rest: Segment,
        chunk: Option<Chunk>,
        turn: &mut Turn<'_>,
    ) -> Result<u32, Wait> {
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(0) };
        let lane = self.lanes[usize::from(connection.queue.0)].as_ref();
        let in_place = lane.is_some_and(|lane| lane.facts.in_place);
        let held_max = if in_place && request.command == Command::Read { READ_AHEAD_MAX } else { HELD_MAX };
        if !connection.has_room(owed_for(&request).bytes, held_max) {
            return Err(Wait::Room);
        }
        let order = match server::check(&connection.session, &request) {
            Ok(Accepted::Submit(order)) => order,
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
                self.submit(index, &request, order, Memory::None, turn)?;
                Ok(0)
            }
            Some(chunk) if u64::from(rest.len) >= request.payload_len => {
                self.chunk_uses[chunk.index()] += 1;
                let payload = rest.slice(0, request.payload_len as u32);
                let outcome = self.submit(index, &request, order, Memory::Chunk(chunk, payload), turn);
                if outcome.is_err() {
                    self.release_chunk(chunk, turn.ring);
                }
                outcome.map(|()| payload.len)
            }
            _ => self.await_payload(index, request, Some(order), turn),
        }
    }

    /// Memory for `len` bytes, with which the connection is charged, and with `more` for the request's next step.
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

    /// Have the payload of a request come into memory of its own. Address space is taken for all of it, memory as bytes come.
    fn await_payload(
        &mut self,
        index: u32,
        request: Request,
        order: Option<Order>,
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
        // What was used before lies in memory already, and is faster to use again than to get anew.
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
            connection.input = Input::Payload { request, order, memory, filled: 0, charged };
        }
        self.budget.look();
        Ok(0)
    }

    /// All of a payload is here.
    fn payload_complete(&mut self, index: u32, turn: &mut Turn<'_>) -> Result<(), Wait> {
        let Some(connection) = self.connection_mut(index) else { return Ok(()) };
        let Input::Payload { request, order, memory, .. } = connection.input else { return Ok(()) };
        match order {
            Some(order) => self.submit(index, &request, order, Memory::Own(memory), turn),
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

    /// Hand an order to the stack.
    fn submit(
        &mut self,
        index: u32,
        request: &Request,
        order: Order,
        mut memory: Memory,
        turn: &mut Turn<'_>,
    ) -> Result<(), Wait> {
        let Some(connection) = self.connection(index) else { return Ok(()) };
        let Some(lane) = &self.lanes[usize::from(connection.queue.0)] else { return Ok(()) };
        let DeviceFacts { lends, may_lend, sparse, .. } = lane.facts;
        let Order { mut op, mut flags, offset, len } = order;
        let (mut stage, mut reserved) = (Stage::Only, 0);
        if op == Op::Read {
            let mapped = sparse
                && len.0 >= MAPPED_READ_MIN
                && connection.session.structured()
                && !request.flags.has(CommandFlags::DF);
            if mapped {
                (op, stage) = (Op::Extents, Stage::Map);
                // The read that follows does not wait: it would do so with a tag.
                reserved = if lends { 0 } else { len.0 };
                memory = Memory::Own(self.hold(index, MAP_LEN, reserved, turn)?);
            } else if lends {
                flags = flags.with(Flags::MAY_LEND);
            } else {
                if may_lend {
                    flags = flags.with(Flags::MAY_LEND);
                }
                memory = Memory::Own(self.hold(index, len.0 as u32, 0, turn)?);
            }
        }
        let req = BlockRequest { offset, len, data: memory.data(), op, flags };
        self.enter(index, Pdu { request: *request, query: None, memory, reserved, stage }, req, turn)
    }

    /// Ask the stack how a range is backed.
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

    /// Give a request a tag and start it. Without a tag, memory that was made for it is given back.
    fn enter(&mut self, index: u32, pdu: Pdu, req: BlockRequest, turn: &mut Turn<'_>) -> Result<(), Wait> {
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(()) };
        let Some(lane) = self.lanes[usize::from(connection.queue.0)].as_mut() else { return Ok(()) };
        let queue = turn.queues.touch(connection.queue);
        let Some(tag) = queue.tag() else {
            let waits_in_input = matches!(connection.input, Input::Payload { order: Some(_), .. });
            if let (Memory::Own(memory), false) = (pdu.memory, waits_in_input) {
                self.release(index, memory, turn.ring);
                self.discharge(index, pdu.reserved);
            }
            return Err(Wait::Tag);
        };
        lane.pdus[tag.index()] = pdu;
        connection.input = Input::START;
        connection.in_stack += 1;
        connection.owed.add(owed_for(&pdu.request));
        queue.submit(tag, Owner::new(FrontNumber::Nbd as u8, index), req, turn.ring);
        Ok(())
    }

    /// When much of a payload is still to come, have it received where it belongs.
    fn fill_directly(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        let Input::Payload { memory, filled, .. } = connection.input else { return };
        let waits = connection.hungry || connection.ending || !connection.backlog.is_empty();
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

    /// How much of a payload to receive next: as much as there is of it already, a megabyte at least, and less of a client
    /// that is slow. 0: there is no memory for it yet.
    fn next_step(&mut self, index: u32) -> u32 {
        let Some(connection) = self.connection_mut(index) else { return 0 };
        let Input::Payload { memory, filled, charged, .. } = connection.input else { return 0 };
        let wanted = if connection.slow { SLOW_STEP } else { filled.max(FLOOR as u32) };
        let mut step = wanted.min(memory.len - filled);
        // A rest that is smaller than what is received so comes with the last step.
        if memory.len - filled - step < DIRECT_FILL_MIN {
            step = memory.len - filled;
        }
        // Who has waited in line for a part of it does so once.
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

    /// The ring has filled the memory of a payload or a header, or met the end of the stream.
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
