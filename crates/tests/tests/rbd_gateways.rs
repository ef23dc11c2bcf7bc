//! Two gateways: one image of a Ceph, served by two processes, with `multipath` in front. Either may be
//! killed, stopped or blocklisted under a load that verifies, and an OSD may die.
//!
//! `./x test` and `./x ceph test` run them; without a cluster they are skipped.

use blockyard_tests::ceph::{Image, folder};
use blockyard_tests::iscsi::initiator::{Answer, Initiator};
use blockyard_tests::iscsi::{NAME, Target};
use blockyard_tests::peer::Peer;
use blockyard_tests::remote::{fio, serve_as, table_as};
use blockyard_tests::server::{Engine, Sandbox, Server, noise, signal};
use blockyard_tests::tools::{PATIENCE, command, missing, until, wait_within};
use proto::iscsi::initiator::Options;
use proto::nbd::{CommandFlags, Request};
use rustix::process::{Pid, Signal, kill_process};
use std::process::Child;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Options of a gateway's image: a client that does not hand the lock over is fenced after this time.
const GATEWAY: &str = ",takeover=1s";
/// Limit for any request while a gateway fails over: the path's timeout (3 s), the takeover (1 s), librbd's
/// attempts to get the lock, and a busy machine.
const STALL_MAX: Duration = Duration::from_secs(45);

/// Limit for a load, in case that its test fails. A load ends after the events of its test, so slow commands of the
/// cluster cannot outlast it.
const LOAD_MAX: Duration = Duration::from_secs(300);
/// fio's exit status after SIGINT; each error adds one.
const FIO_INTERRUPTED: i32 = 128;

/// Two gateways of an image and the device in front of them.
struct Gateways {
    one: Server,
    two: Server,
    front: Server,
}

impl Gateways {
    fn start(sandbox: &Sandbox, image: &Image, mib: u64) -> Gateways {
        let one = serve_as(sandbox, "one", &image.stack(GATEWAY), &[]);
        let two = serve_as(sandbox, "two", &image.stack(GATEWAY), &[]);
        let path = |name: &str| {
            let socket = sandbox.path(&format!("{name}.sock"));
            format!("nbd:nbd+unix:///{name}?socket={},timeout=3s", socket.display())
        };
        let line = format!(
            "0 {} multipath 1 queue_if_no_path 0 2 1 round-robin 0 1 0 {} round-robin 0 1 0 {}",
            mib * MIB / 512,
            path("one"),
            path("two")
        );
        let front = table_as(sandbox, "m", &line, &["--multipath", "checker=200ms,checker_max=1s"]);
        Gateways { one, two, front }
    }

    /// Puts the device under a load that verifies, until [`Gateways::finish`] ends it.
    fn load(&self, sandbox: &Sandbox) -> Child {
        let mut load =
            fio(&self.front, "--size=16M --bs=4k-64k --iodepth=8 --verify_backlog=64 --time_based");
        load.args(["--output-format=json", &format!("--runtime={}", LOAD_MAX.as_secs())]);
        load.arg(format!("--output={}", sandbox.path("fio.json").display()));
        load.spawn().unwrap()
    }

    /// Ends a load after another second; returns the time of its slowest request.
    fn finish(&self, sandbox: &Sandbox, mut load: Child, what: &str) -> Duration {
        std::thread::sleep(Duration::from_secs(1));
        assert!(load.try_wait().unwrap().is_none(), "{what}: {}{}", self.front.log(), self.two.log());
        signal(load.id(), Signal::INT);
        let ended = wait_within(&mut load, PATIENCE).expect("fio ends");
        let logs = || format!("{}{}", self.front.log(), self.two.log());
        assert_eq!(ended.code(), Some(FIO_INTERRUPTED), "{what}: {ended}: {}", logs());
        let text = std::fs::read_to_string(sandbox.path("fio.json")).unwrap();
        let report: serde_json::Value = serde_json::from_str(&text[text.find('{').unwrap_or(0)..]).unwrap();
        let slowest = |op: &str| report["jobs"][0][op]["lat_ns"]["max"].as_u64().unwrap_or_default();
        let stall = Duration::from_nanos(slowest("read").max(slowest("write")));
        println!("{what}: no error; the slowest request took {stall:?}");
        assert!(stall < STALL_MAX, "{what}: a request took {stall:?}");
        stall
    }
}

