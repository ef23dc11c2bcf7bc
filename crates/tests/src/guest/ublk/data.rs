//! Reads return the written data, in every mode, through file systems and partitions, within the limits.

use super::{Ublk, driver, needs, serve};
use crate::guest::disk::{Disk, tool};
use crate::guest::{Done, Test, full, test};
use crate::server::{Sandbox, noise};
use exports::ublk::DataMode;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use ublk::Features;

pub(super) const TESTS: &[Test] = &[
    test("ublk/null_01", "a null device takes reads and writes, copying", || null(DataMode::Copy)),
    full("ublk/null_02", "a null device with registered buffers", || null(DataMode::ZeroCopy)),
    full("ublk/null_03", "a null device with automatic registration", || null(DataMode::AutoZeroCopy)),
    test("ublk/loop_01", "a file reads back what was written, copying", || verify(DataMode::Copy)),
    full("ublk/loop_02", "ext4 on a file, copying", || file_system("ext4", DataMode::Copy)),
    full("ublk/loop_03", "a file reads back what was written, with registered buffers", || {
        verify(DataMode::ZeroCopy)
    }),
    test("ublk/loop_04", "ext4 on a file, with registered buffers", || {
        file_system("ext4", DataMode::ZeroCopy)
    }),
    full("ublk/loop_05", "concurrent requests of a megabyte and of a block", mixed_sizes),
    full("ublk/loop_06", "a file reads back what was written, with user copy", || verify(DataMode::UserCopy)),
    test("ublk/loop_07", "ext4 on a file, with user copy", || file_system("ext4", DataMode::UserCopy)),
    test("ublk/generic_07", "a file with late buffers (NEED_GET_DATA)", || verify(DataMode::GetData)),
    full("ublk/generic_08", "a file with automatic registration", || verify(DataMode::AutoZeroCopy)),
    test("ublk/best_mode", "the default mode is one that the kernel offers, and works", best_mode),
    test("ublk/xfs", "xfs: created, filled, checked, read again", || file_system("xfs", DataMode::Copy)),
    full("ublk/btrfs", "btrfs: created, filled, checked, read again", || {
        file_system("btrfs", DataMode::Copy)
    }),
    test("ublk/ram", "memory reads back what was written", ram),
    test("ublk/discard", "discards free the file's space, and read as zeroes", discard),
    test("ublk/flush", "flushes reach the server, and FUA is as the device reports", flush),
    test("ublk/read_only", "a read-only device reports that and refuses writes", read_only),
    test("ublk/blocks_of_4096", "a device of 4096-byte blocks reports and accepts them", large_blocks),
    full("ublk/generic_03", "segments and alignment are those of the mode", limits),
    test("ublk/generic_02", "each hardware queue gets requests and serves them", queues),
    full("ublk/generic_12", "with per-io-daemon, load on one CPU is shared by all threads", per_io_daemon),
    test("ublk/batch_01", "one command for many requests: a file reads back what was written", batch_verify),
    full("ublk/batch_02", "batches with several queues and threads, under load", batch_queues),
    full("ublk/batch_03", "ext4 on a device with batches", || {
        needs(Features::BATCH_IO)?;
        file_system_with("ext4", "batch=yes")
    }),
    test(
        "ublk/shmemzc_01",
        "requests in shared huge pages are served without copies, on a null device",
        || shared_memory("null:64M", ""),
    ),
    full(
        "ublk/shmemzc_02",
        "requests in shared memory are served without copies, and a file reads back",
        || shared_memory("file:{image}", ""),
    ),
    full("ublk/shmemzc_03", "shared memory on a device with automatic registration", || {
        shared_memory("file:{image}", "mode=auto-zero-copy,")
    }),
    test("ublk/integrity_01", "the kernel's integrity data reads back as written", integrity),
    test("ublk/part_01", "partitions are found when a device starts, and not with no-part-scan", part_scan),
    test("ublk/partitions", "partitions can be created on a live device, and used", partitions),
];

/// Returns the options for a mode.
fn with(mode: DataMode) -> Result<String, crate::guest::Skip> {
    needs(mode.features())?;
    Ok(format!("mode={mode}"))
}

