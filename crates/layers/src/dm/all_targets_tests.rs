//! Tests of all targets: a request completes with the fields that it was submitted with, whatever fails
//! below. In debug builds the queue compares the fields at each node.

use super::harness::{Harness, Memory};
use super::{Status as Asked, target_types, testing};
use block::{Bytes, Flags, Op, Request, Sectors, Status};

/// All target types, with arguments that change the offset of requests where possible.
const TARGETS: &[(&str, &[&str])] = &[
    ("delay", &["a 8 5", "a 8 0 b 16 5", "a 8 1 b 16 2 c 24 3"]),
    ("dust", &["a 8 512"]),
    ("error", &["", "a 8"]),
    ("flakey", &["a 8 1 1", "a 8 0 9 5 corrupt_bio_byte 3 w 7 0", "a 8 0 9 1 error_reads"]),
    ("linear", &["a 8"]),
    ("log-writes", &["a b"]),
    (
        "mirror",
        &[
            "core 1 64 2 a 8 b 16",
            "core 2 64 nosync 3 a 8 b 16 c 0 1 handle_errors",
            "disk 3 log 64 nosync 2 a 8 b 16 2 handle_errors keep_log",
        ],
    ),
    ("multipath", &["0 0 1 1 round-robin 0 2 0 a b", "1 queue_if_no_path 0 1 1 queue-length 0 2 0 a b"]),
    ("snapshot", &["a b P 16", "a b N 16 1 discard_zeroes_cow"]),
    ("snapshot-origin", &["a"]),
    ("striped", &["2 8 a 8 b 16"]),
    ("switch", &["2 64 0 a 8 b 16"]),
    ("unstriped", &["2 8 1 a 8"]),
    ("zero", &[""]),
];

const OPS: [Op; 6] = [Op::Read, Op::Write, Op::WriteZeroes, Op::Discard, Op::Flush, Op::Prefetch];
const STATUSES: [Status; 10] = [
    Status::Ok,
    Status::IoError,
    Status::IoError,
    Status::Medium,
    Status::Again,
    Status::Again,
    Status::Resource,
    Status::Transport,
    Status::NotSupported,
    Status::Requeue,
];

/// A seeded generator, so that all runs are equal.
struct Random(fastrand::Rng);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// Runs a few concurrent requests, with failing disks and cancelled timers.
fn burst(harness: &mut Harness, random: &mut Random) {
    for _ in 0..random.below(6) {
        let disk = random.below(harness.disks.len().max(1) as u64) as usize;
        if disk < harness.disks.len() {
            harness.fail(disk, random.pick(&STATUSES));
        }
    }
    harness.cancelled_timers = random.below(4).saturating_sub(2) as u32;
    for _ in 0..=random.below(4) {
        let (op, sector) = (random.pick(&OPS), random.below(960));
        let (offset, len) = match op {
            Op::Flush => (Bytes::ZERO, Bytes::ZERO),
            _ => (Sectors(sector).bytes(), Sectors(1 + random.below(64)).bytes()),
        };
        let mut req = Request::new(op, offset, len);
        if op == Op::Write && random.below(2) == 0 {
            req.flags = Flags::FUA;
        } else if random.below(8) == 0 {
            req.flags = Flags::NOWAIT;
        }
        harness.submit(req);
        harness.ring.now = harness.ring.now.after(random.below(1_000_000_000));
    }
    if random.below(3) == 0 {
        // Requests held for the next table fail.
        harness.target.presuspend(false);
    }
    harness.drain();
    harness.target.resume();
    for path in ["a", "b"].into_iter().filter(|_| harness.target.paths().is_some()) {
        let reinstated = harness.target.message(&["reinstate_path", path], &testing::names(&["a", "b"]));
        assert!(reinstated.is_ok(), "{path} is a path");
    }
}

#[test]
fn requests_complete_with_the_fields_they_were_submitted_with() {
    let known: Vec<&str> = target_types::<Memory>().iter().map(|kind| kind.row.name).collect();
    let tested: Vec<&str> = TARGETS.iter().map(|target| target.0).collect();
    assert_eq!(tested, known, "each target type is in the table");
    let all = TARGETS.iter().flat_map(|&(kind, lines)| lines.iter().map(move |&args| (kind, args)));
    for (number, (kind, args)) in all.enumerate() {
        let mut random = Random(fastrand::Rng::with_seed(number as u64));
        for _ in 0..25 {
            let mut harness = Harness::new(kind, args);
            if let Some(paths) = harness.target.paths() {
                paths.set_no_path_timeout(1_000_000_000);
            }
            for _ in 0..20 {
                burst(&mut harness, &mut random);
            }
        }
    }
}

/// The first leg fails while a read waits to be resubmitted to it, and no other leg has the region.
#[test]
fn a_read_of_a_mirror_without_other_legs_fails() {
    let mut harness = Harness::new("mirror", "core 1 64 2 a 8 b 16");
    harness.fail(0, Status::Again);
    harness.fail(0, Status::IoError);
    for sector in [100, 200] {
        harness.submit(Request::new(Op::Read, Sectors(sector).bytes(), Bytes(512)));
    }
    assert_eq!(harness.drain(), [Status::IoError, Status::IoError]);
    let status = harness.target.status(Asked::Info, &testing::names(&["8:0", "8:16"]));
    assert_eq!(status, "2 8:0 8:16 0/16 1 RA 1 core");
}
