//! Sockets on io_uring. Receiving is a multishot entry that takes a provided buffer for each arrival; sending
//! is one `sendmsg` at a time, continued here when it ends short.

use super::buffers::GROUP;
use super::{Target, Uring, kind};
use crate::config::{Chunk, Event, ReceiveEnd, SocketId};
use crate::core::Core;
use crate::sockets::Sending;
use crate::sys;
use block::Segment;
use io_uring::{cqueue, opcode};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// State of receiving.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Receiving {
    /// Not receiving.
    Idle,
    /// The kernel has a multishot entry.
    Armed,
    /// The multishot entry ended without a buffer; it is submitted again when one is available.
    Starved,
    /// The entry is being cancelled.
    Stopping,
    /// The kernel fills a segment, of which so many bytes are done.
    Filling(Segment, u32),
}

pub(super) struct Socket {
    owner: u32,
    fd: OwnedFd,
    fixed: Option<u32>,
    receiving: Receiving,
    pub(super) sending: Sending,
    closing: bool,
}

impl Socket {
    fn target(&self) -> Target {
        Target::new(self.fd.as_raw_fd(), self.fixed)
    }

    pub(super) fn shut_down(&self) {
        sys::shutdown(self.fd.as_raw_fd());
    }
}

fn data(kind: u64, id: SocketId) -> u64 {
    kind | u64::from(id.0)
}

impl Uring {
    pub(crate) fn add_socket(&mut self, fd: OwnedFd, owner: u32) -> io::Result<SocketId> {
        // Operations must wait in the kernel; a non-blocking socket would make them fail with EAGAIN.
        sys::set_nonblocking(fd.as_raw_fd(), false)?;
        sys::widen_unix_socket(fd.as_raw_fd());
        let (fixed, ring) = (&mut self.fixed, &self.ring);
        self.sockets.add(|_| {
            let fixed = fixed.add(ring, fd.as_raw_fd());
            let (receiving, sending) = (Receiving::Idle, Sending::new());
            Ok(Socket { owner, fd, fixed, receiving, sending, closing: false })
        })
    }

    #[track_caller]
    pub(crate) fn receive(&mut self, id: SocketId) {
        let socket = self.sockets.of(id);
        assert!(socket.receiving == Receiving::Idle, "{id:?} receives already");
        socket.receiving = Receiving::Armed;
        self.arm(id);
    }

    fn arm(&mut self, id: SocketId) {
        let target = self.sockets.of(id).target();
        let entry = opcode::RecvMulti::new(target.fd(), GROUP).build();
        self.push(target.aim(entry).user_data(data(kind::RECEIVE, id)));
    }

    /// Arms the sockets that found no buffer, once buffers are available. Sockets that find none again are
    /// starved again.
    #[inline]
    pub(super) fn feed_starved(&mut self, core: &Core) {
        if self.starved.is_empty() || core.chunks.available == 0 || self.draining {
            return;
        }
        for _ in 0..self.starved.len() {
            let Some(id) = self.starved.pop_front() else { return };
            match self.sockets.find(id) {
                Some(socket) if socket.receiving == Receiving::Starved => {
                    socket.receiving = Receiving::Armed;
                    self.arm(id);
                }
                _ => {}
            }
        }
    }

    pub(crate) fn receive_stop(&mut self, core: &mut Core, id: SocketId) {
        let socket = self.sockets.of(id);
        match socket.receiving {
            Receiving::Armed => {
                socket.receiving = Receiving::Stopping;
                self.push_cancel(data(kind::RECEIVE, id));
            }
            Receiving::Starved => self.receive_ended(core, id, ReceiveEnd::Stopped),
            _ => {}
        }
    }

    fn receive_ended(&mut self, core: &mut Core, id: SocketId, end: ReceiveEnd) {
        let socket = self.sockets.of(id);
        socket.receiving = Receiving::Idle;
        core.events.push_back(Event::ReceiveEnded { socket: id, owner: socket.owner, end });
        self.close_if_quiet(core, id);
    }

    #[inline]
    pub(super) fn received(&mut self, core: &mut Core, id: SocketId, result: i32, flags: u32) {
        let socket = self.sockets.of(id);
        if let Some(number) = cqueue::buffer_select(flags) {
            let chunk = Chunk(number);
            core.chunks.hand_out(chunk);
            if result > 0 {
                let segment = core.chunks.segment(chunk, result as u32);
                core.events.push_back(Event::Received { socket: id, owner: socket.owner, segment, chunk });
            } else {
                core.chunks.take_back(chunk);
                self.buffers.give(chunk, &core.chunks, &core.memory);
            }
        }
        if !cqueue::more(flags) {
            self.multishot_ended(core, id, result);
        }
    }

    fn multishot_ended(&mut self, core: &mut Core, id: SocketId, result: i32) {
        let socket = self.sockets.of(id);
        let goes_on = socket.receiving == Receiving::Armed && !socket.closing && !self.draining;
        match -result {
            // The kernel may end a multishot entry at any time, with or without bytes: it has to be armed
            // again.
            libc::ENOBUFS if goes_on => {
                socket.receiving = Receiving::Starved;
                self.starved.push_back(id);
            }
            code if goes_on && (code < 0 || code == libc::EINTR) => self.arm(id),
            0 if goes_on => self.receive_ended(core, id, ReceiveEnd::Eof),
            code if goes_on => self.receive_ended(core, id, ReceiveEnd::Error(code)),
            _ => self.receive_ended(core, id, ReceiveEnd::Stopped),
        }
    }

