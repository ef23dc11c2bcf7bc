//! The control commands with their meanings: what each is given, how long it may take, and what a refusal means.

use crate::abi::{ControlOp, DeviceInfo, Features, Params, ShmemBufferReg};
use crate::control::{Command, Control, Refusal};
use crate::kernel::char_path;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// What only asks takes no time, but for the machine's having some for it.
const ASK: Duration = Duration::from_secs(10);
/// Making a device takes some 10 ms. On some kernels it never ends.
const ADD: Duration = Duration::from_secs(10);
/// Starting one waits for every tag to be fetched, and on older kernels for its partitions to be read.
const START: Duration = Duration::from_secs(30);
/// Stopping one waits for requests under way.
const STOP: Duration = Duration::from_secs(60);
/// Deleting one waits for whoever has its character device open, and behind others that are deleted meanwhile.
const DELETE: Duration = Duration::from_secs(30);
/// A node comes as soon as devtmpfs or udev has made it.
const NODE: Duration = Duration::from_secs(15);
/// Any number that is free.
const ANY: u32 = u32::MAX;
/// The CPUs that an affinity mask may name.
const CPUS_MAX: usize = 8192;

/// A device that shall be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewDevice {
    /// Its number; `None`: any that is free.
    pub number: Option<u32>,
    /// Hardware queues; the driver makes no more than there are CPUs.
    pub queues: u16,
    /// Tags of each.
    pub depth: u16,
    /// The most bytes that one request may move.
    pub io_bytes_max: u32,
    /// What it shall use. The driver leaves out what it does not know.
    pub features: Features,
    /// A word that the driver keeps for whoever serves the device.
    pub server_flags: u64,
}

/// Why the driver did not do what it was asked for.
#[derive(Debug)]
pub struct DriverError {
    op: ControlOp,
    device: u32,
    why: Refusal,
}

impl DriverError {
    /// The driver's answer, if it gave one: a positive errno.
    pub fn errno(&self) -> Option<i32> {
        match self.why {
            Refusal::Errno(errno) => Some(errno),
            Refusal::NoAnswer(_) => None,
        }
    }

    /// Whether someone is in the way.
    pub fn is_busy(&self) -> bool {
        self.errno() == Some(libc::EBUSY)
    }

    /// Whether the command may still be under way, and would keep its process from ending.
    pub fn is_stuck(&self) -> bool {
        matches!(self.why, Refusal::NoAnswer(_))
    }

    /// What its user can do about it.
    fn advice(&self) -> &'static str {
        let Refusal::Errno(errno) = self.why else {
            return match self.op {
                ControlOp::AddDev => {
                    "this kernel's driver hangs: see dmesg; restart the machine, or export with --loop or --nbd"
                }
                ControlOp::DelDev => "someone has its character device open: end that process",
                ControlOp::StartDev | ControlOp::EndUserRecovery => "its queues were not served: see the log",
                _ => "requests under way do not end, or the driver hangs: see dmesg",
            };
        };
        match (self.op, errno) {
            (_, libc::EPERM) => "run as root, or add it with unprivileged",
            (ControlOp::AddDev, libc::EEXIST) => "choose another number, or --ublk without one",
            (ControlOp::AddDev, libc::EACCES) => {
                "there are as many unprivileged devices as are allowed: see ublk_drv.ublks_max"
            }
            (ControlOp::AddDev, libc::ENOSPC) => "no device number is free",
            (ControlOp::AddDev, libc::EINVAL) => {
                "the driver does not take these options together: see docs/ublk.md"
            }
            (ControlOp::AddDev, libc::ENOMEM) => "choose fewer queues or a smaller depth",
            (ControlOp::SetParams, libc::EINVAL) => "the driver does not take these limits: see --limits",
            (ControlOp::SetParams, libc::EACCES) => "it is started already",
            (ControlOp::StartDev, libc::EEXIST) => "it is started already",
            (ControlOp::TryStopDev, libc::EBUSY) => "it is in use: unmount it, or del --force",
            (ControlOp::QuiesceDev, libc::EBUSY) => "requests under way do not end: try again",
            (ControlOp::StartUserRecovery, libc::EBUSY) => {
                "its server is still there: end that process first"
            }
            (ControlOp::StartUserRecovery, libc::EINVAL) => {
                "it was made without recovery: del it and add it again"
            }
            (ControlOp::RegBuf, libc::EINVAL | libc::EFAULT) => {
                "the driver does not take that memory: see dmesg"
            }
            (ControlOp::RegBuf, libc::EEXIST) => "it has that memory already",
            (_, libc::ENODEV) => "there is no such device: see blockyard list",
            (_, libc::EOPNOTSUPP) => "this kernel's driver does not know it",
            _ => "see dmesg",
        }
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ublk {}", self.op)?;
        if self.device != ANY {
            write!(f, " of device {}", self.device)?;
        }
        write!(f, ": {} ({})", self.why, self.advice())
    }
}

