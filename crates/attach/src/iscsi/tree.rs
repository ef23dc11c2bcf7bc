//! The configuration of targets, portal groups, LUNs and ACLs, and the rules for changing it.
//!
//! No I/O happens here: [`Targets`](super::Targets) opens portals and notifies sessions. The names are
//! LIO's.

use super::auth::Auth;
use super::settings::{ACL_ATTRIBUTES, GROUP_ATTRIBUTES, PARAMETERS, SettingError, Settings};
use spec::{IscsiName, PortalAddress};
use std::collections::BTreeMap;
use std::fmt;

/// The attribute of ACLs for the time to answer a NOP-In, in seconds.
pub(super) const NOPIN_RESPONSE_TIMEOUT: &str = "nopin_response_timeout";
/// The answer time in seconds for initiators without an ACL.
pub(super) const NOPIN_RESPONSE_TIMEOUT_S: i64 = 60;

/// A target portal group: a target and a tag.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupId {
    /// The target.
    pub target: IscsiName,
    /// The tag, from 1.
    pub tag: u16,
}

impl GroupId {
    /// Names a portal group.
    pub fn new(target: IscsiName, tag: u16) -> GroupId {
        GroupId { target, tag }
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (portal group {})", self.target, self.tag)
    }
}

/// A logical unit of this process: the number of its device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UnitId(pub usize);

/// All targets, and how initiators authenticate to list them.
#[derive(Clone, Default, Debug)]
pub struct Tree {
    /// The targets, by name.
    pub targets: BTreeMap<IscsiName, Target>,
    /// Authentication of discovery sessions. If none is set, discovery needs none.
    pub discovery: Auth,
}

/// A target.
#[derive(Clone, Default, Debug)]
pub struct Target {
    /// Portal groups of the target, by tag.
    pub groups: BTreeMap<u16, Group>,
}

/// A portal group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Whether initiators may log in.
    pub is_enabled: bool,
    /// Relative target port identifier (SPC-6, section 3.1), unique in this process.
    pub relative_port: u16,
    /// Attributes ([`GROUP_ATTRIBUTES`]).
    pub attributes: Settings,
    /// Negotiated parameters ([`PARAMETERS`]).
    pub parameters: Settings,
    /// Authentication of initiators whose ACL sets none.
    pub auth: Auth,
    /// Portals of the group, as they were given.
    pub portals: Vec<PortalAddress>,
    /// LUNs of the group, by number.
    pub luns: BTreeMap<u16, Lun>,
    /// ACLs of the group, by initiator.
    pub acls: BTreeMap<IscsiName, Acl>,
}

/// A LUN of a portal group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lun {
    /// The logical unit.
    pub unit: UnitId,
    /// Whether initiators without an ACL of their own may only read, whatever the group's attributes say.
    pub read_only: bool,
    /// The name of its target port group (ALUA).
    pub alua_group: String,
}

impl Lun {
    /// The target port group that LIO creates for each logical unit.
    pub const ALUA_DEFAULT: &str = "default_tg_pt_gp";
}

/// An initiator that may log in.
#[derive(Clone, Debug)]
pub struct Acl {
    /// Attributes ([`ACL_ATTRIBUTES`]).
    pub attributes: Settings,
    /// Authentication of the initiator; if none is set, that of the group applies.
    pub auth: Auth,
    /// LIO's tag, a name that several ACLs may share.
    pub tag: Option<String>,
    /// The LUNs as the initiator sees them.
    pub mapped: BTreeMap<u16, MappedLun>,
}

/// A LUN as an initiator sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappedLun {
    /// The LUN of the portal group.
    pub lun: u16,
    /// Whether the initiator may only read.
    pub write_protect: bool,
}

/// A LUN that an initiator sees: the result of its ACL, or of demo mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VisibleLun {
    /// The number under which the initiator sees it.
    pub lun: u16,
    /// The logical unit.
    pub unit: UnitId,
    /// Whether the initiator may only read.
    pub read_only: bool,
}

/// How an initiator has to authenticate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoginAuth {
    /// Whether a login without authentication is refused.
    pub is_required: bool,
    /// The users and secrets.
    pub auth: Auth,
}

/// An object, for messages and settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Discovery sessions.
    Discovery,
    /// A portal group.
    Group(GroupId),
    /// An ACL of a portal group.
    Acl(GroupId, IscsiName),
}

