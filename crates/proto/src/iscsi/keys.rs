//! Keys of operational negotiation (RFC 7143, section 13), as a table of name, result function, range and
//! permitted use, and both sides of the negotiation that the table drives.
//!
//! A target answers the initiator's offers ([`Responder`]); an initiator makes offers and processes the
//! answers ([`accept`]). The result of a key is a function of both sides' values, so it does not matter
//! which side offers.

use super::login::Status;
use super::parameters::{ConnectionParameters, DigestOffer, Offer, Parameters, TaskReporting};
use super::text::{self, IRRELEVANT, NOT_UNDERSTOOD, REJECT, boolean, number, put, yes_no};

/// A key of operational negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Key {
    /// HeaderDigest.
    HeaderDigest,
    /// DataDigest.
    DataDigest,
    /// MaxConnections.
    MaxConnections,
    /// InitialR2T.
    InitialR2t,
    /// ImmediateData.
    ImmediateData,
    /// MaxRecvDataSegmentLength.
    MaxRecvDataSegmentLength,
    /// MaxBurstLength.
    MaxBurstLength,
    /// FirstBurstLength.
    FirstBurstLength,
    /// DefaultTime2Wait.
    DefaultTime2Wait,
    /// DefaultTime2Retain.
    DefaultTime2Retain,
    /// MaxOutstandingR2T.
    MaxOutstandingR2t,
    /// DataPDUInOrder.
    DataPduInOrder,
    /// DataSequenceInOrder.
    DataSequenceInOrder,
    /// ErrorRecoveryLevel.
    ErrorRecoveryLevel,
    /// TaskReporting.
    TaskReporting,
    /// iSCSIProtocolLevel.
    ProtocolLevel,
    /// OFMarker (obsolete).
    OfMarker,
    /// IFMarker (obsolete).
    IfMarker,
    /// OFMarkInt (obsolete).
    OfMarkInt,
    /// IFMarkInt (obsolete).
    IfMarkInt,
}

/// Function that derives a key's result from both sides' values (section 6.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Function {
    /// The first value of the offered list that the other side supports.
    List,
    /// The smaller number.
    Minimum,
    /// The larger number.
    Maximum,
    /// `Yes` if both sides say `Yes`.
    And,
    /// `Yes` if either side says `Yes`.
    Or,
    /// No result: each side declares its own number.
    Declared,
    /// Obsolete boolean: the answer is `No`, as LIO and all initiators give it.
    ObsoleteBoolean,
    /// Obsolete range: the answer is `Reject`.
    ObsoleteRange,
}

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// The key.
    pub key: Key,
    /// Name of the key on the wire.
    pub name: &'static str,
    /// Function that derives the result.
    pub function: Function,
    /// Smallest permitted number.
    pub min: u32,
    /// Largest permitted number.
    pub max: u32,
    /// The key concerns the session, and is negotiated by its first connection only.
    pub leading_only: bool,
    /// The key has a meaning in discovery sessions.
    pub in_discovery: bool,
}

const fn rule(
    key: Key,
    name: &'static str,
    function: Function,
    range: (u32, u32),
    flags: (bool, bool),
) -> Rule {
    let (leading_only, in_discovery) = flags;
    Rule { key, name, function, min: range.0, max: range.1, leading_only, in_discovery }
}

/// Range of keys that are not numbers.
const NONE: (u32, u32) = (0, 0);
/// Range of data lengths in bytes.
const LENGTH: (u32, u32) = (512, (1 << 24) - 1);
/// The key concerns a connection, in sessions of any type.
const CONNECTION: (bool, bool) = (false, true);
/// The key concerns a session of any type.
const SESSION: (bool, bool) = (true, true);
/// The key concerns a normal session.
const NORMAL: (bool, bool) = (true, false);

