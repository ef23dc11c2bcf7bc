//! Work on reservations that may block, for PERSISTENT RESERVE OUT with APTPL and for units whose
//! reservations other servers change as well. A thread executes it, and commands wait for that. Each reactor
//! starts such a thread when it is first needed.

use super::exchange::{Inbox, Mail};
use super::task::{Fate, Phase, TaskId, Work};
use super::{Front, Turn};
use scsi::{LogicalUnit, Outcome, ScsiStatus, StoreReservations};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Work of the thread.
enum Job {
    /// Store the reservations of a command.
    Store { id: TaskId, arrival: u64, store: Box<StoreReservations> },
    /// Read the reservations of a unit for the tasks of a LUN that arrived before `refreshed`.
    Refresh { unit: Arc<LogicalUnit>, session: u32, lun: u16, refreshed: u64 },
}

/// The thread that stores and reads reservations for a reactor. It ends when this handle is dropped.
pub(super) struct Storer(Sender<Job>);

impl Storer {
    fn start(inbox: Arc<Inbox>) -> std::io::Result<Storer> {
        let (jobs, incoming) = channel();
        std::thread::Builder::new().name("reservations".to_owned()).spawn(move || run(&incoming, &inbox))?;
        Ok(Storer(jobs))
    }
}

fn run(jobs: &Receiver<Job>, inbox: &Inbox) {
    for job in jobs {
        inbox.post(match job {
            Job::Store { id, arrival, store } => Mail::Stored { id, arrival, outcome: Box::new(store.run()) },
            Job::Refresh { unit, session, lun, refreshed } => {
                let is_ok = unit.refresh_reservations().is_ok();
                Mail::Refreshed { unit, session, lun, refreshed, is_ok }
            }
        });
    }
}

impl Front {
    /// Stores the reservations of a task in the background.
    pub(super) fn store(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of_mut(id);
        let Work::Store(store) = std::mem::replace(&mut task.work, Work::None) else { return };
        let job = Job::Store { id, arrival: task.arrival, store };
        let is_sent = self.hand_over(job);
        let task = self.tasks.of_mut(id);
        if is_sent {
            (task.phase, task.in_stack) = (Phase::Stack, 1);
            return;
        }
        task.work = Work::Ended(Box::new(Outcome::status(ScsiStatus::Busy)));
        self.advance(id, turn);
    }

    /// Hands work to the thread. Returns `false` if no thread can be started at present.
    fn hand_over(&mut self, job: Job) -> bool {
        let Some(inbox) = &self.inbox else { return false };
        if self.storer.is_none() {
            self.storer = Storer::start(inbox.clone()).ok();
        }
        self.storer.as_ref().is_some_and(|storer| storer.0.send(job).is_ok())
    }

    /// Handles the outcome of storing reservations.
    pub(super) fn stored(&mut self, id: TaskId, arrival: u64, outcome: Box<Outcome>, turn: &mut Turn<'_>) {
        if self.tasks.find(id).is_none_or(|task| task.arrival != arrival || task.in_stack == 0) {
            return;
        }
        let task = self.tasks.of_mut(id);
        task.in_stack = 0;
        if task.fate != Fate::Own {
            return self.end_task(id, &Outcome::good(0), turn);
        }
        (task.phase, task.work) = (Phase::Begun, Work::Ended(outcome));
        self.advance(id, turn);
    }

    /// Reads the reservations of a LUN in the background; its tasks wait for that.
    pub(super) fn refresh(&mut self, session: u32, lun: u16) {
        let refreshed = self.tasks.next_arrival();
        let Some(unit) = self.session_mut(session).and_then(|session| session.lun_mut(lun)) else { return };
        let unit = unit.nexus.unit().clone();
        if !self.hand_over(Job::Refresh { unit: unit.clone(), session, lun, refreshed })
            && let Some(inbox) = &self.inbox
        {
            inbox.post(Mail::Refreshed { unit, session, lun, refreshed, is_ok: false });
        }
    }

    /// Returns whether tasks of this unit wait for its reservations: the session or its LUN may have been
    /// replaced.
    pub(super) fn is_refreshing(&mut self, session: u32, lun: u16, unit: &Arc<LogicalUnit>) -> bool {
        let entry = self.session_mut(session).and_then(|session| session.lun_mut(lun));
        entry.is_some_and(|entry| entry.is_refreshing && Arc::ptr_eq(entry.nexus.unit(), unit))
    }

    /// Begins the tasks that waited until the reservations of their LUN were read. If that failed, they end
    /// with BUSY.
    pub(super) fn refreshed(
        &mut self,
        (session, lun): (u32, u16),
        refreshed: u64,
        is_ok: bool,
        turn: &mut Turn<'_>,
    ) {
        let entry = self.sessions.get_mut(session as usize).and_then(Option::as_mut);
        let Some(entry) = entry.and_then(|session| session.lun_mut(lun)) else { return };
        entry.is_refreshing = false;
        if !is_ok {
            for id in entry.waiting() {
                let task = self.tasks.of_mut(id);
                if task.arrival < refreshed {
                    task.work = Work::Ended(Box::new(Outcome::status(ScsiStatus::Busy)));
                }
            }
        }
        self.begin_waiting_of(session, lun, refreshed, turn);
    }
}
