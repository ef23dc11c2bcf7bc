//! Questions that a login asks the owner of the portal.

use std::fmt;

use zeroize::Zeroizing;

use super::super::parameters::Offer;
use super::super::pdu::Isid;
use super::{SessionType, Status};

/// A CHAP secret. It is never printed, and it is overwritten when dropped.
#[derive(Clone)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Creates a secret from its bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Secret {
        Secret(Zeroizing::new(bytes.into()))
    }

    /// Returns the bytes, for a computation or a file that only the owner reads.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl PartialEq for Secret {
    /// Compares in a time that depends on the lengths only.
    fn eq(&self, other: &Secret) -> bool {
        subtle::ConstantTimeEq::ct_eq(self.0.as_slice(), other.0.as_slice()).into()
    }
}

impl Eq for Secret {}

/// A CHAP name and its secret.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Credentials {
    /// CHAP_N.
    pub name: String,
    /// The secret.
    pub secret: Secret,
}

/// Credentials with which initiators, and optionally the target, authenticate themselves by CHAP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chap {
    /// Credentials that the initiator has to prove.
    pub initiator: Credentials,
    /// Credentials that the target proves if the initiator asks (mutual CHAP).
    pub target: Option<Credentials>,
}

/// Whether and how the initiator authenticates itself (AuthMethod, RFC 7143, section 12.1).
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub enum Authentication {
    /// `None` only: there are no credentials.
    #[default]
    Open,
    /// `CHAP,None`: CHAP if the initiator wants it.
    Optional(Chap),
    /// `CHAP`: required.
    Required(Chap),
    /// Required, but there are no credentials: every login fails with an authentication error, as LIO's with
    /// `authentication=1` and no user.
    Impossible,
}

/// An initiator's request for a session.
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    /// The initiator's name, in normal form.
    pub initiator: &'a str,
    /// Initiator session identifier.
    pub isid: Isid,
    /// Session type, with the target's name if it is a normal session.
    pub session: &'a SessionType,
}

/// The owner's answer to an [`Admission`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Portal group tag of the portal.
    pub portal_group_tag: u16,
    /// Required authentication of the initiator.
    pub authentication: Authentication,
    /// Parameters to offer in the negotiation.
    pub offer: Offer,
    /// Depth of the command window: LIO's `default_cmdsn_depth` or the ACL's depth, 1 to 512.
    pub window: u32,
}

/// An existing session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Existing {
    /// TSIH of the session.
    pub tsih: u16,
    /// CIDs of its connections.
    pub cids: Vec<u16>,
    /// Negotiated MaxConnections.
    pub max_connections: u16,
    /// Current ExpCmdSN; the value may lag behind.
    pub exp_cmd_sn: u32,
    /// Current MaxCmdSN; the value may lag behind.
    pub max_cmd_sn: u32,
}

/// Questions that the login asks the owner of a portal. There is one value for each portal, or for each
/// connection.
pub trait Directory {
    /// Decides whether an initiator may open a session.
    ///
    /// # Errors
    /// The status to refuse it with: [`Status::NotFound`], [`Status::AuthorisationFailure`],
    /// [`Status::TargetRemoved`], [`Status::ServiceUnavailable`] or [`Status::OutOfResources`].
    fn admit(&self, admission: &Admission<'_>) -> Result<Policy, Status>;

    /// Returns the session of this initiator, ISID, target and portal group, if it exists. Called for
    /// normal sessions only.
    fn session(&self, initiator: &str, isid: Isid, target: &str, portal_group_tag: u16) -> Option<Existing>;

    /// Returns an unused TSIH for a new session, not 0. It stays reserved until the session ends, or the
    /// login fails.
    fn new_tsih(&self) -> u16;
}
