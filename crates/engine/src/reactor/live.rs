//! Live change on one reactor: freeze, drain, prepare, switch, thaw ([ADR 14](../../../../docs/adr/0014-live-change.md)).
//!
//! The control plane drives it, one change of a device at a time, and goes to the next step only when all
//! reactors have answered for the one before. While a device changes, nothing of it moves on any thread.
//!
//! *Invariant:* a stack that was prepared gets no request and no turn before the switch, so it has no socket and no alarm,
//! and can be dropped. The switch cannot fail, and happens only when every reactor has prepared its part.

use super::{Hosted, Mail, State};
use crate::device::{Device, DeviceError, Form, Held, Mounted};
use crate::slow::{self, OfQueue};
use exports::nbd::DeviceFacts;
use queue::{Nanos, Prepared, Queue, QueueId, Ring, TimedOut};
use ring::KernelRing;
use std::sync::Arc;
use tokio::sync::oneshot;

/// A step of a live change, by mail.
pub(crate) enum Step {
    /// Hold back requests from now on; the answer comes when none is under way. Nodes keep their connections.
    Freeze(oneshot::Sender<()>),
    /// Have the nodes of the frozen queues close their sockets and cancel their alarms; the answer comes when that is done.
    /// A node that gets a request afterwards opens new ones.
    Close(oneshot::Sender<()>),
    /// Build stacks for this form of the device, beside those in use.
    Prepare(Arc<Form>, oneshot::Sender<Result<(), DeviceError>>),
    /// The change is over: switch to the stacks that were prepared, or drop them. Unless the device is suspended, requests
    /// that were held back go on.
    Settle {
        /// Switch to them.
        keep: bool,
    },
}

/// What of changes is under way on a reactor.
#[derive(Default)]
pub(super) struct Live {
    /// Steps that are answered when all queues of a device have got there.
    awaited: Vec<Awaited>,
    /// New clients of devices that are being changed.
    pub(super) late: Vec<Mail>,
}

/// A step that is answered later.
struct Awaited {
    device: Arc<Device>,
    /// The nodes are to be closed, too; otherwise the queues only have to be drained.
    close: bool,
    done: oneshot::Sender<()>,
}

/// What a queue will have after a change.
pub(super) struct Next {
    stack: Prepared<KernelRing>,
    held: Held,
    facts: DeviceFacts,
}

impl State {
    pub(super) fn step(&mut self, device: &Arc<Device>, step: Step) {
        match step {
            Step::Freeze(drained) => {
                for hosted in self.hosted.iter().filter(|hosted| Arc::ptr_eq(&hosted.device, device)) {
                    self.queues.touch(hosted.lane.queue).freeze();
                }
                self.live.awaited.push(Awaited { device: device.clone(), close: false, done: drained });
            }
            Step::Close(done) => {
                self.live.awaited.push(Awaited { device: device.clone(), close: true, done });
            }
            Step::Prepare(form, done) => {
                let result = self.positions(device).try_for_each(|position| self.prepare(position, &form));
                // A form that is refused is closed when the control plane drops it, not some time later.
                drop(form);
                // A control plane that hangs up meanwhile ends with the process.
                let _ = done.send(result);
            }
            Step::Settle { keep } => {
                self.live.awaited.retain(|awaited| !Arc::ptr_eq(&awaited.device, device));
                self.positions(device).for_each(|position| self.settle(position, keep));
                for mail in std::mem::take(&mut self.live.late) {
                    match self.is_early(&mail) {
                        true => self.live.late.push(mail),
                        false => self.take(mail),
                    }
                }
            }
        }
    }

    pub(super) fn positions(&self, device: &Arc<Device>) -> impl Iterator<Item = usize> + use<> {
        let of_it = |&position: &usize| Arc::ptr_eq(&self.hosted[position].device, device);
        (0..self.hosted.len()).filter(of_it).collect::<Vec<_>>().into_iter()
    }

    /// A new client of a device that is being changed waits until that is over.
    pub(super) fn is_early(&self, mail: &Mail) -> bool {
        match mail {
            Mail::Attach(device, _) | Mail::AttachAlone(device, _, _) => device.is_changing(),
            _ => false,
        }
    }

