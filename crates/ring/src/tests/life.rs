//! Life cycle of a ring: selection of the engine, timers, waking, sleeping, dropping.

use super::*;
use queue::FileOp;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;

#[test]
fn the_engine_is_selected_and_reported() {
    let ring = KernelRing::new(RingConfig { engine: Choice::Epoll, ..RingConfig::default() }).unwrap();
    assert_eq!(ring.engine().name, "epoll");
    assert!(ring.engine().why.is_some());
    let auto = KernelRing::new(RingConfig::default()).unwrap();
    match KernelRing::new(RingConfig { engine: Choice::Uring, ..RingConfig::default() }) {
        Ok(ring) => assert_eq!(ring.engine().name, "io_uring"),
        Err(error) => {
            assert_eq!(auto.engine().name, "epoll");
            assert!(auto.engine().why.is_some(), "{error}");
        }
    }
}

/// Names the engine that a child process of the next test must select.
const CHILD: &str = "BLOCKYARD_RING_TEST_CHILD";

#[test]
fn the_environment_selects_the_engine_if_the_configuration_does_not() {
    if let Ok(wanted) = std::env::var(CHILD) {
        if wanted == "refused" {
            let error = KernelRing::new(RingConfig::default()).unwrap_err();
            assert!(error.to_string().contains("io_uring or epoll"), "{error}");
        } else {
            assert_eq!(KernelRing::new(RingConfig::default()).unwrap().engine().name, wanted);
        }
        return;
    }
    let run = |variable: &str, child: &str| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::life::the_environment_chooses_where_the_configuration_does_not"]);
        let output = command.env("BLOCKYARD_RING", variable).env(CHILD, child).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    };
    run("epoll", "epoll");
    run("uring", "refused");
    if KernelRing::new(RingConfig { engine: Choice::Uring, ..RingConfig::default() }).is_ok() {
        run("io_uring", "io_uring");
        run("", "io_uring");
    }
}

#[test]
fn receive_buffers_with_invalid_sizes_are_refused() {
    for (receive_buffers, receive_buffer_len) in [(0, 4096), (40_000, 4096), (8, 100)] {
        let config = RingConfig { receive_buffers, receive_buffer_len, ..RingConfig::default() };
        assert!(KernelRing::new(config).is_err());
    }
}

#[test]
fn timers_come_in_order_and_not_early() {
    on_both(RingConfig::default(), |mut ring| {
        let start = ring.read_clock();
        for (generation, ms) in [(1, 30), (2, 10), (3, 20)] {
            ring.timer(id(generation), start.after(ms * 1_000_000));
        }
        for (generation, ms) in [(2, 10), (3, 20), (1, 30)] {
            assert_eq!(io_result(&mut ring, id(generation)), 0);
            assert!(ring.read_clock().since(start) >= ms * 1_000_000);
        }
        ring.timer(id(4), start);
        assert_eq!(io_result(&mut ring, id(4)), 0);
    });
}

#[test]
fn a_cancelled_timer_completes_once() {
    on_both(RingConfig::default(), |mut ring| {
        // On a busy machine it may have expired before it was cancelled: then it also completes only once.
        let is_cancelled = (0..100).any(|_| {
            let at = later(&mut ring, 5);
            ring.timer(id(1), at);
            ring.cancel(id(1));
            ring.cancel(id(1));
            let result = io_result(&mut ring, id(1));
            assert!([0, -i64::from(libc::ECANCELED)].contains(&result), "{result}");
            assert_eq!(within(&mut ring, Duration::from_millis(15)), None);
            result != 0
        });
        assert!(is_cancelled);
    });
}

#[test]
fn waking_from_another_thread_is_one_event() {
    on_both(RingConfig::default(), |mut ring| {
        for _ in 0..3 {
            let waker = ring.waker();
            let thread = thread::spawn(move || {
                thread::sleep(Duration::from_millis(5));
                (0..1000).for_each(|_| waker.wake());
            });
            thread.join().unwrap();
            assert_eq!(next(&mut ring), Event::Woken);
            assert_eq!(within(&mut ring, Duration::from_millis(5)), None);
        }
        let waker = ring.waker();
        let sleeper = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            waker.wake();
        });
        assert_eq!(next(&mut ring), Event::Woken);
        sleeper.join().unwrap();
    });
}

#[test]
fn no_wake_is_lost_between_two_threads() {
    on_both(RingConfig::default(), |mut ring| {
        use std::sync::atomic::{AtomicU32, Ordering};
        let (waker, calls) = (ring.waker(), Arc::new(AtomicU32::new(0)));
        let count = calls.clone();
        let thread = thread::spawn(move || {
            for n in 1..=5000 {
                count.store(n, Ordering::Release);
                waker.wake();
            }
        });
        while calls.load(Ordering::Acquire) < 5000 {
            assert_eq!(next(&mut ring), Event::Woken);
        }
        thread.join().unwrap();
    });
}