/// Why a change is refused. Nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TreeError {
    /// The target does not exist.
    #[error("there is no target {0}")]
    NoTarget(IscsiName),
    /// The target exists already.
    #[error("target {0} exists already")]
    TargetExists(IscsiName),
    /// The portal group does not exist.
    #[error("there is no target {0}")]
    NoGroup(GroupId),
    /// The portal group exists already.
    #[error("target {0} exists already")]
    GroupExists(GroupId),
    /// The portal belongs to a group of this target already.
    #[error("portal {0} belongs to the target already")]
    PortalExists(PortalAddress),
    /// The portal group has no such portal.
    #[error("the portal group has no portal {0}")]
    NoPortal(PortalAddress),
    /// The number is taken.
    #[error("LUN {0} exists already (choose another number)")]
    LunExists(u16),
    /// The logical unit is a LUN of the group already.
    #[error("the device is LUN {0} of the portal group already")]
    UnitExists(u16),
    /// The LUN does not exist.
    #[error("the portal group has no LUN {0}")]
    NoLun(u16),
    /// All numbers are taken.
    #[error("the portal group has no free LUN")]
    Full,
    /// The initiator has no ACL.
    #[error("initiator {0} has no ACL")]
    NoAcl(IscsiName),
    /// The initiator has an ACL already.
    #[error("initiator {0} has an ACL already")]
    AclExists(IscsiName),
    /// The initiator sees that LUN already.
    #[error("the ACL maps LUN {0} already")]
    MappedExists(u16),
    /// The initiator does not see that LUN.
    #[error("the ACL maps no LUN {0}")]
    NotMapped(u16),
    /// A number is out of range.
    #[error("{what} {number} is out of range (use {min} to {max})")]
    OutOfRange {
        /// The number's meaning.
        what: &'static str,
        /// The number.
        number: u32,
        /// The least one.
        min: u16,
        /// The largest one.
        max: u16,
    },
    /// A setting or its value is refused.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// Discovery has no settings but its authentication.
    #[error("discovery has no such setting (set its authentication)")]
    Discovery,
}

/// The largest LUN: flat addressing has 14 bits (SAM-5, section 4.7.7.3).
pub const LUN_MAX: u16 = 16383;

impl Group {
    fn new(relative_port: u16) -> Group {
        Group {
            is_enabled: false,
            relative_port,
            attributes: Settings::new(GROUP_ATTRIBUTES),
            parameters: Settings::new(PARAMETERS),
            auth: Auth::default(),
            portals: Vec::new(),
            luns: BTreeMap::new(),
            acls: BTreeMap::new(),
        }
    }

    /// Returns whether initiators without an ACL may log in.
    pub fn is_demo(&self) -> bool {
        self.attributes.is_on("generate_node_acls")
    }

    /// Returns whether an initiator may log in.
    pub fn admits(&self, initiator: &str) -> bool {
        self.acls.contains_key(initiator) || self.is_demo()
    }

    /// Returns the LUNs that an initiator sees, by number; `None` if it may not log in.
    pub fn visible(&self, initiator: &str) -> Option<Vec<VisibleLun>> {
        let Some(acl) = self.acls.get(initiator) else {
            let is_protected = self.attributes.is_on("demo_mode_write_protect");
            let all = self.luns.iter().map(|(lun, entry)| VisibleLun {
                lun: *lun,
                unit: entry.unit,
                read_only: is_protected || entry.read_only,
            });
            return self.is_demo().then(|| all.collect());
        };
        let is_protected = self.attributes.is_on("prod_mode_write_protect");
        let mapped = acl.mapped.iter().filter_map(|(number, mapped)| {
            let entry = self.luns.get(&mapped.lun)?;
            let read_only = is_protected || mapped.write_protect || entry.read_only;
            Some(VisibleLun { lun: *number, unit: entry.unit, read_only })
        });
        Some(mapped.collect())
    }

    /// Returns how an initiator has to authenticate.
    pub fn login_auth(&self, initiator: &str) -> LoginAuth {
        let acl = self.acls.get(initiator);
        let is_required = match acl.map_or(-1, |acl| acl.attributes.number("authentication")) {
            -1 => self.attributes.is_on("authentication"),
            own => own == 1,
        };
        let own = acl.map(|acl| &acl.auth).filter(|auth| auth.is_set());
        LoginAuth { is_required, auth: own.unwrap_or(&self.auth).clone() }
    }

