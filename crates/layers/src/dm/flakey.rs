//! The target `flakey <device> <offset> <up> <down> [<#feature args> <feature>…]`: works for `up` seconds,
//! then fails for `down` seconds, periodically.
//!
//! While down it fails all requests, or behaves as its [`Features`] specify. The period starts with the first
//! request. The data of a write is copied before it is corrupted, because its buffer belongs to the client.

use super::{
    Area, Args, Devices, Names, RandomLine, Simulated, Status, Target, TargetError, TargetRange, TargetRow,
    parse_u64, stack,
};
use crate::Layer;
use block::{Bytes, Cookie, Data, Flags, LimitsError, Op, Profile, Request, Sectors, Segment};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The unit of the probability of a random corruption: the kernel's `PROBABILITY_BASE`.
const PROBABILITY_BASE: u32 = 1_000_000_000;

pub(super) const ROW: TargetRow = TargetRow {
    name: "flakey",
    version: [1, 5, 0],
    usage: "flakey <device> <offset> <up> <down> [<#feature args> <feature>…]",
    about: "works for some seconds, then fails for some",
    example: "0 2097152 flakey disk.img 0 10 2 1 drop_writes",
    singleton: false,
    immutable: false,
    simulated: Simulated::InStacks { random, fails: true },
};

fn random(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine {
    RandomLine::over_one(len, "", 0, len, &format!("{} {}", below(10), 1 + below(10)))
}

/// The feature `corrupt_bio_byte`: replaces one byte of each request of a direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CorruptByte {
    /// The byte's position in the request, from 1 on.
    pub nth: u32,
    /// Whether writes are corrupted; otherwise reads.
    pub writes: bool,
    /// The new value of the byte.
    pub value: u8,
    /// A mask of the kernel's request flags (`REQ_*`); only requests with all of them are corrupted.
    pub flags: u32,
}

/// The behaviour while the target is down.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Features {
    /// Reads fail.
    pub error_reads: bool,
    /// Writes are dropped, and succeed.
    pub drop_writes: bool,
    /// Writes fail.
    pub error_writes: bool,
    /// One byte at a fixed position is replaced.
    pub corrupt: Option<CorruptByte>,
    /// In how many of a billion reads a random byte is replaced.
    pub random_read_corrupt: u32,
    /// In how many of a billion writes a random byte is replaced.
    pub random_write_corrupt: u32,
}

/// The shared part of the target or layer.
pub struct Flakey {
    len: Sectors,
    start: Sectors,
    up: u32,
    down: u32,
    features: Features,
    /// The time of the first request in nanoseconds; 0: no request has arrived yet.
    began_ns: Arc<AtomicU64>,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    if args.len() < 4 {
        return Err(TargetError::new("Invalid argument count"));
    }
    let start = parse_u64(args[1]).ok_or(TargetError::new("Invalid device sector"))?;
    let mut rest = Args::new(&args[2..]);
    let up = rest.number(0, u32::MAX, "Invalid up interval")?;
    let down = rest.number(0, u32::MAX, "Invalid down interval")?;
    match up.checked_add(down) {
        None => return Err(TargetError::new("Interval overflow")),
        Some(0) => return Err(TargetError::new("Total (up + down) interval is zero")),
        Some(_) => {}
    }
    let features = Features::read(rest)?;
    devices.open(args[0]).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
    Ok(Arc::new(Flakey::new(place.len, Sectors(start), [up, down], features)))
}

impl Features {
    /// Parses `<#feature args> <feature>…`. Without features all requests fail.
    ///
    /// # Errors
    /// The kernel's error text.
    pub fn read(mut args: Args<'_>) -> Result<Features, TargetError> {
        let mut features = Features::default();
        let count = if args.is_empty() { 0 } else { args.count(11, "Invalid number of feature args")? };
        let mut features_left = args.take(count);
        while let Some(word) = features_left.take_next() {
            features.feature(&word.to_ascii_lowercase(), &mut features_left)?;
        }
        features.check()?;
        if features == Features::default() {
            (features.error_reads, features.error_writes) = (true, true);
        }
        Ok(features)
    }

