//! A run of the laboratory: explores the states of a log with several workers, and saves what they find.

use super::checker::{Check, Checked, Checker};
use super::command::Outcome;
use super::files;
use super::save::{Run, save_finding};
use crash::report::{Finding, Summary, explain};
use crash::{Explorer, Phase, Seen, State, Verdicts, View, minimise};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Random states in a row that were known, after which no more are expected.
const KNOWN_MAX: u32 = 20_000;
/// Checks to minimise one state at most.
const MINIMISE_MAX: u32 = 300;

/// Limits of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) time: Duration,
    pub(super) states: Option<u64>,
    pub(super) findings: usize,
    pub(super) jobs: usize,
}

/// What the workers share.
struct Shared {
    explorer: Explorer,
    seen: Seen,
    /// The results by what was read: whether the check passed, else the index of the finding.
    verdicts: Verdicts<Option<usize>>,
    summary: Summary,
    /// The minimised states of findings with the outcome.
    causes: Vec<(State, String)>,
    known_in_a_row: u32,
    ended: Option<String>,
    problem: Option<String>,
}

struct Worker<'a> {
    shared: &'a Mutex<Shared>,
    view: Arc<View>,
    run: &'a Run,
    dir: PathBuf,
    start: Instant,
    limits: Limits,
    bar: &'a ProgressBar,
    stop: &'a AtomicBool,
}

/// Explores until time is up. `work` is a directory for the workers' devices.
pub(super) fn explore(
    view: &Arc<View>,
    run: &Run,
    check: &Check,
    limits: Limits,
    summary: Summary,
    work: &Path,
    stop: &AtomicBool,
) -> Result<Summary, String> {
    let shared = Mutex::new(Shared {
        explorer: Explorer::new(view.clone(), summary.seed),
        seen: Seen::default(),
        verdicts: Verdicts::default(),
        summary,
        causes: Vec::new(),
        known_in_a_row: 0,
        ended: None,
        problem: None,
    });
    let bar = progress(limits.time);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for job in 0..limits.jobs {
            let worker = Worker {
                shared: &shared,
                view: view.clone(),
                run,
                dir: work.join(format!("job{job}")),
                start,
                limits,
                bar: &bar,
                stop,
            };
            scope.spawn(move || worker.run(check));
        }
    });
    bar.finish_and_clear();
    let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(problem) = shared.problem {
        return Err(problem);
    }
    let mut summary = shared.summary;
    summary.seconds = start.elapsed().as_secs_f64();
    summary.ended = shared.ended.unwrap_or_else(|| "all states were checked".to_owned());
    Ok(summary)
}

