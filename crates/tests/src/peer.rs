//! A blocking client over `proto`'s client half: the whole protocol, one request or many in flight.
//!
//! It checks every reply against its request ([`Track`]) and panics when the server breaks the protocol;
//! errors that the protocol defines are returned.

use crate::tools::PATIENCE;
use proto::nbd::client::{
    Descriptor, Failure, Handshake, HandshakeOptions, Progress, Reply, Step, Track, parse_reply,
};
use proto::nbd::{Command, CommandFlags, NbdError, Request, Session};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The result of a request.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// The request's cookie.
    pub cookie: u64,
    /// Set if it failed.
    pub error: Option<NbdError>,
    /// The data of a read.
    pub data: Vec<u8>,
    /// Number of its bytes that were sent as holes.
    pub holes: u64,
    /// Number of messages of the reply.
    pub chunks: u32,
    /// The result of a block status request.
    pub descriptors: Vec<Descriptor>,
}

struct InFlight {
    request: Request,
    track: Track,
    answer: Answer,
}

/// A client.
pub struct Peer {
    stream: UnixStream,
    /// The negotiated session.
    pub session: Session,
    received: Vec<u8>,
    in_flight: HashMap<u64, InFlight>,
    next_cookie: u64,
}

impl Peer {
    /// Connects with all features of the server.
    ///
    /// # Panics
    /// If it cannot.
    #[track_caller]
    pub fn connect(socket: &Path, export: &str) -> Peer {
        match Peer::with(socket, HandshakeOptions::new(export)) {
            Ok(peer) => peer,
            Err(why) => panic!("{}: {why}", socket.display()),
        }
    }

    /// Connects with the features in `requested`.
    ///
    /// # Errors
    /// The server refuses.
    ///
    /// # Panics
    /// If no server listens, or the server stops answering.
    #[track_caller]
    pub fn with(socket: &Path, requested: HandshakeOptions) -> Result<Peer, Failure> {
        let stream = UnixStream::connect(socket).unwrap_or_else(|why| panic!("{}: {why}", socket.display()));
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket takes a timeout");
        stream.set_write_timeout(Some(PATIENCE)).expect("a socket takes a timeout");
        let mut handshake = Handshake::new(requested);
        let mut received = Vec::new();
        let session = loop {
            let output = std::mem::take(handshake.output());
            // A failed send shows when no reply arrives.
            let _ = (&stream).write_all(&output);
            match handshake.poll() {
                Step::NeedInput if received.is_empty() => fill(&stream, &mut received),
                Step::NeedInput => {}
                Step::Ready(session) => break session,
                Step::Failed(failure) => return Err(failure),
                step => panic!("not asked for: {step:?}"),
            }
            let taken = handshake.input(&received);
            received.drain(..taken);
        };
        Ok(Peer { stream, session, received, in_flight: HashMap::new(), next_cookie: 1 })
    }

    /// Sends a request under a cookie of its own and returns the cookie.
    ///
    /// # Panics
    /// If it cannot be sent.
    #[track_caller]
    pub fn send(&mut self, request: Request, payload: &[u8]) -> u64 {
        let (cookie, bytes) = self.prepare(request, payload);
        self.stream.write_all(&bytes).expect("the server takes requests");
        cookie
    }

    /// Sends a request, unless the server has closed the connection.
    ///
    /// # Errors
    /// It has closed.
    pub fn try_send(&mut self, request: Request, payload: &[u8]) -> std::io::Result<u64> {
        let (cookie, bytes) = self.prepare(request, payload);
        self.stream.write_all(&bytes).map(|()| cookie)
    }

    fn prepare(&mut self, request: Request, payload: &[u8]) -> (u64, Vec<u8>) {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let request = Request { cookie, payload_len: payload.len() as u64, ..request };
        let style = self.session.style;
        let mut bytes = [0; 32];
        let len = request.put(&mut bytes, self.session.extended());
        let track = Track::new(request, style, self.session.base_allocation);
        let mut answer = Answer { cookie, ..Answer::default() };
        if request.command == Command::Read {
            answer.data = vec![0; request.len as usize];
        }
        self.in_flight.insert(cookie, InFlight { request, track, answer });
        (cookie, [&bytes[..len], payload].concat())
    }

    /// Returns the next completed request.
    ///
    /// # Panics
    /// If none completes, or the server breaks the protocol.
    #[track_caller]
    pub fn receive(&mut self) -> Answer {
        self.try_receive().expect("the server closed")
    }

