//! Layers with options that are changed while their device is served: `set NAME LAYER.OPTION=VALUE`.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Engine, Sandbox};
use proto::nbd::CommandFlags;
use std::time::{Duration, Instant};

on_both_engines!(
    a_throttled_device_obeys_its_rate_and_a_new_one_at_once,
    throttled_devices_of_a_group_share_its_rate,
    a_layer_that_cannot_change_online_is_replaced,
);

/// Returns the time of this number of reads, one after the other.
fn reads(peer: &mut Peer, count: u32) -> Duration {
    let start = Instant::now();
    for number in 0..count {
        peer.read(u64::from(number) * 4096, 4096).expect("a read");
    }
    start.elapsed()
}

fn shown(sandbox: &Sandbox, device: &str, word: &str) -> String {
    let text = sandbox.run(&["show", device]).ok();
    text.lines().find(|line| line.contains(word)).unwrap_or_else(|| panic!("no {word} in {text}")).to_owned()
}

fn a_throttled_device_obeys_its_rate_and_a_new_one_at_once(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let server = sandbox.serve("ram:16M", &["--layer", "throttle,iops=100,burst=0"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let took = reads(&mut peer, 31);
    assert!(took >= Duration::from_millis(290), "31 reads at 100 a second took {took:?}");
    assert!(shown(&sandbox, "disk", "throttled").contains("iops=100, burst=0"));
    // A read that would be held for 100 s continues under the new limit.
    sandbox.run(&["set", "disk", "throttle.bps=4K"]).ok();
    peer.read(0, 400 << 10).expect("the first goes at once");
    let start = Instant::now();
    std::thread::scope(|scope| {
        let held = scope.spawn(|| peer.read(0, 4096).map(|_| start.elapsed()));
        sandbox.await_in_flight("disk", "throttle");
        sandbox.run(&["set", "disk", "throttle.bps=1G"]).ok();
        let took = held.join().expect("no panic").expect("a read");
        assert!(took < Duration::from_secs(60), "{took:?}");
    });
    sandbox.run(&["set", "disk", "throttle.iops=1000000"]).ok();
    let took = reads(&mut peer, 200);
    assert!(took < Duration::from_secs(2), "200 reads at a million a second took {took:?}");
    for (change, why) in [
        ("throttle.iops=0", "would block every request"),
        ("throttle.rate=5", "throttle has no option \"rate\""),
        ("delay.read=5ms", "it has no layer delay whose options could be changed"),
        ("raid.level=5", "unknown layer \"raid\" (layers: split, "),
        ("dleay.read=1ms", "unknown layer \"dleay\" (did you mean delay? layers: split, "),
    ] {
        let refused = sandbox.run(&["set", "disk", change]);
        assert!(!refused.status.success() && refused.stderr.contains(why), "{change}: {refused}");
    }
    assert!(shown(&sandbox, "disk", "throttled").contains("iops=1000000"), "what was refused left no trace");
}

fn throttled_devices_of_a_group_share_its_rate(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let topology = "[device.a]\nstack = \"ram:1M\"\nlayers = [\"throttle,iops=100,burst=0,group=tenant\"]\n\
                    [[export]]\ndevice = \"a\"\nnbd = \"unix:a.sock\"\n\
                    [device.b]\nstack = \"ram:1M\"\nlayers = [\"throttle,group=tenant\"]\n\
                    [[export]]\ndevice = \"b\"\nnbd = \"unix:b.sock\"\n";
    let _server = sandbox.up(topology, 2);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for device in ["a", "b"] {
            let socket = sandbox.path(&format!("{device}.sock"));
            scope.spawn(move || reads(&mut Peer::connect(&socket, device), 20));
        }
    });
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(380), "40 reads at 100 a second took {took:?}");
    assert!(shown(&sandbox, "b", "throttle group").contains("tenant (2 devices)"));
}

fn a_layer_that_cannot_change_online_is_replaced(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let layers =
        ["--layer", "delay,read=1ns", "--layer", "cow,file=new.cow,create", "--layer", "split,max_sectors=8"];
    let server = sandbox.serve("ram:1M", &layers);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(8192, &[7; 4096], CommandFlags::empty()).expect("a write");
    sandbox.run(&["set", "disk", "delay.read=100ms"]).ok();
    let took = reads(&mut peer, 1);
    assert!(took >= Duration::from_millis(100), "{took:?}");
    // Data in the overlay above is not delayed.
    let start = Instant::now();
    assert_eq!(peer.read(8192, 4096).expect("a read"), [7; 4096]);
    assert!(start.elapsed() < Duration::from_millis(100));
    assert!(shown(&sandbox, "disk", "delay").contains("delay,read=100ms"));
}
