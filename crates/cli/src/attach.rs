//! The process's surroundings: service manager, terminal, log.

use crate::failure::Failure;
use engine::private::{Content, create};
use engine::rundir::RunDir;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells the service manager how we are, when there is one that wants to know (`sd_notify`).
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
    // It is the service manager's loss if it cannot be reached; serving goes on.
    let _ = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
}

/// As many connections as the system lets us have: the soft limit on open files is for programs that use
/// `select`.
pub(crate) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // What cannot be raised stays, and shows as a clear error when it is reached.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Whether limits on locked memory do not bind us (`CAP_IPC_LOCK`).
fn may_lock() -> bool {
    const IPC_LOCK: u64 = 1 << 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & IPC_LOCK != 0))
}

/// Whoever serves a block device to the kernel must get memory without waiting for that device: nothing of it is
/// swapped out, it is not chosen when memory runs out, and its own allocations start no I/O.
pub(crate) fn serve_the_kernel() {
    use rustix::mm::{MlockAllFlags, mlockall};
    // What an ordinary user may not do is left: it then is as safe as any other user-space server.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    // With a limit on locked memory, address space that is not used yet would count, too.
    if getrlimit(Resource::Memlock).current.is_none() || may_lock() {
        let _ = mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT);
    }
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
}

/// A process with a command that never returns from the kernel does not end: whoever reads what it says must not wait
/// for that.
pub(crate) fn let_go_when_stuck() {
    if engine::ublk::is_stuck() {
        let _ = leave_outputs();
    }
}

/// Leaves the terminal that started us, so that its end is not ours.
pub(crate) fn leave_session(what: &str) -> Result<(), Failure> {
    match rustix::process::setsid() {
        // Who leads a group already was started by itself, and has no terminal to leave.
        Ok(_) | Err(rustix::io::Errno::PERM) => Ok(()),
        Err(why) => Err(Failure::new(what, "", io::Error::from(why))),
    }
}

/// Lets go of what was stdout and stderr.
pub(crate) fn leave_outputs() -> io::Result<()> {
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

/// Lets go of whoever waits for us to be ready: stdout and stderr go to the log, and the directory we
/// were started in can be unmounted. `goes_on`: another process wrote to the log before, of the same device.
pub(crate) fn leave_parent(run: &RunDir, name: &str, goes_on: bool) -> io::Result<()> {
    let log = create(&run.log_file(name), if goes_on { Content::Goes } else { Content::New })?;
    std::env::set_current_dir("/")?;
    rustix::stdio::dup2_stderr(&log)?;
    rustix::stdio::dup2_stdout(&log)?;
    Ok(())
}
