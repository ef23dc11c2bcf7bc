//! Parses the server's replies in place, where they were received, and completes requests.
//!
//! Messages are short and come in chunks. The data of a read is copied from its chunk to the request's
//! memory or, if much of it is missing, received directly into that memory.

use super::connection::{Input, Receiving};
use super::flight::{Flight, State};
use super::link::Loss;
use super::node::{Link, NbdNode};
use crate::segments::{Records, fill_zeroes};
use block::{Bytes, Extent, Segment, Status, Tag};
use proto::nbd::client::{Progress, Reply, parse_reply};
use proto::nbd::{Fatal, NbdError, status_of, wire};
use queue::{Cx, ReceiveEnd, Sockets};

/// If at least this many bytes of data are missing, they are received directly into their memory. Fewer are
/// copied from chunks, which costs less than stopping and restarting the stream of chunks.
const DIRECT_FILL_MIN: u64 = 96 << 10;
/// Longest header of a message in bytes.
const HEADER_MAX: usize = 40;
/// Bytes of a long message that are parsed at a time.
const STASH_STEP: usize = 64 << 10;
/// Maximum number of descriptors kept of a block-status reply; ranges after them are requested again.
const EXTENTS_MAX: usize = 4096;

/// A parsed message.
#[derive(Clone, Copy)]
enum Message {
    /// Data of a read follows.
    Data { tag: Tag, at: u64, len: u64, end: Option<Status> },
    /// A range of a read is all zeroes.
    Zeroes { tag: Tag, at: u64, len: u64, end: Option<Status> },
    /// Block status arrived, and was stored.
    Extents { tag: Tag, end: Option<Status> },
    /// The command has ended with this status.
    Ended { tag: Tag, status: Status },
    /// More messages follow for the command.
    Nothing,
    /// The server is shutting down; its replies to this command are ignored.
    ShuttingDown,
}

/// Reason to end the connection: a protocol violation, or a shutdown of the server.
enum Over {
    Nonsense,
    ShuttingDown,
}

impl From<Fatal> for Over {
    fn from(_: Fatal) -> Over {
        Over::Nonsense
    }
}

