//! A connection to a cluster and an open image.

use super::api::{
    EVENT_TYPE_EVENTFD, FEATURE_EXCLUSIVE_LOCK, Functions, Handle, IMAGE_OPTION_ORDER, LOCK_MODE_EXCLUSIVE,
};
use super::connections::{CONNECTIONS, Connection};
use super::flights::Mailboxes;
use super::library::Library;
use rustix::event::{EventfdFlags, eventfd};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a lock is taken over while other clients take it, too.
const TAKE_OVER_TRIES: u32 = 5;
/// Interval at which a client that releases the lock is noticed.
const RELEASE_PERIOD: Duration = Duration::from_millis(250);

/// How to open an image.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) user: Option<CString>,
    pub(crate) conf: Option<CString>,
    pub(crate) pool: CString,
    pub(crate) namespace: Option<CString>,
    pub(crate) image: CString,
    pub(crate) snapshot: Option<CString>,
    pub(crate) read_only: bool,
    pub(crate) exclusive: bool,
    /// How long to wait for another client to release the exclusive lock before it is blocklisted.
    pub(crate) takeover: Option<Duration>,
    /// Size of an image to create if it is missing, and the binary logarithm of its object size.
    pub(crate) create: Option<(u64, Option<u32>)>,
    /// Options of the configuration, which replace those of the file.
    pub(crate) options: Vec<(CString, CString)>,
}

/// Which step failed.
pub(crate) type Failed = (&'static str, io::Error);

pub(super) fn check(step: &'static str, result: c_int) -> Result<(), Failed> {
    if result < 0 { Err((step, io::Error::from_raw_os_error(-result))) } else { Ok(()) }
}

fn pointer(text: &Option<CString>) -> *const std::ffi::c_char {
    text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr())
}

/// Handles that are released in reverse order.
struct Cluster {
    functions: &'static Functions,
    rados: Handle,
    pool: Handle,
    /// Dropped last.
    _connection: Connection,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: the handles are open, and nothing refers to them any more.
        unsafe {
            if !self.pool.is_null() {
                (self.functions.rados_ioctx_destroy)(self.pool);
            }
            (self.functions.rados_shutdown)(self.rados);
        }
    }
}

/// An open image. It is closed when it is dropped, on a thread that may wait.
pub(crate) struct Image {
    handle: Handle,
    /// Written to by librbd's threads after each completion.
    pub(super) event: Arc<OwnedFd>,
    watch: Option<u64>,
    pub(super) mailboxes: Mailboxes,
    updated: Arc<AtomicBool>,
    cluster: Cluster,
}

// SAFETY: librbd's handles may be used by several threads at a time; its functions take locks of their own.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("event", &self.event).finish_non_exhaustive()
    }
}

extern "C" fn image_updated(updated: *mut c_void) {
    // SAFETY: it points to the flag of an image, which is kept until its watch has ended.
    let updated = unsafe { &*updated.cast::<AtomicBool>() };
    updated.store(true, Ordering::Release);
}

extern "C" fn no_progress(_: u64, _: u64, _: *mut c_void) -> c_int {
    0
}

impl Image {
    /// Connects to the cluster and opens an image. May wait as long as the configuration's timeouts allow.
    pub(crate) fn open(library: &'static Library, open: &Open) -> Result<Image, Failed> {
        let functions = &library.functions;
        let mut rados = null_mut();
        let user = CString::new(format!(
            "client.{}",
            open.user.as_ref().map_or("admin".into(), |user| user.to_string_lossy())
        ))
        .map_err(|_| ("naming the user", io::ErrorKind::InvalidInput.into()))?;
        // SAFETY: the strings are valid during the calls; each handle is released by `Cluster`.
        let cluster = unsafe {
            let created = (functions.rados_create2)(&raw mut rados, c"ceph".as_ptr(), user.as_ptr(), 0);
            check("creating a client", created)?;
            Cluster { functions, rados, pool: null_mut(), _connection: CONNECTIONS.open() }
        };
        let mut cluster = cluster;
        // SAFETY: the handle is open, and the strings are valid during the calls.
        unsafe {
            check("reading the configuration", (functions.rados_conf_read_file)(rados, pointer(&open.conf)))?;
            for (name, value) in &open.options {
                check("setting an option", (functions.rados_conf_set)(rados, name.as_ptr(), value.as_ptr()))?;
            }
            check("connecting to the cluster", (functions.rados_connect)(rados))?;
            let pool = &raw mut cluster.pool;
            check("opening the pool", (functions.rados_ioctx_create)(rados, open.pool.as_ptr(), pool))?;
            if let Some(namespace) = &open.namespace {
                (functions.rados_ioctx_set_namespace)(cluster.pool, namespace.as_ptr());
            }
        }
        let mut handle = null_mut();
        let mut opened = open_image(&cluster, open, &mut handle);
        if let (Err((_, error)), Some((size, order))) = (&opened, open.create)
            && error.raw_os_error() == Some(libc::ENOENT)
            && open.snapshot.is_none()
        {
            create_image(&cluster, open, size, order)?;
            opened = open_image(&cluster, open, &mut handle);
        }
        opened?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let updated = Arc::new(AtomicBool::new(false));
        let mut image = match event {
            Ok(event) => Image {
                handle,
                event: Arc::new(event),
                watch: None,
                mailboxes: Mailboxes::default(),
                updated,
                cluster,
            },
            Err(error) => {
                // SAFETY: the image is open and used nowhere else.
                unsafe { (functions.rbd_close)(handle) };
                return Err(("creating an eventfd", error.into()));
            }
        };
        let fd = image.event.as_raw_fd();
        // SAFETY: the image is open, and its eventfd stays open until it is closed.
        let set = unsafe { (functions.rbd_set_image_notification)(handle, fd, EVENT_TYPE_EVENTFD) };
        check("setting up notifications", set)?;
        let mut watch = 0;
        let argument = Arc::as_ptr(&image.updated).cast_mut().cast();
        // SAFETY: the flag is kept until the watch has ended.
        let watched =
            unsafe { (functions.rbd_update_watch)(handle, &raw mut watch, image_updated, argument) };
        check("watching the image", watched)?;
        image.watch = Some(watch);
        match open.takeover {
            _ if !open.exclusive => {}
            None => image.acquire_lock()?,
            Some(patience) => image.take_lock_over(patience)?,
        }
        Ok(image)
    }

