//! Simulated NBD servers, for the client's node: correct in their replies, random in their timing, order and
//! lifetime.
//!
//! All connections to one server share its memory. A connection is lost, falls silent or sends garbage at any
//! time; the requests that the server has then are executed or not, and none is executed later.

use backends::nbd::{Connected, ConnectionChannel, Connector, Loss, Nbd, NbdSpec, ServerTimeouts};
use block::{Bytes, Extent};
use proto::nbd::extents::{StatusQuery, put_block_status, reply_len};
use proto::nbd::{
    BlockSizes, Command, ExportId, NbdError, Request, Session, Style, TransmissionFlags, request,
};
use sim::{Peer, Rng, SimRing, SimStream};
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Channels = Mutex<Vec<Arc<ConnectionChannel<SimStream>>>>;

/// The connector of the simulated nodes.
#[derive(Default)]
struct SimConnector(Channels);

impl Connector<SimStream> for SimConnector {
    fn connect(&self, channel: Arc<ConnectionChannel<SimStream>>, _: Loss) {
        self.0.lock().unwrap().push(channel);
    }
}

/// One server, and the device over it.
pub(super) struct Remote {
    len: Bytes,
    memory: Rc<RefCell<Vec<u8>>>,
    connector: Arc<SimConnector>,
    /// Empty until it is plugged in.
    nbd: Option<Nbd<SimStream>>,
    timeouts: ServerTimeouts,
    /// A connection fails at one in this many steps.
    trouble: u64,
    woken: Arc<AtomicBool>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "remote of {}, trouble 1/{}, {:?}", self.len, self.trouble, self.timeouts)
    }
}

impl Remote {
    /// Draws a server of that size. `unreliable`: requests may fail for lack of a connection.
    pub(super) fn random(rng: &mut Rng, len: Bytes, unreliable: bool) -> Remote {
        let reconnect =
            if unreliable { Duration::from_millis(rng.below(50)) } else { Duration::from_secs(1 << 30) };
        let timeout = rng.chance(700).then(|| Duration::from_millis(rng.between(1000, 10_000)));
        let memory = Rc::new(RefCell::new(vec![0; len.0 as usize]));
        let (timeouts, trouble) =
            (ServerTimeouts { timeout, reconnect }, *rng.pick(&[50, 300, 2000, 1 << 40]));
        let woken = Arc::default();
        Remote { len, memory, connector: Arc::default(), nbd: None, timeouts, trouble, woken }
    }

    /// Returns another server of the same disk.
    pub(super) fn twin(&self, rng: &mut Rng) -> Remote {
        let mut twin = Remote::random(rng, self.len, true);
        twin.memory = self.memory.clone();
        twin
    }

    pub(super) fn plug(&mut self, rng: &mut Rng, ring: &mut SimRing) {
        let first = self.connected(rng, ring);
        let spec = NbdSpec { uri: "sim".to_owned(), timeouts: self.timeouts, read_only: false };
        self.nbd = Some(Nbd::new(spec, first, self.connector.clone()).expect("an export of whole sectors"));
    }

    pub(super) fn node(&self) -> backends::nbd::NbdNode<SimStream> {
        let woken = self.woken.clone();
        let nbd = self.nbd.as_ref().expect("it was plugged in");
        nbd.node(Arc::new(move || woken.store(true, Relaxed))).expect("it takes several connections")
    }

    /// At random, delivers requested connections. Returns whether nodes must check for them.
    pub(super) fn step(&mut self, rng: &mut Rng, ring: &mut SimRing) -> bool {
        let waiting = self.connector.0.lock().unwrap().len();
        if waiting > 0 && rng.chance(200) {
            let channel = self.connector.0.lock().unwrap().remove(0);
            if !channel.is_closed() {
                let connected = self.connected(rng, ring);
                assert!(channel.deliver(connected).is_ok(), "a node that has a connection asked for one");
            }
        }
        self.woken.swap(false, Relaxed)
    }

    fn connected(&self, rng: &mut Rng, ring: &mut SimRing) -> Connected<SimStream> {
        let style = *rng.pick(&[Style::Simple, Style::Structured, Style::Extended]);
        let session = Session {
            export: ExportId(0),
            name: "sim".to_owned(),
            size: self.len.0,
            flags: TransmissionFlags::all().difference(TransmissionFlags::READ_ONLY),
            style,
            // The client keeps this for all sessions: the first one determines it.
            block_sizes: BlockSizes { minimum: 1, preferred: 4096, maximum: 16384 },
            block_sizes_agreed: true,
            base_allocation: (style != Style::Simple && rng.chance(800)).then_some(3),
            tls: false,
        };
        let server = Server {
            session: session.clone(),
            memory: self.memory.clone(),
            rng: rng.fork(),
            input: Vec::new(),
            pending: Vec::new(),
            open: true,
            silent: false,
            trouble: self.trouble,
            timed: self.timeouts.timeout.is_some(),
        };
        Connected { stream: ring.connect(Box::new(server)), session }
    }
}

