//! The web page: a live view of a process's devices in a browser.
//!
//! A separate thread at the lowest priority serves [`Listening`], with the processor time that I/O leaves.
//! Once a second that thread samples all devices ([`collect`]) and sends one text to all viewers
//! ([`viewers`]); other requests are answered from the last sample. Actions run on the control plane's
//! runtime, as those of the control socket do. Without a page no thread and no socket exist.
//!
//! *Invariant:* a request without the token, or from a page of another origin, gets no data ([`guard`]).
//! *Invariant:* connections, viewers, history and the events that wait for a viewer are bounded; a slow
//! viewer is disconnected.
//! *Invariant:* devices are accessed through [`engine::control::HostView`] only; nothing here is on the I/O
//! path.

#![forbid(unsafe_code)]

mod actions;
mod address;
mod assets;
mod collect;
mod guard;
mod history;
mod marks;
mod owner;
mod paths;
mod rates;
mod routes;
mod server;
mod stack;
mod token;
mod viewers;

pub use address::{AddressError, WebAddress};
pub use owner::is_ours;
pub use server::{Listening, Page, WebConfig, WebError};
pub use token::{Token, TokenError};
