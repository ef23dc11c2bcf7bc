//! Runs one guest: boots a kernel with an archive, shows the job's output, watches the console.
//!
//! *Invariants:* no process outlives [`run`]: the emulator has its own process group, which is killed however
//! the run ends. The job's exit status counts only if the guest itself has reported it.

use super::console::{Finding, Watcher};
use super::kernel::{Emulator, Kernel};
use super::process::quiet;
use super::{at, make_folder};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Resources of a guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of processors.
    pub cpus: u32,
    /// Memory in MiB, including all file systems except the job's devices.
    pub memory_mib: u32,
    /// Time limit.
    pub limit: Duration,
    /// Additional arguments for the kernel's command line.
    pub append: String,
    /// An image of a disk, `/dev/vda`, that keeps what is written; emulated kernels only.
    pub disk: Option<PathBuf>,
    /// Interactive, with a terminal instead of a log.
    pub shell: bool,
}

/// How a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The job exited with this status.
    Exited(u8),
    /// The job exceeded its time limit.
    TimedOut,
    /// The kernel panicked.
    Died,
    /// The guest ended without a status.
    Vanished,
}

/// Result of a run.
#[derive(Debug)]
pub struct Report {
    /// How it ended.
    pub end: End,
    /// Kernel messages that fail the run.
    pub findings: Vec<Finding>,
    /// The last lines of the console.
    pub tail: Vec<String>,
    /// Duration.
    pub took: Duration,
}

/// Exit status of a run that exceeded its time limit. This and the following statuses replace the job's
/// own.
pub const TIMED_OUT: u8 = 124;
/// The kernel reported a problem, whatever the job's status.
pub const TROUBLE: u8 = 125;
/// The guest ended without a status.
pub const VANISHED: u8 = 126;

impl Report {
    /// The exit status of the run.
    pub fn status(&self) -> u8 {
        match self.end {
            End::TimedOut => TIMED_OUT,
            End::Died => TROUBLE,
            _ if !self.findings.is_empty() => TROUBLE,
            End::Exited(status) => status,
            End::Vanished => VANISHED,
        }
    }

    /// Describes what went wrong; empty if nothing did.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            text.push_str(&format!("guest: {finding}\n"));
        }
        match self.end {
            End::Exited(_) => {}
            End::TimedOut => text.push_str(&format!("guest: timed out after {} s\n", self.took.as_secs())),
            End::Died => text.push_str("guest: the kernel died\n"),
            End::Vanished => text.push_str("guest: it ended without an exit status\n"),
        }
        if !text.is_empty() {
            text.push_str("guest: the end of the console:\n");
            for line in &self.tail {
                text.push_str(&format!("    {line}\n"));
            }
        }
        text
    }
}

/// Lines of the console in a report.
const TAIL: usize = 40;
/// Polling interval of logs.
const PAUSE: Duration = Duration::from_millis(30);
/// Time for a guest to power off, or to print a panic.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Time after which a guest whose first program has not started is ended, and booted again. A boot takes 3 to 6 s
/// on an idle machine; on a busy one an emulated kernel once printed nothing at all for 800 s.
const BOOT_MAX: Duration = Duration::from_secs(90);
/// Number of boots. The last one has until the end of the job.
const BOOTS: u32 = 2;

/// Boots `kernel` with the archive `initrd`; logs go to `folder`, the job's files to its subdirectory `out`.
///
/// # Errors
/// The guest could not be started, or its logs could not be read. Problems in the guest are in the report.
pub fn run(kernel: &Kernel, initrd: &Path, shape: &Shape, folder: &Path) -> Result<Report, String> {
    for _ in 1..BOOTS {
        if let Some(report) = boot(kernel, initrd, shape, folder, Some(BOOT_MAX))? {
            return Ok(report);
        }
        eprintln!("guest: it was not up after {} s, and is booted again", BOOT_MAX.as_secs());
    }
    let report = boot(kernel, initrd, shape, folder, None)?;
    report.ok_or_else(|| "the guest did not boot".into())
}

