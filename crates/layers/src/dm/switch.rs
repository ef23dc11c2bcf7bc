//! `switch <paths> <region> 0 [<device> <offset>]+`: regions of a fixed size, each on one of several devices.
//!
//! At first region after region goes to the next device in turn; the message `set_region_mappings` says otherwise, in the
//! kernel's compact writing: `5:1` region 5 to path 1, `:2` the region after the last one to path 2, `R3,8` the eight
//! regions after it as the three before them, in turn. Numbers are hexadecimal. The regions before a word that is
//! wrong are set, as in the kernel.

use super::{
    Area, Devices, Fan, Kind, MessageError, Names, Place, Status, Target, TargetError, Words, long_number,
    stack,
};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

/// More devices than nodes a stack can have.
const PATHS_MAX: u32 = 254;
/// A byte each: 1 GiB of table.
const REGIONS_MAX: u64 = 1 << 30;

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("switch", [1, 1, 0], make)
}

struct Switch {
    len: Sectors,
    region: Sectors,
    starts: Box<[Sectors]>,
    /// By region: its path.
    table: Arc<[AtomicU8]>,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let mut words = Words::new(words);
    let paths = words.number(1, PATHS_MAX, "Invalid number of paths")?;
    let region = words.number(1, u32::MAX, "Invalid region size")?;
    words.count(0, "Invalid number of optional args")?;
    if words.len() != 2 * paths as usize {
        return Err(TargetError::new("Incorrect number of path arguments"));
    }
    let mut starts = Vec::new();
    while let (Some(device), Some(start)) = (words.take_next(), words.take_next()) {
        devices.open(device).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
        let start = long_number(start).ok_or(TargetError::new("Invalid device starting offset"))?;
        starts.push(Sectors(start));
    }
    let regions = place.len.0.div_ceil(region.into());
    if regions > REGIONS_MAX {
        return Err(TargetError::new("Region table too large"));
    }
    let table = (0..regions).map(|region| AtomicU8::new((region % u64::from(paths)) as u8)).collect();
    Ok(Arc::new(Switch { len: place.len, region: Sectors(region.into()), starts: starts.into(), table }))
}

/// A hexadecimal number at the beginning of a text, and what follows it. No digit at all is 0, as in the kernel.
fn hex(text: &str) -> (u64, &str) {
    let end = text.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(text.len());
    let digit = |value: u64, c: char| value << 4 | u64::from(c.to_digit(16).unwrap_or(0));
    (text[..end].chars().fold(0, digit), &text[end..])
}

impl Switch {
    fn area(&self) -> Vec<Area> {
        let area = |(device, &start)| Area { device, start, len: self.len };
        self.starts.iter().enumerate().map(area).collect()
    }

    /// `R<cycle>,<count>` after the region that was set last. The last one then.
    fn repeat(&self, word: &str, last: u64) -> Option<u64> {
        if word.starts_with(',') {
            return None;
        }
        let (cycle, rest) = hex(word);
        let rest = rest.strip_prefix(',').filter(|rest| !rest.is_empty())?;
        let (count, rest) = hex(rest);
        let end = last.checked_add(count).filter(|end| *end < self.table.len() as u64)?;
        if !rest.is_empty() || cycle == 0 || cycle - 1 > last {
            return None;
        }
        for region in last + 1..=end {
            let path = self.table[(region - cycle) as usize].load(Relaxed);
            self.table[region as usize].store(path, Relaxed);
        }
        Some(end)
    }

    /// `[<region>]:<path>`. The region.
    fn set(&self, word: &str, last: u64) -> Option<u64> {
        let (region, rest) = match word.strip_prefix(':') {
            Some(rest) => (last + 1, rest),
            None => {
                let (region, rest) = hex(word);
                (region, rest.strip_prefix(':')?)
            }
        };
        let (path, left) = hex(rest);
        if rest.is_empty() || !left.is_empty() || path >= self.starts.len() as u64 {
            return None;
        }
        self.table.get(usize::try_from(region).ok()?)?.store(path as u8, Relaxed);
        Some(region)
    }
}

impl<R: Ring> Layer<R> for Switch {
    fn name(&self) -> &'static str {
        "switch"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        stack(self.len, &self.area(), below)
    }

    fn spares(&self, depth: u16) -> u16 {
        let paths = self.starts.len() as u16;
        paths.saturating_mul(depth.min(16)).clamp(paths, 4096)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(SwitchNode {
            region: self.region.bytes().0,
            starts: self.starts.iter().map(|start| start.bytes()).collect(),
            table: self.table.clone(),
            children: below.into(),
            fan: Fan::default(),
            offsets: Box::default(),
        })
    }
}

impl<R: Ring> Target<R> for Switch {
    fn areas(&self) -> Vec<Area> {
        self.area()
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(self.region)
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match what {
            Status::Info => String::new(),
            Status::Table => {
                let path = |(path, start): (usize, &Sectors)| format!(" {} {}", names.shown(path), start.0);
                let paths: String = self.starts.iter().enumerate().map(path).collect();
                format!("{} {} 0{paths}", self.starts.len(), self.region.0)
            }
        }
    }

