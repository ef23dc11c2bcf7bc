//! Copy-on-write overlays: written data survives a restart, a kill and a flush, the origin is never written,
//! and an overlay is refused over any other origin.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server, noise};
use proto::nbd::CommandFlags;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

const MIB: u64 = 1 << 20;
const LEN: usize = 4 << 20;

fn stack(origin: &Path) -> String {
    format!("file:{}", origin.display())
}

fn layer(overlay: &Path, options: &str) -> String {
    format!("cow,file={}{options}", overlay.display())
}

fn serve(sandbox: &Sandbox, origin: &Path, overlay: &Path, options: &str) -> (Server, Peer) {
    let server = sandbox.serve(&stack(origin), &["--layer", &layer(overlay, options)]);
    let peer = Peer::connect(&server.socket(), "disk");
    (server, peer)
}

fn refused(sandbox: &Sandbox, origin: &Path, overlay: &Path, options: &str, words: &str) {
    let arguments =
        ["serve", &stack(origin), "--layer", &layer(overlay, options), "--nbd", "unix:other.sock"];
    let printed = sandbox.run(&arguments).failed_with(1);
    assert!(printed.contains(words), "no \"{words}\" in: {printed}");
}

#[test]
fn writes_go_to_the_overlay_and_survive_a_restart() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let before = std::fs::read(&origin).expect("an origin");
    let overlay = sandbox.path("overlay.img");
    let mut model = before.clone();
    let writes = [(0, 512), (5 * 512, 3 * 512), (65536, 4096), (100 * 512, 300 * 512), (LEN - 512, 512)];
    {
        let (mut server, mut peer) = serve(&sandbox, &origin, &overlay, ",create,chunk=64K");
        for (number, (at, len)) in writes.into_iter().enumerate() {
            let data = noise(number as u64, len);
            peer.write(at as u64, &data, CommandFlags::empty()).expect("a write");
            model[at..at + len].copy_from_slice(&data);
        }
        assert!(peer.read(0, LEN as u64).expect("a read") == model);
        peer.disconnect();
        server.terminate();
    }
    let (_server, mut peer) = serve(&sandbox, &origin, &overlay, "");
    assert!(peer.read(0, LEN as u64).expect("a read") == model, "after the restart");
    assert!(std::fs::read(&origin).expect("an origin") == before, "the origin was written to");
}

#[test]
fn a_killed_server_loses_no_acknowledged_write() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let mut model = std::fs::read(&origin).expect("an origin");
    let overlay = sandbox.path("overlay.img");
    for round in 0..3u64 {
        let (mut server, mut peer) = serve(&sandbox, &origin, &overlay, ",create");
        assert!(peer.read(0, LEN as u64).expect("a read") == model, "in round {round}");
        for number in 0..20u64 {
            let at = ((round * 20 + number) * 7919 % 8000 * 512) as usize;
            let data = noise(round * 100 + number, 1024);
            peer.write(at as u64, &data, CommandFlags::empty()).expect("a write");
            model[at..at + 1024].copy_from_slice(&data);
        }
        if round == 1 {
            peer.flush().expect("a flush");
        }
        server.kill();
    }
    let (_server, mut peer) = serve(&sandbox, &origin, &overlay, "");
    assert!(peer.read(0, LEN as u64).expect("a read") == model);
}

#[test]
fn two_overlays_share_an_origin_and_an_overlay_has_one_server() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let (one, other) = (sandbox.path("one.img"), sandbox.path("other.img"));
    let (_first, mut peer) = serve(&sandbox, &origin, &one, ",create");
    peer.write(0, &[1; 4096], CommandFlags::empty()).expect("a write");
    refused(&sandbox, &origin, &one, "", "in use");
    let socket = sandbox.path("other.sock");
    let nbd = format!("unix:{}", socket.display());
    let words = [stack(&origin), layer(&other, ",create")];
    let mut command =
        sandbox.blockyard(&["serve", &words[0], "--layer", &words[1], "--name", "o", "--nbd", &nbd]);
    let _second = sandbox.start(&mut command, 1);
    let mut second = Peer::connect(&socket, "o");
    second.write(0, &[2; 4096], CommandFlags::empty()).expect("a write");
    assert_eq!(peer.read(0, 4096).expect("a read"), [1; 4096]);
    assert_eq!(second.read(0, 4096).expect("a read"), [2; 4096]);
}

