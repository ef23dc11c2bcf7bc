//! The iSCSI targets of a process: the configuration, the open portals, and the sessions.
//!
//! The configuration may change while sessions exist: a session is notified of a LUN that is added or
//! removed, and initiators that may not log in any more are logged out.

use super::auth::Auth;
use super::export::{IscsiExport, LunExports};
use super::portal::Portal;
use super::session::{SessionInfo, Sessions};
use super::settings::SettingError;
use super::shared;
use super::tree::{Group, GroupId, Lun, MappedLun, Scope, Tree, TreeError, UnitId};
use super::unit::{Unit, UnitOptions};
use engine::device::Device;
use engine::host::{Export, Host, HostError, HostErrorKind};
use exports::iscsi::{EndReason, Exchange};
use spec::{IscsiName, PortalAddress};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Why a change of the targets is refused. Nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum TargetsError {
    /// The rules of the configuration refuse it.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// The portal cannot be opened.
    #[error("{address}: {source}{hint}")]
    Listen {
        /// The address.
        address: PortalAddress,
        /// The cause.
        source: io::Error,
        /// A hint at a remedy, in brackets; may be empty.
        hint: &'static str,
    },
    /// The device cannot be a logical unit.
    #[error(transparent)]
    Unit(#[from] HostError),
}

impl From<SettingError> for TargetsError {
    fn from(error: SettingError) -> TargetsError {
        TargetsError::Tree(error.into())
    }
}

impl From<TargetsError> for HostError {
    fn from(error: TargetsError) -> HostError {
        match error {
            TargetsError::Unit(error) => error,
            TargetsError::Tree(error) => HostError::caused(HostErrorKind::Refused, error),
            listen => HostError::caused(HostErrorKind::Failed, listen),
        }
    }
}

/// The targets of a process.
pub struct Targets {
    host: Arc<Host>,
    /// The directory in which reservations survive a restart; `None`: they do not.
    state_dir: Option<PathBuf>,
    /// Held for short times only: reactors take it to answer SendTargets.
    state: Mutex<State>,
    /// Connects the sessions of all reactors.
    exchange: Arc<Exchange>,
    /// The exports of `--iscsi`.
    pub(super) lun_exports: Mutex<LunExports>,
    events: UnboundedSender<Event>,
    /// Receiver of the reactors' events; empty once a task receives them.
    inbox: Mutex<Option<UnboundedReceiver<Event>>>,
}

/// An event of a session on its reactor.
#[derive(Debug)]
pub(super) enum Event {
    /// A connection has ended: the session, and the connection's serial number.
    ConnectionGone(u64, u64),
    /// A session has ended.
    SessionGone(u64, EndReason),
}

#[derive(Default)]
pub(super) struct State {
    pub(super) tree: Tree,
    pub(super) units: BTreeMap<UnitId, Arc<Unit>>,
    pub(super) portals: Vec<Arc<Portal>>,
    pub(super) sessions: Sessions,
    /// The exports of LUNs that [`Targets::add_lun`] added.
    exports: BTreeMap<(GroupId, u16), AddedExport>,
}

/// A device, and its export as a LUN.
type AddedExport = (Arc<Device>, Arc<dyn Export>);

impl Targets {
    /// Creates the registry, without targets. Reservations that survive a restart (APTPL) are kept in
    /// `state_dir`.
    pub fn new(host: &Arc<Host>, state_dir: Option<PathBuf>) -> Arc<Targets> {
        let (events, inbox) = unbounded_channel();
        Arc::new(Targets {
            host: host.clone(),
            state_dir,
            state: Mutex::default(),
            exchange: Arc::default(),
            lun_exports: Mutex::default(),
            events,
            inbox: Mutex::new(Some(inbox)),
        })
    }

    /// Returns the sender by which reactors report events.
    pub(super) fn events(&self) -> UnboundedSender<Event> {
        self.events.clone()
    }

    pub(super) fn exchange(&self) -> &Arc<Exchange> {
        &self.exchange
    }

    /// Starts the task that handles events of the reactors. Only the first call has an effect.
    fn receive_events(self: &Arc<Self>) {
        let inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut inbox) = inbox else { return };
        let targets = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Some(event) = inbox.recv().await {
                let Some(targets) = targets.upgrade() else { return };
                targets.happened(event);
            }
        });
    }

    /// Describes all sessions, in the order in which they began.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.lock().sessions.list.values().map(|session| session.info()).collect()
    }

    /// Asks the initiator of a session to log out, and ends the session after at most 3 s. Returns whether
    /// there is such a session.
    pub fn close_session(&self, id: u64) -> bool {
        let is_known = self.lock().sessions.list.contains_key(&id);
        self.end_session(id, EndReason::Removed);
        is_known
    }

    /// Applies a change of a portal group to its sessions: ends those that may not exist any more, and
    /// changes the LUNs of the others.
    fn refresh(self: &Arc<Self>, id: &GroupId) {
        let sessions = self.lock().sessions.of_group(id);
        for session in sessions {
            let may_stay = {
                let state = self.lock();
                let info = state.sessions.list.get(&session).map(|session| &session.info);
                let group = state.tree.group(id).ok().filter(|group| group.is_enabled);
                info.is_some_and(|info| group.is_some_and(|group| group.admits(&info.initiator)))
            };
            if may_stay {
                let targets = self.clone();
                tokio::spawn(async move { targets.change_luns(session).await });
            } else {
                self.end_session(session, EndReason::Removed);
            }
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a copy of the configuration, with the secrets.
    pub fn tree(&self) -> Tree {
        self.lock().tree.clone()
    }

    /// Returns the logical unit of a device. It is created with `options` if it does not exist; otherwise
    /// they are ignored.
    ///
    /// # Errors
    /// The device cannot be a logical unit, or its stored reservations cannot be read.
    pub fn unit(&self, device: &Arc<Device>, options: &UnitOptions) -> Result<Arc<Unit>, TargetsError> {
        if let Some(unit) = self.unit_of(UnitId(device.number())) {
            return Ok(unit);
        }
        // The state is not locked here, because opening reads files or waits for the cluster.
        let mut unit = Unit::open(device, options, self.state_dir.as_deref())?;
        unit.guard(&self.host);
        let unit = self.lock().units.entry(unit.id()).or_insert(Arc::new(unit)).clone();
        shared::follow(&unit);
        Ok(unit)
    }

    /// Drops the logical units of devices that are being removed, as units keep the stacks of their devices
    /// open.
    pub fn forget_unused_units(&self) {
        let devices = self.host.devices();
        self.lock().units.retain(|_, unit| devices.iter().any(|device| Arc::ptr_eq(device, unit.device())));
    }

    /// Returns the logical unit with that id.
    pub fn unit_of(&self, id: UnitId) -> Option<Arc<Unit>> {
        self.lock().units.get(&id).cloned()
    }

    /// Creates a target without portal groups.
    ///
    /// # Errors
    /// The target or group exists already.
    pub fn create_target(&self, name: &IscsiName) -> Result<(), TargetsError> {
        Ok(self.lock().tree.create_target(name)?)
    }

    /// Deletes a target with its portal groups and ends their sessions.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn delete_target(self: &Arc<Self>, name: &IscsiName) -> Result<(), TargetsError> {
        let target = self.lock().tree.targets.get(name).cloned();
        let target = target.ok_or_else(|| TreeError::NoTarget(name.clone()))?;
        for tag in target.groups.keys() {
            self.delete_group(&GroupId::new(name.clone(), *tag))?;
        }
        self.lock().tree.delete_target(name)?;
        Ok(())
    }

    /// Creates a portal group, disabled, with LIO's defaults.
    ///
    /// # Errors
    /// The group exists already, its target does not exist, or the tag is 0.
    pub fn create_group(&self, id: &GroupId) -> Result<(), TargetsError> {
        Ok(self.lock().tree.create_group(id)?)
    }

    /// Deletes a portal group and ends its sessions. Portals that no other group has are closed.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn delete_group(self: &Arc<Self>, id: &GroupId) -> Result<(), TargetsError> {
        let mut state = self.lock();
        state.tree.delete_group(id)?;
        state.close_unused_portals();
        let exports = std::mem::take(&mut state.exports);
        let (of_group, others): (BTreeMap<_, _>, _) =
            exports.into_iter().partition(|((group, _), _)| group == id);
        state.exports = others;
        drop(state);
        for (device, export) in of_group.into_values() {
            self.host.forget_export(&device, &export);
        }
        self.refresh(id);
        Ok(())
    }

    /// Lets initiators log in to a portal group, or refuses them and ends its sessions.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn enable_group(self: &Arc<Self>, id: &GroupId, is_enabled: bool) -> Result<(), TargetsError> {
        self.lock().tree.group_mut(id)?.is_enabled = is_enabled;
        self.refresh(id);
        Ok(())
    }

    /// Listens at an address for a portal group. Returns the address with the port that the kernel chose for
    /// 0. Groups of several targets may share an address. Must be called on the control plane's runtime.
    ///
    /// # Errors
    /// The group does not exist, its target has the portal already, or the address cannot be listened at.
    pub fn add_portal(
        self: &Arc<Self>,
        id: &GroupId,
        address: &PortalAddress,
    ) -> Result<PortalAddress, TargetsError> {
        self.receive_events();
        let known = {
            let state = self.lock();
            state.tree.group(id)?;
            state.portals.iter().find(|portal| portal.is_at(address)).cloned()
        };
        // The state is not locked here, because opening may resolve a host name.
        let portal = known.map_or_else(|| Portal::open(address, self), Ok)?;
        let opened = portal.address().clone();
        let mut state = self.lock();
        let added = state.tree.add_portal(id, &opened);
        if !state.portals.iter().any(|other| Arc::ptr_eq(other, &portal)) {
            state.portals.push(portal);
        }
        state.close_unused_portals();
        added?;
        Ok(opened)
    }

    /// Removes a portal from a group. It is closed if no other group has it; connections stay.
    ///
    /// # Errors
    /// The group does not have the portal.
    pub fn remove_portal(&self, id: &GroupId, address: &PortalAddress) -> Result<(), TargetsError> {
        let mut state = self.lock();
        state.tree.remove_portal(id, address)?;
        state.close_unused_portals();
        Ok(())
    }

    /// Adds a device to a portal group as a LUN, under `number` or the first free number. Returns the
    /// number. The LUN is an export of the device from now on, so removing the device removes the LUN
    /// first.
    ///
    /// # Errors
    /// The group does not exist, the number is taken, the device is a LUN of the group, or it cannot be a
    /// logical unit.
    pub fn add_lun(
        self: &Arc<Self>,
        id: &GroupId,
        number: Option<u16>,
        device: &Arc<Device>,
        read_only: bool,
    ) -> Result<u16, TargetsError> {
        let lun = self.add_silent_lun(id, number, device, read_only)?;
        let export: Arc<dyn Export> =
            Arc::new(IscsiExport { targets: self.clone(), group: id.clone(), lun, lun_export: None });
        self.host.add_export(device, export.clone());
        self.lock().exports.insert((id.clone(), lun), (device.clone(), export));
        Ok(lun)
    }

    /// Adds a LUN as [`add_lun`](Targets::add_lun) does, without an export of the device.
    pub(super) fn add_silent_lun(
        self: &Arc<Self>,
        id: &GroupId,
        number: Option<u16>,
        device: &Arc<Device>,
        read_only: bool,
    ) -> Result<u16, TargetsError> {
        let unit = self.unit(device, &UnitOptions::default())?;
        let mut state = self.lock();
        let lun = Lun { unit: unit.id(), read_only, alua_group: Lun::ALUA_DEFAULT.to_owned() };
        let group = state.tree.group(id)?;
        let mut others = group.luns.values().filter_map(|lun| state.units.get(&lun.unit));
        if let Some(only) = self.host.reactor_of(device)
            && let Some(other) =
                others.find(|other| self.host.reactor_of(other.device()).is_some_and(|of| of != only))
        {
            let text = format!(
                "its only queue and that of {} are on different I/O threads, and a session has one (give it a target of its own)",
                other.device().name()
            );
            return Err(HostError::new(HostErrorKind::Refused, text).into());
        }
        let number = state.tree.add_lun(id, number, lun)?;
        drop(state);
        self.refresh(id);
        Ok(number)
    }

    /// Removes a LUN, also from the ACLs that map it. Its commands in flight are aborted.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn remove_lun(self: &Arc<Self>, id: &GroupId, number: u16) -> Result<(), TargetsError> {
        let mut state = self.lock();
        state.tree.remove_lun(id, number)?;
        let export = state.exports.remove(&(id.clone(), number));
        drop(state);
        if let Some((device, export)) = export {
            self.host.forget_export(&device, &export);
        }
        self.refresh(id);
        Ok(())
    }

    /// Lets an initiator log in. It sees no LUN yet.
    ///
    /// # Errors
    /// The group does not exist, or the initiator has an ACL.
    pub fn add_acl(self: &Arc<Self>, id: &GroupId, initiator: &IscsiName) -> Result<(), TargetsError> {
        self.lock().tree.add_acl(id, initiator)?;
        self.refresh(id);
        Ok(())
    }

    /// Removes the ACL of an initiator. Without demo mode its sessions end.
    ///
    /// # Errors
    /// The initiator has no ACL.
    pub fn remove_acl(self: &Arc<Self>, id: &GroupId, initiator: &IscsiName) -> Result<(), TargetsError> {
        self.lock().tree.remove_acl(id, initiator)?;
        self.refresh(id);
        Ok(())
    }

    /// Shows a LUN of the group to an initiator under a number.
    ///
    /// # Errors
    /// The ACL or the LUN does not exist, or the number is taken.
    pub fn map_lun(
        self: &Arc<Self>,
        id: &GroupId,
        initiator: &IscsiName,
        number: u16,
        mapped: MappedLun,
    ) -> Result<(), TargetsError> {
        self.lock().tree.map_lun(id, initiator, number, mapped)?;
        self.refresh(id);
        Ok(())
    }

    /// Hides a LUN from an initiator.
    ///
    /// # Errors
    /// The ACL does not exist or does not map the number.
    pub fn unmap_lun(
        self: &Arc<Self>,
        id: &GroupId,
        initiator: &IscsiName,
        number: u16,
    ) -> Result<(), TargetsError> {
        self.lock().tree.unmap_lun(id, initiator, number)?;
        self.refresh(id);
        Ok(())
    }

    /// Sets LIO's tag of an ACL; `None` removes it.
    ///
    /// # Errors
    /// The ACL does not exist.
    pub fn tag_acl(
        &self,
        id: &GroupId,
        initiator: &IscsiName,
        tag: Option<String>,
    ) -> Result<(), TargetsError> {
        self.lock().tree.acl_mut(id, initiator)?.tag = tag;
        Ok(())
    }

    /// Sets an attribute of a portal group or an ACL.
    ///
    /// # Errors
    /// The object or the attribute does not exist, or the value is refused.
    pub fn set_attribute(
        self: &Arc<Self>,
        scope: &Scope,
        name: &str,
        value: &str,
    ) -> Result<(), TargetsError> {
        self.lock().tree.attributes_mut(scope)?.set(name, value)?;
        if let Scope::Group(id) | Scope::Acl(id, _) = scope {
            self.refresh(id);
        }
        Ok(())
    }

    /// Sets a negotiated parameter of a portal group, for logins from now on.
    ///
    /// # Errors
    /// The group or the parameter does not exist, or the value is refused.
    pub fn set_parameter(&self, id: &GroupId, name: &str, value: &str) -> Result<(), TargetsError> {
        let mut state = self.lock();
        state.tree.group_mut(id)?.parameters.set(name, value)?;
        Ok(())
    }

    /// Sets the users and secrets of discovery, a portal group or an ACL, for logins from now on.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn set_auth(&self, scope: &Scope, auth: Auth) -> Result<(), TargetsError> {
        *self.lock().tree.auth_mut(scope)? = auth;
        Ok(())
    }

    /// The host whose devices are served.
    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }
}

impl State {
    /// Closes portals that no group has.
    fn close_unused_portals(&mut self) {
        let State { tree, portals, .. } = self;
        let groups = || tree.targets.values().flat_map(|target| target.groups.values());
        let is_used = |portal: &Arc<Portal>| {
            let mut groups: Box<dyn Iterator<Item = &Group>> = Box::new(groups());
            groups.any(|group| group.portals.contains(portal.address()))
        };
        portals.retain(|portal| {
            let is_used = is_used(portal);
            if !is_used {
                portal.close();
            }
            is_used
        });
    }
}
