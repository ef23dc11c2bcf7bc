//! Faults of the server of an `nbd:` device: servers that die, hang, shrink, disconnect, or send garbage.
//!
//! Required: no wrong byte, no lost request, an end to every wait.

use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{fio, over, serve_as};
use blockyard_tests::scripted::{ClientEvent, Next, Scripted, Talk};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, missing, until, wait_within};
use proto::nbd::server::Config;
use proto::nbd::{BlockSizes, Command, CommandFlags, ExportInfo, NbdError, Request, Style, wire};
use rustix::process::Signal;
use std::io;
use std::time::{Duration, Instant};

on_both_engines!(
    servers_killed_and_restarted_lose_nothing,
    a_hanging_server_is_given_up_and_reconnected,
    invalid_replies_close_only_the_connection,
    a_connection_lost_within_data_is_reestablished,
);

const MIB: u64 = 1 << 20;

/// Returns the output of `show` for the device in front, by name.
fn shown(sandbox: &Sandbox, name: &str) -> String {
    let text = sandbox.run(&["show", "front"]).ok();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("  "));
    line.unwrap_or_else(|| panic!("{name}: {text}")).trim().to_owned()
}

fn number(sandbox: &Sandbox, name: &str) -> u64 {
    shown(sandbox, name).parse().unwrap()
}

fn servers_killed_and_restarted_lose_nothing(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("image", 64 * MIB);
    // The kernel may take some time to drop the locks of a killed process.
    let stack = format!("file:{},share", image.display());
    let mut back = serve_as(&sandbox, "back", &stack, &[]);
    let front = over(&sandbox, back.uri(), &["--queues", "2"]);
    // A busy machine may have time for few kills beside a load: then there is another one.
    let (mut kills, mut caught) = (0, 0);
    while caught < 3 {
        let mut load = fio(&front, "--size=16M --bs=512-64k --iodepth=16 --numjobs=2 --offset_increment=32M");
        load.args(["--verify_backlog=64", "--time_based", "--runtime=4", "--output=/dev/null"]);
        let mut load = load.spawn().unwrap();
        let mut has_ended = || load.try_wait().unwrap().is_some();
        while !has_ended() {
            std::thread::sleep(Duration::from_millis(500));
            // Requests in flight at a frozen server stay there.
            back.freeze();
            let under_way = || sandbox.run(&["inflight", "front"]).ok().contains("nbd");
            let seen = until(PATIENCE, || under_way().then_some(true).or(has_ended().then_some(false)));
            caught += u64::from(seen.expect("the load continues or ends"));
            back.kill();
            let is_lost = || (number(&sandbox, "connections lost") > kills).then_some(());
            until(PATIENCE, is_lost).expect("a killed server's connection is lost");
            std::thread::sleep(Duration::from_millis(kills % 3 * 100));
            back = serve_as(&sandbox, "back", &stack, &[]);
            kills += 1;
            let is_found = || !sandbox.run(&["show", "back"]).ok().contains("(0 clients");
            until(PATIENCE, || (is_found() || has_ended()).then_some(())).expect("it is found again");
        }
        let status = wait_within(&mut load, PATIENCE).expect("fio ends");
        assert!(status.success(), "{status} after {kills} kills: {}", front.log());
        assert!(kills < 100, "{caught} of {kills} kills found something in flight");
    }
    assert!(number(&sandbox, "requests replayed") > 0, "under load, none was ever unanswered?");
}

fn a_hanging_server_is_given_up_and_reconnected(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let back = serve_as(&sandbox, "back", "ram:16M", &[]);
    let front = over(&sandbox, &format!("{},timeout=300ms,reconnect=0", back.uri()), &[]);
    let mut peer = Peer::connect(&front.socket(), "front");
    let data = noise(1, 65536);
    // On a busy processor a server may seem to hang.
    until(PATIENCE, || peer.write(0, &data, CommandFlags::empty()).ok()).expect("it is written");
    back.freeze();
    let start = Instant::now();
    assert_eq!(peer.read(0, 65536), Err(NbdError::Io));
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(250), "given up after {took:?}");
    assert_eq!(
        peer.write(0, &[9; 512], CommandFlags::empty()),
        Err(NbdError::Io),
        "and nothing waits meanwhile"
    );
    back.signal(Signal::CONT);
    let found = until(PATIENCE, || peer.read(0, 65536).ok()).expect("it comes back by itself");
    assert!(found == data);
    peer.disconnect();
}

