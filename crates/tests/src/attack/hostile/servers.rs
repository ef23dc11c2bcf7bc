//! Hostile servers below an `nbd:` device. The device may fail requests. It must not hang beyond its
//! timeouts, return data that the server did not send for that offset, die, or use processor and log without
//! limit.

use super::super::Tally;
use super::super::daemon::{Daemon, tail};
use super::super::options::Options;
use super::super::rounds::spread;
use crate::peer::Peer;
use proto::nbd::CommandFlags;
use proto::nbd::client::HandshakeOptions;
use sim::Rng;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Length of the export.
const LEN: u64 = 1 << 20;
/// Timeouts of the device over it.
const TIMES: &str = "timeout=300ms,reconnect=300ms";
/// The longest allowed time of a request: both timeouts, and a margin for a busy machine.
const LONGEST: Duration = Duration::from_secs(20);
/// Most bytes that a device may log during the test.
const LOG_MAX: u64 = 256 << 10;
/// Most connections of a device during the test, on each of its queues.
const CONNECTIONS_MAX: u64 = 400;

/// A received request.
struct ReceivedRequest {
    command: u16,
    cookie: [u8; 8],
    offset: u64,
    len: u32,
}

/// How a connection ends.
type ConnectionEnd = std::io::Result<()>;

/// A kind of misbehaviour.
#[derive(Clone, Copy)]
enum Misbehaviour {
    /// In place of a handshake.
    Greets(fn(&mut UnixStream, &mut Rng) -> ConnectionEnd),
    /// In place of an answer to an option.
    Agrees(fn(&mut UnixStream, u32) -> ConnectionEnd),
    /// In place of an answer to a request, after a few correct answers.
    Answers(fn(&mut UnixStream, &ReceivedRequest, &mut Rng) -> ConnectionEnd),
    /// As `Answers`, with structured replies.
    Structured(fn(&mut UnixStream, &ReceivedRequest, &mut Rng) -> ConnectionEnd),
}

/// The content of the export: each byte follows from its offset.
fn content(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect()
}

fn simple(asked: &ReceivedRequest, error: u32) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &asked.cookie].concat()
}

fn chunk(asked: &ReceivedRequest, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
    chunk_of(asked.cookie, flags, kind, payload.len() as u32, payload)
}

fn chunk_of(cookie: [u8; 8], flags: u16, kind: u16, len: u32, payload: &[u8]) -> Vec<u8> {
    let header = [&0x668e_33ef_u32.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes(), &cookie];
    [&header.concat()[..], &len.to_be_bytes(), payload].concat()
}

/// A chunk of data for an offset.
fn data(offset: u64, len: usize) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &content(offset, len)].concat()
}

fn stall() -> ConnectionEnd {
    std::thread::sleep(Duration::from_secs(2));
    Ok(())
}

fn reply(stream: &mut UnixStream, option: u32, kind: u32, data: &[u8]) -> ConnectionEnd {
    let magic = 0x0003_e889_0455_65a9_u64;
    let header = [&magic.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes()].concat();
    stream.write_all(&[&header[..], &(data.len() as u32).to_be_bytes(), data].concat())
}

