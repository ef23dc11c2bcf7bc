//! The short form of `./x soak attack`: each part for a few seconds with fixed seeds, and its canary.

use blockyard_tests::attack::clock::Clock;
use blockyard_tests::attack::options::Options;
use blockyard_tests::attack::recorder::Recorder;
use blockyard_tests::attack::stores::Store;
use blockyard_tests::attack::{Part, Tally};
use blockyard_tests::tools::skip;

fn options(count: u64, only: &[Store]) -> Options {
    Options { seed: 1, only: only.to_vec(), ..Options::new(count) }
}

#[track_caller]
fn clean(part: Part, options: &Options) -> Tally {
    let tally = part.run(options);
    assert!(tally.is_clean(), "{tally}: {:#?}", tally.findings);
    tally
}

#[track_caller]
fn found(part: Part, options: &Options) {
    let tally = part.run(&Options { canary: true, ..options.clone() });
    assert!(!tally.is_clean(), "the canary of {} was not found: {tally}", part.name());
}

/// Number of stores: each has one recording.
const STORES: u64 = Store::ALL.len() as u64;

/// Returns whether FUSE mounts are impossible here: then the calling test is skipped and must return.
fn missing_fuse() -> bool {
    let dir = tempfile::tempdir().expect("a folder");
    match Recorder::mount(&dir.path().join("m"), Clock::default()) {
        Ok(_) => false,
        Err(why) => {
            skip(format_args!("a file system cannot be mounted by FUSE: {why}"));
            true
        }
    }
}

#[test]
fn kills_lose_nothing_acknowledged() {
    let tally = clean(Part::Kills, &options(60, &[]));
    assert_eq!(tally.figure("kills"), 60);
    assert!(tally.figure("requests") > 1000, "{tally}");
}

#[test]
fn the_canary_that_expects_unacknowledged_data_fails() {
    found(Part::Kills, &options(50, &[Store::Raw]));
}

#[test]
fn power_cuts_lose_nothing_flushed() {
    if missing_fuse() {
        return;
    }
    let tally = clean(Part::Cuts, &options(STORES * 16, &[]).each(16));
    assert_eq!(tally.figure("states"), STORES * 16);
}

#[test]
fn a_file_system_that_drops_syncs_is_detected() {
    if !missing_fuse() {
        found(Part::Cuts, &options(96, &[Store::Raw]));
    }
}

#[test]
fn failing_calls_make_no_answer_untrue() {
    if !missing_fuse() {
        let tally = clean(Part::Faults, &options(120, &[]));
        assert!(tally.figure("fired") > 30, "{tally}");
        // The first durable write of a store fails, so no later write succeeds; all calls fail for a while.
        for seed in [126, 20, 38] {
            clean(Part::Faults, &Options { seed, ..options(1, &[Store::Snapshot]) });
        }
    }
}

#[test]
fn hostile_clients_delay_no_other_client() {
    let time = std::time::Instant::now() + std::time::Duration::from_secs(4);
    let tally = clean(Part::Clients, &Options { until: Some(time), ..options(1000, &[]) });
    assert!(tally.figure("kinds") >= 50, "{tally}");
    found(Part::Clients, &options(1, &[]));
}

#[test]
fn the_client_survives_hostile_servers() {
    clean(Part::Servers, &options(8, &[]));
    found(Part::Servers, &options(1, &[]));
}

#[test]
fn changed_sessions_are_closed() {
    clean(Part::Sessions, &options(2000, &[]));
    found(Part::Sessions, &options(100, &[]));
}

#[test]
fn changed_files_are_refused_or_served() {
    clean(Part::Images, &options(80, &[]));
    found(Part::Images, &options(40, &[]));
}
