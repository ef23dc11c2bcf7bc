//! The server half: routes to a [`Yard`].

use super::{
    Change, ControlError, DeviceInfo, DeviceStats, Exposition, TableAnswer, TableCall, Version, Yard, metrics,
};
use crate::places::{Place, Places};
use crate::slow::InFlightList;
use crate::trace::TraceOptions;
use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
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

/// Connections at a time. Each request of our commands comes on a connection of its own, and few of them take long.
const CONNECTIONS_MAX: usize = 256;
/// How long a request's head may take, and how long a connection may be idle.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long to wait when the process has no descriptor left.
const SHORTAGE: Duration = Duration::from_millis(100);

type Shared = State<Arc<dyn Yard>>;

/// Answers on `listener` until `until` ends; answers under way are then finished. Must run within a
/// tokio runtime that has I/O enabled.
///
/// # Errors
/// The socket cannot be registered with the runtime.
pub async fn serve(
    listener: UnixListener,
    yard: Arc<dyn Yard>,
    until: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let (places, routes) = (Arc::new(Places::new(CONNECTIONS_MAX)), routes(yard));
    let (closing, closed) = watch::channel(false);
    let mut connections = JoinSet::new();
    tokio::pin!(until);
    loop {
        tokio::select! {
            () = &mut until => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    // One too many is closed at once.
                    let Some(place) = places.enter() else { continue };
                    let (places, routes, closed) = (places.clone(), routes.clone(), closed.clone());
                    connections.spawn(async move {
                        answer(stream, routes, &place, closed).await;
                        places.leave(&place);
                    });
                }
                // For want of descriptors, or of a client that is gone.
                Err(_) => tokio::time::sleep(SHORTAGE).await,
            },
        }
    }
    closing.send_replace(true);
    while connections.join_next().await.is_some() {}
    Ok(())
}

/// Answers the requests of one connection until it ends, its place is needed, or all are `closed`.
async fn answer(stream: UnixStream, routes: Router, place: &Arc<Place>, mut closed: watch::Receiver<bool>) {
    let (routes, known) = (TowerToHyperService::new(routes), place.clone());
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
        // What went wrong on it is its client's matter.
        _ = &mut connection => return,
        () = place.cut() => return,
        _ = closed.wait_for(|closed| *closed) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

fn routes(yard: Arc<dyn Yard>) -> Router {
    Router::new()
        .route("/version", get(version))
        .route("/metrics", get(all_metrics))
        .route("/devices", get(devices))
        .route("/devices/{name}", get(device).delete(delete).patch(change))
        .route("/devices/{name}/stats", get(stats))
        .route("/devices/{name}/inflight", get(in_flight))
        .route("/devices/{name}/trace", post(trace))
        .route("/devices/{name}/table", post(table))
        .fallback(|| async { error(StatusCode::NOT_FOUND, "there is nothing here (try /devices)") })
        .method_not_allowed_fallback(|| async {
            error(StatusCode::METHOD_NOT_ALLOWED, "this cannot be done here (see /devices)")
        })
        .with_state(yard)
}

async fn version() -> Json<Version> {
    Json(Version {
        name: "blockyard".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
    })
}

async fn devices(State(yard): Shared) -> Json<Vec<DeviceInfo>> {
    Json(yard.devices())
}

async fn device(State(yard): Shared, Path(name): Path<String>) -> Result<Json<DeviceInfo>, ControlError> {
    let slow = yard.slow_facts(&name).await;
    let mut info = yard.device(&name).ok_or(ControlError::NotFound)?;
    info.backend.extend(slow);
    Ok(Json(info))
}

async fn stats(State(yard): Shared, Path(name): Path<String>) -> Result<Json<DeviceStats>, ControlError> {
    let counted = yard.counted(&name).ok_or(ControlError::NotFound)?;
    Ok(Json(DeviceStats::new(&name, &counted)))
}

async fn in_flight(
    State(yard): Shared,
    Path(name): Path<String>,
) -> Result<Json<InFlightList>, ControlError> {
    yard.in_flight(&name).await.map(Json)
}

async fn change(
    State(yard): Shared,
    Path(name): Path<String>,
    Json(change): Json<Change>,
) -> Result<StatusCode, ControlError> {
    // As with a deletion: once begun, it is finished.
    let task = tokio::spawn(async move { yard.change(&name, change).await });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(|()| StatusCode::NO_CONTENT)
}

async fn trace(
    State(yard): Shared,
    Path(name): Path<String>,
    Json(options): Json<TraceOptions>,
) -> Result<Response, ControlError> {
    let chunks = Chunks(yard.trace(&name, options)?);
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], Body::new(chunks)).into_response())
}

/// An answer that goes on as long as there is something to tell.
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
    State(yard): Shared,
    Path(name): Path<String>,
    Json(call): Json<TableCall>,
) -> Result<Json<TableAnswer>, ControlError> {
    // Whoever waits for an event may hang up; a table that is being loaded is loaded.
    if matches!(call, TableCall::Wait { .. }) {
        return yard.table(&name, call).await.map(Json);
    }
    let task = tokio::spawn(async move { yard.table(&name, call).await });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(Json)
}

async fn delete(
    State(yard): Shared,
    Path(name): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, ControlError> {
    let by_force = query.as_deref() == Some("force");
    // A task of its own: once begun, it is finished even if whoever asked hangs up.
    let task = tokio::spawn(async move {
        if by_force { yard.delete_by_force(&name).await } else { yard.delete(&name).await }
    });
    let done = task.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())));
    done.map(|()| StatusCode::NO_CONTENT)
}

async fn all_metrics(State(yard): Shared, headers: HeaderMap) -> Response {
    let form = Exposition::of(headers.get(header::ACCEPT).and_then(|kinds| kinds.to_str().ok()));
    ([(header::CONTENT_TYPE, form.content_type())], metrics::text(yard, form)).into_response()
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
