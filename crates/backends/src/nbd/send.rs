//! Gathers commands of waiting requests into one send, with the data of writes from the requests' memory.

use super::connection::Connection;
use super::node::{Link, NbdNode};
use crate::segments::one_extent;
use block::{Data, Extent, Op, Segment, Status};
use proto::nbd::{Command, Request as Wire, request};
use queue::{Cx, Ring, Sockets};

/// Memory for the headers of one send.
const HEADERS_LEN: u32 = 4096;
/// Bytes of data after which a send is full. The next one starts when it completes; a longer one would
/// delay the replies to its first commands.
const DATA_MAX: u64 = 4 << 20;
/// Maximum number of segments of one send: the limit of the ring.
const SEGMENTS_MAX: usize = 1024;
/// Time to wait for memory if none is free, in nanoseconds.
const MEMORY_NS: u64 = 1_000_000;

/// Returns the maximum number of segments of a request's data.
fn segments_of(data: Data) -> usize {
    match data {
        Data::One(_) => 1,
        Data::Run { count, .. } => usize::from(count),
    }
}

/// Adds the header of a command to the send.
fn put_header<R: Ring>(
    connection: &mut Connection,
    headers: Segment,
    used: &mut u32,
    wire: &Wire,
    ring: &mut R,
) {
    let extended = connection.session.extended();
    let place = headers.slice(*used, request::header_len(extended) as u32);
    wire.put(ring.bytes_mut(place), extended);
    *used += place.len;
    connection.batch.push(place);
}

impl<S: Send + 'static> NbdNode<S> {
    /// Starts to send waiting requests, unless a send is in flight.
    #[inline]
    pub(super) fn send<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) {
        match &self.link {
            Link::Up(connection) if !connection.batch.is_under_way() && !self.waiting.is_empty() => {}
            _ => return,
        }
        let Some(headers) = cx.ring.allocate(HEADERS_LEN) else { return self.set_alarm(MEMORY_NS, cx) };
        self.gather(headers, cx);
        let Link::Up(connection) = &mut self.link else { return };
        if connection.batch.segments.is_empty() {
            return cx.ring.free(headers);
        }
        connection.batch.headers = Some(headers);
        cx.ring.send(connection.socket, &connection.batch.segments);
    }

    fn gather<R: Sockets<Stream = S>>(&mut self, headers: Segment, cx: &mut Cx<'_, R>) {
        let (mut used, mut bytes) = (0, 0);
        let Link::Up(connection) = &mut self.link else { return };
        connection.batch.segments.clear();
        let header_len = request::header_len(connection.session.extended()) as u32;
        while let Some(&tag) = self.waiting.front() {
            let Link::Up(connection) = &mut self.link else { return };
            let Some(flight) = self.flights[tag.index()].as_mut() else {
                self.waiting.pop_front();
                continue;
            };
            let segments = connection.batch.segments.len() + 1 + segments_of(flight.req.data);
            if used + header_len > HEADERS_LEN || bytes >= DATA_MAX || segments > SEGMENTS_MAX {
                return;
            }
            self.waiting.pop_front();
            if flight.req.op == Op::Extents && connection.session.base_allocation.is_none() {
                let all = Extent { len: flight.req.len, hole: false, zero: false };
                one_extent(cx, flight.req.data, all);
                self.finish(tag, Status::Ok, cx);
                continue;
            }
            let wire = flight.command(&connection.session);
            flight.sent_at = cx.now();
            flight.tried_since.get_or_insert(cx.now());
            put_header(connection, headers, &mut used, &wire, cx.ring);
            if wire.command == Command::Write {
                let data = cx.advance(flight.req.data, flight.done);
                cx.segments(data, flight.len).for_each(|segment| connection.batch.push(segment));
                bytes += flight.len;
            }
            connection.batch.tags.push(tag);
        }
    }

    /// Sends NBD_CMD_DISC. Returns whether it is being sent.
    pub(super) fn say_goodbye<R: Sockets<Stream = S>>(&mut self, cx: &mut Cx<'_, R>) -> bool {
        let Link::Up(connection) = &mut self.link else { return false };
        let Some(headers) = cx.ring.allocate(HEADERS_LEN) else { return false };
        let (mut used, wire) = (0, Wire::new(Command::Disc, 0, 0, 0));
        connection.batch.segments.clear();
        put_header(connection, headers, &mut used, &wire, cx.ring);
        connection.batch.headers = Some(headers);
        cx.ring.send(connection.socket, &connection.batch.segments);
        true
    }
}
