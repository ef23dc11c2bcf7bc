//! Handles the options of the handshake ("Option types").

use super::super::reply::Style;
use super::super::wire::{self, info, option, rep};
use super::handshake::{Closed, Handshake, TlsMode};
use super::{Catalogue, Found, meta};

/// Parses an option's data from the front. Every method returns `None` if the data is malformed.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(front)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take(2).and_then(|bytes| wire::u16_at(bytes, 0))
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take(4).and_then(|bytes| wire::u32_at(bytes, 0))
    }

    /// Takes a 32-bit length and a string of that length.
    pub(super) fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()?;
        text(self.take(usize::try_from(len).ok()?)?)
    }

    /// Checks that no data follows the fields (MUST).
    pub(super) fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// Checks a string. "Conventions": it is UTF-8, has no NUL and MUST be no longer than 4096 bytes.
pub(super) fn text(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    (text.len() <= wire::MAX_STRING && !text.contains('\0')).then_some(text)
}

impl Handshake {
    /// Returns the style of replies if transmission started now. "`NBD_OPT_EXTENDED_HEADERS`": extended
    /// headers take precedence over structured replies.
    pub(super) fn style(&self) -> Style {
        match (self.extended, self.structured) {
            (true, _) => Style::Extended,
            (false, true) => Style::Structured,
            (false, false) => Style::Simple,
        }
    }

    /// Returns whether `base:allocation` was selected for the export of this name.
    /// "`NBD_CMD_BLOCK_STATUS`": the last selection MUST have been for the name that transmission starts
    /// with.
    pub(super) fn has_context(&self, name: &str) -> bool {
        self.style() != Style::Simple && self.context_of.as_deref() == Some(name)
    }
}

/// Handles `option` with its complete data.
pub(super) fn handle(at: &mut Handshake, option: u32, data: &[u8], catalogue: &dyn Catalogue) {
    if option == option::ABORT {
        // "`NBD_OPT_ABORT`": ABORT ends the session, whatever its data.
        at.ack(option);
        return at.close(Closed::Aborted);
    }
    if at.shutting_down && option != option::EXPORT_NAME {
        return at.refuse(option, rep::ERR_SHUTDOWN, "the server is shutting down");
    }
    let needs_tls = at.config.tls == TlsMode::Required && !at.tls;
    match option {
        option::EXPORT_NAME => export_name(at, data, catalogue, needs_tls),
        option::STARTTLS => start_tls(at, data),
        // "FORCEDTLS mode": any other option MUST be answered with ERR_TLS_REQD.
        _ if needs_tls => at.refuse(option, rep::ERR_TLS_REQD, "TLS is required"),
        option::LIST => list(at, data, catalogue),
        option::INFO | option::GO => info_or_go(at, option, data, catalogue),
        option::STRUCTURED_REPLY if at.config.structured => structured_reply(at, data),
        option::EXTENDED_HEADERS if at.config.extended => extended_headers(at, data),
        option::LIST_META_CONTEXT | option::SET_META_CONTEXT
            if at.config.structured || at.config.extended =>
        {
            meta::handle(at, option, data, catalogue);
        }
        _ => at.refuse(option, rep::ERR_UNSUP, "the option is not known"),
    }
}

/// Handles EXPORT_NAME. "`NBD_OPT_EXPORT_NAME`": there is no error reply, so a refusal MUST end the
/// session.
fn export_name(at: &mut Handshake, data: &[u8], catalogue: &dyn Catalogue, needs_tls: bool) {
    let name = String::from_utf8_lossy(data).into_owned();
    let refused = |why| Closed::Refused { name: name.clone(), why };
    if needs_tls {
        return at.close(refused("TLS is required"));
    }
    if at.shutting_down {
        return at.close(refused("the server is shutting down"));
    }
    if at.extended {
        // "`NBD_OPT_EXTENDED_HEADERS`": a client MUST NOT use EXPORT_NAME after negotiating them.
        return at.close(refused("extended headers need NBD_OPT_GO"));
    }
    let Some(name) = text(data) else { return at.close(refused("the name is invalid")) };
    let Some(found) = catalogue.resolve(name) else { return at.close(refused("no such export")) };
    if let Some(why) = catalogue.refusal(&found) {
        return at.close(refused(why));
    }
    let flags = found.info.transmission_flags(at.style(), at.has_context(name));
    at.output.extend(found.info.size.to_be_bytes());
    at.output.extend(flags.bits().to_be_bytes());
    if !at.no_zeroes {
        at.output.extend([0; wire::EXPORT_NAME_ZEROES]);
    }
    at.start(name, &found, false);
}

/// Handles STARTTLS. "TLS support": it MUST be refused with ERR_POLICY, ERR_PLATFORM or ERR_UNSUP if the
/// server has no TLS, and with ERR_INVALID if TLS is already on or the option has data.
fn start_tls(at: &mut Handshake, data: &[u8]) {
    let option = option::STARTTLS;
    if at.config.tls == TlsMode::Off {
        at.refuse(option, rep::ERR_POLICY, "TLS is not configured");
    } else if at.tls {
        at.refuse(option, rep::ERR_INVALID, "TLS is on already");
    } else if !data.is_empty() {
        at.refuse(option, rep::ERR_INVALID, "STARTTLS has no data");
    } else {
        at.ack(option);
        at.start_tls();
    }
}

