//! The target `switch <paths> <region> 0 [<device> <offset>]+`: maps regions of a fixed size to one of
//! several devices each.
//!
//! Initially regions are mapped to paths round robin. The message `set_region_mappings` changes that, in the
//! kernel's compact notation: `5:1` maps region 5 to path 1, `:2` the region after the previous one to path
//! 2, `R3,8` repeats the last three mappings for the next eight regions. Numbers are hexadecimal. If an
//! argument is wrong, the mappings before it have taken effect, as in the kernel.

use super::{
    Area, Args, Devices, FanOut, MessageError, Names, RandomLine, Simulated, Status, Target, TargetError,
    TargetRange, TargetRow, parse_u64, stack,
};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

/// Largest number of paths: a stack has at most 255 nodes, and path numbers are bytes.
const PATHS_MAX: u32 = 254;
/// Largest number of regions: the region table has a byte for each, so 1 GiB of memory.
const REGIONS_MAX: u64 = 1 << 30;

pub(super) const ROW: TargetRow = TargetRow {
    name: "switch",
    version: [1, 1, 0],
    usage: "switch <paths> <region> 0 [<device> <offset>]+",
    about: "maps each region to one of several devices",
    example: "0 2097152 switch 2 2048 0 a.img 0 b.img 0",
    singleton: false,
    immutable: false,
    simulated: Simulated::InStacks { random, fails: false },
};

