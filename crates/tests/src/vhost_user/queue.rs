//! A virtqueue of the front-end, with its eventfds.

use super::{FrontEnd, PATIENCE, await_event, event};
use std::os::fd::OwnedFd;
use virtio::blk::{Kind, S_OK};
use virtio::driver::{Disk, Driver};
use virtio::memory::Span;
use virtio::ring::Layout;

/// Longest chain: a header, data, and a status byte.
const CHAIN_MAX: u16 = 3;

/// A request that the device completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completed {
    /// The slot.
    pub slot: u16,
    /// The status byte.
    pub status: u8,
}

/// A virtqueue.
pub struct Queue {
    disk: Disk,
    index: u16,
    layout: Layout,
    kick: OwnedFd,
    call: OwnedFd,
    err: OwnedFd,
    kicks: u64,
}

impl Queue {
    /// Creates a queue in guest memory, which the back-end does not know yet.
    ///
    /// # Panics
    /// If guest memory is too small.
    pub fn new(front: &mut FrontEnd, index: u16, size: u16, slots: u16, data_len: u32) -> Queue {
        let (features, table) = (front.features(), front.table().clone());
        let layout = front.allocator().queue(size, features, CHAIN_MAX);
        let user = |guest: u64| guest - super::GUEST_AT + super::USER_AT;
        let at_user = Layout {
            descriptors: user(layout.descriptors),
            driver: user(layout.driver),
            device: user(layout.device),
            ..layout
        };
        let driver = Driver::new(table.clone(), &at_user, features).expect("the queue is in guest memory");
        let disk = Disk::new(driver, table, front.allocator(), slots, data_len).expect("enough guest memory");
        Queue { disk, index, layout, kick: event(), call: event(), err: event(), kicks: 0 }
    }

    /// Its number.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Guest-physical addresses of its parts.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The eventfd of kicks.
    pub fn kick(&self) -> &OwnedFd {
        &self.kick
    }

    /// The eventfd of interrupts.
    pub fn call(&self) -> &OwnedFd {
        &self.call
    }

    /// The eventfd of errors.
    pub fn error(&self) -> &OwnedFd {
        &self.err
    }

    /// The driver, for tests that write invalid rings.
    pub fn driver(&mut self) -> &mut Driver {
        self.disk.driver()
    }

    /// Number of kicks that the device wanted.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Memory of a slot's data.
    pub fn data(&self, slot: u16) -> Span {
        self.disk.data(slot)
    }

    /// Adds a request. Returns whether there was space.
    #[inline]
    pub fn add(&mut self, slot: u16, kind: Kind, sector: u64, len: u32) -> bool {
        self.disk.add(slot, kind, sector, len)
    }

    /// Guest addresses of a slot's data and of its status byte.
    pub fn addresses(&self, slot: u16) -> (u64, u64) {
        (self.disk.data_address(slot), self.disk.status_address(slot))
    }

    /// Sector at which a completed zone append wrote.
    pub fn append_sector(&self, slot: u16) -> u64 {
        self.disk.append_sector(slot)
    }

    /// Makes added requests visible, and kicks if the device wants that.
    #[inline]
    pub fn publish(&mut self) {
        if self.disk.publish() {
            self.kick_now();
        }
    }

    /// Kicks.
    pub fn kick_now(&mut self) {
        self.kicks += 1;
        // If the count would overflow, the device has kicks to read already.
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// Takes a completed request, if there is one.
    #[inline]
    pub fn take(&mut self) -> Option<Completed> {
        self.disk.take_completed().map(|(slot, status)| Completed { slot, status })
    }

    /// Waits for an interrupt until a request has completed.
    ///
    /// # Panics
    /// If none completes within a minute.
    pub fn wait(&mut self) -> Completed {
        loop {
            if let Some(completed) = self.take() {
                return completed;
            }
            if !self.disk.driver().enable_interrupts() {
                assert!(await_event(&self.call, PATIENCE), "no interrupt came");
            }
        }
    }

    /// Performs a request, and returns its status byte. No other may be in flight.
    ///
    /// # Panics
    /// If it does not complete within a minute.
    pub fn perform(&mut self, kind: Kind, sector: u64, len: u32) -> u8 {
        assert!(self.add(0, kind, sector, len), "the queue is empty");
        self.publish();
        self.wait().status
    }

    /// Writes data at an offset.
    ///
    /// # Panics
    /// If that fails.
    pub fn write(&mut self, front: &FrontEnd, offset: u64, data: &[u8]) {
        assert!(front.table().write(self.data(0), data), "the slot has room");
        assert_eq!(self.perform(Kind::Write, offset / 512, data.len() as u32), S_OK);
    }

    /// Reads data from an offset.
    ///
    /// # Panics
    /// If that fails.
    pub fn read(&mut self, front: &FrontEnd, offset: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.perform(Kind::Read, offset / 512, len), S_OK);
        let mut data = vec![0; len as usize];
        assert!(front.table().read(self.data(0), &mut data), "the slot has room");
        data
    }
}