/// One connection, on the server's side.
struct Server {
    session: Session,
    memory: Rc<RefCell<Vec<u8>>>,
    rng: Rng,
    input: Vec<u8>,
    pending: Vec<(Request, Vec<u8>)>,
    open: bool,
    silent: bool,
    trouble: u64,
    /// The client has a timeout for silent servers.
    timed: bool,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server of {:?} with {} pending", self.session.style, self.pending.len())
    }
}

impl Server {
    /// Executes or drops the unanswered requests, for good.
    fn settle(&mut self) {
        self.open = false;
        for (request, payload) in std::mem::take(&mut self.pending) {
            if self.rng.chance(500) {
                self.apply(&request, &payload);
            }
        }
    }

    fn apply(&mut self, request: &Request, payload: &[u8]) {
        let mut memory = self.memory.borrow_mut();
        let range = request.offset as usize..(request.offset + request.len) as usize;
        match request.command {
            Command::Write => memory[range].copy_from_slice(payload),
            Command::WriteZeroes | Command::Trim => memory[range].fill(0),
            _ => {}
        }
    }

    fn answer(&mut self, request: &Request, payload: &[u8]) -> Vec<u8> {
        self.apply(request, payload);
        match request.command {
            Command::Read => self.read(request),
            Command::BlockStatus => self.status(request),
            _ => self.end(request, None),
        }
    }

    fn end(&self, request: &Request, error: Option<NbdError>) -> Vec<u8> {
        let mut header = [0; 64];
        let len = self.session.style.put_end(&mut header, request, error);
        header[..len].to_vec()
    }

    /// Answers a read in one chunk, or in chunks and holes in any order.
    fn read(&mut self, request: &Request) -> Vec<u8> {
        let (style, mut header) = (self.session.style, [0; 64]);
        let data = self.memory.borrow()[request.offset as usize..][..request.len as usize].to_vec();
        let cut = if style == Style::Simple { data.len() } else { self.rng.between(1, request.len) as usize };
        let mut parts: Vec<usize> = (0..data.len()).step_by(cut).collect();
        if self.rng.chance(500) {
            parts.reverse();
        }
        let mut reply = Vec::new();
        for (number, &start) in parts.iter().enumerate() {
            let part = &data[start..data.len().min(start + cut)];
            let (offset, last) = (request.offset + start as u64, number + 1 == parts.len());
            let hole = style != Style::Simple && part.iter().all(|&byte| byte == 0) && self.rng.chance(500);
            if hole {
                let len = style.put_hole(&mut header, request, offset, part.len() as u32, last);
                reply.extend_from_slice(&header[..len]);
            } else {
                let len = style.put_data_header(&mut header, request, offset, part.len() as u32, last);
                reply.extend_from_slice(&header[..len]);
                reply.extend_from_slice(part);
            }
        }
        reply
    }

    fn status(&mut self, request: &Request) -> Vec<u8> {
        let mut out = vec![0; reply_len(Style::Extended, 4)];
        let query = StatusQuery {
            offset: request.offset,
            len: request.len,
            one: false,
            context: self.session.base_allocation.unwrap_or(0),
        };
        let data = Extent { len: Bytes(self.rng.between(1, request.len)), hole: false, zero: false };
        let len = put_block_status(&mut out, &self.session, request, &query, [data]);
        out.truncate(len.expect("there is an extent"));
        out
    }

    fn go_wrong(&mut self) -> Vec<u8> {
        match self.rng.below(4) {
            0 => {
                self.settle();
                Vec::new()
            }
            1 if self.timed => {
                self.silent = true;
                Vec::new()
            }
            1 | 2 => {
                // The connection is cut within a reply.
                let mut printed = match self.pending.pop() {
                    Some((request, payload)) => self.answer(&request, &payload),
                    None => Vec::new(),
                };
                printed.truncate(self.rng.below(printed.len() as u64 + 1) as usize);
                self.settle();
                printed
            }
            _ => {
                self.silent = true;
                vec![0x5A; 64]
            }
        }
    }
}

impl Peer for Server {
    fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
        let extended = self.session.extended();
        loop {
            let Ok(Some((request, len))) = request::parse(&self.input, extended) else { return };
            let whole = len + request.payload_len as usize;
            if self.input.len() < whole {
                return;
            }
            let payload = self.input[len..whole].to_vec();
            self.input.drain(..whole);
            if request.command == Command::Disc {
                assert!(self.pending.is_empty() || self.silent, "a farewell before the answers");
                self.open = false;
                return;
            }
            assert!(request.command != Command::Read || request.len <= 16384, "more than the server takes");
            self.pending.push((request, payload));
        }
    }

    fn step(&mut self, _: &mut [u8]) -> Vec<u8> {
        if !self.open || self.silent {
            return Vec::new();
        }
        if self.rng.below(self.trouble) == 0 {
            return self.go_wrong();
        }
        if self.pending.is_empty() || self.rng.chance(300) {
            return Vec::new();
        }
        let index = self.rng.below(self.pending.len() as u64) as usize;
        let (request, payload) = self.pending.swap_remove(index);
        self.answer(&request, &payload)
    }

    fn is_open(&self) -> bool {
        self.open
    }

    fn hang_up(&mut self, _: &mut [u8]) {
        self.settle();
    }
}
