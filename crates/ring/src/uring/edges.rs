//! eventfds of other processes: persistent watches (multishot polls), and signals.

use super::{Target, Uring, kind};
use crate::config::{Event, Token};
use crate::core::Core;
use io_uring::{opcode, squeue};
use queue::FileId;
use slab::Slab;

/// The value that is added to an eventfd.
static ONE: u64 = 1;

/// A watched file.
struct Watch {
    token: Token,
    file: FileId,
    target: Target,
    is_ending: bool,
}

/// All persistent watches, by number.
#[derive(Default)]
pub(super) struct Edges(Slab<Watch>);

impl Uring {
    /// Watches a file until [`watch_edges_end`](Uring::watch_edges_end). The file stays until then.
    pub(crate) fn watch_edges(&mut self, core: &mut Core, token: Token, file: FileId) {
        let (fd, fixed) = core.files.begin(file);
        let target = Target::new(fd, fixed);
        let number = self.edges.0.insert(Watch { token, file, target, is_ending: false });
        self.arm_edges(number);
    }

    fn arm_edges(&mut self, number: usize) {
        let Some(watch) = self.edges.0.get(number) else { return };
        let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
        let entry = opcode::PollAdd::new(watch.target.fd(), events).multi(true).build();
        let entry = watch.target.aim(entry).user_data(kind::EDGES | number as u64);
        self.push(entry);
    }

    pub(crate) fn watch_edges_end(&mut self, token: Token) {
        let mut watches = self.edges.0.iter_mut();
        let found = watches.find(|(_, watch)| watch.token == token && !watch.is_ending);
        if let Some((number, watch)) = found {
            watch.is_ending = true;
            self.push_cancel(kind::EDGES | number as u64);
        }
    }

    /// Handles a completion of a watch: the file is readable, or the watch has ended.
    #[inline]
    pub(super) fn edge(&mut self, core: &mut Core, number: u32, result: i32, more: bool) {
        let number = number as usize;
        let Some(watch) = self.edges.0.get(number) else { return };
        let (token, is_over) = (watch.token, !more && (watch.is_ending || result < 0 || self.draining));
        let result = if is_over { -libc::ECANCELED } else { result };
        core.events.push_back(Event::Ended { token, result: result.into() });
        if is_over {
            let watch = self.edges.0.remove(number);
            if let Some(file) = core.files.end(watch.file) {
                self.drop_file(file);
            }
        } else if !more {
            // The kernel ends such a watch when it has no room for a completion.
            self.arm_edges(number);
        }
    }

    /// Adds 1 to an eventfd. A successful write has no completion, so a file is removed only when the kernel
    /// has taken all entries.
    #[inline]
    pub(crate) fn signal(&mut self, core: &Core, file: FileId) {
        let (fd, fixed) = core.files.target(file);
        let target = Target::new(fd, fixed);
        let entry = opcode::Write::new(target.fd(), (&raw const ONE).cast(), 8).offset(u64::MAX).build();
        // An entry that would wait is given to a worker of the kernel at once.
        let flags = match core.files.may_wait(file) {
            true => squeue::Flags::SKIP_SUCCESS | squeue::Flags::ASYNC,
            false => squeue::Flags::SKIP_SUCCESS,
        };
        let flags = if fixed.is_some() { flags | squeue::Flags::FIXED_FILE } else { flags };
        self.push_uncounted(entry.flags(flags).user_data(kind::CANCEL));
    }

    /// Has the kernel take all entries, so that none refers to a file that is removed next.
    pub(super) fn submit_all(&mut self) {
        while !self.waiting.is_empty() || !self.ring.submission().is_empty() {
            if !self.ring.submit().is_ok_and(|taken| taken > 0) {
                return;
            }
            self.push_waiting();
        }
    }
}
