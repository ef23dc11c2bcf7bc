//! GPT: a header after the first block and another in the last, each with its own partition entries.
//!
//! Source: UEFI 2.10, section 5.3, and the kernel's block/partitions/efi.c. The primary table is used if
//! header and entries are valid; otherwise the backup, which is looked for where a valid primary header says,
//! and at the end of the disk.

use crate::{Disk, ENTRIES_LEN_MAX, Format, Guid, Partition, Table, Type};
use crate::{add, read_within, u16_at, u32_at, u64_at};
use block::Bytes;

const SIGNATURE: &[u8; 8] = b"EFI PART";
/// Smallest length of a header; the CRC covers the length in its header field.
const HEADER_LEN_MIN: u32 = 92;
/// Length of an entry: this, or a larger power of two.
const ENTRY_LEN_MIN: u32 = 128;
const ENTRY_LEN_MAX: u32 = 4096;
const NAME_AT: usize = 56;
const NAME_UNITS: usize = 36;

/// A header with a correct checksum and valid numbers.
struct Header {
    own_lba: u64,
    alternate_lba: u64,
    first_usable: u64,
    last_usable: u64,
    disk_id: Guid,
    entries_lba: u64,
    entry_count: u32,
    entry_len: u32,
    entries_crc: u32,
}

/// Reads the table with this block size. `None`: there is no valid one.
pub(crate) fn read<D: Disk>(disk: &mut D, block: u32) -> Result<Option<Table>, D::Error> {
    let last_lba = (disk.size().0 / u64::from(block)).saturating_sub(1);
    let primary = read_header(disk, block, 1)?;
    if let Some(header) = &primary
        && let Some(entries) = read_entries(disk, block, header)?
    {
        let mut table = table_of(disk, block, header, &entries);
        let has_backup = match read_header(disk, block, header.alternate_lba)? {
            Some(backup) => backup.alternate_lba == 1 && backup.entries_crc == header.entries_crc,
            None => false,
        };
        if !has_backup {
            table.notes.push("the backup table is missing or differs".to_owned());
        } else if header.alternate_lba != last_lba {
            table.notes.push("the backup table is not at the end of the device, which has grown".to_owned());
        }
        return Ok(Some(table));
    }
    let alternate = primary.map(|header| header.alternate_lba);
    for lba in alternate.into_iter().chain([last_lba]) {
        if let Some(header) = read_header(disk, block, lba)?
            && let Some(entries) = read_entries(disk, block, &header)?
        {
            let mut table = table_of(disk, block, &header, &entries);
            table.notes.push("the primary table is damaged: the backup is used".to_owned());
            return Ok(Some(table));
        }
    }
    Ok(None)
}

fn read_header<D: Disk>(disk: &mut D, block: u32, lba: u64) -> Result<Option<Header>, D::Error> {
    let last_lba = (disk.size().0 / u64::from(block)).saturating_sub(1);
    let Some(offset) = lba.checked_mul(block.into()).filter(|_| lba > 0) else { return Ok(None) };
    let Some(bytes) = read_within(disk, offset, block.into())? else { return Ok(None) };
    Ok(parse_header(&bytes).filter(|header| {
        header.own_lba == lba
            && header.first_usable <= header.last_usable
            && header.last_usable <= last_lba
            && header.entry_len.is_power_of_two()
            && (ENTRY_LEN_MIN..=ENTRY_LEN_MAX).contains(&header.entry_len)
            && header.entries_len() <= ENTRIES_LEN_MAX
    }))
}

