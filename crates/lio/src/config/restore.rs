//! Restores a configuration from `saveconfig.json`, with rtslib's rules and messages.
//!
//! An object that cannot be restored is reported and skipped. Unknown keys are kept with their object, and
//! saved again.

use super::{
    ALUA, AUTH, Acl, Auth, Backing, Change, Config, DEFAULT_GROUP, Extra, Fabric, GroupId, Lun, MappedLun,
    Plugin, PortalId, StorageId, StorageObject, TargetId,
};
use crate::attributes::{self, Rule};
use crate::edit::Editor;
use crate::wwn;
use serde_json::{Map, Value};

/// The part of a file to restore.
#[derive(Clone, Copy, Default, Debug)]
pub struct Selection<'a> {
    /// Only the target of this name, and no storage object.
    pub target: Option<&'a str>,
    /// Only the storage object of this name, and no target.
    pub storage_object: Option<&'a str>,
}

impl Selection<'_> {
    fn has_target(&self, wwn: &str) -> bool {
        match (self.target, self.storage_object) {
            (None, None) => true,
            (target, _) => target == Some(wwn),
        }
    }

    fn has_object(&self, name: &str) -> bool {
        match (self.target, self.storage_object) {
            (None, None) => true,
            (_, object) => object == Some(name),
        }
    }
}

/// The outcome of restoring.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Restored {
    /// Each object or setting that was skipped, and why.
    pub errors: Vec<String>,
}

type Object = Map<String, Value>;

fn list<'a>(object: &'a Object, key: &str) -> &'a [Value] {
    object.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn objects<'a>(object: &'a Object, key: &str) -> impl Iterator<Item = (usize, &'a Object)> {
    list(object, key).iter().enumerate().filter_map(|(index, value)| Some((index, value.as_object()?)))
}

fn text<'a>(object: &'a Object, key: &str) -> Option<&'a str> {
    object.get(key).and_then(Value::as_str)
}

/// Parses a number, which may be written as a string.
fn number(value: Option<&Value>) -> Option<i64> {
    match value? {
        Value::String(text) => text.trim().parse().ok(),
        Value::Bool(on) => Some(i64::from(*on)),
        value => value.as_i64(),
    }
}

fn flag(object: &Object, key: &str, default: bool) -> bool {
    object.get(key).and_then(|value| number(Some(value))).map_or(default, |number| number != 0)
}

fn is_given(value: Option<&Value>) -> bool {
    value.is_some_and(|value| !value.is_null())
}

fn index(object: &Object, key: &str) -> Option<u16> {
    number(object.get(key)).and_then(|number| u16::try_from(number).ok())
}

/// Returns the keys of an object that are not in `known`.
fn extra(object: &Object, known: &[&str]) -> Extra {
    object
        .iter()
        .filter(|(key, _)| !known.contains(&key.as_str()))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect()
}

/// Reads credentials. Keys with the prefix are rtslib's; its manual page describes keys without it.
fn auth(object: &Object, prefix: &str) -> Auth {
    let mut auth = Auth::default();
    for key in AUTH {
        let value = text(object, &format!("{prefix}{key}")).or_else(|| text(object, key));
        auth.set(key, value.unwrap_or_default());
    }
    auth
}

const CREDENTIALS: [&str; 8] = [
    "chap_userid",
    "chap_password",
    "chap_mutual_userid",
    "chap_mutual_password",
    "userid",
    "password",
    "mutual_userid",
    "mutual_password",
];

fn known<'a>(keys: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    keys.iter().chain(more).copied().collect()
}

struct Restorer<'a, 'b> {
    editor: &'a mut Editor<'b>,
    errors: Vec<String>,
}

