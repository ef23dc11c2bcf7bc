//! A first-in, first-out list for what one turn of a queue gathers and works off.
//!
//! It is a vector with a cursor rather than a ring buffer: it is emptied in every turn, so nothing has to
//! wrap around, and taking an item is an index and an addition.

/// Items in the order in which they were pushed.
pub(crate) struct Fifo<T> {
    items: Vec<T>,
    /// How many of `items` were taken. Back to 0 when the last one is.
    taken: usize,
}

impl<T: Copy> Fifo<T> {
    /// Returns an empty list that holds `count` items at once without allocating.
    pub(crate) fn with_capacity(count: usize) -> Fifo<T> {
        Fifo { items: Vec::with_capacity(count), taken: 0 }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.taken == self.items.len()
    }

    #[inline]
    pub(crate) fn push(&mut self, item: T) {
        if self.items.len() == self.items.capacity() {
            self.forget_taken();
        }
        self.items.push(item);
    }

    /// Takes the first item. It stays where it is until the next call.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<&T> {
        if self.is_empty() {
            self.items.clear();
            self.taken = 0;
            return None;
        }
        self.taken += 1;
        self.items.get(self.taken - 1)
    }

    /// Makes room for at least `count` items in all. The list must be empty.
    pub(crate) fn reserve(&mut self, count: usize) {
        debug_assert!(self.is_empty());
        self.items.reserve(count);
    }

    /// Makes room where the front was taken while items were added at the back.
    #[cold]
    fn forget_taken(&mut self) {
        self.items.drain(..self.taken);
        self.taken = 0;
    }

    #[cfg(test)]
    pub(crate) fn capacity(&self) -> usize {
        self.items.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_come_out_in_the_order_in_which_they_went_in() {
        let mut list = Fifo::with_capacity(2);
        list.push(1);
        list.push(2);
        assert_eq!(
            [list.next().copied(), list.next().copied(), list.next().copied()],
            [Some(1), Some(2), None]
        );
        assert!(list.is_empty());
    }

    #[test]
    fn a_list_that_is_added_to_while_it_is_taken_from_does_not_grow() {
        let mut list = Fifo::with_capacity(8);
        let room = list.capacity();
        list.push(0);
        for next in 1..1000 {
            list.push(next);
            assert_eq!(list.next(), Some(&(next - 1)));
        }
        assert_eq!((list.next().copied(), list.next().copied()), (Some(999), None));
        assert_eq!(list.capacity(), room);
    }
}
