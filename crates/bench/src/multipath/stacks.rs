//! The compared stacks: a null device alone, null devices under multipath, and under the same multipath with
//! one mutex around its state.
//!
//! The variant with a mutex ([`Locked`]) is multipath as in the kernel of 2016: one state for all queues,
//! and a lock that each request takes when it is sent and again when it completes. It exists only for this
//! measurement.

use backends::{Null, NullSpec};
use block::{Cookie, Region, Request, Status, Tag};
use layers::multipath::{Config, Multipath, MultipathNode};
use queue::{Cx, Node, NodeId, Ring, Stack, Verdict};
use std::sync::{Arc, Mutex, PoisonError};

/// The selectors of paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Selector {
    RoundRobin,
    ServiceTime,
    QueueLength,
    Historical,
    Affinity,
}

impl Selector {
    pub(crate) const ALL: [Selector; 5] = [
        Selector::RoundRobin,
        Selector::ServiceTime,
        Selector::QueueLength,
        Selector::Historical,
        Selector::Affinity,
    ];
    /// The selectors of the published comparison.
    pub(crate) const SEEDS: [Selector; 3] =
        [Selector::ServiceTime, Selector::QueueLength, Selector::RoundRobin];

    /// Returns its name in a table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Selector::RoundRobin => "round-robin",
            Selector::ServiceTime => "service-time",
            Selector::QueueLength => "queue-length",
            Selector::Historical => "historical-service-time",
            Selector::Affinity => "io-affinity",
        }
    }

    /// Returns the arguments of path `number` of `count` in a table, on a machine with `cpus` processors.
    fn path(self, number: u8, count: u8, cpus: usize) -> String {
        match self {
            Selector::ServiceTime => "1 1".to_owned(),
            Selector::Affinity => {
                let served = (0..cpus.min(64)).filter(|cpu| cpu % usize::from(count) == usize::from(number));
                let mask = served.fold(0u64, |mask, cpu| mask | 1 << cpu);
                // The kernel accepts as many words as its processors fill.
                if cpus <= 32 {
                    return format!("{mask:08x}");
                }
                format!("{:08x},{:08x}", mask >> 32, mask & 0xffff_ffff)
            }
            _ => "1".to_owned(),
        }
    }

    /// Returns the arguments after `multipath` in a table: one group over these devices, for `cpus` processors.
    pub(crate) fn line(self, devices: &[&str], cpus: usize) -> String {
        let count = devices.len() as u8;
        let args = if self == Selector::ServiceTime { 2 } else { 1 };
        let path =
            |(number, device): (usize, &&str)| format!("{device} {}", self.path(number as u8, count, cpus));
        let paths: Vec<String> = devices.iter().enumerate().map(path).collect();
        format!("0 0 1 1 {} 0 {count} {args} {}", self.name(), paths.join(" "))
    }
}

/// Returns the arguments after `multipath` in a table, for the selector of that name and `cpus` processors.
///
/// # Panics
/// If no selector has that name.
pub(crate) fn selector_arguments(name: &str, devices: &[&str], cpus: usize) -> String {
    let selector = Selector::ALL.into_iter().find(|selector| selector.name() == name);
    selector.expect("the name of a selector").line(devices, cpus)
}

/// The layer between a queue and its null devices, if any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Subject {
    /// No layer: the null device as the reference.
    Raw,
    /// Multipath over this number of paths.
    Free(Selector, u8),
    /// Multipath with one mutex around its state.
    Locked(Selector, u8),
}

impl Subject {
    pub(crate) fn name(self) -> String {
        match self {
            Subject::Raw => "raw null".to_owned(),
            Subject::Free(selector, paths) => format!("{}, {paths}", selector.name()),
            Subject::Locked(selector, paths) => format!("{}, {paths}, mutex", selector.name()),
        }
    }

    /// Returns all compared stacks: the null device first, then each selector over one path and over four,
    /// then each over four with a mutex.
    pub(crate) fn all() -> Vec<Subject> {
        let free =
            Selector::ALL.iter().flat_map(|&selector| [1, 4].map(|paths| Subject::Free(selector, paths)));
        let locked = Selector::ALL.map(|selector| Subject::Locked(selector, 4));
        [Subject::Raw].into_iter().chain(free).chain(locked).collect()
    }
}

