//! FUSE over io_uring: decides whether requests arrive through io_uring or `/dev/fuse`, and registers the
//! queues.
//!
//! The kernel has one queue for each possible CPU and starts only when every queue has an entry; until then
//! processes that use the file wait. So the reactors divide all queues among themselves.

use super::FuseError;
use engine::device::Device;
use engine::host::Host;
use engine::reactor::Attach;
use exports::fuse::MountState;
use spec::{FuseSpec, OverUring};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Module parameter that enables FUSE over io_uring.
const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
/// List of possible CPUs, as ranges.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// Longest time a reactor may take to register its entries.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest time that a mount may still exist in other mount namespaces after it was unmounted here. The
/// kernel needs less to end all channels.
const OTHER_NAMESPACES_MAX: Duration = Duration::from_secs(1);

/// The transport of FUSE requests: io_uring or `/dev/fuse`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Transport {
    /// Whether io_uring is requested.
    pub(super) wanted: bool,
    /// The reason for `/dev/fuse`; empty if io_uring is used.
    why_not: String,
}

impl Transport {
    /// Falls back to `/dev/fuse` after registration failed.
    pub(super) fn after(why: &str) -> Transport {
        Transport { wanted: false, why_not: format!("they cannot be taken through io_uring: {why}") }
    }

    /// Describes the transport, for `show`.
    pub(super) fn describe(&self, shared: &MountState) -> String {
        match shared.over_io_uring() {
            _ if !self.wanted => format!("through /dev/fuse ({})", self.why_not),
            Ok(true) => "through io_uring".to_owned(),
            Ok(false) => {
                "through /dev/fuse (this kernel lacks FUSE over io_uring: 6.14 and later have it)".to_owned()
            }
            Err(errno) => {
                let why = std::io::Error::from_raw_os_error(errno);
                format!("through /dev/fuse (the kernel refused io_uring: {why})")
            }
        }
    }
}

/// Chooses the transport of a file.
///
/// # Errors
/// `uring=on` was given, and io_uring cannot be used.
pub(super) fn choose(spec: &FuseSpec, host: &Host) -> Result<Transport, FuseError> {
    let why_not = match spec.uring {
        OverUring::Off => Some("uring=off".to_owned()),
        _ => obstacle(spec, host),
    };
    match why_not {
        Some(why) if spec.uring == OverUring::On => Err(FuseError::OverUring(why)),
        why_not => Ok(Transport { wanted: why_not.is_none(), why_not: why_not.unwrap_or_default() }),
    }
}

/// Returns why a file cannot use io_uring; `None` if it can.
fn obstacle(spec: &FuseSpec, host: &Host) -> Option<String> {
    if spec.passthrough {
        return Some("with passthrough few requests are left".to_owned());
    }
    if host.reactors().iter().any(|reactor| reactor.engine().name != "io_uring") {
        return Some("the I/O threads do not run on io_uring".to_owned());
    }
    if !fuse::can_abort() {
        return Some("only root can end a connection whose requests come through io_uring".to_owned());
    }
    match std::fs::read_to_string(PARAMETER) {
        Err(_) => Some("this kernel lacks FUSE over io_uring: 6.14 and later have it".to_owned()),
        Ok(text) if text.trim() != "Y" => {
            Some(format!("FUSE over io_uring is disabled: echo Y > {PARAMETER}"))
        }
        Ok(_) => None,
    }
}

/// Has the reactors register entries for all queues, and waits until each has done so. Does nothing unless
/// the kernel agreed to io_uring.
///
/// # Errors
/// A reactor failed: the mount must be removed, as its users would wait forever.
pub(super) fn register_queues(
    host: &Host,
    device: &Arc<Device>,
    shared: &Arc<MountState>,
) -> Result<(), String> {
    if shared.over_io_uring() != Ok(true) {
        return Ok(());
    }
    let queues = possible(&std::fs::read_to_string(POSSIBLE).unwrap_or_default());
    let reactors = host.reactors().len();
    let (sender, answers) = mpsc::channel();
    for number in 0..reactors {
        let own: Vec<u16> = (0..queues).filter(|queue| usize::from(*queue) % reactors == number).collect();
        let (shared, sender) = (shared.clone(), sender.clone());
        let attach: Attach = Box::new(move |handle, fronts, turn| {
            let at_once = handle.facts.inline || handle.facts.zero_copy_reads;
            let registered = fronts.fuse.enlist(&shared, &own, at_once, turn);
            // The receiver does not exist any more after a timeout.
            let _ = sender.send(registered.map_err(|error| error.to_string()));
        });
        host.attach_to(number, device.clone(), attach);
    }
    drop(sender);
    let deadline = Instant::now() + REGISTER_TIMEOUT;
    for _ in 0..reactors {
        match answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(registered) => registered?,
            Err(RecvTimeoutError::Timeout) => return Err("an I/O thread did not answer in time".to_owned()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err("an I/O thread has no queue for the device".to_owned());
            }
        }
    }
    Ok(())
}

/// Aborts the connection of an unmounted file that other mount namespaces still have. They copied the mount
/// when they were created and keep it alive: processes that use it there would wait forever, and its
/// io_uring entries would stay.
pub(super) fn abort_in_other_namespaces(connection: u32, name: String, shared: Arc<MountState>) {
    let watch = move || {
        let has_ended = shared.wait_for_end(OTHER_NAMESPACES_MAX);
        // If no namespace has the mount any more, the kernel may have given its number to another mount.
        let is_other_device =
            |one: &fuse::Mounted| one.device.1 == connection && one.device_name() != Some(&name);
        if has_ended || fuse::mounts().is_ok_and(|all| all.iter().any(is_other_device)) {
            return;
        }
        match fuse::abort(connection) {
            Ok(()) => {
                tracing::info!(device = name, "the mount was ended in another mount namespace")
            }
            Err(error) => {
                tracing::warn!(device = name, %error, "the file may still be mounted in another mount namespace")
            }
        }
    };
    // Without this thread the mount stays in the other namespaces; the reactors give up its entries after a
    // while.
    let _ = std::thread::Builder::new().name("unmount".to_owned()).spawn(watch);
}

/// Counts the CPUs of a list such as `0-3,8`.
fn possible(list: &str) -> u16 {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<u16>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    });
    ranges.sum::<u16>().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_the_cpus_of_a_list() {
        assert_eq!(possible("0-3\n"), 4);
        assert_eq!(possible("0"), 1);
        assert_eq!(possible("0-1,4-7"), 6);
        assert_eq!(possible(""), 1);
    }
}
