//! Basic header segments (BHS), both directions (RFC 7143, section 11).
//!
//! A receiver reads [`BHS_LEN`] bytes, calls [`parse`] (a target) or [`parse_response`] (an initiator), then
//! reads [`Header::ahs_len`] bytes of additional headers, a header digest if negotiated, and
//! [`padded`]`(data_len)` bytes of data, then a data digest. A sender encodes a PDU's struct into 48 bytes.
//!
//! *Invariants:* nothing here allocates; every struct is small and `Copy`; parsing 48 arbitrary bytes never
//! panics. Reserved fields are ignored on reception and zero on transmission (section 11.1).
//!
//! Sequence numbers are checked by [`super::sequence`], data lengths and offsets by [`super::transfer`].

mod ahs;
mod request;
mod response;
#[cfg(test)]
mod tests;

pub use ahs::{Ahs, MAX_AHS_LEN};
pub use request::{
    DataOut, Login, Logout, LogoutReason, NopOut, Request, ScsiCommand, Snack, TaskAttribute, TaskFunction,
    TaskManagement, Text, parse,
};
pub use response::{
    AsyncEvent, AsyncMessage, DataIn, LoginResponse, LogoutResponse, LogoutResult, NopIn, R2t, Reject,
    RejectReason, Residual, Response, ScsiResponse, ServiceResponse, TaskManagementResponse, TaskResult,
    TextResponse, parse_response,
};

/// Bytes of a basic header segment.
pub const BHS_LEN: usize = 48;

/// A basic header segment as on the wire.
pub type Bhs = [u8; BHS_LEN];

/// Tag that stands for "no task" or "no transfer" (sections 11.2.1.8 and 11.7.4).
pub const RESERVED_TAG: u32 = 0xffff_ffff;

/// Largest data segment that the 24-bit length field allows, in bytes.
pub const MAX_DATA_SEGMENT: u32 = (1 << 24) - 1;

/// Number of bytes in a header or data digest.
pub const DIGEST_LEN: usize = 4;

/// Returns the number of zero bytes (0 to 3) that follow a segment of `len` bytes (section 11.2.3).
pub const fn padding(len: u32) -> u32 {
    len.wrapping_neg() & 3
}

/// Returns `len` rounded up to a multiple of four: the bytes of a segment on the wire. `len` is a data segment
/// length of at most 24 bits, so the sum cannot overflow.
pub const fn padded(len: u32) -> u32 {
    len.saturating_add(3) & !3
}

/// A PDU, with the header fields that all PDUs of a direction share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header<P> {
    /// The PDU.
    pub pdu: P,
    /// I bit: the command is for immediate delivery and does not advance CmdSN (section 4.2.2.1). Always
    /// `false` in PDUs of a target.
    pub immediate: bool,
    /// Bytes of additional header segments, a multiple of four, at most [`MAX_AHS_LEN`].
    pub ahs_len: u32,
    /// Bytes of the data segment without padding, at most [`MAX_DATA_SEGMENT`].
    pub data_len: u32,
}

impl<P> Header<P> {
    /// Returns the bytes of this PDU on the wire, with padding and digests.
    pub fn wire_len(&self, header_digest: bool, data_digest: bool) -> u32 {
        let digest = |on: bool| if on { DIGEST_LEN as u32 } else { 0 };
        let data = if self.data_len == 0 { 0 } else { padded(self.data_len) + digest(data_digest) };
        BHS_LEN as u32 + self.ahs_len + digest(header_digest) + data
    }
}

