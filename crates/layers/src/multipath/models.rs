//! What queues and the control plane share, under every order in which their threads may run.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p blockyard-layers --lib models`, a step of `./x test`.
//! Each model is a handful of operations on two threads; loom tries all of their interleavings, and all that the memory
//! orders allow to be seen.

use super::{Config, Multipath, Outcome};
use loom::thread;
use std::sync::Arc;
use std::time::Instant;

/// Two groups: two paths, and one.
fn shared() -> Arc<Multipath> {
    of("0 0 2 1 round-robin 0 2 0 a b round-robin 0 1 0 c")
}

fn of(line: &str) -> Arc<Multipath> {
    Multipath::new(Config::parse(&line.split(' ').collect::<Vec<_>>()).expect("a line"))
}

/// `valid` is the number of paths that are active, when no change is under way.
fn balanced(shared: &Multipath) -> bool {
    shared.valid() as usize == (0..3).filter(|&path| shared.is_active(path)).count()
}

#[test]
fn a_path_that_two_queues_see_fail_is_counted_once() {
    loom::model(|| {
        let shared = shared();
        let other = shared.clone();
        let queue = thread::spawn(move || other.fail_path(0));
        let here = shared.fail_path(0);
        let there = queue.join().unwrap();
        assert!(here != there, "one of them took it out of use");
        assert_eq!((shared.valid(), shared.events()), (2, 1));
        assert!(balanced(&shared));
    });
}

#[test]
fn a_path_that_fails_while_it_is_reinstated_leaves_the_count_right() {
    loom::model(|| {
        let shared = shared();
        shared.fail_path(1);
        let other = shared.clone();
        let checker = thread::spawn(move || {
            other.reinstate_path(1);
        });
        shared.fail_path(1);
        checker.join().unwrap();
        assert!(balanced(&shared));
    });
}

#[test]
fn whoever_sees_the_epoch_sees_the_change() {
    loom::model(|| {
        let shared = shared();
        let (other, before) = (shared.clone(), shared.epoch());
        let queue = thread::spawn(move || {
            other.fail_path(0);
        });
        if shared.epoch() != before {
            assert!(!shared.is_active(0), "the epoch tells of a change that cannot be seen");
        }
        queue.join().unwrap();
        assert!(shared.epoch() != before, "a change that nobody would look for");
    });
}

#[test]
fn a_group_chosen_while_its_last_path_fails_is_not_kept() {
    loom::model(|| {
        let shared = shared();
        shared.fail_path(0);
        let other = shared.clone();
        let queue = thread::spawn(move || {
            other.fail_path(1);
        });
        let chosen = shared.group();
        assert!(chosen == Some(0) || chosen == Some(1));
        queue.join().unwrap();
        assert_eq!(shared.group(), Some(1), "the next look finds the group that is left");
    });
}

#[test]
fn a_switch_is_not_lost_to_a_queue_that_chooses_meanwhile() {
    loom::model(|| {
        let shared = shared();
        let other = shared.clone();
        let queue = thread::spawn(move || {
            other.group();
        });
        shared.message(&["switch_group", "2"], |_| Vec::new()).expect("it is heeded");
        queue.join().unwrap();
        assert_eq!(shared.group(), Some(1));
    });
}

#[test]
fn going_back_gives_way_to_a_switch() {
    loom::model(|| {
        let shared = shared();
        shared.fail_path(0);
        shared.fail_path(1);
        assert_eq!(shared.group(), Some(1));
        shared.reinstate_path(0);
        let other = shared.clone();
        let watcher = thread::spawn(move || {
            other.fail_back(1, 0);
        });
        shared.message(&["switch_group", "2"], |_| Vec::new()).expect("it is heeded");
        watcher.join().unwrap();
        // The message was last, or going back found the group no longer in use.
        assert_eq!(shared.group(), Some(1));
    });
}

#[test]
fn a_path_that_fails_while_it_is_activated_is_activated_again_before_it_is_used() {
    loom::model(|| {
        let shared = of("0 2 exec /activate 1 1 round-robin 0 1 0 a");
        assert_eq!(shared.group(), Some(0));
        let now = Instant::now();
        let begun = shared.to_activate(now);
        let other = shared.clone();
        let queue = thread::spawn(move || {
            other.fail_path(0);
        });
        shared.activated(&begun[0], Outcome::Activated, now);
        queue.join().unwrap();
        shared.reinstate_path(0);
        assert!(!shared.is_usable(0), "it was activated for nothing");
        let again = shared.to_activate(now);
        assert!(shared.activated(&again[0], Outcome::Activated, now) && shared.is_usable(0));
    });
}
