//! Storage objects as devices of the engine.

use engine::device::Device;
use engine::spec::{DeviceName, Direct, DiskFileSpec, FileFormat, Format, StackSpec};
use lio::config::{Backing, Facts, Plugin, StorageId, StorageObject};
use std::path::Path;

/// LIO's largest request to a file, in bytes (FD_MAX_BYTES).
const FILE_REQUEST_MAX: u64 = 8 << 20;
/// Most blocks of an UNMAP to a file (fd_configure_unmap); each may be as large as the device here.
const UNMAP_MAX: u32 = 8192;
/// Longest name of a device, in bytes.
const NAME_MAX: usize = 60;

/// Returns the name of a storage object's device: `fileio-disk`.
pub(super) fn device_name(id: &StorageId) -> DeviceName {
    let word = |c: char| if c.is_ascii_alphanumeric() || "._+-".contains(c) { c } else { '-' };
    let name: String = format!("{}-{}", id.plugin.name(), id.name).chars().map(word).take(NAME_MAX).collect();
    name.parse().expect("it begins with a letter and has allowed characters only")
}

/// Returns the stack of a storage object.
pub(super) fn stack(object: &StorageObject) -> Result<StackSpec, String> {
    let text = |text: String| text.parse::<StackSpec>().map_err(|why| why.to_string());
    let block = object.attribute("block_size");
    match &object.backing {
        Backing::Fileio { dev, write_back, .. } => {
            let mut file = disk(dev);
            file.file.sync = !write_back;
            file.file.block = u32::try_from(block).ok().filter(|block| *block != 512);
            Ok(StackSpec::File(file))
        }
        Backing::Block { dev, readonly, exclusive } => {
            let mut file = disk(dev);
            file.file.ro = *readonly;
            file.file.share = !exclusive;
            file.file.direct = Direct::Auto;
            Ok(StackSpec::File(file))
        }
        Backing::Ramdisk { .. } if block != 512 => {
            Err(format!("[Errno 22] Invalid argument (the blocks of a ramdisk have 512 bytes, not {block})"))
        }
        Backing::Ramdisk { nullio: true } => text(format!("null:{}", object.size)),
        Backing::Ramdisk { nullio: false } => text(format!("ram:{}", object.size)),
        Backing::User { config, .. } => match config.split_once('/') {
            Some(("stack", stack)) => text(stack.to_owned()),
            _ => Err(format!("{config}: only stack/DESCRIPTION is served here")),
        },
    }
}

/// Returns a raw disk in a file, through the page cache.
fn disk(dev: &str) -> DiskFileSpec {
    let mut file = DiskFileSpec { format: FileFormat::Given(Format::Raw), ..DiskFileSpec::default() };
    file.file.path = Path::new(dev).to_owned();
    file.file.direct = Direct::Off;
    file
}

/// Refuses cases that LIO would accept silently: a file that is missing, or shorter than the disk was.
pub(super) fn check(object: &StorageObject) -> Result<(), String> {
    let Backing::Fileio { dev, .. } = &object.backing else { return Ok(()) };
    let meta = std::fs::metadata(dev).map_err(|why| format!("{dev}: {why}"))?;
    let is_shorter = meta.is_file() && meta.len() < object.size;
    match is_shorter {
        true => Err(format!("{dev} has {} bytes, and the disk had {}", meta.len(), object.size)),
        false => Ok(()),
    }
}

/// Returns the properties of a device from which a storage object's attributes are set.
pub(super) fn facts(object: &StorageObject, device: &Device) -> Facts {
    let limits = device.limits();
    let block = limits.logical_block_size.0.max(1);
    let has = |feature| limits.features.contains(feature);
    let sectors = |bytes: u64| u32::try_from(bytes / block).unwrap_or(u32::MAX);
    let hw_max_sectors = match object.id.plugin {
        Plugin::Fileio => sectors(FILE_REQUEST_MAX),
        Plugin::Ramdisk => u32::MAX,
        Plugin::Block | Plugin::User => sectors(limits.max_sectors.0.saturating_mul(512)).max(1),
    };
    let unmap_max = sectors(limits.max_hw_discard_sectors.0.saturating_mul(512));
    Facts {
        size: device.size().0,
        block_size: u32::try_from(block).unwrap_or(512),
        hw_max_sectors,
        hw_queue_depth: device.depth().into(),
        can_unmap: unmap_max > 0 && !device.read_only(),
        rotates: has(engine::change::limits::Features::ROTATIONAL),
        has_write_cache: has(engine::change::limits::Features::WRITE_CACHE),
        max_unmap_lba_count: if object.id.plugin == Plugin::Fileio { UNMAP_MAX } else { unmap_max },
        unmap_granularity: sectors(limits.discard_granularity.0).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(plugin: Plugin, name: &str, backing: Backing) -> StorageObject {
        StorageObject::new(StorageId { plugin, name: name.to_owned() }, "w".to_owned(), 4096, backing)
    }

    #[test]
    fn storage_objects_become_stacks() {
        let shown = |object: &StorageObject| stack(object).map(|stack| stack.to_string());
        let fileio = |write_back| Backing::Fileio { dev: "/d".to_owned(), write_back, aio: false };
        let through = object(Plugin::Fileio, "d", fileio(false));
        assert_eq!(shown(&through).as_deref(), Ok("file:/d,direct=off,sync,format=raw"));
        let back = object(Plugin::Fileio, "d", fileio(true));
        assert_eq!(shown(&back).as_deref(), Ok("file:/d,direct=off,format=raw"));
        let block = Backing::Block { dev: "/dev/x".to_owned(), readonly: true, exclusive: false };
        assert_eq!(
            shown(&object(Plugin::Block, "x", block)).as_deref(),
            Ok("file:/dev/x,ro,share,format=raw")
        );
        assert_eq!(
            shown(&object(Plugin::Ramdisk, "r", Backing::Ramdisk { nullio: false })).as_deref(),
            Ok("ram:4K")
        );
        let user =
            |config: &str| Backing::User { config: config.to_owned(), hw_max_sectors: None, control: None };
        assert_eq!(shown(&object(Plugin::User, "u", user("stack/zero:1G"))).as_deref(), Ok("zero:1G"));
        assert!(shown(&object(Plugin::User, "u", user("rbd/pool"))).is_err());
    }

    #[test]
    fn every_storage_object_has_a_device_name() {
        let name = |name: &str| {
            device_name(&StorageId { plugin: Plugin::Fileio, name: name.to_owned() }).to_string()
        };
        assert_eq!(name("disk1"), "fileio-disk1");
        assert_eq!(name("a:b é"), "fileio-a-b--");
        assert_eq!(name(&"x".repeat(200)).len(), NAME_MAX);
    }
}
