//! Sockets as nodes see them: the part of the seam for backends on the far side of a network.
//!
//! A node with connections belongs to one queue, so to one thread, and its sockets belong to that thread's
//! ring. The loop that owns ring and queues passes their events to
//! [`Queue::node_event`](crate::Queue::node_event). A ring names the owner of a socket by the number with
//! which it was added: [`SocketOwner`]. Connecting and the handshake are not done here; a node receives
//! streams that are ready, in the form in which its ring accepts them.

use crate::{NodeId, QueueId, Ring};
use block::{Cookie, Segment, Tag};
use std::io;

/// A socket of a ring. The number is not reused before its [`SocketEvent::Closed`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SocketId(pub u32);

/// A received chunk of memory, which has to be returned once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Chunk(pub u16);

impl Chunk {
    /// Returns the chunk as an array index, below the number of a ring's receive buffers.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why receiving ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReceiveEnd {
    /// The peer closed its side.
    Eof,
    /// [`receive_stop`](Sockets::receive_stop) or [`close`](Sockets::close) was called.
    Stopped,
    /// A positive errno.
    Error(i32),
}

/// An event of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketEvent {
    /// Bytes were received, at least one.
    Received {
        /// The bytes. They stay until the chunk is returned.
        segment: Segment,
        /// The chunk to return.
        chunk: Chunk,
    },
    /// No more chunks follow until `receive` is called again.
    ReceiveEnded(ReceiveEnd),
    /// `receive_into` completed: bytes received, fewer than requested at the end of the stream, or a negative
    /// errno.
    Filled(i64),
    /// `send` completed: all bytes, or a negative errno.
    Sent(i64),
    /// The socket is closed. It has no further events.
    Closed,
}

/// Owner of a socket: a node of a queue. Front-ends have numbers of their own, below 2^31.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SocketOwner {
    /// The queue on its thread.
    pub queue: QueueId,
    /// The node of the queue.
    pub node: NodeId,
}

impl SocketOwner {
    /// Marks the numbers of nodes.
    const IS_NODE: u32 = 1 << 31;

    /// Returns the number that a ring keeps with a socket.
    pub const fn number(self) -> u32 {
        SocketOwner::IS_NODE | (self.node.0 as u32) << 16 | self.queue.0 as u32
    }

    /// Returns the owner of such a number; `None` if it belongs to a front-end.
    #[inline]
    pub const fn from_number(number: u32) -> Option<SocketOwner> {
        if number & SocketOwner::IS_NODE == 0 {
            return None;
        }
        Some(SocketOwner { queue: QueueId(number as u16), node: NodeId((number >> 16) as u8) })
    }
}

/// An event of a node that does not belong to one of its requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeEvent {
    /// An event of one of its sockets.
    Socket(SocketId, SocketEvent),
    /// The alarm that it set with [`Cx::alarm`](crate::Cx::alarm) expired.
    Alarm,
    /// The eventfd that it watches was signalled, perhaps several times.
    Signalled,
    /// Its watch of an eventfd has ended.
    WatchEnded,
}

/// The queue's own alarm, for timeouts of requests: no node has this number, as a stack has at most 255.
pub(crate) const QUEUE_ALARM: NodeId = NodeId(u8::MAX);

/// Returns the cookie of a node's alarm. No request has it: the generations of requests are even.
pub(crate) const fn alarm_cookie(node: NodeId) -> Cookie {
    Cookie { tag: Tag(0), generation: (node.0 as u32) << 1 | 1 }
}

/// Returns the node whose alarm a cookie is; `None` if it belongs to a request.
pub(crate) const fn alarm_node(cookie: Cookie) -> Option<NodeId> {
    if cookie.generation & 1 == 0 { None } else { Some(NodeId((cookie.generation >> 1) as u8)) }
}

/// A ring with sockets.
pub trait Sockets: Ring {
    /// A connected stream in the form in which the ring accepts it.
    type Stream: Send + 'static;

    /// Adds a stream.
    ///
    /// # Errors
    /// The ring cannot wait for this kind of stream, or has too many.
    fn add_socket(&mut self, stream: Self::Stream, owner: SocketOwner) -> io::Result<SocketId>;

    /// Receives in chunks until [`SocketEvent::ReceiveEnded`].
    fn receive(&mut self, socket: SocketId);

    /// Stops receiving. Chunks that were received already are reported first. No effect if the socket does
    /// not receive.
    fn receive_stop(&mut self, socket: SocketId);

    /// Receives until the segment is full, then reports [`SocketEvent::Filled`]. Not while the socket
    /// receives chunks.
    fn receive_into(&mut self, socket: SocketId, segment: Segment);

    /// Returns a chunk. Each has to be returned once, also after its socket is closed.
    fn give_back(&mut self, chunk: Chunk);

    /// Sends these segments, at most 1024, in order, then reports [`SocketEvent::Sent`]. Their memory must
    /// not change until then. One send at a time.
    fn send(&mut self, socket: SocketId, segments: &[Segment]);

    /// Shuts the socket down and ends its operations. [`SocketEvent::Closed`] is its last event. The socket
    /// must not be used any more.
    fn close(&mut self, socket: SocketId);

    /// Copies bytes between two segments of equal length, of memory of any kind that has an address.
    fn copy(&mut self, from: Segment, to: Segment);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_round_trips_as_a_number_and_is_no_front_end() {
        let owner = SocketOwner { queue: QueueId(65_535), node: NodeId(255) };
        assert_eq!(SocketOwner::from_number(owner.number()), Some(owner));
        assert_eq!(SocketOwner::from_number((1 << 31) - 1), None);
    }

    #[test]
    fn an_alarm_is_distinguished_from_a_request() {
        for node in [NodeId(0), NodeId(7), NodeId(255)] {
            assert_eq!(alarm_node(alarm_cookie(node)), Some(node));
        }
        assert_eq!(alarm_node(Cookie { tag: Tag(0), generation: 4 }), None);
    }
}