impl Editor<'_> {
    /// Removes the whole configuration, or one target or storage object of it.
    ///
    /// # Errors
    /// An object could not be removed; objects before it have been removed.
    pub fn clear(&mut self, selection: Selection<'_>) -> Result<(), String> {
        let targets: Vec<TargetId> = self.config.targets.keys().cloned().collect();
        for id in targets.into_iter().filter(|id| selection.has_target(&id.wwn)) {
            self.remove_target(&id)?;
        }
        if self.config.discovery != super::Discovery::default() {
            self.change(Change::Discovery(super::Discovery::default()))?;
        }
        let objects: Vec<StorageId> = self.config.storage.iter().map(|object| object.id.clone()).collect();
        for id in objects.into_iter().filter(|id| selection.has_object(&id.name)) {
            self.remove_object(&id)?;
        }
        if selection.target.is_none() && selection.storage_object.is_none() {
            self.config.extra.clear();
        }
        Ok(())
    }

    /// Removes a storage object and the LUNs that refer to it.
    ///
    /// # Errors
    /// See [`change`](Editor::change).
    pub fn remove_object(&mut self, id: &StorageId) -> Result<(), String> {
        let users: Vec<_> = self.config.users(id).collect();
        for (group, index) in users {
            self.change(Change::RemoveLun(group, index))?;
        }
        self.change(Change::RemoveStorage(id.clone())).map(drop)
    }

    /// Removes a target with all objects below it.
    ///
    /// # Errors
    /// See [`change`](Editor::change).
    pub fn remove_target(&mut self, id: &TargetId) -> Result<(), String> {
        let tags: Vec<u16> = self
            .config
            .targets
            .get(id)
            .into_iter()
            .flat_map(|target| target.groups.keys().copied())
            .collect();
        for tag in tags {
            self.remove_group(&GroupId { target: id.clone(), tag })?;
        }
        self.change(Change::RemoveTarget(id.clone())).map(drop)
    }

    /// Removes a portal group with all objects below it.
    ///
    /// # Errors
    /// See [`change`](Editor::change).
    pub fn remove_group(&mut self, id: &GroupId) -> Result<(), String> {
        let group = self.config.group(id).ok_or("No such TPG in configfs")?.clone();
        if group.enabled && id.target.fabric == Fabric::Iscsi {
            self.change(Change::Enable(id.clone(), false))?;
        }
        for wwn in group.acls.into_keys() {
            self.change(Change::RemoveAcl(id.clone(), wwn))?;
        }
        for index in group.luns.into_keys() {
            self.change(Change::RemoveLun(id.clone(), index))?;
        }
        for portal in group.portals.into_keys() {
            self.change(Change::RemovePortal(id.clone(), portal))?;
        }
        self.change(Change::RemoveGroup(id.clone())).map(drop)
    }

    /// Restores a saved configuration, or one target or storage object of it.
    ///
    /// # Errors
    /// An object of the file exists, and `clear_existing` is not set; or the existing object cannot be
    /// removed.
    pub fn restore(
        &mut self,
        saved: &Value,
        clear_existing: bool,
        selection: Selection<'_>,
    ) -> Result<Restored, String> {
        let none = Object::new();
        let saved = saved.as_object().unwrap_or(&none);
        if clear_existing {
            self.clear(selection)?;
        } else {
            refuse_existing(self.config, saved)?;
        }
        let mut restorer = Restorer { editor: self, errors: Vec::new() };
        for (index, object) in objects(saved, "storage_objects") {
            match text(object, "name") {
                None => restorer.skip(format!("'name' not defined in storage object {index}")),
                Some(name) if selection.has_object(name) => restorer.storage(name, object),
                Some(_) => {}
            }
        }
        for (index, module) in objects(saved, "fabric_modules") {
            match text(module, "name") {
                None => restorer.skip(format!("'name' not defined in fabricmodule {index}")),
                Some("iscsi") => restorer.discovery(module),
                Some(_) => {}
            }
        }
        for (index, target) in objects(saved, "targets") {
            match text(target, "wwn") {
                None => restorer.skip(format!("'wwn' not defined in target {index}")),
                Some(wwn) if selection.has_target(wwn) => restorer.target(wwn, target),
                Some(_) => {}
            }
        }
        let errors = restorer.errors;
        if selection.target.is_none() && selection.storage_object.is_none() {
            self.config.keep(extra(saved, &["storage_objects", "fabric_modules", "targets"]));
        }
        Ok(Restored { errors })
    }
}

/// Refuses a file if one of its objects exists already.
fn refuse_existing(config: &Config, saved: &Object) -> Result<(), String> {
    for (_, object) in objects(saved, "storage_objects") {
        let plugin = text(object, "plugin").and_then(Plugin::of);
        let (Some(plugin), Some(name)) = (plugin, text(object, "name")) else { continue };
        let id = StorageId { plugin, name: name.to_owned() };
        if config.object(&id).is_some() {
            return Err(format!("storageobject '{}:{name}' exist not restoring", plugin.name()));
        }
    }
    for (_, target) in objects(saved, "targets") {
        let Some(wwn) = text(target, "wwn") else { continue };
        if config.targets.keys().any(|id| id.wwn == wwn) {
            return Err(format!("target with wwn {wwn} exist, not restoring"));
        }
    }
    Ok(())
}

