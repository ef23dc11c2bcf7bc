//! Loom models of the state that queues and the control plane share.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p blockyard-layers --lib models`, a step
//! of `./x test`. Each model is a few operations on two threads; loom tries all interleavings and all values
//! that the memory orders allow.

use super::{Config, Multipath, Outcome};
use loom::thread;
use std::sync::Arc;
use std::time::Instant;

/// Creates the state of two groups: two paths, and one.
fn shared() -> Arc<Multipath> {
    of("0 0 2 1 round-robin 0 2 0 a b round-robin 0 1 0 c")
}

fn of(line: &str) -> Arc<Multipath> {
    Multipath::new(Config::parse(&line.split(' ').collect::<Vec<_>>()).expect("a line"))
}

/// Returns whether `valid` is the number of active paths, while no change is in progress.
fn balanced(shared: &Multipath) -> bool {
    shared.valid_paths() as usize == (0..3).filter(|&path| shared.is_active(path)).count()
}

#[test]
fn a_failure_seen_by_two_queues_is_counted_once() {
    loom::model(|| {
        let shared = shared();
        let other = shared.clone();
        let queue = thread::spawn(move || other.fail_path(0));
        let here = shared.fail_path(0);
        let there = queue.join().unwrap();
        assert!(here != there, "exactly one call fails the path");
        assert_eq!((shared.valid_paths(), shared.events()), (2, 1));
        assert!(balanced(&shared));
    });
}

#[test]
fn a_failure_during_reinstatement_keeps_the_count_correct() {
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
fn a_new_epoch_makes_the_change_visible() {
    loom::model(|| {
        let shared = shared();
        let (other, before) = (shared.clone(), shared.epoch());
        let queue = thread::spawn(move || {
            other.fail_path(0);
        });
        if shared.epoch() != before {
            assert!(!shared.is_active(0), "the epoch changed before the path");
        }
        queue.join().unwrap();
        assert!(shared.epoch() != before, "a change without a new epoch");
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
        let chosen = shared.choose_group();
        assert!(chosen == Some(0) || chosen == Some(1));
        queue.join().unwrap();
        assert_eq!(shared.choose_group(), Some(1), "the next choice finds the remaining group");
    });
}

#[test]
fn switch_group_is_not_lost_to_a_concurrent_choice() {
    loom::model(|| {
        let shared = shared();
        let other = shared.clone();
        let queue = thread::spawn(move || {
            other.choose_group();
        });
        shared.message(&["switch_group", "2"], |_| Vec::new()).expect("a valid message");
        queue.join().unwrap();
        assert_eq!(shared.choose_group(), Some(1));
    });
}

#[test]
fn failback_yields_to_switch_group() {
    loom::model(|| {
        let shared = shared();
        shared.fail_path(0);
        shared.fail_path(1);
        assert_eq!(shared.choose_group(), Some(1));
        shared.reinstate_path(0);
        let other = shared.clone();
        let watcher = thread::spawn(move || {
            other.fail_back(1, 0);
        });
        shared.message(&["switch_group", "2"], |_| Vec::new()).expect("a valid message");
        watcher.join().unwrap();
        // The message came last, or the failback found that the group is no longer current.
        assert_eq!(shared.choose_group(), Some(1));
    });
}

#[test]
fn a_path_that_fails_during_activation_is_activated_again() {
    loom::model(|| {
        let shared = of("0 2 exec /activate 1 1 round-robin 0 1 0 a");
        assert_eq!(shared.choose_group(), Some(0));
        let now = Instant::now();
        let begun = shared.due_activations(now);
        let other = shared.clone();
        let queue = thread::spawn(move || {
            other.fail_path(0);
        });
        shared.finish_activation(&begun[0], Outcome::Activated, now);
        queue.join().unwrap();
        shared.reinstate_path(0);
        assert!(!shared.is_usable(0), "the activation is void");
        let again = shared.due_activations(now);
        assert!(shared.finish_activation(&again[0], Outcome::Activated, now) && shared.is_usable(0));
    });
}
