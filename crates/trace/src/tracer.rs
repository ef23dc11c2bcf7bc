//! The listener of one queue: from points of requests' lives to records of a lane.
//!
//! Runs on the queue's thread. What is a device of its own to a trace is decided when it is made, for each node of
//! the stack ([`Place`]): layers that leave addresses alone are one device with what stands below them, as a request
//! queue and its driver are to the kernel; below a layer that moves requests begins another device, to which they
//! are remapped, queued there and completed there, as bios are by device-mapper.

use crate::{Filter, Kind, Lane, Record};
use block::Status;
use queue::{Event, Nanos, Point, Probe};
use std::sync::Arc;

/// What a node of the stack is to a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The device that it works on: 0, or the number of the node at whose top it begins.
    pub device: u8,
    /// The device above, where this node is the top of its own; else `None`.
    pub below: Option<u8>,
    /// It is the lowest node of its device, and no backend.
    pub ends: bool,
    /// A scheduler of its device stands above it: requests were got and inserted there.
    pub scheduled: bool,
    /// It is a scheduler whose device has no backend: what goes down is issued by that.
    pub issues: bool,
    /// Where it begins on its device, in bytes: a target of a table counts from there.
    pub shift: u64,
}

impl Place {
    /// On the device that is traced, with a backend at its end.
    pub const TOP: Place =
        Place { device: 0, below: None, ends: false, scheduled: false, issues: false, shift: 0 };
}

/// How a tracer listens.
pub struct TracerConfig {
    /// What it wants to know.
    pub filter: Arc<Filter>,
    /// Where it writes.
    pub lane: Arc<Lane>,
    /// By node number.
    pub places: Vec<Place>,
    /// Tags of front-end requests; those from here on are of children.
    pub depth: u16,
    /// Tell of each child that it was queued, so that tools that know nothing of splits see whole requests.
    pub queue_children: bool,
    /// Look at this clock for each event; `None`: what happens in one turn of the queue's thread has one time.
    pub clock: Option<fn() -> Nanos>,
}

/// The listener.
pub struct Tracer {
    config: TracerConfig,
    /// Where a request last was, by tag.
    offsets: Vec<u64>,
}

impl Tracer {
    /// One for one queue.
    pub fn new(config: TracerConfig) -> Tracer {
        Tracer { offsets: vec![0; usize::from(config.depth)], config }
    }

    fn put(&self, wanted: u64, record: Record) {
        if wanted >> record.kind as u64 & 1 != 0 {
            self.config.lane.push(record.to_words());
        }
    }

    /// Where the request in that slot was last, and is now.
    fn moved(&mut self, tag: u16, offset: u64) -> u64 {
        let tag = usize::from(tag);
        if tag >= self.offsets.len() {
            self.offsets.resize(tag + 1, 0);
        }
        std::mem::replace(&mut self.offsets[tag], offset)
    }

    /// A request comes to a node: what else happens by that, if it comes to another device.
    #[cold]
    fn arrive(&mut self, wanted: u64, place: Place, depth: u8, record: Record) {
        let was = self.moved(record.tag, record.offset);
        if let Some(above) = place.below {
            if depth > 1 {
                let (kind, value) = (Kind::Remap, was >> 9);
                self.put(wanted, Record { kind, value, from: above, ..record });
            }
            self.put(wanted, Record { kind: Kind::Queue, ..record });
        } else if depth == 1
            && record.tag >= self.config.depth
            && self.config.queue_children
            && !place.scheduled
        {
            self.put(wanted, Record { kind: Kind::Queue, ..record });
        }
    }
}

