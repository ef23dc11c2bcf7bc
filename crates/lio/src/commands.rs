//! The commands of each node: names, parameters, help.

use crate::config::{Fabric, Plugin};
use crate::tree::Node;
use crate::words::Signature;

/// A command.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// Name of the command, as typed.
    pub name: &'static str,
    /// Parameters of the command.
    pub signature: Signature,
    /// The text of its help.
    pub about: &'static str,
}

const fn command(
    name: &'static str,
    required: &'static [&'static str],
    optional: &'static [&'static str],
    about: &'static str,
) -> Command {
    Command { name, signature: Signature { required, optional, values: None, keys: None }, about }
}

const COMMON: &[Command] = &[
    command(
        "cd",
        &[],
        &["path"],
        "Changes the current node. A path is absolute (/iscsi) or begins at the current node (../block); < and > go \
         back and forth in the nodes that were visited.",
    ),
    command("exit", &[], &[], "Ends the shell. With auto_save_on_exit, the configuration is saved."),
    Command {
        name: "get",
        signature: Signature { required: &[], optional: &["group"], values: Some("parameter"), keys: None },
        about: "Shows settings of a group: get attribute block_size. Without settings, shows all of the group; \
                without a group, the groups of this node.",
    },
    command("help", &[], &["topic"], "Lists the commands of this node, or describes one."),
    command("ls", &[], &["path", "depth"], "Shows the tree below a node, down to a depth; 0: all."),
    command("pwd", &[], &[], "Shows the path of the current node."),
    command("refresh", &[], &[], "Does nothing: the tree is always current."),
    Command {
        name: "set",
        signature: Signature { required: &[], optional: &["group"], values: None, keys: Some("parameter") },
        about: "Changes settings of a group: set attribute emulate_tpu=1. Without settings, lists those of the \
                group; without a group, the groups of this node.",
    },
    command("status", &[], &[], "Shows a summary of this node."),
];

const INFO: Command = command("info", &[], &[], "Shows details of this object. Secrets are hidden.");

const ROOT: &[Command] = &[
    command(
        "clearconfig",
        &[],
        &["confirm"],
        "Removes all storage objects and targets: clearconfig confirm=True. Files and disks keep their content.",
    ),
    command(
        "restoreconfig",
        &[],
        &["savefile", "clear_existing", "target", "storage_object"],
        "Restores a saved configuration, LIO's or ours; with clear_existing=true it replaces the current one. \
         target= and storage_object= restore one object of the file.",
    ),
    command("saveconfig", &[], &["savefile"], "Saves the configuration, with mode 0600, as LIO does."),
    command(
        "sessions",
        &[],
        &["action", "sid"],
        "Lists the sessions of initiators: sessions list, sessions detail, sessions detail 3.",
    ),
    command("version", &[], &[], "Shows the version."),
];

#[cfg(test)]
const SIZES: &str = "A size is in bytes, or has a unit of 1024: 512M, 10G, 1T.";

const FILEIO: &[Command] = &[command(
    "create",
    &["name", "file_or_dev"],
    &["size", "write_back", "sparse", "wwn"],
    "Creates a storage object over a file. An existing file keeps its size; a new one needs a size, and is sparse \
     unless sparse=false. With write_back=false, each write is durable when it completes. A size is in bytes, or has \
     a unit of 1024: 512M, 10G, 1T.",
)];
const BLOCK: &[Command] = &[command(
    "create",
    &["name", "dev"],
    &["readonly", "wwn", "exclusive"],
    "Creates a storage object over a block device. It is read-only if the device is, unless readonly is given. With \
     exclusive=false, others may have the device open.",
)];
const RAMDISK: &[Command] = &[command(
    "create",
    &["name", "size"],
    &["nullio", "wwn"],
    "Creates a storage object in memory; with nullio=true, nothing is kept. A size is in bytes, or has a unit of \
     1024: 512M, 10G, 1T.",
)];
const USER: &[Command] = &[command(
    "create",
    &["name", "stack"],
    &["wwn"],
    "Creates a storage object over any stack, as blockyard add takes it: create d1 file:disk.qcow2,format=qcow2.",
)];
const DELETE_OBJECT: Command = command(
    "delete",
    &["name"],
    &["save"],
    "Deletes a storage object and the LUNs that refer to it; with save=true, also from the saved configuration.",
);

const STORAGE: &[Command] = &[
    command("saveconfig", &[], &["savefile"], "Saves this storage object and its target only."),
    command("version", &[], &[], "Shows the version of the backstore."),
];

const ALUA: &[Command] = &[
    command("create", &["name", "tag"], &[], "Creates a target port group with a number, 1 to 65535."),
    command("delete", &["name"], &[], "Deletes a target port group; its LUNs return to the default one."),
];

const FABRIC: &[Command] = &[
    command(
        "create",
        &[],
        &["wwn"],
        "Creates a target with a portal group; without a name, with a new one. info shows the types of names.",
    ),
    command("delete", &["wwn"], &[], "Deletes a target with all below it, and ends its sessions."),
    command("version", &[], &[], "Shows the version of the fabric."),
];

const TARGET: &[Command] = &[
    command("create", &[], &["tag"], "Creates a portal group; without a tag, with the first free one."),
    command("delete", &["tag"], &[], "Deletes a portal group with all below it, and ends its sessions."),
];

const GROUP: &[Command] = &[
    command("disable", &[], &[], "Refuses initiators, and ends their sessions."),
    command("enable", &[], &[], "Lets initiators log in."),
];

