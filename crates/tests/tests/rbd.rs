//! `rbd:` devices on a real Ceph of one node: what clients of our exports write is what `rbd export` reads,
//! also after a kill; sizes, snapshots, the exclusive lock and blocklisting.
//!
//! `./x ceph test` runs them. Without `BLOCKYARD_CEPH`, the folder of a cluster of `./x ceph up`, they are
//! skipped: installing and starting one takes longer than the rest of a test run allows.

use blockyard_tests::ceph::Image;
use blockyard_tests::disk::{Loop, missing_loop};
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{fio_verify, serve_as};
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, missing, run_within, until};
use proto::nbd::CommandFlags;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn peer(server: &Server) -> Peer {
    Peer::connect(&server.socket(), "disk")
}

#[test]
fn fio_verifies_over_nbd_on_both_engines() {
    let Some(image) = Image::new("fio", 64, &[]) else { return };
    if missing(&["fio"]) {
        return;
    }
    for engine in [Engine::IoUring, Engine::Epoll] {
        let sandbox = Sandbox::new(engine);
        let mut server = serve_as(&sandbox, "disk", &image.stack(""), &[]);
        fio_verify(&server, "--size=32M --bs=512-256k --iodepth=16");
        fio_verify(&server, "--size=16M --bs=4k --iodepth=32 --numjobs=2 --offset_increment=16M");
        server.terminate();
    }
}

#[test]
fn fio_verifies_with_each_cache() {
    let Some(image) = Image::new("cached", 32, &[]) else { return };
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    for cache in ["writeback", "writearound"] {
        let mut server = serve_as(&sandbox, "disk", &image.stack(&format!(",cache={cache}")), &[]);
        fio_verify(&server, "--size=16M --bs=4k-64k --iodepth=16 --fsync=16");
        server.terminate();
    }
}

