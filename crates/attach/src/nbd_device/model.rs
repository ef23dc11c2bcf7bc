//! A model of the kernel's nbd driver in user space: devices with sockets, some of them dead. It sends
//! nothing by itself; a test takes the kernel's end of a connection and sends requests on it.

use super::driver::{Connect, DeviceState, Driver, Reconfigure};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One `/dev/nbdN`.
#[derive(Default)]
pub(super) struct ModelDevice {
    /// Arguments it was connected with; `None`: it is not connected.
    pub(super) connected: Option<Connect>,
    pub(super) sockets: Vec<UnixStream>,
    /// Whether the device is mounted.
    pub(super) mounted: bool,
    /// Number of syncs.
    pub(super) synced: u32,
}

#[derive(Default)]
pub(super) struct Model {
    devices: Mutex<BTreeMap<u32, ModelDevice>>,
    /// Error that the next call returns.
    pub(super) fails: Mutex<Option<Errno>>,
}

fn is_dead(socket: &UnixStream) -> bool {
    socket.set_nonblocking(true).unwrap();
    let dead =
        matches!((&*socket).read(&mut []), Ok(0)) && !super::is_open(&socket.try_clone().unwrap().into());
    socket.set_nonblocking(false).unwrap();
    dead
}

fn copies(sockets: &[OwnedFd]) -> impl Iterator<Item = UnixStream> {
    sockets.iter().map(|socket| UnixStream::from(socket.try_clone().unwrap()))
}

impl Model {
    /// Creates a driver with `count` devices.
    pub(super) fn new(count: u32) -> Model {
        let devices = (0..count).map(|number| (number, ModelDevice::default())).collect();
        Model { devices: Mutex::new(devices), fails: Mutex::default() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, ModelDevice>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn injected_error(&self) -> Result<(), Errno> {
        self.fails.lock().unwrap().take().map_or(Ok(()), Err)
    }

    /// Number of live connections of a device.
    pub(super) fn alive(&self, number: u32) -> usize {
        self.lock()[&number].sockets.iter().filter(|socket| !is_dead(socket)).count()
    }

    /// Closes a connection, as the kernel does after a timeout.
    pub(super) fn give_up(&self, number: u32, connection: usize) {
        self.lock()[&number].sockets[connection].shutdown(Shutdown::Both).unwrap();
    }

    /// Sends an NBD request and returns the error and the data of its reply.
    pub(super) fn ask(
        &self,
        number: u32,
        connection: usize,
        kind: u16,
        offset: u64,
        data: &[u8],
    ) -> (u32, Vec<u8>) {
        let mut socket = self.lock()[&number].sockets[connection].try_clone().unwrap();
        let len = data.len() as u32;
        let mut message = [0x2560_9513u32.to_be_bytes(), [0, 0, (kind >> 8) as u8, kind as u8]].concat();
        message.extend(7u64.to_be_bytes());
        message.extend(offset.to_be_bytes());
        message.extend(len.to_be_bytes());
        let is_write = kind == 1;
        if is_write {
            message.extend(data);
        }
        socket.write_all(&message).unwrap();
        let mut reply = [0; 16];
        socket.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], 0x6744_6698u32.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        let mut content = vec![0; if kind == 0 && error == 0 { data.len() } else { 0 }];
        socket.read_exact(&mut content).unwrap();
        (error, content)
    }
}

impl Driver for Model {
    fn connect(&self, ask: &Connect, sockets: &[OwnedFd]) -> Result<u32, Errno> {
        self.injected_error()?;
        let mut devices = self.lock();
        let free =
            || devices.iter().find(|(_, device)| device.connected.is_none()).map(|(number, _)| *number);
        let number = ask.number.or_else(free).unwrap_or(devices.len() as u32);
        let device = devices.entry(number).or_default();
        if device.connected.is_some() {
            return Err(Errno::BUSY);
        }
        device.connected = Some(ask.clone());
        device.sockets = copies(sockets).collect();
        Ok(number)
    }

    fn reconfigure(&self, ask: &Reconfigure, sockets: &[OwnedFd]) -> Result<(), Errno> {
        self.injected_error()?;
        let mut devices = self.lock();
        let device = devices.get_mut(&ask.number).ok_or(Errno::NODEV)?;
        let connected = device
            .connected
            .as_mut()
            .filter(|connected| connected.backend == ask.backend)
            .ok_or(Errno::INVAL)?;
        connected.size = ask.size.unwrap_or(connected.size);
        connected.dead_timeout = ask.dead_timeout.unwrap_or(connected.dead_timeout);
        let mut brought = copies(sockets);
        for socket in device.sockets.iter_mut().filter(|socket| is_dead(socket)) {
            let Some(new) = brought.next() else { break };
            *socket = new;
        }
        Ok(())
    }

    fn sync(&self, number: u32) -> Result<(), Errno> {
        self.lock().get_mut(&number).ok_or(Errno::NOENT)?.synced += 1;
        Ok(())
    }

    fn disconnect(&self, number: u32) -> Result<(), Errno> {
        self.injected_error()?;
        let mut devices = self.lock();
        let device = devices.get_mut(&number).ok_or(Errno::INVAL)?;
        let gone = device.connected.take().is_some_and(|connected| connected.destroy);
        device.sockets.clear();
        if gone {
            devices.remove(&number);
        }
        Ok(())
    }

    fn is_connected(&self, number: u32) -> Result<bool, Errno> {
        Ok(self.lock().get(&number).is_some_and(|device| device.connected.is_some()))
    }

    fn state(&self, number: u32) -> Option<DeviceState> {
        self.lock().get(&number).map(|device| DeviceState {
            connected: device.connected.is_some(),
            backend: device.connected.as_ref().map(|connected| connected.backend.clone()),
        })
    }

    fn numbers(&self) -> Vec<u32> {
        self.lock().keys().copied().collect()
    }

    fn is_mounted(&self, number: u32) -> bool {
        self.is_claimed(number)
    }

    fn is_claimed(&self, number: u32) -> bool {
        self.lock().get(&number).is_some_and(|device| device.mounted)
    }
}
