//! librados and librbd, loaded once for the whole process.

use super::api::Functions;
use std::ffi::{CStr, c_void};
use std::sync::{Mutex, PoisonError};

const RADOS: &CStr = c"librados.so.2";
const RBD: &CStr = c"librbd.so.1";

/// Why librbd cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LibraryError {
    /// The dynamic linker cannot load it.
    #[error(
        "librbd cannot be loaded: {0} (install the package librbd1, on Fedora and SUSE too; Arch: ceph-libs)"
    )]
    Missing(String),
    /// It lacks a function.
    #[error("librbd has no function {0} (install a librbd of Ceph 16 or later)")]
    Old(&'static str),
}

/// The loaded libraries. They stay loaded until the process ends.
#[derive(Debug)]
pub struct Library {
    pub(crate) functions: Functions,
}

fn load(name: &CStr) -> Result<*mut c_void, LibraryError> {
    // SAFETY: the name is a C string; the initialisers of these libraries do not depend on the caller.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: returns null or a message, which is valid until the next call on this thread.
        let message = unsafe { libc::dlerror() };
        let message = match message.is_null() {
            true => name.to_string_lossy().into_owned(),
            // SAFETY: it is a C string.
            false => unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned(),
        };
        return Err(LibraryError::Missing(message));
    }
    Ok(handle)
}

impl Library {
    /// Loads the libraries, or returns them if they are loaded already.
    ///
    /// # Errors
    /// They are not installed, or too old.
    pub fn load() -> Result<&'static Library, LibraryError> {
        static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *loaded {
            return Ok(library);
        }
        let (rados, rbd) = (load(RADOS)?, load(RBD)?);
        let find = |name: &CStr| {
            let handle = if name.to_bytes().starts_with(b"rados") { rados } else { rbd };
            // SAFETY: the handle is of a loaded library, and the name is a C string.
            unsafe { libc::dlsym(handle, name.as_ptr()) }
        };
        // SAFETY: `find` returns the addresses of these names in librados and librbd.
        let functions = unsafe { Functions::load(find) }.map_err(LibraryError::Old)?;
        Ok(*loaded.insert(Box::leak(Box::new(Library { functions }))))
    }

    /// Returns the version of librbd's interface.
    pub fn version(&self) -> String {
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: the pointers are valid.
        unsafe { (self.functions.rbd_version)(&raw mut major, &raw mut minor, &raw mut extra) };
        format!("{major}.{minor}.{extra}")
    }
}
