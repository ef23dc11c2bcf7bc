//! The device-mapper core: the targets of a table, concatenated into one device.
//!
//! A request within one target that crosses no multiple of its `max_io_len` goes down unsplit, with its
//! offset made relative to the target. Any other request is held while its child requests go down, as many at
//! once as are spare. A flush goes to all targets. A table of one target without `max_io_len` needs no such
//! node ([`is_needless`](TableLayer::is_needless)).
//!
//! *Invariant:* the targets are adjacent, without gaps, from sector 0 on.

use super::{FanOut, TargetRange, common_abilities};
use crate::split_requests::{ChildRange, SplitRequests};
use crate::{Layer, Split};
use block::{Bytes, Cookie, LimitsError, Op, Profile, QueueLimits, Request, Sectors, Status};
use queue::{Cx, Node, NodeId, Ring, Verdict};

/// The properties of one target that splitting requests needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableTarget {
    /// First sector and length of the line.
    pub place: TargetRange,
    /// The target's [`max_io_len`](super::Target::max_io_len).
    pub max_io_len: Option<Sectors>,
    /// The target's [`splits_discards`](super::Target::splits_discards): whether the table leaves discards
    /// and write-zeroes unsplit.
    pub splits_discards: bool,
}

/// The shared part of a table: one child per target.
#[derive(Clone, Debug)]
pub struct TableLayer {
    rows: Box<[TableTarget]>,
}

impl TableLayer {
    /// Creates a table of these targets, in the order of their start sectors.
    ///
    /// # Panics
    /// If the targets overlap or leave a gap: the table parser rejects such a table.
    pub fn new(rows: Vec<TableTarget>) -> TableLayer {
        let mut next = Sectors(0);
        for row in &rows {
            assert!(row.place.start == next && row.place.len.0 > 0, "targets are adjacent");
            next.0 += row.place.len.0;
        }
        TableLayer { rows: rows.into() }
    }

    /// Returns whether a table of these targets would pass every request down unchanged.
    pub fn is_needless(rows: &[TableTarget]) -> bool {
        matches!(rows, [TableTarget { max_io_len: None, .. }])
    }
}

impl<R: Ring> Layer<R> for TableLayer {
    fn name(&self) -> &'static str {
        "table"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut limits = QueueLimits::stacking();
        let mut whole = below[0].clone();
        whole.size = Bytes::ZERO;
        for target in below {
            let _ = limits.stack(&target.limits, Sectors(0));
            whole.size = whole.size + target.size;
            whole.read_only |= target.read_only;
            whole.abilities = common_abilities(whole.abilities, target.abilities);
            whole.inline &= target.inline;
            whole.opaque &= target.opaque;
        }
        limits.validate()?;
        // Child requests fill parts of one buffer, which zero-copy replies cannot; and no block-status reply
        // crosses targets.
        Ok(Profile { limits, zero_copy_reads: false, bytewise: false, sparse: false, ..whole })
    }

    fn child_requests(&self, depth: u16) -> u16 {
        Split::children(depth).max(self.rows.len().min(u16::MAX.into()) as u16)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    /// Returns the start of a target, which is a part of this device and not a device of its own.
    fn child_start(&self, child: usize) -> Option<Bytes> {
        self.rows.get(child).map(|row| row.place.start.bytes())
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(TableNode::new(&self.rows, below))
    }
}

/// A target in bytes.
#[derive(Clone, Copy)]
struct TargetBytes {
    start: u64,
    end: u64,
    /// The target's `max_io_len`; `u64::MAX`: requests are not split.
    max_io: u64,
    splits_discards: bool,
    child: NodeId,
}

/// Returns the target at an offset, and the number of bytes that one request may send to it from there.
#[inline]
fn at(targets: &[TargetBytes], offset: u64, op: Op) -> (TargetBytes, u64) {
    let index = targets.partition_point(|target| target.end <= offset);
    let target = targets[index];
    let is_unsplit = target.splits_discards && matches!(op, Op::Discard | Op::WriteZeroes);
    let until_split = if target.max_io == u64::MAX || is_unsplit {
        u64::MAX
    } else {
        target.max_io - (offset - target.start) % target.max_io
    };
    (target, until_split.min(target.end - offset))
}

