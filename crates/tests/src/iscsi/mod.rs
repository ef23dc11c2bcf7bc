//! iSCSI targets in tests: ours, started in a sandbox, and the suites of libiscsi that run against it.

pub mod conformance;
pub mod initiator;

use crate::server::{Sandbox, Server, binary};
use crate::tools::{run, skip};
use std::io::ErrorKind;
use std::net::TcpListener;
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Environment variable with the URL of a logical unit of another target, for tests that only need a URL. Its
/// data is lost.
pub const FOREIGN: &str = "BLOCKYARD_ISCSI_URL";

/// The target's name in tests, for a device `disk`.
pub const NAME: &str = "iqn.2026-11.io.blockyard:disk";

/// Returns whether the binary under test lacks `--iscsi`; then the calling test is skipped and must return.
pub fn lacks_export() -> bool {
    let help = run(Command::new(binary()).args(["help", "exports"]));
    let lacks = !help.stdout.contains("--iscsi");
    if lacks {
        skip("this blockyard has no --iscsi");
    }
    lacks
}

/// Ports below those that the kernel gives to connections by itself.
const PORTS: Range<u16> = 20_000..30_000;

/// Returns a TCP port that is free, and that no other test is given until this process ends: a server that
/// binds it cannot meet another one.
///
/// # Panics
/// If all ports are taken.
pub fn free_port() -> u16 {
    /// One socket for each port that this process was given. Its abstract name reserves the port.
    static RESERVED: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    // A machine without IPv6 has no address to bind.
    let is_free = |host: &str, port: u16| match TcpListener::bind((host, port)) {
        Ok(_) => true,
        Err(why) => why.kind() == ErrorKind::AddrNotAvailable,
    };
    let reserve = |port: u16| {
        let name = SocketAddr::from_abstract_name(format!("blockyard-test-port-{port}")).ok()?;
        let reserved = UnixListener::bind_addr(&name).ok()?;
        (is_free("127.0.0.1", port) && is_free("::1", port)).then_some((port, reserved))
    };
    let (port, reserved) = PORTS.into_iter().find_map(reserve).expect("a free port");
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner).push(reserved);
    port
}

/// A served logical unit.
pub struct Target {
    /// The process; `None` for [`FOREIGN`].
    pub server: Option<Server>,
    /// `iscsi://HOST:PORT/NAME/LUN`.
    pub url: String,
}

impl Target {
    /// Serves a stack as `disk` on a port of its own. `options`: further options of `--iscsi`, with their
    /// comma; `more`: further arguments.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn serve(sandbox: &Sandbox, stack: &str, options: &str, more: &[&str]) -> Target {
        Target::serve_at(sandbox, free_port(), stack, options, more)
    }

    /// As [`Target::serve`], on this port.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn serve_at(sandbox: &Sandbox, port: u16, stack: &str, options: &str, more: &[&str]) -> Target {
        let export = format!("tcp:127.0.0.1:{port}{options}");
        let words = ["serve", stack, "--name", "disk", "--iscsi", &export, "--ring", sandbox.engine().name()];
        let server = sandbox.start(&mut sandbox.blockyard(&[&words[..], more].concat()), 1);
        let url = server.uri().to_owned();
        Target { server: Some(server), url }
    }

    /// The target that the environment names, if any.
    pub fn foreign() -> Option<Target> {
        let url = std::env::var(FOREIGN).ok()?;
        Some(Target { server: None, url })
    }

    /// Returns the URL with credentials for CHAP.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        self.url.replacen("iscsi://", &format!("iscsi://{user}%{password}@"), 1)
    }

    /// Returns `HOST:PORT`.
    ///
    /// # Panics
    /// If the URL is malformed.
    pub fn portal(&self) -> &str {
        self.url.split('/').nth(2).unwrap_or_else(|| panic!("{}: no portal", self.url))
    }
}

/// Returns the stack of an image.
pub fn file_stack(path: &Path) -> String {
    format!("file:{}", path.display())
}

/// Creates a file with a user and a secret, as `chap=` takes it; returns its path.
///
/// # Panics
/// If it cannot be created.
pub fn chap_file(sandbox: &Sandbox, user: &str, secret: &str) -> String {
    let file = sandbox.text("chap", &format!("{user}:{secret}\n"));
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).expect("it is ours");
    file.to_str().expect("a sandbox has plain paths").to_owned()
}
