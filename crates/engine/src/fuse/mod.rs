//! The FUSE export, seen from the control plane: a device mounted as one file.
//!
//! Mounting makes one descriptor; each reactor gets a clone of it and serves what it takes from it. The control
//! plane mounts, unmounts, and says who is in the way. It never opens or looks at the file itself: if it did and
//! the process were killed while it waits for an answer of its own, nobody could answer any more.

use crate::cached::drop_pages;
use crate::control::{BoxFuture, ExportInfo};
use crate::device::Device;
use crate::host::{Export, Host, HostError};
use crate::reactor::Attach;
use crate::spec::{Bytes, FuseSpec, OverUring};
use exports::fuse::{FileFacts, Shared};
use fuse::{Mount, MountError, MountOptions};
use over_uring::Choice;
use queue::Gate;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot::error::TryRecvError;

mod over_uring;
mod users;

pub use users::{User, users_of};

/// How long the kernel may take for its first words, by which we know that somebody takes what it asks for.
const FIRST_WORDS_MAX: Duration = Duration::from_secs(30);
/// How often that is looked for: 0.2 ms.
const LOOK: Duration = Duration::from_micros(200);

/// Why a device is not shown as a file, or not taken away.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// It could not be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A descriptor could not be had.
    #[error("{}: {source} (is the limit on open files reached?)", path.display())]
    Descriptor {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// I/O cannot pass us by.
    #[error("passthrough: {why} (leave it out)")]
    Passthrough {
        /// Why.
        why: String,
    },
    /// Requests cannot come through io_uring.
    #[error("uring=on: {0}")]
    OverUring(String),
    /// The kernel would wait for a thread of ours.
    #[error("{}: its requests cannot be taken through io_uring: {why} (give it uring=off)", path.display())]
    Enlist {
        /// Where.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The kernel did not say what it can.
    #[error("{}: the kernel said nothing within {} s of mounting (is the machine overloaded? try again)", path.display(), FIRST_WORDS_MAX.as_secs())]
    NoWords {
        /// Where.
        path: PathBuf,
    },
    /// A thread is held up.
    #[error("{}: the I/O threads did not answer within {} s (is the machine overloaded? try again)", path.display(), FIRST_WORDS_MAX.as_secs())]
    NoThreads {
        /// Where.
        path: PathBuf,
    },
    /// Somebody uses the file.
    #[error("{} is in use{users} (end that, or delete it with --force: what is not written is lost)", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// By whom; begins with a blank unless it is empty.
        users: String,
    },
    /// It could not be unmounted.
    #[error("{}: it cannot be unmounted: {source} (try umount -l)", path.display())]
    Unmount {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A device that is mounted as a file.
pub(crate) struct FuseExport {
    mount: Mount,
    /// The device's.
    name: String,
    shared: Arc<Shared>,
    /// Which way requests come, and why.
    way: Choice,
    /// To speak to the kernel by; gone with the mount.
    device: Mutex<Option<OwnedFd>>,
}

impl FuseExport {
    /// Mount a device and have every reactor serve it.
    pub(crate) fn start(host: &Host, device: &Arc<Device>, spec: &FuseSpec) -> Result<FuseExport, FuseError> {
        FuseExport::start_as(host, device, spec, false)
    }

    /// The same for a file that a block device will be made of: memory that is written back to it may be what its
    /// threads wait for.
    pub(crate) fn start_below(
        host: &Host,
        device: &Arc<Device>,
        spec: &FuseSpec,
    ) -> Result<FuseExport, FuseError> {
        FuseExport::start_as(host, device, spec, true)
    }

    fn start_as(
        host: &Host,
        device: &Arc<Device>,
        spec: &FuseSpec,
        below_a_disk: bool,
    ) -> Result<FuseExport, FuseError> {
        let way = over_uring::choose(spec, host)?;
        match FuseExport::mounted(host, device, spec, below_a_disk, way) {
            // The kernel waits for what nobody brings it: only another mount can do without.
            Err(FuseError::Enlist { path, why }) if spec.uring == OverUring::Auto => {
                tracing::warn!(path = %path.display(), why, "requests come through /dev/fuse");
                FuseExport::mounted(host, device, spec, below_a_disk, Choice::after(&why))
            }
            result => result,
        }
    }

    fn mounted(
        host: &Host,
        device: &Arc<Device>,
        spec: &FuseSpec,
        below_a_disk: bool,
        way: Choice,
    ) -> Result<FuseExport, FuseError> {
        let backing = if spec.passthrough { Some(passed_through(device)?) } else { None };
        let options = MountOptions { name: device.name().to_string(), read_only: device.read_only() };
        let facts = facts(device, spec, way.wanted);
        let writes_parts = facts.block_len_min > 1 && !facts.read_only;
        let gate = if writes_parts { guarded(host, device, &spec.path)? } else { Arc::default() };
        let (mount, descriptor) = Mount::new(&spec.path, &options)?;
        let shared = Arc::new(Shared::new(facts, gate));
        let name = options.name;
        let export = FuseExport { mount, name, shared, way, device: Mutex::new(Some(descriptor)) };
        match export.serve(host, device, backing, below_a_disk) {
            Ok(()) => Ok(export),
            Err(why) => {
                let _ = export.unmount(true);
                Err(why)
            }
        }
    }

    fn serve(
        &self,
        host: &Host,
        device: &Arc<Device>,
        backing: Option<OwnedFd>,
        below_a_disk: bool,
    ) -> Result<(), FuseError> {
        let held = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(descriptor) = held.as_ref() else { return Ok(()) };
        let failed = |source| FuseError::Descriptor { path: self.mount.path().to_owned(), source };
        for number in 0..host.reactors().len() {
            let clone = match fuse::clone_descriptor(descriptor) {
                // Who was mounted for may not open the device himself: then one thread serves.
                Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                    let own = descriptor.try_clone().map_err(failed)?;
                    host.attach_to(number, device.clone(), adoption(own, self.shared.clone(), below_a_disk));
                    break;
                }
                clone => clone.map_err(failed)?,
            };
            host.attach_to(number, device.clone(), adoption(clone, self.shared.clone(), below_a_disk));
        }
        let deadline = Instant::now() + FIRST_WORDS_MAX;
        let agreement = loop {
            match self.shared.agreement() {
                None if Instant::now() < deadline => std::thread::sleep(LOOK),
                agreement => break agreement,
            }
        };
        let Some(passthrough) = agreement else {
            return Err(FuseError::NoWords { path: self.mount.path().to_owned() });
        };
        if self.way.wanted {
            over_uring::enlist(host, device, &self.shared)
                .map_err(|why| FuseError::Enlist { path: self.mount.path().to_owned(), why })?;
        }
        let Some(backing) = backing else { return Ok(()) };
        let refused = |why: String| FuseError::Passthrough { why };
        if !passthrough {
            return Err(refused("this kernel cannot do that (6.9 and later can)".to_owned()));
        }
        let number = fuse::backing_open(descriptor.as_fd(), backing.as_fd());
        self.shared.pass_through(number.map_err(|why| refused(why.to_string()))?);
        Ok(())
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.mount.path()
    }

    /// The number of its connection.
    fn connection(&self) -> Option<u32> {
        let mounts = fuse::mounts().ok()?;
        let top = mounts.iter().rfind(|one| one.path == self.mount.path() && one.device_name().is_some())?;
        Some(top.device.1)
    }

    /// What is mounted there is not ours: ours was taken away, or lies under another's, which is not ours to take away.
    fn check_covered(&self) -> Result<(), FuseError> {
        match self.shared.channels() {
            0 => Ok(()),
            _ => {
                let source = io::Error::other("something else is mounted over it");
                Err(FuseError::Unmount { path: self.mount.path().to_owned(), source })
            }
        }
    }

    /// Take the mount away.
    pub(crate) fn unmount(&self, lazily: bool) -> Result<(), FuseError> {
        let path = self.mount.path();
        if fuse::is_covered(path, &self.name) {
            return self.check_covered();
        }
        // While it is mounted, the number is nobody else's.
        let connection = self.connection();
        if lazily {
            // Whoever has the file gets errors rather than waits for us: what io_uring brings us we cannot refuse in
            // any other way.
            let _ = connection.map(fuse::abort);
        }
        match fuse::unmount(path, lazily, self.mount.made_file()) {
            Ok(()) => {}
            // Somebody has done so already.
            Err(why) if why.raw_os_error() == Some(libc::EINVAL) => {}
            Err(why) if why.raw_os_error() == Some(libc::EBUSY) => {
                let users = users::listed(&users_of(path));
                return Err(FuseError::InUse { path: path.to_owned(), users });
            }
            Err(source) => return Err(FuseError::Unmount { path: path.to_owned(), source }),
        }
        drop(self.device.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(number) = connection.filter(|_| self.shared.over_io_uring() == Ok(true)) {
            over_uring::end_elsewhere(number, self.name.clone(), self.shared.clone());
        }
        Ok(())
    }
}

impl Export for FuseExport {
    fn info(&self, _device: &Device) -> ExportInfo {
        let passes =
            if self.shared.backing().is_some() { "fuse, passed through and not counted" } else { "fuse" };
        ExportInfo {
            kind: passes.to_owned(),
            address: self.mount.path().display().to_string(),
            connections: u64::from(self.shared.channels() > 0),
            tls: "off".to_owned(),
            details: [("requests".to_owned(), self.way.describe(&self.shared))].into(),
        }
    }

    fn is_passed_by(&self) -> bool {
        self.shared.backing().is_some()
    }

    fn may_close<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async {
            let path = self.mount.path();
            if fuse::is_covered(path, &self.name) {
                return Ok(self.check_covered()?);
            }
            match users_of(path) {
                users if users.is_empty() => Ok(()),
                users => Err(FuseError::InUse { path: path.to_owned(), users: users::listed(&users) }.into()),
            }
        })
    }

    fn close<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.unmount(false)?) })
    }

    fn force<'a>(&'a self, _device: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Box::pin(async { Ok(self.unmount(true)?) })
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        self.shared.resized(size.0);
        if let Some(device) = self.device.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            let mut message = [0; proto::fuse::REPLY_LEN_MAX];
            let len = proto::fuse::put_inval_inode(&mut message, false);
            // ENOENT: the kernel knows nothing of the file that could be wrong.
            let _ = rustix::io::write(device, &message[..len]);
        }
        Box::pin(async { Ok(()) })
    }

    fn replaced(&self) -> BoxFuture<'_, Result<(), HostError>> {
        let held = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = held.as_ref().map(OwnedFd::try_clone).transpose();
        drop(held);
        Box::pin(async move {
            let path = self.mount.path().to_owned();
            match connection {
                Ok(Some(connection)) => Ok(drop_pages(connection, path).await?),
                // It is mounted no longer.
                Ok(None) => Ok(()),
                Err(source) => Err(FuseError::Descriptor { path, source }.into()),
            }
        })
    }
}