    fn message(&self, words: &[&str], _: &Names) -> Result<Option<String>, MessageError> {
        let (word, args) = words.split_first().ok_or(MessageError::Invalid)?;
        if !word.eq_ignore_ascii_case("set_region_mappings") {
            return Err(MessageError::Invalid);
        }
        let mut last = 0;
        for word in args {
            let set = match word.strip_prefix(['R', 'r']) {
                Some(rest) => self.repeat(rest, last),
                None => self.set(word, last),
            };
            last = set.ok_or(MessageError::Invalid)?;
        }
        Ok(None)
    }
}

struct SwitchNode {
    region: u64,
    starts: Box<[Bytes]>,
    table: Arc<[AtomicU8]>,
    children: Box<[NodeId]>,
    fan: Fan,
    /// By tag: where a request began before.
    offsets: Box<[Bytes]>,
}

impl<R: Ring> Node<R> for SwitchNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.fan.attach(tags);
        self.offsets = vec![Bytes::ZERO; tags].into();
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Flush {
            let flush = *req;
            return self.fan.start(io, &self.children, cx, |_| flush);
        }
        let path = usize::from(self.table[(req.offset.0 / self.region) as usize].load(Relaxed));
        self.offsets[io.tag.index()] = req.offset;
        req.offset = req.offset + self.starts[path];
        Verdict::Down(self.children[path])
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        req.offset = self.offsets[io.tag.index()];
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

    /// Copies are as old as the request and are asked themselves.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}

#[cfg(test)]
mod tests {
    use super::super::rig::Rig;
    use super::super::testing::{error, made, names};
    use super::super::{MessageError, Status};
    use block::Op;

    #[test]
    fn a_line_is_read_and_shown_again() {
        let target = made("switch", "3 128 0 a 0 b 8 c 16");
        let names = names(&["8:0", "8:16", "8:32"]);
        assert_eq!(target.status(Status::Table, &names), "3 128 0 8:0 0 8:16 8 8:32 16");
        assert_eq!(target.status(Status::Info, &names), "");
    }

    #[test]
    fn what_is_wrong_is_said_in_the_kernels_words() {
        for (words, text) in [
            ("0 128 0", "Invalid number of paths"),
            ("1 0 0 a 0", "Invalid region size"),
            ("1 128 1 x a 0", "Invalid number of optional args"),
            ("2 128 0 a 0", "Incorrect number of path arguments"),
            ("1 128 0 missing 0", "Device lookup failed: missing: it is not there"),
            ("1 128 0 a x", "Invalid device starting offset"),
        ] {
            assert_eq!(error("switch", words), text, "{words}");
        }
    }

    fn map(rig: &mut Rig) -> String {
        (0..16).map(|region| rig.run(Op::Read, region * 64, 1).1[0].0.to_string()).collect()
    }

    #[test]
    fn regions_go_where_messages_say() {
        let mut rig = Rig::new("switch", "3 64 0 a 0 b 8 c 16");
        assert_eq!(map(&mut rig), "0120120120120120");
        assert_eq!(rig.run(Op::Write, 65, 1).1, [(1, Op::Write, 73, 1)]);
        let target = rig.target.clone();
        let tell = |words: &str| {
            let words: Vec<&str> = words.split(' ').collect();
            target.message(&words, &names(&[]))
        };
        for (words, becomes) in [
            ("set_region_mappings 0:2 :2 :1", "2210120120120120"),
            ("SET_REGION_MAPPINGS a:1 :1", "2210120120110120"),
            ("set_region_mappings 0:0 :1 R2,a", "0101010101010120"),
            ("set_region_mappings F:2", "0101010101010122"),
        ] {
            assert_eq!(tell(words), Ok(None));
            assert_eq!(map(&mut rig), becomes, "{words}");
        }
        for words in [
            "set_region_mappings 10:0",
            "set_region_mappings 0:3",
            "set_region_mappings 0",
            "set_region_mappings 0:",
            "set_region_mappings :0 R3,1",
            "set_region_mappings 0:0 R1,10",
            "set_region_mappings 0:0 R0,1",
            "set_region_mappings 0:0 R,1",
            "set_region_mappings 0:0 R1,",
            "set_region_mappings 0:0 R1,1x",
            "unset",
        ] {
            assert_eq!(tell(words), Err(MessageError::Invalid), "{words}");
        }
        assert_eq!(tell("set_region_mappings 5:2 99:1"), Err(MessageError::Invalid));
        assert_eq!(map(&mut rig).as_bytes()[5], b'2', "what came before stays");
    }

    #[test]
    fn a_request_is_cut_at_regions_and_a_flush_goes_to_all() {
        let mut rig = Rig::new("switch", "2 64 0 a 0 b 0");
        assert_eq!(rig.run(Op::Write, 60, 8).1, [(0, Op::Write, 60, 4), (1, Op::Write, 64, 4)]);
        assert_eq!(rig.run(Op::Flush, 0, 0).1.len(), 2);
    }
}
