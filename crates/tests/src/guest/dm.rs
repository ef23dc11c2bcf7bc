//! Our targets compared with the kernel's: one table on the same loop devices, first on one side, then on the
//! other. Their texts must be equal, and so must the bytes on the devices.

use super::disk::tool;
use super::{Done, Skip, Test, soak, test};
use crate::peer::Peer;
use crate::remote::table_as;
use crate::server::{Sandbox, Server, noise};
use crate::tools::{PATIENCE, until};
use proto::nbd::CommandFlags;
use std::path::{Path, PathBuf};

/// The tests of this module.
pub const TESTS: &[Test] = &[
    test("dm/words", "table and status of each target are the kernel's, character for character", words),
    test("dm/errors", "errors in a table line are those of the kernel's log", errors),
    soak("dm/errors_all", "errors in many more table lines", all_errors),
    test("dm/data", "equal writes leave equal bytes on the devices below", data),
    test("dm/log_writes", "logs of the kernel's and of ours are equal, and both are replayed", logs),
    soak("dm/mirror_log", "a log of the kernel's mirror equals ours, and each uses the other's", mirror_logs),
    test("dm/snapshot_store", "a store that the kernel wrote is read here, and the reverse", stores),
];

/// Length of each device, in sectors.
const SECTORS: u64 = 8192;

/// Loop devices on files with noise; detached when dropped.
pub(super) struct Loops {
    pub(super) sandbox: Sandbox,
    nodes: Vec<String>,
    files: Vec<PathBuf>,
    /// Output of the kernel's list of targets.
    targets: String,
}

impl Loops {
    fn new(count: usize, targets: String) -> Loops {
        let sandbox = Sandbox::default();
        let (mut nodes, mut files) = (Vec::new(), Vec::new());
        for number in 0..count {
            let file = sandbox.image(&format!("{number}.img"), SECTORS << 9);
            let printed = tool(&["losetup", "--find", "--show", &file.to_string_lossy()]).ok();
            nodes.push(printed.trim().to_owned());
            files.push(file);
        }
        Loops { sandbox, nodes, files, targets }
    }

    /// Returns whether this kernel has a target.
    pub(super) fn has(&self, target: &str) -> bool {
        self.targets.lines().any(|line| line.split_whitespace().next() == Some(target))
    }

    /// Writes the same content to each device.
    fn refill(&self) {
        for (number, node) in self.nodes.iter().enumerate() {
            let data = noise(number as u64, (SECTORS << 9) as usize);
            put(Path::new(node), 0, &data);
        }
    }

    fn clear(&self, number: usize) {
        put(Path::new(&self.nodes[number]), 0, &vec![0; (SECTORS << 9) as usize]);
    }

    /// Returns a table with the devices in place of `{0}`, `{1}` …
    pub(super) fn table(&self, text: &str) -> String {
        let named =
            |text: String, (number, node): (usize, &String)| text.replace(&format!("{{{number}}}"), node);
        self.nodes.iter().enumerate().fold(text.to_owned(), named)
    }

    fn content(&self, number: usize) -> Vec<u8> {
        tool(&["blockdev", "--flushbufs", &self.nodes[number]]).ok();
        std::fs::read(&self.files[number]).expect("a file")
    }

    /// Serves a table by our program.
    fn serve(&self, table: &str) -> (Server, Peer) {
        let server = table_as(&self.sandbox, "ours", &self.table(table), &[]);
        let peer = Peer::connect(&server.socket(), "ours");
        (server, peer)
    }

    fn ours(&self, arguments: &[&str]) -> String {
        self.sandbox.run(arguments).ok()
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for node in &self.nodes {
            tool(&["losetup", "--detach", node]);
        }
    }
}

/// Writes by direct I/O, in one request, and flushes.
#[track_caller]
fn put(to: &Path, at: u64, data: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let from = folder.path().join("data");
    std::fs::write(&from, data).expect("a file");
    let (of, bs) = (format!("of={}", to.display()), format!("bs={}", data.len()));
    let words = ["dd", &format!("if={}", from.display()), &of, &bs, &format!("seek={at}")];
    tool(&[&words[..], &["oflag=direct,seek_bytes", "conv=notrunc,fsync", "status=none"]].concat()).ok();
}

#[track_caller]
fn take(from: &str) -> Vec<u8> {
    tool(&["blockdev", "--flushbufs", from]).ok();
    std::fs::read(from).expect("a device")
}