/// Returns the address of the client that holds the exclusive lock, as `ceph osd blocklist` wants it.
fn lock_owner(image: &Image) -> Option<String> {
    let list = image.rbd(&["lock", "ls", "--format", "json", &format!("rbd/{}", image.name)]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    list.as_array()?.first()?["address"].as_str().map(str::to_owned)
}

fn await_owner(image: &Image) -> String {
    until(PATIENCE, || lock_owner(image)).expect("a gateway holds the lock")
}

fn await_other_owner(image: &Image, first: &str) {
    until(PATIENCE, || lock_owner(image).filter(|owner| owner != first)).expect("the lock moves");
}

/// Another time after which the cluster ends the watch of a silent client, for watches that begin until this is
/// dropped.
struct WatchTimeout<'a>(&'a Image);

impl WatchTimeout<'_> {
    fn set(image: &Image, seconds: u32) -> WatchTimeout<'_> {
        let value = seconds.to_string();
        image.run(&["ceph", "tell", "osd.*", "config", "set", "osd_client_watch_timeout", &value]);
        WatchTimeout(image)
    }
}

impl Drop for WatchTimeout<'_> {
    fn drop(&mut self) {
        self.0.run(&["ceph", "tell", "osd.*", "config", "unset", "osd_client_watch_timeout"]);
    }
}

#[test]
fn a_gateway_killed_under_load_causes_no_error_and_no_loss() {
    let Some(image) = Image::new("gw-killed", 16, &[]) else { return };
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut gateways = Gateways::start(&sandbox, &image, 16);
    let load = gateways.load(&sandbox);
    let first = await_owner(&image);
    std::thread::sleep(Duration::from_secs(1));
    gateways.one.kill();
    await_other_owner(&image, &first);
    gateways.finish(&sandbox, load, "a gateway was killed");
    let mut reader = Peer::connect(&gateways.front.socket(), "m");
    reader.flush().unwrap();
    let seen = reader.read(0, 16 * MIB).unwrap();
    reader.disconnect();
    gateways.front.terminate();
    gateways.two.terminate();
    assert!(image.exported(&sandbox, "") == seen, "another client reads what was acknowledged");
}

/// The stopped gateway continues under load, after its lock was broken: writes that it had not sent yet must
/// not take effect.
#[test]
fn a_gateway_stopped_under_load_causes_no_error_and_does_not_write_when_it_wakes() {
    let Some(image) = Image::new("gw-stopped", 16, &[]) else { return };
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    // A client whose watch has expired loses its lock to any other one. The gateway is to fence a client before.
    let watch_timeout = WatchTimeout::set(&image, 60);
    let mut gateways = Gateways::start(&sandbox, &image, 16);
    let load = gateways.load(&sandbox);
    let first = await_owner(&image);
    drop(watch_timeout);
    std::thread::sleep(Duration::from_secs(1));
    gateways.one.signal(Signal::STOP);
    await_other_owner(&image, &first);
    gateways.two.await_log("the exclusive lock was taken over");
    std::thread::sleep(Duration::from_secs(2));
    gateways.one.signal(Signal::CONT);
    gateways.one.await_log("this client is blocklisted");
    gateways.finish(&sandbox, load, "a gateway was stopped");
    assert_ne!(await_owner(&image), first, "the other gateway has the lock");
    gateways.front.terminate();
    gateways.two.terminate();
    gateways.one.kill();
}

#[test]
fn a_gateway_blocklisted_under_load_causes_no_error_and_no_loss() {
    let Some(image) = Image::new("gw-fenced", 16, &[]) else { return };
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut gateways = Gateways::start(&sandbox, &image, 16);
    let load = gateways.load(&sandbox);
    let first = await_owner(&image);
    image.run(&["ceph", "osd", "blocklist", "add", &first]);
    gateways.one.await_log("this client is blocklisted");
    await_other_owner(&image, &first);
    gateways.finish(&sandbox, load, "a gateway was blocklisted");
    gateways.front.terminate();
    gateways.two.terminate();
    gateways.one.kill();
}

