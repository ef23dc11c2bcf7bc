//! `blockyard commit`: an overlay written into its origin, online and offline, interrupted and complete.

use blockyard_tests::disk::shell;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, missing_root, noise};
use blockyard_tests::tools::{PATIENCE, command, missing, run, skip, until, wait_within};
use proto::nbd::CommandFlags;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LEN: usize = 8 << 20;

/// An origin, an overlay over it, and the expected content.
struct Pair {
    base: PathBuf,
    overlay: PathBuf,
    model: Vec<u8>,
}

impl Pair {
    fn new(sandbox: &Sandbox, len: usize) -> Pair {
        let base = sandbox.noise("base.img", len);
        let model = std::fs::read(&base).expect("a base");
        Pair { base, overlay: sandbox.path("over.cow"), model }
    }

    fn stack(&self) -> String {
        format!("file:{}", self.base.display())
    }

    fn layer(&self, options: &str) -> String {
        format!("cow,file={}{options}", self.overlay.display())
    }

    fn serve(&self, sandbox: &Sandbox, options: &str) -> (Server, Peer) {
        let server = sandbox.serve(&self.stack(), &["--layer", &self.layer(options)]);
        let peer = Peer::connect(&server.socket(), "disk");
        (server, peer)
    }

    fn write(&mut self, peer: &mut Peer, at: usize, data: &[u8]) {
        peer.write(at as u64, data, CommandFlags::empty()).expect("a write");
        self.model[at..at + data.len()].copy_from_slice(data);
    }

    /// Writes, zeroes and discards ranges all over the device.
    fn change(&mut self, peer: &mut Peer, seed: u64) {
        for number in 0..24u64 {
            let at = ((seed * 31 + number) * 7919 % (LEN as u64 / 512 - 128) * 512) as usize;
            self.write(peer, at, &noise(seed + number, 512 * (1 + number as usize % 40)));
        }
        let at = (seed % 5) as usize * 4096 + 65536;
        peer.zero(at as u64, 12288 + 512, CommandFlags::empty()).expect("zeroes");
        self.model[at..at + 12288 + 512].fill(0);
    }

    #[track_caller]
    fn is_in_the_base(&self) {
        assert!(
            std::fs::read(&self.base).expect("the base") == self.model,
            "the base is not what the device is"
        );
    }
}

fn shown(sandbox: &Sandbox, fact: &str) -> String {
    let text = sandbox.run(&["show", "disk", "--json"]).ok();
    let shown: serde_json::Value = serde_json::from_str(&text).expect("show prints JSON");
    shown["backend"][fact].as_str().unwrap_or_default().to_owned()
}

#[test]
fn an_overlay_is_committed_online_and_is_empty_afterwards() {
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, LEN);
    let (mut server, mut peer) = pair.serve(&sandbox, ",create");
    for round in 0..3 {
        pair.change(&mut peer, round * 100 + 7);
        let taken = std::fs::metadata(&pair.overlay).expect("the overlay").blocks();
        sandbox.run(&["commit", "disk"]).ok();
        pair.is_in_the_base();
        assert_eq!(shown(&sandbox, "overlay holds"), "0");
        let left = std::fs::metadata(&pair.overlay).expect("the overlay").blocks();
        assert!(left < taken / 4 && left < 100, "{left} of {taken} sectors are still there");
        assert!(peer.read(0, LEN as u64).expect("a read") == pair.model, "through the same connection");
    }
    // Later writes go to the overlay again.
    let before = std::fs::read(&pair.base).expect("the base");
    pair.change(&mut peer, 1000);
    peer.flush().expect("a flush");
    assert!(std::fs::read(&pair.base).expect("the base") == before);
    peer.disconnect();
    server.terminate();
    let (_server, mut peer) = pair.serve(&sandbox, "");
    assert!(peer.read(0, LEN as u64).expect("a read") == pair.model, "after a restart");
}

