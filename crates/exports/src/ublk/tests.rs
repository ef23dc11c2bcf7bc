//! Tests of the front-end against the model of the driver: every data mode, every operation, and the life
//! cycle of tags.

use super::*;
use crate::fronts::FrontNumber;
use ::ublk::model::{ClientRequest, Finished, Model, ModelConfig};
use ::ublk::{
    Driver as Control, Features, IoCommand, IoFlags, IoOp, KernelOp, NewDevice, ParamIntegrity, ParamTypes,
    Params,
};
use backends::{Null, NullSpec, Ram, RamSpec};
use queue::{Queue, QueueConfig, Ring as _, Stack};
use sim::nodes::{Lender, PlainFile};
use sim::{Disk, DiskConfig, Faults, Rng, SimRing, Tracer};
use std::sync::atomic::Ordering::Relaxed;

const SERVER: u32 = 42;
const DEPTH: u16 = 4;
const DISK: Bytes = Bytes(256 << 10);
const IO_MAX: Bytes = Bytes(64 << 10);
/// Bytes of memory shared with a client; no other block of the arena precedes it.
const CLIENT_MEMORY: u64 = 128 << 10;

/// Kind of backend behind the device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Backend {
    File,
    Lender,
    /// A null backend: reads return zeroes, which come from a file of zeroes if only the kernel can access
    /// the buffer.
    Null,
    /// Memory with T10 tuples.
    Guarded,
}

struct Rig {
    model: Model,
    control: Control,
    number: u32,
    front: Front,
    ring: ModelRing<SimRing>,
    queues: Queues<ModelRing<SimRing>>,
    queue: QueueId,
    shared: Arc<ServedQueueShared>,
}

fn params() -> Params {
    let mut params = Params::new();
    params.types = ParamTypes::BASIC.0;
    params.basic.logical_bs_shift = 9;
    params.basic.physical_bs_shift = 12;
    params.basic.max_sectors = (IO_MAX.0 >> 9) as u32;
    params.basic.dev_sectors = DISK.0 >> 9;
    params
}

/// Returns parameters with T10 tuples, 8 bytes per sector.
fn guarded_params() -> Params {
    let mut params = params();
    params.types |= ParamTypes::INTEGRITY.0;
    params.integrity = ParamIntegrity {
        flags: ParamIntegrity::CAN_GUARD | ParamIntegrity::HAS_REF_TAG,
        max_integrity_segments: 1,
        interval_exp: 9,
        metadata_size: 8,
        csum_type: ParamIntegrity::CSUM_CRC16,
        tag_size: 2,
        ..ParamIntegrity::default()
    };
    params
}

fn rig(mode: DataMode, behind: Backend) -> Rig {
    rig_by(mode, behind, false)
}

/// Creates a rig. `batch`: with commands for many tags at once.
fn rig_by(mode: DataMode, behind: Backend, batch: bool) -> Rig {
    let batches = if batch { Features::BATCH_IO } else { Features::NONE };
    rig_with(mode, behind, batches)
}

