//! Storing of reservations for PERSISTENT RESERVE OUT with APTPL: a thread that may block stores them, and
//! the command waits for that. Each reactor starts such a thread when it is first needed.

use super::exchange::{Inbox, Mail};
use super::task::{Fate, Phase, TaskId, Work};
use super::{Front, Turn};
use scsi::{Outcome, ScsiStatus, StoreReservations};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// A command that waits for its reservations to be stored.
struct Job {
    id: TaskId,
    arrival: u64,
    store: Box<StoreReservations>,
}

/// The thread that stores a reactor's reservations. It ends when this handle is dropped.
pub(super) struct Storer(Sender<Job>);

impl Storer {
    fn start(inbox: Arc<Inbox>) -> std::io::Result<Storer> {
        let (jobs, incoming) = channel();
        std::thread::Builder::new().name("reservations".to_owned()).spawn(move || run(&incoming, &inbox))?;
        Ok(Storer(jobs))
    }
}

fn run(jobs: &Receiver<Job>, inbox: &Inbox) {
    for Job { id, arrival, store } in jobs {
        let outcome = Box::new(store.run());
        inbox.post(Mail::Stored { id, arrival, outcome });
    }
}

impl Front {
    /// Stores the reservations of a task in the background.
    pub(super) fn store(&mut self, id: TaskId, turn: &mut Turn<'_>) {
        let task = self.tasks.of_mut(id);
        let Work::Store(store) = std::mem::replace(&mut task.work, Work::None) else { return };
        let job = Job { id, arrival: task.arrival, store };
        let left = match &self.inbox {
            Some(inbox) => {
                if self.storer.is_none() {
                    self.storer = Storer::start(inbox.clone()).ok();
                }
                match &self.storer {
                    Some(storer) => storer.0.send(job).err().map(|error| error.0),
                    None => Some(job),
                }
            }
            None => Some(job),
        };
        let task = self.tasks.of_mut(id);
        if left.is_none() {
            (task.phase, task.in_stack) = (Phase::Stack, 1);
            return;
        }
        // No thread can be started at present.
        task.work = Work::Ended(Box::new(Outcome::status(ScsiStatus::Busy)));
        self.advance(id, turn);
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
}
