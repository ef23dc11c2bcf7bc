//! All kinds of stores: how to create one in a folder, and how to serve it.

use super::clock::Clock;
use super::load::Disk;
use super::story::{Promise, Story};
use sim::Rng;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A kind of store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Store {
    /// A file through the page cache.
    Raw,
    /// A file with direct I/O.
    Direct,
    /// An overlay over a file.
    Overlay,
    /// An overlay that is committed while it is served.
    Commit,
    /// A qcow2 image.
    Qcow2,
    /// A qcow2 image with a backing file.
    Backed,
    /// An origin and its persistent snapshot.
    Snapshot,
    /// A mirror with a log on a file.
    Mirror,
    /// log-writes on files.
    Log,
    /// Several devices of one process.
    Several,
}

impl Store {
    /// All kinds.
    pub const ALL: [Store; 10] = [
        Store::Raw,
        Store::Direct,
        Store::Overlay,
        Store::Commit,
        Store::Qcow2,
        Store::Backed,
        Store::Snapshot,
        Store::Mirror,
        Store::Log,
        Store::Several,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Store::Raw => "raw",
            Store::Direct => "direct",
            Store::Overlay => "overlay",
            Store::Commit => "commit",
            Store::Qcow2 => "qcow2",
            Store::Backed => "backed",
            Store::Snapshot => "snapshot",
            Store::Mirror => "mirror",
            Store::Log => "log",
            Store::Several => "several",
        }
    }

    /// Returns the kind with a name.
    pub fn named(name: &str) -> Option<Store> {
        Store::ALL.into_iter().find(|store| store.name() == name)
    }

    /// Returns the data that survives a killed server. Tables of a qcow2 image are in memory until a flush.
    pub fn kept_by_kill(self) -> Promise {
        match self {
            Store::Qcow2 | Store::Backed => Promise::Flushed,
            _ => Promise::Acknowledged,
        }
    }

    /// Returns the program that it requires.
    pub fn tool(self) -> Option<&'static str> {
        matches!(self, Store::Qcow2 | Store::Backed).then_some("qemu-img")
    }
}

/// A device of a setup.
#[derive(Clone, Debug)]
pub struct Device {
    /// Its name, after the setup's prefix.
    pub name: &'static str,
    /// The number of the disk in its stamps.
    pub disk: u64,
    /// Initial versions of its sectors.
    pub versions: Vec<u64>,
}

impl Device {
    fn story(&self, clock: Clock) -> Story {
        Story::new(self.disk, clock, self.versions.iter().copied())
    }
}

/// A store with its parameters.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The kind of store.
    pub store: Store,
    /// The setup's devices.
    pub devices: Vec<Device>,
    /// Devices of a topology, with `{dir}` and `{p}` in place of the folder and a prefix.
    text: String,
    /// Images that `qemu-img check` can check.
    pub images: Vec<&'static str>,
    /// The setup's parameters, for messages.
    pub about: String,
    /// Whether it is served without io_uring.
    pub epoll: bool,
}

/// Sectors of a device.
const SECTORS: u64 = 2048;

impl Setup {
    /// Draws the parameters of a setup.
    pub fn draw(store: Store, rng: &mut Rng) -> Setup {
        let mut setup = Setup {
            store,
            devices: Vec::new(),
            text: String::new(),
            images: Vec::new(),
            about: String::new(),
            epoll: rng.chance(300),
        };
        let chunk = *rng.pick(&["4K", "16K", "64K"]);
        match store {
            Store::Raw => setup.device("disk", "stack = \"file:{dir}/disk\"", rng),
            Store::Direct => setup.device("disk", "stack = \"file:{dir}/disk,direct=on\"", rng),
            Store::Overlay | Store::Commit => {
                setup.about = format!("chunk={chunk}");
                setup.device("disk", &overlay(chunk), rng);
            }
            Store::Qcow2 | Store::Backed => {
                let kinds = [
                    "64K",
                    "4K",
                    "16K",
                    "512",
                    "64K,extended_l2=on",
                    "16K,extended_l2=on",
                    "4K,refcount_bits=1",
                ];
                let cluster = *rng.pick(&kinds);
                setup.about = cluster.to_owned();
                setup.images = vec!["disk.qcow2"];
                setup.device("disk", "stack = \"file:{dir}/disk.qcow2,format=qcow2\"", rng);
            }
            Store::Snapshot => {
                let sectors = *rng.pick(&[8, 16, 64]);
                setup.about = format!("chunk {sectors}");
                let table = format!("table = \"0 {SECTORS} snapshot {{dir}}/base {{dir}}/cow P {sectors}\"");
                setup.device("base", &format!("table = \"0 {SECTORS} snapshot-origin {{dir}}/base\""), rng);
                setup.device("snap", &table, rng);
                let (disk, versions) = (setup.devices[0].disk, setup.devices[0].versions.clone());
                setup.devices[1].disk = disk;
                setup.devices[1].versions = versions;
            }
            Store::Mirror => {
                let region = *rng.pick(&[8, 64, 512]);
                setup.about = format!("region {region}");
                setup.device("pair", &mirror(region), rng);
            }
            Store::Log => {
                let layer = "layers = [\"log,file={dir}/w.log,size=8M,create\"]";
                setup.device("disk", &format!("stack = \"file:{{dir}}/disk\"\n{layer}"), rng);
            }
            Store::Several => {
                setup.device("disk", "stack = \"file:{dir}/disk\"", rng);
                setup.device("over", &overlay(chunk), rng);
                setup.device("pair", &mirror(64), rng);
            }
        }
        setup
    }