impl Restorer<'_, '_> {
    fn skip(&mut self, why: String) {
        self.errors.push(why + ", skipped");
    }

    fn change(&mut self, what: impl FnOnce(String) -> String, change: Change) -> bool {
        match self.editor.change(change) {
            Ok(_) => true,
            Err(why) => {
                self.skip(what(why));
                false
            }
        }
    }

    fn storage(&mut self, name: &str, saved: &Object) {
        let object = match self.read_storage(name, saved) {
            Ok(object) => object,
            Err(why) => return self.skip(why),
        };
        let id = object.id.clone();
        let could_not = |why| format!("Could not create StorageObject {name}: {why}");
        if !self.change(could_not, Change::AddStorage(Box::new(object))) {
            return;
        }
        let attributes = saved.get("attributes").and_then(Value::as_object);
        for (attribute, value) in attributes.into_iter().flatten() {
            if let Err(why) = self.attribute(&id, attribute, value) {
                self.skip(format!("Storage Object {id}: {why}"));
            }
        }
        for (_, group) in objects(saved, "alua_tpgs") {
            self.alua(&id, group);
        }
    }

    fn read_storage(&mut self, name: &str, saved: &Object) -> Result<StorageObject, String> {
        let plugin = text(saved, "plugin").unwrap_or_default();
        let could_not = |why: &str| format!("Could not create StorageObject {name}: {why}");
        if plugin == "pscsi" {
            return Err(could_not("pscsi: commands cannot be passed to a SCSI device here (use block)"));
        }
        let Some(plugin) = Plugin::of(plugin) else {
            return Err(format!("'plugin' not defined or invalid in storageobject {name}"));
        };
        let dev = || match text(saved, "dev") {
            Some(dev) if !dev.is_empty() => Ok(dev.to_owned()),
            _ => Err(could_not("'dev' is missing")),
        };
        let size = number(saved.get("size")).and_then(|size| u64::try_from(size).ok()).unwrap_or_default();
        let common = ["name", "plugin", "wwn", "attributes", "alua_tpgs", "exists", "buffered_mode"];
        let (backing, keys): (Backing, &[&str]) = match plugin {
            Plugin::Block => (
                Backing::Block {
                    dev: dev()?,
                    readonly: flag(saved, "readonly", false),
                    exclusive: flag(saved, "exclusive", true),
                },
                &["dev", "readonly", "exclusive", "write_back"],
            ),
            Plugin::Fileio => (
                Backing::Fileio {
                    dev: dev()?,
                    write_back: flag(saved, "write_back", false),
                    aio: flag(saved, "aio", false),
                },
                &["dev", "size", "write_back", "aio"],
            ),
            Plugin::Ramdisk => {
                (Backing::Ramdisk { nullio: flag(saved, "nullio", false) }, &["size", "nullio"])
            }
            Plugin::User => (
                Backing::User {
                    config: text(saved, "config").unwrap_or_default().to_owned(),
                    hw_max_sectors: number(saved.get("hw_max_sectors")).and_then(|n| u64::try_from(n).ok()),
                    control: text(saved, "control").map(str::to_owned),
                },
                &["size", "config", "hw_max_sectors", "control"],
            ),
        };
        let serial = text(saved, "wwn").filter(|serial| wwn::is_unit_serial(serial)).map(str::to_owned);
        let serial = serial.unwrap_or_else(|| wwn::unit_serial(self.editor.system));
        let id = StorageId { plugin, name: name.to_owned() };
        let mut object = StorageObject::new(id, serial, size, backing);
        object.extra = extra(saved, &known(&common, keys));
        Ok(object)
    }

    fn attribute(&mut self, id: &StorageId, name: &str, value: &Value) -> Result<(), String> {
        let row = attributes::find(attributes::STORAGE, name)
            .ok_or_else(|| format!("Cannot find attribute: {name}"))?;
        let could_not = |why| format!("Cannot set attribute {name}: {why}");
        let wanted = number(Some(value)).ok_or_else(|| could_not(format!("{value} is no number")))?;
        let Some(object) = self.editor.config.object(id) else { return Ok(()) };
        // The file may come from a machine whose disk had larger requests or another cache.
        let wanted = match row.rule {
            Rule::OptimalSectors => wanted.min(object.attribute("hw_max_sectors")),
            Rule::QueueDepth => wanted.min(object.attribute("hw_queue_depth")),
            Rule::WriteCache if id.plugin == Plugin::Block => object.attribute(name),
            Rule::Deprecated => object.attribute(name),
            _ => wanted,
        };
        if object.attribute(name) == wanted {
            return Ok(());
        }
        let change = Change::StorageAttribute(id.clone(), row.name, wanted);
        self.editor.change(change).map(drop).map_err(could_not)
    }