/// Continues a stopped gateway that has an unread write in its socket, after the other gateway has written to
/// the same block. Returns whether the late write succeeded, and whether the image contains it.
fn late_write(image: &Image) -> (bool, bool) {
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut one = serve_as(&sandbox, "one", &image.stack(GATEWAY), &[]);
    let mut two = serve_as(&sandbox, "two", &image.stack(GATEWAY), &[]);
    let mut first = Peer::connect(&one.socket(), "one");
    first.write(0, &noise(1, 4096), CommandFlags::empty()).unwrap();
    // The write is sent after the gateway has stopped: one that it executed before would be in order.
    one.freeze();
    let (late, newer) = (noise(2, 4096), noise(3, 4096));
    first.send(Request::write(0, 0, 4096), &late);
    let started = Instant::now();
    let mut second = Peer::connect(&two.socket(), "two");
    second.write(0, &newer, CommandFlags::empty()).unwrap();
    println!("a write waited {:?} for the lock of a stopped gateway", started.elapsed());
    one.signal(Signal::CONT);
    let accepted = first.receive().error.is_none();
    second.disconnect();
    two.terminate();
    one.kill();
    let written = image.exported(&sandbox, "");
    assert!(written[..4096] == late || written[..4096] == newer);
    (accepted, written[..4096] == late)
}

#[test]
fn a_stopped_gateway_that_wakes_up_does_not_write() {
    let Some(image) = Image::new("gw-late", 8, &[]) else { return };
    assert_eq!(late_write(&image), (false, false), "a fenced gateway has written");
}

/// The canary of the test above: without fencing the late write is accepted, and the newer one is lost.
#[test]
fn without_fencing_a_stopped_gateway_that_wakes_up_writes() {
    let Some(image) = Image::new("gw-canary", 8, &[]) else { return };
    let sandbox = Sandbox::default();
    let text = std::fs::read_to_string(&image.conf).unwrap();
    let conf = sandbox.text("ceph.conf", &format!("{text}\n[client]\nrbd blocklist on break lock = false\n"));
    let unfenced = Image { conf, name: image.name };
    let seen = late_write(&unfenced);
    std::mem::forget(unfenced);
    assert_eq!(seen, (true, true), "the late write has to arrive, or the other test proves nothing");
}

#[test]
fn an_osd_killed_and_restarted_makes_requests_wait_and_continue() {
    let Some(image) = Image::new("gw-osd", 16, &[]) else { return };
    let folder = folder().expect("a cluster");
    if missing(&["fio", "ceph-osd"]) || !folder.join("osd.1.pid").exists() {
        return;
    }
    let sandbox = Sandbox::new(Engine::IoUring);
    let mut gateways = Gateways::start(&sandbox, &image, 16);
    let load = gateways.load(&sandbox);
    await_owner(&image);
    let pid: i32 = std::fs::read_to_string(folder.join("osd.1.pid")).unwrap().trim().parse().unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let restarted = command(&["ceph-osd", "-i", "1"]).env("CEPH_CONF", &image.conf).status().unwrap();
    assert!(restarted.success(), "the OSD starts again: {restarted}");
    std::thread::sleep(Duration::from_secs(4));
    gateways.finish(&sandbox, load, "an OSD was killed and restarted");
    gateways.front.terminate();
    gateways.two.terminate();
    gateways.one.terminate();
}

/// SCSI statuses.
const GOOD: u8 = 0x00;
const CONFLICT: u8 = 0x18;

/// Types of reservations.
const WRITE_EXCLUSIVE: u8 = 1;
const EXCLUSIVE_ACCESS: u8 = 3;

/// PERSISTENT RESERVE OUT: REGISTER (`kind` 0), RESERVE (1), RELEASE (2) and PREEMPT (4).
fn reserve_out(session: &mut Initiator, action: u8, kind: u8, key: u64, action_key: u64) -> u8 {
    session.attentions(0);
    let cdb = [0x5F, action, kind, 0, 0, 0, 0, 0, 24, 0];
    let mut list = [0; 24];
    list[..8].copy_from_slice(&key.to_be_bytes());
    list[8..16].copy_from_slice(&action_key.to_be_bytes());
    session.command(0, &cdb, &list, 0).expect("an answer").status
}

