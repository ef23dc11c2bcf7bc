//! The client half: one request, one connection.

use super::{Change, ControlError, DeviceInfo, DeviceStats, Version};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// How long a process may take to tell about itself. A deletion may take as long as it needs: it drains.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// Why there is no answer, or what the answer says.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers there.
    #[error("{}: {source} (is it still running?)", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The connection broke, or what came was no answer.
    #[error("{}: {why} (is it a blockyard of another version?)", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What happened.
        why: String,
    },
    /// The process took too long.
    #[error("{}: no answer within {} s (is it stopped?)", path.display(), ANSWER_TIME.as_secs())]
    Timeout {
        /// The socket.
        path: PathBuf,
    },
    /// The process refused.
    #[error(transparent)]
    Refused(#[from] ControlError),
}

/// Speaks to the process behind a control socket. Must be used within a tokio runtime.
#[derive(Clone, Debug)]
pub struct ControlClient {
    socket: PathBuf,
}

impl ControlClient {
    /// To the process that listens on `socket`. Nothing is connected yet.
    pub fn new(socket: impl Into<PathBuf>) -> ControlClient {
        ControlClient { socket: socket.into() }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Who answers.
    ///
    /// # Errors
    /// See [`ClientError`], here and below.
    pub async fn version(&self) -> Result<Version, ClientError> {
        self.get("/version").await
    }

    /// All devices of the process.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn devices(&self) -> Result<Vec<DeviceInfo>, ClientError> {
        self.get("/devices").await
    }

    /// One device.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn device(&self, name: &str) -> Result<DeviceInfo, ClientError> {
        self.get(&format!("/devices/{name}")).await
    }

    /// What a device counted.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn stats(&self, name: &str) -> Result<DeviceStats, ClientError> {
        self.get(&format!("/devices/{name}/stats")).await
    }

    /// Drains, flushes and removes a device. Takes as long as that does.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete(&self, name: &str) -> Result<(), ClientError> {
        self.ask(Method::DELETE, &format!("/devices/{name}")).await.map(|_| ())
    }

    /// The same although somebody uses it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete_by_force(&self, name: &str) -> Result<(), ClientError> {
        self.ask(Method::DELETE, &format!("/devices/{name}?force")).await.map(|_| ())
    }

    /// Changes a device while it is served. Takes as long as that does.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn change(&self, name: &str, change: &Change) -> Result<(), ClientError> {
        let body = serde_json::to_vec(change).map_err(|why| self.broken(why))?;
        self.send(Method::PATCH, &format!("/devices/{name}"), body).await.map(|_| ())
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let answer = tokio::time::timeout(ANSWER_TIME, self.ask(Method::GET, path)).await;
        let body = answer.map_err(|_| ClientError::Timeout { path: self.socket.clone() })??;
        serde_json::from_slice(&body).map_err(|why| self.broken(why))
    }

    fn broken(&self, why: impl std::fmt::Display) -> ClientError {
        ClientError::Answer { path: self.socket.clone(), why: why.to_string() }
    }

    async fn ask(&self, method: Method, path: &str) -> Result<Bytes, ClientError> {
        self.send(method, path, Vec::new()).await
    }

    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, ClientError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ClientError::Connect { path: self.socket.clone(), source })?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::HOST, "blockyard")
            .header(hyper::header::CONNECTION, "close")
            .header(hyper::header::CONTENT_TYPE, "application/json")
            .body(Full::<Bytes>::from(body))
            .map_err(|why| self.broken(why))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|why| self.broken(why))?;
        // What goes wrong on the connection shows in the answer.
        let connection = tokio::spawn(connection);
        let answer = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            Ok::<_, hyper::Error>((status, response.into_body().collect().await?.to_bytes()))
        };
        let answer = answer.await;
        connection.abort();
        let (status, body) = answer.map_err(|why| self.broken(why))?;
        if status.is_success() { Ok(body) } else { Err(self.refusal(status, &body)) }
    }

    fn refusal(&self, status: StatusCode, body: &[u8]) -> ClientError {
        let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        let Some(why) = body["error"].as_str() else { return self.broken(status) };
        ClientError::Refused(match status {
            StatusCode::NOT_FOUND => ControlError::NotFound,
            StatusCode::CONFLICT => ControlError::Busy(why.to_owned()),
            _ => ControlError::Failed(why.to_owned()),
        })
    }
}
