//! A session: its connections, its LUNs, and the numbering of its commands.

use super::exchange::Exchange;
use super::setup::{EndReason, LunSetup, Pings, SendTargets, SessionCounters, SessionSetup, WhenGone};
use super::task::{NO_LUN, TaskId};
use block::Segment;
use proto::iscsi::pdu::{Request, TaskAttribute, TaskManagement};
use proto::iscsi::sequence::CommandWindow;
use proto::iscsi::transfer::WriteRules;
use queue::QueueId;
use scsi::{Lun, Nexus};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of a session's immediate commands in progress; more are rejected (RFC 7143, section
/// 4.2.2.1).
pub(super) const IMMEDIATE_MAX: u32 = 32;

/// A logical unit of a session. Its index stays until its last task has ended.
pub(super) struct LunEntry {
    pub(super) lun: Lun,
    pub(super) queue: QueueId,
    pub(super) nexus: Arc<Nexus>,
    /// Whether it accepts no more commands; it is dropped with its last task.
    pub(super) removed: bool,
    /// Number of tasks that refer to it.
    pub(super) tasks: u32,
    /// Number of those tasks that have begun and not ended.
    running: u32,
    /// Whether one of the running tasks is ORDERED.
    barrier: bool,
    /// Tasks that wait for others or for the refresh, in order of arrival.
    waiting: VecDeque<TaskId>,
    /// Whether the unit's reservations are being read again; no task begins meanwhile.
    pub(super) is_refreshing: bool,
}

impl LunEntry {
    /// Returns whether a task may begin now (SAM-6, section 8.6). If so, it counts as running; otherwise it
    /// waits.
    ///
    /// Each nexus has its own task set: ORDERED waits only for earlier commands of this session.
    #[inline]
    pub(super) fn may_begin(&mut self, id: TaskId, attribute: TaskAttribute) -> bool {
        let free = match attribute {
            _ if self.is_refreshing => false,
            TaskAttribute::HeadOfQueue => true,
            TaskAttribute::Ordered => self.waiting.is_empty() && self.running == 0,
            TaskAttribute::Untagged | TaskAttribute::Simple | TaskAttribute::Aca => {
                self.waiting.is_empty() && !self.barrier
            }
        };
        if free {
            self.running += 1;
            self.barrier |= attribute == TaskAttribute::Ordered;
        } else {
            self.waiting.push_back(id);
        }
        free
    }

    /// Records the end of a running task.
    #[inline]
    pub(super) fn ended(&mut self, attribute: TaskAttribute) {
        self.running -= 1;
        if attribute == TaskAttribute::Ordered {
            self.barrier = false;
        }
    }

    /// Returns whether any task waits for others.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the tasks that wait, in order of arrival.
    pub(super) fn waiting(&self) -> impl Iterator<Item = TaskId> + '_ {
        self.waiting.iter().copied()
    }

    /// Returns the next task that may begin, and counts it as running. `attribute_of` returns a task's
    /// attribute.
    pub(super) fn next_waiting(&mut self, attribute_of: impl Fn(TaskId) -> TaskAttribute) -> Option<TaskId> {
        let first = *self.waiting.front().filter(|_| !self.is_refreshing)?;
        let attribute = attribute_of(first);
        let free = match attribute {
            TaskAttribute::Ordered => self.running == 0,
            _ => !self.barrier,
        };
        if !free {
            return None;
        }
        self.running += 1;
        self.barrier |= attribute == TaskAttribute::Ordered;
        self.waiting.pop_front()
    }

    /// Removes a waiting task that was aborted.
    pub(super) fn forget(&mut self, id: TaskId) {
        self.waiting.retain(|&waiting| waiting != id);
    }
}

/// A non-immediate PDU that is held because earlier commands are missing.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeldPdu {
    /// A SCSI command.
    Task(TaskId),
    /// Any other PDU, with its connection and data.
    Pdu(u32, Request, Option<Segment>),
}

/// Progress of a session's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    /// The session is in the full feature phase.
    Alive,
    /// The initiator was asked to log out, and has this much time left.
    LogoutRequested(EndReason, Duration),
    /// The connections are being closed, and the tasks end without a response.
    Ending(EndReason),
}