/// Returns the access state of the session's target port group: 0 active/optimized, 1 active/non-optimized.
fn access_state(session: &mut Initiator) -> u8 {
    const REPORT_GROUPS: [u8; 12] = [0xA3, 0x0A, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0];
    session.attentions(0);
    session.good(0, &REPORT_GROUPS, &[], 64)[4] & 0x0F
}

/// WRITE(10) of a block.
fn write_block(session: &mut Initiator) -> u8 {
    session.attentions(0);
    session.command(0, &[0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[7; 512], 0).expect("an answer").status
}

/// READ(10) of a block.
fn read_block(session: &mut Initiator) -> u8 {
    session.attentions(0);
    session.command(0, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512).expect("an answer").status
}

#[test]
fn iscsi_gateways_share_reservations_and_report_who_has_the_lock() {
    let Some(image) = Image::new("gw-iscsi", 8, &[]) else { return };
    let sandboxes = [Sandbox::new(Engine::IoUring), Sandbox::new(Engine::IoUring)];
    let [one, two] = [0, 1].map(|number| Target::serve(&sandboxes[number], &image.stack(GATEWAY), "", &[]));
    let log_in = |target: &Target, initiator: &str| {
        let name = format!("iqn.2026-11.io.blockyard.test:{initiator}");
        Initiator::log_in(target.portal(), Options::new(&name, Some(NAME))).expect("a login")
    };
    let (mut owner, mut other) = (log_in(&one, "owner"), log_in(&two, "other"));
    const IDENTIFICATION: [u8; 6] = [0x12, 1, 0x83, 0, 255, 0];
    let identified = [&mut owner, &mut other].map(|session| {
        session.attentions(0);
        session.good(0, &IDENTIFICATION, &[], 255)[8..24].to_vec()
    });
    assert_eq!(identified[0], identified[1], "two gateways are two paths to one unit");

    assert_eq!(write_block(&mut owner), GOOD);
    until(PATIENCE, || (access_state(&mut owner) == 0).then_some(())).expect("the owner is optimized");
    until(PATIENCE, || (access_state(&mut other) == 1).then_some(())).expect("the other one is not");

    // A registration and a reservation at one gateway exclude initiators of the other one at once.
    assert_eq!(reserve_out(&mut owner, 0, 0, 0, 1), GOOD);
    assert_eq!(reserve_out(&mut owner, 1, WRITE_EXCLUSIVE, 1, 0), GOOD);
    assert_eq!(write_block(&mut other), CONFLICT);
    // The other gateway changes them, from the state of the first one.
    assert_eq!(reserve_out(&mut other, 0, 0, 0, 2), GOOD);
    assert_eq!(reserve_out(&mut other, 4, WRITE_EXCLUSIVE, 2, 1), GOOD, "a preemption");
    assert_eq!(write_block(&mut owner), CONFLICT);
    assert_eq!(write_block(&mut other), GOOD);
    until(PATIENCE, || (access_state(&mut other) == 0).then_some(())).expect("the lock has moved");
    until(PATIENCE, || (access_state(&mut owner) == 1).then_some(())).expect("the state follows");

    // A gateway that was stopped reads the reservations before it executes a command.
    assert_eq!(read_block(&mut owner), GOOD);
    let stopped = one.server.as_ref().expect("our own server");
    stopped.freeze();
    assert_eq!(reserve_out(&mut other, 2, WRITE_EXCLUSIVE, 2, 0), GOOD);
    assert_eq!(reserve_out(&mut other, 1, EXCLUSIVE_ACCESS, 2, 0), GOOD);
    stopped.signal(Signal::CONT);
    assert_eq!(read_block(&mut owner), CONFLICT);
    assert!(image.rbd(&["image-meta", "ls", "rbd/gw-iscsi"]).contains("blockyard.reservations"));
}

/// COMPARE AND WRITE of whole blocks: `old` is what they should contain.
fn compare_and_write(session: &mut Initiator, lba: u8, old: &[u8], new: &[u8]) -> Answer {
    let mut cdb = [0; 16];
    (cdb[0], cdb[9], cdb[13]) = (0x89, lba, (old.len() / 512) as u8);
    session.command(0, &cdb, &[old, new].concat(), 0).expect("an answer")
}

/// READ(10) of blocks. Changes of the access state are reported by unit attentions, which it ignores.
fn read_blocks(session: &mut Initiator, lba: u8, blocks: u8) -> Vec<u8> {
    let cdb = [0x28, 0, 0, 0, 0, lba, 0, 0, blocks, 0];
    loop {
        let answer = session.command(0, &cdb, &[], u32::from(blocks) * 512).expect("an answer");
        match answer.sense_code() {
            None => return answer.data,
            Some((key, ..)) => assert_eq!(key, 6, "a unit attention: {answer:?}"),
        }
    }
}

fn counter(blocks: &[u8]) -> u64 {
    u64::from_le_bytes(blocks[8..16].try_into().expect("eight bytes"))
}

/// Counts in blocks until `end` by reading them, and by COMPARE AND WRITE; returns how often that succeeded.
fn count_up(session: &mut Initiator, lba: u8, blocks: u8, end: Instant) -> u64 {
    let mut successes = 0;
    while Instant::now() < end {
        let old = read_blocks(session, lba, blocks);
        let mut new = old.clone();
        new[8..16].copy_from_slice(&(counter(&old) + 1).to_le_bytes());
        let answer = compare_and_write(session, lba, &old, &new);
        match answer.sense_code() {
            None => successes += u64::from(answer.status == GOOD),
            Some((key, ..)) => assert!(matches!(key, 6 | 0xE), "{answer:?}"),
        }
    }
    successes
}

/// Two initiators count at two gateways. No increment is lost within an object; across two objects a gateway
/// reads and then writes, and what the other one wrote in between is lost, which shows that the test can fail.
#[test]
fn compare_and_write_is_atomic_between_gateways_within_an_object() {
    let Some(image) = Image::new("gw-compare", 1, &["--object-size", "4K"]) else { return };
    let sandboxes = [Sandbox::new(Engine::IoUring), Sandbox::new(Engine::IoUring)];
    let targets = [0, 1].map(|number| Target::serve(&sandboxes[number], &image.stack(""), "", &[]));
    let mut sessions = [0, 1].map(|number: usize| {
        let name = format!("iqn.2026-11.io.blockyard.test:counter-{number}");
        let options = Options::new(&name, Some(NAME));
        let mut session = Initiator::log_in(targets[number].portal(), options).expect("a login");
        session.attentions(0);
        session
    });
    let mut counted = |lba: u8, blocks: u8, seconds: u64| {
        let end = Instant::now() + Duration::from_secs(seconds);
        let successes: Vec<u64> = std::thread::scope(|scope| {
            let count = |session| scope.spawn(move || count_up(session, lba, blocks, end));
            let counting: Vec<_> = sessions.iter_mut().map(count).collect();
            counting.into_iter().map(|counting| counting.join().expect("no panic")).collect()
        });
        let ends = sessions.each_mut().map(|session| counter(&read_blocks(session, lba, blocks)));
        println!("blocks {lba} + {blocks}: {successes:?} increments succeeded, the counters are {ends:?}");
        assert!(successes.iter().all(|successes| *successes > 0), "{successes:?}");
        assert_eq!(ends[0], ends[1]);
        (successes.iter().sum::<u64>(), ends[0])
    };
    let (successes, count) = counted(0, 1, 3);
    assert_eq!(count, successes, "increments are lost");
    // Blocks 7 and 8 are in two objects.
    let (successes, count) = counted(7, 2, 2);
    assert!(count < successes, "{count} of {successes} increments: the test cannot fail");

    // A difference is reported with its offset (fixed format, INFORMATION), and nothing is written.
    let old = read_blocks(&mut sessions[1], 0, 1);
    let mut wrong = old.clone();
    wrong[300] ^= 1;
    let answer = compare_and_write(&mut sessions[0], 0, &wrong, &[9; 512]);
    assert_eq!(answer.sense_code(), Some((0xE, 0x1D, 0)), "{answer:?}");
    assert_eq!(answer.sense[..7], [0xF0, 0, 0xE, 0, 0, 1, 44], "300");
    assert!(read_blocks(&mut sessions[1], 0, 1) == old);
    // Another client of the cluster reads what was written.
    assert_eq!(counter(&image.exported(&sandboxes[0], "")), counter(&old));
}
