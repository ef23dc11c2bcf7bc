//! Reads logs of dm-log-writes, of the kernel or of the target `log-writes`.
//!
//! Such a log has no submissions and completions: an entry stands where its write is known to be durable, or
//! at the end. Each write is taken as submitted and completed at its entry, and each flush covers the entries
//! before it. Entries between two flushes may have been in flight together, so any of them may be lost.

use crate::log::{Kind, Log, LogError};
use crate::source::Source;
use layers::dm::log_writes::format::{DISCARD, ENTRY_LEN, FLUSH, FUA, FormatError, Head, MARK, Super};

pub(crate) fn read(source: &dyn Source, len: u64) -> Result<Log, LogError> {
    let mut first = [0; 512];
    source.read_at(0, &mut first)?;
    let damaged = |at: u64, why: FormatError| match why {
        FormatError::Magic => LogError::Magic,
        other => LogError::Damaged { at, why: other.to_string() },
    };
    let first = Super::decode(&first).map_err(|why| damaged(0, why))?;
    let block = u64::from(first.block);
    let mut log = Log::default();
    let mut bytes = vec![0; first.block as usize];
    let mut at = block;
    for number in 0..first.entries {
        if at + block > len {
            let why = format!("entry {number} of {} is beyond the end of the log", first.entries);
            return Err(LogError::Damaged { at, why });
        }
        source.read_at(at, &mut bytes)?;
        let head = Head::decode(&bytes, number).map_err(|why| damaged(at, why))?;
        let data_at = at + block;
        // An entry in the middle has all of its data; a short one at the end is not usable.
        let Some(next) = head.data_blocks().checked_mul(block).and_then(|data| data_at.checked_add(data))
        else {
            return Err(LogError::Damaged { at, why: "its length is impossible".to_owned() });
        };
        if next > len && head.data_blocks() > 0 {
            let why = "its data is beyond the end of the log".to_owned();
            return Err(LogError::Damaged { at, why });
        }
        if head.flags & MARK != 0 {
            let text = &bytes[ENTRY_LEN..ENTRY_LEN + head.text_len as usize];
            let text = String::from_utf8_lossy(text).trim_end_matches('\0').to_owned();
            log.mark(text, number);
        } else {
            // FLUSH with data means a flush before the write, as in the kernel's block layer.
            if head.flags & FLUSH != 0 {
                let flush = log.flush(number);
                log.flushed(flush);
            }
            if head.sectors > 0 {
                let kind = if head.flags & DISCARD == 0 { Kind::Data } else { Kind::Discard };
                let (start, len) = (head.sector * block, head.sectors * block);
                let fua = head.flags & FUA != 0;
                let write = log.submit(start, len, data_at, number, 0, kind, fua);
                log.complete(write);
                log.size = log.size.max(start + len);
            }
        }
        at = next;
    }
    Ok(log)
}
