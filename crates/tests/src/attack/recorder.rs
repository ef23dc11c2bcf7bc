//! A file system in memory, by FUSE, that records all changes to its files and injects faults.
//!
//! It has one folder of regular files. Every write, fallocate, truncate and sync is recorded with its data
//! and with the ticks of a [`Clock`] at which it arrived and was answered; [`Recording::crash`] turns the
//! records into a possible content of a disk after a power cut. Calls of one process run at the same time
//! (several threads), and some are delayed, so a sync that is sent before a write was answered does not cover
//! that write, as on a real disk.
//!
//! Names are durable at once: creating, renaming and removing a file is not part of a crash state.

use super::clock::Clock;
use super::fault::{Call, Faults, Verdict};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use sim::Rng;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long the kernel may cache names and attributes. Only the kernel changes them.
const KEPT: Duration = Duration::from_secs(60);
/// Threads that answer the kernel.
const THREADS: usize = 4;
/// `FALLOC_FL_KEEP_SIZE`, `FALLOC_FL_PUNCH_HOLE` and `FALLOC_FL_ZERO_RANGE`.
const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 16;
/// Flag of `open` and of `RWF_DSYNC` writes.
const O_DSYNC: i32 = 0o10000;
/// Sectors are written whole or not at all.
pub const SECTOR: u64 = 512;

/// A change to a file, or a sync of it.
#[derive(Clone, Debug)]
pub enum Change {
    /// Data written at an offset.
    Write(u64, Vec<u8>),
    /// Zeroes at an offset for a length; true: they may extend the file.
    Zero(u64, u64, bool),
    /// A new size.
    Size(u64),
    /// A sync.
    Sync,
}

/// A change, and its times.
#[derive(Clone, Debug)]
pub struct Record {
    /// Number of the file.
    pub file: u64,
    /// Tick at which it arrived.
    pub begin: u64,
    /// Tick at which it was answered.
    pub end: u64,
    /// The change.
    pub change: Change,
    /// A failed sync has dropped the change: no later sync makes it durable.
    pub lost: bool,
    /// The data was written with `O_DSYNC`: durable by itself once it is answered.
    pub synced: bool,
}

/// The changes to all files since the start of the recording.
#[derive(Clone, Default)]
pub struct Recording {
    /// Files by number: name and content at the start of the recording.
    pub base: BTreeMap<u64, (OsString, Vec<u8>)>,
    /// Changes and syncs in the order in which they were answered.
    pub records: Vec<Record>,
}

/// How a crash selects among the changes that were not durable.
#[derive(Clone, Copy, Debug)]
enum Choice {
    Nothing,
    All,
    Records(u32),
    Sectors(u32),
    AllBut(u64),
    Only(u64),
}

impl Recording {
    /// The ticks just before each sync was sent and just after it was answered.
    pub fn sync_boundaries(&self) -> Vec<u64> {
        let syncs = self.records.iter().filter(|record| matches!(record.change, Change::Sync));
        syncs.flat_map(|sync| [sync.begin, sync.end + 1]).collect()
    }

    /// Returns the files as a disk may contain them if the power fails at that tick.
    pub fn crash(&self, at: u64, rng: &mut Rng) -> BTreeMap<OsString, Vec<u8>> {
        let mut durable_until: BTreeMap<u64, u64> = BTreeMap::new();
        for sync in
            self.records.iter().filter(|record| matches!(record.change, Change::Sync) && record.end < at)
        {
            let until = durable_until.entry(sync.file).or_default();
            *until = (*until).max(sync.begin);
        }
        let is_durable = |record: &Record| {
            let covered = durable_until.get(&record.file).is_some_and(|until| record.end < *until);
            (record.synced && record.end < at) || (!record.lost && covered)
        };
        let mut open: u64 = 0;
        for record in &self.records {
            open +=
                u64::from(record.begin < at && !is_durable(record) && !matches!(record.change, Change::Sync));
        }
        let choice = match rng.below(8) {
            0 => Choice::Nothing,
            1 => Choice::All,
            2 => Choice::Records(500),
            3 => Choice::Records(900),
            4 => Choice::Sectors(500),
            5 => Choice::Sectors(950),
            6 => Choice::AllBut(rng.below(open.max(1))),
            _ => Choice::Only(rng.below(open.max(1))),
        };
        let mut files = self.base.clone();
        let mut number = 0;
        for record in self.records.iter().filter(|record| record.begin < at) {
            if matches!(record.change, Change::Sync) {
                continue;
            }
            let Some((_, content)) = files.get_mut(&record.file) else { continue };
            if is_durable(record) {
                apply(content, &record.change, |_| true);
                continue;
            }
            match choice {
                Choice::Nothing => {}
                Choice::All => apply(content, &record.change, |_| true),
                Choice::Records(permille) if rng.chance(permille) => apply(content, &record.change, |_| true),
                Choice::Records(_) => {}
                Choice::Sectors(permille) => apply(content, &record.change, |_| rng.chance(permille)),
                Choice::AllBut(one) if number == one => apply(content, &record.change, |_| rng.chance(500)),
                Choice::AllBut(_) => apply(content, &record.change, |_| true),
                Choice::Only(one) if number == one => apply(content, &record.change, |_| true),
                Choice::Only(_) => {}
            }
            number += 1;
        }
        files.into_values().collect()
    }
}