    fn feature(&mut self, word: &str, args: &mut Args<'_>) -> Result<(), TargetError> {
        let refuse = |text| Err(TargetError::new(text));
        match word {
            "error_reads" if std::mem::replace(&mut self.error_reads, true) => {
                refuse("Feature error_reads duplicated")
            }
            "drop_writes" if std::mem::replace(&mut self.drop_writes, true) => {
                refuse("Feature drop_writes duplicated")
            }
            "drop_writes" if self.error_writes => {
                refuse("Feature drop_writes conflicts with feature error_writes")
            }
            "error_writes" if std::mem::replace(&mut self.error_writes, true) => {
                refuse("Feature error_writes duplicated")
            }
            "error_writes" if self.drop_writes => {
                refuse("Feature error_writes conflicts with feature drop_writes")
            }
            "error_reads" | "drop_writes" | "error_writes" => Ok(()),
            "corrupt_bio_byte" if self.corrupt.is_some() => refuse("Feature corrupt_bio_byte duplicated"),
            "corrupt_bio_byte" if args.len() < 4 => refuse("Feature corrupt_bio_byte requires 4 parameters"),
            "corrupt_bio_byte" => {
                self.corrupt = Some(CorruptByte::read(args)?);
                Ok(())
            }
            "random_read_corrupt" => chance(&mut self.random_read_corrupt, args, READ_CORRUPT),
            "random_write_corrupt" => chance(&mut self.random_write_corrupt, args, WRITE_CORRUPT),
            _ => refuse("Unrecognised flakey feature requested"),
        }
    }

    fn check(&self) -> Result<(), TargetError> {
        let fixed = |writes| self.corrupt.is_some_and(|corrupt| corrupt.writes == writes);
        let (writes, reads) =
            (fixed(true) || self.random_write_corrupt > 0, fixed(false) || self.random_read_corrupt > 0);
        let text = match self {
            Features { drop_writes: true, .. } if writes => {
                "drop_writes is incompatible with random_write_corrupt or corrupt_bio_byte with the WRITE flag set"
            }
            Features { error_writes: true, .. } if writes => {
                "error_writes is incompatible with random_write_corrupt or corrupt_bio_byte with the WRITE flag set"
            }
            Features { error_reads: true, .. } if reads => {
                "error_reads is incompatible with random_read_corrupt or corrupt_bio_byte with the READ flag set"
            }
            _ => return Ok(()),
        };
        Err(TargetError::new(text))
    }

    fn corrupts(&self) -> bool {
        self.corrupt.is_some() || self.random_read_corrupt > 0 || self.random_write_corrupt > 0
    }

    fn arguments(&self) -> String {
        let mut args = Vec::new();
        for (is, word) in [
            (self.error_reads, "error_reads"),
            (self.drop_writes, "drop_writes"),
            (self.error_writes, "error_writes"),
        ] {
            if is {
                args.push(word.to_owned());
            }
        }
        if let Some(CorruptByte { nth, writes, value, flags }) = self.corrupt {
            let rest = [nth.to_string(), if writes { "w" } else { "r" }.into(), value.to_string()];
            args.push("corrupt_bio_byte".into());
            args.extend(rest);
            args.push(flags.to_string());
        }
        for (chance, word) in [
            (self.random_read_corrupt, "random_read_corrupt"),
            (self.random_write_corrupt, "random_write_corrupt"),
        ] {
            if chance > 0 {
                args.extend([word.to_owned(), chance.to_string()]);
            }
        }
        let count = args.len().to_string();
        std::iter::once(count).chain(args).collect::<Vec<_>>().join(" ")
    }
}

const READ_CORRUPT: [&str; 2] =
    ["Feature random_read_corrupt duplicated", "Feature random_read_corrupt requires a parameter"];
const WRITE_CORRUPT: [&str; 2] =
    ["Feature random_write_corrupt duplicated", "Feature random_write_corrupt requires a parameter"];

