//! The ring as nodes with sockets see it, and how what comes of their sockets is told from what is a front-end's.

use crate::config::{Chunk, Event, SocketId};
use crate::ring::KernelRing;
use block::Segment;
use queue::{NodeEvent, SocketEvent, SocketOwner, Sockets};
use std::io;
use std::os::fd::OwnedFd;

impl Event {
    /// What this is to a node, if it is a node's.
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
            Event::Io { .. } | Event::Ended { .. } | Event::Woken => return None,
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
        KernelRing::copy(self, from, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use queue::{NodeId, QueueId};

    #[test]
    fn an_event_on_a_nodes_socket_finds_its_node() {
        let owner = SocketOwner { queue: QueueId(3), node: NodeId(2) };
        let socket = SocketId(9);
        let event = Event::Sent { socket, owner: owner.number(), result: 5 };
        let told = NodeEvent::Socket(socket, SocketEvent::Sent(5));
        assert_eq!(event.to_node(), Some((owner, told)));
        assert_eq!(Event::Sent { socket, owner: 7, result: 5 }.to_node(), None);
        assert_eq!(Event::Woken.to_node(), None);
    }
}
