//! A worker's device and the check that runs on it, state by state.

use super::command::{Environment, Outcome, run, tail};
use super::device::{BlockKind, Device, Mounted};
use super::state::Shared;
use crash::{State, View};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of marks in an environment variable at most; the kernel permits 128 KiB a variable.
const MARKS_MAX: usize = 64 << 10;

/// How many times the deadline a check gets that was late before: on a busy machine, where a check of many
/// processes waits for a processor most of the time, it would be a finding otherwise.
const LATE_DEADLINES: u32 = 3;

/// What all workers have in common.
#[derive(Clone, Debug)]
pub(super) struct Check {
    pub(super) command: String,
    /// Where it runs; `None`: here.
    pub(super) dir: Option<PathBuf>,
    pub(super) deadline: Duration,
    /// The state is mounted before the command runs.
    pub(super) mounts: bool,
    /// The type of the file system, if it is known.
    pub(super) fs: Option<String>,
    /// The kind of block device; `None`: a file.
    pub(super) block: Option<BlockKind>,
}

/// The result of one check.
#[derive(Clone, Debug)]
pub(super) struct Checked {
    pub(super) outcome: Outcome,
    pub(super) output: String,
    /// The chunks of the state that were read.
    pub(super) read: Vec<u64>,
}

/// A device with the check's environment.
pub(super) struct Checker {
    check: Check,
    view: Arc<View>,
    slot: Shared,
    device: Option<Device>,
    dir: PathBuf,
    output: File,
    /// Devices created so far; each has a name of its own.
    devices: u32,
    marks_written: usize,
}

impl Checker {
    /// Creates the device of a worker in its own directory.
    pub(super) fn new(check: Check, view: Arc<View>, dir: &Path) -> Result<Checker, String> {
        let failed = |why: std::io::Error| format!("{}: {why}", dir.display());
        std::fs::create_dir_all(dir.join("mnt")).map_err(failed)?;
        let options = File::options().read(true).append(true).create(true).open(dir.join("output"));
        let mut checker = Checker {
            slot: Shared::new(view.clone(), dir),
            check,
            view,
            device: None,
            dir: dir.to_owned(),
            output: options.map_err(failed)?,
            devices: 0,
            marks_written: usize::MAX,
        };
        checker.device()?;
        Ok(checker)
    }

    /// Returns the path of the device; creates it if the last was given up.
    pub(super) fn device(&mut self) -> Result<PathBuf, String> {
        if let Some(device) = &self.device {
            return Ok(device.path().to_owned());
        }
        self.devices += 1;
        let path = self.dir.join(format!("dev{}", self.devices));
        self.slot = Shared::new(self.view.clone(), &self.dir);
        let device = Device::start(&path, self.view.size(), self.check.block, self.slot.clone())?;
        let path = device.path().to_owned();
        self.device = Some(device);
        Ok(path)
    }

    /// Makes a state the device's content.
    pub(super) fn set(&mut self, state: &State) -> Result<PathBuf, String> {
        let path = self.device()?;
        self.slot.set(state);
        if let Some(device) = &self.device {
            device.forget()?;
        }
        // The kernel may have written cached pages of the previous state meanwhile: the state is set again.
        self.slot.set(state);
        Ok(path)
    }

    /// Returns the end of the output of the last check.
    pub(super) fn output(&self) -> String {
        tail(&self.output)
    }

    /// Returns the longest time of a check.
    pub(super) const fn deadline(&self) -> Duration {
        self.check.deadline
    }

    /// Returns where the file system is mounted.
    pub(super) fn mount_point(&self) -> PathBuf {
        self.dir.join("mnt")
    }

    /// Mounts the device.
    pub(super) fn mount(&self, device: &Path) -> Result<Mounted, String> {
        Mounted::new(device, &self.mount_point(), self.check.fs.as_deref())
    }

    /// Checks a state within the deadline of the check.
    pub(super) fn check(&mut self, state: &State, name: &str) -> Result<Checked, String> {
        self.check_within(state, name, self.check.deadline)
    }

    /// Checks a state within the time that a check gets which was late before.
    pub(super) fn check_patiently(&mut self, state: &State, name: &str) -> Result<Checked, String> {
        self.check_within(state, name, self.check.deadline.saturating_mul(LATE_DEADLINES))
    }

    fn check_within(&mut self, state: &State, name: &str, deadline: Duration) -> Result<Checked, String> {
        let device = self.set(state)?;
        self.output.set_len(0).map_err(|why| why.to_string())?;
        let mut environment = self.environment(state, name)?;
        environment.push(("DEV", device.clone().into_os_string()));
        let mut mounted = None;
        if self.check.mounts {
            match self.mount(&device) {
                Ok(mount) => mounted = Some(mount),
                Err(why) => {
                    let outcome =
                        Outcome::Failed("could not begin: the file system does not mount".to_owned());
                    return Ok(Checked { outcome, output: why, read: self.slot.take_read() });
                }
            }
            environment.push(("MNT", self.mount_point().into_os_string()));
        }
        let outcome =
            run(&self.check.command, &environment, Some(deadline), &self.output, self.check.dir.as_deref());
        let kept = mounted.map_or(Ok(()), Mounted::unmount);
        let read = self.slot.take_read();
        if kept.is_err() {
            // A process still uses the mount, so the next state needs another device.
            self.device = None;
        }
        let outcome = outcome?;
        let output = if outcome == Outcome::Passed { String::new() } else { tail(&self.output) };
        Ok(Checked { outcome, output, read })
    }

    fn environment(&mut self, state: &State, name: &str) -> Result<Environment, String> {
        let marks = self.view.log().marks_before(state.cut);
        let file = self.dir.join("marks");
        if self.marks_written != marks.len() {
            let lines: String = marks.iter().flat_map(|mark| [mark.text.as_str(), "\n"]).collect();
            std::fs::write(&file, lines).map_err(|why| format!("{}: {why}", file.display()))?;
            self.marks_written = marks.len();
        }
        // The last ones, as far as they fit.
        let mut room = MARKS_MAX;
        let fits = |mark: &&crash::Mark| {
            let fits = mark.text.len() < room;
            room = room.saturating_sub(mark.text.len() + 1);
            fits
        };
        let mut last: Vec<&str> =
            marks.iter().rev().take_while(fits).map(|mark| mark.text.as_str()).collect();
        last.reverse();
        Ok(vec![
            ("CRASH_STATE", name.into()),
            ("CRASH_MARKS", last.join("\n").into()),
            ("CRASH_MARKS_FILE", file.into_os_string()),
            ("CRASH_MARK", last.last().copied().unwrap_or_default().into()),
        ])
    }
}
