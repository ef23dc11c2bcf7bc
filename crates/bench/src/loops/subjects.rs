//! The subjects of the comparison: each kind of loop device, how it is created and removed.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::cgroups::Cgroups;
use crate::error::{Error, Result};
use crate::tools::{not_started, output, run};

/// How a subject creates its device. `{image}`, `{file}` and `{size}` are replaced in its arguments.
#[derive(Clone, Copy, Debug)]
enum Setup {
    /// The kernel's loop driver over the image itself.
    Kernel { direct: bool },
    /// The kernel's loop driver, buffered, with a worker for each job instead of one for all.
    Workers,
    /// blockyard with these arguments; it creates the loop device itself.
    Ours(&'static [&'static str]),
    /// A program that exposes the image as `{file}`, under the kernel's loop driver with direct I/O.
    Under(&'static [&'static str]),
}

/// One row of the comparison.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject {
    /// Name in tables and on the command line.
    pub(super) name: &'static str,
    setup: Setup,
}

/// All subjects. The first is the reference.
pub(super) const SUBJECTS: &[Subject] = &[
    Subject { name: "loop-buffered", setup: Setup::Kernel { direct: false } },
    Subject { name: "loop-workers", setup: Setup::Workers },
    Subject { name: "loop-direct", setup: Setup::Kernel { direct: true } },
    Subject { name: "ours", setup: Setup::Ours(&["file:{image}", "--loop"]) },
    Subject { name: "ours-dev-fuse", setup: Setup::Ours(&["file:{image}", "--loop=uring=off"]) },
    Subject { name: "ours-one-thread", setup: Setup::Ours(&["file:{image}", "--loop", "--queues", "1"]) },
    Subject { name: "ours-direct", setup: Setup::Ours(&["file:{image},direct=on", "--loop"]) },
    Subject { name: "ours-ram", setup: Setup::Ours(&["ram:{size}", "--loop"]) },
    Subject {
        name: "ours-passthrough",
        setup: Setup::Ours(&["file:{image},format=raw", "--loop=passthrough"]),
    },
    Subject {
        name: "nbdfuse",
        setup: Setup::Under(&["nbdfuse", "{file}", "--command", "nbdkit", "-s", "file", "{image}"]),
    },
    Subject {
        name: "qemu",
        setup: Setup::Under(&[
            "qemu-storage-daemon",
            "--blockdev",
            "driver=file,node-name=image,filename={image}",
            "--export",
            "type=fuse,id=export,node-name=image,mountpoint={file},writable=on",
        ]),
    },
];

/// Longest time of an attach or a detach.
const LIMIT: Duration = Duration::from_secs(20);

/// A device with a mounted file system.
pub(super) struct Running {
    pub(super) name: &'static str,
    /// Path of the device node.
    pub(super) node: PathBuf,
    /// Mount point of the file system on its first part.
    pub(super) mount: PathBuf,
    /// Process ID of the server, if there is one.
    pub(super) server: Option<u32>,
    /// Time from the first command to a node that can be opened.
    pub(super) attach: Duration,
    /// The cgroups of the jobs' processes, if each has its own; and where fio writes what the command that
    /// changes the cgroup prints: this path with an extension.
    pub(super) groups: Option<(Cgroups, PathBuf)>,
    child: Option<Child>,
    /// Whether a loop device must be unbound separately, because it does not end with the server.
    bound: bool,
    left: Vec<PathBuf>,
}

