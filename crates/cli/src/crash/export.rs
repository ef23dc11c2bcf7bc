//! A device of the laboratory as an NBD export on a socket: for the server that shows it as a ublk device, and
//! for the emulator of a guest.
//!
//! A thread for each connection answers its requests. Requests that arrived together are all submitted before
//! the first is executed, so a recording has the writes in flight that its client had.

use super::served::{Disk, Request};
use proto::nbd::server::{Accepted, Config, Found, Handshake, Refused, Step, check};
use proto::nbd::{BlockSizes, Command, CommandFlags, ExportId, ExportInfo, NbdError, Session, request};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of one request at most.
const TRANSFER_MAX: u32 = 1 << 20;
/// Bytes that are received at once.
const RECEIVE_LEN: usize = 256 << 10;

/// An export, until it is dropped; its connections last until their clients end them.
pub(super) struct Exported {
    path: PathBuf,
    ended: Arc<AtomicBool>,
}

impl Exported {
    /// Serves a device of `size` bytes on a new socket.
    pub(super) fn start<D: Disk + Clone>(path: &Path, size: u64, disk: D) -> Result<Exported, String> {
        let failed = |why: io::Error| format!("{}: {why}", path.display());
        let listener = UnixListener::bind(path).map_err(failed)?;
        let ended = Arc::new(AtomicBool::new(false));
        let stop = ended.clone();
        let thread = std::thread::Builder::new().name("crash-nbd".to_owned());
        let accept = move || {
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let disk = disk.clone();
                std::thread::spawn(move || {
                    if let Err(error) = serve(stream, size, disk) {
                        tracing::debug!(%error, "a connection of the crash laboratory ended");
                    }
                });
            }
        };
        thread.spawn(accept).map_err(failed)?;
        Ok(Exported { path: path.to_owned(), ended })
    }

    /// Returns the socket.
    pub(super) fn socket(&self) -> &Path {
        &self.path
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
    }
}

fn info(size: u64) -> ExportInfo {
    let block_sizes = BlockSizes { minimum: 512, preferred: 4096, maximum: TRANSFER_MAX };
    ExportInfo { block_sizes, can_fast_zero: false, can_cache: false, ..ExportInfo::new(size) }
}

/// Negotiates; returns the session and what has arrived after the handshake.
fn greet(stream: &mut UnixStream, size: u64) -> io::Result<Option<(Session, Vec<u8>)>> {
    let exports = vec![Found { id: ExportId(0), name: String::new(), info: info(size) }];
    let mut handshake = Handshake::new(Config { structured: false, extended: false, ..Config::default() });
    let mut received = Vec::new();
    loop {
        let output = std::mem::take(handshake.output());
        stream.write_all(&output)?;
        match handshake.poll() {
            Step::NeedInput => {
                if received.is_empty() {
                    let mut bytes = [0; 4096];
                    let len = stream.read(&mut bytes)?;
                    if len == 0 {
                        return Ok(None);
                    }
                    received.extend_from_slice(&bytes[..len]);
                }
                let taken = handshake.input(&received, &exports);
                received.drain(..taken);
            }
            Step::Ready(session) => return Ok(Some((session, received))),
            Step::StartTls | Step::Closed(_) => return Ok(None),
        }
    }
}

/// A request that was taken: its cookie, its payload, and its submission.
struct Taken {
    request: proto::nbd::Request,
    data: std::ops::Range<usize>,
    /// `None`: it needs no execution.
    what: Result<Option<Request>, NbdError>,
    ticket: io::Result<u32>,
}

fn serve(mut stream: UnixStream, size: u64, mut disk: impl Disk) -> io::Result<()> {
    let Some((session, mut received)) = greet(&mut stream, size)? else { return Ok(()) };
    let mut more = vec![0; RECEIVE_LEN];
    loop {
        let (taken, used, open) = take(&session, &received, &mut disk)?;
        if !taken.is_empty() {
            let replies = answer(&session, &received, taken, &mut disk);
            stream.write_all(&replies)?;
        }
        received.drain(..used);
        if !open {
            return Ok(());
        }
        let len = stream.read(&mut more)?;
        if len == 0 {
            return Ok(());
        }
        received.extend_from_slice(&more[..len]);
    }
}

