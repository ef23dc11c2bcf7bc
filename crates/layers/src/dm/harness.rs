//! A test harness: a target over disks in memory, with a log of their requests and a virtual clock.

use super::background::{BackgroundWork, Disks};
use super::{
    Devices, LookupError, TableLayer, TableTarget, Target, TargetError, TargetRange, target_types, testing,
};
use crate::Layer;
use block::{Bytes, Cookie, Data, Flags, Op, Profile, Request, Sectors, Segment, Status};
use queue::testing::TestRing;
use queue::{Cx, Nanos, Node, NodeId, Owner, Queue, QueueConfig, QueueId, Ring, Stack, Verdict};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// The length of the target. Disks are longer.
pub(crate) const LEN: Sectors = Sectors(1024);
const DISK_LEN: Bytes = Bytes::mib(4);

/// The time between two checks for background work.
const BACKGROUND_INTERVAL_NS: u64 = 10_000_000;

/// A ring with buffers and timers, without I/O.
pub(crate) type Memory = TestRing;

/// A request to a disk: the disk's number, the operation, first sector and number of sectors.
pub(crate) type SeenRequest = (usize, Op, u64, u64);

/// A disk in memory, and the statuses of its next requests.
pub(crate) struct Disk {
    pub(crate) content: Vec<u8>,
    failures: VecDeque<Status>,
    number: usize,
    /// The first sectors of writes by constructors, in order.
    pub(crate) written: Vec<u64>,
    /// Its power supply; disks of most tests have one of their own, which never fails.
    power: Rc<Power>,
    /// The previous content of sectors that were written since the last flush, in order.
    unflushed: Vec<(usize, Vec<u8>)>,
}

/// The power supply of disks: it fails before an operation that a test chooses.
struct Power {
    operations: Cell<u64>,
    limit: Cell<u64>,
}

impl Default for Power {
    fn default() -> Power {
        Power { operations: Cell::new(0), limit: Cell::new(u64::MAX) }
    }
}

impl Power {
    fn is_on(&self) -> bool {
        self.operations.get() <= self.limit.get()
    }

    /// Counts an operation. `false`: the power is off.
    fn count(&self) -> bool {
        self.operations.set(self.operations.get() + 1);
        self.is_on()
    }
}

const SECTOR: usize = 512;

impl Disk {
    /// Remembers what a write without FUA replaces. Only disks with a limited power supply lose it.
    fn remember(&mut self, range: std::ops::Range<usize>) {
        if self.power.limit.get() != u64::MAX {
            for at in range.step_by(SECTOR) {
                self.unflushed.push((at, self.content[at..at + SECTOR].to_vec()));
            }
        }
    }

    /// Loses a random part of the sectors that were written since the last flush: each has any of the values
    /// it had since then.
    fn lose_unflushed(&mut self, random: &mut fastrand::Rng) {
        let mut kept = std::collections::BTreeSet::new();
        // The newest first: a sector whose newest value is kept keeps it.
        for (at, previous) in std::mem::take(&mut self.unflushed).into_iter().rev() {
            if kept.contains(&at) {
                continue;
            }
            if random.bool() {
                self.content[at..at + SECTOR].copy_from_slice(&previous);
            } else {
                kept.insert(at);
            }
        }
    }
}

type Shared = Rc<RefCell<Disk>>;
type Log = Rc<RefCell<Vec<SeenRequest>>>;

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
        if !disk.power.count() {
            return Verdict::Up(Status::IoError);
        }
        let range = req.offset.0 as usize..req.end().0 as usize;
        match req.op {
            Op::Read => {
                let mut at = range.start;
                let segments: Vec<Segment> = cx.segments(req.data, req.len.0).collect();
                for segment in segments {
                    let end = at + segment.len as usize;
                    cx.ring.bytes_mut(segment).copy_from_slice(&disk.content[at..end]);
                    at = end;
                }
            }
            Op::Write => {
                let bytes: Vec<u8> = cx
                    .segments(req.data, req.len.0)
                    .flat_map(|segment| cx.ring.bytes(segment))
                    .copied()
                    .collect();
                disk.remember(range.clone());
                disk.content[range.clone()].copy_from_slice(&bytes);
            }
            Op::Discard | Op::WriteZeroes => {
                disk.remember(range.clone());
                disk.content[range.clone()].fill(0);
            }
            Op::Flush => disk.unflushed.clear(),
            _ => {}
        }
        if req.flags.contains(Flags::FUA) {
            disk.unflushed.retain(|(at, _)| !range.contains(at));
        }
        Verdict::Up(Status::Ok)
    }
}

