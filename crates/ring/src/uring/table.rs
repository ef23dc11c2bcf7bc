//! The io_uring's table of registered buffers: the arena's for direct I/O, and entries for the memory of
//! drivers' requests. Created when it is first needed.

use super::setup::WideRing;
use std::io;

/// Most entries of an io_uring (`IORING_MAX_REG_BUFFERS`): 128 KiB of pointers.
const ENTRIES: u16 = 1 << 14;

/// Allocation of entries.
#[derive(Default)]
pub(super) struct Table {
    made: bool,
    /// Contiguous free ranges, first and count, sorted by first.
    free: Vec<(u16, u16)>,
}

impl Table {
    /// Takes `count` contiguous entries; returns the index of the first.
    ///
    /// # Errors
    /// The kernel has no such table (5.19), or it is full.
    pub(super) fn take(&mut self, ring: &WideRing, count: u16) -> io::Result<u16> {
        if !self.made {
            ring.submitter().register_buffers_sparse(ENTRIES.into())?;
            self.made = true;
            self.free.push((0, ENTRIES));
        }
        let fits = self.free.iter().position(|free| free.1 >= count).ok_or(io::ErrorKind::OutOfMemory)?;
        let free = &mut self.free[fits];
        let first = free.0;
        *free = (first + count, free.1 - count);
        if free.1 == 0 {
            self.free.remove(fits);
        }
        Ok(first)
    }

    /// Length of each contiguous free range, in the order in which they are used. A kernel without such a
    /// table only fails when entries are taken.
    pub(super) fn stretches(&self) -> Vec<u16> {
        if self.made { self.free.iter().map(|free| free.1).collect() } else { vec![ENTRIES] }
    }

    /// Returns entries of [`take`](Table::take), which must be empty.
    pub(super) fn give_back(&mut self, first: u16, count: u16) {
        let at = self.free.partition_point(|free| free.0 < first);
        self.free.insert(at, (first, count));
        if self.free.get(at + 1).is_some_and(|next| next.0 == first + count) {
            self.free[at].1 += self.free.remove(at + 1).1;
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == first {
            self.free[at - 1].1 += self.free.remove(at).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_entries_are_joined() {
        let mut table = Table { made: true, free: vec![(30, 10)] };
        for (first, count) in [(10, 10), (0, 10), (20, 10)] {
            table.give_back(first, count);
        }
        assert_eq!((&table.free[..], table.stretches()), (&[(0, 40)][..], vec![40]));
    }

    #[test]
    fn only_contiguous_entries_are_taken() {
        assert_eq!(Table::default().stretches(), [ENTRIES]);
        let table = Table { made: true, free: vec![(0, 3), (10, 7), (30, 5)] };
        assert_eq!(table.stretches(), [3, 7, 5]);
        assert_eq!(Table { made: true, free: Vec::new() }.stretches(), [0; 0]);
    }
}
