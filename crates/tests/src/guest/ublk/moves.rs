//! `blockyard move` of a ublk device, and the recovery of one that has moved.

use super::death::{Recovery, needs_recovery};
use super::{Ublk, image};
use crate::guest::disk::FOLDER;
use crate::guest::writer::Writer;
use crate::guest::{Done, Test, full};
use crate::server::noise;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use ublk::State;

pub(super) const TESTS: &[Test] = &[full(
    "ublk/move",
    "a device moves under load from file to file to qcow2; a killed server is recovered on the last one",
    moved_and_recovered,
)];

const SIZE: u64 = 16 << 20;
/// Start of data that is written once, behind the blocks of the writers.
const NOISE_AT: u64 = 8 << 20;

fn moved_and_recovered() -> Done {
    needs_recovery(Recovery::Reissue)?;
    let mut ublk = Ublk::file(SIZE, "recovery=reissue,mode=copy")?;
    let noise = noise(11, 2 << 20);
    let device = File::options().read(true).write(true).open(ublk.disk.path()).expect("a device");
    device.write_all_at(&noise, NOISE_AT).and_then(|()| device.sync_all()).expect("room for it");
    let writer = Writer::start(&ublk.disk, 4);
    let [second, third] = ["second.img", "third.qcow2"].map(|name| Path::new(FOLDER).join(name));
    let mut source = image();
    for (path, options) in [(&second, ""), (&third, ",format=qcow2")] {
        writer.progress(40);
        let stack = format!("file:{},size={SIZE},create{options}", path.display());
        let moved = ublk.command(&["move", "disk", &stack]).ok();
        assert!(moved.contains("disk moved to "), "{moved}");
        // Nothing but the destination has the data.
        std::fs::remove_file(std::mem::replace(&mut source, path.clone())).expect("the source is a file");
    }
    writer.progress(40);
    ublk.kill();
    ublk.await_state(State::Quiesced);
    ublk.recover();
    writer.progress(40);
    let shown = ublk.command(&["show", "disk", "--json"]).ok();
    assert!(shown.contains("third.qcow2") && !shown.contains("second.img"), "{shown}");
    let ledger = writer.finish();
    assert_eq!(ledger.failed, 0, "requests that fail");
    ledger.check(&ublk.disk);
    // Pages from before the kill would hide a difference.
    rustix::fs::fadvise(&device, NOISE_AT, None, rustix::fs::Advice::DontNeed).expect("a file");
    let mut read = vec![0; noise.len()];
    device.read_exact_at(&mut read, NOISE_AT).expect("it reads");
    assert!(read == noise, "data that was written once differs");
    drop(device);
    println!("{} writes acknowledged", ledger.acknowledged);
    ublk.delete();
    std::fs::remove_file(third).expect("the destination is a file");
    Ok(())
}
