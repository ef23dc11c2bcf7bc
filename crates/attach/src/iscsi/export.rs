//! `--iscsi`: a device as a LUN of a target, at one portal.
//!
//! Several exports can share a target: other devices are its further LUNs, and another address of one
//! device is a further portal. The last export to use an object removes it. Objects that targetcli created
//! stay.

use super::auth::Auth;
use super::targets::{Targets, TargetsError};
use super::tree::{
    GroupId, LUN_MAX, MappedLun, NOPIN_RESPONSE_TIMEOUT, NOPIN_RESPONSE_TIMEOUT_S, Scope, TreeError, UnitId,
};
use super::unit::UnitOptions;
use crate::{Exported, UblkLife};
use engine::control::{BoxFuture, ExportInfo};
use engine::device::Device;
use engine::host::{Export, HostError, HostErrorKind};
use engine::spec::TableSpec;
use scsi::Attributes;
use spec::{Bytes, CdbMax, Digests, IscsiName, IscsiSpec, PortalAddress};
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// Longest wait for initiators that were asked to log out: they have 3 s, and closing takes up to another
/// second.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(4);

/// Parameters of groups that `--iscsi` creates. They suit fast networks; LIO's defaults suit old
/// initiators.
const PARAMETERS: &[(&str, &str)] = &[
    ("FirstBurstLength", "262144"),
    ("InitialR2T", "No"),
    ("MaxBurstLength", "1048576"),
    ("MaxConnections", "8"),
    ("MaxOutstandingR2T", "8"),
    ("MaxXmitDataSegmentLength", "262144"),
    ("TargetAlias", "Blockyard"),
];
/// Commands in flight of a session of a group that `--iscsi` creates.
const QUEUE_DEPTH: &str = "128";

/// An export that `--iscsi` created: a LUN at one portal.
#[derive(Clone)]
struct LunExport {
    id: u64,
    group: GroupId,
    lun: u16,
    unit: UnitId,
    portal: PortalAddress,
    /// The initiators that the export admits by ACL.
    initiators: Vec<IscsiName>,
    /// Whether all initiators of the group see the LUN.
    is_for_all: bool,
}

/// All exports that `--iscsi` created.
#[derive(Default)]
pub(super) struct LunExports {
    list: Vec<LunExport>,
    last: u64,
    /// Groups that an export created; they are deleted with their last export.
    owned: Vec<GroupId>,
}

/// Exports a device as a LUN.
///
/// # Errors
/// The address, the files or the options are refused; nothing is left behind.
pub(crate) async fn export(
    exports: &crate::Exports,
    device: &Arc<Device>,
    spec: &IscsiSpec,
    _life: impl FnOnce() -> UblkLife,
) -> Result<Exported, HostError> {
    let targets = exports.iscsi();
    let lun_export = targets.add_lun_export(device, spec)?;
    targets.sessions_follow(&lun_export.group).await;
    let address = lun_export.portal.uri(&lun_export.group.target, lun_export.lun);
    let export = IscsiExport {
        targets: targets.clone(),
        group: lun_export.group,
        lun: lun_export.lun,
        lun_export: Some((lun_export.id, lun_export.portal)),
    };
    exports.host().add_export(device, Arc::new(export));
    Ok(Exported::at(address))
}

fn read_auth(path: &Path) -> Result<Auth, HostError> {
    let failed = |why| HostError::new(HostErrorKind::Failed, format!("{}: {why}", path.display()));
    Auth::read(path).map_err(failed)
}

fn refused(why: impl Into<String>) -> HostError {
    HostError::new(HostErrorKind::Refused, why)
}

impl Targets {
    fn lun_exports(&self) -> MutexGuard<'_, LunExports> {
        self.lun_exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_lun_export(
        self: &Arc<Self>,
        device: &Arc<Device>,
        spec: &IscsiSpec,
    ) -> Result<LunExport, HostError> {
        let auth = spec.chap.as_deref().map(read_auth).transpose()?;
        let discovery = spec.discovery_chap.as_deref().map(read_auth).transpose()?;
        let long_cdbs = spec.cdb_max == CdbMax::Long;
        let attributes = Attributes { long_cdbs, ..Attributes::default() };
        let options = UnitOptions {
            serial: spec.serial.clone(),
            removable: spec.removable,
            attributes: Some(attributes),
            ..UnitOptions::default()
        };
        let unit = self.unit(device, &options)?;
        let logical = unit.logical();
        if (logical.media().removable, logical.attributes().long_cdbs) != (spec.removable, long_cdbs) {
            return Err(refused(
                "it has another removable or cdb-max already (give all its exports the same)",
            ));
        }
        if let Some(serial) = spec.serial.as_ref().filter(|serial| *serial != unit.serial()) {
            return Err(refused(format!("its serial is {} already, not {serial}", unit.serial())));
        }
        let group = GroupId::new(spec.target_of(&device.name()), spec.tag);
        self.own_group(&group)?;
        let mut lun_exports = self.lun_exports();
        lun_exports.last += 1;
        let mut lun_export = LunExport {
            id: lun_exports.last,
            group,
            lun: 0,
            unit: unit.id(),
            portal: spec.portal.clone(),
            initiators: spec.acls.iter().map(|acl| acl.initiator.clone()).collect(),
            is_for_all: spec.acls.is_empty(),
        };
        drop(lun_exports);
        let added = self.set_up(&mut lun_export, device, spec, auth);
        if let Err(why) = added {
            // Objects that were created before the error are removed as those of a complete export.
            self.lun_exports().list.push(lun_export.clone());
            self.remove_lun_export(lun_export.id);
            return Err(why);
        }
        if let Some(discovery) = discovery {
            self.set_auth(&Scope::Discovery, discovery)?;
        }
        Ok(lun_export)
    }

