//! The targets of a table next to each other, as one device: device-mapper's own part.
//!
//! A request that lies within one target, and crosses no multiple of its `max_io_len`, goes down as it is, moved to the
//! target's own sectors. Another is held here while its pieces go down as child requests, as many at once as are spare.
//! A flush goes to all targets. A table of one target that cuts nothing needs no node of this: who builds the
//! tree leaves it out.
//!
//! *Invariant:* rows lie next to each other without gaps, from 0 on.

use super::{Fan, Place, both};
use crate::pieces::{Piece, Pieces};
use crate::{Layer, Split};
use block::{Bytes, Cookie, LimitsError, Op, Profile, QueueLimits, Request, Sectors, Status};
use queue::{Cx, Node, NodeId, Ring, Verdict};

/// One target, as far as requests are cut for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Where it lies.
    pub place: Place,
    /// Its [`max_io_len`](super::Target::max_io_len).
    pub max_io_len: Option<Sectors>,
    /// Whether it [`spreads`](super::Target::spreads) discards and writes of zeroes, which are then not cut for it.
    pub spreads: bool,
}

/// The shared part: a child for each row.
#[derive(Clone, Debug)]
pub struct TableLayer {
    rows: Box<[Row]>,
}

impl TableLayer {
    /// With these targets, in the order of their places.
    ///
    /// # Panics
    /// When they leave a gap or overlap: whoever read the table has refused it.
    pub fn new(rows: Vec<Row>) -> TableLayer {
        let mut next = Sectors(0);
        for row in &rows {
            assert!(row.place.start == next && row.place.len.0 > 0, "targets lie next to each other");
            next.0 += row.place.len.0;
        }
        TableLayer { rows: rows.into() }
    }

    /// Whether requests reach these rows as they are without it.
    pub fn is_needless(rows: &[Row]) -> bool {
        matches!(rows, [Row { max_io_len: None, .. }])
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
            whole.abilities = both(whole.abilities, target.abilities);
            whole.in_place &= target.in_place;
            whole.opaque &= target.opaque;
        }
        limits.validate()?;
        // Pieces fill parts of one buffer, which lent memory is not; and no answer about extents crosses targets.
        Ok(Profile { limits, lends: false, bytewise: false, sparse: false, ..whole })
    }

    fn spares(&self, depth: u16) -> u16 {
        Split::children(depth).max(self.rows.len().min(u16::MAX.into()) as u16)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    /// A target is no device of its own: where it moves requests to is.
    fn begins(&self, child: usize) -> Option<Bytes> {
        self.rows.get(child).map(|row| row.place.start.bytes())
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(TableNode::new(&self.rows, below))
    }
}

/// A row in bytes.
#[derive(Clone, Copy)]
struct Reach {
    start: u64,
    end: u64,
    /// `u64::MAX`: not cut.
    max_io: u64,
    spreads: bool,
    child: NodeId,
}

/// The target at an offset, and how many bytes may go to it from there in one request.
#[inline]
fn at(reaches: &[Reach], offset: u64, op: Op) -> (Reach, u64) {
    let row = reaches.partition_point(|reach| reach.end <= offset);
    let reach = reaches[row];
    let is_whole = reach.spreads && matches!(op, Op::Discard | Op::WriteZeroes);
    let to_cut = if reach.max_io == u64::MAX || is_whole {
        u64::MAX
    } else {
        reach.max_io - (offset - reach.start) % reach.max_io
    };
    (reach, to_cut.min(reach.end - offset))
}

/// What of a request goes down first.
fn piece(reaches: &[Reach], left: &Request) -> Piece {
    let (reach, most) = at(reaches, left.offset.0, left.op);
    Piece { child: reach.child, len: left.len.0.min(most), start: reach.start }
}

struct TableNode {
    reaches: Box<[Reach]>,
    children: Box<[NodeId]>,
    /// By tag: where the target begins to which a request went, and how long the request was.
    moved: Box<[(u64, Bytes)]>,
    pieces: Pieces,
    flushes: Fan,
}

impl TableNode {
    fn new(rows: &[Row], children: &[NodeId]) -> TableNode {
        let reach = |(row, &child): (&Row, &NodeId)| {
            let start = row.place.start.bytes().0;
            let max_io = row.max_io_len.map_or(u64::MAX, |len| len.bytes().0);
            Reach { start, end: start + row.place.len.bytes().0, max_io, spreads: row.spreads, child }
        };
        TableNode {
            reaches: rows.iter().zip(children).map(reach).collect(),
            children: children.into(),
            moved: Box::default(),
            pieces: Pieces::default(),
            flushes: Fan::default(),
        }
    }