    #[track_caller]
    pub(crate) fn receive_into(&mut self, core: &mut Core, id: SocketId, segment: Segment) {
        let base = core.memory.own_pointer(segment);
        let socket = self.sockets.of(id);
        assert!(socket.receiving == Receiving::Idle, "{id:?} receives already");
        socket.receiving = Receiving::Filling(segment, 0);
        if segment.len == 0 {
            return self.fill_ended(core, id, 0);
        }
        self.fill(id, base, segment.len);
    }

    fn fill(&mut self, id: SocketId, base: *mut u8, len: u32) {
        let target = self.sockets.of(id).target();
        let entry = opcode::Recv::new(target.fd(), base, len).flags(libc::MSG_WAITALL).build();
        self.push(target.aim(entry).user_data(data(kind::FILL, id)));
    }

    pub(super) fn filled(&mut self, core: &mut Core, id: SocketId, result: i32) {
        let socket = self.sockets.of(id);
        let Receiving::Filling(segment, before) = socket.receiving else { return };
        let again = result > 0 || result == -libc::EINTR;
        let done = before + result.max(0) as u32;
        if again && done < segment.len && !socket.closing && !self.draining {
            socket.receiving = Receiving::Filling(segment, done);
            let rest = segment.slice(done, segment.len - done);
            return self.fill(id, core.memory.own_pointer(rest), rest.len);
        }
        let result = if result < 0 { i64::from(result) } else { i64::from(done) };
        self.fill_ended(core, id, result);
    }

    fn fill_ended(&mut self, core: &mut Core, id: SocketId, result: i64) {
        let socket = self.sockets.of(id);
        socket.receiving = Receiving::Idle;
        core.events.push_back(Event::Filled { socket: id, owner: socket.owner, result });
        self.close_if_quiet(core, id);
    }

    #[track_caller]
    pub(crate) fn send(&mut self, core: &mut Core, id: SocketId, segments: &[Segment]) {
        core.started += 1;
        let socket = self.sockets.of(id);
        socket.sending.begin(&core.memory, segments, core.started);
        if socket.sending.advance(0) {
            return self.send_ended(core, id, None);
        }
        self.send_rest(id);
    }

    #[inline]
    fn send_rest(&mut self, id: SocketId) {
        let socket = self.sockets.of(id);
        let target = socket.target();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = match socket.sending.single() {
            Some(one) => {
                opcode::Send::new(target.fd(), one.iov_base.cast(), one.iov_len as u32).flags(flags).build()
            }
            None => opcode::SendMsg::new(target.fd(), socket.sending.header()).flags(flags as u32).build(),
        };
        self.push(target.aim(entry).user_data(data(kind::SEND, id)));
    }

    #[inline]
    pub(super) fn sent(&mut self, core: &mut Core, id: SocketId, result: i32) {
        let socket = self.sockets.of(id);
        let gone = result.max(0) as u64;
        if result < 0 && result != -libc::EINTR {
            self.send_ended(core, id, Some(result.into()));
        } else if socket.sending.advance(gone) {
            self.send_ended(core, id, None);
        } else if socket.closing || self.draining {
            self.send_ended(core, id, Some(-i64::from(libc::ECANCELED)));
        } else {
            self.send_rest(id);
        }
    }

    #[inline]
    fn send_ended(&mut self, core: &mut Core, id: SocketId, error: Option<i64>) {
        let socket = self.sockets.of(id);
        let result = socket.sending.end(error);
        core.events.push_back(Event::Sent { socket: id, owner: socket.owner, result });
        self.close_if_quiet(core, id);
    }

    pub(crate) fn close(&mut self, core: &mut Core, id: SocketId) {
        let Some(socket) = self.sockets.find(id).filter(|socket| !socket.closing) else { return };
        socket.closing = true;
        socket.shut_down();
        let (receiving, sends) = (socket.receiving, socket.sending.is_under_way());
        if sends {
            self.push_cancel(data(kind::SEND, id));
        }
        match receiving {
            Receiving::Idle => self.close_if_quiet(core, id),
            Receiving::Starved => self.receive_ended(core, id, ReceiveEnd::Stopped),
            Receiving::Filling(..) => self.push_cancel(data(kind::FILL, id)),
            Receiving::Armed | Receiving::Stopping => self.push_cancel(data(kind::RECEIVE, id)),
        }
    }

    /// Removes a closed socket once no operation of it is in flight.
    fn close_if_quiet(&mut self, core: &mut Core, id: SocketId) {
        let socket = self.sockets.of(id);
        if !socket.closing || socket.receiving != Receiving::Idle || socket.sending.is_under_way() {
            return;
        }
        let Some(socket) = self.sockets.remove(id) else { return };
        if let Some(number) = socket.fixed {
            self.fixed.remove(&self.ring, number);
        }
        core.events.push_back(Event::Closed { socket: id, owner: socket.owner });
    }
}
