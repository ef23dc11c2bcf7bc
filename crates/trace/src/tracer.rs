//! The probe of one queue: converts probe points of requests to records of a buffer.
//!
//! Runs on the queue's thread. Which nodes of the stack appear as separate devices is decided when the tracer
//! is created ([`NodeRole`]): layers that do not remap are one device with the nodes below them, like a
//! request queue and its driver in the kernel; below a layer that remaps requests another device begins, to
//! which they are remapped, queued there and completed there, like bios by device-mapper.

use crate::{Filter, Kind, Record, Step, TraceBuffer};
use block::Status;
use queue::{CommandEvent, CommandPoint, Event, Nanos, Point, Probe};
use std::sync::Arc;

/// The role of a node of the stack in a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeRole {
    /// Number of its device: 0, or the number of the node at its top.
    pub device: u8,
    /// Number of the device above, if this node is the top of its own device.
    pub below: Option<u8>,
    /// Whether the node is the lowest one of its device, and no backend.
    pub ends: bool,
    /// Whether a scheduler of its device is above the node: that one writes the `Get` and `Insert` events.
    pub scheduled: bool,
    /// Whether the node is a scheduler whose device has no backend, so that the node issues the requests.
    pub issues: bool,
    /// Offset of the node on its device, in bytes: requests to a target are relative to its start in the
    /// table.
    pub shift: u64,
}

impl NodeRole {
    /// The role of a node of the traced device itself, if that device ends with a backend.
    pub const TOP: NodeRole =
        NodeRole { device: 0, below: None, ends: false, scheduled: false, issues: false, shift: 0 };
}

/// Configuration of a tracer.
pub struct TracerConfig {
    /// Filter of events.
    pub filter: Arc<Filter>,
    /// The buffer to write to.
    pub buffer: Arc<TraceBuffer>,
    /// Role of each node, by node number.
    pub roles: Vec<NodeRole>,
    /// Number of front-end tags; tags from here on belong to children.
    pub depth: u16,
    /// Whether to write a `Queue` record for each child, for tools that do not support splits.
    pub queue_children: bool,
    /// The clock to read for each event; `None`: all events of a turn of the queue have the time of the turn.
    pub clock: Option<fn() -> Nanos>,
}

/// The tracing probe of one queue.
pub struct Tracer {
    config: TracerConfig,
    /// Last offset of each request on its device, by tag, in bytes.
    offsets: Vec<u64>,
}

impl Tracer {
    /// Creates the tracer of a queue.
    pub fn new(config: TracerConfig) -> Tracer {
        Tracer { offsets: vec![0; usize::from(config.depth)], config }
    }

    fn put(&self, wanted: u64, record: Record) {
        if wanted >> record.kind as u64 & 1 != 0 {
            self.config.buffer.push(record.to_words());
        }
    }

    /// Sets the current offset of the request with that tag. Returns the previous one.
    fn moved(&mut self, tag: u16, offset: u64) -> u64 {
        let tag = usize::from(tag);
        if tag >= self.offsets.len() {
            self.offsets.resize(tag + 1, 0);
        }
        std::mem::replace(&mut self.offsets[tag], offset)
    }

    /// Writes that a request entered a node or left it.
    #[cold]
    fn step(&self, wanted: u64, point: &Point, record: Record) {
        let node = point.node.0;
        let step = match point.event {
            Event::Entered | Event::Issued => Step::Enter { node, parent: point.parent.map(|tag| tag.0) },
            Event::Completed { status } | Event::Left { status } => {
                Step::Leave { node, errno: completed(record, status).value as u16 }
            }
            _ => return,
        };
        self.put(wanted, Record { kind: Kind::Layer, value: step.to_value(), ..record });
    }

    /// Handles the arrival of a request at a node: writes additional events if the node belongs to another
    /// device.
    #[cold]
    fn arrive(&mut self, wanted: u64, role: NodeRole, depth: u8, record: Record) {
        let was = self.moved(record.tag, record.offset);
        if let Some(above) = role.below {
            if depth > 1 {
                let (kind, value) = (Kind::Remap, was >> 9);
                self.put(wanted, Record { kind, value, from: above, ..record });
            }
            self.put(wanted, Record { kind: Kind::Queue, ..record });
        } else if depth == 1
            && record.tag >= self.config.depth
            && self.config.queue_children
            && !role.scheduled
        {
            self.put(wanted, Record { kind: Kind::Queue, ..record });
        }
    }
}

