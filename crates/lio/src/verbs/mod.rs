//! The commands of targetcli's nodes, besides those that every node has.

mod backstores;
mod info;
mod root;
mod targets;

use crate::prefs;
use crate::run::{Done, Run, Stop};
use crate::tree::Node;
use crate::words::Arguments;

/// Parses an optional `bool` parameter.
pub(crate) fn flag(arguments: &Arguments, name: &str, default: bool) -> Result<bool, Stop> {
    match arguments.get(name) {
        Some(value) => Ok(prefs::boolean(value)?),
        None => Ok(default),
    }
}

impl Run<'_, '_> {
    /// Executes a command of a node.
    pub(crate) fn verb(&mut self, node: &Node, name: &str, arguments: &Arguments) -> Done {
        match (node, name) {
            (Node::Root, name) => self.root(name, arguments),
            (_, "info") => self.describe(node),
            (Node::Backstore(plugin), "create") => self.create_storage(*plugin, arguments),
            (Node::Backstore(plugin), "delete") => self.delete_storage(*plugin, arguments),
            (Node::Storage(id), "saveconfig") => self.save_storage(id, arguments.get("savefile")),
            (Node::Storage(id), "version") => {
                let line = format!("Backstore plugin {} {}", id.plugin.name(), env!("CARGO_PKG_VERSION"));
                self.print(&line);
                Ok(())
            }
            (Node::AluaGroups(id), "create") => self.create_alua(id, arguments),
            (Node::AluaGroups(id), "delete") => self.delete_alua(id, arguments),
            (Node::Fabric(fabric), "create") => self.create_target(*fabric, arguments.get("wwn")),
            (Node::Fabric(fabric), "delete") => self.delete_target(*fabric, arguments.required("wwn")),
            (Node::Fabric(fabric), "version") => {
                self.print(&format!("Target fabric module {}: {}", fabric.name(), env!("CARGO_PKG_VERSION")));
                Ok(())
            }
            (Node::Target(id), "create") => self.create_group(id, arguments.get("tag")),
            (Node::Target(id), "delete") => self.delete_group(id, arguments.required("tag")),
            (Node::Group(id), "enable") => self.enable(id, true),
            (Node::Group(id), "disable") => self.enable(id, false),
            (Node::Luns(id), "create") => self.create_lun(id, arguments),
            (Node::Luns(id), "delete") => self.delete_lun(id, arguments.required("lun")),
            (Node::Acls(id), "create") => self.create_acl(id, arguments),
            (Node::Acls(id), "delete") => self.delete_acl(id, arguments.required("wwn")),
            (Node::Acls(id), "tag") => self.tag(id, arguments),
            (Node::Acls(id), "untag") => self.untag(id, arguments.required("wwn_or_tag")),
            (Node::Acl(id, acl), "create") => self.map_lun(id, acl, arguments),
            (Node::Acl(id, acl), "delete") => self.unmap_lun(id, acl, arguments.required("mapped_lun")),
            (Node::Portals(id), "create") => self.create_portal(id, arguments),
            (Node::Portals(id), "delete") => self.delete_portal(id, arguments),
            (Node::Portal(..), "enable_iser") => {
                flag(arguments, "boolean", false)?;
                self.info("iSER enable now: False");
                Ok(())
            }
            (Node::Portal(..), "enable_offload") => {
                flag(arguments, "boolean", false)?;
                self.info("offload enable now: False");
                Ok(())
            }
            (_, name) => Err(format!("Command not found {name}").into()),
        }
    }
}
