//! An initiator of the simulation: it sends commands over several connections, whose bytes the simulation
//! delivers, loses or damages, and checks the target's answers.

use super::model::{BLOCK, BLOCKS, Model, Shared, block_of, number_of};
use super::target::{Agreed, Opened};
use proto::iscsi::digest;
use proto::iscsi::pdu::{
    Bhs, DataOut, Header, NopOut, Numbers, R2t, RESERVED_TAG, Request, Response, ScsiCommand, TaskAttribute,
    TaskFunction, TaskManagement, TaskResult, lengths, padding, parse_response,
};
use proto::iscsi::sequence::before;
use sim::Rng;
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

/// A connection of a session.
pub(super) struct Connection {
    stream: Option<UnixStream>,
    /// PDUs that were not delivered yet; of the first one, a part may have been delivered.
    out: VecDeque<Vec<u8>>,
    sent: usize,
    input: Vec<u8>,
    stat_sn: u32,
}

enum Kind {
    Write {
        number: u64,
        data: Vec<u8>,
    },
    Read {
        block: usize,
        begun: u64,
        data: Vec<u8>,
    },
    /// A task management function, and the tags of the commands that it aborts.
    Function {
        aborts: Vec<u32>,
    },
    Ping,
}

struct Command {
    kind: Kind,
    connection: usize,
    cmd_sn: u32,
    /// The function that aborted the command was answered: usually no answer of the command follows.
    is_aborted: bool,
}

/// A session as its initiator sees it.
pub(super) struct Session {
    pub(super) opened: Opened,
    number: u64,
    pub(super) connections: Vec<Connection>,
    next_cmd_sn: u32,
    numbers: Numbers,
    commands: BTreeMap<u32, Command>,
    next_tag: u32,
    /// A PDU was dropped or damaged: a number may be missing for ever.
    is_damaged: bool,
    /// Steps without progress.
    pub(super) idle: u32,
    /// A connection was lost: the session is over.
    pub(super) is_lost: bool,
}

/// Results of a run.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) requests: u64,
    pub(super) good: u64,
    pub(super) aborts: u64,
}

/// State of the run that a step of a session uses.
pub(super) struct Context<'a> {
    pub(super) rng: &'a mut Rng,
    pub(super) model: &'a mut Model,
    pub(super) shared: &'a Mutex<Shared>,
    pub(super) agreed: &'a Agreed,
    pub(super) now: u64,
    pub(super) counts: &'a mut Counts,
}

fn cdb(code: u8, block: usize, count: usize) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = code;
    cdb[2..6].copy_from_slice(&(block as u32).to_be_bytes());
    cdb[7..9].copy_from_slice(&(count as u16).to_be_bytes());
    cdb
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Connection {
        Connection { stream: Some(stream), out: VecDeque::new(), sent: 0, input: Vec::new(), stat_sn: 1 }
    }

    /// Whether no PDU waits for its delivery to the target.
    fn is_empty(&self) -> bool {
        self.out.is_empty()
    }
}

impl Session {
    pub(super) fn new(opened: Opened, number: u64, first: u32, depth: u16) -> Session {
        let max_cmd_sn = first.wrapping_add(u32::from(depth) - 1);
        Session {
            opened,
            number,
            connections: Vec::new(),
            next_cmd_sn: first,
            numbers: Numbers { stat_sn: 0, exp_cmd_sn: first, max_cmd_sn },
            commands: BTreeMap::new(),
            next_tag: 1,
            is_damaged: false,
            idle: 0,
            is_lost: false,
        }
    }

    /// Whether commands wait for an answer.
    pub(super) fn is_waiting(&self) -> bool {
        self.commands.values().any(|command| !command.is_aborted)
            || self.connections.iter().any(|c| !c.is_empty())
    }

