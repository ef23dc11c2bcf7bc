//! The ABI of `/dev/ublk-control`: commands, device information, device states.

use super::{Features, READ, READ_WRITE, ioctl_number};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A control command: the `cmd_op` of its SQE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum ControlOp {
    /// Get the CPUs that a queue serves, as a bit mask.
    GetQueueAffinity = 0x01,
    /// Get a device's [`DeviceInfo`].
    GetDevInfo = 0x02,
    /// Create a device and its character device.
    AddDev = 0x04,
    /// Remove a device; waits until its character device is closed.
    DelDev = 0x05,
    /// Create the block device; waits until every tag has been fetched.
    StartDev = 0x06,
    /// Remove the block device.
    StopDev = 0x07,
    /// Set the parameters of the block device, before it is started.
    SetParams = 0x08,
    /// Get the parameters of the block device.
    GetParams = 0x09,
    /// Announce that a new server is about to take over.
    StartUserRecovery = 0x10,
    /// Report that the new server has fetched every tag.
    EndUserRecovery = 0x11,
    /// [`GetDevInfo`](ControlOp::GetDevInfo) that also works for unprivileged devices.
    GetDevInfo2 = 0x12,
    /// Get the features of the driver.
    GetFeatures = 0x13,
    /// Remove a device without waiting.
    DelDevAsync = 0x14,
    /// Change the size, in sectors.
    UpdateSize = 0x15,
    /// Return every fetched tag to the server, for a planned change of servers.
    QuiesceDev = 0x16,
    /// [`StopDev`](ControlOp::StopDev) unless the block device is open.
    TryStopDev = 0x17,
    /// Register memory shared with clients.
    RegBuf = 0x18,
    /// Unregister memory shared with clients.
    UnregBuf = 0x19,
}

impl ControlOp {
    /// All commands.
    pub const ALL: [ControlOp; 18] = [
        ControlOp::GetQueueAffinity,
        ControlOp::GetDevInfo,
        ControlOp::AddDev,
        ControlOp::DelDev,
        ControlOp::StartDev,
        ControlOp::StopDev,
        ControlOp::SetParams,
        ControlOp::GetParams,
        ControlOp::StartUserRecovery,
        ControlOp::EndUserRecovery,
        ControlOp::GetDevInfo2,
        ControlOp::GetFeatures,
        ControlOp::DelDevAsync,
        ControlOp::UpdateSize,
        ControlOp::QuiesceDev,
        ControlOp::TryStopDev,
        ControlOp::RegBuf,
        ControlOp::UnregBuf,
    ];

    /// Returns the ioctl-encoded number, which every kernel since 6.5 accepts.
    pub const fn code(self) -> u32 {
        let direction = match self {
            ControlOp::GetQueueAffinity
            | ControlOp::GetDevInfo
            | ControlOp::GetParams
            | ControlOp::GetDevInfo2
            | ControlOp::GetFeatures
            | ControlOp::DelDevAsync => READ,
            _ => READ_WRITE,
        };
        ioctl_number(direction, self as u8, size_of::<ControlCommand>())
    }

    /// Returns the bare number, which kernels before 6.5 require, or `None` for commands that they lack.
    pub const fn legacy_code(self) -> Option<u32> {
        let number = self as u8;
        if number <= ControlOp::GetDevInfo2 as u8 { Some(number as u32) } else { None }
    }

    /// Returns the kernel's name without its prefix.
    pub const fn name(self) -> &'static str {
        match self {
            ControlOp::GetQueueAffinity => "GET_QUEUE_AFFINITY",
            ControlOp::GetDevInfo => "GET_DEV_INFO",
            ControlOp::AddDev => "ADD_DEV",
            ControlOp::DelDev => "DEL_DEV",
            ControlOp::StartDev => "START_DEV",
            ControlOp::StopDev => "STOP_DEV",
            ControlOp::SetParams => "SET_PARAMS",
            ControlOp::GetParams => "GET_PARAMS",
            ControlOp::StartUserRecovery => "START_USER_RECOVERY",
            ControlOp::EndUserRecovery => "END_USER_RECOVERY",
            ControlOp::GetDevInfo2 => "GET_DEV_INFO2",
            ControlOp::GetFeatures => "GET_FEATURES",
            ControlOp::DelDevAsync => "DEL_DEV_ASYNC",
            ControlOp::UpdateSize => "UPDATE_SIZE",
            ControlOp::QuiesceDev => "QUIESCE_DEV",
            ControlOp::TryStopDev => "TRY_STOP_DEV",
            ControlOp::RegBuf => "REG_BUF",
            ControlOp::UnregBuf => "UNREG_BUF",
        }
    }
}

