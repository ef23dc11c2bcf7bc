//! What can be asked of a device.

/// An operation. The numbers index statistics; they are stable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Op {
    /// Fill the request's data from the device.
    Read = 0,
    /// Store the request's data. With [`Flags::FUA`] it is on stable storage when it ends.
    Write = 1,
    /// Every write that ended before this was submitted is on stable storage when this ends.
    Flush = 2,
    /// The range's content is no longer needed; what it reads as afterwards is the backend's matter.
    Discard = 3,
    /// The range reads as zeroes afterwards. It may be deallocated unless [`Flags::NO_UNMAP`].
    WriteZeroes = 4,
    /// Bring the range nearer (NBD's CACHE, `posix_fadvise(WILLNEED)`); a hint, never an error.
    Prefetch = 5,
    /// Describe the range: fills the data with [`Extent`](crate::Extent) records from its start on, as
    /// many as fit, and what is left of it with zeroes, which no record begins with. The records may
    /// end before the range does. Layers that move addresses pass it on like a read.
    Extents = 6,
    /// Store the request's data at the write pointer of the sequential zone that starts at its offset. It
    /// is never cut. When it ends well, the request's offset says where the data went.
    ZoneAppend = 7,
    /// Describe zones: fills the data with [`Zone`](crate::Zone) records, from the zone that holds the
    /// offset on, for the zones that begin before the range's end, as many as fit, and what is left of it
    /// with zeroes, which are no record. Addresses are those of the device that answers.
    ReportZones = 8,
    /// Make the zone that starts at the offset empty. This and the rest have a length of 0.
    ZoneReset = 9,
    /// Make all sequential zones empty; the offset is 0.
    ZoneResetAll = 10,
    /// Open the zone explicitly: it stays open until it is closed, full or reset.
    ZoneOpen = 11,
    /// Close the zone.
    ZoneClose = 12,
    /// Make the zone full: nothing more can be written to it before it is reset.
    ZoneFinish = 13,
    /// Fill the data with the integrity data of the range, which is whole intervals. What was written
    /// without has tuples of ones, or of zeroes where tuples are nobody's to check.
    ReadTuples = 14,
    /// Store the data as the integrity data of the range, after the write of what it stands beside.
    WriteTuples = 15,
}

impl Op {
    /// How many operations there are.
    pub const COUNT: usize = 16;
    /// All of them, by number.
    pub const ALL: [Op; Op::COUNT] = [
        Op::Read,
        Op::Write,
        Op::Flush,
        Op::Discard,
        Op::WriteZeroes,
        Op::Prefetch,
        Op::Extents,
        Op::ZoneAppend,
        Op::ReportZones,
        Op::ZoneReset,
        Op::ZoneResetAll,
        Op::ZoneOpen,
        Op::ZoneClose,
        Op::ZoneFinish,
        Op::ReadTuples,
        Op::WriteTuples,
    ];
    /// Those that every device may be asked for; the rest are special.
    pub const ORDINARY: [Op; 7] =
        [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes, Op::Prefetch, Op::Extents];

    /// Whether it changes what the device holds, or the state of its zones.
    pub const fn is_write(self) -> bool {
        !matches!(self, Op::Read | Op::Flush | Op::Prefetch | Op::Extents | Op::ReportZones | Op::ReadTuples)
    }

    /// Whether its length is that of the data which it carries.
    pub const fn moves_data(self) -> bool {
        matches!(self, Op::Read | Op::Write | Op::ZoneAppend)
    }

    /// Whether it means something on special devices only: on zoned ones, or on those that keep integrity
    /// data. Anything else ends it with [`Status::NotSupported`](crate::Status::NotSupported).
    pub const fn is_special(self) -> bool {
        self as u8 >= Op::ZoneAppend as u8
    }

    /// The name in listings: `read`, `write-zeroes`, `zone-reset-all`.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "write-zeroes",
            Op::Prefetch => "prefetch",
            Op::Extents => "extents",
            Op::ZoneAppend => "zone-append",
            Op::ReportZones => "report-zones",
            Op::ZoneReset => "zone-reset",
            Op::ZoneResetAll => "zone-reset-all",
            Op::ZoneOpen => "zone-open",
            Op::ZoneClose => "zone-close",
            Op::ZoneFinish => "zone-finish",
            Op::ReadTuples => "read-tuples",
            Op::WriteTuples => "write-tuples",
        }
    }
}

/// How an operation is to be done: a set of the constants below.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
pub struct Flags(u8);

impl Flags {
    /// None of them.
    pub const NONE: Flags = Flags(0);
    /// Forced unit access: on stable storage before the request ends (write, write zeroes, discard).
    pub const FUA: Flags = Flags(1);
    /// End with [`Status::Again`](crate::Status::Again) rather than wait or be split (BLK-3).
    pub const NOWAIT: Flags = Flags(2);
    /// Write zeroes: keep the range allocated (NBD's NO_HOLE, the kernel's `REQ_NOUNMAP`).
    pub const NO_UNMAP: Flags = Flags(4);
    /// Write zeroes: end with `NotSupported` at once unless it is faster than writing (NBD's FAST_ZERO).
    pub const FAST_ZERO: Flags = Flags(8);
    /// Read: the submitter takes any memory in place of its own. A backend may answer by pointing
    /// the request's data at memory that outlives the reply, which then must not be written through.
    pub const MAY_LEND: Flags = Flags(16);
    /// Write, flush: does not depend on anything written before. A backend that takes nothing more because a sync failed
    /// carries the request out all the same: what it lost stays lost, and this request's own data is durable when a
    /// flush with this flag ends well.
    pub const AFTER_LOSS: Flags = Flags(32);

    /// Both sets together.
    #[must_use]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// This set less the other.
    #[must_use]
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }

    /// As a number, for whoever writes requests down.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Whether all of `other` are in this set.
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_numbered_as_they_are_listed() {
        for (number, op) in Op::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, number);
            assert_eq!(op.is_special(), !Op::ORDINARY.contains(&op));
        }
    }

    #[test]
    fn flags_are_a_set() {
        let both = Flags::FUA.with(Flags::NOWAIT);
        assert!(both.has(Flags::FUA) && both.has(Flags::NOWAIT) && !both.has(Flags::NO_UNMAP));
        assert_eq!(both.without(Flags::FUA), Flags::NOWAIT);
    }
}
