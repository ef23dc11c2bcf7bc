//! Tests of both kinds of ring; those of one kind are in `split` and `packed`.

mod packed;
mod split;

use super::*;
use crate::driver::{AddressAllocator, Driver};
use crate::memory::{GuestRegion, Mapping};
use block::Region;

const LEN: u64 = 1 << 20;
const START: u64 = 0x4_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const CHAIN_MAX: u16 = 34;

/// Both sides of a queue over one region of memory, at the same addresses as in the front-end.
struct Rig {
    memory: Arc<GuestMemory>,
    layout: Layout,
    ring: Ring,
    driver: Driver,
    chain: Chain,
    allocator: AddressAllocator,
    /// Flag of available descriptors in a packed ring.
    available: u16,
}

fn all() -> Features {
    Features::INDIRECT_DESC | Features::EVENT_IDX | Features::VERSION_1
}

/// Returns the features of both kinds of ring.
fn kinds() -> [Features; 2] {
    [all(), all() | Features::RING_PACKED]
}

fn rig(size: u16, features: Features) -> Rig {
    let regions = [(START, LEN, 0), (START + LEN, LEN, 1)].map(|(start, len, number)| GuestRegion {
        guest: start,
        user: start,
        len,
        mapping: Mapping::zeroed(len as usize),
        region: Region(number),
    });
    let memory = Arc::new(GuestMemory::new(regions.into(), None).unwrap());
    let mut allocator = AddressAllocator::at(START);
    let layout = allocator.queue(size, features, CHAIN_MAX);
    Rig {
        ring: Ring::new(memory.clone(), layout, features, Position::START).unwrap(),
        driver: Driver::new(memory.clone(), &layout, features).unwrap(),
        chain: Chain::new(40),
        allocator: AddressAllocator::at(allocator.take(0, 4096)),
        available: if features.contains(Features::RING_PACKED) { 1 << 7 } else { 0 },
        memory,
        layout,
    }
}

impl Rig {
    fn pop(&mut self) -> Result<bool, RingError> {
        self.ring.pop(&mut self.chain)
    }

    /// Writes descriptors from index 0 on, and makes the first one available.
    fn forge(&mut self, descriptors: &[(u64, u32, u16, u16)]) {
        let forge = self.driver.forge();
        // Write the first one last, because it makes a packed chain available.
        for (at, &(address, len, flags, link)) in descriptors.iter().enumerate().rev() {
            forge.descriptor(at as u16, address, len, flags | self.available, link);
        }
        forge.available(0, 0);
        forge.available_index(1);
    }

    /// Writes a chain of these descriptors, and pops it.
    fn popped(&mut self, descriptors: &[(u64, u32, u16, u16)]) -> Result<bool, RingError> {
        self.forge(descriptors);
        self.pop()
    }

    /// Writes a chain of one indirect descriptor, and pops it.
    fn popped_table(&mut self, len: u32, table: &[(u64, u32, u16, u16)]) -> Result<bool, RingError> {
        let address = self.allocator.take(4096, 16);
        self.driver.forge().write_table(address, table);
        self.popped(&[(address, len, INDIRECT, 0)])
    }
}

fn lens(spans: &[crate::memory::Span]) -> Vec<u32> {
    spans.iter().map(|span| span.len()).collect()
}

#[test]
fn a_chain_arrives_as_the_driver_built_it() {
    for features in kinds() {
        let mut rig = rig(8, features);
        assert_eq!(rig.pop(), Ok(false));
        let id =
            rig.driver.add(&[(START + 0x8000, 16), (START + 0x9000, 512)], &[(START + 0xa000, 1)]).unwrap();
        assert_eq!(rig.pop(), Ok(false), "the driver has not published it");
        assert!(rig.driver.publish());
        assert!(!rig.ring.is_empty());
        assert_eq!(rig.pop(), Ok(true));
        assert_eq!(rig.chain.head().id, id);
        assert_eq!(rig.chain.readable()[1].segment().offset, 0x9000);
        assert_eq!((lens(rig.chain.readable()), lens(rig.chain.writable())), (vec![16, 512], vec![1]));
        assert!(rig.ring.is_empty());
        assert_eq!(rig.pop(), Ok(false));
    }
}

#[test]
fn a_pushed_chain_is_seen_when_it_is_published() {
    for features in kinds() {
        let mut rig = rig(8, features);
        let id = rig.driver.add(&[(START, 16)], &[(START, 1)]).unwrap();
        let _ = rig.driver.publish();
        assert_eq!(rig.pop(), Ok(true));
        rig.ring.push(rig.chain.head(), 77);
        assert_eq!(rig.driver.take_used(), None);
        rig.ring.publish();
        let used = rig.driver.take_used().unwrap();
        assert_eq!((used.id, used.written, rig.driver.free()), (id, 77, 8));
        assert_eq!(rig.driver.take_used(), None);
    }
}

