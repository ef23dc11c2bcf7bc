//! Answers to SendTargets (RFC 7143, section 4.3 and appendix C).

use super::tree::{Group, GroupId, Tree};
use proto::iscsi::discovery::SendTargets;
use proto::iscsi::login::SessionType;
use spec::{IscsiName, PortalAddress};
use std::net::{IpAddr, SocketAddr};

/// Returns the text that answers SendTargets: for each target its name and the portals of its groups.
/// `wanted`: the value of the key: `All`, a target's name, or empty for the session's own target. `own`: the
/// portal group of the session; `None` in discovery sessions. `local`: the address that the initiator
/// reached, which stands for portals that listen on every address. `None`: the value is not permitted.
pub(super) fn send_targets(
    tree: &Tree,
    wanted: &[u8],
    own: Option<&GroupId>,
    initiator: &str,
    local: SocketAddr,
) -> Option<Vec<u8>> {
    let session =
        own.map_or(SessionType::Discovery, |own| SessionType::Normal { target: own.target.to_string() });
    let only = match SendTargets::parse(std::str::from_utf8(wanted).ok()?, &session)? {
        SendTargets::All => None,
        // A normal session may only ask for its own target.
        SendTargets::One(target) if own.is_some_and(|own| own.target.as_str() != target) => return None,
        SendTargets::One(target) => Some(target),
    };
    let mut text = Vec::new();
    for (name, target) in &tree.targets {
        if only.as_ref().is_some_and(|only| only != name.as_str()) {
            continue;
        }
        let groups = target.groups.iter().filter(|(_, group)| is_listed(group, initiator));
        let addresses: Vec<String> = groups
            .flat_map(|(tag, group)| {
                group.portals.iter().filter_map(move |portal| address(portal, *tag, local))
            })
            .collect();
        if !addresses.is_empty() {
            put(&mut text, name, &addresses);
        }
    }
    Some(text)
}

fn put(text: &mut Vec<u8>, name: &IscsiName, addresses: &[String]) {
    text.extend_from_slice(format!("TargetName={name}\0").as_bytes());
    for address in addresses {
        text.extend_from_slice(format!("TargetAddress={address}\0").as_bytes());
    }
}

/// Whether an initiator may see a portal group in discovery: LIO's `demo_mode_discovery` and
/// `tpg_enabled_sendtargets`.
fn is_listed(group: &Group, initiator: &str) -> bool {
    let may_know = group.admits(initiator) || group.attributes.is_on("demo_mode_discovery");
    may_know && (group.is_enabled || !group.attributes.is_on("tpg_enabled_sendtargets"))
}

