//! What is wrong with a topology as a whole, and with the files that it names.

use super::{DeviceSpec, ExportKind, ExportSpec, NbdOptions, Problem, Topology};
use crate::spec::{FileFormat, FileSpec, LayerSpec, NbdAddress, StackSpec, misplaced};
use rustix::fs::{Access, access};
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

impl Topology {
    /// Exports and devices that contradict each other. Looks at no file.
    pub fn conflicts(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut seen: HashMap<&NbdAddress, Vec<&NbdOptions>> = HashMap::new();
        let mut mounted_on = HashSet::new();
        for export in &self.exports {
            if !self.devices.iter().any(|device| device.name == export.device) {
                let why = format!("there is no device \"{}\" (write [device.{0}])", export.device);
                problems.push(Problem::new(export.line, "export.device", why));
            }
            if let ExportKind::Fuse(spec) = &export.kind
                && !mounted_on.insert(&spec.path)
            {
                let why = format!("{} is mounted on twice (name another file)", spec.path.display());
                problems.push(Problem::new(export.line, "export.fuse", why));
            }
            if matches!(export.kind, ExportKind::Ublk(_))
                && let Some(other) = self
                    .exports
                    .iter()
                    .find(|other| other.device == export.device && matches!(other.kind, ExportKind::Ublk(_)))
                && !std::ptr::eq(other, export)
            {
                let why = "the device is shown by ublk already (leave one out)".to_owned();
                problems.push(Problem::new(export.line, "export.ublk", why));
            }
            let ExportKind::Nbd { address, options } = &export.kind else { continue };
            let others = seen.entry(address).or_default();
            if others.iter().any(|other| other.name == options.name) {
                let why =
                    format!("{address} has an export \"{}\" already (give one another name)", options.name);
                problems.push(Problem::new(export.line, "export.name", why));
            }
            if others.first().is_some_and(|first| first.tls != options.tls) {
                let why = format!("another export at {address} has other TLS settings (make them the same)");
                problems.push(Problem::new(export.line, "export.tls", why));
            }
            others.push(options);
        }
        for device in &self.devices {
            if let Some(why) = misplaced(&device.layers) {
                problems.push(Problem::new(device.line, format!("device.{}.layers", device.name), why));
            }
        }
        problems.extend(self.unscanned());
        problems.extend(self.unfollowed());
        problems.extend(self.self_standing());
        problems.extend(self.circles());
        problems
    }

    /// Loop devices that would stand on themselves: their file is their own node (LOOP-15).
    fn self_standing(&self) -> Vec<Problem> {
        let stands = |export: &&ExportSpec| {
            let ExportKind::Loop(spec) = &export.kind else { return false };
            let node = spec.number.map(|number| PathBuf::from(format!("/dev/loop{number}")));
            let device = self.devices.iter().find(|device| device.name == export.device);
            matches!(device.map(|device| &device.stack), Some(StackSpec::File(file)) if Some(&file.path) == node.as_ref())
        };
        let lost = self.exports.iter().filter(stands);
        lost.map(|export| {
            let why = "the loop device would stand on itself (choose another number, or another file)";
            Problem::new(export.line, "export.loop", why.to_owned())
        })
        .collect()
    }

    /// Devices that the kernel is to look for partitions on, and that are none of the kernel's.
    fn unscanned(&self) -> Vec<Problem> {
        let is_kernel = |export: &ExportSpec| {
            !matches!(export.kind, ExportKind::Default(_) | ExportKind::Nbd { .. } | ExportKind::Fuse(_))
        };
        let wants = |device: &&DeviceSpec| matches!(&device.stack, StackSpec::File(file) if file.partscan);
        let of = |device: &DeviceSpec| {
            let mut exports = self.exports.iter().filter(|export| export.device == device.name);
            exports.any(is_kernel)
        };
        let lost = self.devices.iter().filter(wants).filter(|device| !of(device));
        lost.map(|device| {
            let why =
                "partscan needs a kernel block device (add --loop, --ublk or --nbd-device, or leave it out)";
            Problem::new(device.line, format!("device.{}.stack", device.name), why.to_owned())
        })
        .collect()
    }

    /// Devices that are to follow their file's growth, and keep the size of an overlay.
    fn unfollowed(&self) -> Vec<Problem> {
        let wants = |device: &&DeviceSpec| matches!(&device.stack, StackSpec::File(file) if file.autosize);
        let lost = self.devices.iter().filter(wants).filter(|device| is_overlaid(device));
        lost.map(|device| {
            let why = "an overlay keeps the size it was made with (leave autosize out)".to_owned();
            Problem::new(device.line, format!("device.{}.stack", device.name), why)
        })
        .collect()
    }

