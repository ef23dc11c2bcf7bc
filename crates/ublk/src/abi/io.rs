//! The ABI of `/dev/ublkcN`: request descriptors in shared memory, commands for tags, offsets.

use super::{BatchIo, READ_WRITE, ioctl_number};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum number of tags of a queue.
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// Maximum number of queues of a device.
pub const QUEUES_MAX: u16 = 4096;
/// Number of offset bits for the byte within a request's buffer.
const BUFFER_BITS: u32 = 25;
/// Number of offset bits for the tag.
const TAG_BITS: u32 = 16;
/// The largest request, in bytes: 32 MiB.
pub const IO_BUFFER_BYTES_MAX: u32 = 1 << BUFFER_BITS;
/// Offset of request data in the character device.
const BUFFERS_START: u64 = 0x8000_0000;
/// Bit of an offset that selects integrity data.
const INTEGRITY_FLAG: u64 = 1 << 62;

/// Returns the offset of a queue's descriptors in the mapping of the character device, in bytes. `page` is
/// the page size of the system.
pub const fn descriptors_offset(queue: u16, page: u64) -> u64 {
    // The driver's layout assumes the maximum number of tags for every queue.
    let most = QUEUE_DEPTH_MAX as u64 * size_of::<IoDescriptor>() as u64;
    queue as u64 * most.next_multiple_of(page)
}

/// Returns the bytes of a queue's descriptors, rounded up to pages for the mapping.
pub const fn descriptors_len(depth: u16, page: u64) -> u64 {
    (depth as u64 * size_of::<IoDescriptor>() as u64).next_multiple_of(page)
}

/// Returns the offset of byte `skip` of a request's data, for `pread` and `pwrite` on the character device.
pub const fn user_copy_offset(queue: u16, tag: u16, skip: u32) -> u64 {
    BUFFERS_START + ((queue as u64) << (BUFFER_BITS + TAG_BITS) | (tag as u64) << BUFFER_BITS | skip as u64)
}

/// Returns the offset of byte `skip` of a request's integrity data.
pub const fn user_copy_integrity_offset(queue: u16, tag: u16, skip: u32) -> u64 {
    user_copy_offset(queue, tag, skip) | INTEGRITY_FLAG
}

/// Returns the index of the shared buffer in an address with [`IoFlags::SHMEM_ZC`].
pub const fn shmem_index(addr: u64) -> u16 {
    (addr >> 32) as u16
}

/// Returns the offset within that buffer, in bytes.
pub const fn shmem_offset(addr: u64) -> u32 {
    addr as u32
}

/// A command for tags: the `cmd_op` of its SQE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum IoOp {
    /// Fetch a tag's first request.
    FetchReq = 0x20,
    /// Commit a tag's request and fetch its next one.
    CommitAndFetchReq = 0x21,
    /// Copy a write's data to the given buffer.
    NeedGetData = 0x22,
    /// Register a request's buffer with this io_uring.
    RegisterIoBuf = 0x23,
    /// Unregister a request's buffer.
    UnregisterIoBuf = 0x24,
    /// Batch: prepare tags.
    PrepIoCmds = 0x25,
    /// Batch: commit requests.
    CommitIoCmds = 0x26,
    /// Batch: fetch requests, multishot.
    FetchIoCmds = 0x27,
}

impl IoOp {
    /// Returns the ioctl-encoded number.
    pub const fn code(self) -> u32 {
        let size = match self {
            IoOp::PrepIoCmds | IoOp::CommitIoCmds | IoOp::FetchIoCmds => size_of::<BatchIo>(),
            _ => size_of::<IoCommand>(),
        };
        ioctl_number(READ_WRITE, self as u8, size)
    }

    /// Returns the bare number, for kernels before 6.5, or `None` for commands that they lack.
    pub const fn legacy_code(self) -> Option<u32> {
        match self {
            IoOp::FetchReq | IoOp::CommitAndFetchReq | IoOp::NeedGetData => Some(self as u32),
            _ => None,
        }
    }

    /// Converts an SQE's `cmd_op` in either encoding.
    pub fn from_code(code: u32) -> Option<IoOp> {
        const ALL: [IoOp; 8] = [
            IoOp::FetchReq,
            IoOp::CommitAndFetchReq,
            IoOp::NeedGetData,
            IoOp::RegisterIoBuf,
            IoOp::UnregisterIoBuf,
            IoOp::PrepIoCmds,
            IoOp::CommitIoCmds,
            IoOp::FetchIoCmds,
        ];
        ALL.into_iter().find(|op| op.code() == code || op.legacy_code() == Some(code))
    }
}

