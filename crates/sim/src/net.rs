//! Simulated sockets: byte streams to peers implemented by the test, split and delayed at random.
//!
//! Nothing happens by itself: [`SimRing::net_event`] performs one step of one random socket, and returns the
//! resulting event. Bytes are read from the memory of a send late, and its completion is reported later
//! still, so freeing memory too early, or taking a reply for the completion of a send, is detected.

use crate::SimRing;
use block::Segment;
use queue::{Chunk, NodeEvent, ReceiveEnd, SocketEvent, SocketId, SocketOwner, Sockets};
use std::collections::VecDeque;
use std::io;

/// Length of the longest chunk that is received, in bytes.
const CHUNK_MAX: u64 = 70_000;

/// The remote end of a connection.
pub trait Peer: std::fmt::Debug {
    /// Handles bytes sent by the client.
    fn receive(&mut self, bytes: &[u8]);

    /// Returns the memory that the peer shares with the client, if any.
    fn shared_memory(&self) -> Option<Segment> {
        None
    }

    /// Performs one step of the peer, which may access the shared memory. Returns the bytes to send to the
    /// client now, which may be none.
    fn step(&mut self, shared: &mut [u8]) -> Vec<u8>;

    /// Returns whether the peer may send more. Bytes sent before may still arrive.
    fn is_open(&self) -> bool;

    /// Handles the client's closing of the connection: the last access to the shared memory.
    fn hang_up(&mut self, shared: &mut [u8]);
}

/// A connected stream that no node has taken yet.
#[derive(Debug)]
pub struct SimStream(usize);

#[derive(Debug)]
enum Receiving {
    Idle,
    Armed,
    Stopping,
    Filling(Segment, u32),
}

#[derive(Debug)]
struct Sending {
    segments: Vec<Segment>,
    sent: u64,
}

#[derive(Debug)]
struct SimSocket {
    owner: SocketOwner,
    peer: Box<dyn Peer>,
    inbound: VecDeque<u8>,
    receiving: Receiving,
    sending: Option<Sending>,
    closing: bool,
}

/// All sockets of a ring.
#[derive(Default, Debug)]
pub(crate) struct Net {
    streams: Vec<Option<Box<dyn Peer>>>,
    sockets: Vec<Option<SimSocket>>,
    /// Chunks held by nodes.
    chunks: Vec<Option<Segment>>,
}

impl SimRing {
    /// Connects to a peer.
    pub fn connect(&mut self, peer: Box<dyn Peer>) -> SimStream {
        self.net.streams.push(Some(peer));
        SimStream(self.net.streams.len() - 1)
    }

    /// Returns the number of sockets.
    pub fn sockets(&self) -> usize {
        self.net.sockets.iter().flatten().count()
    }

    /// Performs a step of one random socket. Returns `None` if no socket has work, or the step produced no
    /// event.
    pub fn net_event(&mut self) -> Option<(SocketOwner, NodeEvent)> {
        let live: Vec<usize> =
            (0..self.net.sockets.len()).filter(|&index| self.net.sockets[index].is_some()).collect();
        if live.is_empty() {
            return None;
        }
        let index = *self.rng.pick(&live);
        let mut socket = self.net.sockets[index].take()?;
        let owner = socket.owner;
        let event = self.step(&mut socket);
        if event != Some(SocketEvent::Closed) {
            self.net.sockets[index] = Some(socket);
        }
        let event = event?;
        let args = [("socket", index as u64), ("queue", owner.queue.0.into())];
        self.tracer.note(self.now, name_of(event), &args);
        Some((owner, NodeEvent::Socket(SocketId(index as u32), event)))
    }

    fn step(&mut self, socket: &mut SimSocket) -> Option<SocketEvent> {
        if socket.closing {
            return Some(self.step_closing(socket));
        }
        let shared = socket.peer.shared_memory();
        let sent = socket.peer.step(self.shared(shared));
        socket.inbound.extend(sent);
        match self.rng.below(2) {
            0 => self.step_sending(socket).or_else(|| self.step_receiving(socket)),
            _ => self.step_receiving(socket).or_else(|| self.step_sending(socket)),
        }
    }

