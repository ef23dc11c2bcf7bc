//! Opening a file: finding out what it is, locking it, deciding between buffered and direct.

use super::container::{Content, HEAD_LEN, content};
use super::facts::{Alignment, Facts, Shared};
use super::lock::{self, Locked};
use super::spec::{Direct, FileSpec, OpenError};
use super::sys;
use crate::{Backend, Fact, Features};
use block::{Bytes, QueueLimits, Sectors};
use queue::FileId;
use std::fs::{self, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// File systems by magic number: name, whether they are memory, whether buffered writes know `RWF_NOWAIT`.
/// Source: include/uapi/linux/magic.h, and `FMODE_NOWAIT` with `IOCB_NOWAIT` in their `write_iter`.
const FILE_SYSTEMS: [(u32, &str, bool, bool); 14] = [
    (0x0102_1994, "tmpfs", true, false),
    (0x8584_58f6, "ramfs", true, false),
    (0x9584_58f6, "hugetlbfs", true, false),
    (0x0000_ef53, "ext4", false, false),
    (0x5846_5342, "xfs", false, true),
    (0x9123_683e, "btrfs", false, true),
    (0xf2f5_2010, "f2fs", false, false),
    (0x2fc1_2fc1, "zfs", false, false),
    (0xca45_1a4e, "bcachefs", false, false),
    (0x0000_6969, "nfs", false, false),
    (0xff53_4d42, "cifs", false, false),
    (0x6573_5546, "fuse", false, false),
    (0x794c_7630, "overlayfs", false, false),
    (0x00c3_6400, "ceph", false, false),
];

/// An open file: the part that all queues share, and the descriptor.
///
/// What it is served as may change while it is open: see [`change`](super::change). Then another of these
/// takes over the same open file, with its locks.
#[derive(Debug)]
pub struct File {
    pub(super) handle: Arc<fs::File>,
    /// The same file, opened a second time: see [`error_descriptor`](File::error_descriptor).
    pub(super) error_handle: Option<Arc<fs::File>>,
    pub(super) spec: FileSpec,
    pub(super) shared: Arc<Shared>,
    pub(super) file_system: &'static str,
    pub(super) locked: Locked,
    /// Why it is direct or buffered.
    pub(super) why: String,
    pub(super) limits: QueueLimits,
    pub(super) discards: bool,
    pub(super) rotational: bool,
}

impl File {
    /// Open what was asked for.
    ///
    /// # Errors
    /// See [`OpenError`]: nothing is left behind, not even a file that was to be made.
    pub fn open(spec: &FileSpec) -> Result<Arc<File>, OpenError> {
        check(spec)?;
        let (handle, made) = open_or_create(spec)?;
        Self::with_handle(spec, handle).inspect_err(|_| {
            if made {
                let _ = fs::remove_file(&spec.path);
            }
        })
    }

    fn with_handle(spec: &FileSpec, handle: fs::File) -> Result<Arc<File>, OpenError> {
        let call = |doing| move |error| OpenError::call(doing, spec, error);
        let meta = handle.metadata().map_err(call("examining"))?;
        let block_device = meta.file_type().is_block_device();
        if !block_device && !meta.is_file() {
            return Err(OpenError::refused(
                spec,
                "it is neither a regular file nor a block device (name another)",
            ));
        }
        let locked = if block_device {
            if spec.share || spec.read_only { Locked::Shared } else { Locked::Yes }
        } else {
            lock::lock(&handle, spec)?
        };
        if spec.stays_raw {
            check_head(spec, &handle)?;
        }
        let length = length(&handle).map_err(call("measuring"))?;
        if let (Some(size), false) = (spec.size, block_device)
            && size.0 != length
        {
            let why = format!(
                "it is there and holds {}, not {size} (leave out create and size, or remove it)",
                Bytes(length)
            );
            return Err(OpenError::refused(spec, why));
        }
        Self::examine(spec, Arc::new(handle), locked, None)
    }

    /// Find out how an open file can be served. `before`: how it was up to now; its blocks stay what they
    /// are, and so does what was learned of it.
    pub(super) fn examine(
        spec: &FileSpec,
        handle: Arc<fs::File>,
        locked: Locked,
        before: Option<&File>,
    ) -> Result<Arc<File>, OpenError> {
        let call = |doing| move |error| OpenError::call(doing, spec, error);
        let meta = handle.metadata().map_err(call("examining"))?;
        let block_device = meta.file_type().is_block_device();
        let read_only =
            spec.read_only || block_device && sys::is_read_only_device(&handle).map_err(call("examining"))?;
        let length = length(&handle).map_err(call("measuring"))?;
        let (magic, fs_block) = sys::file_system(&handle).map_err(call("examining"))?;
        let known = FILE_SYSTEMS.iter().find(|row| row.0 == magic && !block_device);
        let memory = known.is_some_and(|row| row.2);
        let disk =
            super::limits::Disk::of(&handle, &meta, block_device, fs_block).map_err(call("examining"))?;
        let kept = before.map(|file| file.shared.facts.block);
        let fixed = FileSpec { block: kept.or(spec.block), ..spec.clone() };
        let choice = choose(&fixed, &handle, block_device, memory, disk.logical)?;
        let start = spec.offset;
        let facts = Facts {
            start,
            size: device_size(length, spec, choice.block),
            block: choice.block,
            read_only,
            direct: choice.direct,
            memory,
            nowait_reads: !memory && sys::reads_without_waiting(&handle),
            nowait_writes: known.is_some_and(|row| row.3),
            timed_writes: true,
            block_device,
            head: if spec.stays_raw && !read_only {
                (HEAD_LEN as u64).saturating_sub(start.0) as u32
            } else {
                0
            },
        };
        let limits = super::limits::limits(&facts, &disk)
            .map_err(|error| OpenError::refused(spec, error.to_string()))?;
        let error_handle = match before {
            Some(file) => file.error_handle.clone(),
            None if read_only || memory => None,
            None => reopen(&handle).map(Arc::new),
        };
        Ok(Arc::new(File {
            handle,
            error_handle,
            spec: spec.clone(),
            shared: before.map_or_else(|| Shared::new(facts), |file| file.shared.changed(facts)),
            file_system: if block_device { "block device" } else { known.map_or("other", |row| row.1) },
            locked,
            why: choice.why,
            limits,
            discards: disk.discard_max.0 > 0,
            rotational: disk.rotational,
        }))
    }

    /// The node of one hardware queue. `file`: what the queue's ring calls this file's descriptor.
    pub fn node(&self, file: FileId) -> super::FileNode {
        super::FileNode::new(Arc::clone(&self.shared), file)
    }

    /// The file's own memory, when that is what it is: reads that may be lent are then answered from there. `None`:
    /// it is no memory, or cannot be written, which memory that is lent to a ring must be.
    pub fn memory(&self) -> Option<ring::ForeignMemory> {
        let facts = self.shared.facts();
        if !facts.memory || facts.read_only || self.file_system != "tmpfs" {
            return None;
        }
        let view = sys::View::new(&self.handle, facts.start.0 + facts.size.0).ok()?;
        Some(Arc::new(view).lend())
    }

    /// Another descriptor of the open file, for a ring. Locks and flags are those of the file.
    ///
    /// # Errors
    /// No descriptor is to be had.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.handle.try_clone().map(OwnedFd::from)
    }

    /// A second open file description of the file, which is never written: the one that is synced, so that the kernel reports
    /// data that it lost there, whatever a durable write was told of. See [`FileNode::with_error_file`](super::FileNode::with_error_file). `None`: the file is
    /// never synced, or could not be opened again (without `/proc`, for example).
    ///
    /// # Errors
    /// No descriptor is to be had.
    pub fn error_descriptor(&self) -> io::Result<Option<OwnedFd>> {
        let again = self.error_handle.as_ref().map(|handle| handle.try_clone().map(OwnedFd::from));
        again.transpose()
    }

    /// A file in memory through which data is copied that only the kernel reaches, to check it before it is written.
    /// `None`: nothing is checked.
    ///
    /// # Errors
    /// No descriptor is to be had.
    pub fn scratch_descriptor(&self) -> io::Result<Option<OwnedFd>> {
        if self.shared.facts.head == 0 {
            return Ok(None);
        }
        Ok(Some(rustix::fs::memfd_create("blockyard-head", rustix::fs::MemfdFlags::CLOEXEC)?))
    }

    /// The compression of the data that a raw disk begins with, if nobody said that it is a raw disk: the file may be
    /// a compressed image.
    pub fn compression(&self) -> Option<&'static str> {
        match content(&self.handle, &self.spec.path) {
            Ok(Content::MayBeCompressed(name)) if self.spec.stays_raw => Some(name),
            _ => None,
        }
    }

    /// What was asked for, as far as it has not changed since.
    pub fn spec(&self) -> &FileSpec {
        &self.spec
    }

    /// What nodes share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Where the kernel finds it now: it may have been renamed, or be ` (deleted)`.
    fn backing_file(&self) -> String {
        let link = fs::read_link(format!("/proc/self/fd/{}", self.handle.as_raw_fd()));
        link.as_ref().unwrap_or(&self.spec.path).display().to_string()
    }

    fn inline_policy(&self) -> &'static str {
        let facts = self.shared.facts();
        match (facts.memory, facts.direct) {
            (true, _) => "all in place: the file is memory",
            (_, Some(_)) => "all through the ring",
            (_, None) if facts.nowait_reads => {
                "cached reads in place, writes while they return at once, the rest through the ring"
            }
            (_, None) => "writes in place while they return at once, the rest through the ring",
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

impl Backend for File {
    fn size(&self) -> Bytes {
        self.shared.facts.size
    }

    fn read_only(&self) -> bool {
        self.shared.facts.read_only
    }

    fn features(&self) -> Features {
        let writable = !self.shared.facts.read_only;
        let (punches, zeroes) = self.shared.fallocates();
        Features {
            flush: true,
            fua: writable,
            discard: writable && self.discards && punches,
            write_zeroes: writable,
            fast_zero: writable && self.discards && (punches || zeroes),
            rotational: self.rotational,
        }
    }

    fn limits(&self) -> QueueLimits {
        let mut limits = self.limits.clone();
        if !self.shared.fallocates().0 {
            // LOOP-10: what was refused is not offered any more.
            limits.max_hw_discard_sectors = Sectors(0);
            limits.max_discard_sectors = Sectors(0);
            limits.discard_granularity = Bytes::ZERO;
            limits.discard_alignment = Bytes::ZERO;
        }
        limits
    }

    fn deleted(&self) -> Vec<std::path::PathBuf> {
        use std::os::unix::fs::MetadataExt;
        let is_gone = self.handle.metadata().is_ok_and(|meta| meta.is_file() && meta.nlink() == 0);
        is_gone.then(|| self.spec.path.clone()).into_iter().collect()
    }

    fn describe(&self) -> Vec<Fact> {
        let facts = self.shared.facts();
        let locked = match self.shared.lets_writers.load(Ordering::Relaxed) {
            true => "no more: another program took the locks during a commit (end it, and serve this anew)",
            false => self.locked.describe(),
        };
        let mut out = vec![
            ("backend", "file".to_owned()),
            ("path", self.spec.path.display().to_string()),
            ("size", facts.size.to_string()),
            ("direct", self.why.clone()),
            ("file system", self.file_system.to_owned()),
            ("served", self.inline_policy().to_owned()),
            ("locked", locked.to_owned()),
            // From here on as in /sys/block/loopN/loop.
            ("backing_file", self.backing_file()),
            ("offset", facts.start.0.to_string()),
            ("sizelimit", self.spec.sizelimit.map_or(0, |limit| limit.0).to_string()),
            ("dio", u8::from(facts.direct.is_some()).to_string()),
        ];
        if facts.head > 0 {
            let refused = self.shared.refused_head().map_or(String::new(), |format| {
                format!(" (a client's write was refused that made it begin as a {format} image: format=raw allows that)")
            });
            out.push((
                "format",
                format!("raw, as none was given: it is kept from beginning as an image{refused}"),
            ));
        }
        if let Some(withdrawn) = self.shared.withdrawn() {
            out.push(("withdrawn", withdrawn.to_owned()));
        }
        if facts.read_only {
            out.push(("read-only", "yes".to_owned()));
        }
        if self.shared.flush_failed() {
            out.push(("failed", "a flush failed: writes are refused until it is opened anew".to_owned()));
        }
        out
    }
}

/// Refuses a file that holds an image of another format, or a compressed one.
fn check_head(spec: &FileSpec, handle: &fs::File) -> Result<(), OpenError> {
    match content(handle, &spec.path).map_err(|error| OpenError::call("reading", spec, error))? {
        Content::Raw | Content::MayBeCompressed(_) => Ok(()),
        Content::Other(why) => Err(OpenError::refused(spec, why)),
    }
}

/// Opens the file of a descriptor a second time, by its entry in `/proc`, as its name may stand for another file by now.
/// A block device is not claimed again.
fn reopen(handle: &fs::File) -> Option<fs::File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    options.open(format!("/proc/self/fd/{}", handle.as_raw_fd())).ok()
}