/// Result of a command for a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoResult {
    /// The tag has a request, which its descriptor describes.
    Request,
    /// The request is a write: provide a buffer with [`IoOp::NeedGetData`].
    NeedGetData,
    /// The tag must not be fetched again: the device is being stopped or quiesced.
    Abort,
    /// The command was refused with a positive errno.
    Refused(i32),
}

impl IoResult {
    /// Converts the result of a completion.
    pub const fn from_result(result: i32) -> IoResult {
        match result {
            0 => IoResult::Request,
            1 => IoResult::NeedGetData,
            _ if result == -libc::ENODEV => IoResult::Abort,
            _ => IoResult::Refused(result.wrapping_neg()),
        }
    }

    /// Returns the result of a completion.
    pub const fn to_result(self) -> i32 {
        match self {
            IoResult::Request => 0,
            IoResult::NeedGetData => 1,
            IoResult::Abort => -libc::ENODEV,
            IoResult::Refused(errno) => -errno,
        }
    }
}

/// `struct ublksrv_io_cmd`: the payload of a command for one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoCommand {
    /// The queue.
    pub q_id: u16,
    /// The tag.
    pub tag: u16,
    /// For a commit: bytes done, or a negative errno.
    pub result: i32,
    /// Depending on the command: address of the tag's buffer, index of a buffer to register, or sector of a
    /// zone append.
    pub addr: u64,
}

impl IoCommand {
    /// Returns the bytes in an SQE.
    #[inline]
    pub fn to_bytes(self) -> [u8; 16] {
        zerocopy::transmute!(self)
    }

    /// Decodes the bytes of an SQE.
    #[inline]
    pub fn from_bytes(bytes: [u8; 16]) -> IoCommand {
        zerocopy::transmute!(bytes)
    }
}

/// `struct ublksrv_io_desc`: descriptor of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoDescriptor {
    /// Bits 0 to 7: a [`KernelOp`]; higher bits: [`IoFlags`].
    pub op_flags: u32,
    /// Length in sectors; for a zone report the number of zones.
    pub nr_sectors: u32,
    /// Start sector.
    pub start_sector: u64,
    /// Address of the tag's buffer; with [`IoFlags::SHMEM_ZC`] see [`shmem_index`].
    pub addr: u64,
}

impl IoDescriptor {
    /// Returns the operation, or `None` if it is unknown.
    pub const fn op(&self) -> Option<KernelOp> {
        KernelOp::from_number(self.op_flags as u8)
    }

    /// Returns the flags.
    pub const fn flags(&self) -> IoFlags {
        IoFlags(self.op_flags & !0xff)
    }
}

/// Operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum KernelOp {
    /// Read.
    Read = 0,
    /// Write.
    Write = 1,
    /// Flush.
    Flush = 2,
    /// Discard.
    Discard = 3,
    /// Write same, which kernels no longer send.
    WriteSame = 4,
    /// Write zeroes.
    WriteZeroes = 5,
    /// Open a zone.
    ZoneOpen = 10,
    /// Close a zone.
    ZoneClose = 11,
    /// Finish a zone.
    ZoneFinish = 12,
    /// Append to a zone.
    ZoneAppend = 13,
    /// Reset all zones.
    ZoneResetAll = 14,
    /// Reset a zone.
    ZoneReset = 15,
    /// Report zones, as `struct blk_zone`.
    ReportZones = 18,
}

impl KernelOp {
    /// Converts bits 0 to 7 of `op_flags`. Returns `None` if the operation is unknown.
    pub const fn from_number(number: u8) -> Option<KernelOp> {
        Some(match number {
            0 => KernelOp::Read,
            1 => KernelOp::Write,
            2 => KernelOp::Flush,
            3 => KernelOp::Discard,
            4 => KernelOp::WriteSame,
            5 => KernelOp::WriteZeroes,
            10 => KernelOp::ZoneOpen,
            11 => KernelOp::ZoneClose,
            12 => KernelOp::ZoneFinish,
            13 => KernelOp::ZoneAppend,
            14 => KernelOp::ZoneResetAll,
            15 => KernelOp::ZoneReset,
            18 => KernelOp::ReportZones,
            _ => return None,
        })
    }
}

/// Flags of a request, at their position in `op_flags`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct IoFlags(pub u32);

