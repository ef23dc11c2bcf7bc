//! Schedulers with the real program: merges in iostat's columns and in a trace, and a switch under a client
//! that verifies its reads.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, noise};
use blockyard_tests::tools;
use proto::nbd::CommandFlags;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Returns a column of the one line of `stat -x`.
fn column(sandbox: &Sandbox, name: &str, which: &str) -> f64 {
    let text = sandbox.run(&["stat", "-x", name]).ok();
    let mut lines = text.lines().filter(|line| !line.is_empty());
    let at = lines.next().and_then(|head| head.split_whitespace().position(|word| word == which));
    let value = lines.next().and_then(|line| line.split_whitespace().nth(at?));
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {which} in {text}"))
}

fn fact(sandbox: &Sandbox, name: &str, which: &str) -> String {
    let shown: Value = serde_json::from_str(&sandbox.run(&["show", name, "--json"]).ok()).expect("JSON");
    shown["backend"][which].as_str().unwrap_or_default().to_owned()
}

#[test]
fn blk_sequential_writes_of_fio_are_merged_and_stat_shows_it() {
    if tools::missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::default();
    // One request at the device at a time, for a while: the others gather.
    let stack = "null:1G,irqmode=timer,completion=20ms";
    let server = sandbox.serve(stack, &["--name", "disk", "--scheduler", "mq-deadline,queue_depth=1"]);
    let uri = format!("--uri={}", server.uri());
    let job = ["fio", "--name=j", "--ioengine=nbd", "--rw=write", "--bs=4k", "--iodepth=32", "--size=4M"];
    tools::run(&mut sandbox.tool(&[&job[..], &[uri.as_str()]].concat())).ok();
    assert!(column(&sandbox, "disk", "%wrqm") > 20.0, "{}", sandbox.run(&["stat", "-x", "disk"]).ok());
    assert!(column(&sandbox, "disk", "wareq-sz") > 4.0);
}

/// Writes and reads back while schedulers change.
#[test]
fn schedulers_are_switched_under_load_without_loss() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:16M", &["--name", "disk", "--limits", "max_sectors=255"]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (socket, stop) = (server.socket(), &done);
        let writer = scope.spawn(move || {
            let mut peer = Peer::connect(&socket, "disk");
            let mut rounds = 0;
            while !stop.load(Relaxed) || rounds < 3 {
                let at = (rounds % 7) * 512 * 33;
                let data = noise(rounds, 300 << 10);
                peer.write(at, &data, CommandFlags::empty()).expect("written");
                assert_eq!(peer.read(at, data.len() as u64).expect("read"), data, "round {rounds}");
                rounds += 1;
            }
        });
        for (text, shown) in [
            ("mq-deadline,queue_depth=2", "none [mq-deadline] kyber"),
            ("kyber", "none mq-deadline [kyber]"),
            ("none", "[none] mq-deadline kyber"),
            ("kyber,write_lat_nsec=5ms", "none mq-deadline [kyber]"),
            ("mq-deadline", "none [mq-deadline] kyber"),
        ] {
            sandbox.run(&["set", "disk", &format!("scheduler={text}")]).ok();
            assert_eq!(fact(&sandbox, "disk", "scheduler"), shown);
        }
        done.store(true, Relaxed);
        writer.join().expect("every write was read back");
    });
    sandbox.run(&["set", "disk", "read_expire=250"]).ok();
    assert_eq!(fact(&sandbox, "disk", "read_expire"), "250");
    let layers: Value = serde_json::from_str(&sandbox.run(&["show", "disk", "--json"]).ok()).expect("JSON");
    assert_eq!(layers["layers"], serde_json::json!(["mq-deadline,read_expire=250", "split,max_sectors=255"]));
    for (change, code, why) in [
        ("read_lat_nsec=1ms", 1, "mq-deadline has no parameter"),
        ("prio_aging_expire=1", 1, "no priorities"),
        ("scheduler=bfq", 2, "schedulers: none, mq-deadline, kyber"),
    ] {
        let reported = sandbox.run(&["set", "disk", change]).failed_with(code);
        assert!(reported.contains(why), "{change}: {reported}");
    }
}
