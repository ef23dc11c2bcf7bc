//! The simulation of whole stacks: from one seed, random nodes, load, faults, freezes and power cuts,
//! checked against the sector model.
//!
//! [`run`] is one run; its seed decides everything. A [`Failure`] carries the seed, the reason and the
//! last events. Who may call it: tests, and the `soak` program. It knows no wall clock.

mod breakage;
mod load;
mod parts;
mod paths;
mod remote;
mod stacks;
mod targets;
mod ublk;
mod within;
mod world;

pub use breakage::Breakage;
pub use targets::run as run_targets;
pub use ublk::run as run_ublk;

use sim::{Rng, Tracer};
use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What to simulate.
#[derive(Clone, Copy, Default, Debug)]
pub struct Scenario {
    /// Requests in all; 0 for the usual number.
    pub requests: u64,
    /// Put this mistake into the stack: the run ought to fail.
    pub breakage: Option<Breakage>,
    /// An overlay over an origin that holds something, on disks that keep what they hold.
    pub overlay: bool,
}

/// How a run went that found nothing wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The hash over all that happened.
    pub hash: u64,
    /// How many events that were.
    pub events: u64,
    /// Requests that ended.
    pub requests: u64,
    /// Those that ended well.
    pub ok: u64,
    /// Power cuts survived.
    pub power_cuts: u64,
    /// Stacks swapped while requests waited.
    pub swaps: u64,
    /// Servers killed and replaced.
    pub kills: u64,
}

/// What a run found wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed that shows it again.
    pub seed: u64,
    /// What is wrong.
    pub message: String,
    /// The stack, and the last events.
    pub story: String,
    /// The variable that names the seed of a run of this kind.
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
    /// The run under way: for whoever reports a panic where panics abort.
    static CURRENT: RefCell<Option<(u64, String, Tracer)>> = const { RefCell::new(None) };
}

/// Seed, stack and last events of the run under way on this thread.
pub fn current_story() -> Option<String> {
    CURRENT.with_borrow(|current| current.as_ref().map(|(seed, stack, tracer)| story(*seed, stack, tracer)))
}

fn story(seed: u64, stack: &str, tracer: &Tracer) -> String {
    format!("seed {seed}, event {}\nstack: {stack}\nlast events:\n{}", tracer.count(), tracer.tail())
}

/// One run.
///
/// # Errors
/// [`Failure`] when the stack broke a promise, a node misused memory or a tag, or the run did not end.
pub fn run(seed: u64, scenario: Scenario) -> Result<Outcome, Box<Failure>> {
    let tracer = Tracer::default();
    let mut rng = Rng::new(seed);
    let setup = stacks::Setup::random(&mut rng, scenario, true);
    let stack = setup.describe();
    guarded(seed, "BLOCKYARD_SEED", stack, &tracer, || {
        world::World::new(rng, setup, tracer.clone()).run(scenario)
    })
}

/// Run with its story at hand for whoever has to tell it.
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
