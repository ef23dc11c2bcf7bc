//! Online reconfiguration on one reactor: freeze, drain, prepare, switch, thaw
//! ([ADR 14](../../../../docs/adr/0014-live-change.md)).
//!
//! The control plane drives it, one change of a device at a time, and takes the next step only when all
//! reactors have answered the one before. While a device is switched, none of its requests is in flight on
//! any thread.
//!
//! *Invariant:* a prepared stack gets no request and no turn before the switch, so it has no socket and no
//! timer, and can be dropped. The switch cannot fail, and happens only after every reactor has prepared its
//! part.

use super::{Hosted, Message, State};
use crate::device::{BuiltNodes, Composition, Device, DeviceError, RingResources};
use crate::observe::slow::{QueueLocation, QueueRequests};
use exports::nbd::DeviceFacts;
use queue::{Nanos, Prepared, Queue, QueueId, Ring, TimedOut};
use ring::KernelRing;
use std::sync::Arc;
use tokio::sync::oneshot;

/// A step of a reconfiguration, sent as a message.
pub(crate) enum Step {
    /// Hold new requests; answered when none is in flight. Nodes keep their connections.
    Freeze(oneshot::Sender<()>),
    /// Close the sockets and cancel the timers of the nodes of frozen queues; answered when that is done. A
    /// node that gets a request afterwards opens new ones.
    Close(oneshot::Sender<()>),
    /// Build stacks for this composition of the device, beside those in use.
    Prepare(Arc<Composition>, oneshot::Sender<Result<(), DeviceError>>),
    /// End the change: switch to the prepared stacks, or drop them. Unless the device is suspended, held
    /// requests proceed.
    Finish {
        /// Switch to the prepared stacks.
        switch: bool,
    },
}

/// Reconfigurations in progress on a reactor.
#[derive(Default)]
pub(super) struct Reconfiguration {
    /// Steps to be answered when all queues of a device have completed them.
    pending: Vec<PendingStep>,
    /// New clients of devices that are being changed.
    pub(super) deferred: Vec<Message>,
}

/// A step that is answered later.
struct PendingStep {
    device: Arc<Device>,
    /// Whether the nodes are to be closed, too; otherwise the queues only have to be drained.
    close: bool,
    done: oneshot::Sender<()>,
}

/// The nodes and resources of a queue after the change.
pub(super) struct PreparedQueue {
    stack: Prepared<KernelRing>,
    resources: RingResources,
    facts: DeviceFacts,
}

impl State {
    pub(super) fn step(&mut self, device: &Arc<Device>, step: Step) {
        match step {
            Step::Freeze(drained) => {
                for hosted in self.hosted.iter().filter(|hosted| Arc::ptr_eq(&hosted.device, device)) {
                    self.queues.touch(hosted.handle.queue).freeze();
                }
                self.reconfiguration.pending.push(PendingStep {
                    device: device.clone(),
                    close: false,
                    done: drained,
                });
            }
            Step::Close(done) => {
                self.reconfiguration.pending.push(PendingStep { device: device.clone(), close: true, done });
            }
            Step::Prepare(composition, done) => {
                let result =
                    self.positions(device).try_for_each(|position| self.prepare(position, &composition));
                // A composition that is refused is closed when the control plane drops it, not later.
                drop(composition);
                // The receiver is gone only if the process is ending.
                let _ = done.send(result);
            }
            Step::Finish { switch: keep } => {
                self.reconfiguration.pending.retain(|pending| !Arc::ptr_eq(&pending.device, device));
                self.positions(device).for_each(|position| self.finish(position, keep));
                for message in std::mem::take(&mut self.reconfiguration.deferred) {
                    match self.must_wait(&message) {
                        true => self.reconfiguration.deferred.push(message),
                        false => self.take(message),
                    }
                }
            }
        }
    }

    pub(super) fn positions(&self, device: &Arc<Device>) -> impl Iterator<Item = usize> + use<> {
        let of_it = |&position: &usize| Arc::ptr_eq(&self.hosted[position].device, device);
        (0..self.hosted.len()).filter(of_it).collect::<Vec<_>>().into_iter()
    }

    /// Returns whether a message adds a client to a device that is being changed: it is deferred.
    pub(super) fn must_wait(&self, message: &Message) -> bool {
        match message {
            Message::Attach(device, _) | Message::AttachAlone(device, _, _) => device.is_changing(),
            _ => false,
        }
    }

