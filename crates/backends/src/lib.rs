//! Backends: nodes that hold blocks.
//!
//! Each backend has two parts. The **shared** part is made once, on a control thread, and says what the
//! device is: its size, its limits, what it can do. It is the only part that opens or maps anything. The
//! **node** is made once for each hardware queue, belongs to that queue's thread, and reaches memory and
//! files through the ring alone, so the same node runs on a simulated ring.
//!
//! | backend | holds | answers |
//! |---|---|---|
//! | [`File`] | a regular file or a block device | in place where that cannot wait, else through the ring |
//! | [`Ram`] | memory, filled as it is written | in place, or lends its pages |
//! | [`Null`] | nothing, or memory | at once, or after a set time |
//! | [`Zero`] | nothing: reads as zeroes | at once |
//! | [`Failing`] | nothing: every request fails | at once |
//!
//! *Invariant:* `unsafe` is in `ram/memory.rs` (memory that threads share) and `file/sys.rs` (system calls
//! of opening a file) only.

#![deny(unsafe_code)]

mod failing;
#[cfg(test)]
mod file;
mod null;
mod pieces;
mod ram;
#[cfg(test)]
mod testing;
mod zero;

pub use failing::{Failing, FailingNode};
pub use null::{Completion, CompletionError, IrqMode, Null, NullNode, NullSpec};
pub use ram::{Ram, RamError, RamNode, RamSpec};
pub use zero::{Zero, ZeroNode, ZeroPages};

use block::Bytes;

/// One line of what `show` says about a device: a name and its value.
pub type Fact = (&'static str, String);

/// What a backend answers with something better than [`Status::NotSupported`](block::Status::NotSupported).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features {
    /// [`Op::Flush`](block::Op::Flush).
    pub flush: bool,
    /// [`Flags::FUA`](block::Flags::FUA) on writes, discards and write zeroes.
    pub fua: bool,
    /// [`Op::Discard`](block::Op::Discard). It can still turn out at the first one that it cannot.
    pub discard: bool,
    /// [`Op::WriteZeroes`](block::Op::WriteZeroes).
    pub write_zeroes: bool,
    /// [`Flags::FAST_ZERO`](block::Flags::FAST_ZERO) is worth asking for.
    pub fast_zero: bool,
    /// Seeks cost: a spinning disk.
    pub rotational: bool,
}

impl Features {
    /// Memory, and what does as if: everything, at once.
    pub const MEMORY: Features = Features {
        flush: true,
        fua: true,
        discard: true,
        write_zeroes: true,
        fast_zero: true,
        rotational: false,
    };
}

/// The shared part of a backend, as the control plane sees it.
pub trait Backend: Send + Sync {
    /// How much it holds: a whole number of its logical blocks.
    fn size(&self) -> Bytes;

    /// Writes, discards and write zeroes fail.
    fn read_only(&self) -> bool {
        false
    }

    /// What it can do.
    fn features(&self) -> Features;

    /// What `show` says about it, in order.
    fn describe(&self) -> Vec<Fact>;
}
