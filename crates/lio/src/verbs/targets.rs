//! Commands of fabrics, targets, portal groups, LUNs, ACLs and portals.

use super::flag;
use super::info::is_iscsi;
use crate::config::{
    Acl, Change, DEFAULT_GROUP, Fabric, GroupId, Lun, MappedLun, PortalId, StorageId, TargetId,
};
use crate::prefs::boolean;
use crate::run::{Done, Run, Stop};
use crate::tree::{Node, first_acl};
use crate::words::Arguments;
use crate::wwn;

/// Default port of a portal, LIO's.
const PORT: u16 = 3260;
/// Every address of this machine: the IPv6 wildcard, whose sockets accept IPv4, too.
const EVERYWHERE: &str = "::0";

/// Returns the smallest unused number.
fn first_free(used: impl Fn(u16) -> bool, first: u16) -> Option<u16> {
    (first..=u16::MAX).find(|number| !used(*number))
}

fn parse_tag(text: &str) -> Result<u16, Stop> {
    let digits = text.strip_prefix("tpg").unwrap_or(text);
    digits.parse().map_err(|_| "Tag argument must be a number.".into())
}

/// Parses `0` or `lun0`.
fn parse_lun(text: &str) -> Result<u16, Stop> {
    let lower = text.to_lowercase();
    let digits = lower.strip_prefix("lun").unwrap_or(&lower);
    digits.parse().map_err(|_| "LUN must be 0 to 65535".into())
}

impl Run<'_, '_> {
    pub(super) fn create_target(&mut self, fabric: Fabric, given: Option<&str>) -> Done {
        self.changes()?;
        let wwn = match given.filter(|name| !name.is_empty()) {
            Some(name) => wwn::normalize(fabric, name)?,
            None => wwn::generate(fabric, self.editor.system),
        };
        let id = TargetId { fabric, wwn };
        if self.editor.config.targets.keys().any(|other| other.wwn == id.wwn) {
            return Err("This Target already exists in configFS".into());
        }
        self.change(Change::AddTarget(id.clone()))?;
        if is_iscsi(&id) {
            self.info(format!("Created target {}.", id.wwn));
            let created = self.create_group(&id, None);
            if created.is_err() {
                let _ = self.editor.remove_target(&id);
            }
            return created;
        }
        let nexus = wwn::generate(Fabric::Loopback, self.editor.system);
        let group = GroupId { target: id.clone(), tag: 1 };
        if let Err(why) = self.change(Change::AddGroup(group.clone(), Some(nexus))) {
            let _ = self.editor.remove_target(&id);
            return Err(why);
        }
        self.info(format!("Created target {}.", id.wwn));
        self.created(Node::Group(group))
    }

    pub(super) fn delete_target(&mut self, fabric: Fabric, given: &str) -> Done {
        let id = TargetId { fabric, wwn: wwn::normalize(fabric, given)? };
        if !self.editor.config.targets.contains_key(&id) {
            return Err(format!("No such Target in configfs: {}", id.wwn).into());
        }
        self.changes()?;
        self.editor.remove_target(&id)?;
        self.info(format!("Deleted Target {given}."));
        Ok(())
    }

    pub(super) fn create_group(&mut self, target: &TargetId, given: Option<&str>) -> Done {
        self.changes()?;
        let used = |tag: u16| {
            self.editor.config.targets.get(target).is_some_and(|target| target.groups.contains_key(&tag))
        };
        let tag = match given.filter(|tag| !tag.is_empty()) {
            Some(tag) => parse_tag(tag)?,
            None => first_free(used, 1).ok_or("Cannot find an available TPG Tag")?,
        };
        let id = GroupId { target: target.clone(), tag };
        self.change(Change::AddGroup(id.clone(), None))?;
        let mut set_up = self.change(Change::GroupAttribute(id.clone(), "authentication", 0));
        if set_up.is_ok() && self.prefs.auto_enable_tpgt {
            set_up = self.change(Change::Enable(id.clone(), true));
        }
        if let Err(why) = set_up {
            let _ = self.editor.remove_group(&id);
            return Err(why);
        }
        self.info(format!("Created TPG {tag}."));
        if self.prefs.auto_add_default_portal {
            let portal = PortalId { ip: wwn::canonical_ip(EVERYWHERE), port: PORT };
            match self.editor.change(Change::AddPortal(id.clone(), portal)) {
                Ok(_) => {
                    self.info("Global pref auto_add_default_portal=true");
                    self.info(format!(
                        "Created default portal listening on all IPs ({EVERYWHERE}), port {PORT}."
                    ));
                }
                Err(why) if why.contains("cannot share") => {
                    self.info("Default portal not created, TPGs within a target cannot share ip:port.");
                }
                Err(why) => self.info(format!("Default portal not created, {why}.")),
            }
        }
        self.created(Node::Group(id))
    }

