//! Option negotiation of the client: the order of options, and the handling of their replies.

use super::super::export::BlockSizes;
use super::super::reply::Style;
use super::super::wire::{self, TransmissionFlags, info, option, rep};
use super::handshake::{Failure, Goal, Handshake, Listed, MAX_LISTED, TlsPolicy};

impl Handshake {
    /// Sends the first option.
    pub(super) fn ask_first(&mut self) {
        if self.requested.tls == TlsPolicy::Never {
            self.ask_next(option::STARTTLS);
        } else {
            self.ask(option::STARTTLS, &[]);
        }
    }

    /// Sends the option that follows `done`, which the server has accepted or refused.
    pub(super) fn ask_next(&mut self, done: u32) {
        let replies = self.style != Style::Simple;
        let go = self.requested.goal == Goal::Go;
        match done {
            option::STARTTLS if !go => self.ask(option::LIST, &[]),
            option::STARTTLS if self.requested.extended => self.ask(option::EXTENDED_HEADERS, &[]),
            option::STARTTLS | option::EXTENDED_HEADERS if self.requested.structured && !replies => {
                self.ask(option::STRUCTURED_REPLY, &[]);
            }
            option::STARTTLS | option::EXTENDED_HEADERS | option::STRUCTURED_REPLY
                if self.requested.allocation && replies =>
            {
                self.ask_allocation();
            }
            _ => self.ask_go(),
        }
    }

    fn ask_allocation(&mut self) {
        let name = self.requested.export.clone();
        let query = wire::BASE_ALLOCATION.as_bytes();
        let (name_len, query_len) = (len_field(name.as_bytes()), len_field(query));
        let count = 1u32.to_be_bytes();
        self.ask(option::SET_META_CONTEXT, &[&name_len, name.as_bytes(), &count, &query_len, query]);
    }

    /// Requests GO. "Block size constraints": a client that honours the constraints SHOULD request them.
    fn ask_go(&mut self) {
        let name = self.requested.export.clone();
        let (count, item) = (1u16.to_be_bytes(), info::BLOCK_SIZE.to_be_bytes());
        self.ask(option::GO, &[&len_field(name.as_bytes()), name.as_bytes(), &count, &item]);
    }

    /// Handles a complete reply.
    pub(super) fn reply(&mut self, kind: u32, data: &[u8]) -> Result<(), Failure> {
        if kind & rep::ERR != 0 {
            return self.refused(kind, data);
        }
        match (self.pending, kind) {
            (_, rep::ACK) if !data.is_empty() => Err(Failure::Broken("an ACK has data")),
            (_, rep::ACK) => self.granted(),
            (option::LIST, rep::SERVER) => self.take_listed(data),
            (option::GO, rep::INFO) => self.take_info(data),
            (option::SET_META_CONTEXT, rep::META_CONTEXT) => self.take_context(data),
            _ => Err(Failure::Broken("a reply is of a type that its option does not have")),
        }
    }

    fn granted(&mut self) -> Result<(), Failure> {
        let option = self.pending;
        match option {
            option::STARTTLS => {
                self.upgrade();
                return Ok(());
            }
            option::LIST => {
                self.finish_list();
                return Ok(());
            }
            option::GO => return self.ready(),
            option::EXTENDED_HEADERS => self.style = Style::Extended,
            option::STRUCTURED_REPLY => self.style = Style::Structured,
            _ => {}
        }
        self.ask_next(option);
        Ok(())
    }

