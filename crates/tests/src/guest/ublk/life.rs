//! Life cycle of devices: under load, with users, with servers that do not answer.

use super::{Ublk, driver, needs, offered, serve};
use crate::guest::disk::{Disk, tool};
use crate::guest::{Done, Skip, Test, full, test};
use crate::server::Sandbox;
use crate::tools::{PATIENCE, run_within, until, wait_within};
use exports::ublk::DataMode;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use ublk::{Features, State};

pub(super) const TESTS: &[Test] = &[
    test("ublk/001", "a device is added, listed, shown and deleted", delete),
    test("ublk/003", "a file system on it is mounted while others list it", mounted),
    full("ublk/stress_01", "deleting a device under load: requests end, nothing hangs", || {
        delete_under_load("mode=copy", Features::NONE)
    }),
    full("ublk/stress_03", "deleting a device with automatic registration under load", || {
        delete_under_load("mode=auto-zero-copy", DataMode::AutoZeroCopy.features())
    }),
    full("ublk/stress_06", "deleting a device whose queues are served by all threads under load", || {
        delete_under_load("per-io-daemon", Features::PER_IO_DAEMON)
    }),
    test("ublk/delete_open", "an open device is not removed, and is removed when it is closed", delete_open),
    test("ublk/generic_16", "del refuses a device in use; --force removes it", safe_stop),
    test(
        "ublk/two_servers",
        "a second server for one device is refused, and the first continues",
        two_servers,
    ),
    test("ublk/generic_06", "a server that never answers is killed: all requests end at once", stuck_server),
    full(
        "ublk/part_02",
        "a server that does not answer the partition scan does not hold up add or del",
        stuck_scan,
    ),
    test("ublk/generic_10", "the size changes while a file system is mounted", resize),
    test(
        "ublk/generic_13",
        "every feature of the driver has a name or a bit, and none is used that we do not know",
        feature_names,
    ),
    test("ublk/params_01", "limits that the driver does not accept are refused with the reason", params),
    test("ublk/no_driver", "without the driver, the message says what to do", no_driver),
    test("ublk/no_permission", "without permission, the message says what to do", no_permission),
    test(
        "ublk/unprivileged",
        "an ordinary user creates, uses and deletes a device; only root can open it besides",
        unprivileged,
    ),
    test("ublk/taken_number", "a used number is refused with the reason", taken_number),
    test("ublk/many", "forty devices in one process are created and removed", many),
    full("ublk/memory", "writeback of more than fits in memory, through our own device", memory_pressure),
];

fn delete() -> Done {
    driver()?;
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", 16 << 20);
    let line = sandbox
        .run(&["add", &format!("file:{}", sandbox.path("disk.img").display()), "--ublk", "--name", "disk"])
        .ok();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[..2], ["disk", "ublk"], "{line}");
    let disk = Disk::at(words[2]);
    assert_eq!(disk.len(), 16 << 20);
    for command in [&["list"][..], &["show", "disk"]] {
        let shown = sandbox.run(command).ok();
        assert!(shown.contains(disk.path()), "{command:?} does not name {}:\n{shown}", disk.path());
    }
    disk.load(&["--rw=randread", "--size=1M"]).ok();
    sandbox.run(&["del", "disk"]).ok();
    assert!(!disk.node.exists(), "{} is still there", disk.path());
    Ok(())
}

fn mounted() -> Done {
    let ublk = Ublk::file(96 << 20, "")?;
    ublk.disk.format("ext4");
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    for _ in 0..5 {
        std::fs::write(mounted.at.join("file"), [1; 5000]).expect("room for it");
        ublk.command(&["list"]).ok();
        tool(&["lsblk"]).ok();
    }
    mounted.unmount();
    ublk.end();
    Ok(())
}

