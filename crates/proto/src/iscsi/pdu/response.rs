//! PDUs of a target (RFC 7143, sections 11.4, 11.6, 11.7 to 11.9, 11.11, 11.13, 11.15, 11.17 and 11.19).
//!
//! The `encode` functions for a target write a whole header; the caller appends the data segment, padding and
//! digests.

use super::{
    Bhs, CONTINUE, FINAL, Header, Isid, Numbers, PduError, RESERVED_TAG, be16, be32, be64, begin, bytes,
    flag, lengths, opcodes, put,
};

/// A PDU of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Response {
    /// A ping, or the answer to one.
    NopIn(NopIn),
    /// The response that ends a SCSI command.
    ScsiResponse(ScsiResponse),
    /// The response that ends a task management function.
    TaskManagement(TaskManagementResponse),
    /// The answer to a login request.
    Login(LoginResponse),
    /// The answer to a text request.
    Text(TextResponse),
    /// Data of a read, perhaps with the command's status.
    DataIn(DataIn),
    /// The answer to a logout request.
    Logout(LogoutResponse),
    /// A request for data of a write.
    R2t(R2t),
    /// A notification of an event.
    AsyncMessage(AsyncMessage),
    /// The rejection of a PDU.
    Reject(Reject),
}

impl Response {
    /// Returns the sequence numbers of the PDU.
    pub const fn numbers(&self) -> Numbers {
        match self {
            Response::NopIn(pdu) => pdu.numbers,
            Response::ScsiResponse(pdu) => pdu.numbers,
            Response::TaskManagement(pdu) => pdu.numbers,
            Response::Login(pdu) => pdu.numbers,
            Response::Text(pdu) => pdu.numbers,
            Response::DataIn(pdu) => pdu.numbers,
            Response::Logout(pdu) => pdu.numbers,
            Response::R2t(pdu) => pdu.numbers,
            Response::AsyncMessage(pdu) => pdu.numbers,
            Response::Reject(pdu) => pdu.numbers,
        }
    }
}

/// Difference between the length that the initiator expected and the command's own (section 11.4.5).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Residual {
    /// The lengths are equal.
    #[default]
    None,
    /// The command would have transferred this many bytes more than expected.
    Overflow(u32),
    /// This many of the expected bytes were not transferred.
    Underflow(u32),
}

impl Residual {
    /// Compares the expected data transfer length with the number of bytes that the command transfers, or would
    /// transfer if the initiator had expected enough. Saturates at 4 GiB - 1.
    pub const fn of(expected: u32, actual: u64) -> Residual {
        let expected = expected as u64;
        if actual > expected {
            let more = actual - expected;
            Residual::Overflow(if more > u32::MAX as u64 { u32::MAX } else { more as u32 })
        } else if actual < expected {
            Residual::Underflow((expected - actual) as u32)
        } else {
            Residual::None
        }
    }

    const fn flags(self) -> u8 {
        match self {
            Residual::None => 0,
            Residual::Overflow(_) => 0x04,
            Residual::Underflow(_) => 0x02,
        }
    }

    const fn count(self) -> u32 {
        match self {
            Residual::None => 0,
            Residual::Overflow(count) | Residual::Underflow(count) => count,
        }
    }

    /// Decodes the O and U bits and the residual count. Both bits set is a protocol error.
    const fn parse(flags: u8, count: u32) -> Result<Residual, PduError> {
        match flags & 0x06 {
            0 => Ok(Residual::None),
            0x04 => Ok(Residual::Overflow(count)),
            0x02 => Ok(Residual::Underflow(count)),
            _ => Err(PduError::InvalidField("O and U bits")),
        }
    }
}

/// iSCSI service response (section 11.4.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum ServiceResponse {
    /// The command completed; the SCSI status is valid.
    #[default]
    Completed,
    /// The target failed before the command had a status.
    TargetFailure,
    /// Unknown service response.
    Other(u8),
}

impl ServiceResponse {
    const fn code(self) -> u8 {
        match self {
            ServiceResponse::Completed => 0,
            ServiceResponse::TargetFailure => 1,
            ServiceResponse::Other(code) => code,
        }
    }
}

