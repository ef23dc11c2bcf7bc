//! The log: what the engine says while it serves, as text, `key=value` or JSON, on stderr or in the journal.
//!
//! Whoever says something puts it into a channel of fixed size and goes on; a thread of the log's own writes it. What
//! finds no room is counted, and the count is written with the next line: neither I/O nor the control plane waits for a
//! full pipe or a stuck journal. Quiet by default: warnings and errors only.
//!
//! *Invariant:* at most [`ROOM`] lines wait, each of a few KiB, and one list that somebody asked for: whoever sent that waits
//! until it is written.

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

/// Lines that may wait to be written.
const ROOM: usize = 1024;
/// The longest that a process waits at its end for its last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(1);
/// How long to sleep before looking for room again.
const PAUSE: Duration = Duration::from_millis(10);
/// The longest text of one field, in bytes.
const FIELD_MAX: usize = 4096;

/// Where lines go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum To {
    /// The journal if stderr is connected to it, else stderr.
    Auto,
    Stderr,
    Journal,
}

/// How the log is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LogSpec {
    pub(crate) format: Format,
    pub(crate) level: Option<Level>,
    pub(crate) to: To,
}

impl FromStr for LogSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<LogSpec, String> {
        let mut spec = LogSpec { format: Format::Text, level: None, to: To::Auto };
        for word in text.split(',').filter(|word| !word.is_empty()) {
            match word.split_once('=').unwrap_or((word, "")) {
                ("text", "") => spec.format = Format::Text,
                ("kv", "") => spec.format = Format::KeyValue,
                ("json", "") => spec.format = Format::Json,
                ("level", "error") => spec.level = Some(Level::ERROR),
                ("level", "warn") => spec.level = Some(Level::WARN),
                ("level", "info") => spec.level = Some(Level::INFO),
                ("level", "debug") => spec.level = Some(Level::DEBUG),
                ("to", "auto") => spec.to = To::Auto,
                ("to", "stderr") => spec.to = To::Stderr,
                ("to", "journal") => spec.to = To::Journal,
                _ => {
                    return Err(format!(
                        "\"{word}\" is not understood (write text, kv or json, level=error|warn|info|debug, to=auto|stderr|journal)"
                    ));
                }
            }
        }
        Ok(spec)
    }
}

/// What a field holds: text, whatever it looks like, or a number.
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

/// Something that was said.
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

enum Mail {
    Line(Line),
    /// Who dropped the other end of this does not wait any more.
    Lines(Vec<Line>, oneshot::Sender<()>),
    /// All that was said before has been written when this is dropped.
    Mark(SyncSender<()>),
}

/// The way to the thread that writes.
struct Log {
    level: Level,
    mail: SyncSender<Mail>,
    lost: &'static AtomicU64,
}

static LOG: OnceLock<Log> = OnceLock::new();
/// Lines that found no room since the last that was written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// From now on. `verbose`: also what is merely good to know, unless the level was said.
pub(crate) fn start(spec: LogSpec, verbose: bool) {
    let level = spec.level.unwrap_or(if verbose { Level::INFO } else { Level::WARN });
    let (mail, inbox) = sync_channel(ROOM);
    if LOG.set(Log { level, mail, lost: &LOST }).is_err() {
        return;
    }
    let journal = match spec.to {
        To::Stderr => None,
        To::Auto => Journal::of_stderr(),
        To::Journal => Some(Journal::default()),
    };
    let writer = Writer { format: spec.format, journal };
    // Without a thread nothing is said, which is no reason not to serve.
    let _ = std::thread::Builder::new().name("log".to_owned()).spawn(move || writer.run(&inbox));
    // Only tests could have started another one before, and theirs is as good.
    let _ = tracing::subscriber::set_global_default(Said);
}

/// Say all of this whatever the level is: it was asked for. Ends when it is written, and none of it is lost.
pub(crate) async fn say_all(lines: Vec<Line>) {
    if let Some(log) = LOG.get() {
        log.put_all(lines).await;
    }
}

/// Wait until what was said is written, if that can be soon.
pub(crate) fn finish() {
    let Some(log) = LOG.get() else { return };
    let (mark, reached) = sync_channel(0);
    if log.mail.try_send(Mail::Mark(mark)).is_ok() {
        let _ = reached.recv_timeout(LAST_LINES);
    }
}

