//! Bodies of the fuzz targets: no content of guest memory, at any time, may cause a panic, a span outside
//! guest memory, or an endless loop.
//!
//! An input is a byte of settings, and steps: a byte that selects the step, and its arguments. The guest
//! writes arbitrary bytes anywhere, including descriptors and indexes; the device pops, pushes, publishes,
//! suppresses, and dies.

use crate::Features;
use crate::blk::{self, Config, Range, S_IOERR, S_OK, Shape};
use crate::inflight::{Inflight, queue_len};
use crate::memory::{GuestMemory, GuestRegion, Mapping};
use crate::ring::{Chain, Head, Layout, Position, Ring};
use block::{Bytes, QueueLimits, Region};
use std::sync::Arc;

/// First address of guest memory. There are two regions with a hole between them.
const START: u64 = 0x1000;
const LEN: u64 = 0x2000;
const SECOND: u64 = 0x4000;
const CHAIN_MAX: u16 = 20;
/// Maximum number of chains that the device holds, which is its number of tags.
const TAGS: usize = 32;

/// Reads the fields of an input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|one| one[0])
    }

    fn word(&mut self) -> Option<u16> {
        self.take(2).map(|two| u16::from_le_bytes([two[0], two[1]]))
    }
}

fn memory() -> Arc<GuestMemory> {
    let regions = [(START, 0), (SECOND, 1)].map(|(guest, number)| GuestRegion {
        guest,
        user: guest,
        len: LEN,
        mapping: Mapping::zeroed(LEN as usize),
        region: Region(number),
    });
    Arc::new(GuestMemory::new(regions.into(), None).expect("two regions"))
}

fn layout(size: u16) -> Layout {
    Layout { size, descriptors: START, driver: START + 0x200, device: START + 0x300, chain_max: CHAIN_MAX }
}

/// Writes bytes as the guest does. Bytes outside guest memory are dropped.
fn poke(memory: &GuestMemory, address: u64, bytes: &[u8]) {
    for (at, &byte) in bytes.iter().enumerate() {
        if let Some(span) = memory.translate(address + at as u64, 1) {
            assert!(memory.store_byte(span, byte), "a span of this table");
        }
    }
}

/// Asserts that all spans of a chain are in guest memory, by reading them.
fn check(memory: &GuestMemory, chain: &Chain, size: u16) {
    assert!(chain.head().count <= size, "a chain is not longer than the ring");
    for &span in chain.readable().iter().chain(chain.writable()) {
        assert!(!span.is_empty() && u64::from(span.len()) <= LEN, "a span is part of a region");
        let mut bytes = vec![0; span.len() as usize];
        assert!(memory.read(span, &mut bytes), "a span outside of guest memory");
    }
}

/// Runs an input on a split ring. Returns the number of chains popped.
pub fn split(input: &[u8]) -> usize {
    play(input, Features::empty())
}

/// Runs an input on a packed ring. Returns the number of chains popped.
pub fn packed(input: &[u8]) -> usize {
    play(input, Features::RING_PACKED)
}