    #[inline]
    fn end(&self) -> Bytes {
        Bytes(self.reaches.last().map_or(0, |reach| reach.end))
    }

    #[inline(never)]
    fn cut<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let TableNode { reaches, pieces, .. } = self;
        pieces.begin(io, req, cx, |left, _| Some(piece(reaches, left)))
    }
}

impl<R: Ring> Node<R> for TableNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.moved = vec![(0, Bytes::ZERO); tags].into();
        self.pieces.attach(tags);
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
            // What stands on this device has not heard yet that it is shorter.
            return Verdict::Up(Status::IoError);
        }
        let (reach, most) = at(&self.reaches, req.offset.0, req.op);
        // An answer about extents may end early, and then who asks goes on from there.
        if req.len.0 > most && req.op != Op::Extents {
            return self.cut(io, req, cx);
        }
        self.moved[io.tag.index()] = (reach.start, req.len);
        req.offset = Bytes(req.offset.0 - reach.start);
        req.len = Bytes(req.len.0.min(most));
        Verdict::Down(reach.child)
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
        let TableNode { reaches, pieces, .. } = self;
        pieces.end(io, req, status, cx, |left, _| Some(piece(reaches, left)))
    }

    /// Nothing of ours is with the ring: the pieces are as old as the request and are asked themselves.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;
    use block::{Region, Segment};

    const MEMORY: Segment = Segment { offset: 0, len: 1 << 20, region: Region(0) };

    /// Sectors 0 to 8, 8 to 24 cut every 4, and the rest up to 32, all on one recorder.
    fn bench() -> Bench {
        let row = |start, len, cut: Option<u64>| Row {
            place: Place { start: Sectors(start), len: Sectors(len) },
            max_io_len: cut.map(Sectors),
            spreads: false,
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
    fn a_request_within_a_target_is_moved_to_its_own_sectors() {
        assert_eq!(run(Op::Read, 2, 6), (Status::Ok, vec![(2, 6)]));
        assert_eq!(run(Op::Write, 12, 4), (Status::Ok, vec![(4, 4)]));
        assert_eq!(run(Op::Read, 24, 8), (Status::Ok, vec![(0, 8)]));
    }

    #[test]
    fn requests_are_cut_at_the_ends_of_targets_and_at_their_multiples() {
        let whole = vec![(0, 8), (0, 4), (4, 4), (8, 4), (12, 4), (0, 8)];
        assert_eq!(run(Op::Write, 0, 32), (Status::Ok, whole));
        assert_eq!(run(Op::Discard, 10, 4), (Status::Ok, vec![(2, 2), (4, 2)]));
    }

    #[test]
    fn a_target_that_spreads_discards_gets_them_whole() {
        let place = Place { start: Sectors(0), len: Sectors(64) };
        let row = Row { place, max_io_len: Some(Sectors(4)), spreads: true };
        let next = Row { place: Place { start: Sectors(64), ..place }, ..row };
        for (op, pieces) in [(Op::Discard, 2), (Op::WriteZeroes, 2), (Op::Prefetch, 6)] {
            let mut bench = Bench::new(3, |child| TableNode::new(&[row, next], &[child; 2]));
            let (_, seen) = bench.run(Request::new(op, Sectors(50).bytes(), Sectors(20).bytes()), &[]);
            assert_eq!(seen.len(), pieces, "{op:?}");
        }
    }

    #[test]
    fn a_question_for_extents_is_asked_as_far_as_one_target_goes() {
        let (status, seen) = run(Op::Extents, 6, 10);
        assert_eq!((status, seen), (Status::Ok, vec![(6, 2)]));
    }

    #[test]
    fn pieces_name_the_memory_that_is_theirs() {
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
    fn the_first_error_of_a_piece_is_the_requests() {
        let mut bench = bench();
        bench.log.borrow_mut().answers = [Status::Ok, Status::Medium, Status::IoError].into();
        let req = Request::new(Op::Write, Sectors(0).bytes(), Sectors(32).bytes());
        assert_eq!(bench.run(req, &[MEMORY]).0, Status::Medium);
    }

    #[test]
    fn more_pieces_than_spare_children_go_one_after_the_other() {
        let row = Row {
            place: Place { start: Sectors(0), len: Sectors(64) },
            max_io_len: Some(Sectors(1)),
            spreads: false,
        };
        let mut bench = Bench::new(3, |child| TableNode::new(&[row], &[child]));
        let req = Request::new(Op::Write, Sectors(0).bytes(), Sectors(64).bytes());
        let (status, seen) = bench.run(req, &[MEMORY]);
        assert_eq!((status, seen.len()), (Status::Ok, 64));
    }
}
