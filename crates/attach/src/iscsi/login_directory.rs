//! The targets that a login may see and use: those of the portal that it connected to.

use super::portal::Portal;
use super::settings::Settings;
use super::targets::{State, Targets};
use super::tree::{Group, GroupId, LoginAuth};
use proto::iscsi::login::{Admission, Authentication, Directory, Existing, Policy, SessionType, Status};
use proto::iscsi::parameters::{DigestOffer, Offer};
use proto::iscsi::pdu::Isid;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Longest duration of a login until its portal group is known, and of discovery logins: LIO's default.
const LOGIN_TIMEOUT_S: u64 = 15;
/// Commands in flight of a discovery session.
const DISCOVERY_WINDOW: u32 = 4;

/// The targets as one login sees them.
pub(super) struct LoginDirectory {
    targets: Arc<Targets>,
    portal: Arc<Portal>,
    /// The TSIH reserved for this login; 0: none.
    tsih: AtomicU16,
    /// Longest duration of the login, in seconds.
    timeout_s: AtomicU64,
}

impl LoginDirectory {
    pub(super) fn new(targets: &Arc<Targets>, portal: &Arc<Portal>) -> LoginDirectory {
        let (targets, portal) = (targets.clone(), portal.clone());
        LoginDirectory {
            targets,
            portal,
            tsih: AtomicU16::new(0),
            timeout_s: AtomicU64::new(LOGIN_TIMEOUT_S),
        }
    }

    /// Returns the longest duration of the login: that of its portal group, once that is known.
    pub(super) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_s.load(Relaxed))
    }

    /// Keeps the TSIH reserved when this is dropped: the session that the login created owns it from now
    /// on.
    pub(super) fn keep_tsih(&self) {
        self.tsih.store(0, Relaxed);
    }

    fn discovery(&self, state: &State) -> Policy {
        let auth =
            LoginAuth { is_required: state.tree.discovery.is_set(), auth: state.tree.discovery.clone() };
        Policy {
            portal_group_tag: 1,
            authentication: authentication(&auth),
            offer: Offer { target_alias: String::new(), ..Offer::default() },
            window: DISCOVERY_WINDOW,
        }
    }
}

impl Drop for LoginDirectory {
    fn drop(&mut self) {
        match self.tsih.load(Relaxed) {
            0 => {}
            tsih => self.targets.lock().sessions.release_tsih(tsih),
        }
    }
}

impl Directory for LoginDirectory {
    fn admit(&self, admission: &Admission<'_>) -> Result<Policy, Status> {
        let state = self.targets.lock();
        let SessionType::Normal { target } = admission.session else { return Ok(self.discovery(&state)) };
        let known = state.tree.targets.get(target.as_str()).ok_or(Status::NotFound)?;
        let mut groups = known.groups.iter();
        let here = groups.find(|(_, group)| group.portals.contains(self.portal.address()));
        let (tag, group) = here.ok_or(Status::NotFound)?;
        if !group.is_enabled {
            return Err(Status::ServiceUnavailable);
        }
        if !group.admits(admission.initiator) {
            return Err(Status::AuthorisationFailure);
        }
        self.timeout_s.store(group.attributes.number("login_timeout").unsigned_abs(), Relaxed);
        Ok(policy(*tag, group, admission.initiator))
    }

    fn session(&self, initiator: &str, isid: Isid, target: &str, tag: u16) -> Option<Existing> {
        let state = self.targets.lock();
        state.sessions.existing(initiator, isid, &GroupId::new(target.parse().ok()?, tag))
    }

    fn new_tsih(&self) -> u16 {
        let mut state = self.targets.lock();
        let tsih = state.sessions.take_tsih();
        match self.tsih.swap(tsih, Relaxed) {
            0 => {}
            earlier => state.sessions.release_tsih(earlier),
        }
        tsih
    }
}

fn policy(tag: u16, group: &Group, initiator: &str) -> Policy {
    Policy {
        portal_group_tag: tag,
        authentication: authentication(&group.login_auth(initiator)),
        offer: offer(&group.parameters),
        window: group.attributes.number("default_cmdsn_depth").unsigned_abs() as u32,
    }
}

/// Applies LIO's rules: where authentication is required, an initiator without own credentials cannot log in;
/// where it is not, an initiator that has some may still use them.
fn authentication(LoginAuth { is_required, auth }: &LoginAuth) -> Authentication {
    match (auth.chap(), is_required) {
        (Some(chap), true) => Authentication::Required(chap),
        (Some(chap), false) => Authentication::Optional(chap),
        (None, true) => Authentication::Impossible,
        (None, false) => Authentication::Open,
    }
}

/// Returns the values that a portal group offers in negotiation.
pub(super) fn offer(parameters: &Settings) -> Offer {
    let number = |name| parameters.number(name).unsigned_abs() as u32;
    let short = |name| number(name) as u16;
    let digest = |name| DigestOffer::parse(parameters.text(name)).unwrap_or_default();
    Offer {
        header_digest: digest("HeaderDigest"),
        data_digest: digest("DataDigest"),
        max_connections: short("MaxConnections"),
        target_alias: parameters.text("TargetAlias").to_owned(),
        initial_r2t: parameters.is_on("InitialR2T"),
        immediate_data: parameters.is_on("ImmediateData"),
        // LIO declares its MaxXmitDataSegmentLength as MaxRecvDataSegmentLength.
        max_recv_data_segment_length: number("MaxXmitDataSegmentLength"),
        max_xmit_data_segment_length: number("MaxXmitDataSegmentLength"),
        max_burst_length: number("MaxBurstLength"),
        first_burst_length: number("FirstBurstLength"),
        default_time2wait: short("DefaultTime2Wait"),
        default_time2retain: short("DefaultTime2Retain"),
        max_outstanding_r2t: short("MaxOutstandingR2T"),
        ..Offer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::{Auth, Credentials, PARAMETERS, Secret};

    #[test]
    fn the_offer_of_the_defaults_is_lios_with_its_declared_segment() {
        let lio = Offer::default();
        let expected = Offer { max_recv_data_segment_length: lio.max_xmit_data_segment_length, ..lio };
        assert_eq!(offer(&Settings::new(PARAMETERS)), expected);
        let mut parameters = Settings::new(PARAMETERS);
        parameters.set("DataDigest", "None").expect("a value");
        parameters.set("InitialR2T", "No").expect("a value");
        let changed = Offer { data_digest: DigestOffer::None, initial_r2t: false, ..expected };
        assert_eq!(offer(&parameters), changed);
    }

    #[test]
    fn authentication_without_credentials_is_open_or_impossible() {
        let user = Credentials { name: "a".to_owned(), secret: Secret::new("secret-secret") };
        let auth =
            |is_required, user| authentication(&LoginAuth { is_required, auth: Auth { user, mutual: None } });
        assert!(matches!(auth(true, Some(user.clone())), Authentication::Required(_)));
        assert!(matches!(auth(false, Some(user)), Authentication::Optional(_)));
        assert_eq!(auth(true, None), Authentication::Impossible);
        assert_eq!(auth(false, None), Authentication::Open);
        let half = Credentials { name: "a".to_owned(), secret: Secret::new("") };
        assert_eq!(auth(true, Some(half)), Authentication::Impossible);
    }
}
