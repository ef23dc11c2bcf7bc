//! A virtqueue alone: the device's side of virtio-blk requests, without a device behind it.

use block::{Bytes, QueueLimits};
use std::hint::black_box;
use std::sync::Arc;
use virtio::Features;
use virtio::blk::{Config, Kind, S_OK, Shape, Ticket, parse};
use virtio::driver::{AddressAllocator, Disk, Driver, SharedMemory};
use virtio::memory::GuestMemory;
use virtio::ring::{Chain, Position, Ring};

/// Requests of a batch, each of three descriptors.
const BATCH: u16 = 32;
const LEN: u32 = 4096;

/// Both sides of a virtqueue on one thread.
pub(super) struct VirtqueueRig {
    disk: Disk,
    ring: Ring,
    chain: Chain,
    memory: Arc<GuestMemory>,
    config: Config,
    tickets: Vec<Ticket>,
}

impl VirtqueueRig {
    pub(super) fn new(is_packed: bool) -> VirtqueueRig {
        let mut features = Features::EVENT_IDX | Features::INDIRECT_DESC | Features::VERSION_1;
        features.set(Features::RING_PACKED, is_packed);
        let shared = SharedMemory::create(1 << 20).expect("memory of a guest");
        let memory = shared.table(0, 0).expect("a region that starts at 0");
        let mut allocator = AddressAllocator::at(0);
        let layout = allocator.queue(256, features, 128);
        let driver = Driver::new(memory.clone(), &layout, features).expect("a valid layout");
        let mut limits = QueueLimits::default();
        limits.validate().expect("default limits");
        let shape = Shape {
            queues: 1,
            segments_max: 126,
            segment_len_max: 1 << 20,
            ranges_max: 1,
            is_read_only: false,
        };
        VirtqueueRig {
            disk: Disk::new(driver, memory.clone(), &mut allocator, BATCH, LEN).expect("enough memory"),
            ring: Ring::new(memory.clone(), layout, features, Position::START).expect("a valid layout"),
            chain: Chain::new(130),
            config: Config::new(&limits, Bytes::gib(1), shape),
            tickets: Vec::with_capacity(BATCH.into()),
            memory,
        }
    }

    /// Processes `requests` requests, a multiple of [`BATCH`].
    pub(super) fn run(&mut self, requests: u64) {
        for batch in 0..requests / u64::from(BATCH) {
            for slot in 0..BATCH {
                let kind = if slot % 2 == 0 { Kind::Read } else { Kind::Write };
                assert!(self.disk.add(slot, kind, batch % 1000 * 8, LEN), "the queue is not full");
            }
            let _ = black_box(self.disk.publish());
            self.serve_virtqueue();
            while let Some((_, status)) = self.disk.take_completed() {
                assert_eq!(status, S_OK);
            }
        }
    }

    /// Serves a batch. This is a separate function, so that its instructions can be counted separately.
    #[inline(never)]
    fn serve_virtqueue(&mut self) {
        while self.ring.pop(&mut self.chain).expect("a driver without faults") {
            let request = parse(&self.memory, &mut self.chain).expect("a request");
            let range = self.config.check_transfer(&request).expect("within the device");
            black_box((range, request.data[0].segment()));
            self.tickets.push(request.ticket);
        }
        for ticket in self.tickets.drain(..) {
            self.ring.complete(&ticket, S_OK);
        }
        self.ring.publish();
        black_box(self.ring.should_interrupt());
    }
}
