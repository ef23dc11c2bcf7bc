//! Conflicts between commands and the reservation of another I_T nexus.
//!
//! Source: SPC-6 table 66 and SBC-4 table 15 (persistent reservations), SPC-2 table 10 (RESERVE and RELEASE).

/// Treatment of a command by a persistent reservation of another nexus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Persistent {
    /// The command is allowed for all types.
    Allowed,
    /// The command is allowed for the write exclusive types, and conflicts with the exclusive access types.
    Reads,
    /// The command conflicts with all types.
    Writes,
    /// The rules of the command itself decide: PERSISTENT RESERVE OUT, RESERVE, RELEASE.
    Own,
}

/// Treatment of a command by another nexus's reservation through RESERVE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Legacy {
    /// The command is allowed.
    Allowed,
    /// The command conflicts.
    Conflicts,
    /// The command conflicts even for the nexus that holds the reservation: PERSISTENT RESERVE IN and OUT
    /// (LIO-19).
    Never,
}

/// The two rules for a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    /// Rule for persistent reservations.
    pub persistent: Persistent,
    /// Rule for reservations by RESERVE and RELEASE.
    pub legacy: Legacy,
}

/// Condition that distinguishes commands with the same operation code.
#[derive(Clone, Copy)]
enum Select {
    /// All commands with this operation code.
    All,
    /// Commands with `cdb[byte] & mask == value`.
    Bits { byte: usize, mask: u8, value: u8 },
}

use Legacy::{Conflicts, Never};
use Persistent::{Own, Reads, Writes};

const fn action(value: u8) -> Select {
    Select::Bits { byte: 1, mask: 0x1F, value }
}

/// One row of the tables. The first row that matches counts; commands without a row conflict with all
/// reservations.
type Row = (u8, Select, Persistent, Legacy);

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (0x00, Select::All,  Persistent::Allowed, Conflicts),       // TEST UNIT READY
    (0x03, Select::All,  Persistent::Allowed, Legacy::Allowed), // REQUEST SENSE
    (0x08, Select::All,  Reads,   Conflicts),                   // READ(6)
    (0x0B, Select::All,  Reads,   Conflicts),                   // SEEK(6)
    (0x12, Select::All,  Persistent::Allowed, Legacy::Allowed), // INQUIRY
    (0x16, Select::All,  Own,     Conflicts),                   // RESERVE(6)
    (0x17, Select::All,  Own,     Legacy::Allowed),             // RELEASE(6)
    (0x1A, Select::All,  Reads,   Conflicts),                   // MODE SENSE(6)
    // START STOP UNIT that only starts: START is 1, POWER CONDITION is 0.
    (0x1B, Select::Bits { byte: 4, mask: 0xF1, value: 0x01 }, Persistent::Allowed, Legacy::Allowed),
    (0x1C, Select::All,  Reads,   Conflicts),                   // RECEIVE DIAGNOSTIC RESULTS
    // PREVENT ALLOW MEDIUM REMOVAL that allows removal.
    (0x1E, Select::Bits { byte: 4, mask: 0x03, value: 0x00 }, Persistent::Allowed, Legacy::Allowed),
    (0x25, Select::All,  Persistent::Allowed, Legacy::Allowed), // READ CAPACITY(10)
    (0x28, Select::All,  Reads,   Conflicts),                   // READ(10)
    (0x2B, Select::All,  Reads,   Conflicts),                   // SEEK(10)
    (0x2F, Select::All,  Reads,   Conflicts),                   // VERIFY(10)
    (0x34, Select::All,  Reads,   Conflicts),                   // PRE-FETCH(10)
    (0x37, Select::All,  Reads,   Conflicts),                   // READ DEFECT DATA(10)
    (0x3C, Select::All,  Reads,   Conflicts),                   // READ BUFFER(10)
    (0x4D, Select::All,  Persistent::Allowed, Legacy::Allowed), // LOG SENSE
    (0x56, Select::All,  Own,     Conflicts),                   // RESERVE(10)
    (0x57, Select::All,  Own,     Legacy::Allowed),             // RELEASE(10)
    (0x5A, Select::All,  Reads,   Conflicts),                   // MODE SENSE(10)
    (0x5E, Select::All,  Persistent::Allowed, Never),           // PERSISTENT RESERVE IN
    (0x5F, Select::All,  Own,     Never),                       // PERSISTENT RESERVE OUT
    (0x84, action(0x03), Persistent::Allowed, Conflicts),       // RECEIVE COPY RESULTS: OPERATING PARAMETERS
    (0x88, Select::All,  Reads,   Conflicts),                   // READ(16)
    (0x8F, Select::All,  Reads,   Conflicts),                   // VERIFY(16)
    (0x90, Select::All,  Reads,   Conflicts),                   // PRE-FETCH(16)
    (0x95, action(0x00), Reads,   Conflicts),                   // REPORT ZONES
    (0x9E, action(0x10), Persistent::Allowed, Legacy::Allowed), // READ CAPACITY(16)
    (0x9E, action(0x12), Reads,   Conflicts),                   // GET LBA STATUS(16)
    (0x9E, action(0x13), Reads,   Conflicts),                   // REPORT REFERRALS
    (0xA0, Select::All,  Persistent::Allowed, Legacy::Allowed), // REPORT LUNS
    (0xA3, action(0x05), Persistent::Allowed, Legacy::Allowed), // REPORT IDENTIFYING INFORMATION
    (0xA3, action(0x0A), Persistent::Allowed, Legacy::Allowed), // REPORT TARGET PORT GROUPS
    (0xA3, action(0x0C), Reads,   Conflicts),                   // REPORT SUPPORTED OPERATION CODES
    (0xA3, action(0x0D), Reads,   Conflicts),                   // REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS
    (0xA3, action(0x0F), Persistent::Allowed, Legacy::Allowed), // REPORT TIMESTAMP
    (0xA8, Select::All,  Reads,   Conflicts),                   // READ(12)
    (0xAF, Select::All,  Reads,   Conflicts),                   // VERIFY(12)
    (0xB7, Select::All,  Reads,   Conflicts),                   // READ DEFECT DATA(12)
];