/// `bytes`: a whole block, of at least 512 bytes.
fn parse_header(bytes: &[u8]) -> Option<Header> {
    let len = u32_at(bytes, 12);
    if !bytes.starts_with(SIGNATURE) || len < HEADER_LEN_MIN || len as usize > bytes.len() {
        return None;
    }
    // The checksum covers the header with the checksum field as zeroes.
    let mut crc = crc32fast::Hasher::new();
    [&bytes[..16], &[0; 4], &bytes[20..len as usize]].into_iter().for_each(|piece| crc.update(piece));
    let disk_id = Guid(bytes[56..72].try_into().ok()?);
    (crc.finalize() == u32_at(bytes, 16)).then(|| Header {
        own_lba: u64_at(bytes, 24),
        alternate_lba: u64_at(bytes, 32),
        first_usable: u64_at(bytes, 40),
        last_usable: u64_at(bytes, 48),
        disk_id,
        entries_lba: u64_at(bytes, 72),
        entry_count: u32_at(bytes, 80),
        entry_len: u32_at(bytes, 84),
        entries_crc: u32_at(bytes, 88),
    })
}

impl Header {
    fn entries_len(&self) -> u64 {
        u64::from(self.entry_count) * u64::from(self.entry_len)
    }
}

/// The entries, if they match the checksum in the header.
fn read_entries<D: Disk>(disk: &mut D, block: u32, header: &Header) -> Result<Option<Vec<u8>>, D::Error> {
    let Some(offset) = header.entries_lba.checked_mul(block.into()) else { return Ok(None) };
    let entries = read_within(disk, offset, header.entries_len())?;
    Ok(entries.filter(|entries| crc32fast::hash(entries) == header.entries_crc))
}

fn table_of<D: Disk>(disk: &D, block: u32, header: &Header, entries: &[u8]) -> Table {
    let mut table = Table {
        format: Format::Gpt,
        block,
        id: header.disk_id.to_string(),
        partitions: Vec::new(),
        notes: Vec::new(),
    };
    for (index, entry) in entries.chunks_exact(header.entry_len as usize).enumerate() {
        let mut guids = [Guid::default(); 2];
        for (guid, bytes) in guids.iter_mut().zip(entry.chunks_exact(16)) {
            guid.0.copy_from_slice(bytes);
        }
        let [kind, id] = guids;
        if kind == Guid::default() {
            continue;
        }
        let number = index as u32 + 1;
        let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
        let bytes = |blocks: u64| blocks.checked_mul(block.into()).map(Bytes);
        let place = last.checked_sub(first).and_then(|n| Some((bytes(first)?, bytes(n.checked_add(1)?)?)));
        let Some((start, len)) = place else {
            table.notes.push(format!("partition {number} ends before it begins and is ignored"));
            continue;
        };
        let name = name_of(&entry[NAME_AT..NAME_AT + 2 * NAME_UNITS]);
        let uuid = id.to_string();
        let partition = Partition { number, start, len, kind: Type::Guid(kind), name, uuid, extended: false };
        add(&mut table, disk.size(), partition);
    }
    table
}

/// Decodes UTF-16 up to the first 0. Invalid units become U+FFFD.
fn name_of(bytes: &[u8]) -> String {
    let units = (0..NAME_UNITS).map(|index| u16_at(bytes, 2 * index)).take_while(|&unit| unit != 0);
    char::decode_utf16(units).map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}

#[cfg(test)]
mod tests {
    use crate::testing::{Image, gpt_image};
    use crate::{Format, read};
    use block::Bytes;

    #[test]
    fn partitions_are_found_with_both_block_sizes() {
        for made_for in [512, 4096] {
            for reported in [512, 4096] {
                let mut image = gpt_image(made_for);
                image.block = reported;
                let table = read(&mut image).unwrap().expect("a table");
                assert_eq!((table.format, table.block), (Format::Gpt, made_for));
                assert_eq!(table.notes, [""; 0]);
                let [boot, root] = &table.partitions[..] else { panic!("{table:?}") };
                assert_eq!((boot.number, boot.name.as_str()), (1, "boot"));
                assert_eq!((root.number, root.name.as_str()), (3, "röot"));
                assert_eq!(root.start, Bytes(u64::from(made_for) * 128));
                assert_eq!(root.len, Bytes(u64::from(made_for) * 64));
                assert_eq!(root.uuid, "03030303-0303-0303-0303-030303030303");
                assert_eq!(table.id, "dddddddd-dddd-dddd-dddd-dddddddddddd");
            }
        }
    }