#[test]
fn requests_fail_at_once_if_the_server_ended_before_the_first_connection_of_a_queue() {
    let sandbox = Sandbox::default();
    let mut back = serve_as(&sandbox, "back", "ram:16M", &[]);
    let mut front = over(&sandbox, &format!("{},reconnect=0", back.uri()), &["--queues", "4"]);
    back.kill();
    let start = Instant::now();
    // The queues of later clients have no connection yet.
    for _ in 0..4 {
        let mut peer = Peer::connect(&front.socket(), "front");
        assert_eq!(peer.read(0, 512), Err(NbdError::Io));
        peer.disconnect();
    }
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    front.terminate_after_failed_flush("front");
}

/// Starts a server of that size that answers by the script on its first connection, and correctly on all
/// others.
fn scripted(
    sandbox: &Sandbox,
    config: Config,
    first: impl Fn(&mut Talk, &Request, &[u8]) -> io::Result<Next> + Send + Sync + 'static,
) -> Scripted {
    let script = move |talk: &mut Talk, request: &Request, payload: &[u8]| match talk.number {
        0 => first(talk, request, payload),
        _ => talk.answer(request, payload),
    };
    Scripted::start(&sandbox.path("scripted.sock"), |_| ExportInfo::new(8 * MIB), config, script)
}

const STRUCTURED: Config =
    Config { tls: proto::nbd::server::TlsMode::Off, list: true, structured: true, extended: false };
const SIMPLE: Config = Config { structured: false, ..STRUCTURED };
const EXTENDED: Config = Config { extended: true, ..STRUCTURED };

type Answer = fn(&mut Talk, &Request) -> io::Result<Next>;

/// Returns a chunk header of a structured reply, valid or not.
fn chunk(flags: u16, kind: u16, cookie: u64, len: u32) -> Vec<u8> {
    let parts: [&[u8]; 5] = [
        &wire::STRUCTURED_REPLY_MAGIC.to_be_bytes(),
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &len.to_be_bytes(),
    ];
    parts.concat()
}

/// Invalid answers to a read of 64 KiB.
const NONSENSE: [(&str, Config, Answer); 13] = [
    ("an answer to nothing", STRUCTURED, |talk, request| {
        talk.data(
            &Request { cookie: request.cookie ^ 1 << 40, ..*request },
            request.offset,
            &[1; 65536],
            true,
        )?;
        Ok(Next::On)
    }),
    ("an answer under a tag that is not in use", SIMPLE, |talk, request| {
        talk.data(&Request { cookie: request.cookie ^ 7, ..*request }, request.offset, &[1; 65536], true)?;
        Ok(Next::On)
    }),
    ("bytes of no meaning", STRUCTURED, |talk, _| talk.say(&[0x5A; 4096]).map(|()| Next::On)),
    ("more than was asked for", STRUCTURED, |talk, request| {
        talk.data(request, request.offset, &[1; 65537], true)?;
        Ok(Next::On)
    }),
    ("less than was asked for", EXTENDED, |talk, request| {
        talk.data(request, request.offset, &[1; 65535], true)?;
        Ok(Next::On)
    }),
    ("data from elsewhere", STRUCTURED, |talk, request| {
        talk.data(request, request.offset + 4096, &[1; 65536], true)?;
        Ok(Next::On)
    }),
    ("the same half twice", STRUCTURED, |talk, request| {
        talk.data(request, request.offset, &[1; 32768], false)?;
        talk.data(request, request.offset, &[2; 32768], true)?;
        Ok(Next::On)
    }),
    ("success and no data", STRUCTURED, |talk, request| {
        talk.say(&chunk(1, wire::chunk::NONE, request.cookie, 0)).map(|()| Next::On)
    }),
    ("a simple reply where chunks were agreed on", STRUCTURED, |talk, request| {
        talk.say(&proto::nbd::reply::simple(request.cookie, None)).map(|()| Next::On)
    }),
    ("a chunk of 4 GiB", STRUCTURED, |talk, request| {
        talk.say(&chunk(1, wire::chunk::ERROR, request.cookie, u32::MAX)).map(|()| Next::On)
    }),
    ("a chunk of no known type", STRUCTURED, |talk, request| {
        talk.say(&chunk(1, 77, request.cookie, 16)).map(|()| Next::On)
    }),
    ("a status that was not asked for", STRUCTURED, |talk, request| {
        let body = [[0, 0, 0, 1], [0, 1, 0, 0], [0; 4]].concat();
        talk.say(&chunk(1, wire::chunk::BLOCK_STATUS, request.cookie, 12))?;
        talk.say(&body).map(|()| Next::On)
    }),
    ("chunks after the last", STRUCTURED, |talk, request| {
        talk.say(&chunk(1, wire::chunk::NONE, request.cookie, 8)).map(|()| Next::On)
    }),
];