pub(super) fn delete_under_load(options: &str, features: Features) -> Done {
    needs(features)?;
    let mut ublk = Ublk::file(64 << 20, options)?;
    // The basic case runs twice.
    for _ in 0..if features.is_empty() { 2 } else { 1 } {
        let mut fio = ublk
            .disk
            .fio(&["--rw=randrw", "--size=64M", "--time_based", "--runtime=30"])
            .spawn()
            .expect("fio");
        let writes = || ublk.disk.attribute("stat").split_whitespace().nth(4).map(str::to_owned);
        let begun = until(PATIENCE, || (writes()? != "0").then_some(()));
        assert!(begun.is_some(), "fio does not begin");
        std::thread::sleep(Duration::from_millis(300));
        ublk.command(&["del", "disk", "--force"]).ok();
        assert!(ublk.server.wait().success(), "the server did not end well");
        // It must fail, and it must end.
        assert!(wait_within(&mut fio, PATIENCE).is_some(), "fio hangs");
        ublk.await_gone();
        ublk.server = serve(&ublk.sandbox, "file:{image}", options, &[]);
        ublk.disk = Disk::at(ublk.server.uri());
    }
    ublk.disk.verify(&["--size=1M"]);
    ublk.end();
    Ok(())
}

fn delete_open() -> Done {
    let mut ublk = Ublk::file(16 << 20, "")?;
    let held = File::open(&ublk.disk.node).expect("root may");
    ublk.server.signal(rustix::process::Signal::TERM);
    std::thread::sleep(Duration::from_secs(1));
    assert!(ublk.server.is_running(), "it ended while the device is open");
    std::os::unix::fs::FileExt::read_exact_at(&held, &mut [0; 512], 0).expect("it still serves");
    drop(held);
    assert!(ublk.server.wait().success(), "the server did not end well");
    ublk.await_gone();
    Ok(())
}

fn safe_stop() -> Done {
    driver()?;
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", 16 << 20);
    let stack = format!("file:{}", sandbox.path("disk.img").display());
    let line = sandbox.run(&["add", &stack, "--ublk", "--name", "disk"]).ok();
    let disk = Disk::at(line.split_whitespace().nth(2).expect("NAME ublk NODE"));
    let held = File::open(&disk.node).expect("root may");
    let printed = sandbox.run(&["del", "disk"]).failed_with(1);
    assert!(printed.contains("in use") && printed.contains("--force"), "{printed}");
    disk.load(&["--rw=randread", "--size=1M"]).ok();
    sandbox.run(&["del", "disk", "--force"]).ok();
    drop(held);
    let gone = until(PATIENCE, || (!disk.node.exists()).then_some(()));
    assert!(gone.is_some(), "{} is still there", disk.path());
    Ok(())
}

fn two_servers() -> Done {
    let ublk = Ublk::file(16 << 20, "")?;
    let number = ublk.number().to_string();
    let other = Sandbox::default();
    other.image("disk.img", 16 << 20);
    let stack = format!("file:{}", other.path("disk.img").display());
    let printed =
        other.run(&["serve", &stack, "--name", "other", &format!("--ublk={number}")]).failed_with(1);
    assert!(
        printed.contains("File exists") || printed.contains("in use") || printed.contains("taken"),
        "{printed}"
    );
    ublk.command(&["recover", "disk"]).failed();
    ublk.disk.verify(&["--size=1M"]);
    ublk.end();
    Ok(())
}

/// A device whose requests take longer than any test.
fn stuck(options: &str) -> Result<Ublk, Skip> {
    Ublk::start(0, "null:1G,irqmode=timer,completion=600s", options, &[])
}

fn stuck_server() -> Done {
    // A scan would wait for the first answer, and START_DEV for the scan.
    needs(Features::NO_AUTO_PART_SCAN)?;
    let mut ublk = stuck("recovery=none,no-part-scan")?;
    let mut fio = ublk.disk.fio(&["--rw=randread", "--size=1M"]).spawn().expect("fio");
    std::thread::sleep(Duration::from_millis(1500));
    ublk.server.kill();
    // With their server the requests would take ten minutes.
    let status = wait_within(&mut fio, PATIENCE).expect("its requests end");
    assert!(!status.success(), "the requests cannot have succeeded");
    ublk.command(&["del", "disk", "--force"]).ok();
    ublk.await_gone();
    Ok(())
}

