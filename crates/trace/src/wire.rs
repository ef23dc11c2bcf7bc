//! Wire format of a trace, from the process that serves a device to its client: a sequence of frames.
//!
//! ```text
//! frame  kind (u32) · queue (u32) · length of what follows (u32) · 0 (u32), all little-endian
//! 0  opened   JSON [`Opened`], first and once
//! 1  queue    JSON [`TracedQueueInfo`]: a queue, before its first records; queues are numbered from 0
//! 2  records  32 bytes each, in the order of their times
//! 3  dropped  u64: so many records of the queue were dropped since the last such frame
//! 4  tick     u64: all records before this time have been sent, except from a thread that was preempted just then
//! 5  closed   nothing more comes: the trace ended as it should
//! 6  session  JSON [`SessionName`]: a session, before the first records of its commands
//! ```

use crate::Record;
use serde::{Deserialize, Serialize};

/// Content of the first frame: the traced device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Opened {
    /// Name of the device.
    pub device: String,
    /// Number of the device in its process.
    pub number: u32,
    /// The monotonic clock at the start of the trace, in nanoseconds.
    pub clock_ns: u64,
    /// The wall-clock time at the start of the trace: seconds since 1970, and nanoseconds.
    pub wall: (u64, u32),
    /// The nodes of the device's stack, by number.
    #[serde(default)]
    pub nodes: Vec<Node>,
}

/// A node of the stack of the traced device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Node {
    /// The node's name, and a text that distinguishes it from others of that name: `file /srv/disk.img`.
    pub name: String,
    /// Whether the node is a backend: no node is below it.
    pub backend: bool,
}

/// A hardware queue of the device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TracedQueueInfo {
    /// Id of the thread that serves the queue.
    pub pid: u32,
    /// Name of the thread.
    pub comm: String,
}

/// A session of a client's protocol whose commands are traced.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SessionName {
    /// The session's number in the records of commands.
    pub number: u16,
    /// Name of the initiator.
    pub initiator: String,
}

/// A frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// First frame.
    Opened(Opened),
    /// Announces a queue.
    Queue(u32, TracedQueueInfo),
    /// Records of a queue.
    Records(u32, Vec<Record>),
    /// Number of records of a queue that were dropped.
    Dropped(u32, u64),
    /// All records before this time have been sent.
    Tick(u64),
    /// Last frame.
    Closed,
    /// Names a session.
    Session(SessionName),
}

/// The error of an input that is not a trace.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a trace: {0}")]
pub struct NoTrace(&'static str);

const HEADER: usize = 16;
/// Longest valid payload in bytes: no sender exceeds it.
const PAYLOAD_MAX: usize = 1 << 20;
const RECORD: usize = 32;
/// Largest number of queues: readers allocate state for each up to the highest number.
const QUEUES_MAX: u32 = 1 << 16;
/// Largest number of records that a sender puts into one frame.
pub const RECORDS_MAX: usize = 8192;

fn frame(kind: u32, queue: u32, payload: &[u8], into: &mut Vec<u8>) {
    for word in [kind, queue, payload.len() as u32, 0] {
        into.extend_from_slice(&word.to_le_bytes());
    }
    into.extend_from_slice(payload);
}

impl Frame {
    /// Appends the encoded frame.
    pub fn encode(&self, into: &mut Vec<u8>) {
        // These are plain structures with string keys, so their encoding as JSON does not fail.
        match self {
            Frame::Opened(opened) => frame(0, 0, &serde_json::to_vec(opened).unwrap_or_default(), into),
            Frame::Queue(queue, buffer) => {
                frame(1, *queue, &serde_json::to_vec(buffer).unwrap_or_default(), into);
            }
            Frame::Records(queue, records) => {
                let words = records.iter().flat_map(|record| record.to_words());
                let payload: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
                frame(2, *queue, &payload, into);
            }
            Frame::Dropped(queue, count) => frame(3, *queue, &count.to_le_bytes(), into),
            Frame::Tick(time) => frame(4, 0, &time.to_le_bytes(), into),
            Frame::Closed => frame(5, 0, &[], into),
            Frame::Session(session) => {
                frame(6, 0, &serde_json::to_vec(session).unwrap_or_default(), into);
            }
        }
    }

    fn decode(kind: u32, queue: u32, payload: &[u8]) -> Result<Frame, NoTrace> {
        if queue >= QUEUES_MAX {
            return Err(NoTrace("the queue number is too high"));
        }
        let number =
            || payload.try_into().map(u64::from_le_bytes).map_err(|_| NoTrace("a number is incomplete"));
        let json = |_| NoTrace("invalid JSON");
        Ok(match kind {
            0 => Frame::Opened(serde_json::from_slice(payload).map_err(json)?),
            1 => Frame::Queue(queue, serde_json::from_slice(payload).map_err(json)?),
            2 => {
                let (whole, rest) = payload.as_chunks::<RECORD>();
                let word = |bytes: &[u8; RECORD], at: usize| {
                    u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]))
                };
                let record = |bytes| Record::from_words(std::array::from_fn(|at| word(bytes, at)));
                if !rest.is_empty() {
                    return Err(NoTrace("an event is incomplete"));
                }
                Frame::Records(queue, whole.iter().map(record).collect())
            }
            3 => Frame::Dropped(queue, number()?),
            4 => Frame::Tick(number()?),
            5 => Frame::Closed,
            6 => Frame::Session(serde_json::from_slice(payload).map_err(json)?),
            _ => return Err(NoTrace("unknown kind of frame")),
        })
    }
}

