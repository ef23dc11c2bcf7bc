//! The epoll engine, used where io_uring is not available: sockets by epoll, files by a few threads. Sockets
//! are tried first and watched edge-triggered, so a request costs one `recv`, one `sendmsg` and one
//! `epoll_wait`.
//!
//! Owned by a ring, on its thread.

mod sockets;
mod workers;

use crate::config::{Event, SocketId, Token};
use crate::core::Core;
use crate::ops::Origin;
use crate::sockets::Sockets;
use crate::sys;
use crate::waker::WORKED;
use block::Segment;
use queue::{FileId, FileOp, RingFull};
use sockets::Socket;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use workers::Workers;

/// Most events fetched per call.
const BATCH: usize = 64;
/// `epoll` data of the waker; the ids of sockets are smaller.
const WAKER: u64 = u64::MAX;
/// Marks the `epoll` data of a watched file; the rest is a front-end's token.
const WATCH: u64 = 1 << 62;
/// Marks the `epoll` data of a file with a persistent watch; the rest is a front-end's token.
const EDGES: u64 = 1 << 61;
/// Turns without a system call while events or ready sockets are pending, before the kernel is polled again.
const TURNS_WITHOUT_POLL: u32 = 1;

/// The engine.
pub(crate) struct Epoll {
    fd: OwnedFd,
    sockets: Sockets<Socket>,
    /// Sockets that are ready for receiving.
    ready: VecDeque<SocketId>,
    /// Sockets that are ready but found no chunk.
    starved: VecDeque<SocketId>,
    /// Chunks available for receiving; last in, first out, because that one is in the cache.
    chunks: Vec<u16>,
    workers: Workers,
    /// Files with a watch that ends with its first event.
    watched: Vec<(Token, RawFd)>,
    /// Files with a persistent watch, from `watch_edges` to `watch_edges_end`.
    edges: Vec<(Token, RawFd, FileId)>,
    turns_without_poll: u32,
    /// The kernel supports `epoll_pwait2` (5.11).
    fine_timeouts: bool,
}

