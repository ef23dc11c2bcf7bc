//! Who watches: each comes, is there for a while, and goes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::devices::{Served, blockyard};
use crate::error::{Error, Result};

/// How often a scraper asks.
const SCRAPE: Duration = Duration::from_secs(1);

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
}

/// The first is what the others are held against.
pub(crate) const WATCHERS: [Watcher; 9] = [
    Watcher { name: "nothing", way: Way::Nothing },
    Watcher { name: "trace", way: Way::Command(&["trace", "NAME", "-o", "-"]) },
    Watcher { name: "trace-coarse", way: Way::Command(&["trace", "NAME", "-o", "-", "--coarse"]) },
    Watcher { name: "trace-unread", way: Way::Unread },
    Watcher { name: "scraper", way: Way::Scraper },
    Watcher { name: "stat", way: Way::Command(&["stat", "-x", "-l", "NAME", "1"]) },
    Watcher { name: "page", way: Way::Page { addresses: false } },
    Watcher { name: "page-addresses", way: Way::Page { addresses: true } },
    Watcher { name: "top", way: Way::Command(&["top", "-b", "-d", "1"]) },
];

/// One that is there.
pub(crate) enum Watching {
    Nobody,
    Program { child: Child, is_trace: bool },
    Thread { stop: Arc<AtomicBool>, thread: JoinHandle<std::io::Result<()>> },
}

impl Watcher {
    /// A device with a page is there for the page; the others have none.
    pub(crate) fn watches(&self, device: &Served) -> bool {
        match self.way {
            Way::Nothing => true,
            Way::Page { .. } => device.page.is_some(),
            _ => device.page.is_none(),
        }
    }

    pub(crate) fn come(&self, device: &Served) -> Result<Watching> {
        match self.way {
            Way::Nothing => Ok(Watching::Nobody),
            Way::Command(words) => program(device, words, Stdio::null()),
            Way::Unread => program(device, &["trace", "NAME", "-o", "-"], Stdio::piped()),
            Way::Scraper => {
                let socket = device.folder.join(format!("{}.control", device.name));
                Ok(beside(move |stop| scrape(&socket, stop)))
            }
            Way::Page { addresses } => {
                let page = device.page.clone().ok_or_else(|| Error(format!("{}: no page", device.name)))?;
                let more = if addresses { "&addresses" } else { "" };
                let path = format!("/events?device={}{more}", device.name);
                Ok(beside(move |stop| look_at(&page, &path, stop)))
            }
        }
    }
}

fn beside(work: impl FnOnce(&AtomicBool) -> std::io::Result<()> + Send + 'static) -> Watching {
    let stop = Arc::new(AtomicBool::new(false));
    let until = stop.clone();
    Watching::Thread { stop, thread: std::thread::spawn(move || work(&until)) }
}

/// Takes what a page takes.
fn look_at(page: &str, path: &str, stop: &AtomicBool) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(page)?;
    stream.set_read_timeout(Some(Duration::from_millis(50)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {page}\r\nAccept: text/event-stream\r\n\r\n")?;
    let (mut bytes, mut begin) = ([0; 1 << 16], Vec::new());
    while !stop.load(Relaxed) {
        match stream.read(&mut bytes) {
            Ok(0) => return Err(std::io::Error::other("the page ended")),
            Ok(count) if begin.len() < 12 => begin.extend(&bytes[..count.min(12)]),
            Ok(_) => {}
            Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(why) => return Err(why),
        }
    }
    if begin.starts_with(b"HTTP/1.1 200") {
        Ok(())
    } else {
        Err(std::io::Error::other("the page was refused"))
    }
}

fn program(device: &Served, words: &[&str], stdout: Stdio) -> Result<Watching> {
    let words = words.iter().map(|word| if *word == "NAME" { device.name } else { word });
    let mut command = Command::new(blockyard()?);
    command.args(words).env("BLOCKYARD_RUN", &device.folder);
    command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    let is_trace = command.get_args().next().is_some_and(|word| word == "trace");
    let child = command.spawn().map_err(Error::at(Path::new("blockyard")))?;
    Ok(Watching::Program { child, is_trace })
}

fn scrape(socket: &PathBuf, stop: &AtomicBool) -> std::io::Result<()> {
    let mut answer = Vec::new();
    while !stop.load(Relaxed) {
        let mut stream = UnixStream::connect(socket)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: blockyard\r\nConnection: close\r\n\r\n")?;
        answer.clear();
        stream.read_to_end(&mut answer)?;
        if !answer.ends_with(b"# EOF\n") && !answer.windows(5).any(|bytes| bytes == b"# EOF") {
            return Err(std::io::Error::other("an answer without an end"));
        }
        std::thread::park_timeout(SCRAPE);
    }
    Ok(())
}

impl Watching {
    /// Ends it; of a trace, the share of events that were dropped.
    pub(crate) fn go(self) -> Result<Option<f64>> {
        match self {
            Watching::Nobody => Ok(None),
            Watching::Thread { stop, thread } => {
                stop.store(true, Relaxed);
                thread.thread().unpark();
                let ended = thread.join().map_err(|_| Error("the watcher panicked".into()))?;
                ended.map_err(|error| Error(format!("watching failed: {error}"))).map(|()| None)
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
                Ok(is_trace.then(|| dropped(&text)).flatten())
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

/// From `NAME: queue 0: 123 events, 4 dropped`.
fn dropped(said: &str) -> Option<f64> {
    let mut sums = [0.0, 0.0];
    for line in said.lines().filter(|line| line.contains(": queue ")) {
        let mut numbers =
            line.rsplit(": ").next()?.split([' ', ',']).filter_map(|word| word.parse::<f64>().ok());
        for sum in &mut sums {
            *sum += numbers.next()?;
        }
    }
    let all = sums[0] + sums[1];
    (all > 0.0).then(|| sums[1] / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_trace_says_of_dropped_events_is_understood() {
        let said = "null: queue 0: 300 events, 100 dropped\nnull: queue 1: 400 events, 0 dropped\n";
        assert_eq!(dropped(said), Some(0.125));
        assert_eq!(dropped("nothing"), None);
    }
}
