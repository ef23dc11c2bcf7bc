//! Parses FUSE requests.

use super::wire::{self, Fields, IN_HEADER_LEN, TRANSFER_IN_LEN, fattr, opcode};

/// `fuse_in_header`: the header of every request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Bytes of the whole request.
    pub len: u32,
    /// The operation ([`opcode`]).
    pub opcode: u32,
    /// Identifies the request; the reply repeats it.
    pub unique: u64,
    /// The inode number.
    pub node: u64,
}

/// The kernel sent bytes that are not a valid request. This never happens in practice; the connection
/// cannot continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a FUSE request of {0} bytes whose header has another length")]
pub struct Malformed(pub usize);

impl Header {
    /// Parses the header of a request of which `have` bytes were read; `bytes` are the first of them.
    ///
    /// # Errors
    /// [`Malformed`]: the request is shorter than a header, or its length field is not `have`.
    #[inline]
    pub fn parse(bytes: &[u8], have: usize) -> Result<Header, Malformed> {
        let header = Header::read(bytes);
        if bytes.len() < IN_HEADER_LEN || have < IN_HEADER_LEN || header.len as usize != have {
            return Err(Malformed(have));
        }
        Ok(header)
    }

    /// Reads the header at the start of `bytes`. Fields that are missing are 0.
    #[inline]
    pub(super) fn read(bytes: &[u8]) -> Header {
        let fields = Fields(bytes);
        Header { len: fields.u32(0), opcode: fields.u32(4), unique: fields.u64(8), node: fields.u64(16) }
    }
}

/// A read or a write. Offset and length are not yet checked against the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Flags of the open file, as passed to `open`.
    pub flags: u32,
}

impl Transfer {
    /// Returns whether writes must be on stable storage when they complete (`O_DSYNC` or `O_SYNC`).
    pub const fn is_durable(&self) -> bool {
        // `O_SYNC` includes the bit of `O_DSYNC` on all architectures.
        self.flags & libc::O_DSYNC as u32 != 0
    }
}

/// The attributes that SETATTR changes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Change {
    /// New size in bytes.
    pub size: Option<u64>,
    /// New permission bits, without the file type.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// The change was made through an open file: `ftruncate`, not `open` with `O_TRUNC`.
    pub of_open_file: bool,
}

/// `whence` of LSEEK.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seek {
    /// `SEEK_DATA`.
    Data,
    /// `SEEK_HOLE`.
    Hole,
    /// A value that the kernel handles itself, or an unknown one.
    Other,
}

/// A parsed request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// INIT, the first request.
    Init {
        /// The kernel's major protocol version.
        major: u32,
        /// The kernel's minor protocol version.
        minor: u32,
        /// Maximum read-ahead of the kernel, in bytes.
        max_readahead: u32,
        /// Features of the kernel ([`wire::init`]).
        flags: u64,
    },
    /// `stat`.
    GetAttr,
    /// `chmod`, `chown`, `truncate`, `utimes`.
    SetAttr(Change),
    /// `open`.
    Open,
    /// `read`.
    Read(Transfer),
    /// `write`; its data follows the arguments.
    Write(Transfer),
    /// `statfs`.
    StatFs,
    /// The last `close`.
    Release,
    /// `fsync`, `fdatasync`, `syncfs`.
    Sync,
    /// `fallocate`.
    Allocate {
        /// Offset in the file, in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// [`wire::falloc`] bits.
        mode: u32,
    },
    /// `lseek`.
    Seek {
        /// Offset to search from, in bytes.
        offset: u64,
        /// Kind of range to search for.
        what: Seek,
    },
    /// DESTROY: the file system was unmounted.
    Destroy,
    /// Requests without a reply: FORGET, and INTERRUPT, which is ignored because requests in flight complete
    /// soon.
    Unanswered,
    /// An operation that does not apply to a file system of one regular file.
    Unknown,
}

