//! Tests opening files: sizes, locks, refusals, and the file systems and devices that this machine can
//! create.

use super::*;
use crate::Backend;
use std::process::Command;

fn fact(file: &File, name: &str) -> String {
    file.describe().into_iter().find(|fact| fact.0 == name).map(|fact| fact.1).unwrap_or_default()
}

fn refusal(spec: &FileSpec) -> String {
    File::open(spec).expect_err("refused").to_string()
}

#[test]
fn loop_1_the_size_follows_offset_and_limit() {
    let (_dir, path) = image();
    std::fs::File::options().write(true).open(&path).unwrap().set_len((1 << 20) + 700).unwrap();
    for (offset, limit, block, size) in [
        (0, None, None, (1 << 20) + 512),
        (512, None, None, 1 << 20),
        (0, Some(1000), None, 512),
        (0, Some(0), None, (1 << 20) + 512),
        (1 << 20, Some(1 << 20), None, 512),
        (2 << 20, None, None, 0),
        (0, None, Some(4096), 1 << 20),
    ] {
        let spec = FileSpec {
            offset: Bytes(offset),
            sizelimit: limit.map(Bytes),
            block,
            direct: Direct::Off,
            ..FileSpec::new(&path)
        };
        assert_eq!(File::open(&spec).unwrap().size(), Bytes(size), "{spec:?}");
    }
}

#[test]
fn a_file_is_served_as_it_was_opened() {
    let (_dir, path) = image();
    let file = File::open(&FileSpec::new(&path)).unwrap();
    let mut disk = opened(&file);
    assert_eq!(disk.read(4096, 4096), (Status::Ok, content(4096, 4096)));
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::Ok);
    assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    assert!(fact(&file, "direct").starts_with("no: "));
    assert_eq!(fact(&file, "locked"), "against other writers");
    assert_eq!(fact(&file, "path"), path.display().to_string());
    let limits = file.limits();
    assert_eq!((limits.logical_block_size, limits.physical_block_size), (Bytes(512), Bytes(512)));
    assert!(limits.max_discard_sectors.0 > 0 && file.features().discard);
}

#[test]
fn two_writers_of_one_file_are_refused_unless_they_share() {
    let (_dir, path) = image();
    let spec = FileSpec::new(&path);
    let read_only = FileSpec { ro: true, ..spec.clone() };
    let share = FileSpec { share: true, ..spec.clone() };
    let first = File::open(&spec).unwrap();
    for other in [&spec, &read_only, &share] {
        let why = refusal(other);
        assert!(why.contains(" is in use: ") && why.contains("share"), "{why}");
    }
    drop(first);
    let reader = File::open(&read_only).unwrap();
    let another = File::open(&read_only).unwrap();
    assert!(refusal(&spec).contains("share"), "a reader does not want it changed");
    drop((reader, another));
    let one = File::open(&share).unwrap();
    let _two = File::open(&share).unwrap();
    assert!(refusal(&spec).contains("in use"));
    assert_eq!(fact(&one, "locked"), "no: share was given");
}

#[test]
fn qemu_refuses_to_write_to_a_served_file() {
    let (_dir, path) = image();
    let qemu = |arguments: &[&str]| {
        let output = Command::new("qemu-io").args(["-f", "raw"]).args(arguments).arg(&path).output();
        output.map(|output| output.status.success())
    };
    let write = || qemu(&["-c", "write 0 512"]);
    let Ok(alone) = write() else {
        return eprintln!("skipped: there is no qemu-io here");
    };
    assert!(alone);
    for read_only in [false, true] {
        let file = File::open(&FileSpec { ro: read_only, ..FileSpec::new(&path) }).unwrap();
        assert!(!write().unwrap(), "read-only: {read_only}");
        assert!(qemu(&["-r", "-c", "read 0 512"]).unwrap(), "who only looks is let in");
        drop(file);
        assert!(write().unwrap());
    }
}

