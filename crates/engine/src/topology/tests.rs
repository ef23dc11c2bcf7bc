use super::*;
use crate::spec::TlsMode;

fn parse(text: &str) -> Result<Topology, TopologyError> {
    Topology::parse(text, Path::new("/etc/yard/t.toml"))
}

fn problems(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn a_whole_topology_is_read() {
    let topology = parse(
        r#"
ring = "epoll"
poll = true
queues = 2

[device.zeta]
stack = "file:disk.img,ro"
layers = ["split,max_sectors=255"]
limits = { max_segments = 64 }
depth = 0x40

[device.alpha]
stack = "ram:1G"

[[export]]
device = "zeta"
nbd = "unix:disk.sock"
name = "backup"
tls = "require"
tls-certificates = "pki"

[[export]]
device = "zeta"
nbd = "tcp:localhost:10809"
"#,
    )
    .unwrap();
    assert_eq!((topology.ring, topology.poll, topology.queues), (RingChoice::Epoll, true, Some(2)));
    let [zeta, alpha] = &topology.devices[..] else { panic!() };
    assert_eq!(zeta.stack.to_string(), "file:/etc/yard/disk.img,ro");
    assert_eq!(zeta.layers[0].to_string(), "split,max_sectors=255");
    assert_eq!((zeta.limits.as_deref(), zeta.depth), (Some("max_segments=64"), Some(64)));
    assert_eq!((alpha.name.as_str(), alpha.depth, alpha.line), ("alpha", None, 12));
    let [socket, tcp, default] = &topology.exports[..] else { panic!() };
    let ExportKind::Nbd { address, options } = &socket.kind else { panic!() };
    assert_eq!(*address, NbdAddress::Unix("/etc/yard/disk.sock".into()));
    assert_eq!((options.name.as_str(), options.tls.mode), ("backup", TlsMode::Require));
    assert_eq!(options.tls.certificates.as_deref(), Some(Path::new("/etc/yard/pki")));
    let options = tcp.nbd_options().unwrap();
    assert_eq!((options.name.as_str(), options.tls.mode), ("zeta", TlsMode::Off));
    assert_eq!((default.device.as_str(), default.nbd_address()), ("alpha", None));
}

#[test]
fn every_problem_is_reported_with_its_line_and_key() {
    let text = r#"polll = true
[device.a]
stack = "tape:x"
depth = 0
layers = ["split,max_sectors=255", "sleep,read=5ms"]
[device."b c"]
stack = 7
[device.d]
[[export]]
device = "e"
nbd = "here"
tls = "require"
"#;
    let expected = [
        "/etc/yard/t.toml:1:polll: there is no such key (there is device, export, nbd-limits, poll, queues, ring)",
        "/etc/yard/t.toml:3:device.a.stack: there is no backend \"tape\"",
        "/etc/yard/t.toml:4:device.a.depth: this is not a number from 1 to 4096",
        "/etc/yard/t.toml:5:device.a.layers[1]: there is no layer \"sleep\" (",
        "/etc/yard/t.toml:6:device.b c: \"b c\" is not a device name",
        "/etc/yard/t.toml:7:device.b c.stack: this is integer, not a string",
        "/etc/yard/t.toml:8:device.d: it has no stack (write stack = \"file:disk.img\")",
        "/etc/yard/t.toml:9:export[0].tls: TLS is require, and there are no certificates",
        "/etc/yard/t.toml:11:export[0].nbd: \"here\" is not where an NBD server listens",
    ];
    let got = problems(text);
    let got: Vec<_> = got.lines().collect();
    assert_eq!(got.len(), expected.len(), "{got:#?}");
    for (got, expected) in got.iter().zip(expected) {
        assert!(got.starts_with(expected), "{got}\n{expected}");
    }
}

#[test]
fn what_is_not_toml_has_its_line() {
    assert!(problems("[device.a]\nstack = \n").starts_with("/etc/yard/t.toml:2: not TOML: "));
    assert_eq!(
        problems(""),
        "/etc/yard/t.toml:1:device: there is none (write [device.NAME] and stack = \"…\")"
    );
}

#[test]
fn exports_that_contradict_each_other_are_refused() {
    let devices = "[device.a]\nstack = \"ram:1M\"\n[device.b]\nstack = \"ram:1M\"\n";
    let export = |device, more| format!("[[export]]\ndevice = \"{device}\"\nnbd = \"tcp:h:1\"\n{more}");
    let ok = format!("{devices}{}{}", export("a", ""), export("b", ""));
    assert_eq!(parse(&ok).unwrap().exports.len(), 2);
    let same_name = format!("{devices}{}{}", export("a", ""), export("b", "name = \"a\""));
    assert!(problems(&same_name).contains(":8:export.name: tcp:h:1 has an export \"a\" already"));
    let other_tls = format!("{devices}{}{}", export("a", ""), export("b", "tls-certificates = \"x\""));
    assert!(problems(&other_tls).contains(":8:export.tls: another export at tcp:h:1 has other TLS"));
    assert!(problems(&format!("{devices}{}", export("c", ""))).contains("there is no device \"c\""));
}

#[test]
fn limits_may_be_a_table_or_a_text() {
    for limits in ["{ max_sectors = 255, max_segments = 4 }", "\"max_sectors=255,max_segments=4\""] {
        let text = format!("[device.a]\nstack = \"ram:1M\"\nlimits = {limits}\n");
        assert_eq!(
            parse(&text).unwrap().devices[0].limits.as_deref(),
            Some("max_sectors=255,max_segments=4")
        );
    }
    assert!(problems("[device.a]\nstack = \"ram:1M\"\nlimits = {}\n").contains("there is no limit"));
    assert!(problems("[device.a]\nstack = \"ram:1M\"\nlimits = 3\n").contains("not a table or a string"));
}

#[test]
fn files_are_checked_without_being_made() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("small.img"), [0; 4096]).unwrap();
    let text = r#"
