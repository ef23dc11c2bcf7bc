//! The socket of a front-end: messages with file descriptors attached.

use proto::vhost_user::wire::{FDS_MAX, HEADER_LEN};
use proto::vhost_user::{Header, Malformed};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// A message of the front-end.
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// A connected socket, and the received part of an incomplete message.
pub(super) struct Socket {
    stream: UnixStream,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Socket {
    pub(super) fn new(stream: UnixStream) -> Socket {
        Socket { stream, bytes: Vec::new(), fds: Vec::new() }
    }

    /// Process ID of the front-end, if the kernel reports it.
    pub(super) fn peer(&self) -> Option<i32> {
        self.stream.peer_cred().ok()?.pid()
    }

    /// Receives a message; `None` at the end of the connection. A partly received message is kept if the
    /// future is dropped.
    pub(super) async fn receive(&mut self) -> io::Result<Option<Message>> {
        loop {
            let header = match self.bytes.first_chunk::<HEADER_LEN>() {
                Some(header) => Some(Header::parse(header).map_err(invalid)?),
                None => None,
            };
            let wanted = HEADER_LEN + header.map_or(0, |header| header.len as usize);
            if let Some(header) = header.filter(|_| self.bytes.len() == wanted) {
                let payload = self.bytes.split_off(HEADER_LEN);
                self.bytes.clear();
                return Ok(Some(Message { header, payload, fds: std::mem::take(&mut self.fds) }));
            }
            if !self.fill(wanted).await? {
                return match self.bytes.is_empty() {
                    true => Ok(None),
                    false => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
        }
    }

    /// Receives bytes up to a total of `wanted`. `false`: the front-end has closed the connection.
    async fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        let (stream, have) = (&self.stream, self.bytes.len());
        let mut room = vec![0; wanted - have];
        let mut fds = Vec::new();
        let received = stream.async_io(Interest::READABLE, || receive(stream.as_fd(), &mut room, &mut fds));
        let count = received.await?;
        self.fds.append(&mut fds);
        if self.fds.len() > FDS_MAX {
            return Err(invalid(Malformed::Descriptors { request: 0, count: self.fds.len() }));
        }
        self.bytes.extend(&room[..count]);
        Ok(count > 0)
    }

    /// Sends a reply, with a descriptor attached if one is given.
    pub(super) async fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut sent = 0;
        while sent < bytes.len() {
            let beside = fd.filter(|_| sent == 0);
            let step = || send(self.stream.as_fd(), &bytes[sent..], beside);
            sent += self.stream.async_io(Interest::WRITABLE, step).await?;
        }
        Ok(())
    }
}

fn invalid(why: Malformed) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn receive(socket: BorrowedFd<'_>, room: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(invalid(Malformed::Descriptors { request: 0, count: FDS_MAX + 1 }));
    }
    Ok(received.bytes)
}

/// Sends as many bytes as the socket accepts without blocking.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}
