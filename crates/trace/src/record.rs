//! One event in 32 bytes, as it lies in a lane and travels.
//!
//! ```text
//! word 0  time, ns
//! word 1  offset, bytes
//! word 2  length, bytes (32; what is longer is held at the most whole sectors that fit) | tag (16) | kind (4) |
//!         operation (4) | flags (8)
//! word 3  value (48) | device that it came from (8) | device (8)
//! ```

use block::Op;
use queue::Point;

/// What happened. The letters are blktrace's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Kind {
    /// `Q`
    Queue = 0,
    /// `X`; the value is the first sector of the remainder.
    Split = 1,
    /// `A`; the value is the sector on the device above.
    Remap = 2,
    /// `G`
    Get = 3,
    /// `I`
    Insert = 4,
    /// `D`
    Issue = 5,
    /// `C`; the value is an errno.
    Complete = 6,
    /// `R`
    Requeue = 7,
    /// The request is over. blktrace has no letter for it.
    Done = 8,
    /// `G`, `I` and `D` in one step, those of them whose bits 0, 1 and 2 are set in the value.
    Start = 9,
    /// `M`
    BackMerge = 10,
    /// `F`
    FrontMerge = 11,
    /// `P`
    Plug = 12,
    /// `U`; the value is how many requests were held back.
    Unplug = 13,
}

impl Kind {
    /// All that a user can ask for, with their letters and blktrace's names where it has them.
    pub const NAMED: [(Kind, &'static str, &'static str); 13] = [
        (Kind::Queue, "Q", "queue"),
        (Kind::Split, "X", "split"),
        (Kind::Remap, "A", "remap"),
        (Kind::Get, "G", "get"),
        (Kind::Insert, "I", "insert"),
        (Kind::Issue, "D", "issue"),
        (Kind::Complete, "C", "complete"),
        (Kind::Requeue, "R", "requeue"),
        (Kind::Done, "done", "done"),
        (Kind::BackMerge, "M", "merge"),
        (Kind::FrontMerge, "F", "front-merge"),
        (Kind::Plug, "P", "plug"),
        (Kind::Unplug, "U", "unplug"),
    ];

    fn from_number(number: u64) -> Option<Kind> {
        if number == Kind::Start as u64 {
            return Some(Kind::Start);
        }
        Kind::NAMED.iter().map(|row| row.0).find(|kind| *kind as u64 == number)
    }
}

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// When, in nanoseconds of the monotonic clock.
    pub time_ns: u64,
    /// Where, in bytes of its device.
    pub offset: u64,
    /// How long, in bytes.
    pub len: u32,
    /// The slot that the request was in.
    pub tag: u16,
    /// What happened.
    pub kind: Kind,
    /// To what.
    pub op: Op,
    /// The request's flags, as [`block::Flags::bits`] has them.
    pub flags: u8,
    /// See [`Kind`]; 48 bits.
    pub value: u64,
    /// For a remap: the device above.
    pub from: u8,
    /// The device: 0, or for what happens below a layer that moves requests the number of the node there.
    pub device: u8,
}

const VALUE_MASK: u64 = (1 << 48) - 1;

impl Record {
    /// That a request was queued on that device, where the point says: what other kinds are made from.
    #[inline]
    pub(crate) fn queued(time_ns: u64, point: &Point, device: u8) -> Record {
        Record {
            time_ns,
            offset: point.offset.0,
            len: Record::length(point.len.0),
            tag: point.tag.0,
            kind: Kind::Queue,
            op: point.op,
            flags: point.flags.bits(),
            value: 0,
            from: 0,
            device,
        }
    }

    /// A length as it is recorded.
    #[inline]
    pub(crate) fn length(len: u64) -> u32 {
        u32::try_from(len).unwrap_or(!511)
    }

    /// As it lies in a lane.
    #[inline]
    pub(crate) fn to_words(self) -> [u64; 4] {
        let what = u64::from(self.tag) << 16
            | (self.kind as u64) << 12
            | (self.op as u64) << 8
            | u64::from(self.flags);
        [
            self.time_ns,
            self.offset,
            u64::from(self.len) << 32 | what,
            (self.value & VALUE_MASK) << 16 | u64::from(self.from) << 8 | u64::from(self.device),
        ]
    }

    /// From a lane, which holds nothing else than what [`to_words`](Record::to_words) made.
    pub(crate) fn from_words(words: [u64; 4]) -> Record {
        Record::try_from_words(words).unwrap_or(Record {
            time_ns: words[0],
            offset: 0,
            len: 0,
            tag: 0,
            kind: Kind::Done,
            op: Op::Flush,
            flags: 0,
            value: 0,
            from: 0,
            device: 0,
        })
    }

    /// From elsewhere. `None`: there is no such kind. Operations fill their four bits.
    pub(crate) fn try_from_words([time_ns, offset, what, where_]: [u64; 4]) -> Option<Record> {
        Some(Record {
            time_ns,
            offset,
            len: (what >> 32) as u32,
            tag: (what >> 16) as u16,
            kind: Kind::from_number(what >> 12 & 15)?,
            op: *Op::ALL.get((what >> 8 & 15) as usize)?,
            flags: what as u8,
            value: where_ >> 16,
            from: (where_ >> 8) as u8,
            device: where_ as u8,
        })
    }

    /// Each event that it stands for, one after the other.
    pub fn events(self) -> impl Iterator<Item = Record> {
        let wanted = if self.kind == Kind::Start { self.value } else { 0 };
        let steps = [(Kind::Get, 1), (Kind::Insert, 2), (Kind::Issue, 4)];
        let started = steps
            .into_iter()
            .filter(move |(_, bit)| wanted & bit != 0)
            .map(move |(kind, _)| Record { kind, value: 0, ..self });
        let itself = (self.kind != Kind::Start).then_some(self);
        itself.into_iter().chain(started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_the_way_through_a_lane() {
        for (number, op) in Op::ALL.into_iter().enumerate() {
            for (kind, ..) in Kind::NAMED {
                let record = Record {
                    time_ns: u64::MAX - 1,
                    offset: 0x1234_5678_9abc_de00,
                    len: 0xfedc_ba98,
                    tag: 0xabcd,
                    kind,
                    op,
                    flags: 0x95,
                    value: 0x8234_5678_9abc,
                    from: number as u8,
                    device: 0xfe,
                };
                assert_eq!(Record::from_words(record.to_words()), record);
            }
        }
    }

    #[test]
    fn what_no_queue_wrote_is_no_record() {
        assert_eq!(Record::try_from_words([0, 0, 15 << 12, 0]), None);
    }

    #[test]
    fn a_start_stands_for_what_was_wanted_of_it() {
        let start = Record { kind: Kind::Start, value: 5, ..Record::from_words([7, 0, 0, 0]) };
        assert_eq!(start.events().map(|r| r.kind).collect::<Vec<_>>(), [Kind::Get, Kind::Issue]);
        let queued = Record::from_words([7, 0, 0, 0]);
        assert_eq!(queued.events().collect::<Vec<_>>(), [queued]);
    }

    #[test]
    fn what_is_too_long_for_a_record_is_held_at_whole_sectors() {
        assert_eq!(Record::length(4096), 4096);
        assert_eq!(Record::length(1 << 40), 0xffff_fe00);
    }
}