impl Probe for Tracer {
    fn point(&mut self, at: Nanos, mut point: Point) {
        let role = self.config.roles.get(usize::from(point.node.0)).copied().unwrap_or(NodeRole::TOP);
        // A flush has no offset.
        let shift = if point.len.0 > 0 { role.shift } else { 0 };
        point.offset.0 += shift;
        let wanted = self.config.filter.kinds(point.op, point.offset.0, point.len.0);
        if wanted == 0 {
            // A request outside the filter here may be remapped to a range within it, and is then traced with
            // its previous offset.
            if self.config.roles.len() > 1 && matches!(point.event, Event::Entered | Event::Issued) {
                self.moved(point.tag.0, point.offset.0);
            }
            return;
        }
        let time = self.config.clock.map_or(at, |clock| clock());
        let record = Record::queued(time.0, &point, role.device);
        if wanted >> Kind::Layer as u64 & 1 != 0 {
            self.step(wanted, &point, record);
        }
        match point.event {
            Event::Queued => self.put(wanted, record),
            Event::Split { rest } => {
                self.put(wanted, Record { kind: Kind::Split, value: (rest.0 + shift) >> 9, ..record });
            }
            Event::Entered | Event::Issued => {
                if self.config.roles.len() > 1 {
                    self.arrive(wanted, role, point.depth, record);
                }
                if point.event == Event::Issued {
                    let steps = wanted >> Kind::Get as u64 & if role.scheduled { 4 } else { 7 };
                    if steps != 0 {
                        self.config
                            .buffer
                            .push(Record { kind: Kind::Start, value: steps, ..record }.to_words());
                    }
                }
            }
            Event::Plugged => self.put(wanted, Record { kind: Kind::Plug, offset: 0, len: 0, ..record }),
            Event::Unplugged { count } => {
                let kind = Kind::Unplug;
                self.put(wanted, Record { kind, offset: 0, len: 0, value: count.into(), ..record });
            }
            Event::Merged { front } => {
                let kind = if front { Kind::FrontMerge } else { Kind::BackMerge };
                self.put(wanted, Record { kind, ..record });
            }
            Event::Got => self.put(wanted, Record { kind: Kind::Get, ..record }),
            Event::Inserted => self.put(wanted, Record { kind: Kind::Insert, ..record }),
            Event::Dispatched if role.issues => self.put(wanted, Record { kind: Kind::Issue, ..record }),
            Event::Dispatched => {}
            Event::Completed { status } => self.put(wanted, completed(record, status)),
            Event::Left { status } if role.ends => self.put(wanted, completed(record, status)),
            Event::Left { .. } => {}
            Event::Requeued => self.put(wanted, Record { kind: Kind::Requeue, ..record }),
            Event::Done { status } => {
                self.put(wanted, Record { kind: Kind::Done, ..completed(record, status) });
            }
        }
    }

    fn wants_commands(&self) -> bool {
        true
    }

    fn command(&mut self, at: Nanos, point: &CommandPoint) {
        let filter = &self.config.filter;
        let (passes, begins) = match point.event {
            CommandEvent::Begun => (filter.passes_commands(), false),
            // If the filter selects requests, a command is written with each of its selected requests.
            CommandEvent::Request { op, offset, len, is_foreign, .. } => {
                let wanted = filter.kinds(op, offset.0, len.0) >> Kind::Command as u64 & 1 != 0;
                (wanted, is_foreign || !filter.passes_commands())
            }
            CommandEvent::Ended { .. } => (filter.passes_command_ends(), false),
        };
        if passes {
            let time = self.config.clock.map_or(at, |clock| clock());
            crate::command::encode(time.0, point, begins, |record| {
                self.config.buffer.push(record.to_words())
            });
        }
    }
}