fn info(size: u64, flags: u16) -> Vec<u8> {
    [&0u16.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

/// Flush, FUA, trim, zeroes, several connections.
const FLAGS: u16 = 1 | 4 | 8 | 32 | 64 | 256;

/// The canary: a different content, which clients cannot notice, so this part must.
const CANARY: (&str, Misbehaviour) = (
    "sends another content",
    Misbehaviour::Answers(|stream, asked, _| {
        let payload =
            if asked.command == 0 { content(asked.offset + 1, asked.len as usize) } else { Vec::new() };
        stream.write_all(&[simple(asked, 0), payload].concat())
    }),
);

const MISBEHAVIOURS: &[(&str, Misbehaviour)] = &[
    ("accepts and closes", Misbehaviour::Greets(|_, _| Ok(()))),
    ("accepts and sends nothing", Misbehaviour::Greets(|_, _| stall())),
    (
        "greets with noise",
        Misbehaviour::Greets(|stream, rng| {
            stream.write_all(&(0..4096).map(|_| rng.word() as u8).collect::<Vec<_>>())
        }),
    ),
    (
        "greets with the oldest protocol",
        Misbehaviour::Greets(|stream, _| {
            stream.write_all(b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53")?;
            stream.write_all(&[0; 140])
        }),
    ),
    (
        "sends half a greeting",
        Misbehaviour::Greets(|stream, _| stream.write_all(b"NBDMAGICIHAV").and_then(|()| stall())),
    ),
    (
        "greets repeatedly",
        Misbehaviour::Greets(|stream, _| {
            loop {
                stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
            }
        }),
    ),
    ("speaks HTTP", Misbehaviour::Greets(|stream, _| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"))),
    ("answers another option", Misbehaviour::Agrees(|stream, option| reply(stream, option + 1, 1, &[]))),
    ("answers options with a wrong magic", Misbehaviour::Agrees(|stream, _| stream.write_all(&[0x77; 20]))),
    (
        "answers options with a length of 4 GiB",
        Misbehaviour::Agrees(|stream, option| {
            let magic = 0x0003_e889_0455_65a9_u64;
            stream.write_all(
                &[&magic.to_be_bytes()[..], &option.to_be_bytes(), &[0, 0, 0, 3, 255, 255, 255, 255]]
                    .concat(),
            )?;
            loop {
                stream.write_all(&[0; 65536])?;
            }
        }),
    ),
    ("refuses each option", Misbehaviour::Agrees(|stream, option| reply(stream, option, 1 << 31 | 1, b"no"))),
    (
        "sends information without end",
        Misbehaviour::Agrees(|stream, option| {
            loop {
                reply(stream, option, 3, &[0, 77, 1, 2, 3])?;
            }
        }),
    ),
    ("negotiates without a size", Misbehaviour::Agrees(|stream, option| reply(stream, option, 1, &[]))),
    ("has half a size", Misbehaviour::Agrees(|stream, option| reply(stream, option, 3, &[0, 0, 1, 2]))),
    (
        "has 2^64 - 1 bytes",
        Misbehaviour::Agrees(|stream, option| {
            reply(stream, option, 3, &info(u64::MAX, FLAGS))?;
            reply(stream, option, 1, &[])
        }),
    ),
    (
        "has a block size of 0",
        Misbehaviour::Agrees(|stream, option| {
            reply(stream, option, 3, &info(LEN, FLAGS))?;
            reply(stream, option, 3, &[0, 3, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1])?;
            reply(stream, option, 1, &[])
        }),
    ),
    (
        "has undefined flags",
        Misbehaviour::Agrees(|stream, option| {
            reply(stream, option, 3, &info(LEN, 0xfffe))?;
            reply(stream, option, 1, &[])
        }),
    ),
    ("closes at a request", Misbehaviour::Answers(|_, _, _| Err(std::io::ErrorKind::Other.into()))),
    ("does not answer a request", Misbehaviour::Answers(|_, _, _| stall())),
    (
        "answers with another cookie",
        Misbehaviour::Answers(|stream, asked, _| {
            let other = ReceivedRequest { cookie: [0xee; 8], ..*asked };
            stream.write_all(&[simple(&other, 0), content(asked.offset, asked.len as usize)].concat())
        }),
    ),
    (
        "answers twice",
        Misbehaviour::Answers(|stream, asked, _| {
            let payload =
                if asked.command == 0 { content(asked.offset, asked.len as usize) } else { Vec::new() };
            let one = [simple(asked, 0), payload].concat();
            stream.write_all(&[&one[..], &one].concat())
        }),
    ),
    (
        "sends replies without requests",
        Misbehaviour::Answers(|stream, asked, _| {
            for cookie in 0..1000u64 {
                let other = ReceivedRequest { cookie: cookie.to_be_bytes(), ..*asked };
                stream.write_all(&simple(&other, 0))?;
            }
            Ok(())
        }),
    ),
    ("answers with a wrong magic", Misbehaviour::Answers(|stream, _, _| stream.write_all(&[0x11; 16]))),
    (
        "answers with an error that does not exist",
        Misbehaviour::Answers(|stream, asked, _| stream.write_all(&simple(asked, 0x7777_7777))),
    ),
    (
        "sends half an answer",
        Misbehaviour::Answers(|stream, asked, _| {
            stream.write_all(&[simple(asked, 0), content(asked.offset, asked.len as usize / 2)].concat())?;
            stall()
        }),
    ),
    (
        "answers a byte at a time",
        Misbehaviour::Answers(|stream, asked, _| {
            for byte in [simple(asked, 0), content(asked.offset, asked.len as usize)].concat() {
                stream.write_all(&[byte])?;
                std::thread::sleep(Duration::from_micros(300));
            }
            Ok(())
        }),
    ),
    (
        "answers with noise",
        Misbehaviour::Answers(|stream, _, rng| {
            stream.write_all(&(0..512).map(|_| rng.word() as u8).collect::<Vec<_>>())
        }),
    ),
    (
        "sends simple replies after negotiating structured ones",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&[simple(asked, 0), content(asked.offset, asked.len as usize)].concat())
        }),
    ),
    (
        "sends data for another offset",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 1, 1, &data(asked.offset + 4096, asked.len as usize)))
        }),
    ),
    (
        "sends the end before the data",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 1, 0, &[]))?;
            stream.write_all(&chunk(asked, 0, 1, &data(asked.offset, asked.len as usize)))
        }),
    ),
    (
        "sends the same data twice",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 0, 1, &data(asked.offset, asked.len as usize)))?;
            stream.write_all(&chunk(asked, 1, 1, &data(asked.offset, asked.len as usize)))
        }),
    ),
    (
        "sends less data than requested",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 1, 1, &data(asked.offset, asked.len as usize / 2)))
        }),
    ),
    (
        "sends more data than requested",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 1, 1, &data(asked.offset, asked.len as usize + 512)))
        }),
    ),
    (
        "lies about the length of a chunk",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk_of(asked.cookie, 1, 1, u32::MAX, &data(asked.offset, asked.len as usize)))
        }),
    ),
    (
        "sends a chunk of data without an offset",
        Misbehaviour::Structured(|stream, asked, _| stream.write_all(&chunk(asked, 1, 1, &[1, 2, 3]))),
    ),
    (
        "sends a hole of 4 GiB",
        Misbehaviour::Structured(|stream, asked, _| {
            let hole = [&asked.offset.to_be_bytes()[..], &[0xff; 4]].concat();
            stream.write_all(&chunk(asked, 1, 2, &hole))
        }),
    ),
    (
        "sends a hole before the offset",
        Misbehaviour::Structured(|stream, asked, _| {
            let hole = [&asked.offset.wrapping_sub(512).to_be_bytes()[..], &512u32.to_be_bytes()].concat();
            stream.write_all(&chunk(asked, 1, 2, &hole))
        }),
    ),
    (
        "sends extents to a read",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 1, 5, &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3]))
        }),
    ),
    (
        "sends an error with a text of 64 KiB",
        Misbehaviour::Structured(|stream, asked, _| {
            let error = [&5u32.to_be_bytes()[..], &[0xff; 2], &[b'x'; 65535]].concat();
            stream.write_all(&chunk(asked, 1, 0x8001, &error))
        }),
    ),
    (
        "sends chunks of kinds that do not exist",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 1, 0x7abc, &[1, 2, 3, 4]))
        }),
    ),
    (
        "never sends the last chunk",
        Misbehaviour::Structured(|stream, asked, _| {
            stream.write_all(&chunk(asked, 0, 1, &data(asked.offset, asked.len as usize)))?;
            stall()
        }),
    ),
    (
        "sends empty chunks without end",
        Misbehaviour::Structured(|stream, asked, _| {
            loop {
                stream.write_all(&chunk(asked, 0, 0, &[]))?;
            }
        }),
    ),
];

