//! The state that all hardware queues of a multipath device share: active paths, and the current priority
//! group.
//!
//! Created once; read by every queue's node; changed by nodes that see a path fail and by the control plane.
//! There is no lock. Each item is an atomic, changed by an exchange that returns whether it changed, so a
//! path failure that two queues see at once counts once. Every change increments the **epoch** last: a node
//! compares it with the one that it saw before, which is all that a request costs while nothing changes, and
//! reads the rest if it differs.
//!
//! *Invariant:* `valid` is the number of active paths, whenever no change is in progress.
//! *Invariant:* a change is stored before the epoch that announces it.
//!
//! Activation of paths before use: `activation.rs`. Queueing without a path, messages and the counts of
//! selectors: modules of this one.

mod message;
mod published;
mod queueing;
#[cfg(all(test, not(loom)))]
mod tests;

pub(super) use published::Published;

use super::activation::Attempts;
use super::config::{Config, QueueMode};
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::fmt::Write as _;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

/// The number that stands for no group.
pub(super) const NONE: u32 = u16::MAX as u32;

/// A path, on a cache line of its own.
#[repr(align(64))]
pub(super) struct Path {
    active: AtomicBool,
    /// Whether a message failed the path: then only a message reinstates it.
    failed_by_message: AtomicBool,
    fails: AtomicU32,
    /// The reason of the path's last failure, packed (`failure.rs`); 0: it never failed.
    failure: AtomicU32,
    /// The state and stage of the path's activation (`activation.rs`); unused without a handler.
    pub(super) activation: AtomicU64,
    /// Number of the path's group.
    group: u32,
}

/// A priority group, on a cache line of its own: queues may write to neighbouring memory for each request.
#[repr(align(64))]
pub(super) struct Group {
    pub(super) bypassed: AtomicBool,
    /// The number of the group's first path; its paths are consecutive.
    first: usize,
    count: usize,
}

/// The shared part of a multipath device, on cache lines of its own.
#[repr(align(64))]
pub struct Multipath {
    config: Config,
    pub(super) paths: Box<[Path]>,
    pub(super) groups: Box<[Group]>,
    epoch: AtomicU64,
    valid: AtomicU32,
    /// A packed [`Chosen`].
    chosen: AtomicU64,
    queue_if_no_path: AtomicBool,
    saved_queue_if_no_path: AtomicBool,
    /// Whether `choose_group` was never called.
    untouched: AtomicBool,
    /// 0, or one of `SUSPENDED_FLUSHED`, `SUSPENDED_NOFLUSH`, `REMOVED`.
    suspended: AtomicU32,
    /// The time for which requests are queued while no path is usable, in nanoseconds; 0: without limit.
    no_path_timeout_ns: AtomicU64,
    /// The time since which no path is usable, in nanoseconds; 0: a path is usable, or no request has needed
    /// one since.
    no_path_since_ns: AtomicU64,
    /// The longest time for which a request was queued, in nanoseconds.
    longest_wait_ns: AtomicU64,
    /// Counts events as `dmsetup wait` does.
    events: AtomicU32,
    /// The published counts of each queue. Used by the control plane only.
    published: Mutex<Vec<Arc<Published>>>,
    /// The stage whose paths are all activated: its group serves requests.
    pub(super) ready_stage: AtomicU32,
    /// Activation attempts. Used by the control plane only.
    pub(super) attempts: Mutex<Attempts>,
}

/// The current group, packed into one word so that it changes at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chosen {
    /// The current group, or [`NONE`].
    pub(super) current: u32,
    /// The requested next group, or [`NONE`].
    next: u32,
    /// Counts how often a group became current. An activation is valid for one stage.
    pub(super) stage: u32,
}

impl Chosen {
    fn pack(self) -> u64 {
        u64::from(self.stage) << 32 | u64::from(self.current) << 16 | u64::from(self.next)
    }

    fn unpack(word: u64) -> Chosen {
        let half = |word: u64| word as u32 & NONE;
        Chosen { current: half(word >> 16), next: half(word), stage: (word >> 32) as u32 }
    }

    /// Returns the word with no current group.
    fn without_current(word: u64) -> u64 {
        Chosen { current: NONE, ..Chosen::unpack(word) }.pack()
    }
}

