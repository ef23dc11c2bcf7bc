//! Queue limits of served devices: listed, changed under load, refused with the reason, passed to hosts.

use blockyard_tests::disk::{Loop, missing_loop};
use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Engine, Sandbox, noise};
use proto::nbd::CommandFlags;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const MIB: u64 = 1 << 20;

on_both_engines!(limits_change_under_load_without_loss,);

fn limits(sandbox: &Sandbox, name: &str, arguments: &[&str]) -> Value {
    let reported = sandbox.run(&[&["limits", name, "--json"], arguments].concat()).ok();
    serde_json::from_str(&reported).expect("limits prints JSON")
}

/// Each client writes and reads back a range of its own while limits change.
fn limits_change_under_load_without_loss(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("disk.img", 16 * MIB);
    let stack = format!("file:{}", image.display());
    let server = sandbox.serve(&stack, &["--name", "disk", "--queues", "2"]);
    let done = AtomicBool::new(false);
    let changes = [
        &["max_sectors=255", "max_segments=128"][..],
        &["max_sectors_kb=4", "max_segment_size=4096", "seg_boundary_mask=0xffff"],
        &["virt_boundary_mask=4095", "chunk_sectors=97"],
        &["--reset"],
    ];
    std::thread::scope(|scope| {
        let writers = [0, 1].map(|part: u64| {
            let (socket, done) = (server.socket(), &done);
            scope.spawn(move || {
                let mut peer = Peer::connect(&socket, "disk");
                let mut rounds = 0;
                while !done.load(Relaxed) || rounds < 3 {
                    let at = part * 4 * MIB + (rounds % 7) * 512 * 33;
                    let data = noise(part * 1000 + rounds, 96 << 10);
                    peer.write(at, &data, CommandFlags::empty()).expect("written");
                    assert_eq!(peer.read(at, data.len() as u64).expect("read"), data, "round {rounds}");
                    peer.zero(at, 64 << 10, CommandFlags::empty()).expect("zeroed");
                    assert_eq!(peer.read(at, 64 << 10).expect("read"), vec![0; 64 << 10]);
                    rounds += 1;
                }
            })
        });
        for change in changes {
            let reported = limits(&sandbox, "disk", change);
            let whole = reported["limits"]["max_sectors"] == 65536;
            assert_eq!(whole, change[0] == "--reset", "{reported}");
            assert_eq!(reported["set"] == "", change[0] == "--reset", "{reported}");
        }
        done.store(true, Relaxed);
        for writer in writers {
            writer.join().expect("every write was read back");
        }
    });
}

#[test]
fn blk_limits_are_listed_and_refused_with_the_reason() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:4M", &["--name", "disk", "--limits", "max_sectors_kb=127,io_min=8K"]);
    let reported = limits(&sandbox, "disk", &[]);
    assert_eq!(reported["set"], "max_sectors=254,io_min=8192");
    let shown: Value = serde_json::from_str(&sandbox.run(&["show", "disk", "--json"]).ok()).expect("JSON");
    assert_eq!(shown["limits"], reported["limits"], "show agrees");
    let text = sandbox.run(&["limits", "disk"]).ok();
    for field in block::QueueLimits::FIELDS {
        assert!(reported["limits"][field.name].is_u64(), "{}", field.name);
        assert!(text.lines().any(|line| line.split_whitespace().next() == Some(field.name)), "{text}");
    }
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(0, &noise(1, 4096), CommandFlags::empty()).expect("it is served");
    for (word, code, why) in [
        ("max_integrity_segments=1", 2, "read-only: integrity data is never cut here"),
        ("atomic_write_max_bytes=4096", 2, "read-only: it is computed"),
        ("features=0", 2, "read-only: it is determined by the devices below"),
        ("nonsense=1", 2, "unknown limit \"nonsense\""),
        ("max_sectors_kb=3", 1, "at least 8 sectors"),
        ("max_hw_sectors_kb=1048576", 1, "must not be above that of the device below"),
        ("max_open_zones=3", 1, "must be 0 on a device that is not zoned"),
        ("logical_block_size=4096", 1, "uses blocks of 512"),
    ] {
        let printed = sandbox.run(&["limits", "disk", word]).failed_with(code);
        assert!(
            printed.contains(why) && printed.starts_with("blockyard: limits failed: disk: "),
            "{word}: {printed}"
        );
    }
    assert_eq!(limits(&sandbox, "disk", &[])["limits"], reported["limits"], "nothing has changed");
    // As in sysfs: a value that is too large is reduced, and 0 resets it.
    assert_eq!(limits(&sandbox, "disk", &["max_sectors_kb=1048576"])["sysfs"]["max_sectors_kb"], 32768);
    assert_eq!(limits(&sandbox, "disk", &["max_sectors_kb=0"])["limits"]["max_sectors"], 8192);
    assert_eq!(limits(&sandbox, "disk", &["rotational=1"])["limits"]["rotational"], 1);
    let reported = &limits(&sandbox, "disk", &["--reset"])["notified"];
    assert!(
        reported[server.uri()].as_str().is_some_and(|printed| printed.contains("cannot report them")),
        "{reported}"
    );
}

