//! Requests that librbd carries out.
//!
//! librbd keeps the pointer to a list of segments until the request has completed, so each tag has its own.
//!
//! An image has one list of completions, and usually one node. While a device is being changed, or the
//! control plane reads from it, there are two; each leaves completions of the other in that one's mailbox.
//! librbd does not list comparisons (`rbd_aio_compare_and_write`): their callback uses the mailbox, too.

use super::api::{CompletionCallback, Handle, WRITE_ZEROES_THICK};
use super::image::Image;
use queue::QueueWaker;
use rustix::event::{PollFd, PollFlags, poll};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Completions that are collected at a time.
const BATCH: usize = 64;
/// How long a node that is dropped early waits for its requests.
const ABORT_AFTER_S: i64 = 30;

/// What librbd is asked for. Offsets and lengths are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    /// Reads into the segments.
    Read { offset: u64 },
    /// Writes the segments.
    Write { offset: u64 },
    /// Deallocates whole discard units in a range.
    Discard { offset: u64, len: u64 },
    /// Clears a range; `thick`: it stays allocated.
    WriteZeroes { offset: u64, len: u64, thick: bool },
    /// Writes what is cached.
    Flush,
    /// Compares a range of `len` bytes within a stripe unit with the first half of the only segment, and writes
    /// the second half if they are equal; the result is `-EILSEQ` if they differ.
    CompareAndWrite { offset: u64, len: u64 },
}

/// A request has completed: bytes read, 0, or a negative errno.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ended {
    pub(crate) tag: u16,
    pub(crate) result: i64,
}

/// Completions of a node that another one has collected.
struct Mailbox {
    waker: QueueWaker,
    any: AtomicBool,
    list: Mutex<Vec<Ended>>,
    /// Tags of comparisons that have completed, with the addresses of their completions.
    compared: Mutex<Vec<(u16, usize)>>,
}

/// The argument of the callback of a comparison.
struct Compared {
    mailbox: Arc<Mailbox>,
    tag: u16,
}

/// Leaves a completion in the mailbox of its node, on a thread of librbd.
extern "C" fn take_compared(completion: Handle, argument: *mut c_void) {
    // SAFETY: it is the argument that `Flights::start` gave this completion, which completes once.
    let Compared { mailbox, tag } = *unsafe { Box::from_raw(argument.cast::<Compared>()) };
    mailbox.compared.lock().unwrap_or_else(PoisonError::into_inner).push((tag, completion as usize));
    mailbox.any.store(true, Ordering::Release);
    (mailbox.waker)();
}

/// The mailboxes of an image's nodes, by node.
#[derive(Default)]
pub(super) struct Mailboxes(Mutex<Vec<Option<Arc<Mailbox>>>>);

impl Mailboxes {
    fn add(&self, waker: QueueWaker) -> (usize, Arc<Mailbox>) {
        let mailbox = Arc::new(Mailbox {
            waker,
            any: AtomicBool::new(false),
            list: Mutex::default(),
            compared: Mutex::default(),
        });
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = all.iter().position(Option::is_none).unwrap_or(all.len());
        if number == all.len() {
            all.push(None);
        }
        all[number] = Some(mailbox.clone());
        (number, mailbox)
    }

    fn remove(&self, number: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[number] = None;
    }

    fn put(&self, number: usize, ended: Ended) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A node stays until its requests have completed.
        let Some(Some(mailbox)) = all.get(number) else { return };
        mailbox.list.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
        mailbox.any.store(true, Ordering::Release);
        (mailbox.waker)();
    }
}

/// The requests of one node, by tag.
pub(crate) struct Flights {
    image: Arc<Image>,
    number: usize,
    mailbox: Arc<Mailbox>,
    segments: Box<[Vec<libc::iovec>]>,
    /// Offsets of the first difference, which librbd stores while a comparison is in flight. They are not
    /// read: the range may have changed since.
    differences: Box<[AtomicU64]>,
    in_flight: u32,
}

// SAFETY: the addresses in the lists are only passed to librbd, which uses them on its own threads anyway.
unsafe impl Send for Flights {}

impl Flights {
    /// `waker` wakes the queue whose requests these are.
    pub(crate) fn new(image: Arc<Image>, waker: QueueWaker) -> Flights {
        let (number, mailbox) = image.mailboxes.add(waker);
        Flights {
            image,
            number,
            mailbox,
            segments: Box::default(),
            differences: Box::default(),
            in_flight: 0,
        }
    }

    /// Prepares for that many tags.
    pub(crate) fn attach(&mut self, tags: usize) {
        assert_eq!(self.in_flight, 0, "a node is attached before it gets requests");
        self.segments = (0..tags).map(|_| Vec::new()).collect();
        self.differences = (0..tags).map(|_| AtomicU64::new(0)).collect();
    }