impl Multipath {
    /// Creates the state for a table line, with all paths active.
    pub fn new(config: Config) -> Arc<Multipath> {
        let (mut paths, mut groups) = (Vec::new(), Vec::new());
        for (number, group) in config.groups.iter().enumerate() {
            groups.push(Group {
                bypassed: AtomicBool::new(false),
                first: paths.len(),
                count: group.paths.len(),
            });
            paths.extend(group.paths.iter().map(|_| Path {
                active: AtomicBool::new(true),
                failed_by_message: AtomicBool::new(false),
                fails: AtomicU32::new(0),
                failure: AtomicU32::new(0),
                activation: AtomicU64::new(0),
                group: number as u32,
            }));
        }
        let next = if groups.is_empty() { NONE } else { config.initial as u32 };
        Arc::new(Multipath {
            epoch: AtomicU64::new(1),
            valid: AtomicU32::new(paths.len() as u32),
            chosen: AtomicU64::new(Chosen { current: NONE, next, stage: 0 }.pack()),
            queue_if_no_path: AtomicBool::new(config.queue_if_no_path),
            saved_queue_if_no_path: AtomicBool::new(config.queue_if_no_path),
            untouched: AtomicBool::new(true),
            suspended: AtomicU32::new(0),
            no_path_timeout_ns: AtomicU64::new(0),
            no_path_since_ns: AtomicU64::new(0),
            longest_wait_ns: AtomicU64::new(0),
            events: AtomicU32::new(0),
            published: Mutex::default(),
            ready_stage: AtomicU32::new(0),
            attempts: Mutex::new(Attempts::new(paths.len())),
            config,
            paths: paths.into(),
            groups: groups.into(),
        })
    }