#[test]
fn an_overlay_is_refused_over_anything_but_its_origin() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let overlay = sandbox.path("overlay.img");
    refused(&sandbox, &origin, &overlay, "", "No such file");
    drop(serve(&sandbox, &origin, &overlay, ",create,chunk=8K"));
    let copy = sandbox.path("copy.img");
    std::fs::copy(&origin, &copy).expect("a copy");
    drop(serve(&sandbox, &copy, &overlay, ""));
    let file = std::fs::File::options().write(true).open(&copy).expect("the copy");
    file.write_all_at(&[0x55; 4096], LEN as u64 - 4096).expect("a write");
    refused(&sandbox, &copy, &overlay, "", "belongs to another device");
    file.set_len(LEN as u64 / 2).expect("a shorter file");
    refused(&sandbox, &copy, &overlay, "", "belongs to a device of size 4M");
    refused(&sandbox, &origin, &overlay, ",create,chunk=64K", "its chunk is 8K");
    refused(&sandbox, &origin, &sandbox.noise("noise.img", LEN), "", "is not an overlay");
    refused(&sandbox, &origin, &sandbox.image("empty.img", 0), "", "is not an overlay");
    let made = format!("file:{},size=4M,create", sandbox.path("new.img").display());
    let layer = layer(&overlay, "");
    let printed = sandbox.run(&["serve", &made, "--layer", &layer, "--nbd", "unix:s"]).failed_with(1);
    assert!(printed.contains("only read"), "{printed}");
}

#[test]
fn a_damaged_header_is_replaced_by_its_copy_and_two_are_refused() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let overlay = sandbox.path("overlay.img");
    {
        let (mut server, mut peer) = serve(&sandbox, &origin, &overlay, ",create");
        peer.write(8192, &[7; 512], CommandFlags::FUA).expect("a write");
        peer.disconnect();
        server.terminate();
    }
    let file = std::fs::File::options().write(true).open(&overlay).expect("the overlay");
    file.write_all_at(&[0xff; 4096], 0).expect("damage");
    {
        let (_server, mut peer) = serve(&sandbox, &origin, &overlay, "");
        assert_eq!(peer.read(8192, 512).expect("a read"), [7; 512]);
    }
    file.write_all_at(&[0xff; 64], 4096 + 32).expect("damage");
    refused(&sandbox, &origin, &overlay, "", "damaged");
    file.set_len(MIB).expect("a shorter file");
}

#[test]
fn zeroes_and_discards_cover_the_origin_and_free_space() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let mut model = std::fs::read(&origin).expect("an origin");
    let overlay = sandbox.path("overlay.img");
    let (_server, mut peer) = serve(&sandbox, &origin, &overlay, ",create");
    peer.write(MIB, &noise(1, 1 << 20), CommandFlags::empty()).expect("a write");
    let full = std::fs::metadata(&overlay).expect("the overlay").blocks();
    peer.zero(0, MIB + 4096, CommandFlags::empty()).expect("zeroes");
    peer.zero(3 * MIB + 512, 512, CommandFlags::empty()).expect("zeroes");
    peer.trim(MIB + 4096, MIB - 4096).expect("a discard");
    model[..2 << 20].fill(0);
    model[(3 << 20) + 512..(3 << 20) + 1024].fill(0);
    assert!(peer.read(0, LEN as u64).expect("a read") == model);
    peer.flush().expect("a flush");
    let left = std::fs::metadata(&overlay).expect("the overlay").blocks();
    assert!(left + (900 << 1) < full, "{left} of {full} sectors are still allocated");
}

#[test]
fn a_device_longer_than_its_origin_reads_as_zeroes_past_it() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", MIB as usize + 512);
    let before = std::fs::read(&origin).expect("an origin");
    let overlay = sandbox.path("overlay.img");
    let (_server, mut peer) = serve(&sandbox, &origin, &overlay, ",create,size=2M");
    let mut model = before;
    model.resize(2 << 20, 0);
    assert!(peer.read(0, 2 * MIB).expect("a read") == model);
    peer.write(MIB + 1024, &[9; 512], CommandFlags::empty()).expect("a write");
    model[(1 << 20) + 1024..(1 << 20) + 1536].fill(9);
    assert!(peer.read(0, 2 * MIB).expect("a read") == model);
    let shown = sandbox.run(&["show", "disk"]).ok();
    for words in ["overlay.img", "overlay holds", "4K"] {
        assert!(shown.contains(words), "no {words} in:\n{shown}");
    }
}