#[test]
fn an_offline_overlay_is_committed_into_a_stack_and_may_be_longer_than_it() {
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, LEN - 1536);
    let (mut server, mut peer) = pair.serve(&sandbox, &format!(",create,size={}", LEN as u64 + MIB));
    pair.model.resize(LEN + MIB as usize, 0);
    pair.write(&mut peer, 5 * 512, &noise(3, 4096));
    pair.write(&mut peer, LEN - 4096, &noise(4, 8192));
    peer.disconnect();
    server.terminate();
    let layer = pair.layer("");
    sandbox
        .run(&["commit", &pair.stack(), "--layer", "split,max_sectors=8", "--layer", &layer])
        .failed_with(1);
    sandbox.run(&["commit", &pair.stack(), "--layer", &layer]).ok();
    pair.is_in_the_base();
    sandbox.run(&["commit", &pair.stack(), "--layer", &layer]).ok();
    let (_server, mut peer) = pair.serve(&sandbox, "");
    assert!(peer.read(0, pair.model.len() as u64).expect("a read") == pair.model);
    assert_eq!(shown(&sandbox, "overlay holds"), "0");
}

#[test]
fn an_overlay_is_committed_into_the_overlay_below() {
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, LEN);
    let lower = format!("cow,file={}", sandbox.path("lower.cow").display());
    let create = format!("{lower},create");
    let base = std::fs::read(&pair.base).expect("a base");
    let upper = pair.layer(",create");
    let mut server = sandbox.serve(&pair.stack(), &["--layer", &create, "--layer", &upper]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    pair.change(&mut peer, 5);
    let why = sandbox.run(&["commit", "disk"]).failed_with(1);
    assert!(why.contains("stop the device, then: blockyard commit STACK --layer"), "{why}");
    peer.disconnect();
    server.terminate();
    sandbox.run(&["commit", &pair.stack(), "--layer", &lower, "--layer", &pair.layer("")]).ok();
    assert!(std::fs::read(&pair.base).expect("a base") == base, "the lowest is only read");
    let server = sandbox.serve(&pair.stack(), &["--layer", &lower]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert!(peer.read(0, LEN as u64).expect("a read") == pair.model);
    sandbox.run(&["commit", "disk"]).ok();
    pair.is_in_the_base();
}

#[test]
fn a_refused_commit_reports_the_reason_and_changes_nothing() {
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, LEN);
    let before = std::fs::read(&pair.base).expect("a base");
    let (server, mut peer) = pair.serve(&sandbox, ",create");
    pair.change(&mut peer, 9);
    // Another overlay over the same origin would become invalid.
    let other = format!("cow,file={},create", sandbox.path("other.cow").display());
    let socket = sandbox.path("other.sock");
    let nbd = format!("unix:{}", socket.display());
    let words = ["serve", &pair.stack(), "--layer", &other, "--name", "other", "--nbd", &nbd];
    let second = sandbox.start(&mut sandbox.blockyard(&words), 1);
    let why = sandbox.run(&["commit", "disk"]).failed_with(1);
    assert!(why.contains("locked it against changes"), "{why}");
    drop(second);
    // The other overlay's server has ended: no other server uses the origin.
    for (words, code, expected) in [
        (&["commit", &pair.stack(), "--layer", &pair.layer("")][..], 1, "in use"),
        (&["commit", "absent"], 1, "there is no such device"),
        (&["commit", &pair.stack()], 1, "there is nothing to commit"),
        (&["commit", "disk", "--layer", "cow,file=x"], 2, "a served device has its own layers"),
    ] {
        let why = sandbox.run(words).failed_with(code);
        assert!(why.contains(expected), "{words:?}: {why}");
    }
    assert!(std::fs::read(&pair.base).expect("the base") == before, "untouched");
    assert!(peer.read(0, LEN as u64).expect("a read") == pair.model);
    drop(server);
    let stack = format!("{},ro", pair.stack());
    let why = sandbox.run(&["commit", &stack, "--layer", &pair.layer("")]).failed_with(1);
    assert!(why.contains("leave out ro"), "{why}");
    let server = sandbox.serve(&stack, &["--layer", &pair.layer("")]);
    let why = sandbox.run(&["commit", "disk"]).failed_with(1);
    assert!(why.contains("leave out ro"), "{why}");
    drop(server);
    let _server = sandbox.serve("ram:1M", &[]);
    let why = sandbox.run(&["commit", "disk"]).failed_with(1);
    assert!(why.contains("there is nothing to commit"), "{why}");
}

