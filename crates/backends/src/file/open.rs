//! Opens a file: determines its type, locks it, and chooses between buffered and direct I/O.

use super::container::{Content, HEAD_LEN, content};
use super::facts::{Alignment, Facts, FileState};
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

/// File systems by magic number: name, whether they are in memory, whether buffered writes support
/// `RWF_NOWAIT`. Source: include/uapi/linux/magic.h, and `FMODE_NOWAIT` with `IOCB_NOWAIT` in their
/// `write_iter`.
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
/// The way it is served (direct or buffered, its length) may change while it is open. Another `File` then
/// takes over the same open file with its locks.
#[derive(Debug)]
pub struct File {
    pub(super) handle: Arc<fs::File>,
    /// A second open file description: see [`sync_descriptor`](File::sync_descriptor).
    pub(super) sync_handle: Option<Arc<fs::File>>,
    pub(super) spec: FileSpec,
    pub(super) shared: Arc<FileState>,
    pub(super) file_system: &'static str,
    pub(super) locked: Locked,
    /// The reason for direct or buffered I/O.
    pub(super) why: String,
    pub(super) limits: QueueLimits,
    pub(super) discards: bool,
    pub(super) rotational: bool,
}

impl File {
    /// Opens a file with these options.
    ///
    /// # Errors
    /// [`OpenError`]: everything is undone, and a created file is removed.
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
            if spec.share || spec.ro { Locked::Shared } else { Locked::Yes }
        } else {
            lock::lock(&handle, spec)?
        };
        if spec.stays_raw {
            check_head(spec, &handle)?;
        }
        let length = length(&handle).map_err(call("measuring"))?;
        if let (Some(size), false) = (spec.create, block_device)
            && size.0 != length
        {
            let why = format!(
                "it exists with {}, not {size} (leave out create and size, or remove it)",
                Bytes(length)
            );
            return Err(OpenError::refused(spec, why));
        }
        Self::examine(spec, Arc::new(handle), locked, None)
    }

    /// Determines how an open file can be served. `before` is its previous state, whose block size and
    /// known facts are kept.
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
            spec.ro || block_device && sys::is_read_only_device(&handle).map_err(call("examining"))?;
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
        let mut limits = super::limits::limits(&facts, &disk)
            .map_err(|error| OpenError::refused(spec, error.to_string()))?;
        if spec.sync {
            limits.features.remove(block::Features::WRITE_CACHE | block::Features::FUA);
        }
        let sync_handle = match before {
            Some(file) => file.sync_handle.clone(),
            None if read_only || memory => None,
            None => reopen(&handle).map(Arc::new),
        };
        Ok(Arc::new(File {
            handle,
            sync_handle,
            spec: spec.clone(),
            shared: before.map_or_else(|| FileState::new(facts), |file| file.shared.changed(facts)),
            file_system: if block_device { "block device" } else { known.map_or("other", |row| row.1) },
            locked,
            why: choice.why,
            limits,
            discards: disk.discard_max.0 > 0,
            rotational: disk.rotational,
        }))
    }

    /// Creates the node of one hardware queue. `file` is this file's number on the queue's ring.
    pub fn node(&self, file: FileId) -> super::FileNode {
        super::FileNode::new(Arc::clone(&self.shared), file)
    }

    /// Returns the file's own memory, if the file is in memory: reads may then be zero-copy. Returns `None`
    /// if it is not, or if it is read-only, because a ring needs writable memory.
    pub fn memory(&self) -> Option<ring::ForeignMemory> {
        let facts = self.shared.facts();
        if !facts.memory || facts.read_only || self.file_system != "tmpfs" {
            return None;
        }
        let view = sys::View::new(&self.handle, facts.start.0 + facts.size.0).ok()?;
        Some(Arc::new(view).lend())
    }

    /// Returns another descriptor of the open file, for a ring. Locks and flags are shared.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.handle.try_clone().map(OwnedFd::from)
    }

    /// Returns a second open file description of the file, which is never written. Syncs use it, so that
    /// the kernel reports lost data there even if a durable write received a report: see
    /// [`FileNode::with_sync_file`](super::FileNode::with_sync_file). Returns `None` if the file is never
    /// synced, or could not be opened again (without `/proc`, for example).
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn sync_descriptor(&self) -> io::Result<Option<OwnedFd>> {
        let again = self.sync_handle.as_ref().map(|handle| handle.try_clone().map(OwnedFd::from));
        again.transpose()
    }

    /// Returns a file in memory, through which data that only the kernel can access is copied, to check it
    /// before it is written. Returns `None` if no checks are needed.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn scratch_descriptor(&self) -> io::Result<Option<OwnedFd>> {
        if self.shared.facts.head == 0 {
            return Ok(None);
        }
        Ok(Some(rustix::fs::memfd_create("blockyard-head", rustix::fs::MemfdFlags::CLOEXEC)?))
    }

    /// Returns the compression of the data at the beginning of a disk without a specified format, because
    /// the file may be a compressed image.
    pub fn compression(&self) -> Option<&'static str> {
        match content(&self.handle, &self.spec.path) {
            Ok(Content::MayBeCompressed(name)) if self.spec.stays_raw => Some(name),
            _ => None,
        }
    }

    /// Returns the options, including later changes.
    pub fn spec(&self) -> &FileSpec {
        &self.spec
    }

    /// Returns the state that nodes share.
    pub fn shared(&self) -> &Arc<FileState> {
        &self.shared
    }

    /// Returns the file's current path: it may have been renamed, and ends in ` (deleted)` if it was
    /// deleted.
    fn backing_file(&self) -> String {
        let link = fs::read_link(format!("/proc/self/fd/{}", self.handle.as_raw_fd()));
        link.as_ref().unwrap_or(&self.spec.path).display().to_string()
    }

    fn inline_policy(&self) -> &'static str {
        let facts = self.shared.facts();
        match (facts.memory, facts.direct) {
            (true, _) => "all inline: the file is memory",
            (_, Some(_)) => "all through the ring",
            (_, None) if facts.nowait_reads => {
                "cached reads inline, writes inline while they return at once, the rest through the ring"
            }
            (_, None) => "writes inline while they return at once, the rest through the ring",
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
            // LOOP-10: an operation that was refused is no longer offered.
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
            true => {
                "no longer: another program took the locks during a commit (stop it, and serve this device again)"
            }
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
            // The following attributes are those of /sys/block/loopN/loop.
            ("backing_file", self.backing_file()),
            ("offset", facts.start.0.to_string()),
            ("sizelimit", self.spec.sizelimit.map_or(0, |limit| limit.0).to_string()),
            ("dio", u8::from(facts.direct.is_some()).to_string()),
        ];
        if facts.head > 0 {
            let refused = self.shared.refused_head().map_or(String::new(), |format| {
                format!(" (refused a write of a {format} image header: format=raw allows it)")
            });
            out.push((
                "format",
                format!("raw, because none was given: clients cannot write an image header to its beginning{refused}"),
            ));
        }
        if let Some(withdrawn) = self.shared.withdrawn() {
            out.push(("withdrawn", withdrawn.to_owned()));
        }
        if facts.read_only {
            out.push(("read-only", "yes".to_owned()));
        }
        if self.shared.flush_failed() {
            out.push(("failed", "a flush failed: writes fail until it is opened again".to_owned()));
        }
        out
    }
}

