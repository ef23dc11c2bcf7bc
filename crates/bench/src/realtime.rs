//! The real-time class, for measurements on a machine that is not quiet.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Environment variable of the process that runs in the real-time class, so that it does not start itself
/// again.
const REALTIME: &str = "BLOCKYARD_BENCH_REALTIME";

/// Starts this program again with the same arguments in the real-time class, if that is permitted: round
/// robin among our processes and ahead of all others; children inherit it. Returns if that is not
/// permitted, or if this process is in that class already. `word`: the command of this program.
pub(crate) fn enter(word: &str, arguments: &[String]) {
    if is_on() || !may_be() {
        return;
    }
    let own = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
    let mut command = Command::new("chrt");
    let error = command.args(["-r", "1"]).arg(own).arg(word).args(arguments).env(REALTIME, "1").exec();
    eprintln!("bench {word}: chrt: {error}; going on without");
}

/// Returns whether [`enter`] has put this process into the real-time class.
pub(crate) fn is_on() -> bool {
    std::env::var_os(REALTIME).is_some()
}

fn may_be() -> bool {
    let ran = Command::new("chrt").args(["-r", "1", "true"]).stderr(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}
