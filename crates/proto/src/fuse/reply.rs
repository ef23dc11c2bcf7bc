//! Encodes replies into the caller's buffer. Each function returns the number of bytes written.

use super::ROOT;
use super::init::Agreement;
use super::wire::{MAJOR, NOTIFY_INVAL_INODE, OUT_HEADER_LEN, put};

/// Longest reply other than read data: a header and `fuse_attr_out`.
pub const REPLY_LEN_MAX: usize = OUT_HEADER_LEN + 104;
/// Bytes of the reply to INIT.
pub const INIT_OUT_LEN: usize = OUT_HEADER_LEN + 64;

/// Seconds for which the kernel may cache attributes. A change of size is announced with a notification.
const ATTRIBUTES_VALID_S: u64 = 3600;

/// Attributes of the file, as `stat` shows them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// Size in bytes.
    pub size: u64,
    /// Allocated 512-byte blocks.
    pub blocks: u64,
    /// Permission bits.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Preferred I/O size in bytes.
    pub block_len: u32,
    /// Time of the last change, in seconds since 1970.
    pub time_s: u64,
}

/// Attributes of the file system, as `statfs` shows them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatFs {
    /// Size of the single file in bytes.
    pub size: u64,
    /// Block size in bytes. A loop device takes it as its discard granularity.
    pub block_len: u32,
}

fn header(into: &mut [u8], len: usize, error: i32, unique: u64) -> usize {
    put(into, 0, (len as u32).to_ne_bytes());
    put(into, 4, error.to_ne_bytes());
    put(into, 8, unique.to_ne_bytes());
    len
}

/// Writes a reply with only a status: 0 or a positive errno. `data_len` bytes of read data follow the header.
#[inline]
pub fn put_end(into: &mut [u8], unique: u64, errno: i32, data_len: u32) -> usize {
    header(into, OUT_HEADER_LEN + data_len as usize, -errno, unique);
    OUT_HEADER_LEN
}

/// Writes the reply to WRITE: the number of bytes written.
#[inline]
pub fn put_written(into: &mut [u8], unique: u64, len: u32) -> usize {
    put(into, OUT_HEADER_LEN, len.to_ne_bytes());
    put(into, OUT_HEADER_LEN + 4, [0; 4]);
    header(into, OUT_HEADER_LEN + 8, 0, unique)
}

/// Writes the reply to LSEEK: the offset found.
pub fn put_number(into: &mut [u8], unique: u64, number: u64) -> usize {
    put(into, OUT_HEADER_LEN, number.to_ne_bytes());
    header(into, OUT_HEADER_LEN + 8, 0, unique)
}

/// Writes the reply to OPEN: [`fopen`](super::wire::fopen) flags, and with passthrough the id of the backing
/// file.
pub fn put_open(into: &mut [u8], unique: u64, flags: u32, backing: i32) -> usize {
    put(into, OUT_HEADER_LEN, [0; 8]);
    put(into, OUT_HEADER_LEN + 8, flags.to_ne_bytes());
    put(into, OUT_HEADER_LEN + 12, backing.to_ne_bytes());
    header(into, OUT_HEADER_LEN + 16, 0, unique)
}

/// Writes the reply to GETATTR and SETATTR.
pub fn put_attributes(into: &mut [u8], unique: u64, of: &Attributes) -> usize {
    let body = &mut into[OUT_HEADER_LEN..];
    body[..104].fill(0);
    put(body, 0, ATTRIBUTES_VALID_S.to_ne_bytes());
    let attr = &mut body[16..];
    put(attr, 0, ROOT.to_ne_bytes());
    put(attr, 8, of.size.to_ne_bytes());
    put(attr, 16, of.blocks.to_ne_bytes());
    for at in [24, 32, 40] {
        put(attr, at, of.time_s.to_ne_bytes());
    }
    put(attr, 60, (libc::S_IFREG | of.mode).to_ne_bytes());
    put(attr, 64, 1u32.to_ne_bytes());
    put(attr, 68, of.uid.to_ne_bytes());
    put(attr, 72, of.gid.to_ne_bytes());
    put(attr, 80, of.block_len.to_ne_bytes());
    header(into, OUT_HEADER_LEN + 104, 0, unique)
}

/// Writes the reply to STATFS: one file and no free space.
pub fn put_statfs(into: &mut [u8], unique: u64, of: &StatFs) -> usize {
    let body = &mut into[OUT_HEADER_LEN..];
    body[..80].fill(0);
    put(body, 0, (of.size / u64::from(of.block_len.max(1))).to_ne_bytes());
    put(body, 24, 1u64.to_ne_bytes());
    put(body, 40, of.block_len.to_ne_bytes());
    put(body, 44, 255u32.to_ne_bytes());
    put(body, 48, of.block_len.to_ne_bytes());
    header(into, OUT_HEADER_LEN + 80, 0, unique)
}

/// Writes the reply to INIT.
pub fn put_init(into: &mut [u8], unique: u64, of: &Agreement) -> usize {
    let body = &mut into[OUT_HEADER_LEN..];
    body[..64].fill(0);
    put(body, 0, MAJOR.to_ne_bytes());
    put(body, 4, of.minor.to_ne_bytes());
    put(body, 8, of.readahead_max.to_ne_bytes());
    put(body, 12, (of.flags as u32).to_ne_bytes());
    put(body, 16, of.background_max.to_ne_bytes());
    // The congestion threshold is three quarters of the maximum, the kernel's own default.
    put(body, 18, (of.background_max - of.background_max / 4).to_ne_bytes());
    put(body, 20, of.write_max.to_ne_bytes());
    put(body, 24, 1u32.to_ne_bytes());
    put(body, 28, of.pages_max.to_ne_bytes());
    put(body, 32, ((of.flags >> 32) as u32).to_ne_bytes());
    // File systems may stack one level deep over the backing file.
    put(body, 36, u32::from(of.has_passthrough()).to_ne_bytes());
    header(into, INIT_OUT_LEN, 0, unique)
}

/// Writes a notification that invalidates the kernel's cached attributes of the file, above all its size.
/// With `pages`, it invalidates the page cache as well; sending it then waits for pages that are being read
/// or written.
pub fn put_inval_inode(into: &mut [u8], pages: bool) -> usize {
    put(into, OUT_HEADER_LEN, ROOT.to_ne_bytes());
    put(into, OUT_HEADER_LEN + 8, (if pages { 0i64 } else { -1 }).to_ne_bytes());
    put(into, OUT_HEADER_LEN + 16, 0i64.to_ne_bytes());
    // A notification has 0 in place of the unique number, and its code in place of the error.
    header(into, OUT_HEADER_LEN + 24, NOTIFY_INVAL_INODE, 0)
}
