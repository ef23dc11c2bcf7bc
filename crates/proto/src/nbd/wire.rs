//! Constants of the protocol: magics, flags, options, reply types, limits. All big-endian on the wire.
//!
//! Source: the sections "Values" and "Protocol phases" of the protocol document, and those of its extension
//! for extended headers. This module has no logic.

use bitflags::bitflags;

/// The first eight bytes of a server's greeting, `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: follows in the greeting of a newstyle server, and starts every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Sent by an oldstyle server in place of `IHAVEOPT`.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Starts every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Starts a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Starts an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Starts a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Starts a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Starts a chunk of an extended reply.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Bytes of a server's greeting: two magics and the handshake flags.
pub const GREETING_LEN: usize = 18;
/// Bytes of an option's header: magic, option, length.
pub const OPTION_HEADER_LEN: usize = 16;
/// Bytes of the header of a reply to an option: magic, option, type, length.
pub const OPTION_REPLY_HEADER_LEN: usize = 20;
/// Bytes of a compact request's header.
pub const REQUEST_LEN: usize = 28;
/// Bytes of an extended request's header.
pub const EXTENDED_REQUEST_LEN: usize = 32;
/// Bytes of a simple reply's header.
pub const SIMPLE_REPLY_LEN: usize = 16;
/// Bytes of a structured chunk's header.
pub const CHUNK_LEN: usize = 20;
/// Bytes of an extended chunk's header.
pub const EXTENDED_CHUNK_LEN: usize = 32;
/// Number of zero bytes after the answer to `EXPORT_NAME`, unless the client set `NO_ZEROES`.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// The longest string the protocol allows, in bytes ("Conventions").
pub const MAX_STRING: usize = 4096;
/// A payload of up to this many bytes is never treated as a denial of service ("Block size constraints").
pub const PORTABLE_PAYLOAD: u32 = 1 << 25;
/// The port registered for NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// Options, sent by the client during the handshake.
pub mod option {
    /// Choose an export and start transmission; has no error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Upgrade the connection to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and start transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use extended headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options. Bit 31 marks an error, whose data is a human-readable message.
pub mod rep {
    /// The option succeeded; no more replies follow.
    pub const ACK: u32 = 1;
    /// An export in a list.
    pub const SERVER: u32 = 2;
    /// An item of information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The bit that marks errors.
    pub const ERR: u32 = 1 << 31;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = ERR | 1;
    /// The server's configuration forbids the option.
    pub const ERR_POLICY: u32 = ERR | 2;
    /// The option's data is invalid, or the option is invalid at this point.
    pub const ERR_INVALID: u32 = ERR | 3;
    /// The server's platform does not support the option.
    pub const ERR_PLATFORM: u32 = ERR | 4;
    /// TLS is required.
    pub const ERR_TLS_REQD: u32 = ERR | 5;
    /// The export does not exist.
    pub const ERR_UNKNOWN: u32 = ERR | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = ERR | 7;
    /// The client must request block sizes first.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERR | 8;
    /// Too large to process.
    pub const ERR_TOO_BIG: u32 = ERR | 9;
    /// Extended headers are required, or cannot be undone.
    pub const ERR_EXT_HEADER_REQD: u32 = ERR | 10;
}

/// Types of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// A human-readable description.
    pub const DESCRIPTION: u16 = 2;
    /// Block size constraints.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Types of chunks of structured and extended replies. Bit 15 marks an error.
pub mod chunk {
    /// No content; only as the last chunk.
    pub const NONE: u16 = 0;
    /// An offset and data.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset and the length of a hole.
    pub const OFFSET_HOLE: u16 = 2;
    /// A context and descriptors of 32 bits each.
    pub const BLOCK_STATUS: u16 = 5;
    /// A context and descriptors of 64 bits each; with extended headers only.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// The bit that marks errors.
    pub const ERR: u16 = 1 << 15;
    /// An error.
    pub const ERROR: u16 = ERR | 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = ERR | 2;
}

/// The only metadata context that the document itself defines.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// `base:allocation`: nothing is allocated for the range.
pub const STATE_HOLE: u32 = 1;
/// `base:allocation`: the range reads as zeroes.
pub const STATE_ZERO: u32 = 2;

/// Declares a set of flags. Bits that the document does not define yet are kept.
macro_rules! flag_set {
    (
        $(#[doc = $about:literal])*
        $name:ident: $repr:ty { $($(#[doc = $doc:literal])* $flag:ident = $bit:literal;)+ }
    ) => {
        bitflags! {
            $(#[doc = $about])*
            #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
            pub struct $name: $repr {
                $($(#[doc = $doc])* const $flag = 1 << $bit;)+
            }
        }

        impl $name {
            /// Returns the flags, with `other` added if `condition` holds.
            #[must_use]
            pub const fn with_if(self, condition: bool, other: $name) -> $name {
                if condition { self.union(other) } else { self }
            }
        }
    };
}

flag_set! {
    /// Flags in a server's greeting.
    HandshakeFlags: u16 {
        /// Fixed newstyle: every option gets a reply.
        FIXED_NEWSTYLE = 0;
        /// The server can omit the zeroes after `EXPORT_NAME`.
        NO_ZEROES = 1;
    }
}

flag_set! {
    /// A client's reply to the greeting. A server closes the connection on an unknown bit.
    ClientFlags: u32 {
        /// The client speaks fixed newstyle.
        FIXED_NEWSTYLE = 0;
        /// The server should omit the zeroes after `EXPORT_NAME`.
        NO_ZEROES = 1;
    }
}

flag_set! {
    /// Properties of an export.
    TransmissionFlags: u16 {
        /// Must always be set.
        HAS_FLAGS = 0;
        /// Writes are refused.
        READ_ONLY = 1;
        /// `FLUSH` is supported.
        SEND_FLUSH = 2;
        /// `FUA` is supported.
        SEND_FUA = 3;
        /// The disk is rotational: seeks are slow.
        ROTATIONAL = 4;
        /// `TRIM` is supported.
        SEND_TRIM = 5;
        /// `WRITE_ZEROES` and `NO_HOLE` are supported.
        SEND_WRITE_ZEROES = 6;
        /// `DF` is supported; only with structured or extended replies.
        SEND_DF = 7;
        /// A flush on one connection covers writes of all connections.
        CAN_MULTI_CONN = 8;
        /// `CACHE` is supported.
        SEND_CACHE = 10;
        /// `FAST_ZERO` is supported.
        SEND_FAST_ZERO = 11;
        /// `BLOCK_STATUS` accepts a payload; only with extended headers.
        BLOCK_STATUS_PAYLOAD = 12;
    }
}

flag_set! {
    /// Flags of a command.
    CommandFlags: u16 {
        /// The data must be on stable storage before the reply.
        FUA = 0;
        /// `WRITE_ZEROES`: keep the range allocated.
        NO_HOLE = 1;
        /// `READ`: at most one chunk of content.
        DF = 2;
        /// `BLOCK_STATUS`: one extent only.
        REQ_ONE = 3;
        /// `WRITE_ZEROES`: fail at once unless it is faster than writing zeroes.
        FAST_ZERO = 4;
        /// The header's length field is that of the payload; with extended headers only.
        PAYLOAD_LEN = 5;
    }
}

flag_set! {
    /// Flags of a chunk. A client ignores unknown ones.
    ReplyFlags: u16 {
        /// Last chunk of the reply.
        DONE = 0;
    }
}

/// Returns the `N` bytes at offset `at`, if present.
pub(crate) fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// Returns the big-endian number at offset `at`, if present.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes_at(bytes, at).map(u16::from_be_bytes)
}

/// Returns the big-endian number at offset `at`, if present.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes_at(bytes, at).map(u32::from_be_bytes)
}

/// Returns the big-endian number at offset `at`, if present.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes_at(bytes, at).map(u64::from_be_bytes)
}

/// Copies `from` to offset `at` of `to` and returns the offset of its end.
pub(crate) fn put(to: &mut [u8], at: usize, from: &[u8]) -> usize {
    let end = at + from.len();
    to[at..end].copy_from_slice(from);
    end
}
