//! INIT: negotiates the features of the connection.

use super::wire::{MAJOR, MINOR, MINOR_MIN, init};

/// Pages per request of kernels that do not negotiate the number (without MAX_PAGES): 128 KiB.
const PAGES_DEFAULT: u16 = 32;
/// Bytes of a page. FUSE counts pages of 4 KiB on all supported machines.
const PAGE_LEN: u32 = 4096;

/// Features that this server requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Largest read or write in bytes: a multiple of a page.
    pub transfer_max: u32,
    /// Maximum number of background requests in flight (`max_background`).
    pub background_max: u16,
    /// Use passthrough: reads and writes bypass the server and go to a backing file.
    pub passthrough: bool,
    /// Use FUSE over io_uring.
    pub over_io_uring: bool,
}

/// The negotiated features.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// Negotiated minor version.
    pub minor: u32,
    /// Flags that both sides know.
    pub flags: u64,
    /// Largest write in bytes.
    pub write_max: u32,
    /// Largest request in pages.
    pub pages_max: u16,
    /// Maximum number of background requests in flight (`max_background`).
    pub background_max: u16,
    /// Maximum read-ahead in bytes: the kernel's own value.
    pub readahead_max: u32,
}

impl Agreement {
    /// Returns whether passthrough was negotiated.
    pub const fn has_passthrough(&self) -> bool {
        self.flags & init::PASSTHROUGH != 0
    }

    /// Returns whether requests arrive over io_uring, once every queue has an entry.
    pub const fn is_over_io_uring(&self) -> bool {
        self.flags & init::OVER_IO_URING != 0
    }
}

/// Negotiates with the kernel. Returns `None` if the kernel's minor version is too old or its major version
/// differs.
pub fn negotiate(offer: &Offer, major: u32, minor: u32, readahead_max: u32, flags: u64) -> Option<Agreement> {
    if major != MAJOR || minor < MINOR_MIN {
        return None;
    }
    let mut wanted = init::ASYNC_READ
        | init::BIG_WRITES
        | init::ASYNC_DIO
        | init::ABORT_ERROR
        | init::MAX_PAGES
        | init::INIT_EXT
        | init::DIRECT_IO_ALLOW_MMAP;
    if offer.passthrough {
        wanted |= init::PASSTHROUGH;
    }
    if offer.over_io_uring {
        wanted |= init::OVER_IO_URING;
    }
    let flags = flags & wanted;
    let pages_wanted = (offer.transfer_max / PAGE_LEN).clamp(1, u16::MAX.into()) as u16;
    let pages_max = if flags & init::MAX_PAGES == 0 { PAGES_DEFAULT.min(pages_wanted) } else { pages_wanted };
    Some(Agreement {
        minor: minor.min(MINOR),
        flags,
        write_max: u32::from(pages_max) * PAGE_LEN,
        pages_max,
        background_max: offer.background_max,
        readahead_max,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFER: Offer =
        Offer { transfer_max: 1 << 20, background_max: 256, passthrough: false, over_io_uring: false };

    #[test]
    fn flags_that_are_not_known_are_not_taken() {
        let got = negotiate(&OFFER, 7, 99, 131072, u64::MAX).unwrap();
        assert_eq!(got.minor, MINOR);
        assert_eq!(got.flags & !((1 << 31) - 1), init::DIRECT_IO_ALLOW_MMAP);
        assert!(!got.has_passthrough());
        assert_eq!((got.write_max, got.pages_max), (1 << 20, 256));
    }

    #[test]
    fn without_max_pages_requests_have_32_pages() {
        let got = negotiate(&OFFER, 7, 31, 0, init::ASYNC_DIO).unwrap();
        assert_eq!((got.minor, got.flags), (31, init::ASYNC_DIO));
        assert_eq!((got.write_max, got.pages_max), (128 << 10, 32));
    }

    #[test]
    fn io_uring_is_used_when_both_sides_support_it() {
        let offer = Offer { over_io_uring: true, ..OFFER };
        assert!(negotiate(&offer, 7, 45, 0, u64::MAX).unwrap().is_over_io_uring());
        assert!(!negotiate(&offer, 7, 45, 0, !init::OVER_IO_URING).unwrap().is_over_io_uring());
        assert!(!negotiate(&OFFER, 7, 45, 0, u64::MAX).unwrap().is_over_io_uring());
    }

    #[test]
    fn another_major_version_is_refused() {
        assert_eq!(negotiate(&OFFER, 8, 0, 0, 0), None);
        assert_eq!(negotiate(&OFFER, 7, 12, 0, 0), None);
    }
}
