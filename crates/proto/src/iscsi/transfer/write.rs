//! The plan of a write: its immediate data, unsolicited Data-Out PDUs, and R2Ts.

use super::super::pdu::{DataOut, RESERVED_TAG, RejectReason};

/// Maximum number of R2Ts that a plan keeps outstanding, whatever MaxOutstandingR2T allows: 1 MiB at the
/// default MaxBurstLength.
pub const MAX_R2TS: usize = 4;

/// Negotiated rules for the data of writes (section 13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteRules {
    /// InitialR2T: unsolicited Data-Out PDUs are not allowed.
    pub initial_r2t: bool,
    /// ImmediateData: a command may carry immediate data.
    pub immediate_data: bool,
    /// FirstBurstLength: maximum of immediate and unsolicited data together, in bytes.
    pub first_burst_length: u32,
    /// MaxBurstLength: maximum that one R2T requests, in bytes.
    pub max_burst_length: u32,
    /// MaxOutstandingR2T: maximum number of R2Ts in flight.
    pub max_outstanding_r2t: u16,
}

/// Violation of the rules for data. The task cannot complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TransferError {
    /// Immediate data although ImmediateData is `No`, or for a command without W bit.
    #[error("immediate data is not allowed")]
    ImmediateNotAllowed,
    /// Unsolicited data although InitialR2T is `Yes`, or after its final PDU.
    #[error("unsolicited data is not allowed")]
    UnsolicitedNotAllowed,
    /// More data than FirstBurstLength, an R2T, or the expected data transfer length allows.
    #[error("more data than allowed")]
    TooMuch,
    /// The data ends before the length that the R2T requested.
    #[error("final PDU before the end of the sequence")]
    TooShort,
    /// The target transfer tag is not that of the oldest outstanding R2T.
    #[error("unknown target transfer tag")]
    UnknownTag,
    /// DataSN is not the next one in the sequence: a PDU is missing or repeated.
    #[error("DataSN out of sequence")]
    DataSn,
    /// The buffer offset is not where the sequence continues.
    #[error("buffer offset out of sequence")]
    Offset,
}

impl TransferError {
    /// Returns the additional sense code and qualifier with which the task ends in CHECK CONDITION, ABORTED
    /// COMMAND (section 11.4.7.2): "unexpected unsolicited data", "incorrect amount of data", or "protocol
    /// service CRC error" for missing PDUs (section 7.8).
    pub const fn sense(self) -> (u8, u8) {
        match self {
            TransferError::ImmediateNotAllowed | TransferError::UnsolicitedNotAllowed => (0x0c, 0x0c),
            TransferError::TooMuch | TransferError::TooShort => (0x0c, 0x0d),
            TransferError::UnknownTag | TransferError::DataSn | TransferError::Offset => (0x47, 0x05),
        }
    }

    /// Returns the reason to reject the PDU with.
    pub const fn reject_reason(self) -> RejectReason {
        match self {
            TransferError::UnknownTag | TransferError::Offset => RejectReason::InvalidPduField,
            _ => RejectReason::ProtocolError,
        }
    }
}

/// Destination of a PDU's data segment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Placement {
    /// Offset within the command's data, in bytes.
    pub offset: u32,
    /// Bytes to keep, from the start of the segment.
    pub keep: u32,
    /// Bytes to discard after those, because the SCSI command does not take them.
    pub discard: u32,
}

/// An R2T to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct R2tOrder {
    /// R2TSN.
    pub r2t_sn: u32,
    /// Offset within the command's data, in bytes.
    pub offset: u32,
    /// Bytes to request.
    pub len: u32,
}

/// An R2T that was sent and not yet fulfilled.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Outstanding {
    ttt: u32,
    end: u32,
}

/// Data of a write: how much has arrived, and what to request next. See [`super`] for the invariants.
///
/// Call [`WritePlan::begin`] with the command, [`WritePlan::data_out`] with each Data-Out PDU, and after
/// each of them [`WritePlan::next_r2t`] until it returns `None`. The command's data is complete when
/// [`WritePlan::is_complete`] returns `true`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WritePlan {
    /// Expected data transfer length, in bytes.
    expected: u32,
    /// Bytes that the SCSI command takes, at most `expected`.
    wanted: u32,
    /// All bytes before this offset have arrived.
    received: u32,
    /// All bytes before this offset were requested or came unsolicited.
    requested: u32,
    /// DataSN of the next PDU of the current sequence.
    data_sn: u32,
    /// Whether unsolicited PDUs may still arrive; the one with the F bit is the last.
    unsolicited: bool,
    /// End offset of the data that may come unsolicited.
    first_burst_end: u32,
    burst_max: u32,
    r2t_sn: u32,
    r2ts_max: u8,
    /// Number of valid entries of `r2ts`, the oldest first.
    r2ts_len: u8,
    r2ts: [Outstanding; MAX_R2TS],
}

