//! A connection from its first byte to the transmission phase, seen from the server.
//!
//! Whoever owns the connection sends what [`Handshake::output`] holds, then feeds bytes in and polls:
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
//! *Invariants:* at most one option is held, of at most [`MAX_OPTION_BYTES`]; nothing is consumed
//! while output waits, so a client that never reads is never answered twice; a byte past the option
//! that ends the handshake is left to the caller.

use super::super::export::Session;
use super::super::wire::{self, ClientFlags, HandshakeFlags, option, rep};
use super::{Catalogue, Found};

/// The longest option that is looked at. A name is at most 4 KiB, so nothing sensible is longer.
pub const MAX_OPTION_BYTES: u32 = 64 << 10;
/// A longer one is read past, up to this; beyond it the connection is closed.
pub(super) const MAX_SKIPPED_BYTES: u32 = 16 << 20;
/// How many options a client may send.
pub const MAX_OPTIONS: u32 = 1000;
/// How many bytes a client may send before transmission starts.
pub const MAX_HANDSHAKE_BYTES: u64 = 64 << 20;

/// Whether the server speaks TLS ("TLS support").
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TlsMode {
    /// It does not.
    #[default]
    Off,
    /// If the client wants.
    Optional,
    /// Nothing but `STARTTLS` and `ABORT` gets anywhere without.
    Required,
}

/// How a server behaves during handshakes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Whether it speaks TLS.
    pub tls: TlsMode,
    /// Whether `LIST` is answered; it is refused by policy otherwise.
    pub list: bool,
    /// Whether structured replies and what needs them are offered.
    pub structured: bool,
    /// Whether extended headers are offered.
    pub extended: bool,
}

impl Default for Config {
    /// All that there is, without TLS.
    fn default() -> Config {
        Config { tls: TlsMode::Off, list: true, structured: true, extended: true }
    }
}

/// What the connection waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// More bytes; send the output first.
    NeedInput,
    /// Send the output, upgrade the stream, then call [`Handshake::tls_started`]. Bytes that were
    /// received but not consumed belong to the TLS stream.
    StartTls,
    /// Send the output; transmission starts.
    Ready(Session),
    /// Send the output, if any, and close.
    Closed(Closed),
}

/// Why a handshake ended without a session.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Closed {
    /// The client asked for it.
    #[error("the client ended the handshake")]
    Aborted,
    /// The client claims to know what this server does not.
    #[error("unknown client flags {0:#x}")]
    UnknownClientFlags(u32),
    /// It does not speak this protocol.
    #[error("an option starts with {0:#x} instead of IHAVEOPT")]
    BadMagic(u64),
    /// An option is longer than what would be read past.
    #[error("option {option} is {len} bytes long")]
    OptionTooLong {
        /// Which.
        option: u32,
        /// Its length.
        len: u32,
    },
    /// It haggles without end.
    #[error("more than {MAX_OPTIONS} options, or too many bytes of them")]
    TooMuch,
    /// `EXPORT_NAME` for what it cannot have: the protocol leaves no way to say so.
    #[error("no export for EXPORT_NAME \"{name}\": {why}")]
    Refused {
        /// What it asked for.
        name: String,
        /// Why it cannot have it.
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
    /// An option that is too long is being read past.
    Skip {
        option: u32,
        left: u32,
    },
    StartTls,
    Ready,
    Closed,
}

/// A server's side of a handshake. See the module for how it is driven.
#[derive(Debug)]
pub struct Handshake {
    pub(super) config: Config,
    state: State,
    /// The item that is being received: flags, a header, or an option's data.
    buffer: Vec<u8>,
    pub(super) output: Vec<u8>,
    options: u32,
    received: u64,
    pub(super) no_zeroes: bool,
    pub(super) tls: bool,
    pub(super) structured: bool,
    pub(super) extended: bool,
    /// The export name that `base:allocation` was last selected for; `None` when it was not.
    pub(super) context_of: Option<String>,
    pub(super) shutting_down: bool,
    /// Present once ready.
    session: Option<Session>,
    /// Present once closed.
    closed: Option<Closed>,
}

impl Handshake {
    /// A new connection. Its greeting is in the output.
    pub fn new(config: Config) -> Handshake {
        let flags = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
        let mut output = Vec::with_capacity(wire::GREETING_LEN);
        output.extend(wire::GREETING_MAGIC.to_be_bytes());
        output.extend(wire::OPTION_MAGIC.to_be_bytes());
        output.extend(flags.0.to_be_bytes());
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

    /// What is to be sent. Whoever sends it takes it out.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// What the connection waits for.
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

    /// From now on every option but `ABORT` is refused ("Termination of the session": SHOULD be
    /// `ERR_SHUTDOWN`).
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    /// The stream has been upgraded. "TLS support": whatever was agreed on before is void, so that
    /// nobody who changed the plain part has a say in the rest.
    pub fn tls_started(&mut self) {
        if self.state == State::StartTls {
            self.state = State::OptionHeader;
            self.tls = true;
            self.structured = false;
            self.extended = false;
            self.context_of = None;
        }
    }

    /// Takes bytes from the client; answers how many. The rest is for later: there is output to be
    /// sent first, or [`Handshake::poll`] has news.
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

    /// Adds to the item of `len` bytes that is being received, and acts on it once it is whole.
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
        let flags = ClientFlags(wire::u32_at(item, 0).unwrap_or(u32::MAX));
        // "Newstyle negotiation": the server MUST close on flags that it does not know.
        if !flags.without(ClientFlags::KNOWN).is_empty() {
            return self.close(Closed::UnknownClientFlags(flags.0));
        }
        self.no_zeroes = flags.has(ClientFlags::NO_ZEROES);
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

    /// A whole option has come in.
    fn option(&mut self, option: u32, data: &[u8], catalogue: &dyn Catalogue) {
        self.state = State::OptionHeader;
        super::options::handle(self, option, data, catalogue);
    }

    /// Sends a reply to an option; its data is `parts`, one after the other.
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

    /// Sends an error with a message for people.
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

    /// Transmission starts with `found`, which the client called `name`.
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
