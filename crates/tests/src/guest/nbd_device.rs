//! Our devices on the kernel's NBD client, without a listener: `--nbd-device`.

use super::disk::{Disk, module, tool};
use super::{Done, Test, soak, test};
use crate::server::{Sandbox, Server, noise};
use crate::tools::{PATIENCE, until, wait_within};
use std::path::Path;
use std::time::{Duration, Instant};

/// The tests of this module.
pub const TESTS: &[Test] = &[
    test(
        "nbd_device/verify",
        "what is written over four connections reads back, in several block sizes",
        verify,
    ),
    test(
        "nbd_device/kill",
        "a killed server's successor takes over under I/O: no error, no wrong byte",
        kill,
    ),
    test("nbd_device/mounted", "a file system survives its server being killed, and an upgrade", mounted),
    test("nbd_device/dead", "without a successor requests fail after the timeout, and not before", dead),
    test("nbd_device/resize", "a device that is served grows and shrinks", resize),
    test("nbd_device/del", "del detaches, and refuses a device that is mounted", del_mounted),
    test(
        "nbd_device/orphan",
        "a killed server's device is removed by name, and busy for other devices",
        orphan,
    ),
    test("nbd_device/limits", "size, block size, read-only and cache are those of the stack", limits),
    test("nbd_device/refusals", "each reason not to attach is reported, with what to do", refusals),
    soak("nbd_device/kill_soak", "a hundred servers killed under one load", kill_soak),
];

/// Serves a stack as `/dev/nbdN`.
fn serve(sandbox: &Sandbox, stack: &str, more: &[&str]) -> Server {
    let arguments = [&["serve", stack, "--name", "disk"], more].concat();
    sandbox.start(&mut sandbox.blockyard(&arguments), 1)
}

fn disk(server: &Server) -> Disk {
    let line = &server.ready()[0];
    let node = line.strip_prefix("disk nbd-device ").unwrap_or_else(|| panic!("{line}"));
    Disk::at(node)
}

fn image(sandbox: &Sandbox, len: u64) -> String {
    format!("file:{}", sandbox.image("disk.img", len).display())
}

fn nbd() -> Result<(), super::Skip> {
    module(&["nbd", "nbds_max=4"])
}

#[track_caller]
fn del(sandbox: &Sandbox) -> crate::tools::Outcome {
    sandbox.run(&["del", "disk"])
}

fn verify() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let server = serve(&sandbox, &image(&sandbox, 32 << 20), &["--nbd-device=0,connections=4"]);
    let disk = disk(&server);
    assert_eq!(disk.path(), "/dev/nbd0");
    assert_eq!(disk.attribute("backend"), "blockyard:disk/4");
    disk.verify(&["--size=16M", "--bsrange=4k-64k"]);
    disk.verify(&["--size=8M", "--bs=512k", "--iodepth=4"]);
    del(&sandbox).ok();
    Ok(())
}

/// Kills the server `times` times under a load, and verifies the data afterwards.
fn kill_under(seconds: u64, times: u32) -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let stack = image(&sandbox, 32 << 20);
    let attach = ["--nbd-device=,connections=2,timeout=1s"];
    let mut server = serve(&sandbox, &stack, &attach);
    let disk = disk(&server);
    let runtime = format!("--runtime={seconds}");
    let load = ["--rw=randrw", "--verify=crc32c", "--verify_fatal=1", "--verify_backlog=256", "--time_based"];
    let mut fio = disk.fio(&[&load[..], &[&runtime, "--size=16M"]].concat()).spawn().expect("fio starts");
    let pause = Duration::from_millis(seconds * 1000 / u64::from(times + 1));
    for _ in 0..times {
        std::thread::sleep(pause.min(Duration::from_secs(3)));
        server.kill();
        std::thread::sleep(Duration::from_millis(100));
        server = serve(&sandbox, &stack, &attach);
        assert_eq!(self::disk(&server), disk, "the successor has another device");
    }
    let status = wait_within(&mut fio, Duration::from_secs(seconds) + PATIENCE).expect("fio ends");
    assert!(status.success(), "fio: {status}");
    disk.verify(&["--size=4M"]);
    del(&sandbox).ok();
    Ok(())
}

fn kill() -> Done {
    kill_under(8, 4)
}

fn kill_soak() -> Done {
    kill_under(240, 100)
}

fn mounted() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let stack = image(&sandbox, 64 << 20);
    let mut server = serve(&sandbox, &stack, &["--nbd-device=,timeout=1s"]);
    let disk = disk(&server);
    disk.format("ext4");
    let content = noise(3, 4 << 20);
    let mounted = disk.mount(&sandbox.path("mnt"));
    std::fs::write(mounted.at.join("before"), &content).expect("room for it");
    server.kill();
    server = serve(&sandbox, &stack, &["--nbd-device"]);
    std::fs::write(mounted.at.join("between"), &content).expect("room for it");
    // A server that gets SIGTERM also leaves a mounted device to its successor: that is how it is upgraded.
    server.terminate();
    let server = serve(&sandbox, &stack, &["--nbd-device"]);
    std::fs::write(mounted.at.join("after"), &content).expect("room for it");
    mounted.unmount();
    disk.check("ext4");
    let mounted = disk.mount(&sandbox.path("mnt"));
    for name in ["before", "between", "after"] {
        assert!(
            std::fs::read(mounted.at.join(name)).expect("the file") == content,
            "{name} reads back otherwise"
        );
    }
    mounted.unmount();
    del(&sandbox).ok();
    drop(server);
    Ok(())
}