    /// Ends the operations in flight, then the socket.
    fn step_closing(&mut self, socket: &mut SimSocket) -> SocketEvent {
        let cancelled = -i64::from(libc::ECANCELED);
        if let Some(sending) = socket.sending.take() {
            sending.segments.iter().for_each(|&segment| self.arena.pin(segment, false));
            return SocketEvent::Sent(cancelled);
        }
        match std::mem::replace(&mut socket.receiving, Receiving::Idle) {
            Receiving::Filling(segment, _) => {
                self.arena.pin(segment, false);
                SocketEvent::Filled(cancelled)
            }
            // The kernel delivers bytes that it had received before the cancellation.
            Receiving::Armed if !socket.inbound.is_empty() && self.rng.chance(300) => {
                socket.receiving = Receiving::Armed;
                self.hand_out(socket)
            }
            Receiving::Armed | Receiving::Stopping => SocketEvent::ReceiveEnded(ReceiveEnd::Stopped),
            Receiving::Idle => {
                let shared = socket.peer.shared_memory();
                socket.peer.hang_up(self.shared(shared));
                SocketEvent::Closed
            }
        }
    }

    fn step_sending(&mut self, socket: &mut SimSocket) -> Option<SocketEvent> {
        let sending = socket.sending.as_mut()?;
        let total: u64 = sending.segments.iter().map(|segment| u64::from(segment.len)).sum();
        if sending.sent < total && socket.peer.is_open() {
            let part = self.rng.between(1, total - sending.sent);
            let (mut skip, mut left, mut bytes) = (sending.sent, part, Vec::new());
            for &segment in &sending.segments {
                let from = skip.min(segment.len.into());
                let len = left.min(u64::from(segment.len) - from);
                (skip, left) = (skip - from, left - len);
                bytes.extend_from_slice(self.arena.bytes(segment.slice(from as u32, len as u32)));
            }
            sending.sent += part;
            socket.peer.receive(&bytes);
            return None;
        }
        let whole = sending.sent == total;
        let sending = socket.sending.take()?;
        sending.segments.iter().for_each(|&segment| self.arena.pin(segment, false));
        Some(SocketEvent::Sent(if whole { total as i64 } else { -i64::from(libc::EPIPE) }))
    }

    fn hand_out(&mut self, socket: &mut SimSocket) -> SocketEvent {
        let len = self.rng.between(1, (socket.inbound.len() as u64).min(CHUNK_MAX)) as u32;
        let segment = self.arena.allocate(len, &mut self.rng);
        let bytes: Vec<u8> = socket.inbound.drain(..len as usize).collect();
        self.arena.bytes_mut(segment).copy_from_slice(&bytes);
        self.net.chunks.push(Some(segment));
        SocketEvent::Received { segment, chunk: Chunk((self.net.chunks.len() - 1) as u16) }
    }

    fn step_receiving(&mut self, socket: &mut SimSocket) -> Option<SocketEvent> {
        let over = !socket.peer.is_open() && socket.inbound.is_empty();
        match socket.receiving {
            Receiving::Idle => None,
            Receiving::Armed | Receiving::Stopping if !socket.inbound.is_empty() && self.rng.chance(700) => {
                Some(self.hand_out(socket))
            }
            Receiving::Stopping => {
                socket.receiving = Receiving::Idle;
                Some(SocketEvent::ReceiveEnded(ReceiveEnd::Stopped))
            }
            Receiving::Armed if over => {
                socket.receiving = Receiving::Idle;
                let reset = self.rng.chance(300);
                let end = if reset { ReceiveEnd::Error(libc::ECONNRESET) } else { ReceiveEnd::Eof };
                Some(SocketEvent::ReceiveEnded(end))
            }
            Receiving::Armed => None,
            Receiving::Filling(segment, before) => {
                let len = u64::from(segment.len - before).min(socket.inbound.len() as u64);
                let len = if len > 0 { self.rng.between(1, len) as u32 } else { 0 };
                let bytes: Vec<u8> = socket.inbound.drain(..len as usize).collect();
                self.arena.bytes_mut(segment.slice(before, len)).copy_from_slice(&bytes);
                let filled = before + len;
                socket.receiving = Receiving::Filling(segment, filled);
                if filled < segment.len && !over {
                    return None;
                }
                self.arena.pin(segment, false);
                socket.receiving = Receiving::Idle;
                Some(SocketEvent::Filled(filled.into()))
            }
        }
    }

