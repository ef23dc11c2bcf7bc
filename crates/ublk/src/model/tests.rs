//! Tests the model from the perspective of clients and servers.

use super::*;
use crate::abi::{AutoBufReg, ControlOp, IoCommand, IoOp, ParamTypes, Params, State, user_copy_offset};
use crate::driver::{Driver, NewDevice};
use crate::kernel::char_path;

const SERVER: u32 = 42;
const ABORT: i32 = -libc::ENODEV;

/// Server memory: every multiple of `1 << 20` is the address of a separate buffer.
#[derive(Default)]
struct Memory(BTreeMap<u64, Vec<u8>>);

impl ServerMemory for Memory {
    fn read(&self, addr: u64, into: &mut [u8]) {
        if let Some(data) = self.0.get(&addr) {
            into.copy_from_slice(&data[..into.len()]);
        }
    }

    fn write(&mut self, addr: u64, from: &[u8]) {
        self.0.insert(addr, from.to_vec());
    }
}

/// A device with one queue of four tags, and a server that has it open on one thread.
struct Rig {
    model: Model,
    driver: Driver,
    number: u32,
    server: CharDevice,
    ring: RingId,
    memory: Memory,
}

const THREAD: u64 = 1;

fn params() -> Params {
    let mut params = Params::new();
    params.types = ParamTypes::BASIC.0;
    params.basic.logical_bs_shift = 9;
    params.basic.physical_bs_shift = 12;
    params.basic.max_sectors = 128;
    params.basic.dev_sectors = 2048;
    params
}

fn new_device(features: Features) -> NewDevice {
    NewDevice { number: None, queues: 1, depth: 4, io_bytes_max: 64 << 10, features, server_flags: 0 }
}

fn rig(features: Features) -> Rig {
    let model = Model::new(ModelConfig::LINUX_7_2);
    let driver = Driver::new(Arc::new(model.clone()));
    let number = driver.add(&new_device(features)).unwrap().dev_id;
    driver.set_params(number, &params()).unwrap();
    let server = model.open_char(number, SERVER).unwrap();
    let ring = server.ring();
    Rig { model, driver, number, server, ring, memory: Memory::default() }
}

fn started(features: Features) -> Rig {
    let mut rig = rig(features);
    rig.fetch_all();
    rig.driver.start(rig.number, SERVER).unwrap();
    rig
}

impl Rig {
    fn copies(&self) -> bool {
        let features = self.driver.info(self.number).unwrap().features();
        features.common(Features(Features::USER_COPY.0 | Features::AUTO_BUF_REG.0 | 1)).is_empty()
    }

    fn command(&mut self, op: IoOp, tag: u16, result: i32, addr: u64) {
        let command = IoCommand { q_id: 0, tag, result, addr };
        let auto = AutoBufReg { index: tag, ..AutoBufReg::default() }.to_sqe_addr();
        let whose = (self.ring, THREAD, u64::from(tag));
        self.server.command(whose, op.code(), command, auto, &mut self.memory);
    }

    fn addr(&self, tag: u16) -> u64 {
        if self.copies() { u64::from(tag + 1) << 20 } else { 0 }
    }

    fn fetch_all(&mut self) {
        for tag in 0..4 {
            let addr = self.addr(tag);
            self.command(IoOp::FetchReq, tag, 0, addr);
        }
    }

    fn commit(&mut self, tag: u16, result: i32) {
        let addr = self.addr(tag);
        self.command(IoOp::CommitAndFetchReq, tag, result, addr);
    }

    fn ended(&mut self) -> Option<(u64, i32)> {
        self.server.next_ended(self.ring, &mut self.memory)
    }

    fn write(&self, start: u64, byte: u8) -> u64 {
        self.ask(KernelOp::Write, start, byte)
    }

    fn ask(&self, op: KernelOp, start: u64, byte: u8) -> u64 {
        let data = vec![byte; 4096];
        let request =
            ClientRequest { op, flags: IoFlags::NONE, start, sectors: 8, data, shared: None, tuples: None };
        self.model.submit(self.number, 0, request).unwrap()
    }

    fn finished(&self) -> Option<(u64, i32)> {
        self.model.finished(self.number).map(|finished| (finished.number, finished.errno))
    }

    fn state(&self) -> State {
        self.driver.info(self.number).unwrap().state().unwrap()
    }

