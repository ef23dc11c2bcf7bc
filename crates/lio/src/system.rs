//! The interface to the devices and targets to which a configuration is applied.

use crate::config::{Change, Config, Facts, StorageObject, TargetId};

/// A connection of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connection {
    /// Connection identifier (CID), unique in the session.
    pub cid: u16,
    /// The initiator's address.
    pub address: String,
    /// The transport: `TCP`.
    pub transport: String,
    /// State of the connection: `LOGGED_IN`.
    pub state: String,
}

/// A session of an initiator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Session {
    /// Number of the session.
    pub id: u64,
    /// The initiator's alias.
    pub alias: String,
    /// The initiator's name.
    pub initiator: String,
    /// Name of the target.
    pub target: TargetId,
    /// The tag of its portal group.
    pub tag: u16,
    /// `Normal` or `Discovery`.
    pub kind: String,
    /// `LOGGED_IN`.
    pub state: String,
    /// Whether the initiator has authenticated.
    pub authenticated: bool,
    /// Connections of the session.
    pub connections: Vec<Connection>,
}

/// The result of an applied change.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Applied {
    /// The local block device of a LUN that was added to a loopback target.
    pub node: Option<String>,
}

/// The target of a configuration: the devices and targets of a process, or nothing.
pub trait System {
    /// Returns whether changes can be applied; otherwise a command that changes the configuration needs
    /// another process.
    fn can_change(&self) -> bool;

    /// Opens the device of a storage object.
    ///
    /// # Errors
    /// The reason why the device could not be opened; nothing is left behind.
    fn open(&mut self, object: &StorageObject) -> Result<Facts, String>;

    /// Applies a change other than [`Change::AddStorage`]. `config` is the configuration before the change.
    ///
    /// # Errors
    /// The reason why the change failed; nothing has changed.
    fn apply(&mut self, config: &Config, change: &Change) -> Result<Applied, String>;

    /// Lists the sessions.
    fn sessions(&self) -> Vec<Session>;

    /// Fills a buffer with random bytes.
    fn random(&mut self, bytes: &mut [u8]);

    /// Returns the name of this machine.
    fn host_name(&self) -> String;

    /// Checks whether a path is a block device that is read-only (`BLKROGET`). `None`: it is not a block device.
    fn block_device(&self, path: &str) -> Option<BlockDevice>;
}

/// A block device of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockDevice {
    /// Whether the block device is read-only.
    pub read_only: bool,
}

/// A system without devices: it leaves every change to another process.
#[derive(Clone, Copy, Default, Debug)]
pub struct Nothing;

impl System for Nothing {
    fn can_change(&self) -> bool {
        false
    }

    fn open(&mut self, _: &StorageObject) -> Result<Facts, String> {
        Err("no process serves the configuration".to_owned())
    }

    fn apply(&mut self, _: &Config, _: &Change) -> Result<Applied, String> {
        Err("no process serves the configuration".to_owned())
    }

    fn sessions(&self) -> Vec<Session> {
        Vec::new()
    }

    fn random(&mut self, bytes: &mut [u8]) {
        bytes.fill(0);
    }

    fn host_name(&self) -> String {
        String::new()
    }

    fn block_device(&self, _: &str) -> Option<BlockDevice> {
        None
    }
}
