//! What `./x` does once the machine has what it needs.
//!
//! `chores` runs other programs and counts what passed; `flakes` runs tests under load; `tidy` reads the tree and names what breaks its rules; `rooms`
//! holds who may use whom; `guest` runs a job on a real kernel. Nothing here is linked into the product.
#![forbid(unsafe_code)]

pub mod chores;
pub mod flakes;
pub mod guest;
pub mod rooms;
mod sanitizers;
pub mod tidy;
