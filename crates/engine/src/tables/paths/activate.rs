//! Activates paths by a program: the handler `exec` of multipath tables.
//!
//! The control plane runs the program once for each path that [`Multipath::due_activations`] returns, with
//! the device, the number of the group and the path as arguments, without a shell and without input, in a
//! process group of its own. The exit status is the result: 0 done, 1 retry, 2 the group is busy, others the
//! path failed. A program that takes longer than [`LIMIT`], or whose result is no longer wanted, is killed
//! with its process group.
//!
//! *Invariant:* no program lives longer than its table, or than the tasks of the control plane.

use layers::dm::Names;
use layers::multipath::{Activation, Multipath, Outcome};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Longest run time of a program.
const LIMIT: Duration = Duration::from_secs(30);
/// Interval at which a program is polled for its end.
const PERIOD: Duration = Duration::from_millis(10);

/// The programs that run for one table. They are killed on drop.
#[derive(Default)]
pub(super) struct Activations(JoinSet<()>);

impl Activations {
    /// Starts the programs of pending activations.
    pub(super) fn start_pending(&mut self, device: &str, names: &Names, shared: &Arc<Multipath>) {
        let Some(program) = shared.config().activator() else { return };
        while self.0.try_join_next().is_some() {}
        for activation in shared.due_activations(Instant::now()) {
            let group = shared.group_of(activation.path) + 1;
            let arguments = [device.to_owned(), group.to_string(), names.shown(activation.path).to_owned()];
            self.0.spawn(activate(program.to_owned(), arguments, Arc::downgrade(shared), activation));
        }
    }
}

async fn activate(program: String, arguments: [String; 3], shared: Weak<Multipath>, activation: Activation) {
    let began = Instant::now();
    let wanted = || shared.upgrade().is_some_and(|shared| shared.is_wanted(&activation));
    let ended = run(&program, &arguments, LIMIT, wanted).await;
    let Some(shared) = shared.upgrade() else { return };
    let outcome = outcome(&ended);
    if !shared.finish_activation(&activation, outcome, Instant::now()) {
        return;
    }
    let [device, group, path] = &arguments;
    let took = format!("{} ms", began.elapsed().as_millis());
    match (outcome, ended) {
        (Outcome::Activated, _) => tracing::info!(device, group, path, took, "a path was activated"),
        (_, Ok(End::TimedOut)) => {
            tracing::warn!(device, group, path, took, "{program} took too long and was killed");
        }
        (_, Ok(End::Exited(status))) => {
            tracing::warn!(device, group, path, took, "a path could not be activated: {program}: {status}");
        }
        (_, Ok(End::Unwanted)) => {}
        (_, Err(why)) => tracing::warn!(device, group, path, "{program} cannot be run: {why}"),
    }
}

/// How a program ended.
#[derive(Debug)]
enum End {
    Exited(ExitStatus),
    /// The program ran too long.
    TimedOut,
    /// The program's result was no longer needed.
    Unwanted,
}

fn outcome(ended: &io::Result<End>) -> Outcome {
    let code = match ended {
        Ok(End::Exited(status)) => status.code(),
        Ok(End::TimedOut | End::Unwanted) | Err(_) => None,
    };
    match code {
        Some(0) => Outcome::Activated,
        Some(1) => Outcome::Retry,
        Some(2) => Outcome::Busy,
        _ => Outcome::Failed,
    }
}

/// Runs a program to its end, or until its time is up or its result is not wanted.
async fn run(
    program: &str,
    arguments: &[String],
    limit: Duration,
    wanted: impl Fn() -> bool,
) -> io::Result<End> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    let late = Instant::now() + limit;
    let mut running = Running(command.spawn()?);
    loop {
        if let Some(status) = running.0.try_wait()? {
            return Ok(End::Exited(status));
        }
        if !wanted() {
            return Ok(End::Unwanted);
        }
        if Instant::now() >= late {
            return Ok(End::TimedOut);
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// A running program, killed with its process group on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
            let _ = self.0.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    /// Long enough for a busy machine.
    const TIMEOUT: Duration = Duration::from_secs(60);

    fn arguments(script: &str) -> [String; 2] {
        ["-c".to_owned(), script.to_owned()]
    }

    async fn ends(script: &str) -> Outcome {
        outcome(&run("/bin/sh", &arguments(script), TIMEOUT, || true).await)
    }

    /// Returns whether a process exists and is not a zombie.
    fn is_alive(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    }

    /// Waits until a script has written a line to a file. Returns the line.
    async fn written(file: &std::path::Path) -> String {
        loop {
            match std::fs::read_to_string(file) {
                Ok(text) if text.ends_with('\n') => return text.trim_end().to_owned(),
                _ => tokio::time::sleep(PERIOD).await,
            }
        }
    }

    #[tokio::test]
    async fn mp_6_the_exit_status_is_the_result_of_the_activation() {
        assert_eq!(ends("exit 0").await, Outcome::Activated);
        assert_eq!(ends("exit 1").await, Outcome::Retry);
        assert_eq!(ends("exit 2").await, Outcome::Busy);
        assert_eq!(ends("exit 3").await, Outcome::Failed);
        assert_eq!(ends("kill -9 $$").await, Outcome::Failed);
        assert_eq!(outcome(&run("/nowhere/at all", &[], TIMEOUT, || true).await), Outcome::Failed);
    }

    #[tokio::test]
    async fn mp_6_a_program_that_takes_too_long_is_killed_and_the_path_fails() {
        let ended = run("/bin/sh", &arguments("sleep 1000"), Duration::from_millis(50), || true).await;
        assert!(matches!(ended, Ok(End::TimedOut)), "{ended:?}");
        assert_eq!(outcome(&ended), Outcome::Failed);
    }

    #[tokio::test]
    async fn mp_6_an_unwanted_program_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", file.display());
        let wanted = Arc::new(AtomicBool::new(true));
        let asked = wanted.clone();
        let task =
            tokio::spawn(
                async move { run("/bin/sh", &arguments(&script), TIMEOUT, || asked.load(SeqCst)).await },
            );
        let pid = written(&file).await;
        assert!(is_alive(&pid));
        wanted.store(false, SeqCst);
        assert!(matches!(task.await.unwrap(), Ok(End::Unwanted)));
        tokio::time::timeout(TIMEOUT, async {
            while is_alive(&pid) {
                tokio::time::sleep(PERIOD).await;
            }
        })
        .await
        .expect("its children are killed, too");
    }

    #[tokio::test]
    async fn mp_6_a_program_ends_with_the_tasks_of_its_table() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("echo $$ > {}; exec sleep 1000", file.display());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { drop(run("/bin/sh", &arguments(&script), TIMEOUT, || true).await) });
        let pid = written(&file).await;
        assert!(is_alive(&pid));
        tasks.shutdown().await;
        assert!(!is_alive(&pid));
    }
}