fn play(input: &[u8], kind: Features) -> usize {
    let mut input = Input(input);
    let settings = input.byte().unwrap_or(0);
    let mut features = kind | Features::VERSION_1;
    features.set(Features::INDIRECT_DESC, settings & 1 == 0);
    features.set(Features::EVENT_IDX, settings & 2 == 0);
    let is_packed = kind == Features::RING_PACKED;
    let size = if is_packed { 1 + u16::from(settings >> 4) } else { 1 << (settings >> 4 & 3) };
    let memory = memory();
    let record = Mapping::zeroed(queue_len(size, features) as usize);
    let start = || {
        let mut ring = Ring::new(memory.clone(), layout(size), features, Position::START)?;
        match Inflight::of_queue(record.clone(), 0, size, features).filter(|_| settings & 4 != 0) {
            Some(inflight) => ring.track(inflight).map(|_| ring),
            None => Ok(ring),
        }
    };
    let mut ring = start().expect("a valid layout");
    let mut chain = Chain::new(usize::from(CHAIN_MAX) + 2);
    let (mut flying, mut popped): (Vec<Head>, usize) = (Vec::new(), 0);
    while let Some(step) = input.byte() {
        match step & 7 {
            // The guest writes a descriptor or arbitrary bytes.
            0 => {
                let Some(fields) = input.take(8) else { break };
                // Address and length have 16 bits; flags and the last field have 8 bits, which include the
                // flags of packed rings.
                let (address, len) = ([fields[0], fields[1]], [fields[2], fields[3]]);
                let flags = u16::from(fields[4] & 7) | u16::from(fields[4] & 8) << 4;
                let flags = (flags | u16::from(fields[4] & 16) << 11).to_le_bytes();
                let link = [fields[5], fields[6] & 1];
                let last = if is_packed { [link, flags] } else { [flags, link] };
                let words = [address, [0; 2], [0; 2], [0; 2], len, [0; 2], last[0], last[1]];
                // The highest bit selects the second region, for indirect tables.
                let table = if fields[7] & 0x80 == 0 { START } else { SECOND };
                poke(&memory, table + 16 * u64::from(fields[7] & 0x7f), words.as_flattened());
            }
            1 => {
                let Some(address) = input.word() else { break };
                let Some(bytes) = input.take(usize::from(step >> 3)) else { break };
                poke(&memory, address.into(), bytes);
            }
            // The driver of a split ring makes descriptor `step >> 3` available.
            2 => {
                let layout = layout(size);
                let mut index = [0; 2];
                let at = memory.translate(layout.driver + 2, 2).expect("the driver area");
                assert!(memory.read(at, &mut index), "a span of this table");
                let index = u16::from_le_bytes(index);
                let slot = layout.driver + 4 + 2 * u64::from(index % size);
                poke(&memory, slot, &[step >> 3, 0]);
                poke(&memory, layout.driver + 2, &index.wrapping_add(1).to_le_bytes());
            }
            3 => {
                for _ in 0..=size {
                    if flying.len() == TAGS {
                        break;
                    }
                    let result = ring.pop(&mut chain);
                    if result.is_err() {
                        assert_eq!(ring.pop(&mut chain), result, "the ring stays where it is");
                    }
                    if result != Ok(true) {
                        break;
                    }
                    check(&memory, &chain, size);
                    flying.push(chain.head());
                    popped += 1;
                }
            }
            4 if !flying.is_empty() => {
                let head = flying.swap_remove(usize::from(step >> 3) % flying.len());
                ring.push(head, step.into());
            }
            5 => {
                ring.publish();
                let _ = ring.should_interrupt();
            }
            6 => match step >> 3 & 1 {
                0 => ring.suppress_kicks(),
                _ => drop(std::hint::black_box(ring.enable_kicks())),
            },
            // The device process dies. Without a record it continues at the position that the front-end
            // gives.
            7 => {
                flying.clear();
                ring = match (settings & 4 != 0, step >> 3 & 1) {
                    (true, _) => start().expect("a valid layout"),
                    (false, 0) => {
                        let position = Position::from_base(ring.position().to_base(features), features);
                        Ring::new(memory.clone(), layout(size), features, position).expect("a valid position")
                    }
                    (false, _) => continue,
                };
            }
            _ => {}
        }
    }
    popped
}

