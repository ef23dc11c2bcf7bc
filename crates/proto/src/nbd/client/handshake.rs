//! The client's side of the NBD handshake, from the first byte to the transmission phase.
//!
//! The client negotiates one option at a time, the most useful first: TLS, extended headers or else
//! structured replies, the metadata context, then `GO` or else `EXPORT_NAME`. It does without options that
//! the server refuses, unless the [`HandshakeOptions`] requires them. It is driven like the server's side:
//! send the output, feed bytes, poll. A handshake that fails ends with `ABORT`, as the protocol requires
//! (MUST).
//!
//! *Invariants:* a reply of more than [`MAX_REPLY_BYTES`] or a list of more than [`MAX_LISTED`] exports ends
//! the handshake; bytes past its end are left to the caller.

use super::super::export::{BlockSizes, ExportId, Session};
use super::super::reply::Style;
use super::super::wire::{self, ClientFlags, HandshakeFlags, TransmissionFlags, option};

/// Longest accepted reply to an option, in bytes.
pub const MAX_REPLY_BYTES: u32 = 64 << 10;
/// Maximum number of exports accepted from a list.
pub const MAX_LISTED: usize = 10_000;

/// Whether the client requests TLS.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TlsPolicy {
    /// Do not use TLS.
    #[default]
    Never,
    /// Use TLS if the server offers it. An active attacker can prevent that.
    IfOffered,
    /// Require TLS.
    Always,
}

/// Purpose of the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Goal {
    /// Start transmission.
    #[default]
    Go,
    /// List the server's exports.
    List,
}

/// The options that a client requests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HandshakeOptions {
    /// Name of the export.
    pub export: String,
    /// Purpose of the handshake.
    pub goal: Goal,
    /// Whether to use TLS.
    pub tls: TlsPolicy,
    /// Request structured replies.
    pub structured: bool,
    /// Request extended headers.
    pub extended: bool,
    /// Request the metadata context `base:allocation`.
    pub allocation: bool,
}

impl HandshakeOptions {
    /// Creates options that request everything except TLS.
    pub fn new(export: impl Into<String>) -> HandshakeOptions {
        let (goal, tls) = (Goal::Go, TlsPolicy::Never);
        HandshakeOptions {
            export: export.into(),
            goal,
            tls,
            structured: true,
            extended: true,
            allocation: true,
        }
    }
}

/// An export in the server's list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Name of the export.
    pub name: String,
    /// The server's description; may be empty.
    pub description: String,
}

/// The next action of the handshake's owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send the output first, then feed more bytes from the server.
    NeedInput,
    /// Upgrade the stream, then call [`Handshake::tls_started`].
    StartTls,
    /// Start transmission with this session.
    Ready(Session),
    /// The list is complete; send the output and close.
    Listed(Vec<Listed>),
    /// Send the output, if any, and close.
    Failed(Failure),
}

/// Reasons why a handshake failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    /// The greeting, whose first 8 bytes are given, is not an NBD server's.
    #[error("the peer does not speak NBD: its greeting has {0:#x}")]
    NotNbd(u64),
    /// The server speaks the oldstyle protocol (before 2011), which cannot name exports.
    #[error("the server speaks the oldstyle protocol only")]
    Oldstyle,
    /// TLS is required and the server does not offer it.
    #[error("the server does not offer TLS, which was asked for: {0}")]
    NoTls(String),
    /// The server refused a required option.
    #[error("the server refused option {option}: {why} (error {kind:#x}{})", advice(*kind))]
    Refused {
        /// The option.
        option: u32,
        /// Type of the error reply.
        kind: u32,
        /// The server's message, or the meaning of the error type.
        why: String,
    },
    /// The server violated the protocol.
    #[error("the server broke the protocol: {0}")]
    Broken(&'static str),
}

/// Returns advice for the user on an error type.
fn advice(kind: u32) -> &'static str {
    match kind {
        wire::rep::ERR_UNKNOWN => "; nbdinfo --list URI lists its exports",
        wire::rep::ERR_TLS_REQD => "; write nbds or nbds+unix in the URI",
        _ => "",
    }
}

/// State: what the next bytes from the server contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Greeting,
    ReplyHeader,
    ReplyData { kind: u32, len: usize },
    ExportName { len: usize },
    TlsUpgrade,
    Done,
}

