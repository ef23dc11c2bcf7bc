//! The client's side of NBD as bytes, for clients that break the protocol. No function here panics: the
//! server may close at any moment, which is reported to the caller.

use crate::raw::{CLIENT_FLAGS, go_data, option_bytes};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Limit for one call on a socket.
const CALL: Duration = Duration::from_millis(250);

/// Connects to a server.
pub fn connect(socket: &Path) -> Option<UnixStream> {
    let stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(CALL)).ok()?;
    stream.set_write_timeout(Some(CALL)).ok()?;
    Some(stream)
}

/// Connects and exchanges greetings.
pub fn greeted(socket: &Path) -> Option<UnixStream> {
    let mut stream = connect(socket)?;
    let mut greeting = [0; 18];
    // A busy server may need longer.
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.read_exact(&mut greeting).ok()?;
    stream.set_read_timeout(Some(CALL)).ok()?;
    stream.write_all(&CLIENT_FLAGS.to_be_bytes()).ok()?;
    Some(stream)
}

/// Connects to an export, for simple replies.
pub fn go(socket: &Path, export: &str) -> Option<UnixStream> {
    let mut stream = greeted(socket)?;
    stream.write_all(&option_bytes(7, &go_data(export))).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header).ok()?;
        let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap_or_default());
        let mut data = vec![0; number(16).min(1 << 16) as usize];
        stream.read_exact(&mut data).ok()?;
        match number(12) {
            1 => break,
            3 => {}
            _ => return None,
        }
    }
    stream.set_read_timeout(Some(CALL)).ok()?;
    Some(stream)
}

/// Reads available bytes, at most `max`.
pub fn read_available(stream: &mut UnixStream, max: usize) -> usize {
    let mut bytes = vec![0; max.min(1 << 16)];
    stream.read(&mut bytes).unwrap_or(0)
}

/// How the server ended a conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The server closed the connection.
    Closed,
    /// The server was silent for too long after the end of all input.
    Silent,
}

/// Sends all bytes while reading, shuts down its side, and reads until the server closes.
pub fn converse(socket: &Path, bytes: &[u8], patience: Duration) -> std::io::Result<(End, u64)> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut stream = UnixStream::connect(socket)?;
    stream.set_nonblocking(true)?;
    let (mut sent, mut received, mut buffer) = (0, 0, vec![0; 1 << 16]);
    let mut says = true;
    let mut quiet_since = std::time::Instant::now();
    loop {
        if says && sent == bytes.len() {
            says = false;
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
        let wanted = if says { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut fds = [PollFd::new(&stream, wanted)];
        let limit = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        let _ = poll(&mut fds, Some(&limit));
        let ready = fds[0].revents();
        if ready.contains(PollFlags::OUT) && says {
            match stream.write(&bytes[sent..]) {
                Ok(len) => {
                    sent += len;
                    quiet_since = std::time::Instant::now();
                }
                Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {}
                // The server closed; its remaining output is still read.
                Err(_) => sent = bytes.len(),
            }
        }
        if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok((End::Closed, received)),
                Ok(len) => {
                    received += len as u64;
                    quiet_since = std::time::Instant::now();
                }
                Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return Ok((End::Closed, received)),
            }
        }
        if quiet_since.elapsed() > patience {
            return Ok((End::Silent, received));
        }
    }
}
