//! The cost seen from outside: random 4 KiB reads over NBD, 32 in flight on each connection, one connection
//! for each reactor.
//!
//! Servers are started once and stay; each round runs all of them, beginning with another one every time.

use super::served;
use super::stacks::{Selector, Subject};
use crate::nbd::client::{Connection, Count, Load, Pattern};
use crate::proc;
use std::io::{self, Error, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const BLOCK: u32 = 4096;
const DEPTH: usize = 32;
/// Time for a load to become steady before it is measured.
const WARM_UP: Duration = Duration::from_millis(150);
/// Time limit for a server to start.
const START_LIMIT: Duration = Duration::from_secs(10);

/// A kind of server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Server {
    /// The program, serving a subject without a lock.
    Ours(Subject),
    /// The harness itself, serving any subject.
    Own(Subject),
    /// The program, over one export of another server process of its own.
    Direct,
    /// The program, with multipath over such servers.
    Behind(Selector, Backs),
}

/// The servers behind the paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Backs {
    /// One server: the cost of multipath itself.
    One,
    /// Two connections to one server: the additional cost of splitting a reactor's requests into two streams.
    Twice,
    /// Two servers: the additional cost of another process.
    Two,
}

impl Backs {
    fn numbers(self) -> &'static [usize] {
        match self {
            Backs::One => &[0],
            Backs::Twice => &[0, 0],
            Backs::Two => &[0, 1],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Backs::One => "1 server",
            Backs::Twice => "1 server twice",
            Backs::Two => "2 servers",
        }
    }
}

impl Server {
    pub(super) fn name(&self) -> String {
        match self {
            Server::Ours(subject) => subject.name(),
            Server::Own(subject) => subject.name(),
            Server::Direct => "one path, no multipath".to_owned(),
            Server::Behind(selector, backs) => format!("{}, {}", selector.name(), backs.name()),
        }
    }
}

/// All rounds on one server with a number of reactors and connections.
pub(super) struct Series {
    pub(super) server: Server,
    pub(super) threads: u16,
    /// Requests a second, in thousands.
    pub(super) kilo_iops: Vec<f64>,
    /// Processor time of the server for a request, in microseconds.
    pub(super) cpu_us: Vec<f64>,
}

