//! Tests of the options: their effect on requests, and which of them fit together.

use super::*;
use crate::testing::Harness;
use block::{Flags, Op};

fn spec(memory_backed: bool, knobs: Knobs) -> NullSpec {
    NullSpec { size: Bytes::mib(1), memory_backed, knobs, ..NullSpec::default() }
}

fn disk(memory_backed: bool, knobs: Knobs) -> (Null, Harness) {
    let null = Null::new(&spec(memory_backed, knobs)).unwrap();
    let harness = Harness::new(Box::new(null.node(None)));
    (null, harness)
}

fn refused(memory_backed: bool, knobs: Knobs) -> String {
    Null::new(&spec(memory_backed, knobs)).unwrap_err().to_string()
}

fn fact(null: &Null, name: &str) -> String {
    null.describe().into_iter().find(|fact| fact.0 == name).map(|fact| fact.1).unwrap_or_default()
}

#[test]
fn options_that_need_others_are_refused_without_them() {
    let none = Knobs::default;
    assert_eq!(
        refused(false, Knobs { discard: true, ..none() }),
        "discard does nothing without memory_backed (add memory_backed, or leave it out)"
    );
    assert!(refused(false, Knobs { cache_size: Some(Bytes::mib(1)), ..none() }).starts_with("cache_size"));
    assert!(refused(true, Knobs { fua: false, ..none() }).starts_with("fua=off does nothing without"));
    assert!(refused(true, Knobs { cache_size: Some(Bytes(512)), ..none() }).contains("a page at least"));
    assert!(refused(false, Knobs { blocksize: Bytes(8192), ..none() }).contains("blocksize cannot be"));
    assert!(refused(false, Knobs { max_sectors: Some(Sectors(7)), ..none() }).contains("max_sectors"));
    assert!(refused(false, Knobs { mbps: Some(40961), ..none() }).contains("1 to 40960"));
    assert!(refused(false, Knobs { hw_queue_depth: Some(0), ..none() }).contains("hw_queue_depth"));
    let beyond = Knobs { badblocks: "2040-2048".parse().unwrap(), ..none() };
    assert_eq!(refused(false, beyond), "bad blocks end at sector 2048, which is beyond the device");
    let zoned = NullSpec {
        zoned: Some(ZonedSpec { zone_size: Bytes(65536), ..ZonedSpec::default() }),
        ..spec(true, Knobs { discard: true, ..none() })
    };
    assert_eq!(Null::new(&zoned).unwrap_err().to_string(), "discard does not go with zoned (leave one out)");
}

#[test]
fn limits_follow_the_options() {
    let knobs = Knobs {
        blocksize: Bytes(4096),
        max_sectors: Some(Sectors(64)),
        virt_boundary: true,
        rotational: true,
        cache_size: Some(Bytes::mib(1)),
        fua: false,
        ..Knobs::default()
    };
    let (null, _) = disk(true, knobs);
    let limits = null.limits();
    assert_eq!((limits.logical_block_size, limits.max_sectors), (Bytes(4096), Sectors(64)));
    assert_eq!((limits.virt_boundary_mask, limits.max_discard_sectors), (4095, Sectors(0)));
    assert!(limits.features.contains(block::Features::ROTATIONAL.union(block::Features::WRITE_CACHE)));
    assert!(!limits.features.contains(block::Features::FUA));
    assert!(!null.features().fua && !null.features().discard && null.features().rotational);
    let (null, _) = disk(true, Knobs { discard: true, ..Knobs::default() });
    assert!(null.features().discard && null.limits().max_discard_sectors.0 > 0);
    assert!(!null.limits().features.contains(block::Features::WRITE_CACHE));
}