fn stuck_scan() -> Done {
    // Older kernels scan within START_DEV; then add has a time limit, and reports it.
    needs(Features::SAFE_STOP_DEV)?;
    let mut ublk = stuck("recovery=none")?;
    std::thread::sleep(Duration::from_secs(1));
    let begun = Instant::now();
    ublk.server.kill();
    let number = ublk.number();
    let dead = until(PATIENCE, || match ublk.driver.info(number) {
        Ok(info) => (info.state() == Some(State::Dead)).then_some(()),
        Err(_) => Some(()),
    });
    assert!(dead.is_some(), "it is {:?} after {:?}", ublk.state(), begun.elapsed());
    ublk.command(&["del", "disk", "--force"]).ok();
    ublk.await_gone();
    Ok(())
}

fn resize() -> Done {
    needs(Features::UPDATE_SIZE)?;
    let ublk = Ublk::start(32 << 20, "file:{image}", "", &[])?;
    ublk.disk.format("ext4");
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    ublk.command(&["resize", "disk", "64M"]).ok();
    assert_eq!(ublk.disk.len(), 64 << 20);
    tool(&["resize2fs", ublk.disk.path()]).ok();
    std::fs::write(mounted.at.join("file"), vec![9; 36 << 20]).expect("room that was not there before");
    mounted.unmount();
    ublk.disk.check("ext4");
    ublk.end();
    Ok(())
}

fn feature_names() -> Done {
    let offered = offered(&driver()?);
    let names = offered.names();
    assert_eq!(names.len(), offered.0.count_ones() as usize, "{names:?}");
    // The features in use have names; newer ones are shown by their bit.
    let ublk = Ublk::file(16 << 20, "")?;
    let used = ublk.info().features();
    assert!(used.without(Features::KNOWN).is_empty(), "{:?}", used.names());
    println!("{}", names.join(" "));
    ublk.end();
    Ok(())
}

fn params() -> Done {
    driver()?;
    let sandbox = Sandbox::default();
    for (options, says) in
        [("depth=4096", "choose"), ("io=1000", "4K"), ("queues=0", "choose"), ("mode=fast", "copy")]
    {
        let printed = sandbox.run(&["serve", "null:1G", &format!("--ublk={options}")]).failed();
        assert!(printed.contains(says), "{options}: {printed}");
    }
    Ok(())
}

fn no_driver() -> Done {
    driver()?;
    if !Path::new("/sys/module/ublk_drv/refcnt").exists() {
        return Err(Skip("the driver is built in".into()));
    }
    // A removed device may hold the module for a moment.
    until(PATIENCE, || tool(&["rmmod", "ublk_drv"]).status.success().then_some(())).expect("it is unloaded");
    let sandbox = Sandbox::default();
    let printed =
        run_within(&mut sandbox.blockyard(&["serve", "null:1G", "--ublk"]), PATIENCE).failed_with(1);
    driver()?;
    assert!(printed.contains("modprobe ublk_drv"), "{printed}");
    Ok(())
}

