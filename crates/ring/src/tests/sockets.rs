//! Sockets: receiving, running out of chunks, filling, sending, closing.

use super::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

/// Receives until the stream ends or `len` bytes have arrived, giving chunks back at once.
fn collect(ring: &mut KernelRing, socket: SocketId, len: usize) -> (Vec<u8>, Option<ReceiveEnd>) {
    let mut got = Vec::new();
    while got.len() < len {
        match next(ring) {
            Event::Received { socket: of, segment, chunk, .. } => {
                assert_eq!(of, socket);
                assert!(segment.len > 0);
                got.extend_from_slice(ring.bytes(segment));
                ring.give_back(chunk);
            }
            Event::ReceiveEnded { end, .. } => return (got, Some(end)),
            other => panic!("{other:?}"),
        }
    }
    (got, None)
}

fn echo_once(ring: &mut KernelRing, socket: SocketId) {
    let Event::Received { segment, chunk, owner, .. } = next(ring) else { panic!("expected bytes") };
    assert_eq!(owner, 77);
    ring.send(socket, &[segment]);
    let len = i64::from(segment.len);
    assert_eq!(next(ring), Event::Sent { socket, owner: 77, result: len });
    ring.give_back(chunk);
}

#[test]
fn a_unix_socket_echoes() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 77);
        ring.receive(socket);
        for round in 0..100u8 {
            peer.write_all(&[round; 40]).unwrap();
            echo_once(&mut ring, socket);
            let mut answer = [0; 40];
            peer.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [round; 40]);
        }
        drop(peer);
        let end = ReceiveEnd::Eof;
        assert_eq!(next(&mut ring), Event::ReceiveEnded { socket, owner: 77, end });
    });
}

#[test]
fn a_tcp_socket_echoes_whatever_its_blocking_mode() {
    on_both(RingConfig::default(), |mut ring| {
        for nonblocking in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let ours = listener.accept().unwrap().0;
            ours.set_nonblocking(nonblocking).unwrap();
            let socket = ring.add_socket(ours.into(), 77).unwrap();
            ring.receive(socket);
            assert_eq!(within(&mut ring, Duration::from_millis(20)), None);
            peer.write_all(b"over the wire").unwrap();
            echo_once(&mut ring, socket);
            let mut answer = [0; 13];
            peer.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"over the wire");
            ring.close(socket);
            while !matches!(next(&mut ring), Event::Closed { .. }) {}
        }
    });
}

#[test]
fn many_chunks_come_in_order() {
    on_both(RingConfig { receive_buffer_len: 4096, ..RingConfig::default() }, |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 1);
        let sent: Vec<u8> = (0..3_000_000).map(pattern).collect();
        let copy = sent.clone();
        let writer = thread::spawn(move || peer.write_all(&copy).unwrap());
        ring.receive(socket);
        let (got, end) = collect(&mut ring, socket, usize::MAX);
        writer.join().unwrap();
        assert!(got == sent);
        assert_eq!(end, Some(ReceiveEnd::Eof));
    });
}

#[test]
fn receiving_pauses_without_chunks() {
    on_both(tight(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 1);
        let sent: Vec<u8> = (0..10_000).map(pattern).collect();
        peer.write_all(&sent).unwrap();
        ring.receive(socket);
        let (mut held, mut got) = (Vec::new(), Vec::new());
        while held.len() < 3 {
            let Event::Received { segment, chunk, .. } = next(&mut ring) else { panic!("expected bytes") };
            got.extend_from_slice(ring.bytes(segment));
            held.push(chunk);
        }
        assert_eq!(within(&mut ring, Duration::from_millis(30)), None);
        held.into_iter().for_each(|chunk| ring.give_back(chunk));
        let (rest, _) = collect(&mut ring, socket, sent.len() - got.len());
        got.extend(rest);
        assert!(got == sent);
    });
}

#[test]
fn one_returned_chunk_serves_any_socket_with_data() {
    on_both(RingConfig { receive_buffers: 1, ..tight() }, |mut ring| {
        let mut sockets: Vec<_> = (0..5).map(|owner| pair(&mut ring, owner)).collect();
        let mut blocker = pair(&mut ring, 99);
        ring.receive(blocker.0);
        blocker.1.write_all(b"x").unwrap();
        let Event::Received { chunk: mut held, .. } = next(&mut ring) else { panic!("expected bytes") };
        for (socket, peer) in &mut sockets {
            ring.receive(*socket);
            peer.write_all(b"hello").unwrap();
        }
        assert_eq!(within(&mut ring, Duration::from_millis(20)), None);
        let mut seen = Vec::new();
        for _ in 0..5 {
            ring.give_back(held);
            let Event::Received { owner, segment, chunk, .. } = next(&mut ring) else {
                panic!("expected bytes")
            };
            assert_eq!(ring.bytes(segment), b"hello");
            seen.push(owner);
            held = chunk;
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3, 4]);
        // Starved again, with nothing to read: it must neither spin nor miss later data.
        ring.give_back(held);
        assert_eq!(within(&mut ring, Duration::from_millis(20)), None);
        sockets[3].1.write_all(b"again").unwrap();
        assert!(matches!(next(&mut ring), Event::Received { owner: 3, .. }));
    });
}

