//! The target's side of a login, from the first byte to the full-feature phase.
//!
//! The owner of the connection feeds bytes in, sends what [`Target::output`] holds, and polls:
//!
//! ```text
//! loop {
//!     match target.poll() {
//!         Step::NeedInput => { send(output); consumed += target.input(&received[consumed..], &directory) }
//!         Step::Ready(done) => end the sessions that done.join replaces, register the new one (if that fails:
//!                              target.withdraw(status)), send(output), full-feature phase, starting with the
//!                              bytes that input() left,
//!         Step::Closed(status) => { send(output); close }
//!     }
//! }
//! ```
//!
//! *Invariants:* a request has at most 8192 bytes of data, a text [`text::MAX_TEXT`], a login
//! [`MAX_REQUESTS`] requests. No input is consumed while output is pending, so an initiator that never
//! reads gets a single response. The caller supplies random bytes and enforces time limits.

use super::super::chap::NONCE_LEN;
use super::super::keys::Responder;
use super::super::name;
use super::super::parameters::DEFAULT_SEGMENT;
use super::super::pdu::{self, BHS_LEN, Login, LoginResponse, Numbers, Request};
use super::super::stream::{self, Receiver};
use super::super::text::{self, Collector};
use super::security::Security;
use super::{Admission, Directory, Existing, Join, LoginDone, Policy, SessionType, Status};

/// Maximum number of requests in a login. Initiators need two to six.
pub const MAX_REQUESTS: u32 = 32;

/// The only version of the protocol (section 11.12.4).
const VERSION: u8 = 0;
/// Stages (section 11.12.3).
const SECURITY: u8 = 0;
const OPERATIONAL: u8 = 1;
const FULL_FEATURE: u8 = 3;

/// The next action of the login's owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send the output first, then feed more bytes from the initiator.
    NeedInput,
    /// End the sessions or connections that the new one replaces, then send the output: the full-feature phase
    /// starts.
    Ready(Box<LoginDone>),
    /// Send the output, if any, and close. [`Status::Success`] does not occur.
    Closed(Status),
}

/// The initiator that logs in. It is known once the first text is complete.
#[derive(Debug)]
struct Peer {
    initiator: String,
    alias: Option<String>,
    session: SessionType,
    policy: Policy,
    security: Security,
    keys: Responder,
    /// Whether portal group tag and alias were sent.
    introduced: bool,
    /// The numbers of the session that this connection joins.
    existing: Option<Existing>,
}

/// The target's side of a login. See the module for how to drive it.
#[derive(Debug)]
pub struct Target {
    receiver: Receiver,
    output: Vec<u8>,
    nonce: [u8; NONCE_LEN],
    /// The first request, with which all later ones must agree.
    first: Option<Login>,
    stage: u8,
    stat_sn: u32,
    requests: u32,
    text: Collector,
    /// Names of the initiator and the target, kept for messages when the login is refused.
    names: Option<(String, SessionType)>,
    peer: Option<Box<Peer>>,
    step: Step,
}

/// An answer to a request.
struct Answer {
    transit: bool,
    nsg: u8,
    tsih: u16,
    text: Vec<u8>,
}

impl Target {
    /// Starts a login. `nonce`: random bytes, used once, for the CHAP challenge.
    pub fn new(nonce: [u8; NONCE_LEN]) -> Target {
        Target {
            receiver: Receiver::new(DEFAULT_SEGMENT),
            output: Vec::new(),
            nonce,
            first: None,
            stage: SECURITY,
            stat_sn: 0,
            requests: 0,
            text: Collector::default(),
            names: None,
            peer: None,
            step: Step::NeedInput,
        }
    }

