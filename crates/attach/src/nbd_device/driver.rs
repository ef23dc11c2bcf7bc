//! The kernel's nbd driver, as a small trait, and its implementation over generic netlink and sysfs.
//!
//! Calls may block in the kernel, so they run on threads of the blocking pool.
//!
//! Source of the behaviour: drivers/block/nbd.c; [`netlink`](super::netlink) has the messages.

use super::netlink::{
    Answer, Attributes, CONTROL_FAMILY, Command, FAMILY_ID, FAMILY_NAME, GET_FAMILY, answers, attribute,
    attributes, find, number_u32, request,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Arguments of `NBD_CMD_CONNECT`. Times are in seconds.
#[derive(Clone, Debug)]
pub(super) struct Connect {
    /// Number of the device; `None`: any free one.
    pub(super) number: Option<u32>,
    pub(super) size: u64,
    pub(super) block_size: u64,
    /// `NBD_FLAG_*`.
    pub(super) flags: u64,
    /// Time after which a request without a reply is sent on another connection.
    pub(super) timeout: u64,
    /// Time for which requests wait when no connection is alive.
    pub(super) dead_timeout: u64,
    /// Whether the kernel removes the device when it is disconnected.
    pub(super) destroy: bool,
    /// Identifier shown in sysfs, which must be given to reconfigure the device.
    pub(super) backend: String,
}

/// Arguments of `NBD_CMD_RECONFIGURE`.
#[derive(Clone, Debug)]
pub(super) struct Reconfigure {
    pub(super) number: u32,
    pub(super) backend: String,
    /// New size in bytes.
    pub(super) size: Option<u64>,
    /// New dead-connection timeout in seconds.
    pub(super) dead_timeout: Option<u64>,
}

/// State of a device in sysfs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DeviceState {
    /// Whether it is connected, with or without live sockets.
    pub(super) connected: bool,
    /// Identifier that it was connected with.
    pub(super) backend: Option<String>,
}

/// The kernel's nbd driver.
pub(super) trait Driver: Send + Sync {
    /// Connects a device. Returns its number.
    fn connect(&self, call: &Connect, sockets: &[OwnedFd]) -> Result<u32, Errno>;

    /// Replaces dead sockets of a device, or changes its size or timeout. The kernel drops sockets for
    /// which it has no dead one, and their other ends see end of file.
    fn reconfigure(&self, call: &Reconfigure, sockets: &[OwnedFd]) -> Result<(), Errno>;

    /// Writes the device's page cache and the server's cache to stable storage (fsync).
    fn sync(&self, number: u32) -> Result<(), Errno>;

    /// Disconnects a device from its server. Requests in flight fail.
    fn disconnect(&self, number: u32) -> Result<(), Errno>;

    /// Whether the device exists and is connected.
    fn is_connected(&self, number: u32) -> Result<bool, Errno>;

    /// Reads a device's state; `None`: there is no such device.
    fn state(&self, number: u32) -> Option<DeviceState>;

    /// Lists the numbers of all devices.
    fn numbers(&self) -> Vec<u32>;

    /// Whether the device or a partition of it is mounted in this namespace, is swap, or has holders. Never
    /// blocks.
    fn is_mounted(&self, number: u32) -> bool;

    /// Whether another process has opened the device exclusively, in any namespace. Opening it may read from
    /// it.
    fn is_claimed(&self, number: u32) -> bool;
}

/// The kernel's driver.
#[derive(Default)]
pub(super) struct Kernel {
    sequence: AtomicU32,
}

impl Kernel {
    /// Sends one request and collects the attributes of its answers.
    fn call(&self, family: u16, command: u8, attributes: &Attributes) -> Result<Vec<Vec<u8>>, Errno> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )?;
        rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
        let sequence = self.sequence.fetch_add(1, Relaxed).wrapping_add(1);
        let message = request(family, command, sequence, attributes);
        let kernel = netlink::SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&socket, &message, SendFlags::empty(), &kernel)?;
        let (mut found, mut buffer) = (Vec::new(), vec![0; 32 << 10]);
        loop {
            let (_, len) = rustix::io::retry_on_intr(|| {
                rustix::net::recv(&socket, buffer.as_mut_slice(), RecvFlags::empty())
            })?;
            for answer in answers(&buffer[..len.min(buffer.len())], sequence) {
                match answer {
                    Answer::Data(data) => found.push(data.to_vec()),
                    Answer::End(0) => return Ok(found),
                    Answer::End(errno) => return Err(Errno::from_raw_os_error(errno)),
                }
            }
        }
    }

    /// Looks up the family number of nbd. `ENOENT`: the driver is not loaded.
    fn family(&self) -> Result<u16, Errno> {
        let name = Attributes::default().text(FAMILY_NAME, "nbd");
        let found = self.call(CONTROL_FAMILY, GET_FAMILY, &name)?;
        let id = found.iter().find_map(|data| find(data, FAMILY_ID));
        id.and_then(|id| id.try_into().ok()).map(u16::from_ne_bytes).ok_or(Errno::NOENT)
    }

    fn send(&self, command: Command, attributes: &Attributes) -> Result<Vec<Vec<u8>>, Errno> {
        self.call(self.family()?, command as u8, attributes)
    }
}

