//! The tree of nodes that targetcli shows: names, paths, summaries.

use crate::config::{
    ALUA_STATES, Acl, Config, Fabric, Group, GroupId, Plugin, PortalId, StorageId, TargetId,
};
use crate::size;

/// A node of the tree. It names an object, which may not exist any more.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Node {
    /// `/`.
    Root,
    /// `/backstores`.
    Backstores,
    /// `/backstores/fileio`.
    Backstore(Plugin),
    /// A storage object.
    Storage(StorageId),
    /// The target port groups of a storage object.
    AluaGroups(StorageId),
    /// A target port group.
    Alua(StorageId, String),
    /// `/iscsi` or `/loopback`.
    Fabric(Fabric),
    /// An iSCSI target.
    Target(TargetId),
    /// A portal group; a loopback target, which has one.
    Group(GroupId),
    /// The LUNs of a portal group.
    Luns(GroupId),
    /// A LUN.
    Lun(GroupId, u16),
    /// The ACLs of a portal group.
    Acls(GroupId),
    /// An ACL, or all ACLs with one tag.
    Acl(GroupId, String),
    /// A LUN of an ACL.
    Mapped(GroupId, String, u16),
    /// The portals of a portal group.
    Portals(GroupId),
    /// A portal.
    Portal(GroupId, PortalId),
}

/// A node's summary, and its health, if it has one.
pub type Summary = (String, Option<bool>);

impl Node {
    /// The node's name.
    pub fn name(&self) -> String {
        match self {
            Node::Root => "/".to_owned(),
            Node::Backstores => "backstores".to_owned(),
            Node::Backstore(plugin) => plugin.node().to_owned(),
            Node::Storage(id) => id.name.clone(),
            Node::AluaGroups(_) => "alua".to_owned(),
            Node::Alua(_, name) | Node::Acl(_, name) => name.clone(),
            Node::Fabric(fabric) => fabric.name().to_owned(),
            Node::Target(id) => id.wwn.clone(),
            Node::Group(id) if id.target.fabric == Fabric::Loopback => id.target.wwn.clone(),
            Node::Group(id) => format!("tpg{}", id.tag),
            Node::Luns(_) => "luns".to_owned(),
            Node::Lun(_, index) => format!("lun{index}"),
            Node::Acls(_) => "acls".to_owned(),
            Node::Mapped(_, _, index) => format!("mapped_lun{index}"),
            Node::Portals(_) => "portals".to_owned(),
            Node::Portal(_, portal) => portal.to_string(),
        }
    }

    /// Returns the parent node.
    pub fn parent(&self) -> Option<Node> {
        Some(match self {
            Node::Root => return None,
            Node::Backstores | Node::Fabric(_) => Node::Root,
            Node::Backstore(_) => Node::Backstores,
            Node::Storage(id) => Node::Backstore(id.plugin),
            Node::AluaGroups(id) => Node::Storage(id.clone()),
            Node::Alua(id, _) => Node::AluaGroups(id.clone()),
            Node::Target(id) => Node::Fabric(id.fabric),
            Node::Group(id) if id.target.fabric == Fabric::Loopback => Node::Fabric(Fabric::Loopback),
            Node::Group(id) => Node::Target(id.target.clone()),
            Node::Luns(id) | Node::Acls(id) | Node::Portals(id) => Node::Group(id.clone()),
            Node::Lun(id, _) => Node::Luns(id.clone()),
            Node::Acl(id, _) => Node::Acls(id.clone()),
            Node::Mapped(id, acl, _) => Node::Acl(id.clone(), acl.clone()),
            Node::Portal(id, _) => Node::Portals(id.clone()),
        })
    }

    /// Returns the absolute path of the node.
    pub fn path(&self) -> String {
        match self.parent() {
            None => "/".to_owned(),
            Some(Node::Root) => format!("/{}", self.name()),
            Some(parent) => format!("{}/{}", parent.path(), self.name()),
        }
    }