/// SCSI Response (section 11.4). Its data segment is a 16-bit length, the sense data, and response data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScsiResponse {
    /// Service response.
    pub response: ServiceResponse,
    /// SCSI status.
    pub status: u8,
    /// Status qualifier (RFC 7144, section 4.2); 0 below iSCSIProtocolLevel 2.
    pub status_qualifier: u16,
    /// Initiator task tag.
    pub itt: u32,
    /// Sequence numbers.
    pub numbers: Numbers,
    /// Number of Data-In and R2T PDUs that the target sent for the command.
    pub exp_data_sn: u32,
    /// Residual of the command; of the data-out if the command is bidirectional.
    pub residual: Residual,
}

impl ScsiResponse {
    /// Encodes the header. `data_len` counts the sense data and its 16-bit length.
    pub fn encode(&self, bhs: &mut Bhs, data_len: u32) {
        begin(bhs, opcodes::SCSI_RESPONSE, FINAL | self.residual.flags(), 0, data_len, self.itt);
        put(bhs, 2, [self.response.code(), self.status]);
        put(bhs, 8, self.status_qualifier.to_be_bytes());
        self.numbers.put(bhs);
        put(bhs, 36, self.exp_data_sn.to_be_bytes());
        put(bhs, 44, self.residual.count().to_be_bytes());
    }
}

/// Result of a task management function (section 11.6.1; 7: RFC 7144, section 4.4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TaskResult {
    /// Function complete.
    Complete,
    /// The task does not exist.
    NoTask,
    /// The logical unit does not exist.
    NoLun,
    /// The task is still allegiant to another connection.
    StillAllegiant,
    /// Tasks cannot be reassigned.
    ReassignNotSupported,
    /// The function is not supported.
    NotSupported,
    /// The initiator may not use the function.
    NotAuthorised,
    /// Function succeeded: the queried task or event exists.
    Succeeded,
    /// The function was rejected.
    Rejected,
    /// Unknown result.
    Other(u8),
}

impl TaskResult {
    const fn from_code(code: u8) -> TaskResult {
        match code {
            0 => TaskResult::Complete,
            1 => TaskResult::NoTask,
            2 => TaskResult::NoLun,
            3 => TaskResult::StillAllegiant,
            4 => TaskResult::ReassignNotSupported,
            5 => TaskResult::NotSupported,
            6 => TaskResult::NotAuthorised,
            7 => TaskResult::Succeeded,
            255 => TaskResult::Rejected,
            other => TaskResult::Other(other),
        }
    }

    const fn code(self) -> u8 {
        match self {
            TaskResult::Complete => 0,
            TaskResult::NoTask => 1,
            TaskResult::NoLun => 2,
            TaskResult::StillAllegiant => 3,
            TaskResult::ReassignNotSupported => 4,
            TaskResult::NotSupported => 5,
            TaskResult::NotAuthorised => 6,
            TaskResult::Succeeded => 7,
            TaskResult::Rejected => 255,
            TaskResult::Other(code) => code,
        }
    }
}

/// Task Management Function Response (section 11.6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TaskManagementResponse {
    /// Result.
    pub result: TaskResult,
    /// Additional response information (RFC 7144, section 4.4): for QUERY ASYNCHRONOUS EVENT.
    pub additional: [u8; 3],
    /// Initiator task tag of the function.
    pub itt: u32,
    /// Sequence numbers.
    pub numbers: Numbers,
}

impl TaskManagementResponse {
    /// Encodes the header.
    pub fn encode(&self, bhs: &mut Bhs) {
        begin(bhs, opcodes::TASK_MANAGEMENT_RESPONSE, FINAL, 0, 0, self.itt);
        bhs[2] = self.result.code();
        put(bhs, 20, self.additional);
        self.numbers.put(bhs);
    }
}

/// Login Response (section 11.13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoginResponse {
    /// T bit: the target agrees to enter the next stage.
    pub transit: bool,
    /// C bit: the text continues in the next response.
    pub continues: bool,
    /// Current stage.
    pub csg: u8,
    /// Next stage; meaningful with `transit`.
    pub nsg: u8,
    /// Highest version that the target supports.
    pub version_max: u8,
    /// Version in use.
    pub version_active: u8,
    /// Initiator session identifier.
    pub isid: Isid,
    /// Target session identifying handle; set in the final response.
    pub tsih: u16,
    /// Initiator task tag of the login.
    pub itt: u32,
    /// Sequence numbers.
    pub numbers: Numbers,
    /// Status-Class: 0 success, 1 redirection, 2 initiator error, 3 target error.
    pub status_class: u8,
    /// Status-Detail.
    pub status_detail: u8,
}

