//! The shared part: an open image, its limits, and changes of its size.

use crate::node::RbdNode;
use crate::state::State;
use crate::sys::{Image, Library, LibraryError, Open};
use backends::{Backend, Fact, Features};
use block::{Bytes, LimitsError, QueueLimits, Sectors, UNLIMITED_BYTES};
use queue::{FileId, QueueWaker};
use std::ffi::{CString, NulError};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// How long connecting may take where no timeout is given.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// librbd's default of `rbd_discard_granularity_bytes`: smaller parts of a discard are ignored.
const DISCARD_GRANULARITY: Bytes = Bytes::kib(64);
/// Largest request, as of other backends.
const REQUEST_MAX: Bytes = Bytes::mib(32);
/// Largest discard or write zeroes: a request to each object of the range is in flight at a time.
const CLEAR_MAX: Bytes = Bytes::gib(1);

/// What librbd keeps in memory.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum Cache {
    /// Nothing: a write completes when the cluster has stored it.
    #[default]
    None,
    /// Writes, until a flush or for about a second, and what was read.
    Writeback,
    /// Writes that are on their way to the cluster.
    Writearound,
}

impl Cache {
    /// Returns its name, as typed.
    pub fn name(self) -> &'static str {
        match self {
            Cache::None => "none",
            Cache::Writeback => "writeback",
            Cache::Writearound => "writearound",
        }
    }
}

/// Options of an image as a backend.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct RbdSpec {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; `None`: the default one.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// The snapshot to serve, read-only.
    pub snapshot: Option<String>,
    /// The user, without `client.`; `None`: `admin`.
    pub user: Option<String>,
    /// The configuration file; `None`: `$CEPH_CONF`, or Ceph's default.
    pub conf: Option<std::path::PathBuf>,
    /// The size of the image that is created if it is missing.
    pub create: Option<Bytes>,
    /// The object size of an image that is created; `None`: the cluster's default.
    pub object_size: Option<u32>,
    /// Whether writes fail.
    pub read_only: bool,
    /// Whether to hold the exclusive lock while the image is open.
    pub exclusive: bool,
    /// How long to wait for a client that does not hand the exclusive lock over before it is blocklisted; `None`:
    /// until the cluster has given the client up.
    pub takeover: Option<Duration>,
    /// What librbd caches.
    pub cache: Cache,
    /// How long a request waits for the cluster before it fails; `None`: without end.
    pub timeout: Option<Duration>,
}

impl RbdSpec {
    /// Returns the image as the `rbd` command names it: `pool/namespace/image@snapshot`.
    pub fn place(&self) -> String {
        let namespace = self.namespace.as_ref().map_or(String::new(), |namespace| format!("{namespace}/"));
        let snapshot = self.snapshot.as_ref().map_or(String::new(), |snapshot| format!("@{snapshot}"));
        format!("{}/{namespace}{}{snapshot}", self.pool, self.image)
    }

    /// Returns the options that replace those of the configuration file.
    fn options(&self) -> Result<Vec<(CString, CString)>, NulError> {
        let connect = self.timeout.unwrap_or(CONNECT_TIMEOUT).as_secs_f64().ceil();
        let mut options = vec![
            ("client_mount_timeout", connect.to_string()),
            ("rbd_cache", (self.cache != Cache::None).to_string()),
        ];
        if self.cache != Cache::None {
            options.push(("rbd_cache_policy", self.cache.name().to_owned()));
        }
        if let Some(timeout) = self.timeout {
            options.push(("rados_osd_op_timeout", timeout.as_secs_f64().to_string()));
            options.push(("rados_mon_op_timeout", timeout.as_secs_f64().to_string()));
        }
        options.into_iter().map(|(name, value)| Ok((CString::new(name)?, CString::new(value)?))).collect()
    }

