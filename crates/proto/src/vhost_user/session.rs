//! The back-end's side of a connection: checks each request against the session's state, and returns the
//! action to take.
//!
//! The owner receives a message, passes it to [`Session::receive`], performs the [`Action`], and sends the
//! reply, which is either the action's own or the one from [`Session::acknowledge`].

use super::message::{
    ConfigKind, Header, InflightArea, LogArea, Malformed, MemoryRegion, Request, VringAddress, VringFile,
    VringState, put_number,
};
use super::vring::Vring;
use super::wire::{FDS_MAX, feature, protocol};

/// DEVICE_NEEDS_RESET, the only status bit that the device itself may set (virtio 1.2, 2.1).
const NEEDS_RESET: u8 = 64;

/// The device properties that a session offers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Device features, without those of vhost itself.
    pub features: u64,
    /// Protocol features.
    pub protocol: u64,
    /// Number of virtqueues.
    pub queues: u16,
    /// Largest size of a virtqueue.
    pub queue_size_max: u16,
    /// Maximum number of guest memory regions.
    pub regions_max: u16,
}

/// Action that the owner has to perform for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Only acknowledge the request.
    Acknowledge,
    /// Reply with this number.
    Number(u64),
    /// Start or stop logging of written pages, see [`Session::logs`].
    LogSwitched,
    /// Map all regions of [`Session::regions`] from the descriptors, in that order, and unmap the previous
    /// ones.
    SetMemory,
    /// Map the last region of [`Session::regions`] from the descriptor.
    AddMemory,
    /// Unmap the region that was at this position.
    RemoveMemory(usize),
    /// Map the log of dirty pages from the descriptor, and reply with 0.
    SetLog(LogArea),
    /// The descriptor is an eventfd to signal when the log has changed.
    SetLogFd,
    /// Apply the changed settings of a ring: start, update, suspend or continue it.
    Ring(u16),
    /// Stop the ring, and reply with the index at which it continues.
    StopRing(u16),
    /// Receive the ring's kicks through the descriptor, if there is one. Continue as with [`Action::Ring`].
    SetKick(VringFile),
    /// Send the ring's interrupts to the descriptor, if there is one.
    SetCall(VringFile),
    /// Send the ring's errors to the descriptor, if there is one.
    SetErr(VringFile),
    /// Use the descriptor as the socket for the back-end's own requests.
    SetBackendSocket,
    /// Reply with this part of the configuration space.
    ReadConfig {
        /// Offset in the space.
        offset: u32,
        /// Length in bytes.
        len: u32,
    },
    /// Write the request's content to the configuration space.
    WriteConfig {
        /// Offset in the space.
        offset: u32,
        /// Reason for the write.
        kind: ConfigKind,
    },
    /// Create memory for the record of requests in flight, and send it in the reply.
    CreateInflight(InflightArea),
    /// Map the record of requests in flight from the descriptor.
    SetInflight(InflightArea),
    /// Stop all rings, and discard everything that the driver has negotiated.
    Reset,
}

/// A request that cannot be fulfilled; the session continues if the front-end asked for an acknowledgement.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Reasons why a session ends.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// A message is malformed.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// A request was refused, and the front-end did not ask for a reply.
    #[error("{0}, and the front-end asked for no acknowledgement")]
    Unacknowledged(Refused),
}

fn refused<T>(why: impl Into<String>) -> Result<T, Refused> {
    Err(Refused(why.into()))
}

/// A connection of a front-end.
#[derive(Debug)]
pub struct Session {
    offer: Offer,
    features: u64,
    protocol: u64,
    vrings: Box<[Vring]>,
    regions: Vec<MemoryRegion>,
    status: u8,
}

impl Session {
    /// Creates the session of a new connection.
    pub fn new(offer: Offer) -> Session {
        let vrings = vec![Vring::default(); offer.queues.into()].into();
        Session { offer, features: 0, protocol: 0, vrings, regions: Vec::new(), status: 0 }
    }

    /// Returns the rings, by number.
    pub fn vrings(&self) -> &[Vring] {
        &self.vrings
    }

    /// Returns the regions of guest memory.
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// Returns the features that the driver accepted.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the protocol features that the front-end accepted.
    pub fn protocol(&self) -> u64 {
        self.protocol
    }

    /// Returns whether the virtqueues are packed.
    pub fn is_packed(&self) -> bool {
        self.features & feature::RING_PACKED != 0
    }

    /// Returns whether written pages are logged.
    pub fn logs(&self) -> bool {
        self.features & feature::LOG_ALL != 0
    }

