//! Sparse vmdk images in a single file (`monolithicSparse`, `streamOptimized`), read-only; imago supports
//! only flat vmdk.
//!
//! The disk is divided into *grains*. A directory contains the locations of tables, and tables contain the
//! locations of grains, all in sectors of the file; 0: not allocated, reads as zeroes. A grain is stored
//! uncompressed, or as a sector number, a length and that many bytes of zlib data. Stream-optimized images
//! have the directory at the end, followed by a second header, the footer. Source: VMware's "Virtual Disk
//! Format 5.0", checked against images written by QEMU.
//!
//! The directory is in memory (an entry for each 32 MiB of the disk), tables are read from the file.
//! *Invariant:* no content of the file causes a panic, or takes more memory than [`DIRECTORY_LEN_MAX`] and
//! two grains per thread.

use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) const MAGIC: &[u8; 4] = b"KDMV";
const SECTOR: u64 = 512;
const HEADER_LEN: usize = 512;
/// Distance of the footer from the end: the end-of-stream marker follows it.
const FOOTER_BACK: u64 = 2 * SECTOR;
/// Value of the directory's location in the header if the footer contains the location.
const AT_END: u64 = u64::MAX;
/// Flags of the header.
const ZEROED_GRAINS: u32 = 1 << 2;
const COMPRESSED: u32 = 1 << 16;
/// Largest directory in bytes: for a disk of 32 TiB in grains of 64 KiB.
const DIRECTORY_LEN_MAX: u64 = 4 << 20;
/// Longest embedded descriptor in bytes.
const DESCRIPTOR_LEN_MAX: u64 = 1 << 20;
/// Largest grain, in sectors: 1 MiB. Programs write 64 KiB.
const GRAIN_MAX: u64 = 2048;

/// An open image.
#[derive(Debug)]
pub(crate) struct Sparse {
    file: File,
    /// Size of the disk in bytes.
    size: u64,
    /// Bytes of a grain.
    grain: u64,
    /// Grains per table.
    entries: u64,
    /// Sectors at which tables begin; 0: none.
    directory: Box<[u32]>,
    compressed: bool,
    /// Whether a table entry of 1 stands for a grain of zeroes.
    zeroed: bool,
}