    /// Lets the server die, and a new one take over.
    fn recover(mut self) -> Rig {
        drop(self.server);
        self.driver.start_recovery(self.number).unwrap();
        self.server = self.model.open_char(self.number, SERVER + 1).unwrap();
        self.ring = self.server.ring();
        self.fetch_all();
        self.driver.end_recovery(self.number, SERVER + 1).unwrap();
        self
    }
}

const REISSUE: Features = Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE);
const FAIL_IO: Features = Features::USER_RECOVERY.with(Features::USER_RECOVERY_FAIL_IO);

#[test]
fn a_write_and_a_read_go_through_the_servers_buffer() {
    let mut rig = started(Features::NONE);
    let written = rig.write(16, 7);
    assert_eq!(rig.ended(), Some((0, 0)));
    let reported = rig.server.descriptors(0).unwrap().read(0);
    assert_eq!(
        (reported.op(), reported.start_sector, reported.nr_sectors, reported.addr),
        (Some(KernelOp::Write), 16, 8, 1 << 20)
    );
    assert_eq!(rig.memory.0[&(1 << 20)], vec![7; 4096]);
    assert_eq!(rig.finished(), None, "the server has not committed it");
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((written, 0)));

    let read = rig.ask(KernelOp::Read, 16, 0);
    assert_eq!(rig.ended(), Some((0, 0)));
    rig.memory.0.insert(1 << 20, vec![9; 4096]);
    rig.commit(0, 4096);
    let finished = rig.model.finished(rig.number).unwrap();
    assert_eq!((finished.number, finished.data), (read, vec![9; 4096]));
}

#[test]
fn with_get_data_the_server_provides_the_buffer_after_the_announcement() {
    let mut rig = started(Features::NEED_GET_DATA);
    rig.write(0, 5);
    assert_eq!(rig.ended(), Some((0, 1)));
    rig.commit(0, 4096);
    assert_eq!(rig.ended(), Some((0, -libc::EINVAL)), "the data was not asked for");
    rig.command(IoOp::NeedGetData, 0, 0, 0x5000_0000);
    assert_eq!(rig.ended(), Some((0, 0)));
    assert_eq!(rig.memory.0[&0x5000_0000], vec![5; 4096]);
    assert_eq!(rig.server.descriptors(0).unwrap().read(0).addr, 0x5000_0000);
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((0, 0)));
}

#[test]
fn a_server_copies_by_itself_in_the_right_direction_only() {
    let mut rig = started(Features::USER_COPY);
    rig.write(0, 5);
    assert_eq!(rig.ended(), Some((0, 0)));
    let mut part = [0; 512];
    assert_eq!(rig.server.read_at(user_copy_offset(0, 0, 1024), &mut part), 512);
    assert_eq!(part, [5; 512]);
    assert_eq!(rig.server.write_at(user_copy_offset(0, 0, 0), &part), -i64::from(libc::EACCES));
    assert_eq!(rig.server.read_at(user_copy_offset(0, 1, 0), &mut part), -i64::from(libc::EINVAL));
    assert_eq!(rig.server.read_at(0, &mut part), -i64::from(libc::EINVAL));
    rig.command(IoOp::CommitAndFetchReq, 0, 4096, 1 << 20);
    assert_eq!(rig.ended(), Some((0, -libc::EINVAL)), "there is no buffer to provide");
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((0, 0)));
}

#[test]
fn a_buffer_is_registered_automatically_and_unregistered_by_the_commit() {
    let mut rig = started(Features::AUTO_BUF_REG.with(Features::SUPPORT_ZERO_COPY));
    rig.write(0, 5);
    assert_eq!(rig.ended(), Some((0, 0)));
    assert_eq!(rig.server.with_buffer(rig.ring, 0, |data| data[0]), Some(5));
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((0, 0)));
    assert_eq!(rig.server.with_buffer(rig.ring, 0, |data| data[0]), None);
}

#[test]
fn a_request_completes_when_its_last_registration_is_removed() {
    let mut rig = started(Features::SUPPORT_ZERO_COPY);
    rig.write(0, 5);
    assert_eq!(rig.ended(), Some((0, 0)));
    rig.command(IoOp::RegisterIoBuf, 0, 0, 3);
    assert_eq!(rig.ended(), Some((0, 0)));
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), None);
    rig.command(IoOp::UnregisterIoBuf, 0, 0, 3);
    assert_eq!(rig.finished(), Some((0, 0)));
}