    /// Records the index at which a stopped ring continues.
    pub fn stopped(&mut self, index: u16, base: u32) {
        if let Some(vring) = self.vrings.get_mut(usize::from(index)) {
            vring.base = base;
        }
    }

    /// Records that the device needs a reset, which the front-end reads in the device's status.
    pub fn needs_reset(&mut self) {
        self.status |= NEEDS_RESET;
    }

    /// Returns whether a ring is to be processed: it is started, and it is enabled unless protocol features
    /// were not negotiated.
    pub fn is_active(&self, index: u16) -> bool {
        let knows_protocol = self.features & feature::PROTOCOL_FEATURES != 0;
        self.vrings
            .get(usize::from(index))
            .is_some_and(|vring| vring.is_active() || !knows_protocol && vring.is_started())
    }

    /// Returns the acknowledgement of a request whose action has no reply of its own, or `None` if the
    /// front-end expects no acknowledgement.
    ///
    /// # Errors
    /// The request was refused, and the front-end would not learn of the refusal.
    pub fn acknowledge(
        &self,
        header: &Header,
        result: Result<(), Refused>,
    ) -> Result<Option<Vec<u8>>, Violation> {
        let wants = header.needs_reply() && self.protocol & protocol::REPLY_ACK != 0;
        match result {
            result if wants => Ok(Some(put_number(header.request, u64::from(result.is_err())))),
            Ok(()) => Ok(None),
            Err(why) => Err(Violation::Unacknowledged(why)),
        }
    }

    /// Processes a request: checks it, and records its settings.
    ///
    /// # Errors
    /// The request cannot be fulfilled; no state has changed.
    pub fn receive(&mut self, request: &Request<'_>) -> Result<Action, Refused> {
        match *request {
            Request::GetFeatures => {
                Ok(Action::Number(self.offer.features | feature::PROTOCOL_FEATURES | self.log_feature()))
            }
            Request::SetFeatures(features) => self.set_features(features),
            Request::GetProtocolFeatures => Ok(Action::Number(self.offer.protocol)),
            Request::SetProtocolFeatures(features) => {
                let unknown = features & !self.offer.protocol;
                if unknown != 0 {
                    return refused(format!("protocol features {unknown:#x} were not offered"));
                }
                self.protocol = features;
                Ok(Action::Acknowledge)
            }
            Request::SetOwner | Request::ResetOwner => Ok(Action::Acknowledge),
            Request::SetMemTable(ref regions) => {
                check_regions(regions)?;
                self.regions.clone_from(regions);
                Ok(Action::SetMemory)
            }
            Request::AddMemReg(region) => {
                if self.regions.len() >= usize::from(self.offer.regions_max) {
                    return refused(format!("guest memory has {} regions already", self.regions.len()));
                }
                self.regions.push(region);
                if let Err(why) = check_regions(&self.regions) {
                    self.regions.pop();
                    return Err(why);
                }
                Ok(Action::AddMemory)
            }
            Request::RemMemReg(region) => {
                let Some(position) = self.regions.iter().position(|other| other.is_at(&region)) else {
                    return refused("guest memory has no such region");
                };
                self.regions.remove(position);
                Ok(Action::RemoveMemory(position))
            }
            Request::GetMaxMemSlots => Ok(Action::Number(self.offer.regions_max.into())),
            Request::SetLogBase(area) => match area.offset.checked_add(area.len) {
                Some(_) if area.len > 0 => Ok(Action::SetLog(area)),
                _ => refused("the log of dirty pages has no sound length"),
            },
            Request::SetLogFd => Ok(Action::SetLogFd),
            Request::GetQueueNum => Ok(Action::Number(self.offer.queues.into())),
            Request::SetVringNum(state) => self.set_size(state),
            Request::SetVringAddr(address) => self.set_address(address),
            Request::SetVringBase(state) => {
                let vring = self.vring(state.index)?;
                if vring.is_started() {
                    return refused("the base of a started ring cannot change");
                }
                vring.base = state.num;
                Ok(Action::Acknowledge)
            }
            Request::GetVringBase(state) => {
                self.vring(state.index)?.kick = None;
                Ok(Action::StopRing(state.index as u16))
            }
            Request::SetVringKick(file) => {
                self.vring(file.index)?.kick = Some(file);
                Ok(Action::SetKick(file))
            }
            Request::SetVringCall(file) => self.vring(file.index).map(|_| Action::SetCall(file)),
            Request::SetVringErr(file) => self.vring(file.index).map(|_| Action::SetErr(file)),
            Request::SetVringEnable(state) => {
                self.vring(state.index)?.enabled = state.num != 0;
                Ok(Action::Ring(state.index as u16))
            }
            Request::SetBackendReqFd => Ok(Action::SetBackendSocket),
            Request::GetConfig(ref config) => {
                Ok(Action::ReadConfig { offset: config.offset, len: config.content.len() as u32 })
            }
            Request::SetConfig(ref config) => {
                Ok(Action::WriteConfig { offset: config.offset, kind: config.kind })
            }
            Request::GetInflightFd(area) => self.check_inflight(&area).map(|()| Action::CreateInflight(area)),
            Request::SetInflightFd(area) => match area.offset.checked_add(area.len) {
                Some(_) => self.check_inflight(&area).map(|()| Action::SetInflight(area)),
                None => refused("the record of requests in flight has no sound length"),
            },
            Request::ResetDevice => Ok(self.reset()),
            Request::SetStatus(status) => {
                let needs_reset = self.status & NEEDS_RESET;
                // The driver writes 0 to reset the device.
                let action = if status as u8 == 0 { self.reset() } else { Action::Acknowledge };
                self.status = if status as u8 == 0 { 0 } else { status as u8 | needs_reset };
                Ok(action)
            }
            Request::GetStatus => Ok(Action::Number(self.status.into())),
            Request::Unknown(number) => refused(format!("request {number} is not one of a block device's")),
        }
    }

