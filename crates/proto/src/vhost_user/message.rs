//! Messages: parsing and encoding, for both sides.

use super::wire::{
    CONFIG_HEADER_LEN, CONFIG_MAX, FDS_MAX, HEADER_LEN, MESSAGE_MAX, PAYLOAD_MAX, REGION_LEN,
    VRING_INDEX_MASK, VRING_NO_FD, backend_request, flag, request,
};

/// Reasons why bytes are not a valid message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Malformed {
    /// The version is not 1.
    #[error("the message has version {0}, not 1")]
    Version(u32),
    /// The front-end sent a reply, or the back-end a request.
    #[error("the message goes in the wrong direction")]
    Direction,
    /// The payload is longer than [`PAYLOAD_MAX`].
    #[error("the payload has {0} bytes")]
    TooLong(u32),
    /// The payload does not have the length that the request requires.
    #[error("request {request} has a payload of {len} bytes")]
    Length {
        /// Number of the request.
        request: u32,
        /// Length of its payload.
        len: usize,
    },
    /// The request came with a wrong number of file descriptors.
    #[error("request {request} has {count} descriptors beside it")]
    Descriptors {
        /// Number of the request.
        request: u32,
        /// Number of descriptors.
        count: usize,
    },
}

/// The header of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Number of the request.
    pub request: u32,
    /// Flags: see [`flag`].
    pub flags: u32,
    /// Length of the payload, at most [`PAYLOAD_MAX`].
    pub len: u32,
}

impl Header {
    /// Parses a header of either direction.
    ///
    /// # Errors
    /// The version is unknown, or the payload is longer than [`PAYLOAD_MAX`].
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Header, Malformed> {
        let fields = Fields(bytes);
        let header = Header { request: fields.u32(0), flags: fields.u32(4), len: fields.u32(8) };
        if header.flags & flag::VERSION_MASK != flag::VERSION {
            return Err(Malformed::Version(header.flags & flag::VERSION_MASK));
        }
        if header.len as usize > PAYLOAD_MAX {
            return Err(Malformed::TooLong(header.len));
        }
        Ok(header)
    }

    /// Returns whether the message is a reply.
    pub const fn is_reply(&self) -> bool {
        self.flags & flag::REPLY != 0
    }

    /// Returns whether the sender requests an acknowledgement.
    pub const fn needs_reply(&self) -> bool {
        self.flags & flag::NEED_REPLY != 0
    }

    fn put(&self, into: &mut Vec<u8>) {
        for field in [self.request, self.flags, self.len] {
            into.extend(field.to_ne_bytes());
        }
    }
}

/// A ring and a number: the payload of several requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VringState {
    /// The ring.
    pub index: u32,
    /// The number: a size, an index in a ring, or whether the ring is enabled.
    pub num: u32,
}

/// Addresses of a ring's parts, in the front-end's address space.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct VringAddress {
    /// The ring.
    pub index: u32,
    /// [`VRING_LOG`](super::wire::VRING_LOG) or 0.
    pub flags: u32,
    /// Descriptor table, or descriptor ring of a packed virtqueue.
    pub descriptors: u64,
    /// Used ring, or the device's event suppression structure.
    pub used: u64,
    /// Available ring, or the driver's event suppression structure.
    pub available: u64,
    /// Guest-physical address at which writes to the used ring are logged.
    pub log: u64,
}

/// A ring, and whether the message carries a file descriptor for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VringFile {
    /// The ring.
    pub index: u32,
    /// Whether a file descriptor accompanies the message; without one, the ring is polled.
    pub has_fd: bool,
}

/// A region of guest memory.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct MemoryRegion {
    /// Guest-physical address.
    pub guest_address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Address in the front-end's address space.
    pub user_address: u64,
    /// Offset of the region in the file that the descriptor refers to.
    pub mmap_offset: u64,
}

impl MemoryRegion {
    /// Returns whether both regions have the same addresses and length, whatever their offsets in a file.
    pub fn is_at(&self, other: &MemoryRegion) -> bool {
        (self.guest_address, self.user_address, self.len)
            == (other.guest_address, other.user_address, other.len)
    }

    /// Returns whether the guest-physical addresses of both regions overlap.
    pub fn overlaps(&self, other: &MemoryRegion) -> bool {
        self.guest_address < other.guest_address.saturating_add(other.len)
            && other.guest_address < self.guest_address.saturating_add(self.len)
    }

