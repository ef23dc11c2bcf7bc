//! A Chrome trace (Trace Event Format, JSON), which Perfetto's and Chrome's viewers show.
//!
//! Each request is an asynchronous slice from its arrival to its end, with a slice inside for each layer and
//! backend that has it, nested as the stack is. Child requests have slices of their own; a flow leads from
//! each to the layer of the parent that it was split off by. Counters show how many requests each queue has
//! in flight, and how many of those, or of their children, are at backends. Times are microseconds.
//!
//! Each SCSI command is a slice of its own, with its CDB and its initiator, from its beginning to its status;
//! a flow leads to each of its requests, which name it.
//!
//! Flows are attributes of slices (`bind_id`, `flow_out`, `flow_in`): events of their own (`s`, `f`) bind to
//! threads' slices only.

use crate::command::{Command, Commands, Note, Sessions};
use crate::wire::{Frame, Node};
use crate::{Kind, Record, Step};
use block::Bytes;
use std::collections::HashMap;
use std::fmt::Write;

/// A tag that is in use on a queue.
#[derive(Default, Debug)]
struct Open {
    /// Name of the request's own slice, while that slice is open.
    own: Option<String>,
    /// Whether the request is a child: then its own slice ends with the outermost layer.
    is_child: bool,
    /// Numbers of the nodes that the request has entered and not left, outermost first.
    nodes: Vec<u8>,
}

/// Requests in flight on a queue.
#[derive(Clone, Copy, Default, Debug)]
struct Depth {
    requests: u64,
    backends: u64,
}

/// Converts frames to events.
#[derive(Default, Debug)]
pub struct Chrome {
    begun: bool,
    start_ns: u64,
    /// Nodes of the stack, by number.
    stack: Vec<Node>,
    /// Number of requests that have had each tag of a queue: slices of one tag must not overlap.
    rounds: HashMap<(u32, u16), u32>,
    open: HashMap<(u32, u16), Open>,
    /// Requests in flight of each queue.
    depths: HashMap<u32, Depth>,
    /// Number of the last flow.
    flow: u64,
    /// Commands in progress of each queue.
    commands: HashMap<u32, Commands>,
    sessions: Sessions,
    /// Commands of requests that arrive next: by queue and tag, the flow and the fields that name the
    /// command.
    of_commands: HashMap<(u32, u16), (u64, String)>,
}

impl Chrome {
    /// Appends the events of a frame. The output is valid JSON once the last frame was converted; viewers
    /// also read it before that.
    pub fn frame(&mut self, frame: &Frame, into: &mut String) {
        match frame {
            Frame::Opened(opened) => {
                self.start_ns = opened.clock_ns;
                self.stack.clone_from(&opened.nodes);
                into.push_str("[\n");
                let name = serde_json::Value::from(opened.device.as_str());
                self.event(
                    into,
                    format_args!(
                        "\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"args\":{{\"name\":{name}}}"
                    ),
                );
            }
            Frame::Queue(queue, buffer) => {
                let name = serde_json::Value::from(format!("queue {queue} ({})", buffer.comm));
                self.event(
                    into,
                    format_args!(
                        "\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":{queue},\"args\":{{\"name\":{name}}}"
                    ),
                );
            }
            Frame::Records(queue, records) => records.iter().for_each(|r| self.record(*queue, r, into)),
            Frame::Dropped(queue, count) => {
                // Dropped records may include ends of requests: later requests get slices of their own.
                self.open.retain(|(of, _), _| of != queue);
                self.depths.remove(queue);
                self.commands.remove(queue);
                self.of_commands.retain(|(of, _), _| of != queue);
                self.event(
                    into,
                    format_args!(
                        "\"ph\":\"i\",\"s\":\"g\",\"name\":\"{count} events dropped\",\"pid\":1,\"tid\":{queue},\"ts\":0"
                    ),
                );
            }
            Frame::Tick(_) => {}
            Frame::Session(session) => self.sessions.add(session),
            Frame::Closed => into.push_str("\n]\n"),
        }
    }

    fn event(&mut self, into: &mut String, fields: std::fmt::Arguments<'_>) {
        into.push_str(if std::mem::replace(&mut self.begun, true) { ",\n" } else { "" });
        // Writing to a string does not fail.
        let _ = write!(into, "{{{fields}}}");
    }

    /// Returns the time of a record since the start of the trace, in microseconds and remaining nanoseconds.
    fn time(&self, record: &Record) -> (u64, u64) {
        let since = record.time_ns.saturating_sub(self.start_ns);
        (since / 1000, since % 1000)
    }

