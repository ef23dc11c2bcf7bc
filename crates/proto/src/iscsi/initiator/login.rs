//! The initiator's side of a login.

use super::super::chap::{self, Algorithm, NONCE_LEN};
use super::super::keys::{self, Function};
use super::super::login::{Credentials, Status};
use super::super::parameters::{ConnectionParameters, DEFAULT_SEGMENT, Offer, Parameters};
use super::super::pdu::{self, BHS_LEN, Header, Isid, LoginResponse, Request, Response};
use super::super::stream::{self, Receiver, StreamError};
use super::super::text::{self, Collector, yes_no};
use super::CommandNumbers;

/// Stages that the initiator goes through (RFC 7143, section 6.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Stages {
    /// Security, then operational.
    #[default]
    Both,
    /// Operational only: without authentication.
    Operational,
    /// Security only: all parameters have their defaults.
    Security,
}

/// Options of an initiator's login.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// InitiatorName.
    pub initiator: String,
    /// TargetName; `None` for a discovery session.
    pub target: Option<String>,
    /// Initiator session identifier.
    pub isid: Isid,
    /// TSIH of the session to join, or 0.
    pub tsih: u16,
    /// Connection identifier.
    pub cid: u16,
    /// CmdSN of the first command.
    pub cmd_sn: u32,
    /// Login stages to go through.
    pub stages: Stages,
    /// Name and secret for CHAP; if absent, only the method `None` is offered.
    pub credentials: Option<Credentials>,
    /// Name and secret that the target has to prove (mutual CHAP).
    pub target_credentials: Option<Credentials>,
    /// CHAP algorithms, in order of preference.
    pub algorithms: Vec<Algorithm>,
    /// Send binary values in base64.
    pub base64: bool,
    /// Parameters to offer.
    pub offer: Offer,
    /// Keys to leave out of the offer.
    pub omitted: Vec<keys::Key>,
    /// Additional keys for the operational stage.
    pub further: Vec<(String, String)>,
    /// Largest text in a request, in bytes; longer text continues in the next request (C bit).
    pub text_max: usize,
}

impl Options {
    /// Creates options for a target, or for discovery, without authentication.
    pub fn new(initiator: &str, target: Option<&str>) -> Options {
        Options {
            initiator: initiator.to_owned(),
            target: target.map(str::to_owned),
            isid: Isid([0x80, 0, 0, 0, 0, 1]),
            tsih: 0,
            cid: 0,
            cmd_sn: 1,
            stages: Stages::default(),
            credentials: None,
            target_credentials: None,
            algorithms: Algorithm::ALL.to_vec(),
            base64: false,
            offer: Offer { max_recv_data_segment_length: 262_144, ..Offer::default() },
            omitted: Vec::new(),
            further: Vec::new(),
            text_max: DEFAULT_SEGMENT as usize,
        }
    }
}

/// A connection that entered the full-feature phase.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoggedIn {
    /// TSIH of the session.
    pub tsih: u16,
    /// TargetPortalGroupTag, which targets of normal sessions send.
    pub portal_group_tag: Option<u16>,
    /// Parameters of the session.
    pub parameters: Parameters,
    /// Parameters of the connection.
    pub connection: ConnectionParameters,
    /// Sequence numbers to continue with.
    pub numbers: CommandNumbers,
}

