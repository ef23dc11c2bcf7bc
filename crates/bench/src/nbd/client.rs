//! The lean client: measures a server with a client that costs almost nothing.
//!
//! Each connection has a blocking socket and a thread. The thread sends all requests of its window in one
//! vectored write (at most `BATCH_MAX`), then receives once into a buffer of 256 KiB, and refills the
//! window with as many requests as were answered. Payloads of reads stay in that buffer, payloads of writes
//! come from one constant block, so the client touches each byte once. It uses fixed newstyle with simple
//! replies.
//!
//! It checks everything in the answers except the data: an unknown cookie, an error or a closed connection
//! ends the run.

use std::io::{self, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Most requests in one send.
const BATCH_MAX: usize = 32;
/// Most bytes of one receive.
const RECEIVE_BYTES: usize = 256 << 10;
/// A server that sends nothing for this time counts as hanging.
const SILENCE: Duration = Duration::from_secs(20);

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const INFO_EXPORT: u16 = 0;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_BYTES: usize = 16;
const REQUEST_BYTES: usize = 28;

/// The access pattern of a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pattern {
    /// Half reads and half writes at random offsets.
    RandomMixed,
    /// Reads at random offsets.
    RandomReads,
    /// Reads one after the other.
    Reads,
    /// Writes one after the other.
    Writes,
}

/// One connection's load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// The access pattern.
    pub(crate) pattern: Pattern,
    /// Bytes of each request.
    pub(crate) block: u32,
    /// Requests in flight.
    pub(crate) depth: usize,
    /// Seed of offsets and directions.
    pub(crate) seed: u64,
}

/// A counter on its own cache line, so that the clients do not slow each other down.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Count(pub(crate) AtomicU64);

/// A connection in the transmission phase.
pub(crate) struct Connection {
    stream: UnixStream,
    /// The export's length in bytes.
    pub(crate) size: u64,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Connection {
    /// Connects to `socket` and enters transmission on the export called `name`.
    pub(crate) fn open(socket: &Path, name: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
            return Err(broken("the server does not greet as a newstyle NBD server"));
        }
        // Fixed newstyle; no zeroes if the server offers that too.
        stream.write_all(&u32::from(u16::from_be_bytes([greeting[16], greeting[17]]) & 3).to_be_bytes())?;
        let mut option = OPTION_MAGIC.to_be_bytes().to_vec();
        option.extend(OPTION_GO.to_be_bytes());
        option.extend((name.len() as u32 + 6).to_be_bytes());
        option.extend((name.len() as u32).to_be_bytes());
        option.extend(name.as_bytes());
        option.extend(0u16.to_be_bytes());
        stream.write_all(&option)?;
        let mut size = None;
        loop {
            let (kind, data) = read_option_reply(&mut stream)?;
            match kind {
                REPLY_ACK => break,
                REPLY_INFO if data.len() >= 12 && data[..2] == INFO_EXPORT.to_be_bytes() => {
                    size = data[2..10].try_into().ok().map(u64::from_be_bytes);
                }
                REPLY_INFO => {}
                _ => return Err(broken(&format!("the server refuses the export '{name}': reply {kind:#x}"))),
            }
        }
        let size = size.ok_or_else(|| broken("the server does not say how long the export is"))?;
        Ok(Self { stream, size })
    }

    /// Sends `count` reads of `block` bytes and does not receive the answers.
    pub(crate) fn send_reads(&mut self, count: u64, block: u32) -> io::Result<()> {
        let mut requests = Vec::new();
        for cookie in 0..count {
            let offset = cookie * u64::from(block) % (self.size - u64::from(block));
            requests.extend(request(true, cookie, offset, block));
        }
        self.stream.write_all(&requests)
    }

    /// Reads `block` bytes at 0 and waits for them: one request alone.
    pub(crate) fn read_once(&mut self, block: u32) -> io::Result<()> {
        self.stream.write_all(&request(true, 0, 0, block))?;
        let mut answer = vec![0; REPLY_BYTES + block as usize];
        self.stream.read_exact(&mut answer)?;
        if answer[..8] == u64::from(REPLY_MAGIC).wrapping_shl(32).to_be_bytes() {
            Ok(())
        } else {
            Err(broken("a read failed"))
        }
    }

