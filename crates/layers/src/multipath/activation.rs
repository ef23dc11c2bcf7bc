//! Activation of paths before they serve requests (the kernel's `pg_init`, MP-6).
//!
//! With the hardware handler `exec` no path of a group is usable until all of its active paths have been
//! activated in the current **stage**; a stage begins when a group becomes current. The control plane asks
//! for due activations ([`Multipath::due_activations`]), runs them, and reports their outcome
//! ([`Multipath::finish_activation`]). Queues see only which paths are usable: they wait for a new epoch, as
//! they wait for a path.
//!
//! The state of a path's activation is one word with its stage. A failure of the path sets it to 0, and only
//! an exchange from `RUNNING` of the same stage makes it `READY`: an activation that began before the failure
//! or for another stage has no effect.
//!
//! *Invariant:* at most one activation of a path runs at a time.

use super::failure::PathFailure;
use super::state::{Chosen, Multipath, NONE};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An activation is running.
const RUNNING: u64 = 1;
/// The next attempt is scheduled.
const SCHEDULED: u64 = 2;
/// The path is activated.
const READY: u64 = 3;

/// The default of `pg_init_delay_msecs`.
const DELAY_MS: u32 = 2000;

fn word(stage: u32, how_far: u64) -> u64 {
    u64::from(stage) << 2 | how_far
}

/// The result of an activation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The path may serve requests.
    Activated,
    /// The activation is to be tried again, up to `pg_init_retries` times.
    Retry,
    /// The path's group cannot be used for now.
    Busy,
    /// The path is failed.
    Failed,
}

/// One attempt to activate a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Activation {
    /// The path's number over all groups.
    pub path: usize,
    stage: u32,
}

/// The activation attempts of one path.
#[derive(Clone, Default)]
struct PathAttempts {
    /// Attempts in `stage`, since the path was last reinstated.
    count: u32,
    stage: u32,
    /// Whether an attempt is running.
    busy: bool,
    /// The earliest time of the next attempt.
    due: Option<Instant>,
}

/// The activation attempts of all paths.
pub(super) struct Attempts(Vec<PathAttempts>);

impl Attempts {
    pub(super) fn new(paths: usize) -> Attempts {
        Attempts(vec![PathAttempts::default(); paths])
    }
}

impl Multipath {
    fn activates(&self) -> bool {
        self.config().activator().is_some()
    }

    /// Returns whether a path may serve requests: it is active, and activated if the handler requires that.
    pub(super) fn is_usable(&self, path: usize) -> bool {
        if !self.is_active(path) || !self.activates() {
            return self.is_active(path);
        }
        let stage = self.chosen().stage;
        self.ready_stage.load(Acquire) == stage
            && self.paths[path].activation.load(Acquire) == word(stage, READY)
    }

    /// Returns the current group and its stage.
    fn in_use(&self) -> Option<(usize, u32)> {
        let Chosen { current, stage, .. } = self.chosen();
        (current != NONE).then_some((current as usize, stage))
    }

