//! The secret of a page's users: 128 random bits, or the content of a file.

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

/// Number of random bytes in a token: 128 bits.
const RANDOM_LEN: usize = 16;
/// Valid lengths of a secret in a file, in characters.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=256;

/// The secret. Only [`Token::text`] returns it; its `Debug` form does not contain it.
#[derive(Clone)]
pub struct Token {
    text: String,
    file: Option<PathBuf>,
}

/// The reason why a token cannot be created or read.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The system did not return random numbers.
    #[error("no random numbers: {0}")]
    Random(#[source] io::Error),
    /// The file cannot be created or read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Other users may read the file.
    #[error("{}: other users may read it (chmod 600 it)", .0.display())]
    Open(PathBuf),
    /// The file belongs to another user, who can read and change it.
    #[error("{}: it belongs to another user (name a file of your own)", .0.display())]
    Owner(PathBuf),
    /// The path does not name a regular file, but a symbolic link or a pipe, for example.
    #[error("{}: not a regular file (name the file itself)", .0.display())]
    Kind(PathBuf),
    /// The file does not contain a secret.
    #[error(
        "{}: it does not contain a token (16 to 256 letters, digits, - or _; or remove it, and one is created)",
        .0.display()
    )]
    Content(PathBuf),
}

/// Opens a file without following a link, and without waiting for a writer of a pipe.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
}

impl Token {
    /// Creates a random token.
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

    /// Reads the token of a file. A missing file is created with a random token, readable by its owner only.
    ///
    /// # Errors
    /// See [`TokenError`].
    pub fn of_file(path: &Path) -> Result<Token, TokenError> {
        let token = Token::held_by(path)?;
        // A process that reads the file again may have another working directory.
        Ok(Token { file: Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())), ..token })
    }

    fn held_by(path: &Path) -> Result<Token, TokenError> {
        let failed = |source| TokenError::File { path: path.to_owned(), source };
        let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        match created {
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

    /// Returns a token with a known text; `None`: the text is not valid.
    pub fn known(text: &str) -> Option<Token> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        (LENGTHS.contains(&text.len()) && text.chars().all(plain))
            .then(|| Token { text: text.to_owned(), file: None })
    }

    /// Returns the secret, for the page's address.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the absolute path of the file that it was read from.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Returns whether `other` is the secret. The comparison takes constant time.
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
    fn a_random_token_has_128_bits_and_differs_each_time() {
        let (one, two) = (Token::random().unwrap(), Token::random().unwrap());
        assert_eq!(one.text().len(), 32);
        assert_ne!(one.text(), two.text());
        assert!(one.is(one.text()) && !one.is(two.text()));
        assert_eq!(format!("{one:?}"), "Token", "logs do not contain it");
    }

    #[test]
    fn only_the_whole_token_matches() {
        let token = Token::known("0123456789abcdef").unwrap();
        for other in ["", "0", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0", "0123456789ABCDEF"]
        {
            assert!(!token.is(other), "{other}");
        }
        assert!(token.is("0123456789abcdef"));
    }

    #[test]
    fn a_missing_file_is_created_for_its_owner_and_read_the_next_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let created = Token::of_file(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Token::of_file(&path).unwrap().is(created.text()));
        assert_eq!((created.file(), Token::random().unwrap().file()), (Some(&*path), None));
    }

    #[test]
    fn a_file_that_others_may_read_or_without_a_token_is_refused() {
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
    fn links_pipes_and_files_of_other_users_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Token::of_file(dir.path()), Err(TokenError::Kind(_))));
        let (path, link, pipe) = (dir.path().join("token"), dir.path().join("link"), dir.path().join("pipe"));
        Token::of_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(Token::of_file(&link), Err(TokenError::Kind(_))));
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert!(matches!(Token::of_file(&pipe), Err(TokenError::Kind(_))), "without waiting for a writer");
        if !geteuid().is_root() {
            eprintln!("skipped: only root can create a file of another user");
            return;
        }
        std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
        assert!(matches!(Token::of_file(&path), Err(TokenError::Owner(_))));
    }
}
