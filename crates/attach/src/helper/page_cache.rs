//! Drops what the kernel has cached of a device whose content was replaced (`set NAME file=`).
//!
//! This may wait for I/O on the device itself: the kernel first writes dirty pages, re-reads the partition
//! table, and waits for pages that are being read. So the helper process does it, and no thread of this
//! process waits longer than [`TIMEOUT`]; after that the helper continues alone, and an error reports that.
//! The cache of a suspended device is dropped when the device is resumed.

use crate::helper::{Refusal, helper};
use engine::host::{HostError, HostErrorKind};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use tokio::sync::oneshot;

/// Longest wait for the helper.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Task: drop the cached pages of a block device.
pub(crate) const BLOCKS: &str = "flush-cache";
/// Task: drop the cached pages of a FUSE file, whose connection is stdin.
pub(crate) const PAGES: &str = "forget-pages";

/// The kernel may still have cached data of the old content.
#[derive(Debug, thiserror::Error)]
#[error("the content was replaced, but the kernel may still have cached data of {at}: {why}")]
pub struct CacheError {
    /// The device node or the file.
    at: String,
    why: Why,
}

impl From<CacheError> for HostError {
    fn from(error: CacheError) -> HostError {
        HostError::caused(HostErrorKind::Failed, error)
    }
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("the helper cannot be started: {0} (detach and attach the device)")]
    Start(std::io::Error),
    #[error("{0} (detach and attach the device)")]
    Refused(String),
    #[error(
        "the helper did not answer within {} s and is still waiting (is the device suspended, or without a path? resume it)",
        TIMEOUT.as_secs()
    )]
    Timeout,
}

/// Makes the kernel drop its cached pages of a block device and its partitions, and re-read the partition
/// table.
pub(crate) async fn drop_blocks(node: String) -> Result<(), CacheError> {
    let mut command = helper();
    command.args([BLOCKS, &node]).stdin(Stdio::null());
    ask(command, node, TIMEOUT).await
}

/// Makes the kernel drop its cached pages of the file of a FUSE connection.
pub(crate) async fn drop_pages(connection: OwnedFd, file: PathBuf) -> Result<(), CacheError> {
    let mut command = helper();
    command.arg(PAGES).stdin(Stdio::from(connection));
    ask(command, file.display().to_string(), TIMEOUT).await
}

async fn ask(mut command: Command, at: String, timeout: Duration) -> Result<(), CacheError> {
    let (answer, answered) = oneshot::channel::<std::io::Result<Output>>();
    // A plain thread: the process would wait at its end for a thread of the runtime.
    let started = std::thread::Builder::new().name("cached".into()).spawn(move || {
        let _ = answer.send(command.output());
    });
    let outcome = match started {
        Err(why) => Err(Why::Start(why)),
        Ok(_) => match tokio::time::timeout(timeout, answered).await {
            Err(_) => Err(Why::Timeout),
            Ok(Err(_)) => Err(Why::Refused("the helper's thread ended".to_owned())),
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
            "" => Why::Refused(format!("the helper ended with {}", output.status)),
            why => Why::Refused(why.to_owned()),
        },
    };
    Err(CacheError { at, why: refused })
}

/// Drops the cached pages of a block device; runs in the helper. Returns a note if the partition table
/// could not be re-read.
pub(crate) fn blocks(node: &str) -> Result<String, Refusal> {
    let failed = |why: std::io::Error| Refusal { why: why.to_string(), status: 1 };
    loopdev::flush_cache(node.as_ref()).map_err(failed)?;
    Ok(match loopdev::reread_partitions(node.as_ref()) {
        Ok(()) => String::new(),
        Err(why) => format!(
            "its partition table was not re-read: {why} (when its partitions are not in use: blockdev --rereadpt {node})"
        ),
    })
}

/// Drops the cached pages of a FUSE file; runs in the helper.
pub(crate) fn pages() -> Result<String, Refusal> {
    let mut message = [0; proto::fuse::REPLY_LEN_MAX];
    let len = proto::fuse::put_inval_inode(&mut message, true);
    match rustix::io::write(std::io::stdin(), &message[..len]) {
        // The kernel has no cached pages of the file, or the file is unmounted.
        Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => Ok(String::new()),
        Err(why) => Err(Refusal { why: why.to_string(), status: 1 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::pipe;

    async fn asked(script: &str, stdin: Stdio, timeout: Duration) -> Result<(), String> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(stdin);
        ask(command, "/dev/x".to_owned(), timeout).await.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn a_helper_that_hangs_is_left_running_and_a_refusal_is_quoted() {
        // The shell ends when the pipe has no writer any more.
        let (waits, _holds) = pipe().unwrap();
        let late = asked("read line", waits.into(), Duration::from_millis(1)).await.unwrap_err();
        let start = "the content was replaced, but the kernel may still have cached data of /dev/x: ";
        assert!(late.starts_with(start) && late.contains("is still waiting"), "{late}");
        let refused = asked("echo no >&2; exit 1", Stdio::null(), TIMEOUT).await.unwrap_err();
        assert_eq!(refused, format!("{start}no (detach and attach the device)"));
        asked("echo a note", Stdio::null(), TIMEOUT).await.unwrap();
    }
}
