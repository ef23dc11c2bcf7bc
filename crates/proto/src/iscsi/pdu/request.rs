//! PDUs of an initiator (RFC 7143, sections 11.3, 11.5, 11.7, 11.10, 11.12, 11.14, 11.16 and 11.18).

use super::{
    Bhs, CONTINUE, FINAL, Header, IMMEDIATE, Isid, PduError, be16, be32, be64, begin, bytes, flag, lengths,
    opcodes, put,
};

/// A PDU of an initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// A ping, or the answer to one.
    NopOut(NopOut),
    /// A SCSI command.
    ScsiCommand(ScsiCommand),
    /// A task management function.
    TaskManagement(TaskManagement),
    /// A login request.
    Login(Login),
    /// A text request.
    Text(Text),
    /// Data of a write.
    DataOut(DataOut),
    /// A logout request.
    Logout(Logout),
    /// A request to retransmit PDUs; for error recovery levels above 0.
    Snack(Snack),
}

impl Request {
    /// Returns CmdSN, or `None` for PDUs without one (Data-Out and SNACK).
    pub const fn cmd_sn(&self) -> Option<u32> {
        match self {
            Request::NopOut(pdu) => Some(pdu.cmd_sn),
            Request::ScsiCommand(pdu) => Some(pdu.cmd_sn),
            Request::TaskManagement(pdu) => Some(pdu.cmd_sn),
            Request::Login(pdu) => Some(pdu.cmd_sn),
            Request::Text(pdu) => Some(pdu.cmd_sn),
            Request::Logout(pdu) => Some(pdu.cmd_sn),
            Request::DataOut(_) | Request::Snack(_) => None,
        }
    }

    /// Returns ExpStatSN, which acknowledges earlier statuses.
    pub const fn exp_stat_sn(&self) -> u32 {
        match self {
            Request::NopOut(pdu) => pdu.exp_stat_sn,
            Request::ScsiCommand(pdu) => pdu.exp_stat_sn,
            Request::TaskManagement(pdu) => pdu.exp_stat_sn,
            Request::Login(pdu) => pdu.exp_stat_sn,
            Request::Text(pdu) => pdu.exp_stat_sn,
            Request::Logout(pdu) => pdu.exp_stat_sn,
            Request::DataOut(pdu) => pdu.exp_stat_sn,
            Request::Snack(pdu) => pdu.exp_stat_sn,
        }
    }
}

/// NOP-Out (section 11.18).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NopOut {
    /// LUN field: copied from the NOP-In that this PDU answers.
    pub lun: u64,
    /// Initiator task tag; [`super::RESERVED_TAG`] if no answer is requested.
    pub itt: u32,
    /// Target transfer tag: that of the NOP-In that this PDU answers, else [`super::RESERVED_TAG`].
    pub ttt: u32,
    /// CmdSN.
    pub cmd_sn: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
}

/// Task attribute of a SCSI command (section 11.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum TaskAttribute {
    /// Untagged: like simple, but at most one per nexus.
    #[default]
    Untagged,
    /// The task may be reordered.
    Simple,
    /// The task is a barrier.
    Ordered,
    /// The task is executed before the others.
    HeadOfQueue,
    /// The task is executed while auto contingent allegiance is established.
    Aca,
}

impl TaskAttribute {
    const fn from_code(code: u8) -> Option<TaskAttribute> {
        match code {
            0 => Some(TaskAttribute::Untagged),
            1 => Some(TaskAttribute::Simple),
            2 => Some(TaskAttribute::Ordered),
            3 => Some(TaskAttribute::HeadOfQueue),
            4 => Some(TaskAttribute::Aca),
            _ => None,
        }
    }
}

/// SCSI Command (section 11.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScsiCommand {
    /// F bit: no unsolicited Data-Out PDUs follow.
    pub is_final: bool,
    /// R bit: the command may return data.
    pub read: bool,
    /// W bit: the command may take data-out.
    pub write: bool,
    /// Task attribute.
    pub attribute: TaskAttribute,
    /// LUN, 64 bits as SAM encodes it; see [`super::super::lun`].
    pub lun: u64,
    /// Initiator task tag.
    pub itt: u32,
    /// Expected data transfer length in bytes; for bidirectional commands the length of the data-out.
    pub expected_len: u32,
    /// CmdSN.
    pub cmd_sn: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
    /// The first 16 bytes of the CDB, padded with zeroes.
    pub cdb: [u8; 16],
}

