//! What all hardware queues of a multipath device know in common: which paths work, and which group is in use.
//!
//! Made once; read by every queue's node, changed by nodes that see a path fail and by the control plane. There is no
//! lock. Each fact is an atomic that is changed by an exchange which says whether it changed, so a path that two
//! queues see fail at once is counted once. Whatever changes steps the **epoch** last: a node compares that one number
//! with the one it saw before, which is all that a request costs while nothing changes, and looks at the rest when
//! it differs.
//!
//! *Invariant:* `valid` is the number of paths that are active, whenever no change is under way.
//! *Invariant:* a change is stored before the epoch that tells of it.
//!
//! Paths that have to be activated before they are used: `activation.rs`.

use super::activation::Rounds;
use super::config::{Config, QueueMode};
use super::failure::PathFailure;
use super::select::Report;
use crate::dm::MessageError;
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use queue::Nanos;
use std::fmt::Write as _;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

/// No group.
pub(super) const NONE: u32 = u16::MAX as u32;

/// A path, on a line of the cache that only its own changes touch.
#[repr(align(64))]
pub(super) struct Path {
    active: AtomicBool,
    /// It was taken out of use by a message, and is put into use by nothing else.
    told: AtomicBool,
    fails: AtomicU32,
    /// Why it was taken out of use the last time (`failure.rs`); 0: it never was.
    failure: AtomicU32,
    /// How far its activation is, and for which stage (`activation.rs`). Without meaning where nothing is activated.
    pub(super) activation: AtomicU64,
    /// The number of its group.
    group: u32,
}

/// On a line of the cache of its own, too: what a queue writes for each request may lie beside it.
#[repr(align(64))]
pub(super) struct Group {
    pub(super) bypassed: AtomicBool,
    /// The numbers of its paths, which follow each other.
    first: usize,
    count: usize,
}

/// What a hardware queue shows of its selectors, written by that queue alone: a line of the cache for each path, which
/// nothing else lies on.
#[derive(Debug)]
pub(super) struct Published {
    paths: Box<[Shown]>,
}

#[derive(Default, Debug)]
#[repr(align(64))]
struct Shown([AtomicU64; 5]);

impl Published {
    fn new(paths: usize) -> Published {
        Published { paths: (0..paths).map(|_| Default::default()).collect() }
    }

    #[inline]
    pub(super) fn set(&self, path: usize, report: Report) {
        let Report { requests, bytes, service_time, stale_after, misses } = report;
        let Some(Shown(cells)) = self.paths.get(path) else { return };
        cells
            .iter()
            .zip([requests, bytes, service_time, stale_after, misses])
            .for_each(|(cell, value)| cell.store(value, Relaxed));
    }

    /// There is nothing to show any more.
    pub(super) fn clear(&self) {
        (0..self.paths.len()).for_each(|path| self.set(path, Report::default()));
    }

    fn get(&self, path: usize) -> Report {
        let [requests, bytes, service_time, stale_after, misses] =
            std::array::from_fn(|cell| self.paths[path].0[cell].load(Relaxed));
        Report { requests, bytes, service_time, stale_after, misses }
    }
}

/// The shared part of a multipath device. On lines of the cache that nothing else lies on.
#[repr(align(64))]
pub struct Multipath {
    config: Config,
    pub(super) paths: Box<[Path]>,
    pub(super) groups: Box<[Group]>,
    epoch: AtomicU64,
    valid: AtomicU32,
    /// See [`Chosen`].
    chosen: AtomicU64,
    queue_if_no_path: AtomicBool,
    saved_queue_if_no_path: AtomicBool,
    /// Nothing was sent down any path yet.
    untouched: AtomicBool,
    /// The device is being suspended or is: `Some(noflush)` as 1 and 2; or taken away, as 3.
    suspended: AtomicU32,
    /// How long requests are kept while there is no path, in nanoseconds; 0: for ever.
    no_path_timeout_ns: AtomicU64,
    /// Since when there is none; 0: there is one, or nobody has looked.
    no_path_since_ns: AtomicU64,
    /// How long a request was kept at most, in nanoseconds.
    longest_wait_ns: AtomicU64,
    /// Things that someone may wait for.
    events: AtomicU32,
    /// One for each queue that there is or was. The control plane's business.
    published: Mutex<Vec<Arc<Published>>>,
    /// The stage whose paths have all been activated: its group carries requests.
    pub(super) opened: AtomicU32,
    /// How often activation was tried. The control plane's business.
    pub(super) rounds: Mutex<Rounds>,
}

