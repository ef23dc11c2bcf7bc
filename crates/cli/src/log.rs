//! The log: messages of a serving process as text, `key=value` or JSON, on stderr or in the journal.
//!
//! A message goes into a bounded channel, from which the log's thread writes it. A message that finds the
//! channel full is dropped and counted, and the count is written with the next message: neither I/O nor the
//! control plane waits for a full pipe or a stuck journal. By default only warnings and errors are logged.
//!
//! *Invariant:* at most [`QUEUE_MAX`] lines of a few KiB wait, plus one list that a user requested; its
//! sender waits until it is written.

mod journal;
mod lines;

use journal::Journal;
pub(crate) use lines::{Format, warning};
use std::fmt::{Debug, Display, Write};
use std::io::Write as _;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, SystemTime};
use tokio::sync::oneshot;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

pub(crate) use tracing::Level;

/// Largest number of lines that wait to be written.
const QUEUE_MAX: usize = 1024;
/// How long a process waits at its end for its last lines.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Pause before the next attempt to queue a list.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest text of a field in bytes.
const FIELD_MAX: usize = 4096;

/// The destination of lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Destination {
    /// The journal if stderr is connected to it, else stderr.
    Auto,
    Stderr,
    Journal,
}

/// The options of `--log`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LogSpec {
    pub(crate) format: Format,
    pub(crate) level: Option<Level>,
    pub(crate) to: Destination,
}

impl FromStr for LogSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<LogSpec, String> {
        let mut spec = LogSpec { format: Format::Text, level: None, to: Destination::Auto };
        for word in text.split(',').filter(|word| !word.is_empty()) {
            match word.split_once('=').unwrap_or((word, "")) {
                ("text", "") => spec.format = Format::Text,
                ("kv", "") => spec.format = Format::KeyValue,
                ("json", "") => spec.format = Format::Json,
                ("level", "error") => spec.level = Some(Level::ERROR),
                ("level", "warn") => spec.level = Some(Level::WARN),
                ("level", "info") => spec.level = Some(Level::INFO),
                ("level", "debug") => spec.level = Some(Level::DEBUG),
                ("to", "auto") => spec.to = Destination::Auto,
                ("to", "stderr") => spec.to = Destination::Stderr,
                ("to", "journal") => spec.to = Destination::Journal,
                _ => {
                    return Err(format!(
                        "invalid log option \"{word}\" (use text, kv or json, level=error|warn|info|debug, to=auto|stderr|journal)"
                    ));
                }
            }
        }
        Ok(spec)
    }
}

/// The value of a field: a text, or a number.
pub(crate) struct Value {
    text: String,
    is_number: bool,
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value { text, is_number: false }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        text.to_owned().into()
    }
}

impl Value {
    pub(crate) fn number(number: impl Display) -> Value {
        Value { text: number.to_string(), is_number: true }
    }
}

