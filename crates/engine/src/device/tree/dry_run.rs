//! Validates a table without building it: reports what `add` would refuse, as far as that can be checked
//! without opening anything for writing.
//!
//! Files and block devices are opened for reading. Files to be created, memory, exports of NBD servers and
//! other devices of the topology are assumed to exist and to be long enough. Nothing is written: a target
//! that would write to a device while it is constructed gets the answer that the write succeeded.

use super::table::{
    LineChecker, TableError, check_area, identity_of_file, is_number_pair, node_of, numbers_of, raw_shared,
    refuse_probe,
};
use crate::spec::{DiskFileSpec, FileFormat, LineSpec, StackSpec, TableSpec};
use backends::Content;
use block::{Abilities, Bytes, Profile, QueueLimits};
use layers::dm::{Devices, LookupError, TargetError, TargetRange, TargetType};
use ring::KernelRing;
use std::fs::File;
use std::io::{self, Seek};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Assumed size of devices that are not opened: 1 EiB.
const SIZE_ASSUMED: Bytes = Bytes(1 << 60);

/// Validates a table. `devices`: names of the other devices of the topology.
pub(crate) fn dry_run(spec: &TableSpec, devices: &[&str]) -> Result<(), TableError> {
    let mut checker = LineChecker::default();
    for line in &spec.lines {
        let (place, kind) = checker.admit(line)?;
        let refuse = |why| TableError { line: line.line, kind: line.kind.clone(), why };
        check_line(line, place, &kind, &spec.base, devices).map_err(refuse)?;
    }
    Ok(())
}

fn check_line(
    line: &LineSpec,
    place: TargetRange,
    kind: &TargetType<KernelRing>,
    base: &Path,
    devices: &[&str],
) -> Result<(), TargetError> {
    let arguments = line.arguments();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut opened = DryRunDevices { base, devices, found: Vec::new() };
    let target = (kind.construct)(place, &arguments, &mut opened)?;
    for area in target.areas() {
        let found = &opened.found[area.device];
        check_area(&found.word, &found.profile, area.start.0, area.len.0)?;
    }
    Ok(())
}

/// A device that a constructor requested.
struct Found {
    word: String,
    identity: String,
    profile: Profile,
    /// `None`: the device is not read.
    file: Option<File>,
}

struct DryRunDevices<'a> {
    base: &'a Path,
    devices: &'a [&'a str],
    found: Vec<Found>,
}

impl DryRunDevices<'_> {
    fn find(&self, word: &str) -> Result<Found, LookupError> {
        let failed = |why: String, errno| LookupError { why: format!("{word}: {why}"), errno };
        let assumed =
            |size, identity| Found { word: word.to_owned(), identity, profile: profile(size), file: None };
        if is_number_pair(word) {
            let node =
                node_of(word).ok_or_else(|| failed("there is no such block device".into(), libc::ENODEV))?;
            return self.file(word, &raw_shared(node));
        }
        if word.contains(':') {
            let spec: StackSpec = word.parse().map_err(|why| failed(format!("{why}"), libc::EINVAL))?;
            if let Some(why) = refuse_probe(&spec) {
                return Err(failed(why.to_owned(), libc::EINVAL));
            }
            return match spec.rooted(self.base) {
                StackSpec::File(file)
                    if file.file.create.is_some() && file.part.is_none() && !file.file.path.exists() =>
                {
                    Ok(assumed(file.file.create.unwrap_or(SIZE_ASSUMED), identity_of_file(&file)))
                }
                // A partition, or an image of a format: its size is known only when it is opened.
                StackSpec::File(file) if file.part.is_some() || file.is_image() => {
                    let mut found = self.file(word, &file)?;
                    (found.profile.size, found.file) = (SIZE_ASSUMED, None);
                    Ok(found)
                }
                StackSpec::File(file) => self.file(word, &file),
                other => Ok(assumed(SIZE_ASSUMED, other.to_string())),
            };
        }
        let name = word.strip_prefix("/dev/mapper/").unwrap_or(word);
        if self.devices.contains(&name) {
            return Ok(assumed(SIZE_ASSUMED, format!("device {name}")));
        }
        let path: PathBuf = self.base.join(word);
        self.file(word, &raw_shared(path))
    }

    /// Opens a file for reading.
    fn file(&self, word: &str, spec: &DiskFileSpec) -> Result<Found, LookupError> {
        let failed = |why: io::Error| LookupError {
            why: format!("{}: {why}", spec.file.path.display()),
            errno: why.raw_os_error().unwrap_or(libc::EIO),
        };
        // A FIFO without a writer would block.
        let nonblocking = libc::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(nonblocking).open(&spec.file.path);
        let mut file = file.map_err(failed)?;
        let kind = file.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let why = format!(
                "{}: it is neither a regular file nor a block device (name another)",
                spec.file.path.display()
            );
            return Err(LookupError { why, errno: libc::EINVAL });
        }
        let end = file.seek(io::SeekFrom::End(0)).map_err(failed)?;
        let size = Bytes(end.saturating_sub(spec.file.offset.0));
        let size = spec
            .file
            .sizelimit
            .map_or(size, |limit| if limit.0 > 0 { Bytes(limit.0.min(size.0)) } else { size });
        if spec.format == FileFormat::Unspecified
            && let Content::Other(why) = backends::content(&file, &spec.file.path).map_err(failed)?
        {
            let why = format!("{}: {why}", spec.file.path.display());
            return Err(LookupError { why, errno: libc::EINVAL });
        }
        let identity = numbers_of(&spec.file.path).unwrap_or_else(|| identity_of_file(spec));
        // Areas are counted from an offset, which only a real open applies.
        let file = (spec.file.offset.0 == 0).then_some(file);
        Ok(Found { word: word.to_owned(), identity, profile: profile(size), file })
    }
}

