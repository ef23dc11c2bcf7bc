//! Giving a reactor a queue of a ublk device to serve, from the control plane.

use crate::device::Device;
use crate::reactor::{Lane, Reactor};
use block::{Bytes, Integrity};
use exports::ublk::{ClientMemory, DataMode, LaneConfig, LaneShared};
use exports::{Fronts, Turn};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::sync::oneshot;
use ublk::Descriptors;
use ublk::kernel::SharedFile;

/// A queue of a ublk device, or the part of one that one thread serves.
pub(crate) struct UblkLane {
    /// The character device.
    pub(crate) device: Arc<OwnedFd>,
    /// The ring may hold it by number: the kernel closes it in time.
    pub(crate) registered: bool,
    /// The descriptors of the queue.
    pub(crate) descriptors: Descriptors,
    /// Which queue.
    pub(crate) q_id: u16,
    /// The driver's number for the first tag.
    pub(crate) first_tag: u16,
    /// How many tags.
    pub(crate) tags: u16,
    /// The way of data.
    pub(crate) mode: DataMode,
    /// The most that a request moves: a multiple of the page size.
    pub(crate) io_max: Bytes,
    /// The device was made for commands about many tags at once.
    pub(crate) batch: bool,
    /// The integrity data that the device was made with.
    pub(crate) integrity: Option<Integrity>,
    /// The driver takes ioctl-encoded commands.
    pub(crate) encoded: bool,
    /// Memory that clients share, and what the driver calls it.
    pub(crate) client_memory: Option<(Arc<SharedFile>, u16)>,
    /// What is seen of it from outside.
    pub(crate) shared: Arc<LaneShared>,
}

/// On the reactor's thread.
fn open(lane: UblkLane, at: &Lane, fronts: &mut Fronts, turn: &mut Turn<'_>) -> Result<(), String> {
    let in_words = |error: std::io::Error| error.to_string();
    let file = if lane.registered {
        turn.ring.add_file(lane.device).map_err(in_words)?
    } else {
        turn.ring.add_unregistered_file(lane.device)
    };
    let client_memory = lane.client_memory.map(|(memory, index)| {
        let region = turn.ring.add_shared_memory(memory.as_fd(), memory.len())?;
        Ok(ClientMemory { region, len: memory.len(), index })
    });
    let client_memory = match client_memory.transpose() {
        Ok(memory) => memory,
        Err(error) => {
            turn.ring.remove_file(file);
            return Err(in_words(error));
        }
    };
    let config = LaneConfig {
        queue: at.queue,
        file,
        descriptors: lane.descriptors,
        q_id: lane.q_id,
        first_tag: lane.first_tag,
        depth: lane.tags,
        mode: lane.mode,
        lends: at.facts.lends,
        io_max: lane.io_max,
        batch: lane.batch,
        integrity: lane.integrity,
        encoded: lane.encoded,
        client_memory,
        shared: lane.shared,
    };
    fronts.ublk.open_lane(config, turn.ring).map_err(|error| {
        turn.ring.remove_file(file);
        if let Some(memory) = client_memory {
            turn.ring.remove_memory(memory.region);
        }
        error.to_string()
    })
}

impl Reactor {
    /// Have all tags of a queue fetched on this thread. Ends when the commands are with the ring, or with why they
    /// are not: then nothing was begun.
    pub(crate) fn serve_ublk(
        &self,
        device: &Arc<Device>,
        lane: UblkLane,
    ) -> oneshot::Receiver<Result<(), String>> {
        let (told, is_told) = oneshot::channel();
        let tags = lane.tags;
        self.attach_alone(
            device.clone(),
            tags,
            Box::new(move |at, fronts, turn| {
                // Memory that this thread asks for must not wait for what is written back through this very device.
                // Who may not ask for that has no device that others write through.
                let _ = rustix::process::configure_io_flusher_behavior(true);
                let opened = open(lane, at, fronts, turn);
                let _ = told.send(opened);
            }),
        );
        is_told
    }
}