/// Task management function (section 11.5.1; 9 and above: RFC 7144, section 4.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TaskFunction {
    /// Abort the referenced task.
    AbortTask,
    /// Abort all tasks that this session issued to the logical unit.
    AbortTaskSet,
    /// Clear auto contingent allegiance.
    ClearAca,
    /// Abort all tasks of all sessions in the logical unit.
    ClearTaskSet,
    /// Reset the logical unit.
    LogicalUnitReset,
    /// Reset all logical units of the target.
    TargetWarmReset,
    /// Reset the target and end all sessions.
    TargetColdReset,
    /// Reassign a task to this connection (error recovery level 2).
    TaskReassign,
    /// Report whether the referenced task exists.
    QueryTask,
    /// Report whether this session has any task in the logical unit.
    QueryTaskSet,
    /// Abort all tasks of this session, as if the nexus was lost.
    ItNexusReset,
    /// Report whether a unit attention condition is pending.
    QueryAsynchronousEvent,
    /// Unknown function.
    Other(u8),
}

impl TaskFunction {
    /// Converts a number from the wire (7 bits).
    pub const fn from_code(code: u8) -> TaskFunction {
        match code {
            1 => TaskFunction::AbortTask,
            2 => TaskFunction::AbortTaskSet,
            3 => TaskFunction::ClearAca,
            4 => TaskFunction::ClearTaskSet,
            5 => TaskFunction::LogicalUnitReset,
            6 => TaskFunction::TargetWarmReset,
            7 => TaskFunction::TargetColdReset,
            8 => TaskFunction::TaskReassign,
            9 => TaskFunction::QueryTask,
            10 => TaskFunction::QueryTaskSet,
            11 => TaskFunction::ItNexusReset,
            12 => TaskFunction::QueryAsynchronousEvent,
            other => TaskFunction::Other(other),
        }
    }

    /// Returns the number on the wire.
    pub const fn code(self) -> u8 {
        match self {
            TaskFunction::AbortTask => 1,
            TaskFunction::AbortTaskSet => 2,
            TaskFunction::ClearAca => 3,
            TaskFunction::ClearTaskSet => 4,
            TaskFunction::LogicalUnitReset => 5,
            TaskFunction::TargetWarmReset => 6,
            TaskFunction::TargetColdReset => 7,
            TaskFunction::TaskReassign => 8,
            TaskFunction::QueryTask => 9,
            TaskFunction::QueryTaskSet => 10,
            TaskFunction::ItNexusReset => 11,
            TaskFunction::QueryAsynchronousEvent => 12,
            TaskFunction::Other(code) => code & 0x7f,
        }
    }
}

/// Task Management Function Request (section 11.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TaskManagement {
    /// Function.
    pub function: TaskFunction,
    /// LUN, for functions on a logical unit or a task.
    pub lun: u64,
    /// Initiator task tag of the function.
    pub itt: u32,
    /// Initiator task tag of the task to abort, query or reassign; else [`super::RESERVED_TAG`].
    pub referenced_itt: u32,
    /// CmdSN of the function.
    pub cmd_sn: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
    /// CmdSN of the task to abort.
    pub ref_cmd_sn: u32,
    /// ExpDataSN of a task to reassign.
    pub exp_data_sn: u32,
}

/// Login Request (section 11.12).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Login {
    /// T bit: the initiator is ready to leave the stage.
    pub transit: bool,
    /// C bit: the text continues in the next request.
    pub continues: bool,
    /// Current stage (0 to 3).
    pub csg: u8,
    /// Next stage (0 to 3); meaningful with `transit`.
    pub nsg: u8,
    /// Highest version that the initiator supports.
    pub version_max: u8,
    /// Lowest version that the initiator supports.
    pub version_min: u8,
    /// Initiator session identifier.
    pub isid: Isid,
    /// Target session identifying handle: 0 for a new session.
    pub tsih: u16,
    /// Initiator task tag, equal in all requests of a login.
    pub itt: u32,
    /// Connection identifier.
    pub cid: u16,
    /// CmdSN.
    pub cmd_sn: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
}

/// Text Request (section 11.10).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Text {
    /// F bit: the initiator has no more to negotiate.
    pub is_final: bool,
    /// C bit: the text continues in the next request.
    pub continues: bool,
    /// LUN field: copied from the response that this request continues.
    pub lun: u64,
    /// Initiator task tag.
    pub itt: u32,
    /// Target transfer tag: that of the response that this request continues, else [`super::RESERVED_TAG`].
    pub ttt: u32,
    /// CmdSN.
    pub cmd_sn: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
}

/// SCSI Data-Out (section 11.7).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataOut {
    /// F bit: the last PDU of a sequence.
    pub is_final: bool,
    /// LUN: that of the R2T, or of the command for unsolicited data.
    pub lun: u64,
    /// Initiator task tag of the command.
    pub itt: u32,
    /// Target transfer tag of the R2T, or [`super::RESERVED_TAG`] for unsolicited data.
    pub ttt: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
    /// Number of this PDU within its sequence, from 0.
    pub data_sn: u32,
    /// Offset of the data within the command's data, in bytes.
    pub offset: u32,
}