impl Epoll {
    pub(crate) fn new(core: &Core) -> io::Result<Epoll> {
        // SAFETY: takes no pointers.
        let fd = sys::owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        control(&fd, libc::EPOLL_CTL_ADD, core.waker.fd(), libc::EPOLLIN | libc::EPOLLET, WAKER)?;
        Ok(Epoll {
            fd,
            sockets: Sockets::default(),
            ready: VecDeque::new(),
            starved: VecDeque::new(),
            chunks: (0..core.chunks.count()).rev().collect(),
            workers: Workers::new(core.waker.clone()),
            watched: Vec::new(),
            edges: Vec::new(),
            turns_without_poll: 0,
            fine_timeouts: true,
        })
    }

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
        let (fd, _) = core.files.begin(file);
        if matches!(op, FileOp::Seek { .. }) {
            drop(core.op_ended(slot, -i64::from(libc::EINVAL)));
            return Ok(());
        }
        let list = core.ops.iovecs(slot);
        core.memory.gather(data, list);
        if self.workers.start(slot, fd, op, list).is_err() {
            drop(core.op_ended(slot, -i64::from(libc::EAGAIN)));
        }
        Ok(())
    }

    pub(crate) fn cancel_op(&mut self, core: &mut Core, slot: u32) {
        if self.workers.take_back(slot) {
            drop(core.op_ended(slot, -i64::from(libc::ECANCELED)));
        }
    }

    pub(crate) fn watch(&mut self, core: &mut Core, token: Token, file: FileId) {
        let (fd, _) = core.files.target(file);
        self.watched.push((token, fd));
        if control(&self.fd, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, WATCH | token.bits()).is_err() {
            // A file that epoll cannot watch is always readable.
            self.watch_over(core, token, i64::from(libc::EPOLLIN));
        }
    }

    pub(crate) fn watch_end(&mut self, core: &mut Core, token: Token) {
        self.watch_over(core, token, -i64::from(libc::ECANCELED));
    }

    pub(crate) fn watch_edges(&mut self, core: &mut Core, token: Token, file: FileId) {
        let (fd, _) = core.files.begin(file);
        self.edges.push((token, fd, file));
        let events = libc::EPOLLIN | libc::EPOLLET;
        if control(&self.fd, libc::EPOLL_CTL_ADD, fd, events, EDGES | token.bits()).is_err() {
            self.watch_edges_end(core, token);
        }
    }

    pub(crate) fn watch_edges_end(&mut self, core: &mut Core, token: Token) {
        let Some(position) = self.edges.iter().position(|(other, ..)| *other == token) else { return };
        let (_, fd, file) = self.edges.swap_remove(position);
        let _ = control(&self.fd, libc::EPOLL_CTL_DEL, fd, 0, 0);
        drop(core.files.end(file));
        core.events.push_back(Event::Ended { token, result: -i64::from(libc::ECANCELED) });
    }

    fn watch_over(&mut self, core: &mut Core, token: Token, result: i64) {
        let Some(position) = self.watched.iter().position(|(other, _)| *other == token) else { return };
        let (_, fd) = self.watched.swap_remove(position);
        // The file is not in the set if it could not be watched.
        let _ = control(&self.fd, libc::EPOLL_CTL_DEL, fd, 0, 0);
        core.events.push_back(Event::Ended { token, result });
    }

    pub(crate) fn turn(&mut self, core: &mut Core, wait: bool) -> io::Result<()> {
        if core.chunks.available > 0 {
            self.ready.append(&mut self.starved);
        }
        if core.waker.is_raised() {
            self.woken(core);
        }
        self.serve_ready(core);
        let at_hand = !core.events.is_empty() || !self.ready.is_empty();
        if at_hand && self.turns_without_poll < TURNS_WITHOUT_POLL {
            self.turns_without_poll += 1;
            return Ok(());
        }
        self.turns_without_poll = 0;
        if !wait || at_hand {
            self.poll(core, Some(0))?;
        } else {
            let waits_from = core.spin.is_enabled().then(sys::now);
            if !self.spin(core)? {
                let limit = core.sleep_max();
                self.poll(core, limit)?;
            }
            if let Some(from) = waits_from {
                core.spin.learn(sys::now().since(from));
            }
        }
        self.serve_ready(core);
        Ok(())
    }

    /// Polls for readiness without sleeping. Returns whether there were events.
    fn spin(&mut self, core: &mut Core) -> io::Result<bool> {
        let budget_ns = core.spin.budget();
        if budget_ns == 0 {
            return Ok(false);
        }
        let budget_ns = core.sleep_max().map_or(budget_ns, |timer_ns| timer_ns.min(budget_ns));
        let start = sys::now();
        loop {
            if self.poll(core, Some(0))? {
                return Ok(true);
            }
            if sys::now().since(start) >= budget_ns {
                return Ok(false);
            }
        }
    }

    /// Polls the kernel for readiness for at most `limit` nanoseconds. Returns whether there were events.
    fn poll(&mut self, core: &mut Core, limit: Option<u64>) -> io::Result<bool> {
        let mut batch = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let count = match self.wait(&mut batch, limit) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        for event in &batch[..count] {
            let (about, events) = (event.u64, event.events);
            match about {
                WAKER => self.woken(core),
                edge if edge & EDGES != 0 => {
                    let token = Token::from_bits(edge & !EDGES);
                    core.events.push_back(Event::Ended { token, result: events.into() });
                }
                watch if watch & WATCH != 0 => {
                    self.watch_over(core, Token::from_bits(watch & !WATCH), events.into());
                }
                id => self.became_ready(core, SocketId(id as u32), events),
            }
        }
        Ok(count > 0)
    }

    fn wait(&mut self, batch: &mut [libc::epoll_event; BATCH], limit: Option<u64>) -> io::Result<usize> {
        let fd = self.fd.as_raw_fd();
        if self.fine_timeouts && limit.is_some_and(|ns| ns > 0) {
            let ns = limit.unwrap_or(0);
            let timeout =
                libc::timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
            let no_signals = std::ptr::null::<libc::sigset_t>();
            // SAFETY: room for `BATCH` events and a time, both until the call returns; no signal set.
            let result = unsafe {
                let call = libc::SYS_epoll_pwait2;
                libc::syscall(call, fd, batch.as_mut_ptr(), BATCH, &raw const timeout, no_signals, 8usize)
            };
            match sys::signed(result as isize) {
                error if error == -i64::from(libc::ENOSYS) => self.fine_timeouts = false,
                error if error < 0 => return Err(io::Error::from_raw_os_error(-error as i32)),
                count => return Ok(count as usize),
            }
        }
        // Rounded up: waking before a timer is due would be useless.
        let timeout_ms = limit.map_or(-1, |ns| ns.div_ceil(1_000_000).min(i32::MAX as u64) as i32);
        // SAFETY: room for `BATCH` events until the call returns.
        let count =
            sys::check(unsafe { libc::epoll_wait(fd, batch.as_mut_ptr(), BATCH as i32, timeout_ms) })?;
        Ok(count as usize)
    }

    fn woken(&mut self, core: &mut Core) {
        if core.take_woken() & WORKED != 0 {
            for (slot, result) in self.workers.ended() {
                drop(core.op_ended(slot, result));
            }
        }
    }

    pub(crate) fn oldest(&mut self, core: &Core) -> u64 {
        let sends = self.sockets.iter_mut().filter_map(|(_, socket)| socket.sending.started);
        sends.min().unwrap_or(u64::MAX).min(core.ops.oldest())
    }

    pub(crate) fn sockets_live(&self) -> usize {
        self.sockets.live()
    }
}

fn control(epoll: &OwnedFd, what: libc::c_int, fd: RawFd, events: libc::c_int, data: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events: events as u32, u64: data };
    // SAFETY: an event to read from until the call returns.
    sys::check(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), what, fd, &mut event) }).map(drop)
}