    fn alua(&mut self, id: &StorageId, saved: &Object) {
        let Some(name) = text(saved, "name").map(str::to_owned) else {
            return self.skip(format!("Storage Object {id}: 'name' missing in alua_tpgs"));
        };
        if name != DEFAULT_GROUP {
            let Some(number) = index(saved, "tg_pt_gp_id") else {
                return self.skip(format!("Storage Object {id}: 'tg_pt_gp_id' missing in alua tpg '{name}'"));
            };
            let could_not = |why| format!("Storage Object {id}: alua tpg '{name}': {why}");
            if !self.change(could_not, Change::AddAlua(id.clone(), name.clone(), number)) {
                return;
            }
        }
        for (key, default, ..) in ALUA {
            let Some(value) = number(saved.get(key)) else { continue };
            let known = self.editor.config.object(id).and_then(|object| object.groups.get(&name));
            if known.map_or(default, |group| group.values.get(key).copied().unwrap_or(default)) == value {
                continue;
            }
            let could_not = |why| format!("Could not set attribute '{key}' for alua tpg '{name}': {why}");
            self.change(could_not, Change::Alua(id.clone(), name.clone(), key, value));
        }
        let mut keys: Vec<&str> = ALUA.iter().map(|(key, ..)| *key).collect();
        keys.extend(["name", "tg_pt_gp_id"]);
        let group = self.editor.config.object_mut(id).and_then(|object| object.groups.get_mut(&name));
        if let Some(group) = group {
            group.extra = extra(saved, &keys);
        }
    }

    fn discovery(&mut self, saved: &Object) {
        let bare = known(&["name", "discovery_enable_auth", "enable"], &CREDENTIALS[4..]);
        let prefixed: Vec<String> = AUTH.iter().map(|key| format!("discovery_{key}")).collect();
        let mut keys: Vec<&str> = bare;
        keys.extend(prefixed.iter().map(String::as_str));
        let enabled = flag(saved, "discovery_enable_auth", flag(saved, "enable", false));
        let discovery =
            super::Discovery { enabled, auth: auth(saved, "discovery_"), extra: extra(saved, &keys) };
        self.change(|why| format!("Could not set fabric iscsi: {why}"), Change::Discovery(discovery));
    }

    fn target(&mut self, name: &str, saved: &Object) {
        let Some(fabric) = text(saved, "fabric") else {
            return self.skip(format!("target {name} missing 'fabric' field"));
        };
        let Some(fabric) = Fabric::ALL.into_iter().find(|known| known.name() == fabric) else {
            return self.skip(format!("Unknown fabric '{fabric}'"));
        };
        // Old versions of rtslib used another prefix.
        let fixed = name.strip_prefix("naa.6").map(|rest| format!("naa.5{rest}"));
        let wwn = wwn::normalize(fabric, fixed.as_deref().unwrap_or(name));
        let could_not = |why| format!("Could not create Target object: {why}");
        let id = match wwn {
            Ok(wwn) => TargetId { fabric, wwn },
            Err(why) => return self.skip(could_not(why)),
        };
        if !self.change(could_not, Change::AddTarget(id.clone())) {
            return;
        }
        for (_, group) in objects(saved, "tpgs") {
            self.group(&id, group);
        }
        if let Some(target) = self.editor.config.targets.get_mut(&id) {
            target.extra = extra(saved, &["wwn", "fabric", "tpgs"]);
        }
    }