    /// Writes an event of the track that belongs to a request. `rest` has further fields, with a comma before
    /// each.
    fn slice(
        &mut self,
        phase: char,
        name: &str,
        (queue, tag): (u32, u16),
        record: &Record,
        rest: &str,
        into: &mut String,
    ) {
        let (micros, nanos) = self.time(record);
        let round = self.rounds.get(&(queue, tag)).copied().unwrap_or_default();
        let name = serde_json::Value::from(name);
        self.event(
            into,
            format_args!(
                "\"ph\":\"{phase}\",\"cat\":\"request\",\"id\":\"{queue}-{tag}-{round}\",\"name\":{name},\"pid\":1,\
                 \"tid\":{queue},\"ts\":{micros}.{nanos:03}{rest}"
            ),
        );
    }

    /// Changes a counter of a queue and writes its new value.
    fn count(
        &mut self,
        queue: u32,
        record: &Record,
        change: impl Fn(&mut Depth) -> (&'static str, u64),
        into: &mut String,
    ) {
        let (name, value) = change(self.depths.entry(queue).or_default());
        let (micros, nanos) = self.time(record);
        self.event(
            into,
            format_args!(
                "\"ph\":\"C\",\"name\":\"queue {queue} in flight\",\"pid\":1,\"tid\":{queue},\"ts\":{micros}.{nanos:03},\
                 \"args\":{{\"{name}\":{value}}}"
            ),
        );
    }

    /// Returns the name of a node.
    fn node(&self, node: u8) -> String {
        self.stack.get(usize::from(node)).map_or_else(|| format!("node {node}"), |node| node.name.clone())
    }

    fn is_backend(&self, node: u8) -> bool {
        self.stack.get(usize::from(node)).is_some_and(|node| node.backend)
    }

    /// Begins the own slice of a request.
    fn begin(
        &mut self,
        key: (u32, u16),
        name: String,
        is_child: bool,
        record: &Record,
        rest: &str,
        into: &mut String,
    ) {
        *self.rounds.entry(key).or_default() += 1;
        self.slice('b', &name, key, record, rest, into);
        self.open.insert(key, Open { own: Some(name), is_child, nodes: Vec::new() });
    }

    /// Handles the record of a node that a request entered or left.
    fn step(&mut self, queue: u32, record: &Record, name: &str, place: &str, into: &mut String) {
        let key = (queue, record.tag);
        match Step::from_value(record.value) {
            Step::Enter { node, parent } => {
                if !self.open.contains_key(&key) {
                    // A request without a parent arrived before the trace began, or its arrival was filtered
                    // out.
                    let own =
                        parent.map_or(format!("{name} (arrived earlier)"), |_| format!("{name} (child)"));
                    self.flow += 1;
                    let flow = self.flow;
                    let out = format!(",\"bind_id\":{flow},\"flow_out\":true{place}");
                    self.begin(key, own, true, record, if parent.is_some() { &out } else { place }, into);
                    if let Some(parent) = parent.filter(|tag| self.open.contains_key(&(queue, *tag))) {
                        let link = format!(
                            ",\"bind_id\":{flow},\"flow_in\":true,\"args\":{{\"tag\":{}}}",
                            record.tag
                        );
                        self.slice('n', "child", (queue, parent), record, &link, into);
                    }
                }
                let layer = self.node(node);
                self.slice('b', &layer, key, record, place, into);
                self.open.entry(key).or_default().nodes.push(node);
                if self.is_backend(node) {
                    self.count(queue, record, |depth| Depth::at_backends(depth, true), into);
                }
            }
            Step::Leave { node, errno } => self.leave(key, record, Some((node, errno)), into),
        }
    }

    /// Ends the slices of a request from the innermost node up to `at`, or that of the innermost node alone.
    fn leave(&mut self, key: (u32, u16), record: &Record, at: Option<(u8, u16)>, into: &mut String) {
        let Some(open) = self.open.get_mut(&key) else { return };
        let depth = match at {
            Some((node, _)) => open.nodes.iter().rposition(|other| *other == node),
            None => open.nodes.len().checked_sub(1),
        };
        let Some(depth) = depth else { return };
        let left = open.nodes.split_off(depth);
        let ended =
            if open.is_child && open.nodes.is_empty() && at.is_some() { open.own.take() } else { None };
        let how = at.map_or(String::new(), |(_, errno)| format!(",\"args\":{{\"errno\":{errno}}}"));
        for node in left.into_iter().rev() {
            let layer = self.node(node);
            self.slice('e', &layer, key, record, &how, into);
            if self.is_backend(node) {
                self.count(key.0, record, |depth| Depth::at_backends(depth, false), into);
            }
        }
        if let Some(own) = ended {
            self.slice('e', &own, key, record, &how, into);
            self.open.remove(&key);
        }
    }

    fn record(&mut self, queue: u32, record: &Record, into: &mut String) {
        let key = (queue, record.tag);
        let (sector, len) = (record.offset >> 9, Bytes(record.len.into()));
        let name = format!("{} {len}", record.op.name());
        let place = format!(",\"args\":{{\"sector\":{sector},\"bytes\":{}}}", record.len);
        match record.kind {
            Kind::Command => self.command(queue, record, into),
            Kind::Queue if record.device == 0 && !self.open.contains_key(&key) => {
                let rest = match self.of_commands.remove(&key) {
                    Some((flow, command)) => format!(
                        ",\"bind_id\":{flow},\"flow_in\":true,\"args\":{{\"sector\":{sector},\"bytes\":{}{command}}}",
                        record.len
                    ),
                    None => place,
                };
                self.begin(key, name, false, record, &rest, into);
                self.count(queue, record, |depth| Depth::of_requests(depth, true), into);
            }
            Kind::Layer => self.step(queue, record, &name, &place, into),
            // The node that rejected the request does not hold it.
            Kind::Requeue => self.leave(key, record, None, into),
            Kind::Split => {
                let rest = format!(",\"args\":{{\"sector\":{sector},\"rest\":{}}}", record.value);
                self.slice('n', "split", key, record, &rest, into);
            }
            Kind::BackMerge | Kind::FrontMerge => self.slice('n', "merged", key, record, &place, into),
            Kind::Done => {
                // The request has also left nodes that did not report it.
                while self.open.get(&key).is_some_and(|open| !open.nodes.is_empty()) {
                    self.leave(key, record, None, into);
                }
                let Some(Open { own: Some(own), is_child, .. }) = self.open.remove(&key) else { return };
                let how = format!(",\"args\":{{\"errno\":{}}}", record.value);
                self.slice('e', &own, key, record, &how, into);
                if !is_child {
                    self.count(queue, record, |depth| Depth::of_requests(depth, false), into);
                }
            }
            _ => {}
        }
    }
}

impl Chrome {
    /// Handles the record of a command that began, submits a request, or ended.
    fn command(&mut self, queue: u32, record: &Record, into: &mut String) {
        let mut commands = self.commands.remove(&queue).unwrap_or_default();
        let (micros, nanos) = self.time(record);
        match commands.record(record) {
            Some(Note::Begun(command)) => {
                let args = format!(",\"args\":{{{}}}", self.describe(command));
                self.command_slice('b', queue, command, (micros, nanos), &args, into);
            }
            Some(Note::Request(_, Some(command))) => {
                self.flow += 1;
                let (flow, sector) = (self.flow, record.offset >> 9);
                let args = format!(
                    ",\"bind_id\":{flow},\"flow_out\":true,\"args\":{{\"op\":\"{}\",\"sector\":{sector},\"bytes\":{}}}",
                    record.op.name(),
                    record.len
                );
                self.command_slice('n', queue, command, (micros, nanos), &args, into);
                let named = format!(",{}", self.describe(command));
                self.of_commands.insert((queue, record.tag), (flow, named));
            }
            Some(Note::Ended(command, end)) => {
                let status = serde_json::Value::from(end.status());
                let args = format!(",\"args\":{{\"status\":{status},\"bytes\":{}}}", end.bytes);
                self.command_slice('e', queue, &command, (micros, nanos), &args, into);
            }
            Some(Note::Request(_, None)) | None => {}
        }
        self.commands.insert(queue, commands);
    }