/// Reassembles frames from received data.
#[derive(Default, Debug)]
pub struct Decoder {
    bytes: Vec<u8>,
    at: usize,
}

impl Decoder {
    /// Adds received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.at);
        self.at = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next frame, or `None` if it is not complete yet.
    ///
    /// # Errors
    /// [`NoTrace`]: the input is invalid, and its rest cannot be decoded.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, NoTrace> {
        let rest = &self.bytes[self.at..];
        let Some((header, rest)) = rest.split_at_checked(HEADER) else { return Ok(None) };
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| header[at * 4 + byte]));
        let len = word(2) as usize;
        if len > PAYLOAD_MAX {
            return Err(NoTrace("a frame is too long"));
        }
        let Some(payload) = rest.get(..len) else { return Ok(None) };
        let frame = Frame::decode(word(0), word(1), payload)?;
        self.at += HEADER + len;
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Vec<Frame> {
        let record = Record::from_words([1, 2, 3 << 12, 4]);
        vec![
            Frame::Opened(Opened {
                device: "disk".into(),
                number: 3,
                clock_ns: 5,
                wall: (6, 7),
                nodes: vec![Node { name: "ram 1M".into(), backend: true }],
            }),
            Frame::Queue(1, TracedQueueInfo { pid: 4, comm: "reactor-1".into() }),
            Frame::Records(1, vec![record; 3]),
            Frame::Dropped(1, 9),
            Frame::Session(SessionName { number: 8, initiator: "iqn.2026-11.example:host".into() }),
            Frame::Tick(77),
            Frame::Closed,
        ]
    }

    #[test]
    fn frames_are_decoded_from_pieces_of_any_size() {
        let mut bytes = Vec::new();
        frames().iter().for_each(|frame| frame.encode(&mut bytes));
        for size in [1, 7, 16, 1000] {
            let (mut decoder, mut seen) = (Decoder::default(), Vec::new());
            for piece in bytes.chunks(size) {
                decoder.feed(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    seen.push(frame);
                }
            }
            assert_eq!(seen, frames(), "{size}");
        }
    }

    #[test]
    fn invalid_input_is_refused() {
        let mut bytes = Vec::new();
        frames().iter().for_each(|frame| frame.encode(&mut bytes));
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 0xff;
            let mut decoder = Decoder::default();
            decoder.feed(&broken);
            // Whatever the result, decoding ends.
            while let Ok(Some(_)) = decoder.next_frame() {}
        }
        let mut far = Vec::new();
        Frame::Dropped(1 << 16, 1).encode(&mut far);
        let mut decoder = Decoder::default();
        decoder.feed(&far);
        assert!(decoder.next_frame().is_err(), "a queue that no device has");
        let mut decoder = Decoder::default();
        decoder.feed(&[0xff; 64]);
        assert!(decoder.next_frame().is_err());
    }
}