    /// Returns the next completed request; `None` when the server closes instead.
    ///
    /// # Panics
    /// If the server stops answering or breaks the protocol.
    #[track_caller]
    pub fn try_receive(&mut self) -> Option<Answer> {
        loop {
            let parsed = parse_reply(&self.received, self.session.style).expect("a reply");
            let Some((reply, mut used)) = parsed else {
                if !self.fill() {
                    return None;
                }
                continue;
            };
            let cookie = reply.cookie();
            let flight = self.in_flight.get_mut(&cookie).expect("a reply to a request in flight");
            let progress = flight.track.accept(&reply).expect("a reply that fits its request");
            flight.answer.chunks += 1;
            let start = flight.request.offset;
            let mut data = None;
            match reply {
                Reply::Data { offset, len, .. } => data = Some(((offset - start) as usize, len as usize)),
                Reply::Simple { error: None, .. } if flight.request.command == Command::Read => {
                    data = Some((0, flight.request.len as usize));
                }
                Reply::Hole { len, .. } => flight.answer.holes += u64::from(len),
                Reply::Status { descriptors, .. } => flight.answer.descriptors = descriptors.collect(),
                _ => {}
            }
            if let Some((at, len)) = data {
                while self.received.len() < used + len {
                    if !self.fill() {
                        return None;
                    }
                }
                let flight = self.in_flight.get_mut(&cookie).expect("it is still in flight");
                flight.answer.data[at..at + len].copy_from_slice(&self.received[used..used + len]);
                used += len;
            }
            self.received.drain(..used);
            if let Progress::Ended(error) = progress {
                let mut answer = self.in_flight.remove(&cookie).expect("it is still in flight").answer;
                answer.error = error;
                return Some(answer);
            }
        }
    }

    fn fill(&mut self) -> bool {
        let mut bytes = [0; 64 << 10];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(len) => {
                    self.received.extend_from_slice(&bytes[..len]);
                    return len > 0;
                }
                Err(why) if why.kind() == std::io::ErrorKind::ConnectionReset => return false,
                // A read with a timeout is not restarted when the process was stopped for a while.
                Err(why) if why.kind() == std::io::ErrorKind::Interrupted => {}
                Err(why) => panic!("no reply: {why}"),
            }
        }
    }

    /// Sends a request and waits for it, with nothing else in flight.
    ///
    /// # Panics
    /// If the server closes or breaks the protocol.
    #[track_caller]
    pub fn ask(&mut self, request: Request, payload: &[u8]) -> Answer {
        let cookie = self.send(request, payload);
        let answer = self.receive();
        assert_eq!(answer.cookie, cookie);
        answer
    }

    #[track_caller]
    fn simple(&mut self, request: Request, payload: &[u8]) -> Result<Answer, NbdError> {
        let answer = self.ask(request, payload);
        answer.error.map_or(Ok(answer), Err)
    }

    /// Reads a range.
    ///
    /// # Errors
    /// The server's.
    #[track_caller]
    pub fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, NbdError> {
        self.simple(Request::new(Command::Read, 0, offset, len), &[]).map(|answer| answer.data)
    }

    /// Writes data.
    ///
    /// # Errors
    /// The server's.
    #[track_caller]
    pub fn write(&mut self, offset: u64, data: &[u8], flags: CommandFlags) -> Result<(), NbdError> {
        let request = Request::write(0, offset, data.len() as u64).with_flags(flags);
        self.simple(request, data).map(drop)
    }

    /// Flushes.
    ///
    /// # Errors
    /// The server's.
    #[track_caller]
    pub fn flush(&mut self) -> Result<(), NbdError> {
        self.simple(Request::new(Command::Flush, 0, 0, 0), &[]).map(drop)
    }

    /// Trims a range.
    ///
    /// # Errors
    /// The server's.
    #[track_caller]
    pub fn trim(&mut self, offset: u64, len: u64) -> Result<(), NbdError> {
        self.simple(Request::new(Command::Trim, 0, offset, len), &[]).map(drop)
    }

    /// Writes zeroes to a range.
    ///
    /// # Errors
    /// The server's.
    #[track_caller]
    pub fn zero(&mut self, offset: u64, len: u64, flags: CommandFlags) -> Result<(), NbdError> {
        let request = Request::new(Command::WriteZeroes, 0, offset, len).with_flags(flags);
        self.simple(request, &[]).map(drop)
    }

    /// Returns the block status of a range.
    ///
    /// # Errors
    /// The server's.
    #[track_caller]
    pub fn status(
        &mut self,
        offset: u64,
        len: u64,
        flags: CommandFlags,
    ) -> Result<Vec<Descriptor>, NbdError> {
        let request = Request::new(Command::BlockStatus, 0, offset, len).with_flags(flags);
        self.simple(request, &[]).map(|answer| answer.descriptors)
    }

    /// Sends NBD_CMD_DISC and waits until the server closes the connection.
    ///
    /// # Panics
    /// If the server does not close.
    #[track_caller]
    pub fn disconnect(mut self) {
        let mut bytes = [0; 32];
        let request = Request::new(Command::Disc, self.next_cookie, 0, 0);
        let len = request.put(&mut bytes, self.session.extended());
        self.stream.write_all(&bytes[..len]).expect("the server takes the end of a session");
        assert!(!self.fill(), "the server answered the end of a session");
    }
}

fn fill(mut stream: &UnixStream, received: &mut Vec<u8>) {
    let mut bytes = [0; 4096];
    let len = loop {
        match stream.read(&mut bytes) {
            Ok(len) => break len,
            Err(why) if why.kind() == std::io::ErrorKind::Interrupted => {}
            Err(why) => panic!("no reply: {why}"),
        }
    };
    assert!(len > 0, "the server closed during the handshake");
    received.extend_from_slice(&bytes[..len]);
}