/// State shared by all queues of a device.
#[derive(Clone)]
pub(crate) enum Shared {
    Raw,
    Free(Arc<Multipath>, u8),
    Locked(Arc<Mutex<MultipathNode>>, u8),
}

impl Shared {
    /// Creates the state for a number of queues and their depth. With a lock, the tags of all queues share
    /// the state's tables.
    pub(crate) fn new<R: Ring>(subject: Subject, queues: u16, depth: u16) -> Shared {
        let (Subject::Free(selector, paths) | Subject::Locked(selector, paths)) = subject else {
            return Shared::Raw;
        };
        let devices: Vec<String> = (0..paths).map(|number| format!("null{number}")).collect();
        let line = selector.line(&devices.iter().map(String::as_str).collect::<Vec<_>>(), 64);
        let words: Vec<&str> = line.split(' ').collect();
        let shared = Multipath::new(Config::parse(&words).expect("a line of a table"));
        if matches!(subject, Subject::Free(..)) {
            return Shared::Free(shared, paths);
        }
        let mut node = MultipathNode::new(shared, &children(paths));
        Node::<R>::attach(&mut node, NodeId::TOP, usize::from(queues) * usize::from(depth));
        Shared::Locked(Arc::new(Mutex::new(node)), paths)
    }

    /// Returns the stack of queue `number`, each `depth` deep. `zeroes`: zero-copy memory for reads of null
    /// devices.
    pub(crate) fn stack<R: Ring>(&self, number: u16, depth: u16, zeroes: Option<Region>) -> Stack<R> {
        let mut stack = Stack::default();
        let paths = match self {
            Shared::Raw => 0,
            Shared::Free(shared, paths) => {
                stack.layer(Box::new(MultipathNode::new(shared.clone(), &children(*paths))), 0);
                *paths
            }
            Shared::Locked(node, paths) => {
                stack.layer(Box::new(Locked { node: node.clone(), first_tag: number * depth }), 0);
                *paths
            }
        };
        for _ in 0..paths.max(1) {
            let null = Null::new(&NullSpec::default()).expect("a null device");
            stack.backend(Box::new(null.node(zeroes)));
        }
        stack
    }
}

fn children(paths: u8) -> Vec<NodeId> {
    (1..=paths).map(NodeId).collect()
}

/// One queue's access to the multipath that it shares with the others.
struct Locked {
    node: Arc<Mutex<MultipathNode>>,
    /// First of this queue's tags among those of all queues.
    first_tag: u16,
}

impl Locked {
    fn cookie(&self, io: Cookie) -> Cookie {
        Cookie { tag: Tag(self.first_tag + io.tag.0), ..io }
    }
}

impl<R: Ring> Node<R> for Locked {
    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let io = self.cookie(io);
        self.node.lock().unwrap_or_else(PoisonError::into_inner).submit(io, req, cx)
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: Status, cx: &mut Cx<'_, R>) -> Verdict {
        assert!(status.is_ok(), "a null device failed, and what waits here belongs to another queue");
        let io = self.cookie(io);
        self.node.lock().unwrap_or_else(PoisonError::into_inner).end_io(io, req, status, cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_selectors_table_line_is_parsed() {
        for selector in Selector::ALL {
            for devices in [&["a"][..], &["a", "b", "c", "d"]] {
                let line = selector.line(devices, 64);
                let config = Config::parse(&line.split(' ').collect::<Vec<_>>());
                assert_eq!(config.map(|config| config.path_count()), Ok(devices.len()), "{line}");
            }
        }
        assert_eq!(Selector::Affinity.path(0, 4, 64), "11111111,11111111");
        assert_eq!(Selector::Affinity.path(1, 2, 2), "00000002");
        assert_eq!(Subject::Locked(Selector::RoundRobin, 4).name(), "round-robin, 4, mutex");
        assert_eq!(Subject::all().len(), 16);
    }
}
