//! The real binary under test, in an isolated environment.
//!
//! A [`Sandbox`] is a temporary folder that is also the run directory; a [`Server`] is `blockyard serve` or
//! `up` in it. The binary is `$BLOCKYARD_BIN`, else the one of this workspace, built if necessary.
//!
//! *Invariants:* no process outlives its sandbox, whatever the test's result. A server that a test did not
//! end itself is ended with SIGTERM and must exit with status 0: no test passes over a dead server.

use crate::tools::{PATIENCE, find, run, until, wait_within};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use tempfile::TempDir;

/// Returns the binary under test.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| match std::env::var_os("BLOCKYARD_BIN") {
        Some(path) => {
            let path = PathBuf::from(path);
            assert!(path.is_file(), "BLOCKYARD_BIN={}: there is no such file", path.display());
            path
        }
        None => built(),
    })
}

/// Returns whether it is optimised: limits on time and memory apply to such a binary only.
pub fn is_release() -> bool {
    binary().components().any(|part| part.as_os_str() == "release")
}

/// Returns the binary beside the test program, whose own path is `target/PROFILE/deps/NAME`.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("a test program knows its own path");
    let profile = test.parent().and_then(Path::parent).expect("cargo keeps test programs in deps");
    let path = profile.join("blockyard");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "--package", "blockyard"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    if profile.ends_with("release") {
        build.arg("--release");
    }
    // Built also if it exists, as it may be older than its source.
    crate::tools::run_within(&mut build, Duration::from_secs(600)).ok();
    assert!(path.is_file(), "{}: cargo did not build it", path.display());
    path
}

/// The server's interface to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Engine {
    /// The best one available.
    Auto,
    /// io_uring.
    IoUring,
    /// The fallback.
    Epoll,
}

impl Engine {
    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Auto => "auto",
            Engine::IoUring => "io_uring",
            Engine::Epoll => "epoll",
        }
    }
}

/// Turns each of these functions of an [`Engine`] into two tests, one for each engine.
#[macro_export]
macro_rules! on_both_engines {
    ($($test:ident),+ $(,)?) => {
        mod io_uring {
            $(#[test] fn $test() { super::$test($crate::server::Engine::IoUring) })+
        }
        mod epoll {
            $(#[test] fn $test() { super::$test($crate::server::Engine::Epoll) })+
        }
    };
}

/// A folder for one test, and the processes in it.
pub struct Sandbox {
    dir: TempDir,
    engine: Engine,
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new(Engine::Auto)
    }
}

impl Sandbox {
    /// Creates an empty sandbox.
    ///
    /// # Panics
    /// If there can be no temporary folder.
    pub fn new(engine: Engine) -> Sandbox {
        // It contains sockets, whose paths have at most 107 bytes, so TMPDIR is not used.
        let dir = tempfile::Builder::new().prefix("by-").tempdir_in("/tmp").expect("a folder in /tmp");
        Sandbox { dir, engine }
    }

    /// Returns the interface to the kernel of servers started here.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Returns a path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the run directory of all programs started here.
    pub fn run_dir(&self) -> PathBuf {
        self.path("run")
    }

    /// Returns the files in the run directory, once ending processes have ended. A process ends after its
    /// answer, so its files disappear a moment later.
    pub fn left_behind(&self) -> Vec<String> {
        let look = || -> Vec<String> {
            let entries = std::fs::read_dir(self.run_dir()).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        until(PATIENCE, || look().is_empty().then_some(()));
        look()
    }

    /// Creates a file of this many bytes, all of them a hole.
    ///
    /// # Panics
    /// If it cannot be created.
    pub fn image(&self, name: &str, len: u64) -> PathBuf {
        let path = self.path(name);
        File::create(&path).and_then(|file| file.set_len(len)).expect("a file in the sandbox");
        path
    }

    /// Creates a file with content that repeats nowhere within it.
    ///
    /// # Panics
    /// If it cannot be created.
    pub fn noise(&self, name: &str, len: usize) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, noise(len as u64, len)).expect("a file in the sandbox");
        path
    }

    /// Creates a file with this text.
    ///
    /// # Panics
    /// If it cannot be created.
    pub fn text(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).expect("a file in the sandbox");
        path
    }

    /// Returns a foreign program's command in the sandbox.
    pub fn tool(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(find(arguments[0]).unwrap_or_else(|| arguments[0].into()));
        command.args(&arguments[1..]);
        command
    }

    /// Returns a command of `program` in the sandbox: its environment, its folder.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command
            .current_dir(self.dir.path())
            .env("BLOCKYARD_RUN", self.run_dir())
            .env("BLOCKYARD_STATE", self.dir.path().join("state"))
            .env("BLOCKYARD_EXPORT", "nbd");
        command
    }

    /// Returns the binary's command with these arguments.
    pub fn blockyard(&self, arguments: &[&str]) -> Command {
        let mut command = self.command(binary());
        command.args(arguments);
        command
    }

    /// Runs the binary to its end.
    ///
    /// # Panics
    /// If it takes too long.
    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> crate::tools::Outcome {
        run(&mut self.blockyard(arguments))
    }

    /// Waits until `inflight` shows requests of a device that contain this text.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn await_in_flight(&self, device: &str, words: &str) {
        let there = || self.run(&["inflight", device]).ok().contains(words).then_some(());
        until(PATIENCE, there).unwrap_or_else(|| panic!("nothing of {device} is in flight, {words}"));
    }

    /// Serves a stack on a Unix socket, under the name `disk` unless `more` has a `--name`.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn serve(&self, stack: &str, more: &[&str]) -> Server {
        let socket = self.path("disk.sock");
        let export = format!("unix:{}", socket.display());
        let mut arguments = vec!["serve", stack, "--nbd", &export, "--ring", self.engine.name()];
        if !more.contains(&"--name") {
            arguments.extend(["--name", "disk"]);
        }
        arguments.extend(more);
        self.start(&mut self.blockyard(&arguments), 1)
    }

    /// Returns the number of turns of all I/O threads of the server of a device.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn turns(&self, device: &str) -> u64 {
        let socket = self.run_dir().join(format!("{device}.control"));
        let mut stream = UnixStream::connect(socket).expect("a control socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("metrics");
        let counts = answer.lines().filter(|line| line.starts_with("blockyard_reactor_turns_total{"));
        let counts: Vec<u64> = counts
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(_, count)| count.parse().expect("a number"))
            .collect();
        assert!(!counts.is_empty(), "{answer}");
        counts.iter().sum()
    }

    /// Serves a topology.
    ///
    /// # Panics
    /// If it does not start with this many exports.
    #[track_caller]
    pub fn up(&self, topology: &str, exports: usize) -> Server {
        let file = self.text("topology.toml", &format!("ring = \"{}\"\n{topology}", self.engine.name()));
        self.start(&mut self.blockyard(&["up", &file.to_string_lossy()]), exports)
    }

    /// Starts a server and waits until it has printed `exports` exports.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn start(&self, command: &mut Command, exports: usize) -> Server {
        self.start_with(command, Stdio::null(), exports)
    }

    /// Starts a server with a standard input.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn start_with(&self, command: &mut Command, stdin: Stdio, exports: usize) -> Server {
        let log = tempfile::NamedTempFile::new_in(self.dir.path()).expect("a file in the sandbox");
        let log = log.into_temp_path().keep().expect("a file in the sandbox");
        let stderr = File::create(&log).expect("a file in the sandbox");
        command.stdin(stdin).stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().unwrap_or_else(|why| panic!("{}: {why}", binary().display()));
        let lines = lines_of(child.stdout.take().expect("stdout is a pipe"));
        let mut server = Server { child, log, lines, ready: Vec::new(), ended: None };
        for _ in 0..exports {
            let line = server.next_line().unwrap_or_else(|why| panic!("no line on stdout: {why}"));
            server.ready.push(line);
        }
        server
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Ends servers that `add` started in the background, and removes their mounts.
        for entry in std::fs::read_dir(self.run_dir()).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.strip_prefix("control."));
            if let Some(pid) = pid.and_then(|pid| pid.parse().ok())
                && is_ours(pid)
            {
                signal(pid, Signal::KILL);
            }
        }
        crate::mounts::release_within(self.dir.path());
    }
}

