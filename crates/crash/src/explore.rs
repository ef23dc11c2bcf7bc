//! The order in which states are generated.
//!
//! First the boundaries of flushes, all prefixes, each single lost write, and with torn writes each single
//! lost unit; then pairs, then random subsets. The first group takes turns, and each takes its cuts spread over
//! the log, so that a run that ends early has covered all of it.

use crate::log::Event;
use crate::model::{Piece, State, Variant};
use crate::view::View;
use fastrand::Rng;
use std::collections::VecDeque;
use std::sync::Arc;

/// The most units of one write that are lost one by one.
const UNITS_MAX: u32 = 64;
/// The most units of a write that is lost in part; the tail of a larger one would take much memory.
const TORN_UNITS_MAX: u32 = 4096;
/// The most prefixes of the optional writes of one boundary.
const PREFIXES_MAX: usize = 64;
/// The most optional writes of a cut that are paired.
const PAIRED_MAX: usize = 64;

/// A group of states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Flush boundaries, prefixes, single losses.
    Systematic,
    /// Pairs of lost writes.
    Pairs,
    /// Random subsets, without end.
    Random,
}

/// The numbers below `len`, each once, spread evenly from the start on.
#[derive(Clone)]
struct Spread {
    len: u32,
    bits: u32,
    next: u64,
}

impl Spread {
    const fn new(len: u32) -> Spread {
        Spread { len, bits: 32 - len.saturating_sub(1).leading_zeros(), next: 0 }
    }
}

impl Iterator for Spread {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        while self.next < 1 << self.bits {
            let number = self.next as u32;
            self.next += 1;
            let spread = if self.bits == 0 { 0 } else { number.reverse_bits() >> (32 - self.bits) };
            if spread < self.len {
                return Some(spread);
            }
        }
        None
    }
}

/// Generates states of a log in their order.
pub struct Explorer {
    view: Arc<View>,
    /// Cuts before a flush completes, after a mark, and at the end.
    ends: Vec<u32>,
    /// Cuts after each submission.
    submits: Vec<u32>,
    boundaries: Spread,
    prefixes: Spread,
    /// Single losses at ends: the round, and the ends of this round; a round that gave nothing is the last.
    round: u32,
    round_gave: bool,
    singles: Spread,
    elsewhere: Spread,
    torn: Spread,
    pairs: Spread,
    turn: u8,
    ready: [VecDeque<State>; 6],
    random: Rng,
    phase: Phase,
}

impl Explorer {
    /// Creates an explorer; `seed` decides the random subsets.
    pub fn new(view: Arc<View>, seed: u64) -> Explorer {
        let log = view.log();
        let mut ends = Vec::new();
        let mut submits = vec![0];
        for (at, event) in log.events.iter().enumerate() {
            match event {
                Event::Flushed(_) => ends.push(at as u32),
                Event::Mark(_) => ends.push(at as u32 + 1),
                Event::Submit(_) => submits.push(at as u32 + 1),
                Event::Complete(_) | Event::Flush(_) => {}
            }
        }
        ends.push(log.events.len() as u32);
        ends.dedup();
        let (end_count, submit_count) = (ends.len() as u32, submits.len() as u32);
        Explorer {
            view,
            ends,
            submits,
            boundaries: Spread::new(end_count),
            prefixes: Spread::new(submit_count),
            round: 0,
            round_gave: false,
            singles: Spread::new(end_count),
            elsewhere: Spread::new(submit_count),
            torn: Spread::new(submit_count),
            pairs: Spread::new(end_count),
            turn: 0,
            ready: Default::default(),
            random: Rng::with_seed(seed),
            phase: Phase::Systematic,
        }
    }

    /// Returns the group of the state that was generated last.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns a lower bound for the number of states of the first group.
    pub fn systematic_min(&self) -> u64 {
        (self.ends.len() * 2 + self.submits.len()) as u64
    }

    fn whole(&self, cut: u32, lost: impl IntoIterator<Item = u32>) -> State {
        State::new(cut, lost.into_iter().map(Piece::whole).collect())
    }

