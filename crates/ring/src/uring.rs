use crate::memory::{Memory, map};
use crate::*;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};

const IO: u64 = 1;
const RECV: u64 = 2;
const FILL: u64 = 3;
const SEND: u64 = 4;
const WAKE: u64 = 5;
const IGNORE: u64 = 6;
const KIND: u32 = 60;
const GROUP: u16 = 0;

struct Socket {
    fd: OwnedFd,
    owner: u32,
    receiving: bool,
    stopping: bool,
    starved: bool,
    filling: Option<(Segment, u32)>,
    iov: Vec<libc::iovec>,
    msg: Box<libc::msghdr>,
    sent: u64,
    total: u64,
    iov_at: usize,
    sending: bool,
    closing: bool,
}
impl Socket {
    fn pending(&self) -> bool {
        (self.receiving && !self.starved) || self.filling.is_some() || self.sending
    }
}

pub struct KernelRing {
    ring: IoUring,
    memory: Memory,
    now: Nanos,
    events: VecDeque<Event>,
    sockets: Vec<Option<Box<Socket>>>,
    files: Vec<Option<Arc<OwnedFd>>>,
    chunks: Region,
    chunk_len: u32,
    buf_ring: *mut types::BufRingEntry,
    buf_mask: u16,
    buf_tail: u16,
    chunks_out: u16,
    starved: Vec<u32>,
    timers: BinaryHeap<Reverse<(u64, u64)>>,
    iovs: Vec<Box<[libc::iovec]>>,
    waker: Waker,
    info: EngineInfo,
}

fn id_of(id: IoId) -> u64 {
    IO << KIND
        | u64::from(id.queue.0 & 0xfff) << 48
        | u64::from(id.cookie.tag.0) << 32
        | u64::from(id.cookie.generation)
}

