//! The kinds of hostile clients. Each is a function that misbehaves once, on connections of its own; several
//! threads call it repeatedly during the measurement.

use super::super::wire::{connect, go, greeted, read_available};
use crate::raw::{go_data, option_bytes, request};
use sim::Rng;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The export that hostile clients may change.
pub(super) const VICTIM: &str = "victim";
/// Its length in bytes.
pub(super) const LEN: u64 = 16 << 20;

/// Server, random numbers and time limit of a hostile client.
pub(super) struct Scene<'a> {
    pub(super) socket: &'a Path,
    pub(super) rng: Rng,
    pub(super) until: Instant,
}

impl Scene<'_> {
    fn go(&self) -> Option<UnixStream> {
        go(self.socket, VICTIM)
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Keeps connections open until the measurement is over.
    fn hold(&self, streams: Vec<UnixStream>) {
        while !self.is_over() {
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(streams);
    }

    /// Connects `count` times, runs `each` on every connection, and keeps them open.
    fn hold_each(&self, count: usize, each: impl Fn(&mut UnixStream), transmission: bool) {
        let mut held = Vec::new();
        for _ in 0..count {
            if self.is_over() {
                break;
            }
            let stream = if transmission { self.go() } else { connect(self.socket) };
            if let Some(mut stream) = stream {
                each(&mut stream);
                held.push(stream);
            }
        }
        self.hold(held);
    }

    /// Sends these bytes repeatedly until the server closes or the time is up, reading at times if `reads`.
    fn flood(&self, mut stream: UnixStream, bytes: &[u8], reads: bool) {
        while !self.is_over() {
            if stream.write_all(bytes).is_err() && !reads {
                break;
            }
            if reads && read_available(&mut stream, 1 << 16) == 0 {
                break;
            }
        }
    }

    fn options(&mut self, bytes: &[u8], reads: bool) {
        if let Some(stream) = greeted(self.socket) {
            self.flood(stream, bytes, reads);
        }
    }

    fn requests(&mut self, bytes: &[u8], reads: bool) {
        if let Some(stream) = self.go() {
            self.flood(stream, bytes, reads);
        }
    }
}

/// A kind of hostile client: its name and its function.
pub(super) type Kind = (&'static str, fn(&mut Scene<'_>));

fn send(stream: &mut UnixStream, bytes: &[u8]) {
    // A closed connection is accepted.
    let _ = stream.write_all(bytes);
}

fn write_header(len: u32) -> Vec<u8> {
    request(0, 1, 7, 0, len)
}

fn many(one: &[u8], count: usize) -> Vec<u8> {
    one.iter().copied().cycle().take(one.len() * count).collect()
}

/// A whole session, byte for byte: greeting flags, GO, a write, a read, a flush, the end.
fn valid_session() -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(option_bytes(8, &[]));
    bytes.extend(option_bytes(7, &go_data(VICTIM)));
    bytes.extend(request(0, 1, 1, 0, 512));
    bytes.extend([7; 512]);
    bytes.extend(request(0, 0, 2, 0, 512));
    bytes.extend(request(0, 3, 3, 0, 0));
    bytes.extend(request(0, 2, 4, 0, 0));
    bytes
}

/// The canary: a write to the disk of the well-behaved client, which that client must notice.
pub(super) const CANARY: Kind = ("writes to the disk of the other client", |scene| {
    let Some(stream) = go(scene.socket, "honest") else { return };
    let writes = (0..64).flat_map(|page| [request(0, 1, 1, page * 4096, 4096), vec![9; 4096]].concat());
    scene.flood(stream, &writes.collect::<Vec<u8>>(), true);
});