/// Runs `count` kinds, several at a time, as most of the time is waiting.
pub fn run(options: &Options) -> Tally {
    let canary = options.canary.then_some(&CANARY);
    let rules: Vec<_> = canary.into_iter().chain(MISBEHAVIOURS).take(options.count as usize).collect();
    let figures = ["rules", "wrong", "slow", "panics"];
    spread(options, options.workers * 4, rules.len() as u64, &figures, |number, tally| {
        let (name, misbehaviour) = rules[number as usize];
        let (seed, start) = (options.seed.wrapping_add(number), Instant::now());
        tally.count("rules", 1);
        if let Err(why) = one(options, *misbehaviour, seed, tally, name) {
            tally.find("wrong", format!("servers --seed={seed}: one {name}: {why}"));
        }
        let (seconds, connections) = (start.elapsed().as_secs_f64(), tally.figure("connections"));
        println!("  {seconds:>5.1} s, {connections:>4} connections: one {name}");
    })
}

fn one(
    options: &Options,
    misbehaviour: Misbehaviour,
    seed: u64,
    tally: &mut Tally,
    name: &str,
) -> Result<(), String> {
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let (dir, socket, behind) = (scratch.path(), scratch.path().join("s"), scratch.path().join("behind"));
    let listener = UnixListener::bind(&behind).map_err(|why| why.to_string())?;
    listener.set_nonblocking(true).map_err(|why| why.to_string())?;
    let (stop, misbehaves, accepted) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            while !stop.load(Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let number = accepted.fetch_add(1, Relaxed);
                let misbehaves = &misbehaves;
                // The end of the connection is checked on the device's side.
                scope.spawn(move || {
                    drop(serve(stream, misbehaviour, misbehaves, Rng::new(seed ^ number << 32)))
                });
            }
        });
        let work = || exercise(dir, &socket, &behind, &misbehaves, &accepted, tally, name, seed);
        let result = super::super::guarded(work);
        stop.store(true, Relaxed);
        drop(accepting.join());
        result
    })
}

