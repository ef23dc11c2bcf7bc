//! Simulation of whole stacks: from one seed, random nodes, load, faults, freezes and power cuts, checked
//! against the sector model.
//!
//! [`run`] is one run, determined by its seed. A [`Failure`] has the seed, the reason and the last events. It
//! reads no wall clock.

mod load;
mod parts;
mod paths;
mod program;
mod remote;
mod seeded_fault;
mod sessions;
mod stacks;
mod target_line;
mod targets;
mod ublk;
mod within;
mod world;

pub use seeded_fault::SeededFault;
pub use sessions::{SessionFault, run as run_sessions};
pub use targets::run as run_targets;
pub use ublk::run as run_ublk;

use sim::{Rng, Tracer};
use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What to simulate.
#[derive(Clone, Copy, Default, Debug)]
pub struct Scenario {
    /// Number of requests; 0 for the default.
    pub requests: u64,
    /// Puts this seeded fault into the stack: the run must fail.
    pub seeded_fault: Option<SeededFault>,
    /// Uses an overlay over a filled origin, on disks that keep their content.
    pub overlay: bool,
}

/// The result of a run without a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Hash over all events.
    pub hash: u64,
    /// Number of events.
    pub events: u64,
    /// Number of completed requests.
    pub requests: u64,
    /// Number of successful requests.
    pub ok: u64,
    /// Number of power cuts.
    pub power_cuts: u64,
    /// Number of swaps of stacks while requests waited.
    pub swaps: u64,
    /// Number of killed and replaced servers.
    pub kills: u64,
}

/// A failure of a run.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed that reproduces it.
    pub seed: u64,
    /// The error.
    pub message: String,
    /// The stack, and the last events.
    pub story: String,
    /// The variable that takes the seed of a run of this kind.
    pub variable: &'static str,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "simulation failed: {}", self.message)?;
        f.write_str(&self.story)?;
        let Failure { seed, variable, .. } = self;
        write!(f, "replay: {variable}={seed} cargo test -p blockyard-tests --test simulation")
    }
}

impl std::error::Error for Failure {}

thread_local! {
    /// The current run, for reporting a panic where panics abort.
    static CURRENT: RefCell<Option<(u64, String, Tracer)>> = const { RefCell::new(None) };
}

/// Returns seed, stack and last events of this thread's current run.
pub fn current_story() -> Option<String> {
    CURRENT.with_borrow(|current| current.as_ref().map(|(seed, stack, tracer)| story(*seed, stack, tracer)))
}

fn story(seed: u64, stack: &str, tracer: &Tracer) -> String {
    format!("seed {seed}, event {}\nstack: {stack}\nlast events:\n{}", tracer.count(), tracer.tail())
}

/// Executes one run.
///
/// # Errors
/// [`Failure`] when the stack lost or changed data, a node misused memory or a tag, or the run did not end.
pub fn run(seed: u64, scenario: Scenario) -> Result<Outcome, Box<Failure>> {
    let tracer = Tracer::default();
    let mut rng = Rng::new(seed);
    let setup = stacks::Setup::random(&mut rng, scenario, true);
    let stack = setup.describe();
    guarded(seed, "BLOCKYARD_SEED", stack, &tracer, || {
        world::World::new(rng, setup, tracer.clone()).run(scenario)
    })
}

/// Executes a run with its story available for a panic.
fn guarded(
    seed: u64,
    variable: &'static str,
    stack: String,
    tracer: &Tracer,
    world: impl FnOnce() -> Result<Outcome, String>,
) -> Result<Outcome, Box<Failure>> {
    CURRENT.set(Some((seed, stack.clone(), tracer.clone())));
    let result = catch_unwind(AssertUnwindSafe(world)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("of unknown kind");
        Err(format!("panic: {text}"))
    });
    CURRENT.set(None);
    result
        .map_err(|message| Box::new(Failure { seed, message, story: story(seed, &stack, tracer), variable }))
        .map(|outcome| Outcome { hash: tracer.hash(), events: tracer.count(), ..outcome })
}