/// Parses requests. An input is a byte of settings, and requests: the number of readable and writable
/// descriptors, a length for each, and the readable bytes. Returns the number of requests parsed.
pub fn requests(input: &[u8]) -> usize {
    let mut input = Input(input);
    let settings = input.byte().unwrap_or(0);
    let memory = memory();
    let limits = QueueLimits {
        logical_block_size: Bytes(512 << (settings & 3)),
        max_hw_discard_sectors: block::Sectors(64),
        max_write_zeroes_sectors: block::Sectors(32),
        ..QueueLimits::default()
    };
    let shape = Shape {
        queues: 1,
        segments_max: 8,
        segment_len_max: 1 << 16,
        ranges_max: 3,
        is_read_only: settings & 4 != 0,
    };
    let capacity = Bytes(1 << 20);
    let config = Config::new(&limits, capacity, shape);
    let layout = layout(8);
    let mut ring = Ring::new(memory.clone(), layout, Features::empty(), Position::START).expect("a layout");
    let mut driver =
        crate::driver::Driver::new(memory.clone(), &layout, Features::empty()).expect("a layout");
    let (mut chain, mut parsed) = (Chain::new(16), 0);
    while let Some(counts) = input.byte() {
        let (readable, writable) = (usize::from(counts & 3), usize::from(counts >> 2 & 3));
        let Some(lens) = input.take(readable + writable).filter(|lens| !lens.is_empty()) else { break };
        // Each descriptor has separate memory, so that its bytes are those of the input.
        let place = |at: usize| SECOND + 256 * at as u64;
        let ranges: Vec<_> = lens.iter().enumerate().map(|(at, &len)| (place(at), u32::from(len))).collect();
        for &(address, len) in &ranges[..readable] {
            let len = (len as usize).min(input.0.len());
            poke(&memory, address, input.take(len).unwrap_or_default());
        }
        driver.add(&ranges[..readable], &ranges[readable..]).expect("all descriptors are free");
        let _ = driver.publish();
        assert_eq!(ring.pop(&mut chain), Ok(true));
        let head = chain.head();
        let status = match blk::parse(&memory, &mut chain) {
            Err(_) => None,
            Ok(request) => {
                parsed += 1;
                let bytes: u64 = request.data.iter().map(|span| u64::from(span.len())).sum();
                assert_eq!(bytes, request.len, "the data is as long as its spans");
                assert_eq!(request.ticket.status.len(), 1);
                let inside = |offset: Bytes, len: Bytes| {
                    let unit = limits.logical_block_size.0;
                    offset.is_aligned(unit) && len.is_aligned(unit) && offset.0 + len.0 <= capacity.0
                };
                let transfer = config.check_transfer(&request);
                let mut ranges = [Range::EMPTY; 4];
                let count = config.read_ranges(&memory, &request, &mut ranges);
                assert!(
                    transfer.is_err() || transfer.is_ok_and(|(offset, len)| len.0 > 0 && inside(offset, len))
                );
                let count = count.map_or(0, |(_, count)| count);
                assert!(
                    ranges[..count].iter().all(|range| range.len.0 > 0 && inside(range.offset, range.len))
                );
                Some(request.ticket)
            }
        };
        match status {
            Some(ticket) => ring.complete(&ticket, if counts & 0x80 == 0 { S_OK } else { S_IOERR }),
            None => ring.push(head, 0),
        }
        ring.publish();
        assert!(driver.take_used().is_some(), "the chain is returned");
    }
    parsed
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Replays the committed inputs of a target.
    fn replay(target: &str, body: fn(&[u8]) -> usize) -> usize {
        let folder = format!("{}/../../fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}"));
        let inputs = files.map(|file| std::fs::read(file.unwrap().path()).unwrap());
        inputs.map(|input| body(&input)).sum()
    }

    #[test]
    fn kept_inputs_reach_chains_and_requests() {
        assert!(replay("virtio_split", split) >= 3);
        assert!(replay("virtio_packed", packed) >= 3);
        assert!(replay("virtio_blk", requests) >= 7);
    }

    #[test]
    fn random_inputs_cause_no_panic() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut popped = [0; 3];
        for _ in 0..3000 {
            let input: Vec<u8> = (0..random.usize(..400))
                .map(|_| if random.bool() { random.u8(..) } else { random.u8(..20) })
                .collect();
            for (count, body) in popped.iter_mut().zip([split, packed, requests]) {
                *count += body(&input);
            }
        }
        assert!(popped.iter().all(|&count| count > 0), "{popped:?}");
    }
}
