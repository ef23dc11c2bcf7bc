//! The helper process, which does I/O that may wait for this process's own devices: started by [`ask`], run
//! by [`run_helper`].

pub(crate) mod page_cache;

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Hidden subcommand that runs the helper.
const SUBCOMMAND: &str = "loop-device";

/// Exit status: the device is in use.
const IN_USE: u8 = 3;

/// Why the helper failed, as it reports on stderr.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HelperError {
    /// The helper could not be started, or failed.
    #[error("{0}")]
    Failed(String),
    /// The device is in use.
    #[error("{0}")]
    InUse(String),
}

/// A request to the helper.
#[derive(Debug)]
pub(crate) enum Task {
    /// Binds a loop device to a file; the answer is its number.
    Attach(loopdev::Request),
    /// Unbinds a loop device if it is still bound to this file.
    Detach { number: u32, file: PathBuf, force: bool },
    /// Has a loop device adopt the file's size.
    SetCapacity(u32),
}

impl Task {
    fn arguments(&self) -> Vec<std::ffi::OsString> {
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

/// Returns the command that runs the helper, without its arguments.
pub(crate) fn helper() -> Command {
    // /proc/self/exe rather than the path, which may name another program by now.
    let mut command = Command::new("/proc/self/exe");
    command.arg(SUBCOMMAND);
    command
}

/// Runs a task in the helper and waits for it. Returns its answer, or why it failed.
pub(crate) fn ask(task: &Task) -> Result<Option<u32>, HelperError> {
    let outcome =
        helper().args(task.arguments()).stdin(Stdio::null()).output().map_err(|why| {
            HelperError::Failed(format!("the loop device's helper cannot be started: {why}"))
        })?;
    let output = String::from_utf8_lossy(&outcome.stdout);
    if outcome.status.success() {
        return Ok(output.trim().parse().ok());
    }
    let why = match String::from_utf8_lossy(&outcome.stderr).trim() {
        "" => format!("the loop device's helper ended with {}", outcome.status),
        why => why.to_owned(),
    };
    Err(if outcome.status.code() == Some(IN_USE.into()) {
        HelperError::InUse(why)
    } else {
        HelperError::Failed(why)
    })
}

/// Why the helper refused its task.
#[derive(Debug)]
pub struct Refusal {
    /// Message for stderr.
    pub why: String,
    /// Exit status.
    pub status: u8,
}

impl From<loopdev::LoopError> for Refusal {
    fn from(error: loopdev::LoopError) -> Refusal {
        let in_use = matches!(error, loopdev::LoopError::InUse { .. });
        Refusal { why: error.to_string(), status: if in_use { IN_USE } else { 1 } }
    }
}

/// Runs a task in the helper process. `words`: the arguments that [`ask`] passed. Returns the answer for
/// stdout.
///
/// # Errors
/// The task failed.
pub fn run_helper(arguments: &[String]) -> Result<String, Refusal> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number =
        |text: &str| text.parse::<u32>().map_err(|why| Refusal { why: format!("{text}: {why}"), status: 2 });
    match arguments[..] {
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
            // Another process has unbound the loop device, which may be bound to another file by now.
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
        [page_cache::BLOCKS, node] => page_cache::blocks(node),
        [page_cache::PAGES] => page_cache::pages(),
        _ => Err(Refusal {
            why: "this subcommand is for the program itself, and not to be typed".to_owned(),
            status: 2,
        }),
    }
}
