//! vhost-user devices as a virtual machine sees them: data, the configuration space, notifications, and
//! drivers that violate the specification.

use blockyard_tests::on_both_engines;
use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::tools::PATIENCE;
use blockyard_tests::vhost_user::{FrontEnd, GUEST_AT, Queue, USER_AT, await_event};
use proto::vhost_user::{Config, ConfigKind, MemoryRegion, Request, VringAddress, VringState};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;
use virtio::blk::{Kind, S_IOERR, S_OK, S_UNSUPP};

on_both_engines!(
    what_a_guest_writes_is_in_the_file_and_is_read_back,
    data_of_stacks_that_access_it_is_copied_intact,
    a_resize_is_reported_and_the_new_blocks_are_usable,
    a_driver_that_violates_the_specification_stops_its_own_ring_only,
    a_ring_that_was_stopped_continues_where_it_was
);

const MIB: u64 = 1 << 20;

/// Serves a stack on a socket, whose path is returned.
fn serve(sandbox: &Sandbox, stack: &str, more: &[&str]) -> (Server, PathBuf) {
    serve_with(sandbox, stack, "", more)
}

fn serve_with(sandbox: &Sandbox, stack: &str, options: &str, more: &[&str]) -> (Server, PathBuf) {
    let socket = sandbox.path("vm.sock");
    let export = format!("unix:{}{options}", socket.display());
    let ring = sandbox.engine().name();
    let mut arguments = vec!["serve", stack, "--vhost-user", &export, "--ring", ring, "--name", "disk"];
    arguments.extend(more);
    let server = sandbox.start(&mut sandbox.blockyard(&arguments), 1);
    (server, socket)
}

/// Bytes that differ from sector to sector.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(..)).collect()
}

fn file_of(sandbox: &Sandbox, size: u64) -> (PathBuf, String) {
    let file = sandbox.image("disk.img", size);
    let stack = format!("file:{},format=raw", file.display());
    (file, stack)
}

fn what_a_guest_writes_is_in_the_file_and_is_read_back(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (file, stack) = file_of(&sandbox, 16 * MIB);
    let (_server, socket) = serve(&sandbox, &stack, &[]);
    let mut front = FrontEnd::connect(&socket, 16 * MIB);
    assert_eq!(front.capacity(), 16 * MIB);
    let mut queue = front.start_queue(0, 128, 8, 1 << 20);
    let data = pattern(1, 1 << 20);
    queue.write(&front, 3 * MIB, &data);
    queue.write(&front, 512, &data[..512]);
    assert_eq!(queue.perform(Kind::Flush, 0, 0), S_OK);
    let stored = std::fs::read(&file).expect("the file");
    assert!(stored[3 * MIB as usize..4 * MIB as usize] == data, "the file has what was written");
    assert!(stored[512..1024] == data[..512]);
    assert!(queue.read(&front, 3 * MIB, 1 << 20) == data);
    assert!(queue.read(&front, 0, 512) == [0; 512]);

    // Many at once, completed in any order.
    for slot in 0..8 {
        let part = &data[usize::from(slot) * 4096..][..4096];
        assert!(front.table().write(queue.data(slot), part));
        assert!(queue.add(slot, Kind::Write, u64::from(slot) * 8, 4096));
    }
    queue.publish();
    (0..8).for_each(|_| assert_eq!(queue.wait().status, S_OK));
    assert!(queue.read(&front, 0, 32 << 10) == data[..32 << 10]);

    assert_eq!(queue.perform(Kind::Read, 16 * MIB / 512, 512), S_IOERR, "past the end");
    assert_eq!(queue.perform(Kind::Write, 0, 100), S_IOERR, "no whole sector");
    assert_eq!(queue.perform(Kind::Other(77), 0, 0), S_UNSUPP);
    assert_eq!(queue.perform(Kind::GetId, 0, 20), S_OK);
    let mut id = [0; 20];
    assert!(front.table().read(queue.data(0), &mut id));
    assert_eq!(&id[..5], b"disk\0");

    // One range of 64 KiB at 3 MiB, to be unmapped.
    let mut range = [0; 16];
    range[..8].copy_from_slice(&(3 * MIB / 512).to_le_bytes());
    range[8..12].copy_from_slice(&128u32.to_le_bytes());
    range[12] = 1;
    assert!(front.table().write(queue.data(0), &range));
    assert_eq!(queue.perform(Kind::WriteZeroes, 0, 16), S_OK);
    let after = queue.read(&front, 3 * MIB, 128 << 10);
    assert!(after[..64 << 10].iter().all(|byte| *byte == 0));
    assert!(after[64 << 10..] == data[64 << 10..128 << 10]);
    range[12] = 0;
    assert!(front.table().write(queue.data(0), &range));
    assert_eq!(queue.perform(Kind::Discard, 0, 16), S_OK);
}

