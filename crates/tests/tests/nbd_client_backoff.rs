//! An `nbd:` device over a server that accepts connections and hangs up: the number of connections, and the
//! output of the log and `show`.
//!
//! Required: few connections and few lines, however the server misbehaves, and a quick reconnect once it
//! works.

use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{over, serve_as, table_as};
use blockyard_tests::scripted::{Next, Scripted};
use blockyard_tests::server::{Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, until};
use proto::nbd::server::{Config, TlsMode};
use proto::nbd::{Command, CommandFlags, ExportInfo};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const CONFIG: Config = Config { tls: TlsMode::Off, list: true, structured: true, extended: false };
/// Duration of the misbehaviour.
const MISBEHAVIOUR: Duration = Duration::from_secs(5);
/// Most connections of one queue in that time: 8 until the pause is a second, then up to two in each second.
const CONNECTIONS_MAX: usize = 20;
/// Most lines about one server in that time: eight in ten seconds and a summary. A busy machine may take a
/// little longer.
const LINES_MAX: usize = 20;

/// Starts a server that hangs up after this number of requests of each connection while `well` is not set,
/// with a counter of its connections.
fn hostile(sandbox: &Sandbox, serves: usize) -> (Scripted, Arc<AtomicBool>, Arc<AtomicUsize>) {
    let (well, connections) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (is_well, counted) = (well.clone(), connections.clone());
    let asked: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::default();
    let info = move |number: usize| {
        counted.fetch_max(number + 1, SeqCst);
        ExportInfo::new(8 * MIB)
    };
    let server =
        Scripted::start(&sandbox.path("hostile.sock"), info, CONFIG, move |talk, request, payload| {
            let mut asked = asked.lock().unwrap();
            let count = asked.len().max(talk.number + 1);
            asked.resize(count, 0);
            asked[talk.number] += 1;
            if !is_well.load(SeqCst) && asked[talk.number] > serves && request.command != Command::Disc {
                return Ok(Next::Close);
            }
            drop(asked);
            talk.answer(request, payload)
        });
    (server, well, connections)
}

/// Returns the number of logged lines about connections.
fn lines(server: &Server) -> usize {
    let log = server.log();
    log.lines().filter(|line| line.contains("connect")).count()
}

#[track_caller]
fn assert_few_connections(server: &Server, connections: usize) {
    println!("{connections} connections and {} lines", lines(server));
    assert!(connections <= CONNECTIONS_MAX, "{connections} connections in {MISBEHAVIOUR:?}");
    assert!(lines(server) <= LINES_MAX, "{} lines:\n{}", lines(server), server.log());
}

/// Sends requests for the duration of the misbehaviour.
fn keep_asking(peer: &mut Peer) {
    let end = Instant::now() + MISBEHAVIOUR;
    while Instant::now() < end {
        let _ = peer.read(0, 4096);
    }
}

#[test]
fn a_server_that_hangs_up_at_the_first_request_is_connected_to_rarely() {
    let sandbox = Sandbox::default();
    let (hostile, well, connections) = hostile(&sandbox, 0);
    let server = over(&sandbox, hostile.uri(), &[]);
    let mut peer = Peer::connect(&server.socket(), "front");
    std::thread::scope(|scope| {
        // One request, which waits all the time and is sent again on each connection.
        let reads = scope.spawn(move || (peer.read(0, 4096), peer));
        std::thread::sleep(MISBEHAVIOUR);
        assert_few_connections(&server, connections.load(SeqCst));
        // `show` reads the partition table, too, over a connection of its own.
        let shown = until(PATIENCE, || {
            let shown = sandbox.run(&["show", "front"]).ok();
            let line = shown.lines().find(|line| line.starts_with("connecting"))?.to_owned();
            line.contains(" in ").then_some(line)
        });
        let shown = shown.expect("show has the next attempt");
        assert!(shown.contains("attempt ") && shown.contains("the server closed it"), "{shown}");
        well.store(true, SeqCst);
        let start = Instant::now();
        let (read, peer) = reads.join().unwrap();
        assert_eq!(read.unwrap().len(), 4096);
        println!("served {:?} after the server became well", start.elapsed());
        peer.disconnect();
    });
    let is_over = || {
        let shown = sandbox.run(&["show", "front"]).ok();
        shown.lines().any(|line| line.split_whitespace().eq(["connecting", "no"])).then_some(())
    };
    until(PATIENCE, is_over).expect("nothing is connected to any more");
    server.await_log("were suppressed");
}

#[test]
fn a_server_that_answers_once_and_hangs_up_is_connected_to_rarely() {
    let sandbox = Sandbox::default();
    let (hostile, well, connections) = hostile(&sandbox, 1);
    let server = over(&sandbox, &format!("{},reconnect=0", hostile.uri()), &[]);
    let mut peer = Peer::connect(&server.socket(), "front");
    keep_asking(&mut peer);
    assert_few_connections(&server, connections.load(SeqCst));
    well.store(true, SeqCst);
    until(PATIENCE, || peer.read(0, 4096).ok()).expect("it is served once the server is well");
    peer.disconnect();
}

#[test]
fn a_path_whose_server_hangs_up_is_connected_to_rarely() {
    let sandbox = Sandbox::default();
    let (hostile, well, connections) = hostile(&sandbox, 1);
    let line =
        format!("0 16384 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 1 nbd:{} 1", hostile.uri());
    let server = table_as(&sandbox, "m", &line, &["--multipath", "checker=1s,no_path_timeout=200ms"]);
    let mut peer = Peer::connect(&server.socket(), "m");
    keep_asking(&mut peer);
    // A check is a connection of its own, once in a second.
    assert_few_connections(&server, connections.load(SeqCst));
    well.store(true, SeqCst);
    until(PATIENCE, || peer.read(0, 4096).ok()).expect("it is served once the server is well");
    peer.disconnect();
}

#[test]
fn a_restarted_healthy_server_is_connected_at_once() {
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 4 * MIB);
    let stack = format!("file:{},share", image.display());
    let mut back = serve_as(&sandbox, "back", &stack, &[]);
    let server = over(&sandbox, back.uri(), &[]);
    let mut peer = Peer::connect(&server.socket(), "front");
    let mut slowest = Duration::ZERO;
    for round in 0..3u8 {
        peer.write(0, &[round; 4096], CommandFlags::empty()).unwrap();
        // From here on a lost connection causes no pause.
        std::thread::sleep(Duration::from_millis(1100));
        back.kill();
        back = serve_as(&sandbox, "back", &stack, &[]);
        let start = Instant::now();
        assert_eq!(peer.read(0, 4096).unwrap(), [round; 4096]);
        slowest = slowest.max(start.elapsed());
    }
    println!("the slowest read after a restart took {slowest:?}");
    assert!(slowest < Duration::from_secs(3), "{slowest:?}");
    peer.disconnect();
}
