//! A zoned stack as the kernel's `sd` finds it through its iSCSI initiator: a host-managed zoned disk.

use super::{Initiator, PORTAL_PORT, needs};
use crate::guest::disk::{Disk, tool};
use crate::guest::{Done, Skip, Test, full};
use crate::iscsi::Target;
use crate::server::Sandbox;
use crate::tools::Outcome;

pub(super) const TESTS: &[Test] = &[full(
    "iscsi/zones",
    "sd finds a zoned disk: blkzone, sg_rep_zones, sg_zone, sg_reset_wp, writes at the write pointer",
    zones,
)];

const STACK: &str =
    "null:64M,memory_backed,zoned,zone_size=4M,zone_capacity=3M,zone_nr_conv=2,zone_max_open=4";
/// First sector of the third zone, the first sequential one.
const THIRD: &str = "16384";

/// Returns write pointer and condition of the third zone, as blkzone prints them.
fn third(disk: &Disk) -> (String, String) {
    let report = tool(&["blkzone", "report", "-o", THIRD, "-c", "1", disk.path()]).ok();
    let word = |before: &str, end: char| {
        let rest = report.split(before).nth(1).unwrap_or_else(|| panic!("no {before:?} in {report}"));
        rest.split(end).next().unwrap_or_default().trim().to_owned()
    };
    (word("wptr ", ' '), word("zcond:", '['))
}

fn sg(disk: &Disk, arguments: &[&str]) -> Outcome {
    tool(&[arguments, &[disk.path()]].concat())
}

fn zones() -> Done {
    needs()?;
    let sandbox = Sandbox::default();
    let _target = Target::serve_at(&sandbox, PORTAL_PORT, STACK, "", &[]);
    let initiator = Initiator::start()?;
    let session = initiator.login();
    let disk = &session.disk;
    if disk.attribute("queue/zoned") == "none" {
        return Err(Skip("this kernel has no zoned block devices".into()));
    }
    assert_eq!(disk.attribute("queue/zoned"), "host-managed");
    for (name, expected) in [("chunk_sectors", "8192"), ("nr_zones", "16"), ("max_open_zones", "4")] {
        assert_eq!(disk.attribute(&format!("queue/{name}")), expected, "{name}");
    }
    let report = tool(&["blkzone", "report", disk.path()]).ok();
    assert_eq!(report.lines().count(), 16, "{report}");
    assert_eq!(report.matches("cap 0x001800").count(), 14, "{report}");

    // Writes at the write pointer succeed, others fail.
    let noise = sandbox.noise("noise", 64 << 10);
    let (from, to) = (format!("if={}", noise.display()), format!("of={}", disk.path()));
    let at = |seek: &str| tool(&["dd", &from, &to, "bs=64k", "oflag=direct", &format!("seek={seek}")]);
    at("128").ok();
    at("129").ok();
    at("140").failed();
    assert_eq!(third(disk), ("0x000100".into(), "2(oi)".into()));
    let back = sandbox.path("back");
    let into = format!("of={}", back.display());
    tool(&["dd", &format!("if={}", disk.path()), &into, "bs=64k", "skip=129", "count=1", "iflag=direct"])
        .ok();
    let read = |path| std::fs::read(path).expect("the file");
    assert!(read(&noise) == read(&back), "it reads back otherwise");
    for (action, pointer, condition) in [
        ("open", "0x000100", "3(oe)"),
        ("close", "0x000100", "4(cl)"),
        ("finish", "0x002000", "14(fu)"),
        ("reset", "0x000000", "1(em)"),
    ] {
        tool(&["blkzone", action, "-o", THIRD, "-c", "1", disk.path()]).ok();
        assert_eq!(third(disk), (pointer.into(), condition.into()), "{action}");
    }

    // sg3_utils.
    let zones = sg(disk, &["sg_rep_zones"]).ok();
    assert!(zones.contains("Sequential write required"), "{zones}");
    sg(disk, &["sg_zone", "--open", &format!("--zone={THIRD}")]).ok();
    assert_eq!(third(disk).1, "3(oe)");
    sg(disk, &["sg_zone", "--finish", &format!("--zone={THIRD}")]).ok();
    assert_eq!(third(disk).1, "14(fu)");
    sg(disk, &["sg_reset_wp", &format!("--zone={THIRD}")]).ok();
    assert_eq!(third(disk).1, "1(em)");
    // A verifying load with several writes in flight.
    let zbd =
        ["--zonemode=zbd", "--offset=8M", "--max_open_zones=4", "--iodepth=8", "--rw=write", "--bs=64k"];
    disk.load(&[&zbd[..], &["--size=16M", "--verify=crc32c", "--verify_fatal=1"]].concat()).ok();

    let page = sg(disk, &["sg_vpd", "-p", "0xb6"]).ok();
    assert!(page.contains("URSWRZ: 1") && page.contains("write required zones: 4"), "{page}");
    Ok(())
}
