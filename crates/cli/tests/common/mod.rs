//! Runs the real binary in a sandbox with its own run directory; servers and files are removed at the end.
//! Each test file uses a part of this module, so unused items are allowed.

#![allow(dead_code, unreachable_pub)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit of each wait, generous for machines that are busy with other tests or suspended for a while.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Exit status and output of a command.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub code: i32,
    pub out: String,
    pub err: String,
}

pub struct Sandbox {
    directory: tempfile::TempDir,
}

impl Sandbox {
    pub fn new() -> Sandbox {
        Sandbox { directory: tempfile::tempdir().expect("a directory for the test") }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the path of a file in the run directory.
    pub fn run(&self, name: &str) -> PathBuf {
        self.path().join("run").join(name)
    }

    /// Returns the names of the files in the run directory, sorted.
    pub fn run_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.run("")).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, content).expect("a file for the test");
        path
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        command
            .args(arguments)
            .current_dir(self.path())
            .env("BLOCKYARD_RUN", self.run(""))
            .env("BLOCKYARD_EXPORT", "nbd")
            .stdin(Stdio::null());
        command
    }

    /// Runs a command until it exits.
    pub fn ask(&self, arguments: &[&str]) -> Answer {
        let output = self.command(arguments).output().expect("the binary starts");
        Answer {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Runs a command that must succeed; returns its stdout.
    pub fn done(&self, arguments: &[&str]) -> String {
        let answer = self.ask(arguments);
        assert!(answer.code == 0 && answer.err.is_empty(), "{arguments:?}: {answer:?}");
        answer.out
    }

    /// Starts a command that serves, and waits for `lines` ready lines.
    pub fn serve(&self, arguments: &[&str], lines: usize) -> Served {
        Served::start(self.command(arguments), lines)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // Servers that a failed test left in the background must not outlive it.
        let _ = self.command(&["del", "--all"]).output();
    }
}

/// A server in the foreground.
pub struct Served {
    child: Child,
    pub ready: Vec<String>,
}

impl Served {
    pub fn start(mut command: Command, lines: usize) -> Served {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        let mut reader = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut ready = Vec::new();
        for _ in 0..lines {
            let mut line = String::new();
            reader.read_line(&mut line).expect("stdout is text");
            if line.is_empty() {
                let mut why = String::new();
                let _ = child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut why));
                panic!("ended before it was ready: {why}");
            }
            ready.push(line.trim_end().to_owned());
        }
        Served { child, ready }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Waits for the exit; returns the status and stderr.
    pub fn end(mut self) -> (i32, String) {
        let mut stderr = String::new();
        let pipe = self.child.stderr.take();
        let status = wait_for("the process to end", || self.child.try_wait().expect("it is our child"));
        let _ = pipe.map(|mut pipe| pipe.read_to_string(&mut stderr));
        use std::os::unix::process::ExitStatusExt;
        (status.code().unwrap_or_else(|| -status.signal().unwrap_or_default()), stderr)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // After `end` the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(status.expect("kill(1) exists").success());
}

/// Polls `ask` until it returns a value.
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A minimal NBD client: fixed newstyle negotiation, NBD_OPT_EXPORT_NAME, simple replies.
pub struct Nbd(UnixStream);

impl Nbd {
    pub fn connect(socket: &Path, export: &str) -> Nbd {
        let mut stream = UnixStream::connect(socket).expect("the export listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES, then NBD_OPT_EXPORT_NAME.
        let mut bytes = vec![0, 0, 0, 3];
        bytes.extend_from_slice(b"IHAVEOPT\0\0\0\x01");
        bytes.extend_from_slice(&(export.len() as u32).to_be_bytes());
        bytes.extend_from_slice(export.as_bytes());
        stream.write_all(&bytes).expect("an option");
        let mut size_and_flags = [0; 10];
        stream.read_exact(&mut size_and_flags).expect("the export's size");
        Nbd(stream)
    }

    /// Sends a request and returns the error of its simple reply.
    fn ask(&mut self, command: u16, offset: u64, len: u32, payload: &[u8]) -> u32 {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend_from_slice(&[0, 0]);
        request.extend_from_slice(&command.to_be_bytes());
        request.extend_from_slice(&7u64.to_be_bytes());
        request.extend_from_slice(&offset.to_be_bytes());
        request.extend_from_slice(&len.to_be_bytes());
        request.extend_from_slice(payload);
        self.0.write_all(&request).expect("a request");
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).expect("a reply");
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]])
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.ask(0, offset, len, &[]), 0);
        let mut data = vec![0; len as usize];
        self.0.read_exact(&mut data).expect("the data");
        data
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(self.ask(1, offset, data.len() as u32, data), 0);
    }

    pub fn flush(&mut self) {
        assert_eq!(self.ask(3, 0, 0, &[]), 0);
    }
}
