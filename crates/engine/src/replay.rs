//! Replays a log of writes onto a device or a file up to a chosen point, which gives the state after a power
//! cut there.
//!
//! Reads the log of the target `log-writes`, ours or the kernel's, entry by entry from plain files. A
//! malformed log is an error, never a panic. Blocks its thread.

use layers::dm::log_writes::format::{DISCARD, ENTRY_LEN, FLUSH, FUA, FormatError, Head, MARK, Super};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes copied at a time.
const PIECE_LEN: usize = 1 << 20;

/// A range of entries. A range ends before the entry that meets an end condition, but a flush or FUA write
/// that ends it is replayed.
#[derive(Clone, Default, Debug)]
pub struct Range {
    /// First entry, from 0.
    pub start: u64,
    /// Start with the entry after this mark.
    pub start_mark: Option<String>,
    /// Most entries to replay.
    pub limit: Option<u64>,
    /// End at this mark.
    pub end_mark: Option<String>,
    /// End with the next flush.
    pub next_flush: bool,
    /// End with the next FUA write.
    pub next_fua: bool,
}

/// Result of a replay.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Replayed {
    /// Entries of the range.
    pub entries: u64,
    /// Number of the entry after the last one.
    pub next: u64,
    /// Bytes written.
    pub bytes: u64,
}

/// One entry, for display.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Number of the entry, from 0.
    pub number: u64,
    /// Description of the entry.
    pub what: String,
}

/// Why a log cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The log is malformed.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// The log has no such mark.
    #[error("the log has no mark \"{0}\"")]
    NoMark(String),
    /// Reading or writing failed.
    #[error("{doing} at sector {sector} failed: {source}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// Where, in sectors.
        sector: u64,
        /// The cause.
        source: io::Error,
    },
}

fn io_error(doing: &'static str, at: u64) -> impl Fn(io::Error) -> ReplayError {
    move |source| ReplayError::Io { doing, sector: at >> 9, source }
}

/// Counts the entries of a log.
///
/// # Errors
/// The file cannot be read, or is not a log.
pub fn count(log: &File) -> Result<u64, ReplayError> {
    Ok(first(log)?.entries)
}

fn first(log: &File) -> Result<Super, ReplayError> {
    let mut block = [0; 512];
    log.read_exact_at(&mut block, 0).map_err(io_error("reading the log", 0))?;
    Ok(Super::decode(&block)?)
}

/// Replays a range of a log. `onto`: the device or file; `None`: the entries are only listed. `step` is
/// called for each entry.
///
/// # Errors
/// [`ReplayError`]; the entries before it were replayed.
pub fn replay(
    log: &File,
    onto: Option<&File>,
    range: &Range,
    discards: bool,
    mut step: impl FnMut(&Step),
) -> Result<Replayed, ReplayError> {
    let first = first(log)?;
    let block = u64::from(first.block);
    let mut at = block;
    let mut bytes = vec![0; first.block as usize];
    let mut started = range.start_mark.is_none();
    let mut done = Replayed::default();
    let mut ended = false;
    for number in 0..first.entries {
        log.read_exact_at(&mut bytes, at).map_err(io_error("reading the log", at))?;
        let head = Head::decode(&bytes, number)?;
        let text = &bytes[ENTRY_LEN..ENTRY_LEN + head.text_len as usize];
        let mark = (head.flags & MARK != 0).then(|| String::from_utf8_lossy(text).into_owned());
        let data_at = at + block;
        at = data_at + head.data_blocks() * block;
        done.next = number + 1;
        if number < range.start {
            continue;
        }
        if !started {
            started = mark.is_some() && mark == range.start_mark;
            continue;
        }
        if mark.is_some() && mark == range.end_mark || range.limit.is_some_and(|limit| done.entries == limit)
        {
            done.next = number;
            ended = true;
            break;
        }
        step(&Step { number, what: describe(&head, mark.as_deref()) });
        done.entries += 1;
        if let (Some(onto), None) = (onto, &mark) {
            done.bytes += replay_entry(log, onto, &head, data_at, block, discards)?;
        }
        let stops = range.next_flush && head.flags & FLUSH != 0 || range.next_fua && head.flags & FUA != 0;
        if stops {
            ended = true;
            break;
        }
    }
    match (&range.start_mark, &range.end_mark) {
        (Some(mark), _) if !started => return Err(ReplayError::NoMark(mark.clone())),
        (_, Some(mark)) if !ended && range.limit.is_none() => return Err(ReplayError::NoMark(mark.clone())),
        _ => {}
    }
    if let Some(onto) = onto {
        onto.sync_data().map_err(io_error("writing", 0))?;
    }
    Ok(done)
}

fn describe(head: &Head, mark: Option<&str>) -> String {
    let place = format!("sector {} size {}", head.sector, head.sectors);
    match (mark, head.flags) {
        (Some(mark), _) => format!("mark {mark}"),
        (_, flags) if flags & DISCARD != 0 => format!("discard {place}"),
        (_, flags) if flags & FLUSH != 0 && head.sectors == 0 => "flush".to_owned(),
        (_, flags) => format!("write {place}{}", if flags & FUA != 0 { " fua" } else { "" }),
    }
}