#[test]
fn a_tag_is_fetched_once_and_committed_by_its_thread_only() {
    let mut rig = rig(Features::NONE);
    rig.command(IoOp::FetchReq, 0, 0, 0);
    assert_eq!(rig.ended(), Some((0, -libc::EINVAL)), "no buffer");
    rig.fetch_all();
    rig.command(IoOp::FetchReq, 0, 0, 1 << 20);
    assert_eq!(rig.ended(), Some((0, -libc::EBUSY)), "all are fetched");
    rig.commit(2, 0);
    assert_eq!(rig.ended(), Some((2, -libc::EBUSY)), "there is no request");
    rig.driver.start(rig.number, SERVER).unwrap();
    rig.write(0, 1);
    assert_eq!(rig.ended(), Some((0, 0)));
    let command = IoCommand { q_id: 0, tag: 0, result: 4096, addr: 1 << 20 };
    let (server, ring) = (rig.server.clone(), rig.ring);
    server.command((ring, 2, 0), IoOp::CommitAndFetchReq.code(), command, 0, &mut rig.memory);
    assert_eq!(rig.ended(), Some((0, -libc::EINVAL)), "another thread");
    for (queue, tag) in [(1, 0), (0, 4)] {
        let command = IoCommand { q_id: queue, tag, ..command };
        server.command((ring, 1, 0), IoOp::CommitAndFetchReq.code(), command, 0, &mut rig.memory);
        assert_eq!(rig.ended(), Some((0, -libc::EINVAL)));
    }
}

#[test]
fn requests_beyond_the_tags_wait() {
    let mut rig = started(Features::NONE);
    let all: Vec<u64> = (0..6).map(|n| rig.write(n * 8, 1)).collect();
    let reported: Vec<u64> = std::iter::from_fn(|| rig.ended()).map(|(token, _)| token).collect();
    assert_eq!(reported, [0, 1, 2, 3]);
    rig.commit(3, 4096);
    assert_eq!(rig.finished(), Some((all[3], 0)));
    assert_eq!(rig.ended(), Some((3, 0)));
    assert_eq!(rig.server.descriptors(0).unwrap().read(3).start_sector, 32);
}

#[test]
fn the_rest_of_a_short_read_is_requested_again() {
    let mut rig = started(Features::NONE);
    rig.ask(KernelOp::Read, 16, 0);
    assert_eq!(rig.ended(), Some((0, 0)));
    rig.memory.0.insert(1 << 20, vec![1; 1024]);
    rig.commit(0, 1024);
    assert_eq!(rig.finished(), None);
    assert_eq!(rig.ended(), Some((0, 0)));
    let reported = rig.server.descriptors(0).unwrap().read(0);
    assert_eq!((reported.start_sector, reported.nr_sectors), (18, 6));
    rig.memory.0.insert(1 << 20, vec![2; 3072]);
    rig.commit(0, 3072);
    let data = rig.model.finished(rig.number).unwrap().data;
    assert_eq!((data.len(), data[1023], data[1024]), (4096, 1, 2));
}

#[test]
fn without_recovery_the_device_of_a_dead_server_is_removed() {
    let mut rig = started(Features::NONE);
    let seen = rig.write(0, 1);
    assert!(rig.ended().is_some());
    let unseen = rig.write(8, 1);
    let Rig { model, driver, number, server, .. } = rig;
    drop(server);
    let ends: Vec<_> =
        std::iter::from_fn(|| model.finished(number)).map(|end| (end.number, end.errno)).collect();
    assert_eq!(ends, [(seen, libc::EIO), (unseen, libc::EIO)]);
    assert_eq!(driver.info(number).unwrap().state(), Some(State::Dead));
    assert_eq!(driver.start_recovery(number).unwrap_err().errno(), Some(libc::EINVAL));
    driver.delete(number).unwrap();
    assert!(driver.devices().is_empty());
}

#[test]
fn requeue_fails_what_the_server_had_and_keeps_the_rest() {
    let mut rig = started(Features::USER_RECOVERY);
    let seen = rig.write(0, 1);
    assert!(rig.ended().is_some());
    let unseen = rig.write(8, 1);
    let mut rig = rig.recover();
    assert_eq!(rig.finished(), Some((seen, libc::EIO)));
    assert_eq!(rig.finished(), None);
    assert_eq!(rig.ended(), Some((0, 0)));
    assert_eq!(rig.server.descriptors(0).unwrap().read(0).start_sector, 8);
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((unseen, 0)));
}