    fn damaged(at: u64) -> Option<crate::Table> {
        let mut image = gpt_image(512);
        image.bytes[at as usize] ^= 1;
        read(&mut image).unwrap()
    }

    #[test]
    fn a_damaged_primary_is_replaced_by_the_backup() {
        // The signature, the checksum, an entry's name.
        for at in [512, 512 + 16, 2 * 512 + 60] {
            let table = damaged(at).expect("a table");
            assert_eq!(table.partitions.len(), 2);
            assert_eq!(table.notes, ["the primary table is damaged: the backup is used"]);
        }
    }

    #[test]
    fn a_damaged_backup_is_noted() {
        let last = gpt_image(512).bytes.len() as u64 - 512;
        let table = damaged(last + 40).expect("a table");
        assert_eq!(table.partitions.len(), 2);
        assert_eq!(table.notes, ["the backup table is missing or differs"]);
    }

    #[test]
    fn on_a_disk_that_grew_the_backup_is_found_where_the_header_says() {
        let mut image = gpt_image(512);
        let grown = image.bytes.len() + (1 << 20);
        image.bytes.resize(grown, 0);
        let table = read(&mut image).unwrap().expect("a table");
        assert_eq!(table.notes, ["the backup table is not at the end of the device, which has grown"]);
        image.bytes[2 * 512 + 60] ^= 1;
        let table = read(&mut image).unwrap().expect("a table");
        assert_eq!(table.partitions.len(), 2, "{table:?}");
    }

    #[test]
    fn without_a_protective_mbr_there_is_no_gpt() {
        let mut image = gpt_image(512);
        image.bytes[446 + 4] = 0x83;
        let table = read(&mut image).unwrap().expect("a table");
        assert_eq!(table.format, Format::Mbr);
        image.bytes[510] = 0;
        assert_eq!(read(&mut image), Ok(None));
    }

    #[test]
    fn a_truncated_gpt_is_invalid() {
        let mut image = gpt_image(512);
        image.bytes.truncate(150 * 512);
        // The header refers to blocks past the end, so it is invalid.
        let table = read(&mut image).unwrap().expect("the protective entry");
        assert_eq!(table.format, Format::Mbr);
        // That entry must not be written to: it contains the GPT.
        assert_eq!(table.partitions, []);
    }

    #[test]
    fn the_protective_entry_of_a_damaged_gpt_is_no_partition() {
        let mut image = gpt_image(512);
        let last = image.bytes.len() - 512;
        image.bytes[512 + 16] ^= 1;
        image.bytes[last + 16] ^= 1;
        let table = read(&mut image).unwrap().expect("the protective entry");
        assert_eq!(table.partitions, []);
        let why = table.select(&"1".parse().unwrap()).unwrap_err().to_string();
        assert!(why.contains("a GPT, which is damaged in both places"), "{why}");
    }

    #[test]
    fn entries_that_would_need_too_much_memory_are_not_read() {
        let mut image = gpt_image(512);
        for count in [8192u32, u32::MAX] {
            image.set_header(512, 80, &count.to_le_bytes());
            let end = image.bytes.len() as u64 - 512;
            image.set_header(end, 80, &count.to_le_bytes());
            let table = read(&mut image).unwrap();
            assert_ne!(table.map(|table| table.format), Some(Format::Gpt), "{count} entries");
            assert!(image.read_max <= crate::ENTRIES_LEN_MAX as usize);
        }
    }

    #[test]
    fn an_empty_image_with_a_gpt_signature_only_is_no_table() {
        let mut image = Image::new(1 << 20, 512);
        image.bytes[512..520].copy_from_slice(b"EFI PART");
        assert_eq!(read(&mut image), Ok(None));
    }
}
