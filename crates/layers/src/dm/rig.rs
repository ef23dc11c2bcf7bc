//! A target over disks of memory, for tests: data, what each disk was asked, and time that moves by itself.

use super::chore::{Chore, Disks};
use super::{Devices, LookupError, Place, Row, TableLayer, Target, TargetError, kinds, testing};
use crate::Layer;
use block::{Bytes, Cookie, Data, Flags, Op, Profile, Region, Request, Sectors, Segment, Status};
use queue::{
    Cx, FileId, FileOp, IoId, Nanos, Node, NodeId, Owner, Patience, Queue, QueueConfig, QueueId, Ring,
    RingFull, Stack, Verdict,
};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// How long the target is, and how long each disk.
pub(crate) const LEN: Sectors = Sectors(1024);
const DISK_LEN: Bytes = Bytes::mib(4);

/// A ring of memory and timers.
pub(crate) struct Memory {
    pub(crate) time: Nanos,
    regions: Vec<Vec<u8>>,
    pub(crate) live: isize,
    timers: Vec<(IoId, Nanos)>,
    /// How often there is no memory to be had.
    pub(crate) short: u32,
    /// How many timers end as if they had been cancelled.
    pub(crate) cancels: u32,
}

impl Ring for Memory {
    fn now(&self) -> Nanos {
        self.time
    }

    fn allocate(&mut self, len: u32) -> Option<Segment> {
        if self.short > 0 {
            self.short -= 1;
            return None;
        }
        self.live += 1;
        self.regions.push(vec![0xEE; len as usize]);
        Some(Segment { offset: 0, len, region: Region(self.regions.len() as u16 - 1) })
    }

    fn free(&mut self, segment: Segment) {
        self.live -= 1;
        self.regions[usize::from(segment.region.0)] = Vec::new();
    }

    fn bytes(&self, segment: Segment) -> &[u8] {
        let at = segment.offset as usize;
        &self.regions[usize::from(segment.region.0)][at..at + segment.len as usize]
    }

    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        let at = segment.offset as usize;
        &mut self.regions[usize::from(segment.region.0)][at..at + segment.len as usize]
    }

    fn try_now(&mut self, _: FileId, _: FileOp, _: &[Segment], _: Patience) -> Option<i64> {
        None
    }

    fn start(&mut self, _: IoId, _: FileId, _: FileOp, _: &[Segment]) -> Result<(), RingFull> {
        Err(RingFull)
    }

    fn timer(&mut self, id: IoId, at: Nanos) {
        self.timers.push((id, at));
    }

    fn cancel(&mut self, _: IoId) {}
}

/// What was asked of a disk: its number, the operation, sector and sectors.
pub(crate) type Seen = (usize, Op, u64, u64);

/// A disk, and what it is to fail with.
pub(crate) struct Disk {
    pub(crate) content: Vec<u8>,
    failures: VecDeque<Status>,
    number: usize,
    /// Sectors at which constructors of targets wrote, in order.
    pub(crate) written: Vec<u64>,
}

type Shared = Rc<RefCell<Disk>>;
type Log = Rc<RefCell<Vec<Seen>>>;

struct DiskNode(Shared, Log);

impl Node<Memory> for DiskNode {
    fn submit(&mut self, _: Cookie, req: &mut Request, cx: &mut Cx<'_, Memory>) -> Verdict {
        let mut disk = self.0.borrow_mut();
        self.1.borrow_mut().push((disk.number, req.op, req.offset.sectors().0, req.len.sectors().0));
        if let Some(status) = disk.failures.pop_front()
            && !status.is_ok()
        {
            return Verdict::Up(status);
        }
        let range = req.offset.0 as usize..req.end().0 as usize;
        match req.op {
            Op::Read => {
                let mut at = range.start;
                let pieces: Vec<Segment> = cx.segments(req.data, req.len.0).collect();
                for piece in pieces {
                    let end = at + piece.len as usize;
                    cx.ring.bytes_mut(piece).copy_from_slice(&disk.content[at..end]);
                    at = end;
                }
            }
            Op::Write => {
                let bytes: Vec<u8> = cx
                    .segments(req.data, req.len.0)
                    .flat_map(|piece| cx.ring.bytes(piece))
                    .copied()
                    .collect();
                disk.content[range].copy_from_slice(&bytes);
            }
            Op::Discard | Op::WriteZeroes => disk.content[range].fill(0),
            _ => {}
        }
        Verdict::Up(Status::Ok)
    }
}

