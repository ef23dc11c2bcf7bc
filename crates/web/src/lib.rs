//! The page: what a process's devices do, live, in a browser.
//!
//! [`Listening`] is served from a thread of its own, at the lowest priority that there is: it takes
//! what processor time I/O leaves. Once a second that thread looks at all devices ([`collect`]), makes one text of it
//! and sends that to everybody who watches ([`viewers`]); whatever else is asked for is answered from what it made.
//! Actions are carried out where the control socket's are. Without a page there is neither thread nor socket.
//!
//! *Invariant:* nothing is answered to who does not have the token, or whose browser was led here by another page
//! ([`guard`]).
//! *Invariant:* connections, viewers, history and what waits for each viewer are bounded; a slow viewer is cut off.
//! *Invariant:* it knows devices through [`engine::control::Yard`] only, and nothing of the I/O path.

#![forbid(unsafe_code)]

mod actions;
mod address;
mod assets;
mod collect;
mod guard;
mod history;
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