fn data_of_stacks_that_access_it_is_copied_intact(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (_server, socket) = serve(&sandbox, "ram:64M", &["--queues", "1"]);
    let mut front = FrontEnd::connect(&socket, 16 * MIB);
    let mut queue = front.start_queue(0, 64, 8, 1 << 20);
    let data = pattern(2, 1 << 20);
    queue.write(&front, 5 * MIB, &data);
    assert!(queue.read(&front, 5 * MIB, 1 << 20) == data);
    assert!(queue.read(&front, 6 * MIB - 512, 1024)[..512] == data[(1 << 20) - 512..]);
    // Requests that are copied wait for memory when more are in flight than memory is reserved for.
    for round in 0..4 {
        for slot in 0..8 {
            assert!(front.table().write(queue.data(slot), &data));
            assert!(queue.add(slot, Kind::Write, (u64::from(slot) + round) * 2048, 1 << 20));
        }
        queue.publish();
        (0..8).for_each(|_| assert_eq!(queue.wait().status, S_OK));
    }
    assert!(queue.read(&front, 7 * MIB, 1 << 20) == data);
}

fn a_resize_is_reported_and_the_new_blocks_are_usable(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (_file, stack) = file_of(&sandbox, 4 * MIB);
    let (_server, socket) = serve(&sandbox, &stack, &[]);
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    let mut queue = front.start_queue(0, 64, 2, 4096);
    assert_eq!(queue.perform(Kind::Read, 4 * MIB / 512, 4096), S_IOERR);
    sandbox.run(&["resize", "disk", "8M"]).ok();
    front.await_config_change();
    assert_eq!(front.capacity(), 8 * MIB);
    queue.write(&front, 8 * MIB - 4096, &pattern(3, 4096));
}

