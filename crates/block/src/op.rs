//! Operations of a block device.

use bitflags::bitflags;

/// An operation. The numbers index statistics and are stable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Op {
    /// Fill the request's data from the device.
    Read = 0,
    /// Store the request's data. With [`Flags::FUA`] it is on stable storage when the request completes.
    Write = 1,
    /// Every write that completed before this request was submitted is on stable storage when it completes.
    Flush = 2,
    /// The content of the range is no longer needed; the backend decides what it reads as afterwards.
    Discard = 3,
    /// The range reads as zeroes afterwards. It may be deallocated unless [`Flags::NO_UNMAP`].
    WriteZeroes = 4,
    /// Read the range ahead (NBD's CACHE, `posix_fadvise(WILLNEED)`); a hint, never an error.
    Prefetch = 5,
    /// Report the allocation status of the range: fills the data with as many [`Extent`](crate::Extent)
    /// records as fit, from the start of the range on, and the rest of the data with zeroes, which are no
    /// valid record. The records may end before the range does. Layers that remap offsets pass it on like a
    /// read.
    Extents = 6,
    /// Store the request's data at the write pointer of the sequential zone that starts at its offset. It is
    /// never split. When it succeeds, the request's offset is where the data was written.
    ZoneAppend = 7,
    /// Report zones: fills the data with as many [`Zone`](crate::Zone) records as fit, for the zones from the
    /// one that contains the offset up to the end of the range, and the rest of the data with zeroes, which
    /// are no valid record. Offsets in records are those of the device that answers.
    ReportZones = 8,
    /// Reset the write pointer of the zone that starts at the offset. This and the following zone operations
    /// have a length of 0.
    ZoneReset = 9,
    /// Reset the write pointers of all sequential zones; the offset is 0.
    ZoneResetAll = 10,
    /// Open the zone explicitly: it stays open until it is closed, full or reset.
    ZoneOpen = 11,
    /// Close the zone.
    ZoneClose = 12,
    /// Finish the zone: it becomes full and accepts no write before it is reset.
    ZoneFinish = 13,
    /// Read the integrity tuples of the range, a whole number of intervals. Data written without tuples has
    /// tuples of all ones, or of zeroes where the format has no escape value.
    ReadTuples = 14,
    /// Store the data as the integrity tuples of the range, after the write of the data that they protect.
    WriteTuples = 15,
    /// Compare the range with the first half of the data, and store the second half if they are equal, as one
    /// step with regard to every other request of any process. The data is one segment, twice as long as the
    /// request, which is never split. If they differ, the status is
    /// [`Status::Protection`](crate::Status::Protection). A backend that cannot do it for this range completes
    /// it with `NotSupported`, having done nothing.
    CompareAndWrite = 16,
}

impl Op {
    /// Number of operations.
    pub const COUNT: usize = 17;
    /// All operations, by number.
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
        Op::CompareAndWrite,
    ];
    /// Operations that every device may be sent; all others are special.
    pub const ORDINARY: [Op; 7] =
        [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes, Op::Prefetch, Op::Extents];

    /// Whether it changes the content of the device or the state of its zones.
    pub const fn is_write(self) -> bool {
        !matches!(self, Op::Read | Op::Flush | Op::Prefetch | Op::Extents | Op::ReportZones | Op::ReadTuples)
    }

    /// Whether the length of the request is that of its data.
    pub const fn moves_data(self) -> bool {
        matches!(self, Op::Read | Op::Write | Op::ZoneAppend)
    }

    /// Whether only zoned devices, devices with integrity data, or images of a cluster support it. All others complete it with
    /// [`Status::NotSupported`](crate::Status::NotSupported).
    pub const fn is_special(self) -> bool {
        self as u8 >= Op::ZoneAppend as u8
    }

    /// Name in listings: `read`, `write-zeroes`, `zone-reset-all`.
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
            Op::CompareAndWrite => "compare-and-write",
        }
    }
}

bitflags! {
    /// Modifiers of an operation.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
    pub struct Flags: u8 {
        /// Forced unit access: on stable storage before the request completes (write, write zeroes, discard).
        const FUA = 1;
        /// Complete with [`Status::Again`](crate::Status::Again) instead of waiting or being split (BLK-3).
        const NOWAIT = 1 << 1;
        /// Write zeroes: keep the range allocated (NBD's NO_HOLE, the kernel's `REQ_NOUNMAP`).
        const NO_UNMAP = 1 << 2;
        /// Write zeroes: complete with `NotSupported` at once unless it is faster than writing zeroes (NBD's
        /// FAST_ZERO).
        const FAST_ZERO = 1 << 3;
        /// Read, zero-copy: the submitter accepts any memory in place of its own. A backend may complete the
        /// read by pointing the request's data at its own memory, which must outlive the reply and must not be
        /// written through.
        const ZERO_COPY = 1 << 4;
        /// Write, flush: independent of earlier writes. A backend that refuses requests after a failed sync
        /// still processes this one: lost data stays lost, but the data of this request is durable when a flush
        /// with this flag succeeds.
        const AFTER_LOSS = 1 << 5;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_numbers_match_the_list() {
        for (number, op) in Op::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, number);
            assert_eq!(op.is_special(), !Op::ORDINARY.contains(&op));
        }
    }

    #[test]
    fn flags_keep_the_bits_that_traces_record() {
        let all = [
            Flags::FUA,
            Flags::NOWAIT,
            Flags::NO_UNMAP,
            Flags::FAST_ZERO,
            Flags::ZERO_COPY,
            Flags::AFTER_LOSS,
        ];
        assert_eq!(all.map(|flag| flag.bits()), [1, 2, 4, 8, 16, 32]);
        assert_eq!(Flags::all().bits(), 63);
    }
}