impl LoginResponse {
    /// Encodes the header.
    pub fn encode(&self, bhs: &mut Bhs, data_len: u32) {
        let flags = flag(self.transit, FINAL) | flag(self.continues, CONTINUE);
        let stages = (self.csg & 3) << 2 | self.nsg & 3;
        begin(bhs, opcodes::LOGIN_RESPONSE, flags | stages, 0, data_len, self.itt);
        put(bhs, 2, [self.version_max, self.version_active]);
        put(bhs, 8, self.isid.0);
        put(bhs, 14, self.tsih.to_be_bytes());
        self.numbers.put(bhs);
        put(bhs, 36, [self.status_class, self.status_detail]);
    }
}

/// Text Response (section 11.11).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TextResponse {
    /// F bit: the target has no more to negotiate.
    pub is_final: bool,
    /// C bit: the text continues in the next response.
    pub continues: bool,
    /// LUN field, which the initiator copies with `ttt`.
    pub lun: u64,
    /// Initiator task tag.
    pub itt: u32,
    /// Target transfer tag; differs from [`RESERVED_TAG`] if the initiator is to continue.
    pub ttt: u32,
    /// Sequence numbers.
    pub numbers: Numbers,
}

impl TextResponse {
    /// Encodes the header.
    pub fn encode(&self, bhs: &mut Bhs, data_len: u32) {
        let flags = flag(self.is_final, FINAL) | flag(self.continues, CONTINUE);
        begin(bhs, opcodes::TEXT_RESPONSE, flags, 0, data_len, self.itt);
        put(bhs, 8, self.lun.to_be_bytes());
        put(bhs, 20, self.ttt.to_be_bytes());
        self.numbers.put(bhs);
    }
}

/// SCSI Data-In (section 11.7).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataIn {
    /// F bit: the last PDU of a sequence.
    pub is_final: bool,
    /// A bit: asks the initiator to acknowledge the data (error recovery levels above 0).
    pub acknowledge: bool,
    /// SCSI status, if this PDU ends the command (S bit). StatSN is valid only then.
    pub status: Option<u8>,
    /// Residual; meaningful with `status`.
    pub residual: Residual,
    /// LUN; valid only together with a target transfer tag.
    pub lun: u64,
    /// Initiator task tag.
    pub itt: u32,
    /// Target transfer tag, for an acknowledgement; else [`RESERVED_TAG`].
    pub ttt: u32,
    /// Sequence numbers.
    pub numbers: Numbers,
    /// Number of this PDU within the command, from 0.
    pub data_sn: u32,
    /// Offset of the data within the command's data, in bytes.
    pub offset: u32,
}

impl DataIn {
    /// Encodes the header. A PDU with a status is always final.
    pub fn encode(&self, bhs: &mut Bhs, data_len: u32) {
        let mut flags = flag(self.is_final, FINAL) | flag(self.acknowledge, 0x40);
        if self.status.is_some() {
            flags |= FINAL | 1 | self.residual.flags();
        }
        begin(bhs, opcodes::DATA_IN, flags, 0, data_len, self.itt);
        put(bhs, 8, self.lun.to_be_bytes());
        put(bhs, 20, self.ttt.to_be_bytes());
        self.numbers.put(bhs);
        put(bhs, 36, self.data_sn.to_be_bytes());
        put(bhs, 40, self.offset.to_be_bytes());
        if let Some(status) = self.status {
            bhs[3] = status;
            put(bhs, 44, self.residual.count().to_be_bytes());
        } else {
            put(bhs, 24, [0; 4]);
        }
    }
}

/// Ready To Transfer (section 11.8).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct R2t {
    /// LUN of the command.
    pub lun: u64,
    /// Initiator task tag of the command.
    pub itt: u32,
    /// Target transfer tag, which the Data-Out PDUs carry. Never [`RESERVED_TAG`].
    pub ttt: u32,
    /// Sequence numbers. StatSN is the next one, which this PDU does not consume.
    pub numbers: Numbers,
    /// Number of this R2T within the command, from 0.
    pub r2t_sn: u32,
    /// Offset of the requested data within the command's data, in bytes.
    pub offset: u32,
    /// Bytes of data requested: at least 1, at most MaxBurstLength.
    pub desired_len: u32,
}

impl R2t {
    /// Encodes the header.
    pub fn encode(&self, bhs: &mut Bhs) {
        begin(bhs, opcodes::R2T, FINAL, 0, 0, self.itt);
        put(bhs, 8, self.lun.to_be_bytes());
        put(bhs, 20, self.ttt.to_be_bytes());
        self.numbers.put(bhs);
        put(bhs, 36, self.r2t_sn.to_be_bytes());
        put(bhs, 40, self.offset.to_be_bytes());
        put(bhs, 44, self.desired_len.to_be_bytes());
    }
}

