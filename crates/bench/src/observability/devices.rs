//! The observed devices, and the load on them.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::Sample;
use crate::error::{Error, Result};
use crate::nbd::client::{Connection, Count, Load, Pattern};

/// Time for a load to become steady, and for a watcher to start.
const WARM_UP: Duration = Duration::from_millis(250);
const DEPTH: usize = 32;
const LEN: u32 = 4096;

/// A device of the benchmark.
pub(crate) struct Device {
    pub(crate) name: &'static str,
    stack: &'static str,
    /// Whether the process serves a web page.
    pub(crate) paged: bool,
}

/// A null device, whose requests cost least; a file in memory, the usual backend of NBD; and both with a
/// page.
pub(crate) const DEVICES: [Device; 4] = [
    Device { name: "null", stack: "null:1G", paged: false },
    Device { name: "file", stack: "file:file.img,size=1G,create", paged: false },
    Device { name: "paged-null", stack: "null:1G", paged: true },
    Device { name: "paged-file", stack: "file:file.img,size=256M,create", paged: true },
];

/// A served device; its server ends when this is dropped.
pub(crate) struct Served {
    pub(crate) name: &'static str,
    /// Folder of its sockets and its file, which is also its run directory.
    pub(crate) folder: PathBuf,
    /// Address of its page, `127.0.0.1:PORT`.
    pub(crate) page: Option<String>,
    child: Child,
}

/// Returns the measured program: beside this one, or `BLOCKYARD_BIN`.
pub(crate) fn blockyard() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("BLOCKYARD_BIN") {
        return std::path::absolute(path).map_err(Error::at(Path::new("BLOCKYARD_BIN")));
    }
    let own = std::env::current_exe().map_err(Error::at(Path::new("the bench itself")))?;
    Ok(own.with_file_name("blockyard"))
}

impl Device {
    pub(crate) fn serve(&'static self) -> Result<Served> {
        let base =
            if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
        let folder = base.join(format!("blockyard-bench.{}.{}", std::process::id(), self.name));
        std::fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
        let mut command = Command::new(blockyard()?);
        command.args(["serve", self.stack, "--name", self.name, "--queues", "1", "--nbd", "unix:disk.sock"]);
        if self.paged {
            command.args(["--web", "127.0.0.1:0", "--web-token", "none"]);
        }
        command.current_dir(&folder).env("BLOCKYARD_RUN", &folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn().map_err(Error::at(Path::new("blockyard")))?;
        let mut served = Served { name: self.name, folder, page: None, child };
        let stdout = served.child.stdout.take().ok_or_else(|| Error("no output".into()))?;
        for line in BufReader::new(stdout).lines().take(if self.paged { 2 } else { 1 }) {
            let line = line.map_err(Error::at(Path::new("blockyard")))?;
            if let Some((_, page)) = line.split_once(" web http://") {
                served.page = page.split('/').next().map(str::to_owned);
            }
        }
        if !served.folder.join("disk.sock").exists() || served.page.is_some() != self.paged {
            return Err(Error(format!("{}: it is not served", self.stack)));
        }
        Ok(served)
    }
}

impl Served {
    /// Runs the load, and measures it for `time`.
    pub(crate) fn under_load(&self, time: Duration) -> Result<Sample> {
        let socket = self.folder.join("disk.sock");
        let connection = Connection::open(&socket, self.name).map_err(Error::at(&socket))?;
        let (count, stop) = (Count::default(), AtomicBool::new(false));
        let load = Load { pattern: Pattern::RandomMixed, block: LEN, depth: DEPTH, seed: 1 };
        std::thread::scope(|scope| {
            let client = scope.spawn(|| {
                let ended = connection.run(load, &stop, &count.0);
                stop.store(true, Relaxed);
                ended
            });
            std::thread::sleep(WARM_UP);
            let begin = (Instant::now(), count.0.load(Relaxed), self.thread_time()?);
            while begin.0.elapsed() < time && !stop.load(Relaxed) {
                std::thread::sleep(Duration::from_millis(20).min(time.saturating_sub(begin.0.elapsed())));
            }
            let requests = (count.0.load(Relaxed) - begin.1).max(1) as f64;
            let (seconds, thread) =
                (begin.0.elapsed().as_secs_f64(), self.thread_time()?.saturating_sub(begin.2));
            stop.store(true, Relaxed);
            let ended = client.join().map_err(|_| Error("the client panicked".into()))?;
            ended.map_err(|error| Error(format!("{}: {error}", self.name)))?;
            Ok(Sample {
                rate: requests / seconds,
                thread_us: thread.as_secs_f64() * 1e6 / requests,
                ..Sample::default()
            })
        })
    }

    /// Returns the processor time of the serving thread.
    fn thread_time(&self) -> Result<Duration> {
        let tasks = PathBuf::from(format!("/proc/{}/task", self.child.id()));
        let mut total = 0;
        for task in std::fs::read_dir(&tasks).map_err(Error::at(&tasks))?.flatten() {
            let text = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            if text("comm").starts_with("reactor-") {
                total += text("schedstat")
                    .split(' ')
                    .next()
                    .and_then(|word| word.parse::<u64>().ok())
                    .unwrap_or(0);
            }
        }
        if total == 0 {
            return Err(Error(format!("{}: no thread serves it", self.name)));
        }
        Ok(Duration::from_nanos(total))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
