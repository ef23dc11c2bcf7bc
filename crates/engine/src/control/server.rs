//! The server of the control API: routes to a [`HostView`].

use super::{
    Change, ControlError, DeviceInfo, DeviceStats, Exposition, HostView, MoveRequest, TableAnswer, TableCall,
    Version, metrics,
};
use crate::apply::{ApplyAnswer, ApplyRequest, TopologyText};
use crate::connection_slots::{ConnectionSlot, ConnectionSlots};
use crate::control::inflight::InFlightList;
use crate::observe::trace::TraceOptions;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::Request;
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::io;
use std::os::unix::net::UnixListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::mpsc::Receiver;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Most connections at a time. Each request of our commands has a connection of its own, and few of them take
/// long.
const CONNECTIONS_MAX: usize = 256;
/// Longest time for a request's head, and longest idle time of a connection.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Pause when the process has no free descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bytes of a request to apply a topology: its text may have a device for each of some ten thousand disks.
const TOPOLOGY_LEN_MAX: usize = 64 << 20;

type Shared = State<Arc<dyn HostView>>;

/// Answers requests on `listener` until `until` resolves; requests in progress are then finished. Must run
/// within a tokio runtime that has I/O enabled.
///
/// # Errors
/// The socket cannot be registered with the runtime.
pub async fn serve(
    listener: UnixListener,
    view: Arc<dyn HostView>,
    until: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let (slots, routes) = (Arc::new(ConnectionSlots::new(CONNECTIONS_MAX)), routes(view));
    let (closing, closed) = watch::channel(false);
    let mut connections = JoinSet::new();
    tokio::pin!(until);
    loop {
        tokio::select! {
            () = &mut until => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    // A connection beyond the limit is closed at once.
                    let Some(slot) = slots.take() else { continue };
                    let (slots, routes, closed) = (slots.clone(), routes.clone(), closed.clone());
                    connections.spawn(async move {
                        answer(stream, routes, &slot, closed).await;
                        slots.release(&slot);
                    });
                }
                // No free descriptor, or the client is gone.
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
        }
    }
    closing.send_replace(true);
    while connections.join_next().await.is_some() {}
    Ok(())
}

/// Answers the requests of one connection until it ends, its slot is needed, or `closed` is set.
async fn answer(
    stream: UnixStream,
    routes: Router,
    slot: &Arc<ConnectionSlot>,
    mut closed: watch::Receiver<bool>,
) {
    let (routes, known) = (TowerToHyperService::new(routes), slot.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        known.keep();
        routes.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        // Errors of the connection concern only its client.
        _ = &mut connection => return,
        () = slot.evicted() => return,
        _ = closed.wait_for(|closed| *closed) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

fn routes(view: Arc<dyn HostView>) -> Router {
    Router::new()
        .route("/version", get(version))
        .route("/metrics", get(all_metrics))
        .route("/devices", get(devices))
        .route("/topology", get(topology).post(apply).layer(DefaultBodyLimit::max(TOPOLOGY_LEN_MAX)))
        .route("/targetcli", post(targetcli))
        .route("/devices/{name}", get(device).delete(delete).patch(change))
        .route("/devices/{name}/stats", get(stats))
        .route("/devices/{name}/inflight", get(in_flight))
        .route("/devices/{name}/trace", post(trace))
        .route("/devices/{name}/table", post(table))
        .fallback(|| async { error(StatusCode::NOT_FOUND, "no such path (try /devices)") })
        .method_not_allowed_fallback(|| async {
            error(StatusCode::METHOD_NOT_ALLOWED, "method not allowed here (see /devices)")
        })
        .with_state(view)
}

async fn version() -> Json<Version> {
    Json(Version {
        name: "blockyard".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
    })
}

async fn devices(State(view): Shared) -> Json<Vec<DeviceInfo>> {
    Json(view.devices())
}

async fn device(State(view): Shared, Path(name): Path<String>) -> Result<Json<DeviceInfo>, ControlError> {
    let slow = view.slow_facts(&name).await;
    let mut info = view.device(&name).ok_or(ControlError::NotFound)?;
    info.backend.extend(slow);
    Ok(Json(info))
}

async fn stats(State(view): Shared, Path(name): Path<String>) -> Result<Json<DeviceStats>, ControlError> {
    let counted = view.counted(&name).ok_or(ControlError::NotFound)?;
    Ok(Json(DeviceStats::new(&name, &counted)))
}

async fn in_flight(
    State(view): Shared,
    Path(name): Path<String>,
) -> Result<Json<InFlightList>, ControlError> {
    view.in_flight(&name).await.map(Json)
}

/// The body of a PATCH. No variant name occurs in both types, so the variant determines the type.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Patch {
    Move(MoveRequest),
    Change(Change),
}

async fn change(
    State(view): Shared,
    Path(name): Path<String>,
    Json(patch): Json<Patch>,
) -> Result<StatusCode, ControlError> {
    // A task of its own: a change that was begun is finished even if the client disconnects.
    let task = tokio::spawn(async move {
        match patch {
            Patch::Move(request) => view.move_contents(&name, request).await,
            Patch::Change(change) => view.change(&name, change).await,
        }
    });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(|()| StatusCode::NO_CONTENT)
}

async fn trace(
    State(view): Shared,
    Path(name): Path<String>,
    Json(options): Json<TraceOptions>,
) -> Result<Response, ControlError> {
    let chunks = Chunks(view.trace(&name, options)?);
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], Body::new(chunks)).into_response())
}