/// NOP-In (section 11.19).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NopIn {
    /// LUN field, which the initiator copies with `ttt`.
    pub lun: u64,
    /// Initiator task tag of the NOP-Out that this PDU answers, else [`RESERVED_TAG`].
    pub itt: u32,
    /// Target transfer tag, if the target requests an answer; else [`RESERVED_TAG`].
    pub ttt: u32,
    /// Sequence numbers. StatSN advances only if `itt` is valid.
    pub numbers: Numbers,
}

impl NopIn {
    /// Encodes the header. `data_len` is the length of the returned ping data.
    pub fn encode(&self, bhs: &mut Bhs, data_len: u32) {
        begin(bhs, opcodes::NOP_IN, FINAL, 0, data_len, self.itt);
        put(bhs, 8, self.lun.to_be_bytes());
        put(bhs, 20, self.ttt.to_be_bytes());
        self.numbers.put(bhs);
    }
}

/// Result of a logout (section 11.15.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LogoutResult {
    /// The connection or session is closed.
    Closed,
    /// The session has no connection with this CID.
    NoConnection,
    /// Connection recovery is not supported.
    RecoveryNotSupported,
    /// Cleanup failed.
    Failed,
    /// Unknown result.
    Other(u8),
}

impl LogoutResult {
    const fn from_code(code: u8) -> LogoutResult {
        match code {
            0 => LogoutResult::Closed,
            1 => LogoutResult::NoConnection,
            2 => LogoutResult::RecoveryNotSupported,
            3 => LogoutResult::Failed,
            other => LogoutResult::Other(other),
        }
    }

    const fn code(self) -> u8 {
        match self {
            LogoutResult::Closed => 0,
            LogoutResult::NoConnection => 1,
            LogoutResult::RecoveryNotSupported => 2,
            LogoutResult::Failed => 3,
            LogoutResult::Other(code) => code,
        }
    }
}

/// Logout Response (section 11.15).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogoutResponse {
    /// Result.
    pub result: LogoutResult,
    /// Initiator task tag.
    pub itt: u32,
    /// Sequence numbers.
    pub numbers: Numbers,
    /// Seconds to wait before reconnecting.
    pub time2wait: u16,
    /// Seconds after `time2wait` during which tasks could be reassigned.
    pub time2retain: u16,
}

impl LogoutResponse {
    /// Encodes the header.
    pub fn encode(&self, bhs: &mut Bhs) {
        begin(bhs, opcodes::LOGOUT_RESPONSE, FINAL, 0, 0, self.itt);
        bhs[2] = self.result.code();
        self.numbers.put(bhs);
        put(bhs, 40, self.time2wait.to_be_bytes());
        put(bhs, 42, self.time2retain.to_be_bytes());
    }
}

/// Reason for a Reject (section 11.17.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RejectReason {
    /// The data digest is wrong; the initiator may retransmit the PDU.
    DataDigestError,
    /// SNACK rejected.
    SnackReject,
    /// Protocol error.
    ProtocolError,
    /// Command not supported.
    CommandNotSupported,
    /// Too many immediate commands.
    ImmediateCommandReject,
    /// Task in progress: its tag is in use.
    TaskInProgress,
    /// Invalid DataACK.
    InvalidDataAck,
    /// Invalid PDU field.
    InvalidPduField,
    /// The target is out of resources for a long operation.
    LongOperationReject,
    /// The connection waits for a logout.
    WaitingForLogout,
    /// Unknown reason.
    Other(u8),
}

impl RejectReason {
    const fn from_code(code: u8) -> RejectReason {
        match code {
            0x02 => RejectReason::DataDigestError,
            0x03 => RejectReason::SnackReject,
            0x04 => RejectReason::ProtocolError,
            0x05 => RejectReason::CommandNotSupported,
            0x06 => RejectReason::ImmediateCommandReject,
            0x07 => RejectReason::TaskInProgress,
            0x08 => RejectReason::InvalidDataAck,
            0x09 => RejectReason::InvalidPduField,
            0x0a => RejectReason::LongOperationReject,
            0x0c => RejectReason::WaitingForLogout,
            other => RejectReason::Other(other),
        }
    }

