//! Recording a workload.

use super::base::Base;
use super::command::{Outcome, run, tail};
use super::device::{BlockKind, Device, Mounted};
use super::marks::{Lines, SOCKET, follow, listen};
use super::recorder::{Recorder, Recording};
use super::save::Run;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// How a workload runs.
pub(super) struct How<'a> {
    pub(super) workload: &'a str,
    pub(super) mounts: bool,
    /// The type of the file system, if it is known.
    pub(super) fs: Option<&'a str>,
    /// The kind of block device; `None`: a file.
    pub(super) block: Option<BlockKind>,
}

/// Records a workload into the log of a run. Unmounting belongs to the recording.
pub(super) fn record(to: &Run, base: &Base, size: u64, how: &How<'_>, work: &Path) -> Result<(), String> {
    let path = to.file(Path::new("log"));
    let failed = |why: std::io::Error| format!("{}: {why}", path.display());
    let log = File::options().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
    let size = size / 512 * 512;
    let recorder = Recorder::new(log, base.source(), size).map_err(failed)?;
    let recorder = Arc::new(Mutex::new(recorder));
    let socket = work.join("marks");
    listen(&socket, recorder.clone()).map_err(|why| format!("{}: {why}", socket.display()))?;
    let device = Device::start(&work.join("dev"), size, how.block, Recording(recorder.clone()))?;
    let output = work.join("output");
    let output = File::options().read(true).append(true).create(true).open(&output).map_err(failed)?;
    let mut environment = vec![
        ("DEV", device.path().as_os_str().to_owned()),
        (SOCKET, socket.into_os_string()),
        ("CRASH_FD", "3".into()),
    ];
    let mounted = if how.mounts {
        let at = work.join("mnt");
        std::fs::create_dir(&at).map_err(|why| format!("{}: {why}", at.display()))?;
        environment.push(("MNT", at.clone().into_os_string()));
        Some(Mounted::new(device.path(), &at, how.fs)?)
    } else {
        None
    };
    let (reader, writer) = std::io::pipe().map_err(|why| why.to_string())?;
    // Opened by its number, the descriptor becomes number 3, which every shell can name.
    let script = format!("exec 3>/dev/fd/{}\n{}", writer.as_raw_fd(), how.workload);
    rustix::io::fcntl_setfd(&writer, rustix::io::FdFlags::empty()).map_err(|why| why.to_string())?;
    let marks = recorder.clone();
    let lines = Lines::new(reader).map_err(|why| why.to_string())?;
    marks.lock().unwrap_or_else(PoisonError::into_inner).read_lines(lines);
    let lines = std::thread::spawn(move || follow(&marks));
    let outcome = run(&script, &environment, None, &output, None)?;
    drop(writer);
    let _ = lines.join();
    if let Some(mounted) = mounted {
        mounted.unmount().map_err(|why| format!("{why} (the workload left a process in it)"))?;
    }
    drop(device);
    let recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(why) = recorder.error() {
        return Err(format!("{}: the log could not be written: {why}", path.display()));
    }
    if let Outcome::Failed(how) = outcome {
        let end = tail(&output);
        let end = end.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no output");
        return Err(format!("the workload {how}: {end} (correct it; nothing was checked)"));
    }
    let (writes, flushes, marks) = recorder.counts();
    eprintln!("recorded {writes} writes, {flushes} flushes, {marks} marks in {}", path.display());
    Ok(())
}
