//! An I_T_L nexus: one initiator port, one target port, one logical unit.

use crate::attention::{Attention, Attentions};
use crate::{Designators, LogicalUnit, Lun, Outcome};
use bitflags::bitflags;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names of the ports of a nexus: RFC 7143 section 4.4.1.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NexusName {
    /// iSCSI name of the initiator.
    pub initiator: String,
    /// ISID of the session.
    pub isid: [u8; 6],
    /// iSCSI name of the target.
    pub target: String,
    /// Target portal group tag.
    pub portal_group: u16,
    /// Relative target port identifier.
    pub relative_port: u16,
}

impl NexusName {
    /// Returns the name of the initiator port: `iqn.2026-11.example:host,i,0x00023d000001`.
    pub fn initiator_port(&self) -> String {
        let isid = self.isid.iter().fold(0_u64, |isid, byte| isid << 8 | u64::from(*byte));
        format!("{},i,0x{isid:012x}", self.initiator)
    }

    /// Returns the name of the target port: `iqn.2026-11.example:disk,t,0x0001`.
    pub fn target_port(&self) -> String {
        format!("{},t,0x{:04x}", self.target, self.portal_group)
    }
}

/// Access that the mapping of a LUN permits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Reads and writes are permitted.
    ReadWrite,
    /// Only reads are permitted: commands that write end with 07/27/00.
    ReadOnly,
}

/// Kind of a nexus's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NexusLoss {
    /// The initiator logged out.
    Logout,
    /// The session was lost, or replaced by a new one with the same name. A new nexus with this name starts
    /// with the unit attention 29/07.
    Loss,
}

bitflags! {
    /// Reasons why commands of a nexus have to leave the fast path.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Restrictions: u32 {
        /// A unit attention is pending.
        const ATTENTION = 1;
        /// A reservation of another nexus denies this one all access to the medium.
        const RESERVATION = 1 << 1;
        /// The nexus' target port group is not active.
        const ACCESS_STATE = 1 << 2;
        /// SANITIZE is running, or failed.
        const SANITIZE = 1 << 3;
        /// The medium was ejected.
        const NO_MEDIUM = 1 << 4;
        /// The mapping is read-only.
        const READ_ONLY = 1 << 5;
        /// A reservation of another nexus denies this one writes.
        const RESERVED_WRITES = 1 << 6;
    }
}

/// One nexus. It is `Send` and `Sync`: several threads may hold it, but its commands arrive on one thread.
pub struct Nexus {
    pub(crate) unit: Arc<LogicalUnit>,
    name: NexusName,
    lun: Lun,
    access: Access,
    /// [`Restrictions`] in force. If 0, reads and writes take the fast path.
    restrictions: AtomicU32,
    attentions: Mutex<Attentions>,
    /// Advanced whenever commands of this nexus are aborted.
    epoch: AtomicU64,
    /// Whether PREVENT ALLOW MEDIUM REMOVAL prevents removal for this nexus.
    pub(crate) prevents_removal: AtomicBool,
    /// Content of the echo buffer (READ BUFFER and WRITE BUFFER); empty before the first write.
    pub(crate) echo: Mutex<Vec<u8>>,
}

impl fmt::Debug for Nexus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nexus").field("name", &self.name).field("lun", &self.lun).finish_non_exhaustive()
    }
}

impl Nexus {
    pub(crate) fn new(unit: Arc<LogicalUnit>, name: NexusName, lun: Lun, access: Access) -> Arc<Nexus> {
        let restrictions = match access {
            Access::ReadWrite => Restrictions::empty(),
            Access::ReadOnly => Restrictions::READ_ONLY,
        };
        Arc::new(Nexus {
            unit,
            name,
            lun,
            access,
            restrictions: AtomicU32::new(restrictions.bits()),
            attentions: Mutex::default(),
            epoch: AtomicU64::new(0),
            prevents_removal: AtomicBool::new(false),
            echo: Mutex::default(),
        })
    }

