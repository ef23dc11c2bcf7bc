//! `info`: rtslib's dump of an object, without its lists and secrets.

use crate::config::{Fabric, GroupId, TargetId};
use crate::groups::{HIDDEN, is_secret};
use crate::run::{Done, Run};
use crate::tree::{Node, first_acl};
use serde_json::{Value, json};

/// Formats a value as Python prints it.
fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

impl Run<'_, '_> {
    pub(crate) fn describe(&mut self, node: &Node) -> Done {
        if let Node::Fabric(fabric) = node {
            self.describe_fabric(*fabric);
            return Ok(());
        }
        let mut entries: Vec<(String, String)> = Vec::new();
        let dump = self.dump_of(node);
        for (key, value) in dump.as_object().into_iter().flatten() {
            let is_shown = !value.is_array() && !value.is_object();
            if is_shown && !(matches!(node, Node::Acl(..)) && key == "node_wwn") {
                let shown = if is_secret(key) { HIDDEN.to_owned() } else { python(value) };
                entries.push((key.clone(), shown));
            }
        }
        entries.sort();
        for (key, value) in entries {
            self.info(format!("{key}: {value}"));
        }
        if let Node::Acl(id, acl) = node {
            self.info("wwns:");
            for wwn in self.members(id, acl) {
                self.info(wwn);
            }
        }
        Ok(())
    }

    fn dump_of(&self, node: &Node) -> Value {
        let config = &*self.editor.config;
        let group = |id: &GroupId| config.group(id);
        let found = match node {
            Node::Storage(id) => config.object(id).map(|object| object.dump()),
            Node::Alua(id, name) => config.object(id).and_then(|object| {
                let dump = object.dump();
                let groups = dump.get("alua_tpgs")?.as_array()?.clone();
                groups.into_iter().find(|group| group.get("name") == Some(&json!(name)))
            }),
            Node::Target(id) => config.dump_target(id),
            Node::Group(id) => group(id).map(|group| group.dump(&id.target, id.tag)),
            Node::Lun(id, index) => group(id).and_then(|group| group.luns.get(index)).map(|lun| {
                let mut dump = lun.dump(*index);
                if let (Some(node), Some(map)) = (&lun.node, dump.as_object_mut()) {
                    map.insert("device".to_owned(), json!(node));
                }
                dump
            }),
            Node::Acl(id, acl) => first_acl(config, id, acl).map(|(wwn, acl)| acl.dump(wwn)),
            Node::Mapped(id, acl, index) => first_acl(config, id, acl)
                .and_then(|(_, acl)| acl.luns.get(index))
                .map(|mapped| mapped.dump(*index)),
            Node::Portal(id, portal) => group(id).and_then(|group| {
                let dump = group.dump(&id.target, id.tag);
                let portals = dump.get("portals")?.as_array()?.clone();
                portals.into_iter().find(|entry| {
                    entry.get("ip_address") == Some(&json!(portal.ip))
                        && entry.get("port") == Some(&json!(portal.port))
                })
            }),
            _ => None,
        };
        found.unwrap_or(Value::Null)
    }

    fn describe_fabric(&mut self, fabric: Fabric) {
        let kinds: Vec<&str> = fabric.name_kinds().iter().map(|kind| kind.name()).collect();
        let features = match fabric {
            Fabric::Iscsi => "discovery_auth, acls, auth, nps, tpgts",
            Fabric::Loopback => "nexus",
        };
        self.info(format!("Fabric module name: {}", fabric.name()));
        self.info(format!("Allowed WWN types: {}", kinds.join(", ")));
        self.info(format!("Fabric module features: {features}"));
        self.info("Corresponding kernel module: none, targets are served in user space");
    }
}

/// Whether a target is one of the fabric `iscsi`.
pub(super) fn is_iscsi(id: &TargetId) -> bool {
    id.fabric == Fabric::Iscsi
}
