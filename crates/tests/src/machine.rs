//! Virtual machines whose disks are vhost-user exports: QEMU without KVM, a distribution's kernel, and a root
//! file system on the first disk.
//!
//! `./x guest --machine DIR` writes the kernel and the image; tests find them by `BLOCKYARD_MACHINE=DIR`.
//!
//! *Invariants:* no machine outlives its [`Machine`]. Problems that its kernel reports fail the test that
//! calls [`Machine::check_console`].

use crate::server::Sandbox;
use crate::tools::{PATIENCE, skip, until};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Beginnings of kernel messages, after the time stamp, that no test may cause.
const PROBLEMS: &[&str] = &[
    "BUG: ",
    "WARNING: ",
    "Oops",
    "Kernel panic",
    "INFO: task ",
    "EXT4-fs error",
    "I/O error",
    "Buffer I/O error",
];

/// Returns the directory of kernel and image; `None`: there is none, and the test is skipped.
pub fn files() -> Option<PathBuf> {
    let folder = std::env::var_os("BLOCKYARD_MACHINE").map(PathBuf::from);
    if folder.is_none() {
        skip("no files of a virtual machine (./x guest --machine DIR, then BLOCKYARD_MACHINE=DIR)");
    }
    folder
}

/// Copies the image of the root file system; its holes stay.
///
/// # Panics
/// If it cannot be copied.
pub fn root_image(files: &Path, sandbox: &Sandbox) -> PathBuf {
    let copy = sandbox.path("root.img");
    let mut command = Command::new("cp");
    crate::tools::run(command.arg("--sparse=always").arg(files.join("root.img")).arg(&copy)).ok();
    copy
}

/// A disk of a machine: its name, and the socket of its export.
#[derive(Clone, Copy, Debug)]
pub struct MachineDisk<'a> {
    /// The device's ID in QEMU. `char-NAME` is its socket, `port-NAME` its PCIe port.
    pub name: &'a str,
    /// The export's socket.
    pub socket: &'a Path,
}

/// A running machine.
pub struct Machine {
    child: Child,
    /// The terminal of the shell.
    shell: BufReader<UnixStream>,
    monitor: BufReader<UnixStream>,
    /// Events of the monitor that were not awaited yet.
    events: Vec<Value>,
    console: PathBuf,
}

impl Machine {
    /// Starts a machine. `name` distinguishes its files from those of other machines of the sandbox; the
    /// first disk has the root file system.
    ///
    /// # Panics
    /// If it cannot be started.
    #[track_caller]
    pub fn start(
        files: &Path,
        sandbox: &Sandbox,
        name: &str,
        disks: &[MachineDisk<'_>],
        more: &[&str],
    ) -> Machine {
        let console = sandbox.path(&format!("{name}.console"));
        let (shell, monitor) = (sandbox.path(&format!("{name}.shell")), sandbox.path(&format!("{name}.qmp")));
        let log = File::create(sandbox.path(&format!("{name}.log"))).expect("a file in the sandbox");
        let mut qemu = Command::new(files.join("qemu"));
        qemu.args([
            "-M",
            "q35,memory-backend=memory",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            // Newer processor models take twice as long to emulate.
            "Nehalem-v1",
            "-smp",
            "2",
        ]);
        qemu.args(["-m", "384", "-object", "memory-backend-memfd,id=memory,size=384M,share=on"]);
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        qemu.arg("-kernel").arg(files.join("vmlinux")).arg("-initrd").arg(files.join("initrd"));
        qemu.args(["-append", "console=ttyS0 quiet printk.time=1 mitigations=off oops=panic rdinit=/init"]);
        qemu.arg("-serial").arg(format!("file:{}", console.display()));
        let server = |path: &Path| format!("{},server=on,wait=off", path.display());
        qemu.arg("-chardev").arg(format!("socket,id=shell,path={}", server(&shell)));
        qemu.args(["-serial", "chardev:shell"]);
        qemu.arg("-qmp").arg(format!("unix:{}", server(&monitor)));
        for (number, disk) in (1..).zip(disks) {
            let MachineDisk { name, socket } = disk;
            let port = format!("pcie-root-port,id=port-{name},chassis={number},slot={number}");
            let socket = format!("socket,id=char-{name},path={},reconnect-ms=50", socket.display());
            let device =
                format!("vhost-user-blk-pci,id={name},chardev=char-{name},bus=port-{name},num-queues=2");
            qemu.args(["-device", &port, "-chardev", &socket, "-device", &device]);
        }
        qemu.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut child = qemu.spawn().unwrap_or_else(|why| panic!("{}: {why}", files.join("qemu").display()));
        let mut connect = |path: &Path| {
            let stream = until(PATIENCE, || match UnixStream::connect(path) {
                Ok(stream) => Some(Some(stream)),
                Err(_) => matches!(child.try_wait(), Ok(Some(_))).then_some(None),
            });
            let Some(Some(stream)) = stream else {
                let log = std::fs::read_to_string(sandbox.path(&format!("{name}.log")));
                panic!("QEMU does not start: {}", log.unwrap_or_default());
            };
            stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
            BufReader::new(stream)
        };
        let (shell, monitor) = (connect(&shell), connect(&monitor));
        let mut machine = Machine { child, shell, monitor, events: Vec::new(), console };
        machine.monitor_line();
        machine.monitor("qmp_capabilities", json!({}));
        machine
    }

    /// Waits until the system on the root file system runs.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn await_system(&mut self) {
        // Skips output from before a reset.
        while self.shell_line() != "ready" {}
    }

