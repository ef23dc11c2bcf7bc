//! Tests of MP-6: which paths are activated when, and what happens to requests meanwhile.

use super::tests::{Bench, bench};
use super::*;
use block::{Bytes, Flags, Op, Request, Status};
use queue::Owner;
use std::time::{Duration, Instant};

const TWO: &str = "0 2 exec /activate 2 1 round-robin 0 2 0 a b round-robin 0 1 0 c";
const RETRIES: &str = "4 pg_init_retries 2 pg_init_delay_msecs 100 2 exec /activate 1 1 round-robin 0 1 0 a";

/// Returns the activations that are due.
fn begun(bench: &Bench, now: Instant) -> Vec<Activation> {
    bench.shared.due_activations(now)
}

fn paths(begun: &[Activation]) -> Vec<usize> {
    begun.iter().map(|activation| activation.path).collect()
}

/// Ends all due activations with an outcome. Returns their paths.
fn end(bench: &Bench, outcome: Outcome) -> Vec<usize> {
    let now = Instant::now();
    let begun = begun(bench, now);
    let wanted =
        begun.iter().filter(|activation| bench.shared.finish_activation(activation, outcome, now)).count();
    // The first busy path bypasses its group, so the outcomes of the other paths have no effect.
    assert_eq!(wanted, if outcome == Outcome::Busy { begun.len().min(1) } else { begun.len() });
    paths(&begun)
}

fn status(bench: &Bench) -> String {
    bench.shared.status(|path| ["a", "b", "c"][path].to_owned())
}

#[test]
fn mp_6_requests_are_held_until_all_paths_of_the_group_are_activated() {
    let mut bench = bench(TWO);
    assert_eq!(paths(&begun(&bench, Instant::now())), [], "the group is not current yet");
    bench.submit(Op::Write);
    assert!(bench.done().is_empty());
    let now = Instant::now();
    let begun = begun(&bench, now);
    assert_eq!(paths(&begun), [0, 1]);
    assert_eq!(paths(&bench.shared.due_activations(now)), [], "each activation is returned once");
    assert!(status(&bench).starts_with("2 1 1 0 2 1 A "), "{}", status(&bench));
    assert!(bench.shared.finish_activation(&begun[0], Outcome::Activated, now));
    bench.wait();
    assert!(bench.done().is_empty() && bench.seen() == [0, 0, 0], "the other path is not activated yet");
    assert!(bench.shared.finish_activation(&begun[1], Outcome::Activated, now));
    bench.wait();
    assert_eq!(bench.done(), [Status::Ok]);
    assert!(status(&bench).starts_with("2 0 1 0 2 1 A "), "{}", status(&bench));
    assert!((0..3).all(|_| bench.run(Op::Read).is_ok()));
    assert_eq!(bench.seen(), [2, 2, 0]);
}

#[test]
fn mp_6_a_nowait_request_returns_again() {
    let mut bench = bench(TWO);
    let tag = bench.queue.tag().unwrap();
    let mut request = Request::new(Op::Read, Bytes(0), Bytes(512));
    request.flags = Flags::NOWAIT;
    bench.queue.submit(tag, Owner(0), request, &mut bench.ring);
    assert_eq!(bench.done(), [Status::Again]);
}

#[test]
fn mp_6_a_retry_starts_after_the_delay() {
    let mut bench = bench(RETRIES);
    bench.submit(Op::Write);
    let start = Instant::now();
    let first = begun(&bench, start);
    assert!(bench.shared.finish_activation(&first[0], Outcome::Retry, start));
    assert_eq!(paths(&begun(&bench, start + Duration::from_millis(99))), []);
    let second = begun(&bench, start + Duration::from_millis(100));
    assert!(status(&bench).starts_with("2 1 2 0 1 1 A "), "{}", status(&bench));
    assert!(bench.shared.finish_activation(&second[0], Outcome::Activated, start));
    bench.wait();
    assert_eq!(bench.done(), [Status::Ok]);
}

#[test]
fn mp_6_exhausted_retries_fail_the_path() {
    let mut bench = bench(RETRIES);
    bench.submit(Op::Write);
    let mut now = Instant::now();
    for attempt in 0..3 {
        assert!(bench.shared.is_active(0), "{attempt}");
        let begun = begun(&bench, now);
        assert!(bench.shared.finish_activation(&begun[0], Outcome::Retry, now), "{attempt}");
        now += Duration::from_millis(100);
    }
    assert!(!bench.shared.is_active(0) && begun(&bench, now).is_empty());
    bench.wait();
    assert_eq!(bench.done(), [Status::IoError], "no other path is left");
}

#[test]
fn mp_6_a_failed_activation_fails_the_path_and_activates_the_next_group() {
    let mut bench = bench(TWO);
    bench.submit(Op::Write);
    assert_eq!(end(&bench, Outcome::Failed), [0, 1]);
    assert_eq!(bench.shared.valid_paths(), 1);
    bench.wait();
    assert!(bench.done().is_empty());
    assert_eq!(end(&bench, Outcome::Activated), [2]);
    bench.wait();
    assert_eq!((bench.done(), bench.seen()), (vec![Status::Ok], vec![0, 0, 1]));
}

