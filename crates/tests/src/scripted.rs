//! An NBD server that a test's script controls, for answers that no correct server gives, and for observing a
//! client.
//!
//! Its handshakes are correct; then the test's script handles each request. Its memory for written data is
//! shared by all connections.

use proto::nbd::server::{Config, Found, Handshake, Step};
use proto::nbd::{Command, ExportId, ExportInfo, NbdError, Request, Session, Style, request};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The fate of a connection after a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// It continues.
    On,
    /// It is closed.
    Close,
}

/// A test's handler of requests.
pub type Script = dyn Fn(&mut Talk, &Request, &[u8]) -> io::Result<Next> + Send + Sync;

/// One connection in its transmission phase, as the script sees it.
pub struct Talk {
    /// Number of the connection, from 0 on.
    pub number: usize,
    /// The negotiated session.
    pub session: Session,
    stream: UnixStream,
    memory: Arc<Mutex<Vec<u8>>>,
    seen: Arc<Mutex<Vec<ClientEvent>>>,
}

/// An event from a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ClientEvent {
    /// A request on a connection.
    Request(usize, Request),
    /// The end of a connection without NBD_CMD_DISC.
    Gone(usize),
}

impl Talk {
    /// Sends bytes.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends the answer of a correct server.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn answer(&mut self, request: &Request, payload: &[u8]) -> io::Result<Next> {
        let style = self.session.style;
        let range = request.offset as usize..(request.offset + request.len) as usize;
        let data = match request.command {
            Command::Read => self.memory.lock().unwrap()[range].to_vec(),
            Command::Write => {
                self.memory.lock().unwrap()[range].copy_from_slice(payload);
                Vec::new()
            }
            Command::Disc => return Ok(Next::Close),
            _ => Vec::new(),
        };
        if request.command == Command::Read {
            self.data(request, request.offset, &data, true)?;
        } else {
            self.end(style, request, None)?;
        }
        Ok(Next::On)
    }

    /// Sends a chunk of data, or with simple replies all of it.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn data(&mut self, to: &Request, offset: u64, data: &[u8], done: bool) -> io::Result<()> {
        let mut header = [0; 64];
        let len = self.session.style.put_data_header(&mut header, to, offset, data.len() as u32, done);
        self.say(&[&header[..len], data].concat())
    }

    /// Sends the end of a reply.
    ///
    /// # Errors
    /// The client has disconnected.
    pub fn end(&mut self, style: Style, to: &Request, error: Option<NbdError>) -> io::Result<()> {
        let mut header = [0; 64];
        let len = style.put_end(&mut header, to, error);
        self.say(&header[..len])
    }

    fn run(&mut self, script: &Script) -> io::Result<()> {
        let extended = self.session.extended();
        loop {
            let mut header = vec![0; request::header_len(extended)];
            if let Err(gone) = self.stream.read_exact(&mut header) {
                self.seen.lock().unwrap().push(ClientEvent::Gone(self.number));
                return Err(gone);
            }
            let Ok(Some((request, _))) = request::parse(&header, extended) else {
                panic!("the client sent no request: {header:?}")
            };
            let mut payload = vec![0; request.payload_len as usize];
            self.stream.read_exact(&mut payload)?;
            self.seen.lock().unwrap().push(ClientEvent::Request(self.number, request));
            if request.command == Command::Disc || script(self, &request, &payload)? == Next::Close {
                return Ok(());
            }
        }
    }
}

/// The server.
pub struct Scripted {
    seen: Arc<Mutex<Vec<ClientEvent>>>,
    uri: String,
}

impl Scripted {
    /// Serves an export of that size and with these features on a socket, to any number of clients, until the
    /// test ends.
    ///
    /// # Panics
    /// If the socket cannot be created.
    pub fn start(
        socket: &Path,
        info: impl Fn(usize) -> ExportInfo + Send + 'static,
        config: Config,
        script: impl Fn(&mut Talk, &Request, &[u8]) -> io::Result<Next> + Send + Sync + 'static,
    ) -> Scripted {
        let listener = UnixListener::bind(socket).expect("a socket in the sandbox");
        let (seen, script): (Arc<Mutex<Vec<ClientEvent>>>, Arc<Script>) = (Arc::default(), Arc::new(script));
        let memory = Arc::new(Mutex::new(vec![0; info(0).size as usize]));
        let record = seen.clone();
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                let found = Found { id: ExportId(0), name: "disk".to_owned(), info: info(number) };
                let (script, memory, seen) = (script.clone(), memory.clone(), record.clone());
                std::thread::spawn(move || {
                    let mut stream = stream;
                    if let Ok(Some(session)) = greet(&mut stream, config, &vec![found]) {
                        // `seen` records the end of the connection.
                        let _ = Talk { number, session, stream, memory, seen }.run(&*script);
                    }
                });
            }
        });
        Scripted { seen, uri: format!("nbd+unix:///disk?socket={}", socket.display()) }
    }

    /// Returns the URI of its export.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Returns the events of clients so far.
    ///
    /// # Panics
    /// If the script has.
    pub fn events(&self) -> Vec<ClientEvent> {
        self.seen.lock().unwrap().clone()
    }

    /// Returns the number of requests of that kind so far.
    pub fn asked(&self, command: Command) -> usize {
        let asked = |seen: &&ClientEvent| matches!(seen, ClientEvent::Request(_, request) if request.command == command);
        self.events().iter().filter(asked).count()
    }
}

/// Serves the handshake; returns `None` when the client leaves it.
fn greet(stream: &mut UnixStream, config: Config, exports: &Vec<Found>) -> io::Result<Option<Session>> {
    let mut handshake = Handshake::new(config);
    let (mut bytes, mut received) = ([0; 4096], Vec::new());
    loop {
        let output = std::mem::take(handshake.output());
        stream.write_all(&output)?;
        match handshake.poll() {
            Step::Ready(session) => return Ok(Some(session)),
            Step::NeedInput => {}
            Step::StartTls | Step::Closed(_) => return Ok(None),
        }
        let used = handshake.input(&received, exports);
        received.drain(..used);
        if handshake.output().is_empty() && handshake.poll() == Step::NeedInput {
            let len = stream.read(&mut bytes)?;
            if len == 0 {
                return Ok(None);
            }
            received.extend_from_slice(&bytes[..len]);
        }
    }
}
