//! FUSE constants of the kernel: operations, flags and sizes of structures, all in native byte order.
//!
//! Source: `include/uapi/linux/fuse.h`, protocol 7.45. `tests/fuse_abi.rs` checks the sizes and offsets used
//! here against the header of the system that it runs on. This module has no logic.

/// Major protocol version, the only one in use.
pub const MAJOR: u32 = 7;
/// Newest minor version implemented here; both sides use the lower of theirs.
pub const MINOR: u32 = 45;
/// Oldest supported minor version: Linux 4.20, which introduced `max_pages`.
pub const MINOR_MIN: u32 = 28;

/// Bytes of `fuse_in_header`.
pub const IN_HEADER_LEN: usize = 40;
/// Bytes of `fuse_out_header`.
pub const OUT_HEADER_LEN: usize = 16;
/// Bytes of `fuse_write_in` and of `fuse_read_in`.
pub const TRANSFER_IN_LEN: usize = 40;
/// Bytes before the data of a write: header and arguments.
pub const HEAD_LEN: usize = IN_HEADER_LEN + TRANSFER_IN_LEN;
/// Longest supported request other than a write: a header and `fuse_setattr_in`.
pub const CALL_LEN_MAX: usize = IN_HEADER_LEN + 88;
/// The kernel refuses reads of the device with a smaller buffer (`FUSE_MIN_READ_BUFFER`).
pub const READ_BUFFER_MIN: usize = 8192;

/// Operations.
pub mod opcode {
    #![allow(missing_docs, reason = "the kernel's own names")]
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
    pub const SYNCFS: u32 = 50;
}

/// Flags of INIT: `flags` in the lower half, `flags2` in the upper.
pub mod init {
    #![allow(missing_docs, reason = "the kernel's own names")]
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// FUSE over io_uring (protocol 7.42): commands to the device, and the layout of an entry's memory.
pub mod uring {
    /// Registers an entry's memory and fetches the first request into it.
    pub const REGISTER: u32 = 1;
    /// Commits the entry's request and fetches the next.
    pub const COMMIT_AND_FETCH: u32 = 2;
    /// Bytes of `fuse_uring_cmd_req`.
    pub const COMMAND_LEN: usize = 24;
    /// Bytes of `fuse_uring_req_header`.
    pub const HEADER_LEN: usize = 288;
    /// Offset of the operation's arguments; `fuse_in_header` or `fuse_out_header` precedes them.
    pub const ARGUMENTS_AT: usize = 128;
    /// Offset of `fuse_uring_ent_in_out`.
    pub const ENTRY_AT: usize = 256;
    /// Offset of the commit id.
    pub const COMMIT_ID_AT: usize = ENTRY_AT + 8;
    /// Offset of the payload length.
    pub const PAYLOAD_LEN_AT: usize = ENTRY_AT + 16;
    /// Number of memory areas of an entry: its header and its payload.
    pub const PARTS: u32 = 2;
}

/// Flags of an open file.
pub mod fopen {
    #![allow(missing_docs, reason = "the kernel's own names")]
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Valid bits of SETATTR.
pub mod fattr {
    #![allow(missing_docs, reason = "the kernel's own names")]
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const FH: u32 = 1 << 6;
}

/// Modes of FALLOCATE.
pub mod falloc {
    #![allow(missing_docs, reason = "the kernel's own names")]
    pub const KEEP_SIZE: u32 = 1;
    pub const PUNCH_HOLE: u32 = 2;
    pub const ZERO_RANGE: u32 = 16;
}

/// `FUSE_NOTIFY_INVAL_INODE`: invalidates cached attributes and pages of an inode.
pub const NOTIFY_INVAL_INODE: i32 = 2;

/// Reads fields of a structure. Missing bytes read as 0: older kernels send shorter structures.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn u32(&self, at: usize) -> u32 {
        self.0.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
    }

    pub(super) fn u64(&self, at: usize) -> u64 {
        self.0.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
    }
}

/// Writes a field of a structure.
pub(super) fn put<const N: usize>(into: &mut [u8], at: usize, bytes: [u8; N]) {
    into[at..at + N].copy_from_slice(&bytes);
}
