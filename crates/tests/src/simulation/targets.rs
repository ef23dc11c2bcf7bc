//! Targets that keep state, simulated: an origin with its snapshots, and mirrors, under load, faults, kills and power cuts.
//!
//! They are made as a table makes them, from words, and their chores are done while requests are under way; each
//! device has a model of its own. The seed decides which kind it is.

mod control;
mod machine;
mod mirrors;
mod snapshots;

use super::{Breakage, Failure, Outcome, Scenario, guarded};
use sim::{Rng, Tracer};

/// One run.
///
/// # Errors
/// [`Failure`] when a device broke a promise, something misused memory or a tag, or the run did not end.
pub fn run(seed: u64, scenario: Scenario) -> Result<Outcome, Box<Failure>> {
    let tracer = Tracer::default();
    let mut rng = Rng::new(seed);
    let is_mirror = scenario.breakage.map_or_else(|| rng.chance(500), Breakage::is_of_mirrors);
    let variable = "BLOCKYARD_TARGET_SEED";
    if is_mirror {
        let plan = mirrors::Plan::random(&mut rng, scenario);
        guarded(seed, variable, plan.describe(), &tracer, || {
            mirrors::World::new(rng, plan, scenario, tracer.clone())?.run(scenario)
        })
    } else {
        let plan = snapshots::Plan::random(&mut rng, scenario);
        guarded(seed, variable, plan.describe(), &tracer, || {
            snapshots::World::new(rng, plan, scenario, tracer.clone())?.run(scenario)
        })
    }
}