fn no_permission() -> Done {
    driver()?;
    let sandbox = Sandbox::default();
    let nobody = sandbox.path("nobody");
    std::fs::create_dir(&nobody).expect("a folder");
    tool(&[
        "sh",
        "-c",
        &format!(
            "chmod 755 {0}; chmod 700 {1}; chown 65534:65534 {1}; chmod 600 /dev/ublk-control",
            sandbox.path("").display(),
            nobody.display()
        ),
    ])
    .ok();
    let mut command = sandbox.command("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(crate::server::binary());
    command.args(["serve", "null:64M", "--ublk"]).env("BLOCKYARD_RUN", &nobody);
    let printed = run_within(&mut command, PATIENCE).failed_with(1);
    assert!(printed.contains("root"), "{printed}");
    Ok(())
}

/// Does what a udev rule of two lines does: changes the owner of new nodes of ublk devices to a user.
struct Udev {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// User IDs of the owner, and of another user.
const OWNER: u32 = 65534;
const STRANGER: u32 = 65533;

impl Udev {
    fn start() -> Udev {
        let chown = |path: &Path| {
            let _ = std::os::unix::fs::chown(path, Some(OWNER), Some(OWNER));
        };
        chown(Path::new("/dev/ublk-control"));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Relaxed) {
                for entry in std::fs::read_dir("/dev").into_iter().flatten().flatten() {
                    let name = entry.file_name();
                    let is_ours = name.to_str().is_some_and(|name| {
                        ["ublkc", "ublkb"].iter().any(|beginning| name.starts_with(beginning))
                    });
                    if is_ours && entry.metadata().is_ok_and(|metadata| metadata.uid() != OWNER) {
                        chown(&entry.path());
                    }
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Udev { stop, thread: Some(thread) }
    }
}

impl Drop for Udev {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::os::unix::fs::chown("/dev/ublk-control", Some(0), Some(0));
    }
}

fn unprivileged() -> Done {
    needs(Features::UNPRIVILEGED_DEV)?;
    let driver = driver()?;
    let sandbox = Sandbox::default();
    let home = sandbox.path("home");
    std::fs::create_dir(&home).expect("a folder");
    let open_up =
        format!("chmod 755 {}; chown {OWNER}:{OWNER} {}", sandbox.path("").display(), home.display());
    tool(&["sh", "-c", &open_up]).ok();
    let as_user = |user: u32, arguments: &[&str]| {
        let mut command = sandbox.command("setpriv");
        let user = user.to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).args(arguments);
        command.env("BLOCKYARD_RUN", home.join("run")).env("HOME", &home);
        command
    };
    let binary = crate::server::binary().to_string_lossy().into_owned();
    let run = |arguments: &[&str]| run_within(&mut as_user(OWNER, arguments), PATIENCE);
    {
        // If the nodes are not given to the user, the message names the missing rule.
        let printed = run(&[&binary, "serve", "ram:16M", "--ublk=unprivileged"]).failed_with(1);
        assert!(printed.contains("ublk-control"), "{printed}");
    }
    let _udev = Udev::start();
    let mut server = sandbox.start(
        &mut as_user(OWNER, &[&binary, "serve", "ram:16M", "--name", "disk", "--ublk=unprivileged"]),
        1,
    );
    let path = server.uri().to_owned();
    let given = |path: &str| std::fs::metadata(path).is_ok_and(|metadata| metadata.uid() == OWNER);
    assert!(until(PATIENCE, || given(&path).then_some(())).is_some(), "{path} stays root's");
    let copy = format!(
        "dd if=/dev/urandom of={0}/a bs=64k count=16 && dd if={0}/a of={1} bs=64k oflag=direct && \
         dd if={1} of={0}/b bs=64k count=16 iflag=direct && cmp {0}/a {0}/b",
        home.display(),
        path
    );
    run(&["sh", "-c", &copy]).ok();
    let number = path.trim_start_matches("/dev/ublkb").parse().expect("a number");
    let info = driver.info(number).expect("root may ask");
    assert!(info.features().has(Features::UNPRIVILEGED_DEV), "{:?}", info.features());
    assert_eq!((info.owner_uid, info.owner_gid), (OWNER, OWNER));
    // Whatever the node's mode, the driver refuses other users except root.
    tool(&["chmod", "666", &path]).ok();
    let open = format!("head -c 512 {path} >/dev/null");
    run_within(&mut as_user(STRANGER, &["sh", "-c", &open]), PATIENCE).failed();
    tool(&["sh", "-c", &open]).ok();
    let shown = run(&[&binary, "show", "disk"]).ok();
    assert!(shown.contains("UNPRIVILEGED_DEV"), "{shown}");
    run(&[&binary, "del", "disk"]).ok();
    assert!(server.wait().success(), "the server did not end well");
    let gone = until(PATIENCE, || driver.devices().is_empty().then_some(()));
    assert!(gone.is_some(), "{:?} are left", driver.devices());
    Ok(())
}

fn taken_number() -> Done {
    let ublk = Ublk::file(16 << 20, "5")?;
    assert_eq!(ublk.disk.path(), "/dev/ublkb5");
    let printed = Sandbox::default().run(&["serve", "null:1G", "--ublk=5"]).failed_with(1);
    assert!(printed.contains("another number"), "{printed}");
    ublk.end();
    Ok(())
}

fn many() -> Done {
    const COUNT: usize = 40;
    let driver = driver()?;
    let sandbox = Sandbox::default();
    let device = |index: usize| {
        format!("[device.d{index}]\nstack = \"null:64M\"\n[[export]]\ndevice = \"d{index}\"\nublk = \"\"\n")
    };
    let file = sandbox.text("many.toml", &(0..COUNT).map(device).collect::<String>());
    let mut server = sandbox.start(&mut sandbox.blockyard(&["up", &file.to_string_lossy()]), COUNT);
    for line in server.ready() {
        Disk::at(line.split_whitespace().nth(2).expect("NAME ublk NODE"));
    }
    // The cost of creating a device does not grow with their number.
    if let Some(writes) = writes_of(server.pid()) {
        println!("{writes} writes");
        assert!(writes < 100 * COUNT as u64, "{writes} writes for {COUNT} devices");
    }
    server.terminate();
    let gone = until(PATIENCE, || driver.devices().is_empty().then_some(()));
    assert!(gone.is_some(), "{:?} are left", driver.devices());
    Ok(())
}

/// Returns the number of a process's write system calls; not every kernel counts them.
fn writes_of(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("syscw: "))?.trim().parse().ok()
}

