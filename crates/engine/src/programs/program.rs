//! A driver that speaks the exec protocol: its start, its connections, and its restarts.

use super::child::Running;
use crate::retry::{backoff, peer_log_limit};
use crate::spec::ProgramSpec;
use backends::exec::{Exec, ExecError, ExecSpec};
use backends::nbd::Loss;
use proto::exec::{READY_LEN, Ready, Refused, attach};
use ring::SharedMemory;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, send, sendmsg, socketpair,
};
use rustix::process::Signal;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Longest time from the start of a program to its answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Longest wait for a program to end by itself after its sockets were closed.
const GRACE: Duration = Duration::from_secs(1);

/// Why a program cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It cannot be started.
    #[error("exec:{command}: it cannot be started: {why}{hint}")]
    Start {
        /// The command.
        command: String,
        /// The cause.
        why: io::Error,
        /// A hint.
        hint: &'static str,
    },
    /// It ended before it answered.
    #[error("exec:{command}: it ended before it answered ({how})")]
    Ended {
        /// The command.
        command: String,
        /// Its exit status, and its last line.
        how: String,
    },
    /// It does not answer.
    #[error(
        "exec:{command}: it did not answer HELLO within {ANSWER:?} (does it speak the exec protocol on its \
         standard input? `blockyard exec-test` tells)"
    )]
    Silent {
        /// The command.
        command: String,
    },
    /// Its answer is refused.
    #[error("exec:{command}: {why}")]
    Refused {
        /// The command.
        command: String,
        /// The cause.
        why: Refused,
    },
    /// It cannot be a device, or not any more.
    #[error("exec:{command}: {why}")]
    Unusable {
        /// The command.
        command: String,
        /// The cause.
        why: ExecError,
    },
    /// A connection cannot be passed to it.
    #[error("exec:{command}: passing a connection to it failed: {why}")]
    Attach {
        /// The command.
        command: String,
        /// The cause.
        why: io::Error,
    },
    /// It has ended, and is not to be started again.
    #[error("exec:{command}: it has ended ({how}), and restart=off")]
    Over {
        /// The command.
        command: String,
        /// How it ended.
        how: String,
    },
}

/// A program that answered the hello.
struct Started {
    running: Running,
    control: OwnedFd,
}

/// State of a program, for `show`.
#[derive(Clone, Default)]
pub(super) struct Status {
    pub(super) pid: Option<u32>,
    pub(super) starts: u64,
    /// How the previous process ended, or why it was killed; empty before the first end.
    pub(super) last_end: String,
    /// Why there is no connection; empty while there is nothing wrong.
    pub(super) trouble: String,
}

