//! Addresses and names of exports: listeners, names, addresses, inherited sockets, and the disks of `file:`.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, noise};
use blockyard_tests::tools::{command, missing, missing_libnbd, python, run, skip};
use proto::nbd::client::{Failure, HandshakeOptions};
use proto::nbd::{CommandFlags, NbdError};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

const MIB: u64 = 1 << 20;

/// Three devices behind one socket.
fn three(sandbox: &Sandbox) -> String {
    let socket = sandbox.path("all.sock");
    let mut text = String::new();
    for (name, size) in [("one", 1), ("two", 2), ("three", 3)] {
        text += &format!("[device.{name}]\nstack = \"ram:{size}M\"\n");
        text += &format!("[[export]]\ndevice = \"{name}\"\nnbd = \"unix:{}\"\n", socket.display());
    }
    text
}

#[test]
fn many_exports_share_a_listener() {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.up(&three(&sandbox), 3);
    let names: Vec<&str> = server.ready().iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, ["one", "two", "three"]);
    for (number, name) in names.iter().enumerate() {
        let mut peer = Peer::connect(&server.socket(), name);
        assert_eq!(peer.session.size, (number as u64 + 1) * MIB);
        peer.write(0, &[number as u8 + 1; 4096], CommandFlags::empty()).unwrap();
    }
    python(
        server.uri_of(2),
        "
h.set_opt_mode(True)
h.connect_uri(uri)
names = []
h.opt_list(lambda name, description: names.append(name))
assert names == ['one', 'two', 'three'], names
h.opt_go()
assert h.get_size() == 3 << 20
assert h.pread(4096, 0) == bytes([3]) * 4096
",
    );
}

#[test]
fn an_unknown_export_name_is_refused() {
    let sandbox = Sandbox::default();
    let mut server = sandbox.up(&three(&sandbox), 3);
    // Of several exports none is the default one.
    for name in ["four", "", "one ", "ONE"] {
        let refused = Peer::with(&server.socket(), HandshakeOptions::new(name)).err();
        let Some(Failure::Refused { option, kind, .. }) = refused else { panic!("{name}: {refused:?}") };
        assert_eq!((option, kind), (7, 1 << 31 | 6), "GO is refused with ERR_UNKNOWN");
    }
    server.check_health("two");
}

#[test]
fn a_single_export_is_the_default_one() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &["--nbd-name", "chosen name/ü"]);
    for name in ["chosen name/ü", ""] {
        assert_eq!(Peer::connect(&server.socket(), name).session.size, MIB);
    }
    assert!(Peer::with(&server.socket(), HandshakeOptions::new("disk")).is_err());
    if !missing(&["nbdinfo"]) {
        assert_eq!(run(&mut command(&["nbdinfo", "--size", server.uri()])).ok().trim(), MIB.to_string());
    }
}

