//! Activating paths: what has to be done to a path before it carries requests (the kernel's `pg_init`, MP-6).
//!
//! With the handler `exec` no path of a group is usable until all that work have been activated, in the **stage** that
//! began when the group came into use. Whoever looks after the paths asks what is to be done ([`Multipath::to_activate`]), does
//! it, and tells how it went ([`Multipath::activated`]). Queues see only which paths are usable: they wait for an epoch that
//! says so as they wait for a path.
//!
//! How far a path is stands in one word together with its stage. A path that fails sets it to 0, and only an exchange from
//! `RUNNING` of the same stage makes it `READY`: so what was begun before the failure or for another stage activates nothing.
//!
//! *Invariant:* one activation of a path at a time.

use super::failure::PathFailure;
use super::state::{Chosen, Multipath, NONE};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// It is being activated.
const RUNNING: u64 = 1;
/// It will be tried again, or is tried later.
const LATER: u64 = 2;
/// It may carry requests.
const READY: u64 = 3;

/// Between two attempts when nothing else is said.
const DELAY_MS: u32 = 2000;

fn word(stage: u32, how_far: u64) -> u64 {
    u64::from(stage) << 2 | how_far
}

/// How an activation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The path may carry requests.
    Activated,
    /// It is to be tried again, as often as `pg_init_retries` says.
    Again,
    /// The path's group cannot be used for now.
    Busy,
    /// The path does not work.
    Failed,
}

/// One attempt to activate a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Activation {
    /// Its number over all groups.
    pub path: usize,
    stage: u32,
}

/// What is known of a path's attempts.
#[derive(Clone, Default)]
struct Tries {
    /// Attempts in `stage`, since the path was last reinstated.
    count: u32,
    stage: u32,
    /// An attempt was handed out and has not been answered for.
    busy: bool,
    /// Not before.
    due: Option<Instant>,
}

/// What is known of all paths' attempts.
pub(super) struct Rounds(Vec<Tries>);

impl Rounds {
    pub(super) fn new(paths: usize) -> Rounds {
        Rounds(vec![Tries::default(); paths])
    }
}

impl Multipath {
    fn activates(&self) -> bool {
        self.config().activator().is_some()
    }

    /// Whether a path may carry requests: it works, and is activated where that is needed.
    pub(super) fn is_usable(&self, path: usize) -> bool {
        if !self.is_active(path) || !self.activates() {
            return self.is_active(path);
        }
        let stage = self.chosen().stage;
        self.opened.load(Acquire) == stage && self.paths[path].activation.load(Acquire) == word(stage, READY)
    }

    /// The group in use, its number and that of its stage.
    fn in_use(&self) -> Option<(usize, u32)> {
        let Chosen { current, stage, .. } = self.chosen();
        (current != NONE).then_some((current as usize, stage))
    }

    fn working(&self, group: usize) -> impl Iterator<Item = usize> + '_ {
        let (first, count) = self.paths_of(group);
        (first..first + count).filter(|&path| self.is_active(path))
    }

    /// Whether requests are held because no path of the group in use is activated yet.
    pub(super) fn holds(&self) -> bool {
        let Some((group, _)) = self.in_use() else { return false };
        let mut working = self.working(group).peekable();
        working.peek().is_some() && working.all(|path| !self.is_usable(path))
    }

    /// How often activation was tried since the group came into use.
    pub(super) fn tries(&self) -> u32 {
        let Some((_, stage)) = self.in_use().filter(|_| self.activates()) else { return 0 };
        let rounds = self.rounds();
        rounds.0.iter().filter(|tries| tries.stage == stage).map(|tries| tries.count).max().unwrap_or(0)
    }

    fn rounds(&self) -> MutexGuard<'_, Rounds> {
        self.rounds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn delay(&self) -> Duration {
        Duration::from_millis(self.config().pg_init_delay_ms.unwrap_or(DELAY_MS).into())
    }

    /// What is to be activated now: each path is named once, until it is told how that went.
    pub fn to_activate(&self, now: Instant) -> Vec<Activation> {
        let in_use = self.in_use().filter(|_| self.activates() && !self.hands_back());
        let Some((group, stage)) = in_use else { return Vec::new() };
        let mut rounds = self.rounds();
        let begin = |&path: &usize| self.begin(&mut rounds.0[path], path, group, stage, now);
        let begun: Vec<_> = self.working(group).filter(begin).collect();
        self.open(group, stage);
        begun.into_iter().map(|path| Activation { path, stage }).collect()
    }

    /// Whether an attempt for a path begins now.
    fn begin(&self, tries: &mut Tries, path: usize, group: usize, stage: u32, now: Instant) -> bool {
        let cell = &self.paths[path].activation;
        let seen = cell.load(Acquire);
        if tries.busy || seen == word(stage, READY) {
            return false;
        }
        if seen != word(stage, LATER) {
            // It came back, or its group came into use. One that is the last resort is not asked again and again.
            let bypassed = self.groups[group].bypassed.load(Acquire);
            *tries = Tries { stage, due: bypassed.then(|| now + self.delay()), ..Tries::default() };
        }
        let begins = tries.due.is_none_or(|due| now >= due);
        let next = word(stage, if begins { RUNNING } else { LATER });
        // If it failed meanwhile that is seen the next time.
        let set = cell.compare_exchange(seen, next, AcqRel, Acquire).is_ok();
        tries.busy = set && begins;
        tries.count += u32::from(tries.busy);
        tries.busy
    }

    /// Whether anybody still waits for an attempt: the path did not fail meanwhile, and its group is in use.
    pub fn is_wanted(&self, activation: &Activation) -> bool {
        let Activation { path, stage } = *activation;
        self.in_use().is_some_and(|(_, now)| now == stage)
            && self.paths[path].activation.load(Acquire) == word(stage, RUNNING)
    }

    /// An attempt has ended. Whether that made a difference: it was still wanted.
    pub fn activated(&self, activation: &Activation, outcome: Outcome, now: Instant) -> bool {
        let Activation { path, stage } = *activation;
        let mut rounds = self.rounds();
        let tries = &mut rounds.0[path];
        tries.busy = false;
        let wanted = self.is_wanted(activation);
        let again = outcome == Outcome::Again && tries.count <= self.config().pg_init_retries;
        let next = word(stage, if outcome == Outcome::Activated { READY } else { LATER });
        let cell = &self.paths[path].activation;
        if cell.compare_exchange(word(stage, RUNNING), next, AcqRel, Acquire).is_err() || !wanted {
            return false;
        }
        match outcome {
            Outcome::Activated => {}
            Outcome::Again if again => tries.due = Some(now + self.delay()),
            Outcome::Busy => self.leave(stage),
            Outcome::Again | Outcome::Failed => {
                self.fail_path_for(path, PathFailure::Activation);
            }
        }
        if let Some((group, _)) = self.in_use().filter(|&(_, now)| now == stage) {
            self.open(group, stage);
        }
        self.changed();
        true
    }

    /// Let requests go to a group if all of its paths that work have been activated. It is bypassed no more.
    fn open(&self, group: usize, stage: u32) {
        let mut working = self.working(group).peekable();
        let ready = |path: usize| self.paths[path].activation.load(Acquire) == word(stage, READY);
        if self.opened.load(Acquire) == stage || working.peek().is_none() || !working.all(ready) {
            return;
        }
        self.opened.store(stage, Release);
        self.groups[group].bypassed.store(false, Release);
        self.changed();
    }
}
