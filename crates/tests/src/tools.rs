//! Foreign programs in tests: whether they are installed, running them with a time limit.
//!
//! A test that lacks a tool or a permission calls [`skip`], which reports and counts it on stderr, bypassing
//! the test runner's capture; it never passes silently. If `CI` is set a missing *tool* fails the test,
//! because CI installs them all.
//!
//! *Invariant:* every wait here is bounded, and a program that exceeds it is killed.

use std::fmt;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Limit of every wait in tests. Far above the expected time, so that a busy or briefly stopped machine fails
/// no test; a program that hangs exceeds any limit.
pub const PATIENCE: Duration = Duration::from_secs(120);

static SKIPPED: AtomicUsize = AtomicUsize::new(0);

/// Reports that the calling test is skipped, and why. The caller must return.
pub fn skip(why: impl fmt::Display) {
    let count = SKIPPED.fetch_add(1, Relaxed) + 1;
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // Written directly: the runner prints `eprintln!` of failed tests only.
    let line = format!("skipped: {name}: {why} ({count} skipped in this program)\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns the path of a program: in `PATH`, or in Debian's folders for root.
pub fn find(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(tool)).find(|file| file.is_file())
}

/// Returns whether one of the tools is missing: then the calling test is skipped and must return.
///
/// # Panics
/// In CI, where all are installed.
pub fn missing(tools: &[&str]) -> bool {
    let lacking: Vec<&str> = tools.iter().copied().filter(|tool| find(tool).is_none()).collect();
    lacks(&lacking.join(", "))
}

/// The Python with libnbd's bindings: the system's, whatever else is in `PATH`.
pub const PYTHON: &str = "/usr/bin/python3";

/// As [`missing`], for libnbd's Python bindings.
pub fn missing_libnbd() -> bool {
    let mut probe = Command::new(PYTHON);
    probe.args(["-c", "import nbd"]);
    let there = PathBuf::from(PYTHON).is_file() && run(&mut probe).status.success();
    lacks(if there { "" } else { "libnbd for /usr/bin/python3" })
}

fn lacks(what: &str) -> bool {
    if what.is_empty() {
        return false;
    }
    assert!(std::env::var_os("CI").is_none(), "{what}: not installed (./x install-deps)");
    skip(format_args!("{what}: not installed (./x install-deps)"));
    true
}

/// The result of a program.
#[derive(Debug)]
pub struct Outcome {
    /// The command line.
    pub command: String,
    /// The exit status.
    pub status: ExitStatus,
    /// The whole standard output.
    pub stdout: String,
    /// The whole standard error.
    pub stderr: String,
}

impl Outcome {
    /// Returns its standard output.
    ///
    /// # Panics
    /// If it did not succeed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.status.success(), "{self}");
        self.stdout
    }

    /// Returns its standard error.
    ///
    /// # Panics
    /// If it did not end with this status.
    #[track_caller]
    pub fn failed_with(self, code: i32) -> String {
        assert_eq!(self.status.code(), Some(code), "{self}");
        self.stderr
    }

    /// Returns its standard error.
    ///
    /// # Panics
    /// If it succeeded, or was killed.
    #[track_caller]
    pub fn failed(self) -> String {
        assert!(self.status.code().is_some_and(|code| code != 0), "{self}");
        self.stderr
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.command, self.status)?;
        write!(f, "--- stdout\n{}--- stderr\n{}", self.stdout, self.stderr)
    }
}

/// Raises the limit of open files of this process and its children to the maximum: for tests with many
/// clients.
///
/// # Panics
/// If the limit cannot be raised so far.
pub fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .expect("it may rise to its maximum");
}

/// Returns a command of these arguments.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(find(arguments[0]).unwrap_or_else(|| arguments[0].into()));
    command.args(&arguments[1..]);
    command
}

/// Runs a program to its end with an empty standard input; [`PATIENCE`] is its limit.
///
/// # Panics
/// If it cannot be started, or takes too long.
#[track_caller]
pub fn run(command: &mut Command) -> Outcome {
    run_within(command, PATIENCE)
}

/// As [`run`], with another limit.
///
/// # Panics
/// If it cannot be started, or takes too long.
#[track_caller]
pub fn run_within(command: &mut Command, limit: Duration) -> Outcome {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|why| panic!("{line}: {why}"));
    let stdout = gather(child.stdout.take());
    let stderr = gather(child.stderr.take());
    let status = wait_within(&mut child, limit).unwrap_or_else(|| panic!("{line}: not done in {limit:?}"));
    let text = |gathering: std::thread::JoinHandle<String>| gathering.join().unwrap_or_default();
    Outcome { command: line, status, stdout: text(stdout), stderr: text(stderr) }
}

fn gather(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // Output before an error is kept.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Waits for a child; kills it and returns `None` when it takes too long.
pub fn wait_within(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let status = until(limit, || child.try_wait().ok().flatten());
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    status
}

/// Calls `probe` repeatedly until it returns a value or `limit` has passed.
pub fn until<T>(limit: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        if let Some(answer) = probe() {
            return Some(answer);
        }
        if start.elapsed() > limit {
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// Runs a Python program with libnbd; `h` is a handle that is not connected yet, `uri` the address. Returns
/// its output.
///
/// # Panics
/// If it fails.
#[track_caller]
pub fn python(uri: &str, program: &str) -> String {
    const PROLOGUE: &str = "\
import errno, nbd, sys
uri = sys.argv[1]
h = nbd.NBD()

def fails(expected, call, *args, **keys):
    try:
        call(*args, **keys)
    except nbd.Error as error:
        assert error.errnum == expected, (error.string, error.errno, errno.errorcode[expected])
        return
    raise AssertionError('expected ' + errno.errorcode[expected])

def extents(h, length, offset, flags=0):
    found = []
    def f(context, at, entries, error):
        if context == nbd.CONTEXT_BASE_ALLOCATION:
            found.extend(zip(entries[0::2], entries[1::2]))
    h.block_status(length, offset, f, flags)
    return found

";
    run(Command::new(PYTHON).args(["-c", &format!("{PROLOGUE}{program}"), uri])).ok()
}
