//! The target `delay <device> <offset> <ms> [<write device> <offset> <ms> [<flush device> <offset> <ms>]]`:
//! delays requests.
//!
//! One set of arguments applies to all requests; with two sets, the second applies to writes and flushes;
//! with three, the third applies to flushes. No thread is used: each held request has a timer in its queue's
//! ring. Suspending the device releases all held requests within [`RECHECK_NS`].

use super::{
    Area, Devices, Names, RandomLine, Simulated, Status, Target, TargetError, TargetRange, TargetRow,
    parse_u32, parse_u64, stack,
};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Nanos, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// The longest timer of a held request, in nanoseconds. When it expires, the node checks whether the device
/// is being suspended.
const RECHECK_NS: u64 = 50_000_000;

pub(super) const ROW: TargetRow = TargetRow {
    name: "delay",
    version: [1, 5, 0],
    usage: "delay <device> <offset> <ms> [<device> <offset> <ms> [<device> <offset> <ms>]]",
    about: "delays requests by some milliseconds",
    example: "0 2097152 delay disk.img 0 5",
    singleton: false,
    immutable: false,
    simulated: Simulated::InStacks { random, fails: false },
};

fn random(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine {
    let held: Vec<u64> = (0..1 + 2 * below(2)).map(|_| below(2)).collect();
    let offset = below(33);
    let args: Vec<String> = held.iter().map(|ms| format!("a {offset} {ms}")).collect();
    let devices = held.iter().map(|_| Sectors(offset + len.0)).collect();
    RandomLine { len, args: args.join(" "), devices }
}

/// The device and the delay of one class of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Class {
    device: usize,
    start: Sectors,
    nanos: u64,
}

/// Nanoseconds of a millisecond, the unit of tables.
const MS: u64 = 1_000_000;

/// The shared part of the target or layer.
pub struct Delay {
    /// The length; 0: the length of the device below.
    len: Sectors,
    /// The classes of reads, writes and flushes; a class that is not given equals the one before it.
    classes: [Class; 3],
    /// Number of classes that the table line gives.
    given: usize,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// The number of held requests, by class.
    held: [AtomicU32; 3],
    /// Whether the device is being suspended: then no request is held.
    draining: AtomicBool,
}

fn class(args: &[&str], devices: &mut dyn Devices) -> Result<Class, TargetError> {
    let start = parse_u64(args[1]).ok_or(TargetError::new("Invalid device sector"))?;
    let ms = parse_u32(args[2]).ok_or(TargetError::new("Invalid delay"))?;
    let device = devices.open(args[0]).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
    Ok(Class { device, start: Sectors(start), nanos: u64::from(ms) * MS })
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    if !matches!(args.len(), 3 | 6 | 9) {
        return Err(TargetError::new("Requires exactly 3, 6 or 9 arguments"));
    }
    let mut classes = Vec::new();
    for args in args.chunks(3) {
        classes.push(class(args, devices)?);
    }
    let given = classes.len();
    let last = classes[given - 1];
    classes.resize(3, last);
    let classes = [classes[0], classes[1], classes[2]];
    Ok(Arc::new(Delay { len: place.len, classes, given, state: Arc::default() }))
}

impl Delay {
    /// Creates a layer over one device, of the device's length. The arguments are the delays of reads, writes
    /// and flushes, in nanoseconds.
    pub fn of([read, write, flush]: [u64; 3]) -> Delay {
        let len = Sectors(0);
        let class = |nanos| Class { device: 0, start: Sectors(0), nanos };
        Delay { len, classes: [class(read), class(write), class(flush)], given: 3, state: Arc::default() }
    }

    fn area(&self) -> Vec<Area> {
        let given = &self.classes[..self.given];
        given.iter().map(|class| Area { device: class.device, start: class.start, len: self.len }).collect()
    }
}

impl<R: Ring> Layer<R> for Delay {
    fn name(&self) -> &'static str {
        "delay"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let len = super::len_or_device(self.len, below);
        let mut whole = stack(len, &self.area(), below)?;
        whole.inline = false;
        Ok(whole)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    /// Returns 0 for a layer, so that traces treat it and its child as one device. A target is a device of
    /// its own, as in the kernel.
    fn child_start(&self, _: usize) -> Option<Bytes> {
        (self.len.0 == 0).then_some(Bytes::ZERO)
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(DelayNode {
            classes: self.classes.map(|class| (below[class.device], class.start.bytes(), class.nanos)),
            state: self.state.clone(),
            sent: Box::default(),
        })
    }
}

impl<R: Ring> Target<R> for Delay {
    fn areas(&self) -> Vec<Area> {
        self.area()
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match what {
            Status::Info => {
                let [reads, writes, flushes] = &self.state.held;
                format!("{} {} {}", reads.load(Relaxed), writes.load(Relaxed), flushes.load(Relaxed))
            }
            Status::Table => {
                let given = &self.classes[..self.given];
                let args = |class: &Class| {
                    format!("{} {} {}", names.shown(class.device), class.start.0, class.nanos / MS)
                };
                given.iter().map(args).collect::<Vec<_>>().join(" ")
            }
        }
    }

