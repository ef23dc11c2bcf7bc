//! Fault plan: the kinds of faults and their probabilities.

/// Probabilities in permille. With all at 0 no operation fails or is short, but they still complete in random
/// order.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Faults {
    /// A read or write transfers fewer bytes than requested, any number.
    pub short: u32,
    /// `-EIO`; part of a write may have reached the disk.
    pub io_error: u32,
    /// `-EAGAIN` from a started operation, without any effect.
    pub again: u32,
    /// `-ENOSPC` for a write into a hole.
    pub no_space: u32,
    /// `-EIO` from a sync: dirty data may be lost, and the next sync does not report it, as on Linux.
    pub sync_error: u32,
    /// The operation takes up to 0.5 s of virtual time.
    pub slow: u32,
    /// The operation completes only when it is cancelled. For queues with a timeout only.
    pub lost: u32,
    /// [`queue::RingFull`] on a start.
    pub ring_full: u32,
    /// `None` from `try_now`.
    pub not_now: u32,
    /// `None` from `allocate`.
    pub no_memory: u32,
}

impl Faults {
    /// No faults.
    pub const NONE: Faults = Faults {
        short: 0,
        io_error: 0,
        again: 0,
        no_space: 0,
        sync_error: 0,
        slow: 0,
        lost: 0,
        ring_full: 0,
        not_now: 0,
        no_memory: 0,
    };

    /// Returns whether requests may fail because of this plan.
    pub fn can_fail_requests(&self) -> bool {
        [self.io_error, self.again, self.no_space, self.sync_error, self.lost]
            .iter()
            .any(|&chance| chance > 0)
    }
}