/// Disks by the words that name them.
struct Cabinet {
    names: Vec<String>,
    disks: Vec<Shared>,
    profiles: Vec<Profile>,
}

impl Devices for Cabinet {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        let number = self.disks.len();
        let disk = match self.names.iter().position(|name| name == word) {
            Some(same) => self.disks[same].clone(),
            None => {
                let content = vec![0; DISK_LEN.0 as usize];
                Rc::new(RefCell::new(Disk {
                    content,
                    failures: VecDeque::new(),
                    number,
                    written: Vec::new(),
                }))
            }
        };
        self.names.push(word.to_owned());
        self.profiles.push(profile_of(&disk));
        self.disks.push(disk);
        Ok(number)
    }

    fn profile(&self, device: usize) -> &Profile {
        &self.profiles[device]
    }

    fn identity(&self, device: usize) -> &str {
        &self.names[device]
    }

    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        let at = at.0 as usize;
        into.copy_from_slice(&self.disks[device].borrow().content[at..at + into.len()]);
        Ok(())
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        let at = at.0 as usize;
        let mut disk = self.disks[device].borrow_mut();
        disk.content[at..at + from.len()].copy_from_slice(from);
        disk.written.push(at as u64 >> 9);
        Ok(())
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

/// A target's devices, as whoever looks after targets sees them.
#[derive(Clone)]
pub(crate) struct Below(Vec<Shared>);

impl Below {
    fn ask(&mut self, device: usize) -> io::Result<()> {
        match self.0[device].borrow_mut().failures.pop_front() {
            Some(status) if !status.is_ok() => Err(io::Error::from_raw_os_error(status.errno())),
            _ => Ok(()),
        }
    }
}

impl Disks for Below {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.ask(device)?;
        let at = at.0 as usize;
        into.copy_from_slice(&self.0[device].borrow().content[at..at + into.len()]);
        Ok(())
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.ask(device)?;
        let at = at.0 as usize;
        self.0[device].borrow_mut().content[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.ask(device)
    }
}

fn profile_of(disk: &Shared) -> Profile {
    testing::profile(Bytes(disk.borrow().content.len() as u64))
}

/// A target and its disks, with a table above it if requests are to be cut.
pub(crate) struct Rig {
    pub(crate) target: Arc<dyn Target<Memory>>,
    pub(crate) disks: Vec<Shared>,
    pub(crate) ring: Memory,
    pub(crate) profile: Profile,
    /// Done while requests are under way, if they are to be.
    pub(crate) chores: Vec<(Arc<dyn Chore>, Below)>,
    names: Vec<String>,
    queue: Queue<Memory>,
    log: Log,
}

impl Rig {
    /// As it stands in a table.
    pub(crate) fn new(kind: &str, words: &str) -> Rig {
        let rig = Rig::over(kind, words, Vec::new(), true);
        rig.unwrap_or_else(|error| panic!("{kind} {words}: {error}"))
    }

    /// The target alone.
    pub(crate) fn bare(kind: &str, words: &str) -> Rig {
        let rig = Rig::over(kind, words, Vec::new(), false);
        rig.unwrap_or_else(|error| panic!("{kind} {words}: {error}"))
    }

    /// On disks that there were before: what was cut off ends here.
    pub(crate) fn again(self, kind: &str, words: &str) -> Rig {
        let kept = self.kept();
        drop(self);
        Rig::over(kind, words, kept, true).unwrap_or_else(|error| panic!("{kind} {words}: {error}"))
    }

    /// Its disks, by name.
    pub(crate) fn kept(&self) -> Vec<(String, Shared)> {
        self.names.iter().cloned().zip(self.disks.iter().cloned()).collect()
    }

    /// Another target on the same disks.
    pub(crate) fn beside(&self, kind: &str, words: &str) -> Rig {
        Rig::over(kind, words, self.kept(), true).unwrap_or_else(|error| panic!("{kind} {words}: {error}"))
    }