    /// Returns the child nodes in the tree's order: by name, and by a number at the end of the name.
    pub fn children(&self, config: &Config) -> Vec<Node> {
        let mut nodes: Vec<Node> = match self {
            Node::Root => {
                let fabrics = Fabric::ALL.into_iter().map(Node::Fabric);
                std::iter::once(Node::Backstores).chain(fabrics).collect()
            }
            Node::Backstores => Plugin::ALL.into_iter().map(Node::Backstore).collect(),
            Node::Backstore(plugin) => {
                let of_it = config.storage.iter().filter(|object| object.id.plugin == *plugin);
                of_it.map(|object| Node::Storage(object.id.clone())).collect()
            }
            Node::Storage(id) => vec![Node::AluaGroups(id.clone())],
            Node::AluaGroups(id) => {
                let groups = config.object(id).into_iter().flat_map(|object| object.groups.keys());
                groups.map(|name| Node::Alua(id.clone(), name.clone())).collect()
            }
            Node::Fabric(fabric) => {
                let of_it = config.targets.keys().filter(|id| id.fabric == *fabric).cloned();
                let node = |target| match fabric {
                    Fabric::Iscsi => Node::Target(target),
                    Fabric::Loopback => Node::Group(GroupId { target, tag: 1 }),
                };
                of_it.map(node).collect()
            }
            Node::Target(id) => {
                let tags = config.targets.get(id).into_iter().flat_map(|target| target.groups.keys());
                tags.map(|tag| Node::Group(GroupId { target: id.clone(), tag: *tag })).collect()
            }
            Node::Group(id) if id.target.fabric == Fabric::Loopback => vec![Node::Luns(id.clone())],
            Node::Group(id) => {
                vec![Node::Acls(id.clone()), Node::Luns(id.clone()), Node::Portals(id.clone())]
            }
            Node::Luns(id) => {
                let luns = config.group(id).into_iter().flat_map(|group| group.luns.keys());
                luns.map(|index| Node::Lun(id.clone(), *index)).collect()
            }
            Node::Acls(id) => {
                let acls = config.group(id).into_iter().flat_map(|group| &group.acls);
                let mut names: Vec<String> =
                    acls.map(|(wwn, acl)| acl.tag.clone().unwrap_or_else(|| wwn.clone())).collect();
                names.sort();
                names.dedup();
                names.into_iter().map(|name| Node::Acl(id.clone(), name)).collect()
            }
            Node::Acl(id, name) => {
                let luns = first_acl(config, id, name).into_iter().flat_map(|(_, acl)| acl.luns.keys());
                luns.map(|index| Node::Mapped(id.clone(), name.clone(), *index)).collect()
            }
            Node::Portals(id) => {
                let portals = config.group(id).into_iter().flat_map(|group| group.portals.keys());
                portals.map(|portal| Node::Portal(id.clone(), portal.clone())).collect()
            }
            Node::Alua(..) | Node::Lun(..) | Node::Mapped(..) | Node::Portal(..) => Vec::new(),
        };
        nodes.sort_by_cached_key(|node| sorting_key(&node.name()));
        nodes
    }

    /// Returns whether the object exists.
    pub fn exists(&self, config: &Config) -> bool {
        match self.parent() {
            None => true,
            Some(parent) => parent.exists(config) && parent.children(config).contains(self),
        }
    }

