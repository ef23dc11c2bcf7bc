//! The nodes of a stack, by number, with their counters.
//!
//! *Invariant:* every value of [`NodeId`] has an entry, so indexing never fails. Numbers without a node have
//! [`NoNode`].

use crate::{Cx, Nanos, Node, NodeId, Ring, Verdict};
use block::{Cookie, Request};
use std::ops::{Index, IndexMut};

/// Number of values of a [`NodeId`].
const NUMBERS: usize = 1 << u8::BITS;

/// A node with its counters. Time advances between turns only, so times are recorded only when a request is
/// held and when it proceeds. Each entry has a cache line of its own: one step of a request touches one.
#[repr(align(64))]
pub(super) struct NodeEntry<R: Ring> {
    pub(super) node: Box<dyn Node<R>>,
    pub(super) leaf: bool,
    /// Requests that entered and were not parked.
    pub(super) entered: u64,
    /// Requests that are held here or below.
    held: u64,
    /// Total time that requests were held here or below, in nanoseconds. For requests still held, only their
    /// start was subtracted: readers add the current time for each. Wraps.
    held_ns: u64,
}

impl<R: Ring> NodeEntry<R> {
    pub(super) fn new(node: Box<dyn Node<R>>, leaf: bool) -> NodeEntry<R> {
        NodeEntry { node, leaf, entered: 0, held: 0, held_ns: 0 }
    }

    pub(super) fn counts(&self, now: Nanos) -> (u64, u64, u64) {
        let ticks_ns = self.held_ns.wrapping_add(self.held.wrapping_mul(now.0));
        (self.entered - self.held, ticks_ns, self.held)
    }

    /// Continues the counters of an earlier node.
    pub(super) fn count_on_from(&mut self, old: &NodeEntry<R>) {
        (self.entered, self.held_ns) = (old.entered, old.held_ns);
    }
}

/// Fills the numbers without a node.
struct NoNode;

impl<R: Ring> Node<R> for NoNode {
    fn submit(&mut self, _: Cookie, _: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        panic!("a request was sent to {:?}, which does not exist", cx.node)
    }
}

/// The nodes of a stack.
pub(super) struct NodeTable<R: Ring> {
    by_number: Box<[NodeEntry<R>; NUMBERS]>,
    /// Number of nodes.
    count: usize,
}

impl<R: Ring> NodeTable<R> {
    /// Builds the table.
    ///
    /// # Panics
    /// If there are more nodes than numbers.
    pub(super) fn new(nodes: Vec<NodeEntry<R>>) -> NodeTable<R> {
        let count = nodes.len();
        let nobody = std::iter::repeat_with(|| NodeEntry::new(Box::new(NoNode), true));
        let all: Vec<NodeEntry<R>> =
            nodes.into_iter().chain(nobody.take(NUMBERS.saturating_sub(count))).collect();
        let Ok(by_number) = all.into_boxed_slice().try_into() else { panic!("a stack of {count} nodes") };
        NodeTable { by_number, count }
    }

    pub(super) fn get(&self, number: usize) -> Option<&NodeEntry<R>> {
        self.by_number[..self.count].get(number)
    }

    pub(super) fn get_mut(&mut self, number: usize) -> Option<&mut NodeEntry<R>> {
        self.by_number[..self.count].get_mut(number)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &NodeEntry<R>> {
        self.by_number[..self.count].iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut NodeEntry<R>> {
        self.by_number[..self.count].iter_mut()
    }

    pub(super) fn into_nodes(self) -> impl Iterator<Item = NodeEntry<R>> {
        let all: Box<[NodeEntry<R>]> = self.by_number;
        all.into_iter().take(self.count)
    }

    /// Counts a request as held in these nodes from now on.
    #[inline]
    pub(super) fn hold(&mut self, path: &[NodeId], now: Nanos) {
        for &node in path {
            let entry = &mut self[node];
            entry.held += 1;
            entry.held_ns = entry.held_ns.wrapping_sub(now.0);
        }
    }

    /// Counts a request as held in these nodes no longer.
    #[inline]
    pub(super) fn proceed(&mut self, path: &[NodeId], now: Nanos) {
        for &node in path {
            let entry = &mut self[node];
            entry.held -= 1;
            entry.held_ns = entry.held_ns.wrapping_add(now.0);
        }
    }
}

impl<R: Ring> Index<NodeId> for NodeTable<R> {
    type Output = NodeEntry<R>;

    #[inline]
    fn index(&self, node: NodeId) -> &NodeEntry<R> {
        &self.by_number[node.index()]
    }
}

impl<R: Ring> IndexMut<NodeId> for NodeTable<R> {
    #[inline]
    fn index_mut(&mut self, node: NodeId) -> &mut NodeEntry<R> {
        &mut self.by_number[node.index()]
    }
}