/// A running server; it ends when this is dropped.
struct Running {
    child: Child,
    socket: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(mut command: Command, socket: PathBuf) -> io::Result<Running> {
        // An earlier part's server may have left a socket.
        let _ = std::fs::remove_file(&socket);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut running = Running { child, socket };
        let began = Instant::now();
        while Connection::open(&running.socket, "bench").is_err() {
            if running.child.try_wait()?.is_some() || began.elapsed() > START_LIMIT {
                let _ = running.child.kill();
                let mut printed = String::new();
                running
                    .child
                    .stderr
                    .take()
                    .map(|mut stderr| stderr.read_to_string(&mut printed))
                    .transpose()?;
                return Err(Error::other(format!("{:?} does not come up: {printed}", command.get_program())));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(running)
    }
}

/// Program and folder of the servers.
pub(super) struct Site {
    pub(super) folder: PathBuf,
    pub(super) blockyard: PathBuf,
}

impl Site {
    /// Starts the program, with these arguments before the export.
    fn blockyard(&self, name: &str, threads: u16, arguments: &[&str]) -> io::Result<Running> {
        let socket = self.folder.join(format!("{name}.sock"));
        let mut command = Command::new(&self.blockyard);
        command.arg("serve").args(arguments).args(["--name", "bench", "--queues", &threads.to_string()]);
        command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        // Device names are unique within a run directory, so each server has its own run directory.
        command.env("BLOCKYARD_RUN", self.folder.join(name));
        Running::start(command, socket)
    }

    fn table(&self, name: &str, threads: u16, len: u64, line: &str) -> io::Result<Running> {
        let table = self.folder.join(format!("{name}.table"));
        std::fs::write(&table, format!("0 {len} multipath {line}\n"))?;
        self.blockyard(name, threads, &["--table", &table.to_string_lossy()])
    }

    fn start(&self, server: &Server, number: usize, threads: u16) -> io::Result<Running> {
        const SECTORS: u64 = 250 << 21;
        let name = format!("{threads}-{number}");
        match server {
            Server::Ours(Subject::Raw) => self.blockyard(&name, threads, &["null:"]),
            Server::Ours(Subject::Free(selector, paths)) => {
                let devices = vec!["null:"; usize::from(*paths)];
                self.table(&name, threads, SECTORS, &selector.line(&devices, 64))
            }
            Server::Ours(Subject::Locked(..)) => {
                Err(Error::other("the program has no multipath with a lock"))
            }
            Server::Own(subject) => {
                let socket = self.folder.join(format!("{name}.sock"));
                let mut command = Command::new(std::env::current_exe()?);
                command.args(["multipath", "--serve", &subject.name(), "--reactors", &threads.to_string()]);
                command.arg("--socket").arg(&socket);
                Running::start(command, socket)
            }
            Server::Direct => {
                let uri = self.back_uri(number, 0, threads);
                self.blockyard(&name, threads, &[&format!("nbd:{uri}")])
            }
            Server::Behind(selector, backs) => {
                let uri = |&back: &usize| format!("nbd:{}", self.back_uri(number, back, threads));
                let uris: Vec<String> = backs.numbers().iter().map(uri).collect();
                let uris: Vec<&str> = uris.iter().map(String::as_str).collect();
                self.table(&name, threads, SECTORS, &selector.line(&uris, 64))
            }
        }
    }

    /// Returns the URI of a server behind server `number`.
    fn back_uri(&self, number: usize, back: usize, threads: u16) -> String {
        let socket = self.folder.join(format!("{threads}-{number}-back{back}.sock"));
        format!("nbd+unix:///bench?socket={}", socket.display())
    }

    /// Starts the servers behind server `number`. They are not shared, since a server's distribution of
    /// connections over its reactors depends on earlier connections.
    fn backs(&self, server: &Server, number: usize, threads: u16) -> io::Result<Vec<Running>> {
        let numbers: &[usize] = match server {
            Server::Ours(_) | Server::Own(_) => &[],
            Server::Direct => Backs::One.numbers(),
            Server::Behind(_, backs) => backs.numbers(),
        };
        let count = numbers.iter().max().map_or(0, |last| last + 1);
        let back = |back| self.blockyard(&format!("{threads}-{number}-back{back}"), threads, &["null:"]);
        (0..count).map(back).collect()
    }
}

/// Returns the requests, the seconds, and the server's processor time of one round.
fn load(server: &Running, threads: u16, seed: u64, seconds: f64) -> io::Result<(u64, f64, f64)> {
    let opened: io::Result<Vec<_>> =
        (0..threads).map(|_| Connection::open(&server.socket, "bench")).collect();
    let counts: Vec<Count> = (0..threads).map(|_| Count::default()).collect();
    let stop = AtomicBool::new(false);
    let finished = || counts.iter().map(|count| count.0.load(Relaxed)).sum::<u64>();
    std::thread::scope(|scope| {
        let mut clients = Vec::new();
        for (number, (connection, count)) in opened?.into_iter().zip(&counts).enumerate() {
            let seed = seed ^ (number as u64 + 1) << 32;
            let load = Load { pattern: Pattern::RandomReads, block: BLOCK, depth: DEPTH, seed };
            let stop = &stop;
            clients.push(scope.spawn(move || {
                let ended = connection.run(load, stop, &count.0);
                stop.store(true, Relaxed);
                ended
            }));
        }
        std::thread::sleep(WARM_UP);
        let pid = server.child.id();
        let (before, cpu, began) = (finished(), proc::cpu_of_threads(pid)?, Instant::now());
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let (count, cpu) = (finished() - before, proc::cpu_of_threads(pid)? - cpu);
        let seconds = began.elapsed().as_secs_f64();
        stop.store(true, Relaxed);
        for client in clients {
            client.join().map_err(|_| Error::other("a client ended badly"))??;
        }
        Ok((count, seconds, cpu.as_secs_f64()))
    })
}

/// Measures all servers with a number of reactors, in interleaved rounds.
pub(super) fn measure(
    site: &Site,
    servers: &[Server],
    threads: u16,
    rounds: usize,
    seconds: f64,
) -> io::Result<Vec<Series>> {
    let backs = |(number, server)| site.backs(server, number, threads);
    let _backs = servers.iter().enumerate().map(backs).collect::<io::Result<Vec<_>>>()?;
    let start = |(number, server)| site.start(server, number, threads);
    let running = servers.iter().enumerate().map(start).collect::<io::Result<Vec<_>>>()?;
    let series =
        |server: &Server| Series { server: server.clone(), threads, kilo_iops: vec![], cpu_us: vec![] };
    let mut all: Vec<Series> = servers.iter().map(series).collect();
    for round in 0..rounds {
        for turn in 0..servers.len() {
            let at = (turn + round) % servers.len();
            let (count, took, cpu) = load(&running[at], threads, round as u64, seconds)?;
            if count == 0 {
                return Err(Error::other(format!("{}: nothing ended", all[at].server.name())));
            }
            all[at].kilo_iops.push(count as f64 / took / 1e3);
            all[at].cpu_us.push(cpu * 1e6 / count as f64);
        }
    }
    Ok(all)
}

/// Runs the child of [`Server::Own`]: `--serve SUBJECT --reactors N --socket PATH`.
pub(super) fn serve(arguments: &[String]) -> io::Result<()> {
    let [_, subject, _, reactors, _, socket] = arguments else {
        return Err(Error::other("--serve SUBJECT --reactors N --socket PATH"));
    };
    let subject = Subject::all().into_iter().find(|known| known.name() == *subject);
    let subject = subject.ok_or_else(|| Error::other("no such subject"))?;
    served::serve(subject, reactors.parse().map_err(Error::other)?, Path::new(socket))
}
