//! The server's side of the model: a character device, its rings, and its commands for tags.

use super::device::{Device, Fetcher, Held, Slot};
use super::{Model, World};
use crate::abi::{
    AutoBufReg, Features, IoCommand, IoDescriptor, IoFlags, IoOp, KernelOp, user_copy_integrity_offset,
    user_copy_offset,
};
use crate::kernel::Descriptors;
use std::io;
use std::sync::Arc;

/// Bit of an offset that selects integrity data.
const INTEGRITY_FLAG: u64 = user_copy_integrity_offset(0, 0, 0) & !user_copy_offset(0, 0, 0);

/// An io_uring of the server; it identifies the ring of a completion or a registered buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RingId(pub(super) u64);

/// The server's memory, which the driver accesses at the addresses in commands.
pub trait ServerMemory {
    /// Reads `into.len()` bytes from `addr`.
    fn read(&self, addr: u64, into: &mut [u8]);
    /// Writes `from` to `addr`.
    fn write(&mut self, addr: u64, from: &[u8]);
}

/// An open character device. Clones refer to the same open file; dropping the last clone means that the
/// server has died.
#[derive(Clone, Debug)]
pub struct CharDevice(Arc<Open>);

#[derive(Debug)]
struct Open {
    model: Model,
    device: u32,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.model.change(|world| {
            if let Some(there) = world.devices.get_mut(&self.device) {
                there.release();
            }
            world.gather(self.device);
            world.devices.retain(|number, there| *number != self.device || !there.deleted);
        });
    }
}

/// A command for a tag.
#[derive(Clone, Copy)]
pub(super) struct TagCommand {
    pub(super) ring: RingId,
    pub(super) thread: u64,
    pub(super) token: u64,
    pub(super) command: IoCommand,
    pub(super) address: u64,
}

/// Effect of a command: the driver completes it with a result, or keeps it.
pub(super) enum Taken {
    Ended(i32),
    Kept,
}

impl CharDevice {
    pub(super) fn new(model: Model, device: u32) -> CharDevice {
        CharDevice(Arc::new(Open { model, device }))
    }

    /// Returns the number of the device.
    pub fn device(&self) -> u32 {
        self.0.device
    }

    /// Creates an io_uring of the server.
    pub fn ring(&self) -> RingId {
        let mut world = self.0.model.world();
        world.next_ring += 1;
        RingId(world.next_ring)
    }

    /// Returns the descriptors of a queue.
    ///
    /// # Errors
    /// The queue does not exist.
    pub fn descriptors(&self, queue: u16) -> io::Result<Descriptors> {
        let world = self.0.model.world();
        let there = world.devices.get(&self.0.device).and_then(|there| there.queues.get(usize::from(queue)));
        there.map(|queue| queue.descriptors.reader()).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Sends a command from a thread to the driver; it completes with `token` on its ring. `op` and
    /// `address` are those of the SQE.
    pub fn command(
        &self,
        (ring, thread, token): (RingId, u64, u64),
        op: u32,
        command: IoCommand,
        address: u64,
        memory: &mut dyn ServerMemory,
    ) {
        let asked = TagCommand { ring, thread, token, command, address };
        self.change(|there| {
            let taken = match IoOp::from_code(op) {
                Some(op) => take(there, op, &asked, memory),
                None => Taken::Ended(-libc::EOPNOTSUPP),
            };
            if let Taken::Ended(result) = taken {
                there.ended.push_back((ring, token, result));
            }
        });
    }

    pub(super) fn change<T>(&self, act: impl FnOnce(&mut Device) -> T) -> Option<T> {
        self.0.model.change(|world: &mut World| {
            let done = world.devices.get_mut(&self.0.device).map(act);
            world.gather(self.0.device);
            done
        })
    }

    /// Polls a ring as the server: announces requests, copies the data of writes, and returns the next
    /// completion, with its token and result.
    pub fn next_ended(&self, ring: RingId, memory: &mut dyn ServerMemory) -> Option<(u64, i32)> {
        self.change(|there| {
            for index in 0..there.queues.len() {
                announce(there, index, ring, memory);
            }
            let position = there.ended.iter().position(|(of, ..)| *of == ring)?;
            there.ended.remove(position).map(|(_, token, result)| (token, result))
        })?
    }

    /// Executes the server's `pread` of request data. Returns the number of bytes, or a negative errno.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> i64 {
        self.copy(offset, KernelOp::Write, |data| {
            let len = into.len().min(data.len());
            into[..len].copy_from_slice(&data[..len]);
            len
        })
    }

