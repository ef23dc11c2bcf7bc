//! A connection from its first byte to the transmission phase, seen from the client.
//!
//! It asks for one thing at a time, the best first: TLS, extended headers, else structured replies,
//! the metadata context, then `GO`, else `EXPORT_NAME`. What a server refuses is done without, save
//! for what the [`Wish`] insists on. It is driven as the server's half is: send the output, feed
//! bytes, poll. It ends a session that came to nothing with `ABORT`, as a client MUST.
//!
//! *Invariants:* a reply of more than [`MAX_REPLY_BYTES`] or a list of more than [`MAX_LISTED`] ends
//! the handshake; bytes past its end are left to the caller.

use super::super::export::{BlockSizes, ExportId, Session};
use super::super::reply::Style;
use super::super::wire::{self, ClientFlags, HandshakeFlags, TransmissionFlags, option};

/// The longest reply to an option that is taken.
pub const MAX_REPLY_BYTES: u32 = 64 << 10;
/// The most exports that are taken from a list.
pub const MAX_LISTED: usize = 10_000;

/// Whether the client wants TLS.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum TlsWish {
    /// No.
    #[default]
    Never,
    /// If the server has it. Whoever sits in between can prevent it.
    IfOffered,
    /// Or nothing at all.
    Always,
}

/// What the client is after.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Goal {
    /// The export, for transmission.
    #[default]
    Go,
    /// The names of the server's exports.
    List,
}

/// What a client would like to have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The export's name.
    pub export: String,
    /// What for.
    pub goal: Goal,
    /// Encryption.
    pub tls: TlsWish,
    /// Structured replies, if the server has them.
    pub structured: bool,
    /// Extended headers, if the server has them.
    pub extended: bool,
    /// `base:allocation`, if the server has it.
    pub allocation: bool,
}

impl Wish {
    /// Everything that helps, without TLS.
    pub fn new(export: impl Into<String>) -> Wish {
        let (goal, tls) = (Goal::Go, TlsWish::Never);
        Wish { export: export.into(), goal, tls, structured: true, extended: true, allocation: true }
    }
}

/// An export of a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// What the server says about it; empty when nothing.
    pub description: String,
}

/// What the connection waits for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// More bytes; send the output first.
    NeedInput,
    /// Upgrade the stream, then call [`Handshake::tls_started`].
    StartTls,
    /// Transmission starts.
    Ready(Session),
    /// The list; send the output and close.
    Listed(Vec<Listed>),
    /// Send the output, if any, and close.
    Failed(Failure),
}

/// Why a handshake came to nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    /// The greeting is not one.
    #[error("the peer does not speak NBD: its greeting has {0:#x}")]
    NotNbd(u64),
    /// The server is of the style before 2011, which cannot name exports.
    #[error("the server speaks the oldstyle protocol only")]
    Oldstyle,
    /// TLS is wished for and cannot be had.
    #[error("the server does not offer TLS, which was asked for: {0}")]
    NoTls(String),
    /// What the client is after is refused.
    #[error("the server refused option {option}: {why} (error {kind:#x}{})", advice(*kind))]
    Refused {
        /// Which.
        option: u32,
        /// The error's type.
        kind: u32,
        /// The server's message, else the type's meaning.
        why: String,
    },
    /// The server breaks the protocol.
    #[error("the server broke the protocol: {0}")]
    Broken(&'static str),
}

/// What to do about an error of that type.
fn advice(kind: u32) -> &'static str {
    match kind {
        wire::rep::ERR_UNKNOWN => "; nbdinfo --list URI tells which exports it has",
        wire::rep::ERR_TLS_REQD => "; write nbds or nbds+unix in the URI",
        _ => "",
    }
}

/// What the next bytes from the server are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Greeting,
    ReplyHeader,
    ReplyData { kind: u32, len: usize },
    ExportName { len: usize },
    TlsUpgrade,
    Done,
}

