//! A connection of a front-end: executes its requests.
//!
//! Rings that are served are stopped while guest memory or the log of dirty pages is replaced, and then
//! continue at their position. So a request in flight never refers to unmapped memory.

use super::disk::Disk;
use super::socket::{Message, Socket, send};
use super::virtqueue::VirtqueueHandle;
use exports::vhost::{GuestRegionSetup, RingSetup, SEGMENTS_MAX};
use proto::vhost_user::wire::{CONFIG_MAX, VRING_LOG, protocol};
use proto::vhost_user::{
    Action, BackendRequest, Config as ConfigPart, ConfigKind, InflightArea, Refused, Request, Session,
    Violation, VringState, put_config, put_inflight, put_number, put_vring_state,
};
use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::net::UnixStream;
use virtio::Features;
use virtio::blk::Config;
use virtio::inflight::{Inflight, queue_len};
use virtio::memory::{DirtyLog, Mapping};
use virtio::ring::Layout;

/// Why a connection ended before its front-end closed it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The front-end does not follow the protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// Guest memory, or another file that the front-end sent, cannot be mapped.
    #[error("memory that it shares cannot be mapped: {0}")]
    Map(io::Error),
}

impl From<proto::vhost_user::Malformed> for Ended {
    fn from(why: proto::vhost_user::Malformed) -> Ended {
        Ended::Violation(why.into())
    }
}

/// Descriptors that the front-end passed for a ring, and the ring's state, besides what the session
/// records.
#[derive(Default)]
struct RingFiles {
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    err: Option<Arc<OwnedFd>>,
    /// Whether a reactor serves the ring.
    is_served: bool,
    /// Whether writes to the used ring are logged.
    is_logged: bool,
}

/// A reply, and the descriptor to send with it.
type Reply = (Vec<u8>, Option<OwnedFd>);

/// A connection.
pub(super) struct Connection {
    disk: Arc<Disk>,
    socket: Socket,
    session: Session,
    /// Mappings of the session's regions, in their order.
    mappings: Vec<Arc<Mapping>>,
    rings: Vec<RingFiles>,
    log: Option<Arc<DirtyLog>>,
    /// The area in shared memory that records requests in flight.
    inflight: Option<(Arc<Mapping>, InflightArea)>,
    /// The socket for our own requests to the front-end.
    backend: Option<OwnedFd>,
}

impl Connection {
    pub(super) fn new(disk: &Arc<Disk>, stream: UnixStream) -> Connection {
        let rings = disk.virtqueues().iter().map(|_| RingFiles::default()).collect();
        Connection {
            session: Session::new(disk.offer()),
            disk: disk.clone(),
            socket: Socket::new(stream),
            mappings: Vec::new(),
            rings,
            log: None,
            inflight: None,
            backend: None,
        }
    }

    /// Process ID of the front-end.
    pub(super) fn peer(&self) -> Option<i32> {
        self.socket.peer()
    }

    /// Serves the front-end until it closes the connection, or the export is closed.
    pub(super) async fn run(&mut self) -> Result<(), Ended> {
        loop {
            let disk = self.disk.clone();
            tokio::select! {
                message = self.socket.receive() => match message? {
                    Some(message) => self.take(message).await?,
                    None => return Ok(()),
                },
                () = disk.config_changed() => self.report_config(),
                () = disk.broken() => {
                    self.session.needs_reset();
                    self.report_config();
                }
                () = disk.closing() => return Ok(()),
            }
            self.describe();
        }
    }

    /// Stops all rings. Requests in flight complete first.
    pub(super) async fn shut_down(&mut self) {
        for index in 0..self.rings.len() as u16 {
            self.stop(index).await;
        }
    }

    /// Notifies the driver that the configuration space has changed.
    fn report_config(&self) {
        if let Some(backend) = self.backend.as_ref()
            && let Err(error) = send(backend.as_fd(), &BackendRequest::ConfigChange.encode(), None)
        {
            tracing::warn!(%error, "the virtual machine was not notified of a change");
        }
    }

