//! The process's environment: service manager, resource limits, terminal, log.

use crate::failure::Failure;
use engine::private::{WriteMode, create};
use engine::rundir::RunDir;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// How long the end of the process waits for images of clusters: one that cannot be reached does not keep it.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// Sends a state (`READY=1`) to the service manager if `NOTIFY_SOCKET` is set (sd_notify(3)).
pub(crate) fn notify(state: &str) {
    let Some(target) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let target = target.to_string_lossy();
    let address = match target.strip_prefix('@') {
        Some(name) => {
            use std::os::linux::net::SocketAddrExt;
            SocketAddr::from_abstract_name(name)
        }
        None => SocketAddr::from_pathname(&*target),
    };
    // A service manager that cannot be reached does not stop the server.
    let _ = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
}

/// The status line of a server, for the service manager.
pub(crate) fn serving_status(devices: usize) -> String {
    match devices {
        1 => "serving 1 device".to_owned(),
        many => format!("serving {many} devices"),
    }
}

/// Notifies the service manager that a topology is being applied. `READY=1` must follow.
pub(crate) fn notify_reloading() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let microseconds = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={microseconds}\nSTATUS=applying the topology\n"));
}

/// Returns the interval of `WATCHDOG=1`, half of the service manager's limit; `None` if it does not watch this process.
/// `limit` and `pid`: `WATCHDOG_USEC` and `WATCHDOG_PID`.
fn watchdog_interval(limit: Option<&str>, pid: Option<&str>) -> Option<Duration> {
    if pid.is_some_and(|pid| pid != std::process::id().to_string()) {
        return None;
    }
    let limit = limit?.parse().ok().filter(|limit| *limit > 1)?;
    Some(Duration::from_micros(limit) / 2)
}

/// Sends `WATCHDOG=1` as often as the service manager requires, until the future is dropped. The control
/// plane sends it, not a reactor: a reactor that waits for a slow disk is no reason to kill the server.
pub(crate) async fn feed_watchdog() {
    let of = |name| std::env::var(name).ok();
    let Some(interval) = watchdog_interval(of("WATCHDOG_USEC").as_deref(), of("WATCHDOG_PID").as_deref())
    else {
        return;
    };
    loop {
        notify("WATCHDOG=1\n");
        tokio::time::sleep(interval).await;
    }
}

/// Raises the soft limit on open files to the hard limit. The soft limit protects programs that use `select` only.
pub(crate) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If raising fails, a server that reaches the limit reports it.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Whether the process is exempt from the limit on locked memory (`CAP_IPC_LOCK`).
fn may_lock() -> bool {
    const IPC_LOCK: u64 = 1 << 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & IPC_LOCK != 0))
}

/// Prepares the process to serve a block device to the kernel. Its memory must never wait for that device: the process
/// is locked in memory, exempt from the OOM killer, and its allocations start no I/O (`PR_SET_IO_FLUSHER`).
pub(crate) fn serve_the_kernel() {
    use rustix::mm::{MlockAllFlags, mlockall};
    // Errors are ignored: without the privileges the server runs without this protection.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    // Without unlimited locked memory, unused address space would count towards the limit, so nothing is
    // locked.
    if getrlimit(Resource::Memlock).current.is_none() || may_lock() {
        let _ = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT);
    }
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
}

/// Closes stdout and stderr if a ublk command is stuck in the kernel. Such a process cannot exit, and readers of its
/// output must not wait for it.
pub(crate) fn let_go_when_stuck() {
    if attach::ublk::is_stuck() {
        let _ = leave_outputs();
    }
}

/// Waits until images of clusters are closed, which happens on threads of librbd: at the end of the process its
/// destructors must not meet them.
pub(crate) fn wait_for_clusters() {
    if !engine::host::wait_for_clusters(CLOSE_LIMIT) {
        tracing::warn!("an image of a cluster could not be closed in {} s", CLOSE_LIMIT.as_secs());
    }
}

/// Starts a new session (setsid(2)), so that closing the terminal does not end the server.
pub(crate) fn leave_session(what: &str) -> Result<(), Failure> {
    match rustix::process::setsid() {
        // EPERM: the process already leads a process group of its own.
        Ok(_) | Err(rustix::io::Errno::PERM) => Ok(()),
        Err(why) => Err(Failure::new(what, "", io::Error::from(why))),
    }
}

/// Redirects stdout and stderr to /dev/null.
pub(crate) fn leave_outputs() -> io::Result<()> {
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

/// Detaches from the parent, which waits for end of file: redirects stdout and stderr to the device's log, and changes
/// to `/`, so that the file system of the working directory can be unmounted. `appends`: keeps the log of the process
/// that served the device before.
pub(crate) fn leave_parent(run: &RunDir, name: &str, appends: bool) -> io::Result<()> {
    let mode = if appends { WriteMode::Append } else { WriteMode::Truncate };
    let log = create(&run.log_file(name), mode)?;
    std::env::set_current_dir("/")?;
    rustix::stdio::dup2_stderr(&log)?;
    rustix::stdio::dup2_stdout(&log)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_fed_twice_per_limit_and_by_the_watched_process_only() {
        let own = std::process::id().to_string();
        let half = Some(Duration::from_millis(500));
        assert_eq!(watchdog_interval(Some("1000000"), None), half);
        assert_eq!(watchdog_interval(Some("1000000"), Some(&own)), half);
        assert_eq!(watchdog_interval(Some("1000000"), Some("1")), None);
        for limit in [None, Some("0"), Some("soon")] {
            assert_eq!(watchdog_interval(limit, None), None);
        }
    }
}
