//! What goes through `/dev/ublk-control`: commands, device information, device states.

use super::{Features, READ, READ_WRITE, ioctl_number};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A control command: the `cmd_op` of its SQE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum ControlOp {
    /// The CPUs that a queue serves, as a bit mask.
    GetQueueAffinity = 0x01,
    /// A device's [`DeviceInfo`].
    GetDevInfo = 0x02,
    /// Make a device and its character device.
    AddDev = 0x04,
    /// Remove a device; waits until nobody has its character device open.
    DelDev = 0x05,
    /// Make the block device; waits until every tag was fetched.
    StartDev = 0x06,
    /// Take the block device away.
    StopDev = 0x07,
    /// Say what the block device is like. Before it is started.
    SetParams = 0x08,
    /// What it is like.
    GetParams = 0x09,
    /// A new server takes over.
    StartUserRecovery = 0x10,
    /// It has fetched every tag.
    EndUserRecovery = 0x11,
    /// [`GetDevInfo`](ControlOp::GetDevInfo) for unprivileged devices too.
    GetDevInfo2 = 0x12,
    /// What the driver can do.
    GetFeatures = 0x13,
    /// Remove a device without waiting.
    DelDevAsync = 0x14,
    /// A new size, in sectors.
    UpdateSize = 0x15,
    /// Give every fetched tag back to the server, for a planned change of server.
    QuiesceDev = 0x16,
    /// [`StopDev`](ControlOp::StopDev) unless someone has the block device open.
    TryStopDev = 0x17,
    /// Register memory that is shared with clients.
    RegBuf = 0x18,
    /// Take that back.
    UnregBuf = 0x19,
}

impl ControlOp {
    /// All of them.
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

    /// The ioctl-encoded number, which every kernel since 6.5 takes.
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

    /// The bare number, which is all that kernels before 6.5 take. `None` for what they do not have.
    pub const fn legacy_code(self) -> Option<u32> {
        let number = self as u8;
        if number <= ControlOp::GetDevInfo2 as u8 { Some(number as u32) } else { None }
    }

    /// The kernel's name, less its prefix.
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
    /// The device; `u32::MAX` in ADD_DEV: any that is free.
    pub dev_id: u32,
    /// The queue; `u16::MAX` when the command is about none.
    pub queue_id: u16,
    /// Length of the buffer at `addr`, in bytes.
    pub len: u16,
    /// A buffer of this process, in or out.
    pub addr: u64,
    /// What the command wants inline.
    pub data: [u64; 1],
    /// For unprivileged devices: how long the path of the character device is that stands at the start of
    /// the buffer, with its closing zero.
    pub dev_path_len: u16,
    /// Zero.
    pub pad: u16,
    /// Zero.
    pub reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`: a device as the driver knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Hardware queues.
    pub nr_hw_queues: u16,
    /// Tags of each.
    pub queue_depth: u16,
    /// A [`State`].
    pub state: u16,
    /// How long a descriptor is, in bytes, where that is not left to the driver with
    /// [`Features::IO_DESC_SIZE`](super::Features::IO_DESC_SIZE). We ask with 0; since Linux 7.3 the answer has it.
    pub io_desc_size: u16,
    /// The most bytes that one request may move.
    pub max_io_buf_bytes: u32,
    /// The N of `/dev/ublkbN` and `/dev/ublkcN`.
    pub dev_id: u32,
    /// The server's process, as its own PID namespace numbers it; -1 when there is none.
    pub ublksrv_pid: i32,
    /// Zero.
    pub pad1: u32,
    /// [`Features`] in use.
    pub flags: u64,
    /// The server's own; the driver keeps it and looks at none of it.
    pub ublksrv_flags: u64,
    /// Who made it.
    pub owner_uid: u32,
    /// Who made it.
    pub owner_gid: u32,
    /// Zero.
    pub reserved1: u64,
    /// Zero.
    pub reserved2: u64,
}

impl DeviceInfo {
    /// Its features.
    pub const fn features(&self) -> Features {
        Features(self.flags)
    }

    /// Its state; `None` for one that this header does not name.
    pub const fn state(&self) -> Option<State> {
        State::from_number(self.state)
    }
}

/// Where a device is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum State {
    /// There is no block device.
    Dead = 0,
    /// There is one and a server serves it.
    Live = 1,
    /// There is one, its server is gone, and requests wait.
    Quiesced = 2,
    /// There is one, its server is gone, and requests fail.
    FailIo = 3,
}

impl State {
    /// From the driver's number.
    pub const fn from_number(number: u16) -> Option<State> {
        match number {
            0 => Some(State::Dead),
            1 => Some(State::Live),
            2 => Some(State::Quiesced),
            3 => Some(State::FailIo),
            _ => None,
        }
    }

    /// As listings show it.
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
    /// Where it is in this process.
    pub addr: u64,
    /// How long, in whole pages.
    pub len: u64,
    /// [`ShmemBufferReg::READ_ONLY`] or 0.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

impl ShmemBufferReg {
    /// The driver pins it without the right to write: for memory sealed against writing.
    pub const READ_ONLY: u32 = 1;
}
