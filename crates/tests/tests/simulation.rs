//! Simulation of whole stacks. `BLOCKYARD_SEED=n` replays one run and no other; `BLOCKYARD_SIM_RUNS=n` adds
//! that many runs with fresh seeds.

use blockyard_tests::simulation::{
    Scenario, SeededFault, SessionFault, run, run_sessions, run_targets, run_ublk,
};
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
fn random_stacks_lose_nothing() {
    match number("BLOCKYARD_SEED") {
        Some(seed) => pass(seed),
        None => (0..200).for_each(pass),
    }
}

/// Kills keep the page cache, power cuts lose it: an overlay that is opened afterwards does not know which
/// happened.
#[test]
fn overlays_lose_nothing_with_or_without_the_page_cache() {
    let scenario = Scenario { overlay: true, ..Scenario::default() };
    let count = number("BLOCKYARD_SIM_RUNS").unwrap_or(60);
    for seed in 5000..5000 + count {
        if let Some(failure) = run(seed, scenario).err().or_else(|| run_ublk(seed, scenario).err()) {
            panic!("{failure}");
        }
    }
}

#[test]
fn fresh_seeds_lose_nothing() {
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
fn runs_cover_all_events() {
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

/// Most runs until a seeded fault is found.
const RUNS_MAX: u64 = 60;

#[test]
fn every_seeded_fault_is_found() {
    for seeded_fault in SeededFault::ALL {
        let scenario = Scenario { seeded_fault: Some(seeded_fault), ..Scenario::default() };
        let found = (0..RUNS_MAX).find_map(|seed| run(seed, scenario).err());
        let failure = found.unwrap_or_else(|| panic!("{seeded_fault:?} was not found in {RUNS_MAX} runs"));
        println!("{seeded_fault:?}: seed {}: {}", failure.seed, failure.message);
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
fn fresh_seeds_lose_nothing_over_ublk() {
    let runs = number("BLOCKYARD_SIM_RUNS").unwrap_or(20);
    let first = RandomState::new().hash_one(0);
    println!("seeds from {first}");
    (0..runs).for_each(|number| pass_ublk(first.wrapping_add(number)));
}

#[test]
fn runs_over_ublk_replay_and_cover_all_events() {
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

/// Seeded faults that a client of the block device can see.
const SEEN_BY_CLIENTS: [SeededFault; 5] = [
    SeededFault::EarlyFua,
    SeededFault::SkippedFlush,
    SeededFault::DroppedTail,
    SeededFault::SwappedHalves,
    SeededFault::LostRequest,
];

#[test]
fn seeded_faults_are_found_through_ublk() {
    for seeded_fault in SEEN_BY_CLIENTS {
        let scenario = Scenario { seeded_fault: Some(seeded_fault), ..Scenario::default() };
        let found = (0..RUNS_MAX).find_map(|seed| run_ublk(seed, scenario).err());
        let failure = found.unwrap_or_else(|| panic!("{seeded_fault:?} was not found in {RUNS_MAX} runs"));
        println!("{seeded_fault:?}: seed {}: {}", failure.seed, failure.message);
    }
}

fn pass_targets(seed: u64) {
    if let Err(failure) = run_targets(seed, Scenario::default()) {
        panic!("{failure}");
    }
}

#[test]
fn targets_with_state_lose_nothing() {
    match number("BLOCKYARD_TARGET_SEED") {
        Some(seed) => pass_targets(seed),
        // The last ones are seeds that have found bugs.
        None => (0..60).chain([164, 210, 284, 101241]).for_each(pass_targets),
    }
}

#[test]
fn fresh_seeds_of_targets_lose_nothing() {
    // These runs take several times as long as the others.
    let runs = number("BLOCKYARD_SIM_RUNS").unwrap_or(50) / 5;
    let first = RandomState::new().hash_one(0);
    println!("seeds from {first}");
    (0..runs).for_each(|number| pass_targets(first.wrapping_add(number)));
}

#[test]
fn runs_of_targets_replay_and_cover_all_events() {
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
fn seeded_faults_in_targets_are_found() {
    for seeded_fault in SeededFault::OF_TARGETS {
        let scenario = Scenario { seeded_fault: Some(seeded_fault), ..Scenario::default() };
        let found = (0..RUNS_MAX).find_map(|seed| run_targets(seed, scenario).err());
        let failure = found.unwrap_or_else(|| panic!("{seeded_fault:?} was not found in {RUNS_MAX} runs"));
        println!("{seeded_fault:?}: seed {}: {}", failure.seed, failure.message);
    }
}

fn pass_sessions(seed: u64) {
    if let Err(failure) = run_sessions(seed, None) {
        panic!("{failure}");
    }
}

#[test]
fn iscsi_sessions_lose_nothing_and_apply_nothing_late() {
    match number("BLOCKYARD_SESSION_SEED") {
        Some(seed) => pass_sessions(seed),
        // The last one: a function that waits aborts a command while its data segment arrives.
        None => (0..60).chain([9368634729627704112]).for_each(pass_sessions),
    }
}

#[test]
fn fresh_seeds_of_iscsi_sessions_lose_nothing() {
    // These runs take several times as long as the others.
    let runs = number("BLOCKYARD_SIM_RUNS").unwrap_or(50) / 5;
    let first = RandomState::new().hash_one(0);
    println!("seeds from {first}");
    (0..runs).for_each(|number| pass_sessions(first.wrapping_add(number)));
}

#[test]
fn runs_of_iscsi_sessions_replay_and_cover_all_events() {
    let (mut requests, mut ok, mut aborts, mut reinstated) = (0, 0, 0, 0);
    for seed in 4000..4020 {
        let outcomes = [(); 2].map(|()| run_sessions(seed, None).unwrap_or_else(|f| panic!("{f}")));
        assert_eq!(outcomes[0], outcomes[1]);
        requests += outcomes[0].requests;
        ok += outcomes[0].ok;
        aborts += outcomes[0].swaps;
        reinstated += outcomes[0].kills;
    }
    assert!(ok * 2 > requests && requests > 4000, "{ok} of {requests} ok");
    assert!(aborts > 20 && reinstated > 20, "{aborts} aborts, {reinstated} sessions reinstated");
}

#[test]
fn seeded_faults_of_iscsi_sessions_are_found() {
    for fault in SessionFault::ALL {
        let found = (0..RUNS_MAX).find_map(|seed| run_sessions(seed, Some(fault)).err());
        let failure = found.unwrap_or_else(|| panic!("{fault:?} was not found in {RUNS_MAX} runs"));
        println!("{fault:?}: seed {}: {}", failure.seed, failure.message);
    }
}