/// Creates a rig with additional driver features.
fn rig_with(mode: DataMode, behind: Backend, more: Features) -> Rig {
    let mut inner = SimRing::new(Rng::new(7), Faults::NONE, Tracer::default());
    let config = DiskConfig { len: DISK.0, punch: true, zero_range: true, align: 1, align_memory: 1 };
    let disk = inner.add_disk(Disk::new(config));
    let pages = inner.allocate(DISK.0 as u32).unwrap();
    inner.bytes_mut(pages).fill(0);
    let model = Model::new(ModelConfig::LINUX_7_2);
    let control = Control::new(Arc::new(model.clone()));
    let features = mode.features().with(Features::CMD_IOCTL_ENCODE).with(more);
    let new = NewDevice {
        number: None,
        queues: 1,
        depth: DEPTH,
        io_bytes_max: IO_MAX.0 as u32,
        features,
        server_flags: 0,
    };
    let number = control.add(&new).unwrap().dev_id;
    let integrity = (behind == Backend::Guarded).then(|| "t10".parse().unwrap());
    control.set_params(number, &if integrity.is_some() { guarded_params() } else { params() }).unwrap();
    let mut ring = ModelRing::new(inner, model.open_char(number, SERVER).unwrap(), 1);
    let mut queues = Queues::default();
    let id = queues.vacant();
    let mut stack = Stack::default();
    match behind {
        Backend::File => stack.backend(Box::new(PlainFile::new(disk, None))),
        Backend::Lender => stack.backend(Box::new(Lender::new(pages))),
        Backend::Null => {
            let null = Null::new(&NullSpec { size: DISK, ..NullSpec::default() }).unwrap();
            stack.backend(Box::new(null.node(None).with_file(disk)))
        }
        Backend::Guarded => {
            let ram = Ram::new(&RamSpec { size: DISK, hugepages: false, integrity }).unwrap();
            stack.backend(Box::new(ram.node(None)))
        }
    };
    let config = QueueConfig { id, depth: DEPTH + 1, segments_per_tag: 1, timeout_ns: None };
    let mut queue = Queue::new(config, stack).unwrap();
    queue.reserve_tags(DEPTH);
    queues.insert(queue);
    let shared = Arc::new(ServedQueueShared::default());
    shared.size.store(DISK.0, Relaxed);
    let mut front = Front::default();
    let client_memory = more.has(Features::SHMEM_ZC).then(|| {
        let memory = ring.inner.allocate(CLIENT_MEMORY as u32).unwrap();
        let index = control.share(number, ring.address(memory), CLIENT_MEMORY).unwrap();
        assert_eq!(memory.offset, 0, "a region has its beginning for a name");
        ClientMemory { region: memory.region, len: CLIENT_MEMORY, index }
    });
    let served = ServedQueueConfig {
        queue: id,
        file: ring.file(),
        descriptors: ring.descriptors(0).unwrap(),
        q_id: 0,
        first_tag: 0,
        depth: DEPTH,
        mode,
        zero_copy_reads: behind == Backend::Lender,
        io_max: IO_MAX,
        batch: more.has(Features::BATCH_IO),
        integrity,
        client_memory,
        encoded: true,
        shared: shared.clone(),
    };
    front.add_queue(served, &mut ring).unwrap();
    control.start(number, SERVER).unwrap();
    Rig { model, control, number, front, ring, queues, queue: id, shared }
}

fn request(op: KernelOp, start: u64, sectors: u32, byte: u8) -> ClientRequest {
    let len = if matches!(op, KernelOp::Read | KernelOp::Write) { sectors as usize * 512 } else { 0 };
    ClientRequest {
        op,
        flags: IoFlags::NONE,
        start,
        sectors,
        data: vec![byte; len],
        shared: None,
        tuples: None,
    }
}

impl Rig {
    fn ask(&self, request: ClientRequest) -> u64 {
        self.model.submit(self.number, 0, request).unwrap()
    }

    /// Runs one turn of a reactor. Returns whether anything happened.
    fn turn(&mut self) -> bool {
        let mut busy = false;
        while let Some((token, result)) = self.ring.next_ended() {
            self.front.ended(token, result, &mut self.ring, &mut self.queues);
            busy = true;
        }
        busy | self.turn_without_ends()
    }

    /// Runs a turn that ignores the driver's completions. Returns whether anything happened.
    fn turn_without_ends(&mut self) -> bool {
        let mut busy = false;
        while let Some((queue, cookie, result)) = self.ring.inner.reap() {
            self.ring.io_ended(queue::IoId { queue, cookie }, result);
            self.queues.touch(queue).complete(cookie, result, &mut self.ring);
            busy = true;
        }
        let mut touched = Vec::new();
        self.queues.turn(&mut self.ring, &mut touched);
        for id in touched {
            let done: Vec<Done> = self.queues.get_mut(id).done().collect();
            for end in done {
                self.front.request_done(id, end, &mut self.ring, &mut self.queues);
                busy = true;
            }
        }
        self.front.take_up(&mut self.ring, &mut self.queues);
        busy | self.ring.inner.advance()
    }

    fn settle(&mut self) {
        while self.turn() {}
    }

    fn finished(&mut self) -> Option<Finished> {
        for _ in 0..1000 {
            if let Some(finished) = self.model.finished(self.number) {
                return Some(finished);
            }
            self.turn();
        }
        None
    }

