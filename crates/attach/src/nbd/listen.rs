//! Listening sockets of NBD exports, opened before anything is served, so that errors are known early.
//!
//! The thread that starts a host opens them and hands them to the accept loops. The file of a Unix socket is
//! removed when its [`Listening`] is dropped; the file of a dead server's socket is replaced.

use engine::private::{Identity, lock_folder, remove_dead};
use spec::NbdAddress;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A listening socket.
#[derive(Debug)]
pub enum Socket {
    /// Unix.
    Unix(UnixListener),
    /// TCP.
    Tcp(TcpListener),
}

/// An address and the sockets that listen there: a host name may stand for several.
#[derive(Debug)]
pub struct Listening {
    /// The address as given, with the port that the kernel chose for 0.
    pub address: NbdAddress,
    /// The sockets, blocking. Empty once an accept loop has taken them.
    pub sockets: Vec<Socket>,
    file: Option<SocketFile>,
}

/// The file of a Unix socket that this process created. Another process may have replaced it since.
#[derive(Debug)]
struct SocketFile(PathBuf, Identity);

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.1.remove(&self.0);
    }
}

impl Listening {
    /// Opens an address.
    ///
    /// # Errors
    /// The address is in use or not this host's, or a file that is not a dead socket exists there.
    pub fn open(address: &NbdAddress) -> io::Result<Listening> {
        match address {
            NbdAddress::Unix(path) => {
                let listener = bind_unix(path)?;
                Ok(Listening {
                    address: address.clone(),
                    sockets: vec![Socket::Unix(listener)],
                    file: Some(SocketFile(path.clone(), Identity::of(path)?)),
                })
            }
            NbdAddress::Tcp { host, port } => {
                let (listeners, port) = bind_tcp(host, *port)?;
                Ok(Listening {
                    address: NbdAddress::Tcp { host: host.clone(), port },
                    sockets: listeners.into_iter().map(Socket::Tcp).collect(),
                    file: None,
                })
            }
        }
    }

    /// Renames the socket file. The socket of a service manager keeps its file.
    ///
    /// # Errors
    /// The operating system refuses; nothing has changed.
    pub(crate) fn rename(&mut self, to: &Path) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            std::fs::rename(&file.0, to)?;
            to.clone_into(&mut file.0);
            self.address = NbdAddress::Unix(to.to_owned());
        }
        Ok(())
    }

    /// Wraps a socket that was opened by the service manager, such as systemd. Its file, if any, is not
    /// removed.
    ///
    /// # Errors
    /// The socket has no address.
    pub fn inherited(socket: Socket) -> io::Result<Listening> {
        let address = match &socket {
            Socket::Unix(listener) => {
                let path = listener.local_addr()?.as_pathname().map(Path::to_owned);
                NbdAddress::Unix(path.ok_or_else(|| io::Error::other("the socket has no path"))?)
            }
            Socket::Tcp(listener) => {
                let address = listener.local_addr()?;
                let host =
                    if address.ip().is_unspecified() { String::new() } else { address.ip().to_string() };
                NbdAddress::Tcp { host, port: address.port() }
            }
        };
        Ok(Listening { address, sockets: vec![socket], file: None })
    }
}

/// Binds a Unix socket, replacing the file of a dead server.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    // If the directory cannot be locked, two servers that start at the same moment may remove each other's
    // socket.
    let _held = lock_folder(path).ok();
    match UnixListener::bind(path) {
        Err(why) if why.kind() == io::ErrorKind::AddrInUse => {}
        done => return done,
    }
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is not a socket exists there"));
    }
    let taken = || io::Error::new(io::ErrorKind::AddrInUse, "the address is taken");
    match remove_dead(path) {
        Ok(false) => Err(taken()),
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => UnixListener::bind(path),
    }
}

/// Binds every address of `host` that this machine has, all with the same port.
pub(crate) fn bind_tcp(host: &str, port: u16) -> io::Result<(Vec<TcpListener>, u16)> {
    // One IPv6 socket accepts IPv4 too, unless the machine has no IPv6 or net.ipv6.bindv6only is set.
    let addresses: Vec<SocketAddr> = if host.is_empty() {
        vec![(std::net::Ipv6Addr::UNSPECIFIED, port).into(), (std::net::Ipv4Addr::UNSPECIFIED, port).into()]
    } else {
        (host, port).to_socket_addrs()?.collect()
    };
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut bound_port = port;
    let mut error = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for mut address in addresses {
        address.set_port(bound_port);
        match TcpListener::bind(address) {
            Ok(listener) => {
                bound_port = listener.local_addr()?.port();
                listeners.push(listener);
            }
            Err(why) if listeners.is_empty() => error = why,
            Err(_) => {}
        }
    }
    if listeners.is_empty() { Err(error) } else { Ok((listeners, bound_port)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;

    fn open(text: &str) -> io::Result<Listening> {
        Listening::open(&text.parse().unwrap())
    }

    #[test]
    fn the_socket_file_is_removed_on_drop() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listening = open(&format!("unix:{}", path.display())).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop(listening);
        assert!(!path.exists());
    }

    #[test]
    fn a_dead_socket_is_replaced_but_not_a_live_one_or_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let address = format!("unix:{}", path.display());
        drop(UnixListener::bind(&path).unwrap());
        let live = open(&address).unwrap();
        assert_eq!(open(&address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(live);
        std::fs::write(&path, "data").unwrap();
        assert_eq!(open(&address).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn a_server_that_stops_keeps_the_socket_of_its_successor() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let address = format!("unix:{}", path.display());
        let first = open(&address).unwrap();
        std::fs::rename(&path, directory.path().join("before")).unwrap();
        let second = open(&address).unwrap();
        drop(first);
        assert!(UnixStream::connect(&path).is_ok(), "the second one's file is its own");
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn only_one_of_many_servers_replaces_a_dead_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let address = format!("unix:{}", path.display());
        for _ in 0..20 {
            drop(UnixListener::bind(&path).unwrap());
            let opened: Vec<_> = std::thread::scope(|scope| {
                let all: Vec<_> = (0..8).map(|_| scope.spawn(|| open(&address))).collect();
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            assert_eq!(opened.iter().filter(|one| one.is_ok()).count(), 1);
            assert!(UnixStream::connect(&path).is_ok(), "the existing server listens");
            drop(opened);
        }
    }

    #[test]
    fn port_0_is_reported_as_the_chosen_port() {
        let listening = open("tcp:127.0.0.1:0").unwrap();
        let NbdAddress::Tcp { host, port } = &listening.address else { panic!() };
        assert_eq!(host, "127.0.0.1");
        assert!(TcpStream::connect(("127.0.0.1", *port)).is_ok());
        assert!(open(&format!("tcp:127.0.0.1:{port}")).is_err());
    }

    #[test]
    fn an_empty_host_binds_all_addresses() {
        let listening = open("tcp::0").unwrap();
        let NbdAddress::Tcp { port, .. } = listening.address else { panic!() };
        assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
    }

    #[test]
    fn an_inherited_socket_reports_its_address() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let listening = Listening::inherited(Socket::Tcp(listener)).unwrap();
        assert_eq!(listening.address.to_string(), format!("tcp:127.0.0.1:{port}"));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(Listening::inherited(Socket::Unix(UnixListener::bind(&path).unwrap())).unwrap());
        assert!(path.exists());
    }
}