#[test]
fn create_creates_a_file_of_that_size_or_keeps_the_existing_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new.img");
    let spec = FileSpec { create: Some(Bytes::mib(3)), ..FileSpec::new(&path) };
    let file = File::open(&spec).unwrap();
    assert_eq!(file.size(), Bytes::mib(3));
    assert_eq!(opened(&file).write(0, &[1; 512], Flags::empty()), Status::Ok);
    drop(file);
    let file = File::open(&spec).unwrap();
    assert_eq!(opened(&file).read(0, 512), (Status::Ok, vec![1; 512]), "its content stays");
    drop(file);
    let other = FileSpec { create: Some(Bytes::mib(4)), ..spec.clone() };
    assert!(refusal(&other).contains("exists with 3M, not 4M"));
    let failing = FileSpec {
        path: dir.path().join("bad.img"),
        block: Some(4096),
        direct: Direct::On,
        offset: Bytes(1),
        ..spec
    };
    assert!(File::open(&failing).is_err());
    assert!(!failing.path.exists(), "nothing is left behind");
}

#[test]
fn impossible_options_are_refused_with_advice() {
    let (dir, path) = image();
    let spec = FileSpec::new(&path);
    for (spec, words) in [
        (FileSpec { block: Some(1000), ..spec.clone() }, "give a power of two from 512 to 65536"),
        (FileSpec { create: Some(Bytes(512)), ro: true, ..spec.clone() }, "leave one out"),
        (FileSpec { create: Some(Bytes(100)), ..spec.clone() }, "whole sectors"),
        (FileSpec { offset: Bytes(u64::MAX), ..spec.clone() }, "past the end"),
        (FileSpec::new(dir.path().join("absent")), "add create and size"),
        // A replacement file is read-only, too.
        (FileSpec { ro: true, ..FileSpec::new(dir.path().join("absent")) }, "existing file)"),
        (FileSpec::new(path.join("below")), "a part of its path is a file"),
        (FileSpec::new(dir.path()), "give the path of a regular file"),
        (FileSpec { ro: true, ..FileSpec::new(dir.path()) }, "neither a regular file nor a block device"),
        (FileSpec { ro: true, ..FileSpec::new("/dev/null") }, "neither a regular file"),
    ] {
        let why = refusal(&spec);
        assert!(why.contains(words), "{why}");
        assert!(why.contains(&spec.path.display().to_string()), "{why}");
        assert!(why.ends_with(')'), "{why}: and what to do?");
    }
}

#[test]
fn a_file_that_may_not_be_written_is_opened_with_ro_only() {
    let (_dir, path) = image();
    let spec = FileSpec { ro: true, ..FileSpec::new(&path) };
    let file = File::open(&spec).unwrap();
    assert!(file.read_only() && !file.features().discard);
    let mut disk = opened(&file);
    assert_eq!(disk.write(0, &[1; 512], Flags::empty()), Status::IoError);
    assert_eq!(disk.read(0, 512), (Status::Ok, content(0, 512)));
    assert_eq!(file.limits().max_discard_sectors.0, 0);
}

#[test]
fn a_file_on_tmpfs_is_memory() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        return eprintln!("skipped: /dev/shm cannot be written");
    };
    let path = dir.path().join("disk.img");
    let spec = FileSpec { create: Some(Bytes::mib(1)), ..FileSpec::new(&path) };
    let file = File::open(&spec).unwrap();
    if fact(&file, "file system") != "tmpfs" {
        return eprintln!("skipped: /dev/shm is {}", fact(&file, "file system"));
    }
    assert!(file.shared().facts().memory);
    let mut disk = opened(&file);
    assert_eq!(disk.write(4096, &[3; 8192], Flags::FUA), Status::Ok);
    assert_eq!(disk.with(Op::WriteZeroes, 4096, 4096, Flags::NO_UNMAP), Status::Ok);
    assert_eq!(disk.bare(Op::Discard, 0, 4096), Status::Ok);
    assert_eq!(disk.read(4096, 8192).1, [[0; 4096], [3; 4096]].concat());
    assert!(disk.ring.files.asked.iter().all(|asked| asked.now));
}

/// A file system mounted at a new folder; unmounted on drop.
struct Mounted(TempDir);

