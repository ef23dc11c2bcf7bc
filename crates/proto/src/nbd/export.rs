//! Description of an export, and the session that a handshake negotiated.

use super::reply::Style;
use super::wire::TransmissionFlags;

/// The server's number for an export; not part of the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExportId(pub usize);

/// Block size constraints, in bytes ("Block size constraints").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSizes {
    /// Alignment of offsets and lengths: a power of two, at most 64 KiB.
    pub minimum: u32,
    /// Preferred I/O size: a power of two, at least 512 and at least the minimum.
    pub preferred: u32,
    /// Longest read or write: a multiple of the minimum, or `u32::MAX` for no limit.
    pub maximum: u32,
}

impl BlockSizes {
    /// The constraints that apply if none are negotiated.
    pub const DEFAULT: BlockSizes = BlockSizes { minimum: 1, preferred: 4096, maximum: u32::MAX };

    /// Returns whether the constraints are valid for an export of `size` bytes ("Block size constraints").
    /// A server that advertises invalid ones violates a MUST.
    pub fn is_valid(&self, size: u64) -> bool {
        let BlockSizes { minimum, preferred, maximum } = *self;
        minimum.is_power_of_two()
            && minimum <= 1 << 16
            && preferred.is_power_of_two()
            && preferred >= minimum.max(512)
            && (maximum == u32::MAX || maximum.is_multiple_of(minimum))
            && u64::from(maximum) >= u64::from(preferred).min(size)
    }
}

/// An export as its server describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size: u64,
    /// One human-readable line about the export; may be empty.
    pub description: String,
    /// Block size constraints.
    pub block_sizes: BlockSizes,
    /// Whether the export is read-only: writes are refused.
    pub read_only: bool,
    /// Whether the disk is rotational: seeks are slow.
    pub rotational: bool,
    /// `FLUSH` is supported.
    pub can_flush: bool,
    /// `FUA` is supported.
    pub can_fua: bool,
    /// `TRIM` is supported.
    pub can_trim: bool,
    /// `WRITE_ZEROES` is supported.
    pub can_zeroes: bool,
    /// `FAST_ZERO` is supported.
    pub can_fast_zero: bool,
    /// A flush on one connection covers completed writes of all connections.
    pub can_multi_conn: bool,
    /// `CACHE` is supported.
    pub can_cache: bool,
    /// `DF` is supported: the server can answer a read with one chunk.
    pub can_df: bool,
}

impl ExportInfo {
    /// Describes an export of `size` bytes that supports everything, with the default block sizes.
    pub fn new(size: u64) -> ExportInfo {
        ExportInfo {
            size,
            description: String::new(),
            block_sizes: BlockSizes::DEFAULT,
            read_only: false,
            rotational: false,
            can_flush: true,
            can_fua: true,
            can_trim: true,
            can_zeroes: true,
            can_fast_zero: true,
            can_multi_conn: true,
            can_cache: true,
            can_df: true,
        }
    }

    /// Returns the transmission flags that a client with this style of replies gets.
    ///
    /// "Transmission flags": `SEND_DF` MUST NOT be set without structured replies; `FAST_ZERO` comes
    /// with `WRITE_ZEROES`; `BLOCK_STATUS_PAYLOAD` MUST NOT be set without extended headers, and
    /// SHOULD NOT be without a metadata context (`has_context`).
    pub fn transmission_flags(&self, style: Style, has_context: bool) -> TransmissionFlags {
        use TransmissionFlags as F;
        let writable = !self.read_only;
        F::HAS_FLAGS
            .with_if(self.read_only, F::READ_ONLY)
            .with_if(self.can_flush, F::SEND_FLUSH)
            .with_if(self.can_fua, F::SEND_FUA)
            .with_if(self.rotational, F::ROTATIONAL)
            .with_if(writable && self.can_trim, F::SEND_TRIM)
            .with_if(writable && self.can_zeroes, F::SEND_WRITE_ZEROES)
            .with_if(writable && self.can_zeroes && self.can_fast_zero, F::SEND_FAST_ZERO)
            .with_if(self.can_df && style != Style::Simple, F::SEND_DF)
            .with_if(self.can_multi_conn, F::CAN_MULTI_CONN)
            .with_if(self.can_cache, F::SEND_CACHE)
            .with_if(has_context && style == Style::Extended, F::BLOCK_STATUS_PAYLOAD)
    }
}

