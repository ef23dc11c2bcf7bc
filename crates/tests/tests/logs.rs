//! A server's log: slow requests and requests in flight, as text, `key=value`, JSON and in a journal.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, binary, missing_root, noise};
use blockyard_tests::tools::{PATIENCE, find, run, run_within, skip, until};
use proto::nbd::{Command, CommandFlags, Request};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// Waits for lines of the log with `message`, and returns them.
fn lines(server: &Server, message: &str) -> Vec<Value> {
    let found = || {
        let log = server.log();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let found: Vec<Value> = lines.filter(|line| line["message"] == message).collect();
        (!found.is_empty()).then_some(found)
    };
    until(PATIENCE, found).unwrap_or_else(|| panic!("no \"{message}\" in: {}", server.log()))
}

#[test]
fn slow_requests_are_logged_with_their_path() {
    let sandbox = Sandbox::default();
    let words =
        ["--name", "disk", "--layer", "delay,write=60ms", "--limits", "max_sectors=16", "--log", "json"];
    let server = sandbox.serve("null:8M", &words);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(0, &noise(1, 8192), CommandFlags::empty()).expect("written");
    sandbox.run(&["set", "disk", "slow=50ms"]).ok();
    peer.read(4096, 512).expect("read");
    peer.write(4096, &noise(1, 32768), CommandFlags::empty()).expect("written");
    // On a busy processor the read may be slow as well, and be logged first.
    let of_write = || lines(&server, "slow request").into_iter().find(|line| line["op"] == "write");
    let slow = until(PATIENCE, of_write).unwrap_or_else(|| panic!("none of the write: {}", server.log()));
    assert_eq!(
        (&slow["level"], &slow["device"], &slow["op"]),
        (&"warn".into(), &"disk".into(), &"write".into())
    );
    assert_eq!(
        (&slow["sector"], &slow["bytes"], &slow["pieces"]),
        (&8.into(), &32768.into(), &4.into()),
        "{slow}"
    );
    assert!(slow["total_ms"].as_f64().is_some_and(|ms| ms >= 60.0), "{slow}");
    let path = slow["path"].as_str().expect("a path");
    assert!(path.starts_with("split:0 ") && path.contains(" > delay:1 "), "{path}");
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(shown.contains("50ms or longer: "), "{shown}");
    // More than the limit of a second: the rest is counted.
    for n in 0..40 {
        let request = Request::new(Command::Write, n, n * 512, 512);
        peer.send(request, &noise(n, 512));
    }
    (0..40).for_each(|_| assert!(peer.receive().error.is_none()));
    let rest = lines(&server, "slow requests were left out of the log");
    assert!(rest[0]["suppressed"].as_u64() > Some(0), "{rest:?}");
    sandbox.run(&["set", "disk", "slow=off"]).ok();
    peer.write(7 << 20, &noise(1, 512), CommandFlags::empty()).expect("written");
    sandbox.run(&["set", "disk", "slow=50ms"]).ok();
    // Lines are in order: a later line shows that its own would have arrived.
    let later = || {
        peer.write(6 << 20, &noise(1, 512), CommandFlags::empty()).expect("written");
        let reported = lines(&server, "slow request");
        reported.iter().any(|line| line["sector"] == 6 << 11).then_some(reported)
    };
    let reported =
        until(PATIENCE, later).unwrap_or_else(|| panic!("none of the later write: {}", server.log()));
    assert!(reported.iter().all(|line| line["sector"] != 7 << 11), "{reported:?}");
    let why = sandbox.run(&["set", "disk", "slow=20"]).failed_with(2);
    assert!(why.contains("is not a time"), "{why}");
}