#[test]
fn chains_of_all_lengths_pass_when_indexes_wrap() {
    for features in [kinds(), kinds().map(|kind| kind - Features::EVENT_IDX)].concat() {
        let mut rig = rig(16, features);
        let mut random = fastrand::Rng::with_seed(7);
        let (mut flying, mut sent, mut returned) = (Vec::new(), 0u32, 0u32);
        while returned < 70_000 * 2 {
            for _ in 0..random.usize(..4) {
                let (readable, writable) = (random.usize(1..4), random.usize(..3));
                let ranges: Vec<_> = (0..readable + writable).map(|at| (START + at as u64, 100)).collect();
                let (front, back) = ranges.split_at(readable);
                sent += u32::from(rig.driver.add(front, back).is_some());
            }
            let _ = rig.driver.publish();
            while rig.pop().unwrap() {
                let bytes = lens(rig.chain.readable()).iter().chain(&lens(rig.chain.writable())).sum::<u32>();
                flying.push((rig.chain.head(), bytes));
            }
            for _ in 0..random.usize(..=flying.len()) {
                let (head, bytes) = flying.swap_remove(random.usize(..flying.len()));
                rig.ring.push(head, bytes);
            }
            rig.ring.publish();
            while let Some(used) = rig.driver.take_used() {
                assert!((100..=500).contains(&used.written));
                returned += 1;
            }
        }
        assert_eq!(sent as usize - returned as usize, flying.len());
    }
}

#[test]
fn a_descriptor_across_regions_becomes_two_spans() {
    for features in kinds() {
        let mut rig = rig(8, features);
        rig.popped(&[(START + LEN - 100, 300, 0, 0)]).unwrap();
        let segments: Vec<_> = rig.chain.readable().iter().map(|span| span.segment()).collect();
        assert_eq!(segments.len(), 2);
        assert_eq!((segments[0].offset, segments[0].len, segments[0].region), (LEN - 100, 100, Region(0)));
        assert_eq!((segments[1].offset, segments[1].len, segments[1].region), (0, 200, Region(1)));
    }
}

#[test]
fn a_descriptor_without_bytes_adds_no_span() {
    for features in kinds() {
        let mut rig = rig(8, features);
        rig.popped(&[(u64::MAX, 0, NEXT, 1), (START, 5, 0, 0)]).unwrap();
        assert_eq!(lens(rig.chain.readable()), [5]);
    }
}

#[test]
fn addresses_outside_of_memory_are_refused() {
    for features in kinds() {
        for (address, len) in [
            (0, 1),
            (START - 1, 2),
            (START + 2 * LEN, 1),
            (START + 2 * LEN - 1, 2),
            (u64::MAX, 1),
            (u64::MAX, u32::MAX),
            (START, u32::MAX),
        ] {
            for flags in [0, WRITE] {
                let mut rig = rig(8, features);
                assert_eq!(rig.popped(&[(address, len, flags, 0)]), Err(RingError::Address), "{address:#x}");
                assert_eq!(rig.pop(), Err(RingError::Address), "the ring does not advance past an error");
            }
        }
    }
}

#[test]
fn a_readable_descriptor_after_a_writable_one_is_refused() {
    for features in kinds() {
        let mut rig = rig(8, features);
        let chain = [(START, 1, NEXT, 1), (START, 1, WRITE | NEXT, 2), (START, 1, 0, 0)];
        assert_eq!(rig.popped(&chain), Err(RingError::ReadableAfterWritable));
        let mut rig = self::rig(8, features);
        assert_eq!(rig.popped_table(48, &chain), Err(RingError::ReadableAfterWritable));
    }
}

#[test]
fn indirect_tables_that_are_not_allowed_are_refused() {
    let mut without = rig(8, Features::VERSION_1);
    assert_eq!(without.popped_table(16, &[(START, 1, 0, 0)]), Err(RingError::Indirect));
    let mut nested = rig(8, all());
    assert_eq!(nested.popped_table(16, &[(START, 16, INDIRECT, 0)]), Err(RingError::Indirect));
    let mut continued = rig(8, all());
    assert_eq!(continued.popped(&[(START, 16, INDIRECT | NEXT, 1)]), Err(RingError::Indirect));
    for len in [0, 15, 17, u32::MAX] {
        let mut odd = rig(8, all());
        assert_eq!(odd.popped_table(len, &[(START, 1, 0, 0)]), Err(RingError::TableLength), "{len}");
    }
    for address in [0, START + 2 * LEN, !15] {
        let mut outside = rig(8, all());
        assert_eq!(outside.popped(&[(address, 16, INDIRECT, 0)]), Err(RingError::Address), "{address:#x}");
    }
}