/// What can be said without looking at the file.
fn check(spec: &FileSpec) -> Result<(), OpenError> {
    let refused = |why: &str| Err(OpenError::refused(spec, why));
    if let Some(block) = spec.block
        && !(block.is_power_of_two() && (512..=65536).contains(&block))
    {
        return Err(OpenError::refused(
            spec,
            format!("block={block} is not possible (give a power of two from 512 to 65536)"),
        ));
    }
    match (spec.create, spec.size) {
        (true, _) if spec.read_only => refused("create and ro exclude each other (leave one out)"),
        (true, None) => refused("create needs to know how large (add size=)"),
        (false, Some(_)) => refused("size= is for a file that is made (add create, or use sizelimit=)"),
        (_, Some(size)) if size.0 == 0 || !size.is_aligned(512) || size.0 > i64::MAX as u64 => {
            refused("size= is not a size that a disk has (give whole sectors of 512 bytes)")
        }
        _ if spec.offset.0 > i64::MAX as u64 => refused("offset= is past the end of any file (give less)"),
        _ => Ok(()),
    }
}

/// The file, and whether it was made.
fn open_or_create(spec: &FileSpec) -> Result<(fs::File, bool), OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(!spec.read_only);
    // To a block device O_EXCL is a claim that excludes other claims; elsewhere, without O_CREAT, nothing.
    let is_device = fs::metadata(&spec.path).is_ok_and(|meta| meta.file_type().is_block_device());
    let claim = is_device && !spec.share && !spec.read_only;
    // A FIFO or a terminal must not hold us up: O_NONBLOCK means nothing to what we serve.
    options.custom_flags(libc::O_NONBLOCK | if claim { libc::O_EXCL } else { 0 });
    match options.open(&spec.path) {
        Ok(handle) => Ok((handle, false)),
        Err(error) if error.kind() == io::ErrorKind::NotFound && spec.create => create(spec),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(OpenError::InUse {
            path: spec.path.clone(),
            why: "it is mounted, or another program has claimed it (unmount or stop it, or add share)",
        }),
        Err(error) => Err(OpenError::call("opening", spec, error)),
    }
}