    /// Executes the server's `pwrite` of request data. Returns the number of bytes, or a negative errno.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> i64 {
        self.copy(offset, KernelOp::Read, |data| {
            let len = from.len().min(data.len());
            data[..len].copy_from_slice(&from[..len]);
            len
        })
    }

    fn copy(&self, offset: u64, only: KernelOp, copy: impl FnOnce(&mut [u8]) -> usize) -> i64 {
        let done = self.change(|there| {
            if !there.has_disk() || !there.features().has(Features::USER_COPY) {
                return -i64::from(libc::EACCES);
            }
            let Some(place) = offset.checked_sub(user_copy_offset(0, 0, 0)) else {
                return -i64::from(libc::EINVAL);
            };
            let of_tuples = place & INTEGRITY_FLAG != 0;
            let place = place & !INTEGRITY_FLAG;
            let (queue, tag) = ((place >> 41) as usize, (place >> 25) as usize & 0xffff);
            let skip = place as usize & 0x1ff_ffff;
            let slot = there.queues.get_mut(queue).and_then(|queue| queue.slots.get_mut(tag));
            let Some(slot) = slot.filter(|slot| slot.with_server) else { return -i64::from(libc::EINVAL) };
            match &mut slot.active {
                Some(active) if !active.has_data() || skip > active.request.data.len() => {
                    -i64::from(libc::EINVAL)
                }
                Some(active) if active.request.op != only => -i64::from(libc::EACCES),
                Some(active) if of_tuples => {
                    // A request without integrity data transfers none.
                    active
                        .request
                        .tuples
                        .as_mut()
                        .map_or(0, |all| copy(all.get_mut(skip..).unwrap_or_default()))
                        as i64
                }
                Some(active) => copy(&mut active.request.data[skip..]) as i64,
                None => -i64::from(libc::EINVAL),
            }
        });
        done.unwrap_or(-i64::from(libc::EACCES))
    }

    /// Executes an operation of the server on a registered buffer, which is the request's own memory.
    /// Returns `None` if no buffer is registered at this index.
    pub fn with_buffer<T>(&self, ring: RingId, index: u16, act: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        self.change(|there| {
            let at = there.buffers.iter().find(|(of, at, ..)| (*of, *at) == (ring, index))?;
            let slot = &mut there.queues[at.2].slots[usize::from(at.3)];
            Some(act(&mut slot.active.as_mut()?.request.data))
        })?
    }
}

/// Announces requests whose commands came from this ring.
fn announce(there: &mut Device, index: usize, ring: RingId, memory: &mut dyn ServerMemory) {
    let mut later = Vec::new();
    while let Some(tag) = there.queues[index].work.pop_front() {
        let queue = &there.queues[index];
        let slot = &queue.slots[usize::from(tag)];
        let fetcher = queue.fetchers.front().filter(|_| slot.by_batch).map(|fetcher| fetcher.held);
        let of_ring = slot.command.or(fetcher).is_some_and(|held| held.ring == ring);
        if of_ring { announce_one(there, index, tag, memory) } else { later.push(tag) }
    }
    there.queues[index].work.extend(later);
}

