//! Whether a qcow2 image's reference counts are whole enough for it to be written.
//!
//! Who writes allocates clusters by these counts. An image that has none for a part of itself is damaged, and imago would look
//! for a place for the missing ones without end. Only whether they are there is looked at here, not whether they are right.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The most bytes of the table that are looked at: 2^20 blocks of counts, for 2^35 clusters.
const TABLE_LEN_MAX: u64 = 8 << 20;

fn damaged() -> io::Error {
    let why = "its reference counts are damaged (mend it with qemu-img check -r all, or add ro)";
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Check an image that is to be written.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    let file = std::fs::File::open(path)?;
    let file_len = file.metadata()?.len();
    let mut header = [0; 104];
    file.read_exact_at(&mut header[..72], 0)?;
    let _ = file.read_at(&mut header[72..], 72)?;
    let half = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let word = |at: usize| u64::from(half(at)) << 32 | u64::from(half(at + 4));
    let order = if half(4) >= 3 { half(96) } else { 4 };
    let (bits, table_at, table_clusters) = (half(20), word(48), u64::from(half(56)));
    if !(9..=21).contains(&bits) || order > 6 {
        return Err(damaged());
    }
    // Each block of counts is a cluster, and counts that many clusters.
    let counted = 1u64 << (bits + 3 - order);
    let clusters = file_len.div_ceil(1 << bits);
    let blocks = clusters.div_ceil(counted).max(1);
    let table_len = blocks * 8;
    if table_len > TABLE_LEN_MAX || table_len > table_clusters << bits {
        return Err(damaged());
    }
    let mut table = vec![0; table_len as usize];
    file.read_exact_at(&mut table, table_at).map_err(|_| damaged())?;
    let mut entries = table.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry));
    let is_there = |at: u64| at != 0 && at.is_multiple_of(1 << bits) && at < file_len;
    if entries.all(is_there) { Ok(()) } else { Err(damaged()) }
}
