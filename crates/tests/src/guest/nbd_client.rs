//! The kernel's NBD client, attached by `nbd-client`, on our server.

use super::disk::{Disk, module, tool};
use super::{Done, Test, test};
use crate::server::{Sandbox, Server};
use crate::tools::{PATIENCE, until};

/// The tests of this module.
pub const TESTS: &[Test] = &[
    test(
        "nbd/client",
        "what is written through nbd-client and /dev/nbd0 reads back, over four connections",
        client,
    ),
    test("nbd/client_tcp", "the kernel's client over TCP, with four connections", tcp),
    test("nbd/client_limits", "size, block size and read-only are those of the device", limits),
    test("nbd/client_trim", "discard, write zeroes and flush reach the file", trim),
    test("nbd/client_mount", "ext4 on it can be created, mounted, filled, checked and read again", mounted),
    test("nbd/client_partitions", "partitions on it can be created and used (blktests nbd/002)", partitions),
    test(
        "nbd/client_clear",
        "disconnecting under a mounted file system hangs nothing (blktests nbd/003)",
        clear,
    ),
];

/// `/dev/nbd0` attached to an export; disconnected when dropped.
struct Attached {
    disk: Disk,
}

impl Attached {
    #[track_caller]
    fn new(server: &Server, more: &[&str]) -> Attached {
        let socket = server.socket();
        let socket = socket.to_str().expect("a plain path");
        tool(&[&["nbd-client", "-unix", socket, "/dev/nbd0", "-N", "disk"], more].concat()).ok();
        let disk = Disk::at("/dev/nbd0");
        until(PATIENCE, || (!disk.is_empty()).then_some(())).expect("it gets a size");
        Attached { disk }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let outcome = tool(&["nbd-client", "-d", "/dev/nbd0"]);
        if !std::thread::panicking() {
            outcome.ok();
            let pid = std::path::Path::new("/sys/block/nbd0/pid");
            until(PATIENCE, || (!pid.exists()).then_some(())).expect("it disconnects");
        }
    }
}

fn attach(sandbox: &Sandbox, stack: &str, more: &[&str]) -> Result<(Server, Attached), super::Skip> {
    module(&["nbd", "nbds_max=4"])?;
    let server = sandbox.serve(stack, &[]);
    let attached = Attached::new(&server, more);
    Ok((server, attached))
}

fn client() -> Done {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 32 << 20);
    let (_server, nbd) = attach(&sandbox, &format!("file:{}", image.display()), &["-C", "4"])?;
    nbd.disk.verify(&["--size=16M", "--bsrange=4k-64k", "--numjobs=1"]);
    Ok(())
}

fn tcp() -> Done {
    module(&["nbd", "nbds_max=4"])?;
    // A guest's loopback interface may be down; this enables it.
    tool(&["ip", "link", "set", "lo", "up"]);
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 16 << 20);
    let stack = format!("file:{}", image.display());
    let words = ["serve", &stack, "--name", "disk", "--nbd", "tcp:127.0.0.1:10809"];
    let _server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    tool(&["nbd-client", "127.0.0.1", "10809", "/dev/nbd0", "-N", "disk", "-C", "4"]).ok();
    let nbd = Attached { disk: Disk::at("/dev/nbd0") };
    nbd.disk.verify(&["--size=4M"]);
    Ok(())
}

fn limits() -> Done {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 10 << 20);
    let (_server, nbd) =
        attach(&sandbox, &format!("file:{},block=4096,ro", image.display()), &["-b", "4096"])?;
    assert_eq!(nbd.disk.len(), 10 << 20);
    assert_eq!(nbd.disk.attribute("queue/logical_block_size"), "4096");
    assert_eq!(nbd.disk.attribute("ro"), "1");
    Ok(())
}

fn trim() -> Done {
    use std::os::unix::fs::MetadataExt;
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 16 << 20);
    let (_server, nbd) = attach(&sandbox, &format!("file:{}", image.display()), &[])?;
    let used = || std::fs::metadata(&image).expect("it exists").blocks() * 512;
    nbd.disk.load(&["--rw=write", "--bs=64k", "--end_fsync=1"]).ok();
    assert!(used() >= 8 << 20, "{} bytes after writing 8 MiB", used());
    tool(&["blkdiscard", nbd.disk.path()]).ok();
    assert!(used() < 1 << 20, "{} bytes after discarding all", used());
    Ok(())
}

fn mounted() -> Done {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 64 << 20);
    let (_server, nbd) = attach(&sandbox, &format!("file:{}", image.display()), &[])?;
    nbd.disk.format("ext4");
    let noise = crate::server::noise(7, 4 << 20);
    let mounted = nbd.disk.mount(&sandbox.path("mnt"));
    std::fs::write(mounted.at.join("file"), &noise).expect("room for it");
    mounted.unmount();
    nbd.disk.check("ext4");
    let mounted = nbd.disk.mount(&sandbox.path("mnt"));
    assert!(std::fs::read(mounted.at.join("file")).expect("the file") == noise, "it reads back otherwise");
    mounted.unmount();
    Ok(())
}

fn partitions() -> Done {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 64 << 20);
    let (_server, nbd) = attach(&sandbox, &format!("file:{}", image.display()), &[])?;
    // sfdisk asks the kernel to read the table again at its end.
    let script = sandbox.text("table", "label: gpt\nsize=16M\nsize=16M\n");
    let line = format!("sfdisk -q --wipe always {} <{}", nbd.disk.path(), script.display());
    tool(&["sh", "-c", &line]).ok();
    let second = Disk::at("/dev/nbd0p2");
    second.verify(&["--size=4M"]);
    Ok(())
}

fn clear() -> Done {
    let sandbox = Sandbox::default();
    let image = sandbox.image("disk.img", 64 << 20);
    let (_server, nbd) = attach(&sandbox, &format!("file:{}", image.display()), &[])?;
    nbd.disk.format("ext4");
    let mounted = nbd.disk.mount(&sandbox.path("mnt"));
    std::fs::write(mounted.at.join("file"), [7; 4096]).expect("room for it");
    tool(&["nbd-client", "-d", nbd.disk.path()]).ok();
    // Unwritten data is lost, so unmounting may report an error, but it returns and frees the device.
    drop(mounted);
    Ok(())
}