fn null(mode: DataMode) -> Done {
    let ublk = Ublk::start(0, "null:1G", &with(mode)?, &[])?;
    ublk.disk.load(&["--rw=randrw", "--size=16M", "--bsrange=4k-128k"]).ok();
    assert_eq!(ublk.disk.len(), 1 << 30);
    ublk.end();
    Ok(())
}

fn verify(mode: DataMode) -> Done {
    let ublk = Ublk::file(12 << 20, &with(mode)?)?;
    ublk.disk.verify(&["--bsrange=4k-64k", "--size=2M"]);
    // The file itself must have the data, not only the device.
    ublk.disk.load(&["--rw=write", "--bs=64k", "--end_fsync=1"]).ok();
    let through = tool(&["sha256sum", ublk.disk.path()]).ok();
    let beside = tool(&["sha256sum", &super::image().to_string_lossy()]).ok();
    assert_eq!(through.split(' ').next(), beside.split(' ').next(), "device and file differ");
    ublk.end();
    Ok(())
}

fn mixed_sizes() -> Done {
    let ublk = Ublk::file(32 << 20, "")?;
    ublk.disk.verify(&["--bssplit=4k/40:64k/30:512k/20:1m/10", "--size=16M", "--iodepth=8"]);
    ublk.end();
    Ok(())
}

fn file_system(kind: &str, mode: DataMode) -> Done {
    file_system_with(kind, &with(mode)?)
}

fn file_system_with(kind: &str, options: &str) -> Done {
    if kind != "ext4" {
        crate::guest::disk::module(&[kind])?;
    }
    // Each of these file systems refuses a smaller device.
    let len = if kind == "ext4" { 96 << 20 } else { 400 << 20 };
    let ublk = Ublk::file(len, options)?;
    ublk.disk.format(kind);
    let (small, large) = (noise(5, 3000), noise(6, 8 << 20));
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    for index in 0..20 {
        std::fs::write(mounted.at.join(format!("small{index}")), &small).expect("room for it");
    }
    std::fs::write(mounted.at.join("large"), &large).expect("room for it");
    std::fs::remove_file(mounted.at.join("small7")).expect("it exists");
    mounted.unmount();
    ublk.disk.check(kind);
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    assert!(std::fs::read(mounted.at.join("large")).expect("it exists") == large, "its content differs");
    assert!(std::fs::read(mounted.at.join("small19")).expect("it exists") == small, "its content differs");
    assert!(!mounted.at.join("small7").exists());
    mounted.unmount();
    ublk.end();
    Ok(())
}

fn best_mode() -> Done {
    let ublk = Ublk::file(16 << 20, "")?;
    let used = ublk.info().features();
    let shown = ublk.command(&["show", "disk"]).ok();
    let mode =
        DataMode::ALL.into_iter().rev().find(|mode| used.has(mode.features())).expect("copy needs nothing");
    assert!(shown.contains(mode.name()), "the device is in mode {mode}, and show says:\n{shown}");
    ublk.disk.verify(&[]);
    ublk.end();
    Ok(())
}

fn ram() -> Done {
    let ublk = Ublk::start(0, "ram:32M", "", &[])?;
    ublk.disk.verify(&["--bsrange=4k-64k", "--size=4M"]);
    ublk.end();
    Ok(())
}

fn discard() -> Done {
    let ublk = Ublk::file(32 << 20, "")?;
    let used = || std::fs::metadata(super::image()).expect("it exists").blocks() * 512;
    assert_ne!(ublk.disk.attribute("queue/discard_max_bytes"), "0");
    ublk.disk.load(&["--rw=write", "--bs=256k", "--size=32M", "--end_fsync=1"]).ok();
    let full = used();
    tool(&["blkdiscard", "--offset", "1M", "--length", "16M", ublk.disk.path()]).ok();
    let less = used();
    assert!(less + (15 << 20) < full, "{full} bytes were in use, {less} are");
    tool(&["blkdiscard", "--zeroout", "--offset", "20M", "--length", "4M", ublk.disk.path()]).ok();
    let line = |skip: &str, count: &str| {
        let of = ublk.disk.path();
        format!("dd if={of} bs=1M skip={skip} count={count} iflag=direct 2>/dev/null | tr -d '\\0' | wc -c")
    };
    for (skip, count) in [("1", "16"), ("20", "4")] {
        assert_eq!(tool(&["sh", "-c", &line(skip, count)]).ok().trim(), "0", "bytes that are not zero");
    }
    assert_ne!(tool(&["sh", "-c", &line("17", "1")]).ok().trim(), "0", "data outside the discard is lost");
    ublk.end();
    Ok(())
}

