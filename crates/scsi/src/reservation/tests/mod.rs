//! Tests of the state machine: individual rules here, random sequences against a slow model in `model`.

mod model;
mod rules;

use super::*;

/// Returns the nexus of initiator number `initiator`, which determines its ISID, and a target port.
pub(super) fn nexus(initiator: u8, port: u16) -> NexusName {
    NexusName {
        initiator: format!("iqn.2026-11.example:host{initiator}"),
        isid: [0, 2, 0x3d, 0, 0, initiator],
        target: "iqn.2026-11.example:disk".into(),
        portal_group: 1,
        relative_port: port,
    }
}

pub(super) const POLICY: Policy<'static> =
    Policy { with_isid: true, force_aptpl: false, can_persist: true, ports: &[1, 2] };

/// Returns a command with a key; the other fields are zero.
pub(super) fn command(action: Action, key: u64) -> Out {
    Out {
        action,
        scope: 0,
        kind: 0,
        key,
        action_key: 0,
        initiators: None,
        all_ports: false,
        persist: false,
        destination: None,
    }
}

/// A unit with its reservations, used as the device server uses them.
#[derive(Clone, Default)]
pub(super) struct Unit {
    pub(super) state: Reservations,
}

impl Unit {
    /// Executes a command and puts the change into force.
    pub(super) fn out(&mut self, nexus: &NexusName, out: &Out) -> Result<Change, Failure> {
        let change = self.state.out(nexus, &POLICY, out)?;
        self.state = change.next.clone();
        Ok(change)
    }

    pub(super) fn register(&mut self, nexus: &NexusName, key: u64) {
        self.out(nexus, &Out { action_key: key, ..command(Action::RegisterAndIgnore, 0) }).unwrap();
    }

    pub(super) fn reserve(&mut self, nexus: &NexusName, key: u64, kind: Kind) -> Result<Change, Failure> {
        self.out(nexus, &Out { kind: kind as u8, ..command(Action::Reserve, key) })
    }

    pub(super) fn reads(&self, nexus: &NexusName) -> bool {
        self.state.check(nexus, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).is_ok()
    }

    pub(super) fn writes(&self, nexus: &NexusName) -> bool {
        self.state.check(nexus, &[0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0]).is_ok()
    }

    pub(super) fn keys(&self) -> Vec<u64> {
        self.state.registrations().iter().map(|known| known.key).collect()
    }
}
