//! `linux/ublk_cmd.h` in Rust: structures, command numbers, flags and encodings of the newest header.
//!
//! Structures and fields have the kernel's names. All are plain data without implicit padding, so they can
//! be passed to and from the kernel as bytes. `tests/header.rs` checks every size, offset and value against
//! the header, as a C compiler reports them.
//!
//! The module does not depend on the kernel's version: [`Features`] reports what a kernel supports.

mod batch;
mod control;
mod features;
mod io;
mod params;

pub use batch::{BatchFlags, BatchIo, ElementHeader};
pub use control::{ControlCommand, ControlOp, DeviceInfo, ShmemBufferReg, State};
pub use features::Features;
pub use io::{
    AutoBufReg, IO_BUFFER_BYTES_MAX, IO_FLAGS_OFFSET, IoCommand, IoDescriptor, IoFlags, IoOp, IoResult,
    KernelOp, QUEUE_DEPTH_MAX, QUEUES_MAX, descriptors_len, descriptors_offset, shmem_index, shmem_offset,
    user_copy_integrity_offset, user_copy_offset,
};
pub use params::{
    Attributes, ParamBasic, ParamDevt, ParamDiscard, ParamDmaAlign, ParamIntegrity, ParamSegment, ParamTypes,
    ParamZoned, Params, SEGMENT_SIZE_MIN,
};

/// Returns an ioctl number of type `u`, as `_IOC` computes it. Direction: 2 read, 3 read and write.
const fn ioctl_number(direction: u32, number: u8, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number as u32
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;