fn invalid_replies_close_only_the_connection(engine: Engine) {
    for (what, config, answer) in NONSENSE {
        let sandbox = Sandbox::new(engine);
        let back = scripted(&sandbox, config, move |talk, request, payload| match request.command {
            Command::Read => answer(talk, request),
            _ => talk.answer(request, payload),
        });
        let front = over(&sandbox, &format!("{},timeout=60s", back.uri()), &["--queues", "1"]);
        let mut peer = Peer::connect(&front.socket(), "front");
        let data = noise(3, 65536);
        peer.write(8192, &data, CommandFlags::empty()).unwrap();
        assert!(peer.read(8192, 65536).unwrap() == data, "{what}: a wrong byte");
        front.await_log("broke the protocol");
        assert_eq!(number(&sandbox, "connections lost"), 1, "{what}");
        until(PATIENCE, || back.events().contains(&ClientEvent::Gone(0)).then_some(())).expect(what);
        peer.disconnect();
    }
}

fn a_connection_lost_within_data_is_reestablished(engine: Engine) {
    for (config, cut) in
        [(SIMPLE, 10), (STRUCTURED, 25), (SIMPLE, 5000), (EXTENDED, 300_000), (SIMPLE, 900_000)]
    {
        let sandbox = Sandbox::new(engine);
        let back = scripted(&sandbox, config, move |talk, request, payload| match request.command {
            Command::Read => {
                let mut reply = vec![0; 64 + request.len as usize];
                let style = talk.session.style;
                let header =
                    style.put_data_header(&mut reply, request, request.offset, request.len as u32, true);
                talk.say(&reply[..cut.min(header + request.len as usize)])?;
                Ok(Next::Close)
            }
            _ => talk.answer(request, payload),
        });
        let front = over(&sandbox, back.uri(), &["--queues", "1"]);
        let mut peer = Peer::connect(&front.socket(), "front");
        let data = noise(3, 1 << 20);
        peer.write(512, &data, CommandFlags::empty()).unwrap();
        assert!(peer.read(512, 1 << 20).unwrap() == data, "cut after {cut}");
        assert_eq!(number(&sandbox, "connections lost"), 1);
        peer.disconnect();
    }
}

#[test]
fn a_duplicate_reply_closes_the_connection() {
    let sandbox = Sandbox::default();
    let back = scripted(&sandbox, STRUCTURED, |talk, request, payload| {
        talk.answer(request, payload)?;
        if request.command == Command::Read { talk.answer(request, payload) } else { Ok(Next::On) }
    });
    let front = over(&sandbox, back.uri(), &["--queues", "1"]);
    let mut peer = Peer::connect(&front.socket(), "front");
    for _ in 0..3 {
        assert_eq!(peer.read(0, 4096).unwrap(), [0; 4096]);
    }
    assert_eq!(number(&sandbox, "connections lost"), 1);
    peer.disconnect();
}