    /// Returns whether the region is not empty and none of its ends is past 2^64.
    pub fn is_sound(&self) -> bool {
        self.len > 0
            && [self.guest_address, self.user_address, self.mmap_offset]
                .iter()
                .all(|start| start.checked_add(self.len).is_some())
    }

    fn parse(fields: &Fields<'_>, at: usize) -> MemoryRegion {
        MemoryRegion {
            guest_address: fields.u64(at),
            len: fields.u64(at + 8),
            user_address: fields.u64(at + 16),
            mmap_offset: fields.u64(at + 24),
        }
    }

    fn put(&self, into: &mut Vec<u8>) {
        for field in [self.guest_address, self.len, self.user_address, self.mmap_offset] {
            into.extend(field.to_ne_bytes());
        }
    }
}

/// The dirty page log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogArea {
    /// Length in bytes.
    pub len: u64,
    /// Offset in the file.
    pub offset: u64,
}

/// The shared memory that records requests in flight.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct InflightArea {
    /// Length in bytes.
    pub len: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Number of virtqueues.
    pub queues: u16,
    /// Size of each virtqueue.
    pub queue_size: u16,
}

/// Reason for a write to the configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConfigKind {
    /// The guest wrote a writable field.
    Writable,
    /// The destination of a live migration restores fields.
    Migration,
}

/// A part of the configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config<'a> {
    /// Offset in the space.
    pub offset: u32,
    /// The reason for a write.
    pub kind: ConfigKind,
    /// The content; in a read request only its length is used.
    pub content: &'a [u8],
}

