//! What an export is and can do, and what a handshake agreed on.

use super::reply::Style;
use super::wire::TransmissionFlags;

/// The server's own number for an export; it means nothing to the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExportId(pub usize);

/// Block size constraints, in bytes ("Block size constraints").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this power of two, at most 64 KiB.
    pub minimum: u32,
    /// Requests of at least this power of two are efficient; at least 512 and the minimum.
    pub preferred: u32,
    /// No read or write is longer: a multiple of the minimum, or `u32::MAX` for no limit.
    pub maximum: u32,
}

impl BlockSizes {
    /// What holds when nothing is said.
    pub const DEFAULT: BlockSizes = BlockSizes { minimum: 1, preferred: 4096, maximum: u32::MAX };

    /// Whether they are what the section demands of an export of `size` bytes; a server that
    /// advertises others breaks its MUSTs, and a client that is told others may say so.
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

/// What an export is, as its server describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportInfo {
    /// Its size in bytes.
    pub size: u64,
    /// A line about it for people; empty when there is none.
    pub description: String,
    /// Its constraints.
    pub block_sizes: BlockSizes,
    /// Nothing may be written.
    pub read_only: bool,
    /// Seeks cost.
    pub rotational: bool,
    /// Flush does something.
    pub can_flush: bool,
    /// Forced unit access is honoured.
    pub can_fua: bool,
    /// Trim is honoured.
    pub can_trim: bool,
    /// Write zeroes is honoured.
    pub can_zeroes: bool,
    /// Fast zero is honoured, or refused at once.
    pub can_fast_zero: bool,
    /// A flush on one connection covers what ended on any other.
    pub can_multi_conn: bool,
    /// Cache does something.
    pub can_cache: bool,
    /// Reads can be sent unfragmented.
    pub can_df: bool,
}

impl ExportInfo {
    /// An export of `size` bytes that can do everything, with the default block sizes.
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

    /// The flags that a client gets to see in this style of replies.
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

/// What a handshake agreed on: all that the transmission phase needs to know.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Session {
    /// The server's number for the export. A client has 0 here.
    pub export: ExportId,
    /// The name that the client asked for.
    pub name: String,
    /// The export's size in bytes. A server that resizes steps it.
    pub size: u64,
    /// What the export can do.
    pub flags: TransmissionFlags,
    /// How messages look.
    pub style: Style,
    /// Constraints that hold.
    pub block_sizes: BlockSizes,
    /// The client asked for the constraints, so it promised to keep them.
    pub block_sizes_agreed: bool,
    /// The number of `base:allocation`, if it was selected for this export.
    pub base_allocation: Option<u32>,
    /// The connection is encrypted.
    pub tls: bool,
}

impl Session {
    /// Whether requests have extended headers.
    pub fn extended(&self) -> bool {
        self.style == Style::Extended
    }

    /// Whether replies come in chunks.
    pub fn structured(&self) -> bool {
        self.style != Style::Simple
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_are_held_to_the_section() {
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
    fn flags_that_need_a_style_are_kept_back_without_it() {
        use TransmissionFlags as F;
        let info = ExportInfo::new(1 << 20);
        assert!(!info.transmission_flags(Style::Simple, true).has(F::SEND_DF));
        let structured = info.transmission_flags(Style::Structured, true);
        assert!(structured.has(F::SEND_DF) && !structured.has(F::BLOCK_STATUS_PAYLOAD));
        assert!(info.transmission_flags(Style::Extended, true).has(F::BLOCK_STATUS_PAYLOAD));
        assert!(!info.transmission_flags(Style::Extended, false).has(F::BLOCK_STATUS_PAYLOAD));
    }

    #[test]
    fn a_read_only_export_offers_nothing_that_writes() {
        use TransmissionFlags as F;
        let info = ExportInfo { read_only: true, ..ExportInfo::new(1 << 20) };
        let flags = info.transmission_flags(Style::Extended, true);
        assert!(flags.has(F::READ_ONLY));
        for flag in [F::SEND_TRIM, F::SEND_WRITE_ZEROES, F::SEND_FAST_ZERO] {
            assert!(!flags.has(flag), "{flag:?}");
        }
    }

    #[test]
    fn fast_zero_comes_with_write_zeroes_only() {
        use TransmissionFlags as F;
        let info = ExportInfo { can_zeroes: false, ..ExportInfo::new(1) };
        assert!(!info.transmission_flags(Style::Simple, false).has(F::SEND_FAST_ZERO));
    }
}
