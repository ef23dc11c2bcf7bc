//! The target `striped <stripes> <chunk> [<device> <offset>]+`: distributes chunks over several devices,
//! round robin.
//!
//! The table splits reads and writes at chunks, so each goes to one device. A discard or write-zeroes may
//! span many chunks: the chunks of a range that lie on one device are adjacent there, so each device gets one
//! request.

use super::{
    Area, Devices, FanOut, Names, RandomLine, Simulated, Status, Target, TargetError, TargetRange, TargetRow,
    parse_u32, parse_u64, stack,
};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Number of errors of a device from which on errors raise no event: the kernel's `DM_IO_ERROR_THRESHOLD`.
const IO_ERROR_THRESHOLD: u32 = 15;

pub(super) const ROW: TargetRow = TargetRow {
    name: "striped",
    version: [1, 7, 0],
    usage: "striped <stripes> <chunk> [<device> <offset>]+",
    about: "stripes data over several devices in chunks",
    example: "0 4194304 striped 2 128 a.img 0 b.img 0",
    singleton: false,
    immutable: false,
    simulated: Simulated::InStacks { random, fails: false },
};

fn random(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine {
    let (stripes, chunk) = (2 + below(2), 1 + below(16));
    let width = Sectors(len.0.div_ceil(stripes * chunk) * chunk);
    let first = format!("{stripes} {chunk}");
    RandomLine::over_many(below, Sectors(width.0 * stripes), first, stripes, width)
}

/// Error and event counters, written by the nodes.
struct Health {
    /// Number of errors of each stripe.
    errors: Box<[AtomicU32]>,
    events: AtomicU32,
}

/// The shared part of the target.
pub(super) struct Striped {
    chunk: Sectors,
    /// The used length of each device.
    width: Sectors,
    starts: Box<[Sectors]>,
    health: Arc<Health>,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [stripes, chunk, destinations @ ..] = args else {
        return Err(TargetError::new("Not enough arguments"));
    };
    let above_0 = |word| parse_u32(word).filter(|number| *number > 0);
    let stripes = u64::from(above_0(stripes).ok_or(TargetError::new("Invalid stripe count"))?);
    let chunk = u64::from(above_0(chunk).ok_or(TargetError::new("Invalid chunk_size"))?);
    if !place.len.0.is_multiple_of(stripes) {
        return Err(TargetError::new("Target length not divisible by number of stripes"));
    }
    let width = place.len.0 / stripes;
    if !width.is_multiple_of(chunk) {
        return Err(TargetError::new("Target length not divisible by chunk size"));
    }
    if destinations.len() as u64 != 2 * stripes {
        return Err(TargetError::new("Not enough destinations specified"));
    }
    let wrong = "Couldn't parse stripe destination";
    let mut starts = Vec::new();
    for pair in destinations.chunks(2) {
        starts.push(Sectors(parse_u64(pair[1]).ok_or(TargetError::new(wrong))?));
        devices.open(pair[0]).map_err(|why| TargetError::lookup(wrong, why))?;
    }
    Ok(Arc::new(Striped::new(Sectors(chunk), Sectors(width), starts.into())))
}

impl Striped {
    fn new(chunk: Sectors, width: Sectors, starts: Box<[Sectors]>) -> Striped {
        let errors = starts.iter().map(|_| AtomicU32::new(0)).collect();
        let health = Arc::new(Health { errors, events: AtomicU32::new(0) });
        Striped { chunk, width, starts, health }
    }

    fn area(&self) -> Vec<Area> {
        let area = |(device, &start)| Area { device, start, len: self.width };
        self.starts.iter().enumerate().map(area).collect()
    }

    fn len(&self) -> Sectors {
        Sectors(self.width.0 * self.starts.len() as u64)
    }
}

impl<R: Ring> Layer<R> for Striped {
    fn name(&self) -> &'static str {
        "striped"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.len(), &self.area(), below)?;
        let chunk = self.chunk.bytes();
        let all = chunk.0.checked_mul(self.starts.len() as u64).filter(|all| *all <= u32::MAX.into());
        if let (true, Some(all)) = (chunk.0 <= u32::MAX.into(), all) {
            whole.limits.io_min = chunk;
            whole.limits.io_opt = Bytes(all);
            whole.limits.validate()?;
        }
        Ok(whole)
    }

    fn child_requests(&self, depth: u16) -> u16 {
        let stripes = self.starts.len().min(4096) as u16;
        stripes.saturating_mul(depth.min(16)).clamp(stripes, 8192)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(StripedNode::new(self, below))
    }
}