    /// Returns the fields of a command for the arguments of its events.
    fn describe(&self, command: &Command) -> String {
        let initiator = serde_json::Value::from(self.sessions.initiator(command.session()));
        format!(
            "\"scsi\":\"{}\",\"cdb\":\"{}\",\"lun\":{},\"itt\":\"{:#x}\",\"session\":{},\"initiator\":{initiator}",
            command.name(),
            command.cdb(),
            command.lun(),
            command.task(),
            command.session()
        )
    }

    fn command_slice(
        &mut self,
        phase: char,
        queue: u32,
        command: &Command,
        (micros, nanos): (u64, u64),
        rest: &str,
        into: &mut String,
    ) {
        let (name, number) = (command.name(), command.number());
        self.event(
            into,
            format_args!(
                "\"ph\":\"{phase}\",\"cat\":\"scsi\",\"id\":\"scsi-{queue}-{number}\",\"name\":\"{name}\",\"pid\":1,\
                 \"tid\":{queue},\"ts\":{micros}.{nanos:03}{rest}"
            ),
        );
    }
}

impl Depth {
    fn changed(number: &mut u64, begins: bool) -> u64 {
        *number = if begins { *number + 1 } else { number.saturating_sub(1) };
        *number
    }

    /// Counts a request that arrived or ended.
    fn of_requests(&mut self, begins: bool) -> (&'static str, u64) {
        ("requests", Depth::changed(&mut self.requests, begins))
    }