/// A request of the front-end.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "each is the specification's request of that name")]
pub enum Request<'a> {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<MemoryRegion>),
    SetLogBase(LogArea),
    SetLogFd,
    SetVringNum(VringState),
    SetVringAddr(VringAddress),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(VringFile),
    SetVringCall(VringFile),
    SetVringErr(VringFile),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd,
    GetConfig(Config<'a>),
    SetConfig(Config<'a>),
    GetInflightFd(InflightArea),
    SetInflightFd(InflightArea),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(MemoryRegion),
    RemMemReg(MemoryRegion),
    SetStatus(u64),
    GetStatus,
    /// A request that is irrelevant for block devices.
    Unknown(u32),
}

impl<'a> Request<'a> {
    /// Parses a request with its payload and the number of file descriptors that came with it.
    ///
    /// # Errors
    /// The length or the number of descriptors does not fit the request.
    pub fn parse(header: &Header, payload: &'a [u8], fds: usize) -> Result<Request<'a>, Malformed> {
        if header.is_reply() {
            return Err(Malformed::Direction);
        }
        let number = header.request;
        let fields = Fields(payload);
        let len = |expected: usize| match payload.len() == expected {
            true => Ok(()),
            false => Err(Malformed::Length { request: number, len: payload.len() }),
        };
        let wrong_fds = Malformed::Descriptors { request: number, count: fds };
        let count = |expected: usize| if fds == expected { Ok(()) } else { Err(wrong_fds) };
        let nothing = |request| len(0).and(count(0)).map(|()| request);
        let word = || len(8).and(count(0)).map(|()| fields.u64(0));
        let state = || {
            let state = VringState { index: fields.u32(0), num: fields.u32(4) };
            len(8).and(count(0)).map(|()| state)
        };
        let file = || {
            let word = fields.u64(0);
            let has_fd = word & VRING_NO_FD == 0;
            let file = VringFile { index: (word & VRING_INDEX_MASK) as u32, has_fd };
            len(8).and(count(usize::from(has_fd))).map(|()| file)
        };
        let region = || len(8 + REGION_LEN).map(|()| MemoryRegion::parse(&fields, 8));
        let inflight = || {
            let area = InflightArea {
                len: fields.u64(0),
                offset: fields.u64(8),
                queues: fields.u16(16),
                queue_size: fields.u16(18),
            };
            // QEMU sends the padding of C; the specification draws none.
            len(InflightArea::LEN).or(len(InflightArea::LEN_PADDED)).map(|()| area)
        };
        Ok(match number {
            request::GET_FEATURES => nothing(Request::GetFeatures)?,
            request::SET_FEATURES => Request::SetFeatures(word()?),
            request::SET_OWNER => nothing(Request::SetOwner)?,
            request::RESET_OWNER => nothing(Request::ResetOwner)?,
            request::SET_MEM_TABLE => {
                let regions = fields.u32(0) as usize;
                // Some front-ends always send space for all eight regions.
                let fits = regions <= FDS_MAX
                    && (8 + regions * REGION_LEN..=8 + FDS_MAX * REGION_LEN).contains(&payload.len());
                if !fits {
                    return Err(Malformed::Length { request: number, len: payload.len() });
                }
                count(regions)?;
                let at = |region| MemoryRegion::parse(&fields, 8 + region * REGION_LEN);
                Request::SetMemTable((0..regions).map(at).collect())
            }
            request::SET_LOG_BASE => {
                len(16)?;
                count(1)?;
                Request::SetLogBase(LogArea { len: fields.u64(0), offset: fields.u64(8) })
            }
            request::SET_LOG_FD => len(0).and(count(1)).map(|()| Request::SetLogFd)?,
            request::SET_VRING_NUM => Request::SetVringNum(state()?),
            request::SET_VRING_ADDR => {
                len(40)?;
                count(0)?;
                Request::SetVringAddr(VringAddress {
                    index: fields.u32(0),
                    flags: fields.u32(4),
                    descriptors: fields.u64(8),
                    used: fields.u64(16),
                    available: fields.u64(24),
                    log: fields.u64(32),
                })
            }
            request::SET_VRING_BASE => Request::SetVringBase(state()?),
            request::GET_VRING_BASE => Request::GetVringBase(state()?),
            request::SET_VRING_KICK => Request::SetVringKick(file()?),
            request::SET_VRING_CALL => Request::SetVringCall(file()?),
            request::SET_VRING_ERR => Request::SetVringErr(file()?),
            request::GET_PROTOCOL_FEATURES => nothing(Request::GetProtocolFeatures)?,
            request::SET_PROTOCOL_FEATURES => Request::SetProtocolFeatures(word()?),
            request::GET_QUEUE_NUM => nothing(Request::GetQueueNum)?,
            request::SET_VRING_ENABLE => Request::SetVringEnable(state()?),
            request::SET_BACKEND_REQ_FD => len(0).and(count(1)).map(|()| Request::SetBackendReqFd)?,
            request::GET_CONFIG => count(0).and(config(number, payload)).map(Request::GetConfig)?,
            request::SET_CONFIG => count(0).and(config(number, payload)).map(Request::SetConfig)?,
            request::GET_INFLIGHT_FD => count(0).and(inflight()).map(Request::GetInflightFd)?,
            request::SET_INFLIGHT_FD => count(1).and(inflight()).map(Request::SetInflightFd)?,
            request::RESET_DEVICE => nothing(Request::ResetDevice)?,
            request::GET_MAX_MEM_SLOTS => nothing(Request::GetMaxMemSlots)?,
            request::ADD_MEM_REG => count(1).and(region()).map(Request::AddMemReg)?,
            // "For compatibility with existing incorrect implementations, the back-end MAY accept messages
            // with one file descriptor."
            request::REM_MEM_REG if fds <= 1 => Request::RemMemReg(region()?),
            request::REM_MEM_REG => return Err(wrong_fds),
            request::SET_STATUS => Request::SetStatus(word()?),
            request::GET_STATUS => nothing(Request::GetStatus)?,
            other => Request::Unknown(other),
        })
    }

    /// Returns the number of the request.
    pub fn number(&self) -> u32 {
        match self {
            Request::GetFeatures => request::GET_FEATURES,
            Request::SetFeatures(_) => request::SET_FEATURES,
            Request::SetOwner => request::SET_OWNER,
            Request::ResetOwner => request::RESET_OWNER,
            Request::SetMemTable(_) => request::SET_MEM_TABLE,
            Request::SetLogBase(_) => request::SET_LOG_BASE,
            Request::SetLogFd => request::SET_LOG_FD,
            Request::SetVringNum(_) => request::SET_VRING_NUM,
            Request::SetVringAddr(_) => request::SET_VRING_ADDR,
            Request::SetVringBase(_) => request::SET_VRING_BASE,
            Request::GetVringBase(_) => request::GET_VRING_BASE,
            Request::SetVringKick(_) => request::SET_VRING_KICK,
            Request::SetVringCall(_) => request::SET_VRING_CALL,
            Request::SetVringErr(_) => request::SET_VRING_ERR,
            Request::GetProtocolFeatures => request::GET_PROTOCOL_FEATURES,
            Request::SetProtocolFeatures(_) => request::SET_PROTOCOL_FEATURES,
            Request::GetQueueNum => request::GET_QUEUE_NUM,
            Request::SetVringEnable(_) => request::SET_VRING_ENABLE,
            Request::SetBackendReqFd => request::SET_BACKEND_REQ_FD,
            Request::GetConfig(_) => request::GET_CONFIG,
            Request::SetConfig(_) => request::SET_CONFIG,
            Request::GetInflightFd(_) => request::GET_INFLIGHT_FD,
            Request::SetInflightFd(_) => request::SET_INFLIGHT_FD,
            Request::ResetDevice => request::RESET_DEVICE,
            Request::GetMaxMemSlots => request::GET_MAX_MEM_SLOTS,
            Request::AddMemReg(_) => request::ADD_MEM_REG,
            Request::RemMemReg(_) => request::REM_MEM_REG,
            Request::SetStatus(_) => request::SET_STATUS,
            Request::GetStatus => request::GET_STATUS,
            Request::Unknown(number) => *number,
        }
    }

    /// Returns the number of file descriptors that a front-end sends with the request.
    pub fn fds(&self) -> usize {
        match self {
            Request::SetMemTable(regions) => regions.len(),
            Request::SetVringKick(file) | Request::SetVringCall(file) | Request::SetVringErr(file) => {
                usize::from(file.has_fd)
            }
            Request::SetLogBase(_)
            | Request::SetLogFd
            | Request::SetBackendReqFd
            | Request::SetInflightFd(_)
            | Request::AddMemReg(_) => 1,
            _ => 0,
        }
    }

    /// Encodes the request. With `acknowledged`, it requests an acknowledgement from the back-end.
    pub fn encode(&self, acknowledged: bool) -> Vec<u8> {
        let mut payload = Vec::new();
        let file = |file: &VringFile| {
            u64::from(file.index) & VRING_INDEX_MASK | if file.has_fd { 0 } else { VRING_NO_FD }
        };
        match self {
            Request::SetFeatures(word) | Request::SetProtocolFeatures(word) | Request::SetStatus(word) => {
                payload.extend(word.to_ne_bytes());
            }
            Request::SetMemTable(regions) => {
                payload.extend((regions.len() as u32).to_ne_bytes());
                payload.extend([0; 4]);
                regions.iter().for_each(|region| region.put(&mut payload));
            }
            Request::SetLogBase(area) => {
                payload.extend(area.len.to_ne_bytes());
                payload.extend(area.offset.to_ne_bytes());
            }
            Request::SetVringNum(state)
            | Request::SetVringBase(state)
            | Request::GetVringBase(state)
            | Request::SetVringEnable(state) => put_state(state, &mut payload),
            Request::SetVringAddr(address) => {
                payload.extend(address.index.to_ne_bytes());
                payload.extend(address.flags.to_ne_bytes());
                for field in [address.descriptors, address.used, address.available, address.log] {
                    payload.extend(field.to_ne_bytes());
                }
            }
            Request::SetVringKick(vring) | Request::SetVringCall(vring) | Request::SetVringErr(vring) => {
                payload.extend(file(vring).to_ne_bytes());
            }
            Request::GetConfig(config) | Request::SetConfig(config) => config.put(&mut payload),
            Request::GetInflightFd(area) | Request::SetInflightFd(area) => area.put(&mut payload),
            Request::AddMemReg(region) | Request::RemMemReg(region) => {
                payload.extend([0; 8]);
                region.put(&mut payload);
            }
            _ => {}
        }
        let need_reply = if acknowledged { flag::NEED_REPLY } else { 0 };
        message(self.number(), flag::VERSION | need_reply, &payload)
    }
}

fn config(number: u32, payload: &[u8]) -> Result<Config<'_>, Malformed> {
    let fields = Fields(payload);
    let content = payload.get(CONFIG_HEADER_LEN..).unwrap_or_default();
    let len = fields.u32(4) as usize;
    if payload.len() < CONFIG_HEADER_LEN || len > CONFIG_MAX || content.len() != len {
        return Err(Malformed::Length { request: number, len: payload.len() });
    }
    let kind = if fields.u32(8) == 1 { ConfigKind::Migration } else { ConfigKind::Writable };
    Ok(Config { offset: fields.u32(0), kind, content })
}

impl Config<'_> {
    fn put(&self, into: &mut Vec<u8>) {
        let kind = u32::from(self.kind == ConfigKind::Migration);
        for field in [self.offset, self.content.len() as u32, kind] {
            into.extend(field.to_ne_bytes());
        }
        into.extend(self.content);
    }
}

