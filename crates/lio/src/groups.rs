//! `get` and `set`: the groups of settings of each node.

use crate::attributes::{self, AttributeRow, Rule};
use crate::config::{ALUA, AUTH, Auth, Change, Fabric};
use crate::prefs;
use crate::run::{Done, Item, Run, Stop};
use crate::tree::{Node, first_acl};
use crate::words::Arguments;

/// The type of a setting, which determines the values that `set` accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Bool,
    Number,
    LogLevel,
    YesNo,
    Text,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Bool => "bool",
            Kind::Number => "number",
            Kind::LogLevel => "loglevel",
            Kind::YesNo => "yesno",
            Kind::Text => "string",
        }
    }
}

/// A setting of a group.
struct Setting {
    name: &'static str,
    kind: Kind,
    about: String,
    writable: bool,
}

/// The text that replaces secrets in output.
pub(crate) const HIDDEN: &str = "********";

/// Whether a setting's value is a secret.
pub(crate) fn is_secret(name: &str) -> bool {
    name.ends_with("password")
}

fn rows(rows: &'static [AttributeRow]) -> Vec<Setting> {
    let setting = |row: &AttributeRow| Setting {
        name: row.name,
        kind: Kind::Number,
        about: row.about.to_owned(),
        writable: row.rule != Rule::ReadOnly,
    };
    rows.iter().map(setting).collect()
}

fn credentials() -> Vec<Setting> {
    let mut names = AUTH;
    names.sort_unstable();
    let about = |name: &str| match name {
        "userid" => "The name that initiators give.",
        "password" => "The secret of initiators.",
        "mutual_userid" => "The name that the target gives.",
        _ => "The secret of the target.",
    };
    names.map(|name| Setting { name, kind: Kind::Text, about: about(name).to_owned(), writable: true }).into()
}

/// Returns the groups of a node, in targetcli's order.
fn groups(node: &Node) -> &'static [&'static str] {
    match node {
        Node::Storage(_) => &["global", "attribute"],
        Node::Alua(..) | Node::Lun(..) => &["global", "alua"],
        Node::Fabric(Fabric::Iscsi) => &["global", "discovery_auth"],
        Node::Group(id) if id.target.fabric == Fabric::Loopback => &["global", "attribute"],
        Node::Group(_) => &["global", "parameter", "attribute", "auth"],
        Node::Acl(..) => &["global", "attribute", "auth"],
        _ => &["global"],
    }
}

fn settings(node: &Node, group: &str) -> Vec<Setting> {
    match (group, node) {
        ("global", _) => {
            let kind = |kind| match kind {
                prefs::Kind::Bool => Kind::Bool,
                prefs::Kind::Number => Kind::Number,
                prefs::Kind::LogLevel => Kind::LogLevel,
            };
            let rows = prefs::ROWS.iter();
            rows.map(|(name, of, about)| Setting {
                name,
                kind: kind(*of),
                about: (*about).to_owned(),
                writable: true,
            })
            .collect()
        }
        ("attribute", Node::Storage(_)) => rows(attributes::STORAGE),
        ("attribute", Node::Group(id)) => rows(id.target.fabric.attributes()),
        ("attribute", Node::Acl(..)) => rows(attributes::ACL),
        ("parameter", Node::Group(_)) => {
            let kind = |rule| match rule {
                attributes::ParameterRule::YesNo | attributes::ParameterRule::No => Kind::YesNo,
                attributes::ParameterRule::Number(..) => Kind::Number,
                _ => Kind::Text,
            };
            let rows = attributes::PARAMETERS.iter();
            rows.map(|row| Setting {
                name: row.name,
                kind: kind(row.rule),
                about: row.about.to_owned(),
                writable: true,
            })
            .collect()
        }
        ("auth", _) => credentials(),
        ("discovery_auth", _) => {
            let about = "1: discovery needs authentication.".to_owned();
            let mut all = vec![Setting { name: "enable", kind: Kind::Number, about, writable: true }];
            all.extend(credentials());
            all
        }
        ("alua", Node::Lun(..)) => {
            let about = "The target port group of the LUN.".to_owned();
            vec![Setting { name: "alua_tg_pt_gp_name", kind: Kind::Text, about, writable: true }]
        }
        ("alua", Node::Alua(..)) => {
            let about = |name: &str| match name {
                "alua_access_state" => {
                    "0 active/optimized, 1 active/non-optimized, 2 standby, 3 unavailable, 14 offline."
                        .to_owned()
                }
                "alua_access_type" => "0 none, 1 implicit, 2 explicit, 3 both.".to_owned(),
                "members" => "The LUNs of the group.".to_owned(),
                name => format!("LIO's {name}."),
            };
            let fixed = ["alua_support_lba_dependent", "members", "tg_pt_gp_id"];
            let setting = |name, writable| Setting { name, kind: Kind::Text, about: about(name), writable };
            let mut all: Vec<Setting> = ALUA.iter().map(|(name, ..)| setting(name, true)).collect();
            all.extend(fixed.map(|name| setting(name, false)));
            all.sort_by_key(|setting| setting.name);
            all
        }
        _ => Vec::new(),
    }
}

