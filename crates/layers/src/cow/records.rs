//! The journal's bytes: checksums of what was written to chunks that the table does not name yet (docs/cow.md).
//!
//! A record describes one block of 4 KiB of the device: which of its sectors were written, and a CRC-32 of each.
//! A sector of the journal carries up to ten records, the life of the overlay in which they were written, and a
//! CRC-32 of its own. [`vouched`] finds the chunks whose content the records of one life vouch for: each sector
//! of such a chunk has one of the checksums recorded for it. Any of them will do, because no flush has covered
//! any of these writes: each is a content that the sector may have after a loss of the page cache.

use super::format::{Layout, PAGE_LEN};
use block::Bytes;

/// The device is described in blocks of that many bytes. A chunk is a whole number of them.
pub const BLOCK_LEN: u64 = 4096;
const SECTOR_LEN: usize = 512;
/// Sectors of a block.
pub(super) const SECTORS: usize = BLOCK_LEN as usize / SECTOR_LEN;
/// Records in a sector of the journal.
const PER_SECTOR: usize = 10;
/// Records in a page of the journal.
pub(super) const PER_PAGE: u64 = PAGE_LEN / SECTOR_LEN as u64 * PER_SECTOR as u64;
const RECORD_LEN: usize = 48;
/// Where a sector's records begin: behind the life, their number and the checksum.
const RECORDS_AT: usize = 32;

/// What was written to one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// Number of the block: its offset in the device in units of 4 KiB.
    pub block: u64,
    /// Bit n: sector n of the block was written.
    pub mask: u8,
    /// CRC-32 of each sector that was.
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
pub(super) fn encode_page(life: u64, mut records: impl Iterator<Item = Record>, page: &mut [u8]) {
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
        sector[..8].copy_from_slice(&life.to_le_bytes());
        sector[8..12].copy_from_slice(&count.to_le_bytes());
        let sum = crc32fast::hash(sector);
        sector[12..16].copy_from_slice(&sum.to_le_bytes());
    }
}

/// The records of one sector of the journal, if it is sound and of that life.
fn decode_sector(life: u64, sector: &[u8; SECTOR_LEN]) -> Option<impl Iterator<Item = Record>> {
    let mut unsummed = *sector;
    unsummed[12..16].fill(0);
    let count = u32::from_le_bytes(sector[8..12].try_into().ok()?) as usize;
    let is_sound = sector[..8] == life.to_le_bytes()
        && count <= PER_SECTOR
        && sector[12..16] == crc32fast::hash(&unsummed).to_le_bytes();
    let records = unsummed[RECORDS_AT..].as_chunks::<RECORD_LEN>().0[..count.min(PER_SECTOR)].to_vec();
    is_sound.then(|| records.into_iter().map(|bytes| Record::decode(&bytes)))
}

/// The records that a journal has of one life, by block. Those of a newer place come later.
fn decode(layout: Layout, journal: &[u8], life: u64) -> Vec<Record> {
    let sectors = journal.as_chunks::<SECTOR_LEN>().0.iter();
    let records = sectors.filter_map(|sector| decode_sector(life, sector)).flatten();
    let mut records: Vec<Record> =
        records.filter(|record| record.block < layout.size.0.div_ceil(BLOCK_LEN)).collect();
    records.sort_by_key(|record| record.block);
    records
}

/// Whether the table on disk names a chunk.
fn is_in(table: &[u8], chunk: u64) -> bool {
    table.get((chunk / 8) as usize).is_some_and(|byte| byte >> (chunk % 8) & 1 == 1)
}

/// Which sectors of a block lie within the device.
fn sectors_of(layout: Layout, block: u64) -> u8 {
    let sectors = (layout.size.0 - block * BLOCK_LEN).div_ceil(SECTOR_LEN as u64).min(SECTORS as u64);
    (0xff_u16 >> (SECTORS as u64 - sectors)) as u8
}

/// The chunks that the table does not name and of which the journal has a record, whether or not the data is there,
/// with their records.
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

/// The chunks that `table` lacks and that the journal of `life` vouches for: all of their sectors have a checksum that
/// was recorded. `read`: reads the overlay's data from an offset of the device on, in whole blocks.
///
/// # Errors
/// What `read` gives.
pub fn vouched<E>(
    layout: Layout,
    table: &[u8],
    journal: &[u8],
    life: u64,
    mut read: impl FnMut(Bytes, &mut [u8]) -> Result<(), E>,
) -> Result<Vec<u64>, E> {
    let records = decode(layout, journal, life);
    let mut found = Vec::new();
    let mut data = vec![0; layout.chunk.0 as usize];
    for (chunk, records) in described(layout, table, &records) {
        let start = chunk * layout.chunk.0;
        let end = (start + layout.chunk.0).min(layout.size.0.next_multiple_of(BLOCK_LEN));
        let blocks = start / BLOCK_LEN..end / BLOCK_LEN;
        // One whose records did not all reach the disk need not be read.
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
            is_vouched(sectors_of(layout, block), &records[at..at + own], bytes)
        });
        if all {
            found.push(chunk);
        }
    }
    Ok(found)
}

