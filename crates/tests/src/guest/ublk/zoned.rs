//! A zoned `null:` as a block device, tested with the kernel, blkzone and fio (blktests zbd/001 to 006).

use super::{Ublk, needs};
use crate::guest::disk::tool;
use crate::guest::{Done, Test, test};
use ublk::Features;

/// The tests of this module.
pub(super) const TESTS: &[Test] = &[
    test(
        "ublk/zoned_report",
        "sysfs and blkzone tell the zones and their limits (blktests zbd/001, 002)",
        report,
    ),
    test("ublk/zoned_manage", "blkzone opens, closes, finishes and resets zones (blktests zbd/003)", manage),
    test("ublk/zoned_write", "writes go to the write pointer and read back", write),
    test("ublk/zoned_fio", "fio fills and verifies zones within the limits (blktests zbd/005)", fio),
];

const STACK: &str =
    "null:64M,zoned,zone_size=4M,zone_nr_conv=2,zone_max_open=4,zone_max_active=6,memory_backed";
/// First sector of the third zone, the first sequential one.
const THIRD: &str = "16384";

fn start(stack: &str) -> Result<Ublk, crate::guest::Skip> {
    needs(Features::ZONED)?;
    let ublk = Ublk::start(1 << 20, stack, "", &[])?;
    if ublk.disk.attribute("queue/zoned") == "none" {
        return Err(crate::guest::Skip("this kernel has no zoned block devices".into()));
    }
    Ok(ublk)
}

/// Returns the zones as blkzone prints them: write pointer and condition of `count` zones from a sector on.
fn zones(ublk: &Ublk, from: &str, count: &str) -> Vec<(String, String)> {
    let report = tool(&["blkzone", "report", "-o", from, "-c", count, ublk.disk.path()]).ok();
    let word = |line: &str, before: &str, end: char| {
        let rest = line.split(before).nth(1).unwrap_or_else(|| panic!("no {before:?} in {line}"));
        rest.split(end).next().unwrap_or_default().trim().to_owned()
    };
    report.lines().map(|line| (word(line, "wptr ", ' '), word(line, "zcond:", '['))).collect()
}

fn report() -> Done {
    let ublk = start(STACK)?;
    assert_eq!(ublk.disk.attribute("queue/zoned"), "host-managed");
    for (name, expected) in
        [("chunk_sectors", "8192"), ("nr_zones", "16"), ("max_open_zones", "4"), ("max_active_zones", "6")]
    {
        assert_eq!(ublk.disk.attribute(&format!("queue/{name}")), expected, "{name}");
    }
    assert_ne!(ublk.disk.attribute("queue/zone_append_max_bytes"), "0");
    let zones = zones(&ublk, "0", "16");
    assert_eq!(zones.len(), 16);
    assert!(zones[..2].iter().all(|zone| zone.1 == "0(nw)"), "{zones:?}");
    assert!(zones[2..].iter().all(|zone| *zone == ("0x000000".into(), "1(em)".into())), "{zones:?}");
    ublk.end();
    Ok(())
}

fn manage() -> Done {
    let ublk = start(STACK)?;
    let path = ublk.disk.path().to_owned();
    let write = ["dd", "if=/dev/zero", "bs=64k", "count=1", "oflag=direct", "seek=128"];
    tool(&[&write[..], &[&format!("of={path}")]].concat()).ok();
    assert_eq!(zones(&ublk, THIRD, "1"), [("0x000080".into(), "2(oi)".into())]);
    for (action, pointer, condition) in [
        ("open", "0x000080", "3(oe)"),
        ("close", "0x000080", "4(cl)"),
        ("finish", "0x002000", "14(fu)"),
        ("reset", "0x000000", "1(em)"),
    ] {
        tool(&["blkzone", action, "-o", THIRD, "-c", "1", &path]).ok();
        assert_eq!(zones(&ublk, THIRD, "1"), [(pointer.into(), condition.into())], "{action}");
    }
    tool(&["blkzone", "open", "-o", THIRD, "-c", "4", &path]).ok();
    tool(&["blkzone", "open", "-o", "49152", "-c", "1", &path]).failed();
    tool(&["blkzone", "reset", &path]).ok();
    assert!(zones(&ublk, THIRD, "14").iter().all(|zone| zone.1 == "1(em)"), "reset all");
    ublk.end();
    Ok(())
}

fn write() -> Done {
    let ublk = start(STACK)?;
    let path = ublk.disk.path().to_owned();
    let noise = ublk.sandbox.noise("noise", 64 << 10);
    let (from, to) = (format!("if={}", noise.display()), format!("of={path}"));
    let at = |seek: &str| tool(&["dd", &from, &to, "bs=64k", "oflag=direct", &format!("seek={seek}")]);
    at("128").ok();
    at("129").ok();
    let ahead = at("140").failed();
    assert!(ahead.contains("Input/output error"), "{ahead}");
    at("128").failed();
    let back = ublk.sandbox.path("back");
    let into = format!("of={}", back.display());
    tool(&["dd", &format!("if={path}"), &into, "bs=64k", "skip=129", "count=1", "iflag=direct"]).ok();
    let (wrote, read) = (std::fs::read(&noise).expect("there"), std::fs::read(&back).expect("there"));
    assert!(wrote == read, "it reads back otherwise");
    ublk.end();
    Ok(())
}

fn fio() -> Done {
    let ublk = start(STACK)?;
    let zbd = ["--zonemode=zbd", "--offset=8M", "--max_open_zones=4", "--iodepth=8"];
    let fill = ["--rw=write", "--bs=64k", "--size=16M", "--verify=crc32c", "--verify_fatal=1"];
    ublk.disk.load(&[&zbd[..], &fill].concat()).ok();
    let scatter = ["--rw=randwrite", "--bs=16k", "--size=32M", "--io_size=24M"];
    ublk.disk.load(&[&zbd[..], &scatter].concat()).ok();
    let zones = zones(&ublk, THIRD, "14");
    let open = zones.iter().filter(|zone| zone.1 == "2(oi)").count();
    assert!(open <= 4, "{zones:?}");
    ublk.end();
    Ok(())
}