/// The client's side of a handshake. See the module for how to drive it.
#[derive(Debug)]
pub struct Handshake {
    pub(super) requested: HandshakeOptions,
    state: State,
    /// The option that awaits its reply.
    pub(super) pending: u32,
    buffer: Vec<u8>,
    output: Vec<u8>,
    no_zeroes: bool,
    pub(super) tls: bool,
    pub(super) style: Style,
    /// Id of `base:allocation`, once selected.
    pub(super) context: Option<u32>,
    /// Size and flags, once received.
    pub(super) export: Option<(u64, TransmissionFlags)>,
    /// Block size constraints, once received.
    pub(super) block_sizes: Option<BlockSizes>,
    pub(super) listed: Vec<Listed>,
    /// Result of the handshake, once it has ended.
    end: Option<Step>,
}

impl Handshake {
    /// Starts a handshake. The server speaks first.
    pub fn new(requested: HandshakeOptions) -> Handshake {
        Handshake {
            requested,
            state: State::Greeting,
            pending: 0,
            buffer: Vec::new(),
            output: Vec::new(),
            no_zeroes: false,
            tls: false,
            style: Style::Simple,
            context: None,
            export: None,
            block_sizes: None,
            listed: Vec::new(),
            end: None,
        }
    }

    /// Returns the bytes to send. The caller removes what it has sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Returns the next action of the handshake's owner.
    pub fn poll(&self) -> Step {
        match (&self.end, self.state) {
            (Some(end), _) => end.clone(),
            (None, State::TlsUpgrade) => Step::StartTls,
            (None, _) => Step::NeedInput,
        }
    }

    /// Continues after the stream has been upgraded to TLS.
    pub fn tls_started(&mut self) {
        if self.state == State::TlsUpgrade {
            self.tls = true;
            self.state = State::ReplyHeader;
            self.ask_next(option::STARTTLS);
        }
    }

