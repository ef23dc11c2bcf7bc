//! Test sessions on a reactor, and an initiator that sends and receives PDUs over socket pairs.

use super::rig::{BLOCKS, Reactor};
use crate::iscsi::{
    ConnectionSetup, EndReason, Exchange, LunSetup, Pings, SessionCounters, SessionId, SessionSetup,
};
use proto::iscsi::digest;
use proto::iscsi::parameters::{ConnectionParameters, Parameters};
use proto::iscsi::pdu::{
    Bhs, DataIn, DataOut, Header, Logout, LogoutReason, NopOut, R2t, RESERVED_TAG, Request, Residual,
    Response, ScsiCommand, TaskAttribute, TaskFunction, TaskManagement, TaskResult, Text, lengths, padding,
    parse_response,
};
use queue::QueueId;
use scsi::{Access, Attributes, Identity, LogicalUnit, Lun, Media, Nexus, NexusName};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// First CmdSN of a session, close to the wrap-around.
pub(super) const FIRST: u32 = u32::MAX - 2;

/// Returns a logical unit on a disk of 32 MiB.
pub(super) fn unit() -> Arc<LogicalUnit> {
    let identity = Identity::new("BLKYARD", "disk", "1", "0123456789abcdef");
    LogicalUnit::new(identity, Media::new(BLOCKS, 512), Attributes::default())
}

/// Options of a session.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) parameters: Parameters,
    pub(super) connection: ConnectionParameters,
    pub(super) depth: u16,
    pub(super) initiator: &'static str,
    pub(super) target: &'static str,
    pub(super) pings: Option<Pings>,
    pub(super) exchange: Arc<Exchange>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            parameters: Parameters { max_connections: 4, max_outstanding_r2t: 2, ..Parameters::default() },
            connection: ConnectionParameters {
                max_receive_segment: 262_144,
                max_send_segment: 65_536,
                ..ConnectionParameters::default()
            },
            depth: 32,
            initiator: "iqn.2026-11.example:host",
            target: "iqn.2026-11.example:disk",
            pings: None,
            exchange: Arc::default(),
        }
    }
}

/// A session with its LUNs, from 0 up.
pub(super) struct Session {
    pub(super) id: SessionId,
    pub(super) nexuses: Vec<Arc<Nexus>>,
    pub(super) counters: Arc<SessionCounters>,
    pub(super) options: Options,
    gone: Receiver<EndReason>,
}

impl Session {
    /// Opens a session with a LUN for each unit; the unit's queue is the disk with its number.
    pub(super) fn open(reactor: &Reactor, units: &[Arc<LogicalUnit>], options: Options) -> Session {
        let name = NexusName {
            initiator: options.initiator.to_owned(),
            isid: [0, 2, 0x3d, 0, 0, 1],
            target: options.target.to_owned(),
            portal_group: 1,
            relative_port: 1,
        };
        let attach = |(number, unit): (usize, &Arc<LogicalUnit>)| {
            unit.attach_nexus(name.clone(), Lun::new(number as u16), Access::ReadWrite)
        };
        let nexuses: Vec<Arc<Nexus>> = units.iter().enumerate().map(attach).collect();
        let luns = nexuses.iter().enumerate().map(|(number, nexus)| LunSetup {
            lun: Lun::new(number as u16),
            queue: QueueId(number as u16),
            nexus: nexus.clone(),
        });
        let (tell, gone) = channel();
        let counters = Arc::<SessionCounters>::default();
        let setup = SessionSetup {
            number: 1,
            target: options.target.to_owned(),
            parameters: options.parameters,
            luns: luns.collect(),
            exp_cmd_sn: FIRST,
            queue_depth: options.depth,
            send_targets: Arc::new(|value| {
                (value == b"All").then(|| b"TargetName=iqn.2026-11.example:disk\0".repeat(400))
            }),
            pings: options.pings,
            exchange: options.exchange.clone(),
            counters: counters.clone(),
            when_gone: Some(Box::new(move |why| {
                let _ = tell.send(why);
            })),
        };
        let id = reactor.with(move |front, _| front.open_session(setup));
        nexuses.iter().for_each(clear_attentions);
        Session { id, nexuses, counters, options, gone }
    }