#[test]
fn tcp_listens_on_the_given_host() {
    if missing(&["nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let has_v6 = TcpListener::bind("[::1]:0").is_ok();
    if !has_v6 {
        skip("no IPv6 on this machine: that part is left out");
    }
    let size = |uri: &str| run(&mut command(&["nbdinfo", "--size", uri]));
    for (address, reached, not_reached) in [
        ("tcp:127.0.0.1:0", vec!["127.0.0.1"], vec!["[::1]"]),
        ("tcp:[::1]:0", vec!["[::1]"], vec!["127.0.0.1"]),
        // IPv6 and, v4-mapped, IPv4 on one socket.
        ("tcp::0", vec!["127.0.0.1", "[::1]"], vec![]),
    ] {
        if address.contains('1') && address.contains("::1") && !has_v6 {
            continue;
        }
        let mut serve = sandbox.blockyard(&["serve", "ram:1M", "--name", "disk", "--nbd", address]);
        let server = sandbox.start(&mut serve, 1);
        assert_eq!(size(server.uri()).ok().trim(), MIB.to_string(), "{}", server.uri());
        let port = server.uri().rsplit_once(':').and_then(|(_, rest)| rest.split('/').next());
        let port: u16 = port.and_then(|port| port.parse().ok()).expect("the URI names the port");
        for host in reached.iter().filter(|host| has_v6 || !host.starts_with('[')) {
            assert_eq!(size(&format!("nbd://{host}:{port}/disk")).ok().trim(), MIB.to_string());
        }
        for host in not_reached {
            assert!(TcpStream::connect(format!("{host}:{port}")).is_err(), "{address} also is at {host}");
        }
    }
}

#[test]
fn one_device_is_exported_at_two_addresses() {
    let sandbox = Sandbox::default();
    let second = format!("unix:{}", sandbox.path("second.sock").display());
    let first = format!("unix:{}", sandbox.path("first.sock").display());
    let arguments = ["serve", "ram:1M", "--name", "disk", "--nbd", &first, "--nbd", &second];
    let server = sandbox.start(&mut sandbox.blockyard(&arguments), 2);
    let mut one = Peer::connect(&sandbox.path("first.sock"), "disk");
    let mut other = Peer::connect(&sandbox.path("second.sock"), "disk");
    one.write(4096, &[7; 512], CommandFlags::empty()).unwrap();
    assert_eq!(other.read(4096, 512).unwrap(), [7; 512]);
    assert_ne!(server.uri_of(0), server.uri_of(1));
}

/// Returns `server` as a service manager would start it: a listening socket, here its standard input, as
/// descriptor 3, and `LISTEN_FDS`.
fn activated(sandbox: &Sandbox, server: &Command) -> Command {
    let script = "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\"";
    let mut shell = sandbox.command("/bin/sh");
    shell.args(["-c", script, "sh"]).arg(server.get_program()).args(server.get_args());
    shell
}

#[test]
fn socket_activation_is_served() {
    let sandbox = Sandbox::default();
    let path = sandbox.path("activated.sock");
    let listener = UnixListener::bind(&path).unwrap();
    // A client that connects before the server starts waits in the queue.
    let early = std::thread::spawn({
        let path = path.clone();
        move || Peer::connect(&path, "disk").read(0, 512)
    });
    let mut shell = activated(&sandbox, &sandbox.blockyard(&["serve", "ram:1M", "--name", "disk"]));
    let mut server = sandbox.start_with(&mut shell, Stdio::from(std::os::fd::OwnedFd::from(listener)), 1);
    assert_eq!(server.socket(), path);
    assert_eq!(early.join().unwrap(), Ok(vec![0; 512]));
    server.check_health("disk");
    server.terminate();
    assert!(path.exists(), "the socket belongs to the service manager");
}

/// Socket activation with a topology, and TCP.
#[test]
fn a_topology_uses_the_activated_socket() {
    let sandbox = Sandbox::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let file = sandbox.text("topology.toml", "[device.disk]\nstack = \"ram:1M\"\n");
    let mut shell = activated(&sandbox, &sandbox.blockyard(&["up", &file.to_string_lossy()]));
    let server = sandbox.start_with(&mut shell, Stdio::from(std::os::fd::OwnedFd::from(listener)), 1);
    assert_eq!(server.uri(), format!("nbd://127.0.0.1:{port}/disk"));
    if !missing(&["nbdinfo"]) {
        assert_eq!(run(&mut command(&["nbdinfo", "--size", server.uri()])).ok().trim(), MIB.to_string());
    }
}

#[test]
fn blocks_of_4096_bytes_are_reported_and_enforced() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", MIB);
    let server = sandbox.serve(&format!("file:{},block=4096", image.display()), &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert!(peer.session.block_sizes_agreed);
    assert_eq!(peer.session.block_sizes.minimum, 4096);
    assert!(peer.session.block_sizes.preferred >= 4096);
    peer.write(4096, &[1; 8192], CommandFlags::empty()).unwrap();
    for (offset, len) in [(512, 4096), (4096, 512), (4096, 4608)] {
        assert_eq!(peer.read(offset, len), Err(NbdError::Invalid), "{offset}+{len}");
        let data = vec![2; len as usize];
        assert_eq!(
            peer.write(offset, &data, CommandFlags::empty()),
            Err(NbdError::Invalid),
            "{offset}+{len}"
        );
        assert_eq!(peer.zero(offset, len, CommandFlags::empty()), Err(NbdError::Invalid), "{offset}+{len}");
        assert_eq!(peer.trim(offset, len), Err(NbdError::Invalid), "{offset}+{len}");
    }
    assert_eq!(peer.read(4096, 8192).unwrap(), [1; 8192]);
}

#[test]
fn a_part_of_a_file_is_a_device() {
    let sandbox = Sandbox::default();
    let image = sandbox.noise("image", 8 * MIB as usize);
    let before = std::fs::read(&image).unwrap();
    let mut server = sandbox.serve(&format!("file:{},offset=1M,sizelimit=2M", image.display()), &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.session.size, 2 * MIB);
    assert_eq!(peer.read(0, 2 * MIB).unwrap(), before[MIB as usize..3 * MIB as usize]);
    peer.write(2 * MIB - 4096, &[9; 4096], CommandFlags::FUA).unwrap();
    peer.zero(0, 4096, CommandFlags::empty()).unwrap();
    peer.trim(4096, 4096).unwrap();
    assert_eq!(peer.write(2 * MIB, &[9; 512], CommandFlags::empty()), Err(NbdError::NoSpace));
    drop(peer);
    server.terminate();
    let mut wanted = before;
    wanted[3 * MIB as usize - 4096..3 * MIB as usize].fill(9);
    wanted[MIB as usize..MIB as usize + 8192].fill(0);
    assert!(std::fs::read(&image).unwrap() == wanted, "what lies around the device has changed");
}

#[test]
fn a_created_file_is_sparse_and_has_its_size() {
    let sandbox = Sandbox::default();
    let path = sandbox.path("new.img");
    let stack = format!("file:{},size=5G,create", path.display());
    let mut server = sandbox.serve(&stack, &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.session.size, 5 << 30);
    peer.write((5 << 30) - 512, &[1; 512], CommandFlags::empty()).unwrap();
    drop(peer);
    server.terminate();
    let metadata = path.metadata().unwrap();
    assert_eq!(metadata.len(), 5 << 30);
    assert!(metadata.blocks() * 512 <= MIB, "{} sectors are allocated", metadata.blocks());
    // An existing file of that size is served unchanged; one of another size is refused.
    let server = sandbox.serve(&stack, &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.read((5 << 30) - 512, 512).unwrap(), [1; 512]);
    drop((peer, server));
    let other = format!("file:{},size=6G,create", path.display());
    let refused = sandbox.run(&["serve", &other, "--nbd", "tcp:127.0.0.1:0"]).failed_with(1);
    assert!(refused.contains("5G, not 6G"), "{refused}");
    assert_eq!(path.metadata().unwrap().len(), 5 << 30);
}

#[test]
fn write_zeroes_with_no_hole_keeps_the_allocation() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 8 * MIB);
    let server = sandbox.serve(&format!("file:{}", image.display()), &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let allocated = || image.metadata().unwrap().blocks() * 512;
    peer.write(0, &noise(1, MIB as usize), CommandFlags::FUA).unwrap();
    peer.zero(0, 4 * MIB, CommandFlags::NO_HOLE.union(CommandFlags::FUA)).unwrap();
    assert!(allocated() >= 4 * MIB, "{} bytes are allocated", allocated());
    peer.zero(0, 4 * MIB, CommandFlags::FUA).unwrap();
    assert!(allocated() < MIB, "{} bytes are allocated", allocated());
    assert_eq!(peer.read(0, 4 * MIB).unwrap(), vec![0; 4 << 20]);
}

#[test]
fn a_file_has_one_writer_unless_it_is_shared() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", MIB);
    let stack = format!("file:{}", image.display());
    let second = format!("unix:{}", sandbox.path("second.sock").display());
    let try_again = |stack: &str| sandbox.blockyard(&["serve", stack, "--name", "second", "--nbd", &second]);
    let mut server = sandbox.serve(&stack, &[]);
    let refused = run(&mut try_again(&stack)).failed_with(1);
    assert!(refused.starts_with("blockyard: serve failed: second: "), "{refused}");
    assert!(refused.contains("share"), "it says what to do: {refused}");
    assert!(!sandbox.path("second.sock").exists(), "nothing is half done");
    server.check_health("disk");
    server.terminate();

    let shared = format!("{stack},share");
    let first = sandbox.serve(&shared, &[]);
    let other = sandbox.start(&mut try_again(&shared), 1);
    Peer::connect(&first.socket(), "disk").write(0, &[5; 512], CommandFlags::empty()).unwrap();
    assert_eq!(Peer::connect(&other.socket(), "second").read(0, 512).unwrap(), [5; 512]);
}

