//! Changes the scheduler of a device that is served, or its parameters.
//!
//! Another scheduler is an online reconfiguration: requests in flight finish, the stack is switched, held
//! requests proceed in the new one. A parameter is a number that queues read, and takes effect from their
//! next turn on.

use crate::change::ChangeError;
use crate::device::{Composition, Device};
use crate::host::{Host, HostError};
use crate::spec::{parse_scheduler, scheduler_of, with_scheduler};
use layers::scheduler::Policy;
use std::sync::Arc;

impl Host {
    /// Sets the scheduler. `text`: `none`, or a scheduler with parameters.
    pub(crate) async fn set_scheduler(&self, device: &Arc<Device>, text: &str) -> Result<(), HostError> {
        let wanted = parse_scheduler(text).map_err(|error| ChangeError::Scheduler(error.to_string()))?;
        let composition = device.composition();
        let make = move || {
            let layers = with_scheduler(&composition.layers, wanted);
            let tree = composition.tree.with_scheduler(wanted.as_ref())?;
            Ok(Ok(Arc::new(Composition {
                stack: composition.stack.clone(),
                layers,
                tree,
                table: composition.table.clone(),
            })))
        };
        let result = self.exchange(device, make).await;
        self.finish_exchange(device, result.is_ok());
        result
    }

    /// Sets a parameter of the present scheduler.
    pub(crate) fn set_parameter(device: &Device, name: &str, value: &str) -> Result<(), ChangeError> {
        let composition = device.composition();
        let (Some(scheduler), Some(mut choice)) =
            (composition.tree.scheduler(), scheduler_of(&composition.layers))
        else {
            return Err(ChangeError::NoScheduler(name.to_owned()));
        };
        choice.set(name, value).map_err(|error| ChangeError::Scheduler(error.to_string()))?;
        scheduler.set(&choice);
        // The description, as it would be typed now.
        let layers = with_scheduler(&composition.layers, Some(choice));
        let (stack, tree, table) =
            (composition.stack.clone(), composition.tree.clone(), composition.table.clone());
        device.set_composition(Arc::new(Composition { stack, layers, tree, table }));
        Ok(())
    }
}

/// Lists the schedulers as the kernel's `queue/scheduler` does: the present one in brackets.
pub(crate) fn list(device: &Device) -> String {
    let used = device.composition().tree.scheduler().map(|scheduler| scheduler.choice().policy);
    let names = std::iter::once(None).chain(Policy::ALL.map(Some));
    let names = names.map(|policy| {
        let name = policy.map_or("none", Policy::name);
        if policy == used { format!("[{name}]") } else { name.to_owned() }
    });
    names.collect::<Vec<_>>().join(" ")
}