fn title(group: &str) -> String {
    let title = format!("{} CONFIG GROUP", group.to_uppercase());
    format!("{title}\n{}\n", "=".repeat(title.len()))
}

impl Run<'_, '_> {
    fn value(&self, node: &Node, group: &str, name: &str) -> String {
        let config = &*self.editor.config;
        let auth = |auth: &Auth| auth.get(name).to_owned();
        match (group, node) {
            ("global", _) => self.prefs.get(name),
            ("attribute", Node::Storage(id)) => {
                config.object(id).map_or(0, |object| object.attribute(name)).to_string()
            }
            ("attribute", Node::Group(id)) => {
                config.group(id).map_or(0, |group| group.attribute(name)).to_string()
            }
            ("attribute", Node::Acl(id, acl)) => {
                let acl = first_acl(config, id, acl);
                acl.and_then(|(_, acl)| acl.attributes.get(name)).copied().unwrap_or_default().to_string()
            }
            ("parameter", Node::Group(id)) => {
                config.group(id).and_then(|group| group.parameters.get(name)).cloned().unwrap_or_default()
            }
            ("auth", Node::Group(id)) => config.group(id).map(|group| auth(&group.auth)).unwrap_or_default(),
            ("auth", Node::Acl(id, acl)) => {
                first_acl(config, id, acl).map(|(_, acl)| auth(&acl.auth)).unwrap_or_default()
            }
            ("discovery_auth", _) if name == "enable" => u8::from(config.discovery.enabled).to_string(),
            ("discovery_auth", _) => auth(&config.discovery.auth),
            ("alua", Node::Lun(id, index)) => {
                let lun = config.group(id).and_then(|group| group.luns.get(index));
                lun.map(|lun| lun.group.clone()).unwrap_or_default()
            }
            ("alua", Node::Alua(id, group)) => {
                let of_it = config.object(id).and_then(|object| object.groups.get(group));
                match name {
                    "tg_pt_gp_id" => of_it.map_or(0, |group| group.id).to_string(),
                    "alua_support_lba_dependent" => "0".to_owned(),
                    "members" => {
                        let members = config.users(id).filter(|(tpg, index)| {
                            let lun = config.group(tpg).and_then(|group| group.luns.get(index));
                            lun.is_some_and(|lun| lun.group == *group)
                        });
                        let members: Vec<String> = members
                            .map(|(tpg, index)| {
                                let fabric = tpg.target.fabric.name();
                                format!("{fabric}/{}/tpgt_{}/lun_{index}", tpg.target.wwn, tpg.tag)
                            })
                            .collect();
                        members.join(" ")
                    }
                    name => of_it
                        .and_then(|group| group.values.get(name))
                        .copied()
                        .unwrap_or_default()
                        .to_string(),
                }
            }
            _ => String::new(),
        }
    }

    fn list_groups(&mut self, node: &Node) {
        let text = format!(
            "\nAVAILABLE CONFIGURATION GROUPS\n==============================\n{}\n",
            groups(node).join(" ")
        );
        self.items.push(Item::Text(text));
    }