impl Probe for Tracer {
    fn point(&mut self, at: Nanos, mut point: Point) {
        let place = self.config.places.get(usize::from(point.node.0)).copied().unwrap_or(Place::TOP);
        // A flush is nowhere.
        let shift = if point.len.0 > 0 { place.shift } else { 0 };
        point.offset.0 += shift;
        let wanted = self.config.filter.kinds(point.op, point.offset.0, point.len.0);
        if wanted == 0 {
            // What is not wanted here may be where it is moved to, and is told then with where it was.
            if self.config.places.len() > 1 && matches!(point.event, Event::Entered | Event::Issued) {
                self.moved(point.tag.0, point.offset.0);
            }
            return;
        }
        let time = self.config.clock.map_or(at, |clock| clock());
        let record = Record::queued(time.0, &point, place.device);
        match point.event {
            Event::Queued => self.put(wanted, record),
            Event::Split { rest } => {
                self.put(wanted, Record { kind: Kind::Split, value: (rest.0 + shift) >> 9, ..record });
            }
            Event::Entered | Event::Issued => {
                if self.config.places.len() > 1 {
                    self.arrive(wanted, place, point.depth, record);
                }
                if point.event == Event::Issued {
                    let steps = wanted >> Kind::Get as u64 & if place.scheduled { 4 } else { 7 };
                    if steps != 0 {
                        self.config
                            .lane
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
            Event::Dispatched if place.issues => self.put(wanted, Record { kind: Kind::Issue, ..record }),
            Event::Dispatched => {}
            Event::Completed { status } => self.put(wanted, completed(record, status)),
            Event::Left { status } if place.ends => self.put(wanted, completed(record, status)),
            Event::Left { .. } => {}
            Event::Requeued => self.put(wanted, Record { kind: Kind::Requeue, ..record }),
            Event::Done { status } => {
                self.put(wanted, Record { kind: Kind::Done, ..completed(record, status) });
            }
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

    fn tracer(places: Vec<Place>, queue_children: bool) -> (Tracer, Arc<Lane>) {
        tracer_of(places, queue_children, &FilterText::default())
    }

    fn tracer_of(places: Vec<Place>, queue_children: bool, text: &FilterText) -> (Tracer, Arc<Lane>) {
        let lane = Arc::new(Lane::new(64));
        let filter = Arc::new(Filter::new(text).unwrap());
        let lane_of_it = lane.clone();
        let config = TracerConfig { filter, lane: lane_of_it, places, depth: 4, queue_children, clock: None };
        (Tracer::new(config), lane)
    }

    fn told(lane: &Lane) -> Vec<(Kind, u8, u64, u64)> {
        let mut told = Vec::new();
        lane.drain_records(64, |record| {
            let start = record.events();
            told.extend(start.map(|r| (r.kind, r.device, r.offset >> 9, r.value)));
        });
        told
    }

    fn point(tracer: &mut Tracer, tag: u16, node: u8, depth: u8, sector: u64, event: Event) {
        let req = Request::new(Op::Write, Bytes(sector << 9), Bytes(4096));
        tracer.point(Nanos(5), Point::new(Tag(tag), NodeId(node), depth, &req, event));
    }

    const WHOLE: Place = Place::TOP;

    #[test]
    fn a_backend_alone_leaves_the_kernels_five_events() {
        let (mut tracer, lane) = tracer(vec![WHOLE], false);
        point(&mut tracer, 0, 0, 0, 8, Event::Queued);
        point(&mut tracer, 0, 0, 1, 8, Event::Issued);
        point(&mut tracer, 0, 0, 1, 8, Event::Completed { status: Status::IoError });
        point(&mut tracer, 0, 0, 0, 8, Event::Done { status: Status::IoError });
        let kinds = [Kind::Queue, Kind::Get, Kind::Insert, Kind::Issue, Kind::Complete];
        let told = told(&lane);
        assert_eq!(told.iter().map(|r| r.0).collect::<Vec<_>>(), kinds);
        assert_eq!(told[4].3, 5);
    }

    #[test]
    fn what_a_layer_moves_is_remapped_queued_and_completed_below() {
        let window = Place { ends: true, ..Place::TOP };
        let file = Place { device: 1, below: Some(0), ..Place::TOP };
        let (mut tracer, lane) = tracer(vec![window, file], false);
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
        assert_eq!(told(&lane), expected);
    }

    #[test]
    fn a_target_is_at_its_place_of_the_table_and_remaps_once() {
        let target = Place { shift: 64 << 9, ..Place::TOP };
        let file = Place { device: 2, below: Some(0), ..Place::TOP };
        let wanted = FilterText { sectors: "72-79".into(), ..FilterText::default() };
        let (mut tracer, lane) = tracer_of(vec![WHOLE, target, file], false, &wanted);
        // As itself, and as a piece of a request that was cut between two targets.
        for (tag, depth) in [(0, 1), (9, 0)] {
            point(&mut tracer, tag, 1, depth + 1, 8, Event::Entered);
            point(&mut tracer, tag, 2, depth + 2, 72, Event::Issued);
            point(&mut tracer, tag, 1, depth + 1, 8, Event::Left { status: Status::Ok });
            // Its end is that of the table.
            let kinds = [Kind::Queue, Kind::Get, Kind::Insert, Kind::Issue].map(|kind| (kind, 2, 72, 0));
            assert_eq!(told(&lane), [&[(Kind::Remap, 2, 72, 72)], &kinds[..]].concat());
        }
    }

    #[test]
    fn a_remap_into_a_range_that_is_wanted_tells_where_the_request_was() {
        let places =
            vec![Place { ends: true, ..Place::TOP }, Place { device: 1, below: Some(0), ..Place::TOP }];
        let text =
            FilterText { sectors: "2048-4095".into(), actions: "remap".into(), ..FilterText::default() };
        let (mut tracer, lane) = tracer_of(places, false, &text);
        for sector in [8, 16] {
            point(&mut tracer, 0, 0, 1, sector, Event::Entered);
            point(&mut tracer, 0, 1, 2, 2048 + sector, Event::Issued);
        }
        assert_eq!(told(&lane), [(Kind::Remap, 1, 2056, 8), (Kind::Remap, 1, 2064, 16)]);
    }

    #[test]
    fn pieces_are_queued_only_when_that_was_asked_for() {
        for queued in [false, true] {
            let (mut tracer, lane) = tracer(vec![WHOLE, WHOLE], queued);
            point(&mut tracer, 9, 1, 1, 8, Event::Issued);
            let told = told(&lane);
            assert_eq!(told[0].0, if queued { Kind::Queue } else { Kind::Get });
            assert_eq!(told.len(), if queued { 4 } else { 3 });
        }
    }

    #[test]
    fn under_a_scheduler_a_backend_issues_what_was_got_and_inserted_above() {
        let scheduled = Place { scheduled: true, ..Place::TOP };
        let (mut tracer, lane) = tracer(vec![WHOLE, scheduled], true);
        point(&mut tracer, 0, 0, 0, 8, Event::Queued);
        point(&mut tracer, 0, 0, 0, 8, Event::Plugged);
        point(&mut tracer, 0, 0, 0, 8, Event::Got);
        point(&mut tracer, 1, 0, 0, 16, Event::Queued);
        point(&mut tracer, 1, 0, 0, 16, Event::Merged { front: false });
        point(&mut tracer, 0, 0, 0, 8, Event::Unplugged { count: 2 });
        point(&mut tracer, 0, 0, 0, 8, Event::Inserted);
        point(&mut tracer, 0, 0, 0, 8, Event::Dispatched);
        // What was merged goes down under a tag of its own, and was queued before.
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
        assert_eq!(told(&lane), expected);
    }
}