    /// Adds a connection with this CID.
    pub(super) fn connect_as(&self, reactor: &Reactor, cid: u16) -> Client {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        ours.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        let (session, parameters) = (self.id, self.options.connection);
        let setup = ConnectionSetup { cid, parameters, stat_sn: 7, when_gone: None };
        reactor.with(move |front, turn| front.adopt(session, theirs.into(), setup, &[], turn).unwrap());
        Client {
            stream: ours,
            header_digest: parameters.header_digest,
            data_digest: parameters.data_digest,
            cmd_sn: FIRST,
            max_cmd_sn: FIRST.wrapping_add(u32::from(self.options.depth) - 1),
            itt: u32::from(cid) << 16,
            piece: 200_000,
            r2ts: VecDeque::new(),
        }
    }

    pub(super) fn connect(&self, reactor: &Reactor) -> Client {
        self.connect_as(reactor, 1)
    }

    /// Waits until the session is gone, and returns the reason.
    pub(super) fn gone(&self) -> EndReason {
        self.gone.recv_timeout(Duration::from_secs(5)).expect("the session ends")
    }

    pub(super) fn is_gone(&self) -> bool {
        !matches!(self.gone.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty))
    }
}

/// A session without LUNs.
struct NoLuns;

impl scsi::Session for NoLuns {
    fn luns(&self) -> &[Lun] {
        &[]
    }

    fn find_unit(&self, _: &[u8]) -> Option<Arc<Nexus>> {
        None
    }
}

/// Consumes the unit attentions of a new nexus.
fn clear_attentions(nexus: &Arc<Nexus>) {
    while nexus.has_attention() {
        let command =
            scsi::Command { cdb: &[0; 6], data_in: 0, data_out: 0, attribute: scsi::TaskAttribute::Simple };
        scsi::begin(nexus, &command, &NoLuns);
    }
}

/// Result of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) status: u8,
    /// Sense key, additional sense code and qualifier.
    pub(super) sense: (u8, u8, u8),
    pub(super) residual: Residual,
    pub(super) data: Vec<u8>,
}

/// One connection of an initiator.
pub(super) struct Client {
    pub(super) stream: UnixStream,
    header_digest: bool,
    data_digest: bool,
    pub(super) cmd_sn: u32,
    pub(super) max_cmd_sn: u32,
    pub(super) itt: u32,
    /// Bytes of the data segments that answer R2Ts.
    pub(super) piece: usize,
    /// R2Ts that have not been answered.
    r2ts: VecDeque<R2t>,
}

/// Returns a CDB of READ(10) or WRITE(10).
pub(super) fn cdb10(opcode: u8, lba: u32, blocks: u16) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

pub(super) fn read10(lba: u32, blocks: u16) -> [u8; 16] {
    cdb10(0x28, lba, blocks)
}

pub(super) fn write10(lba: u32, blocks: u16) -> [u8; 16] {
    cdb10(0x2A, lba, blocks)
}

impl Client {
    /// Sends a PDU.
    pub(super) fn send(&mut self, pdu: Request, immediate: bool, data: &[u8]) {
        let bytes = self.encode(pdu, immediate, data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Returns the bytes of a PDU.
    pub(super) fn encode(&self, pdu: Request, immediate: bool, data: &[u8]) -> Vec<u8> {
        let mut bhs: Bhs = [0; 48];
        Header { pdu, immediate, ahs_len: 0, data_len: data.len() as u32 }.encode(&mut bhs);
        let mut bytes = bhs.to_vec();
        if self.header_digest {
            bytes.extend_from_slice(&digest::of(&bhs));
        }
        if !data.is_empty() {
            let start = bytes.len();
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len() + padding(data.len() as u32) as usize, 0);
            if self.data_digest {
                let sum = digest::of(&bytes[start..]);
                bytes.extend_from_slice(&sum);
            }
        }
        bytes
    }

    /// Receives the next PDU of the target; `None` at the end of the stream.
    pub(super) fn receive(&mut self) -> Option<(Response, Vec<u8>)> {
        let mut bhs: Bhs = [0; 48];
        if let Err(error) = self.stream.read_exact(&mut bhs) {
            assert!(
                matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset),
                "no PDU: {error}"
            );
            return None;
        }
        if self.header_digest {
            let mut sum = [0; 4];
            self.stream.read_exact(&mut sum).unwrap();
            assert_eq!(digest::of(&bhs), sum, "header digest");
        }
        let (_, len) = lengths(&bhs);
        let mut data = vec![0; (len + padding(len)) as usize];
        self.stream.read_exact(&mut data).unwrap();
        if self.data_digest && len > 0 {
            let mut sum = [0; 4];
            self.stream.read_exact(&mut sum).unwrap();
            assert_eq!(digest::of(&data), sum, "data digest");
        }
        data.truncate(len as usize);
        let response = parse_response(&bhs).expect("a valid PDU").pdu;
        let max = response.numbers().max_cmd_sn;
        assert!(max.wrapping_sub(self.max_cmd_sn) as i32 >= 0, "MaxCmdSN goes back");
        self.max_cmd_sn = max;
        Some((response, data))
    }