    /// Describes the object as targetcli does.
    pub fn summary(&self, config: &Config) -> Summary {
        let count = |what: &str| (format!("{what}: {}", self.children(config).len()), None);
        match self {
            Node::Root | Node::Backstores => (String::new(), None),
            Node::Backstore(_) => count("Storage Objects"),
            Node::Storage(id) => storage_summary(config, id),
            Node::AluaGroups(_) => count("ALUA Groups"),
            Node::Alua(id, name) => {
                let group = config.object(id).and_then(|object| object.groups.get(name));
                let state = group.and_then(|group| group.values.get("alua_access_state")).copied();
                let name = ALUA_STATES.iter().find(|(number, _)| Some(*number) == state);
                (format!("ALUA state: {}", name.map_or("", |(_, name)| name)), Some(true))
            }
            Node::Fabric(fabric) => fabric_summary(config, *fabric, self.children(config).len()),
            Node::Target(_) => count("TPGs"),
            Node::Group(id) => match config.group(id) {
                Some(group) => group_summary(id.target.fabric, group),
                None => (String::new(), Some(false)),
            },
            Node::Luns(_) => count("LUNs"),
            Node::Lun(id, index) => lun_summary(config, id, *index),
            Node::Acls(_) => count("ACLs"),
            Node::Acl(id, name) => acl_summary(config, id, name),
            Node::Mapped(id, name, index) => mapped_summary(config, id, name, *index),
            Node::Portals(_) => count("Portals"),
            Node::Portal(..) => (String::new(), Some(true)),
        }
    }

    /// Finds a node by a path from this one.
    ///
    /// # Errors
    /// configshell's message.
    pub fn find(&self, config: &Config, path: &str) -> Result<Node, String> {
        let mut node = if path.starts_with('/') { Node::Root } else { self.clone() };
        for name in path.split('/') {
            node = match name {
                "" | "." => node,
                ".." => node.parent().unwrap_or(Node::Root),
                name => {
                    let child = node.children(config).into_iter().find(|child| child.name() == name);
                    child
                        .ok_or_else(|| format!("No such path {}/{name}", node.path().trim_end_matches('/')))?
                }
            };
        }
        Ok(node)
    }
}

/// Returns the first ACL with a tag or an initiator name. ACLs with one tag have equal settings.
pub fn first_acl<'a>(config: &'a Config, id: &GroupId, name: &'a str) -> Option<(&'a String, &'a Acl)> {
    config.group(id)?.tagged(name).next()
}

/// Splits a name into its text and a number at its end.
fn sorting_key(name: &str) -> (String, u64) {
    let text = name.trim_end_matches(|c: char| c.is_ascii_digit());
    match name[text.len()..].parse() {
        Ok(number) => (text.to_owned(), number),
        Err(_) => (name.to_owned(), 0),
    }
}

fn storage_summary(config: &Config, id: &StorageId) -> Summary {
    let Some(object) = config.object(id) else { return (String::new(), Some(false)) };
    let is_used = config.users(id).next().is_some();
    let status = if is_used { "activated" } else { "deactivated" };
    let cache = if object.write_back() { "write-back" } else { "write-thru" };
    let size = size::format(object.size);
    use crate::config::Backing;
    let text = match &object.backing {
        Backing::Block { dev, readonly, .. } => {
            let access = if *readonly { "ro " } else { "" };
            format!("{dev} ({size}) {access}{cache} {status}")
        }
        Backing::Fileio { dev, .. } => format!("{dev} ({size}) {cache} {status}"),
        Backing::Ramdisk { nullio } => {
            let kind = if *nullio { "nullio " } else { "" };
            format!("{kind}({size}) {status}")
        }
        Backing::User { config, .. } => {
            let stack = config.split_once('/').map_or(config.as_str(), |(_, stack)| stack);
            format!("{stack} ({size}) {status}")
        }
    };
    (text, Some(true))
}

fn fabric_summary(config: &Config, fabric: Fabric, targets: usize) -> Summary {
    let discovery = &config.discovery;
    let count = format!("Targets: {targets}");
    if fabric != Fabric::Iscsi || !discovery.enabled {
        return (count, None);
    }
    let way = if discovery.auth.is_mutual() { "mutual disc auth" } else { "1-way disc auth" };
    (format!("{way}, {count}"), Some(discovery.auth.is_complete()))
}

