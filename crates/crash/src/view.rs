//! Blocks of a state, read from the log and the base without copying.
//!
//! An index lists the writes of each chunk. A read takes the last write before the cut that is not lost there,
//! for each sector; so a state is only its cut and its lost pieces, and needs no preparation.

use crate::log::{Kind, Log};
use crate::model::{Illegal, Model, Moments, Piece, State, WHOLE};
use crate::record::SECTOR;
use crate::source::Source;
use std::io;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The unit of the index and of all tracking of reads, in bytes.
pub const CHUNK: u64 = 4096;
const SECTORS: u64 = CHUNK / SECTOR;
/// Chunks that are hashed between two looks at whether to go on: a millisecond.
const GO_ON_EVERY: usize = 256;
/// The most data of a log that is read to compare states.
const HASHED_MAX: u64 = 256 << 20;

/// A log over a base, for one model.
pub struct View {
    log: Arc<Log>,
    data: Arc<dyn Source>,
    base: Arc<dyn Source>,
    size: u64,
    model: Model,
    moments: Moments,
    /// States are compared by their data, and not by the writes that provide it.
    by_data: bool,
    /// Pairs of a chunk and a write that touches it, sorted.
    index: Vec<(u64, u32)>,
}

/// The sectors of a chunk that a write from `start` of `len` bytes covers, as bits.
fn sectors_of(chunk: u64, start: u64, len: u64) -> u8 {
    let first = (start / SECTOR).max(chunk * SECTORS);
    let end = ((start + len) / SECTOR).min((chunk + 1) * SECTORS);
    (first..end).fold(0, |mask, sector| mask | 1 << (sector - chunk * SECTORS))
}

impl View {
    /// Indexes a log. `size`: that of the device in bytes, at least where the log's last write ends.
    pub fn new(log: Arc<Log>, data: Arc<dyn Source>, base: Arc<dyn Source>, size: u64, model: Model) -> View {
        let touched =
            |write: &crate::log::Write| write.offset / CHUNK..(write.offset + write.len).div_ceil(CHUNK);
        let pairs = log.writes.iter().enumerate();
        let mut index: Vec<(u64, u32)> = pairs
            .flat_map(|(number, write)| touched(write).map(move |chunk| (chunk, number as u32)))
            .collect();
        index.sort_unstable();
        let moments = Moments::new(&log);
        let by_data = log.writes.iter().map(crate::log::Write::data_len).sum::<u64>() <= HASHED_MAX;
        View { log, data, base, size, model, moments, by_data, index }
    }

    /// Returns the log.
    pub fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// Returns the model.
    pub const fn model(&self) -> &Model {
        &self.model
    }

    /// Returns the size of the device in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the writes that may be lost at a cut, in ascending order.
    pub fn optional(&self, cut: u32) -> Vec<u32> {
        self.model.optional(&self.log, &self.moments, cut)
    }

    /// Checks whether the model permits a state.
    ///
    /// # Errors
    /// Why not.
    pub fn allows(&self, state: &State) -> Result<(), Illegal> {
        self.model.allows(&self.log, &self.moments, state)
    }

    /// Returns the writes of a chunk that were submitted before a cut, in ascending order.
    fn writes_of(&self, chunk: u64, cut: u32) -> &[(u64, u32)] {
        let start = self.index.partition_point(|(of, _)| *of < chunk);
        let all = &self.index[start..];
        let end = all
            .partition_point(|(of, write)| *of == chunk && self.log.writes[*write as usize].submitted < cut);
        &all[..end]
    }

    /// Returns whether any write of the log touches a chunk.
    pub fn is_touched(&self, chunk: u64) -> bool {
        let start = self.index.partition_point(|(of, _)| *of < chunk);
        self.index.get(start).is_some_and(|(of, _)| *of == chunk)
    }

    /// Returns the chunks that a lost piece touches.
    pub fn chunks(&self, piece: Piece) -> std::ops::Range<u64> {
        let (start, end) = self.range(piece);
        start / CHUNK..end.div_ceil(CHUNK)
    }

    /// Returns the first byte of a piece and the byte after its last.
    pub fn range(&self, piece: Piece) -> (u64, u64) {
        let write = &self.log.writes[piece.write as usize];
        let end = write.offset + write.len;
        if piece.unit == WHOLE {
            return (write.offset, end);
        }
        let unit = write.offset / self.model.atomic + u64::from(piece.unit);
        (write.offset.max(unit * self.model.atomic), end.min((unit + 1) * self.model.atomic))
    }

    /// Returns the sectors of a chunk that a write provides in a state.
    fn present(&self, state: &State, chunk: u64, write: u32) -> u8 {
        let of = &self.log.writes[write as usize];
        let mut mask = sectors_of(chunk, of.offset, of.len);
        let lost = state.lost.partition_point(|piece| piece.write < write);
        for piece in state.lost[lost..].iter().take_while(|piece| piece.write == write) {
            let (start, end) = self.range(*piece);
            if start < (chunk + 1) * CHUNK && end > chunk * CHUNK {
                mask &= !sectors_of(chunk, start, end - start);
            }
        }
        mask
    }

    /// Calls `part` for each write that provides sectors of a chunk; returns the sectors of the base.
    fn parts(
        &self,
        state: &State,
        chunk: u64,
        mut part: impl FnMut(u32, u8) -> io::Result<()>,
    ) -> io::Result<u8> {
        let mut missing = u8::MAX;
        for (_, write) in self.writes_of(chunk, state.cut).iter().rev() {
            let provided = self.present(state, chunk, *write) & missing;
            if provided != 0 {
                part(*write, provided)?;
                missing &= !provided;
                if missing == 0 {
                    break;
                }
            }
        }
        Ok(missing)
    }