    const fn code(self) -> u8 {
        match self {
            RejectReason::DataDigestError => 0x02,
            RejectReason::SnackReject => 0x03,
            RejectReason::ProtocolError => 0x04,
            RejectReason::CommandNotSupported => 0x05,
            RejectReason::ImmediateCommandReject => 0x06,
            RejectReason::TaskInProgress => 0x07,
            RejectReason::InvalidDataAck => 0x08,
            RejectReason::InvalidPduField => 0x09,
            RejectReason::LongOperationReject => 0x0a,
            RejectReason::WaitingForLogout => 0x0c,
            RejectReason::Other(code) => code,
        }
    }
}

/// Reject (section 11.17). Its data segment is the header of the rejected PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reject {
    /// Reason.
    pub reason: RejectReason,
    /// Sequence numbers.
    pub numbers: Numbers,
    /// DataSN or R2TSN, for some reasons.
    pub data_sn: u32,
}

impl Reject {
    /// Encodes the header. The data segment is the [`super::BHS_LEN`] bytes of the rejected header.
    pub fn encode(&self, bhs: &mut Bhs) {
        begin(bhs, opcodes::REJECT, FINAL, 0, super::BHS_LEN as u32, RESERVED_TAG);
        bhs[2] = self.reason.code();
        self.numbers.put(bhs);
        put(bhs, 36, self.data_sn.to_be_bytes());
    }
}

/// Event of an Asynchronous Message (section 11.9.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AsyncEvent {
    /// A SCSI event; the data segment has sense data.
    Scsi,
    /// The target requests a logout within the given time.
    RequestLogout {
        /// Time in seconds.
        within: u16,
    },
    /// The target drops a connection, now or soon.
    DropConnection {
        /// CID of the connection.
        cid: u16,
        /// Seconds to wait before reconnecting.
        time2wait: u16,
        /// Further seconds during which tasks could be reassigned.
        time2retain: u16,
    },
    /// The target drops all connections of the session.
    DropSession {
        /// Seconds to wait before reconnecting.
        time2wait: u16,
        /// Further seconds during which tasks could be reassigned.
        time2retain: u16,
    },
    /// The target requests a text negotiation within the given time.
    RequestNegotiation {
        /// Time in seconds.
        within: u16,
    },
    /// The target ended all tasks that this session issued to the logical unit (FastAbort, section
    /// 4.2.3.4).
    TasksTerminated,
    /// Unknown event.
    Other(u8),
}

/// Asynchronous Message (section 11.9).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncMessage {
    /// Event.
    pub event: AsyncEvent,
    /// LUN, for events of a logical unit.
    pub lun: u64,
    /// Sequence numbers.
    pub numbers: Numbers,
}

impl AsyncMessage {
    /// Encodes the header.
    pub fn encode(&self, bhs: &mut Bhs, data_len: u32) {
        let (code, parameters) = match self.event {
            AsyncEvent::Scsi => (0, [0; 3]),
            AsyncEvent::RequestLogout { within } => (1, [0, 0, within]),
            AsyncEvent::DropConnection { cid, time2wait, time2retain } => (2, [cid, time2wait, time2retain]),
            AsyncEvent::DropSession { time2wait, time2retain } => (3, [0, time2wait, time2retain]),
            AsyncEvent::RequestNegotiation { within } => (4, [0, 0, within]),
            AsyncEvent::TasksTerminated => (5, [0; 3]),
            AsyncEvent::Other(code) => (code, [0; 3]),
        };
        begin(bhs, opcodes::ASYNC_MESSAGE, FINAL, 0, data_len, RESERVED_TAG);
        put(bhs, 8, self.lun.to_be_bytes());
        self.numbers.put(bhs);
        bhs[36] = code;
        for (index, parameter) in parameters.into_iter().enumerate() {
            put(bhs, 38 + 2 * index, parameter.to_be_bytes());
        }
    }

    fn event(bhs: &Bhs) -> AsyncEvent {
        let (first, time2wait, time2retain) = (be16(bhs, 38), be16(bhs, 40), be16(bhs, 42));
        match bhs[36] {
            0 => AsyncEvent::Scsi,
            1 => AsyncEvent::RequestLogout { within: time2retain },
            2 => AsyncEvent::DropConnection { cid: first, time2wait, time2retain },
            3 => AsyncEvent::DropSession { time2wait, time2retain },
            4 => AsyncEvent::RequestNegotiation { within: time2retain },
            5 => AsyncEvent::TasksTerminated,
            other => AsyncEvent::Other(other),
        }
    }
}

