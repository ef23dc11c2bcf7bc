//! null_blk's options on `null:`, through the real binary: their effects on a client, and changes online.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::Sandbox;
use proto::nbd::{CommandFlags, NbdError};
use std::time::{Duration, Instant};

#[test]
fn bad_blocks_are_added_and_removed_online() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("null:1M,memory_backed,badblocks=8-15,badblocks_partial_io", &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.write(0, &[1; 8192], CommandFlags::empty()), Err(NbdError::Io));
    assert_eq!(peer.read(0, 4096), Ok(vec![1; 4096]), "what lay before the bad block was written");
    sandbox.run(&["set", "disk", "badblocks=-8-15"]).ok();
    assert_eq!(peer.write(0, &[2; 8192], CommandFlags::empty()), Ok(()));
    sandbox.run(&["set", "disk", "badblocks=+0-0"]).ok();
    assert_eq!(peer.read(0, 512), Err(NbdError::Io));
    assert_eq!(peer.read(4096, 4096), Ok(vec![2; 4096]));
    let printed = sandbox.run(&["set", "disk", "badblocks=+5000-5001"]).failed_with(1);
    assert!(printed.contains("not a range of sectors on the device"), "{printed}");
}

#[test]
fn a_rate_limit_slows_a_client() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("null:64M,mbps=20", &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let before = Instant::now();
    for _ in 0..20 {
        peer.write(0, &[0; 1 << 20], CommandFlags::empty()).expect("a write");
    }
    let took = before.elapsed();
    assert!(took > Duration::from_millis(850), "20 MiB at 20 MiB/s took {took:?}");
}

#[test]
fn options_without_effect_are_refused() {
    let sandbox = Sandbox::default();
    for (stack, words) in [
        ("null:1M,discard", "discard does nothing without memory_backed"),
        ("null:1M,cache_size=1M", "cache_size does nothing without memory_backed"),
        ("null:1M,memory_backed,discard,zoned,zone_size=64K", "discard does not go with zoned"),
        ("null:1M,badblocks=2048-2048", "beyond the device"),
    ] {
        let printed = sandbox.run(&["serve", stack, "--nbd", "unix:other.sock"]).failed_with(1);
        assert!(printed.contains(words), "no \"{words}\" in: {printed}");
    }
}
