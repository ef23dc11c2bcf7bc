//! An iSCSI initiator for tests, deliberately simple: it sends what a test requests and hides nothing of the
//! answers.
//!
//! [`Initiator::command`] does what any initiator does for one command at a time. A test that needs more
//! sends PDUs ([`Initiator::send`]) or bytes ([`Initiator::send_bytes`]), and reads PDUs
//! ([`Initiator::receive`]).

use proto::iscsi::initiator::{CommandNumbers, Failure, Login, Options, Step};
use proto::iscsi::parameters::{ConnectionParameters, Parameters};
use proto::iscsi::pdu::{
    BHS_LEN, DataOut, Header, Logout, LogoutReason, NopOut, R2t, RESERVED_TAG, Request, Response,
    ScsiCommand, TaskAttribute, TaskFunction, TaskManagement, TaskResult, parse_response,
};
use proto::iscsi::stream::{self, Receiver};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A connection of a session, and the session's numbers.
pub struct Initiator {
    socket: TcpStream,
    receiver: Receiver,
    received: Vec<u8>,
    numbers: CommandNumbers,
    next_tag: u32,
    /// Session-wide values that the login agreed on.
    pub parameters: Parameters,
    /// Values of this connection that the login agreed on.
    pub connection: ConnectionParameters,
    /// TSIH of the session.
    pub tsih: u16,
    /// R2Ts that [`Initiator::command`] answered.
    pub r2ts: Vec<R2t>,
    /// PDUs that arrived and belong to no command.
    pub events: Vec<Response>,
}

/// The end of a command.
#[derive(Debug)]
pub struct Answer {
    /// SCSI status.
    pub status: u8,
    /// Sense data.
    pub sense: Vec<u8>,
    /// Data-in.
    pub data: Vec<u8>,
}

impl Answer {
    /// Returns sense key, ASC and ASCQ, of either format of sense data.
    pub fn sense_code(&self) -> Option<(u8, u8, u8)> {
        let byte = |at: usize| self.sense.get(at).copied();
        match byte(0)? & 0x7F {
            0x72 | 0x73 => Some((byte(1)? & 0xF, byte(2)?, byte(3)?)),
            _ => Some((byte(2)? & 0xF, byte(12)?, byte(13)?)),
        }
    }
}

/// Returns a LUN field.
///
/// # Panics
/// If there can be no such LUN.
pub fn lun_field(lun: u16) -> u64 {
    proto::iscsi::lun::encode(lun.into()).expect("LUNs have 14 bits")
}

impl Initiator {
    /// Logs in at `HOST:PORT`.
    ///
    /// # Errors
    /// The target refused the login.
    ///
    /// # Panics
    /// If the connection ends without an answer.
    pub fn log_in(portal: &str, options: Options) -> Result<Initiator, Failure> {
        let mut socket = TcpStream::connect(portal).expect("the portal listens");
        socket.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        let mut login = Login::new(options, [7; _]);
        let mut received = Vec::new();
        let done = loop {
            let output = std::mem::take(login.output());
            socket.write_all(&output).expect("the target reads");
            match login.poll() {
                Step::Ready(done) => break done,
                Step::Failed(why) => return Err(why),
                Step::NeedInput => {}
            }
            let used = login.input(&received);
            received.drain(..used);
            if used == 0 && login.output().is_empty() && login.poll() == Step::NeedInput {
                let more = fill(&mut socket, &mut received).expect("the target answers");
                assert!(more > 0, "the target closed the connection in the login");
            }
        };
        let mut receiver = Receiver::new(1 << 24);
        receiver.configure(done.connection.header_digest, done.connection.data_digest, 1 << 24);
        Ok(Initiator {
            socket,
            receiver,
            received,
            numbers: done.numbers,
            next_tag: 1,
            parameters: done.parameters,
            connection: done.connection,
            tsih: done.tsih,
            r2ts: Vec::new(),
            events: Vec::new(),
        })
    }

    /// Sends a command with all its data and waits for its end. It sends as much immediate data as it may,
    /// and the rest as the target asks for it.
    ///
    /// # Errors
    /// The target closed the connection.
    ///
    /// # Panics
    /// If the window of commands is closed, or the target violates the protocol.
    pub fn command(&mut self, lun: u16, cdb: &[u8], data_out: &[u8], data_in: u32) -> io::Result<Answer> {
        let immediate = self.immediate_len(data_out.len());
        let pdu = self.scsi(lun, cdb, data_out.len() as u32, data_in);
        self.send(Request::ScsiCommand(pdu), false, &data_out[..immediate])?;
        self.finish(pdu.itt, data_out, data_in)
    }

    /// Returns the most immediate data of a command with `len` bytes of data-out.
    fn immediate_len(&self, len: usize) -> usize {
        let Parameters { immediate_data, first_burst_length, .. } = self.parameters;
        let max = first_burst_length.min(self.connection.max_send_segment);
        if immediate_data { len.min(max as usize) } else { 0 }
    }

