//! Table of a ring's sockets with per-engine state, and the state of a send.
//!
//! The table is not a [`slab::Slab`]: a slot has a generation, so that late completions of a removed socket
//! do not reach the next one.

use crate::config::SocketId;
use crate::memory::Memory;
use block::Segment;
use std::io;

/// Most segments of one send: the kernel's `UIO_MAXIOV`.
pub(crate) const SEGMENTS_MAX: usize = 1024;

/// `log2` of the most sockets of a ring; the remaining bits of an id are the generation of its slot.
const SOCKET_BITS: u32 = 20;
const COUNT_MAX: usize = 1 << SOCKET_BITS;

fn name(index: usize, generation: u32) -> SocketId {
    SocketId(index as u32 | generation << SOCKET_BITS)
}

fn index_of(id: SocketId) -> usize {
    id.0 as usize & (COUNT_MAX - 1)
}

/// Sockets by slot. Each is boxed: the kernel may hold pointers into it.
pub(crate) struct Sockets<S> {
    slots: Vec<(u32, Option<Box<S>>)>,
    free: Vec<u32>,
    live: usize,
}

impl<S> Default for Sockets<S> {
    fn default() -> Self {
        Sockets { slots: Vec::new(), free: Vec::new(), live: 0 }
    }
}

impl<S> Sockets<S> {
    pub(crate) fn add(&mut self, make: impl FnOnce(SocketId) -> io::Result<S>) -> io::Result<SocketId> {
        let number = match self.free.last() {
            Some(number) => *number as usize,
            None if self.slots.len() < COUNT_MAX => {
                self.slots.push((0, None));
                self.free.push(self.slots.len() as u32 - 1);
                self.slots.len() - 1
            }
            None => return Err(io::Error::other("a ring holds at most 2^20 sockets")),
        };
        let id = name(number, self.slots[number].0);
        self.slots[number].1 = Some(Box::new(make(id)?));
        self.free.pop();
        self.live += 1;
        Ok(id)
    }

    pub(crate) fn remove(&mut self, id: SocketId) -> Option<Box<S>> {
        let socket = self.slots[index_of(id)].1.take();
        if socket.is_some() {
            self.slots[index_of(id)].0 = self.slots[index_of(id)].0.wrapping_add(1);
            self.free.push(index_of(id) as u32);
            self.live -= 1;
        }
        socket
    }

    /// The socket with this id, if it still exists.
    #[inline]
    pub(crate) fn find(&mut self, id: SocketId) -> Option<&mut S> {
        let (generation, socket) = self.slots.get_mut(index_of(id))?;
        if name(index_of(id), *generation) != id {
            return None;
        }
        socket.as_deref_mut()
    }

    /// The socket with this id.
    ///
    /// # Panics
    /// If the socket does not exist: it was used after its `Closed` event.
    #[inline]
    #[track_caller]
    pub(crate) fn of(&mut self, id: SocketId) -> &mut S {
        self.find(id).unwrap_or_else(|| panic!("{id:?} is not a socket of this ring"))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (SocketId, &mut S)> {
        let slots = self.slots.iter_mut().enumerate();
        slots.filter_map(|(n, (generation, s))| Some((name(n, *generation), s.as_deref_mut()?)))
    }

    pub(crate) fn live(&self) -> usize {
        self.live
    }
}

/// State of a send.
pub(crate) struct Sending {
    iovecs: Vec<libc::iovec>,
    header: libc::msghdr,
    /// Entries that were sent completely.
    first: usize,
    total: u64,
    sent: u64,
    /// Number of the operation; empty while no send is in flight.
    pub(crate) started: Option<u64>,
}

impl Sending {
    pub(crate) fn new() -> Sending {
        // SAFETY: a zeroed header with null pointers is valid.
        let header = unsafe { std::mem::zeroed() };
        Sending { iovecs: Vec::new(), header, first: 0, total: 0, sent: 0, started: None }
    }

    /// Starts a send.
    ///
    /// # Panics
    /// If a send is in flight, or there are too many segments.
    #[track_caller]
    pub(crate) fn begin(&mut self, memory: &Memory, segments: &[Segment], started: u64) {
        assert!(self.started.is_none(), "one send at a time");
        assert!(segments.len() <= SEGMENTS_MAX, "a send has at most {SEGMENTS_MAX} segments");
        self.total = memory.gather(segments, &mut self.iovecs);
        (self.sent, self.first, self.started) = (0, 0, Some(started));
    }

    /// The rest to send, as `sendmsg` takes it. Valid until the next call.
    pub(crate) fn header(&mut self) -> *const libc::msghdr {
        let rest = &mut self.iovecs[self.first..];
        self.header.msg_iov = rest.as_mut_ptr();
        self.header.msg_iovlen = rest.len() as _;
        &raw const self.header
    }

    /// The rest to send, if it is a single segment.
    pub(crate) fn single(&self) -> Option<libc::iovec> {
        match self.iovecs[self.first..] {
            [one] => Some(one),
            _ => None,
        }
    }

    /// Records that `bytes` were sent. Returns whether the send is complete.
    pub(crate) fn advance(&mut self, bytes: u64) -> bool {
        self.sent += bytes;
        if self.sent == self.total {
            return true;
        }
        let mut left = bytes as usize;
        while let Some(entry) = self.iovecs.get_mut(self.first) {
            if left < entry.iov_len {
                entry.iov_base = entry.iov_base.wrapping_byte_add(left);
                entry.iov_len -= left;
                break;
            }
            left -= entry.iov_len;
            self.first += 1;
        }
        false
    }

    /// Ends the send: returns all bytes sent, or a negative errno.
    pub(crate) fn end(&mut self, error: Option<i64>) -> i64 {
        self.started = None;
        error.unwrap_or(self.total as i64)
    }

    pub(crate) fn is_under_way(&self) -> bool {
        self.started.is_some()
    }
}
