//! The commands of a logical unit, in one table. CDBs are parsed and checked by this table, and REPORT
//! SUPPORTED OPERATION CODES reports it.
//!
//! *Invariant:* a CDB bit that is not in the usage map of its row is rejected, and a bit in the map is
//! either honoured or ignored as the standard permits. So the map that initiators read is the map that is
//! enforced.

mod report;
mod table;

pub(crate) use report::{supported_codes, supported_task_management};
pub(crate) use table::TABLE;

use crate::sense::Sense;
use crate::unit::Facts;

/// Longest CDB in the table, in bytes.
pub(crate) const CDB_MAX: usize = 32;

/// A command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Code {
    TestUnitReady,
    Rezero,
    RequestSense,
    Read6,
    Read10,
    Read12,
    Read16,
    Write6,
    Write10,
    Write12,
    Write16,
    WriteAtomic16,
    Seek6,
    Seek10,
    Inquiry,
    ModeSelect,
    ModeSense,
    StartStopUnit,
    ReceiveDiagnostic,
    SendDiagnostic,
    PreventAllow,
    ReadCapacity10,
    ReadCapacity16,
    WriteVerify10,
    WriteVerify12,
    WriteVerify16,
    Verify10,
    Verify12,
    Verify16,
    Prefetch10,
    Prefetch16,
    SynchronizeCache10,
    SynchronizeCache16,
    ReadDefectData10,
    ReadDefectData12,
    WriteBuffer,
    ReadBuffer,
    WriteSame10,
    WriteSame16,
    WriteSame32,
    Unmap,
    LogSense,
    CompareAndWrite,
    OrWrite,
    GetLbaStatus,
    ReportLuns,
    ReportIdentifying,
    SetIdentifying,
    ReportOpcodes,
    Reserve,
    Release,
    PersistentIn,
    PersistentOut,
    ReportGroups,
    SetGroups,
    ReportTaskManagement,
    ExtendedCopy,
    ReceiveCopyResults,
    Sanitize,
    ReportZones,
    ManageZones,
}

/// How a command uses the medium. For reservations and access states see their modules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Medium {
    /// The command works without a medium.
    Unused,
    /// The command needs the medium, and does not change it.
    Needed,
    /// The command changes the medium.
    Written,
}

/// Condition under which a command is supported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum When {
    Always,
    Unmap,
    CompareAndWrite,
    AtomicWrite,
    Opcodes,
    /// The target port's group has access states that the unit, or the initiator as well, can change.
    AccessStates,
    ExplicitAccessStates,
    Reservations,
    ThirdPartyCopy,
    BlockErase,
    LongCdbs,
    Zoned,
    /// The unit may be written in any order.
    NotZoned,
}

impl When {
    fn holds(self, facts: &Facts) -> bool {
        match self {
            When::Always => true,
            When::Unmap => facts.can_unmap(),
            When::CompareAndWrite => facts.compare_and_write_max() > 0,
            When::AtomicWrite => facts.media.atomic_max >= facts.media.block_size,
            When::Reservations => facts.attributes.emulate_pr,
            When::ThirdPartyCopy => facts.can_copy(),
            When::BlockErase => facts.can_block_erase(),
            When::AccessStates => facts.tpgs != 0,
            When::ExplicitAccessStates => facts.tpgs & 2 != 0,
            When::Opcodes => facts.attributes.emulate_rsoc,
            When::LongCdbs => facts.attributes.long_cdbs,
            When::Zoned => facts.media.zones.is_some(),
            When::NotZoned => facts.media.zones.is_none(),
        }
    }
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) code: Code,
    pub(crate) opcode: u8,
    /// Service action, for commands that have one.
    pub(crate) action: Option<u16>,
    pub(crate) medium: Medium,
    pub(crate) when: When,
    /// Bits of the CDB that may be set; the length of the map is the length of the CDB. The operation code
    /// and the service action appear with their own values.
    map: &'static [u8],
    /// Nominal and maximum duration of the command in seconds; after the second it counts as lost.
    pub(crate) seconds: (u32, u32),
}

/// Fields of byte 1 that depend on attributes and the medium.
const FUA: u8 = 0x08;
const DPO: u8 = 0x10;
const UNMAP: u8 = 0x08;

impl Row {
    /// Returns the bytes of the CDB.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns whether the unit supports the command.
    pub(crate) fn is_supported(&self, facts: &Facts) -> bool {
        self.when.holds(facts)
    }

