//! The control commands: their arguments, time limits and errors.

use crate::abi::{ControlOp, DeviceInfo, Features, Params, ShmemBufferReg};
use crate::control::{Command, Control, Refusal};
use crate::kernel::char_path;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Time limit of commands that only query; they take almost no time on an idle machine.
const ASK: Duration = Duration::from_secs(10);
/// Time limit of creating a device, which takes some 10 ms, but hangs on some kernels.
const ADD: Duration = Duration::from_secs(10);
/// Time limit of starting a device, which waits until every tag is fetched, and on older kernels for the
/// partition scan.
const START: Duration = Duration::from_secs(30);
/// Time limit of stopping a device, which waits for requests in flight.
const STOP: Duration = Duration::from_secs(60);
/// Time limit of deleting a device, which waits until its character device is closed, and for other
/// deletions.
const DELETE: Duration = Duration::from_secs(30);
/// Time limit of waiting for a node, which devtmpfs or udev creates.
const NODE: Duration = Duration::from_secs(15);
/// Device number that selects any free number.
const ANY: u32 = u32::MAX;
/// Maximum number of CPUs in an affinity mask.
const CPUS_MAX: usize = 8192;

/// Parameters of a new device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewDevice {
    /// Number of the device; `None` selects any free one.
    pub number: Option<u32>,
    /// Number of hardware queues; the driver creates at most one per CPU.
    pub queues: u16,
    /// Tags per queue.
    pub depth: u16,
    /// Largest request in bytes.
    pub io_bytes_max: u32,
    /// Requested features. The driver ignores unknown ones.
    pub features: Features,
    /// Value that the driver stores for the server.
    pub server_flags: u64,
}

/// The error of a failed control command.
#[derive(Debug)]
pub struct DriverError {
    op: ControlOp,
    device: u32,
    why: Refusal,
}

impl DriverError {
    /// Returns the driver's error as a positive errno, if the driver answered.
    pub fn errno(&self) -> Option<i32> {
        match self.why {
            Refusal::Errno(errno) => Some(errno),
            Refusal::NoAnswer(_) => None,
        }
    }

    /// Returns whether the device is in use.
    pub fn is_busy(&self) -> bool {
        self.errno() == Some(libc::EBUSY)
    }

    /// Returns whether the command may still be in flight, which would keep the process from exiting.
    pub fn is_stuck(&self) -> bool {
        matches!(self.why, Refusal::NoAnswer(_))
    }

    /// Returns advice for the user.
    fn advice(&self) -> &'static str {
        let Refusal::Errno(errno) = self.why else {
            return match self.op {
                ControlOp::AddDev => {
                    "this kernel's driver hangs: see dmesg; restart the machine, or export with --loop or --nbd"
                }
                ControlOp::DelDev => "someone has its character device open: end that process",
                ControlOp::StartDev | ControlOp::EndUserRecovery => "its queues were not served: see the log",
                _ => "requests in flight do not end, or the driver hangs: see dmesg",
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
            (ControlOp::QuiesceDev, libc::EBUSY) => "requests in flight do not end: try again",
            (ControlOp::StartUserRecovery, libc::EBUSY) => {
                "its server is still there: end that process first"
            }
            (ControlOp::StartUserRecovery, libc::EINVAL) => {
                "it was created without recovery: del it and add it again"
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

/// Issues control commands. All methods block, with a time limit.
#[derive(Clone)]
pub struct Driver {
    control: Arc<dyn Control>,
    /// A device known to be privileged, so that its path is not needed.
    plain: Option<u32>,
}

impl Driver {
    /// Creates a driver that uses `control`.
    pub fn new(control: Arc<dyn Control>) -> Driver {
        Driver { control, plain: None }
    }

    /// Returns a driver for commands to the device of `info`, which then need no query for its features.
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

    /// Returns whether a command needs the path of the character device: it does for unprivileged devices,
    /// and to find out whether a device is unprivileged. If even that query is denied, the path is passed
    /// as well, because the device of another user is refused either way.
    fn wants_path(&self, op: ControlOp, device: u32) -> bool {
        match op {
            ControlOp::GetDevInfo2 => true,
            ControlOp::AddDev | ControlOp::GetDevInfo => false,
            _ if self.plain == Some(device) => false,
            _ => !self.info(device).is_ok_and(|info| !info.features().has(Features::UNPRIVILEGED_DEV)),
        }
    }

    /// Returns the features of the driver. Returns `None` if it is older than Linux 6.5 and cannot report
    /// them; only the features granted to a new device then show what it supports.
    ///
    /// # Errors
    /// [`DriverError`], here and below.
    pub fn features(&self) -> Result<Option<Features>, DriverError> {
        match self.exchange(ControlOp::GetFeatures, 0, 0, vec![0; 8], ASK) {
            Ok((_, bits)) => Ok(Some(Features(u64::read_from_bytes(&bits).unwrap_or_default()))),
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENODEV)) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Creates a device, and returns its information. Features that the driver did not grant are missing,
    /// and there may be fewer queues than requested.
    ///
    /// # Errors
    /// `EEXIST` if the number is in use.
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

    /// Returns information about a device.
    ///
    /// # Errors
    /// `ENODEV` if it does not exist.
    pub fn info(&self, device: u32) -> Result<DeviceInfo, DriverError> {
        let room = vec![0; size_of::<DeviceInfo>()];
        match self.exchange(ControlOp::GetDevInfo2, device, 0, room.clone(), ASK) {
            Ok((_, answer)) => info_of(&answer, ControlOp::GetDevInfo2, device),
            // Drivers before Linux 6.3 have no unprivileged devices. A character device without a node has
            // no permissions to check yet.
            Err(error) if matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOENT)) => {
                let (_, answer) = self.exchange(ControlOp::GetDevInfo, device, 0, room, ASK)?;
                info_of(&answer, ControlOp::GetDevInfo, device)
            }
            Err(error) => Err(error),
        }
    }

    /// Sets the parameters of a device, before it is started.
    ///
    /// # Errors
    /// `EINVAL` if the driver does not accept them.
    pub fn set_params(&self, device: u32, params: &Params) -> Result<(), DriverError> {
        self.exchange(ControlOp::SetParams, device, 0, params.as_bytes().to_vec(), ASK).map(drop)
    }

    /// Returns the parameters of a device, including its device numbers. Parts unknown to an older driver
    /// are missing in the types.
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn params(&self, device: u32) -> Result<Params, DriverError> {
        let room = Params::new().as_bytes().to_vec();
        let (_, answer) = self.exchange(ControlOp::GetParams, device, 0, room, ASK)?;
        Ok(Params::read_from_bytes(&answer).unwrap_or_default())
    }

    /// Returns the CPUs whose requests a queue gets, in ascending order.
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn affinity(&self, device: u32, queue: u16) -> Result<Vec<usize>, DriverError> {
        let room = vec![0; CPUS_MAX / 8];
        let (_, mask) = self.exchange(ControlOp::GetQueueAffinity, device, queue.into(), room, ASK)?;
        let is_set = |cpu: &usize| mask.get(cpu / 8).is_some_and(|byte| byte & 1 << (cpu % 8) != 0);
        Ok((0..CPUS_MAX).filter(is_set).collect())
    }

    /// Waits until an unprivileged device's node belongs to its owner, which is required for all later
    /// commands.
    ///
    /// # Errors
    /// An error of the operating system: `EACCES` if the owner is not changed in time.
    pub fn await_owned(&self, device: u32) -> io::Result<()> {
        self.control.await_owned(device, NODE)
    }

    /// Opens the character device, once it has a node.
    ///
    /// # Errors
    /// An error of the operating system: `EBUSY` while another server has it open.
    pub fn open(&self, device: u32) -> io::Result<OwnedFd> {
        self.control.open(device, NODE)
    }

    /// Creates the block device. Every tag must have been fetched, or be about to be fetched. `server` is
    /// the process that has the character device open. The block device's node normally exists when this
    /// returns.
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn start(&self, device: u32, server: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::StartDev, device, server.into(), START)?;
        // If the node is still missing, the device can be used by its number.
        let _ = self.control.await_node(device, NODE);
        Ok(())
    }

    /// Removes the block device, even if it is in use.
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn stop(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::StopDev, device, 0, STOP).map(drop)
    }

