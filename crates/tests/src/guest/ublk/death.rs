//! Death of the server, in each recovery mode: no acknowledged write is lost, no byte is wrong, and no task
//! waits for ever.

use super::data::{Memory, in_place};
use super::{Ublk, needs};
use crate::guest::disk::Disk;
use crate::guest::writer::Writer;
use crate::guest::{Done, Skip, Test, full, soak, test};
use crate::server::{Sandbox, is_alive, signal};
use crate::tools::{PATIENCE, run, until};
use exports::ublk::DataMode;
use rustix::process::Signal;
use std::time::Duration;
use ublk::{Features, State};

pub(super) const TESTS: &[Test] = &[
    test("ublk/002", "a server is killed and its device, once dead, deleted", || crash_and_delete(true)),
    test("ublk/004", "a server is killed and its device deleted at once", || crash_and_delete(false)),
    full("ublk/005", "a device whose server was killed is recovered", || recovered(1)),
    full("ublk/006", "a device is recovered twice", || recovered(2)),
    test(
        "ublk/stress_02",
        "kill -9 under load without recovery: requests end, the device goes",
        kill_without_recovery,
    ),
    test(
        "ublk/recover_01",
        "kill -9 under load, requeue: waiting requests go on, those in flight fail or are kept",
        || kill(Recovery::Requeue, "mode=copy", 3),
    ),
    full("ublk/recover_02", "kill -9 under load, reissue: every request is answered, none fails", || {
        kill(Recovery::Reissue, "mode=copy", 3)
    }),
    test(
        "ublk/recover_fail_io",
        "kill -9 under load, fail-io: requests fail at once until there is a server",
        || kill(Recovery::FailIo, "mode=copy", 3),
    ),
    test("ublk/stress_04", "kill -9 under load, reissue, with user copy", || {
        kill(Recovery::Reissue, "mode=user-copy", 2)
    }),
    full("ublk/stress_05", "kill -9 under load, reissue, with automatic registration", || {
        kill(Recovery::Reissue, "mode=auto-zero-copy", 2)
    }),
    full("ublk/stress_07", "kill -9 under load, reissue, with every queue served by all threads", || {
        kill(Recovery::Reissue, "per-io-daemon", 2)
    }),
    full("ublk/stress_08", "deleting a device with batches under load: requests end, nothing hangs", || {
        super::life::delete_under_load("batch=yes", Features::BATCH_IO)
    }),
    full("ublk/stress_09", "kill -9 under load, reissue, with batches", || kill_with_batches(2)),
    test(
        "ublk/shmemzc_recover",
        "memory shared with clients is known to the next server, too",
        recovered_sharing,
    ),
    test("ublk/kill_verify", "fio verifies everything across two kills", kill_under_fio),
    test("ublk/recover_mounted", "ext4 stays mounted across a kill, and is clean", kill_under_file_system),
    test(
        "ublk/generic_17",
        "a server that dies while it recovers leaves a device that can be deleted",
        die_in_recovery,
    ),
    test(
        "ublk/record_lost",
        "a device without a record or a server is removed by its node's name",
        lose_record,
    ),
    full("ublk/recover_03", "another program takes a live device over under load: no request fails", || {
        upgrade("mode=copy", 2)
    }),
    test("ublk/recover_04", "an upgrade with automatic registration", || upgrade("mode=auto-zero-copy", 2)),
    full("ublk/recover_batch", "an upgrade with batches", || {
        needs_lone_threads()?;
        upgrade("batch=yes", 2)
    }),
    test("ublk/supervise", "--supervise restarts a killed server on the same device", supervised),
    soak("ublk/soak_reissue", "three hundred kills under load, reissue", || {
        kill(Recovery::Reissue, "mode=copy", 300)
    }),
    soak("ublk/soak_requeue", "three hundred kills under load, requeue", || {
        kill(Recovery::Requeue, "mode=copy", 300)
    }),
    soak("ublk/soak_fail_io", "three hundred kills under load, fail-io", || {
        kill(Recovery::FailIo, "mode=copy", 300)
    }),
    soak("ublk/soak_user_copy", "three hundred kills under load, user copy", || {
        kill(Recovery::Reissue, "mode=user-copy", 300)
    }),
    soak("ublk/soak_batch", "three hundred kills under load, batches", || kill_with_batches(300)),
    soak("ublk/soak_upgrade", "three hundred upgrades under load, to one program and the other", || {
        upgrade("mode=copy", 300)
    }),
    soak("ublk/soak_zero_copy", "three hundred kills under load, registered buffers", || {
        kill(Recovery::Reissue, "mode=auto-zero-copy", 300)
    }),
];