#[test]
fn only_requests_that_touch_bad_blocks_fail() {
    let (null, mut disk) = disk(true, Knobs { badblocks: "8-15".parse().unwrap(), ..Knobs::default() });
    assert_eq!(disk.write(0, &[1; 4096], Flags::empty()), Status::Ok);
    assert_eq!(disk.write(0, &[2; 8192], Flags::empty()), Status::IoError);
    assert_eq!(disk.read(0, 4096), (Status::Ok, vec![1; 4096]), "nothing of it was written");
    assert_eq!(disk.read(4096, 512).0, Status::IoError);
    assert_eq!(disk.read(8192, 512).0, Status::Ok);
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    assert_eq!(disk.bare(Op::WriteZeroes, 0, 1 << 20), Status::IoError);
    null.change_bad_blocks("-8-15").unwrap();
    assert_eq!(disk.write(0, &[2; 8192], Flags::empty()), Status::Ok);
    null.change_bad_blocks("+0-0").unwrap();
    assert_eq!(disk.read(0, 512).0, Status::IoError);
    assert_eq!(fact(&null, "bad blocks"), "0-0");
}

#[test]
fn partial_io_moves_data_before_a_bad_block() {
    let knobs = Knobs {
        badblocks: "9-9".parse().unwrap(),
        badblocks_partial_io: true,
        blocksize: Bytes(1024),
        ..Knobs::default()
    };
    let (_, mut disk) = disk(true, knobs);
    assert_eq!(disk.write(0, &[7; 8192], Flags::empty()), Status::IoError);
    // Sector 9 is in the block of sectors 8 and 9.
    assert_eq!(disk.read(0, 4096), (Status::Ok, vec![7; 4096]));
    assert_eq!(disk.read(5120, 1024), (Status::Ok, vec![0; 1024]));
    let (status, bytes) = disk.read(2048, 4096);
    assert_eq!((status, &bytes[..2048]), (Status::IoError, &[7; 2048][..]));
}

#[test]
fn a_block_that_is_bad_once_is_good_afterwards() {
    let knobs = Knobs { badblocks: "8-15".parse().unwrap(), badblocks_once: true, ..Knobs::default() };
    let (null, mut disk) = disk(false, knobs);
    assert_eq!(disk.read(0, 8192).0, Status::IoError);
    assert_eq!(disk.read(0, 8192).0, Status::Ok);
    assert_eq!(fact(&null, "bad blocks"), "none left");
}

#[test]
fn a_request_whose_completion_is_dropped_fails_after_five_seconds() {
    let (null, mut disk) =
        disk(true, Knobs { timeout: Some("2:100:0:1".parse().unwrap()), ..Knobs::default() });
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::Ok);
    let before = disk.ring.now.0;
    assert_eq!(disk.write(0, &[2; 512], Flags::empty()), Status::Timeout);
    assert_eq!(disk.ring.now.0 - before, 5_000_000_000);
    assert_eq!(disk.read(0, 512), (Status::Ok, vec![2; 512]), "its data was moved");
    assert_eq!(fact(&null, "timeouts injected"), "1");
}

#[test]
fn a_requeued_request_is_offered_again() {
    let (null, mut disk) =
        disk(true, Knobs { requeue: Some("1:100:0:5".parse().unwrap()), ..Knobs::default() });
    assert_eq!(disk.write(512, &[3; 512], Flags::empty()), Status::Ok);
    assert_eq!(disk.read(512, 512), (Status::Ok, vec![3; 512]));
    assert_eq!(fact(&null, "requeues injected"), "5");
}

#[test]
fn creating_a_queue_can_fail() {
    let (null, _) = disk(false, Knobs { init_hctx: Some("1:100:0:1".parse().unwrap()), ..Knobs::default() });
    assert_eq!(null.admit_queue().unwrap_err().raw_os_error(), Some(libc::EFAULT));
    assert!(null.admit_queue().is_ok());
}

#[test]
fn the_rate_limit_holds() {
    let (_, mut disk) = disk(true, Knobs { mbps: Some(10), ..Knobs::default() });
    let before = disk.ring.now.0;
    for _ in 0..20 {
        assert_eq!(disk.write(0, &[1; 1 << 19], Flags::empty()), Status::Ok);
    }
    let seconds = (disk.ring.now.0 - before) as f64 / 1e9;
    assert!((0.85..1.1).contains(&seconds), "10 MiB at 10 MiB/s took {seconds} s");
}

