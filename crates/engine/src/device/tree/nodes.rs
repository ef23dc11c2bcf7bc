//! The nodes of a tree by number: their names, and their roles in a trace, which shows the devices of a stack
//! separately.

use super::{Element, Extent, Tree};
use block::Bytes;
use trace::NodeRole;

impl Tree {
    /// Lists the role of each node in a trace, by node number. Layers that keep addresses are one device with
    /// their child.
    pub(crate) fn trace_roles(&self) -> Vec<NodeRole> {
        let mut roles = Vec::new();
        self.role(NodeRole::TOP, false, &mut roles);
        roles
    }

    /// Lists the nodes by number: depth from 0, and name.
    pub(crate) fn node_names(&self) -> Vec<(u8, &'static str)> {
        let mut names = Vec::new();
        self.name(0, &mut names);
        names
    }

    /// Lists the labels of the nodes by number: the path, URI or size of a backend, after its role in the
    /// layer above (`origin`, `overlay`), if any, and the name of a device that is used as a whole. Layers
    /// have none.
    pub(crate) fn labels(&self) -> Vec<String> {
        let mut labels = Vec::new();
        self.label("", &mut labels);
        labels
    }

    fn label(&self, role: &str, labels: &mut Vec<String>) {
        let with_role =
            |text: &str| [role, text].join(if role.is_empty() || text.is_empty() { "" } else { " " });
        match &self.element {
            Element::Backend(source) => labels.push(with_role(&source.label())),
            Element::Device(device, composition) => {
                let first = labels.len();
                composition.tree.label("", labels);
                let own = with_role(&format!("device {}", device.name()));
                match labels.get_mut(first) {
                    Some(label) if label.is_empty() => *label = own,
                    Some(label) => *label = format!("{own}: {label}"),
                    None => {}
                }
            }
            Element::Layer(_, children) => {
                labels.push(with_role(""));
                let is_overlay = matches!(self.extent, Extent::Overlay(_));
                for (number, child) in children.iter().enumerate() {
                    let role = match number {
                        0 if is_overlay => "origin",
                        1 if is_overlay => "overlay",
                        _ => "",
                    };
                    child.label(role, labels);
                }
            }
        }
    }

    fn name(&self, depth: u8, names: &mut Vec<(u8, &'static str)>) {
        match &self.element {
            Element::Backend(source) => names.push((depth, source.name())),
            // Its nodes are those of its composition.
            Element::Device(_, composition) => composition.tree.name(depth, names),
            Element::Layer(layer, children) => {
                names.push((depth, layer.name()));
                children.iter().for_each(|child| child.name(depth + 1, names));
            }
        }
    }

    /// `at`: the node's device, the device above it if it is the top of its own, and whether a scheduler is
    /// above it there. `ended`: requests of its device end in a node above, which has several children.
    fn role(&self, at: NodeRole, ended: bool, roles: &mut Vec<NodeRole>) {
        let (layer, children) = match &self.element {
            Element::Backend(_) => return roles.push(at),
            Element::Device(_, composition) => return composition.tree.role(at, ended, roles),
            Element::Layer(layer, children) => (layer, children),
        };
        let is_scheduler = matches!(self.extent, Extent::Scheduler(_));
        let issues = is_scheduler && !children.iter().all(Tree::ends_in_backend);
        let ends =
            !ended && (children.len() > 1 || (0..children.len()).all(|at| layer.child_start(at).is_none()));
        roles.push(NodeRole { ends, issues, ..at });
        for (child, tree) in children.iter().enumerate() {
            // A stack has at most 255 nodes.
            let number = roles.len().min(255) as u8;
            let below = match layer.child_start(child) {
                Some(Bytes(begins)) => {
                    let scheduled = at.scheduled | is_scheduler;
                    NodeRole { below: None, scheduled, shift: at.shift + begins, ..at }
                }
                None => NodeRole { device: number, below: Some(at.device), ..NodeRole::TOP },
            };
            tree.role(below, (ended || ends) && below.below.is_none(), roles);
        }
    }
}
