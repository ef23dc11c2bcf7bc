//! The journal on disk: checksums of data in chunks that the table does not have yet (docs/cow.md).
//!
//! A record describes one block of 4 KiB of the device: which of its sectors were written, and a CRC-32 of
//! each. A sector of the journal has up to ten records, the generation of the overlay in which they were
//! written, and a CRC-32 of itself. [`confirmed_chunks`] finds the chunks whose content the records of one
//! generation confirm: each sector of such a chunk matches one of the checksums recorded for it. Any recorded
//! version is valid after a loss of the page cache, because no flush has covered these writes.

use super::format::{Layout, PAGE_LEN};
use block::Bytes;

/// Bytes of a block that a record describes. A chunk is a whole number of blocks.
pub const BLOCK_LEN: u64 = 4096;
const SECTOR_LEN: usize = 512;
/// Sectors in a block.
pub(super) const SECTORS: usize = BLOCK_LEN as usize / SECTOR_LEN;
/// Records in a sector of the journal.
const PER_SECTOR: usize = 10;
/// Records in a page of the journal.
pub(super) const PER_PAGE: u64 = PAGE_LEN / SECTOR_LEN as u64 * PER_SECTOR as u64;
const RECORD_LEN: usize = 48;
/// The offset of the first record in a sector, behind the generation, the record count and the checksum.
const RECORDS_AT: usize = 32;

/// A record: the checksums of the sectors written to one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// Number of the block: its offset in the device in units of 4 KiB.
    pub block: u64,
    /// Bit n: sector n of the block was written.
    pub mask: u8,
    /// CRC-32 of each sector that was written.
    pub sums: [u32; SECTORS],
}

impl Record {
    fn encode(&self, into: &mut [u8]) {
        into[..8].copy_from_slice(&self.block.to_le_bytes());
        into[8..16].copy_from_slice(&u64::from(self.mask).to_le_bytes());
        for (bytes, sum) in into[16..].as_chunks_mut::<4>().0.iter_mut().zip(self.sums) {
            *bytes = sum.to_le_bytes();
        }
    }

    fn decode(bytes: &[u8; RECORD_LEN]) -> Record {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        let mut sums = [0; SECTORS];
        for (sum, bytes) in sums.iter_mut().zip(bytes[16..].as_chunks::<4>().0) {
            *sum = u32::from_le_bytes(*bytes);
        }
        Record { block: word(0), mask: word(8) as u8, sums }
    }
}

