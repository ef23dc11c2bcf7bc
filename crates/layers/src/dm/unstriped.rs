//! The target `unstriped <stripes> <chunk> <stripe> <device> <offset>`: maps to one stripe of a striped
//! device.

use super::{
    Area, Devices, Names, RandomLine, Simulated, Status, Target, TargetError, TargetRange, TargetRow,
    parse_u32, parse_u64, stack,
};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

pub(super) const ROW: TargetRow = TargetRow {
    name: "unstriped",
    version: [1, 1, 0],
    usage: "unstriped <stripes> <chunk> <stripe> <device> <offset>",
    about: "one stripe of a striped device",
    example: "0 1048576 unstriped 2 128 0 striped.img 0",
    singleton: false,
    immutable: false,
    simulated: Simulated::InStacks { random, fails: false },
};

fn random(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine {
    let (stripes, chunk) = (1 + below(2), 1 << below(5));
    let first = format!("{stripes} {chunk} {}", below(stripes));
    let len = Sectors(len.0.next_multiple_of(stripes * chunk));
    RandomLine::over_one(len, &first, below(33), Sectors(len.0 * stripes), "")
}

#[derive(Clone, Copy)]
struct Unstriped {
    len: Sectors,
    stripes: u64,
    chunk: u64,
    stripe: u64,
    start: Sectors,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [stripes, chunk, stripe, device, start] = args else {
        return Err(TargetError::new("Invalid number of arguments"));
    };
    let above_0 = |word| parse_u32(word).filter(|number| *number > 0);
    let stripes = above_0(stripes).ok_or(TargetError::new("Invalid stripe count"))?;
    let chunk = above_0(chunk).ok_or(TargetError::new("Invalid chunk_size"))?;
    let stripe = parse_u32(stripe).ok_or(TargetError::new("Invalid stripe number"))?;
    if stripe > stripes && stripes > 1 {
        return Err(TargetError::new("Please provide stripe between [0, # of stripes]"));
    }
    devices.open(device).map_err(|why| TargetError::lookup("Couldn't get striped device", why))?;
    let start = parse_u64(start).ok_or(TargetError::new("Invalid striped device offset"))?;
    if !place.len.0.is_multiple_of(stripes.into()) {
        return Err(TargetError::new("Target length not divisible by number of stripes"));
    }
    if !(place.len.0 / u64::from(stripes)).is_multiple_of(chunk.into()) {
        return Err(TargetError::new("Target length not divisible by chunk size"));
    }
    if !fits(place.len.0, [stripes, chunk, stripe].map(u64::from), start) {
        return Err(TargetError::of(format!(
            "{device} too small for target: start={start}, len={}",
            place.len.0
        )));
    }
    Ok(Arc::new(Unstriped {
        len: place.len,
        stripes: stripes.into(),
        chunk: chunk.into(),
        stripe: stripe.into(),
        start: Sectors(start),
    }))
}

/// Returns whether the last sector is within the largest possible device (`i64::MAX` bytes). Larger numbers
/// would overflow.
fn fits(len: u64, [stripes, chunk, stripe]: [u64; 3], start: u64) -> bool {
    let [len, stripes, chunk, stripe, start] = [len, stripes, chunk, stripe, start].map(u128::from);
    let end = start + len + (len.saturating_sub(1) / chunk * (stripes - 1) + stripe) * chunk;
    end <= i64::MAX as u128 / 512
}

impl Unstriped {
    /// Returns the device offset of a byte of the target.
    #[inline]
    fn at(&self, offset: u64) -> u64 {
        let chunk = self.chunk << Sectors::SHIFT;
        let row = offset / chunk;
        self.start.bytes().0 + offset + (row * (self.stripes - 1) + self.stripe) * chunk
    }

    /// Returns the device range from the first to the last sector of the stripe. The kernel checks the length
    /// only.
    fn area(&self) -> Area {
        let end = Bytes(self.at(self.len.bytes().0 - 512) + 512).sectors();
        Area { device: 0, start: self.start, len: Sectors(end.0 - self.start.0) }
    }
}

impl<R: Ring> Layer<R> for Unstriped {
    fn name(&self) -> &'static str {
        "unstriped"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.len, &[self.area()], below)?;
        whole.limits.chunk_sectors = Sectors(self.chunk);
        whole.limits.validate()?;
        Ok(whole)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(UnstripedNode { target: *self, child: below[0], offsets: Box::default() })
    }
}

