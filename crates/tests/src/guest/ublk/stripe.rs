//! A block device striped over two files, by a table of device-mapper's: the selftests' stripe rows.

use super::{Ublk, driver, needs};
use crate::guest::disk::{Disk, FOLDER};
use crate::guest::{Done, Test, full, test};
use crate::server::{Sandbox, noise};
use exports::ublk::DataMode;
use std::fs::File;
use std::path::PathBuf;

/// The tests of this module.
pub(super) const TESTS: &[Test] = &[
    test("ublk/stripe_01", "stripes over two files read back what was written, copying", || {
        verify(DataMode::Copy)
    }),
    full("ublk/stripe_02", "ext4 on stripes, copying", || file_system(DataMode::Copy)),
    full("ublk/stripe_03", "stripes read back what was written, with registered buffers", || {
        verify(DataMode::AutoZeroCopy)
    }),
    full("ublk/stripe_04", "ext4 on stripes, with registered buffers", || {
        file_system(DataMode::AutoZeroCopy)
    }),
    full("ublk/stripe_05", "stripes read back what was written, with user copy", || {
        verify(DataMode::UserCopy)
    }),
    full("ublk/stripe_06", "ext4 on stripes, with user copy", || file_system(DataMode::UserCopy)),
];

/// Bytes of each file.
const STRIPE: u64 = 32 << 20;
/// Bytes of a chunk.
const CHUNK: u64 = 64 << 10;

fn files() -> [PathBuf; 2] {
    ["even.img", "odd.img"].map(|name| PathBuf::from(FOLDER).join(name))
}

fn start(mode: DataMode) -> Result<Ublk, crate::guest::Skip> {
    needs(mode.features())?;
    let sandbox = Sandbox::default();
    for file in files() {
        File::create(file).and_then(|file| file.set_len(STRIPE)).expect("room for an image");
    }
    let [even, odd] = files().map(|file| file.to_string_lossy().into_owned());
    let (whole, chunk) = (2 * STRIPE / 512, CHUNK / 512);
    let line = format!("0 {whole} striped 2 {chunk} {even} 0 {odd} 0\n");
    let table = sandbox.text("stripes", &line).to_string_lossy().into_owned();
    let export = format!("--ublk=mode={mode}");
    let words = ["serve", "--table", &table, "--name", "disk", &export];
    let server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    let disk = Disk::at(server.uri());
    assert_eq!(disk.len(), 2 * STRIPE);
    Ok(Ublk { server, disk, driver: driver()?, sandbox })
}

/// Checks that fio's data is at the places of the table, chunk by chunk.
fn verify(mode: DataMode) -> Done {
    let ublk = start(mode)?;
    ublk.disk.verify(&["--bsrange=4k-128k", "--size=2M"]);
    ublk.disk.load(&["--rw=write", "--bs=256k", "--size=2M", "--end_fsync=1"]).ok();
    let dealt = files().map(|file| std::fs::read(file).expect("it exists"));
    let mut through = vec![0; 2 << 20];
    let device = File::open(&ublk.disk.node).expect("root may");
    std::os::unix::fs::FileExt::read_exact_at(&device, &mut through, 0).expect("it is as long");
    for (number, chunk) in through.chunks(CHUNK as usize).enumerate() {
        let at = number / 2 * CHUNK as usize;
        assert!(chunk == &dealt[number % 2][at..][..chunk.len()], "chunk {number} lies elsewhere");
    }
    drop(device);
    ublk.end();
    Ok(())
}

fn file_system(mode: DataMode) -> Done {
    let ublk = start(mode)?;
    ublk.disk.format("ext4");
    let content = noise(7, 3 << 20);
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    std::fs::write(mounted.at.join("file"), &content).expect("room for it");
    mounted.unmount();
    ublk.disk.check("ext4");
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    assert!(std::fs::read(mounted.at.join("file")).expect("it exists") == content, "its content differs");
    mounted.unmount();
    ublk.end();
    Ok(())
}
