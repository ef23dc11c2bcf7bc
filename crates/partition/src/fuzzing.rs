//! Body of the fuzz target: no disk may cause a panic, unless it reveals a bug.
//!
//! The input is a sparse image: one byte of settings, then records of an offset (in units of 64 bytes, two
//! bytes), a length (one byte) and as many bytes. So a fuzzer reaches both ends of a disk with few bytes. If
//! a setting says so, checksums of GPT headers and entries are corrected: otherwise the fuzzer would never
//! get past them.

use crate::{Disk, ENTRIES_LEN_MAX, READS_MAX, Selector, read, u32_at, u64_at};
use block::Bytes;

struct Image {
    bytes: Vec<u8>,
    block: u32,
    reads: usize,
}

impl Disk for Image {
    type Error = ();

    fn size(&self) -> Bytes {
        Bytes(self.bytes.len() as u64)
    }

    fn block(&self) -> u32 {
        self.block
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), ()> {
        self.reads += 1;
        assert!(into.len() as u64 <= ENTRIES_LEN_MAX, "a read of {} bytes", into.len());
        let at = offset as usize;
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(())
    }
}

impl Image {
    /// Builds the image from a fuzzer's bytes.
    fn new(input: &[u8]) -> Image {
        let (&settings, mut rest) = input.split_first().unwrap_or((&0, &[]));
        let block = if settings & 1 == 0 { 512 } else { 4096 };
        let mut bytes = vec![0; (192 << 10) + usize::from(settings >> 4) * 100];
        while let Some((&[low, high, len], tail)) = rest.split_first_chunk::<3>() {
            let content = &tail[..usize::from(len).min(tail.len())];
            rest = &tail[content.len()..];
            let at = usize::from(u16::from_le_bytes([low, high])) * 64 % bytes.len();
            let room = (bytes.len() - at).min(content.len());
            bytes[at..at + room].copy_from_slice(&content[..room]);
        }
        if settings & 2 != 0 {
            for at in [block as usize, bytes.len() - bytes.len() % block as usize - block as usize] {
                fix_checksums(&mut bytes, at, block);
            }
        }
        Image { bytes, block, reads: 0 }
    }
}

/// Corrects the checksums of a header and its entries, if there can be one at `at`.
fn fix_checksums(bytes: &mut [u8], at: usize, block: u32) {
    let header = &bytes[at..at + block as usize];
    let (entries_lba, len) = (u64_at(header, 72), u32_at(header, 12) as usize);
    let entries_len = u64::from(u32_at(header, 80)).checked_mul(u32_at(header, 84).into());
    let start = entries_lba.checked_mul(block.into());
    if let (Some(start), Some(entries_len)) = (start, entries_len)
        && let Some(end) = start.checked_add(entries_len).filter(|&end| end <= bytes.len() as u64)
    {
        let crc = crc32fast::hash(&bytes[start as usize..end as usize]);
        bytes[at + 88..at + 92].copy_from_slice(&crc.to_le_bytes());
    }
    if (92..=block as usize).contains(&len) {
        bytes[at + 16..at + 20].fill(0);
        let crc = crc32fast::hash(&bytes[at..at + len]);
        bytes[at + 16..at + 20].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Reads the partition table of a disk, and checks its invariants.
pub fn partition(input: &[u8]) {
    check(input);
}

/// Checks the partition table; returns the number of partitions, or `None` without a table.
fn check(input: &[u8]) -> Option<usize> {
    let mut image = Image::new(input);
    let table = read(&mut image).expect("memory does not fail");
    assert!(image.reads <= READS_MAX, "{} reads", image.reads);
    let table = table?;
    for partition in &table.partitions {
        assert!(partition.len > Bytes::ZERO && partition.number > 0);
        assert!(partition.start.0 + partition.len.0 <= image.bytes.len() as u64, "{partition:?}");
        let _ = partition.to_string();
        for selector in [Selector::Number(partition.number), Selector::Uuid(partition.uuid.clone())] {
            assert_eq!(selector.to_string().parse(), Ok(selector.clone()));
            let _ = table.select(&selector).map_err(|error| error.to_string());
        }
    }
    Some(table.partitions.len())
}

#[cfg(test)]
mod tests {
    use super::{check, partition};
    use crate::testing::{Image, gpt_image, mbr_image};
    use proptest::prelude::*;
    use proptest::sample::Index;

    /// Encodes an image as a fuzzer's input.
    fn encode(settings: u8, image: &Image) -> Vec<u8> {
        let mut out = vec![settings];
        for (index, piece) in image.bytes.chunks(64).enumerate() {
            if piece.iter().any(|&byte| byte != 0) {
                out.extend((index as u16).to_le_bytes());
                out.push(64);
                out.extend(piece);
            }
        }
        out
    }

    #[test]
    fn seed_images_are_read() {
        assert_eq!(check(&encode(0, &gpt_image(512))), Some(2));
        assert_eq!(check(&encode(0, &mbr_image())), Some(4));
        for seed in ["seed-gpt", "seed-mbr"] {
            let path = format!("{}/../../fuzz/corpus/partition/{seed}", env!("CARGO_MANIFEST_DIR"));
            let input = std::fs::read(path).expect("a seed");
            assert!(check(&input).is_some(), "{seed}");
        }
    }

    #[test]
    fn kept_inputs_do_not_panic() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/partition");
        for entry in std::fs::read_dir(folder).expect("a corpus") {
            partition(&std::fs::read(entry.expect("an entry").path()).expect("an input"));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn no_disk_makes_reading_its_table_panic(
            which in any::<bool>(),
            settings in any::<u8>(),
            changes in proptest::collection::vec((any::<Index>(), any::<u8>()), 0..12),
        ) {
            let image = if which { gpt_image(512) } else { mbr_image() };
            let mut input = encode(settings, &image);
            for (index, value) in changes {
                let at = index.index(input.len());
                input[at] = value;
            }
            partition(&input);
        }

        #[test]
        fn no_bytes_make_it_panic(input in proptest::collection::vec(any::<u8>(), 0..600)) {
            partition(&input);
        }
    }
}
