//! Setup that the control plane passes for a session and its connections, and counters that it reads.

use super::exchange::Exchange;
use proto::iscsi::parameters::{ConnectionParameters, Parameters};
use proto::iscsi::sequence::CommandWindow;
use queue::QueueId;
use scsi::{Lun, Nexus};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Number of a session on a reactor. It is not reused while the session exists.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SessionId(pub u32);

/// Number of a connection on a reactor. It is not reused while the connection exists.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ConnectionId(pub u32);

/// A logical unit of a session.
#[derive(Clone, Debug)]
pub struct LunSetup {
    /// The number that the initiator uses.
    pub lun: Lun,
    /// The queue of the device, which this front-end serves. Several LUNs may share a queue.
    pub queue: QueueId,
    /// The nexus of the session with the logical unit. The control plane attached it, and detaches it when
    /// the session or the LUN is gone.
    pub nexus: Arc<Nexus>,
}

/// Answers SendTargets in the full feature phase. It receives the value of the key (`All`, a name, or
/// empty) and returns the text (`TargetName=…\0TargetAddress=…\0…`), or `None` if the value is not
/// permitted here.
pub type SendTargets = Arc<dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync>;

/// Intervals of the pings with which the target detects dead initiators.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pings {
    /// Time of silence after which a connection gets a NOP-In.
    pub after: Duration,
    /// Time without an answer to it after which the connection is dropped.
    pub timeout: Duration,
}

/// Reasons why a session ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndReason {
    /// The initiator logged out.
    Logout,
    /// A connection was lost: at ErrorRecoveryLevel 0 the session is lost with it.
    ConnectionLost,
    /// The initiator violated the protocol, or a header digest was wrong.
    Protocol,
    /// The initiator did not answer a ping, or stalled in the middle of a PDU.
    Silent,
    /// The session held memory without progress while others waited for it.
    Evicted,
    /// The initiator logged in again with the same session name.
    Reinstated,
    /// The target, its portal group or the permission was removed, or the server is shutting down. The
    /// initiator is asked to log out first.
    Removed,
    /// The target was reset by TARGET COLD RESET.
    ColdReset,
    /// The control plane ended the session at once, without a message.
    Forced,
}

/// Called on the reactor's thread when a session is gone, with all of its commands.
pub type WhenGone = Box<dyn FnOnce(EndReason) + Send>;

/// A session after the login of its first connection.
pub struct SessionSetup {
    /// Number of the session in traces.
    pub number: u16,
    /// Name of the target. TARGET COLD RESET ends all sessions with this name.
    pub target: String,
    /// Parameters that the login negotiated.
    pub parameters: Parameters,
    /// LUNs of the session, in any order.
    pub luns: Vec<LunSetup>,
    /// Next expected CmdSN.
    pub exp_cmd_sn: u32,
    /// Maximum number of the session's commands in progress: the width of its CmdSN window. At least 1.
    pub queue_depth: u16,
    /// Answers SendTargets.
    pub send_targets: SendTargets,
    /// Intervals of pings; `None` disables them.
    pub pings: Option<Pings>,
    /// Connects the reactors, for task management and wake-ups.
    pub exchange: Arc<Exchange>,
    /// Counters for the control plane to read.
    pub counters: Arc<SessionCounters>,
    /// Called when the session is gone.
    pub when_gone: Option<WhenGone>,
}

/// A connection after its login.
pub struct ConnectionSetup {
    /// Connection identifier.
    pub cid: u16,
    /// Parameters that the login negotiated.
    pub parameters: ConnectionParameters,
    /// StatSN of the next status.
    pub stat_sn: u32,
    /// Called when the connection is gone.
    pub when_gone: Option<Box<dyn FnOnce() + Send>>,
}

/// Counters of a session. Only its reactor writes them, with plain stores.
#[derive(Default, Debug)]
pub struct SessionCounters {
    /// SCSI commands that ended.
    pub commands: AtomicU64,
    /// Bytes of data-in sent.
    pub bytes_read: AtomicU64,
    /// Bytes of data-out received.
    pub bytes_written: AtomicU64,
    /// Commands that ended with a status other than GOOD.
    pub errors: AtomicU64,
    /// Header or data segments with a wrong digest.
    pub digest_errors: AtomicU64,
    /// PDUs that were rejected.
    pub rejects: AtomicU64,
    /// Commands aborted by task management.
    pub aborts: AtomicU64,
    /// Commands in progress.
    pub in_progress: AtomicU64,
    /// Commands that waited for memory or a tag.
    pub waited: AtomicU64,
    /// ExpCmdSN and MaxCmdSN as of the last end of a command, for the logins of further connections.
    window: AtomicU64,
}

impl SessionCounters {
    /// Adds to a counter that only this thread writes.
    #[inline]
    pub(super) fn add(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
    }

    /// Records the window of the session.
    #[inline]
    pub(super) fn set_window(&self, window: &CommandWindow) {
        self.window.store(u64::from(window.expected()) << 32 | u64::from(window.max()), Relaxed);
    }

    /// Returns ExpCmdSN and MaxCmdSN as of the last end of a command: they may lag behind, but are never
    /// ahead. Returns `None` if the session has not been opened yet.
    pub fn window(&self) -> Option<(u32, u32)> {
        let both = self.window.load(Relaxed);
        (both != 0).then_some(((both >> 32) as u32, both as u32))
    }

    /// Returns all counters with their names.
    pub fn named(&self) -> [(&'static str, u64); 9] {
        [
            ("commands", self.commands.load(Relaxed)),
            ("bytes-read", self.bytes_read.load(Relaxed)),
            ("bytes-written", self.bytes_written.load(Relaxed)),
            ("errors", self.errors.load(Relaxed)),
            ("digest-errors", self.digest_errors.load(Relaxed)),
            ("rejects", self.rejects.load(Relaxed)),
            ("aborts", self.aborts.load(Relaxed)),
            ("in-progress", self.in_progress.load(Relaxed)),
            ("waited", self.waited.load(Relaxed)),
        ]
    }
}
