//! Memory of tasks: it is charged to their connections, and tasks wait for it in one queue.

use super::task::{Memory, Phase, TaskId, Work};
use super::{Front, Turn};
use crate::budget::{FLOOR, charge_of};
use block::Segment;
use queue::Ring;
use ring::KernelRing;
use scsi::{Outcome, ScsiStatus};

/// Longest data of a command, in bytes: the largest block of the arena.
pub(super) const DATA_MAX: u32 = 32 << 20;

/// Copies `bytes` to arena memory.
pub(super) fn keep(bytes: &[u8], ring: &mut KernelRing) -> Option<Segment> {
    let len = u32::try_from(bytes.len()).ok()?;
    let memory = ring.allocate(len)?;
    ring.bytes_mut(memory).copy_from_slice(bytes);
    Some(memory)
}

impl Front {
    /// Charges a connection for memory of a task. Returns `false` if the task has to wait.
    #[inline]
    fn charge(&mut self, id: TaskId, bytes: u64) -> bool {
        let task = self.tasks.of(id);
        let (index, resumed) = (task.connection, task.resumed);
        let Some(connection) = self.connection_mut(index) else { return true };
        let held = connection.held + bytes;
        if held > FLOOR && !self.budget.grants(index, bytes, resumed, false) {
            return false;
        }
        if resumed {
            self.budget.line_moves();
        }
        self.charge_anyway(index, bytes);
        true
    }

    /// Charges a connection for memory, without a check of the budget.
    pub(super) fn charge_anyway(&mut self, index: u32, bytes: u64) {
        if let Some(connection) = self.connection_mut(index) {
            connection.held += bytes;
            self.budget.add(bytes);
        }
    }

