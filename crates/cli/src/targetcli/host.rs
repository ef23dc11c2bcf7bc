//! The process that serves LIO's tree: changes of the configuration become devices, exports and iSCSI targets.
//!
//! A command runs on a thread that may block; the control plane's runtime executes its asynchronous parts.

use super::stacks;
use crate::exporter::is_for_kernel;
use crate::process;
use crate::served::Served;
use attach::iscsi::{
    Auth, ConnectionInfo, Credentials, GroupId, MappedLun, Scope, Secret, Targets, TargetsError, UnitId,
    UnitOptions,
};
use engine::control::{ControlError, HostView};
use engine::device::Device;
use engine::host::Host;
use engine::spec::{DeviceName, IscsiName, PortalAddress, StackSpec, TlsSpec, UblkSpec};
use engine::topology::{DeviceSpec, ExportKind, NbdOptions};
use lio::config::{Change, Config, Fabric, Facts, Lun, PortalId, StorageId, StorageObject, TargetId};
use lio::run::Request;
use lio::system::{Applied, BlockDevice, Connection, Session, System};
use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::runtime::Handle;

/// LIO's vendor and revision in INQUIRY; initiators may have rules that match them.
const VENDOR: &str = "LIO-ORG";
const REVISION: &str = "4.0";

/// LIO's tree in the process that serves it.
pub(crate) struct Lio {
    state: Mutex<State>,
    targets: Arc<Targets>,
}

#[derive(Default)]
struct State {
    /// Whether the process is ending, because nothing was configured after the last command.
    is_ending: bool,
    config: Config,
    devices: BTreeMap<StorageId, DeviceName>,
}

impl Lio {
    pub(crate) fn new(host: &Arc<Host>) -> Lio {
        Lio { state: Mutex::default(), targets: Targets::new(host, Some(state_folder())) }
    }

    /// Drops the logical units of devices that are being removed.
    pub(crate) fn forget_removed(&self) {
        self.targets.forget_unused_units();
    }
}

/// Returns the directory of reservations that survive a restart.
fn state_folder() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if rustix::process::geteuid().is_root() {
        return "/var/lib/blockyard".into();
    }
    let own = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
    own.unwrap_or_else(std::env::temp_dir).join("blockyard")
}

/// Answers a request of a client. The process ends if nothing is configured afterwards.
pub(crate) async fn answer(
    served: Arc<Served>,
    call: serde_json::Value,
) -> Result<serde_json::Value, ControlError> {
    let failed = |why: &dyn std::fmt::Display| ControlError::Failed(why.to_string());
    let request: Request = serde_json::from_value(call)
        .map_err(|_| failed(&"the request is malformed (is the client a blockyard of another version?)"))?;
    let handle = Handle::current();
    let done = tokio::task::spawn_blocking(move || {
        let Some(lio) = &served.lio else {
            return Err(ControlError::Failed("this process does not serve LIO's tree".to_owned()));
        };
        let mut state = lio.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { is_ending, config, devices } = &mut *state;
        if *is_ending {
            return Err(ControlError::Busy("the process is ending (try again)".to_owned()));
        }
        let value = match request {
            Request::Complete(call) => serde_json::to_value(lio::complete::complete(config, &call)),
            Request::Run(call) => {
                refresh(config, devices, &served.host);
                let mut system = HostSystem { served: &served, targets: &lio.targets, devices, handle };
                let answer = lio::run::run(config, &mut system, &call);
                if answer.is_empty {
                    *is_ending = true;
                    served.emptied.notify_one();
                }
                serde_json::to_value(answer)
            }
        };
        value.map_err(|why| ControlError::Failed(why.to_string()))
    });
    done.await.map_err(|why| failed(&why))?
}

/// Adopts sizes that were changed while the devices are served (`blockyard resize`).
fn refresh(config: &mut Config, devices: &BTreeMap<StorageId, DeviceName>, host: &Host) {
    for object in &mut config.storage {
        let device = devices.get(&object.id).and_then(|name| host.device(name.as_str()));
        if let Some(device) = device {
            object.size = device.size().0;
        }
    }
}