    fn carry(&mut self, request: ClientRequest) -> Finished {
        let number = self.ask(request);
        let finished = self.finished().expect("it ends");
        assert_eq!(finished.number, number);
        finished
    }

    fn memory_in_use(&self) -> usize {
        self.ring.inner.memory_in_use()
    }
}

/// Returns each data mode with every possible backend, with single and batched commands.
fn ways() -> Vec<(DataMode, Backend, bool)> {
    let files = DataMode::ALL.map(|mode| (mode, Backend::File));
    let lenders =
        DataMode::ALL.into_iter().filter(|mode| !mode.is_opaque()).map(|mode| (mode, Backend::Lender));
    let all: Vec<_> = files.into_iter().chain(lenders).collect();
    let can_batch = |way: &&(DataMode, Backend)| way.0 != DataMode::GetData;
    let batches = all.iter().filter(can_batch).map(|&(mode, behind)| (mode, behind, true));
    all.iter().map(|&(mode, behind)| (mode, behind, false)).chain(batches).collect()
}

#[test]
fn written_data_is_read_back_in_every_mode() {
    for (mode, behind, batch) in ways() {
        let mut rig = rig_by(mode, behind, batch);
        let idle = rig.memory_in_use();
        for (start, sectors, byte) in [(0, 8, 1), (8, 1, 2), (9, 128, 3), (500, 12, 4)] {
            let written = rig.carry(request(KernelOp::Write, start, sectors, byte));
            assert_eq!(written.errno, 0, "{mode}");
        }
        for (start, sectors, byte) in [(0, 8, 1), (8, 1, 2), (9, 128, 3), (500, 12, 4), (200, 16, 0)] {
            let read = rig.carry(request(KernelOp::Read, start, sectors, 0xee));
            assert_eq!((read.errno, read.data), (0, vec![byte; sectors as usize * 512]), "{mode} at {start}");
        }
        rig.control.stop(rig.number).unwrap();
        rig.settle();
        assert!(!rig.front.has_tags(rig.queue), "{mode}");
        assert_eq!(rig.shared.refused.load(Relaxed), 0, "{mode}");
        rig.front.close(rig.queue, &mut rig.ring);
        let served = usize::from(mode == DataMode::Copy) + usize::from(batch);
        assert_eq!(rig.memory_in_use() + served, idle, "{mode} keeps memory");
    }
}

#[test]
fn a_null_device_reads_as_zeroes_in_every_mode() {
    for mode in DataMode::ALL {
        let mut rig = rig(mode, Backend::Null);
        assert_eq!(rig.carry(request(KernelOp::Write, 0, 8, 9)).errno, 0, "{mode}");
        let read = rig.carry(request(KernelOp::Read, 0, 8, 0xee));
        assert_eq!((read.errno, read.data), (0, vec![0; 4096]), "{mode}");
    }
}

#[test]
fn requests_of_all_tags_are_in_flight_at_once() {
    for (mode, behind, batch) in ways() {
        let mut rig = rig_by(mode, behind, batch);
        let asked: Vec<u64> =
            (0..20).map(|n| rig.ask(request(KernelOp::Write, n * 8, 8, n as u8 + 1))).collect();
        let mut ended: Vec<u64> = (0..20).filter_map(|_| rig.finished()).map(|end| end.number).collect();
        ended.sort_unstable();
        assert_eq!(ended, asked, "{mode}");
        for n in 0..20 {
            rig.ask(request(KernelOp::Read, n * 8, 8, 0));
        }
        for _ in 0..20 {
            let read = rig.finished().unwrap();
            assert!(read.data.iter().all(|&byte| u64::from(byte) == read.number - 19), "{mode}");
        }
    }
}

#[test]
fn operations_without_data_complete() {
    for mode in DataMode::ALL {
        let mut rig = rig(mode, Backend::File);
        rig.carry(request(KernelOp::Write, 0, 64, 9));
        assert_eq!(rig.carry(request(KernelOp::Flush, 0, 0, 0)).errno, 0);
        assert_eq!(rig.carry(request(KernelOp::WriteZeroes, 0, 8, 0)).errno, 0);
        assert_eq!(rig.carry(request(KernelOp::Discard, 8, 8, 0)).errno, 0);
        let read = rig.carry(request(KernelOp::Read, 0, 24, 0xee));
        assert!(read.data[..4096].iter().all(|&byte| byte == 0), "{mode}");
        assert!(read.data[8192..].iter().all(|&byte| byte == 9), "{mode}");
    }
}

