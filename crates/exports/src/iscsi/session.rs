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

/// Most immediate commands of a session in progress; more are rejected (RFC 7143, section 4.2.2.1).
pub(super) const IMMEDIATE_MAX: u32 = 32;

/// A logical unit of a session. Its index stays until its last task has ended.
pub(super) struct LunEntry {
    pub(super) lun: Lun,
    pub(super) queue: QueueId,
    pub(super) nexus: Arc<Nexus>,
    /// It accepts no more commands, and is dropped with its last task.
    pub(super) removed: bool,
    /// Tasks that refer to it.
    pub(super) tasks: u32,
    /// Of these, tasks that began and have not ended.
    running: u32,
    /// One of them is ordered.
    barrier: bool,
    /// Tasks that wait for others, in order of arrival.
    waiting: VecDeque<TaskId>,
}

impl LunEntry {
    /// Whether a task may begin now (SAM-6, section 8.6). If so, it counts as running; otherwise it waits.
    ///
    /// The task set is that of the nexus: ORDERED waits for earlier commands of this session only.
    #[inline]
    pub(super) fn may_begin(&mut self, id: TaskId, attribute: TaskAttribute) -> bool {
        let free = match attribute {
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

    /// A running task has ended.
    #[inline]
    pub(super) fn ended(&mut self, attribute: TaskAttribute) {
        self.running -= 1;
        if attribute == TaskAttribute::Ordered {
            self.barrier = false;
        }
    }

    /// Whether tasks wait for others.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next task that may begin, which counts as running now. `attribute_of` returns the attribute of a task.
    pub(super) fn next_waiting(&mut self, attribute_of: impl Fn(TaskId) -> TaskAttribute) -> Option<TaskId> {
        let first = *self.waiting.front()?;
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

    /// A waiting task was aborted.
    pub(super) fn forget(&mut self, id: TaskId) {
        self.waiting.retain(|&waiting| waiting != id);
    }
}

/// A non-immediate PDU whose turn has not come, because earlier commands are missing.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeldPdu {
    /// A SCSI command.
    Task(TaskId),
    /// Any other, with its connection and data.
    Pdu(u32, Request, Option<Segment>),
}

/// State of a session's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    /// It is in the full feature phase.
    Alive,
    /// The initiator was asked to log out, and has this long left.
    LogoutRequested(EndReason, Duration),
    /// Its connections are being closed and its tasks end without a response.
    Ending(EndReason),
}

pub(super) struct Session {
    /// Its number in traces.
    pub(super) number: u16,
    pub(super) target: String,
    pub(super) rules: WriteRules,
    pub(super) time2wait: u16,
    /// iSCSIProtocolLevel: 2 and above have the fields of RFC 7144.
    pub(super) protocol_level: u8,
    pub(super) window: CommandWindow,
    /// Commands that ended while others of the session waited for memory or tags: the window does not open
    /// for them yet.
    pub(super) withheld: u32,
    /// Tasks that wait for memory or a tag.
    pub(super) waiting: u32,
    /// Tasks of the session.
    pub(super) tasks: u32,
    /// Immediate commands in progress.
    pub(super) immediate: u32,
    pub(super) connections: Vec<u32>,
    /// LUNs by index; `None`: free.
    pub(super) luns: Vec<Option<LunEntry>>,
    /// Numbers of the LUNs that accept commands with their indices, by number.
    numbers: Vec<(u16, u16)>,
    /// The LUNs that accept commands, for REPORT LUNS.
    listed: Vec<Lun>,
    /// PDUs whose turn has not come, with their CmdSN, in no order.
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

    /// The index of the LUN that a field names.
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

    /// Replaces the LUNs. One with an unchanged nexus and queue stays as it is. Returns the queues that lost a
    /// LUN at once, and those that got one.
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
            // One that stays, or a number that occurs twice.
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

    /// Removes the LUNs of this queue. Returns whether one was dropped at once.
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

    /// A task of a LUN has ended. Returns the queue whose LUN was dropped with it.
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

    /// A connection is gone: nothing of it waits any more.
    pub(super) fn forget_connection(&mut self, index: u32) {
        self.connections.retain(|&other| other != index);
        self.early_functions.retain(|(connection, _)| *connection != index);
    }

    /// A non-immediate command has ended: opens the window for another, unless the session is short of memory
    /// or tags.
    #[inline]
    pub(super) fn open_window(&mut self) {
        self.withheld += 1;
        if self.waiting == 0 {
            for _ in 0..std::mem::take(&mut self.withheld) {
                self.window.complete();
            }
        }
    }

    /// A task begins to wait for memory or a tag.
    pub(super) fn begins_to_wait(&mut self) {
        self.waiting += 1;
        SessionCounters::add(&self.counters.waited, 1);
    }

    /// Whether the session is in its full feature phase.
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