fn a_driver_that_violates_the_specification_stops_its_own_ring_only(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let other = sandbox.path("other.sock");
    let export = format!("unix:{}", other.display());
    let more = ["--vhost-user", &export, "--queues", "1"];
    let socket = sandbox.path("vm.sock");
    let first = format!("unix:{}", socket.display());
    let mut arguments = vec!["serve", "ram:64M", "--vhost-user", &first, "--name", "disk"];
    arguments.extend(more);
    arguments.extend(["--ring", engine.name()]);
    let _server = sandbox.start(&mut sandbox.blockyard(&arguments), 2);
    let mut good = FrontEnd::connect(&other, 4 * MIB);
    let mut good_queue = good.start_queue(0, 64, 2, 4096);
    type Forgery = fn(&mut Queue);
    let forgeries: [(&str, Forgery); 4] = [
        ("a loop", |queue| {
            let next = queue.driver().forge().used_index().expect("a split ring without requests");
            let forge = queue.driver().forge();
            forge.descriptor(0, GUEST_AT, 16, 1, 0);
            forge.available(next, 0);
            forge.available_index(next.wrapping_add(1));
        }),
        ("an index beyond the ring", |queue| {
            let next = queue.driver().forge().used_index().expect("a split ring without requests");
            queue.driver().forge().available_index(next.wrapping_add(1000));
        }),
        ("an address outside of guest memory", |queue| {
            let next = queue.driver().forge().used_index().expect("a split ring without requests");
            let forge = queue.driver().forge();
            forge.descriptor(5, u64::MAX - 10, 16, 0, 0);
            forge.available(next, 5);
            forge.available_index(next.wrapping_add(1));
        }),
        ("a chain without a status byte", |queue| {
            let next = queue.driver().forge().used_index().expect("a split ring without requests");
            let forge = queue.driver().forge();
            forge.descriptor(7, GUEST_AT, 16, 0, 0);
            forge.available(next, 7);
            forge.available_index(next.wrapping_add(1));
        }),
    ];
    for (number, (what, forgery)) in forgeries.into_iter().enumerate() {
        let mut front = FrontEnd::connect(&socket, 4 * MIB);
        let mut queue = front.start_queue(0, 64, 2, 4096);
        let data = pattern(number as u64, 4096);
        queue.write(&front, 0, &data);
        forgery(&mut queue);
        queue.kick_now();
        assert!(await_event(queue.error(), PATIENCE), "{what}: the error was reported");
        front.await_config_change();
        let status = front.number(&Request::GetStatus);
        assert_ne!(status & 64, 0, "{what}: the device needs a reset");
        good_queue.write(&good, MIB, &data);
        assert!(good_queue.read(&good, 0, 4096) == data, "{what}: others are served");
        // After a reset the ring works again.
        front.done(&Request::SetStatus(0), &[]);
        assert_eq!(front.number(&Request::GetStatus), 0);
        let features = front.features().bits();
        front.done(&Request::SetFeatures(features), &[]);
        let mut again = Queue::new(&mut front, 0, 64, 2, 4096);
        front.hand_over(&again, 0);
        assert!(again.read(&front, 0, 4096) == data, "{what}: the ring was reset");
    }
}

fn a_ring_that_was_stopped_continues_where_it_was(engine: Engine) {
    let sandbox = Sandbox::new(engine);
    let (_file, stack) = file_of(&sandbox, 4 * MIB);
    let (_server, socket) = serve(&sandbox, &stack, &["--queues", "2"]);
    let mut front = FrontEnd::connect(&socket, 8 * MIB);
    assert_eq!(front.number(&Request::GetQueueNum), 2);
    let mut queues = [front.start_queue(0, 16, 4, 4096), front.start_queue(1, 16, 4, 4096)];
    let mut bases = [0; 2];
    for round in 0..20u64 {
        for queue in &mut queues {
            for step in 0..3 {
                let data = pattern(round * 100 + step, 4096);
                let offset = (round * 3 + step) * 4096;
                queue.write(&front, offset, &data);
                assert!(queue.read(&front, offset, 4096) == data);
            }
        }
        for (queue, base) in queues.iter().zip(&mut bases) {
            let next = front.stop_queue(queue.index());
            assert_eq!(next, *base + 6, "six requests were processed");
            *base = next;
        }
        for (queue, base) in queues.iter().zip(bases) {
            front.hand_over(queue, base);
        }
    }
    // While a ring is disabled its requests wait.
    front.done(&Request::SetVringEnable(VringState { index: 0, num: 0 }), &[]);
    assert!(queues[0].add(0, Kind::Read, 0, 4096));
    queues[0].kick_now();
    assert!(!await_event(queues[0].call(), Duration::from_millis(50)) || queues[0].take().is_none());
    queues[0].publish();
    front.done(&Request::SetVringEnable(VringState { index: 0, num: 1 }), &[]);
    assert_eq!(queues[0].wait().status, S_OK);
}