    /// On these disks, by name.
    pub(crate) fn over(
        kind: &str,
        words: &str,
        kept: Vec<(String, Shared)>,
        table: bool,
    ) -> Result<Rig, TargetError> {
        Rig::with_depth(8, kind, words, kept, table)
    }

    /// With so many requests at once.
    pub(crate) fn with_depth(
        depth: u16,
        kind: &str,
        words: &str,
        kept: Vec<(String, Shared)>,
        table: bool,
    ) -> Result<Rig, TargetError> {
        let kind = kinds::<Memory>().into_iter().find(|known| known.name == kind).expect("a kind");
        let words: Vec<&str> = words.split_whitespace().collect();
        let (names, disks): (_, Vec<Shared>) = kept.into_iter().unzip();
        let profiles = disks.iter().map(profile_of).collect();
        let mut cabinet = Cabinet { names, disks, profiles };
        let before = cabinet.disks.len();
        let place = Place { start: Sectors(0), len: LEN };
        let mut shelf = Offset { cabinet: &mut cabinet, before };
        let target = (kind.make)(place, &words, &mut shelf)?;
        let names = cabinet.names.split_off(before);
        let disks = cabinet.disks.split_off(before);
        for (number, disk) in disks.iter().enumerate() {
            disk.borrow_mut().number = number;
        }
        let below = cabinet.profiles.split_off(before);
        let profile = Layer::profile(&*target, &below).expect("limits that fit");
        let log = Log::default();
        let mut ring =
            Memory { time: Nanos(1), regions: Vec::new(), live: 0, timers: Vec::new(), short: 0, cancels: 0 };
        let queue = Queue::new(config(depth), stack(&target, &profile, &disks, &log, table, depth))
            .expect("a stack that fits");
        let mut below = Below(disks.clone());
        target.prepare(&mut below)?;
        // The tests of mirrors do theirs step by step.
        let chore = target.chore().filter(|_| kind.name != "mirror");
        let chores = chore.map(|chore| (chore, below)).into_iter().collect();
        target.resume();
        ring.time = Nanos(1_000_000_000);
        Ok(Rig { target, disks, ring, profile, chores, names, queue, log })
    }

    /// Its disks, for what a test does in the place of whoever looks after targets.
    pub(crate) fn below(&self) -> Below {
        Below(self.disks.clone())
    }

    /// The next requests to a disk end like this.
    pub(crate) fn fail(&mut self, disk: usize, status: Status) {
        self.disks[disk].borrow_mut().failures.push_back(status);
    }

    /// All requests to a disk fail, or none any more.
    pub(crate) fn break_disk(&mut self, disk: usize, broken: bool) {
        let failures = if broken { 1000 } else { 0 };
        self.disks[disk].borrow_mut().failures = vec![Status::IoError; failures].into();
    }

    /// Submit, and leave it under way.
    pub(crate) fn submit(&mut self, mut req: Request) {
        let tag = self.queue.tag().expect("a free tag");
        if req.op.moves_data() && req.data == Data::NONE {
            self.ring.live -= 1; // What the test itself holds is not counted.
            req.data = Data::One(self.ring.allocate(req.len.0 as u32).expect("memory"));
        }
        self.queue.submit(tag, Owner(u32::from(tag.0)), req, &mut self.ring);
    }

    /// How many requests are under way.
    pub(crate) fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Let timers pass until nothing is under way: how each ended.
    pub(crate) fn drain(&mut self) -> Vec<Status> {
        let mut ends = Vec::new();
        for _ in 0..100_000 {
            let now = self.ring.time;
            for (chore, below) in self.chores.iter_mut().filter(|(chore, _)| chore.is_due(now)) {
                chore.step(now, below);
            }
            let done: Vec<_> = self.queue.done().collect();
            for end in done {
                self.queue.release(end.tag);
                ends.push(end.status);
            }
            if self.queue.in_flight() == 0 && !ends.is_empty() {
                self.queue.turn(&mut self.ring);
                return ends;
            }
            if !self.queue.has_parked()
                && let Some(next) = (0..self.ring.timers.len()).min_by_key(|&at| self.ring.timers[at].1)
            {
                let (id, at) = self.ring.timers.swap_remove(next);
                self.ring.time = self.ring.time.max(at);
                let is_cancelled = self.ring.cancels > 0;
                self.ring.cancels -= u32::from(is_cancelled);
                let result = if is_cancelled { -i64::from(libc::ECANCELED) } else { 0 };
                self.queue.complete(id.cookie, result, &mut self.ring);
            }
            self.queue.turn(&mut self.ring);
        }
        panic!("{} requests never end", self.queue.in_flight());
    }