fn chance(
    into: &mut u32,
    args: &mut Args<'_>,
    [duplicate, missing]: [&'static str; 2],
) -> Result<(), TargetError> {
    if *into > 0 {
        return Err(TargetError::new(duplicate));
    }
    if args.is_empty() {
        return Err(TargetError::new(missing));
    }
    *into = args.number(0, PROBABILITY_BASE, "Invalid random corrupt argument")?;
    Ok(())
}

impl CorruptByte {
    fn read(args: &mut Args<'_>) -> Result<CorruptByte, TargetError> {
        let nth = args.number(1, u32::MAX, "Invalid corrupt bio byte")?;
        let writes = match args.take_next() {
            Some("w" | "W") => true,
            Some("r" | "R") => false,
            _ => return Err(TargetError::new("Invalid corrupt bio direction (r or w)")),
        };
        let value = args.number(0, 255, "Invalid corrupt value to write into bio byte (0-255)")? as u8;
        let flags = args.number(0, u32::MAX, "Invalid corrupt bio flags mask")?;
        Ok(CorruptByte { nth, writes, value, flags })
    }
}

impl Flakey {
    /// Creates the target. `up` and `down` are seconds; a `len` of 0 stands for the length of the device
    /// below.
    pub fn new(len: Sectors, start: Sectors, [up, down]: [u32; 2], features: Features) -> Flakey {
        Flakey { len, start, up, down, features, began_ns: Arc::default() }
    }

    fn area(&self) -> Area {
        Area { device: 0, start: self.start, len: self.len }
    }
}

impl<R: Ring> Layer<R> for Flakey {
    fn name(&self) -> &'static str {
        "flakey"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(super::len_or_device(self.len, below), &[self.area()], below)?;
        whole.zero_copy_reads &= !self.features.corrupts();
        Ok(whole)
    }

    fn accesses_data(&self) -> bool {
        self.features.corrupts()
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        let (up, down) = (u64::from(self.up), u64::from(self.down));
        Box::new(FlakeyNode {
            child: below[0],
            start: self.start.bytes(),
            up,
            cycle: up + down,
            features: self.features,
            began_ns: self.began_ns.clone(),
            random: fastrand::Rng::with_seed(self.up.into()),
            saved: Box::default(),
        })
    }
}

impl<R: Ring> Target<R> for Flakey {
    fn areas(&self) -> Vec<Area> {
        vec![self.area()]
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match what {
            Status::Info => String::new(),
            Status::Table => format!(
                "{} {} {} {} {}",
                names.shown(0),
                self.start.0,
                self.up,
                self.down,
                self.features.arguments()
            ),
        }
    }
}

/// The original fields of a request, and the state that its completion needs.
#[derive(Clone, Copy)]
struct Saved {
    offset: Bytes,
    data: Data,
    flags: Flags,
    /// The buffer of a corrupted write; empty: the request uses its own memory.
    copy: Segment,
    /// Whether the request is a read that was sent while the target was down.
    down: bool,
}

struct FlakeyNode {
    child: NodeId,
    start: Bytes,
    up: u64,
    cycle: u64,
    features: Features,
    began_ns: Arc<AtomicU64>,
    /// Seeded, so that a replayed simulation corrupts the same bytes.
    random: fastrand::Rng,
    /// The saved fields of each request, by tag.
    saved: Box<[Saved]>,
}

/// Returns the operation and flags of a request as the kernel's `bi_opf` encodes them
/// (include/linux/blk_types.h).
fn opf(req: &Request) -> u32 {
    let op = match req.op {
        Op::Write => 1,
        Op::Discard => 3,
        Op::WriteZeroes => 9,
        // A flush is an empty write with REQ_PREFLUSH.
        Op::Flush => 1 | 1 << 18,
        _ => 0,
    };
    let flag = |flag, bit: u32| if req.flags.contains(flag) { 1 << bit } else { 0 };
    op | flag(Flags::FUA, 17) | flag(Flags::NOWAIT, 21)
}

