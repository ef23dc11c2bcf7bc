//! Loom models of notification suppression: no interleaving loses the last notification.
//!
//! Run by `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p blockyard-virtio --lib
//! models`, a step of `./x test`. One thread publishes two entries and notifies if that is wanted; the
//! other one consumes them, requests a notification and sleeps. Both directions use these functions, so
//! each model covers kicks and interrupts.

use super::Cursor;
use super::notify::{self, SUPPRESS, Word};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU16, AtomicU32};
use loom::thread;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};

/// Number of entries that are published, one after the other.
const COUNT: u16 = 2;

/// A model of an eventfd, which stays signalled until it is read.
struct Eventfd(AtomicBool);

impl Eventfd {
    /// Signals it with a read-modify-write, because loom has a total order only for these.
    fn signal(&self) {
        self.0.swap(true, AcqRel);
    }

    fn read(&self) -> bool {
        self.0.swap(false, AcqRel)
    }
}

/// Runs a publisher and a sleeper. `publish` publishes an entry and returns whether a notification is
/// wanted; `consume` consumes all entries from a given number on, requests a notification, and returns the
/// number of the next entry.
fn run<S: Send + Sync + 'static>(
    shared: fn() -> S,
    publish: fn(&S, u16) -> bool,
    consume: fn(&S, u16) -> u16,
) {
    let mut model = loom::model::Builder::new();
    // A lost notification takes only two switches between the threads. Exploring all interleavings would
    // take a minute.
    model.preemption_bound = Some(3);
    model.check(move || {
        let both = Arc::new((shared(), Eventfd(AtomicBool::new(false))));
        let other = both.clone();
        let sleeper = thread::spawn(move || {
            let mut next = consume(&other.0, 0);
            if other.1.read() {
                next = consume(&other.0, next);
            }
            next
        });
        for number in 0..COUNT {
            if publish(&both.0, number) {
                both.1.signal();
            }
        }
        let next = sleeper.join().unwrap();
        assert!(next == COUNT || both.1.read(), "asleep at {next} of {COUNT} without a notification");
    });
}

/// The shared words of a split ring: the event index or flags, and the index.
struct Split<W>(W, W);

fn publish_event<W: Word<u16>>(shared: &Split<W>, number: u16) -> bool {
    shared.1.set(number + 1, Release);
    notify::is_wanted_at(&shared.0, number, number + 1)
}

fn consume_event<W: Word<u16>>(shared: &Split<W>, mut next: u16) -> u16 {
    loop {
        // Notifications are suppressed while entries are consumed.
        shared.0.set(next.wrapping_sub(1), Relaxed);
        next = shared.1.get(Acquire);
        if !notify::arm_at(&shared.0, &shared.1, next) {
            return next;
        }
    }
}

#[test]
fn models_of_event_indexes_lose_no_notification() {
    run(|| Split(AtomicU16::new(u16::MAX), AtomicU16::new(0)), publish_event, consume_event);
}

#[test]
fn models_of_flags_lose_no_notification() {
    let publish = |shared: &Split<AtomicU16>, number: u16| {
        shared.1.set(number + 1, Release);
        notify::is_wanted_by_flag(&shared.0)
    };
    let consume = |shared: &Split<AtomicU16>, _| {
        loop {
            shared.0.set(SUPPRESS, Relaxed);
            let next = shared.1.get(Acquire);
            if !notify::arm_flag(&shared.0, &shared.1, next) {
                return next;
            }
        }
    };
    run(|| Split(AtomicU16::new(SUPPRESS), AtomicU16::new(0)), publish, consume);
}

/// The shared words of a packed ring: event suppression, and the flags of its descriptors.
struct Packed(AtomicU32, [AtomicU16; COUNT as usize]);

/// Returns the position of an entry; the ring has as many descriptors as entries are published.
fn cursor(number: u16) -> Cursor {
    let mut cursor = Cursor::START;
    cursor.advance(number, COUNT);
    cursor
}

fn publish_packed(shared: &Packed, number: u16) -> bool {
    let at = cursor(number);
    shared.1[usize::from(at.index)].set(notify::available_flags(at.wrap), Release);
    notify::is_wanted_packed(&shared.0, cursor(number + 1), 1, COUNT)
}

fn consume_packed(shared: &Packed, mut next: u16, event: fn(Cursor) -> u32) -> u16 {
    loop {
        shared.0.set(notify::EVENT_DISABLE, Relaxed);
        let is_published = |number: u16, flags: u16| notify::is_available(flags, cursor(number).wrap);
        let flags = |number: u16| &shared.1[usize::from(cursor(number).index)];
        while is_published(next, flags(next).get(Acquire)) {
            next += 1;
        }
        if !notify::arm_packed(&shared.0, event(cursor(next)), flags(next), |flags| is_published(next, flags))
        {
            return next;
        }
    }
}

fn packed() -> Packed {
    Packed(AtomicU32::new(notify::EVENT_DISABLE), [AtomicU16::new(0), AtomicU16::new(0)])
}

#[test]
fn models_of_packed_descriptor_events_lose_no_notification() {
    run(packed, publish_packed, |shared, next| consume_packed(shared, next, notify::event_at));
}

#[test]
fn models_of_packed_flags_lose_no_notification() {
    run(packed, publish_packed, |shared, next| consume_packed(shared, next, |_| notify::EVENT_ENABLE));
}

/// A word whose fence orders nothing.
struct Unfenced(AtomicU16);

impl Word<u16> for Unfenced {
    fn get(&self, order: Ordering) -> u16 {
        self.0.get(order)
    }

    fn set(&self, value: u16, order: Ordering) {
        self.0.set(value, order);
    }

    fn full_fence() {}
}

#[test]
#[should_panic(expected = "without a notification")]
fn models_find_the_notification_that_is_lost_without_fences() {
    let shared = || Split(Unfenced(AtomicU16::new(u16::MAX)), Unfenced(AtomicU16::new(0)));
    run(shared, publish_event, consume_event);
}