pub(super) struct Session {
    /// Number of the session in traces.
    pub(super) number: u16,
    pub(super) target: String,
    pub(super) rules: WriteRules,
    pub(super) time2wait: u16,
    /// iSCSIProtocolLevel: from 2 on, the fields of RFC 7144 are used.
    pub(super) protocol_level: u8,
    pub(super) window: CommandWindow,
    /// Number of commands that ended while others of the session waited for memory or tags; the window has
    /// not been opened for them yet.
    pub(super) withheld: u32,
    /// Number of tasks that wait for memory or a tag.
    pub(super) waiting: u32,
    /// Number of tasks of the session.
    pub(super) tasks: u32,
    /// Number of immediate commands in progress.
    pub(super) immediate: u32,
    pub(super) connections: Vec<u32>,
    /// LUNs by index; `None` marks a free index.
    pub(super) luns: Vec<Option<LunEntry>>,
    /// Numbers and indices of the LUNs that accept commands, sorted by number.
    numbers: Vec<(u16, u16)>,
    /// The LUNs that accept commands, for REPORT LUNS.
    listed: Vec<Lun>,
    /// Held PDUs with their CmdSN, in no particular order.
    pub(super) held: Vec<(u32, HeldPdu)>,
    /// Immediate task management functions that wait for commands before them, with their connection.
    pub(super) early_functions: Vec<(u32, TaskManagement)>,
    pub(super) life: Life,
    pub(super) send_targets: SendTargets,
    pub(super) pings: Option<Pings>,
    pub(super) counters: Arc<SessionCounters>,
    pub(super) when_gone: Option<WhenGone>,
    pub(super) exchange: Arc<Exchange>,
}

impl Session {
    pub(super) fn new(setup: SessionSetup) -> Session {
        let window = CommandWindow::new(setup.exp_cmd_sn, u32::from(setup.queue_depth));
        setup.counters.set_window(&window);
        Session {
            number: setup.number,
            target: setup.target,
            rules: setup.parameters.write_rules(),
            time2wait: setup.parameters.default_time2wait,
            protocol_level: setup.parameters.protocol_level,
            window,
            withheld: 0,
            waiting: 0,
            tasks: 0,
            immediate: 0,
            connections: Vec::new(),
            luns: Vec::new(),
            numbers: Vec::new(),
            listed: Vec::new(),
            held: Vec::new(),
            early_functions: Vec::new(),
            life: Life::Alive,
            send_targets: setup.send_targets,
            pings: setup.pings,
            counters: setup.counters,
            when_gone: setup.when_gone,
            exchange: setup.exchange,
        }
    }

    /// Returns the index of the LUN that a LUN field names.
    #[inline]
    pub(super) fn find(&self, lun: Lun) -> Option<u16> {
        let number = lun.number()?;
        let at = match &*self.numbers {
            [(only, _)] if *only == number => 0,
            numbers => numbers.binary_search_by_key(&number, |entry| entry.0).ok()?,
        };
        Some(self.numbers[at].1)
    }

    #[inline]
    pub(super) fn lun(&self, index: u16) -> Option<&LunEntry> {
        self.luns.get(usize::from(index))?.as_ref()
    }

    #[inline]
    pub(super) fn lun_mut(&mut self, index: u16) -> Option<&mut LunEntry> {
        self.luns.get_mut(usize::from(index))?.as_mut()
    }