    fn device(&mut self, name: &'static str, body: &str, rng: &mut Rng) {
        self.text += &format!("[device.{{p}}{name}]\n{body}\n");
        self.text += &format!("[[export]]\ndevice = \"{{p}}{name}\"\nnbd = \"unix:{{sock}}\"\n");
        let disk = rng.word() | 1;
        let mut versions = Vec::new();
        while versions.len() < SECTORS as usize {
            let version = if rng.chance(500) { 0 } else { 1 + rng.below(1000) };
            versions.extend(std::iter::repeat_n(version, 1 + rng.below(300) as usize));
        }
        versions.truncate(SECTORS as usize);
        self.devices.push(Device { name, disk, versions });
    }

    /// Returns the devices as disks with their initial versions.
    pub fn disks(&self, clock: &Clock) -> Vec<Disk> {
        let devices = self.devices.iter().zip(0..);
        devices.map(|(device, number)| Disk::new(device.story(clock.clone()).numbered(number))).collect()
    }

    /// Creates the setup's files.
    ///
    /// # Errors
    /// A file cannot be created.
    pub fn prepare(&self, dir: &Path) -> std::io::Result<()> {
        for device in &self.devices {
            let content = Story::initial(device.disk, device.versions.iter().copied());
            match (self.store, device.name) {
                (Store::Qcow2 | Store::Backed, _) => self.image(dir, &content)?,
                (Store::Overlay | Store::Commit, _) | (_, "over") => {
                    std::fs::write(dir.join("base"), content)?
                }
                (Store::Mirror, _) | (_, "pair") => {
                    std::fs::write(dir.join("a"), &content)?;
                    std::fs::write(dir.join("b"), &content)?;
                    std::fs::write(dir.join("mlog"), vec![0; 64 << 10])?;
                }
                (Store::Snapshot, "base") => {
                    std::fs::write(dir.join("base"), content)?;
                    std::fs::write(dir.join("cow"), vec![0; 4 << 20])?;
                }
                (Store::Snapshot, _) => {}
                _ => std::fs::write(dir.join("disk"), content)?,
            }
        }
        Ok(())
    }

    fn image(&self, dir: &Path, content: &[u8]) -> std::io::Result<()> {
        // Created on a file system with a page cache, then copied, so that calls of qemu-img are not
        // recorded.
        let scratch = tempfile::tempdir()?;
        let (raw, image) = (scratch.path().join("base"), scratch.path().join("disk.qcow2"));
        std::fs::write(&raw, content)?;
        let cluster = format!("cluster_size={}", self.about);
        let mut command = Command::new("qemu-img");
        if self.store == Store::Backed {
            std::fs::write(dir.join("base"), content)?;
            command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base", "-o", &cluster]);
            command.arg(&image).current_dir(scratch.path());
        } else {
            let compressed = if self.devices[0].disk % 4 == 1 { "-c" } else { "-q" };
            command.args(["convert", "-q", compressed, "-f", "raw", "-O", "qcow2", "-o", &cluster]);
            command.arg(&raw).arg(&image);
        }
        if !command.status()?.success() {
            return Err(std::io::Error::other("qemu-img failed"));
        }
        std::fs::write(dir.join("disk.qcow2"), std::fs::read(&image)?)
    }

    /// Returns the first lines of a topology.
    pub fn head(&self) -> &'static str {
        if self.epoll { "ring = \"epoll\"\n" } else { "" }
    }

    /// Returns a topology with this setup alone.
    pub fn alone(&self, dir: &Path, socket: &Path) -> String {
        self.head().to_owned() + &self.topology(dir, "", socket)
    }

    /// Returns the setup's part of a topology: for a folder, with a prefix of names, and exports on a socket.
    pub fn topology(&self, dir: &Path, prefix: &str, socket: &Path) -> String {
        self.text
            .replace("{dir}", &dir.to_string_lossy())
            .replace("{p}", prefix)
            .replace("{sock}", &socket.to_string_lossy())
    }

    /// Runs `qemu-img check` on the images in a folder; returns its errors, without leaks.
    pub fn check_images(&self, dir: &Path) -> Option<String> {
        for image in &self.images {
            let path: PathBuf = dir.join(image);
            let Ok(output) = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&path).output()
            else {
                continue;
            };
            // Status 3: leaked clusters.
            if !matches!(output.status.code(), Some(0 | 3)) {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let errors = String::from_utf8_lossy(&output.stderr);
                return Some(format!("qemu-img check: {}: {text}{errors}", output.status));
            }
        }
        None
    }
}

fn overlay(chunk: &str) -> String {
    format!("stack = \"file:{{dir}}/base\"\nlayers = [\"cow,file={{dir}}/mine.cow,create,chunk={chunk}\"]")
}

fn mirror(region: u64) -> String {
    format!("table = \"0 {SECTORS} mirror disk 2 {{dir}}/mlog {region} 2 {{dir}}/a 0 {{dir}}/b 0\"")
}
