//! The exec protocol, version 1: a block driver as a program of its own (docs/exec.md).
//!
//! Messages have fixed lengths and little-endian numbers. The control socket keeps message boundaries: the
//! host's hello, the program's answer, then one message for each connection, with two descriptors. A
//! connection is a stream of requests and replies; their data is in the connection's shared memory.
//!
//! *Invariant:* nothing here trusts the program: every number of an answer is checked before it is used.

pub mod fuzzing;

/// The protocol's version.
pub const VERSION: u32 = 1;
/// The first bytes of both hellos.
pub const MAGIC: [u8; 8] = *b"BLKYEXEC";
/// Length of the host's hello.
pub const HELLO_LEN: usize = 32;
/// Length of the program's answer.
pub const READY_LEN: usize = 48;
/// Length of the message that accompanies a connection.
pub const ATTACH_LEN: usize = 16;
/// Length of a request.
pub const REQUEST_LEN: usize = 32;
/// Length of a reply.
pub const REPLY_LEN: usize = 16;
/// Largest block: the largest logical block of a device.
const BLOCK_MAX: u32 = 65536;
/// Largest errno of Linux.
const ERRNO_MAX: u32 = 4095;

bitflags::bitflags! {
    /// Operations and properties that a driver program declares in its answer.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct Features: u32 {
        /// The disk is read-only: writes fail.
        const READ_ONLY = 1;
        /// FLUSH is supported: written data is volatile until then. Without it a write is durable when it
        /// is answered.
        const FLUSH = 1 << 1;
        /// Writes support the FUA flag.
        const FUA = 1 << 2;
        /// DISCARD is supported.
        const DISCARD = 1 << 3;
        /// WRITE_ZEROES is supported.
        const WRITE_ZEROES = 1 << 4;
        /// The disk is rotational.
        const ROTATIONAL = 1 << 5;
        /// The program serves several connections at a time. A flush on one covers the answered writes of
        /// all.
        const MULTI = 1 << 6;
    }
}

/// The host's hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Largest data of one request, in bytes.
    pub transfer_max: u32,
    /// Maximum number of requests in flight on a connection.
    pub depth_max: u32,
    /// The device will be read-only.
    pub read_only: bool,
}

/// The program's answer: the properties of its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ready {
    /// Supported operations.
    pub features: Features,
    /// Size in bytes.
    pub size: u64,
    /// Block size in bytes, a power of two: offsets and lengths of requests are multiples of it.
    pub block: u32,
    /// Largest data of one request, in bytes: at least one block.
    pub transfer_max: u32,
    /// Maximum number of requests in flight on a connection, at least one.
    pub depth_max: u32,
}

/// Reasons to refuse a program's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    /// The answer's length is wrong.
    #[error("its answer has {0} bytes rather than {READY_LEN}")]
    Length(usize),
    /// The answer does not begin with [`MAGIC`].
    #[error("its answer does not begin with BLKYEXEC")]
    Magic,
    /// The version is unknown.
    #[error("it speaks version {0} of the protocol, and this host speaks {VERSION}")]
    Version(u32),
    /// The answer has unknown feature flags.
    #[error("its answer has unknown flags: {0:#x}")]
    Flags(u32),
    /// The block size is invalid.
    #[error("its block size {0} is not a power of two up to {BLOCK_MAX}")]
    Block(u32),
    /// The size is not valid for a disk.
    #[error("its size {0} is not a positive multiple of 512 and of its block size")]
    Size(u64),
    /// The largest transfer is smaller than a block or not a multiple of it.
    #[error("its largest transfer {0} is less than a block, or not a multiple of it")]
    Transfer(u32),
    /// Reserved bytes are set.
    #[error("reserved bytes of its answer are not 0")]
    Reserved,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes)
}

impl Hello {
    /// Encodes the hello.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.transfer_max.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.depth_max.to_le_bytes());
        bytes[20..24].copy_from_slice(&u32::from(self.read_only).to_le_bytes());
        bytes
    }
}