    pub(super) fn delete_group(&mut self, target: &TargetId, given: &str) -> Done {
        let id = GroupId { target: target.clone(), tag: parse_tag(given)? };
        if self.editor.config.group(&id).is_none() {
            return Err(format!("No such TPG in configfs: {}", id.tag).into());
        }
        self.changes()?;
        self.editor.remove_group(&id)?;
        self.info(format!("Deleted TPGT {}.", id.tag));
        Ok(())
    }

    pub(super) fn enable(&mut self, id: &GroupId, on: bool) -> Done {
        let is_on = self.editor.config.group(id).is_some_and(|group| group.enabled);
        match (is_on, on) {
            (true, true) => self.info("The TPGT is already enabled."),
            (false, false) => self.info("The TPGT is already disabled."),
            (_, on) => {
                self.changes()?;
                let changed = self.editor.change(Change::Enable(id.clone(), on));
                changed.map_err(|why| {
                    format!("The TPGT could not be {}: {why}", if on { "enabled" } else { "disabled" })
                })?;
                self.info(if on { "The TPGT has been enabled." } else { "The TPGT has been disabled." });
            }
        }
        Ok(())
    }

    /// Finds the storage object that a path of the tree names, or creates one for a file or a block device.
    fn storage_of(&mut self, given: &str, wrong: &str) -> Result<StorageId, Stop> {
        // rtslib's path of a user-backed object does not contain its handler.
        let given = match given.strip_prefix("/backstores/user/") {
            Some(name) => format!("/backstores/user:stack/{name}"),
            None => given.to_owned(),
        };
        match self.find(&given) {
            Ok(Node::Storage(id)) => Ok(id),
            Ok(_) => Err(wrong.into()),
            Err(_) => self.storage_for_path(&given).map_err(|stop| match stop {
                Stop::Failed(why) if why == "storage object or path not valid" => wrong.into(),
                stop => stop,
            }),
        }
    }

    /// Adds a LUN for a storage object. Returns its number.
    fn add_lun(&mut self, id: &GroupId, storage: StorageId, number: Option<u16>) -> Result<u16, Stop> {
        let group = self.editor.config.group(id).ok_or("No such TPG in configfs")?;
        let number = number.or_else(|| first_free(|number| group.luns.contains_key(&number), 0));
        let number = number.ok_or("All LUNs 0-65535 in use")?;
        let alias = wwn::alias(self.editor.system);
        let lun =
            Lun { storage, alias, group: DEFAULT_GROUP.to_owned(), node: None, extra: Default::default() };
        let applied = self.change(Change::AddLun(id.clone(), number, lun))?;
        self.info(format!("Created LUN {number}."));
        if let Some(node) = applied.node {
            match node.starts_with("/dev/") {
                true => self.info(format!("Created block device {node}.")),
                false => self.info(format!("Exported at {node}: block devices cannot be created here.")),
            }
        }
        Ok(number)
    }

    pub(super) fn create_lun(&mut self, id: &GroupId, arguments: &Arguments) -> Done {
        self.changes()?;
        let add_mapped = flag(arguments, "add_mapped_luns", self.prefs.auto_add_mapped_luns)?;
        let number = arguments.get("lun").filter(|lun| !lun.is_empty()).map(parse_lun).transpose()?;
        let storage =
            self.storage_of(arguments.required("storage_object"), "storage object or path not valid")?;
        let group = self.editor.config.group(id).ok_or("No such TPG in configfs")?;
        if group.luns.values().any(|lun| lun.storage == storage) {
            return Err(format!("lun for storage object {storage} already exists").into());
        }
        let index = self.add_lun(id, storage, number)?;
        if add_mapped {
            let group = self.editor.config.group(id);
            let acls: Vec<String> = group.into_iter().flat_map(|group| group.acls.keys().cloned()).collect();
            for wwn in acls {
                let acl =
                    first_acl(self.editor.config, id, &wwn).map(|(_, acl)| acl.clone()).unwrap_or_default();
                let wanted = number.unwrap_or(0);
                let free = if acl.luns.contains_key(&wanted) {
                    first_free(|number| acl.luns.contains_key(&number), 0)
                } else {
                    Some(wanted)
                };
                let mapped = free.ok_or("All LUNs 0-65535 in use")?;
                self.add_mapped(id, &wwn, mapped, index, false)?;
                self.info(format!("Created LUN {index}->{mapped} mapping in node ACL {wwn}"));
            }
        }
        self.created(Node::Lun(id.clone(), index))
    }