    /// Builds a command without unsolicited Data-Out PDUs, with the next CmdSN and tag.
    ///
    /// # Panics
    /// If the window of commands is closed.
    pub fn scsi(&mut self, lun: u16, cdb: &[u8], data_out: u32, data_in: u32) -> ScsiCommand {
        let mut block = [0; 16];
        block[..cdb.len()].copy_from_slice(cdb);
        ScsiCommand {
            is_final: true,
            read: data_in > 0,
            write: data_out > 0,
            attribute: TaskAttribute::Simple,
            lun: lun_field(lun),
            itt: self.tag(),
            expected_len: data_out.max(data_in),
            cmd_sn: self.take_number(),
            exp_stat_sn: self.numbers.exp_stat_sn(),
            cdb: block,
        }
    }

    /// Waits for the end of a command that was sent. It sends the data that the target asks for.
    ///
    /// # Errors
    /// The target closed the connection.
    ///
    /// # Panics
    /// If the target violates the protocol.
    pub fn finish(&mut self, itt: u32, data_out: &[u8], data_in: u32) -> io::Result<Answer> {
        let mut data = vec![0; data_in as usize];
        let mut len = 0;
        loop {
            let (response, segment) = self.receive()?;
            match response {
                Response::DataIn(pdu) if pdu.itt == itt => {
                    let at = pdu.offset as usize;
                    data[at..at + segment.len()].copy_from_slice(&segment);
                    len = len.max(at + segment.len());
                    if let Some(status) = pdu.status {
                        data.truncate(len);
                        return Ok(Answer { status, sense: Vec::new(), data });
                    }
                }
                Response::ScsiResponse(pdu) if pdu.itt == itt => {
                    data.truncate(len);
                    let sense = segment.get(2..).unwrap_or_default().to_vec();
                    return Ok(Answer { status: pdu.status, sense, data });
                }
                Response::R2t(r2t) if r2t.itt == itt => {
                    self.r2ts.push(r2t);
                    self.send_burst(&r2t, data_out)?;
                }
                other => self.events.push(other),
            }
        }
    }

    /// Sends the data that an R2T requests, in Data-Out PDUs of the size that the target accepts.
    ///
    /// # Errors
    /// The target closed the connection.
    ///
    /// # Panics
    /// If the target asks for data that the command does not have.
    pub fn send_burst(&mut self, r2t: &R2t, data_out: &[u8]) -> io::Result<()> {
        let end = r2t.offset as usize + r2t.desired_len as usize;
        let burst = &data_out[r2t.offset as usize..end];
        let mut offset = r2t.offset;
        for (number, segment) in burst.chunks(self.connection.max_send_segment as usize).enumerate() {
            let is_final = offset as usize + segment.len() == end;
            let exp_stat_sn = self.numbers.exp_stat_sn();
            let R2t { lun, itt, ttt, .. } = *r2t;
            let data_sn = number as u32;
            let pdu = DataOut { is_final, lun, itt, ttt, exp_stat_sn, data_sn, offset };
            self.send(Request::DataOut(pdu), false, segment)?;
            offset += segment.len() as u32;
        }
        Ok(())
    }

    /// Sends a command until it does not end with a unit attention.
    ///
    /// # Panics
    /// If the connection ends or another status is returned.
    #[track_caller]
    pub fn good(&mut self, lun: u16, cdb: &[u8], data_out: &[u8], data_in: u32) -> Vec<u8> {
        for _ in 0..8 {
            let answer = self.command(lun, cdb, data_out, data_in).expect("the session exists");
            match answer.sense_code() {
                Some((6, _, _)) => {}
                _ if answer.status == 0 => return answer.data,
                _ => panic!("{cdb:02x?}: {answer:?}"),
            }
        }
        panic!("{cdb:02x?}: unit attentions do not end");
    }

    /// Returns the unit attentions that are pending, and clears them.
    pub fn attentions(&mut self, lun: u16) -> Vec<(u8, u8)> {
        let mut all = Vec::new();
        while let Ok(answer) = self.command(lun, &[0; 6], &[], 0)
            && let Some((6, code, qualifier)) = answer.sense_code()
        {
            all.push((code, qualifier));
        }
        all
    }