#[test]
fn a_file_of_odd_size_is_served_in_whole_sectors() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", MIB + 700);
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&noise(9, 700), MIB).unwrap();
    let server = sandbox.serve(&format!("file:{}", image.display()), &[]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert_eq!(peer.session.size, MIB + 512);
    assert_eq!(peer.read(MIB, 512).unwrap(), noise(9, 700)[..512]);
}

#[test]
fn null_zero_and_error_behave_as_named() {
    let sandbox = Sandbox::default();
    for (stack, read) in [
        ("null:1G", Ok(())),
        ("null:1G,irqmode=timer,completion=50us", Ok(())),
        ("null:64M,memory_backed", Ok(())),
        ("zero:1G", Ok(())),
        ("error:1G", Err(NbdError::Io)),
    ] {
        let mut server = sandbox.serve(stack, &[]);
        let mut peer = Peer::connect(&server.socket(), "disk");
        let wanted = read.map(|()| vec![if stack.contains("backed") { 3 } else { 0 }; 4096]);
        let written = peer.write(8192, &[3; 4096], CommandFlags::empty());
        assert_eq!(written, read, "{stack}");
        let found = peer.read(8192, 4096);
        // The content of `null:` is undefined.
        if stack.starts_with("null") && !stack.contains("backed") {
            assert!(found.is_ok(), "{stack}");
        } else {
            assert_eq!(found, wanted, "{stack}");
        }
        // And the connection stays open.
        assert_eq!(peer.read(0, 512).map(drop), read, "{stack}");
        if stack.starts_with("error") {
            server.terminate_after_failed_flush("disk");
        } else {
            server.terminate();
        }
    }
}

#[test]
fn a_split_device_serves_unchanged_data() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 4 * MIB);
    let layers = ["--layer", "split,max_sectors=8", "--layer", "split,max_sectors=255"];
    let server = sandbox.serve(&format!("file:{}", image.display()), &layers);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let data = noise(11, 2 * MIB as usize);
    peer.write(512, &data, CommandFlags::FUA).unwrap();
    assert!(peer.read(512, 2 * MIB).unwrap() == data);
    peer.trim(MIB, MIB).unwrap();
    assert!(peer.read(MIB, MIB).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(peer.write(4 * MIB - 512, &[0; 1024], CommandFlags::empty()), Err(NbdError::NoSpace));
}
