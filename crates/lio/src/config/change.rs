//! Modifications of a configuration, with LIO's checks.

use super::{
    ALUA, AUTH, Acl, AluaGroup, Auth, Backing, Config, DEFAULT_GROUP, Discovery, Extra, Fabric, Group,
    GroupId, Lun, MappedLun, Plugin, Portal, PortalId, StorageId, StorageObject, Target, TargetId,
};
use crate::attributes::{self, Context};

/// One modification. The caller checks it, applies it to the system, and then to the configuration.
#[derive(Clone, PartialEq, Debug)]
pub enum Change {
    /// Adds a storage object.
    AddStorage(Box<StorageObject>),
    /// Removes a storage object that no LUN refers to.
    RemoveStorage(StorageId),
    /// Sets an attribute of a storage object.
    StorageAttribute(StorageId, &'static str, i64),
    /// Adds a target port group with a number to a storage object.
    AddAlua(StorageId, String, u16),
    /// Removes a target port group; its LUNs return to the default group.
    RemoveAlua(StorageId, String),
    /// Sets a value of a target port group.
    Alua(StorageId, String, &'static str, i64),
    /// Sets the authentication of discovery.
    Discovery(Discovery),
    /// Adds a target without portal groups.
    AddTarget(TargetId),
    /// Removes a target without portal groups.
    RemoveTarget(TargetId),
    /// Adds a portal group. The text is the initiator name of a loopback target.
    AddGroup(GroupId, Option<String>),
    /// Removes an empty portal group.
    RemoveGroup(GroupId),
    /// Enables or disables a portal group.
    Enable(GroupId, bool),
    /// Sets an attribute of a portal group.
    GroupAttribute(GroupId, &'static str, i64),
    /// Sets a parameter of a portal group.
    Parameter(GroupId, &'static str, String),
    /// Sets the credentials of a portal group.
    GroupAuth(GroupId, Auth),
    /// Adds a portal.
    AddPortal(GroupId, PortalId),
    /// Removes a portal.
    RemovePortal(GroupId, PortalId),
    /// Adds a LUN.
    AddLun(GroupId, u16, Lun),
    /// Removes a LUN and its mappings in ACLs.
    RemoveLun(GroupId, u16),
    /// Moves a LUN to a target port group.
    LunAlua(GroupId, u16, String),
    /// Adds an ACL without LUNs.
    AddAcl(GroupId, String),
    /// Removes an ACL.
    RemoveAcl(GroupId, String),
    /// Sets or removes the tag of an ACL.
    Tag(GroupId, String, Option<String>),
    /// Sets an attribute of an ACL.
    AclAttribute(GroupId, String, &'static str, i64),
    /// Sets the credentials of an ACL.
    AclAuth(GroupId, String, Auth),
    /// Adds a LUN to an ACL.
    AddMapped(GroupId, String, u16, MappedLun),
    /// Removes a LUN of an ACL.
    RemoveMapped(GroupId, String, u16),
}

/// Longest name of a target or an initiator, in bytes (LIO's ISCSI_IQN_LEN with its NUL is 224).
const NAME_LEN_MAX: usize = 223;
/// Longest credential, in bytes (rtslib).
const CREDENTIAL_LEN_MAX: usize = 255;

type Checked = Result<(), String>;

fn exists(what: &str) -> String {
    format!("This {what} already exists in configFS")
}

fn missing(what: &str) -> String {
    format!("No such {what} in configfs")
}

fn unless(refused: bool, why: impl Into<String>) -> Checked {
    if refused { Err(why.into()) } else { Ok(()) }
}

impl Config {
    /// Checks whether a change is allowed. Values of attributes are checked, too.
    ///
    /// # Errors
    /// LIO's message.
    pub fn check(&self, change: &Change) -> Checked {
        match change {
            Change::AddStorage(object) => self.check_storage(object),
            Change::RemoveStorage(id) => {
                self.has_object(id)?;
                unless(self.users(id).next().is_some(), "a LUN refers to the storage object")
            }
            Change::StorageAttribute(id, name, value) => {
                let object = self.has_object(id)?;
                let row = attributes::find(attributes::STORAGE, name).ok_or_else(|| unknown(name))?;
                attributes::check(row, *value, Some(&self.context(object))).map(drop)
            }
            Change::AddAlua(id, name, number) => self.check_alua(id, name, *number),
            Change::RemoveAlua(id, name) => {
                unless(name == DEFAULT_GROUP, "Can not delete default_tg_pt_gp")?;
                self.has_alua(id, name).map(drop)
            }
            Change::Alua(id, group, name, value) => {
                self.has_alua(id, group)?;
                check_alua_value(name, *value)
            }
            Change::Discovery(discovery) => check_auth(&discovery.auth),
            Change::AddTarget(id) => {
                unless(self.targets.contains_key(id), exists("Target"))?;
                unless(id.wwn.len() > NAME_LEN_MAX, format!("a name has at most {NAME_LEN_MAX} bytes"))
            }
            Change::RemoveTarget(id) => match self.targets.get(id) {
                None => Err(missing("Target")),
                Some(target) => unless(!target.groups.is_empty(), "it has target portal groups"),
            },
            Change::AddGroup(id, _) => {
                let target = self.targets.get(&id.target).ok_or_else(|| missing("Target"))?;
                unless(target.groups.contains_key(&id.tag), exists("TPG"))
            }
            Change::RemoveGroup(id) | Change::Enable(id, _) => self.has_group(id).map(drop),
            Change::GroupAttribute(id, name, value) => {
                self.has_group(id)?;
                let rows = id.target.fabric.attributes();
                let row = attributes::find(rows, name).ok_or_else(|| unknown(name))?;
                attributes::check(row, *value, None).map(drop)
            }
            Change::Parameter(id, name, value) => {
                self.has_group(id)?;
                let row = attributes::PARAMETERS.iter().find(|row| row.name == *name);
                attributes::check_parameter(row.ok_or_else(|| unknown(name))?, value)
            }
            Change::GroupAuth(id, auth) => {
                self.has_group(id)?;
                check_auth(auth)
            }
            Change::AddPortal(id, portal) => self.check_portal(id, portal),
            Change::RemovePortal(id, portal) => {
                let is_there = self.has_group(id)?.portals.contains_key(portal);
                unless(!is_there, missing("NetworkPortal"))
            }
            Change::AddLun(id, index, lun) => {
                let group = self.has_group(id)?;
                unless(group.luns.contains_key(index), exists("LUN"))?;
                let object = self.has_object(&lun.storage)?;
                unless(!object.groups.contains_key(&lun.group), missing("ALUATargetPortGroup"))
            }
            Change::RemoveLun(id, index) => self.has_lun(id, *index).map(drop),
            Change::LunAlua(id, index, name) => {
                let lun = self.has_lun(id, *index)?;
                self.has_alua(&lun.storage, name).map(drop)
            }
            Change::AddAcl(id, wwn) => {
                unless(self.has_group(id)?.acls.contains_key(wwn), exists("NodeACL"))?;
                unless(wwn.len() > NAME_LEN_MAX, format!("a name has at most {NAME_LEN_MAX} bytes"))
            }
            Change::RemoveAcl(id, wwn) | Change::Tag(id, wwn, _) => self.has_acl(id, wwn).map(drop),
            Change::AclAttribute(id, wwn, name, value) => {
                self.has_acl(id, wwn)?;
                let row = attributes::find(attributes::ACL, name).ok_or_else(|| unknown(name))?;
                attributes::check(row, *value, None).map(drop)
            }
            Change::AclAuth(id, wwn, auth) => {
                self.has_acl(id, wwn)?;
                check_auth(auth)
            }
            Change::AddMapped(id, wwn, index, mapped) => {
                unless(self.has_acl(id, wwn)?.luns.contains_key(index), exists("MappedLUN"))?;
                let has_lun = self.has_group(id)?.luns.contains_key(&mapped.lun);
                unless(!has_lun, format!("LUN {} does not exist in this TPG", mapped.lun))
            }
            Change::RemoveMapped(id, wwn, index) => {
                unless(!self.has_acl(id, wwn)?.luns.contains_key(index), missing("MappedLUN"))
            }
        }
    }

    /// Applies a change that [`check`](Config::check) permits.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::AddStorage(object) => self.storage.push(*object),
            Change::RemoveStorage(id) => self.storage.retain(|object| object.id != id),
            Change::StorageAttribute(id, name, value) => self.set_attribute(&id, name, value),
            Change::AddAlua(id, name, number) => {
                if let Some(object) = self.object_mut(&id) {
                    object.groups.insert(name, AluaGroup::new(number));
                }
            }
            Change::RemoveAlua(id, name) => self.remove_alua(&id, &name),
            Change::Alua(id, group, name, value) => {
                let object = self.object_mut(&id);
                if let Some(group) = object.and_then(|object| object.groups.get_mut(&group)) {
                    group.values.insert(name, value);
                }
            }
            Change::Discovery(discovery) => self.discovery = discovery,
            Change::AddTarget(id) => {
                self.targets.insert(id, Target::default());
            }
            Change::RemoveTarget(id) => {
                self.targets.remove(&id);
            }
            Change::AddGroup(id, nexus) => {
                let group = Group::new(id.target.fabric, nexus);
                if let Some(target) = self.targets.get_mut(&id.target) {
                    target.groups.insert(id.tag, group);
                }
            }
            Change::RemoveGroup(id) => {
                if let Some(target) = self.targets.get_mut(&id.target) {
                    target.groups.remove(&id.tag);
                }
            }
            other => self.apply_to_group(other),
        }
    }

    fn apply_to_group(&mut self, change: Change) {
        let id = match &change {
            Change::Enable(id, _)
            | Change::GroupAttribute(id, ..)
            | Change::Parameter(id, ..)
            | Change::GroupAuth(id, _)
            | Change::AddPortal(id, _)
            | Change::RemovePortal(id, _)
            | Change::AddLun(id, ..)
            | Change::RemoveLun(id, _)
            | Change::LunAlua(id, ..)
            | Change::AddAcl(id, _)
            | Change::RemoveAcl(id, _)
            | Change::Tag(id, ..)
            | Change::AclAttribute(id, ..)
            | Change::AclAuth(id, ..)
            | Change::AddMapped(id, ..)
            | Change::RemoveMapped(id, ..) => id.clone(),
            _ => return,
        };
        let Some(group) = self.group_mut(&id) else { return };
        match change {
            Change::Enable(_, on) => group.enabled = on,
            Change::GroupAttribute(_, name, value) => {
                group.attributes.insert(name, value);
                if name == "authentication" {
                    // LIO's iscsit_ta_authentication does the same.
                    let methods = if value == 0 { "CHAP,None" } else { "CHAP" };
                    group.parameters.insert("AuthMethod", methods.to_owned());
                }
            }
            Change::Parameter(_, name, value) => {
                group.parameters.insert(name, value);
            }
            Change::GroupAuth(_, auth) => group.auth = auth,
            Change::AddPortal(_, portal) => {
                group.portals.insert(portal, Portal::default());
            }
            Change::RemovePortal(_, portal) => {
                group.portals.remove(&portal);
            }
            Change::AddLun(_, index, lun) => {
                group.luns.insert(index, lun);
            }
            Change::RemoveLun(_, index) => {
                group.luns.remove(&index);
                for acl in group.acls.values_mut() {
                    acl.luns.retain(|_, mapped| mapped.lun != index);
                }
            }
            Change::LunAlua(_, index, name) => {
                if let Some(lun) = group.luns.get_mut(&index) {
                    lun.group = name;
                }
            }
            Change::AddAcl(_, wwn) => {
                group.acls.insert(wwn, Acl::new());
            }
            Change::RemoveAcl(_, wwn) => {
                group.acls.remove(&wwn);
            }
            Change::Tag(_, wwn, _)
            | Change::AclAttribute(_, wwn, ..)
            | Change::AclAuth(_, wwn, _)
            | Change::AddMapped(_, wwn, ..)
            | Change::RemoveMapped(_, wwn, _)
                if !group.acls.contains_key(&wwn) => {}
            Change::Tag(_, wwn, tag) => group.acl(&wwn).tag = tag,
            Change::AclAttribute(_, wwn, name, value) => {
                group.acl(&wwn).attributes.insert(name, value);
            }
            Change::AclAuth(_, wwn, auth) => group.acl(&wwn).auth = auth,
            Change::AddMapped(_, wwn, index, mapped) => {
                group.acl(&wwn).luns.insert(index, mapped);
            }
            Change::RemoveMapped(_, wwn, index) => {
                group.acl(&wwn).luns.remove(&index);
            }
            _ => {}
        }
    }

    fn set_attribute(&mut self, id: &StorageId, name: &'static str, value: i64) {
        let Some(object) = self.object_mut(id) else { return };
        object.attributes.insert(name, value);
    }

    fn remove_alua(&mut self, id: &StorageId, name: &str) {
        let users: Vec<_> = self.users(id).collect();
        for (group, index) in users {
            let lun = self.group_mut(&group).and_then(|group| group.luns.get_mut(&index));
            if let Some(lun) = lun.filter(|lun| lun.group == name) {
                DEFAULT_GROUP.clone_into(&mut lun.group);
            }
        }
        if let Some(object) = self.object_mut(id) {
            object.groups.remove(name);
        }
    }

    /// Returns the properties that limit the values of a storage object's attributes.
    pub fn context(&self, object: &StorageObject) -> Context {
        Context {
            is_exported: self.users(&object.id).next().is_some(),
            has_own_cache: object.id.plugin == Plugin::Block,
            can_unmap: object.can_unmap,
            hw_max_sectors: object.attribute("hw_max_sectors"),
            hw_queue_depth: object.attribute("hw_queue_depth"),
        }
    }

    fn check_storage(&self, object: &StorageObject) -> Checked {
        let StorageId { plugin, name } = &object.id;
        let is_bad = name.is_empty() || name.contains(['/', ' ', '\t', '\n']);
        unless(is_bad, "A storage object's name cannot contain  /, newline or spaces/tabs")?;
        let is_taken = self.object(&object.id).is_some();
        unless(is_taken, format!("Storage object {}/{name} exists", plugin.name()))?;
        // Paths treat `.` and `..` specially, so no node may have these names.
        unless(matches!(name.as_str(), "." | ".."), "A storage object cannot have this name")?;
        let twice = self.storage.iter().find(|other| other.wwn == object.wwn);
        if let Some(other) = twice {
            return Err(format!("its wwn {} is that of {}", object.wwn, other.id));
        }
        if let Backing::Ramdisk { .. } = object.backing {
            unless(object.size == 0, "a ramdisk needs a size")?;
        }
        Ok(())
    }

    fn check_alua(&self, id: &StorageId, name: &str, number: u16) -> Checked {
        let object = self.has_object(id)?;
        unless(number == 0, "The TPG Tag must be between 1 and 65535")?;
        unless(object.groups.contains_key(name), exists("ALUATargetPortGroup"))?;
        unless(name.is_empty() || name.contains('/'), "a group's name is not empty and has no /")?;
        let is_taken = object.groups.values().any(|group| group.id == number);
        unless(
            is_taken,
            format!("Cannot set id to {number}: [Errno 22] Invalid argument (another group has it)"),
        )
    }

    fn check_portal(&self, id: &GroupId, portal: &PortalId) -> Checked {
        let group = self.has_group(id)?;
        unless(portal.port == 0, "Invalid port")?;
        unless(group.portals.contains_key(portal), exists("NetworkPortal"))?;
        let target = self.targets.get(&id.target);
        let is_shared = target
            .is_some_and(|target| target.groups.values().any(|group| group.portals.contains_key(portal)));
        unless(
            is_shared,
            "Could not create NetworkPortal in configFS: TPGs within a target cannot share ip:port",
        )?;
        crate::wwn::portal_address(portal).map(drop).ok_or_else(|| {
            let why = "not an IPv4 address, or an IPv6 address in brackets";
            format!("Could not create NetworkPortal in configFS: {}: {why}", portal.ip)
        })
    }

    fn has_object(&self, id: &StorageId) -> Result<&StorageObject, String> {
        self.object(id).ok_or_else(|| format!("Storage object {id} not found"))
    }

    fn has_alua(&self, id: &StorageId, name: &str) -> Result<&AluaGroup, String> {
        self.has_object(id)?.groups.get(name).ok_or_else(|| missing("ALUATargetPortGroup"))
    }

    fn has_group(&self, id: &GroupId) -> Result<&Group, String> {
        self.group(id).ok_or_else(|| missing("TPG"))
    }

    fn has_lun(&self, id: &GroupId, index: u16) -> Result<&Lun, String> {
        self.has_group(id)?.luns.get(&index).ok_or_else(|| missing("LUN"))
    }

    fn has_acl(&self, id: &GroupId, wwn: &str) -> Result<&Acl, String> {
        self.has_group(id)?.acls.get(wwn).ok_or_else(|| missing("NodeACL"))
    }

    /// Keeps the unknown keys of the file's top level.
    pub(crate) fn keep(&mut self, extra: Extra) {
        self.extra.extend(extra);
    }
}

impl Group {
    /// Returns an ACL that exists.
    fn acl(&mut self, wwn: &str) -> &mut Acl {
        self.acls.entry(wwn.to_owned()).or_default()
    }
}

fn unknown(name: &str) -> String {
    format!("Cannot find attribute: {name}")
}

/// Checks a value of a target port group.
fn check_alua_value(name: &str, value: i64) -> Checked {
    let Some((_, _, low, high)) = ALUA.into_iter().find(|(known, ..)| *known == name) else {
        return Err(unknown(name));
    };
    let is_state = name != "alua_access_state" || super::ALUA_STATES.iter().any(|(state, _)| *state == value);
    // The range of the status admits only None, explicit and implicit.
    let fits = (low..=high).contains(&value) && is_state;
    unless(!fits, format!("[Errno 22] Invalid argument ({low} to {high})"))
}

fn check_auth(auth: &Auth) -> Checked {
    AUTH.into_iter().try_for_each(|key| {
        let value = auth.get(key);
        unless(value == "NULL", "'NULL' is not a permitted value")?;
        let is_long = value.len() > CREDENTIAL_LEN_MAX;
        unless(is_long, format!("Value longer than maximum length of {CREDENTIAL_LEN_MAX}"))
    })
}

impl Fabric {
    /// Whether portal groups of the fabric have ACLs, portals and credentials.
    pub fn has_acls(self) -> bool {
        self == Fabric::Iscsi
    }
}
