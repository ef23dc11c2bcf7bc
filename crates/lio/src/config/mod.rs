//! The objects of LIO's configuration: storage objects, targets, portal groups, and what is below them.
//!
//! Plain data. [`Change`] describes each modification; [`Config::check`] refuses what LIO refuses, [`Config::apply`]
//! carries a checked one out. Applying it to devices is the [`System`](crate::system::System)'s part.

mod change;
mod dump;
mod restore;

pub use change::Change;
pub use restore::{Restored, Selection};

use crate::attributes::{self, AttributeRow};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt;

/// Unknown keys of a saved object, which are saved again with it.
pub type Extra = Map<String, Value>;

/// A kind of storage objects.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Plugin {
    /// A block device.
    Block,
    /// A file, or a block device as a file.
    Fileio,
    /// Memory, as a RAM disk.
    Ramdisk,
    /// Any stack of the engine. LIO's `user` is served by programs in user space.
    User,
}

impl Plugin {
    /// All plugins, in the order of the tree.
    pub const ALL: [Plugin; 4] = [Plugin::Block, Plugin::Fileio, Plugin::Ramdisk, Plugin::User];

    /// LIO's name, as in saved files.
    pub fn name(self) -> &'static str {
        match self {
            Plugin::Block => "block",
            Plugin::Fileio => "fileio",
            Plugin::Ramdisk => "ramdisk",
            Plugin::User => "user",
        }
    }

    /// Returns the name of the plugin's node in the tree.
    pub fn node(self) -> &'static str {
        match self {
            Plugin::User => "user:stack",
            plugin => plugin.name(),
        }
    }

    /// Returns the plugin of a name in a saved file; configfs's names are accepted, as by rtslib.
    pub fn of(name: &str) -> Option<Plugin> {
        match name {
            "iblock" => Some(Plugin::Block),
            "rd_mcp" => Some(Plugin::Ramdisk),
            name => Plugin::ALL.into_iter().find(|plugin| plugin.name() == name),
        }
    }
}

/// The name of a storage object: unique for a plugin.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StorageId {
    /// Plugin of the storage object.
    pub plugin: Plugin,
    /// Name of the storage object, unique for its plugin.
    pub name: String,
}

impl StorageId {
    /// Returns the path of the object in saved files, `/backstores/fileio/disk`.
    pub fn saved_path(&self) -> String {
        format!("/backstores/{}/{}", self.plugin.name(), self.name)
    }
}

impl fmt::Display for StorageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.plugin.name(), self.name)
    }
}

/// The storage of an object's blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Backing {
    /// A block device.
    Block {
        /// Path of the device.
        dev: String,
        /// Whether writes are refused.
        readonly: bool,
        /// Whether no other program may have it open for writing.
        exclusive: bool,
    },
    /// A file.
    Fileio {
        /// Path of the file or block device.
        dev: String,
        /// Whether writes may stay in the page cache. Otherwise each is durable when it completes
        /// (`O_DSYNC`).
        write_back: bool,
        /// LIO's `fd_async_io`. Requests are asynchronous here in either case; the setting is kept for saving.
        aio: bool,
    },
    /// Memory.
    Ramdisk {
        /// Whether data is discarded (LIO's `nullio`).
        nullio: bool,
    },
    /// A stack of the engine.
    User {
        /// `stack/DESCRIPTION`.
        config: String,
        /// The largest request in blocks according to the file; kept for saving.
        hw_max_sectors: Option<u64>,
        /// Settings of the kernel's module; kept for saving.
        control: Option<String>,
    },
}

/// Properties of an open device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Largest request in blocks.
    pub hw_max_sectors: u32,
    /// Largest number of requests in flight.
    pub hw_queue_depth: u32,
    /// Whether blocks can be deallocated.
    pub can_unmap: bool,
    /// Whether the medium rotates.
    pub rotates: bool,
    /// Whether the device has a volatile write cache.
    pub has_write_cache: bool,
    /// Most blocks of an UNMAP.
    pub max_unmap_lba_count: u32,
    /// Granularity of deallocation in blocks.
    pub unmap_granularity: u32,
}

/// A storage object.
#[derive(Clone, PartialEq, Debug)]
pub struct StorageObject {
    /// Plugin and name.
    pub id: StorageId,
    /// The unit serial number, a UUID.
    pub wwn: String,
    /// Size in bytes: the requested one until the device is open.
    pub size: u64,
    /// The storage of the blocks.
    pub backing: Backing,
    /// All attributes, by name.
    pub attributes: BTreeMap<&'static str, i64>,
    /// Whether its device can deallocate blocks.
    pub can_unmap: bool,
    /// ALUA target port groups, by name. The default group always exists.
    pub groups: BTreeMap<String, AluaGroup>,
    /// Unknown keys of its file.
    pub extra: Extra,
}

