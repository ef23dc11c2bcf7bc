//! Devices over servers: ours in front, anyone's behind.
//!
//! *Invariant:* a foreign server is ended with its handle.

use crate::server::{Sandbox, Server};
use crate::tools::{PATIENCE, run_within, until};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// `blockyard serve STACK` as NAME, on NAME.sock in the sandbox.
///
/// # Panics
/// If it does not come up.
#[track_caller]
pub fn serve_as(sandbox: &Sandbox, name: &str, stack: &str, more: &[&str]) -> Server {
    let export = format!("unix:{}", sandbox.path(&format!("{name}.sock")).display());
    let mut arguments = vec!["serve", stack, "--name", name, "--nbd", &export];
    arguments.extend(["--ring", sandbox.engine().name()]);
    arguments.extend(more);
    sandbox.start(&mut sandbox.blockyard(&arguments), 1)
}

/// A device made from a table, as NAME on NAME.sock in the sandbox.
///
/// # Panics
/// If it does not come up.
#[track_caller]
pub fn table_as(sandbox: &Sandbox, name: &str, table: &str, more: &[&str]) -> Server {
    let file = sandbox.text(&format!("{name}.table"), table);
    let export = format!("unix:{}", sandbox.path(&format!("{name}.sock")).display());
    let file = file.to_string_lossy();
    let mut arguments = vec!["serve", "--table", &*file, "--name", name, "--nbd", &export];
    arguments.extend(["--ring", sandbox.engine().name()]);
    arguments.extend(more);
    sandbox.start(&mut sandbox.blockyard(&arguments), 1)
}

/// A device named `front` over the export that a URI names, which may have options of the stack behind it.
///
/// # Panics
/// If it does not come up.
#[track_caller]
pub fn over(sandbox: &Sandbox, uri: &str, more: &[&str]) -> Server {
    serve_as(sandbox, "front", &format!("nbd:{uri}"), more)
}

/// Writes and reads back through a server, at random, with checksums.
///
/// # Panics
/// If fio found anything wrong, or is not done in time.
#[track_caller]
pub fn fio_verify(server: &Server, options: &str) {
    run_within(&mut fio(server, options), PATIENCE).ok();
}

/// The command that does that.
pub fn fio(server: &Server, options: &str) -> Command {
    let mut fio = crate::tools::command(&["fio"]);
    fio.args(["--name=verify", "--ioengine=nbd", "--rw=randrw", "--verify=crc32c", "--verify_fatal=1"]);
    fio.arg(format!("--uri={}", server.uri())).args(options.split(' '));
    // It leaves a file of what is to be verified.
    fio.current_dir("/tmp").arg("--verify_state_save=0");
    fio
}

/// Whether somebody takes connections at a Unix socket, by the kernel's list of them: its file is there a moment before.
fn listens(socket: &Path) -> bool {
    /// `__SO_ACCEPTCON`.
    const LISTENS: &str = "00010000";
    let list = std::fs::read("/proc/net/unix").unwrap_or_default();
    let path = socket.to_string_lossy();
    String::from_utf8_lossy(&list).lines().any(|line| {
        let mut words = line.split_whitespace();
        words.nth(3) == Some(LISTENS) && words.nth(3) == Some(&*path)
    })
}

/// A server that is not ours.
pub struct Foreign {
    child: Child,
    socket: PathBuf,
}

impl Foreign {
    /// nbdkit with these words.
    ///
    /// # Panics
    /// If it does not come up.
    #[track_caller]
    pub fn nbdkit(sandbox: &Sandbox, words: &[&str]) -> Foreign {
        Foreign::nbdkit_as(sandbox, "foreign", words)
    }

    /// The same on NAME.sock.
    ///
    /// # Panics
    /// If it does not come up.
    #[track_caller]
    pub fn nbdkit_as(sandbox: &Sandbox, name: &str, words: &[&str]) -> Foreign {
        let socket = sandbox.path(&format!("{name}.sock"));
        let mut command = sandbox.tool(&["nbdkit", "--foreground", "--exit-with-parent", "-U"]);
        command.arg(&socket).args(words);
        Foreign::start(command, socket)
    }

    /// qemu-nbd on a file, for one client unless told otherwise.
    ///
    /// # Panics
    /// If it does not come up.
    #[track_caller]
    pub fn qemu_nbd(sandbox: &Sandbox, image: &Path, more: &[&str]) -> Foreign {
        let socket = sandbox.path("foreign.sock");
        let mut command =
            sandbox.tool(&["qemu-nbd", "-t", "-f", "raw", "-x", "disk", "--discard=unmap", "-k"]);
        command.arg(&socket).args(more).arg(image);
        Foreign::start(command, socket)
    }

    #[track_caller]
    fn start(mut command: Command, socket: PathBuf) -> Foreign {
        let _ = std::fs::remove_file(&socket);
        let program = command.get_program().to_owned();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut child = child.unwrap_or_else(|why| panic!("{}: {why}", program.display()));
        // A connection that says nothing costs a server for one client its only place, so nothing connects here.
        let is_up = until(PATIENCE, || listens(&socket).then_some(()));
        assert!(is_up.is_some(), "{}: {:?}", program.display(), child.try_wait());
        Foreign { child, socket }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it is.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
