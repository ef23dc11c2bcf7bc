//! The control plane's records of the sessions of a process.
//!
//! A session is added when its login is complete, and removed after its reactor has released it.

use super::tree::{GroupId, VisibleLun};
use exports::iscsi::{SessionCounters, SessionId};
use proto::iscsi::login::Existing;
use proto::iscsi::parameters::{ConnectionParameters, Parameters};
use proto::iscsi::pdu::Isid;
use queue::QueueId;
use scsi::{Nexus, NexusName};
use spec::PortalAddress;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// A connection of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectionInfo {
    /// Connection identifier, which the initiator chose.
    pub cid: u16,
    /// The initiator's address.
    pub peer: SocketAddr,
    /// The address of this machine that it connected to.
    pub local: SocketAddr,
    /// The portal at which it connected.
    pub portal: PortalAddress,
    /// Negotiated digests and segment lengths.
    pub parameters: ConnectionParameters,
}

/// A session, for `show`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionInfo {
    /// Number of the session in this process; numbers are not reused.
    pub id: u64,
    /// Target session identifying handle.
    pub tsih: u16,
    /// The portal group; `None`: a discovery session.
    pub group: Option<GroupId>,
    /// The initiator's name.
    pub initiator: String,
    /// The initiator's alias, if it has one.
    pub alias: Option<String>,
    /// Initiator session identifier.
    pub isid: Isid,
    /// The name by which the initiator authenticated itself.
    pub user: Option<String>,
    /// Negotiated parameters.
    pub parameters: Parameters,
    /// Open connections of the session.
    pub connections: Vec<ConnectionInfo>,
    /// The LUNs that it sees.
    pub luns: Vec<VisibleLun>,
    /// Counters of its commands and bytes.
    pub counts: SessionCounts,
}

/// Counters of a session at one moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct SessionCounts {
    /// SCSI commands.
    pub commands: u64,
    /// Bytes sent to the initiator.
    pub read_bytes: u64,
    /// Bytes received from the initiator.
    pub written_bytes: u64,
    /// PDUs and data segments with a wrong digest.
    pub digest_errors: u64,
    /// Rejected PDUs.
    pub rejects: u64,
    /// Commands that ended with another status than GOOD.
    pub errors: u64,
    /// Commands that were aborted.
    pub aborts: u64,
    /// Commands in progress.
    pub in_progress: u64,
    /// Commands that waited for memory or a tag.
    pub waited: u64,
}