/// The devices of a table line, by name. Opening an unknown name creates a disk.
struct TestDevices {
    names: Vec<String>,
    disks: Vec<Shared>,
    profiles: Vec<Profile>,
}

impl Devices for TestDevices {
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
                    power: Rc::default(),
                    unflushed: Vec::new(),
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

/// The devices of a target, for background work.
#[derive(Clone)]
pub(crate) struct TestDisks(Vec<Shared>);

impl TestDisks {
    fn next_failure(&mut self, device: usize) -> io::Result<()> {
        let mut disk = self.0[device].borrow_mut();
        match disk.failures.pop_front() {
            Some(status) if !status.is_ok() => Err(io::Error::from_raw_os_error(status.errno())),
            _ if !disk.power.count() => Err(io::Error::from_raw_os_error(libc::EIO)),
            _ => Ok(()),
        }
    }
}

impl Disks for TestDisks {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.next_failure(device)?;
        let at = at.0 as usize;
        into.copy_from_slice(&self.0[device].borrow().content[at..at + into.len()]);
        Ok(())
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.next_failure(device)?;
        let at = at.0 as usize;
        let mut disk = self.0[device].borrow_mut();
        disk.remember(at..at + from.len());
        disk.content[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.next_failure(device)?;
        self.0[device].borrow_mut().unflushed.clear();
        Ok(())
    }
}

fn profile_of(disk: &Shared) -> Profile {
    testing::profile(Bytes(disk.borrow().content.len() as u64))
}

/// A target and its disks, with a table above it unless it was created without.
pub(crate) struct Harness {
    pub(crate) target: Arc<dyn Target<Memory>>,
    pub(crate) disks: Vec<Shared>,
    pub(crate) ring: Memory,
    /// Number of the next timers that end as cancelled.
    pub(crate) cancelled_timers: u32,
    pub(crate) profile: Profile,
    /// Background work that runs while requests are in flight.
    pub(crate) background: Vec<(Arc<dyn BackgroundWork>, TestDisks)>,
    names: Vec<String>,
    queue: Queue<Memory>,
    log: Log,
}

impl Harness {
    /// Creates a target in a table.
    pub(crate) fn new(kind: &str, args: &str) -> Harness {
        let harness = Harness::over(kind, args, Vec::new(), true);
        harness.unwrap_or_else(|error| panic!("{kind} {args}: {error}"))
    }

    /// Creates a target without a table: requests are not split.
    pub(crate) fn without_table(kind: &str, args: &str) -> Harness {
        let harness = Harness::over(kind, args, Vec::new(), false);
        harness.unwrap_or_else(|error| panic!("{kind} {args}: {error}"))
    }

    /// Drops the target with its requests in flight, and creates one on the same disks.
    pub(crate) fn restart(self, kind: &str, args: &str) -> Harness {
        let disks = self.named_disks();
        drop(self);
        Harness::over(kind, args, disks, true).unwrap_or_else(|error| panic!("{kind} {args}: {error}"))
    }

    /// Returns the disks by name.
    pub(crate) fn named_disks(&self) -> Vec<(String, Shared)> {
        self.names.iter().cloned().zip(self.disks.iter().cloned()).collect()
    }

    /// Creates another target on the same disks.
    pub(crate) fn with_same_disks(&self, kind: &str, args: &str) -> Harness {
        Harness::over(kind, args, self.named_disks(), true)
            .unwrap_or_else(|error| panic!("{kind} {args}: {error}"))
    }

    /// Creates a target on these disks; `table`: with a table above it.
    pub(crate) fn over(
        kind: &str,
        args: &str,
        disks: Vec<(String, Shared)>,
        table: bool,
    ) -> Result<Harness, TargetError> {
        Harness::with_depth(8, kind, args, disks, table)
    }

    /// Creates a target with a queue depth.
    pub(crate) fn with_depth(
        depth: u16,
        kind: &str,
        args: &str,
        disks: Vec<(String, Shared)>,
        table: bool,
    ) -> Result<Harness, TargetError> {
        let kind = target_types::<Memory>().into_iter().find(|known| known.row.name == kind).expect("a kind");
        let args: Vec<&str> = args.split_whitespace().collect();
        let (names, disks): (_, Vec<Shared>) = disks.into_iter().unzip();
        let profiles = disks.iter().map(profile_of).collect();
        let mut devices = TestDevices { names, disks, profiles };
        let before = devices.disks.len();
        let place = TargetRange { start: Sectors(0), len: LEN };
        let mut new_devices = DevicesFrom { devices: &mut devices, before };
        let target = (kind.construct)(place, &args, &mut new_devices)?;
        // Tests of mirrors run its steps themselves.
        let runs_background = kind.row.name != "mirror";
        Harness::around(depth, target, devices, before, table, runs_background)
    }