    fn to_open(&self) -> Result<Open, NulError> {
        let text = |text: &Option<String>| text.as_deref().map(CString::new).transpose();
        let conf = self.conf.as_ref().map(|path| CString::new(path.as_os_str().as_encoded_bytes()));
        Ok(Open {
            user: text(&self.user)?,
            conf: conf.transpose()?,
            pool: CString::new(&*self.pool)?,
            namespace: text(&self.namespace)?,
            image: CString::new(&*self.image)?,
            snapshot: text(&self.snapshot)?,
            read_only: self.read_only,
            exclusive: self.exclusive,
            takeover: self.takeover,
            create: self.create.map(|size| (size.0, self.object_size.map(u32::trailing_zeros))),
            options: self.options()?,
        })
    }
}

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// librbd cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The cluster or the image refuses.
    #[error("rbd:{image}: {step} failed: {error} ({fix})")]
    Failed {
        /// The image.
        image: String,
        /// The step that failed.
        step: &'static str,
        /// The reason.
        error: io::Error,
        /// What to do about it.
        fix: &'static str,
    },
    /// A name contains a zero byte.
    #[error("a name of an image cannot contain a zero byte")]
    Name(#[from] NulError),
    /// It is smaller than a sector.
    #[error("rbd:{0}: the image is empty (resize it with: rbd resize --size SIZE {0})")]
    Empty(String),
    /// It cannot be written, so its size cannot change.
    #[error("rbd:{0} is read-only (resize it with: rbd resize)")]
    ReadOnly(String),
    /// It has no exclusive lock.
    #[error("rbd:{0} has no exclusive lock (enable it with: rbd feature enable {0} exclusive-lock)")]
    NoLock(String),
    /// Its stripes are not valid as limits.
    #[error("the image's striping cannot be kept: {0}")]
    Limits(#[from] LimitsError),
}

fn fix(step: &str, error: &io::Error) -> &'static str {
    match (step, error.raw_os_error()) {
        ("reading the configuration", _) => "name the file with conf=FILE or CEPH_CONF",
        ("connecting to the cluster", Some(libc::ETIMEDOUT)) => {
            "no monitor answers: check mon_host and ceph -s"
        }
        ("connecting to the cluster", Some(libc::ENOENT | libc::EPERM | libc::EACCES)) => {
            "check the user, id=USER, and its keyring"
        }
        ("opening the pool", Some(libc::ENOENT)) => "list the pools with: ceph osd lspools",
        ("opening the image", Some(libc::ENOENT)) => {
            "list the images with: rbd ls POOL; to create it, add create,size=SIZE"
        }
        ("acquiring the exclusive lock", _) => {
            "another client holds it: rbd lock ls names it, takeover=TIME takes it over"
        }
        ("breaking the exclusive lock", Some(libc::EPERM | libc::EACCES)) => {
            "the user needs the capability to blocklist: mon 'profile rbd'"
        }
        (_, Some(libc::ESHUTDOWN)) => "this client is blocklisted: ceph osd blocklist ls",
        _ => "check the cluster with: ceph -s",
    }
}

/// What all compositions of a device share.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) spec: RbdSpec,
    pub(crate) image: Arc<Image>,
    pub(crate) state: State,
    library: &'static Library,
    stripe_unit: u64,
    stripe_count: u64,
    pub(crate) has_lock: bool,
}

/// An open image with the size at which it is served.
#[derive(Debug)]
pub struct Rbd {
    opened: Arc<Opened>,
    size: Bytes,
    limits: QueueLimits,
}

impl Opened {
    pub(crate) fn failed(&self, (step, error): (&'static str, io::Error)) -> RbdError {
        failed(&self.spec, step, error)
    }
}

fn failed(spec: &RbdSpec, step: &'static str, error: io::Error) -> RbdError {
    let fix = fix(step, &error);
    RbdError::Failed { image: spec.place(), step, error, fix }
}

impl Rbd {
    /// Connects to the cluster and opens an image, which is created if it is missing and the description says
    /// so.
    ///
    /// # Errors
    /// librbd is missing; the cluster cannot be reached, or refuses.
    pub fn open(spec: &RbdSpec) -> Result<Arc<Rbd>, RbdError> {
        let library = Library::load()?;
        let fail = |(step, error)| failed(spec, step, error);
        let image = Image::open(library, &spec.to_open()?).map_err(fail)?;
        let has_lock = image.has_exclusive_lock().map_err(fail)?;
        if (spec.exclusive || spec.takeover.is_some()) && !has_lock {
            return Err(RbdError::NoLock(spec.place()));
        }
        let (stripe_unit, stripe_count) = image.striping().map_err(fail)?;
        if has_lock && !image.is_fencing() {
            tracing::warn!(
                image = %spec.place(),
                "rbd_blocklist_on_break_lock is false: a client that has lost the lock may still write"
            );
        }
        let opened = Opened {
            spec: spec.clone(),
            image: Arc::new(image),
            state: State::default(),
            library,
            stripe_unit,
            stripe_count,
            has_lock,
        };
        Arc::new(opened).with_measured_size()
    }

