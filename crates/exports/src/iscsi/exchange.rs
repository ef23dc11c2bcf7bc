//! Messages between the iSCSI front-ends of several reactors, so that task management of a logical unit
//! reaches the commands of all sessions.
//!
//! Only task management uses it: nothing here is on the path of a command.

use scsi::{LogicalUnit, Outcome};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Wakes a reactor, which then calls [`woken`](super::Front::woken).
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// The front-ends of a host that have sessions. The control plane creates one exchange and passes it to all
/// sessions.
#[derive(Default)]
pub struct Exchange {
    members: Mutex<Vec<Arc<Inbox>>>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange").field("members", &lock(&self.members).len()).finish()
    }
}

/// Tasks or sessions that a message aborts.
#[derive(Clone, Debug)]
pub(super) enum Scope {
    /// All tasks of these logical units, from any session.
    Units(Vec<Arc<LogicalUnit>>),
    /// All sessions of the target with this name.
    Target(String),
}

/// A message to a front-end.
#[derive(Clone)]
pub(super) enum Mail {
    /// Abort these tasks, and answer when they have ended. The end of a target's sessions is not answered.
    Abort { scope: Scope, from: Arc<Inbox>, token: u64 },
    /// The tasks of an abort message have ended.
    Aborted { token: u64 },
    /// Reservations were stored for the task with this number and order of arrival.
    Stored { id: u32, arrival: u64, outcome: Box<Outcome> },
    /// The reservations of a LUN were read, or could not be, for its tasks that arrived before `refreshed`.
    Refreshed { unit: Arc<LogicalUnit>, session: u32, lun: u16, refreshed: u64, is_ok: bool },
}

/// Unread messages to a front-end.
pub(super) struct Inbox {
    mail: Mutex<Vec<Mail>>,
    wake: Wake,
}

impl Inbox {
    pub(super) fn new(wake: Wake) -> Arc<Inbox> {
        Arc::new(Inbox { mail: Mutex::default(), wake })
    }

    pub(super) fn post(&self, mail: Mail) {
        lock(&self.mail).push(mail);
        (self.wake)();
    }

    pub(super) fn take(&self) -> Vec<Mail> {
        std::mem::take(&mut *lock(&self.mail))
    }
}

impl Exchange {
    /// Adds a front-end. Has no effect if it is already a member.
    pub(super) fn join(&self, inbox: &Arc<Inbox>) {
        let mut members = lock(&self.members);
        if !members.iter().any(|member| Arc::ptr_eq(member, inbox)) {
            members.push(inbox.clone());
        }
    }

    /// Removes a front-end that has no sessions.
    pub(super) fn part(&self, inbox: &Arc<Inbox>) {
        lock(&self.members).retain(|member| !Arc::ptr_eq(member, inbox));
    }

    /// Returns all front-ends except this one.
    pub(super) fn others(&self, own: &Arc<Inbox>) -> Vec<Arc<Inbox>> {
        lock(&self.members).iter().filter(|member| !Arc::ptr_eq(member, own)).cloned().collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