#[test]
fn receiving_stops_and_a_segment_is_filled_instead() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 5);
        ring.receive(socket);
        peer.write_all(b"header").unwrap();
        assert_eq!(collect(&mut ring, socket, 6).0, b"header");
        ring.receive_stop(socket);
        let end = ReceiveEnd::Stopped;
        assert_eq!(next(&mut ring), Event::ReceiveEnded { socket, owner: 5, end });

        let payload: Vec<u8> = (0..1_000_000).map(pattern).collect();
        let target = ring.allocate(1_000_000).unwrap();
        ring.receive_into(socket, target);
        let (copy, mut writer) = (payload.clone(), peer.try_clone().unwrap());
        let writing = thread::spawn(move || {
            for part in copy.chunks(70_000) {
                writer.write_all(part).unwrap();
            }
        });
        assert_eq!(next(&mut ring), Event::Filled { socket, owner: 5, result: 1_000_000 });
        writing.join().unwrap();
        assert!(ring.bytes(target) == payload);

        ring.receive(socket);
        peer.write_all(b"next").unwrap();
        assert_eq!(collect(&mut ring, socket, 4).0, b"next");
    });
}

#[test]
fn chunks_received_before_the_stop_come_first() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 5);
        ring.receive(socket);
        ring.turn(Wait::No).unwrap();
        peer.write_all(b"early").unwrap();
        // The kernel may have received the bytes by now, or not: they must appear here or in the fill.
        ring.turn(Wait::No).unwrap();
        ring.receive_stop(socket);
        let (mut got, end) = collect(&mut ring, socket, usize::MAX);
        assert_eq!(end, Some(ReceiveEnd::Stopped));
        peer.write_all(b"late!").unwrap();
        let rest = ring.allocate(10 - got.len() as u32).unwrap();
        ring.receive_into(socket, rest);
        assert!(matches!(next(&mut ring), Event::Filled { result, .. } if result == i64::from(rest.len)));
        got.extend_from_slice(ring.bytes(rest));
        assert_eq!(got, b"earlylate!");
    });
}

#[test]
fn stopping_while_starved_ends_too() {
    on_both(tight(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 5);
        peer.write_all(&[7; 8000]).unwrap();
        ring.receive(socket);
        let chunks: Vec<_> = (0..3).map(|_| next(&mut ring)).collect();
        assert_eq!(within(&mut ring, Duration::from_millis(20)), None);
        ring.receive_stop(socket);
        let end = ReceiveEnd::Stopped;
        assert_eq!(next(&mut ring), Event::ReceiveEnded { socket, owner: 5, end });
        for event in chunks {
            let Event::Received { chunk, .. } = event else { panic!("{event:?}") };
            ring.give_back(chunk);
        }
        let rest = ring.allocate(8000 - 3 * 1024).unwrap();
        ring.receive_into(socket, rest);
        assert_eq!(next(&mut ring), Event::Filled { socket, owner: 5, result: i64::from(rest.len) });
    });
}

#[test]
fn a_fill_ends_short_at_the_end_of_the_stream() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 5);
        let target = ring.allocate(100).unwrap();
        ring.receive_into(socket, target);
        peer.write_all(&[9; 30]).unwrap();
        drop(peer);
        assert_eq!(next(&mut ring), Event::Filled { socket, owner: 5, result: 30 });
        assert_eq!(ring.bytes(target.slice(0, 30)), [9; 30]);
        ring.receive_into(socket, target);
        assert_eq!(next(&mut ring), Event::Filled { socket, owner: 5, result: 0 });
    });
}

#[test]
fn a_huge_send_reaches_a_slow_reader_whole() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 8);
        let pieces: Vec<_> =
            (0..1000u32).map(|n| filled(&mut ring, 1 + n * 9, |at| pattern(at + n as usize))).collect();
        let expected: Vec<u8> = pieces.iter().flat_map(|piece| ring.bytes(*piece).to_vec()).collect();
        ring.send(socket, &pieces);
        ring.turn(Wait::No).unwrap();
        let reader = thread::spawn(move || {
            let mut got = Vec::new();
            let mut part = vec![0; 30_000];
            loop {
                thread::sleep(Duration::from_micros(200));
                match peer.read(&mut part).unwrap() {
                    0 => return got,
                    count => got.extend_from_slice(&part[..count]),
                }
            }
        });
        let result = expected.len() as i64;
        assert_eq!(next(&mut ring), Event::Sent { socket, owner: 8, result });
        ring.close(socket);
        assert_eq!(next(&mut ring), Event::Closed { socket, owner: 8 });
        assert!(reader.join().unwrap() == expected);
    });
}

#[test]
fn an_empty_send_and_an_empty_fill_end_at_once() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, _peer) = pair(&mut ring, 8);
        ring.send(socket, &[]);
        assert_eq!(next(&mut ring), Event::Sent { socket, owner: 8, result: 0 });
        ring.receive_into(socket, Segment::EMPTY);
        assert_eq!(next(&mut ring), Event::Filled { socket, owner: 8, result: 0 });
    });
}

