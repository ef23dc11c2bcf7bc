//! All targets at once: whatever fails below, a request leaves a target upwards as it arrived there. In debug builds the
//! queue compares the two, for each node that a request leaves.

use super::rig::{Memory, Rig};
use super::{Status as Asked, kinds, testing};
use block::{Bytes, Flags, Op, Request, Sectors, Status};

/// Every kind of target, with arguments that move requests where the kind can move them.
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

/// A seeded generator: each run is the same.
struct Random(fastrand::Rng);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// A few requests at once, with disks that fail some of what they are asked and timers that are cancelled.
fn burst(rig: &mut Rig, random: &mut Random) {
    for _ in 0..random.below(6) {
        let disk = random.below(rig.disks.len().max(1) as u64) as usize;
        if disk < rig.disks.len() {
            rig.fail(disk, random.pick(&STATUSES));
        }
    }
    rig.ring.cancels = random.below(4).saturating_sub(2) as u32;
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
        rig.submit(req);
        rig.ring.time = rig.ring.time.after(random.below(1_000_000_000));
    }
    if random.below(3) == 0 {
        // What is held for the next table fails.
        rig.target.presuspend(false);
    }
    rig.drain();
    rig.target.resume();
    for path in ["a", "b"].into_iter().filter(|_| rig.target.paths().is_some()) {
        let reinstated = rig.target.message(&["reinstate_path", path], &testing::names(&["a", "b"]));
        assert!(reinstated.is_ok(), "{path} is a path");
    }
}

#[test]
fn a_request_leaves_every_target_as_it_arrived() {
    let known: Vec<&str> = kinds::<Memory>().iter().map(|kind| kind.name).collect();
    let tested: Vec<&str> = TARGETS.iter().map(|target| target.0).collect();
    assert_eq!(tested, known, "every kind of target is in the table");
    let all = TARGETS.iter().flat_map(|&(kind, lines)| lines.iter().map(move |&words| (kind, words)));
    for (number, (kind, words)) in all.enumerate() {
        let mut random = Random(fastrand::Rng::with_seed(number as u64));
        for _ in 0..25 {
            let mut rig = Rig::new(kind, words);
            if let Some(paths) = rig.target.paths() {
                paths.set_no_path_timeout(1_000_000_000);
            }
            for _ in 0..20 {
                burst(&mut rig, &mut random);
            }
        }
    }
}

/// The first leg is found to fail while a read waits to be sent there again, and no other leg has the region.
#[test]
fn a_read_of_a_mirror_that_runs_out_of_legs_ends_where_it_was_sent() {
    let mut rig = Rig::new("mirror", "core 1 64 2 a 8 b 16");
    rig.fail(0, Status::Again);
    rig.fail(0, Status::IoError);
    for sector in [100, 200] {
        rig.submit(Request::new(Op::Read, Sectors(sector).bytes(), Bytes(512)));
    }
    assert_eq!(rig.drain(), [Status::IoError, Status::IoError]);
    let status = rig.target.status(Asked::Info, &testing::names(&["8:0", "8:16"]));
    assert_eq!(status, "2 8:0 8:16 0/16 1 RA 1 core");
}
