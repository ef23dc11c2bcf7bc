//! Generic netlink messages of the nbd family, encoded and decoded without a socket.
//!
//! A message is a header, a command, and attributes padded to four bytes; all numbers are in native byte
//! order. Source: the kernel's uapi/linux/{netlink,genetlink,nbd-netlink}.h.
//!
//! *Invariant:* decoding never panics, whatever the lengths in an answer.

/// `GENL_ID_CTRL`: the family that resolves the names of all other families.
pub(super) const CONTROL_FAMILY: u16 = 16;
/// `CTRL_CMD_GETFAMILY` and its attributes.
pub(super) const GET_FAMILY: u8 = 3;
pub(super) const FAMILY_ID: u16 = 1;
pub(super) const FAMILY_NAME: u16 = 2;

/// `NLMSG_ERROR`: an error, or an acknowledgement if it is 0.
const MESSAGE_ERROR: u16 = 2;
/// `NLM_F_REQUEST | NLM_F_ACK`.
const FLAGS: u16 = 1 | 4;
const HEADER_LEN: usize = 16;
const COMMAND_LEN: usize = 4;
/// `NLA_F_NESTED`.
const NESTED: u16 = 1 << 15;
/// `NLA_TYPE_MASK`.
const TYPE_MASK: u16 = 0x3fff;

/// A command of the nbd family (`NBD_CMD_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Command {
    Connect = 1,
    Disconnect = 2,
    Reconfigure = 3,
    Status = 5,
}

/// The nbd family's attributes (`NBD_ATTR_*`, `NBD_SOCK_*`, `NBD_DEVICE_*`).
pub(super) mod attribute {
    pub(in super::super) const INDEX: u16 = 1;
    pub(in super::super) const SIZE_BYTES: u16 = 2;
    pub(in super::super) const BLOCK_SIZE_BYTES: u16 = 3;
    pub(in super::super) const TIMEOUT: u16 = 4;
    pub(in super::super) const SERVER_FLAGS: u16 = 5;
    pub(in super::super) const CLIENT_FLAGS: u16 = 6;
    pub(in super::super) const SOCKETS: u16 = 7;
    pub(in super::super) const DEAD_CONN_TIMEOUT: u16 = 8;
    pub(in super::super) const DEVICE_LIST: u16 = 9;
    pub(in super::super) const BACKEND_IDENTIFIER: u16 = 10;
    pub(in super::super) const SOCK_ITEM: u16 = 1;
    pub(in super::super) const SOCK_FD: u16 = 1;
    pub(in super::super) const DEVICE_ITEM: u16 = 1;
    pub(in super::super) const DEVICE_INDEX: u16 = 1;
    pub(in super::super) const DEVICE_CONNECTED: u16 = 2;
}

/// A list of attributes under construction.
#[derive(Default)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    fn put(mut self, kind: u16, payload: &[u8]) -> Attributes {
        // Our payloads are far below 64 KiB: the longest is a device's name.
        let len = u16::try_from(payload.len() + 4).unwrap_or(u16::MAX);
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(payload);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn u32(self, kind: u16, value: u32) -> Attributes {
        self.put(kind, &value.to_ne_bytes())
    }

    pub(super) fn u64(self, kind: u16, value: u64) -> Attributes {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds a NUL-terminated string.
    pub(super) fn text(self, kind: u16, value: &str) -> Attributes {
        self.put(kind, &[value.as_bytes(), &[0]].concat())
    }

    pub(super) fn nest(self, kind: u16, inner: Attributes) -> Attributes {
        self.put(kind | NESTED, &inner.0)
    }
}

/// Encodes a request with `NLM_F_ACK`.
pub(super) fn request(family: u16, command: u8, sequence: u32, attributes: &Attributes) -> Vec<u8> {
    let len = (HEADER_LEN + COMMAND_LEN + attributes.0.len()) as u32;
    let mut message = Vec::with_capacity(len as usize);
    message.extend(len.to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(FLAGS.to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    // Port 0: the kernel fills in the socket's own.
    message.extend(0u32.to_ne_bytes());
    // Version 1 is the only one of either family.
    message.extend([command, 1, 0, 0]);
    message.extend(&attributes.0);
    message
}

/// One message of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer<'a> {
    /// End of the answer: 0, or a positive errno.
    End(i32),
    /// Attributes.
    Data(&'a [u8]),
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn number_u16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_ne_bytes)
}

pub(super) fn number_u32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_ne_bytes)
}

