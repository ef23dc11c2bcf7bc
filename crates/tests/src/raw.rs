//! A client that sends arbitrary bytes, for input that no sane client sends.
//!
//! The numbers are copied from the protocol document again, so that an error in `proto` is not repeated.

use crate::tools::PATIENCE;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// `NBDMAGIC`, then `IHAVEOPT`.
pub const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
/// Starts an option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Starts a reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Starts a request.
pub const REQUEST: u32 = 0x2560_9513;
/// Starts a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Fixed newstyle, no zeroes.
pub const CLIENT_FLAGS: u32 = 3;

/// Returns the error code of an option reply: bit 31 and a number.
pub const fn option_error(number: u32) -> u32 {
    1 << 31 | number
}

/// A connection.
pub struct Raw {
    /// The socket itself.
    pub stream: UnixStream,
}

impl Raw {
    /// Connects and reads nothing.
    ///
    /// # Panics
    /// If no server listens.
    #[track_caller]
    pub fn connect(socket: &Path) -> Raw {
        let stream = UnixStream::connect(socket).unwrap_or_else(|why| panic!("{}: {why}", socket.display()));
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket takes a timeout");
        stream.set_write_timeout(Some(PATIENCE)).expect("a socket takes a timeout");
        Raw { stream }
    }

    /// Connects and exchanges greetings.
    ///
    /// # Panics
    /// If the server does not greet.
    #[track_caller]
    pub fn greeted(socket: &Path) -> Raw {
        let mut raw = Raw::connect(socket);
        let greeting = raw.take(18);
        assert_eq!(&greeting[..16], GREETING);
        assert_eq!(greeting[16..], [0, 3], "fixed newstyle, no zeroes");
        raw.send(&CLIENT_FLAGS.to_be_bytes());
        raw
    }

    /// Connects to an export for simple replies, by `GO` alone.
    ///
    /// # Panics
    /// If the server refuses.
    #[track_caller]
    pub fn go(socket: &Path, export: &str) -> Raw {
        let mut raw = Raw::greeted(socket);
        raw.option(7, &go_data(export));
        loop {
            let (option, kind, data) = raw.option_reply();
            assert_eq!(option, 7);
            match kind {
                1 => return raw,
                3 => {}
                _ => panic!("GO was answered with {kind:#x}: {}", String::from_utf8_lossy(&data)),
            }
        }
    }

    /// Sends bytes.
    ///
    /// # Panics
    /// If they cannot be sent.
    #[track_caller]
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server takes bytes");
    }

    /// Sends bytes; an error means that the server has closed.
    pub fn offer(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Returns the next bytes.
    ///
    /// # Panics
    /// If they do not arrive.
    #[track_caller]
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if let Err(why) = self.stream.read_exact(&mut bytes) {
            panic!("{len} bytes were expected: {why}");
        }
        bytes
    }

    /// Sends an option.
    ///
    /// # Panics
    /// If it cannot be sent.
    #[track_caller]
    pub fn option(&mut self, option: u32, data: &[u8]) {
        self.send(&option_bytes(option, data));
    }

    /// Returns an option reply: the option, the reply's type, its data.
    ///
    /// # Panics
    /// If none arrives.
    #[track_caller]
    pub fn option_reply(&mut self) -> (u32, u32, Vec<u8>) {
        let header = self.take(20);
        assert_eq!(number64(&header[..8]), OPTION_REPLY, "the magic of an option's reply");
        let len = number(&header[16..20]);
        assert!(len <= 64 << 10, "a reply of {len} bytes");
        (number(&header[8..12]), number(&header[12..16]), self.take(len as usize))
    }

    /// Returns a simple reply: cookie and error.
    ///
    /// # Panics
    /// If none arrives.
    #[track_caller]
    pub fn simple_reply(&mut self) -> (u64, u32) {
        let header = self.take(16);
        assert_eq!(number(&header[..4]), SIMPLE_REPLY, "the magic of a simple reply");
        (number64(&header[8..16]), number(&header[4..8]))
    }

    /// Waits until the server closes.
    ///
    /// # Panics
    /// If it does not, or sends more than `spare` bytes before.
    #[track_caller]
    pub fn expect_closed(&mut self, spare: usize) {
        let mut seen = 0;
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return,
                Ok(len) => seen += len,
                // The server closed with our bytes unread.
                Err(why) if why.kind() == io::ErrorKind::ConnectionReset => return,
                Err(why) => panic!("the server did not close: {why}"),
            }
            assert!(seen <= spare, "the server went on talking");
        }
    }
}

/// Returns an option and its data as bytes.
pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = IHAVEOPT.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Returns the data of `GO` and `INFO` without information requests.
pub fn go_data(export: &str) -> Vec<u8> {
    let mut data = (export.len() as u32).to_be_bytes().to_vec();
    data.extend(export.as_bytes());
    data.extend([0, 0]);
    data
}

/// Returns the header of a compact request.
pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// Parses a big-endian number of four bytes.
fn number(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

/// Parses a big-endian number of eight bytes.
fn number64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