fn create(spec: &FileSpec) -> Result<(fs::File, bool), OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o666);
    let handle = options.open(&spec.path).map_err(|error| OpenError::call("creating", spec, error))?;
    // Durable before the device is: a file that is shorter after a power cut is refused the next time.
    let sized = handle.set_len(spec.size.map_or(0, |size| size.0)).and_then(|()| handle.sync_all());
    if let Err(error) = sized {
        let _ = fs::remove_file(&spec.path);
        return Err(OpenError::call("sizing", spec, error));
    }
    let folder = spec.path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Ok(folder) = fs::File::open(folder.unwrap_or(Path::new("."))) {
        // Some file systems cannot sync a folder: then nothing more can be done for the file's name.
        let _ = folder.sync_all();
    }
    Ok((handle, true))
}

/// How long a file or a block device is now.
pub(super) fn length(mut handle: &fs::File) -> io::Result<u64> {
    handle.seek(SeekFrom::End(0))
}

/// LOOP-1: what lies behind the offset, at most the limit, in whole blocks.
pub(super) fn device_size(length: u64, spec: &FileSpec, block: u32) -> Bytes {
    let size = length.saturating_sub(spec.offset.0);
    let limit = spec.sizelimit.filter(|limit| limit.0 > 0).map_or(u64::MAX, |limit| limit.0);
    Bytes(size.min(limit)).align_down(block.into())
}