#[test]
fn clients_continue_to_write_during_a_commit() {
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, LEN);
    let (server, mut peer) = pair.serve(&sandbox, ",create");
    let done = AtomicBool::new(false);
    let writes = std::thread::scope(|scope| {
        let (pair, done) = (&mut pair, &done);
        let writer = scope.spawn(move || {
            let mut count = 0u64;
            while !done.load(Relaxed) || count < 50 {
                pair.change(&mut peer, count * 17);
                let at = (count * 4099 % (LEN as u64 / 512 - 8) * 512) as usize;
                assert!(peer.read(at as u64, 4096).expect("a read") == pair.model[at..at + 4096]);
                count += 1;
            }
            peer.disconnect();
            count
        });
        for _ in 0..8 {
            sandbox.run(&["commit", "disk"]).ok();
        }
        done.store(true, Relaxed);
        writer.join().expect("every write and read went well")
    });
    println!("{writes} rounds of writes beside 8 commits");
    let mut peer = Peer::connect(&server.socket(), "disk");
    assert!(peer.read(0, LEN as u64).expect("a read") == pair.model);
    sandbox.run(&["commit", "disk"]).ok();
    pair.is_in_the_base();
}

#[test]
fn a_commit_killed_at_any_moment_loses_nothing_and_can_be_repeated() {
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, 4 * LEN);
    let (mut server, mut peer) = pair.serve(&sandbox, ",create");
    for at in (0..4 * LEN).step_by(1 << 20) {
        pair.write(&mut peer, at, &noise(at as u64, 900 << 10));
    }
    peer.disconnect();
    server.terminate();
    let mut cut_short = 0;
    let delays = [300, 1500, 4000, 8000, 15000, 25000, 40000, 60000];
    // On a busy processor all kills may come too late; then the shortest delay is repeated.
    let again = std::iter::repeat_n(300, 100);
    for (turn, delay_us) in delays.into_iter().chain(again).enumerate() {
        if turn >= delays.len() && cut_short > 2 {
            break;
        }
        // New data each time, or there would be nothing to copy any more.
        let (mut server, mut peer) = pair.serve(&sandbox, "");
        assert!(peer.read(0, 4 * LEN as u64).expect("a read") == pair.model, "after a kill at {delay_us} us");
        for at in (0..4 * LEN).step_by(1 << 20) {
            pair.write(&mut peer, at, &noise(at as u64 + delay_us + turn as u64, 512 << 10));
        }
        // Every other time the server itself is killed, else a program that only commits.
        let status = if delay_us % 1000 == 500 {
            let mut commit = sandbox.blockyard(&["commit", "disk"]).spawn().expect("it starts");
            std::thread::sleep(Duration::from_micros(delay_us));
            server.kill();
            wait_within(&mut commit, PATIENCE).expect("the commit ends");
            9
        } else {
            peer.disconnect();
            server.terminate();
            let words = ["commit", &pair.stack(), "--layer", &pair.layer("")];
            let mut commit = sandbox.blockyard(&words).spawn().expect("it starts");
            std::thread::sleep(Duration::from_micros(delay_us));
            let _ = commit.kill();
            commit.wait().expect("it ends").signal().unwrap_or_default()
        };
        cut_short += i32::from(status == 9);
    }
    assert!(cut_short > 2, "only {cut_short} were cut short");
    sandbox.run(&["commit", &pair.stack(), "--layer", &pair.layer("")]).ok();
    pair.is_in_the_base();
    let (_server, mut peer) = pair.serve(&sandbox, "");
    assert!(peer.read(0, 4 * LEN as u64).expect("a read") == pair.model);
    assert_eq!(
        (shown(&sandbox, "overlay holds"), shown(&sandbox, "overlay commit")),
        ("0".into(), String::new())
    );
}

/// Returns whether the newer copy of an overlay's header has the flag of a commit.
fn is_flagged(overlay: &Path) -> bool {
    let mut head = [0; 8192];
    let read = std::fs::File::open(overlay).and_then(|file| file.read_exact_at(&mut head, 0));
    read.expect("an overlay has a header");
    let word = |copy: usize, at: usize| head.get(copy + at..copy + at + 8).map_or(&[0; 8][..], |word| word);
    let newest = [0, 4096].into_iter().max_by_key(|&copy| word(copy, 16).iter().rev().collect::<Vec<_>>());
    newest.is_some_and(|copy| word(copy, 24)[0] & 1 == 1)
}