/// Replays one entry. Returns the bytes written.
fn replay_entry(
    log: &File,
    onto: &File,
    head: &Head,
    data_at: u64,
    block: u64,
    discards: bool,
) -> Result<u64, ReplayError> {
    let (start, len) = (head.sector * block, head.sectors * block);
    if head.flags & DISCARD != 0 {
        if discards && len > 0 {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match fallocate(onto, flags, start, len) {
                Ok(()) => {}
                // A discard is a hint, which a device may lack.
                Err(rustix::io::Errno::OPNOTSUPP) => {}
                Err(why) => return Err(io_error("discarding", start)(why.into())),
            }
        }
        return Ok(0);
    }
    let mut piece = vec![0; PIECE_LEN.min(len as usize)];
    let mut done = 0;
    while done < len {
        let piece_len = (len - done).min(PIECE_LEN as u64) as usize;
        let piece = &mut piece[..piece_len];
        log.read_exact_at(piece, data_at + done).map_err(io_error("reading the log", data_at + done))?;
        onto.write_all_at(piece, start + done).map_err(io_error("writing", start + done))?;
        done += piece_len as u64;
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A write of 1 to sector 0, a mark, a flush, a write of 2 to sector 0, and a discard of sector 1.
    fn log() -> File {
        let log = tempfile::tempfile().unwrap();
        let mut at = 512;
        let mut entries = 0;
        let mut entry = |sector, sectors, flags, text: &[u8], data: u8| {
            let head = Head { sector, sectors, flags, text_len: text.len() as u64 };
            let mut block = vec![0; 512];
            block[..ENTRY_LEN].copy_from_slice(&head.encode());
            block[ENTRY_LEN..ENTRY_LEN + text.len()].copy_from_slice(text);
            block.extend(vec![data; (head.data_blocks() * 512) as usize]);
            log.write_all_at(&block, at).unwrap();
            at += block.len() as u64;
            entries += 1;
        };
        entry(0, 2, 0, b"", 1);
        entry(0, 0, MARK, b"one", 0);
        entry(0, 0, FLUSH, b"", 0);
        entry(0, 1, FUA, b"", 2);
        entry(1, 1, DISCARD, b"", 0);
        log.write_all_at(&Super { entries, block: 512 }.encode(), 0).unwrap();
        log.set_len(8192).unwrap();
        log
    }

    fn left(range: &Range) -> Result<(u8, u8), ReplayError> {
        let onto = tempfile::tempfile().unwrap();
        onto.set_len(1024).unwrap();
        replay(&log(), Some(&onto), range, true, |_| {})?;
        let mut bytes = [0; 1024];
        onto.read_exact_at(&mut bytes, 0).unwrap();
        Ok((bytes[0], bytes[512]))
    }

    #[test]
    fn a_log_is_replayed_up_to_the_chosen_point() {
        let all = Range::default();
        assert_eq!(left(&all).unwrap(), (2, 0));
        assert_eq!(left(&Range { limit: Some(1), ..all.clone() }).unwrap(), (1, 1));
        assert_eq!(left(&Range { end_mark: Some("one".into()), ..all.clone() }).unwrap(), (1, 1));
        assert_eq!(left(&Range { start_mark: Some("one".into()), ..all.clone() }).unwrap(), (2, 0));
        assert_eq!(left(&Range { next_flush: true, ..all.clone() }).unwrap(), (1, 1));
        assert_eq!(left(&Range { next_fua: true, ..all.clone() }).unwrap(), (2, 1));
        assert_eq!(left(&Range { start: 4, ..all.clone() }).unwrap(), (0, 0));
        let missing = left(&Range { end_mark: Some("two".into()), ..all });
        assert_eq!(missing.unwrap_err().to_string(), "the log has no mark \"two\"");
    }

    #[test]
    fn entries_are_described() {
        let mut steps = Vec::new();
        let done =
            replay(&log(), None, &Range::default(), true, |step| steps.push(step.what.clone())).unwrap();
        let wanted = [
            "write sector 0 size 2",
            "mark one",
            "flush",
            "write sector 0 size 1 fua",
            "discard sector 1 size 1",
        ];
        assert_eq!(steps, wanted);
        assert_eq!(done, Replayed { entries: 5, next: 5, bytes: 0 });
        assert_eq!(count(&log()).unwrap(), 5);
    }

    #[test]
    fn a_malformed_log_is_refused() {
        let log = tempfile::tempfile().unwrap();
        log.set_len(4096).unwrap();
        assert!(matches!(count(&log), Err(ReplayError::Format(FormatError::Magic))));
        log.write_all_at(&Super { entries: 1, block: 512 }.encode(), 0).unwrap();
        let wild = Head { sector: u64::MAX, sectors: 2, flags: 0, text_len: 0 };
        log.write_all_at(&wild.encode(), 512).unwrap();
        let replayed = replay(&log, None, &Range::default(), true, |_| {});
        assert!(matches!(replayed, Err(ReplayError::Format(FormatError::Entry(0)))));
    }
}
