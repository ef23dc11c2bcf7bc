//! Memory that a server uses for a load of the kernel's, and returns after it.

use blockyard_tests::disk::{Loop, missing_file_system, missing_loop};
use blockyard_tests::server::{Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, command, missing, skip, until};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Limit under load: two queues of one device and the process itself, without the mapped program, which is
/// five times as large without optimisation.
const LOADED_MAX: u64 = 24 * MIB;
/// Limit when idle: memory for the next request of each queue, and the process itself.
const RESTING_MAX: u64 = 12 * MIB;
/// Longest time after the load until memory is returned.
const BACK_MAX: Duration = Duration::from_secs(3);

/// Runs a load like a file system's writeback: large requests in order, small ones at random.
fn load(folder: &str, rw: &str, size: &str) -> std::process::Child {
    let words =
        ["--name=load", "--size=160M", "--ioengine=libaio", "--iodepth=64", "--direct=1", "--numjobs=2"];
    let more = ["--time_based", "--runtime=2", "--fallocate=none"];
    let (folder, rw, size) = (format!("--directory={folder}"), format!("--rw={rw}"), format!("--bs={size}"));
    let all = [&["fio"][..], &words, &more, &[&folder, &rw, &size]].concat();
    command(&all).stdout(std::process::Stdio::null()).spawn().expect("fio starts")
}

/// Returns the most anonymous memory of a server while a load runs.
fn most(server: &Server, mut load: std::process::Child) -> u64 {
    let mut most = 0;
    loop {
        most = most.max(server.anonymous());
        if let Some(status) = load.try_wait().expect("fio") {
            assert!(status.success(), "fio: {status}");
            return most;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_loop_device_under_a_file_system_uses_little_memory_and_frees_it() {
    if missing_loop() || missing_file_system("ext4") || missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("image", 512 * MIB);
    for options in ["direct=off", "direct=on"] {
        let disk = Loop::serve(&sandbox, "disk", &format!("file:image,{options}"), &["--queues", "2"]);
        disk.format("ext4");
        let mount = disk.mount("ext4");
        let folder = mount.path().to_str().expect("UTF-8");
        for (rw, size) in [("write", "1M"), ("randrw", "4k"), ("randwrite", "64k"), ("read", "1M")] {
            let most = most(&disk.server, load(folder, rw, size));
            println!("{options}, {rw} of {size}: {} KiB", most / 1024);
            assert!(most <= LOADED_MAX, "{options}, {rw} of {size}: {} MiB are resident", most / MIB);
        }
        let start = Instant::now();
        let back = || (disk.server.anonymous() <= RESTING_MAX).then_some(());
        until(BACK_MAX, back).unwrap_or_else(|| panic!("{} KiB stay", disk.server.anonymous() / 1024));
        println!("{options}: {} KiB after {:?}", disk.server.anonymous() / 1024, start.elapsed());
        mount.unmount();
    }
}

#[test]
fn registered_memory_does_not_grow_with_changes_and_is_freed_with_the_last_direct_file() {
    let sandbox = Sandbox::default();
    sandbox.image("image", 4 * MIB);
    let server = sandbox.serve("file:image,direct=off", &["--queues", "2"]);
    let mut peer = blockyard_tests::peer::Peer::connect(&server.socket(), "disk");
    let resting = server.pinned();
    if !sandbox.run(&["set", "disk", "direct=on"]).status.success() {
        return skip("no direct I/O here");
    }
    peer.read(0, 4096).expect("a read");
    let pinned = server.pinned();
    for _ in 0..6 {
        for word in ["direct=off", "direct=on"] {
            sandbox.run(&["set", "disk", word]).ok();
            peer.write(4096, &[7; 8192], proto::nbd::CommandFlags::FUA).expect("a write");
            assert_eq!(peer.read(4096, 8192).expect("a read"), [7; 8192]);
        }
    }
    assert_eq!(server.pinned(), pinned, "the same memory serves after each change");
    sandbox.run(&["set", "disk", "direct=off"]).ok();
    until(PATIENCE, || (server.pinned() == resting).then_some(())).expect("it is unpinned");
}
