//! A table that is looked at without being put together: what `add` would refuse, as far as that can be seen without
//! opening anything for writing.
//!
//! Files and block devices are opened to be read; what is to be made, memory, what an NBD server or another device of
//! the topology has is taken to be there and to be long enough. Nothing is written: a target that would write to a
//! device when it is made is told that it did.

use super::table::{
    Order, TableError, check_area, identity_of_file, is_number_pair, node_of, numbers_of, plain, undecided,
};
use crate::spec::{FileFormat, FileSpec, LineSpec, StackSpec, TableSpec};
use backends::Content;
use block::{Abilities, Bytes, Profile, QueueLimits};
use layers::dm::{Devices, Kind, LookupError, Place, TargetError, kinds};
use ring::KernelRing;
use std::fs::File;
use std::io::{self, Seek};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How long what is not asked is taken to be.
const LONG: Bytes = Bytes(1 << 60);

/// What is wrong with a table. `devices`: the other devices that there will be.
pub(crate) fn rehearse(spec: &TableSpec, devices: &[&str]) -> Result<(), TableError> {
    let known = kinds::<KernelRing>();
    let mut order = Order::default();
    for line in &spec.lines {
        let (place, kind) = order.admit(line, &known)?;
        let refuse = |why| TableError { line: line.line, kind: line.kind.clone(), why };
        one(line, place, kind, &spec.base, devices).map_err(refuse)?;
    }
    Ok(())
}

fn one(
    line: &LineSpec,
    place: Place,
    kind: &Kind<KernelRing>,
    base: &Path,
    devices: &[&str],
) -> Result<(), TargetError> {
    let words = line.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut looked = Looked { base, devices, found: Vec::new() };
    let target = (kind.make)(place, &words, &mut looked)?;
    for area in target.areas() {
        let found = &looked.found[area.device];
        check_area(&found.word, &found.profile, area.start.0, area.len.0)?;
    }
    Ok(())
}

/// A device that a constructor asked for.
struct Found {
    word: String,
    identity: String,
    profile: Profile,
    /// `None`: it is not looked at.
    file: Option<File>,
}

struct Looked<'a> {
    base: &'a Path,
    devices: &'a [&'a str],
    found: Vec<Found>,
}

impl Looked<'_> {
    fn find(&self, word: &str) -> Result<Found, LookupError> {
        let failed = |why: String, errno| LookupError { why: format!("{word}: {why}"), errno };
        let unasked =
            |size, identity| Found { word: word.to_owned(), identity, profile: profile(size), file: None };
        if is_number_pair(word) {
            let node =
                node_of(word).ok_or_else(|| failed("there is no such block device".into(), libc::ENODEV))?;
            return self.file(word, &plain(node));
        }
        if word.contains(':') {
            let spec: StackSpec = word.parse().map_err(|why| failed(format!("{why}"), libc::EINVAL))?;
            if let Some(why) = undecided(&spec) {
                return Err(failed(why.to_owned(), libc::EINVAL));
            }
            return match spec.rooted(self.base) {
                StackSpec::File(file)
                    if file.create.is_some() && file.part.is_none() && !file.path.exists() =>
                {
                    Ok(unasked(file.create.unwrap_or(LONG), identity_of_file(&file)))
                }
                // A partition, or an image of a format: how long that is, who opens it sees.
                StackSpec::File(file) if file.part.is_some() || file.is_image() => {
                    let mut found = self.file(word, &file)?;
                    (found.profile.size, found.file) = (LONG, None);
                    Ok(found)
                }
                StackSpec::File(file) => self.file(word, &file),
                other => Ok(unasked(LONG, other.to_string())),
            };
        }
        let name = word.strip_prefix("/dev/mapper/").unwrap_or(word);
        if self.devices.contains(&name) {
            return Ok(unasked(LONG, format!("device {name}")));
        }
        let path: PathBuf = self.base.join(word);
        self.file(word, &plain(path))
    }

    /// What a file holds, read only.
    fn file(&self, word: &str, spec: &FileSpec) -> Result<Found, LookupError> {
        let failed = |why: io::Error| LookupError {
            why: format!("{}: {why}", spec.path.display()),
            errno: why.raw_os_error().unwrap_or(libc::EIO),
        };
        // Nobody may ever write into a FIFO.
        let nonblocking = libc::O_NONBLOCK;
        let file = File::options().read(true).custom_flags(nonblocking).open(&spec.path);
        let mut file = file.map_err(failed)?;
        let kind = file.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let why = format!(
                "{}: it is neither a regular file nor a block device (name another)",
                spec.path.display()
            );
            return Err(LookupError { why, errno: libc::EINVAL });
        }
        let end = file.seek(io::SeekFrom::End(0)).map_err(failed)?;
        let size = Bytes(end.saturating_sub(spec.offset.0));
        let size =
            spec.sizelimit.map_or(size, |limit| if limit.0 > 0 { Bytes(limit.0.min(size.0)) } else { size });
        if spec.format == FileFormat::Unspecified
            && let Content::Other(why) = backends::content(&file, &spec.path).map_err(failed)?
        {
            let why = format!("{}: {why}", spec.path.display());
            return Err(LookupError { why, errno: libc::EINVAL });
        }
        let identity = numbers_of(&spec.path).unwrap_or_else(|| identity_of_file(spec));
        // An offset is only for who opens it: areas are counted from there.
        let file = (spec.offset.0 == 0).then_some(file);
        Ok(Found { word: word.to_owned(), identity, profile: profile(size), file })
    }
}

fn profile(size: Bytes) -> Profile {
    let mut limits = QueueLimits { logical_block_size: Bytes(512), ..QueueLimits::default() };
    // These contradict nothing.
    let _ = limits.validate();
    Profile {
        size: Bytes(size.0 & !511),
        read_only: false,
        abilities: Abilities::MEMORY,
        limits,
        bytewise: false,
        lends: false,
        in_place: false,
        sparse: false,
        opaque: false,
    }
}

impl Devices for Looked<'_> {
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
    fn what_add_would_refuse_is_seen_and_nothing_is_written() {
        let folder = std::env::temp_dir().join(format!("blockyard-rehearsal-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (disk, store) = (folder.join("disk"), folder.join("store"));
        std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
        std::fs::write(&store, vec![0; 1 << 20]).unwrap();
        let (here, fifo, mode) = (rustix::fs::CWD, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(here, folder.join("pipe"), fifo, mode, 0).unwrap();
        let said = |text: &str| {
            let spec = text.parse::<TableSpec>().unwrap().rooted(&folder);
            rehearse(&spec, &["other"]).map_or_else(|why| why.to_string(), |()| String::new())
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
            assert_eq!(said(good), "", "{good}");
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
            let said = said(bad);
            assert!(said.contains(why), "{bad}: {said}");
        }
        assert!(std::fs::read(&store).unwrap().iter().all(|&byte| byte == 0), "no store was made");
        assert!(!folder.join("new").exists());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