/// Boots once. Returns `None` if the guest's first program has not started after `boot_max`.
fn boot(
    kernel: &Kernel,
    initrd: &Path,
    shape: &Shape,
    folder: &Path,
    boot_max: Option<Duration>,
) -> Result<Option<Report>, String> {
    let started = Instant::now();
    let (console_path, job_path) = (folder.join("console.log"), folder.join("job.log"));
    for path in [&console_path, &job_path] {
        at(path, "making", File::create(path))?;
    }
    let mut command = match kernel {
        Kernel::Emulated { image, emulator, .. } => emulated(image, emulator, initrd, shape, folder),
        Kernel::UserMode { program } => user_mode(program, initrd, shape, folder, &console_path, &job_path)?,
    };
    if shape.shell {
        command.stdin(Stdio::inherit());
    } else {
        command.stdin(Stdio::null()).process_group(0);
    }
    let child =
        command.spawn().map_err(|error| format!("starting {:?} failed: {error}", command.get_program()))?;
    let mut group = Group { child, is_group: !shape.shell };
    let mut console = at(&console_path, "opening", File::open(&console_path))?;
    let mut job = at(&job_path, "opening", File::open(&job_path))?;
    let mut watcher = Watcher::default();
    let mut last_words: Option<Instant> = None;
    let mut is_late = false;
    loop {
        let has_ended = !matches!(group.child.try_wait(), Ok(None));
        watcher.feed(&fresh(&mut console));
        show(&fresh(&mut job));
        if has_ended || last_words.is_some_and(|at| at.elapsed() > LAST_WORDS) {
            break;
        }
        is_late = started.elapsed() > shape.limit && !shape.shell;
        if is_late {
            break;
        }
        if boot_max.is_some_and(|max| started.elapsed() > max) && !watcher.is_up && !shape.shell {
            return Ok(None);
        }
        if watcher.is_dead || watcher.is_done {
            last_words.get_or_insert_with(Instant::now);
        }
        std::thread::sleep(PAUSE);
    }
    drop(group);
    watcher.feed(&fresh(&mut console));
    show(&fresh(&mut job));
    let status = unpack(folder)?;
    let end = match status {
        Some(status) => End::Exited(status),
        None if watcher.is_dead => End::Died,
        None if is_late => End::TimedOut,
        None => End::Vanished,
    };
    let tail = watcher.tail(TAIL).to_vec();
    Ok(Some(Report { end, findings: watcher.findings, tail, took: started.elapsed() }))
}

