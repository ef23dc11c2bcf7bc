//! The node: requests become librbd's, and its completions become results.
//!
//! A write with FUA is followed by a flush. Without a cache that flush has nothing to write and waits for
//! writes that are in flight only.

use crate::device::Opened;
use crate::extents::ExtentsThread;
use crate::sys::{Command, Ended, Flights};
use block::{Cookie, Flags, Op, Request, Status, Tag};
use queue::{Cx, FileId, Node, NodeEvent, NodeId, QueueWaker, Verdict};
use ring::KernelRing;
use std::sync::Arc;

/// State of the watch of the eventfd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Watch {
    Off,
    On,
    Ending,
}

/// The state of a tag.
#[derive(Clone, Default)]
struct Slot {
    /// The request; `None` while none is in flight.
    io: Option<Cookie>,
    /// librbd carries the request out under the exclusive lock.
    is_write: bool,
    /// The flush after a write with FUA is in flight.
    is_flushing: bool,
    /// Records for an `Extents` request.
    records: Vec<u8>,
}

/// The node of an image's only queue.
pub struct RbdNode {
    opened: Arc<Opened>,
    flights: Flights,
    slots: Box<[Slot]>,
    /// Requests in flight that need the exclusive lock.
    writes: u32,
    event: FileId,
    watch: Watch,
    waker: QueueWaker,
    /// `None` until the first `Extents` request.
    extents: Option<ExtentsThread>,
}

impl RbdNode {
    pub(crate) fn new(opened: Arc<Opened>, event: FileId, waker: QueueWaker) -> RbdNode {
        let flights = Flights::new(opened.image.clone(), waker.clone());
        RbdNode {
            opened,
            flights,
            slots: Box::default(),
            writes: 0,
            event,
            watch: Watch::Off,
            waker,
            extents: None,
        }
    }

    /// Returns the command for a request.
    fn command(&self, req: &Request) -> Result<Command, Status> {
        let (offset, len) = (req.offset.0, req.len.0);
        Ok(match req.op {
            Op::Read => Command::Read { offset },
            Op::Write => Command::Write { offset },
            Op::Discard => Command::Discard { offset, len },
            Op::WriteZeroes if req.flags.contains(Flags::FAST_ZERO) => return Err(Status::NotSupported),
            Op::WriteZeroes => {
                Command::WriteZeroes { offset, len, thick: req.flags.contains(Flags::NO_UNMAP) }
            }
            Op::Flush => Command::Flush,
            Op::CompareAndWrite
                if self.opened.compares_and_writes() && self.opened.is_within_unit(offset, len) =>
            {
                Command::CompareAndWrite { offset, len }
            }
            _ => return Err(Status::NotSupported),
        })
    }

    fn ask_for_extents(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        let room = cx.segments(req.data, u64::MAX).map(|piece| piece.len as usize).sum();
        if self.extents.is_none() {
            match ExtentsThread::start(self.flights.image().clone(), self.waker.clone()) {
                Ok(thread) => self.extents = Some(thread),
                Err(error) => {
                    tracing::warn!(%error, "the thread for allocated extents cannot be started");
                    return Verdict::Up(Status::Resource);
                }
            }
        }
        if let Some(thread) = &self.extents {
            self.slots[io.tag.index()].io = Some(io);
            thread.ask(io, req.offset.0, req.len.0, room);
        }
        Verdict::Held
    }

    /// Starts a request whose memory is in the tag's list.
    fn start(&mut self, io: Cookie, command: Command, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        self.slots[io.tag.index()].io = Some(io);
        match self.flights.start(io.tag.0, command) {
            Ok(()) => {
                let now_ns = cx.now().0;
                self.opened.state.started(self.flights.in_flight(), now_ns);
                let is_write = !matches!(command, Command::Read { .. } | Command::Flush);
                self.slots[io.tag.index()].is_write = is_write;
                self.writes += u32::from(is_write);
                if is_write && self.writes == 1 {
                    self.opened.state.set_writes(1, now_ns);
                }
                Verdict::Held
            }
            Err(result) => {
                self.slots[io.tag.index()].io = None;
                Verdict::Up(self.status(result, 0))
            }
        }
    }

    /// Returns the status of a result of librbd, and records what `show` reports.
    fn status(&self, result: i64, expected: u64) -> Status {
        let (state, image) = (&self.opened.state, &self.opened.spec);
        match i32::try_from(-result) {
            Ok(libc::ESHUTDOWN) => {
                if state.set_blocklisted() {
                    tracing::error!(image = %image.place(), "this client is blocklisted: requests fail");
                }
                Status::Transport
            }
            Ok(libc::EROFS) => {
                if state.set_locked_out() {
                    tracing::error!(image = %image.place(), "the exclusive lock is lost: writes fail");
                }
                Status::NotPermitted
            }
            Ok(libc::ETIMEDOUT) => {
                state.count_timeout();
                Status::Timeout
            }
            _ => Status::from_result(result, expected),
        }
    }

