//! TLS of the NBD server: certificates from files, in the layout that nbdkit and qemu-nbd use.

use spec::{TlsMode, TlsSpec};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto};
use tokio_rustls::server::TlsStream;

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A certificate file is missing or malformed.
    #[error("{}: {why} (expected PEM; see tls-certificates)", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
    /// The private key is missing, malformed, or accessible to other users.
    #[error("{}: {why}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
    /// Certificate and key do not match, or are not usable for a server.
    #[error("the certificate and key cannot be used: {0}")]
    Config(#[from] tokio_rustls::rustls::Error),
}

/// TLS settings of a listener.
pub struct Tls {
    acceptor: TlsAcceptor,
    mode: TlsMode,
}

impl Tls {
    /// Loads the certificates. `None`: TLS is off.
    ///
    /// # Errors
    /// [`TlsError`], naming the file.
    pub fn load(spec: &TlsSpec) -> Result<Option<Tls>, TlsError> {
        let Some((certificate, key_file, client_ca)) = spec.files() else { return Ok(None) };
        let bad = |path: &Path, why: String| TlsError::File { path: path.to_owned(), why };
        let chain = certificates(&certificate)?;
        let key = engine::private_key::read(&key_file)
            .map_err(|why| TlsError::Key { path: key_file.clone(), why })?;
        let provider = Arc::new(crypto::ring::default_provider());
        let builder =
            ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
        let builder = match &client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path)? {
                    roots.add(certificate)?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                    .build()
                    .map_err(|e| bad(path, e.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let config = builder.with_single_cert(chain, key)?;
        Ok(Some(Tls { acceptor: TlsAcceptor::from(Arc::new(config)), mode: spec.mode }))
    }

    pub(super) fn mode(&self) -> TlsMode {
        self.mode
    }

    pub(super) async fn accept<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.acceptor.accept(stream).await
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |why: String| TlsError::File { path: path.to_owned(), why };
    let list = CertificateDer::pem_file_iter(path)
        .map_err(|e| bad(e.to_string()))?
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| bad(e.to_string()))?;
    if list.is_empty() { Err(bad("it holds no certificate".to_owned())) } else { Ok(list) }
}
