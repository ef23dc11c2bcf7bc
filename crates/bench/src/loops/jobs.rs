//! What is done to each device: fio jobs, and what they cost the whole machine.

use std::time::Duration;

use serde_json::Value;

use super::subjects::{Running, output};
use super::{Error, Result};
use crate::proc;

/// One kind of load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// Its name in tables and on the command line.
    pub(super) name: &'static str,
    /// What it does to files in a file system of its own.
    words: &'static [&'static str],
}

/// Jobs alike share their files, which are laid out once.
const ONE: &str = "--filename=one";
const MANY: &str = "--filename_format=many.$jobnum.$filenum";

/// What a disk did when the loop driver moved to blk-mq: one job, 64 under way.
macro_rules! deep {
    ($name:literal, $rw:literal $(, $more:literal)?) => {
        Job {
            name: $name,
            words: &[$rw, "--bs=4k", "--iodepth=64", "--numjobs=1", "--size=256M", ONE $(, $more)?],
        }
    };
}

/// And when it moved to direct I/O: 4 jobs, one request each.
macro_rules! plain {
    ($name:literal, $rw:literal $(, $more:literal)?) => {
        Job {
            name: $name,
            words: &[
                $rw, "--bs=4k", "--ioengine=psync", "--numjobs=4", "--nrfiles=8", MANY, "--size=200M"
                $(, $more)?
            ],
        }
    };
}

/// All of them: the jobs of the loop driver's own history, and large requests in order.
pub(super) const JOBS: &[Job] = &[
    Job {
        name: "files-randrw",
        words: &[
            "--rw=randrw",
            "--bs=4k",
            "--iodepth=16",
            "--numjobs=4",
            "--nrfiles=8",
            MANY,
            "--size=200M",
            "--overwrite=1",
        ],
    },
    deep!("randread-64", "--rw=randread"),
    deep!("read-64", "--rw=read"),
    deep!("randwrite-64", "--rw=randwrite", "--overwrite=1"),
    deep!("write-64", "--rw=write", "--overwrite=1"),
    plain!("randread-psync-4", "--rw=randread"),
    plain!("read-psync-4", "--rw=read"),
    plain!("randwrite-psync-4", "--rw=randwrite", "--overwrite=1"),
    plain!("write-psync-4", "--rw=write", "--overwrite=1"),
    Job {
        name: "read-1m",
        words: &["--rw=read", "--bs=1m", "--iodepth=4", "--numjobs=1", "--size=256M", ONE],
    },
    Job {
        name: "write-1m",
        words: &["--rw=write", "--bs=1m", "--iodepth=4", "--numjobs=1", "--size=256M", ONE, "--overwrite=1"],
    },
];

/// What one run measured.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// Requests a second.
    pub(super) rate: f64,
    /// Bytes a second.
    pub(super) bytes: f64,
    /// Latency that 99 of 100 do not exceed, of the reads or else of the writes.
    pub(super) p99_us: f64,
    /// The machine's processor time for a request, fio and everything else included.
    pub(super) machine_us: f64,
    /// The server's.
    pub(super) server_us: Option<f64>,
    /// Switches of the whole machine for a request.
    pub(super) switches: f64,
    /// What the page cache has grown by during the run, less what tmpfs itself holds, in MiB.
    pub(super) cached_mib: f64,
}

impl Job {
    /// Runs it once, on files that the first run lays out.
    pub(super) fn run(&self, on: &Running, time: Duration) -> Result<Sample> {
        let folder = format!("--directory={}", on.mount.display());
        let runtime = format!("--runtime={}", time.as_secs());
        let name = format!("--name={}", self.name);
        let mut words =
            vec!["fio", &name, &folder, &runtime, "--direct=1", "--time_based", "--group_reporting"];
        words.extend(["--output-format=json", "--randrepeat=0", "--norandommap"]);
        if !self.words.iter().any(|word| word.starts_with("--ioengine")) {
            words.push("--ioengine=libaio");
        }
        words.extend(self.words);
        let fail = |error: std::io::Error| Error(format!("/proc: {error}"));
        if !on.mount.join(format!("{}.laid", self.name)).exists() {
            let mut lay: Vec<&str> = words.clone();
            lay.extend(["--create_only=1"]);
            output(&lay)?;
            std::fs::write(on.mount.join(format!("{}.laid", self.name)), "").map_err(fail)?;
        }
        let look = || -> std::io::Result<_> {
            let own = on.server.map(proc::cpu_of_process).transpose()?;
            Ok((proc::machine()?, own, switches()?, cached_kib()?))
        };
        let before = look().map_err(fail)?;
        let text = output(&words)?;
        let after = look().map_err(fail)?;
        let (count, mut sample) = parse(&text)?;
        let each = |time: Duration| time.as_secs_f64() * 1e6 / count.max(1.0);
        sample.machine_us = each(after.0.busy.saturating_sub(before.0.busy));
        sample.server_us = before.1.zip(after.1).map(|(before, after)| each(after.saturating_sub(before)));
        sample.switches = after.2.saturating_sub(before.2) as f64 / count.max(1.0);
        sample.cached_mib = (after.3 - before.3) / 1024.0;
        Ok(sample)
    }
}

fn switches() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let line = text.lines().find_map(|line| line.strip_prefix("ctxt "));
    Ok(line.and_then(|number| number.parse().ok()).unwrap_or(0))
}

/// What the page cache holds that no file in memory is made of.
fn cached_kib() -> std::io::Result<f64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    Ok(field("Cached:") + field("Buffers:") - field("Shmem:"))
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
    let side = if number("read", "/total_ios") >= number("write", "/total_ios") { "read" } else { "write" };
    let p99_us = number(side, "/clat_ns/percentile/99.000000") / 1000.0;
    let (rate, bytes) = (both("/iops"), both("/bw_bytes"));
    Ok((both("/total_ios"), Sample { rate, bytes, p99_us, ..Sample::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_fio_is_read() {
        let text = r#"{"jobs":[{"error":0,
              "read":{"total_ios":300,"iops":100.5,"bw_bytes":4096,"clat_ns":{"percentile":{"99.000000":9000}}},
              "write":{"total_ios":100,"iops":50.0,"bw_bytes":4096,"clat_ns":{}}}]}"#;
        let (count, sample) = parse(text).expect("it is one");
        assert_eq!((count, sample.rate, sample.bytes, sample.p99_us), (400.0, 150.5, 8192.0, 9.0));
        assert!(parse(r#"{"jobs":[{"error":5}]}"#).is_err());
    }
}
