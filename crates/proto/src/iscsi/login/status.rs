//! Status of a login response (RFC 7143, section 11.13.5).

/// Status-Class and Status-Detail.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum Status {
    /// The login proceeds.
    #[error("success")]
    Success,
    /// The target moved temporarily; TargetAddress has its new address.
    #[error("the target moved temporarily")]
    MovedTemporarily,
    /// The target moved permanently; TargetAddress has its new address.
    #[error("the target moved permanently")]
    MovedPermanently,
    /// Miscellaneous error of the initiator: a malformed request or an unacceptable value.
    #[error("invalid login request")]
    InitiatorError,
    /// The initiator could not be authenticated.
    #[error("authentication failed")]
    AuthenticationFailure,
    /// The initiator may not access the target.
    #[error("the initiator is not allowed to use the target")]
    AuthorisationFailure,
    /// The target does not exist at this portal.
    #[error("target not found")]
    NotFound,
    /// The target was removed.
    #[error("target removed")]
    TargetRemoved,
    /// Both sides have no protocol version in common.
    #[error("unsupported protocol version")]
    UnsupportedVersion,
    /// The session has its maximum number of connections.
    #[error("too many connections")]
    TooManyConnections,
    /// A required key is missing.
    #[error("missing parameter")]
    MissingParameter,
    /// The session cannot have a connection to this portal.
    #[error("the connection cannot be included in the session")]
    CannotInclude,
    /// The session type is not supported, or differs from the existing session's.
    #[error("unsupported session type")]
    SessionType,
    /// The TSIH belongs to no session.
    #[error("session does not exist")]
    NoSession,
    /// A PDU other than a login request came during the login.
    #[error("invalid request during login")]
    InvalidDuringLogin,
    /// Internal error of the target.
    #[error("target error")]
    TargetError,
    /// The target does not accept logins now.
    #[error("service unavailable")]
    ServiceUnavailable,
    /// The target lacks memory, or has its maximum number of sessions.
    #[error("out of resources")]
    OutOfResources,
    /// Unknown class and detail, from another target implementation.
    #[error("login status {0:#06x}")]
    Other(u16),
}

/// All statuses with their codes.
const CODES: [(Status, u16); 18] = [
    (Status::Success, 0x0000),
    (Status::MovedTemporarily, 0x0101),
    (Status::MovedPermanently, 0x0102),
    (Status::InitiatorError, 0x0200),
    (Status::AuthenticationFailure, 0x0201),
    (Status::AuthorisationFailure, 0x0202),
    (Status::NotFound, 0x0203),
    (Status::TargetRemoved, 0x0204),
    (Status::UnsupportedVersion, 0x0205),
    (Status::TooManyConnections, 0x0206),
    (Status::MissingParameter, 0x0207),
    (Status::CannotInclude, 0x0208),
    (Status::SessionType, 0x0209),
    (Status::NoSession, 0x020a),
    (Status::InvalidDuringLogin, 0x020b),
    (Status::TargetError, 0x0300),
    (Status::ServiceUnavailable, 0x0301),
    (Status::OutOfResources, 0x0302),
];

impl Status {
    /// Returns Status-Class (high byte) and Status-Detail (low byte).
    pub fn code(self) -> u16 {
        match self {
            Status::Other(code) => code,
            known => CODES.iter().find(|(status, _)| *status == known).map_or(0x0300, |(_, code)| *code),
        }
    }

    /// Converts Status-Class (high byte) and Status-Detail (low byte).
    pub fn from_code(code: u16) -> Status {
        CODES.iter().find(|(_, known)| *known == code).map_or(Status::Other(code), |(status, _)| *status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_section_11_13_5() {
        for (status, code) in CODES {
            assert_eq!(status.code(), code);
            assert_eq!(Status::from_code(code), status);
        }
        assert_eq!(Status::from_code(0x0399), Status::Other(0x0399));
        assert_eq!(Status::Other(0x0399).code(), 0x0399);
    }
}
