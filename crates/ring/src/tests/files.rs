//! Files: asynchronous and inline operations, and the removal of files.

use super::*;
use queue::{Blocking, FileId, FileOp};
use std::ptr::NonNull;
use std::sync::Arc;

/// An unnamed file in `TMPDIR`.
fn file() -> Arc<OwnedFd> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::OpenOptions::new();
    let made = options.read(true).write(true).custom_flags(libc::O_TMPFILE).open(std::env::temp_dir());
    Arc::new(made.unwrap().into())
}

#[track_caller]
fn run(ring: &mut KernelRing, file: FileId, op: FileOp, data: &[Segment]) -> i64 {
    ring.start(id(1), file, op, data).unwrap();
    io_result(ring, id(1))
}

#[test]
fn written_data_is_read_back_with_one_segment_or_many() {
    on_both(RingConfig::default(), |mut ring| {
        for registered in [false, true] {
            if registered && ring.register_memory().is_err() {
                eprintln!("skipped: no memory may be registered here");
                continue;
            }
            let file = ring.add_file(file()).unwrap();
            let whole = filled(&mut ring, 20_000, pattern);
            assert_eq!(
                run(&mut ring, file, FileOp::Write { offset: 4096, durable: false }, &[whole]),
                20_000
            );
            let parts: Vec<_> = (0..5).map(|_| filled(&mut ring, 4000, |_| 0)).collect();
            assert_eq!(run(&mut ring, file, FileOp::Read { offset: 4096 }, &parts), 20_000);
            let got: Vec<u8> = parts.iter().flat_map(|part| ring.bytes(*part).to_vec()).collect();
            assert!(got == ring.bytes(whole));

            assert_eq!(run(&mut ring, file, FileOp::Write { offset: 0, durable: true }, &parts), 20_000);
            let back = filled(&mut ring, 20_000, |_| 0);
            assert_eq!(run(&mut ring, file, FileOp::Read { offset: 0 }, &[back]), 20_000);
            assert!(ring.bytes(back) == ring.bytes(whole));
            assert_eq!(run(&mut ring, file, FileOp::Sync, &[]), 0);
            ring.remove_file(file);
        }
    });
}

#[test]
fn a_read_ends_short_at_the_end_of_the_file() {
    on_both(RingConfig::default(), |mut ring| {
        let file = ring.add_file(file()).unwrap();
        let data = filled(&mut ring, 1000, pattern);
        assert_eq!(run(&mut ring, file, FileOp::Write { offset: 0, durable: false }, &[data]), 1000);
        let room = ring.allocate(4096).unwrap();
        for (offset, expected) in [(0, 1000), (900, 100), (1000, 0), (1 << 40, 0)] {
            assert_eq!(run(&mut ring, file, FileOp::Read { offset }, &[room]), expected);
            let now = ring.try_now(file, FileOp::Read { offset }, &[room], Blocking::Allowed);
            assert_eq!(now, Some(expected));
        }
    });
}

#[test]
fn ranges_are_allocated_punched_sought_and_prefetched() {
    on_both(RingConfig::default(), |mut ring| {
        let file = ring.add_file(file()).unwrap();
        let len = 1 << 20;
        assert_eq!(run(&mut ring, file, FileOp::Allocate { mode: 0, offset: 0, len }, &[]), 0);
        let data = filled(&mut ring, len as u32, |_| 1);
        let write = FileOp::Write { offset: 0, durable: false };
        assert_eq!(ring.try_now(file, write, &[data], Blocking::Allowed), Some(len as i64));
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let punch = FileOp::Allocate { mode, offset: 65536, len: 65536 };
        assert_eq!(run(&mut ring, file, punch, &[]), 0);
        let mut seek =
            |offset, hole| ring.try_now(file, FileOp::Seek { offset, hole }, &[], Blocking::Allowed);
        assert_eq!(seek(0, true), Some(65536));
        assert_eq!(seek(65536, false), Some(131_072));
        assert_eq!(seek(len, false), Some(-i64::from(libc::ENXIO)));
        assert_eq!(run(&mut ring, file, FileOp::Prefetch { offset: 0, len }, &[]), 0);
        let bad = FileOp::Allocate { mode: 0, offset: 0, len: 0 };
        assert_eq!(run(&mut ring, file, bad, &[]), -i64::from(libc::EINVAL));
        assert_eq!(ring.try_now(file, bad, &[], Blocking::Allowed), Some(-i64::from(libc::EINVAL)));
        assert_eq!(ring.try_now(file, FileOp::Sync, &[], Blocking::Never), None);
    });
}