    fn add_mapped(&mut self, id: &GroupId, wwn: &str, index: u16, lun: u16, write_protect: bool) -> Done {
        let alias = wwn::alias(self.editor.system);
        let mapped = MappedLun { lun, write_protect, alias, extra: Default::default() };
        self.change(Change::AddMapped(id.clone(), wwn.to_owned(), index, mapped)).map(drop)
    }

    pub(super) fn delete_lun(&mut self, id: &GroupId, given: &str) -> Done {
        let index = parse_lun(given).map_err(|_| "Invalid LUN")?;
        if !self.editor.config.group(id).is_some_and(|group| group.luns.contains_key(&index)) {
            return Err("Invalid LUN".into());
        }
        self.change(Change::RemoveLun(id.clone(), index))?;
        self.info(format!("Deleted LUN {index}."));
        Ok(())
    }

    pub(super) fn create_acl(&mut self, id: &GroupId, arguments: &Arguments) -> Done {
        self.changes()?;
        let add_mapped = flag(arguments, "add_mapped_luns", self.prefs.auto_add_mapped_luns)?;
        let wwn = wwn::normalize(id.target.fabric, arguments.required("wwn"))?;
        self.change(Change::AddAcl(id.clone(), wwn.clone()))?;
        self.info(format!("Created Node ACL for {wwn}"));
        if add_mapped {
            let group = self.editor.config.group(id);
            let luns: Vec<u16> = group.into_iter().flat_map(|group| group.luns.keys().copied()).collect();
            for lun in luns {
                self.add_mapped(id, &wwn, lun, lun, false)?;
                self.info(format!("Created mapped LUN {lun}."));
            }
        }
        self.created(Node::Acl(id.clone(), wwn))
    }

    pub(super) fn delete_acl(&mut self, id: &GroupId, given: &str) -> Done {
        let wwn = wwn::normalize(id.target.fabric, given)?;
        if first_acl(self.editor.config, id, &wwn).is_none() {
            return Err(format!("No such NodeACL in configfs: {wwn}").into());
        }
        self.change(Change::RemoveAcl(id.clone(), wwn))?;
        self.info(format!("Deleted Node ACL {given}."));
        Ok(())
    }

    pub(super) fn tag(&mut self, id: &GroupId, arguments: &Arguments) -> Done {
        let (from, tag) = (arguments.required("wwn_or_tag"), arguments.required("new_tag"));
        if from == tag {
            return Ok(());
        }
        if tag.contains('.') {
            return Err("'.' not permitted in tag names.".into());
        }
        if tag.is_empty() || tag.contains(['/', '*']) {
            return Err("a tag is not empty, and has no / or *".into());
        }
        let sources = self.members(id, from);
        if sources.is_empty() {
            return Err(format!("wwn_or_tag {from} not found.").into());
        }
        self.changes()?;
        let old = self.members(id, tag).into_iter().find(|wwn| !sources.contains(wwn));
        let model = old.and_then(|wwn| first_acl(self.editor.config, id, &wwn).map(|(_, acl)| acl.clone()));
        for wwn in sources {
            if let Some(model) = &model {
                self.adopt(id, &wwn, model)?;
            }
            self.change(Change::Tag(id.clone(), wwn, Some(tag.to_owned())))?;
        }
        Ok(())
    }

    /// Copies the settings of another ACL to an ACL.
    fn adopt(&mut self, id: &GroupId, wwn: &str, model: &Acl) -> Done {
        let before = first_acl(self.editor.config, id, wwn).map(|(_, acl)| acl.clone()).unwrap_or_default();
        for index in before.luns.into_keys() {
            self.change(Change::RemoveMapped(id.clone(), wwn.to_owned(), index))?;
        }
        for (index, mapped) in &model.luns {
            self.add_mapped(id, wwn, *index, mapped.lun, mapped.write_protect)?;
        }
        self.change(Change::AclAuth(id.clone(), wwn.to_owned(), model.auth.clone()))?;
        for (name, value) in &model.attributes {
            if before.attributes.get(name) != Some(value) {
                self.change(Change::AclAttribute(id.clone(), wwn.to_owned(), name, *value))?;
            }
        }
        Ok(())
    }