/// A log line.
pub(crate) struct Line {
    at: SystemTime,
    level: Level,
    message: String,
    fields: Vec<(&'static str, Value)>,
}

impl Line {
    pub(crate) fn new(level: Level, message: &str, fields: Vec<(&'static str, Value)>) -> Line {
        Line { at: SystemTime::now(), level, message: message.to_owned(), fields }
    }
}

enum Message {
    Line(Line),
    /// A list that a user requested. The sender waits until the other end is dropped.
    Lines(Vec<Line>, oneshot::Sender<()>),
    /// A marker: its sender is dropped when all lines before it are written.
    Mark(SyncSender<()>),
}

/// The sending side of the channel.
struct Log {
    level: Level,
    queue: SyncSender<Message>,
    dropped: &'static AtomicU64,
}

static LOG: OnceLock<Log> = OnceLock::new();
/// Lines dropped since the last one was written.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Starts the log. `verbose` sets the default level to info.
pub(crate) fn start(spec: LogSpec, verbose: bool) {
    let level = spec.level.unwrap_or(if verbose { Level::INFO } else { Level::WARN });
    let (queue, inbox) = sync_channel(QUEUE_MAX);
    if LOG.set(Log { level, queue, dropped: &DROPPED }).is_err() {
        return;
    }
    let journal = match spec.to {
        Destination::Stderr => None,
        Destination::Auto => Journal::of_stderr(),
        Destination::Journal => Some(Journal::default()),
    };
    let writer = Writer { format: spec.format, journal };
    // Without the thread nothing is logged, but the process still serves.
    let _ = std::thread::Builder::new().name("log".to_owned()).spawn(move || writer.run(&inbox));
    // Only tests can have set a subscriber before.
    let _ = tracing::subscriber::set_global_default(EventSubscriber);
}

/// Writes lines that a user requested, whatever the level. Returns when they are written; none is dropped.
pub(crate) async fn write_all(lines: Vec<Line>) {
    if let Some(log) = LOG.get() {
        log.put_all(lines).await;
    }
}

/// Waits until all lines are written, for at most a second.
pub(crate) fn finish() {
    let Some(log) = LOG.get() else { return };
    let (mark, reached) = sync_channel(0);
    if log.queue.try_send(Message::Mark(mark)).is_ok() {
        let _ = reached.recv_timeout(LAST_LINES);
    }
}

impl Log {
    fn put(&self, line: Line) {
        if self.queue.try_send(Message::Line(line)).is_err() {
            self.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Queues a list, and waits until it is written.
    async fn put_all(&self, lines: Vec<Line>) {
        let (sender, written) = oneshot::channel();
        let mut message = Message::Lines(lines, sender);
        while let Err(TrySendError::Full(again)) = self.queue.try_send(message) {
            message = again;
            tokio::time::sleep(PAUSE).await;
        }
        // An error means that the sender was dropped after the last line.
        let _ = written.await;
    }
}

/// The state of the thread that writes lines.
struct Writer {
    format: Format,
    journal: Option<Journal>,
}

impl Writer {
    fn run(self, inbox: &Receiver<Message>) {
        while let Ok(message) = inbox.recv() {
            match message {
                Message::Line(line) => self.line(&line),
                Message::Lines(lines, written) => {
                    lines.iter().for_each(|line| self.line(line));
                    drop(written);
                }
                Message::Mark(mark) => drop(mark),
            }
        }
    }

    fn line(&self, line: &Line) {
        let dropped = DROPPED.swap(0, Relaxed);
        if dropped > 0 {
            let fields = vec![("lines", Value::number(dropped))];
            let message = "log lines were dropped: they arrived faster than they could be written".to_owned();
            self.write(&Line { at: line.at, level: Level::WARN, message, fields });
        }
        self.write(line);
    }

    fn write(&self, line: &Line) {
        let is_taken = self.journal.as_ref().is_some_and(|journal| journal.send(line).is_ok());
        if !is_taken {
            // An error cannot be reported anywhere.
            let _ = std::io::stderr().lock().write_all(lines::text(self.format, line).as_bytes());
        }
    }
}

/// Receives the events of the crates.
struct EventSubscriber;

impl Subscriber for EventSubscriber {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Only warnings and errors of other crates are logged.
        let own = metadata.target().starts_with("blockyard");
        let level = LOG.get().map_or(Level::WARN, |log| log.level);
        *metadata.level() <= if own { level } else { level.min(Level::WARN) }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let Some(log) = LOG.get() else { return };
        let mut visitor = FieldVisitor { message: String::new(), fields: Vec::new() };
        event.record(&mut visitor);
        let FieldVisitor { message, fields } = visitor;
        log.put(Line { at: SystemTime::now(), level: *event.metadata().level(), message, fields });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct FieldVisitor {
    message: String,
    fields: Vec<(&'static str, Value)>,
}

impl Visit for FieldVisitor {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.fields.push((field.name(), Value::number(value)));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.fields.push((field.name(), Value::number(value)));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.fields.push((field.name(), Value::number(value)));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = write!(text, "{value:?}");
        if text.len() > FIELD_MAX {
            let end = (0..=FIELD_MAX).rev().find(|end| text.is_char_boundary(*end));
            text.truncate(end.unwrap_or_default());
        }
        if field.name() == "message" {
            self.message = text;
        } else {
            self.fields.push((field.name(), text.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_and_invalid_ones_rejected() {
        let spec: LogSpec = "json,level=debug,to=journal".parse().expect("valid options");
        assert_eq!(
            (spec.format, spec.level, spec.to),
            (Format::Json, Some(Level::DEBUG), Destination::Journal)
        );
        assert_eq!("".parse(), Ok(LogSpec { format: Format::Text, level: None, to: Destination::Auto }));
        for text in ["xml", "level=loud", "to=/dev/null", "json=1", "level"] {
            assert!(text.parse::<LogSpec>().is_err(), "{text}");
        }
    }

    #[test]
    fn lines_beyond_the_limit_are_dropped_and_counted() {
        static DROPPED_HERE: AtomicU64 = AtomicU64::new(0);
        let (queue, inbox) = sync_channel(2);
        let log = Log { level: Level::WARN, queue, dropped: &DROPPED_HERE };
        for _ in 0..5 {
            let line =
                Line { at: SystemTime::now(), level: Level::WARN, message: "x".into(), fields: vec![] };
            log.put(line);
        }
        assert_eq!(DROPPED_HERE.load(Relaxed), 3);
        assert_eq!(inbox.try_iter().count(), 2);
    }

    #[test]
    fn a_list_beyond_the_limit_waits_and_is_complete() {
        static DROPPED_HERE: AtomicU64 = AtomicU64::new(0);
        let (queue, inbox) = sync_channel(1);
        let log = Log { level: Level::WARN, queue, dropped: &DROPPED_HERE };
        let line = || Line::new(Level::INFO, "in flight", vec![]);
        log.put(line());
        let reader = std::thread::spawn(move || {
            std::thread::sleep(3 * PAUSE);
            let of = |message| match message {
                Message::Line(_) => 1,
                Message::Lines(lines, _) => lines.len(),
                Message::Mark(_) => 0,
            };
            [inbox.recv(), inbox.recv()].map(|message| of(message.expect("a message")))
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(log.put_all((0..5000).map(|_| line()).collect()));
        assert_eq!(reader.join().expect("the reader thread"), [1, 5000]);
        assert_eq!(DROPPED_HERE.load(Relaxed), 0);
    }
}
