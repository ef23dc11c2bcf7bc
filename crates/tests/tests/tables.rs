//! Device-mapper's tables with the real binary: parsing, errors and output; two slots, swaps under load,
//! suspending; devices on top of devices.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{fio, fio_verify, table_as};
use blockyard_tests::server::{Engine, Sandbox, noise};
use blockyard_tests::tools::{PATIENCE, missing, until, wait_within};
use proto::nbd::{CommandFlags, NbdError};
use std::time::{Duration, Instant};

on_both_engines!(
    requests_go_to_the_devices_of_the_table,
    tables_swapped_under_load_lose_no_request,
    requests_held_by_a_suspension_are_executed_by_the_next_table,
    a_table_may_be_replaced_by_one_over_another_kind_of_device,
);

const MIB: u64 = 1 << 20;

fn requests_go_to_the_devices_of_the_table(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("a.img", 4 * MIB);
    let table = "0 2048 linear a.img 4096\n2048 2048 zero\n4096 2048 error\n6144 2048 linear a.img 0\n";
    let server = table_as(&sandbox, "t", table, &[]);
    let mut peer = Peer::connect(&server.socket(), "t");
    let data = noise(1, 8192);
    // Over the end of the first target: half of it is kept, the other half is not.
    peer.write(MIB - 4096, &data, CommandFlags::empty()).unwrap();
    peer.write(3 * MIB, &data, CommandFlags::empty()).unwrap();
    peer.flush().unwrap();
    let mut expected = data[..4096].to_vec();
    expected.resize(8192, 0);
    assert_eq!(peer.read(MIB - 4096, 8192).unwrap(), expected);
    assert_eq!(peer.read(2 * MIB, 512), Err(NbdError::Io));
    assert_eq!(peer.read(2 * MIB - 4096, 8192), Err(NbdError::Io), "one piece fails, so does the whole");
    let file = std::fs::read(image).unwrap();
    assert_eq!(file[..8192], data, "what lies at 3 MiB of the device begins the file");
    assert_eq!(file[3 * MIB as usize - 4096..3 * MIB as usize], data[..4096]);
    assert_eq!(sandbox.run(&["table", "t"]).ok().lines().next(), Some("0 2048 linear a.img 4096"));
    assert_eq!(sandbox.run(&["status", "t"]).ok().lines().nth(1), Some("2048 2048 zero "));
    peer.disconnect();
}

fn tables_swapped_under_load_lose_no_request(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    sandbox.image("a.img", 32 * MIB);
    // Equal sectors in parts of several kinds: the table differs, the data must not.
    let tables = [
        "0 65536 linear a.img 0",
        "0 8192 linear a.img 0\n8192 24 linear a.img 8192\n8216 57320 linear a.img 8216",
        "0 65536 multipath 0 0 1 1 round-robin 0 2 0 a.img a.img",
    ]
    .map(|text| text.to_owned());
    let files: Vec<_> =
        tables.iter().enumerate().map(|(n, text)| sandbox.text(&format!("{n}.table"), text)).collect();
    let server = table_as(&sandbox, "t", &tables[0], &["--queues", "2"]);
    let mut load = fio(&server, "--size=8M --bs=512-64k --iodepth=16 --numjobs=2 --offset_increment=16M");
    load.args(["--verify_backlog=64", "--time_based", "--runtime=2", "--fsync=16", "--output=/dev/null"]);
    let mut load = load.spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(2);
    let mut swaps = 0;
    while Instant::now() < end || swaps < 2 {
        // A multipath table is never followed by one of another kind.
        let next = swaps % 2;
        sandbox.run(&["table", "t", "--load", &files[next].to_string_lossy()]).ok();
        sandbox.run(&["resume", "t"]).ok();
        swaps += 1;
    }
    let status = wait_within(&mut load, PATIENCE).expect("fio ends");
    assert!(status.success(), "{status} after {swaps} swaps: {}", server.log());
    sandbox.run(&["table", "t", "--load", &files[2].to_string_lossy()]).ok();
    sandbox.run(&["resume", "t"]).ok();
    fio_verify(&server, "--size=4M --bs=4k --iodepth=8");
    let refused = sandbox.run(&["table", "t", "--load", &files[0].to_string_lossy()]).failed_with(1);
    assert!(refused.contains("can't replace immutable target type multipath"), "{refused}");
}

