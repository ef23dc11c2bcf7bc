//! Topology, device trees, threads, life cycle and the control API.

#![forbid(unsafe_code)]

pub mod cached;
pub mod change;
pub mod chores;
pub mod commit;
pub mod control;
pub mod cycle;
pub mod deleted;
pub mod device;
mod dial;
pub mod fuse;
pub mod glance;
pub mod host;
mod layer_change;
pub mod limits;
pub mod listen;
mod log_limit;
mod looking;
pub mod loop_device;
pub mod nbd;
pub mod nbd_device;
mod pace;
mod partitions;
pub mod path_status;
pub mod paths;
pub mod places;
pub mod private;
mod private_key;
mod reactor;
pub mod replay;
pub mod rundir;
mod scheduler;
pub mod slow;
mod stacking;
mod start;
pub mod tables;
mod timeouts;
pub mod topology;
pub mod trace;
mod tree;
pub mod ublk;
mod ublk_lane;
pub mod watch;
mod yard;

pub use loopdev::remove as remove_loop;
pub use spec;