#[test]
fn inline_without_blocking_completes_or_is_refused() {
    on_both(RingConfig::default(), |mut ring| {
        let file = ring.add_file(file()).unwrap();
        let data = filled(&mut ring, 8192, pattern);
        let write = FileOp::Write { offset: 0, durable: false };
        assert_eq!(ring.try_now(file, write, &[data], Blocking::Allowed), Some(8192));
        let parts = [filled(&mut ring, 4096, |_| 0), filled(&mut ring, 4096, |_| 0)];
        for _ in 0..2 {
            match ring.try_now(file, FileOp::Read { offset: 0 }, &parts, Blocking::Never) {
                Some(result) => {
                    assert_eq!(result, 8192);
                    assert!(ring.bytes(parts[1]) == ring.bytes(data.slice(4096, 4096)));
                }
                None => eprintln!("this file system cannot tell whether a read would wait"),
            }
        }
        assert!(matches!(ring.try_now(file, write, &parts, Blocking::Never), None | Some(8192)));
    });
}

#[test]
fn an_error_is_a_negative_errno() {
    on_both(RingConfig::default(), |mut ring| {
        let read_only = std::fs::File::open("/proc/self/exe").unwrap();
        let file = ring.add_file(Arc::new(read_only.into())).unwrap();
        let data = ring.allocate(512).unwrap();
        let write = FileOp::Write { offset: 0, durable: false };
        assert_eq!(run(&mut ring, file, write, &[data]), -i64::from(libc::EBADF));
        assert_eq!(ring.try_now(file, write, &[data], Blocking::Allowed), Some(-i64::from(libc::EBADF)));
        assert_eq!(
            run(&mut ring, file, FileOp::Seek { offset: 0, hole: true }, &[]),
            -i64::from(libc::EINVAL)
        );
    });
}

#[test]
fn hundreds_of_operations_complete_once_each() {
    on_both(RingConfig { entries: 16, ..RingConfig::default() }, |mut ring| {
        let file = ring.add_file(file()).unwrap();
        let pieces: Vec<_> = (0..600u32).map(|n| filled(&mut ring, 512, |_| n as u8)).collect();
        for (n, piece) in pieces.iter().enumerate() {
            let op = FileOp::Write { offset: n as u64 * 512, durable: false };
            ring.start(id(n as u32), file, op, &[*piece]).unwrap();
        }
        let mut seen = vec![0; 600];
        for _ in 0..600 {
            let Event::Io { cookie, result: 512, .. } = next(&mut ring) else { panic!("a write") };
            seen[cookie.generation as usize] += 1;
        }
        assert!(seen.iter().all(|count| *count == 1));
        let room = ring.allocate(512).unwrap();
        assert_eq!(run(&mut ring, file, FileOp::Read { offset: 300 * 512 }, &[room]), 512);
        assert_eq!(ring.bytes(room), [300u32 as u8; 512]);
    });
}

#[test]
fn a_removed_file_completes_its_operations_and_its_number_is_reused() {
    on_both(RingConfig::default(), |mut ring| {
        let fd = file();
        let weak = Arc::downgrade(&fd);
        let number = ring.add_file(fd).unwrap();
        let data = filled(&mut ring, 4096, pattern);
        ring.start(id(9), number, FileOp::Write { offset: 0, durable: false }, &[data]).unwrap();
        ring.remove_file(number);
        assert!(weak.upgrade().is_some());
        assert_eq!(io_result(&mut ring, id(9)), 4096);
        assert!(weak.upgrade().is_none());
        assert_eq!(ring.add_file(file()).unwrap(), number);
    });
}

