//! Reads private keys and other secrets from files that only their owner may access.
//!
//! The rule is PostgreSQL's: no access for others and no write access for the group; the group may read a key
//! that root owns, as Debian's group ssl-cert does. Permissions are checked on the open file, so that the key
//! that is read is the key that was checked.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use zeroize::Zeroizing;

/// The longest key file that is read: a 16384-bit RSA key in PEM has 12 KiB.
const LEN_MAX: u64 = 1 << 20;

/// Reads the first private key in a PEM file.
///
/// # Errors
/// The file cannot be read, users other than its owner may read it, or it holds no private key: why, without
/// the path.
pub fn read(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let mut pem = Vec::new();
    open(path)?.take(LEN_MAX).read_to_end(&mut pem).map_err(|why| why.to_string())?;
    PrivateKeyDer::from_pem_slice(&pem).map_err(|why| format!("{why} (expected a private key in PEM)"))
}

/// Checks that [`read`] would accept the permissions of a file.
///
/// # Errors
/// As [`read`].
pub(crate) fn check(path: &Path) -> Result<(), String> {
    open(path).map(drop)
}

/// Reads a file of secrets, whose permissions are checked as those of a key.
///
/// # Errors
/// The file cannot be read, is too long, or users other than its owner may read it: why, without the path.
pub fn read_secret(path: &Path) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut bytes = Zeroizing::new(Vec::new());
    open(path)?.take(LEN_MAX).read_to_end(&mut bytes).map_err(|why| why.to_string())?;
    Ok(bytes)
}

fn open(path: &Path) -> Result<File, String> {
    // A pipe without a writer would block.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let failed = |why: io::Error| why.to_string();
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let (mode, owner) = (Mode::from_raw_mode(metadata.mode()), metadata.uid());
    let group_may_read = owner == 0;
    let refused = Mode::RWXO | if group_may_read { Mode::WGRP | Mode::XGRP } else { Mode::RWXG };
    if mode.intersects(refused) {
        let who = if mode.intersects(Mode::RWXO) { "every user" } else { "its group" };
        return Err(format!(
            "{who} has access to this secret file: its mode is {:04o} (chmod 600 it; 640 is accepted if root owns it)",
            metadata.mode() & 0o7777
        ));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown};

    #[test]
    fn a_key_that_others_can_read_or_write_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key.pem");
        std::fs::write(&path, "").unwrap();
        let is_root = rustix::process::geteuid().is_root();
        let cases =
            [(0o600, true), (0o400, true), (0o640, is_root), (0o660, false), (0o604, false), (0o602, false)];
        for (mode, accepted) in cases {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(check(&path).is_ok(), accepted, "{mode:o}");
        }
        if is_root {
            chown(&path, Some(65534), None).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
            assert!(check(&path).unwrap_err().contains("its group has access"));
        }
    }
}