/// A device of the kernel's device-mapper; removed when dropped.
struct Kernel;

impl Kernel {
    fn new(table: &str) -> Kernel {
        let words = ["dmsetup", "create", "theirs", "--noudevsync", "--noudevrules"];
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("table");
        std::fs::write(&file, table).expect("a file");
        tool(&[&words[..], &[&file.to_string_lossy()]].concat()).ok();
        tool(&["dmsetup", "mknodes", "theirs"]);
        Kernel
    }

    fn say(arguments: &[&str]) -> String {
        tool(&[&["dmsetup"], arguments].concat()).ok()
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        tool(&["dmsetup", "remove", "--noudevsync", "--retry", "theirs"]);
    }
}

const NODE: &str = "/dev/mapper/theirs";

pub(super) fn prepare() -> Result<Loops, Skip> {
    for module in MODULES {
        tool(&["modprobe", module]);
    }
    let targets = tool(&["dmsetup", "targets"]);
    if !targets.status.success() {
        return Err(Skip("this kernel has no device-mapper".into()));
    }
    Ok(Loops::new(3, targets.ok()))
}

/// Modules of the targets and of their prerequisites, where they are not built in.
const MODULES: [&str; 15] = [
    "loop",
    "dm_mod",
    "dm_multipath",
    "dm_round_robin",
    "dm_queue_length",
    "dm_service_time",
    "dm_historical_service_time",
    "dm_unstripe",
    "dm_delay",
    "dm_flakey",
    "dm_dust",
    "dm_switch",
    "dm_log_writes",
    "dm_snapshot",
    "dm_mirror",
];

/// Tables, each a list of lines without their start sector, and for each line a message that is sent before
/// the status is read. Loading a table is slow in a guest, so a table has many lines.
const TABLES: &[&[(&str, &str)]] = &[
    &[
        ("4096 linear {0} 16", ""),
        ("4096 striped 2 16 {0} 0 {1} 4096", ""),
        ("6144 striped 3 8 {0} 0 {1} 128 {2} 0", ""),
        ("4096 unstriped 2 16 1 {0} 0", ""),
        ("4096 delay {0} 8 5", ""),
        ("4096 delay {0} 8 5 {1} 16 6", ""),
        ("4096 delay {0} 8 5 {1} 16 6 {2} 0 7", ""),
        ("4096 flakey {0} 0 5 2", ""),
        ("4096 flakey {0} 0 5 2 1 drop_writes", ""),
        ("4096 flakey {0} 0 5 2 1 error_writes", ""),
        ("4096 flakey {0} 8 5 2 5 corrupt_bio_byte 32 r 1 0", ""),
        ("4096 flakey {0} 8 5 2 4 random_read_corrupt 7 random_write_corrupt 8", ""),
        ("4096 dust {0} 0 512", ""),
        ("4096 dust {0} 8 4096", "enable"),
        ("4096 dust {0} 8 4096", "quiet"),
        ("4096 switch 3 64 0 {0} 0 {1} 8 {2} 16", "set_region_mappings 0:1 R1,3"),
        ("4096 mirror core 2 64 nosync 2 {0} 0 {1} 8", ""),
        ("4096 snapshot-origin {0}", ""),
        ("64 zero", ""),
        ("64 error", ""),
    ],
    &[
        ("4096 log-writes {0} {1}", "mark one"),
        ("4096 mirror disk 3 {2} 64 nosync 2 {0} 0 {0} 4096 1 handle_errors", ""),
    ],
    &[("4096 snapshot {0} {1} PO 32", ""), ("4096 snapshot {0} {2} N 8", "")],
];

