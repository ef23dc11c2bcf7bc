//! The scheduler of a device, and its place in the tree.

use super::{Element, Extent, Tree};
use crate::device::DeviceError;
use layers::scheduler::{Choice, Scheduler};
use std::sync::Arc;

impl Tree {
    /// Returns the tree with the given scheduler, or with none. It is placed below the splits at the top.
    ///
    /// # Errors
    /// The scheduler does not fit.
    pub(crate) fn with_scheduler(&self, wanted: Option<&Choice>) -> Result<Tree, DeviceError> {
        let tree = match (&self.element, &self.extent) {
            (Element::Layer(_, below), Extent::Scheduler(_)) => return below[0].with_scheduler(wanted),
            (Element::Layer(layer, below), extent) if self.is_split() => {
                let below = below[0].with_scheduler(wanted)?;
                Tree::over(layer.clone(), vec![below])?.with_extent(extent.clone())
            }
            _ => match wanted {
                None => self.clone(),
                Some(choice) => {
                    let scheduler = Arc::new(Scheduler::new(*choice));
                    Tree::over(scheduler.clone(), vec![self.clone()])?
                        .with_extent(Extent::Scheduler(scheduler))
                }
            },
        };
        tree.check_height()?;
        Ok(tree)
    }

    /// Returns the scheduler.
    pub(crate) fn scheduler(&self) -> Option<&Arc<Scheduler>> {
        match (&self.element, &self.extent) {
            (_, Extent::Scheduler(scheduler)) => Some(scheduler),
            (Element::Layer(_, below), _) if self.is_split() => below[0].scheduler(),
            _ => None,
        }
    }

    /// Reports a new queue of that depth to the device's own schedulers. Those of devices below it have
    /// queues of their own.
    pub(super) fn made_for(&self, depth: u16) {
        if let Extent::Scheduler(scheduler) = &self.extent {
            scheduler.set_depth(depth);
        }
        if let Element::Layer(_, below) = &self.element {
            below.iter().for_each(|child| child.made_for(depth));
        }
    }

    /// Returns whether the top layer splits requests and does nothing else.
    fn is_split(&self) -> bool {
        matches!(&self.element, Element::Layer(layer, below) if layer.name() == "split" && below.len() == 1)
    }

    /// Returns whether the device of the tree's top reaches a backend without a layer that changes addresses.
    pub(super) fn ends_in_backend(&self) -> bool {
        match &self.element {
            Element::Backend(_) => true,
            Element::Device(_, composition) => composition.tree.ends_in_backend(),
            Element::Layer(layer, below) => below
                .iter()
                .enumerate()
                .all(|(at, tree)| layer.child_start(at).is_some() && tree.ends_in_backend()),
        }
    }
}