#[test]
fn guest_memory_is_added_and_removed_while_rings_are_served() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_server, socket) = serve(&sandbox, "ram:16M", &["--queues", "1"]);
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    let mut queue = front.start_queue(0, 64, 2, 4096);
    assert!(front.number(&Request::GetMaxMemSlots) >= 8);
    let more = virtio::driver::SharedMemory::create(MIB).unwrap();
    let region = MemoryRegion { guest_address: 1 << 40, len: MIB, user_address: 1 << 46, mmap_offset: 0 };
    queue.write(&front, 0, &pattern(4, 4096));
    front.done(&Request::AddMemReg(region), &[more.file().as_fd()]);
    assert!(queue.read(&front, 0, 4096) == pattern(4, 4096));
    let overlapping = MemoryRegion { guest_address: (1 << 40) + 4096, ..region };
    assert!(!front.is_done(&Request::AddMemReg(overlapping), &[more.file().as_fd()]));
    front.done(&Request::RemMemReg(region), &[]);
    assert!(!front.is_done(&Request::RemMemReg(region), &[]));
    assert!(queue.read(&front, 0, 4096) == pattern(4, 4096));
}

#[test]
fn a_driver_may_switch_the_write_cache_and_writes_nothing_else() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_file, stack) = file_of(&sandbox, 4 * MIB);
    let (_server, socket) = serve(&sandbox, &stack, &[]);
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    let mut queue = front.start_queue(0, 64, 2, 4096);
    for on in [0, 1] {
        let config = Config { offset: 32, kind: ConfigKind::Writable, content: &[on] };
        front.done(&Request::SetConfig(config), &[]);
        assert_eq!(front.config()[32], on);
        queue.write(&front, 0, &pattern(on.into(), 4096));
    }
    let capacity = Config { offset: 0, kind: ConfigKind::Writable, content: &[1; 8] };
    assert!(!front.is_done(&Request::SetConfig(capacity), &[]));
    assert_eq!(front.capacity(), 4 * MIB);
}

/// Returns the resident memory of a server after this number of guests has used a disk each, without the memory of
/// the guests themselves.
fn resident_with(guests: usize) -> u64 {
    let sandbox = Sandbox::new(Engine::Auto);
    let mut topology = String::new();
    for number in 0..guests {
        let file = sandbox.image(&format!("{number}.img"), 16 * MIB);
        topology += &format!(
            "[device.d{number}]\nstack = \"file:{},format=raw\"\n[[export]]\ndevice = \"d{number}\"\n\
             vhost-user = \"unix:{number}.sock\"\n",
            file.display()
        );
    }
    sandbox.text("guests.toml", &topology);
    let server = sandbox.start(&mut sandbox.blockyard(&["up", "guests.toml"]), guests);
    let mut fronts = Vec::new();
    for number in 0..guests {
        let mut front = FrontEnd::connect(&sandbox.path(&format!("{number}.sock")), 32 * MIB);
        let mut queue = front.start_queue(0, 256, 64, 128 << 10);
        for slot in 0..64 {
            let kind = if slot % 2 == 0 { Kind::Write } else { Kind::Read };
            assert!(queue.add(slot, kind, u64::from(slot) * 256, 128 << 10));
        }
        queue.publish();
        (0..64).for_each(|_| assert_eq!(queue.wait().status, S_OK));
        fronts.push((front, queue));
    }
    server.resident() - server.shared()
}

#[test]
fn each_further_guest_takes_at_most_2_mib() {
    let (one, nine) = (resident_with(1), resident_with(9));
    let each = nine.saturating_sub(one) / 8;
    println!("a guest: {} KiB; each further one: {} KiB", one >> 10, each >> 10);
    assert!(each <= 2 * MIB, "{each} bytes");
}

