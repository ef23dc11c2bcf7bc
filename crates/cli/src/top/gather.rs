//! A snapshot of all devices of all processes: each device with its counters and the state of its paths.
//!
//! All processes are asked at once, with a time limit of a second and a little more for each device. A
//! process that does not answer in time is reported as silent, and one that has exited is omitted: neither
//! delays the others.

use engine::control::{ClientError, ControlClient, ControlError, DeviceInfo, DeviceStats};
use engine::rundir::RunDir;
use engine::tables::TableCall;
use engine::tables::path_status::PathStatus;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time for a process to list its devices, and again to return their counters.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// Additional time for each device: counters are fetched one after the other.
const ANSWER_TIME_PER_DEVICE: Duration = Duration::from_millis(100);

/// State of one device.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) info: DeviceInfo,
    pub(super) stats: DeviceStats,
    /// Paths of multipath tables.
    pub(super) paths: Vec<PathStatus>,
    /// The control socket of its process.
    pub(super) socket: PathBuf,
}

/// State of all devices.
#[derive(Clone, Default, Debug)]
pub(super) struct Snapshot {
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

/// Takes a snapshot of the named devices, or of all devices if no name is given.
pub(super) async fn snapshot(run: &RunDir, wanted: &[String]) -> Snapshot {
    let mut asking = JoinSet::new();
    for socket in run.processes() {
        let wanted = wanted.to_vec();
        asking.spawn(async move { process(socket, &wanted).await });
    }
    let mut snapshot = Snapshot::default();
    while let Some(answer) = asking.join_next().await {
        match answer {
            Ok(Answer::Devices(samples)) => {
                snapshot.processes += 1;
                snapshot.samples.extend(samples);
            }
            Ok(Answer::Silent(socket)) => snapshot.silent.push(socket),
            Ok(Answer::Gone) | Err(_) => {}
        }
    }
    snapshot.silent.sort();
    snapshot.samples.sort_by(|a, b| a.info.name.cmp(&b.info.name));
    snapshot
}

async fn process(socket: PathBuf, wanted: &[String]) -> Answer {
    let client = ControlClient::new(&socket);
    let found: Result<Vec<Sample>, Option<ClientError>> = async {
        let mut devices = timeout(ANSWER_TIME, client.devices()).await.map_err(|_| None)??;
        devices.retain(|info| wanted.is_empty() || wanted.contains(&info.name));
        let answer_time =
            ANSWER_TIME + ANSWER_TIME_PER_DEVICE * u32::try_from(devices.len()).unwrap_or(u32::MAX);
        Ok(timeout(answer_time, samples(&client, devices, &socket)).await.map_err(|_| None)??)
    }
    .await;
    match found {
        Ok(samples) => Answer::Devices(samples),
        // A full queue of connections means that the process exists but does not answer.
        Err(Some(ClientError::Connect { source, .. })) if source.kind() != ErrorKind::WouldBlock => {
            Answer::Gone
        }
        // The request timed out (`None`) or the connection broke.
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
            // The device was removed after the list was sent.
            Err(ClientError::Refused(ControlError::NotFound)) => continue,
            Err(why) => return Err(why),
        };
        let paths =
            if info.backend.contains_key("multipath") { paths(client, &info.name).await } else { vec![] };
        samples.push(Sample { info, stats, paths, socket: socket.to_owned() });
    }
    Ok(samples)
}

/// Returns the paths of a device; none while its table is being changed.
async fn paths(client: &ControlClient, name: &str) -> Vec<PathStatus> {
    let answer = client.table(name, &TableCall::Status).await;
    answer.map(|answer| answer.targets.iter().flat_map(PathStatus::of).collect()).unwrap_or_default()
}
