//! Completions of a command line.

use crate::commands;
use crate::config::Config;
use crate::run::Call;
use crate::tree::Node;
use crate::words;

/// Returns the words that could replace the last word of a line.
pub fn complete(config: &Config, call: &Call) -> Vec<String> {
    let current = Node::Root.find(config, &call.node).unwrap_or(Node::Root);
    let last = call.line.rsplit(char::is_whitespace).next().unwrap_or_default();
    let before = &call.line[..call.line.len() - last.len()];
    let Ok(line) = words::parse(before) else { return Vec::new() };
    let target = match &line.path {
        Some(path) => match current.find(config, path) {
            Ok(node) => node,
            Err(_) => return Vec::new(),
        },
        None => current.clone(),
    };
    let mut found = match line.command.as_deref() {
        None => {
            let names = commands::of(&target).into_iter().map(|command| format!("{} ", command.name));
            let mut found: Vec<String> = names.filter(|name| name.starts_with(last)).collect();
            if line.path.is_none() {
                found.extend(paths(config, &current, last));
            }
            found
        }
        Some("cd" | "ls") => paths(config, &target, last),
        Some("help") => {
            let names = commands::of(&target).into_iter().map(|command| command.name.to_owned());
            names.filter(|name| name.starts_with(last)).collect()
        }
        Some(name) => {
            let mut found = values(config, &target, name, last);
            let signature = commands::find(&target, name).map(|command| command.signature);
            let keys = signature.into_iter().flat_map(|signature| signature.names());
            found.extend(keys.map(|key| format!("{key}=")).filter(|key| key.starts_with(last)));
            found
        }
    };
    found.sort();
    found.dedup();
    found
}

/// Returns the paths of nodes that begin with a text.
fn paths(config: &Config, from: &Node, text: &str) -> Vec<String> {
    let (folder, name) = match text.rfind('/') {
        Some(place) => text.split_at(place + 1),
        None => ("", text),
    };
    let Ok(node) = from.find(config, folder) else { return Vec::new() };
    let children = node.children(config).into_iter().filter(|child| child.name().starts_with(name));
    children
        .map(|child| {
            let end = if child.children(config).is_empty() { "" } else { "/" };
            format!("{folder}{}{end}", child.name())
        })
        .collect()
}

/// Returns the names of objects that a command's argument could mean.
fn values(config: &Config, target: &Node, command: &str, text: &str) -> Vec<String> {
    let all: Vec<String> = match (target, command) {
        (Node::Backstore(_) | Node::AluaGroups(_) | Node::Fabric(_) | Node::Target(_), "delete")
        | (Node::Acls(_), "delete" | "tag" | "untag")
        | (Node::Luns(_), "delete") => target.children(config).iter().map(Node::name).collect(),
        (Node::Luns(_) | Node::Acl(..), "create") => {
            config.storage.iter().map(|object| Node::Storage(object.id.clone()).path()).collect()
        }
        (_, "set" | "get") => {
            let groups = ["global", "attribute", "parameter", "auth", "alua", "discovery_auth"];
            groups.map(str::to_owned).into()
        }
        _ => Vec::new(),
    };
    all.into_iter().filter(|value| value.starts_with(text)).collect()
}
