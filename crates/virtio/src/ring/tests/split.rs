//! Tests of split rings.

use super::*;

#[test]
fn chains_that_loop_are_refused() {
    for next in 0..3 {
        let mut rig = rig(8, all());
        let chain = [(START, 1, NEXT, 1), (START, 1, NEXT, 2), (START, 1, NEXT, next)];
        assert_eq!(rig.popped(&chain), Err(RingError::TooLong));
        let mut rig = self::rig(8, all());
        assert_eq!(rig.popped_table(48, &chain), Err(RingError::TooLong));
        // The descriptors are empty, so that only their number ends the chain.
        let mut rig = self::rig(8, all());
        assert_eq!(rig.popped_table(48, &chain.map(|(at, _, flags, next)| (at, 0, flags, next))), {
            Err(RingError::TooLong)
        });
    }
}

#[test]
fn indexes_past_the_table_are_refused() {
    let mut rig = rig(8, all());
    assert_eq!(rig.popped(&[(START, 1, NEXT, 8)]), Err(RingError::Descriptor));
    let mut rig = self::rig(8, all());
    assert_eq!(rig.popped_table(32, &[(START, 1, NEXT, 2)]), Err(RingError::Descriptor));
    let mut rig = self::rig(8, all());
    let forge = rig.driver.forge();
    forge.available(0, 8);
    forge.available_index(1);
    assert_eq!(rig.pop(), Err(RingError::Descriptor));
}

#[test]
fn an_available_index_that_runs_ahead_is_refused() {
    for (index, ok) in [(0, true), (8, true), (9, false), (0xffff, false)] {
        let mut rig = rig(8, all());
        rig.driver.forge().available_index(index);
        assert_eq!(rig.pop().is_ok(), ok, "{index}");
        if !ok {
            assert_eq!(rig.pop(), Err(RingError::Index), "{index}");
        }
    }
}

#[test]
fn an_indirect_table_may_be_longer_than_the_queue() {
    let mut rig = rig(4, all());
    let table: Vec<_> = (0..10).map(|at| (START, 8 + u32::from(at), NEXT, at + 1)).collect();
    let table = [&table[..], &[(START, 1, WRITE, 0)]].concat();
    assert_eq!(rig.popped_table(176, &table), Ok(true));
    assert_eq!(lens(rig.chain.readable()), (8..18).collect::<Vec<_>>());
    assert_eq!(lens(rig.chain.writable()), [1]);
}

#[test]
fn direct_descriptors_may_precede_an_indirect_one() {
    let mut rig = rig(8, all());
    let table = rig.allocator.take(64, 16);
    rig.driver.forge().write_table(table, &[(START, 3, NEXT, 1), (START, 4, WRITE, 0)]);
    assert_eq!(rig.popped(&[(START, 2, NEXT, 1), (table, 32, INDIRECT, 0)]), Ok(true));
    assert_eq!((lens(rig.chain.readable()), lens(rig.chain.writable())), (vec![2, 3], vec![4]));
}

#[test]
fn a_table_across_regions_is_read_and_one_across_the_end_is_refused() {
    let chain = [(START, 3, NEXT, 1), (START, 4, NEXT, 2), (START, 5, 0, 0)];
    // At the end of the first region, the boundary is also inside a descriptor.
    for address in [START + LEN - 16, START + LEN - 24, START + LEN - 32] {
        let mut rig = rig(8, all());
        for (at, one) in chain.iter().enumerate() {
            write(&rig.memory, address + 16 * at as u64, *one);
        }
        assert_eq!(rig.popped(&[(address, 48, INDIRECT, 0)]), Ok(true));
        assert_eq!(lens(rig.chain.readable()), [3, 4, 5]);
    }
    let mut rig = rig(8, all());
    let address = START + 2 * LEN - 16;
    rig.driver.forge().write_table(address, &chain[..1]);
    assert_eq!(rig.popped(&[(address, 48, INDIRECT, 0)]), Err(RingError::Address));
}

#[test]
fn flags_suppress_kicks_and_interrupts_without_event_idx() {
    let mut rig = rig(8, Features::VERSION_1);
    let one = [(START, 16)];
    rig.driver.add(&one, &[]).unwrap();
    assert!(rig.driver.publish(), "kicks are enabled from the start");
    rig.ring.suppress_kicks();
    rig.driver.add(&one, &[]).unwrap();
    assert!(!rig.driver.publish());
    assert!(!rig.driver.publish(), "nothing was added");
    assert!(rig.ring.enable_kicks(), "two chains are there");
    while rig.pop().unwrap() {
        rig.ring.push(rig.chain.head(), 0);
    }
    assert!(!rig.ring.enable_kicks());
    rig.driver.add(&one, &[]).unwrap();
    assert!(rig.driver.publish());

    assert!(!rig.ring.should_interrupt(), "nothing is published");
    rig.ring.publish();
    assert!(rig.ring.should_interrupt());
    assert!(!rig.ring.should_interrupt(), "once a batch");
    rig.driver.suppress_interrupts();
    assert_eq!(rig.pop(), Ok(true));
    rig.ring.push(rig.chain.head(), 0);
    rig.ring.publish();
    assert!(!rig.ring.should_interrupt());
    assert!(rig.driver.enable_interrupts(), "three were returned");
}

#[test]
fn a_ring_continues_where_it_stopped() {
    let mut rig = rig(8, all());
    for _ in 0..3 {
        rig.driver.add(&[(START, 1)], &[]).unwrap();
    }
    let _ = rig.driver.publish();
    assert_eq!(rig.pop(), Ok(true));
    rig.ring.push(rig.chain.head(), 9);
    rig.ring.publish();
    let base = rig.ring.position().to_base(all());
    assert_eq!(base, 1);
    let position = Position::from_base(base, all());
    rig.ring = Ring::new(rig.memory.clone(), rig.layout, all(), position).unwrap();
    let mut count = 0;
    while rig.pop().unwrap() {
        rig.ring.push(rig.chain.head(), 10);
        count += 1;
    }
    rig.ring.publish();
    assert_eq!(count, 2);
    let written: Vec<_> = std::iter::from_fn(|| rig.driver.take_used()).map(|used| used.written).collect();
    assert_eq!(written, [9, 10, 10]);
}

/// Writes a descriptor byte by byte, because it may cross the end of a region.
fn write(memory: &GuestMemory, at: u64, (address, len, flags, next): (u64, u32, u16, u16)) {
    let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
    let bytes = [address.to_le_bytes(), word.to_le_bytes()].concat();
    for (skip, byte) in bytes.iter().enumerate() {
        assert!(memory.store_byte(memory.translate(at + skip as u64, 1).unwrap(), *byte));
    }
}
