//! Commands that a driver answers repeatedly with 16-bit numbers, such as the tags of its requests, and
//! commands with address and length of memory.
//!
//! *Invariant:* a buffer belongs to the kernel except while its numbers are read; it is given back within the
//! same reap, so a few small ones serve all commands of a thread.

use super::buffers::BufferRing;
use super::setup::WideRing;
use super::{Target, Uring, kind};
use crate::config::{Event, Token};
use crate::core::Core;
use crate::sys::Mapping;
use block::Segment;
use io_uring::{cqueue, opcode, squeue};
use queue::FileId;
use std::io;

/// Buffer group of numbers.
const GROUP: u16 = 1;
/// Number of buffers.
const COUNT: u16 = 64;
/// Bytes of a buffer: 128 numbers, as many as ublk delivers at once.
const LEN: u32 = 256;
/// `IORING_URING_CMD_MULTISHOT`.
const MULTISHOT: u32 = 1 << 1;

/// The buffer ring, and the memory of its buffers.
pub(super) struct Numbers {
    ring: BufferRing,
    memory: Mapping,
}

impl Numbers {
    /// Registers the buffers. They must outlive the io_uring.
    fn new(ring: &WideRing) -> io::Result<Numbers> {
        let memory = Mapping::new(usize::from(COUNT) * LEN as usize)?;
        let mut numbers = Numbers { ring: BufferRing::new(ring, COUNT, GROUP)?, memory };
        (0..COUNT).for_each(|buffer| numbers.give(buffer));
        Ok(numbers)
    }

    fn pointer(&self, buffer: u16) -> *mut u8 {
        debug_assert!(buffer < COUNT);
        // SAFETY: the mapping holds `COUNT` buffers.
        unsafe { self.memory.base().as_ptr().add(usize::from(buffer) * LEN as usize) }
    }

    fn give(&mut self, buffer: u16) {
        let address = self.pointer(buffer);
        self.ring.give(buffer, address, LEN);
    }

    /// Reads one of the first `LEN / 2` numbers of a buffer that the kernel has filled and that was not given
    /// back.
    fn read(&self, buffer: u16, index: usize) -> u16 {
        debug_assert!(index < LEN as usize / 2);
        // SAFETY: the index lies within the buffer, which is aligned, and nobody writes to it now.
        unsafe { self.pointer(buffer).cast::<u16>().add(index).read() }
    }
}

/// Sets fields of an entry that the io-uring crate cannot set: length, flags and buffer group.
fn complete(entry: &mut squeue::Entry, len: u32, flags: u32, group: u16) {
    const { assert!(size_of::<squeue::Entry>() == 64) };
    let bytes = (&raw mut *entry).cast::<u8>();
    // SAFETY: an entry is exactly the kernel's `struct io_uring_sqe`: 64 bytes, all integers, with `len` at
    // 24, the flags of an operation at 28 and `buf_group` at 40. It is 8-byte aligned and borrowed
    // exclusively.
    unsafe {
        bytes.add(24).cast::<u32>().write(len);
        bytes.add(28).cast::<u32>().write(flags);
        bytes.add(40).cast::<u16>().write(group);
    }
}

impl Uring {
    /// Sends a command with memory of the ring, which must stay valid until the command has completed.
    pub(crate) fn command_from(
        &mut self,
        core: &Core,
        token: Token,
        file: FileId,
        op: u32,
        argument: [u8; 16],
        memory: Segment,
    ) {
        let (fd, fixed) = core.files.target(file);
        let target = Target::new(fd, fixed);
        let address = core.memory.pointer(memory).addr() as u64;
        let mut entry = opcode::UringCmd16::new(target.fd(), op).cmd(argument).addr(Some(address)).build();
        complete(&mut entry, memory.len, 0, 0);
        self.push(target.aim(entry).user_data(kind::COMMAND | token.bits()));
    }

    /// Sends a command that the driver answers with numbers.
    pub(crate) fn command_numbers(
        &mut self,
        core: &mut Core,
        token: Token,
        file: FileId,
        op: u32,
        argument: [u8; 16],
    ) {
        if self.numbers.is_none() {
            match Numbers::new(&self.ring) {
                Ok(numbers) => self.numbers = Some(numbers),
                Err(error) => {
                    let result = -i64::from(error.raw_os_error().unwrap_or(libc::ENOMEM));
                    return core.events.push_back(Event::Ended { token, result });
                }
            }
        }
        let (fd, fixed) = core.files.target(file);
        let target = Target::new(fd, fixed);
        let mut entry = opcode::UringCmd16::new(target.fd(), op).cmd(argument).build();
        complete(&mut entry, 0, MULTISHOT, GROUP);
        let flags = if target.fixed {
            squeue::Flags::FIXED_FILE | squeue::Flags::BUFFER_SELECT
        } else {
            squeue::Flags::BUFFER_SELECT
        };
        self.push(entry.flags(flags).user_data(kind::NUMBERS | token.bits()));
    }

    pub(crate) fn cancel_numbers(&mut self, token: Token) {
        self.push_cancel(kind::NUMBERS | token.bits());
    }

    /// Handles a completion: numbers, the end of the command, or both.
    pub(super) fn numbered(&mut self, core: &mut Core, token: Token, result: i32, flags: u32) {
        if let (Some(numbers), Some(buffer)) = (&mut self.numbers, cqueue::buffer_select(flags)) {
            let count = result.clamp(0, LEN as i32) as usize / 2;
            for index in 0..count {
                let token = Token { number: numbers.read(buffer, index).into(), ..token };
                core.events.push_back(Event::Ended { token, result: 0 });
            }
            numbers.give(buffer);
        }
        if !cqueue::more(flags) {
            // Bytes that came with the last completion do not affect the command's result.
            core.events.push_back(Event::Ended { token, result: result.min(0).into() });
        }
    }
}