    /// Returns the memory that a peer shares with its client.
    fn shared(&mut self, segment: Option<Segment>) -> &mut [u8] {
        segment.map_or(&mut [], |segment| self.arena.bytes_mut(segment))
    }

    fn socket(&mut self, id: SocketId) -> &mut SimSocket {
        self.net.sockets[id.0 as usize].as_mut().expect("a socket that was not closed")
    }
}

fn name_of(event: SocketEvent) -> &'static str {
    match event {
        SocketEvent::Received { .. } => "received",
        SocketEvent::ReceiveEnded(_) => "receive-ended",
        SocketEvent::Filled(_) => "filled",
        SocketEvent::Sent(_) => "sent",
        SocketEvent::Closed => "closed",
    }
}

impl Sockets for SimRing {
    type Stream = SimStream;

    fn add_socket(&mut self, stream: SimStream, owner: SocketOwner) -> io::Result<SocketId> {
        let peer = self.net.streams[stream.0].take().expect("a stream is taken once");
        let (inbound, receiving) = (VecDeque::new(), Receiving::Idle);
        let socket = SimSocket { owner, peer, inbound, receiving, sending: None, closing: false };
        self.net.sockets.push(Some(socket));
        Ok(SocketId(self.net.sockets.len() as u32 - 1))
    }

    fn receive(&mut self, id: SocketId) {
        let socket = self.socket(id);
        assert!(matches!(socket.receiving, Receiving::Idle) && !socket.closing, "{socket:?}");
        socket.receiving = Receiving::Armed;
    }

    fn receive_stop(&mut self, id: SocketId) {
        let socket = self.socket(id);
        assert!(!socket.closing, "{socket:?}");
        if matches!(socket.receiving, Receiving::Armed) {
            socket.receiving = Receiving::Stopping;
        }
    }

    fn receive_into(&mut self, id: SocketId, segment: Segment) {
        self.arena.pin(segment, true);
        let socket = self.socket(id);
        assert!(matches!(socket.receiving, Receiving::Idle) && !socket.closing, "{socket:?}");
        socket.receiving = Receiving::Filling(segment, 0);
    }

    fn give_back(&mut self, chunk: Chunk) {
        let segment = self.net.chunks[chunk.index()].take().expect("a chunk is given back once");
        self.arena.free(segment);
        while self.net.chunks.last().is_some_and(Option::is_none) {
            self.net.chunks.pop();
        }
    }

    fn send(&mut self, id: SocketId, segments: &[Segment]) {
        segments.iter().for_each(|&segment| self.arena.pin(segment, true));
        let socket = self.socket(id);
        assert!(socket.sending.is_none() && !socket.closing, "one send at a time: {socket:?}");
        assert!((1..=1024).contains(&segments.len()), "a send of {} segments", segments.len());
        socket.sending = Some(Sending { segments: segments.to_vec(), sent: 0 });
    }

    fn close(&mut self, id: SocketId) {
        self.socket(id).closing = true;
    }

    fn copy(&mut self, from: Segment, to: Segment) {
        let bytes = self.arena.bytes(from).to_vec();
        self.arena.bytes_mut(to).copy_from_slice(&bytes);
    }
}
