//! The backends of a tree: what each kind offers a device, and how its node is put on a ring.
//!
//! A backend implements [`Source`] in a file of this module, and [`open`] lists its constructor. Nothing else
//! in the engine knows which backends exist.

mod file;
mod memory;
mod remote;

pub(super) use file::reuse_file;
pub(super) use remote::{open_assumed, reuse_rbd};

use super::RingResources;
use crate::connect::Remote;
use crate::device::DeviceError;
use crate::device::dependencies::Dependencies;
use crate::programs::ExecDevice;
use crate::spec::StackSpec;
use backends::{Backend, Custom, File, Null};
use block::{Integrity, Profile};
use queue::Node;
use rbd::Rbd;
use ring::KernelRing;
use std::io;
use std::sync::Arc;

/// Traits of a backend that its queue limits do not contain.
#[derive(Clone, Copy)]
pub(crate) struct Traits {
    /// Requests may begin and end at any byte.
    bytewise: bool,
    /// Reads return memory of the process, which may be sent without a copy.
    zero_copy_reads: bool,
    /// Requests complete within `submit`.
    inline: bool,
    /// Block status distinguishes holes from data.
    sparse: bool,
    /// No request accesses its data, which may be memory that only the kernel can access.
    opaque: bool,
}

impl Default for Traits {
    fn default() -> Traits {
        Traits { bytewise: true, zero_copy_reads: false, inline: false, sparse: false, opaque: false }
    }
}

/// The shared part of a backend, opened once for all queues of a device.
pub(crate) trait Source: Send + Sync {
    /// Returns the kind, as it is typed before the colon.
    fn name(&self) -> &'static str;

    /// Returns whether [`Op::CompareAndWrite`](block::Op::CompareAndWrite) may be sent to it.
    fn compares_and_writes(&self) -> bool {
        false
    }

    /// Returns what distinguishes the backend from others of its kind: a path, a URI, or the size.
    fn label(&self) -> String {
        self.backend().size().to_string()
    }

    /// Returns the backend's size, features and limits.
    fn backend(&self) -> &dyn Backend;

    /// Returns the traits that the limits do not contain.
    fn traits(&self) -> Traits {
        Traits::default()
    }

    /// Builds the node of a queue, on the thread that owns `ring`. `resources` records what the ring holds
    /// for it.
    ///
    /// # Errors
    /// The ring or the kernel refuses a file or memory, or the backend another queue.
    fn build_node(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>>;

    /// Adds the files and servers that the backend uses.
    fn add_dependencies(&self, _: &mut Dependencies) {}

    /// Returns whether only one queue may use the backend.
    fn is_single(&self) -> bool {
        false
    }

    /// Returns whether all acknowledged data outlives the process.
    fn survives(&self) -> bool {
        true
    }

    /// Replaces `format=probe` in the description by the format that was found, which is not probed again.
    fn record_format(&self, _: &mut StackSpec) {}

    /// Returns the integrity data that the backend keeps.
    fn integrity(&self) -> Option<Integrity> {
        None
    }

    /// Returns the raw file, if the backend is one.
    fn file(&self) -> Option<&Arc<File>> {
        None
    }

    /// Returns the image of a cluster, if the backend is one.
    fn rbd(&self) -> Option<&Arc<Rbd>> {
        None
    }

    /// Returns the null device, if the backend is one.
    fn null(&self) -> Option<&Null> {
        None
    }

    /// Returns the connection to an NBD server, if the backend is one.
    fn remote(&self) -> Option<&Remote> {
        None
    }
}

impl dyn Source {
    /// Returns the current profile.
    pub(crate) fn profile(&self) -> Profile {
        let backend = self.backend();
        let Traits { bytewise, zero_copy_reads, inline, sparse, opaque } = self.traits();
        Profile {
            size: backend.size(),
            read_only: backend.read_only(),
            abilities: backend.features(),
            limits: backend.limits(),
            bytewise,
            zero_copy_reads,
            inline,
            sparse,
            opaque,
        }
    }
}

/// Opens a backend. `device`: the name of the device that it is opened for, for the log.
///
/// # Errors
/// The backend refuses the description, or cannot be reached.
pub(crate) fn open(spec: &StackSpec, device: Option<&str>) -> Result<Arc<dyn Source>, DeviceError> {
    Ok(match spec {
        StackSpec::File(spec) => file::open(spec, device)?,
        StackSpec::Ram(spec) => memory::open_ram(spec)?,
        StackSpec::Null(spec) => memory::open_null(spec)?,
        StackSpec::Zero(size) => memory::open_zero(*size)?,
        StackSpec::Error(size) => memory::open_failing(*size),
        StackSpec::Nbd(spec) => Arc::new(Remote::open(spec, device)?),
        StackSpec::Nbdkit(spec) => Arc::new(Remote::open_nbdkit(spec, device)?),
        StackSpec::Rbd(spec) => remote::open_rbd(spec)?,
        StackSpec::Exec(spec) => Arc::new(ExecDevice::open(spec, device)?),
        StackSpec::Custom(spec) => Arc::new(Custom::new(spec)?),
        // A table's argument cannot be a table, and a device with a table is a tree.
        StackSpec::Table(_) => unreachable!("a table is no backend"),
    })
}
