//! Numbering of commands and statuses (RFC 7143, section 4.2.2): CmdSN per session, StatSN per connection.
//!
//! *Invariants:* numbers are compared with serial arithmetic (RFC 1982, 32 bits). ExpCmdSN and MaxCmdSN
//! never decrease, and at most `depth` non-immediate commands are between arrival and completion. Nothing
//! allocates.

use super::pdu::Numbers;

/// Largest window of commands: LIO's limit of `default_cmdsn_depth` (inventory 2.8).
pub const MAX_DEPTH: u32 = 512;

/// Returns whether `a` precedes `b` in serial arithmetic (section 4.2.2).
pub const fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Verdict on a non-immediate command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// The command is the next one: process it, then the commands that [`CommandWindow::take_held`]
    /// returns.
    InOrder,
    /// Commands before it are missing; they may arrive on another connection. Keep the command until
    /// [`CommandWindow::take_held`] returns its CmdSN.
    Held,
    /// The command is outside the window, or a duplicate: ignore it silently, with its data (section
    /// 4.2.2.1).
    Ignored,
}

/// Window of commands that a session's target accepts: ExpCmdSN to MaxCmdSN.
///
/// Immediate commands are not numbered; the caller limits their count itself.
#[derive(Clone, Debug)]
pub struct CommandWindow {
    expected: u32,
    max: u32,
    /// Bit `cmd_sn % MAX_DEPTH` is set while the command is held.
    held: [u64; MAX_DEPTH as usize / 64],
}

impl CommandWindow {
    /// Creates the window of a session whose first command has the number `first`, which is the CmdSN of
    /// the leading login. `depth` is clamped to 1..=[`MAX_DEPTH`].
    pub fn new(first: u32, depth: u32) -> CommandWindow {
        let depth = depth.clamp(1, MAX_DEPTH);
        CommandWindow { expected: first, max: first.wrapping_add(depth - 1), held: [0; _] }
    }

    /// Returns ExpCmdSN.
    pub const fn expected(&self) -> u32 {
        self.expected
    }

    /// Returns MaxCmdSN. It is one less than ExpCmdSN if the window is closed.
    pub const fn max(&self) -> u32 {
        self.max
    }

    /// Returns the numbers for a PDU with this StatSN.
    pub const fn numbers(&self, stat_sn: u32) -> Numbers {
        Numbers { stat_sn, exp_cmd_sn: self.expected, max_cmd_sn: self.max }
    }

    fn held_bit(&mut self, cmd_sn: u32) -> (&mut u64, u64) {
        let index = cmd_sn % MAX_DEPTH;
        (&mut self.held[index as usize / 64], 1 << (index % 64))
    }

    /// Checks a non-immediate command against the window, and advances ExpCmdSN if the command is the next
    /// one.
    pub fn receive(&mut self, cmd_sn: u32) -> Arrival {
        if before(cmd_sn, self.expected) || before(self.max, cmd_sn) {
            return Arrival::Ignored;
        }
        if cmd_sn == self.expected {
            self.expected = self.expected.wrapping_add(1);
            return Arrival::InOrder;
        }
        let (word, bit) = self.held_bit(cmd_sn);
        if *word & bit != 0 {
            return Arrival::Ignored;
        }
        *word |= bit;
        Arrival::Held
    }

    /// Returns the number of the next held command, if all commands before it have arrived.
    pub fn take_held(&mut self) -> Option<u32> {
        let cmd_sn = self.expected;
        if before(self.max, cmd_sn) {
            return None;
        }
        let (word, bit) = self.held_bit(cmd_sn);
        let held = *word & bit != 0;
        *word &= !bit;
        held.then(|| {
            self.expected = cmd_sn.wrapping_add(1);
            cmd_sn
        })
    }

    /// Drops a held command whose connection failed, so that the initiator may send it again on another
    /// one. Does nothing if the command is not held.
    pub fn forget_held(&mut self, cmd_sn: u32) {
        if before(cmd_sn, self.expected) || before(self.max, cmd_sn) {
            return;
        }
        let (word, bit) = self.held_bit(cmd_sn);
        *word &= !bit;
    }

    /// Opens the window by one command. Call it once for every non-immediate command that ended, with or
    /// without a response.
    pub fn complete(&mut self) {
        // Saturates, so that the window never exceeds the number of bits in `held`.
        if self.max.wrapping_add(1).wrapping_sub(self.expected) < MAX_DEPTH {
            self.max = self.max.wrapping_add(1);
        }
    }
}

/// StatSN counter of a connection, at the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusCounter {
    next: u32,
    acknowledged: u32,
}

impl StatusCounter {
    /// Starts at `next`: the number after the final login response.
    pub const fn new(next: u32) -> StatusCounter {
        StatusCounter { next, acknowledged: next }
    }

    /// Returns the next StatSN, for PDUs that do not consume one (R2T, Data-In without status, NOP-In as a
    /// ping).
    pub const fn next(&self) -> u32 {
        self.next
    }

    /// Consumes a StatSN, for a PDU with a status.
    pub fn take(&mut self) -> u32 {
        let stat_sn = self.next;
        self.next = stat_sn.wrapping_add(1);
        stat_sn
    }

    /// Records an ExpStatSN of the initiator. Returns `false` if it acknowledges a status that was never sent.
    pub fn acknowledge(&mut self, exp_stat_sn: u32) -> bool {
        if before(self.next, exp_stat_sn) {
            return false;
        }
        if before(self.acknowledged, exp_stat_sn) {
            self.acknowledged = exp_stat_sn;
        }
        true
    }

    /// Returns the number of statuses that the initiator has not acknowledged.
    pub const fn unacknowledged(&self) -> u32 {
        self.next.wrapping_sub(self.acknowledged)
    }
}

#[cfg(test)]
#[path = "sequence/tests.rs"]
mod tests;