    pub(crate) fn image(&self) -> &Arc<Image> {
        &self.image
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Returns the list of a tag that is not in flight, to be filled with the memory of its request, which
    /// has to stay valid until the request has completed: a queue guarantees it until its node answers `Up`.
    pub(crate) fn segments(&mut self, tag: u16) -> &mut Vec<libc::iovec> {
        &mut self.segments[usize::from(tag)]
    }

    /// Starts a request. It completes once, unless this fails.
    ///
    /// # Errors
    /// A negative errno: nothing was started.
    pub(crate) fn start(&mut self, tag: u16, command: Command) -> Result<(), i64> {
        let (functions, image) = (self.image.functions(), self.image.handle());
        let segments = &self.segments[usize::from(tag)];
        if let Command::CompareAndWrite { len, .. } = command
            && !matches!(segments[..], [one] if one.iov_len as u64 == 2 * len)
        {
            return Err(-i64::from(libc::EOPNOTSUPP));
        }
        let mut completion: Handle = null_mut();
        let compared = matches!(command, Command::CompareAndWrite { .. })
            .then(|| Box::into_raw(Box::new(Compared { mailbox: self.mailbox.clone(), tag })));
        let (argument, callback) = match compared {
            Some(compared) => (compared.cast::<c_void>(), Some(take_compared as CompletionCallback)),
            None => ((self.number << u16::BITS | usize::from(tag)) as *mut c_void, None),
        };
        // SAFETY: the argument is a number, which is never followed, or what `take_compared` expects.
        let created =
            unsafe { (functions.rbd_aio_create_completion)(argument, callback, &raw mut completion) };
        // SAFETY: after an error there is no completion that refers to it.
        let forget = || drop(compared.map(|compared| unsafe { Box::from_raw(compared) }));
        if created < 0 {
            forget();
            return Err(created.into());
        }
        let (list, count) = (segments.as_ptr(), segments.len() as c_int);
        // SAFETY: the image is open while this exists; list, memory and the offset of a difference stay until
        // the completion, see `segments` and `Drop`.
        let started = unsafe {
            match command {
                Command::Read { offset } => (functions.rbd_aio_readv)(image, list, count, offset, completion),
                Command::Write { offset } => {
                    (functions.rbd_aio_writev)(image, list, count, offset, completion)
                }
                Command::Discard { offset, len } => {
                    (functions.rbd_aio_discard)(image, offset, len, completion)
                }
                Command::WriteZeroes { offset, len, thick } => {
                    let flags = if thick { WRITE_ZEROES_THICK } else { 0 };
                    (functions.rbd_aio_write_zeroes)(image, offset, len as usize, completion, flags, 0)
                }
                Command::Flush => (functions.rbd_aio_flush)(image, completion),
                Command::CompareAndWrite { offset, len } => {
                    let (len, old) = (len as usize, (*list).iov_base.cast::<c_char>().cast_const());
                    // Within the segment, whose length was checked.
                    let new = old.add(len);
                    let difference = self.differences[usize::from(tag)].as_ptr();
                    (functions.rbd_aio_compare_and_write)(
                        image, offset, len, old, new, completion, difference, 0,
                    ) as c_int
                }
            }
        };
        if started < 0 {
            // SAFETY: nothing was started, so nobody else has it.
            unsafe { (functions.rbd_aio_release)(completion) };
            forget();
            return Err(started.into());
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Whether another node has collected completions of this one.
    pub(crate) fn has_mail(&self) -> bool {
        self.mailbox.any.load(Ordering::Acquire)
    }

    /// Calls `each` for every request that has completed.
    pub(crate) fn collect(&mut self, mut each: impl FnMut(Ended)) {
        let functions = self.image.functions();
        if self.mailbox.any.swap(false, Ordering::Acquire) {
            let list = std::mem::take(&mut *self.mailbox.list.lock().unwrap_or_else(PoisonError::into_inner));
            self.in_flight -= list.len() as u32;
            list.into_iter().for_each(&mut each);
            let compared = &self.mailbox.compared;
            let compared = std::mem::take(&mut *compared.lock().unwrap_or_else(PoisonError::into_inner));
            self.in_flight -= compared.len() as u32;
            for (tag, completion) in compared {
                let completion = completion as Handle;
                // SAFETY: it is a completion of `start`, which is released once.
                let result = unsafe {
                    let result = (functions.rbd_aio_get_return_value)(completion);
                    (functions.rbd_aio_release)(completion);
                    result as i64
                };
                each(Ended { tag, result });
            }
        }
        while self.in_flight > 0 {
            let mut completions: [Handle; BATCH] = [null_mut(); BATCH];
            // SAFETY: the image is open, and the array has room for so many.
            let count = unsafe {
                let room = completions.as_mut_ptr();
                (functions.rbd_poll_io_events)(self.image.handle(), room, BATCH as c_int)
            };
            let count = usize::try_from(count).unwrap_or(0);
            for &completion in &completions[..count] {
                // SAFETY: it is a completion of `start`, which is released once.
                let (argument, result) = unsafe {
                    let argument = (functions.rbd_aio_get_arg)(completion) as usize;
                    let result = (functions.rbd_aio_get_return_value)(completion);
                    (functions.rbd_aio_release)(completion);
                    (argument, result as i64)
                };
                let ended = Ended { tag: argument as u16, result };
                match argument >> u16::BITS {
                    number if number == self.number => {
                        self.in_flight -= 1;
                        each(ended);
                    }
                    other => self.image.mailboxes.put(other, ended),
                }
            }
            if count < BATCH {
                return;
            }
        }
    }
}

impl Drop for Flights {
    /// Waits for requests in flight, which refer to memory of the ring.
    fn drop(&mut self) {
        for _ in 0..ABORT_AFTER_S {
            self.collect(|_| {});
            if self.in_flight == 0 {
                return self.image.mailboxes.remove(self.number);
            }
            let event = self.image.event.clone();
            let second = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
            let _ = poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&second));
            let _ = rustix::io::read(&event, &mut [0; 8]);
        }
        tracing::error!(
            "the cluster left {} requests unanswered, and their memory is needed",
            self.in_flight
        );
        std::process::abort();
    }
}
