//! Sockets as nodes see them: the part of the seam for backends that are on the far side of a network.
//!
//! A node that has connections belongs to one queue, so to one thread: its sockets are that thread's ring's, and what
//! comes of them is handed to [`Queue::node_event`](crate::Queue::node_event) by the loop that owns both. A ring says whose a
//! socket is by the number that it was added with: [`SocketOwner`]. Connecting and shaking hands is not done here; a
//! node is brought streams that are ready, in whatever form its ring takes them.

use crate::{NodeId, QueueId, Ring};
use block::{Cookie, Segment, Tag};
use std::io;

/// A socket of a ring. Not reused before its [`SocketEvent::Closed`] was handed out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SocketId(pub u32);

/// A received stretch of memory, to be given back once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Chunk(pub u16);

impl Chunk {
    /// As an array index: below the number of a ring's receive buffers.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why chunks stopped coming.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReceiveEnd {
    /// The peer sends no more.
    Eof,
    /// [`receive_stop`](Sockets::receive_stop) or [`close`](Sockets::close) was asked for.
    Stopped,
    /// A positive errno.
    Error(i32),
}

/// What has come, or is over, on a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketEvent {
    /// Bytes came. Never none.
    Received {
        /// The bytes. They stay until the chunk is given back.
        segment: Segment,
        /// What to give back.
        chunk: Chunk,
    },
    /// No more chunks until `receive` is asked for again.
    ReceiveEnded(ReceiveEnd),
    /// What was asked for with `receive_into` is over: bytes, fewer than asked for at the end of the stream, or a
    /// negative errno.
    Filled(i64),
    /// What was asked for with `send` is over: all the bytes, or a negative errno.
    Sent(i64),
    /// The socket is gone. Nothing more comes of it.
    Closed,
}

/// Whose a socket is: a node of a queue. Front-ends have numbers of their own, below 2^31.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SocketOwner {
    /// The queue, of those of its thread.
    pub queue: QueueId,
    /// The node, of those of its queue.
    pub node: NodeId,
}

impl SocketOwner {
    /// Marks the numbers of nodes.
    const IS_NODE: u32 = 1 << 31;

    /// As the number that a ring keeps with a socket.
    pub const fn number(self) -> u32 {
        SocketOwner::IS_NODE | (self.node.0 as u32) << 16 | self.queue.0 as u32
    }

    /// From such a number; `None` when it is a front-end's.
    #[inline]
    pub const fn from_number(number: u32) -> Option<SocketOwner> {
        if number & SocketOwner::IS_NODE == 0 {
            return None;
        }
        Some(SocketOwner { queue: QueueId(number as u16), node: NodeId((number >> 16) as u8) })
    }
}

/// What comes to a node that is not about a request which it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeEvent {
    /// Something on one of its sockets.
    Socket(SocketId, SocketEvent),
    /// The time that it set with [`Cx::alarm`](crate::Cx::alarm) has come.
    Alarm,
}

/// The queue's own alarm, for timeouts of requests: no node has this number, as a stack has at most 255.
pub(crate) const QUEUE_ALARM: NodeId = NodeId(u8::MAX);

/// A node's alarm travels through the ring as a cookie that no request ever has: those of requests are even.
pub(crate) const fn alarm_cookie(node: NodeId) -> Cookie {
    Cookie { tag: Tag(0), generation: (node.0 as u32) << 1 | 1 }
}

/// The node whose alarm a cookie is; `None` when it is a request's.
pub(crate) const fn alarm_node(cookie: Cookie) -> Option<NodeId> {
    if cookie.generation & 1 == 0 { None } else { Some(NodeId((cookie.generation >> 1) as u8)) }
}

/// A ring with sockets.
pub trait Sockets: Ring {
    /// A connected stream, as whoever connects brings it.
    type Stream: Send + 'static;

    /// Take in a stream.
    ///
    /// # Errors
    /// It is not one that the ring can wait for, or there are too many.
    fn add_socket(&mut self, stream: Self::Stream, owner: SocketOwner) -> io::Result<SocketId>;

    /// Hand out what comes, in chunks, until [`SocketEvent::ReceiveEnded`].
    fn receive(&mut self, socket: SocketId);

    /// End that. What was received already is still handed out first. Nothing happens when it does not receive.
    fn receive_stop(&mut self, socket: SocketId);

    /// Receive until the segment is full, then [`SocketEvent::Filled`]. It may not receive chunks at that time.
    fn receive_into(&mut self, socket: SocketId, segment: Segment);

    /// Give back a chunk: every one, once, also those of sockets that are gone.
    fn give_back(&mut self, chunk: Chunk);

    /// Send all of these, at most 1024, in order, then [`SocketEvent::Sent`]. The memory stays as it is until then. One
    /// send at a time.
    fn send(&mut self, socket: SocketId, segments: &[Segment]);

    /// Shut the socket down and end what is under way on it; [`SocketEvent::Closed`] comes last. Nothing may be asked
    /// of it from here on.
    fn close(&mut self, socket: SocketId);

    /// Copy bytes between two segments of one length.
    fn copy(&mut self, from: Segment, to: Segment);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_survives_as_a_number_and_is_no_front_ends() {
        let owner = SocketOwner { queue: QueueId(65_535), node: NodeId(255) };
        assert_eq!(SocketOwner::from_number(owner.number()), Some(owner));
        assert_eq!(SocketOwner::from_number((1 << 31) - 1), None);
    }

    #[test]
    fn an_alarm_is_told_from_a_request() {
        for node in [NodeId(0), NodeId(7), NodeId(255)] {
            assert_eq!(alarm_node(alarm_cookie(node)), Some(node));
        }
        assert_eq!(alarm_node(Cookie { tag: Tag(0), generation: 4 }), None);
    }
}