/// Applies a change to a content, only in the sectors that `keep` accepts by their number.
fn apply(content: &mut Vec<u8>, change: &Change, mut keep: impl FnMut(u64) -> bool) {
    let (from, to) = match change {
        Change::Write(offset, data) => (*offset, offset + data.len() as u64),
        Change::Zero(offset, len, grows) => {
            let end = offset + len;
            (*offset, if *grows { end } else { end.min(content.len() as u64) })
        }
        Change::Size(size) => {
            if keep(size / SECTOR) {
                content.resize(*size as usize, 0);
            }
            return;
        }
        Change::Sync => return,
    };
    let mut at = from;
    while at < to {
        let end = ((at / SECTOR + 1) * SECTOR).min(to);
        if keep(at / SECTOR) {
            if content.len() < end as usize {
                content.resize(end as usize, 0);
            }
            let place = &mut content[at as usize..end as usize];
            match change {
                Change::Write(offset, data) => {
                    place.copy_from_slice(&data[(at - offset) as usize..(end - offset) as usize]);
                }
                _ => place.fill(0),
            }
        }
        at = end;
    }
}

#[derive(Default)]
struct State {
    names: BTreeMap<OsString, u64>,
    files: BTreeMap<u64, Vec<u8>>,
    next: u64,
    recording: Recording,
    faults: Faults,
    /// One call in this many is delayed; 0: none.
    delay_one_in: u64,
    /// Reads and writes bypass the kernel's page cache.
    uncached: bool,
    /// A canary: one sync in this many is acknowledged but not executed.
    drop_one_sync_in: u64,
    syncs: u64,
    /// Chooses the calls to delay.
    draws: fastrand::Rng,
    /// Open file descriptions, by their numbers: the file, and how many of its losses were reported to each.
    handles: BTreeMap<u64, (u64, usize)>,
    /// The errno of each sync that failed, by file.
    losses: BTreeMap<u64, Vec<i32>>,
}

impl State {
    /// Opens a file description. Earlier losses are not reported to it.
    fn open(&mut self, file: u64) -> FileHandle {
        let received = self.losses.get(&file).map_or(0, Vec::len);
        let number = self.handles.last_key_value().map_or(1, |(last, _)| last + 1);
        self.handles.insert(number, (file, received));
        FileHandle(number)
    }

    /// Returns the next loss to report to an open file description.
    fn next_loss(&mut self, handle: FileHandle) -> Option<i32> {
        let (file, received) = self.handles.get_mut(&handle.0)?;
        let losses = self.losses.get(file)?;
        let errno = *losses.last().filter(|_| losses.len() > *received)?;
        *received = losses.len();
        Some(errno)
    }
}

struct Folder {
    state: Arc<Mutex<State>>,
    clock: Clock,
}

/// A mounted file system.
pub struct Recorder {
    state: Arc<Mutex<State>>,
    session: Mutex<Option<BackgroundSession>>,
    at: PathBuf,
}

