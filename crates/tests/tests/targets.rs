//! Every target with the real binary: reads and writes of a client, the content of the devices below, status,
//! table and messages.

use blockyard_tests::disk::missing_loop;
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::table_as;
use blockyard_tests::server::{Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, until};
use proto::nbd::{CommandFlags, NbdError};
use rustix::process::Signal;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PLAIN: CommandFlags = CommandFlags::empty();

fn connect(server: &Server, name: &str) -> Peer {
    Peer::connect(&server.socket(), name)
}

fn file(sandbox: &Sandbox, name: &str) -> Vec<u8> {
    std::fs::read(sandbox.path(name)).expect("a file")
}

#[test]
fn striped_maps_chunks_to_devices_in_turn() {
    let sandbox = Sandbox::default();
    sandbox.image("a.img", MIB);
    sandbox.image("b.img", 2 * MIB);
    let server = table_as(&sandbox, "s", "0 4096 striped 2 16 a.img 0 b.img 2048", &[]);
    let mut peer = connect(&server, "s");
    let data = noise(1, 64 << 10);
    peer.write(4096, &data, PLAIN).unwrap();
    peer.flush().unwrap();
    assert_eq!(peer.read(4096, 64 << 10).unwrap(), data);
    let (a, b) = (file(&sandbox, "a.img"), file(&sandbox, "b.img"));
    assert_eq!((&a[4096..8192], &b[1 << 20..(1 << 20) + 8192]), (&data[..4096], &data[4096..12288]));
    assert_eq!(a[8192..16384], data[12288..20480]);
    peer.trim(0, 2 * MIB).unwrap();
    assert_eq!(peer.read(4096, 64 << 10).unwrap(), vec![0; 64 << 10]);
    assert_eq!(sandbox.run(&["table", "s"]).ok(), "0 4096 striped 2 16 a.img 0 b.img 2048\n");
    assert_eq!(sandbox.run(&["status", "s"]).ok(), "0 4096 striped 2 a.img b.img 1 AA\n");
    peer.disconnect();
}

#[test]
fn unstriped_shows_one_stripe() {
    let sandbox = Sandbox::default();
    let image = sandbox.noise("a.img", 1 << 20);
    let server = table_as(&sandbox, "u", "0 1024 unstriped 2 16 1 a.img 0", &[]);
    let mut peer = connect(&server, "u");
    let whole = std::fs::read(image).unwrap();
    let stripe: Vec<u8> = whole.chunks(16384).flat_map(|row| &row[8192..]).copied().collect();
    assert_eq!(peer.read(0, 512 << 10).unwrap(), stripe);
    assert_eq!(sandbox.run(&["table", "u"]).ok(), "0 1024 unstriped 2 16 1 a.img 0\n");
    peer.disconnect();
}

#[test]
fn delay_as_a_target_and_as_a_layer_delays_requests() {
    let sandbox = Sandbox::default();
    let took = |peer: &mut Peer, write: bool| {
        let before = Instant::now();
        if write {
            peer.write(0, &[1; 512], PLAIN).unwrap()
        } else {
            drop(peer.read(0, 512).unwrap())
        }
        before.elapsed()
    };
    let table = table_as(&sandbox, "d", "0 2048 delay ram:1M 0 40 ram:1M 0 0", &[]);
    let mut peer = connect(&table, "d");
    assert!(took(&mut peer, false) >= Duration::from_millis(40));
    took(&mut peer, true);
    assert_eq!(sandbox.run(&["status", "d"]).ok(), "0 2048 delay 0 0 0\n");
    assert_eq!(sandbox.run(&["table", "d"]).ok(), "0 2048 delay ram:1M 0 40 ram:1M 0 0\n");
    peer.disconnect();
    let layer = sandbox.serve("ram:1M", &["--layer", "delay,write=40ms"]);
    let mut peer = connect(&layer, "disk");
    assert!(took(&mut peer, true) >= Duration::from_millis(40));
    assert_eq!(peer.read(0, 512).unwrap(), [1; 512]);
    peer.disconnect();
}

