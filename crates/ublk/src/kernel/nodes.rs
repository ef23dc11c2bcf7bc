//! Device nodes, which devtmpfs or udev creates after the driver has answered, and waiting for them.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Interval of retries: devtmpfs takes less time, udev a few times as much.
const PAUSE: Duration = Duration::from_millis(1);
/// Directory in which the kernel lists the character devices of the driver.
const CLASS: &str = "/sys/class/ublk-char";

/// Returns the path of the character device, for the server.
pub fn char_path(device: u32) -> String {
    format!("/dev/ublkc{device}")
}

/// Returns the path of the block device, for its users.
pub fn block_path(device: u32) -> String {
    format!("/dev/ublkb{device}")
}

/// Opens a character device. It is busy while its last server is being cleaned up.
pub(super) fn open_char(device: u32, limit: Duration) -> io::Result<OwnedFd> {
    let path = char_path(device);
    retried(
        limit,
        |error| {
            // udev may not have changed the node's owner yet.
            error.kind() == io::ErrorKind::NotFound
                || error.kind() == io::ErrorKind::PermissionDenied
                || error.raw_os_error() == Some(libc::EBUSY)
        },
        || OpenOptions::new().read(true).write(true).open(&path).map(OwnedFd::from),
    )
}

/// Waits until a character device may be opened, without opening it: the driver would treat a close as the
/// death of the server.
pub(super) fn await_owned(device: u32, limit: Duration) -> io::Result<()> {
    use rustix::fs::{Access, access};
    let path = char_path(device);
    retried(
        limit,
        |error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied),
        || Ok(access(&path, Access::READ_OK | Access::WRITE_OK)?),
    )
}

/// Waits for a node.
pub(super) fn await_node(path: &Path, limit: Duration) -> io::Result<()> {
    retried(limit, |error| error.kind() == io::ErrorKind::NotFound, || fs::metadata(path).map(drop))
}

/// Retries a call until it succeeds, fails for another reason, or the time limit is exceeded.
fn retried<T>(
    limit: Duration,
    again: impl Fn(&io::Error) -> bool,
    mut attempt: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let started = Instant::now();
    loop {
        match attempt() {
            Err(error) if again(&error) && started.elapsed() < limit => std::thread::sleep(PAUSE),
            ended => return ended,
        }
    }
}

/// Returns the numbers of all devices; without sysfs, only of those that have nodes.
pub(super) fn devices() -> Vec<u32> {
    let numbers = |folder: &str| -> Vec<u32> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok();
        entries.filter_map(number).collect()
    };
    let mut all = if Path::new(CLASS).exists() { numbers(CLASS) } else { numbers("/dev") };
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_when_the_node_appears() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node");
        let made = path.clone();
        let maker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            fs::write(made, "").unwrap();
        });
        await_node(&path, Duration::from_secs(10)).unwrap();
        maker.join().unwrap();
    }

    #[test]
    fn waiting_for_a_node_ends_at_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let missing = await_node(&folder.path().join("node"), Duration::from_millis(5));
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