fn profile(size: Bytes) -> Profile {
    let mut limits = QueueLimits { logical_block_size: Bytes(512), ..QueueLimits::default() };
    // These limits never conflict.
    let _ = limits.validate();
    Profile {
        size: Bytes(size.0 & !511),
        read_only: false,
        abilities: Abilities::MEMORY,
        limits,
        bytewise: false,
        zero_copy_reads: false,
        inline: false,
        sparse: false,
        opaque: false,
    }
}

impl Devices for DryRunDevices<'_> {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        let found = self.find(word)?;
        self.found.push(found);
        Ok(self.found.len() - 1)
    }

    fn profile(&self, device: usize) -> &Profile {
        &self.found[device].profile
    }

    fn identity(&self, device: usize) -> &str {
        &self.found[device].identity
    }

    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        match &self.found[device].file {
            Some(file) => file.read_exact_at(into, at.0),
            None => {
                into.fill(0);
                Ok(())
            }
        }
    }

    fn write(&mut self, _: usize, _: Bytes, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_tables_are_reported_and_nothing_is_written() {
        let folder = std::env::temp_dir().join(format!("blockyard-dry-run-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (disk, store) = (folder.join("disk"), folder.join("store"));
        std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
        std::fs::write(&store, vec![0; 1 << 20]).unwrap();
        let (here, fifo, mode) = (rustix::fs::CWD, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(here, folder.join("pipe"), fifo, mode, 0).unwrap();
        let refusal = |text: &str| {
            let spec = text.parse::<TableSpec>().unwrap().rooted(&folder);
            dry_run(&spec, &["other"]).map_or_else(|why| why.to_string(), |()| String::new())
        };
        for good in [
            "0 2048 linear disk 0\n2048 8 zero",
            "0 9000 linear other 0",
            "0 9000 linear file:new,size=8M,create 0",
            "0 9000 linear nbd:nbd://nowhere/x 0",
            "0 1024 snapshot disk store P 16",
            "0 1024 mirror disk 2 store 64 2 disk 0 disk 1024",
            "0 9000 multipath 0 0 1 1 round-robin 0 1 0 nbd:nbd://nowhere/x",
        ] {
            assert_eq!(refusal(good), "", "{good}");
        }
        for (bad, why) in [
            ("0 8 swim", "line 1 of the table: swim: unknown target type"),
            ("0 8 zero\n16 8 zero", "line 2 of the table: zero: Gap in table"),
            ("0 2049 linear disk 0", "linear: disk too small for target: start=0, len=2049, dev_size=2048"),
            ("0 8 linear absent 0", "linear: Device lookup failed: "),
            ("0 8 linear file:disk,offset=1M 0", "too small for target"),
            ("0 48 striped 2 48 disk 0 disk 0", "striped: Target length not divisible by chunk size"),
            ("0 8 linear 4095:7 0", "there is no such block device"),
            ("0 8 linear pipe 0", "pipe: it is neither a regular file nor a block device"),
            ("0 8 linear . 0", "it is neither a regular file nor a block device"),
        ] {
            let refusal = refusal(bad);
            assert!(refusal.contains(why), "{bad}: {refusal}");
        }
        assert!(std::fs::read(&store).unwrap().iter().all(|&byte| byte == 0), "no store was created");
        assert!(!folder.join("new").exists());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
