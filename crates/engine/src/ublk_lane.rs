//! Giving a reactor a queue of a ublk device to serve, from the control plane.

use crate::device::Device;
use crate::reactor::Reactor;
use block::Bytes;
use exports::ublk::{DataMode, LaneConfig, LaneShared};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::sync::oneshot;
use ublk::Descriptors;

/// A queue of a ublk device, or the part of one that one thread serves.
pub(crate) struct UblkLane {
    /// The character device.
    pub(crate) device: Arc<OwnedFd>,
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
    /// The driver takes ioctl-encoded commands.
    pub(crate) encoded: bool,
    /// What is seen of it from outside.
    pub(crate) shared: Arc<LaneShared>,
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
                let opened =
                    turn.ring.add_file(lane.device).map_err(|error| error.to_string()).and_then(|file| {
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
                            encoded: lane.encoded,
                            shared: lane.shared,
                        };
                        fronts.ublk.open_lane(config, turn.ring).map_err(|error| {
                            turn.ring.remove_file(file);
                            error.to_string()
                        })
                    });
                let _ = told.send(opened);
            }),
        );
        is_told
    }
}