/// Position of the first flag in `op_flags`.
pub const IO_FLAGS_OFFSET: u32 = 8;

impl IoFlags {
    /// The empty set.
    pub const NONE: IoFlags = IoFlags(0);
    /// Do not retry device errors.
    pub const FAILFAST_DEV: IoFlags = IoFlags(1 << 8);
    /// Do not retry transport errors.
    pub const FAILFAST_TRANSPORT: IoFlags = IoFlags(1 << 9);
    /// Do not retry driver errors.
    pub const FAILFAST_DRIVER: IoFlags = IoFlags(1 << 10);
    /// The request is for file system metadata.
    pub const META: IoFlags = IoFlags(1 << 11);
    /// The data must be on stable storage before completion.
    pub const FUA: IoFlags = IoFlags(1 << 13);
    /// Write zeroes must not deallocate.
    pub const NOUNMAP: IoFlags = IoFlags(1 << 15);
    /// The request is for swap.
    pub const SWAP: IoFlags = IoFlags(1 << 16);
    /// The buffer was not registered automatically: register it by command.
    pub const NEED_REG_BUF: IoFlags = IoFlags(1 << 17);
    /// The request has integrity data.
    pub const INTEGRITY: IoFlags = IoFlags(1 << 18);
    /// The data is in memory registered with [`ControlOp::RegBuf`](super::ControlOp::RegBuf).
    pub const SHMEM_ZC: IoFlags = IoFlags(1 << 19);

    /// Returns whether this set contains all flags of `other`.
    pub const fn has(self, other: IoFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn with(self, other: IoFlags) -> IoFlags {
        IoFlags(self.0 | other.0)
    }
}

/// `struct ublk_auto_buf_reg`: automatic registration of a tag's buffer, passed in `sqe->addr`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AutoBufReg {
    /// Index in the io_uring's buffer table.
    pub index: u16,
    /// [`AutoBufReg::FALLBACK`] or 0.
    pub flags: u8,
    /// Must be zero.
    pub reserved0: u8,
    /// Must be zero.
    pub reserved1: u32,
}

impl AutoBufReg {
    /// If registration fails, deliver the request with [`IoFlags::NEED_REG_BUF`] instead of failing it.
    pub const FALLBACK: u8 = 1;

    /// Returns the encoding for `sqe->addr`.
    pub const fn to_sqe_addr(self) -> u64 {
        self.index as u64
            | (self.flags as u64) << 16
            | (self.reserved0 as u64) << 24
            | (self.reserved1 as u64) << 32
    }

    /// Decodes `sqe->addr`.
    pub const fn from_sqe_addr(addr: u64) -> AutoBufReg {
        AutoBufReg {
            index: addr as u16,
            flags: (addr >> 16) as u8,
            reserved0: (addr >> 24) as u8,
            reserved1: (addr >> 32) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_of_data_encode_queue_tag_and_byte() {
        assert_eq!(user_copy_offset(0, 0, 0), 0x8000_0000);
        assert_eq!(user_copy_offset(1, 2, 3) - 0x8000_0000, 1 << 41 | 2 << 25 | 3);
        assert_eq!(user_copy_integrity_offset(1, 2, 3) ^ user_copy_offset(1, 2, 3), 1 << 62);
    }

    #[test]
    fn descriptors_are_laid_out_for_the_maximum_depth() {
        assert_eq!(descriptors_offset(3, 4096), 3 * 4096 * 24);
        assert_eq!(descriptors_len(128, 4096), 4096);
        assert_eq!(descriptors_len(4096, 4096), 98304);
    }

    #[test]
    fn an_automatic_registration_decodes_to_an_equal_one() {
        let reg = AutoBufReg { index: 513, flags: AutoBufReg::FALLBACK, ..AutoBufReg::default() };
        assert_eq!(reg.to_sqe_addr(), 0x1_0201);
        assert_eq!(AutoBufReg::from_sqe_addr(reg.to_sqe_addr()), reg);
    }

    #[test]
    fn an_abort_is_distinguished_from_other_results() {
        for result in [0, 1, -libc::ENODEV, -libc::EBUSY] {
            assert_eq!(IoResult::from_result(result).to_result(), result);
        }
        assert_eq!(IoResult::from_result(-libc::ENODEV), IoResult::Abort);
        assert_eq!(IoResult::from_result(-libc::EBUSY), IoResult::Refused(libc::EBUSY));
    }
}