    /// Loads the server until `stop`, adding each completed request to `finished`.
    pub(crate) fn run(mut self, load: Load, stop: &AtomicBool, finished: &AtomicU64) -> io::Result<()> {
        let mut window = Window::new(load, self.size);
        let mut answers = Answers::new();
        while !stop.load(Ordering::Relaxed) || window.in_flight() > 0 {
            while !stop.load(Ordering::Relaxed) && !window.free.is_empty() {
                window.send(&mut self.stream)?;
            }
            let before = window.free.len();
            answers.receive(&mut self.stream, &mut window)?;
            finished.fetch_add((window.free.len() - before) as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn read_option_reply(stream: &mut UnixStream) -> io::Result<(u32, Vec<u8>)> {
    let mut header = [0; 20];
    stream.read_exact(&mut header)?;
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if header[..8] != OPTION_REPLY_MAGIC.to_be_bytes() || word(16) > 1 << 16 {
        return Err(broken("a bad option reply"));
    }
    let mut data = vec![0; word(16) as usize];
    stream.read_exact(&mut data)?;
    Ok((word(12), data))
}

fn request(is_read: bool, cookie: u64, offset: u64, length: u32) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[6..8].copy_from_slice(&u16::from(!is_read).to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// The requests of one connection: slots by cookie, of which `free` are not in flight.
struct Window {
    load: Load,
    blocks: u64,
    position: u64,
    random: fastrand::Rng,
    payload: Vec<u8>,
    is_read: Vec<bool>,
    is_free: Vec<bool>,
    free: Vec<usize>,
}

impl Window {
    fn new(load: Load, size: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(load.seed);
        let blocks = (size / u64::from(load.block)).max(1);
        Self {
            load,
            blocks,
            // Connections with sequential access begin at different places.
            position: random.u64(..) % blocks,
            payload: (0..load.block).map(|_| random.u64(..) as u8).collect(),
            random,
            is_read: vec![false; load.depth],
            is_free: vec![true; load.depth],
            free: (0..load.depth).collect(),
        }
    }

    fn in_flight(&self) -> usize {
        self.load.depth - self.free.len()
    }

    fn next(&mut self) -> (bool, u64) {
        let (is_read, block) = match self.load.pattern {
            Pattern::RandomMixed => {
                let bits = self.random.u64(..);
                (bits & 1 == 0, (bits >> 1) % self.blocks)
            }
            Pattern::RandomReads => (true, self.random.u64(..) % self.blocks),
            pattern => {
                self.position = (self.position + 1) % self.blocks;
                (pattern == Pattern::Reads, self.position)
            }
        };
        (is_read, block * u64::from(self.load.block))
    }

    /// Sends free requests, up to one batch.
    fn send(&mut self, stream: &mut UnixStream) -> io::Result<()> {
        let mut headers = [[0; REQUEST_BYTES]; BATCH_MAX];
        let mut with_payload = [false; BATCH_MAX];
        let mut count = 0;
        while count < BATCH_MAX
            && let Some(slot) = self.free.pop()
        {
            let (is_read, offset) = self.next();
            self.is_read[slot] = is_read;
            self.is_free[slot] = false;
            headers[count] = request(is_read, slot as u64, offset, self.load.block);
            with_payload[count] = !is_read;
            count += 1;
        }
        let mut vectors = [IoSlice::new(&[]); 2 * BATCH_MAX];
        let mut used = 0;
        for (header, with_payload) in headers.iter().zip(with_payload).take(count) {
            vectors[used] = IoSlice::new(header);
            used += 1;
            if with_payload {
                vectors[used] = IoSlice::new(&self.payload);
                used += 1;
            }
        }
        let mut left = &mut vectors[..used];
        while !left.is_empty() {
            let sent = stream.write_vectored(left)?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut left, sent);
        }
        Ok(())
    }

    /// Records the answer to `cookie`; returns the number of data bytes that follow it.
    fn answered(&mut self, cookie: u64, error: u32) -> io::Result<usize> {
        if error != 0 {
            return Err(broken(&format!("the server answers with error {error}")));
        }
        let slot = usize::try_from(cookie).ok().filter(|slot| self.is_free.get(*slot) == Some(&false));
        let slot = slot.ok_or_else(|| broken("the server answers what was not asked"))?;
        self.is_free[slot] = true;
        self.free.push(slot);
        Ok(if self.is_read[slot] { self.load.block as usize } else { 0 })
    }
}

/// Received bytes that are not parsed yet.
struct Answers {
    buffer: Vec<u8>,
    /// At the start of `buffer`, less than one reply's header.
    held: usize,
    /// Remaining data bytes of a read.
    skip: usize,
}

impl Answers {
    fn new() -> Self {
        Self { buffer: vec![0; RECEIVE_BYTES], held: 0, skip: 0 }
    }

    /// Receives once and parses the answers. A read counts as answered with its header: the number in flight
    /// is the same at the start and the end of the measurement.
    fn receive(&mut self, stream: &mut UnixStream, window: &mut Window) -> io::Result<()> {
        let got = stream.read(&mut self.buffer[self.held..])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let end = self.held + got;
        let mut at = 0;
        loop {
            let skipped = self.skip.min(end - at);
            at += skipped;
            self.skip -= skipped;
            let Some(header) = self.buffer[at..end].first_chunk::<REPLY_BYTES>() else { break };
            let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = *header;
            if [m0, m1, m2, m3] != REPLY_MAGIC.to_be_bytes() {
                return Err(broken("a bad reply"));
            }
            self.skip = window.answered(u64::from_be_bytes(cookie), u32::from_be_bytes([e0, e1, e2, e3]))?;
            at += REPLY_BYTES;
        }
        self.buffer.copy_within(at..end, 0);
        self.held = end - at;
        Ok(())
    }
}