#[test]
fn a_write_with_fua_survives_a_power_cut() {
    let mut rig = rig(DataMode::Copy, Backend::File);
    let fua = ClientRequest { flags: IoFlags::FUA, ..request(KernelOp::Write, 0, 8, 5) };
    assert_eq!(rig.carry(fua).errno, 0);
    rig.ring.inner.power_cut();
    let mut sector = [0; 512];
    rig.ring.inner.disk(FileId(0)).read(0, &mut sector);
    assert_eq!(sector, [5; 512]);
}

#[test]
fn an_invalid_request_fails() {
    for mode in DataMode::ALL {
        let mut rig = rig(mode, Backend::File);
        let beyond = rig.carry(request(KernelOp::Write, DISK.0 >> 9, 8, 1));
        assert_eq!(beyond.errno, libc::EIO, "{mode}");
        let long = rig.carry(request(KernelOp::Read, 0, 129, 1));
        assert_eq!(long.errno, libc::EINVAL, "{mode}");
        let unknown = rig.carry(request(KernelOp::WriteSame, 0, 8, 1));
        assert_eq!(unknown.errno, libc::EOPNOTSUPP, "{mode}");
        assert_eq!(rig.carry(request(KernelOp::Write, 0, 8, 1)).errno, 0, "{mode}: later requests succeed");
    }
}

#[test]
fn an_address_outside_shared_memory_is_an_error() {
    for mode in [DataMode::Copy, DataMode::UserCopy, DataMode::AutoZeroCopy] {
        let mut rig = rig(mode, Backend::File);
        let elsewhere = ClientRequest { flags: IoFlags::SHMEM_ZC, ..request(KernelOp::Write, 0, 8, 9) };
        assert_eq!(rig.carry(elsewhere).errno, libc::EIO, "{mode}");
        assert_eq!(rig.carry(request(KernelOp::Write, 0, 8, 9)).errno, 0, "{mode}: later requests succeed");
        assert_eq!(rig.shared.in_client_memory.load(Relaxed), 0);
    }
}

#[test]
fn data_in_client_memory_is_not_copied() {
    for mode in [DataMode::Copy, DataMode::UserCopy, DataMode::AutoZeroCopy] {
        for batches in [Features::NONE, Features::BATCH_IO] {
            let mut rig = rig_with(mode, Backend::File, Features::SHMEM_ZC.with(batches));
            let at = |place: u64, request| ClientRequest { shared: Some(place), ..request };
            assert_eq!(rig.carry(at(4096, request(KernelOp::Write, 8, 16, 7))).errno, 0, "{mode}");
            let read = rig.carry(request(KernelOp::Read, 8, 16, 0));
            assert_eq!((read.errno, read.data), (0, vec![7; 8192]), "{mode}: it is in the file");
            let read = rig.carry(at(65536, request(KernelOp::Read, 8, 16, 0)));
            assert_eq!((read.errno, read.data), (0, vec![7; 8192]), "{mode}: and comes back there");
            assert_eq!(rig.shared.in_client_memory.load(Relaxed), 2, "{mode}");
            // A request past the end of the shared memory does not use it.
            assert_eq!(rig.carry(at(CLIENT_MEMORY - 512, request(KernelOp::Read, 8, 16, 0))).errno, 0);
            assert_eq!(rig.shared.in_client_memory.load(Relaxed), 2, "{mode}");
            assert_eq!(rig.shared.refused.load(Relaxed), 0, "{mode}");
        }
    }
}

#[test]
fn a_fetch_that_ends_is_sent_again() {
    let mut rig = rig_by(DataMode::Copy, Backend::File, true);
    for n in 0..200 {
        assert_eq!(rig.carry(request(KernelOp::Write, n % 64 * 8, 8, n as u8)).errno, 0, "request {n}");
    }
    assert_eq!(rig.shared.refused.load(Relaxed), 0);
}

