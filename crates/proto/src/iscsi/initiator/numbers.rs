//! Command numbering at the initiator (RFC 7143, section 4.2.2): CmdSN, and the target's window.

use super::super::pdu::{RESERVED_TAG, Response};
use super::super::sequence::before;

/// Numbers of a session with a single connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandNumbers {
    cmd_sn: u32,
    exp_cmd_sn: u32,
    max_cmd_sn: u32,
    exp_stat_sn: u32,
}

impl CommandNumbers {
    /// Starts with the numbers from the final login response.
    pub(super) const fn new(cmd_sn: u32, max_cmd_sn: u32, exp_stat_sn: u32) -> CommandNumbers {
        CommandNumbers { cmd_sn, exp_cmd_sn: cmd_sn, max_cmd_sn, exp_stat_sn }
    }

    /// Returns how many commands the window allows now.
    pub const fn room(&self) -> u32 {
        let room = self.max_cmd_sn.wrapping_add(1).wrapping_sub(self.cmd_sn);
        if room > i32::MAX as u32 { 0 } else { room }
    }

    /// Takes the CmdSN of the next command, or returns `None` while the window is closed.
    pub fn take(&mut self) -> Option<u32> {
        if self.room() == 0 {
            return None;
        }
        let cmd_sn = self.cmd_sn;
        self.cmd_sn = cmd_sn.wrapping_add(1);
        Some(cmd_sn)
    }

    /// Returns the CmdSN for an immediate command, which does not advance it.
    pub const fn immediate(&self) -> u32 {
        self.cmd_sn
    }

    /// Returns the ExpStatSN for the next request.
    pub const fn exp_stat_sn(&self) -> u32 {
        self.exp_stat_sn
    }

    /// Returns the target's ExpCmdSN: all commands before it have arrived.
    pub const fn exp_cmd_sn(&self) -> u32 {
        self.exp_cmd_sn
    }

    /// Updates the window and ExpStatSN from a PDU's numbers (sections 4.2.2.1 and 4.2.2.2).
    pub fn received(&mut self, response: &Response) {
        let numbers = response.numbers();
        // If MaxCmdSN precedes ExpCmdSN - 1, the target's numbers are invalid, and both are ignored.
        if !before(numbers.max_cmd_sn, numbers.exp_cmd_sn.wrapping_sub(1)) {
            if before(self.max_cmd_sn, numbers.max_cmd_sn) {
                self.max_cmd_sn = numbers.max_cmd_sn;
            }
            if before(self.exp_cmd_sn, numbers.exp_cmd_sn) {
                self.exp_cmd_sn = numbers.exp_cmd_sn;
            }
        }
        let has_status = match response {
            Response::R2t(_) => false,
            Response::DataIn(pdu) => pdu.status.is_some(),
            Response::NopIn(pdu) => pdu.itt != RESERVED_TAG,
            _ => true,
        };
        if has_status && !before(numbers.stat_sn, self.exp_stat_sn) {
            self.exp_stat_sn = numbers.stat_sn.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::pdu::{NopIn, Numbers};
    use super::*;

    fn nop_in(itt: u32, stat_sn: u32, exp_cmd_sn: u32, max_cmd_sn: u32) -> Response {
        let numbers = Numbers { stat_sn, exp_cmd_sn, max_cmd_sn };
        Response::NopIn(NopIn { lun: 0, itt, ttt: RESERVED_TAG, numbers })
    }

    #[test]
    fn window_limits_commands_across_the_wrap() {
        let mut numbers = CommandNumbers::new(u32::MAX, 0, 5);
        assert_eq!((numbers.take(), numbers.take(), numbers.take()), (Some(u32::MAX), Some(0), None));
        numbers.received(&nop_in(1, 5, 1, 1));
        assert_eq!((numbers.take(), numbers.take()), (Some(1), None));
        assert_eq!((numbers.exp_stat_sn(), numbers.exp_cmd_sn()), (6, 1));
    }

    #[test]
    fn older_and_contradictory_numbers_are_ignored() {
        let mut numbers = CommandNumbers::new(10, 20, 5);
        numbers.received(&nop_in(RESERVED_TAG, 9, 9, 15));
        numbers.received(&nop_in(RESERVED_TAG, 9, 40, 30));
        assert_eq!((numbers.room(), numbers.exp_cmd_sn(), numbers.exp_stat_sn()), (11, 10, 5));
    }
}