#[test]
fn requests_in_flight_are_shown_and_logged_on_a_signal() {
    let sandbox = Sandbox::default();
    let words = ["--name", "disk", "--layer", "delay,write=700ms", "--log", "json", "--queues", "1"];
    let server = sandbox.serve("null:8M", &words);
    assert_eq!(sandbox.run(&["inflight", "disk"]).ok(), "");
    let mut peer = Peer::connect(&server.socket(), "disk");
    let under_way = loop {
        peer.send(Request::new(Command::Write, 7, 2488 * 512, 4096), &noise(1, 4096));
        let reported: Value =
            serde_json::from_str(&sandbox.run(&["inflight", "disk", "--json"]).ok()).expect("JSON");
        // On a busy machine it may be over by now.
        if let Some(one) = reported["requests"].get(0) {
            break one.clone();
        }
        assert!(peer.receive().error.is_none());
    };
    assert_eq!((&under_way["op"], &under_way["sector"]), (&"write".into(), &2488.into()), "{under_way}");
    assert_eq!((&under_way["node"], &under_way["state"]), (&"delay:0".into(), &"held".into()));
    assert_eq!((&under_way["bytes"], &under_way["queue"]), (&4096.into(), &0.into()));
    // A request held back by a suspension has no holder yet.
    sandbox.run(&["suspend", "disk"]).ok();
    peer.send(Request::new(Command::Write, 8, 0, 512), &noise(1, 512));
    let waiting = || {
        let text = sandbox.run(&["inflight", "disk"]).ok();
        text.contains("waiting").then_some(text)
    };
    let text = until(PATIENCE, waiting).expect("it waits");
    assert!(text.starts_with("QUEUE  TAG  OF  OP "), "{text}");
    server.signal(Signal::USR1);
    let reported = &lines(&server, "in flight")[0];
    assert_eq!(
        (&reported["device"], &reported["state"], &reported["sector"]),
        (&"disk".into(), &"waiting".into(), &0.into())
    );
    assert_eq!(lines(&server, "requests in flight")[0]["requests"], 1);
    sandbox.run(&["resume", "disk"]).ok();
    let missing = sandbox.run(&["inflight", "nothing"]).failed_with(1);
    assert!(missing.contains("there is no such device"), "{missing}");
}

#[test]
fn all_requests_in_flight_are_logged_however_many() {
    const EACH: u64 = 200;
    let sandbox = Sandbox::default();
    let words = ["--name", "disk", "--queues", "1", "--depth", "512", "--log", "json"];
    let server = sandbox.serve("null:8M", &words);
    sandbox.run(&["suspend", "disk"]).ok();
    let mut peers = [1, 2].map(|_| Peer::connect(&server.socket(), "disk"));
    for peer in &mut peers {
        for n in 0..EACH {
            peer.send(Request::new(Command::Read, n, n * 512, 512), &[]);
        }
    }
    let listed = || {
        let reported = sandbox.run(&["inflight", "disk", "--json"]).ok();
        let reported: Value = serde_json::from_str(&reported).expect("JSON");
        (reported["requests"].as_array().map(Vec::len) == Some(2 * EACH as usize)).then_some(())
    };
    until(PATIENCE, listed).expect("all of them are there, and listed");
    server.signal(Signal::USR1);
    let all = || (lines(&server, "in flight").len() == 2 * EACH as usize).then_some(());
    until(PATIENCE, all).unwrap_or_else(|| panic!("{} were logged", lines(&server, "in flight").len()));
    sandbox.run(&["resume", "disk"]).ok();
    for peer in &mut peers {
        (0..EACH).for_each(|_| drop(peer.receive()));
    }
}