impl SessionCounts {
    /// Returns the counters with their names.
    pub fn named(self) -> [(&'static str, u64); 9] {
        [
            ("commands", self.commands),
            ("bytes-read", self.read_bytes),
            ("bytes-written", self.written_bytes),
            ("errors", self.errors),
            ("digest-errors", self.digest_errors),
            ("rejects", self.rejects),
            ("aborts", self.aborts),
            ("in-progress", self.in_progress),
            ("waited", self.waited),
        ]
    }

    fn of(counters: &SessionCounters) -> SessionCounts {
        SessionCounts {
            commands: counters.commands.load(Relaxed),
            read_bytes: counters.bytes_read.load(Relaxed),
            written_bytes: counters.bytes_written.load(Relaxed),
            digest_errors: counters.digest_errors.load(Relaxed),
            rejects: counters.rejects.load(Relaxed),
            errors: counters.errors.load(Relaxed),
            aborts: counters.aborts.load(Relaxed),
            in_progress: counters.in_progress.load(Relaxed),
            waited: counters.waited.load(Relaxed),
        }
    }
}

/// A LUN of a session: what its initiator sees, the nexus, and the queue of the device on its reactor.
#[derive(Clone)]
pub(super) struct SessionLun {
    pub(super) visible: VisibleLun,
    pub(super) nexus: Arc<Nexus>,
    pub(super) queue: QueueId,
    /// The LUN counter of the queue. If the queue has another counter now, it belongs to another device.
    pub(super) clients: Arc<AtomicU32>,
}

/// The reactor's part of a session, shared with the closures that are sent there.
#[derive(Default)]
pub(super) struct ReactorSession {
    /// The reactor's number of the session, once it is open.
    pub(super) id: OnceLock<SessionId>,
    /// Set on the reactor's thread when the session has ended; another session may have its number then.
    pub(super) is_gone: AtomicBool,
    /// Held while the session's LUNs are changed.
    pub(super) changing: tokio::sync::Mutex<()>,
}

/// A session, from its complete login until its reactor has released it.
pub(super) struct Session {
    /// Static properties. Connections, LUNs and counters are empty here; they are added for [`SessionInfo`]
    /// copies.
    pub(super) info: SessionInfo,
    pub(super) reactor: usize,
    /// The initiator port and the target port of the session.
    pub(super) nexus_name: NexusName,
    pub(super) luns: BTreeMap<u16, SessionLun>,
    pub(super) reactor_session: Arc<ReactorSession>,
    /// ExpCmdSN when the session began.
    pub(super) exp_cmd_sn: u32,
    /// Connections by serial number, since an initiator may reuse a CID.
    pub(super) connections: BTreeMap<u64, ConnectionInfo>,
    pub(super) counters: Arc<SessionCounters>,
    /// Notified when a connection or the session has ended; the value is whether the session has.
    pub(super) changed: watch::Sender<bool>,
}

impl Session {
    pub(super) fn info(&self) -> SessionInfo {
        SessionInfo {
            connections: self.connections.values().cloned().collect(),
            luns: self.luns.values().map(|lun| lun.visible).collect(),
            counts: SessionCounts::of(&self.counters),
            ..self.info.clone()
        }
    }
}

/// All sessions of a process.
#[derive(Default)]
pub(super) struct Sessions {
    pub(super) list: BTreeMap<u64, Session>,
    /// TSIHs of sessions and of logins in progress.
    taken: BTreeSet<u16>,
    last_tsih: u16,
    last_id: u64,
    last_connection: u64,
}

impl Sessions {
    /// Reserves the next free TSIH, in rotation, so that a late request for an old session matches no new
    /// one.
    pub(super) fn take_tsih(&mut self) -> u16 {
        // Free numbers exist: each session has a descriptor, logins are limited, and both together are
        // fewer than TSIHs.
        for _ in 0..=u16::MAX {
            self.last_tsih = self.last_tsih.checked_add(1).unwrap_or(1);
            if self.taken.insert(self.last_tsih) {
                break;
            }
        }
        self.last_tsih
    }

    pub(super) fn release_tsih(&mut self, tsih: u16) {
        self.taken.remove(&tsih);
    }

    pub(super) fn new_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Returns the serial number of a new connection.
    pub(super) fn new_connection(&mut self) -> u64 {
        self.last_connection += 1;
        self.last_connection
    }

    pub(super) fn by_tsih(&self, tsih: u16) -> Option<&Session> {
        self.list.values().find(|session| session.info.tsih == tsih)
    }