impl<S: Send + 'static> NbdNode<S> {
    /// Processes a received chunk.
    pub(super) fn received<R: Sockets<Stream = S>>(&mut self, segment: Segment, cx: &mut Cx<'_, R>) {
        let now = cx.now();
        let Some(connection) = self.connection() else { return };
        (connection.heard_at, connection.heard) = (now, true);
        match self.consume(segment, cx) {
            Ok(()) => self.stop_for_large_data(cx),
            Err(Over::Nonsense) => self.lose(Loss::Nonsense, cx),
            Err(Over::ShuttingDown) => self.lose(Loss::ShuttingDown, cx),
        }
    }

    fn consume<R: Sockets<Stream = S>>(&mut self, segment: Segment, cx: &mut Cx<'_, R>) -> Result<(), Over> {
        let mut at = 0;
        while at < segment.len {
            let rest = segment.slice(at, segment.len - at);
            let Some(connection) = self.connection() else { return Ok(()) };
            at += match connection.input {
                Input::Message => self.message(rest, cx)?,
                Input::Data { .. } => {
                    let Some(place) = self.place(u64::from(rest.len), cx) else { return Err(Over::Nonsense) };
                    cx.ring.copy(rest.slice(0, place.len), place);
                    self.data_came(place.len, cx);
                    place.len
                }
            };
        }
        Ok(())
    }

    /// Returns the memory for the next bytes of data: a single segment of at most `most` bytes.
    fn place<R: Sockets<Stream = S>>(&mut self, most: u64, cx: &mut Cx<'_, R>) -> Option<Segment> {
        let Input::Data { tag, at, left, .. } = self.connection()?.input else { return None };
        let flight = self.flights[tag.index()].as_ref()?;
        let data = cx.advance(flight.req.data, at);
        cx.segments(data, left.min(most)).next()
    }

    /// Counts received data.
    fn data_came<R: Sockets<Stream = S>>(&mut self, len: u32, cx: &mut Cx<'_, R>) {
        let Some(connection) = self.connection() else { return };
        let Input::Data { tag, at, left, end } = connection.input else { return };
        let (at, left) = (at + u64::from(len), left - u64::from(len));
        if left > 0 {
            connection.input = Input::Data { tag, at, left, end };
            return;
        }
        connection.input = Input::Message;
        self.ended_if(tag, end, cx);
    }

    fn ended_if<R: Sockets<Stream = S>>(&mut self, tag: Tag, end: Option<Status>, cx: &mut Cx<'_, R>) {
        if let Some(status) = end {
            self.command_ended(tag, status, cx);
        }
    }

    /// Processes a message at the front of `rest`, or the part of it that has arrived. Returns the number
    /// of bytes consumed.
    fn message<R: Sockets<Stream = S>>(&mut self, rest: Segment, cx: &mut Cx<'_, R>) -> Result<u32, Over> {
        let Some(connection) = self.connection() else { return Ok(rest.len) };
        if connection.stash.is_empty() {
            let bytes = cx.ring.bytes(rest);
            return match self.parse(bytes)? {
                Some((message, used)) => {
                    self.act(message, cx)?;
                    Ok(used as u32)
                }
                None => {
                    let bytes = cx.ring.bytes(rest);
                    self.connection().into_iter().for_each(|c| c.stash.extend_from_slice(bytes));
                    Ok(rest.len)
                }
            };
        }
        let mut stash = std::mem::take(&mut connection.stash);
        let before = stash.len();
        let step = if before < HEADER_MAX { HEADER_MAX - before } else { STASH_STEP };
        let bytes = cx.ring.bytes(rest);
        let taken = step.min(bytes.len());
        stash.extend_from_slice(&bytes[..taken]);
        let parsed = self.parse(&stash)?;
        if parsed.is_some() {
            stash.clear();
        }
        self.connection().into_iter().for_each(|c| std::mem::swap(&mut c.stash, &mut stash));
        match parsed {
            Some((message, used)) => {
                self.act(message, cx)?;
                // The bytes in the stash were not a complete message.
                Ok((used - before) as u32)
            }
            None => Ok(taken as u32),
        }
    }

    /// Parses the message at the front of `bytes`, and checks that the server may send it now. Returns the
    /// message and its length, or `None` if it is incomplete.
    fn parse(&mut self, bytes: &[u8]) -> Result<Option<(Message, usize)>, Over> {
        let Link::Up(connection) = &mut self.link else { return Ok(None) };
        let Some((reply, used)) = parse_reply(bytes, connection.session.style)? else { return Ok(None) };
        let cookie = reply.cookie();
        let slot = Flight::slot_of(cookie);
        let flight = self.flights.get_mut(slot).and_then(Option::as_mut);
        let asked =
            |f: &&mut Flight| f.state != State::Waiting && f.answered.is_none() && f.cookie() == cookie;
        let Some(flight) = flight.filter(asked) else { return Err(Over::Nonsense) };
        let progress = flight.track.accept(&reply)?;
        if progress == Progress::Ended(Some(NbdError::Shutdown)) {
            return Ok(Some((Message::ShuttingDown, used)));
        }
        let (tag, start) = (Tag(slot as u16), flight.req.offset.0);
        let end = match progress {
            Progress::More => None,
            Progress::Ended(error) => Some(status_of(error)),
        };
        let message = match reply {
            Reply::Simple { error: None, .. } if flight.reads() => {
                Message::Data { tag, at: flight.done, len: flight.len, end }
            }
            Reply::Data { offset, len, .. } => {
                connection.gaps.fill(cookie, &mut flight.coverage, offset, len)?;
                Message::Data { tag, at: offset - start, len, end }
            }
            Reply::Hole { offset, len, .. } => {
                let len = u64::from(len);
                connection.gaps.fill(cookie, &mut flight.coverage, offset, len)?;
                Message::Zeroes { tag, at: offset - start, len, end }
            }
            Reply::Status { descriptors, .. } => {
                connection.extents.clear();
                connection
                    .extents
                    .extend(descriptors.take(EXTENTS_MAX).map(|extent| (extent.len, extent.state)));
                Message::Extents { tag, end }
            }
            _ => end.map_or(Message::Nothing, |status| Message::Ended { tag, status }),
        };
        if end.is_some() {
            connection.gaps.forget(cookie);
        }
        Ok(Some((message, used)))
    }

    fn act<R: Sockets<Stream = S>>(&mut self, message: Message, cx: &mut Cx<'_, R>) -> Result<(), Over> {
        match message {
            Message::Nothing => {}
            Message::ShuttingDown => return Err(Over::ShuttingDown),
            Message::Ended { tag, status } => self.command_ended(tag, status, cx),
            Message::Data { tag, at, len, end } => {
                if let Some(connection) = self.connection() {
                    connection.input = Input::Data { tag, at, left: len, end };
                }
            }
            Message::Zeroes { tag, at, len, end } => {
                if let Some(flight) = &self.flights[tag.index()] {
                    fill_zeroes(cx, flight.req.data, at, len);
                }
                self.ended_if(tag, end, cx);
            }
            Message::Extents { tag, end } => {
                self.write_extents(tag, cx);
                self.ended_if(tag, end, cx);
            }
        }
        Ok(())
    }

    fn write_extents<R: Sockets<Stream = S>>(&mut self, tag: Tag, cx: &mut Cx<'_, R>) {
        let Link::Up(connection) = &self.link else { return };
        let Some(flight) = &self.flights[tag.index()] else { return };
        let mut records = Records::new(cx, flight.req.data);
        let mut left = flight.len;
        for &(len, state) in &connection.extents {
            // The last descriptor may extend beyond the requested range.
            let len = Bytes(len.min(left));
            if len == Bytes::ZERO {
                break;
            }
            left -= len.0;
            let has = |bit: u32| state & u64::from(bit) != 0;
            let extent = Extent { len, hole: has(wire::STATE_HOLE), zero: has(wire::STATE_ZERO) };
            if !records.push(cx, extent) {
                break;
            }
        }
        records.finish(cx);
    }

    /// Stops receiving chunks if the rest of a read's data is long, to receive it directly into its memory.
    fn stop_for_large_data<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        if self.large_place(cx).is_none() {
            return;
        }
        let Some(connection) = self.connection() else { return };
        if connection.receiving == Receiving::Chunks {
            connection.receiving = Receiving::Stopping;
            cx.ring.receive_stop(connection.socket);
        }
    }

    /// Returns memory that is large enough for a direct receive.
    fn large_place<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) -> Option<Segment> {
        self.place(u64::MAX, cx).filter(|place| u64::from(place.len) >= DIRECT_FILL_MIN)
    }

    pub(super) fn receive_ended<R: Sockets<Stream = S>>(&mut self, end: ReceiveEnd, cx: &mut Cx<'_, R>) {
        match end {
            ReceiveEnd::Stopped => self.receive_on(cx),
            ReceiveEnd::Eof => self.lose(Loss::Closed, cx),
            ReceiveEnd::Error(errno) => self.lose(Loss::Failed(errno), cx),
        }
    }

    /// Continues after receiving into chunks has stopped.
    fn receive_on<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        let place = self.large_place(cx);
        let Some(connection) = self.connection() else { return };
        match place {
            Some(place) => {
                connection.receiving = Receiving::Filling(place.len);
                cx.ring.receive_into(connection.socket, place);
            }
            None => {
                connection.receiving = Receiving::Chunks;
                cx.ring.receive(connection.socket);
            }
        }
    }

    /// Processes the end of a direct receive.
    pub(super) fn filled<R: Sockets<Stream = S>>(&mut self, result: i64, cx: &mut Cx<'_, R>) {
        let now = cx.now();
        let Some(connection) = self.connection() else { return };
        let Receiving::Filling(len) = connection.receiving else { return };
        (connection.heard_at, connection.heard) = (now, true);
        match result {
            whole if whole == i64::from(len) => {
                self.data_came(len, cx);
                self.receive_on(cx);
            }
            error if error < 0 => self.lose(Loss::Failed((-error) as i32), cx),
            _ => self.lose(Loss::Closed, cx),
        }
    }
}
