//! What is done to each device: fio jobs.

use std::path::Path;

use super::subjects::{Device, Site};
use crate::error::{Error, Result};
use crate::fio;
use crate::tools::run;

/// One kind of load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Its name in tables and on the command line.
    pub(super) name: &'static str,
    /// What it does to a device itself; empty for the one that needs a file system.
    words: &'static [&'static str],
}

/// All of them, in the order of a round.
pub(super) const JOBS: &[Job] = &[
    Job { name: "randread-32", words: &["--rw=randread", "--iodepth=32", "--numjobs=1"] },
    Job { name: "randwrite-32", words: &["--rw=randwrite", "--iodepth=32", "--numjobs=1"] },
    Job { name: "randread-1", words: &["--rw=randread", "--iodepth=1", "--numjobs=1"] },
    Job { name: "read-128k", words: &["--rw=read", "--bs=128k", "--iodepth=8", "--numjobs=1"] },
    // Four writers and readers over eight files each, in a file system.
    Job { name: "randrw-files", words: &[] },
];

impl Job {
    /// Whether it needs a file system, and so a device that keeps what is written.
    pub(super) fn needs_files(&self) -> bool {
        self.words.is_empty()
    }

    /// Runs it once.
    pub(super) fn run(&self, device: &Device, site: &Site, seconds: u32) -> Result<fio::Run> {
        let base = ["fio", "--name=job", "--ioengine=libaio", "--direct=1", "--bs=4k", "--time_based"];
        let more = ["--group_reporting", "--output-format=json", "--randrepeat=0", "--norandommap"];
        let runtime = format!("--runtime={seconds}");
        let mut words: Vec<&str> = [&base[..], &more[..], &[&runtime]].concat();
        let node = device.node.to_string_lossy();
        if !self.needs_files() {
            let (file, size) = (format!("--filename={node}"), format!("--size={}", site.size));
            words.extend(self.words);
            words.extend([file.as_str(), size.as_str()]);
            return fio::run(&words, device.server);
        }
        let mount = site.folder.join("mnt");
        std::fs::create_dir_all(&mount).map_err(|error| Error(format!("{}: {error}", mount.display())))?;
        let at = mount.to_string_lossy();
        run(&["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", &node])?;
        run(&["mount", &node, &at])?;
        // Four jobs share three quarters of the device.
        let (folder, size) = (format!("--directory={at}"), format!("--size={}", site.size / 16 * 3));
        words.extend([
            "--rw=randrw",
            "--nrfiles=8",
            "--iodepth=16",
            "--overwrite=1",
            "--numjobs=4",
            &folder,
            &size,
        ]);
        let sample = fio::run(&words, device.server);
        run(&["umount", &at])?;
        sample
    }
}

/// What a device's queue says, for the report.
pub(super) fn facts(device: &Device) -> String {
    let read = |name: &str| {
        let text = std::fs::read_to_string(Path::new("/sys/block").join(device.name()).join(name));
        text.unwrap_or_default().trim().to_owned()
    };
    let queues = std::fs::read_dir(format!("/sys/block/{}/mq", device.name())).map_or(0, Iterator::count);
    format!("{queues} queues, scheduler {}", read("queue/scheduler"))
}
