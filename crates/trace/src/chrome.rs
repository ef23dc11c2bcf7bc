//! A Chrome trace (Trace Event Format, JSON): what Perfetto's and Chrome's viewers show.
//!
//! Each request is an asynchronous slice from its arrival to its end, with one slice inside for each time that a
//! backend had it, and a mark where it was split. Pieces have slices of their own. Times are microseconds.

use crate::wire::Frame;
use crate::{Kind, Record};
use block::Bytes;
use std::collections::HashMap;
use std::fmt::Write;

/// Makes events of frames.
#[derive(Default, Debug)]
pub struct Chrome {
    begun: bool,
    start_ns: u64,
    /// How many requests have had a tag: slices of one tag must not run into each other.
    rounds: HashMap<(u32, u16), u32>,
    /// What is open of a tag: the request's own slice, and the backend's.
    open: HashMap<(u32, u16), (bool, bool)>,
}

impl Chrome {
    /// What there is to write now that this has come. The whole is JSON once the last frame has come, and read by
    /// the viewers also before.
    pub fn frame(&mut self, frame: &Frame, into: &mut String) {
        match frame {
            Frame::Opened(opened) => {
                self.start_ns = opened.clock_ns;
                into.push_str("[\n");
                let name = serde_json::Value::from(opened.device.as_str());
                self.event(
                    into,
                    format_args!(
                        "\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"args\":{{\"name\":{name}}}"
                    ),
                );
            }
            Frame::Lane(queue, lane) => {
                let name = serde_json::Value::from(format!("queue {queue} ({})", lane.comm));
                self.event(
                    into,
                    format_args!(
                        "\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":{queue},\"args\":{{\"name\":{name}}}"
                    ),
                );
            }
            Frame::Records(queue, records) => records.iter().for_each(|r| self.record(*queue, r, into)),
            Frame::Dropped(queue, count) => {
                self.event(
                    into,
                    format_args!(
                        "\"ph\":\"i\",\"s\":\"g\",\"name\":\"{count} events dropped\",\"pid\":1,\"tid\":{queue},\"ts\":0"
                    ),
                );
            }
            Frame::Tick(_) => {}
            Frame::Closed => into.push_str("\n]\n"),
        }
    }

    fn event(&mut self, into: &mut String, fields: std::fmt::Arguments<'_>) {
        into.push_str(if std::mem::replace(&mut self.begun, true) { ",\n" } else { "" });
        // Writing to a string does not fail.
        let _ = write!(into, "{{{fields}}}");
    }

    fn slice(&mut self, phase: char, name: &str, queue: u32, record: &Record, args: &str, into: &mut String) {
        let since = record.time_ns.saturating_sub(self.start_ns);
        let (micros, nanos, tag) = (since / 1000, since % 1000, record.tag);
        let round = self.rounds.get(&(queue, tag)).copied().unwrap_or_default();
        self.event(
            into,
            format_args!(
                "\"ph\":\"{phase}\",\"cat\":\"request\",\"id\":\"{queue}-{tag}-{round}\",\"name\":\"{name}\",\"pid\":1,\
                 \"tid\":{queue},\"ts\":{micros}.{nanos:03}{args}"
            ),
        );
    }

    fn record(&mut self, queue: u32, record: &Record, into: &mut String) {
        let key = (queue, record.tag);
        let (own, backend) = self.open.get(&key).copied().unwrap_or_default();
        let (sector, len) = (record.offset >> 9, Bytes(record.len.into()));
        let name = format!("{} {len}", record.op.name());
        let place = format!(",\"args\":{{\"sector\":{sector},\"bytes\":{}}}", record.len);
        match record.kind {
            Kind::Queue if !own && record.device == 0 => {
                *self.rounds.entry(key).or_default() += 1;
                self.slice('b', &name, queue, record, &place, into);
                self.open.insert(key, (true, false));
            }
            Kind::Start | Kind::Issue if !backend => {
                if !own {
                    *self.rounds.entry(key).or_default() += 1;
                }
                self.slice('b', "backend", queue, record, &place, into);
                self.open.insert(key, (own, true));
            }
            Kind::Complete | Kind::Requeue if backend => {
                let how = format!(",\"args\":{{\"errno\":{}}}", record.value);
                self.slice('e', "backend", queue, record, &how, into);
                self.open.insert(key, (own, false));
            }
            Kind::Split => {
                let rest = format!(",\"args\":{{\"sector\":{sector},\"rest\":{}}}", record.value);
                self.slice('n', "split", queue, record, &rest, into);
            }
            Kind::BackMerge | Kind::FrontMerge => {
                self.slice('n', "merged", queue, record, &place, into);
            }
            Kind::Done if own => {
                if backend {
                    // It went down as part of another, which has ended under a tag of its own.
                    self.slice('e', "backend", queue, record, "", into);
                }
                let how = format!(",\"args\":{{\"errno\":{}}}", record.value);
                self.slice('e', &name, queue, record, &how, into);
                self.open.remove(&key);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{LaneInfo, Opened};
    use block::Op;

    fn record(time_ns: u64, tag: u16, kind: Kind) -> Record {
        let len = 4096;
        Record { time_ns, offset: 0, len, tag, kind, op: Op::Read, flags: 0, value: 0, from: 0, device: 0 }
    }

    #[test]
    fn every_slice_that_begins_ends_and_the_whole_is_json() {
        let (mut chrome, mut text) = (Chrome::default(), String::new());
        let opened = Opened { device: "di\"sk".into(), number: 0, clock_ns: 1000, wall: (0, 0) };
        let records = vec![
            record(2000, 0, Kind::Queue),
            record(2500, 0, Kind::Split),
            record(3000, 9, Kind::Start),
            record(4000, 9, Kind::Complete),
            record(4500, 0, Kind::Done),
            record(5000, 0, Kind::Queue),
            record(6250, 0, Kind::Done),
        ];
        let lane = LaneInfo { pid: 1, comm: "reactor-0".into() };
        for frame in [
            Frame::Opened(opened),
            Frame::Lane(0, lane),
            Frame::Records(0, records),
            Frame::Dropped(0, 3),
            Frame::Closed,
        ] {
            chrome.frame(&frame, &mut text);
        }
        let events: Vec<serde_json::Value> = serde_json::from_str(&text).expect("it is JSON");
        let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).collect::<Vec<_>>();
        assert_eq!((of("b").len(), of("e").len(), of("n").len()), (3, 3, 1));
        for begin in of("b") {
            assert!(of("e").iter().any(|end| end["id"] == begin["id"]), "{begin}");
        }
        assert_eq!((of("b")[2]["id"].as_str(), of("e")[2]["ts"].as_f64()), (Some("0-0-2"), Some(5.25)));
    }
}
