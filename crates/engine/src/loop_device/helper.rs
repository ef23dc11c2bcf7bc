//! The process that waits for I/O on files of ours: asked by [`ask`], answering in [`run_helper`].

use super::LoopError;
use crate::cached;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The hidden word of the command line that starts it.
const WORD: &str = "loop-device";

/// Its exit status when somebody uses the device.
const IN_USE: u8 = 3;

/// What it is to do.
#[derive(Debug)]
pub(super) enum Task {
    /// Bind; the answer is the device's number.
    Attach(loopdev::Request),
    /// Let go of this device if it is still bound to this file.
    Detach { number: u32, file: PathBuf, force: bool },
    /// Take the file's size anew.
    SetCapacity(u32),
}

impl Task {
    fn words(&self) -> Vec<std::ffi::OsString> {
        match self {
            Task::Attach(request) => {
                let number = request.number.map_or_else(|| "any".to_owned(), |number| number.to_string());
                let mut words = vec!["attach".into(), request.file.clone().into_os_string(), number.into()];
                words.push(request.block_len.to_string().into());
                words.push(request.read_only.to_string().into());
                words.push(request.partscan.to_string().into());
                words
            }
            Task::Detach { number, file, force } => vec![
                "detach".into(),
                number.to_string().into(),
                file.clone().into_os_string(),
                force.to_string().into(),
            ],
            Task::SetCapacity(number) => vec!["set-capacity".into(), number.to_string().into()],
        }
    }
}

/// That process, yet to be started and told what to do.
pub(crate) fn helper() -> Command {
    // Not by its path: that may be another program by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg(WORD);
    command
}

/// Have it done. What it answered, or why it could not.
pub(super) fn ask(task: &Task) -> Result<Option<u32>, LoopError> {
    let outcome = helper()
        .args(task.words())
        .stdin(Stdio::null())
        .output()
        .map_err(|why| LoopError::Helper(format!("the loop device's helper cannot be started: {why}")))?;
    let said = String::from_utf8_lossy(&outcome.stdout);
    if outcome.status.success() {
        return Ok(said.trim().parse().ok());
    }
    let why = match String::from_utf8_lossy(&outcome.stderr).trim() {
        "" => format!("the loop device's helper ended with {}", outcome.status),
        why => why.to_owned(),
    };
    Err(if outcome.status.code() == Some(IN_USE.into()) {
        LoopError::InUse(why)
    } else {
        LoopError::Helper(why)
    })
}

/// Why the helper could not do what it was asked for.
#[derive(Debug)]
pub struct Refusal {
    /// A sentence for its stderr.
    pub why: String,
    /// Its exit status.
    pub status: u8,
}

impl From<loopdev::LoopError> for Refusal {
    fn from(error: loopdev::LoopError) -> Refusal {
        let in_use = matches!(error, loopdev::LoopError::InUse { .. });
        Refusal { why: error.to_string(), status: if in_use { IN_USE } else { 1 } }
    }
}

/// The helper itself. `words`: what [`ask`] gave it. The answer for its stdout.
///
/// # Errors
/// Why it could not be done.
pub fn run_helper(words: &[String]) -> Result<String, Refusal> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number =
        |text: &str| text.parse::<u32>().map_err(|why| Refusal { why: format!("{text}: {why}"), status: 2 });
    match words[..] {
        ["attach", file, which, block_len, read_only, partscan] => {
            let request = loopdev::Request {
                file: file.into(),
                number: if which == "any" { None } else { Some(number(which)?) },
                block_len: number(block_len)?,
                read_only: read_only == "true",
                partscan: partscan == "true",
            };
            Ok(loopdev::attach(&request)?.to_string())
        }
        ["detach", which, file, force] => {
            let which = number(which)?;
            // Somebody let go of it already, and it may belong to another file by now.
            if loopdev::backing_file(which).is_none_or(|bound| bound != std::path::Path::new(file)) {
                return Ok(String::new());
            }
            loopdev::detach(which, force == "true")?;
            Ok(String::new())
        }
        ["set-capacity", which] => {
            loopdev::set_capacity(number(which)?)?;
            Ok(String::new())
        }
        [cached::BLOCKS, node] => cached::blocks(node),
        [cached::PAGES] => cached::pages(),
        _ => Err(Refusal {
            why: "this is how the program starts itself, and nothing to type".to_owned(),
            status: 2,
        }),
    }
}