    /// Answers the steps whose queues are drained, or drained and closed.
    pub(super) fn answer_pending(&mut self) {
        if self.reconfiguration.pending.is_empty() {
            return;
        }
        let (hosted, queues, ring) = (&self.hosted, &mut self.queues, &mut self.ring);
        let mut is_complete = |pending: &mut PendingStep| {
            let of_it = |hosted: &&Hosted| Arc::ptr_eq(&hosted.device, &pending.device);
            hosted.iter().filter(of_it).all(|hosted| {
                let queue = queues.get_mut(hosted.handle.queue);
                queue.is_drained() && (!pending.close || queue.close(ring))
            })
        };
        for pending in self.reconfiguration.pending.extract_if(.., |pending| is_complete(pending)) {
            // A dropped receiver means that the change was given up.
            let _ = pending.done.send(());
        }
    }

    fn prepare(&mut self, position: usize, composition: &Composition) -> Result<(), DeviceError> {
        let hosted = &mut self.hosted[position];
        debug_assert!(hosted.next.is_none(), "one change of a device at a time");
        let (id, depth) = (hosted.handle.queue, hosted.handle.depth);
        let waker = self.waker_of(id);
        let BuiltNodes { stack, facts, resources } =
            composition.tree.build_nodes(&mut self.ring, depth, waker)?;
        match self.queues.get_mut(id).prepare(stack) {
            Ok(stack) => {
                self.hosted[position].next = Some(PreparedQueue { stack, resources, facts });
                Ok(())
            }
            Err(error) => {
                resources.release(&mut self.ring);
                Err(error.into())
            }
        }
    }

    fn finish(&mut self, position: usize, keep: bool) {
        let hosted = &mut self.hosted[position];
        let id = hosted.handle.queue;
        if let Some(PreparedQueue { stack, resources, facts }) = hosted.next.take() {
            let unused = if keep {
                let device = &hosted.device;
                drop(self.queues.get_mut(id).switch_to(stack, |node| device.is_node_unchanged(node)));
                hosted.handle.facts = facts;
                std::mem::replace(&mut hosted.resources, resources)
            } else {
                drop(stack);
                resources
            };
            unused.release(&mut self.ring);
        }
        let (facts, size) = (hosted.handle.facts, hosted.device.size());
        self.refresh(position);
        let hosted = &self.hosted[position];
        self.fronts.update_queue(id, facts, size);
        if !hosted.device.is_io_suspended() {
            self.queues.touch(id).thaw(size, &mut self.ring);
        }
    }

    /// Returns the requests in flight of a device, by queue. They are formatted elsewhere: there may be
    /// thousands, and other devices wait.
    pub(super) fn in_flight(&mut self, device: &Arc<Device>) -> Vec<QueueRequests> {
        let now = self.ring.now();
        let positions = self.positions(device);
        let of_queue = |position: usize| {
            let hosted = &self.hosted[position];
            let found = self.queues.get_mut(hosted.handle.queue).list_in_flight(now);
            QueueRequests { queue: hosted.number_in_device(), found }
        };
        positions.map(of_queue).collect()
    }
}

impl Hosted {
    /// Number of the queue among those of its device, as in `show`.
    fn number_in_device(&self) -> usize {
        let queues = self.device.queues();
        queues.iter().position(|queue| Arc::ptr_eq(queue, &self.handle.counters)).unwrap_or_default()
    }
}

/// Counts requests of a queue that timed out, and logs them.
#[cold]
pub(super) fn log_timed_out(hosted: &[Hosted], reactor: usize, id: QueueId, found: &TimedOut, now: Nanos) {
    if let Some(hosted) = hosted.iter().find(|hosted| hosted.handle.queue == id) {
        let (device, nodes) = (&hosted.device.name(), &hosted.device.nodes());
        let at = QueueLocation { device, nodes, reactor, queue: hosted.number_in_device() };
        hosted.device.timeouts.log(&at, found, now);
    }
}

/// Logs slow requests of a queue, if any.
pub(super) fn log_slow(queue: &mut Queue<KernelRing>, hosted: &[Hosted], reactor: usize, now: Nanos) {
    let mut found = Vec::new();
    let missed = queue.take_slow(|slow| found.push(slow));
    if found.is_empty() {
        return;
    }
    if let Some(hosted) = hosted.iter().find(|hosted| hosted.handle.queue == queue.id()) {
        let (device, nodes) = (&hosted.device.name(), &hosted.device.nodes());
        let at = QueueLocation { device, nodes, reactor, queue: hosted.number_in_device() };
        hosted.device.slow.log(&at, &found, missed, now);
    }
}
