//! The kernel's nbd driver, as the export needs it: a small trait, and its only product implementation, which
//! speaks generic netlink and reads sysfs. Calls wait for the kernel: they run on threads that may.
//!
//! Source of the behaviour: drivers/block/nbd.c; `netlink` has the bytes.

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

/// What a new connection between a device and its server looks like to the kernel. Times are in seconds.
#[derive(Clone, Debug)]
pub(super) struct Connect {
    /// The device; `None`: any that is free.
    pub(super) number: Option<u32>,
    pub(super) size: u64,
    pub(super) block_size: u64,
    /// `NBD_FLAG_*`.
    pub(super) flags: u64,
    /// After which a request that was not answered is sent on another connection.
    pub(super) timeout: u64,
    /// How long requests wait for a new connection when there is none.
    pub(super) dead_timeout: u64,
    /// The device goes when it is disconnected.
    pub(super) destroy: bool,
    /// Shown in sysfs; whoever reconfigures the device must know it.
    pub(super) backend: String,
}

/// What is changed on a device that is connected.
#[derive(Clone, Debug)]
pub(super) struct Reconfigure {
    pub(super) number: u32,
    pub(super) backend: String,
    /// A new size.
    pub(super) size: Option<u64>,
    /// A new time to wait for a connection.
    pub(super) dead_timeout: Option<u64>,
}

/// What sysfs says of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Facts {
    /// Whether it is connected, with or without live connections.
    pub(super) connected: bool,
    /// What it was connected as.
    pub(super) backend: Option<String>,
}

/// The kernel's nbd driver.
pub(super) trait Driver: Send + Sync {
    /// Connect a device. Its number.
    fn connect(&self, ask: &Connect, sockets: &[OwnedFd]) -> Result<u32, Errno>;

    /// Give a device new sockets in place of dead ones, a new size, a new time. Sockets that there was no place
    /// for are let go: their other ends see that.
    fn reconfigure(&self, ask: &Reconfigure, sockets: &[OwnedFd]) -> Result<(), Errno>;

    /// Have what was written through the page cache, and the server's own, on stable storage.
    fn sync(&self, number: u32) -> Result<(), Errno>;

    /// Take a device away from its server. Requests under way fail.
    fn disconnect(&self, number: u32) -> Result<(), Errno>;

    /// Whether the device exists and is connected.
    fn is_connected(&self, number: u32) -> Result<bool, Errno>;

    /// What is known of a device; `None`: there is none of that number.
    fn facts(&self, number: u32) -> Option<Facts>;

    /// The numbers of all devices.
    fn numbers(&self) -> Vec<u32>;

    /// Whether it, or a partition of it, is mounted here, swapped to, or part of another device. Never waits.
    fn is_mounted(&self, number: u32) -> bool;

    /// Whether somebody has it exclusively, wherever it is mounted. Opening it may read from it.
    fn is_claimed(&self, number: u32) -> bool;
}

/// The real one.
#[derive(Default)]
pub(super) struct Kernel {
    sequence: AtomicU32,
}

