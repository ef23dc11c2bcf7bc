//! Virtual machines on vhost-user exports: a distribution's kernel in QEMU, whose root file system is on one.
//!
//! `./x guest --machine DIR` prepares the files of a machine; without `BLOCKYARD_MACHINE=DIR` the tests are skipped.

use blockyard_tests::machine::{self, Machine, MachineDisk};
use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, command, run, until};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Kills of each server in the short test.
const KILLS: usize = 4;
/// Writes between two kills.
const WRITES: u64 = 20;

/// A disk image, its server, and its socket.
struct Export<'a> {
    sandbox: &'a Sandbox,
    name: &'static str,
    server: Server,
}

impl<'a> Export<'a> {
    /// Serves the file `NAME.img` of the sandbox.
    fn start(sandbox: &'a Sandbox, name: &'static str) -> Export<'a> {
        Export { sandbox, name, server: serve(sandbox, name) }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.sandbox.path(&format!("{}.sock", self.name))
    }

    fn file(&self) -> std::path::PathBuf {
        self.sandbox.path(&format!("{}.img", self.name))
    }

    /// Kills the server, and starts another one.
    fn replace(&mut self) {
        self.server.kill();
        self.server = serve(self.sandbox, self.name);
    }

    /// Bytes that the file takes.
    fn allocated(&self) -> u64 {
        self.file().metadata().expect("the file").blocks() * 512
    }
}

fn serve(sandbox: &Sandbox, name: &str) -> Server {
    let stack = format!("file:{}.img,format=raw", name);
    let export = format!("unix:{}", sandbox.path(&format!("{name}.sock")).display());
    let words = ["serve", &stack, "--vhost-user", &export, "--name", name, "--queues", "2"];
    sandbox.start(&mut sandbox.blockyard(&words), 1)
}

