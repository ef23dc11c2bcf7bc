//! Commands in the trace of their device: where they begin, which block requests they submit, and how they
//! end.
//!
//! If the device is not traced, a command costs three branches that are not taken.

use super::task::{NO_LUN, Task, TaskId};
use super::{Front, Turn};
use block::{Request, Tag};
use queue::{CommandEvent, CommandPoint, QueueId};
use scsi::ScsiStatus;

impl Front {
    /// Traces the begin of a logical unit's command.
    #[inline]
    pub(super) fn trace_begin(&mut self, id: TaskId, queue: QueueId, turn: &mut Turn<'_>) {
        if turn.queues.get_mut(queue).wants_commands() {
            self.trace_begun(id, queue, turn);
        }
    }

    #[cold]
    fn trace_begun(&mut self, id: TaskId, queue: QueueId, turn: &mut Turn<'_>) {
        self.tasks.of_mut(id).is_traced = true;
        let point = self.command_point(id, CommandEvent::Begun);
        turn.queues.get_mut(queue).command(&point, turn.ring);
    }

    /// Traces the block request that a command submits next. `is_foreign`: the request is for another
    /// device than the command's own.
    #[cold]
    pub(super) fn trace_request(
        &mut self,
        id: TaskId,
        (queue, tag): (QueueId, Tag),
        req: &Request,
        is_foreign: bool,
        turn: &mut Turn<'_>,
    ) {
        let point = self.command_point(id, request_event(tag, req, is_foreign));
        turn.queues.get_mut(queue).command(&point, turn.ring);
    }

    /// Traces the end of a command. `sense` is its sense data as sent.
    #[cold]
    pub(super) fn trace_end(
        &mut self,
        id: TaskId,
        end: (ScsiStatus, &[u8]),
        is_silent: bool,
        bytes: u64,
        turn: &mut Turn<'_>,
    ) {
        let Some(queue) = self.queue_of(id).filter(|queue| self.has_queue(*queue)) else { return };
        let (status, sense) = (end.0 as u8, sense_code(end.1));
        let point = self.command_point(id, CommandEvent::Ended { status, sense, is_silent, bytes });
        turn.queues.get_mut(queue).command(&point, turn.ring);
    }

    pub(super) fn command_point(&self, id: TaskId, event: CommandEvent) -> CommandPoint {
        let task = self.tasks.of(id);
        let session = self.sessions.get(task.session as usize).and_then(Option::as_ref);
        let lun = session.filter(|_| task.lun != NO_LUN).and_then(|session| session.lun(task.lun));
        CommandPoint {
            number: number_of(task),
            session: session.map_or(0, |session| session.number),
            lun: lun.and_then(|lun| lun.lun.number()).unwrap_or_default(),
            task: task.itt,
            cdb: task.cdb,
            cdb_len: len_of(task),
            event,
        }
    }
}

/// Returns the command's number in the trace; commands are numbered in order of arrival.
fn number_of(task: &Task) -> u32 {
    task.arrival as u32
}

/// Returns the length of a CDB by its group code (SPC-6, section 4.2), because iSCSI pads short CDBs to 16
/// bytes.
fn len_of(task: &Task) -> u8 {
    let len = match task.cdb[0] >> 5 {
        0 => 6,
        1 | 2 => 10,
        3 if task.cdb[0] == 0x7F => task.cdb[7].saturating_add(8),
        5 => 12,
        _ => 16,
    };
    len.min(task.cdb_len)
}

/// Returns the event of a request that is submitted next.
pub(super) fn request_event(tag: Tag, req: &Request, is_foreign: bool) -> CommandEvent {
    CommandEvent::Request { tag, op: req.op, offset: req.offset, len: req.len, is_foreign }
}

/// Returns sense key, additional sense code and qualifier of sense data in either format (SPC-6, section
/// 4.4).
fn sense_code(sense: &[u8]) -> [u8; 3] {
    // The highest bit only states whether INFORMATION is valid.
    match sense {
        [0x70 | 0x71 | 0xF0 | 0xF1, _, key, _, _, _, _, _, _, _, _, _, code, qualifier, ..] => {
            [key & 0xf, *code, *qualifier]
        }
        [0x72 | 0x73, key, code, qualifier, ..] => [key & 0xf, *code, *qualifier],
        _ => [0; 3],
    }
}
