//! Random requests, faults and power cuts, against what each sector may hold.
//!
//! Each run is one image of random shape under random requests. After each request the power is cut in copies of the disk:
//! at any write to the storage, with any of the sectors lost that were written since the last sync. Each such *state* is
//! checked by [`crate::check`], opened, repaired, read and compared; one in five by `qemu-img check`, too.
//!
//! `BLOCKYARD_QCOW2_SEED` replays one run. `BLOCKYARD_QCOW2_STATES` goes on until that many states were checked, all of them by
//! `qemu-img check`, too.

mod concurrent;
pub(crate) mod disk;
pub(crate) mod rng;
mod run;
mod sectors;

use crate::Mistake;
use run::Run;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// Runs of seeds from `seed` on, until so many states were checked; prints what they found.
fn until(states: u64, seed: u64) {
    let (next, checked, by_qemu) = (AtomicU64::new(seed), AtomicU64::new(0), AtomicU64::new(0));
    let work = || {
        while checked.load(Relaxed) < states {
            let seed = next.fetch_add(1, Relaxed);
            let run = Run::new(seed, Mistake::None).go();
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
fn every_power_cut_leaves_what_was_flushed_and_a_consistent_image() {
    if let Some(seed) = number("BLOCKYARD_QCOW2_SEED") {
        let run = Run::new(seed, Mistake::None).go().unwrap_or_else(|why| panic!("{why}"));
        println!("{} states are good", run.states);
        return;
    }
    let states = number("BLOCKYARD_QCOW2_STATES");
    until(states.unwrap_or(300), if states.is_some() { 1_000_000 } else { 1 });
}

/// The model is worth what it finds.
#[test]
fn seeded_faults_are_found() {
    for mistake in [Mistake::NoEarlySync, Mistake::FreeAtOnce, Mistake::NoFill, Mistake::ForgetTable] {
        let found = (1..200).find_map(|seed| Run::new(seed, mistake).without_qemu().go().err());
        println!("{mistake:?}: {}", found.expect("it is found"));
    }
}