    /// Reads a chunk of a state.
    ///
    /// # Errors
    /// Reading the log or the base fails.
    pub fn read_chunk(&self, state: &State, chunk: u64, into: &mut [u8]) -> io::Result<()> {
        let into = &mut into[..CHUNK as usize];
        let missing = self.parts(state, chunk, |write, sectors| self.copy(write, chunk, sectors, into))?;
        runs(missing, |first, count| {
            let at = (first * SECTOR) as usize;
            let end = at + (count * SECTOR) as usize;
            self.base.read_at(chunk * CHUNK + first * SECTOR, &mut into[at..end])
        })
    }

    fn copy(&self, write: u32, chunk: u64, sectors: u8, into: &mut [u8]) -> io::Result<()> {
        let write = &self.log.writes[write as usize];
        runs(sectors, |first, count| {
            let at = (first * SECTOR) as usize;
            let into = &mut into[at..at + (count * SECTOR) as usize];
            if write.kind != Kind::Data {
                into.fill(0);
                return Ok(());
            }
            self.data.read_at(write.data_at + chunk * CHUNK + first * SECTOR - write.offset, into)
        })
    }

    /// Reads bytes of a state at any offset.
    ///
    /// # Errors
    /// Reading the log or the base fails.
    pub fn read(&self, state: &State, at: u64, into: &mut [u8]) -> io::Result<()> {
        let end = at + into.len() as u64;
        let mut from = at;
        let mut piece = [0; CHUNK as usize];
        while from < end {
            let chunk = from / CHUNK;
            let to = if self.writes_of(chunk, state.cut).is_empty() {
                // Chunks without writes are read from the base together.
                let next = self.index.partition_point(|(of, _)| *of <= chunk);
                let next = self.index.get(next).map_or(u64::MAX, |(of, _)| of.saturating_mul(CHUNK));
                let to = end.min(next);
                self.base.read_at(from, &mut into[(from - at) as usize..(to - at) as usize])?;
                to
            } else {
                let to = end.min((chunk + 1) * CHUNK);
                let whole = to - from == CHUNK;
                let target = &mut into[(from - at) as usize..(to - at) as usize];
                if whole {
                    self.read_chunk(state, chunk, target)?;
                } else {
                    self.read_chunk(state, chunk, &mut piece)?;
                    let skip = (from - chunk * CHUNK) as usize;
                    target.copy_from_slice(&piece[skip..skip + target.len()]);
                }
                to
            };
            from = to;
        }
        Ok(())
    }

    /// Returns the hash of a chunk's content in a state.
    fn hash_chunk(&self, state: &State, chunk: u64) -> io::Result<u128> {
        if !self.by_data {
            return Ok(xxh3_128_with_seed(&self.origin(state, &[chunk]).to_le_bytes(), chunk));
        }
        let mut bytes = [0; CHUNK as usize];
        self.read_chunk(state, chunk, &mut bytes)?;
        Ok(xxh3_128_with_seed(&bytes, chunk))
    }

    /// Returns how the hash changes from a state to another that differs in these chunks. `None`: `go_on` has
    /// ended it.
    fn hash_change(
        &self,
        from: &State,
        to: &State,
        chunks: impl Iterator<Item = u64>,
        go_on: &dyn Fn() -> bool,
    ) -> io::Result<Option<u128>> {
        let mut hash = 0;
        for (done, chunk) in chunks.enumerate() {
            if done % GO_ON_EVERY == GO_ON_EVERY - 1 && !go_on() {
                return Ok(None);
            }
            hash ^= self.hash_chunk(from, chunk)? ^ self.hash_chunk(to, chunk)?;
        }
        Ok(Some(hash))
    }

    /// Returns how a write changes the hash of the state in which all before it are present.
    pub(crate) fn hash_of_write(&self, write: u32, go_on: &dyn Fn() -> bool) -> io::Result<Option<u128>> {
        let submitted = self.log.writes[write as usize].submitted;
        let (before, after) = (State::all_present(submitted), State::all_present(submitted + 1));
        self.hash_change(&before, &after, self.chunks(Piece::whole(write)), go_on)
    }

    /// Returns how the lost pieces of a state change the hash of the state without losses.
    pub(crate) fn hash_of_losses(&self, state: &State, go_on: &dyn Fn() -> bool) -> io::Result<Option<u128>> {
        let full = State::all_present(state.cut);
        let mut chunks: Vec<u64> = state.lost.iter().flat_map(|piece| self.chunks(*piece)).collect();
        chunks.sort_unstable();
        chunks.dedup();
        self.hash_change(&full, state, chunks.into_iter(), go_on)
    }

    /// Returns a number that is equal for two states if the same writes provide the chunks in both.
    pub(crate) fn origin(&self, state: &State, chunks: &[u64]) -> u128 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for chunk in chunks {
            let _ = self.parts(state, *chunk, |write, sectors| {
                hash.update(&write.to_le_bytes());
                hash.update(&[sectors]);
                Ok(())
            });
            hash.update(&[0; 1]);
        }
        hash.digest128()
    }
}

/// Calls `part` for each run of set bits: the first, and how many.
fn runs(mask: u8, mut part: impl FnMut(u64, u64) -> io::Result<()>) -> io::Result<()> {
    let mut at = 0;
    while at < 8 {
        let rest = mask >> at;
        if rest & 1 == 0 {
            at += 1;
            continue;
        }
        let count = rest.trailing_ones();
        part(u64::from(at), u64::from(count))?;
        at += count;
    }
    Ok(())
}
