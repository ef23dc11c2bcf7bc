//! The secret that whoever looks at the page has: 128 random bits, or what a file holds.

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Bytes of chance: 128 bits.
const RANDOM_LEN: usize = 16;
/// A file's secret has at least so many characters, and at most so many.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=256;

/// The secret. It shows itself to [`Token::text`] only.
#[derive(Clone)]
pub struct Token {
    text: String,
    file: Option<PathBuf>,
}

/// Why there is no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The system has no random numbers.
    #[error("no random numbers: {0}")]
    Random(#[source] io::Error),
    /// The file.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// Others could read it.
    #[error("{}: others may read it (chmod 600 it)", .0.display())]
    Open(PathBuf),
    /// Somebody else knows what is in it, or will decide that.
    #[error("{}: it is another user's (name a file of your own)", .0.display())]
    Owner(PathBuf),
    /// It is a link, a pipe or the like.
    #[error("{}: it is no regular file (name the file itself)", .0.display())]
    Kind(PathBuf),
    /// It holds no secret.
    #[error(
        "{}: it holds no token (16 to 256 letters, digits, - or _; or remove it, and one is made)",
        .0.display()
    )]
    Content(PathBuf),
}

/// Opens the file itself, not what a link names, and waits for nobody at a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

impl Token {
    /// A new one.
    ///
    /// # Errors
    /// [`TokenError::Random`].
    pub fn random() -> Result<Token, TokenError> {
        let mut bytes = [0u8; RANDOM_LEN];
        let got = getrandom(&mut bytes, GetRandomFlags::empty());
        let got = got.map_err(|why| TokenError::Random(why.into()))?;
        if got < RANDOM_LEN {
            return Err(TokenError::Random(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(Token { text: bytes.iter().map(|byte| format!("{byte:02x}")).collect(), file: None })
    }

    /// What a file holds; where there is none, one is made, for its owner only, with a new token.
    ///
    /// # Errors
    /// See [`TokenError`].
    pub fn of_file(path: &Path) -> Result<Token, TokenError> {
        let token = Token::held_by(path)?;
        // Where it is from here may be elsewhere from where whoever reads it again is.
        Ok(Token { file: Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())), ..token })
    }

    fn held_by(path: &Path) -> Result<Token, TokenError> {
        let failed = |source| TokenError::File { path: path.to_owned(), source };
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        match made {
            Ok(mut file) => {
                let token = Token::random()?;
                file.write_all(format!("{}\n", token.text).as_bytes()).map_err(failed)?;
                Ok(token)
            }
            Err(there) if there.kind() == io::ErrorKind::AlreadyExists => {
                let file =
                    open(path).map_err(|why| match why.raw_os_error().map(Errno::from_raw_os_error) {
                        Some(Errno::LOOP) => TokenError::Kind(path.to_owned()),
                        _ => failed(why),
                    })?;
                let metadata = file.metadata().map_err(failed)?;
                if !metadata.is_file() {
                    return Err(TokenError::Kind(path.to_owned()));
                }
                if metadata.uid() != geteuid().as_raw() {
                    return Err(TokenError::Owner(path.to_owned()));
                }
                if metadata.permissions().mode() & 0o077 != 0 {
                    return Err(TokenError::Open(path.to_owned()));
                }
                let mut text = String::new();
                file.take(*LENGTHS.end() as u64 + 8).read_to_string(&mut text).map_err(failed)?;
                Token::known(text.trim()).ok_or_else(|| TokenError::Content(path.to_owned()))
            }
            Err(why) => Err(failed(why)),
        }
    }

    /// One that was made before. `None`: it cannot be one.
    pub fn known(text: &str) -> Option<Token> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        (LENGTHS.contains(&text.len()) && text.chars().all(plain))
            .then(|| Token { text: text.to_owned(), file: None })
    }

    /// For the page's address, which is told once.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The file that holds it, from the root on, where it is from one.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Whether that is it, in a time that does not tell where it differs.
    pub fn is(&self, other: &str) -> bool {
        let (own, other) = (self.text.as_bytes(), other.as_bytes());
        let mut differs = own.len() ^ other.len();
        for (place, byte) in own.iter().enumerate() {
            differs |= usize::from(byte ^ other.get(place).copied().unwrap_or(!byte));
        }
        black_box(differs) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_128_bits_and_never_the_same() {
        let (one, two) = (Token::random().unwrap(), Token::random().unwrap());
        assert_eq!(one.text().len(), 32);
        assert_ne!(one.text(), two.text());
        assert!(one.is(one.text()) && !one.is(two.text()));
        assert_eq!(format!("{one:?}"), "Token", "it does not get into logs");
    }

    #[test]
    fn only_the_whole_token_is_it() {
        let token = Token::known("0123456789abcdef").unwrap();
        for other in ["", "0", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0", "0123456789ABCDEF"]
        {
            assert!(!token.is(other), "{other}");
        }
        assert!(token.is("0123456789abcdef"));
    }

    #[test]
    fn a_file_is_made_for_its_owner_and_read_the_next_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let made = Token::of_file(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Token::of_file(&path).unwrap().is(made.text()));
        assert_eq!((made.file(), Token::random().unwrap().file()), (Some(&*path), None));
    }

    #[test]
    fn a_file_that_others_read_or_that_holds_no_token_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        Token::of_file(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Token::of_file(&path), Err(TokenError::Open(_))));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        for text in ["", "short", "has a space in the middle", &"x".repeat(300)] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(Token::of_file(&path), Err(TokenError::Content(_))), "{text}");
        }
    }

    #[test]
    fn only_a_file_of_its_own_user_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Token::of_file(dir.path()), Err(TokenError::Kind(_))));
        let (path, link, pipe) = (dir.path().join("token"), dir.path().join("link"), dir.path().join("pipe"));
        Token::of_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(Token::of_file(&link), Err(TokenError::Kind(_))));
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert!(matches!(Token::of_file(&pipe), Err(TokenError::Kind(_))), "without waiting for a writer");
        if !geteuid().is_root() {
            eprintln!("skipped: a file of another user: only root can make one");
            return;
        }
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        assert!(matches!(Token::of_file(&path), Err(TokenError::Owner(_))));
    }
}
