//! `blockyard crash` with ublk devices, for the workload and for the crash states.

use super::super::{Done, Test, test};
use super::{driver, remove};
use crate::server::Sandbox;
use crate::tools::run_within;
use std::time::Duration;

/// The tests of this module.
pub(super) const TESTS: &[Test] = &[test(
    "ublk/crash",
    "blockyard crash records and checks on ublk devices where the kernel has ublk",
    crash,
)];

const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the numbers of all existing ublk devices.
fn devices() -> Vec<u32> {
    let entries = std::fs::read_dir("/dev").expect("/dev").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.strip_prefix("ublkb")?.parse().ok()).collect()
}

fn crash() -> Done {
    driver()?;
    let sandbox = Sandbox::default();
    let is_ublk = "case $DEV in /dev/ublkb*) ;; *) echo $DEV; exit 9 ;; esac";
    let workload = format!("{is_ublk}; echo data > $MNT/a; echo written >&3");
    let check = format!("{is_ublk}; test -z \"$CRASH_MARK\" || test -s $MNT/a || {{ echo lost; exit 1; }}");
    let mut command = sandbox.blockyard(&["crash", "--fs", "ext4", "--size", "8M", "--json", "--jobs", "1"]);
    command.args(["--workload", &workload, "--check", &check, "--states", "8", "--findings", "1"]);
    // `crash` selects the export as `serve` does; the tests' override is removed.
    command.env_remove("BLOCKYARD_EXPORT").current_dir(sandbox.path("."));
    let outcome = run_within(&mut command, PATIENCE);
    let summary: serde_json::Value =
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|why| panic!("{why}: {outcome:?}"));
    assert_eq!(summary["findings"][0]["output"], "lost\n", "{summary:#}");
    assert!(summary["flushes"].as_u64() > Some(1), "{summary:#}");
    let left = devices();
    for number in &left {
        remove(*number);
    }
    assert!(left.is_empty(), "devices that were left: {left:?}");
    Ok(())
}
