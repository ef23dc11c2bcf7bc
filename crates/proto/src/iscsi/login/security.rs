//! The security stage of a login, at the target: AuthMethod and CHAP (RFC 7143, section 12).

use super::super::chap::{self, Algorithm, NONCE_LEN};
use super::super::text::{number, put};
use super::{Authentication, Chap, Status};

/// Authentication state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// No method is chosen yet.
    Method,
    /// CHAP is chosen; the initiator offers algorithms next.
    Algorithm,
    /// The challenge was sent; the initiator responds next.
    Response(Algorithm),
    /// The initiator is authenticated, or need not be.
    Done,
}

/// Authentication of one login.
#[derive(Debug)]
pub(super) struct Security {
    authentication: Authentication,
    nonce: [u8; NONCE_LEN],
    state: State,
    user: Option<String>,
}

/// Keys of this stage.
const KEYS: [&str; 6] = ["AuthMethod", "CHAP_A", "CHAP_N", "CHAP_R", "CHAP_I", "CHAP_C"];

impl Security {
    pub(super) fn new(authentication: Authentication, nonce: [u8; NONCE_LEN]) -> Security {
        Security { authentication, nonce, state: State::Method, user: None }
    }

    /// Returns the name with which the initiator authenticated itself.
    pub(super) fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Answers the keys of this stage, and returns the remaining pairs. The CHAP keys must come in the
    /// order of section 12.1.3; any other order is an authentication failure, not a negotiation.
    pub(super) fn answer<'a>(
        &mut self,
        pairs: &[(&'a str, &'a str)],
        out: &mut Vec<u8>,
    ) -> Result<Vec<(&'a str, &'a str)>, Status> {
        let (own, rest): (Vec<_>, Vec<_>) = pairs.iter().copied().partition(|pair| KEYS.contains(&pair.0));
        let value = |key| own.iter().find(|pair| pair.0 == key).map(|pair| pair.1);
        // With a duplicated key, one value could be checked and the other one used.
        if own
            .iter()
            .enumerate()
            .any(|(index, pair)| own.iter().skip(index + 1).any(|other| other.0 == pair.0))
        {
            return Err(Status::InitiatorError);
        }
        match self.state {
            _ if own.is_empty() => {}
            State::Method => {
                let methods = value("AuthMethod").ok_or(Status::AuthenticationFailure)?;
                self.choose_method(methods, out)?;
            }
            State::Algorithm => {
                let list = value("CHAP_A").ok_or(Status::AuthenticationFailure)?;
                let algorithm = chap::choose(list).ok_or(Status::AuthenticationFailure)?;
                let (identifier, challenge) = self.challenge(algorithm);
                put(out, "CHAP_A", &algorithm.code().to_string());
                put(out, "CHAP_I", &identifier.to_string());
                put(out, "CHAP_C", &chap::encode(challenge));
                self.state = State::Response(algorithm);
            }
            State::Response(algorithm) => {
                let name = value("CHAP_N").ok_or(Status::AuthenticationFailure)?;
                let response = value("CHAP_R").ok_or(Status::AuthenticationFailure)?;
                self.verify(algorithm, name, response)?;
                match (value("CHAP_I"), value("CHAP_C")) {
                    (None, None) => {}
                    (Some(identifier), Some(challenge)) => {
                        self.prove(algorithm, identifier, challenge, out)?
                    }
                    _ => return Err(Status::AuthenticationFailure),
                }
                self.state = State::Done;
            }
            // AuthMethod must not be negotiated again.
            State::Done => return Err(Status::InitiatorError),
        }
        Ok(rest)
    }

    /// Chooses the initiator's first method that the target accepts.
    fn choose_method(&mut self, methods: &str, out: &mut Vec<u8>) -> Result<(), Status> {
        let (none, chap) = match self.authentication {
            Authentication::Open => (true, false),
            Authentication::Optional(_) => (true, true),
            Authentication::Required(_) => (false, true),
            Authentication::Impossible => (false, false),
        };
        let method = methods.split(',').find(|method| match *method {
            "None" => none,
            "CHAP" => chap,
            _ => false,
        });
        let method = method.ok_or(Status::AuthenticationFailure)?;
        put(out, "AuthMethod", method);
        self.state = if method == "CHAP" { State::Algorithm } else { State::Done };
        Ok(())
    }

    /// Returns the identifier and challenge of this login.
    fn challenge(&self, algorithm: Algorithm) -> (u8, &[u8]) {
        let [identifier, challenge @ ..] = &self.nonce;
        (*identifier, challenge.get(..algorithm.response_len()).unwrap_or(challenge))
    }

    fn chap(&self) -> Result<&Chap, Status> {
        match &self.authentication {
            Authentication::Optional(chap) | Authentication::Required(chap) => Ok(chap),
            Authentication::Open | Authentication::Impossible => Err(Status::AuthenticationFailure),
        }
    }

    /// Checks the initiator's response. A wrong name fails like a wrong secret.
    fn verify(&mut self, algorithm: Algorithm, name: &str, response: &str) -> Result<(), Status> {
        let expected = &self.chap()?.initiator;
        let response = chap::decode(response).ok_or(Status::AuthenticationFailure)?;
        let (identifier, challenge) = self.challenge(algorithm);
        let right = algorithm.verify(identifier, &expected.secret, challenge, &response);
        if !right || name != expected.name {
            return Err(Status::AuthenticationFailure);
        }
        self.user = Some(name.to_owned());
        Ok(())
    }

    /// Proves to the initiator that the target knows its own secret (mutual CHAP).
    fn prove(
        &self,
        algorithm: Algorithm,
        identifier: &str,
        challenge: &str,
        out: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let chap = self.chap()?;
        let own = chap.target.as_ref().ok_or(Status::AuthenticationFailure)?;
        let identifier = number(identifier).and_then(|number| u8::try_from(number).ok());
        let identifier = identifier.ok_or(Status::AuthenticationFailure)?;
        let challenge = chap::decode(challenge).ok_or(Status::AuthenticationFailure)?;
        // Reflection: a target that answers its own challenge, or uses one secret for both directions,
        // gives an impostor the response (section 12.1.3, and RFC 1994, section 7).
        let nonce = self.nonce.get(1..).unwrap_or_default();
        if nonce.starts_with(&challenge)
            || challenge.starts_with(self.challenge(algorithm).1)
            || own.secret == chap.initiator.secret
        {
            return Err(Status::AuthenticationFailure);
        }
        let response = algorithm.response(identifier, &own.secret, &challenge);
        put(out, "CHAP_N", &own.name);
        put(out, "CHAP_R", &chap::encode(&response));
        Ok(())
    }

    /// Decides whether the stage may end. An initiator that never offered a method gets `None`, if the
    /// target accepts that method.
    ///
    /// # Errors
    /// The initiator wants to end the stage, and the target requires authentication that has not begun.
    pub(super) fn settle(&mut self, wants_to_leave: bool) -> Result<bool, Status> {
        if wants_to_leave && self.state == State::Method {
            self.require()?;
        }
        Ok(self.state == State::Done)
    }

    /// Checks that the initiator is authenticated, or need not be.
    ///
    /// # Errors
    /// Authentication is required and has not succeeded.
    pub(super) fn require(&mut self) -> Result<(), Status> {
        match (self.state, &self.authentication) {
            (State::Done, _) => Ok(()),
            (State::Method, Authentication::Open | Authentication::Optional(_)) => {
                self.state = State::Done;
                Ok(())
            }
            _ => Err(Status::AuthenticationFailure),
        }
    }
}