    /// Sends a task management function as an immediate command, and waits for its response. Responses of
    /// commands that arrive before it become [`Initiator::events`].
    ///
    /// # Errors
    /// The target closed the connection.
    pub fn manage(
        &mut self,
        function: TaskFunction,
        lun: u16,
        task: Option<&ScsiCommand>,
    ) -> io::Result<TaskResult> {
        let itt = self.tag();
        let pdu = TaskManagement {
            function,
            lun: lun_field(lun),
            itt,
            referenced_itt: task.map_or(RESERVED_TAG, |task| task.itt),
            cmd_sn: self.numbers.immediate(),
            exp_stat_sn: self.numbers.exp_stat_sn(),
            ref_cmd_sn: task.map_or(0, |task| task.cmd_sn),
            exp_data_sn: 0,
        };
        self.send(Request::TaskManagement(pdu), true, &[])?;
        loop {
            match self.receive()?.0 {
                Response::TaskManagement(response) if response.itt == itt => return Ok(response.result),
                other => self.events.push(other),
            }
        }
    }

    /// Sends a ping with data, and returns the data of its answer.
    ///
    /// # Errors
    /// The target closed the connection.
    pub fn ping(&mut self, data: &[u8]) -> io::Result<Vec<u8>> {
        let itt = self.tag();
        let (cmd_sn, exp_stat_sn) = (self.numbers.immediate(), self.numbers.exp_stat_sn());
        let pdu = NopOut { lun: 0, itt, ttt: RESERVED_TAG, cmd_sn, exp_stat_sn };
        self.send(Request::NopOut(pdu), true, data)?;
        loop {
            match self.receive()? {
                (Response::NopIn(response), data) if response.itt == itt => return Ok(data),
                (other, _) => self.events.push(other),
            }
        }
    }

    /// Waits until the target closes the connection, and returns the PDUs that arrived before.
    ///
    /// # Panics
    /// If it does not.
    pub fn wait_for_end(mut self) -> Vec<Response> {
        loop {
            match self.receive() {
                Ok((response, _)) => self.events.push(response),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    panic!("the connection stays open")
                }
                Err(_) => return self.events,
            }
        }
    }

    /// Logs out of the session, and waits for the end of the connection.
    ///
    /// # Panics
    /// If the target does not read.
    pub fn log_out(mut self) {
        let pdu = Request::Logout(Logout {
            reason: LogoutReason::CloseSession,
            itt: self.tag(),
            cid: 0,
            cmd_sn: self.numbers.immediate(),
            exp_stat_sn: self.numbers.exp_stat_sn(),
        });
        self.send(pdu, true, &[]).expect("the target reads");
        self.wait_for_end();
    }

    /// Takes the next CmdSN. A session with several connections takes a number of each of them for every
    /// command, as each connection here counts by itself.
    ///
    /// # Panics
    /// If the window of commands is closed.
    pub fn take_number(&mut self) -> u32 {
        self.numbers.take().expect("the window is open")
    }

    /// Returns how many commands the window allows now.
    pub fn room(&self) -> u32 {
        self.numbers.room()
    }

    /// Returns the CmdSN of the next command.
    pub fn next_number(&self) -> u32 {
        self.numbers.immediate()
    }

    /// Returns an initiator task tag that no other command of this connection has.
    pub fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }

    /// Sends a PDU.
    ///
    /// # Errors
    /// The target closed the connection.
    pub fn send(&mut self, pdu: Request, immediate: bool, data: &[u8]) -> io::Result<()> {
        let bytes = self.encode(pdu, immediate, data);
        self.send_bytes(&bytes)
    }

    /// Returns a PDU as it is sent, with the digests that were agreed on.
    pub fn encode(&self, pdu: Request, immediate: bool, data: &[u8]) -> Vec<u8> {
        let mut bhs = [0; BHS_LEN];
        Header { pdu, immediate, ahs_len: 0, data_len: data.len() as u32 }.encode(&mut bhs);
        let mut out = Vec::new();
        let ConnectionParameters { header_digest, data_digest, .. } = self.connection;
        stream::put(&mut out, &bhs, &[], data, header_digest, data_digest);
        out
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// The target closed the connection.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.write_all(bytes)
    }

    /// Waits for the next PDU, with its data.
    ///
    /// # Errors
    /// The target closed the connection, or nothing came in a minute ([`io::ErrorKind::WouldBlock`]).
    ///
    /// # Panics
    /// If the target sends an invalid PDU.
    pub fn receive(&mut self) -> io::Result<(Response, Vec<u8>)> {
        loop {
            let used = self.receiver.input(&self.received).expect("a sound stream");
            self.received.drain(..used);
            if let Some(frame) = self.receiver.frame().expect("a sound stream") {
                let header = parse_response(frame.bhs).expect("a PDU of a target");
                let data = frame.data.to_vec();
                self.numbers.received(&header.pdu);
                return Ok((header.pdu, data));
            }
            if fill(&mut self.socket, &mut self.received)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

fn fill(socket: &mut TcpStream, received: &mut Vec<u8>) -> io::Result<usize> {
    let mut buffer = [0; 65536];
    let len = socket.read(&mut buffer)?;
    received.extend_from_slice(&buffer[..len]);
    Ok(len)
}