#[test]
fn packed_virtqueues_are_withheld_on_request() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_file, stack) = file_of(&sandbox, MIB);
    for (options, offered) in [("", true), (",packed=off", false)] {
        let (mut server, socket) = serve_with(&sandbox, &stack, options, &[]);
        let mut front = FrontEnd::connect_packed(&socket, 4 * MIB);
        assert_eq!(front.features().contains(virtio::Features::RING_PACKED), offered, "{options}");
        let mut queue = front.start_queue(0, 64, 2, 4096);
        let data = pattern(1, 4096);
        queue.write(&front, 0, &data);
        assert!(queue.read(&front, 0, 4096) == data, "{options}");
        drop(front);
        server.terminate();
    }
}

#[test]
fn a_guest_that_may_only_read_cannot_write() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (file, stack) = file_of(&sandbox, 4 * MIB);
    let (_server, socket) = serve_with(&sandbox, &stack, ",ro,serial=only-read", &[]);
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    assert!(front.features().contains(virtio::Features::RO));
    let mut queue = front.start_queue(0, 64, 2, 4096);
    assert_eq!(queue.perform(Kind::Write, 0, 4096), S_IOERR);
    assert_eq!(queue.perform(Kind::Read, 0, 4096), S_OK);
    assert_eq!(queue.perform(Kind::GetId, 0, 20), S_OK);
    let mut id = [0; 9];
    assert!(front.table().read(queue.data(0), &mut id));
    assert_eq!(&id, b"only-read");
    assert!(std::fs::read(&file).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn packed_virtqueues_carry_the_same_requests() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (file, stack) = file_of(&sandbox, 16 * MIB);
    let (_server, socket) = serve(&sandbox, &stack, &[]);
    let mut front = FrontEnd::connect_packed(&socket, 16 * MIB);
    let mut queue = front.start_queue(0, 24, 8, 64 << 10);
    let mut base = None;
    for round in 0..40u64 {
        let data = pattern(round, 64 << 10);
        for slot in 0..8 {
            let part = &data[usize::from(slot) * 8192..][..8192];
            assert!(front.table().write(queue.data(slot), part));
            assert!(queue.add(slot, Kind::Write, (round * 8 + u64::from(slot)) * 16, 8192));
        }
        queue.publish();
        (0..8).for_each(|_| assert_eq!(queue.wait().status, S_OK));
        assert!(queue.read(&front, round * 65_536, 65_536) == data);
        if round % 10 == 9 {
            let next = front.stop_queue(0);
            assert_ne!(Some(next), base, "the base moves on");
            base = Some(next);
            front.hand_over(&queue, next);
        }
    }
    assert!(std::fs::read(&file).unwrap()[39 << 16..40 << 16] == pattern(39, 64 << 10));
    assert!(sandbox.run(&["show", "disk"]).ok().contains("1 (packed)"));
}

/// Kills the server again and again while a front-end writes increasing numbers to blocks. No write is lost,
/// and none is applied again after the driver has seen it as completed.
fn writes_survive_kills(is_packed: bool) {
    let sandbox = Sandbox::new(Engine::Auto);
    let (file, stack) = file_of(&sandbox, 4 * MIB);
    let socket = sandbox.path("vm.sock");
    let (mut server, _) = serve(&sandbox, &stack, &["--layer", "delay,write=1ms"]);
    let mut front = match is_packed {
        false => FrontEnd::connect(&socket, 4 * MIB),
        true => FrontEnd::connect_packed(&socket, 4 * MIB),
    };
    const SLOTS: u16 = 32;
    front.keep_inflight(1, 128);
    let mut queue = front.start_queue(0, 128, SLOTS, 4096);
    let mut versions = [0u64; SLOTS as usize];
    let mut in_flight = 0;
    let start = |queue: &mut Queue, front: &FrontEnd, slot: u16, version: u64| {
        let words = version.to_le_bytes().repeat(512);
        assert!(front.table().write(queue.data(slot), &words));
        assert!(queue.add(slot, Kind::Write, u64::from(slot) * 8, 4096));
    };
    for slot in 0..SLOTS {
        start(&mut queue, &front, slot, 0);
        in_flight += 1;
    }
    queue.publish();
    for kill in 0..6u64 {
        for _ in 0..40 + 17 * kill {
            let done = queue.wait();
            assert_eq!(done.status, S_OK);
            let version = &mut versions[usize::from(done.slot)];
            *version += 1;
            start(&mut queue, &front, done.slot, *version);
            queue.publish();
        }
        server.signal(rustix::process::Signal::KILL);
        server.wait();
        server = serve(&sandbox, &stack, &["--layer", "delay,write=1ms"]).0;
        front.reconnect(&socket);
        // The front-end does not know which requests the dead server has completed; the inflight record does.
        front.hand_over(&queue, 0);
    }
    while in_flight > 0 {
        assert_eq!(queue.wait().status, S_OK);
        in_flight -= 1;
    }
    drop(server);
    let stored = std::fs::read(&file).expect("the file");
    for (slot, version) in versions.into_iter().enumerate() {
        let block = &stored[slot * 4096..][..4096];
        assert!(
            block == version.to_le_bytes().repeat(512),
            "block {slot} has another version than {version}"
        );
    }
}