#[test]
fn a_device_that_grew_takes_requests_beyond_its_old_end() {
    let mut rig = rig(DataMode::Copy, Backend::File);
    rig.shared.size.store(DISK.0 / 2, Relaxed);
    let place = DISK.0 >> 10;
    assert_eq!(rig.carry(request(KernelOp::Write, place, 8, 1)).errno, libc::EIO);
    rig.shared.size.store(DISK.0, Relaxed);
    assert_eq!(rig.carry(request(KernelOp::Write, place, 8, 1)).errno, 0);
}

#[test]
fn requests_wait_for_memory_and_for_space_in_the_ring() {
    for mode in [DataMode::GetData, DataMode::UserCopy] {
        let mut rig = rig(mode, Backend::File);
        rig.ring.inner.set_faults(Faults { no_memory: 1000, ..Faults::NONE });
        rig.ask(request(KernelOp::Write, 0, 8, 6));
        rig.settle();
        assert!(rig.front.has_waiting(), "{mode}");
        rig.ring.inner.set_faults(Faults::NONE);
        rig.ring.copies_refused = 3;
        assert_eq!(rig.finished().map(|end| end.errno), Some(0), "{mode}");
        rig.ring.copies_refused = 3;
        assert_eq!(rig.carry(request(KernelOp::Read, 0, 8, 0)).data, [6; 4096], "{mode}");
        assert!(!rig.front.has_waiting(), "{mode}");
    }
}

#[test]
fn a_failed_registration_fails_only_its_request() {
    let mut rig = rig(DataMode::AutoZeroCopy, Backend::File);
    let first = rig.ask(request(KernelOp::Write, 0, 8, 7));
    let (token, result) = rig.ring.next_ended().unwrap();
    rig.front.ended(token, result, &mut rig.ring, &mut rig.queues);
    // The memory of tag 0 occupies the table entry of tag 1 as well.
    let (device, ring) = rig.ring.device();
    let occupy = |op: IoOp, memory: &mut Nowhere| {
        let command = IoCommand { q_id: 0, tag: 0, result: 0, addr: 1 };
        device.command((ring, 1, 99), op.code(), command, 0, memory);
        let ended = device.next_ended(ring, memory).unwrap();
        assert_eq!(ended, (99, 0));
    };
    occupy(IoOp::RegisterIoBuf, &mut Nowhere);
    let second = rig.model.submit(rig.number, 0, request(KernelOp::Write, 8, 8, 7)).unwrap();
    let (token, result) = rig.ring.next_ended().unwrap();
    rig.front.ended(token, result, &mut rig.ring, &mut rig.queues);
    let (token, result) = rig.ring.next_ended().unwrap();
    assert_eq!(result, -i64::from(libc::EBUSY), "it was registered by command, which was refused");
    rig.front.ended(token, result, &mut rig.ring, &mut rig.queues);
    assert_eq!(
        rig.model.finished(rig.number).map(|end| (end.number, end.errno)),
        Some((second, libc::EBUSY))
    );
    let (device, ring) = rig.ring.device();
    device.command(
        (ring, 1, 98),
        IoOp::UnregisterIoBuf.code(),
        IoCommand { addr: 1, ..IoCommand::default() },
        0,
        &mut Nowhere,
    );
    assert_eq!(rig.ring.next_ended().map(|end| end.1), Some(0));
    assert_eq!(rig.finished().map(|end| (end.number, end.errno)), Some((first, 0)));
    assert_eq!(rig.carry(request(KernelOp::Read, 0, 8, 0)).data, [7; 4096]);
}

/// Memory that no command refers to.
struct Nowhere;

impl ::ublk::model::ServerMemory for Nowhere {
    fn read(&self, addr: u64, _: &mut [u8]) {
        unreachable!("nothing lies at {addr:#x}");
    }

    fn write(&mut self, addr: u64, _: &[u8]) {
        unreachable!("nothing lies at {addr:#x}");
    }
}

