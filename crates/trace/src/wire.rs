//! A trace on its way from the process that serves a device to whoever asked for it: a sequence of frames.
//!
//! ```text
//! frame  kind (u32) · queue (u32) · length of what follows (u32) · 0 (u32), all little-endian
//! 0  opened   JSON [`Opened`], first and once
//! 1  lane     JSON [`LaneInfo`]: a queue, before its first records; queues are numbered from 0
//! 2  records  32 bytes each, in the order of their times
//! 3  dropped  u64: so many records of the queue were dropped since the last such frame
//! 4  tick     u64: what happened before this time has been told, save by a thread that was just kept from running
//! 5  closed   nothing more comes: the trace ended as it should
//! ```

use crate::Record;
use serde::{Deserialize, Serialize};

/// What a trace is of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Opened {
    /// The device's name.
    pub device: String,
    /// Its number in its process.
    pub number: u32,
    /// The monotonic clock at the beginning, in nanoseconds.
    pub clock_ns: u64,
    /// The time of day then: seconds since 1970 and nanoseconds.
    pub wall: (u64, u32),
}

/// A hardware queue of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LaneInfo {
    /// The thread that serves it.
    pub pid: u32,
    /// Its name.
    pub comm: String,
}

/// One frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// The first.
    Opened(Opened),
    /// A queue that records will come of.
    Lane(u32, LaneInfo),
    /// What happened on a queue.
    Records(u32, Vec<Record>),
    /// What was lost of it.
    Dropped(u32, u64),
    /// All before this time has been told.
    Tick(u64),
    /// The last.
    Closed,
}

/// Why what came is no trace.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("what came is no trace: {0}")]
pub struct NoTrace(&'static str);

const HEADER: usize = 16;
/// A frame that claims to be longer is nonsense: no sender makes one.
const PAYLOAD_MAX: usize = 1 << 20;
const RECORD: usize = 32;
/// Readers have something for each queue up to the highest: no device has that many.
const QUEUES_MAX: u32 = 1 << 16;
/// The most records that a sender puts into one frame.
pub const RECORDS_MAX: usize = 8192;

fn frame(kind: u32, queue: u32, payload: &[u8], into: &mut Vec<u8>) {
    for word in [kind, queue, payload.len() as u32, 0] {
        into.extend_from_slice(&word.to_le_bytes());
    }
    into.extend_from_slice(payload);
}

impl Frame {
    /// Append it to what is sent.
    pub fn encode(&self, into: &mut Vec<u8>) {
        // These are plain structures with text for keys, which always have a JSON form.
        match self {
            Frame::Opened(opened) => frame(0, 0, &serde_json::to_vec(opened).unwrap_or_default(), into),
            Frame::Lane(queue, lane) => {
                frame(1, *queue, &serde_json::to_vec(lane).unwrap_or_default(), into);
            }
            Frame::Records(queue, records) => {
                let words = records.iter().flat_map(|record| record.to_words());
                let payload: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
                frame(2, *queue, &payload, into);
            }
            Frame::Dropped(queue, count) => frame(3, *queue, &count.to_le_bytes(), into),
            Frame::Tick(time) => frame(4, 0, &time.to_le_bytes(), into),
            Frame::Closed => frame(5, 0, &[], into),
        }
    }

    fn decode(kind: u32, queue: u32, payload: &[u8]) -> Result<Frame, NoTrace> {
        if queue >= QUEUES_MAX {
            return Err(NoTrace("there is no such queue"));
        }
        let number =
            || payload.try_into().map(u64::from_le_bytes).map_err(|_| NoTrace("a number is not whole"));
        let json = |_| NoTrace("what should be JSON is none");
        Ok(match kind {
            0 => Frame::Opened(serde_json::from_slice(payload).map_err(json)?),
            1 => Frame::Lane(queue, serde_json::from_slice(payload).map_err(json)?),
            2 => {
                let (whole, rest) = payload.as_chunks::<RECORD>();
                let word = |bytes: &[u8; RECORD], at: usize| {
                    u64::from_le_bytes(std::array::from_fn(|byte| bytes[at * 8 + byte]))
                };
                let record = |bytes| Record::try_from_words(std::array::from_fn(|at| word(bytes, at)));
                let records: Option<Vec<Record>> = whole.iter().map(record).collect();
                match records {
                    Some(records) if rest.is_empty() => Frame::Records(queue, records),
                    _ => return Err(NoTrace("there is no such event")),
                }
            }
            3 => Frame::Dropped(queue, number()?),
            4 => Frame::Tick(number()?),
            5 => Frame::Closed,
            _ => return Err(NoTrace("there is no such frame")),
        })
    }
}

/// Puts frames together from pieces as they arrive.
#[derive(Default, Debug)]
pub struct Decoder {
    bytes: Vec<u8>,
    at: usize,
}

impl Decoder {
    /// More has arrived.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.at);
        self.at = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, if it is there whole.
    ///
    /// # Errors
    /// [`NoTrace`]: nothing sensible will follow.
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
        let record = Record::try_from_words([1, 2, 3 << 12, 4]).unwrap();
        vec![
            Frame::Opened(Opened { device: "disk".into(), number: 3, clock_ns: 5, wall: (6, 7) }),
            Frame::Lane(1, LaneInfo { pid: 4, comm: "reactor-1".into() }),
            Frame::Records(1, vec![record; 3]),
            Frame::Dropped(1, 9),
            Frame::Tick(77),
            Frame::Closed,
        ]
    }

    #[test]
    fn frames_survive_the_way_in_pieces_of_any_size() {
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
    fn nonsense_is_refused() {
        let mut bytes = Vec::new();
        frames().iter().for_each(|frame| frame.encode(&mut bytes));
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 0xff;
            let mut decoder = Decoder::default();
            decoder.feed(&broken);
            // Whatever comes of it, it ends.
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
