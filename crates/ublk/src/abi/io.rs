//! What goes through `/dev/ublkcN`: request descriptors in shared memory, commands for tags, offsets.

use super::{BatchIo, READ_WRITE, ioctl_number};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The most tags of a queue.
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// The most queues of a device.
pub const QUEUES_MAX: u16 = 4096;
/// Bits of an offset that count bytes within one request's buffer.
const BUFFER_BITS: u32 = 25;
/// Bits of an offset that name a tag.
const TAG_BITS: u32 = 16;
/// The largest request, in bytes: 32 MiB.
pub const IO_BUFFER_BYTES_MAX: u32 = 1 << BUFFER_BITS;
/// Where request data starts in the character device.
const BUFFERS_START: u64 = 0x8000_0000;
/// In an offset: integrity data, not data.
const INTEGRITY_FLAG: u64 = 1 << 62;

/// Where the descriptors of a queue start in the mapping of the character device, in bytes.
/// `page`: the system's page size.
pub const fn descriptors_offset(queue: u16, page: u64) -> u64 {
    // The driver lays every queue out as if it had the most tags.
    let most = QUEUE_DEPTH_MAX as u64 * size_of::<IoDescriptor>() as u64;
    queue as u64 * most.next_multiple_of(page)
}

/// How long a queue's descriptors are, in bytes, rounded up to pages as the mapping has to be.
pub const fn descriptors_len(depth: u16, page: u64) -> u64 {
    (depth as u64 * size_of::<IoDescriptor>() as u64).next_multiple_of(page)
}

/// Where a request's data is for `pread` and `pwrite` of the character device, `skip` bytes into it.
pub const fn user_copy_offset(queue: u16, tag: u16, skip: u32) -> u64 {
    BUFFERS_START + ((queue as u64) << (BUFFER_BITS + TAG_BITS) | (tag as u64) << BUFFER_BITS | skip as u64)
}

/// The same for its integrity data.
pub const fn user_copy_integrity_offset(queue: u16, tag: u16, skip: u32) -> u64 {
    user_copy_offset(queue, tag, skip) | INTEGRITY_FLAG
}

/// The buffer that an address with [`IoFlags::SHMEM_ZC`] lies in.
pub const fn shmem_index(addr: u64) -> u16 {
    (addr >> 32) as u16
}

/// How many bytes into that buffer it lies.
pub const fn shmem_offset(addr: u64) -> u32 {
    addr as u32
}

/// A command for tags: the `cmd_op` of its SQE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum IoOp {
    /// Fetch a tag's first request.
    FetchReq = 0x20,
    /// End a tag's request and fetch its next one.
    CommitAndFetchReq = 0x21,
    /// Copy a write's data to the buffer named here.
    NeedGetData = 0x22,
    /// Register a request's buffer with this io_uring.
    RegisterIoBuf = 0x23,
    /// Take that back.
    UnregisterIoBuf = 0x24,
    /// Batch: prepare tags.
    PrepIoCmds = 0x25,
    /// Batch: end requests.
    CommitIoCmds = 0x26,
    /// Batch: fetch requests, multishot.
    FetchIoCmds = 0x27,
}

impl IoOp {
    /// The ioctl-encoded number.
    pub const fn code(self) -> u32 {
        let size = match self {
            IoOp::PrepIoCmds | IoOp::CommitIoCmds | IoOp::FetchIoCmds => size_of::<BatchIo>(),
            _ => size_of::<IoCommand>(),
        };
        ioctl_number(READ_WRITE, self as u8, size)
    }

    /// The bare number, for kernels before 6.5. `None` for what they do not have.
    pub const fn legacy_code(self) -> Option<u32> {
        match self {
            IoOp::FetchReq | IoOp::CommitAndFetchReq | IoOp::NeedGetData => Some(self as u32),
            _ => None,
        }
    }

    /// From an SQE's `cmd_op`, of either encoding.
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

/// How a command for a tag ended, beside negative errnos.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoResult {
    /// The tag has a request, described in its descriptor.
    Request,
    /// It is a write: name a buffer with [`IoOp::NeedGetData`].
    NeedGetData,
    /// The tag is not to be fetched again: the device stops or is quiesced.
    Abort,
    /// The command was refused: a positive errno.
    Refused(i32),
}

impl IoResult {
    /// From a completion's result.
    pub const fn from_result(result: i32) -> IoResult {
        match result {
            0 => IoResult::Request,
            1 => IoResult::NeedGetData,
            _ if result == -libc::ENODEV => IoResult::Abort,
            _ => IoResult::Refused(result.wrapping_neg()),
        }
    }

    /// As a completion's result.
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
    /// The buffer of the tag; a buffer index to register; where a zone append landed, in sectors.
    pub addr: u64,
}

impl IoCommand {
    /// As an SQE carries it.
    #[inline]
    pub fn to_bytes(self) -> [u8; 16] {
        zerocopy::transmute!(self)
    }

    /// From an SQE.
    #[inline]
    pub fn from_bytes(bytes: [u8; 16]) -> IoCommand {
        zerocopy::transmute!(bytes)
    }
}

