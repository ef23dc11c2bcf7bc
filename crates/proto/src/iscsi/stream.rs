//! Cuts a byte stream into PDUs and checks their digests, one PDU at a time.
//!
//! Used by logins, simple initiators and tests; a target's data path places data segments itself.
//! *Invariant:* at most one PDU is buffered: a header of at most 1068 bytes, and data up to the given
//! limit.

use super::digest;
use super::pdu::{BHS_LEN, Bhs, DIGEST_LEN, lengths, padded};

/// Reason why a stream cannot be split into further PDUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StreamError {
    /// The data segment is longer than allowed.
    #[error("data segment of {len} bytes, more than {max}")]
    TooLong {
        /// Length of the data segment in bytes.
        len: u32,
        /// Longest allowed data segment in bytes.
        max: u32,
    },
    /// The header digest is wrong, so the length of the PDU is unknown.
    #[error("wrong header digest")]
    HeaderDigest,
    /// The data digest is wrong.
    #[error("wrong data digest")]
    DataDigest,
}

/// A whole PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    /// Header.
    pub bhs: &'a Bhs,
    /// Additional headers.
    pub ahs: &'a [u8],
    /// Data segment without padding.
    pub data: &'a [u8],
}

/// Receiver of a stream of PDUs.
#[derive(Clone, Default, Debug)]
pub struct Receiver {
    buffer: Vec<u8>,
    header_digest: bool,
    data_digest: bool,
    data_max: u32,
    /// The buffered PDU was returned; the next input replaces it.
    returned: bool,
}

impl Receiver {
    /// Creates a receiver without digests. `data_max` is the longest accepted data segment in bytes.
    pub fn new(data_max: u32) -> Receiver {
        Receiver { data_max, ..Receiver::default() }
    }

    /// Sets digests and the longest data segment in bytes, from the next PDU on.
    pub fn configure(&mut self, header_digest: bool, data_digest: bool, data_max: u32) {
        (self.header_digest, self.data_digest, self.data_max) = (header_digest, data_digest, data_max);
    }

    /// Returns the length of the buffered PDU on the wire, as far as its header is known.
    fn wanted(&self) -> Result<usize, StreamError> {
        let Some(bhs) = self.buffer.first_chunk::<BHS_LEN>() else { return Ok(BHS_LEN) };
        let (ahs_len, data_len) = lengths(bhs);
        let header = BHS_LEN + ahs_len as usize;
        let header_end = header + if self.header_digest { DIGEST_LEN } else { 0 };
        if self.header_digest {
            let Some((covered, rest)) = self.buffer.split_at_checked(header) else { return Ok(header_end) };
            match rest.first_chunk::<DIGEST_LEN>() {
                None => return Ok(header_end),
                Some(digest) if *digest != digest::of(covered) => return Err(StreamError::HeaderDigest),
                Some(_) => {}
            }
        }
        if data_len > self.data_max {
            return Err(StreamError::TooLong { len: data_len, max: self.data_max });
        }
        let data = match (data_len, self.data_digest) {
            (0, _) => 0,
            (len, true) => padded(len) as usize + DIGEST_LEN,
            (len, false) => padded(len) as usize,
        };
        Ok(header_end + data)
    }

    /// Consumes bytes up to the end of the current PDU, and returns how many.
    ///
    /// # Errors
    /// The PDU is too long, or its header digest is wrong: nothing after it can be parsed.
    pub fn input(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        if self.returned {
            self.buffer.clear();
            self.returned = false;
        }
        let mut taken = 0;
        loop {
            let missing = self.wanted()?.saturating_sub(self.buffer.len());
            let (fed, _) = bytes.split_at_checked(taken + missing).unwrap_or((bytes, &[]));
            let new = fed.get(taken..).unwrap_or_default();
            if new.is_empty() {
                return Ok(taken);
            }
            self.buffer.extend_from_slice(new);
            taken = fed.len();
        }
    }

