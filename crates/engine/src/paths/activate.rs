//! Activates paths by a program: the handler `exec` of multipath tables.
//!
//! The control plane runs the program once for each path that [`Multipath::to_activate`] names, with the device, the number of
//! the group and the path as arguments, without a shell and without input, in a process group of its own. How it ends is how
//! the activation does: 0 that is done, 1 try again, 2 the group is busy, anything else the path does not work. One that takes
//! longer than [`LIMIT`], or that nobody waits for any more, is killed with all of its group.
//!
//! *Invariant:* no program outlives its table, nor the tasks of the control plane.

use layers::dm::Names;
use layers::multipath::{Activation, Multipath, Outcome};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// How long a program may take.
const LIMIT: Duration = Duration::from_secs(30);
/// How often is looked whether it has ended.
const PERIOD: Duration = Duration::from_millis(10);

/// The programs that run for one table. With this they end.
#[derive(Default)]
pub(super) struct Activations(JoinSet<()>);

impl Activations {
    /// Begin what is to be begun.
    pub(super) fn look(&mut self, device: &str, names: &Names, shared: &Arc<Multipath>) {
        let Some(program) = shared.config().activator() else { return };
        while self.0.try_join_next().is_some() {}
        for activation in shared.to_activate(Instant::now()) {
            let group = shared.group_of(activation.path) + 1;
            let words = [device.to_owned(), group.to_string(), names.shown(activation.path).to_owned()];
            self.0.spawn(activate(program.to_owned(), words, Arc::downgrade(shared), activation));
        }
    }
}

async fn activate(program: String, words: [String; 3], shared: Weak<Multipath>, activation: Activation) {
    let began = Instant::now();
    let wanted = || shared.upgrade().is_some_and(|shared| shared.is_wanted(&activation));
    let ended = run(&program, &words, LIMIT, wanted).await;
    let Some(shared) = shared.upgrade() else { return };
    let outcome = outcome(&ended);
    if !shared.activated(&activation, outcome, Instant::now()) {
        return;
    }
    let [device, group, path] = &words;
    let took = format!("{} ms", began.elapsed().as_millis());
    match (outcome, ended) {
        (Outcome::Activated, _) => tracing::info!(device, group, path, took, "a path is activated"),
        (_, Ok(End::Late)) => {
            tracing::warn!(device, group, path, took, "{program} took too long and was killed");
        }
        (_, Ok(End::Exited(status))) => {
            tracing::warn!(device, group, path, took, "a path is not activated: {program}: {status}");
        }
        (_, Ok(End::Unwanted)) => {}
        (_, Err(why)) => tracing::warn!(device, group, path, "{program} cannot be run: {why}"),
    }
}

/// How a program ended.
#[derive(Debug)]
enum End {
    Exited(ExitStatus),
    /// It took too long.
    Late,
    /// Nobody waited any more.
    Unwanted,
}

fn outcome(ended: &io::Result<End>) -> Outcome {
    let code = match ended {
        Ok(End::Exited(status)) => status.code(),
        Ok(End::Late | End::Unwanted) | Err(_) => None,
    };
    match code {
        Some(0) => Outcome::Activated,
        Some(1) => Outcome::Again,
        Some(2) => Outcome::Busy,
        _ => Outcome::Failed,
    }
}

/// Run a program to its end, or to that of the patience with it.
async fn run(program: &str, words: &[String], limit: Duration, wanted: impl Fn() -> bool) -> io::Result<End> {
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
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
            return Ok(End::Late);
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// A program that ends with this, and what it started with it.
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

    /// Long enough for a machine that is busy with other things.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn words(script: &str) -> [String; 2] {
        ["-c".to_owned(), script.to_owned()]
    }

    async fn ends(script: &str) -> Outcome {
        outcome(&run("/bin/sh", &words(script), PATIENCE, || true).await)
    }

    /// Whether a process is there and is more than a name that its parent has not taken.
    fn is_alive(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    }

    /// What a script wrote into a file, once it has.
    async fn written(file: &std::path::Path) -> String {
        loop {
            match std::fs::read_to_string(file) {
                Ok(text) if text.ends_with('\n') => return text.trim_end().to_owned(),
                _ => tokio::time::sleep(PERIOD).await,
            }
        }
    }

    #[tokio::test]
    async fn mp_6_how_a_program_ends_is_how_the_activation_does() {
        assert_eq!(ends("exit 0").await, Outcome::Activated);
        assert_eq!(ends("exit 1").await, Outcome::Again);
        assert_eq!(ends("exit 2").await, Outcome::Busy);
        assert_eq!(ends("exit 3").await, Outcome::Failed);
        assert_eq!(ends("kill -9 $$").await, Outcome::Failed);
        assert_eq!(outcome(&run("/nowhere/at all", &[], PATIENCE, || true).await), Outcome::Failed);
    }

    #[tokio::test]
    async fn mp_6_a_program_that_takes_too_long_is_killed_and_the_path_does_not_work() {
        let ended = run("/bin/sh", &words("sleep 1000"), Duration::from_millis(50), || true).await;
        assert!(matches!(ended, Ok(End::Late)), "{ended:?}");
        assert_eq!(outcome(&ended), Outcome::Failed);
    }

    #[tokio::test]
    async fn mp_6_a_program_that_nobody_waits_for_is_killed_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", file.display());
        let wanted = Arc::new(AtomicBool::new(true));
        let asked = wanted.clone();
        let task =
            tokio::spawn(
                async move { run("/bin/sh", &words(&script), PATIENCE, || asked.load(SeqCst)).await },
            );
        let pid = written(&file).await;
        assert!(is_alive(&pid));
        wanted.store(false, SeqCst);
        assert!(matches!(task.await.unwrap(), Ok(End::Unwanted)));
        tokio::time::timeout(PATIENCE, async {
            while is_alive(&pid) {
                tokio::time::sleep(PERIOD).await;
            }
        })
        .await
        .expect("what it started is gone, too");
    }

    #[tokio::test]
    async fn mp_6_a_program_ends_with_the_tasks_that_wait_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("echo $$ > {}; exec sleep 1000", file.display());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { drop(run("/bin/sh", &words(&script), PATIENCE, || true).await) });
        let pid = written(&file).await;
        assert!(is_alive(&pid));
        tasks.shutdown().await;
        assert!(!is_alive(&pid));
    }
}
