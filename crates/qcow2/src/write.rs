//! Writes, write-zeroes requests and discards.
//!
//! An allocated cluster with refcount one is written in place, by several threads at once. All other data
//! goes to new clusters, which are filled outside the metadata mutex, with the range lock held exclusively,
//! and published in memory when all of them are written. Old clusters are never changed, and are freed by
//! the flush that makes the new entries durable.

use crate::header::AT_AUTOCLEAR;
use crate::meta::Step;
use crate::refcounts::Run;
use crate::{Disk, SeededFault, lock};
use std::io;
use std::sync::atomic::Ordering;

/// Maximum bytes of new clusters that are written together.
const NEW_LEN_MAX: u64 = 4 << 20;
/// Maximum bytes of zeroes that are written together.
const ZEROES_LEN: u64 = 1 << 20;

impl Disk {
    /// Writes all of `from` at `offset`. The range must be within the disk.
    ///
    /// # Errors
    /// A write failed; any part may have been written.
    pub fn write(&self, from: &[u8], offset: u64) -> io::Result<()> {
        self.begin_write()?;
        let done = {
            let _held = self.hold(offset, from.len() as u64, false);
            self.write_in_place(from, offset)?
        };
        if done == from.len() {
            return Ok(());
        }
        let (from, offset) = (&from[done..], offset + done as u64);
        let _held = self.hold(offset, from.len() as u64, true);
        self.write_held(from, offset)
    }