fn requests_held_by_a_suspension_are_executed_by_the_next_table(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (one, two) = (sandbox.image("one.img", MIB), sandbox.image("two.img", MIB));
    let server = table_as(&sandbox, "t", "0 2048 linear one.img 0", &[]);
    sandbox.run(&["suspend", "t"]).ok();
    let socket = server.socket();
    let data = noise(2, 4096);
    let sent = data.clone();
    let writer = std::thread::spawn(move || {
        let mut peer = Peer::connect(&socket, "t");
        peer.write(0, &sent, CommandFlags::empty()).unwrap();
        peer.flush().unwrap();
        peer.disconnect();
    });
    let table = sandbox.text("two.table", "0 2048 linear two.img 0");
    sandbox.run(&["table", "t", "--load", &table.to_string_lossy()]).ok();
    assert_eq!(sandbox.run(&["table", "t", "--inactive"]).ok(), "0 2048 linear two.img 0\n");
    std::thread::sleep(Duration::from_millis(50));
    assert!(!writer.is_finished(), "it is held back");
    sandbox.run(&["resume", "t"]).ok();
    writer.join().unwrap();
    assert_eq!(std::fs::read(two).unwrap()[..4096], data);
    assert!(std::fs::read(one).unwrap().iter().all(|&byte| byte == 0), "nothing of it went the old way");
}

fn a_table_may_be_replaced_by_one_over_another_kind_of_device(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    sandbox.image("a.img", 4 * MIB);
    let server = table_as(&sandbox, "t", "0 8192 linear ram:4M 0", &[]);
    let mut peer = Peer::connect(&server.socket(), "t");
    let data = noise(3, 65536);
    for table in ["0 8192 linear a.img 0", "0 4096 linear a.img 0\n4096 4096 zero", "0 8192 linear ram:4M 0"]
    {
        sandbox.run(&["suspend", "t"]).ok();
        let socket = server.socket();
        let reader = std::thread::spawn(move || {
            let mut peer = Peer::connect(&socket, "t");
            let read = peer.read(0, 65536).unwrap();
            peer.disconnect();
            read
        });
        std::thread::sleep(Duration::from_millis(30));
        let table = sandbox.text("next.table", table);
        sandbox.run(&["table", "t", "--load", &table.to_string_lossy()]).ok();
        sandbox.run(&["resume", "t"]).ok();
        reader.join().unwrap();
        peer.write(0, &data, CommandFlags::empty()).unwrap();
        assert_eq!(peer.read(0, 65536).unwrap(), data);
    }
    peer.disconnect();
}

#[test]
fn waiting_requests_past_the_end_of_a_smaller_table_fail() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("a.img", 2 * MIB);
    let server = table_as(&sandbox, "t", "0 4096 linear a.img 0", &[]);
    sandbox.run(&["suspend", "t"]).ok();
    let socket = server.socket();
    let writer = std::thread::spawn(move || {
        let mut peer = Peer::connect(&socket, "t");
        assert_eq!(peer.write(MIB, &[7; 512], CommandFlags::empty()), Err(NbdError::Io));
        peer.disconnect();
    });
    // After the load it fits.
    sandbox.await_in_flight("t", "write");
    let table = sandbox.text("small.table", "0 1024 linear a.img 0");
    sandbox.run(&["table", "t", "--load", &table.to_string_lossy()]).ok();
    sandbox.run(&["resume", "t"]).ok();
    writer.join().unwrap();
    assert!(std::fs::read(image).unwrap().iter().all(|&byte| byte == 0), "nothing lies behind the table");
}

