//! `delay <device> <offset> <ms> [<write device> <offset> <ms> [<flush device> <offset> <ms>]]`: holds requests for a while.
//!
//! One set of words is for all requests; with two, the second is for writes and flushes; with three, the third is for
//! flushes. There is no thread: a request that is held is a timer of its queue's ring. Whoever suspends the device lets
//! all of them go at once, which a timer notices within [`LOOK_NS`].

use super::{Area, Devices, Kind, Names, Place, Status, Target, TargetError, long_number, number, stack};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Nanos, Node, NodeId, Ring, Verdict};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// How long a request sleeps at most before it looks whether it may go.
const LOOK_NS: u64 = 50_000_000;

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("delay", [1, 5, 0], make)
}

/// What happens to requests of one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Class {
    device: usize,
    start: Sectors,
    nanos: u64,
}

/// Of a millisecond, in which tables count.
const MS: u64 = 1_000_000;

/// The shared part.
pub struct Delay {
    /// 0: as long as what stands below.
    len: Sectors,
    /// Reads, writes, flushes; those that are not said are the ones before.
    classes: [Class; 3],
    /// How many were said.
    said: usize,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Requests that are held, by class.
    held: [AtomicU32; 3],
    /// Nothing is held any more: the device is being suspended.
    hasty: AtomicBool,
}

fn class(words: &[&str], devices: &mut dyn Devices) -> Result<Class, TargetError> {
    let start = long_number(words[1]).ok_or(TargetError::new("Invalid device sector"))?;
    let ms = number(words[2]).ok_or(TargetError::new("Invalid delay"))?;
    let device = devices.open(words[0]).map_err(|why| TargetError::lookup("Device lookup failed", why))?;
    Ok(Class { device, start: Sectors(start), nanos: u64::from(ms) * MS })
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    if !matches!(words.len(), 3 | 6 | 9) {
        return Err(TargetError::new("Requires exactly 3, 6 or 9 arguments"));
    }
    let mut classes = Vec::new();
    for words in words.chunks(3) {
        classes.push(class(words, devices)?);
    }
    let said = classes.len();
    let last = classes[said - 1];
    classes.resize(3, last);
    let classes = [classes[0], classes[1], classes[2]];
    Ok(Arc::new(Delay { len: place.len, classes, said, state: Arc::default() }))
}

impl Delay {
    /// Over one child, as long as that is: how many nanoseconds reads, writes and flushes are held.
    pub fn of([read, write, flush]: [u64; 3]) -> Delay {
        let len = Sectors(0);
        let class = |nanos| Class { device: 0, start: Sectors(0), nanos };
        Delay { len, classes: [class(read), class(write), class(flush)], said: 3, state: Arc::default() }
    }

    fn area(&self) -> Vec<Area> {
        let said = &self.classes[..self.said];
        said.iter().map(|class| Area { device: class.device, start: class.start, len: self.len }).collect()
    }
}

impl<R: Ring> Layer<R> for Delay {
    fn name(&self) -> &'static str {
        "delay"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let len = super::len_over(self.len, below);
        let mut whole = stack(len, &self.area(), below)?;
        whole.in_place = false;
        Ok(whole)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    /// As a layer. A target is a device of its own over others, as device-mapper's is.
    fn begins(&self, _: usize) -> Option<Bytes> {
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
                let said = &self.classes[..self.said];
                let words = |class: &Class| {
                    format!("{} {} {}", names.shown(class.device), class.start.0, class.nanos / MS)
                };
                said.iter().map(words).collect::<Vec<_>>().join(" ")
            }
        }
    }

    fn presuspend(&self, _: bool) {
        self.state.hasty.store(true, Relaxed);
    }

    fn resume(&self) {
        self.state.hasty.store(false, Relaxed);
    }
}

struct DelayNode {
    classes: [(NodeId, Bytes, u64); 3],
    state: Arc<State>,
    /// By tag: where a request began before, and until when it is held.
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
    /// It goes on.
    fn go(&self, req: &mut Request) -> Verdict {
        let (child, start, _) = self.classes[class_of(req.op)];
        if req.op != Op::Flush {
            req.offset = req.offset + start;
        }
        Verdict::Down(child)
    }

    /// Until its time, or until it is time to look.
    fn wait<R: Ring>(&self, io: Cookie, cx: &mut Cx<'_, R>) -> Verdict {
        let (_, until) = self.sent[io.tag.index()];
        cx.timer(io, until.min(cx.now().after(LOOK_NS)));
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
        if nanos == 0 || self.state.hasty.load(Relaxed) {
            return self.go(req);
        }
        self.state.held[class].fetch_add(1, Relaxed);
        self.wait(io, cx)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let until = self.sent[io.tag.index()].1;
        if result == 0 && cx.now() < until && !self.state.hasty.load(Relaxed) {
            return self.wait(io, cx);
        }
        self.state.held[class_of(req.op)].fetch_sub(1, Relaxed);
        if result < 0 { Verdict::Up(block::Status::from_result(result, 0)) } else { self.go(req) }
    }

    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        req.offset = self.sent[io.tag.index()].0;
        Verdict::Up(status)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::rig::Rig;
    use super::super::testing::{error, made, names};
    use block::{Op, Request};

    #[test]
    fn one_two_and_three_sets_are_read_and_shown_again() {
        let names = names(&["8:0", "8:16", "8:32"]);
        for words in ["8:0 0 5", "8:0 0 5 8:16 8 6", "8:0 0 5 8:16 8 6 8:32 16 7"] {
            let target = made("delay", words);
            assert_eq!(target.status(Status::Table, &names), words);
            assert_eq!(target.status(Status::Info, &names), "0 0 0");
        }
    }

    #[test]
    fn what_is_wrong_is_said_in_the_kernels_words() {
        for (words, text) in [
            ("a 0", "Requires exactly 3, 6 or 9 arguments"),
            ("a x 5", "Invalid device sector"),
            ("a 0 x", "Invalid delay"),
            ("missing 0 5", "Device lookup failed: missing: it is not there"),
            ("a 0 5 b 0 y", "Invalid delay"),
        ] {
            assert_eq!(error("delay", words), text, "{words}");
        }
    }

    #[test]
    fn each_class_has_its_time_and_its_device() {
        let mut rig = Rig::new("delay", "a 0 500 b 8 20 c 16 3");
        for (op, device, at, ms) in
            [(Op::Read, 0, 0, 500), (Op::Write, 1, 8, 20), (Op::Discard, 1, 8, 20), (Op::Flush, 2, 0, 3)]
        {
            let before = rig.ring.time;
            let sectors = u64::from(op != Op::Flush);
            assert_eq!(rig.run(op, 0, sectors).1, [(device, op, at, sectors)]);
            assert_eq!(rig.ring.time.since(before), ms * 1_000_000);
        }
    }

    #[test]
    fn a_suspension_lets_all_go() {
        let mut rig = Rig::new("delay", "a 0 3600000");
        rig.submit(Request::new(Op::Read, block::Bytes(0), block::Bytes(512)));
        rig.submit(Request::flush());
        let shown = names(&["a"]);
        assert_eq!(rig.target.status(Status::Info, &shown), "1 0 1");
        let before = rig.ring.time;
        rig.target.presuspend(false);
        assert_eq!(rig.drain().len(), 2);
        assert!(rig.ring.time.since(before) <= super::LOOK_NS);
        assert_eq!(rig.target.status(Status::Info, &shown), "0 0 0");
        rig.target.resume();
        rig.submit(Request::flush());
        assert_eq!(rig.target.status(Status::Info, &shown), "0 0 1");
    }
}