impl std::error::Error for DriverError {}

/// A driver to give commands to. All of them block for as long as they take, which is bounded.
#[derive(Clone)]
pub struct Driver {
    control: Arc<dyn Control>,
    /// A device that need not be named by its path, as its maker knows.
    plain: Option<u32>,
}

impl Driver {
    /// Through that.
    pub fn new(control: Arc<dyn Control>) -> Driver {
        Driver { control, plain: None }
    }

    /// The same for whoever has a device in hand: what it is need not be asked before each command.
    pub fn knowing(&self, info: &DeviceInfo) -> Driver {
        let plain = (!info.features().has(Features::UNPRIVILEGED_DEV)).then_some(info.dev_id);
        Driver { plain, ..self.clone() }
    }

    fn execute(&self, op: ControlOp, device: u32, data: u64, limit: Duration) -> Result<u32, DriverError> {
        self.exchange(op, device, data, Vec::new(), limit).map(|(result, _)| result)
    }

    fn exchange(
        &self,
        op: ControlOp,
        device: u32,
        data: u64,
        buffer: Vec<u8>,
        limit: Duration,
    ) -> Result<(u32, Vec<u8>), DriverError> {
        let about_none = device == ANY || op == ControlOp::GetFeatures;
        let path = (!about_none && self.wants_path(op, device)).then(|| char_path(device));
        let command = Command { op, device, data, buffer, path, limit };
        self.control.execute(command).map_err(|why| DriverError { op, device, why })
    }

    /// Whether a command has to name the character device: for unprivileged ones, and for the question whether
    /// it is one. Who may not even ask that has to name it, too: a device that others have made for themselves says
    /// no either way.
    fn wants_path(&self, op: ControlOp, device: u32) -> bool {
        match op {
            ControlOp::GetDevInfo2 => true,
            ControlOp::AddDev | ControlOp::GetDevInfo => false,
            _ if self.plain == Some(device) => false,
            _ => !self.info(device).is_ok_and(|info| !info.features().has(Features::UNPRIVILEGED_DEV)),
        }
    }

    /// What it offers. `None`: it is older than Linux 6.5 and cannot say; what it grants to a device that is made
    /// is the answer then.
    ///
    /// # Errors
    /// See [`DriverError`], here and below.
    pub fn features(&self) -> Result<Option<Features>, DriverError> {
        match self.exchange(ControlOp::GetFeatures, 0, 0, vec![0; 8], ASK) {
            Ok((_, bits)) => Ok(Some(Features(u64::read_from_bytes(&bits).unwrap_or_default()))),
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV)) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Make a device: what came of it. Whatever the driver did not grant is missing in its features, and its
    /// queues may be fewer.
    ///
    /// # Errors
    /// `EEXIST` when the number is taken.
    pub fn add(&self, new: &NewDevice) -> Result<DeviceInfo, DriverError> {
        let number = new.number.unwrap_or(ANY);
        let info = DeviceInfo {
            nr_hw_queues: new.queues,
            queue_depth: new.depth,
            max_io_buf_bytes: new.io_bytes_max,
            dev_id: number,
            flags: new.features.0,
            ublksrv_flags: new.server_flags,
            ublksrv_pid: -1,
            ..DeviceInfo::default()
        };
        let (_, answer) = self.exchange(ControlOp::AddDev, number, 0, info.as_bytes().to_vec(), ADD)?;
        info_of(&answer, ControlOp::AddDev, number)
    }