    pub(super) fn next_itt(&mut self) -> u32 {
        self.itt += 1;
        self.itt
    }

    /// Returns a command for LUN `lun`.
    pub(super) fn command(
        &mut self,
        lun: u16,
        cdb: &[u8; 16],
        expected_len: u32,
        write: bool,
    ) -> ScsiCommand {
        let itt = self.next_itt();
        let cmd_sn = self.cmd_sn;
        self.cmd_sn = cmd_sn.wrapping_add(1);
        ScsiCommand {
            is_final: true,
            read: !write && expected_len > 0,
            write,
            attribute: TaskAttribute::Simple,
            lun: u64::from_be_bytes(Lun::new(lun).0),
            itt,
            expected_len,
            cmd_sn,
            exp_stat_sn: 0,
            cdb: *cdb,
        }
    }

    /// Starts a read. Returns its task tag.
    pub(super) fn start_read(&mut self, lun: u16, cdb: &[u8; 16], len: u32) -> u32 {
        let command = self.command(lun, cdb, len, false);
        self.send(Request::ScsiCommand(command), false, &[]);
        command.itt
    }

    /// Starts a write with all or part of its data in the command.
    pub(super) fn start_write(&mut self, lun: u16, cdb: &[u8; 16], len: u32, immediate: &[u8]) -> u32 {
        let command = self.command(lun, cdb, len, true);
        self.send(Request::ScsiCommand(command), false, immediate);
        command.itt
    }

    pub(super) fn read(&mut self, lun: u16, cdb: &[u8; 16], len: u32) -> Ended {
        let itt = self.start_read(lun, cdb, len);
        self.end_of(itt, &[])
    }

    /// Executes a write whose first `immediate` bytes are sent with the command; R2Ts request the rest.
    pub(super) fn write(&mut self, lun: u16, cdb: &[u8; 16], data: &[u8], immediate: usize) -> Ended {
        let itt = self.start_write(lun, cdb, data.len() as u32, &data[..immediate]);
        self.end_of(itt, data)
    }

    /// Answers an R2T with PDUs of `most` bytes.
    pub(super) fn answer(&mut self, r2t: &R2t, data: &[u8], most: usize) {
        let part = &data[r2t.offset as usize..][..r2t.desired_len as usize];
        let count = part.chunks(most).count();
        for (number, piece) in part.chunks(most).enumerate() {
            let pdu = DataOut {
                is_final: number + 1 == count,
                lun: r2t.lun,
                itt: r2t.itt,
                ttt: r2t.ttt,
                exp_stat_sn: 0,
                data_sn: number as u32,
                offset: r2t.offset + (number * most) as u32,
            };
            self.send(Request::DataOut(pdu), false, piece);
        }
    }

