//! TLS towards a server: certificates from files, in the layout that libnbd, nbdkit and qemu use, and the relay that
//! lets reactors know one kind of connection only ([ADR 4](../../../../docs/adr/0004-handshakes-and-tls.md)).

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

/// Bytes that are decrypted and encrypted at a time.
const BUFFER_LEN: usize = 128 << 10;
/// How long the end of an encrypted connection may take to be sent.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why TLS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// There is no authority to hold the server against.
    #[error("{uri}: TLS needs a directory with ca-cert.pem (add tls-certificates=DIR to the URI)")]
    NoCertificates {
        /// The export.
        uri: String,
    },
    /// A file is missing or not what it should be.
    #[error("{}: {why} (expected PEM; see tls-certificates)", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A private key is missing, is none, or is readable by others.
    #[error("{}: {why}", path.display())]
    Key {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// What stands for the server is no name.
    #[error("\"{0}\" is no name that a certificate has (add tls-hostname=NAME to the URI)")]
    Name(String),
    /// A parameter asks for what there is not.
    #[error("{0}")]
    Parameter(&'static str),
    /// Certificate and key do not fit.
    #[error("the certificates cannot be used: {0}")]
    Config(#[from] tokio_rustls::rustls::Error),
}

/// TLS as a client uses it.
pub(super) struct Tls {
    connector: TlsConnector,
    name: ServerName<'static>,
}

impl Tls {
    /// What a URI asks for. `None`: it does not ask for TLS.
    pub(super) fn load(uri: &Uri) -> Result<Option<Tls>, TlsError> {
        if !uri.tls {
            return Ok(None);
        }
        match (uri.param("tls-type"), uri.param("tls-verify-peer")) {
            (Some("x509") | None, Some("true" | "1") | None) => {}
            (Some("x509") | None, _) => {
                return Err(TlsError::Parameter(
                    "tls-verify-peer=false is not offered: whoever sits in between could be anyone (trust the server's \
                     own certificate as ca-cert.pem instead)",
                ));
            }
            _ => {
                return Err(TlsError::Parameter(
                    "tls-type: only x509 is in this build (use certificates rather than keys that both sides know)",
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
        // A server may want to know the client, too.
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

/// Encrypt and decrypt between the network and a reactor, which gets the end that is returned.
pub(super) fn relay<S>(network: TlsStream<S>) -> io::Result<OwnedFd>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (ours, theirs) = UnixStream::pair()?;
    tokio::spawn(run_relay(network, ours));
    Ok(theirs.into_std()?.into())
}

/// Until one of them ends: then the other is of no use either.
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
    // What was handed over last is still on its way; a network that does not take it has its time.
    let _ = tokio::time::timeout(FAREWELL, to_network.shutdown()).await;
}
