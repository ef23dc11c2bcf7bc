//! Whether requests to a file of ours come through io_uring rather than `/dev/fuse`, and seeing to it that they do.
//!
//! The kernel has a queue for each processor that the machine may have, and begins only when every one of them has an
//! entry; until then whoever uses the file waits. So all reactors together take all queues.

use super::FuseError;
use crate::device::Device;
use crate::host::Host;
use crate::reactor::Attach;
use crate::spec::{FuseSpec, OverUring};
use exports::fuse::Shared;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Whether the kernel is to offer it.
const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
/// Processors that the machine may have, as ranges.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";

/// How long a reactor may take to hand over its entries.
const ENLIST_MAX: Duration = Duration::from_secs(30);

/// How long a mount may live on after it was unmounted: longer than the kernel needs to tell all who serve it.
const ELSEWHERE_MAX: Duration = Duration::from_secs(1);
/// How often that is looked for.
const LOOK: Duration = Duration::from_millis(10);

/// What was chosen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    /// It is asked for.
    pub(super) wanted: bool,
    /// Why not; empty if it is.
    why_not: String,
}

impl Choice {
    /// It was tried in vain.
    pub(super) fn after(why: &str) -> Choice {
        Choice { wanted: false, why_not: format!("they cannot be taken through io_uring: {why}") }
    }

    /// What `show` says of the way that requests come.
    pub(super) fn describe(&self, shared: &Shared) -> String {
        match shared.over_io_uring() {
            _ if !self.wanted => format!("through /dev/fuse ({})", self.why_not),
            Ok(true) => "through io_uring".to_owned(),
            Ok(false) => {
                "through /dev/fuse (the kernel cannot do it through io_uring: 6.14 and later can)".to_owned()
            }
            Err(errno) => {
                let why = std::io::Error::from_raw_os_error(errno);
                format!("through /dev/fuse (the kernel refused io_uring: {why})")
            }
        }
    }
}

/// Choose for a file.
///
/// # Errors
/// It was asked for, and cannot be.
pub(super) fn choose(spec: &FuseSpec, host: &Host) -> Result<Choice, FuseError> {
    let why_not = match spec.uring {
        OverUring::Off => Some("uring=off".to_owned()),
        _ => obstacle(spec, host),
    };
    match why_not {
        Some(why) if spec.uring == OverUring::On => Err(FuseError::OverUring(why)),
        why_not => Ok(Choice { wanted: why_not.is_none(), why_not: why_not.unwrap_or_default() }),
    }
}

/// What is in its way.
fn obstacle(spec: &FuseSpec, host: &Host) -> Option<String> {
    if spec.passthrough {
        return Some("with passthrough there is little left to ask us for".to_owned());
    }
    if host.reactors().iter().any(|reactor| reactor.engine().name != "io_uring") {
        return Some("the I/O threads do not run on io_uring".to_owned());
    }
    if !fuse::can_abort() {
        return Some("only root can end a connection whose requests come through io_uring".to_owned());
    }
    match std::fs::read_to_string(PARAMETER) {
        Err(_) => Some("the kernel cannot do it through io_uring: 6.14 and later can".to_owned()),
        Ok(text) if text.trim() != "Y" => Some(format!("io_uring is switched off: echo Y > {PARAMETER}")),
        Ok(_) => None,
    }
}

/// Have the reactors take requests of all queues, and wait until each has handed over its entries. The kernel has agreed
/// to it.
///
/// # Errors
/// Why one of them could not: then whoever uses the file would wait for ever, so this mount has to go.
pub(super) fn enlist(host: &Host, device: &Arc<Device>, shared: &Arc<Shared>) -> Result<(), String> {
    if shared.over_io_uring() != Ok(true) {
        return Ok(());
    }
    let queues = possible(&std::fs::read_to_string(POSSIBLE).unwrap_or_default());
    let reactors = host.reactors().len();
    let (told, is_told) = mpsc::channel();
    for number in 0..reactors {
        let own: Vec<u16> = (0..queues).filter(|queue| usize::from(*queue) % reactors == number).collect();
        let (shared, told) = (shared.clone(), told.clone());
        let attach: Attach = Box::new(move |lane, fronts, turn| {
            let at_once = lane.facts.in_place || lane.facts.lends;
            let enlisted = fronts.fuse.enlist(&shared, &own, at_once, turn);
            // Whoever has waited for it in vain has taken the mount away.
            let _ = told.send(enlisted.map_err(|error| error.to_string()));
        });
        host.attach_to(number, device.clone(), attach);
    }
    drop(told);
    let deadline = Instant::now() + ENLIST_MAX;
    for _ in 0..reactors {
        match is_told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(enlisted) => enlisted?,
            Err(RecvTimeoutError::Timeout) => return Err("an I/O thread did not answer in time".to_owned()),
            Err(RecvTimeoutError::Disconnected) => {
                return Err("an I/O thread has no queue for the device".to_owned());
            }
        }
    }
    Ok(())
}

/// See to it that a mount which is unmounted here ends in other mount namespaces, too. They got it with all others when
/// they were made, and keep it alive; who uses it there would wait for us for ever, and we for the entries.
pub(super) fn end_elsewhere(connection: u32, name: String, shared: Arc<Shared>) {
    let watch = move || {
        let start = Instant::now();
        while shared.channels() > 0 && start.elapsed() < ELSEWHERE_MAX {
            std::thread::sleep(LOOK);
        }
        // Where nobody has it any more, the number may be another's by now, whose threads take their time.
        let is_anothers =
            |one: &fuse::Mounted| one.device.1 == connection && one.device_name() != Some(&name);
        if shared.channels() == 0 || fuse::mounts().is_ok_and(|all| all.iter().any(is_anothers)) {
            return;
        }
        match fuse::abort(connection) {
            Ok(()) => {
                tracing::info!(device = name, "it was mounted in another mount namespace, and ended there")
            }
            Err(error) => {
                tracing::warn!(device = name, %error, "it may be mounted in another mount namespace")
            }
        }
    };
    // Without a thread it stays as it is: the reactors give the entries up in time.
    let _ = std::thread::Builder::new().name("unmount".to_owned()).spawn(watch);
}

/// How many processors such a list has: `0-3,8`.
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
    fn processors_are_counted() {
        assert_eq!(possible("0-3\n"), 4);
        assert_eq!(possible("0"), 1);
        assert_eq!(possible("0-1,4-7"), 6);
        assert_eq!(possible(""), 1);
    }
}
