//! The functions of librados and librbd that are used, declared by hand.
//!
//! Each declaration also yields its C type, which `tests/header.rs` has a C compiler compare with the header.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `rbd_image_t`, `rbd_completion_t`, `rados_t`, `rados_ioctx_t`: all are `void *`.
pub(crate) type Handle = *mut c_void;

/// `rbd_callback_t`.
pub(crate) type CompletionCallback = extern "C" fn(Handle, *mut c_void);
/// `rbd_update_callback_t`.
pub(crate) type UpdateCallback = extern "C" fn(*mut c_void);
/// The callback of `rbd_diff_iterate2`.
pub(crate) type DiffCallback = extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;
/// `librbd_progress_fn_t`.
pub(crate) type ProgressCallback = extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// `EVENT_TYPE_EVENTFD`.
pub(crate) const EVENT_TYPE_EVENTFD: c_int = 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub(crate) const LOCK_MODE_EXCLUSIVE: c_uint = 0;
/// `RBD_IMAGE_OPTION_ORDER`.
pub(crate) const IMAGE_OPTION_ORDER: c_int = 2;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
pub(crate) const WRITE_ZEROES_THICK: c_int = 1;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
pub(crate) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;

/// Returns the constants by their names in the headers.
pub fn values() -> Vec<(&'static str, u64)> {
    vec![
        ("EVENT_TYPE_EVENTFD", EVENT_TYPE_EVENTFD as u64),
        ("RBD_LOCK_MODE_EXCLUSIVE", LOCK_MODE_EXCLUSIVE as u64),
        ("RBD_IMAGE_OPTION_ORDER", IMAGE_OPTION_ORDER as u64),
        ("RBD_WRITE_ZEROES_FLAG_THICK_PROVISION", WRITE_ZEROES_THICK as u64),
        ("RBD_FEATURE_EXCLUSIVE_LOCK", FEATURE_EXCLUSIVE_LOCK),
        ("sizeof(rbd_lock_mode_t)", size_of::<c_uint>() as u64),
    ]
}

/// A function as it is called here: its name, and the type of a pointer to it in C.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Declaration {
    /// The name.
    pub name: &'static str,
    /// The type of its result.
    pub result: &'static str,
    /// The types of its arguments.
    pub arguments: Vec<&'static str>,
}

/// A type of an argument or a result, by its name in C.
trait CType {
    const NAME: &'static str;
}

macro_rules! c_types {
    ($($rust:ty = $c:literal),+ $(,)?) => { $(impl CType for $rust { const NAME: &'static str = $c; })+ };
}

c_types!(
    () = "void",
    c_int = "int",
    c_uint = "rbd_lock_mode_t",
    u8 = "uint8_t",
    u64 = "uint64_t",
    usize = "size_t",
    isize = "ssize_t",
    bool = "bool",
    *const c_char = "const char *",
    *mut c_void = "void *",
    *mut *mut c_void = "void **",
    *mut u64 = "uint64_t *",
    *mut c_uint = "rbd_lock_mode_t *",
    *mut usize = "size_t *",
    *mut c_char = "char *",
    *mut *mut c_char = "char **",
    *mut c_int = "int *",
    *mut libc::timeval = "struct timeval *",
    *const libc::iovec = "const struct iovec *",
    CompletionCallback = "rbd_callback_t",
    Option<CompletionCallback> = "rbd_callback_t",
    UpdateCallback = "rbd_update_callback_t",
    DiffCallback = "diff_callback_t",
    ProgressCallback = "librbd_progress_fn_t",
);

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $result:ty;)+) => {
        /// The functions, after the library was loaded.
        #[derive(Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result,)+
        }

        impl Functions {
            /// Resolves all functions.
            ///
            /// # Errors
            /// The name of one that is missing.
            ///
            /// # Safety
            /// `find` returns null or the address of the function of that name in librados or librbd.
            pub(crate) unsafe fn load(
                find: impl Fn(&CStr) -> *mut c_void,
            ) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        let address = CStr::from_bytes_with_nul(name.as_bytes()).map_or(std::ptr::null_mut(), &find);
                        if address.is_null() {
                            return Err(stringify!($name));
                        }
                        // SAFETY: it is a function of this type: the header says so, with which
                        // `tests/header.rs` compares it.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(
                                address,
                            )
                        }
                    },)+
                })
            }
        }

        /// Returns every function that is used.
        pub fn declarations() -> Vec<Declaration> {
            vec![$(Declaration {
                name: stringify!($name),
                result: <$result as CType>::NAME,
                arguments: vec![$(<$argument as CType>::NAME),*],
            }),+]
        }
    };
}

functions! {
    rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
    rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados_conf_get(Handle, *const c_char, *mut c_char, usize) -> c_int;
    rados_connect(Handle) -> c_int;
    rados_shutdown(Handle) -> ();
    rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_set_namespace(Handle, *const c_char) -> ();
    rados_ioctx_destroy(Handle) -> ();
    rados_lock_exclusive(
        Handle, *const c_char, *const c_char, *const c_char, *const c_char, *mut libc::timeval, u8
    ) -> c_int;
    rados_unlock(Handle, *const c_char, *const c_char, *const c_char) -> c_int;
    rbd_version(*mut c_int, *mut c_int, *mut c_int) -> ();
    rbd_image_options_create(*mut Handle) -> ();
    rbd_image_options_set_uint64(Handle, c_int, u64) -> c_int;
    rbd_image_options_destroy(Handle) -> ();
    rbd_create4(Handle, *const c_char, u64, Handle) -> c_int;
    rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close(Handle) -> c_int;
    rbd_get_size(Handle, *mut u64) -> c_int;
    rbd_get_stripe_unit(Handle, *mut u64) -> c_int;
    rbd_get_stripe_count(Handle, *mut u64) -> c_int;
    rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    rbd_metadata_get(Handle, *const c_char, *mut c_char, *mut usize) -> c_int;
    rbd_metadata_set(Handle, *const c_char, *const c_char) -> c_int;
    rbd_metadata_remove(Handle, *const c_char) -> c_int;
    rbd_get_features(Handle, *mut u64) -> c_int;
    rbd_resize2(Handle, u64, bool, ProgressCallback, *mut c_void) -> c_int;
    rbd_lock_acquire(Handle, c_uint) -> c_int;
    rbd_lock_get_owners(Handle, *mut c_uint, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize) -> ();
    rbd_lock_break(Handle, c_uint, *const c_char) -> c_int;
    rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
    rbd_update_watch(Handle, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd_update_unwatch(Handle, u64) -> c_int;
    rbd_set_image_notification(Handle, c_int, c_int) -> c_int;
    rbd_poll_io_events(Handle, *mut Handle, c_int) -> c_int;
    rbd_diff_iterate2(Handle, *const c_char, u64, u64, u8, u8, DiffCallback, *mut c_void) -> c_int;
    rbd_aio_create_completion(*mut c_void, Option<CompletionCallback>, *mut Handle) -> c_int;
    rbd_aio_get_arg(Handle) -> *mut c_void;
    rbd_aio_get_return_value(Handle) -> isize;
    rbd_aio_release(Handle) -> ();
    rbd_aio_readv(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_writev(Handle, *const libc::iovec, c_int, u64, Handle) -> c_int;
    rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
    rbd_aio_flush(Handle, Handle) -> c_int;
    rbd_aio_compare_and_write(
        Handle, u64, usize, *const c_char, *const c_char, Handle, *mut u64, c_int
    ) -> isize;
}