/// Returns the first child request of the rest of a request.
fn first_child(targets: &[TargetBytes], left: &Request) -> ChildRange {
    let (target, most) = at(targets, left.offset.0, left.op);
    ChildRange { child: target.child, len: left.len.0.min(most), start: target.start }
}

struct TableNode {
    targets: Box<[TargetBytes]>,
    children: Box<[NodeId]>,
    /// By tag: the start of the target that the request went to, and the length of the request before that.
    moved: Box<[(u64, Bytes)]>,
    split_requests: SplitRequests,
    flushes: FanOut,
}

impl TableNode {
    fn new(rows: &[TableTarget], children: &[NodeId]) -> TableNode {
        let target = |(row, &child): (&TableTarget, &NodeId)| {
            let start = row.place.start.bytes().0;
            let max_io = row.max_io_len.map_or(u64::MAX, |len| len.bytes().0);
            TargetBytes {
                start,
                end: start + row.place.len.bytes().0,
                max_io,
                splits_discards: row.splits_discards,
                child,
            }
        };
        TableNode {
            targets: rows.iter().zip(children).map(target).collect(),
            children: children.into(),
            moved: Box::default(),
            split_requests: SplitRequests::default(),
            flushes: FanOut::default(),
        }
    }

    #[inline]
    fn end(&self) -> Bytes {
        Bytes(self.targets.last().map_or(0, |target| target.end))
    }

    #[inline(never)]
    fn split<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let TableNode { targets, split_requests, .. } = self;
        split_requests.begin(io, req, cx, |left, _| Some(first_child(targets, left)))
    }
}

