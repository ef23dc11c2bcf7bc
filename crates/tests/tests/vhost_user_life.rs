//! vhost-user devices over a machine's life: copied requests and the memory per machine, migration's log of
//! dirty pages, resets, and takeover by another server.

use blockyard_tests::on_both_engines;
use blockyard_tests::server::{Engine, Sandbox, Server, is_release};
use blockyard_tests::tools::{PATIENCE, until};
use blockyard_tests::vhost_user::{FrontEnd, GUEST_AT, Queue, await_event};
use proto::vhost_user::wire::VRING_LOG;
use proto::vhost_user::{LogArea, Request};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;
use virtio::Features;
use virtio::blk::{Kind, S_OK};
use virtio::driver::SharedMemory;
use virtio::memory::{GuestRegion, Span};

on_both_engines!(user_space_touches_no_byte_of_a_files_data, a_migration_finds_the_pages_that_reads_wrote);

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// Time after which requests that were kicked for are in flight; writes take a quarter of a second.
const POPPED: Duration = Duration::from_millis(50);

fn serve(sandbox: &Sandbox, stack: &str, more: &[&str]) -> Server {
    let export = format!("unix:{}", sandbox.path("vm.sock").display());
    let ring = sandbox.engine().name();
    let mut arguments = vec!["serve", stack, "--vhost-user", &export, "--ring", ring, "--name", "disk"];
    arguments.extend(more);
    sandbox.start(&mut sandbox.blockyard(&arguments), 1)
}

fn file_of(sandbox: &Sandbox, size: u64) -> String {
    format!("file:{},format=raw", sandbox.image("disk.img", size).display())
}

/// Number of requests whose data was copied.
fn copied(sandbox: &Sandbox) -> u64 {
    let text = sandbox.run(&["show", "disk", "--json"]).ok();
    let (_, after) = text.split_once("\"copied\":").expect("the export counts copies");
    let number: String = after.trim_start().chars().take_while(char::is_ascii_digit).collect();
    number.parse().expect("a number")
}

/// Many reads and writes at once, of one page to sixteen.
fn mixed(queue: &mut Queue, front: &FrontEnd) {
    for slot in 0..8u16 {
        let kind = if slot % 2 == 0 { Kind::Write } else { Kind::Read };
        assert!(front.table().write(queue.data(slot), &vec![slot as u8; 65_536]));
        assert!(queue.add(slot, kind, u64::from(slot) * 128, 4096 << (slot / 2)));
    }
    queue.publish();
    (0..8).for_each(|_| assert_eq!(queue.wait().status, S_OK));
}

fn user_space_touches_no_byte_of_a_files_data(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let mut server = serve(&sandbox, &file_of(&sandbox, 16 * MIB), &["--queues", "1"]);
    let mut front = FrontEnd::connect(&sandbox.path("vm.sock"), 4 * MIB);
    let mut queue = front.start_queue(0, 64, 8, 64 << 10);
    (0..10).for_each(|_| mixed(&mut queue, &front));
    assert_eq!(queue.read(&front, 2 * 65_536, 4096), [2; 4096]);
    assert_eq!(copied(&sandbox), 0);
    server.kill();
    // Checks the counter itself: requests of a RAM disk are copied.
    let ram = Sandbox::new(engine);
    let _server = serve(&ram, "ram:16M", &["--queues", "1"]);
    let mut front = FrontEnd::connect(&ram.path("vm.sock"), 4 * MIB);
    let mut queue = front.start_queue(0, 64, 8, 64 << 10);
    mixed(&mut queue, &front);
    assert_eq!(copied(&ram), 8);
}

/// Returns the anonymous memory of a server with that many machines, each with a disk of its own, after
/// requests on all disks.
fn anonymous_with(machines: usize) -> u64 {
    let sandbox = Sandbox::new(Engine::Auto);
    let mut topology = String::from("queues = 1\n");
    for number in 0..machines {
        let socket = sandbox.path(&format!("{number}.sock"));
        let file = sandbox.image(&format!("{number}.img"), 16 * MIB);
        let _ = write!(
            topology,
            "[device.disk{number}]\nstack = \"file:{},format=raw\"\n\
             [[export]]\ndevice = \"disk{number}\"\nvhost-user = \"unix:{}\"\n",
            file.display(),
            socket.display()
        );
    }
    let server = sandbox.up(&topology, machines);
    let fronts: Vec<FrontEnd> = (0..machines)
        .map(|number| {
            let mut front = FrontEnd::connect(&sandbox.path(&format!("{number}.sock")), 4 * MIB);
            let mut queue = front.start_queue(0, 128, 8, 64 << 10);
            (0..4).for_each(|_| mixed(&mut queue, &front));
            front
        })
        .collect();
    let anonymous = server.anonymous();
    drop(fronts);
    anonymous
}