    /// Returns the CDB byte that contains the service action, and its mask.
    fn action_at(&self) -> Option<(usize, u8)> {
        self.action.map(|_| if self.opcode == VARIABLE { (9, 0xFF) } else { (1, 0x1F) })
    }

    /// Returns the usage map: SPC-6 section 6.36.3.
    pub(crate) fn usage(&self, facts: &Facts) -> [u8; CDB_MAX] {
        let mut usage = [0; CDB_MAX];
        crate::bytes::put(&mut usage, 0, self.map);
        usage[0] = self.opcode;
        if let (Some((at, mask)), Some(action)) = (self.action_at(), self.action) {
            usage[at] = usage[at] & !mask | action as u8 & mask;
        }
        // Add the flags of reads and writes.
        let flags_at = if self.code == Code::WriteSame32 { 10 } else { 1 };
        match self.code {
            Code::Read10
            | Code::Read12
            | Code::Read16
            | Code::Write10
            | Code::Write12
            | Code::Write16
            | Code::WriteAtomic16
            | Code::CompareAndWrite
            | Code::OrWrite
                if !facts.has_fua() =>
            {
                usage[1] &= !(FUA | DPO);
            }
            Code::Verify10
            | Code::Verify12
            | Code::Verify16
            | Code::WriteVerify10
            | Code::WriteVerify12
            | Code::WriteVerify16
                if !facts.has_fua() =>
            {
                usage[1] &= !DPO;
            }
            Code::WriteSame10 | Code::WriteSame16 | Code::WriteSame32 if !facts.can_unmap_same() => {
                usage[flags_at] &= !UNMAP;
            }
            _ => {}
        }
        usage
    }

    /// Checks that a CDB, padded with zeroes, has no bits that are missing in the usage map.
    pub(crate) fn check(&self, cdb: &[u8; CDB_MAX], facts: &Facts) -> Result<(), Sense> {
        let usage = self.usage(facts);
        for at in 1..self.len() {
            let known = match self.action_at() {
                Some((action_at, mask)) if action_at == at => usage[at] | mask,
                _ => usage[at],
            };
            let unknown = cdb[at] & !known;
            if unknown != 0 {
                return Err(Sense::cdb_field(at as u16, Some(7 - unknown.leading_zeros() as u8)));
            }
        }
        if self.opcode == VARIABLE && usize::from(cdb[7]) + 8 != self.len() {
            return Err(Sense::cdb_field(7, None));
        }
        Ok(())
    }
}

/// Operation code of CDBs with a variable length: SPC-6 section 4.2.3.
const VARIABLE: u8 = 0x7F;

/// Returns the length of a CDB by the group of its operation code: SAM-6 section 5.2. Returns `None` for
/// vendor specific or reserved groups.
pub(crate) fn cdb_len(cdb: &[u8]) -> Option<usize> {
    match cdb.first()? {
        &VARIABLE => Some(usize::from(*cdb.get(7)?) + 8),
        0x00..=0x1F => Some(6),
        0x20..=0x5F => Some(10),
        0x80..=0x9F => Some(16),
        0xA0..=0xBF => Some(12),
        _ => None,
    }
}

/// Finds the row of a CDB. Error: the operation code or its service action is not supported.
pub(crate) fn find(cdb: &[u8; CDB_MAX], facts: &Facts) -> Result<&'static Row, Sense> {
    let mut has_opcode = false;
    for row in TABLE.iter().filter(|row| row.opcode == cdb[0] && row.is_supported(facts)) {
        has_opcode = true;
        let found = match row.action {
            None => true,
            Some(action) if row.opcode == VARIABLE => crate::bytes::be16(cdb, 8) == action,
            Some(action) => u16::from(cdb[1] & 0x1F) == action,
        };
        if found {
            return Ok(row);
        }
    }
    match has_opcode {
        // The error points to the service action, which is a field of the CDB.
        true if cdb[0] == VARIABLE => Err(Sense::cdb_field(8, None)),
        true => Err(Sense::cdb_field(1, Some(4))),
        false => Err(Sense::INVALID_OPCODE),
    }
}

/// Returns whether the unit supports an operation code with a service action.
pub(crate) fn is_supported(opcode: u8, action: Option<u16>, facts: &Facts) -> bool {
    TABLE.iter().any(|row| row.opcode == opcode && row.action == action && row.is_supported(facts))
}
