//! What the nodes of a tree are called, and what they are to a trace: which of them are one device, and where another
//! begins.

use super::{Element, Tree};
use trace::Place;

impl Tree {
    /// By node number. Layers that leave addresses alone are one device with what stands below them.
    pub(crate) fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        self.place(0, None, &mut places);
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

    fn place(&self, device: u8, below: Option<u8>, places: &mut Vec<Place>) {
        let (layer, children) = match &self.element {
            Element::Backend(_) => return places.push(Place { device, below, ends: false }),
            Element::Device(_, form) => return form.tree.place(device, below, places),
            Element::Layer(layer, children) => (layer, children),
        };
        let keeps = layer.keeps_addresses();
        places.push(Place { device, below, ends: !keeps });
        for child in children {
            match keeps {
                true => child.place(device, None, places),
                // A stack has at most 255 nodes.
                false => child.place(places.len().min(255) as u8, Some(device), places),
            }
        }
    }
}
