//! Sets up an io_uring with the best features of the kernel, or explains why there is none.

use crate::sys;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};
use std::io;
use std::time::Duration;

/// Entries have 128 bytes: commands to `/dev/fuse` carry more than fits into 64. The kernel ignores the
/// second half of other entries.
pub(super) type WideRing = IoUring<squeue::Entry128, cqueue::Entry>;

/// Completions that fit before the kernel's overflow list is used: 64 KiB of them.
const COMPLETIONS: u32 = 4096;
/// Most registered files and sockets; those beyond are referred to by descriptor.
const FIXED_MAX: u64 = 4096;

/// Pauses between attempts to create a ring while the kernel has no memory.
const RETRY_PAUSES: [Duration; 3] =
    [Duration::from_millis(10), Duration::from_millis(40), Duration::from_millis(160)];

/// Setup modes, best first, and the feature that is missing from the best one.
const MODES: [(Mode, Option<&str>); 4] = [
    (Mode { single: true, defer: true, coop: true }, None),
    (Mode { single: true, defer: false, coop: true }, Some("no DEFER_TASKRUN: the kernel is older than 6.1")),
    (
        Mode { single: false, defer: false, coop: true },
        Some("no SINGLE_ISSUER: the kernel is older than 6.0"),
    ),
    (
        Mode { single: false, defer: false, coop: false },
        Some("no COOP_TASKRUN: the kernel is older than 5.19"),
    ),
];

struct Mode {
    single: bool,
    defer: bool,
    coop: bool,
}

/// Required opcodes, and the kernel version that introduced each. The last stands for multishot receive,
/// which arrived with it and cannot be probed.
const NEEDED: [(u8, &str); 13] = [
    (opcode::Readv::CODE, "READV (5.1)"),
    (opcode::Writev::CODE, "WRITEV (5.1)"),
    (opcode::ReadFixed::CODE, "READ_FIXED (5.1)"),
    (opcode::WriteFixed::CODE, "WRITE_FIXED (5.1)"),
    (opcode::Fsync::CODE, "FSYNC (5.1)"),
    (opcode::PollAdd::CODE, "POLL_ADD (5.1)"),
    (opcode::SendMsg::CODE, "SENDMSG (5.3)"),
    (opcode::AsyncCancel::CODE, "ASYNC_CANCEL (5.5)"),
    (opcode::Recv::CODE, "RECV (5.6)"),
    (opcode::Read::CODE, "READ (5.6)"),
    (opcode::Fallocate::CODE, "FALLOCATE (5.6)"),
    (opcode::Fadvise::CODE, "FADVISE (5.6)"),
    (opcode::SendZc::CODE, "multishot RECV (6.0)"),
];

/// Creates a ring; returns the feature that it lacks, if any.
pub(super) fn build(entries: u32) -> io::Result<(WideRing, Option<String>)> {
    let mut refused = None;
    for (mode, lacks) in MODES {
        match build_patiently(entries, &mode) {
            Ok(ring) => {
                check(&ring)?;
                return Ok((ring, lacks.map(str::to_owned)));
            }
            // An unknown mode is EINVAL; any other error would occur in all modes.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = Some(error),
            Err(error) => return Err(explain(error)),
        }
    }
    Err(explain(refused.unwrap_or_else(|| io::ErrorKind::Unsupported.into())))
}

/// Tries again if the kernel has no memory: it frees rings of ended processes in the background, and may
/// first have to reclaim the contiguous memory of a ring.
fn build_patiently(entries: u32, mode: &Mode) -> io::Result<WideRing> {
    for pause in RETRY_PAUSES {
        match build_mode(entries, mode) {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => std::thread::sleep(pause),
            done => return done,
        }
    }
    build_mode(entries, mode)
}

fn build_mode(entries: u32, mode: &Mode) -> io::Result<WideRing> {
    let mut builder = WideRing::builder();
    builder.setup_clamp().setup_cqsize(COMPLETIONS.max(entries.saturating_mul(2)));
    if mode.single {
        builder.setup_single_issuer();
    }
    if mode.defer {
        builder.setup_defer_taskrun();
    } else if mode.coop {
        builder.setup_coop_taskrun();
    }
    if mode.coop {
        builder.setup_submit_all().setup_taskrun_flag();
    }
    builder.build(entries.clamp(8, 1 << 15))
}

fn check(ring: &WideRing) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let missing: Vec<_> =
        NEEDED.iter().filter(|(code, _)| !probe.is_supported(*code)).map(|row| row.1).collect();
    if !missing.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("the kernel's io_uring lacks {}", missing.join(", ")),
        ));
    }
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is older than 5.11"));
    }
    Ok(())
}

fn explain(error: io::Error) -> io::Error {
    let why = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "io_uring is forbidden here (seccomp, or sysctl kernel.io_uring_disabled)"
        }
        Some(libc::ENOSYS) => "the kernel was built without io_uring, or it is forbidden here",
        Some(libc::ENOMEM) => "io_uring got no memory (raise RLIMIT_MEMLOCK)",
        _ => "io_uring could not be set up",
    };
    io::Error::new(error.kind(), format!("{why}: {error}"))
}

/// The kernel's table of registered files and sockets, which saves the look-up of the descriptor per
/// operation. Not a [`slab::Slab`]: the entries are the kernel's, and their number is fixed.
pub(super) struct Fixed {
    free: Vec<u32>,
}

impl Fixed {
    /// Creates an empty table; if the kernel refuses the table, it stays without space.
    pub(super) fn new(ring: &WideRing) -> Fixed {
        let len = sys::open_files_max().min(FIXED_MAX) as u32;
        let free = match ring.submitter().register_files_sparse(len) {
            Ok(()) => (0..len).rev().collect(),
            Err(_) => Vec::new(),
        };
        Fixed { free }
    }

    /// Registers a descriptor. `None`: it has to be referred to by descriptor.
    pub(super) fn add(&mut self, ring: &WideRing, fd: libc::c_int) -> Option<u32> {
        let number = self.free.pop()?;
        match ring.submitter().register_files_update(number, &[fd]) {
            Ok(_) => Some(number),
            Err(_) => {
                self.free.push(number);
                None
            }
        }
    }

    pub(super) fn remove(&mut self, ring: &WideRing, number: u32) {
        // An entry that cannot be emptied stays occupied.
        if ring.submitter().register_files_update(number, &[-1]).is_ok() {
            self.free.push(number);
        }
    }
}
