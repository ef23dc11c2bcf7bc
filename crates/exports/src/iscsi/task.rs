//! Tasks: the SCSI commands of a reactor's sessions, from arrival to response.
//!
//! A task moves through the states of [`Phase`]. Its data-out arrives independently of that ([`WritePlan`]).
//! Tasks live in one table per reactor; their numbers are the owners of their block requests.

use super::program::Running;
use block::Segment;
use proto::iscsi::pdu::TaskAttribute;
use proto::iscsi::transfer::WritePlan;
use ring::Chunk;
use scsi::{BlockIo, Outcome, Parameters, StoreReservations};

/// Number of a task in the table.
pub(super) type TaskId = u32;
/// Maximum number of tasks of a reactor: their numbers fit into target transfer tags, without the reserved
/// one.
pub(super) const TASKS_MAX: usize = (1 << 20) - 1;
/// Longest CDB, in bytes. A longer one is truncated, and refused for its length.
pub(super) const CDB_MAX: usize = 32;
/// LUN index of a task without a logical unit.
pub(super) const NO_LUN: u16 = u16::MAX;

/// Memory of a task's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Memory {
    None,
    /// Memory allocated from the arena.
    Own(Segment),
    /// Part of a received chunk that contains all data of a small write.
    Chunk(Chunk, Segment),
}

/// State of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// The slot is free.
    Vacant,
    /// Earlier commands of the session have not arrived.
    Numbered,
    /// The task waits for earlier commands of its logical unit, as its own or their task attribute
    /// requires.
    Ordered,
    /// The task has begun: [`Work`] and the data that has arrived decide the next step.
    Begun,
    /// The task waits until data that was read before has been sent.
    Room,
    /// The task waits for memory in the budget's queue.
    Memory,
    /// The task waits for data-out.
    Data,
    /// The task waits for a tag of its queue.
    Tag,
    /// The task waits for exclusive access to a range of the device.
    Claim,
    /// Block requests are in the stack, or reservations are being stored.
    Stack,
    /// The task waits for a program that continues without it.
    Detached,
    /// The outcome is known, but announced data-out is still to come.
    Ending,
}

/// Work of a task, as the logical unit decided.
#[derive(Debug)]
pub(super) enum Work {
    /// The task has not begun.
    None,
    /// Execute a single block request.
    Io(BlockIo),
    /// Begin again with the parameter list.
    Parameters(Box<Parameters>),
    /// Execute several block requests.
    Program(Box<Running>),
    /// Wait until a thread that may block has stored reservations.
    Store(Box<StoreReservations>),
    /// End with this outcome.
    Ended(Box<Outcome>),
}

/// Kind of a task's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// The task ends with its own outcome.
    Own,
    /// The task ends without a response.
    Silent,
    /// The task ends with TASK ABORTED: another session aborted it, and TAS is set in the control mode
    /// page.
    TaskAborted,
}

pub(super) struct Task {
    pub(super) session: u32,
    pub(super) connection: u32,
    /// Index among the session's LUNs, or [`NO_LUN`].
    pub(super) lun: u16,
    pub(super) phase: Phase,
    pub(super) fate: Fate,
    pub(super) itt: u32,
    /// LUN field of the command, for R2Ts.
    pub(super) lun_field: u64,
    pub(super) cmd_sn: u32,
    pub(super) immediate: bool,
    pub(super) read: bool,
    pub(super) write: bool,
    pub(super) attribute: TaskAttribute,
    /// Whether the task counts among the running tasks of its LUN.
    pub(super) running: bool,
    /// Number of block requests in the stack.
    pub(super) in_stack: u8,
    /// Whether the task's request is a read that completes inline.
    pub(super) reads_inline: bool,
    /// Whether the task has been at the head of the budget's queue.
    pub(super) resumed: bool,
    /// Whether the task is in the trace of its device.
    pub(super) is_traced: bool,
    pub(super) cdb_len: u8,
    pub(super) cdb: [u8; CDB_MAX],
    /// Expected data transfer length, in bytes.
    pub(super) expected: u32,
    /// Bytes of data-out that the command uses; the rest is skipped.
    pub(super) wanted: u32,
    /// Plan of the data-out; `None` if the command has no W bit, or its data violated the rules from the
    /// start.
    pub(super) plan: Option<WritePlan>,
    /// Number of Data-Out sequences that have not ended: unsolicited data, and each R2T.
    pub(super) open: u8,
    /// Whether the data segment of a PDU is arriving in parts.
    pub(super) filling: bool,
    /// Whether one of the open sequences is unsolicited data.
    pub(super) unsolicited: bool,
    /// Set if data was lost or violated the rules: the command fails with this additional sense code and
    /// qualifier when all sequences have ended.
    pub(super) broken: Option<(u8, u8)>,
    /// Number of R2Ts and Data-In PDUs sent.
    pub(super) data_sn: u32,
    pub(super) memory: Memory,
    /// Memory of a program for data other than its data-out.
    pub(super) scratch: Segment,
    /// Bytes charged to the connection for `memory` and `scratch`.
    pub(super) charged: u64,
    pub(super) work: Work,
    /// Epoch of the nexus when the command began. If it differs at the end, the command was aborted.
    pub(super) epoch: u64,
    /// Order of arrival among all tasks of the reactor.
    pub(super) arrival: u64,
}