fn dead() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let stack = image(&sandbox, 8 << 20);
    let mut server = serve(&sandbox, &stack, &["--nbd-device=,timeout=1s,dead_conn_timeout=2s"]);
    let disk = disk(&server);
    let start = Instant::now();
    server.kill();
    let read =
        tool(&["dd", &format!("if={}", disk.path()), "of=/dev/null", "bs=4k", "count=1", "iflag=direct"]);
    assert!(read.stderr.contains("Input/output error"), "{read}");
    assert!(start.elapsed() >= Duration::from_millis(1500), "after {:?}", start.elapsed());
    // The device still exists: a later server takes it over.
    let server = serve(&sandbox, &stack, &["--nbd-device"]);
    assert_eq!(self::disk(&server), disk);
    disk.verify(&["--size=1M"]);
    del(&sandbox).ok();
    Ok(())
}

fn resize() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let server = serve(&sandbox, &image(&sandbox, 8 << 20), &["--nbd-device"]);
    let disk = disk(&server);
    disk.verify(&["--size=2M"]);
    sandbox.run(&["resize", "disk", "24M"]).ok();
    assert_eq!(disk.len(), 24 << 20);
    disk.verify(&["--offset=20M", "--size=4M"]);
    sandbox.run(&["resize", "disk", "4M", "--shrink"]).ok();
    assert_eq!(disk.len(), 4 << 20);
    disk.verify(&["--size=4M"]);
    del(&sandbox).ok();
    Ok(())
}

fn gone(disk: &Disk) -> bool {
    let pid = format!("/sys/block/{}/pid", disk.name());
    until(PATIENCE, || (!Path::new(&pid).exists()).then_some(())).is_some()
}

fn del_mounted() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 32 << 20);
    let stack = format!("file:{}", image.display());
    let server = serve(&sandbox, &stack, &["--nbd-device"]);
    let disk = disk(&server);
    disk.format("ext4");
    let mounted = disk.mount(&sandbox.path("mnt"));
    let refusal = del(&sandbox).failed_with(1);
    assert!(refusal.contains("is mounted or part of another device (unmount it first)"), "{refusal}");
    std::fs::write(mounted.at.join("file"), b"still there").expect("it is still served");
    mounted.unmount();
    // Through the page cache, without a sync: it is written before the device is removed.
    let written =
        tool(&["dd", "if=/dev/zero", &format!("of={}", disk.path()), "bs=1M", "count=2", "conv=notrunc"]);
    written.ok();
    del(&sandbox).ok();
    assert!(gone(&disk));
    let bytes = std::fs::read(&image).expect("the image");
    assert!(bytes[..2 << 20].iter().all(|byte| *byte == 0), "what was written has not come");
    Ok(())
}

fn orphan() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let mut server = serve(&sandbox, "ram:8M", &["--nbd-device=1"]);
    let disk = disk(&server);
    server.kill();
    let stranger = sandbox.run(&["serve", "ram:8M", "--name", "other", "--nbd-device=1"]).failed_with(1);
    assert!(stranger.contains("/dev/nbd1 is attached already as \"blockyard:disk/"), "{stranger}");
    del(&sandbox).ok();
    assert!(gone(&disk));
    let missing = del(&sandbox).failed_with(1);
    assert!(missing.contains("disk"), "{missing}");
    Ok(())
}

fn limits() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 10 << 20);
    let stack = format!("file:{},block=4096,ro", image.display());
    let server = serve(&sandbox, &stack, &["--nbd-device"]);
    let disk = disk(&server);
    assert_eq!(disk.len(), 10 << 20);
    assert_eq!(disk.attribute("queue/logical_block_size"), "4096");
    assert_eq!(disk.attribute("ro"), "1");
    assert_eq!(disk.attribute("queue/write_cache"), "write back");
    let shown = sandbox.run(&["show", "disk"]).ok();
    assert!(shown.contains(disk.path()), "{shown}");
    del(&sandbox).ok();
    drop(server);
    Ok(())
}

fn refusals() -> Done {
    nbd()?;
    let sandbox = Sandbox::default();
    let refused = |more: &[&str]| sandbox.run(&[&["serve"], more].concat()).failed_with(1);
    let far = refused(&["ram:1M", "--nbd-device=2000000"]);
    assert!(far.contains("choose a smaller one"), "{far}");
    let zoned = refused(&["null:1G,zoned", "--nbd-device"]);
    assert!(zoned.contains("it is a zoned device"), "{zoned}");
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];
    let run = sandbox.path("nobody");
    std::fs::create_dir(&run).expect("a folder");
    std::os::unix::fs::chown(&run, Some(65534), Some(65534)).expect("root may");
    std::fs::set_permissions(sandbox.path("."), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .expect("root may");
    let binary = crate::server::binary().to_str().expect("a plain path");
    let words = [&nobody[..], &[binary, "serve", "ram:1M", "--nbd-device"]].concat();
    let outcome = crate::tools::run(crate::tools::command(&words).env("BLOCKYARD_RUN", &run));
    let rights = outcome.failed();
    assert!(rights.contains("CAP_SYS_ADMIN"), "{rights}");
    // If the driver is missing the kernel loads it when it can; the model tests the message when it cannot.
    Ok(())
}