#[test]
fn reissue_gives_the_next_server_everything_again() {
    let mut rig = started(REISSUE);
    let all = [rig.write(0, 1), rig.write(8, 1)];
    assert!(rig.ended().is_some());
    let late = rig.write(16, 1);
    let mut rig = rig.recover();
    assert_eq!(rig.finished(), None);
    let reported: Vec<u64> = std::iter::from_fn(|| rig.ended()).map(|(token, _)| token).collect();
    assert_eq!(reported, [0, 1, 2]);
    (0..3).for_each(|tag| rig.commit(tag, 4096));
    let ends: Vec<_> = std::iter::from_fn(|| rig.finished()).collect();
    assert_eq!(ends, [(all[0], 0), (all[1], 0), (late, 0)]);
}

#[test]
fn fail_io_fails_everything_until_there_is_a_server() {
    let mut rig = started(FAIL_IO);
    let seen = rig.write(0, 1);
    assert!(rig.ended().is_some());
    let Rig { model, driver, number, server, .. } = rig;
    drop(server);
    assert_eq!(driver.info(number).unwrap().state(), Some(State::FailIo));
    let request = ClientRequest {
        op: KernelOp::Flush,
        flags: IoFlags::NONE,
        start: 0,
        sectors: 0,
        data: vec![],
        shared: None,
        tuples: None,
    };
    let between = model.submit(number, 0, request).unwrap();
    let ends: Vec<_> =
        std::iter::from_fn(|| model.finished(number)).map(|end| (end.number, end.errno)).collect();
    assert_eq!(ends, [(seen, libc::EIO), (between, libc::EREMOTEIO)]);
    driver.start_recovery(number).unwrap();
    let server = model.open_char(number, 7).unwrap();
    let ring = server.ring();
    let mut rig = Rig { model, driver, number, server, ring, memory: Memory::default() };
    rig.fetch_all();
    rig.driver.end_recovery(number, 7).unwrap();
    let after = rig.write(0, 1);
    assert!(rig.ended().is_some());
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((after, 0)));
}

#[test]
fn a_quiesced_server_exits_without_a_request_in_flight() {
    let mut rig = started(Features::USER_RECOVERY.with(Features::QUIESCE));
    let seen = rig.write(0, 1);
    assert_eq!(rig.ended(), Some((0, 0)));
    rig.driver.quiesce(rig.number, Duration::from_secs(5)).unwrap();
    let aborted: Vec<_> = std::iter::from_fn(|| rig.ended()).collect();
    assert_eq!(aborted, [(1, ABORT), (2, ABORT), (3, ABORT)]);
    let held = rig.write(8, 1);
    assert_eq!(rig.ended(), None, "it waits for the next server");
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((seen, 0)));
    let mut rig = rig.recover();
    assert_eq!(rig.state(), State::Live);
    assert_eq!(rig.ended(), Some((0, 0)));
    rig.commit(0, 4096);
    assert_eq!(rig.finished(), Some((held, 0)));
}

#[test]
fn quiescing_a_server_that_has_every_tag_gives_up() {
    let mut rig = started(Features::USER_RECOVERY.with(Features::QUIESCE));
    for n in 0..4 {
        rig.write(n * 8, 1);
    }
    while rig.ended().is_some() {}
    let error = rig.driver.quiesce(rig.number, Duration::from_millis(2)).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EBUSY));
}

#[test]
fn recovery_waits_for_the_old_server_to_be_gone() {
    let rig = started(REISSUE);
    let error = rig.driver.start_recovery(rig.number).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EBUSY));
    assert!(error.to_string().contains("its server is still there"), "{error}");
    assert_eq!(rig.model.open_char(rig.number, 7).unwrap_err(), libc::EBUSY);
}

#[test]
fn stopping_returns_every_idle_tag() {
    let mut rig = started(REISSUE);
    rig.driver.stop(rig.number).unwrap();
    let aborted: Vec<_> = std::iter::from_fn(|| rig.ended()).collect();
    assert_eq!(aborted, [(0, ABORT), (1, ABORT), (2, ABORT), (3, ABORT)]);
    assert_eq!(rig.state(), State::Dead);
}