    /// Processes bytes from the server and returns how many were consumed; the rest must be passed again
    /// later.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while !rest.is_empty() && self.output.is_empty() {
            let len = match self.state {
                State::Greeting => wire::GREETING_LEN,
                State::ReplyHeader => wire::OPTION_REPLY_HEADER_LEN,
                State::ReplyData { len, .. } | State::ExportName { len } => len,
                State::TlsUpgrade | State::Done => break,
            };
            let taken = rest.len().min(len - self.buffer.len());
            self.buffer.extend_from_slice(&rest[..taken]);
            rest = &rest[taken..];
            if self.buffer.len() == len {
                let item = std::mem::take(&mut self.buffer);
                if let Err(failure) = self.item(&item) {
                    self.fail(failure);
                }
            }
        }
        bytes.len() - rest.len()
    }

    fn item(&mut self, item: &[u8]) -> Result<(), Failure> {
        match self.state {
            State::Greeting => self.greeting(item),
            State::ReplyHeader => self.reply_header(item),
            State::ReplyData { kind, .. } => {
                self.state = State::ReplyHeader;
                self.reply(kind, item)
            }
            State::ExportName { .. } => {
                self.export =
                    wire::u64_at(item, 0).zip(wire::u16_at(item, 8).map(TransmissionFlags::from_bits_retain));
                self.ready()
            }
            State::TlsUpgrade | State::Done => Ok(()),
        }
    }

    fn greeting(&mut self, item: &[u8]) -> Result<(), Failure> {
        let magic = wire::u64_at(item, 0).unwrap_or(0);
        if magic != wire::GREETING_MAGIC {
            return Err(Failure::NotNbd(magic));
        }
        match wire::u64_at(item, 8).unwrap_or(0) {
            wire::OPTION_MAGIC => {}
            wire::OLDSTYLE_MAGIC => return Err(Failure::Oldstyle),
            other => return Err(Failure::NotNbd(other)),
        }
        let theirs = HandshakeFlags::from_bits_retain(wire::u16_at(item, 16).unwrap_or(0));
        let fixed = theirs.contains(HandshakeFlags::FIXED_NEWSTYLE);
        // The client SHOULD ignore flags that it does not know, and MUST NOT answer with them.
        self.no_zeroes = theirs.contains(HandshakeFlags::NO_ZEROES);
        let ours = ClientFlags::empty()
            .with_if(fixed, ClientFlags::FIXED_NEWSTYLE)
            .with_if(self.no_zeroes, ClientFlags::NO_ZEROES);
        self.output.extend(ours.bits().to_be_bytes());
        self.state = State::ReplyHeader;
        if fixed {
            self.ask_first();
            return Ok(());
        }
        // "Newstyle negotiation": without fixed newstyle, EXPORT_NAME is the only option that works.
        if self.requested.tls == TlsPolicy::Always {
            return Err(Failure::NoTls("it does not speak fixed newstyle".into()));
        }
        if self.requested.goal == Goal::List {
            return Err(Failure::Broken("a server that is not fixed newstyle cannot list its exports"));
        }
        self.ask_export_name();
        Ok(())
    }

    fn reply_header(&mut self, item: &[u8]) -> Result<(), Failure> {
        let magic = wire::u64_at(item, 0).unwrap_or(0);
        let option = wire::u32_at(item, 8).unwrap_or(0);
        let kind = wire::u32_at(item, 12).unwrap_or(0);
        let len = wire::u32_at(item, 16).unwrap_or(u32::MAX);
        if magic != wire::OPTION_REPLY_MAGIC {
            return Err(Failure::Broken("a reply does not start with its magic"));
        }
        if option != self.pending {
            return Err(Failure::Broken("a reply is to an option that was not sent"));
        }
        if len > MAX_REPLY_BYTES {
            return Err(Failure::Broken("a reply is longer than 64 KiB"));
        }
        if len == 0 {
            return self.reply(kind, &[]);
        }
        self.state = State::ReplyData { kind, len: len as usize };
        Ok(())
    }

    /// Sends an option; its data is the concatenation of `parts`.
    pub(super) fn ask(&mut self, option: u32, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.pending = option;
        self.output.extend(wire::OPTION_MAGIC.to_be_bytes());
        self.output.extend(option.to_be_bytes());
        self.output.extend((len as u32).to_be_bytes());
        for part in parts {
            self.output.extend_from_slice(part);
        }
    }

    pub(super) fn ask_export_name(&mut self) {
        let name = self.requested.export.clone();
        self.ask(option::EXPORT_NAME, &[name.as_bytes()]);
        let zeroes = if self.no_zeroes { 0 } else { wire::EXPORT_NAME_ZEROES };
        self.state = State::ExportName { len: 10 + zeroes };
    }

    pub(super) fn upgrade(&mut self) {
        self.state = State::TlsUpgrade;
    }

    /// Ends the handshake: transmission starts.
    pub(super) fn ready(&mut self) -> Result<(), Failure> {
        let (size, flags) = self.export.ok_or(Failure::Broken("it sent no size and flags"))?;
        // "Block size constraints": without negotiated constraints a client SHOULD send at most 32 MiB per
        // request.
        let portable = BlockSizes { maximum: wire::PORTABLE_PAYLOAD, ..BlockSizes::DEFAULT };
        self.state = State::Done;
        self.end = Some(Step::Ready(Session {
            export: ExportId(0),
            name: self.requested.export.clone(),
            size,
            flags,
            style: self.style,
            block_sizes: self.block_sizes.unwrap_or(portable),
            block_sizes_agreed: self.block_sizes.is_some(),
            base_allocation: self.context,
            tls: self.tls,
        }));
        Ok(())
    }

    /// Finishes after the last export of a list.
    pub(super) fn finish_list(&mut self) {
        let listed = std::mem::take(&mut self.listed);
        self.abort();
        self.end = Some(Step::Listed(listed));
    }

    fn fail(&mut self, failure: Failure) {
        // "Termination of the session": a client that gives up MUST send ABORT if it can. It cannot after
        // EXPORT_NAME, or if the peer is not an NBD server.
        let negotiating = matches!(self.state, State::ReplyHeader) && self.pending != 0;
        if negotiating && !matches!(failure, Failure::Broken(_)) {
            self.abort();
        }
        self.state = State::Done;
        self.end = Some(Step::Failed(failure));
    }

    fn abort(&mut self) {
        self.ask(option::ABORT, &[]);
        self.state = State::Done;
    }
}

#[cfg(test)]
mod tests;