    /// Creates a harness around a target of no row, over two disks.
    pub(crate) fn of_two_disks(target: Arc<dyn Target<Memory>>) -> Harness {
        let mut devices = TestDevices { names: Vec::new(), disks: Vec::new(), profiles: Vec::new() };
        for name in ["a", "b"] {
            devices.open(name).expect("a new disk");
        }
        Harness::around(8, target, devices, 0, true, false).expect("a target that prepares")
    }

    /// Puts a target between its devices, those from `before` on, and a queue.
    fn around(
        depth: u16,
        target: Arc<dyn Target<Memory>>,
        mut devices: TestDevices,
        before: usize,
        table: bool,
        runs_background: bool,
    ) -> Result<Harness, TargetError> {
        let names = devices.names.split_off(before);
        let disks = devices.disks.split_off(before);
        for (number, disk) in disks.iter().enumerate() {
            disk.borrow_mut().number = number;
        }
        let below = devices.profiles.split_off(before);
        let profile = Layer::profile(&*target, &below).expect("limits that fit");
        let log = Log::default();
        let mut ring = Memory::at(Nanos(1));
        let queue = Queue::new(config(depth), stack(&target, &profile, &disks, &log, table, depth))
            .expect("a stack that fits");
        let mut below = TestDisks(disks.clone());
        target.prepare(&mut below)?;
        let work = target.background_work().filter(|_| runs_background);
        let background = work.map(|work| (work, below)).into_iter().collect();
        target.resume();
        ring.now = Nanos(1_000_000_000);
        Ok(Harness { target, disks, ring, cancelled_timers: 0, profile, background, names, queue, log })
    }

    /// Returns the disks, for a test that runs background work itself.
    pub(crate) fn test_disks(&self) -> TestDisks {
        TestDisks(self.disks.clone())
    }

    /// Gives the disks one power supply, which fails after this many operations.
    pub(crate) fn power_off_after(&self, operations: u64) {
        let power = Rc::new(Power { operations: Cell::new(0), limit: Cell::new(operations) });
        for disk in &self.disks {
            disk.borrow_mut().power = power.clone();
        }
    }

    /// Returns whether no operation was refused for the lack of power.
    pub(crate) fn has_power(&self) -> bool {
        self.disks[0].borrow().power.is_on()
    }

    /// Counts an operation beside those of the disks. `false`: the power is off.
    pub(crate) fn use_power(&self) -> bool {
        self.disks[0].borrow().power.count()
    }

    /// Returns the number of operations since the power supply was set.
    pub(crate) fn operations(&self) -> u64 {
        self.disks[0].borrow().power.operations.get()
    }

    /// Loses a random part of what was written to the disks since their last flushes.
    pub(crate) fn lose_unflushed(&self, random: &mut fastrand::Rng) {
        for disk in &self.disks {
            disk.borrow_mut().lose_unflushed(random);
        }
    }

    /// Queues a status for the next request to a disk.
    pub(crate) fn fail(&mut self, disk: usize, status: Status) {
        self.disks[disk].borrow_mut().failures.push_back(status);
    }

    /// Makes the next 1000 requests to a disk fail, or all requests succeed again.
    pub(crate) fn break_disk(&mut self, disk: usize, broken: bool) {
        let failures = if broken { 1000 } else { 0 };
        self.disks[disk].borrow_mut().failures = vec![Status::IoError; failures].into();
    }

    /// Submits a request without waiting for it.
    pub(crate) fn submit(&mut self, mut req: Request) {
        let tag = self.queue.tag().expect("a free tag");
        if req.op.moves_data() && req.data == Data::NONE {
            req.data = Data::One(self.ring.memory.own(req.len.0 as u32));
        }
        self.queue.submit(tag, Owner(u32::from(tag.0)), req, &mut self.ring);
    }

    /// Returns the number of requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Runs one turn of the queue, without letting time pass.
    pub(crate) fn turn(&mut self) {
        self.queue.turn(&mut self.ring);
    }