#[test]
fn queued_operations_are_cancelled_and_running_ones_complete() {
    on_both(RingConfig::default(), |mut ring| {
        // An empty pipe stands for a disk that does not answer. Four reads occupy all I/O threads of the
        // epoll engine; two segments make them `preadv2`, which takes offset -1 for the pipe's own position.
        let (reader, writer) = std::io::pipe().unwrap();
        let file = ring.add_file(Arc::new(reader.into())).unwrap();
        let data = [ring.allocate(512).unwrap(), ring.allocate(512).unwrap()];
        for generation in 1..=5 {
            ring.start(id(generation), file, FileOp::Read { offset: u64::MAX }, &data).unwrap();
        }
        assert_eq!(within(&mut ring, Duration::from_millis(30)), None);
        ring.cancel(id(5));
        ring.cancel(id(6));
        assert_eq!(io_result(&mut ring, id(5)), -i64::from(libc::ECANCELED));
        drop(writer);
        let mut ended: Vec<_> = (0..4)
            .map(|_| match next(&mut ring) {
                Event::Io { cookie, result: 0, .. } => cookie.generation,
                other => panic!("{other:?}"),
            })
            .collect();
        ended.sort_unstable();
        assert_eq!(ended, [1, 2, 3, 4]);
        assert_eq!(within(&mut ring, Duration::from_millis(5)), None);
    });
}

/// Makes the ring batch the inline operations of the next turn. Returns `false` without Linux AIO.
fn begin_batch(ring: &mut KernelRing, file: FileId, data: Segment) -> bool {
    let read = FileOp::Read { offset: 0 };
    let ask = |ring: &mut KernelRing| ring.try_batched(id(0), file, read, &[data], Blocking::Allowed);
    assert!((0..4).all(|_| !ask(ring)), "of a first turn, nothing is known");
    ring.turn(Wait::No).unwrap();
    if !ask(ring) {
        eprintln!("skipped: no Linux AIO here");
        return false;
    }
    assert!(io_result(ring, id(0)) >= 0);
    ring.turn(Wait::No).unwrap();
    assert!((0..4).all(|_| !ask(ring)), "the last turn had one operation");
    ring.turn(Wait::No).unwrap();
    true
}

#[test]
fn inline_operations_of_busy_turns_are_batched_and_complete_once_each() {
    on_both(RingConfig::default(), |mut ring| {
        let file = ring.add_file(file()).unwrap();
        let data = filled(&mut ring, 512, pattern);
        if !begin_batch(&mut ring, file, data) {
            return;
        }
        // More than fit one batch: the first are performed before the turn.
        let pieces: Vec<_> = (0..150u32).map(|n| filled(&mut ring, 512, |_| n as u8)).collect();
        for (n, piece) in pieces.iter().enumerate() {
            let op = FileOp::Write { offset: n as u64 * 512, durable: false };
            assert!(ring.try_batched(id(n as u32), file, op, &[*piece], Blocking::Allowed), "{n}");
        }
        let mut seen = vec![0; 150];
        for _ in 0..150 {
            let Event::Io { cookie, result: 512, .. } = next(&mut ring) else { panic!("a write") };
            seen[cookie.generation as usize] += 1;
        }
        assert!(seen.iter().all(|count| *count == 1));
        let back = ring.allocate(512 * 150).unwrap();
        assert_eq!(run(&mut ring, file, FileOp::Read { offset: 0 }, &[back]), 512 * 150);
        assert!(ring.bytes(back).chunks(512).enumerate().all(|(n, block)| block == [n as u8; 512]));
        // Neither large operations nor those of several segments are batched.
        let large = ring.allocate(32 << 10).unwrap();
        let read = FileOp::Read { offset: 0 };
        assert!(!ring.try_batched(id(1), file, read, &[large], Blocking::Allowed));
        assert!(!ring.try_batched(id(1), file, read, &pieces[..2], Blocking::Allowed));
    });
}

