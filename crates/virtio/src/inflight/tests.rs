//! Tests in which the device side dies between two steps, and a new ring continues on the same memory.

use super::*;
use crate::driver::{AddressAllocator, Driver};
use crate::memory::{GuestMemory, GuestRegion};
use crate::ring::{Chain, Head, Layout, Position, Ring, SetupError};
use block::Region;

const LEN: u64 = 1 << 18;

struct Rig {
    memory: Arc<GuestMemory>,
    record: Arc<Mapping>,
    layout: Layout,
    features: Features,
    driver: Driver,
    ring: Ring,
    chain: Chain,
}

fn kinds() -> [Features; 2] {
    let common = Features::EVENT_IDX | Features::INDIRECT_DESC;
    [common, common | Features::RING_PACKED]
}

fn rig(size: u16, features: Features) -> Rig {
    let mapping = Mapping::zeroed(LEN as usize);
    let region = GuestRegion { guest: 0, user: 0, len: LEN, mapping, region: Region(0) };
    let memory = Arc::new(GuestMemory::new(vec![region], None).unwrap());
    let layout = AddressAllocator::at(0).queue(size, features, 8);
    // Use the record of the second of two queues.
    let record = Mapping::zeroed(2 * queue_len(size, features) as usize);
    let mut ring = Ring::new(memory.clone(), layout, features, Position::START).unwrap();
    let inflight = Inflight::of_queue(record.clone(), 1, size, features).unwrap();
    assert_eq!(ring.track(inflight), Ok(0));
    let driver = Driver::new(memory.clone(), &layout, features).unwrap();
    Rig { memory, record, layout, features, driver, ring, chain: Chain::new(8) }
}

impl Rig {
    /// Sends `count` chains of `descriptors` descriptors. The length of each chain's first descriptor is
    /// its number, from `from` on.
    fn send(&mut self, from: u32, count: u32, descriptors: usize) {
        for number in from..from + count {
            let ranges = [&[(0, number)][..], &[(0, 1); 6][..descriptors - 1]].concat();
            self.driver.add(&ranges, &[]).expect("a free descriptor");
        }
        let _ = self.driver.publish();
    }

    /// Pops all chains; returns them with their numbers.
    fn pop_all(&mut self) -> Vec<(Head, u32)> {
        let mut found = Vec::new();
        while self.ring.pop(&mut self.chain).unwrap() {
            found.push((self.chain.head(), self.chain.readable()[0].len()));
        }
        found
    }

    /// Replaces the device side by a new one that only has the shared memory. Returns the number of chains
    /// in flight.
    fn restart(&mut self) -> usize {
        // A front-end that does not keep this record gives a wrong position.
        self.ring = Ring::new(self.memory.clone(), self.layout, self.features, Position::START).unwrap();
        let inflight = Inflight::of_queue(self.record.clone(), 1, self.layout.size, self.features).unwrap();
        self.ring.track(inflight).unwrap()
    }

    fn take_used(&mut self) -> Vec<u32> {
        let mut written: Vec<u32> =
            std::iter::from_fn(|| self.driver.take_used()).map(|used| used.written).collect();
        written.sort_unstable();
        written
    }
}

fn numbers(popped: &[(Head, u32)]) -> Vec<u32> {
    popped.iter().map(|(_, number)| *number).collect()
}

#[test]
fn chains_in_flight_are_popped_again_in_their_order() {
    for features in kinds() {
        let mut rig = rig(16, features);
        rig.send(1, 4, 2);
        let popped = rig.pop_all();
        // The second one is returned first.
        rig.ring.push(popped[1].0, 2);
        rig.ring.publish();
        rig.send(5, 1, 1);
        assert_eq!(rig.restart(), 3);
        assert!(!rig.ring.is_empty() && rig.ring.enable_kicks(), "no sleep before they are popped");
        let again = rig.pop_all();
        assert_eq!(numbers(&again), [1, 3, 4, 5], "then the one that was never popped");
        again.iter().for_each(|&(head, number)| rig.ring.push(head, number));
        rig.ring.publish();
        assert_eq!(rig.take_used(), [1, 2, 3, 4, 5]);
        assert_eq!((rig.restart(), rig.pop_all().len(), rig.driver.free()), (0, 0, 16));
    }
}

#[test]
fn pushed_chains_that_were_not_published_are_popped_again() {
    for features in kinds() {
        let mut rig = rig(8, features);
        rig.send(1, 3, 1);
        let popped = rig.pop_all();
        popped.iter().for_each(|&(head, number)| rig.ring.push(head, number));
        assert_eq!(rig.restart(), 3);
        let again = rig.pop_all();
        assert_eq!(numbers(&again), [1, 2, 3]);
        again.iter().rev().for_each(|&(head, number)| rig.ring.push(head, number));
        rig.ring.publish();
        assert_eq!(rig.take_used(), [1, 2, 3]);
    }
}

#[test]
fn a_restart_during_recovery_loses_nothing() {
    for features in kinds() {
        let mut rig = rig(8, features);
        rig.send(1, 4, 1);
        rig.pop_all();
        assert_eq!(rig.restart(), 4);
        assert_eq!(rig.ring.pop(&mut rig.chain), Ok(true));
        let head = rig.chain.head();
        assert_eq!(rig.restart(), 4, "the first was popped again, but not returned");
        rig.ring.push(head, 1);
        rig.ring.publish();
        assert_eq!(rig.restart(), 3);
        assert_eq!(numbers(&rig.pop_all()), [2, 3, 4]);
    }
}

