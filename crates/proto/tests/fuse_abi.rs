//! Checks our layout of FUSE structures against the kernel's header, with a C compiler.
//!
//! Skipped with a reason if there is no compiler or no header.

use blockyard_proto::fuse::wire::{self, falloc, fattr, fopen, init, opcode};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// Sizes and field offsets that `call.rs` and `reply.rs` rely on.
const LAYOUT: &[(&str, usize)] = &[
    ("sizeof(struct fuse_in_header)", wire::IN_HEADER_LEN),
    ("offsetof(struct fuse_in_header, opcode)", 4),
    ("offsetof(struct fuse_in_header, unique)", 8),
    ("offsetof(struct fuse_in_header, nodeid)", 16),
    ("sizeof(struct fuse_out_header)", wire::OUT_HEADER_LEN),
    ("sizeof(struct fuse_init_in)", 64),
    ("offsetof(struct fuse_init_in, flags)", 12),
    ("offsetof(struct fuse_init_in, flags2)", 16),
    ("sizeof(struct fuse_init_out)", 64),
    ("offsetof(struct fuse_init_out, max_background)", 16),
    ("offsetof(struct fuse_init_out, congestion_threshold)", 18),
    ("offsetof(struct fuse_init_out, max_write)", 20),
    ("offsetof(struct fuse_init_out, time_gran)", 24),
    ("offsetof(struct fuse_init_out, max_pages)", 28),
    ("offsetof(struct fuse_init_out, flags2)", 32),
    ("sizeof(struct fuse_read_in)", wire::TRANSFER_IN_LEN),
    ("sizeof(struct fuse_write_in)", wire::TRANSFER_IN_LEN),
    ("offsetof(struct fuse_write_in, offset)", 8),
    ("offsetof(struct fuse_write_in, size)", 16),
    ("offsetof(struct fuse_write_in, flags)", 32),
    ("offsetof(struct fuse_read_in, offset)", 8),
    ("offsetof(struct fuse_read_in, size)", 16),
    ("sizeof(struct fuse_write_out)", 8),
    ("sizeof(struct fuse_open_out)", 16),
    ("offsetof(struct fuse_open_out, open_flags)", 8),
    ("sizeof(struct fuse_attr)", 88),
    ("offsetof(struct fuse_attr, size)", 8),
    ("offsetof(struct fuse_attr, blocks)", 16),
    ("offsetof(struct fuse_attr, atime)", 24),
    ("offsetof(struct fuse_attr, mode)", 60),
    ("offsetof(struct fuse_attr, nlink)", 64),
    ("offsetof(struct fuse_attr, uid)", 68),
    ("offsetof(struct fuse_attr, gid)", 72),
    ("offsetof(struct fuse_attr, blksize)", 80),
    ("sizeof(struct fuse_attr_out)", 104),
    ("offsetof(struct fuse_attr_out, attr)", 16),
    ("sizeof(struct fuse_setattr_in)", 88),
    ("offsetof(struct fuse_setattr_in, size)", 16),
    ("offsetof(struct fuse_setattr_in, mode)", 68),
    ("offsetof(struct fuse_setattr_in, uid)", 76),
    ("offsetof(struct fuse_setattr_in, gid)", 80),
    ("sizeof(struct fuse_statfs_out)", 80),
    ("offsetof(struct fuse_kstatfs, files)", 24),
    ("offsetof(struct fuse_kstatfs, bsize)", 40),
    ("offsetof(struct fuse_kstatfs, namelen)", 44),
    ("offsetof(struct fuse_kstatfs, frsize)", 48),
    ("offsetof(struct fuse_fallocate_in, offset)", 8),
    ("offsetof(struct fuse_fallocate_in, length)", 16),
    ("offsetof(struct fuse_fallocate_in, mode)", 24),
    ("offsetof(struct fuse_lseek_in, offset)", 8),
    ("offsetof(struct fuse_lseek_in, whence)", 16),
    ("sizeof(struct fuse_lseek_out)", 8),
    ("sizeof(struct fuse_notify_inval_inode_out)", 24),
    ("FUSE_NOTIFY_INVAL_INODE", wire::NOTIFY_INVAL_INODE as usize),
    ("FUSE_FORGET", opcode::FORGET as usize),
    ("FUSE_GETATTR", opcode::GETATTR as usize),
    ("FUSE_SETATTR", opcode::SETATTR as usize),
    ("FUSE_OPEN", opcode::OPEN as usize),
    ("FUSE_READ", opcode::READ as usize),
    ("FUSE_WRITE", opcode::WRITE as usize),
    ("FUSE_STATFS", opcode::STATFS as usize),
    ("FUSE_RELEASE", opcode::RELEASE as usize),
    ("FUSE_FSYNC", opcode::FSYNC as usize),
    ("FUSE_FLUSH", opcode::FLUSH as usize),
    ("FUSE_INIT", opcode::INIT as usize),
    ("FUSE_INTERRUPT", opcode::INTERRUPT as usize),
    ("FUSE_DESTROY", opcode::DESTROY as usize),
    ("FUSE_BATCH_FORGET", opcode::BATCH_FORGET as usize),
    ("FUSE_FALLOCATE", opcode::FALLOCATE as usize),
    ("FUSE_LSEEK", opcode::LSEEK as usize),
    ("FATTR_MODE", fattr::MODE as usize),
    ("FATTR_UID", fattr::UID as usize),
    ("FATTR_GID", fattr::GID as usize),
    ("FATTR_SIZE", fattr::SIZE as usize),
    ("FATTR_FH", fattr::FH as usize),
    ("FOPEN_DIRECT_IO", fopen::DIRECT_IO as usize),
    ("FALLOC_FL_KEEP_SIZE", falloc::KEEP_SIZE as usize),
    ("FALLOC_FL_PUNCH_HOLE", falloc::PUNCH_HOLE as usize),
    ("FALLOC_FL_ZERO_RANGE", falloc::ZERO_RANGE as usize),
    ("FUSE_ASYNC_READ", init::ASYNC_READ as usize),
    ("FUSE_BIG_WRITES", init::BIG_WRITES as usize),
    ("FUSE_ASYNC_DIO", init::ASYNC_DIO as usize),
    ("FUSE_ABORT_ERROR", init::ABORT_ERROR as usize),
    ("FUSE_MAX_PAGES", init::MAX_PAGES as usize),
];

