//! Whole stacks, simulated. `BLOCKYARD_SEED=n` replays one run and no other; `BLOCKYARD_SIM_RUNS=n` adds
//! that many runs with fresh seeds.

use blockyard_tests::simulation::{Breakage, Scenario, run, run_targets, run_ublk};
use std::hash::{BuildHasher, RandomState};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

fn pass(seed: u64) {
    if let Err(failure) = run(seed, Scenario::default()) {
        panic!("{failure}");
    }
}

#[test]
fn random_stacks_keep_their_promises() {
    match number("BLOCKYARD_SEED") {
        Some(seed) => pass(seed),
        None => (0..200).for_each(pass),
    }
}

/// Kills leave the page cache, power cuts take it: an overlay that is opened afterwards does not hear which it was.
#[test]
fn overlays_keep_their_promises_whether_or_not_the_page_cache_is_lost() {
    let scenario = Scenario { overlay: true, ..Scenario::default() };
    let count = number("BLOCKYARD_SIM_RUNS").unwrap_or(60);
    for seed in 5000..5000 + count {
        if let Some(failure) = run(seed, scenario).err().or_else(|| run_ublk(seed, scenario).err()) {
            panic!("{failure}");
        }
    }
}

#[test]
fn fresh_seeds_keep_their_promises() {
    let runs = number("BLOCKYARD_SIM_RUNS").unwrap_or(20);
    let first = RandomState::new().hash_one(0);
    println!("seeds from {first}");
    (0..runs).for_each(|number| pass(first.wrapping_add(number)));
}

#[test]
fn a_seed_replays_exactly() {
    for seed in 1000..1020 {
        let outcomes = [(); 2].map(|()| run(seed, Scenario::default()).unwrap_or_else(|f| panic!("{f}")));
        assert_eq!(outcomes[0], outcomes[1]);
        let other = run(seed + 1, Scenario::default()).unwrap_or_else(|f| panic!("{f}"));
        assert_ne!(outcomes[0].hash, other.hash);
    }
}

#[test]
fn runs_do_something() {
    let (mut requests, mut ok, mut cuts, mut swaps) = (0, 0, 0, 0);
    for seed in 0..40 {
        let outcome = run(seed, Scenario::default()).unwrap_or_else(|f| panic!("{f}"));
        requests += outcome.requests;
        ok += outcome.ok;
        cuts += outcome.power_cuts;
        swaps += outcome.swaps;
    }
    assert!(swaps > 40, "{swaps} swaps");
    assert!(ok * 2 > requests && requests > 4000 && cuts > 40, "{ok} of {requests} ok, {cuts} power cuts");
}

/// Runs until the mistake is found; each must be within as many.
const RUNS_MAX: u64 = 60;

#[test]
fn every_mistake_made_on_purpose_is_found() {
    for breakage in Breakage::ALL {
        let scenario = Scenario { breakage: Some(breakage), ..Scenario::default() };
        let found = (0..RUNS_MAX).find_map(|seed| run(seed, scenario).err());
        let failure = found.unwrap_or_else(|| panic!("{breakage:?} was not found in {RUNS_MAX} runs"));
        println!("{breakage:?}: seed {}: {}", failure.seed, failure.message);
    }
}

fn pass_ublk(seed: u64) {
    if let Err(failure) = run_ublk(seed, Scenario::default()) {
        panic!("{failure}");
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_ublk_servers_are_killed() {
    match number("BLOCKYARD_UBLK_SEED") {
        Some(seed) => pass_ublk(seed),
        None => (0..100).for_each(pass_ublk),
    }
}

#[test]
fn fresh_seeds_keep_their_promises_over_ublk() {
    let runs = number("BLOCKYARD_SIM_RUNS").unwrap_or(20);
    let first = RandomState::new().hash_one(0);
    println!("seeds from {first}");
    (0..runs).for_each(|number| pass_ublk(first.wrapping_add(number)));
}

#[test]
fn runs_over_ublk_replay_and_do_something() {
    let (mut requests, mut ok, mut kills, mut cuts) = (0, 0, 0, 0);
    for seed in 2000..2040 {
        let outcomes =
            [(); 2].map(|()| run_ublk(seed, Scenario::default()).unwrap_or_else(|f| panic!("{f}")));
        assert_eq!(outcomes[0], outcomes[1]);
        requests += outcomes[0].requests;
        ok += outcomes[0].ok;
        kills += outcomes[0].kills;
        cuts += outcomes[0].power_cuts;
    }
    assert!(ok * 2 > requests && requests > 4000, "{ok} of {requests} ok");
    assert!(kills > 40 && cuts > 8, "{kills} kills, {cuts} power cuts");
}

/// Mistakes that a client of the block device can see.
const SEEN_BY_CLIENTS: [Breakage; 5] = [
    Breakage::EarlyFua,
    Breakage::SkippedFlush,
    Breakage::DroppedTail,
    Breakage::SwappedHalves,
    Breakage::LostRequest,
];

#[test]
fn mistakes_are_found_through_ublk_as_well() {
    for breakage in SEEN_BY_CLIENTS {
        let scenario = Scenario { breakage: Some(breakage), ..Scenario::default() };
        let found = (0..RUNS_MAX).find_map(|seed| run_ublk(seed, scenario).err());
        let failure = found.unwrap_or_else(|| panic!("{breakage:?} was not found in {RUNS_MAX} runs"));
        println!("{breakage:?}: seed {}: {}", failure.seed, failure.message);
    }
}

fn pass_targets(seed: u64) {
    if let Err(failure) = run_targets(seed, Scenario::default()) {
        panic!("{failure}");
    }
}

#[test]
fn targets_that_keep_state_keep_their_promises() {
    match number("BLOCKYARD_TARGET_SEED") {
        Some(seed) => pass_targets(seed),
        // The last ones found something.
        None => (0..60).chain([164, 210, 284, 101241]).for_each(pass_targets),
    }
}

#[test]
fn fresh_seeds_keep_the_promises_of_targets() {
    // Each takes as long as several of the others.
    let runs = number("BLOCKYARD_SIM_RUNS").unwrap_or(50) / 5;
    let first = RandomState::new().hash_one(0);
    println!("seeds from {first}");
    (0..runs).for_each(|number| pass_targets(first.wrapping_add(number)));
}

#[test]
fn runs_of_targets_replay_and_do_something() {
    let (mut requests, mut ok, mut cuts, mut kills, mut swaps) = (0, 0, 0, 0, 0);
    for seed in 3000..3020 {
        let outcomes =
            [(); 2].map(|()| run_targets(seed, Scenario::default()).unwrap_or_else(|f| panic!("{f}")));
        assert_eq!(outcomes[0], outcomes[1]);
        requests += outcomes[0].requests;
        ok += outcomes[0].ok;
        cuts += outcomes[0].power_cuts;
        kills += outcomes[0].kills;
        swaps += outcomes[0].swaps;
    }
    assert!(ok * 2 > requests && requests > 2000, "{ok} of {requests} ok");
    assert!(cuts > 20 && kills > 2 && swaps > 10, "{cuts} power cuts, {kills} kills, {swaps} swaps");
}

#[test]
fn mistakes_in_targets_are_found() {
    for breakage in Breakage::OF_TARGETS {
        let scenario = Scenario { breakage: Some(breakage), ..Scenario::default() };
        let found = (0..RUNS_MAX).find_map(|seed| run_targets(seed, scenario).err());
        let failure = found.unwrap_or_else(|| panic!("{breakage:?} was not found in {RUNS_MAX} runs"));
        println!("{breakage:?}: seed {}: {}", failure.seed, failure.message);
    }
}