impl InflightArea {
    /// Bytes of the fields.
    pub const LEN: usize = 20;
    /// Bytes of the structure with the padding of C. QEMU refuses a reply of another length.
    pub const LEN_PADDED: usize = 24;

    fn put(&self, into: &mut Vec<u8>) {
        into.extend(self.len.to_ne_bytes());
        into.extend(self.offset.to_ne_bytes());
        into.extend(self.queues.to_ne_bytes());
        into.extend(self.queue_size.to_ne_bytes());
        into.extend([0; InflightArea::LEN_PADDED - InflightArea::LEN]);
    }

    /// Parses the reply to [`Request::GetInflightFd`].
    pub fn parse(payload: &[u8]) -> Option<InflightArea> {
        let fields = Fields(payload);
        (payload.len() >= InflightArea::LEN).then(|| InflightArea {
            len: fields.u64(0),
            offset: fields.u64(8),
            queues: fields.u16(16),
            queue_size: fields.u16(18),
        })
    }
}

fn put_state(state: &VringState, into: &mut Vec<u8>) {
    into.extend(state.index.to_ne_bytes());
    into.extend(state.num.to_ne_bytes());
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(MESSAGE_MAX);
    Header { request, flags, len: payload.len() as u32 }.put(&mut bytes);
    bytes.extend(payload);
    bytes
}

fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    message(request, flag::VERSION | flag::REPLY, payload)
}

/// Encodes a reply that is one number, or an acknowledgement.
pub fn put_number(request: u32, number: u64) -> Vec<u8> {
    reply(request, &number.to_ne_bytes())
}

/// Encodes the reply to [`Request::GetVringBase`].
pub fn put_vring_state(request: u32, state: VringState) -> Vec<u8> {
    let mut payload = Vec::new();
    put_state(&state, &mut payload);
    reply(request, &payload)
}

/// Encodes the reply to [`Request::GetConfig`]. Without content, the reply refuses the request.
pub fn put_config(config: Option<Config<'_>>) -> Vec<u8> {
    let mut payload = Vec::new();
    if let Some(config) = config {
        config.put(&mut payload);
    }
    reply(request::GET_CONFIG, &payload)
}

/// Encodes the reply to [`Request::GetInflightFd`]. A descriptor accompanies it unless the length is 0.
pub fn put_inflight(area: &InflightArea) -> Vec<u8> {
    let mut payload = Vec::new();
    area.put(&mut payload);
    reply(request::GET_INFLIGHT_FD, &payload)
}

/// A request of the back-end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendRequest {
    /// The configuration space has changed.
    ConfigChange,
}

impl BackendRequest {
    /// Encodes the request. It requests no acknowledgement, so a busy front-end does not delay the
    /// back-end.
    pub fn encode(self) -> Vec<u8> {
        match self {
            BackendRequest::ConfigChange => message(backend_request::CONFIG_CHANGE_MSG, flag::VERSION, &[]),
        }
    }

    /// Parses a request. Returns `None` if it is irrelevant for the front-end of a block device.
    pub fn parse(header: &Header) -> Option<BackendRequest> {
        let is_change = header.request == backend_request::CONFIG_CHANGE_MSG;
        (is_change && !header.is_reply() && header.len == 0).then_some(BackendRequest::ConfigChange)
    }
}

/// Reads fields of a payload. Missing bytes read as 0; the callers check lengths.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn u16(&self, at: usize) -> u16 {
        self.0.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_ne_bytes)
    }

    pub(super) fn u32(&self, at: usize) -> u32 {
        self.0.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
    }

    pub(super) fn u64(&self, at: usize) -> u64 {
        self.0.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
    }
}