#[test]
fn a_batched_operation_outlives_its_file_and_its_cancellation() {
    on_both(RingConfig::default(), |mut ring| {
        let fd = file();
        let weak = Arc::downgrade(&fd);
        let number = ring.add_file(fd).unwrap();
        let data = filled(&mut ring, 4096, pattern);
        if !begin_batch(&mut ring, number, data) {
            return;
        }
        let op = FileOp::Write { offset: 0, durable: false };
        assert!(ring.try_batched(id(1), number, op, &[data], Blocking::Allowed));
        ring.cancel(id(1));
        ring.remove_file(number);
        assert!(weak.upgrade().is_some());
        assert_eq!(io_result(&mut ring, id(1)), 4096);
        assert!(weak.upgrade().is_none());
    });
}

#[test]
fn an_operation_that_the_kernel_refuses_to_batch_is_left_to_the_caller() {
    on_both(RingConfig::default(), |mut ring| {
        let file = ring.add_file(file()).unwrap();
        let data = filled(&mut ring, 512, pattern);
        if !begin_batch(&mut ring, file, data) {
            return;
        }
        // A file that is open for reading cannot be written.
        let reader = ring.add_file(Arc::new(std::fs::File::open("/proc/self/exe").unwrap().into())).unwrap();
        let write = FileOp::Write { offset: 0, durable: false };
        assert!(ring.try_batched(id(5), reader, write, &[data], Blocking::Allowed));
        assert_eq!(io_result(&mut ring, id(5)), -i64::from(libc::EAGAIN));
        assert_eq!(run(&mut ring, reader, write, &[data]), -i64::from(libc::EBADF));
    });
}

struct Pages {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address; the tests do not share it.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[test]
fn borrowed_memory_is_written_sent_and_released() {
    use std::io::Read;
    on_both(RingConfig::default(), |mut ring| {
        let len = 8192;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        let pages = Arc::new(Pages { base: NonNull::new(base.cast()).unwrap(), len });
        // SAFETY: two pages of our own.
        unsafe { pages.base.as_ptr().write_bytes(42, len) };
        let weak = Arc::downgrade(&pages);
        // SAFETY: the pages live as long as `pages`, and nobody accesses them.
        let foreign = unsafe { ForeignMemory::new(pages.base, len, pages) };
        let region = ring.add_foreign(foreign);
        let segment = Segment { offset: 4096, len: 4096, region };

        let file = ring.add_file(file()).unwrap();
        assert_eq!(run(&mut ring, file, FileOp::Write { offset: 0, durable: false }, &[segment]), 4096);
        let own = ring.allocate(4096).unwrap();
        assert_eq!(run(&mut ring, file, FileOp::Read { offset: 0 }, &[own]), 4096);
        assert_eq!(ring.bytes(own), [42; 4096]);

        let (socket, mut peer) = pair(&mut ring, 1);
        ring.send(socket, &[segment, segment]);
        ring.remove_region(region);
        assert_eq!(next(&mut ring), Event::Sent { socket, owner: 1, result: 8192 });
        ring.turn(Wait::No).unwrap();
        assert!(weak.upgrade().is_none());
        let mut got = [0; 8192];
        peer.read_exact(&mut got).unwrap();
        assert_eq!(got, [42; 8192]);
    });
}

#[test]
fn a_front_ends_operation_completes_with_its_token() {
    on_both(RingConfig::default(), |mut ring| {
        let file = ring.add_file(file()).unwrap();
        let data = filled(&mut ring, 512, pattern);
        let token = Token { front: 3, index: 65_535, number: u32::MAX };
        ring.start_for(token, file, FileOp::Write { offset: 0, durable: false }, &[data]).unwrap();
        assert_eq!(ended(&mut ring), (token, 512));
        // The driver of a regular file has no commands.
        let token = Token { front: 0, index: 0, number: 7 };
        ring.command(token, file, 1, [0; 16]);
        assert_eq!(ended(&mut ring), (token, -i64::from(libc::EOPNOTSUPP)));
        ring.remove_file(file);
    });
}

#[test]
fn a_watched_file_reports_once_that_it_is_readable() {
    on_both(RingConfig::default(), |mut ring| {
        let (reader, writer) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let reader = Arc::new(reader);
        let file = ring.add_file(reader.clone()).unwrap();
        let token = Token { front: 3, index: 1, number: 2 };
        ring.watch(token, file);
        ring.watch_end(token);
        assert_eq!(ended(&mut ring), (token, -i64::from(libc::ECANCELED)));
        for _ in 0..2 {
            ring.watch(token, file);
            ring.turn(Wait::No).unwrap();
            assert_eq!(ring.next_event(), None);
            rustix::io::write(&writer, b"x").unwrap();
            let (ready, readiness) = ended(&mut ring);
            assert_eq!((ready, readiness & i64::from(libc::EPOLLIN)), (token, i64::from(libc::EPOLLIN)));
            let mut byte = [0; 8];
            assert_eq!(rustix::io::read(&*reader, &mut byte).unwrap(), 1);
        }
        ring.remove_file(file);
    });
}

#[track_caller]
fn ended(ring: &mut KernelRing) -> (Token, i64) {
    match next(ring) {
        Event::Ended { token, result } => (token, result),
        other => panic!("{other:?}"),
    }
}

/// An eventfd, and whether writes to it wait.
fn eventfd(flags: libc::c_int) -> Arc<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: takes no pointers; the descriptor is new.
    Arc::new(unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC | flags)) })
}