#[test]
fn another_machine_costs_at_most_two_mebibytes() {
    let (one, nine) = (anonymous_with(1), anonymous_with(9));
    let each = nine.saturating_sub(one) / 8;
    eprintln!("{} KiB of anonymous memory for each of 8 additional machines", each >> 10);
    // Structures of a debug build are as large, and its code is not anonymous memory.
    assert!(each <= 2 * MIB, "{each} bytes for each additional machine (release: {})", is_release());
}

/// Pages that the log marks, by guest page number; the log is empty afterwards.
fn take_dirty(log: &SharedMemory) -> BTreeSet<u64> {
    let mapping = log.mapping().clone();
    let len = mapping.len();
    let region = GuestRegion { guest: 0, user: 0, len, mapping, region: block::Region(0) };
    let table = virtio::memory::GuestMemory::new(vec![region], None).expect("one region");
    let span: Span = table.translate(0, len as u32).expect("all of it");
    let mut bytes = vec![0; len as usize];
    assert!(table.read(span, &mut bytes) && table.fill(span, 0));
    let pages = (0..len * 8).filter(|page| bytes[(page / 8) as usize] >> (page % 8) & 1 == 1);
    pages.collect()
}

fn a_migration_finds_the_pages_that_reads_wrote(engine: Engine) {
    for stack in ["file", "ram:16M"] {
        let sandbox = Sandbox::new(engine);
        let stack = if stack == "file" { file_of(&sandbox, 16 * MIB) } else { stack.to_owned() };
        let _server = serve(&sandbox, &stack, &["--queues", "1"]);
        let mut front = FrontEnd::connect(&sandbox.path("vm.sock"), 8 * MIB);
        let mut queue = front.start_queue(0, 64, 8, 64 << 10);
        mixed(&mut queue, &front);
        let log = SharedMemory::create(((GUEST_AT + 8 * MIB) / PAGE / 8).next_multiple_of(PAGE)).unwrap();
        let area = LogArea { len: log.mapping().len(), offset: 0 };
        front.send(&Request::SetLogBase(area), &[log.file()]);
        front.receive();
        assert_eq!(queue.perform(Kind::Read, 0, 65_536), S_OK);
        assert_eq!(take_dirty(&log), BTreeSet::new(), "{stack}: nothing is logged before the feature is set");
        let features = front.features().bits();
        front.done(&Request::SetFeatures(features | Features::LOG_ALL.bits()), &[]);
        front.set_addresses(&queue, VRING_LOG);

        let page = |address: u64| address / PAGE;
        let pages_of = |slot: u16, len: u64, queue: &Queue| {
            let first = page(queue.addresses(slot).0);
            (first..first + len.div_ceil(PAGE)).collect::<BTreeSet<u64>>()
        };
        assert_eq!(queue.perform(Kind::Read, 8, 65_536 - 4096), S_OK);
        let mut dirty = take_dirty(&log);
        let data = pages_of(0, 65_536 - 4096, &queue);
        assert!(dirty.is_superset(&data), "{stack}: the data of a read");
        let own = BTreeSet::from([page(queue.addresses(0).1), page(queue.layout().device)]);
        // The used ring is logged after it was written, which the driver may see before.
        let logged = until(PATIENCE, || {
            dirty.extend(take_dirty(&log));
            dirty.is_superset(&own).then_some(())
        });
        assert!(logged.is_some(), "{stack}: status byte and used ring: {dirty:?}, {own:?}");
        assert!(!dirty.contains(&(data.last().unwrap() + 1)), "{stack}: no page behind the data");
        let others: BTreeSet<u64> = dirty.difference(&data).copied().collect();
        assert!(others.len() <= 3, "{stack}: nothing else: {others:?}");

        assert_eq!(queue.perform(Kind::Write, 0, 65_536), S_OK);
        let dirty = take_dirty(&log);
        assert!(dirty.is_disjoint(&pages_of(0, 65_536, &queue)), "{stack}: a write reads the data");
        assert!(dirty.contains(&page(queue.addresses(0).1)), "{stack}: its status byte was written");
        assert_eq!(queue.perform(Kind::GetId, 0, 20), S_OK);
        assert!(take_dirty(&log).contains(&page(queue.addresses(0).0)), "{stack}: the ID string");

        front.done(&Request::SetFeatures(features), &[]);
        take_dirty(&log);
        assert_eq!(queue.perform(Kind::Read, 0, 65_536), S_OK);
        assert_eq!(take_dirty(&log), BTreeSet::new(), "{stack}: the migration has ended");
    }
}