impl Ready {
    /// Parses the program's answer to `hello`.
    ///
    /// # Errors
    /// A field is invalid.
    pub fn parse(bytes: &[u8], hello: &Hello) -> Result<Ready, Refused> {
        if bytes.len() != READY_LEN {
            return Err(Refused::Length(bytes.len()));
        }
        if bytes[..8] != MAGIC {
            return Err(Refused::Magic);
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(Refused::Version(version));
        }
        let flags = u32_at(bytes, 12);
        let features = Features::from_bits(flags).ok_or(Refused::Flags(flags & !Features::all().bits()))?;
        let (size, block) = (u64_at(bytes, 16), u32_at(bytes, 24));
        if !block.is_power_of_two() || block > BLOCK_MAX {
            return Err(Refused::Block(block));
        }
        let whole = u64::from(block.max(512));
        if size == 0 || size % whole != 0 || size > i64::MAX as u64 {
            return Err(Refused::Size(size));
        }
        // 0 means that the program has no limit of its own.
        let least = |own: u32, most: u32| if own == 0 { most } else { own.min(most) };
        let (transfer, depth) = (u32_at(bytes, 28), u32_at(bytes, 32));
        if transfer != 0 && (u64::from(transfer) < whole || u64::from(transfer) % whole != 0) {
            return Err(Refused::Transfer(transfer));
        }
        if bytes[36..].iter().any(|byte| *byte != 0) {
            return Err(Refused::Reserved);
        }
        let (transfer_max, depth_max) = (least(transfer, hello.transfer_max), least(depth, hello.depth_max));
        Ok(Ready { features, size, block, transfer_max, depth_max })
    }
}

/// Encodes the message that accompanies the descriptors of a connection.
pub fn attach(connection: u32, memory_len: u64) -> [u8; ATTACH_LEN] {
    let mut bytes = [0; ATTACH_LEN];
    bytes[..4].copy_from_slice(&1u32.to_le_bytes());
    bytes[4..8].copy_from_slice(&connection.to_le_bytes());
    bytes[8..].copy_from_slice(&memory_len.to_le_bytes());
    bytes
}

/// An operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Operation {
    /// The program writes the data to the shared memory.
    Read = 0,
    /// The program reads the data from the shared memory.
    Write = 1,
    /// All answered writes become durable.
    Flush = 2,
    /// The content of the range is not needed any more.
    Discard = 3,
    /// The range reads as zeroes.
    WriteZeroes = 4,
}

/// Flag of a write: the data is durable when the request is answered.
pub const FUA: u16 = 1;
/// Flag of WRITE_ZEROES: the range stays allocated.
pub const NO_UNMAP: u16 = 1 << 1;

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Tag that identifies the request; the reply repeats it.
    pub tag: u64,
    /// The operation.
    pub operation: Operation,
    /// Flags: [`FUA`], [`NO_UNMAP`].
    pub flags: u16,
    /// Length in bytes.
    pub len: u32,
    /// Offset on the disk in bytes.
    pub offset: u64,
    /// Offset of the request's data in the shared memory.
    pub place: u64,
}

impl Request {
    /// Encodes the request into the start of `bytes`.
    pub fn put(&self, bytes: &mut [u8]) {
        bytes[..8].copy_from_slice(&self.tag.to_le_bytes());
        bytes[8..10].copy_from_slice(&(self.operation as u16).to_le_bytes());
        bytes[10..12].copy_from_slice(&self.flags.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..REQUEST_LEN].copy_from_slice(&self.place.to_le_bytes());
    }
}

/// A reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The tag of the request.
    pub tag: u64,
    /// 0, or an errno of Linux.
    pub errno: u16,
}

impl Reply {
    /// Parses a reply. Returns `None` if it violates the protocol.
    ///
    /// # Panics
    /// If there are fewer than [`REPLY_LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Option<Reply> {
        let (errno, reserved) = (u32_at(bytes, 8), u32_at(bytes, 12));
        let is_valid = errno <= ERRNO_MAX && reserved == 0;
        is_valid.then(|| Reply { tag: u64_at(bytes, 0), errno: errno as u16 })
    }
}

/// Cuts a stream into replies, across the boundaries of received chunks.
#[derive(Clone, Copy, Default, Debug)]
pub struct Replies {
    stash: [u8; REPLY_LEN],
    stashed: usize,
}