fn progress(time: Duration) -> ProgressBar {
    let bar = ProgressBar::new(time.as_millis().try_into().unwrap_or(u64::MAX));
    let style = ProgressStyle::with_template("{wide_bar} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

impl Worker<'_> {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, check: &Check) {
        let result = Checker::new(check.clone(), self.view.clone(), &self.dir).and_then(|mut checker| {
            while let Some((number, state)) = self.next()? {
                self.one(&mut checker, number, &state)?;
            }
            Ok(())
        });
        if let Err(problem) = result {
            let mut shared = self.lock();
            shared.ended.get_or_insert_with(|| "a problem".to_owned());
            shared.problem.get_or_insert(problem);
        }
    }

    /// Returns the next state that needs a check.
    fn next(&self) -> Result<Option<(u64, State)>, String> {
        let failed = |why: std::io::Error| format!("reading the log or the base failed: {why}");
        loop {
            let mut shared = self.lock();
            let shared = &mut *shared;
            if shared.ended.is_some() {
                return Ok(None);
            }
            shared.ended = self.end(shared);
            if shared.ended.is_some() {
                return Ok(None);
            }
            let go_on = || !self.stop.load(Ordering::Relaxed) && self.start.elapsed() < self.limits.time;
            // What `go_on` has ended is counted as the end of time with the next turn.
            let Some(state) = shared.explorer.next_while(&go_on) else { continue };
            shared.summary.generated += 1;
            let number = shared.summary.generated;
            if number.is_multiple_of(16) {
                self.show(shared);
            }
            let Some(is_new) = shared.seen.add(&self.view, &state, &go_on).map_err(failed)? else { continue };
            if !is_new {
                shared.summary.equal += 1;
                if shared.explorer.phase() == Phase::Random {
                    shared.known_in_a_row += 1;
                }
                continue;
            }
            if let Some(known) = shared.verdicts.find(&self.view, &state) {
                shared.summary.unread += 1;
                if let Some(finding) = known {
                    shared.summary.failed += 1;
                    count(&mut shared.summary, finding);
                }
                if shared.explorer.phase() == Phase::Random {
                    shared.known_in_a_row += 1;
                }
                continue;
            }
            shared.known_in_a_row = 0;
            return Ok(Some((number, state)));
        }
    }

    /// Returns why exploring ends.
    fn end(&self, shared: &Shared) -> Option<String> {
        if self.stop.load(Ordering::Relaxed) {
            return Some("interrupted".to_owned());
        }
        if self.start.elapsed() >= self.limits.time {
            return Some("time is up".to_owned());
        }
        if self.limits.states.is_some_and(|states| shared.summary.generated >= states) {
            return Some("the number of states was reached".to_owned());
        }
        if shared.summary.findings.len() >= self.limits.findings {
            return Some("the number of findings was reached".to_owned());
        }
        (shared.known_in_a_row >= KNOWN_MAX).then(|| "no new states were generated".to_owned())
    }

    fn show(&self, shared: &Shared) {
        let elapsed = self.start.elapsed();
        let left = self.limits.time.saturating_sub(elapsed).as_secs();
        self.bar.set_position(elapsed.as_millis().try_into().unwrap_or(u64::MAX));
        let summary = &shared.summary;
        self.bar.set_message(format!(
            "{} states, {} checked, {} failed, {} findings, {left} s left",
            summary.generated,
            summary.checked,
            summary.failed,
            summary.findings.len()
        ));
    }

    fn one(&self, checker: &mut Checker, number: u64, state: &State) -> Result<(), String> {
        let name = format!("{}-s{number}", self.run.name);
        let mut checked = checker.check(state, &name)?;
        let was_late = checked.outcome.is_late();
        if was_late {
            checked = checker.check_patiently(state, &name)?;
        }
        let mut shared = self.lock();
        shared.summary.slow += u64::from(was_late && !checked.outcome.is_late());
        shared.summary.checked += 1;
        let Outcome::Failed(outcome) = &checked.outcome else {
            shared.verdicts.add(&self.view, state, checked.read, None);
            return Ok(());
        };
        shared.summary.failed += 1;
        if let Some(known) = self.known(&shared, state, outcome) {
            shared.verdicts.add(&self.view, state, checked.read, Some(known));
            count(&mut shared.summary, known);
            return Ok(());
        }
        drop(shared);
        let read = checked.read.clone();
        let (smallest, _) = self.minimise(checker, state, checked, was_late)?;
        // A check that fails only at times, or was slow on a busy machine, would be no finding.
        let again = checker.check_patiently(&smallest, &format!("{}-again", self.run.name))?;
        self.lock().summary.minimising += 1;
        if again.outcome == Outcome::Passed {
            self.lock().summary.unstable += 1;
            return Ok(());
        }
        let checked = again;
        let index = self.found(checker, &smallest, &checked)?;
        self.lock().verdicts.add(&self.view, state, read, Some(index));
        Ok(())
    }

    /// Returns the finding whose lost pieces this state has lost as well, with the same outcome.
    fn known(&self, shared: &Shared, state: &State, outcome: &str) -> Option<usize> {
        let epoch = |cut: u32| {
            let before = |flush: &&crash::Flush| flush.completed.is_some_and(|done| done < cut);
            self.view.log().flushes.iter().filter(before).count()
        };
        shared.causes.iter().position(|(cause, of)| {
            let lost = cause.lost.iter().all(|piece| state.lost.binary_search(piece).is_ok());
            let is_cause = !cause.lost.is_empty() || epoch(cause.cut) == epoch(state.cut);
            of == outcome && lost && is_cause
        })
    }

    /// Returns the smallest failing state, and the result of its check.
    fn minimise(
        &self,
        checker: &mut Checker,
        state: &State,
        checked: Checked,
        was_late: bool,
    ) -> Result<(State, Checked), String> {
        let mut best = checked;
        let mut problem = None;
        let mut checks = 0;
        let check_max = checker.deadline();
        let smallest = minimise(&self.view, state, |candidate| {
            let is_late = self.start.elapsed() > self.limits.time.saturating_add(check_max);
            if checks == MINIMISE_MAX || is_late || self.stop.load(Ordering::Relaxed) {
                return None;
            }
            checks += 1;
            let name = format!("{}-m{checks}", self.run.name);
            let checked = if was_late {
                checker.check_patiently(candidate, &name)
            } else {
                checker.check(candidate, &name)
            };
            match checked {
                // Another state is late for another reason: this one did not fail for it.
                Ok(checked) if checked.outcome.is_late() && !was_late => Some(false),
                Ok(checked) => {
                    let fails = checked.outcome != Outcome::Passed;
                    if fails {
                        best = checked;
                    }
                    Some(fails)
                }
                Err(why) => {
                    problem = Some(why);
                    None
                }
            }
        });
        self.lock().summary.minimising += u64::from(checks);
        problem.map_or(Ok((smallest, best)), Err)
    }

    /// Adds a finding, or counts it if another worker has found its cause.
    fn found(&self, checker: &mut Checker, state: &State, checked: &Checked) -> Result<usize, String> {
        let Outcome::Failed(outcome) = &checked.outcome else {
            return Err("a passed check was found".to_owned());
        };
        self.view.allows(state).map_err(|why| format!("a state that the model does not permit: {why}"))?;
        let mut lost = explain(&self.view, state);
        files::name(checker, &self.view, state, &mut lost);
        let mut shared = self.lock();
        if let Some(known) = self.known(&shared, state, outcome) {
            count(&mut shared.summary, known);
            return Ok(known);
        }
        let index = shared.summary.findings.len();
        let marks = self.view.log().marks_before(state.cut);
        let finding = Finding {
            id: format!("{}-{}", self.run.name, index + 1),
            cut: state.cut,
            time_ns: self.view.log().time_at(state.cut),
            marks: marks.len(),
            last_mark: marks.last().map(|mark| mark.text.clone()),
            lost,
            outcome: outcome.clone(),
            output: checked.output.clone(),
            states: 1,
        };
        save_finding(self.run, &self.view, &finding)?;
        self.bar.suspend(|| eprint!("{}", finding.text()));
        shared.summary.findings.push(finding);
        shared.causes.push((state.clone(), outcome.clone()));
        Ok(index)
    }
}

fn count(summary: &mut Summary, finding: usize) {
    if let Some(finding) = summary.findings.get_mut(finding) {
        finding.states += 1;
    }
}
