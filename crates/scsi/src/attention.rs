//! Unit attention conditions of a nexus: SAM-6 section 5.14.

use crate::sense::{Key, Sense};
use std::collections::VecDeque;

/// A unit attention condition: its additional sense code and qualifier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Attention(pub u8, pub u8);

impl Attention {
    /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED: the first condition of a nexus.
    pub const POWER_ON: Attention = Attention(0x29, 0x00);
    /// SCSI BUS RESET OCCURRED: a target warm reset.
    pub const WARM_RESET: Attention = Attention(0x29, 0x02);
    /// BUS DEVICE RESET FUNCTION OCCURRED: a logical unit reset.
    pub const UNIT_RESET: Attention = Attention(0x29, 0x03);
    /// I_T NEXUS LOSS OCCURRED.
    pub const NEXUS_LOSS: Attention = Attention(0x29, 0x07);
    /// MODE PARAMETERS CHANGED.
    pub const MODE_CHANGED: Attention = Attention(0x2A, 0x01);
    /// RESERVATIONS PREEMPTED.
    pub const RESERVATIONS_PREEMPTED: Attention = Attention(0x2A, 0x03);
    /// RESERVATIONS RELEASED.
    pub const RESERVATIONS_RELEASED: Attention = Attention(0x2A, 0x04);
    /// REGISTRATIONS PREEMPTED.
    pub const REGISTRATIONS_PREEMPTED: Attention = Attention(0x2A, 0x05);
    /// ASYMMETRIC ACCESS STATE CHANGED.
    pub const ACCESS_STATE_CHANGED: Attention = Attention(0x2A, 0x06);
    /// CAPACITY DATA HAS CHANGED.
    pub const CAPACITY_CHANGED: Attention = Attention(0x2A, 0x09);
    /// COMMANDS CLEARED BY ANOTHER INITIATOR.
    pub const COMMANDS_CLEARED: Attention = Attention(0x2F, 0x00);
    /// NOT READY TO READY CHANGE, MEDIUM MAY HAVE CHANGED.
    pub const MEDIUM_CHANGED: Attention = Attention(0x28, 0x00);
    /// DEVICE IDENTIFIER CHANGED: SET IDENTIFYING INFORMATION.
    pub const IDENTIFIER_CHANGED: Attention = Attention(0x3F, 0x05);
    /// REPORTED LUNS DATA HAS CHANGED.
    pub const LUNS_CHANGED: Attention = Attention(0x3F, 0x0E);

    /// Returns the sense data that reports the condition.
    pub const fn sense(self) -> Sense {
        Sense::new(Key::UnitAttention, self.0, self.1)
    }

    /// Returns whether the condition is a reset, which makes all earlier conditions meaningless.
    fn is_reset(self) -> bool {
        self.0 == 0x29
    }
}

/// Conditions of a nexus that have not been reported yet.
#[derive(Default, Debug)]
pub(crate) struct Attentions {
    /// Pending conditions, oldest first, each at most once.
    queue: VecDeque<Attention>,
}

impl Attentions {
    /// Maximum number of pending conditions. Each is in the queue at most once, so the conditions above
    /// never reach it.
    const MAX: usize = 32;

    /// Establishes a condition. A reset replaces all conditions except a reset of higher precedence, which
    /// remains: SAM-6 section 6.2 lets POWER ON cover all others.
    pub(crate) fn add(&mut self, attention: Attention) {
        if attention.is_reset() {
            let covers = self.queue.iter().any(|other| other.is_reset() && other.1 <= attention.1);
            self.queue.retain(|other| other.is_reset() && other.1 <= attention.1);
            if !covers {
                self.queue.push_front(attention);
            }
        } else if !self.queue.contains(&attention) && self.queue.len() < Attentions::MAX {
            self.queue.push_back(attention);
        }
    }

    /// Returns the condition to report next.
    pub(crate) fn first(&self) -> Option<Attention> {
        self.queue.front().copied()
    }

    /// Clears the condition that [`first`](Attentions::first) returned.
    pub(crate) fn clear_first(&mut self) {
        self.queue.pop_front();
    }

    /// Clears a condition, wherever it is in the queue.
    pub(crate) fn clear(&mut self, attention: Attention) {
        self.queue.retain(|other| *other != attention);
    }

    /// Returns the number of conditions.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(mut attentions: Attentions) -> Vec<Attention> {
        std::iter::from_fn(|| {
            let first = attentions.first();
            attentions.clear_first();
            first
        })
        .collect()
    }

    #[test]
    fn conditions_are_reported_in_order_and_once() {
        let mut attentions = Attentions::default();
        for attention in [Attention::MODE_CHANGED, Attention::CAPACITY_CHANGED, Attention::MODE_CHANGED] {
            attentions.add(attention);
        }
        assert_eq!(drain(attentions), [Attention::MODE_CHANGED, Attention::CAPACITY_CHANGED]);
    }

    #[test]
    fn a_reset_makes_earlier_conditions_meaningless_and_power_on_covers_other_resets() {
        let mut attentions = Attentions::default();
        attentions.add(Attention::MODE_CHANGED);
        attentions.add(Attention::UNIT_RESET);
        attentions.add(Attention::CAPACITY_CHANGED);
        assert_eq!(attentions.first(), Some(Attention::UNIT_RESET));
        attentions.add(Attention::POWER_ON);
        attentions.add(Attention::NEXUS_LOSS);
        assert_eq!(drain(attentions), [Attention::POWER_ON]);
    }
}