#[test]
fn writes_past_the_end_of_the_origin_during_a_commit_are_kept() {
    let sandbox = Sandbox::default();
    let len = 4 * LEN;
    let mut pair = Pair::new(&sandbox, len);
    let (mut server, mut peer) = pair.serve(&sandbox, &format!(",create,size={}", 2 * len));
    pair.model.resize(2 * len, 0);
    let mut at = len + 3 * 512;
    let mut meanwhile = 0;
    // On a busy machine the commit may be over before its start is seen: then once more.
    for round in 1.. {
        for at in (0..len).step_by(LEN / 8) {
            pair.write(&mut peer, at, &noise(at as u64 + round, LEN / 8));
        }
        // At the start of the commit, the overlay has no data past the origin's end: the origin is extended
        // while the commit runs.
        let mut commit = sandbox.blockyard(&["commit", "disk"]).spawn().expect("it starts");
        let mut is_over = false;
        until(PATIENCE, || {
            is_over = commit.try_wait().expect("it runs").is_some();
            (is_over || is_flagged(&pair.overlay)).then_some(())
        })
        .expect("it begins");
        while !is_over && at < 2 * len - 8192 {
            peer.write(at as u64, &noise(at as u64, 4096), CommandFlags::FUA).expect("a write");
            pair.model[at..at + 4096].copy_from_slice(&noise(at as u64, 4096));
            at += 5 * 4096;
            std::thread::sleep(Duration::from_millis(1));
            is_over = commit.try_wait().expect("it runs").is_some();
            meanwhile += i32::from(!is_over);
        }
        let status = wait_within(&mut commit, PATIENCE).expect("it ends");
        assert!(status.success(), "{status}, written up to {at}");
        if meanwhile > 0 || round == 20 {
            break;
        }
    }
    if meanwhile == 0 {
        skip("no commit took long enough for a write beside it");
    }
    for half in [0, len] {
        let read = peer.read(half as u64, len as u64).expect("a read");
        assert!(read == pair.model[half..half + len], "after a commit, from {half} on");
    }
    peer.disconnect();
    server.terminate();
    sandbox.run(&["commit", &pair.stack(), "--layer", &pair.layer("")]).ok();
    pair.is_in_the_base();
}

#[test]
fn a_commit_killed_while_it_extends_its_origin_can_be_repeated() {
    if missing(&["strace"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, MIB as usize);
    pair.model.resize(2 * MIB as usize, 0);
    let mut killed = 0;
    // Each time a little later: at the flag, at the new length, at the data.
    for (call, last) in [("ftruncate", 1), ("pwrite64,pwritev,pwritev2", 3)] {
        for when in 1..=last {
            let _ = std::fs::remove_file(&pair.overlay);
            std::fs::write(&pair.base, noise(99, MIB as usize)).expect("a base");
            pair.model.fill(0);
            pair.model[..MIB as usize].copy_from_slice(&noise(99, MIB as usize));
            let (mut server, mut peer) = pair.serve(&sandbox, ",create,size=2M");
            pair.write(&mut peer, 4096, &noise(when, 4096));
            pair.write(&mut peer, 3 * MIB as usize / 2, &noise(when + 10, 4096));
            peer.disconnect();
            server.terminate();
            let inject = format!("inject={call}:signal=SIGKILL:when={when}");
            let layer = pair.layer("");
            let mut traced = sandbox.tool(&["strace", "-f", "-o", "/dev/null", "-e", &inject]);
            let program = sandbox.blockyard(&["commit", &pair.stack(), "--layer", &layer]);
            traced.arg(program.get_program()).args(program.get_args());
            killed += i32::from(run(&mut traced).status.signal() == Some(9));
            let (mut server, mut peer) = pair.serve(&sandbox, "");
            let read = peer.read(0, 2 * MIB).expect("a read");
            assert!(read == pair.model, "killed at {call} {when}");
            peer.disconnect();
            server.terminate();
            sandbox.run(&["commit", &pair.stack(), "--layer", &layer]).ok();
            pair.is_in_the_base();
        }
    }
    assert!(killed >= 3, "only {killed} were cut short");
}

struct Unmounted(PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        let _ = run(command(&["umount", "-l"]).arg(&self.0));
    }
}