    /// Resumes the requests that librbd has completed.
    fn collect(&mut self, cx: &mut Cx<'_, KernelRing>) {
        if self.flights.in_flight() == 0 {
            return;
        }
        let (slots, mut ended) = (&mut self.slots, 0);
        self.flights.collect(|Ended { tag, result }| {
            let slot = &mut slots[Tag(tag).index()];
            ended += u32::from(std::mem::take(&mut slot.is_write));
            if let Some(io) = slot.io.take() {
                cx.resume(io, result);
            }
        });
        if ended > 0 {
            self.writes -= ended;
            self.opened.state.set_writes(self.writes, cx.now().0);
        }
        self.opened.state.set_in_flight(self.flights.in_flight(), cx.now().0);
    }

    fn take_extents(&mut self, cx: &mut Cx<'_, KernelRing>) {
        let Some(thread) = &self.extents else { return };
        for (io, answer) in thread.take() {
            let slot = &mut self.slots[io.tag.index()];
            if slot.io.take_if(|waiting| *waiting == io).is_none() {
                continue;
            }
            match answer {
                Ok(records) => {
                    slot.records = records;
                    cx.resume(io, 0);
                }
                Err(result) => cx.resume(io, result),
            }
        }
    }

    /// Stores the records of an `Extents` request; what they do not fill is zeroed, which ends the list.
    fn store_records(&mut self, tag: Tag, req: &Request, cx: &mut Cx<'_, KernelRing>) {
        let records = std::mem::take(&mut self.slots[tag.index()].records);
        let mut at = 0;
        let mut rest = req.data;
        while let Some(piece) = cx.segments(rest, u64::MAX).next().filter(|piece| piece.len > 0) {
            let bytes = queue::Ring::bytes_mut(cx.ring, piece);
            let len = bytes.len().min(records.len() - at);
            bytes[..len].copy_from_slice(&records[at..at + len]);
            bytes[len..].fill(0);
            at += len;
            if at == records.len() && len < bytes.len() {
                return;
            }
            rest = cx.advance(rest, piece.len.into());
        }
    }
}

impl Node<KernelRing> for RbdNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.slots = vec![Slot::default(); tags].into();
        self.flights.attach(tags);
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        if self.opened.state.is_blocklisted() {
            return Verdict::Up(Status::Transport);
        }
        if self.watch == Watch::Off {
            cx.ring.watch_for_node(cx.socket_owner(), self.event);
            self.watch = Watch::On;
        }
        if req.op == Op::Extents {
            return self.ask_for_extents(io, req, cx);
        }
        let command = match self.command(req) {
            Ok(command) => command,
            Err(status) => return Verdict::Up(status),
        };
        let list = self.flights.segments(io.tag.0);
        list.clear();
        let moved = match req.op {
            Op::CompareAndWrite => 2 * req.len.0,
            op if op.moves_data() => req.len.0,
            _ => 0,
        };
        if moved > 0 {
            cx.ring.addresses(cx.segments(req.data, moved), list);
        }
        self.start(io, command, cx)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, KernelRing>) -> Verdict {
        let expected = if req.op == Op::Read { req.len.0 } else { 0 };
        let status = self.status(result, expected);
        if req.op == Op::Extents && status.is_ok() {
            self.store_records(io.tag, req, cx);
        }
        let slot = &mut self.slots[io.tag.index()];
        let was_flushing = std::mem::take(&mut slot.is_flushing);
        if status.is_ok() && req.op.is_write() && req.flags.contains(Flags::FUA) && !was_flushing {
            slot.is_flushing = true;
            let verdict = self.start(io, Command::Flush, cx);
            self.slots[io.tag.index()].is_flushing = verdict == Verdict::Held;
            return verdict;
        }
        Verdict::Up(status)
    }

    /// librbd cannot cancel a request, which ends by its own timeout.
    fn cancel(&mut self, _: Cookie, _: &mut Cx<'_, KernelRing>) {}

    fn commit(&mut self, cx: &mut Cx<'_, KernelRing>) {
        self.take_extents(cx);
        if self.flights.has_mail() {
            self.collect(cx);
        }
    }

    fn event(&mut self, event: NodeEvent, cx: &mut Cx<'_, KernelRing>) {
        match event {
            NodeEvent::Signalled => self.collect(cx),
            NodeEvent::WatchEnded => {
                self.watch = Watch::Off;
                if self.flights.in_flight() > 0 {
                    cx.ring.watch_for_node(cx.socket_owner(), self.event);
                    self.watch = Watch::On;
                }
            }
            NodeEvent::Alarm | NodeEvent::Socket(..) => {}
        }
    }

    fn close(&mut self, cx: &mut Cx<'_, KernelRing>) -> bool {
        self.extents = None;
        if self.watch == Watch::On {
            cx.ring.watch_for_node_end(cx.socket_owner());
            self.watch = Watch::Ending;
        }
        self.watch == Watch::Off
    }
}

impl Drop for RbdNode {
    fn drop(&mut self) {
        if Arc::strong_count(&self.opened) == 1 {
            // Closing the image waits for the cluster, which a reactor must not.
            let opened = self.opened.clone();
            let started = std::thread::Builder::new().name("rbd-close".to_owned()).spawn(move || {
                // The node is dropped meanwhile, and with it the other references.
                std::thread::sleep(std::time::Duration::from_millis(10));
                drop(opened);
            });
            if let Err(error) = started {
                tracing::warn!(%error, "the thread that closes the image cannot be started");
            }
        }
    }
}

impl std::fmt::Debug for RbdNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let in_flight = self.flights.in_flight();
        f.debug_struct("RbdNode").field("in_flight", &in_flight).finish_non_exhaustive()
    }
}