    /// What stands in the way of starting this: missing files, missing rights, two writers of one
    /// file. Opens nothing, so a device that comes or goes later is not foreseen.
    pub fn check_files(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for device in &self.devices {
            if let StackSpec::File(file) = &device.stack
                && let Err(why) = check_file(file)
            {
                let why = format!("{}: {why}", file.path.display());
                problems.push(Problem::new(device.line, format!("device.{}.stack", device.name), why));
            }
        }
        problems.extend(self.tables());
        problems.extend(self.two_writers());
        for export in &self.exports {
            problems.extend(check_export(export));
        }
        problems.sort_by_key(|problem| problem.line);
        problems
    }

    /// What the tables would be refused for, as far as that can be seen without opening anything for writing.
    fn tables(&self) -> Vec<Problem> {
        let names: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        let problem = |device: &DeviceSpec| {
            let StackSpec::Table(spec) = &device.stack else { return None };
            let why = crate::tree::rehearse(spec, &names).err()?;
            Some(Problem::new(device.line, format!("device.{}.table", device.name), why.to_string()))
        };
        self.devices.iter().filter_map(problem).collect()
    }

    fn two_writers(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut first_users: HashMap<(u64, u64), &DeviceSpec> = HashMap::new();
        for device in &self.devices {
            let StackSpec::File(file) = &device.stack else { continue };
            let Ok(metadata) = file.path.metadata() else { continue };
            let Some(first) = first_users.insert((metadata.dev(), metadata.ino()), device) else { continue };
            let StackSpec::File(other) = &first.stack else { continue };
            // What has an overlay is only read.
            let reads = |device: &DeviceSpec, file: &FileSpec| file.ro || is_overlaid(device);
            let agreed = (reads(device, file) && reads(first, other)) || (file.share && other.share);
            if !agreed {
                let why = format!("device.{} uses the same file (write ro or share for both)", first.name);
                problems.push(Problem::new(device.line, format!("device.{}.stack", device.name), why));
            }
        }
        problems
    }
}

fn is_overlaid(device: &DeviceSpec) -> bool {
    device.layers.iter().any(|layer| matches!(layer, LayerSpec::Cow(_)))
}

fn check_file(file: &FileSpec) -> Result<(), String> {
    let metadata = match file.path.metadata() {
        Ok(metadata) => metadata,
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => return check_creation(file),
        Err(why) => return Err(why.to_string()),
    };
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err("it is neither a regular file nor a block device (name another)".into());
    }
    let rights = if file.ro { Access::READ_OK } else { Access::READ_OK | Access::WRITE_OK };
    access(&file.path, rights).map_err(|why| {
        let fix = if file.ro { "change its mode" } else { "change its mode, or add ro" };
        format!("{} ({fix})", std::io::Error::from(why))
    })?;
    if file.format == FileFormat::Unspecified
        && let Ok(Some(why)) = images::why_not_raw(&file.path)
    {
        return Err(why);
    }
    if kind.is_file() && file.offset.0 >= metadata.len() {
        return Err(format!("it has {} bytes, and the device starts at {}", metadata.len(), file.offset.0));
    }
    Ok(())
}

fn check_creation(file: &FileSpec) -> Result<(), String> {
    if file.create.is_none() {
        return Err("there is no such file (to make it, add size=10G,create)".into());
    }
    writable_directory(&file.path)?;
    let Some((name, _)) = &file.backing_file else { return Ok(()) };
    let base = file.path.parent().unwrap_or(Path::new("")).join(name);
    match base.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => Err(format!("its backing file {} is not a regular file", base.display())),
        Err(why) => Err(format!("its backing file {}: {why}", base.display())),
    }
}

fn writable_directory(path: &Path) -> Result<(), String> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    access(parent, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|why| format!("cannot make a file in {}: {}", parent.display(), std::io::Error::from(why)))
}

fn check_export(export: &ExportSpec) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let Some(NbdAddress::Unix(path)) = export.nbd_address()
        && let Err(why) = writable_directory(path)
    {
        problems.push(Problem::new(export.line, "export.nbd", why));
    }
    if let ExportKind::Fuse(spec) = &export.kind
        && !spec.path.exists()
        && let Err(why) = writable_directory(&spec.path)
    {
        problems.push(Problem::new(export.line, "export.fuse", why));
    }
    let files = export.nbd_options().and_then(|options| options.tls.files());
    let Some((chain, key, authority)) = files else { return problems };
    for file in [Some(chain), Some(key.clone()), authority].into_iter().flatten() {
        if let Err(why) = access(&file, Access::READ_OK) {
            let why = format!("{}: {}", file.display(), std::io::Error::from(why));
            problems.push(Problem::new(export.line, "export.tls-certificates", why));
        } else if file == key
            && let Err(why) = crate::private_key::check(&file)
        {
            let why = format!("{}: {why}", file.display());
            problems.push(Problem::new(export.line, "export.tls-certificates", why));
        }
    }
    problems
}
