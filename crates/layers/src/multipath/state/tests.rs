//! Tests of the shared state, its messages and its queueing.

use super::*;
use crate::dm::MessageError;
use queue::Nanos;

fn two_groups() -> Arc<Multipath> {
    let line = "1 queue_if_no_path 0 2 1 queue-length 0 2 1 a 1 b 1 queue-length 0 1 1 c 1";
    Multipath::new(Config::parse(&line.split(' ').collect::<Vec<_>>()).unwrap())
}

/// Finds paths by their letters: `ab` is a device that two paths use.
fn find(word: &str) -> Vec<usize> {
    (0..3).filter(|path| word.contains(["a", "b", "c"][*path])).collect()
}

fn name(path: usize) -> String {
    format!("8:{}", path * 16)
}

fn send(multipath: &Multipath, arguments: &str) -> Result<(), MessageError> {
    multipath.message(&arguments.split(' ').collect::<Vec<_>>(), find)
}

#[test]
fn the_status_line_is_the_kernels() {
    let multipath = two_groups();
    assert_eq!(multipath.status(name), "2 1 0 0 2 1 E 0 2 1 8:0 A 0 0 8:16 A 0 0 E 0 1 1 8:32 A 0 0 ");
    assert_eq!(multipath.choose_group(), Some(0));
    multipath.fail_path(1);
    assert_eq!(multipath.status(name), "2 0 0 0 2 1 A 0 2 1 8:0 A 0 0 8:16 F 1 0 E 0 1 1 8:32 A 0 0 ");
}

#[test]
fn a_message_applies_to_all_paths_over_the_named_device() {
    let multipath = two_groups();
    send(&multipath, "fail_path ab").unwrap();
    assert_eq!((multipath.valid_paths(), multipath.events()), (1, 2));
    send(&multipath, "reinstate_path ab").unwrap();
    assert_eq!(multipath.valid_paths(), 3);
    assert!(send(&multipath, "fail_path x").is_err());
}

#[test]
fn mp_1_repeated_failures_of_a_path_count_once() {
    let multipath = two_groups();
    let epoch = multipath.epoch();
    assert!(multipath.fail_path(0) && !multipath.fail_path(0));
    assert_eq!((multipath.valid_paths(), multipath.events()), (2, 1));
    assert!(multipath.epoch() > epoch && !multipath.is_active(0));
}

#[test]
fn mp_2_a_path_is_reinstated_once() {
    let multipath = two_groups();
    multipath.fail_path(2);
    assert!(multipath.reinstate_path(2) && !multipath.reinstate_path(2));
    assert_eq!((multipath.valid_paths(), multipath.events()), (3, 2));
}

#[test]
fn mp_3_a_group_is_kept_until_its_last_path_fails() {
    let multipath = two_groups();
    assert_eq!(multipath.choose_group(), Some(0));
    multipath.fail_path(0);
    assert_eq!(multipath.choose_group(), Some(0));
    multipath.fail_path(1);
    assert_eq!(multipath.choose_group(), Some(1));
    multipath.reinstate_path(0);
    assert_eq!(multipath.choose_group(), Some(1), "the current group is kept");
    send(&multipath, "switch_group 1").unwrap();
    assert_eq!(multipath.choose_group(), Some(0));
    for path in 0..3 {
        multipath.fail_path(path);
    }
    assert_eq!(multipath.choose_group(), None);
    let none = "2 0 0 0 2 1 E 0 2 1 8:0 F 2 0 8:16 F 1 0 E 0 1 1 8:32 F 1 0 ";
    assert_eq!(multipath.status(name), none, "no group is current");
    multipath.reinstate_path(1);
    assert_eq!(multipath.choose_group(), Some(0));
}

