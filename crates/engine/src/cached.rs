//! What the kernel has cached of devices that hold another file's data from now on (`set NAME file=`).
//!
//! Dropping it may wait for I/O on the device itself: what is not written is written first, a partition table is read,
//! and a page that is being read is waited for. So a process of its own does it, this program under its hidden word
//! `loop-device`; nobody's turn is held meanwhile, and what takes longer than [`PATIENCE`] goes on by itself, with an
//! error that says so. A device that is held back is left alone until it is resumed.

use crate::device::Device;
use crate::host::{Host, HostError};
use crate::loop_device::{Refusal, helper};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long it is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Drop what is cached of a block device.
pub(crate) const BLOCKS: &str = "flush-cache";
/// Drop what is cached of a file by FUSE, whose descriptor is stdin.
pub(crate) const PAGES: &str = "forget-pages";

/// Why the kernel may still have what it cached.
#[derive(Debug, thiserror::Error)]
#[error(
    "the other file is in its place, but what the kernel has cached of {at} before is not dropped: {why}"
)]
pub struct CacheError {
    /// The node or the file.
    at: String,
    why: Why,
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("the program that does it cannot be started: {0} (attach it anew)")]
    Start(std::io::Error),
    #[error("{0} (attach it anew)")]
    Refused(String),
    #[error(
        "it did not answer within {} s, and is still asked (is it suspended, or without a path? resume it)",
        PATIENCE.as_secs()
    )]
    Late,
}

impl Host {
    /// These devices hold something else from now on.
    pub(crate) fn hold_something_else(tower: &[Arc<Device>]) {
        tower.iter().for_each(|device| device.is_cached_wrongly.store(true, SeqCst));
    }

    /// Have the kernel drop what it has cached of those of them that hold something else, and are not held back. The first
    /// refusal, when all were asked. Not within anybody's turn: what is written first may wait for a `resume`.
    pub(crate) async fn drop_stale(&self, tower: &[Arc<Device>]) -> Result<(), HostError> {
        let stale = tower.iter().filter(|device| !device.is_held());
        let stale = stale.filter(|device| device.is_cached_wrongly.swap(false, SeqCst));
        // All at once: none waits for one that does not answer.
        let asked: Vec<_> = stale
            .flat_map(|device| self.exports_of(device))
            .map(|export| tokio::spawn(async move { export.replaced().await }))
            .collect();
        let mut result = Ok(());
        for answer in asked {
            match answer.await {
                Ok(answer) => result = result.and(answer),
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            }
        }
        result
    }
}

/// Have the kernel drop what it has cached of a block device and its partitions, and read their table again.
pub(crate) async fn drop_blocks(node: String) -> Result<(), CacheError> {
    let mut command = helper();
    command.args([BLOCKS, &node]).stdin(Stdio::null());
    ask(command, node, PATIENCE).await
}

/// Have the kernel drop what it has cached of the file whose connection this is a descriptor of.
pub(crate) async fn drop_pages(connection: OwnedFd, file: PathBuf) -> Result<(), CacheError> {
    let mut command = helper();
    command.arg(PAGES).stdin(Stdio::from(connection));
    ask(command, file.display().to_string(), PATIENCE).await
}

async fn ask(mut command: Command, at: String, patience: Duration) -> Result<(), CacheError> {
    let (answer, answered) = oneshot::channel::<std::io::Result<Output>>();
    // Not a thread of the runtime's, for which the process would wait when it ends.
    let started = std::thread::Builder::new().name("cached".into()).spawn(move || {
        let _ = answer.send(command.output());
    });
    let outcome = match started {
        Err(why) => Err(Why::Start(why)),
        Ok(_) => match tokio::time::timeout(patience, answered).await {
            Err(_) => Err(Why::Late),
            Ok(Err(_)) => Err(Why::Refused("its thread ended".to_owned())),
            Ok(Ok(output)) => output.map_err(Why::Start),
        },
    };
    let refused = match outcome {
        Err(why) => why,
        Ok(output) if output.status.success() => {
            let note = String::from_utf8_lossy(&output.stdout);
            if !note.trim().is_empty() {
                tracing::warn!(device = %at, "{}", note.trim());
            }
            return Ok(());
        }
        Ok(output) => match String::from_utf8_lossy(&output.stderr).trim() {
            "" => Why::Refused(format!("its program ended with {}", output.status)),
            why => Why::Refused(why.to_owned()),
        },
    };
    Err(CacheError { at, why: refused })
}

/// The process itself, for a block device. What it says of a table that is not read again.
pub(crate) fn blocks(node: &str) -> Result<String, Refusal> {
    let failed = |why: std::io::Error| Refusal { why: why.to_string(), status: 1 };
    loopdev::flush_cache(node.as_ref()).map_err(failed)?;
    Ok(match loopdev::reread_partitions(node.as_ref()) {
        Ok(()) => String::new(),
        Err(why) => format!(
            "its partition table is not read again: {why} (when its partitions are not in use: blockdev --rereadpt {node})"
        ),
    })
}

/// The process itself, for a file by FUSE.
pub(crate) fn pages() -> Result<String, Refusal> {
    let mut message = [0; proto::fuse::REPLY_LEN_MAX];
    let len = proto::fuse::put_inval_inode(&mut message, true);
    match rustix::io::write(std::io::stdin(), &message[..len]) {
        // The kernel knows nothing of the file that could be wrong, or it is gone.
        Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => Ok(String::new()),
        Err(why) => Err(Refusal { why: why.to_string(), status: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::pipe;

    async fn asked(script: &str, stdin: Stdio, patience: Duration) -> Result<(), String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(stdin);
        ask(command, "/dev/x".to_owned(), patience).await.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn what_does_not_answer_is_left_to_itself_and_what_refuses_is_quoted() {
        // It ends when nobody can write a line any more.
        let (waits, _holds) = pipe().unwrap();
        let late = asked("read line", waits.into(), Duration::from_millis(1)).await.unwrap_err();
        let words = "the other file is in its place, but what the kernel has cached of /dev/x before";
        assert!(late.starts_with(words) && late.contains("is still asked"), "{late}");
        let refused = asked("echo no >&2; exit 1", Stdio::null(), PATIENCE).await.unwrap_err();
        assert!(
            refused.starts_with(words) && refused.ends_with("not dropped: no (attach it anew)"),
            "{refused}"
        );
        asked("echo a note", Stdio::null(), PATIENCE).await.unwrap();
    }
}
