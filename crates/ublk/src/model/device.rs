//! A device of the model: its queues, its tags, and the handling of requests in each state.

use super::{ClientRequest, Finished, RingId};
use crate::abi::{
    AutoBufReg, DeviceInfo, Features, IoDescriptor, IoFlags, KernelOp, ParamTypes, Params, State,
    shmem_index, shmem_offset,
};
use crate::kernel::SharedDescriptors;
use std::collections::VecDeque;

/// A command of the server that the driver holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Held {
    pub(super) ring: RingId,
    pub(super) token: u64,
}

/// A multishot fetch command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fetcher {
    pub(super) held: Held,
    /// Number of further tags after which it ends.
    pub(super) left: u32,
}

impl Fetcher {
    /// Announces a tag with the first fetch command, and returns the command to complete. After its last
    /// tag, the fetch itself completes.
    pub(super) fn use_for(
        all: &mut VecDeque<Fetcher>,
        tag: u16,
        ended: &mut VecDeque<(RingId, u64, i32)>,
    ) -> Option<Held> {
        let first = all.front_mut()?;
        let Held { ring, token } = first.held;
        first.left -= 1;
        if first.left == 0 {
            all.pop_front();
            ended.push_back((ring, token, -libc::ENOBUFS));
        }
        Some(Held { ring, token: token & !u64::from(u32::MAX) | u64::from(tag) })
    }
}

/// A request that a client waits for.
#[derive(Clone, Debug)]
pub(super) struct Active {
    pub(super) number: u64,
    pub(super) request: ClientRequest,
    /// Data of the part that the server has already completed.
    before: Vec<u8>,
    /// Integrity data of that part.
    tuples_before: Vec<u8>,
}

impl Active {
    pub(super) fn has_data(&self) -> bool {
        matches!(self.request.op, KernelOp::Read | KernelOp::Write)
    }

    fn descriptor(&self, addr: u64) -> IoDescriptor {
        let shared = if self.request.shared.is_some() { IoFlags::SHMEM_ZC } else { IoFlags::NONE };
        let tuples = if self.request.tuples.is_some() { IoFlags::INTEGRITY } else { IoFlags::NONE };
        let addr = self.request.shared.unwrap_or(addr);
        IoDescriptor {
            op_flags: self.request.op as u32 | self.request.flags.0 | shared.0 | tuples.0,
            nr_sectors: self.request.sectors,
            start_sector: self.request.start,
            addr,
        }
    }
}

/// State of a tag.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The server's command, while the driver holds it.
    pub(super) command: Option<Held>,
    /// Whether the driver owns the tag although it has no command of its own.
    pub(super) by_batch: bool,
    /// Whether the tag's command was cancelled, so that it must not be fetched again.
    pub(super) cancelled: bool,
    /// Whether the server has the request.
    pub(super) with_server: bool,
    /// Whether the server must provide a buffer for the announced write.
    pub(super) wants_data: bool,
    /// The thread that fetched the tag.
    pub(super) thread: Option<u64>,
    /// Address of the tag's buffer.
    pub(super) addr: u64,
    pub(super) auto: AutoBufReg,
    /// Ring and index at which the buffer was registered automatically.
    pub(super) registered: Option<(RingId, u16)>,
    /// Number of registrations that keep the request from completing.
    pub(super) references: u32,
    /// Result that the server committed while registrations remained.
    pub(super) committed: Option<i32>,
    /// The request that has the tag.
    pub(super) active: Option<Active>,
}

impl Slot {
    /// Returns whether the driver owns the tag and can announce a request.
    pub(super) fn is_ready(&self) -> bool {
        self.command.is_some() || self.by_batch
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) slots: Vec<Slot>,
    pub(super) descriptors: SharedDescriptors,
    pub(super) ready: usize,
    /// Whether there is no server that takes requests.
    pub(super) canceling: bool,
    /// Whether requests fail until there is a server.
    pub(super) fail_io: bool,
    /// Whether requests fail permanently.
    pub(super) force_abort: bool,
    /// Requests without a tag.
    pub(super) waiting: VecDeque<Active>,
    /// Requests that wait for a server.
    pub(super) requeued: VecDeque<Active>,
    /// Tags whose requests are announced when the server next polls.
    pub(super) work: VecDeque<u16>,
    /// Fetch commands, oldest first.
    pub(super) fetchers: VecDeque<Fetcher>,
}

/// State of a device.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) info: DeviceInfo,
    pub(super) params: Params,
    pub(super) queues: Vec<Queue>,
    /// The process that has the character device open.
    pub(super) open_by: Option<u32>,
    pub(super) openers: u32,
    /// Whether the block device can no longer be opened.
    pub(super) closed_to_openers: bool,
    pub(super) deleted: bool,
    pub(super) finished: Vec<Finished>,
    /// Completed commands in order: ring, token, result.
    pub(super) ended: VecDeque<(RingId, u64, i32)>,
    /// Memory shared with clients: its address in the server, and its length.
    pub(super) client_memory: Vec<Option<(u64, u64)>>,
    /// Registered buffers: ring, index, queue and tag.
    pub(super) buffers: Vec<(RingId, u16, usize, u16)>,
}

