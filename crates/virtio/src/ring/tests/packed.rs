//! Tests of packed rings.

use super::*;

fn packed() -> Features {
    all() | Features::RING_PACKED
}

#[test]
fn a_queue_need_not_be_a_power_of_two() {
    for size in [1, 3, 7, 100] {
        let mut rig = rig(size, packed());
        for round in 0..1000 {
            let id = rig.driver.add(&[(START, 16)], &[]).expect("a free descriptor");
            let _ = rig.driver.publish();
            assert_eq!(rig.pop(), Ok(true), "{round}");
            rig.ring.push(rig.chain.head(), round);
            rig.ring.publish();
            assert_eq!(rig.driver.take_used().map(|used| (used.id, used.written)), Some((id, round)));
        }
    }
}

#[test]
fn nothing_of_a_batch_is_seen_before_it_is_published() {
    let mut rig = rig(8, packed());
    for _ in 0..3 {
        rig.driver.add(&[(START, 16)], &[(START, 1)]).unwrap();
        assert_eq!(rig.pop(), Ok(false));
    }
    let _ = rig.driver.publish();
    while rig.pop().unwrap() {
        rig.ring.push(rig.chain.head(), 1);
        assert_eq!(rig.driver.take_used(), None);
        assert!(!rig.ring.should_interrupt(), "it is not published");
    }
    rig.ring.publish();
    assert_eq!(std::iter::from_fn(|| rig.driver.take_used()).count(), 3);
}

#[test]
fn a_full_ring_is_not_popped_twice() {
    let mut rig = rig(4, packed());
    for _ in 0..4 {
        rig.driver.add(&[(START, 16)], &[]).unwrap();
    }
    assert_eq!(rig.driver.add(&[(START, 16)], &[]), None);
    let _ = rig.driver.publish();
    for expected in [true, true, true, true, false, false] {
        assert_eq!(rig.pop(), Ok(expected));
    }
}

#[test]
fn chains_that_do_not_end_are_refused() {
    let mut rig = rig(4, packed());
    assert_eq!(rig.popped(&[(START, 1, NEXT, 0); 4]), Err(RingError::TooLong));
    let mut rig = self::rig(4, packed());
    assert_eq!(rig.popped(&[(START, 0, NEXT, 0); 4]), Err(RingError::TooLong), "without bytes");
    let mut rig = self::rig(64, packed());
    assert_eq!(rig.popped(&[(START, 1, NEXT, 0); 40]), Err(RingError::TooLong), "more than the limit");
}

#[test]
fn the_id_is_that_of_the_last_descriptor_and_may_be_any() {
    let mut rig = rig(4, packed());
    assert_eq!(rig.popped(&[(START, 1, NEXT, 7), (START, 1, 0, 0xfffe)]), Ok(true));
    assert_eq!(rig.chain.head(), Head { id: 0xfffe, count: 2, entry: 0 });
}

#[test]
fn all_descriptors_of_a_table_belong_to_the_chain() {
    let mut rig = rig(4, packed());
    // In a table, flags other than WRITE are ignored.
    let table = [(START, 5, NEXT | INDIRECT, 3), (START, 6, 0, 0), (START, 7, WRITE, 9)];
    assert_eq!(rig.popped_table(48, &table), Ok(true));
    assert_eq!((lens(rig.chain.readable()), lens(rig.chain.writable())), (vec![5, 6], vec![7]));
}

#[test]
fn a_list_has_no_indirect_descriptor() {
    let mut rig = rig(4, packed());
    assert_eq!(rig.popped(&[(START, 16, NEXT, 0), (START, 16, INDIRECT, 0)]), Err(RingError::Indirect));
    let mut rig = self::rig(4, packed());
    assert_eq!(rig.popped(&[(START, 16, INDIRECT | NEXT, 0), (START, 16, 0, 0)]), Err(RingError::Indirect));
}

#[test]
fn a_position_outside_of_the_ring_is_refused() {
    let rig = rig(4, packed());
    let start = |position| Ring::new(rig.memory.clone(), rig.layout, packed(), position).map(|_| ());
    assert_eq!(start(Position { available: 4, ..Position::START }), Err(SetupError::Position));
    assert_eq!(start(Position { used: 4, ..Position::START }), Err(SetupError::Position));
    assert_eq!(start(Position { available: 3, ..Position::START }), Ok(()));
}

#[test]
fn a_ring_continues_where_it_stopped() {
    let mut rig = rig(5, packed());
    let (mut sent, mut returned) = (0, 0);
    for round in 0..100 {
        while rig.driver.add(&[(START, 1)], &[(START, 1)]).is_some() {
            sent += 1;
        }
        let _ = rig.driver.publish();
        assert_eq!(rig.pop(), Ok(true), "{round}");
        rig.ring.push(rig.chain.head(), 1);
        rig.ring.publish();
        let position = Position::from_base(rig.ring.position().to_base(packed()), packed());
        assert_eq!(position, rig.ring.position());
        rig.ring = Ring::new(rig.memory.clone(), rig.layout, packed(), position).unwrap();
        returned += std::iter::from_fn(|| rig.driver.take_used()).count();
    }
    assert_eq!((sent - returned, returned), (1, 100));
}

#[test]
fn events_are_suppressed_without_event_idx() {
    let mut rig = rig(4, packed() - Features::EVENT_IDX);
    rig.ring.suppress_kicks();
    rig.driver.add(&[(START, 16)], &[]).unwrap();
    assert!(!rig.driver.publish());
    assert!(rig.ring.enable_kicks(), "a chain is available");
    assert_eq!(rig.pop(), Ok(true));
    assert!(!rig.ring.enable_kicks());
    rig.driver.add(&[(START, 16)], &[]).unwrap();
    assert!(rig.driver.publish());
    rig.driver.suppress_interrupts();
    rig.ring.push(rig.chain.head(), 0);
    rig.ring.publish();
    assert!(!rig.ring.should_interrupt());
    assert!(rig.driver.enable_interrupts(), "a chain was returned");
    assert!(rig.driver.take_used().is_some());
    assert!(!rig.driver.enable_interrupts());
    assert_eq!(rig.pop(), Ok(true));
    rig.ring.push(rig.chain.head(), 0);
    rig.ring.publish();
    assert!(rig.ring.should_interrupt());
}

#[test]
fn a_descriptor_event_of_any_lap_is_met_once() {
    // Checks every position and every number of descriptors in a batch, with the event at each of the next
    // 5 descriptors.
    let size = 5;
    for (start, wrap) in (0..size).flat_map(|start| [(start, false), (start, true)]) {
        for (ahead, added) in (0..size).flat_map(|ahead| (1..=size).map(move |added| (ahead, added))) {
            let (mut event, mut next) = (Cursor { index: start, wrap }, Cursor { index: start, wrap });
            event.advance(ahead, size);
            next.advance(added, size);
            let word = std::sync::atomic::AtomicU32::new(notify::event_at(event));
            let wanted = notify::is_wanted_packed(&word, next, added, size);
            assert_eq!(wanted, ahead < added, "{start} {wrap} {ahead} {added}");
        }
    }
}