    /// Returns the sessions of an initiator, by any of its ports, and a portal group.
    pub(super) fn of_initiator<'a>(
        &'a self,
        initiator: &'a str,
        group: &'a GroupId,
    ) -> impl Iterator<Item = &'a Session> {
        let is_of =
            move |info: &SessionInfo| info.initiator == initiator && info.group.as_ref() == Some(group);
        self.list.values().filter(move |session| is_of(&session.info))
    }

    /// Returns the sessions of an initiator port and a portal group: at most one, except while one replaces
    /// another.
    pub(super) fn of_port<'a>(
        &'a self,
        initiator: &'a str,
        isid: Isid,
        group: &'a GroupId,
    ) -> impl Iterator<Item = &'a Session> {
        self.list.values().filter(move |Session { info, .. }| {
            info.initiator == initiator && info.isid == isid && info.group.as_ref() == Some(group)
        })
    }

    /// Returns the session that a login may replace or join; `None`: there is none.
    pub(super) fn existing(&self, initiator: &str, isid: Isid, group: &GroupId) -> Option<Existing> {
        let session = self.of_port(initiator, isid, group).last()?;
        let (exp_cmd_sn, max_cmd_sn) =
            session.counters.window().unwrap_or((session.exp_cmd_sn, session.exp_cmd_sn));
        Some(Existing {
            tsih: session.info.tsih,
            cids: session.connections.values().map(|connection| connection.cid).collect(),
            max_connections: session.info.parameters.max_connections,
            exp_cmd_sn,
            max_cmd_sn,
        })
    }

    /// Returns the ids of the sessions of a portal group.
    pub(super) fn of_group(&self, group: &GroupId) -> Vec<u64> {
        let of_it = self.list.iter().filter(|(_, session)| session.info.group.as_ref() == Some(group));
        of_it.map(|(id, _)| *id).collect()
    }

    /// Returns the number of connections of each of `reactors` reactors.
    pub(super) fn load(&self, reactors: usize) -> Vec<usize> {
        let mut load = vec![0; reactors];
        for session in self.list.values() {
            if let Some(count) = load.get_mut(session.reactor) {
                *count += session.connections.len().max(1);
            }
        }
        load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(sessions: &mut Sessions, initiator: &str, isid: u8, reactor: usize) -> u64 {
        let (id, tsih) = (sessions.new_id(), sessions.take_tsih());
        let group = GroupId::new("iqn.2026-11.com.example:t".parse().expect("a name"), 1);
        let nexus_name = NexusName {
            initiator: initiator.to_owned(),
            isid: [isid; 6],
            target: group.target.to_string(),
            portal_group: 1,
            relative_port: 1,
        };
        let info = SessionInfo {
            id,
            tsih,
            group: Some(group),
            initiator: initiator.to_owned(),
            alias: None,
            isid: Isid([isid; 6]),
            user: None,
            parameters: Parameters::default(),
            connections: Vec::new(),
            luns: Vec::new(),
            counts: SessionCounts::default(),
        };
        let session = Session {
            info,
            reactor,
            nexus_name,
            luns: BTreeMap::new(),
            reactor_session: Arc::default(),
            exp_cmd_sn: 1,
            connections: BTreeMap::new(),
            counters: Arc::default(),
            changed: watch::channel(false).0,
        };
        sessions.list.insert(id, session);
        id
    }

    #[test]
    fn a_tsih_is_not_0_not_taken_twice_and_reused_late() {
        let mut sessions = Sessions::default();
        let first = sessions.take_tsih();
        assert_eq!(first, 1);
        sessions.release_tsih(first);
        assert_eq!(sessions.take_tsih(), 2, "the freed one is used last");
        sessions.last_tsih = u16::MAX;
        assert_eq!(sessions.take_tsih(), 1);
        assert_eq!(sessions.take_tsih(), 3, "2 is taken");
    }

    #[test]
    fn a_session_is_found_by_its_ports() {
        let mut sessions = Sessions::default();
        let id = session(&mut sessions, "iqn.2026-11.a:i", 1, 0);
        let group = sessions.list[&id].info.group.clone().expect("a group");
        let other = GroupId { tag: 2, ..group.clone() };
        let find = |initiator: &str, isid, group| sessions.existing(initiator, Isid([isid; 6]), group);
        assert_eq!(find("iqn.2026-11.a:i", 1, &group).map(|found| found.tsih), Some(1));
        assert_eq!(find("iqn.2026-11.a:j", 1, &group), None);
        assert_eq!(find("iqn.2026-11.a:i", 2, &group), None, "another ISID");
        assert_eq!(find("iqn.2026-11.a:i", 1, &other), None, "another portal group");
        assert_eq!(sessions.of_group(&group), [id]);
    }

    #[test]
    fn the_load_of_a_reactor_is_its_connections() {
        let mut sessions = Sessions::default();
        session(&mut sessions, "iqn.2026-11.a:i", 1, 1);
        session(&mut sessions, "iqn.2026-11.a:i", 2, 1);
        session(&mut sessions, "iqn.2026-11.a:i", 3, 0);
        assert_eq!(sessions.load(3), [1, 2, 0]);
    }
}
