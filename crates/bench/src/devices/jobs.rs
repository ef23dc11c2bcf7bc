//! What is done to each device: fio jobs, and what they cost.
//!
//! The cost is that of the whole machine, fio and the kernel's own threads included, and that of the server's process
//! where there is one. Both come from /proc, in ticks of 10 ms, so a run must not be shorter than a second.

use std::path::Path;

use serde_json::Value;

use super::subjects::{Device, Site, output, run};
use super::{Error, Result};
use crate::proc;

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

/// What one run measured.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// Requests a second.
    pub(super) rate: f64,
    /// Latency that half of the requests do not exceed, and 99 of 100.
    pub(super) p50_us: f64,
    /// The same for 99 of 100.
    pub(super) p99_us: f64,
    /// The machine's processor time for a request.
    pub(super) machine_us: f64,
    /// The server's.
    pub(super) server_us: Option<f64>,
}

impl Job {
    /// Whether it needs a file system, and so a device that keeps what is written.
    pub(super) fn needs_files(&self) -> bool {
        self.words.is_empty()
    }

    /// Runs it once.
    pub(super) fn run(&self, device: &Device, site: &Site, seconds: u32) -> Result<Sample> {
        let base = ["fio", "--name=job", "--ioengine=libaio", "--direct=1", "--bs=4k", "--time_based"];
        let more = ["--group_reporting", "--output-format=json", "--randrepeat=0", "--norandommap"];
        let runtime = format!("--runtime={seconds}");
        let mut words: Vec<&str> = [&base[..], &more[..], &[&runtime]].concat();
        let node = device.node.to_string_lossy();
        if !self.needs_files() {
            let (file, size) = (format!("--filename={node}"), format!("--size={}", site.size));
            words.extend(self.words);
            words.extend([file.as_str(), size.as_str()]);
            return measured(&words, device);
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
        let sample = measured(&words, device);
        run(&["umount", &at])?;
        sample
    }
}

fn measured(words: &[&str], device: &Device) -> Result<Sample> {
    let proc_error = |error: std::io::Error| Error(format!("/proc: {error}"));
    let server = |pid: Option<u32>| pid.map(proc::cpu_of_process).transpose().map_err(proc_error);
    let (machine, own) = (proc::machine().map_err(proc_error)?, server(device.server)?);
    let text = output(words)?;
    let (machine_after, own_after) = (proc::machine().map_err(proc_error)?, server(device.server)?);
    let (count, mut sample) = parse(&text)?;
    let each = |time: std::time::Duration| time.as_secs_f64() * 1e6 / count.max(1.0);
    sample.machine_us = each(machine_after.busy.saturating_sub(machine.busy));
    sample.server_us = own.zip(own_after).map(|(before, after)| each(after.saturating_sub(before)));
    Ok(sample)
}

/// Reads fio's report: how many requests there were, and of the sample what fio knows.
fn parse(text: &str) -> Result<(f64, Sample)> {
    // fio may say something before the report.
    let start = text.find('{').ok_or_else(|| Error("fio: no report".into()))?;
    let report: Value =
        serde_json::from_str(&text[start..]).map_err(|error| Error(format!("fio: {error}")))?;
    let job = report["jobs"].get(0).ok_or_else(|| Error("fio: a report without a job".into()))?;
    let error = job["error"].as_i64().unwrap_or(0);
    if error != 0 {
        return Err(Error(format!("fio: error {error}")));
    }
    let number = |side: &str, path: &str| job[side].pointer(path).and_then(Value::as_f64).unwrap_or(0.0);
    let both = |path: &str| number("read", path) + number("write", path);
    // The side with more requests speaks for the latency.
    let side = if number("read", "/total_ios") >= number("write", "/total_ios") { "read" } else { "write" };
    let percentile = |name: &str| number(side, &format!("/clat_ns/percentile/{name}")) / 1000.0;
    let (p50_us, p99_us) = (percentile("50.000000"), percentile("99.000000"));
    Ok((both("/total_ios"), Sample { rate: both("/iops"), p50_us, p99_us, ..Sample::default() }))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_fio_is_read() {
        let text = r#"note: something
            {"jobs":[{"error":0,
              "read":{"total_ios":300,"iops":100.5,"clat_ns":{"percentile":{"50.000000":1500,"99.000000":9000}}},
              "write":{"total_ios":100,"iops":50.0,"clat_ns":{}}}]}"#;
        let (count, sample) = parse(text).expect("it is one");
        assert_eq!((count, sample.rate, sample.p50_us, sample.p99_us), (400.0, 150.5, 1.5, 9.0));
    }

    #[test]
    fn a_failed_job_is_an_error() {
        assert!(parse(r#"{"jobs":[{"error":5}]}"#).is_err());
        assert!(parse("fio: no such file").is_err());
    }
}
