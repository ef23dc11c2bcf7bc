//! Parameters of a login: a target's offer ([`Offer`]), and the negotiated result ([`Parameters`] for the
//! session, [`ConnectionParameters`] for one connection). Defaults and ranges are those of RFC 7143,
//! section 13, and LIO.

use super::transfer::{ReadPlan, WriteRules};

/// Time at which a target reports that tasks were aborted (TaskReporting, RFC 7143, section 13.23).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum TaskReporting {
    /// As in RFC 3720: the response waits for the initiator's acknowledgements.
    #[default]
    Rfc3720,
    /// Response fence: the response waits until other connections acknowledged earlier ones.
    ResponseFence,
    /// FastAbort: aborted tasks are reported by asynchronous messages.
    FastAbort,
}

/// Negotiated session-wide parameters. The default applies if neither side negotiates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parameters {
    /// MaxConnections: maximum number of connections of the session.
    pub max_connections: u16,
    /// InitialR2T: the initiator sends no unsolicited Data-Out PDUs.
    pub initial_r2t: bool,
    /// ImmediateData: commands may carry immediate data.
    pub immediate_data: bool,
    /// MaxBurstLength: longest Data-In or solicited Data-Out sequence, in bytes.
    pub max_burst_length: u32,
    /// FirstBurstLength: maximum of a command's unsolicited data, in bytes.
    pub first_burst_length: u32,
    /// DefaultTime2Wait: seconds to wait before connecting again.
    pub default_time2wait: u16,
    /// DefaultTime2Retain: seconds for which tasks could be reassigned; useless at error recovery level 0.
    pub default_time2retain: u16,
    /// MaxOutstandingR2T: maximum number of a command's R2Ts in flight.
    pub max_outstanding_r2t: u16,
    /// ErrorRecoveryLevel. Our targets negotiate 0 only.
    pub error_recovery_level: u8,
    /// TaskReporting: when to report aborted tasks.
    pub task_reporting: TaskReporting,
    /// iSCSIProtocolLevel: 1 is RFC 7143, 2 adds RFC 7144. 0 if it was not negotiated.
    pub protocol_level: u8,
}

impl Default for Parameters {
    fn default() -> Parameters {
        Parameters {
            max_connections: 1,
            initial_r2t: true,
            immediate_data: true,
            max_burst_length: 262_144,
            first_burst_length: 65_536,
            default_time2wait: 2,
            default_time2retain: 20,
            max_outstanding_r2t: 1,
            error_recovery_level: 0,
            task_reporting: TaskReporting::Rfc3720,
            protocol_level: 0,
        }
    }
}

impl Parameters {
    /// Returns the rules for the data of writes.
    pub const fn write_rules(&self) -> WriteRules {
        WriteRules {
            initial_r2t: self.initial_r2t,
            immediate_data: self.immediate_data,
            first_burst_length: self.first_burst_length,
            max_burst_length: self.max_burst_length,
            max_outstanding_r2t: self.max_outstanding_r2t,
        }
    }

    /// Plans to send `len` bytes of a read over a connection.
    pub fn read_plan(&self, connection: &ConnectionParameters, len: u32) -> ReadPlan {
        ReadPlan::new(len, connection.max_send_segment, self.max_burst_length)
    }
}

/// Parameters of one connection. The default applies if neither side negotiates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionParameters {
    /// Every PDU has a header digest.
    pub header_digest: bool,
    /// Every data segment has a data digest.
    pub data_digest: bool,
    /// Longest data segment that the peer may send, in bytes: our MaxRecvDataSegmentLength.
    pub max_receive_segment: u32,
    /// Longest data segment that we may send, in bytes: the peer's MaxRecvDataSegmentLength, bounded by our
    /// own limit.
    pub max_send_segment: u32,
    /// Our own limit for `max_send_segment`, whatever the peer declares later.
    pub send_segment_limit: u32,
}