fn words() -> Done {
    let loops = prepare()?;
    let mut missing = Vec::new();
    for lines in TABLES {
        let (mut table, mut reported, mut start) = (String::new(), Vec::new(), 0);
        for &(line, message) in *lines {
            let mut words = line.split(' ');
            let len: u64 = words.next().and_then(|len| len.parse().ok()).expect("a length");
            let target = words.next().expect("a target");
            if !loops.has(target) {
                missing.push(target);
                continue;
            }
            table += &format!("{start} {line}\n");
            if !message.is_empty() {
                reported.push((start.to_string(), message));
            }
            start += len;
        }
        if table.is_empty() {
            continue;
        }
        (1..3).for_each(|number| loops.clear(number));
        let messages = |device: &str| -> Vec<Vec<String>> {
            let words = |(start, message): &(String, &str)| {
                let message = message.split(' ').map(str::to_owned);
                ["message".to_owned(), device.to_owned(), start.clone()].into_iter().chain(message).collect()
            };
            reported.iter().map(words).collect()
        };
        let theirs = {
            let _kernel = Kernel::new(&loops.table(&table));
            for message in messages("theirs") {
                Kernel::say(&message.iter().map(String::as_str).collect::<Vec<_>>());
            }
            [Kernel::say(&["table", "theirs"]), Kernel::say(&["status", "theirs"])]
        };
        (1..3).for_each(|number| loops.clear(number));
        let (server, peer) = loops.serve(&table);
        for message in messages("ours") {
            loops.ours(&message.iter().map(String::as_str).collect::<Vec<_>>());
        }
        assert_eq!([loops.ours(&["table", "ours"]), loops.ours(&["status", "ours"])], theirs, "{table}");
        peer.disconnect();
        drop(server);
    }
    all_or_skip(&missing)
}

/// Passes if all were compared; skips with the names of those that were not.
fn all_or_skip(missing: &[&str]) -> Done {
    if missing.is_empty() {
        return Ok(());
    }
    println!("compared all but: {}", missing.join(" "));
    Ok(())
}

/// Invalid lines: only two for each target, since each load is slow.
const WRONG: &[&str] = &[
    "0 4096 linear {0} x",
    "0 4096 striped 2 48 {0} 0 {1} 0",
    "0 4096 striped 2 8 {0} 0 {1} x",
    "0 4096 delay {0} 0",
    "0 4096 flakey {0} 0 5 2 2 drop_writes error_writes",
    "0 4096 flakey {0} 0 5 2 3 error_reads random_read_corrupt 1",
    "0 4096 dust {0} 0 1536",
    "0 4096 log-writes {0}",
    "0 4096 switch 2 64 0 {0} 0",
    "0 4096 unstriped 2 48 1 {0} 0",
    "0 4096 mirror core 1 63 2 {0} 0 {1} 0",
    "0 4096 mirror core 1 64 2 {0} 0 {1} 0 1 keep_log",
    "0 4096 multipath 1 swim 0 1 1 round-robin 0 1 0 {0}",
    "0 4096 multipath 0 0 1 1 service-time 0 1 2 {0} 1 101",
];

/// Lines that older kernels accept.
const TAKEN_BEFORE: &[&str] = &["0 4096 flakey {0} 0 5 2 3 error_reads random_read_corrupt 1"];

