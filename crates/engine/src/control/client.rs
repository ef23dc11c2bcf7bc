//! The client of the control API: one request per connection.

use super::{Change, ControlError, DeviceInfo, DeviceStats, MoveRequest, TableAnswer, TableCall, Version};
use crate::apply::{ApplyAnswer, ApplyRequest, TopologyText};
use crate::control::inflight::InFlightList;
use crate::observe::trace::TraceOptions;
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

/// Longest wait for an answer to a query. Removals and changes may take any time: they drain.
const ANSWER_TIME: Duration = Duration::from_secs(15);

/// Time after which the client gives up waiting for a stopped process. Debuggers stop a process briefly.
const STOPPED_TIME: Duration = Duration::from_secs(2);
/// Interval at which the state of the process is polled while waiting.
const STOPPED_POLL: Duration = Duration::from_millis(250);

/// Returns whether a process is stopped by a signal or a debugger: its state in `/proc/PID/stat` is T or t.
fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with(['T', 't']))
}

/// Resolves when a process has been stopped for [`STOPPED_TIME`]. Never resolves if it is not stopped or not
/// known.
async fn stays_stopped(server: Option<i32>) -> i32 {
    let Some(pid) = server else { return std::future::pending().await };
    let mut stopped = Duration::ZERO;
    loop {
        tokio::time::sleep(STOPPED_POLL).await;
        stopped = if is_stopped(pid) { stopped + STOPPED_POLL } else { Duration::ZERO };
        if stopped >= STOPPED_TIME {
            return pid;
        }
    }
}

/// Resolves when a process is not stopped any more.
async fn continued(pid: i32) {
    while is_stopped(pid) {
        tokio::time::sleep(STOPPED_POLL).await;
    }
}

/// The future that drives a connection.
type HttpConnection = Connection<TokioIo<UnixStream>, Full<Bytes>>;

/// A running trace. It ends when this is dropped.
pub struct TraceStream {
    body: Incoming,
    client: ControlClient,
    connection: tokio::task::JoinHandle<hyper::Result<()>>,
    /// Keeps the connection open.
    _sender: SendRequest<Full<Bytes>>,
}

impl TraceStream {
    /// Returns the next chunk; `None`: the trace has ended.
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

/// Why a request has failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Connecting failed.
    #[error("{}: {source} (is it still running?)", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The connection broke, or the answer is malformed.
    #[error("{}: {why}", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What happened.
        why: String,
    },
    /// The process did not answer in time.
    #[error("{}: no answer within {} s (is it stopped, or the machine overloaded? try again)", path.display(), ANSWER_TIME.as_secs())]
    Timeout {
        /// The socket.
        path: PathBuf,
    },
    /// The process is stopped and has not answered; a request may not have been sent.
    #[error(
        "the server, process {pid}, is stopped and does not answer (kill -CONT {pid} continues it, kill -KILL {pid} ends it)"
    )]
    Stopped {
        /// The process.
        pid: i32,
    },
    /// The process refused.
    #[error(transparent)]
    Refused(#[from] ControlError),
}

/// A client for the process behind a control socket. Must be used within a tokio runtime.
#[derive(Clone, Debug)]
pub struct ControlClient {
    socket: PathBuf,
}

impl ControlClient {
    /// Creates a client for the process that listens on `socket`. Nothing is connected yet.
    pub fn new(socket: impl Into<PathBuf>) -> ControlClient {
        ControlClient { socket: socket.into() }
    }

    /// Path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns name, version and PID of the process.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn version(&self) -> Result<Version, ClientError> {
        self.get("/version").await
    }

    /// Describes all devices of the process.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn devices(&self) -> Result<Vec<DeviceInfo>, ClientError> {
        self.get("/devices").await
    }

    /// Describes one device.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn device(&self, name: &str) -> Result<DeviceInfo, ClientError> {
        self.get(&format!("/devices/{name}")).await
    }

    /// Returns the counters of a device.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn stats(&self, name: &str) -> Result<DeviceStats, ClientError> {
        self.get(&format!("/devices/{name}/stats")).await
    }

    /// Lists the requests in flight of a device.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn in_flight(&self, name: &str) -> Result<InFlightList, ClientError> {
        self.get(&format!("/devices/{name}/inflight")).await
    }

    /// Drains, flushes and removes a device. Waits without a time limit.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete(&self, name: &str) -> Result<(), ClientError> {
        self.ask(Method::DELETE, &format!("/devices/{name}")).await.map(|_| ())
    }

    /// Drains, flushes and removes a device although it is in use.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete_by_force(&self, name: &str) -> Result<(), ClientError> {
        self.ask(Method::DELETE, &format!("/devices/{name}?force")).await.map(|_| ())
    }

    /// Changes a device while it is served. Waits without a time limit.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn change(&self, name: &str, change: &Change) -> Result<(), ClientError> {
        let body = serde_json::to_vec(change).map_err(|why| self.broken(why))?;
        self.send(Method::PATCH, &format!("/devices/{name}"), body).await.map(|_| ())
    }

    /// Moves the contents of a device, waiting for the end without a time limit, or cancels a move.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn move_contents(&self, name: &str, request: &MoveRequest) -> Result<(), ClientError> {
        let body = serde_json::to_vec(request).map_err(|why| self.broken(why))?;
        self.send(Method::PATCH, &format!("/devices/{name}"), body).await.map(|_| ())
    }

    /// Starts a trace of a device. Returns its stream.
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

    /// Executes a call on a device's table. Waits without a time limit.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn table(&self, name: &str, call: &TableCall) -> Result<TableAnswer, ClientError> {
        let body = serde_json::to_vec(call).map_err(|why| self.broken(why))?;
        let answer = self.send(Method::POST, &format!("/devices/{name}/table"), body).await?;
        serde_json::from_slice(&answer).map_err(|why| self.broken(why))
    }

    /// Returns the devices that the process serves, as text of a topology.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn topology(&self) -> Result<TopologyText, ClientError> {
        self.get("/topology").await
    }

    /// Applies a topology to the process, or only plans it. Waits for the last action without a time limit.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn apply(&self, request: &ApplyRequest) -> Result<ApplyAnswer, ClientError> {
        let body = serde_json::to_vec(request).map_err(|why| self.broken(why))?;
        let answer = self.send(Method::POST, "/topology", body).await?;
        serde_json::from_slice(&answer).map_err(|why| self.broken(why))
    }

    /// Runs a command line on the LIO tree of the process. Waits without a time limit.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn targetcli(&self, call: &serde_json::Value) -> Result<serde_json::Value, ClientError> {
        let body = serde_json::to_vec(call).map_err(|why| self.broken(why))?;
        let answer = self.send(Method::POST, "/targetcli", body).await?;
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
        // Errors of the connection surface as errors of the answer.
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

    /// Connects to the process. Also returns its PID if known. Nothing is sent to a stopped process: it would
    /// execute the request after the client has given up.
    async fn connect(&self) -> Result<(SendRequest<Full<Bytes>>, HttpConnection, Option<i32>), ClientError> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ClientError::Connect { path: self.socket.clone(), source })?;
        let server = stream.peer_cred().ok().and_then(|peer| peer.pid());
        if let Some(pid) = server.filter(|&pid| is_stopped(pid)) {
            tokio::select! {
                pid = stays_stopped(server) => return Err(ClientError::Stopped { pid }),
                () = continued(pid) => {}
            }
        }
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(|why| self.broken(why))?;
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