impl Mounted {
    fn new(arguments: &[&str]) -> Option<Mounted> {
        let dir = tempfile::tempdir().unwrap();
        let done = Command::new("mount").args(arguments).arg(dir.path()).output();
        match done {
            Ok(output) if output.status.success() => Some(Mounted(dir)),
            Ok(output) => {
                eprintln!("skipped: mount: {}", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                eprintln!("skipped: mount: {error}");
                None
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_file_system_fails_writes_with_no_space_and_reads_continue() {
    let Some(mount) = Mounted::new(&["-t", "tmpfs", "-o", "size=1M", "tmpfs"]) else { return };
    let path = mount.0.path().join("disk.img");
    let spec = FileSpec { create: Some(Bytes::mib(4)), ..FileSpec::new(&path) };
    let file = File::open(&spec).unwrap();
    let mut disk = opened(&file);
    assert_eq!(disk.write(0, &[1; 4096], Flags::empty()), Status::Ok);
    assert_eq!(disk.write(1 << 20, &vec![1; 2 << 20], Flags::empty()), Status::NoSpace);
    assert_eq!(disk.read(0, 4096), (Status::Ok, vec![1; 4096]));
    assert_eq!(disk.bare(Op::Discard, 0, 4 << 20), Status::Ok);
    assert_eq!(disk.write(4096, &[1; 4096], Flags::empty()), Status::Ok, "there is room again");
}

#[test]
fn direct_io_is_used_where_it_works_and_refused_with_its_reason() {
    let (_dir, path) = image();
    let spec = FileSpec { direct: Direct::On, ..FileSpec::new(&path) };
    let file = match File::open(&spec) {
        Ok(file) => file,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    assert!(fact(&file, "direct").starts_with("yes"));
    let alignment = file.shared().facts().direct.unwrap();
    assert_eq!(file.limits().logical_block_size, Bytes(alignment.offset.max(512).into()), "LOOP-7");
    let mut disk = opened(&file);
    assert_eq!(disk.read(4096, 65536), (Status::Ok, content(4096, 65536)));
    assert_eq!(disk.write(100, &[1; 1000], Flags::empty()), Status::Ok);
    assert_eq!(disk.read(0, 200).1, [&content(0, 100)[..], &[1; 100]].concat());
    drop((file, disk));
    let why = refusal(&FileSpec { offset: Bytes(1), ..spec });
    assert!(why.contains("direct=on is not possible") && why.contains("a multiple of"), "{why}");
}

#[test]
fn direct_io_on_a_disk_with_large_blocks_needs_large_blocks() {
    let (_dir, path) = image();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(64 << 20).unwrap();
    let attached =
        Command::new("losetup").args(["--find", "--show", "--sector-size", "4096"]).arg(&path).output();
    let device = match attached {
        Ok(output) if output.status.success() => String::from_utf8(output.stdout).unwrap().trim().to_owned(),
        Ok(output) => {
            return eprintln!("skipped: losetup: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Err(error) => return eprintln!("skipped: losetup: {error}"),
    };
    let result = std::panic::catch_unwind(|| {
        let spec = FileSpec::new(&device);
        let file = File::open(&spec).unwrap();
        assert!(fact(&file, "direct").starts_with("yes"), "auto is direct on block devices");
        assert_eq!(file.limits().logical_block_size, Bytes(4096));
        assert!(refusal(&spec).contains("another program has claimed it"));
        let mut disk = opened(&file);
        assert_eq!(disk.read(4096, 4096), (Status::Ok, content(4096, 4096)));
        assert_eq!(disk.write(10, &[9; 10], Flags::FUA), Status::Ok);
        assert_eq!(disk.bare(Op::WriteZeroes, 8192, 4096), Status::Ok);
        assert_eq!(disk.read(8190, 10).1, [&content(8190, 2)[..], &[0; 8]].concat());
        drop((file, disk));
        let small = FileSpec { block: Some(512), ..spec.clone() };
        assert!(fact(&File::open(&small).unwrap(), "direct").contains("give block=4096"));
        assert!(refusal(&FileSpec { direct: Direct::On, ..small }).contains("give block=4096"));
    });
    let _ = Command::new("losetup").args(["--detach", &device]).status();
    result.unwrap();
}