#[test]
fn sending_to_a_peer_that_left_is_an_error_and_no_signal() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, peer) = pair(&mut ring, 8);
        drop(peer);
        let segment = filled(&mut ring, 100, pattern);
        ring.send(socket, &[segment]);
        let result = -i64::from(libc::EPIPE);
        assert_eq!(next(&mut ring), Event::Sent { socket, owner: 8, result });
    });
}

#[test]
fn a_reset_is_reported_with_its_errno() {
    on_both(RingConfig::default(), |mut ring| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = ring.add_socket(listener.accept().unwrap().0.into(), 3).unwrap();
        ring.receive(socket);
        ring.turn(Wait::No).unwrap();
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        // SAFETY: the option's value lives until the call returns.
        let set = unsafe {
            let (fd, len) = (std::os::fd::AsRawFd::as_raw_fd(&peer), size_of_val(&linger) as u32);
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), len)
        };
        assert_eq!(set, 0);
        drop(peer);
        let end = ReceiveEnd::Error(libc::ECONNRESET);
        assert_eq!(next(&mut ring), Event::ReceiveEnded { socket, owner: 3, end });
        ring.close(socket);
        assert_eq!(next(&mut ring), Event::Closed { socket, owner: 3 });
    });
}

#[test]
fn closing_completes_all_operations_and_closed_comes_last() {
    on_both(RingConfig::default(), |mut ring| {
        for fill in [false, true] {
            let (socket, _peer) = pair(&mut ring, 4);
            let target = ring.allocate(4096).unwrap();
            if fill {
                ring.receive_into(socket, target);
            } else {
                ring.receive(socket);
            }
            // Nobody reads, so a send larger than the socket buffer blocks.
            let big = ring.allocate(8 << 20).unwrap();
            ring.send(socket, &[big]);
            ring.turn(Wait::No).unwrap();
            ring.close(socket);
            ring.close(socket);
            let (mut received, mut sent) = (0, 0);
            loop {
                match next(&mut ring) {
                    Event::ReceiveEnded { end, .. } if !fill => {
                        assert_eq!(end, ReceiveEnd::Stopped);
                        received += 1;
                    }
                    Event::Filled { result, .. } if fill => {
                        assert!(result <= 0, "{result}");
                        received += 1;
                    }
                    Event::Sent { result, .. } => {
                        assert!(result < 0, "{result}");
                        sent += 1;
                    }
                    Event::Closed { socket: of, owner: 4 } if of == socket => break,
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!((received, sent), (1, 1));
            assert_eq!(within(&mut ring, Duration::from_millis(5)), None);
            ring.free(big);
        }
        assert_eq!(ring.sockets(), 0);
    });
}

#[test]
fn closing_while_starved_ends_too() {
    on_both(tight(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 5);
        peer.write_all(&[7; 8000]).unwrap();
        ring.receive(socket);
        let chunks: Vec<_> = (0..3).map(|_| next(&mut ring)).collect();
        assert_eq!(within(&mut ring, Duration::from_millis(10)), None);
        ring.close(socket);
        let end = ReceiveEnd::Stopped;
        assert_eq!(next(&mut ring), Event::ReceiveEnded { socket, owner: 5, end });
        assert_eq!(next(&mut ring), Event::Closed { socket, owner: 5 });
        // Chunks outlive their socket, and the slot's next user is another socket.
        for event in chunks {
            let Event::Received { chunk, segment, .. } = event else { panic!("{event:?}") };
            assert!(ring.bytes(segment).iter().all(|byte| *byte == 7));
            ring.give_back(chunk);
        }
        let (another, _peer) = pair(&mut ring, 6);
        assert_ne!(another, socket);
    });
}

#[test]
fn the_peer_sees_the_end_after_close() {
    on_both(RingConfig::default(), |mut ring| {
        let (socket, mut peer) = pair(&mut ring, 4);
        let segment = filled(&mut ring, 5000, pattern);
        ring.send(socket, &[segment]);
        assert_eq!(next(&mut ring), Event::Sent { socket, owner: 4, result: 5000 });
        ring.close(socket);
        assert_eq!(next(&mut ring), Event::Closed { socket, owner: 4 });
        let mut got = Vec::new();
        peer.read_to_end(&mut got).unwrap();
        assert_eq!(got.len(), 5000);
    });
}

#[test]
fn many_sockets_are_served_in_one_ring() {
    on_both(RingConfig::default(), |mut ring| {
        let mut peers: Vec<_> = (0..200).map(|owner| pair(&mut ring, owner)).collect();
        for (socket, peer) in &mut peers {
            ring.receive(*socket);
            peer.write_all(&[1; 64]).unwrap();
        }
        let mut seen = [0; 200];
        for _ in 0..200 {
            let Event::Received { socket, owner, segment, chunk } = next(&mut ring) else { panic!("bytes") };
            assert_eq!((socket, segment.len), (peers[owner as usize].0, 64));
            seen[owner as usize] += 1;
            ring.give_back(chunk);
        }
        assert_eq!(seen, [1; 200]);
    });
}