impl Device {
    pub(super) fn new(info: DeviceInfo) -> Device {
        let queue = |_| Queue {
            slots: (0..info.queue_depth).map(|_| Slot::default()).collect(),
            descriptors: SharedDescriptors::new(info.queue_depth),
            ready: 0,
            canceling: false,
            fail_io: false,
            force_abort: false,
            waiting: VecDeque::new(),
            requeued: VecDeque::new(),
            work: VecDeque::new(),
            fetchers: VecDeque::new(),
        };
        Device {
            info,
            params: Params { types: 0, ..Params::new() },
            queues: (0..info.nr_hw_queues).map(queue).collect(),
            open_by: None,
            openers: 0,
            closed_to_openers: false,
            deleted: false,
            finished: Vec::new(),
            ended: VecDeque::new(),
            client_memory: Vec::new(),
            buffers: Vec::new(),
        }
    }

    pub(super) fn features(&self) -> Features {
        self.info.features()
    }

    pub(super) fn state(&self) -> State {
        self.info.state().unwrap_or(State::Dead)
    }

    pub(super) fn set_state(&mut self, state: State) {
        self.info.state = state as u16;
    }

    pub(super) fn has_disk(&self) -> bool {
        self.state() != State::Dead
    }

    /// Returns whether every tag of every queue was fetched.
    pub(super) fn is_ready(&self) -> bool {
        self.queues.iter().all(|queue| queue.ready == queue.slots.len())
    }

    pub(super) fn is_recoverable(&self) -> bool {
        matches!(self.state(), State::Quiesced | State::FailIo)
    }

    /// Returns whether requests wait while there is no server.
    fn queues_without_server(&self) -> bool {
        self.features().has(Features::USER_RECOVERY) && !self.features().has(Features::USER_RECOVERY_FAIL_IO)
    }

    /// Returns the server's address of a request's data in shared memory.
    pub(super) fn shared_at(&self, place: u64, len: usize) -> Option<u64> {
        let (addr, whole) = (*self.client_memory.get(usize::from(shmem_index(place)))?)?;
        let offset = u64::from(shmem_offset(place));
        (offset + len as u64 <= whole).then_some(addr + offset)
    }

    /// Returns whether the driver copies data.
    pub(super) fn copies(&self) -> bool {
        let by_server = Features::USER_COPY.with(Features::SUPPORT_ZERO_COPY).with(Features::AUTO_BUF_REG);
        self.features().common(by_server).is_empty()
    }

    /// Handles the arrival of a request, as the driver's `queue_rq` does.
    pub(super) fn submit(&mut self, queue: usize, number: u64, request: ClientRequest) {
        let index = queue % self.queues.len();
        // Memory that is not, or no longer, registered is private to the client.
        let shared = request.shared.filter(|&place| self.shared_at(place, request.data.len()).is_some());
        let keeps_tuples = self.params.types().has(ParamTypes::INTEGRITY);
        let tuples = request.tuples.filter(|_| keeps_tuples);
        let request = ClientRequest { shared, tuples, ..request };
        self.offer(index, Active { number, request, before: Vec::new(), tuples_before: Vec::new() });
    }

    fn offer(&mut self, index: usize, active: Active) {
        let waits = self.queues_without_server();
        let queue = &mut self.queues[index];
        if queue.fail_io {
            return self.finish(active, libc::EREMOTEIO);
        }
        if waits && queue.force_abort {
            return self.finish(active, libc::EIO);
        }
        if queue.canceling {
            return self.abort(index, active);
        }
        let Some(tag) = queue.slots.iter().position(|slot| slot.active.is_none()) else {
            queue.waiting.push_back(active);
            return;
        };
        let slot = &mut queue.slots[tag];
        queue.descriptors.store(tag as u16, &active.descriptor(slot.addr));
        slot.active = Some(active);
        queue.work.push_back(tag as u16);
    }

    /// Handles a request that no server takes.
    pub(super) fn abort(&mut self, index: usize, active: Active) {
        if self.queues_without_server() {
            self.queues[index].requeued.push_back(active);
        } else {
            self.finish(active, libc::EIO);
        }
    }

    /// Completes a request to its client.
    fn finish(&mut self, active: Active, errno: i32) {
        let Active { number, request, mut before, mut tuples_before } = active;
        before.extend(request.data);
        tuples_before.extend(request.tuples.unwrap_or_default());
        let is_read = request.op == KernelOp::Read && errno == 0;
        let (data, tuples) = if is_read { (before, tuples_before) } else { Default::default() };
        self.finished.push(Finished { number, errno, data, tuples });
    }

