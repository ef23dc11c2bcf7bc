use super::*;
use crate::{NbdExportSpec, TlsMode};

fn parse(text: &str) -> Result<Topology, TopologyError> {
    Topology::parse(text, Path::new("/etc/view/t.toml"))
}

fn problems(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn a_topology_parses_with_all_its_keys() {
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
    assert_eq!(zeta.stack.to_string(), "file:/etc/view/disk.img,ro");
    assert_eq!(zeta.layers[0].to_string(), "split,max_sectors=255");
    assert_eq!((zeta.limits.as_deref(), zeta.depth), (Some("max_segments=64"), Some(64)));
    assert_eq!((alpha.name.as_str(), alpha.depth, alpha.line), ("alpha", None, 12));
    let [socket, tcp, default] = &topology.exports[..] else { panic!() };
    let ExportKind::Nbd(NbdExportSpec { address, options }) = &socket.kind else { panic!() };
    assert_eq!(*address, NbdAddress::Unix("/etc/view/disk.sock".into()));
    assert_eq!((options.name.as_str(), options.tls.mode), ("backup", TlsMode::Require));
    assert_eq!(options.tls.certificates.as_deref(), Some(Path::new("/etc/view/pki")));
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
        "/etc/view/t.toml:1:polll: unknown key (did you mean poll? keys: device, export, nbd-limits, poll, queues, ring)",
        "/etc/view/t.toml:3:device.a.stack: unknown backend \"tape\"",
        "/etc/view/t.toml:4:device.a.depth: this is not a number from 1 to 4096",
        "/etc/view/t.toml:5:device.a.layers[1]: unknown layer \"sleep\" (",
        "/etc/view/t.toml:6:device.b c: \"b c\" is not a device name",
        "/etc/view/t.toml:7:device.b c.stack: this is integer, not a string",
        "/etc/view/t.toml:8:device.d: it has no stack (write stack = \"file:disk.img\")",
        "/etc/view/t.toml:9:export[0].tls: TLS is require, and there are no certificates",
        "/etc/view/t.toml:11:export[0].nbd: \"here\" is not where an NBD server listens",
    ];
    let got = problems(text);
    let got: Vec<_> = got.lines().collect();
    assert_eq!(got.len(), expected.len(), "{got:#?}");
    for (got, expected) in got.iter().zip(expected) {
        assert!(got.starts_with(expected), "{got}\n{expected}");
    }
}

#[test]
fn a_syntax_error_is_reported_with_its_line() {
    assert!(problems("[device.a]\nstack = \n").starts_with("/etc/view/t.toml:2: not TOML: "));
    assert_eq!(
        problems(""),
        "/etc/view/t.toml:1:device: there is none (write [device.NAME] and stack = \"…\")"
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
    let near =
        problems("[device.alpha]\nstack = \"ram:1M\"\n[[export]]\ndevice = \"alpa\"\nnbd = \"unix:/s\"\n");
    assert!(near.contains("there is no device \"alpa\" (did you mean alpha? write [device.alpa])"), "{near}");
}

#[test]
fn limits_may_be_a_table_or_a_string() {
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
fn renaming_a_device_renames_its_exports() {
    let text = "[device.a]\nstack = \"ram:1M\"\n[[export]]\ndevice = \"a\"\nname = \"x\"\n[[export]]\ndevice = \"a\"\n";
    let mut topology = parse(text).unwrap();
    topology.rename(0, &"b".parse().unwrap());
    assert_eq!(topology.devices[0].name.as_str(), "b");
    let exports: Vec<_> =
        topology.exports.iter().map(|e| (e.device.as_str(), &*e.nbd_options().unwrap().name)).collect();
    assert_eq!(exports, [("b", "x"), ("b", "b")]);
}

#[test]
fn an_origin_is_opened_after_its_snapshots() {
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
    let problems = problems("[device.disk]\ntable = \"0 64 mirror core 1 8 2 disk 0 c.img 0\"\n");
    assert!(problems.contains("it would use itself: disk → disk"), "{problems}");
}