#[test]
fn writes_survive_kills_with_split_virtqueues() {
    writes_survive_kills(false);
}

#[test]
fn writes_survive_kills_with_packed_virtqueues() {
    writes_survive_kills(true);
}

#[test]
fn in_client_mode_the_socket_of_the_monitor_is_connected_to_again_and_again() {
    let sandbox = Sandbox::new(Engine::Auto);
    let socket = sandbox.path("vm.sock");
    let export = format!("unix:{},mode=client", socket.display());
    let arguments = ["serve", "ram:16M", "--vhost-user", &export, "--name", "disk"];
    let _server = sandbox.start(&mut sandbox.blockyard(&arguments), 1);
    for round in 0..3 {
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let mut front = FrontEnd::accept(&listener, 4 * MIB);
        let mut queue = front.start_queue(0, 64, 2, 4096);
        if round > 0 {
            assert!(queue.read(&front, 0, 4096) == pattern(round - 1, 4096));
        }
        queue.write(&front, 0, &pattern(round, 4096));
    }
}

#[test]
fn a_device_in_use_is_listed_and_is_removed_by_force_only() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (mut server, socket) = serve(&sandbox, "ram:16M", &["--queues", "2"]);
    let shown = |arguments: &[&str]| sandbox.run(arguments).ok();
    assert!(!shown(&["show", "disk"]).contains("virtqueues in use"));
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    let mut queue = front.start_queue(0, 64, 2, 4096);
    queue.write(&front, 0, &pattern(5, 4096));
    let text = shown(&["show", "disk"]);
    for words in ["vhost-user", "virtqueues in use", "1 (split)", "guest memory"] {
        assert!(text.contains(words), "{words} is missing: {text}");
    }
    let refused = sandbox.run(&["del", "disk"]);
    assert!(refused.stderr.contains("in use by a virtual machine"), "{}", refused.stderr);
    assert!(queue.read(&front, 0, 4096) == pattern(5, 4096));
    sandbox.run(&["del", "disk", "--force"]).ok();
    assert!(front.is_closed());
    assert!(server.wait().success());
    assert!(!socket.exists());
}