    fn acquire_lock(&self) -> Result<(), Failed> {
        // SAFETY: the image is open.
        let locked = unsafe { (self.functions().rbd_lock_acquire)(self.handle, LOCK_MODE_EXCLUSIVE) };
        check("acquiring the exclusive lock", locked)
    }

    /// Acquires the exclusive lock, from its owner if that does not release it in time. Several clients may try:
    /// the last one has it.
    fn take_lock_over(&self, patience: Duration) -> Result<(), Failed> {
        let until = Instant::now() + patience;
        while self.lock_owner()?.is_some() && Instant::now() < until {
            std::thread::sleep(patience.min(RELEASE_PERIOD));
        }
        for _ in 1..TAKE_OVER_TRIES {
            self.break_lock()?;
            if self.acquire_lock().is_ok() {
                return Ok(());
            }
        }
        self.break_lock()?;
        self.acquire_lock()
    }

    /// Whether this client holds the exclusive lock now. Asks librbd, not the cluster.
    pub(crate) fn holds_lock(&self) -> bool {
        let mut is_owner: c_int = 0;
        // SAFETY: the image is open, and the pointer is valid.
        let asked = unsafe { (self.functions().rbd_is_exclusive_lock_owner)(self.handle, &raw mut is_owner) };
        asked == 0 && is_owner != 0
    }

    /// Returns the address of the client that holds the exclusive lock, as librbd wants it. Waits.
    fn lock_owner(&self) -> Result<Option<CString>, Failed> {
        let functions = self.functions();
        // One client holds an exclusive lock.
        let (mut mode, mut owner, mut count) = (LOCK_MODE_EXCLUSIVE, null_mut::<c_char>(), 1_usize);
        // SAFETY: the image is open; the pointers are valid, and there is room for one address.
        let asked = unsafe {
            (functions.rbd_lock_get_owners)(self.handle, &raw mut mode, &raw mut owner, &raw mut count)
        };
        if asked == -libc::ENOENT || (asked == 0 && (count == 0 || owner.is_null())) {
            return Ok(None);
        }
        check("listing the owners of the exclusive lock", asked)?;
        // SAFETY: librbd has stored a C string, which is valid until the clean-up.
        unsafe {
            let address = CStr::from_ptr(owner).to_owned();
            (functions.rbd_lock_get_owners_cleanup)(&raw mut owner, count);
            Ok(Some(address))
        }
    }

    /// Blocklists the client that holds the exclusive lock and removes the lock; returns its address, or `None`
    /// if no other client has it. Waits.
    pub(crate) fn break_lock(&self) -> Result<Option<String>, Failed> {
        if self.holds_lock() {
            return Ok(None);
        }
        let Some(owner) = self.lock_owner()? else { return Ok(None) };
        // SAFETY: the image is open, and the address is a C string.
        let broken =
            unsafe { (self.functions().rbd_lock_break)(self.handle, LOCK_MODE_EXCLUSIVE, owner.as_ptr()) };
        match broken {
            // It was released meanwhile.
            error if error == -libc::ENOENT => Ok(None),
            broken => {
                check("breaking the exclusive lock", broken)?;
                Ok(Some(owner.to_string_lossy().into_owned()))
            }
        }
    }

    /// Whether breaking the exclusive lock blocklists its owner: `rbd_blocklist_on_break_lock`.
    pub(crate) fn is_fencing(&self) -> bool {
        let mut value = [0_u8; 16];
        // SAFETY: the handle is open, the name is a C string, and the buffer has room for so many bytes.
        let asked = unsafe {
            let name = c"rbd_blocklist_on_break_lock".as_ptr();
            (self.functions().rados_conf_get)(
                self.cluster.rados,
                name,
                value.as_mut_ptr().cast(),
                value.len(),
            )
        };
        // A librbd that does not know the option by this name keeps its default, which is to blocklist.
        asked < 0 || !value.starts_with(b"false\0")
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    pub(super) fn pool(&self) -> Handle {
        self.cluster.pool
    }

    pub(super) fn functions(&self) -> &'static Functions {
        self.cluster.functions
    }

