//! `./x bench rbd`: an image of a Ceph cluster over NBD, compared with qemu-nbd's and with rbd-nbd where the kernel has
//! its driver; fio's own rbd engine is the limit.
//!
//! Each round runs the jobs and, in each job, the subjects, beginning with another one every time. Each
//! subject has its own image, and none has a cache in librbd: the cache is off by default in our backend,
//! and with it fio would write to memory. A figure is the median of the rounds; a ratio is the median of
//! the rounds' own ratios.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::figures::{median, ratio, spread};
use crate::fio::{self, Run};
use crate::options::{chosen, command, count, each, number};
use crate::{proc, realtime, tools};

const USAGE: &str = "\
usage: ./x bench rbd [OPTIONS]
  --rounds N       (5)      --seconds S   of each measurement (3)
  --subjects NAMES fio,blockyard,qemu-nbd,rbd-nbd (all that work here)
  --depths LIST    requests in flight (1,32)
  --mib N          size of each image in MiB (64)
  --conf FILE      the cluster's configuration ($CEPH_CONF)
";

/// Bytes of a request.
const BLOCK: &str = "4k";
/// Time limit for a server to start.
const START: Duration = Duration::from_secs(20);

/// The program through which an image is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Subject {
    /// fio's rbd engine: librbd without a server.
    Limit,
    /// Our server, over NBD.
    Blockyard,
    /// qemu-nbd with QEMU's rbd driver.
    Qemu,
    /// The kernel's nbd driver over rbd-nbd.
    RbdNbd,
}

const SUBJECTS: [Subject; 4] = [Subject::Limit, Subject::Blockyard, Subject::Qemu, Subject::RbdNbd];

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Subject::Limit => "fio rbd",
            Subject::Blockyard => "blockyard",
            Subject::Qemu => "qemu-nbd",
            Subject::RbdNbd => "rbd-nbd",
        }
    }

    fn image(self) -> String {
        format!("bench-{}", self.name().replace(' ', "-"))
    }

    /// Returns why the subject cannot be measured here; `None` if it can.
    fn obstacle(self) -> Option<&'static str> {
        let has =
            |arguments: &[&str], part: &str| tools::output(arguments).is_ok_and(|text| text.contains(part));
        match self {
            Subject::Limit if !has(&["fio", "--enghelp"], "\trbd") => Some("fio has no rbd engine"),
            Subject::Blockyard if !has(&["fio", "--enghelp"], "\tnbd") => Some("fio has no nbd engine"),
            Subject::Qemu if !has(&["qemu-img", "--help"], " rbd") => {
                Some("qemu has no rbd driver (package qemu-block-extra)")
            }
            Subject::RbdNbd if !Path::new("/dev/nbd0").exists() => {
                Some("there is no /dev/nbd0 (load the kernel's module nbd)")
            }
            Subject::RbdNbd if tools::output(&["rbd-nbd", "--version"]).is_err() => {
                Some("rbd-nbd is not installed")
            }
            _ => None,
        }
    }
}

#[derive(Clone)]
struct Options {
    rounds: usize,
    seconds: f64,
    subjects: Vec<Subject>,
    depths: Vec<u32>,
    mib: u32,
    conf: PathBuf,
}

/// A load.
#[derive(Clone, Copy)]
struct Job {
    rw: &'static str,
    depth: u32,
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    realtime::enter("rbd", arguments);
    command("rbd", USAGE, arguments, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let conf = std::env::var_os("CEPH_CONF").map_or("/etc/ceph/ceph.conf".into(), PathBuf::from);
    let mut options =
        Options { rounds: 5, seconds: 3.0, subjects: SUBJECTS.to_vec(), depths: vec![1, 32], mib: 64, conf };
    each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = count(name, value)? as usize,
            "--seconds" => options.seconds = number(name, value)?,
            "--subjects" => options.subjects = chosen(name, value, &SUBJECTS, |one| one.name())?,
            "--depths" => {
                options.depths = value.split(',').map(|word| count(name, word)).collect::<Result<_>>()?;
            }
            "--mib" => options.mib = count(name, value)?,
            "--conf" => options.conf = value.into(),
            _ => return Err(Error(format!("no such option: {name}"))),
        }
        Ok(())
    })?;
    Ok(options)
}

/// A subject that can be measured. Dropping it ends its server and removes its image.
struct Ready {
    subject: Subject,
    server: Option<Child>,
    /// fio's options to reach the subject.
    target: Vec<String>,
    device: Option<String>,
}