struct HostSystem<'a> {
    served: &'a Arc<Served>,
    targets: &'a Arc<Targets>,
    devices: &'a mut BTreeMap<StorageId, DeviceName>,
    handle: Handle,
}

fn text(why: impl std::fmt::Display) -> String {
    why.to_string()
}

fn name(wwn: &str) -> Result<IscsiName, String> {
    wwn.parse().map_err(text)
}

fn group(id: &lio::config::GroupId) -> Result<GroupId, String> {
    Ok(GroupId::new(name(&id.target.wwn)?, id.tag))
}

fn auth(auth: &lio::config::Auth) -> Auth {
    let credentials = |user: &str, secret: &str| {
        (!user.is_empty() || !secret.is_empty())
            .then(|| Credentials { name: user.to_owned(), secret: Secret::new(secret) })
    };
    Auth {
        user: credentials(&auth.userid, &auth.password),
        mutual: credentials(&auth.mutual_userid, &auth.mutual_password),
    }
}

fn address(portal: &PortalId) -> PortalAddress {
    let bare = portal.ip.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&portal.ip);
    // LIO writes every address as [::0].
    let host = bare.parse::<std::net::IpAddr>().map_or_else(|_| bare.to_owned(), |ip| ip.to_string());
    PortalAddress { host, port: portal.port }
}