#[test]
fn another_client_reads_what_was_written_trimmed_and_zeroed() {
    let Some(image) = Image::new("bytes", 16, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut server = serve_as(&sandbox, "disk", &image.stack(""), &[]);
    let mut peer = peer(&server);
    let mut model = vec![0; 16 << 20];
    for (offset, len) in [(0, 1), (4095, 2), (777, 100_000), (4 * MIB - 512, 1024), (6 * MIB, 5 << 20)] {
        let data = noise(offset, len);
        peer.write(offset, &data, CommandFlags::empty()).unwrap();
        model[offset as usize..][..len].copy_from_slice(&data);
    }
    peer.zero(7 * MIB + 4096, MIB, CommandFlags::empty()).unwrap();
    model[(7 * MIB + 4096) as usize..][..1 << 20].fill(0);
    peer.zero(9 * MIB, 65536, CommandFlags::NO_HOLE).unwrap();
    model[9 << 20..][..65536].fill(0);
    peer.flush().unwrap();
    assert!(peer.read(0, 16 * MIB).unwrap() == model, "a client reads what it wrote");
    peer.disconnect();
    server.terminate();
    assert!(image.exported(&sandbox, "") == model, "another client reads what was written");
}

#[test]
fn acknowledged_writes_survive_a_kill_without_a_flush_or_with_fua() {
    let Some(image) = Image::new("killed", 16, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    for (round, (cache, flags)) in
        [("none", CommandFlags::empty()), ("writeback", CommandFlags::FUA)].into_iter().enumerate()
    {
        let data = noise(round as u64 + 1, 3 << 20);
        let mut server = serve_as(&sandbox, "disk", &image.stack(&format!(",cache={cache}")), &[]);
        peer(&server).write(MIB + 512, &data, flags).unwrap();
        server.kill();
        let exported = image.exported(&sandbox, "");
        assert!(exported[(MIB + 512) as usize..][..data.len()] == data, "cache={cache}");
    }
}

#[test]
fn block_status_lists_what_is_allocated() {
    let Some(image) = Image::new("sparse", 64, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let server = serve_as(&sandbox, "disk", &image.stack(""), &[]);
    peer(&server).write(20 * MIB, &noise(1, 4 << 20), CommandFlags::empty()).unwrap();
    if missing(&["nbdinfo"]) {
        return;
    }
    let map = image.run(&["nbdinfo", "--map", "--json", server.uri()]);
    let map: Vec<serde_json::Value> = serde_json::from_str(&map).unwrap();
    let parts =
        map.iter().map(|part| [&part["offset"], &part["length"], &part["type"]].map(|v| v.as_u64().unwrap()));
    let expected = [[0, 20 * MIB, 3], [20 * MIB, 4 * MIB, 0], [24 * MIB, 40 * MIB, 3]];
    assert_eq!(parts.collect::<Vec<_>>(), expected);
}

#[test]
fn a_file_system_on_a_loop_device_survives_a_new_mount() {
    let Some(image) = Image::new("files", 128, &[]) else { return };
    if missing_loop() {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut disk = Loop::serve(&sandbox, "disk", &image.stack(""), &[]);
    disk.format("ext4");
    let data = noise(7, 8 << 20);
    let mount = disk.mount("ext4");
    std::fs::write(mount.path().join("data"), &data).unwrap();
    mount.unmount();
    disk.check("ext4");
    let mount = disk.mount("ext4");
    assert!(std::fs::read(mount.path().join("data")).unwrap() == data);
    mount.unmount();
    disk.server.terminate();
}

fn size_of(sandbox: &Sandbox) -> String {
    let shown = sandbox.run(&["show", "disk"]).ok();
    shown.lines().find(|line| line.starts_with("size")).unwrap_or_default().to_owned()
}

#[test]
fn a_device_is_resized_by_us_and_follows_other_clients() {
    let Some(image) = Image::new("resized", 16, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut server = serve_as(&sandbox, "disk", &image.stack(""), &[]);
    let reported = |mib: u64| image.rbd(&["info", "rbd/resized"]).contains(&format!("size {mib} MiB"));
    sandbox.run(&["resize", "disk", "32M"]).ok();
    assert!(reported(32), "{}", image.rbd(&["info", "rbd/resized"]));
    let data = noise(3, 4096);
    peer(&server).write(31 * MIB, &data, CommandFlags::empty()).unwrap();
    let why = sandbox.run(&["resize", "disk", "8M"]).failed();
    assert!(why.contains("shrink"), "{why}");
    sandbox.run(&["resize", "disk", "8M", "--shrink"]).ok();
    assert!(reported(8));
    for mib in [64, 4] {
        image.rbd(&["resize", "--allow-shrink", "--size", &format!("{mib}M"), "rbd/resized"]);
        let follows = || size_of(&sandbox).contains(&format!("{mib}M")).then_some(());
        until(PATIENCE, follows).unwrap_or_else(|| panic!("{mib}M: {}", size_of(&sandbox)));
    }
    peer(&server).write(3 * MIB, &data, CommandFlags::empty()).unwrap();
    server.terminate();
}

#[test]
fn a_snapshot_stays_as_it_is_while_its_image_is_written() {
    let Some(image) = Image::new("snapped", 16, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let server = serve_as(&sandbox, "disk", &image.stack(""), &[]);
    let mut writer = peer(&server);
    let (before, after) = (noise(1, 5 << 20), noise(2, 5 << 20));
    writer.write(MIB, &before, CommandFlags::empty()).unwrap();
    image.rbd(&["snap", "create", "rbd/snapped@monday"]);
    let frozen = serve_as(&sandbox, "frozen", &image.stack("@monday"), &[]);
    let mut reader = Peer::connect(&frozen.socket(), "frozen");
    for part in after.chunks(MIB as usize).enumerate() {
        writer.write(MIB + part.0 as u64 * MIB, part.1, CommandFlags::empty()).unwrap();
        assert!(reader.read(MIB, before.len() as u64).unwrap() == before);
    }
    assert!(reader.write(0, &[1; 512], CommandFlags::empty()).is_err(), "a snapshot is read-only");
    assert!(writer.read(MIB, after.len() as u64).unwrap() == after);
    assert!(image.exported(&sandbox, "@monday")[MIB as usize..][..before.len()] == before);
}

#[test]
fn an_image_is_created_once_with_its_object_size() {
    let Some(image) = Image::new("other", 1, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let stack = format!("rbd:rbd/made,size=24M,create,object_size=1M,conf={}", image.conf.display());
    for _ in 0..2 {
        let mut server = serve_as(&sandbox, "disk", &stack, &[]);
        peer(&server).write(0, &[5; 512], CommandFlags::empty()).unwrap();
        server.terminate();
    }
    let info = image.rbd(&["info", "rbd/made"]);
    assert!(info.contains("size 24 MiB in 24 objects"), "{info}");
    drop(Image { conf: image.conf.clone(), name: "made" });
}

#[test]
fn an_exclusive_image_is_refused_to_a_second_server() {
    let Some(image) = Image::new("locked", 8, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut first = serve_as(&sandbox, "disk", &image.stack(",exclusive"), &[]);
    let stack = image.stack(",exclusive");
    let refused =
        run_within(&mut sandbox.blockyard(&["serve", &stack, "--name", "second"]), PATIENCE).failed();
    assert!(refused.contains("acquiring the exclusive lock failed"), "{refused}");
    peer(&first).write(0, &noise(1, 4096), CommandFlags::empty()).unwrap();
    first.terminate();
    serve_as(&sandbox, "disk", &stack, &[]).terminate();
}

/// The client that lost the lock is blocklisted: its writes fail at once, and those of the other one stay.
#[test]
fn an_exclusive_image_is_taken_over_if_the_policy_says_so() {
    let Some(image) = Image::new("taken", 8, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut first = serve_as(&sandbox, "disk", &image.stack(",exclusive"), &[]);
    let mut loser = peer(&first);
    loser.write(0, &noise(1, 4096), CommandFlags::empty()).unwrap();
    let mut second = serve_as(&sandbox, "second", &image.stack(",exclusive,takeover=100ms"), &[]);
    let data = noise(2, 4096);
    let mut winner = Peer::connect(&second.socket(), "second");
    winner.write(0, &data, CommandFlags::empty()).unwrap();
    assert!(loser.write(0, &noise(3, 4096), CommandFlags::empty()).is_err(), "the lock is lost");
    assert!(winner.read(0, 4096).unwrap() == data);
    assert!(sandbox.run(&["show", "disk"]).ok().contains("this client is blocklisted"));
    winner.disconnect();
    second.terminate();
    assert!(image.exported(&sandbox, "")[..4096] == data);
    first.terminate_after_failed_flush("disk");
}

#[test]
fn a_blocklisted_client_fails_at_once_and_says_so() {
    let Some(image) = Image::new("fenced", 8, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut server = serve_as(&sandbox, "disk", &image.stack(""), &[]);
    let mut client = peer(&server);
    let data = noise(1, 4096);
    client.write(0, &data, CommandFlags::empty()).unwrap();
    let status = image.rbd(&["status", "rbd/fenced"]);
    let address = status.split("watcher=").nth(1).and_then(|rest| rest.split(' ').next()).expect(&status);
    image.run(&["ceph", "osd", "blocklist", "add", address]);
    // The monitor has accepted the blocklisting; the OSDs learn of it later.
    until(PATIENCE, || client.write(0, &data, CommandFlags::empty()).err()).expect("a write is refused");
    assert!(client.write(0, &noise(2, 4096), CommandFlags::empty()).is_err(), "a fenced client cannot write");
    let started = Instant::now();
    for _ in 0..100 {
        assert!(client.write(4096, &data, CommandFlags::empty()).is_err());
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(shown.contains("this client is blocklisted"), "{shown}");
    assert!(image.exported(&sandbox, "")[..4096] == data, "nothing was written after the fence");
    server.terminate_after_failed_flush("disk");
    image.run(&["ceph", "osd", "blocklist", "rm", address]);
}

#[test]
fn what_is_missing_is_named_with_a_fix() {
    let Some(image) = Image::new("errors", 1, &[]) else { return };
    let sandbox = Sandbox::new(Engine::IoUring);
    let conf = image.conf.display();
    for (stack, why) in [
        (format!("rbd:rbd/nothing,conf={conf}"), "opening the image failed"),
        (format!("rbd:nopool/errors,conf={conf}"), "ceph osd lspools"),
        (format!("rbd:rbd/errors,conf={conf}.missing"), "name the file with conf=FILE"),
        (format!("rbd:rbd/errors,id=nobody,conf={conf}"), "check the user, id=USER"),
    ] {
        let said = run_within(&mut sandbox.blockyard(&["serve", &stack]), PATIENCE).failed();
        assert!(said.contains(why), "{stack}: {said}");
    }
}