impl std::fmt::Display for ControlOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// `struct ublksrv_ctrl_cmd`: the payload of a control command's SQE.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ControlCommand {
    /// The device; `u32::MAX` in ADD_DEV selects any free number.
    pub dev_id: u32,
    /// The queue; `u16::MAX` for commands that do not refer to a queue.
    pub queue_id: u16,
    /// Length of the buffer at `addr`, in bytes.
    pub len: u16,
    /// Address of a buffer of this process, for input or output.
    pub addr: u64,
    /// Inline argument.
    pub data: [u64; 1],
    /// For unprivileged devices: length of the character device's path at the start of the buffer, with its
    /// terminating zero.
    pub dev_path_len: u16,
    /// Must be zero.
    pub pad: u16,
    /// Must be zero.
    pub reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`: information about a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Number of hardware queues.
    pub nr_hw_queues: u16,
    /// Tags per queue.
    pub queue_depth: u16,
    /// State of the device: a [`State`].
    pub state: u16,
    /// Bytes of a descriptor, if the server sets it with
    /// [`Features::IO_DESC_SIZE`](super::Features::IO_DESC_SIZE). We pass 0; since Linux 7.3 the driver
    /// returns the size.
    pub io_desc_size: u16,
    /// Largest request in bytes.
    pub max_io_buf_bytes: u32,
    /// Number of the device: the N of `/dev/ublkbN` and `/dev/ublkcN`.
    pub dev_id: u32,
    /// Process id of the server in its own PID namespace; -1 if there is none.
    pub ublksrv_pid: i32,
    /// Must be zero.
    pub pad1: u32,
    /// [`Features`] in use.
    pub flags: u64,
    /// Private flags of the server; the driver stores them without interpretation.
    pub ublksrv_flags: u64,
    /// User id of the device's creator.
    pub owner_uid: u32,
    /// Group id of the device's creator.
    pub owner_gid: u32,
    /// Must be zero.
    pub reserved1: u64,
    /// Must be zero.
    pub reserved2: u64,
}

impl DeviceInfo {
    /// Returns the features in use.
    pub const fn features(&self) -> Features {
        Features(self.flags)
    }

    /// Returns the state of the device, or `None` if it is unknown.
    pub const fn state(&self) -> Option<State> {
        State::from_number(self.state)
    }
}

/// State of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum State {
    /// No block device exists.
    Dead = 0,
    /// The block device exists and has a server.
    Live = 1,
    /// The block device exists without a server; requests wait.
    Quiesced = 2,
    /// The block device exists without a server; requests fail.
    FailIo = 3,
}

impl State {
    /// Converts the driver's number.
    pub const fn from_number(number: u16) -> Option<State> {
        match number {
            0 => Some(State::Dead),
            1 => Some(State::Live),
            2 => Some(State::Quiesced),
            3 => Some(State::FailIo),
            _ => None,
        }
    }

    /// Returns the name in listings.
    pub const fn name(self) -> &'static str {
        match self {
            State::Dead => "dead",
            State::Live => "live",
            State::Quiesced => "quiesced",
            State::FailIo => "fail-io",
        }
    }
}

/// `struct ublk_shmem_buf_reg`: memory to register for [`Features::SHMEM_ZC`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShmemBufferReg {
    /// Address in this process.
    pub addr: u64,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
    /// [`ShmemBufferReg::READ_ONLY`] or 0.
    pub flags: u32,
    /// Must be zero.
    pub reserved: u32,
}

impl ShmemBufferReg {
    /// Pin the memory without write access: for memory that is sealed against writing.
    pub const READ_ONLY: u32 = 1;
}