/// A streamed response.
struct Chunks(Receiver<Vec<u8>>);

impl hyper::body::Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk.into()))))
    }
}

async fn table(
    State(view): Shared,
    Path(name): Path<String>,
    Json(call): Json<TableCall>,
) -> Result<Json<TableAnswer>, ControlError> {
    // A client that waits for an event may disconnect; a table that is being loaded is loaded.
    if matches!(call, TableCall::Wait { .. }) {
        return view.table(&name, call).await.map(Json);
    }
    let task = tokio::spawn(async move { view.table(&name, call).await });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(Json)
}

async fn topology(State(view): Shared) -> Json<TopologyText> {
    Json(view.topology())
}

async fn apply(
    State(view): Shared,
    Json(request): Json<ApplyRequest>,
) -> Result<Json<ApplyAnswer>, ControlError> {
    // A task of its own: actions that were begun are finished even if the client hangs up.
    let task = tokio::spawn(async move { view.apply(request).await });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(Json)
}

async fn targetcli(
    State(view): Shared,
    Json(call): Json<serde_json::Value>,
) -> Result<Json<serde_json::Value>, ControlError> {
    // A task of its own: a command that was begun is finished even if the client hangs up.
    let task = tokio::spawn(async move { view.targetcli(call).await });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(Json)
}

async fn delete(
    State(view): Shared,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, ControlError> {
    let by_force = query.as_deref() == Some("force");
    // A task of its own: once begun, it is finished even if the client disconnects.
    let task = tokio::spawn(async move {
        if by_force { view.delete_by_force(&name).await } else { view.delete(&name).await }
    });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(|()| StatusCode::NO_CONTENT)
}

async fn all_metrics(State(view): Shared, headers: HeaderMap) -> Response {
    let format = Exposition::of(headers.get(header::ACCEPT).and_then(|kinds| kinds.to_str().ok()));
    ([(header::CONTENT_TYPE, format.content_type())], metrics::text(view, format)).into_response()
}

fn error(status: StatusCode, why: &str) -> Response {
    (status, Json(serde_json::json!({ "error": why }))).into_response()
}

impl IntoResponse for ControlError {
    fn into_response(self) -> Response {
        let status = match self {
            ControlError::NotFound => StatusCode::NOT_FOUND,
            ControlError::Busy(_) => StatusCode::CONFLICT,
            ControlError::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
            ControlError::Refused { errno, why } => {
                let body = Json(serde_json::json!({ "error": why, "errno": errno }));
                return (StatusCode::UNPROCESSABLE_ENTITY, body).into_response();
            }
        };
        error(status, &self.to_string())
    }
}