/// Formats the address of a portal; `None` if the portal only has the other address family than `local`,
/// the address that the initiator reached.
fn address(portal: &PortalAddress, tag: u16, local: SocketAddr) -> Option<String> {
    let ip = local.ip().to_canonical();
    let host = match portal.host.parse::<IpAddr>() {
        // An IPv6 wildcard accepts IPv4, too; an IPv4 wildcard accepts no IPv6.
        Ok(IpAddr::V4(any)) if any.is_unspecified() && ip.is_ipv6() => return None,
        Ok(any) if any.is_unspecified() => ip.to_string(),
        Ok(given) => given.to_string(),
        Err(_) if portal.host.is_empty() => ip.to_string(),
        // Host names are permitted (section 13.8); the initiator may resolve them to other addresses.
        Err(_) => portal.host.clone(),
    };
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    Some(format!("{host}:{},{tag}", portal.port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::Scope;

    fn name(text: &str) -> IscsiName {
        format!("iqn.2026-11.com.example:{text}").parse().expect("a name")
    }

    /// Two targets: `a` with portals of all kinds and demo mode, `b` with an ACL for `i`.
    fn tree() -> Tree {
        let mut tree = Tree::default();
        for (target, portals) in [
            ("a", &["tcp::3260", "tcp:0.0.0.0:3261", "tcp:10.0.0.9:3262", "tcp:[fd00::9]:3263"][..]),
            ("b", &["tcp::3260"]),
        ] {
            let id = GroupId::new(name(target), if target == "a" { 1 } else { 7 });
            tree.create_target(&id.target).expect("new");
            tree.create_group(&id).expect("new");
            for portal in portals {
                tree.add_portal(&id, &portal.parse().expect("a portal")).expect("new");
            }
            tree.group_mut(&id).expect("a group").is_enabled = true;
        }
        let (a, b) = (GroupId::new(name("a"), 1), GroupId::new(name("b"), 7));
        tree.group_mut(&a).expect("a group").attributes.set("generate_node_acls", "1").expect("a value");
        tree.group_mut(&b).expect("a group").attributes.set("demo_mode_discovery", "0").expect("a value");
        tree.add_acl(&b, &name("i")).expect("new");
        tree
    }

    fn ask(tree: &Tree, wanted: &str, own: Option<&GroupId>, initiator: &str, local: &str) -> Option<String> {
        let local = local.parse().expect("an address");
        let text = send_targets(tree, wanted.as_bytes(), own, name(initiator).as_str(), local)?;
        Some(String::from_utf8(text).expect("text").replace('\0', "\n"))
    }

    #[test]
    fn a_discovery_session_lists_the_targets_that_the_initiator_may_know() {
        let all = ask(&tree(), "All", None, "i", "10.0.0.1:3260");
        let expected = "TargetName=iqn.2026-11.com.example:a\n\
                        TargetAddress=10.0.0.1:3260,1\nTargetAddress=10.0.0.1:3261,1\n\
                        TargetAddress=10.0.0.9:3262,1\nTargetAddress=[fd00::9]:3263,1\n\
                        TargetName=iqn.2026-11.com.example:b\nTargetAddress=10.0.0.1:3260,7\n";
        assert_eq!(all.as_deref(), Some(expected));
        let other = ask(&tree(), "All", None, "j", "[fd00::1]:3260").expect("a text");
        assert!(!other.contains("example:b"), "it has no ACL there");
        assert!(other.contains("[fd00::1]:3260,1") && !other.contains("3261"), "{other}");
        let mapped = ask(&tree(), "All", None, "j", "[::ffff:10.0.0.1]:3260").expect("a text");
        assert!(mapped.contains("=10.0.0.1:3260,1"), "{mapped}");
    }

    #[test]
    fn a_disabled_group_is_listed_only_on_demand() {
        let mut tree = tree();
        let a = GroupId::new(name("a"), 1);
        tree.group_mut(&a).expect("a group").is_enabled = false;
        let listed =
            |tree: &Tree| ask(tree, "All", None, "i", "10.0.0.1:1").expect("a text").contains("example:a");
        assert!(!listed(&tree));
        let attributes = tree.attributes_mut(&Scope::Group(a)).expect("a group");
        attributes.set("tpg_enabled_sendtargets", "0").expect("a value");
        assert!(listed(&tree));
    }

    #[test]
    fn a_normal_session_may_ask_for_its_own_target_only() {
        let (tree, own) = (tree(), GroupId::new(name("b"), 7));
        let ask = |wanted: &str, own: Option<&GroupId>| ask(&tree, wanted, own, "i", "10.0.0.1:1");
        let only_b = Some("TargetName=iqn.2026-11.com.example:b\nTargetAddress=10.0.0.1:3260,7\n".to_owned());
        assert_eq!(ask("", Some(&own)), only_b);
        assert_eq!(ask("iqn.2026-11.com.example:b", Some(&own)), only_b);
        assert_eq!(ask("IQN.2026-11.com.example:B", None), only_b);
        assert_eq!(ask("All", Some(&own)), only_b, "as LIO does");
        assert_eq!(ask("iqn.2026-11.com.example:a", Some(&own)), None);
        assert_eq!(ask("", None), None);
        assert_eq!(ask("iqn.2026-11.com.example:none", None), Some(String::new()));
    }
}
