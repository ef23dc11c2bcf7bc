use proptest::prelude::*;

use super::*;

/// As in libiscsi's iSCSIcmdsn.TooHigh and TooLow: they are ignored, and the session continues.
#[test]
fn commands_outside_the_window_are_ignored() {
    let mut window = CommandWindow::new(10, 4);
    assert_eq!((window.expected(), window.max()), (10, 13));
    assert_eq!(window.receive(14), Arrival::Ignored);
    assert_eq!(window.receive(9), Arrival::Ignored);
    assert_eq!(window.receive(10), Arrival::InOrder);
    assert_eq!(window.receive(10), Arrival::Ignored, "a duplicate");
    assert_eq!(window.receive(11), Arrival::InOrder);
}

#[test]
fn window_closes_until_commands_complete() {
    let mut window = CommandWindow::new(u32::MAX, 2);
    assert_eq!(window.receive(u32::MAX), Arrival::InOrder);
    assert_eq!(window.receive(0), Arrival::InOrder);
    assert_eq!((window.expected(), window.max()), (1, 0), "MaxCmdSN = ExpCmdSN - 1: closed");
    assert_eq!(window.receive(1), Arrival::Ignored);
    assert_eq!(window.take_held(), None);
    window.complete();
    assert_eq!(window.receive(1), Arrival::InOrder);
    assert_eq!(window.numbers(7), Numbers { stat_sn: 7, exp_cmd_sn: 2, max_cmd_sn: 1 });
}

#[test]
fn commands_after_a_hole_are_held_until_it_is_filled() {
    let mut window = CommandWindow::new(1, 8);
    assert_eq!(
        (window.receive(3), window.receive(2), window.receive(5)),
        (Arrival::Held, Arrival::Held, Arrival::Held)
    );
    assert_eq!(window.receive(3), Arrival::Ignored, "a duplicate of a held command");
    assert_eq!((window.take_held(), window.expected()), (None, 1));
    assert_eq!(window.receive(1), Arrival::InOrder);
    assert_eq!((window.take_held(), window.take_held(), window.take_held()), (Some(2), Some(3), None));
    assert_eq!(window.expected(), 4);
}

#[test]
fn held_command_of_a_lost_connection_may_come_again() {
    let mut window = CommandWindow::new(1, 8);
    assert_eq!(window.receive(2), Arrival::Held);
    window.forget_held(2);
    assert_eq!(window.receive(2), Arrival::Held);
    // A number outside the window shares its bit with one inside.
    window.forget_held(2u32.wrapping_add(MAX_DEPTH));
    assert_eq!(window.receive(2), Arrival::Ignored);
}

#[test]
fn completions_beyond_what_arrived_do_not_open_the_window_further_than_its_bits() {
    let mut window = CommandWindow::new(0, MAX_DEPTH);
    window.complete();
    assert_eq!(window.max(), MAX_DEPTH - 1);
}

#[test]
fn statuses_are_numbered_and_acknowledged() {
    let mut counter = StatusCounter::new(u32::MAX);
    assert_eq!((counter.take(), counter.take(), counter.next()), (u32::MAX, 0, 1));
    assert_eq!(counter.unacknowledged(), 2);
    assert!(counter.acknowledge(0));
    assert!(counter.acknowledge(u32::MAX), "an older acknowledgement changes nothing");
    assert_eq!(counter.unacknowledged(), 1);
    assert!(!counter.acknowledge(2), "no such status was sent");
    assert!(counter.acknowledge(1));
    assert_eq!(counter.unacknowledged(), 0);
}

proptest! {
    /// Commands arrive in any order, over several connections, and each is processed once, in order.
    #[test]
    fn every_command_is_processed_once_in_order(first: u32, depth in 1u32..=MAX_DEPTH, picks: Vec<u8>) {
        let mut window = CommandWindow::new(first, depth);
        let mut processed = first;
        let mut running = 0;
        for pick in picks {
            let cmd_sn = window.expected().wrapping_add(u32::from(pick) % 8).wrapping_sub(1);
            let is_in_window = !before(cmd_sn, window.expected()) && !before(window.max(), cmd_sn);
            match window.receive(cmd_sn) {
                Arrival::Ignored => {}
                Arrival::Held => prop_assert!(is_in_window),
                Arrival::InOrder => {
                    prop_assert!(is_in_window);
                    prop_assert_eq!(cmd_sn, processed);
                    processed = processed.wrapping_add(1);
                    running += 1;
                    while let Some(held) = window.take_held() {
                        prop_assert_eq!(held, processed);
                        processed = processed.wrapping_add(1);
                        running += 1;
                    }
                }
            }
            prop_assert!(running <= depth);
            prop_assert_eq!(window.expected(), processed);
            prop_assert_eq!(window.max().wrapping_add(1).wrapping_sub(window.expected()), depth - running);
            if pick > 200 && running > 0 {
                window.complete();
                running -= 1;
            }
        }
    }
}
