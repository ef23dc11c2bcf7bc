//! Plans for given running states and topologies: actions, their order, refusals.

use super::*;
use crate::spec::Bytes;
use crate::topology::Topology;
use std::path::Path;

/// Parses a topology.
fn topology(text: &str) -> Topology {
    Topology::parse(text, Path::new("/srv/lab.toml")).unwrap_or_else(|why| panic!("{why}"))
}

/// Returns the state of a process that was started with a topology and has no clients.
fn running(text: &str) -> Running {
    let topology = topology(text);
    let devices = topology.devices.iter().map(|spec| {
        let exports = topology.exports.iter().filter(|export| export.device == spec.name);
        let exports = exports.map(|export| RunningExport {
            address: match &export.kind {
                crate::topology::ExportKind::Fuse(spec) => spec.path.display().to_string(),
                _ => format!("nbd://{}", spec.name),
            },
            kind: export.kind.clone(),
            clients: 0,
        });
        RunningDevice {
            spec: spec.clone(),
            exports: exports.collect(),
            size: Bytes::mib(1),
            in_use: None,
            below: topology.stands_on(spec),
        }
    });
    let devices = devices.collect();
    let settings = Topology { devices: Vec::new(), exports: Vec::new(), ..topology };
    Running { settings, devices }
}

impl Running {
    fn used(mut self, name: &str) -> Running {
        let device =
            self.devices.iter_mut().find(|device| device.spec.name.as_str() == name).expect("a device");
        device.in_use = Some("a client uses it".to_owned());
        device.exports.iter_mut().for_each(|export| export.clients = 1);
        self
    }

    fn of_size(mut self, name: &str, size: Bytes) -> Running {
        let device =
            self.devices.iter_mut().find(|device| device.spec.name.as_str() == name).expect("a device");
        device.size = size;
        self
    }
}

/// Returns the lines of a plan without refusals.
#[track_caller]
fn lines(running: &Running, wanted: &str) -> Vec<String> {
    let plan = plan(running, &topology(wanted));
    assert_eq!(plan.refusals, [], "{:?}", plan.actions);
    plan.actions.iter().map(ToString::to_string).collect()
}