    /// Returns the table line's arguments.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the number of events (failed and reinstated paths, changed groups), as `dmsetup info` shows
    /// it.
    pub fn events(&self) -> u32 {
        self.events.load(Acquire)
    }

    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Acquire)
    }

    pub(super) fn changed(&self) {
        self.epoch.fetch_add(1, Release);
    }

    fn record_event(&self) {
        self.events.fetch_add(1, Release);
        self.changed();
    }

    /// Returns the number of active paths (the kernel's `nr_valid_paths`).
    pub fn valid_paths(&self) -> u32 {
        self.valid.load(Acquire)
    }

    /// Returns whether a path is active.
    pub fn is_active(&self, path: usize) -> bool {
        self.paths[path].active.load(Acquire)
    }

    pub(super) fn failure(&self, path: usize) -> &AtomicU32 {
        &self.paths[path].failure
    }

    /// Returns the paths of a group: the number of the first, and how many.
    pub(super) fn paths_of(&self, group: usize) -> (usize, usize) {
        (self.groups[group].first, self.groups[group].count)
    }

    /// Fails a path (MP-1). Returns whether it was active.
    pub fn fail_path(&self, path: usize) -> bool {
        let path = &self.paths[path];
        if !path.active.swap(false, AcqRel) {
            return false;
        }
        // A running activation becomes void: the path is activated again when it is reinstated.
        path.activation.swap(0, AcqRel);
        path.fails.fetch_add(1, Relaxed);
        if self.valid.fetch_sub(1, AcqRel) == 1 {
            // The no-path timeout starts now, even if a request has just set its start time.
            self.no_path_since_ns.store(0, Release);
        }
        self.record_event();
        true
    }

    /// Returns whether the path checker should check a path: it has failed, and not by a message.
    pub fn wants_check(&self, path: usize) -> bool {
        !self.is_active(path) && !self.paths[path].failed_by_message.load(Acquire)
    }

    /// Records for how long a request was queued.
    pub(super) fn record_wait(&self, wait_ns: u64) {
        self.longest_wait_ns.fetch_max(wait_ns, Relaxed);
    }

    /// Returns the longest time for which a request was queued; `None`: none was.
    pub fn longest_wait_ns(&self) -> Option<u64> {
        Some(self.longest_wait_ns.load(Relaxed)).filter(|&wait_ns| wait_ns > 0)
    }

    /// Returns the current group; `None`: no group was chosen yet, or another one was requested.
    pub fn current(&self) -> Option<usize> {
        match self.chosen() {
            Chosen { current, next: NONE, .. } if current != NONE => Some(current as usize),
            _ => None,
        }
    }

    /// Returns the first group that is not bypassed and has an active path: the group that would be chosen
    /// anew.
    pub fn best(&self) -> Option<usize> {
        self.first_with_path().map(|group| group as usize)
    }

    /// Fails back to a group if `from` is still current. Unlike the message `switch_group`, it enables no
    /// other group.
    pub fn fail_back(&self, from: usize, to: usize) -> bool {
        let seen = self.chosen();
        let was = Chosen { current: from as u32, next: NONE, ..seen };
        let now = Chosen { current: NONE, next: to as u32, ..seen };
        let done = self.chosen.compare_exchange(was.pack(), now.pack(), AcqRel, Acquire).is_ok();
        if done {
            self.record_event();
        }
        done
    }

    /// Reinstates a path (MP-2). Returns whether it was failed.
    pub fn reinstate_path(&self, path: usize) -> bool {
        self.paths[path].failed_by_message.store(false, Release);
        if self.paths[path].active.swap(true, AcqRel) {
            return false;
        }
        self.valid.fetch_add(1, AcqRel);
        self.no_path_since_ns.store(0, Release);
        self.record_event();
        true
    }

    /// Chooses the group for requests (MP-3): the requested one, else the current one, else the first that is
    /// not bypassed, else the first; only groups with an active path are chosen.
    pub(super) fn choose_group(&self) -> Option<usize> {
        loop {
            let seen = self.chosen();
            let Chosen { current, next, stage } = seen;
            let requested =
                [next, current].into_iter().find(|&group| group != NONE && self.has_path(group as usize));
            let Some(group) = requested.or_else(|| self.first_with_path()) else {
                let none = Chosen::without_current(seen.pack());
                let set = self.chosen.compare_exchange(seen.pack(), none, AcqRel, Acquire).is_ok();
                if set && self.first_with_path().is_none() {
                    // As in the kernel: the request for a group is void, and no group is current.
                    self.untouched.store(false, Relaxed);
                    return None;
                }
                continue;
            };
            let stage = if group == current { stage } else { stage.wrapping_add(1) };
            let wanted = Chosen { current: group, next: NONE, stage };
            let set = || self.chosen.compare_exchange(seen.pack(), wanted.pack(), AcqRel, Acquire);
            if seen == wanted || set().is_ok() {
                self.untouched.store(false, Relaxed);
                return Some(group as usize);
            }
        }
    }

    fn first_with_path(&self) -> Option<u32> {
        let with = |bypassed: bool| {
            self.groups.iter().enumerate().find_map(|(number, group)| {
                let fits = group.bypassed.load(Acquire) == bypassed && self.has_path(number);
                fits.then_some(number as u32)
            })
        };
        with(false).or_else(|| with(true))
    }

    fn has_path(&self, group: usize) -> bool {
        let Group { first, count, .. } = self.groups[group];
        self.paths[first..first + count].iter().any(|path| path.active.load(Acquire))
    }

    /// Bypasses a group as long as another one is usable, or ends its bypass (MP-7).
    fn bypass(&self, group: usize, bypassed: bool) {
        self.groups[group].bypassed.store(bypassed, Release);
        // The group is chosen anew, even if the current one is still usable.
        let _ = self.chosen.fetch_update(AcqRel, Acquire, |seen| Some(Chosen::without_current(seen)));
        self.record_event();
    }

    /// Bypasses the group of a stage if it is still current, because its paths cannot be activated for now.
    pub(super) fn bypass_stage(&self, stage: u32) {
        let of_stage = |seen| {
            let Chosen { current, stage: now, .. } = Chosen::unpack(seen);
            (now == stage && current != NONE).then(|| Chosen::without_current(seen))
        };
        if let Ok(was) = self.chosen.fetch_update(AcqRel, Acquire, of_stage) {
            self.groups[Chosen::unpack(was).current as usize].bypassed.store(true, Release);
            self.record_event();
        }
    }

    /// Requests a group, and ends the bypass of all others.
    fn switch_group(&self, group: usize) {
        for other in &self.groups {
            other.bypassed.store(false, Release);
        }
        let requested = |seen| Chosen { current: NONE, next: group as u32, ..Chosen::unpack(seen) }.pack();
        let _ = self.chosen.fetch_update(AcqRel, Acquire, |seen| Some(requested(seen)));
        self.record_event();
    }

    /// Returns the address ranges of all memory that queues share, for tests that watch for stores there.
    pub fn memory(&self) -> [std::ops::Range<usize>; 3] {
        fn of<T>(part: &[T]) -> std::ops::Range<usize> {
            let all = part.as_ptr_range();
            all.start.addr()..all.end.addr()
        }
        [of(std::slice::from_ref(self)), of(&self.paths), of(&self.groups)]
    }

    /// Returns the values of everything that queues share.
    #[cfg(all(test, not(loom)))]
    pub(super) fn all_shared(&self) -> Vec<u64> {
        let flags = [&self.queue_if_no_path, &self.saved_queue_if_no_path, &self.untouched];
        let words = [&self.epoch, &self.chosen, &self.no_path_timeout_ns, &self.no_path_since_ns];
        let halves = [&self.valid, &self.suspended, &self.events];
        let all = flags.iter().map(|flag| flag.load(Relaxed).into());
        let all = all.chain(words.iter().map(|word| word.load(Relaxed)));
        let all = all.chain(halves.iter().map(|half| half.load(Relaxed).into()));
        let all = all.chain([self.longest_wait_ns.load(Relaxed)]);
        let all = all.chain(self.groups.iter().map(|group| group.bypassed.load(Relaxed).into()));
        let all = all.chain([self.ready_stage.load(Relaxed).into()]);
        let path = |path: &Path| {
            let flags = [&path.active, &path.failed_by_message].map(|flag| flag.load(Relaxed).into());
            [path.activation.load(Relaxed), path.fails.load(Relaxed).into(), flags[0], flags[1]]
        };
        all.chain(self.paths.iter().flat_map(path)).collect()
    }

    /// Returns the table line's arguments as `dmsetup table` shows them, with `name` for each path.
    pub fn table(&self, name: impl FnMut(usize) -> String) -> String {
        // The current value is shown: a suspension turns it off, for bios (as in the kernel) also without
        // flush.
        let is_off = self.must_push_back() && self.config.queue_mode == QueueMode::Bio;
        self.config.table(self.queues_if_no_path() && !is_off, self.shown_group(self.chosen()), name)
    }

    pub(super) fn chosen(&self) -> Chosen {
        Chosen::unpack(self.chosen.load(Acquire))
    }

    /// Returns the number of the next group, from 1: the requested, else the current, else the first one.
    fn shown_group(&self, chosen: Chosen) -> usize {
        match (chosen.next, chosen.current) {
            (NONE, NONE) => usize::from(!self.groups.is_empty()),
            (NONE, current) => current as usize + 1,
            (next, _) => next as usize + 1,
        }
    }

    /// Returns the line of `dmsetup status`, with `name` for each path. Every word is followed by a space.
    pub fn status(&self, mut name: impl FnMut(usize) -> String) -> String {
        let mut text = String::new();
        let chosen = self.chosen();
        let holds = u32::from(self.untouched.load(Relaxed) || self.waits_for_activation());
        // The number of handler arguments is 0, as the kernel shows it.
        let _ = write!(text, "2 {holds} {} 0 {} ", self.attempts_in_stage(), self.groups.len());
        let _ = write!(text, "{} ", self.shown_group(chosen));
        for (number, (group, config)) in self.groups.iter().zip(&self.config.groups).enumerate() {
            let state = match () {
                () if group.bypassed.load(Acquire) => 'D',
                () if chosen.current == number as u32 => 'A',
                () => 'E',
            };
            let selector = &config.selector;
            let own = selector.table();
            let _ = write!(text, "{state} {own}{} {} ", group.count, selector.info_args());
            for (place, path) in config.paths.iter().enumerate() {
                let number = group.first + place;
                let shared = &self.paths[number];
                let state = if shared.active.load(Acquire) { 'A' } else { 'F' };
                let fails = shared.fails.load(Relaxed);
                let info = selector.info(&path.args, &self.report(number));
                let _ = write!(text, "{} {state} {fails} {info}", name(number));
            }
        }
        text
    }

    /// Returns the group of a path, from 0.
    pub fn group_of(&self, path: usize) -> usize {
        self.paths[path].group as usize
    }
}