/// More invalid lines, for long runs.
const MORE_WRONG: &[&str] = &[
    "0 4096 linear {0}",
    "0 4096 striped 0 8 {0} 0",
    "0 4096 striped 2 0 {0} 0 {1} 0",
    "0 4096 striped 2 8 {0} 0",
    "0 4095 striped 2 8 {0} 0 {1} 0",
    "0 4096 striped 2",
    "0 4096 delay {0} x 5",
    "0 4096 delay {0} 0 x",
    "0 4096 flakey {0} 0 5",
    "0 4096 flakey {0} x 5 2",
    "0 4096 flakey {0} 0 x 2",
    "0 4096 flakey {0} 0 5 x",
    "0 4096 flakey {0} 0 0 0",
    "0 4096 flakey {0} 0 5 2 1 bogus",
    "0 4096 flakey {0} 0 5 2 2 drop_writes",
    "0 4096 flakey {0} 0 5 2 5 corrupt_bio_byte 0 r 1 0",
    "0 4096 flakey {0} 0 5 2 5 corrupt_bio_byte 1 x 1 0",
    "0 4096 flakey {0} 0 5 2 5 corrupt_bio_byte 1 r 256 0",
    "0 4096 flakey {0} 0 5 2 2 random_read_corrupt 1000000001",
    "0 4096 dust {0} 0",
    "0 4096 dust {0} x 512",
    "0 4096 dust {0} 0 256",
    "0 4096 log-writes {0} /nosuch",
    "0 4096 switch 0 64 0 {0} 0",
    "0 4096 switch 1 0 0 {0} 0",
    "0 4096 switch 1 64 1 {0} 0",
    "0 4096 switch 1 64 0 {0} x",
    "0 4096 unstriped 2 16 2 {0} 0",
    "0 4096 unstriped 2 16 1 {0}",
    "0 4096 unstriped 2 16 1 {0} x",
    "0 4096 mirror core 1 64 1 {0} 0",
    "0 4096 mirror bogus 1 64 2 {0} 0 {1} 0",
    "0 4096 mirror core 1 64 2 {0} 0 {1}",
    "0 4096 mirror core 1 64 2 {0} 0 {1} x",
    "0 4096 mirror core 1 64 2 {0} 0 {1} 0 1 bogus",
    "0 4096 snapshot {0} {1} X 16",
    "0 4096 snapshot {0} {1} P 3",
    "0 4096 snapshot {0} {1} P",
    "0 4096 snapshot {0} {0} P 16",
    "0 4096 snapshot {0} {1} P 16 1 bogus",
    "0 4096 snapshot-origin",
    "0 4096 zero 1",
    "0 4096 multipath",
    "0 4096 multipath 9 0 0 0",
    "0 4096 multipath 1",
    "0 4096 multipath 1 queue_mode 0 1 1 round-robin 0 1 0 {0}",
    "0 4096 multipath 2 queue_mode fast 0 1 1 round-robin 0 1 0 {0}",
    "0 4096 multipath 2 pg_init_retries 0 0 1 1 round-robin 0 1 0 {0}",
    "0 4096 multipath 2 pg_init_retries 51 0 1 1 round-robin 0 1 0 {0}",
    "0 4096 multipath 2 pg_init_delay_msecs 60001 0 1 1 round-robin 0 1 0 {0}",
    "0 4096 multipath 0 x",
    "0 4096 multipath 0 0",
    "0 4096 multipath 0 0 1025 1",
    "0 4096 multipath 0 0 1",
    "0 4096 multipath 0 0 1 0",
    "0 4096 multipath 0 0 0 1",
    "0 4096 multipath 0 0 1 1",
    "0 4096 multipath 0 0 2 1 round-robin 0 1 0 {0}",
    "0 4096 multipath 0 0 1 1 round-robin 0 1 0 {0} round-robin 0 1 0 {1}",
    "0 4096 multipath 0 0 1 1 round-robin",
    "0 4096 multipath 0 0 1 1 Round-Robin 0 1 0 {0}",
    "0 4096 multipath 0 0 1 1 round-robin x",
    "0 4096 multipath 0 0 1 1 round-robin 0 0 0",
    "0 4096 multipath 0 0 1 1 round-robin 0 1 x {0}",
    "0 4096 multipath 0 0 1 1 round-robin 0 2 0 {0}",
    "0 4096 multipath 0 0 1 1 round-robin 0 1 2 {0} 1 1",
    "0 4096 multipath 0 0 1 1 round-robin 0 1 1 {0} x",
    "0 4096 multipath 0 0 1 1 round-robin 0 1 0 /nosuch",
    "0 4096 multipath 0 0 1 1 queue-length 0 1 2 {0} 1 1",
    "0 4096 multipath 0 0 1 1 queue-length 0 1 1 {0} x",
    "0 4096 multipath 0 0 1 1 service-time 0 1 3 {0} 1 1 1",
    "0 4096 multipath 0 0 1 1 service-time 0 1 1 {0} x",
];

fn errors() -> Done {
    compare_errors(WRONG)
}

fn all_errors() -> Done {
    compare_errors(MORE_WRONG)
}