impl Subject {
    /// Creates the device and a file system on it.
    pub(super) fn start(&self, folder: &Path, size: u64) -> Result<Running> {
        let image = folder.join(format!("{}.img", self.name));
        let file = folder.join(format!("{}.fuse", self.name));
        let mount = folder.join(format!("{}.mnt", self.name));
        let made = File::create(&image).and_then(|image| image.set_len(size));
        made.map_err(|error| Error(format!("{}: {error}", image.display())))?;
        std::fs::create_dir_all(&mount).map_err(|error| Error(format!("{}: {error}", mount.display())))?;
        let fill = |arguments: &[&str]| -> Vec<String> {
            let put = |word: &&str| {
                let word = word.replace("{image}", &image.to_string_lossy());
                word.replace("{file}", &file.to_string_lossy()).replace("{size}", &size.to_string())
            };
            arguments.iter().map(put).collect()
        };
        let mut one = Running {
            name: self.name,
            node: PathBuf::new(),
            mount,
            server: None,
            attach: Duration::ZERO,
            groups: None,
            child: None,
            bound: false,
            left: vec![image.clone(), file.clone()],
        };
        let started = Instant::now();
        match self.setup {
            Setup::Kernel { direct } => one.bind(&image, direct)?,
            Setup::Workers => {
                let log = folder.join("loop-workers");
                one.left.push(log.with_extension("prerun.txt"));
                one.groups = Some((Cgroups::new(folder.join("loop-workers.groups"))?, log));
                one.bind(&image, false)?;
            }
            Setup::Ours(words) => one.serve(&fill(words))?,
            Setup::Under(words) => one.show(&fill(words), &file, size)?,
        }
        one.attach = started.elapsed();
        let node = one.node.to_string_lossy().into_owned();
        run(&["mkfs.xfs", "-q", "-f", "-K", &node])?;
        run(&["mount", "-t", "xfs", &node, &one.mount.to_string_lossy()])?;
        Ok(one)
    }
}

impl Running {
    fn bind(&mut self, file: &Path, direct: bool) -> Result<()> {
        let direct = if direct { "--direct-io=on" } else { "--direct-io=off" };
        self.node = output(&["losetup", "-f", "--show", direct, &file.to_string_lossy()])?.trim().into();
        self.bound = true;
        Ok(())
    }

    fn serve(&mut self, arguments: &[String]) -> Result<()> {
        let own = std::env::current_exe().map_err(|error| Error(error.to_string()))?;
        let mut child = Command::new(own.with_file_name("blockyard"))
            .arg("serve")
            .args(arguments)
            .args(["--name", &format!("bench-{}", self.name)])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Error(format!("blockyard: {error}")))?;
        let mut line = String::new();
        let stdout = child.stdout.take();
        self.server = Some(child.id());
        self.child = Some(child);
        stdout
            .and_then(|pipe| BufReader::new(pipe).read_line(&mut line).ok())
            .and_then(|_| line.split_whitespace().nth(2))
            .map(|node| self.node = node.into())
            .ok_or_else(|| Error("blockyard: it did not come up".into()))
    }

    fn show(&mut self, arguments: &[String], file: &Path, size: u64) -> Result<()> {
        File::create(file).map_err(|error| Error(format!("{}: {error}", file.display())))?;
        // Another build of a program, as for the NBD servers: NBDFUSE, QEMU_STORAGE_DAEMON.
        let program = std::env::var_os(arguments[0].to_uppercase().replace('-', "_"));
        let child = Command::new(program.unwrap_or_else(|| arguments[0].clone().into()))
            .args(&arguments[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| not_started(&arguments[0], &error))?;
        self.server = Some(child.id());
        self.child = Some(child);
        let start = Instant::now();
        while std::fs::metadata(file).map_or(0, |there| there.len()) != size {
            if start.elapsed() > LIMIT {
                return Err(Error(format!("{}: it shows nothing", arguments[0])));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.bind(file, true)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Errors are ignored: the mount may not exist.
        let _ = run(&["umount", &self.mount.to_string_lossy()]);
        if self.bound {
            let _ = run(&["losetup", "-d", &self.node.to_string_lossy()]);
        }
        if let Some(child) = &mut self.child {
            let _ = run(&["kill", &child.id().to_string()]);
            let start = Instant::now();
            while matches!(child.try_wait(), Ok(None)) && start.elapsed() < LIMIT {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        for path in &self.left {
            if std::fs::remove_file(path).is_err() {
                let _ = run(&["umount", "-l", &path.to_string_lossy()]);
                let _ = std::fs::remove_file(path);
            }
        }
        let _ = std::fs::remove_dir(&self.mount);
    }
}
