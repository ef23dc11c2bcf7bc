//! The ring: selects the engine, and dispatches each operation to it or to the shared state.

use crate::batch::LEN_MAX;
use crate::config::{Choice, Chunk, EngineInfo, Event, RingConfig, SocketId, Token, Wait, WideCommand};
use crate::core::Core;
use crate::epoll::Epoll;
use crate::memory::ForeignMemory;
use crate::ops::Origin;
use crate::sys::{self, Mapping};
use crate::uring::Uring;
use crate::waker::Waker;
use block::{Region, Segment};
use queue::{Blocking, FileId, FileOp, IoId, Nanos, Ring, RingFull};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Environment variable that selects the engine where the configuration does not: `io_uring` or `epoll`.
const ENGINE_VARIABLE: &str = "BLOCKYARD_RING";

enum Engine {
    Uring(Box<Uring>),
    Epoll(Box<Epoll>),
}

/// A thread's interface to the kernel.
pub struct KernelRing {
    engine: ManuallyDrop<Engine>,
    core: ManuallyDrop<Core>,
    info: EngineInfo,
    /// The last turn performed a batch and did not enter the engine.
    engine_skipped: bool,
}

impl std::fmt::Debug for KernelRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelRing").field("info", &self.info).finish_non_exhaustive()
    }
}

