//! Which requests time out, and when.

use super::*;

#[test]
fn a_timeout_cancels_once_a_period_and_changes_the_status_of_failures_only() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    bench.submit_at(0, 512);
    bench.submit_at(1, 512);
    bench.ring.now = Nanos(1099);
    assert_eq!(bench.queue.expire(&mut bench.ring), 0);
    bench.ring.now = Nanos(1100);
    assert_eq!(bench.queue.expire(&mut bench.ring), 2);
    assert_eq!(bench.queue.expire(&mut bench.ring), 0, "cancelled once");
    assert_eq!(bench.ring.cancelled, [disk.held(0), disk.held(1)]);
    assert_eq!(bench.statuses(), [], "the tags are their holder's until it says so");
    bench.ring.now = Nanos(2100);
    assert_eq!(bench.queue.expire(&mut bench.ring), 2, "cancelled again after another timeout");
    bench.complete(disk.held(0), Status::IoError);
    bench.complete(disk.held(1), Status::Ok);
    assert_eq!(bench.done(), [(0, Status::Timeout), (1, Status::Ok)]);
    bench.submit();
    bench.complete(disk.held(2), Status::IoError);
    assert_eq!(bench.statuses(), [Status::IoError], "the next under the tag starts afresh");
}

#[test]
fn requests_in_flight_age_while_frozen_and_held_back_ones_do_not() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    bench.submit_at(0, 512);
    bench.queue.freeze();
    bench.submit_at(1, 512);
    bench.ring.now = Nanos(900);
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    bench.queue.freeze();
    bench.ring.now = Nanos(1100);
    assert_eq!(
        bench.queue.expire(&mut bench.ring),
        1,
        "requests in flight age also while the queue is frozen"
    );
    assert_eq!(bench.ring.cancelled, [disk.held(0)]);
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    bench.ring.now = Nanos(1899);
    assert_eq!(bench.queue.expire(&mut bench.ring), 0, "the other entered the stack at the first thaw");
    bench.ring.now = Nanos(1900);
    assert_eq!(bench.queue.expire(&mut bench.ring), 1);
    assert_eq!(bench.ring.cancelled, [disk.held(0), disk.held(1)]);
}

#[test]
fn children_are_as_old_as_their_parent() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = over_one(Fan::new(1, 4, ChildKind::Piece), 1, &disk);
    bench.submit();
    bench.ring.now = Nanos(1000);
    bench.complete(disk.held(0), Status::Ok);
    bench.ring.now = Nanos(1100);
    bench.queue.expire(&mut bench.ring);
    assert_eq!(bench.ring.cancelled, [disk.held(1)]);
}