/// Reason why a login failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    /// The target refused the login.
    #[error("login refused: {0}")]
    Refused(Status),
    /// The target violates the protocol.
    #[error("the target violates the login protocol: {0}")]
    Protocol(&'static str),
    /// The target could not prove that it knows its secret.
    #[error("the target is not authenticated")]
    TargetNotAuthenticated,
    /// The target sent an unacceptable value.
    #[error(transparent)]
    Value(#[from] keys::Refused),
    /// The byte stream is malformed.
    #[error(transparent)]
    Stream(#[from] StreamError),
}

/// The next action of the login's owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send the output, then feed more bytes from the target.
    NeedInput,
    /// The full-feature phase started.
    Ready(Box<LoggedIn>),
    /// Close the connection.
    Failed(Failure),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// AuthMethod was offered.
    Method,
    /// CHAP_A was offered.
    Algorithm,
    /// CHAP_R was sent.
    Response,
    /// Parameters were offered.
    Operational,
}

/// Maximum number of responses of a target in one login.
const MAX_RESPONSES: u32 = 64;
const OPERATIONAL: u8 = 1;
const FULL_FEATURE: u8 = 3;
/// Initiator task tag of the login.
const TASK_TAG: u32 = 0;

/// The initiator's side of a login: feed bytes in, send the output, poll.
#[derive(Debug)]
pub struct Login {
    options: Options,
    nonce: [u8; NONCE_LEN],
    receiver: Receiver,
    output: Vec<u8>,
    state: State,
    stage: u8,
    /// Text still to be sent once the target returns an empty response (C bit), and the T bit for its end.
    pending: Option<(Vec<u8>, bool)>,
    text: Collector,
    exp_stat_sn: u32,
    responses: u32,
    algorithm: Option<Algorithm>,
    tag: Option<u16>,
    parameters: Parameters,
    connection: ConnectionParameters,
    step: Step,
}

impl Login {
    /// Starts a login. `nonce`: random bytes, used once, for the challenge of mutual CHAP.
    pub fn new(options: Options, nonce: [u8; NONCE_LEN]) -> Login {
        let skips_security = options.stages == Stages::Operational;
        let mut login = Login {
            nonce,
            receiver: Receiver::new(DEFAULT_SEGMENT),
            output: Vec::new(),
            state: if skips_security { State::Operational } else { State::Method },
            stage: if skips_security { OPERATIONAL } else { 0 },
            pending: None,
            text: Collector::default(),
            exp_stat_sn: 0,
            responses: 0,
            algorithm: None,
            tag: None,
            parameters: Parameters::default(),
            connection: ConnectionParameters::default(),
            step: Step::NeedInput,
            options,
        };
        let mut out = Vec::new();
        text::put(&mut out, "InitiatorName", &login.options.initiator);
        match &login.options.target {
            Some(target) => {
                text::put(&mut out, "TargetName", target);
                text::put(&mut out, "SessionType", "Normal");
            }
            None => text::put(&mut out, "SessionType", "Discovery"),
        }
        if skips_security {
            login.put_offers(&mut out);
        } else {
            let methods = if login.options.credentials.is_some() { "CHAP,None" } else { "None" };
            text::put(&mut out, "AuthMethod", methods);
        }
        login.send(out, true);
        login
    }

    /// Returns the bytes to send; the caller removes what it has sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Returns the next action of the login's owner.
    pub fn poll(&self) -> Step {
        self.step.clone()
    }

    /// Consumes bytes, at most up to the end of a response, and returns how many.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        if self.step != Step::NeedInput {
            return 0;
        }
        let mut receiver = std::mem::take(&mut self.receiver);
        let taken = receiver.input(bytes);
        let result = match &taken {
            Ok(_) => match receiver.frame() {
                Ok(Some(frame)) => self.response(frame),
                Ok(None) => Ok(()),
                Err(error) => Err(error.into()),
            },
            Err(error) => Err((*error).into()),
        };
        self.receiver = receiver;
        if let Err(failure) = result {
            self.step = Step::Failed(failure);
        }
        taken.unwrap_or(bytes.len())
    }

    /// Returns the stage after the current one.
    fn next_stage(&self) -> u8 {
        let leaves_security = self.stage == 0 && self.options.stages == Stages::Both;
        if leaves_security { OPERATIONAL } else { FULL_FEATURE }
    }

    /// Sends text; if it is too long, sends the first part and keeps the rest.
    fn send(&mut self, mut text: Vec<u8>, transit: bool) {
        let rest = text.split_off(text.len().min(self.options.text_max.max(1)));
        let continues = !rest.is_empty();
        self.pending = continues.then_some((rest, transit));
        let transit = transit && !continues;
        let pdu = Request::Login(pdu::Login {
            transit,
            continues,
            csg: self.stage,
            nsg: if transit { self.next_stage() } else { 0 },
            version_max: 0,
            version_min: 0,
            isid: self.options.isid,
            tsih: self.options.tsih,
            itt: TASK_TAG,
            cid: self.options.cid,
            cmd_sn: self.options.cmd_sn,
            exp_stat_sn: self.exp_stat_sn,
        });
        let mut bhs = [0; BHS_LEN];
        Header { pdu, immediate: true, ahs_len: 0, data_len: text.len() as u32 }.encode(&mut bhs);
        stream::put(&mut self.output, &bhs, &[], &text, false, false);
    }

    /// Offers every parameter.
    fn put_offers(&mut self, out: &mut Vec<u8>) {
        let offer = &self.options.offer;
        let leading = self.options.tsih == 0;
        let normal = self.options.target.is_some();
        for rule in &keys::RULES {
            let is_irrelevant = (rule.leading_only && !leading) || (!rule.in_discovery && !normal);
            if is_irrelevant || self.options.omitted.contains(&rule.key) {
                continue;
            }
            let value = match rule.key {
                keys::Key::HeaderDigest => offer.header_digest.as_str().to_owned(),
                keys::Key::DataDigest => offer.data_digest.as_str().to_owned(),
                keys::Key::MaxConnections => offer.max_connections.to_string(),
                keys::Key::InitialR2t => yes_no(offer.initial_r2t).to_owned(),
                keys::Key::ImmediateData => yes_no(offer.immediate_data).to_owned(),
                keys::Key::MaxRecvDataSegmentLength => offer.max_recv_data_segment_length.to_string(),
                keys::Key::MaxBurstLength => offer.max_burst_length.to_string(),
                keys::Key::FirstBurstLength => offer.first_burst_length.to_string(),
                keys::Key::DefaultTime2Wait => offer.default_time2wait.to_string(),
                keys::Key::DefaultTime2Retain => offer.default_time2retain.to_string(),
                keys::Key::MaxOutstandingR2t => offer.max_outstanding_r2t.to_string(),
                keys::Key::DataPduInOrder | keys::Key::DataSequenceInOrder => "Yes".to_owned(),
                keys::Key::ErrorRecoveryLevel => "0".to_owned(),
                keys::Key::TaskReporting => "RFC3720".to_owned(),
                keys::Key::ProtocolLevel => offer.protocol_level.to_string(),
                _ => continue,
            };
            text::put(out, rule.name, &value);
        }
        self.connection.max_receive_segment = offer.max_recv_data_segment_length;
        self.connection.send_segment_limit = offer.max_xmit_data_segment_length;
        for (key, value) in &self.options.further {
            text::put(out, key, value);
        }
    }

    fn response(&mut self, frame: stream::Frame<'_>) -> Result<(), Failure> {
        let Ok(Header { pdu: Response::Login(response), .. }) = pdu::parse_response(frame.bhs) else {
            return Err(Failure::Protocol("a PDU that is no login response"));
        };
        self.responses += 1;
        let status = Status::from_code(u16::from_be_bytes([response.status_class, response.status_detail]));
        if status != Status::Success {
            return Err(Failure::Refused(status));
        }
        if self.responses > MAX_RESPONSES {
            return Err(Failure::Protocol("too many responses"));
        }
        if response.itt != TASK_TAG || response.isid != self.options.isid || response.csg != self.stage {
            return Err(Failure::Protocol("identifiers or stage differ from the request's"));
        }
        self.exp_stat_sn = response.numbers.stat_sn.wrapping_add(1);
        if let Some((text, transit)) = self.pending.take() {
            if response.transit || !frame.data.is_empty() {
                return Err(Failure::Protocol("a response to text that continues"));
            }
            self.send(text, transit);
            return Ok(());
        }
        self.text.push(frame.data).map_err(|_| Failure::Protocol("too much text"))?;
        if response.continues {
            self.send(Vec::new(), false);
            return Ok(());
        }
        let text = self.text.take();
        let pairs = text::pairs(&text).map_err(|_| Failure::Protocol("malformed text"))?;
        let mut out = Vec::new();
        let transit = self.process(&pairs, &response, &mut out)?;
        if response.transit {
            if response.nsg != self.next_stage() {
                return Err(Failure::Protocol("a stage that was not asked for"));
            }
            if self.state == State::Algorithm {
                return Err(Failure::Protocol("the stage ended before its negotiation"));
            }
            return self.enter(&response);
        }
        self.send(out, transit);
        Ok(())
    }

    /// Enters the stage that the target agreed to.
    fn enter(&mut self, response: &LoginResponse) -> Result<(), Failure> {
        if self.target_must_prove() && self.state != State::Response && self.stage == 0 {
            return Err(Failure::TargetNotAuthenticated);
        }
        self.stage = response.nsg;
        if self.stage == OPERATIONAL {
            self.state = State::Operational;
            let mut out = Vec::new();
            self.put_offers(&mut out);
            self.send(out, true);
            return Ok(());
        }
        let numbers = CommandNumbers::new(self.options.cmd_sn, response.numbers.max_cmd_sn, self.exp_stat_sn);
        self.step = Step::Ready(Box::new(LoggedIn {
            tsih: response.tsih,
            portal_group_tag: self.tag,
            parameters: self.parameters,
            connection: self.connection,
            numbers,
        }));
        Ok(())
    }

    fn target_must_prove(&self) -> bool {
        self.options.target_credentials.is_some()
    }

    /// Processes the target's text, and prepares the next request if the stage continues. Returns that
    /// request's T bit.
    fn process(
        &mut self,
        pairs: &[(&str, &str)],
        response: &LoginResponse,
        out: &mut Vec<u8>,
    ) -> Result<bool, Failure> {
        let value = |key| pairs.iter().find(|pair| pair.0 == key).map(|pair| pair.1);
        if let Some(tag) = value("TargetPortalGroupTag") {
            self.tag = Some(tag.parse().map_err(|_| Failure::Protocol("TargetPortalGroupTag"))?);
        }
        match self.state {
            State::Method => match value("AuthMethod") {
                Some("CHAP") if self.options.credentials.is_some() => {
                    let codes: Vec<_> =
                        self.options.algorithms.iter().map(|one| one.code().to_string()).collect();
                    text::put(out, "CHAP_A", &codes.join(","));
                    self.state = State::Algorithm;
                    Ok(false)
                }
                Some("None") | None => Ok(true),
                Some(_) => Err(Failure::Protocol("AuthMethod")),
            },
            State::Algorithm => {
                let algorithm = value("CHAP_A").and_then(chap::choose);
                let algorithm = algorithm.filter(|one| self.options.algorithms.contains(one));
                let algorithm = algorithm.ok_or(Failure::Protocol("CHAP_A"))?;
                let identifier =
                    value("CHAP_I").and_then(text::number).and_then(|one| u8::try_from(one).ok());
                let identifier = identifier.ok_or(Failure::Protocol("CHAP_I"))?;
                let challenge = value("CHAP_C").and_then(chap::decode).ok_or(Failure::Protocol("CHAP_C"))?;
                self.respond(algorithm, identifier, &challenge, out)?;
                self.state = State::Response;
                Ok(true)
            }
            State::Response => {
                if self.target_must_prove() {
                    self.check_target(value("CHAP_N"), value("CHAP_R"))?;
                }
                if response.transit {
                    Ok(true)
                } else {
                    Err(Failure::Protocol("no end of the security stage"))
                }
            }
            State::Operational => {
                self.take_answers(pairs, out)?;
                Ok(true)
            }
        }
    }

    fn take_answers(&mut self, pairs: &[(&str, &str)], out: &mut Vec<u8>) -> Result<(), Failure> {
        for (name, value) in pairs {
            let Some(rule) = keys::find(name) else { continue };
            keys::accept(&mut self.parameters, &mut self.connection, rule, value)?;
            // The target asks for a digest that this side did not offer.
            if rule.function == Function::List && self.options.omitted.contains(&rule.key) {
                text::put(out, name, value);
            }
        }
        Ok(())
    }

    fn encode(&self, bytes: &[u8]) -> String {
        if self.options.base64 { chap::encode_base64(bytes) } else { chap::encode(bytes) }
    }

    /// Responds to the target's challenge, and sends a challenge if mutual CHAP is required.
    fn respond(
        &mut self,
        algorithm: Algorithm,
        identifier: u8,
        challenge: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let own = self.options.credentials.as_ref().ok_or(Failure::Protocol("CHAP was not offered"))?;
        text::put(out, "CHAP_N", &own.name);
        text::put(out, "CHAP_R", &self.encode(&algorithm.response(identifier, &own.secret, challenge)));
        self.algorithm = Some(algorithm);
        if self.target_must_prove() {
            let [identifier, challenge @ ..] = &self.nonce;
            text::put(out, "CHAP_I", &identifier.to_string());
            text::put(out, "CHAP_C", &self.encode(challenge));
        }
        Ok(())
    }

    fn check_target(&self, name: Option<&str>, response: Option<&str>) -> Result<(), Failure> {
        let expected = self.options.target_credentials.as_ref().ok_or(Failure::TargetNotAuthenticated)?;
        let response = response.and_then(chap::decode).ok_or(Failure::TargetNotAuthenticated)?;
        let [identifier, challenge @ ..] = &self.nonce;
        let algorithm = self.algorithm.ok_or(Failure::TargetNotAuthenticated)?;
        let right = algorithm.verify(*identifier, &expected.secret, challenge, &response);
        if right && name == Some(&expected.name) { Ok(()) } else { Err(Failure::TargetNotAuthenticated) }
    }
}