    /// Completes the request of a tag with the server's result; the next request may use the tag.
    pub(super) fn complete(&mut self, index: usize, tag: u16, result: i32) {
        let slot = &mut self.queues[index].slots[usize::from(tag)];
        slot.committed = None;
        let Some(mut active) = slot.active.take() else { return };
        let len = active.request.data.len() as i32;
        let failed =
            if active.request.op == KernelOp::Read && result == 0 { -libc::EIO } else { result.min(0) };
        if failed < 0 {
            // The kernel maps unknown errnos to EIO; the model keeps the server's.
            self.finish(active, -failed);
        } else if active.has_data() && result < len {
            // The transfer was short: send the rest to the server again.
            let done = (result / 512) as u32;
            let rest = active.request.data.split_off(done as usize * 512);
            active.before.append(&mut active.request.data);
            active.request.data = rest;
            if let Some(tuples) = &mut active.request.tuples {
                let rest = tuples.split_off(tuples.len() / active.request.sectors as usize * done as usize);
                active.tuples_before.extend(std::mem::replace(tuples, rest));
            }
            active.request.start += u64::from(done);
            active.request.shared = active.request.shared.map(|place| place + u64::from(done) * 512);
            active.request.sectors -= done;
            self.offer(index, active);
        } else {
            self.finish(active, 0);
        }
        self.refill(index);
    }

    /// Assigns free tags to waiting requests.
    fn refill(&mut self, index: usize) {
        while self.queues[index].slots.iter().any(|slot| slot.active.is_none()) {
            let Some(next) = self.queues[index].waiting.pop_front() else { break };
            self.offer(index, next);
        }
    }

    /// Sends requests that waited for a server.
    pub(super) fn kick(&mut self) {
        for index in 0..self.queues.len() {
            let again: Vec<_> = self.queues[index].requeued.drain(..).collect();
            again.into_iter().for_each(|active| self.offer(index, active));
            self.refill(index);
        }
    }

    pub(super) fn set_canceling(&mut self, canceling: bool) {
        self.queues.iter_mut().for_each(|queue| queue.canceling = canceling);
    }

    /// Cancels all commands without a request.
    pub(super) fn cancel_commands(&mut self) {
        for queue in &mut self.queues {
            for Fetcher { held, .. } in queue.fetchers.drain(..) {
                self.ended.push_back((held.ring, held.token, -libc::ENODEV));
            }
            for slot in &mut queue.slots {
                if slot.active.is_some() || slot.cancelled {
                    continue;
                }
                if let Some(held) = slot.command.take() {
                    slot.cancelled = true;
                    self.ended.push_back((held.ring, held.token, -libc::ENODEV));
                }
            }
        }
    }

    /// Returns whether a request is in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.queues.iter().any(|queue| queue.slots.iter().any(|slot| slot.active.is_some()))
    }

    /// Removes the block device. There must be no request in flight.
    pub(super) fn detach(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.force_abort = true);
        for index in 0..self.queues.len() {
            let queue = &mut self.queues[index];
            let left: Vec<_> = queue.requeued.drain(..).chain(queue.waiting.drain(..)).collect();
            left.into_iter().for_each(|active| self.finish(active, libc::EIO));
        }
        self.set_state(State::Dead);
        self.info.ublksrv_pid = -1;
    }

    /// Handles the end of the server, which has closed the character device, or died.
    pub(super) fn release(&mut self) {
        self.set_canceling(true);
        self.buffers.clear();
        let reissue = self.features().has(Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE));
        for index in 0..self.queues.len() {
            let announced: Vec<u16> = self.queues[index].work.drain(..).collect();
            for tag in 0..self.queues[index].slots.len() {
                let slot = &mut self.queues[index].slots[tag];
                let Some(active) = slot.active.take() else { continue };
                let with_server = slot.with_server && !announced.contains(&(tag as u16));
                // A committed request is complete, even if a registration of its buffer remained.
                if let Some(result) = slot.committed.take() {
                    slot.active = Some(active);
                    self.complete(index, tag as u16, result);
                } else if with_server && !reissue {
                    self.finish(active, libc::EIO);
                } else {
                    self.abort(index, active);
                }
            }
            let waiting: Vec<_> = self.queues[index].waiting.drain(..).collect();
            waiting.into_iter().for_each(|active| self.abort(index, active));
        }
        if self.has_disk() {
            if !self.features().has(Features::USER_RECOVERY) {
                self.detach();
            } else if self.queues_without_server() {
                self.set_state(State::Quiesced);
            } else {
                self.set_state(State::FailIo);
                self.queues.iter_mut().for_each(|queue| queue.fail_io = true);
            }
        }
        for queue in &mut self.queues {
            queue.ready = 0;
            queue.fetchers.clear();
            queue.slots.iter_mut().for_each(|slot| *slot = Slot::default());
        }
        self.open_by = None;
        self.ended.clear();
    }
}
