//! A contiguous range of the device below as a device of its own, for example a partition.

use crate::Layer;
use crate::layer::stacked;
use block::{Bytes, Cookie, Fact, LimitsError, Profile, Request, Status};
use queue::{Cx, Node, NodeId, Ring, Verdict};

/// The shared part of a window: its range. The caller has checked that the range lies within the child and is
/// aligned to its logical blocks.
#[derive(Clone, Debug)]
pub struct WindowLayer {
    start: Bytes,
    len: Bytes,
    facts: Vec<Fact>,
}

impl WindowLayer {
    /// Creates a layer of `len` bytes from `start`. `facts` describe the range in `show`.
    pub fn new(start: Bytes, len: Bytes, facts: Vec<Fact>) -> WindowLayer {
        WindowLayer { start, len, facts }
    }
}

impl<R: Ring> Layer<R> for WindowLayer {
    fn name(&self) -> &'static str {
        "part"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let below = &below[0];
        let mut limits = stacked(&below.limits, self.start.sectors());
        limits.validate()?;
        Ok(Profile { limits, size: self.len, ..below.clone() })
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(Window { start: self.start, child: below[0] })
    }

    fn describe(&self) -> Vec<Fact> {
        self.facts.clone()
    }
}

/// The node of a window: adds the start of the range to offsets on the way down, and subtracts it on the way
/// up.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    start: Bytes,
    child: NodeId,
}

impl Window {
    /// Creates a node over `child` whose range begins at `start` of it.
    pub fn new(start: Bytes, child: NodeId) -> Window {
        Window { start, child }
    }
}

impl<R: Ring> Node<R> for Window {
    #[inline]
    fn submit(&mut self, _: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        if req.op.is_special() {
            return Verdict::Up(Status::NotSupported);
        }
        req.offset = req.offset + self.start;
        Verdict::Down(self.child)
    }

    #[inline]
    fn end_io(&mut self, _: Cookie, req: &mut Request, status: Status, _: &mut Cx<'_, R>) -> Verdict {
        req.offset = req.offset - self.start;
        Verdict::Up(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;
    use block::{Op, Region, Segment};

    #[test]
    fn offsets_are_shifted_down_and_back_up() {
        let mut bench = Bench::new(0, |child| Window { start: Bytes(65536), child });
        let memory = [Segment { offset: 0, len: 4096, region: Region(0) }];
        for op in Op::ORDINARY {
            let (status, seen) = bench.run(Request::new(op, Bytes(512), Bytes(4096)), &memory);
            assert_eq!((status, seen[0].0.offset, seen[0].0.len), (Status::Ok, Bytes(66048), Bytes(4096)));
        }
        assert_eq!(
            bench.run(Request::new(Op::ReportZones, Bytes(0), Bytes(512)), &memory).0,
            Status::NotSupported
        );
    }

    #[test]
    fn a_misaligned_window_shows_in_alignment_offset() {
        let mut below = block::QueueLimits { physical_block_size: Bytes(4096), ..Default::default() };
        below.validate().unwrap();
        let profile = Profile {
            size: Bytes::gib(1),
            read_only: false,
            abilities: block::Abilities::MEMORY,
            limits: below,
            bytewise: true,
            zero_copy_reads: true,
            inline: false,
            sparse: true,
            opaque: true,
        };
        let window = |start| WindowLayer::new(Bytes(start), Bytes::mib(1), Vec::new());
        let at = |start| {
            Layer::<crate::testing::Clock>::profile(&window(start), std::slice::from_ref(&profile)).unwrap()
        };
        assert_eq!(at(1 << 20).limits.alignment_offset, Bytes(0));
        assert_eq!(at(63 * 512).limits.alignment_offset, Bytes(512));
        assert_eq!(at(0).size, Bytes::mib(1));
        assert!(at(0).zero_copy_reads && at(0).bytewise);
    }
}
