//! The client half: one request, one connection.

use super::{Change, ControlError, DeviceInfo, DeviceStats, TableAnswer, TableCall, Version};
use crate::slow::InFlightList;
use crate::trace::TraceOptions;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Connection, SendRequest};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// How long a process may take to tell about itself. A deletion may take as long as it needs: it drains.
const ANSWER_TIME: Duration = Duration::from_secs(15);

/// How long a process may be stopped before its answer is not waited for any more: a debugger stops it for a moment.
const STOPPED_TIME: Duration = Duration::from_secs(2);
/// How often the state of a process is read meanwhile.
const STOPPED_LOOK: Duration = Duration::from_millis(250);

/// Whether a process is stopped by a signal or a debugger: its state in `/proc/PID/stat` is T or t.
fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with(['T', 't']))
}

/// Ends when a process has been found stopped for [`STOPPED_TIME`], each time it was looked at. Never ends for one that is not
/// known or not stopped.
async fn stays_stopped(server: Option<i32>) -> i32 {
    let Some(pid) = server else { return std::future::pending().await };
    let mut stopped = Duration::ZERO;
    loop {
        tokio::time::sleep(STOPPED_LOOK).await;
        stopped = if is_stopped(pid) { stopped + STOPPED_LOOK } else { Duration::ZERO };
        if stopped >= STOPPED_TIME {
            return pid;
        }
    }
}

/// Ends when a process is not stopped any more.
async fn goes_on(pid: i32) {
    while is_stopped(pid) {
        tokio::time::sleep(STOPPED_LOOK).await;
    }
}

/// The connection's own work.
type Speaking = Connection<TokioIo<UnixStream>, Full<Bytes>>;

/// A trace on its way. It ends when this is dropped.
pub struct TraceStream {
    body: Incoming,
    client: ControlClient,
    connection: tokio::task::JoinHandle<hyper::Result<()>>,
    /// With it the connection would be closed.
    _sender: SendRequest<Full<Bytes>>,
}

impl TraceStream {
    /// What came next; `None`: nothing more comes.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        match self.body.frame().await {
            None => Ok(None),
            Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
            Some(Err(why)) => Err(self.client.broken(why)),
        }
    }
}

impl Drop for TraceStream {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

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
    #[error("{}: {why}", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What happened.
        why: String,
    },
    /// The process took too long.
    #[error("{}: no answer within {} s (is it stopped, or its machine too busy? ask again)", path.display(), ANSWER_TIME.as_secs())]
    Timeout {
        /// The socket.
        path: PathBuf,
    },
    /// The process is stopped, and nothing was asked of it or it has not answered.
    #[error(
        "the server, process {pid}, is stopped and does not answer (kill -CONT {pid} lets it go on, kill -KILL {pid} ends it)"
    )]
    Stopped {
        /// The process.
        pid: i32,
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

    /// What is under way of a device.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn in_flight(&self, name: &str) -> Result<InFlightList, ClientError> {
        self.get(&format!("/devices/{name}/inflight")).await
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

    /// Traces a device: what comes of it, as long as it is taken.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn trace(&self, name: &str, options: &TraceOptions) -> Result<TraceStream, ClientError> {
        let body = serde_json::to_vec(options).map_err(|why| self.broken(why))?;
        let (mut sender, connection, server) = self.connect().await?;
        let connection = tokio::spawn(connection);
        let request = self.request(Method::POST, &format!("/devices/{name}/trace"), body)?;
        let response = tokio::select! {
            response = sender.send_request(request) => response.map_err(|why| self.broken(why))?,
            pid = stays_stopped(server) => return Err(ClientError::Stopped { pid }),
        };
        let status = response.status();
        if !status.is_success() {
            let body = response.into_body().collect().await.map_err(|why| self.broken(why))?;
            return Err(self.refusal(status, &body.to_bytes()));
        }
        Ok(TraceStream { body: response.into_body(), client: self.clone(), connection, _sender: sender })
    }

    /// Asks a device's table something, or changes it. Takes as long as that does.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn table(&self, name: &str, call: &TableCall) -> Result<TableAnswer, ClientError> {
        let body = serde_json::to_vec(call).map_err(|why| self.broken(why))?;
        let answer = self.send(Method::POST, &format!("/devices/{name}/table"), body).await?;
        serde_json::from_slice(&answer).map_err(|why| self.broken(why))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let answer = tokio::time::timeout(ANSWER_TIME, self.ask(Method::GET, path)).await;
        let body = answer.map_err(|_| ClientError::Timeout { path: self.socket.clone() })??;
        serde_json::from_slice(&body).map_err(|why| self.broken(why))
    }

    fn broken(&self, why: impl std::fmt::Display) -> ClientError {
        let why = format!("{why} (is it a blockyard of another version?)");
        ClientError::Answer { path: self.socket.clone(), why }
    }

    fn unanswered(&self, why: &hyper::Error) -> ClientError {
        if !why.is_incomplete_message() {
            return self.broken(why);
        }
        let why = "its process ended before it answered (see blockyard list)".to_owned();
        ClientError::Answer { path: self.socket.clone(), why }
    }

    async fn ask(&self, method: Method, path: &str) -> Result<Bytes, ClientError> {
        self.send(method, path, Vec::new()).await
    }

    async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, ClientError> {
        let request = self.request(method, path, body)?;
        let (mut sender, connection, server) = self.connect().await?;
        // What goes wrong on the connection shows in the answer.
        let connection = tokio::spawn(connection);
        let answer = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            Ok::<_, hyper::Error>((status, response.into_body().collect().await?.to_bytes()))
        };
        let answer = tokio::select! {
            answer = answer => answer,
            pid = stays_stopped(server) => {
                connection.abort();
                return Err(ClientError::Stopped { pid });
            }
        };
        connection.abort();
        let (status, body) = answer.map_err(|why| self.unanswered(&why))?;
        if status.is_success() { Ok(body) } else { Err(self.refusal(status, &body)) }
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::HOST, "blockyard")
            .header(hyper::header::CONNECTION, "close")
            .header(hyper::header::CONTENT_TYPE, "application/json")
            .body(Full::<Bytes>::from(body))
            .map_err(|why| self.broken(why))
    }

    /// Connects to the process, also returned as far as it is known. Nothing is sent to one that is stopped: it would do
    /// later what nobody waits for any more.
    async fn connect(&self) -> Result<(SendRequest<Full<Bytes>>, Speaking, Option<i32>), ClientError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ClientError::Connect { path: self.socket.clone(), source })?;
        let server = stream.peer_cred().ok().and_then(|peer| peer.pid());
        if let Some(pid) = server.filter(|&pid| is_stopped(pid)) {
            tokio::select! {
                pid = stays_stopped(server) => return Err(ClientError::Stopped { pid }),
                () = goes_on(pid) => {}
            }
        }
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = shaken.map_err(|why| self.broken(why))?;
        Ok((sender, connection, server))
    }

    fn refusal(&self, status: StatusCode, body: &[u8]) -> ClientError {
        let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        let Some(why) = body["error"].as_str() else { return self.broken(status) };
        ClientError::Refused(match status {
            StatusCode::NOT_FOUND => ControlError::NotFound,
            StatusCode::UNPROCESSABLE_ENTITY => {
                let errno = body["errno"].as_i64().and_then(|errno| i32::try_from(errno).ok());
                ControlError::Refused { errno: errno.unwrap_or(libc::EINVAL), why: why.to_owned() }
            }
            StatusCode::CONFLICT => ControlError::Busy(why.to_owned()),
            _ => ControlError::Failed(why.to_owned()),
        })
    }
}