/// Constants that older headers lack; each is checked if the header defines it.
const NEWER: &[(&str, u64)] = &[
    ("FOPEN_NOFLUSH", fopen::NOFLUSH as u64),
    ("FOPEN_PARALLEL_DIRECT_WRITES", fopen::PARALLEL_DIRECT_WRITES as u64),
    ("FOPEN_PASSTHROUGH", fopen::PASSTHROUGH as u64),
    ("FUSE_INIT_EXT", init::INIT_EXT),
    ("FUSE_DIRECT_IO_ALLOW_MMAP", init::DIRECT_IO_ALLOW_MMAP),
    ("FUSE_PASSTHROUGH", init::PASSTHROUGH),
    ("FUSE_OVER_IO_URING", init::OVER_IO_URING),
];

#[test]
fn structures_have_the_kernels_layout() {
    let mut source = String::from(
        "#include <stddef.h>\n#include <stdint.h>\n#include <linux/falloc.h>\n#include <linux/fuse.h>\n",
    );
    for (what, expected) in LAYOUT {
        let _ = writeln!(source, "_Static_assert(({what}) == {expected}, \"{what}\");");
    }
    for (name, expected) in NEWER {
        let _ =
            writeln!(source, "#ifdef {name}\n_Static_assert({name} == {expected}ull, \"{name}\");\n#endif");
    }
    let compiler = Command::new("cc")
        .args(["-std=c11", "-fsyntax-only", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut compiler) = compiler else { return eprintln!("skipped: there is no C compiler") };
    // The compiler may exit before it has read all of its input.
    let _ = compiler.stdin.take().map(|mut pipe| pipe.write_all(source.as_bytes()));
    let outcome = compiler.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&outcome.stderr);
    if errors.contains("linux/fuse.h: No such file") {
        return eprintln!("skipped: there are no kernel headers");
    }
    assert!(outcome.status.success(), "{errors}");
}
