//! The control plane of the FUSE export: a device mounted as one file.
//!
//! Mounting returns one `/dev/fuse` descriptor; each reactor serves requests from a clone of it. The
//! control plane mounts, unmounts, and reports the processes that use the file. It never opens or stats the
//! file itself: a process killed while it waits for its own answer would leave nobody to answer.
//!
//! [`export`] blocks its thread until the reactors have answered and the kernel has sent `FUSE_INIT`, for at
//! most [`INIT_TIMEOUT`] each.

use crate::helper::page_cache::drop_pages;
use crate::{Exported, Exports, UblkLife};
use engine::control::{BoxFuture, ExportInfo};
use engine::device::Device;
use engine::host::{Export, Handover, Host, HostError, HostErrorKind};
use engine::reactor::Attach;
use exports::fuse::{FileFacts, MountState};
use fuse::{Mount, MountError, MountOptions};
use over_uring::Transport;
use spec::{Bytes, FuseSpec, OverUring};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

mod over_uring;
mod users;

pub use users::{User, users_of};

/// Longest wait for the kernel's `FUSE_INIT`, and for the reactors to answer.
const INIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a device cannot be exported as a file, or the file cannot be removed.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// Mounting failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// A descriptor could not be created.
    #[error("{}: {source} (is the limit on open files reached?)", path.display())]
    Descriptor {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Passthrough is not possible.
    #[error("passthrough: {why} (leave it out)")]
    Passthrough {
        /// The reason.
        why: String,
    },
    /// FUSE over io_uring is required and not possible.
    #[error("uring=on: {0}")]
    OverUring(String),
    /// A reactor could not register its io_uring queues. The kernel serves no request until all are
    /// registered.
    #[error("{}: its requests cannot be taken through io_uring: {why} (give it uring=off)", path.display())]
    RegisterQueues {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The kernel sent no `FUSE_INIT`.
    #[error("{}: the kernel sent no FUSE_INIT within {} s of mounting (is the machine overloaded? try again)", path.display(), INIT_TIMEOUT.as_secs())]
    NoInit {
        /// The file.
        path: PathBuf,
    },
    /// An I/O thread did not answer.
    #[error("{}: the I/O threads did not answer within {} s (is the machine overloaded? try again)", path.display(), INIT_TIMEOUT.as_secs())]
    NoThreads {
        /// The file.
        path: PathBuf,
    },
    /// A process has the file open.
    #[error("{} is in use{users} (close it there, or delete it with --force, which loses unwritten data)", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The processes, as ` by cat (17)`; empty if they are not known.
        users: String,
    },
    /// Unmounting failed.
    #[error("{}: it cannot be unmounted: {source} (try umount -l)", path.display())]
    Unmount {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl From<FuseError> for HostError {
    fn from(error: FuseError) -> HostError {
        let is_used = matches!(error, FuseError::InUse { .. });
        HostError::caused(if is_used { HostErrorKind::InUse } else { HostErrorKind::Failed }, error)
    }
}

/// Exports a device as a file.
///
/// # Errors
/// The device is zoned, or the file cannot be mounted on; nothing is left behind.
pub(crate) async fn export(
    exports: &Exports,
    device: &Arc<Device>,
    spec: &FuseSpec,
    _life: impl FnOnce() -> UblkLife,
) -> Result<Exported, HostError> {
    Host::refuse_zones(device, "FUSE")?;
    let export = FuseExport::start(exports.host(), device, spec)?;
    let path = export.path().display().to_string();
    exports.host().add_export(device, Arc::new(export));
    Ok(Exported::at(path))
}

/// A device that is mounted as a file.
pub(crate) struct FuseExport {
    mount: Mount,
    /// Name of the device.
    name: String,
    shared: Arc<MountState>,
    /// Whether requests arrive through io_uring or `/dev/fuse`, and why.
    transport: Transport,
    /// Descriptor for notifications to the kernel; empty once unmounted.
    device: Mutex<Option<OwnedFd>>,
}

impl FuseExport {
    /// Mounts a device and has every reactor serve it.
    pub(crate) fn start(host: &Host, device: &Arc<Device>, spec: &FuseSpec) -> Result<FuseExport, FuseError> {
        FuseExport::start_as(host, device, spec, false)
    }

    /// Mounts a file for a loop device. Memory allocations of the reactors may wait for writeback to that
    /// device, so the reactors are marked as I/O flushers.
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
        under_block_device: bool,
    ) -> Result<FuseExport, FuseError> {
        let transport = over_uring::choose(spec, host)?;
        match FuseExport::mount(host, device, spec, under_block_device, transport) {
            // A mount that negotiated io_uring waits until all queues are registered, so falling back to
            // `/dev/fuse` takes a new mount.
            Err(FuseError::RegisterQueues { path, why }) if spec.uring == OverUring::Auto => {
                tracing::warn!(path = %path.display(), why, "requests come through /dev/fuse");
                FuseExport::mount(host, device, spec, under_block_device, Transport::after(&why))
            }
            result => result,
        }
    }

    fn mount(
        host: &Host,
        device: &Arc<Device>,
        spec: &FuseSpec,
        under_block_device: bool,
        transport: Transport,
    ) -> Result<FuseExport, FuseError> {
        let backing = if spec.passthrough { Some(passthrough_file(device)?) } else { None };
        let options = MountOptions { name: device.name().to_string(), read_only: device.read_only() };
        let facts = facts(device, spec, transport.wanted);
        let writes_partial_blocks = facts.block_len_min > 1 && !facts.read_only;
        if writes_partial_blocks {
            lock_partial_writes(host, device, &spec.path)?;
        }
        let (mount, descriptor) = Mount::new(&spec.path, &options)?;
        let shared = Arc::new(MountState::new(facts));
        let name = options.name;
        let export = FuseExport { mount, name, shared, transport, device: Mutex::new(Some(descriptor)) };
        match export.serve(host, device, backing, under_block_device) {
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
        under_block_device: bool,
    ) -> Result<(), FuseError> {
        let held = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(descriptor) = held.as_ref() else { return Ok(()) };
        let failed = |source| FuseError::Descriptor { path: self.mount.path().to_owned(), source };
        for number in 0..host.reactors().len() {
            let clone = match fuse::clone_descriptor(descriptor) {
                // An unprivileged user who mounted with fusermount3 may not open the device again, so a
                // single thread serves the file.
                Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                    let own = descriptor.try_clone().map_err(failed)?;
                    host.attach_to(
                        number,
                        device.clone(),
                        adoption(own, self.shared.clone(), under_block_device),
                    );
                    break;
                }
                clone => clone.map_err(failed)?,
            };
            host.attach_to(number, device.clone(), adoption(clone, self.shared.clone(), under_block_device));
        }
        let Some(passthrough) = self.shared.wait_for_agreement(INIT_TIMEOUT) else {
            return Err(FuseError::NoInit { path: self.mount.path().to_owned() });
        };
        if self.transport.wanted {
            over_uring::register_queues(host, device, &self.shared)
                .map_err(|why| FuseError::RegisterQueues { path: self.mount.path().to_owned(), why })?;
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

    /// Path of the mounted file.
    pub(crate) fn path(&self) -> &Path {
        self.mount.path()
    }

    /// Number of the FUSE connection.
    fn connection(&self) -> Option<u32> {
        let mounts = fuse::mounts().ok()?;
        let top = mounts.iter().rfind(|one| one.path == self.mount.path() && one.device_name().is_some())?;
        Some(top.device.1)
    }

    /// Checks that our mount is no longer present when another file system is mounted on the path. If our
    /// mount is below that file system, it cannot be unmounted.
    fn check_covered(&self) -> Result<(), FuseError> {
        match self.shared.channels() {
            0 => Ok(()),
            _ => {
                let source = io::Error::other("something else is mounted over it");
                Err(FuseError::Unmount { path: self.mount.path().to_owned(), source })
            }
        }
    }

    /// Unmounts the file.
    pub(crate) fn unmount(&self, lazily: bool) -> Result<(), FuseError> {
        let path = self.mount.path();
        if fuse::is_covered(path, &self.name) {
            return self.check_covered();
        }
        // The kernel gives this connection number to no other mount while ours exists.
        let connection = self.connection();
        if lazily {
            // Processes that have the file open get errors instead of waiting: requests that arrive through
            // io_uring cannot be refused in any other transport.
            let _ = connection.map(fuse::abort);
        }
        match fuse::unmount(path, lazily, self.mount.made_file()) {
            Ok(()) => {}
            // Another process has unmounted it.
            Err(why) if why.raw_os_error() == Some(libc::EINVAL) => {}
            Err(why) if why.raw_os_error() == Some(libc::EBUSY) => {
                let users = users::listed(&users_of(path));
                return Err(FuseError::InUse { path: path.to_owned(), users });
            }
            Err(source) => return Err(FuseError::Unmount { path: path.to_owned(), source }),
        }
        drop(self.device.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(number) = connection.filter(|_| self.shared.over_io_uring() == Ok(true)) {
            over_uring::abort_in_other_namespaces(number, self.name.clone(), self.shared.clone());
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
            connections: u64::from(self.shared.opens()),
            counts: Default::default(),
            sessions: Default::default(),
            tls: "off".to_owned(),
            details: [("requests".to_owned(), self.transport.describe(&self.shared))].into(),
        }
    }

    /// Returns whether a process has the file open. The mount itself does not count.
    fn is_used(&self, _device: &Device) -> bool {
        !users_of(self.mount.path()).is_empty()
    }

    fn is_passthrough(&self) -> bool {
        self.shared.backing().is_some()
    }

    fn handover(&self) -> Handover {
        Handover::Ends
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
            // ENOENT: the kernel has no cached pages of the file.
            let _ = rustix::io::write(device, &message[..len]);
        }
        Box::pin(async { Ok(()) })
    }

    fn content_changed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        let held = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = held.as_ref().map(OwnedFd::try_clone).transpose();
        drop(held);
        Box::pin(async move {
            let path = self.mount.path().to_owned();
            match connection {
                Ok(Some(connection)) => Ok(drop_pages(connection, path).await?),
                // The file is unmounted already.
                Ok(None) => Ok(()),
                Err(source) => Err(FuseError::Descriptor { path, source }.into()),
            }
        })
    }
}

fn adoption(descriptor: OwnedFd, shared: Arc<MountState>, under_block_device: bool) -> Attach {
    Box::new(move |handle, fronts, turn| {
        if under_block_device && let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
            tracing::info!(%error, "under pressure for memory a thread may wait for itself");
        }
        let front = &mut fronts.fuse;
        if !front.has_queue(handle.queue) {
            front.add_queue(handle.queue, handle.depth, handle.facts.zero_copy_reads);
        }
        if let Err(error) = front.adopt(descriptor, handle.queue, shared, turn) {
            tracing::error!(%error, "a mount could not be served on one of the threads");
        }
    })
}

/// Has all queues of the device take the range lock for read-modify-write, as this export writes partial
/// blocks.
fn lock_partial_writes(host: &Host, device: &Arc<Device>, path: &Path) -> Result<(), FuseError> {
    device.range_lock_or_init();
    let deadline = Instant::now() + INIT_TIMEOUT;
    let mut waiting: Vec<_> = host.reactors().iter().map(|reactor| reactor.refresh(device.clone())).collect();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        waiting.retain_mut(|one| Pin::new(one).poll(&mut Context::from_waker(&waker)).is_pending());
        if waiting.is_empty() {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(FuseError::NoThreads { path: path.to_owned() });
        }
        std::thread::park_timeout(left);
    }
}

/// Wakes a thread that is parked until a reactor answers.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
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

/// Opens the file behind a device whose stack is that file alone.
fn passthrough_file(device: &Device) -> Result<OwnedFd, FuseError> {
    let refused = |why: &str| FuseError::Passthrough { why: why.to_owned() };
    if device.checks_head() {
        // The kernel would write to the file without checking the first sector.
        let why =
            "the file's format was not given, so writes to its first sector are checked (add format=raw)";
        return Err(refused(why));
    }
    device
        .plain_file()
        .ok_or_else(|| refused("only a whole file without layers can be passed through"))?
        .map_err(|why| FuseError::Passthrough { why: why.to_string() })
}