[device.good]
stack = "file:small.img,share"
[device.twice]
stack = "file:small.img"
[device.missing]
stack = "file:missing.img"
[device.made]
stack = "file:made.img,size=1M,create"
[device.nowhere]
stack = "file:no/where.img,size=1M,create"
[device.past]
stack = "file:small.img,share,offset=4096"
[device.directory]
stack = "file:."
[[export]]
device = "good"
nbd = "unix:no/such.sock"
tls-certificates = "pki"
"#;
    let topology = Topology::parse(text, &at("t.toml")).unwrap();
    let problems = topology.check_files();
    let got: Vec<_> = problems.iter().map(|p| (p.line, p.key.as_str(), p.why.as_str())).collect();
    let expected = [
        (4, "device.twice.stack", "device.good uses the same file"),
        (6, "device.missing.stack", "there is no such file (to make it, add size=10G,create)"),
        (10, "device.nowhere.stack", "cannot make a file in"),
        (12, "device.past.stack", "it has 4096 bytes, and the device starts at 4096"),
        (12, "device.past.stack", "device.twice uses the same file"),
        (14, "device.directory.stack", "it is neither a regular file nor a block device"),
        (16, "export.nbd", "cannot make a file in"),
        (16, "export.tls-certificates", "server-cert.pem: No such file"),
        (16, "export.tls-certificates", "server-key.pem: No such file"),
    ];
    assert_eq!(got.len(), expected.len(), "{got:#?}");
    for (got, expected) in got.iter().zip(expected) {
        assert!(
            got.0 == expected.0 && got.1 == expected.1 && got.2.contains(expected.2),
            "{got:?} {expected:?}"
        );
    }
    assert!(!at("made.img").exists());
}

#[test]
fn a_device_that_is_renamed_takes_its_exports_along() {
    let text = "[device.a]\nstack = \"ram:1M\"\n[[export]]\ndevice = \"a\"\nname = \"x\"\n[[export]]\ndevice = \"a\"\n";
    let mut topology = parse(text).unwrap();
    topology.rename(0, &"b".parse().unwrap());
    assert_eq!(topology.devices[0].name.as_str(), "b");
    let exports: Vec<_> =
        topology.exports.iter().map(|e| (e.device.as_str(), &*e.nbd_options().unwrap().name)).collect();
    assert_eq!(exports, [("b", "x"), ("b", "b")]);
}

#[test]
fn an_origin_comes_behind_its_snapshots() {
    let text = "[device.base]\ntable = \"0 2048 snapshot-origin base.img\"\n\
                [device.other]\nstack = \"ram:1M\"\n\
                [device.snap]\ntable = \"0 2048 snapshot base.img cow.img P 16\"\n";
    let topology = parse(text).unwrap();
    let order: Vec<&str> = topology.in_order().iter().map(|device| device.name.as_str()).collect();
    assert_eq!(order, ["other", "snap", "base"]);
}

#[test]
fn a_device_may_be_named_like_a_keyword_of_its_table() {
    let tables = [
        ("disk", "0 64 mirror disk 2 log.img 8 2 a.img 0 b.img 0"),
        ("P", "0 64 snapshot a.img b.img P 8"),
        ("a", "0 64 mirror core 1 8 2 b.img 0 c.img 0"),
    ];
    for (name, table) in tables {
        let topology = parse(&format!("[device.{name}]\ntable = \"{table}\"\n")).unwrap();
        assert_eq!(topology.circles(), [], "{name}");
    }
    let said = problems("[device.disk]\ntable = \"0 64 mirror core 1 8 2 disk 0 c.img 0\"\n");
    assert!(said.contains("it would stand on itself: disk → disk"), "{said}");
}
