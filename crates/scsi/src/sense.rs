//! Sense data: SPC-6 section 4.4.

use crate::bytes::put;

/// Sense key: SPC-6 table 49.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Key {
    /// There is nothing to report.
    NoSense = 0x0,
    /// The command succeeded after recovery.
    RecoveredError = 0x1,
    /// The logical unit is not accessible at present.
    NotReady = 0x2,
    /// The medium is defective.
    MediumError = 0x3,
    /// The device has failed.
    HardwareError = 0x4,
    /// The command is invalid.
    IllegalRequest = 0x5,
    /// An event occurred that the initiator must be informed of.
    UnitAttention = 0x6,
    /// The medium is write protected.
    DataProtect = 0x7,
    /// A blank or non-blank medium was encountered.
    BlankCheck = 0x8,
    /// EXTENDED COPY stopped early.
    CopyAborted = 0xA,
    /// The device server aborted the command.
    AbortedCommand = 0xB,
    /// The data differs from the medium.
    Miscompare = 0xE,
    /// The command completed; see the additional code.
    Completed = 0xF,
}

/// The wrong field of a CDB or parameter list: SPC-6 section 4.4.2.4.2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FieldPointer {
    /// Whether the field is in the CDB instead of the parameter list.
    pub in_cdb: bool,
    /// Byte in which the field starts.
    pub byte: u16,
    /// Most significant bit of the field in that byte; `None` means the whole byte.
    pub bit: Option<u8>,
}

/// Content of the sense-key specific bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Specific {
    /// No content.
    None,
    /// The wrong field.
    Field(FieldPointer),
    /// Progress of a long operation, in 65536ths.
    Progress(u16),
    /// EXTENDED COPY: the wrong segment descriptor, or byte of a descriptor.
    Segment {
        /// Whether the field pointer counts from the start of the segment descriptor (SD bit).
        in_descriptor: bool,
        /// Byte in which the field starts.
        byte: u16,
        /// Most significant bit of the field; `None` means the whole byte.
        bit: Option<u8>,
    },
}

/// Sense data, of fixed size and `Copy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sense {
    /// Sense key.
    pub key: Key,
    /// Additional sense code.
    pub asc: u8,
    /// Additional sense code qualifier.
    pub ascq: u8,
    /// INFORMATION field.
    pub information: Option<u64>,
    /// COMMAND-SPECIFIC INFORMATION field.
    pub command: Option<u64>,
    /// Sense-key specific bytes.
    pub specific: Specific,
}

impl Sense {
    /// Maximum length of encoded sense data in bytes.
    pub const LEN_MAX: usize = 48;
    /// No sense data.
    pub const NONE: Sense = Sense::new(Key::NoSense, 0, 0);

