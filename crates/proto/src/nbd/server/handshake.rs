//! The server's side of the NBD handshake, from the first byte to the transmission phase.
//!
//! The owner of the connection sends what [`Handshake::output`] holds, then feeds bytes in and polls:
//!
//! ```text
//! loop {
//!     send(handshake.output().drain(..));
//!     match handshake.poll() {
//!         Step::NeedInput => consumed += handshake.input(&received[consumed..], catalogue),
//!         Step::StartTls => { upgrade the stream; handshake.tls_started() }
//!         Step::Ready(session) => transmission, starting with what input() left,
//!         Step::Closed(why) => close,
//!     }
//! }
//! ```
//!
//! *Invariants:* at most one option of at most [`MAX_OPTION_BYTES`] is buffered; no input is consumed while
//! output is pending, so a client that never reads gets a single reply; bytes past the option that ends the
//! handshake are left to the caller.

use super::super::export::Session;
use super::super::wire::{self, ClientFlags, HandshakeFlags, option, rep};
use super::{Catalogue, Found};

/// Longest option that is processed. A name has at most 4 KiB, so no valid option is longer.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;
/// Longer options up to this size are skipped; beyond it the connection is closed.
pub(super) const MAX_SKIPPED_BYTES: u32 = 16 << 20;
/// Maximum number of options that a client may send.
pub const MAX_OPTIONS: u32 = 1000;
/// Maximum number of bytes that a client may send before transmission starts.
pub const MAX_HANDSHAKE_BYTES: u64 = 64 << 20;

/// TLS mode of the server ("TLS support").
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TlsMode {
    /// TLS is not offered.
    #[default]
    Off,
    /// TLS is used if the client requests it.
    Optional,
    /// TLS is required: other options than `STARTTLS` and `ABORT` are refused without it.
    Required,
}

/// Configuration of a server's handshakes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// TLS mode.
    pub tls: TlsMode,
    /// Whether `LIST` is answered; otherwise it is refused with ERR_POLICY.
    pub list: bool,
    /// Whether structured replies, and the features that need them, are offered.
    pub structured: bool,
    /// Whether extended headers are offered.
    pub extended: bool,
}

impl Default for Config {
    /// Returns a configuration that offers everything except TLS.
    fn default() -> Config {
        Config { tls: TlsMode::Off, list: true, structured: true, extended: true }
    }
}

/// The next action of the handshake's owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send the output first, then feed more bytes from the client.
    NeedInput,
    /// Send the output, upgrade the stream, then call [`Handshake::tls_started`]. Bytes received but not
    /// consumed belong to the TLS stream.
    StartTls,
    /// Send the output, then start transmission with this session.
    Ready(Session),
    /// Send the output, if any, and close.
    Closed(Closed),
}

/// Reasons why a handshake ended without a session.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Closed {
    /// The client sent `ABORT`.
    #[error("the client ended the handshake")]
    Aborted,
    /// The client set an unknown flag.
    #[error("unknown client flags {0:#x}")]
    UnknownClientFlags(u32),
    /// The client does not speak NBD.
    #[error("an option starts with {0:#x} instead of IHAVEOPT")]
    BadMagic(u64),
    /// An option is too long to be skipped.
    #[error("option {option} is {len} bytes long")]
    OptionTooLong {
        /// The option.
        option: u32,
        /// Length of its data in bytes.
        len: u32,
    },
    /// The client exceeded the limits of a handshake.
    #[error("more than {MAX_OPTIONS} options, or too many bytes of them")]
    TooMuch,
    /// `EXPORT_NAME` failed; the protocol has no error reply for it.
    #[error("no export for EXPORT_NAME \"{name}\": {why}")]
    Refused {
        /// Requested name.
        name: String,
        /// The reason for the refusal.
        why: &'static str,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    ClientFlags,
    OptionHeader,
    OptionData {
        option: u32,
        len: usize,
    },
    /// An option that is too long is being skipped.
    Skip {
        option: u32,
        left: u32,
    },
    StartTls,
    Ready,
    Closed,
}