fn compare_errors(lines: &[&'static str]) -> Done {
    let loops = prepare()?;
    let (mut missing, mut differ) = (Vec::new(), Vec::new());
    for &line in lines {
        let target = line.split(' ').nth(2).unwrap_or_default();
        if !loops.has(target) {
            missing.push(target);
            continue;
        }
        loops.clear(1);
        let table = loops.table(line);
        let refused = tool(&["dmsetup", "create", "theirs", "--noudevsync", "--table", &table]);
        if refused.status.success() {
            drop(Kernel);
            if TAKEN_BEFORE.contains(&line) {
                missing.push(target);
                continue;
            }
            differ.push(format!("the kernel takes {line}"));
            continue;
        }
        let log = tool(&["dmesg"]).ok();
        let last = log.lines().rev().find(|line| line.contains("device-mapper: table:")).expect("a reason");
        let theirs = last.split_once(&format!("{target}: ")).expect("the target's own").1;
        let theirs = theirs.rsplit_once(" (").map_or(theirs, |halves| halves.0);
        let file = loops.sandbox.text("wrong.table", &table);
        let words = ["serve", "--table", &file.to_string_lossy(), "--nbd", "unix:wrong.sock"];
        let ours = loops.sandbox.run(&words).failed_with(1);
        if !ours.contains(&format!("{target}: {theirs}")) {
            differ.push(format!("{line}\n kernel: {theirs}\n ours: {ours}"));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
    missing.dedup();
    all_or_skip(&missing)
}

/// Tables whose data must be at the same places.
const PLACES: &[(&str, &str)] = &[
    ("striped", "0 6120 striped 3 24 {0} 0 {1} 128 {2} 8"),
    ("unstriped", "0 4096 unstriped 2 16 1 {0} 0"),
    ("flakey", "0 4096 flakey {0} 8 0 9 5 corrupt_bio_byte 33 w 77 0"),
    ("switch", "0 4096 switch 3 64 0 {0} 0 {1} 8 {2} 16"),
    ("mirror", "0 4096 mirror core 2 64 nosync 2 {0} 0 {1} 8"),
];

/// Offsets and lengths in bytes, each within the shortest table.
const WRITES: &[(u64, usize)] = &[(4096, 16384), (100 << 10, 512), ((2 << 20) - 4096, 4096)];

fn data() -> Done {
    let loops = prepare()?;
    let mut missing = Vec::new();
    for &(target, table) in PLACES {
        if !loops.has(target) {
            missing.push(target);
            continue;
        }
        loops.refill();
        let theirs = {
            let _kernel = Kernel::new(&loops.table(table));
            for (number, &(at, len)) in WRITES.iter().enumerate() {
                put(Path::new(NODE), at, &noise(100 + number as u64, len));
            }
            take(NODE)
        };
        let below: Vec<_> = (0..3).map(|number| loops.content(number)).collect();
        loops.refill();
        let (mut server, mut peer) = loops.serve(table);
        for (number, &(at, len)) in WRITES.iter().enumerate() {
            peer.write(at, &noise(100 + number as u64, len), CommandFlags::empty()).expect("a write");
            peer.flush().expect("a flush");
        }
        let ours = peer.read(0, theirs.len() as u64).expect("a read");
        peer.disconnect();
        server.terminate();
        assert!(ours == theirs, "{table}: the device differs at {:?}", differs(&ours, &theirs));
        for (number, theirs) in below.iter().enumerate() {
            let ours = loops.content(number);
            assert!(ours == *theirs, "{table}: device {number} differs at {:?}", differs(&ours, theirs));
        }
    }
    all_or_skip(&missing)
}

/// Returns the first byte that differs.
fn differs(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

fn logs() -> Done {
    let loops = prepare()?;
    if !loops.has("log-writes") {
        return Err(Skip("this kernel has no target log-writes".into()));
    }
    let table = "0 8192 log-writes {0} {1}";
    let writes = [(8192, 4096), (0, 8192), (65536, 512)];
    let list = || loops.ours(&["replay-log", "--log", &loops.nodes[1]]);
    let replayed = || {
        loops.clear(2);
        loops.ours(&["replay-log", "--log", &loops.nodes[1], "--replay", &loops.nodes[2]]);
        loops.content(2)
    };
    (0..3).for_each(|number| loops.clear(number));
    {
        let _kernel = Kernel::new(&loops.table(table));
        for (number, &(at, len)) in writes.iter().enumerate() {
            put(Path::new(NODE), at, &noise(number as u64, len));
        }
        Kernel::say(&["message", "theirs", "0", "mark", "here"]);
    }
    let (theirs, their_bytes) = (list(), loops.content(1));
    assert!(replayed() == loops.content(0), "the kernel's log leads to the kernel's device");
    (0..3).for_each(|number| loops.clear(number));
    let (mut server, mut peer) = loops.serve(table);
    for (number, &(at, len)) in writes.iter().enumerate() {
        peer.write(at, &noise(number as u64, len), CommandFlags::empty()).expect("a write");
        peer.flush().expect("a flush");
    }
    loops.ours(&["message", "ours", "0", "mark", "here"]);
    peer.disconnect();
    server.terminate();
    let ours = list();
    // The kernel adds a mark at the end; ours has the flush of a removed device.
    let wanted: Vec<&str> =
        theirs.lines().take_while(|line| !line.ends_with("mark dm-log-writes-end")).collect();
    let found: Vec<&str> = ours.lines().take(wanted.len()).collect();
    assert_eq!(found, wanted, "the kernel's log: {theirs}ours: {ours}");
    let end = 512 * (1 + wanted.len() + writes.iter().map(|write| write.1 / 512).sum::<usize>());
    assert!(loops.content(1)[512..end] == their_bytes[512..end], "the entries differ");
    assert!(replayed() == loops.content(0), "our log leads to our device");
    Ok(())
}

fn stores() -> Done {
    let loops = prepare()?;
    if !loops.has("snapshot") {
        return Err(Skip("this kernel has no target snapshot".into()));
    }
    loops.refill();
    loops.clear(1);
    let table = "0 4096 snapshot {0} {1} P 16";
    let theirs = {
        let _kernel = Kernel::new(&loops.table(table));
        put(Path::new(NODE), 4096, &noise(50, 65536));
        put(Path::new(NODE), 1 << 20, &noise(51, 512));
        (take(NODE), Kernel::say(&["status", "theirs"]))
    };
    let (mut server, mut peer) = loops.serve(table);
    assert_eq!(loops.ours(&["status", "ours"]), theirs.1);
    assert!(peer.read(0, 4096 << 9).expect("a read") == theirs.0, "we read what the kernel wrote");
    peer.write(1536 << 10, &noise(52, 16384), CommandFlags::FUA).expect("a write");
    let ours = (peer.read(0, 4096 << 9).expect("a read"), loops.ours(&["status", "ours"]));
    peer.disconnect();
    server.terminate();
    let _kernel = Kernel::new(&loops.table(table));
    assert!(take(NODE) == ours.0, "the kernel reads what we wrote");
    assert_eq!(Kernel::say(&["status", "theirs"]), ours.1);
    Ok(())
}

const MIRROR: &str = "0 4096 mirror disk 2 {2} 64 2 {0} 0 {1} 8";
/// Bytes of a mirror's region.
const REGION: usize = 64 << 9;
/// Offset of the regions' marks in the log.
const MARKS: usize = 1024;

/// Mirrors until the log has all regions in sync.
#[track_caller]
fn mirrored(loops: &Loops, by_kernel: bool) {
    let is_clean = || (loops.content(2)[MARKS..MARKS + 8] == [0xff; 8]).then_some(());
    if by_kernel {
        let _kernel = Kernel::new(&loops.table(MIRROR));
        assert!(until(PATIENCE, is_clean).is_some(), "{}", Kernel::say(&["status", "theirs"]));
        return;
    }
    let (mut server, peer) = loops.serve(MIRROR);
    assert!(until(PATIENCE, is_clean).is_some(), "{}", loops.ours(&["status", "ours"]));
    peer.disconnect();
    server.terminate();
}

fn mirror_logs() -> Done {
    let loops = prepare()?;
    if !loops.has("mirror") {
        return Err(Skip("this kernel has no target mirror".into()));
    }
    let mut logs = Vec::new();
    for kernel_first in [true, false] {
        loops.refill();
        loops.clear(2);
        mirrored(&loops, kernel_first);
        let log = loops.content(2)[..4096].to_vec();
        let start = |region: usize| 4096 + region * REGION;
        // Two regions differ between the legs, and the log marks one of them: the other counts as in sync and
        // is not copied.
        let other = vec![0x5a; REGION];
        for region in [5, 9] {
            put(Path::new(&loops.nodes[1]), start(region) as u64, &other);
        }
        let mut marks = log[MARKS..MARKS + 512].to_vec();
        marks[0] &= !(1 << 5);
        put(Path::new(&loops.nodes[2]), MARKS as u64, &marks);
        mirrored(&loops, !kernel_first);
        let (first, second) = (loops.content(0), loops.content(1));
        let of_second = |region: usize| &second[start(region)..start(region) + REGION];
        assert!(of_second(5) == &first[5 * REGION..6 * REGION], "{kernel_first}: a marked region is copied");
        assert!(of_second(9) == other, "{kernel_first}: one without a mark is not");
        logs.push(log);
    }
    assert!(logs[0] == logs[1], "the logs differ at {:?}", differs(&logs[0], &logs[1]));
    Ok(())
}