impl Log {
    fn put(&self, line: Line) {
        if self.mail.try_send(Mail::Line(line)).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }

    /// They need the room of one line, and whoever asked waits for that.
    async fn put_all(&self, lines: Vec<Line>) {
        let (sender, written) = oneshot::channel();
        let mut mail = Mail::Lines(lines, sender);
        while let Err(TrySendError::Full(again)) = self.mail.try_send(mail) {
            mail = again;
            tokio::time::sleep(PAUSE).await;
        }
        // An error: it was dropped behind the last line.
        let _ = written.await;
    }
}

/// The thread that writes.
struct Writer {
    format: Format,
    journal: Option<Journal>,
}

impl Writer {
    fn run(self, inbox: &Receiver<Mail>) {
        while let Ok(mail) = inbox.recv() {
            match mail {
                Mail::Line(line) => self.line(&line),
                Mail::Lines(lines, written) => {
                    lines.iter().for_each(|line| self.line(line));
                    drop(written);
                }
                Mail::Mark(mark) => drop(mark),
            }
        }
    }

    fn line(&self, line: &Line) {
        let lost = LOST.swap(0, Relaxed);
        if lost > 0 {
            let fields = vec![("lines", Value::number(lost))];
            let message = "lines of the log were lost: they came faster than they are written".to_owned();
            self.write(&Line { at: line.at, level: Level::WARN, message, fields });
        }
        self.write(line);
    }

    fn write(&self, line: &Line) {
        let is_taken = self.journal.as_ref().is_some_and(|journal| journal.send(line).is_ok());
        if !is_taken {
            // Nobody can be told that nobody can be told.
            let _ = std::io::stderr().lock().write_all(lines::text(self.format, line).as_bytes());
        }
    }
}

/// What the engine says comes here.
struct Said;

impl Subscriber for Said {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Libraries have their say only when it is serious.
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
        let mut gathered = Gathered { message: String::new(), fields: Vec::new() };
        event.record(&mut gathered);
        let Gathered { message, fields } = gathered;
        log.put(Line { at: SystemTime::now(), level: *event.metadata().level(), message, fields });
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Gathered {
    message: String,
    fields: Vec<(&'static str, Value)>,
}

impl Visit for Gathered {
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
    fn a_specification_is_read_and_nonsense_refused() {
        let spec: LogSpec = "json,level=debug,to=journal".parse().expect("it is one");
        assert_eq!((spec.format, spec.level, spec.to), (Format::Json, Some(Level::DEBUG), To::Journal));
        assert_eq!("".parse(), Ok(LogSpec { format: Format::Text, level: None, to: To::Auto }));
        for text in ["xml", "level=loud", "to=/dev/null", "json=1", "level"] {
            assert!(text.parse::<LogSpec>().is_err(), "{text}");
        }
    }

    #[test]
    fn lines_beyond_the_room_are_counted_and_nobody_waits() {
        static LOST_HERE: AtomicU64 = AtomicU64::new(0);
        let (mail, inbox) = sync_channel(2);
        let log = Log { level: Level::WARN, mail, lost: &LOST_HERE };
        for _ in 0..5 {
            let line =
                Line { at: SystemTime::now(), level: Level::WARN, message: "x".into(), fields: vec![] };
            log.put(line);
        }
        assert_eq!(LOST_HERE.load(Relaxed), 3);
        assert_eq!(inbox.try_iter().count(), 2);
    }

    #[test]
    fn a_list_that_is_longer_than_the_room_waits_for_room_and_is_whole() {
        static LOST_HERE: AtomicU64 = AtomicU64::new(0);
        let (mail, inbox) = sync_channel(1);
        let log = Log { level: Level::WARN, mail, lost: &LOST_HERE };
        let line = || Line::new(Level::INFO, "in flight", vec![]);
        log.put(line());
        let reader = std::thread::spawn(move || {
            std::thread::sleep(3 * PAUSE);
            let of = |mail| match mail {
                Mail::Line(_) => 1,
                Mail::Lines(lines, _) => lines.len(),
                Mail::Mark(_) => 0,
            };
            [inbox.recv(), inbox.recv()].map(|mail| of(mail.expect("it comes")))
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(log.put_all((0..5000).map(|_| line()).collect()));
        assert_eq!(reader.join().expect("it reads"), [1, 5000]);
        assert_eq!(LOST_HERE.load(Relaxed), 0);
    }
}
