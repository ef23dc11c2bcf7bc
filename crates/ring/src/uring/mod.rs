//! The io_uring engine: all operations gathered in a turn are submitted by one call, which also waits. Owned
//! by a ring; only the thread that created it may use it.
//!
//! *Invariant:* every submitted entry except cancellations has one last completion; `in_flight` counts those
//! outstanding. Memory that entries refer to is released only when it is 0.

mod buffers;
mod edges;
mod numbers;
mod setup;
mod sockets;
mod table;

use crate::config::{Chunk, Event, RingConfig, SocketId, Token, WideCommand};
use crate::core::Core;
use crate::files::File;
use crate::memory::REGISTERED;
use crate::ops::Origin;
use crate::sockets::Sockets;
use crate::sys::{self, Mapping};
use block::{Region, Segment};
use buffers::Buffers;
use edges::Edges;
use io_uring::squeue::Entry128;
use io_uring::{cqueue, opcode, squeue, types};
use numbers::Numbers;
use queue::{FileId, FileOp, RingFull};
use setup::{Fixed, WideRing};
use sockets::Socket;
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use table::Table;

/// Kind of a completion: the top byte of its user data. The rest is a slot, a socket or a token.
mod kind {
    pub(super) const FILE: u64 = 1 << 56;
    pub(super) const RECEIVE: u64 = 2 << 56;
    pub(super) const FILL: u64 = 3 << 56;
    pub(super) const SEND: u64 = 4 << 56;
    pub(super) const WAKE: u64 = 5 << 56;
    pub(super) const CANCEL: u64 = 6 << 56;
    /// The rest is a front-end's token.
    pub(super) const COMMAND: u64 = 7 << 56;
    /// A watch that ends with its first event; the rest is a front-end's token.
    pub(super) const WATCH: u64 = 8 << 56;
    /// A command that is answered with numbers; the rest is a front-end's token.
    pub(super) const NUMBERS: u64 = 9 << 56;
    /// A persistent watch; the rest is the number of the watch.
    pub(super) const EDGES: u64 = 10 << 56;
    pub(super) const MASK: u64 = 0xff << 56;
}

/// `IORING_ENTER_GETEVENTS` and `IORING_ENTER_EXT_ARG`.
const GET_EVENTS: u32 = 1;
const EXT_ARG: u32 = 8;

/// Offset of `len` in `struct io_uring_sqe`, in bytes.
const SQE_LEN_AT: usize = 24;

/// How long a dropped ring waits for the kernel to release its memory, before it leaks it instead.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// File operations submitted per system call. Of 1000, 16, 8 and 4, the values 8 and 4 were fastest for
/// random direct reads of 4 KiB with 32 in flight (`./x bench file`: a fifth more than all at once).
const GROUP: u32 = 8;

/// Interval at which the drain is polled, in nanoseconds: 10 ms.
const DRAIN_STEP_NS: u64 = 10_000_000;

/// `struct io_uring_getevents_arg`.
#[repr(C)]
struct WaitArgument {
    signals: u64,
    signals_len: u32,
    min_wait_us: u32,
    timeout: u64,
}

impl WaitArgument {
    /// Waits at most for `time`, which must live until the call with this argument has returned.
    ///
    /// The structure holds the address as a number, so the address is exposed: with its bare value alone, the
    /// compiler may assume that nobody reads `time`, and leave out the stores to it.
    fn until(time: &types::Timespec) -> WaitArgument {
        let timeout = std::ptr::from_ref(time).expose_provenance() as u64;
        WaitArgument { signals: 0, signals_len: 0, min_wait_us: 0, timeout }
    }
}

/// A file or socket as an entry names it: by descriptor or by index of a registered file.
#[derive(Clone, Copy)]
struct Target {
    number: i32,
    fixed: bool,
}

impl Target {
    fn new(fd: i32, fixed: Option<u32>) -> Target {
        Target { number: fixed.map_or(fd, |number| number as i32), fixed: fixed.is_some() }
    }

    fn fd(self) -> types::Fd {
        types::Fd(self.number)
    }

    /// Makes an entry built with [`fd`](Target::fd) refer to this target.
    #[inline]
    fn aim(self, entry: squeue::Entry) -> squeue::Entry {
        if self.fixed { entry.flags(squeue::Flags::FIXED_FILE) } else { entry }
    }
}