#[test]
fn a_stopped_device_returns_its_tags_when_its_requests_are_done() {
    let mut rig = rig(DataMode::Copy, Backend::File);
    rig.ask(request(KernelOp::Write, 0, 8, 1));
    while let Some((token, result)) = rig.ring.next_ended() {
        rig.front.ended(token, result, &mut rig.ring, &mut rig.queues);
    }
    let control = rig.control.clone();
    let number = rig.number;
    let stopping = std::thread::spawn(move || control.stop(number));
    assert_eq!(rig.finished().map(|end| end.errno), Some(0));
    stopping.join().unwrap().unwrap();
    rig.settle();
    assert!(!rig.front.has_tags(rig.queue));
    assert_eq!(rig.shared.tags.load(Relaxed), 0);
}

#[test]
fn a_refused_command_is_recorded_and_its_tag_abandoned() {
    let mut rig = rig(DataMode::Copy, Backend::File);
    let token = Token { front: FrontNumber::Ublk as u8, index: rig.queue.0, number: 2 };
    rig.front.ended(token, -i64::from(libc::EBUSY), &mut rig.ring, &mut rig.queues);
    assert_eq!(rig.shared.refused.load(Relaxed), libc::EBUSY);
    assert_eq!(rig.shared.tags.load(Relaxed), u32::from(DEPTH) - 1);
}

#[test]
fn a_queue_without_memory_for_its_batches_leaves_its_resources_with_the_caller() {
    let mut rig = rig(DataMode::Copy, Backend::File);
    let client = rig.ring.inner.allocate(CLIENT_MEMORY as u32).unwrap();
    let before = rig.memory_in_use();
    // The buffers can be allocated, but the batch buffers cannot.
    for left in [0, 1] {
        rig.ring.reserves_left = left;
        let config = ServedQueueConfig {
            integrity: None,
            queue: QueueId(rig.queue.0 + 1),
            file: rig.ring.file(),
            descriptors: rig.ring.descriptors(0).unwrap(),
            q_id: 0,
            first_tag: 0,
            depth: DEPTH,
            mode: DataMode::Copy,
            zero_copy_reads: false,
            io_max: IO_MAX,
            batch: true,
            client_memory: Some(ClientMemory { region: client.region, len: CLIENT_MEMORY, index: 0 }),
            encoded: true,
            shared: Arc::new(ServedQueueShared::default()),
        };
        let refused = rig.front.add_queue(config, &mut rig.ring);
        assert!(matches!(refused, Err(OpenQueueError::Memory)), "{left}");
        assert_eq!(rig.memory_in_use(), before, "{left}: neither kept nor given back twice");
    }
    rig.ring.inner.free(client);
}

#[test]
fn a_tag_refused_within_a_batch_is_abandoned_alone() {
    for after in 1..DEPTH {
        let mut rig = rig_by(DataMode::Copy, Backend::Null, true);
        rig.settle();
        for number in 0..u64::from(DEPTH) {
            rig.ask(request(KernelOp::Write, number * 8, 8, 1));
        }
        rig.ring.refuse_after = Some(after);
        let ends: Vec<i32> = std::iter::from_fn(|| rig.finished()).map(|end| end.errno).collect();
        assert_eq!(rig.ring.refuse_after, None, "they were committed together");
        assert_eq!(ends, [0; DEPTH as usize - 1], "{after}: the others end");
        assert_eq!(rig.shared.tags.load(Relaxed), u32::from(DEPTH) - 1, "{after}");
        assert_eq!(rig.shared.refused.load(Relaxed), libc::EIO, "{after}");
        assert_eq!(rig.carry(request(KernelOp::Write, 0, 8, 1)).errno, 0, "{after}: later requests succeed");
    }
}

#[test]
fn a_batch_committed_to_a_removed_device_aborts_all_its_tags() {
    let mut rig = rig_by(DataMode::Copy, Backend::Null, true);
    rig.settle();
    for number in 0..u64::from(DEPTH) {
        rig.ask(request(KernelOp::Write, number * 8, 8, 1));
    }
    let mut answered = 0;
    for _ in 0..1000 {
        // Complete the batch with the error of a device that is being stopped.
        let mut ended = Vec::new();
        while let Some(end) = rig.ring.next_ended() {
            ended.push(end);
        }
        for (token, result) in ended {
            let is_telling = token.number > 1 << 16 && result > 0;
            answered += u32::from(is_telling);
            let result = if is_telling { -i64::from(libc::ENODEV) } else { result };
            rig.front.ended(token, result, &mut rig.ring, &mut rig.queues);
        }
        rig.turn_without_ends();
    }
    assert_eq!(answered, 1, "all at once");
    assert_eq!(rig.shared.tags.load(Relaxed), 0);
    assert_eq!(rig.shared.refused.load(Relaxed), 0, "nothing was refused");
}