    /// Returns the eventfd that librbd's threads write to after each completion.
    pub(crate) fn event(&self) -> Arc<OwnedFd> {
        self.event.clone()
    }

    /// Whether the image's header has changed since the last call: its size, for example.
    pub(crate) fn take_updated(&self) -> bool {
        self.updated.swap(false, Ordering::AcqRel)
    }

    fn number(
        &self,
        step: &'static str,
        function: unsafe extern "C" fn(Handle, *mut u64) -> c_int,
    ) -> Result<u64, Failed> {
        let mut value = 0;
        // SAFETY: the image is open, and the pointer is valid.
        check(step, unsafe { function(self.handle, &raw mut value) })?;
        Ok(value)
    }

    /// Returns the image's size in bytes.
    pub(crate) fn size(&self) -> Result<u64, Failed> {
        self.number("reading the size", self.functions().rbd_get_size)
    }

    /// Returns the stripe unit, which is the object size of images that are not striped, and the number of
    /// objects in a stripe.
    pub(crate) fn striping(&self) -> Result<(u64, u64), Failed> {
        let unit = self.number("reading the stripe unit", self.functions().rbd_get_stripe_unit)?;
        Ok((unit, self.number("reading the stripe count", self.functions().rbd_get_stripe_count)?))
    }

    /// Whether the image has an exclusive lock.
    pub(crate) fn has_exclusive_lock(&self) -> Result<bool, Failed> {
        let features = self.number("reading the features", self.functions().rbd_get_features)?;
        Ok(features & FEATURE_EXCLUSIVE_LOCK != 0)
    }

    /// Changes the image's size. Waits.
    pub(crate) fn resize(&self, size: u64) -> Result<(), Failed> {
        // SAFETY: the image is open; the callback ignores its argument.
        let resized =
            unsafe { (self.functions().rbd_resize2)(self.handle, size, true, no_progress, null_mut()) };
        check("resizing the image", resized)
    }

    /// Returns the allocated ranges in `offset..offset + len`, sorted: offset and length. Waits.
    pub(crate) fn allocated(&self, offset: u64, len: u64) -> Result<Vec<(u64, u64)>, Failed> {
        extern "C" fn add(offset: u64, len: usize, exists: c_int, found: *mut c_void) -> c_int {
            // SAFETY: it points to the list of the caller below, which nobody else uses meanwhile.
            let found = unsafe { &mut *found.cast::<Vec<(u64, u64)>>() };
            if exists != 0 {
                found.push((offset, len as u64));
            }
            0
        }
        let mut found: Vec<(u64, u64)> = Vec::new();
        // SAFETY: the image is open; the callback gets the list, during this call only.
        let result = unsafe {
            let argument = (&raw mut found).cast();
            let no_snapshot = std::ptr::null();
            (self.functions().rbd_diff_iterate2)(self.handle, no_snapshot, offset, len, 1, 0, add, argument)
        };
        check("listing the allocated extents", result)?;
        found.sort_unstable();
        Ok(found)
    }
}

fn open_image(cluster: &Cluster, open: &Open, handle: &mut Handle) -> Result<(), Failed> {
    let functions = cluster.functions;
    let function = match open.read_only || open.snapshot.is_some() {
        true => functions.rbd_open_read_only,
        false => functions.rbd_open,
    };
    // SAFETY: the pool is open, and the strings are valid during the call.
    let opened = unsafe { function(cluster.pool, open.image.as_ptr(), handle, pointer(&open.snapshot)) };
    check("opening the image", opened)
}

fn create_image(cluster: &Cluster, open: &Open, size: u64, order: Option<u32>) -> Result<(), Failed> {
    let functions = cluster.functions;
    let mut options = null_mut();
    // SAFETY: the pool is open, the name is valid during the call, and the options are released once.
    let created = unsafe {
        (functions.rbd_image_options_create)(&raw mut options);
        let set = match order {
            Some(order) => {
                (functions.rbd_image_options_set_uint64)(options, IMAGE_OPTION_ORDER, order.into())
            }
            None => 0,
        };
        let created = match set {
            0 => (functions.rbd_create4)(cluster.pool, open.image.as_ptr(), size, options),
            error => error,
        };
        (functions.rbd_image_options_destroy)(options);
        created
    };
    check("creating the image", created)
}

impl Drop for Image {
    fn drop(&mut self) {
        let functions = self.functions();
        // SAFETY: the image is open, and no request is in flight: nodes keep the image, and wait for theirs.
        unsafe {
            if let Some(watch) = self.watch {
                (functions.rbd_update_unwatch)(self.handle, watch);
            }
            (functions.rbd_close)(self.handle);
        }
    }
}