/// The default target port group of LUNs.
pub const DEFAULT_GROUP: &str = "default_tg_pt_gp";

impl StorageObject {
    /// Creates a storage object with the attributes of its plugin.
    pub fn new(id: StorageId, wwn: String, size: u64, backing: Backing) -> StorageObject {
        let attributes = attributes::STORAGE.iter().map(|row| (row.name, row.default)).collect();
        let groups = [(DEFAULT_GROUP.to_owned(), AluaGroup::new(0))].into();
        let mut object = StorageObject {
            id,
            wwn,
            size,
            backing,
            attributes,
            can_unmap: false,
            groups,
            extra: Extra::new(),
        };
        if let Backing::Fileio { write_back: true, .. } = object.backing {
            object.attributes.insert("emulate_write_cache", 1);
        }
        object
    }

    /// Adopts the properties of the open device.
    pub fn opened(&mut self, facts: &Facts) {
        self.size = facts.size;
        self.can_unmap = facts.can_unmap;
        let mut set = |name, value: u32| {
            self.attributes.insert(name, i64::from(value));
        };
        set("block_size", facts.block_size);
        set("hw_block_size", facts.block_size);
        set("hw_max_sectors", facts.hw_max_sectors);
        set("optimal_sectors", facts.hw_max_sectors);
        set("hw_queue_depth", facts.hw_queue_depth);
        set("queue_depth", facts.hw_queue_depth);
        set("is_nonrot", u32::from(!facts.rotates));
        set("max_unmap_lba_count", facts.max_unmap_lba_count);
        set("max_unmap_block_desc_count", u32::from(facts.can_unmap));
        set("unmap_granularity", facts.unmap_granularity);
        if let Backing::Block { .. } = self.backing {
            set("emulate_write_cache", u32::from(facts.has_write_cache));
            set("max_write_same_len", 65535);
        }
    }

    /// Returns an attribute's value; 0 if there is none of that name.
    pub fn attribute(&self, name: &str) -> i64 {
        self.attributes.get(name).copied().unwrap_or_default()
    }

    /// Returns whether writes are durable only after a flush.
    pub fn write_back(&self) -> bool {
        self.attribute("emulate_write_cache") != 0
    }

    /// Returns the path of the object's file or device; `None` for memory and stacks.
    pub fn dev(&self) -> Option<&str> {
        match &self.backing {
            Backing::Block { dev, .. } | Backing::Fileio { dev, .. } => Some(dev),
            Backing::Ramdisk { .. } | Backing::User { .. } => None,
        }
    }
}

/// An ALUA target port group of a storage object.
#[derive(Clone, PartialEq, Debug)]
pub struct AluaGroup {
    /// Number of the group, 1 to 65535; 0: not assigned.
    pub id: u16,
    /// Settings by name, those of [`ALUA`].
    pub values: BTreeMap<&'static str, i64>,
    /// Unknown keys of its file.
    pub extra: Extra,
}

/// The settings of a target port group: name, default, lowest and highest value.
pub const ALUA: [(&str, i64, i64, i64); 14] = [
    ("alua_access_state", 0, 0, 15),
    ("alua_access_status", 0, 0, 2),
    ("alua_access_type", 3, 0, 3),
    ("alua_support_active_nonoptimized", 1, 0, 1),
    ("alua_support_active_optimized", 1, 0, 1),
    ("alua_support_offline", 1, 0, 1),
    ("alua_support_standby", 1, 0, 1),
    ("alua_support_transitioning", 1, 0, 1),
    ("alua_support_unavailable", 1, 0, 1),
    ("alua_write_metadata", 0, 0, 1),
    ("implicit_trans_secs", 0, 0, 255),
    ("nonop_delay_msecs", 100, 0, 10000),
    ("preferred", 0, 0, 1),
    ("trans_delay_msecs", 0, 0, 30000),
];

/// Names of ALUA access states.
pub const ALUA_STATES: [(i64, &str); 7] = [
    (0, "Active/optimized"),
    (1, "Active/non-optimized"),
    (2, "Standby"),
    (3, "Unavailable"),
    (4, "LBA Dependent"),
    (14, "Offline"),
    (15, "Transitioning"),
];

impl AluaGroup {
    /// Creates a group with the defaults.
    pub fn new(id: u16) -> AluaGroup {
        let values = ALUA.iter().map(|(name, default, ..)| (*name, *default)).collect();
        AluaGroup { id, values, extra: Extra::new() }
    }
}