#[test]
fn no_more_requests_than_tags_are_in_flight() {
    let knobs = Knobs { hw_queue_depth: Some(2), ..Knobs::default() };
    let spec = spec(false, knobs).completing_after(1_000_000);
    let null = Null::new(&spec).unwrap();
    let mut disk = Harness::new(Box::new(null.node(None)));
    let before = disk.ring.now.0;
    for _ in 0..6 {
        disk.submit(block::Request::flush(), &[]);
    }
    assert!(disk.drain().iter().all(|end| end.0 == Status::Ok));
    let took = disk.ring.now.0 - before;
    assert!((3_000_000..3_500_000).contains(&took), "six by two of 1 ms each took {took} ns");
}

#[test]
fn tags_are_shared_by_the_queues_of_a_device() {
    let knobs = Knobs { sharing: Sharing::Device, hw_queue_depth: Some(1), ..Knobs::default() };
    let shared = gate::Shared::new(&knobs, Bytes::mib(1));
    let tags = tags::Tags::shared(&shared.knobs).unwrap();
    assert!(tags.take(1) && !tags.take(1));
    tags.give_back(None);
    assert!(tags.take(1));
    assert_eq!(Knobs { sharing: Sharing::Process, ..Knobs::default() }.depth(), Some(64));
}

#[test]
fn shared_tags_are_shared_by_all_devices_with_that_option() {
    let tags_of = |sharing| {
        let knobs = Knobs { sharing, hw_queue_depth: Some(1), ..Knobs::default() };
        tags::Tags::shared(&gate::Shared::new(&knobs, Bytes::mib(1)).knobs)
    };
    let [one, other] = [(); 2].map(|()| tags_of(Sharing::Process).unwrap());
    assert!(one.take(1) && !other.take(1), "the other device has it");
    one.give_back(None);
    assert!(other.take(1));
    other.give_back(None);
    assert!(tags_of(Sharing::Queue).is_none(), "a queue counts its own");
}

#[test]
fn a_dropped_queue_returns_its_shared_tags() {
    let knobs = Knobs { sharing: Sharing::Device, hw_queue_depth: Some(1), ..Knobs::default() };
    let null = Null::new(&spec(false, knobs).completing_after(1_000_000)).unwrap();
    let mut gone = Harness::new(Box::new(null.node(None)));
    gone.submit(block::Request::flush(), &[]);
    drop(gone);
    let mut disk = Harness::new(Box::new(null.node(None)));
    disk.submit(block::Request::flush(), &[]);
    assert_eq!(disk.drain()[0].0, Status::Ok);
    assert!(disk.ring.now.0 < 3_000_000, "it waited for a tag");
}

#[test]
fn a_flush_empties_the_cache() {
    let knobs = Knobs { cache_size: Some(Bytes(16384)), discard: true, ..Knobs::default() };
    let (null, mut disk) = disk(true, knobs);
    let held = || fact(&null, "write cache").split(' ').next().unwrap().to_owned();
    assert_eq!(disk.write(0, &[1; 8192], Flags::empty()), Status::Ok);
    assert_eq!(disk.write(65536, &[1; 4096], Flags::FUA), Status::Ok);
    assert_eq!(held(), "8K");
    assert_eq!(disk.write(0, &[1; 32768], Flags::empty()), Status::Ok);
    assert_eq!(held(), "16K", "the rest was evicted");
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    assert_eq!(held(), "0");
    assert_eq!(disk.read(0, 512), (Status::Ok, vec![1; 512]));
}

#[test]
fn blocking_requests_wait_for_a_turn() {
    let (_, mut disk) = disk(true, Knobs { blocking: true, ..Knobs::default() });
    disk.submit(block::Request::flush(), &[]);
    assert_eq!(disk.ring.timers(), 1, "it was not answered where it was submitted");
    assert_eq!(disk.drain()[0].0, Status::Ok);
}
