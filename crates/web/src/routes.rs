//! HTTP requests and their answers.
//!
//! ```text
//! GET  /                        the page, without data of devices; with ?token= it keeps the token
//! GET  /entry                   asks for the token
//! GET  /assets/NAME             files of both
//! GET  /events[?device=NAME[&addresses]]    server-sent events: the list of devices, and details of one
//! GET  /history?device=NAME[&span=hour]    the last minutes, or the last hour, as JSON
//! GET  /devices                 the list of devices, as JSON
//! GET  /metrics                 metrics for Prometheus, no older than a second
//! POST /devices/NAME/actions    an action, as JSON, where that is allowed
//! ```

use crate::actions::Action;
use crate::assets::{self, Asset};
use crate::collect::{Latest, lock};
use crate::guard::{self, Refusal};
use crate::history::Span;
use crate::token::Token;
use crate::viewers::{Viewers, Wants, event};
use engine::connection_slots::ConnectionSlot;
use engine::control::{ControlError, Exposition, HostView};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, header};
use serde_json::json;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::mpsc::Receiver;

/// Longest body of an action, in bytes.
const BODY_MAX: usize = 4096;
/// Longest time in which the body may arrive.
const BODY_TIME: Duration = Duration::from_secs(5);

const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";

/// Headers of every answer: nothing is loaded from other servers, no script or style is inline, no page
/// frames this one, and no cache keeps anything.
const HEADERS: [(&str, &str); 7] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
         base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cache-control", "no-store"),
];

/// Shared state of all connections.
pub(crate) struct Pages {
    pub(crate) view: Arc<dyn HostView>,
    pub(crate) control: Handle,
    pub(crate) token: Option<Token>,
    pub(crate) actions: bool,
    pub(crate) shrink: bool,
    pub(crate) viewers: Arc<Viewers>,
    pub(crate) latest: Arc<Mutex<Latest>>,
}

/// The body of an answer.
pub(crate) enum Answer {
    Whole(Full<Bytes>),
    /// Events, until the viewer disconnects.
    Stream(Receiver<Bytes>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Answer::Whole(whole) => Pin::new(whole).poll_frame(context),
            Answer::Stream(stream) => {
                stream.poll_recv(context).map(|next| next.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Answer::Whole(whole) => whole.size_hint(),
            Answer::Stream(_) => hyper::body::SizeHint::default(),
        }
    }
}

fn answer(status: StatusCode, kind: &'static str, body: Answer) -> Response<Answer> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    for (name, value) in HEADERS {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Answer> {
    answer(status, kind, Answer::Whole(Full::new(body.into())))
}

fn failed(status: StatusCode, why: &str) -> Response<Answer> {
    whole(status, JSON, json!({ "error": why }).to_string())
}

fn file(asset: &'static Asset) -> Response<Answer> {
    whole(StatusCode::OK, asset.kind, asset.text)
}

/// Returns a file of the page. Files need no token, because they contain no data of devices.
fn public(path: &str) -> Option<Response<Answer>> {
    match path {
        "/" => Some(whole(StatusCode::OK, HTML, assets::INDEX)),
        "/entry" => Some(whole(StatusCode::OK, HTML, assets::ENTRY)),
        _ => path.strip_prefix("/assets/").and_then(assets::asset).map(file),
    }
}

impl Pages {
    /// Answers a request. `cut` is notified when its connection is to be closed; `slot` is the connection's
    /// slot, which is kept once a request on the connection had the token.
    pub(crate) async fn answer(
        &self,
        request: Request<Incoming>,
        cut: Arc<Notify>,
        slot: &ConnectionSlot,
    ) -> Response<Answer> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let is_read = matches!(parts.method, Method::GET | Method::HEAD);
        match guard::admit(&parts, self.token.as_ref()) {
            Ok(()) => slot.keep(),
            // A browser requests these files before it can send the token.
            Err(Refusal::Stranger) if is_read && let Some(response) = public(path) => return response,
            Err(refusal) => return failed(refusal.status(), refusal.why()),
        }
        let device = path.strip_prefix("/devices/").and_then(|rest| rest.strip_suffix("/actions"));
        match (&parts.method, device) {
            (&Method::POST, Some(name)) => self.act(name, body).await,
            (&Method::GET | &Method::HEAD, None) => self.show(path, &parts, cut),
            _ => failed(StatusCode::METHOD_NOT_ALLOWED, "this method is not allowed here"),
        }
    }