struct Choice {
    direct: Option<Alignment>,
    block: u32,
    why: String,
}

/// Buffered or direct (LOOP-5), and the logical block size that follows (LOOP-7).
fn choose(
    spec: &FileSpec,
    handle: &fs::File,
    block_device: bool,
    memory: bool,
    device_block: u32,
) -> Result<Choice, OpenError> {
    let own = if block_device { device_block } else { 512 };
    let buffered =
        |why: &str| Choice { direct: None, block: spec.block.unwrap_or(own), why: format!("no: {why}") };
    match spec.direct {
        Direct::Off => return Ok(buffered("direct=off")),
        Direct::Auto if memory => return Ok(buffered("the file is memory")),
        Direct::Auto if !block_device => return Ok(buffered("a regular file is buffered unless direct=on")),
        _ => {}
    }
    let (memory, offset) = sys::direct_alignment(handle).unwrap_or((device_block, device_block));
    let refusal = if offset == 0 {
        Some("the file system has no direct I/O".to_owned())
    } else if spec.block.is_some_and(|block| block < offset) {
        Some(format!("direct I/O needs blocks of {offset} (give block={offset}, or leave it out)"))
    } else if !spec.offset.is_aligned(offset.into()) {
        Some(format!("direct I/O needs an offset that is a multiple of {offset}"))
    } else {
        sys::set_direct(handle, true)
            .err()
            .map(|error| format!("the file system refuses direct I/O: {error}"))
    };
    match (refusal, spec.direct) {
        (None, _) => Ok(Choice {
            direct: Some(Alignment { memory: memory.max(1), offset }),
            block: spec.block.unwrap_or(own).max(offset),
            why: format!("yes: blocks of {offset}, memory aligned to {memory}"),
        }),
        (Some(why), Direct::Auto) => Ok(buffered(&why)),
        (Some(why), _) => Err(OpenError::refused(spec, format!("direct=on is not possible: {why}"))),
    }
}

pub(super) fn device_number(meta: &fs::Metadata, block_device: bool) -> (u32, u32) {
    let number = if block_device { meta.rdev() } else { meta.dev() };
    (libc::major(number), libc::minor(number))
}
