//! Tests the file backend on the kernel's ring and real files, against an array with the expected content.

use block::{Bytes, Data, Flags, Op, Request, Segment, Status};
use blockyard_backends::{Backend, Direct, File, FileSpec};

use queue::{Owner, Queue, QueueConfig, QueueId, Ring, Stack};
use ring::{Event, KernelRing, RingConfig, Wait};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u64 = 4 << 20;
/// Number of requests in flight, each on its own part of the device.
const LANES: u64 = 8;
const LANE: u64 = SIZE / LANES;
const DATA_MAX: u32 = 200_000;

struct Bed {
    ring: KernelRing,
    queue: Queue<KernelRing>,
    memory: Vec<Segment>,
    /// Expected content of the device.
    model: Vec<u8>,
    random: fastrand::Rng,
}

impl Bed {
    /// Creates the test bed. Returns `None`, reported on stderr, if the ring or the file is not available.
    fn new(directory: &Path, direct: Direct) -> Option<Bed> {
        let skip = |why: &dyn std::fmt::Display| eprintln!("skipped: {}: {why}", directory.display());
        let path = directory.join("disk.img");
        let spec = FileSpec { direct, create: Some(Bytes(SIZE)), share: true, ..FileSpec::new(path) };
        let file = File::open(&spec).map_err(|why| skip(&why)).ok()?;
        assert_eq!(file.size(), Bytes(SIZE));
        let mut ring = KernelRing::new(RingConfig::default()).map_err(|why| skip(&why)).ok()?;
        let id = ring.add_file(Arc::new(file.as_fd().try_clone_to_owned().unwrap())).unwrap();
        let mut stack = Stack::default();
        let mut node = file.node(id);
        if let Some(again) = file.sync_descriptor().unwrap() {
            node = node.with_sync_file(ring.add_unregistered_file(Arc::new(again)));
        }
        stack.backend(Box::new(node));
        let config = QueueConfig { id: QueueId(0), depth: 16, segments_per_tag: 8, timeout_ns: None };
        let queue = Queue::new(config, stack).unwrap();
        let memory = (0..LANES).map(|_| ring.allocate(DATA_MAX + 4096).unwrap()).collect();
        Some(Bed { ring, queue, memory, model: vec![0; SIZE as usize], random: fastrand::Rng::with_seed(1) })
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.u64(..bound)
    }

    /// Returns a random request in one part of the device, and its memory.
    fn random(&mut self, lane: u64, unit: u64) -> (Request, Segment) {
        let op = [Op::Read, Op::Read, Op::Write, Op::Write, Op::Discard, Op::WriteZeroes, Op::Flush]
            [self.below(7) as usize];
        let start = self.below(LANE / unit) * unit;
        let len = (1 + self.below((LANE - start) / unit)) * unit;
        let len = len.min(u64::from(DATA_MAX) / unit * unit);
        let skew = if self.below(4) == 0 { self.below(4096) as u32 } else { 0 };
        let segment = self.memory[lane as usize].slice(skew, DATA_MAX).slice(0, len as u32);
        let mut req = Request::new(op, Bytes(lane * LANE + start), Bytes(len));
        if op == Op::Flush {
            return (Request::flush(), segment);
        }
        req.data = if op.moves_data() { Data::One(segment) } else { Data::NONE };
        let flags = [Flags::empty(), Flags::empty(), Flags::FUA, Flags::NO_UNMAP];
        req.flags = flags[self.below(if op == Op::Read { 1 } else { 4 }) as usize];
        (req, segment)
    }

    fn start(&mut self, lane: u64, unit: u64) {
        let (req, segment) = self.random(lane, unit);
        let range = req.offset.0 as usize..req.end().0 as usize;
        match req.op {
            Op::Write => {
                let byte = self.below(256) as u8;
                let salt = self.below(251) as usize;
                for (at, into) in self.ring.bytes_mut(segment).iter_mut().enumerate() {
                    *into = byte ^ ((at + salt) % 251) as u8;
                }
                self.model[range].copy_from_slice(self.ring.bytes(segment));
            }
            Op::Discard | Op::WriteZeroes => self.model[range].fill(0),
            _ => {}
        }
        let tag = self.queue.tag().unwrap();
        self.queue.submit(tag, Owner(lane as u32), req, &mut self.ring);
    }

    /// Runs turns until nothing is in flight, and checks the data that was read.
    fn finish(&mut self) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            let ended: Vec<_> = self.queue.done().collect();
            for done in ended {
                let req = *self.queue.request(done.tag);
                assert_eq!(done.status, Status::Ok, "{req:?}");
                if let (Op::Read, Data::One(segment)) = (req.op, req.data) {
                    let expected = &self.model[req.offset.0 as usize..req.end().0 as usize];
                    assert!(self.ring.bytes(segment) == expected, "{req:?}");
                }
                self.queue.release(done.tag);
            }
            if self.queue.in_flight() == 0 {
                return;
            }
            let wait = if self.queue.has_parked() { Wait::No } else { Wait::UntilEvent };
            self.ring.turn(wait).unwrap();
            // Timers expire relative to the last clock read.
            self.ring.read_clock();
            while let Some(event) = self.ring.next_event() {
                let Event::Io { cookie, result, .. } = event else { continue };
                self.queue.complete(cookie, result, &mut self.ring);
            }
            self.queue.turn(&mut self.ring);
        }
        panic!("{} requests never end", self.queue.in_flight());
    }
}

fn check(directory: &Path, direct: Direct) {
    let Some(mut bed) = Bed::new(directory, direct) else { return };
    for unit in [4096, 512, 1] {
        for _ in 0..12 {
            (0..LANES).for_each(|lane| bed.start(lane, unit));
            bed.finish();
        }
    }
    bed.queue.turn(&mut bed.ring);
    let stored = std::fs::read(directory.join("disk.img")).unwrap();
    assert!(stored == bed.model, "the file is not what was written");
}

#[test]
fn a_buffered_file_on_a_disk_stores_data() {
    check(tempfile::tempdir().unwrap().path(), Direct::Off);
}

#[test]
fn a_direct_file_on_a_disk_stores_data() {
    check(tempfile::tempdir().unwrap().path(), Direct::On);
}

#[test]
fn a_file_in_memory_stores_data() {
    match tempfile::tempdir_in("/dev/shm") {
        Ok(directory) => check(directory.path(), Direct::Auto),
        Err(why) => eprintln!("skipped: /dev/shm: {why}"),
    }
}