impl<R: Ring> Target<R> for Striped {
    fn areas(&self) -> Vec<Area> {
        self.area()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(self.chunk)
    }

    fn splits_discards(&self) -> bool {
        true
    }

    fn status(&self, what: Status, names: &Names) -> String {
        let count = self.starts.len();
        let devices = || (0..count).map(|stripe| names.shown(stripe));
        match what {
            Status::Info => {
                let names: String = devices().map(|name| format!("{name} ")).collect();
                let health = |errors: &AtomicU32| if errors.load(Relaxed) == 0 { 'A' } else { 'D' };
                let health: String = self.health.errors.iter().map(health).collect();
                format!("{count} {names}1 {health}")
            }
            Status::Table => {
                let pair = |(name, start): (&str, &Sectors)| format!(" {name} {}", start.0);
                let pairs: String = devices().zip(&self.starts).map(pair).collect();
                format!("{count} {}{pairs}", self.chunk.0)
            }
        }
    }

    fn events(&self) -> u32 {
        self.health.events.load(Relaxed)
    }
}

struct StripedNode {
    chunk: u64,
    starts: Box<[u64]>,
    children: Box<[NodeId]>,
    health: Arc<Health>,
    fan: FanOut,
    /// By tag: the stripe that the request went to, and its original offset.
    sent: Box<[(usize, Bytes)]>,
    /// Buffers for the parts of a discard and their children, with capacity for each stripe; used within one
    /// call.
    parts: Vec<Request>,
    part_children: Vec<NodeId>,
}

impl StripedNode {
    fn new(target: &Striped, below: &[NodeId]) -> StripedNode {
        StripedNode {
            chunk: target.chunk.bytes().0,
            starts: target.starts.iter().map(|start| start.bytes().0).collect(),
            children: below.into(),
            health: target.health.clone(),
            fan: FanOut::default(),
            sent: Box::default(),
            parts: Vec::with_capacity(below.len()),
            part_children: Vec::with_capacity(below.len()),
        }
    }

    /// Returns the stripe of a byte, and the byte's offset from the start of the stripe.
    #[inline]
    fn at(&self, offset: u64) -> (usize, u64) {
        let stripes = self.starts.len() as u64;
        let (chunk, within) = (offset / self.chunk, offset % self.chunk);
        ((chunk % stripes) as usize, chunk / stripes * self.chunk + within)
    }

    /// Returns the offset on a stripe of its first byte at or after `offset` of the target.
    fn first_on(&self, stripe: usize, offset: u64) -> u64 {
        let (chunk_stripe, at) = self.at(offset);
        match stripe.cmp(&chunk_stripe) {
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Greater => at / self.chunk * self.chunk,
            std::cmp::Ordering::Less => (at / self.chunk + 1) * self.chunk,
        }
    }

    /// Sends each stripe its part of a discard or write-zeroes, all at once.
    fn split<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        let (mut parts, mut children) =
            (std::mem::take(&mut self.parts), std::mem::take(&mut self.part_children));
        let part = |stripe: usize| {
            let from = self.first_on(stripe, req.offset.0);
            let to = self.first_on(stripe, req.end().0);
            let offset = Bytes(self.starts[stripe] + from);
            (from < to).then_some(Request { offset, len: Bytes(to - from), ..*req })
        };
        parts.clear();
        children.clear();
        for stripe in 0..self.starts.len() {
            if let Some(part) = part(stripe) {
                parts.push(part);
                children.push(self.children[stripe]);
            }
        }
        let verdict = self.fan.start(io, &children, cx, |index| parts[index]);
        (self.parts, self.part_children) = (parts, children);
        verdict
    }

    fn count_error(&self, stripe: usize) {
        let errors = self.health.errors[stripe].fetch_add(1, Relaxed) + 1;
        if errors < IO_ERROR_THRESHOLD {
            self.health.events.fetch_add(1, Relaxed);
        }
    }
}