    /// Performs the checks and preparations that precede any write.
    fn begin_write(&self) -> io::Result<()> {
        if !self.writable {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        self.check_failed()?;
        if self.autoclear.load(Ordering::Acquire) {
            let _alone = lock(&self.rounds.alone);
            if self.autoclear.load(Ordering::Acquire) {
                self.storage.write_at(&[0; 8], AT_AUTOCLEAR as u64)?;
                self.sync()?;
                self.autoclear.store(false, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Writes as much as can be done in place, and returns the number of bytes written.
    fn write_in_place(&self, from: &[u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < from.len() {
            let (at, len) = (offset + done as u64, (from.len() - done) as u64);
            let Some((place, len)) = lock(&self.meta).in_place(&*self.storage, at, len)? else { break };
            self.storage.write_at(&from[done..done + len as usize], place)?;
            done += len as usize;
        }
        Ok(done)
    }

    /// Writes data, for a caller that holds the range exclusively.
    fn write_held(&self, from: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < from.len() {
            let (rest, at) = (&from[done..], offset + done as u64);
            done += match self.next_step(at, rest.len() as u64)? {
                Step::InPlace { at, len } => {
                    self.storage.write_at(&rest[..len as usize], at)?;
                    len as usize
                }
                Step::New(run) => {
                    let written = self.write_new(rest, at, run);
                    written.inspect_err(|_| lock(&self.meta).give_back(&*self.storage, run))?
                }
                Step::GrowTable => 0,
            };
        }
        Ok(())
    }

    fn next_step(&self, offset: u64, len: u64) -> io::Result<Step> {
        let most = (NEW_LEN_MAX >> self.shape.cluster_bits).max(1);
        let mut flushed = false;
        loop {
            self.relieve()?;
            let step = lock(&self.meta).next_step(&*self.storage, offset, len, most);
            match step {
                Ok(Step::GrowTable) => self.grow_table()?,
                // Discarded clusters can be reused after a flush.
                Err(error) if error.kind() == io::ErrorKind::StorageFull && !flushed => {
                    flushed = true;
                    self.flush()?;
                }
                step => return step,
            }
        }
    }

    /// Flushes if too many changes are cached.
    fn relieve(&self) -> io::Result<()> {
        let strained = lock(&self.meta).is_strained();
        if strained { self.flush() } else { Ok(()) }
    }

    /// Fills new clusters, and publishes them. Returns how many bytes of `from` were used.
    fn write_new(&self, from: &[u8], offset: u64, run: Run) -> io::Result<usize> {
        let cluster = self.shape.cluster();
        let (start, skip) = (offset - offset % cluster, offset % cluster);
        let room = run.count * cluster;
        let len = (from.len() as u64).min(room - skip);
        let tail = room - skip - len;
        let place = run.first << self.shape.cluster_bits;
        let is_blank = run.blank || self.has_fault(SeededFault::NoFill);
        if (skip == 0 && tail == 0)
            || (is_blank && self.is_zero(start, skip)? && self.is_zero(offset + len, tail)?)
        {
            self.storage.write_at(&from[..len as usize], place + skip)?;
        } else {
            let mut bytes = vec![0; room as usize];
            let (head, rest) = bytes.split_at_mut(skip as usize);
            let (middle, end) = rest.split_at_mut(len as usize);
            self.read_held(head, start)?;
            middle.copy_from_slice(&from[..len as usize]);
            self.read_held(end, offset + len)?;
            self.storage.write_at(&bytes, place)?;
        }
        lock(&self.meta).publish(&*self.storage, offset, run)?;
        Ok(len as usize)
    }

    /// Returns whether the range is known to be all zeroes.
    fn is_zero(&self, offset: u64, len: u64) -> io::Result<bool> {
        Ok(len == 0 || self.mapping(offset, len)? == (true, len))
    }

    /// Makes a range read as zeroes. `keep`: allocated clusters stay allocated.
    ///
    /// # Errors
    /// A write failed; any part may have been written.
    pub fn write_zeroes(&self, offset: u64, len: u64, keep: bool) -> io::Result<()> {
        self.begin_write()?;
        let _held = self.hold(offset, len, true);
        let end = offset + len;
        if keep {
            return self.zero_kept(offset, end);
        }
        let cluster = self.shape.cluster();
        let (first, last) = (offset.next_multiple_of(cluster), self.whole_until(end));
        if first >= last {
            return self.zero_part(offset, end);
        }
        self.zero_part(offset, first)?;
        self.zero_whole(first, last)?;
        self.zero_part(last.min(end), end)
    }

    /// Discards the whole clusters of a range: they read as zeroes. Partial clusters keep their content.
    ///
    /// # Errors
    /// A write failed; any part may have been written.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.begin_write()?;
        let (first, last) = (offset.next_multiple_of(self.shape.cluster()), self.whole_until(offset + len));
        if first >= last {
            return Ok(());
        }
        let _held = self.hold(first, last - first, true);
        if !self.shape.has_zero_clusters() && !self.is_bare(first) {
            // Discarding would expose the backing file, and no client may rely on a discard.
            return Ok(());
        }
        self.zero_whole(first, last)
    }

    /// Returns the end of the last whole cluster before `end`; the disk's last cluster counts as whole.
    fn whole_until(&self, end: u64) -> u64 {
        let cluster = self.shape.cluster();
        if end == self.shape.size { end.next_multiple_of(cluster) } else { end - end % cluster }
    }

    /// Zeroes whole clusters.
    fn zero_whole(&self, first: u64, last: u64) -> io::Result<()> {
        let cluster = self.shape.cluster();
        assert!(first.is_multiple_of(cluster) && last.is_multiple_of(cluster), "whole clusters");
        let mut at = first;
        while at < last {
            self.relieve()?;
            if !self.shape.has_zero_clusters() && !self.is_bare(at) {
                self.write_zeroes_held(at, (at + cluster).min(self.shape.size))?;
                at += cluster;
                continue;
            }
            let bare = self.is_bare(at);
            let zeroed = lock(&self.meta).zero(&*self.storage, at, (last - at) / cluster, bare)?;
            match zeroed {
                Some(count) => at += count * cluster,
                None => self.grow_table()?,
            }
            if self.has_fault(SeededFault::FreeAtOnce) {
                lock(&self.meta).free_at_once(&*self.storage);
            }
        }
        Ok(())
    }

    /// Zeroes part of a cluster, unless it is already zero.
    fn zero_part(&self, offset: u64, end: u64) -> io::Result<()> {
        if offset < end && !self.is_zero(offset, end - offset)? {
            self.write_zeroes_held(offset, end)?;
        }
        Ok(())
    }

    /// Zeroes allocated clusters in place, and all others through their entries.
    fn zero_kept(&self, offset: u64, end: u64) -> io::Result<()> {
        let cluster = self.shape.cluster();
        let mut at = offset;
        while at < end {
            let stored = lock(&self.meta).in_place(&*self.storage, at, end - at)?;
            let next = (at - at % cluster + cluster).min(end);
            if let Some((place, len)) = stored {
                let len = len.min(ZEROES_LEN);
                self.storage.write_at(&vec![0; len as usize], place)?;
                at += len;
            } else if at.is_multiple_of(cluster) && self.whole_until(next) > at {
                self.zero_whole(at, at + cluster)?;
                at = next;
            } else {
                self.zero_part(at, next)?;
                at = next;
            }
        }
        Ok(())
    }

    fn write_zeroes_held(&self, mut offset: u64, end: u64) -> io::Result<()> {
        let zeroes = vec![0; (end - offset).min(ZEROES_LEN) as usize];
        while offset < end {
            let len = (end - offset).min(ZEROES_LEN);
            self.write_held(&zeroes[..len as usize], offset)?;
            offset += len;
        }
        Ok(())
    }
}
