//! One look at everything: all devices of all processes, each with what it counted and how its paths are.
//!
//! Every process is asked at once, and given a second and a little for each of its devices. One that does not answer by
//! then is told of as silent, one that is gone is not there: neither keeps the others from being shown.

use engine::control::{ClientError, ControlClient, ControlError, DeviceInfo, DeviceStats};
use engine::path_status::PathStatus;
use engine::rundir::RunDir;
use engine::tables::TableCall;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// How long a process may take to say which devices it has, and then to tell of them.
const PATIENCE: Duration = Duration::from_secs(1);
/// How much longer for each of them: they are asked for one after the other.
const EACH: Duration = Duration::from_millis(100);

/// One device as it was found.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) info: DeviceInfo,
    pub(super) stats: DeviceStats,
    /// Of multipath tables.
    pub(super) paths: Vec<PathStatus>,
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
        asking.spawn(async move { process(socket, &wanted).await });
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

async fn process(socket: PathBuf, wanted: &[String]) -> Answer {
    let client = ControlClient::new(&socket);
    let found: Result<Vec<Sample>, Option<ClientError>> = async {
        let mut devices = timeout(PATIENCE, client.devices()).await.map_err(|_| None)??;
        devices.retain(|info| wanted.is_empty() || wanted.contains(&info.name));
        let patience = PATIENCE + EACH * u32::try_from(devices.len()).unwrap_or(u32::MAX);
        Ok(timeout(patience, samples(&client, devices, &socket)).await.map_err(|_| None)??)
    }
    .await;
    match found {
        Ok(samples) => Answer::Devices(samples),
        // Where its queue of callers is full it is there, and does not answer.
        Err(Some(ClientError::Connect { source, .. })) if source.kind() != ErrorKind::WouldBlock => {
            Answer::Gone
        }
        // Too late, if there is no error.
        Err(_) => Answer::Silent(socket),
    }
}

async fn samples(
    client: &ControlClient,
    devices: Vec<DeviceInfo>,
    socket: &Path,
) -> Result<Vec<Sample>, ClientError> {
    let mut samples = Vec::with_capacity(devices.len());
    for info in devices {
        let stats = match client.stats(&info.name).await {
            Ok(stats) => stats,
            // It went between the two questions.
            Err(ClientError::Refused(ControlError::NotFound)) => continue,
            Err(why) => return Err(why),
        };
        let paths =
            if info.backend.contains_key("multipath") { paths(client, &info.name).await } else { vec![] };
        samples.push(Sample { info, stats, paths, socket: socket.to_owned() });
    }
    Ok(samples)
}

/// The paths of a device; none while its table is being changed.
async fn paths(client: &ControlClient, name: &str) -> Vec<PathStatus> {
    let answer = client.table(name, &TableCall::Status).await;
    answer.map(|answer| answer.targets.iter().flat_map(PathStatus::of).collect()).unwrap_or_default()
}