#[test]
fn the_log_goes_to_the_journal_and_falls_back_to_stderr() {
    let sandbox = Sandbox::default();
    let journal = sandbox.path("journal");
    let there = UnixDatagram::bind(&journal).expect("a socket");
    there.set_read_timeout(Some(PATIENCE)).expect("a socket's option");
    let address = format!("unix:{}", sandbox.path("disk.sock").display());
    let words =
        ["serve", "null:8M", "--name", "disk", "--nbd", &address, "--slow", "0", "--log", "to=journal"];
    let server = sandbox.start(sandbox.blockyard(&words).env("BLOCKYARD_JOURNAL", &journal), 1);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.read(2488 * 512, 4096).expect("read");
    let mut bytes = [0; 16384];
    let len = there.recv(&mut bytes).expect("a datagram");
    let text = String::from_utf8_lossy(&bytes[..len]).into_owned();
    for field in
        ["PRIORITY=4", "SYSLOG_IDENTIFIER=blockyard", "BLOCKYARD_DEVICE=disk", "BLOCKYARD_SECTOR=2488"]
    {
        assert!(text.lines().any(|line| line == field), "{field}: {text}");
    }
    assert!(text.starts_with("MESSAGE=slow request device=disk "), "{text}");
    assert_eq!(server.log(), "", "and nothing on stderr");
    drop(there);
    std::fs::remove_file(&journal).expect("it was there");
    peer.read(0, 4096).expect("read");
    until(PATIENCE, || server.log().contains(" warning: disk: slow request, ").then_some(()))
        .expect("on stderr");
}