/// `struct ublksrv_io_desc`: a request as the driver describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoDescriptor {
    /// Bits 0 to 7: a [`KernelOp`]. The others: [`IoFlags`].
    pub op_flags: u32,
    /// How long it is, in sectors; for a zone report how many zones.
    pub nr_sectors: u32,
    /// Where it starts, in sectors.
    pub start_sector: u64,
    /// The buffer that was named for its tag; with [`IoFlags::SHMEM_ZC`] see [`shmem_index`].
    pub addr: u64,
}

impl IoDescriptor {
    /// What to do; `None` for what this header does not name.
    pub const fn op(&self) -> Option<KernelOp> {
        KernelOp::from_number(self.op_flags as u8)
    }

    /// How.
    pub const fn flags(&self) -> IoFlags {
        IoFlags(self.op_flags & !0xff)
    }
}

/// What a request wants.
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
    /// Write same; no kernel sends it any more.
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
    /// From bits 0 to 7 of `op_flags`.
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

/// Flags of a request, in place in `op_flags`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct IoFlags(pub u32);

/// The first bit of `op_flags` that is a flag.
pub const IO_FLAGS_OFFSET: u32 = 8;

impl IoFlags {
    /// None.
    pub const NONE: IoFlags = IoFlags(0);
    /// Do not retry device errors.
    pub const FAILFAST_DEV: IoFlags = IoFlags(1 << 8);
    /// Do not retry transport errors.
    pub const FAILFAST_TRANSPORT: IoFlags = IoFlags(1 << 9);
    /// Do not retry driver errors.
    pub const FAILFAST_DRIVER: IoFlags = IoFlags(1 << 10);
    /// File system metadata.
    pub const META: IoFlags = IoFlags(1 << 11);
    /// Durable before it ends.
    pub const FUA: IoFlags = IoFlags(1 << 13);
    /// Write zeroes keeps the space.
    pub const NOUNMAP: IoFlags = IoFlags(1 << 15);
    /// Swap.
    pub const SWAP: IoFlags = IoFlags(1 << 16);
    /// The buffer was not registered by itself: register it by command.
    pub const NEED_REG_BUF: IoFlags = IoFlags(1 << 17);
    /// There is integrity data.
    pub const INTEGRITY: IoFlags = IoFlags(1 << 18);
    /// The data lies in memory registered with [`ControlOp::RegBuf`](super::ControlOp::RegBuf).
    pub const SHMEM_ZC: IoFlags = IoFlags(1 << 19);

    /// Whether all of `other` are set.
    pub const fn has(self, other: IoFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// With these too.
    #[must_use]
    pub const fn with(self, other: IoFlags) -> IoFlags {
        IoFlags(self.0 | other.0)
    }
}

/// `struct ublk_auto_buf_reg`: how a tag's buffer registers itself, carried in `sqe->addr`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AutoBufReg {
    /// Index in the io_uring's buffer table.
    pub index: u16,
    /// [`AutoBufReg::FALLBACK`] or 0.
    pub flags: u8,
    /// Zero.
    pub reserved0: u8,
    /// Zero.
    pub reserved1: u32,
}

impl AutoBufReg {
    /// When it fails, deliver the request with [`IoFlags::NEED_REG_BUF`] instead of failing it.
    pub const FALLBACK: u8 = 1;

    /// As `sqe->addr` carries it.
    pub const fn to_sqe_addr(self) -> u64 {
        self.index as u64
            | (self.flags as u64) << 16
            | (self.reserved0 as u64) << 24
            | (self.reserved1 as u64) << 32
    }

    /// From `sqe->addr`.
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
    fn offsets_of_data_keep_queue_tag_and_byte_apart() {
        assert_eq!(user_copy_offset(0, 0, 0), 0x8000_0000);
        assert_eq!(user_copy_offset(1, 2, 3) - 0x8000_0000, 1 << 41 | 2 << 25 | 3);
        assert_eq!(user_copy_integrity_offset(1, 2, 3) ^ user_copy_offset(1, 2, 3), 1 << 62);
    }

    #[test]
    fn descriptors_of_queues_stand_as_if_each_had_the_most_tags() {
        assert_eq!(descriptors_offset(3, 4096), 3 * 4096 * 24);
        assert_eq!(descriptors_len(128, 4096), 4096);
        assert_eq!(descriptors_len(4096, 4096), 98304);
    }

    #[test]
    fn an_automatic_registration_survives_its_encoding() {
        let reg = AutoBufReg { index: 513, flags: AutoBufReg::FALLBACK, ..AutoBufReg::default() };
        assert_eq!(reg.to_sqe_addr(), 0x1_0201);
        assert_eq!(AutoBufReg::from_sqe_addr(reg.to_sqe_addr()), reg);
    }

    #[test]
    fn a_result_is_told_apart_from_an_abort() {
        for result in [0, 1, -libc::ENODEV, -libc::EBUSY] {
            assert_eq!(IoResult::from_result(result).to_result(), result);
        }
        assert_eq!(IoResult::from_result(-libc::ENODEV), IoResult::Abort);
        assert_eq!(IoResult::from_result(-libc::EBUSY), IoResult::Refused(libc::EBUSY));
    }
}
