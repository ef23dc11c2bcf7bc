//! An `exec:` device: its program, and the connections of its queues.

use super::program::{Program, ProgramError};
use crate::spec::ProgramSpec;
use backends::exec::{Exec, ExecSpec, SLOT_LEN, SLOTS};
use backends::nbd::{Connected, ConnectionChannel, Connector, Loss, ServerTimeouts};
use backends::{Backend, Fact, Features};
use block::{Bytes, QueueLimits};
use ring::SharedMemory;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The connector of a queue's node.
type ExecConnections = Arc<dyn Connector<OwnedFd, ()>>;

/// An `exec:` device.
pub(crate) struct ExecDevice {
    exec: Exec,
    program: Arc<Program>,
}

impl ExecDevice {
    /// Starts the program, and waits for its answer.
    ///
    /// # Errors
    /// It cannot be started, or does not answer as the protocol demands.
    pub(crate) fn open(spec: &ProgramSpec, device: Option<&str>) -> Result<ExecDevice, ProgramError> {
        let exec = ExecSpec {
            command: spec.command.clone(),
            timeouts: ServerTimeouts { timeout: spec.timeout, reconnect: spec.reconnect },
            read_only: spec.ro,
        };
        let (program, ready) = Program::start(spec, exec.clone(), device)?;
        let exec = Exec::new(exec, ready)
            .map_err(|why| ProgramError::Unusable { command: spec.command.clone(), why })?;
        Ok(ExecDevice { exec, program: Arc::new(program) })
    }

    pub(crate) fn exec(&self) -> &Exec {
        &self.exec
    }

    /// Creates the shared memory of a queue, and the connector of its node.
    pub(crate) fn connection(&self) -> io::Result<(Arc<SharedMemory>, ExecConnections)> {
        let memory = SharedMemory::create(SLOTS as usize * SLOT_LEN as usize)?;
        let connector = ExecConnector { program: self.program.clone(), memory: memory.clone() };
        Ok((memory, Arc::new(connector)))
    }
}

/// Connects one queue.
struct ExecConnector {
    program: Arc<Program>,
    memory: Arc<SharedMemory>,
}

impl Connector<OwnedFd, ()> for ExecConnector {
    fn connect(&self, channel: Arc<ConnectionChannel<OwnedFd, ()>>, loss: Loss) {
        let (program, memory, on) = (self.program.clone(), self.memory.clone(), channel.clone());
        let thread = std::thread::Builder::new().name("exec-connect".to_owned());
        // Starting a program takes a while, which the thread of the queue must not wait for.
        let started = thread.spawn(move || connect_and_deliver(&program, &memory, &on, loss));
        if let Err(error) = started {
            channel.count_failure();
            self.program.trouble(&format!("no thread can be started: {error}"));
        }
    }
}

fn connect_and_deliver(
    program: &Program,
    memory: &SharedMemory,
    channel: &ConnectionChannel<OwnedFd, ()>,
    loss: Loss,
) {
    program.lost(loss);
    while !channel.is_closed() {
        Program::pause(channel.failures(), || channel.is_closed());
        if channel.is_closed() {
            return;
        }
        match program.connect(memory) {
            Ok(stream) => {
                program.trouble("");
                // If the node no longer exists, our end is dropped, which closes the connection to the
                // program.
                let _ = channel.deliver(Connected { stream, session: () });
                return;
            }
            Err(why) => {
                channel.count_failure();
                program.trouble(&why.to_string());
                if !program.restarts() {
                    return;
                }
            }
        }
    }
}

impl Backend for ExecDevice {
    fn size(&self) -> Bytes {
        self.exec.size()
    }

    fn read_only(&self) -> bool {
        self.exec.read_only()
    }

    fn features(&self) -> Features {
        self.exec.features()
    }

    fn limits(&self) -> QueueLimits {
        self.exec.limits()
    }

    fn describe(&self) -> Vec<Fact> {
        let mut facts = self.exec.describe();
        let status = self.program.status();
        let or_none = |text: String| if text.is_empty() { "none".to_owned() } else { text };
        facts.push(("program", status.pid.map_or("none".to_owned(), |pid| pid.to_string())));
        facts.push(("starts", status.starts.to_string()));
        facts.push(("last end", or_none(status.last_end)));
        facts.push(("trouble", or_none(status.trouble)));
        facts
    }
}
