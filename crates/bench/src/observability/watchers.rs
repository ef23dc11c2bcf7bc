//! Who watches: each comes, is there for a while, and goes.

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

/// How often a scraper asks.
const SCRAPE: Duration = Duration::from_secs(1);
/// How often who asks a page all the time asks.
const ASK: Duration = Duration::from_millis(1);
/// How often somebody who waits for bytes looks whether that is still wanted.
const LOOK: Duration = Duration::from_millis(50);
/// How long a watcher may take to be there, while there is no load.
const BEGINNING_SECONDS: i64 = 20;
/// Such as look at a page are as far behind the load as the page itself.
const NICE: i32 = 19;

/// A way of watching.
pub(crate) struct Watcher {
    pub(crate) name: &'static str,
    way: Way,
}

enum Way {
    Nothing,
    /// A command of ours, `NAME` standing for the device; its output goes nowhere.
    Command(&'static [&'static str]),
    /// A trace whose output nobody reads.
    Unread,
    /// `/metrics`, as Prometheus asks for it.
    Scraper,
    /// A page that shows the device, with its addresses or without.
    Page {
        addresses: bool,
    },
    /// A thousand requests a second for a page's list of devices, on one connection.
    Asking,
}

/// The first is what the others are held against.
pub(crate) const WATCHERS: [Watcher; 10] = [
    Watcher { name: "nothing", way: Way::Nothing },
    Watcher { name: "trace", way: Way::Command(&["trace", "NAME", "-o", "-"]) },
    Watcher { name: "trace-coarse", way: Way::Command(&["trace", "NAME", "-o", "-", "--coarse"]) },
    Watcher { name: "trace-unread", way: Way::Unread },
    Watcher { name: "scraper", way: Way::Scraper },
    Watcher { name: "stat", way: Way::Command(&["stat", "-x", "-l", "NAME", "1"]) },
    Watcher { name: "page", way: Way::Page { addresses: false } },
    Watcher { name: "page-addresses", way: Way::Page { addresses: true } },
    Watcher { name: "page-asked", way: Way::Asking },
    Watcher { name: "top", way: Way::Command(&["top", "-b", "-d", "1"]) },
];

/// One that is there.
pub(crate) enum Watching {
    Nobody,
    Program { child: Child, is_trace: bool },
    Thread(Beside),
}

/// A thread that watches.
pub(crate) struct Beside {
    stop: Arc<AtomicBool>,
    /// Answers, or pieces of one.
    answers: Arc<AtomicU64>,
    /// How many there were when it had begun, and when that was.
    begin: (u64, Instant),
    counts: bool,
    thread: JoinHandle<std::io::Result<()>>,
}

/// What a watcher saw.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// Events of a trace: those it had, and those that were dropped.
    pub(crate) events: Option<[f64; 2]>,
    /// Answers a second.
    pub(crate) answers: Option<f64>,
}

impl Watcher {
    /// A device with a page is there for the page; the others have none.
    pub(crate) fn watches(&self, device: &Served) -> bool {
        match self.way {
            Way::Nothing => true,
            Way::Page { .. } | Way::Asking => device.page.is_some(),
            _ => device.page.is_none(),
        }
    }

    /// When this is back the watcher is there: a load that begins now is watched from its first request on.
    pub(crate) fn come(&self, device: &Served) -> Result<Watching> {
        match self.way {
            Way::Nothing => Ok(Watching::Nobody),
            Way::Command(words) => program(device, words, true),
            Way::Unread => program(device, &["trace", "NAME", "-o", "-"], false),
            Way::Scraper => {
                let socket = device.folder.join(format!("{}.control", device.name));
                beside(false, move |stop, answers| scrape(&socket, stop, answers))
            }
            Way::Page { addresses } => {
                let page = page_of(device)?;
                let more = if addresses { "&addresses" } else { "" };
                let path = format!("/events?device={}{more}", device.name);
                beside(false, move |stop, answers| look_at(&page, &path, stop, answers))
            }
            Way::Asking => {
                let page = page_of(device)?;
                beside(true, move |stop, answers| ask(&page, stop, answers))
            }
        }
    }
}

fn page_of(device: &Served) -> Result<String> {
    device.page.clone().ok_or_else(|| Error(format!("{}: no page", device.name)))
}