impl HostSystem<'_> {
    fn device(&self, id: &StorageId) -> Result<Arc<Device>, String> {
        let name = self.devices.get(id).and_then(|name| self.served.host.device(name.as_str()));
        name.ok_or_else(|| format!("the device of {id} was removed"))
    }

    /// Opens a device and publishes its name.
    fn add_device(&mut self, object: &StorageObject, stack: StackSpec) -> Result<(), String> {
        let served = self.served;
        let is_taken = |name: &str| {
            served.host.device(name).is_some() || served.run.control_link(name).symlink_metadata().is_ok()
        };
        let name = match self.devices.get(&object.id) {
            Some(name) => name.clone(),
            None => stacks::device_name(&object.id).unique(is_taken),
        };
        let spec = DeviceSpec {
            name: name.clone(),
            stack,
            layers: Vec::new(),
            limits: None,
            depth: None,
            slow: None,
            io_timeout: None,
            line: 0,
        };
        self.handle.block_on(served.add(&spec, &[]))?;
        self.devices.insert(object.id.clone(), name);
        Ok(())
    }

    fn remove_device(&self, id: &StorageId) -> Result<(), String> {
        let Some(name) = self.devices.get(id) else { return Ok(()) };
        match self.handle.block_on(HostView::delete(&**self.served, name.as_str())) {
            // The device was removed with `blockyard del`.
            Err(ControlError::NotFound) => Ok(()),
            done => done.map_err(text),
        }
    }

    /// Opens a device again, with another block size.
    fn set_block_size(&mut self, object: &StorageObject, value: i64) -> Result<(), String> {
        let mut changed = object.clone();
        changed.attributes.insert("block_size", value);
        let (before, after) = (stacks::stack(object)?, stacks::stack(&changed)?);
        if before == after {
            return Err("[Errno 22] Invalid argument (the backstore has this block size only)".to_owned());
        }
        self.remove_device(&object.id)?;
        self.add_device(&changed, after).inspect_err(|_| {
            // Opens the device as before. If that fails, too, later commands report that the device is
            // missing.
            let _ = self.add_device(object, before);
        })
    }

    /// Sets an attribute of the logical unit, if the unit exists because a LUN has created it.
    fn set_unit_attribute(&self, id: &StorageId, name: &str, value: i64) -> Result<(), String> {
        let device = self.device(id)?;
        let unit = self.targets.unit_of(UnitId(device.number()));
        let value = u64::try_from(value).map_err(text)?;
        match unit.map_or(Ok(()), |unit| unit.logical().set_attribute(name, value).map_err(text)) {
            // An attribute of LIO that has no effect here is only kept for saving.
            Err(why) if why.starts_with("unknown attribute") => Ok(()),
            done => done,
        }
    }

    fn add_lun(
        &mut self,
        config: &Config,
        id: &lio::config::GroupId,
        index: u16,
        lun: &Lun,
    ) -> Result<Applied, String> {
        let device = self.device(&lun.storage)?;
        if id.target.fabric == Fabric::Loopback {
            return self.add_local(&device);
        }
        let object = config.object(&lun.storage).ok_or("the storage object is gone")?;
        let options = UnitOptions {
            serial: Some(object.wwn.clone()),
            product: Some(match object.attribute("emulate_model_alias") {
                0 => model(object).to_owned(),
                _ => object.id.name.clone(),
            }),
            vendor: Some(VENDOR.to_owned()),
            revision: Some(REVISION.to_owned()),
            ..UnitOptions::default()
        };
        let unit = self.targets.unit(&device, &options).map_err(text)?;
        for (name, value) in &object.attributes {
            // Values were checked when they were set; attributes that only LIO has fail here and are kept
            // for saving.
            let _ = unit.logical().set_attribute(name, u64::try_from(*value).unwrap_or_default());
        }
        let read_only = device.read_only();
        let group = group(id)?;
        self.targets.add_lun(&group, Some(index), &device, read_only).map_err(text)?;
        self.handle.block_on(self.targets.sessions_follow(&group));
        Ok(Applied::default())
    }

    /// Exports a device to this machine, through the best export that is possible.
    fn add_local(&mut self, device: &Arc<Device>) -> Result<Applied, String> {
        let kind = local_export(device);
        if is_for_kernel(&kind) {
            process::serve_the_kernel();
        }
        let applier = &self.served.applier;
        // Another process can take the ublk device over if this one dies.
        let spec = DeviceSpec {
            name: device.name(),
            stack: device.stack(),
            layers: Vec::new(),
            limits: None,
            depth: None,
            slow: None,
            io_timeout: None,
            line: 0,
        };
        applier
            .exporter
            .describe(&spec.text(&[ExportKind::Ublk(UblkSpec::default())]), Path::new("/targetcli"));
        let added = self.handle.block_on(applier.add_export(&self.served.host, device, &kind, &kind));
        let node = added.map_err(text)?.pop().map(|(_, address)| address);
        Ok(Applied { node })
    }

    fn remove_lun(&mut self, config: &Config, id: &lio::config::GroupId, index: u16) -> Result<(), String> {
        if id.target.fabric == Fabric::Iscsi {
            let group = group(id)?;
            self.targets.remove_lun(&group, index).map_err(text)?;
            self.handle.block_on(self.targets.sessions_follow(&group));
            return Ok(());
        }
        let lun =
            config.group(id).and_then(|group| group.luns.get(&index)).ok_or("No such LUN in configfs")?;
        // A device that was removed with `blockyard del` took its exports with it.
        let Ok(device) = self.device(&lun.storage) else { return Ok(()) };
        let host = &self.served.host;
        let exports = host.exports_of(&device).into_iter();
        let export = exports.into_iter().find(|export| Some(export.info(&device).address) == lun.node);
        let Some(export) = export else { return Ok(()) };
        self.handle.block_on(host.remove_export(&device, &export)).map_err(text)?;
        self.served.applier.registry.forget_export(&device, &local_export(&device));
        Ok(())
    }

    fn group_change(&mut self, change: &Change) -> Result<(), TargetsError> {
        let failed = |why: String| {
            TargetsError::Unit(engine::host::HostError::new(engine::host::HostErrorKind::Refused, why))
        };
        let group = |id| group(id).map_err(failed);
        let initiator = |wwn: &str| name(wwn).map_err(failed);
        let targets = self.targets;
        match change {
            Change::Enable(id, on) => targets.enable_group(&group(id)?, *on),
            Change::GroupAttribute(id, name, value) => {
                targets.set_attribute(&Scope::Group(group(id)?), name, &value.to_string())
            }
            Change::Parameter(id, name, value) => targets.set_parameter(&group(id)?, name, value),
            Change::GroupAuth(id, credentials) => {
                targets.set_auth(&Scope::Group(group(id)?), auth(credentials))
            }
            Change::AddPortal(id, portal) => {
                let (id, address) = (group(id)?, address(portal));
                self.handle.block_on(async { targets.add_portal(&id, &address) }).map(drop)
            }
            Change::RemovePortal(id, portal) => {
                let (id, address) = (group(id)?, address(portal));
                self.handle.block_on(async { targets.remove_portal(&id, &address) })
            }
            Change::AddAcl(id, wwn) => targets.add_acl(&group(id)?, &initiator(wwn)?),
            Change::RemoveAcl(id, wwn) => targets.remove_acl(&group(id)?, &initiator(wwn)?),
            Change::Tag(id, wwn, tag) => targets.tag_acl(&group(id)?, &initiator(wwn)?, tag.clone()),
            Change::AclAttribute(id, wwn, name, value) => {
                let scope = Scope::Acl(group(id)?, initiator(wwn)?);
                targets.set_attribute(&scope, name, &value.to_string())
            }
            Change::AclAuth(id, wwn, credentials) => {
                targets.set_auth(&Scope::Acl(group(id)?, initiator(wwn)?), auth(credentials))
            }
            Change::AddMapped(id, wwn, index, mapped) => {
                let mapped = MappedLun { lun: mapped.lun, write_protect: mapped.write_protect };
                let id = group(id)?;
                targets.map_lun(&id, &initiator(wwn)?, *index, mapped)?;
                self.handle.block_on(targets.sessions_follow(&id));
                Ok(())
            }
            Change::RemoveMapped(id, wwn, index) => {
                let id = group(id)?;
                targets.unmap_lun(&id, &initiator(wwn)?, *index)?;
                self.handle.block_on(targets.sessions_follow(&id));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Whether a change concerns the portal group of a loopback target, or the target itself.
fn is_of_loopback(change: &Change) -> bool {
    let target = match change {
        Change::AddTarget(id) | Change::RemoveTarget(id) => id,
        Change::AddGroup(id, _)
        | Change::RemoveGroup(id)
        | Change::Enable(id, _)
        | Change::GroupAttribute(id, ..) => &id.target,
        _ => return false,
    };
    target.fabric == Fabric::Loopback
}

/// Returns LIO's model of a storage object without `emulate_model_alias`.
fn model(object: &StorageObject) -> &'static str {
    use lio::config::Plugin;
    match object.id.plugin {
        Plugin::Block => "IBLOCK",
        Plugin::Fileio => "FILEIO",
        Plugin::Ramdisk => "RAMDISK-MCP",
        Plugin::User => "TCMU device",
    }
}

/// Returns the export of a loopback LUN: the default export, which is chosen when the LUN is added.
fn local_export(device: &Device) -> ExportKind {
    ExportKind::Default(NbdOptions { name: device.name().to_string(), tls: TlsSpec::default() })
}

impl System for HostSystem<'_> {
    fn can_change(&self) -> bool {
        true
    }

    fn open(&mut self, object: &StorageObject) -> Result<Facts, String> {
        stacks::check(object)?;
        self.add_device(object, stacks::stack(object)?)?;
        Ok(stacks::facts(object, &*self.device(&object.id)?))
    }

    fn apply(&mut self, config: &Config, change: &Change) -> Result<Applied, String> {
        // Closing sessions and portals starts tasks.
        let handle = self.handle.clone();
        let _entered = handle.enter();
        let is_iscsi = |id: &TargetId| id.fabric == Fabric::Iscsi;
        let done = match change {
            Change::AddLun(id, index, lun) => return self.add_lun(config, id, *index, lun),
            Change::RemoveLun(id, index) => self.remove_lun(config, id, *index),
            Change::RemoveStorage(id) => {
                let done = self.remove_device(id);
                if done.is_ok() {
                    self.devices.remove(id);
                }
                done
            }
            Change::StorageAttribute(id, "block_size", value) => {
                let object = config.object(id).ok_or("the storage object is gone")?;
                self.set_block_size(object, *value)
            }
            Change::StorageAttribute(id, name, value) => self.set_unit_attribute(id, name, *value),
            Change::Discovery(discovery) => {
                let enabled = if discovery.enabled { auth(&discovery.auth) } else { Default::default() };
                self.targets.set_auth(&Scope::Discovery, enabled).map_err(text)
            }
            Change::AddTarget(id) if is_iscsi(id) => {
                self.targets.create_target(&name(&id.wwn)?).map_err(text)
            }
            Change::RemoveTarget(id) if is_iscsi(id) => {
                self.targets.delete_target(&name(&id.wwn)?).map_err(text)
            }
            Change::AddGroup(id, _) if is_iscsi(&id.target) => {
                self.targets.create_group(&group(id)?).map_err(text)
            }
            Change::RemoveGroup(id) if is_iscsi(&id.target) => {
                self.targets.delete_group(&group(id)?).map_err(text)
            }
            // A loopback target is only a local device for each LUN, so other changes have no effect here.
            change if is_of_loopback(change) => Ok(()),
            change => self.group_change(change).map_err(text),
        };
        done.map(|()| Applied::default())
    }

    fn sessions(&self) -> Vec<Session> {
        let normal = self.targets.sessions().into_iter().filter_map(|session| {
            let group = session.group?;
            let connection = |connection: &ConnectionInfo| Connection {
                cid: connection.cid,
                address: connection.peer.ip().to_string(),
                transport: "TCP".to_owned(),
                state: "LOGGED_IN".to_owned(),
            };
            Some(Session {
                id: session.id,
                alias: session.alias.unwrap_or_default(),
                initiator: session.initiator,
                target: TargetId { fabric: Fabric::Iscsi, wwn: group.target.as_str().to_owned() },
                tag: group.tag,
                kind: "Normal".to_owned(),
                state: "LOGGED_IN".to_owned(),
                authenticated: session.user.is_some(),
                connections: session.connections.iter().map(connection).collect(),
            })
        });
        normal.collect()
    }

    fn random(&mut self, bytes: &mut [u8]) {
        let mut filled = 0;
        while filled < bytes.len() {
            let flags = rustix::rand::GetRandomFlags::empty();
            match rustix::rand::getrandom(&mut bytes[filled..], flags) {
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(why) => unreachable!("getrandom(2) fails only for invalid arguments: {why}"),
            }
        }
    }

    fn host_name(&self) -> String {
        rustix::system::uname().nodename().to_string_lossy().into_owned()
    }

    fn block_device(&self, path: &str) -> Option<BlockDevice> {
        let meta = std::fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device())?;
        let name = format!("/sys/dev/block/{}:{}/ro", major(&meta), minor(&meta));
        let read_only = std::fs::read_to_string(name).is_ok_and(|text| text.trim() == "1");
        // A device that can only be opened for reading is read-only, too.
        let opened = std::fs::OpenOptions::new().write(true).custom_flags(0).open(path);
        let refused = opened.is_err_and(|why| {
            matches!(why.raw_os_error(), Some(code) if code == rustix::io::Errno::ROFS.raw_os_error() || code == rustix::io::Errno::ACCESS.raw_os_error())
        });
        Some(BlockDevice { read_only: read_only || refused })
    }
}

fn major(meta: &std::fs::Metadata) -> u32 {
    use std::os::unix::fs::MetadataExt;
    rustix::fs::major(meta.rdev())
}

fn minor(meta: &std::fs::Metadata) -> u32 {
    use std::os::unix::fs::MetadataExt;
    rustix::fs::minor(meta.rdev())
}