    /// One request to its end, and what the disks were asked for it.
    pub(crate) fn request(&mut self, req: Request) -> (Status, Vec<Seen>) {
        self.log.borrow_mut().clear();
        self.submit(req);
        let ends = self.drain();
        assert_eq!(ends.len(), 1);
        (ends[0], self.log.borrow().clone())
    }

    pub(crate) fn run(&mut self, op: Op, sector: u64, sectors: u64) -> (Status, Vec<Seen>) {
        self.request(Request::new(op, Sectors(sector).bytes(), Sectors(sectors).bytes()))
    }

    pub(crate) fn write(&mut self, sector: u64, bytes: &[u8]) -> Status {
        self.write_with(sector, bytes, Flags::NONE)
    }

    pub(crate) fn write_with(&mut self, sector: u64, bytes: &[u8], flags: Flags) -> Status {
        self.ring.live -= 1;
        let memory = self.ring.allocate(bytes.len() as u32).expect("memory");
        self.ring.bytes_mut(memory).copy_from_slice(bytes);
        let mut req = Request::new(Op::Write, Sectors(sector).bytes(), Bytes(bytes.len() as u64));
        (req.data, req.flags) = (Data::One(memory), flags);
        let status = self.request(req).0;
        assert_eq!(self.ring.bytes(memory), bytes, "the writer's data is its own");
        status
    }

    pub(crate) fn read(&mut self, sector: u64, len: usize) -> (Status, Vec<u8>) {
        self.ring.live -= 1;
        let memory = self.ring.allocate(len as u32).expect("memory");
        let mut req = Request::new(Op::Read, Sectors(sector).bytes(), Bytes(len as u64));
        req.data = Data::One(memory);
        let status = self.request(req).0;
        (status, self.ring.bytes(memory).to_vec())
    }

    /// What lies on a disk.
    pub(crate) fn content(&self, disk: usize, sector: u64, len: usize) -> Vec<u8> {
        let at = (sector << 9) as usize;
        self.disks[disk].borrow().content[at..at + len].to_vec()
    }
}

/// Devices of a table that comes after another: kept disks are found by name.
struct Offset<'a> {
    cabinet: &'a mut Cabinet,
    before: usize,
}

impl Devices for Offset<'_> {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        Ok(self.cabinet.open(word)? - self.before)
    }

    fn profile(&self, device: usize) -> &Profile {
        self.cabinet.profile(device + self.before)
    }

    fn identity(&self, device: usize) -> &str {
        self.cabinet.identity(device + self.before)
    }

    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.cabinet.read(device + self.before, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.cabinet.write(device + self.before, at, from)
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.cabinet.flush(device + self.before)
    }
}

fn config(depth: u16) -> QueueConfig {
    QueueConfig { id: QueueId(0), depth, segments_per_tag: 64, timeout_ns: None }
}

fn stack(
    target: &Arc<dyn Target<Memory>>,
    profile: &Profile,
    disks: &[Shared],
    log: &Log,
    table: bool,
    depth: u16,
) -> Stack<Memory> {
    let mut stack = Stack::default();
    let row = Row {
        place: Place { start: Sectors(0), len: LEN },
        max_io_len: target.max_io_len(),
        spreads: target.spreads(),
    };
    let cuts = table && !TableLayer::is_needless(&[row]);
    if cuts {
        stack.layer(Layer::node(&TableLayer::new(vec![row]), profile, &[NodeId(1)]), 32);
    }
    let first = 1 + u8::from(cuts);
    let below: Vec<NodeId> = (0..disks.len() as u8).map(|number| NodeId(first + number)).collect();
    stack.layer(Layer::node(&**target, profile, &below), Layer::spares(&**target, depth));
    for disk in disks {
        stack.backend(Box::new(DiskNode(disk.clone(), log.clone())));
    }
    stack
}