    fn presuspend(&self, _: bool) {
        self.state.draining.store(true, Relaxed);
    }

    fn resume(&self) {
        self.state.draining.store(false, Relaxed);
    }
}

struct DelayNode {
    classes: [(NodeId, Bytes, u64); 3],
    state: Arc<State>,
    /// By tag: the original offset of the request, and the time until which it is held.
    sent: Box<[(Bytes, Nanos)]>,
}

const fn class_of(op: Op) -> usize {
    match op {
        Op::Flush => 2,
        op if op.is_write() => 1,
        _ => 0,
    }
}

impl DelayNode {
    /// Sends the request to its device.
    fn forward(&self, req: &mut Request) -> Verdict {
        let (child, start, _) = self.classes[class_of(req.op)];
        if req.op != Op::Flush {
            req.offset = req.offset + start;
        }
        Verdict::Down(child)
    }

    /// Holds the request until its delay is over, but at most for [`RECHECK_NS`].
    fn wait<R: Ring>(&self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let (_, until) = self.sent[io.tag.index()];
        cx.timer(io, until.min(cx.now().after(RECHECK_NS)));
        Verdict::Held
    }
}

impl<R: Ring> Node<R> for DelayNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.sent = vec![(Bytes::ZERO, Nanos(0)); tags].into();
    }

    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let class = class_of(req.op);
        let nanos = self.classes[class].2;
        self.sent[io.tag.index()] = (req.offset, cx.now().after(nanos));
        if nanos == 0 || self.state.draining.load(Relaxed) {
            return self.forward(req);
        }
        self.state.held[class].fetch_add(1, Relaxed);
        self.wait(io, cx)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let until = self.sent[io.tag.index()].1;
        if result == 0 && cx.now() < until && !self.state.draining.load(Relaxed) {
            return self.wait(io, cx);
        }
        self.state.held[class_of(req.op)].fetch_sub(1, Relaxed);
        if result < 0 { Verdict::Up(block::Status::from_result(result, 0)) } else { self.forward(req) }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        req.offset = self.sent[io.tag.index()].0;
        Verdict::Up(status)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::harness::Harness;
    use super::super::testing::{build, error, names};
    use block::{Op, Request};

    #[test]
    fn table_status_repeats_one_two_and_three_sets() {
        let names = names(&["8:0", "8:16", "8:32"]);
        for args in ["8:0 0 5", "8:0 0 5 8:16 8 6", "8:0 0 5 8:16 8 6 8:32 16 7"] {
            let target = build("delay", args);
            assert_eq!(target.status(Status::Table, &names), args);
            assert_eq!(target.status(Status::Info, &names), "0 0 0");
        }
    }

    #[test]
    fn bad_arguments_are_refused_with_the_kernels_text() {
        for (args, text) in [
            ("a 0", "Requires exactly 3, 6 or 9 arguments"),
            ("a x 5", "Invalid device sector"),
            ("a 0 x", "Invalid delay"),
            ("missing 0 5", "Device lookup failed: missing: no such device"),
            ("a 0 5 b 0 y", "Invalid delay"),
        ] {
            assert_eq!(error("delay", args), text, "{args}");
        }
    }

    #[test]
    fn each_class_has_its_own_delay_and_device() {
        let mut harness = Harness::new("delay", "a 0 500 b 8 20 c 16 3");
        for (op, device, at, ms) in
            [(Op::Read, 0, 0, 500), (Op::Write, 1, 8, 20), (Op::Discard, 1, 8, 20), (Op::Flush, 2, 0, 3)]
        {
            let before = harness.ring.now;
            let sectors = u64::from(op != Op::Flush);
            assert_eq!(harness.run(op, 0, sectors).1, [(device, op, at, sectors)]);
            assert_eq!(harness.ring.now.since(before), ms * 1_000_000);
        }
    }

    #[test]
    fn suspending_releases_all_held_requests() {
        let mut harness = Harness::new("delay", "a 0 3600000");
        harness.submit(Request::new(Op::Read, block::Bytes(0), block::Bytes(512)));
        harness.submit(Request::flush());
        let shown = names(&["a"]);
        assert_eq!(harness.target.status(Status::Info, &shown), "1 0 1");
        let before = harness.ring.now;
        harness.target.presuspend(false);
        assert_eq!(harness.drain().len(), 2);
        assert!(harness.ring.now.since(before) <= super::RECHECK_NS);
        assert_eq!(harness.target.status(Status::Info, &shown), "0 0 0");
        harness.target.resume();
        harness.submit(Request::flush());
        assert_eq!(harness.target.status(Status::Info, &shown), "0 0 1");
    }
}