/// Reason of a logout (section 11.14.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LogoutReason {
    /// Close all connections of the session.
    CloseSession,
    /// Close the connection with the given CID.
    CloseConnection,
    /// Remove a connection so that its tasks can be reassigned (error recovery level 2).
    RemoveForRecovery,
    /// Unknown reason.
    Other(u8),
}

impl LogoutReason {
    const fn from_code(code: u8) -> LogoutReason {
        match code {
            0 => LogoutReason::CloseSession,
            1 => LogoutReason::CloseConnection,
            2 => LogoutReason::RemoveForRecovery,
            other => LogoutReason::Other(other),
        }
    }

    const fn code(self) -> u8 {
        match self {
            LogoutReason::CloseSession => 0,
            LogoutReason::CloseConnection => 1,
            LogoutReason::RemoveForRecovery => 2,
            LogoutReason::Other(code) => code & 0x7f,
        }
    }
}

/// Logout Request (section 11.14).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Logout {
    /// Reason.
    pub reason: LogoutReason,
    /// Initiator task tag.
    pub itt: u32,
    /// Connection to close, if `reason` is not [`LogoutReason::CloseSession`].
    pub cid: u16,
    /// CmdSN.
    pub cmd_sn: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
}

/// SNACK Request (section 11.16).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Snack {
    /// Kind: 0 Data-In or R2T, 1 status, 2 DataACK, 3 R-Data.
    pub kind: u8,
    /// LUN.
    pub lun: u64,
    /// Initiator task tag of the command.
    pub itt: u32,
    /// Target transfer tag or SNACK tag.
    pub ttt: u32,
    /// ExpStatSN.
    pub exp_stat_sn: u32,
    /// First number to retransmit.
    pub first: u32,
    /// Count of numbers to retransmit; 0 stands for all.
    pub count: u32,
}

/// Parses a header that an initiator sent.
///
/// # Errors
/// The opcode is unknown, or a field has a reserved value that makes the PDU meaningless.
pub fn parse(bhs: &Bhs) -> Result<Header<Request>, PduError> {
    let (ahs_len, data_len) = lengths(bhs);
    let flags = bhs[1];
    let (lun, itt, word20) = (be64(bhs, 8), be32(bhs, 16), be32(bhs, 20));
    let (cmd_sn, exp_stat_sn) = (be32(bhs, 24), be32(bhs, 28));
    let is_final = flags & FINAL != 0;
    let pdu = match super::opcode(bhs) {
        opcodes::NOP_OUT => Request::NopOut(NopOut { lun, itt, ttt: word20, cmd_sn, exp_stat_sn }),
        opcodes::SCSI_COMMAND => {
            let attribute = TaskAttribute::from_code(flags & 7).ok_or(PduError::InvalidField("ATTR"))?;
            let (read, write) = (flags & 0x40 != 0, flags & 0x20 != 0);
            Request::ScsiCommand(ScsiCommand {
                is_final,
                read,
                write,
                attribute,
                lun,
                itt,
                expected_len: word20,
                cmd_sn,
                exp_stat_sn,
                cdb: bytes(bhs, 32),
            })
        }
        opcodes::TASK_MANAGEMENT => Request::TaskManagement(TaskManagement {
            function: TaskFunction::from_code(flags & 0x7f),
            lun,
            itt,
            referenced_itt: word20,
            cmd_sn,
            exp_stat_sn,
            ref_cmd_sn: be32(bhs, 32),
            exp_data_sn: be32(bhs, 36),
        }),
        opcodes::LOGIN => Request::Login(Login {
            transit: is_final,
            continues: flags & CONTINUE != 0,
            csg: flags >> 2 & 3,
            nsg: flags & 3,
            version_max: bhs[2],
            version_min: bhs[3],
            isid: Isid(bytes(bhs, 8)),
            tsih: be16(bhs, 14),
            itt,
            cid: be16(bhs, 20),
            cmd_sn,
            exp_stat_sn,
        }),
        opcodes::TEXT => {
            let continues = flags & CONTINUE != 0;
            Request::Text(Text { is_final, continues, lun, itt, ttt: word20, cmd_sn, exp_stat_sn })
        }
        opcodes::DATA_OUT => Request::DataOut(DataOut {
            is_final,
            lun,
            itt,
            ttt: word20,
            exp_stat_sn,
            data_sn: be32(bhs, 36),
            offset: be32(bhs, 40),
        }),
        opcodes::LOGOUT => Request::Logout(Logout {
            reason: LogoutReason::from_code(flags & 0x7f),
            itt,
            cid: be16(bhs, 20),
            cmd_sn,
            exp_stat_sn,
        }),
        opcodes::SNACK => Request::Snack(Snack {
            kind: flags & 0xf,
            lun,
            itt,
            ttt: word20,
            exp_stat_sn,
            first: be32(bhs, 40),
            count: be32(bhs, 44),
        }),
        other => return Err(PduError::UnknownOpcode(other)),
    };
    Ok(Header { pdu, immediate: bhs[0] & IMMEDIATE != 0, ahs_len, data_len })
}