    fn show(&self, path: &str, parts: &Parts, cut: Arc<Notify>) -> Response<Answer> {
        match path {
            "/events" => self.events(parts, cut),
            "/devices" => whole(StatusCode::OK, JSON, lock(&self.latest).devices.clone()),
            "/metrics" => {
                let accept = parts.headers.get(header::ACCEPT).and_then(|kinds| kinds.to_str().ok());
                let form = Exposition::of(accept);
                let mut latest = lock(&self.latest);
                let text = latest.metrics[form as usize]
                    .get_or_insert_with(|| engine::control::metrics(self.view.clone(), form).into());
                whole(StatusCode::OK, form.content_type(), text.clone())
            }
            "/history" => {
                let device = guard::query(parts, "device").unwrap_or_default();
                let span = match guard::query(parts, "span") {
                    None | Some("minutes") => Span::Minutes,
                    Some("hour") => Span::Hour,
                    Some(_) => return failed(StatusCode::BAD_REQUEST, "a span is minutes or hour"),
                };
                match lock(&self.latest).history(device, span) {
                    Some(history) => whole(StatusCode::OK, JSON, history),
                    None => failed(StatusCode::NOT_FOUND, "no such device"),
                }
            }
            _ => public(path).unwrap_or_else(|| failed(StatusCode::NOT_FOUND, "not found")),
        }
    }

    fn events(&self, parts: &Parts, cut: Arc<Notify>) -> Response<Answer> {
        let addresses = parts
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .any(|word| word.split('=').next() == Some("addresses"));
        let wants = Wants { device: guard::query(parts, "device").map(str::to_owned), addresses };
        let hello = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "actions": self.actions,
            "host": rustix::system::uname().nodename().to_string_lossy(),
        });
        let mut first = vec![event("hello", &hello.to_string())];
        let devices = lock(&self.latest).devices.clone();
        if let Ok(devices) = std::str::from_utf8(&devices)
            && !devices.is_empty()
        {
            first.push(event("tick", devices));
        }
        match self.viewers.add(wants, &first, cut) {
            Some(stream) => answer(StatusCode::OK, "text/event-stream", Answer::Stream(stream)),
            None => failed(StatusCode::SERVICE_UNAVAILABLE, "too many viewers (close a page)"),
        }
    }

    async fn act(&self, name: &str, body: Incoming) -> Response<Answer> {
        if !self.actions {
            let why = "actions are not allowed (serve with --web-allow actions)";
            return failed(StatusCode::FORBIDDEN, why);
        }
        let body = tokio::time::timeout(BODY_TIME, Limited::new(body, BODY_MAX).collect()).await;
        let Ok(Ok(body)) = body else {
            return failed(StatusCode::BAD_REQUEST, "the action is incomplete or too long");
        };
        let action: Action = match serde_json::from_slice(&body.to_bytes()) {
            Ok(action) => action,
            Err(why) => return failed(StatusCode::BAD_REQUEST, &format!("invalid action: {why}")),
        };
        if matches!(action, Action::Resize { shrink: true, .. }) && !self.shrink {
            let why =
                "the page may not make devices smaller (serve with --web-allow shrink, or: blockyard resize)";
            return failed(StatusCode::FORBIDDEN, why);
        }
        match action.carry_out(name.to_owned(), self.view.clone(), &self.control).await {
            Ok(()) => whole(StatusCode::OK, JSON, "{}"),
            Err(why) => {
                let status = match why {
                    ControlError::NotFound => StatusCode::NOT_FOUND,
                    ControlError::Busy(_) => StatusCode::CONFLICT,
                    ControlError::Failed(_) | ControlError::Refused { .. } => {
                        StatusCode::UNPROCESSABLE_ENTITY
                    }
                };
                failed(status, &why.to_string())
            }
        }
    }
}