    pub(super) fn untag(&mut self, id: &GroupId, given: &str) -> Done {
        for wwn in self.members(id, given) {
            self.change(Change::Tag(id.clone(), wwn, None))?;
        }
        Ok(())
    }

    pub(super) fn map_lun(&mut self, id: &GroupId, acl: &str, arguments: &Arguments) -> Done {
        self.changes()?;
        let index: u16 =
            arguments.required("mapped_lun").parse().map_err(|_| "mapped_lun must be an integer")?;
        let write_protect = match arguments.get("write_protect") {
            None => false,
            Some(text) => text.parse::<i64>().map(|number| number > 0).or_else(|_| boolean(text))?,
        };
        let given = arguments.required("tpg_lun_or_backstore");
        let lun = match parse_lun(given) {
            Ok(lun) => lun,
            Err(_) => {
                let storage = self.storage_of(given, "LUN, storage object, or path not valid")?;
                let group = self.editor.config.group(id).ok_or("No such TPG in configfs")?;
                let existing =
                    group.luns.iter().find(|(_, lun)| lun.storage == storage).map(|(index, _)| *index);
                match existing {
                    Some(lun) => lun,
                    None => self.add_lun(id, storage, None)?,
                }
            }
        };
        let is_mapped = first_acl(self.editor.config, id, acl)
            .is_some_and(|(_, acl)| acl.luns.values().any(|mapped| mapped.lun == lun));
        if is_mapped {
            self.warning(format!("Warning: TPG LUN {lun} already mapped to this NodeACL"));
        }
        for wwn in self.members(id, acl) {
            self.add_mapped(id, &wwn, index, lun, write_protect)?;
        }
        self.info(format!("Created Mapped LUN {index}."));
        self.created(Node::Mapped(id.clone(), acl.to_owned(), index))
    }

    pub(super) fn unmap_lun(&mut self, id: &GroupId, acl: &str, given: &str) -> Done {
        let digits = given.strip_prefix("mapped_lun").unwrap_or(given);
        let index: u16 = digits.parse().map_err(|_| "The mapped_lun parameter must be an integer value")?;
        for wwn in self.members(id, acl) {
            self.change(Change::RemoveMapped(id.clone(), wwn, index))?;
        }
        self.info(format!("Deleted Mapped LUN {given}."));
        Ok(())
    }

    pub(super) fn create_portal(&mut self, id: &GroupId, arguments: &Arguments) -> Done {
        self.changes()?;
        let port = match arguments.get("ip_port").filter(|port| !port.is_empty()) {
            None => PORT,
            Some(port) => port.parse().map_err(|_| format!("Syntax error, '{port}' is not a NUMBER."))?,
        };
        let ip = arguments.get("ip_address").filter(|ip| !ip.is_empty()).unwrap_or(EVERYWHERE);
        if port == PORT {
            self.info(format!("Using default IP port {PORT}"));
        }
        if ip == EVERYWHERE {
            self.info(format!("Binding to INADDR_ANY ({EVERYWHERE})"));
        }
        let portal = PortalId { ip: wwn::canonical_ip(ip), port };
        self.change(Change::AddPortal(id.clone(), portal.clone()))?;
        self.info(format!("Created network portal {ip}:{port}."));
        self.created(Node::Portal(id.clone(), portal))
    }

    pub(super) fn delete_portal(&mut self, id: &GroupId, arguments: &Arguments) -> Done {
        let (ip, port) = (arguments.required("ip_address"), arguments.required("ip_port"));
        let number: u16 = port.parse().map_err(|_| "Invalid port")?;
        let portal = PortalId { ip: wwn::canonical_ip(ip), port: number };
        let is_there = self.editor.config.group(id).is_some_and(|group| group.portals.contains_key(&portal));
        if !is_there {
            return Err(format!("No such NetworkPortal in configfs: {portal}").into());
        }
        self.change(Change::RemovePortal(id.clone(), portal))?;
        self.info(format!("Deleted network portal {ip}:{port}"));
        Ok(())
    }
}
