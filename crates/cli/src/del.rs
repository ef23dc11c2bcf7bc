//! `del`: drain, flush, remove.

use crate::args::DelArgs;
use crate::failure::Failure;
use crate::listing::{block_on, client_of, devices, run_dir};
use crate::progress::shown;
use engine::control::{ClientError, ControlClient};
use std::process::ExitCode;

pub(crate) fn del(args: &DelArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("del")?;
    let targets: Vec<(ControlClient, String)> = match &args.name {
        Some(name) => vec![(client_of(&run, "del", name)?, name.clone())],
        None => {
            let found = block_on("del", devices(&run))?.map_err(|why| Failure::new("del", "", why))?;
            found.into_iter().map(|(client, info)| (client, info.name)).collect()
        }
    };
    // One that cannot be removed does not keep the others.
    let failures = block_on("del", async {
        let mut failures = Vec::new();
        for (client, name) in &targets {
            if let Err(why) = shown(&format!("draining {name}"), delete(client, name)).await {
                failures.push(Failure::new("del", name, why));
            }
        }
        failures
    })?;
    match failures.into_iter().reduce(Failure::and) {
        None => Ok(ExitCode::SUCCESS),
        Some(failure) => Err(failure),
    }
}

async fn delete(client: &ControlClient, name: &str) -> Result<(), ClientError> {
    client.delete(name).await
}