    /// Creates the target and the group if they do not exist.
    fn own_group(self: &Arc<Self>, group: &GroupId) -> Result<(), TargetsError> {
        match self.create_target(&group.target) {
            Ok(()) | Err(TargetsError::Tree(TreeError::TargetExists(_))) => {}
            Err(why) => return Err(why),
        }
        match self.create_group(group) {
            Err(TargetsError::Tree(TreeError::GroupExists(_))) => return Ok(()),
            created => created?,
        }
        self.lun_exports().owned.push(group.clone());
        for (name, value) in PARAMETERS {
            self.set_parameter(group, name, value)?;
        }
        let scope = Scope::Group(group.clone());
        for (name, value) in [
            ("authentication", "0"),
            ("default_cmdsn_depth", QUEUE_DEPTH),
            ("demo_mode_write_protect", "0"),
            ("generate_node_acls", "1"),
        ] {
            self.set_attribute(&scope, name, value)?;
        }
        Ok(())
    }

    fn set_up(
        self: &Arc<Self>,
        lun_export: &mut LunExport,
        device: &Arc<Device>,
        spec: &IscsiSpec,
        auth: Option<Auth>,
    ) -> Result<(), HostError> {
        let group = lun_export.group.clone();
        let scope = Scope::Group(group.clone());
        if let Some(auth) = auth {
            self.set_auth(&scope, auth)?;
            self.set_attribute(&scope, "authentication", "1")?;
        }
        let digests = match spec.digests {
            Digests::Auto => "CRC32C,None",
            Digests::On => "CRC32C",
            Digests::Off => "None",
        };
        for name in ["HeaderDigest", "DataDigest"] {
            self.set_parameter(&group, name, digests)?;
        }
        // ACLs are added before the LUN appears, so that initiators without an ACL never see it.
        if !spec.acls.is_empty() {
            self.set_attribute(&scope, "generate_node_acls", "0")?;
        }
        let known = self.tree().group(&group).map_err(TargetsError::from)?.lun_of(lun_export.unit);
        lun_export.lun = match (known, spec.lun) {
            (Some(known), Some(wanted)) if known != wanted => {
                return Err(refused(format!("it is LUN {known} of {group} already, not {wanted}")));
            }
            (Some(known), _) => known,
            (None, wanted) => self.add_silent_lun(&group, wanted, device, spec.read_only)?,
        };
        self.lun_exports().list.push(lun_export.clone());
        for acl in &spec.acls {
            match self.add_acl(&group, &acl.initiator) {
                Ok(()) => {
                    let scope = Scope::Acl(group.clone(), acl.initiator.clone());
                    self.set_attribute(
                        &scope,
                        NOPIN_RESPONSE_TIMEOUT,
                        &NOPIN_RESPONSE_TIMEOUT_S.to_string(),
                    )?;
                }
                Err(TargetsError::Tree(TreeError::AclExists(_))) => {}
                Err(why) => return Err(why.into()),
            }
            self.map(&group, &acl.initiator, lun_export.lun, acl.read_only)?;
        }
        self.map_for_all(&group)?;
        match self.add_portal(&group, &spec.portal) {
            Ok(opened) => lun_export.portal = opened,
            Err(TargetsError::Tree(TreeError::PortalExists(_)))
                if self.tree().group(&group).is_ok_and(|known| known.portals.contains(&spec.portal)) => {}
            Err(why) => {
                self.lun_exports().list.retain(|other| other.id != lun_export.id);
                return Err(why.into());
            }
        }
        let mut lun_exports = self.lun_exports();
        if let Some(listed) = lun_exports.list.iter_mut().find(|listed| listed.id == lun_export.id) {
            listed.portal = lun_export.portal.clone();
        }
        drop(lun_exports);
        self.enable_group(&group, true)?;
        Ok(())
    }

    /// Maps a LUN to an initiator under the LUN's own number, or under the first free number if that one is
    /// taken.
    fn map(
        self: &Arc<Self>,
        group: &GroupId,
        initiator: &IscsiName,
        lun: u16,
        write_protect: bool,
    ) -> Result<(), TargetsError> {
        let tree = self.tree();
        let acl = tree.acl(group, initiator)?;
        if acl.mapped.values().any(|mapped| mapped.lun == lun) {
            return Ok(());
        }
        let number = (lun..=LUN_MAX).chain(0..lun).find(|number| !acl.mapped.contains_key(number));
        let number = number.ok_or(TreeError::Full)?;
        self.map_lun(group, initiator, number, MappedLun { lun, write_protect })
    }