    /// Returns the bytes to send; the caller removes what it has sent.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.output
    }

    /// Returns the next action of the login's owner.
    pub fn poll(&self) -> Step {
        self.step.clone()
    }

    /// Returns the names of the initiator and the target, as far as they are known, for log messages.
    pub fn names(&self) -> Option<(&str, &SessionType)> {
        self.names.as_ref().map(|(initiator, session)| (initiator.as_str(), session))
    }

    /// Consumes bytes, at most up to the end of a request, and returns how many. Consumes none while output
    /// is pending or after the login has ended.
    pub fn input(&mut self, bytes: &[u8], directory: &dyn Directory) -> usize {
        if self.step != Step::NeedInput || !self.output.is_empty() {
            return 0;
        }
        let Ok(taken) = self.receiver.input(bytes) else {
            // Without its data, the request cannot be answered with the initiator's identifiers known.
            self.refuse(Status::InitiatorError);
            return bytes.len();
        };
        let mut receiver = std::mem::take(&mut self.receiver);
        if let Ok(Some(frame)) = receiver.frame() {
            self.request(frame, directory);
        }
        self.receiver = receiver;
        taken
    }

    fn request(&mut self, frame: stream::Frame<'_>, directory: &dyn Directory) {
        let request = match pdu::parse(frame.bhs) {
            Ok(pdu::Header { pdu: Request::Login(request), ahs_len: 0, .. }) => request,
            // Any other PDU is invalid during a login (section 6.3); before the first request there is no
            // one to answer.
            _ => return self.refuse(Status::InvalidDuringLogin),
        };
        self.requests += 1;
        match self.process(&request, frame.data, directory) {
            Ok(Some(answer)) => self.respond(&request, &answer, Status::Success),
            Ok(None) => {
                let nothing = Answer { transit: false, nsg: 0, tsih: request.tsih, text: Vec::new() };
                self.respond(&request, &nothing, Status::Success);
            }
            Err(status) => self.refuse(status),
        }
    }

    /// Checks a header against the protocol and the first request.
    fn check(&mut self, request: &Login) -> Result<(), Status> {
        if self.requests > MAX_REQUESTS {
            return Err(Status::InitiatorError);
        }
        let Some(first) = self.first else {
            // As in LIO, StatSN starts where the initiator expects it.
            self.stat_sn = request.exp_stat_sn;
            self.stage = request.csg;
            self.first = Some(*request);
            if request.version_min > VERSION {
                return Err(Status::UnsupportedVersion);
            }
            return self.check_stages(request);
        };
        // The identifiers must not change during a login (section 11.12).
        let identity = |login: &Login| (login.isid, login.tsih, login.cid, login.itt);
        if identity(&first) != identity(request) || request.csg != self.stage {
            return Err(Status::InitiatorError);
        }
        self.check_stages(request)
    }

    /// Checks the stages and the T and C bits (sections 11.12.1 to 11.12.3).
    fn check_stages(&self, request: &Login) -> Result<(), Status> {
        let next_is_valid = match request.csg {
            SECURITY => matches!(request.nsg, OPERATIONAL | FULL_FEATURE),
            OPERATIONAL => request.nsg == FULL_FEATURE,
            _ => return Err(Status::InitiatorError),
        };
        let valid = if request.transit { next_is_valid && !request.continues } else { true };
        if valid { Ok(()) } else { Err(Status::InitiatorError) }
    }

    /// Processes a request. Returns `None` if its text continues in the next one.
    fn process(
        &mut self,
        request: &Login,
        data: &[u8],
        directory: &dyn Directory,
    ) -> Result<Option<Answer>, Status> {
        self.check(request)?;
        self.text.push(data).map_err(|_| Status::InitiatorError)?;
        if request.continues {
            return Ok(None);
        }
        let text = self.text.take();
        let mut pairs = text::pairs(&text).map_err(|_| Status::InitiatorError)?;
        let mut peer = match self.peer.take() {
            Some(peer) => {
                peer.check_identity(&mut pairs)?;
                peer
            }
            None => Box::new(Peer::admit(request, &mut pairs, directory, self.nonce, &mut self.names)?),
        };
        let mut out = Vec::new();
        let mut transit = request.transit;
        peer.introduce(request.csg, &mut out);
        if request.csg == SECURITY {
            let pairs = peer.security.answer(&pairs, &mut out)?;
            // Keys of the operational stage are not negotiated here (section 6.3.2).
            pairs.iter().for_each(|(key, _)| {
                let known = super::super::keys::find(key).is_some();
                text::put(&mut out, key, if known { text::REJECT } else { text::NOT_UNDERSTOOD });
            });
            transit &= peer.security.settle(request.transit)?;
            // Without an operational stage, the digests that the target requires cannot be negotiated.
            if transit && request.nsg == FULL_FEATURE && !peer.keys.settle(&mut Vec::new())? {
                return Err(Status::InitiatorError);
            }
        } else {
            // An initiator that starts in this stage has not authenticated itself.
            peer.security.require()?;
            peer.keys.answer(&pairs, &mut out)?;
            transit &= !request.transit || peer.keys.settle(&mut out)?;
        }
        if !transit {
            self.peer = Some(peer);
            return Ok(Some(Answer { transit: false, nsg: 0, tsih: request.tsih, text: out }));
        }
        if request.nsg != FULL_FEATURE {
            self.stage = request.nsg;
            self.peer = Some(peer);
            return Ok(Some(Answer { transit, nsg: request.nsg, tsih: request.tsih, text: out }));
        }
        let done = peer.finish(request, self.stat_sn.wrapping_add(1), self.first_cmd_sn(), directory)?;
        let tsih = done.tsih;
        self.peer = Some(peer);
        self.step = Step::Ready(Box::new(done));
        Ok(Some(Answer { transit, nsg: request.nsg, tsih, text: out }))
    }

    /// Returns the CmdSN of the login. Login requests are immediate, so it is also the CmdSN of the first
    /// command.
    fn first_cmd_sn(&self) -> u32 {
        self.first.map_or(0, |first| first.cmd_sn)
    }

    /// Returns the numbers of a response: those of the session that the connection joins, or of a new one.
    fn numbers(&self) -> Numbers {
        let first = self.first_cmd_sn();
        let (exp_cmd_sn, max_cmd_sn) = match self.peer.as_deref() {
            Some(Peer { existing: Some(existing), .. }) => (existing.exp_cmd_sn, existing.max_cmd_sn),
            Some(peer) => (first, first.wrapping_add(peer.window() - 1)),
            None => (first, first),
        };
        Numbers { stat_sn: self.stat_sn, exp_cmd_sn, max_cmd_sn }
    }

    fn respond(&mut self, request: &Login, answer: &Answer, status: Status) {
        let [status_class, status_detail] = status.code().to_be_bytes();
        let response = LoginResponse {
            transit: answer.transit,
            continues: false,
            csg: request.csg,
            nsg: if answer.transit { answer.nsg } else { 0 },
            version_max: VERSION,
            version_active: VERSION,
            isid: request.isid,
            tsih: answer.tsih,
            itt: request.itt,
            numbers: self.numbers(),
            status_class,
            status_detail,
        };
        let mut bhs = [0; BHS_LEN];
        response.encode(&mut bhs, answer.text.len() as u32);
        stream::put(&mut self.output, &bhs, &[], &answer.text, false, false);
        self.stat_sn = self.stat_sn.wrapping_add(1);
    }

    /// Replaces the final response, which was not sent yet, by a refusal, when the owner cannot register
    /// the session. Does nothing unless the login is [`Step::Ready`].
    pub fn withdraw(&mut self, status: Status) {
        if matches!(self.step, Step::Ready(_)) {
            self.output.clear();
            self.stat_sn = self.stat_sn.wrapping_sub(1);
            self.refuse(status);
        }
    }

    /// Ends the login with a status. Before the first request no response is sent, as it would lack the
    /// identifiers.
    fn refuse(&mut self, status: Status) {
        self.step = Step::Closed(status);
        self.text.clear();
        if let Some(first) = self.first {
            let first = Login { csg: self.stage, ..first };
            let nothing = Answer { transit: false, nsg: 0, tsih: first.tsih, text: Vec::new() };
            self.respond(&first, &nothing, status);
        }
    }
}

