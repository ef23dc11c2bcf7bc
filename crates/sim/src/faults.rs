//! What may go wrong, and how often.

/// Chances, each in a thousand. All 0: nothing goes wrong and every operation is done whole, though
/// still in random order.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Faults {
    /// A read or write moves fewer bytes than asked, cut anywhere.
    pub short: u32,
    /// `-EIO`; a write may have reached the disk in part.
    pub io_error: u32,
    /// `-EAGAIN` from a started operation: nothing was done.
    pub again: u32,
    /// `-ENOSPC` for a write into a hole.
    pub no_space: u32,
    /// `-EIO` from a sync: what was dirty may be lost, and the next sync will not say so, as on Linux.
    pub sync_error: u32,
    /// It takes up to half a second of virtual time.
    pub slow: u32,
    /// No completion until it is cancelled. Only for queues with a timeout.
    pub lost: u32,
    /// [`queue::RingFull`] on a start.
    pub ring_full: u32,
    /// `None` from `try_now`.
    pub not_now: u32,
    /// `None` from `allocate`.
    pub no_memory: u32,
}

impl Faults {
    /// Nothing goes wrong.
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

    /// Whether a request may end with an error because of this plan.
    pub fn can_fail_requests(&self) -> bool {
        [self.io_error, self.again, self.no_space, self.sync_error, self.lost]
            .iter()
            .any(|&chance| chance > 0)
    }
}
