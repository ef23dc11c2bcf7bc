//! A configuration as rtslib dumps it to `saveconfig.json`.

use super::{
    AUTH, Acl, AluaGroup, Auth, Backing, Config, Extra, Group, Lun, MappedLun, StorageObject, TargetId,
};
use crate::attributes::{AttributeRow, Rule, STORAGE};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

fn object(entries: impl IntoIterator<Item = (&'static str, Value)>, extra: &Extra) -> Map<String, Value> {
    let mut map = extra.clone();
    map.extend(entries.into_iter().map(|(key, value)| (key.to_owned(), value)));
    map
}

/// Attributes that `set` can change: rtslib saves only these.
fn stored(rows: &[AttributeRow], values: &BTreeMap<&'static str, i64>) -> Value {
    let rows = rows.iter().filter(|row| row.rule != Rule::ReadOnly);
    let entries = rows.filter_map(|row| Some((row.name.to_owned(), json!(values.get(row.name)?))));
    Value::Object(entries.collect())
}

fn add_auth(map: &mut Map<String, Value>, prefix: &str, auth: &Auth) {
    for key in AUTH {
        let value = auth.get(key);
        if !value.is_empty() {
            map.insert(format!("{prefix}{key}"), json!(value));
        }
    }
}

impl Config {
    /// Returns the whole configuration, secrets included.
    pub fn dump(&self) -> Value {
        let mut modules = Vec::new();
        if self.discovery.enabled {
            let mut module = object([("name", json!("iscsi"))], &self.discovery.extra);
            add_auth(&mut module, "discovery_", &self.discovery.auth);
            module.insert("discovery_enable_auth".to_owned(), json!(true));
            modules.push(Value::Object(module));
        }
        let storage: Vec<Value> = self.storage.iter().map(StorageObject::dump).collect();
        let targets: Vec<Value> = self.targets.keys().filter_map(|id| self.dump_target(id)).collect();
        let entries = [
            ("fabric_modules", json!(modules)),
            ("storage_objects", json!(storage)),
            ("targets", json!(targets)),
        ];
        Value::Object(object(entries, &self.extra))
    }

    /// Returns a target.
    pub fn dump_target(&self, id: &TargetId) -> Option<Value> {
        let target = self.targets.get(id)?;
        let groups: Vec<Value> = target.groups.iter().map(|(tag, group)| group.dump(id, *tag)).collect();
        let entries = [("wwn", json!(id.wwn)), ("fabric", json!(id.fabric.name())), ("tpgs", json!(groups))];
        Some(Value::Object(object(entries, &target.extra)))
    }
}

impl StorageObject {
    /// Returns a storage object.
    pub fn dump(&self) -> Value {
        let groups: Vec<Value> = self.groups.iter().map(|(name, group)| group.dump(name)).collect();
        let mut map = object(
            [
                ("name", json!(self.id.name)),
                ("plugin", json!(self.id.plugin.name())),
                ("wwn", json!(self.wwn)),
                ("attributes", stored(STORAGE, &self.attributes)),
                ("alua_tpgs", json!(groups)),
            ],
            &self.extra,
        );
        let mut put = |key: &str, value: Value| {
            map.insert(key.to_owned(), value);
        };
        match &self.backing {
            Backing::Block { dev, readonly, exclusive } => {
                put("dev", json!(dev));
                put("readonly", json!(readonly));
                put("exclusive", json!(exclusive));
                put("write_back", json!(self.write_back()));
            }
            Backing::Fileio { dev, aio, .. } => {
                put("dev", json!(dev));
                put("size", json!(self.size));
                put("write_back", json!(self.write_back()));
                put("aio", json!(aio));
            }
            Backing::Ramdisk { nullio } => {
                put("size", json!(self.size));
                if *nullio {
                    put("nullio", json!(true));
                }
            }
            Backing::User { config, hw_max_sectors, control } => {
                put("size", json!(self.size));
                put("config", json!(config));
                put("hw_max_sectors", json!(hw_max_sectors));
                put("control", json!(control));
            }
        }
        Value::Object(map)
    }
}

impl AluaGroup {
    fn dump(&self, name: &str) -> Value {
        let mut map = object([("name", json!(name)), ("tg_pt_gp_id", json!(self.id))], &self.extra);
        map.extend(self.values.iter().map(|(key, value)| ((*key).to_owned(), json!(value))));
        Value::Object(map)
    }
}

impl Group {
    /// Returns a portal group of the target `id`.
    pub fn dump(&self, id: &TargetId, tag: u16) -> Value {
        let portals = self.portals.iter().map(|(id, portal)| {
            let entries = [
                ("ip_address", json!(id.ip)),
                ("port", json!(id.port)),
                ("iser", json!(false)),
                ("offload", json!(false)),
            ];
            Value::Object(object(entries, &portal.extra))
        });
        let luns: Vec<Value> = self.luns.iter().map(|(index, lun)| lun.dump(*index)).collect();
        let acls: Vec<Value> = self.acls.iter().map(|(wwn, acl)| acl.dump(wwn)).collect();
        let mut map = object(
            [
                ("tag", json!(tag)),
                ("enable", json!(self.enabled)),
                ("attributes", stored(id.fabric.attributes(), &self.attributes)),
                ("luns", json!(luns)),
                ("portals", portals.collect()),
                ("node_acls", json!(acls)),
            ],
            &self.extra,
        );
        if !self.parameters.is_empty() {
            map.insert("parameters".to_owned(), json!(self.parameters));
        }
        add_auth(&mut map, "chap_", &self.auth);
        Value::Object(map)
    }
}

impl Lun {
    /// Returns a LUN.
    pub fn dump(&self, index: u16) -> Value {
        let entries = [
            ("index", json!(index)),
            ("storage_object", json!(self.storage.saved_path())),
            ("alias", json!(self.alias)),
            ("alua_tg_pt_gp_name", json!(self.group)),
        ];
        Value::Object(object(entries, &self.extra))
    }
}

impl Acl {
    /// Returns an ACL.
    pub fn dump(&self, wwn: &str) -> Value {
        let luns: Vec<Value> = self.luns.iter().map(|(index, mapped)| mapped.dump(*index)).collect();
        let mut map = object(
            [
                ("node_wwn", json!(wwn)),
                ("attributes", stored(crate::attributes::ACL, &self.attributes)),
                ("mapped_luns", json!(luns)),
            ],
            &self.extra,
        );
        if let Some(tag) = &self.tag {
            map.insert("tag".to_owned(), json!(tag));
        }
        add_auth(&mut map, "chap_", &self.auth);
        Value::Object(map)
    }
}

impl MappedLun {
    /// Returns a LUN of an ACL.
    pub fn dump(&self, index: u16) -> Value {
        let entries = [
            ("index", json!(index)),
            ("tpg_lun", json!(self.lun)),
            ("write_protect", json!(self.write_protect)),
            ("alias", json!(self.alias)),
        ];
        Value::Object(object(entries, &self.extra))
    }
}