fn announce_one(there: &mut Device, index: usize, tag: u16, memory: &mut dyn ServerMemory) {
    let features = there.features();
    let copies = there.copies();
    let shared = shared_of(there, index, tag);
    let queue = &mut there.queues[index];
    let slot = &mut queue.slots[usize::from(tag)];
    let Some(active) = &slot.active else { return };
    let was_by_batch = std::mem::take(&mut slot.by_batch);
    let Some(held) =
        slot.command.take().or_else(|| Fetcher::use_for(&mut queue.fetchers, tag, &mut there.ended))
    else {
        return;
    };
    slot.with_server = true;
    let mut result = 0;
    if let Some(addr) = shared {
        // Memory shared with the client has its data without a copy.
        memory.write(addr, &active.request.data);
    } else if copies && active.request.op == KernelOp::Write {
        if features.has(Features::NEED_GET_DATA) {
            slot.wants_data = true;
            result = 1;
        } else {
            memory.write(slot.addr, &active.request.data);
        }
    }
    if features.has(Features::AUTO_BUF_REG) && active.has_data() && shared.is_none() {
        let taken = there.buffers.iter().any(|(of, at, ..)| (*of, *at) == (held.ring, slot.auto.index));
        if !taken {
            there.buffers.push((held.ring, slot.auto.index, index, tag));
            slot.registered = Some((held.ring, slot.auto.index));
            slot.references += 1;
        } else if slot.auto.flags & AutoBufReg::FALLBACK != 0 {
            let reported = queue.descriptors.reader().read(tag);
            let marked = IoDescriptor { op_flags: reported.op_flags | IoFlags::NEED_REG_BUF.0, ..reported };
            queue.descriptors.store(tag, &marked);
        } else {
            // The request fails without being announced to the server.
            slot.command = (!was_by_batch).then_some(held);
            slot.by_batch = was_by_batch;
            slot.with_server = false;
            return there.complete(index, tag, -libc::EIO);
        }
    }
    there.ended.push_back((held.ring, held.token, result));
}

/// Returns the server's address of a request's data, if it is in memory shared with the client.
fn shared_of(there: &Device, index: usize, tag: u16) -> Option<u64> {
    let request = &there.queues[index].slots[usize::from(tag)].active.as_ref()?.request;
    there.shared_at(request.shared?, request.data.len())
}

fn take(there: &mut Device, op: IoOp, asked: &TagCommand, memory: &mut dyn ServerMemory) -> Taken {
    if op == IoOp::UnregisterIoBuf {
        return Taken::Ended(unregister(there, asked.ring, asked.command.addr as u16));
    }
    let index = usize::from(asked.command.q_id);
    let known =
        there.queues.get(index).is_some_and(|queue| usize::from(asked.command.tag) < queue.slots.len());
    if !known {
        return Taken::Ended(-libc::EINVAL);
    }
    let batch = there.features().has(Features::BATCH_IO);
    if batch && op != IoOp::RegisterIoBuf {
        return Taken::Ended(-libc::EOPNOTSUPP);
    }
    if op == IoOp::FetchReq {
        return fetch(there, index, asked);
    }
    let slot = &there.queues[index].slots[usize::from(asked.command.tag)];
    if !batch && slot.thread != Some(asked.thread) {
        return Taken::Ended(-libc::EINVAL);
    }
    if !slot.with_server {
        return Taken::Ended(-libc::EBUSY);
    }
    if slot.wants_data != (op == IoOp::NeedGetData) {
        return Taken::Ended(-libc::EINVAL);
    }
    match op {
        IoOp::CommitAndFetchReq => commit(there, index, asked, memory),
        IoOp::NeedGetData => Taken::Ended(get_data(there, index, asked, memory)),
        IoOp::RegisterIoBuf => Taken::Ended(register(there, index, asked)),
        _ => Taken::Ended(-libc::EOPNOTSUPP),
    }
}

/// Returns the parameters of a tag's automatic registration, if the device uses it.
fn auto_of(there: &Device, address: u64) -> Result<AutoBufReg, i32> {
    if !there.features().has(Features::AUTO_BUF_REG) {
        return Ok(AutoBufReg::default());
    }
    let auto = AutoBufReg::from_sqe_addr(address);
    let sane = auto.reserved0 == 0 && auto.reserved1 == 0 && auto.flags & !AutoBufReg::FALLBACK == 0;
    if sane { Ok(auto) } else { Err(libc::EINVAL) }
}

pub(super) fn fetch(there: &mut Device, index: usize, asked: &TagCommand) -> Taken {
    let needs_buffer = there.copies() && !there.features().has(Features::NEED_GET_DATA);
    let has_buffer = asked.command.addr != 0;
    if needs_buffer && !has_buffer || !there.copies() && has_buffer {
        return Taken::Ended(-libc::EINVAL);
    }
    let auto = match auto_of(there, asked.address) {
        Ok(auto) => auto,
        Err(errno) => return Taken::Ended(-errno),
    };
    if there.is_ready() {
        return Taken::Ended(-libc::EBUSY);
    }
    let queue = &mut there.queues[index];
    let slot = &mut queue.slots[usize::from(asked.command.tag)];
    if slot.is_ready() {
        return Taken::Ended(-libc::EINVAL);
    }
    *slot = Slot {
        command: Some(Held { ring: asked.ring, token: asked.token }),
        thread: Some(asked.thread),
        addr: asked.command.addr,
        auto,
        ..Slot::default()
    };
    queue.ready += 1;
    if queue.ready == queue.slots.len() {
        queue.canceling = false;
        queue.fail_io = false;
        queue.force_abort = false;
    }
    Taken::Kept
}