/// The engine to use, from the configuration or the environment, and the reason for it.
fn choice(config: Choice) -> io::Result<(Choice, Option<String>)> {
    if config != Choice::Auto {
        let why = (config == Choice::Epoll).then(|| "selected by the configuration".to_owned());
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
    /// Creates a ring on the thread that will use it.
    ///
    /// # Errors
    /// The requested engine is not available, with the reason; the receive buffers are invalid; the system
    /// has no descriptors or memory left.
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
        Ok(KernelRing {
            engine: ManuallyDrop::new(engine),
            core: ManuallyDrop::new(core),
            info,
            engine_skipped: false,
        })
    }

    /// The engine in use, and the reason for it.
    pub fn engine(&self) -> &EngineInfo {
        &self.info
    }

    /// The handle that other threads wake the ring with.
    pub fn waker(&self) -> Waker {
        self.core.waker.clone()
    }

    /// Reads the clock: [`now`](Ring::now) returns this time until the next call.
    #[inline]
    pub fn read_clock(&mut self) -> Nanos {
        let core = &mut *self.core;
        core.now = sys::now();
        if let Some(batch) = core.batching.look(core.now) {
            sys::schedule_as_batch(batch);
        }
        core.now
    }

    /// Submits gathered operations, waits if `wait` says so and no event is pending, and collects
    /// completions. It may return without an event. With io_uring this is at most one system call. Once no
    /// large block has been freed for 0.1 s, free memory is returned to the system.
    ///
    /// # Errors
    /// The system call itself failed. The ring cannot be used any more.
    #[inline]
    pub fn turn(&mut self, wait: Wait) -> io::Result<()> {
        self.core.expire_timers();
        self.core.batch.end_turn();
        let batched = !self.core.batch.is_empty();
        if batched {
            self.run_batch();
        }
        // Replies to the batch and queued operations are submitted together by the next turn.
        self.engine_skipped = batched && !self.engine_skipped;
        if self.engine_skipped {
            return Ok(());
        }
        let core = &mut *self.core;
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

    /// Adds an operation to the batch. Returns `false` if it cannot be batched.
    fn batch(&mut self, id: IoId, file: FileId, op: FileOp, segment: Segment, blocking: Blocking) -> bool {
        if !self.core.batch.prepare() {
            return false;
        }
        if self.core.batch.is_full() {
            self.run_batch();
        }
        let core = &mut *self.core;
        core.started += 1;
        let Some(slot) = core.ops.begin(Origin::Node(id), file, core.started) else { return false };
        let (fd, _) = core.files.begin(file);
        let memory = (core.memory.pointer(segment), segment.len);
        core.batch.push(slot, fd, op, memory, blocking);
        true
    }

    /// Performs the batched inline operations, and queues their completions.
    fn run_batch(&mut self) {
        self.core.batch.run();
        while let Some((slot, result)) = self.core.batch.result() {
            let Some(file) = self.core.op_ended(slot, result) else { continue };
            match &mut *self.engine {
                Engine::Uring(uring) => uring.drop_file(file),
                Engine::Epoll(_) => drop(file.into_fd()),
            }
        }
    }

    /// The next event, in order of arrival.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        self.core.events.pop_front()
    }

    #[cfg(test)]
    pub(crate) fn put_back(&mut self, event: Event) {
        self.core.events.push_front(event);
    }

    /// Registers a file. It stays open until [`remove_file`](KernelRing::remove_file) is called and its
    /// operations have completed.
    ///
    /// # Errors
    /// None at present: a full kernel table is worked around.
    pub fn add_file(&mut self, fd: Arc<OwnedFd>) -> io::Result<FileId> {
        let fixed = match &mut *self.engine {
            Engine::Uring(uring) => uring.add_file(&fd),
            Engine::Epoll(_) => None,
        };
        Ok(self.core.files.add(fd, fixed))
    }

    /// Adds a file without registering it, so that it is closed as soon as it is removed and its operations
    /// have completed. Before Linux 6.13, a registered file may stay open until all operations on any file
    /// that started before its removal have completed.
    pub fn add_unregistered_file(&mut self, fd: Arc<OwnedFd>) -> FileId {
        self.core.files.add(fd, None)
    }

    /// Removes a file. Operations in flight complete as usual.
    ///
    /// # Panics
    /// If it is not a file of this ring.
    pub fn remove_file(&mut self, file: FileId) {
        let Some(file) = self.core.files.remove(file) else { return };
        match &mut *self.engine {
            Engine::Uring(uring) => uring.drop_file(file),
            Engine::Epoll(_) => drop(file.into_fd()),
        }
    }

    /// Adds memory of another owner, so that sends and file operations can refer to it.
    ///
    /// # Panics
    /// With more than 65,536 regions.
    pub fn add_foreign(&mut self, memory: ForeignMemory) -> Region {
        self.core.memory.add_foreign(memory).expect("a ring holds at most 65,536 regions")
    }

    /// Adds memory of another owner that others write at any time, such as a guest's: file operations may
    /// refer to it, and it may be copied with [`copy_any`](KernelRing::copy_any), but its bytes are never
    /// accessed.
    ///
    /// # Errors
    /// There are too many regions.
    pub fn add_guest_memory(&mut self, memory: ForeignMemory) -> io::Result<Region> {
        self.core.memory.add_guest(memory)
    }

    /// Copies bytes between two segments of equal length, of memory of any kind that has an address; they may
    /// overlap.
    ///
    /// # Panics
    /// If their lengths differ, or one does not lie in memory with an address.
    #[inline]
    pub fn copy_any(&mut self, from: Segment, to: Segment) {
        self.core.memory.copy_any(from, to);
    }

    /// Appends the addresses of segments to a list, for libraries that move data themselves.
    ///
    /// # Panics
    /// If a segment is memory without an address ([`is_opaque`](Ring::is_opaque)).
    #[inline]
    pub fn addresses(&self, segments: impl Iterator<Item = Segment>, list: &mut Vec<libc::iovec>) {
        self.core.memory.append(segments, list);
    }

    /// Removes foreign memory. The memory is kept until all operations started before have completed; no new
    /// operation may refer to it.
    ///
    /// # Panics
    /// If the region was not added by [`add_foreign`](KernelRing::add_foreign) or
    /// [`add_guest_memory`](KernelRing::add_guest_memory).
    pub fn remove_region(&mut self, region: Region) {
        let started = self.core.started;
        self.core.memory.remove_foreign(region, started);
    }

    /// Adds an eventfd of another process, to be signalled with [`signal`](KernelRing::signal).
    ///
    /// # Errors
    /// As [`add_file`](KernelRing::add_file).
    pub fn add_event_file(&mut self, fd: Arc<OwnedFd>) -> io::Result<FileId> {
        let may_wait = !sys::is_nonblocking(std::os::fd::AsRawFd::as_raw_fd(&*fd));
        let file = self.add_file(fd)?;
        self.core.files.set_event(file, may_wait);
        Ok(file)
    }

    /// Adds 1 to an eventfd, with the operations of this turn. If the count would overflow, a worker of the
    /// kernel waits: only the owner of the eventfd is delayed.
    #[inline]
    pub fn signal(&mut self, file: FileId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.signal(&self.core, file),
            Engine::Epoll(_) => {
                let (fd, _) = self.core.files.target(file);
                if !self.core.files.may_wait(file) || sys::is_writable(fd) {
                    sys::eventfd_write(fd);
                }
            }
        }
    }

    /// Reports each time that a file becomes readable, or an eventfd is signalled, as [`Event::Ended`] with
    /// the `poll` events; the file need not be read. A file that is readable now is reported at once. The
    /// token must not be in use.
    pub fn watch_edges(&mut self, token: Token, file: FileId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.watch_edges(&mut self.core, token, file),
            Engine::Epoll(epoll) => epoll.watch_edges(&mut self.core, token, file),
        }
    }

    /// Requests the end of a watch of [`watch_edges`](KernelRing::watch_edges), whose last event is
    /// [`Event::Ended`] with `-ECANCELED`. The file may be removed at once.
    pub fn watch_edges_end(&mut self, token: Token) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.watch_edges_end(token),
            Engine::Epoll(epoll) => epoll.watch_edges_end(&mut self.core, token),
        }
    }

    /// Registers 2 MiB of memory with the kernel for direct I/O, from which [`allocate`](Ring::allocate) is
    /// served first. The memory stays pinned until [`release_memory`](KernelRing::release_memory) was called
    /// as often as this. No effect on epoll.
    ///
    /// # Errors
    /// The kernel refuses, usually because of RLIMIT_MEMLOCK; the ring works without, and there is nothing to
    /// release.
    pub fn register_memory(&mut self) -> io::Result<()> {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.register_memory(&mut self.core),
            Engine::Epoll(_) => Ok(()),
        }
    }

    /// Undoes one successful [`register_memory`](KernelRing::register_memory). The last call unpins the
    /// memory.
    pub fn release_memory(&mut self) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.release_memory(&mut self.core);
        }
    }

    /// Starts an operation on a file for a front-end. It completes as [`Event::Ended`] with the bytes moved
    /// or a negative errno. The memory must stay valid until then.
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

    /// Sends a command to the driver of a file (`IORING_OP_URING_CMD`). It completes as [`Event::Ended`] with
    /// the driver's result; on epoll, which has no such operation, with `-EOPNOTSUPP`. Memory and files that
    /// the command refers to must stay valid until then.
    #[inline]
    pub fn command(&mut self, token: Token, file: FileId, op: u32, argument: [u8; 16]) {
        self.command_at(token, file, op, argument, 0);
    }

    /// Sends a command as [`command`](KernelRing::command) does, with the `addr` field of the entry.
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

    /// Sends a command as [`command`](KernelRing::command) does, with address and length of the ring's own
    /// memory.
    pub fn command_from(&mut self, token: Token, file: FileId, op: u32, argument: [u8; 16], memory: Segment) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.command_from(&self.core, token, file, op, argument, memory),
            Engine::Epoll(_) => self.command_at(token, file, op, argument, 0),
        }
    }

    /// Sends a command that the driver answers repeatedly with 16-bit numbers (multishot, in buffers that
    /// this ring provides). Each number arrives as [`Event::Ended`] with result 0 and the number in place of
    /// the token's; the end of the command arrives with the original token, whose number must not be a
    /// possible answer: 0 or a negative errno. It may end at any time, for want of buffers with `-ENOBUFS`,
    /// and can then be sent again.
    pub fn command_numbers(&mut self, token: Token, file: FileId, op: u32, argument: [u8; 16]) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.command_numbers(&mut self.core, token, file, op, argument),
            Engine::Epoll(_) => self.command_at(token, file, op, argument, 0),
        }
    }

    /// Cancels a command of [`command_numbers`](KernelRing::command_numbers).
    pub fn cancel_numbers(&mut self, token: Token) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.cancel_numbers(token);
        }
    }

    /// Sends a command as [`command_at`](KernelRing::command_at) does, with a longer argument and the `len`
    /// field of the entry.
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

    /// Adds a region of private memory besides the arena of [`allocate`](Ring::allocate): address space is
    /// reserved, pages are allocated when they are written to. `len` is rounded up to whole pages.
    ///
    /// # Errors
    /// The address space cannot be reserved.
    pub fn add_memory(&mut self, len: u64) -> io::Result<Region> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mapping = Mapping::new(len.next_multiple_of(4096))?;
        // A single written byte must not allocate a huge page of 2 MiB.
        mapping.without_huge_pages();
        self.core.memory.add_own(mapping, None)
    }

    /// Adds the first `len` bytes of a file as a region. Other processes may have it mapped and change it at
    /// any time, so file operations may refer to it but its bytes are never accessed here.
    ///
    /// # Errors
    /// The file cannot be mapped.
    pub fn add_shared_memory(&mut self, file: BorrowedFd<'_>, len: u64) -> io::Result<Region> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.core.memory.add_shared(Mapping::of_file(file, len)?)
    }

    /// Removes a region of private or shared memory. No operation may be in flight on it.
    ///
    /// # Panics
    /// If the region was not added by [`add_memory`](KernelRing::add_memory) or
    /// [`add_shared_memory`](KernelRing::add_shared_memory).
    pub fn remove_memory(&mut self, region: Region) {
        self.core.memory.remove_own(region);
    }

    /// Address of a segment, to be passed to a driver.
    ///
    /// # Panics
    /// If it is not within a region, or only the kernel can access the region.
    #[inline]
    pub fn address(&self, segment: Segment) -> u64 {
        self.core.memory.pointer(segment).addr() as u64
    }

    /// Reserves entries of the io_uring's buffer table, in which a driver registers the memory of its
    /// requests so that file operations can refer to it. Returns a region, in which entry `n` starts at byte
    /// `n <<` [`KERNEL_BUFFER_SHIFT`](crate::KERNEL_BUFFER_SHIFT), and the index of its first entry in the
    /// table. Only the kernel can access such memory.
    ///
    /// # Errors
    /// The kernel has no such table, or it is full.
    pub fn add_kernel_buffers(&mut self, count: u16) -> io::Result<(Region, u16)> {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.add_kernel_buffers(&mut self.core, count),
            Engine::Epoll(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Returns the length of each contiguous range of free entries, in order. A region is taken from the
    /// first range that is long enough.
    pub fn kernel_buffers_left(&self) -> Vec<u16> {
        match &*self.engine {
            Engine::Uring(uring) => uring.kernel_buffers_left(),
            Engine::Epoll(_) => Vec::new(),
        }
    }

    /// Releases a region of kernel buffers. Its entries must be empty, with no operation in flight on them.
    ///
    /// # Panics
    /// If the region was not added by [`add_kernel_buffers`](KernelRing::add_kernel_buffers).
    pub fn remove_kernel_buffers(&mut self, region: Region) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.remove_kernel_buffers(&mut self.core, region);
        }
    }

    /// Cancels a command that its driver may hold indefinitely. It still completes once, with the driver's
    /// result.
    pub fn cancel_command(&mut self, token: Token) {
        if let Engine::Uring(uring) = &mut *self.engine {
            uring.cancel_command(token);
        }
    }

    /// Reports once when a file is readable or has failed, as [`Event::Ended`] with the `poll` events. Of
    /// several rings that watch one file, possibly only one is notified. A token that is watching must not
    /// watch again before its event.
    pub fn watch(&mut self, token: Token, file: FileId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.watch(&self.core, token, file),
            Engine::Epoll(epoll) => epoll.watch(&mut self.core, token, file),
        }
    }

    /// Requests the end of a watch of [`watch`](KernelRing::watch). If its event has not arrived yet, it
    /// arrives once, with readiness or `-ECANCELED`.
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

    /// Allocates as [`allocate`](Ring::allocate) does, for data that arrives in parts. Also returns whether
    /// the segment already has pages; otherwise they are allocated when bytes are written.
    pub fn reserve(&mut self, len: u32) -> Option<(Segment, bool)> {
        self.core.memory.reserve(len)
    }

    /// Returns the whole pages of an arena segment to the system; they read as zeroes then. The segment stays
    /// allocated.
    ///
    /// # Panics
    /// If it is not within the ring's private memory.
    pub fn discard(&mut self, segment: Segment) {
        self.core.memory.discard(segment);
    }

    /// Copies bytes between two segments of private memory of equal length; they may overlap.
    ///
    /// # Panics
    /// If their lengths differ, or one is not private memory.
    #[inline]
    pub fn copy(&mut self, from: Segment, to: Segment) {
        self.core.memory.copy(from, to);
    }

    /// The bytes of two segments of private memory, the second mutably.
    ///
    /// # Panics
    /// If they overlap, or one is not private memory.
    pub fn bytes_of_two(&mut self, first: Segment, second: Segment) -> (&[u8], &mut [u8]) {
        self.core.memory.bytes_of_two(first, second)
    }

    /// Adds a connected stream socket. `owner` is repeated in its events.
    ///
    /// # Errors
    /// The engine cannot wait for it, or there are too many sockets.
    pub fn add_socket(&mut self, fd: OwnedFd, owner: u32) -> io::Result<SocketId> {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.add_socket(fd, owner),
            Engine::Epoll(epoll) => epoll.add_socket(fd, owner),
        }
    }

    /// Number of sockets.
    pub fn sockets(&self) -> usize {
        match &*self.engine {
            Engine::Uring(uring) => uring.sockets_live(),
            Engine::Epoll(epoll) => epoll.sockets_live(),
        }
    }

    /// Receives into chunks until [`Event::ReceiveEnded`]. While no chunk is available, all sockets pause.
    ///
    /// # Panics
    /// If it is receiving already.
    #[track_caller]
    pub fn receive(&mut self, socket: SocketId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.receive(socket),
            Engine::Epoll(epoll) => epoll.receive(socket),
        }
    }

    /// Stops receiving. Chunks received before are still delivered, followed by [`Event::ReceiveEnded`]. No
    /// effect if it is not receiving.
    #[track_caller]
    pub fn receive_stop(&mut self, socket: SocketId) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.receive_stop(&mut self.core, socket),
            Engine::Epoll(epoll) => epoll.receive_stop(&mut self.core, socket),
        }
    }

    /// Receives until the segment is full, then [`Event::Filled`].
    ///
    /// # Panics
    /// If it is receiving already, or the segment is not private memory.
    #[track_caller]
    pub fn receive_into(&mut self, socket: SocketId, segment: Segment) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.receive_into(&mut self.core, socket, segment),
            Engine::Epoll(epoll) => epoll.receive_into(&mut self.core, socket, segment),
        }
    }

    /// Gives back a received chunk. Every chunk must be given back once, even those of closed sockets.
    ///
    /// # Panics
    /// If it was given back already.
    #[inline]
    pub fn give_back(&mut self, chunk: Chunk) {
        self.core.chunks.take_back(chunk);
        match &mut *self.engine {
            Engine::Uring(uring) => uring.give_back(&self.core, chunk),
            Engine::Epoll(epoll) => epoll.give_back(chunk),
        }
    }

    /// Sends all segments in order, then [`Event::Sent`]. The memory must not change until then.
    ///
    /// # Panics
    /// If a send is in flight on this socket, there are more than 1024 segments, or one refers to no memory.
    #[inline]
    #[track_caller]
    pub fn send(&mut self, socket: SocketId, segments: &[Segment]) {
        match &mut *self.engine {
            Engine::Uring(uring) => uring.send(&mut self.core, socket, segments),
            Engine::Epoll(epoll) => epoll.send(&mut self.core, socket, segments),
        }
    }

    /// Shuts the socket down and ends its operations; [`Event::Closed`] is its last event. The socket must
    /// not be used any more, except that closing it again has no effect.
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
            // Dropping the engine waits for operations that its threads have started.
            Engine::Epoll(_) => true,
        };
        if drained {
            // SAFETY: neither is used again. The engine is dropped first: after that nobody writes to the
            // memory.
            unsafe {
                ManuallyDrop::drop(&mut self.engine);
                ManuallyDrop::drop(&mut self.core);
            }
        }
        // Otherwise both are leaked: a kernel worker may still write to the memory.
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
    fn clear(&mut self, segment: Segment) -> bool {
        let has_address = !self.core.memory.is_kernel(segment.region);
        if has_address {
            self.core.memory.clear_any(segment);
        }
        has_address
    }

    #[inline]
    fn try_now(&mut self, file: FileId, op: FileOp, data: &[Segment], blocking: Blocking) -> Option<i64> {
        let core = &mut *self.core;
        core.files.try_now(&core.memory, file, op, data, blocking)
    }

    #[inline]
    fn try_batched(
        &mut self,
        id: IoId,
        file: FileId,
        op: FileOp,
        data: &[Segment],
        blocking: Blocking,
    ) -> bool {
        let &[segment] = data else { return false };
        if segment.len > LEN_MAX || !self.core.batch.admits() || self.core.memory.is_kernel(segment.region) {
            return false;
        }
        self.batch(id, file, op, segment, blocking)
    }

    fn batch_ns(&self) -> u64 {
        self.core.batch.took_ns()
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
        } else if let Some(slot) = core.ops.find(Origin::Node(id)).filter(|slot| !core.batch.contains(*slot))
        {
            match &mut *self.engine {
                Engine::Uring(uring) => uring.cancel_op(slot),
                Engine::Epoll(epoll) => epoll.cancel_op(core, slot),
            }
        }
    }
}
