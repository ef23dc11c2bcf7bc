//! A stack's nodes, each with what it has to do with.
//!
//! *Invariant:* there is a seat for every number that a node may have, so nobody who has one has to ask whether there is
//! a node: where there is none sits [`Nobody`].

use crate::{Cx, Nanos, Node, NodeId, Ring, Verdict};
use block::{Cookie, Request};
use std::ops::{Index, IndexMut};

/// How many numbers a [`NodeId`] can be.
const NUMBERS: usize = 1 << u8::BITS;

/// A node in its place, and what it has to do with. Time passes between turns only, so what a request does within one
/// carry takes none: times are looked at when one comes to rest, and when it goes on. A line of the cache each: a hop
/// touches one.
#[repr(align(64))]
pub(super) struct Seat<R: Ring> {
    pub(super) node: Box<dyn Node<R>>,
    pub(super) leaf: bool,
    /// Requests that came to it and stayed.
    pub(super) entered: u64,
    /// Of those, such as rest here or below.
    resting: u64,
    /// The times when requests went on, all added up, less those when they came to rest: how long they rested, but for
    /// those that do, which lack the time when they will go on. Wraps.
    rested_ns: u64,
}

impl<R: Ring> Seat<R> {
    pub(super) fn new(node: Box<dyn Node<R>>, leaf: bool) -> Seat<R> {
        Seat { node, leaf, entered: 0, resting: 0, rested_ns: 0 }
    }

    pub(super) fn counts(&self, now: Nanos) -> (u64, u64, u64) {
        let ticks_ns = self.rested_ns.wrapping_add(self.resting.wrapping_mul(now.0));
        (self.entered - self.resting, ticks_ns, self.resting)
    }

    /// Go on counting where the node did that sat here before.
    pub(super) fn count_on_from(&mut self, old: &Seat<R>) {
        (self.entered, self.rested_ns) = (old.entered, old.rested_ns);
    }
}

/// Sits where there is no node.
struct Nobody;

impl<R: Ring> Node<R> for Nobody {
    fn submit(&mut self, _: Cookie, _: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        panic!("a request was sent to {:?}, and there is none", cx.node)
    }
}

/// The seats of a stack.
pub(super) struct Seats<R: Ring> {
    by_number: Box<[Seat<R>; NUMBERS]>,
    /// The first so many have a node.
    count: usize,
}

impl<R: Ring> Seats<R> {
    /// # Panics
    /// When there are more than can be numbered.
    pub(super) fn new(nodes: Vec<Seat<R>>) -> Seats<R> {
        let count = nodes.len();
        let nobody = std::iter::repeat_with(|| Seat::new(Box::new(Nobody), true));
        let all: Vec<Seat<R>> = nodes.into_iter().chain(nobody.take(NUMBERS.saturating_sub(count))).collect();
        let Ok(by_number) = all.into_boxed_slice().try_into() else { panic!("a stack of {count} nodes") };
        Seats { by_number, count }
    }

    pub(super) fn get(&self, number: usize) -> Option<&Seat<R>> {
        self.by_number[..self.count].get(number)
    }

    pub(super) fn get_mut(&mut self, number: usize) -> Option<&mut Seat<R>> {
        self.by_number[..self.count].get_mut(number)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Seat<R>> {
        self.by_number[..self.count].iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Seat<R>> {
        self.by_number[..self.count].iter_mut()
    }

    pub(super) fn into_nodes(self) -> impl Iterator<Item = Seat<R>> {
        let all: Box<[Seat<R>]> = self.by_number;
        all.into_iter().take(self.count)
    }

    /// A request rests in these nodes from now on.
    #[inline]
    pub(super) fn rest(&mut self, path: &[NodeId], now: Nanos) {
        for &node in path {
            let seat = &mut self[node];
            seat.resting += 1;
            seat.rested_ns = seat.rested_ns.wrapping_sub(now.0);
        }
    }

    /// It goes on.
    #[inline]
    pub(super) fn go_on(&mut self, path: &[NodeId], now: Nanos) {
        for &node in path {
            let seat = &mut self[node];
            seat.resting -= 1;
            seat.rested_ns = seat.rested_ns.wrapping_add(now.0);
        }
    }
}

impl<R: Ring> Index<NodeId> for Seats<R> {
    type Output = Seat<R>;

    #[inline]
    fn index(&self, node: NodeId) -> &Seat<R> {
        &self.by_number[node.index()]
    }
}

impl<R: Ring> IndexMut<NodeId> for Seats<R> {
    #[inline]
    fn index_mut(&mut self, node: NodeId) -> &mut Seat<R> {
        &mut self.by_number[node.index()]
    }
}
