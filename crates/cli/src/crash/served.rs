//! A FUSE file whose requests one thread answers: the device of a recording, or of a state.
//!
//! Requests that arrive together form a batch: all are submitted before the first is executed, so that a
//! recording has the same writes in flight as the kernel.

use fuse::{Mount, MountOptions};
use proto::fuse::wire::{HEAD_LEN, IN_HEADER_LEN, OUT_HEADER_LEN, falloc, fopen};
use proto::fuse::{
    Attributes, Call, Header, Offer, REPLY_LEN_MAX, StatFs, Transfer, negotiate, put_attributes, put_end,
    put_init, put_open, put_statfs, put_written,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// Most bytes of one request.
const TRANSFER_MAX: usize = 1 << 20;
/// Most requests of a batch.
const BATCH_MAX: usize = 16;

/// A request of a device, without its data.
#[derive(Clone, Copy, Debug)]
pub(super) enum Request {
    /// A read. It is answered without a submission.
    Read { at: u64, len: u32 },
    /// A write of `len` bytes.
    Write { at: u64, len: u32, fua: bool },
    /// A discard, or with `zeroes` a write of zeroes.
    Clear { at: u64, len: u64, zeroes: bool },
    /// A flush of all completed writes.
    Flush,
}

/// The storage behind a FUSE file.
pub(super) trait Disk: Send + 'static {
    /// Submits a request other than a read, with its complete data. Returns a ticket for
    /// [`complete`](Disk::complete).
    fn submit(&mut self, request: &Request, data: &[u8], pid: u32) -> io::Result<u32>;
    /// Executes and completes a submitted request; `ticket` is the return value of its submission.
    fn complete(&mut self, request: &Request, data: &[u8], ticket: u32) -> io::Result<()>;
    /// Reads `into.len()` bytes at offset `at`.
    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Ends a batch: writes out everything that was gathered.
    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A mounted file and the thread that serves it.
pub(super) struct Served {
    path: PathBuf,
    made: bool,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// Mounts a device as a file and serves it.
    pub(super) fn start(path: &Path, size: u64, disk: impl Disk) -> Result<Served, String> {
        let options = MountOptions { name: "crash".to_owned(), read_only: false };
        let (mount, device) = Mount::new(path, &options).map_err(|why| why.to_string())?;
        let server = Server { device: File::from(device), disk, size, mode: 0o600 };
        let thread = std::thread::Builder::new().name("crash-fuse".to_owned()).spawn(move || server.run());
        let thread = thread.map_err(|why| why.to_string())?;
        Ok(Served { path: mount.path().to_owned(), made: mount.made_file(), thread: Some(thread) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if fuse::unmount(&self.path, false, self.made).is_err() {
            let _ = fuse::unmount(&self.path, true, self.made);
        }
        if let Some(thread) = self.thread.take() {
            // A process that outlived its check may keep the file open; the serving thread then ends with
            // this process.
            for _ in 0..200 {
                if thread.is_finished() {
                    let _ = thread.join();
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
}

struct Server<D> {
    device: File,
    disk: D,
    size: u64,
    mode: u32,
}

struct Taken {
    header: Header,
    call: Call,
    pid: u32,
    len: usize,
    ticket: io::Result<u32>,
}

impl<D: Disk> Server<D> {
    fn run(mut self) {
        let mut buffers: Vec<Vec<u8>> = Vec::new();
        loop {
            match self.turn(&mut buffers) {
                Ok(()) => {}
                Err(why) if why.raw_os_error() == Some(libc_errno::ENODEV) => return,
                Err(why) => {
                    tracing::error!(%why, "a file of the crash laboratory is no longer served");
                    return;
                }
            }
        }
    }

    fn turn(&mut self, buffers: &mut Vec<Vec<u8>>) -> io::Result<()> {
        let mut fds = [PollFd::new(&self.device, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => return Ok(()),
            other => other?,
        };
        let mut taken = Vec::new();
        while taken.len() < BATCH_MAX {
            if buffers.len() == taken.len() {
                buffers.push(vec![0; TRANSFER_MAX + 4096]);
            }
            let buffer = &mut buffers[taken.len()];
            match (&self.device).read(buffer) {
                Ok(len) => {
                    let bytes = &buffer[..len];
                    let header = Header::parse(bytes, len).map_err(io::Error::other)?;
                    let call = Call::parse(&header, &bytes[IN_HEADER_LEN..len.min(HEAD_LEN + 256)]);
                    let pid = bytes[32..36].iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
                    let ticket = match self.request(&call) {
                        Some(Ok(request)) if !matches!(request, Request::Read { .. }) => {
                            self.disk.submit(&request, data_of(&request, bytes), pid)
                        }
                        _ => Ok(0),
                    };
                    taken.push(Taken { header, call, pid, len, ticket });
                }
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => break,
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                // The request was aborted before it was read.
                Err(why) if why.raw_os_error() == Some(libc_errno::ENOENT) => {}
                Err(why) => return Err(why),
            }
        }
        let mut replies = Vec::with_capacity(taken.len());
        for (one, buffer) in taken.into_iter().zip(buffers.iter()) {
            if let Some(reply) = self.answer(one, buffer) {
                replies.push(reply);
            }
        }
        let ended = self.disk.end();
        for mut reply in replies {
            if let Err(why) = &ended {
                let unique = u64::from_ne_bytes(reply[8..16].try_into().unwrap_or_default());
                put_end(&mut reply, unique, why.raw_os_error().unwrap_or(libc_errno::EIO), 0);
                reply.truncate(OUT_HEADER_LEN);
            }
            match (&self.device).write(&reply) {
                Ok(_) => {}
                // The request was interrupted.
                Err(why) if why.raw_os_error() == Some(libc_errno::ENOENT) => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }

    /// Returns the request of a call on data, or the errno that refuses it.
    fn request(&self, call: &Call) -> Option<Result<Request, i32>> {
        let within = |at: u64, len: u64| at.checked_add(len).is_some_and(|end| end <= self.size);
        Some(match *call {
            Call::Read(Transfer { offset, len, .. }) => {
                let len = u64::from(len).min(self.size.saturating_sub(offset)) as u32;
                Ok(Request::Read { at: offset, len })
            }
            Call::Write(write) if !within(write.offset, u64::from(write.len)) => Err(libc_errno::ENOSPC),
            Call::Write(write) => {
                Ok(Request::Write { at: write.offset, len: write.len, fua: write.is_durable() })
            }
            Call::Sync => Ok(Request::Flush),
            Call::Allocate { offset, len, mode } => {
                let clears = mode & (falloc::PUNCH_HOLE | falloc::ZERO_RANGE);
                if clears == 0 || !within(offset, len) {
                    Err(libc_errno::EOPNOTSUPP)
                } else {
                    Ok(Request::Clear { at: offset, len, zeroes: clears & falloc::ZERO_RANGE != 0 })
                }
            }
            _ => return None,
        })
    }

    fn answer(&mut self, taken: Taken, buffer: &[u8]) -> Option<Vec<u8>> {
        let unique = taken.header.unique;
        let mut reply = vec![0; REPLY_LEN_MAX];
        let fail = |reply: &mut Vec<u8>, errno: i32| put_end(reply, unique, errno, 0);
        if let Some(request) = self.request(&taken.call) {
            let len = match request {
                Err(errno) => fail(&mut reply, errno),
                Ok(Request::Read { at, len }) => {
                    reply.resize(OUT_HEADER_LEN + len as usize, 0);
                    match self.disk.read(at, &mut reply[OUT_HEADER_LEN..]) {
                        Ok(()) => put_end(&mut reply, unique, 0, len) + len as usize,
                        Err(why) => fail(&mut reply, why.raw_os_error().unwrap_or(libc_errno::EIO)),
                    }
                }
                Ok(request) => {
                    let data = data_of(&request, &buffer[..taken.len]);
                    let done = taken.ticket.and_then(|ticket| self.disk.complete(&request, data, ticket));
                    match (done, request) {
                        (Err(why), _) => fail(&mut reply, why.raw_os_error().unwrap_or(libc_errno::EIO)),
                        (Ok(()), Request::Write { len, .. }) => put_written(&mut reply, unique, len),
                        (Ok(()), _) => put_end(&mut reply, unique, 0, 0),
                    }
                }
            };
            reply.truncate(len);
            return Some(reply);
        }
        let _ = taken.pid;
        let len = match taken.call {
            Call::Init { major, minor, max_readahead, flags } => {
                let offer = Offer {
                    transfer_max: TRANSFER_MAX as u32,
                    background_max: 64,
                    passthrough: false,
                    over_io_uring: false,
                };
                match negotiate(&offer, major, minor, max_readahead, flags) {
                    Some(agreement) => put_init(&mut reply, unique, &agreement),
                    None => fail(&mut reply, libc_errno::EPROTO),
                }
            }
            Call::GetAttr => put_attributes(&mut reply, unique, &self.attributes()),
            Call::SetAttr(change) => {
                if change.size.is_some_and(|size| size != self.size && (change.of_open_file || size != 0)) {
                    fail(&mut reply, libc_errno::EPERM)
                } else {
                    self.mode = change.mode.unwrap_or(self.mode);
                    put_attributes(&mut reply, unique, &self.attributes())
                }
            }
            Call::Open => {
                let flags = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES | fopen::NOFLUSH;
                put_open(&mut reply, unique, flags, 0)
            }
            Call::StatFs => put_statfs(&mut reply, unique, &StatFs { size: self.size, block_len: 512 }),
            Call::Release | Call::Destroy => put_end(&mut reply, unique, 0, 0),
            Call::Unanswered => return None,
            _ => fail(&mut reply, libc_errno::ENOSYS),
        };
        reply.truncate(len);
        Some(reply)
    }

    fn attributes(&self) -> Attributes {
        Attributes {
            size: self.size,
            blocks: self.size / 512,
            mode: self.mode,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            block_len: 4096,
            time_s: 0,
        }
    }
}

/// Returns the data of a write in the bytes of its request.
fn data_of<'a>(request: &Request, bytes: &'a [u8]) -> &'a [u8] {
    match request {
        Request::Write { len, .. } => {
            &bytes[HEAD_LEN.min(bytes.len())..(HEAD_LEN + *len as usize).min(bytes.len())]
        }
        _ => &[],
    }
}

/// Error numbers that are sent to the kernel.
mod libc_errno {
    use rustix::io::Errno;

    pub(super) const ENOENT: i32 = Errno::NOENT.raw_os_error();
    pub(super) const EIO: i32 = Errno::IO.raw_os_error();
    pub(super) const EPERM: i32 = Errno::PERM.raw_os_error();
    pub(super) const ENODEV: i32 = Errno::NODEV.raw_os_error();
    pub(super) const ENOSPC: i32 = Errno::NOSPC.raw_os_error();
    pub(super) const ENOSYS: i32 = Errno::NOSYS.raw_os_error();
    pub(super) const EPROTO: i32 = Errno::PROTO.raw_os_error();
    pub(super) const EOPNOTSUPP: i32 = Errno::OPNOTSUPP.raw_os_error();
}