#[test]
fn mp_6_a_failed_activation_does_not_block_the_other_paths() {
    let mut bench = bench(TWO);
    bench.submit(Op::Write);
    let now = Instant::now();
    let begun = begun(&bench, now);
    assert!(bench.shared.finish_activation(&begun[1], Outcome::Activated, now));
    assert!(bench.shared.finish_activation(&begun[0], Outcome::Failed, now));
    bench.wait();
    assert_eq!((bench.done(), bench.seen()), (vec![Status::Ok], vec![0, 1, 0]));
}

#[test]
fn mp_6_a_busy_group_is_bypassed_while_another_is_usable() {
    let mut bench = bench(TWO);
    bench.submit(Op::Write);
    assert_eq!(end(&bench, Outcome::Busy).len(), 2);
    assert!(status(&bench).contains("D 0 2 0 a A 0 b A 0"), "{}", status(&bench));
    bench.wait();
    assert_eq!(end(&bench, Outcome::Failed), [2]);
    bench.wait();
    assert!(bench.done().is_empty());
    // The last resort is activated after the default delay of 2 s.
    let now = Instant::now();
    assert_eq!(paths(&begun(&bench, now)), []);
    let late = begun(&bench, now + Duration::from_secs(3));
    assert_eq!(paths(&late), [0, 1]);
    assert!(late.iter().all(|path| bench.shared.finish_activation(path, Outcome::Activated, now)));
    bench.wait();
    assert_eq!(bench.done(), [Status::Ok]);
    assert!(!status(&bench).contains('D'), "{}", status(&bench));
}

#[test]
fn mp_6_a_reinstated_path_is_activated_before_use() {
    let mut bench = bench(TWO);
    bench.submit(Op::Write);
    assert_eq!(end(&bench, Outcome::Activated), [0, 1]);
    bench.wait();
    assert_eq!(bench.done(), [Status::Ok]);
    let before = bench.seen();
    bench.shared.fail_path(0);
    bench.shared.reinstate_path(0);
    assert!((0..2).all(|_| bench.run(Op::Read).is_ok()), "on the other path");
    assert_eq!(bench.seen()[0], before[0]);
    assert_eq!(end(&bench, Outcome::Activated), [0]);
    assert!((0..2).all(|_| bench.run(Op::Read).is_ok()));
    assert_eq!(bench.seen()[0], before[0] + 1);
    bench.shared.fail_path(2);
    bench.shared.reinstate_path(2);
    assert_eq!(end(&bench, Outcome::Activated), [], "paths of other groups are not activated");
}

#[test]
fn mp_6_a_group_is_activated_each_time_it_becomes_current() {
    let mut bench = bench(TWO);
    bench.submit(Op::Write);
    assert_eq!(end(&bench, Outcome::Activated), [0, 1]);
    bench.wait();
    for (words, path) in [(["switch_group", "2"], vec![2]), (["switch_group", "1"], vec![0, 1])] {
        bench.done();
        bench.shared.message(&words, |_| Vec::new()).unwrap();
        bench.submit(Op::Write);
        assert!(bench.done().is_empty(), "{words:?}");
        assert_eq!(end(&bench, Outcome::Activated), path);
        bench.wait();
        assert_eq!(bench.done(), [Status::Ok]);
    }
}

#[test]
fn mp_6_a_void_activation_has_no_effect() {
    let mut bench = bench(TWO);
    bench.submit(Op::Write);
    let now = Instant::now();
    let stale = begun(&bench, now);
    bench.shared.fail_path(0);
    bench.shared.reinstate_path(0);
    assert!(!bench.shared.is_wanted(&stale[0]) && bench.shared.is_wanted(&stale[1]));
    assert_eq!(paths(&begun(&bench, now)), [], "one activation of a path at a time");
    assert!(!bench.shared.finish_activation(&stale[0], Outcome::Activated, now));
    bench.shared.message(&["switch_group", "2"], |_| Vec::new()).unwrap();
    assert!(!bench.shared.finish_activation(&stale[1], Outcome::Failed, now));
    assert!(bench.shared.is_active(1), "a void activation does not fail the path");
    bench.wait();
    assert!(bench.done().is_empty());
    assert_eq!(end(&bench, Outcome::Activated), [2]);
}

#[test]
fn mp_6_a_device_being_removed_waits_for_no_path() {
    for line in [TWO, "1 queue_if_no_path 0 1 1 round-robin 0 1 0 a"] {
        let mut bench = bench(line);
        bench.shared.fail_path(0);
        bench.submit(Op::Write);
        bench.wait();
        assert!(bench.done().is_empty());
        bench.shared.prepare_removal();
        bench.wait();
        assert_eq!(bench.done(), [Status::IoError], "{line}");
    }
}

#[test]
fn mp_6_a_suspension_pushes_requests_back_or_waits_for_activation() {
    let mut held = bench(TWO);
    held.submit(Op::Write);
    held.queue.freeze();
    held.shared.presuspend(true);
    held.wait();
    assert!(held.queue.is_drained() && begun(&held, Instant::now()).is_empty());
    let mut flushed = bench(TWO);
    flushed.submit(Op::Write);
    flushed.queue.freeze();
    flushed.shared.presuspend(false);
    flushed.wait();
    assert!(!flushed.queue.is_drained(), "its paths are being activated");
    assert_eq!(end(&flushed, Outcome::Activated), [0, 1]);
    flushed.wait();
    assert_eq!((flushed.done(), flushed.queue.is_drained()), (vec![Status::Ok], true));
}