/// Writes more data than a group of processes may have in memory, through a file system on our device, with
/// the server in the same group: the server must not wait for memory or writeback that only its own answers
/// can free. Few pages may be dirty at a time, since the kernel's own limit for a group is based on counts of
/// two seconds ago: a quicker writer, as here, fills the group with pages that cannot be reclaimed yet, and
/// is killed for it, whichever server the device has.
fn memory_pressure() -> Done {
    const LIMIT: &str = "96M";
    let group = Path::new("/sys/fs/cgroup/pressure");
    let sandbox = Sandbox::default();
    let image = sandbox.path("disk.img");
    tool(&["fallocate", "-l", "400M", &image.to_string_lossy()]).ok();
    let ublk = Ublk::start_in(sandbox, 0, &format!("file:{}", image.display()), "", &[])?;
    ublk.disk.format("ext4");
    // The image is in memory: allocates its pages, which mkfs has discarded, outside the group.
    tool(&["fallocate", "-l", "400M", &image.to_string_lossy()]).ok();
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    let limited = std::fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory")
        .and_then(|()| std::fs::create_dir(group))
        .and_then(|()| std::fs::write(group.join("memory.max"), LIMIT))
        .and_then(|()| std::fs::write(group.join("cgroup.procs"), ublk.server.pid().to_string()));
    if let Err(error) = limited {
        return Err(Skip(format!("no limit on memory here: {error}")));
    }
    let dirty = [Setting::change("dirty_background_bytes", 2 << 20), Setting::change("dirty_bytes", 8 << 20)];
    // Repeats one block of noise: cheap to write and to compare, also on slow processors.
    let (target, noise) = (mounted.at.join("file"), ublk.sandbox.noise("noise", 1 << 20));
    let stream = format!("i=0; while [ $i -lt 104 ]; do cat {}; i=$((i+1)); done", noise.display());
    let line =
        format!("echo $$ >{0}/cgroup.procs; ({stream}) >{1} && sync {1}", group.display(), target.display());
    let wrote = run_within(&mut crate::tools::command(&["sh", "-c", &line]), PATIENCE);
    for report in ["memory.events", "memory.stat"] {
        println!("{report}: {}", std::fs::read_to_string(group.join(report)).unwrap_or_default());
    }
    wrote.ok();
    drop(dirty);
    std::fs::write("/proc/sys/vm/drop_caches", "3").expect("root may");
    tool(&["sh", "-c", &format!("({stream}) | cmp - {}", target.display())]).ok();
    assert_eq!(std::fs::metadata(&target).expect("it exists").len(), 104 << 20);
    mounted.unmount();
    ublk.end();
    std::fs::remove_dir(group).expect("it is empty");
    Ok(())
}

/// A limit in bytes of the kernel's memory management, restored when dropped: the kernel keeps it as a share
/// of memory or in bytes, whichever was written last.
struct Setting {
    share: PathBuf,
    before: String,
}

impl Setting {
    fn change(name: &str, bytes: u64) -> Self {
        let folder = Path::new("/proc/sys/vm");
        let share = folder.join(name.replace("_bytes", "_ratio"));
        let before = std::fs::read_to_string(&share).expect("every kernel has it");
        std::fs::write(folder.join(name), bytes.to_string()).expect("root may");
        Self { share, before }
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // An error is ignored: the guest ends with its tests.
        drop(std::fs::write(&self.share, &self.before));
    }
}