/// All keys, in the order of [`Key`].
pub const RULES: [Rule; 20] = [
    rule(Key::HeaderDigest, "HeaderDigest", Function::List, NONE, CONNECTION),
    rule(Key::DataDigest, "DataDigest", Function::List, NONE, CONNECTION),
    rule(Key::MaxConnections, "MaxConnections", Function::Minimum, (1, 65_535), NORMAL),
    rule(Key::InitialR2t, "InitialR2T", Function::Or, NONE, NORMAL),
    rule(Key::ImmediateData, "ImmediateData", Function::And, NONE, NORMAL),
    rule(Key::MaxRecvDataSegmentLength, "MaxRecvDataSegmentLength", Function::Declared, LENGTH, CONNECTION),
    rule(Key::MaxBurstLength, "MaxBurstLength", Function::Minimum, LENGTH, NORMAL),
    rule(Key::FirstBurstLength, "FirstBurstLength", Function::Minimum, LENGTH, NORMAL),
    rule(Key::DefaultTime2Wait, "DefaultTime2Wait", Function::Maximum, (0, 3600), SESSION),
    rule(Key::DefaultTime2Retain, "DefaultTime2Retain", Function::Minimum, (0, 3600), SESSION),
    rule(Key::MaxOutstandingR2t, "MaxOutstandingR2T", Function::Minimum, (1, 65_535), NORMAL),
    rule(Key::DataPduInOrder, "DataPDUInOrder", Function::Or, NONE, NORMAL),
    rule(Key::DataSequenceInOrder, "DataSequenceInOrder", Function::Or, NONE, NORMAL),
    rule(Key::ErrorRecoveryLevel, "ErrorRecoveryLevel", Function::Minimum, (0, 2), SESSION),
    rule(Key::TaskReporting, "TaskReporting", Function::List, NONE, NORMAL),
    rule(Key::ProtocolLevel, "iSCSIProtocolLevel", Function::Minimum, (0, 31), NORMAL),
    rule(Key::OfMarker, "OFMarker", Function::ObsoleteBoolean, NONE, CONNECTION),
    rule(Key::IfMarker, "IFMarker", Function::ObsoleteBoolean, NONE, CONNECTION),
    rule(Key::OfMarkInt, "OFMarkInt", Function::ObsoleteRange, NONE, CONNECTION),
    rule(Key::IfMarkInt, "IFMarkInt", Function::ObsoleteRange, NONE, CONNECTION),
];

/// Returns the row of a name. Names are case-sensitive (section 6.1).
pub fn find(name: &str) -> Option<&'static Rule> {
    RULES.iter().find(|rule| rule.name == name)
}

/// Returns the row of a key.
pub fn rule_of(key: Key) -> &'static Rule {
    &RULES[key as usize]
}

impl Rule {
    /// Parses a number within the range of the key.
    pub(super) fn number(&self, value: &str) -> Option<u32> {
        let value = u32::try_from(number(value)?).ok()?;
        (self.min..=self.max).contains(&value).then_some(value)
    }
}

/// Returns the target's own number for a key of [`Function::Minimum`] or [`Function::Maximum`].
fn own_number(offer: &Offer, key: Key) -> u32 {
    match key {
        Key::MaxConnections => offer.max_connections.into(),
        Key::MaxBurstLength => offer.max_burst_length,
        // FirstBurstLength must not exceed MaxBurstLength (section 13.14).
        Key::FirstBurstLength => offer.first_burst_length.min(offer.max_burst_length),
        Key::DefaultTime2Wait => offer.default_time2wait.into(),
        Key::DefaultTime2Retain => offer.default_time2retain.into(),
        Key::MaxOutstandingR2t => offer.max_outstanding_r2t.into(),
        Key::ProtocolLevel => offer.protocol_level.into(),
        // Error recovery level 0 is the only one that our targets support.
        _ => 0,
    }
}

/// Returns the target's own boolean for a key.
fn own_boolean(offer: &Offer, key: Key) -> bool {
    match key {
        Key::InitialR2t => offer.initial_r2t,
        Key::ImmediateData => offer.immediate_data,
        // Our targets require in-order data, which the function OR allows them to insist on.
        _ => true,
    }
}

/// Stores a number that both sides agreed on.
fn set_number(parameters: &mut Parameters, key: Key, value: u32) {
    let small = u16::try_from(value).unwrap_or(u16::MAX);
    match key {
        Key::MaxConnections => parameters.max_connections = small,
        Key::MaxBurstLength => parameters.max_burst_length = value,
        Key::FirstBurstLength => parameters.first_burst_length = value,
        Key::DefaultTime2Wait => parameters.default_time2wait = small,
        Key::DefaultTime2Retain => parameters.default_time2retain = small,
        Key::MaxOutstandingR2t => parameters.max_outstanding_r2t = small,
        Key::ErrorRecoveryLevel => parameters.error_recovery_level = value.min(2) as u8,
        Key::ProtocolLevel => parameters.protocol_level = value.min(31) as u8,
        _ => {}
    }
}

/// Stores a boolean that both sides agreed on.
fn set_boolean(parameters: &mut Parameters, key: Key, value: bool) {
    match key {
        Key::InitialR2t => parameters.initial_r2t = value,
        Key::ImmediateData => parameters.immediate_data = value,
        _ => {}
    }
}