    async fn take(&mut self, Message { header, payload, fds }: Message) -> Result<(), Ended> {
        let request = Request::parse(&header, &payload, fds.len())?;
        tracing::trace!(?request, "vhost-user");
        let outcome = match self.session.receive(&request) {
            Ok(action) => self.perform(action, &request, fds).await?,
            Err(why) => Err(why),
        };
        let acknowledgement = match outcome {
            Ok(Some((reply, fd))) => {
                return Ok(self.socket.send(&reply, fd.as_ref().map(AsFd::as_fd)).await?);
            }
            Ok(None) => self.session.acknowledge(&header, Ok(()))?,
            Err(why) => {
                tracing::warn!(device = %self.disk.name(), "a vhost-user request was refused: {why}");
                self.session.acknowledge(&header, Err(why))?
            }
        };
        match acknowledgement {
            Some(reply) => Ok(self.socket.send(&reply, None).await?),
            None => Ok(()),
        }
    }

    /// Executes an action. Returns its reply, if the action has a specific one.
    async fn perform(
        &mut self,
        action: Action,
        request: &Request<'_>,
        mut fds: Vec<OwnedFd>,
    ) -> Result<Result<Option<Reply>, Refused>, Ended> {
        let number = request.number();
        let plain = |reply| Ok(Ok(Some((reply, None))));
        let fd = |fds: &mut Vec<OwnedFd>| fds.pop().map(Arc::new);
        match action {
            Action::Acknowledge | Action::SetLogFd => {}
            Action::Number(value) => return plain(put_number(number, value)),
            Action::SetMemory => {
                let regions = self.session.regions().iter().zip(&fds);
                let mapped = regions.map(|(region, fd)| map(fd, region.mmap_offset, region.len));
                let mapped = mapped.collect::<Result<Vec<_>, _>>()?;
                return Ok(self.replace_memory(|mappings| *mappings = mapped).await.map(|()| None));
            }
            Action::AddMemory => {
                if let (Some(region), Some(fd)) = (self.session.regions().last(), fds.pop()) {
                    let mapped = map(&fd, region.mmap_offset, region.len)?;
                    return Ok(self.replace_memory(|mappings| mappings.push(mapped)).await.map(|()| None));
                }
            }
            Action::RemoveMemory(position) => {
                return Ok(self
                    .replace_memory(|mappings| drop(mappings.remove(position)))
                    .await
                    .map(|()| None));
            }
            Action::SetLog(area) => {
                if let Some(fd) = fds.pop() {
                    let mapping = map(&fd, area.offset, area.len)?;
                    self.log = DirtyLog::new(mapping, area.len);
                    if let Err(why) = self.replace_memory(|_| {}).await {
                        return Ok(Err(why));
                    }
                }
                return plain(put_number(number, 0));
            }
            Action::LogSwitched => return Ok(self.replace_memory(|_| {}).await.map(|()| None)),
            Action::Ring(index) => return Ok(self.update(index).await.map(|()| None)),
            Action::StopRing(index) => {
                self.stop(index).await;
                self.rings[usize::from(index)].kick = None;
                let base = self.session.vrings()[usize::from(index)].base;
                return plain(put_vring_state(number, VringState { index: index.into(), num: base }));
            }
            Action::SetKick(file) => {
                let index = file.index as u16;
                // The ring may be served with another eventfd: it is stopped, and started again with the
                // new one.
                self.stop(index).await;
                self.rings[usize::from(index)].kick = fd(&mut fds);
                return Ok(self.update(index).await.map(|()| None));
            }
            Action::SetCall(file) => {
                let ring = &mut self.rings[file.index as usize];
                ring.call = fd(&mut fds);
                if ring.is_served {
                    self.disk.virtqueues()[file.index as usize].set_call(ring.call.clone());
                }
            }
            Action::SetErr(file) => {
                let ring = &mut self.rings[file.index as usize];
                ring.err = fd(&mut fds);
                if ring.is_served {
                    self.disk.virtqueues()[file.index as usize].set_err(ring.err.clone());
                }
            }
            Action::SetBackendSocket => self.backend = fds.pop(),
            Action::ReadConfig { offset, len } => return plain(self.read_config(offset, len)),
            Action::WriteConfig { offset, kind } => {
                let (Request::SetConfig(part) | Request::GetConfig(part)) = request else {
                    return Ok(Ok(None));
                };
                return Ok(self.write_config(offset, kind, part.content).await.map(|()| None));
            }
            Action::CreateInflight(area) => return self.create_inflight(area),
            Action::SetInflight(area) => {
                if let Some(fd) = fds.pop() {
                    let mapping = map(&fd, area.offset, area.len)?;
                    return Ok(self.set_inflight(mapping, area).await.map(|()| None));
                }
            }
            Action::Reset => {
                self.shut_down().await;
                self.rings.iter_mut().for_each(|ring| *ring = RingFiles::default());
                // The vhost-user protocol on the in-flight area: "QEMU should retrieve a new one when vm
                // reset."
                self.inflight = None;
            }
        }
        Ok(Ok(None))
    }

