//! Simulation of targets that keep state: an origin with its snapshots, and mirrors, under load, faults,
//! kills and power cuts.
//!
//! They are created from table arguments, and their background work runs while requests are in flight; each
//! device has a model of its own. The seed determines the kind.

mod control;
mod machine;
mod mirrors;
mod snapshots;

use super::{Failure, Outcome, Scenario, SeededFault, guarded};
use sim::{Rng, Tracer};

/// Executes one run.
///
/// # Errors
/// [`Failure`] when a device lost or changed data, memory or a tag was misused, or the run did not end.
pub fn run(seed: u64, scenario: Scenario) -> Result<Outcome, Box<Failure>> {
    let tracer = Tracer::default();
    let mut rng = Rng::new(seed);
    let is_mirror = scenario.seeded_fault.map_or_else(|| rng.chance(500), SeededFault::is_of_mirrors);
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