/// CHAP credentials. Debug output omits the passwords.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Auth {
    /// User name of initiators.
    pub userid: String,
    /// Password of initiators.
    pub password: String,
    /// User name of the target.
    pub mutual_userid: String,
    /// Password of the target.
    pub mutual_password: String,
}

/// The keys of [`Auth`], in targetcli's order.
pub const AUTH: [&str; 4] = ["userid", "password", "mutual_userid", "mutual_password"];

impl Auth {
    /// Returns the value of one of the keys [`AUTH`].
    pub fn get(&self, key: &str) -> &str {
        match key {
            "userid" => &self.userid,
            "password" => &self.password,
            "mutual_userid" => &self.mutual_userid,
            _ => &self.mutual_password,
        }
    }

    /// Sets the value of one of the keys [`AUTH`].
    pub fn set(&mut self, key: &str, value: &str) {
        let field = match key {
            "userid" => &mut self.userid,
            "password" => &mut self.password,
            "mutual_userid" => &mut self.mutual_userid,
            _ => &mut self.mutual_password,
        };
        value.clone_into(field);
    }

    /// Whether initiators can authenticate: both their name and their secret are set.
    pub fn is_complete(&self) -> bool {
        !self.userid.is_empty() && !self.password.is_empty()
    }

    /// Returns whether the target authenticates itself, too.
    pub fn is_mutual(&self) -> bool {
        !self.mutual_userid.is_empty() && !self.mutual_password.is_empty()
    }
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("userid", &self.userid)
            .field("mutual_userid", &self.mutual_userid)
            .finish_non_exhaustive()
    }
}

/// A fabric: the transport between initiators and targets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Fabric {
    /// iSCSI.
    Iscsi,
    /// This machine: each LUN is a local block device.
    Loopback,
}

impl Fabric {
    /// All fabrics, in the order of the tree.
    pub const ALL: [Fabric; 2] = [Fabric::Iscsi, Fabric::Loopback];

    /// Returns the name of the fabric, in the tree and in saved files.
    pub fn name(self) -> &'static str {
        match self {
            Fabric::Iscsi => "iscsi",
            Fabric::Loopback => "loopback",
        }
    }

    /// Returns the rows of the attributes of the fabric's portal groups.
    pub fn attributes(self) -> &'static [AttributeRow] {
        match self {
            Fabric::Iscsi => attributes::GROUP,
            Fabric::Loopback => attributes::LOOPBACK,
        }
    }
}

/// A target's key: fabric and name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TargetId {
    /// Fabric of the target.
    pub fabric: Fabric,
    /// Normalized name of the target.
    pub wwn: String,
}

/// A target.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Target {
    /// Portal groups by tag.
    pub groups: BTreeMap<u16, Group>,
    /// Unknown keys of its file.
    pub extra: Extra,
}

/// A portal group's key.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GroupId {
    /// Target of the portal group.
    pub target: TargetId,
    /// Tag of the portal group.
    pub tag: u16,
}

/// A target portal group. A loopback target has one, tag 1.
#[derive(Clone, PartialEq, Debug)]
pub struct Group {
    /// Whether initiators can log in.
    pub enabled: bool,
    /// All attributes, by name.
    pub attributes: BTreeMap<&'static str, i64>,
    /// All parameters, by name; none in a loopback target.
    pub parameters: BTreeMap<&'static str, String>,
    /// Credentials of initiators without an ACL (demo mode).
    pub auth: Auth,
    /// LUNs by number.
    pub luns: BTreeMap<u16, Lun>,
    /// Portals.
    pub portals: BTreeMap<PortalId, Portal>,
    /// ACLs by initiator name.
    pub acls: BTreeMap<String, Acl>,
    /// The initiator name of a loopback target.
    pub nexus: Option<String>,
    /// Unknown keys of its file.
    pub extra: Extra,
}

impl Group {
    /// Creates a disabled portal group with LIO's defaults.
    pub fn new(fabric: Fabric, nexus: Option<String>) -> Group {
        let parameters: &[_] = if fabric == Fabric::Iscsi { attributes::PARAMETERS } else { &[] };
        Group {
            enabled: fabric == Fabric::Loopback,
            attributes: fabric.attributes().iter().map(|row| (row.name, row.default)).collect(),
            parameters: parameters.iter().map(|row| (row.name, row.default.to_owned())).collect(),
            auth: Auth::default(),
            luns: BTreeMap::new(),
            portals: BTreeMap::new(),
            acls: BTreeMap::new(),
            nexus,
            extra: Extra::new(),
        }
    }

    /// Returns an attribute's value; 0 if there is none of that name.
    pub fn attribute(&self, name: &str) -> i64 {
        self.attributes.get(name).copied().unwrap_or_default()
    }