/// The server's side of a handshake. See the module for how to drive it.
#[derive(Debug)]
pub struct Handshake {
    pub(super) config: Config,
    state: State,
    /// The item being received: flags, a header, or an option's data.
    buffer: Vec<u8>,
    pub(super) output: Vec<u8>,
    options: u32,
    received: u64,
    pub(super) no_zeroes: bool,
    pub(super) tls: bool,
    pub(super) structured: bool,
    pub(super) extended: bool,
    /// Export name that `base:allocation` was last selected for; `None` if not selected.
    pub(super) context_of: Option<String>,
    pub(super) shutting_down: bool,
    /// The negotiated session, once ready.
    session: Option<Session>,
    /// The reason for closing, once closed.
    closed: Option<Closed>,
}

impl Handshake {
    /// Starts a handshake; its greeting is in the output.
    pub fn new(config: Config) -> Handshake {
        let flags = HandshakeFlags::FIXED_NEWSTYLE.union(HandshakeFlags::NO_ZEROES);
        let mut output = Vec::with_capacity(wire::GREETING_LEN);
        output.extend(wire::GREETING_MAGIC.to_be_bytes());
        output.extend(wire::OPTION_MAGIC.to_be_bytes());
        output.extend(flags.bits().to_be_bytes());
        Handshake {
            config,
            state: State::ClientFlags,
            buffer: Vec::new(),
            output,
            options: 0,
            received: 0,
            no_zeroes: false,
            tls: false,
            structured: false,
            extended: false,
            context_of: None,
            shutting_down: false,
            session: None,
            closed: None,
        }
    }

    /// Returns the bytes to send. The caller removes what it has sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Returns the next action of the handshake's owner.
    pub fn poll(&self) -> Step {
        match self.state {
            State::StartTls => Step::StartTls,
            _ => match (&self.session, &self.closed) {
                (Some(session), _) => Step::Ready(session.clone()),
                (_, Some(closed)) => Step::Closed(closed.clone()),
                _ => Step::NeedInput,
            },
        }
    }

    /// Refuses every option except `ABORT` from now on ("Termination of the session": SHOULD be
    /// `ERR_SHUTDOWN`).
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    /// Continues after the stream has been upgraded to TLS. "TLS support": discards everything negotiated
    /// before, so that an attacker who changed the unencrypted part cannot influence the rest.
    pub fn tls_started(&mut self) {
        if self.state == State::StartTls {
            self.state = State::OptionHeader;
            self.tls = true;
            self.structured = false;
            self.extended = false;
            self.context_of = None;
        }
    }

    /// Processes bytes from the client and returns how many were consumed. The rest must be passed again
    /// after the output has been sent, unless [`Handshake::poll`] reports the end.
    pub fn input(&mut self, bytes: &[u8], catalogue: &dyn Catalogue) -> usize {
        let mut rest = bytes;
        while !rest.is_empty() && self.output.is_empty() {
            let taken = match self.state {
                State::Skip { option, left } => {
                    let taken = rest.len().min(left as usize);
                    self.skipped(option, left - taken as u32);
                    taken
                }
                State::StartTls | State::Ready | State::Closed => break,
                State::ClientFlags => self.gather(rest, 4, catalogue),
                State::OptionHeader => self.gather(rest, wire::OPTION_HEADER_LEN, catalogue),
                State::OptionData { len, .. } => self.gather(rest, len, catalogue),
            };
            rest = &rest[taken..];
            self.received += taken as u64;
            if self.received > MAX_HANDSHAKE_BYTES && self.session.is_none() {
                self.close(Closed::TooMuch);
            }
        }
        bytes.len() - rest.len()
    }