/// A process group; dropping it kills all of its processes.
struct Group {
    child: Child,
    is_group: bool,
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.is_group {
            // Members may outlive the first process; usually there are none.
            let group = format!("-{}", self.child.id());
            let _ = quiet(Command::new("kill").args(["-KILL", "--", &group]));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The bytes appended to a log since the last call; read errors are retried with the next call.
fn fresh(log: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = log.read_to_end(&mut bytes);
    bytes
}

/// Errors are ignored: a closed terminal must not end a run.
fn show(bytes: &[u8]) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}

/// Kernel command line for both kinds of kernel. Emulation is slow, so watchdogs have long timeouts.
fn append(shape: &Shape, terminal: &str) -> String {
    let (seconds, more) = (shape.limit.as_secs(), &shape.append);
    let shell = if shape.shell { " GUEST_SHELL=1" } else { "" };
    let ci = if std::env::var_os("CI").is_some() { " GUEST_CI=true" } else { "" };
    format!(
        "quiet printk.time=1 panic=-1 oops=panic rdinit=/init rcupdate.rcu_cpu_stall_timeout=60 \
         GUEST_JOB={terminal} GUEST_SECONDS={seconds}{shell}{ci} {more}"
    )
}

/// The emulated processor. Newer models have five levels of page tables and wide vectors, which the C
/// library prefers but emulation runs slowly: on the newest model the suite takes twice the processor time.
const PROCESSOR: &str = "Nehalem-v1";

fn emulated(image: &Path, emulator: &Emulator, initrd: &Path, shape: &Shape, folder: &Path) -> Command {
    let mut command = Command::new(&emulator.program);
    if let Some(root) = &emulator.root {
        for place in ["usr/share/qemu", "usr/share/seabios"] {
            command.arg("-L").arg(root.join(place));
        }
        command.args(["-L", "/usr/share/seabios", "-L", "/usr/share/qemu"]);
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        command.env("LD_LIBRARY_PATH", &libraries).env("QEMU_MODULE_DIR", libraries.join("qemu"));
    }
    command.args([
        "-M",
        "q35",
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        PROCESSOR,
        "-nodefaults",
        "-no-user-config",
    ]);
    command.args(["-display", "none", "-no-reboot"]);
    command.args(["-smp", &shape.cpus.to_string(), "-m", &shape.memory_mib.to_string()]);
    command.arg("-kernel").arg(image).arg("-initrd").arg(initrd);
    let terminal = if shape.shell { "ttyS0" } else { "ttyS1" };
    command.args([
        "-append",
        &format!("console=ttyS0 mitigations=off watchdog_thresh=30 {}", append(shape, terminal)),
    ]);
    let file = |name: &str| format!("file:{}", folder.join(name).display());
    command.args(["-serial", &if shape.shell { "mon:stdio".into() } else { file("console.log") }]);
    command.args(["-serial", &file("job.log")]);
    if let Some(disk) = &shape.disk {
        command.arg("-drive").arg(format!("file={},format=raw,if=virtio,cache=unsafe", disk.display()));
    }
    let out = format!("file,id=out,path={}", folder.join("out.tar").display());
    command.args(["-device", "virtio-serial-pci", "-chardev", &out]);
    command.args(["-device", "virtserialport,chardev=out,name=out"]);
    if !shape.shell {
        let log = File::create(folder.join("emulator.log"));
        if let Ok((stdout, stderr)) = log.and_then(|log| Ok((log.try_clone()?, log))) {
            command.stdout(stdout).stderr(stderr);
        }
    }
    command
}

fn user_mode(
    program: &Path,
    initrd: &Path,
    shape: &Shape,
    folder: &Path,
    console: &Path,
    job: &Path,
) -> Result<Command, String> {
    if shape.shell {
        return Err("a shell needs an emulated kernel: --kernel newest".into());
    }
    let append_to = |path: &Path| at(path, "opening", File::options().append(true).open(path));
    let mut command = Command::new(program);
    // The guest's memory is a file; in /dev/shm it does not wear out a disk.
    command.env("TMPDIR", "/dev/shm").env("HOME", folder);
    command.arg(format!("mem={}M", shape.memory_mib)).arg(format!("initrd={}", initrd.display()));
    command.args(["seccomp=on", "con=null", "con0=null,fd:1", "ssl0=null,fd:2", "null_blk.nr_devices=0"]);
    command.args(["scsi_debug.add_host=0", &format!("ncpus={}", shape.cpus)]);
    command.arg(format!("GUEST_OUT={}", folder.display()));
    command.args(append(shape, "ttyS0").split_whitespace());
    command.stdout(append_to(console)?).stderr(append_to(job)?);
    Ok(command)
}

/// Unpacks the guest's results to `folder/out`; returns the job's status, if present.
fn unpack(folder: &Path) -> Result<Option<u8>, String> {
    let (archive, out) = (folder.join("out.tar"), folder.join("out"));
    make_folder(&out)?;
    if std::fs::metadata(&archive).is_ok_and(|metadata| metadata.len() > 0) {
        // A truncated archive is unpacked as far as possible; without a status it does not count as success.
        let _ = quiet(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&out));
        at(&archive, "removing", std::fs::remove_file(&archive))?;
    }
    let status = std::fs::read_to_string(out.join(".status")).ok();
    Ok(status.and_then(|text| text.trim().parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(end: End, findings: &[(&'static str, &str)]) -> Report {
        let findings = findings.iter().map(|(name, line)| Finding { name, line: (*line).into() }).collect();
        Report { end, findings, tail: vec!["last line".into()], took: Duration::from_secs(9) }
    }

    #[test]
    fn the_run_has_the_status_of_the_job() {
        assert_eq!(report(End::Exited(0), &[]).status(), 0);
        assert_eq!(report(End::Exited(7), &[]).status(), 7);
        assert_eq!(report(End::Exited(0), &[]).text(), "");
    }

    #[test]
    fn a_finding_fails_a_job_that_succeeded_and_is_named() {
        let report =
            report(End::Exited(0), &[("hung task", "INFO: task fio:1 blocked for more than 30 seconds.")]);
        assert_eq!(report.status(), TROUBLE);
        assert!(report.text().contains("guest: hung task: INFO: task fio:1"), "{}", report.text());
        assert!(report.text().contains("last line"));
    }

    #[test]
    fn other_ends_have_separate_statuses() {
        assert_eq!(report(End::TimedOut, &[]).status(), TIMED_OUT);
        assert_eq!(report(End::Died, &[]).status(), TROUBLE);
        assert_eq!(report(End::Vanished, &[]).status(), VANISHED);
        assert!(report(End::TimedOut, &[]).text().contains("timed out after 9 s"));
    }

    #[test]
    fn a_job_without_a_status_is_no_success() {
        let folder = std::env::temp_dir().join(format!("blockyard-boot-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("out")).expect("a folder");
        assert_eq!(unpack(&folder), Ok(None));
        std::fs::write(folder.join("out/.status"), "3\n").expect("a file");
        assert_eq!(unpack(&folder), Ok(Some(3)));
        std::fs::remove_dir_all(&folder).expect("it exists");
    }
}