    fn encode(&self, cx: &Context<'_>, pdu: Request, immediate: bool, data: &[u8]) -> Vec<u8> {
        let mut bhs: Bhs = [0; 48];
        Header { pdu, immediate, ahs_len: 0, data_len: data.len() as u32 }.encode(&mut bhs);
        let mut bytes = bhs.to_vec();
        if cx.agreed.connection.header_digest {
            bytes.extend_from_slice(&digest::of(&bhs));
        }
        if !data.is_empty() {
            let start = bytes.len();
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len() + padding(data.len() as u32) as usize, 0);
            if cx.agreed.connection.data_digest {
                let sum = digest::of(&bytes[start..]);
                bytes.extend_from_slice(&sum);
            }
        }
        bytes
    }

    fn send(&mut self, cx: &Context<'_>, connection: usize, pdu: Request, immediate: bool, data: &[u8]) {
        let bytes = self.encode(cx, pdu, immediate, data);
        self.connections[connection].out.push_back(bytes);
    }

    fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }

    /// Sends a read or a write, if the window is open.
    pub(super) fn issue(&mut self, cx: &mut Context<'_>) {
        if before(self.numbers.max_cmd_sn, self.next_cmd_sn) {
            return;
        }
        let (cmd_sn, itt) = (self.next_cmd_sn, self.tag());
        self.next_cmd_sn = cmd_sn.wrapping_add(1);
        let connection = cx.rng.below(self.connections.len() as u64) as usize;
        let count = cx.rng.between(1, 40) as usize;
        let block = cx.rng.below((BLOCKS - count) as u64 + 1) as usize;
        let len = count * BLOCK;
        let is_write = cx.rng.chance(650);
        let (exp_stat_sn, lun) = (self.connections[connection].stat_sn, 0);
        let attribute = match cx.rng.below(16) {
            0 => TaskAttribute::Ordered,
            1 => TaskAttribute::HeadOfQueue,
            _ => TaskAttribute::Simple,
        };
        let command = ScsiCommand {
            is_final: true,
            read: !is_write,
            write: is_write,
            attribute,
            lun,
            itt,
            expected_len: len as u32,
            cmd_sn,
            exp_stat_sn,
            cdb: cdb(if is_write { 0x2A } else { 0x28 }, block, count),
        };
        cx.counts.requests += 1;
        let kind = if is_write {
            let number = self.number << 32 | u64::from(itt);
            let data = block_of(number).repeat(count);
            cx.model.begin(number, block..block + count, cx.now);
            self.send_write(cx, connection, command, &data);
            Kind::Write { number, data }
        } else {
            self.send(cx, connection, Request::ScsiCommand(command), false, &[]);
            Kind::Read { block, begun: cx.now, data: vec![0; len] }
        };
        self.commands.insert(itt, Command { kind, connection, cmd_sn, is_aborted: false });
    }

    /// Sends a write with as much immediate and unsolicited data as chance wants and the login permits.
    fn send_write(&mut self, cx: &mut Context<'_>, connection: usize, command: ScsiCommand, data: &[u8]) {
        let parameters = cx.agreed.parameters;
        let first = data.len().min(parameters.first_burst_length as usize);
        let segment = cx.agreed.connection.max_receive_segment as usize;
        let immediate = match parameters.immediate_data {
            true => cx.rng.between(0, first.min(segment) as u64) as usize / 4 * 4,
            false => 0,
        };
        let rest = match parameters.initial_r2t {
            false if cx.rng.chance(500) => first - immediate,
            _ => 0,
        };
        let is_final = rest == 0;
        let pdu = Request::ScsiCommand(ScsiCommand { is_final, ..command });
        self.send(cx, connection, pdu, false, &data[..immediate]);
        self.send_data(
            cx,
            connection,
            (command.itt, RESERVED_TAG),
            immediate,
            &data[immediate..immediate + rest],
        );
    }

    fn send_data(
        &mut self,
        cx: &Context<'_>,
        connection: usize,
        (itt, ttt): (u32, u32),
        offset: usize,
        data: &[u8],
    ) {
        let most = cx.agreed.connection.max_receive_segment as usize;
        let count = data.chunks(most).count();
        for (number, part) in data.chunks(most).enumerate() {
            let pdu = DataOut {
                is_final: number + 1 == count,
                lun: 0,
                itt,
                ttt,
                exp_stat_sn: self.connections[connection].stat_sn,
                data_sn: number as u32,
                offset: (offset + number * most) as u32,
            };
            self.send(cx, connection, Request::DataOut(pdu), false, part);
        }
    }

    /// Sends a task management function: ABORT TASK, ABORT TASK SET or LOGICAL UNIT RESET.
    pub(super) fn abort(&mut self, cx: &mut Context<'_>) {
        let itt = self.tag();
        let running: Vec<(u32, u32)> = self
            .commands
            .iter()
            .filter_map(|(tag, command)| {
                let is_scsi = matches!(command.kind, Kind::Write { .. } | Kind::Read { .. });
                (is_scsi && !command.is_aborted).then_some((*tag, command.cmd_sn))
            })
            .collect();
        if running.is_empty() {
            return;
        }
        let (referenced_itt, ref_cmd_sn) = *cx.rng.pick(&running);
        let all = running.iter().map(|(tag, _)| *tag).collect();
        let (function, aborts) = match cx.rng.below(8) {
            0 => (TaskFunction::LogicalUnitReset, all),
            1 => (TaskFunction::AbortTaskSet, all),
            _ => (TaskFunction::AbortTask, vec![referenced_itt]),
        };
        let is_one = function == TaskFunction::AbortTask;
        // ABORT TASK goes to the connection of its task (RFC 7143, section 11.5.5).
        let connection = match is_one {
            true => self.commands[&referenced_itt].connection,
            false => cx.rng.below(self.connections.len() as u64) as usize,
        };
        let pdu = TaskManagement {
            function,
            lun: 0,
            itt,
            referenced_itt: if is_one { referenced_itt } else { RESERVED_TAG },
            cmd_sn: self.next_cmd_sn,
            exp_stat_sn: self.connections[connection].stat_sn,
            ref_cmd_sn: if is_one { ref_cmd_sn } else { 0 },
            exp_data_sn: 0,
        };
        self.send(cx, connection, Request::TaskManagement(pdu), true, &[]);
        let (kind, cmd_sn) = (Kind::Function { aborts }, self.next_cmd_sn);
        self.commands.insert(itt, Command { kind, connection, cmd_sn, is_aborted: false });
    }

    /// Pings the target, so that the window's numbers arrive.
    pub(super) fn ping(&mut self, cx: &mut Context<'_>) {
        let (itt, connection) = (self.tag(), cx.rng.below(self.connections.len() as u64) as usize);
        let exp_stat_sn = self.connections[connection].stat_sn;
        let pdu = NopOut { lun: 0, itt, ttt: RESERVED_TAG, cmd_sn: self.next_cmd_sn, exp_stat_sn };
        self.send(cx, connection, Request::NopOut(pdu), true, &[]);
        let command = Command { kind: Kind::Ping, connection, cmd_sn: self.next_cmd_sn, is_aborted: false };
        self.commands.insert(itt, command);
    }

    /// Delivers part of what a connection has to send: in order on it, in any order among connections.
    pub(super) fn deliver(&mut self, cx: &mut Context<'_>, is_whole: bool) {
        let connection = cx.rng.below(self.connections.len() as u64) as usize;
        let connection = &mut self.connections[connection];
        let mut left = if is_whole { usize::MAX } else { cx.rng.between(1, 9000) as usize };
        while let (Some(first), Some(stream), 1..) = (connection.out.front(), &mut connection.stream, left) {
            let rest = &first[connection.sent..];
            match stream.write(&rest[..rest.len().min(left)]) {
                Ok(count) => {
                    (connection.sent, left) = (connection.sent + count, left - count);
                    if connection.sent == first.len() {
                        connection.out.pop_front();
                        connection.sent = 0;
                    }
                }
                Err(why) if why.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.is_lost = true,
            }
        }
    }

    /// Drops a whole PDU that was not delivered, or changes a bit of one.
    pub(super) fn damage(&mut self, cx: &mut Context<'_>, drops: bool) {
        let which = cx.rng.below(self.connections.len() as u64) as usize;
        let connection = &mut self.connections[which];
        let from = usize::from(connection.sent > 0);
        if connection.out.len() <= from {
            return;
        }
        let at = cx.rng.between(from as u64, connection.out.len() as u64 - 1) as usize;
        self.is_damaged = true;
        if drops {
            connection.out.remove(at);
            return;
        }
        // Without a digest nobody notices; a changed header, for example, is another command then.
        let digests = cx.agreed.connection;
        let bytes = &mut connection.out[at];
        let header = 48 + if digests.header_digest { 4 } else { 0 };
        let range = match (digests.header_digest, digests.data_digest && bytes.len() > header) {
            (true, false) => 0..header,
            (false, true) => header..bytes.len(),
            (true, true) => 0..bytes.len(),
            (false, false) => return,
        };
        let place = cx.rng.between(range.start as u64, range.end as u64 - 1) as usize;
        bytes[place] ^= 1 << cx.rng.below(8);
    }

    /// Loses a connection.
    pub(super) fn lose(&mut self, cx: &mut Context<'_>) {
        let which = cx.rng.below(self.connections.len() as u64) as usize;
        self.connections[which].stream = None;
        self.is_lost = true;
    }

    /// Records the end of the session: its commands in progress have ended, and must not be applied any more.
    pub(super) fn end(&self, model: &mut Model, shared: &Mutex<Shared>, now: u64) {
        for command in self.commands.values() {
            if let Kind::Write { number, .. } = command.kind {
                model.end(number, now);
                shared.lock().expect("no panic").fenced.insert(number);
            }
        }
    }

    /// Reads what a connection has received.
    pub(super) fn receive(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        let which = cx.rng.below(self.connections.len() as u64) as usize;
        let mut part = [0; 16_384];
        let most = cx.rng.between(1, part.len() as u64) as usize;
        let connection = &mut self.connections[which];
        let Some(stream) = &mut connection.stream else { return Ok(()) };
        match stream.read(&mut part[..most]) {
            Ok(0) => self.is_lost = true,
            Ok(count) => connection.input.extend_from_slice(&part[..count]),
            Err(why) if why.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.is_lost = true,
        }
        while let Some((response, data)) = self.next_pdu(cx, which)? {
            self.idle = 0;
            self.take(cx, which, &response, &data)?;
        }
        Ok(())
    }

    fn next_pdu(&mut self, cx: &Context<'_>, which: usize) -> Result<Option<(Response, Vec<u8>)>, String> {
        let input = &mut self.connections[which].input;
        let digests = cx.agreed.connection;
        let Some(bhs) = input.first_chunk::<48>().copied() else { return Ok(None) };
        let (_, len) = lengths(&bhs);
        let header = 48 + if digests.header_digest { 4 } else { 0 };
        let padded = (len + padding(len)) as usize;
        let whole = header + padded + if digests.data_digest && len > 0 { 4 } else { 0 };
        if input.len() < whole {
            return Ok(None);
        }
        let bytes: Vec<u8> = input.drain(..whole).collect();
        if digests.header_digest && digest::of(&bhs) != bytes[48..52] {
            return Err("a header digest of the target is wrong".to_owned());
        }
        if digests.data_digest
            && len > 0
            && digest::of(&bytes[header..header + padded]) != bytes[header + padded..]
        {
            return Err("a data digest of the target is wrong".to_owned());
        }
        let response = parse_response(&bhs).map_err(|why| format!("{why:?}"))?.pdu;
        Ok(Some((response, bytes[header..header + len as usize].to_vec())))
    }

    /// Checks the numbers of a PDU: ExpCmdSN and MaxCmdSN, which never go back, and StatSN, which has no gap.
    fn check_numbers(&mut self, cx: &Context<'_>, which: usize, response: &Response) -> Result<(), String> {
        let numbers = response.numbers();
        let old = self.numbers;
        // PDUs of other connections can be older.
        if before(old.exp_cmd_sn, numbers.exp_cmd_sn) {
            self.numbers.exp_cmd_sn = numbers.exp_cmd_sn;
        }
        if before(old.max_cmd_sn, numbers.max_cmd_sn) {
            self.numbers.max_cmd_sn = numbers.max_cmd_sn;
        }
        let width = numbers.max_cmd_sn.wrapping_add(1).wrapping_sub(numbers.exp_cmd_sn);
        if width > u32::from(cx.agreed.depth) {
            return Err(format!("the window is {width} wide, not {}: {numbers:?}", cx.agreed.depth));
        }
        if before(self.next_cmd_sn, numbers.exp_cmd_sn) {
            return Err(format!("ExpCmdSN {} was never sent", numbers.exp_cmd_sn));
        }
        let takes_status = match response {
            Response::R2t(_) => false,
            // Without a status the field is reserved.
            Response::DataIn(pdu) if pdu.status.is_none() => return Ok(()),
            Response::NopIn(pdu) => pdu.itt != RESERVED_TAG,
            _ => true,
        };
        let next = &mut self.connections[which].stat_sn;
        if numbers.stat_sn != *next {
            return Err(format!("StatSN {} instead of {next}: {response:?}", numbers.stat_sn));
        }
        *next += u32::from(takes_status);
        Ok(())
    }

    fn take(
        &mut self,
        cx: &mut Context<'_>,
        which: usize,
        response: &Response,
        data: &[u8],
    ) -> Result<(), String> {
        self.check_numbers(cx, which, response)?;
        match response {
            Response::R2t(r2t) => self.answer(cx, which, r2t)?,
            Response::DataIn(pdu) => {
                let Some(Command { kind: Kind::Read { data: buffer, .. }, .. }) =
                    self.commands.get_mut(&pdu.itt)
                else {
                    return Err(format!("data of no read: {pdu:?}"));
                };
                let place = buffer.get_mut(pdu.offset as usize..pdu.offset as usize + data.len());
                place.ok_or_else(|| format!("data past the end: {pdu:?}"))?.copy_from_slice(data);
                if let Some(status) = pdu.status {
                    self.ended(cx, pdu.itt, status)?;
                }
            }
            Response::ScsiResponse(pdu) => self.ended(cx, pdu.itt, pdu.status)?,
            Response::TaskManagement(pdu) => {
                let command = self.commands.remove(&pdu.itt);
                let Some(Command { kind: Kind::Function { aborts }, .. }) = command else {
                    return Err(format!("the end of no function: {pdu:?}"));
                };
                if pdu.result == TaskResult::Complete {
                    cx.counts.aborts += 1;
                    aborts.into_iter().for_each(|tag| self.aborted(cx, tag));
                }
            }
            Response::NopIn(pdu) => {
                self.commands.remove(&pdu.itt);
            }
            // The target rejects a PDU that was damaged on its way.
            Response::Reject(_) if self.is_damaged => {}
            Response::AsyncMessage(_) => {}
            other => return Err(format!("unexpected {other:?}")),
        }
        Ok(())
    }

    fn answer(&mut self, cx: &mut Context<'_>, which: usize, r2t: &R2t) -> Result<(), String> {
        let Some(Command { kind: Kind::Write { data, .. }, connection, .. }) = self.commands.get(&r2t.itt)
        else {
            return Err(format!("an R2T of no write: {r2t:?}"));
        };
        if *connection != which {
            return Err(format!("an R2T on another connection: {r2t:?}"));
        }
        let range = r2t.offset as usize..(r2t.offset + r2t.desired_len) as usize;
        let part = data.get(range).ok_or_else(|| format!("an R2T past the end: {r2t:?}"))?.to_vec();
        if r2t.desired_len > cx.agreed.parameters.max_burst_length {
            return Err(format!("an R2T of more than MaxBurstLength: {r2t:?}"));
        }
        self.send_data(cx, which, (r2t.itt, r2t.ttt), r2t.offset as usize, &part);
        Ok(())
    }

    fn ended(&mut self, cx: &mut Context<'_>, tag: u32, status: u8) -> Result<(), String> {
        let command = self.commands.remove(&tag).ok_or_else(|| format!("the end of no command: {tag}"))?;
        let is_good = status == 0;
        cx.counts.good += u64::from(is_good);
        match command.kind {
            Kind::Write { number, .. } if is_good => cx.model.acknowledge(number, cx.now),
            Kind::Write { number, .. } => {
                cx.model.end(number, cx.now);
                cx.shared.lock().expect("no panic").fenced.insert(number);
            }
            Kind::Read { block, begun, data } if is_good => {
                for (at, bytes) in data.chunks_exact(BLOCK).enumerate() {
                    cx.model.check(block + at, number_of(bytes)?, begun, cx.now)?;
                }
            }
            Kind::Read { .. } => {}
            Kind::Function { .. } | Kind::Ping => return Err(format!("a status of no command: {tag}")),
        }
        Ok(())
    }

    /// Records that the function that aborts a command was answered: the command must not be applied any
    /// more. If the command had ended before, its answer may still arrive on another connection.
    fn aborted(&mut self, cx: &mut Context<'_>, tag: u32) {
        let Some(command) = self.commands.get_mut(&tag) else { return };
        command.is_aborted = true;
        if let Kind::Write { number, .. } = command.kind {
            cx.model.end(number, cx.now);
            cx.shared.lock().expect("no panic").fenced.insert(number);
        }
    }

    /// Checks a session without anything in progress: its window is as wide as at its beginning.
    pub(super) fn check_rest(&self, depth: u16) -> Result<(), String> {
        let is_at_rest = !self.is_waiting() && !self.is_damaged && !self.is_lost;
        let width = self.numbers.max_cmd_sn.wrapping_add(1).wrapping_sub(self.numbers.exp_cmd_sn);
        if is_at_rest && (width != u32::from(depth) || self.numbers.exp_cmd_sn != self.next_cmd_sn) {
            return Err(format!("when idle, the window is {width} wide, not {depth}: {:?}", self.numbers));
        }
        Ok(())
    }
}
