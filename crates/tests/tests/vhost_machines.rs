//! Virtual machines on vhost-user exports: a distribution's kernel in QEMU, whose root file system is on one.
//!
//! `./x guest --machine DIR` prepares the files of a machine; without `BLOCKYARD_MACHINE=DIR` the tests are
//! skipped.

use blockyard_tests::machine::{self, Machine, MachineDisk};
use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, command, run, until};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const MIB: u64 = 1 << 20;
/// Kills of each server in the short test.
const KILLS: usize = 2;
/// Writes between two kills.
const WRITES: u64 = 20;

/// A disk, its server, and its socket.
struct Export<'a> {
    sandbox: &'a Sandbox,
    /// Name of the device, and of the socket `NAME.sock`.
    name: &'static str,
    /// The stack that is served.
    stack: String,
    server: Server,
}

impl<'a> Export<'a> {
    /// Serves the file `NAME.img` of the sandbox.
    fn start(sandbox: &'a Sandbox, name: &'static str) -> Export<'a> {
        Export::of_stack(sandbox, name, format!("file:{name}.img,format=raw"))
    }

    fn of_stack(sandbox: &'a Sandbox, name: &'static str, stack: String) -> Export<'a> {
        let server = serve(sandbox, name, &stack);
        Export { sandbox, name, stack, server }
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
        self.server = serve(self.sandbox, self.name, &self.stack);
    }

    /// Returns the allocated bytes of the file.
    fn allocated(&self) -> u64 {
        self.file().metadata().expect("the file").blocks() * 512
    }
}