/// Handles LIST. "`NBD_OPT_LIST`": it MUST be refused with ERR_INVALID if it has data, and MAY be refused
/// with ERR_POLICY.
fn list(at: &mut Handshake, data: &[u8], catalogue: &dyn Catalogue) {
    let option = option::LIST;
    if !data.is_empty() {
        return at.refuse(option, rep::ERR_INVALID, "LIST has no data");
    }
    if !at.config.list {
        return at.refuse(option, rep::ERR_POLICY, "listing exports is disabled");
    }
    catalogue.list(&mut |name, description| {
        let len = (name.len() as u32).to_be_bytes();
        at.reply(option, rep::SERVER, &[&len, name.as_bytes(), description.as_bytes()]);
    });
    at.ack(option);
}

/// Handles INFO and GO ("`NBD_OPT_INFO`", "`NBD_OPT_GO`").
fn info_or_go(at: &mut Handshake, option: u32, data: &[u8], catalogue: &dyn Catalogue) {
    let Some((name, asked)) = parse_info(data) else {
        return at.refuse(option, rep::ERR_INVALID, "the option's data is malformed");
    };
    let Some(found) = catalogue.resolve(name) else {
        // This error SHOULD NOT follow any information reply.
        return at.refuse(option, rep::ERR_UNKNOWN, "there is no export of that name");
    };
    if option == option::GO
        && let Some(why) = catalogue.refusal(&found)
    {
        return at.refuse(option, rep::ERR_POLICY, why);
    }
    send_info(at, option, name, &asked, &found);
    at.ack(option);
    if option == option::GO {
        at.start(name, &found, asked.block_size);
    }
}

/// Information that a client requests besides size and flags. The server may send more; unknown types MUST
/// be ignored.
#[derive(Default)]
struct RequestedInfo {
    name: bool,
    description: bool,
    block_size: bool,
}

fn parse_info(data: &[u8]) -> Option<(&str, RequestedInfo)> {
    let mut fields = Fields(data);
    let name = fields.string()?;
    let mut asked = RequestedInfo::default();
    for _ in 0..fields.u16()? {
        match fields.u16()? {
            info::NAME => asked.name = true,
            info::DESCRIPTION => asked.description = true,
            info::BLOCK_SIZE => asked.block_size = true,
            _ => {}
        }
    }
    fields.end()?;
    Some((name, asked))
}

/// Sends the information. "`NBD_REP_INFO`": EXPORT MUST be sent before the ACK; each other type at most
/// once.
fn send_info(at: &mut Handshake, option: u32, name: &str, asked: &RequestedInfo, found: &Found) {
    let flags = found.info.transmission_flags(at.style(), at.has_context(name));
    let size = found.info.size.to_be_bytes();
    at.reply(option, rep::INFO, &[&info::EXPORT.to_be_bytes(), &size, &flags.bits().to_be_bytes()]);
    if asked.name {
        at.reply(option, rep::INFO, &[&info::NAME.to_be_bytes(), found.name.as_bytes()]);
    }
    if asked.description && !found.info.description.is_empty() {
        let description = found.info.description.as_bytes();
        at.reply(option, rep::INFO, &[&info::DESCRIPTION.to_be_bytes(), description]);
    }
    // The constraints MUST be sent if requested and not the defaults; other clients benefit as well.
    let sizes = found.info.block_sizes;
    at.reply(
        option,
        rep::INFO,
        &[
            &info::BLOCK_SIZE.to_be_bytes(),
            &sizes.minimum.to_be_bytes(),
            &sizes.preferred.to_be_bytes(),
            &sizes.maximum.to_be_bytes(),
        ],
    );
}

/// Handles STRUCTURED_REPLY. "`NBD_OPT_STRUCTURED_REPLY`": it SHOULD be refused with ERR_INVALID if it has
/// data, and with ERR_EXT_HEADER_REQD after extended headers, which cannot be undone.
fn structured_reply(at: &mut Handshake, data: &[u8]) {
    let option = option::STRUCTURED_REPLY;
    if !data.is_empty() {
        at.refuse(option, rep::ERR_INVALID, "STRUCTURED_REPLY has no data");
    } else if at.extended {
        at.refuse(option, rep::ERR_EXT_HEADER_REQD, "extended headers are in use already");
    } else if at.structured {
        at.refuse(option, rep::ERR_INVALID, "structured replies are in use already");
    } else {
        at.structured = true;
        at.ack(option);
    }
}

/// Handles EXTENDED_HEADERS. "`NBD_OPT_EXTENDED_HEADERS`": it SHOULD be refused with ERR_INVALID if it has
/// data. It SHOULD work without structured replies and takes precedence over them.
fn extended_headers(at: &mut Handshake, data: &[u8]) {
    let option = option::EXTENDED_HEADERS;
    if !data.is_empty() {
        at.refuse(option, rep::ERR_INVALID, "EXTENDED_HEADERS has no data");
    } else if at.extended {
        at.refuse(option, rep::ERR_INVALID, "extended headers are in use already");
    } else {
        at.extended = true;
        at.ack(option);
    }
}