/// The answering side of the operational negotiation of one login: a target.
#[derive(Clone, Debug)]
pub struct Responder {
    offer: Offer,
    leading: bool,
    discovery: bool,
    /// Result for the session so far.
    pub parameters: Parameters,
    /// Result for the connection so far.
    pub connection: ConnectionParameters,
    /// Bit `key as u8` is set once the key was offered.
    seen: u32,
    /// Digests that this side offered and the initiator has not answered yet, as bits of `seen`.
    asked: u32,
    declared: bool,
}

impl Responder {
    /// Starts a negotiation. `leading`: the login is for the first connection of a session.
    pub fn new(offer: Offer, leading: bool, discovery: bool) -> Responder {
        Responder {
            connection: ConnectionParameters {
                send_segment_limit: offer.max_xmit_data_segment_length.clamp(LENGTH.0, LENGTH.1),
                ..ConnectionParameters::default()
            },
            offer,
            leading,
            discovery,
            parameters: Parameters::default(),
            seen: 0,
            asked: 0,
            declared: false,
        }
    }

    /// Answers a text: appends a pair for each key that needs an answer, and once this side's declarations.
    ///
    /// # Errors
    /// An offer violates the protocol in a way that the answer `Reject` does not cover: a key offered twice, a
    /// declaration out of range, a digest that this side requires and the initiator refuses.
    pub fn answer(&mut self, pairs: &[(&str, &str)], out: &mut Vec<u8>) -> Result<(), Status> {
        // FirstBurstLength depends on MaxBurstLength and is processed last, in whatever order they arrive.
        let is_first_burst = |pair: &&(&str, &str)| pair.0 == "FirstBurstLength";
        let others = pairs.iter().filter(|pair| !is_first_burst(pair));
        for (name, value) in others.chain(pairs.iter().filter(is_first_burst)) {
            match find(name) {
                // Keys of the security stage are known, but come too late here.
                None if *name == "AuthMethod" || name.starts_with("CHAP_") => put(out, name, REJECT),
                None => put(out, name, NOT_UNDERSTOOD),
                Some(rule) => self.answer_key(rule, value, out)?,
            }
        }
        if !self.declared {
            self.declared = true;
            let own = self.offer.max_recv_data_segment_length.clamp(LENGTH.0, LENGTH.1);
            self.connection.max_receive_segment = own;
            put(out, "MaxRecvDataSegmentLength", &own.to_string());
        }
        Ok(())
    }

    fn answer_key(&mut self, rule: &Rule, value: &str, out: &mut Vec<u8>) -> Result<(), Status> {
        let bit = 1 << rule.key as u8;
        if self.asked & bit != 0 {
            self.asked &= !bit;
            self.seen |= bit;
            return if value == "CRC32C" {
                self.set_digest(rule.key, true);
                Ok(())
            } else {
                Err(Status::InitiatorError)
            };
        }
        // A key must not be negotiated twice in a login (section 6.2); a declaration may be repeated.
        if self.seen & bit != 0 && rule.function != Function::Declared {
            return Err(Status::InitiatorError);
        }
        self.seen |= bit;
        if (self.discovery && !rule.in_discovery) || (!self.leading && rule.leading_only) {
            put(out, rule.name, IRRELEVANT);
            return Ok(());
        }
        let own = own_number(&self.offer, rule.key);
        let answer = match rule.function {
            Function::List => return self.answer_list(rule, value, out),
            Function::Declared => {
                let declared = rule.number(value).ok_or(Status::InitiatorError)?;
                self.connection.max_send_segment = declared.min(self.connection.send_segment_limit);
                return Ok(());
            }
            Function::Minimum => rule.number(value).map(|offered| {
                let limit = match rule.key {
                    Key::FirstBurstLength => self.parameters.max_burst_length,
                    _ => u32::MAX,
                };
                offered.min(own).min(limit)
            }),
            Function::Maximum => rule.number(value).map(|offered| offered.max(own)),
            Function::And | Function::Or => {
                let own = own_boolean(&self.offer, rule.key);
                let result = boolean(value).map(|offered| match rule.function {
                    Function::And => offered && own,
                    _ => offered || own,
                });
                if let Some(result) = result {
                    set_boolean(&mut self.parameters, rule.key, result);
                }
                put(out, rule.name, result.map_or(REJECT, yes_no));
                return Ok(());
            }
            Function::ObsoleteBoolean => {
                put(out, rule.name, if boolean(value).is_some() { "No" } else { REJECT });
                return Ok(());
            }
            Function::ObsoleteRange => None,
        };
        match answer {
            Some(result) => {
                set_number(&mut self.parameters, rule.key, result);
                put(out, rule.name, &result.to_string());
            }
            None => put(out, rule.name, REJECT),
        }
        Ok(())
    }

