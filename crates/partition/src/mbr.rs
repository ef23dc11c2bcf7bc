//! MBR: four entries in the first block, and a chain of blocks for the logical partitions of an extended
//! partition.
//!
//! Source: the kernel's block/partitions/msdos.c. Entries count logical blocks. The chain is followed as long
//! as it stays within the extended partition and reaches no block twice.

use crate::{Disk, Format, LOGICAL_MAX, Partition, Table, Type, add, read_within, u16_at, u32_at};
use block::Bytes;

const ENTRIES_AT: usize = 446;
const ENTRY_LEN: usize = 16;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
const PROTECTIVE: u8 = 0xee;

/// An entry, in blocks.
#[derive(Clone, Copy, Debug)]
struct Entry {
    code: u8,
    start: u32,
    len: u32,
}

impl Entry {
    fn is_extended(self) -> bool {
        EXTENDED.contains(&self.code)
    }

    fn is_empty(self) -> bool {
        self.code == 0 || self.len == 0
    }
}

/// A boot record with a table: the first block, or a link of the chain.
pub(crate) struct Boot {
    disk_id: u32,
    entries: [Entry; 4],
}

impl Boot {
    /// Whether it has the protective entry of a GPT.
    pub(crate) fn is_protective(&self) -> bool {
        self.entries.iter().any(|entry| entry.code == PROTECTIVE && entry.start == 1)
    }
}

/// Parses a boot record. `None`: it has no signature, or is the boot sector of a file system, which has code
/// where a table has flags (0 or 0x80).
pub(crate) fn parse(bytes: &[u8; 512]) -> Option<Boot> {
    if u16_at(bytes, 510) != 0xaa55 {
        return None;
    }
    let mut entries = [Entry { code: 0, start: 0, len: 0 }; 4];
    for (index, entry) in entries.iter_mut().enumerate() {
        let at = ENTRIES_AT + index * ENTRY_LEN;
        if !matches!(bytes[at], 0 | 0x80) {
            return None;
        }
        *entry = Entry { code: bytes[at + 4], start: u32_at(bytes, at + 8), len: u32_at(bytes, at + 12) };
    }
    Some(Boot { disk_id: u32_at(bytes, 440), entries })
}

/// Reads the table of a disk without a valid GPT. `None`: none of its entries is used.
pub(crate) fn read<D: Disk>(disk: &mut D, boot: &Boot) -> Result<Option<Table>, D::Error> {
    if boot.entries.iter().all(|entry| entry.is_empty()) {
        return Ok(None);
    }
    let mut table = Table {
        format: Format::Mbr,
        block: disk.block(),
        id: format!("{:08x}", boot.disk_id),
        partitions: Vec::new(),
        notes: Vec::new(),
    };
    // The protective entry covers the disk but is no partition: writing to it would overwrite the GPT.
    if boot.entries.iter().any(|entry| entry.code == PROTECTIVE) {
        table.notes.push("it says that there is a GPT, which is damaged in both places".to_owned());
        return Ok(Some(table));
    }
    for (index, &entry) in boot.entries.iter().enumerate() {
        if !entry.is_empty() {
            push(&mut table, disk.size(), index as u32 + 1, entry.start.into(), entry);
        }
    }
    if let Some(extended) = boot.entries.iter().find(|entry| entry.is_extended() && !entry.is_empty()) {
        follow(disk, &mut table, *extended)?;
    }
    Ok(Some(table))
}

/// Follows the chain of an extended partition.
fn follow<D: Disk>(disk: &mut D, table: &mut Table, extended: Entry) -> Result<(), D::Error> {
    let block = u64::from(disk.block());
    let (first, end) = (u64::from(extended.start), u64::from(extended.start) + u64::from(extended.len));
    let mut at = first;
    let mut seen: Vec<u64> = Vec::new();
    let mut number = 5;
    loop {
        if seen.contains(&at) || seen.len() == LOGICAL_MAX {
            table.notes.push("the chain of logical partitions is a loop: the rest is ignored".to_owned());
            return Ok(());
        }
        seen.push(at);
        let sector = read_within(disk, at * block, 512)?;
        let link = sector.and_then(|bytes| parse(bytes.as_slice().try_into().ok()?));
        let Some(link) = link else {
            table.notes.push("the chain of logical partitions is broken: the rest is ignored".to_owned());
            return Ok(());
        };
        for &entry in link.entries.iter().filter(|entry| !entry.is_empty() && !entry.is_extended()) {
            // The start is relative to the link.
            let start = at + u64::from(entry.start);
            if start + u64::from(entry.len) > end {
                table
                    .notes
                    .push(format!("partition {number} ends past its extended partition and is ignored"));
            } else {
                push(table, disk.size(), number, start, entry);
            }
            number += 1;
        }
        // The next link is relative to the extended partition.
        let Some(next) = link.entries.iter().find(|entry| entry.is_extended() && !entry.is_empty()) else {
            return Ok(());
        };
        at = first + u64::from(next.start);
        if at >= end {
            table.notes.push("the chain of logical partitions is broken: the rest is ignored".to_owned());
            return Ok(());
        }
    }
}