#[test]
fn a_reset_stops_the_rings_and_the_driver_starts_anew() {
    let sandbox = Sandbox::new(Engine::Auto);
    let _server = serve(&sandbox, "ram:16M", &["--queues", "2", "--layer", "delay,write=250ms"]);
    let mut front = FrontEnd::connect(&sandbox.path("vm.sock"), 8 * MIB);
    let features = front.features().bits();
    for round in 0..2u8 {
        let mut queues = [front.start_queue(0, 16, 2, 4096), front.start_queue(1, 16, 2, 4096)];
        let offset = u64::from(round) * PAGE;
        queues[0].write(&front, offset, &[round + 1; 4096]);
        // This request is in flight when the device is reset: the reset waits for it.
        assert!(front.table().write(queues[1].data(0), &[round + 101; 4096]));
        assert!(queues[1].add(0, Kind::Write, (MIB + offset) / 512, 4096));
        queues[1].publish();
        std::thread::sleep(POPPED);
        front.done(&Request::ResetDevice, &[]);
        assert!(queues[1].take().is_some_and(|done| done.status == S_OK), "complete before the answer");
        // A ring of a device that was reset is served no more.
        assert!(queues[0].add(0, Kind::Read, 0, 4096));
        queues[0].kick_now();
        let interrupted = await_event(queues[0].call(), Duration::from_millis(30));
        assert!(!interrupted && queues[0].take().is_none());
        front.done(&Request::SetFeatures(features), &[]);
        let mut again = front.start_queue(0, 64, 2, 4096);
        assert_eq!(again.read(&front, offset, 4096), [round + 1; 4096]);
        assert_eq!(again.read(&front, MIB + offset, 4096), [round + 101; 4096]);
        front.done(&Request::ResetDevice, &[]);
        front.done(&Request::SetFeatures(features), &[]);
    }
}

/// Replaces the server twice as an upgrade of the program does: the old one ends by SIGTERM while requests
/// are in flight and more are in the ring, and the next one continues on the socket.
#[test]
fn another_server_takes_over_under_load() {
    const SLOTS: u16 = 16;
    let sandbox = Sandbox::new(Engine::Auto);
    let stack = file_of(&sandbox, 4 * MIB);
    // Few tags, so that requests wait in the ring when the server ends.
    let more = ["--layer", "delay,write=250ms", "--depth", "4", "--queues", "1"];
    let mut server = serve(&sandbox, &stack, &more);
    let mut front = FrontEnd::connect(&sandbox.path("vm.sock"), 4 * MIB);
    front.keep_inflight(1, 64);
    let mut queue = front.start_queue(0, 64, SLOTS, 4096);
    for round in 1..=2u8 {
        for slot in 0..SLOTS {
            assert!(front.table().write(queue.data(slot), &[round * 16 + slot as u8; 4096]));
            assert!(queue.add(slot, Kind::Write, u64::from(slot) * 8, 4096));
        }
        queue.publish();
        std::thread::sleep(POPPED);
        server.signal(rustix::process::Signal::TERM);
        assert!(server.wait().success(), "{}", server.log());
        let early = std::iter::from_fn(|| queue.take()).map(|done| assert_eq!(done.status, S_OK)).count();
        assert!(early < usize::from(SLOTS), "requests wait when the server ends");
        server = serve(&sandbox, &stack, &more);
        front.reconnect(&sandbox.path("vm.sock"));
        front.hand_over(&queue, 0);
        (early..usize::from(SLOTS)).for_each(|_| assert_eq!(queue.wait().status, S_OK));
        for slot in 0..SLOTS {
            let data = queue.read(&front, u64::from(slot) * PAGE, 4096);
            assert_eq!(data, [round * 16 + slot as u8; 4096], "round {round}, slot {slot}");
        }
    }
}