    /// Counts a request, or a child request, that entered a backend or left it.
    fn at_backends(&mut self, begins: bool) -> (&'static str, u64) {
        ("at backends", Depth::changed(&mut self.backends, begins))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Opened, TracedQueueInfo};
    use block::Op;
    use serde_json::Value;

    fn record(time_ns: u64, tag: u16, kind: Kind) -> Record {
        let len = 4096;
        Record { time_ns, offset: 0, len, tag, kind, op: Op::Read, flags: 0, value: 0, from: 0, device: 0 }
    }

    fn enter(time_ns: u64, tag: u16, node: u8, parent: Option<u16>) -> Record {
        Record { value: Step::Enter { node, parent }.to_value(), ..record(time_ns, tag, Kind::Layer) }
    }

    fn leave(time_ns: u64, tag: u16, node: u8) -> Record {
        Record { value: Step::Leave { node, errno: 0 }.to_value(), ..record(time_ns, tag, Kind::Layer) }
    }

    /// Returns the events of a trace of a split layer over a RAM backend.
    fn events(frames: Vec<Frame>) -> Vec<Value> {
        let (mut chrome, mut text) = (Chrome::default(), String::new());
        let node = |name: &str, backend| Node { name: name.into(), backend };
        let nodes = vec![node("split", false), node("ram 64M", true)];
        let opened = Opened { device: "di\"sk".into(), number: 0, clock_ns: 1000, wall: (0, 0), nodes };
        let buffer = TracedQueueInfo { pid: 1, comm: "reactor-0".into() };
        let first = [Frame::Opened(opened), Frame::Queue(0, buffer)];
        first
            .into_iter()
            .chain(frames)
            .chain([Frame::Closed])
            .for_each(|frame| chrome.frame(&frame, &mut text));
        serde_json::from_str(&text).expect("it is JSON")
    }

