//! Configuration of a ring, and the events that it returns.

use block::{Cookie, Segment};
use queue::QueueId;
pub use queue::{Chunk, ReceiveEnd, SocketId};

/// The engine that performs the I/O.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Choice {
    /// The engine in `BLOCKYARD_RING` (`io_uring` or `epoll`); otherwise io_uring, or epoll where that is not
    /// available.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// epoll and a few I/O threads.
    Epoll,
}

/// Configuration of a ring.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// The engine.
    pub engine: Choice,
    /// How long a ring polls for events before it sleeps, in microseconds; adapted downwards while polling
    /// finds none. `None`: it sleeps at once.
    pub poll_us: Option<u32>,
    /// Submission queue entries, gathered before a system call is forced.
    pub entries: u32,
    /// Number of receive chunks, shared by all sockets: as many may be held by the user before receiving
    /// pauses. 1 to 32768.
    pub receive_buffers: u16,
    /// Bytes of a receive chunk. At least 512; rounded up to a multiple of 64.
    pub receive_buffer_len: u32,
    /// Most memory that `allocate` hands out in total, in bytes, rounded up to 32 MiB. Address space is
    /// reserved 32 MiB at a time; pages are allocated when they are written to.
    pub memory_max: u64,
}

impl Default for RingConfig {
    fn default() -> Self {
        RingConfig {
            engine: Choice::Auto,
            poll_us: None,
            entries: 256,
            receive_buffers: 32,
            receive_buffer_len: 64 << 10,
            memory_max: 1 << 30,
        }
    }
}

/// The engine of a ring.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineInfo {
    /// `io_uring` or `epoll`.
    pub name: &'static str,
    /// Why io_uring is not used, or which kernel features are missing. `None`: nothing is missing.
    pub why: Option<String>,
}

/// Identifies a front-end's operation in its completion: 56 bits that the ring does not interpret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token {
    /// The front-end of the thread.
    pub front: u8,
    /// Device or connection of the operation.
    pub index: u16,
    /// Request of the operation.
    pub number: u32,
}

impl Token {
    #[inline]
    pub(crate) const fn bits(self) -> u64 {
        (self.front as u64) << 48 | (self.index as u64) << 32 | self.number as u64
    }

    #[inline]
    pub(crate) const fn from_bits(bits: u64) -> Token {
        Token { front: (bits >> 48) as u8, index: (bits >> 32) as u16, number: bits as u32 }
    }
}

/// An io_uring command with a 24-byte argument ([`command_wide`](crate::KernelRing::command_wide)).
#[derive(Clone, Copy, Debug)]
pub struct WideCommand {
    /// The driver's command number.
    pub op: u32,
    /// The argument.
    pub argument: [u8; 24],
    /// The `addr` field of the entry.
    pub address: u64,
    /// The `len` field of the entry.
    pub len: u32,
}

/// Whether [`turn`](crate::KernelRing::turn) waits when there is no event yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Return at once.
    No,
    /// Sleep until an event arrives or the next timer is due. May return early without an event.
    UntilEvent,
}

/// A completion or an arrival.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An operation of a node has completed.
    Io {
        /// The node's queue.
        queue: QueueId,
        /// The request, and the hand-over that this completes.
        cookie: Cookie,
        /// Bytes moved, 0 for a timer, or a negative errno.
        result: i64,
    },
    /// Bytes have arrived; at least one.
    Received {
        /// The socket.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// The bytes, valid until the chunk is given back.
        segment: Segment,
        /// The chunk to give back.
        chunk: Chunk,
    },
    /// Receiving has ended; no more chunks arrive until `receive` is called again.
    ReceiveEnded {
        /// The socket.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// Reason.
        end: ReceiveEnd,
    },
    /// A [`receive_into`](crate::KernelRing::receive_into) has completed.
    Filled {
        /// The socket.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// Bytes received, fewer than requested at the end of the stream, or a negative errno.
        result: i64,
    },
    /// A [`send`](crate::KernelRing::send) has completed.
    Sent {
        /// The socket.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// Bytes sent, which is all of them, or a negative errno.
        result: i64,
    },
    /// The socket is closed; no further event of it follows.
    Closed {
        /// The socket.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
    },
    /// An operation of a front-end has completed.
    Ended {
        /// The token of the operation.
        token: Token,
        /// The driver's result, bytes moved, or a negative errno.
        result: i64,
    },
    /// A [`Waker`](crate::Waker) was used since the last such event.
    Woken,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_the_kernel() {
        let token = Token { front: 255, index: 65_535, number: u32::MAX };
        assert_eq!(Token::from_bits(token.bits()), token);
        assert_eq!(token.bits() >> 56, 0);
    }
}