#[test]
fn an_origin_without_space_or_on_a_read_only_mount_fails_only_the_commit() {
    if missing_root() || missing(&["mount"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let host = sandbox.path("host");
    std::fs::create_dir(&host).expect("a folder");
    shell("mount -t tmpfs -o size=2M tmpfs \"$H\"", &[("H", &host)]).ok();
    let _mounted = Unmounted(host.clone());
    let base = host.join("base.img");
    std::fs::File::create(&base).and_then(|file| file.set_len(LEN as u64)).expect("a sparse base");
    let mut pair = Pair { base, overlay: sandbox.path("over.cow"), model: vec![0; LEN] };
    let (server, mut peer) = pair.serve(&sandbox, ",create");
    pair.write(&mut peer, 1 << 20, &noise(1, 4 << 20));
    let fails = |words: &str| {
        let why = sandbox.run(&["commit", "disk"]).failed_with(1);
        assert!(why.contains(words), "{why}");
    };
    fails("writing the origin failed: No space left on device");
    assert!(peer.read(0, LEN as u64).expect("a read") == pair.model);
    let remount = |options: &str| {
        shell(&format!("mount -o remount,{options} \"$H\""), &[("H", &host)]).ok();
    };
    remount("ro");
    fails("Read-only file system");
    pair.write(&mut peer, 512, &noise(2, 1024));
    // It is also reported as interrupted after a restart, and can be repeated.
    peer.disconnect();
    drop(server);
    let (_server, mut peer) = pair.serve(&sandbox, "");
    assert!(shown(&sandbox, "overlay commit").starts_with("interrupted"));
    assert!(peer.read(0, LEN as u64).expect("a read") == pair.model);
    remount("rw,size=64M");
    sandbox.run(&["commit", "disk"]).ok();
    pair.is_in_the_base();
    assert_eq!(shown(&sandbox, "overlay commit"), "");
    assert!(Path::new(&pair.overlay).exists());
}

#[test]
fn the_origins_new_length_is_flushed_before_writes_behind_its_old_end() {
    if missing(&["strace"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, MIB as usize);
    pair.model.resize(2 * MIB as usize, 0);
    let (mut server, mut peer) = pair.serve(&sandbox, ",create,size=2M");
    pair.write(&mut peer, 3 * MIB as usize / 2, &noise(7, 4096));
    peer.disconnect();
    server.terminate();
    let calls = sandbox.path("calls");
    let filter = "trace=ftruncate,fsync,fdatasync,pwrite64,pwritev,pwritev2";
    let mut traced = sandbox.tool(&["strace", "-f", "-y", "-o", &calls.display().to_string(), "-e", filter]);
    let program = sandbox.blockyard(&["commit", &pair.stack(), "--layer", &pair.layer("")]);
    traced.arg(program.get_program()).args(program.get_args());
    run(&mut traced).ok();
    let calls = std::fs::read_to_string(&calls).expect("what it called");
    let of_base: Vec<&str> = calls.lines().filter(|line| line.contains("base.img")).collect();
    let longer = of_base.iter().position(|line| line.contains("ftruncate")).expect("it was made longer");
    assert!(of_base[longer + 1].contains("sync("), "{of_base:#?}");
    pair.is_in_the_base();
}

#[test]
fn an_interrupted_commit_accepts_an_origin_of_any_length_up_to_the_devices() {
    if missing(&["strace"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let mut pair = Pair::new(&sandbox, MIB as usize);
    pair.model.resize(2 * MIB as usize, 0);
    let (mut server, mut peer) = pair.serve(&sandbox, ",create,size=2M");
    pair.write(&mut peer, 3 * MIB as usize / 2, &noise(7, 4096));
    peer.disconnect();
    server.terminate();
    let layer = pair.layer("");
    let mut traced =
        sandbox.tool(&["strace", "-f", "-o", "/dev/null", "-e", "inject=ftruncate:signal=SIGKILL:when=1"]);
    let program = sandbox.blockyard(&["commit", &pair.stack(), "--layer", &layer]);
    traced.arg(program.get_program()).args(program.get_args());
    assert_eq!(run(&mut traced).status.signal(), Some(9));
    assert!(is_flagged(&pair.overlay), "the commit had begun");
    let base = std::fs::File::options().write(true).open(&pair.base).expect("the base");
    for len in [MIB + 512, MIB + MIB / 3 / 512 * 512, 2 * MIB - 512] {
        base.set_len(len).expect("another length");
        let (mut server, mut peer) = pair.serve(&sandbox, "");
        assert!(peer.read(0, 2 * MIB).expect("a read") == pair.model, "with {len}");
        peer.disconnect();
        server.terminate();
    }
    base.set_len(2 * MIB + 512).expect("another length");
    let words = ["serve", &pair.stack(), "--layer", &layer, "--nbd", "unix:other.sock"];
    sandbox.run(&words).failed_with(1);
    base.set_len(MIB + 512).expect("another length");
    sandbox.run(&["commit", &pair.stack(), "--layer", &layer]).ok();
    pair.is_in_the_base();
}