fn put_command_numbers(bhs: &mut Bhs, cmd_sn: u32, exp_stat_sn: u32) {
    put(bhs, 24, cmd_sn.to_be_bytes());
    put(bhs, 28, exp_stat_sn.to_be_bytes());
}

impl Header<Request> {
    /// Encodes the header.
    pub fn encode(&self, bhs: &mut Bhs) {
        let (ahs, data) = (self.ahs_len, self.data_len);
        match &self.pdu {
            Request::NopOut(pdu) => {
                begin(bhs, opcodes::NOP_OUT, FINAL, ahs, data, pdu.itt);
                put(bhs, 8, pdu.lun.to_be_bytes());
                put(bhs, 20, pdu.ttt.to_be_bytes());
                put_command_numbers(bhs, pdu.cmd_sn, pdu.exp_stat_sn);
            }
            Request::ScsiCommand(pdu) => {
                let flags = flag(pdu.is_final, FINAL) | flag(pdu.read, 0x40) | flag(pdu.write, 0x20);
                begin(bhs, opcodes::SCSI_COMMAND, flags | pdu.attribute as u8, ahs, data, pdu.itt);
                put(bhs, 8, pdu.lun.to_be_bytes());
                put(bhs, 20, pdu.expected_len.to_be_bytes());
                put_command_numbers(bhs, pdu.cmd_sn, pdu.exp_stat_sn);
                put(bhs, 32, pdu.cdb);
            }
            Request::TaskManagement(pdu) => {
                begin(bhs, opcodes::TASK_MANAGEMENT, FINAL | pdu.function.code(), ahs, data, pdu.itt);
                put(bhs, 8, pdu.lun.to_be_bytes());
                put(bhs, 20, pdu.referenced_itt.to_be_bytes());
                put_command_numbers(bhs, pdu.cmd_sn, pdu.exp_stat_sn);
                put(bhs, 32, pdu.ref_cmd_sn.to_be_bytes());
                put(bhs, 36, pdu.exp_data_sn.to_be_bytes());
            }
            Request::Login(pdu) => {
                let flags = flag(pdu.transit, FINAL) | flag(pdu.continues, CONTINUE);
                let stages = (pdu.csg & 3) << 2 | pdu.nsg & 3;
                begin(bhs, opcodes::LOGIN, flags | stages, ahs, data, pdu.itt);
                put(bhs, 2, [pdu.version_max, pdu.version_min]);
                put(bhs, 8, pdu.isid.0);
                put(bhs, 14, pdu.tsih.to_be_bytes());
                put(bhs, 20, pdu.cid.to_be_bytes());
                put_command_numbers(bhs, pdu.cmd_sn, pdu.exp_stat_sn);
            }
            Request::Text(pdu) => {
                let flags = flag(pdu.is_final, FINAL) | flag(pdu.continues, CONTINUE);
                begin(bhs, opcodes::TEXT, flags, ahs, data, pdu.itt);
                put(bhs, 8, pdu.lun.to_be_bytes());
                put(bhs, 20, pdu.ttt.to_be_bytes());
                put_command_numbers(bhs, pdu.cmd_sn, pdu.exp_stat_sn);
            }
            Request::DataOut(pdu) => {
                begin(bhs, opcodes::DATA_OUT, flag(pdu.is_final, FINAL), ahs, data, pdu.itt);
                put(bhs, 8, pdu.lun.to_be_bytes());
                put(bhs, 20, pdu.ttt.to_be_bytes());
                put(bhs, 28, pdu.exp_stat_sn.to_be_bytes());
                put(bhs, 36, pdu.data_sn.to_be_bytes());
                put(bhs, 40, pdu.offset.to_be_bytes());
            }
            Request::Logout(pdu) => {
                begin(bhs, opcodes::LOGOUT, FINAL | pdu.reason.code(), ahs, data, pdu.itt);
                put(bhs, 20, pdu.cid.to_be_bytes());
                put_command_numbers(bhs, pdu.cmd_sn, pdu.exp_stat_sn);
            }
            Request::Snack(pdu) => {
                begin(bhs, opcodes::SNACK, FINAL | pdu.kind & 0xf, ahs, data, pdu.itt);
                put(bhs, 8, pdu.lun.to_be_bytes());
                put(bhs, 20, pdu.ttt.to_be_bytes());
                put(bhs, 28, pdu.exp_stat_sn.to_be_bytes());
                put(bhs, 40, pdu.first.to_be_bytes());
                put(bhs, 44, pdu.count.to_be_bytes());
            }
        }
        bhs[0] |= flag(self.immediate, IMMEDIATE);
    }
}