fn push(table: &mut Table, disk_len: Bytes, number: u32, start: u64, entry: Entry) {
    // 33 bits of blocks of at most 2^17 bytes: no overflow.
    let block = u64::from(table.block);
    let partition = Partition {
        number,
        start: Bytes(start * block),
        len: Bytes(u64::from(entry.len) * block),
        kind: Type::Code(entry.code),
        name: String::new(),
        uuid: format!("{}-{number:02x}", table.id),
        extended: entry.is_extended(),
    };
    add(table, disk_len, partition);
}

#[cfg(test)]
mod tests {
    use crate::testing::{Image, mbr_image};
    use crate::{Format, Table, Type, read};
    use block::Bytes;

    fn table(image: &mut Image) -> Table {
        read(image).unwrap().expect("a table")
    }

    fn numbers(table: &Table) -> Vec<u32> {
        table.partitions.iter().map(|partition| partition.number).collect()
    }

    #[test]
    fn primary_and_logical_partitions_are_numbered_as_the_kernel_does() {
        let table = table(&mut mbr_image());
        assert_eq!((table.format, table.id.as_str()), (Format::Mbr, "cafef00d"));
        assert_eq!(numbers(&table), [1, 2, 5, 6]);
        assert_eq!(table.notes, [""; 0]);
        let logical = &table.partitions[3];
        assert_eq!((logical.start, logical.len), (Bytes((100 + 50 + 2) * 512), Bytes(20 * 512)));
        assert_eq!((logical.kind, logical.uuid.as_str()), (Type::Code(0x83), "cafef00d-06"));
        assert!(table.partitions[1].extended && !logical.extended);
    }

    #[test]
    fn a_circular_chain_ends() {
        let mut image = mbr_image();
        // The second link points back to the first.
        image.entry(150, 1, 0x05, 0, 50);
        let table = table(&mut image);
        assert_eq!(numbers(&table), [1, 2, 5, 6]);
        assert!(table.notes[0].contains("is a loop"), "{:?}", table.notes);
        // To itself.
        let mut image = mbr_image();
        image.entry(150, 1, 0x05, 50, 50);
        assert_eq!(numbers(&self::table(&mut image)), [1, 2, 5, 6]);
    }

    #[test]
    fn a_chain_of_many_links_is_truncated() {
        let mut image = Image::new(4 << 20, 512);
        image.sign(0);
        image.entry(0, 0, 0x05, 100, 4000);
        for link in 0..3000 {
            image.sign(100 + link);
            image.entry(100 + link, 0, 0x83, 1, 1);
            image.entry(100 + link, 1, 0x05, link as u32 + 1, 1);
        }
        let table = table(&mut image);
        assert_eq!(table.partitions.len(), 1 + crate::LOGICAL_MAX);
        assert!(image.reads <= crate::READS_MAX);
    }

    #[test]
    fn partitions_past_the_end_are_ignored_with_a_note() {
        let mut image = mbr_image();
        image.entry(0, 2, 0x83, 1000, u32::MAX);
        let table = table(&mut image);
        assert_eq!(numbers(&table), [1, 2, 5, 6]);
        assert_eq!(table.notes, ["partition 3 ends past the device and is ignored"]);
    }

    #[test]
    fn the_boot_sector_of_a_file_system_is_not_a_table() {
        let mut image = Image::new(1 << 20, 512);
        image.sign(0);
        image.bytes[446] = 0xeb;
        assert_eq!(read(&mut image), Ok(None));
    }

    #[test]
    fn entries_count_blocks_of_4096_bytes() {
        let mut image = Image::new(1 << 20, 4096);
        image.sign(0);
        image.entry(0, 0, 0x83, 16, 32);
        let table = table(&mut image);
        assert_eq!((table.partitions[0].start, table.partitions[0].len), (Bytes(65536), Bytes(131_072)));
    }
}
