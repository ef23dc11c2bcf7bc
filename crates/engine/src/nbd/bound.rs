//! Where a listener listens: a Unix socket, TCP addresses, or sockets that the service manager opened.

use super::connection::Socket;
use crate::spec::{NbdAddress, TlsMode, nbd_uri};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

enum Sockets {
    Unix(UnixListener),
    Tcp(Vec<TcpListener>),
}

/// An address that is bound and listened on, though nobody accepts yet.
pub struct Bound {
    address: NbdAddress,
    sockets: Sockets,
    /// The socket's file is ours to remove.
    owns_file: bool,
}

impl Bound {
    /// Bind and listen.
    ///
    /// # Errors
    /// The system's; a Unix socket that another process answers on is `AddrInUse`, one that nobody
    /// answers on is taken over.
    pub fn bind(address: &NbdAddress) -> io::Result<Bound> {
        let sockets = match address {
            NbdAddress::Unix(path) => Sockets::Unix(bind_unix(path)?),
            NbdAddress::Tcp { host, port } => Sockets::Tcp(bind_tcp(host, *port)?),
        };
        Ok(Bound { address: address.clone(), owns_file: matches!(sockets, Sockets::Unix(_)), sockets })
    }

    /// A TCP socket that the service manager opened and passed to us.
    pub fn from_tcp(listener: TcpListener) -> io::Result<Bound> {
        let local = listener.local_addr()?;
        let address = NbdAddress::Tcp { host: local.ip().to_string(), port: local.port() };
        Ok(Bound { address, sockets: Sockets::Tcp(vec![listener]), owns_file: false })
    }

    /// A Unix socket that the service manager opened and passed to us.
    pub fn from_unix(listener: UnixListener) -> io::Result<Bound> {
        let path = listener.local_addr()?.as_pathname().map(Path::to_owned).unwrap_or_default();
        Ok(Bound { address: NbdAddress::Unix(path), sockets: Sockets::Unix(listener), owns_file: false })
    }

    pub(super) fn accept_on(&self) -> io::Result<Vec<Socket>> {
        match &self.sockets {
            Sockets::Unix(listener) => {
                listener.set_nonblocking(true)?;
                let listener = tokio::net::UnixListener::from_std(listener.try_clone()?)?;
                Ok(vec![Socket::Unix(listener)])
            }
            Sockets::Tcp(list) => list
                .iter()
                .map(|listener| {
                    listener.set_nonblocking(true)?;
                    tokio::net::TcpListener::from_std(listener.try_clone()?).map(Socket::Tcp)
                })
                .collect(),
        }
    }

    pub(super) fn address(&self) -> &NbdAddress {
        &self.address
    }

    /// Where clients reach an export of that name.
    pub(super) fn uri(&self, name: &str, tls: TlsMode) -> String {
        match (&self.address, &self.sockets) {
            (NbdAddress::Tcp { host, port }, Sockets::Tcp(list)) => {
                let chosen = list.first().and_then(|l| l.local_addr().ok()).map_or(*port, |a| a.port());
                nbd_uri(&NbdAddress::Tcp { host: host.clone(), port: chosen }, name, tls)
            }
            (address, _) => nbd_uri(address, name, tls),
        }
    }

    /// Remove the socket's file, if we made it.
    pub(super) fn unlink(&self) {
        if let (NbdAddress::Unix(path), true) = (&self.address, self.owns_file) {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
            let is_dead = matches!(UnixStream::connect(path),
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused);
            if !(is_socket && is_dead) {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        outcome => outcome,
    }
}

fn bind_tcp(host: &str, port: u16) -> io::Result<Vec<TcpListener>> {
    if host.is_empty() {
        let any = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
        // One socket for IPv6 and v4-mapped IPv4; where IPv6 is off, IPv4 alone.
        return match bind_one(any, false) {
            Ok(listener) => Ok(vec![listener]),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => Err(e),
            Err(_) => bind_one(SocketAddr::from(([0, 0, 0, 0], port)), false).map(|listener| vec![listener]),
        };
    }
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for mut address in (host, port).to_socket_addrs()? {
        // A port that the system chose for the first address is everyone's.
        if let (0, Some(first)) = (port, listeners.first()) {
            address.set_port(first.local_addr()?.port());
        }
        let only_v6 = !matches!(address.ip(), IpAddr::V6(ip) if ip.is_unspecified());
        match bind_one(address, only_v6) {
            Ok(listener) => listeners.push(listener),
            Err(error) => failure = error,
        }
    }
    if listeners.is_empty() { Err(failure) } else { Ok(listeners) }
}

fn bind_one(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let domain = socket2::Domain::for_address(address);
    let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_socket_file_is_taken_over_and_a_live_one_is_not() {
        let directory = std::env::temp_dir().join(format!("blockyard-address-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let address = NbdAddress::Unix(directory.join("s"));
        let first = Bound::bind(&address).unwrap();
        assert_eq!(Bound::bind(&address).err().map(|e| e.kind()), Some(io::ErrorKind::AddrInUse));
        drop(first);
        let second = Bound::bind(&address).unwrap();
        second.unlink();
        assert!(!directory.join("s").exists());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn uris_name_the_port_that_was_chosen_and_escape_the_path() {
        let bound = Bound::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let uri = bound.uri("a b", TlsMode::Off);
        assert!(uri.starts_with("nbd://127.0.0.1:") && uri.ends_with("/a%20b") && !uri.contains(":0/"), "{uri}");
    }
}
