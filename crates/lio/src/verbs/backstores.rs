//! Commands of storage objects and their target port groups.

use super::flag;
use crate::config::{Backing, Change, Plugin, StorageId, StorageObject};
use crate::run::{Done, Run, Stop};
use crate::size;
use crate::tree::Node;
use crate::words::Arguments;
use crate::wwn;
use std::fs::OpenOptions;
use std::path::Path;

impl Run<'_, '_> {
    pub(super) fn create_storage(&mut self, plugin: Plugin, arguments: &Arguments) -> Done {
        self.changes()?;
        let id = StorageId { plugin, name: arguments.required("name").to_owned() };
        match plugin {
            Plugin::Fileio => self.create_fileio(id, arguments),
            Plugin::Block => self.create_block(id, arguments),
            Plugin::Ramdisk => self.create_ramdisk(id, arguments),
            Plugin::User => self.create_user(id, arguments),
        }
    }

    /// Returns the unit serial number that was given, or a new one.
    fn serial(&mut self, arguments: &Arguments) -> Result<String, Stop> {
        match arguments.get("wwn").filter(|serial| !serial.is_empty()) {
            None => Ok(wwn::unit_serial(self.editor.system)),
            Some(serial) if wwn::is_unit_serial(serial) => Ok(serial.to_owned()),
            Some(serial) => Err(format!("wwn '{serial}' is not 1 to 254 printable characters").into()),
        }
    }

    fn create_fileio(&mut self, id: StorageId, arguments: &Arguments) -> Done {
        let sparse = flag(arguments, "sparse", true)?;
        let write_back = flag(arguments, "write_back", true)?;
        let serial = self.serial(arguments)?;
        let dev = self.file(arguments.required("file_or_dev"));
        let path = Path::new(&dev);
        let same = |other: &StorageObject| other.dev().is_some_and(|other| is_same(path, Path::new(other)));
        if let Some(other) = self.editor.config.storage.iter().find(|other| same(other)) {
            return Err(format!("storage object for {dev} already exists: {}", other.id.name).into());
        }
        // The name is checked first, so that a refused name leaves no new file behind.
        let object =
            StorageObject::new(id, serial, 0, Backing::Fileio { dev: dev.clone(), write_back, aio: false });
        self.editor.config.check(&Change::AddStorage(Box::new(object.clone())))?;
        let given = arguments.get("size").filter(|size| !size.is_empty());
        let mut is_new = false;
        let bytes = if self.editor.system.block_device(&dev).is_some() {
            if given.is_some() {
                self.info("Block device, size parameter ignored");
            }
            self.info("Note: block backstore preferred for best results");
            0
        } else if path.is_file() {
            let own = path.metadata().map_err(|why| format!("{dev}: {why}"))?.len();
            if given.is_some() {
                self.info(format!("{dev} exists, using its size ({own} bytes) instead"));
            }
            own
        } else if path.exists() {
            return Err(format!("Path {dev} exists but is not a file").into());
        } else {
            let given = given.ok_or("Attempting to create file for new fileio backstore, need a size")?;
            let bytes = size::parse(given)?;
            if !sparse {
                self.info(format!("Writing {bytes} bytes"));
            }
            create_file(path, bytes, sparse)?;
            is_new = true;
            bytes
        };
        let created = self.add_storage(StorageObject { size: bytes, ..object });
        if created.is_err() && is_new {
            let _ = std::fs::remove_file(path);
        }
        let object = created?;
        self.info(format!("Created fileio {} with size {}", object.name, self.size_of(&object)));
        self.created(Node::Storage(object))
    }

    fn create_block(&mut self, id: StorageId, arguments: &Arguments) -> Done {
        let given = arguments.required("dev").to_owned();
        let dev = self.file(&given);
        let device = self.editor.system.block_device(&dev);
        let device = device.ok_or_else(|| match Path::new(&dev).exists() {
            true => format!("Device {dev} is not a TYPE_DISK block device"),
            false => format!("Could not open {dev}"),
        })?;
        let readonly = flag(arguments, "readonly", device.read_only)?;
        let exclusive = flag(arguments, "exclusive", true)?;
        let serial = self.serial(arguments)?;
        let object =
            StorageObject::new(id, serial, 0, Backing::Block { dev: dev.clone(), readonly, exclusive });
        let id = self.add_storage(object)?;
        self.info(format!("Created block storage object {} using {dev}.", id.name));
        self.created(Node::Storage(id))
    }

    fn create_ramdisk(&mut self, id: StorageId, arguments: &Arguments) -> Done {
        let given = arguments.required("size").to_owned();
        let nullio = flag(arguments, "nullio", false)?;
        let serial = self.serial(arguments)?;
        let object = StorageObject::new(id, serial, size::parse(&given)?, Backing::Ramdisk { nullio });
        let id = self.add_storage(object)?;
        self.info(format!("Created ramdisk {} with size {given}.", id.name));
        self.created(Node::Storage(id))
    }