    /// 05/20/00: the operation code is not supported.
    pub const INVALID_OPCODE: Sense = Sense::new(Key::IllegalRequest, 0x20, 0x00);
    /// 05/21/00: the range ends past the device.
    pub const LBA_OUT_OF_RANGE: Sense = Sense::new(Key::IllegalRequest, 0x21, 0x00);
    /// 05/24/00 without a field pointer.
    pub const INVALID_FIELD_IN_CDB: Sense = Sense::new(Key::IllegalRequest, 0x24, 0x00);
    /// 05/25/00: the logical unit does not exist.
    pub const LUN_NOT_SUPPORTED: Sense = Sense::new(Key::IllegalRequest, 0x25, 0x00);
    /// 05/26/00 without a field pointer.
    pub const INVALID_FIELD_IN_PARAMETERS: Sense = Sense::new(Key::IllegalRequest, 0x26, 0x00);
    /// 05/1A/00: the parameter list is shorter or longer than its content.
    pub const PARAMETER_LIST_LENGTH: Sense = Sense::new(Key::IllegalRequest, 0x1A, 0x00);
    /// 07/27/00: the unit, or the mapping, is write protected.
    pub const WRITE_PROTECTED: Sense = Sense::new(Key::DataProtect, 0x27, 0x00);
    /// 07/27/07: a thin device has no space left.
    pub const NO_SPACE: Sense = Sense::new(Key::DataProtect, 0x27, 0x07);
    /// 02/08/00: LUN communication failure, after which initiators retry.
    pub const COMMUNICATION_FAILURE: Sense = Sense::new(Key::NotReady, 0x08, 0x00);
    /// 05/0E/03: the length that the initiator announced does not fit the CDB (INVALID FIELD IN COMMAND
    /// INFORMATION UNIT).
    pub const INVALID_TRANSFER: Sense = Sense::new(Key::IllegalRequest, 0x0E, 0x03);
    /// 05/39/00: mode pages cannot be saved.
    pub const SAVING_UNSUPPORTED: Sense = Sense::new(Key::IllegalRequest, 0x39, 0x00);
    /// 02/3A/00: the medium was ejected.
    pub const NO_MEDIUM: Sense = Sense::new(Key::NotReady, 0x3A, 0x00);
    /// 05/53/02: a nexus prevents the removal of the medium.
    pub const REMOVAL_PREVENTED: Sense = Sense::new(Key::IllegalRequest, 0x53, 0x02);

    /// Creates sense data from a key, an additional sense code and a qualifier.
    pub const fn new(key: Key, asc: u8, ascq: u8) -> Sense {
        Sense { key, asc, ascq, information: None, command: None, specific: Specific::None }
    }

    /// Returns 05/24/00 with a pointer to a byte of the CDB; `bit` is the most significant bit of the
    /// field.
    pub const fn cdb_field(byte: u16, bit: Option<u8>) -> Sense {
        let specific = Specific::Field(FieldPointer { in_cdb: true, byte, bit });
        Sense { specific, ..Sense::INVALID_FIELD_IN_CDB }
    }

    /// Returns 05/26/00 with a pointer to a byte of the parameter list.
    pub const fn parameter_field(byte: u16, bit: Option<u8>) -> Sense {
        let specific = Specific::Field(FieldPointer { in_cdb: false, byte, bit });
        Sense { specific, ..Sense::INVALID_FIELD_IN_PARAMETERS }
    }

    /// Returns 0E/1D/00 with the offset, in bytes, of the first byte that differs.
    pub const fn miscompare(offset: u64) -> Sense {
        Sense { information: Some(offset), ..Sense::new(Key::Miscompare, 0x1D, 0x00) }
    }

    /// Returns the sense data with an INFORMATION field added.
    #[must_use]
    pub const fn with_information(self, information: u64) -> Sense {
        Sense { information: Some(information), ..self }
    }

    /// Writes the sense data, and returns its length. The fixed format (70h) has no space for an
    /// INFORMATION field above 2^32 - 1, which is then omitted with VALID 0 (SPC-6 section 4.4.3).
    pub fn encode(&self, descriptor: bool, into: &mut [u8; Sense::LEN_MAX]) -> usize {
        into.fill(0);
        if descriptor { self.encode_descriptors(into) } else { self.encode_fixed(into) }
    }

    fn encode_fixed(&self, into: &mut [u8; Sense::LEN_MAX]) -> usize {
        const LEN: usize = 18;
        into[0] = 0x70;
        into[2] = self.key as u8;
        if let Some(information) = self.information.and_then(|wide| u32::try_from(wide).ok()) {
            into[0] |= 0x80;
            put(into, 3, &information.to_be_bytes());
        }
        into[7] = LEN as u8 - 8;
        if let Some(command) = self.command.and_then(|wide| u32::try_from(wide).ok()) {
            put(into, 8, &command.to_be_bytes());
        }
        (into[12], into[13]) = (self.asc, self.ascq);
        if let Some(bytes) = self.specific_bytes() {
            put(into, 15, &bytes);
        }
        LEN
    }