    fn group(&mut self, target: &TargetId, saved: &Object) {
        let tag = index(saved, "tag").unwrap_or(1);
        let id = GroupId { target: target.clone(), tag };
        let nexus = match target.fabric {
            Fabric::Loopback => Some(wwn::generate(Fabric::Loopback, self.editor.system)),
            Fabric::Iscsi => None,
        };
        let could_not = |why| format!("Could not create TPG {tag}: {why}");
        if !self.change(could_not, Change::AddGroup(id.clone(), nexus)) {
            return;
        }
        self.group_values(&id, saved);
        for (_, lun) in objects(saved, "luns") {
            self.lun(&id, lun);
        }
        if target.fabric.has_acls() {
            for (_, portal) in objects(saved, "portals") {
                self.portal(&id, portal);
            }
            for (_, acl) in objects(saved, "node_acls") {
                self.acl(&id, acl);
            }
            let auth = auth(saved, "chap_");
            if auth != Auth::default() {
                let could_not = |why| format!("Could not set tpg {tag} credentials: {why}");
                self.change(could_not, Change::GroupAuth(id.clone(), auth));
            }
            // The group is enabled last, so that no initiator logs in before everything is restored.
            if flag(saved, "enable", true) {
                self.change(
                    |why| format!("Could not enable TPG {tag}: {why}"),
                    Change::Enable(id.clone(), true),
                );
            }
        }
        let keys = ["luns", "portals", "node_acls", "tag", "attributes", "parameters", "enable"];
        if let Some(group) = self.editor.config.group_mut(&id) {
            group.extra = extra(saved, &known(&keys, &CREDENTIALS));
        }
    }

    fn group_values(&mut self, id: &GroupId, saved: &Object) {
        let attributes = saved.get("attributes").and_then(Value::as_object);
        for (name, value) in attributes.into_iter().flatten() {
            if attributes::GROUP_FORMER.contains(&name.as_str()) {
                continue;
            }
            let could_not = |why: String| format!("Cannot set attribute {name}: {why}");
            let (row, value) = (attributes::find(id.target.fabric.attributes(), name), number(Some(value)));
            match (row, value) {
                (Some(row), Some(value)) => {
                    self.change(could_not, Change::GroupAttribute(id.clone(), row.name, value));
                }
                (Some(_), None) => self.skip(could_not("not a number".to_owned())),
                (None, _) => self.skip(format!("Cannot find attribute: {name}")),
            }
        }
        let parameters = saved.get("parameters").and_then(Value::as_object);
        for (name, value) in parameters.into_iter().flatten() {
            let Some(row) = attributes::PARAMETERS.iter().find(|row| row.name == name) else {
                self.skip(format!("Cannot find parameter: {name}"));
                continue;
            };
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let could_not = |why| format!("Cannot set parameter {name}: {why}");
            self.change(could_not, Change::Parameter(id.clone(), row.name, value));
        }
    }

    fn lun(&mut self, id: &GroupId, saved: &Object) {
        let tag = id.tag;
        let Some(index) = index(saved, "index") else {
            return self.skip(format!("'index' missing from a LUN in TPG {tag}"));
        };
        let path: Vec<&str> = text(saved, "storage_object").unwrap_or_default().split('/').collect();
        let ["", "backstores", plugin, name] = path.as_slice() else {
            return self.skip(format!("Malformed storage object field for LUN {index}"));
        };
        let storage = Plugin::of(plugin).map(|plugin| StorageId { plugin, name: (*name).to_owned() });
        let Some(storage) = storage.filter(|storage| self.editor.config.object(storage).is_some()) else {
            return self.skip(format!("Could not find matching StorageObject for LUN {index}"));
        };
        let alias = text(saved, "alias").map(str::to_owned);
        let alias = alias.unwrap_or_else(|| wwn::alias(self.editor.system));
        let group = text(saved, "alua_tg_pt_gp_name").filter(|name| !name.is_empty());
        let mut group = group.unwrap_or(DEFAULT_GROUP).to_owned();
        let has_group =
            self.editor.config.object(&storage).is_some_and(|object| object.groups.contains_key(&group));
        if !has_group {
            self.skip(format!("LUN {index} in TPG {tag}: no ALUA group '{group}'"));
            DEFAULT_GROUP.clone_into(&mut group);
        }
        let extra = extra(saved, &["index", "storage_object", "alias", "alua_tg_pt_gp_name"]);
        let lun = Lun { storage, alias, group, node: None, extra };
        let could_not = |why| format!("Creating TPG {tag} LUN index {index} failed: {why}");
        self.change(could_not, Change::AddLun(id.clone(), index, lun));
    }