/// Refuses a file that contains an image of another format, or a compressed one.
fn check_head(spec: &FileSpec, handle: &fs::File) -> Result<(), OpenError> {
    match content(handle, &spec.path).map_err(|error| OpenError::call("reading", spec, error))? {
        Content::Raw | Content::MayBeCompressed(_) => Ok(()),
        Content::Other(why) => Err(OpenError::refused(spec, why)),
    }
}

/// Opens the file of a descriptor a second time through its entry in `/proc`, because its name may refer to
/// another file by now. A block device is opened without a new claim.
fn reopen(handle: &fs::File) -> Option<fs::File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    options.open(format!("/proc/self/fd/{}", handle.as_raw_fd())).ok()
}

/// Checks the options as far as possible without the file.
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
    match spec.create {
        Some(_) if spec.ro => refused("create and ro exclude each other (leave one out)"),
        Some(size) if size.0 == 0 || !size.is_aligned(512) || size.0 > i64::MAX as u64 => {
            refused("size= is not a valid size of a disk (give whole sectors of 512 bytes)")
        }
        _ if spec.offset.0 > i64::MAX as u64 => refused("offset= is past the end of any file (give less)"),
        _ => Ok(()),
    }
}

/// Opens the file. Returns it, and whether it was created.
fn open_or_create(spec: &FileSpec) -> Result<(fs::File, bool), OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(!spec.ro);
    // For a block device O_EXCL is a claim that excludes other claims; without O_CREAT it has no effect on
    // other files.
    let is_device = fs::metadata(&spec.path).is_ok_and(|meta| meta.file_type().is_block_device());
    let claim = is_device && !spec.share && !spec.ro;
    // Opening a FIFO or a terminal must not block; O_NONBLOCK has no effect on files that we serve.
    options.custom_flags(libc::O_NONBLOCK | if claim { libc::O_EXCL } else { 0 } | sync_flag(spec));
    match options.open(&spec.path) {
        Ok(handle) => Ok((handle, false)),
        Err(error) if error.kind() == io::ErrorKind::NotFound && spec.create.is_some() => create(spec),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(OpenError::InUse {
            path: spec.path.clone(),
            why: "it is mounted, or another program has claimed it (unmount or stop it, or add share)",
        }),
        Err(error) => Err(OpenError::call("opening", spec, error)),
    }
}

/// Returns the flag with which writes, and `fallocate`, return only when the data is durable.
fn sync_flag(spec: &FileSpec) -> i32 {
    if spec.sync && !spec.ro { libc::O_DSYNC } else { 0 }
}

fn create(spec: &FileSpec) -> Result<(fs::File, bool), OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o666).custom_flags(sync_flag(spec));
    let handle = options.open(&spec.path).map_err(|error| OpenError::call("creating", spec, error))?;
    // The length must be durable before the device exists: after a power cut, a shorter file would be
    // refused.
    let sized = handle.set_len(spec.create.map_or(0, |size| size.0)).and_then(|()| handle.sync_all());
    if let Err(error) = sized {
        let _ = fs::remove_file(&spec.path);
        return Err(OpenError::call("sizing", spec, error));
    }
    let folder = spec.path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Ok(folder) = fs::File::open(folder.unwrap_or(Path::new("."))) {
        // Some file systems cannot sync a folder; nothing more can be done for the file's name then.
        let _ = folder.sync_all();
    }
    Ok((handle, true))
}

/// Returns the current length of a file or block device.
pub(super) fn length(mut handle: &fs::File) -> io::Result<u64> {
    handle.seek(SeekFrom::End(0))
}

/// Returns the size of the device (LOOP-1): it covers the file after the offset, up to the limit, in whole
/// blocks.
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

/// Chooses buffered or direct I/O (LOOP-5), and the resulting logical block size (LOOP-7).
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
