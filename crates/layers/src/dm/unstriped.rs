//! `unstriped <stripes> <chunk> <stripe> <device> <offset>`: one stripe of a striped device, as if it lay alone.

use super::{Area, Devices, Kind, Names, Place, Status, Target, TargetError, long_number, number, stack};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("unstriped", [1, 1, 0], make)
}

#[derive(Clone, Copy)]
struct Unstriped {
    len: Sectors,
    stripes: u64,
    chunk: u64,
    stripe: u64,
    start: Sectors,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [stripes, chunk, stripe, device, start] = words else {
        return Err(TargetError::new("Invalid number of arguments"));
    };
    let above_0 = |word| number(word).filter(|number| *number > 0);
    let stripes = above_0(stripes).ok_or(TargetError::new("Invalid stripe count"))?;
    let chunk = above_0(chunk).ok_or(TargetError::new("Invalid chunk_size"))?;
    let stripe = number(stripe).ok_or(TargetError::new("Invalid stripe number"))?;
    if stripe > stripes && stripes > 1 {
        return Err(TargetError::new("Please provide stripe between [0, # of stripes]"));
    }
    devices.open(device).map_err(|why| TargetError::lookup("Couldn't get striped device", why))?;
    let start = long_number(start).ok_or(TargetError::new("Invalid striped device offset"))?;
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

/// Whether the last sector lies where a device can have one: numbers beyond that are not reckoned with.
fn fits(len: u64, [stripes, chunk, stripe]: [u64; 3], start: u64) -> bool {
    let [len, stripes, chunk, stripe, start] = [len, stripes, chunk, stripe, start].map(u128::from);
    let end = start + len + (len.saturating_sub(1) / chunk * (stripes - 1) + stripe) * chunk;
    end <= i64::MAX as u128 / 512
}

impl Unstriped {
    /// Where a byte lies on the device.
    #[inline]
    fn at(&self, offset: u64) -> u64 {
        let chunk = self.chunk << Sectors::SHIFT;
        let row = offset / chunk;
        self.start.bytes().0 + offset + (row * (self.stripes - 1) + self.stripe) * chunk
    }

    /// All that lies between its first sector and its last: the kernel looks at no more than the length.
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

    fn looks_at_data(&self) -> bool {
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
    /// By tag: where a request began before.
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
    use super::super::rig::Rig;
    use super::super::testing::{error, made, names};
    use block::{Op, Sectors};

    #[test]
    fn a_line_is_read_and_shown_again() {
        let target = made("unstriped", "2 256 1 a 64");
        assert_eq!(target.status(Status::Table, &names(&["8:0"])), "2 256 1 8:0 64");
        assert_eq!(target.status(Status::Info, &names(&["8:0"])), "");
        // Rows of two chunks: the last sector of the fourth row's second chunk.
        assert_eq!(target.areas()[0].len, Sectors(2048));
    }

    #[test]
    fn what_is_wrong_is_said_in_the_kernels_words() {
        for (words, text) in [
            ("2 256 1 a", "Invalid number of arguments"),
            ("0 256 1 a 0", "Invalid stripe count"),
            ("2 0 1 a 0", "Invalid chunk_size"),
            ("2 256 x a 0", "Invalid stripe number"),
            ("2 256 3 a 0", "Please provide stripe between [0, # of stripes]"),
            ("2 256 1 missing 0", "Couldn't get striped device: missing: it is not there"),
            ("2 256 1 a x", "Invalid striped device offset"),
            ("3 256 1 a 0", "Target length not divisible by number of stripes"),
            ("2 48 1 a 0", "Target length not divisible by chunk size"),
        ] {
            assert_eq!(error("unstriped", words), text, "{words}");
        }
    }

    #[test]
    fn a_line_beyond_all_devices_is_refused_and_not_reckoned_with() {
        use super::super::{Place, kinds};
        let most = u64::from(u32::MAX);
        let place = Place { start: Sectors(0), len: Sectors(most) };
        let kinds = kinds::<crate::testing::Clock>();
        let kind = kinds.iter().find(|kind| kind.name == "unstriped").unwrap();
        for words in
            [["1", "4294967295", "4294967295", "a", "0"], ["1", "1", "0", "a", "18446744073709551615"]]
        {
            let made = (kind.make)(place, &words, &mut super::super::testing::Shelf::default());
            let error = made.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.starts_with("a too small for target: start="), "{words:?}: {error}");
        }
    }

    #[test]
    fn every_chunk_is_found_in_its_row() {
        let mut rig = Rig::new("unstriped", "2 8 1 a 100");
        for (sector, at) in [(0, 108), (7, 115), (8, 124), (17, 141)] {
            assert_eq!(rig.run(Op::Write, sector, 1).1, [(0, Op::Write, at, 1)]);
        }
    }
}
