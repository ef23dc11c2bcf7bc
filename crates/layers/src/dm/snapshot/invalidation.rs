//! Writes the header of a snapshot that became invalid, before a write to its origin changes the content of
//! the snapshot.
//!
//! After a restart only the COW device records whether the snapshot is valid. So a write without a copy goes
//! to the origin only once the header on disk says that the snapshot is invalid. Background work writes the
//! header, and retries until that succeeds. Writes to the origin wait for up to [`HEADER_TIMEOUT_NS`], then
//! fail while the header cannot be written. Until then the header is correct: the origin is unchanged
//! wherever the snapshot has no exception on disk.

use super::super::background::{BackgroundWork, Disks};
use super::store::{Header, Store};
use block::{Bytes, Fact};
use queue::Nanos;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The device number of the COW device: the second device of the table line.
const COW: usize = 1;
/// The time between two attempts to write the header; it doubles each time.
const RETRY_NS_MIN: u64 = 50_000_000;
const RETRY_NS_MAX: u64 = 1_000_000_000;
/// The time for which writes to the origin wait for the header, from the first failed attempt on, in
/// nanoseconds.
const HEADER_TIMEOUT_NS: u64 = 5_000_000_000;

/// Failed attempts to write the header.
#[derive(Debug)]
struct Attempts {
    /// The time of the first failed attempt; `None`: no attempt has failed.
    since: Option<Nanos>,
    next: Nanos,
    retry_ns: u64,
    why: String,
}

impl Attempts {
    const NONE: Attempts =
        Attempts { since: None, next: Nanos(0), retry_ns: RETRY_NS_MIN, why: String::new() };
}

/// The state of a store, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Valid,
    /// The snapshot is invalid; the header is about to be written.
    HeaderPending,
    /// The snapshot is invalid; the header cannot be written, so writes to the origin that need a copy fail.
    HeaderFailing,
    /// The snapshot is invalid, and the header says so.
    HeaderWritten,
}

/// The background work that writes the header of an invalid snapshot.
#[derive(Debug)]
pub(super) struct Invalidation {
    store: Arc<Store>,
    /// The COW device's name in the table line.
    cow: String,
    attempts: Mutex<Attempts>,
    reported: Mutex<State>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Invalidation {
    pub(super) fn new(store: Arc<Store>, cow: &str) -> Invalidation {
        let reported = Mutex::new(State::Valid);
        Invalidation { store, cow: cow.to_owned(), attempts: Mutex::new(Attempts::NONE), reported }
    }

    fn state(&self) -> State {
        match (self.store.is_valid(), self.store.is_header_written(), self.store.is_header_failing()) {
            (true, ..) => State::Valid,
            (false, true, _) => State::HeaderWritten,
            (false, false, true) => State::HeaderFailing,
            (false, false, false) => State::HeaderPending,
        }
    }

    fn sentence(&self, state: State) -> Option<String> {
        let cow = &self.cow;
        match state {
            State::Valid | State::HeaderPending => None,
            State::HeaderWritten => Some(format!(
                "the snapshot on {cow} is invalid: its COW device is full or failed, the origin could not be \
                 read, or the origin was written without a copy for it"
            )),
            State::HeaderFailing => {
                let why = lock(&self.attempts).why.clone();
                Some(format!(
                    "the snapshot on {cow} is invalid, and its header cannot be written to record that: {why}; \
                     writes to the origin that need a copy fail until it can (to allow them, remove the \
                     snapshot's device and do not use {cow} again)"
                ))
            }
        }
    }

    /// Returns the line of `show` about an invalid snapshot.
    pub(super) fn describe(&self) -> Vec<Fact> {
        self.sentence(self.state()).map(|text| ("snapshot", text)).into_iter().collect()
    }

    /// Returns messages about changes since the last call, for the log of the process.
    pub(super) fn notices(&self) -> Vec<String> {
        let now = self.state();
        let before = std::mem::replace(&mut *lock(&self.reported), now);
        if now == before { Vec::new() } else { self.sentence(now).into_iter().collect() }
    }
}

impl BackgroundWork for Invalidation {
    fn is_due(&self, now: Nanos) -> bool {
        self.store.is_header_pending() && now >= lock(&self.attempts).next
    }

    fn step(&self, now: Nanos, disks: &mut dyn Disks) {
        let chunk = self.store.chunk;
        let mut bytes = vec![0; chunk.bytes().0 as usize];
        bytes[..16].copy_from_slice(&Header { valid: false, chunk }.encode());
        let result = disks.write_durably(COW, Bytes::ZERO, &bytes);
        let mut attempts = lock(&self.attempts);
        match result {
            Ok(()) => {
                *attempts = Attempts::NONE;
                self.store.set_header_written();
            }
            Err(why) => {
                let since = *attempts.since.get_or_insert(now);
                attempts.why = why.to_string();
                attempts.next = now.after(attempts.retry_ns);
                attempts.retry_ns = (2 * attempts.retry_ns).min(RETRY_NS_MAX);
                if now >= since.after(HEADER_TIMEOUT_NS) {
                    self.store.set_header_failing();
                }
            }
        }
    }
}
