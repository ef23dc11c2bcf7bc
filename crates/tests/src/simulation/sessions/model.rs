//! The possible contents of the disk. Every write has a number, which its blocks contain, so that a block
//! identifies its write and the write's session.
//!
//! A block may have the content of a write unless a later write, which began after the first had ended, was
//! acknowledged. A write ends when it is answered, when it was aborted and the function was answered, or when
//! its session is gone.

use block::Cookie;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a block.
pub(super) const BLOCK: usize = 512;
/// Blocks of the disk: few, so that writes overlap.
pub(super) const BLOCKS: usize = 96;

/// The disk, as the node and the simulation see it.
pub(super) struct Shared {
    blocks: Vec<u64>,
    pub(super) holds: bool,
    /// Requests that the disk holds.
    pub(super) held: Vec<Cookie>,
    /// Writes that must not be applied any more.
    pub(super) fenced: BTreeSet<u64>,
    /// Writes of a seeded fault that are applied later.
    pub(super) late: Vec<(usize, Vec<u8>)>,
    pub(super) violation: Option<String>,
    writes: u64,
}

impl Default for Shared {
    fn default() -> Shared {
        Shared {
            blocks: vec![0; BLOCKS],
            holds: false,
            held: Vec::new(),
            fenced: BTreeSet::new(),
            late: Vec::new(),
            violation: None,
            writes: 0,
        }
    }
}

/// Content of a block that the write of this number wrote.
pub(super) fn block_of(number: u64) -> [u8; BLOCK] {
    let word = number.to_le_bytes();
    std::array::from_fn(|at| word[at % 8])
}

/// The number of the write that a block has.
pub(super) fn number_of(bytes: &[u8]) -> Result<u64, String> {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    let is_whole = bytes.chunks_exact(8).all(|other| other == word);
    if is_whole {
        return Ok(u64::from_le_bytes(word));
    }
    let others = bytes.chunks_exact(8).enumerate().filter(|(_, other)| *other != word);
    let listed: Vec<String> = others
        .take(4)
        .map(|(at, other)| format!("{at}: {:#x}", u64::from_le_bytes(other.try_into().unwrap_or_default())))
        .collect();
    Err(format!("a block is torn or foreign: {:#x}, but {}", u64::from_le_bytes(word), listed.join(", ")))
}

impl Shared {
    pub(super) fn content(&self, at: usize, len: usize) -> Vec<u8> {
        self.blocks[at..at + len / BLOCK].iter().flat_map(|number| block_of(*number)).collect()
    }

    pub(super) fn number(&self, block: usize) -> u64 {
        self.blocks[block]
    }

    pub(super) fn apply(&mut self, at: usize, bytes: &[u8]) {
        for (place, block) in bytes.chunks_exact(BLOCK).enumerate() {
            match number_of(block) {
                Ok(number) if self.fenced.contains(&number) => {
                    self.violation = Some(format!("write {number:#x} was applied after it had ended"));
                }
                Ok(number) => self.blocks[at + place] = number,
                Err(why) => self.violation = Some(format!("{why}, at block {}", at + place)),
            }
        }
    }

    /// Returns whether the next write has the seeded fault; one in eight has.
    pub(super) fn is_fault_due(&mut self) -> bool {
        self.writes += 1;
        self.writes.is_multiple_of(8)
    }
}

struct Write {
    begun: u64,
    ended: Option<u64>,
    acknowledged: Option<u64>,
}

/// All writes of a run.
#[derive(Default)]
pub(super) struct Model {
    writes: BTreeMap<u64, Write>,
    /// Writes of each block.
    of_block: BTreeMap<usize, Vec<u64>>,
}

impl Model {
    pub(super) fn begin(&mut self, number: u64, blocks: std::ops::Range<usize>, now: u64) {
        self.writes.insert(number, Write { begun: now, ended: None, acknowledged: None });
        blocks.for_each(|block| self.of_block.entry(block).or_default().push(number));
    }

    pub(super) fn acknowledge(&mut self, number: u64, now: u64) {
        let write = self.writes.get_mut(&number).expect("it was begun");
        write.acknowledged = Some(now);
        write.ended.get_or_insert(now);
    }

    /// Records the end of a write without an answer, or with an error: it may have been applied before, and
    /// must not be applied later.
    pub(super) fn end(&mut self, number: u64, now: u64) {
        self.writes.get_mut(&number).expect("it was begun").ended.get_or_insert(now);
    }

    /// Checks the content `found` that a read from `begun` to `ended` returned for a block.
    pub(super) fn check(&self, block: usize, found: u64, begun: u64, ended: u64) -> Result<(), String> {
        let empty = Vec::new();
        let all = self.of_block.get(&block).unwrap_or(&empty);
        let end = match self.writes.get(&found) {
            _ if found == 0 => Some(0),
            Some(write) if all.contains(&found) && write.begun < ended => write.ended,
            _ => return Err(format!("block {block} has {found:#x}, which was never written there")),
        };
        let Some(end) = end else { return Ok(()) };
        let newer = all.iter().find(|other| {
            let write = &self.writes[other];
            write.acknowledged.is_some_and(|at| at <= begun) && write.begun > end
        });
        match newer {
            Some(newer) => {
                Err(format!("block {block} has {found:#x}, but write {newer:#x} was acknowledged"))
            }
            None => Ok(()),
        }
    }
}