impl<R: Ring> Node<R> for TableNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.moved = vec![(0, Bytes::ZERO); tags].into();
        self.split_requests.attach(tags);
        self.flushes.attach(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Flush {
            let flush = *req;
            return self.flushes.start(io, &self.children, cx, |_| flush);
        }
        if req.op.is_special() {
            return Verdict::Up(Status::NotSupported);
        }
        if req.end() > self.end() {
            // The device was shrunk, and a device stacked on it still has the old size.
            return Verdict::Up(Status::IoError);
        }
        let (target, most) = at(&self.targets, req.offset.0, req.op);
        // A block-status reply may cover less than the request: the client asks again from its end on.
        if req.len.0 > most && req.op != Op::Extents {
            return self.split(io, req, cx);
        }
        self.moved[io.tag.index()] = (target.start, req.len);
        req.offset = Bytes(req.offset.0 - target.start);
        req.len = Bytes(req.len.0.min(most));
        Verdict::Down(target.child)
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        let (start, len) = self.moved[io.tag.index()];
        (req.offset, req.len) = (Bytes(req.offset.0 + start), len);
        Verdict::Up(status)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        if req.op == Op::Flush {
            return self.flushes.end(io, status);
        }
        let TableNode { targets, split_requests, .. } = self;
        split_requests.end(io, req, status, cx, |left, _| Some(first_child(targets, left)))
    }

    /// Does nothing: this node has nothing in the ring. Child requests have the request's age, so the queue
    /// cancels them itself.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;
    use block::{Region, Segment};

    const MEMORY: Segment = Segment { offset: 0, len: 1 << 20, region: Region(0) };

    /// Three targets over one recording child: sectors 0 to 8, 8 to 24 split every 4, and 24 to 32.
    fn bench() -> Bench {
        let row = |start, len, cut: Option<u64>| TableTarget {
            place: TargetRange { start: Sectors(start), len: Sectors(len) },
            max_io_len: cut.map(Sectors),
            splits_discards: false,
        };
        let rows = [row(0, 8, None), row(8, 16, Some(4)), row(24, 8, None)];
        Bench::new(16, |child| TableNode::new(&rows, &[child; 3]))
    }

    fn run(op: Op, sector: u64, sectors: u64) -> (Status, Vec<(u64, u64)>) {
        let req = Request::new(op, Sectors(sector).bytes(), Sectors(sectors).bytes());
        let memory = if op.moves_data() { vec![MEMORY] } else { vec![] };
        let (status, seen) = bench().run(req, &memory);
        (status, seen.iter().map(|(req, _)| (req.offset.sectors().0, req.len.sectors().0)).collect())
    }

    #[test]
    fn a_request_within_a_target_gets_the_targets_own_offset() {
        assert_eq!(run(Op::Read, 2, 6), (Status::Ok, vec![(2, 6)]));
        assert_eq!(run(Op::Write, 12, 4), (Status::Ok, vec![(4, 4)]));
        assert_eq!(run(Op::Read, 24, 8), (Status::Ok, vec![(0, 8)]));
    }

    #[test]
    fn requests_are_split_at_target_boundaries_and_at_max_io_len() {
        let whole = vec![(0, 8), (0, 4), (4, 4), (8, 4), (12, 4), (0, 8)];
        assert_eq!(run(Op::Write, 0, 32), (Status::Ok, whole));
        assert_eq!(run(Op::Discard, 10, 4), (Status::Ok, vec![(2, 2), (4, 2)]));
    }

    #[test]
    fn a_target_that_splits_discards_itself_gets_them_whole() {
        let place = TargetRange { start: Sectors(0), len: Sectors(64) };
        let row = TableTarget { place, max_io_len: Some(Sectors(4)), splits_discards: true };
        let next = TableTarget { place: TargetRange { start: Sectors(64), ..place }, ..row };
        for (op, split_requests) in [(Op::Discard, 2), (Op::WriteZeroes, 2), (Op::Prefetch, 6)] {
            let mut bench = Bench::new(3, |child| TableNode::new(&[row, next], &[child; 2]));
            let (_, seen) = bench.run(Request::new(op, Sectors(50).bytes(), Sectors(20).bytes()), &[]);
            assert_eq!(seen.len(), split_requests, "{op:?}");
        }
    }

    #[test]
    fn a_block_status_request_ends_at_the_end_of_its_target() {
        let (status, seen) = run(Op::Extents, 6, 10);
        assert_eq!((status, seen), (Status::Ok, vec![(6, 2)]));
    }

    #[test]
    fn child_requests_get_their_part_of_the_buffer() {
        let (_, seen) =
            bench().run(Request::new(Op::Read, Sectors(6).bytes(), Sectors(4).bytes()), &[MEMORY]);
        let memory: Vec<_> = seen.iter().map(|(_, memory)| (memory[0].offset, memory[0].len)).collect();
        assert_eq!(memory, [(0, 1024), (1024, 1024)]);
    }

    #[test]
    fn a_flush_goes_to_all_targets() {
        let (status, seen) = bench().run(Request::flush(), &[]);
        assert_eq!((status, seen.len()), (Status::Ok, 3));
    }

    #[test]
    fn the_first_error_of_a_child_is_the_status_of_the_request() {
        let mut bench = bench();
        bench.log.borrow_mut().answers = [Status::Ok, Status::Medium, Status::IoError].into();
        let req = Request::new(Op::Write, Sectors(0).bytes(), Sectors(32).bytes());
        assert_eq!(bench.run(req, &[MEMORY]).0, Status::Medium);
    }

    #[test]
    fn more_child_requests_than_spare_children_are_sent_in_turn() {
        let row = TableTarget {
            place: TargetRange { start: Sectors(0), len: Sectors(64) },
            max_io_len: Some(Sectors(1)),
            splits_discards: false,
        };
        let mut bench = Bench::new(3, |child| TableNode::new(&[row], &[child]));
        let req = Request::new(Op::Write, Sectors(0).bytes(), Sectors(64).bytes());
        let (status, seen) = bench.run(req, &[MEMORY]);
        assert_eq!((status, seen.len()), (Status::Ok, 64));
    }
}
