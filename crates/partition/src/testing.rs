//! Disks in memory with partition tables, for the tests of this crate.

use crate::Disk;
use block::Bytes;

/// A disk in memory, which counts reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Image {
    pub(crate) bytes: Vec<u8>,
    pub(crate) block: u32,
    pub(crate) reads: usize,
    /// Length of the longest read.
    pub(crate) read_max: usize,
}

impl Image {
    pub(crate) fn new(len: usize, block: u32) -> Image {
        Image { bytes: vec![0; len], block, reads: 0, read_max: 0 }
    }

    pub(crate) fn sign(&mut self, lba: u64) {
        let at = lba as usize * self.block as usize;
        self.bytes[at + 510..at + 512].copy_from_slice(&[0x55, 0xaa]);
    }

    /// Writes an entry of an MBR, or of a link of the chain.
    pub(crate) fn entry(&mut self, lba: u64, index: usize, code: u8, start: u32, len: u32) {
        let at = lba as usize * self.block as usize + 446 + index * 16;
        self.bytes[at + 4] = code;
        self.bytes[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
        self.bytes[at + 12..at + 16].copy_from_slice(&len.to_le_bytes());
    }

    /// Changes a field of the GPT header at `at`, and corrects its checksum.
    pub(crate) fn set_header(&mut self, at: u64, field: usize, value: &[u8]) {
        let at = at as usize;
        self.bytes[at + field..at + field + value.len()].copy_from_slice(value);
        self.bytes[at + 16..at + 20].fill(0);
        let crc = crc32fast::hash(&self.bytes[at..at + 92]);
        self.bytes[at + 16..at + 20].copy_from_slice(&crc.to_le_bytes());
    }
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
        self.read_max = self.read_max.max(into.len());
        let at = offset as usize;
        into.copy_from_slice(&self.bytes[at..at + into.len()]);
        Ok(())
    }
}

/// 256 blocks: boot (1) from 64 and röot (3) from 128, 64 blocks each; primary and backup tables.
pub(crate) fn gpt_image(block: u32) -> Image {
    let mut image = Image::new(256 * block as usize, block);
    image.block = 512;
    image.sign(0);
    image.entry(0, 0, 0xee, 1, 255);
    image.block = block;
    let mut entries = vec![0u8; 4 * 128];
    for (index, name, first) in [(0, "boot", 64u64), (2, "röot", 128)] {
        let entry = &mut entries[index * 128..][..128];
        entry[..16].fill(0x11);
        entry[16..32].fill(index as u8 + 1);
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&(first + 63).to_le_bytes());
        for (unit, at) in name.encode_utf16().zip((56..).step_by(2)) {
            entry[at..at + 2].copy_from_slice(&unit.to_le_bytes());
        }
    }
    for (own, other, entries_lba) in [(1u64, 255u64, 2u64), (255, 1, 254)] {
        let at = entries_lba as usize * block as usize;
        image.bytes[at..at + entries.len()].copy_from_slice(&entries);
        let at = own * u64::from(block);
        image.bytes[at as usize..][..8].copy_from_slice(b"EFI PART");
        let fields: [(usize, &[u8]); 9] = [
            (12, &92u32.to_le_bytes()),
            (24, &own.to_le_bytes()),
            (32, &other.to_le_bytes()),
            (40, &3u64.to_le_bytes()),
            (48, &253u64.to_le_bytes()),
            (56, &[0xdd; 16]),
            (72, &entries_lba.to_le_bytes()),
            (80, &4u32.to_le_bytes()),
            (84, &128u32.to_le_bytes()),
        ];
        for (field, value) in fields {
            image.set_header(at, field, value);
        }
        image.set_header(at, 88, &crc32fast::hash(&entries).to_le_bytes());
    }
    image
}

/// 1 primary partition of 20 blocks, 2 extended from 100, with logical ones in links at 100 and 150.
pub(crate) fn mbr_image() -> Image {
    let mut image = Image::new(1000 * 512, 512);
    image.bytes[440..444].copy_from_slice(&0xcafe_f00du32.to_le_bytes());
    image.sign(0);
    image.entry(0, 0, 0x83, 10, 20);
    image.entry(0, 1, 0x0f, 100, 200);
    image.sign(100);
    image.entry(100, 0, 0x83, 2, 30);
    image.entry(100, 1, 0x05, 50, 40);
    image.sign(150);
    image.entry(150, 0, 0x83, 2, 20);
    image
}