impl<R: Ring> Target<R> for Unstriped {
    fn areas(&self) -> Vec<Area> {
        vec![self.area()]
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(Sectors(self.chunk))
    }

    fn status(&self, what: Status, names: &Names) -> String {
        let Unstriped { stripes, chunk, stripe, start, .. } = self;
        match what {
            Status::Info => String::new(),
            Status::Table => format!("{stripes} {chunk} {stripe} {} {}", names.shown(0), start.0),
        }
    }
}

struct UnstripedNode {
    target: Unstriped,
    child: NodeId,
    /// By tag: the original offset of the request.
    offsets: Box<[Bytes]>,
}

impl<R: Ring> Node<R> for UnstripedNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.offsets = vec![Bytes::ZERO; tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        self.offsets[io.tag.index()] = req.offset;
        if req.op != Op::Flush {
            req.offset = Bytes(self.target.at(req.offset.0));
        }
        Verdict::Down(self.child)
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        req.offset = self.offsets[io.tag.index()];
        Verdict::Up(status)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::harness::Harness;
    use super::super::testing::{build, error, names};
    use block::{Op, Sectors};

    #[test]
    fn table_status_repeats_the_line() {
        let target = build("unstriped", "2 256 1 a 64");
        assert_eq!(target.status(Status::Table, &names(&["8:0"])), "2 256 1 8:0 64");
        assert_eq!(target.status(Status::Info, &names(&["8:0"])), "");
        // Rows of two chunks: the last sector of the fourth row's second chunk.
        assert_eq!(target.areas()[0].len, Sectors(2048));
    }

    #[test]
    fn bad_arguments_are_refused_with_the_kernels_text() {
        for (args, text) in [
            ("2 256 1 a", "Invalid number of arguments"),
            ("0 256 1 a 0", "Invalid stripe count"),
            ("2 0 1 a 0", "Invalid chunk_size"),
            ("2 256 x a 0", "Invalid stripe number"),
            ("2 256 3 a 0", "Please provide stripe between [0, # of stripes]"),
            ("2 256 1 missing 0", "Couldn't get striped device: missing: no such device"),
            ("2 256 1 a x", "Invalid striped device offset"),
            ("3 256 1 a 0", "Target length not divisible by number of stripes"),
            ("2 48 1 a 0", "Target length not divisible by chunk size"),
        ] {
            assert_eq!(error("unstriped", args), text, "{args}");
        }
    }

    #[test]
    fn a_line_beyond_the_largest_device_is_refused_without_overflow() {
        use super::super::{TargetRange, target_types};
        let most = u64::from(u32::MAX);
        let place = TargetRange { start: Sectors(0), len: Sectors(most) };
        let kinds = target_types::<crate::testing::Clock>();
        let kind = kinds.iter().find(|kind| kind.row.name == "unstriped").unwrap();
        for args in
            [["1", "4294967295", "4294967295", "a", "0"], ["1", "1", "0", "a", "18446744073709551615"]]
        {
            let result = (kind.construct)(place, &args, &mut super::super::testing::FakeDevices::default());
            let error = result.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.starts_with("a too small for target: start="), "{args:?}: {error}");
        }
    }

    #[test]
    fn each_chunk_maps_to_its_row_of_the_striped_device() {
        let mut harness = Harness::new("unstriped", "2 8 1 a 100");
        for (sector, at) in [(0, 108), (7, 115), (8, 124), (17, 141)] {
            assert_eq!(harness.run(Op::Write, sector, 1).1, [(0, Op::Write, at, 1)]);
        }
    }
}
