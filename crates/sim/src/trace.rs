//! Event trace: a hash over every event, and the last few events for failure reports.

use queue::Nanos;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::rc::Rc;

/// Number of events kept for a failure report.
const KEPT: usize = 50;
/// Largest number of arguments of an event.
const ARGS: usize = 6;

/// An argument of an event: a name and a number.
pub type Arg = (&'static str, u64);

#[derive(Clone, Copy, Debug)]
struct Entry {
    number: u64,
    at: Nanos,
    what: &'static str,
    args: [Arg; ARGS],
}

#[derive(Default, Debug)]
struct Trace {
    hash: u64,
    count: u64,
    last: VecDeque<Entry>,
}

/// A handle to the trace of a run; copies share it, so it survives a panic.
#[derive(Clone, Default, Debug)]
pub struct Tracer(Rc<RefCell<Trace>>);

impl Tracer {
    /// Records an event with at most six arguments; the hash covers all of them.
    pub fn note(&self, at: Nanos, what: &'static str, args: &[Arg]) {
        let mut trace = self.0.borrow_mut();
        let mut entry = Entry { number: trace.count, at, what, args: [("", 0); ARGS] };
        entry.args[..args.len()].copy_from_slice(args);
        let mut hash = trace.hash ^ at.0;
        let mut mix = |word: u64| {
            hash = (hash ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25).rotate_left(29);
        };
        what.bytes().for_each(|byte| mix(byte.into()));
        args.iter().for_each(|arg| mix(arg.1));
        trace.hash = hash;
        trace.count += 1;
        if trace.last.len() == KEPT {
            trace.last.pop_front();
        }
        trace.last.push_back(entry);
    }

    /// Returns the hash over all events so far.
    pub fn hash(&self) -> u64 {
        self.0.borrow().hash
    }

    /// Returns the number of events so far.
    pub fn count(&self) -> u64 {
        self.0.borrow().count
    }

    /// Returns the last fifty events, one per line.
    pub fn tail(&self) -> String {
        let mut text = String::new();
        for entry in &self.0.borrow().last {
            let _ = write!(text, "  #{:<6} {:>12} ns  {:<10}", entry.number, entry.at.0, entry.what);
            for (name, value) in entry.args.iter().filter(|arg| !arg.0.is_empty()) {
                let _ = match i64::try_from(*value) {
                    Ok(_) => write!(text, " {name}={value}"),
                    Err(_) => write!(text, " {name}={}", *value as i64),
                };
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_depends_on_order_and_arguments() {
        let hash = |events: &[(&'static str, u64)]| {
            let tracer = Tracer::default();
            events.iter().for_each(|&(what, arg)| tracer.note(Nanos(5), what, &[("a", arg)]));
            tracer.hash()
        };
        assert_eq!(hash(&[("x", 1), ("y", 2)]), hash(&[("x", 1), ("y", 2)]));
        assert_ne!(hash(&[("x", 1), ("y", 2)]), hash(&[("y", 2), ("x", 1)]));
        assert_ne!(hash(&[("x", 1)]), hash(&[("x", 2)]));
    }

    #[test]
    fn only_the_last_events_are_kept() {
        let tracer = Tracer::default();
        (0..200).for_each(|n| tracer.note(Nanos(n), "tick", &[("n", n)]));
        let tail = tracer.tail();
        assert_eq!((tracer.count(), tail.lines().count()), (200, KEPT));
        assert!(tail.contains("n=199") && !tail.contains("n=149\n"));
    }
}
