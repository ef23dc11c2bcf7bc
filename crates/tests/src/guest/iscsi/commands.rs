//! Commands of sg3_utils through the kernel's initiator: each reaches the logical unit and has its effect.

use super::{Initiator, serve};
use crate::guest::disk::{Disk, tool};
use crate::guest::{Done, Test, test};
use crate::server::{Sandbox, noise};
use crate::tools::Outcome;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) const TESTS: &[Test] = &[
    test("iscsi/inquiry", "sg_inq, every page of sg_vpd, sg_modes, sg_opcodes, sg_readcap, sg_luns", inquiry),
    test(
        "iscsi/commands",
        "verify, write same, unmap, compare and write, extended copy, LBA status, reset",
        commands,
    ),
    test("iscsi/reservations", "sg_persist's reservations stop another initiator's writes", reservations),
];

/// Exit status of sg3_utils for a reservation conflict, and for a miscompare.
const CONFLICT: i32 = 24;
const MISCOMPARE: i32 = 14;

/// Runs a tool of sg3_utils with the device as its last argument.
fn sg(disk: &Disk, arguments: &[&str]) -> Outcome {
    tool(&[arguments, &[disk.path()]].concat())
}

fn inquiry() -> Done {
    let sandbox = Sandbox::default();
    let _target = serve(&sandbox, 16 << 20, "")?;
    let initiator = Initiator::start()?;
    let session = initiator.login();
    let disk = &session.disk;
    let standard = sg(disk, &["sg_inq"]).ok();
    assert!(standard.contains("Peripheral device type: disk"), "{standard}");
    assert!(standard.contains("Vendor identification: BLKYARD"), "{standard}");
    let pages = ["0x0", "0x80", "0x83", "0x86", "0xb0", "0xb1", "0xb2"];
    for page in pages {
        sg(disk, &["sg_vpd", "-p", page]).ok();
    }
    // Also each page that the unit lists.
    sg(disk, &["sg_vpd", "-a"]).ok();
    let limits = sg(disk, &["sg_vpd", "-p", "bl"]).ok();
    assert!(limits.contains("Maximum compare and write length: "), "{limits}");
    let thin = sg(disk, &["sg_vpd", "-p", "lbpv"]).ok();
    assert!(thin.contains("Unmap command supported (LBPU): 1"), "{thin}");
    sg(disk, &["sg_modes", "-a"]).ok();
    let opcodes = sg(disk, &["sg_opcodes"]).ok();
    for name in
        ["Read(16)", "Write(16)", "Compare and write", "Unmap", "Write same(16)", "Persistent reserve in"]
    {
        assert!(opcodes.contains(name), "{name} is missing: {opcodes}");
    }
    let one = sg(disk, &["sg_opcodes", "--opcode=0x28"]).ok();
    assert!(!one.contains("not supported"), "{one}");
    let capacity = sg(disk, &["sg_readcap", "--16"]).ok();
    assert!(capacity.contains("Device size: 16777216 bytes"), "{capacity}");
    assert!(capacity.contains("lbpme=1"), "{capacity}");
    sg(disk, &["sg_luns"]).ok();
    sg(disk, &["sg_turs"]).ok();
    sg(disk, &["sg_logs"]).ok();
    Ok(())
}