impl<R: Ring> Node<R> for StripedNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.fan.attach(tags);
        self.sent = vec![(0, Bytes::ZERO); tags].into();
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Flush {
            let flush = *req;
            return self.fan.start(io, &self.children, cx, |_| flush);
        }
        let to_end = self.chunk - req.offset.0 % self.chunk;
        if req.len.0 > to_end {
            return match req.op {
                Op::Discard | Op::WriteZeroes => self.split(io, req, cx),
                Op::Prefetch => Verdict::Up(block::Status::Ok),
                _ => Verdict::Up(block::Status::NotSupported),
            };
        }
        let (stripe, at) = self.at(req.offset.0);
        self.sent[io.tag.index()] = (stripe, req.offset);
        req.offset = Bytes(self.starts[stripe] + at);
        Verdict::Down(self.children[stripe])
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        let (stripe, offset) = self.sent[io.tag.index()];
        req.offset = offset;
        if !status.is_ok() && status != block::Status::NotSupported {
            self.count_error(stripe);
        }
        Verdict::Up(status)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        _: &mut Request,
        _: &Request,
        status: block::Status,
        _: &mut Cx<'_, R>,
    ) -> Verdict {
        self.fan.end(io, status)
    }

    /// Does nothing: child requests have the request's age, so the queue cancels them itself.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::harness::Harness;
    use super::super::testing::{build, error, names};
    use block::{Op, Request, Sectors};

    #[test]
    fn table_status_repeats_the_line() {
        let target = build("striped", "2 32 a 0 b 128");
        let names = names(&["8:0", "8:16"]);
        assert_eq!(target.status(Status::Table, &names), "2 32 8:0 0 8:16 128");
        assert_eq!(target.status(Status::Info, &names), "2 8:0 8:16 1 AA");
        assert_eq!(target.max_io_len(), Some(Sectors(32)));
        assert_eq!(target.areas()[1].len, Sectors(512));
    }

    #[test]
    fn bad_arguments_are_refused_with_the_kernels_text() {
        for (args, text) in [
            ("2", "Not enough arguments"),
            ("0 32", "Invalid stripe count"),
            ("x 32", "Invalid stripe count"),
            ("2 0", "Invalid chunk_size"),
            ("3 32 a 0 b 0 c 0", "Target length not divisible by number of stripes"),
            ("2 48 a 0 b 0", "Target length not divisible by chunk size"),
            ("2 32 a 0", "Not enough destinations specified"),
            ("2 32 a 0 b x", "Couldn't parse stripe destination"),
            ("1 32 missing 0", "Couldn't parse stripe destination: missing: no such device"),
        ] {
            assert_eq!(error("striped", args), text, "{args}");
        }
    }

    #[test]
    fn chunks_are_mapped_round_robin() {
        let mut harness = Harness::without_table("striped", "2 8 a 0 b 100");
        for (sector, device, at) in [(0, 0, 0), (7, 0, 7), (8, 1, 100), (16, 0, 8), (25, 1, 109)] {
            let (_, seen) = harness.run(Op::Read, sector, 1);
            assert_eq!(seen, [(device, Op::Read, at, 1)], "sector {sector}");
        }
    }

    #[test]
    fn a_table_does_not_split_a_discard_for_stripes() {
        let mut harness = Harness::new("striped", "2 8 a 0 b 100");
        let (status, seen) = harness.run(Op::Discard, 4, 512);
        assert_eq!(status, block::Status::Ok);
        assert_eq!(seen, [(0, Op::Discard, 4, 256), (1, Op::Discard, 100, 256)]);
        assert_eq!(harness.run(Op::WriteZeroes, 0, 64).1.len(), 2);
    }

    #[test]
    fn a_discard_becomes_one_request_per_device() {
        let mut harness = Harness::without_table("striped", "2 8 a 0 b 100");
        let (_, seen) = harness.run(Op::Discard, 4, 32);
        assert_eq!(seen, [(0, Op::Discard, 4, 16), (1, Op::Discard, 100, 16)]);
        let (_, seen) = harness.run(Op::WriteZeroes, 10, 4);
        assert_eq!(seen, [(1, Op::WriteZeroes, 102, 4)]);
        let (_, seen) = harness.run(Op::Discard, 12, 8);
        assert_eq!(seen, [(0, Op::Discard, 8, 4), (1, Op::Discard, 104, 4)]);
    }

    #[test]
    fn a_flush_goes_to_all_devices_and_errors_are_counted() {
        let mut harness = Harness::without_table("striped", "2 8 a 0 b 0");
        assert_eq!(harness.request(Request::flush()).1.len(), 2);
        harness.fail(1, block::Status::IoError);
        assert_eq!(harness.run(Op::Read, 8, 1).0, block::Status::IoError);
        assert_eq!(harness.target.events(), 1);
        assert_eq!(harness.target.status(Status::Info, &names(&["8:0", "8:16"])), "2 8:0 8:16 1 AD");
        harness.fail(1, block::Status::NotSupported);
        assert_eq!(harness.run(Op::Discard, 8, 1).0, block::Status::NotSupported);
        assert_eq!(harness.target.events(), 1);
    }
}
