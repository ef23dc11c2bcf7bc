//! A snapshot that is lost: its header has to say so before any write of its origin makes it wrong.
//!
//! A restart knows of the snapshot what its COW device says, so a write that is not copied goes to the origin only once the
//! header says that the snapshot is not valid. The header is written on the control plane, again and again until that
//! succeeds. Writes of the origin wait for [`PATIENCE_NS`], then fail for as long as the header cannot be written: until
//! then the header tells the truth, as the snapshot has all that it had when its last exception was stored.

use super::super::chore::{Chore, Disks};
use super::store::{Header, Store};
use block::{Bytes, Fact};
use queue::Nanos;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The second device of a table line.
const COW: usize = 1;
/// Time between two attempts to write the header: twice as long each time.
const RETRY_NS_MIN: u64 = 50_000_000;
const RETRY_NS_MAX: u64 = 1_000_000_000;
/// How long writes of the origin wait for the header, from the first attempt that failed.
const PATIENCE_NS: u64 = 5_000_000_000;

/// Attempts to write the header that failed.
#[derive(Debug)]
struct Attempts {
    /// When the first one was made. `None`: none has failed.
    since: Option<Nanos>,
    next: Nanos,
    retry_ns: u64,
    why: String,
}

impl Attempts {
    const NONE: Attempts =
        Attempts { since: None, next: Nanos(0), retry_ns: RETRY_NS_MIN, why: String::new() };
}

/// What the log of the process says of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    Valid,
    /// Lost, and the header is about to be written.
    Settling,
    /// Lost, and the header could not be written: writes of the origin fail.
    Stuck,
    /// Lost, as the header says.
    Recorded,
}

/// Writes to the header of a snapshot that is lost that it is.
#[derive(Debug)]
pub(super) struct Loss {
    store: Arc<Store>,
    /// The COW device, as the table line names it.
    cow: String,
    attempts: Mutex<Attempts>,
    reported: Mutex<Standing>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Loss {
    pub(super) fn new(store: Arc<Store>, cow: &str) -> Loss {
        let reported = Mutex::new(Standing::Valid);
        Loss { store, cow: cow.to_owned(), attempts: Mutex::new(Attempts::NONE), reported }
    }

    fn standing(&self) -> Standing {
        match (self.store.is_valid(), self.store.is_recorded(), self.store.is_stuck()) {
            (true, ..) => Standing::Valid,
            (false, true, _) => Standing::Recorded,
            (false, false, true) => Standing::Stuck,
            (false, false, false) => Standing::Settling,
        }
    }

    fn sentence(&self, standing: Standing) -> Option<String> {
        let cow = &self.cow;
        match standing {
            Standing::Valid | Standing::Settling => None,
            Standing::Recorded => Some(format!(
                "the snapshot on {cow} is lost: the device is full or failed, the origin could not be read, or a write \
                 passed the snapshot by"
            )),
            Standing::Stuck => {
                let why = lock(&self.attempts).why.clone();
                Some(format!(
                    "the snapshot on {cow} is lost, and its header cannot be written to say so: {why}; writes to the \
                     origin that would have to be copied fail until it can (remove the snapshot's device to let them \
                     go on, and do not use {cow} again)"
                ))
            }
        }
    }

    /// Returns what `show` says of a snapshot that is lost.
    pub(super) fn describe(&self) -> Vec<Fact> {
        self.sentence(self.standing()).map(|text| ("snapshot", text)).into_iter().collect()
    }

    /// Returns what changed since this was called last, for the log of the process.
    pub(super) fn notices(&self) -> Vec<String> {
        let now = self.standing();
        let before = std::mem::replace(&mut *lock(&self.reported), now);
        if now == before { Vec::new() } else { self.sentence(now).into_iter().collect() }
    }
}

impl Chore for Loss {
    fn is_due(&self, now: Nanos) -> bool {
        self.store.is_settling() && now >= lock(&self.attempts).next
    }

    fn step(&self, now: Nanos, disks: &mut dyn Disks) {
        let chunk = self.store.chunk;
        let mut bytes = vec![0; chunk.bytes().0 as usize];
        bytes[..16].copy_from_slice(&Header { valid: false, chunk }.encode());
        let result = disks.record(COW, Bytes::ZERO, &bytes);
        let mut attempts = lock(&self.attempts);
        match result {
            Ok(()) => {
                *attempts = Attempts::NONE;
                self.store.recorded();
            }
            Err(why) => {
                let since = *attempts.since.get_or_insert(now);
                attempts.why = why.to_string();
                attempts.next = now.after(attempts.retry_ns);
                attempts.retry_ns = (2 * attempts.retry_ns).min(RETRY_NS_MAX);
                if now >= since.after(PATIENCE_NS) {
                    self.store.stick();
                }
            }
        }
    }
}
