//! Creation of images.

use crate::entry::Geometry;
use crate::header::{L1_LEN_MAX, MAGIC};
use crate::refcounts::with_count;
use crate::{Storage, unsupported};
use std::io;

/// Properties of a new image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CreateOptions {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// Cluster size in bytes: a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// `log2` of the bits of a refcount, 0 to 6; version 2 requires 4.
    pub refcount_order: u32,
    /// Whether to use subclusters; requires version 3 and clusters of at least 16 KiB.
    pub extended_l2: bool,
    /// Name and format of the backing file.
    pub backing: Option<(Vec<u8>, Vec<u8>)>,
}

impl CreateOptions {
    /// Creates options with QEMU's defaults.
    pub fn new(size: u64) -> CreateOptions {
        CreateOptions {
            size,
            version: 3,
            cluster_size: 64 << 10,
            refcount_order: 4,
            extended_l2: false,
            backing: None,
        }
    }

    /// Checks that the options are consistent and that the format supports a disk of this size.
    ///
    /// # Errors
    /// `Unsupported`, with a message about the wrong option.
    pub fn check(&self) -> io::Result<()> {
        let refuse = |why: &str| Err(unsupported(why.into()));
        if !self.cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&self.cluster_size) {
            return refuse("a cluster has a power of two of bytes, from 512 to 2 MiB");
        }
        if !(2..=3).contains(&self.version) || self.refcount_order > 6 {
            return refuse("versions of qcow2 are 2 and 3, and refcounts have 64 bits at most");
        }
        if self.version == 2 && (self.refcount_order != 4 || self.extended_l2) {
            return refuse("version 2 of qcow2 has refcounts of 16 bits, and no subclusters");
        }
        if self.extended_l2 && self.cluster_size < 16 << 10 {
            return refuse("subclusters need clusters of 16 KiB or more");
        }
        if self.backing.as_ref().is_some_and(|(name, format)| {
            name.len() > 1023
                || format.len() > 64
                || (name.len() + format.len() + 256) as u64 > self.cluster_size
        }) {
            return refuse("the name of the backing file is too long for a cluster");
        }
        let (cluster, size) = (self.cluster_size, self.size);
        let most = (L1_LEN_MAX / 8 * self.shape().l2_entries()).saturating_mul(cluster).min(i64::MAX as u64);
        if size > most {
            return Err(unsupported(format!(
                "a disk of {size} bytes is too large for clusters of {cluster} bytes, which reach {most} bytes"
            )));
        }
        Ok(())
    }

    fn shape(&self) -> Geometry {
        Geometry {
            cluster_bits: self.cluster_size.trailing_zeros(),
            version: self.version,
            extended: self.extended_l2,
            size: self.size,
        }
    }
}

/// Writes an image to an empty file, durably.
///
/// # Errors
/// The options are inconsistent, or the file cannot be written.
pub fn create(storage: &dyn Storage, options: &CreateOptions) -> io::Result<()> {
    options.check()?;
    let shape = options.shape();
    let bits = shape.cluster_bits;
    let l1_entries = options.size.div_ceil(shape.cluster()).div_ceil(shape.l2_entries());
    // The file consists of header, refcount table, refcount blocks and L1 table.
    let per_block = 1u64 << (bits + 3 - options.refcount_order);
    let l1_clusters = (l1_entries * 8).div_ceil(shape.cluster()).max(1);
    let (mut blocks, mut table_clusters) = (1, 1);
    loop {
        let all = 1 + table_clusters + blocks + l1_clusters;
        if blocks * per_block < all {
            blocks += 1;
        } else if table_clusters * shape.cluster() / 8 < blocks {
            table_clusters += 1;
        } else {
            break;
        }
    }
    let all = 1 + table_clusters + blocks + l1_clusters;
    let block_at = |number: u64| (1 + table_clusters + number) << bits;
    storage.set_len(all << bits)?;
    for block in 0..blocks {
        let mut bytes = vec![0; 1 << bits];
        for index in 0..all.saturating_sub(block * per_block).min(per_block) as usize {
            let (at, with, len) = with_count(&bytes, index, options.refcount_order, 1);
            bytes[at..at + len].copy_from_slice(&with[..len]);
        }
        storage.write_at(&bytes, block_at(block))?;
    }
    let table: Vec<u8> = (0..blocks).flat_map(|block| block_at(block).to_be_bytes()).collect();
    storage.write_at(&table, 1 << bits)?;
    storage.write_at(&vec![0; (l1_clusters << bits) as usize], block_at(blocks))?;
    storage.sync()?;
    // The header is written last, because it makes the file a valid image.
    storage.write_at(&header(options, l1_entries, block_at(blocks), table_clusters), 0)?;
    storage.sync()
}

fn header(options: &CreateOptions, l1_entries: u64, l1_at: u64, table_clusters: u64) -> Vec<u8> {
    let bits = options.cluster_size.trailing_zeros();
    let mut header: Vec<u8> = Vec::new();
    let mut put = |bytes: &[u8]| header.extend_from_slice(bytes);
    put(&MAGIC.to_be_bytes());
    put(&options.version.to_be_bytes());
    // The name of the backing file is filled in below.
    put(&[0; 12]);
    put(&bits.to_be_bytes());
    put(&options.size.to_be_bytes());
    put(&[0; 4]);
    put(&(l1_entries as u32).to_be_bytes());
    put(&l1_at.to_be_bytes());
    put(&(1u64 << bits).to_be_bytes());
    put(&(table_clusters as u32).to_be_bytes());
    put(&[0; 12]);
    if options.version >= 3 {
        put(&(u64::from(options.extended_l2) << 4).to_be_bytes());
        put(&[0; 16]);
        put(&options.refcount_order.to_be_bytes());
        put(&104u32.to_be_bytes());
    }
    if let Some((name, format)) = &options.backing {
        put(&0xe279_2acau32.to_be_bytes());
        put(&(format.len() as u32).to_be_bytes());
        put(format);
        put(&vec![0; format.len().next_multiple_of(8) - format.len()]);
        put(&[0; 8]);
        let at = header.len() as u64;
        header.extend_from_slice(name);
        header[8..16].copy_from_slice(&at.to_be_bytes());
        header[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    } else {
        put(&[0; 8]);
    }
    header.resize(options.cluster_size as usize, 0);
    header
}