    /// Continues without an optional option that was refused, or fails if the option is required.
    fn refused(&mut self, kind: u32, data: &[u8]) -> Result<(), Failure> {
        let option = self.pending;
        let message = String::from_utf8_lossy(data);
        let why = if message.is_empty() { meaning(kind).to_owned() } else { message.into_owned() };
        let refused = Failure::Refused { option, kind, why: why.clone() };
        // "`NBD_REP_ERR_SHUTDOWN`": the client MUST end the session with a soft disconnect.
        if kind == rep::ERR_SHUTDOWN {
            return Err(refused);
        }
        match option {
            option::STARTTLS if self.requested.tls == TlsPolicy::Always => return Err(Failure::NoTls(why)),
            option::SET_META_CONTEXT => self.context = None,
            option::STARTTLS | option::EXTENDED_HEADERS | option::STRUCTURED_REPLY => {}
            // "`NBD_OPT_GO`": the client SHOULD fall back to EXPORT_NAME when the server does not know GO.
            // Extended headers MUST NOT be followed by EXPORT_NAME.
            option::GO if kind == rep::ERR_UNSUP && self.style != Style::Extended => {
                self.ask_export_name();
                return Ok(());
            }
            _ => return Err(refused),
        }
        self.ask_next(option);
        Ok(())
    }

    fn take_listed(&mut self, data: &[u8]) -> Result<(), Failure> {
        const MALFORMED: Failure = Failure::Broken("an export of the list is malformed");
        let len = wire::u32_at(data, 0).ok_or(MALFORMED)? as usize;
        let (name, description) = data[4..].split_at_checked(len).ok_or(MALFORMED)?;
        if self.listed.len() >= MAX_LISTED {
            return Err(Failure::Broken("it lists too many exports"));
        }
        let name = std::str::from_utf8(name).map_err(|_| MALFORMED)?.to_owned();
        let description = String::from_utf8_lossy(description).into_owned();
        self.listed.push(Listed { name, description });
        Ok(())
    }

    /// Processes an information reply. "`NBD_REP_INFO`": the client MUST ignore unknown types.
    fn take_info(&mut self, data: &[u8]) -> Result<(), Failure> {
        match wire::u16_at(data, 0).ok_or(Failure::Broken("an information reply has no type"))? {
            info::EXPORT => {
                if data.len() != 12 {
                    return Err(Failure::Broken("the export's information MUST be 12 bytes long"));
                }
                self.export = wire::u64_at(data, 2)
                    .zip(wire::u16_at(data, 10).map(TransmissionFlags::from_bits_retain));
            }
            info::BLOCK_SIZE => {
                if data.len() != 14 {
                    return Err(Failure::Broken("the block sizes MUST be 14 bytes long"));
                }
                let field = |at| wire::u32_at(data, at).unwrap_or(0);
                self.block_sizes =
                    Some(BlockSizes { minimum: field(2), preferred: field(6), maximum: field(10) });
            }
            _ => {}
        }
        // The block sizes may arrive before the export's own size.
        if let (Some(sizes), Some((size, _))) = (self.block_sizes, self.export)
            && !sizes.is_valid(size)
        {
            return Err(Failure::Broken("its block sizes are invalid"));
        }
        Ok(())
    }

    fn take_context(&mut self, data: &[u8]) -> Result<(), Failure> {
        let id = wire::u32_at(data, 0).ok_or(Failure::Broken("a metadata context has no id"))?;
        if &data[4..] == wire::BASE_ALLOCATION.as_bytes() {
            self.context = Some(id);
        }
        Ok(())
    }
}

fn len_field(bytes: &[u8]) -> [u8; 4] {
    (bytes.len() as u32).to_be_bytes()
}

/// Returns the meaning of an error type, for servers that send no message.
fn meaning(kind: u32) -> &'static str {
    match kind {
        rep::ERR_UNSUP => "it does not know the option",
        rep::ERR_POLICY => "its configuration forbids it",
        rep::ERR_INVALID => "it finds the option invalid",
        rep::ERR_PLATFORM => "its platform cannot do it",
        rep::ERR_TLS_REQD => "it requires TLS",
        rep::ERR_UNKNOWN => "it has no such export",
        rep::ERR_SHUTDOWN => "it is shutting down",
        rep::ERR_BLOCK_SIZE_REQD => "it requires the client to request block sizes",
        rep::ERR_TOO_BIG => "it finds the option too big",
        rep::ERR_EXT_HEADER_REQD => "it requires extended headers",
        _ => "it gives no reason",
    }
}
