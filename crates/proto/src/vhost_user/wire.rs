//! vhost-user constants: request numbers, feature bits, sizes. This module has no logic.

/// Bytes of a message's header.
pub const HEADER_LEN: usize = 12;
/// Longest payload that a front-end sends: `VhostUserMemory` with eight regions takes 264 bytes, and
/// `VhostUserConfig` 268.
pub const PAYLOAD_MAX: usize = 512;
/// Longest message.
pub const MESSAGE_MAX: usize = HEADER_LEN + PAYLOAD_MAX;
/// Maximum number of file descriptors with a message (`VHOST_MEMORY_BASELINE_NREGIONS`).
pub const FDS_MAX: usize = 8;
/// Bytes of a memory region's description.
pub const REGION_LEN: usize = 32;
/// Longest part of the configuration space in a message (`VHOST_USER_MAX_CONFIG_SIZE`).
pub const CONFIG_MAX: usize = 256;
/// Bytes before the content in a message about the configuration space.
pub const CONFIG_HEADER_LEN: usize = 12;

/// Flags of a header.
pub mod flag {
    /// The version, in the lowest two bits.
    pub const VERSION: u32 = 1;
    /// Mask of the version.
    pub const VERSION_MASK: u32 = 3;
    /// The message is a reply.
    pub const REPLY: u32 = 1 << 2;
    /// The sender requests an acknowledgement (`VHOST_USER_PROTOCOL_F_REPLY_ACK`).
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// Requests of the front-end.
pub mod request {
    #![allow(missing_docs, reason = "the specification's own names")]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
}

/// Requests of the back-end.
pub mod backend_request {
    /// The device's configuration space has changed.
    pub const CONFIG_CHANGE_MSG: u32 = 2;
}

/// Protocol features.
pub mod protocol {
    #![allow(missing_docs, reason = "the specification's own names")]
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
    /// All protocol features that are useful for a block device.
    pub const ALL: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// Feature bits of vhost itself, which share a word with those of the device.
pub mod feature {
    /// The back-end logs the pages of guest memory that it writes (`VHOST_F_LOG_ALL`).
    pub const LOG_ALL: u64 = 1 << 26;
    /// The back-end knows protocol features (`VHOST_USER_F_PROTOCOL_FEATURES`).
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// The driver uses packed virtqueues (`VIRTIO_F_RING_PACKED`).
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Writes to the used ring are logged (`VHOST_VRING_F_LOG`).
pub const VRING_LOG: u32 = 1;
/// Mask of the ring's number in messages that carry a descriptor.
pub const VRING_INDEX_MASK: u64 = 0xff;
/// A message that may carry a descriptor carries none (`VHOST_USER_VRING_NOFD_MASK`).
pub const VRING_NO_FD: u64 = 1 << 8;
