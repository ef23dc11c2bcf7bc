//! Tests with random requests, faults and power cuts, checked against the possible content of each sector.
//!
//! Each run uses one image of random shape under random requests. After each request, power cuts are
//! applied to copies of the disk: after any write to the storage, losing any of the sectors written since
//! the last sync. Each resulting *state* is checked by [`crate::check`], opened, repaired, read and
//! compared; one in five is also checked by `qemu-img check`.
//!
//! `BLOCKYARD_QCOW2_SEED` reproduces one run. `BLOCKYARD_QCOW2_STATES` continues until that many states
//! have been checked, all of them by `qemu-img check` as well.

mod concurrent;
pub(crate) mod disk;
pub(crate) mod rng;
mod run;
mod sectors;

use crate::SeededFault;
use run::Run;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// Runs seeds from `seed` on, until this many states have been checked, and prints the result.
fn until(states: u64, seed: u64) {
    let (next, checked, by_qemu) = (AtomicU64::new(seed), AtomicU64::new(0), AtomicU64::new(0));
    let work = || {
        while checked.load(Relaxed) < states {
            let seed = next.fetch_add(1, Relaxed);
            let run = Run::new(seed, SeededFault::None).go();
            let run = run.unwrap_or_else(|why| panic!("BLOCKYARD_QCOW2_SEED={seed} finds: {why}"));
            by_qemu.fetch_add(run.by_qemu, Relaxed);
            let now = checked.fetch_add(run.states, Relaxed) + run.states;
            let _ = write!(std::io::stderr(), "\r{now} states");
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("a state is bad"));
    });
    let runs = next.into_inner() - seed;
    let (checked, by_qemu) = (checked.into_inner(), by_qemu.into_inner());
    println!("{runs} runs, {checked} crash states, {by_qemu} of them checked by qemu-img too, 0 bad");
}

#[test]
fn every_power_cut_preserves_flushed_data_and_consistency() {
    if let Some(seed) = number("BLOCKYARD_QCOW2_SEED") {
        let run = Run::new(seed, SeededFault::None).go().unwrap_or_else(|why| panic!("{why}"));
        println!("{} states are good", run.states);
        return;
    }
    let states = number("BLOCKYARD_QCOW2_STATES");
    until(states.unwrap_or(300), if states.is_some() { 1_000_000 } else { 1 });
}

/// The model is useful only if it detects faults, so seeded faults must be detected.
#[test]
fn seeded_faults_are_detected() {
    for fault in
        [SeededFault::NoEarlySync, SeededFault::FreeAtOnce, SeededFault::NoFill, SeededFault::ForgetTable]
    {
        let found = (1..200).find_map(|seed| Run::new(seed, fault).without_qemu().go().err());
        println!("{fault:?}: {}", found.expect("it is detected"));
    }
}