    /// Lets time pass until no request is in flight. Returns the statuses in the order of completion.
    pub(crate) fn drain(&mut self) -> Vec<Status> {
        let mut ends = Vec::new();
        for _ in 0..100_000 {
            let now = self.ring.now;
            for (work, below) in self.background.iter_mut().filter(|(work, _)| work.is_due(now)) {
                work.step(now, below);
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
            if self.ring.timers() == 0 {
                // Requests wait for background work.
                self.ring.now = self.ring.now.after(BACKGROUND_INTERVAL_NS);
            }
            if !self.queue.has_parked()
                && let Some((id, result)) = self.ring.end_timer(Nanos(u64::MAX))
            {
                let is_cancelled = self.cancelled_timers > 0;
                self.cancelled_timers -= u32::from(is_cancelled);
                let result = if is_cancelled { -i64::from(libc::ECANCELED) } else { result };
                self.queue.complete(id.cookie, result, &mut self.ring);
            }
            self.queue.turn(&mut self.ring);
        }
        panic!("{} requests never complete", self.queue.in_flight());
    }

    /// Runs one request. Returns its status and the requests to the disks.
    pub(crate) fn request(&mut self, req: Request) -> (Status, Vec<SeenRequest>) {
        self.log.borrow_mut().clear();
        self.submit(req);
        let ends = self.drain();
        assert_eq!(ends.len(), 1);
        (ends[0], self.log.borrow().clone())
    }

    pub(crate) fn run(&mut self, op: Op, sector: u64, sectors: u64) -> (Status, Vec<SeenRequest>) {
        self.request(Request::new(op, Sectors(sector).bytes(), Sectors(sectors).bytes()))
    }

    pub(crate) fn write(&mut self, sector: u64, bytes: &[u8]) -> Status {
        self.write_with(sector, bytes, Flags::empty())
    }

    pub(crate) fn write_with(&mut self, sector: u64, bytes: &[u8], flags: Flags) -> Status {
        let memory = self.ring.memory.own(bytes.len() as u32);
        self.ring.bytes_mut(memory).copy_from_slice(bytes);
        let mut req = Request::new(Op::Write, Sectors(sector).bytes(), Bytes(bytes.len() as u64));
        (req.data, req.flags) = (Data::One(memory), flags);
        let status = self.request(req).0;
        assert_eq!(self.ring.bytes(memory), bytes, "the client's buffer is unchanged");
        status
    }

    pub(crate) fn read(&mut self, sector: u64, len: usize) -> (Status, Vec<u8>) {
        let memory = self.ring.memory.own(len as u32);
        let mut req = Request::new(Op::Read, Sectors(sector).bytes(), Bytes(len as u64));
        req.data = Data::One(memory);
        let status = self.request(req).0;
        (status, self.ring.bytes(memory).to_vec())
    }

    /// Returns data of a disk.
    pub(crate) fn content(&self, disk: usize, sector: u64, len: usize) -> Vec<u8> {
        let at = (sector << 9) as usize;
        self.disks[disk].borrow().content[at..at + len].to_vec()
    }
}

/// The devices of a new target, numbered from 0; disks of the previous target are found by name.
struct DevicesFrom<'a> {
    devices: &'a mut TestDevices,
    before: usize,
}

impl Devices for DevicesFrom<'_> {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        Ok(self.devices.open(word)? - self.before)
    }

    fn profile(&self, device: usize) -> &Profile {
        self.devices.profile(device + self.before)
    }

    fn identity(&self, device: usize) -> &str {
        self.devices.identity(device + self.before)
    }

    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.devices.read(device + self.before, at, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.devices.write(device + self.before, at, from)
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.devices.flush(device + self.before)
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
    let row = TableTarget {
        place: TargetRange { start: Sectors(0), len: profile.size.sectors() },
        max_io_len: target.max_io_len(),
        splits_discards: target.splits_discards(),
    };
    let cuts = table && !TableLayer::is_needless(&[row]);
    if cuts {
        stack.layer(Layer::node(&TableLayer::new(vec![row]), profile, &[NodeId(1)]), 32);
    }
    let first = 1 + u8::from(cuts);
    let below: Vec<NodeId> = (0..disks.len() as u8).map(|number| NodeId(first + number)).collect();
    stack.layer(Layer::node(&**target, profile, &below), Layer::child_requests(&**target, depth));
    for disk in disks {
        stack.backend(Box::new(DiskNode(disk.clone(), log.clone())));
    }
    stack
}