#[test]
fn a_loaded_table_uses_the_lower_devices_state_at_resume() {
    let sandbox = Sandbox::default();
    sandbox.image("one.img", MIB);
    let two = sandbox.image("two.img", MIB);
    let topology = format!(
        "ring = \"{}\"\n[device.up]\ntable = \"0 1024 linear low 0\"\n\
         [device.low]\ntable = \"0 2048 linear file:one.img 0\"\n\
         [[export]]\ndevice = \"up\"\nnbd = \"unix:{}\"\n",
        sandbox.engine().name(),
        sandbox.path("s.sock").display()
    );
    sandbox.text("top.toml", &topology);
    let server = sandbox.start(&mut sandbox.blockyard(&["up", "top.toml"]), 1);
    let file = sandbox.text("up.table", "0 1024 linear low 1024");
    sandbox.run(&["table", "up", "--load", &file.to_string_lossy()]).ok();
    // The first is the served file: its lock is not taken twice, although the topology was named without a
    // folder.
    for table in ["0 2048 linear file:one.img 0", "0 2048 linear file:two.img 0"] {
        let file = sandbox.text("low.table", table);
        sandbox.run(&["table", "low", "--load", &file.to_string_lossy()]).ok();
        sandbox.run(&["resume", "low"]).ok();
    }
    sandbox.run(&["resume", "up"]).ok();
    let mut peer = Peer::connect(&server.socket(), "up");
    peer.write(0, &[5; 512], CommandFlags::empty()).unwrap();
    peer.flush().unwrap();
    assert_eq!(std::fs::read(two).unwrap()[MIB as usize / 2..][..512], [5; 512]);
    peer.disconnect();
}

#[test]
fn new_clients_see_the_size_of_a_grown_table() {
    let sandbox = Sandbox::default();
    let server = table_as(&sandbox, "t", "0 2048 zero", &[]);
    let size = |name: &str| {
        let shown = sandbox.run(&["show", name]).ok();
        shown.lines().find_map(|line| line.strip_prefix("size")).map(|line| line.trim().to_owned())
    };
    assert_eq!(size("t").as_deref(), Some("1M (1048576 bytes)"));
    let table = sandbox.text("grown", "0 2048 zero\n2048 2048 linear ram:4M 0\n");
    sandbox.run(&["table", "t", "--load", &table.to_string_lossy()]).ok();
    assert_eq!(size("t").as_deref(), Some("1M (1048576 bytes)"), "not before it is resumed");
    sandbox.run(&["resume", "t"]).ok();
    assert_eq!(size("t").as_deref(), Some("2M (2097152 bytes)"));
    let mut peer = Peer::connect(&server.socket(), "t");
    peer.write(MIB, &[7; 512], CommandFlags::empty()).unwrap();
    assert_eq!(peer.read(MIB, 512).unwrap(), [7; 512]);
    peer.disconnect();
}

#[test]
fn bad_tables_are_refused_with_the_kernels_messages() {
    let sandbox = Sandbox::default();
    sandbox.image("a.img", MIB);
    let cases = [
        ("0 2048", "Invalid format on line 1"),
        ("# nothing", "no targets specified"),
        ("0 8 swim", "swim: unknown target type"),
        ("8 8 zero", "zero: Gap in table"),
        ("0 8 zero\n16 8 zero", "line 2 of the table: zero: Gap in table"),
        ("0 8 zero\n4 8 zero", "line 2 of the table: zero: Gap in table"),
        ("0 0 zero", "zero-length target"),
        ("0 8 zero\n8 8 multipath 0 0 0 0", "multipath: singleton target type must appear alone in table"),
        ("0 8 multipath 0 0 0 0\n8 8 zero", "multipath: singleton target type must appear alone in table"),
        ("0 8 linear a.img", "linear: Invalid argument count"),
        ("0 8 linear a.img x", "linear: Invalid device sector"),
        ("0 8 linear none.img 0", "linear: Device lookup failed"),
        ("0 8 linear 4095:7 0", "there is no such block device"),
        ("0 2049 linear a.img 0", "a.img too small for target: start=0, len=2049, dev_size=2048"),
        ("0 8 linear a.img 2048", "a.img too small for target: start=2048, len=8, dev_size=2048"),
        ("0 8 multipath 0 0 1 1 fastest 0 1 0 a.img", "multipath: unknown path selector type"),
        ("0 8 multipath 0 0 1 0", "multipath: invalid initial priority group"),
        ("0 8 zero 1", "zero: No arguments required"),
    ];
    for (text, why) in cases {
        let file = sandbox.text("bad.table", text);
        let outcome = sandbox.run(&["serve", "--table", &file.to_string_lossy(), "--name", "t"]);
        let code = outcome.status.code();
        let printed = outcome.failed();
        assert!(printed.contains(why), "{text}: {printed}");
        assert!(matches!(code, Some(1 | 2)), "{text}: {code:?}");
    }
    assert!(sandbox.run(&["list"]).ok().lines().count() <= 1, "nothing is left of them");
}

