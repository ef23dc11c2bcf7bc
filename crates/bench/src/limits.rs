//! `./x bench limits`: the experiment on queue limits: one device, alternately with the old defaults and
//! without limits.
//!
//! A RAM disk of 5 MiB is served by NBD once and stays. Two jobs of fio write 2 MiB of it repeatedly in
//! requests of 1 MiB. Each round measures the device without limits and with 255 sectors and 128 segments of
//! 64 KiB, which are set and reset while it is served, in alternating order. The figures are those of
//! `blockyard stat -x`, in iostat's columns, over one interval within fio's run.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::figures::{ratio, spread};
use crate::options::{command, count, each};
use crate::{fio, tools};

/// Defaults of the block layer for drivers without limits: `BLK_SAFE_MAX_SECTORS`, `BLK_MAX_SEGMENTS`,
/// `BLK_MAX_SEGMENT_SIZE`.
const DEFAULTS: [&str; 4] =
    ["max_sectors=255", "max_segments=128", "max_segment_size=64K", "physical_block_size=512"];
/// Time limit for the server to start.
const START: Duration = Duration::from_secs(20);

const USAGE: &str = "\
usage: ./x bench limits [OPTIONS]
  --rounds N   (9)    --seconds N  of each measurement (3): 2 * N * (SECONDS + 2) seconds in all
  --dir PATH          where the socket is for the time being
  --csv FILE          a line for each measurement
";

/// The reported columns: their name in `stat`'s report, in ours, and the divisor.
const COLUMNS: [(&str, &str, f64); 6] = [
    ("w/s", "w/s", 1.0),
    ("wkB/s", "wMB/s", 1024.0),
    ("wareq-sz", "request, sectors", 0.5),
    ("w_await", "w_await, ms", 1.0),
    ("aqu-sz", "aqu-sz", 1.0),
    ("util", "%util", 1.0),
];

struct Options {
    rounds: usize,
    seconds: u32,
    folder: PathBuf,
    csv: Option<PathBuf>,
}

/// The measurements of one configuration: rounds of each column, then fio's MiB/s and its median latency.
#[derive(Default)]
struct Series {
    columns: [Vec<f64>; COLUMNS.len()],
    fio_mib: Vec<f64>,
    fio_p50_us: Vec<f64>,
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    command("limits", USAGE, arguments, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options { rounds: 9, seconds: 3, folder: std::env::temp_dir(), csv: None };
    each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = count(name, value)? as usize,
            "--seconds" => options.seconds = count(name, value)?,
            "--dir" => options.folder = value.into(),
            "--csv" => options.csv = Some(value.into()),
            _ => return Err(Error(format!("no such option: {name}"))),
        }
        Ok(())
    })?;
    Ok(options)
}

/// Returns the program beside this one.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(|error| Error(format!("this program: {error}")))?;
    Ok(own.with_file_name("blockyard"))
}

