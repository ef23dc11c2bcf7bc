//! Whether a file stands on a device: loop on loop is fine, a loop of them is not (LOOP-15).
//!
//! The way down is followed as far as it can be seen: a block device of ours to the file behind it, a loop device of
//! the kernel's to its file, a device-mapper device to those below it, a file that one of ours shows to that
//! device, any other file to the disk that its file system is on. What cannot be seen (another host's disk, a
//! file system over several disks) ends the walk.
//!
//! Runs on the control plane, before a device gets another file.

use crate::control::DeviceInfo;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The way from a file down to the device of that name, itself included; `None`: it does not lead there.
pub fn way(path: &Path, device: &str, devices: &[DeviceInfo]) -> Option<Vec<String>> {
    let shown_at = |node: &Path| {
        let shows = |info: &DeviceInfo| info.exports.iter().any(|export| Path::new(&export.address) == node);
        devices.iter().position(shows)
    };
    let mut walk =
        Walk { shown_at: &shown_at, visit: Devices { target: device, devices }, trail: Vec::new() };
    walk.file(path).then_some(walk.trail)
}

/// The devices that a file leads to, by their numbers, each with the way there. `shown_at`: the number of the device
/// that a node or a file shows.
pub(crate) fn shown_below(
    path: &Path,
    shown_at: &dyn Fn(&Path) -> Option<usize>,
) -> Vec<(usize, Vec<String>)> {
    let mut walk = Walk { shown_at, visit: First(Vec::new()), trail: Vec::new() };
    walk.file(path);
    walk.visit.0
}

/// What becomes of a walk at a device of ours.
trait Visit: Sized {
    /// Whether the walk ends well there.
    fn device(walk: &mut Walk<'_, Self>, number: usize) -> bool;
}

/// Down through devices, as far as the one of that name.
struct Devices<'a> {
    target: &'a str,
    devices: &'a [DeviceInfo],
}

impl Visit for Devices<'_> {
    fn device(walk: &mut Walk<'_, Self>, number: usize) -> bool {
        let info = &walk.visit.devices[number];
        if info.name == walk.visit.target {
            walk.trail.push(info.name.clone());
            return true;
        }
        let Some(below) = info.backend.get("backing_file") else { return false };
        walk.step(info.name.clone(), |walk| walk.file(&undeleted(below)))
    }
}

/// As far as the first device on each way.
struct First(Vec<(usize, Vec<String>)>);

impl Visit for First {
    fn device(walk: &mut Walk<'_, Self>, number: usize) -> bool {
        let trail = walk.trail.clone();
        walk.visit.0.push((number, trail));
        // There may be others.
        false
    }
}

struct Walk<'a, V> {
    shown_at: &'a dyn Fn(&Path) -> Option<usize>,
    visit: V,
    trail: Vec<String>,
}

impl<V: Visit> Walk<'_, V> {
    /// Go a step: whether it leads to the target. Back where we were it leads nowhere.
    fn step(&mut self, name: String, below: impl FnOnce(&mut Self) -> bool) -> bool {
        if self.trail.contains(&name) {
            return false;
        }
        self.trail.push(name);
        let found = below(self);
        if !found {
            self.trail.pop();
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
            match (walk.shown_at)(&real) {
                Some(device) => V::device(walk, device),
                None => walk.disk(meta.dev()),
            }
        })
    }

    /// A disk of the kernel's, or a partition of one, by its number.
    fn disk(&mut self, number: u64) -> bool {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let Ok(mut at) = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) else { return false };
        if at.join("partition").exists() {
            at.pop();
        }
        let Some(name) = at.file_name() else { return false };
        let node = Path::new("/dev").join(name);
        if let Some(device) = (self.shown_at)(&node) {
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

/// A path as the kernel tells it, without its remark that the file has no name any more.
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
    use crate::control::ExportInfo;
    use std::collections::BTreeMap;

    /// A device over a file, shown as another file.
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
    fn a_way_through_several_devices_is_found_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let [image, one, two, other] = ["image", "one", "two", "other"].map(|name| dir.join(name));
        for path in [&image, &one, &two, &other] {
            fs::write(path, [0; 512]).unwrap();
        }
        let devices = [device("a", &image, &one), device("b", &one, &two)];
        let name = |path: &Path| path.display().to_string();
        let expected = vec![name(&two), "b".to_owned(), name(&one), "a".to_owned()];
        assert_eq!(way(&two, "a", &devices), Some(expected));
        assert_eq!(way(&one, "a", &devices), Some(vec![name(&one), "a".to_owned()]));
        assert_eq!(way(&one, "b", &devices), None, "a stands below b, not above it");
        assert_eq!(way(&other, "a", &devices), None);
        assert_eq!(way(&dir.join("absent"), "a", &devices), None);
        std::os::unix::fs::symlink(&two, dir.join("link")).unwrap();
        assert!(way(&dir.join("link"), "a", &devices).is_some(), "by whatever name");
    }

    #[test]
    fn what_stands_in_a_circle_already_does_not_keep_us() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let (one, two) = (dir.join("one"), dir.join("two"));
        fs::write(&one, [0; 512]).unwrap();
        fs::write(&two, [0; 512]).unwrap();
        let devices = [device("a", &two, &one), device("b", &one, &two)];
        assert_eq!(way(&one, "c", &devices), None);
    }
}