    /// Returns the ACLs with a tag, or the ACL of an initiator.
    pub fn tagged<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a String, &'a Acl)> {
        self.acls.iter().filter(move |(wwn, acl)| *wwn == name || acl.tag.as_deref() == Some(name))
    }
}

/// A LUN of a portal group.
#[derive(Clone, PartialEq, Debug)]
pub struct Lun {
    /// Storage object behind the LUN.
    pub storage: StorageId,
    /// The name of its link in configfs; kept for saving.
    pub alias: String,
    /// ALUA target port group of the LUN.
    pub group: String,
    /// The local block device of a loopback target.
    pub node: Option<String>,
    /// Unknown keys of its file.
    pub extra: Extra,
}

/// A portal's address: an IPv4 address, or an IPv6 address in brackets, and a port.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PortalId {
    /// The address, `0.0.0.0` or `[::0]`, as it was given.
    pub ip: String,
    /// The address as given: `0.0.0.0`, `[::0]`.
    pub port: u16,
}

impl fmt::Display for PortalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.ip, self.port)
    }
}

/// A portal.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Portal {
    /// Unknown keys of its file.
    pub extra: Extra,
}

/// An ACL: what one initiator may access.
#[derive(Clone, PartialEq, Debug)]
pub struct Acl {
    /// The tag: a name that several ACLs with equal settings share.
    pub tag: Option<String>,
    /// All attributes, by name.
    pub attributes: BTreeMap<&'static str, i64>,
    /// Credentials.
    pub auth: Auth,
    /// LUNs that the initiator sees, by number.
    pub luns: BTreeMap<u16, MappedLun>,
    /// Unknown keys of its file.
    pub extra: Extra,
}

impl Acl {
    /// Creates an ACL without LUNs. `fabric` is the fabric of its target.
    pub fn new() -> Acl {
        Acl {
            tag: None,
            attributes: attributes::ACL.iter().map(|row| (row.name, row.default)).collect(),
            auth: Auth::default(),
            luns: BTreeMap::new(),
            extra: Extra::new(),
        }
    }
}

impl Default for Acl {
    fn default() -> Acl {
        Acl::new()
    }
}

/// A LUN of an ACL.
#[derive(Clone, PartialEq, Debug)]
pub struct MappedLun {
    /// The LUN of the portal group.
    pub lun: u16,
    /// Whether the initiator may only read.
    pub write_protect: bool,
    /// The name of its link in configfs; kept for saving.
    pub alias: String,
    /// Unknown keys of its file.
    pub extra: Extra,
}

/// Authentication of discovery.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Discovery {
    /// Whether discovery sessions must authenticate.
    pub enabled: bool,
    /// Credentials.
    pub auth: Auth,
    /// Unknown keys of its file.
    pub extra: Extra,
}

/// A whole configuration.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Config {
    /// Storage objects, in the order of their creation.
    pub storage: Vec<StorageObject>,
    /// Authentication of iSCSI discovery.
    pub discovery: Discovery,
    /// Targets.
    pub targets: BTreeMap<TargetId, Target>,
    /// Unknown keys of the file.
    pub extra: Extra,
}

impl Config {
    /// Whether nothing is configured.
    pub fn is_empty(&self) -> bool {
        self.storage.is_empty() && self.targets.is_empty() && self.discovery == Discovery::default()
    }

    /// Returns a storage object.
    pub fn object(&self, id: &StorageId) -> Option<&StorageObject> {
        self.storage.iter().find(|object| object.id == *id)
    }

    fn object_mut(&mut self, id: &StorageId) -> Option<&mut StorageObject> {
        self.storage.iter_mut().find(|object| object.id == *id)
    }

    /// Returns a portal group.
    pub fn group(&self, id: &GroupId) -> Option<&Group> {
        self.targets.get(&id.target)?.groups.get(&id.tag)
    }

    fn group_mut(&mut self, id: &GroupId) -> Option<&mut Group> {
        self.targets.get_mut(&id.target)?.groups.get_mut(&id.tag)
    }

    /// Returns all portal groups.
    pub fn groups(&self) -> impl Iterator<Item = (GroupId, &Group)> {
        self.targets.iter().flat_map(|(id, target)| {
            target.groups.iter().map(|(tag, group)| (GroupId { target: id.clone(), tag: *tag }, group))
        })
    }

    /// Returns the LUNs that refer to a storage object.
    pub fn users<'a>(&'a self, id: &'a StorageId) -> impl Iterator<Item = (GroupId, u16)> + 'a {
        self.groups().flat_map(move |(group, content)| {
            let of_it = content.luns.iter().filter(|(_, lun)| lun.storage == *id);
            of_it.map(move |(index, _)| (group.clone(), *index)).collect::<Vec<_>>()
        })
    }
}