    /// Answer the steps whose queues are drained, or drained and closed.
    pub(super) fn answer_awaited(&mut self) {
        if self.live.awaited.is_empty() {
            return;
        }
        let (hosted, queues, ring) = (&self.hosted, &mut self.queues, &mut self.ring);
        let mut is_there = |awaited: &mut Awaited| {
            let of_it = |hosted: &&Hosted| Arc::ptr_eq(&hosted.device, &awaited.device);
            hosted.iter().filter(of_it).all(|hosted| {
                let queue = queues.get_mut(hosted.lane.queue);
                queue.is_drained() && (!awaited.close || queue.close(ring))
            })
        };
        for awaited in self.live.awaited.extract_if(.., |awaited| is_there(awaited)) {
            // A control plane that waits no longer has given the change up.
            let _ = awaited.done.send(());
        }
    }

    fn prepare(&mut self, position: usize, form: &Form) -> Result<(), DeviceError> {
        let hosted = &mut self.hosted[position];
        debug_assert!(hosted.next.is_none(), "one change of a device at a time");
        let (id, depth) = (hosted.lane.queue, hosted.lane.depth);
        let nudge = self.nudge(id);
        let Mounted { stack, facts, held } = form.tree.mount(&mut self.ring, depth, nudge)?;
        match self.queues.get_mut(id).prepare(stack) {
            Ok(stack) => {
                self.hosted[position].next = Some(Next { stack, held, facts });
                Ok(())
            }
            Err(error) => {
                held.release(&mut self.ring);
                Err(error.into())
            }
        }
    }

    fn settle(&mut self, position: usize, keep: bool) {
        let hosted = &mut self.hosted[position];
        let id = hosted.lane.queue;
        if let Some(Next { stack, held, facts }) = hosted.next.take() {
            let unused = if keep {
                let device = &hosted.device;
                drop(self.queues.get_mut(id).switch_to(stack, |node| device.is_as_before(node)));
                hosted.lane.facts = facts;
                std::mem::replace(&mut hosted.held, held)
            } else {
                drop(stack);
                held
            };
            unused.release(&mut self.ring);
        }
        let (facts, size) = (hosted.lane.facts, hosted.device.size());
        self.listen(position);
        let hosted = &self.hosted[position];
        self.fronts.refit_lane(id, facts, size);
        if !hosted.device.is_held() {
            self.queues.touch(id).thaw(size, &mut self.ring);
        }
    }

    /// What is under way of a device, by queue. In words it is put elsewhere: there may be thousands, and others wait.
    pub(super) fn under_way(&mut self, device: &Arc<Device>) -> Vec<OfQueue> {
        let now = self.ring.now();
        let positions = self.positions(device);
        let of_queue = |position: usize| {
            let hosted = &self.hosted[position];
            let found = self.queues.get_mut(hosted.lane.queue).under_way(now);
            OfQueue { queue: hosted.shown_as(), found }
        };
        positions.map(of_queue).collect()
    }
}

impl Hosted {
    /// Its number among the queues of its device, as `show` has them.
    fn shown_as(&self) -> usize {
        let lanes = self.device.lanes();
        lanes.iter().position(|lane| Arc::ptr_eq(lane, &self.lane.shown)).unwrap_or_default()
    }
}

/// Counts requests of a queue that timed out, and reports them in the log.
#[cold]
pub(super) fn tell_timed_out(hosted: &[Hosted], reactor: usize, id: QueueId, found: &TimedOut, now: Nanos) {
    if let Some(hosted) = hosted.iter().find(|hosted| hosted.lane.queue == id) {
        hosted.device.timeouts.tell(&hosted.device, reactor, hosted.shown_as(), found, now);
    }
}

/// Say which requests of a queue were slow, if any.
pub(super) fn tell_slow(queue: &mut Queue<KernelRing>, hosted: &[Hosted], reactor: usize, now: Nanos) {
    let mut found = Vec::new();
    let missed = queue.take_slow(|slow| found.push(slow));
    if found.is_empty() {
        return;
    }
    if let Some(hosted) = hosted.iter().find(|hosted| hosted.lane.queue == queue.id()) {
        slow::tell(&hosted.device, reactor, hosted.shown_as(), &found, missed, now);
    }
}
