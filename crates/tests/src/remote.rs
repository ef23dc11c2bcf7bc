//! Devices over servers: ours in front, any server behind.
//!
//! *Invariant:* a foreign server is ended with its handle.

use crate::server::{Sandbox, Server};
use crate::tools::{PATIENCE, run_within, until};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Runs `blockyard serve STACK` with the name NAME, on NAME.sock in the sandbox.
///
/// # Panics
/// If it does not start.
#[track_caller]
pub fn serve_as(sandbox: &Sandbox, name: &str, stack: &str, more: &[&str]) -> Server {
    let export = format!("unix:{}", sandbox.path(&format!("{name}.sock")).display());
    let mut arguments = vec!["serve", stack, "--name", name, "--nbd", &export];
    arguments.extend(["--ring", sandbox.engine().name()]);
    arguments.extend(more);
    sandbox.start(&mut sandbox.blockyard(&arguments), 1)
}

/// Serves a device created from a table, as NAME on NAME.sock in the sandbox.
///
/// # Panics
/// If it does not start.
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

/// Serves a device named `front` over the export of a URI, which may be followed by options of the stack.
///
/// # Panics
/// If it does not start.
#[track_caller]
pub fn over(sandbox: &Sandbox, uri: &str, more: &[&str]) -> Server {
    serve_as(sandbox, "front", &format!("nbd:{uri}"), more)
}

/// Writes and reads back through a server, at random, with checksums.
///
/// # Panics
/// If fio finds wrong data, or takes too long.
#[track_caller]
pub fn fio_verify(server: &Server, options: &str) {
    run_within(&mut fio(server, options), PATIENCE).ok();
}

/// Returns the fio command for [`fio_verify`].
pub fn fio(server: &Server, options: &str) -> Command {
    let mut fio = crate::tools::command(&["fio"]);
    fio.args(["--name=verify", "--ioengine=nbd", "--rw=randrw", "--verify=crc32c", "--verify_fatal=1"]);
    fio.arg(format!("--uri={}", server.uri())).args(options.split(' '));
    // fio leaves a file with its verify state.
    fio.current_dir("/tmp").arg("--verify_state_save=0");
    fio
}

/// Returns whether a process listens on a Unix socket, by the kernel's list: the file exists a moment
/// earlier.
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

/// A foreign server.
pub struct Foreign {
    child: Child,
    socket: PathBuf,
}

impl Foreign {
    /// Starts nbdkit with these arguments.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn nbdkit(sandbox: &Sandbox, arguments: &[&str]) -> Foreign {
        Foreign::nbdkit_as(sandbox, "foreign", arguments)
    }

    /// Starts nbdkit on NAME.sock.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn nbdkit_as(sandbox: &Sandbox, name: &str, arguments: &[&str]) -> Foreign {
        let socket = sandbox.path(&format!("{name}.sock"));
        let mut command = sandbox.tool(&["nbdkit", "--foreground", "--exit-with-parent", "-U"]);
        command.arg(&socket).args(arguments);
        Foreign::start(command, socket)
    }

    /// Starts qemu-nbd on a file, for one client by default.
    ///
    /// # Panics
    /// If it does not start.
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
        // This does not connect: an idle connection would occupy the only slot of a server for one client.
        let is_up = until(PATIENCE, || listens(&socket).then_some(()));
        assert!(is_up.is_some(), "{}: {:?}", program.display(), child.try_wait());
        Foreign { child, socket }
    }

    /// Returns its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the URI of an export.
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
