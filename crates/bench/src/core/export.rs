//! Requests of a block device that the ublk export serves, from the model of the driver: with the export, and
//! with manual commands, whose cost is the model's own.

use super::rig::{Mix, Place, places};
use super::ring::BenchRing;
use super::{DEPTH, LEN};
use block::{Bytes, Cookie, Request, Status};
use exports::ublk::{DataMode, Driver as _, Front, ModelRing, ServedQueueConfig, ServedQueueShared};
use queue::{Cx, Done, Node, Queue, QueueConfig, Queues, Stack, Verdict};
use ring::Token;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use ublk::model::{ClientRequest, Model, ModelConfig};
use ublk::{Driver as Control, Features, IoCommand, IoFlags, IoOp, KernelOp, NewDevice, ParamTypes, Params};

/// Size of the device.
const SIZE: Bytes = Bytes::gib(1);
/// Process ID of the server.
const SERVER: u32 = 1;

/// A backend that completes each request within submit.
struct Immediate;

impl Node<ModelRing<BenchRing>> for Immediate {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, ModelRing<BenchRing>>) -> Verdict {
        Verdict::Up(Status::Ok)
    }
}

/// A device under load.
pub(crate) struct ExportRig {
    model: Model,
    device: u32,
    ring: ModelRing<BenchRing>,
    /// The served queue; `None`: commands are issued manually.
    served: Option<Served>,
    finished: u64,
    asked: u64,
    /// Random places, used for their random choice between reading and writing.
    places: Vec<Place>,
}

struct Served {
    front: Front,
    queues: Queues<ModelRing<BenchRing>>,
    done: Vec<Done>,
    touched: Vec<queue::QueueId>,
}

fn params() -> Params {
    let mut params = Params::new();
    params.types = ParamTypes::BASIC.0;
    params.basic.logical_bs_shift = 9;
    params.basic.physical_bs_shift = 12;
    params.basic.max_sectors = (LEN >> 9) as u32;
    params.basic.dev_sectors = SIZE.0 >> 9;
    params
}

impl ExportRig {
    pub(crate) fn new(with_export: bool) -> ExportRig {
        let model = Model::new(ModelConfig::LINUX_7_2);
        let control = Control::new(Arc::new(model.clone()));
        let features = Features::CMD_IOCTL_ENCODE;
        let new = NewDevice {
            number: None,
            queues: 1,
            depth: DEPTH,
            io_bytes_max: LEN as u32,
            features,
            server_flags: 0,
        };
        let device = control.add(&new).expect("a device").dev_id;
        control.set_params(device, &params()).expect("parameters");
        let memory = BenchRing::new(usize::from(DEPTH) * LEN as usize);
        let mut ring =
            ModelRing::new(memory, model.open_char(device, SERVER).expect("a character device"), 1);
        let served = with_export.then(|| Served::new(&mut ring));
        if served.is_none() {
            (0..DEPTH).for_each(|tag| by_hand(&mut ring, tag, IoOp::FetchReq, 0));
        }
        control.start(device, SERVER).expect("every tag was fetched");
        ExportRig { model, device, ring, served, finished: 0, asked: 0, places: places() }
    }

    /// Runs `count` requests, [`DEPTH`] at a time. The measured function.
    #[inline(never)]
    pub(crate) fn run(&mut self, mix: Mix, count: u64) {
        let until = self.finished + count;
        while self.finished < until {
            for _ in 0..DEPTH {
                self.ask(mix);
            }
            match &mut self.served {
                Some(served) => served.turn(&mut self.ring),
                None => {
                    while let Some((token, result)) = self.ring.next_ended() {
                        assert_eq!(result, 0);
                        by_hand(&mut self.ring, token.number as u16, IoOp::CommitAndFetchReq, LEN as i32);
                    }
                }
            }
            while let Some(end) = self.model.finished(self.device) {
                assert_eq!(end.errno, 0);
                self.finished += 1;
            }
        }
    }

    fn ask(&mut self, mix: Mix) {
        let place = self.places[self.asked as usize & (self.places.len() - 1)];
        let op = if mix.op(place) == block::Op::Read { KernelOp::Read } else { KernelOp::Write };
        let start = (self.asked * (LEN >> 9)) % (SIZE.0 >> 9);
        self.asked += 1;
        let data = vec![0; LEN as usize];
        let request = ClientRequest {
            op,
            flags: IoFlags::NONE,
            start,
            sectors: (LEN >> 9) as u32,
            data,
            shared: None,
            tuples: None,
        };
        self.model.submit(self.device, 0, request).expect("a block device");
    }
}

/// Sends a command for a tag without the export, with the same buffer.
fn by_hand(ring: &mut ModelRing<BenchRing>, tag: u16, op: IoOp, result: i32) {
    let buffer = block::Segment { offset: u64::from(tag) * LEN, len: 0, region: super::ring::BUFFERS };
    let command = IoCommand { q_id: 0, tag, result, addr: ring.address(buffer) };
    let token = Token { front: 0, index: 0, number: tag.into() };
    ring.command(token, ring.file(), op.code(), command, 0);
}

impl Served {
    fn new(ring: &mut ModelRing<BenchRing>) -> Served {
        let mut queues = Queues::default();
        let id = queues.vacant();
        let mut stack = Stack::default();
        stack.backend(Box::new(Immediate));
        let config = QueueConfig { id, depth: DEPTH + 1, segments_per_tag: 1, timeout_ns: None };
        let mut queue = Queue::new(config, stack).expect("a stack that fits");
        queue.reserve_tags(DEPTH);
        queues.insert(queue);
        let shared = Arc::new(ServedQueueShared::default());
        shared.size.store(SIZE.0, Relaxed);
        let served = ServedQueueConfig {
            queue: id,
            file: ring.file(),
            descriptors: ring.descriptors(0).expect("a queue"),
            q_id: 0,
            first_tag: 0,
            depth: DEPTH,
            mode: DataMode::Copy,
            zero_copy_reads: false,
            io_max: Bytes(LEN),
            batch: false,
            integrity: None,
            client_memory: None,
            encoded: true,
            shared,
        };
        let mut front = Front::default();
        front.add_queue(served, ring).expect("memory for its buffers");
        Served { front, queues, done: Vec::with_capacity(DEPTH.into()), touched: Vec::new() }
    }

    /// Executes one turn, like a reactor.
    fn turn(&mut self, ring: &mut ModelRing<BenchRing>) {
        while let Some((token, result)) = ring.next_ended() {
            self.front.ended(token, result, ring, &mut self.queues);
        }
        self.queues.turn(ring, &mut self.touched);
        let now = ring.inner.read_clock();
        for &id in &self.touched {
            let queue = self.queues.get_mut(id);
            queue.account(now);
            queue.swap_done(&mut self.done);
            for end in self.done.drain(..) {
                self.front.request_done(id, end, ring, &mut self.queues);
            }
        }
    }
}
