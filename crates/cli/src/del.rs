//! `del`: drain, flush, remove.

use crate::args::DelArgs;
use crate::failure::Failure;
use crate::listing::{block_on, client_of, devices, run_dir};
use crate::progress::shown;
use crate::recover;
use engine::control::{ClientError, ControlClient};
use engine::loop_device::{clear_stale, dead_files};
use engine::nbd_device::remove_orphan;
use engine::rundir::RunDir;
use engine::spec::DeviceName;
use std::collections::HashSet;
use std::process::ExitCode;

pub(crate) fn del(args: &DelArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("del")?;
    let mut outcomes = Vec::new();
    if args.all {
        let found = block_on("del", devices(&run))?.map_err(|why| Failure::new("del", "", why))?;
        outcomes.extend(found.into_iter().map(|(client, info)| remove(&client, &info.name, args.force)));
    }
    let mut seen = HashSet::new();
    for name in args.names.iter().filter(|name| seen.insert(*name)) {
        outcomes.push(match client_of(&run, "del", name) {
            Ok(client) => remove(&client, name, args.force),
            Err(missing) => {
                let cleared = recover::clear(&run, name, args.force);
                cleared.unwrap_or_else(|| clear_left_behind(&run, name, missing))
            }
        });
    }
    // A device that cannot be removed does not keep the others.
    let failures = outcomes.into_iter().filter_map(Result::err);
    failures.reduce(Failure::and).map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Removes a device that is being served.
fn remove(client: &ControlClient, name: &str, by_force: bool) -> Result<ExitCode, Failure> {
    let deleted = block_on("del", shown(&format!("draining {name}"), delete(client, name, by_force)))?;
    deleted.map(|()| ExitCode::SUCCESS).map_err(|why| Failure::new("del", name, why))
}

async fn delete(client: &ControlClient, name: &str, by_force: bool) -> Result<(), ClientError> {
    if by_force { client.delete_by_force(name).await } else { client.delete(name).await }
}

/// Nobody serves it: take away what a server that died left of its loop or nbd device, if anything.
pub(crate) fn clear_left_behind(run: &RunDir, name: &str, missing: Failure) -> Result<ExitCode, Failure> {
    let Ok(device) = name.parse::<DeviceName>() else { return Err(missing) };
    let files = dead_files(run, name);
    if files.is_empty() {
        return match remove_orphan(name) {
            Ok(Some(_)) => Ok(ExitCode::SUCCESS),
            Ok(None) => Err(missing),
            Err(why) => Err(Failure::new("del", name, why)),
        };
    }
    // While we hold its name nobody else can begin to serve it.
    let _claim = run.claim(&device).map_err(|why| Failure::new("del", name, why))?;
    let left = files.iter().flat_map(|file| clear_stale(file)).map(|why| {
        Failure::new("del", name, format!("{why} (end that: the device goes with its last user)"))
    });
    left.reduce(Failure::and).map_or(Ok(ExitCode::SUCCESS), Err)
}