fn flush() -> Done {
    let ublk = Ublk::file(16 << 20, "")?;
    assert_eq!(ublk.disk.attribute("queue/write_cache"), "write back");
    let flushes = || {
        let stat = ublk.disk.attribute("stat");
        stat.split_whitespace().nth(15).and_then(|word| word.parse::<u64>().ok()).expect("a kernel from 5.5")
    };
    let before = flushes();
    ublk.disk.load(&["--rw=randwrite", "--size=256k", "--fsync=8"]).ok();
    assert!(flushes() > before, "no flush went through");
    ublk.disk.load(&["--rw=randwrite", "--size=256k", "--ioengine=psync", "--sync=1"]).ok();
    ublk.end();
    Ok(())
}

fn read_only() -> Done {
    let ublk = Ublk::start(16 << 20, "file:{image},ro", "", &[])?;
    assert_eq!(ublk.disk.attribute("ro"), "1");
    let line = format!("dd if=/dev/zero of={} bs=4k count=1 oflag=direct", ublk.disk.path());
    tool(&["sh", "-c", &line]).failed();
    ublk.disk.load(&["--rw=randread", "--readonly", "--size=1M"]).ok();
    ublk.end();
    Ok(())
}

fn large_blocks() -> Done {
    let ublk = Ublk::start(32 << 20, "file:{image},block=4096", "", &[])?;
    assert_eq!(ublk.disk.attribute("queue/logical_block_size"), "4096");
    ublk.disk.verify(&["--bsrange=4k-64k", "--size=2M"]);
    ublk.end();
    Ok(())
}

fn limits() -> Done {
    driver()?;
    for mode in DataMode::ALL {
        if needs(mode.features()).is_err() {
            continue;
        }
        let ublk = Ublk::file(16 << 20, &format!("mode={mode},io=256K"))?;
        let number = |name: &str| ublk.disk.attribute(name).parse::<u64>().expect("a number");
        assert!(number("queue/max_sectors_kb") <= 256, "{mode}: more than the buffers hold");
        assert!(number("queue/max_segments") >= 1);
        // At odd offsets in memory and at every size, where alignment errors would show.
        ublk.disk
            .load(&[
                "--rw=randrw",
                "--bsrange=512-256k",
                "--bs_unaligned=0",
                "--size=2M",
                "--iomem_align=512",
            ])
            .ok();
        ublk.end();
    }
    Ok(())
}

fn queues() -> Done {
    let ublk = Ublk::start(32 << 20, "file:{image}", "queues=2", &["--queues", "2"])?;
    let path = format!("/sys/block/{}/mq", ublk.disk.name());
    let count = std::fs::read_dir(path).expect("it has queues").count();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    assert_eq!(count, cpus.min(2));
    for cpu in 0..count {
        ublk.disk.verify(&[&format!("--cpus_allowed={cpu}"), "--size=2M"]);
    }
    ublk.end();
    Ok(())
}

fn per_io_daemon() -> Done {
    needs(Features::PER_IO_DAEMON)?;
    let ublk = Ublk::start(0, "null:1G", "queues=1,depth=16,per-io-daemon", &["--queues", "3"])?;
    // In ticks of 10 ms, which every kernel counts.
    let threads = || {
        let tasks =
            std::fs::read_dir(format!("/proc/{}/task", ublk.server.pid())).expect("it runs").flatten();
        let ticks = |path: std::path::PathBuf| {
            let text = std::fs::read_to_string(path.join("stat")).ok()?;
            let fields = text.rsplit_once(") ")?.1.split_whitespace().skip(11);
            Some(fields.take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>())
        };
        tasks.filter_map(|task| Some((task.file_name(), ticks(task.path())?))).collect::<BTreeMap<_, _>>()
    };
    let before = threads();
    let load = ["--rw=randread", "--size=24M", "--cpus_allowed=0", "--iodepth=16", "--norandommap"];
    let mut busy = 0;
    // A fast machine may need several rounds for a tick.
    for _ in 0..5 {
        ublk.disk.load(&load).ok();
        busy =
            threads().iter().filter(|(name, time)| before.get(*name).is_some_and(|old| *time > old)).count();
        if busy >= 3 {
            break;
        }
    }
    assert!(busy >= 3, "{busy} threads worked");
    ublk.end();
    Ok(())
}