/// The fate of requests while there is no server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Recovery {
    Requeue,
    Reissue,
    FailIo,
}

impl Recovery {
    /// Returns the name on the command line.
    fn word(self) -> &'static str {
        match self {
            Recovery::Requeue => "requeue",
            Recovery::Reissue => "reissue",
            Recovery::FailIo => "fail-io",
        }
    }

    fn features(self) -> Features {
        match self {
            Recovery::Requeue => Features::USER_RECOVERY,
            Recovery::Reissue => Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE),
            Recovery::FailIo => Features::USER_RECOVERY.with(Features::USER_RECOVERY_FAIL_IO),
        }
    }
}

impl Ublk {
    /// Runs `blockyard recover`, in the background; the new server is no child of ours.
    #[track_caller]
    pub(super) fn recover(&self) {
        self.command(&["recover", "disk"]).ok();
        self.await_state(State::Live);
    }

    /// Returns the process ID of the present server.
    fn pid(&self) -> u32 {
        u32::try_from(self.info().ublksrv_pid).expect("it has a server")
    }

    /// Kills the present server.
    pub(super) fn kill(&mut self) {
        let pid = self.pid();
        if pid == self.server.pid() {
            self.server.kill();
        } else {
            signal(pid, Signal::KILL);
            until(PATIENCE, || (!is_alive(pid)).then_some(())).expect("it was killed");
        }
    }

    /// Removes a device that was recovered.
    #[track_caller]
    pub(super) fn delete(&self) {
        self.command(&["del", "disk"]).ok();
        self.await_gone();
    }
}

/// Returns the features of the driver that an option needs.
fn features_for(option: &str) -> Features {
    match option.strip_prefix("mode=") {
        Some(mode) => mode.parse::<DataMode>().expect("a mode").features(),
        None if option == "per-io-daemon" => Features::PER_IO_DAEMON,
        None if option == "batch=yes" => Features::BATCH_IO,
        None => Features::NONE,
    }
}

pub(super) fn needs_recovery(recovery: Recovery) -> Result<(), Skip> {
    needs(recovery.features())
}

fn crash_and_delete(when_dead: bool) -> Done {
    let mut ublk = Ublk::file(16 << 20, "recovery=none")?;
    ublk.kill();
    if when_dead {
        ublk.await_state(State::Dead);
    }
    ublk.command(&["del", "disk"]).ok();
    ublk.await_gone();
    Ok(())
}

fn recovered(times: u32) -> Done {
    needs_recovery(Recovery::Reissue)?;
    let mut ublk = Ublk::file(16 << 20, "recovery=reissue")?;
    for _ in 0..times {
        ublk.kill();
        ublk.await_state(State::Quiesced);
        // Commands report the state of the device, and what to do.
        for command in [&["list"][..], &["show", "disk"]] {
            let shown = ublk.command(command).ok();
            assert!(shown.contains("blockyard recover disk"), "{command:?}:\n{shown}");
        }
        let reported = ublk.command(&["resize", "disk", "32M"]).failed_with(1);
        assert!(reported.contains("waits for another (run blockyard recover disk"), "{reported}");
        ublk.recover();
        ublk.disk.verify(&["--size=1M"]);
    }
    ublk.delete();
    Ok(())
}

fn recovered_sharing() -> Done {
    needs_recovery(Recovery::Reissue)?;
    needs(Features::SHMEM_ZC)?;
    let memory = Memory::new();
    let mut ublk = Ublk::file(16 << 20, &format!("recovery=reissue,shmem={}", memory.file().display()))?;
    ublk.disk.verify(&["--size=1M", &memory.option()]);
    ublk.kill();
    ublk.await_state(State::Quiesced);
    ublk.recover();
    assert_eq!(in_place(&ublk), 0);
    ublk.disk.verify(&["--size=1M", &memory.option()]);
    assert!(in_place(&ublk) > 100, "{} requests were served in place", in_place(&ublk));
    ublk.delete();
    Ok(())
}

fn kill_without_recovery() -> Done {
    for round in 0..2 {
        let mut ublk = Ublk::file(16 << 20, "recovery=none")?;
        let writer = Writer::start(&ublk.disk, 4);
        writer.progress(50 + 31 * round);
        ublk.kill();
        let ledger = writer.finish();
        assert!(ledger.acknowledged > 0);
        ublk.command(&["del", "disk"]).ok();
        ublk.await_gone();
        // Acknowledged data is in the file: the page cache outlives a process.
        ledger.check(&Disk { node: super::image() });
    }
    Ok(())
}