/// Iterates over the messages of a datagram that answer `sequence`; others are skipped.
pub(super) fn answers(mut datagram: &[u8], sequence: u32) -> impl Iterator<Item = Answer<'_>> {
    std::iter::from_fn(move || {
        loop {
            let len = number_u32(datagram, 0)? as usize;
            let message = datagram.get(..len).filter(|_| len >= HEADER_LEN)?;
            datagram = datagram.get(len.next_multiple_of(4)..).unwrap_or_default();
            if number_u32(message, 8)? != sequence {
                continue;
            }
            return if number_u16(message, 4)? == MESSAGE_ERROR {
                let error = array(message, HEADER_LEN).map(i32::from_ne_bytes)?;
                Some(Answer::End(error.checked_neg().unwrap_or(i32::MAX)))
            } else {
                message.get(HEADER_LEN + COMMAND_LEN..).map(Answer::Data)
            };
        }
    })
}

/// Iterates over the attributes in `bytes` as kind and payload. Ends at the first malformed one.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(number_u16(bytes, 0)?);
        let kind = number_u16(bytes, 2)? & TYPE_MASK;
        let payload = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, payload))
    })
}

/// Returns the payload of the first attribute of a kind.
pub(super) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, payload)| payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_kernels_layout() {
        let inner = Attributes::default().u32(attribute::SOCK_FD, 9);
        let sockets = Attributes::default().nest(attribute::SOCK_ITEM, inner);
        let attributes = Attributes::default()
            .u32(attribute::INDEX, 3)
            .text(attribute::BACKEND_IDENTIFIER, "ab")
            .nest(attribute::SOCKETS, sockets);
        let message = request(0x21, Command::Connect as u8, 7, &attributes);
        let expected: Vec<u8> = [
            [52u32.to_ne_bytes(), [0x21, 0, 5, 0], 7u32.to_ne_bytes(), [0; 4]].concat(),
            vec![1, 1, 0, 0],
            vec![8, 0, 1, 0, 3, 0, 0, 0],
            vec![7, 0, 10, 0, b'a', b'b', 0, 0],
            vec![16, 0, 7, 0x80, 12, 0, 1, 0x80, 8, 0, 1, 0, 9, 0, 0, 0],
        ]
        .concat();
        assert_eq!(message, expected);
    }

    fn message(kind: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
        let len = (HEADER_LEN + payload.len()) as u32;
        let mut message = [len.to_ne_bytes(), [kind as u8, 0, 0, 0], sequence.to_ne_bytes(), [0; 4]].concat();
        message.extend(payload);
        message
    }

    #[test]
    fn answers_to_other_requests_are_skipped() {
        let data = message(0x21, 5, &[&[1, 1, 0, 0][..], &[8, 0, 1, 0, 2, 0, 0, 0]].concat());
        let error = message(2, 5, &(-16i32).to_ne_bytes());
        let datagram = [message(2, 4, &[0; 4]), data, error].concat();
        let answers: Vec<_> = answers(&datagram, 5).collect();
        assert_eq!(answers.len(), 2);
        let Answer::Data(attributes) = answers[0] else { panic!("{answers:?}") };
        assert_eq!(find(attributes, attribute::INDEX), Some(&[2, 0, 0, 0][..]));
        assert_eq!(answers[1], Answer::End(16));
    }

    #[test]
    fn malformed_answers_do_not_panic() {
        let whole =
            [message(0x21, 5, &[1, 1, 0, 0, 8, 0, 1, 0, 2, 0, 0, 0]), message(2, 5, &[0; 4])].concat();
        for cut in 0..=whole.len() {
            for place in 0..whole.len() {
                let mut bytes = whole[..cut].to_vec();
                if let Some(byte) = bytes.get_mut(place) {
                    *byte = !*byte;
                }
                for answer in answers(&bytes, 5) {
                    if let Answer::Data(data) = answer {
                        attributes(data).for_each(|(_, payload)| assert!(number_u32(payload, 60).is_none()));
                    }
                }
            }
        }
        assert_eq!(attributes(&[3, 0, 1, 0, 9, 9]).count(), 0, "shorter than its own header");
    }
}