    /// Receives until the command has ended, and answers its R2Ts. Fails on any other PDU.
    pub(super) fn end_of(&mut self, itt: u32, data: &[u8]) -> Ended {
        let mut got = Vec::new();
        let mut pdus = 0;
        loop {
            match self.receive().expect("the connection lives") {
                (Response::DataIn(pdu), bytes) => {
                    assert_eq!((pdu.itt, pdu.offset as usize, pdu.data_sn), (itt, got.len(), pdus));
                    got.extend_from_slice(&bytes);
                    pdus += 1;
                    if let DataIn { status: Some(status), residual, .. } = pdu {
                        return Ended { status, sense: (0, 0, 0), residual, data: got };
                    }
                }
                (Response::R2t(r2t), _) => {
                    assert_eq!(r2t.itt, itt);
                    pdus += 1;
                    self.answer(&r2t, data, self.piece);
                }
                (Response::ScsiResponse(pdu), sense) => {
                    assert_eq!((pdu.itt, pdu.exp_data_sn), (itt, pdus));
                    return Ended {
                        status: pdu.status,
                        sense: sense_of(&sense),
                        residual: pdu.residual,
                        data: got,
                    };
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    pub(super) fn management(&mut self, function: TaskFunction, lun: u16, task: u32, ref_cmd_sn: u32) -> u32 {
        let itt = self.next_itt();
        let pdu = TaskManagement {
            function,
            lun: u64::from_be_bytes(Lun::new(lun).0),
            itt,
            referenced_itt: task,
            cmd_sn: self.cmd_sn,
            exp_stat_sn: 0,
            ref_cmd_sn,
            exp_data_sn: 0,
        };
        self.send(Request::TaskManagement(pdu), true, &[]);
        itt
    }

    pub(super) fn managed(&mut self, itt: u32) -> TaskResult {
        match self.receive() {
            Some((Response::TaskManagement(pdu), _)) if pdu.itt == itt => pdu.result,
            other => panic!("unexpected {other:?}"),
        }
    }

    pub(super) fn ping(&mut self, data: &[u8]) -> Vec<u8> {
        let itt = self.next_itt();
        let pdu = NopOut { lun: 0, itt, ttt: RESERVED_TAG, cmd_sn: self.cmd_sn, exp_stat_sn: 0 };
        self.send(Request::NopOut(pdu), true, data);
        match self.receive() {
            Some((Response::NopIn(pdu), data)) if pdu.itt == itt => data,
            other => panic!("unexpected {other:?}"),
        }
    }

    /// Sends a ping, and keeps the R2Ts that arrive before the answer.
    pub(super) fn ping_ignoring_r2ts(&mut self) {
        let itt = self.next_itt();
        let pdu = NopOut { lun: 0, itt, ttt: RESERVED_TAG, cmd_sn: self.cmd_sn, exp_stat_sn: 0 };
        self.send(Request::NopOut(pdu), true, &[]);
        loop {
            match self.receive() {
                Some((Response::R2t(r2t), _)) => self.r2ts.push_back(r2t),
                Some((Response::NopIn(pdu), _)) if pdu.itt == itt => return,
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    /// Answers all R2Ts with the same data until all these tasks have ended successfully.
    pub(super) fn finish_all(&mut self, tasks: &[u32], data: &[u8]) {
        let mut left = tasks.len();
        while left > 0 {
            while let Some(r2t) = self.r2ts.pop_front() {
                self.answer(&r2t, data, 100_000);
            }
            match self.receive() {
                Some((Response::R2t(r2t), _)) => self.r2ts.push_back(r2t),
                Some((Response::ScsiResponse(pdu), _)) => {
                    assert!(tasks.contains(&pdu.itt));
                    assert_eq!(pdu.status, 0);
                    left -= 1;
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    pub(super) fn text(
        &mut self,
        ttt: u32,
        is_final: bool,
        continues: bool,
        text: &[u8],
    ) -> (Response, Vec<u8>) {
        let itt = self.next_itt();
        let pdu = Text { is_final, continues, lun: 0, itt, ttt, cmd_sn: self.cmd_sn, exp_stat_sn: 0 };
        self.send(Request::Text(pdu), true, text);
        self.receive().expect("an answer")
    }

    pub(super) fn logout(&mut self, reason: LogoutReason, cid: u16) -> (Response, Vec<u8>) {
        let itt = self.next_itt();
        let pdu = Logout { reason, itt, cid, cmd_sn: self.cmd_sn, exp_stat_sn: 0 };
        self.send(Request::Logout(pdu), true, &[]);
        self.receive().expect("an answer")
    }
}

/// Returns the sense key, code and qualifier in the data segment of a SCSI response.
pub(super) fn sense_of(data: &[u8]) -> (u8, u8, u8) {
    match data {
        [_, _, 0x70 | 0xF0, _, key, rest @ ..] => (key & 0xF, rest[9], rest[10]),
        [_, _, 0x72, key, code, qualifier, ..] => (key & 0xF, *code, *qualifier),
        _ => (0, 0, 0),
    }
}