    /// Returns an attribute of an initiator's ACL, or the default if it has none.
    pub(super) fn acl_attribute(&self, initiator: &str, name: &'static str) -> i64 {
        static DEFAULTS: Settings = Settings::new(ACL_ATTRIBUTES);
        match self.acls.get(initiator) {
            Some(acl) => acl.attributes.number(name),
            // Programs on libiscsi answer a NOP-In only while they wait for a command of theirs.
            None if name == NOPIN_RESPONSE_TIMEOUT => NOPIN_RESPONSE_TIMEOUT_S,
            None => DEFAULTS.number(name),
        }
    }

    /// Returns the LUN of a unit.
    pub fn lun_of(&self, unit: UnitId) -> Option<u16> {
        self.luns.iter().find(|(_, lun)| lun.unit == unit).map(|(number, _)| *number)
    }
}

impl Tree {
    /// Returns a portal group.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn group(&self, id: &GroupId) -> Result<&Group, TreeError> {
        let target = self.targets.get(&id.target).ok_or_else(|| TreeError::NoTarget(id.target.clone()))?;
        target.groups.get(&id.tag).ok_or_else(|| TreeError::NoGroup(id.clone()))
    }

    pub(super) fn group_mut(&mut self, id: &GroupId) -> Result<&mut Group, TreeError> {
        let no_target = || TreeError::NoTarget(id.target.clone());
        let target = self.targets.get_mut(&id.target).ok_or_else(no_target)?;
        target.groups.get_mut(&id.tag).ok_or_else(|| TreeError::NoGroup(id.clone()))
    }

    /// Returns an ACL.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn acl(&self, id: &GroupId, initiator: &IscsiName) -> Result<&Acl, TreeError> {
        self.group(id)?.acls.get(initiator).ok_or_else(|| TreeError::NoAcl(initiator.clone()))
    }

    pub(super) fn acl_mut(&mut self, id: &GroupId, initiator: &IscsiName) -> Result<&mut Acl, TreeError> {
        self.group_mut(id)?.acls.get_mut(initiator).ok_or_else(|| TreeError::NoAcl(initiator.clone()))
    }

    pub(super) fn create_target(&mut self, name: &IscsiName) -> Result<(), TreeError> {
        if self.targets.contains_key(name) {
            return Err(TreeError::TargetExists(name.clone()));
        }
        self.targets.insert(name.clone(), Target::default());
        Ok(())
    }

    pub(super) fn delete_target(&mut self, name: &IscsiName) -> Result<Target, TreeError> {
        self.targets.remove(name).ok_or_else(|| TreeError::NoTarget(name.clone()))
    }

    pub(super) fn create_group(&mut self, id: &GroupId) -> Result<(), TreeError> {
        in_range("tag", id.tag.into(), 1, u16::MAX)?;
        let no_target = || TreeError::NoTarget(id.target.clone());
        let groups = || self.targets.values().flat_map(|target| target.groups.values());
        let is_free = |port: &u16| groups().all(|group| group.relative_port != *port);
        let relative_port = (1..=u16::MAX).find(is_free).ok_or(TreeError::Full)?;
        let target = self.targets.get_mut(&id.target).ok_or_else(no_target)?;
        if target.groups.contains_key(&id.tag) {
            return Err(TreeError::GroupExists(id.clone()));
        }
        target.groups.insert(id.tag, Group::new(relative_port));
        Ok(())
    }

    pub(super) fn delete_group(&mut self, id: &GroupId) -> Result<Group, TreeError> {
        self.group(id)?;
        let target = self.targets.get_mut(&id.target);
        target.and_then(|target| target.groups.remove(&id.tag)).ok_or_else(|| TreeError::NoGroup(id.clone()))
    }

    /// A portal belongs to one group of a target, as logins name only the target. Groups of several targets
    /// may share it.
    pub(super) fn add_portal(&mut self, id: &GroupId, portal: &PortalAddress) -> Result<(), TreeError> {
        self.group(id)?;
        let target = self.targets.get(&id.target);
        let mut others = target.into_iter().flat_map(|target| target.groups.values());
        if others.any(|group| group.portals.contains(portal)) {
            return Err(TreeError::PortalExists(portal.clone()));
        }
        self.group_mut(id)?.portals.push(portal.clone());
        Ok(())
    }

    pub(super) fn remove_portal(&mut self, id: &GroupId, portal: &PortalAddress) -> Result<(), TreeError> {
        let portals = &mut self.group_mut(id)?.portals;
        let position = portals.iter().position(|other| other == portal);
        let position = position.ok_or_else(|| TreeError::NoPortal(portal.clone()))?;
        portals.remove(position);
        Ok(())
    }

    /// Adds a LUN; without a number, the first free one. Existing ACLs are not changed.
    pub(super) fn add_lun(&mut self, id: &GroupId, number: Option<u16>, lun: Lun) -> Result<u16, TreeError> {
        let group = self.group_mut(id)?;
        if let Some(other) = group.lun_of(lun.unit) {
            return Err(TreeError::UnitExists(other));
        }
        let number = match number {
            None => (0..=LUN_MAX).find(|n| !group.luns.contains_key(n)).ok_or(TreeError::Full)?,
            Some(number) => {
                in_range("LUN", number.into(), 0, LUN_MAX)?;
                if group.luns.contains_key(&number) {
                    return Err(TreeError::LunExists(number));
                }
                number
            }
        };
        group.luns.insert(number, lun);
        Ok(number)
    }

    /// Removes a LUN, and its mappings from all ACLs.
    pub(super) fn remove_lun(&mut self, id: &GroupId, number: u16) -> Result<Lun, TreeError> {
        let group = self.group_mut(id)?;
        let lun = group.luns.remove(&number).ok_or(TreeError::NoLun(number))?;
        group.acls.values_mut().for_each(|acl| acl.mapped.retain(|_, mapped| mapped.lun != number));
        Ok(lun)
    }

    pub(super) fn add_acl(&mut self, id: &GroupId, initiator: &IscsiName) -> Result<(), TreeError> {
        let group = self.group_mut(id)?;
        if group.acls.contains_key(initiator) {
            return Err(TreeError::AclExists(initiator.clone()));
        }
        let acl = Acl {
            attributes: Settings::new(ACL_ATTRIBUTES),
            auth: Auth::default(),
            tag: None,
            mapped: BTreeMap::new(),
        };
        group.acls.insert(initiator.clone(), acl);
        Ok(())
    }

    pub(super) fn remove_acl(&mut self, id: &GroupId, initiator: &IscsiName) -> Result<Acl, TreeError> {
        self.group_mut(id)?.acls.remove(initiator).ok_or_else(|| TreeError::NoAcl(initiator.clone()))
    }

    pub(super) fn map_lun(
        &mut self,
        id: &GroupId,
        initiator: &IscsiName,
        number: u16,
        mapped: MappedLun,
    ) -> Result<(), TreeError> {
        in_range("LUN", number.into(), 0, LUN_MAX)?;
        if !self.group(id)?.luns.contains_key(&mapped.lun) {
            return Err(TreeError::NoLun(mapped.lun));
        }
        let acl = self.acl_mut(id, initiator)?;
        if acl.mapped.contains_key(&number) {
            return Err(TreeError::MappedExists(number));
        }
        acl.mapped.insert(number, mapped);
        Ok(())
    }

    pub(super) fn unmap_lun(
        &mut self,
        id: &GroupId,
        initiator: &IscsiName,
        number: u16,
    ) -> Result<(), TreeError> {
        let removed = self.acl_mut(id, initiator)?.mapped.remove(&number);
        removed.map(drop).ok_or(TreeError::NotMapped(number))
    }

    /// Returns the attributes of a portal group or an ACL.
    ///
    /// # Errors
    /// The object does not exist, or is discovery, which has no attributes.
    pub fn attributes(&self, scope: &Scope) -> Result<&Settings, TreeError> {
        match scope {
            Scope::Discovery => Err(TreeError::Discovery),
            Scope::Group(group) => self.group(group).map(|group| &group.attributes),
            Scope::Acl(group, initiator) => self.acl(group, initiator).map(|acl| &acl.attributes),
        }
    }

    pub(super) fn attributes_mut(&mut self, scope: &Scope) -> Result<&mut Settings, TreeError> {
        match scope {
            Scope::Discovery => Err(TreeError::Discovery),
            Scope::Group(group) => self.group_mut(group).map(|group| &mut group.attributes),
            Scope::Acl(group, initiator) => self.acl_mut(group, initiator).map(|acl| &mut acl.attributes),
        }
    }

    /// Returns the authentication of discovery, a portal group or an ACL.
    ///
    /// # Errors
    /// The object does not exist.
    pub fn auth(&self, scope: &Scope) -> Result<&Auth, TreeError> {
        match scope {
            Scope::Discovery => Ok(&self.discovery),
            Scope::Group(group) => self.group(group).map(|group| &group.auth),
            Scope::Acl(group, initiator) => self.acl(group, initiator).map(|acl| &acl.auth),
        }
    }

    pub(super) fn auth_mut(&mut self, scope: &Scope) -> Result<&mut Auth, TreeError> {
        match scope {
            Scope::Discovery => Ok(&mut self.discovery),
            Scope::Group(group) => self.group_mut(group).map(|group| &mut group.auth),
            Scope::Acl(group, initiator) => self.acl_mut(group, initiator).map(|acl| &mut acl.auth),
        }
    }
}