    fn of<'a>(events: &'a [Value], phase: &str) -> Vec<&'a Value> {
        events.iter().filter(|event| event["ph"] == phase).collect()
    }

    /// Checks that slices of each track are nested: every end belongs to the slice that began last.
    fn check_nesting(events: &[Value]) {
        let mut open: HashMap<String, Vec<String>> = HashMap::new();
        for event in events {
            let [id, name] = ["id", "name"].map(|key| event[key].as_str().unwrap_or_default().to_owned());
            match event["ph"].as_str() {
                Some("b") => open.entry(id).or_default().push(name),
                Some("e") => assert_eq!(open.entry(id).or_default().pop(), Some(name), "{event}"),
                _ => {}
            }
        }
        assert!(open.values().all(Vec::is_empty), "{open:?}");
    }

    #[test]
    fn a_request_has_a_slice_for_each_layer_inside_its_own() {
        let records = vec![
            record(2000, 0, Kind::Queue),
            enter(2100, 0, 0, None),
            enter(2200, 0, 1, None),
            leave(4000, 0, 1),
            leave(4100, 0, 0),
            record(4500, 0, Kind::Done),
            record(5000, 0, Kind::Queue),
            record(6250, 0, Kind::Done),
        ];
        let events = events(vec![Frame::Records(0, records)]);
        check_nesting(&events);
        let begun: Vec<&str> = of(&events, "b").iter().map(|event| event["name"].as_str().unwrap()).collect();
        assert_eq!(begun, ["read 4K", "split", "ram 64M", "read 4K"]);
        let ends = of(&events, "e");
        assert_eq!((ends[3]["id"].as_str(), ends[3]["ts"].as_f64()), (Some("0-0-2"), Some(5.25)));
    }

    #[test]
    fn a_child_is_linked_to_the_layer_of_its_parent() {
        let records = vec![
            record(2000, 0, Kind::Queue),
            enter(2100, 0, 0, None),
            record(2150, 0, Kind::Split),
            enter(2200, 9, 1, Some(0)),
            enter(2300, 10, 1, Some(0)),
            leave(4000, 9, 1),
            leave(4100, 10, 1),
            leave(4200, 0, 0),
            record(4500, 0, Kind::Done),
        ];
        let events = events(vec![Frame::Records(0, records)]);
        check_nesting(&events);
        let linked = |key: &str| -> Vec<(&str, u64)> {
            let ends = events.iter().filter(|event| event[key] == true);
            ends.map(|event| (event["id"].as_str().unwrap(), event["bind_id"].as_u64().unwrap())).collect()
        };
        let (out, into) = (linked("flow_out"), linked("flow_in"));
        assert_eq!(out.iter().map(|end| end.0).collect::<Vec<_>>(), ["0-9-1", "0-10-1"]);
        assert_eq!(into.iter().map(|end| end.0).collect::<Vec<_>>(), ["0-0-1", "0-0-1"]);
        assert_eq!(
            out.iter().map(|end| end.1).collect::<Vec<_>>(),
            into.iter().map(|end| end.1).collect::<Vec<_>>()
        );
        assert_ne!(out[0].1, out[1].1);
    }

    #[test]
    fn counters_follow_what_is_in_flight() {
        let records = vec![
            record(2000, 0, Kind::Queue),
            record(2000, 1, Kind::Queue),
            enter(2100, 0, 1, None),
            leave(4000, 0, 1),
            record(4500, 0, Kind::Done),
            record(4600, 1, Kind::Done),
        ];
        let events = events(vec![Frame::Records(0, records)]);
        let values = |name: &str| -> Vec<u64> {
            of(&events, "C").iter().filter_map(|event| event["args"][name].as_u64()).collect()
        };
        assert_eq!((values("requests"), values("at backends")), (vec![1, 2, 1, 0], vec![1, 0]));
        assert!(of(&events, "C").iter().all(|event| event["name"] == "queue 0 in flight"));
    }

    #[test]
    fn a_request_that_found_no_room_leaves_the_backend_and_enters_it_again() {
        let records = vec![
            record(2000, 0, Kind::Queue),
            enter(2100, 0, 0, None),
            enter(2200, 0, 1, None),
            record(2300, 0, Kind::Requeue),
            enter(3000, 0, 1, None),
            leave(4000, 0, 1),
            leave(4000, 0, 0),
            record(4500, 0, Kind::Done),
        ];
        let events = events(vec![Frame::Records(0, records)]);
        check_nesting(&events);
        assert_eq!(of(&events, "b").iter().filter(|event| event["name"] == "ram 64M").count(), 2);
    }

    #[test]
    fn a_command_is_a_slice_from_which_a_flow_leads_to_its_request() {
        let mut records = crate::command::tests::write_10(2000);
        let end = records.pop().unwrap();
        records.extend([record(2100, 5, Kind::Queue), record(2200, 5, Kind::Done)]);
        // A later request with the same tag belongs to no command.
        records.extend([end, record(2300, 5, Kind::Queue), record(2400, 5, Kind::Done)]);
        let session = crate::wire::SessionName { number: 3, initiator: "iqn.2026-11.example:host".into() };
        let events = events(vec![Frame::Session(session), Frame::Records(0, records)]);
        check_nesting(&events);
        let begun = of(&events, "b");
        let [command, request, other] = [0, 1, 2].map(|at| begun[at]);
        assert_eq!((&command["name"], &command["cat"]), (&"WRITE(10)".into(), &"scsi".into()));
        assert_eq!(command["args"]["cdb"], "2a 00 00 00 09 b8 00 00 08 00");
        assert_eq!(request["args"]["scsi"], "WRITE(10)");
        assert_eq!(request["args"]["initiator"], "iqn.2026-11.example:host");
        assert_eq!(request["bind_id"], of(&events, "n")[0]["bind_id"]);
        assert!(other["bind_id"].is_null() && other["args"]["scsi"].is_null());
        let ended = of(&events, "e").into_iter().find(|event| event["cat"] == "scsi").unwrap();
        assert_eq!(ended["args"]["status"], "GOOD");
    }

    #[test]
    fn after_a_gap_requests_begin_anew() {
        let before = vec![record(2000, 0, Kind::Queue), enter(2100, 0, 0, None)];
        let after = vec![
            leave(2500, 0, 0),
            record(3000, 0, Kind::Queue),
            record(3500, 0, Kind::Done),
            record(3600, 7, Kind::Done),
        ];
        let frames = vec![Frame::Records(0, before), Frame::Dropped(0, 3), Frame::Records(0, after)];
        let events = events(frames);
        let ids = |phase| of(&events, phase).iter().map(|event| event["id"].clone()).collect::<Vec<_>>();
        assert_eq!(
            (ids("b"), ids("e")),
            (vec!["0-0-1".into(), "0-0-1".into(), "0-0-2".into()], vec!["0-0-2".into()])
        );
        let last = of(&events, "C").last().unwrap()["args"]["requests"].clone();
        assert_eq!(last, 0);
    }
}