#[test]
fn virtqueues_are_served_by_the_threads_that_the_options_name() {
    let sandbox = Sandbox::new(Engine::Auto);
    let more = ["--queues", "3"];
    let (mut server, socket) = serve_with(&sandbox, "ram:16M", ",queues=4,threads=2+0", &more);
    assert!(sandbox.run(&["show", "disk"]).ok().contains("threads of virtqueues 2,0,2,0"));
    let mut front = FrontEnd::connect(&socket, 8 * MIB);
    for index in 0..4 {
        let mut queue = front.start_queue(index, 64, 2, 4096);
        queue.write(&front, 0, &pattern(index.into(), 4096));
    }
    drop(front);
    server.kill();
    let (mut server, _) = serve_with(&sandbox, "ram:16M", ",queues=6", &more);
    let shown = sandbox.run(&["show", "disk"]).ok();
    let threads = shown.lines().find_map(|line| line.split_once("threads of virtqueues "));
    let mut threads: Vec<&str> = threads.expect("a line").1.split(',').collect();
    threads.sort_unstable();
    assert_eq!(threads, ["0", "0", "1", "1", "2", "2"], "by default all threads serve as many");
    server.kill();
    let export = format!("unix:{},threads=3", socket.display());
    let refused = sandbox.run(&["serve", "ram:16M", "--vhost-user", &export, "--queues", "3"]);
    assert!(refused.stderr.contains("there is no I/O thread 3"), "{}", refused.stderr);
}

#[test]
fn an_idle_device_takes_no_turns_and_a_busy_one_needs_few_kicks() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_server, socket) = serve(&sandbox, "null:1G", &["--queues", "1"]);
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    let mut queue = front.start_queue(0, 512, 128, 4096);
    assert_eq!(queue.perform(Kind::Read, 0, 4096), S_OK);
    let turns = || sandbox.turns("disk");
    // The metrics themselves take turns, so two samples of different intervals are compared.
    let sample = |time: Duration| {
        let before = turns();
        std::thread::sleep(time);
        turns() - before
    };
    let (short, long) = (sample(Duration::ZERO), sample(Duration::from_millis(500)));
    assert!(long <= short + 4, "{long} turns of an idle thread in half a second, {short} in none");
    let kicks = queue.kicks();
    for _ in 0..100 {
        for slot in 0..128 {
            assert!(queue.add(slot, Kind::Read, u64::from(slot) * 8, 4096));
        }
        queue.publish();
        (0..128).for_each(|_| assert_eq!(queue.wait().status, S_OK));
    }
    assert!(queue.kicks() - kicks <= 200, "{} kicks for 100 batches", queue.kicks() - kicks);
}

#[test]
fn a_front_end_that_breaks_the_protocol_is_disconnected_and_the_next_one_served() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (_server, socket) = serve(&sandbox, "ram:16M", &["--queues", "1"]);
    let rubbish: [&[u8]; 3] = [&[0xff; 64], &Request::SetFeatures(u64::MAX).encode(false), &[1; 11]];
    for bytes in rubbish {
        use std::io::{Read, Write};
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)), "the connection was closed");
    }
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    // A ring outside of guest memory cannot start.
    let queue = Queue::new(&mut front, 0, 64, 2, 4096);
    front.done(&Request::SetVringNum(VringState { index: 0, num: 64 }), &[]);
    let address = VringAddress { descriptors: USER_AT - 64, ..VringAddress::default() };
    front.done(&Request::SetVringAddr(address), &[]);
    let kick = proto::vhost_user::VringFile { index: 0, has_fd: true };
    front.done(&Request::SetVringKick(kick), &[queue.kick().as_fd()]);
    assert!(!front.is_done(&Request::SetVringEnable(VringState { index: 0, num: 1 }), &[]));
    drop(front);
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    let mut queue = front.start_queue(0, 64, 2, 4096);
    queue.write(&front, 0, &pattern(6, 4096));
}

#[test]
fn at_the_end_of_the_server_requests_in_flight_complete() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (mut server, socket) = serve(&sandbox, "ram:16M", &["--layer", "delay,write=2s", "--queues", "1"]);
    let mut front = FrontEnd::connect(&socket, 4 * MIB);
    let mut queue = front.start_queue(0, 64, 2, 4096);
    assert!(queue.add(0, Kind::Write, 0, 4096));
    queue.publish();
    sandbox.await_in_flight("disk", "write");
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(queue.wait().status, S_OK);
    assert!(server.wait().success());
}