impl Recorder {
    /// Mounts an empty file system.
    ///
    /// # Errors
    /// The kernel or the user's rights do not allow it.
    pub fn mount(at: &Path, clock: Clock) -> std::io::Result<Recorder> {
        std::fs::create_dir_all(at)?;
        let state =
            Arc::new(Mutex::new(State { next: 2, draws: fastrand::Rng::with_seed(0), ..State::default() }));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("recorder".into()), MountOption::RW];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(Folder { state: state.clone(), clock }, at, &config)?;
        Ok(Recorder { state, session: Mutex::new(Some(session)), at: at.to_owned() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Declares all of its content to be durable, and records from now on.
    pub fn begin(&self) {
        let mut state = self.state();
        let state = &mut *state;
        let named = state.names.iter().map(|(name, file)| (*file, (name.clone(), state.files[file].clone())));
        state.recording = Recording { base: named.collect(), records: Vec::new() };
    }

    /// Returns the recording, with the present names of the files.
    pub fn recording(&self) -> Recording {
        let state = self.state();
        let mut recording = state.recording.clone();
        recording.base.retain(|file, _| state.names.values().any(|named| named == file));
        for (name, file) in &state.names {
            recording.base.entry(*file).or_default().0.clone_from(name);
        }
        recording
    }

    /// Returns the present content of its files.
    pub fn contents(&self) -> BTreeMap<OsString, Vec<u8>> {
        let state = self.state();
        state.names.iter().map(|(name, file)| (name.clone(), state.files[file].clone())).collect()
    }

    /// Injects the plan's faults from now on, counting from the next call.
    pub fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// Unmounts the file system; the folder below is empty. Recording and contents stay.
    pub fn unmount(&self) {
        // A hanging call must not keep the mount.
        self.state().faults.count = 0;
        let session = self.session.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(session) = session
            && session.umount_and_join().is_err()
        {
            let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        }
    }

    /// Injects no faults from now on; the list of earlier ones stays.
    pub fn pause_faults(&self) {
        self.state().faults.count = 0;
    }

    /// Returns the plan with the calls that were counted and that had the fault so far.
    pub fn faults(&self) -> Faults {
        self.state().faults.clone()
    }

    /// Delays one call in this many; 0: none.
    pub fn set_delay(&self, one_in: u64) {
        self.state().delay_one_in = one_in;
    }

    /// Tells the kernel to cache nothing of files that are opened from now on.
    pub fn set_uncached(&self, uncached: bool) {
        self.state().uncached = uncached;
    }

    /// Activates a canary: one sync in this many is answered but not executed.
    pub fn set_dropped_syncs(&self, one_in: u64) {
        self.state().drop_one_sync_in = one_in;
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.unmount();
    }
}

impl Folder {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Counts an arriving call and returns its outcome, after the plan's delay.
    fn judge(&self, call: Call) -> (u64, Verdict) {
        let (begin, verdict, wait) = {
            let mut state = self.state();
            let draw = state.draws.u64(..);
            let delayed = state.delay_one_in > 0 && draw.is_multiple_of(state.delay_one_in);
            let wait = Duration::from_micros(if delayed { 20 + draw % 400 } else { 0 });
            (self.clock.tick(), state.faults.judge(call), wait)
        };
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
        if let Verdict::Hang(time) = verdict {
            std::thread::sleep(time);
        }
        (begin, verdict)
    }

    /// Applies a change and records it.
    fn perform(&self, file: u64, begin: u64, change: Change, synced: bool) -> Result<(), Errno> {
        let mut state = self.state();
        let content = state.files.get_mut(&file).ok_or(Errno::ENOENT)?;
        apply(content, &change, |_| true);
        let end = self.clock.tick();
        state.recording.records.push(Record { file, begin, end, change, lost: false, synced });
        Ok(())
    }

    fn attributes(&self, state: &State, file: u64) -> FileAttr {
        let size = state.files.get(&file).map_or(0, |content| content.len() as u64);
        let is_folder = file == u64::from(INodeNo::ROOT);
        FileAttr {
            ino: INodeNo(file),
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_folder { FileType::Directory } else { FileType::RegularFile },
            perm: if is_folder { 0o700 } else { 0o600 },
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn opening(&self) -> FopenFlags {
        if self.state().uncached { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::empty() }
    }
}

impl Filesystem for Folder {
    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let state = self.state();
        match state.names.get(name) {
            Some(file) => reply.entry(&KEPT, &self.attributes(&state, *file), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let state = self.state();
        reply.attr(&KEPT, &self.attributes(&state, ino.into()));
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size {
            let (begin, verdict) = self.judge(Call::Truncate);
            if let Verdict::Fail(errno) = verdict {
                return reply.error(Errno::from_i32(errno));
            }
            if let Err(errno) = self.perform(ino.into(), begin, Change::Size(size), false) {
                return reply.error(errno);
            }
        }
        let state = self.state();
        reply.attr(&KEPT, &self.attributes(&state, ino.into()));
    }

    fn create(
        &self,
        _req: &Request,
        _parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let (_, verdict) = self.judge(Call::Create);
        if let Verdict::Fail(errno) = verdict {
            return reply.error(Errno::from_i32(errno));
        }
        let flags = self.opening();
        let mut state = self.state();
        let file = state.next;
        state.next += 1;
        state.names.insert(name.to_owned(), file);
        state.files.insert(file, Vec::new());
        state.recording.base.insert(file, (name.to_owned(), Vec::new()));
        let handle = state.open(file);
        reply.created(&KEPT, &self.attributes(&state, file), Generation(0), handle, flags);
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.judge(Call::Open).1 {
            Verdict::Fail(errno) => reply.error(Errno::from_i32(errno)),
            _ => {
                let (flags, handle) = (self.opening(), self.state().open(ino.into()));
                reply.opened(handle, flags);
            }
        }
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let (_, verdict) = self.judge(Call::Read);
        if let Verdict::Fail(errno) = verdict {
            return reply.error(Errno::from_i32(errno));
        }
        let state = self.state();
        let Some(content) = state.files.get(&u64::from(ino)) else { return reply.error(Errno::ENOENT) };
        let from = (offset as usize).min(content.len());
        let mut to = (from + size as usize).min(content.len());
        if let (Verdict::Short, true) = (verdict, state.uncached) {
            to = from + ((to - from) / 2).next_multiple_of(512).min(to - from);
        }
        reply.data(&content[from..to]);
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (begin, verdict) = self.judge(Call::Write);
        // Direct writes carry their own sync; after others the kernel sends one.
        let synced = flags.0 & O_DSYNC != 0;
        let len = match verdict {
            Verdict::Fail(errno) => return reply.error(Errno::from_i32(errno)),
            // For an uncached write the kernel reports the written length; for others an error.
            Verdict::Short if self.state().uncached && data.len() > 512 => {
                (data.len() / 2).next_multiple_of(512)
            }
            _ => data.len(),
        };
        let len = len.min(data.len());
        match self.perform(ino.into(), begin, Change::Write(offset, data[..len].to_vec()), synced) {
            Ok(()) => reply.written(len as u32),
            Err(errno) => reply.error(errno),
        }
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (begin, verdict) = self.judge(Call::Fallocate);
        if let Verdict::Fail(errno) = verdict {
            return reply.error(Errno::from_i32(errno));
        }
        let grows = mode & KEEP_SIZE == 0;
        let change = if mode & (PUNCH_HOLE | ZERO_RANGE) != 0 {
            Change::Zero(offset, length, grows)
        } else {
            let size = self.state().files.get(&u64::from(ino)).map_or(0, Vec::len) as u64;
            if !grows || offset + length <= size {
                return reply.ok();
            }
            Change::Size(offset + length)
        };
        match self.perform(ino.into(), begin, change, false) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    /// A failed sync loses the dirty data, as on Linux: it is reported once to each open file description,
    /// and later syncs succeed.
    fn fsync(&self, _req: &Request, ino: INodeNo, fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let (begin, verdict) = self.judge(Call::Sync);
        let file = ino.into();
        if let Verdict::Fail(errno) = verdict {
            let mut state = self.state();
            state.losses.entry(file).or_default().push(errno);
            let _ = state.next_loss(fh);
            let records = &mut state.recording.records;
            let durable =
                records.iter().filter(|record| record.file == file && matches!(record.change, Change::Sync));
            let until = durable.map(|sync| sync.begin).max().unwrap_or(0);
            for record in records.iter_mut().filter(|record| record.file == file && record.end >= until) {
                record.lost |= !matches!(record.change, Change::Sync);
            }
            return reply.error(Errno::from_i32(errno));
        }
        let dropped = {
            let mut state = self.state();
            state.syncs += 1;
            state.drop_one_sync_in > 0 && state.syncs.is_multiple_of(state.drop_one_sync_in)
        };
        if dropped {
            return reply.ok();
        }
        let done = self.perform(file, begin, Change::Sync, false);
        let lost = self.state().next_loss(fh).map(Errno::from_i32);
        match done.err().or(lost) {
            None => reply.ok(),
            Some(errno) => reply.error(errno),
        }
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsyncdir(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(1 << 20, 1 << 19, 1 << 19, 1000, 1000, 4096, 255, 4096);
    }

    fn unlink(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.state().names.remove(name) {
            Some(_) => reply.ok(),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn rename(
        &self,
        _req: &Request,
        _parent: INodeNo,
        name: &OsStr,
        _newparent: INodeNo,
        newname: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut state = self.state();
        match state.names.remove(name) {
            Some(file) => {
                state.names.insert(newname.to_owned(), file);
                reply.ok();
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let state = self.state();
        for (index, (name, file)) in state.names.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(*file), index as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }
}