fn adoption(descriptor: OwnedFd, shared: Arc<Shared>, below_a_disk: bool) -> Attach {
    Box::new(move |lane, fronts, turn| {
        if below_a_disk && let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
            tracing::info!(%error, "under pressure for memory a thread may wait for itself");
        }
        let front = &mut fronts.fuse;
        if !front.has_lane(lane.queue) {
            front.open_lane(lane.queue, lane.depth, lane.facts.lends);
        }
        if let Err(error) = front.adopt(descriptor, lane.queue, shared, turn) {
            tracing::error!(%error, "a mount could not be served on one of the threads");
        }
    })
}

/// Have all queues of the device keep what they write from parts of blocks that are written here.
fn guarded(host: &Host, device: &Arc<Device>, path: &Path) -> Result<Arc<Gate>, FuseError> {
    let gate = device.make_gate().clone();
    let deadline = Instant::now() + FIRST_WORDS_MAX;
    let mut told: Vec<_> = host.reactors().iter().map(|reactor| reactor.listen(device.clone())).collect();
    loop {
        told.retain_mut(|one| matches!(one.try_recv(), Err(TryRecvError::Empty)));
        if told.is_empty() {
            return Ok(gate);
        }
        if Instant::now() > deadline {
            return Err(FuseError::NoThreads { path: path.to_owned() });
        }
        std::thread::sleep(LOOK);
    }
}

fn facts(device: &Device, spec: &FuseSpec, over_io_uring: bool) -> FileFacts {
    let can = device.abilities();
    FileFacts {
        size: device.size().0,
        read_only: device.read_only(),
        block_len_min: device.block_size_min(),
        block_len_preferred: device.block_size_preferred(),
        fua: can.fua,
        write_zeroes: can.write_zeroes,
        passthrough: spec.passthrough,
        over_io_uring,
        owner: (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
    }
}

/// The file behind a device whose stack adds nothing to it.
fn passed_through(device: &Device) -> Result<OwnedFd, FuseError> {
    let refused = |why: &str| FuseError::Passthrough { why: why.to_owned() };
    if device.form().tree.only_file().is_some_and(|file| file.shared().facts().head > 0) {
        // The kernel writes to the file past the check.
        let why =
            "the file's format was not given, so writes to its first sector are checked (add format=raw)";
        return Err(refused(why));
    }
    device
        .plain_file()
        .ok_or_else(|| refused("only a whole file without layers can be passed through"))?
        .map_err(|why| FuseError::Passthrough { why: why.to_string() })
}
