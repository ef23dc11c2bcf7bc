//! The thread that asks for the allocated extents of an image, which librbd cannot do asynchronously.

use crate::sys::Image;
use block::{Bytes, Cookie, Extent};
use queue::QueueWaker;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// The longest range of one answer: the cluster is asked about each of its objects.
pub(crate) const RANGE_MAX: u64 = 1 << 30;

/// The answer to an `Extents` request: its records, or a negative errno.
pub(crate) type Answer = (Cookie, Result<Vec<u8>, i64>);

struct Question {
    io: Cookie,
    offset: u64,
    len: u64,
    /// Room for records, in bytes.
    room: usize,
}

#[derive(Default)]
struct Answers {
    any: AtomicBool,
    list: Mutex<Vec<Answer>>,
}

/// The thread, which ends when this is dropped.
pub(crate) struct ExtentsThread {
    questions: Sender<Question>,
    answers: Arc<Answers>,
}

impl ExtentsThread {
    /// Starts it. `waker` wakes the queue whose requests it answers.
    pub(crate) fn start(image: Arc<Image>, waker: QueueWaker) -> std::io::Result<ExtentsThread> {
        let (questions, asked) = channel::<Question>();
        let answers = Arc::new(Answers::default());
        let given = answers.clone();
        std::thread::Builder::new().name("rbd-extents".to_owned()).spawn(move || {
            while let Ok(Question { io, offset, len, room }) = asked.recv() {
                let allocated = image.allocated(offset, len.min(RANGE_MAX));
                let answer = allocated
                    .map(|allocated| records(&allocated, offset, len.min(RANGE_MAX), room))
                    .map_err(|(_, error)| -i64::from(error.raw_os_error().unwrap_or(libc::EIO)));
                given.list.lock().unwrap_or_else(PoisonError::into_inner).push((io, answer));
                given.any.store(true, Ordering::Release);
                waker();
            }
        })?;
        Ok(ExtentsThread { questions, answers })
    }

    /// Asks about a range, for a request with so much room for records.
    pub(crate) fn ask(&self, io: Cookie, offset: u64, len: u64, room: usize) {
        // The thread ends only after this is dropped.
        let _ = self.questions.send(Question { io, offset, len, room });
    }

    /// Returns the answers given since the last call.
    pub(crate) fn take(&self) -> Vec<Answer> {
        if !self.answers.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *self.answers.list.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the records of `offset..offset + len`, of which these sorted ranges are allocated; those that do
/// not fit are omitted.
fn records(allocated: &[(u64, u64)], offset: u64, len: u64, room: usize) -> Vec<u8> {
    let end = offset + len;
    let mut extents: Vec<Extent> = Vec::new();
    let mut push = |from: u64, to: u64, hole: bool| {
        if from >= to {
            return;
        }
        match extents.last_mut() {
            Some(last) if last.hole == hole => last.len.0 += to - from,
            _ => extents.push(Extent { len: Bytes(to - from), hole, zero: hole }),
        }
    };
    let mut at = offset;
    for &(start, len) in allocated {
        let (start, stop) = (start.clamp(at, end), start.saturating_add(len).clamp(at, end));
        push(at, start, true);
        push(start, stop, false);
        at = stop;
    }
    push(at, end, true);
    let fit = room / Extent::RECORD_LEN;
    extents.iter().take(fit).flat_map(|extent| extent.to_record()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(allocated: &[(u64, u64)], offset: u64, len: u64, room: usize) -> Vec<(u64, bool)> {
        let records = records(allocated, offset, len, room);
        let extents = records.chunks(Extent::RECORD_LEN).map(|record| Extent::from_record(record).unwrap());
        extents.map(|extent| (extent.len.0, extent.hole)).collect()
    }

    #[test]
    fn gaps_between_allocated_ranges_are_holes() {
        let allocated = [(4096, 4096), (8192, 4096), (65536, 512)];
        let expected = [(4096, true), (8192, false), (53248, true), (512, false), (34464, true)];
        assert_eq!(extents(&allocated, 0, 100_512, 160), expected);
    }

    #[test]
    fn ranges_are_cut_to_the_request_and_records_to_the_room() {
        assert_eq!(extents(&[(0, 1 << 20)], 4096, 4096, 160), [(4096, false)]);
        assert_eq!(extents(&[(4096, 4096)], 0, 65536, 32), [(4096, true), (4096, false)]);
        assert_eq!(extents(&[], 0, 4096, 16), [(4096, true)]);
        assert_eq!(extents(&[(0, 10)], 0, 20, 8), []);
    }

    #[test]
    fn ranges_that_overlap_are_counted_once() {
        assert_eq!(extents(&[(0, 8192), (4096, 8192)], 0, 16384, 160), [(12288, false), (4096, true)]);
    }
}
