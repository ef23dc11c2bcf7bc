//! Hands a ublk queue, or a part of one, to a reactor.

use block::{Bytes, Integrity};
use engine::device::Device;
use engine::reactor::{OwnQueue, QueueHandle, Reactor};
use exports::ublk::{ClientMemory, DataMode, ServedQueueConfig, ServedQueueShared};
use exports::{Fronts, Turn};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tokio::sync::oneshot;
use ublk::Descriptors;
use ublk::kernel::SharedFile;

/// A ublk queue, or the part of one that a reactor serves.
pub(crate) struct UblkQueue {
    /// The character device.
    pub(crate) device: Arc<OwnedFd>,
    /// Whether the ring may register the file: on this kernel a registered file does not delay `DEL_DEV`.
    pub(crate) registered: bool,
    /// I/O descriptors of the queue, mapped.
    pub(crate) descriptors: Descriptors,
    /// Queue ID.
    pub(crate) q_id: u16,
    /// The driver's number of the first tag.
    pub(crate) first_tag: u16,
    /// Number of tags.
    pub(crate) tags: u16,
    /// How data is transferred.
    pub(crate) mode: DataMode,
    /// Largest request: a multiple of the page size.
    pub(crate) io_max: Bytes,
    /// Whether the device was created with `BATCH_IO`.
    pub(crate) batch: bool,
    /// Integrity data that the device was created with.
    pub(crate) integrity: Option<Integrity>,
    /// Whether the driver takes ioctl-encoded commands.
    pub(crate) encoded: bool,
    /// Memory shared with clients, and the driver's index of it.
    pub(crate) client_memory: Option<(Arc<SharedFile>, u16)>,
    /// Counters and size, shared with the control plane.
    pub(crate) shared: Arc<ServedQueueShared>,
}

/// Starts to serve the queue, on the reactor's thread.
fn open(queue: UblkQueue, at: &QueueHandle, fronts: &mut Fronts, turn: &mut Turn<'_>) -> Result<(), String> {
    let text_of = |error: std::io::Error| error.to_string();
    let file = if queue.registered {
        turn.ring.add_file(queue.device).map_err(text_of)?
    } else {
        turn.ring.add_unregistered_file(queue.device)
    };
    let client_memory = queue.client_memory.map(|(memory, index)| {
        let region = turn.ring.add_shared_memory(memory.as_fd(), memory.len())?;
        Ok(ClientMemory { region, len: memory.len(), index })
    });
    let client_memory = match client_memory.transpose() {
        Ok(memory) => memory,
        Err(error) => {
            turn.ring.remove_file(file);
            return Err(text_of(error));
        }
    };
    let config = ServedQueueConfig {
        queue: at.queue,
        file,
        descriptors: queue.descriptors,
        q_id: queue.q_id,
        first_tag: queue.first_tag,
        depth: queue.tags,
        mode: queue.mode,
        zero_copy_reads: at.facts.zero_copy_reads,
        io_max: queue.io_max,
        batch: queue.batch,
        integrity: queue.integrity,
        encoded: queue.encoded,
        client_memory,
        shared: queue.shared,
    };
    fronts.ublk.add_queue(config, turn.ring).map_err(|error| {
        turn.ring.remove_file(file);
        if let Some(memory) = client_memory {
            turn.ring.remove_memory(memory.region);
        }
        error.to_string()
    })
}

/// Has a reactor fetch all tags of a queue. Resolves when the commands are in the ring, or with an error if
/// none was submitted.
pub(super) fn serve(
    reactor: &Reactor,
    device: &Arc<Device>,
    queue: UblkQueue,
) -> oneshot::Receiver<Result<(), String>> {
    let (sender, opened) = oneshot::channel();
    let own = OwnQueue::with_tags(queue.tags);
    reactor.attach_alone(
        device.clone(),
        own,
        Box::new(move |at, fronts, turn| {
            // Memory that this thread allocates must not wait for writeback through this device. Without
            // the capability this fails, but then no other process writes back to the device.
            let _ = rustix::process::configure_io_flusher_behavior(true);
            let result = open(queue, at, fronts, turn);
            let _ = sender.send(result);
        }),
    );
    opened
}