impl Default for ConnectionParameters {
    fn default() -> ConnectionParameters {
        ConnectionParameters {
            header_digest: false,
            data_digest: false,
            max_receive_segment: DEFAULT_SEGMENT,
            max_send_segment: DEFAULT_SEGMENT,
            send_segment_limit: super::pdu::MAX_DATA_SEGMENT,
        }
    }
}

/// MaxRecvDataSegmentLength of a side that declares none, and of both sides during the login (section
/// 13.12), in bytes.
pub const DEFAULT_SEGMENT: u32 = 8192;

/// Digests that a side accepts, in order of preference (HeaderDigest and DataDigest, section 13.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum DigestOffer {
    /// `None` only.
    None,
    /// `None,CRC32C`.
    NoneOrCrc32c,
    /// `CRC32C,None`: LIO's default.
    #[default]
    Crc32cOrNone,
    /// `CRC32C` only: connections without digests are refused.
    Crc32c,
}

impl DigestOffer {
    /// Returns the value of the key.
    pub const fn as_str(self) -> &'static str {
        match self {
            DigestOffer::None => "None",
            DigestOffer::NoneOrCrc32c => "None,CRC32C",
            DigestOffer::Crc32cOrNone => "CRC32C,None",
            DigestOffer::Crc32c => "CRC32C",
        }
    }

    /// Parses the value of the key. Returns `None` if it is invalid.
    pub fn parse(text: &str) -> Option<DigestOffer> {
        [DigestOffer::None, DigestOffer::NoneOrCrc32c, DigestOffer::Crc32cOrNone, DigestOffer::Crc32c]
            .into_iter()
            .find(|offer| offer.as_str() == text)
    }

    /// Returns whether CRC32C is accepted.
    pub const fn allows_crc32c(self) -> bool {
        !matches!(self, DigestOffer::None)
    }

    /// Returns whether `None` is accepted.
    pub const fn allows_none(self) -> bool {
        !matches!(self, DigestOffer::Crc32c)
    }
}

/// A target's offer in the negotiation, as in LIO's `param` directory. [`Offer::default`] has LIO's values
/// (inventory 2.8).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// HeaderDigest.
    pub header_digest: DigestOffer,
    /// DataDigest.
    pub data_digest: DigestOffer,
    /// MaxConnections: 1 to 65535.
    pub max_connections: u16,
    /// TargetAlias, at most 255 bytes; if empty, no alias is sent.
    pub target_alias: String,
    /// InitialR2T.
    pub initial_r2t: bool,
    /// ImmediateData.
    pub immediate_data: bool,
    /// MaxRecvDataSegmentLength that the target declares: 512 to 16777215.
    pub max_recv_data_segment_length: u32,
    /// Longest data segment that the target sends, in bytes, even if the initiator would receive more.
    pub max_xmit_data_segment_length: u32,
    /// MaxBurstLength: 512 to 16777215.
    pub max_burst_length: u32,
    /// FirstBurstLength: 512 to 16777215.
    pub first_burst_length: u32,
    /// DefaultTime2Wait: 0 to 3600 seconds.
    pub default_time2wait: u16,
    /// DefaultTime2Retain: 0 to 3600 seconds.
    pub default_time2retain: u16,
    /// MaxOutstandingR2T: 1 to 65535.
    pub max_outstanding_r2t: u16,
    /// Highest iSCSIProtocolLevel: 0 to 31.
    pub protocol_level: u8,
}

impl Default for Offer {
    fn default() -> Offer {
        Offer {
            header_digest: DigestOffer::default(),
            data_digest: DigestOffer::default(),
            max_connections: 1,
            target_alias: "LIO Target".to_owned(),
            initial_r2t: true,
            immediate_data: true,
            max_recv_data_segment_length: DEFAULT_SEGMENT,
            max_xmit_data_segment_length: 262_144,
            max_burst_length: 262_144,
            first_burst_length: 65_536,
            default_time2wait: 2,
            default_time2retain: 20,
            max_outstanding_r2t: 1,
            protocol_level: 2,
        }
    }
}