impl KernelRing {
    pub fn new(config: RingConfig) -> io::Result<KernelRing> {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_coop_taskrun()
            .setup_cqsize(4096)
            .build(256)
            .or_else(|_| IoUring::builder().setup_cqsize(4096).build(256))?;
        let mut memory = Memory::new();
        let n = config.receive_buffers.next_power_of_two();
        let chunks = memory.add_own(n as usize * config.receive_buffer_len as usize)?;
        let buf_ring = map(n as usize * 16)?.as_ptr() as *mut types::BufRingEntry;
        // SAFETY: the mapping lives as long as the process.
        unsafe { ring.submitter().register_buf_ring_with_flags(buf_ring as u64, n, GROUP, 0)? };
        let waker = Waker::new()?;
        let mut this = KernelRing {
            ring,
            memory,
            now: clock(),
            events: VecDeque::new(),
            sockets: vec![],
            files: vec![],
            chunks,
            chunk_len: config.receive_buffer_len,
            buf_ring,
            buf_mask: n - 1,
            buf_tail: 0,
            chunks_out: n,
            starved: vec![],
            timers: BinaryHeap::new(),
            iovs: vec![],
            waker,
            info: EngineInfo { name: "io_uring", why: None },
        };
        for i in 0..n {
            this.give_back(Chunk(i));
        }
        this.arm_wake();
        Ok(this)
    }
    fn arm_wake(&mut self) {
        let e = opcode::PollAdd::new(types::Fd(self.waker.fd()), libc::POLLIN as u32)
            .multi(true)
            .build()
            .user_data(WAKE << KIND);
        self.push(e);
    }
    fn push(&mut self, e: squeue::Entry) {
        // SAFETY: whatever the entry names stays until its completion.
        while unsafe { self.ring.submission().push(&e) }.is_err() {
            let _ = self.ring.submit();
        }
    }
    pub fn engine(&self) -> &EngineInfo {
        &self.info
    }
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }
    pub fn look_at_clock(&mut self) -> Nanos {
        self.now = clock();
        self.now
    }
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
    pub fn add_foreign(&mut self, m: ForeignMemory) -> Region {
        self.memory.add_foreign(m)
    }
    pub fn remove_region(&mut self, r: Region) {
        self.memory.remove(r)
    }
    pub fn copy(&mut self, a: Segment, b: Segment) {
        self.memory.copy(a, b)
    }
    pub fn add_file(&mut self, fd: Arc<OwnedFd>) -> io::Result<FileId> {
        let i = self.files.iter().position(Option::is_none).unwrap_or_else(|| {
            self.files.push(None);
            self.files.len() - 1
        });
        self.files[i] = Some(fd);
        Ok(FileId(i as u32))
    }
    pub fn remove_file(&mut self, f: FileId) {
        self.files[f.0 as usize] = None;
    }
    pub fn add_socket(&mut self, fd: OwnedFd, owner: u32) -> io::Result<SocketId> {
        let i = self.sockets.iter().position(Option::is_none).unwrap_or_else(|| {
            self.sockets.push(None);
            self.sockets.len() - 1
        });
        // SAFETY: all zeroes is a valid msghdr.
        let msg = Box::new(unsafe { std::mem::zeroed() });
        // io_uring waits by itself; a non-blocking socket would answer EAGAIN.
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags - rustix::fs::OFlags::NONBLOCK)?;
        self.sockets[i] = Some(Box::new(Socket {
            fd,
            owner,
            receiving: false,
            stopping: false,
            starved: false,
            filling: None,
            iov: vec![],
            msg,
            sent: 0,
            total: 0,
            iov_at: 0,
            sending: false,
            closing: false,
        }));
        Ok(SocketId(i as u32))
    }
    fn sock(&mut self, s: u32) -> &mut Socket {
        self.sockets[s as usize].as_mut().expect("a socket that there is")
    }
    fn arm_recv(&mut self, s: u32) {
        let fd = self.sock(s).fd.as_raw_fd();
        let e = opcode::RecvMulti::new(types::Fd(fd), GROUP).build().user_data(RECV << KIND | u64::from(s));
        self.push(e);
    }
    pub fn receive(&mut self, s: SocketId) {
        let k = self.sock(s.0);
        k.receiving = true;
        k.stopping = false;
        k.starved = false;
        self.arm_recv(s.0);
    }
    pub fn receive_stop(&mut self, s: SocketId) {
        let k = self.sock(s.0);
        if !k.receiving {
            return;
        }
        k.stopping = true;
        if k.starved {
            k.starved = false;
            k.receiving = false;
            let owner = k.owner;
            self.events.push_back(Event::ReceiveEnded { socket: s, owner, end: ReceiveEnd::Stopped });
            return;
        }
        let e = opcode::AsyncCancel::new(RECV << KIND | u64::from(s.0)).build().user_data(IGNORE << KIND);
        self.push(e);
    }
    pub fn receive_into(&mut self, s: SocketId, g: Segment) {
        self.sock(s.0).filling = Some((g, 0));
        self.arm_fill(s.0);
    }
    fn arm_fill(&mut self, s: u32) {
        let Some((g, have)) = self.sock(s).filling else { return };
        let rest = g.slice(have, g.len - have);
        let p = self.memory.address(rest);
        let fd = self.sock(s).fd.as_raw_fd();
        let e = opcode::Recv::new(types::Fd(fd), p, rest.len)
            .flags(libc::MSG_WAITALL)
            .build()
            .user_data(FILL << KIND | u64::from(s));
        self.push(e);
    }
    pub fn give_back(&mut self, c: Chunk) {
        // SAFETY: the ring of buffers is ours to write at its tail.
        unsafe {
            let entry = &mut *self.buf_ring.add((self.buf_tail & self.buf_mask) as usize);
            let p = self.memory.address(Segment {
                offset: u64::from(c.0) * u64::from(self.chunk_len),
                len: self.chunk_len,
                region: self.chunks,
            });
            entry.set_addr(p as u64);
            entry.set_len(self.chunk_len);
            entry.set_bid(c.0);
            self.buf_tail = self.buf_tail.wrapping_add(1);
            let tail = types::BufRingEntry::tail(self.buf_ring) as *const std::sync::atomic::AtomicU16;
            (*tail).store(self.buf_tail, std::sync::atomic::Ordering::Release);
        }
        self.chunks_out -= 1;
        if !self.starved.is_empty() {
            for s in std::mem::take(&mut self.starved) {
                if let Some(k) = self.sockets[s as usize].as_mut()
                    && k.starved
                {
                    k.starved = false;
                    self.arm_recv(s);
                }
            }
        }
    }
    pub fn send(&mut self, s: SocketId, segs: &[Segment]) {
        let mut iov = std::mem::take(&mut self.sock(s.0).iov);
        iov.clear();
        let mut total = 0;
        for &g in segs {
            iov.push(libc::iovec { iov_base: self.memory.address(g).cast(), iov_len: g.len as usize });
            total += u64::from(g.len);
        }
        let k = self.sock(s.0);
        k.iov = iov;
        k.total = total;
        k.sent = 0;
        k.iov_at = 0;
        k.sending = true;
        self.arm_send(s.0);
    }
    fn arm_send(&mut self, s: u32) {
        let k = self.sock(s);
        k.msg.msg_iov = k.iov[k.iov_at..].as_mut_ptr();
        k.msg.msg_iovlen = k.iov.len() - k.iov_at;
        let e = opcode::SendMsg::new(types::Fd(k.fd.as_raw_fd()), &*k.msg)
            .flags((libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32)
            .build()
            .user_data(SEND << KIND | u64::from(s));
        self.push(e);
    }
    pub fn close(&mut self, s: SocketId) {
        let k = self.sock(s.0);
        k.closing = true;
        k.starved = false;
        // SAFETY: shutdown on a descriptor that is ours.
        unsafe { libc::shutdown(k.fd.as_raw_fd(), libc::SHUT_RDWR) };
        if k.pending() {
            for kind in [RECV, FILL, SEND] {
                let e =
                    opcode::AsyncCancel::new(kind << KIND | u64::from(s.0)).build().user_data(IGNORE << KIND);
                self.push(e);
            }
        }
        self.maybe_closed(s.0);
    }
    fn maybe_closed(&mut self, s: u32) {
        if self.sockets[s as usize].as_ref().is_some_and(|k| k.closing && !k.pending()) {
            let k = self.sockets[s as usize].take().expect("just seen");
            self.events.push_back(Event::Closed { socket: SocketId(s), owner: k.owner });
        }
    }
    pub fn turn(&mut self, wait: Wait) -> io::Result<()> {
        let block = matches!(wait, Wait::UntilEvent) && self.events.is_empty();
        let r = if block {
            match self.timers.peek() {
                Some(&Reverse((at, _))) => {
                    let left = at.saturating_sub(clock().0);
                    let ts =
                        types::Timespec::new().sec(left / 1_000_000_000).nsec((left % 1_000_000_000) as u32);
                    self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&ts))
                }
                None => self.ring.submit_and_wait(1),
            }
        } else {
            self.ring.submitter().submit_with_args(0, &types::SubmitArgs::new())
        };
        if let Err(e) = r {
            match e.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => {}
                _ => return Err(e),
            }
        }
        self.iovs.clear();
        loop {
            let Some(c) = self.ring.completion().next() else { break };
            self.complete(c.user_data(), c.result(), c.flags());
        }
        if !self.timers.is_empty() {
            let now = clock().0;
            while let Some(&Reverse((at, id))) = self.timers.peek() {
                if at > now {
                    break;
                }
                self.timers.pop();
                self.io_done(id, 0);
            }
        }
        Ok(())
    }
    fn io_done(&mut self, ud: u64, result: i64) {
        self.events.push_back(Event::Io {
            queue: QueueId((ud >> 48 & 0xfff) as u16),
            cookie: Cookie { tag: Tag((ud >> 32) as u16), generation: ud as u32 },
            result,
        });
    }
    fn complete(&mut self, ud: u64, result: i32, flags: u32) {
        let s = ud as u32;
        match ud >> KIND {
            IO => self.io_done(ud, result.into()),
            WAKE => {
                self.waker.clear();
                self.events.push_back(Event::Woken);
                if !cqueue::more(flags) {
                    self.arm_wake();
                }
            }
            RECV => {
                let (chunks, len) = (self.chunks, self.chunk_len);
                if let (true, Some(bid)) = (result > 0, cqueue::buffer_select(flags)) {
                    self.chunks_out += 1;
                    let k = self.sock(s);
                    let owner = k.owner;
                    self.events.push_back(Event::Received {
                        socket: SocketId(s),
                        owner,
                        segment: Segment {
                            offset: u64::from(bid) * u64::from(len),
                            len: result as u32,
                            region: chunks,
                        },
                        chunk: Chunk(bid),
                    });
                }
                if cqueue::more(flags) {
                    return;
                }
                let spare = self.chunks_out <= self.buf_mask;
                let k = self.sock(s);
                let owner = k.owner;
                if !k.closing && !k.stopping && (result > 0 || result == -libc::ENOBUFS) {
                    if spare {
                        self.arm_recv(s);
                    } else {
                        self.sock(s).starved = true;
                        self.starved.push(s);
                    }
                    return;
                }
                k.receiving = false;
                let end = match result {
                    0 => ReceiveEnd::Eof,
                    _ if k.stopping => ReceiveEnd::Stopped,
                    r if r > 0 => ReceiveEnd::Stopped,
                    r => ReceiveEnd::Error(-r),
                };
                self.events.push_back(Event::ReceiveEnded { socket: SocketId(s), owner, end });
                self.maybe_closed(s);
            }
            FILL => {
                let k = self.sock(s);
                let owner = k.owner;
                let Some((g, have)) = k.filling else { return };
                let result = if result > 0 {
                    let have = have + result as u32;
                    if have < g.len && !k.closing {
                        k.filling = Some((g, have));
                        return self.arm_fill(s);
                    }
                    i64::from(have)
                } else if result == 0 {
                    i64::from(have)
                } else {
                    result.into()
                };
                self.sock(s).filling = None;
                self.events.push_back(Event::Filled { socket: SocketId(s), owner, result });
                self.maybe_closed(s);
            }
            SEND => {
                let k = self.sock(s);
                let owner = k.owner;
                let mut out = i64::from(result);
                if result >= 0 {
                    k.sent += result as u64;
                    out = k.sent as i64;
                    if k.sent < k.total && !k.closing {
                        let mut n = result as usize;
                        while n > 0 {
                            let v = &mut k.iov[k.iov_at];
                            let t = n.min(v.iov_len);
                            v.iov_base = v.iov_base.wrapping_byte_add(t);
                            v.iov_len -= t;
                            n -= t;
                            if v.iov_len == 0 {
                                k.iov_at += 1;
                            }
                        }
                        return self.arm_send(s);
                    }
                }
                k.sending = false;
                self.events.push_back(Event::Sent { socket: SocketId(s), owner, result: out });
                self.maybe_closed(s);
            }
            _ => {}
        }
    }
    fn fd(&self, f: FileId) -> i32 {
        self.files[f.0 as usize].as_ref().expect("a file that there is").as_raw_fd()
    }
}