/// The count of an eventfd, which is reset; 0 if it was not signalled.
fn count(fd: &OwnedFd) -> u64 {
    use std::os::fd::AsRawFd;
    crate::sys::set_nonblocking(fd.as_raw_fd(), true).unwrap();
    let mut count = [0; 8];
    // SAFETY: eight writable bytes.
    unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), 8) };
    u64::from_ne_bytes(count)
}

#[test]
fn each_signal_of_a_watched_eventfd_is_reported_until_the_watch_ends() {
    use std::os::fd::AsRawFd;
    on_both(RingConfig::default(), |mut ring| {
        let kick = eventfd(libc::EFD_NONBLOCK);
        crate::sys::eventfd_write(kick.as_raw_fd());
        let file = ring.add_file(kick.clone()).unwrap();
        let token = Token { front: 4, index: 3, number: 77 };
        ring.watch_edges(token, file);
        // Signalled before it was watched, and then without anybody reading the count.
        for _ in 0..5 {
            let Event::Ended { token: got, result } = next(&mut ring) else { panic!("no such event") };
            assert!(got == token && result > 0);
            assert_eq!(within(&mut ring, Duration::from_millis(20)), None);
            crate::sys::eventfd_write(kick.as_raw_fd());
        }
        ring.watch_edges_end(token);
        ring.remove_file(file);
        loop {
            match next(&mut ring) {
                Event::Ended { result, .. } if result == -i64::from(libc::ECANCELED) => break,
                Event::Ended { result, .. } => assert!(result > 0),
                other => panic!("{other:?}"),
            }
        }
        crate::sys::eventfd_write(kick.as_raw_fd());
        assert_eq!(within(&mut ring, Duration::from_millis(20)), None);
        assert_eq!(Arc::strong_count(&kick), 1, "the file was closed");
    });
}

#[test]
fn a_signal_reaches_an_eventfd_and_one_that_overflows_stalls_nobody() {
    on_both(RingConfig::default(), |mut ring| {
        for flags in [libc::EFD_NONBLOCK, 0] {
            let call = eventfd(flags);
            let file = ring.add_event_file(call.clone()).unwrap();
            ring.signal(file);
            let deadline = Instant::now() + Duration::from_secs(60);
            while count(&call) == 0 {
                assert!(Instant::now() < deadline, "the signal never came");
                ring.turn(Wait::No).unwrap();
            }
            ring.remove_file(file);
        }
        let call = eventfd(0);
        let full = u64::MAX - 1;
        // SAFETY: eight readable bytes.
        unsafe { libc::write(std::os::fd::AsRawFd::as_raw_fd(&*call), (&raw const full).cast(), 8) };
        let file = ring.add_event_file(call.clone()).unwrap();
        ring.signal(file);
        ring.turn(Wait::No).unwrap();
        ring.remove_file(file);
        assert_eq!(count(&call), full, "its owner reads it at last");
    });
}