const LUNS: &[Command] = &[
    command(
        "create",
        &["storage_object"],
        &["lun", "add_mapped_luns"],
        "Creates a LUN for a storage object, named by its path; for a file or a block device, a storage object is \
         created first. Without a number, the first free one. The LUN is mapped in all ACLs unless \
         add_mapped_luns=false.",
    ),
    command("delete", &["lun"], &[], "Deletes a LUN, and its mappings in ACLs."),
];

const ACLS: &[Command] = &[
    command(
        "create",
        &["wwn"],
        &["add_mapped_luns"],
        "Creates an ACL for an initiator. It sees all LUNs unless add_mapped_luns=false.",
    ),
    command("delete", &["wwn"], &[], "Deletes an ACL."),
    command(
        "tag",
        &["wwn_or_tag", "new_tag"],
        &[],
        "Gives ACLs a tag, under which they are shown and changed together. They take over the settings of ACLs that \
         have the tag already.",
    ),
    command("untag", &["wwn_or_tag"], &[], "Removes the tag of ACLs. They keep their settings."),
];

const ACL: &[Command] = &[
    command(
        "create",
        &["mapped_lun", "tpg_lun_or_backstore"],
        &["write_protect"],
        "Shows a LUN of the portal group to the initiator under a number; for a storage object, a file or a block \
         device, the LUN is created first. With write_protect=1, the initiator may only read.",
    ),
    command("delete", &["mapped_lun"], &[], "Hides a LUN from the initiator."),
];

const PORTALS: &[Command] = &[
    command(
        "create",
        &[],
        &["ip_address", "ip_port"],
        "Listens at an address; without one, at all of this machine. The default port is 3260.",
    ),
    command("delete", &["ip_address", "ip_port"], &[], "Ends listening at an address. Connections stay."),
];

const PORTAL: &[Command] = &[
    command("enable_iser", &["boolean"], &[], "There is no iSER here: it stays disabled."),
    command("enable_offload", &["boolean"], &[], "There is no offload here: it stays disabled."),
];

/// Returns the commands of a node, sorted by name.
pub fn of(node: &Node) -> Vec<Command> {
    let (own, has_info): (&[Command], bool) = match node {
        Node::Root => (ROOT, false),
        Node::Backstores => (&[], false),
        Node::Backstore(plugin) => match plugin {
            Plugin::Block => (BLOCK, false),
            Plugin::Fileio => (FILEIO, false),
            Plugin::Ramdisk => (RAMDISK, false),
            Plugin::User => (USER, false),
        },
        Node::Storage(_) => (STORAGE, true),
        Node::AluaGroups(_) => (ALUA, false),
        Node::Alua(..) | Node::Lun(..) | Node::Mapped(..) => (&[], true),
        Node::Fabric(_) => (FABRIC, true),
        Node::Target(_) => (TARGET, true),
        Node::Group(id) if id.target.fabric == Fabric::Loopback => (&[], true),
        Node::Group(_) => (GROUP, true),
        Node::Luns(_) => (LUNS, false),
        Node::Acls(_) => (ACLS, false),
        Node::Acl(..) => (ACL, true),
        Node::Portals(_) => (PORTALS, false),
        Node::Portal(..) => (PORTAL, true),
    };
    let mut commands: Vec<Command> = COMMON.iter().chain(own).copied().collect();
    if let Node::Backstore(_) = node {
        commands.push(DELETE_OBJECT);
    }
    if has_info {
        commands.push(INFO);
    }
    commands.sort_by_key(|command| command.name);
    commands
}

/// Returns a command of a node.
pub fn find(node: &Node, name: &str) -> Option<Command> {
    of(node).into_iter().find(|command| command.name == name)
}

impl Command {
    /// Formats the command with its parameters: `create name file_or_dev [size] `.
    pub fn syntax(&self) -> String {
        let Signature { required, optional, values, keys } = self.signature;
        let mut text = format!("{} ", self.name);
        required.iter().for_each(|name| text += &format!("{name} "));
        optional.iter().for_each(|name| text += &format!("[{name}] "));
        values.iter().for_each(|name| text += &format!("[{name}...] "));
        keys.iter().for_each(|name| text += &format!("[{name}=value...] "));
        text
    }
}

/// The text of `help` before the list of commands.
pub const INTRO: &str = "\
The configuration is a tree of objects. A command runs at the current node,
which the prompt shows, or at a path before it:

  [PATH] COMMAND [VALUE | KEY=VALUE]...

cd changes the current node, ls shows the tree, help COMMAND describes a
command. Quotes hold spaces: set auth password='a secret'.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_explained_where_they_are_given() {
        for commands in [FILEIO, RAMDISK] {
            assert!(commands.iter().all(|command| command.about.contains(SIZES)), "{commands:?}");
        }
    }

    #[test]
    fn syntax_shows_all_parameters() {
        let create = find(&Node::Backstore(Plugin::Fileio), "create").expect("there is one");
        assert_eq!(create.syntax(), "create name file_or_dev [size] [write_back] [sparse] [wwn] ");
        let get = find(&Node::Root, "get").expect("there is one");
        assert_eq!(get.syntax(), "get [group] [parameter...] ");
        assert_eq!(
            find(&Node::Root, "set").expect("there is one").syntax(),
            "set [group] [parameter=value...] "
        );
        assert!(find(&Node::Root, "create").is_none());
    }
}