/// Which group is in use, in one word: whoever changes it changes all of it at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chosen {
    /// The group in use, or [`NONE`].
    pub(super) current: u32,
    /// The one that was asked for, or [`NONE`].
    next: u32,
    /// How many times a group has come into use. What was activated holds for one stage alone.
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

    /// No group is in use any more.
    fn without_current(word: u64) -> u64 {
        Chosen { current: NONE, ..Chosen::unpack(word) }.pack()
    }
}

impl Multipath {
    /// As a table line describes it; all paths are taken to work.
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
                told: AtomicBool::new(false),
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
            opened: AtomicU32::new(0),
            rounds: Mutex::new(Rounds::new(paths.len())),
            config,
            paths: paths.into(),
            groups: groups.into(),
        })
    }

    /// What it was made from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How many things have happened that someone may wait for: paths that failed or came back, groups that changed.
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

    fn happened(&self) {
        self.events.fetch_add(1, Release);
        self.changed();
    }

    /// How many paths work.
    pub fn valid(&self) -> u32 {
        self.valid.load(Acquire)
    }

    /// Whether a path works.
    pub fn is_active(&self, path: usize) -> bool {
        self.paths[path].active.load(Acquire)
    }

    pub(super) fn failure(&self, path: usize) -> &AtomicU32 {
        &self.paths[path].failure
    }

    /// Paths of a group: the number of the first over all groups, and how many.
    pub(super) fn paths_of(&self, group: usize) -> (usize, usize) {
        (self.groups[group].first, self.groups[group].count)
    }

    /// Take a path out of use (MP-1). Whether it was in use.
    pub fn fail_path(&self, path: usize) -> bool {
        let path = &self.paths[path];
        if !path.active.swap(false, AcqRel) {
            return false;
        }
        // Whatever activates it now does so for nothing: it is activated again when it comes back.
        path.activation.swap(0, AcqRel);
        path.fails.fetch_add(1, Relaxed);
        if self.valid.fetch_sub(1, AcqRel) == 1 {
            // Waiting begins now, whatever a request that looked just before has left here.
            self.no_path_since_ns.store(0, Release);
        }
        self.happened();
        true
    }

    /// Whether a path is out of use and may be put into use by whoever finds that it works.
    pub fn wants_check(&self, path: usize) -> bool {
        !self.is_active(path) && !self.paths[path].told.load(Acquire)
    }

    /// A request was kept for so long.
    pub(super) fn waited(&self, wait_ns: u64) {
        self.longest_wait_ns.fetch_max(wait_ns, Relaxed);
    }

    /// How long a request was kept at most; `None`: none was.
    pub fn longest_wait_ns(&self) -> Option<u64> {
        Some(self.longest_wait_ns.load(Relaxed)).filter(|&wait_ns| wait_ns > 0)
    }

    /// The group in use; `None`: none was chosen yet, or another was asked for.
    pub fn current(&self) -> Option<usize> {
        match self.chosen() {
            Chosen { current, next: NONE, .. } if current != NONE => Some(current as usize),
            _ => None,
        }
    }

    /// The first group that is not bypassed and has a path: where requests would go if none were in use.
    pub fn best(&self) -> Option<usize> {
        self.first_with_path().map(|group| group as usize)
    }

    /// Go back to a group, if `from` is still in use. Unlike a message to switch it enables no other.
    pub fn fail_back(&self, from: usize, to: usize) -> bool {
        let seen = self.chosen();
        let was = Chosen { current: from as u32, next: NONE, ..seen };
        let now = Chosen { current: NONE, next: to as u32, ..seen };
        let done = self.chosen.compare_exchange(was.pack(), now.pack(), AcqRel, Acquire).is_ok();
        if done {
            self.happened();
        }
        done
    }

    /// Put a path into use again (MP-2). Whether it was out of use.
    pub fn reinstate_path(&self, path: usize) -> bool {
        self.paths[path].told.store(false, Release);
        if self.paths[path].active.swap(true, AcqRel) {
            return false;
        }
        self.valid.fetch_add(1, AcqRel);
        self.no_path_since_ns.store(0, Release);
        self.happened();
        true
    }

    /// The group to send requests to now (MP-3): the one that was asked for, else the one in use, else the first
    /// that is not bypassed, else the first; of those that have a path that works.
    pub(super) fn group(&self) -> Option<usize> {
        loop {
            let seen = self.chosen();
            let Chosen { current, next, stage } = seen;
            let asked =
                [next, current].into_iter().find(|&group| group != NONE && self.has_path(group as usize));
            let Some(group) = asked.or_else(|| self.first_with_path()) else {
                let none = Chosen::without_current(seen.pack());
                let set = self.chosen.compare_exchange(seen.pack(), none, AcqRel, Acquire).is_ok();
                if set && self.first_with_path().is_none() {
                    // As the kernel: what was asked for was tried, and no group is in use.
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

    /// Leave a group out as long as there is another (MP-7).
    fn bypass(&self, group: usize, bypassed: bool) {
        self.groups[group].bypassed.store(bypassed, Release);
        // Nobody stays in a group for having been there before.
        let _ = self.chosen.fetch_update(AcqRel, Acquire, |seen| Some(Chosen::without_current(seen)));
        self.happened();
    }

    /// Leave the group of a stage out, if that is still in use: its paths cannot be activated for now.
    pub(super) fn leave(&self, stage: u32) {
        let of_stage = |seen| {
            let Chosen { current, stage: now, .. } = Chosen::unpack(seen);
            (now == stage && current != NONE).then(|| Chosen::without_current(seen))
        };
        if let Ok(was) = self.chosen.fetch_update(AcqRel, Acquire, of_stage) {
            self.groups[Chosen::unpack(was).current as usize].bypassed.store(true, Release);
            self.happened();
        }
    }

    /// Use this group next, and bypass none.
    fn switch_group(&self, group: usize) {
        for other in &self.groups {
            other.bypassed.store(false, Release);
        }
        let asked = |seen| Chosen { current: NONE, next: group as u32, ..Chosen::unpack(seen) }.pack();
        let _ = self.chosen.fetch_update(AcqRel, Acquire, |seen| Some(asked(seen)));
        self.happened();
    }

    /// Whether requests are kept while there is no path.
    pub fn queues_if_no_path(&self) -> bool {
        self.queue_if_no_path.load(Acquire)
    }

    fn set_queue_if_no_path(&self, queue: bool) {
        // The limit on waiting begins anew.
        self.no_path_since_ns.store(0, Release);
        self.queue_if_no_path.store(queue, Release);
        self.saved_queue_if_no_path.store(queue, Release);
        self.changed();
    }

    /// How long requests are kept while there is no path before all of them fail; 0: for ever.
    pub fn set_no_path_timeout(&self, timeout_ns: u64) {
        self.no_path_timeout_ns.store(timeout_ns, Release);
    }

    /// A request finds no path: whether it is kept rather than failed, as of now (MP-4).
    pub(super) fn keeps(&self, now: Nanos) -> bool {
        if self.suspended.load(Acquire) == SUSPENDED_NOFLUSH {
            return false;
        }
        if !self.queues_if_no_path() {
            return false;
        }
        let timeout_ns = self.no_path_timeout_ns.load(Acquire);
        if timeout_ns == 0 {
            return true;
        }
        // 0 stands for nobody having looked.
        let since =
            self.no_path_since_ns.compare_exchange(0, now.0.max(1), AcqRel, Acquire).unwrap_or_else(|s| s);
        if since != 0 && now.0.saturating_sub(since) >= timeout_ns {
            self.queue_if_no_path.store(false, Release);
            self.saved_queue_if_no_path.store(false, Release);
            self.changed();
            return false;
        }
        true
    }

    /// Whether a request without a path is to be handed back whole, for the table that comes after a suspension
    /// without a flush.
    pub(super) fn hands_back(&self) -> bool {
        self.suspended.load(Acquire) == SUSPENDED_NOFLUSH
    }

    /// The device is about to be suspended. With `noflush`, requests without a path go back to wait above; without,
    /// they fail.
    pub fn presuspend(&self, noflush: bool) {
        // What is saved is otherwise what is in use, save where an earlier suspension has turned that off already.
        if !noflush && self.queue_if_no_path.swap(false, AcqRel) {
            self.saved_queue_if_no_path.store(true, Release);
        }
        self.suspended.store(if noflush { SUSPENDED_NOFLUSH } else { SUSPENDED_FLUSHED }, Release);
        self.changed();
    }

    /// The device is being taken away: nothing waits any more, for a path or for one to be activated.
    pub fn give_up(&self) {
        self.queue_if_no_path.store(false, Release);
        self.suspended.store(GIVEN_UP, Release);
        self.changed();
    }

    /// Whether nothing is to wait any more.
    pub(super) fn gives_up(&self) -> bool {
        self.suspended.load(Acquire) == GIVEN_UP
    }

    /// It goes on: what was turned off for the suspension is turned on again.
    pub fn resume(&self) {
        self.suspended.store(0, Release);
        self.queue_if_no_path.store(self.saved_queue_if_no_path.load(Acquire), Release);
        self.changed();
    }

    /// Heed a message, as `dmsetup message` sends one. `find`: which paths, over all groups, a word names: each that
    /// leads by that device is meant.
    ///
    /// # Errors
    /// [`MessageError`]: nothing was done.
    pub fn message(&self, words: &[&str], find: impl Fn(&str) -> Vec<usize>) -> Result<(), MessageError> {
        if self.suspended.load(Acquire) != 0 {
            return Err(MessageError::Busy);
        }
        let lower: Vec<String> = words.iter().map(|word| word.to_ascii_lowercase()).collect();
        let group = |word: &str| {
            let number: usize =
                word.parse().ok().filter(|_| !word.starts_with('+')).ok_or(MessageError::Invalid)?;
            if (1..=self.groups.len()).contains(&number) {
                Ok(number - 1)
            } else {
                Err(MessageError::Invalid)
            }
        };
        let named = |word: &str| {
            let paths = find(word);
            if paths.is_empty() { Err(unknown(word)) } else { Ok(paths) }
        };
        match (lower.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), words) {
            (["queue_if_no_path"], _) => self.set_queue_if_no_path(true),
            (["fail_if_no_path"], _) => self.set_queue_if_no_path(false),
            (["disable_group", _], [_, number]) => self.bypass(group(number)?, true),
            (["enable_group", _], [_, number]) => self.bypass(group(number)?, false),
            (["switch_group", _], [_, number]) => self.switch_group(group(number)?),
            (["fail_path", _], [_, path]) => {
                for path in named(path)? {
                    self.paths[path].told.store(true, Release);
                    self.fail_path_for(path, PathFailure::Message);
                }
            }
            (["reinstate_path", _], [_, path]) => {
                named(path)?.into_iter().for_each(|path| _ = self.reinstate_path(path));
            }
            _ => return Err(MessageError::Invalid),
        }
        Ok(())
    }

    /// A place where a queue shows its selectors' counts.
    pub(super) fn publish(&self) -> (Arc<Published>, usize) {
        let published = Arc::new(Published::new(self.paths.len()));
        let mut all = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of queues that are gone were left at 0 and nobody else holds them.
        all.retain(|other| Arc::strong_count(other) > 1);
        all.push(published.clone());
        (published, all.len() - 1)
    }

    /// What all queues together show of a path: sums, and of averages the longest.
    fn report(&self, path: usize) -> Report {
        let all = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|published| published.get(path)).fold(Report::default(), |sum, one| Report {
            requests: sum.requests + one.requests,
            bytes: sum.bytes + one.bytes,
            service_time: sum.service_time.max(one.service_time),
            stale_after: sum.stale_after.max(one.stale_after),
            misses: sum.misses + one.misses,
        })
    }

    /// Where in memory all that lies which queues share, for whoever watches what is stored there.
    pub fn memory(&self) -> [std::ops::Range<usize>; 3] {
        fn of<T>(part: &[T]) -> std::ops::Range<usize> {
            let all = part.as_ptr_range();
            all.start.addr()..all.end.addr()
        }
        [of(std::slice::from_ref(self)), of(&self.paths), of(&self.groups)]
    }

    /// The values of all that queues share.
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
        let all = all.chain([self.opened.load(Relaxed).into()]);
        let path = |path: &Path| {
            [
                path.activation.load(Relaxed),
                path.active.load(Relaxed).into(),
                path.told.load(Relaxed).into(),
                path.fails.load(Relaxed).into(),
            ]
        };
        all.chain(self.paths.iter().flat_map(path)).collect()
    }

    /// Requests and bytes that all queues' selectors count as being in flight, for whoever holds that they balance. Those
    /// that go by nothing of the kind count none.
    pub fn in_flight(&self) -> (u64, u64) {
        let reports = (0..self.paths.len()).map(|path| self.report(path));
        reports.fold((0, 0), |sum, one| (sum.0 + one.requests, sum.1 + one.bytes))
    }

    /// The line of `dmsetup table`, with each path by `name`.
    pub fn table(&self, name: impl FnMut(usize) -> String) -> String {
        // As it is in force: a suspension with a flush turns it off, and the kernel's does so without one for bios, too.
        let is_off = self.hands_back() && self.config.queue_mode == QueueMode::Bio;
        self.config.table(self.queues_if_no_path() && !is_off, self.shown_group(self.chosen()), name)
    }

    pub(super) fn chosen(&self) -> Chosen {
        Chosen::unpack(self.chosen.load(Acquire))
    }

    /// The group that is shown as chosen, from 1: the one that was asked for, else the one in use, else the first.
    fn shown_group(&self, chosen: Chosen) -> usize {
        match (chosen.next, chosen.current) {
            (NONE, NONE) => usize::from(!self.groups.is_empty()),
            (NONE, current) => current as usize + 1,
            (next, _) => next as usize + 1,
        }
    }

    /// The line of `dmsetup status`, with each path by `name`. Every word is followed by a space.
    pub fn status(&self, mut name: impl FnMut(usize) -> String) -> String {
        let mut text = String::new();
        let chosen = self.chosen();
        let holds = u32::from(self.untouched.load(Relaxed) || self.holds());
        // A handler is shown as none, as the kernel does.
        let _ = write!(text, "2 {holds} {} 0 {} ", self.tries(), self.groups.len());
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

    /// The group of a path, from 0.
    pub fn group_of(&self, path: usize) -> usize {
        self.paths[path].group as usize
    }
}

/// Why a message cannot be heeded about a path that is none of this device's: numbers are those of another device, and
/// what is no number is there or not.
fn unknown(path: &str) -> MessageError {
    let is_number = |half: &str| !half.is_empty() && half.bytes().all(|byte| byte.is_ascii_digit());
    match path.split_once(':') {
        Some((major, minor)) if is_number(major) && is_number(minor) => MessageError::Invalid,
        _ => MessageError::Errno(libc::ENOENT),
    }
}

const SUSPENDED_FLUSHED: u32 = 1;
const SUSPENDED_NOFLUSH: u32 = 2;
const GIVEN_UP: u32 = 3;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn two_groups() -> Arc<Multipath> {
        let line = "1 queue_if_no_path 0 2 1 queue-length 0 2 1 a 1 b 1 queue-length 0 1 1 c 1";
        Multipath::new(Config::parse(&line.split(' ').collect::<Vec<_>>()).unwrap())
    }

    /// `ab`: both at once, as a device that is two paths.
    fn find(word: &str) -> Vec<usize> {
        (0..3).filter(|path| word.contains(["a", "b", "c"][*path])).collect()
    }

    fn name(path: usize) -> String {
        format!("8:{}", path * 16)
    }

    fn tell(multipath: &Multipath, words: &str) -> Result<(), MessageError> {
        multipath.message(&words.split(' ').collect::<Vec<_>>(), find)
    }

    #[test]
    fn a_status_reads_as_the_kernels() {
        let multipath = two_groups();
        assert_eq!(multipath.status(name), "2 1 0 0 2 1 E 0 2 1 8:0 A 0 0 8:16 A 0 0 E 0 1 1 8:32 A 0 0 ");
        assert_eq!(multipath.group(), Some(0));
        multipath.fail_path(1);
        assert_eq!(multipath.status(name), "2 0 0 0 2 1 A 0 2 1 8:0 A 0 0 8:16 F 1 0 E 0 1 1 8:32 A 0 0 ");
    }

    #[test]
    fn each_path_by_the_device_of_a_message_is_meant() {
        let multipath = two_groups();
        tell(&multipath, "fail_path ab").unwrap();
        assert_eq!((multipath.valid(), multipath.events()), (1, 2));
        tell(&multipath, "reinstate_path ab").unwrap();
        assert_eq!(multipath.valid(), 3);
        assert!(tell(&multipath, "fail_path x").is_err());
    }

    #[test]
    fn mp_1_a_path_fails_once_however_often_it_is_told() {
        let multipath = two_groups();
        let epoch = multipath.epoch();
        assert!(multipath.fail_path(0) && !multipath.fail_path(0));
        assert_eq!((multipath.valid(), multipath.events()), (2, 1));
        assert!(multipath.epoch() > epoch && !multipath.is_active(0));
    }

    #[test]
    fn mp_2_a_path_comes_back_once() {
        let multipath = two_groups();
        multipath.fail_path(2);
        assert!(multipath.reinstate_path(2) && !multipath.reinstate_path(2));
        assert_eq!((multipath.valid(), multipath.events()), (3, 2));
    }

    #[test]
    fn mp_3_a_group_is_kept_until_its_last_path_fails() {
        let multipath = two_groups();
        assert_eq!(multipath.group(), Some(0));
        multipath.fail_path(0);
        assert_eq!(multipath.group(), Some(0));
        multipath.fail_path(1);
        assert_eq!(multipath.group(), Some(1));
        multipath.reinstate_path(0);
        assert_eq!(multipath.group(), Some(1), "the one in use is kept");
        tell(&multipath, "switch_group 1").unwrap();
        assert_eq!(multipath.group(), Some(0));
        for path in 0..3 {
            multipath.fail_path(path);
        }
        assert_eq!(multipath.group(), None);
        let none = "2 0 0 0 2 1 E 0 2 1 8:0 F 2 0 8:16 F 1 0 E 0 1 1 8:32 F 1 0 ";
        assert_eq!(multipath.status(name), none, "none is in use");
        multipath.reinstate_path(1);
        assert_eq!(multipath.group(), Some(0));
    }

    #[test]
    fn mp_7_a_bypassed_group_is_the_last_resort() {
        let multipath = two_groups();
        assert_eq!(multipath.group(), Some(0));
        tell(&multipath, "disable_group 1").unwrap();
        assert_eq!(multipath.group(), Some(1));
        assert!(multipath.status(name).contains("D 0 2 1") && multipath.status(name).contains("A 0 1 1"));
        multipath.fail_path(2);
        assert_eq!(multipath.group(), Some(0));
        tell(&multipath, "switch_group 2").unwrap();
        assert!(!multipath.status(name).contains('D'), "all of them are enabled again");
        let events = multipath.events();
        tell(&multipath, "enable_group 1").unwrap();
        assert_eq!(multipath.events(), events + 1, "also of a group that was enabled");
        assert!(!multipath.status(name).contains("A 0 1 1"), "and none is in use until the next request");
    }

    #[test]
    fn messages_are_read_as_the_kernel_reads_them() {
        let multipath = two_groups();
        for words in [
            "",
            "dance",
            "fail_path",
            "fail_path 8:99",
            "switch_group 0",
            "switch_group 3",
            "switch_group 1x",
            "disable_group +1",
            "queue_if_no_path 1",
            "fail_path a b",
        ] {
            assert_eq!(tell(&multipath, words), Err(MessageError::Invalid), "{words}");
        }
        assert_eq!(tell(&multipath, "fail_path z"), Err(MessageError::Errno(libc::ENOENT)));
        tell(&multipath, "FAIL_IF_NO_PATH").unwrap();
        assert!(multipath.table(name).starts_with("0 0 2 1 "));
        multipath.presuspend(true);
        assert_eq!(tell(&multipath, "queue_if_no_path"), Err(MessageError::Busy));
    }

    #[test]
    fn mp_4_a_suspension_with_flush_turns_queueing_off_and_resuming_on_again() {
        let multipath = two_groups();
        multipath.presuspend(false);
        assert!(!multipath.keeps(Nanos(1)) && !multipath.hands_back());
        assert!(multipath.table(name).starts_with("0 "), "the table says what is in force");
        multipath.resume();
        assert!(multipath.keeps(Nanos(1)) && multipath.table(name).starts_with("1 queue_if_no_path "));
        multipath.presuspend(true);
        assert!(!multipath.keeps(Nanos(1)) && multipath.hands_back() && multipath.queues_if_no_path());
    }

    #[test]
    fn mp_4_suspending_twice_loses_nothing_that_was_asked_for() {
        let multipath = two_groups();
        for noflush in [false, false, true, false] {
            multipath.presuspend(noflush);
            assert!(multipath.table(name).starts_with("0 "), "{noflush}");
        }
        multipath.resume();
        assert!(multipath.keeps(Nanos(1)) && multipath.queues_if_no_path());
    }

    #[test]
    fn mp_4_the_time_without_a_path_begins_when_the_last_one_fails() {
        let multipath = two_groups();
        multipath.set_no_path_timeout(1_000);
        // A request that saw no path asks only after one came back.
        assert!(multipath.keeps(Nanos(5_000)));
        (0..3).for_each(|path| {
            multipath.fail_path(path);
        });
        assert!(multipath.keeps(Nanos(100_000)), "none has been without a path for long");
        assert!(!multipath.keeps(Nanos(101_000)));
        multipath.presuspend(true);
        multipath.resume();
        assert!(!multipath.queues_if_no_path(), "what the timeout turned off stays off");
    }

    #[test]
    fn mp_4_requests_are_kept_no_longer_than_the_timeout() {
        let multipath = two_groups();
        multipath.set_no_path_timeout(1_000);
        assert!(multipath.keeps(Nanos(5_000)) && multipath.keeps(Nanos(5_999)));
        assert!(!multipath.keeps(Nanos(6_000)) && !multipath.queues_if_no_path());
        tell(&multipath, "queue_if_no_path").unwrap();
        assert!(multipath.keeps(Nanos(9_000)) && !multipath.keeps(Nanos(10_000)));
    }
}