/// Parses a header that a target sent.
///
/// # Errors
/// The opcode is unknown, or fields contradict each other.
pub fn parse_response(bhs: &Bhs) -> Result<Header<Response>, PduError> {
    let (ahs_len, data_len) = lengths(bhs);
    let flags = bhs[1];
    let (lun, itt, ttt) = (be64(bhs, 8), be32(bhs, 16), be32(bhs, 20));
    let numbers = Numbers::parse(bhs);
    let (is_final, continues) = (flags & FINAL != 0, flags & CONTINUE != 0);
    let pdu = match super::opcode(bhs) {
        opcodes::NOP_IN => Response::NopIn(NopIn { lun, itt, ttt, numbers }),
        opcodes::SCSI_RESPONSE => Response::ScsiResponse(ScsiResponse {
            response: match bhs[2] {
                0 => ServiceResponse::Completed,
                1 => ServiceResponse::TargetFailure,
                other => ServiceResponse::Other(other),
            },
            status: bhs[3],
            status_qualifier: be16(bhs, 8),
            itt,
            numbers,
            exp_data_sn: be32(bhs, 36),
            residual: Residual::parse(flags, be32(bhs, 44))?,
        }),
        opcodes::TASK_MANAGEMENT_RESPONSE => Response::TaskManagement(TaskManagementResponse {
            result: TaskResult::from_code(bhs[2]),
            additional: bytes(bhs, 20),
            itt,
            numbers,
        }),
        opcodes::LOGIN_RESPONSE => Response::Login(LoginResponse {
            transit: is_final,
            continues,
            csg: flags >> 2 & 3,
            nsg: flags & 3,
            version_max: bhs[2],
            version_active: bhs[3],
            isid: Isid(bytes(bhs, 8)),
            tsih: be16(bhs, 14),
            itt,
            numbers,
            status_class: bhs[36],
            status_detail: bhs[37],
        }),
        opcodes::TEXT_RESPONSE => {
            Response::Text(TextResponse { is_final, continues, lun, itt, ttt, numbers })
        }
        opcodes::DATA_IN => {
            let has_status = flags & 1 != 0;
            Response::DataIn(DataIn {
                is_final,
                acknowledge: flags & 0x40 != 0,
                status: has_status.then_some(bhs[3]),
                residual: if has_status { Residual::parse(flags, be32(bhs, 44))? } else { Residual::None },
                lun,
                itt,
                ttt,
                numbers,
                data_sn: be32(bhs, 36),
                offset: be32(bhs, 40),
            })
        }
        opcodes::LOGOUT_RESPONSE => Response::Logout(LogoutResponse {
            result: LogoutResult::from_code(bhs[2]),
            itt,
            numbers,
            time2wait: be16(bhs, 40),
            time2retain: be16(bhs, 42),
        }),
        opcodes::R2T => Response::R2t(R2t {
            lun,
            itt,
            ttt,
            numbers,
            r2t_sn: be32(bhs, 36),
            offset: be32(bhs, 40),
            desired_len: be32(bhs, 44),
        }),
        opcodes::ASYNC_MESSAGE => {
            Response::AsyncMessage(AsyncMessage { event: AsyncMessage::event(bhs), lun, numbers })
        }
        opcodes::REJECT => {
            let reason = RejectReason::from_code(bhs[2]);
            Response::Reject(Reject { reason, numbers, data_sn: be32(bhs, 36) })
        }
        other => return Err(PduError::UnknownOpcode(other)),
    };
    Ok(Header { pdu, immediate: false, ahs_len, data_len })
}

impl Header<Response> {
    /// Encodes the header of any PDU. PDUs without a data segment ignore `data_len`.
    pub fn encode(&self, bhs: &mut Bhs) {
        match &self.pdu {
            Response::NopIn(pdu) => pdu.encode(bhs, self.data_len),
            Response::ScsiResponse(pdu) => pdu.encode(bhs, self.data_len),
            Response::TaskManagement(pdu) => pdu.encode(bhs),
            Response::Login(pdu) => pdu.encode(bhs, self.data_len),
            Response::Text(pdu) => pdu.encode(bhs, self.data_len),
            Response::DataIn(pdu) => pdu.encode(bhs, self.data_len),
            Response::Logout(pdu) => pdu.encode(bhs),
            Response::R2t(pdu) => pdu.encode(bhs),
            Response::AsyncMessage(pdu) => pdu.encode(bhs, self.data_len),
            Response::Reject(pdu) => pdu.encode(bhs),
        }
    }
}
