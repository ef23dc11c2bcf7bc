//! librbd: its C API, loaded at run time, and handles that are safe to use.

#![allow(unsafe_code)]

mod api;
mod connections;
mod flights;
mod image;
mod library;
mod metadata;

pub use api::{Declaration, declarations, values};
pub use connections::wait_until_closed;
pub(crate) use flights::{Command, Ended, Flights};
pub(crate) use image::{Image, Open};
pub use library::{Library, LibraryError};