    #[track_caller]
    fn shell_line(&mut self) -> String {
        let mut line = Vec::new();
        if let Err(why) = self.shell.read_until(b'\n', &mut line) {
            panic!("the machine does not answer: {why}; its console:\n{}", self.console());
        }
        assert!(!line.is_empty(), "the machine has ended; its console:\n{}", self.console());
        String::from_utf8_lossy(&line).trim_end().to_owned()
    }

    /// Begins a command without waiting for its end.
    ///
    /// # Panics
    /// If the machine has ended.
    pub fn begin(&mut self, command: &str) {
        let line = format!("{command}\n");
        self.shell.get_mut().write_all(line.as_bytes()).expect("the machine runs");
    }

    /// Runs a command; returns its output.
    ///
    /// # Panics
    /// If it fails, or does not end.
    #[track_caller]
    pub fn run(&mut self, command: &str) -> String {
        self.begin(command);
        let mut output = String::new();
        loop {
            let line = self.shell_line();
            if let Some(status) = line.strip_prefix("status ") {
                assert!(status == "0", "{command}: status {status}\n{output}; console:\n{}", self.console());
                return output;
            }
            output.push_str(&line);
            output.push('\n');
        }
    }

    /// Runs a command repeatedly until its output is `expected`.
    ///
    /// # Panics
    /// If that does not happen.
    #[track_caller]
    pub fn await_output(&mut self, command: &str, expected: &str) {
        let mut last = String::new();
        let found = until(PATIENCE, || {
            last = self.run(command);
            (last.trim() == expected).then_some(())
        });
        assert!(found.is_some(), "{command}: {last} instead of {expected}");
    }

    #[track_caller]
    fn monitor_line(&mut self) -> Value {
        let mut line = String::new();
        self.monitor.read_line(&mut line).unwrap_or_else(|why| panic!("QEMU's monitor: {why}"));
        serde_json::from_str(&line).unwrap_or_else(|why| panic!("QEMU's monitor: {line}: {why}"))
    }

    /// Executes a command of the monitor; returns its result.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn monitor(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments});
        let stream = self.monitor.get_mut();
        writeln!(stream, "{request}").expect("QEMU runs");
        loop {
            let mut answer = self.monitor_line();
            if answer.get("event").is_some() {
                self.events.push(answer);
                continue;
            }
            assert!(answer.get("error").is_none(), "{request}: {answer}");
            return answer["return"].take();
        }
    }

    /// Waits for an event, and forgets those before it.
    ///
    /// # Panics
    /// If it does not happen.
    #[track_caller]
    pub fn await_event(&mut self, name: &str) {
        loop {
            let event = if self.events.is_empty() { self.monitor_line() } else { self.events.remove(0) };
            if event["event"] == name {
                return;
            }
        }
    }

    /// Returns the kernel's messages.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    /// Checks that the kernel has reported no problem.
    ///
    /// # Panics
    /// If it has.
    #[track_caller]
    pub fn check_console(&self) {
        let console = self.console();
        let messages = console.lines().filter_map(|line| line.split_once("] ")).map(|(_, message)| message);
        let problem =
            messages.clone().find(|message| PROBLEMS.iter().any(|start| message.starts_with(start)));
        assert!(problem.is_none(), "{problem:?}; the console:\n{console}");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
