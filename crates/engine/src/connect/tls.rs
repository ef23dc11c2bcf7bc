//! TLS of the NBD client: certificates from files, in the layout that libnbd, nbdkit and qemu use, and the
//! relay that gives reactors plain sockets only ([ADR 4](../../../../docs/adr/0004-handshakes-and-tls.md)).

use proto::nbd::Uri;
use proto::nbd::uri::Server;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, copy_buf, split};
use tokio::net::UnixStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

/// Size of the copy buffers, in bytes.
const BUFFER_LEN: usize = 128 << 10;
/// Longest time for sending the end of an encrypted connection.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// No certificate authority is given.
    #[error("{uri}: TLS needs a directory with ca-cert.pem (add tls-certificates=DIR to the URI)")]
    NoCertificates {
        /// URI of the export.
        uri: String,
    },
    /// A certificate file is missing or malformed.
    #[error("{}: {why} (expected PEM; see tls-certificates)", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
    /// A private key is missing, malformed, or accessible to other users.
    #[error("{}: {why}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
    /// The server's name cannot be in a certificate.
    #[error("\"{0}\" is not a valid host name for a certificate (add tls-hostname=NAME to the URI)")]
    Name(String),
    /// An unsupported parameter.
    #[error("{0}")]
    Parameter(&'static str),
    /// Certificate and key do not match.
    #[error("the certificates cannot be used: {0}")]
    Config(#[from] tokio_rustls::rustls::Error),
}

/// TLS settings of a connection.
pub(super) struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl Tls {
    /// Reads the TLS settings of a URI. `None`: it has none.
    pub(super) fn load(uri: &Uri) -> Result<Option<Tls>, TlsError> {
        if !uri.tls {
            return Ok(None);
        }
        match (uri.param("tls-type"), uri.param("tls-verify-peer")) {
            (Some("x509") | None, Some("true" | "1") | None) => {}
            (Some("x509") | None, _) => {
                return Err(TlsError::Parameter(
                    "tls-verify-peer=false is not supported: anyone on the network path could answer (trust the server's \
                     own certificate as ca-cert.pem instead)",
                ));
            }
            _ => {
                return Err(TlsError::Parameter(
                    "tls-type: only x509 is supported (use certificates rather than pre-shared keys)",
                ));
            }
        }
        let Some(directory) = uri.param("tls-certificates") else {
            return Err(TlsError::NoCertificates { uri: uri.to_string() });
        };
        let directory = Path::new(directory);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&directory.join("ca-cert.pem"))? {
            roots.add(certificate)?;
        }
        let provider = Arc::new(crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        // The server may verify the client.
        let own = directory.join("client-cert.pem");
        let config = if own.exists() {
            let key = directory.join("client-key.pem");
            let chain = certificates(&own)?;
            let key =
                crate::private_key::read(&key).map_err(|why| TlsError::Key { path: key.clone(), why })?;
            builder.with_client_auth_cert(chain, key)?
        } else {
            builder.with_no_client_auth()
        };
        let host = match (&uri.server, uri.param("tls-hostname")) {
            (_, Some(name)) => name.to_owned(),
            (Server::Tcp { host, .. }, None) => host.clone(),
            (Server::Unix(_), None) => "localhost".to_owned(),
        };
        let name = ServerName::try_from(host.clone()).map_err(|_| TlsError::Name(host))?;
        Ok(Some(Tls { connector: TlsConnector::from(Arc::new(config)), name }))
    }

    pub(super) async fn connect<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.connector.connect(self.name.clone(), stream).await
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |why: String| TlsError::File { path: path.to_owned(), why };
    let list = CertificateDer::pem_file_iter(path)
        .map_err(|why| bad(why.to_string()))?
        .collect::<Result<Vec<_>, _>>()
        .map_err(|why| bad(why.to_string()))?;
    if list.is_empty() { Err(bad("it holds no certificate".to_owned())) } else { Ok(list) }
}

/// Copies between the TLS connection and a socket pair until one of them ends. Returns the reactor's socket.
pub(super) fn relay<S>(network: TlsStream<S>) -> io::Result<OwnedFd>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (ours, theirs) = UnixStream::pair()?;
    tokio::spawn(run_relay(network, ours));
    Ok(theirs.into_std()?.into())
}

/// Copies in both directions until one ends: then the other is of no use.
async fn run_relay<S>(network: TlsStream<S>, reactor: UnixStream)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (from_network, mut to_network) = split(network);
    let (from_reactor, mut to_reactor) = reactor.into_split();
    let mut from_network = BufReader::with_capacity(BUFFER_LEN, from_network);
    let mut from_reactor = BufReader::with_capacity(BUFFER_LEN, from_reactor);
    let ended = tokio::select! {
        ended = copy_buf(&mut from_network, &mut to_reactor) => ended,
        ended = copy_buf(&mut from_reactor, &mut to_network) => ended,
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a TLS connection ended");
    }
    // Data that was handed over last is still being sent; a network that does not accept it gets this time.
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, to_network.shutdown()).await;
}
