//! The device under a log: a file, a stack, a new file system, or zeroes. It is only read.

use super::device::tool;
use super::save::Run;
use crash::Source;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// An open base.
pub(super) struct Base {
    file: Option<Arc<File>>,
    size: Option<u64>,
    /// The process that serves the stack; `None` for a file or zeroes.
    server: Option<Child>,
}

impl Base {
    /// Opens a file, or serves a stack and opens the file by which it is served.
    pub(super) fn open(file: Option<&Path>, on: Option<&str>, work: &Path) -> Result<Base, String> {
        let plain = on.and_then(|on| on.strip_prefix("file:")).filter(|path| !path.contains(','));
        let (path, server) = match (file, plain, on) {
            (Some(file), ..) => (file.to_owned(), None),
            (None, Some(path), _) => (PathBuf::from(path), None),
            (None, None, Some(stack)) => {
                let at = work.join("base");
                (at.clone(), Some(serve(stack, &at)?))
            }
            (None, None, None) => return Ok(Base { file: None, size: None, server: None }),
        };
        // The value owns the server before the file is opened, so that an error ends the server.
        let mut base = Base { file: None, size: None, server };
        let failed = |why: std::io::Error| format!("{}: {why}", path.display());
        let mut file = File::open(&path).map_err(failed)?;
        let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
        base.size = Some(size);
        base.file = Some(Arc::new(file));
        Ok(base)
    }

    /// Returns the size of the base in bytes; `None` for zeroes.
    pub(super) const fn size(&self) -> Option<u64> {
        self.size
    }

    pub(super) fn source(&self) -> Arc<dyn Source> {
        match &self.file {
            Some(file) => file.clone(),
            None => Arc::new(Vec::new()),
        }
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        self.file = None;
        if let Some(mut server) = self.server.take() {
            let pid = rustix::process::Pid::from_child(&server);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let _ = server.wait();
        }
    }
}

/// Serves a stack as a file; returns when it is ready.
fn serve(stack: &str, at: &Path) -> Result<Child, String> {
    let mut command = Command::new("/proc/self/exe");
    command.args(["serve", stack, "--name"]).arg(format!("crash-base-{}", std::process::id()));
    command.arg("--fuse").arg(at).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut server = command.spawn().map_err(|why| why.to_string())?;
    let mut line = String::new();
    if let Some(stdout) = server.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(|why| why.to_string())?;
    }
    if line.is_empty() {
        let _ = server.wait();
        return Err(format!("{stack}: it cannot be served (the error is above)"));
    }
    Ok(server)
}

/// Creates a file system in a sparse file of the run.
pub(super) fn make_fs(run: &Run, fs: &str, size: u64) -> Result<PathBuf, String> {
    let known =
        !fs.is_empty() && fs.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if !known {
        return Err(format!("{fs}: not the name of a file system, such as ext4"));
    }
    let path = run.file(Path::new("base.img"));
    let file = File::create_new(&path).map_err(|why| format!("{}: {why}", path.display()))?;
    file.set_len(size).map_err(|why| format!("{}: {why}", path.display()))?;
    tool(Command::new(format!("mkfs.{fs}")).arg(&path))
        .map_err(|why| format!("{why} (for a larger device give --size)"))?;
    Ok(path)
}
