//! A lean front-end of vhost-user: a virtual machine without the machine.
//!
//! A [`FrontEnd`] speaks the protocol with a back-end, shares a memory file as guest memory, and drives its
//! virtqueues from the calling thread. It trusts the back-end; a violation of the protocol is a panic.

mod queue;

pub use queue::{Completed, Queue};

use proto::vhost_user::wire::{HEADER_LEN, feature, protocol};
use proto::vhost_user::{
    BackendRequest, Config, ConfigKind, Header, InflightArea, MemoryRegion, Request, VringAddress, VringFile,
    VringState,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use virtio::Features;
use virtio::driver::{AddressAllocator, SharedMemory};
use virtio::memory::GuestMemory;
use virtio::ring::Position;

/// Guest-physical address of the shared memory.
pub const GUEST_AT: u64 = 1 << 30;
/// Its address in the front-end's process, as messages have it. The back-end never uses it as an address.
pub const USER_AT: u64 = 1 << 45;
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the configuration space that front-ends ask for.
const CONFIG_LEN: usize = virtio::blk::Config::LEN;
/// Features of rings that the front-end accepts if they are offered.
const WANTED: Features = Features::VERSION_1
    .union(Features::INDIRECT_DESC)
    .union(Features::EVENT_IDX)
    .union(Features::FLUSH)
    .union(Features::DISCARD)
    .union(Features::WRITE_ZEROES)
    .union(Features::CONFIG_WCE)
    .union(Features::MQ)
    .union(Features::ZONED)
    .union(Features::RO);

/// A connection to a back-end.
pub struct FrontEnd {
    stream: UnixStream,
    /// Our end of the socket for the back-end's requests.
    backend: UnixStream,
    memory: SharedMemory,
    table: Arc<GuestMemory>,
    allocator: AddressAllocator,
    features: Features,
    /// The record of requests in flight, which outlives back-ends.
    inflight: Option<(InflightArea, OwnedFd)>,
}

impl FrontEnd {
    /// Connects as [`connect`](FrontEnd::connect) does, for packed virtqueues.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn connect_packed(path: &Path, len: u64) -> FrontEnd {
        let stream = UnixStream::connect(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        FrontEnd::over(stream, len, WANTED | Features::RING_PACKED)
    }

    /// Connects to a back-end and negotiates, with `len` bytes of guest memory.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn connect(path: &Path, len: u64) -> FrontEnd {
        let stream = UnixStream::connect(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        FrontEnd::over(stream, len, WANTED)
    }

    /// Waits for a back-end to connect to `listener`.
    ///
    /// # Panics
    /// If none does.
    pub fn accept(listener: &UnixListener, len: u64) -> FrontEnd {
        FrontEnd::over(listener.accept().expect("a back-end connects").0, len, WANTED)
    }

    /// Negotiates over a connected socket; of the features in `wanted`, those that are offered are accepted.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn over(stream: UnixStream, len: u64, wanted: Features) -> FrontEnd {
        let memory = SharedMemory::create(len).expect("shared memory");
        FrontEnd::with_memory(stream, memory, wanted)
    }

    /// Negotiates with memory that exists already, as after the back-end was restarted.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn with_memory(stream: UnixStream, memory: SharedMemory, wanted: Features) -> FrontEnd {
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let table = memory.table(GUEST_AT, USER_AT).expect("the addresses fit");
        let (backend, theirs) = UnixStream::pair().expect("a socket pair");
        let allocator = AddressAllocator::at(GUEST_AT);
        let mut this = FrontEnd {
            stream,
            backend,
            memory,
            table,
            allocator,
            features: Features::empty(),
            inflight: None,
        };
        this.negotiate(wanted, theirs);
        this
    }

    /// Connects to another back-end after the first has died. Its queues are to be handed over again.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn reconnect(&mut self, path: &Path) {
        let stream = UnixStream::connect(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let (backend, theirs) = UnixStream::pair().expect("a socket pair");
        (self.stream, self.backend) = (stream, backend);
        self.negotiate(self.features, theirs);
        if let Some((area, file)) = self.inflight.take() {
            self.done(&Request::SetInflightFd(area), &[file.as_fd()]);
            self.inflight = Some((area, file));
        }
    }

    /// Has the back-end record requests in flight, so that another one can continue them.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn keep_inflight(&mut self, queues: u16, queue_size: u16) {
        let wanted = InflightArea { queues, queue_size, ..InflightArea::default() };
        self.send(&Request::GetInflightFd(wanted), &[]);
        let mut head = [0; HEADER_LEN];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let room = &mut [IoSliceMut::new(&mut head)];
        let received = recvmsg(&self.stream, room, &mut control, RecvFlags::WAITALL).expect("a reply");
        assert_eq!(received.bytes, head.len());
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let header = Header::parse(&head).expect("a well-formed header");
        let mut payload = vec![0; header.len as usize];
        self.stream.read_exact(&mut payload).expect("a payload");
        let area = InflightArea::parse(&payload).expect("an area");
        let file = file.expect("a descriptor");
        self.done(&Request::SetInflightFd(area), &[file.as_fd()]);
        self.inflight = Some((area, file));
    }

    fn negotiate(&mut self, wanted: Features, theirs: UnixStream) {
        let this = self;
        let offered = this.number(&Request::GetFeatures);
        assert_ne!(offered & feature::PROTOCOL_FEATURES, 0, "protocol features are offered");
        let protocol = this.number(&Request::GetProtocolFeatures) & protocol::ALL;
        this.send(&Request::SetProtocolFeatures(protocol), &[]);
        this.features = Features::from_bits_truncate(offered) & wanted | Features::PROTOCOL_FEATURES;
        assert_ne!(protocol & protocol::REPLY_ACK, 0, "acknowledgements are offered");
        this.done(&Request::SetOwner, &[]);
        this.done(&Request::SetBackendReqFd, &[theirs.as_fd()]);
        this.done(&Request::SetFeatures(this.features.bits()), &[]);
        let region = MemoryRegion {
            guest_address: GUEST_AT,
            len: this.memory.mapping().len(),
            user_address: USER_AT,
            mmap_offset: 0,
        };
        let file = this.memory.file().try_clone_to_owned().expect("a descriptor");
        this.done(&Request::SetMemTable(vec![region]), &[file.as_fd()]);
    }

    /// The features that were accepted.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Guest memory.
    pub fn table(&self) -> &Arc<GuestMemory> {
        &self.table
    }

    /// The memory file.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Sends a request without asking for an acknowledgement.
    ///
    /// # Panics
    /// If the socket fails.
    pub fn send(&mut self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) {
        self.send_bytes(&request.encode(false), fds);
    }

    fn send_bytes(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "at most eight descriptors");
        }
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.expect("the back-end reads"), bytes.len());
    }

    /// Sends a request, and returns whether the back-end acknowledged it.
    ///
    /// # Panics
    /// If the connection ends.
    pub fn is_done(&mut self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) -> bool {
        self.send_bytes(&request.encode(true), fds);
        let (header, payload) = self.receive();
        assert_eq!(header.request, request.number());
        payload == 0u64.to_ne_bytes()
    }

    /// Sends a request, which the back-end has to acknowledge.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn done(&mut self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) {
        assert!(self.is_done(request, fds), "{request:?} was refused");
    }

    /// Receives a reply.
    ///
    /// # Panics
    /// If there is none.
    pub fn receive(&mut self) -> (Header, Vec<u8>) {
        receive(&mut self.stream)
    }

    /// Whether the back-end has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0) | Err(_))
    }

    /// Sends a request whose reply is a number.
    ///
    /// # Panics
    /// If the reply is something else.
    pub fn number(&mut self, request: &Request<'_>) -> u64 {
        self.send(request, &[]);
        let (header, payload) = self.receive();
        assert_eq!(header.request, request.number());
        u64::from_ne_bytes(payload.try_into().expect("a number"))
    }

    /// Reads the configuration space.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn config(&mut self) -> [u8; CONFIG_LEN] {
        let config = Config { offset: 0, kind: ConfigKind::Writable, content: &[0; CONFIG_LEN] };
        self.send(&Request::GetConfig(config), &[]);
        let (_, payload) = self.receive();
        payload[12..].try_into().expect("as many bytes as were requested")
    }

    /// Size of the device in bytes.
    pub fn capacity(&mut self) -> u64 {
        let config = self.config();
        u64::from_le_bytes(config[..8].try_into().expect("eight bytes")) * 512
    }

    /// Waits for a notification that the configuration space has changed.
    ///
    /// # Panics
    /// If there is none in a minute.
    pub fn await_config_change(&mut self) {
        self.backend.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let (header, _) = receive(&mut self.backend);
        assert_eq!(BackendRequest::parse(&header), Some(BackendRequest::ConfigChange));
    }

    /// Starts virtqueue `index`, with `slots` requests of up to `data_len` bytes.
    ///
    /// # Panics
    /// If the back-end refuses, or guest memory is too small.
    pub fn start_queue(&mut self, index: u16, size: u16, slots: u16, data_len: u32) -> Queue {
        let queue = Queue::new(self, index, size, slots, data_len);
        self.hand_over(&queue, Position::START.to_base(self.features));
        queue
    }

    fn allocator(&mut self) -> &mut AddressAllocator {
        &mut self.allocator
    }

    /// Has the back-end serve a queue from that base on.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn hand_over(&mut self, queue: &Queue, base: u32) {
        let index = u32::from(queue.index());
        let (layout, file) = (queue.layout(), VringFile { index, has_fd: true });
        self.done(&Request::SetVringNum(VringState { index, num: layout.size.into() }), &[]);
        self.done(&Request::SetVringBase(VringState { index, num: base }), &[]);
        self.set_addresses(queue, 0);
        self.done(&Request::SetVringCall(file), &[queue.call().as_fd()]);
        self.done(&Request::SetVringErr(file), &[queue.error().as_fd()]);
        self.done(&Request::SetVringKick(file), &[queue.kick().as_fd()]);
        self.done(&Request::SetVringEnable(VringState { index, num: 1 }), &[]);
    }

    /// Names the addresses of a queue's parts. `flags` is 0 or
    /// [`VRING_LOG`](proto::vhost_user::wire::VRING_LOG): writes to the used ring are logged.
    ///
    /// # Panics
    /// If the back-end refuses.
    pub fn set_addresses(&mut self, queue: &Queue, flags: u32) {
        let user = |guest: u64| guest - GUEST_AT + USER_AT;
        let layout = queue.layout();
        let address = VringAddress {
            index: queue.index().into(),
            flags,
            descriptors: user(layout.descriptors),
            used: user(layout.device),
            available: user(layout.driver),
            log: layout.device,
        };
        self.done(&Request::SetVringAddr(address), &[]);
    }

    /// Stops a virtqueue. Returns the base at which it continues.
    ///
    /// # Panics
    /// If the back-end does not answer.
    pub fn stop_queue(&mut self, index: u16) -> u32 {
        self.send(&Request::GetVringBase(VringState { index: index.into(), num: 0 }), &[]);
        let (_, payload) = self.receive();
        u32::from_ne_bytes(payload[4..8].try_into().expect("a vring state"))
    }
}

fn receive(stream: &mut UnixStream) -> (Header, Vec<u8>) {
    let mut head = [0; HEADER_LEN];
    stream.read_exact(&mut head).expect("a message");
    let header = Header::parse(&head).expect("a well-formed header");
    let mut payload = vec![0; header.len as usize];
    stream.read_exact(&mut payload).expect("a payload");
    (header, payload)
}

/// Creates an eventfd.
///
/// # Panics
/// If the process may have no more files.
pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

/// Waits until an eventfd is signalled, and resets it. Returns whether it was in time.
pub fn await_event(event: &OwnedFd, time: Duration) -> bool {
    let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let count = poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&time)).unwrap_or(0);
    // Nothing to read if it was not signalled.
    count > 0 && rustix::io::read(event, &mut [0; 8]).is_ok()
}