#[expect(clippy::too_many_arguments, reason = "what a scene is made of")]
fn exercise(
    dir: &Path,
    socket: &Path,
    behind: &Path,
    misbehaves: &AtomicBool,
    accepted: &AtomicU64,
    tally: &mut Tally,
    name: &str,
    seed: u64,
) -> Result<(), String> {
    let stack = format!("nbd:nbd+unix:///x?socket={},{TIMES}", behind.display());
    let export = format!("unix:{}", socket.display());
    // The server behaves until the device is ready; later it also misbehaves towards a device that starts.
    let mut daemon = Daemon::start(dir, &["serve", &stack, "--name", "disk", "--nbd", &export], 1)
        .map_err(|refusal| format!("it was not served by one that behaves: {}", tail(&refusal.log)))?;
    misbehaves.store(true, Relaxed);
    let before = accepted.load(Relaxed);
    let start = Instant::now();
    let mut turn = 0;
    while turn < 8 && start.elapsed() < Duration::from_secs(4) {
        let mut peer = Peer::with(socket, HandshakeOptions::new("disk")).map_err(|why| why.to_string())?;
        let (offset, len) = (turn * 65536 % LEN, 4096);
        let begun = Instant::now();
        if let Ok(read) = peer.read(offset, len)
            && read != content(offset, len as usize)
        {
            return Err(format!("a read at {offset} returned other data than the server's"));
        }
        // Errors are expected.
        let _ = peer.write(offset, &content(offset, len as usize), CommandFlags::empty());
        if begun.elapsed() > LONGEST {
            tally.find(
                "slow",
                format!("servers --seed={seed}: one {name}: {:?} for two requests", begun.elapsed()),
            );
        }
        turn += 1;
    }
    let connections = accepted.load(Relaxed) - before;
    if connections > CONNECTIONS_MAX {
        tally.find("slow", format!("servers --seed={seed}: one {name}: {connections} connections"));
    }
    tally.count("connections", connections);
    let log = std::fs::metadata(dir.join("stderr")).map_or(0, |log| log.len());
    if log > LOG_MAX {
        tally.find("slow", format!("servers --seed={seed}: one {name}: {log} bytes of log"));
    }
    if let Some(bad) = daemon.complaint() {
        tally.find("panics", format!("servers --seed={seed}: one {name}: {bad}"));
        return Ok(());
    }
    let peak = daemon.status_field("VmHWM");
    if peak > 300 << 10 {
        return Err(format!("{} MiB in memory", peak >> 10));
    }
    // A device that starts over it is refused or served.
    misbehaves.store(true, Relaxed);
    let other = dir.join("other");
    std::fs::create_dir_all(&other).map_err(|why| why.to_string())?;
    let export = format!("unix:{}", dir.join("o").display());
    match Daemon::start(&other, &["serve", &stack, "--name", "other", "--nbd", &export], 1) {
        Err(refusal) if !refusal.is_orderly() => {
            tally.find(
                "panics",
                format!("servers --seed={seed}: one {name}: at its start: {}", tail(&refusal.log)),
            );
        }
        _ => {}
    }
    misbehaves.store(false, Relaxed);
    daemon.kill();
    Ok(())
}