/// Returns the rules of a command. Commands without an entry in the tables conflict with all reservations.
pub fn rules(cdb: &[u8]) -> Rules {
    let opcode = cdb.first().copied().unwrap_or(0);
    let fits = |select: Select| match select {
        Select::All => true,
        Select::Bits { byte, mask, value } => cdb.get(byte).copied().unwrap_or(0) & mask == value,
    };
    ROWS.iter().find(|(code, select, ..)| *code == opcode && fits(*select)).map_or(
        Rules { persistent: Writes, legacy: Conflicts },
        |&(_, _, persistent, legacy)| Rules { persistent, legacy },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a CDB of 16 bytes.
    fn cdb(bytes: &[(usize, u8)]) -> [u8; 16] {
        let mut cdb = [0; 16];
        bytes.iter().for_each(|&(at, byte)| cdb[at] = byte);
        cdb
    }

    /// Bytes of a CDB, and whether it is allowed while another nexus holds write exclusive, and exclusive
    /// access.
    type Entry<'a> = (&'a [(usize, u8)], bool, bool);

    /// The tables of SPC-6 and SBC-4 as printed: command, then whether it is allowed while another nexus
    /// holds write exclusive, and exclusive access.
    #[test]
    fn commands_conflict_with_persistent_reservations_as_in_the_tables() {
        let table: &[Entry<'_>] = &[
            (&[(0, 0x12)], true, true),              // INQUIRY
            (&[(0, 0xA0)], true, true),              // REPORT LUNS
            (&[(0, 0x03)], true, true),              // REQUEST SENSE
            (&[(0, 0x00)], true, true),              // TEST UNIT READY
            (&[(0, 0x4D)], true, true),              // LOG SENSE
            (&[(0, 0x25)], true, true),              // READ CAPACITY(10)
            (&[(0, 0x9E), (1, 0x10)], true, true),   // READ CAPACITY(16)
            (&[(0, 0x5E)], true, true),              // PERSISTENT RESERVE IN
            (&[(0, 0xA3), (1, 0x0A)], true, true),   // REPORT TARGET PORT GROUPS
            (&[(0, 0xA3), (1, 0x2A)], true, true),   // with the extended header
            (&[(0, 0x1B), (4, 0x01)], true, true),   // START STOP UNIT: start
            (&[(0, 0x1E)], true, true),              // PREVENT ALLOW: allow
            (&[(0, 0x1A)], true, false),             // MODE SENSE(6)
            (&[(0, 0x5A)], true, false),             // MODE SENSE(10)
            (&[(0, 0x08)], true, false),             // READ(6)
            (&[(0, 0x28)], true, false),             // READ(10)
            (&[(0, 0xA8)], true, false),             // READ(12)
            (&[(0, 0x88)], true, false),             // READ(16)
            (&[(0, 0x2F)], true, false),             // VERIFY(10)
            (&[(0, 0x34)], true, false),             // PRE-FETCH(10)
            (&[(0, 0x9E), (1, 0x12)], true, false),  // GET LBA STATUS
            (&[(0, 0x95)], true, false),             // REPORT ZONES
            (&[(0, 0x94), (1, 0x04)], false, false), // RESET WRITE POINTER
            (&[(0, 0xA3), (1, 0x0C)], true, false),  // REPORT SUPPORTED OPERATION CODES
            (&[(0, 0x1B), (4, 0x00)], false, false), // START STOP UNIT: stop
            (&[(0, 0x1B), (4, 0x11)], false, false), // START STOP UNIT: power condition
            (&[(0, 0x1E), (4, 0x01)], false, false), // PREVENT ALLOW: prevent
            (&[(0, 0x15)], false, false),            // MODE SELECT(6)
            (&[(0, 0x55)], false, false),            // MODE SELECT(10)
            (&[(0, 0x04)], false, false),            // FORMAT UNIT
            (&[(0, 0x0A)], false, false),            // WRITE(6)
            (&[(0, 0x2A)], false, false),            // WRITE(10)
            (&[(0, 0x2E)], false, false),            // WRITE AND VERIFY(10)
            (&[(0, 0x35)], false, false),            // SYNCHRONIZE CACHE(10)
            (&[(0, 0x41)], false, false),            // WRITE SAME(10)
            (&[(0, 0x42)], false, false),            // UNMAP
            (&[(0, 0x48)], false, false),            // SANITIZE
            (&[(0, 0x7F)], false, false),            // variable length: WRITE SAME(32)
            (&[(0, 0x83)], false, false),            // EXTENDED COPY
            (&[(0, 0x89)], false, false),            // COMPARE AND WRITE
            (&[(0, 0x8B)], false, false),            // ORWRITE
            (&[(0, 0x9C)], false, false),            // WRITE ATOMIC(16)
            (&[(0, 0xA4), (1, 0x0A)], false, false), // SET TARGET PORT GROUPS
        ];
        for &(bytes, write_exclusive, exclusive_access) in table {
            let expected = match (write_exclusive, exclusive_access) {
                (true, true) => Persistent::Allowed,
                (true, false) => Persistent::Reads,
                _ => Persistent::Writes,
            };
            assert_eq!(rules(&cdb(bytes)).persistent, expected, "{bytes:02x?}");
        }
    }

    #[test]
    fn lio_19_persistent_reserve_conflicts_with_reserve_even_for_its_holder() {
        assert_eq!(rules(&[0x5E]).legacy, Legacy::Never);
        assert_eq!(rules(&[0x5F]).legacy, Legacy::Never);
    }

    /// SPC-2 table 10.
    #[test]
    fn few_commands_are_allowed_while_another_nexus_holds_reserve() {
        let allowed = |cdb: &[u8]| rules(cdb).legacy == Legacy::Allowed;
        assert!([0x03_u8, 0x12, 0x17, 0x57, 0x4D, 0xA0, 0x25].into_iter().all(|code| allowed(&[code])));
        assert!(!([0x00_u8, 0x1A, 0x28, 0x2A, 0x16, 0x42].into_iter().any(|code| allowed(&[code]))));
    }

    #[test]
    fn an_empty_cdb_is_looked_up_without_a_panic() {
        assert_eq!(rules(&[]), rules(&[0x00]));
    }
}