fn start(files: &Path, sandbox: &Sandbox, exports: &[&Export<'_>]) -> Machine {
    let sockets: Vec<_> = exports.iter().map(|export| export.socket()).collect();
    let disks = exports.iter().zip(&sockets);
    let disks: Vec<_> = disks.map(|(export, socket)| MachineDisk { name: export.name, socket }).collect();
    let mut machine = Machine::start(files, sandbox, "vm", &disks, &[]);
    machine.await_system();
    machine
}

#[test]
fn a_machine_boots_from_an_export_and_uses_another_one() {
    let Some(files) = machine::files() else { return };
    let sandbox = Sandbox::new(Engine::Auto);
    machine::root_image(&files, &sandbox);
    sandbox.image("data.img", 64 * MIB);
    let (mut root, mut data) = (Export::start(&sandbox, "root"), Export::start(&sandbox, "data"));
    let mut machine = start(&files, &sandbox, &[&root, &data]);
    machine.run("grep -q '^/dev/vda / ext4 rw' /proc/mounts");
    killed_servers_lose_nothing(&mut machine, &mut [&mut root, &mut data], KILLS);
    trimmed_blocks_are_discarded(&mut machine, &data);
    a_resized_disk_grows(&mut machine, &sandbox);
    an_unplugged_disk_returns(&mut machine);
    a_reset_machine_boots_again(&mut machine);
    machine.run("umount /mnt; mount -o remount,ro /");
    machine.check_console();
    drop(machine);
    for export in [&root, &data] {
        run(command(&["e2fsck", "-f", "-n"]).arg(export.file())).ok();
    }
}

/// Kills the servers in turn while the guest writes to both disks.
fn killed_servers_lose_nothing(machine: &mut Machine, exports: &mut [&mut Export<'_>], kills: usize) {
    machine.run("rm -f /run/end; dd if=/dev/zero of=/var/tmp/file bs=1M count=2 2>/dev/null");
    for (number, target) in ["/var/tmp/file", "/dev/vdb"].iter().enumerate() {
        machine.run(&format!(
            "guest --write {target} /run/end >/run/log{number} 2>&1 & echo $! >/run/pid{number}"
        ));
    }
    for kill in 0..kills * exports.len() {
        for number in 0..2 {
            let goal = written(machine, number) + WRITES;
            let done = until(PATIENCE, || (written(machine, number) >= goal).then_some(()));
            assert!(done.is_some(), "writes to disk {number} do not continue after kill {kill}");
        }
        exports[kill % exports.len()].replace();
    }
    machine.run("touch /run/end");
    for number in 0..2 {
        let ended =
            format!("test -d /proc/$(cat /run/pid{number}) && echo runs || tail -n 1 /run/log{number}");
        let last = until(PATIENCE, || Some(machine.run(&ended)).filter(|line| line.trim() != "runs"));
        let last = last.unwrap_or_else(|| panic!("the writer of disk {number} does not end"));
        assert!(
            last.contains("each block has its last version"),
            "disk {number}: {}",
            machine.run(&format!("tail -n 20 /run/log{number}"))
        );
    }
}

/// Writes that the guest's writer of a disk saw complete.
fn written(machine: &mut Machine, number: usize) -> u64 {
    let line = machine.run(&format!("tail -n 1 /run/log{number}"));
    line.trim().parse().unwrap_or(0)
}

fn trimmed_blocks_are_discarded(machine: &mut Machine, data: &Export<'_>) {
    machine.run("blkdiscard /dev/vdb && mkfs.ext4 -q /dev/vdb && mount /dev/vdb /mnt");
    machine.run("dd if=/dev/urandom of=/mnt/file bs=1M count=16 conv=fsync 2>/dev/null");
    let before = data.allocated();
    assert!(before >= 16 * MIB, "{before} bytes are allocated");
    machine.run("rm /mnt/file && sync && fstrim /mnt");
    let after = data.allocated();
    assert!(after + 15 * MIB < before, "{after} bytes are allocated after fstrim, {before} before");
}

fn a_resized_disk_grows(machine: &mut Machine, sandbox: &Sandbox) {
    sandbox.run(&["resize", "data", "96M"]).ok();
    machine.await_output("cat /sys/block/vdb/size", &(96 * MIB / 512).to_string());
    machine.run("resize2fs /dev/vdb 2>/dev/null");
    machine.run("dd if=/dev/urandom of=/mnt/large bs=1M count=70 conv=fsync 2>/dev/null");
}

fn an_unplugged_disk_returns(machine: &mut Machine) {
    let sum = machine.run("md5sum /mnt/large");
    machine.run("umount /mnt");
    machine.monitor("device_del", json!({"id": "data"}));
    machine.await_event("DEVICE_DELETED");
    machine.await_output("test -b /dev/vdb || echo gone", "gone");
    let device = json!({"driver": "vhost-user-blk-pci", "id": "data", "chardev": "char-data",
        "bus": "port-data", "num-queues": 2});
    machine.monitor("device_add", device);
    machine.await_output("test -b /dev/vdb && echo back || true", "back");
    machine.run("mount /dev/vdb /mnt");
    assert_eq!(machine.run("md5sum /mnt/large"), sum);
}

/// Resets the machine while it writes to both disks: what was synchronised before is there, and so are the disks.
fn a_reset_machine_boots_again(machine: &mut Machine) {
    let sum = machine.run(
        "dd if=/dev/urandom of=/var/tmp/kept bs=1M count=2 conv=fsync 2>/dev/null; sync; \
        md5sum /var/tmp/kept /mnt/large",
    );
    machine.run(
        "for place in /var/tmp /mnt; do while :; do \
        dd if=/dev/zero of=$place/busy bs=64k count=32 oflag=direct 2>/dev/null; done & done",
    );
    machine.await_output("test -s /mnt/busy && test -s /var/tmp/busy && echo busy || true", "busy");
    machine.monitor("system_reset", json!({}));
    machine.await_system();
    machine.run("mount /dev/vdb /mnt");
    assert_eq!(machine.run("md5sum /var/tmp/kept /mnt/large"), sum);
}