#[test]
fn a_completion_for_a_removed_queue_is_ignored() {
    let mut rig = rig(DataMode::Copy, Backend::File);
    let token = |index, number| Token { front: FrontNumber::Ublk as u8, index, number };
    rig.front.ended(token(9, 0), 0, &mut rig.ring, &mut rig.queues);
    rig.front.ended(token(rig.queue.0, 99), 0, &mut rig.ring, &mut rig.queues);
    assert!(rig.front.has_tags(rig.queue));
}

#[test]
fn integrity_data_is_written_and_read_with_the_data() {
    for more in [Features::INTEGRITY, Features::INTEGRITY.with(Features::BATCH_IO)] {
        let mut rig = rig_with(DataMode::UserCopy, Backend::Guarded, more);
        let with = |request, tuples: &[u8]| ClientRequest { tuples: Some(tuples.to_vec()), ..request };
        let idle = rig.memory_in_use();
        let marks: Vec<u8> = (0..64).collect();
        let written = rig.carry(with(request(KernelOp::Write, 8, 8, 5), &marks));
        assert_eq!((written.errno, written.tuples), (0, Vec::new()));
        // The read crosses from a range written with tuples to one written without.
        let read = rig.carry(with(request(KernelOp::Read, 4, 8, 0), &[0; 64]));
        assert_eq!((read.errno, &read.data[..2048], &read.data[2048..]), (0, &[0; 2048][..], &[5; 2048][..]));
        assert_eq!((&read.tuples[..32], &read.tuples[32..]), (&[0xff; 32][..], &marks[..32]));
        // A write without tuples removes the old ones, and a read without tuples succeeds.
        assert_eq!(rig.carry(request(KernelOp::Write, 8, 1, 6)).errno, 0);
        assert_eq!(rig.carry(request(KernelOp::Read, 8, 1, 0)).data, vec![6; 512]);
        let read = rig.carry(with(request(KernelOp::Read, 8, 2, 0), &[0; 16]));
        assert_eq!((&read.tuples[..8], &read.tuples[8..]), (&[0xff; 8][..], &marks[8..16]));
        rig.settle();
        assert_eq!(rig.memory_in_use(), idle);
    }
}

#[test]
fn integrity_data_waits_for_space_in_the_ring() {
    let mut rig = rig_with(DataMode::UserCopy, Backend::Guarded, Features::INTEGRITY);
    for refused in 1..4 {
        for (op, byte) in [(KernelOp::Write, refused as u8), (KernelOp::Read, 0)] {
            rig.ring.copies_refused = refused;
            let tuples = Some(vec![byte; 16]);
            let done = rig.carry(ClientRequest { tuples, ..request(op, 16, 2, byte) });
            assert_eq!((done.errno, rig.ring.copies_refused), (0, 0));
            if op == KernelOp::Read {
                let want = refused as u8;
                assert_eq!((done.data, done.tuples), (vec![want; 1024], vec![want; 16]));
            }
        }
    }
}

#[test]
fn a_request_whose_integrity_data_is_missing_is_an_error() {
    let mut rig = rig_with(DataMode::UserCopy, Backend::Guarded, Features::INTEGRITY);
    let idle = rig.memory_in_use();
    // The request has fewer tuples than intervals.
    let short = |op| ClientRequest { tuples: Some(vec![1; 8]), ..request(op, 0, 2, 3) };
    assert_eq!(rig.carry(short(KernelOp::Write)).errno, libc::EIO);
    assert_eq!(rig.carry(short(KernelOp::Read)).errno, libc::EIO);
    let beyond = ClientRequest { tuples: Some(vec![0; 16]), ..request(KernelOp::Read, 511, 2, 0) };
    assert_eq!(rig.carry(beyond).errno, libc::EIO);
    rig.settle();
    assert_eq!(rig.memory_in_use(), idle);
}