#[test]
fn limits_apply_through_tables_servers_and_stacked_devices() {
    let sandbox = Sandbox::default();
    let far = sandbox.serve("ram:8M", &["--name", "far"]);
    let near = sandbox.path("near.sock").display().to_string();
    let topology = format!(
        "[device.near]\nstack = \"nbd:{}\"\n[device.low]\nstack = \"ram:8M\"\n\
         [device.high]\ntable = \"0 8192 linear low 64\\n8192 4096 linear low 0\"\n\
         [[export]]\ndevice = \"high\"\nnbd = \"unix:{near}\"\n\
         [[export]]\ndevice = \"near\"\nnbd = \"unix:{near}\"\n",
        far.uri()
    );
    let up = sandbox.up(&topology, 2);
    for name in ["near", "high"] {
        let mut peer = Peer::connect(&up.socket(), name);
        let changed = limits(&sandbox, name, &["max_sectors=16", "max_segments=1"]);
        assert_eq!(changed["limits"]["max_sectors"], 16, "{changed}");
        let data = noise(3, 64 << 10);
        peer.write(4 * MIB - 4096, &data, CommandFlags::empty()).expect("written");
        assert_eq!(peer.read(4 * MIB - 4096, 64 << 10).expect("read"), data);
        let stat = sandbox.run(&["stat", "-x", name, "--json"]).ok();
        let stat: Value = serde_json::from_str(stat.lines().next().expect("a line")).expect("JSON");
        let size = stat["disk"][0]["wareq-sz"].as_f64();
        assert!(size.is_some_and(|kib| kib > 0.0 && kib <= 8.0), "{stat}");
    }
    // The device above gets the new limit, too.
    limits(&sandbox, "low", &["max_hw_sectors=8"]);
    assert_eq!(limits(&sandbox, "high", &[])["limits"]["max_sectors"], 8);
    limits(&sandbox, "low", &["--reset"]);
    assert_eq!(limits(&sandbox, "high", &[])["limits"]["max_sectors"], 16);
}

#[test]
fn limits_are_written_to_the_kernels_sysfs_files() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let disk = Loop::serve(&sandbox, "disk", "ram:8M", &[]);
    let file = format!("/sys/block/{}/queue/max_sectors_kb", disk.path().trim_start_matches("/dev/"));
    let holds = || std::fs::read_to_string(&file).expect("the kernel says").trim().to_owned();
    let before = holds();
    let reported = limits(&sandbox, "disk", &["max_sectors=255"]);
    let printed = reported["notified"][disk.path()].as_str().expect("a notification").to_owned();
    if printed.contains("not reported: max_sectors_kb") {
        return blockyard_tests::tools::skip(printed);
    }
    assert_eq!(holds(), "127", "{printed}");
    limits(&sandbox, "disk", &["--reset"]);
    assert_eq!(holds(), before);
}
