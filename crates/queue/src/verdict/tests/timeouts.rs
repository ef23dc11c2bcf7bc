//! Which requests time out, and when.

use super::*;

#[test]
fn a_timeout_cancels_once_a_period_and_shows_only_when_it_fails() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    bench.submit_at(0, 512);
    bench.submit_at(1, 512);
    bench.ring.now = Nanos(1099);
    assert_eq!(bench.queue.expire(&mut bench.ring), 0);
    bench.ring.now = Nanos(1100);
    assert_eq!(bench.queue.expire(&mut bench.ring), 2);
    assert_eq!(bench.queue.expire(&mut bench.ring), 0, "asked once");
    assert_eq!(bench.ring.cancelled, [disk.held(0), disk.held(1)]);
    assert_eq!(bench.statuses(), [], "the tags are their holder's until it says so");
    bench.ring.now = Nanos(2100);
    assert_eq!(bench.queue.expire(&mut bench.ring), 2, "asked again when the time has passed again");
    bench.complete(disk.held(0), Status::IoError);
    bench.complete(disk.held(1), Status::Ok);
    assert_eq!(bench.done(), [(0, Status::Timeout), (1, Status::Ok)]);
    bench.submit();
    bench.complete(disk.held(2), Status::IoError);
    assert_eq!(bench.statuses(), [Status::IoError], "the next under the tag starts afresh");
}

#[test]
fn a_freeze_neither_protects_a_request_under_way_nor_counts_for_one_held_back() {
    let disk = Disk::answering(&[Verdict::Held]);
    let mut bench = alone(&disk);
    bench.submit_at(0, 512);
    bench.queue.freeze();
    bench.submit_at(1, 512);
    bench.ring.now = Nanos(900);
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    bench.queue.freeze();
    bench.ring.now = Nanos(1100);
    assert_eq!(bench.queue.expire(&mut bench.ring), 1, "frozen or thawed, what is under way grows older");
    assert_eq!(bench.ring.cancelled, [disk.held(0)]);
    bench.queue.thaw(Bytes(u64::MAX), &mut bench.ring);
    bench.ring.now = Nanos(1899);
    assert_eq!(bench.queue.expire(&mut bench.ring), 0, "the other came in at the first thaw, and stayed");
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