/// Submits all requests that have arrived whole. Returns them, their length and whether more may follow.
fn take(session: &Session, received: &[u8], disk: &mut impl Disk) -> io::Result<(Vec<Taken>, usize, bool)> {
    let mut taken = Vec::new();
    let mut at = 0;
    loop {
        let parsed = request::parse(&received[at..], session.extended()).map_err(io::Error::other)?;
        let Some((request, head_len)) = parsed else { return Ok((taken, at, true)) };
        let what = match check(session, &request) {
            Ok(Accepted::Disconnect) => return Ok((taken, at, false)),
            Ok(Accepted::Submit(_)) => Ok(Some(translate(&request))),
            Ok(Accepted::Empty) => Ok(None),
            Ok(Accepted::Status(_) | Accepted::StatusPayload) => Err(NbdError::Invalid),
            Err(Refused::Reply(error)) => Err(error),
            Err(Refused::Drop(why)) => return Err(io::Error::other(why)),
        };
        if request.payload_len > u64::from(TRANSFER_MAX) {
            return Err(io::Error::other("a payload is too long"));
        }
        let data = at + head_len..at + head_len + request.payload_len as usize;
        if received.len() < data.end {
            return Ok((taken, at, true));
        }
        at = data.end;
        let ticket = match what {
            Ok(Some(Request::Read { .. })) | Ok(None) | Err(_) => Ok(0),
            Ok(Some(request)) => disk.submit(&request, &received[data.clone()], 0),
        };
        taken.push(Taken { request, data, what, ticket });
    }
}

fn translate(request: &proto::nbd::Request) -> Request {
    let (at, len) = (request.offset, request.len);
    match request.command {
        Command::Read => Request::Read { at, len: len as u32 },
        Command::Write => {
            Request::Write { at, len: len as u32, fua: request.flags.contains(CommandFlags::FUA) }
        }
        Command::Trim => Request::Clear { at, len, zeroes: false },
        Command::WriteZeroes => Request::Clear { at, len, zeroes: true },
        // `check` permits no other.
        _ => Request::Flush,
    }
}

/// Executes what was taken, in its order; returns the replies.
fn answer(session: &Session, received: &[u8], taken: Vec<Taken>, disk: &mut impl Disk) -> Vec<u8> {
    let mut outcomes = Vec::with_capacity(taken.len());
    for one in taken {
        let mut data = Vec::new();
        let done = match one.what {
            Err(error) => Err(error),
            Ok(None) => Ok(()),
            Ok(Some(Request::Read { at, len })) => {
                data.resize(len as usize, 0);
                disk.read(at, &mut data).map_err(|_| NbdError::Io)
            }
            Ok(Some(what)) => {
                let payload = &received[one.data];
                let done = one.ticket.and_then(|ticket| disk.complete(&what, payload, ticket));
                done.map_err(|_| NbdError::Io)
            }
        };
        outcomes.push((one.request, done, data));
    }
    // A write is answered when it is in the log.
    let ended = disk.end().map_err(|_| NbdError::Io);
    let mut replies = Vec::new();
    for (request, done, data) in outcomes {
        let mut head = [0; 64];
        let len = match done.and(ended) {
            Ok(()) if !data.is_empty() => {
                session.style.put_data_header(&mut head, &request, request.offset, data.len() as u32, true)
            }
            done => session.style.put_end(&mut head, &request, done.err()),
        };
        replies.extend_from_slice(&head[..len]);
        if done.and(ended).is_ok() {
            replies.extend_from_slice(&data);
        }
    }
    replies
}