/// The server; it ends, and its folder is removed, when this is dropped.
struct Server {
    child: Child,
    program: PathBuf,
    folder: PathBuf,
    socket: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Server {
    /// Starts it in a folder of its own within `base`.
    fn start(base: &Path) -> Result<Server> {
        let folder = base.join(format!("blockyard-limits.{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
        let (program, socket) = (program()?, folder.join("limits.sock"));
        let child = Command::new(&program)
            .args(["serve", "ram:5M", "--name", "limits", "--queues", "1", "--nbd"])
            .arg(format!("unix:{}", socket.display()))
            .env("BLOCKYARD_RUN", folder.join("run"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let child = child.map_err(Error::at(&program))?;
        let server = Server { child, program, folder, socket };
        let started = Instant::now();
        while std::os::unix::net::UnixStream::connect(&server.socket).is_err() {
            if started.elapsed() > START {
                return Err(Error("the server did not start".into()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).env("BLOCKYARD_RUN", self.folder.join("run"));
        command
    }

    fn set(&self, limits: &[&str]) -> Result<()> {
        let words = [&["limits", "limits", "--reset"], limits].concat();
        let printed = self.command(&words).output().map_err(Error::at(&self.program))?;
        match printed.status.success() {
            true => Ok(()),
            false => Err(Error(String::from_utf8_lossy(&printed.stderr).trim().to_owned())),
        }
    }

    /// Measures once: fio runs a second longer on both sides of `stat`'s interval.
    fn measure(&self, seconds: u32, series: &mut Series) -> Result<()> {
        let uri = format!("--uri=nbd+unix:///limits?socket={}", self.socket.display());
        let runtime = format!("--runtime={}", seconds + 2);
        let words = [
            "fio",
            "--name=write",
            "--ioengine=nbd",
            &uri,
            "--rw=write",
            "--bs=1m",
            "--size=2m",
            "--iodepth=1",
            "--numjobs=2",
            "--time_based",
            &runtime,
            "--group_reporting",
            "--output-format=json",
        ];
        let (run, report) = std::thread::scope(|scope| {
            let fio = scope.spawn(|| fio::run(&words, None));
            std::thread::sleep(Duration::from_secs(1));
            let interval = seconds.to_string();
            let report = self.command(&["stat", "-x", "limits", &interval, "2", "--json"]).output();
            (fio.join().unwrap_or_else(|_| Err(Error("fio's thread panicked".into()))), report)
        });
        let (run, report) = (run?, report.map_err(Error::at(&self.program))?);
        let text = String::from_utf8_lossy(&report.stdout);
        let last = text.lines().last().unwrap_or_default();
        let report: Value = serde_json::from_str(last).map_err(|error| Error(format!("stat: {error}")))?;
        for ((name, _, scale), values) in COLUMNS.iter().zip(&mut series.columns) {
            let value = report["disk"][0][name].as_f64();
            values.push(value.ok_or_else(|| Error(format!("stat does not tell {name}")))? / scale);
        }
        series.fio_mib.push(run.bytes / f64::from(1 << 20));
        series.fio_p50_us.push(run.p50_us);
        Ok(())
    }
}

fn run(options: &Options) -> Result<()> {
    tools::run(&["fio", "--version"])?;
    let server = Server::start(&options.folder)?;
    let (mut whole, mut split) = (Series::default(), Series::default());
    for round in 0..options.rounds {
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                server.set(&[])?;
                server.measure(options.seconds, &mut whole)?;
            } else {
                server.set(&DEFAULTS)?;
                server.measure(options.seconds, &mut split)?;
            }
        }
        eprintln!("round {} of {}", round + 1, options.rounds);
    }
    print!("{}", report(&split, &whole));
    if let Some(path) = &options.csv {
        std::fs::write(path, csv(&split, &whole)).map_err(Error::at(path))?;
    }
    Ok(())
}

/// Returns every measurement on a line: requests a second, bytes a second, sectors of a request, its time in
/// milliseconds, requests in flight, and the device's busy time in percent.
fn csv(split: &Series, whole: &Series) -> String {
    let mut text = "subject,job,round,iops,bytes,sectors,wait_ms,in_flight,util\n".to_owned();
    for (subject, series) in [("limits", split), ("no-limits", whole)] {
        let [requests, _, sectors, wait_ms, in_flight, util] = &series.columns;
        for round in 0..requests.len() {
            let bytes = series.fio_mib[round] * f64::from(1 << 20);
            text += &format!(
                "{subject},write,{round},{:.1},{bytes:.0},{:.1},{:.4},{:.3},{:.2}\n",
                requests[round], sectors[round], wait_ms[round], in_flight[round], util[round]
            );
        }
    }
    text
}

fn cell(values: &[f64]) -> String {
    let (least, median, greatest) = spread(values);
    format!("{median:.2} ({least:.2}..{greatest:.2})")
}

fn report(split: &Series, whole: &Series) -> String {
    let mut text =
        "| | 255 sectors, 128 segments | no limits | no limits : limits |\n|---|---|---|---|\n".to_owned();
    let mut row = |name: &str, split: &[f64], whole: &[f64]| {
        text += &format!("| {name} | {} | {} | {:.2} |\n", cell(split), cell(whole), ratio(whole, split));
    };
    for (i, (_, name, _)) in COLUMNS.iter().enumerate() {
        row(name, &split.columns[i], &whole.columns[i]);
    }
    row("fio MiB/s", &split.fio_mib, &whole.fio_mib);
    row("fio median, us", &split.fio_p50_us, &whole.fio_p50_us);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_a_row_for_each_column() {
        let mut series = [Series::default(), Series::default()];
        for (series, factor) in series.iter_mut().zip([1.0, 2.0]) {
            series.columns.iter_mut().for_each(|column| column.push(4.0 * factor));
            series.fio_mib.push(factor);
            series.fio_p50_us.push(factor);
        }
        let text = report(&series[0], &series[1]);
        assert_eq!(text.lines().count(), 2 + COLUMNS.len() + 2);
        assert!(text.contains("| w_await, ms | 4.00 (4.00..4.00) | 8.00 (8.00..8.00) | 2.00 |"), "{text}");
        assert_eq!(
            csv(&series[0], &series[1]).lines().nth(2),
            Some("no-limits,write,0,8.0,2097152,8.0,8.0000,8.000,8.00")
        );
        assert!(parse(&["--rounds".into(), "0".into()]).is_err());
    }
}