    fn group<'c>(&self, node: &Node, arguments: &'c Arguments) -> Result<Option<&'c str>, Stop> {
        match arguments.get("group") {
            Some(group) if !groups(node).contains(&group) => {
                Err(format!("Unknown configuration group: {group}").into())
            }
            group => Ok(group),
        }
    }

    pub(crate) fn get(&mut self, node: &Node, arguments: &Arguments) -> Done {
        let Some(group) = self.group(node, arguments)? else {
            self.list_groups(node);
            return Ok(());
        };
        let all = settings(node, group);
        if arguments.values.is_empty() {
            let mut text = title(group);
            for setting in all {
                let value = match self.value(node, group, setting.name) {
                    value if is_secret(setting.name) && !value.is_empty() => HIDDEN.to_owned(),
                    value => value,
                };
                let access = if setting.writable { "" } else { " [ro]" };
                let line = format!("{}={value}{access}", setting.name);
                text += &format!("{line}\n{}\n{}\n\n", "-".repeat(line.chars().count()), setting.about);
            }
            text.pop();
            self.items.push(Item::Text(text));
            return Ok(());
        }
        for name in &arguments.values {
            let setting = all.iter().find(|setting| setting.name == name);
            let setting = setting.ok_or_else(|| format!("No parameter '{name}' in group '{group}'."))?;
            let value = self.value(node, group, name);
            self.print(&format!("{name}={value} {}", if setting.writable { "" } else { "[ro]" }));
        }
        Ok(())
    }

    pub(crate) fn set(&mut self, node: &Node, arguments: &Arguments) -> Done {
        let Some(group) = self.group(node, arguments)? else {
            self.list_groups(node);
            return Ok(());
        };
        let all = settings(node, group);
        if arguments.keys.is_empty() {
            let mut text = title(group);
            for setting in all.iter().filter(|setting| setting.writable) {
                let line = format!("{}={}", setting.name, setting.kind.name());
                text += &format!("{line}\n{}\n{}\n\n", "-".repeat(line.len()), setting.about);
            }
            text.pop();
            self.items.push(Item::Text(text));
            return Ok(());
        }
        for (name, value) in &arguments.keys {
            let setting = all.iter().find(|setting| setting.name == name);
            let setting = setting.ok_or_else(|| format!("Unknown parameter {name} in group '{group}'."))?;
            if !setting.writable {
                return Err(format!("Parameter {name} is read-only.").into());
            }
            check_type(setting.kind, value).map_err(|why| format!("Not setting {name}! {why}"))?;
            self.store(node, group, setting.name, value)?;
            let now = match self.value(node, group, name) {
                now if is_secret(name) && !now.is_empty() => HIDDEN.to_owned(),
                now => now,
            };
            self.print(&format!("Parameter {name} is now '{now}'."));
        }
        Ok(())
    }

    fn store(&mut self, node: &Node, group: &str, name: &'static str, value: &str) -> Done {
        if group == "global" {
            return self.prefs.set(name, value).map_err(|why| format!("Not setting {name}! {why}").into());
        }
        self.changes()?;
        let attribute = |why| Stop::Failed(format!("Cannot set attribute {name}: {why}"));
        match (group, node) {
            ("attribute", Node::Storage(id)) => {
                let row = attributes::find(attributes::STORAGE, name);
                // Deprecated attributes accept any value, and do not change.
                if row.is_some_and(|row| row.rule == Rule::Deprecated) {
                    return Ok(());
                }
                let change = Change::StorageAttribute(id.clone(), name, integer(value)?);
                self.editor.change(change).map(drop).map_err(attribute)
            }
            ("attribute", Node::Group(id)) => {
                let change = Change::GroupAttribute(id.clone(), name, integer(value)?);
                self.editor.change(change).map(drop).map_err(attribute)
            }
            ("attribute", Node::Acl(id, acl)) => {
                let value = integer(value)?;
                for wwn in self.members(id, acl) {
                    let change = Change::AclAttribute(id.clone(), wwn, name, value);
                    self.editor.change(change).map_err(attribute)?;
                }
                Ok(())
            }
            ("parameter", Node::Group(id)) => {
                let change = Change::Parameter(id.clone(), name, value.to_owned());
                let failed = |why| Stop::Failed(format!("Cannot set parameter {name}: {why}"));
                self.editor.change(change).map(drop).map_err(failed)
            }
            ("auth", Node::Group(id)) => {
                let mut auth =
                    self.editor.config.group(id).map(|group| group.auth.clone()).unwrap_or_default();
                auth.set(name, value.trim());
                self.change(Change::GroupAuth(id.clone(), auth)).map(drop)
            }
            ("auth", Node::Acl(id, acl)) => {
                for wwn in self.members(id, acl) {
                    let known = first_acl(self.editor.config, id, &wwn).map(|(_, acl)| acl.auth.clone());
                    let mut auth = known.unwrap_or_default();
                    auth.set(name, value.trim());
                    self.change(Change::AclAuth(id.clone(), wwn, auth))?;
                }
                Ok(())
            }
            ("discovery_auth", _) => {
                let mut discovery = self.editor.config.discovery.clone();
                match name {
                    "enable" => discovery.enabled = integer(value)? != 0,
                    name => discovery.auth.set(name, value.trim()),
                }
                self.change(Change::Discovery(discovery)).map(drop)
            }
            ("alua", Node::Lun(id, index)) => {
                self.change(Change::LunAlua(id.clone(), *index, value.to_owned())).map(drop)
            }
            ("alua", Node::Alua(id, group)) => {
                let change = Change::Alua(id.clone(), group.clone(), name, integer(value)?);
                let failed = |why| Stop::Failed(format!("Cannot set {name}: {why}"));
                self.editor.change(change).map(drop).map_err(failed)
            }
            _ => Err(format!("Unknown configuration group: {group}").into()),
        }
    }

    /// Returns the initiators of an ACL's node.
    pub(crate) fn members(&self, id: &crate::config::GroupId, acl: &str) -> Vec<String> {
        let group = self.editor.config.group(id);
        group.into_iter().flat_map(|group| group.tagged(acl)).map(|(wwn, _)| wwn.clone()).collect()
    }
}

fn integer(value: &str) -> Result<i64, Stop> {
    value.trim().parse().map_err(|_| format!("Syntax error, '{value}' is not a NUMBER.").into())
}

fn check_type(kind: Kind, value: &str) -> Result<(), String> {
    match kind {
        Kind::Number if value.trim().parse::<i64>().is_err() => {
            Err(format!("Syntax error, '{value}' is not a NUMBER."))
        }
        Kind::YesNo if !matches!(value, "Yes" | "No") => {
            Err(format!("Syntax error, '{value}' is not Yes|No."))
        }
        Kind::Bool => prefs::boolean(value).map(drop),
        _ => Ok(()),
    }
}