    /// Adds bytes to the item of `len` bytes that is being received, and processes it once it is complete.
    fn gather(&mut self, bytes: &[u8], len: usize, catalogue: &dyn Catalogue) -> usize {
        let taken = bytes.len().min(len - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        if self.buffer.len() == len {
            let item = std::mem::take(&mut self.buffer);
            match self.state {
                State::ClientFlags => self.client_flags(&item),
                State::OptionHeader => self.option_header(&item, catalogue),
                State::OptionData { option, .. } => self.option(option, &item, catalogue),
                State::Skip { .. } | State::StartTls | State::Ready | State::Closed => {}
            }
        }
        taken
    }

    fn client_flags(&mut self, item: &[u8]) {
        let flags = ClientFlags::from_bits_retain(wire::u32_at(item, 0).unwrap_or(u32::MAX));
        // "Newstyle negotiation": the server MUST close the connection on unknown flags.
        if !flags.difference(ClientFlags::all()).is_empty() {
            return self.close(Closed::UnknownClientFlags(flags.bits()));
        }
        self.no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
        self.state = State::OptionHeader;
    }

    fn option_header(&mut self, item: &[u8], catalogue: &dyn Catalogue) {
        let magic = wire::u64_at(item, 0).unwrap_or(0);
        let option = wire::u32_at(item, 8).unwrap_or(0);
        let len = wire::u32_at(item, 12).unwrap_or(u32::MAX);
        if magic != wire::OPTION_MAGIC {
            return self.close(Closed::BadMagic(magic));
        }
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return self.close(Closed::TooMuch);
        }
        if len <= MAX_OPTION_BYTES {
            self.state = State::OptionData { option, len: len as usize };
            if len == 0 {
                self.option(option, &[], catalogue);
            }
        } else if len <= MAX_SKIPPED_BYTES && option != option::EXPORT_NAME {
            self.state = State::Skip { option, left: len };
        } else {
            self.close(Closed::OptionTooLong { option, len });
        }
    }

    fn skipped(&mut self, option: u32, left: u32) {
        self.state = State::Skip { option, left };
        if left == 0 {
            self.state = State::OptionHeader;
            if self.config.tls == TlsMode::Required && !self.tls {
                self.refuse(option, rep::ERR_TLS_REQD, "TLS is required");
            } else {
                self.refuse(option, rep::ERR_TOO_BIG, "the option is too long");
            }
        }
    }

    /// Handles a complete option.
    fn option(&mut self, option: u32, data: &[u8], catalogue: &dyn Catalogue) {
        self.state = State::OptionHeader;
        super::options::handle(self, option, data, catalogue);
    }

    /// Sends a reply to an option; its data is the concatenation of `parts`.
    pub(super) fn reply(&mut self, option: u32, kind: u32, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.output.extend(wire::OPTION_REPLY_MAGIC.to_be_bytes());
        self.output.extend(option.to_be_bytes());
        self.output.extend(kind.to_be_bytes());
        self.output.extend((len as u32).to_be_bytes());
        for part in parts {
            self.output.extend_from_slice(part);
        }
    }

    pub(super) fn ack(&mut self, option: u32) {
        self.reply(option, rep::ACK, &[]);
    }

    /// Sends an error reply with a human-readable message.
    pub(super) fn refuse(&mut self, option: u32, kind: u32, message: &str) {
        self.reply(option, kind, &[message.as_bytes()]);
    }

    pub(super) fn close(&mut self, why: Closed) {
        self.state = State::Closed;
        self.closed = Some(why);
    }

    pub(super) fn start_tls(&mut self) {
        self.state = State::StartTls;
    }

    /// Starts transmission with `found`, which the client requested as `name`.
    pub(super) fn start(&mut self, name: &str, found: &Found, block_sizes_agreed: bool) {
        self.state = State::Ready;
        self.session = Some(Session {
            export: found.id,
            name: name.to_owned(),
            size: found.info.size,
            flags: found.info.transmission_flags(self.style(), self.has_context(name)),
            style: self.style(),
            block_sizes: found.info.block_sizes,
            block_sizes_agreed,
            base_allocation: self.has_context(name).then_some(super::meta::BASE_ALLOCATION_ID),
            tls: self.tls,
        });
    }
}

#[cfg(test)]
mod tests;