    pub(crate) fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Returns the description of the image.
    pub fn spec(&self) -> &RbdSpec {
        &self.opened.spec
    }

    /// Returns the current size of the image in whole sectors.
    ///
    /// # Errors
    /// The cluster does not answer.
    pub fn measured(&self) -> Result<Bytes, RbdError> {
        self.opened.measured()
    }

    /// Returns the size of the image if the cluster has reported a change, and it is no longer the device's.
    pub fn changed_size(&self) -> Option<Bytes> {
        if !self.opened.image.take_updated() {
            return None;
        }
        self.measured().ok().filter(|size| *size != self.size)
    }

    /// Returns the image at its current size.
    ///
    /// # Errors
    /// The cluster does not answer, or the image is empty.
    pub fn remeasured(&self) -> Result<Arc<Rbd>, RbdError> {
        self.opened.clone().with_measured_size()
    }

    /// Returns the image at another size. It grows at once; what is past a smaller size is removed by
    /// [`cut`](Rbd::cut), when nobody uses it any more.
    ///
    /// # Errors
    /// The image is read-only, or the cluster refuses.
    pub fn resized(&self, size: Bytes) -> Result<Arc<Rbd>, RbdError> {
        if self.read_only() {
            return Err(RbdError::ReadOnly(self.spec().place()));
        }
        if size > self.measured()? {
            self.opened.image.resize(size.0).map_err(|why| self.opened.failed(why))?;
        }
        self.opened.clone().with_size(size)
    }

    /// Removes what is past the device's size.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn cut(&self) -> Result<(), RbdError> {
        if self.measured()? > self.size && !self.read_only() {
            self.opened.image.resize(self.size.0).map_err(|why| self.opened.failed(why))?;
        }
        Ok(())
    }

    /// Whether requests have waited for the exclusive lock for longer than the description permits. Does not wait.
    pub fn waits_for_lock(&self) -> bool {
        let Opened { spec, state, .. } = &*self.opened;
        let wait = Duration::from_nanos(state.write_wait_ns(ring::clock().0));
        !wait.is_zero() && !state.is_blocklisted() && spec.takeover.is_some_and(|time| wait >= time)
    }

    /// Takes the exclusive lock over; returns the address of the client that had it, which is blocklisted, or
    /// `None` if no other client has it. Waits for the cluster.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn take_lock_over(&self) -> Result<Option<String>, RbdError> {
        self.opened.image.break_lock().map_err(|why| self.opened.failed(why))
    }

    /// Returns the eventfd by which completions are announced.
    pub fn event(&self) -> Arc<OwnedFd> {
        self.opened.image.event()
    }

    /// Returns whether librbd's compare-and-write is used: not with a cache, as reads from it may be older than
    /// the comparison.
    pub fn compares_and_writes(&self) -> bool {
        self.opened.compares_and_writes()
    }

    /// Creates the node of the hardware queue. `event`: the eventfd on the queue's ring; `waker` wakes the
    /// queue.
    pub fn node(&self, event: FileId, waker: QueueWaker) -> RbdNode {
        RbdNode::new(self.opened.clone(), event, waker)
    }
}

impl Opened {
    fn measured(&self) -> Result<Bytes, RbdError> {
        let size = self.image.size().map_err(|why| self.failed(why))?;
        Ok(Bytes(size).sectors().bytes())
    }

    fn with_measured_size(self: Arc<Opened>) -> Result<Arc<Rbd>, RbdError> {
        let size = self.measured()?;
        self.with_size(size)
    }

    fn with_size(self: Arc<Opened>, size: Bytes) -> Result<Arc<Rbd>, RbdError> {
        if size == Bytes::ZERO {
            return Err(RbdError::Empty(self.spec.place()));
        }
        let limits = self.limits()?;
        Ok(Arc::new(Rbd { opened: self, size, limits }))
    }

    fn is_read_only(&self) -> bool {
        self.spec.read_only || self.spec.snapshot.is_some()
    }

    pub(crate) fn compares_and_writes(&self) -> bool {
        self.spec.cache == Cache::None && !self.is_read_only()
    }

