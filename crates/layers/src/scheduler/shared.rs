//! The shared part of a scheduler: which one, and the values of its parameters.

use super::values::Values;
use super::{Choice, SchedulerNode};
use crate::Layer;
use block::{Bytes, Fact, LimitsError, Profile};
use queue::{Node, NodeId, Ring};
use std::sync::{Arc, Mutex, PoisonError};

/// Groups of merged requests that a queue has below at once, at most: each has room for its memory.
const GROUPS_MAX: u16 = 128;

/// The shared part.
#[derive(Debug)]
pub struct Scheduler {
    choice: Mutex<Choice>,
    values: Arc<Values>,
}

impl Scheduler {
    /// As chosen.
    pub fn new(choice: Choice) -> Scheduler {
        Scheduler { choice: Mutex::new(choice), values: Arc::new(Values::new(&choice)) }
    }

    /// The same scheduler with other parameters from now on. Nothing happens when it is another scheduler.
    pub fn set(&self, choice: &Choice) {
        let mut now = self.choice.lock().unwrap_or_else(PoisonError::into_inner);
        if now.policy == choice.policy {
            *now = *choice;
            self.values.set(choice);
        }
    }

    /// A queue of that depth has it: a device's `nr_requests` is that of its own queues, whatever stands above it.
    pub fn made_for(&self, depth: u16) {
        self.values.set_requests(depth);
    }

    /// What was chosen, and set since.
    pub fn choice(&self) -> Choice {
        *self.choice.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Ring> Layer<R> for Scheduler {
    fn name(&self) -> &'static str {
        self.values.policy().name()
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        // Nothing is done while it is submitted.
        Ok(Profile { in_place: false, ..below[0].clone() })
    }

    fn spares(&self, depth: u16) -> u16 {
        depth.clamp(1, GROUPS_MAX)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn begins(&self, _: usize) -> Option<Bytes> {
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