/// Kills the server repeatedly at random moments, while writers run.
fn kill(recovery: Recovery, options: &str, times: u64) -> Done {
    needs_recovery(recovery)?;
    needs(features_for(options))?;
    let mut ublk = Ublk::file(16 << 20, &format!("recovery={},{options}", recovery.word()))?;
    let writer = Writer::start(&ublk.disk, 4);
    let seed = std::time::UNIX_EPOCH.elapsed().map_or(77, |since| since.as_nanos() as u64);
    println!("moments by seed {seed}");
    let mut moments = crate::server::noise(seed, times as usize).into_iter();
    for _ in 0..times {
        writer.progress(40);
        std::thread::sleep(Duration::from_micros(u64::from(moments.next().unwrap_or_default()) * 200));
        ublk.kill();
        let waits = if recovery == Recovery::FailIo { State::FailIo } else { State::Quiesced };
        ublk.await_state(waits);
        ublk.recover();
    }
    writer.progress(40);
    let ledger = writer.finish();
    if recovery == Recovery::Reissue {
        assert_eq!(ledger.failed, 0, "requests that fail, where they should be issued again");
    }
    ledger.check(&ublk.disk);
    ledger.check(&Disk { node: super::image() });
    println!("{} writes acknowledged, {} failed, {times} kills", ledger.acknowledged, ledger.failed);
    ublk.delete();
    Ok(())
}

fn kill_with_batches(times: u64) -> Done {
    needs_lone_threads()?;
    kill(Recovery::Reissue, "batch=yes", times)
}

/// Skips on kernels where a kernel thread's write to the memory of a dead process does more harm than an
/// error.
fn needs_lone_threads() -> Result<(), Skip> {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if cpu.contains("User Mode Linux") {
        let why =
            "a user-mode kernel panics when its driver delivers a batch to a dead server (docs/ublk.md)";
        return Err(Skip(why.into()));
    }
    Ok(())
}

fn kill_under_fio() -> Done {
    needs_recovery(Recovery::Reissue)?;
    let mut ublk = Ublk::file(32 << 20, "recovery=reissue")?;
    let words = [
        "--rw=randwrite",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--size=16M",
        "--bsrange=4k-32k",
        "--loops=2",
    ];
    let mut fio = ublk.disk.fio(&words).spawn().expect("fio");
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(1500));
        ublk.kill();
        ublk.await_state(State::Quiesced);
        ublk.recover();
    }
    let status = crate::tools::wait_within(&mut fio, PATIENCE).expect("fio ends");
    assert!(status.success(), "{status}");
    ublk.delete();
    Ok(())
}

fn kill_under_file_system() -> Done {
    needs_recovery(Recovery::Reissue)?;
    let mut ublk = Ublk::file(96 << 20, "recovery=reissue")?;
    ublk.disk.format("ext4");
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    let noise = crate::server::noise(3, 4 << 20);
    std::fs::write(mounted.at.join("before"), &noise).expect("room for it");
    ublk.kill();
    let target = mounted.at.join("after");
    let more = noise.clone();
    // Its sync waits for the next server.
    let waiting = std::thread::spawn(move || {
        let mut file = std::fs::File::create(target)?;
        std::io::Write::write_all(&mut file, &more)?;
        file.sync_all()
    });
    ublk.await_state(State::Quiesced);
    ublk.recover();
    waiting.join().expect("no panic").expect("it is written after all");
    mounted.unmount();
    ublk.disk.check("ext4");
    let mounted = ublk.disk.mount(&ublk.sandbox.path("mnt"));
    for name in ["before", "after"] {
        assert!(std::fs::read(mounted.at.join(name)).expect("it exists") == noise, "{name} reads otherwise");
    }
    mounted.unmount();
    ublk.delete();
    Ok(())
}

