//! What the nodes of a tree are called, and what they are to a trace: which of them are one device, and where another
//! begins.

use super::{Element, Extent, Tree};
use trace::Place;

impl Tree {
    /// By node number. Layers that leave addresses alone are one device with what stands below them.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        self.place(Place::TOP, &mut places);
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
    fn place(&self, at: Place, places: &mut Vec<Place>) {
        let (layer, children) = match &self.element {
            Element::Backend(_) => return places.push(at),
            Element::Device(_, form) => return form.tree.place(at, places),
            Element::Layer(layer, children) => (layer, children),
        };
        let keeps = layer.keeps_addresses();
        let is_scheduler = matches!(self.extent, Extent::Scheduler(_));
        let issues = is_scheduler && !children.iter().all(Tree::ends_in_backend);
        places.push(Place { ends: !keeps, issues, ..at });
        for child in children {
            // A stack has at most 255 nodes.
            let number = places.len().min(255) as u8;
            let below = match keeps {
                true => Place { below: None, scheduled: at.scheduled | is_scheduler, ..at },
                false => Place { device: number, below: Some(at.device), ..Place::TOP },
            };
            child.place(below, places);
        }
    }
}