impl Call {
    /// Parses the request with this header; `args` is what follows the header, without a write's data.
    #[inline]
    pub fn parse(header: &Header, args: &[u8]) -> Call {
        let fields = Fields(args);
        let complete = |len: usize| args.len() >= len;
        match header.opcode {
            opcode::READ if complete(TRANSFER_IN_LEN) => Call::Read(transfer(&fields)),
            opcode::WRITE if complete(TRANSFER_IN_LEN) => Call::Write(transfer(&fields)),
            opcode::FSYNC | opcode::SYNCFS => Call::Sync,
            opcode::FALLOCATE if complete(28) => {
                Call::Allocate { offset: fields.u64(8), len: fields.u64(16), mode: fields.u32(24) }
            }
            opcode::LSEEK if complete(20) => {
                let what = match fields.u32(16) as i32 {
                    libc::SEEK_DATA => Seek::Data,
                    libc::SEEK_HOLE => Seek::Hole,
                    _ => Seek::Other,
                };
                Call::Seek { offset: fields.u64(8), what }
            }
            opcode::GETATTR => Call::GetAttr,
            opcode::SETATTR if complete(88) => Call::SetAttr(change(&fields)),
            opcode::OPEN => Call::Open,
            opcode::RELEASE => Call::Release,
            opcode::STATFS => Call::StatFs,
            opcode::INIT if complete(8) => {
                let flags = u64::from(fields.u32(12));
                // The upper half is valid only if the lower half has INIT_EXT.
                let more = if flags & wire::init::INIT_EXT == 0 { 0 } else { fields.u32(16) };
                Call::Init {
                    major: fields.u32(0),
                    minor: fields.u32(4),
                    max_readahead: fields.u32(8),
                    flags: flags | u64::from(more) << 32,
                }
            }
            opcode::DESTROY => Call::Destroy,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => Call::Unanswered,
            _ => Call::Unknown,
        }
    }
}

#[inline]
fn transfer(fields: &Fields<'_>) -> Transfer {
    Transfer { offset: fields.u64(8), len: fields.u32(16), flags: fields.u32(32) }
}

fn change(fields: &Fields<'_>) -> Change {
    let valid = fields.u32(0);
    let given = |bit: u32| valid & bit != 0;
    Change {
        size: given(fattr::SIZE).then(|| fields.u64(16)),
        mode: given(fattr::MODE).then(|| fields.u32(68) & 0o7777),
        uid: given(fattr::UID).then(|| fields.u32(76)),
        gid: given(fattr::GID).then(|| fields.u32(80)),
        of_open_file: given(fattr::FH),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(opcode: u32) -> Header {
        Header { len: 0, opcode, unique: 7, node: 1 }
    }

    #[test]
    fn a_wrong_length_in_a_header_is_refused() {
        let mut bytes = [0u8; 80];
        bytes[..4].copy_from_slice(&80u32.to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode::READ.to_ne_bytes());
        bytes[8..16].copy_from_slice(&9u64.to_ne_bytes());
        assert_eq!(Header::parse(&bytes, 80).map(|h| (h.opcode, h.unique)), Ok((opcode::READ, 9)));
        assert_eq!(Header::parse(&bytes, 79), Err(Malformed(79)));
        assert_eq!(Header::parse(&bytes[..39], 39), Err(Malformed(39)));
    }

    #[test]
    fn a_write_has_offset_length_and_durability() {
        let mut args = [0u8; 40];
        args[8..16].copy_from_slice(&4096u64.to_ne_bytes());
        args[16..20].copy_from_slice(&512u32.to_ne_bytes());
        args[32..36].copy_from_slice(&(libc::O_SYNC as u32).to_ne_bytes());
        let Call::Write(write) = Call::parse(&header(opcode::WRITE), &args) else { panic!("a write") };
        assert_eq!((write.offset, write.len, write.is_durable()), (4096, 512, true));
        assert_eq!(Call::parse(&header(opcode::WRITE), &args[..39]), Call::Unknown);
    }

    #[test]
    fn the_upper_flags_need_init_ext() {
        let mut args = [0u8; 64];
        args[..4].copy_from_slice(&7u32.to_ne_bytes());
        args[4..8].copy_from_slice(&45u32.to_ne_bytes());
        args[16..20].copy_from_slice(&u32::MAX.to_ne_bytes());
        let flags = |args: &[u8]| match Call::parse(&header(opcode::INIT), args) {
            Call::Init { flags, .. } => flags,
            other => panic!("{other:?}"),
        };
        assert_eq!(flags(&args), 0);
        args[12..16].copy_from_slice(&(wire::init::INIT_EXT as u32).to_ne_bytes());
        assert_eq!(flags(&args) >> 32, u64::from(u32::MAX));
    }

    #[test]
    fn only_what_is_marked_valid_is_changed() {
        let mut args = [0xffu8; 88];
        args[..4].copy_from_slice(&(fattr::SIZE | fattr::FH).to_ne_bytes());
        args[16..24].copy_from_slice(&5u64.to_ne_bytes());
        let change = Change { size: Some(5), of_open_file: true, ..Change::default() };
        assert_eq!(Call::parse(&header(opcode::SETATTR), &args), Call::SetAttr(change));
    }

    #[test]
    fn no_bytes_make_it_panic() {
        for opcode in 0..64 {
            for len in 0..100 {
                Call::parse(&header(opcode), &vec![0xa5; len]);
            }
        }
    }
}
