//! Another scheduler for a device that is served, and other parameters for the one that it has.
//!
//! Another one is a live change like others: requests that are under way end, the stack is swapped, what came meanwhile
//! goes on in the new one. A parameter is a number that queues read, and is heeded from their next turn on.

use crate::change::ChangeError;
use crate::device::{Device, Form};
use crate::host::{Host, HostError};
use crate::spec::{parse_scheduler, scheduler_of, with_scheduler};
use layers::scheduler::Policy;
use std::sync::Arc;

impl Host {
    /// `text`: `none`, or a scheduler with parameters.
    pub(crate) async fn set_scheduler(&self, device: &Arc<Device>, text: &str) -> Result<(), HostError> {
        let wanted = parse_scheduler(text).map_err(|error| ChangeError::Scheduler(error.to_string()))?;
        let form = device.form();
        let make = move || {
            let layers = with_scheduler(&form.layers, wanted);
            let tree = form.tree.with_scheduler(wanted.as_ref())?;
            Ok(Ok(Arc::new(Form { stack: form.stack.clone(), layers, tree, table: form.table.clone() })))
        };
        let result = self.exchange(device, make).await;
        self.let_go(device, result.is_ok());
        result
    }

    /// Give a parameter of the scheduler in use another value.
    pub(crate) fn set_parameter(device: &Device, name: &str, value: &str) -> Result<(), ChangeError> {
        let form = device.form();
        let (Some(scheduler), Some(mut choice)) = (form.tree.scheduler(), scheduler_of(&form.layers)) else {
            return Err(ChangeError::NoScheduler(name.to_owned()));
        };
        choice.set(name, value).map_err(|error| ChangeError::Scheduler(error.to_string()))?;
        scheduler.set(&choice);
        // As it would be typed now.
        let layers = with_scheduler(&form.layers, Some(choice));
        let (stack, tree, table) = (form.stack.clone(), form.tree.clone(), form.table.clone());
        device.set_form(Arc::new(Form { stack, layers, tree, table }));
        Ok(())
    }
}

/// What the kernel's `queue/scheduler` says of a device: all that there are, the one in use in brackets.
pub(crate) fn shown(device: &Device) -> String {
    let used = device.form().tree.scheduler().map(|scheduler| scheduler.choice().policy);
    let names = std::iter::once(None).chain(Policy::ALL.map(Some));
    let names = names.map(|policy| {
        let name = policy.map_or("none", Policy::name);
        if policy == used { format!("[{name}]") } else { name.to_owned() }
    });
    names.collect::<Vec<_>>().join(" ")
}
