//! What the kernel asks for.

use super::wire::{self, Fields, IN_HEADER_LEN, TRANSFER_IN_LEN, fattr, opcode};

/// How every request begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Bytes of the whole request.
    pub len: u32,
    /// What to do.
    pub opcode: u32,
    /// What the reply names it by.
    pub unique: u64,
    /// The inode.
    pub node: u64,
}

/// The kernel sent something that is no request. It never does; the connection cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a FUSE request of {0} bytes that says otherwise of itself")]
pub struct Malformed(pub usize);

impl Header {
    /// The header of a request of which `have` bytes were read; `bytes` are its first.
    ///
    /// # Errors
    /// It is shorter than a header, or not as long as it says.
    #[inline]
    pub fn parse(bytes: &[u8], have: usize) -> Result<Header, Malformed> {
        let header = Header::read(bytes);
        if bytes.len() < IN_HEADER_LEN || have < IN_HEADER_LEN || header.len as usize != have {
            return Err(Malformed(have));
        }
        Ok(header)
    }

    /// The header that begins here. What is not there is 0.
    #[inline]
    pub(super) fn read(bytes: &[u8]) -> Header {
        let fields = Fields(bytes);
        Header { len: fields.u32(0), opcode: fields.u32(4), unique: fields.u64(8), node: fields.u64(16) }
    }
}

/// A read or a write. Offsets and lengths are in bytes and not yet checked against the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// Where in the file.
    pub offset: u64,
    /// How much.
    pub len: u32,
    /// The open file's flags, as `open` has them.
    pub flags: u32,
}

impl Transfer {
    /// Whether the file was opened for writes that are on stable storage when they end.
    pub const fn is_durable(&self) -> bool {
        // `O_SYNC` holds the bit of `O_DSYNC` everywhere.
        self.flags & libc::O_DSYNC as u32 != 0
    }
}

/// What SETATTR is to change.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Change {
    /// The size.
    pub size: Option<u64>,
    /// Permissions, without the type.
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// It came by way of an open file: `ftruncate`, and not `open` with `O_TRUNC`.
    pub of_open_file: bool,
}

/// What LSEEK looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seek {
    /// `SEEK_DATA`.
    Data,
    /// `SEEK_HOLE`.
    Hole,
    /// Something that the kernel answers itself, or that is new.
    Other,
}

/// A request, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// The first of all.
    Init {
        /// The kernel's version.
        major: u32,
        /// The kernel's version.
        minor: u32,
        /// How far it would read ahead.
        max_readahead: u32,
        /// What it can do.
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
    /// `write`, with its data behind.
    Write(Transfer),
    /// `statfs`.
    StatFs,
    /// The last `close`.
    Release,
    /// `fsync`, `fdatasync`, `syncfs`.
    Sync,
    /// `fallocate`.
    Allocate {
        /// Where.
        offset: u64,
        /// How much.
        len: u64,
        /// [`wire::falloc`] bits.
        mode: u32,
    },
    /// `lseek`.
    Seek {
        /// Where to look from.
        offset: u64,
        /// What for.
        what: Seek,
    },
    /// The file system was unmounted.
    Destroy,
    /// Nothing that is answered: FORGET, and INTERRUPT, for what is under way ends soon by itself.
    Unanswered,
    /// Nothing that such a file has.
    Unknown,
}

impl Call {
    /// What a request with this header asks for; `args` is what follows the header, as far as it is no data.
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
                // The second half counts only when the first says so.
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
    fn a_header_must_be_as_long_as_it_says() {
        let mut bytes = [0u8; 80];
        bytes[..4].copy_from_slice(&80u32.to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode::READ.to_ne_bytes());
        bytes[8..16].copy_from_slice(&9u64.to_ne_bytes());
        assert_eq!(Header::parse(&bytes, 80).map(|h| (h.opcode, h.unique)), Ok((opcode::READ, 9)));
        assert_eq!(Header::parse(&bytes, 79), Err(Malformed(79)));
        assert_eq!(Header::parse(&bytes[..39], 39), Err(Malformed(39)));
    }

    #[test]
    fn a_write_says_where_how_much_and_whether_it_is_to_last() {
        let mut args = [0u8; 40];
        args[8..16].copy_from_slice(&4096u64.to_ne_bytes());
        args[16..20].copy_from_slice(&512u32.to_ne_bytes());
        args[32..36].copy_from_slice(&(libc::O_SYNC as u32).to_ne_bytes());
        let Call::Write(write) = Call::parse(&header(opcode::WRITE), &args) else { panic!("a write") };
        assert_eq!((write.offset, write.len, write.is_durable()), (4096, 512, true));
        assert_eq!(Call::parse(&header(opcode::WRITE), &args[..39]), Call::Unknown);
    }

    #[test]
    fn the_second_half_of_the_flags_counts_only_when_announced() {
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