#[test]
fn chunks_of_a_read_may_arrive_in_any_order() {
    let sandbox = Sandbox::default();
    let back = scripted(&sandbox, STRUCTURED, |talk, request, payload| {
        if request.command != Command::Read {
            return talk.answer(request, payload);
        }
        let quarter = request.len / 4;
        let mut hole = [0; 64];
        for part in [2, 0, 3] {
            let data = [part as u8 + 1; 16384];
            talk.data(request, request.offset + part * quarter, &data[..quarter as usize], false)?;
        }
        let len =
            talk.session.style.put_hole(&mut hole, request, request.offset + quarter, quarter as u32, true);
        talk.say(&hole[..len]).map(|()| Next::On)
    });
    let front = over(&sandbox, back.uri(), &["--queues", "1"]);
    let mut peer = Peer::connect(&front.socket(), "front");
    let read = peer.read(4096, 65536).unwrap();
    for (quarter, byte) in [1, 0, 3, 4].into_iter().enumerate() {
        assert!(read[quarter * 16384..][..16384].iter().all(|&found| found == byte), "quarter {quarter}");
    }
    peer.disconnect();
}

/// A server that accepts every connection and request and answers none, for example because its disk hangs.
#[test]
fn requests_to_a_server_that_never_answers_fail_in_the_end() {
    let sandbox = Sandbox::default();
    let script = |talk: &mut Talk, request: &Request, payload: &[u8]| match request.command {
        Command::Read => Ok(Next::On),
        _ => talk.answer(request, payload),
    };
    let export = |_| ExportInfo::new(8 * MIB);
    let back = Scripted::start(&sandbox.path("scripted.sock"), export, STRUCTURED, script);
    let uri = format!("{},timeout=200ms,reconnect=300ms", back.uri());
    let front = over(&sandbox, &uri, &["--queues", "1"]);
    let mut peer = Peer::connect(&front.socket(), "front");
    assert_eq!(peer.read(0, 4096), Err(NbdError::Io));
    let written = until(PATIENCE, || peer.write(0, &[1; 512], CommandFlags::empty()).ok());
    assert!(written.is_some(), "others go on: {}", front.log());
    peer.disconnect();
}

#[test]
fn requests_of_a_server_that_shuts_down_are_sent_to_the_next() {
    let sandbox = Sandbox::default();
    let back = scripted(&sandbox, EXTENDED, |talk, request, _| {
        talk.end(talk.session.style, request, Some(NbdError::Shutdown)).map(|()| Next::On)
    });
    let front = over(&sandbox, back.uri(), &["--queues", "1"]);
    let mut peer = Peer::connect(&front.socket(), "front");
    peer.write(0, &[5; 4096], CommandFlags::FUA).unwrap();
    assert_eq!(peer.read(0, 4096).unwrap(), [5; 4096]);
    front.await_log("shutting down");
    peer.disconnect();
}

#[test]
fn a_removed_device_sends_disconnect() {
    let sandbox = Sandbox::default();
    let back = Scripted::start(
        &sandbox.path("scripted.sock"),
        |_| ExportInfo::new(MIB),
        EXTENDED,
        |talk, request, payload| talk.answer(request, payload),
    );
    for used in [true, false] {
        let before = back.events().len();
        let mut front = over(&sandbox, back.uri(), &["--queues", "1"]);
        if used {
            let mut peer = Peer::connect(&front.socket(), "front");
            peer.write(0, &[5; 4096], CommandFlags::empty()).unwrap();
            peer.disconnect();
            sandbox.run(&["del", "front"]).ok();
            front.wait();
        } else {
            front.terminate();
        }
        let ended = until(PATIENCE, || (back.events().len() > before).then(|| back.events())).unwrap();
        let last = until(PATIENCE, || back.events().last().cloned().filter(is_disc));
        assert!(last.is_some(), "used: {used}: {ended:?}");
        // Written data is flushed before.
        assert_eq!(back.asked(Command::Flush), 1);
    }
    assert!(!back.events().iter().any(|seen| matches!(seen, ClientEvent::Gone(_))), "{:?}", back.events());
}

fn is_disc(seen: &ClientEvent) -> bool {
    matches!(seen, ClientEvent::Request(_, Request { command: Command::Disc, .. }))
}