    /// Removes the block device unless it is open.
    ///
    /// # Errors
    /// `EBUSY` if it is open; `EOPNOTSUPP` if the driver lacks the command.
    pub fn try_stop(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::TryStopDev, device, 0, STOP).map(drop)
    }

    /// Removes a stopped device, and waits until its number is free.
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn delete(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::DelDev, device, 0, DELETE).map(drop)
    }

    /// Removes a stopped device without waiting.
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn delete_later(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::DelDevAsync, device, 0, ASK).map(drop)
    }

    /// Announces that a new server is about to open the character device.
    ///
    /// # Errors
    /// `EBUSY` while the last server exists, or is being cleaned up; `EINVAL` if the device was created
    /// without recovery.
    pub fn start_recovery(&self, device: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::StartUserRecovery, device, 0, ASK).map(drop)
    }

    /// Ends recovery after the new server has fetched every tag, or is about to do so: requests then
    /// continue.
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn end_recovery(&self, device: u32, server: u32) -> Result<(), DriverError> {
        self.execute(ControlOp::EndUserRecovery, device, server.into(), START).map(drop)
    }

    /// Stops the delivery of requests, and returns idle tags to the server, so that it can exit without a
    /// request in flight. Requires [`Features::QUIESCE`].
    ///
    /// # Errors
    /// `EBUSY` if a queue had no idle tag within `limit`.
    pub fn quiesce(&self, device: u32, limit: Duration) -> Result<(), DriverError> {
        let millis = limit.as_millis().clamp(1, u32::MAX.into()) as u64;
        self.execute(ControlOp::QuiesceDev, device, millis, limit + ASK).map(drop)
    }

    /// Changes the size of a block device, in sectors. Requires [`Features::UPDATE_SIZE`].
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn update_size(&self, device: u32, sectors: u64) -> Result<(), DriverError> {
        self.execute(ControlOp::UpdateSize, device, sectors, STOP).map(drop)
    }

    /// Registers memory shared with clients: `len` bytes at `addr` of this process. Requests whose data is
    /// in that memory then refer to it instead of being copied. Returns the index of the memory. Requires
    /// [`Features::SHMEM_ZC`].
    ///
    /// # Errors
    /// The driver refused the command: see [`DriverError`].
    pub fn share(&self, device: u32, addr: u64, len: u64) -> Result<u16, DriverError> {
        let memory = ShmemBufferReg { addr, len, ..ShmemBufferReg::default() };
        let (index, _) = self.exchange(ControlOp::RegBuf, device, 0, memory.as_bytes().to_vec(), ADD)?;
        Ok(index as u16)
    }

    /// Unregisters shared memory.
    ///
    /// # Errors
    /// `ENOENT` if no memory has this index.
    pub fn unshare(&self, device: u32, index: u16) -> Result<(), DriverError> {
        self.execute(ControlOp::UnregBuf, device, index.into(), ASK).map(drop)
    }

    /// Returns the numbers of all devices, including those of other processes.
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