/// A client's side of a handshake. See the module for how it is driven.
#[derive(Debug)]
pub struct Handshake {
    pub(super) wish: Wish,
    state: State,
    /// The option that is being answered.
    pub(super) pending: u32,
    buffer: Vec<u8>,
    output: Vec<u8>,
    no_zeroes: bool,
    pub(super) tls: bool,
    pub(super) style: Style,
    /// The number of `base:allocation`, once selected.
    pub(super) context: Option<u32>,
    /// Size and flags, once told.
    pub(super) export: Option<(u64, TransmissionFlags)>,
    /// Constraints, once told.
    pub(super) block_sizes: Option<BlockSizes>,
    pub(super) listed: Vec<Listed>,
    /// How it ended, once it has.
    end: Option<Step>,
}

impl Handshake {
    /// A new connection. The server speaks first.
    pub fn new(wish: Wish) -> Handshake {
        Handshake {
            wish,
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

    /// What is to be sent. Whoever sends it takes it out.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// What the connection waits for.
    pub fn poll(&self) -> Step {
        match (&self.end, self.state) {
            (Some(end), _) => end.clone(),
            (None, State::TlsUpgrade) => Step::StartTls,
            (None, _) => Step::NeedInput,
        }
    }

    /// The stream has been upgraded: haggling goes on.
    pub fn tls_started(&mut self) {
        if self.state == State::TlsUpgrade {
            self.tls = true;
            self.state = State::ReplyHeader;
            self.ask_next(option::STARTTLS);
        }
    }

    /// Takes bytes from the server; answers how many. The rest is for later.
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
                self.export = wire::u64_at(item, 0).zip(wire::u16_at(item, 8).map(TransmissionFlags));
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
        let theirs = HandshakeFlags(wire::u16_at(item, 16).unwrap_or(0));
        let fixed = theirs.has(HandshakeFlags::FIXED_NEWSTYLE);
        // The client SHOULD ignore flags that it does not know, and MUST NOT answer with them.
        self.no_zeroes = theirs.has(HandshakeFlags::NO_ZEROES);
        let ours = ClientFlags::NONE
            .with_if(fixed, ClientFlags::FIXED_NEWSTYLE)
            .with_if(self.no_zeroes, ClientFlags::NO_ZEROES);
        self.output.extend(ours.0.to_be_bytes());
        self.state = State::ReplyHeader;
        if fixed {
            self.ask_first();
            return Ok(());
        }
        // "Newstyle negotiation": nothing but EXPORT_NAME is possible.
        if self.wish.tls == TlsWish::Always {
            return Err(Failure::NoTls("it does not speak fixed newstyle".into()));
        }
        if self.wish.goal == Goal::List {
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

    /// Sends an option; its data is `parts`, one after the other.
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
        let name = self.wish.export.clone();
        self.ask(option::EXPORT_NAME, &[name.as_bytes()]);
        let zeroes = if self.no_zeroes { 0 } else { wire::EXPORT_NAME_ZEROES };
        self.state = State::ExportName { len: 10 + zeroes };
    }

    pub(super) fn upgrade(&mut self) {
        self.state = State::TlsUpgrade;
    }

    /// Transmission starts.
    pub(super) fn ready(&mut self) -> Result<(), Failure> {
        let (size, flags) = self.export.ok_or(Failure::Broken("it did not tell of size and flags"))?;
        // "Block size constraints": without them a client SHOULD send no more than 32 MiB at once.
        let portable = BlockSizes { maximum: wire::PORTABLE_PAYLOAD, ..BlockSizes::DEFAULT };
        self.state = State::Done;
        self.end = Some(Step::Ready(Session {
            export: ExportId(0),
            name: self.wish.export.clone(),
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

    /// The list is whole.
    pub(super) fn finish_list(&mut self) {
        let listed = std::mem::take(&mut self.listed);
        self.abort();
        self.end = Some(Step::Listed(listed));
    }

    fn fail(&mut self, failure: Failure) {
        // "Termination of the session": a client that gives up MUST say so where it can. After
        // EXPORT_NAME, or to what is not a server, it cannot.
        let haggling = matches!(self.state, State::ReplyHeader) && self.pending != 0;
        if haggling && !matches!(failure, Failure::Broken(_)) {
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