#[test]
fn a_device_in_use_is_stopped_only_by_force() {
    let rig = started(Features::NONE);
    rig.model.hold(rig.number, true);
    let error = rig.driver.try_stop(rig.number).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EBUSY));
    assert!(error.to_string().contains("--force"), "{error}");
    rig.model.hold(rig.number, false);
    rig.driver.try_stop(rig.number).unwrap();
}

#[test]
fn a_number_is_free_once_the_server_has_closed_the_device() {
    let rig = started(Features::NONE);
    let Rig { driver, number, server, .. } = rig;
    let deleter = std::thread::spawn({
        let driver = driver.clone();
        move || driver.delete(number)
    });
    while driver.info(number).is_ok_and(|info| info.state() != Some(State::Dead)) {
        std::thread::yield_now();
    }
    assert_eq!(
        driver.add(&NewDevice { number: Some(number), ..new_device(Features::NONE) }).unwrap_err().errno(),
        Some(libc::EEXIST)
    );
    drop(server);
    deleter.join().unwrap().unwrap();
    driver.add(&NewDevice { number: Some(number), ..new_device(Features::NONE) }).unwrap();
}

#[test]
fn a_kernel_grants_only_known_features() {
    let asked = REISSUE.with(Features::QUIESCE).with(Features::AUTO_BUF_REG).with(Features::NEED_GET_DATA);
    for (config, granted) in [
        (
            ModelConfig::LINUX_6_1,
            REISSUE.with(Features::NEED_GET_DATA).with(Features::URING_CMD_COMP_IN_TASK),
        ),
        (
            ModelConfig::LINUX_7_2,
            asked.without(Features::NEED_GET_DATA).with(Features(0b10_0110_0000_0100_0010)),
        ),
    ] {
        let driver = Driver::new(Arc::new(Model::new(config)));
        assert_eq!(driver.add(&new_device(asked)).unwrap().features(), granted);
    }
    let old = Driver::new(Arc::new(Model::new(ModelConfig::LINUX_6_1)));
    assert_eq!(old.features().unwrap(), None);
    assert_eq!(old.quiesce(0, Duration::from_secs(1)).unwrap_err().errno(), Some(libc::EOPNOTSUPP));
}

#[test]
fn queues_are_at_most_as_many_as_cpus_and_share_them() {
    let driver = Driver::new(Arc::new(Model::new(ModelConfig::LINUX_7_2)));
    let info = driver.add(&NewDevice { queues: 64, ..new_device(Features::NONE) }).unwrap();
    assert_eq!(info.nr_hw_queues, 4);
    assert_eq!(driver.affinity(info.dev_id, 2).unwrap(), [2]);
    assert_eq!(driver.affinity(info.dev_id, 4).unwrap_err().errno(), Some(libc::EINVAL));
}

#[test]
fn invalid_arguments_are_refused_as_by_the_driver() {
    let model = Model::new(ModelConfig::LINUX_7_2);
    let driver = Driver::new(Arc::new(model.clone()));
    let errno = |new: NewDevice| driver.add(&new).unwrap_err().errno();
    let fine = new_device(Features::NONE);
    assert_eq!(errno(NewDevice { depth: 0, ..fine }), Some(libc::EINVAL));
    assert_eq!(errno(NewDevice { depth: 4097, ..fine }), Some(libc::EINVAL));
    assert_eq!(errno(NewDevice { number: Some(1 << 20), ..fine }), Some(libc::EINVAL));
    assert_eq!(errno(new_device(Features::USER_RECOVERY_REISSUE)), Some(libc::EINVAL));
    assert_eq!(errno(new_device(REISSUE.with(FAIL_IO))), Some(libc::EINVAL));
    assert_eq!(errno(new_device(Features::QUIESCE)), Some(libc::EINVAL));
    let number = driver.add(&fine).unwrap().dev_id;
    for broken in [
        |params: &mut Params| params.types = 0,
        |params: &mut Params| params.basic.logical_bs_shift = 8,
        |params: &mut Params| params.basic.physical_bs_shift = 8,
        |params: &mut Params| params.basic.max_sectors = 129,
        |params: &mut Params| params.basic.max_sectors = 7,
        |params: &mut Params| params.types |= ParamTypes::DISCARD.0,
        |params: &mut Params| params.types |= ParamTypes::SEGMENT.0,
    ] {
        let mut params = params();
        broken(&mut params);
        assert_eq!(driver.set_params(number, &params).unwrap_err().errno(), Some(libc::EINVAL));
    }
    assert_eq!(driver.start(number, SERVER).unwrap_err().errno(), Some(libc::EINVAL), "no parameters");
    assert_eq!(driver.stop(77).unwrap_err().errno(), Some(libc::ENODEV));
}

