//! The journal's native protocol: a datagram of fields for each line.
//!
//! A field is `NAME=value` and a line end; a value with line ends is written as the name, a line end, its
//! length in 64 bits, little-endian, the value and a line end. Source: systemd's "Native Journal Protocol".
//! Lines are bounded, so they fit a datagram and no descriptor has to be passed.

use super::{Level, Line, lines};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

/// The journal's socket.
const SOCKET: &str = "/run/systemd/journal/socket";

/// A socket that sends to the journal.
pub(super) struct Journal {
    socket: io::Result<UnixDatagram>,
    to: PathBuf,
}

impl Default for Journal {
    /// Connects to the system's journal, or to the socket in `BLOCKYARD_JOURNAL`.
    fn default() -> Journal {
        let to = std::env::var_os("BLOCKYARD_JOURNAL").map_or_else(|| SOCKET.into(), PathBuf::from);
        Journal { socket: UnixDatagram::unbound(), to }
    }
}

impl Journal {
    /// Returns the journal if stderr is connected to it: `JOURNAL_STREAM` is then its device and inode.
    pub(super) fn of_stderr() -> Option<Journal> {
        let stream = std::env::var("JOURNAL_STREAM").ok()?;
        let stat = rustix::fs::fstat(rustix::stdio::stderr()).ok()?;
        (stream == format!("{}:{}", stat.st_dev, stat.st_ino)).then(Journal::default)
    }

    /// Sends a line.
    ///
    /// # Errors
    /// The journal does not accept it; the caller writes it to stderr.
    pub(super) fn send(&self, line: &Line) -> io::Result<()> {
        match &self.socket {
            Ok(socket) => socket.send_to(&datagram(line), &self.to).map(drop),
            Err(error) => Err(error.kind().into()),
        }
    }
}

fn datagram(line: &Line) -> Vec<u8> {
    // Priorities of syslog.
    let priority = match line.level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        _ => "7",
    };
    let mut bytes = Vec::new();
    let mut message = line.message.clone();
    for (name, value) in &line.fields {
        // Readers that show only the message see the fields, too.
        message += &format!(" {name}={}", value.text);
    }
    put(&mut bytes, "MESSAGE", &message);
    put(&mut bytes, "PRIORITY", priority);
    put(&mut bytes, "SYSLOG_IDENTIFIER", "blockyard");
    put(&mut bytes, "BLOCKYARD_LEVEL", lines::level(line.level));
    for (name, value) in &line.fields {
        put(&mut bytes, &format!("BLOCKYARD_{}", name.to_ascii_uppercase()), &value.text);
    }
    bytes
}

fn put(bytes: &mut Vec<u8>, name: &str, value: &str) {
    bytes.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        bytes.push(b'\n');
        bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        bytes.push(b'=');
    }
    bytes.extend_from_slice(value.as_bytes());
    bytes.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn line(value: &str) -> Line {
        Line {
            at: SystemTime::now(),
            level: Level::WARN,
            message: "slow request".to_owned(),
            fields: vec![("device", value.into())],
        }
    }

    #[test]
    fn a_line_is_a_datagram_of_fields() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal");
        let there = UnixDatagram::bind(&path).expect("a socket");
        let journal = Journal { socket: UnixDatagram::unbound(), to: path };
        journal.send(&line("disk")).expect("the journal accepts it");
        let mut bytes = [0; 4096];
        let len = there.recv(&mut bytes).expect("a datagram");
        let text = String::from_utf8_lossy(&bytes[..len]);
        let expected = "MESSAGE=slow request device=disk\nPRIORITY=4\nSYSLOG_IDENTIFIER=blockyard\n\
                        BLOCKYARD_LEVEL=warn\nBLOCKYARD_DEVICE=disk\n";
        assert_eq!(text, expected);
        drop(there);
        assert!(journal.send(&line("disk")).is_err(), "the journal's socket is closed");
    }

    #[test]
    fn multi_line_values_have_a_length() {
        let mut bytes = Vec::new();
        put(&mut bytes, "A", "b\nPRIORITY=0");
        assert_eq!(bytes, b"A\n\x0c\0\0\0\0\0\0\0b\nPRIORITY=0\n");
    }
}