impl Kernel {
    /// Send one request and gather its answer's attributes until it is over.
    fn ask(&self, family: u16, command: u8, attributes: &Attributes) -> Result<Vec<Vec<u8>>, Errno> {
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
                    Answer::Over(0) => return Ok(found),
                    Answer::Over(errno) => return Err(Errno::from_raw_os_error(errno)),
                }
            }
        }
    }

    /// The nbd family's number. `ENOENT`: the driver is not there.
    fn family(&self) -> Result<u16, Errno> {
        let name = Attributes::default().text(FAMILY_NAME, "nbd");
        let found = self.ask(CONTROL_FAMILY, GET_FAMILY, &name)?;
        let id = found.iter().find_map(|data| find(data, FAMILY_ID));
        id.and_then(|id| id.try_into().ok()).map(u16::from_ne_bytes).ok_or(Errno::NOENT)
    }

    fn tell(&self, command: Command, attributes: &Attributes) -> Result<Vec<Vec<u8>>, Errno> {
        self.ask(self.family()?, command as u8, attributes)
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
    fn connect(&self, ask: &Connect, sockets: &[OwnedFd]) -> Result<u32, Errno> {
        let mut attributes = Attributes::default();
        if let Some(number) = ask.number {
            attributes = attributes.u32(attribute::INDEX, number);
        }
        attributes = attributes
            .u64(attribute::SIZE_BYTES, ask.size)
            .u64(attribute::BLOCK_SIZE_BYTES, ask.block_size)
            .u64(attribute::TIMEOUT, ask.timeout)
            .u64(attribute::SERVER_FLAGS, ask.flags)
            .u64(attribute::CLIENT_FLAGS, if ask.destroy { DESTROY_ON_DISCONNECT } else { 0 })
            .u64(attribute::DEAD_CONN_TIMEOUT, ask.dead_timeout)
            .text(attribute::BACKEND_IDENTIFIER, &ask.backend);
        let found = self.tell(Command::Connect, &with_sockets(attributes, sockets))?;
        let index = found.iter().find_map(|data| number_u32(find(data, attribute::INDEX)?, 0));
        index.or(ask.number).ok_or(Errno::PROTO)
    }

    fn reconfigure(&self, ask: &Reconfigure, sockets: &[OwnedFd]) -> Result<(), Errno> {
        let mut attributes = Attributes::default()
            .u32(attribute::INDEX, ask.number)
            .text(attribute::BACKEND_IDENTIFIER, &ask.backend);
        for (kind, value) in
            [(attribute::SIZE_BYTES, ask.size), (attribute::DEAD_CONN_TIMEOUT, ask.dead_timeout)]
        {
            if let Some(value) = value {
                attributes = attributes.u64(kind, value);
            }
        }
        self.tell(Command::Reconfigure, &with_sockets(attributes, sockets)).map(drop)
    }

    fn sync(&self, number: u32) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let device = rustix::fs::open(format!("/dev/nbd{number}"), flags, Mode::empty())?;
        rustix::fs::fsync(device)
    }

    fn disconnect(&self, number: u32) -> Result<(), Errno> {
        self.tell(Command::Disconnect, &Attributes::default().u32(attribute::INDEX, number)).map(drop)
    }

    fn is_connected(&self, number: u32) -> Result<bool, Errno> {
        let found = self.tell(Command::Status, &Attributes::default().u32(attribute::INDEX, number))?;
        let lists = found.iter().filter_map(|data| find(data, attribute::DEVICE_LIST));
        let mut items = lists.flat_map(attributes).filter(|(kind, _)| *kind == attribute::DEVICE_ITEM);
        Ok(items.any(|(_, item)| {
            let index = find(item, attribute::DEVICE_INDEX).and_then(|index| number_u32(index, 0));
            let connected = find(item, attribute::DEVICE_CONNECTED).and_then(|value| value.first().copied());
            index == Some(number) && connected == Some(1)
        }))
    }

    fn facts(&self, number: u32) -> Option<Facts> {
        let directory = sysfs(number);
        let backend = fs::read_to_string(directory.join("backend")).ok();
        directory.exists().then(|| Facts {
            // The file is there while the device is connected.
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
            // The third word of a line of mountinfo is the device; the first of a line of swaps is its node.
            holders > 0
                || mounts.lines().any(|line| line.split(' ').nth(2) == Some(device.trim_end()))
                || swaps.lines().any(|line| line.split_whitespace().next() == node.as_deref())
        };
        std::iter::once(directory.clone()).chain(parts.filter(is_part)).any(is_used)
    }

    fn is_claimed(&self, number: u32) -> bool {
        // Who mounts a block device opens it exclusively, and so does who builds on it.
        let path = format!("/dev/nbd{number}");
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).is_err_and(|errno| errno == Errno::BUSY)
    }
}
