//! A record of 32 bytes, as stored in a buffer and sent.
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

/// Kind of an event. The letters are blktrace's.
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
    /// The request has completed, including all of its children. blktrace has no letter for it.
    Done = 8,
    /// `G`, `I` and `D` in one record: those whose bits 0, 1 and 2 are set in the value.
    Start = 9,
    /// `M`
    BackMerge = 10,
    /// `F`
    FrontMerge = 11,
    /// `P`
    Plug = 12,
    /// `U`; the value is the number of requests that were held back.
    Unplug = 13,
    /// The request entered a node or left it; the value is an encoded [`Step`]. blktrace has no letter for
    /// it.
    Layer = 14,
    /// `m`: an event of a SCSI command, with a layout of its own ([`command`](crate::command)).
    Command = 15,
}

/// A step of a request at a node of the stack: the value of a [`Kind::Layer`] record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The request entered the node.
    Enter {
        /// Number of the node.
        node: u8,
        /// Tag of the request that this one is a child of.
        parent: Option<u16>,
    },
    /// The request left the node.
    Leave {
        /// Number of the node.
        node: u8,
        /// Positive errno of the result; 0: success.
        errno: u16,
    },
}

impl Step {
    /// Encodes to 48 bits: node (8) | leave (1) | has a parent (1) | 0 (6) | errno or tag of the parent (16).
    pub(crate) fn to_value(self) -> u64 {
        match self {
            Step::Enter { node, parent } => {
                let tag = parent.map_or(0, |tag| 1 << 9 | u64::from(tag) << 16);
                u64::from(node) | tag
            }
            Step::Leave { node, errno } => u64::from(node) | 1 << 8 | u64::from(errno) << 16,
        }
    }

    /// Decodes [`to_value`](Step::to_value); every value is valid.
    pub fn from_value(value: u64) -> Step {
        let (node, number) = (value as u8, (value >> 16) as u16);
        if value >> 8 & 1 == 1 {
            return Step::Leave { node, errno: number };
        }
        Step::Enter { node, parent: (value >> 9 & 1 == 1).then_some(number) }
    }
}

impl Kind {
    /// All kinds that a user can select, with their letters and blktrace's names where it has them.
    pub const NAMED: [(Kind, &'static str, &'static str); 15] = [
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
        (Kind::Layer, "layer", "layer"),
        (Kind::Command, "m", "notify"),
    ];

    /// All kinds, by number.
    const ALL: [Kind; 16] = [
        Kind::Queue,
        Kind::Split,
        Kind::Remap,
        Kind::Get,
        Kind::Insert,
        Kind::Issue,
        Kind::Complete,
        Kind::Requeue,
        Kind::Done,
        Kind::Start,
        Kind::BackMerge,
        Kind::FrontMerge,
        Kind::Plug,
        Kind::Unplug,
        Kind::Layer,
        Kind::Command,
    ];
}

/// An event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Time in nanoseconds of the monotonic clock.
    pub time_ns: u64,
    /// Offset on its device, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Tag of the request.
    pub tag: u16,
    /// Kind of event.
    pub kind: Kind,
    /// Operation.
    pub op: Op,
    /// Flags of the request, as [`block::Flags::bits`] encodes them.
    pub flags: u8,
    /// A value of 48 bits whose meaning depends on [`Kind`].
    pub value: u64,
    /// For a remap: number of the device above.
    pub from: u8,
    /// Number of the device: 0, or below a layer that remaps requests the number of the node there.
    pub device: u8,
}

const VALUE_MASK: u64 = (1 << 48) - 1;

impl Record {
    /// Creates a `Queue` record for a probe point, from which other kinds are derived.
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

    /// Returns a length as it is recorded: a length of 4 GiB or more as the most whole sectors below that.
    #[inline]
    pub(crate) fn length(len: u64) -> u32 {
        u32::try_from(len).unwrap_or(!511)
    }

    /// Encodes the record to the words of a buffer. An operation has four bits: a comparison, which no filter
    /// selects, is encoded as a write.
    #[inline]
    pub(crate) fn to_words(self) -> [u64; 4] {
        let op = if self.op == Op::CompareAndWrite { Op::Write } else { self.op };
        let what =
            u64::from(self.tag) << 16 | (self.kind as u64) << 12 | (op as u64) << 8 | u64::from(self.flags);
        [
            self.time_ns,
            self.offset,
            u64::from(self.len) << 32 | what,
            (self.value & VALUE_MASK) << 16 | u64::from(self.from) << 8 | u64::from(self.device),
        ]
    }

    /// Decodes a record, which may be untrusted: every value of the four bits of kind and operation is valid.
    pub(crate) fn from_words([time_ns, offset, what, where_]: [u64; 4]) -> Record {
        Record {
            time_ns,
            offset,
            len: (what >> 32) as u32,
            tag: (what >> 16) as u16,
            kind: Kind::ALL[(what >> 12 & 15) as usize],
            op: Op::ALL[(what >> 8 & 15) as usize],
            flags: what as u8,
            value: where_ >> 16,
            from: (where_ >> 8) as u8,
            device: where_ as u8,
        }
    }

    /// Returns the events that the record stands for: several for [`Kind::Start`].
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
    fn an_encoded_record_decodes_to_an_equal_one() {
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
                let op = if op == Op::CompareAndWrite { Op::Write } else { op };
                assert_eq!(Record::from_words(record.to_words()), Record { op, ..record });
            }
        }
    }

    #[test]
    fn every_number_of_a_kind_decodes_to_that_kind() {
        for number in 0..16 {
            assert_eq!(Record::from_words([0, 0, number << 12, 0]).kind as u64, number);
        }
    }

    #[test]
    fn an_encoded_step_decodes_to_an_equal_one() {
        for step in [
            Step::Enter { node: 0, parent: None },
            Step::Enter { node: 255, parent: Some(0) },
            Step::Enter { node: 7, parent: Some(u16::MAX) },
            Step::Leave { node: 255, errno: 0 },
            Step::Leave { node: 1, errno: 125 },
        ] {
            assert!(step.to_value() <= VALUE_MASK);
            assert_eq!(Step::from_value(step.to_value()), step);
        }
    }

    #[test]
    fn a_start_expands_to_the_selected_events() {
        let start = Record { kind: Kind::Start, value: 5, ..Record::from_words([7, 0, 0, 0]) };
        assert_eq!(start.events().map(|r| r.kind).collect::<Vec<_>>(), [Kind::Get, Kind::Issue]);
        let queued = Record::from_words([7, 0, 0, 0]);
        assert_eq!(queued.events().collect::<Vec<_>>(), [queued]);
    }

    #[test]
    fn a_length_that_is_too_long_is_capped_to_whole_sectors() {
        assert_eq!(Record::length(4096), 4096);
        assert_eq!(Record::length(1 << 40), 0xffff_fe00);
    }
}