    /// Returns the logical unit.
    pub fn unit(&self) -> &Arc<LogicalUnit> {
        &self.unit
    }

    /// Returns the names of the ports.
    pub fn name(&self) -> &NexusName {
        &self.name
    }

    /// Returns the LUN under which the session accesses the unit.
    pub fn lun(&self) -> Lun {
        self.lun
    }

    /// Returns the access that the mapping permits.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the designators of the target port.
    pub fn designators(&self) -> Designators {
        let relative_port = self.name.relative_port;
        Designators { relative_port, port_group: self.unit.port_group(relative_port) }
    }

    /// Returns how often commands of this nexus were aborted. A command that began in an earlier epoch was
    /// aborted: it ends without a response, or with TASK ABORTED if another nexus aborted it and
    /// [`LogicalUnit::reports_aborted_tasks`] returns `true`.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Aborts all commands that have begun.
    pub fn advance_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Establishes a unit attention condition.
    pub fn raise(&self, attention: Attention) {
        let mut attentions = self.attentions();
        attentions.add(attention);
        self.restrict(Restrictions::ATTENTION, true);
    }

    /// Reports that the LUNs of the session changed (3F/0E). One nexus of the session is enough.
    pub fn report_luns_changed(&self) {
        self.raise(Attention::LUNS_CHANGED);
    }

    /// Returns whether a unit attention condition is pending.
    pub fn has_attention(&self) -> bool {
        self.is_restricted(Restrictions::ATTENTION)
    }

    /// Returns the result of QUERY ASYNCHRONOUS EVENT about pending unit attentions, which stay pending
    /// (SAM-6, section 7.9): UADE DEPTH (1: one is pending, 2: several are) and sense key, additional sense
    /// code and qualifier. Returns `None` if none is pending.
    pub fn asynchronous_event(&self) -> Option<[u8; 3]> {
        let attentions = self.attentions();
        let first = attentions.first()?;
        let depth = attentions.len().min(2) as u8;
        Some([depth << 4 | crate::sense::Key::UnitAttention as u8, first.0, first.1])
    }

    /// Returns the pending unit attention, and clears it if `clears` is set.
    pub(crate) fn take_attention(&self, clears: bool) -> Option<Attention> {
        let mut attentions = self.attentions();
        let first = attentions.first();
        if clears {
            attentions.clear_first();
            self.restrict(Restrictions::ATTENTION, !attentions.is_empty());
        }
        first
    }

    /// Clears a unit attention condition without reporting it.
    pub(crate) fn clear_attention(&self, attention: Attention) {
        let mut attentions = self.attentions();
        attentions.clear(attention);
        self.restrict(Restrictions::ATTENTION, !attentions.is_empty());
    }

    fn attentions(&self) -> MutexGuard<'_, Attentions> {
        self.attentions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets or clears a reason for commands of the nexus to take the slow path.
    pub(crate) fn restrict(&self, reason: Restrictions, is_on: bool) {
        if is_on {
            self.restrictions.fetch_or(reason.bits(), Ordering::SeqCst);
        } else {
            self.restrictions.fetch_and(!reason.bits(), Ordering::SeqCst);
        }
    }

    /// Returns whether any of these reasons is in force.
    pub(crate) fn is_restricted(&self, reasons: Restrictions) -> bool {
        self.restrictions.load(Ordering::Acquire) & reasons.bits() != 0
    }

    /// Returns whether a read or write has to leave the fast path.
    #[inline]
    pub(crate) fn is_slow(&self, is_write: bool) -> bool {
        let for_writes = Restrictions::READ_ONLY.union(Restrictions::RESERVED_WRITES).bits();
        let ignored = if is_write { 0 } else { for_writes };
        self.restrictions.load(Ordering::Acquire) & !ignored != 0
    }

    /// Sets the sense data format of an outcome that leaves the crate.
    pub(crate) fn finish(&self, outcome: Outcome) -> Outcome {
        Outcome { descriptor_sense: self.unit.has_descriptor_sense(), ..outcome }
    }
}