/// Verifies data in each mode that supports batches.
fn batch_verify() -> Done {
    needs(Features::BATCH_IO)?;
    for mode in [DataMode::Copy, DataMode::UserCopy, DataMode::AutoZeroCopy] {
        if needs(mode.features()).is_err() {
            continue;
        }
        let ublk = Ublk::file(12 << 20, &format!("mode={mode},batch=yes"))?;
        assert!(ublk.info().features().has(Features::BATCH_IO), "{mode}");
        let shown = ublk.command(&["show", "disk"]).ok();
        assert!(shown.contains("one for many requests: asked for"), "{shown}");
        assert!(!shown.contains("refused"), "{shown}");
        ublk.disk.verify(&["--bsrange=4k-64k", "--size=2M", "--iodepth=32"]);
        ublk.end();
    }
    Ok(())
}

fn batch_queues() -> Done {
    needs(Features::BATCH_IO)?;
    let options = "batch=yes,queues=2,depth=64";
    let ublk = Ublk::start(32 << 20, "file:{image}", options, &["--queues", "2"])?;
    for cpu in 0..std::thread::available_parallelism().map_or(1, usize::from).min(2) {
        ublk.disk.verify(&[&format!("--cpus_allowed={cpu}"), "--size=2M", "--iodepth=64"]);
    }
    ublk.disk.load(&["--rw=randrw", "--numjobs=4", "--iodepth=64", "--size=2M", "--group_reporting"]).ok();
    ublk.end();
    let printed = Ublk::refused("batch=yes,mode=get-data")?;
    assert!(printed.contains("leave out batch=yes"), "{printed}");
    Ok(())
}

/// fio uses pages of a file that the server knows as its buffers.
fn shared_memory(stack: &str, options: &str) -> Done {
    needs(Features::SHMEM_ZC)?;
    let memory = Memory::new();
    let options = format!("{options}shmem={}", memory.file().display());
    let ublk = Ublk::start(16 << 20, stack, &options, &[])?;
    assert_eq!(in_place(&ublk), 0);
    if stack.starts_with("null") {
        ublk.disk.load(&["--rw=randrw", "--size=2M", &memory.option()]).ok();
    } else {
        ublk.disk.verify(&["--size=2M", &memory.option()]);
    }
    assert!(in_place(&ublk) > 300, "{} requests were served in place", in_place(&ublk));
    // Clients with other memory are served as usual.
    ublk.disk.load(&["--rw=randrw", "--size=1M"]).ok();
    ublk.end();
    Ok(())
}

/// The kernel generates tuples for its writes, and checks those of its reads.
fn integrity() -> Done {
    needs(Features::INTEGRITY)?;
    for (word, format, tuple) in [("t10", "T10-DIF-TYPE1-CRC", 8_u64), ("64", "nop", 64)] {
        let ublk = Ublk::start(0, &format!("ram:1M,integrity={word}"), "", &[])?;
        let attribute = |name| format!("/sys/block/{}/integrity/{name}", ublk.disk.name());
        let reported = std::fs::read_to_string(attribute("format")).expect("it has integrity data");
        assert_eq!(reported.trim(), format, "{word}");
        let shown = ublk.command(&["show", "disk"]).ok();
        assert!(shown.contains(&format!("{word}, {tuple} bytes with every 512")), "{shown}");
        assert!(shown.contains("user-copy: integrity data needs it"), "{shown}");
        ublk.disk.verify(&["--bs=16k", "--size=1M"]);
        let whole = block::Bytes((1 << 20) / 512 * (512 + tuple));
        let shown = ublk.command(&["show", "disk"]).ok();
        assert!(shown.contains(&whole.to_string()), "{word}: {whole} are not what it takes:\n{shown}");
        if word == "t10" {
            // Writes without tuples remove the stored ones, and the data can still be read.
            std::fs::write(attribute("write_generate"), "0").expect("root may");
            ublk.disk.load(&["--rw=write", "--bs=16k", "--offset=32k", "--size=256k"]).ok();
            ublk.disk.load(&["--rw=read", "--bs=128k", "--size=1M"]).ok();
        }
        ublk.end();
    }
    Ok(())
}

