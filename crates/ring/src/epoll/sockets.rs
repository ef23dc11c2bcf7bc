//! Sockets on epoll: an operation is tried at once, and again when an edge reports readiness. Readiness for
//! writing is watched only while a send is blocked.

use super::{Epoll, control};
use crate::config::{Chunk, Event, ReceiveEnd, SocketId};
use crate::core::Core;
use crate::sockets::Sending;
use crate::sys;
use block::Segment;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Receiving {
    /// Not receiving.
    Idle,
    /// Receiving chunks.
    Armed,
    /// Filling a segment, of which so many bytes are done.
    Filling(Segment, u32),
}

pub(super) struct Socket {
    owner: u32,
    fd: OwnedFd,
    receiving: Receiving,
    pub(super) sending: Sending,
    /// There may be data to read.
    readable: bool,
    /// The peer closed its side or the socket failed: no further edge will come, so read to the end.
    hung_up: bool,
    /// It is in the list of ready or of starved sockets.
    queued: bool,
    /// Readiness for writing is watched.
    watches_writes: bool,
}

const READS: libc::c_int = libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET;

impl Epoll {
    pub(crate) fn add_socket(&mut self, fd: OwnedFd, owner: u32) -> io::Result<SocketId> {
        let epoll = &self.fd;
        sys::widen_unix_socket(fd.as_raw_fd());
        self.sockets.add(|id| {
            control(epoll, libc::EPOLL_CTL_ADD, fd.as_raw_fd(), READS, id.0.into())?;
            Ok(Socket {
                owner,
                fd,
                receiving: Receiving::Idle,
                sending: Sending::new(),
                readable: false,
                hung_up: false,
                queued: false,
                watches_writes: false,
            })
        })
    }

    pub(super) fn became_ready(&mut self, core: &mut Core, id: SocketId, events: u32) {
        let Some(socket) = self.sockets.find(id) else { return };
        let events = events as libc::c_int;
        let over = libc::EPOLLHUP | libc::EPOLLERR;
        if events & (libc::EPOLLIN | libc::EPOLLRDHUP | over) != 0 {
            socket.readable = true;
            socket.hung_up |= events & (libc::EPOLLRDHUP | over) != 0;
            self.queue_if_ready(id);
        }
        if events & (libc::EPOLLOUT | over) != 0 {
            self.send_rest(core, id);
        }
    }

    fn queue_if_ready(&mut self, id: SocketId) {
        let socket = self.sockets.of(id);
        if socket.readable && !socket.queued && socket.receiving != Receiving::Idle {
            socket.queued = true;
            self.ready.push_back(id);
        }
    }

    #[track_caller]
    pub(crate) fn receive(&mut self, id: SocketId) {
        let socket = self.sockets.of(id);
        assert!(socket.receiving == Receiving::Idle, "{id:?} receives already");
        socket.receiving = Receiving::Armed;
        self.queue_if_ready(id);
    }

    #[track_caller]
    pub(crate) fn receive_into(&mut self, core: &mut Core, id: SocketId, segment: Segment) {
        core.memory.own_pointer(segment);
        let socket = self.sockets.of(id);
        assert!(socket.receiving == Receiving::Idle, "{id:?} receives already");
        socket.receiving = Receiving::Filling(segment, 0);
        if segment.len == 0 {
            return self.fill_ended(core, id, 0);
        }
        self.queue_if_ready(id);
    }

    pub(crate) fn receive_stop(&mut self, core: &mut Core, id: SocketId) {
        if self.sockets.of(id).receiving == Receiving::Armed {
            self.receive_ended(core, id, ReceiveEnd::Stopped);
        }
    }

    fn receive_ended(&mut self, core: &mut Core, id: SocketId, end: ReceiveEnd) {
        let socket = self.sockets.of(id);
        socket.receiving = Receiving::Idle;
        core.events.push_back(Event::ReceiveEnded { socket: id, owner: socket.owner, end });
    }

    fn fill_ended(&mut self, core: &mut Core, id: SocketId, result: i64) {
        let socket = self.sockets.of(id);
        socket.receiving = Receiving::Idle;
        core.events.push_back(Event::Filled { socket: id, owner: socket.owner, result });
    }

    /// Receives once from each ready socket.
    pub(super) fn serve_ready(&mut self, core: &mut Core) {
        for _ in 0..self.ready.len() {
            let Some(id) = self.ready.pop_front() else { return };
            let Some(socket) = self.sockets.find(id) else { continue };
            socket.queued = false;
            match socket.receiving {
                Receiving::Idle => {}
                Receiving::Armed => self.receive_chunk(core, id),
                Receiving::Filling(segment, done) => self.fill(core, id, segment, done),
            }
        }
    }

    fn receive_chunk(&mut self, core: &mut Core, id: SocketId) {
        let socket = self.sockets.of(id);
        let Some(number) = self.chunks.pop() else {
            socket.queued = true;
            return self.starved.push_back(id);
        };
        let chunk = Chunk(number);
        let whole = core.chunks.segment(chunk, core.chunks.len());
        let result = socket.receive(core.memory.own_pointer(whole), whole.len);
        if result > 0 {
            core.chunks.hand_out(chunk);
            let segment = whole.slice(0, result as u32);
            core.events.push_back(Event::Received { socket: id, owner: socket.owner, segment, chunk });
            return self.queue_if_ready(id);
        }
        self.chunks.push(number);
        match -result as i32 {
            0 => self.receive_ended(core, id, ReceiveEnd::Eof),
            libc::EAGAIN => {}
            error => self.receive_ended(core, id, ReceiveEnd::Error(error)),
        }
    }

