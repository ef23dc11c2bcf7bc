//! Traces of the real binary, read by the kernel's tools: blkparse, btt, iowatcher, fio.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, noise};
use blockyard_tests::tools::{Outcome, PATIENCE, missing, run, until};
use proto::nbd::CommandFlags;
use std::fs;
use std::io::Read;
use std::process::{Child, Stdio};

const MIB: u64 = 1 << 20;

/// A running trace. It is ended by `end`, or with the test.
struct Tracing<'a> {
    sandbox: &'a Sandbox,
    device: String,
    child: Child,
}

impl<'a> Tracing<'a> {
    /// Starts a trace into files with this prefix; returns once it listens.
    fn start(sandbox: &'a Sandbox, device: &str, output: &str, more: &[&str]) -> Tracing<'a> {
        let prefix = sandbox.path(output).display().to_string();
        let mut command = sandbox.blockyard(&["trace", device, "-o", &prefix]);
        let child = command.args(more).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let listens = || {
            let first = fs::read_dir(sandbox.path(""))
                .ok()?
                .filter_map(Result::ok)
                .find(|entry| entry.file_name().to_string_lossy().starts_with(output));
            first.map(|_| ())
        };
        until(PATIENCE, listens).expect("a trace begins");
        Tracing { sandbox, device: device.to_owned(), child }
    }

    /// Ends it and returns its output.
    fn end(mut self) -> String {
        self.sandbox.run(&["trace", &self.device, "end"]).ok();
        let status = blockyard_tests::tools::wait_within(&mut self.child, PATIENCE).expect("it ends");
        let mut printed = String::new();
        self.child.stderr.take().expect("it is piped").read_to_string(&mut printed).expect("it is text");
        assert!(status.success(), "{printed}");
        printed
    }
}

impl Drop for Tracing<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(server: &Server, device: &str) -> Peer {
    Peer::connect(&server.socket(), device)
}

fn tool(sandbox: &Sandbox, arguments: &[&str]) -> Outcome {
    run(sandbox.tool(arguments).current_dir(sandbox.path("")))
}

/// Returns blkparse's event lines: letter, operation, and the rest, without the `[comm]`.
fn events(parsed: &str) -> Vec<(String, String, String)> {
    let of_line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_event = words.len() > 6 && words[0].starts_with("240,");
        is_event.then(|| (words[5].to_owned(), words[6].to_owned(), words[7..].join(" ")))
    };
    let bare = |(letter, op, rest): (String, String, String)| {
        let rest = rest.split(" [").next().unwrap_or_default().to_owned();
        (letter, op, rest)
    };
    parsed.lines().filter_map(of_line).map(bare).collect()
}

