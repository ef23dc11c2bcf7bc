//! Bare round trips over loopback: two threads that send and receive as many bytes as a command and its answer
//! have, and do nothing else. No target with one command in flight that sleeps between commands is much
//! faster.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Length of a PDU's header segment, in bytes.
const HEADER: usize = 48;

/// Answers until the other side closes. Returns the processor time of the thread.
fn answer(mut stream: TcpStream, request: usize, answer: usize) -> io::Result<Duration> {
    let (mut request, answer) = (vec![0; request], vec![0; answer]);
    while read_all(&mut stream, &mut request)? {
        stream.write_all(&answer)?;
    }
    let used = clock_gettime(ClockId::ThreadCPUTime);
    Ok(Duration::new(used.tv_sec as u64, used.tv_nsec as u32))
}

/// Fills a buffer; returns false if the stream ended before its first byte.
fn read_all(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<bool> {
    let first = stream.read(buffer)?;
    if first > 0 {
        stream.read_exact(&mut buffer[first..])?;
    }
    Ok(first > 0)
}

/// Exchanges commands of this many data bytes for some seconds. Returns round trips a second, and the processor
/// time of the answering thread for each in microseconds.
///
/// # Errors
/// The sockets fail.
pub(super) fn round_trips(block: u32, writes: bool, seconds: f64) -> io::Result<(f64, f64)> {
    let data = HEADER + block as usize;
    let (request, reply) = if writes { (data, HEADER) } else { (HEADER, data) };
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    let (other, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    other.set_nodelay(true)?;
    let answering = std::thread::spawn(move || answer(other, request, reply));
    let (command, mut received) = (vec![0; request], vec![0; reply]);
    let (started, mut count) = (Instant::now(), 0_u64);
    while started.elapsed().as_secs_f64() < seconds {
        stream.write_all(&command)?;
        stream.read_exact(&mut received)?;
        count += 1;
    }
    let rate = count as f64 / started.elapsed().as_secs_f64();
    drop(stream);
    let used = answering.join().map_err(|_| io::Error::other("the answering thread panicked"))??;
    Ok((rate, used.as_secs_f64() * 1e6 / count.max(1) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_are_exchanged() {
        for writes in [false, true] {
            let (rate, cpu_us) = round_trips(4096, writes, 0.05).unwrap();
            assert!(rate > 1.0 && cpu_us > 0.0, "{rate} {cpu_us}");
        }
    }
}