#[test]
fn flakey_devices_fail_by_their_features() {
    let sandbox = Sandbox::default();
    let server = table_as(&sandbox, "f", "0 2048 flakey ram:1M 0 0 1 1 drop_writes\n", &[]);
    let mut peer = connect(&server, "f");
    assert_eq!(peer.write(0, &[1; 512], PLAIN), Ok(()));
    assert_eq!(peer.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(sandbox.run(&["table", "f"]).ok(), "0 2048 flakey ram:1M 0 0 1 1 drop_writes\n");
    peer.disconnect();
    let server = sandbox.serve("ram:1M", &["--layer", "flakey,down=1,corrupt_bio_byte=2:r:9:0"]);
    let mut peer = connect(&server, "disk");
    assert_eq!(peer.write(0, &[1; 512], PLAIN), Ok(()));
    assert_eq!(peer.read(0, 512).unwrap()[..3], [1, 9, 1]);
    peer.disconnect();
}

#[test]
fn dust_and_switch_obey_messages() {
    let sandbox = Sandbox::default();
    sandbox.noise("a.img", 1 << 20);
    let table = "0 1024 dust a.img 0 512\n1024 1024 switch 2 512 0 ram:1M 0 a.img 0\n";
    let server = table_as(&sandbox, "m", table, &[]);
    let mut peer = connect(&server, "m");
    let tell = |arguments: &[&str]| sandbox.run(&[&["message", "m"], arguments].concat());
    tell(&["0", "addbadblock", "3"]).ok();
    tell(&["0", "enable"]).ok();
    assert_eq!(peer.read(0, 1024).map(|data| data.len()), Ok(1024));
    assert_eq!(peer.read(1536, 512), Err(NbdError::Io));
    assert_eq!(tell(&["0", "countbadblocks"]).ok(), "countbadblocks: 1 badblock(s) found\n");
    assert_eq!(peer.write(1536, &[1; 512], PLAIN), Ok(()));
    assert_eq!(peer.read(1536, 512), Ok(vec![1; 512]));
    assert!(tell(&["0", "addbadblock", "x"]).failed_with(1).contains("Invalid argument"));
    // Region 0 of the switch is in memory, region 1 in the file, until a message changes that.
    let image = file(&sandbox, "a.img");
    assert_eq!(peer.read(512 << 10, 512), Ok(vec![0; 512]));
    tell(&["1024", "set_region_mappings", "0:1", "R1,1"]).ok();
    assert_eq!(peer.read(512 << 10, 512).unwrap(), image[..512]);
    let status = sandbox.run(&["status", "m"]).ok();
    let first = "0 1024 dust a.img fail_read_on_bad_block verbose\n";
    assert!(status.starts_with(first), "{status}");
    peer.disconnect();
}

#[test]
fn a_log_of_writes_is_replayed_to_its_marks() {
    let sandbox = Sandbox::default();
    sandbox.image("a.img", MIB);
    sandbox.image("log.img", 4 * MIB);
    let mut server = table_as(&sandbox, "l", "0 2048 log-writes a.img log.img", &[]);
    let mut peer = connect(&server, "l");
    let (one, two) = (noise(1, 8192), noise(2, 4096));
    peer.write(0, &one, PLAIN).unwrap();
    peer.flush().unwrap();
    sandbox.run(&["message", "l", "0", "mark", "first"]).ok();
    peer.write(4096, &two, PLAIN).unwrap();
    peer.trim(0, 4096).unwrap();
    peer.flush().unwrap();
    assert_eq!(sandbox.run(&["status", "l"]).ok(), "0 2048 log-writes 6 30\n");
    peer.disconnect();
    server.terminate();
    let replayed = |name: &str, more: &[&str]| {
        sandbox.image(name, MIB);
        sandbox.run(&[&["replay-log", "--log", "log.img", "--replay", name], more].concat()).ok();
        file(&sandbox, name)
    };
    assert_eq!(replayed("first.img", &["--end-mark", "first"])[..8192], one);
    let all = replayed("all.img", &[]);
    assert_eq!((&all[..4096], &all[4096..8192]), (&[0; 4096][..], &two[..]));
    assert!(all == file(&sandbox, "a.img"));
    assert_eq!(replayed("none.img", &["--limit", "0"])[..4096], [0; 4096]);
    let listed = sandbox.run(&["replay-log", "--log", "log.img"]).ok();
    // The removal of the device causes the last flush.
    let wanted = "0 write sector 0 size 16\n1 flush\n2 mark first\n3 write sector 8 size 8\n\
                  4 discard sector 0 size 8\n5 flush\n6 flush\n";
    assert_eq!(listed, wanted);
    assert_eq!(sandbox.run(&["replay-log", "--log", "log.img", "--num-entries"]).ok(), "7\n");
    let refused = sandbox.run(&["replay-log", "--log", "log.img", "--end-mark", "second"]).failed_with(1);
    assert!(refused.contains("the log has no mark \"second\""), "{refused}");
}

#[test]
fn the_log_layer_creates_its_file() {
    let sandbox = Sandbox::default();
    sandbox.image("a.img", MIB);
    let log = format!("log,file={},size=4M,create", sandbox.path("w.log").display());
    let mut server = sandbox.serve(&format!("file:{}", sandbox.path("a.img").display()), &["--layer", &log]);
    let mut peer = connect(&server, "disk");
    peer.write(0, &[3; 4096], CommandFlags::FUA).unwrap();
    peer.disconnect();
    server.terminate();
    assert_eq!(
        sandbox.run(&["replay-log", "--log", "w.log", "--limit", "1"]).ok(),
        "0 write sector 0 size 8 fua\n"
    );
}

#[test]
fn a_snapshot_shows_its_origins_old_data_and_survives_a_restart() {
    let sandbox = Sandbox::default();
    let before = std::fs::read(sandbox.noise("base.img", 1 << 20)).unwrap();
    sandbox.image("cow.img", 4 * MIB);
    // The origin is opened after its snapshot, wherever it is listed.
    let topology = "[device.base]\ntable = \"0 2048 snapshot-origin base.img\"\n\
                    [device.snap]\ntable = \"0 2048 snapshot base.img cow.img P 16\"\n\
                    [[export]]\ndevice = \"snap\"\nnbd = \"unix:y.sock\"\n\
                    [[export]]\ndevice = \"base\"\nnbd = \"unix:y.sock\"\n";
    let mut server = sandbox.up(topology, 2);
    let (mut snap, mut base) = (connect(&server, "snap"), connect(&server, "base"));
    let (old, new) = (noise(5, 4096), noise(6, 12288));
    snap.write(0, &old, PLAIN).unwrap();
    let table = sandbox.text("same.table", "0 2048 snapshot base.img cow.img P 16");
    sandbox.run(&["table", "snap", "--load", &table.to_string_lossy()]).ok();
    // Copies between load and resume belong to the next table as well.
    base.write(4096, &new, PLAIN).unwrap();
    sandbox.run(&["resume", "snap"]).ok();
    assert_eq!(base.read(0, 1 << 20).unwrap(), [&before[..4096], &new, &before[16384..]].concat());
    let shown = [&old, &before[4096..]].concat();
    assert!(snap.read(0, 1 << 20).unwrap() == shown);
    // A header, an area, and two chunks of 16 sectors.
    assert_eq!(sandbox.run(&["status", "snap"]).ok(), "0 2048 snapshot 64/8192 32\n");
    snap.flush().unwrap();
    snap.disconnect();
    base.disconnect();
    server.terminate();
    let server = table_as(&sandbox, "again", "0 2048 snapshot base.img cow.img P 16", &[]);
    let mut peer = connect(&server, "again");
    assert!(peer.read(0, 1 << 20).unwrap() == shown, "after the restart");
    assert_eq!(sandbox.run(&["table", "again"]).ok(), "0 2048 snapshot base.img cow.img P 16\n");
    peer.disconnect();
}

#[test]
fn writes_to_an_origin_during_shutdown_are_copied_to_its_snapshot() {
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::default();
    let before = std::fs::read(sandbox.noise("base.img", 1 << 20)).unwrap();
    sandbox.image("cow.img", 4 * MIB);
    let topology = "[device.snap]\ntable = \"0 2048 snapshot base.img cow.img P 16\"\n\
                    [device.base]\ntable = \"0 2048 snapshot-origin base.img\"\n\
                    [[export]]\ndevice = \"base\"\nfuse = \"base.raw\"\n";
    let mut server = sandbox.up(topology, 1);
    let base = std::fs::File::options().write(true).open(sandbox.path("base.raw")).expect("it opens");
    server.signal(Signal::TERM);
    server.await_log("base.raw is in use");
    // The snapshot has no users: its device is removed at once.
    let gone = || (!sandbox.run(&["show", "snap"]).status.success()).then_some(());
    until(PATIENCE, gone).expect("the device of the snapshot is removed");
    base.write_all_at(&noise(7, 4096), 65536).expect("it is written");
    base.sync_all().expect("it is stored");
    drop(base);
    assert!(server.wait().success());
    assert_eq!(file(&sandbox, "base.img")[65536..69632], noise(7, 4096));
    let server = table_as(&sandbox, "again", "0 2048 snapshot base.img cow.img P 16", &[]);
    let mut peer = connect(&server, "again");
    assert!(peer.read(0, 1 << 20).unwrap() == before, "the snapshot shows what the origin was");
    peer.disconnect();
}

#[test]
fn a_mirror_resyncs_and_survives_a_failed_device() {
    let sandbox = Sandbox::default();
    let first = std::fs::read(sandbox.noise("a.img", 1 << 20)).unwrap();
    sandbox.image("b.img", MIB);
    sandbox.image("log.img", MIB);
    let table = "0 2048 mirror disk 2 log.img 64 2 a.img 0 b.img 0";
    let mut server = table_as(&sandbox, "m", table, &[]);
    let whole = "0 2048 mirror 2 a.img b.img 32/32 1 AA 3 disk log.img A\n";
    let status = || sandbox.run(&["status", "m"]).ok();
    until(PATIENCE, || (status() == whole).then_some(())).expect("it is in sync");
    assert!(file(&sandbox, "b.img") == first);
    let clean = || (file(&sandbox, "log.img")[1024..1028] == [0xff; 4]).then_some(());
    until(PATIENCE, clean).expect("its log says so soon after");
    let mut peer = connect(&server, "m");
    let data = noise(9, 65536);
    peer.write(512 << 10, &data, PLAIN).unwrap();
    peer.flush().unwrap();
    peer.disconnect();
    server.kill();
    assert!(file(&sandbox, "a.img") == file(&sandbox, "b.img"));
    // The server was killed before the marks were cleared, so only the marked regions are copied.
    let marked = file(&sandbox, "log.img")[1024..1028].iter().map(|byte| byte.count_zeros()).sum::<u32>();
    assert!(marked <= 2, "{marked} regions are marked");
    let table = "0 2048 mirror core 2 64 nosync 2 a.img 0 broken 0 2 handle_errors keep_log";
    let topology = format!(
        "[device.broken]\ntable = \"0 2048 error\"\n[device.m]\ntable = \"{table}\"\n\
         [[export]]\ndevice = \"m\"\nnbd = \"unix:y.sock\"\n"
    );
    let server = sandbox.up(&topology, 1);
    let mut peer = connect(&server, "m");
    assert_eq!(peer.write(0, &data, PLAIN), Ok(()));
    assert_eq!(peer.read(0, 65536), Ok(data));
    assert!(status().contains(" 1 AD 1 core"), "{}", status());
    peer.disconnect();
}

/// The failed leg is the first of its table, and the table stays the same over restarts.
#[test]
fn a_restarted_mirror_knows_the_leg_without_an_acknowledged_write() {
    let sandbox = Sandbox::default();
    for (image, len) in [("a.img", MIB), ("b.img", MIB), ("log.img", 8192)] {
        sandbox.image(image, len);
    }
    let socket = sandbox.path("s.sock");
    let export =
        |name: &str| format!("[[export]]\ndevice = \"{name}\"\nnbd = \"unix:{}\"\n", socket.display());
    let topology = format!(
        "[device.leg]\ntable = \"0 2048 linear a.img 0\"\n\
         [device.m]\ntable = \"0 2048 mirror disk 2 log.img 64 2 leg 0 b.img 0\"\n{}{}",
        export("leg"),
        export("m")
    );
    let status = || sandbox.run(&["status", "m"]).ok();
    let is = |wanted: &str| until(PATIENCE, || (status() == wanted).then_some(())).is_some();
    let whole = "0 2048 mirror 2 leg b.img 32/32 1 AA 3 disk log.img A\n";
    let load = |device: &str, table: &str| {
        let file = sandbox.text("next.table", table);
        sandbox.run(&["table", device, "--load", &file.to_string_lossy()]).ok();
        sandbox.run(&["resume", device]).ok();
    };
    let mut server = sandbox.up(&topology, 2);
    assert!(is(whole), "{}", status());
    load("leg", "0 2048 flakey a.img 0 0 9 1 error_writes");
    let mut peer = connect(&server, "m");
    let data = noise(1, 65536);
    peer.write(0, &data, CommandFlags::FUA).unwrap();
    peer.disconnect();
    assert!(status().contains(" 1 DA 3 disk"), "{}", status());
    server.terminate();
    for killed in [true, false] {
        let mut server = sandbox.up(&topology, 2);
        let mut peer = connect(&server, "m");
        assert_eq!(peer.read(0, 65536).unwrap(), data, "it was acknowledged");
        peer.disconnect();
        std::thread::sleep(Duration::from_millis(500));
        assert!(file(&sandbox, "b.img")[..65536] == data[..], "nothing is copied from a leg that failed");
        assert!(status().contains(" 1 DA 3 disk"), "{}", status());
        let shown = sandbox.run(&["show", "m"]).ok();
        assert!(shown.contains("leg is not used: it missed writes; recorded in log.img"), "{shown}");
        let named = "mirror: leg is not used: it missed writes; recorded in log.img";
        assert!(until(PATIENCE, || server.log().contains(named).then_some(())).is_some(), "{}", server.log());
        if killed { server.kill() } else { server.terminate() }
    }
    // All of it is copied to the leg, which is used from then on.
    let mut server = sandbox.up(&topology, 2);
    load("m", "0 2048 mirror disk 3 log.img 64 sync 2 leg 0 b.img 0");
    assert!(is(whole), "{}", status());
    assert!(file(&sandbox, "a.img")[..65536] == data[..]);
    let cleared = || file(&sandbox, "log.img")[16..1024].iter().all(|&byte| byte == 0).then_some(());
    assert!(until(PATIENCE, cleared).is_some(), "the record goes");
    server.terminate();
    let mut server = sandbox.up(&topology, 2);
    assert_eq!(status(), whole);
    server.terminate();
}