/// Result of a handshake: everything that the transmission phase needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Session {
    /// The server's number for the export. A client has 0 here.
    pub export: ExportId,
    /// Name that the client requested.
    pub name: String,
    /// Size of the export in bytes. A server that resizes the export updates it.
    pub size: u64,
    /// Transmission flags of the export.
    pub flags: TransmissionFlags,
    /// Style of replies.
    pub style: Style,
    /// Block size constraints.
    pub block_sizes: BlockSizes,
    /// Whether the client requested the constraints, which obliges it to observe them.
    pub block_sizes_agreed: bool,
    /// Id of `base:allocation`, if it was selected for this export.
    pub base_allocation: Option<u32>,
    /// Whether the connection uses TLS.
    pub tls: bool,
}

impl Session {
    /// Returns whether extended headers are in use.
    pub fn extended(&self) -> bool {
        self.style == Style::Extended
    }

    /// Returns whether replies are chunked (structured or extended).
    pub fn structured(&self) -> bool {
        self.style != Style::Simple
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_follow_the_protocol() {
        let valid =
            |minimum, preferred, maximum, size| BlockSizes { minimum, preferred, maximum }.is_valid(size);
        assert!(BlockSizes::DEFAULT.is_valid(0) && BlockSizes::DEFAULT.is_valid(u64::MAX));
        assert!(valid(512, 4096, 1 << 25, 1 << 30));
        assert!(!valid(0, 4096, 1 << 25, 1 << 30), "a minimum is at least 1");
        assert!(!valid(3, 4096, 3 << 20, 1 << 30), "a minimum is a power of two");
        assert!(!valid(1 << 17, 1 << 17, 1 << 25, 1 << 30), "a minimum is at most 64 KiB");
        assert!(!valid(1, 256, 1 << 25, 1 << 30), "a preferred size is at least 512");
        assert!(!valid(4096, 512, 1 << 25, 1 << 30), "a preferred size is at least the minimum");
        assert!(!valid(512, 4096, 1000, 1 << 30), "a maximum is a multiple of the minimum");
        assert!(!valid(512, 4096, 2048, 1 << 30), "a maximum reaches the preferred size");
        assert!(valid(512, 4096, 2048, 2048), "or the export's end");
    }

    #[test]
    fn flags_that_need_a_style_are_not_sent_without_it() {
        use TransmissionFlags as F;
        let info = ExportInfo::new(1 << 20);
        assert!(!info.transmission_flags(Style::Simple, true).contains(F::SEND_DF));
        let structured = info.transmission_flags(Style::Structured, true);
        assert!(structured.contains(F::SEND_DF) && !structured.contains(F::BLOCK_STATUS_PAYLOAD));
        assert!(info.transmission_flags(Style::Extended, true).contains(F::BLOCK_STATUS_PAYLOAD));
        assert!(!info.transmission_flags(Style::Extended, false).contains(F::BLOCK_STATUS_PAYLOAD));
    }

    #[test]
    fn a_read_only_export_offers_nothing_that_writes() {
        use TransmissionFlags as F;
        let info = ExportInfo { read_only: true, ..ExportInfo::new(1 << 20) };
        let flags = info.transmission_flags(Style::Extended, true);
        assert!(flags.contains(F::READ_ONLY));
        for flag in [F::SEND_TRIM, F::SEND_WRITE_ZEROES, F::SEND_FAST_ZERO] {
            assert!(!flags.contains(flag), "{flag:?}");
        }
    }

    #[test]
    fn fast_zero_comes_with_write_zeroes_only() {
        use TransmissionFlags as F;
        let info = ExportInfo { can_zeroes: false, ..ExportInfo::new(1) };
        assert!(!info.transmission_flags(Style::Simple, false).contains(F::SEND_FAST_ZERO));
    }
}