    fn working(&self, group: usize) -> impl Iterator<Item = usize> + '_ {
        let (first, count) = self.paths_of(group);
        (first..first + count).filter(|&path| self.is_active(path))
    }

    /// Returns whether requests are held because no path of the current group is activated yet.
    pub(super) fn waits_for_activation(&self) -> bool {
        let Some((group, _)) = self.in_use() else { return false };
        let mut working = self.working(group).peekable();
        working.peek().is_some() && working.all(|path| !self.is_usable(path))
    }

    /// Returns the largest number of activation attempts of a path in the current stage.
    pub(super) fn attempts_in_stage(&self) -> u32 {
        let Some((_, stage)) = self.in_use().filter(|_| self.activates()) else { return 0 };
        let attempts = self.attempts();
        attempts
            .0
            .iter()
            .filter(|attempts| attempts.stage == stage)
            .map(|attempts| attempts.count)
            .max()
            .unwrap_or(0)
    }

    fn attempts(&self) -> MutexGuard<'_, Attempts> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn delay(&self) -> Duration {
        Duration::from_millis(self.config().pg_init_delay_ms.unwrap_or(DELAY_MS).into())
    }

    /// Returns the activations to run now. A path is not returned again before its outcome is reported.
    pub fn due_activations(&self, now: Instant) -> Vec<Activation> {
        let in_use = self.in_use().filter(|_| self.activates() && !self.must_push_back());
        let Some((group, stage)) = in_use else { return Vec::new() };
        let mut attempts = self.attempts();
        let begin = |&path: &usize| self.begin(&mut attempts.0[path], path, group, stage, now);
        let begun: Vec<_> = self.working(group).filter(begin).collect();
        self.complete_stage(group, stage);
        begun.into_iter().map(|path| Activation { path, stage }).collect()
    }

    /// Returns whether an attempt for a path starts now.
    fn begin(
        &self,
        attempts: &mut PathAttempts,
        path: usize,
        group: usize,
        stage: u32,
        now: Instant,
    ) -> bool {
        let cell = &self.paths[path].activation;
        let seen = cell.load(Acquire);
        if attempts.busy || seen == word(stage, READY) {
            return false;
        }
        if seen != word(stage, SCHEDULED) {
            // The path was reinstated, or its group became current. A bypassed group is used as the last
            // resort: its activation waits for the delay, so that it is not repeated without pause.
            let bypassed = self.groups[group].bypassed.load(Acquire);
            *attempts =
                PathAttempts { stage, due: bypassed.then(|| now + self.delay()), ..PathAttempts::default() };
        }
        let begins = attempts.due.is_none_or(|due| now >= due);
        let next = word(stage, if begins { RUNNING } else { SCHEDULED });
        // If the path failed meanwhile, the next call sees it.
        let set = cell.compare_exchange(seen, next, AcqRel, Acquire).is_ok();
        attempts.busy = set && begins;
        attempts.count += u32::from(attempts.busy);
        attempts.busy
    }

    /// Returns whether the outcome of an attempt still has an effect: the path has not failed since, and its
    /// group is current.
    pub fn is_wanted(&self, activation: &Activation) -> bool {
        let Activation { path, stage } = *activation;
        self.in_use().is_some_and(|(_, now)| now == stage)
            && self.paths[path].activation.load(Acquire) == word(stage, RUNNING)
    }

    /// Reports the outcome of an attempt. Returns whether it had an effect ([`is_wanted`](Self::is_wanted)).
    pub fn finish_activation(&self, activation: &Activation, outcome: Outcome, now: Instant) -> bool {
        let Activation { path, stage } = *activation;
        let mut attempts = self.attempts();
        let attempts = &mut attempts.0[path];
        attempts.busy = false;
        let wanted = self.is_wanted(activation);
        let again = outcome == Outcome::Retry && attempts.count <= self.config().pg_init_retries;
        let next = word(stage, if outcome == Outcome::Activated { READY } else { SCHEDULED });
        let cell = &self.paths[path].activation;
        if cell.compare_exchange(word(stage, RUNNING), next, AcqRel, Acquire).is_err() || !wanted {
            return false;
        }
        match outcome {
            Outcome::Activated => {}
            Outcome::Retry if again => attempts.due = Some(now + self.delay()),
            Outcome::Busy => self.bypass_stage(stage),
            Outcome::Retry | Outcome::Failed => {
                self.fail_path_for(path, PathFailure::Activation);
            }
        }
        if let Some((group, _)) = self.in_use().filter(|&(_, now)| now == stage) {
            self.complete_stage(group, stage);
        }
        self.changed();
        true
    }

    /// Makes a group usable once all of its active paths are activated. The group is no longer bypassed then.
    fn complete_stage(&self, group: usize, stage: u32) {
        let mut working = self.working(group).peekable();
        let ready = |path: usize| self.paths[path].activation.load(Acquire) == word(stage, READY);
        if self.ready_stage.load(Acquire) == stage || working.peek().is_none() || !working.all(ready) {
            return;
        }
        self.ready_stage.store(stage, Release);
        self.groups[group].bypassed.store(false, Release);
        self.changed();
    }
}
