//! The interface of the ring for nodes with sockets or eventfds, and the dispatch of their events to nodes or
//! front-ends.

use crate::config::{Chunk, Event, SocketId, Token};
use crate::ring::KernelRing;
use block::Segment;
use queue::{FileId, NodeEvent, NodeId, QueueId, SocketEvent, SocketOwner, Sockets};
use std::io;
use std::os::fd::OwnedFd;

/// The front-end number of tokens that belong to nodes.
const NODES: u8 = u8::MAX;

impl Token {
    /// Returns the token of a node's watch.
    pub(crate) const fn of_node(owner: SocketOwner) -> Token {
        Token { front: NODES, index: owner.queue.0, number: owner.node.0 as u32 }
    }

    #[inline]
    fn to_node(self) -> Option<SocketOwner> {
        if self.front != NODES {
            return None;
        }
        Some(SocketOwner { queue: QueueId(self.index), node: NodeId(self.number as u8) })
    }
}

impl KernelRing {
    /// Reports each time that an eventfd is signalled to a node as [`NodeEvent::Signalled`]; nobody has to
    /// read it. A node has one watch.
    pub fn watch_for_node(&mut self, owner: SocketOwner, file: FileId) {
        self.watch_edges(Token::of_node(owner), file);
    }

    /// Requests the end of a node's watch, whose last event is [`NodeEvent::WatchEnded`].
    pub fn watch_for_node_end(&mut self, owner: SocketOwner) {
        self.watch_edges_end(Token::of_node(owner));
    }
}

impl Event {
    /// Returns the node that owns the socket or the watch of this event, and the event for the node; `None`
    /// if it belongs to a front-end.
    #[inline]
    pub fn to_node(self) -> Option<(SocketOwner, NodeEvent)> {
        let (socket, owner, event) = match self {
            Event::Received { socket, owner, segment, chunk } => {
                (socket, owner, SocketEvent::Received { segment, chunk })
            }
            Event::ReceiveEnded { socket, owner, end } => (socket, owner, SocketEvent::ReceiveEnded(end)),
            Event::Filled { socket, owner, result } => (socket, owner, SocketEvent::Filled(result)),
            Event::Sent { socket, owner, result } => (socket, owner, SocketEvent::Sent(result)),
            Event::Closed { socket, owner } => (socket, owner, SocketEvent::Closed),
            Event::Ended { token, result } => {
                let owner = token.to_node()?;
                let has_ended = result == -i64::from(libc::ECANCELED);
                let event = if has_ended { NodeEvent::WatchEnded } else { NodeEvent::Signalled };
                return Some((owner, event));
            }
            Event::Io { .. } | Event::Woken => return None,
        };
        Some((SocketOwner::from_number(owner)?, NodeEvent::Socket(socket, event)))
    }
}

impl Sockets for KernelRing {
    type Stream = OwnedFd;

    fn add_socket(&mut self, stream: OwnedFd, owner: SocketOwner) -> io::Result<SocketId> {
        KernelRing::add_socket(self, stream, owner.number())
    }

    fn receive(&mut self, socket: SocketId) {
        KernelRing::receive(self, socket);
    }

    fn receive_stop(&mut self, socket: SocketId) {
        KernelRing::receive_stop(self, socket);
    }

    fn receive_into(&mut self, socket: SocketId, segment: Segment) {
        KernelRing::receive_into(self, socket, segment);
    }

    fn give_back(&mut self, chunk: Chunk) {
        KernelRing::give_back(self, chunk);
    }

    fn send(&mut self, socket: SocketId, segments: &[Segment]) {
        KernelRing::send(self, socket, segments);
    }

    fn close(&mut self, socket: SocketId) {
        KernelRing::close(self, socket);
    }

    fn copy(&mut self, from: Segment, to: Segment) {
        KernelRing::copy_any(self, from, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_event_is_dispatched_to_its_node() {
        let owner = SocketOwner { queue: QueueId(3), node: NodeId(2) };
        let socket = SocketId(9);
        let event = Event::Sent { socket, owner: owner.number(), result: 5 };
        let sent = NodeEvent::Socket(socket, SocketEvent::Sent(5));
        assert_eq!(event.to_node(), Some((owner, sent)));
        assert_eq!(Event::Sent { socket, owner: 7, result: 5 }.to_node(), None);
        assert_eq!(Event::Woken.to_node(), None);
    }

    #[test]
    fn a_signal_is_dispatched_to_the_node_that_watches() {
        let owner = SocketOwner { queue: QueueId(7), node: NodeId(255) };
        let token = Token::of_node(owner);
        assert_eq!(Event::Ended { token, result: 1 }.to_node(), Some((owner, NodeEvent::Signalled)));
        let result = -i64::from(libc::ECANCELED);
        assert_eq!(Event::Ended { token, result }.to_node(), Some((owner, NodeEvent::WatchEnded)));
        let token = Token { front: 3, index: 7, number: 255 };
        assert_eq!(Event::Ended { token, result: 1 }.to_node(), None, "it is a front-end's");
    }
}