#[test]
fn a_device_below_another_can_be_reloaded() {
    let sandbox = Sandbox::default();
    sandbox.image("one.img", 2 * MIB);
    sandbox.image("two.img", 2 * MIB);
    let server = sandbox.up(
        &format!(
            "[device.upper]\ntable = \"0 1024 linear lower 1024\"\n[device.lower]\ntable = \"\"\"\n0 2048 linear one.img 0\n\"\"\"\n\
             [[export]]\ndevice = \"upper\"\nnbd = \"unix:{0}\"\n[[export]]\ndevice = \"lower\"\nnbd = \"unix:{0}\"\n",
            sandbox.path("s.sock").display()
        ),
        2,
    );
    let (mut upper, mut lower) =
        (Peer::connect(&server.socket(), "upper"), Peer::connect(&server.socket(), "lower"));
    upper.write(0, &[1; 512], CommandFlags::empty()).unwrap();
    assert_eq!(lower.read(MIB / 2, 512).unwrap(), [1; 512]);
    assert_eq!(sandbox.run(&["table", "upper"]).ok(), "0 1024 linear lower 1024\n");
    // The lower device's present table applies to the upper one, too.
    let table = sandbox.text("two.table", "0 2048 linear two.img 0");
    sandbox.run(&["table", "lower", "--load", &table.to_string_lossy()]).ok();
    sandbox.run(&["resume", "lower"]).ok();
    assert_eq!(upper.read(0, 512).unwrap(), [0; 512]);
    upper.write(0, &[2; 512], CommandFlags::empty()).unwrap();
    assert_eq!(lower.read(MIB / 2, 512).unwrap(), [2; 512]);
    let refused = sandbox.run(&["del", "lower"]).failed_with(1);
    assert!(refused.contains("upper uses it"), "{refused}");
    let circle = sandbox.text("circle", "0 1024 linear upper 0");
    let refused = sandbox.run(&["table", "lower", "--load", &circle.to_string_lossy()]).failed_with(1);
    assert!(refused.contains("it would use itself"), "{refused}");
    // A suspension below holds back requests above.
    sandbox.run(&["suspend", "lower"]).ok();
    let reader = std::thread::spawn(move || {
        let read = upper.read(0, 512).unwrap();
        upper.disconnect();
        read
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!reader.is_finished());
    sandbox.run(&["resume", "lower"]).ok();
    assert_eq!(reader.join().unwrap(), [2; 512]);
    lower.disconnect();
    let ended = until(PATIENCE, || sandbox.run(&["del", "upper"]).status.success().then_some(()));
    assert!(ended.is_some());
}

/// Serves two devices of one process over images, at one socket.
fn pair(sandbox: &Sandbox, more: &str) -> blockyard_tests::server::Server {
    for image in ["one.img", "two.img"] {
        sandbox.image(image, 2 * MIB);
    }
    let socket = sandbox.path("s.sock");
    let device = |name: &str, image: &str| {
        format!(
            "[device.{name}]\ntable = \"0 2048 linear {image} 0\"\n[[export]]\ndevice = \"{name}\"\nnbd = \"unix:{}\"\n",
            socket.display()
        )
    };
    let exports = 2 + more.matches("[[export]]").count();
    sandbox.up(&format!("{}{}{more}", device("a", "one.img"), device("b", "two.img")), exports)
}

fn load(sandbox: &Sandbox, device: &str, table: &str) -> blockyard_tests::tools::Outcome {
    let file = sandbox.text(&format!("{device}.table"), table);
    sandbox.run(&["table", device, "--load", &file.to_string_lossy()])
}

#[test]
fn a_cycle_of_devices_is_refused_and_named() {
    let sandbox = Sandbox::default();
    let mut server = pair(&sandbox, "");
    load(&sandbox, "a", "0 1024 linear b 0").ok();
    let refused = load(&sandbox, "b", "0 1024 linear a 0").failed_with(1);
    assert!(refused.contains("it would use itself: b → a → b"), "{refused}");
    let refused = sandbox.run(&["dmsetup", "load", "b", "--table", "0 1024 linear a 0"]).failed_with(1);
    assert!(refused.contains("Too many levels of symbolic links"), "{refused}");
    sandbox.run(&["resume", "a"]).ok();
    sandbox.run(&["resume", "b"]).ok();
    // The devices swap positions: the table of the upper one is loaded, and must be resumed first.
    load(&sandbox, "a", "0 2048 linear one.img 0").ok();
    load(&sandbox, "b", "0 1024 linear a 0").ok();
    let refused = sandbox.run(&["resume", "b"]).failed_with(1);
    assert!(refused.contains("it would use itself: b → a → b"), "{refused}");
    sandbox.run(&["resume", "a"]).ok();
    sandbox.run(&["resume", "b"]).ok();
    assert_eq!(sandbox.run(&["table", "b"]).ok(), "0 1024 linear a 0\n");
    let stood = sandbox.run(&["del", "a"]).failed_with(1);
    assert!(stood.contains("b uses it"), "{stood}");
    sandbox.run(&["del", "b"]).ok();
    sandbox.run(&["del", "a"]).ok();
    assert!(server.wait().success(), "{}", server.log());
}

#[test]
fn a_device_as_its_own_client_or_origin_is_refused() {
    let sandbox = Sandbox::default();
    let socket = sandbox.path("s.sock");
    let more = format!(
        "[device.o]\ntable = \"0 2048 linear a 0\"\nlayers = [\"cow,file={},create\"]\n\
         [[export]]\ndevice = \"o\"\nnbd = \"unix:{}\"\n",
        sandbox.path("o.cow").display(),
        socket.display()
    );
    let mut server = pair(&sandbox, &more);
    let refused = load(&sandbox, "a", "0 1024 linear o 0").failed_with(1);
    assert!(refused.contains("it would use itself: a → o → a"), "{refused}");
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", socket.display());
    load(&sandbox, "b", &format!("0 1024 linear nbd:{} 0", uri("a"))).ok();
    sandbox.run(&["resume", "b"]).ok();
    let refused = load(&sandbox, "a", &format!("0 512 linear nbd:{} 0", uri("b"))).failed_with(1);
    let way = format!("it would use itself: a → {} → b → {} → a", uri("b"), uri("a"));
    assert!(refused.contains(&way), "{refused}");
    // Otherwise its server would end before its last flush.
    sandbox.run(&["del", "b"]).ok();
    server.terminate();
}

#[test]
fn a_device_on_its_own_export_is_refused() {
    if missing(&["fusermount3"]) || !std::path::Path::new("/dev/fuse").exists() {
        return;
    }
    let sandbox = Sandbox::default();
    let shown = sandbox.path("b.raw");
    let more = format!("[[export]]\ndevice = \"b\"\nfuse = \"{}\"\n", shown.display());
    let mut server = pair(&sandbox, &more);
    load(&sandbox, "b", "0 1024 linear a 0").ok();
    sandbox.run(&["resume", "b"]).ok();
    let refused = load(&sandbox, "a", &format!("0 512 linear {} 0", shown.display())).failed_with(1);
    let way = format!("it would use itself: a → {} → b → a", shown.display());
    assert!(refused.contains(&way), "{refused}");
    server.terminate();
}

/// Tables that use each other at random are loaded and resumed by three threads at once. Whatever is refused,
/// no cycle results: all devices can be removed.
#[test]
fn no_order_of_loads_and_resumes_makes_a_cycle() {
    let sandbox = Sandbox::default();
    let more = format!(
        "[device.c]\ntable = \"0 2048 linear one.img 0\"\n[[export]]\ndevice = \"c\"\nnbd = \"unix:{}\"\n",
        sandbox.path("s.sock").display()
    );
    let mut server = pair(&sandbox, &more);
    std::thread::scope(|scope| {
        for (number, device) in ["a", "b", "c"].into_iter().enumerate() {
            let sandbox = &sandbox;
            scope.spawn(move || {
                for (round, choice) in noise(number as u64, 40).into_iter().enumerate() {
                    let lower = ["a", "b", "c", "one.img"][usize::from(choice) % 4];
                    let file = sandbox.text(&format!("{device}{round}"), &format!("0 8 linear {lower} 0"));
                    sandbox.run(&["table", device, "--load", &file.to_string_lossy()]);
                    sandbox.run(&["resume", device]);
                }
            });
        }
    });
    let removed = until(PATIENCE, || {
        ["a", "b", "c"].iter().for_each(|device| _ = sandbox.run(&["del", device]));
        (!server.is_running()).then_some(())
    });
    assert!(removed.is_some(), "{}", server.log());
    assert!(server.wait().success(), "{}", server.log());
}