impl Ring for KernelRing {
    #[inline]
    fn now(&self) -> Nanos {
        self.now
    }
    #[inline]
    fn allocate(&mut self, len: u32) -> Option<Segment> {
        self.memory.allocate(len)
    }
    #[inline]
    fn free(&mut self, s: Segment) {
        self.memory.free(s)
    }
    #[inline]
    fn bytes(&self, s: Segment) -> &[u8] {
        self.memory.bytes(s)
    }
    #[inline]
    fn bytes_mut(&mut self, s: Segment) -> &mut [u8] {
        self.memory.bytes_mut(s)
    }
    fn try_now(&mut self, f: FileId, op: FileOp, data: &[Segment], patience: Patience) -> Option<i64> {
        let fd = self.fd(f);
        let iov: Vec<libc::iovec> = data
            .iter()
            .map(|&g| libc::iovec { iov_base: self.memory.address(g).cast(), iov_len: g.len as usize })
            .collect();
        let nowait = if patience == Patience::None { libc::RWF_NOWAIT } else { 0 };
        // SAFETY: descriptors and memory are ours.
        let r: i64 = unsafe {
            match op {
                FileOp::Read { offset } if nowait == 0 && iov.len() == 1 => {
                    libc::pread(fd, iov[0].iov_base, iov[0].iov_len, offset as i64) as i64
                }
                FileOp::Write { offset, durable: false } if nowait == 0 && iov.len() == 1 => {
                    libc::pwrite(fd, iov[0].iov_base, iov[0].iov_len, offset as i64) as i64
                }
                FileOp::Read { offset } => {
                    libc::preadv2(fd, iov.as_ptr(), iov.len() as i32, offset as i64, nowait) as i64
                }
                FileOp::Write { offset, durable } => libc::pwritev2(
                    fd,
                    iov.as_ptr(),
                    iov.len() as i32,
                    offset as i64,
                    nowait | if durable { libc::RWF_DSYNC } else { 0 },
                ) as i64,
                FileOp::Sync => libc::fdatasync(fd).into(),
                FileOp::Allocate { mode, offset, len } => {
                    libc::fallocate(fd, mode, offset as i64, len as i64).into()
                }
                FileOp::Seek { offset, hole } => {
                    libc::lseek(fd, offset as i64, if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA })
                }
                FileOp::Prefetch { offset, len } => {
                    -i64::from(libc::posix_fadvise(fd, offset as i64, len as i64, libc::POSIX_FADV_WILLNEED))
                }
            }
        };
        let r = if r == -1 {
            -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
        } else {
            r
        };
        if nowait != 0 && (r == -i64::from(libc::EAGAIN) || r == -i64::from(libc::EOPNOTSUPP)) {
            None
        } else {
            Some(r)
        }
    }
    fn start(&mut self, id: IoId, f: FileId, op: FileOp, data: &[Segment]) -> Result<(), RingFull> {
        let fd = types::Fd(self.fd(f));
        let iov: Box<[libc::iovec]> = data
            .iter()
            .map(|&g| libc::iovec { iov_base: self.memory.address(g).cast(), iov_len: g.len as usize })
            .collect();
        let (p, n) = (iov.as_ptr(), iov.len() as u32);
        let e = match op {
            FileOp::Read { offset } => opcode::Readv::new(fd, p, n).offset(offset).build(),
            FileOp::Write { offset, durable } => opcode::Writev::new(fd, p, n)
                .offset(offset)
                .rw_flags(if durable { libc::RWF_DSYNC } else { 0 })
                .build(),
            FileOp::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            FileOp::Allocate { mode, offset, len } => {
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
            FileOp::Prefetch { offset, len } => {
                opcode::Fadvise::new(fd, len as i64, libc::POSIX_FADV_WILLNEED).offset(offset).build()
            }
            FileOp::Seek { .. } => return Err(RingFull),
        };
        self.iovs.push(iov);
        self.push(e.user_data(id_of(id)));
        Ok(())
    }
    fn timer(&mut self, id: IoId, at: Nanos) {
        self.timers.push(Reverse((at.0, id_of(id))));
    }
    fn cancel(&mut self, id: IoId) {
        let e = opcode::AsyncCancel::new(id_of(id)).build().user_data(IGNORE << KIND);
        self.push(e);
    }
}