/// The program of a device.
pub(super) struct Program {
    spec: ProgramSpec,
    exec: ExecSpec,
    device: Option<String>,
    started: Mutex<Option<Started>>,
    /// The first answer.
    first: OnceLock<Ready>,
    status: Mutex<Status>,
    log: Arc<crate::log_limit::LogLimit>,
    connections: std::sync::atomic::AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Program {
    /// Starts a program for the first time.
    pub(super) fn start(
        spec: &ProgramSpec,
        exec: ExecSpec,
        device: Option<&str>,
    ) -> Result<(Program, Ready), ProgramError> {
        let program = Program {
            spec: spec.clone(),
            exec,
            device: device.map(str::to_owned),
            started: Mutex::default(),
            first: OnceLock::new(),
            status: Mutex::default(),
            log: peer_log_limit(),
            connections: Default::default(),
        };
        let ready = program.run(&mut lock(&program.started))?;
        let _ = program.first.set(ready);
        Ok((program, ready))
    }

    fn command(&self) -> String {
        self.spec.command.clone()
    }

    /// Starts the program and performs the handshake.
    fn run(&self, started: &mut Option<Started>) -> Result<Ready, ProgramError> {
        let failed = |why: io::Error| {
            let hint = match why.kind() {
                io::ErrorKind::NotFound => " (is the path right? dir= names the directory it is relative to)",
                io::ErrorKind::PermissionDenied => " (is it executable?)",
                _ => "",
            };
            ProgramError::Start { command: self.command(), why, hint }
        };
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (control, theirs) = pair.map_err(|why| failed(why.into()))?;
        let timeouts = [(Timeout::Recv, ANSWER), (Timeout::Send, ANSWER)];
        for (which, time) in timeouts {
            set_socket_timeout(&control, which, Some(time)).map_err(|why| failed(why.into()))?;
        }
        let (device, argv) = (self.device.as_deref(), &self.spec.argv);
        let mut running =
            Running::start(argv, &self.spec, Stdio::from(theirs), device, &argv[0]).map_err(failed)?;
        {
            let mut status = lock(&self.status);
            (status.pid, status.starts) = (Some(running.id()), status.starts + 1);
        }
        let hello = Exec::hello(&self.exec);
        let mut answer = [0; READY_LEN + 1];
        let received = send(&control, &hello.encode(), SendFlags::NOSIGNAL)
            .and_then(|_| rustix::io::retry_on_intr(|| recv(&control, &mut answer, RecvFlags::empty())));
        let len = match received {
            Ok((len, _)) if len > 0 => len,
            Err(rustix::io::Errno::AGAIN) => {
                return Err(ProgramError::Silent { command: self.command() });
            }
            // The program closed its socket, as it does when it ends.
            _ => {
                let how = running
                    .ends_within(GRACE)
                    .unwrap_or_else(|| running.with_last_line("it closed its socket, but still runs"));
                return Err(ProgramError::Ended { command: self.command(), how });
            }
        };
        let ready = Ready::parse(&answer[..len], &hello)
            .map_err(|why| ProgramError::Refused { command: self.command(), why })?;
        if let Some(first) = self.first.get() {
            Exec::admits(first, &ready, self.exec.read_only)
                .map_err(|why| ProgramError::Unusable { command: self.command(), why })?;
        }
        *started = Some(Started { running, control });
        Ok(ready)
    }

    /// Passes a connection with that memory to the program, which is started if it does not run. Returns our
    /// end.
    pub(super) fn connect(&self, memory: &SharedMemory) -> Result<OwnedFd, ProgramError> {
        let mut started = lock(&self.started);
        if let Some(how) = started.as_mut().and_then(|started| started.running.ended()) {
            self.note_end(&how);
            *started = None;
        }
        if started.is_none() {
            if !self.spec.restart {
                let how = lock(&self.status).last_end.clone();
                return Err(ProgramError::Over { command: self.command(), how });
            }
            self.run(&mut started)?;
        }
        let Some(started) = &*started else {
            return Err(ProgramError::Silent { command: self.command() });
        };
        self.pass(&started.control, memory)
            .map_err(|why| ProgramError::Attach { command: self.command(), why })
    }

    fn pass(&self, control: &OwnedFd, memory: &SharedMemory) -> io::Result<OwnedFd> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let number = self.connections.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let message = attach(number, memory.len());
        let descriptors = [theirs.as_fd(), memory.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(control, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(ours)
    }

    /// Processes the loss of a connection: a program that ended is forgotten, one that hangs or violates the
    /// protocol is killed. One that merely closed the connection gets another.
    pub(super) fn lost(&self, loss: Loss) {
        let mut started = lock(&self.started);
        let Some(Started { running, .. }) = started.as_mut() else { return };
        let how = match loss {
            Loss::New => return,
            Loss::Closed | Loss::Failed(_) => running.ends_within(GRACE),
            Loss::Silent | Loss::Nonsense | Loss::ShuttingDown | Loss::Cancelled => {
                Some(running.with_last_line(&format!("ended by the host: {}", of_program(loss))))
            }
        };
        if let Some(how) = how {
            self.note_end(&how);
            *started = None;
        }
    }

    fn note_end(&self, how: &str) {
        let mut status = lock(&self.status);
        (status.pid, status.last_end) = (None, how.to_owned());
        drop(status);
        if self.log.admit_or_report(|_| {}) {
            tracing::warn!(device = self.device, program = self.spec.command, "the program has ended: {how}");
        }
    }

    /// Records why there is no connection, and logs it; an empty text: there is one.
    pub(super) fn trouble(&self, why: &str) {
        let is_new = std::mem::replace(&mut lock(&self.status).trouble, why.to_owned()) != why;
        if is_new && !why.is_empty() && self.log.admit_or_report(|_| {}) {
            tracing::warn!(device = self.device, "no connection to the program yet: {why}");
        }
    }

    /// Closes the control socket, and waits for the program's end.
    ///
    /// # Errors
    /// It does not end in that time.
    pub(super) fn end(self, limit: Duration) -> Result<(), String> {
        let Some(Started { mut running, control }) = lock(&self.started).take() else {
            return Err("it ended before it was asked to".to_owned());
        };
        drop(control);
        running.ends_within(limit).map(drop).ok_or_else(|| format!("it did not end within {limit:?}"))
    }

    /// Whether a program that has ended is started again.
    pub(super) fn restarts(&self) -> bool {
        self.spec.restart
    }

    /// Waits for the time at which the next attempt is due after that many failures in a row.
    pub(super) fn pause(failures: u32, is_over: impl Fn() -> bool) {
        let step = Duration::from_millis(20);
        let mut left = backoff(failures);
        while !left.is_zero() && !is_over() {
            std::thread::sleep(left.min(step));
            left = left.saturating_sub(step);
        }
    }

    pub(super) fn status(&self) -> Status {
        lock(&self.status).clone()
    }
}

/// Describes a loss, as that of a program.
fn of_program(loss: Loss) -> &'static str {
    match loss {
        Loss::Silent => "it left a request unanswered for too long",
        Loss::Nonsense => "it broke the protocol",
        Loss::Cancelled => "a request was given up",
        Loss::New | Loss::Closed | Loss::Failed(_) | Loss::ShuttingDown => "its connection was lost",
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let started = self.started.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Started { mut running, control }) = started else { return };
        // The end of its control socket asks it to end.
        drop(control);
        if running.ends_within(GRACE).is_none() {
            running.signal(Signal::TERM);
            let _ = running.ends_within(GRACE);
        }
    }
}
