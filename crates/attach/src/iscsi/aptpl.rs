//! Reservations that survive a restart (APTPL): one file for each logical unit that has some.
//!
//! A file is replaced atomically and durably before the command that changed the reservations is
//! acknowledged. A unit whose file cannot be read is not served, because initiators rely on their
//! reservations.

use scsi::reservation::{ImageError, Reservations};
use scsi::{AptplStore, LogicalUnit};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Stored reservations cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum AptplError {
    /// The file exists, but cannot be read.
    #[error("cannot read the stored reservations {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The file's content is not valid.
    #[error(
        "the stored reservations {} are damaged; restore the file, or remove it if no initiator relies on them",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The defect of the content.
        source: ImageError,
    },
}

/// The file of one logical unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AptplFile {
    path: PathBuf,
}

impl AptplFile {
    /// Names the file of the unit with this serial number, as LIO does: `aptpl_SERIAL`. Characters that a
    /// file name should not have are written as `%` and two hexadecimal digits.
    pub fn new(directory: &Path, serial: &str) -> AptplFile {
        let mut name = String::from("aptpl_");
        for byte in serial.bytes() {
            match byte {
                b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'_' => name.push(byte.into()),
                _ => name.push_str(&format!("%{byte:02X}")),
            }
        }
        AptplFile { path: directory.join(name) }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the stored reservations. `None`: none are stored.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn load(&self) -> Result<Option<Reservations>, AptplError> {
        let path = self.path.clone();
        let text = match fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(AptplError::Read { path, source }),
        };
        let parsed = Reservations::parse_image(&text);
        parsed.map(Some).map_err(|source| AptplError::Damaged { path, source })
    }

    /// Applies the stored reservations to a unit, and makes it store its changes here from now on. Must be
    /// called before the first session reaches the unit.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged: the unit must not be served.
    pub fn install(self, unit: &LogicalUnit) -> Result<(), AptplError> {
        if let Some(reservations) = self.load()? {
            unit.restore_reservations(reservations);
        }
        unit.set_aptpl_store(Some(Arc::new(self)));
        Ok(())
    }

    /// Makes the name of the file durable.
    fn sync_directory(&self) -> io::Result<()> {
        let directory = self.path.parent().unwrap_or(Path::new("."));
        File::open(directory)?.sync_all()
    }
}

impl AptplStore for AptplFile {
    fn store(&self, image: Option<&str>) -> io::Result<()> {
        let Some(image) = image else {
            return match fs::remove_file(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
                Ok(()) => self.sync_directory(),
            };
        };
        if let Some(directory) = self.path.parent() {
            fs::create_dir_all(directory)?;
        }
        // File names of stored reservations contain no dot, so this name cannot be one of them.
        let beside = self.path.with_extension("new");
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        file.write_all(image.as_bytes())?;
        file.sync_all()?;
        fs::rename(&beside, &self.path)?;
        self.sync_directory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use scsi::reservation::{Action, Out, Policy};
    use scsi::{Attributes, Identity, Media, NexusName};
    use std::os::unix::fs::PermissionsExt;

    fn registered() -> Reservations {
        let nexus = NexusName {
            initiator: "iqn.2026-11.example:host".to_owned(),
            isid: [0, 2, 0x3D, 0, 0, 1],
            target: "iqn.2026-11.example:disk".to_owned(),
            portal_group: 1,
            relative_port: 1,
        };
        let policy = Policy { with_isid: true, force_aptpl: true, can_persist: true, ports: &[1] };
        let mut list = [0; 24];
        list[15] = 7;
        let out = Out::parse(&[0x5F, Action::Register as u8, 0, 0, 0, 0, 0, 0, 24, 0], &list).unwrap();
        Reservations::default().out(&nexus, &policy, &out).unwrap().next
    }

    #[test]
    fn a_stored_image_is_read_back_and_replaced_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let file = AptplFile::new(&directory.path().join("iscsi"), "7f2a-2e05");
        assert_eq!(file.load().unwrap(), None);
        file.store(None).unwrap();
        let state = registered();
        for _ in 0..2 {
            file.store(state.image().as_deref()).unwrap();
            assert_eq!(file.load().unwrap().unwrap().registrations(), state.registrations());
        }
        assert_eq!(fs::metadata(file.path()).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            fs::read_dir(file.path().parent().unwrap()).unwrap().count(),
            1,
            "no temporary file is left"
        );
        file.store(None).unwrap();
        assert_eq!(file.load().unwrap(), None);
    }

    #[test]
    fn a_damaged_file_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = AptplFile::new(directory.path(), "a");
        fs::write(file.path(), registered().image().unwrap().replace("port=1", "port=2")).unwrap();
        let error = file.load().unwrap_err();
        assert!(matches!(error, AptplError::Damaged { source: ImageError::Checksum, .. }));
        assert!(error.to_string().contains("aptpl_a"));
    }

    #[test]
    fn a_unit_starts_with_the_stored_reservations_unless_they_are_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let file = AptplFile::new(directory.path(), "a");
        file.store(registered().image().as_deref()).unwrap();
        let unit = || {
            LogicalUnit::new(Identity::new("v", "p", "1", "a"), Media::new(64, 512), Attributes::default())
        };
        let first = unit();
        file.clone().install(&first).unwrap();
        assert_eq!(first.reservations().registrations(), registered().registrations());
        fs::write(file.path(), "").unwrap();
        let second = unit();
        assert!(file.install(&second).is_err());
    }

    #[test]
    fn serial_numbers_cannot_leave_the_directory() {
        let file = AptplFile::new(Path::new("/state"), "../etc/x y");
        assert_eq!(file.path(), Path::new("/state/aptpl_%2E%2E%2Fetc%2Fx%20y"));
    }
}