#[test]
fn random_restarts_return_each_chain_once() {
    for (features, seed) in kinds().into_iter().flat_map(|kind| (0..20).map(move |seed| (kind, seed))) {
        let mut rig = rig(if seed % 2 == 0 { 8 } else { 16 }, features);
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut sent, mut flying, mut returned) = (0, Vec::new(), Vec::new());
        for round in 0.. {
            if returned.len() >= 2000 {
                break;
            }
            assert!(round < 100_000, "seed {seed}: a chain was lost after {} were returned", returned.len());
            let descriptors = random.usize(1..4);
            if rig.driver.free() >= descriptors {
                rig.send(sent + 1, 1, descriptors);
                sent += 1;
            }
            for _ in 0..random.usize(..3) {
                if rig.ring.pop(&mut rig.chain).unwrap() {
                    flying.push((rig.chain.head(), rig.chain.readable()[0].len()));
                }
            }
            for _ in 0..random.usize(..=flying.len()) {
                let (head, number) = flying.swap_remove(random.usize(..flying.len()));
                rig.ring.push(head, number);
                if random.u8(..4) == 0 {
                    rig.ring.publish();
                }
            }
            if random.u8(..3) == 0 {
                rig.ring.publish();
            }
            if random.u8(..10) == 0 {
                flying.clear();
                rig.restart();
            }
            returned.extend(std::iter::from_fn(|| rig.driver.take_used()).map(|used| used.written));
        }
        returned.sort_unstable();
        assert!(returned.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}: a chain was returned twice");
    }
}

/// Returns the record as words, to check and change it.
fn words(rig: &Rig) -> Words {
    let len = queue_len(rig.layout.size, rig.features);
    Words::new(rig.record.clone(), len, len).unwrap()
}

#[test]
fn a_batch_that_was_published_but_not_removed_is_not_popped_again() {
    use std::sync::atomic::Ordering::Relaxed;
    for features in kinds() {
        let is_packed = features.contains(Features::RING_PACKED);
        // Test half a lap, and a whole lap, after which only the wrap counter of a packed ring differs.
        for count in [2, 4] {
            let mut rig = rig(4, features);
            rig.send(1, count, 1);
            let popped = rig.pop_all();
            let record = words(&rig);
            // Restore what `published` changes, as if the process had died before it.
            let (header, entry, old) = if is_packed { (32, 32, 14..22) } else { (16, 16, 14..16) };
            let saved: Vec<u8> = old.clone().map(|at| record.u8(at).load(Relaxed)).collect();
            popped.iter().for_each(|&(head, number)| rig.ring.push(head, number));
            rig.ring.publish();
            for (at, byte) in old.zip(saved) {
                if !is_packed || matches!(at, 14 | 15 | 18 | 19 | 21) {
                    record.u8(at).store(byte, Relaxed);
                }
            }
            for (head, _) in &popped {
                let index = usize::from(if is_packed { head.entry } else { head.id });
                record.u8(header + entry * index).store(1, Relaxed);
            }
            assert_eq!(rig.restart(), 0, "{count}");
            assert_eq!(rig.take_used(), (1..=count).collect::<Vec<_>>());
            rig.send(9, 1, 2);
            assert_eq!(numbers(&rig.pop_all()), [9]);
        }
    }
}

#[test]
fn a_record_with_any_content_is_opened_without_panic() {
    for (features, seed) in kinds().into_iter().flat_map(|kind| (0..300).map(move |seed| (kind, seed))) {
        let mut rig = rig(8, features);
        let mut random = fastrand::Rng::with_seed(seed);
        rig.send(1, 3, 1);
        rig.pop_all();
        let record = words(&rig);
        for at in 0..queue_len(8, features) as usize {
            let keep = (8..10).contains(&at) || random.u8(..4) > 0;
            let byte = if random.bool() { random.u8(..) } else { random.u8(..9) };
            if !keep {
                record.u8(at).store(byte, std::sync::atomic::Ordering::Relaxed);
            }
        }
        assert!(rig.restart() <= 8);
        for _ in 0..20 {
            match rig.ring.pop(&mut rig.chain) {
                Ok(true) => rig.ring.push(rig.chain.head(), 0),
                Ok(false) | Err(_) => rig.ring.publish(),
            }
        }
    }
}

#[test]
fn records_that_do_not_fit_are_refused() {
    let [split, packed] = kinds();
    assert_eq!((queue_len(128, split), queue_len(128, packed)), (2112, 4160));
    let mapping = Mapping::zeroed(2 * 2112);
    assert!(Inflight::of_queue(mapping.clone(), 1, 128, split).is_some());
    assert!(Inflight::of_queue(mapping.clone(), 2, 128, split).is_none());
    assert!(Inflight::of_queue(mapping.clone(), u16::MAX, u16::MAX, packed).is_none());
    let mut rig = rig(8, split);
    let other = |size, features| Inflight::of_queue(mapping.clone(), 0, size, features).unwrap();
    assert_eq!(rig.ring.track(other(8, packed)), Err(SetupError::Record));
    assert_eq!(rig.ring.track(other(4, split)), Err(SetupError::Record));
    assert_eq!(rig.ring.track(other(16, split)), Ok(0), "a driver may use a smaller queue");
}