    fn create_user(&mut self, id: StorageId, arguments: &Arguments) -> Done {
        let serial = self.serial(arguments)?;
        let config = format!("stack/{}", arguments.required("stack"));
        let backing = Backing::User { config, hw_max_sectors: None, control: None };
        let id = self.add_storage(StorageObject::new(id, serial, 0, backing))?;
        let size = self.size_of(&id);
        self.info(format!("Created user-backed storage object {} size {size}.", id.name));
        self.created(Node::Storage(id))
    }

    fn size_of(&self, id: &StorageId) -> u64 {
        self.editor.config.object(id).map_or(0, |object| object.size)
    }

    /// Adds a storage object. Its model in INQUIRY is its name if the user prefers that.
    pub(super) fn add_storage(&mut self, object: StorageObject) -> Result<StorageId, Stop> {
        let id = object.id.clone();
        self.change(Change::AddStorage(Box::new(object)))?;
        if self.prefs.export_backstore_name_as_model {
            let alias = Change::StorageAttribute(id.clone(), "emulate_model_alias", 1);
            if let Err(why) = self.change(alias) {
                let _ = self.editor.remove_object(&id);
                return Err(why);
            }
        }
        Ok(id)
    }

    /// Creates a storage object with defaults for a file or a block device, named after the last part of
    /// its path.
    pub(super) fn storage_for_path(&mut self, given: &str) -> Result<StorageId, Stop> {
        self.changes()?;
        let dev = self.file(given);
        let path = Path::new(&dev);
        let device = self.editor.system.block_device(&dev);
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let (plugin, size, backing) = match (device, path.metadata()) {
            (Some(device), _) => {
                (Plugin::Block, 0, Backing::Block { dev, readonly: device.read_only, exclusive: true })
            }
            // Write-through, as in rtslib, which knows no preferences.
            (None, Ok(meta)) if meta.is_file() => {
                (Plugin::Fileio, meta.len(), Backing::Fileio { dev, write_back: false, aio: false })
            }
            _ => return Err("storage object or path not valid".into()),
        };
        let serial = wwn::unit_serial(self.editor.system);
        let object = StorageObject::new(StorageId { plugin, name }, serial, size, backing);
        let id = object.id.clone();
        self.change(Change::AddStorage(Box::new(object)))?;
        self.info(format!("Created storage object {}.", id.name));
        Ok(id)
    }

    pub(super) fn delete_storage(&mut self, plugin: Plugin, arguments: &Arguments) -> Done {
        let id = StorageId { plugin, name: arguments.required("name").to_owned() };
        if self.editor.config.object(&id).is_none() {
            return Err(format!("No storage object named {}.", id.name).into());
        }
        let save = flag(arguments, "save", false)?;
        self.changes()?;
        self.editor.remove_object(&id)?;
        if save {
            let path = self.call.save_file.clone();
            self.merge(&id, &path)?;
        }
        self.info(format!("Deleted storage object {}.", id.name));
        Ok(())
    }

    pub(super) fn create_alua(&mut self, id: &StorageId, arguments: &Arguments) -> Done {
        let name = arguments.required("name").to_owned();
        let tag = arguments.required("tag");
        let number = tag.parse::<u16>().map_err(|_| "The TPG Tag must be between 1 and 65535")?;
        self.change(Change::AddAlua(id.clone(), name.clone(), number))?;
        self.info(format!("Created ALUA TPG {name}."));
        self.created(Node::Alua(id.clone(), name))
    }

    pub(super) fn delete_alua(&mut self, id: &StorageId, arguments: &Arguments) -> Done {
        let name = arguments.required("name").to_owned();
        let object = self.editor.config.object(id);
        if !object.is_some_and(|object| object.groups.contains_key(&name)) {
            return Err("Invalid ALUA group name".into());
        }
        self.change(Change::RemoveAlua(id.clone(), name)).map(drop)
    }
}

/// Returns whether two paths refer to one file.
fn is_same(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => a == b,
    }
}

/// Creates a file of a size. After an error no file is left.
fn create_file(path: &Path, size: u64, sparse: bool) -> Result<(), Stop> {
    let open = OpenOptions::new().write(true).create_new(true).open(path);
    let file = open.map_err(|why| format!("Could not open {} ({why})", path.display()))?;
    let sized = match sparse {
        true => file.set_len(size),
        false => {
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size).map_err(Into::into)
        }
    };
    sized.map_err(|why| {
        let _ = std::fs::remove_file(path);
        format!("Could not expand file to {size} bytes ({why})").into()
    })
}
