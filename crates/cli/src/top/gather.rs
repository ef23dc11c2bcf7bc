//! One look at everything: all devices of all processes, each with what it counted and how its paths are.
//!
//! Every process is asked at once and given a second. One that does not answer by then is told of as silent, one that
//! is gone is not there: neither keeps the others from being shown.

use super::paths::{PathState, paths_of};
use engine::control::{ClientError, ControlClient, ControlError, DeviceInfo, DeviceStats};
use engine::rundir::RunDir;
use engine::tables::TableCall;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// How long a process may take for all of its devices.
const PATIENCE: Duration = Duration::from_secs(1);

/// One device as it was found.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) info: DeviceInfo,
    pub(super) stats: DeviceStats,
    /// Of multipath tables.
    pub(super) paths: Vec<PathState>,
    /// The control socket of its process.
    pub(super) socket: PathBuf,
}

/// All that was found.
#[derive(Clone, Default, Debug)]
pub(super) struct Look {
    pub(super) samples: Vec<Sample>,
    pub(super) processes: usize,
    /// Control sockets of processes that did not answer.
    pub(super) silent: Vec<PathBuf>,
}

enum Answer {
    Devices(Vec<Sample>),
    Gone,
    Silent(PathBuf),
}

/// Look now, at the devices of these names, or at all if there are none.
pub(super) async fn look(run: &RunDir, wanted: &[String]) -> Look {
    let mut asking = JoinSet::new();
    for socket in run.processes() {
        let wanted = wanted.to_vec();
        asking.spawn(async move {
            match timeout(PATIENCE, process(&socket, &wanted)).await {
                Ok(Ok(samples)) => Answer::Devices(samples),
                // Its queue of callers is full: it is there, and does not answer.
                Ok(Err(ClientError::Connect { source, .. })) if source.kind() != ErrorKind::WouldBlock => {
                    Answer::Gone
                }
                _ => Answer::Silent(socket),
            }
        });
    }
    let mut look = Look::default();
    while let Some(answer) = asking.join_next().await {
        match answer {
            Ok(Answer::Devices(samples)) => {
                look.processes += 1;
                look.samples.extend(samples);
            }
            Ok(Answer::Silent(socket)) => look.silent.push(socket),
            Ok(Answer::Gone) | Err(_) => {}
        }
    }
    look.silent.sort();
    look.samples.sort_by(|a, b| a.info.name.cmp(&b.info.name));
    look
}

async fn process(socket: &Path, wanted: &[String]) -> Result<Vec<Sample>, ClientError> {
    let client = ControlClient::new(socket);
    let mut samples = Vec::new();
    for info in client.devices().await? {
        if !wanted.is_empty() && !wanted.contains(&info.name) {
            continue;
        }
        let stats = match client.stats(&info.name).await {
            Ok(stats) => stats,
            // It went between the two questions.
            Err(ClientError::Refused(ControlError::NotFound)) => continue,
            Err(why) => return Err(why),
        };
        let paths =
            if info.backend.contains_key("multipath") { paths(&client, &info.name).await } else { vec![] };
        samples.push(Sample { info, stats, paths, socket: socket.to_owned() });
    }
    Ok(samples)
}

/// The paths of a device; none while its table is being changed.
async fn paths(client: &ControlClient, name: &str) -> Vec<PathState> {
    let answer = client.table(name, &TableCall::Status).await;
    answer.map(|answer| paths_of(&answer.targets)).unwrap_or_default()
}
