//! Sub-block writes through several exports of one device: no write undoes a concurrent one.

use blockyard_tests::disk::missing_loop;
use blockyard_tests::on_both_engines;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Engine, Sandbox, Server};
use proto::nbd::CommandFlags;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

on_both_engines!(
    sub_block_writes_through_two_exports_are_all_kept,
    sub_block_writes_do_not_undo_whole_blocks_of_another_export,
);

const BLOCK: u64 = 4096;

/// Serves a device with large blocks, as two files and over NBD, on two threads.
fn server(sandbox: &Sandbox, engine: Engine) -> (Server, [PathBuf; 2]) {
    let image = sandbox.image("image", 1 << 20);
    let stack = format!("file:{},block=4096", image.display());
    let paths = [sandbox.path("one.raw"), sandbox.path("two.raw")];
    let [one, two] = paths.each_ref().map(|path| path.to_string_lossy().into_owned());
    let socket = format!("unix:{}", sandbox.path("disk.sock").display());
    let words = ["serve", &stack, "--name", "disk", "--queues", "2", "--ring", engine.name()];
    let exports = ["--nbd", &socket, "--fuse", &one, "--fuse", &two];
    let server = sandbox.start(&mut sandbox.blockyard(&[&words[..], &exports].concat()), 3);
    (server, paths)
}

fn open(path: &PathBuf) -> File {
    File::options().read(true).write(true).open(path).expect("the device's file opens")
}

/// Each byte has one writer, which knows its last content.
fn sub_block_writes_through_two_exports_are_all_kept(engine: Engine) {
    const WRITERS: u64 = 6;
    const ROUNDS: u64 = 400;
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let (mut server, paths) = server(&sandbox, engine);
    std::thread::scope(|scope| {
        for number in 0..WRITERS {
            let (ours, theirs) = (&paths[number as usize % 2], &paths[(number as usize + 1) % 2]);
            scope.spawn(move || {
                let (ours, theirs) = (open(ours), open(theirs));
                // The last one's range crosses the edge of two blocks.
                let at = |round: u64| BLOCK * (1 + round % 2 * 2) + 350 + 700 * number;
                let len = 690;
                for round in 0..ROUNDS {
                    let data = vec![(round % 255) as u8 + 1; len];
                    ours.write_all_at(&data, at(round)).expect("a part");
                    let mut back = vec![0; len];
                    theirs.read_exact_at(&mut back, at(round)).expect("a read");
                    assert!(back == data, "{number}, round {round}: it is gone at once");
                }
                for round in ROUNDS - 2..ROUNDS {
                    let mut back = vec![0; len];
                    theirs.read_exact_at(&mut back, at(round)).expect("a read");
                    assert!(back == vec![(round % 255) as u8 + 1; len], "{number}: it is gone since");
                }
            });
        }
    });
    server.terminate();
}

/// Of concurrent writes either may win; here both write the same.
fn sub_block_writes_do_not_undo_whole_blocks_of_another_export(engine: Engine) {
    const ROUNDS: usize = 250;
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let (mut server, paths) = server(&sandbox, engine);
    let mut peer = Peer::connect(&server.socket(), "disk");
    let files = paths.each_ref().map(open);
    for round in 0..ROUNDS {
        let sign = (round % 255) as u8 + 1;
        std::thread::scope(|scope| {
            for (index, file) in files.iter().enumerate() {
                let at = BLOCK + 1000 * (index as u64 + 1);
                scope.spawn(move || file.write_all_at(&[sign; 10], at).expect("a part"));
            }
            let peer = &mut peer;
            scope.spawn(move || {
                peer.write(BLOCK, &[sign; BLOCK as usize], CommandFlags::empty()).expect("a block")
            });
        });
        let back = peer.read(BLOCK, BLOCK).expect("a read");
        let lost = back.iter().position(|byte| *byte != sign);
        assert_eq!(lost, None, "round {round}: a byte is an earlier round's");
    }
    peer.disconnect();
    drop(files);
    server.terminate();
}
