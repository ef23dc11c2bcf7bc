//! Foreign clients of vhost-user exports, without a virtual machine: the block driver `virtio-blk-vhost-user` in
//! qemu-io and qemu-img, and blkio-bench. Both drive virtqueues with libblkio.
//!
//! `./x test` fetches the programs to `target/foreign/vhost-clients`.

use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::tools::{run, skip};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names a directory with the programs instead of the one that `./x test` fetches.
const FOLDER: &str = "BLOCKYARD_VHOST_CLIENTS";
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Length of the device.
const LEN: usize = 32 * MIB;

/// Returns the directory of the programs; `None`: it is missing, and the calling test is skipped.
fn clients() -> Option<PathBuf> {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).or_else(|| {
        // This program is target/PROFILE/deps/NAME.
        let own = std::env::current_exe().ok()?;
        Some(own.ancestors().nth(3)?.join("foreign/vhost-clients"))
    });
    let found = folder.filter(|folder| folder.join("blkio-bench").is_file());
    if found.is_none() {
        skip("no blkio-bench and qemu-io with virtio-blk-vhost-user (./x test fetches them)");
    }
    found
}

/// A served file, and its clients.
struct Rig {
    _server: Server,
    sandbox: Sandbox,
    clients: PathBuf,
    file: PathBuf,
}

impl Rig {
    /// Serves a file of `fill`, with these options of the export; `None`: there are no clients.
    fn new(fill: u8, options: &str) -> Option<Rig> {
        let clients = clients()?;
        let sandbox = Sandbox::new(Engine::Auto);
        let file = sandbox.path("disk.img");
        std::fs::write(&file, vec![fill; LEN]).expect("a file in the sandbox");
        let stack = format!("file:{},format=raw", file.display());
        let export = format!("unix:{}{options}", sandbox.path("vm.sock").display());
        let words = ["serve", &stack, "--vhost-user", &export, "--name", "disk", "--queues", "2"];
        let server = sandbox.start(&mut sandbox.blockyard(&words), 1);
        Some(Rig { _server: server, sandbox, clients, file })
    }

    fn client(&self, name: &str) -> Command {
        self.sandbox.command(self.clients.join(name))
    }

    /// The options of QEMU's block driver.
    fn image(&self) -> String {
        let socket = self.sandbox.path("vm.sock");
        format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", socket.display())
    }

    /// A run of qemu-io with these commands.
    fn qemu_io(&self, commands: &[&str]) -> Command {
        let mut command = self.client("qemu-io");
        command.args(["--image-opts", &self.image()]);
        commands.iter().for_each(|one| {
            command.args(["-c", one]);
        });
        command
    }

    /// A run of qemu-img bench with 20,000 requests of 4 KiB.
    fn qemu_img_bench(&self, more: &[&str]) -> Command {
        let mut command = self.client("qemu-img");
        command.args(["bench", "--image-opts", "-t", "none", "-c", "20000", "-d", "32", "-s", "4096"]);
        command.args(more).arg(self.image());
        command
    }

    /// A run of blkio-bench for a second.
    fn blkio_bench(&self, more: &[&str]) -> Command {
        let mut command = self.client("blkio-bench");
        command.args(["--runtime=1"]).args(more).arg("virtio-blk-vhost-user");
        command.arg(format!("path={}", self.sandbox.path("vm.sock").display()));
        command
    }

    /// A counter of the export.
    fn counter(&self, name: &str) -> u64 {
        let text = self.sandbox.run(&["show", "disk", "--json"]).ok();
        let key = format!("\"{name}\":");
        let (_, after) = text.split_once(&key).unwrap_or_else(|| panic!("no {name} in {text}"));
        let number: String = after.trim_start().chars().take_while(char::is_ascii_digit).collect();
        number.parse().expect("a number")
    }
}

#[track_caller]
fn assert_filled(file: &Path, parts: &[(usize, usize, u8)]) {
    let bytes = std::fs::read(file).expect("the served file");
    assert_eq!(bytes.len(), LEN);
    for &(offset, len, byte) in parts {
        let wrong = bytes[offset..offset + len].iter().position(|one| *one != byte);
        assert_eq!(wrong.map(|at| offset + at), None, "{len} bytes at {offset} are {byte}");
    }
}