fn wrong(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn unsupported(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from(half(bytes, at)) | u64::from(half(bytes, at + 4)) << 32
}

impl Sparse {
    /// Opens an image that begins with [`MAGIC`].
    ///
    /// # Errors
    /// The image is damaged, or its kind is not supported.
    pub(crate) fn open(path: &Path) -> io::Result<Sparse> {
        let file = File::open(path)?;
        let mut header = [0; HEADER_LEN];
        file.read_exact_at(&mut header, 0)?;
        if word(&header, 56) == AT_END {
            let end = file.metadata()?.len();
            let at = end.checked_sub(FOOTER_BACK).ok_or_else(|| wrong("its footer is cut off"))?;
            // Only the first header contains the location of the descriptor.
            let descriptor = header[28..44].to_vec();
            file.read_exact_at(&mut header, at)?;
            header[28..44].copy_from_slice(&descriptor);
        }
        if &header[..4] != MAGIC || !(1..=3).contains(&half(&header, 4)) {
            return Err(wrong("its header is damaged"));
        }
        let flags = half(&header, 8);
        let (capacity, grain, entries) = (word(&header, 12), word(&header, 20), u64::from(half(&header, 44)));
        let compressed = flags & COMPRESSED != 0;
        if compressed && half(&header, 76) >> 8 & 0xffff != 1 {
            return Err(unsupported("unknown compression of grains"));
        }
        let is_sound = grain.is_power_of_two() && grain <= GRAIN_MAX && (1..=65536).contains(&entries);
        let size = capacity.checked_mul(SECTOR).filter(|size| is_sound && *size <= i64::MAX as u64);
        let size = size.ok_or_else(|| wrong("its header is invalid"))?;
        check_descriptor(&file, word(&header, 28), word(&header, 36))?;
        let len = size.div_ceil(grain * SECTOR * entries) * 4;
        if len > DIRECTORY_LEN_MAX {
            return Err(unsupported("it is larger than such an image can be"));
        }
        let mut directory = vec![0; len as usize];
        let at = word(&header, 56).checked_mul(SECTOR).ok_or_else(|| wrong("its header is invalid"))?;
        file.read_exact_at(&mut directory, at).map_err(|_| wrong("its directory is cut off"))?;
        let directory = directory.as_chunks::<4>().0.iter().map(|entry| u32::from_le_bytes(*entry)).collect();
        let zeroed = flags & ZEROED_GRAINS != 0;
        Ok(Sparse { file, size, grain: grain * SECTOR, entries, directory, compressed, zeroed })
    }

    /// Size of the disk in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the offset of a grain in the file, in bytes; `None`: the grain is zeroes.
    fn place(&self, number: u64) -> io::Result<Option<u64>> {
        let table = self.directory.get((number / self.entries) as usize).copied().unwrap_or(0);
        if table == 0 {
            return Ok(None);
        }
        let mut entry = [0; 4];
        let at = u64::from(table) * SECTOR + number % self.entries * 4;
        self.file.read_exact_at(&mut entry, at).map_err(|_| wrong("a table of grains is cut off"))?;
        match u32::from_le_bytes(entry) {
            0 => Ok(None),
            1 if self.zeroed => Ok(None),
            sector => Ok(Some(u64::from(sector) * SECTOR)),
        }
    }

    /// Reads a range, which must be within the disk.
    pub(crate) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let skip = at % self.grain;
            let len = ((self.grain - skip) as usize).min(into.len() - done);
            let piece = &mut into[done..done + len];
            match self.place(at / self.grain)? {
                None => piece.fill(0),
                Some(place) if self.compressed => {
                    let grain = self.inflate(place)?;
                    // The last grain may be shorter, as it ends with the disk.
                    let there = grain.get(skip as usize..).unwrap_or_default();
                    let have = there.len().min(len);
                    piece[..have].copy_from_slice(&there[..have]);
                    piece[have..].fill(0);
                }
                Some(place) => self.file.read_exact_at(piece, place + skip)?,
            }
            done += len;
        }
        Ok(())
    }

    fn inflate(&self, place: u64) -> io::Result<Vec<u8>> {
        let damaged = || wrong("a compressed grain is damaged");
        let mut head = [0; 12];
        self.file.read_exact_at(&mut head, place)?;
        let len = u64::from(half(&head, 8));
        // Incompressible data grows only a little.
        if len > self.grain + self.grain / 8 + 1024 {
            return Err(damaged());
        }
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, place + 12)?;
        decompress_to_vec_zlib_with_limit(&bytes, self.grain as usize).map_err(|_| damaged())
    }

    /// Returns whether the range is unallocated at `offset`, and for how many bytes up to `len`.
    pub(crate) fn mapping(&self, offset: u64, len: u64) -> io::Result<(bool, u64)> {
        let end = offset + len;
        let hole = self.place(offset / self.grain)?.is_none();
        let mut number = offset / self.grain + 1;
        while number * self.grain < end && self.place(number)?.is_none() == hole {
            number += 1;
        }
        Ok((hole, (number * self.grain).min(end) - offset))
    }
}