/// The export is `MIB` long at first; after the reconnect it is `then`.
#[track_caller]
fn changed(then: ExportInfo, printed: &str) {
    let sandbox = Sandbox::default();
    let info = move |number| if number == 0 { ExportInfo::new(MIB) } else { then.clone() };
    let back = Scripted::start(&sandbox.path("scripted.sock"), info, STRUCTURED, |talk, request, payload| {
        match request.command {
            Command::Read if talk.number == 0 => Ok(Next::Close),
            _ => talk.answer(request, payload),
        }
    });
    let front = over(&sandbox, &format!("{},reconnect=500ms", back.uri()), &["--queues", "1"]);
    let mut peer = Peer::connect(&front.socket(), "front");
    let start = Instant::now();
    assert_eq!(peer.read(0, 4096), Err(NbdError::Io));
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(450), "it waited for {took:?}");
    front.await_log(printed);
    assert_eq!(back.asked(Command::Read), 1, "nothing is asked of another export");
    peer.disconnect();
    end_without_flush(front);
}

/// Ends the server of a device whose backend is unreachable.
fn end_without_flush(mut front: Server) {
    front.terminate_after_failed_flush("front");
}

#[test]
fn an_export_that_has_shrunk_is_refused() {
    changed(ExportInfo::new(MIB - 4096), "the export has shrunk from 1048576 to 1044480 bytes");
}

#[test]
fn an_export_with_fewer_features_is_refused() {
    changed(ExportInfo { read_only: true, ..ExportInfo::new(MIB) }, "cannot be written any more");
    changed(ExportInfo { can_fua: false, ..ExportInfo::new(MIB) }, "cannot write through any more");
    let block_sizes = BlockSizes { minimum: 4096, ..BlockSizes::DEFAULT };
    changed(ExportInfo { block_sizes, ..ExportInfo::new(MIB) }, "smallest block has grown");
}

#[test]
fn a_server_without_fua_gets_a_flush_after_each_fua_write() {
    let sandbox = Sandbox::default();
    let info = |_| ExportInfo { can_fua: false, ..ExportInfo::new(MIB) };
    let back = Scripted::start(&sandbox.path("scripted.sock"), info, SIMPLE, |talk, request, payload| {
        talk.answer(request, payload)
    });
    let front = over(&sandbox, back.uri(), &["--queues", "1"]);
    let mut peer = Peer::connect(&front.socket(), "front");
    peer.write(0, &[5; 4096], CommandFlags::FUA).unwrap();
    let seen = back.events().into_iter().filter_map(|seen| match seen {
        ClientEvent::Request(0, request) => Some((request.command, request.flags)),
        _ => None,
    });
    let asked: Vec<_> = seen.collect();
    assert_eq!(asked, [(Command::Write, CommandFlags::empty()), (Command::Flush, CommandFlags::empty())]);
    peer.disconnect();
}

#[test]
fn servers_with_simple_replies_are_supported() {
    let sandbox = Sandbox::default();
    let info =
        |_| ExportInfo { can_multi_conn: false, can_trim: false, can_zeroes: false, ..ExportInfo::new(MIB) };
    let back = Scripted::start(&sandbox.path("scripted.sock"), info, SIMPLE, |talk, request, payload| {
        assert_eq!(talk.session.style, Style::Simple);
        talk.answer(request, payload)
    });
    let front = over(&sandbox, back.uri(), &["--queues", "2"]);
    let mut peers = [(); 3].map(|()| Peer::connect(&front.socket(), "front"));
    for (number, peer) in peers.iter_mut().enumerate() {
        peer.write(number as u64 * 4096, &[number as u8; 4096], CommandFlags::empty()).unwrap();
    }
    for (number, peer) in peers.iter_mut().enumerate() {
        let other = (number + 1) % 3;
        assert_eq!(peer.read(other as u64 * 4096, 4096).unwrap(), [other as u8; 4096]);
        assert_eq!(peer.trim(0, 4096), Err(NbdError::Invalid));
    }
    assert!(
        back.events().iter().all(|seen| matches!(seen, ClientEvent::Request(0, _))),
        "one connection: {:?}",
        back.events()
    );
    peers.into_iter().for_each(Peer::disconnect);
}