fn commands() -> Done {
    let sandbox = Sandbox::default();
    let _target = serve(&sandbox, 16 << 20, "")?;
    let initiator = Initiator::start()?;
    let session = initiator.login();
    let disk = &session.disk;
    let image = File::open(sandbox.path("disk.img")).expect("it exists");
    let stored = |block: u64, blocks: usize| {
        let mut bytes = vec![0; blocks * 512];
        image.read_exact_at(&mut bytes, block * 512).expect("it is long enough");
        bytes
    };
    let (one, other) = (noise(1, 4096), noise(2, 4096));
    let file = |name: &str, bytes: &[u8]| {
        let path = sandbox.path(name);
        std::fs::write(&path, bytes).expect("room for it");
        format!("--in={}", path.display())
    };
    let in_one = file("one", &one);

    // WRITE SAME: one block, eight times. Then VERIFY, with and without a comparison.
    let block = file("block", &one[..512]);
    sg(disk, &["sg_write_same", "--16", &block, "--lba=64", "--num=8"]).ok();
    assert_eq!(stored(64, 8), one[..512].repeat(8));
    sg(disk, &["sg_write_same", "--10", &block, "--lba=128", "--num=8"]).ok();
    assert_eq!(stored(128, 8), one[..512].repeat(8));
    sg(disk, &["sg_verify", "--lba=0", "--count=2048"]).ok();
    let repeated = file("repeated", &one[..512].repeat(8));
    let compare = ["sg_verify", "--lba=64", "--count=8", "--ndo=4096"];
    sg(disk, &[&compare[..], &[&repeated]].concat()).ok();
    sg(disk, &[&compare[..], &[&in_one]].concat()).failed_with(MISCOMPARE);

    // COMPARE AND WRITE: the file has the expected block, then the block to write.
    let exchange = file("exchange", &[&one[..512], &other[..512]].concat());
    let words = ["sg_compare_and_write", &exchange, "--lba=64", "--num=1", "--xferlen=1024"];
    sg(disk, &words).ok();
    assert_eq!(stored(64, 1), other[..512]);
    sg(disk, &words).failed_with(MISCOMPARE);
    assert_eq!(stored(64, 1), other[..512]);

    // EXTENDED COPY within the unit. udev, which would create the link by which sg_xcopy opens a block
    // device, does not run here.
    let link = Path::new("/dev/block").join(disk.attribute("dev"));
    std::fs::create_dir_all("/dev/block").expect("root may");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(disk.path(), &link).expect("root may");
    let node = disk.path();
    let (from, to) = (format!("if={node}"), format!("of={node}"));
    tool(&["sg_xcopy", &from, &to, "bs=512", "skip=64", "seek=4096", "count=8"]).ok();
    assert_eq!(stored(4096, 8), stored(64, 8));

    // UNMAP and GET LBA STATUS.
    sg(disk, &["sg_unmap", "--lba=64", "--num=64", "--force"]).ok();
    assert_eq!(stored(64, 64), vec![0; 64 * 512]);
    sg(disk, &["sg_get_lba_status", "--lba=0"]).ok();
    sg(disk, &["sg_sync"]).ok();

    for what in ["--device", "--target"] {
        sg(disk, &["sg_reset", what]).ok();
    }
    disk.verify(&["--size=1M"]);
    Ok(())
}

fn reservations() -> Done {
    let sandbox = Sandbox::default();
    let _target = serve(&sandbox, 16 << 20, "")?;
    let initiator = Initiator::start()?;
    initiator.second_name("iqn.2026-11.io.blockyard.test:two");
    let one = initiator.login().disk;
    let two = initiator.node(super::PORTAL, "two", &[]).login().disk;
    let out = |disk: &Disk, arguments: &[&str]| sg(disk, &[&["sg_persist", "--out"], arguments].concat());
    let write = |disk: &Disk| disk.load(&["--rw=write", "--size=64k", "--iodepth=1"]).status.success();
    let block = sandbox.path("block");
    std::fs::write(&block, [1; 512]).expect("room for it");
    let in_block = format!("--in={}", block.display());
    let write_same = ["sg_write_same", "--10", &in_block, "--lba=8", "--num=1"];

    out(&one, &["--register", "--param-sark=0xa1"]).ok();
    out(&one, &["--reserve", "--param-rk=0xa1", "--prout-type=1"]).ok();
    let keys = sg(&two, &["sg_persist", "--in", "--read-keys"]).ok();
    assert!(keys.contains("0xa1"), "{keys}");
    let held = sg(&two, &["sg_persist", "--in", "--read-reservation"]).ok();
    assert!(held.contains("Write Exclusive"), "{held}");
    assert!(write(&one), "the holder of the reservation may write");
    sg(&two, &write_same).failed_with(CONFLICT);
    assert!(two.load(&["--rw=read", "--size=64k"]).status.success(), "others may read");
    // The other initiator takes over.
    out(&two, &["--register", "--param-sark=0xb2"]).ok();
    out(&two, &["--preempt", "--param-rk=0xb2", "--param-sark=0xa1", "--prout-type=1"]).ok();
    sg(&two, &write_same).ok();
    // A unit attention reports the preemption first.
    let conflict = [0, 1].map(|_| sg(&one, &write_same).status.code());
    assert_eq!(conflict[1], Some(CONFLICT), "the preempted initiator may not write: {conflict:?}");
    out(&two, &["--release", "--param-rk=0xb2", "--prout-type=1"]).ok();
    assert!(write(&one) && write(&two), "nobody is excluded any more");
    out(&two, &["--clear", "--param-rk=0xb2"]).ok();
    let keys = sg(&one, &["sg_persist", "--in", "--read-keys"]);
    let keys =
        if keys.status.success() { keys } else { sg(&one, &["sg_persist", "--in", "--read-keys"]) }.ok();
    assert!(keys.contains("there are NO registered"), "{keys}");
    Ok(())
}