fn with_sockets(attributes: Attributes, sockets: &[OwnedFd]) -> Attributes {
    if sockets.is_empty() {
        return attributes;
    }
    let list = sockets.iter().fold(Attributes::default(), |list, socket| {
        let number = socket.as_fd().as_raw_fd().unsigned_abs();
        list.nest(attribute::SOCK_ITEM, Attributes::default().u32(attribute::SOCK_FD, number))
    });
    attributes.nest(attribute::SOCKETS, list)
}

fn sysfs(number: u32) -> PathBuf {
    PathBuf::from(format!("/sys/block/nbd{number}"))
}

/// `NBD_CFLAG_DESTROY_ON_DISCONNECT`.
const DESTROY_ON_DISCONNECT: u64 = 1;

impl Driver for Kernel {
    fn connect(&self, call: &Connect, sockets: &[OwnedFd]) -> Result<u32, Errno> {
        let mut attributes = Attributes::default();
        if let Some(number) = call.number {
            attributes = attributes.u32(attribute::INDEX, number);
        }
        attributes = attributes
            .u64(attribute::SIZE_BYTES, call.size)
            .u64(attribute::BLOCK_SIZE_BYTES, call.block_size)
            .u64(attribute::TIMEOUT, call.timeout)
            .u64(attribute::SERVER_FLAGS, call.flags)
            .u64(attribute::CLIENT_FLAGS, if call.destroy { DESTROY_ON_DISCONNECT } else { 0 })
            .u64(attribute::DEAD_CONN_TIMEOUT, call.dead_timeout)
            .text(attribute::BACKEND_IDENTIFIER, &call.backend);
        let found = self.send(Command::Connect, &with_sockets(attributes, sockets))?;
        let index = found.iter().find_map(|data| number_u32(find(data, attribute::INDEX)?, 0));
        index.or(call.number).ok_or(Errno::PROTO)
    }

    fn reconfigure(&self, call: &Reconfigure, sockets: &[OwnedFd]) -> Result<(), Errno> {
        let mut attributes = Attributes::default()
            .u32(attribute::INDEX, call.number)
            .text(attribute::BACKEND_IDENTIFIER, &call.backend);
        for (kind, value) in
            [(attribute::SIZE_BYTES, call.size), (attribute::DEAD_CONN_TIMEOUT, call.dead_timeout)]
        {
            if let Some(value) = value {
                attributes = attributes.u64(kind, value);
            }
        }
        self.send(Command::Reconfigure, &with_sockets(attributes, sockets)).map(drop)
    }

    fn sync(&self, number: u32) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let device = rustix::fs::open(format!("/dev/nbd{number}"), flags, Mode::empty())?;
        rustix::fs::fsync(device)
    }

    fn disconnect(&self, number: u32) -> Result<(), Errno> {
        self.send(Command::Disconnect, &Attributes::default().u32(attribute::INDEX, number)).map(drop)
    }

    fn is_connected(&self, number: u32) -> Result<bool, Errno> {
        let found = self.send(Command::Status, &Attributes::default().u32(attribute::INDEX, number))?;
        let lists = found.iter().filter_map(|data| find(data, attribute::DEVICE_LIST));
        let mut items = lists.flat_map(attributes).filter(|(kind, _)| *kind == attribute::DEVICE_ITEM);
        Ok(items.any(|(_, item)| {
            let index = find(item, attribute::DEVICE_INDEX).and_then(|index| number_u32(index, 0));
            let connected = find(item, attribute::DEVICE_CONNECTED).and_then(|value| value.first().copied());
            index == Some(number) && connected == Some(1)
        }))
    }

    fn state(&self, number: u32) -> Option<DeviceState> {
        let directory = sysfs(number);
        let backend = fs::read_to_string(directory.join("backend")).ok();
        directory.exists().then(|| DeviceState {
            // The file exists while the device is connected.
            connected: directory.join("pid").exists(),
            backend: backend.map(|text| text.trim_end_matches('\n').to_owned()),
        })
    }

    fn numbers(&self) -> Vec<u32> {
        let names = fs::read_dir("/sys/block").into_iter().flatten().flatten().map(|entry| entry.file_name());
        let mut numbers: Vec<u32> =
            names.filter_map(|name| name.to_str()?.strip_prefix("nbd")?.parse().ok()).collect();
        numbers.sort_unstable();
        numbers
    }

    fn is_mounted(&self, number: u32) -> bool {
        let directory = sysfs(number);
        let name = format!("nbd{number}");
        let parts = fs::read_dir(&directory).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_part = |path: &PathBuf| {
            path.file_name().and_then(|part| part.to_str()).is_some_and(|part| part.starts_with(&name))
        };
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        let is_used = |path: PathBuf| {
            let device = fs::read_to_string(path.join("dev")).unwrap_or_default();
            let holders = fs::read_dir(path.join("holders")).map_or(0, Iterator::count);
            let node = path.file_name().map(|name| format!("/dev/{}", name.to_string_lossy()));
            // In mountinfo the third field is the device number; in swaps the first is the node.
            holders > 0
                || mounts.lines().any(|line| line.split(' ').nth(2) == Some(device.trim_end()))
                || swaps.lines().any(|line| line.split_whitespace().next() == node.as_deref())
        };
        std::iter::once(directory.clone()).chain(parts.filter(is_part)).any(is_used)
    }

    fn is_claimed(&self, number: u32) -> bool {
        // A mount opens its block device exclusively, and so does a device stacked on it.
        let path = format!("/dev/nbd{number}");
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).is_err_and(|errno| errno == Errno::BUSY)
    }
}
