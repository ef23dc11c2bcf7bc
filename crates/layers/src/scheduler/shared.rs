//! The shared part of a scheduler: its choice of policy, and the values of its parameters.

use super::values::Values;
use super::{Choice, SchedulerNode};
use crate::Layer;
use block::{Bytes, Fact, LimitsError, Profile};
use queue::{Node, NodeId, Ring};
use std::sync::{Arc, Mutex, PoisonError};

/// Largest number of merged groups in flight in a queue; each has an area of the segment table.
const GROUPS_MAX: u16 = 128;

/// The scheduler of a device.
#[derive(Debug)]
pub struct Scheduler {
    choice: Mutex<Choice>,
    values: Arc<Values>,
}

impl Scheduler {
    /// Creates a scheduler.
    pub fn new(choice: Choice) -> Scheduler {
        Scheduler { choice: Mutex::new(choice), values: Arc::new(Values::new(&choice)) }
    }

    /// Changes the parameters. Does nothing if `choice` has another policy.
    pub fn set(&self, choice: &Choice) {
        let mut now = self.choice.lock().unwrap_or_else(PoisonError::into_inner);
        if now.policy == choice.policy {
            *now = *choice;
            self.values.set(choice);
        }
    }

    /// Registers a queue of that depth: `nr_requests` is the depth of the device's own queues.
    pub fn set_depth(&self, depth: u16) {
        self.values.set_requests(depth);
    }

    /// Returns the policy and its current parameters.
    pub fn choice(&self) -> Choice {
        *self.choice.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Ring> Layer<R> for Scheduler {
    fn name(&self) -> &'static str {
        self.values.policy().name()
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        // Requests are held until the end of the batch, so nothing completes inline.
        Ok(Profile { inline: false, ..below[0].clone() })
    }

    fn child_requests(&self, depth: u16) -> u16 {
        depth.clamp(1, GROUPS_MAX)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn child_start(&self, _: usize) -> Option<Bytes> {
        Some(Bytes::ZERO)
    }

    fn node(&self, whole: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(SchedulerNode::new(self.values.clone(), whole, below[0], GROUPS_MAX))
    }

    fn describe(&self) -> Vec<Fact> {
        let mut facts = vec![("nr_requests", self.values.requests().to_string())];
        facts.extend(self.choice().shown(self.values.requests()));
        facts
    }
}