    /// A device as the driver knows it.
    ///
    /// # Errors
    /// `ENODEV` when there is none.
    pub fn info(&self, device: u32) -> Result<DeviceInfo, DriverError> {
        let room = vec![0; size_of::<DeviceInfo>()];
        match self.exchange(ControlOp::GetDevInfo2, device, 0, room.clone(), ASK) {
            Ok((_, answer)) => info_of(&answer, ControlOp::GetDevInfo2, device),
            // Drivers before Linux 6.3 have no unprivileged devices; a character device that has no node yet has
            // no permissions to check.
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOENT)) => {
                let (_, answer) = self.exchange(ControlOp::GetDevInfo, device, 0, room, ASK)?;
                info_of(&answer, ControlOp::GetDevInfo, device)
            }
            Err(error) => Err(error),
        }
    }

    /// Say what a device is like, before it is started.
    ///
    /// # Errors
    /// `EINVAL` when the driver does not take it.
    pub fn set_params(&self, device: u32, params: &Params) -> Result<(), DriverError> {
        self.exchange(ControlOp::SetParams, device, 0, params.as_bytes().to_vec(), ASK).map(drop)
    }

    /// What a device is like, with its device numbers. What an older driver does not know is not in its types.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn params(&self, device: u32) -> Result<Params, DriverError> {
        let room = Params::new().as_bytes().to_vec();
        let (_, answer) = self.exchange(ControlOp::GetParams, device, 0, room, ASK)?;
        Ok(Params::read_from_bytes(&answer).unwrap_or_default())
    }

    /// The CPUs whose requests a queue gets, in ascending order.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn affinity(&self, device: u32, queue: u16) -> Result<Vec<usize>, DriverError> {
        let room = vec![0; CPUS_MAX / 8];
        let (_, mask) = self.exchange(ControlOp::GetQueueAffinity, device, queue.into(), room, ASK)?;
        let is_set = |cpu: &usize| mask.get(cpu / 8).is_some_and(|byte| byte & 1 << (cpu % 8) != 0);
        Ok((0..CPUS_MAX).filter(is_set).collect())
    }

    /// Wait until an unprivileged device's node was given to its owner, who needs it for every command from here on.
    ///
    /// # Errors
    /// The operating system's: `EACCES` when nobody gives it to us.
    pub fn await_owned(&self, device: u32) -> io::Result<()> {
        self.control.await_owned(device, NODE)
    }

    /// Open the character device, once it has a node.
    ///
    /// # Errors
    /// The operating system's: `EBUSY` while another server has it.
    pub fn open(&self, device: u32) -> io::Result<OwnedFd> {
        self.control.open(device, NODE)
    }

    /// Make the block device. Every tag must have been fetched, or be about to; `server`: the process that has
    /// the character device open. Its node is there when this returns.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn start(&self, device: u32, server: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::StartDev, device, server.into(), START)?;
        // Who has no node of it can still use its number.
        let _ = self.control.await_node(device, NODE);
        Ok(())
    }

    /// Take the block device away, whoever uses it.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn stop(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::StopDev, device, 0, STOP).map(drop)
    }

    /// Take the block device away unless someone has it open.
    ///
    /// # Errors
    /// `EBUSY`: someone has. `EOPNOTSUPP`: the driver cannot.
    pub fn try_stop(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::TryStopDev, device, 0, STOP).map(drop)
    }

    /// Remove a device that was stopped, and wait until its number is free.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn delete(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::DelDev, device, 0, DELETE).map(drop)
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn delete_later(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::DelDevAsync, device, 0, ASK).map(drop)
    }

    /// A new server is about to open the character device.
    ///
    /// # Errors
    /// `EBUSY` while the last one is there, or is being cleared away; `EINVAL` when it cannot be recovered.
    pub fn start_recovery(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::StartUserRecovery, device, 0, ASK).map(drop)
    }

    /// It has fetched every tag, or is about to: requests go on.
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn end_recovery(&self, device: u32, server: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::EndUserRecovery, device, server.into(), START).map(drop)
    }

    /// Hand out no more requests, and give the server its idle tags back, so that it can end without one under
    /// way. Needs [`Features::QUIESCE`].
    ///
    /// # Errors
    /// `EBUSY`: in `limit` no queue had an idle tag.
    pub fn quiesce(&self, device: u32, limit: Duration) -> Result<(), DriverError> {
        let millis = limit.as_millis().clamp(1, u32::MAX.into()) as u64;
        self.execute(ControlOp::QuiesceDev, device, millis, limit + ASK).map(drop)
    }

    /// Change the size of a block device, in sectors. Needs [`Features::UPDATE_SIZE`].
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn update_size(&self, device: u32, sectors: u64) -> Result<(), DriverError> {
        self.execute(ControlOp::UpdateSize, device, sectors, STOP).map(drop)
    }

    /// Have requests of clients whose memory is this told of by their place in it. `addr`: where this process has it,
    /// `len` bytes of it. What such places are in. Needs [`Features::SHMEM_ZC`].
    ///
    /// # Errors
    /// See [`DriverError`].
    pub fn share(&self, device: u32, addr: u64, len: u64) -> Result<u16, DriverError> {
        let memory = ShmemBufferReg { addr, len, ..ShmemBufferReg::default() };
        let (index, _) = self.exchange(ControlOp::RegBuf, device, 0, memory.as_bytes().to_vec(), ADD)?;
        Ok(index as u16)
    }

    /// Take that back.
    ///
    /// # Errors
    /// `ENOENT` when there is none of that number.
    pub fn unshare(&self, device: u32, index: u16) -> Result<(), DriverError> {
        self.execute(ControlOp::UnregBuf, device, index.into(), ASK).map(drop)
    }

    /// The numbers of all devices, made by whomever.
    pub fn devices(&self) -> Vec<u32> {
        self.control.devices()
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

fn info_of(answer: &[u8], op: ControlOp, device: u32) -> Result<DeviceInfo, DriverError> {
    DeviceInfo::read_from_prefix(answer).map(|(info, _)| info).map_err(|_| DriverError {
        op,
        device,
        why: Refusal::Errno(libc::EPROTO),
    })
}
