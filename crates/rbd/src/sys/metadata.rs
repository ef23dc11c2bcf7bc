//! Texts in an image's metadata, and a lock for those who change them together.

use super::image::{Failed, Image, check};
use std::ffi::{CStr, CString};
use std::io;

/// Room for an image's id: librbd's own limit is 96 bytes.
const ID_ROOM: usize = 256;
/// The first room for a value.
const VALUE_ROOM: usize = 4096;
/// Largest value.
const VALUE_MAX: usize = 4 << 20;
/// A lock whose owner has died is free after this time.
const LOCK_S: i64 = 10;

fn text(text: &str) -> Result<CString, Failed> {
    CString::new(text).map_err(|error| ("passing a text with a zero byte", error.into()))
}

impl Image {
    /// Returns the image's id, which no other image of its cluster has had.
    pub(crate) fn id(&self) -> Result<String, Failed> {
        let mut id = [0_u8; ID_ROOM];
        // SAFETY: the image is open, and the buffer has room for so many bytes.
        let read = unsafe { (self.functions().rbd_get_id)(self.handle(), id.as_mut_ptr().cast(), id.len()) };
        check("reading the image's id", read)?;
        let id = CStr::from_bytes_until_nul(&id).unwrap_or_default();
        Ok(id.to_string_lossy().into_owned())
    }

    /// Returns a value of the image's metadata. Waits.
    pub(crate) fn metadata(&self, key: &str) -> Result<Option<String>, Failed> {
        const STEP: &str = "reading the image's metadata";
        let key = text(key)?;
        let mut room = VALUE_ROOM;
        while room <= VALUE_MAX {
            let (mut value, mut len) = (vec![0_u8; room], room);
            // SAFETY: the image is open, and the buffer has room for so many bytes.
            let read = unsafe {
                let pointer = value.as_mut_ptr().cast();
                (self.functions().rbd_metadata_get)(self.handle(), key.as_ptr(), pointer, &raw mut len)
            };
            match -read {
                libc::ENOENT => return Ok(None),
                libc::ERANGE => room = len.max(room) * 2,
                _ => {
                    check(STEP, read)?;
                    let value = CStr::from_bytes_until_nul(&value).unwrap_or_default();
                    return Ok(Some(value.to_string_lossy().into_owned()));
                }
            }
        }
        Err((STEP, io::ErrorKind::FileTooLarge.into()))
    }

    /// Replaces a value of the image's metadata; `None` removes it. Waits.
    pub(crate) fn set_metadata(&self, key: &str, value: Option<&str>) -> Result<(), Failed> {
        let (functions, key) = (self.functions(), text(key)?);
        let value = value.map(text).transpose()?;
        // SAFETY: the image is open, and the strings are valid during the calls.
        let set = unsafe {
            match &value {
                Some(value) => (functions.rbd_metadata_set)(self.handle(), key.as_ptr(), value.as_ptr()),
                None => (functions.rbd_metadata_remove)(self.handle(), key.as_ptr()),
            }
        };
        if value.is_none() && set == -libc::ENOENT {
            return Ok(());
        }
        check("writing the image's metadata", set)
    }

    fn header(&self) -> Result<CString, Failed> {
        text(&format!("rbd_header.{}", self.id()?))
    }

    /// Takes a lock of that name on the image's header, which all clients see; `false`: another client has it. It
    /// ends by itself after ten seconds.
    pub(crate) fn try_lock(&self, name: &str, cookie: &str) -> Result<bool, Failed> {
        let (header, name, cookie) = (self.header()?, text(name)?, text(cookie)?);
        let mut time = libc::timeval { tv_sec: LOCK_S, tv_usec: 0 };
        // SAFETY: the pool is open, and the pointers are valid during the call.
        let locked = unsafe {
            let (pool, empty) = (self.pool(), c"".as_ptr());
            let (header, name, cookie) = (header.as_ptr(), name.as_ptr(), cookie.as_ptr());
            (self.functions().rados_lock_exclusive)(pool, header, name, cookie, empty, &raw mut time, 0)
        };
        if locked == -libc::EBUSY {
            return Ok(false);
        }
        check("locking the image's metadata", locked).map(|()| true)
    }

    /// Releases a lock of [`Image::try_lock`].
    pub(crate) fn unlock(&self, name: &str, cookie: &str) -> Result<(), Failed> {
        let (header, name, cookie) = (self.header()?, text(name)?, text(cookie)?);
        // SAFETY: the pool is open, and the strings are valid during the call.
        let unlocked = unsafe {
            (self.functions().rados_unlock)(self.pool(), header.as_ptr(), name.as_ptr(), cookie.as_ptr())
        };
        check("unlocking the image's metadata", unlocked)
    }
}
