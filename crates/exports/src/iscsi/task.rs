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
/// Most tasks of a reactor: their numbers fit into target transfer tags, and leave out the reserved one.
pub(super) const TASKS_MAX: usize = (1 << 20) - 1;
/// Longest CDB, in bytes. A longer one is cut, and refused for its length.
pub(super) const CDB_MAX: usize = 32;
/// LUN index of a task without a logical unit.
pub(super) const NO_LUN: u16 = u16::MAX;

/// Memory of a task's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Memory {
    None,
    /// Allocated from the arena.
    Own(Segment),
    /// Part of a received chunk: all data of a small write.
    Chunk(Chunk, Segment),
}

/// State of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// The slot is free.
    Vacant,
    /// Earlier commands of the session have not arrived.
    Numbered,
    /// Waits for earlier commands of its logical unit, as its task attribute or theirs demands.
    Ordered,
    /// Begun: the next step is decided by [`Work`] and the data that has arrived.
    Begun,
    /// Waits until data that was read before it has been sent.
    Room,
    /// Waits for memory in the budget's queue.
    Memory,
    /// Waits for data-out.
    Data,
    /// Waits for a tag of its queue.
    Tag,
    /// Waits for exclusive access to a range of the device.
    Claim,
    /// Block requests are in the stack, or reservations are being stored.
    Stack,
    /// Waits for a program that continues without it.
    Detached,
    /// Its outcome is known; data-out that was announced is still to come.
    Ending,
}

/// What a task does, as the logical unit decided.
#[derive(Debug)]
pub(super) enum Work {
    /// Not begun.
    None,
    /// A single block request.
    Io(BlockIo),
    /// It begins again with its parameter list.
    Parameters(Box<Parameters>),
    /// Several block requests.
    Program(Box<Running>),
    /// It waits until a thread that may block has stored reservations.
    Store(Box<StoreReservations>),
    /// It has ended.
    Ended(Box<Outcome>),
}

/// How a task ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// With its own outcome.
    Own,
    /// Without a response.
    Silent,
    /// With the status TASK ABORTED: another session aborted it, and the control mode page has TAS set.
    TaskAborted,
}

pub(super) struct Task {
    pub(super) session: u32,
    pub(super) connection: u32,
    /// Index among the session's LUNs; [`NO_LUN`]: none.
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
    /// Counted among the running tasks of its LUN.
    pub(super) running: bool,
    /// Block requests in the stack.
    pub(super) in_stack: u8,
    /// Its request is a read that completes inline.
    pub(super) reads_inline: bool,
    /// Has been at the head of the budget's queue.
    pub(super) resumed: bool,
    /// It is in the trace of its device.
    pub(super) is_traced: bool,
    pub(super) cdb_len: u8,
    pub(super) cdb: [u8; CDB_MAX],
    /// Expected data transfer length, in bytes.
    pub(super) expected: u32,
    /// Bytes of data-out that the command uses; the rest is skipped.
    pub(super) wanted: u32,
    /// Its data-out; `None`: the command has no W bit, or its data broke the rules from the start.
    pub(super) plan: Option<WritePlan>,
    /// Sequences of Data-Out PDUs that have not ended: unsolicited data, and each R2T.
    pub(super) open: u8,
    /// The data segment of a PDU is arriving in parts.
    pub(super) filling: bool,
    /// One of them is unsolicited data.
    pub(super) unsolicited: bool,
    /// Data was lost or against the rules: the command fails with this additional sense code and qualifier
    /// when all sequences have ended.
    pub(super) broken: Option<(u8, u8)>,
    /// R2Ts and Data-In PDUs sent.
    pub(super) data_sn: u32,
    pub(super) memory: Memory,
    /// Memory for data of a program besides its data-out.
    pub(super) scratch: Segment,
    /// Bytes charged to the connection for both.
    pub(super) charged: u64,
    pub(super) work: Work,
    /// The nexus's epoch when the command began; another one at its end: it was aborted.
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

    /// Expected length of the data-in.
    pub(super) fn data_in(&self) -> u32 {
        if self.read { self.expected } else { 0 }
    }

    /// Expected length of the data-out.
    pub(super) fn data_out(&self) -> u32 {
        if self.write { self.expected } else { 0 }
    }

    /// The command descriptor block.
    pub(super) fn cdb(&self) -> &[u8] {
        &self.cdb[..usize::from(self.cdb_len).min(CDB_MAX)]
    }

    /// Whether it ends without its own outcome.
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
    /// Takes a free slot; the caller fills it in. `None`: there are too many.
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

    /// Frees a slot whose memory was given back.
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

    /// The task with this number, if it exists.
    pub(super) fn find(&self, id: TaskId) -> Option<&Task> {
        self.slots.get(id as usize).filter(|task| task.phase != Phase::Vacant)
    }

    /// All tasks in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TaskId, &Task)> {
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, task)| task.phase != Phase::Vacant).map(|(id, task)| (id as TaskId, task))
    }

    /// The number that the next task gets; all earlier tasks have smaller ones.
    pub(super) fn next_arrival(&self) -> u64 {
        self.arrivals + 1
    }
}
