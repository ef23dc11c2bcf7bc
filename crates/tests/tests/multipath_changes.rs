//! A multipath device over two healthy servers that is suspended, resumed and changed under load, with
//! `reconnect=0`: the default of a path, with which a request fails as soon as its connection is lost.
//!
//! Required: no request fails, no path fails, no connection counts as lost, and the final flush succeeds.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{fio, over, serve_as, table_as};
use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, missing, wait_within};
use proto::nbd::CommandFlags;

on_both_engines!(suspensions_fail_no_request, changes_fail_no_request);

const MIB: u64 = 1 << 20;

/// Returns two servers of one image, and a multipath device over both without `queue_if_no_path`.
fn paths(sandbox: &Sandbox) -> ([Server; 2], Server, String) {
    let image = sandbox.image("image", 64 * MIB).to_string_lossy().into_owned();
    let stack = format!("file:{image},share");
    let servers = ["one", "two"].map(|name| serve_as(sandbox, name, &stack, &[]));
    let [one, two] = servers.each_ref().map(|server| format!("nbd:{}", server.uri()));
    // Shorter than the image: the next table may be longer.
    let line = format!("0 98304 multipath 0 0 1 1 round-robin 0 2 1 {one} 1 {two} 1");
    let device = table_as(sandbox, "m", &line, &["--queues", "2", "--multipath", "checker=off"]);
    (servers, device, line)
}

/// Runs `cycle` repeatedly while fio writes and verifies, then ends the device: nothing may have failed.
#[track_caller]
fn under_load(sandbox: &Sandbox, mut device: Server, cycles_min: u32, cycle: impl Fn(u32)) {
    let mut load = fio(&device, "--size=8M --bs=512-16k --iodepth=8 --numjobs=2 --offset_increment=32M");
    load.args(["--verify_backlog=64", "--time_based", "--runtime=4", "--fsync=16", "--output=/dev/null"]);
    let mut load = load.spawn().unwrap();
    let mut cycles = 0;
    while cycles < cycles_min || load.try_wait().unwrap().is_none() {
        cycle(cycles);
        cycles += 1;
    }
    let ended = wait_within(&mut load, PATIENCE).expect("fio ends");
    assert!(ended.success(), "{ended} after {cycles} cycles: {}", device.log());
    let status = sandbox.run(&["status", "m"]).ok();
    assert!(!status.contains(" F "), "a path failed: {status}\n{}", device.log());
    sandbox.run(&["del", "m"]).ok();
    assert!(device.wait().success(), "{}", device.log());
    for words in ["a path failed", "final flush", "was lost"] {
        assert!(!device.log().contains(words), "{words}: {}", device.log());
    }
}

fn suspensions_fail_no_request(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let (_servers, device, _) = paths(&sandbox);
    under_load(&sandbox, device, 20, |cycle| {
        let flush = if cycle % 3 == 2 { &["suspend", "m", "--noflush"][..] } else { &["suspend", "m"][..] };
        sandbox.run(flush).ok();
        sandbox.run(&["resume", "m"]).ok();
    });
}

fn changes_fail_no_request(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let (_servers, device, line) = paths(&sandbox);
    let table = sandbox.text("next.table", &line).to_string_lossy().into_owned();
    let longer = line.replacen("98304", "131072", 1);
    let longer = sandbox.text("longer.table", &longer).to_string_lossy().into_owned();
    under_load(&sandbox, device, 16, |cycle| match cycle % 4 {
        0 => sandbox.run(&["set", "m", "scheduler=mq-deadline"]).ok().clear(),
        1 => sandbox.run(&["set", "m", "scheduler=none"]).ok().clear(),
        turn => {
            sandbox.run(&["table", "m", "--load", if turn == 2 { &longer } else { &table }]).ok();
            if cycle % 8 > 4 {
                sandbox.run(&["suspend", "m"]).ok();
            }
            sandbox.run(&["resume", "m"]).ok();
        }
    });
}

/// A server that accepts a single connection: a suspension must neither lose it nor open a second one.
#[test]
fn a_single_connection_server_survives_suspensions() {
    if missing(&["nbdkit"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 4 * MIB).to_string_lossy().into_owned();
    let back = blockyard_tests::remote::Foreign::nbdkit(
        &sandbox,
        &["--filter=multi-conn", "file", &image, "multi-conn-mode=disable"],
    );
    let mut device = over(&sandbox, &format!("{},reconnect=0", back.uri("")), &[]);
    let mut peer = Peer::connect(&device.socket(), "front");
    for cycle in 0..10u8 {
        peer.write(0, &[cycle; 4096], CommandFlags::empty()).unwrap();
        let flush =
            if cycle % 2 == 0 { &["suspend", "front"][..] } else { &["suspend", "front", "--noflush"][..] };
        sandbox.run(flush).ok();
        sandbox.run(&["resume", "front"]).ok();
        assert_eq!(peer.read(0, 4096).unwrap(), [cycle; 4096]);
    }
    peer.disconnect();
    sandbox.run(&["suspend", "front"]).ok();
    sandbox.run(&["del", "front"]).ok();
    assert!(device.wait().success(), "{}", device.log());
    assert!(!device.log().contains("was lost"), "{}", device.log());
}