pub(super) fn commit(
    there: &mut Device,
    index: usize,
    asked: &TagCommand,
    memory: &mut dyn ServerMemory,
) -> Taken {
    let copies = there.copies();
    let late_buffer = there.features().has(Features::NEED_GET_DATA);
    let auto = match auto_of(there, asked.address) {
        Ok(auto) => auto,
        Err(errno) => return Taken::Ended(-errno),
    };
    let tag = asked.command.tag;
    let shared = shared_of(there, index, tag);
    let slot = &mut there.queues[index].slots[usize::from(tag)];
    let is_read = slot.active.as_ref().is_some_and(|active| active.request.op == KernelOp::Read);
    let has_buffer = asked.command.addr != 0;
    if copies && !has_buffer && (!late_buffer || is_read) || !copies && has_buffer {
        return Taken::Ended(-libc::EINVAL);
    }
    slot.command = Some(Held { ring: asked.ring, token: asked.token });
    slot.with_server = false;
    let read_from = shared.or(copies.then_some(asked.command.addr));
    slot.addr = asked.command.addr;
    slot.auto = auto;
    let registered = slot.registered.take();
    let result = asked.command.result;
    if let (Some(active), Some(addr)) = (slot.active.as_mut().filter(|_| is_read && result > 0), read_from) {
        let len = (result as usize).min(active.request.data.len());
        memory.read(addr, &mut active.request.data[..len]);
    }
    slot.committed = Some(result);
    if let Some((ring, at)) = registered.filter(|(ring, _)| *ring == asked.ring) {
        unregister(there, ring, at);
    } else if there.queues[index].slots[usize::from(tag)].references == 0 {
        there.complete(index, tag, result);
    }
    Taken::Kept
}

fn get_data(there: &mut Device, index: usize, asked: &TagCommand, memory: &mut dyn ServerMemory) -> i32 {
    let queue = &mut there.queues[index];
    let slot = &mut queue.slots[usize::from(asked.command.tag)];
    slot.wants_data = false;
    slot.addr = asked.command.addr;
    if let Some(active) = &slot.active {
        memory.write(slot.addr, &active.request.data);
        let reported = queue.descriptors.reader().read(asked.command.tag);
        queue.descriptors.store(asked.command.tag, &IoDescriptor { addr: slot.addr, ..reported });
    }
    0
}

fn register(there: &mut Device, index: usize, asked: &TagCommand) -> i32 {
    let at = asked.command.addr as u16;
    if !there.features().has(Features::SUPPORT_ZERO_COPY) {
        return -libc::EINVAL;
    }
    if there.buffers.iter().any(|(of, used, ..)| (*of, *used) == (asked.ring, at)) {
        return -libc::EBUSY;
    }
    let slot = &mut there.queues[index].slots[usize::from(asked.command.tag)];
    if !slot.active.as_ref().is_some_and(super::device::Active::has_data) {
        return -libc::EINVAL;
    }
    slot.references += 1;
    there.buffers.push((asked.ring, at, index, asked.command.tag));
    0
}

/// Unregisters a buffer, and completes a request that was waiting for this.
fn unregister(there: &mut Device, ring: RingId, at: u16) -> i32 {
    let Some(position) = there.buffers.iter().position(|(of, used, ..)| (*of, *used) == (ring, at)) else {
        return -libc::EINVAL;
    };
    let (_, _, index, tag) = there.buffers.remove(position);
    let slot = &mut there.queues[index].slots[usize::from(tag)];
    slot.references = slot.references.saturating_sub(1);
    if slot.references == 0
        && let Some(result) = slot.committed
    {
        there.complete(index, tag, result);
    }
    0
}