impl FlakeyNode {
    fn is_down(&self, now_ns: u64) -> bool {
        let mut began = self.began_ns.load(Relaxed);
        if began == 0 {
            let first = self.began_ns.compare_exchange(0, now_ns.max(1), Relaxed, Relaxed);
            began = first.err().unwrap_or(now_ns);
        }
        now_ns.saturating_sub(began) / 1_000_000_000 % self.cycle >= self.up
    }

    /// Returns the bytes to replace: the offset in the request and the new value of each.
    fn corruptions(&mut self, req: &Request) -> [Option<(u64, u8)>; 2] {
        let writes = req.op == Op::Write;
        let fits = |corrupt: &CorruptByte| {
            corrupt.writes == writes
                && opf(req) & corrupt.flags == corrupt.flags
                && u64::from(corrupt.nth) <= req.len.0
        };
        let fixed = self.features.corrupt.filter(fits).map(|c| (u64::from(c.nth) - 1, c.value));
        let chance =
            if writes { self.features.random_write_corrupt } else { self.features.random_read_corrupt };
        let random = (chance > 0 && self.random.u32(..PROBABILITY_BASE) < chance)
            .then(|| (self.random.u64(..req.len.0), self.random.u8(..)));
        [fixed, random]
    }

    /// Points a write at a copy of its data with these bytes replaced. Returns `false` if there is no memory
    /// for the copy.
    fn corrupt_write<R: Ring>(
        &mut self,
        io: Cookie,
        req: &mut Request,
        bytes: [Option<(u64, u8)>; 2],
        cx: &mut Cx<'_, R>,
    ) -> bool {
        let Some(copy) = u32::try_from(req.len.0).ok().and_then(|len| cx.ring.allocate(len)) else {
            return false;
        };
        let (mut at, mut rest) = (0, req.data);
        while at < req.len.0 {
            let Some(piece) = cx.segments(rest, req.len.0 - at).next() else { break };
            let from = cx.ring.bytes(piece).to_vec();
            let len = from.len() as u32;
            cx.ring.bytes_mut(copy.slice(at as u32, len)).copy_from_slice(&from);
            at += u64::from(len);
            rest = cx.advance(req.data, at);
        }
        for (at, value) in bytes.into_iter().flatten() {
            cx.ring.bytes_mut(copy)[at as usize] = value;
        }
        self.saved[io.tag.index()].copy = copy;
        req.data = Data::One(copy);
        true
    }

    fn forward(&self, req: &mut Request) -> Verdict {
        if req.op != Op::Flush {
            req.offset = req.offset + self.start;
        }
        Verdict::Down(self.child)
    }
}