/// A driver that records the commands.
struct Noting(Model, Mutex<Vec<(ControlOp, Option<String>)>>);

impl Control for Noting {
    fn execute(&self, command: Command) -> Result<(u32, Vec<u8>), Refusal> {
        self.1.lock().unwrap().push((command.op, command.path.clone()));
        self.0.execute(command)
    }

    fn open(&self, device: u32, limit: Duration) -> io::Result<OwnedFd> {
        self.0.open(device, limit)
    }

    fn await_owned(&self, device: u32, limit: Duration) -> io::Result<()> {
        self.0.await_owned(device, limit)
    }

    fn await_node(&self, device: u32, limit: Duration) -> io::Result<()> {
        self.0.await_node(device, limit)
    }

    fn devices(&self) -> Vec<u32> {
        self.0.devices()
    }
}

#[test]
fn a_known_device_is_not_queried_before_each_command() {
    let noting = Arc::new(Noting(Model::new(ModelConfig::LINUX_7_2), Mutex::default()));
    let asked = || std::mem::take(&mut *noting.1.lock().unwrap());
    let driver = Driver::new(noting.clone());
    let info = driver.add(&new_device(Features::NONE)).unwrap();
    let other = driver.add(&new_device(Features::NONE)).unwrap().dev_id;
    asked();
    let known = driver.knowing(&info);
    known.set_params(info.dev_id, &params()).unwrap();
    assert_eq!(asked(), [(ControlOp::SetParams, None)]);
    known.set_params(other, &params()).unwrap();
    let ops: Vec<ControlOp> = asked().into_iter().map(|(op, _)| op).collect();
    assert_eq!(ops, [ControlOp::GetDevInfo2, ControlOp::SetParams], "another device is queried");
    let user = ModelConfig { privileged: false, ..ModelConfig::LINUX_7_2 };
    let noting = Arc::new(Noting(Model::new(user), Mutex::default()));
    let driver = Driver::new(noting.clone());
    let own = driver.add(&new_device(Features::UNPRIVILEGED_DEV)).unwrap();
    driver.knowing(&own).set_params(own.dev_id, &params()).unwrap();
    let last = noting.1.lock().unwrap().pop().unwrap();
    assert_eq!(last, (ControlOp::SetParams, Some(char_path(own.dev_id))), "its path is passed");
}

#[test]
fn a_command_without_an_answer_is_reported_with_advice() {
    let driver = Driver::new(Arc::new(Model::new(ModelConfig { hangs: true, ..ModelConfig::LINUX_7_2 })));
    let error = driver.add(&new_device(Features::NONE)).unwrap_err();
    assert!(error.is_stuck());
    let text = error.to_string();
    assert!(text.contains("no answer within 10 s") && text.contains("--loop"), "{text}");
}

#[test]
fn without_privileges_only_unprivileged_devices_can_be_created() {
    let model = Model::new(ModelConfig { privileged: false, ..ModelConfig::LINUX_7_2 });
    let driver = Driver::new(Arc::new(model));
    assert_eq!(driver.add(&new_device(Features::NONE)).unwrap_err().errno(), Some(libc::EPERM));
    let own = Features::UNPRIVILEGED_DEV;
    let number = driver.add(&new_device(own)).unwrap().dev_id;
    assert!(driver.info(number).is_ok());
    let copying = new_device(own.with(Features::USER_COPY));
    assert_eq!(driver.add(&copying).unwrap_err().errno(), Some(libc::EINVAL));
}

#[test]
fn a_new_size_is_for_live_devices() {
    let rig = started(Features::NONE);
    rig.driver.update_size(rig.number, 4096).unwrap();
    assert_eq!(rig.driver.params(rig.number).unwrap().basic.dev_sectors, 4096);
    rig.driver.stop(rig.number).unwrap();
    assert_eq!(rig.driver.update_size(rig.number, 1).unwrap_err().errno(), Some(libc::ENODEV));
}