/// systemd's own journal, with mounts and processes of its own. `1` serves with the environment of a service
/// whose stderr is the journal, `2` with that of another stderr. Both have to log a line. Copies of mounts on
/// devices and served files are unmounted, so that they do not keep these busy. Journals of the host are
/// invisible.
const JOURNALD: &str = r#"
while read -r source at kind rest; do
    # Not what is needed here.
    case $PWD/:$BLOCKYARD:$JOURNALD in
        "${at%/}"/*|*:"${at%/}"/*) continue ;;
    esac
    case $source:$kind in
        /dev/loop*|/dev/nbd*|/dev/ublk*|*:fuse*) umount -l "$at" || true ;;
    esac
done < /proc/mounts
mount -t tmpfs none /run && mkdir -p /run/systemd/journal || { echo "skipped: no mounts here"; exit 0; }
[ ! -d /var/log/journal ] || mount -t tmpfs none /var/log/journal
if [ ! -s /etc/machine-id ]; then
    echo 0123456789abcdef0123456789abcdef > /run/machine-id
    mount --bind /run/machine-id /etc/machine-id || { echo "skipped: no machine-id"; exit 0; }
fi
"$JOURNALD" > /dev/null 2>&1 &
tries=0
until [ -S /run/systemd/journal/socket ] && [ -S /run/systemd/journal/stdout ]; do
    tries=$((tries + 1))
    [ $tries -lt 200 ] || { echo "skipped: the journal does not come up"; exit 0; }
    sleep 0.05
done
# It may run and keep nothing, where it lacks what it needs.
tries=0
until journalctl -q --no-pager -o cat 2> /dev/null | grep -qx probe; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || { echo "skipped: the journal keeps nothing here"; exit 0; }
    echo probe | systemd-cat || true
    sleep 0.1
done
# As long as a busy machine takes, and not for ever.
within() {
    tries=0
    until eval "$1" > /dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 1200 ] || { echo "not in time: $1" >&2; journalctl -q --no-pager -n 50 >&2; exit 1; }
        sleep 0.05
    done
}
for n in 1 2; do
    own='$(stat -L -c %d:%i /proc/self/fd/2)'
    [ $n = 1 ] || own=1:2
    systemd-cat sh -c "JOURNAL_STREAM=$own exec '$BLOCKYARD' serve null:1M --name d$n --nbd 'unix:$PWD/d$n.sock'" &
    eval server$n=$!
    within '"$BLOCKYARD" show d$n'
    eval kill -USR1 \$server$n
done
within '[ "$(journalctl -q --no-pager -o json | grep -c "requests in flight")" = 2 ]'
journalctl -q --no-pager -o json | grep 'requests in flight'
kill $server1 $server2
wait $server1 $server2
"#;

/// Returns whether a line begins with a local day and time, to the millisecond.
fn has_time(line: &str) -> bool {
    let shape: String = line.chars().take(24).map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    shape == "0000-00-00 00:00:00.000 "
}

#[test]
fn text_lines_begin_with_local_time_level_and_device() {
    let sandbox = Sandbox::default();
    let address = format!("unix:{}", sandbox.path("s").display());
    // Fourteen hours east of Greenwich, which no machine uses by chance.
    const ZONE: (&str, &str) = ("TZ", "<+14>-14");
    let minute =
        || run(sandbox.tool(&["date", "+%Y-%m-%d %H:%M"]).env(ZONE.0, ZONE.1)).ok().trim().to_owned();
    let before = minute();
    let mut add = sandbox.blockyard(&["add", "null:8M", "--name", "disk", "--nbd", &address, "--slow", "0"]);
    run(add.env(ZONE.0, ZONE.1)).ok();
    let mut peer = Peer::connect(&sandbox.path("s"), "disk");
    peer.read(0, 4096).expect("read");
    let log = sandbox.path("run/disk.log");
    let found = || {
        let text = std::fs::read_to_string(&log).ok()?;
        text.lines().find(|line| line.contains("slow request")).map(str::to_owned)
    };
    let line = until(PATIENCE, found).expect("a line in the log of the device");
    assert!(has_time(&line) && line[24..].starts_with("warning: disk: slow request, queue "), "{line}");
    assert!((before.as_str()..=minute().as_str()).contains(&&line[..16]), "{line}: it began at {before}");
    sandbox.run(&["del", "disk"]).ok();
}

#[test]
fn a_stderr_connected_to_the_journal_is_detected() {
    let places = ["/usr/lib/systemd/systemd-journald", "/lib/systemd/systemd-journald"];
    let Some(journald) = places.into_iter().find(|place| Path::new(place).exists()) else {
        return skip("there is no systemd-journald here");
    };
    if let Some(tool) = ["systemd-cat", "journalctl", "unshare"].into_iter().find(|tool| find(tool).is_none())
    {
        return skip(format!("{tool} is missing"));
    }
    if missing_root() {
        return;
    }
    let sandbox = Sandbox::default();
    let words = ["unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"];
    let machine = || sandbox.tool(&[&words[..], &["--mount-proc"]].concat());
    // Root in a container may not be allowed any of this.
    let probe = run(machine().args(["mount", "-t", "tmpfs", "none", "/run"]));
    if !probe.status.success() {
        return skip(format!("no mounts and processes of its own here: {}", probe.stderr.trim()));
    }
    let mut machine = machine();
    machine.args(["sh", "-euc", JOURNALD]).current_dir(sandbox.path(""));
    machine.env("JOURNALD", journald).env("BLOCKYARD", binary());
    let outcome = run_within(&mut machine, 4 * PATIENCE);
    let reported = outcome.ok();
    if let Some(why) = reported.strip_prefix("skipped: ") {
        return skip(why.trim_end());
    }
    let entries: Vec<Value> =
        reported.lines().map(|line| serde_json::from_str(line).expect("an entry is JSON")).collect();
    let of = |transport: &str| {
        let mut found = entries.iter().filter(|entry| entry["_TRANSPORT"] == transport);
        (found.next().unwrap_or_else(|| panic!("nothing by {transport}: {reported}")), found.count())
    };
    // With every value as a field, as in the journal's protocol.
    let (native, more) = of("journal");
    assert_eq!((&native["SYSLOG_IDENTIFIER"], more), (&"blockyard".into(), 0), "{reported}");
    assert_eq!(
        (&native["BLOCKYARD_REQUESTS"], &native["PRIORITY"]),
        (&"0".into(), &"6".into()),
        "{reported}"
    );
    // A stderr that is not the announced one gets text.
    let (text, more) = of("stdout");
    assert!(
        text["MESSAGE"].as_str().is_some_and(|line| line.contains(" info: d2: requests in flight")),
        "{reported}"
    );
    assert_eq!(more, 0);
}