    /// Maps the LUNs of exports without ACLs to all initiators that other exports of the group name.
    fn map_for_all(self: &Arc<Self>, group: &GroupId) -> Result<(), TargetsError> {
        let initiators: Vec<IscsiName> = self.tree().group(group)?.acls.keys().cloned().collect();
        let lun_exports: Vec<LunExport> = self.lun_exports().list.clone();
        for lun_export in
            lun_exports.iter().filter(|lun_export| lun_export.group == *group && lun_export.is_for_all)
        {
            for initiator in &initiators {
                self.map(group, initiator, lun_export.lun, false)?;
            }
        }
        Ok(())
    }

    /// Removes an export, and the objects that no other export needs.
    fn remove_lun_export(self: &Arc<Self>, id: u64) {
        let mut lun_exports = self.lun_exports();
        let Some(position) = lun_exports.list.iter().position(|lun_export| lun_export.id == id) else {
            return;
        };
        let gone = lun_exports.list.remove(position);
        let others: Vec<LunExport> =
            lun_exports.list.iter().filter(|lun_export| lun_export.group == gone.group).cloned().collect();
        let is_owned = lun_exports.owned.contains(&gone.group);
        if others.is_empty() {
            lun_exports.owned.retain(|group| *group != gone.group);
        }
        drop(lun_exports);
        // Missing objects were removed by targetcli.
        if others.is_empty() && is_owned {
            let _ = self.delete_group(&gone.group);
            if self.tree().targets.get(&gone.group.target).is_some_and(|target| target.groups.is_empty()) {
                let _ = self.delete_target(&gone.group.target);
            }
            return;
        }
        for initiator in &gone.initiators {
            if is_owned && !others.iter().any(|lun_export| lun_export.initiators.contains(initiator)) {
                let _ = self.remove_acl(&gone.group, initiator);
            }
        }
        let lun = self.tree().group(&gone.group).ok().and_then(|group| group.lun_of(gone.unit));
        if lun == Some(gone.lun) && !others.iter().any(|lun_export| lun_export.lun == gone.lun) {
            let _ = self.remove_lun(&gone.group, gone.lun);
        }
        if !others.iter().any(|lun_export| lun_export.portal == gone.portal) {
            let _ = self.remove_portal(&gone.group, &gone.portal);
        }
    }

    /// Waits until the sessions of a deleted group have ended.
    async fn sessions_of_deleted_gone(&self, group: &GroupId) {
        let gone = async {
            loop {
                let mut watchers = {
                    let state = self.lock();
                    if state.tree.group(group).is_ok() {
                        return;
                    }
                    let of_group = state.sessions.of_group(group);
                    let sessions = of_group.iter().filter_map(|id| state.sessions.list.get(id));
                    sessions.map(|session| session.changed.subscribe()).collect::<Vec<_>>()
                };
                let Some(first) = watchers.first_mut() else { return };
                // An error means that the session has ended.
                let _ = first.changed().await;
            }
        };
        let _ = tokio::time::timeout(LOGOUT_TIMEOUT, gone).await;
    }
}

/// A LUN as an export of its device: of `--iscsi` at one portal, or of targetcli at all portals of its group.
pub(super) struct IscsiExport {
    pub(super) targets: Arc<Targets>,
    pub(super) group: GroupId,
    pub(super) lun: u16,
    /// The number of the export and its portal; `None`: it belongs to targetcli.
    pub(super) lun_export: Option<(u64, PortalAddress)>,
}

impl Export for IscsiExport {
    fn info(&self, device: &Device) -> ExportInfo {
        let portal = self.lun_export.as_ref().map(|(_, portal)| portal);
        super::show::export_info(&self.targets, &self.group, self.lun, portal, device)
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        self.device_changed(Some(size));
        Box::pin(async { Ok(()) })
    }

    fn table_changed(&self, _: &TableSpec) -> Result<(), HostError> {
        self.device_changed(None);
        Ok(())
    }

    fn layers_changed(&self, _: &Device) -> Result<(), HostError> {
        self.device_changed(None);
        Ok(())
    }

    fn close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        match &self.lun_export {
            Some((id, _)) => self.targets.remove_lun_export(*id),
            // The LUN is missing if targetcli removed it.
            None => drop(self.targets.remove_lun(&self.group, self.lun)),
        }
        Box::pin(async { Ok(()) })
    }

    fn closed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async {
            self.targets.sessions_follow(&self.group).await;
            self.targets.forget_unused_units();
            self.targets.sessions_of_deleted_gone(&self.group).await;
            Ok(())
        })
    }
}

impl IscsiExport {
    fn device_changed(&self, size: Option<Bytes>) {
        let state = self.targets.lock();
        let lun = state.tree.group(&self.group).ok().and_then(|group| group.luns.get(&self.lun));
        if let Some(unit) = lun.and_then(|lun| state.units.get(&lun.unit)) {
            unit.device_changed(size.unwrap_or(unit.device().size()));
        }
    }
}