/// Whether each of these sectors of a block has one of the checksums recorded for it.
fn is_vouched(sectors: u8, records: &[Record], block: &[u8]) -> bool {
    block.as_chunks::<SECTOR_LEN>().0.iter().enumerate().all(|(number, bytes)| {
        let bit = 1 << number;
        let sum = crc32fast::hash(bytes);
        sectors & bit == 0
            || records.iter().any(|record| record.mask & bit != 0 && record.sums[number] == sum)
    })
}

/// The chunks that the journal of `life` has any record of, vouched for or not: what a simulation takes that believes
/// too much.
pub fn mentioned(layout: Layout, table: &[u8], journal: &[u8], life: u64) -> Vec<u64> {
    let records = decode(layout, journal, life);
    described(layout, table, &records).into_iter().map(|(chunk, _)| chunk).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: u64 = 5;

    fn layout() -> Layout {
        Layout::new(Bytes(8 * 8192 + 1024), Some(Bytes(8192))).unwrap()
    }

    fn record(block: u64, mask: u8, sector: &[u8]) -> Record {
        Record { block, mask, sums: [crc32fast::hash(sector); SECTORS] }
    }

    fn journal(records: &[Record]) -> Vec<u8> {
        let mut journal = vec![0xa5; 2 * PAGE_LEN as usize];
        for (number, page) in journal.chunks_mut(PAGE_LEN as usize).enumerate() {
            encode_page(LIFE, records.iter().skip(number * PER_PAGE as usize).copied(), page);
        }
        journal
    }

    fn found(journal: &[u8], table: u8, life: u64, data: &[u8]) -> Vec<u64> {
        let read = |at: Bytes, into: &mut [u8]| -> Result<(), ()> {
            into.copy_from_slice(&data[at.0 as usize..][..into.len()]);
            Ok(())
        };
        vouched(layout(), &[table, 0], journal, life, read).unwrap()
    }

    #[test]
    fn a_chunk_is_vouched_for_when_every_sector_has_a_checksum_that_was_recorded() {
        let (one, other) = ([1; 512], [2; 512]);
        let records = [record(2, 0xff, &one), record(3, 0xff, &one), record(3, 0b100, &other)];
        let journal = journal(&records);
        let mut data = vec![0; 9 * 8192];
        assert_eq!(found(&journal, 0, LIFE, &data), [], "holes");
        data[8192..16384].fill(1);
        assert_eq!(found(&journal, 0, LIFE, &data), [1]);
        data[12288 + 1024..12288 + 1536].fill(2);
        assert_eq!(found(&journal, 0, LIFE, &data), [1], "overwritten");
        assert_eq!(found(&journal, 0b10, LIFE, &data), [], "the table has it");
        assert_eq!(found(&journal, 0, LIFE + 1, &data), [], "of another life");
        data[12288] = 2;
        assert_eq!(found(&journal, 0, LIFE, &data), [], "torn");
    }

    #[test]
    fn a_chunk_is_not_vouched_for_by_half_of_its_records() {
        let data = vec![1; 9 * 8192];
        let one = [1; 512];
        assert_eq!(found(&journal(&[record(2, 0xff, &one)]), 0, LIFE, &data), []);
        assert_eq!(found(&journal(&[record(2, 0xff, &one), record(3, 0x7f, &one)]), 0, LIFE, &data), []);
        // The device ends after two sectors of the last chunk.
        assert_eq!(found(&journal(&[record(16, 0b11, &one)]), 0, LIFE, &data), [8]);
        assert_eq!(found(&journal(&[record(17, 0xff, &one), record(u64::MAX, 1, &one)]), 0, LIFE, &data), []);
    }

    #[test]
    fn a_torn_sector_of_the_journal_vouches_for_nothing() {
        let data = vec![1; 9 * 8192];
        let mut records = vec![record(0, 0xff, &[1; 512]), record(1, 0xff, &[1; 512])];
        // The last ones lie on the second page.
        records.extend(std::iter::repeat_n(record(4, 0xff, &[9; 512]), PER_PAGE as usize));
        records.extend([record(6, 0xff, &[1; 512]), record(7, 0xff, &[1; 512])]);
        let sound = journal(&records);
        assert_eq!(found(&sound, 0, LIFE, &data), [0, 3]);
        for at in (0..512).step_by(7) {
            let mut torn = sound.clone();
            torn[at] ^= 0x40;
            assert_eq!(found(&torn, 0, LIFE, &data), [3], "byte {at}");
        }
    }
}