fn random(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine {
    let (paths, region) = (1 + below(3), 1 + below(64));
    RandomLine::over_many(below, len, format!("{paths} {region} 0"), paths, len)
}

struct Switch {
    len: Sectors,
    region: Sectors,
    starts: Box<[Sectors]>,
    /// The path of each region.
    table: Arc<[AtomicU8]>,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let mut args = Args::new(args);
    let paths = args.number(1, PATHS_MAX, "Invalid number of paths")?;
    let region = args.number(1, u32::MAX, "Invalid region size")?;
    args.count(0, "Invalid number of optional args")?;
    if args.len() != 2 * paths as usize {
        return Err(TargetError::new("Incorrect number of path arguments"));
    }
    let mut starts = Vec::new();
    while let (Some(device), Some(start)) = (args.take_next(), args.take_next()) {
        devices.open(device).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
        let start = parse_u64(start).ok_or(TargetError::new("Invalid device starting offset"))?;
        starts.push(Sectors(start));
    }
    let regions = place.len.0.div_ceil(region.into());
    if regions > REGIONS_MAX {
        return Err(TargetError::new("Region table too large"));
    }
    let table = (0..regions).map(|region| AtomicU8::new((region % u64::from(paths)) as u8)).collect();
    Ok(Arc::new(Switch { len: place.len, region: Sectors(region.into()), starts: starts.into(), table }))
}

/// Parses a hexadecimal number at the start of a text; returns it and the rest. Without any digit it is 0, as
/// in the kernel.
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

    /// Executes `R<cycle>,<count>` after region `last`. Returns the last region that it maps, or `None` for
    /// an invalid argument.
    fn repeat(&self, arg: &str, last: u64) -> Option<u64> {
        if arg.starts_with(',') {
            return None;
        }
        let (cycle, rest) = hex(arg);
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

    /// Executes `[<region>]:<path>`. Returns the region, or `None` for an invalid argument.
    fn set(&self, arg: &str, last: u64) -> Option<u64> {
        let (region, rest) = match arg.strip_prefix(':') {
            Some(rest) => (last + 1, rest),
            None => {
                let (region, rest) = hex(arg);
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

    fn child_requests(&self, depth: u16) -> u16 {
        let paths = self.starts.len() as u16;
        paths.saturating_mul(depth.min(16)).clamp(paths, 4096)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(SwitchNode {
            region: self.region.bytes().0,
            starts: self.starts.iter().map(|start| start.bytes()).collect(),
            table: self.table.clone(),
            children: below.into(),
            fan: FanOut::default(),
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

    fn messages(&self) -> &'static [&'static str] {
        &["set_region_mappings"]
    }

    fn message(&self, message: &[&str], _: &Names) -> Result<Option<String>, MessageError> {
        let (command, args) = message.split_first().ok_or(MessageError::Invalid)?;
        if !command.eq_ignore_ascii_case("set_region_mappings") {
            return Err(MessageError::Invalid);
        }
        let mut last = 0;
        for arg in args {
            let set = match arg.strip_prefix(['R', 'r']) {
                Some(rest) => self.repeat(rest, last),
                None => self.set(arg, last),
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
    fan: FanOut,
    /// By tag: the original offset of the request.
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

    /// Does nothing: child requests have the request's age, so the queue cancels them itself.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, R>) {}
}

#[cfg(test)]
mod tests {
    use super::super::harness::Harness;
    use super::super::testing::{build, error, names};
    use super::super::{MessageError, Status};
    use block::Op;

    #[test]
    fn table_status_repeats_the_line() {
        let target = build("switch", "3 128 0 a 0 b 8 c 16");
        let names = names(&["8:0", "8:16", "8:32"]);
        assert_eq!(target.status(Status::Table, &names), "3 128 0 8:0 0 8:16 8 8:32 16");
        assert_eq!(target.status(Status::Info, &names), "");
    }

    #[test]
    fn bad_arguments_are_refused_with_the_kernels_text() {
        for (args, text) in [
            ("0 128 0", "Invalid number of paths"),
            ("1 0 0 a 0", "Invalid region size"),
            ("1 128 1 x a 0", "Invalid number of optional args"),
            ("2 128 0 a 0", "Incorrect number of path arguments"),
            ("1 128 0 missing 0", "Device lookup failed: missing: no such device"),
            ("1 128 0 a x", "Invalid device starting offset"),
        ] {
            assert_eq!(error("switch", args), text, "{args}");
        }
    }

    fn map(harness: &mut Harness) -> String {
        (0..16).map(|region| harness.run(Op::Read, region * 64, 1).1[0].0.to_string()).collect()
    }

    #[test]
    fn messages_change_the_mapping_of_regions() {
        let mut harness = Harness::new("switch", "3 64 0 a 0 b 8 c 16");
        assert_eq!(map(&mut harness), "0120120120120120");
        assert_eq!(harness.run(Op::Write, 65, 1).1, [(1, Op::Write, 73, 1)]);
        let target = harness.target.clone();
        let send = |args: &str| {
            let args: Vec<&str> = args.split(' ').collect();
            target.message(&args, &names(&[]))
        };
        for (args, expected) in [
            ("set_region_mappings 0:2 :2 :1", "2210120120120120"),
            ("SET_REGION_MAPPINGS a:1 :1", "2210120120110120"),
            ("set_region_mappings 0:0 :1 R2,a", "0101010101010120"),
            ("set_region_mappings F:2", "0101010101010122"),
        ] {
            assert_eq!(send(args), Ok(None));
            assert_eq!(map(&mut harness), expected, "{args}");
        }
        for args in [
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
            assert_eq!(send(args), Err(MessageError::Invalid), "{args}");
        }
        assert_eq!(send("set_region_mappings 5:2 99:1"), Err(MessageError::Invalid));
        assert_eq!(map(&mut harness).as_bytes()[5], b'2', "earlier mappings stay");
    }

    #[test]
    fn requests_are_split_at_regions_and_a_flush_goes_to_all_devices() {
        let mut harness = Harness::new("switch", "2 64 0 a 0 b 0");
        assert_eq!(harness.run(Op::Write, 60, 8).1, [(0, Op::Write, 60, 4), (1, Op::Write, 64, 4)]);
        assert_eq!(harness.run(Op::Flush, 0, 0).1.len(), 2);
    }
}