    /// Answers a list with the first of its values that this side supports, or with `Reject`.
    fn answer_list(&mut self, rule: &Rule, value: &str, out: &mut Vec<u8>) -> Result<(), Status> {
        let mut values = value.split(',');
        let chosen = match rule.key {
            // Our targets implement task reporting as in RFC 3720.
            Key::TaskReporting => values.find(|value| *value == "RFC3720"),
            key => {
                let offer = self.digest_offer(key);
                values.find(|value| match *value {
                    "CRC32C" => offer.allows_crc32c(),
                    "None" => offer.allows_none(),
                    _ => false,
                })
            }
        };
        put(out, rule.name, chosen.unwrap_or(REJECT));
        if rule.key != Key::TaskReporting {
            self.set_digest(rule.key, chosen == Some("CRC32C"));
            if chosen.is_none() && !self.digest_offer(rule.key).allows_none() {
                return Err(Status::InitiatorError);
            }
        }
        Ok(())
    }

    fn digest_offer(&self, key: Key) -> DigestOffer {
        if key == Key::HeaderDigest { self.offer.header_digest } else { self.offer.data_digest }
    }

    fn set_digest(&mut self, key: Key, on: bool) {
        if key == Key::HeaderDigest {
            self.connection.header_digest = on;
        } else {
            self.connection.data_digest = on;
        }
    }

    /// Requests digests that this side requires and the initiator did not offer. Returns whether the login
    /// may end now; otherwise the initiator has to answer first.
    ///
    /// # Errors
    /// The initiator did not answer the digests offered before.
    pub fn settle(&mut self, out: &mut Vec<u8>) -> Result<bool, Status> {
        if self.asked != 0 {
            return Err(Status::InitiatorError);
        }
        for key in [Key::HeaderDigest, Key::DataDigest] {
            let bit = 1 << key as u8;
            if self.seen & bit == 0 && !self.digest_offer(key).allows_none() {
                self.asked |= bit;
                put(out, rule_of(key).name, "CRC32C");
            }
        }
        Ok(self.asked == 0)
    }
}

/// Processes a target's answer to an offer of this initiator, or a target's declaration.
///
/// # Errors
/// The value is outside the key's range, or the target refuses the key.
pub fn accept(
    parameters: &mut Parameters,
    connection: &mut ConnectionParameters,
    rule: &Rule,
    value: &str,
) -> Result<(), Refused> {
    let refused = || Refused { key: rule.name };
    if matches!(value, IRRELEVANT | NOT_UNDERSTOOD) || matches!(rule.function, Function::ObsoleteRange) {
        return Ok(());
    }
    match rule.function {
        Function::List => match (rule.key, value) {
            (Key::HeaderDigest, "None" | "CRC32C") => connection.header_digest = value == "CRC32C",
            (Key::DataDigest, "None" | "CRC32C") => connection.data_digest = value == "CRC32C",
            (Key::TaskReporting, "RFC3720") => parameters.task_reporting = TaskReporting::Rfc3720,
            (Key::TaskReporting, "ResponseFence") => parameters.task_reporting = TaskReporting::ResponseFence,
            (Key::TaskReporting, "FastAbort") => parameters.task_reporting = TaskReporting::FastAbort,
            _ => return Err(refused()),
        },
        Function::Minimum | Function::Maximum => {
            set_number(parameters, rule.key, rule.number(value).ok_or_else(refused)?);
        }
        Function::And | Function::Or => {
            set_boolean(parameters, rule.key, text::boolean(value).ok_or_else(refused)?);
        }
        Function::Declared => {
            let declared = rule.number(value).ok_or_else(refused)?;
            connection.max_send_segment = declared.min(connection.send_segment_limit);
        }
        Function::ObsoleteBoolean | Function::ObsoleteRange => {}
    }
    Ok(())
}

/// A target refused a key, or answered with a value that the key cannot have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the target's value of {key} is not acceptable")]
pub struct Refused {
    /// Name of the key.
    pub key: &'static str,
}

#[cfg(test)]
#[path = "keys/tests.rs"]
mod tests;