#[test]
fn mp_7_a_bypassed_group_is_the_last_resort() {
    let multipath = two_groups();
    assert_eq!(multipath.choose_group(), Some(0));
    send(&multipath, "disable_group 1").unwrap();
    assert_eq!(multipath.choose_group(), Some(1));
    assert!(multipath.status(name).contains("D 0 2 1") && multipath.status(name).contains("A 0 1 1"));
    multipath.fail_path(2);
    assert_eq!(multipath.choose_group(), Some(0));
    send(&multipath, "switch_group 2").unwrap();
    assert!(!multipath.status(name).contains('D'), "all groups are enabled again");
    let events = multipath.events();
    send(&multipath, "enable_group 1").unwrap();
    assert_eq!(multipath.events(), events + 1, "even if the group was enabled");
    assert!(!multipath.status(name).contains("A 0 1 1"), "no group is current until the next request");
}

#[test]
fn messages_are_parsed_as_in_the_kernel() {
    let multipath = two_groups();
    for arguments in [
        "",
        "dance",
        "fail_path",
        "fail_path 8:99",
        "switch_group 0",
        "switch_group 3",
        "switch_group 1x",
        "disable_group +1",
        "queue_if_no_path 1",
        "fail_path a b",
    ] {
        assert_eq!(send(&multipath, arguments), Err(MessageError::Invalid), "{arguments}");
    }
    assert_eq!(send(&multipath, "fail_path z"), Err(MessageError::Errno(libc::ENOENT)));
    send(&multipath, "FAIL_IF_NO_PATH").unwrap();
    assert!(multipath.table(name).starts_with("0 0 2 1 "));
    multipath.presuspend(true);
    assert_eq!(send(&multipath, "queue_if_no_path"), Err(MessageError::Busy));
}

#[test]
fn mp_4_a_suspension_with_flush_disables_queueing_until_resume() {
    let multipath = two_groups();
    multipath.presuspend(false);
    assert!(!multipath.may_queue(Nanos(1)) && !multipath.must_push_back());
    assert!(multipath.table(name).starts_with("0 "), "the table shows the value in force");
    multipath.resume();
    assert!(multipath.may_queue(Nanos(1)) && multipath.table(name).starts_with("1 queue_if_no_path "));
    multipath.presuspend(true);
    assert!(!multipath.may_queue(Nanos(1)) && multipath.must_push_back() && multipath.queues_if_no_path());
}

#[test]
fn mp_4_repeated_suspensions_keep_the_saved_setting() {
    let multipath = two_groups();
    for noflush in [false, false, true, false] {
        multipath.presuspend(noflush);
        assert!(multipath.table(name).starts_with("0 "), "{noflush}");
    }
    multipath.resume();
    assert!(multipath.may_queue(Nanos(1)) && multipath.queues_if_no_path());
}

#[test]
fn mp_4_the_timeout_starts_when_the_last_path_fails() {
    let multipath = two_groups();
    multipath.set_no_path_timeout(1_000);
    // A request found no path, but one was reinstated before it asked for queueing.
    assert!(multipath.may_queue(Nanos(5_000)));
    (0..3).for_each(|path| {
        multipath.fail_path(path);
    });
    assert!(multipath.may_queue(Nanos(100_000)), "the timeout has just started");
    assert!(!multipath.may_queue(Nanos(101_000)));
    multipath.presuspend(true);
    multipath.resume();
    assert!(!multipath.queues_if_no_path(), "queueing stays off after the timeout");
}

#[test]
fn mp_4_requests_are_queued_no_longer_than_the_timeout() {
    let multipath = two_groups();
    multipath.set_no_path_timeout(1_000);
    assert!(multipath.may_queue(Nanos(5_000)) && multipath.may_queue(Nanos(5_999)));
    assert!(!multipath.may_queue(Nanos(6_000)) && !multipath.queues_if_no_path());
    send(&multipath, "queue_if_no_path").unwrap();
    assert!(multipath.may_queue(Nanos(9_000)) && !multipath.may_queue(Nanos(10_000)));
}
