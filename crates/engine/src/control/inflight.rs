//! Lists of requests in flight, and log lines for slow requests that were left out.

use crate::device::Device;
use crate::host::Host;
use crate::observe::slow::{LEFT_OUT, QueueRequests, log_suppressed, name_of};
use queue::InFlightState;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Most requests of one queue that are listed: all that a host can have in flight there. Children, which are
/// younger, come last.
const REQUESTS_MAX: usize = 4096;
/// Longest time a reactor may take to list its requests in flight.
const ANSWER_TIME: Duration = Duration::from_secs(3);

/// Logs how many slow requests were left out of the log, until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    loop {
        LEFT_OUT.notified().await;
        while host.devices().iter().any(|device| device.slow.has_left_out()) {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for device in host.devices() {
                if let Some(suppressed) = device.slow.overdue(ring::clock()) {
                    log_suppressed(&device.name(), suppressed);
                }
            }
        }
    }
}

/// A request in flight.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InFlight {
    /// Name of its device.
    pub device: String,
    /// Number of its hardware queue, as in `show`.
    pub queue: usize,
    /// Number of its reactor.
    pub reactor: usize,
    /// Tag of the request.
    pub tag: u16,
    /// Tag of the request that it is a child or a copy of.
    pub parent: Option<u16>,
    /// `read`, `write`, ….
    pub op: String,
    /// First sector.
    pub sector: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The node that has it, by name and number; none: before the first one.
    pub node: Option<String>,
    /// `held` by a node, `parked` (a node had no room; it is offered again) or `waiting` (for the device to
    /// be resumed).
    pub state: String,
    /// Age in nanoseconds.
    pub age_ns: u64,
}

/// The requests in flight of a device.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InFlightList {
    /// By queue, oldest first.
    pub requests: Vec<InFlight>,
    /// Number of requests that are not listed.
    pub more: usize,
    /// Reactors that did not answer: they are blocked.
    pub silent: Vec<usize>,
}

impl InFlightList {
    fn add(&mut self, device: &str, nodes: &[(u8, &'static str)], reactor: usize, of_it: QueueRequests) {
        let QueueRequests { queue, mut found } = of_it;
        found.sort_by_key(|request| std::cmp::Reverse(request.age_ns));
        self.more += found.len().saturating_sub(REQUESTS_MAX);
        found.truncate(REQUESTS_MAX);
        self.requests.extend(found.into_iter().map(|request| {
            InFlight {
                device: device.to_owned(),
                queue,
                reactor,
                tag: request.tag.0,
                parent: request.parent.map(|parent| parent.0),
                op: request.req.op.name().to_owned(),
                sector: request.req.offset.0 >> 9,
                bytes: request.req.len.0,
                node: request.node.map(|node| name_of(nodes, node)),
                state: match request.state {
                    InFlightState::Waiting => "waiting",
                    InFlightState::Held => "held",
                    InFlightState::Parked => "parked",
                }
                .to_owned(),
                age_ns: request.age_ns,
            }
        }));
    }
}

impl Host {
    /// Lists the requests in flight of a device. Takes three seconds at most.
    pub async fn in_flight(&self, device: &Arc<Device>) -> InFlightList {
        let answers: Vec<_> =
            self.reactors().iter().map(|reactor| reactor.in_flight(device.clone())).collect();
        let mut list = InFlightList::default();
        let (name, nodes) = (device.name().to_string(), device.nodes());
        let until = tokio::time::Instant::now() + ANSWER_TIME;
        for (number, answer) in answers.into_iter().enumerate() {
            match tokio::time::timeout_at(until, answer).await {
                Ok(Ok(queues)) => {
                    queues.into_iter().for_each(|of_it| list.add(&name, &nodes, number, of_it));
                }
                // A reactor that has ended has none.
                Ok(Err(_)) => {}
                Err(_) => list.silent.push(number),
            }
        }
        list
    }

    /// Applies the device's present limits for slow requests and timeouts to its queues.
    pub(crate) async fn refresh_queues(&self, device: &Arc<Device>) {
        let pending: Vec<_> = self.reactors().iter().map(|reactor| reactor.refresh(device.clone())).collect();
        for done in pending {
            // A reactor that has ended has no queue of it.
            let _ = done.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Bytes, Op, Request, Tag};
    use queue::{InFlight, NodeId};

    #[test]
    fn the_oldest_requests_of_each_queue_are_listed_and_others_counted() {
        let under_way = |tag: u16| InFlight {
            tag: Tag(tag),
            parent: (tag == 1).then_some(Tag(7)),
            req: Request::new(Op::Write, Bytes(4096), Bytes(512)),
            state: InFlightState::Parked,
            node: Some(NodeId(2)),
            age_ns: tag.into(),
        };
        let mut list = InFlightList::default();
        let found = (0..REQUESTS_MAX as u16 + 3).map(under_way).collect();
        list.add("disk", &[(0, "split"), (1, "?"), (2, "file")], 1, QueueRequests { queue: 3, found });
        list.add("disk", &[(0, "null")], 0, QueueRequests { queue: 0, found: vec![under_way(1)] });
        let (first, last) = (&list.requests[0], &list.requests[REQUESTS_MAX]);
        assert_eq!((list.requests.len(), list.more), (REQUESTS_MAX + 1, 3));
        assert_eq!((first.age_ns, list.requests[REQUESTS_MAX - 1].age_ns), (4098, 3));
        assert_eq!((first.queue, first.reactor, first.node.as_deref()), (3, 1, Some("file:2")));
        assert_eq!((first.op.as_str(), first.sector, first.state.as_str()), ("write", 8, "parked"));
        assert_eq!((last.parent, last.queue, last.node.as_deref()), (Some(7), 0, Some("?:2")));
    }
}