    /// Creates memory that records requests in flight; the front-end keeps it and sends it back.
    fn create_inflight(&mut self, area: InflightArea) -> Result<Result<Option<Reply>, Refused>, Ended> {
        let len = queue_len(area.queue_size, self.features()) * u64::from(area.queues);
        let create = || -> io::Result<OwnedFd> {
            let file = rustix::fs::memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            rustix::fs::ftruncate(&file, len)?;
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(file)
        };
        let file = create().map_err(Ended::Map)?;
        let area = InflightArea { len, offset: 0, ..area };
        Ok(Ok(Some((put_inflight(&area), Some(file)))))
    }

    /// Replaces the memory that records requests in flight. Rings that are served continue with it.
    async fn set_inflight(&mut self, mapping: Arc<Mapping>, area: InflightArea) -> Result<(), Refused> {
        self.shut_down().await;
        self.inflight = Some((mapping, area));
        for index in 0..self.rings.len() as u16 {
            self.update(index).await?;
        }
        Ok(())
    }

    fn features(&self) -> Features {
        Features::from_bits_truncate(self.session.features())
    }

    /// Returns a ring's part of the memory that records requests in flight.
    fn inflight(&self, index: u16) -> Result<Option<Inflight>, Refused> {
        let Some((mapping, area)) = &self.inflight else { return Ok(None) };
        if index >= area.queues {
            return Ok(None);
        }
        let record = Inflight::of_queue(mapping.clone(), index, area.queue_size, self.features());
        let missing = || Refused(format!("the record of requests in flight has no part for ring {index}"));
        record.ok_or_else(missing).map(Some)
    }

    fn read_config(&self, offset: u32, len: u32) -> Vec<u8> {
        let mut space = [0; CONFIG_MAX];
        let features = self.features();
        space[..Config::LEN].copy_from_slice(&self.disk.config().to_bytes(features));
        let (start, len) = (offset as usize, len as usize);
        let content = space.get(start..start.saturating_add(len));
        put_config(content.map(|content| ConfigPart { offset, kind: ConfigKind::Writable, content }))
    }

    /// Writes the only configuration field that a driver may write. The destination of a migration sends
    /// all fields; the others are the device's and are ignored.
    async fn write_config(&mut self, offset: u32, kind: ConfigKind, content: &[u8]) -> Result<(), Refused> {
        let at = (Config::WRITE_BACK_AT as u32).checked_sub(offset).map(|at| at as usize);
        let value = at.and_then(|at| content.get(at).copied());
        match (value, kind) {
            (Some(value), _) if content.len() == 1 || kind == ConfigKind::Migration => {
                self.disk.set_write_back(value != 0).await;
                Ok(())
            }
            (_, ConfigKind::Migration) => Ok(()),
            _ => Err(Refused(format!(
                "{} bytes at {offset} of the configuration space are read-only",
                content.len()
            ))),
        }
    }

