//! Users and secrets of CHAP, and the file that they are read from.
//!
//! *Invariant:* no message, log line, trace or description contains a secret: its `Debug` output is a
//! placeholder, and errors about the file name the line, not its content.

use proto::iscsi::login::{Chap, Credentials, Secret};
use std::path::Path;

/// The longest user name and secret, in bytes (RFC 7143, section 12.1.3: text of CHAP keys).
const LEN_MAX: usize = 255;
/// Shorter secrets are accepted with a warning (RFC 7143, section 9.2.1: 96 bits).
const SECRET_LEN_MIN: usize = 12;

/// Returns whether both a name and a secret are set: LIO sets them one by one.
pub fn is_complete(credentials: &Credentials) -> bool {
    !credentials.name.is_empty() && !credentials.secret.expose().is_empty()
}

/// How initiators of a portal group, an ACL or discovery sessions authenticate.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Auth {
    /// The user and secret of initiators.
    pub user: Option<Credentials>,
    /// The user and secret with which the target authenticates itself to initiators that ask for it.
    pub mutual: Option<Credentials>,
}

impl Auth {
    /// Returns whether initiators can authenticate.
    pub fn is_set(&self) -> bool {
        self.user.as_ref().is_some_and(is_complete)
    }

    /// Returns the CHAP credentials for the login; `None` if initiators cannot authenticate.
    pub(super) fn chap(&self) -> Option<Chap> {
        let initiator = self.user.clone().filter(is_complete)?;
        Some(Chap { initiator, target: self.mutual.clone().filter(is_complete) })
    }
}

/// Why a file of users and secrets is refused.
#[derive(Debug, thiserror::Error)]
pub enum AuthFileError {
    /// The file cannot be read, or other users may read it.
    #[error("{0}")]
    File(String),
    /// A line is malformed.
    #[error("line {line}: {why} (write USER:SECRET, or mutual USER:SECRET)")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// The problem.
        why: &'static str,
    },
    /// The file has no user.
    #[error("it has no user (write USER:SECRET)")]
    Empty,
}

impl Auth {
    /// Reads a file that only its owner may access: a line `USER:SECRET` for initiators, and optionally a
    /// line `mutual USER:SECRET` for the target. Empty lines and lines that begin with `#` are ignored. The
    /// secret is everything after the first colon.
    ///
    /// # Errors
    /// [`AuthFileError`], without the path.
    pub fn read(path: &Path) -> Result<Auth, AuthFileError> {
        let bytes = engine::private_key::read_secret(path).map_err(AuthFileError::File)?;
        let text =
            std::str::from_utf8(&bytes).map_err(|_| AuthFileError::File("it is not UTF-8".to_owned()))?;
        Auth::parse(text)
    }

    fn parse(text: &str) -> Result<Auth, AuthFileError> {
        let mut auth = Auth::default();
        for (number, line) in text.lines().enumerate() {
            let wrong = |why| AuthFileError::Line { line: number + 1, why };
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (is_mutual, entry) = match line.strip_prefix("mutual ") {
                Some(entry) => (true, entry.trim_start()),
                None => (false, line),
            };
            let (user, secret) = entry.split_once(':').ok_or_else(|| wrong("there is no colon"))?;
            if user.is_empty() || secret.is_empty() {
                return Err(wrong("the user or the secret is empty"));
            }
            if user.len() > LEN_MAX || secret.len() > LEN_MAX {
                return Err(wrong("the user or the secret is longer than 255 bytes"));
            }
            if secret.len() < SECRET_LEN_MIN {
                tracing::warn!(
                    user,
                    "a CHAP secret has fewer than {SECRET_LEN_MIN} bytes, which RFC 7143 requires and Windows insists on"
                );
            }
            let credentials = Credentials { name: user.to_owned(), secret: Secret::new(secret) };
            let place = if is_mutual { &mut auth.mutual } else { &mut auth.user };
            if place.replace(credentials).is_some() {
                return Err(wrong(if is_mutual {
                    "there is a second mutual line"
                } else {
                    "there is a second user"
                }));
            }
        }
        // RFC 7143, section 9.2.1: the two directions must not share a secret.
        if let (Some(user), Some(mutual)) = (&auth.user, &auth.mutual)
            && user.secret == mutual.secret
        {
            return Err(AuthFileError::File(
                "both secrets are equal (choose another: RFC 7143 forbids one secret for both directions)"
                    .to_owned(),
            ));
        }
        if auth.user.is_none() { Err(AuthFileError::Empty) } else { Ok(auth) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    fn credentials(name: &str, secret: &str) -> Option<Credentials> {
        Some(Credentials { name: name.to_owned(), secret: Secret::new(secret) })
    }

    #[test]
    fn a_file_has_a_user_and_at_most_one_mutual_line() {
        let text = "# initiators\nalice:wonder:land-12\n\n  mutual disk:another-secret \n";
        let auth = Auth::parse(text).expect("a file");
        assert_eq!(auth.user, credentials("alice", "wonder:land-12"));
        assert_eq!(auth.mutual, credentials("disk", "another-secret"));
        assert!(auth.is_set() && !Auth::default().is_set());
        assert_eq!(Auth::parse("bob:builder-secret").expect("a file").mutual, None);
    }

    #[test]
    fn errors_name_the_line_and_never_the_secret() {
        let long = format!("a:{}", "s".repeat(256));
        for (text, why) in [
            ("a:topsecret-123\nb", "line 2: there is no colon"),
            (":topsecret", "empty"),
            ("a:", "empty"),
            ("a:topsecret-1\nb:topsecret-2", "line 2: there is a second user"),
            ("a:topsecret-1\nmutual b:x\nmutual c:topsecret-2", "second mutual"),
            ("a:topsecret-12\nmutual b:topsecret-12", "both directions"),
            ("mutual b:topsecret-12", "it has no user"),
            ("# none\n", "it has no user"),
            (&long, "longer than 255"),
        ] {
            let refused = Auth::parse(text).expect_err(text).to_string();
            assert!(refused.contains(why) && !refused.contains("topsecret"), "{refused}");
        }
    }

    #[test]
    fn a_secret_is_not_in_debug_output() {
        let auth = Auth::parse("alice:wonderland-123\nmutual m:other-secret-1").expect("a file");
        let debug = format!("{auth:?}");
        assert!(debug.contains("alice"), "{debug}");
        assert!(!debug.contains("wonder") && !debug.contains("other-"), "{debug}");
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("chap");
        std::fs::write(&path, "alice:wonderland-123\n").expect("written");
        for (mode, is_ok) in [(0o600, true), (0o644, false), (0o666, false)] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("set");
            let read = Auth::read(&path);
            assert_eq!(read.is_ok(), is_ok, "{mode:o}");
            if let Err(why) = read {
                assert!(why.to_string().contains("chmod 600"), "{why}");
            }
        }
    }
}