#[test]
fn many_connections_write_partial_chunks_concurrently() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let mut model = std::fs::read(&origin).expect("an origin");
    let overlay = sandbox.path("overlay.img");
    let layers = layer(&overlay, ",create,chunk=64K");
    let server = sandbox.serve(&stack(&origin), &["--layer", &layers, "--queues", "2"]);
    let socket = server.socket();
    // Each connection writes every fourth sector: every chunk is completed by one of them, and written by
    // all.
    std::thread::scope(|scope| {
        for number in 0..4u8 {
            let socket = &socket;
            scope.spawn(move || {
                let mut peer = Peer::connect(socket, "disk");
                for sector in (u64::from(number)..2048).step_by(4) {
                    peer.write(sector * 512, &[number + 1; 512], CommandFlags::empty()).expect("a write");
                }
                peer.flush().expect("a flush");
            });
        }
    });
    for sector in 0..2048 {
        model[sector * 512..(sector + 1) * 512].fill((sector % 4) as u8 + 1);
    }
    let mut peer = Peer::connect(&socket, "disk");
    assert!(peer.read(0, LEN as u64).expect("a read") == model);
}

/// Writes the result of a loss of the page cache: each page of the file is that of the last flush, or the
/// present one.
fn lose_page_cache(overlay: &Path, flushed: &[u8], now: &[u8], is_new: impl Fn(usize) -> bool) {
    let file = std::fs::File::options().write(true).open(overlay).expect("the overlay");
    for (page, (old, new)) in flushed.chunks(4096).zip(now.chunks(4096)).enumerate() {
        let content = if is_new(page) { new } else { old };
        file.write_all_at(content, page as u64 * 4096).expect("a page");
    }
}

#[test]
fn an_overlay_whose_page_cache_is_lost_reads_as_before_or_as_written_and_never_as_zeroes() {
    let sandbox = Sandbox::default();
    let origin = sandbox.noise("origin.img", LEN);
    let overlay = sandbox.path("overlay.img");
    let mut model = std::fs::read(&origin).expect("an origin");
    let (mut server, mut peer) = serve(&sandbox, &origin, &overlay, ",create");
    let write = |peer: &mut Peer, model: &mut [u8], at: usize, len: usize| {
        let data = noise((at + len) as u64, len);
        peer.write(at as u64, &data, CommandFlags::empty()).expect("a write");
        model[at..at + len].copy_from_slice(&data);
    };
    (0..20).for_each(|number| write(&mut peer, &mut model, number * 40960, 8192));
    peer.flush().expect("a flush");
    let (before, flushed) = (model.clone(), std::fs::read(&overlay).expect("the overlay"));
    // Writes over flushed data, beside it and partly over it, and then over these writes.
    (0..60).for_each(|number| write(&mut peer, &mut model, number * 20480 + 512, 6144));
    (0..60).for_each(|number| write(&mut peer, &mut model, number * 20480 + 1024, 512));
    peer.zero(3 * MIB, 16384, CommandFlags::empty()).expect("zeroes");
    model[3 << 20..(3 << 20) + 16384].fill(0);
    server.kill();
    let now = std::fs::read(&overlay).expect("the overlay");
    let mut losses: Vec<Box<dyn Fn(usize) -> bool>> = vec![
        // A kill, which loses nothing; nothing reached the disk; everything but the data did.
        Box::new(|_| true),
        Box::new(|_| false),
        Box::new(|page| page < 256),
    ];
    losses.extend((1..6).map(|seed| -> Box<dyn Fn(usize) -> bool> {
        let chance = noise(seed, LEN / 4096 + 256);
        Box::new(move |page| chance[page] % 4 < 3)
    }));
    for (number, is_new) in losses.iter().enumerate() {
        lose_page_cache(&overlay, &flushed, &now, is_new);
        let (mut server, mut peer) = serve(&sandbox, &origin, &overlay, "");
        let read = peer.read(0, LEN as u64).expect("a read");
        let sectors = before.chunks(512).zip(model.chunks(512)).zip(read.chunks(512)).enumerate();
        for (sector, ((before, after), read)) in sectors {
            let is_one = read == after || number > 0 && read == before;
            assert!(
                is_one,
                "loss {number}: sector {sector} is neither what was flushed nor what was written"
            );
        }
        peer.disconnect();
        server.terminate();
    }
}