/// Removes a key from the pairs and returns its value. Two different values are an error.
fn take<'a>(pairs: &mut Vec<(&'a str, &'a str)>, key: &str) -> Result<Option<&'a str>, Status> {
    let mut found = None;
    for (_, value) in pairs.extract_if(.., |pair| pair.0 == key) {
        if found.is_some_and(|earlier| earlier != value) {
            return Err(Status::InitiatorError);
        }
        found = Some(value);
    }
    Ok(found)
}

impl Peer {
    /// Reads the initiator and session type from the first text, and asks the directory to admit them.
    fn admit<'a>(
        request: &Login,
        pairs: &mut Vec<(&'a str, &'a str)>,
        directory: &dyn Directory,
        nonce: [u8; NONCE_LEN],
        names: &mut Option<(String, SessionType)>,
    ) -> Result<Peer, Status> {
        let initiator = take(pairs, "InitiatorName")?.ok_or(Status::MissingParameter)?;
        let initiator = name::of_peer(initiator).map_err(|_| Status::InitiatorError)?;
        let alias = take(pairs, "InitiatorAlias")?.map(str::to_owned);
        if alias.as_ref().is_some_and(|alias| alias.len() > MAX_ALIAS) {
            return Err(Status::InitiatorError);
        }
        let target = take(pairs, "TargetName")?;
        let session = match take(pairs, "SessionType")? {
            Some("Discovery") => SessionType::Discovery,
            None | Some("Normal") => {
                let target = target.ok_or(Status::MissingParameter)?;
                // An invalid name cannot belong to any target.
                SessionType::Normal { target: name::of_peer(target).map_err(|_| Status::NotFound)? }
            }
            Some(_) => return Err(Status::SessionType),
        };
        *names = Some((initiator.clone(), session.clone()));
        let policy =
            directory.admit(&Admission { initiator: &initiator, isid: request.isid, session: &session })?;
        let leading = request.tsih == 0;
        let existing =
            if leading { None } else { Some(joined(request, &initiator, &session, &policy, directory)?) };
        Ok(Peer {
            security: Security::new(policy.authentication.clone(), nonce),
            keys: Responder::new(policy.offer.clone(), leading, session == SessionType::Discovery),
            introduced: false,
            initiator,
            alias,
            session,
            policy,
            existing,
        })
    }

    /// Removes the identifying keys from a later text; libiscsi repeats them in each stage. They must not change.
    fn check_identity<'a>(&self, pairs: &mut Vec<(&'a str, &'a str)>) -> Result<(), Status> {
        let same_name = |value: &str, own: &str| name::of_peer(value).is_ok_and(|name| name == own);
        let (kind, target) = match &self.session {
            SessionType::Discovery => ("Discovery", None),
            SessionType::Normal { target } => ("Normal", Some(target)),
        };
        let valid = take(pairs, "InitiatorName")?.is_none_or(|value| same_name(value, &self.initiator))
            && take(pairs, "TargetName")?.is_none_or(|value| target.is_none_or(|own| same_name(value, own)))
            && take(pairs, "SessionType")?.is_none_or(|value| value == kind);
        take(pairs, "InitiatorAlias")?;
        if valid { Ok(()) } else { Err(Status::InitiatorError) }
    }

    /// Appends TargetPortalGroupTag to the first response (section 13.9), and the alias to the first one of
    /// the operational stage.
    fn introduce(&mut self, stage: u8, out: &mut Vec<u8>) {
        if self.session == SessionType::Discovery {
            return;
        }
        if !self.introduced {
            self.introduced = true;
            text::put(out, "TargetPortalGroupTag", &self.policy.portal_group_tag.to_string());
        }
        let alias = std::mem::take(&mut self.policy.offer.target_alias);
        if stage == SECURITY {
            self.policy.offer.target_alias = alias;
        } else if !alias.is_empty() && alias.len() <= MAX_ALIAS {
            text::put(out, "TargetAlias", &alias);
        }
    }

    /// Returns the depth of the command window, bounded as in [`super::super::sequence::CommandWindow`].
    fn window(&self) -> u32 {
        self.policy.window.clamp(1, super::super::sequence::MAX_DEPTH)
    }

    /// Enters the full-feature phase: decides how the connection relates to the sessions that exist now.
    fn finish(
        &mut self,
        request: &Login,
        stat_sn: u32,
        cmd_sn: u32,
        directory: &dyn Directory,
    ) -> Result<LoginDone, Status> {
        let portal_group_tag = self.policy.portal_group_tag;
        let (join, tsih) = if request.tsih != 0 {
            let existing = joined(request, &self.initiator, &self.session, &self.policy, directory)?;
            let join = if existing.cids.contains(&request.cid) {
                Join::ReinstateConnection
            } else {
                Join::AddConnection
            };
            self.existing = Some(existing);
            (join, request.tsih)
        } else {
            let old = match &self.session {
                SessionType::Discovery => None,
                SessionType::Normal { target } => {
                    directory.session(&self.initiator, request.isid, target, portal_group_tag)
                }
            };
            let join = old.map_or(Join::New, |old| Join::Reinstate { old_tsih: old.tsih });
            (join, directory.new_tsih())
        };
        Ok(LoginDone {
            initiator: self.initiator.clone(),
            initiator_alias: self.alias.clone(),
            isid: request.isid,
            tsih,
            cid: request.cid,
            session: self.session.clone(),
            portal_group_tag,
            join,
            parameters: self.keys.parameters,
            connection: self.keys.connection,
            user: self.security.user().map(str::to_owned),
            stat_sn,
            cmd_sn,
            window: self.window(),
        })
    }
}

/// Longest alias in bytes (section 6.1: values have up to 255 bytes).
const MAX_ALIAS: usize = 255;

/// Returns the session that a request with a TSIH wants to join (section 6.3.1).
fn joined(
    request: &Login,
    initiator: &str,
    session: &SessionType,
    policy: &Policy,
    directory: &dyn Directory,
) -> Result<Existing, Status> {
    // Discovery sessions have a single connection.
    let SessionType::Normal { target } = session else { return Err(Status::SessionType) };
    let existing = directory.session(initiator, request.isid, target, policy.portal_group_tag);
    let existing = existing.filter(|existing| existing.tsih == request.tsih).ok_or(Status::NoSession)?;
    let is_new = !existing.cids.contains(&request.cid);
    if is_new && existing.cids.len() >= usize::from(existing.max_connections) {
        return Err(Status::TooManyConnections);
    }
    Ok(existing)
}