/// The engine.
pub(crate) struct Uring {
    /// First, so that it is dropped before the memory that it refers to.
    ring: WideRing,
    buffers: Buffers,
    /// Created with the first command that is answered with numbers.
    numbers: Option<Numbers>,
    /// Files with a persistent watch.
    edges: Edges,
    fixed: Fixed,
    table: Table,
    /// Index of the arena's registered buffer, while it is registered.
    registered_number: Option<u16>,
    /// Users of the registered memory.
    registered_users: u32,
    sockets: Sockets<Socket>,
    /// Sockets that found no chunk to receive into.
    starved: VecDeque<SocketId>,
    /// Entries for which the submission queue had no space.
    waiting: VecDeque<Entry128>,
    in_flight: usize,
    /// Operations on files that were queued since the submission queue was last empty.
    files_queued: u32,
    /// The ring is being dropped: nothing is started any more.
    draining: bool,
}

impl Uring {
    pub(crate) fn new(config: &RingConfig, core: &mut Core) -> io::Result<(Uring, Option<String>)> {
        let (ring, lacks) = setup::build(config.entries)?;
        let buffers = Buffers::new(&ring, &core.chunks, &core.memory)?;
        let fixed = Fixed::new(&ring);
        let mut this = Uring {
            ring,
            buffers,
            numbers: None,
            edges: Edges::default(),
            fixed,
            table: Table::default(),
            registered_number: None,
            registered_users: 0,
            sockets: Sockets::default(),
            starved: VecDeque::new(),
            waiting: VecDeque::new(),
            in_flight: 0,
            files_queued: 0,
            draining: false,
        };
        this.watch_waker(core);
        Ok((this, lacks))
    }

    fn watch_waker(&mut self, core: &Core) {
        let fd = types::Fd(core.waker.fd());
        // Edge-triggered, so that nobody has to read the eventfd's count.
        let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
        self.push(opcode::PollAdd::new(fd, events).multi(true).build().user_data(kind::WAKE));
    }

    /// Queues an entry whose last completion is counted.
    #[inline]
    fn push(&mut self, entry: impl Into<Entry128>) {
        self.in_flight += 1;
        self.push_uncounted(entry);
    }