fn die_in_recovery() -> Done {
    needs_recovery(Recovery::Reissue)?;
    for pause_ms in [0, 3, 10, 30] {
        let mut ublk = Ublk::file(16 << 20, "recovery=reissue")?;
        ublk.kill();
        ublk.await_state(State::Quiesced);
        let mut recovering = ublk.sandbox.blockyard(&["recover", "disk"]).spawn().expect("it starts");
        std::thread::sleep(Duration::from_millis(pause_ms));
        let _ = recovering.kill();
        let _ = recovering.wait();
        // A killed supervisor may just have started another server.
        until(PATIENCE, || killed_all_servers().then_some(())).expect("they end");
        // The device waits, whether or not another server had taken it over.
        if ublk.driver.devices().contains(&ublk.number()) {
            ublk.command(&["del", "disk"]).ok();
        }
        ublk.await_gone();
    }
    Ok(())
}

fn lose_record() -> Done {
    needs_recovery(Recovery::Reissue)?;
    let mut ublk = Ublk::file(16 << 20, "recovery=reissue")?;
    let node = ublk.disk.name().to_owned();
    // For another run directory it is a foreign device, which is left alone while it has a server.
    let elsewhere = Sandbox::default();
    let reported = elsewhere.run(&["del", &node]).failed_with(1);
    assert!(reported.contains("its server is alive"), "{reported}");
    ublk.kill();
    ublk.await_state(State::Quiesced);
    let record = ublk.sandbox.run_dir().join("disk.ublk");
    std::fs::write(&record, "{").expect("it can be damaged");
    let reported = ublk.command(&["del", "disk"]).failed_with(1);
    assert!(reported.contains("disk.ublk"), "{reported}");
    std::fs::remove_file(record).expect("it can be lost");
    let listed = ublk.command(&["list"]).ok();
    assert!(listed.contains(&node), "{listed}");
    ublk.command(&["del", &node]).ok();
    ublk.await_gone();
    Ok(())
}

/// Kills every process of the binary; returns whether there was none.
fn killed_all_servers() -> bool {
    let names = std::fs::read_dir("/proc").expect("it exists").flatten().map(|entry| entry.file_name());
    let is_server = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.trim() == "blockyard" && is_alive(*pid)
    };
    let pids: Vec<u32> = names.filter_map(|name| name.to_str()?.parse().ok()).filter(is_server).collect();
    pids.iter().for_each(|&pid| signal(pid, Signal::KILL));
    pids.is_empty()
}

/// Upgrades the server repeatedly, while writers run.
fn upgrade(options: &str, times: u64) -> Done {
    needs(features_for(options).with(Features::QUIESCE))?;
    needs_recovery(Recovery::Reissue)?;
    let mut ublk = Ublk::file(16 << 20, &format!("recovery=reissue,{options}"))?;
    let newer = ["one", "other"].map(|folder| {
        let program = ublk.sandbox.path(folder).join("blockyard");
        std::fs::create_dir(ublk.sandbox.path(folder)).expect("a folder in the sandbox");
        std::fs::copy(crate::server::binary(), &program).expect("room for another program");
        program
    });
    let writer = Writer::start(&ublk.disk, 4);
    for time in 0..times {
        writer.progress(40);
        let before = ublk.pid();
        let program = &newer[time as usize % 2];
        run(ublk.sandbox.command(program).args(["upgrade", "disk"])).ok();
        ublk.await_state(State::Live);
        assert_ne!(ublk.pid(), before, "the server is unchanged");
        let serves = std::fs::read_link(format!("/proc/{}/exe", ublk.pid())).expect("root may");
        assert_eq!(serves, *program, "another program serves it");
        if before == ublk.server.pid() {
            assert!(ublk.server.wait().success(), "the old server did not end well");
        }
    }
    writer.progress(40);
    let ledger = writer.finish();
    assert_eq!(ledger.failed, 0);
    ledger.check(&ublk.disk);
    ublk.delete();
    Ok(())
}

fn supervised() -> Done {
    needs_recovery(Recovery::Reissue)?;
    let sandbox = Sandbox::default();
    let mut ublk = Ublk::start_in(sandbox, 16 << 20, "file:{image}", "recovery=reissue", &["--supervise"])?;
    let writer = Writer::start(&ublk.disk, 4);
    for _ in 0..3 {
        writer.progress(40);
        let pid = ublk.pid();
        signal(pid, Signal::KILL);
        let back = until(PATIENCE, || {
            let info = ublk.info();
            (info.state() == Some(State::Live) && info.ublksrv_pid as u32 != pid).then_some(())
        });
        assert!(back.is_some(), "it has no server: {:?}", ublk.state());
    }
    let ledger = writer.finish();
    assert_eq!(ledger.failed, 0);
    ledger.check(&ublk.disk);
    ublk.server.terminate();
    ublk.await_gone();
    Ok(())
}
