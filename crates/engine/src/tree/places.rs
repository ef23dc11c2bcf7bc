//! What the nodes of a tree are called, and what they are to a trace: which of them are one device, and where another
//! begins.

use super::{Element, Extent, Tree};
use block::Bytes;
use trace::Place;

impl Tree {
    /// By node number. Layers that leave addresses alone are one device with what stands below them.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        self.place(Place::TOP, false, &mut places);
        places
    }

    /// By node number: how far down it is, from 0, and its name.
    pub(crate) fn names(&self) -> Vec<(u8, &'static str)> {
        let mut names = Vec::new();
        self.name(0, &mut names);
        names
    }

    fn name(&self, depth: u8, names: &mut Vec<(u8, &'static str)>) {
        match &self.element {
            Element::Backend(source) => names.push((depth, source.name())),
            // Its nodes are those of what it is.
            Element::Device(_, form) => form.tree.name(depth, names),
            Element::Layer(layer, children) => {
                names.push((depth, layer.name()));
                children.iter().for_each(|child| child.name(depth + 1, names));
            }
        }
    }

    /// `at`: its device, the one above that where it is the top of its own, and whether a scheduler is above it there.
    /// `ended`: requests of its device end in a node above, which has several below it.
    fn place(&self, at: Place, ended: bool, places: &mut Vec<Place>) {
        let (layer, children) = match &self.element {
            Element::Backend(_) => return places.push(at),
            Element::Device(_, form) => return form.tree.place(at, ended, places),
            Element::Layer(layer, children) => (layer, children),
        };
        let is_scheduler = matches!(self.extent, Extent::Scheduler(_));
        let issues = is_scheduler && !children.iter().all(Tree::ends_in_backend);
        let ends = !ended && (children.len() > 1 || (0..children.len()).all(|at| layer.begins(at).is_none()));
        places.push(Place { ends, issues, ..at });
        for (child, tree) in children.iter().enumerate() {
            // A stack has at most 255 nodes.
            let number = places.len().min(255) as u8;
            let below = match layer.begins(child) {
                Some(Bytes(begins)) => {
                    let scheduled = at.scheduled | is_scheduler;
                    Place { below: None, scheduled, shift: at.shift + begins, ..at }
                }
                None => Place { device: number, below: Some(at.device), ..Place::TOP },
            };
            tree.place(below, (ended || ends) && below.below.is_none(), places);
        }
    }
}