    /// Records that a connection has freed this many bytes.
    #[inline]
    pub(super) fn discharge(&mut self, index: u32, bytes: u64) {
        if bytes == 0 {
            return;
        }
        if let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) {
            connection.held -= bytes;
            self.budget.give_back(index, bytes, connection.held);
        }
    }

    /// Frees memory charged to a connection.
    pub(super) fn release(&mut self, index: u32, memory: Segment, ring: &mut KernelRing) {
        ring.free(memory);
        self.discharge(index, charge_of(memory));
    }

    /// Allocates memory charged to the connection of a task. Returns `None` if the task has to wait.
    pub(super) fn allocate_for(&mut self, id: TaskId, len: u32, ring: &mut KernelRing) -> Option<Segment> {
        if !self.charge(id, len.into()) {
            return None;
        }
        let index = self.tasks.of(id).connection;
        let Some(memory) = ring.allocate(len) else {
            self.discharge(index, len.into());
            return None;
        };
        self.tasks.of_mut(id).charged += u64::from(len);
        Some(memory)
    }

    /// Gives a task memory for `len` bytes of data, and moves the data received so far to it. Returns
    /// `false` if the task has to wait or has ended; if it waits, it is in the queue for memory.
    pub(super) fn hold(&mut self, id: TaskId, len: u32, turn: &mut Turn<'_>) -> bool {
        let old = match self.tasks.of(id).memory {
            Memory::Own(memory) | Memory::Chunk(_, memory) if memory.len >= len => return true,
            Memory::Own(memory) => Some(memory),
            Memory::Chunk(..) | Memory::None => None,
        };
        match self.allocate_for(id, len, turn.ring) {
            Some(memory) => {
                self.replace_memory(id, old, memory, turn);
                true
            }
            None => {
                self.await_memory(id, turn);
                false
            }
        }
    }

    fn replace_memory(&mut self, id: TaskId, old: Option<Segment>, memory: Segment, turn: &mut Turn<'_>) {
        self.leave_chunk(id, memory, turn);
        if let Some(old) = old {
            turn.ring.copy(old, memory.slice(0, old.len));
            self.free_charged(id, old, turn.ring);
        }
        self.tasks.of_mut(id).memory = Memory::Own(memory);
    }

    /// Copies data from a received chunk to the task's own memory, and ends the use of the chunk.
    fn leave_chunk(&mut self, id: TaskId, memory: Segment, turn: &mut Turn<'_>) {
        if let Memory::Chunk(chunk, data) = self.tasks.of(id).memory {
            turn.ring.copy(data, memory.slice(0, data.len));
            self.chunk_uses.release(chunk, turn.ring);
            self.tasks.of_mut(id).memory = Memory::None;
        }
    }

    /// Makes a waiting task independent of the chunk that contains its data. Returns `false` if the system
    /// is out of memory.
    #[must_use]
    pub(super) fn settle(&mut self, id: TaskId, turn: &mut Turn<'_>) -> bool {
        let Memory::Chunk(_, data) = self.tasks.of(id).memory else { return true };
        let Some(memory) = self.allocate_early(id, data.len, turn) else { return false };
        self.leave_chunk(id, memory, turn);
        self.tasks.of_mut(id).memory = Memory::Own(memory);
        true
    }

    fn allocate_early(&mut self, id: TaskId, len: u32, turn: &mut Turn<'_>) -> Option<Segment> {
        let memory = turn.ring.allocate(len)?;
        let index = self.tasks.of(id).connection;
        self.charge_anyway(index, len.into());
        self.tasks.of_mut(id).charged += u64::from(len);
        Some(memory)
    }

    /// Gives a task memory for unsolicited data, which cannot wait: at most FirstBurstLength. Returns
    /// `false` if the system is out of memory.
    #[must_use]
    pub(super) fn hold_early(&mut self, id: TaskId, len: u32, turn: &mut Turn<'_>) -> bool {
        let old = match self.tasks.of(id).memory {
            Memory::Own(memory) if memory.len >= len => return true,
            Memory::Own(memory) => Some(memory),
            Memory::Chunk(..) | Memory::None => None,
        };
        let Some(memory) = self.allocate_early(id, len, turn) else { return false };
        self.replace_memory(id, old, memory, turn);
        true
    }

    /// Frees memory of a task.
    pub(super) fn free_charged(&mut self, id: TaskId, memory: Segment, ring: &mut KernelRing) {
        let task = self.tasks.of_mut(id);
        task.charged -= charge_of(memory);
        let index = task.connection;
        self.release(index, memory, ring);
    }

    /// Queues a task for memory. If no memory is in use that could be freed, the task ends with BUSY.
    pub(super) fn await_memory(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        if !self.budget.is_used() || !self.settle(id, turn) {
            self.tasks.of_mut(id).work = Work::Ended(Box::new(Outcome::status(ScsiStatus::Busy)));
            return self.advance(id, turn);
        }
        let task = self.tasks.of_mut(id);
        task.phase = Phase::Memory;
        let (session, resumed) = (task.session, std::mem::take(&mut task.resumed));
        if let Some(session) = self.session_mut(session) {
            session.begins_to_wait();
        }
        self.budget.wait(id, resumed);
    }

    /// Retries the allocation for a task at the head of the queue for memory.
    pub(super) fn resume(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        if self.tasks.find(id).is_none_or(|task| task.phase != Phase::Memory) {
            return self.budget.line_moves();
        }
        self.stops_waiting(id);
        let task = self.tasks.of_mut(id);
        (task.phase, task.resumed) = (Phase::Begun, true);
        self.advance(id, turn);
        if let Some(task) = self.tasks.find(id)
            && task.resumed
        {
            self.tasks.of_mut(id).resumed = false;
        }
    }

    /// Records that a task no longer waits for memory or a tag.
    pub(super) fn stops_waiting(&mut self, id: TaskId) {
        let session = self.tasks.of(id).session;
        if let Some(session) = self.session_mut(session) {
            session.waiting -= 1;
        }
    }

    /// Frees memory of a task that has ended, once the connection has sent the replies gathered so far.
    #[inline]
    pub(super) fn free_when_sent(&mut self, index: u32, memory: Segment, ring: &mut KernelRing) {
        let freed = match self.connections.get_mut(index as usize).and_then(Option::as_mut) {
            Some(connection) if !connection.closed => connection.outbox.free_when_sent(memory, ring),
            _ => {
                ring.free(memory);
                true
            }
        };
        if freed {
            self.discharge(index, charge_of(memory));
        }
    }
}