    /// Replaces the LUNs. A LUN with an unchanged nexus and queue is kept. Returns the queues that lost a
    /// LUN at once, and the queues that gained one.
    pub(super) fn change_luns(&mut self, setups: Vec<LunSetup>) -> (Vec<QueueId>, Vec<QueueId>) {
        let (mut lost, mut got) = (Vec::new(), Vec::new());
        for index in 0..self.luns.len() {
            let Some(entry) = &mut self.luns[index] else { continue };
            let stays = setups.iter().any(|setup| is_of(entry, setup));
            if stays || entry.removed {
                continue;
            }
            entry.removed = true;
            if entry.tasks == 0 {
                lost.push(entry.queue);
                self.luns[index] = None;
            }
        }
        for setup in setups {
            // Skip a LUN that is kept, or a number that occurs twice.
            let mut live = self.luns.iter().flatten().filter(|entry| !entry.removed);
            if live.any(|entry| entry.lun.number() == setup.lun.number()) || setup.lun.number().is_none() {
                continue;
            }
            got.push(setup.queue);
            let entry = LunEntry {
                lun: setup.lun,
                queue: setup.queue,
                nexus: setup.nexus,
                removed: false,
                tasks: 0,
                running: 0,
                barrier: false,
                waiting: VecDeque::new(),
                is_refreshing: false,
            };
            match self.luns.iter().position(Option::is_none) {
                Some(free) => self.luns[free] = Some(entry),
                None if self.luns.len() < usize::from(NO_LUN) => self.luns.push(Some(entry)),
                None => drop(got.pop()),
            }
        }
        self.list_luns();
        (lost, got)
    }

    /// Removes the LUNs of this queue. Returns how many were dropped at once.
    pub(super) fn remove_queue(&mut self, queue: QueueId) -> u32 {
        let mut dropped = 0;
        for slot in &mut self.luns {
            let Some(entry) = slot.as_mut().filter(|entry| entry.queue == queue && !entry.removed) else {
                continue;
            };
            entry.removed = true;
            if entry.tasks == 0 {
                *slot = None;
                dropped += 1;
            }
        }
        self.list_luns();
        dropped
    }

    fn list_luns(&mut self) {
        let live = self.luns.iter().enumerate();
        let live = live.filter_map(|(index, entry)| Some((index, entry.as_ref().filter(|e| !e.removed)?)));
        self.numbers = live.filter_map(|(index, e)| Some((e.lun.number()?, index as u16))).collect();
        self.numbers.sort_unstable();
        self.listed = self.numbers.iter().map(|(number, _)| Lun::new(*number)).collect();
    }

    /// Records the end of a LUN's task. Returns the queue of the LUN if the LUN was dropped with the task.
    #[inline]
    pub(super) fn release_lun(&mut self, index: u16) -> Option<QueueId> {
        let slot = self.luns.get_mut(usize::from(index))?;
        let entry = slot.as_mut()?;
        entry.tasks -= 1;
        if !entry.removed || entry.tasks > 0 {
            return None;
        }
        slot.take().map(|entry| entry.queue)
    }

    /// Removes everything that waits on behalf of a connection that is gone.
    pub(super) fn forget_connection(&mut self, index: u32) {
        self.connections.retain(|&other| other != index);
        self.early_functions.retain(|(connection, _)| *connection != index);
    }

    /// Records the end of a non-immediate command: opens the window for another, unless tasks of the
    /// session wait for memory or tags.
    #[inline]
    pub(super) fn open_window(&mut self) {
        self.withheld += 1;
        if self.waiting == 0 {
            for _ in 0..std::mem::take(&mut self.withheld) {
                self.window.complete();
            }
        }
    }

    /// Records that a task begins to wait for memory or a tag.
    pub(super) fn begins_to_wait(&mut self) {
        self.waiting += 1;
        SessionCounters::add(&self.counters.waited, 1);
    }

    /// Returns whether the session is in its full feature phase.
    pub(super) fn is_alive(&self) -> bool {
        !matches!(self.life, Life::Ending(_))
    }
}

fn is_of(entry: &LunEntry, setup: &LunSetup) -> bool {
    entry.lun.number() == setup.lun.number()
        && entry.queue == setup.queue
        && Arc::ptr_eq(&entry.nexus, &setup.nexus)
}

impl scsi::Session for Session {
    fn luns(&self) -> &[Lun] {
        &self.listed
    }

    fn find_unit(&self, naa: &[u8]) -> Option<Arc<Nexus>> {
        let live = self.luns.iter().flatten().filter(|entry| !entry.removed);
        let mut live = live.filter(|entry| entry.nexus.unit().identity().naa == naa);
        live.next().map(|entry| entry.nexus.clone())
    }
}