    fn encode_descriptors(&self, into: &mut [u8; Sense::LEN_MAX]) -> usize {
        [into[0], into[1], into[2], into[3]] = [0x72, self.key as u8, self.asc, self.ascq];
        let mut at = 8;
        if let Some(information) = self.information {
            put(into, at, &[0x00, 0x0A, 0x80, 0]);
            put(into, at + 4, &information.to_be_bytes());
            at += 12;
        }
        if let Some(command) = self.command {
            put(into, at, &[0x01, 0x0A, 0, 0]);
            put(into, at + 4, &command.to_be_bytes());
            at += 12;
        }
        if let Some(bytes) = self.specific_bytes() {
            put(into, at, &[0x02, 0x06, 0, 0]);
            put(into, at + 4, &bytes);
            at += 8;
        }
        into[7] = (at - 8) as u8;
        at
    }

    /// Returns the three sense-key specific bytes, with SKSV set.
    fn specific_bytes(&self) -> Option<[u8; 3]> {
        let bit_pointer = |bit: Option<u8>| bit.map_or(0, |bit| 0x08 | (bit & 7));
        let (first, [high, low]) = match self.specific {
            Specific::None => return None,
            Specific::Field(FieldPointer { in_cdb, byte, bit }) => {
                (u8::from(in_cdb) << 6 | bit_pointer(bit), byte.to_be_bytes())
            }
            Specific::Progress(done) => (0, done.to_be_bytes()),
            Specific::Segment { in_descriptor, byte, bit } => {
                (u8::from(in_descriptor) << 5 | bit_pointer(bit), byte.to_be_bytes())
            }
        };
        Some([0x80 | first, high, low])
    }
}

/// Returns the sense data of a failed block request, chosen by how SCSI initiators react.
///
/// Transient statuses become NOT READY or a communication failure, which the Linux initiator retries; lost
/// data becomes a MEDIUM ERROR with the first LBA, which it reports.
pub fn of_block_status(status: block::Status, lba: u64, is_write: bool) -> Sense {
    use block::Status;
    match status {
        Status::Ok => Sense::NONE,
        Status::NotSupported | Status::Invalid => Sense::INVALID_FIELD_IN_CDB,
        Status::NoSpace => Sense::NO_SPACE,
        Status::NotPermitted => Sense::WRITE_PROTECTED,
        // LOGICAL UNIT NOT READY, CAUSE NOT REPORTABLE.
        Status::Offline => Sense::new(Key::NotReady, 0x04, 0x00),
        Status::Transport | Status::Requeue | Status::Again => Sense::COMMUNICATION_FAILURE,
        // LOGICAL UNIT COMMUNICATION TIME-OUT.
        Status::Timeout => Sense::new(Key::NotReady, 0x08, 0x01),
        // SYSTEM RESOURCE FAILURE: the initiator retries aborted commands.
        Status::Resource | Status::DeviceResource => Sense::new(Key::AbortedCommand, 0x55, 0x00),
        Status::ZoneOpenResource => Sense::new(Key::DataProtect, 0x55, 0x0E),
        Status::ZoneActiveResource => Sense::new(Key::DataProtect, 0x55, 0x0F),
        Status::DurationLimit => Sense::new(Key::AbortedCommand, 0x2E, 0x01),
        // LOGICAL BLOCK GUARD CHECK FAILED.
        Status::Protection => Sense::new(Key::AbortedCommand, 0x10, 0x01).with_information(lba),
        // INTERNAL TARGET FAILURE.
        Status::Target => Sense::new(Key::HardwareError, 0x44, 0x00),
        Status::Medium | Status::IoError if is_write => {
            Sense::new(Key::MediumError, 0x0C, 0x00).with_information(lba)
        }
        Status::Medium | Status::IoError => Sense::new(Key::MediumError, 0x11, 0x00).with_information(lba),
        // RESERVATION CONFLICT is a SCSI status without sense data: see `Outcome`.
        Status::ReservationConflict => Sense::NONE,
    }
}
