//! What a ring is made with, and what it hands back.

use block::{Cookie, Segment};
use queue::QueueId;
pub use queue::{Chunk, ReceiveEnd, SocketId};

/// Which engine carries the I/O.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Choice {
    /// What `BLOCKYARD_RING` says (`io_uring` or `epoll`); else io_uring, or epoll where that is not to be had.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// epoll and a few I/O threads.
    Epoll,
}

/// How a ring is to be made.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// Which engine.
    pub engine: Choice,
    /// Before it sleeps, a ring looks for events for up to this many microseconds; less while that does
    /// not pay. `None`: it sleeps at once.
    pub poll_us: Option<u32>,
    /// Submissions gathered before a system call is due anyway.
    pub entries: u32,
    /// How many chunks [`receive`](crate::KernelRing::receive) of all sockets together may fill before some
    /// must be given back. 1 to 32768.
    pub receive_buffers: u16,
    /// How long each is, in bytes. At least 512; rounded up to a multiple of 64.
    pub receive_buffer_len: u32,
    /// The most memory that `allocate` hands out in all, in bytes, rounded up to 32 MiB. Address space is
    /// taken 32 MiB at a time, and memory only when it is written to.
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

/// Which engine a ring runs on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineInfo {
    /// `io_uring` or `epoll`.
    pub name: &'static str,
    /// Why not the better one, or what the kernel lacks of it. `None`: nothing to say.
    pub why: Option<String>,
}

/// What a front-end asks a ring for, as it is told of the end: 56 bits that mean nothing to the ring.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token {
    /// Which front-end of the thread.
    pub front: u8,
    /// Which of its devices or connections.
    pub index: u16,
    /// Which of its requests.
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

/// A command for the driver behind a file that says more than others ([`command_wide`](crate::KernelRing::command_wide)).
#[derive(Clone, Copy, Debug)]
pub struct WideCommand {
    /// The driver's number for it.
    pub op: u32,
    /// What it says.
    pub argument: [u8; 24],
    /// The entry's own address.
    pub address: u64,
    /// The entry's own length.
    pub len: u32,
}

/// What [`turn`](crate::KernelRing::turn) does when there is nothing to hand out yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Return at once.
    No,
    /// Sleep until something happens or the next timer is due. It may return early with nothing.
    UntilEvent,
}

/// Something that is over, or has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// What was started under `cookie` for that queue has ended: bytes moved or a negative errno.
    Io {
        /// Whose.
        queue: QueueId,
        /// Which request, and which hand-over of it.
        cookie: Cookie,
        /// Bytes moved, 0 for a timer, or a negative errno.
        result: i64,
    },
    /// Bytes came. Never none.
    Received {
        /// Where.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// The bytes. They stay until the chunk is given back.
        segment: Segment,
        /// What to give back.
        chunk: Chunk,
    },
    /// No more chunks until `receive` is asked for again.
    ReceiveEnded {
        /// Where.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// Why.
        end: ReceiveEnd,
    },
    /// What was asked for with [`receive_into`](crate::KernelRing::receive_into) is over.
    Filled {
        /// Where.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// Bytes, fewer than asked for at the end of the stream, or a negative errno.
        result: i64,
    },
    /// What was asked for with [`send`](crate::KernelRing::send) is over.
    Sent {
        /// Where.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
        /// All the bytes, or a negative errno.
        result: i64,
    },
    /// The socket is gone. Nothing more comes of it.
    Closed {
        /// Which.
        socket: SocketId,
        /// As given to [`add_socket`](crate::KernelRing::add_socket).
        owner: u32,
    },
    /// What a front-end asked for is over.
    Ended {
        /// As it was given.
        token: Token,
        /// What the driver answered, bytes moved, or a negative errno.
        result: i64,
    },
    /// A [`Waker`](crate::Waker) was used since the last one of these.
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
