//! Requests that take longer than the device's `io_timeout` are cancelled and fail; later ones work.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Engine, Sandbox, missing_root};
use blockyard_tests::tools::PATIENCE;
use proto::nbd::{CommandFlags, NbdError};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

on_both_engines!(
    a_request_that_a_target_holds_is_cancelled_and_counted,
    a_request_that_an_nbd_server_never_answers_is_cancelled,
    an_idle_device_with_a_timeout_causes_no_wakeups,
);

/// How late a cancelled request may complete: an eighth of the timeout, and a margin for a busy machine.
const LATE_MAX: Duration = Duration::from_secs(5);

fn metric(sandbox: &Sandbox, name: &str) -> u64 {
    let mut stream = UnixStream::connect(sandbox.run_dir().join("disk.control")).expect("a control socket");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("metrics");
    let lines = answer.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(_, count)| count.parse::<u64>().expect("a count"))
        .sum()
}

/// Checks that a read fails, not before the timeout and not long after it.
#[track_caller]
fn times_out(peer: &mut Peer, timeout: Duration) {
    let start = Instant::now();
    assert_eq!(peer.read(4096, 4096).map(|_| ()), Err(NbdError::Io));
    let took = start.elapsed();
    assert!(timeout <= took && took <= timeout + LATE_MAX, "{took:?} for a timeout of {timeout:?}");
}

fn shown(sandbox: &Sandbox) -> String {
    let text = sandbox.run(&["show", "disk"]).ok();
    text.lines().find(|line| line.contains("io_timeout")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

fn a_request_that_a_target_holds_is_cancelled_and_counted(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let more = ["--layer", "delay,read=3600s", "--limits", "max_sectors=8", "--io-timeout", "200ms"];
    let server = sandbox.serve("ram:1M", &more);
    let mut peer = Peer::connect(&server.socket(), "disk");
    times_out(&mut peer, Duration::from_millis(200));
    peer.write(0, &[1; 64 << 10], CommandFlags::empty()).expect("what is not held is not cancelled");
    assert!(shown(&sandbox).ends_with("200ms (1 timed out)"), "{}", shown(&sandbox));
    assert_eq!(metric(&sandbox, "blockyard_request_timeouts_total"), 1);
    assert!(server.log().contains("a request timed out and is being cancelled"), "{}", server.log());
    // Tags are freed: more requests than tags can time out.
    sandbox.run(&["set", "disk", "io_timeout=20ms"]).ok();
    for _ in 0..20 {
        times_out(&mut peer, Duration::from_millis(20));
    }
    assert_eq!(metric(&sandbox, "blockyard_request_timeouts_total"), 21);
    // The time of a suspension does not count.
    sandbox.run(&["set", "disk", "io_timeout=500ms"]).ok();
    sandbox.run(&["suspend", "disk"]).ok();
    let resume = || {
        std::thread::sleep(Duration::from_millis(800));
        sandbox.run(&["resume", "disk"]).ok();
    };
    std::thread::scope(|scope| {
        scope.spawn(resume);
        peer.write(0, &[2; 4096], CommandFlags::empty()).expect("it waited for the resume only");
    });
    assert_eq!(metric(&sandbox, "blockyard_request_timeouts_total"), 21);
    sandbox.run(&["set", "disk", "io_timeout=off"]).ok();
    assert!(shown(&sandbox).ends_with("off (21 timed out before)"), "{}", shown(&sandbox));
    let bad = sandbox.run(&["set", "disk", "io_timeout=soon"]);
    assert!(!bad.status.success() && bad.stderr.contains("soon"), "{bad}");
}

fn a_request_that_an_nbd_server_never_answers_is_cancelled(engine: Engine) {
    let (sandbox, other) = (Sandbox::new(engine), Sandbox::new(engine));
    let below = other.serve("ram:1M", &["--name", "below"]);
    // Neither the client nor the server closes the connection because of the timeout.
    let stack = format!("nbd:{},timeout=0", below.uri());
    let server = sandbox.serve(&stack, &["--io-timeout", "300ms"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.write(4096, &[5; 4096], CommandFlags::FUA).expect("a write");
    below.freeze();
    times_out(&mut peer, Duration::from_millis(300));
    below.signal(rustix::process::Signal::CONT);
    let start = Instant::now();
    while peer.read(4096, 4096).map_err(|_| ()) != Ok(vec![5; 4096]) {
        assert!(start.elapsed() < PATIENCE, "the server is back, and is not asked again");
    }
}

fn an_idle_device_with_a_timeout_causes_no_wakeups(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let server = sandbox.serve("ram:1M", &["--io-timeout", "40ms", "--queues", "1"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    peer.read(0, 4096).expect("a read");
    std::thread::sleep(Duration::from_millis(300));
    let before = metric(&sandbox, "blockyard_reactor_turns_total");
    std::thread::sleep(Duration::from_millis(500));
    let turns = metric(&sandbox, "blockyard_reactor_turns_total") - before;
    assert!(turns <= 2, "{turns} turns of an idle thread");
}

#[test]
fn a_file_by_fuse_reports_the_error() {
    if missing_root() || !std::path::Path::new("/dev/fuse").exists() {
        return;
    }
    let sandbox = Sandbox::default();
    let path = sandbox.path("disk.raw");
    std::fs::write(&path, "").expect("a file to mount on");
    let fuse = path.to_str().expect("UTF-8");
    let more = ["--layer", "delay,read=3600s", "--io-timeout", "200ms", "--fuse", fuse];
    let mut server = sandbox.serve("ram:1M", &more);
    let mut file = std::fs::File::open(&path).expect("the device");
    let error = file.read(&mut [0; 4096]).expect_err("it is held for an hour");
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::TIMEDOUT.raw_os_error()), "{error}");
    drop(file);
    server.terminate();
}
