//! Replies of one connection that are waiting to be sent or being sent.
//!
//! Reply headers are written to a block of arena memory, data stays in place; the replies of a turn are
//! sent with one `sendmsg`. During that call the next batch accumulates. A block is allocated for the first
//! reply and freed when it has been sent, so an idle connection holds none.

use super::budget::charge_of;
use block::Segment;
use queue::Ring;
use ring::{KernelRing, SocketId};
use std::collections::VecDeque;

/// Bytes of headers in a batch: 585 structured replies.
const HEADERS_LEN: u32 = 16 << 10;
/// Maximum number of segments in a batch: `IOV_MAX` is 1024, and a reply adds at most two.
const PIECES_MAX: usize = 1000;

#[derive(Default)]
struct Batch {
    headers: Option<Segment>,
    used: u32,
    pieces: Vec<Segment>,
    /// Arena memory to free once the batch is sent.
    memory: Vec<Segment>,
    /// Bytes charged for that memory.
    held: u64,
    owed: Owed,
}

/// Unanswered requests of a connection: added when accepted, subtracted when the reply is sent.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Owed {
    /// Number of requests.
    pub(super) replies: u32,
    /// Bytes of data that the requests move.
    pub(super) bytes: u64,
}

impl Owed {
    pub(super) fn add(&mut self, other: Owed) {
        self.replies += other.replies;
        self.bytes += other.bytes;
    }

    pub(super) fn pay(&mut self, other: Owed) {
        self.replies -= other.replies;
        self.bytes -= other.bytes;
    }
}

/// The replies of one connection.
#[derive(Default)]
pub(super) struct Outbox {
    batches: VecDeque<Batch>,
    /// Whether the first batch is being sent.
    sending: bool,
    /// Sent batches, kept for their vectors.
    spare: Vec<Batch>,
}

/// The arena has no memory for reply headers.
#[derive(Debug)]
pub(super) struct NoMemory;

impl Outbox {
    /// Returns the accumulating batch, with space for one more reply of `len` header bytes.
    fn open(&mut self, len: u32, ring: &mut KernelRing) -> Result<&mut Batch, NoMemory> {
        let first_open = usize::from(self.sending);
        let full = |b: &Batch| b.used + len > HEADERS_LEN || b.pieces.len() + 2 > PIECES_MAX;
        if self.batches.len() <= first_open || self.batches.back().is_some_and(full) {
            let mut batch = self.spare.pop().unwrap_or_default();
            batch.headers = Some(ring.allocate(HEADERS_LEN).ok_or(NoMemory)?);
            self.batches.push_back(batch);
        }
        self.batches.back_mut().ok_or(NoMemory)
    }

    /// Appends `header`, then `data`.
    #[inline]
    pub(super) fn push(
        &mut self,
        header: &[u8],
        data: Option<Segment>,
        ring: &mut KernelRing,
    ) -> Result<(), NoMemory> {
        let batch = self.open(header.len() as u32, ring)?;
        let Some(block) = batch.headers else { return Err(NoMemory) };
        let place = block.slice(batch.used, header.len() as u32);
        ring.bytes_mut(place).copy_from_slice(header);
        batch.used += header.len() as u32;
        match batch.pieces.last_mut() {
            // Headers of replies without data are contiguous: extend the segment.
            Some(last)
                if last.region == place.region && last.offset + u64::from(last.len) == place.offset =>
            {
                last.len += place.len;
            }
            _ => batch.pieces.push(place),
        }
        batch.pieces.extend(data);
        Ok(())
    }

    /// Records that the last pushed reply completes a request that moved this many bytes.
    #[inline]
    pub(super) fn answered(&mut self, bytes: u64) {
        if let Some(batch) = self.batches.back_mut() {
            batch.owed.add(Owed { replies: 1, bytes });
        }
    }

    /// Frees this memory once everything pushed so far has been sent. Returns whether it was freed at once.
    pub(super) fn free_when_sent(&mut self, memory: Segment, ring: &mut KernelRing) -> bool {
        match self.batches.back_mut() {
            Some(batch) => {
                batch.held += charge_of(memory);
                batch.memory.push(memory);
                false
            }
            None => {
                ring.free(memory);
                true
            }
        }
    }

    /// Starts sending the accumulated batch, unless one is being sent.
    pub(super) fn start(&mut self, socket: SocketId, ring: &mut KernelRing) {
        if self.sending {
            return;
        }
        if let Some(batch) = self.batches.front() {
            ring.send(socket, &batch.pieces);
            self.sending = true;
        }
    }

    /// Handles the end of a send, successful or not. Returns the requests that the batch answered, and the
    /// bytes of memory freed.
    pub(super) fn sent(&mut self, ring: &mut KernelRing) -> (Owed, u64) {
        self.sending = false;
        match self.batches.pop_front() {
            Some(batch) => self.recycle(batch, ring),
            None => (Owed::default(), 0),
        }
    }

    fn recycle(&mut self, mut batch: Batch, ring: &mut KernelRing) -> (Owed, u64) {
        batch.memory.drain(..).chain(batch.headers.take()).for_each(|segment| ring.free(segment));
        batch.pieces.clear();
        batch.used = 0;
        let paid = (std::mem::take(&mut batch.owed), std::mem::take(&mut batch.held));
        if self.spare.len() < 2 {
            self.spare.push(batch);
        }
        paid
    }

    /// Drops the batches that are not being sent. Returns their requests, and the bytes of memory freed.
    pub(super) fn discard(&mut self, ring: &mut KernelRing) -> (Owed, u64) {
        let keep = usize::from(self.sending);
        let (mut owed, mut held) = (Owed::default(), 0);
        while self.batches.len() > keep {
            let Some(batch) = self.batches.pop_back() else { break };
            let (paid, given_back) = self.recycle(batch, ring);
            owed.add(paid);
            held += given_back;
        }
        (owed, held)
    }

    /// Returns whether a batch is being sent.
    pub(super) fn is_sending(&self) -> bool {
        self.sending
    }

    /// Returns whether nothing is waiting or being sent.
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }
}