impl Task {
    const VACANT: Task = Task {
        session: 0,
        connection: 0,
        lun: NO_LUN,
        phase: Phase::Vacant,
        fate: Fate::Own,
        itt: 0,
        lun_field: 0,
        cmd_sn: 0,
        immediate: false,
        read: false,
        write: false,
        attribute: TaskAttribute::Untagged,
        running: false,
        in_stack: 0,
        reads_inline: false,
        resumed: false,
        is_traced: false,
        cdb_len: 0,
        cdb: [0; CDB_MAX],
        expected: 0,
        wanted: 0,
        plan: None,
        open: 0,
        filling: false,
        unsolicited: false,
        broken: None,
        data_sn: 0,
        memory: Memory::None,
        scratch: Segment::EMPTY,
        charged: 0,
        work: Work::None,
        epoch: 0,
        arrival: 0,
    };

    /// Returns the expected length of the data-in, in bytes.
    pub(super) fn data_in(&self) -> u32 {
        if self.read { self.expected } else { 0 }
    }

    /// Returns the expected length of the data-out, in bytes.
    pub(super) fn data_out(&self) -> u32 {
        if self.write { self.expected } else { 0 }
    }

    /// Returns the command descriptor block.
    pub(super) fn cdb(&self) -> &[u8] {
        &self.cdb[..usize::from(self.cdb_len).min(CDB_MAX)]
    }

    /// Returns whether the task ends without its own outcome.
    pub(super) fn is_aborted(&self) -> bool {
        self.fate != Fate::Own
    }
}

/// The tasks of a reactor.
#[derive(Default)]
pub(super) struct Tasks {
    slots: Vec<Task>,
    free: Vec<TaskId>,
    arrivals: u64,
}

impl Tasks {
    /// Takes a free slot, which the caller fills in. Returns `None` if there are too many tasks.
    #[inline]
    pub(super) fn take(&mut self) -> Option<(TaskId, &mut Task)> {
        self.arrivals += 1;
        let id = match self.free.pop() {
            Some(id) => id,
            None if self.slots.len() < TASKS_MAX => {
                self.slots.push(Task::VACANT);
                self.slots.len() as TaskId - 1
            }
            None => return None,
        };
        let task = &mut self.slots[id as usize];
        debug_assert_eq!(task.phase, Phase::Vacant);
        task.arrival = self.arrivals;
        Some((id, task))
    }

    /// Frees a slot whose memory has been released.
    #[inline]
    pub(super) fn free(&mut self, id: TaskId) {
        let task = &mut self.slots[id as usize];
        debug_assert!(task.phase != Phase::Vacant && task.in_stack == 0 && task.charged == 0);
        task.phase = Phase::Vacant;
        task.work = Work::None;
        self.free.push(id);
    }

    #[inline]
    pub(super) fn of(&self, id: TaskId) -> &Task {
        &self.slots[id as usize]
    }

    #[inline]
    pub(super) fn of_mut(&mut self, id: TaskId) -> &mut Task {
        &mut self.slots[id as usize]
    }

    /// Returns the task with this number, if it exists.
    pub(super) fn find(&self, id: TaskId) -> Option<&Task> {
        self.slots.get(id as usize).filter(|task| task.phase != Phase::Vacant)
    }

    /// Iterates over all tasks in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TaskId, &Task)> {
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, task)| task.phase != Phase::Vacant).map(|(id, task)| (id as TaskId, task))
    }

    /// Returns the arrival number of the next task; all earlier tasks have smaller ones.
    pub(super) fn next_arrival(&self) -> u64 {
        self.arrivals + 1
    }
}