    /// Returns the PDU if it is complete. The next [`Receiver::input`] replaces it.
    ///
    /// # Errors
    /// The data digest is wrong. The stream continues after the PDU.
    pub fn frame(&mut self) -> Result<Option<Frame<'_>>, StreamError> {
        if self.returned || self.buffer.len() < BHS_LEN || self.wanted()? > self.buffer.len() {
            return Ok(None);
        }
        self.returned = true;
        let Some((bhs, rest)) = self.buffer.split_first_chunk::<BHS_LEN>() else { return Ok(None) };
        let (ahs_len, data_len) = lengths(bhs);
        let Some((ahs, rest)) = rest.split_at_checked(ahs_len as usize) else { return Ok(None) };
        let rest = if self.header_digest { rest.get(DIGEST_LEN..).unwrap_or_default() } else { rest };
        let Some((segment, digest)) = rest.split_at_checked(padded(data_len) as usize) else {
            return Ok(None);
        };
        if self.data_digest && data_len > 0 && digest != digest::of(segment) {
            return Err(StreamError::DataDigest);
        }
        let data = segment.get(..data_len as usize).unwrap_or_default();
        Ok(Some(Frame { bhs, ahs, data }))
    }
}

/// Appends a PDU to a stream: header, additional headers, data, padding, digests. The header's lengths must be
/// those of `ahs` and `data`.
pub fn put(out: &mut Vec<u8>, bhs: &Bhs, ahs: &[u8], data: &[u8], header_digest: bool, data_digest: bool) {
    debug_assert_eq!(lengths(bhs), (ahs.len() as u32, data.len() as u32));
    let start = out.len();
    out.extend_from_slice(bhs);
    out.extend_from_slice(ahs);
    if header_digest {
        let digest = digest::of(out.get(start..).unwrap_or_default());
        out.extend_from_slice(&digest);
    }
    if !data.is_empty() {
        let start = out.len();
        out.extend_from_slice(data);
        out.resize(start + padded(data.len() as u32) as usize, 0);
        if data_digest {
            let digest = digest::of(out.get(start..).unwrap_or_default());
            out.extend_from_slice(&digest);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::pdu::{Header, NopOut, Request};
    use super::*;

    fn nop(itt: u32, data: &[u8]) -> Bhs {
        let pdu = Request::NopOut(NopOut { lun: 0, itt, ttt: 0, cmd_sn: 0, exp_stat_sn: 0 });
        let mut bhs = [0; BHS_LEN];
        Header { pdu, immediate: false, ahs_len: 0, data_len: data.len() as u32 }.encode(&mut bhs);
        bhs
    }

    proptest! {
        #[test]
        fn stream_is_cut_wherever_pieces_end(
            datas: Vec<Vec<u8>>, piece in 1usize..200, header_digest: bool, data_digest: bool,
        ) {
            let mut stream = Vec::new();
            for (index, data) in datas.iter().enumerate() {
                put(&mut stream, &nop(index as u32, data), &[], data, header_digest, data_digest);
            }
            let mut receiver = Receiver::new(0);
            receiver.configure(header_digest, data_digest, 1000);
            let mut seen = Vec::new();
            for mut piece in stream.chunks(piece) {
                while !piece.is_empty() {
                    let taken = receiver.input(piece).expect("a valid stream");
                    prop_assert!(taken > 0);
                    piece = &piece[taken..];
                    if let Some(frame) = receiver.frame().expect("valid digests") {
                        seen.push(frame.data.to_vec());
                    }
                }
            }
            prop_assert_eq!(seen, datas);
        }

        #[test]
        fn damage_is_noticed_with_digests(data in prop::collection::vec(any::<u8>(), 1..50), at: prop::sample::Index) {
            let mut stream = Vec::new();
            put(&mut stream, &nop(1, &data), &[], &data, true, true);
            let at = at.index(stream.len());
            stream[at] ^= 0x10;
            let mut receiver = Receiver::new(0);
            receiver.configure(true, true, 1000);
            let fed = receiver.input(&stream);
            let error = fed.err().or_else(|| receiver.frame().err());
            let expected = if at < BHS_LEN + DIGEST_LEN { StreamError::HeaderDigest } else { StreamError::DataDigest };
            // Damaged lengths move the digest, which may then be missing rather than wrong.
            prop_assert!(error == Some(expected) || at == 4);
        }
    }

    #[test]
    fn data_beyond_the_limit_is_refused_before_it_is_buffered() {
        let mut receiver = Receiver::new(100);
        let data = [0; 101];
        let mut stream = Vec::new();
        put(&mut stream, &nop(1, &data), &[], &data, false, false);
        assert_eq!(receiver.input(&stream), Err(StreamError::TooLong { len: 101, max: 100 }));
        assert!(receiver.buffer.len() <= BHS_LEN);
    }
}