    #[inline]
    fn push_uncounted(&mut self, entry: impl Into<Entry128>) {
        let entry = entry.into();
        // SAFETY: everything that an entry refers to (arena, slots, boxed sockets) stays until its last
        // completion; see `in_flight`.
        if !self.waiting.is_empty() || unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.push_slowly(entry);
        }
    }

    #[cold]
    fn push_slowly(&mut self, entry: Entry128) {
        self.waiting.push_back(entry);
        // An error shows in the next turn.
        let _ = self.ring.submit();
        self.push_waiting();
    }

    fn push_waiting(&mut self) {
        while let Some(entry) = self.waiting.front() {
            // SAFETY: as in `push_uncounted`.
            if unsafe { self.ring.submission().push(entry) }.is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    /// Cancels the operation with this user data. Only a failure would be reported, and none matters: the
    /// operation has completed already, or cannot be stopped; its completion arrives either way.
    fn push_cancel(&mut self, user_data: u64) {
        let entry = opcode::AsyncCancel::new(user_data).build();
        self.push_uncounted(entry.user_data(kind::CANCEL).flags(squeue::Flags::SKIP_SUCCESS));
    }

    pub(crate) fn add_file(&mut self, fd: &Arc<OwnedFd>) -> Option<u32> {
        self.fixed.add(&self.ring, fd.as_raw_fd())
    }

    pub(crate) fn drop_file(&mut self, file: File) {
        if file.is_signalled() {
            self.submit_all();
        }
        if let Some(number) = file.fixed {
            self.fixed.remove(&self.ring, number);
        }
        drop(file.into_fd());
    }

    /// Registers memory with the kernel for allocations. A ring has a single such buffer: it is pinned from
    /// the first user to the last.
    pub(crate) fn register_memory(&mut self, core: &mut Core) -> io::Result<()> {
        if self.registered_users == 0 && self.registered_number.is_none() {
            self.pin_memory(core)?;
        }
        self.registered_users += 1;
        Ok(())
    }

    fn pin_memory(&mut self, core: &mut Core) -> io::Result<()> {
        let fresh = match core.memory.registered_base() {
            Some(_) => None,
            None => Some(Mapping::new(REGISTERED)?),
        };
        let base = fresh.as_ref().map(Mapping::base).or(core.memory.registered_base());
        let Some(base) = base else { return Ok(()) };
        let iovec = libc::iovec { iov_base: base.as_ptr().cast(), iov_len: REGISTERED };
        let number = self.table.take(&self.ring, 1)?;
        // SAFETY: the mapping belongs to the ring's memory, or is moved there below; that outlives the
        // io_uring.
        let updated = unsafe { self.ring.submitter().register_buffers_update(number.into(), &[iovec], None) };
        if let Err(error) = updated {
            self.table.give_back(number, 1);
            return Err(error);
        }
        match fresh {
            Some(mapping) => core.memory.serve_registered(mapping, number)?,
            None => core.memory.set_registered(Some(number)),
        }
        self.registered_number = Some(number);
        Ok(())
    }

    /// Drops one user of the registered memory. The last one unpins it, and it becomes ordinary memory.
    pub(crate) fn release_memory(&mut self, core: &mut Core) {
        self.registered_users = self.registered_users.saturating_sub(1);
        if self.registered_users > 0 {
            return;
        }
        // Entries refer to it by index, which the kernel resolves on submission: submit all of them first. If
        // the kernel does not accept them now, the memory stays pinned until the next user has gone.
        while !self.waiting.is_empty() || !self.ring.submission().is_empty() {
            if !self.ring.submit().is_ok_and(|taken| taken > 0) {
                return;
            }
            self.push_waiting();
        }
        let Some(number) = self.registered_number else { return };
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty entry refers to no memory. Operations in flight keep the old buffer pinned.
        let updated = unsafe { self.ring.submitter().register_buffers_update(number.into(), &[empty], None) };
        if updated.is_ok() {
            self.registered_number = None;
            core.memory.set_registered(None);
            self.table.give_back(number, 1);
        }
    }

    #[inline]
    pub(crate) fn start(
        &mut self,
        core: &mut Core,
        id: Origin,
        file: FileId,
        op: FileOp,
        data: &[Segment],
    ) -> Result<(), RingFull> {
        core.started += 1;
        let slot = core.ops.begin(id, file, core.started).ok_or(RingFull)?;
        let (fd, fixed) = core.files.begin(file);
        // A character device may need the caller's memory itself, which a registered buffer hides.
        let by_address = matches!(id, Origin::Front(_));
        let target = Target::new(fd, fixed);
        let fd = target.fd();
        let entry = match op {
            FileOp::Read { offset } => match data {
                [one] => match core.memory.pointer_and_fixed(*one) {
                    (base, Some(n)) if !by_address => {
                        opcode::ReadFixed::new(fd, base, one.len, n).offset(offset).build()
                    }
                    (base, _) => opcode::Read::new(fd, base, one.len).offset(offset).build(),
                },
                _ => {
                    let list = core.ops.iovecs(slot);
                    core.memory.gather(data, list);
                    opcode::Readv::new(fd, list.as_ptr(), list.len() as u32).offset(offset).build()
                }
            },
            FileOp::Write { offset, durable } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                match data {
                    [one] => match core.memory.pointer_and_fixed(*one) {
                        (base, Some(n)) if !by_address => opcode::WriteFixed::new(fd, base, one.len, n)
                            .offset(offset)
                            .rw_flags(flags)
                            .build(),
                        (base, _) => {
                            opcode::Write::new(fd, base, one.len).offset(offset).rw_flags(flags).build()
                        }
                    },
                    _ => {
                        let list = core.ops.iovecs(slot);
                        core.memory.gather(data, list);
                        let entry = opcode::Writev::new(fd, list.as_ptr(), list.len() as u32);
                        entry.offset(offset).rw_flags(flags).build()
                    }
                }
            }
            FileOp::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            FileOp::Allocate { mode, offset, len } => {
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
            FileOp::Prefetch { offset, len } => {
                opcode::Fadvise::new(fd, len as i64, libc::POSIX_FADV_WILLNEED).offset(offset).build()
            }
            // io_uring has no such operation; the `Ring` trait requires it inline only.
            FileOp::Seek { .. } => {
                let file = core.op_ended(slot, -i64::from(libc::EINVAL));
                file.into_iter().for_each(|file| self.drop_file(file));
                return Ok(());
            }
        };
        self.push(target.aim(entry).user_data(kind::FILE | u64::from(slot)));
        self.files_queued += 1;
        Ok(())
    }

    /// Reserves entries for the memory of a driver's requests.
    pub(crate) fn add_kernel_buffers(&mut self, core: &mut Core, count: u16) -> io::Result<(Region, u16)> {
        let first = self.table.take(&self.ring, count)?;
        Ok((core.memory.add_kernel(first, count)?, first))
    }

    pub(crate) fn kernel_buffers_left(&self) -> Vec<u16> {
        self.table.stretches()
    }

    pub(crate) fn remove_kernel_buffers(&mut self, core: &mut Core, region: Region) {
        let (first, count) = core.memory.remove_kernel(region);
        self.table.give_back(first, count);
    }

    /// Sends a command to a driver. It needs no slot, so there is no limit.
    #[inline]
    pub(crate) fn command(
        &mut self,
        core: &Core,
        token: Token,
        file: FileId,
        op: u32,
        argument: [u8; 16],
        address: u64,
    ) {
        let (fd, fixed) = core.files.target(file);
        let target = Target::new(fd, fixed);
        let entry = opcode::UringCmd16::new(target.fd(), op).cmd(argument).addr(Some(address)).build();
        self.push(target.aim(entry).user_data(kind::COMMAND | token.bits()));
    }

    /// Sends a command with a longer argument, in a wide entry.
    pub(crate) fn command_wide(&mut self, core: &Core, token: Token, file: FileId, command: &WideCommand) {
        let (fd, fixed) = core.files.target(file);
        let target = Target::new(fd, fixed);
        let mut argument = [0; 80];
        argument[..command.argument.len()].copy_from_slice(&command.argument);
        let built = match fixed {
            Some(number) => opcode::UringCmd80::new(types::Fixed(number), command.op),
            None => opcode::UringCmd80::new(target.fd(), command.op),
        };
        let mut entry =
            built.cmd(argument).addr(Some(command.address)).build().user_data(kind::COMMAND | token.bits());
        // SAFETY: an entry is exactly the kernel's `struct io_uring_sqe`, with the u32 `len` at byte 24. The
        // builder cannot set it for a command.
        unsafe { (&raw mut entry).cast::<u32>().add(SQE_LEN_AT / 4).write(command.len) };
        self.push(entry);
    }

    pub(crate) fn cancel_command(&mut self, token: Token) {
        self.push_cancel(kind::COMMAND | token.bits());
    }

    /// Waits once until a file is readable.
    pub(crate) fn watch(&mut self, core: &Core, token: Token, file: FileId) {
        let (fd, fixed) = core.files.target(file);
        let target = Target::new(fd, fixed);
        // Exclusive: of several threads that wait for one file, only one is woken.
        let events = (libc::EPOLLIN | libc::EPOLLEXCLUSIVE) as u32;
        let entry = opcode::PollAdd::new(target.fd(), events).build();
        self.push(target.aim(entry).user_data(kind::WATCH | token.bits()));
    }

    pub(crate) fn watch_end(&mut self, token: Token) {
        self.push_cancel(kind::WATCH | token.bits());
    }

    pub(crate) fn cancel_op(&mut self, slot: u32) {
        self.push_cancel(kind::FILE | u64::from(slot));
    }

    /// Submits gathered entries, waits if `wait` and no event is pending, and collects completions.
    pub(crate) fn turn(&mut self, core: &mut Core, wait: bool) -> io::Result<()> {
        self.feed_starved(core);
        self.push_waiting();
        let mut sleep = wait && core.events.is_empty() && self.ring.completion().is_empty();
        let waits_from = (sleep && core.spin.is_enabled()).then(sys::now);
        if sleep && core.spin.budget() > 0 {
            sleep = !self.spin(core, core.spin.budget())?;
        }
        let (queued, flagged) = self.queued();
        if sleep || queued > 0 || flagged {
            let queued = self.hand_over_in_groups(queued)?;
            let limit = if sleep { core.sleep_max() } else { Some(0) };
            self.enter(queued, limit)?;
        }
        if let Some(from) = waits_from {
            core.spin.learn(sys::now().since(from));
        }
        self.reap(core);
        Ok(())
    }

    /// Entries not yet submitted, and whether the kernel has completions that only a call delivers.
    fn queued(&mut self) -> (u32, bool) {
        let queue = self.ring.submission();
        (queue.len() as u32, queue.taskrun() || queue.cq_overflow())
    }

    /// Submits all but the last [`GROUP`] of `queued` entries in groups, when that many are operations on
    /// files. Returns how many are left. The kernel plugs the requests of one system call: a disk gets none
    /// of a batch before the whole batch is prepared, and idles until then.
    #[inline]
    fn hand_over_in_groups(&mut self, mut queued: u32) -> io::Result<u32> {
        if std::mem::take(&mut self.files_queued) <= GROUP {
            return Ok(queued);
        }
        while queued > GROUP {
            self.enter(GROUP, Some(0))?;
            queued -= GROUP;
        }
        // Counted anew: the kernel may have been too busy to take one of the groups.
        Ok(self.queued().0)
    }

    /// Polls for completions without sleeping. Returns whether there are any.
    fn spin(&mut self, core: &mut Core, budget_ns: u64) -> io::Result<bool> {
        let (queued, _) = self.queued();
        if queued > 0 {
            let queued = self.hand_over_in_groups(queued)?;
            self.enter(queued, Some(0))?;
        }
        let budget_ns = core.sleep_max().map_or(budget_ns, |timer_ns| timer_ns.min(budget_ns));
        let start = sys::now();
        loop {
            for _ in 0..16 {
                if !self.ring.completion().is_empty() || self.queued().1 {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if sys::now().since(start) >= budget_ns {
                return Ok(false);
            }
        }
    }

    /// One call: submits `queued` entries, and waits at most `limit` nanoseconds for a completion.
    fn enter(&mut self, queued: u32, limit: Option<u64>) -> io::Result<()> {
        let want = u32::from(limit != Some(0));
        let submitter = self.ring.submitter();
        let result = match limit {
            Some(ns) if ns > 0 => {
                let time = types::Timespec::new().sec(ns / 1_000_000_000).nsec((ns % 1_000_000_000) as u32);
                let argument = WaitArgument::until(&time);
                // SAFETY: the kernel reads the argument and, through the address in it, `time`. Both are
                // locals of this block, initialized, and live until the call has returned. `until` exposed
                // the address of `time`, so the compiler knows that the call may read it.
                unsafe { submitter.enter(queued, want, GET_EVENTS | EXT_ARG, Some(&argument)) }
            }
            // SAFETY: no argument.
            _ => unsafe { submitter.enter::<libc::sigset_t>(queued, want, GET_EVENTS, None) },
        };
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) => Ok(()),
            // The timeout, a signal, or completions that must be collected before more entries are accepted.
            Err((Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY), _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    fn reap(&mut self, core: &mut Core) {
        let mut room = [const { MaybeUninit::<cqueue::Entry>::uninit() }; 64];
        loop {
            let entries = self.ring.completion().fill(&mut room);
            for entry in entries.iter() {
                self.completed(core, entry.user_data(), entry.result(), entry.flags());
            }
            if entries.len() < 64 {
                return;
            }
        }
    }

    #[inline]
    fn completed(&mut self, core: &mut Core, user_data: u64, result: i32, flags: u32) {
        let more = cqueue::more(flags);
        let what = user_data & kind::MASK;
        if !more && what != kind::CANCEL {
            self.in_flight -= 1;
        }
        let number = user_data as u32;
        match what {
            kind::FILE => {
                // A cancelled worker reports EINTR.
                let result = if result == -libc::EINTR { -libc::ECANCELED } else { result };
                if let Some(file) = core.op_ended(number, result.into()) {
                    self.drop_file(file);
                }
            }
            kind::COMMAND | kind::WATCH => {
                let token = Token::from_bits(user_data);
                core.events.push_back(Event::Ended { token, result: result.into() });
            }
            kind::EDGES => self.edge(core, number, result, more),
            kind::NUMBERS => self.numbered(core, Token::from_bits(user_data), result, flags),
            kind::RECEIVE => self.received(core, SocketId(number), result, flags),
            kind::FILL => self.filled(core, SocketId(number), result),
            kind::SEND => self.sent(core, SocketId(number), result),
            kind::WAKE => {
                core.take_woken();
                if !more && !self.draining {
                    self.watch_waker(core);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn give_back(&mut self, core: &Core, chunk: Chunk) {
        self.buffers.give(chunk, &core.chunks, &core.memory);
    }

    /// Number of the oldest operation or send in flight.
    pub(crate) fn oldest(&mut self, core: &Core) -> u64 {
        let sends = self.sockets.iter_mut().filter_map(|(_, socket)| socket.sending.started);
        sends.min().unwrap_or(u64::MAX).min(core.ops.oldest())
    }

    pub(crate) fn sockets_live(&self) -> usize {
        self.sockets.live()
    }

    /// Cancels all operations and waits for them. `false`: the kernel has not released our memory in time.
    pub(crate) fn drain(&mut self, core: &mut Core) -> bool {
        self.draining = true;
        self.sockets.iter_mut().for_each(|(_, socket)| socket.shut_down());
        self.push_waiting();
        let deadline = Instant::now() + DRAIN_MAX;
        while self.in_flight > 0 {
            let entry =
                opcode::AsyncCancel2::new(types::CancelBuilder::any().all()).build().user_data(kind::CANCEL);
            self.push_uncounted(entry);
            let (queued, _) = self.queued();
            core.events.clear();
            if self.enter(queued, Some(DRAIN_STEP_NS)).is_err() || Instant::now() > deadline {
                return false;
            }
            self.reap(core);
        }
        true
    }
}