/// Reason why a header is not a valid PDU. [`lengths`] still reads its lengths, so a receiver can skip the
/// PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PduError {
    /// The opcode is not one that the peer may send.
    #[error("unknown opcode {0:#04x}")]
    UnknownOpcode(u8),
    /// A field has a reserved value, or fields contradict each other.
    #[error("invalid field {0}")]
    InvalidField(&'static str),
    /// An additional header segment is malformed or not supported.
    #[error("invalid additional header segment: {0}")]
    InvalidAhs(&'static str),
}

impl PduError {
    /// Returns the reason for the Reject PDU that answers this error (section 11.17.1).
    pub const fn reject_reason(self) -> RejectReason {
        match self {
            PduError::UnknownOpcode(_) => RejectReason::CommandNotSupported,
            PduError::InvalidField(_) | PduError::InvalidAhs(_) => RejectReason::InvalidPduField,
        }
    }
}

/// Returns the bytes of additional headers and of the data segment (without padding), which every header has in
/// the same place.
pub const fn lengths(bhs: &Bhs) -> (u32, u32) {
    ((bhs[4] as u32) * 4, u32::from_be_bytes([0, bhs[5], bhs[6], bhs[7]]))
}

/// Returns the opcode, without the I bit.
pub const fn opcode(bhs: &Bhs) -> u8 {
    bhs[0] & 0x3f
}

/// Returns the initiator task tag.
pub const fn task_tag(bhs: &Bhs) -> u32 {
    u32::from_be_bytes([bhs[16], bhs[17], bhs[18], bhs[19]])
}

/// Opcodes (section 11.2.1.2).
pub mod opcodes {
    /// NOP-Out.
    pub const NOP_OUT: u8 = 0x00;
    /// SCSI Command.
    pub const SCSI_COMMAND: u8 = 0x01;
    /// SCSI Task Management Function Request.
    pub const TASK_MANAGEMENT: u8 = 0x02;
    /// Login Request.
    pub const LOGIN: u8 = 0x03;
    /// Text Request.
    pub const TEXT: u8 = 0x04;
    /// SCSI Data-Out.
    pub const DATA_OUT: u8 = 0x05;
    /// Logout Request.
    pub const LOGOUT: u8 = 0x06;
    /// SNACK Request.
    pub const SNACK: u8 = 0x10;
    /// NOP-In.
    pub const NOP_IN: u8 = 0x20;
    /// SCSI Response.
    pub const SCSI_RESPONSE: u8 = 0x21;
    /// SCSI Task Management Function Response.
    pub const TASK_MANAGEMENT_RESPONSE: u8 = 0x22;
    /// Login Response.
    pub const LOGIN_RESPONSE: u8 = 0x23;
    /// Text Response.
    pub const TEXT_RESPONSE: u8 = 0x24;
    /// SCSI Data-In.
    pub const DATA_IN: u8 = 0x25;
    /// Logout Response.
    pub const LOGOUT_RESPONSE: u8 = 0x26;
    /// Ready To Transfer.
    pub const R2T: u8 = 0x31;
    /// Asynchronous Message.
    pub const ASYNC_MESSAGE: u8 = 0x32;
    /// Reject.
    pub const REJECT: u8 = 0x3f;
}

/// Sequence numbers that every PDU of a target carries (sections 4.2.2.1 and 4.2.2.2).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Numbers {
    /// StatSN: the number of this status, or of the next one if the PDU has no status.
    pub stat_sn: u32,
    /// ExpCmdSN: number of the next command that the target expects.
    pub exp_cmd_sn: u32,
    /// MaxCmdSN: number of the last command that the target would accept.
    pub max_cmd_sn: u32,
}

/// Initiator session identifier: 48 bits that the initiator chooses (section 11.12.5).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Isid(pub [u8; 6]);

impl std::fmt::Debug for Isid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Isid({self})")
    }
}

impl std::fmt::Display for Isid {
    /// Formats twelve hexadecimal digits after `0x`, as in SCSI port names (section 4.4.1).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("0x")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Copies `N` bytes at a constant offset out of a header.
const fn bytes<const N: usize>(bhs: &Bhs, at: usize) -> [u8; N] {
    let mut out = [0; N];
    let mut index = 0;
    while index < N {
        out[index] = bhs[at + index];
        index += 1;
    }
    out
}

const fn be16(bhs: &Bhs, at: usize) -> u16 {
    u16::from_be_bytes(bytes(bhs, at))
}

const fn be32(bhs: &Bhs, at: usize) -> u32 {
    u32::from_be_bytes(bytes(bhs, at))
}

const fn be64(bhs: &Bhs, at: usize) -> u64 {
    u64::from_be_bytes(bytes(bhs, at))
}

fn put<const N: usize>(bhs: &mut Bhs, at: usize, value: [u8; N]) {
    bhs[at..at + N].copy_from_slice(&value);
}

/// Clears a header and fills in the fields that all PDUs share.
fn begin(bhs: &mut Bhs, opcode: u8, flags: u8, ahs_len: u32, data_len: u32, task_tag: u32) {
    debug_assert!(data_len <= MAX_DATA_SEGMENT && ahs_len <= MAX_AHS_LEN && ahs_len.is_multiple_of(4));
    *bhs = [0; BHS_LEN];
    put(bhs, 4, data_len.to_be_bytes());
    bhs[0] = opcode;
    bhs[1] = flags;
    bhs[4] = (ahs_len / 4) as u8;
    put(bhs, 16, task_tag.to_be_bytes());
}

impl Numbers {
    fn put(self, bhs: &mut Bhs) {
        put(bhs, 24, self.stat_sn.to_be_bytes());
        put(bhs, 28, self.exp_cmd_sn.to_be_bytes());
        put(bhs, 32, self.max_cmd_sn.to_be_bytes());
    }

    const fn parse(bhs: &Bhs) -> Numbers {
        Numbers { stat_sn: be32(bhs, 24), exp_cmd_sn: be32(bhs, 28), max_cmd_sn: be32(bhs, 32) }
    }
}

const fn flag(on: bool, bit: u8) -> u8 {
    if on { bit } else { 0 }
}

/// F bit: the last PDU of a sequence.
const FINAL: u8 = 0x80;
/// I bit of the opcode byte.
const IMMEDIATE: u8 = 0x40;
/// C bit of text and login PDUs: the text continues in the next PDU.
const CONTINUE: u8 = 0x40;