impl Replies {
    /// Consumes bytes of the stream up to the end of the next reply. Returns the number consumed, and the
    /// reply once it is complete (the inner `None` means that it violates the protocol).
    #[inline]
    pub fn take(&mut self, bytes: &[u8]) -> (usize, Option<Option<Reply>>) {
        if self.stashed == 0 && bytes.len() >= REPLY_LEN {
            return (REPLY_LEN, Some(Reply::parse(bytes)));
        }
        let taken = bytes.len().min(REPLY_LEN - self.stashed);
        self.stash[self.stashed..self.stashed + taken].copy_from_slice(&bytes[..taken]);
        self.stashed += taken;
        if self.stashed < REPLY_LEN {
            return (taken, None);
        }
        self.stashed = 0;
        (taken, Some(Reply::parse(&self.stash)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello = Hello { transfer_max: 1 << 20, depth_max: 64, read_only: false };

    fn ready(size: u64, block: u32, flags: u32, transfer: u32) -> [u8; READY_LEN] {
        let mut bytes = [0; READY_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = 1;
        bytes[12..16].copy_from_slice(&flags.to_le_bytes());
        bytes[16..24].copy_from_slice(&size.to_le_bytes());
        bytes[24..28].copy_from_slice(&block.to_le_bytes());
        bytes[28..32].copy_from_slice(&transfer.to_le_bytes());
        bytes
    }

    #[test]
    fn limits_that_a_program_leaves_open_are_the_hosts() {
        let parsed = Ready::parse(&ready(1 << 20, 512, 0x7f, 0), &HELLO).unwrap();
        assert_eq!((parsed.transfer_max, parsed.depth_max), (1 << 20, 64));
        let parsed = Ready::parse(&ready(1 << 20, 512, 2, 4096), &HELLO).unwrap();
        assert_eq!((parsed.transfer_max, parsed.features), (4096, Features::FLUSH));
        assert_eq!(Ready::parse(&ready(1 << 20, 512, 2, 1 << 30), &HELLO).unwrap().transfer_max, 1 << 20);
    }

    #[test]
    fn each_invalid_field_is_refused_by_name() {
        let mut other = ready(1 << 20, 512, 0, 0);
        other[8] = 2;
        let mut reserved = ready(1 << 20, 512, 0, 0);
        reserved[47] = 1;
        for (bytes, why) in [
            (other, Refused::Version(2)),
            (reserved, Refused::Reserved),
            (ready(1 << 20, 3, 0, 0), Refused::Block(3)),
            (ready(1 << 20, 0, 0, 0), Refused::Block(0)),
            (ready(0, 512, 0, 0), Refused::Size(0)),
            (ready(1000, 1, 0, 0), Refused::Size(1000)),
            (ready(1 << 63, 512, 0, 0), Refused::Size(1 << 63)),
            (ready(1 << 20, 512, 0x80, 0), Refused::Flags(0x80)),
            (ready(1 << 20, 4096, 0, 2048), Refused::Transfer(2048)),
            ([0; READY_LEN], Refused::Magic),
        ] {
            assert_eq!(Ready::parse(&bytes, &HELLO), Err(why));
        }
        assert_eq!(Ready::parse(&[], &HELLO), Err(Refused::Length(0)));
    }

    #[test]
    fn replies_are_cut_from_pieces_of_any_size() {
        let stream: Vec<u8> =
            (1u64..=5).flat_map(|tag| [tag.to_le_bytes(), (tag & 1).to_le_bytes()].concat()).collect();
        for piece in 1..40 {
            let (mut replies, mut found) = (Replies::default(), Vec::new());
            for mut part in stream.chunks(piece) {
                while !part.is_empty() {
                    let (taken, reply) = replies.take(part);
                    found.extend(reply.map(|reply| reply.expect("valid").tag));
                    part = &part[taken..];
                }
            }
            assert_eq!(found, [1, 2, 3, 4, 5], "in pieces of {piece}");
        }
        assert_eq!(Replies::default().take(&[0xff; 16]).1, Some(None), "no errno");
    }
}