/// Starts a thread that watches, and waits for its first answer. `counts`: how many there are is told.
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
    Ok(Watching::Thread(Beside { stop, answers, begin, counts, thread }))
}

/// Connects with a page, as one that waits for others.
fn connect(page: &str) -> std::io::Result<TcpStream> {
    setpriority_process(Some(gettid()), NICE)?;
    let stream = TcpStream::connect(page)?;
    stream.set_read_timeout(Some(LOOK))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Reads more; `false`: it is to stop, while the page has not had the time to answer.
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

/// What is held against the beginning of an answer.
fn accepted(answer: &[u8]) -> std::io::Result<()> {
    if answer.starts_with(b"HTTP/1.1 200") {
        Ok(())
    } else {
        Err(std::io::Error::other("the page was refused"))
    }
}

/// Takes what a page takes.
fn look_at(page: &str, path: &str, stop: &AtomicBool, answers: &AtomicU64) -> std::io::Result<()> {
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

/// Asks for the list of devices, again and again, no sooner than the answer is there.
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
        // What could not be asked in time is not asked later.
        next = (next + ASK).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// How long an answer is, once its head is there.
fn whole_len(answer: &[u8]) -> Option<usize> {
    let head = answer.windows(4).position(|end| end == b"\r\n\r\n")?;
    let text = std::str::from_utf8(&answer[..head]).ok()?;
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    let length = fields.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"))?.1;
    Some(head + 4 + length.trim().parse::<usize>().ok()?)
}

/// Starts a command of ours. A trace has begun once this is back; `read`: somebody takes what it writes.
fn program(device: &Served, words: &[&str], read: bool) -> Result<Watching> {
    let words = words.iter().map(|word| if *word == "NAME" { device.name } else { word });
    let mut command = Command::new(blockyard()?);
    command.args(words).env("BLOCKYARD_RUN", &device.folder);
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

/// Takes what comes until no more does, as far behind the load as who writes it.
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
    /// Ends it.
    pub(crate) fn go(self) -> Result<Seen> {
        match self {
            Watching::Nobody => Ok(Seen::default()),
            Watching::Thread(Beside { stop, answers, begin, counts, thread }) => {
                let came = answers.load(Relaxed).saturating_sub(begin.0) as f64;
                let answers = counts.then(|| came / begin.1.elapsed().as_secs_f64());
                stop.store(true, Relaxed);
                thread.thread().unpark();
                let ended = thread.join().map_err(|_| Error("the watcher panicked".into()))?;
                ended.map_err(|error| Error(format!("watching failed: {error}")))?;
                Ok(Seen { answers, ..Seen::default() })
            }
            Watching::Program { mut child, is_trace } => {
                if let Ok(Some(status)) = child.try_wait() {
                    return Err(Error(format!("a watcher ended by itself: {status}{}", said(&mut child))));
                }
                if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                    let _ = kill_process(pid, Signal::INT);
                }
                if let Some(mut unread) = child.stdout.take() {
                    // It ends once what it has is taken.
                    let _ = std::io::copy(&mut unread, &mut std::io::sink());
                }
                let text = said(&mut child);
                let _ = child.wait();
                match (is_trace, events(&text)) {
                    (true, None) => Err(Error(format!("a trace does not say what it saw: {text}"))),
                    (true, events) => Ok(Seen { events, ..Seen::default() }),
                    (false, _) => Ok(Seen::default()),
                }
            }
        }
    }
}

fn said(child: &mut Child) -> String {
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut text);
    }
    text
}

/// From `NAME: queue 0: 123 events, 4 dropped`: both.
fn events(said: &str) -> Option<[f64; 2]> {
    let mut sums = [0.0, 0.0];
    for line in said.lines().filter(|line| line.contains(": queue ")) {
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
    fn what_a_trace_says_of_dropped_events_is_understood() {
        let said = "null: queue 0: 300 events, 100 dropped\nnull: queue 1: 400 events, 0 dropped\n";
        assert_eq!(events(said), Some([700.0, 100.0]));
        assert_eq!(events("nothing"), None);
    }

    #[test]
    fn an_answer_is_whole_by_its_length() {
        let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nx: y\r\n\r\nabc";
        assert_eq!(whole_len(answer), Some(answer.len()));
        assert_eq!(whole_len(&answer[..answer.len() - 4]), None);
        assert_eq!(whole_len(b"HTTP/1.1 200 OK\r\n\r\n"), None);
    }
}