fn group_summary(fabric: Fabric, group: &Group) -> Summary {
    if let Some(nexus) = &group.nexus {
        return (nexus.clone(), None);
    }
    if !group.enabled {
        return ("disabled".to_owned(), Some(false));
    }
    if !fabric.has_acls() {
        return (String::new(), None);
    }
    let is_demo = group.attribute("generate_node_acls") != 0;
    let acls = if is_demo { "gen-acls" } else { "no-gen-acls" };
    if group.attribute("authentication") == 0 {
        return (format!("{acls}, no-auth"), is_demo.then_some(true));
    }
    if !is_demo {
        return (format!("{acls}, auth per-acl"), None);
    }
    let way = if group.auth.is_mutual() { "mutual auth" } else { "1-way auth" };
    (format!("{acls}, tpg-auth, {way}"), Some(group.auth.is_complete()))
}

fn lun_summary(config: &Config, id: &GroupId, index: u16) -> Summary {
    let Some(lun) = config.group(id).and_then(|group| group.luns.get(&index)) else {
        return ("BROKEN STORAGE LINK".to_owned(), Some(false));
    };
    let dev = config.object(&lun.storage).and_then(|object| object.dev());
    let dev = dev.map(|dev| format!(" ({dev})")).unwrap_or_default();
    (format!("{}{dev} ({})", lun.storage, lun.group), Some(true))
}

fn acl_summary(config: &Config, id: &GroupId, name: &str) -> Summary {
    let Some(group) = config.group(id) else { return (String::new(), Some(false)) };
    let all: Vec<_> = group.tagged(name).collect();
    let Some((wwn, acl)) = all.first() else { return (String::new(), Some(false)) };
    let mut parts = Vec::new();
    if *wwn != name {
        parts.push(if all.len() > 1 { format!("(group of {})", all.len()) } else { format!("({wwn})") });
    }
    let mut status = None;
    if group.attribute("authentication") != 0 {
        if group.attribute("generate_node_acls") != 0 {
            parts.push("auth via tpg".to_owned());
        } else {
            status = Some(acl.auth.is_complete());
            parts.push(if acl.auth.is_mutual() { "mutual auth" } else { "1-way auth" }.to_owned());
        }
    }
    parts.push(format!("Mapped LUNs: {}", acl.luns.len()));
    (parts.join(", "), status)
}

fn mapped_summary(config: &Config, id: &GroupId, name: &str, index: u16) -> Summary {
    let mapped = first_acl(config, id, name).and_then(|(_, acl)| acl.luns.get(&index));
    let lun = mapped.and_then(|mapped| config.group(id)?.luns.get(&mapped.lun));
    let (Some(mapped), Some(lun)) = (mapped, lun) else {
        return ("BROKEN LUN LINK".to_owned(), Some(false));
    };
    let access = if mapped.write_protect { "ro" } else { "rw" };
    (format!("lun{} {} ({access})", mapped.lun, lun.storage), Some(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_at_the_end_of_names_are_in_order() {
        let mut names = ["lun10", "lun2", "lun1", "a", "[::0]:3260", "b1c"];
        names.sort_by_key(|name| sorting_key(name));
        assert_eq!(names, ["[::0]:3260", "a", "b1c", "lun1", "lun2", "lun10"]);
    }

    #[test]
    fn paths_lead_to_their_nodes() {
        let config = Config::default();
        for path in
            ["/", "/backstores", "/backstores/fileio", "/backstores/user:stack", "/iscsi", "/loopback"]
        {
            assert_eq!(Node::Root.find(&config, path).expect("it exists").path(), path);
        }
        let fileio = Node::Backstore(Plugin::Fileio);
        assert_eq!(fileio.find(&config, "../block/"), Ok(Node::Backstore(Plugin::Block)));
        assert_eq!(fileio.find(&config, "../../.."), Ok(Node::Root));
        assert_eq!(fileio.find(&config, "disk"), Err("No such path /backstores/fileio/disk".to_owned()));
        assert_eq!(fileio.find(&config, "//iscsi//"), Ok(Node::Fabric(Fabric::Iscsi)));
    }
}