fn serve(sandbox: &Sandbox, name: &str, stack: &str) -> Server {
    let export = format!("unix:{}", sandbox.path(&format!("{name}.sock")).display());
    let words = ["serve", stack, "--vhost-user", &export, "--name", name, "--queues", "2"];
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
    killed_servers_lose_nothing(&mut machine, &mut [&mut root, &mut data], 2 * KILLS);
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

/// Runs in `./x soak vhost`, as it takes half a minute.
#[test]
#[ignore = "long"]
fn a_machine_migrates_to_another_server_while_it_writes() {
    let Some(files) = machine::files() else { return };
    let sandbox = Sandbox::new(Engine::Auto);
    machine::root_image(&files, &sandbox);
    sandbox.image("data.img", 64 * MIB);
    // Both servers have the file open for a moment; only one of them is given requests.
    let stack = |name: &str| format!("file:{name}.img,format=raw,share");
    let (root, data) = (
        Export::of_stack(&sandbox, "root", stack("root")),
        Export::of_stack(&sandbox, "data", stack("data")),
    );
    let (next_root, next_data) = (
        Export::of_stack(&sandbox, "next-root", stack("root")),
        Export::of_stack(&sandbox, "next-data", stack("data")),
    );
    let mut machine = start(&files, &sandbox, &[&root, &data]);
    let address = format!("unix:{}", sandbox.path("migration").display());
    let sockets = [next_root.socket(), next_data.socket()];
    let disks = [("root", &sockets[0]), ("data", &sockets[1])];
    let disks = disks.map(|(name, socket)| MachineDisk { name, socket });
    let mut next = Machine::start(&files, &sandbox, "next", &disks, &["-incoming", &address]);
    begin_writes(&mut machine, &WRITTEN);
    // The device writes to guest memory all the time: a page that is not in the log arrives with old content.
    machine.run("md5sum /usr/bin/guest /usr/lib/x86_64-linux-gnu/libc* >/run/sums");
    machine.run(
        "while [ ! -e /run/end ]; do echo 3 >/proc/sys/vm/drop_caches; md5sum -c /run/sums >/run/sums.now || \
         echo wrong >>/run/wrong; echo again >>/run/rounds; done &",
    );
    await_writes(&mut machine, &WRITTEN);
    machine.monitor("migrate", json!({"uri": address}));
    let status = until(PATIENCE, || {
        let state = machine.monitor("query-migrate", json!({}));
        ["completed", "failed"].into_iter().find(|end| state["status"] == *end)
    });
    assert_eq!(status, Some("completed"), "{}", machine.monitor("query-migrate", json!({})));
    machine.check_console();
    drop((machine, root, data));
    await_writes(&mut next, &WRITTEN);
    end_writes(&mut next, &WRITTEN);
    next.run("test -s /run/rounds && test ! -e /run/wrong && mount -o remount,ro /");
    next.check_console();
    drop(next);
    run(command(&["e2fsck", "-f", "-n"]).arg(sandbox.path("root.img"))).ok();
}

/// `./x soak vhost`: `BLOCKYARD_SOAK_KILLS` kills.
#[test]
#[ignore = "long"]
fn soak_killed_servers() {
    let Some(files) = machine::files() else { return };
    let kills = std::env::var("BLOCKYARD_SOAK_KILLS").map_or(300, |kills| kills.parse().expect("a number"));
    let sandbox = Sandbox::new(Engine::Auto);
    machine::root_image(&files, &sandbox);
    sandbox.image("data.img", 64 * MIB);
    let (mut root, mut data) = (Export::start(&sandbox, "root"), Export::start(&sandbox, "data"));
    let mut machine = start(&files, &sandbox, &[&root, &data]);
    killed_servers_lose_nothing(&mut machine, &mut [&mut root, &mut data], kills);
    let counts: Vec<String> =
        (0..2).map(|number| machine.run(&format!("tail -n 1 /run/log{number}"))).collect();
    println!("{kills} kills: {}", counts.concat().trim().replace('\n', "; "));
    machine.run("mount -o remount,ro /");
    machine.check_console();
    drop(machine);
    run(command(&["e2fsck", "-f", "-n"]).arg(root.file())).ok();
}

/// Kills the servers in turn while the guest writes to both disks.
fn killed_servers_lose_nothing(machine: &mut Machine, exports: &mut [&mut Export<'_>], kills: usize) {
    begin_writes(machine, &WRITTEN);
    for kill in 0..kills {
        await_writes(machine, &WRITTEN);
        exports[kill % exports.len()].replace();
    }
    await_writes(machine, &WRITTEN);
    end_writes(machine, &WRITTEN);
}

/// What writers write to: a file on the first disk, and the second disk.
const WRITTEN: [&str; 2] = ["/var/tmp/file", "/dev/vdb"];

/// Jobs of fio on the disks of [`WRITTEN`], beside those. A job makes the file `/run/fioN` when it starts.
const JOBS: [&str; 2] = [
    "--name=file --filename=/var/tmp/fio --exec_prerun='touch /run/fio0'",
    "--name=disk --filename=/dev/vdb --offset=16M --exec_prerun='touch /run/fio1'",
];

/// Options of all runs of fio.
const FIO: &str = "fio --direct=1 --ioengine=libaio --iodepth=16 --thread --verify=crc32c --verify_fatal=1 \
     --verify_state_save=0";

/// Starts fio, which verifies the checksum of each block soon after it has written it, and the writers. fio starts
/// first, as the machine needs seconds to load its libraries.
fn begin_writes(machine: &mut Machine, targets: &[&str]) {
    machine.run("rm -f /run/end; dd if=/dev/zero of=/var/tmp/file bs=1M count=1 conv=fsync 2>/dev/null");
    machine.run(&format!(
        "{FIO} --iodepth=4 --rw=randwrite --bsrange=4k-16k --size=4M --time_based --runtime=3600 --verify_backlog=16 {} \
         >/run/fio.log 2>&1 &",
        JOBS.join(" ")
    ));
    machine.await_output("test -e /run/fio0 && test -e /run/fio1 && echo busy || true", "busy");
    for (number, target) in targets.iter().enumerate() {
        machine.run(&format!("guest --write {target} /run/end >/run/log{number} 2>&1 &"));
    }
}

/// Waits until each writer has made progress.
#[track_caller]
fn await_writes(machine: &mut Machine, targets: &[&str]) {
    for (number, target) in targets.iter().enumerate() {
        let goal = written(machine, number) + WRITES;
        let done = until(PATIENCE, || (written(machine, number) >= goal).then_some(()));
        if done.is_none() {
            let state = "head /sys/block/vd?/inflight; tail -n 2 /run/log?; cat /proc/uptime /proc/loadavg";
            panic!("writes to {target} do not continue:\n{}{}", machine.run(state), machine.console());
        }
    }
}

/// Ends the writers: each must find the last version of each of its blocks, and no write may have failed. fio must
/// have verified blocks of both disks without an error.
#[track_caller]
fn end_writes(machine: &mut Machine, targets: &[&str]) {
    machine.run("touch /run/end; kill -INT $(pidof fio); wait");
    for (number, target) in targets.iter().enumerate() {
        let log = machine.run(&format!("tail -n 20 /run/log{number}"));
        assert!(log.contains("each block has its last version"), "{target}: {log}");
    }
    let log = machine.run("cat /run/fio.log");
    assert_eq!(log.matches("err= 0").count(), targets.len(), "{log}");
    assert!(!log.contains("verify:"), "{log}");
    // Numbers of reads, which are verifications, and of writes.
    let issued: Vec<&str> = log.split("issued rwts: total=").skip(1).collect();
    assert_eq!(issued.len(), targets.len(), "{log}");
    for job in issued {
        assert!(job.split(',').take(2).all(|count| count != "0"), "{log}");
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
    large_file(machine, "--do_verify=0");
}

/// Writes a file of checksummed blocks that the disk had no room for before; `--verify_only` verifies it.
fn large_file(machine: &mut Machine, more: &str) {
    let job = "--name=large --filename=/mnt/large --rw=write --bs=256k --size=70M --end_fsync=1";
    machine.run(&format!("{FIO} {job} {more} >/run/large.log 2>&1 || {{ cat /run/large.log; false; }}"));
}

fn an_unplugged_disk_returns(machine: &mut Machine) {
    machine.run("umount /mnt");
    machine.monitor("device_del", json!({"id": "data"}));
    machine.await_event("DEVICE_DELETED");
    machine.await_output("test -b /dev/vdb || echo gone", "gone");
    let device = json!({"driver": "vhost-user-blk-pci", "id": "data", "chardev": "char-data",
        "bus": "port-data", "num-queues": 2});
    machine.monitor("device_add", device);
    machine.await_output("test -b /dev/vdb && echo back || true", "back");
    machine.run("mount /dev/vdb /mnt");
    large_file(machine, "--verify_only");
}

/// Resets the machine while it writes to both disks: synchronised data must be present after the reset, and
/// the disks must work.
fn a_reset_machine_boots_again(machine: &mut Machine) {
    let sum = machine.run(
        "dd if=/dev/urandom of=/var/tmp/kept bs=1M count=2 conv=fsync 2>/dev/null; sync; \
        md5sum /var/tmp/kept",
    );
    machine.run(
        "fio --direct=1 --ioengine=libaio --iodepth=16 --thread --size=2M --rw=randwrite --bs=4k --time_based \
         --runtime=3600 --name=root --filename=/var/tmp/busy --exec_prerun='touch /run/busy0' \
         --name=data --filename=/mnt/busy --exec_prerun='touch /run/busy1' >/dev/null 2>&1 &",
    );
    machine.await_output("test -e /run/busy0 && test -e /run/busy1 && echo busy || true", "busy");
    machine.monitor("system_reset", json!({}));
    machine.await_system();
    machine.run("mount /dev/vdb /mnt");
    assert_eq!(machine.run("md5sum /var/tmp/kept"), sum);
    large_file(machine, "--verify_only");
}
