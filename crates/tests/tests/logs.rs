//! What a server says of its requests: slow ones, those under way, as text, words, JSON and to a journal.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, binary, missing_root, noise};
use blockyard_tests::tools::{PATIENCE, find, run, run_within, skip, until};
use proto::nbd::{Command, CommandFlags, Request};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// The lines of the log that have `message`, once there are some.
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
fn slow_requests_are_told_with_the_path_they_took() {
    let sandbox = Sandbox::default();
    let words =
        ["--name", "disk", "--layer", "delay,write=60ms", "--limits", "max_sectors=16", "--log", "json"];
    let server = sandbox.serve("null:8M", &words);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(0, &noise(1, 8192), CommandFlags::NONE).expect("written");
    sandbox.run(&["set", "disk", "slow=50ms"]).ok();
    peer.read(4096, 512).expect("read");
    peer.write(4096, &noise(1, 32768), CommandFlags::NONE).expect("written");
    // Where the processor is busy the read may have been slow as well, and its line be there first.
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
    // More than a second has room for: the rest is counted.
    for n in 0..40 {
        let request = Request::new(Command::Write, n, n * 512, 512);
        peer.send(request, &noise(n, 512));
    }
    (0..40).for_each(|_| assert!(peer.receive().error.is_none()));
    let rest = lines(&server, "slow requests that were not told one by one");
    assert!(rest[0]["suppressed"].as_u64() > Some(0), "{rest:?}");
    sandbox.run(&["set", "disk", "slow=off"]).ok();
    peer.write(7 << 20, &noise(1, 512), CommandFlags::NONE).expect("written");
    sandbox.run(&["set", "disk", "slow=50ms"]).ok();
    // Lines come in order: with one of what came after it there, its own would be, too.
    let later = || {
        peer.write(6 << 20, &noise(1, 512), CommandFlags::NONE).expect("written");
        let told = lines(&server, "slow request");
        told.iter().any(|line| line["sector"] == 6 << 11).then_some(told)
    };
    let told = until(PATIENCE, later).unwrap_or_else(|| panic!("none of the later write: {}", server.log()));
    assert!(told.iter().all(|line| line["sector"] != 7 << 11), "{told:?}");
    let why = sandbox.run(&["set", "disk", "slow=20"]).failed_with(2);
    assert!(why.contains("is not a time"), "{why}");
}

#[test]
fn requests_under_way_are_shown_and_told_on_a_signal() {
    let sandbox = Sandbox::default();
    let words = ["--name", "disk", "--layer", "delay,write=700ms", "--log", "json", "--queues", "1"];
    let server = sandbox.serve("null:8M", &words);
    assert_eq!(sandbox.run(&["inflight", "disk"]).ok(), "");
    let mut peer = Peer::connect(&server.socket(), "disk");
    let under_way = loop {
        peer.send(Request::new(Command::Write, 7, 2488 * 512, 4096), &noise(1, 4096));
        let told: Value =
            serde_json::from_str(&sandbox.run(&["inflight", "disk", "--json"]).ok()).expect("JSON");
        // On a busy machine it may be over by now.
        if let Some(one) = told["requests"].get(0) {
            break one.clone();
        }
        assert!(peer.receive().error.is_none());
    };
    assert_eq!((&under_way["op"], &under_way["sector"]), (&"write".into(), &2488.into()), "{under_way}");
    assert_eq!((&under_way["node"], &under_way["state"]), (&"delay:0".into(), &"held".into()));
    assert_eq!((&under_way["bytes"], &under_way["queue"]), (&4096.into(), &0.into()));
    // What a suspension holds back is nowhere yet.
    sandbox.run(&["suspend", "disk"]).ok();
    peer.send(Request::new(Command::Write, 8, 0, 512), &noise(1, 512));
    let waiting = || {
        let text = sandbox.run(&["inflight", "disk"]).ok();
        text.contains("waiting").then_some(text)
    };
    let text = until(PATIENCE, waiting).expect("it waits");
    assert!(text.starts_with("QUEUE  TAG  OF  OP "), "{text}");
    server.signal(Signal::USR1);
    let told = &lines(&server, "in flight")[0];
    assert_eq!(
        (&told["device"], &told["state"], &told["sector"]),
        (&"disk".into(), &"waiting".into(), &0.into())
    );
    assert_eq!(lines(&server, "requests in flight")[0]["requests"], 1);
    sandbox.run(&["resume", "disk"]).ok();
    let missing = sandbox.run(&["inflight", "nothing"]).failed_with(1);
    assert!(missing.contains("there is no such device"), "{missing}");
}

#[test]
fn all_that_is_under_way_is_told_however_much_that_is() {
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
        let told = sandbox.run(&["inflight", "disk", "--json"]).ok();
        let told: Value = serde_json::from_str(&told).expect("JSON");
        (told["requests"].as_array().map(Vec::len) == Some(2 * EACH as usize)).then_some(())
    };
    until(PATIENCE, listed).expect("all of them are there, and listed");
    server.signal(Signal::USR1);
    let all = || (lines(&server, "in flight").len() == 2 * EACH as usize).then_some(());
    until(PATIENCE, all).unwrap_or_else(|| panic!("{} are told of", lines(&server, "in flight").len()));
    sandbox.run(&["resume", "disk"]).ok();
    for peer in &mut peers {
        (0..EACH).for_each(|_| drop(peer.receive()));
    }
}

#[test]
fn the_log_goes_to_a_journal_that_takes_it_and_to_stderr_else() {
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

/// systemd's own journal, of a machine of its own as far as mounts and processes go. `1` serves with what a service
/// manager says of its stderr, `2` with what another one's would be. Both are asked for a line.
/// Copies of mounts on devices and files that somebody serves are let go of: who unmounts those is not to wait for this.
/// Journals of the host are out of sight, whichever way it keeps them.
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

/// Whether a line begins with a local day and time, to the millisecond.
fn has_time(line: &str) -> bool {
    let shape: String = line.chars().take(24).map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    shape == "0000-00-00 00:00:00.000 "
}

#[test]
fn lines_for_people_begin_with_the_local_time_the_level_and_the_device() {
    let sandbox = Sandbox::default();
    let address = format!("unix:{}", sandbox.path("s").display());
    // Fourteen hours east of Greenwich, which no machine is by chance.
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
fn a_stderr_that_is_the_journals_is_found_by_itself() {
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
    let words = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"];
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
    let told = outcome.ok();
    if let Some(why) = told.strip_prefix("skipped: ") {
        return skip(why.trim_end());
    }
    let entries: Vec<Value> =
        told.lines().map(|line| serde_json::from_str(line).expect("an entry is JSON")).collect();
    let of = |transport: &str| {
        let mut found = entries.iter().filter(|entry| entry["_TRANSPORT"] == transport);
        (found.next().unwrap_or_else(|| panic!("nothing by {transport}: {told}")), found.count())
    };
    // With every field by itself, as the journal takes it.
    let (native, more) = of("journal");
    assert_eq!((&native["SYSLOG_IDENTIFIER"], more), (&"blockyard".into(), 0), "{told}");
    assert_eq!((&native["BLOCKYARD_REQUESTS"], &native["PRIORITY"]), (&"0".into(), &"6".into()), "{told}");
    // A stderr that is not what it was told to be gets text.
    let (text, more) = of("stdout");
    assert!(
        text["MESSAGE"].as_str().is_some_and(|line| line.contains(" info: d2: requests in flight")),
        "{told}"
    );
    assert_eq!(more, 0);
}
