//! The descriptions in which users specify devices: stacks, layers, exports, names and whole topologies.
//!
//! A description is a text of comma-separated items, `kind:what,key=value,flag`. A comma that belongs to a path or a
//! value is doubled, as in QEMU: `file:odd,,name.img,ro`. Every description formats itself as the shortest text that
//! parses to the same value.
//!
//! Runs on any thread, at start-up. Nothing here opens a file, except [`DiskFileSpec::is_refused_as_raw`].
//!
//! *Invariant:* a parsed description is complete and consistent in itself: keys are known, given once, and
//! compatible with each other. Whether files exist is determined only by `check` and `open`.

#![forbid(unsafe_code)]

mod backend;
mod export;
mod layer;
mod name;
mod nbd;
mod null;
mod paths;
mod program;
mod rbd;
mod scheduler;
mod stack;
mod table;
pub mod topology;

pub use ::rbd::{Cache, RbdSpec};
pub use backend::{BackendRow, RandomStack, backend_rows};
pub use backends::{Direct, FileSpec, IrqMode, NullSpec, RamSpec};
pub use block::Bytes;
pub use export::{
    AclSpec, CdbMax, Conflict, Digests, ExportFile, ExportKind, ExportOptions, ExportRow, FileAccess,
    FuseSpec, ISCSI_PORT, IscsiName, IscsiSpec, LoopSpec, NBD_EXPORT_KEYS, NBD_LIMITS, NBD_PORT, NbdAddress,
    NbdDeviceSpec, NbdExportSpec, NbdLimits, NbdOptions, OverUring, PortalAddress, Recovery, SocketMode,
    TlsMode, TlsSpec, UblkSpec, VhostUserSpec, default_exports, export_rows, nbd_uri,
};
pub use images::{Backing, Format};
pub use layer::{CowSpec, LayerRow, LayerSpec, check_limits, layer_rows, unknown_layer, unknown_limit};
pub use layers::scheduler::{Policy, is_parameter as is_scheduler_parameter};
pub use name::DeviceName;
pub use nbd::{NBD_RECONNECT_DEFAULT, NBD_TIMEOUT_DEFAULT, NbdSpec};
pub use options::{OptionRow, SpecError, did_you_mean, format_time, parse_time};
pub use partition::Selector;
pub use paths::{Failback, MULTIPATH_OPTIONS, PathSpec};
pub use program::{PROGRAM_RECONNECT_DEFAULT, PROGRAM_TIMEOUT_DEFAULT, ProgramSpec};
pub use scheduler::misplaced;
pub use scheduler::{parse_scheduler, scheduler_of, with_scheduler};
pub use stack::{DiskFileSpec, FileFormat, SIZE_DEFAULT, StackSpec};
pub use table::{LineSpec, TableSpec, escaped_word};

/// The largest number of I/O threads of a process, and of hardware queues of a device.
pub const QUEUES_MAX: u16 = 256;

#[cfg(test)]
mod tests;