    /// Replaces guest memory or the log while no ring is served.
    async fn replace_memory(&mut self, replace: impl FnOnce(&mut Vec<Arc<Mapping>>)) -> Result<(), Refused> {
        self.shut_down().await;
        replace(&mut self.mappings);
        for index in 0..self.rings.len() as u16 {
            self.update(index).await?;
        }
        Ok(())
    }

    /// Starts or stops serving a ring, as its settings require.
    async fn update(&mut self, index: u16) -> Result<(), Refused> {
        let is_wanted = self.session.is_active(index) && !self.mappings.is_empty();
        let ring = &self.rings[usize::from(index)];
        let is_logged = self.is_logged(index);
        if ring.is_served && (!is_wanted || ring.is_logged != is_logged) {
            self.stop(index).await;
        }
        if is_wanted && !self.rings[usize::from(index)].is_served {
            return self.start(index).await;
        }
        Ok(())
    }

    fn is_logged(&self, index: u16) -> bool {
        let address = self.session.vrings()[usize::from(index)].address;
        self.session.logs() && address.is_some_and(|address| address.flags & VRING_LOG != 0)
    }

    fn virtqueue(&self, index: u16) -> &VirtqueueHandle {
        &self.disk.virtqueues()[usize::from(index)]
    }

    async fn start(&mut self, index: u16) -> Result<(), Refused> {
        let vring = self.session.vrings()[usize::from(index)];
        let Some(address) = vring.address else { return Ok(()) };
        let features = self.features();
        if self.disk.config().is_zoned() && !features.contains(Features::ZONED) {
            // 5.2.5.2: such a driver cannot use a host-managed device.
            return Err(Refused("the device is zoned, and the driver lacks VIRTIO_BLK_F_ZONED".to_owned()));
        }
        let regions = self.session.regions().iter().zip(&self.mappings);
        let regions = regions.map(|(region, mapping)| GuestRegionSetup {
            guest: region.guest_address,
            user: region.user_address,
            len: region.len,
            mapping: mapping.clone(),
        });
        let files = &self.rings[usize::from(index)];
        let setup = RingSetup {
            features,
            layout: Layout {
                size: vring.size,
                descriptors: address.descriptors,
                driver: address.available,
                device: address.used,
                chain_max: SEGMENTS_MAX + 2,
            },
            base: vring.base,
            regions: regions.collect(),
            log: self.log.clone().filter(|_| self.session.logs()),
            kick: files.kick.clone(),
            call: files.call.clone(),
            err: files.err.clone(),
            inflight: self.inflight(index)?,
        };
        self.virtqueue(index).start(setup).await.map_err(|why| Refused(format!("ring {index}: {why}")))?;
        let is_logged = self.is_logged(index);
        let files = &mut self.rings[usize::from(index)];
        (files.is_served, files.is_logged) = (true, is_logged);
        Ok(())
    }

    async fn stop(&mut self, index: u16) {
        if !std::mem::take(&mut self.rings[usize::from(index)].is_served) {
            return;
        }
        if let Some(base) = self.virtqueue(index).stop().await {
            self.session.stopped(index, base);
        }
    }

    /// Updates the description of the connection for `show`.
    fn describe(&self) {
        let served = self.rings.iter().filter(|ring| ring.is_served).count();
        let memory = self.session.regions().iter().map(|region| region.len).sum();
        let kind = if self.session.is_packed() { "packed" } else { "split" };
        let is_informed = self.backend.is_some() && self.session.protocol() & protocol::BACKEND_REQ != 0;
        self.disk.describe(served, kind, memory, is_informed);
    }
}

fn map(fd: &OwnedFd, offset: u64, len: u64) -> Result<Arc<Mapping>, Ended> {
    Mapping::of_file(fd, offset, len).map_err(Ended::Map)
}