#[test]
fn blkparse_btt_iowatcher_and_fio_read_a_trace() {
    if missing(&["blkparse", "btt", "fio"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:64M", &["--name", "disk", "--queues", "2"]);
    let tracing = Tracing::start(&sandbox, "disk", "t", &[]);
    let mut peers = [connect(&server, "disk"), connect(&server, "disk")];
    for n in 0..200u64 {
        let peer = &mut peers[n as usize % 2];
        peer.write(n * 8192, &noise(n, 4096), CommandFlags::default()).expect("written");
        peer.read(n * 8192, 4096).expect("read");
    }
    peers[0].write(0, &noise(1, 4096), CommandFlags::FUA).expect("written");
    peers[0].flush().expect("flushed");
    let printed = tracing.end();
    // The first client's queue is on either of the threads.
    assert!(
        printed.contains(": 1000 events, 0 dropped") && printed.contains(": 1010 events, 0 dropped"),
        "{printed}"
    );

    let parsed = tool(&sandbox, &["blkparse", "-i", "t", "-d", "t.bin"]).ok();
    let reported = events(&parsed);
    let count = |letter: &str, op: &str| reported.iter().filter(|e| e.0 == letter && e.1 == op).count();
    for letter in ["Q", "G", "I", "D", "C"] {
        assert_eq!((count(letter, "R"), count(letter, "W")), (200, 200), "{letter}");
        assert_eq!((count(letter, "WFS"), count(letter, "FWS")), (1, 1), "{letter}");
    }
    assert!(parsed.contains("[reactor-0]") && parsed.contains("[reactor-1]") && !parsed.contains("(null)"));
    assert!(parsed.contains("Skips: 0 forward") && parsed.contains("Throughput (R/W)"), "{parsed}");

    let timed = tool(&sandbox, &["btt", "-i", "t.bin"]).ok();
    for row in ["Q2Q", "Q2G", "G2I", "I2D", "D2C", "Q2C"] {
        let line =
            timed.lines().find(|line| line.starts_with(row)).unwrap_or_else(|| panic!("{row}: {timed}"));
        let times: Vec<f64> = line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
        assert!(times[0] >= 0.0 && times[2] < 10.0 && times[3] >= 400.0, "{line}");
    }

    // The trace, replayed on another device: fio issues the queued requests, in that order.
    sandbox.image("replay.img", 64 * MIB);
    let replayed = tool(
        &sandbox,
        &[
            "fio",
            "--name=replay",
            "--ioengine=psync",
            "--read_iolog=t.bin",
            "--replay_redirect=replay.img",
            "--replay_no_stall=1",
            "--output-format=json",
        ],
    );
    let replayed: serde_json::Value = serde_json::from_str(&replayed.ok()).expect("fio prints JSON");
    let ios = |kind: &str| replayed["jobs"][0][kind]["total_ios"].as_u64();
    // To fio the flush is a write without length.
    assert_eq!(ios("read"), Some(200), "{replayed}");
    assert!(ios("write").is_some_and(|writes| (201..=202).contains(&writes)), "{replayed}");

    if !missing(&["iowatcher"]) {
        tool(&sandbox, &["iowatcher", "-t", "t", "-o", "t.svg"]).ok();
        let drawn = fs::read_to_string(sandbox.path("t.svg")).expect("iowatcher draws");
        assert!(drawn.contains("<svg") && drawn.contains("IOPs"), "nothing is drawn");
    }
}

/// Equal requests, timed by both: `stat` reads the clock once a turn of the thread, a trace at every event.
#[test]
fn btt_and_stat_agree_about_latencies_within_a_turn() {
    if missing(&["blkparse", "btt"]) {
        return;
    }
    // A turn takes microseconds on a free processor, and any time on a busy one: then once more. The average
    // must be below the delay itself, or one of them measures something else.
    let mut last = (0.0, 0.0);
    let agree = until(PATIENCE, || {
        last = average_by_btt_and_stat();
        let (short, long) = (last.0.min(last.1), last.0.max(last.1));
        assert!(short >= 40.0, "btt: {} ms, stat: {} ms", last.0, last.1);
        (long < 2.0 * short).then_some(())
    });
    assert!(agree.is_some(), "btt: {} ms, stat: {} ms", last.0, last.1);
}

/// Returns the average time of ten reads, each 40 ms at least, in milliseconds.
fn average_by_btt_and_stat() -> (f64, f64) {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &["--name", "disk", "--layer", "delay,read=40ms"]);
    let tracing = Tracing::start(&sandbox, "disk", "t", &[]);
    let mut peer = connect(&server, "disk");
    (0..10).for_each(|n| drop(peer.read(n * 4096, 4096).expect("read")));
    tracing.end();
    let reported: serde_json::Value =
        serde_json::from_str(&sandbox.run(&["stat", "-x", "--json", "disk"]).ok()).expect("JSON");
    let counted_ms = reported["disk"][0]["r_await"].as_f64().expect("a time");
    tool(&sandbox, &["blkparse", "-q", "-i", "t", "-d", "t.bin"]).ok();
    let timed = tool(&sandbox, &["btt", "-i", "t.bin"]).ok();
    let row = timed.lines().find(|line| line.starts_with("Q2C")).unwrap_or_else(|| panic!("{timed}"));
    let words: Vec<f64> = row.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    // The delay is a device of its own in a trace, and the stack below may be another one, with almost no
    // time: the sum of all times is that of the ten reads.
    assert!([10.0, 20.0].contains(&words[3]), "{row}");
    (words[1] * 1e3 * words[3] / 10.0, counted_ms)
}

/// The published experiment: 2048 sectors from 2488 on under the default limits of an old driver (BLK-6,
/// BLK-7), which are set and reset while the device is served.
#[test]
fn blk_7_a_mebibyte_is_split_at_the_published_sectors_and_not_without_limits() {
    if missing(&["blkparse", "btt"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("null:1G", &["--name", "disk"]);
    let mut peer = connect(&server, "disk");
    for (name, change) in
        [("before", &[][..]), ("split", &["max_sectors=255", "max_segments=128"]), ("after", &["--reset"])]
    {
        if !change.is_empty() {
            sandbox.run(&[&["limits", "disk"], change].concat()).ok();
        }
        for (output, option) in [("kernel", &["--queue-children=no"][..]), ("children", &[])] {
            let output = format!("{name}-{output}");
            let tracing = Tracing::start(&sandbox, "disk", &output, option);
            for n in 0..4 {
                peer.write((2488 + n * 2048) << 9, &noise(1, 1 << 20), CommandFlags::default())
                    .expect("written");
            }
            tracing.end();
            let bin = format!("{output}.bin");
            let reported = events(&tool(&sandbox, &["blkparse", "-i", &output, "-d", &bin]).ok());
            let of = |letter: &str| -> Vec<&str> {
                reported.iter().filter(|event| event.0 == letter).map(|event| event.2.as_str()).collect()
            };
            let timed = tool(&sandbox, &["btt", "-i", &bin]).ok();
            let btt_sees = timed.lines().any(|line| line.starts_with("D2C"));
            if name != "split" {
                assert_eq!((of("Q").len(), of("X").len(), of("D").len()), (4, 0, 4), "{output}");
                assert_eq!(of("D")[0], "2488 + 2048");
                assert!(btt_sees);
                continue;
            }
            let heads: Vec<String> =
                (0..8).map(|n| format!("{} / {}", 2488 + 255 * n, 2488 + 255 * (n + 1))).collect();
            assert_eq!(of("X")[..8], heads, "{output}");
            assert_eq!((of("X").len(), of("G").len(), of("C").len()), (32, 36, 36), "{output}");
            assert_eq!((of("D")[0], of("D")[8]), ("2488 + 255", "4528 + 8"), "{output}");
            let queued = if option.is_empty() { 40 } else { 4 };
            assert_eq!(
                (of("Q").len(), btt_sees),
                (queued, option.is_empty()),
                "btt knows no splits: {timed}"
            );
        }
    }
}

#[test]
fn requests_moved_by_a_layer_are_traced_as_remapped() {
    if missing(&["blkparse", "sfdisk"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 16 * MIB);
    let script = sandbox.text("table", "label: gpt\nstart=2048, size=8192\n");
    let table = format!("sfdisk -q {} < {}", image.display(), script.display());
    run(sandbox.command("sh").args(["-c", &table])).ok();
    let server = sandbox.serve(&format!("file:{},part=1", image.display()), &["--name", "part"]);
    let tracing = Tracing::start(&sandbox, "part", "p", &[]);
    connect(&server, "part").read(4096, 4096).expect("read");
    tracing.end();
    let parsed = tool(&sandbox, &["blkparse", "-i", "p"]).ok();
    let device = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
    let reported: Vec<(String, String)> = events(&parsed).into_iter().map(|e| (e.0, e.2)).collect();
    let expected = [
        ("Q", "8 + 8"),
        ("A", "2056 + 8 <- (240,0) 8"),
        ("Q", "2056 + 8"),
        ("G", "2056 + 8"),
        ("I", "2056 + 8"),
        ("D", "2056 + 8"),
        ("C", "2056 + 8"),
        ("C", "8 + 8"),
    ];
    assert_eq!(reported, expected.map(|(letter, rest)| (letter.to_owned(), rest.to_owned())));
    let devices: Vec<String> = parsed.lines().take(8).map(device).collect();
    assert_eq!(devices, ["240,0", "240,1", "240,1", "240,1", "240,1", "240,1", "240,1", "240,0"]);
}

/// As in device-mapper: its targets are no devices of their own, and a split request completes once.
#[test]
fn a_table_of_several_targets_remaps_once_and_from_its_own_sectors() {
    let sandbox = Sandbox::default();
    let table = sandbox.text("t.table", "0 64 zero\n64 64 linear ram:1M 512\n128 64 linear ram:1M 8\n");
    let words = ["--table", &*table.to_string_lossy(), "--name", "t"];
    let export = format!("unix:{}", sandbox.path("t.sock").display());
    let words = [&["serve", "--nbd", &export], &words[..]].concat();
    let server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    let tracing = Tracing::start(&sandbox, "t", "t.txt", &["--format", "text"]);
    let mut peer = connect(&server, "t");
    peer.read(72 * 512, 4096).expect("a read of one target");
    peer.write(120 * 512, &noise(1, 8192), CommandFlags::empty()).expect("a write of two");
    tracing.end();
    let written = fs::read_to_string(sandbox.path("t.txt")).expect("it is written");
    let lines = written.lines().zip(events(&written));
    let mut reported: Vec<String> = lines
        .filter(|(_, (letter, ..))| "QXAC".contains(letter.as_str()))
        .map(|(line, (letter, _, rest))| {
            format!("{} {letter} {rest}", line.split(' ').next().unwrap_or_default())
        })
        .collect();
    let expected = [
        "240,0 Q 72 + 8",
        "240,3 A 520 + 8 <- (240,0) 72",
        "240,3 Q 520 + 8",
        "240,3 C 520 + 8",
        "240,0 C 72 + 8",
        "240,0 Q 120 + 16",
        "240,0 X 120 / 128",
        "240,3 A 568 + 8 <- (240,0) 120",
        "240,3 Q 568 + 8",
        "240,5 A 8 + 8 <- (240,0) 128",
        "240,5 Q 8 + 8",
        "240,3 C 568 + 8",
        "240,5 C 8 + 8",
        "240,0 C 120 + 16",
    ];
    // Children need not alternate.
    reported[7..13].sort();
    let mut sorted = expected;
    sorted[7..13].sort_unstable();
    assert_eq!(reported, sorted, "{written}");
}

#[test]
fn a_trace_is_filtered_stopped_and_started_while_it_runs() {
    if missing(&["blkparse"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:16M", &["--name", "disk"]);
    let mut peer = connect(&server, "disk");
    let mut both = |sector: u64| {
        peer.write(sector << 9, &noise(1, 4096), CommandFlags::default()).expect("written");
        peer.read(sector << 9, 4096).expect("read");
    };
    let tracing = Tracing::start(&sandbox, "disk", "t", &["--actions", "Q,D", "--ops", "write"]);
    let control = |arguments: &[&str]| sandbox.run(&[&["trace", "disk"], arguments].concat());
    both(8);
    control(&["stop"]).ok();
    both(16);
    control(&["filter", "--sectors", "1000-1007", "--actions", "complete"]).ok();
    both(1000);
    control(&["start"]).ok();
    both(24);
    both(1000);
    let twice =
        sandbox.run(&["trace", "disk", "-o", &sandbox.path("u").display().to_string()]).failed_with(1);
    assert!(twice.contains("it is being traced already"), "{twice}");
    for wrong in [
        &["filter", "--actions", "Z"][..],
        &["eat"],
        &["stop", "-o", "x"],
        &["stop", "-w", "3"],
        &["start", "--ops", "write"],
        &["filter", "--coarse"],
        &["--actions", "done"],
    ] {
        control(wrong).failed_with(2);
    }
    let ends = control(&["filter", "--actions", "done"]).failed_with(1);
    assert!(ends.contains("only a Chrome trace records \"done\""), "{ends}");
    tracing.end();
    let over = control(&["stop"]).failed_with(1);
    assert!(over.contains("it is not being traced"), "{over}");
    let parsed = tool(&sandbox, &["blkparse", "-i", "t"]).ok();
    let reported: Vec<String> = events(&parsed).iter().map(|e| format!("{} {} {}", e.0, e.1, e.2)).collect();
    assert_eq!(reported, ["Q W 8 + 8", "D W 8 + 8", "C W 1000 + 8", "C R 1000 + 8"]);
}

/// A reader that stops loses events, which are counted; the device serves as without a trace.
#[test]
fn events_of_an_unread_trace_are_dropped_and_counted_while_io_continues() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:16M", &["--name", "disk"]);
    let mut command = sandbox.blockyard(&["trace", "disk", "-o", "-", "--buffer", "4K"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    // After the first event all rings are attached; nothing more is read for now.
    child.stdout.as_mut().expect("it is piped").read_exact(&mut [0; 48]).expect("it begins");
    let mut peer = connect(&server, "disk");
    let before = server.resident();
    for n in 0..60_000u64 {
        peer.read(n % 4096 * 4096, 4096).expect("read");
    }
    assert!(server.resident() < before + (24 << 20), "a trace that nobody takes is held in memory");
    let stdout = child.stdout.take().expect("it is piped");
    let reader = std::thread::spawn(move || std::io::BufReader::new(stdout).bytes().count());
    sandbox.run(&["trace", "disk", "end"]).ok();
    let status = blockyard_tests::tools::wait_within(&mut child, PATIENCE).expect("it ends");
    let mut printed = String::new();
    child.stderr.take().expect("it is piped").read_to_string(&mut printed).expect("it is text");
    assert!(status.success() && printed.contains("events of disk were dropped"), "{printed}");
    let dropped: u64 = printed
        .lines()
        .find_map(|line| line.strip_prefix("disk: queue 0: ")?.split(' ').nth(2)?.parse().ok())
        .unwrap_or_else(|| panic!("{printed}"));
    let seen = reader.join().expect("it reads") as u64 / 48;
    assert!(dropped > 0 && seen > 0, "{printed}");
}

/// It ends on request, and its device is closed when it is removed, although its reader has stopped reading.
#[test]
fn a_stopped_reader_blocks_neither_its_trace_nor_the_device() {
    let sandbox = Sandbox::default();
    sandbox.image("a.img", MIB);
    let other = sandbox.path("b.sock");
    let server = sandbox.up(
        &format!(
            "[device.disk]\nstack = \"file:a.img\"\n[[export]]\ndevice = \"disk\"\nnbd = \"unix:{}\"\n\
             [device.other]\nstack = \"null:1M\"\n[[export]]\ndevice = \"other\"\nnbd = \"unix:{}\"\n",
            sandbox.path("s.sock").display(),
            other.display()
        ),
        2,
    );
    let begin = || {
        let mut command = sandbox.blockyard(&["trace", "disk", "-o", "-"]);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary runs");
        // After the first event all rings are attached; nothing more is read.
        let begun = child.stdout.as_mut().expect("it is piped").read_exact(&mut [0; 48]);
        if begun.is_err() {
            let _ = child.wait();
        }
        begun.ok().map(|()| child)
    };
    // An ended trace ends after a moment, so the next one is tried repeatedly.
    let trace = || until(PATIENCE, begin).expect("a trace begins");
    let mut peer = connect(&server, "disk");
    let mut load = || {
        for n in 0..60_000u64 {
            peer.read(n % 256 * 4096, 4096).expect("read");
        }
    };
    let mut first = trace();
    load();
    sandbox.run(&["trace", "disk", "end"]).ok();
    let mut second = trace();
    load();
    peer.disconnect();
    sandbox.run(&["del", "disk"]).ok();
    let again = until(PATIENCE, || {
        let name = ["add", "file:a.img", "--name", "disk"];
        sandbox.run(&name).status.success().then_some(())
    });
    assert!(again.is_some(), "its image is still locked: {}", server.log());
    for child in [&mut first, &mut second] {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// As with `trace | head`: no event occurs on the device, so no write could find the pipe closed.
#[test]
fn a_trace_ends_with_its_reader_and_a_second_one_is_refused() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("null:1M", &["--name", "disk"]);
    for format in ["text", "blktrace"] {
        let mut command = sandbox.blockyard(&["trace", "disk", "-o", "-", "--format", format]);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary runs");
        let mut peer = connect(&server, "disk");
        // `list` would not show the session, so this reads until the first event has arrived.
        let mut stdout = child.stdout.take().expect("it is piped");
        let reader = std::thread::spawn(move || stdout.read_exact(&mut [0; 200]).map(|()| stdout));
        until(PATIENCE, || {
            peer.read(0, 4096).expect("read");
            reader.is_finished().then_some(())
        })
        .expect("events arrive");
        let stdout = reader.join().expect("it reads").expect("events");
        let busy = sandbox.run(&["trace", "disk", "-w", "0.05"]).failed_with(1);
        assert!(busy.contains("it is being traced already"), "{busy}");
        drop(stdout);
        let status = blockyard_tests::tools::wait_within(&mut child, PATIENCE);
        if status.is_none() {
            let _ = child.kill();
            let _ = child.wait();
        }
        assert!(status.expect("it ends with its reader").success());
        sandbox.run(&["trace", "disk", "-w", "0.05"]).ok();
    }
}

#[test]
fn files_of_an_older_trace_are_not_mixed_into_another() {
    let sandbox = Sandbox::default();
    let _server = sandbox.serve("null:1M", &["--name", "disk"]);
    let (first, second) = (sandbox.text("old.blktrace.1", "old"), sandbox.text("old.blktrace.2", "old"));
    sandbox.run(&["trace", "disk", "-o", &sandbox.path("old").display().to_string(), "-w", "0.05"]).ok();
    assert!(sandbox.path("old.blktrace.0").exists() && !first.exists() && !second.exists());
}

#[test]
fn lines_and_a_chrome_trace_need_no_other_tool() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("null:1G", &["--name", "disk", "--limits", "max_sectors=8"]);
    for (format, name) in [("text", "t.txt"), ("perfetto", "t.json")] {
        let tracing = Tracing::start(&sandbox, "disk", name, &["--format", format]);
        if format == "perfetto" {
            // Begin events need their ends, whatever the filter selects.
            sandbox.run(&["trace", "disk", "filter", "--actions", "Q,X,D"]).ok();
        }
        connect(&server, "disk").read(0, 8192).expect("read");
        tracing.end();
        let written = fs::read_to_string(sandbox.path(name)).expect("it is written");
        if format == "text" {
            let letters: String = events(&written).into_iter().map(|event| event.0).collect();
            assert_eq!(letters, "QXGIDCGIDC", "{written}");
            assert!(written.starts_with("240,0    0        1     0.000000000 "), "{written}");
        } else {
            let reported: serde_json::Value = serde_json::from_str(&written).expect("it is JSON");
            let reported = reported.as_array().expect("a list");
            let of = |phase: &str| reported.iter().filter(|event| event["ph"] == phase).count();
            // The request, the layer that splits it, two children and the backend of each; where it was
            // split, and what the children are linked to.
            assert_eq!((of("b"), of("e"), of("n")), (6, 6, 3), "{written}");
            let named = |name: &str| reported.iter().filter(|e| e["ph"] == "b" && e["name"] == name).count();
            assert_eq!((named("split"), named("null 1G")), (1, 2), "{written}");
            let linked = |end: &str| -> Vec<u64> {
                reported
                    .iter()
                    .filter(|event| event[end] == true)
                    .filter_map(|e| e["bind_id"].as_u64())
                    .collect()
            };
            assert_eq!((linked("flow_out").len(), linked("flow_in")), (2, linked("flow_out")), "{written}");
            assert_eq!(of("C"), 6, "in flight: the request, and each child at the backend: {written}");
        }
    }
}

/// The live output is blkparse's of the same events.
#[test]
fn lines_equal_blkparses_output() {
    use trace::wire::{Frame, Opened, TracedQueueInfo};
    use trace::{Kind, Record, blktrace::Encoder, lines::Lines};
    if missing(&["blkparse"]) {
        return;
    }
    let record = |time_ns, kind, op, sector: u64, len, value| Record {
        time_ns,
        offset: sector << 9,
        len,
        tag: 0,
        kind,
        op,
        flags: u8::from(sector == 7),
        value,
        from: 0,
        device: u8::from(kind == Kind::Remap) * 3,
    };
    let mut records = Vec::new();
    for (n, op) in block::Op::ORDINARY.into_iter().enumerate() {
        // Commands have several records each: iscsi_trace.rs.
        let kinds = Kind::NAMED.into_iter().filter(|row| row.0 != Kind::Command);
        for (m, (kind, ..)) in kinds.enumerate() {
            for (l, (sector, len)) in [(2488, 255 << 9), (7, 512), (0, 0)].into_iter().enumerate() {
                let time_ns = 1_000_000_000 * (n * 9 + m) as u64 + l as u64;
                let value = if kind == Kind::Complete { l as u64 * 5 } else { 2743 };
                // Plug events belong to a queue and have no sector.
                let is_plug = matches!(kind, Kind::Plug | Kind::Unplug);
                let (sector, len) = if is_plug { (0, 0) } else { (sector, len) };
                records.push(record(time_ns, kind, op, sector, len, value));
            }
        }
    }
    let opened = Opened { device: "disk".into(), number: 5, clock_ns: 0, wall: (1, 2), nodes: Vec::new() };
    let (mut lines, mut live) = (Lines::default(), String::new());
    lines.frame(&Frame::Opened(opened), &mut live);
    lines.frame(&Frame::Queue(0, TracedQueueInfo { pid: 1234, comm: "reactor-0".into() }), &mut live);
    lines.frame(&Frame::Records(0, records.clone()), &mut live);
    lines.frame(&Frame::Closed, &mut live);
    let (mut encoder, mut bytes) = (Encoder::new(5), Vec::new());
    encoder.process(0, 1234, "reactor-0", 0, &mut bytes);
    records.iter().for_each(|record| encoder.record(0, record, &mut bytes));
    let sandbox = Sandbox::default();
    fs::write(sandbox.path("t.blktrace.0"), bytes).expect("written");
    let parsed = tool(&sandbox, &["blkparse", "-q", "-i", "t"]).ok();
    let theirs: Vec<&str> = parsed.lines().filter(|line| !line.starts_with("Input file")).collect();
    assert_eq!(live.lines().collect::<Vec<_>>(), theirs);
    assert_eq!(theirs.len(), 7 * 12 * 3, "an event is missing");
}