/// Serves one connection, correctly until it is to misbehave.
fn serve(
    mut stream: UnixStream,
    misbehaviour: Misbehaviour,
    misbehaves: &AtomicBool,
    mut rng: Rng,
) -> ConnectionEnd {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.set_write_timeout(Some(Duration::from_secs(3)))?;
    let bad = misbehaves.load(Relaxed);
    if let (Misbehaviour::Greets(greets), true) = (misbehaviour, bad) {
        return greets(&mut stream, &mut rng);
    }
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap_or_default());
        let (option, len) = (number(8), number(12));
        let mut payload = vec![0; len.min(1 << 20) as usize];
        stream.read_exact(&mut payload)?;
        match (option, misbehaviour) {
            (6 | 7, Misbehaviour::Agrees(agrees)) if bad => agrees(&mut stream, option)?,
            (6 | 7, _) => {
                reply(&mut stream, option, 3, &info(LEN, FLAGS))?;
                reply(&mut stream, option, 1, &[])?;
            }
            (8, Misbehaviour::Structured(_)) => reply(&mut stream, option, 1, &[])?,
            _ => reply(&mut stream, option, 1 << 31 | 1, &[])?,
        }
        if option == 7 {
            break;
        }
    }
    transmit(stream, misbehaviour, misbehaves, &mut rng)
}

fn transmit(
    mut stream: UnixStream,
    misbehaviour: Misbehaviour,
    misbehaves: &AtomicBool,
    rng: &mut Rng,
) -> ConnectionEnd {
    loop {
        let mut header = [0; 28];
        stream.read_exact(&mut header)?;
        let word = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap_or_default());
        let asked = ReceivedRequest {
            command: u16::from_be_bytes([header[6], header[7]]),
            cookie: header[8..16].try_into().unwrap_or_default(),
            offset: word(16),
            len: u32::from_be_bytes(header[24..28].try_into().unwrap_or_default()),
        };
        if asked.command == 1 {
            std::io::copy(&mut (&stream).take(asked.len.into()), &mut std::io::sink())?;
        }
        match (misbehaviour, misbehaves.load(Relaxed)) {
            (Misbehaviour::Answers(answers) | Misbehaviour::Structured(answers), true) => {
                answers(&mut stream, &asked, rng)?
            }
            (Misbehaviour::Structured(_), false) if asked.command == 0 => {
                stream.write_all(&chunk(&asked, 1, 1, &data(asked.offset, asked.len as usize)))?;
            }
            (Misbehaviour::Structured(_), false) => stream.write_all(&chunk(&asked, 1, 0, &[]))?,
            (_, _) => {
                let payload =
                    if asked.command == 0 { content(asked.offset, asked.len as usize) } else { Vec::new() };
                stream.write_all(&[simple(&asked, 0), payload].concat())?;
            }
        }
        if asked.command == 2 {
            return Ok(());
        }
    }
}