fn completed(record: Record, status: Status) -> Record {
    Record { kind: Kind::Complete, value: status.errno() as u64, ..record }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FilterText;
    use block::{Bytes, Op, Request, Tag};
    use queue::NodeId;

    fn tracer(roles: Vec<NodeRole>, queue_children: bool) -> (Tracer, Arc<TraceBuffer>) {
        tracer_of(roles, queue_children, &FilterText::default())
    }

    fn tracer_of(
        roles: Vec<NodeRole>,
        queue_children: bool,
        text: &FilterText,
    ) -> (Tracer, Arc<TraceBuffer>) {
        let buffer = Arc::new(TraceBuffer::new(64));
        let filter = Arc::new(Filter::new(text).unwrap());
        let config_buffer = buffer.clone();
        let config =
            TracerConfig { filter, buffer: config_buffer, roles, depth: 4, queue_children, clock: None };
        (Tracer::new(config), buffer)
    }

    fn recorded(buffer: &TraceBuffer) -> Vec<(Kind, u8, u64, u64)> {
        let mut recorded = Vec::new();
        buffer.drain_records(64, |record| {
            let start = record.events();
            recorded.extend(start.map(|r| (r.kind, r.device, r.offset >> 9, r.value)));
        });
        recorded
    }

    fn point(tracer: &mut Tracer, tag: u16, node: u8, depth: u8, sector: u64, event: Event) {
        let req = Request::new(Op::Write, Bytes(sector << 9), Bytes(4096));
        tracer.point(Nanos(5), Point::new(Tag(tag), NodeId(node), depth, &req, event));
    }

    const WHOLE: NodeRole = NodeRole::TOP;

    #[test]
    fn a_single_backend_produces_the_kernels_five_events() {
        let (mut tracer, buffer) = tracer(vec![WHOLE], false);
        point(&mut tracer, 0, 0, 0, 8, Event::Queued);
        point(&mut tracer, 0, 0, 1, 8, Event::Issued);
        point(&mut tracer, 0, 0, 1, 8, Event::Completed { status: Status::IoError });
        point(&mut tracer, 0, 0, 0, 8, Event::Done { status: Status::IoError });
        let kinds = [Kind::Queue, Kind::Get, Kind::Insert, Kind::Issue, Kind::Complete];
        let recorded = recorded(&buffer);
        assert_eq!(recorded.iter().map(|r| r.0).collect::<Vec<_>>(), kinds);
        assert_eq!(recorded[4].3, 5);
    }

    #[test]
    fn requests_of_a_remapping_layer_are_remapped_queued_and_completed_below() {
        let window = NodeRole { ends: true, ..NodeRole::TOP };
        let file = NodeRole { device: 1, below: Some(0), ..NodeRole::TOP };
        let (mut tracer, buffer) = tracer(vec![window, file], false);
        point(&mut tracer, 0, 0, 0, 8, Event::Queued);
        point(&mut tracer, 0, 0, 1, 8, Event::Entered);
        point(&mut tracer, 0, 1, 2, 2056, Event::Issued);
        point(&mut tracer, 0, 1, 2, 2056, Event::Completed { status: Status::Ok });
        point(&mut tracer, 0, 0, 1, 8, Event::Left { status: Status::Ok });
        let expected = [
            (Kind::Queue, 0, 8, 0),
            (Kind::Remap, 1, 2056, 8),
            (Kind::Queue, 1, 2056, 0),
            (Kind::Get, 1, 2056, 0),
            (Kind::Insert, 1, 2056, 0),
            (Kind::Issue, 1, 2056, 0),
            (Kind::Complete, 1, 2056, 0),
            (Kind::Complete, 0, 8, 0),
        ];
        assert_eq!(recorded(&buffer), expected);
    }

    #[test]
    fn a_target_has_its_offset_in_the_table_and_remaps_once() {
        let target = NodeRole { shift: 64 << 9, ..NodeRole::TOP };
        let file = NodeRole { device: 2, below: Some(0), ..NodeRole::TOP };
        let wanted = FilterText { sectors: "72-79".into(), ..FilterText::default() };
        let (mut tracer, buffer) = tracer_of(vec![WHOLE, target, file], false, &wanted);
        // The point is of the request itself, then of a child of a request split between two targets.
        for (tag, depth) in [(0, 1), (9, 0)] {
            point(&mut tracer, tag, 1, depth + 1, 8, Event::Entered);
            point(&mut tracer, tag, 2, depth + 2, 72, Event::Issued);
            point(&mut tracer, tag, 1, depth + 1, 8, Event::Left { status: Status::Ok });
            // The offset at completion is relative to the table.
            let kinds = [Kind::Queue, Kind::Get, Kind::Insert, Kind::Issue].map(|kind| (kind, 2, 72, 0));
            assert_eq!(recorded(&buffer), [&[(Kind::Remap, 2, 72, 72)], &kinds[..]].concat());
        }
    }

    #[test]
    fn a_remap_into_the_filtered_range_has_the_previous_offset() {
        let roles = vec![
            NodeRole { ends: true, ..NodeRole::TOP },
            NodeRole { device: 1, below: Some(0), ..NodeRole::TOP },
        ];
        let text =
            FilterText { sectors: "2048-4095".into(), actions: "remap".into(), ..FilterText::default() };
        let (mut tracer, buffer) = tracer_of(roles, false, &text);
        for sector in [8, 16] {
            point(&mut tracer, 0, 0, 1, sector, Event::Entered);
            point(&mut tracer, 0, 1, 2, 2048 + sector, Event::Issued);
        }
        assert_eq!(recorded(&buffer), [(Kind::Remap, 1, 2056, 8), (Kind::Remap, 1, 2064, 16)]);
    }

    #[test]
    fn children_are_queued_only_on_request() {
        for queued in [false, true] {
            let (mut tracer, buffer) = tracer(vec![WHOLE, WHOLE], queued);
            point(&mut tracer, 9, 1, 1, 8, Event::Issued);
            let recorded = recorded(&buffer);
            assert_eq!(recorded[0].0, if queued { Kind::Queue } else { Kind::Get });
            assert_eq!(recorded.len(), if queued { 4 } else { 3 });
        }
    }

    #[test]
    fn every_node_is_entered_and_left_and_children_name_their_parent() {
        let text = FilterText { actions: "layer".into(), ..FilterText::default() };
        let (mut tracer, buffer) = tracer_of(vec![WHOLE, WHOLE], false, &text);
        point(&mut tracer, 0, 0, 1, 8, Event::Entered);
        let req = Request::new(Op::Write, Bytes(8 << 9), Bytes(4096));
        let child = Point::new(Tag(9), NodeId(1), 1, &req, Event::Issued);
        tracer.point(Nanos(5), Point { parent: Some(Tag(0)), ..child });
        point(&mut tracer, 9, 1, 1, 8, Event::Completed { status: Status::IoError });
        point(&mut tracer, 0, 0, 1, 8, Event::Left { status: Status::Ok });
        let expected = [
            Step::Enter { node: 0, parent: None },
            Step::Enter { node: 1, parent: Some(0) },
            Step::Leave { node: 1, errno: 5 },
            Step::Leave { node: 0, errno: 0 },
        ];
        let recorded = recorded(&buffer);
        assert!(recorded.iter().all(|(kind, ..)| *kind == Kind::Layer), "{recorded:?}");
        assert_eq!(recorded.iter().map(|record| Step::from_value(record.3)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn below_a_scheduler_a_backend_only_issues() {
        let scheduled = NodeRole { scheduled: true, ..NodeRole::TOP };
        let (mut tracer, buffer) = tracer(vec![WHOLE, scheduled], true);
        point(&mut tracer, 0, 0, 0, 8, Event::Queued);
        point(&mut tracer, 0, 0, 0, 8, Event::Plugged);
        point(&mut tracer, 0, 0, 0, 8, Event::Got);
        point(&mut tracer, 1, 0, 0, 16, Event::Queued);
        point(&mut tracer, 1, 0, 0, 16, Event::Merged { front: false });
        point(&mut tracer, 0, 0, 0, 8, Event::Unplugged { count: 2 });
        point(&mut tracer, 0, 0, 0, 8, Event::Inserted);
        point(&mut tracer, 0, 0, 0, 8, Event::Dispatched);
        // A merged request is issued under another tag, and was queued before.
        point(&mut tracer, 9, 1, 1, 8, Event::Issued);
        point(&mut tracer, 9, 1, 1, 8, Event::Completed { status: Status::Ok });
        let expected = [
            (Kind::Queue, 0, 8, 0),
            (Kind::Plug, 0, 0, 0),
            (Kind::Get, 0, 8, 0),
            (Kind::Queue, 0, 16, 0),
            (Kind::BackMerge, 0, 16, 0),
            (Kind::Unplug, 0, 0, 2),
            (Kind::Insert, 0, 8, 0),
            (Kind::Issue, 0, 8, 0),
            (Kind::Complete, 0, 8, 0),
        ];
        assert_eq!(recorded(&buffer), expected);
    }
}