/// Encodes a page of the journal. Records past the end of the iterator, and sectors without any, are zero.
pub(super) fn encode_page(generation: u64, mut records: impl Iterator<Item = Record>, page: &mut [u8]) {
    page.fill(0);
    for sector in page.chunks_exact_mut(SECTOR_LEN) {
        let mut count = 0u32;
        for (room, record) in sector[RECORDS_AT..].chunks_exact_mut(RECORD_LEN).zip(records.by_ref()) {
            record.encode(room);
            count += 1;
        }
        if count == 0 {
            return;
        }
        sector[..8].copy_from_slice(&generation.to_le_bytes());
        sector[8..12].copy_from_slice(&count.to_le_bytes());
        let sum = crc32fast::hash(sector);
        sector[12..16].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Returns the records of one sector of the journal if its checksum and generation are right.
fn decode_sector(generation: u64, sector: &[u8; SECTOR_LEN]) -> Option<impl Iterator<Item = Record>> {
    let mut unsummed = *sector;
    unsummed[12..16].fill(0);
    let count = u32::from_le_bytes(sector[8..12].try_into().ok()?) as usize;
    let is_sound = sector[..8] == generation.to_le_bytes()
        && count <= PER_SECTOR
        && sector[12..16] == crc32fast::hash(&unsummed).to_le_bytes();
    let records = unsummed[RECORDS_AT..].as_chunks::<RECORD_LEN>().0[..count.min(PER_SECTOR)].to_vec();
    is_sound.then(|| records.into_iter().map(|bytes| Record::decode(&bytes)))
}

/// Returns a journal's records of one generation, sorted by block, then by their order in the file.
fn decode(layout: Layout, journal: &[u8], generation: u64) -> Vec<Record> {
    let sectors = journal.as_chunks::<SECTOR_LEN>().0.iter();
    let records = sectors.filter_map(|sector| decode_sector(generation, sector)).flatten();
    let mut records: Vec<Record> =
        records.filter(|record| record.block < layout.size.0.div_ceil(BLOCK_LEN)).collect();
    records.sort_by_key(|record| record.block);
    records
}

/// Returns whether the table on disk has a chunk.
fn is_in(table: &[u8], chunk: u64) -> bool {
    table.get((chunk / 8) as usize).is_some_and(|byte| byte >> (chunk % 8) & 1 == 1)
}

/// Returns a mask of the sectors of a block that lie within the device.
fn sectors_of(layout: Layout, block: u64) -> u8 {
    let sectors = (layout.size.0 - block * BLOCK_LEN).div_ceil(SECTOR_LEN as u64).min(SECTORS as u64);
    (0xff_u16 >> (SECTORS as u64 - sectors)) as u8
}

/// Returns the chunks that the table lacks and that the journal has records of, with these records.
fn described(layout: Layout, table: &[u8], records: &[Record]) -> Vec<(u64, Vec<Record>)> {
    let blocks = layout.chunk.0 / BLOCK_LEN;
    let mut chunks: Vec<(u64, Vec<Record>)> = Vec::new();
    for record in records {
        let chunk = record.block / blocks;
        match chunks.last_mut() {
            Some((last, records)) if *last == chunk => records.push(*record),
            _ if is_in(table, chunk) => {}
            _ => chunks.push((chunk, vec![*record])),
        }
    }
    chunks
}

/// Returns the chunks that `table` lacks and that the journal of `generation` confirms: each sector matches a
/// recorded checksum. `read` reads the overlay's data from a device offset, in whole blocks.
///
/// # Errors
/// An error of `read`.
pub fn confirmed_chunks<E>(
    layout: Layout,
    table: &[u8],
    journal: &[u8],
    generation: u64,
    mut read: impl FnMut(Bytes, &mut [u8]) -> Result<(), E>,
) -> Result<Vec<u64>, E> {
    let records = decode(layout, journal, generation);
    let mut found = Vec::new();
    let mut data = vec![0; layout.chunk.0 as usize];
    for (chunk, records) in described(layout, table, &records) {
        let start = chunk * layout.chunk.0;
        let end = (start + layout.chunk.0).min(layout.size.0.next_multiple_of(BLOCK_LEN));
        let blocks = start / BLOCK_LEN..end / BLOCK_LEN;
        // A chunk whose records did not all reach the disk need not be read.
        let mask = |block: u64| {
            let of_block = records.iter().filter(|record| record.block == block);
            of_block.fold(0, |mask, record| mask | record.mask)
        };
        if !blocks.clone().all(|block| sectors_of(layout, block) & !mask(block) == 0) {
            continue;
        }
        let data = &mut data[..(end - start) as usize];
        read(Bytes(start), data)?;
        let mut at = 0;
        let all = blocks.zip(data.as_chunks::<{ BLOCK_LEN as usize }>().0).all(|(block, bytes)| {
            at += records[at..].iter().take_while(|record| record.block < block).count();
            let own = records[at..].iter().take_while(|record| record.block == block).count();
            is_confirmed(sectors_of(layout, block), &records[at..at + own], bytes)
        });
        if all {
            found.push(chunk);
        }
    }
    Ok(found)
}

/// Returns whether each of these sectors of a block matches a recorded checksum.
fn is_confirmed(sectors: u8, records: &[Record], block: &[u8]) -> bool {
    block.as_chunks::<SECTOR_LEN>().0.iter().enumerate().all(|(number, bytes)| {
        let bit = 1 << number;
        let sum = crc32fast::hash(bytes);
        sectors & bit == 0
            || records.iter().any(|record| record.mask & bit != 0 && record.sums[number] == sum)
    })
}

/// Returns the chunks that the journal of `generation` has any record of, confirmed or not. Simulations use
/// it as a seeded fault in place of [`confirmed_chunks`].
pub fn recorded_chunks(layout: Layout, table: &[u8], journal: &[u8], generation: u64) -> Vec<u64> {
    let records = decode(layout, journal, generation);
    described(layout, table, &records).into_iter().map(|(chunk, _)| chunk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GENERATION: u64 = 5;

    fn layout() -> Layout {
        Layout::new(Bytes(8 * 8192 + 1024), Some(Bytes(8192))).unwrap()
    }

    fn record(block: u64, mask: u8, sector: &[u8]) -> Record {
        Record { block, mask, sums: [crc32fast::hash(sector); SECTORS] }
    }

    fn journal(records: &[Record]) -> Vec<u8> {
        let mut journal = vec![0xa5; 2 * PAGE_LEN as usize];
        for (number, page) in journal.chunks_mut(PAGE_LEN as usize).enumerate() {
            encode_page(GENERATION, records.iter().skip(number * PER_PAGE as usize).copied(), page);
        }
        journal
    }

    fn found(journal: &[u8], table: u8, generation: u64, data: &[u8]) -> Vec<u64> {
        let read = |at: Bytes, into: &mut [u8]| -> Result<(), ()> {
            into.copy_from_slice(&data[at.0 as usize..][..into.len()]);
            Ok(())
        };
        confirmed_chunks(layout(), &[table, 0], journal, generation, read).unwrap()
    }

    #[test]
    fn a_chunk_is_confirmed_if_every_sector_matches_a_recorded_checksum() {
        let (one, other) = ([1; 512], [2; 512]);
        let records = [record(2, 0xff, &one), record(3, 0xff, &one), record(3, 0b100, &other)];
        let journal = journal(&records);
        let mut data = vec![0; 9 * 8192];
        assert_eq!(found(&journal, 0, GENERATION, &data), [], "holes");
        data[8192..16384].fill(1);
        assert_eq!(found(&journal, 0, GENERATION, &data), [1]);
        data[12288 + 1024..12288 + 1536].fill(2);
        assert_eq!(found(&journal, 0, GENERATION, &data), [1], "overwritten");
        assert_eq!(found(&journal, 0b10, GENERATION, &data), [], "the table already has it");
        assert_eq!(found(&journal, 0, GENERATION + 1, &data), [], "another generation");
        data[12288] = 2;
        assert_eq!(found(&journal, 0, GENERATION, &data), [], "torn");
    }

    #[test]
    fn a_chunk_with_missing_records_is_not_confirmed() {
        let data = vec![1; 9 * 8192];
        let one = [1; 512];
        assert_eq!(found(&journal(&[record(2, 0xff, &one)]), 0, GENERATION, &data), []);
        assert_eq!(
            found(&journal(&[record(2, 0xff, &one), record(3, 0x7f, &one)]), 0, GENERATION, &data),
            []
        );
        // The device ends after two sectors of the last chunk.
        assert_eq!(found(&journal(&[record(16, 0b11, &one)]), 0, GENERATION, &data), [8]);
        assert_eq!(
            found(&journal(&[record(17, 0xff, &one), record(u64::MAX, 1, &one)]), 0, GENERATION, &data),
            []
        );
    }

    #[test]
    fn a_torn_journal_sector_is_ignored() {
        let data = vec![1; 9 * 8192];
        let mut records = vec![record(0, 0xff, &[1; 512]), record(1, 0xff, &[1; 512])];
        // The last ones lie on the second page.
        records.extend(std::iter::repeat_n(record(4, 0xff, &[9; 512]), PER_PAGE as usize));
        records.extend([record(6, 0xff, &[1; 512]), record(7, 0xff, &[1; 512])]);
        let sound = journal(&records);
        assert_eq!(found(&sound, 0, GENERATION, &data), [0, 3]);
        for at in (0..512).step_by(7) {
            let mut torn = sound.clone();
            torn[at] ^= 0x40;
            assert_eq!(found(&torn, 0, GENERATION, &data), [3], "byte {at}");
        }
    }
}
