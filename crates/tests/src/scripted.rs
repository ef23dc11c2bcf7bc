//! A server that does what a test tells it to: for answers that no sane server gives, and for watching a client.
//!
//! It keeps its handshakes by the book, then asks the script of the test what to do about each request. It has memory
//! for what is written, which all connections share.

use proto::nbd::server::{Config, Found, Handshake, Step};
use proto::nbd::{Command, ExportId, ExportInfo, NbdError, Request, Session, Style, request};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// What becomes of a connection after a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// It goes on.
    On,
    /// It is closed.
    Close,
}

/// What a test does about a request.
pub type Script = dyn Fn(&mut Talk, &Request, &[u8]) -> io::Result<Next> + Send + Sync;

/// One connection in its transmission phase, as the script sees it.
pub struct Talk {
    /// Which connection it is, from 0 on.
    pub number: usize,
    /// What was agreed on.
    pub session: Session,
    stream: UnixStream,
    memory: Arc<Mutex<Vec<u8>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

/// Something that a client did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// It asked for something on that connection.
    Asked(usize, Request),
    /// It ended that connection without a farewell.
    Gone(usize),
}

impl Talk {
    /// Send these bytes.
    ///
    /// # Errors
    /// The client is gone.
    pub fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// What a right server says.
    ///
    /// # Errors
    /// The client is gone.
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

    /// A chunk of data, or for simple replies all of it.
    ///
    /// # Errors
    /// The client is gone.
    pub fn data(&mut self, to: &Request, offset: u64, data: &[u8], done: bool) -> io::Result<()> {
        let mut header = [0; 64];
        let len = self.session.style.put_data_header(&mut header, to, offset, data.len() as u32, done);
        self.say(&[&header[..len], data].concat())
    }

    /// The end of a reply.
    ///
    /// # Errors
    /// The client is gone.
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
                self.seen.lock().unwrap().push(Seen::Gone(self.number));
                return Err(gone);
            }
            let Ok(Some((request, _))) = request::parse(&header, extended) else {
                panic!("the client sent no request: {header:?}")
            };
            let mut payload = vec![0; request.payload_len as usize];
            self.stream.read_exact(&mut payload)?;
            self.seen.lock().unwrap().push(Seen::Asked(self.number, request));
            if request.command == Command::Disc || script(self, &request, &payload)? == Next::Close {
                return Ok(());
            }
        }
    }
}

/// The server.
pub struct Scripted {
    seen: Arc<Mutex<Vec<Seen>>>,
    uri: String,
}

impl Scripted {
    /// Serve an export of that size and with these abilities on a socket, to any number of clients, until the test is over.
    ///
    /// # Panics
    /// If the socket cannot be made.
    pub fn start(
        socket: &Path,
        info: impl Fn(usize) -> ExportInfo + Send + 'static,
        config: Config,
        script: impl Fn(&mut Talk, &Request, &[u8]) -> io::Result<Next> + Send + Sync + 'static,
    ) -> Scripted {
        let listener = UnixListener::bind(socket).expect("a socket in the sandbox");
        let (seen, script): (Arc<Mutex<Vec<Seen>>>, Arc<Script>) = (Arc::default(), Arc::new(script));
        let memory = Arc::new(Mutex::new(vec![0; info(0).size as usize]));
        let told = seen.clone();
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                let found = Found { id: ExportId(0), name: "disk".to_owned(), info: info(number) };
                let (script, memory, seen) = (script.clone(), memory.clone(), told.clone());
                std::thread::spawn(move || {
                    let mut stream = stream;
                    if let Ok(Some(session)) = greet(&mut stream, config, &vec![found]) {
                        // How it ends is what `seen` says.
                        let _ = Talk { number, session, stream, memory, seen }.run(&*script);
                    }
                });
            }
        });
        Scripted { seen, uri: format!("nbd+unix:///disk?socket={}", socket.display()) }
    }

    /// Where its export is.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// What clients did so far.
    ///
    /// # Panics
    /// If the script has.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// The requests of that kind so far.
    pub fn asked(&self, command: Command) -> usize {
        let asked = |seen: &&Seen| matches!(seen, Seen::Asked(_, request) if request.command == command);
        self.seen().iter().filter(asked).count()
    }
}

/// The handshake; `None` when the client leaves it.
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