/// Returns the refusals of a plan, joined.
#[track_caller]
fn refusals(running: &Running, wanted: &str) -> String {
    let plan = plan(running, &topology(wanted));
    assert!(!plan.refusals.is_empty(), "{:?}", plan.actions);
    plan.refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn device(name: &str, keys: &str) -> String {
    format!("[device.{name}]\n{keys}\n[[export]]\ndevice = \"{name}\"\nnbd = \"unix:/run/{name}.sock\"\n")
}

fn null(name: &str) -> String {
    device(name, "stack = \"null:1M\"")
}

fn linear(name: &str, lower: &str) -> String {
    device(name, &format!("table = \"0 2048 linear {lower} 0\""))
}

#[test]
fn a_process_that_matches_its_file_has_an_empty_plan() {
    let text = [
        "queues = 2\nnbd-limits = \"connections=5\"\n".to_owned(),
        null("a"),
        linear("b", "a"),
        device("c", "stack = \"file:c.img,size=1M,create\"\nlayers = [\"delay,read=1ms\"]\nscheduler = \"kyber\"\nlimits = { max_sectors = 8 }\nslow = \"1s\"\nio_timeout = \"2s\"\ndepth = 64"),
    ]
    .concat();
    assert_eq!(lines(&running(&text), &text), [""; 0]);
}

#[test]
fn the_order_and_the_spelling_of_a_file_do_not_matter() {
    let before = running(
        &[device("a", "stack = \"null:1M\"\nlimits = \"max_sectors=8,max_segments=4\""), null("b")].concat(),
    );
    let after = [
        null("b"),
        device("a", "limits = { max_segments = 4, max_sectors = 8 }\ndepth = 128\nstack = \"null:1024K\""),
    ];
    assert_eq!(lines(&before, &after.concat()), [""; 0]);
}

#[test]
fn devices_are_added_and_removed() {
    assert_eq!(
        lines(&running(&[null("a"), null("b")].concat()), &[null("b"), null("c")].concat()),
        ["remove a", "add c: null:1M, nbd unix:/run/c.sock"]
    );
}

#[test]
fn a_lower_device_is_added_before_its_user() {
    let after = [linear("top", "middle"), linear("middle", "bottom"), null("bottom"), null("a")].concat();
    let added: Vec<String> = lines(&running(&null("a")), &after)
        .iter()
        .map(|line| line.split(':').next().unwrap_or("").to_owned())
        .collect();
    assert_eq!(added, ["add bottom", "add middle", "add top"]);
}

#[test]
fn a_lower_device_is_removed_after_its_user() {
    let before =
        running(&[null("bottom"), linear("middle", "bottom"), linear("top", "middle"), null("a")].concat());
    assert_eq!(lines(&before, &null("a")), ["remove top", "remove middle", "remove bottom"]);
}

#[test]
fn a_snapshot_is_added_before_its_origin() {
    let after = [
        device("origin", "table = \"0 2048 snapshot-origin base\""),
        device("snap", "table = \"0 2048 snapshot base store P 8\""),
        null("base"),
        null("store"),
    ]
    .concat();
    let added = lines(&running(&null("base")), &after);
    let place =
        |name: &str| added.iter().position(|line| line.starts_with(&format!("add {name}:"))).expect(name);
    assert!(place("store") < place("snap") && place("snap") < place("origin"), "{added:?}");
}

#[test]
fn a_device_over_an_export_is_added_after_the_device_of_that_export() {
    let lower =
        "[device.lower]\nstack = \"null:1M\"\n[[export]]\ndevice = \"lower\"\nfuse = \"/srv/lower.raw\"\n";
    let after = [null("a"), device("above", "stack = \"file:/srv/lower.raw\""), lower.to_owned()].concat();
    let added = lines(&running(&null("a")), &after);
    assert_eq!(added[0], "add lower: null:1M, fuse /srv/lower.raw");
    assert!(added[1].starts_with("add above: file:/srv/lower.raw"), "{added:?}");
    let served =
        "[device.lower]\nstack = \"null:1M\"\n[[export]]\ndevice = \"lower\"\nnbd = \"unix:/run/l.sock\"\n";
    let after = [
        device("above", "stack = \"nbd:nbd+unix:///lower?socket=/run/l.sock\""),
        served.to_owned(),
        null("a"),
    ];
    let added = lines(&running(&null("a")), &after.concat());
    assert!(added[0].starts_with("add lower") && added[1].starts_with("add above"), "{added:?}");
}

#[test]
fn supported_differences_are_changed_online() {
    let before = |keys: &str| running(&device("a", &format!("stack = \"null:1M\"\n{keys}"))).used("a");
    for (was, is, expected) in [
        ("", "limits = { max_sectors = 8 }", "change a: limits max_sectors=8"),
        ("limits = { max_sectors = 8 }", "", "change a: no limits"),
        ("", "scheduler = \"kyber\"", "change a: scheduler=kyber"),
        ("scheduler = \"kyber\"", "scheduler = \"none\"", "change a: scheduler=none"),
        (
            "scheduler = \"mq-deadline\"",
            "scheduler = \"mq-deadline,fifo_batch=4\"",
            "change a: scheduler=mq-deadline,fifo_batch=4",
        ),
        ("", "slow = \"20ms\"", "change a: slow=20ms"),
        ("slow = \"20ms\"", "", "change a: slow=off"),
        ("", "io_timeout = \"1s\"", "change a: io_timeout=1s"),
        ("", "layers = [\"delay,read=1ms\"]", "change a: layers delay,read=1ms"),
        ("layers = [\"delay,read=1ms\"]", "", "change a: no layers"),
        ("layers = [\"delay,read=1ms\"]", "layers = [\"delay,read=2ms\"]", "change a: layers delay,read=2ms"),
        (
            "layers = [\"delay,read=1ms\"]",
            "layers = [\"throttle,iops=10\", \"delay,read=1ms\"]",
            "change a: layers throttle,iops=10 delay,read=1ms",
        ),
    ] {
        let after = device("a", &format!("stack = \"null:1M\"\n{is}"));
        assert_eq!(lines(&before(was), &after), [expected], "{was} -> {is}");
    }
}

#[test]
fn several_changes_of_a_device_keep_their_order() {
    let before = running(&device("a", "stack = \"file:/a.img,direct=off\"")).used("a");
    let keys = "stack = \"file:/a.img,direct=on\"\nlayers = [\"delay,read=1ms\"]\nscheduler = \"kyber\"\nlimits = \"max_sectors=8\"\nslow = \"1s\"";
    assert_eq!(
        lines(&before, &device("a", keys)),
        [
            "change a: direct=on",
            "change a: layers delay,read=1ms",
            "change a: scheduler=kyber",
            "change a: limits max_sectors=8",
            "change a: slow=1s"
        ]
    );
}

#[test]
fn the_file_of_a_device_is_exchanged_only_if_it_is_read_only() {
    let read_only = running(&device("a", "stack = \"file:/a.img,ro\"")).used("a");
    assert_eq!(lines(&read_only, &device("a", "stack = \"file:/b.img,ro\"")), ["change a: file=/b.img"]);
    let writable = running(&device("a", "stack = \"file:/a.img\"")).used("a");
    let why = refusals(&writable, &device("a", "stack = \"file:/b.img\""));
    assert!(why.contains("a: it would have to be removed and added again, as its stack changes"), "{why}");
    assert!(why.contains("a client uses it"), "{why}");
}

#[test]
fn a_larger_size_is_changed_online_and_a_smaller_one_is_refused() {
    let file = |size: &str| device("a", &format!("stack = \"file:/a.img,size={size},create\""));
    let before = || running(&file("1M")).used("a").of_size("a", Bytes::mib(1));
    assert_eq!(lines(&before(), &file("2M")), ["change a: size 2M"]);
    let why = refusals(&before(), &file("512K"));
    assert!(why.contains("from 1M to 512K") && why.contains("blockyard resize a 512K --shrink"), "{why}");
    // A device that was resized by hand matches the file already.
    assert_eq!(lines(&before().of_size("a", Bytes::mib(2)), &file("2M")), [""; 0]);
    // The size for its creation does not undo a resize.
    assert_eq!(lines(&before().of_size("a", Bytes::mib(4)), &file("1M")), [""; 0]);
    let image =
        |size: &str| device("a", &format!("stack = \"file:/a.qcow2,size={size},create,format=qcow2\""));
    let why = refusals(&running(&image("1M")), &image("2M"));
    assert!(why.contains("apply cannot change its size"), "{why}");
}

#[test]
fn a_table_is_loaded_and_resumed_below_limits_and_not_below_layers() {
    let text = |table: &str, keys: &str| {
        [null("x"), null("y"), device("a", &format!("table = \"{table}\"\n{keys}"))].concat()
    };
    let (one, two) = ("0 2048 linear x 0", "0 1024 linear x 0\\n1024 1024 linear y 0");
    let before = running(&text(one, "limits = \"max_sectors=8\"")).used("a");
    assert_eq!(
        lines(&before, &text(two, "limits = \"max_sectors=8\"")),
        ["change a: load a table of 2 lines"]
    );
    let before = running(&text(one, "layers = [\"delay,read=1ms\"]")).used("a");
    let why = refusals(&before, &text(two, "layers = [\"delay,read=1ms\"]"));
    assert!(why.contains("as its table changes below its layers"), "{why}");
}

#[test]
fn a_device_is_removed_after_a_table_that_no_longer_uses_it_is_loaded() {
    let before = running(&[null("x"), linear("a", "x")].concat()).used("a");
    let after = [null("y"), linear("a", "y")].concat();
    assert_eq!(
        lines(&before, &after),
        ["add y: null:1M, nbd unix:/run/y.sock", "change a: load a table of 1 line", "remove x"]
    );
}

#[test]
fn two_devices_that_change_places_are_changed_one_by_one() {
    // a over b becomes b over a, each with a base of its own in between.
    let before = running(&[null("base"), linear("b", "base"), linear("a", "b")].concat());
    let after = [null("base"), linear("a", "base"), linear("b", "a")].concat();
    assert_eq!(
        lines(&before, &after),
        ["change a: load a table of 1 line", "change b: load a table of 1 line"]
    );
}

#[test]
fn a_device_whose_table_fits_no_order_is_added_again() {
    // m changes from x to y, y will use x, and x is added again.
    let before = running(&[null("x"), null("y"), linear("m", "x")].concat());
    let after = [device("x", "stack = \"null:2M\""), linear("y", "x"), linear("m", "y")].concat();
    let lines = lines(&before, &after);
    let first: Vec<&str> = lines.iter().map(|line| line.split([',', ':']).next().unwrap_or("")).collect();
    assert_eq!(first, ["remove y", "remove m", "remove x", "add x", "add y", "add m"], "{lines:?}");
    assert!(lines[1].ends_with("change places"), "{lines:?}");
    let why = refusals(&before.used("m"), &after);
    assert!(why.starts_with("m: ") && why.contains("a client uses it"), "{why}");
}

#[test]
fn devices_that_would_use_each_other_are_refused() {
    let over = |name: &str, other: &str| {
        format!(
            "[device.{name}]\nstack = \"file:/srv/{other}.raw\"\n[[export]]\ndevice = \"{name}\"\nfuse = \"/srv/{name}.raw\"\n"
        )
    };
    let why = refusals(&running(&null("z")), &[null("z"), over("a", "b"), over("b", "a")].concat());
    assert!(why.starts_with("a, b: they would use each other"), "{why}");
}

#[test]
fn a_device_that_cannot_change_online_is_removed_and_added_again() {
    for (was, is, why) in [
        ("depth = 64", "depth = 32", "its depth changes"),
        ("layers = [\"part,1\"]", "layers = [\"part,2\"]", "its layers change"),
        ("", "layers = [\"cow,file=/o.img,create\"]", "its layers change"),
    ] {
        let keys = |keys: &str| device("a", &format!("stack = \"null:1M\"\n{keys}"));
        let lines = lines(&running(&keys(was)), &keys(is));
        assert_eq!(lines[0], format!("remove a, to add it again: {why}"));
        assert!(lines.len() == 2 && lines[1].starts_with("add a: null:1M"), "{lines:?}");
        let why = refusals(&running(&keys(was)).used("a"), &keys(is));
        assert!(why.contains("but a client uses it (stop its clients, and apply again)"), "{why}");
    }
    let lines = lines(&running(&null("a")), &device("a", "stack = \"null:2M\""));
    assert_eq!(lines[0], "remove a, to add it again: its stack changes");
}

#[test]
fn users_of_a_device_that_is_added_again_are_added_again() {
    let before = running(&[null("x"), linear("m", "x"), linear("a", "m"), null("z")].concat());
    let after = [device("x", "stack = \"null:2M\""), linear("m", "x"), linear("a", "m"), null("z")].concat();
    let lines = lines(&before, &after);
    let first: Vec<&str> = lines.iter().map(|line| line.split([',', ':']).next().unwrap_or("")).collect();
    assert_eq!(first, ["remove a", "remove m", "remove x", "add x", "add m", "add a"]);
    let why = refusals(&before.used("a"), &after);
    assert!(why.contains("as m, which it uses, is added again; but a client uses it"), "{why}");
}

#[test]
fn a_device_in_use_is_not_removed() {
    let before = running(&[null("a"), null("b")].concat()).used("a");
    let why = refusals(&before, &null("b"));
    assert_eq!(why, "a: a client uses it, so it is not removed (stop its clients, or run: blockyard del a)");
}

#[test]
fn a_device_that_another_one_uses_is_not_removed_alone() {
    let mut before = running(&[null("x"), linear("a", "x")].concat());
    // A table keeps a device by a path, too, which the topology does not show.
    before.devices[1].spec = topology(&null("a")).devices[0].clone();
    let why = refusals(&before, &null("a"));
    assert_eq!(why, "a: it uses x, which the file does not contain (keep x, or remove both)");
}

#[test]
fn a_lower_device_may_be_in_use_by_a_device_that_is_removed() {
    let before = running(&[null("x"), linear("a", "x"), null("z")].concat()).used("x");
    assert_eq!(lines(&before, &null("z")), ["remove a", "remove x"]);
}

#[test]
fn exports_are_added_and_removed_while_the_device_stays() {
    let with = |exports: &str| format!("[device.a]\nstack = \"null:1M\"\n{exports}");
    let one = "[[export]]\ndevice = \"a\"\nnbd = \"unix:/run/one.sock\"\n";
    let two = "[[export]]\ndevice = \"a\"\nnbd = \"unix:/run/two.sock\"\n";
    let both = [one, two].concat();
    assert_eq!(
        lines(&running(&with(one)).used("a"), &with(&both)),
        ["add export nbd unix:/run/two.sock of a"]
    );
    assert_eq!(lines(&running(&with(&both)), &with(one)), ["remove export nbd://a of a"]);
    assert_eq!(
        lines(&running(&with(one)), &with(two)),
        ["remove export nbd://a of a", "add export nbd unix:/run/two.sock of a"]
    );
    let why = refusals(&running(&with(&both)).used("a"), &with(one));
    assert!(why.contains("a: a client uses the device, so its export nbd://a is not removed"), "{why}");
}

#[test]
fn an_address_moves_from_one_device_to_another() {
    let at = |device: &str, address: &str| {
        format!(
            "[device.{device}]\nstack = \"null:1M\"\n[[export]]\ndevice = \"{device}\"\nname = \"x\"\nnbd = \"{address}\"\n"
        )
    };
    let (here, there) = ("unix:/run/here.sock", "unix:/run/there.sock");
    let before = running(&[at("a", here), at("b", there)].concat());
    assert_eq!(
        lines(&before, &[at("a", there), at("b", here)].concat()),
        [
            "remove export nbd://a of a",
            "remove export nbd://b of b",
            "add export nbd unix:/run/there.sock of a",
            "add export nbd unix:/run/here.sock of b"
        ]
    );
}

#[test]
fn a_device_whose_ublk_export_changes_is_added_again() {
    let with =
        |ublk: &str| format!("[device.a]\nstack = \"null:1M\"\n[[export]]\ndevice = \"a\"\nublk = {ublk}\n");
    let lines = lines(&running(&with("3")), &with("\"3,queues=2\""));
    assert_eq!(
        lines,
        ["remove a, to add it again: its ublk device changes", "add a: null:1M, ublk 3,queues=2"]
    );
}

#[test]
fn settings_of_the_process_are_refused() {
    let before = running(&["queues = 2\n".to_owned(), null("a")].concat());
    let why = refusals(
        &before,
        &["queues = 3\npoll = true\nring = \"epoll\"\n".to_owned(), null("a"), null("b")].concat(),
    );
    for part in ["queues: the process was started with 2, and 3 needs a restart", "poll: ", "ring: "] {
        assert!(why.contains(part), "{why}");
    }
    let same = ["queues = 2\nring = \"auto\"\npoll = false\n".to_owned(), null("a")].concat();
    assert_eq!(lines(&before, &same), [""; 0]);
}

#[test]
fn every_reason_is_reported_at_once() {
    let before = running(&[null("a"), null("b"), null("c")].concat()).used("a").used("b");
    let why = refusals(&before, &["queues = 9\n".to_owned(), device("b", "stack = \"null:2M\"")].concat());
    assert_eq!(why.lines().count(), 3, "{why}");
}

#[test]
fn plans_of_random_stacks_keep_lower_devices_below_their_users() {
    let mut random = fastrand::Rng::with_seed(13);
    let any = |random: &mut fastrand::Rng| {
        let mut text = String::new();
        for number in 0..8 {
            if random.u8(..4) == 0 && number > 0 {
                continue;
            }
            let lower: Vec<usize> =
                (0..number).filter(|lower| text.contains(&format!("[device.d{lower}]"))).collect();
            text += &match random.choice(&lower) {
                Some(lower) if random.bool() => linear(&format!("d{number}"), &format!("d{lower}")),
                _ => device(&format!("d{number}"), &format!("stack = \"null:{}M\"", random.u8(1..3))),
            };
        }
        text
    };
    for _ in 0..300 {
        let (before, after) = (any(&mut random), any(&mut random));
        let (state, wanted) = (running(&before), topology(&after));
        let plan = plan(&state, &wanted);
        assert_eq!(plan.refusals, [], "{before}\n{after}");
        // Executes the plan on a model: existing names, and the devices that each uses.
        let mut exists: std::collections::BTreeMap<String, Vec<String>> = state
            .devices
            .iter()
            .map(|device| {
                (device.spec.name.to_string(), device.below.iter().map(ToString::to_string).collect())
            })
            .collect();
        let below = |name: &str| {
            let spec = wanted.devices.iter().find(|spec| spec.name.as_str() == name).expect("it is wanted");
            wanted.stands_on(spec).iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        for action in &plan.actions {
            let name = action.device().to_string();
            match action {
                Action::Remove { .. } => {
                    let above = exists.iter().find(|(_, below)| below.contains(&name));
                    assert!(above.is_none(), "{action}: {above:?} uses it\n{before}\n{after}");
                    assert!(exists.remove(&name).is_some(), "{action}");
                }
                Action::Add { .. } | Action::Table { .. } => {
                    let below = below(&name);
                    assert!(
                        below.iter().all(|lower| exists.contains_key(lower)),
                        "{action}\n{before}\n{after}"
                    );
                    let is_new = exists.insert(name, below).is_none();
                    assert_eq!(is_new, matches!(action, Action::Add { .. }), "{action}");
                }
                _ => {}
            }
        }
        let names = |topology: &Topology| {
            topology
                .devices
                .iter()
                .map(|spec| spec.name.to_string())
                .collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(exists.into_keys().collect::<std::collections::BTreeSet<_>>(), names(&wanted));
    }
}
