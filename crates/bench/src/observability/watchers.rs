//! The watchers: each is started before a load and ended after it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process, setpriority_process};
use rustix::thread::gettid;

use super::devices::{Served, blockyard};
use crate::error::{Error, Result};

/// Interval of a scraper.
const SCRAPE: Duration = Duration::from_secs(1);
/// Interval of the requests to a page.
const ASK: Duration = Duration::from_millis(1);
/// Interval at which a waiting reader checks whether it must stop.
const LOOK: Duration = Duration::from_millis(50);
/// Time limit for a watcher to start, without a load, in seconds.
const BEGINNING_SECONDS: i64 = 20;
/// Nice value of the threads that view a page, that of the page itself.
const NICE: i32 = 19;

/// A kind of watcher.
pub(crate) struct Watcher {
    pub(crate) name: &'static str,
    kind: Kind,
}

enum Kind {
    Nothing,
    /// A command of ours, with `NAME` in place of the device; its output is discarded.
    Command(&'static [&'static str]),
    /// A trace whose output is not read.
    Unread,
    /// `/metrics`, requested like Prometheus.
    Scraper,
    /// A page that shows the device, with its addresses or without.
    Page {
        addresses: bool,
    },
    /// A thousand requests a second for a page's list of devices, on one connection.
    Asking,
}

/// All watchers. The first one is the reference.
pub(crate) const WATCHERS: [Watcher; 10] = [
    Watcher { name: "nothing", kind: Kind::Nothing },
    Watcher { name: "trace", kind: Kind::Command(&["trace", "NAME", "-o", "-"]) },
    Watcher { name: "trace-coarse", kind: Kind::Command(&["trace", "NAME", "-o", "-", "--coarse"]) },
    Watcher { name: "trace-unread", kind: Kind::Unread },
    Watcher { name: "scraper", kind: Kind::Scraper },
    Watcher { name: "stat", kind: Kind::Command(&["stat", "-x", "-l", "NAME", "1"]) },
    Watcher { name: "page", kind: Kind::Page { addresses: false } },
    Watcher { name: "page-addresses", kind: Kind::Page { addresses: true } },
    Watcher { name: "page-asked", kind: Kind::Asking },
    Watcher { name: "top", kind: Kind::Command(&["top", "-b", "-d", "1"]) },
];

/// A running watcher.
pub(crate) enum Watching {
    Nobody,
    Program { child: Child, is_trace: bool },
    Thread(WatcherThread),
}

/// A thread that watches.
pub(crate) struct WatcherThread {
    stop: Arc<AtomicBool>,
    /// Number of answers, or of received parts of one.
    answers: Arc<AtomicU64>,
    /// Value of `answers` when the measurement began, and that time.
    begin: (u64, Instant),
    counts: bool,
    thread: JoinHandle<std::io::Result<()>>,
}

/// The result of a watcher.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Observation {
    /// Events of a trace: recorded and dropped ones.
    pub(crate) events: Option<[f64; 2]>,
    /// Answers a second.
    pub(crate) answers: Option<f64>,
}

impl Watcher {
    /// Returns whether the watcher is used with this device: devices with a page are for the page's
    /// watchers only.
    pub(crate) fn watches(&self, device: &Served) -> bool {
        match self.kind {
            Kind::Nothing => true,
            Kind::Page { .. } | Kind::Asking => device.page.is_some(),
            _ => device.page.is_none(),
        }
    }

    /// Starts the watcher and waits until it is ready: a load that begins now is observed from its first
    /// request on.
    pub(crate) fn start(&self, device: &Served) -> Result<Watching> {
        match self.kind {
            Kind::Nothing => Ok(Watching::Nobody),
            Kind::Command(words) => program(device, words, true),
            Kind::Unread => program(device, &["trace", "NAME", "-o", "-"], false),
            Kind::Scraper => {
                let socket = device.folder.join(format!("{}.control", device.name));
                beside(false, move |stop, answers| scrape(&socket, stop, answers))
            }
            Kind::Page { addresses } => {
                let page = page_of(device)?;
                let more = if addresses { "&addresses" } else { "" };
                let path = format!("/events?device={}{more}", device.name);
                beside(false, move |stop, answers| view_page(&page, &path, stop, answers))
            }
            Kind::Asking => {
                let page = page_of(device)?;
                beside(true, move |stop, answers| ask(&page, stop, answers))
            }
        }
    }
}

fn page_of(device: &Served) -> Result<String> {
    device.page.clone().ok_or_else(|| Error(format!("{}: no page", device.name)))
}