impl WritePlan {
    /// Starts a write. `expected` is the command's expected data transfer length; `wanted` the number of
    /// bytes that the SCSI command takes (bytes beyond `expected` are not requested); `immediate` the
    /// number of bytes in the command's data segment; `is_final` the command's F bit.
    ///
    /// # Errors
    /// The command carries or announces data that the negotiated rules forbid.
    pub fn begin(
        rules: &WriteRules,
        expected: u32,
        wanted: u32,
        immediate: u32,
        is_final: bool,
    ) -> Result<(WritePlan, Placement), TransferError> {
        if immediate > 0 && !rules.immediate_data {
            return Err(TransferError::ImmediateNotAllowed);
        }
        // With InitialR2T=Yes no unsolicited data may follow, so F must be set (section 11.3.1).
        if !is_final && rules.initial_r2t {
            return Err(TransferError::UnsolicitedNotAllowed);
        }
        let first_burst_end = rules.first_burst_length.min(expected);
        if immediate > first_burst_end {
            return Err(TransferError::TooMuch);
        }
        let mut plan = WritePlan {
            expected,
            wanted: wanted.min(expected),
            received: 0,
            requested: immediate,
            data_sn: 0,
            unsolicited: !is_final,
            first_burst_end,
            burst_max: rules.max_burst_length.max(512),
            r2t_sn: 0,
            r2ts_max: rules.max_outstanding_r2t.clamp(1, MAX_R2TS as u16) as u8,
            r2ts_len: 0,
            r2ts: [Outstanding::default(); MAX_R2TS],
        };
        let placement = plan.place(immediate);
        Ok((plan, placement))
    }

    /// Changes the number of bytes that the SCSI command takes, for callers that learn it after
    /// [`WritePlan::begin`]. Data that was already requested still arrives, and is discarded beyond
    /// `wanted`.
    pub fn want(&mut self, wanted: u32) {
        self.wanted = wanted.min(self.expected);
    }

    fn place(&mut self, len: u32) -> Placement {
        let offset = self.received;
        self.received += len;
        let keep = self.wanted.saturating_sub(offset).min(len);
        Placement { offset, keep, discard: len - keep }
    }

    /// Returns whether no more data will come: all wanted data arrived, no R2T is outstanding, and
    /// unsolicited data ended.
    pub const fn is_complete(&self) -> bool {
        !self.unsolicited && self.r2ts_len == 0 && self.received >= self.wanted
    }

    /// Returns how many bytes of the command's data have arrived.
    pub const fn received(&self) -> u32 {
        if self.received < self.wanted { self.received } else { self.wanted }
    }

    /// Returns the number of R2Ts so far, for ExpDataSN of the SCSI Response.
    pub const fn r2t_sn(&self) -> u32 {
        self.r2t_sn
    }

    /// Returns the next R2T to send, which will carry the target transfer tag `ttt`. Returns `None` if
    /// enough R2Ts are outstanding, unsolicited data is still coming, or no more data is wanted.
    ///
    /// The tag must differ from those of other R2Ts in flight on the session, and from [`RESERVED_TAG`].
    pub fn next_r2t(&mut self, ttt: u32) -> Option<R2tOrder> {
        debug_assert_ne!(ttt, RESERVED_TAG);
        let len = self.wanted.saturating_sub(self.requested).min(self.burst_max);
        if self.unsolicited || len == 0 || self.r2ts_len >= self.r2ts_max {
            return None;
        }
        let order = R2tOrder { r2t_sn: self.r2t_sn, offset: self.requested, len };
        self.requested += len;
        *self.r2ts.get_mut(usize::from(self.r2ts_len))? = Outstanding { ttt, end: self.requested };
        self.r2ts_len += 1;
        self.r2t_sn += 1;
        Some(order)
    }

    /// Checks a Data-Out PDU of `len` data bytes, and returns where they belong.
    ///
    /// # Errors
    /// The PDU violates a rule. The plan is unchanged; the caller ends the task or the session.
    pub fn data_out(&mut self, pdu: &DataOut, len: u32) -> Result<Placement, TransferError> {
        let end = if pdu.ttt == RESERVED_TAG {
            if !self.unsolicited {
                return Err(TransferError::UnsolicitedNotAllowed);
            }
            self.first_burst_end
        } else {
            let oldest = self.r2ts.first().filter(|r2t| self.r2ts_len > 0 && r2t.ttt == pdu.ttt);
            oldest.ok_or(TransferError::UnknownTag)?.end
        };
        if pdu.data_sn != self.data_sn {
            return Err(TransferError::DataSn);
        }
        if pdu.offset != self.received {
            return Err(TransferError::Offset);
        }
        let after = self.received.checked_add(len).filter(|after| *after <= end);
        let after = after.ok_or(TransferError::TooMuch)?;
        if pdu.ttt == RESERVED_TAG {
            self.requested = after;
            self.unsolicited = !pdu.is_final;
        } else if pdu.is_final {
            if after != end {
                return Err(TransferError::TooShort);
            }
            self.r2ts.copy_within(1.., 0);
            self.r2ts_len -= 1;
        }
        self.data_sn = if pdu.is_final { 0 } else { self.data_sn.wrapping_add(1) };
        Ok(self.place(len))
    }
}
