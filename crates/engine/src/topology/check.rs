//! Checks the files that a topology names.

use crate::spec::{DiskFileSpec, ExportFile, FileAccess, FileFormat, StackSpec};
use crate::topology::{DeviceSpec, ExportSpec, Problem, Topology};
use rustix::fs::{Access, access};
use std::collections::HashMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Returns the problems that would keep a topology from starting: missing files, missing rights, two writers
/// of one file. Opens nothing for writing, so a device that appears or disappears later is not foreseen.
pub fn check_files(topology: &Topology) -> Vec<Problem> {
    let mut problems = Vec::new();
    for device in &topology.devices {
        if let StackSpec::File(file) = &device.stack
            && let Err(why) = check_file(file)
        {
            let why = format!("{}: {why}", file.file.path.display());
            problems.push(Problem::new(device.line, format!("device.{}.stack", device.name), why));
        }
    }
    problems.extend(tables(topology));
    problems.extend(two_writers(topology));
    for export in &topology.exports {
        problems.extend(check_export(export));
    }
    problems.sort_by_key(|problem| problem.line);
    problems
}

/// Returns the problems of the tables that can be found without opening anything for writing.
fn tables(topology: &Topology) -> Vec<Problem> {
    let names: Vec<&str> = topology.devices.iter().map(|device| device.name.as_str()).collect();
    let problem = |device: &DeviceSpec| {
        let StackSpec::Table(spec) = &device.stack else { return None };
        let why = crate::device::tree::dry_run(spec, &names).err()?;
        Some(Problem::new(device.line, format!("device.{}.table", device.name), why.to_string()))
    };
    topology.devices.iter().filter_map(problem).collect()
}

fn two_writers(topology: &Topology) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut first_users: HashMap<(u64, u64), &DeviceSpec> = HashMap::new();
    for device in &topology.devices {
        let StackSpec::File(file) = &device.stack else { continue };
        let Ok(metadata) = file.file.path.metadata() else { continue };
        let Some(first) = first_users.insert((metadata.dev(), metadata.ino()), device) else { continue };
        let StackSpec::File(other) = &first.stack else { continue };
        // The origin of an overlay is only read.
        let reads = |device: &DeviceSpec, file: &DiskFileSpec| file.file.ro || device.is_overlaid();
        let agreed = (reads(device, file) && reads(first, other)) || (file.file.share && other.file.share);
        if !agreed {
            let why = format!("device.{} uses the same file (write ro or share for both)", first.name);
            problems.push(Problem::new(device.line, format!("device.{}.stack", device.name), why));
        }
    }
    problems
}

fn check_file(file: &DiskFileSpec) -> Result<(), String> {
    let metadata = match file.file.path.metadata() {
        Ok(metadata) => metadata,
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => return check_creation(file),
        Err(why) => return Err(why.to_string()),
    };
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err("it is neither a regular file nor a block device (name another)".into());
    }
    let rights = if file.file.ro { Access::READ_OK } else { Access::READ_OK | Access::WRITE_OK };
    access(&file.file.path, rights).map_err(|why| {
        let fix = if file.file.ro { "change its mode" } else { "change its mode, or add ro" };
        format!("{} ({fix})", std::io::Error::from(why))
    })?;
    if file.format == FileFormat::Unspecified
        && let Ok(Some(why)) = images::why_not_raw(&file.file.path)
    {
        return Err(why);
    }
    if kind.is_file() && file.file.offset.0 >= metadata.len() {
        return Err(format!(
            "it has {} bytes, and the device starts at {}",
            metadata.len(),
            file.file.offset.0
        ));
    }
    Ok(())
}

fn check_creation(file: &DiskFileSpec) -> Result<(), String> {
    if file.file.create.is_none() {
        return Err("there is no such file (to create it, add size=10G,create)".into());
    }
    writable_directory(&file.file.path)?;
    let Some((name, _)) = &file.backing_file else { return Ok(()) };
    let base = file.file.path.parent().unwrap_or(Path::new("")).join(name);
    match base.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(()),
        Ok(_) => Err(format!("its backing file {} is not a regular file", base.display())),
        Err(why) => Err(format!("its backing file {}: {why}", base.display())),
    }
}

fn writable_directory(path: &Path) -> Result<(), String> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    access(parent, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|why| format!("cannot create a file in {}: {}", parent.display(), std::io::Error::from(why)))
}

fn check_export(export: &ExportSpec) -> Vec<Problem> {
    let problem = |file: ExportFile| {
        let named = |why: String| format!("{}: {why}", file.path.display());
        let readable = || {
            access(&file.path, Access::READ_OK).map_err(|why| named(std::io::Error::from(why).to_string()))
        };
        let checked = match file.access {
            FileAccess::Create => writable_directory(&file.path),
            FileAccess::CreateMissing if file.path.exists() => Ok(()),
            FileAccess::CreateMissing => writable_directory(&file.path),
            FileAccess::Read => readable(),
            FileAccess::ReadKey => {
                readable().and_then(|()| crate::private_key::check(&file.path).map_err(named))
            }
        };
        Some(Problem::new(export.line, format!("export.{}", file.key), checked.err()?))
    };
    export.kind.files().into_iter().filter_map(problem).collect()
}