impl<R: Ring> Node<R> for FlakeyNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        let none = Saved {
            offset: Bytes::ZERO,
            data: Data::NONE,
            flags: Flags::empty(),
            copy: Segment::EMPTY,
            down: false,
        };
        self.saved = vec![none; tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let down = !req.op.is_special() && self.is_down(cx.now().0);
        let writes = req.op.is_write() || req.op == Op::Flush;
        self.saved[io.tag.index()] = Saved {
            offset: req.offset,
            data: req.data,
            flags: req.flags,
            copy: Segment::EMPTY,
            down: down && req.op == Op::Read,
        };
        if !down {
            return self.forward(req);
        }
        match writes {
            false if self.features.error_reads => return Verdict::Up(block::Status::IoError),
            true if self.features.drop_writes => return Verdict::Up(block::Status::Ok),
            true if self.features.error_writes => return Verdict::Up(block::Status::IoError),
            _ => {}
        }
        if req.op == Op::Write {
            let bytes = self.corruptions(req);
            if bytes != [None; 2] && !self.corrupt_write(io, req, bytes, cx) {
                return Verdict::Blocked;
            }
        } else if req.op == Op::Read && self.features.corrupts() {
            // The target writes to the data, which a zero-copy reply does not allow.
            req.flags = req.flags.difference(Flags::ZERO_COPY);
        }
        self.forward(req)
    }

    fn end_io(
        &mut self,
        io: Cookie,
        req: &mut Request,
        status: block::Status,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let Saved { offset, data, flags, copy, down } = self.saved[io.tag.index()];
        (req.offset, req.flags) = (offset, flags);
        if copy.len > 0 {
            cx.ring.free(copy);
            req.data = data;
        }
        if down && status.is_ok() && self.features.corrupts() {
            for (at, value) in self.corruptions(req).into_iter().flatten() {
                let rest = cx.advance(req.data, at);
                let piece = cx.segments(rest, 1).next();
                if let Some(piece) = piece {
                    cx.ring.bytes_mut(piece)[0] = value;
                }
            }
        }
        Verdict::Up(status)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::harness::Harness;
    use super::super::testing::{build, error, names};
    use block::{Flags, Op, Status as End};

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn table_status_shows_the_features() {
        let names = names(&["8:0"]);
        for (args, table) in [
            ("8:0 0 5 2", "8:0 0 5 2 2 error_reads error_writes"),
            ("8:0 0 5 2 0", "8:0 0 5 2 2 error_reads error_writes"),
            ("8:0 0 5 2 1 drop_writes", "8:0 0 5 2 1 drop_writes"),
            ("8:0 0 5 2 2 ERROR_writes error_reads", "8:0 0 5 2 2 error_reads error_writes"),
            ("8:0 8 5 2 5 corrupt_bio_byte 32 r 1 0", "8:0 8 5 2 5 corrupt_bio_byte 32 r 1 0"),
            (
                "8:0 0 0 2 9 random_read_corrupt 7 corrupt_bio_byte 224 w 0 32 random_write_corrupt 8",
                "8:0 0 0 2 9 corrupt_bio_byte 224 w 0 32 random_read_corrupt 7 random_write_corrupt 8",
            ),
        ] {
            let target = build("flakey", args);
            assert_eq!(target.status(Status::Table, &names), table);
            assert_eq!(target.status(Status::Info, &names), "");
        }
    }

    #[test]
    fn bad_arguments_are_refused_with_the_kernels_text() {
        let write = "random_write_corrupt or corrupt_bio_byte with the WRITE flag set";
        for (args, text) in [
            ("a 0 5", "Invalid argument count"),
            ("a x 5 2", "Invalid device sector"),
            ("a 0 x 2", "Invalid up interval"),
            ("a 0 5 x", "Invalid down interval"),
            ("a 0 0 0", "Total (up + down) interval is zero"),
            ("a 0 4294967295 1", "Interval overflow"),
            ("a 0 5 2 12", "Invalid number of feature args"),
            ("a 0 5 2 2 drop_writes", "Invalid number of feature args"),
            ("a 0 5 2 2 drop_writes drop_writes", "Feature drop_writes duplicated"),
            ("a 0 5 2 2 error_reads error_reads", "Feature error_reads duplicated"),
            ("a 0 5 2 2 drop_writes error_writes", "Feature error_writes conflicts with feature drop_writes"),
            ("a 0 5 2 2 error_writes drop_writes", "Feature drop_writes conflicts with feature error_writes"),
            ("a 0 5 2 4 corrupt_bio_byte 1 r 1", "Feature corrupt_bio_byte requires 4 parameters"),
            ("a 0 5 2 5 corrupt_bio_byte 0 r 1 0", "Invalid corrupt bio byte"),
            ("a 0 5 2 5 corrupt_bio_byte 1 x 1 0", "Invalid corrupt bio direction (r or w)"),
            ("a 0 5 2 5 corrupt_bio_byte 1 r 256 0", "Invalid corrupt value to write into bio byte (0-255)"),
            ("a 0 5 2 1 random_read_corrupt", "Feature random_read_corrupt requires a parameter"),
            ("a 0 5 2 2 random_read_corrupt 1000000001", "Invalid random corrupt argument"),
            ("a 0 5 2 1 sleep", "Unrecognised flakey feature requested"),
            (
                "a 0 5 2 3 drop_writes random_write_corrupt 1",
                &format!("drop_writes is incompatible with {write}"),
            ),
            (
                "a 0 5 2 6 error_writes corrupt_bio_byte 1 w 1 0",
                &format!("error_writes is incompatible with {write}"),
            ),
            (
                "a 0 5 2 3 error_reads random_read_corrupt 1",
                "error_reads is incompatible with random_read_corrupt or corrupt_bio_byte with the READ flag set",
            ),
            ("missing 0 5 2", "Device lookup failed: missing: no such device"),
        ] {
            assert_eq!(error("flakey", args), text, "{args}");
        }
    }

    #[test]
    fn requests_fail_only_while_it_is_down() {
        let mut harness = Harness::new("flakey", "a 8 2 1");
        assert_eq!(harness.write(0, &[7; 512]), End::Ok);
        assert_eq!(harness.content(0, 8, 1), [7]);
        harness.ring.now.0 += 2 * SECOND;
        assert_eq!(harness.write(0, &[8; 512]), End::IoError);
        assert_eq!(harness.read(0, 512).0, End::IoError);
        assert_eq!(harness.run(Op::Flush, 0, 0).0, End::IoError);
        harness.ring.now.0 += SECOND;
        assert_eq!(harness.read(0, 512), (End::Ok, vec![7; 512]));
    }

    #[test]
    fn writes_are_dropped_or_fail_while_reads_succeed() {
        for (feature, end) in [("drop_writes", End::Ok), ("error_writes", End::IoError)] {
            let mut harness = Harness::new("flakey", &format!("a 0 0 1 1 {feature}"));
            assert_eq!(harness.write(0, &[7; 512]), end);
            assert_eq!(harness.run(Op::Discard, 0, 1).0, end);
            assert_eq!(harness.read(0, 512), (End::Ok, vec![0; 512]));
        }
    }

    #[test]
    fn the_given_byte_is_corrupted() {
        let mut harness = Harness::new("flakey", "a 0 0 1 5 corrupt_bio_byte 3 w 9 0");
        assert_eq!(harness.write(0, &[7; 1024]), End::Ok);
        assert_eq!(harness.content(0, 0, 4), [7, 7, 9, 7]);
        assert_eq!(harness.read(0, 4 * 512).1[2], 9, "reads are not corrupted");
        assert_eq!(harness.ring.memory.live, 0);
        let mut harness = Harness::new("flakey", "a 0 0 1 5 corrupt_bio_byte 600 r 9 0");
        assert_eq!(harness.write(0, &[7; 1024]), End::Ok);
        assert_eq!(harness.content(0, 0, 1024), [7; 1024]);
        let read = harness.read(0, 1024).1;
        assert_eq!((read[598], read[599], read[600]), (7, 9, 7));
        assert_eq!(harness.read(0, 512).1, [7; 512], "the read is shorter than the byte's position");
    }

    #[test]
    fn only_requests_with_the_given_flags_are_corrupted() {
        let mut harness = Harness::new("flakey", "a 0 0 1 5 corrupt_bio_byte 1 w 9 131072");
        assert_eq!(harness.write(0, &[7; 512]), End::Ok);
        assert_eq!(harness.content(0, 0, 1), [7]);
        assert_eq!(harness.write_with(0, &[7; 512], Flags::FUA), End::Ok);
        assert_eq!(harness.content(0, 0, 1), [9]);
    }

    #[test]
    fn random_bytes_are_corrupted_at_the_given_probability() {
        let mut harness =
            Harness::new("flakey", "a 0 0 1 4 random_read_corrupt 500000000 random_write_corrupt 0");
        let wrong = (0..400).filter(|_| harness.read(0, 4096).1 != [0; 4096]).count();
        assert!((120..280).contains(&wrong), "{wrong}");
        let mut harness = Harness::new("flakey", "a 0 0 1 2 random_write_corrupt 1000000000");
        (0..100).for_each(|sector| assert_eq!(harness.write(sector, &[7; 512]), End::Ok));
        let wrong = (0..100).filter(|&sector| harness.content(0, sector, 512) != [7; 512]).count();
        assert!(wrong > 90, "{wrong}");
    }
}