impl Drop for Ready {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            let _ = tools::run(&["rbd-nbd", "unmap", device]);
        }
        if let Some(server) = &mut self.server {
            let pid = server.id().to_string();
            let _ = tools::run(&["kill", &pid]);
            let _ = server.wait();
        }
        let _ = tools::run(&["rbd", "rm", "--no-progress", &format!("rbd/{}", self.subject.image())]);
    }
}

impl Ready {
    fn start(subject: Subject, options: &Options, folder: &Path) -> Result<Ready> {
        let (image, socket) = (subject.image(), folder.join(format!("{}.sock", subject.image())));
        let place = format!("rbd/{image}");
        let _ = tools::run(&["rbd", "rm", "--no-progress", &place]);
        tools::run(&["rbd", "create", "--size", &format!("{}M", options.mib), &place])?;
        let mut ready = Ready { subject, server: None, target: Vec::new(), device: None };
        let uri = |export: &str| {
            vec![
                "--ioengine=nbd".to_owned(),
                format!("--uri=nbd+unix:///{export}?socket={}", socket.display()),
            ]
        };
        match subject {
            Subject::Limit => {
                let rbd = ["--ioengine=rbd", "--clientname=admin", "--pool=rbd"].map(str::to_owned);
                ready.target = [&rbd[..], &[format!("--rbdname={image}")]].concat();
            }
            Subject::Blockyard => {
                let mut command = Command::new(own_binary()?);
                let stack = format!("rbd:{place},conf={}", options.conf.display());
                command.args(["serve", &stack, "--name", "disk"]);
                command.args(["--nbd", &format!("unix:{}", socket.display())]);
                command.env("BLOCKYARD_RUN", folder.join("run"));
                (ready.server, ready.target) = (Some(spawn(&mut command)?), uri("disk"));
            }
            Subject::Qemu => {
                let mut command = Command::new("qemu-nbd");
                command.args(["-t", "-f", "raw", "--cache=none", "-x", "disk", "-k"]).arg(&socket);
                command.arg(format!("rbd:{place}:conf={}", options.conf.display()));
                (ready.server, ready.target) = (Some(spawn(&mut command)?), uri("disk"));
            }
            Subject::RbdNbd => {
                let device = tools::output(&["rbd-nbd", "map", &place])?.trim().to_owned();
                ready.target = ["--ioengine=libaio", "--direct=1"].map(str::to_owned).to_vec();
                ready.target.push(format!("--filename={device}"));
                ready.device = Some(device);
            }
        }
        let started = Instant::now();
        while ready.server.is_some() && !socket.exists() {
            if started.elapsed() > START {
                return Err(Error(format!("{} does not get ready", subject.name())));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        // An unmeasured write allocates the objects of the image.
        let fill = ["--rw=write", "--bs=1M", "--iodepth=8"].map(str::to_owned);
        ready.fio(options, &fill)?;
        Ok(ready)
    }

    fn fio(&self, options: &Options, arguments: &[String]) -> Result<Run> {
        let size = format!("--size={}M", options.mib);
        let conf = format!("CEPH_CONF={}", options.conf.display());
        let mut all: Vec<&str> = vec!["env", &conf, "fio", "--name=rbd", "--output-format=json", &size];
        all.extend(self.target.iter().chain(arguments).map(String::as_str));
        fio::run(&all, self.server.as_ref().map(Child::id))
    }

    /// Runs a job; returns fio's report, and the processor time of the server's own threads for each request.
    fn measure(&self, options: &Options, job: Job) -> Result<(Run, Option<f64>)> {
        let words = [
            format!("--rw={}", job.rw),
            format!("--bs={BLOCK}"),
            format!("--iodepth={}", job.depth),
            "--time_based".to_owned(),
            format!("--runtime={}", options.seconds),
        ];
        let own = || match (&self.server, self.subject) {
            (Some(server), Subject::Blockyard) => {
                let cpu = proc::cpu_of_threads_named(server.id(), "reactor");
                cpu.map(Some).map_err(|error| Error(format!("/proc: {error}")))
            }
            _ => Ok(None),
        };
        let before = own()?;
        let run = self.fio(options, &words)?;
        let used = own()?.zip(before).map(|(after, before)| after.saturating_sub(before));
        Ok((run, used.map(|used| used.as_secs_f64() * 1e6 / run.requests.max(1.0))))
    }
}

fn own_binary() -> Result<PathBuf> {
    match std::env::var_os("BLOCKYARD_BIN") {
        Some(path) => Ok(path.into()),
        None => {
            let own = std::env::current_exe().map_err(Error::at(Path::new("the bench itself")))?;
            Ok(own.with_file_name("blockyard"))
        }
    }
}

fn spawn(command: &mut Command) -> Result<Child> {
    let program = PathBuf::from(command.get_program());
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().map_err(Error::at(&program))
}

/// The figures of a subject in a job, a value for each round.
#[derive(Default)]
struct Series {
    rate: Vec<f64>,
    p99_us: Vec<f64>,
    machine_us: Vec<f64>,
    server_us: Vec<f64>,
    own_us: Vec<f64>,
}

fn run(options: &Options) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("blockyard-rbd.{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
    let conf = folder.join("ceph.conf");
    let text = std::fs::read_to_string(&options.conf).map_err(Error::at(&options.conf))?;
    std::fs::write(&conf, format!("{text}\n[client]\nrbd cache = false\n")).map_err(Error::at(&conf))?;
    let measured = measure(&Options { conf, ..options.clone() }, &folder);
    let _ = std::fs::remove_dir_all(folder);
    measured
}

fn measure(options: &Options, folder: &Path) -> Result<()> {
    let mut subjects = Vec::new();
    for &subject in &options.subjects {
        match subject.obstacle() {
            Some(why) => eprintln!("{}: left out: {why}", subject.name()),
            None => subjects.push(Ready::start(subject, options, folder)?),
        }
    }
    let depths = options.depths.iter();
    let jobs: Vec<Job> =
        depths.flat_map(|&depth| ["randread", "randwrite"].map(|rw| Job { rw, depth })).collect();
    let mut series: Vec<Vec<Series>> =
        jobs.iter().map(|_| subjects.iter().map(|_| Series::default()).collect()).collect();
    for round in 0..options.rounds {
        for (job, row) in jobs.iter().zip(&mut series) {
            for turn in 0..subjects.len() {
                let at = (turn + round) % subjects.len();
                let (run, own_us) = subjects[at].measure(options, *job)?;
                row[at].rate.push(run.rate);
                row[at].p99_us.push(run.p99_us);
                row[at].machine_us.push(run.machine_us);
                row[at].server_us.extend(run.server_us);
                row[at].own_us.extend(own_us);
            }
        }
    }
    println!("{}", table(&jobs, &subjects, &series));
    Ok(())
}

fn table(jobs: &[Job], subjects: &[Ready], series: &[Vec<Series>]) -> String {
    let mut text =
        "| job | subject | IOPS | least to greatest | to fio rbd | to qemu-nbd | p99, us | machine, us \
        | server, us | own threads, us |\n|---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    let at = |subject: Subject| subjects.iter().position(|ready| ready.subject == subject);
    for (job, row) in jobs.iter().zip(series) {
        let to = |own: &Series, peer: Option<usize>| match peer {
            Some(peer) => format!("{:.2}", ratio(&own.rate, &row[peer].rate)),
            None => "–".to_owned(),
        };
        let some = |values: &[f64]| match values {
            [] => "–".to_owned(),
            values => format!("{:.1}", median(values)),
        };
        for (ready, own) in subjects.iter().zip(row) {
            let (least, rate, greatest) = spread(&own.rate);
            let _ = writeln!(
                text,
                "| {}, depth {} | {} | {rate:.0} | {least:.0} to {greatest:.0} | {} | {} | {:.0} | {:.0} | {} | {} |",
                job.rw,
                job.depth,
                ready.subject.name(),
                to(own, at(Subject::Limit)),
                to(own, at(Subject::Qemu)),
                median(&own.p99_us),
                median(&own.machine_us),
                some(&own.server_us),
                some(&own.own_us),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn subjects_and_depths_are_selected() {
        let options = parsed("--subjects fio,blockyard --depths 1,8 --mib 16").expect("it is valid");
        assert_eq!(options.subjects, [Subject::Limit, Subject::Blockyard]);
        assert_eq!((options.depths, options.mib), (vec![1, 8], 16));
    }

    #[test]
    fn bad_options_are_refused() {
        for line in ["--depths 0", "--subjects krbd", "--no-such 1", "--rounds 0"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
