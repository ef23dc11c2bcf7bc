//! The ring itself: picks the engine, and hands each wish to it or to what both share.

use crate::config::{Choice, Chunk, EngineInfo, Event, RingConfig, SocketId, Token, Wait, WideCommand};
use crate::core::Core;
use crate::epoll::Epoll;
use crate::memory::ForeignMemory;
use crate::ops::Origin;
use crate::sys::{self, Mapping};
use crate::uring::Uring;
use crate::waker::Waker;
use block::{Region, Segment};
use queue::{FileId, FileOp, IoId, Nanos, Patience, Ring, RingFull};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Names the engine where the configuration leaves it open: `io_uring` or `epoll`.
const ENGINE_VARIABLE: &str = "BLOCKYARD_RING";

enum Engine {
    Uring(Box<Uring>),
    Epoll(Box<Epoll>),
}

/// A thread's door to the kernel.
pub struct KernelRing {
    engine: ManuallyDrop<Engine>,
    core: ManuallyDrop<Core>,
    info: EngineInfo,
}

impl std::fmt::Debug for KernelRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelRing").field("info", &self.info).finish_non_exhaustive()
    }
}

/// What is asked for: the configuration, or else the environment.
fn choice(config: Choice) -> io::Result<(Choice, Option<String>)> {
    if config != Choice::Auto {
        let why = (config == Choice::Epoll).then(|| "asked for".to_owned());
        return Ok((config, why));
    }
    match std::env::var(ENGINE_VARIABLE).as_deref() {
        Ok("io_uring") => Ok((Choice::Uring, None)),
        Ok("epoll") => Ok((Choice::Epoll, Some(format!("{ENGINE_VARIABLE}=epoll")))),
        Ok("") | Err(std::env::VarError::NotPresent) => Ok((Choice::Auto, None)),
        other => {
            let text = format!("{ENGINE_VARIABLE} is {other:?}: set it to io_uring or epoll, or not at all");
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}

impl KernelRing {
    /// Make one, on the thread that will use it.
    ///
    /// # Errors
    /// The engine asked for is not to be had, with the reason; the receive buffers make no sense; the
    /// system has no descriptors or memory left.
    pub fn new(config: RingConfig) -> io::Result<KernelRing> {
        let mut core = Core::new(&config)?;
        let (wanted, mut why) = choice(config.engine)?;
        let engine = match wanted {
            Choice::Epoll => None,
            _ => match Uring::new(&config, &mut core) {
                Ok((uring, lacks)) => {
                    why = lacks;
                    Some(uring)
                }
                Err(error) if wanted == Choice::Auto => {
                    why = Some(error.to_string());
                    None
                }
                Err(error) => return Err(error),
            },
        };
        let (engine, name) = match engine {
            Some(uring) => (Engine::Uring(Box::new(uring)), "io_uring"),
            None => (Engine::Epoll(Box::new(Epoll::new(&core)?)), "epoll"),
        };
        let info = EngineInfo { name, why };
        Ok(KernelRing { engine: ManuallyDrop::new(engine), core: ManuallyDrop::new(core), info })
    }

    /// Which engine it runs on, and why.
    pub fn engine(&self) -> &EngineInfo {
        &self.info
    }

    /// What other threads wake it with.
    pub fn waker(&self) -> Waker {
        self.core.waker.clone()
    }

    /// Look at the clock: [`now`](Ring::now) is that from here on.
    #[inline]
    pub fn look_at_clock(&mut self) -> Nanos {
        let core = &mut *self.core;
        core.now = sys::now();
        if let Some(batch) = core.batching.look(core.now) {
            sys::schedule_as_batch(batch);
        }
        core.now
    }

    /// Hand over what was asked for, wait if `wait` says so and nothing is there to be handed out yet, and
    /// take what has ended. It may return with nothing. With io_uring this is one system call, or none. Once
    /// no large block has been freed for a tenth of a second, free ones go back to the system.
    ///
    /// # Errors
    /// The kernel refused the call itself. The ring is of no use after that.
    #[inline]
    pub fn turn(&mut self, wait: Wait) -> io::Result<()> {
        let core = &mut *self.core;
        core.expire_timers();
        let wait = wait == Wait::UntilEvent && core.events.is_empty();
        if wait {
            core.before_sleep();
        }
        match &mut *self.engine {
            Engine::Uring(uring) => uring.turn(core, wait)?,
            Engine::Epoll(epoll) => epoll.turn(core, wait)?,
        }
        core.batching.gathered(core.events.len());
        if wait {
            core.after_sleep();
            if core.timers.next().is_some() {
                core.now = sys::now();
                core.expire_timers();
            }
        }
        if core.memory.has_grave() {
            let oldest = match &mut *self.engine {
                Engine::Uring(uring) => uring.oldest(core),
                Engine::Epoll(epoll) => epoll.oldest(core),
            };
            core.memory.bury(oldest);
        }
        Ok(())
    }

    /// Something that has ended or come, in order.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        self.core.events.pop_front()
    }

    #[cfg(test)]
    pub(crate) fn put_back(&mut self, event: Event) {
        self.core.events.push_front(event);
    }

    /// Register a file. It is kept open until [`remove_file`](KernelRing::remove_file) and until what was
    /// started on it is over.
    ///
    /// # Errors
    /// None at present; a kernel that has no room in its table is worked around.
    pub fn add_file(&mut self, fd: Arc<OwnedFd>) -> io::Result<FileId> {
        let fixed = match &mut *self.engine {
            Engine::Uring(uring) => uring.add_file(&fd),
            Engine::Epoll(_) => None,
        };
        Ok(self.core.files.add(fd, fixed))
    }

    /// The same for a file that is to be closed as soon as what was started on it is over. Before Linux 6.13, one that
    /// was registered may stay open until all is over that was started before it was removed, on whatever file.
    pub fn add_unregistered_file(&mut self, fd: Arc<OwnedFd>) -> FileId {
        self.core.files.add(fd, None)
    }

    /// Forget a file. Operations under way end as usual.
    ///
    /// # Panics
    /// When it is not a file of this ring.
    pub fn remove_file(&mut self, file: FileId) {
        let Some(file) = self.core.files.remove(file) else { return };
        match &mut *self.engine {
            Engine::Uring(uring) => uring.drop_file(file),
            Engine::Epoll(_) => drop(file.into_fd()),
        }
    }

    /// Let memory that someone else keeps be named in sends and file operations.
    ///
    /// # Panics
    /// With more than 65,536 regions.
    pub fn add_foreign(&mut self, memory: ForeignMemory) -> Region {
        self.core.memory.add_foreign(memory).expect("a ring holds at most 65,536 regions")
    }

    /// Take that back. The memory is kept until what was started before is over; nothing new may name it.
    ///
    /// # Panics
    /// When the region is not one of [`add_foreign`](KernelRing::add_foreign).
    pub fn remove_region(&mut self, region: Region) {
        let started = self.core.started;
        self.core.memory.remove_foreign(region, started);
    }

    /// Lets [`allocate`](Ring::allocate) first hand out memory that the kernel knows by number, for direct I/O: 2 MiB, pinned
    /// until as many have called [`release_memory`](KernelRing::release_memory) as have called this. Without effect on
    /// epoll.
    ///
    /// # Errors
    /// The kernel refuses, commonly for RLIMIT_MEMLOCK; the ring works on as before, and there is nothing to release.
    pub fn register_memory(&mut self) -> io::Result<()> {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.register_memory(&mut self.core),
            Engine::Epoll(_) => Ok(()),
        }
    }

    /// Takes back one [`register_memory`](KernelRing::register_memory) that succeeded. The last one unpins the memory.
    pub fn release_memory(&mut self) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.release_memory(&mut self.core);
        }
    }

    /// Start an operation on a file for a front-end. It ends as [`Event::Ended`] with the bytes moved or a
    /// negative errno. The memory may not go away until then.
    ///
    /// # Errors
    /// [`RingFull`]: nothing was started.
    #[inline]
    pub fn start_for(
        &mut self,
        token: Token,
        file: FileId,
        op: FileOp,
        data: &[Segment],
    ) -> Result<(), RingFull> {
        self.start_op(Origin::Front(token), file, op, data)
    }

    /// Hand a command to the driver behind a file (`IORING_OP_URING_CMD`). It ends as [`Event::Ended`] with
    /// what the driver answers; on epoll, which has no such thing, with `-EOPNOTSUPP`. Whatever the command
    /// names, memory and file, must stay until then.
    #[inline]
    pub fn command(&mut self, token: Token, file: FileId, op: u32, argument: [u8; 16]) {
        self.command_at(token, file, op, argument, 0);
    }

    /// The same, with what the entry's own address field says.
    #[inline]
    pub fn command_at(&mut self, token: Token, file: FileId, op: u32, argument: [u8; 16], address: u64) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.command(&self.core, token, file, op, argument, address),
            Engine::Epoll(_) => {
                let result = -i64::from(libc::EOPNOTSUPP);
                self.core.events.push_back(Event::Ended { token, result });
            }
        }
    }

    /// The same with memory of ours, by its address and length.
    pub fn command_from(&mut self, token: Token, file: FileId, op: u32, argument: [u8; 16], memory: Segment) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.command_from(&self.core, token, file, op, argument, memory),
            Engine::Epoll(_) => self.command_at(token, file, op, argument, 0),
        }
    }

    /// Hand a driver a command that it answers, until it ends, with numbers of 16 bits (multishot, with buffers that
    /// this ring has for it). Each comes as [`Event::Ended`] with result 0 and the number in place of the token's; the
    /// end of the command comes with the token as it was given, whose number must be none of those: 0 or a negative
    /// errno. It may end at any time, for want of buffers with `-ENOBUFS`, and can then be given again.
    pub fn command_numbers(&mut self, token: Token, file: FileId, op: u32, argument: [u8; 16]) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.command_numbers(&mut self.core, token, file, op, argument),
            Engine::Epoll(_) => self.command_at(token, file, op, argument, 0),
        }
    }

    /// Ask for the end of such a command.
    pub fn cancel_numbers(&mut self, token: Token) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.cancel_numbers(token);
        }
    }

    /// Hand a driver a command as [`command_at`](KernelRing::command_at) does, with more to say, and the entry's own length.
    #[inline]
    pub fn command_wide(&mut self, token: Token, file: FileId, command: &WideCommand) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.command_wide(&self.core, token, file, command),
            Engine::Epoll(_) => {
                let result = -i64::from(libc::EOPNOTSUPP);
                self.core.events.push_back(Event::Ended { token, result });
            }
        }
    }

    /// Make a region of our own, apart from what [`allocate`](Ring::allocate) gives: address space, and memory only
    /// where it is written to. `len` is rounded up to whole pages.
    ///
    /// # Errors
    /// The address space is not to be had.
    pub fn add_memory(&mut self, len: u64) -> io::Result<Region> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping::new(len.next_multiple_of(4096))?;
        // One written byte shall not take 2 MiB.
        mapping.without_huge_pages();
        self.core.memory.add_own(mapping, None)
    }

    /// Make the first `len` bytes of a file a region, shared with whoever else has it mapped and changes it at any time:
    /// files can be read and written with it, and nobody here looks at it.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub fn add_shared_memory(&mut self, file: BorrowedFd<'_>, len: u64) -> io::Result<Region> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.core.memory.add_shared(Mapping::of_file(file, len)?)
    }

    /// Take either back. Nothing may be under way with it.
    ///
    /// # Panics
    /// When the region is not one of these.
    pub fn remove_memory(&mut self, region: Region) {
        self.core.memory.remove_own(region);
    }

    /// Where a segment lies, for a driver that is told of it.
    ///
    /// # Panics
    /// When it does not lie in a region, or in one that only the kernel can reach.
    #[inline]
    pub fn address(&self, segment: Segment) -> u64 {
        self.core.memory.pointer(segment).addr() as u64
    }

    /// Make places where a driver puts the memory of its requests, for files to be read and written with: a region,
    /// in which entry `n` starts `n <<` [`KERNEL_BUFFER_SHIFT`](crate::KERNEL_BUFFER_SHIFT) bytes in, and the number
    /// of its first entry in the io_uring's table. Only the kernel can reach such memory.
    ///
    /// # Errors
    /// The kernel has no such table, or it is full.
    pub fn add_kernel_buffers(&mut self, count: u16) -> io::Result<(Region, u16)> {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.add_kernel_buffers(&mut self.core, count),
            Engine::Epoll(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// How many there are still to be had: of each stretch from which a region can be taken, in that order. A region is taken
    /// from the first that has as many.
    pub fn kernel_buffers_left(&self) -> Vec<u16> {
        match &*self.engine {
            Engine::Uring(uring) => uring.kernel_buffers_left(),
            Engine::Epoll(_) => Vec::new(),
        }
    }

    /// Take them back. They are empty, and nothing is under way with them.
    ///
    /// # Panics
    /// When the region is not one of [`add_kernel_buffers`](KernelRing::add_kernel_buffers).
    pub fn remove_kernel_buffers(&mut self, region: Region) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.remove_kernel_buffers(&mut self.core, region);
        }
    }

    /// Ask for the end of a command that its driver may keep for ever. It still ends once, as the driver has it.
    pub fn cancel_command(&mut self, token: Token) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.cancel_command(token);
        }
    }

    /// Tell once when a file can be read or has failed, by [`Event::Ended`] with the readiness as `poll` has
    /// it. Of several rings that watch one file, it may be that only one is told. A token that watches may not
    /// watch anew before that.
    pub fn watch(&mut self, token: Token, file: FileId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.watch(&self.core, token, file),
            Engine::Epoll(epoll) => epoll.watch(&mut self.core, token, file),
        }
    }

    /// End that soon: its event comes, once, if it has not come yet; it tells of readiness or of `-ECANCELED`.
    pub fn watch_end(&mut self, token: Token) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.watch_end(token),
            Engine::Epoll(epoll) => epoll.watch_end(&mut self.core, token),
        }
    }

    #[inline]
    fn start_op(
        &mut self,
        origin: Origin,
        file: FileId,
        op: FileOp,
        data: &[Segment],
    ) -> Result<(), RingFull> {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.start(&mut self.core, origin, file, op, data),
            Engine::Epoll(epoll) => epoll.start(&mut self.core, origin, file, op, data),
        }
    }

    /// As [`allocate`](Ring::allocate), for data that comes bit by bit. Whether memory lies behind the segment already;
    /// else it comes with the bytes that are written there.
    pub fn reserve(&mut self, len: u32) -> Option<(Segment, bool)> {
        self.core.memory.reserve(len)
    }

    /// Give the memory behind a segment of the arena back to the system: whole pages of it, which hold zeroes then. It
    /// stays allocated.
    ///
    /// # Panics
    /// When it does not lie in our own memory.
    pub fn discard(&mut self, segment: Segment) {
        self.core.memory.discard(segment);
    }

    /// Copy bytes between two segments of our own memory of one length; they may overlap.
    ///
    /// # Panics
    /// When they are not of one length, or not our own.
    #[inline]
    pub fn copy(&mut self, from: Segment, to: Segment) {
        self.core.memory.copy(from, to);
    }

    /// Take in a connected stream socket. `owner` comes back in its events.
    ///
    /// # Errors
    /// It is not a socket that the engine can wait for, or there are too many.
    pub fn add_socket(&mut self, fd: OwnedFd, owner: u32) -> io::Result<SocketId> {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.add_socket(fd, owner),
            Engine::Epoll(epoll) => epoll.add_socket(fd, owner),
        }
    }

    /// How many sockets there are.
    pub fn sockets(&self) -> usize {
        match &*self.engine {
            Engine::Uring(uring) => uring.sockets_live(),
            Engine::Epoll(epoll) => epoll.sockets_live(),
        }
    }

    /// Hand out what comes, in chunks, until [`Event::ReceiveEnded`]. While no chunk is left, all sockets
    /// pause.
    ///
    /// # Panics
    /// When it receives already.
    #[track_caller]
    pub fn receive(&mut self, socket: SocketId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.receive(socket),
            Engine::Epoll(epoll) => epoll.receive(socket),
        }
    }

    /// End that. What was received already is still handed out, then [`Event::ReceiveEnded`]. Nothing
    /// happens when it does not receive.
    #[track_caller]
    pub fn receive_stop(&mut self, socket: SocketId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.receive_stop(&mut self.core, socket),
            Engine::Epoll(epoll) => epoll.receive_stop(&mut self.core, socket),
        }
    }

    /// Receive until the segment is full, then [`Event::Filled`].
    ///
    /// # Panics
    /// When it receives already, or the segment is not our own memory.
    #[track_caller]
    pub fn receive_into(&mut self, socket: SocketId, segment: Segment) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.receive_into(&mut self.core, socket, segment),
            Engine::Epoll(epoll) => epoll.receive_into(&mut self.core, socket, segment),
        }
    }

    /// Give back a chunk that was received. Every one, once, also those of sockets that are gone.
    ///
    /// # Panics
    /// When it was given back already.
    #[inline]
    pub fn give_back(&mut self, chunk: Chunk) {
        self.core.chunks.take_back(chunk);
        match &mut *self.engine {
            Engine::Uring(uring) => uring.give_back(&self.core, chunk),
            Engine::Epoll(epoll) => epoll.give_back(chunk),
        }
    }

    /// Send all of these, in order, then [`Event::Sent`]. The memory stays as it is until then.
    ///
    /// # Panics
    /// When a send is under way on this socket, there are more than 1024 segments, or one names no memory.
    #[inline]
    #[track_caller]
    pub fn send(&mut self, socket: SocketId, segments: &[Segment]) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.send(&mut self.core, socket, segments),
            Engine::Epoll(epoll) => epoll.send(&mut self.core, socket, segments),
        }
    }

    /// Shut the socket down and end what is under way on it; [`Event::Closed`] comes last. Nothing may be
    /// asked of it from here on. Closing it again does nothing.
    pub fn close(&mut self, socket: SocketId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.close(&mut self.core, socket),
            Engine::Epoll(epoll) => epoll.close(&mut self.core, socket),
        }
    }
}