    /// Returns whether a range is within one stripe unit, as librbd's compare-and-write requires.
    pub(crate) fn is_within_unit(&self, offset: u64, len: u64) -> bool {
        offset % self.stripe_unit + len <= self.stripe_unit
    }

    fn limits(&self) -> Result<QueueLimits, LimitsError> {
        let clear = if self.is_read_only() { Sectors(0) } else { CLEAR_MAX.sectors() };
        let whole = self.stripe_unit.saturating_mul(self.stripe_count).min(REQUEST_MAX.0);
        let mut limits = QueueLimits {
            // Without a cache a flush waits for writes in flight only. It is never omitted, because an option
            // of the image may enable the cache.
            features: block::Features::WRITE_CACHE.union(block::Features::FUA),
            physical_block_size: Bytes(4096),
            io_opt: Bytes(whole),
            max_hw_sectors: REQUEST_MAX.sectors(),
            max_user_sectors: REQUEST_MAX.sectors(),
            max_segments: 1024,
            max_segment_size: UNLIMITED_BYTES,
            dma_alignment: 3,
            max_hw_discard_sectors: clear,
            discard_granularity: DISCARD_GRANULARITY.min(Bytes(self.stripe_unit)),
            max_write_zeroes_sectors: clear,
            max_hw_wzeroes_unmap_sectors: clear,
            ..QueueLimits::default()
        };
        limits.validate()?;
        Ok(limits)
    }
}

impl Backend for Rbd {
    fn size(&self) -> Bytes {
        self.size
    }

    fn read_only(&self) -> bool {
        self.opened.is_read_only()
    }

    fn features(&self) -> Features {
        let writable = !self.read_only();
        Features {
            flush: writable,
            fua: true,
            discard: writable,
            write_zeroes: writable,
            fast_zero: false,
            rotational: false,
        }
    }

    fn limits(&self) -> QueueLimits {
        self.limits.clone()
    }

    fn describe(&self) -> Vec<Fact> {
        let Opened { spec, state, library, stripe_unit, stripe_count, .. } = &*self.opened;
        let lock = match (self.opened.has_lock, self.opened.image.holds_lock()) {
            (false, _) => "the image has none",
            (true, true) => "held",
            (true, false) => "not held (the first write requests it)",
        };
        let takeover = match (spec.takeover, spec.exclusive) {
            (Some(time), _) => format!("after {time:?}"),
            (None, true) => "never".to_owned(),
            (None, false) => "when the cluster has given the owner up".to_owned(),
        };
        let timeout = spec.timeout.map_or("never".to_owned(), |time| format!("{time:?}"));
        vec![
            ("backend", "rbd".to_owned()),
            ("image", spec.place()),
            ("size", self.size.to_string()),
            ("read-only", if self.read_only() { "yes" } else { "no" }.to_owned()),
            ("stripes", format!("{} over {stripe_count} objects", Bytes(*stripe_unit))),
            ("cache", spec.cache.name().to_owned()),
            ("exclusive lock", lock.to_owned()),
            ("takeover", takeover),
            ("timeout", timeout),
            ("librbd", library.version()),
            ("cluster", state.describe(ring::clock().0)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_named_as_by_the_rbd_command() {
        let mut spec = RbdSpec { pool: "rbd".into(), image: "disk".into(), ..RbdSpec::default() };
        assert_eq!(spec.place(), "rbd/disk");
        (spec.namespace, spec.snapshot) = (Some("team".into()), Some("monday".into()));
        assert_eq!(spec.place(), "rbd/team/disk@monday");
    }

    #[test]
    fn a_timeout_limits_requests_and_connecting() {
        let spec = RbdSpec { timeout: Some(Duration::from_millis(2500)), ..RbdSpec::default() };
        let options = spec.options().unwrap();
        let value = |name: &str| {
            let found = options.iter().find(|(key, _)| key.to_str() == Ok(name));
            found.map(|(_, value)| value.to_str().unwrap().to_owned())
        };
        assert_eq!(value("rados_osd_op_timeout").as_deref(), Some("2.5"));
        assert_eq!(value("client_mount_timeout").as_deref(), Some("3"));
        assert_eq!(value("rbd_cache").as_deref(), Some("false"));
        assert_eq!(value("rbd_cache_policy"), None);
    }
}
