//! Loop devices and their equivalents: devices of all our processes, and the kernel's loop devices from
//! sysfs.

use engine::control::{ControlClient, DeviceInfo};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Identifies the backing file of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BackingFile {
    /// Major and minor number of its file system.
    pub(super) device: (u32, u32),
    pub(super) inode: u64,
}

impl BackingFile {
    pub(super) fn of(path: impl AsRef<Path>) -> Option<BackingFile> {
        let meta = fs::metadata(path).ok()?;
        let number = meta.dev();
        Some(BackingFile {
            device: (rustix::fs::major(number), rustix::fs::minor(number)),
            inode: meta.ino(),
        })
    }

    /// Returns the device number as the kernel encodes it for user space (`new_encode_dev`).
    pub(super) fn number(self) -> u64 {
        let (major, minor) = (u64::from(self.device.0), u64::from(self.device.1));
        minor & 0xff | major << 8 | (minor & !0xff) << 12
    }
}

/// A device in a list.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Its device node; the name of one of our devices without a node.
    pub(super) name: String,
    /// The path of the backing file, which may be any bytes; `None`: the device is unbound.
    pub(super) back_file: Option<OsString>,
    pub(super) back: Option<BackingFile>,
    pub(super) device: Option<(u32, u32)>,
    pub(super) offset: Option<u64>,
    pub(super) sizelimit: Option<u64>,
    pub(super) autoclear: bool,
    pub(super) partscan: bool,
    pub(super) read_only: bool,
    pub(super) dio: bool,
    pub(super) block: u32,
    /// For our devices: the control client of the process, and the name.
    pub(super) ours: Option<(ControlClient, String)>,
}

impl Row {
    /// Returns whether an argument names this device.
    pub(super) fn is(&self, arg: &str) -> bool {
        let own = self.ours.as_ref().is_some_and(|(_, name)| name == arg);
        own || self.name == arg || self.name.strip_prefix("/dev/") == Some(arg)
    }

    /// Returns whether the device is over that file, and starts at that offset.
    pub(super) fn is_over(&self, file: BackingFile, offset: Option<u64>) -> bool {
        self.back == Some(file) && offset.is_none_or(|offset| self.offset == Some(offset))
    }

    fn of_ours(client: ControlClient, info: &DeviceInfo) -> Row {
        let fact = |name: &str| info.backend.get(name);
        let number = |name: &str| fact(name).and_then(|text| text.parse::<u64>().ok());
        let flag = |name: &str| number(name) == Some(1);
        let node = info.exports.iter().find(|export| export.address.starts_with("/dev/"));
        let back_file = fact("backing_file").or(fact("path")).map(OsString::from);
        Row {
            name: node.map_or_else(|| info.name.clone(), |export| export.address.clone()),
            back: back_file.as_deref().and_then(BackingFile::of),
            device: node.and_then(|export| device_number(&export.address)),
            offset: number("offset").or(back_file.as_ref().map(|_| 0)),
            sizelimit: number("sizelimit").or(back_file.as_ref().map(|_| 0)),
            back_file: back_file.or_else(|| Some(info.stack.clone().into())),
            autoclear: flag("autoclear"),
            partscan: flag("partscan"),
            read_only: info.read_only,
            dio: flag("dio"),
            block: info.logical_block_size,
            ours: Some((client, info.name.clone())),
        }
    }

    /// Returns a loop device of the kernel, bound or not.
    pub(super) fn of_kernel(name: &str) -> Option<Row> {
        let directory = Path::new("/sys/block").join(name);
        let text = |path: &str| {
            fs::read_to_string(directory.join(path)).ok().map(|text| text.trim_end_matches('\n').to_owned())
        };
        let number = |path: &str| text(path).and_then(|text| text.parse::<u64>().ok());
        if !is_loop_name(name) || !directory.is_dir() {
            return None;
        }
        let back_file = fs::read(directory.join("loop/backing_file")).ok().map(|mut bytes| {
            // The kernel appends one line end; any before it belongs to the name.
            bytes.pop_if(|last| *last == b'\n');
            OsString::from_vec(bytes)
        });
        Some(Row {
            name: format!("/dev/{name}"),
            back: back_file.as_deref().and_then(BackingFile::of),
            back_file,
            device: text("dev").and_then(|text| {
                let (major, minor) = text.split_once(':')?;
                Some((major.parse().ok()?, minor.parse().ok()?))
            }),
            offset: number("loop/offset"),
            sizelimit: number("loop/sizelimit"),
            autoclear: number("loop/autoclear") == Some(1),
            partscan: number("loop/partscan") == Some(1),
            read_only: number("ro") == Some(1),
            dio: number("loop/dio") == Some(1),
            block: number("queue/logical_block_size").unwrap_or(512) as u32,
            ours: None,
        })
    }
}

fn is_loop_name(name: &str) -> bool {
    name.strip_prefix("loop")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

fn device_number(node: &str) -> Option<(u32, u32)> {
    let meta = fs::metadata(node).ok().filter(|meta| meta.file_type().is_block_device())?;
    Some((rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())))
}

/// Returns the number in a loop device's name.
fn number_of(name: &str) -> Option<u32> {
    name.strip_prefix("/dev/loop")?.parse().ok()
}

/// Returns all devices in use: ours, then loop devices of the kernel that are not exports of ours.
pub(super) fn used(ours: Vec<(ControlClient, DeviceInfo)>) -> Vec<Row> {
    let mut rows: Vec<Row> = ours.into_iter().map(|(client, info)| Row::of_ours(client, &info)).collect();
    let names = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let kernels: Vec<Row> = names
        .filter_map(|entry| Row::of_kernel(&entry.file_name().to_string_lossy()))
        .filter(|row| row.back_file.is_some() && !rows.iter().any(|other| other.name == row.name))
        .collect();
    rows.extend(kernels);
    rows.sort_by(|a, b| (number_of(&a.name), &a.name).cmp(&(number_of(&b.name), &b.name)));
    rows
}

/// Returns the first unbound loop device, as the kernel would choose it (`LOOP_CTL_GET_FREE`).
pub(super) fn first_free() -> Option<String> {
    fs::metadata("/dev/loop-control").ok()?;
    let is_free = |number: &u32| !Path::new(&format!("/sys/block/loop{number}/loop/backing_file")).exists();
    (0..1 << 20).find(is_free).map(|number| format!("/dev/loop{number}"))
}