/// All kinds.
pub(super) const KINDS: &[Kind] = &[
    ("connects and closes", |scene| drop(connect(scene.socket))),
    ("connects and resets with the greeting unread", |scene| {
        let Some(mut stream) = connect(scene.socket) else { return };
        send(&mut stream, &[0; 64]);
    }),
    ("connects 300 times and sends nothing", |scene| scene.hold_each(300, |_| (), false)),
    ("sends its flags a byte at a time", |scene| {
        let Some(mut stream) = connect(scene.socket) else { return };
        for byte in 3u32.to_be_bytes() {
            send(&mut stream, &[byte]);
            std::thread::sleep(Duration::from_millis(5));
        }
    }),
    ("sets all flags", |scene| {
        let Some(mut stream) = connect(scene.socket) else { return };
        send(&mut stream, &[0xff; 4]);
        read_available(&mut stream, 4096);
    }),
    ("sends an option with a wrong magic", |scene| scene.options(&[0x55; 16], true)),
    ("announces an option of 4 GiB and stalls", |scene| {
        scene.hold_each(
            40,
            |stream| {
                send(stream, &3u32.to_be_bytes());
                send(stream, b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff1");
            },
            false,
        );
    }),
    ("sends an option of 4 GiB", |scene| {
        let Some(mut stream) = greeted(scene.socket) else { return };
        send(&mut stream, b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff");
        scene.flood(stream, &[0; 65536], false);
    }),
    ("sends unknown options without end", |scene| scene.options(&many(&option_bytes(77, b"abc"), 64), true)),
    ("sends unknown options and reads nothing", |scene| {
        scene.options(&many(&option_bytes(77, b"a"), 64), false)
    }),
    ("lists exports and reads nothing", |scene| scene.options(&many(&option_bytes(3, &[]), 256), false)),
    ("asks for an export of 5,000 letters", |scene| {
        scene.options(&option_bytes(7, &go_data(&"x".repeat(5000))), true);
    }),
    ("lies about the length of a name", |scene| {
        scene.options(&option_bytes(7, b"\xff\xff\xff\xffdisk\0\0"), true)
    }),
    ("asks for 65,535 kinds of information", |scene| {
        let mut data = go_data(VICTIM);
        data.truncate(data.len() - 2);
        data.extend([0xff; 2]);
        data.extend([0, 3].repeat(65_535));
        scene.options(&option_bytes(6, &data), true);
    }),
    ("asks for metadata contexts without end", |scene| {
        let mut data = (VICTIM.len() as u32).to_be_bytes().to_vec();
        data.extend(VICTIM.as_bytes());
        data.extend(200u32.to_be_bytes());
        for _ in 0..200 {
            data.extend(15u32.to_be_bytes());
            data.extend(b"base:allocation");
        }
        scene.options(&[option_bytes(8, &[]), option_bytes(10, &data)].concat(), true);
    }),
    ("starts TLS and sends garbage", |scene| {
        scene.options(&[option_bytes(5, &[]), vec![0x16; 600]].concat(), true)
    }),
    ("starts with TLS", |scene| {
        let Some(stream) = connect(scene.socket) else { return };
        scene.flood(stream, &many(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 30), true);
    }),
    ("speaks HTTP", |scene| {
        let Some(stream) = connect(scene.socket) else { return };
        scene.flood(stream, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", true);
    }),
    ("disconnects in the middle of an option", |scene| {
        let Some(mut stream) = greeted(scene.socket) else { return };
        send(&mut stream, &option_bytes(7, &go_data(VICTIM))[..11]);
    }),
    ("asks for exports that are missing", |scene| scene.options(&option_bytes(7, &go_data("nobody")), true)),
    ("asks for information without end", |scene| scene.options(&option_bytes(6, &go_data(VICTIM)), true)),
    ("asks for structured replies twice", |scene| scene.options(&many(&option_bytes(8, &[]), 2), true)),
    ("aborts each handshake", |scene| scene.options(&option_bytes(2, &[]), true)),
    ("uses the oldest option with a wrong name", |scene| scene.options(&option_bytes(1, b"nobody"), true)),
    ("disconnects after each byte of a session", |scene| {
        let session = valid_session();
        let len = scene.rng.below(session.len() as u64) as usize;
        let Some(mut stream) = connect(scene.socket) else { return };
        send(&mut stream, &session[..len]);
    }),
    ("greets with noise", |scene| {
        let Some(mut stream) = connect(scene.socket) else { return };
        let noise: Vec<u8> = (0..512).map(|_| scene.rng.word() as u8).collect();
        send(&mut stream, &noise);
        read_available(&mut stream, 4096);
    }),
    ("announces 32 MiB on 80 connections and sends a byte", |scene| {
        scene.hold_each(80, |stream| send(stream, &[write_header(32 << 20), vec![1]].concat()), true);
    }),
    // Four threads together stay below the limit of 512 connections of one peer: the well-behaved client is
    // of the same user.
    ("announces 4 KiB on 120 connections and stalls", |scene| {
        scene.hold_each(120, |stream| send(stream, &write_header(4096)), true);
    }),
    ("sends half a header and stalls", |scene| {
        scene.hold_each(60, |stream| send(stream, &write_header(4096)[..13]), true);
    }),
    ("sends requests with a wrong magic", |scene| scene.requests(&[0xaa; 28], true)),
    ("uses one cookie for all requests", |scene| scene.requests(&many(&request(0, 0, 1, 0, 4096), 64), true)),
    ("reads 4 GiB", |scene| scene.requests(&request(0, 0, 1, 0, u32::MAX), true)),
    ("announces a write of 4 GiB and sends it", |scene| {
        let Some(mut stream) = scene.go() else { return };
        send(&mut stream, &write_header(u32::MAX));
        scene.flood(stream, &[0; 65536], false);
    }),
    ("reads megabytes and reads no reply", |scene| {
        scene.requests(&many(&request(0, 0, 1, 0, 1 << 20), 16), false)
    }),
    ("reads a little and reads no reply", |scene| {
        scene.requests(&many(&request(0, 0, 1, 0, 512), 256), false)
    }),
    ("writes and reads no reply", |scene| {
        scene.requests(&many(&[request(0, 1, 1, 0, 512), vec![3; 512]].concat(), 64), false);
    }),
    ("flushes without end", |scene| scene.requests(&many(&request(0, 3, 1, 0, 0), 128), true)),
    ("writes with FUA without end", |scene| {
        scene.requests(&many(&[request(1, 1, 1, 0, 512), vec![3; 512]].concat(), 32), true);
    }),
    ("trims all of it without end", |scene| {
        scene.requests(&many(&request(0, 4, 1, 0, LEN as u32), 16), true)
    }),
    ("zeroes all of it without end", |scene| {
        scene.requests(&many(&request(2, 6, 1, 0, LEN as u32), 16), true)
    }),
    ("requests block status without having negotiated it", |scene| {
        scene.requests(&request(0, 7, 1, 0, 4096), true)
    }),
    ("sends commands that do not exist", |scene| {
        let command = 9 + scene.rng.below(60_000) as u16;
        scene.requests(&many(&request(0, command, 1, 0, 0), 64), true);
    }),
    ("sets all flags of requests", |scene| scene.requests(&many(&request(u16::MAX, 0, 1, 0, 512), 64), true)),
    ("reads past the end", |scene| scene.requests(&many(&request(0, 0, 1, LEN - 100, 4096), 64), true)),
    ("adds offset and length to more than 64 bits", |scene| {
        scene.requests(&many(&request(0, 0, 1, u64::MAX - 100, 4096), 64), true);
    }),
    ("requests no data", |scene| scene.requests(&many(&request(0, 0, 1, 0, 0), 128), true)),
    ("continues after the end of the session", |scene| {
        scene.requests(&[request(0, 2, 1, 0, 0), many(&request(0, 0, 1, 0, 512), 64)].concat(), true);
    }),
    ("disconnects in the middle of data", |scene| {
        let Some(mut stream) = scene.go() else { return };
        let len = scene.rng.below(60_000) as usize;
        send(&mut stream, &[write_header(65536), vec![5; len]].concat());
    }),
    ("disconnects with replies in flight", |scene| {
        let Some(mut stream) = scene.go() else { return };
        send(&mut stream, &many(&request(0, 0, 1, 0, 65536), 32));
    }),
    ("reads bytes one by one, 256 at a time", |scene| {
        scene.requests(&many(&request(0, 0, 1, 77, 1), 256), true)
    }),
    ("writes bytes one by one", |scene| {
        scene.requests(&many(&[request(0, 1, 1, 77, 1), vec![3]].concat(), 200), true);
    }),
    ("asks to cache all of it", |scene| scene.requests(&many(&request(0, 5, 1, 0, LEN as u32), 32), true)),
    ("sends data a byte at a time", |scene| {
        let Some(mut stream) = scene.go() else { return };
        send(&mut stream, &write_header(4096));
        while !scene.is_over() && stream.write_all(&[1]).is_ok() {
            std::thread::sleep(Duration::from_millis(3));
        }
    }),
    ("reads replies a byte at a time", |scene| {
        let Some(mut stream) = scene.go() else { return };
        send(&mut stream, &many(&request(0, 0, 1, 0, 1 << 20), 8));
        while !scene.is_over() && read_available(&mut stream, 1) > 0 {
            std::thread::sleep(Duration::from_millis(3));
        }
    }),
    ("shuts down its side and reads no reply", |scene| {
        let Some(mut stream) = scene.go() else { return };
        send(&mut stream, &many(&request(0, 0, 1, 0, 1 << 20), 8));
        let _ = stream.shutdown(Shutdown::Write);
        scene.hold(vec![stream]);
    }),
    ("stops reading and continues to send requests", |scene| {
        let Some(stream) = scene.go() else { return };
        let _ = stream.shutdown(Shutdown::Read);
        scene.flood(stream, &many(&request(0, 0, 1, 0, 4096), 64), false);
    }),
    ("sends noise for requests", |scene| {
        let noise: Vec<u8> = (0..1024).map(|_| scene.rng.word() as u8).collect();
        scene.requests(&noise, true);
    }),
    ("negotiates extended headers and sends short ones", |scene| {
        let Some(mut stream) = greeted(scene.socket) else { return };
        send(&mut stream, &[option_bytes(11, &[]), option_bytes(7, &go_data(VICTIM))].concat());
        scene.flood(stream, &many(&request(0, 0, 1, 0, 512), 8), true);
    }),
];
