//! Follows a file down to the devices that it depends on. A loop device on another is fine, a cycle of them
//! is not (LOOP-15).
//!
//! The walk follows what can be seen: from one of our block devices to the file behind it, from a kernel loop
//! device to its file, from a device-mapper device to its slaves, from a file that exports one of our devices
//! to that device, from any other file to the disk of its file system. It ends at what cannot be seen, such
//! as another host's disk or a file system on several disks.
//!
//! Runs on the control plane, before a device gets another file.

use crate::info::DeviceInfo;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Returns the path from a file down to the device of that name, both included; `None`: the file does not
/// depend on it.
pub fn path_to_device(path: &Path, device: &str, devices: &[DeviceInfo]) -> Option<Vec<String>> {
    let exported_at = |node: &Path| {
        let exports =
            |info: &DeviceInfo| info.exports.iter().any(|export| Path::new(&export.address) == node);
        devices.iter().position(exports)
    };
    let mut walk =
        Walk { exported_at: &exported_at, visit: Devices { target: device, devices }, path: Vec::new() };
    walk.file(path).then_some(walk.path)
}

/// Lists the devices that a file depends on, by number, each with the path to it. `exported_at`: maps a node
/// or file to the number of the device that it exports.
pub(crate) fn devices_below_file(
    path: &Path,
    exported_at: &dyn Fn(&Path) -> Option<usize>,
) -> Vec<(usize, Vec<String>)> {
    let mut walk = Walk { exported_at, visit: First(Vec::new()), path: Vec::new() };
    walk.file(path);
    walk.visit.0
}

/// The step of a walk at a device of this process.
trait Visit: Sized {
    /// Returns whether the walk has found its target.
    fn device(walk: &mut Walk<'_, Self>, number: usize) -> bool;
}

/// Walks down through devices to the one of that name.
struct Devices<'a> {
    target: &'a str,
    devices: &'a [DeviceInfo],
}

impl Visit for Devices<'_> {
    fn device(walk: &mut Walk<'_, Self>, number: usize) -> bool {
        let info = &walk.visit.devices[number];
        if info.name == walk.visit.target {
            walk.path.push(info.name.clone());
            return true;
        }
        let Some(below) = info.backend.get("backing_file") else { return false };
        walk.step(info.name.clone(), |walk| walk.file(&undeleted(below)))
    }
}

/// Collects the first device on each path.
struct First(Vec<(usize, Vec<String>)>);

impl Visit for First {
    fn device(walk: &mut Walk<'_, Self>, number: usize) -> bool {
        let path = walk.path.clone();
        walk.visit.0.push((number, path));
        // Other paths may lead to more devices.
        false
    }
}

struct Walk<'a, V> {
    exported_at: &'a dyn Fn(&Path) -> Option<usize>,
    visit: V,
    path: Vec<String>,
}

impl<V: Visit> Walk<'_, V> {
    /// Descends through a named step. Returns whether the target was found below. A step that is on the path
    /// already leads nowhere.
    fn step(&mut self, name: String, below: impl FnOnce(&mut Self) -> bool) -> bool {
        if self.path.contains(&name) {
            return false;
        }
        self.path.push(name);
        let found = below(self);
        if !found {
            self.path.pop();
        }
        found
    }

    fn file(&mut self, path: &Path) -> bool {
        let Ok(meta) = fs::metadata(path) else { return false };
        self.step(path.display().to_string(), |walk| {
            if meta.file_type().is_block_device() {
                return walk.disk(meta.rdev());
            }
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            match (walk.exported_at)(&real) {
                Some(device) => V::device(walk, device),
                None => walk.disk(meta.dev()),
            }
        })
    }

    /// Follows a kernel disk, or the disk of a partition, by device number.
    fn disk(&mut self, number: u64) -> bool {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let Ok(mut at) = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) else { return false };
        if at.join("partition").exists() {
            at.pop();
        }
        let Some(name) = at.file_name() else { return false };
        let node = Path::new("/dev").join(name);
        if let Some(device) = (self.exported_at)(&node) {
            return V::device(self, device);
        }
        self.step(node.display().to_string(), |walk| {
            if let Ok(file) = fs::read_to_string(at.join("loop/backing_file")) {
                return walk.file(&undeleted(file.trim_end_matches('\n')));
            }
            let slaves = fs::read_dir(at.join("slaves")).into_iter().flatten().flatten();
            slaves.filter_map(|slave| number_in(&slave.path())).any(|number| walk.disk(number))
        })
    }
}

/// Strips the suffix that the kernel adds to the path of an unlinked file.
fn undeleted(path: &str) -> PathBuf {
    PathBuf::from(path.strip_suffix(" (deleted)").unwrap_or(path))
}

fn number_in(directory: &Path) -> Option<u64> {
    let text = fs::read_to_string(directory.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::ExportInfo;
    use std::collections::BTreeMap;

    /// A device on a file, exported as another file.
    fn device(name: &str, backing: &Path, shown: &Path) -> DeviceInfo {
        let text = |path: &Path| path.display().to_string();
        DeviceInfo {
            name: name.to_owned(),
            stack: format!("file:{}", backing.display()),
            layers: Vec::new(),
            size: 1 << 20,
            logical_block_size: 512,
            read_only: true,
            limits: BTreeMap::new(),
            exports: vec![ExportInfo {
                kind: "fuse".to_owned(),
                address: text(shown),
                connections: 0,
                counts: Default::default(),
                sessions: Default::default(),
                tls: "off".to_owned(),
                details: std::collections::BTreeMap::new(),
            }],
            backend: BTreeMap::from([("backing_file".to_owned(), text(backing))]),
            queues: Vec::new(),
            pid: 1,
            uptime_ms: 0,
        }
    }

    #[test]
    fn a_path_through_several_devices_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let [image, one, two, other] = ["image", "one", "two", "other"].map(|name| dir.join(name));
        for path in [&image, &one, &two, &other] {
            fs::write(path, [0; 512]).unwrap();
        }
        let devices = [device("a", &image, &one), device("b", &one, &two)];
        let name = |path: &Path| path.display().to_string();
        let expected = vec![name(&two), "b".to_owned(), name(&one), "a".to_owned()];
        assert_eq!(path_to_device(&two, "a", &devices), Some(expected));
        assert_eq!(path_to_device(&one, "a", &devices), Some(vec![name(&one), "a".to_owned()]));
        assert_eq!(path_to_device(&one, "b", &devices), None, "a stands below b, not above it");
        assert_eq!(path_to_device(&other, "a", &devices), None);
        assert_eq!(path_to_device(&dir.join("absent"), "a", &devices), None);
        std::os::unix::fs::symlink(&two, dir.join("link")).unwrap();
        assert!(path_to_device(&dir.join("link"), "a", &devices).is_some(), "by whatever name");
    }

    #[test]
    fn a_walk_ends_in_an_existing_cycle() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let (one, two) = (dir.join("one"), dir.join("two"));
        fs::write(&one, [0; 512]).unwrap();
        fs::write(&two, [0; 512]).unwrap();
        let devices = [device("a", &two, &one), device("b", &one, &two)];
        assert_eq!(path_to_device(&one, "c", &devices), None);
    }
}
