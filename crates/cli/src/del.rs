//! `del`: drains, flushes and removes devices.

use crate::args::DelArgs;
use crate::failure::Failure;
use crate::listing::{block_on, client_of, devices, run_dir};
use crate::progress::shown;
use crate::recover;
use attach::loop_device::orphaned_files;
use attach::{loop_device, nbd_device};
use engine::control::{ClientError, ControlClient};
use engine::rundir::RunDir;
use engine::spec::DeviceName;
use std::collections::HashSet;
use std::process::ExitCode;

pub(crate) fn del(args: &DelArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("del")?;
    let (mut served, mut failures) = (Vec::new(), Vec::new());
    if args.all {
        let found = block_on("del", devices(&run))?.map_err(|why| Failure::new("del", "", why))?;
        served.extend(found.into_iter().map(|(client, info)| (client, info.name)));
    }
    let mut seen = HashSet::new();
    for name in args.names.iter().filter(|name| seen.insert(*name)) {
        match client_of(&run, "del", name) {
            Ok(client) => served.push((client, name.clone())),
            Err(missing) => {
                let cleared = recover::clear(&run, name, args.force);
                let cleared = cleared.unwrap_or_else(|| clear_left_behind(&run, name, missing));
                failures.extend(cleared.err());
            }
        }
    }
    failures.extend(in_passes(served, |(client, name)| remove(client, name, args.force)));
    // A device that cannot be removed does not prevent the removal of the others.
    failures.into_iter().reduce(Failure::and).map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Removes devices of which some may use others: a device in use is tried again after others were removed.
/// Returns the errors of those that are left.
fn in_passes<T, E>(mut left: Vec<T>, mut remove: impl FnMut(&T) -> Result<(), E>) -> Vec<E> {
    loop {
        let (count, mut failures) = (left.len(), Vec::new());
        left.retain(|one| match remove(one) {
            Ok(()) => false,
            Err(why) => {
                failures.push(why);
                true
            }
        });
        if left.is_empty() || left.len() == count {
            return failures;
        }
    }
}

/// Removes a device that is being served.
fn remove(client: &ControlClient, name: &str, by_force: bool) -> Result<(), Failure> {
    let deleted = block_on("del", shown(&format!("draining {name}"), delete(client, name, by_force)))?;
    deleted.map_err(|why| Failure::new("del", name, why))
}

async fn delete(client: &ControlClient, name: &str, by_force: bool) -> Result<(), ClientError> {
    if by_force { client.delete_by_force(name).await } else { client.delete(name).await }
}

/// Removes the loop or nbd device that a dead server left under `name`; returns `missing` if there is none.
pub(crate) fn clear_left_behind(run: &RunDir, name: &str, missing: Failure) -> Result<ExitCode, Failure> {
    let Ok(device) = name.parse::<DeviceName>() else { return Err(missing) };
    let files = orphaned_files(run, name);
    if files.is_empty() {
        return match nbd_device::remove_orphan(name) {
            Ok(Some(_)) => Ok(ExitCode::SUCCESS),
            Ok(None) => Err(missing),
            Err(why) => Err(Failure::new("del", name, why)),
        };
    }
    // While the name is claimed, no other process can start to serve it.
    let _claim = run.claim(&device).map_err(|why| Failure::new("del", name, why))?;
    let left = files.iter().flat_map(|file| loop_device::remove_orphan(file)).map(|why| {
        Failure::new(
            "del",
            name,
            format!("{why} (stop its users: the device is removed when the last one closes it)"),
        )
    });
    left.reduce(Failure::and).map_or(Ok(ExitCode::SUCCESS), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_below_others_are_removed_after_them() {
        // Each number uses the one below it; 7 is used by a client.
        let mut present = vec![1, 2, 3, 7];
        let failures = in_passes(present.clone(), |&one| {
            if one == 7 || present.contains(&(one + 1)) {
                return Err(one);
            }
            present.retain(|other| *other != one);
            Ok(())
        });
        assert_eq!((failures, present), (vec![7], vec![7]));
    }
}