/// Returns whether the process is the binary under test, and not another one with the PID of a dead one.
fn is_ours(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("blockyard")
}

/// Returns whether a process runs; a zombie does not.
pub fn is_alive(pid: u32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    text.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Sends a signal.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

fn lines_of(pipe: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// A running server.
pub struct Server {
    child: Child,
    log: PathBuf,
    lines: Receiver<String>,
    /// The lines about its exports.
    ready: Vec<String>,
    /// Its exit status, once a test has ended it.
    ended: Option<ExitStatus>,
}

impl Server {
    /// Returns its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns its lines on stdout, one for each export.
    pub fn ready(&self) -> &[String] {
        &self.ready
    }

    /// Returns the URI of its first export.
    pub fn uri(&self) -> &str {
        self.uri_of(0)
    }

    /// Returns the URI of one of its exports.
    pub fn uri_of(&self, number: usize) -> &str {
        let line = &self.ready[number];
        line.split(' ').nth(2).unwrap_or_else(|| panic!("not `NAME EXPORT ADDRESS`: {line}"))
    }

    /// Returns the Unix socket of its first export.
    pub fn socket(&self) -> PathBuf {
        let uri: proto::nbd::Uri = self.uri().parse().expect("the server prints a URI");
        match uri.server {
            proto::nbd::uri::Server::Unix(path) => path,
            proto::nbd::uri::Server::Tcp { .. } => panic!("{}: not a Unix socket", self.uri()),
        }
    }

    /// Waits for this text on stderr and returns all of stderr. A thread of its own writes the log, so a line
    /// may arrive after the answer that followed it.
    ///
    /// # Panics
    /// If it does not arrive.
    #[track_caller]
    pub fn await_log(&self, words: &str) -> String {
        let found = until(PATIENCE, || Some(self.log()).filter(|log| log.contains(words)));
        found.unwrap_or_else(|| panic!("\"{words}\" is not in the log:\n{}", self.log()))
    }

    /// Returns its stderr so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn next_line(&mut self) -> Result<String, String> {
        self.lines.recv_timeout(PATIENCE).map_err(|why| match why {
            RecvTimeoutError::Timeout => format!("not in {PATIENCE:?}; stderr:\n{}", self.log()),
            RecvTimeoutError::Disconnected => {
                format!("it ended ({:?}); stderr:\n{}", wait_within(&mut self.child, PATIENCE), self.log())
            }
        })
    }

    /// Sends it a signal.
    pub fn signal(&self, which: Signal) {
        signal(self.pid(), which);
    }

    /// Stops it until [`Signal::CONT`]: waits until all of its threads are stopped.
    ///
    /// # Panics
    /// If they do not stop.
    #[track_caller]
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid());
        let is_stopped = |task: &Path| {
            let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(')').is_none_or(|(_, fields)| fields.trim_start().starts_with('T'))
        };
        until(PATIENCE, || {
            let mut tasks = std::fs::read_dir(&tasks).ok()?.flatten();
            tasks.all(|task| is_stopped(&task.path())).then_some(())
        })
        .expect("it stops");
    }

    /// Returns whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end, which a signal or a request has caused.
    ///
    /// # Panics
    /// If it does not end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let Some(status) = wait_within(&mut self.child, PATIENCE) else {
            panic!("the server did not end in {PATIENCE:?}; stderr:\n{}", self.log());
        };
        self.ended = Some(status);
        status
    }

    /// Sends SIGTERM and checks its end.
    ///
    /// # Panics
    /// If it does not end with status 0.
    #[track_caller]
    pub fn terminate(&mut self) {
        self.signal(Signal::TERM);
        let status = self.wait();
        assert!(status.success(), "after SIGTERM: {status}; stderr:\n{}", self.log());
    }

    /// Sends SIGTERM to a server with a device that cannot be flushed.
    ///
    /// # Panics
    /// If it does not end with status 1 and name the device.
    #[track_caller]
    pub fn terminate_after_failed_flush(&mut self, device: &str) {
        self.signal(Signal::TERM);
        let (status, log) = (self.wait(), self.log());
        let found =
            log.lines().any(|line| line.contains(&format!("failed: {device}: the last flush failed")));
        assert!(status.code() == Some(1) && found, "{status}; stderr:\n{log}");
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.ended = self.child.wait().ok();
    }

    /// Returns its resident memory in bytes.
    pub fn resident(&self) -> u64 {
        self.status_field("VmRSS") * 1024
    }

    /// Returns its resident anonymous memory in bytes.
    pub fn anonymous(&self) -> u64 {
        self.status_field("RssAnon") * 1024
    }

    /// Returns its resident shared memory in bytes: that of guests, for example.
    pub fn shared(&self) -> u64 {
        self.status_field("RssShmem") * 1024
    }

    /// Returns its pinned memory, as registered with io_uring, in bytes.
    pub fn pinned(&self) -> u64 {
        self.status_field("VmPin") * 1024
    }

    /// Returns the number of its open file descriptors.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    fn status_field(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.unwrap_or_else(|| panic!("the server is gone; stderr:\n{}", self.log()))
    }

    /// Returns the CPU time of all of its threads in nanoseconds, by the scheduler's account.
    pub fn cpu_ns(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
        tasks
            .filter_map(|task| {
                let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
                text.split(' ').next()?.parse::<u64>().ok()
            })
            .sum()
    }

    /// Checks that it serves: a client connects to the export `name` and reads its first bytes.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn check_health(&mut self, name: &str) {
        assert!(self.is_running(), "the server has ended; stderr:\n{}", self.log());
        let mut peer = crate::peer::Peer::connect(&self.socket(), name);
        if let Err(error) = peer.read(0, 4096) {
            panic!("the server does not read any more: {error}; stderr:\n{}", self.log());
        }
        peer.disconnect();
    }

    /// Waits until it uses no more CPU time: all work caused by clients is done.
    pub fn settle(&self) {
        let mut last = self.cpu_ns();
        until(PATIENCE, || {
            std::thread::sleep(Duration::from_millis(100));
            let now = self.cpu_ns();
            let idle = now == last;
            last = now;
            idle.then_some(())
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        if std::thread::panicking() {
            eprintln!("--- stderr of the server:\n{}", self.log());
            self.kill();
            return;
        }
        self.terminate();
    }
}

/// Returns `len` random bytes that depend only on the seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Returns whether root is required and missing; then the test is skipped.
pub fn missing_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        crate::tools::skip("only root may do this");
    }
    !root
}

/// Returns the command prefix that starts a program in a mount namespace of its own; `None` where that is not
/// allowed.
pub fn private_mounts() -> Option<Vec<&'static str>> {
    find("unshare")?;
    let as_root = rustix::process::geteuid().is_root();
    let mut words = vec!["unshare", "--mount", "--propagation", "slave"];
    words.extend((!as_root).then_some("--map-root-user"));
    let mut probe = crate::tools::command(&words);
    probe.args(["mount", "-t", "tmpfs", "none", "/mnt"]);
    run(&mut probe).status.success().then_some(words)
}