fn in_range(what: &'static str, number: u32, min: u16, max: u16) -> Result<(), TreeError> {
    let is_in_range = (u32::from(min)..=u32::from(max)).contains(&number);
    if is_in_range { Ok(()) } else { Err(TreeError::OutOfRange { what, number, min, max }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::{Credentials, Secret};

    fn name(text: &str) -> IscsiName {
        format!("iqn.2026-11.com.example:{text}").parse().expect("a name")
    }

    fn lun(unit: usize) -> Lun {
        Lun { unit: UnitId(unit), read_only: false, alua_group: String::new() }
    }

    /// A target with one portal group.
    fn tree() -> (Tree, GroupId) {
        let mut tree = Tree::default();
        let id = GroupId::new(name("t"), 1);
        tree.create_target(&id.target).expect("new");
        tree.create_group(&id).expect("new");
        (tree, id)
    }

    fn numbers(tree: &Tree, id: &GroupId, initiator: &str) -> Option<Vec<(u16, bool)>> {
        let visible = tree.group(id).expect("a group").visible(name(initiator).as_str())?;
        Some(visible.iter().map(|lun| (lun.lun, lun.read_only)).collect())
    }

    #[test]
    fn objects_exist_once_and_cannot_be_changed_when_they_are_gone() {
        let (mut tree, id) = tree();
        assert_eq!(tree.create_target(&id.target), Err(TreeError::TargetExists(id.target.clone())));
        assert_eq!(tree.create_group(&id), Err(TreeError::GroupExists(id.clone())));
        assert!(tree.create_group(&GroupId::new(name("t"), 0)).is_err(), "tags begin at 1");
        assert!(tree.create_group(&GroupId::new(name("other"), 1)).is_err(), "no such target");
        tree.add_acl(&id, &name("i")).expect("new");
        assert_eq!(tree.add_acl(&id, &name("i")), Err(TreeError::AclExists(name("i"))));
        tree.remove_acl(&id, &name("i")).expect("known");
        assert!(tree.remove_acl(&id, &name("i")).is_err());
        tree.delete_group(&id).expect("known");
        assert_eq!(tree.add_lun(&id, None, lun(1)), Err(TreeError::NoGroup(id.clone())));
        tree.delete_target(&id.target).expect("known");
        assert_eq!(tree.delete_target(&id.target).err(), Some(TreeError::NoTarget(id.target.clone())));
    }

    #[test]
    fn luns_get_the_first_free_number_and_a_unit_is_one_lun() {
        let (mut tree, id) = tree();
        assert_eq!(tree.add_lun(&id, None, lun(10)), Ok(0));
        assert_eq!(tree.add_lun(&id, Some(2), lun(11)), Ok(2));
        assert_eq!(tree.add_lun(&id, None, lun(12)), Ok(1));
        assert_eq!(tree.add_lun(&id, Some(2), lun(13)), Err(TreeError::LunExists(2)));
        assert_eq!(tree.add_lun(&id, Some(5), lun(11)), Err(TreeError::UnitExists(2)));
        assert!(tree.add_lun(&id, Some(LUN_MAX + 1), lun(13)).is_err());
        tree.remove_lun(&id, 1).expect("known");
        assert_eq!(tree.remove_lun(&id, 1), Err(TreeError::NoLun(1)));
        assert_eq!(tree.add_lun(&id, None, lun(13)), Ok(1));
    }

    #[test]
    fn a_portal_belongs_to_one_group_of_a_target() {
        let (mut tree, id) = tree();
        let portal: PortalAddress = "tcp::3260".parse().expect("a portal");
        let second = GroupId::new(id.target.clone(), 2);
        tree.create_group(&second).expect("new");
        tree.add_portal(&id, &portal).expect("new");
        assert_eq!(tree.add_portal(&second, &portal), Err(TreeError::PortalExists(portal.clone())));
        tree.create_target(&name("u")).expect("new");
        let other = GroupId::new(name("u"), 1);
        tree.create_group(&other).expect("new");
        assert_eq!(tree.add_portal(&other, &portal), Ok(()));
        tree.remove_portal(&id, &portal).expect("known");
        assert!(tree.remove_portal(&id, &portal).is_err());
    }

    #[test]
    fn without_demo_mode_an_initiator_sees_what_its_acl_maps() {
        let (mut tree, id) = tree();
        tree.add_lun(&id, Some(0), lun(10)).expect("new");
        tree.add_lun(&id, Some(1), lun(11)).expect("new");
        assert_eq!(numbers(&tree, &id, "i"), None, "no ACL");
        tree.add_acl(&id, &name("i")).expect("new");
        assert_eq!(numbers(&tree, &id, "i"), Some(vec![]), "nothing is mapped");
        let map = |lun, write_protect| MappedLun { lun, write_protect };
        tree.map_lun(&id, &name("i"), 7, map(0, false)).expect("free");
        tree.map_lun(&id, &name("i"), 3, map(1, true)).expect("free");
        assert_eq!(tree.map_lun(&id, &name("i"), 3, map(0, true)), Err(TreeError::MappedExists(3)));
        assert_eq!(tree.map_lun(&id, &name("i"), 4, map(9, true)), Err(TreeError::NoLun(9)));
        assert_eq!(numbers(&tree, &id, "i"), Some(vec![(3, true), (7, false)]));
        assert_eq!(numbers(&tree, &id, "j"), None);
        tree.remove_lun(&id, 1).expect("known");
        assert_eq!(numbers(&tree, &id, "i"), Some(vec![(7, false)]), "its mapping is gone");
        tree.unmap_lun(&id, &name("i"), 7).expect("mapped");
        assert_eq!(tree.unmap_lun(&id, &name("i"), 7), Err(TreeError::NotMapped(7)));
    }

    #[test]
    fn in_demo_mode_every_initiator_sees_all_luns_write_protected_by_default() {
        let (mut tree, id) = tree();
        tree.add_lun(&id, Some(0), lun(10)).expect("new");
        let scope = Scope::Group(id.clone());
        let mut set =
            |name: &str, value| tree.attributes_mut(&scope).expect("a group").set(name, value).expect(name);
        set("generate_node_acls", "1");
        assert_eq!(numbers(&tree, &id, "i"), Some(vec![(0, true)]));
        let mut set =
            |name: &str, value| tree.attributes_mut(&scope).expect("a group").set(name, value).expect(name);
        set("demo_mode_write_protect", "0");
        assert_eq!(numbers(&tree, &id, "i"), Some(vec![(0, false)]));
        tree.group_mut(&id).expect("a group").luns.get_mut(&0).expect("a LUN").read_only = true;
        assert_eq!(numbers(&tree, &id, "i"), Some(vec![(0, true)]), "the LUN is read-only");
        tree.add_acl(&id, &name("i")).expect("new");
        assert_eq!(numbers(&tree, &id, "i"), Some(vec![]), "its ACL counts");
        assert_eq!(numbers(&tree, &id, "j"), Some(vec![(0, true)]));
    }

    #[test]
    fn an_acl_may_have_its_own_authentication() {
        let (mut tree, id) = tree();
        let (group, acl) = (Scope::Group(id.clone()), Scope::Acl(id.clone(), name("i")));
        tree.add_acl(&id, &name("i")).expect("new");
        let users = |name: &str| Auth {
            user: Some(Credentials { name: name.to_owned(), secret: Secret::new("secret-secret") }),
            mutual: None,
        };
        let auth = |tree: &Tree, initiator: &str| {
            tree.group(&id).expect("a group").login_auth(name(initiator).as_str())
        };
        *tree.auth_mut(&group).expect("a group") = users("group");
        assert_eq!(auth(&tree, "i"), LoginAuth { is_required: true, auth: users("group") });
        *tree.auth_mut(&acl).expect("an ACL") = users("own");
        assert_eq!(auth(&tree, "i").auth, users("own"));
        assert_eq!(auth(&tree, "j").auth, users("group"));
        tree.attributes_mut(&acl).expect("an ACL").set("authentication", "0").expect("a value");
        assert!(!auth(&tree, "i").is_required && auth(&tree, "j").is_required);
        tree.attributes_mut(&group).expect("a group").set("authentication", "0").expect("a value");
        tree.attributes_mut(&acl).expect("an ACL").set("authentication", "1").expect("a value");
        assert!(auth(&tree, "i").is_required && !auth(&tree, "j").is_required);
        assert_eq!(tree.attributes(&Scope::Discovery).err(), Some(TreeError::Discovery));
    }
}
