//! Power cuts of a file system: its writes are logged by the target log-writes, and the log is replayed to
//! each flush.

use super::super::disk::{Disk, tool};
use super::super::{Done, Test, soak};
use super::Ublk;
use crate::server::{Sandbox, noise};
use std::fs;

/// The tests of this module.
pub(super) const TESTS: &[Test] =
    &[soak("ublk/power_cuts", "ext4 is intact after each flush in a log of its writes", power_cuts)];

/// Length of the file system in bytes.
const LEN: u64 = 16 << 20;

fn power_cuts() -> Done {
    let kept = Sandbox::default();
    let log = kept.path("writes.log");
    let log = log.to_string_lossy();
    let entries = || {
        let printed = kept.run(&["replay-log", "--log", &log, "--num-entries"]).ok();
        printed.trim().parse::<usize>().expect("a number")
    };
    let ublk =
        Ublk::start(LEN, "file:{image}", "", &["--layer", &format!("log,file={log},size=128M,create")])?;
    ublk.disk.format("ext4");
    let made = entries();
    let mounted = ublk.disk.mount(&kept.path("mnt"));
    for number in 0..6_usize {
        let name = |kind: &str, number: usize| mounted.at.join(format!("{kind}{number}"));
        fs::create_dir(name("folder", number)).expect("a folder");
        fs::write(name("folder", number).join("small"), noise(number as u64, 9000)).expect("a file");
        fs::write(name("file", number), noise(100 + number as u64, 70_000)).expect("a file");
        fs::File::open(name("file", number)).and_then(|file| file.sync_all()).expect("fsync");
        if number % 2 == 1 {
            fs::remove_file(name("file", number - 1)).expect("it exists");
            fs::rename(name("folder", number), name("moved", number)).expect("it exists");
        }
    }
    mounted.unmount();
    ublk.end();
    let listed = kept.run(&["replay-log", "--log", &log]).ok();
    let is_cut = |line: &str| line.contains(" flush") || line.contains(" fua");
    let cuts: Vec<usize> =
        (1..).zip(listed.lines()).filter(|(_, line)| is_cut(line)).map(|cut| cut.0).collect();
    let cuts: Vec<usize> = cuts.into_iter().filter(|&cut| cut > made).collect();
    assert!(made > 0 && cuts.len() >= 6, "each fsync is one at least, after {made} entries: {listed}");
    let (replayed, image) = (kept.image("replayed.img", LEN), kept.path("cut.img"));
    let mut at = 0;
    for cut in cuts {
        let (start, limit) = (at.to_string(), (cut - at).to_string());
        let onto = replayed.to_string_lossy();
        let range = ["--replay", &onto, "--start-entry", &start, "--limit", &limit];
        kept.run(&[&["replay-log", "--log", &log], &range[..]].concat()).ok();
        at = cut;
        fs::copy(&replayed, &image).expect("room for a copy");
        let mended = tool(&["e2fsck", "-f", "-p", &image.to_string_lossy()]);
        // Status 1: the journal was replayed, as after any power cut.
        assert!(matches!(mended.status.code(), Some(0 | 1)), "after entry {cut}: {mended:?}");
        Disk::at(&image).check("ext4");
    }
    Ok(())
}