impl Drop for KernelRing {
    fn drop(&mut self) {
        let drained = match &mut *self.engine {
            Engine::Uring(uring) => uring.drain(&mut self.core),
            // Its threads finish what they have begun when it is dropped.
            Engine::Epoll(_) => true,
        };
        if drained {
            // SAFETY: neither is used again. The engine goes first: then nobody writes to the memory.
            unsafe {
                ManuallyDrop::drop(&mut self.engine);
                ManuallyDrop::drop(&mut self.core);
            }
        }
        // Otherwise both are leaked: a kernel worker may yet write to the memory.
    }
}

impl Ring for KernelRing {
    #[inline]
    fn now(&self) -> Nanos {
        self.core.now
    }

    #[inline]
    fn allocate(&mut self, len: u32) -> Option<Segment> {
        self.core.memory.allocate(len)
    }

    #[inline]
    fn free(&mut self, segment: Segment) {
        self.core.memory.free(segment);
    }

    #[inline]
    #[track_caller]
    fn bytes(&self, segment: Segment) -> &[u8] {
        self.core.memory.bytes(segment)
    }

    #[inline]
    #[track_caller]
    fn bytes_mut(&mut self, segment: Segment) -> &mut [u8] {
        self.core.memory.bytes_mut(segment)
    }

    #[inline]
    fn is_opaque(&self, segment: Segment) -> bool {
        self.core.memory.is_opaque(segment.region)
    }

    #[inline]
    fn try_now(&mut self, file: FileId, op: FileOp, data: &[Segment], patience: Patience) -> Option<i64> {
        let core = &mut *self.core;
        core.files.try_now(&core.memory, file, op, data, patience)
    }

    #[inline]
    fn start(&mut self, id: IoId, file: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull> {
        self.start_op(Origin::Node(id), file, op, data)
    }

    #[inline]
    fn timer(&mut self, id: IoId, at: Nanos) {
        self.core.timers.set(id, at);
    }

    fn cancel(&mut self, id: IoId) {
        let core = &mut *self.core;
        if core.timers.cancel(id) {
            core.io_event(id, -i64::from(libc::ECANCELED));
        } else if let Some(slot) = core.ops.find(Origin::Node(id)) {
            match &mut *self.engine {
                Engine::Uring(uring) => uring.cancel_op(slot),
                Engine::Epoll(epoll) => epoll.cancel_op(core, slot),
            }
        }
    }
}
