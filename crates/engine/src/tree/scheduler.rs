//! The scheduler of a device: its place in the tree, and another one there.

use super::{Element, Extent, Tree};
use crate::device::DeviceError;
use layers::scheduler::{Choice, Scheduler};
use std::sync::Arc;

impl Tree {
    /// The tree with that scheduler, or with none: below the splits at its top.
    ///
    /// # Errors
    /// What does not fit.
    pub(crate) fn with_scheduler(&self, wanted: Option<&Choice>) -> Result<Tree, DeviceError> {
        let tree = match (&self.element, &self.extent) {
            (Element::Layer(_, below), Extent::Scheduler(_)) => return below[0].with_scheduler(wanted),
            (Element::Layer(layer, below), extent) if self.is_split() => {
                let below = below[0].with_scheduler(wanted)?;
                Tree::over(layer.clone(), vec![below])?.sized_by(extent.clone())
            }
            _ => match wanted {
                None => self.clone(),
                Some(choice) => {
                    let scheduler = Arc::new(Scheduler::new(*choice));
                    Tree::over(scheduler.clone(), vec![self.clone()])?.sized_by(Extent::Scheduler(scheduler))
                }
            },
        };
        tree.check_height()?;
        Ok(tree)
    }

    /// Its scheduler.
    pub(crate) fn scheduler(&self) -> Option<&Arc<Scheduler>> {
        match (&self.element, &self.extent) {
            (_, Extent::Scheduler(scheduler)) => Some(scheduler),
            (Element::Layer(_, below), _) if self.is_split() => below[0].scheduler(),
            _ => None,
        }
    }

    /// Tell the device's own schedulers of a queue of that depth. Those of devices below it have queues of their own.
    pub(super) fn made_for(&self, depth: u16) {
        if let Extent::Scheduler(scheduler) = &self.extent {
            scheduler.made_for(depth);
        }
        if let Element::Layer(_, below) = &self.element {
            below.iter().for_each(|child| child.made_for(depth));
        }
    }

    /// Whether it cuts requests and does nothing else.
    fn is_split(&self) -> bool {
        matches!(&self.element, Element::Layer(layer, below) if layer.name() == "split" && below.len() == 1)
    }

    /// Whether the device that its top belongs to has a backend: whether nothing on the way moves requests.
    pub(super) fn ends_in_backend(&self) -> bool {
        match &self.element {
            Element::Backend(_) => true,
            Element::Device(_, form) => form.tree.ends_in_backend(),
            Element::Layer(layer, below) => below
                .iter()
                .enumerate()
                .all(|(at, tree)| layer.begins(at).is_some() && tree.ends_in_backend()),
        }
    }
}
