//! The load on each device: fio jobs.

use std::path::Path;

use super::subjects::{Device, Site};
use crate::error::{Error, Result};
use crate::fio;
use crate::tools::run;

/// One kind of load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Name in tables and on the command line.
    pub(super) name: &'static str,
    /// fio's options for the device; empty for the job that needs a file system.
    arguments: &'static [&'static str],
}

/// All jobs, in the order of a round.
pub(super) const JOBS: &[Job] = &[
    Job { name: "randread-32", arguments: &["--rw=randread", "--iodepth=32", "--numjobs=1"] },
    Job { name: "randwrite-32", arguments: &["--rw=randwrite", "--iodepth=32", "--numjobs=1"] },
    Job { name: "randread-1", arguments: &["--rw=randread", "--iodepth=1", "--numjobs=1"] },
    Job { name: "read-128k", arguments: &["--rw=read", "--bs=128k", "--iodepth=8", "--numjobs=1"] },
    // Scaling over processors, each job pinned to one.
    Job {
        name: "pinned-2",
        arguments: &[
            "--rw=randread",
            "--iodepth=32",
            "--numjobs=2",
            "--cpus_allowed=0,1",
            "--cpus_allowed_policy=split",
        ],
    },
    // Large requests, which a device with small limits splits.
    Job { name: "write-1m", arguments: &["--rw=write", "--bs=1m", "--iodepth=1", "--numjobs=2"] },
    // Four writers and readers over eight files each, in a file system.
    Job { name: "randrw-files", arguments: &[] },
];

impl Job {
    /// Returns whether the job needs a file system, and so a device that stores data.
    pub(super) fn needs_files(&self) -> bool {
        self.arguments.is_empty()
    }

    /// Runs the job once, for `seconds`.
    pub(super) fn run(&self, device: &Device, site: &Site, seconds: u32) -> Result<Sample> {
        let base = ["fio", "--name=job", "--ioengine=libaio", "--direct=1", "--bs=4k", "--time_based"];
        let more = ["--group_reporting", "--output-format=json", "--randrepeat=0", "--norandommap"];
        let runtime = format!("--runtime={seconds}");
        let mut arguments: Vec<&str> = [&base[..], &more[..], &[&runtime]].concat();
        let node = device.node.to_string_lossy();
        if !self.needs_files() {
            let (file, size) = (format!("--filename={node}"), format!("--size={}", site.size));
            arguments.extend(self.arguments);
            arguments.extend([file.as_str(), size.as_str()]);
            return measured(&arguments, device);
        }
        let mount = site.folder.join("mnt");
        std::fs::create_dir_all(&mount).map_err(|error| Error(format!("{}: {error}", mount.display())))?;
        let at = mount.to_string_lossy();
        run(&["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", &node])?;
        run(&["mount", &node, &at])?;
        // Four jobs share three quarters of the device.
        let (folder, size) = (format!("--directory={at}"), format!("--size={}", site.size / 16 * 3));
        arguments.extend([
            "--rw=randrw",
            "--nrfiles=8",
            "--iodepth=16",
            "--overwrite=1",
            "--numjobs=4",
            &folder,
            &size,
        ]);
        let sample = measured(&arguments, device);
        run(&["umount", &at])?;
        sample
    }
}

/// The measurements of one run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) run: fio::Run,
    /// Requests that the device completed for each MiB.
    pub(super) requests_per_mib: f64,
    /// Mean time of a request in the device and its queues, in milliseconds.
    pub(super) wait_ms: f64,
}

/// Completed requests, sectors and milliseconds, of reads and writes together. Source:
/// Documentation/admin-guide/iostats.rst.
fn counters(device: &Device) -> Result<[f64; 3]> {
    let path = Path::new("/sys/block").join(device.name()).join("stat");
    let text = std::fs::read_to_string(&path).map_err(Error::at(&path))?;
    let fields: Vec<f64> = text.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let both = |at: usize| fields.get(at).zip(fields.get(at + 4)).map(|(read, write)| read + write);
    match (both(0), both(2), both(3)) {
        (Some(requests), Some(sectors), Some(time)) => Ok([requests, sectors, time]),
        _ => Err(Error(format!("{}: too few fields", path.display()))),
    }
}

fn measured(arguments: &[&str], device: &Device) -> Result<Sample> {
    let before = counters(device)?;
    let run = fio::run(arguments, device.server)?;
    let after = counters(device)?;
    let [requests, sectors, time_ms] = [0, 1, 2].map(|at| after[at] - before[at]);
    Ok(Sample {
        run,
        requests_per_mib: requests / (sectors / 2048.0).max(f64::MIN_POSITIVE),
        wait_ms: time_ms / requests.max(1.0),
    })
}

/// Returns attributes of a device's queue, for the report.
pub(super) fn facts(device: &Device) -> String {
    let read = |name: &str| {
        let text = std::fs::read_to_string(Path::new("/sys/block").join(device.name()).join(name));
        text.unwrap_or_default().trim().to_owned()
    };
    let queues = std::fs::read_dir(format!("/sys/block/{}/mq", device.name())).map_or(0, Iterator::count);
    format!("{queues} queues, scheduler {}", read("queue/scheduler"))
}