    fn log_feature(&self) -> u64 {
        if self.offer.protocol & protocol::LOG_SHMFD != 0 { feature::LOG_ALL } else { 0 }
    }

    fn set_features(&mut self, features: u64) -> Result<Action, Refused> {
        let offered = self.offer.features | feature::PROTOCOL_FEATURES | self.log_feature();
        let unknown = features & !offered;
        if unknown != 0 {
            return refused(format!("features {unknown:#x} were not offered"));
        }
        let changed = self.features ^ features;
        if changed & !feature::LOG_ALL != 0 && self.vrings.iter().any(Vring::is_started) {
            return refused("features cannot change while a ring is started");
        }
        self.features = features;
        Ok(if changed & feature::LOG_ALL != 0 { Action::LogSwitched } else { Action::Acknowledge })
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, Refused> {
        let count = self.vrings.len();
        match self.vrings.get_mut(index as usize) {
            Some(vring) => Ok(vring),
            None => refused(format!("ring {index} does not exist: the device has {count}")),
        }
    }

    fn set_size(&mut self, VringState { index, num }: VringState) -> Result<Action, Refused> {
        let (max, is_packed) = (self.offer.queue_size_max, self.is_packed());
        let vring = self.vring(index)?;
        if num == 0 || num > max.into() || !is_packed && !num.is_power_of_two() {
            return refused(format!("a ring cannot have {num} descriptors (a power of two up to {max})"));
        }
        if vring.is_started() && vring.size != num as u16 {
            return refused("the size of a started ring cannot change");
        }
        vring.size = num as u16;
        Ok(Action::Acknowledge)
    }

    fn set_address(&mut self, address: VringAddress) -> Result<Action, Refused> {
        let vring = self.vring(address.index)?;
        let moved = |old: VringAddress| {
            VringAddress { flags: 0, log: 0, ..old } != VringAddress { flags: 0, log: 0, ..address }
        };
        if vring.is_started() && vring.address.is_some_and(moved) {
            return refused("a started ring cannot move");
        }
        vring.address = Some(address);
        Ok(Action::Ring(address.index as u16))
    }

    fn check_inflight(&self, area: &InflightArea) -> Result<(), Refused> {
        let (queues, size) = (self.offer.queues, self.offer.queue_size_max);
        if area.queues == 0 || area.queues > queues || area.queue_size == 0 || area.queue_size > size {
            return refused(format!(
                "requests of {} rings of {} descriptors cannot be recorded (at most {queues} of {size})",
                area.queues, area.queue_size
            ));
        }
        Ok(())
    }

    fn reset(&mut self) -> Action {
        // "Reset all internal device state to the initial state": memory and protocol features belong to
        // the connection, so they are kept.
        self.vrings.fill(Vring::default());
        self.features = 0;
        self.status = 0;
        Action::Reset
    }
}

/// Checks all regions of guest memory together.
fn check_regions(regions: &[MemoryRegion]) -> Result<(), Refused> {
    for (position, region) in regions.iter().enumerate() {
        if !region.is_sound() {
            return refused(format!(
                "the region at guest address {:#x} has no sound length",
                region.guest_address
            ));
        }
        if regions[..position].iter().any(|other| other.overlaps(region)) {
            return refused(format!("regions overlap at guest address {:#x}", region.guest_address));
        }
    }
    Ok(())
}

const _: () = assert!(FDS_MAX == 8, "a table of eight regions fits a message");