/// Checks that this file contains the whole disk, and not the changes to another image.
fn check_descriptor(file: &File, sector: u64, sectors: u64) -> io::Result<()> {
    let (Some(at), Some(len)) = (sector.checked_mul(SECTOR), sectors.checked_mul(SECTOR)) else {
        return Err(wrong("its header is invalid"));
    };
    let part = || unsupported("it is an extent of a vmdk (use its descriptor file)");
    if at == 0 || len == 0 || len > DESCRIPTOR_LEN_MAX {
        return Err(part());
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, at).map_err(|_| wrong("its descriptor is cut off"))?;
    let text = String::from_utf8_lossy(&bytes);
    let lines = || text.lines().map(|line| line.trim_end_matches('\0').trim());
    let extents =
        lines().filter(|line| ["RW ", "RDONLY ", "NOACCESS "].iter().any(|word| line.starts_with(word)));
    match extents.count() {
        // A file that is only an extent has no descriptor of its own.
        0 => return Err(part()),
        1 => {}
        _ => return Err(unsupported("its data is in several files")),
    }
    let parent = lines().find_map(|line| line.strip_prefix("parentCID="));
    if parent.is_some_and(|parent| !parent.trim().eq_ignore_ascii_case("ffffffff")) {
        return Err(unsupported("it contains the changes to another image"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of 4 grains of 4 KiB in tables of 2: data, nothing, zeroes, data.
    fn image() -> Vec<u8> {
        let mut image = vec![0; 40 * 512];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, MAGIC);
        for (at, value) in
            [(4, 1u32), (8, ZEROED_GRAINS), (12, 32), (20, 8), (28, 1), (36, 1), (44, 2), (56, 2)]
        {
            put(at, &value.to_le_bytes());
        }
        put(512, b"# Disk DescriptorFile\nparentCID=ffffffff\nRW 32 SPARSE \"x.vmdk\"\n");
        for (at, value) in [(1024, 3u32), (1028, 4), (3 * 512, 8), (4 * 512, 1), (4 * 512 + 4, 16)] {
            put(at, &value.to_le_bytes());
        }
        put(8 * 512, &[7; 4096]);
        put(16 * 512, &[9; 4096]);
        image
    }

    fn open(image: &[u8]) -> io::Result<Sparse> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), image).unwrap();
        Sparse::open(file.path())
    }

    #[test]
    fn grains_are_found_through_the_tables() {
        let sparse = open(&image()).unwrap();
        assert_eq!(sparse.size(), 4 * 4096);
        let mut all = vec![1; 4 * 4096];
        sparse.read(&mut all, 0).unwrap();
        let is = |from: usize, byte: u8| all[from * 4096..(from + 1) * 4096].iter().all(|have| *have == byte);
        assert!(is(0, 7) && is(1, 0) && is(2, 0) && is(3, 9));
        let mut some = [1; 1024];
        sparse.read(&mut some, 4096 - 512).unwrap();
        assert!(some[..512] == [7; 512] && some[512..] == [0; 512]);
        assert_eq!(sparse.mapping(512, 15872).unwrap(), (false, 3584));
        assert_eq!(sparse.mapping(4096, 12288).unwrap(), (true, 8192));
    }

    #[test]
    fn damaged_and_partial_images_are_refused() {
        let changed = |at: usize, bytes: &[u8]| {
            let mut image = image();
            image[at..at + bytes.len()].copy_from_slice(bytes);
            open(&image).map(drop).unwrap_err().to_string()
        };
        assert!(changed(4, &[9]).contains("damaged"));
        assert!(changed(20, &[7]).contains("is invalid"));
        assert!(changed(44, &[0]).contains("is invalid"));
        assert!(changed(12, &[0xff; 8]).contains("is invalid"));
        assert!(changed(36, &[0]).contains("an extent of a vmdk"));
        assert!(changed(512, &[0; 512]).contains("an extent of a vmdk"));
        assert!(changed(56, &[200]).contains("cut off"));
        assert!(changed(56, &[0xff; 8]).contains("damaged"), "an invalid footer");
        let at = image().windows(8).position(|bytes| bytes == b"ffffffff").unwrap();
        assert!(changed(at, b"12345678").contains("changes to another"));
        // A table past the end is detected when it is read.
        let mut image = image();
        image[1024] = 200;
        assert!(open(&image).unwrap().read(&mut [0; 512], 0).is_err());
    }
}
