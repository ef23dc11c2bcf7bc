//! fio's report of a run, and the cost of the run for the machine.
//!
//! The cost covers the whole machine, including fio and kernel threads; a second figure covers the server's
//! process, if there is one. Both come from /proc, in ticks of 10 ms, so a run must last at least a second.

use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::{proc, tools};

/// The result of one run of one job, reads and writes together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Run {
    /// Number of requests.
    pub(crate) requests: f64,
    /// Requests a second.
    pub(crate) rate: f64,
    /// Bytes a second.
    pub(crate) bytes: f64,
    /// Median latency of the reads or the writes, whichever were more.
    pub(crate) p50_us: f64,
    /// 99th percentile of that latency.
    pub(crate) p99_us: f64,
    /// The machine's processor time for a request.
    pub(crate) machine_us: f64,
    /// The server's processor time for a request.
    pub(crate) server_us: Option<f64>,
    /// The machine's context switches for a request.
    pub(crate) switches: f64,
}

/// Runs fio with `words`, which request a report in JSON; `server`: the process that serves the device, if
/// there is one.
pub(crate) fn run(arguments: &[&str], server: Option<u32>) -> Result<Run> {
    let look = || -> std::io::Result<_> {
        let own = server.map(proc::cpu_of_process).transpose()?;
        Ok((proc::machine()?.busy, own, proc::context_switches()?))
    };
    let look = || look().map_err(|error| Error(format!("/proc: {error}")));
    let (machine, own, switches) = look()?;
    let text = tools::output(arguments)?;
    let (machine_after, own_after, switches_after) = look()?;
    let run = parse(&text)?;
    let each =
        |before: Duration, after: Duration| (after - before).as_secs_f64() * 1e6 / run.requests.max(1.0);
    let server_us = own.zip(own_after).map(|(before, after)| each(before, after));
    let switches = switches_after.saturating_sub(switches) as f64 / run.requests.max(1.0);
    Ok(Run { machine_us: each(machine, machine_after), server_us, switches, ..run })
}

fn parse(text: &str) -> Result<Run> {
    // fio may print other text before the report.
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
    let percentile = |name: &str| number(side, &format!("/clat_ns/percentile/{name}")) / 1000.0;
    Ok(Run {
        requests: both("/total_ios"),
        rate: both("/iops"),
        bytes: both("/bw_bytes"),
        p50_us: percentile("50.000000"),
        p99_us: percentile("99.000000"),
        ..Run::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_fio_is_read() {
        let text = r#"note: something
            {"jobs":[{"error":0,
              "read":{"total_ios":300,"iops":100.5,"bw_bytes":4096,
                      "clat_ns":{"percentile":{"50.000000":1500,"99.000000":9000}}},
              "write":{"total_ios":100,"iops":50.0,"bw_bytes":4096,"clat_ns":{}}}]}"#;
        let run = parse(text).expect("it is one");
        assert_eq!((run.requests, run.rate, run.bytes), (400.0, 150.5, 8192.0));
        assert_eq!((run.p50_us, run.p99_us), (1.5, 9.0));
    }

    #[test]
    fn a_failed_job_is_an_error() {
        assert!(parse(r#"{"jobs":[{"error":5}]}"#).is_err());
        assert!(parse("fio: no such file").is_err());
    }
}