#[test]
fn a_chain_has_no_more_descriptors_than_the_limit() {
    let table = |count: u16| -> Vec<_> {
        (0..count).map(|at| (START, 1, if at + 1 < count { NEXT } else { 0 }, at + 1)).collect()
    };
    for (count, result) in [(CHAIN_MAX, Ok(true)), (CHAIN_MAX + 1, Err(RingError::TooLong))] {
        assert_eq!(rig(8, all()).popped_table(16 * u32::from(count), &table(count)), result);
        assert_eq!(rig(64, all()).popped(&table(count)), result);
    }
    let mut small = rig(64, all());
    small.chain = Chain::new(2);
    assert_eq!(small.popped(&table(3)), Err(RingError::TooLong), "the chain has room for two spans");
}

#[test]
fn parts_of_a_queue_outside_of_memory_or_misaligned_are_refused() {
    let rig = rig(8, all());
    let start = |layout: Layout| Ring::new(rig.memory.clone(), layout, all(), Position::START).map(|_| ());
    let whole = rig.layout;
    assert_eq!(start(whole), Ok(()));
    for size in [0, 3, 6, 0x8001, 0xffff] {
        assert_eq!(start(Layout { size, ..whole }), Err(SetupError::Size(size)));
    }
    for descriptors in [0, START + 8, START + LEN - 16, !15] {
        assert_eq!(start(Layout { descriptors, ..whole }), Err(SetupError::Descriptors));
    }
    for driver in [0, START + 1, START + 2 * LEN - 16] {
        assert_eq!(start(Layout { driver, ..whole }), Err(SetupError::Driver));
    }
    for device in [0, START + 2, START + LEN - 64, START + 2 * LEN] {
        assert_eq!(start(Layout { device, ..whole }), Err(SetupError::Device));
    }
}

#[test]
fn events_are_wanted_at_an_index_with_event_idx() {
    for features in kinds() {
        let mut rig = rig(8, features);
        let one = [(START, 16)];
        for round in 0..70_000 {
            rig.driver.add(&one, &[]).unwrap();
            // The driver kicks only when the device requested that for exactly this chain.
            let asked = round % 3 == 0;
            if asked {
                assert!(!rig.ring.enable_kicks());
            } else {
                rig.ring.suppress_kicks();
            }
            assert_eq!(rig.driver.publish(), asked, "{round}");
            assert_eq!(rig.pop(), Ok(true));
            rig.ring.push(rig.chain.head(), 0);
            let wanted = round % 5 == 0;
            if wanted {
                assert!(!rig.driver.enable_interrupts());
            } else {
                rig.driver.suppress_interrupts();
            }
            rig.ring.publish();
            assert_eq!(rig.ring.should_interrupt(), wanted, "{round}");
            assert!(rig.driver.take_used().is_some());
        }
    }
}

#[test]
fn one_interrupt_is_wanted_for_a_batch() {
    for features in kinds() {
        let mut rig = rig(8, features);
        for _ in 0..5 {
            rig.driver.add(&[(START, 1)], &[]).unwrap();
        }
        assert!(rig.driver.publish());
        assert!(!rig.driver.enable_interrupts());
        while rig.pop().unwrap() {
            rig.ring.push(rig.chain.head(), 0);
        }
        rig.ring.publish();
        assert!(rig.ring.should_interrupt());
        assert!(!rig.ring.should_interrupt());
    }
}

#[test]
fn a_base_keeps_indexes_and_wrap_counters() {
    let packed = Features::RING_PACKED;
    for base in [0, 0x8000_8000, 0x8123_0456, 0x7fff_ffff, u32::MAX] {
        assert_eq!(Position::from_base(base, packed).to_base(packed), base, "{base:#x}");
    }
    let position = Position::from_base(0x8005_0003, packed);
    let expected = Position { available: 3, available_wrap: false, used: 5, used_wrap: true };
    assert_eq!(position, expected);
    assert_eq!(Position::from_base(0xffff, Features::empty()).available, 0xffff);
}

#[test]
fn a_table_with_more_regions_replaces_the_old_one() {
    for features in kinds() {
        let mut rig = rig(8, features);
        let mut regions = rig.memory.regions().to_vec();
        let far = GuestRegion { guest: 1 << 40, user: 1 << 40, ..regions[1].clone() };
        regions.push(GuestRegion { region: Region(5), mapping: Mapping::zeroed(LEN as usize), ..far });
        rig.driver.add(&[(1 << 40, 8)], &[]).unwrap();
        let _ = rig.driver.publish();
        assert_eq!(rig.pop(), Err(RingError::Address));
        let more = Arc::new(GuestMemory::new(regions.clone(), None).unwrap());
        rig.ring.replace_memory(more).unwrap();
        assert_eq!(rig.pop(), Ok(true));
        assert_eq!(rig.chain.readable()[0].segment().region, Region(5));
        let without = Arc::new(GuestMemory::new(regions[1..].to_vec(), None).unwrap());
        assert_eq!(rig.ring.replace_memory(without), Err(SetupError::Descriptors));
        assert_eq!(rig.ring.memory().regions().len(), 3, "the ring keeps its table");
    }
}