    /// Refills a queue of the first group; returns whether it may give more.
    fn refill(&mut self, which: usize) -> bool {
        let is_prefix = self.view.model().variant == Variant::Prefix;
        match which {
            0 => {
                let Some(at) = self.boundaries.next() else { return false };
                let cut = self.ends[at as usize];
                let optional = self.view.optional(cut);
                self.ready[0].push_back(State::all_present(cut));
                if is_prefix {
                    // Every prefix is a state of the next group as well, at the moment of its last write.
                    let step = optional.len().div_ceil(PREFIXES_MAX).max(1);
                    for from in (0..optional.len()).rev().step_by(step) {
                        let state = self.whole(cut, optional[from..].iter().copied());
                        self.ready[0].push_back(state);
                    }
                } else if !optional.is_empty() {
                    let state = self.whole(cut, optional);
                    self.ready[0].push_back(state);
                }
            }
            1 => {
                let Some(at) = self.prefixes.next() else { return false };
                self.ready[1].push_back(State::all_present(self.submits[at as usize]));
            }
            2 if !is_prefix => {
                let Some(at) = self.singles.next() else {
                    if !self.round_gave {
                        return false;
                    }
                    (self.round, self.round_gave) = (self.round + 1, false);
                    self.singles = Spread::new(self.ends.len() as u32);
                    return true;
                };
                let cut = self.ends[at as usize];
                let optional = self.view.optional(cut);
                // The newest first: they are most likely to be ordered after others.
                let Some(at) = optional.len().checked_sub(1 + self.round as usize) else { return true };
                self.round_gave = true;
                let write = optional[at];
                self.ready[2].push_back(State::new(cut, vec![Piece::whole(write)]));
                let others = optional.into_iter().filter(|other| *other != write);
                let kept = self.whole(cut, others);
                self.ready[2].push_back(kept);
            }
            3 if !is_prefix => {
                let Some(at) = self.elsewhere.next() else { return false };
                let cut = self.submits[at as usize];
                for write in self.view.optional(cut).into_iter().rev() {
                    self.ready[3].push_back(State::new(cut, vec![Piece::whole(write)]));
                }
            }
            4 if self.view.model().variant == Variant::Torn => {
                let Some(at) = self.torn.next() else { return false };
                let cut = self.submits[at as usize];
                let optional = self.view.optional(cut);
                let Some(write) = optional.last().copied() else { return true };
                let units = self.view.model().units(self.view.log(), write);
                if units == 1 || units > TORN_UNITS_MAX {
                    return true;
                }
                let step = units.div_ceil(UNITS_MAX);
                for unit in (0..units).step_by(step as usize) {
                    // Only the first units arrived; all but one arrived.
                    let tail = (unit.max(1)..units).map(|unit| Piece { write, unit }).collect();
                    self.ready[4].push_back(State::new(cut, tail));
                    self.ready[4].push_back(State::new(cut, vec![Piece { write, unit }]));
                }
            }
            _ => return false,
        }
        true
    }

    fn systematic(&mut self, go_on: &dyn Fn() -> bool) -> Option<State> {
        for _ in 0..5 {
            let which = usize::from(self.turn % 5);
            self.turn = (self.turn + 1) % 5;
            while self.ready[which].is_empty() {
                if !go_on() || !self.refill(which) {
                    break;
                }
            }
            if let Some(state) = self.ready[which].pop_front() {
                return Some(state);
            }
        }
        None
    }

    fn pair(&mut self, go_on: &dyn Fn() -> bool) -> Option<State> {
        if self.view.model().variant == Variant::Prefix {
            return None;
        }
        while self.ready[5].is_empty() {
            if !go_on() {
                return None;
            }
            let cut = self.ends[self.pairs.next()? as usize];
            let optional = self.view.optional(cut);
            let newest = &optional[optional.len().saturating_sub(PAIRED_MAX)..];
            for (at, first) in newest.iter().enumerate() {
                for second in &newest[at + 1..] {
                    let state = State::new(cut, vec![Piece::whole(*first), Piece::whole(*second)]);
                    self.ready[5].push_back(state);
                }
            }
        }
        self.ready[5].pop_front()
    }

    /// Generates a random state: a cut anywhere, and any subset with a random share of losses.
    fn random(&mut self) -> State {
        let log = self.view.log();
        let cut = self.random.u32(0..=log.events.len() as u32);
        let optional = self.view.optional(cut);
        let model = *self.view.model();
        if model.variant == Variant::Prefix {
            let from = self.random.usize(0..=optional.len());
            return self.whole(cut, optional[from..].iter().copied());
        }
        let share = [0.1, 0.5, 0.9][self.random.usize(0..3)];
        let mut lost = Vec::new();
        for write in optional {
            let units = model.units(self.view.log(), write);
            if model.variant == Variant::Torn && (2..=TORN_UNITS_MAX).contains(&units) && self.random.bool() {
                let gone = (0..units).filter(|_| self.random.f64() < share);
                lost.extend(gone.map(|unit| Piece { write, unit }));
            } else if self.random.f64() < share {
                lost.push(Piece::whole(write));
            }
        }
        State::new(cut, lost)
    }
}

impl Explorer {
    /// Generates the next state. `None`: `go_on` has ended the search for one; there is always another.
    pub fn next_while(&mut self, go_on: &dyn Fn() -> bool) -> Option<State> {
        if self.phase == Phase::Systematic {
            if let Some(state) = self.systematic(go_on) {
                return Some(state);
            }
            if !go_on() {
                return None;
            }
            self.phase = Phase::Pairs;
        }
        if self.phase == Phase::Pairs {
            if let Some(state) = self.pair(go_on) {
                return Some(state);
            }
            if !go_on() {
                return None;
            }
            self.phase = Phase::Random;
        }
        Some(self.random())
    }
}

impl Iterator for Explorer {
    type Item = State;

    /// Generates the next state; never ends.
    fn next(&mut self) -> Option<State> {
        self.next_while(&|| true)
    }
}
