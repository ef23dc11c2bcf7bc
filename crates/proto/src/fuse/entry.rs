//! FUSE requests over io_uring. Each request arrives in the memory of a ring *entry*, with header and
//! payload in separate areas. There are as many queues as the machine may have processors.

use super::call::{Call, Header, Malformed};
use super::wire::uring::{ARGUMENTS_AT, COMMAND_LEN, COMMIT_ID_AT, ENTRY_AT, HEADER_LEN, PAYLOAD_LEN_AT};
use super::wire::{Fields, IN_HEADER_LEN, OUT_HEADER_LEN, put};

/// A request that arrived in an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Header of the request.
    pub header: Header,
    /// The parsed request. The data of a write is the payload.
    pub call: Call,
    /// Identifies the request when it is committed through the ring.
    pub commit_id: u64,
    /// Bytes of the payload.
    pub payload_len: u32,
}

impl Arrival {
    /// Parses the header of an entry, all [`HEADER_LEN`] bytes of it.
    ///
    /// # Errors
    /// [`Malformed`]: the bytes are not a request. The kernel never sends such bytes.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Result<Arrival, Malformed> {
        let header = Header::read(bytes);
        if bytes.len() < HEADER_LEN || (header.len as usize) < IN_HEADER_LEN {
            return Err(Malformed(bytes.len()));
        }
        let fields = Fields(bytes);
        let call = Call::parse(&header, &bytes[ARGUMENTS_AT..ENTRY_AT]);
        let payload_len = fields.u32(PAYLOAD_LEN_AT);
        Ok(Arrival { header, call, commit_id: fields.u64(COMMIT_ID_AT), payload_len })
    }
}

/// Writes the completion of a request to its entry's header: 0 or a positive errno, and the bytes of its
/// payload.
#[inline]
pub fn put_answer(header: &mut [u8], unique: u64, errno: i32, payload_len: u32) {
    put(header, 0, (OUT_HEADER_LEN as u32 + payload_len).to_ne_bytes());
    put(header, 4, (-errno).to_ne_bytes());
    put(header, 8, unique.to_ne_bytes());
    put(header, PAYLOAD_LEN_AT, payload_len.to_ne_bytes());
}

/// Encodes `fuse_uring_cmd_req`: the request to commit (0 for none) and the queue of the entry.
#[inline]
pub fn command(commit_id: u64, queue: u16) -> [u8; COMMAND_LEN] {
    let mut bytes = [0; COMMAND_LEN];
    put(&mut bytes, 8, commit_id.to_ne_bytes());
    put(&mut bytes, 16, queue.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::wire::opcode;
    use super::*;

    fn write_of(len: u32, payload: u32) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        put(&mut bytes, 0, (80 + len).to_ne_bytes());
        put(&mut bytes, 4, opcode::WRITE.to_ne_bytes());
        put(&mut bytes, 8, 7u64.to_ne_bytes());
        put(&mut bytes, ARGUMENTS_AT + 8, 4096u64.to_ne_bytes());
        put(&mut bytes, ARGUMENTS_AT + 16, len.to_ne_bytes());
        put(&mut bytes, COMMIT_ID_AT, 9u64.to_ne_bytes());
        put(&mut bytes, PAYLOAD_LEN_AT, payload.to_ne_bytes());
        bytes
    }

    #[test]
    fn a_write_has_its_data_in_the_payload() {
        let arrival = Arrival::parse(&write_of(512, 512)).unwrap();
        assert_eq!((arrival.header.unique, arrival.commit_id, arrival.payload_len), (7, 9, 512));
        let Call::Write(write) = arrival.call else { panic!("a write") };
        assert_eq!((write.offset, write.len), (4096, 512));
    }

    #[test]
    fn less_than_a_header_is_no_request() {
        assert_eq!(Arrival::parse(&write_of(0, 0)[..HEADER_LEN - 1]), Err(Malformed(HEADER_LEN - 1)));
        assert_eq!(Arrival::parse(&[0; HEADER_LEN]), Err(Malformed(HEADER_LEN)));
    }

    #[test]
    fn an_answer_has_the_kernels_layout() {
        let mut bytes = [0xaa; HEADER_LEN];
        put_answer(&mut bytes, 7, libc::EIO, 0);
        assert_eq!(bytes[..4], 16u32.to_ne_bytes());
        assert_eq!(bytes[4..8], (-libc::EIO).to_ne_bytes());
        assert_eq!(bytes[8..16], 7u64.to_ne_bytes());
        assert_eq!(bytes[272..276], [0; 4]);
    }

    #[test]
    fn a_command_names_request_and_queue() {
        let bytes = command(5, 3);
        assert_eq!(bytes[..8], [0; 8]);
        assert_eq!(bytes[8..16], 5u64.to_ne_bytes());
        assert_eq!((bytes[16], &bytes[18..]), (3, &[0u8; 6][..]));
    }
}