    fn fill(&mut self, core: &mut Core, id: SocketId, segment: Segment, done: u32) {
        let socket = self.sockets.of(id);
        let rest = segment.slice(done, segment.len - done);
        let result = socket.receive(core.memory.own_pointer(rest), rest.len);
        let done = done + result.max(0) as u32;
        if result == -i64::from(libc::EAGAIN) {
            return;
        }
        if result > 0 && done < segment.len {
            socket.receiving = Receiving::Filling(segment, done);
            return self.queue_if_ready(id);
        }
        self.fill_ended(core, id, if result < 0 { result } else { done.into() });
    }

    pub(crate) fn give_back(&mut self, chunk: Chunk) {
        self.chunks.push(chunk.0);
    }

    #[track_caller]
    pub(crate) fn send(&mut self, core: &mut Core, id: SocketId, segments: &[Segment]) {
        core.started += 1;
        self.sockets.of(id).sending.begin(&core.memory, segments, core.started);
        self.send_rest(core, id);
    }

    fn send_rest(&mut self, core: &mut Core, id: SocketId) {
        let epoll = &self.fd;
        let socket = self.sockets.of(id);
        if !socket.sending.is_under_way() {
            return;
        }
        let mut gone = 0;
        let error = loop {
            if socket.sending.advance(gone) {
                break None;
            }
            match socket.send_some() {
                result if result >= 0 => gone = result as u64,
                result if result == -i64::from(libc::EAGAIN) => {
                    if socket.watches_writes {
                        return;
                    }
                    // If the socket has become writable by now, the edge comes at once.
                    let fd = socket.fd.as_raw_fd();
                    socket.watches_writes = true;
                    match control(epoll, libc::EPOLL_CTL_MOD, fd, READS | libc::EPOLLOUT, id.0.into()) {
                        Ok(()) => return,
                        Err(error) => break Some(-i64::from(error.raw_os_error().unwrap_or(libc::EIO))),
                    }
                }
                result => break Some(result),
            }
        };
        if std::mem::take(&mut socket.watches_writes) {
            // A failure leaves it watched, which costs a spurious event now and then.
            let _ = control(epoll, libc::EPOLL_CTL_MOD, socket.fd.as_raw_fd(), READS, id.0.into());
        }
        let result = socket.sending.end(error);
        core.events.push_back(Event::Sent { socket: id, owner: socket.owner, result });
    }

    pub(crate) fn close(&mut self, core: &mut Core, id: SocketId) {
        let Some(socket) = self.sockets.find(id) else { return };
        sys::shutdown(socket.fd.as_raw_fd());
        let owner = socket.owner;
        match socket.receiving {
            Receiving::Idle => {}
            Receiving::Armed => self.receive_ended(core, id, ReceiveEnd::Stopped),
            Receiving::Filling(..) => self.fill_ended(core, id, -i64::from(libc::ECANCELED)),
        }
        if let Some(mut socket) = self.sockets.remove(id) {
            if socket.sending.is_under_way() {
                let result = socket.sending.end(Some(-i64::from(libc::ECANCELED)));
                core.events.push_back(Event::Sent { socket: id, owner, result });
            }
            // A duplicate of the descriptor would keep the socket in the set.
            let _ = control(&self.fd, libc::EPOLL_CTL_DEL, socket.fd.as_raw_fd(), 0, 0);
        }
        core.events.push_back(Event::Closed { socket: id, owner });
    }
}

impl Socket {
    /// One non-blocking `recv`. Fewer bytes than requested mean that there were no more.
    fn receive(&mut self, base: *mut u8, len: u32) -> i64 {
        loop {
            // SAFETY: the caller named `len` bytes of our own memory, which nobody else uses now.
            let result = sys::signed(unsafe {
                libc::recv(self.fd.as_raw_fd(), base.cast(), len as usize, libc::MSG_DONTWAIT)
            });
            if result == -i64::from(libc::EINTR) {
                continue;
            }
            self.readable = result == i64::from(len) || (self.hung_up && result > 0);
            // A socket that has ended or failed stays readable: the next `recv` reports it again.
            self.readable |= result <= 0 && result != -i64::from(libc::EAGAIN);
            return result;
        }
    }

    /// One non-blocking `sendmsg`.
    fn send_some(&mut self) -> i64 {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let fd = self.fd.as_raw_fd();
        loop {
            // SAFETY: the header and its list are the socket's own, and what they name stays until the end.
            let result = sys::signed(unsafe {
                match self.sending.single() {
                    Some(one) => libc::send(fd, one.iov_base, one.iov_len, flags),
                    None => libc::sendmsg(fd, self.sending.header(), flags),
                }
            });
            if result != -i64::from(libc::EINTR) {
                return result;
            }
        }
    }
}