/// Starts a thread that watches, and waits for its first answer. `counts`: whether the number of answers is
/// reported.
fn beside(
    counts: bool,
    work: impl FnOnce(&AtomicBool, &AtomicU64) -> std::io::Result<()> + Send + 'static,
) -> Result<Watching> {
    let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (until, count) = (stop.clone(), answers.clone());
    let thread = std::thread::spawn(move || work(&until, &count));
    let started = Instant::now();
    while answers.load(Relaxed) == 0 && !thread.is_finished() {
        if started.elapsed().as_secs() >= BEGINNING_SECONDS as u64 {
            stop.store(true, Relaxed);
            return Err(Error(format!("no answer within {BEGINNING_SECONDS} s, without any load")));
        }
        std::thread::sleep(ASK);
    }
    let begin = (answers.load(Relaxed), Instant::now());
    Ok(Watching::Thread(WatcherThread { stop, answers, begin, counts, thread }))
}

/// Connects to a page, with a timeout.
fn connect(page: &str) -> std::io::Result<TcpStream> {
    setpriority_process(Some(gettid()), NICE)?;
    let stream = TcpStream::connect(page)?;
    stream.set_read_timeout(Some(LOOK))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Reads more data; returns `false` if it must stop before the page has answered.
fn more(stream: &mut TcpStream, into: &mut Vec<u8>, stop: &AtomicBool) -> std::io::Result<bool> {
    let mut bytes = [0; 1 << 16];
    while !stop.load(Relaxed) {
        match stream.read(&mut bytes) {
            Ok(0) => return Err(std::io::Error::other("the page ended")),
            Ok(count) => {
                into.extend(&bytes[..count]);
                return Ok(true);
            }
            Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(why) => return Err(why),
        }
    }
    Ok(false)
}

/// Checks the beginning of an answer.
fn accepted(answer: &[u8]) -> std::io::Result<()> {
    if answer.starts_with(b"HTTP/1.1 200") {
        Ok(())
    } else {
        Err(std::io::Error::other("the page was refused"))
    }
}

/// Receives a page's events.
fn view_page(page: &str, path: &str, stop: &AtomicBool, answers: &AtomicU64) -> std::io::Result<()> {
    let mut stream = connect(page)?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {page}\r\nAccept: text/event-stream\r\n\r\n")?;
    let mut answer = Vec::new();
    while answer.len() < 12 && more(&mut stream, &mut answer, stop)? {}
    loop {
        if !stop.load(Relaxed) {
            accepted(&answer)?;
            answers.fetch_add(1, Relaxed);
        }
        answer.truncate(12);
        if !more(&mut stream, &mut answer, stop)? {
            return Ok(());
        }
    }
}

/// Requests the list of devices repeatedly, each time after the previous answer.
fn ask(page: &str, stop: &AtomicBool, answers: &AtomicU64) -> std::io::Result<()> {
    let mut stream = connect(page)?;
    let request = format!("GET /devices HTTP/1.1\r\nHost: {page}\r\n\r\n");
    let (mut answer, mut next) = (Vec::new(), Instant::now());
    loop {
        stream.write_all(request.as_bytes())?;
        answer.clear();
        while whole_len(&answer).is_none_or(|len| answer.len() < len) {
            if !more(&mut stream, &mut answer, stop)? {
                return Ok(());
            }
        }
        accepted(&answer)?;
        answers.fetch_add(1, Relaxed);
        // Requests that are late are skipped.
        next = (next + ASK).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// Returns the length of an answer, once its head has arrived.
fn whole_len(answer: &[u8]) -> Option<usize> {
    let head = answer.windows(4).position(|end| end == b"\r\n\r\n")?;
    let text = std::str::from_utf8(&answer[..head]).ok()?;
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let length = fields.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"))?.1;
    Some(head + 4 + length.trim().parse::<usize>().ok()?)
}

/// Starts a command of ours, and waits until a trace has begun; `read`: whether its output is read.
fn program(device: &Served, arguments: &[&str], read: bool) -> Result<Watching> {
    let arguments = arguments.iter().map(|word| if *word == "NAME" { device.name } else { word });
    let mut command = Command::new(blockyard()?);
    command.args(arguments).env("BLOCKYARD_RUN", &device.folder);
    let is_trace = command.get_args().next().is_some_and(|word| word == "trace");
    let stdout = if is_trace { Stdio::piped() } else { Stdio::null() };
    command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(Error::at(Path::new("blockyard")))?;
    if let Some(stdout) = child.stdout.take() {
        let mut wanted = [PollFd::new(&stdout, PollFlags::IN)];
        let patience = Timespec { tv_sec: BEGINNING_SECONDS, tv_nsec: 0 };
        if poll(&mut wanted, Some(&patience)).unwrap_or(0) == 0 {
            let _ = child.kill();
            return Err(Error(format!("no trace within {BEGINNING_SECONDS} s, without any load")));
        }
        if read {
            std::thread::spawn(move || drain(stdout));
        } else {
            child.stdout = Some(stdout);
        }
    }
    Ok(Watching::Program { child, is_trace })
}

/// Reads all output, at the priority of its writer.
fn drain(mut from: ChildStdout) {
    let _ = setpriority_process(Some(gettid()), NICE);
    let mut bytes = vec![0; 1 << 16];
    while from.read(&mut bytes).is_ok_and(|count| count > 0) {}
}

fn scrape(socket: &PathBuf, stop: &AtomicBool, answers: &AtomicU64) -> std::io::Result<()> {
    let mut answer = Vec::new();
    while !stop.load(Relaxed) {
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: blockyard\r\nAccept: application/openmetrics-text\r\nConnection: close\r\n\r\n")?;
        answer.clear();
        stream.read_to_end(&mut answer)?;
        if !answer.ends_with(b"# EOF\n") && !answer.windows(5).any(|bytes| bytes == b"# EOF") {
            return Err(std::io::Error::other("an answer without an end"));
        }
        answers.fetch_add(1, Relaxed);
        std::thread::park_timeout(SCRAPE);
    }
    Ok(())
}

impl Watching {
    /// Ends the watcher.
    pub(crate) fn finish(self) -> Result<Observation> {
        match self {
            Watching::Nobody => Ok(Observation::default()),
            Watching::Thread(WatcherThread { stop, answers, begin, counts, thread }) => {
                let came = answers.load(Relaxed).saturating_sub(begin.0) as f64;
                let answers = counts.then(|| came / begin.1.elapsed().as_secs_f64());
                stop.store(true, Relaxed);
                thread.thread().unpark();
                let ended = thread.join().map_err(|_| Error("the watcher panicked".into()))?;
                ended.map_err(|error| Error(format!("watching failed: {error}")))?;
                Ok(Observation { answers, ..Observation::default() })
            }
            Watching::Program { mut child, is_trace } => {
                if let Ok(Some(status)) = child.try_wait() {
                    return Err(Error(format!(
                        "a watcher ended by itself: {status}{}",
                        output_of(&mut child)
                    )));
                }
                if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                    let _ = kill_process(pid, Signal::INT);
                }
                if let Some(mut unread) = child.stdout.take() {
                    // The process exits once its output is read.
                    let _ = std::io::copy(&mut unread, &mut std::io::sink());
                }
                let text = output_of(&mut child);
                let _ = child.wait();
                match (is_trace, events(&text)) {
                    (true, None) => Err(Error(format!("a trace does not say what it saw: {text}"))),
                    (true, events) => Ok(Observation { events, ..Observation::default() }),
                    (false, _) => Ok(Observation::default()),
                }
            }
        }
    }
}

fn output_of(child: &mut Child) -> String {
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut text);
    }
    text
}

/// Parses `NAME: queue 0: 123 events, 4 dropped`.
fn events(printed: &str) -> Option<[f64; 2]> {
    let mut sums = [0.0, 0.0];
    for line in printed.lines().filter(|line| line.contains(": queue ")) {
        let mut numbers =
            line.rsplit(": ").next()?.split([' ', ',']).filter_map(|word| word.parse::<f64>().ok());
        for sum in &mut sums {
            *sum += numbers.next()?;
        }
    }
    (sums[0] + sums[1] > 0.0).then_some(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_events_of_a_trace_are_parsed() {
        let printed = "null: queue 0: 300 events, 100 dropped\nnull: queue 1: 400 events, 0 dropped\n";
        assert_eq!(events(printed), Some([700.0, 100.0]));
        assert_eq!(events("nothing"), None);
    }

    #[test]
    fn an_answer_is_complete_by_its_length() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nx: y\r\n\r\nabc";
        assert_eq!(whole_len(answer), Some(answer.len()));
        assert_eq!(whole_len(&answer[..answer.len() - 4]), None);
        assert_eq!(whole_len(b"HTTP/1.1 200 OK\r\n\r\n"), None);
    }
}