    fn portal(&mut self, id: &GroupId, saved: &Object) {
        let tag = id.tag;
        let Some(ip) = text(saved, "ip_address") else {
            return self.skip(format!("'ip_address' field missing from a portal in TPG {tag}"));
        };
        let Some(port) = index(saved, "port") else {
            return self.skip(format!("'port' field missing from a portal in TPG {tag}"));
        };
        for (key, what) in [("iser", "iSER"), ("offload", "offload")] {
            if flag(saved, key, false) {
                self.skip(format!("NetworkPortal {ip}:{port}: there is no {what} here"));
            }
        }
        let portal = PortalId { ip: wwn::canonical_ip(ip), port };
        let could_not = |why| format!("Creating NetworkPortal object {ip}:{port} failed: {why}");
        if !self.change(could_not, Change::AddPortal(id.clone(), portal.clone())) {
            return;
        }
        let keys = ["ip_address", "port", "iser", "offload"];
        let group = self.editor.config.group_mut(id);
        if let Some(portal) = group.and_then(|group| group.portals.get_mut(&portal)) {
            portal.extra = extra(saved, &keys);
        }
    }

    fn acl(&mut self, id: &GroupId, saved: &Object) {
        let Some(name) = text(saved, "node_wwn") else {
            return self.skip("'node_wwn' missing in node_acl".to_owned());
        };
        let could_not = |why| format!("Error when creating NodeACL for {name}: {why}");
        let wwn = match wwn::normalize(id.target.fabric, name) {
            Ok(wwn) => wwn,
            Err(why) => return self.skip(could_not(why)),
        };
        if !self.change(could_not, Change::AddAcl(id.clone(), wwn.clone())) {
            return;
        }
        let attributes = saved.get("attributes").and_then(Value::as_object);
        let defaults = Acl::new();
        for (key, value) in attributes.into_iter().flatten() {
            let could_not = |why: String| format!("Cannot set attribute {key}: {why}");
            match (attributes::find(attributes::ACL, key), number(Some(value))) {
                (Some(row), Some(value)) if defaults.attributes.get(row.name) != Some(&value) => {
                    self.change(could_not, Change::AclAttribute(id.clone(), wwn.clone(), row.name, value));
                }
                (Some(_), Some(_)) => {}
                (Some(_), None) => self.skip(could_not("not a number".to_owned())),
                (None, _) => self.skip(format!("Cannot find attribute: {key}")),
            }
        }
        let auth = auth(saved, "chap_");
        let failed = |why| format!("Could not set nodeacl {name} credentials: {why}");
        if auth != Auth::default() {
            self.change(failed, Change::AclAuth(id.clone(), wwn.clone(), auth));
        }
        for (_, mapped) in objects(saved, "mapped_luns") {
            self.mapped(id, &wwn, mapped);
        }
        if let Some(tag) = text(saved, "tag").filter(|tag| !tag.is_empty()) {
            let could_not = |why| format!("Could not set nodeacl {name} attribute 'tag': {why}");
            self.change(could_not, Change::Tag(id.clone(), wwn.clone(), Some(tag.to_owned())));
        }
        let keys = known(&["attributes", "mapped_luns", "node_wwn", "tag"], &CREDENTIALS);
        if let Some(acl) = self.editor.config.group_mut(id).and_then(|group| group.acls.get_mut(&wwn)) {
            acl.extra = extra(saved, &keys);
        }
    }

    fn mapped(&mut self, id: &GroupId, wwn: &str, saved: &Object) {
        if !is_given(saved.get("tpg_lun")) {
            return self.skip("'tpg_lun' not in a mapped_lun".to_owned());
        }
        let (Some(lun), Some(number)) = (index(saved, "tpg_lun"), index(saved, "index")) else {
            return self.skip("'index' not in a mapped_lun".to_owned());
        };
        if !self.editor.config.group(id).is_some_and(|group| group.luns.contains_key(&lun)) {
            return self.skip(format!("Could not find matching TPG LUN {lun} for MappedLUN {number}"));
        }
        let alias = text(saved, "alias").map(str::to_owned);
        let alias = alias.unwrap_or_else(|| wwn::alias(self.editor.system));
        let mapped = MappedLun {
            lun,
            write_protect: flag(saved, "write_protect", false),
            alias,
            extra: extra(saved, &["index", "tpg_lun", "write_protect", "alias"]),
        };
        let could_not = |why| format!("Creating MappedLUN object {number} failed: {why}");
        self.change(could_not, Change::AddMapped(id.clone(), wwn.to_owned(), number, mapped));
    }
}