#[test]
fn qemu_io_writes_patterns_and_verifies_them() {
    let Some(rig) = Rig::new(0x11, "") else { return };
    let text = run(&mut rig.qemu_io(&[
        "length",
        "read -P 0x11 0 1M",
        "write -P 0xa5 4k 64k",
        "write -P 0x5a 1M 3M",
        "writev -P 0x77 8M 4k 8k 512 512",
        "write -z 8k 4k",
        "discard 2M 1M",
        "aio_write -P 0x33 16M 1M",
        "aio_write -P 0x44 17M 1M",
        "aio_flush",
        "flush",
        "read -P 0xa5 4k 4k",
        "read -P 0 8k 4k",
        "read -P 0xa5 12k 56k",
        "read -P 0x33 16M 1M",
        "read -P 0x44 17M 1M",
    ]))
    .ok();
    assert!(text.starts_with("32 MiB"), "{text}");
    assert!(!text.contains("Pattern verification failed"), "{text}");
    assert_eq!(text.matches("read ").count(), 6, "{text}");
    assert_filled(
        &rig.file,
        &[
            (0, 4 * KIB, 0x11),
            (4 * KIB, 4 * KIB, 0xa5),
            (8 * KIB, 4 * KIB, 0),
            (12 * KIB, 56 * KIB, 0xa5),
            (68 * KIB, 956 * KIB, 0x11),
            (MIB, MIB, 0x5a),
            (3 * MIB, MIB, 0x5a),
            (4 * MIB, 4 * MIB, 0x11),
            (8 * MIB, 13 * KIB, 0x77),
            (16 * MIB, MIB, 0x33),
            (17 * MIB, MIB, 0x44),
            (18 * MIB, 14 * MIB, 0x11),
        ],
    );
    // A wrong pattern is reported, so the comparisons above can fail.
    let other = run(&mut rig.qemu_io(&["read -P 0x12 0 4k"]));
    assert!(other.stdout.contains("Pattern verification failed"), "{other}");
    assert_eq!(rig.counter("copied"), 0, "guest memory of libblkio is the memory of the file's requests");
}

#[test]
fn qemu_img_bench_reads_and_writes() {
    let Some(rig) = Rig::new(0, "") else { return };
    run(&mut rig.qemu_img_bench(&[])).ok();
    assert_filled(&rig.file, &[(0, LEN, 0)]);
    run(&mut rig.qemu_img_bench(&["-w", "--pattern=0x66", "--flush-interval=5000"])).ok();
    // 20,000 requests of 4 KiB in sequence are the device twice, and more.
    assert_filled(&rig.file, &[(0, LEN, 0x66)]);
}

#[test]
fn a_read_only_export_refuses_writes_of_qemu() {
    let Some(rig) = Rig::new(0x22, ",ro") else { return };
    let text = run(rig.qemu_io(&["read -P 0x22 0 1M"]).arg("-r")).ok();
    assert!(!text.contains("failed"), "{text}");
    let refused = run(&mut rig.qemu_io(&["write -P 1 0 4k"])).failed();
    assert!(refused.to_lowercase().contains("read-only"), "{refused}");
    assert_filled(&rig.file, &[(0, LEN, 0x22)]);
}

#[test]
fn blkio_bench_reads_and_writes_with_interrupts_and_polling() {
    let Some(rig) = Rig::new(0x55, "") else { return };
    let mut total = 0.0;
    for more in [
        &["--readwrite=read", "--iodepth=1"][..],
        &["--readwrite=randread", "--iodepth=32"],
        &["--readwrite=randread", "--iodepth=32", "--num-threads=2"],
        &["--readwrite=randread", "--iodepth=8", "--poll"],
    ] {
        total += thousands(&run(&mut rig.blkio_bench(more)).ok());
    }
    assert!(total > 0.0);
    assert_filled(&rig.file, &[(0, LEN, 0x55)]);
    // Its buffers are zero.
    assert!(thousands(&run(&mut rig.blkio_bench(&["--readwrite=write", "--iodepth=16"])).ok()) > 0.0);
    assert_filled(&rig.file, &[(0, 64 * KIB, 0)]);
}

/// Thousands of requests a second, as blkio-bench reports them.
#[track_caller]
fn thousands(text: &str) -> f64 {
    let (_, after) = text.split_once("\"kiops\":").unwrap_or_else(|| panic!("no rate in {text}"));
    let number = after.split(',').next().unwrap_or_default().trim();
    number.parse().unwrap_or_else(|_| panic!("no rate in {text}"))
}