#[test]
fn a_waker_outlives_its_ring() {
    on_both(RingConfig::default(), |ring| {
        let waker = ring.waker();
        drop(ring);
        waker.wake();
    });
}

#[test]
fn an_idle_ring_uses_no_cpu() {
    for poll_us in [None, Some(50)] {
        on_both(RingConfig { poll_us, ..RingConfig::default() }, |mut ring| {
            let (socket, mut peer) = pair(&mut ring, 1);
            ring.receive(socket);
            peer.write_all(b"warm").unwrap();
            let Event::Received { chunk, .. } = next(&mut ring) else { panic!("expected bytes") };
            ring.give_back(chunk);
            // The kernel may charge other work of the machine to the thread that was running.
            let mut least = Duration::MAX;
            for _ in 0..20 {
                let before = cpu();
                assert_eq!(within(&mut ring, Duration::from_millis(200)), None);
                least = least.min(cpu() - before);
                if least < Duration::from_millis(5) {
                    break;
                }
            }
            assert!(least < Duration::from_millis(5), "{least:?} on {}", ring.engine().name);
        });
    }
}

#[test]
fn a_polling_ring_behaves_alike() {
    on_both(RingConfig { poll_us: Some(200), ..RingConfig::default() }, |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 1);
        ring.receive(socket);
        let thread = thread::spawn(move || {
            for _ in 0..200 {
                peer.write_all(&[1; 16]).unwrap();
                std::io::Read::read_exact(&mut peer, &mut [0; 16]).unwrap();
            }
        });
        let answer = filled(&mut ring, 16, pattern);
        let mut answers = 0;
        while answers < 200 {
            match next(&mut ring) {
                Event::Received { chunk, .. } => {
                    ring.give_back(chunk);
                    ring.send(socket, &[answer]);
                }
                Event::Sent { result: 16, .. } => answers += 1,
                other => panic!("{other:?}"),
            }
        }
        thread.join().unwrap();
        assert!(matches!(next(&mut ring), Event::ReceiveEnded { end: ReceiveEnd::Eof, .. }));
        let at = later(&mut ring, 3);
        ring.timer(id(1), at);
        assert_eq!(io_result(&mut ring, id(1)), 0);
    });
}

#[test]
fn a_ring_is_dropped_with_everything_in_flight() {
    on_both(RingConfig::default(), |mut ring| {
        let mut peers = Vec::new();
        for owner in 0..4 {
            let (socket, mut peer) = pair(&mut ring, owner);
            peer.write_all(&[3; 100_000]).unwrap();
            if owner % 2 == 0 {
                ring.receive(socket);
            } else {
                let target = ring.allocate(1 << 20).unwrap();
                ring.receive_into(socket, target);
            }
            let big = ring.allocate(8 << 20).unwrap();
            ring.send(socket, &[big, big]);
            peers.push(peer);
        }
        let (reader, writer) = std::io::pipe().unwrap();
        let file = ring.add_file(Arc::new(reader.into())).unwrap();
        let data = ring.allocate(4096).unwrap();
        ring.start(id(1), file, FileOp::Read { offset: u64::MAX }, &[data]).unwrap();
        let at = later(&mut ring, 1_000_000);
        ring.timer(id(2), at);
        ring.turn(Wait::No).unwrap();
        ring.waker().wake();
        let start = Instant::now();
        drop(ring);
        // Well under the ten seconds that it would wait for operations that do not complete.
        assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
        drop(writer);
    });
}

#[test]
fn descriptors_are_released() {
    on_both(RingConfig::default(), |mut ring| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let number = ours.as_raw_fd();
        let socket = ring.add_socket(ours.into(), 1).unwrap();
        ring.receive(socket);
        ring.close(socket);
        while !matches!(next(&mut ring), Event::Closed { .. }) {}
        // The peer sees the end of the stream, so the kernel holds no reference either.
        let mut byte = [0];
        assert_eq!(std::io::Read::read(&mut &theirs, &mut byte).unwrap(), 0, "descriptor {number}");
    });
}

#[test]
fn large_free_blocks_are_returned_to_the_system_once_the_ring_is_idle() {
    on_both(RingConfig::default(), |mut ring| {
        let (large, small) = (filled(&mut ring, 1 << 20, |_| 7), filled(&mut ring, 4096, |_| 7));
        let kept = filled(&mut ring, 1 << 20, |_| 7);
        let start = Instant::now();
        ring.free(large);
        assert_eq!(within(&mut ring, Duration::from_millis(20)), None);
        let (pause, byte) = (start.elapsed(), ring.bytes(large)[0]);
        assert!(byte == 7 || pause >= Duration::from_millis(100), "a pause of {pause:?} is not idleness");
        assert_eq!(within(&mut ring, Duration::from_millis(300)), None);
        assert!(ring.bytes(large).iter().all(|byte| *byte == 0), "given back, pages come again as zeroes");
        assert!(ring.bytes(small).iter().chain(ring.bytes(kept)).all(|byte| *byte == 7));
    });
}