/// Returns the number of requests with data in shared memory, from `show`.
pub(super) fn in_place(ublk: &Ublk) -> u64 {
    let shown = ublk.command(&["show", "disk"]).ok();
    let line = shown.lines().find(|line| line.contains("shared")).unwrap_or_else(|| panic!("{shown}"));
    let count = line.rsplit(": ").next().and_then(|text| text.split(' ').next());
    count.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

/// A folder in memory with a file of 4 MiB, in huge pages where the kernel has them.
pub(super) struct Memory {
    folder: std::path::PathBuf,
    is_huge: bool,
}

impl Memory {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";

    pub(super) fn new() -> Memory {
        let folder = std::path::PathBuf::from("/tmp/memory");
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.to_string_lossy().into_owned();
        let _ = std::fs::write(Self::COUNT, "8");
        let has_pages = std::fs::read_to_string(Self::COUNT).is_ok_and(|count| count.trim() == "8");
        let is_huge = has_pages && tool(&["mount", "-t", "hugetlbfs", "none", &path]).status.success();
        if !is_huge {
            tool(&["mount", "-t", "tmpfs", "none", &path]).ok();
        }
        let memory = Memory { folder, is_huge };
        std::fs::File::create(memory.file()).and_then(|file| file.set_len(4 << 20)).expect("room for it");
        memory
    }

    pub(super) fn file(&self) -> std::path::PathBuf {
        self.folder.join("memory")
    }

    /// Returns fio's option to use it.
    pub(super) fn option(&self) -> String {
        let how = if self.is_huge { "mmaphuge" } else { "mmapshared" };
        format!("--mem={how}:{}", self.file().display())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.file());
        tool(&["umount", &self.folder.to_string_lossy()]);
        let _ = std::fs::write(Self::COUNT, "0");
    }
}

/// Returns a file with two partitions.
fn partitioned(sandbox: &Sandbox) {
    let image = super::image();
    std::fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("room for an image");
    let script = sandbox.text("table", "label: gpt\nsize=16M\nsize=16M\n");
    tool(&["sh", "-c", &format!("sfdisk -q {} <{}", image.display(), script.display())]).ok();
}

fn part_scan() -> Done {
    let sandbox = Sandbox::default();
    partitioned(&sandbox);
    let ublk = Ublk::start_in(sandbox, 0, "file:{image}", "", &[])?;
    let second = Disk::at(format!("{}p2", ublk.disk.path()));
    second.verify(&["--size=2M"]);
    needs(Features::NO_AUTO_PART_SCAN)?;
    let Ublk { sandbox, server, disk, driver } = ublk;
    Ublk { sandbox: Sandbox::default(), server, disk, driver }.end();
    let server = serve(&sandbox, "file:{image}", "no-part-scan", &[]);
    let second = format!("{}p2", server.uri());
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(!std::path::Path::new(&second).exists(), "{second} exists");
    Ok(())
}

fn partitions() -> Done {
    let ublk = Ublk::file(64 << 20, "")?;
    let script = ublk.sandbox.text("table", "label: dos\nsize=16M\nsize=16M\n");
    tool(&["sh", "-c", &format!("sfdisk -q --wipe always {} <{}", ublk.disk.path(), script.display())]).ok();
    Disk::at(format!("{}p1", ublk.disk.path())).verify(&["--size=2M"]);
    let second = Disk::at(format!("{}p2", ublk.disk.path()));
    second.format("ext4");
    second.check("ext4");
    ublk.end();
    Ok(())
}
