//! The listener and its thread: connections, of which there are so many and no more, and their end.

use crate::address::WebAddress;
use crate::collect::{Collector, Latest};
use crate::routes::Pages;
use crate::token::Token;
use crate::viewers::Viewers;
use engine::control::Yard;
use engine::places::{Place, Places};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::{set_tcp_nodelay, set_tcp_user_timeout};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, oneshot};

/// Connections at once: browsers open up to six each. When there are more, those go that have not shown the token.
const CONNECTIONS_MAX: usize = 512;
/// How long a request's head may take, and how long a connection may be idle.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long what was sent may go unacknowledged.
const UNSENT_TIME_MS: u32 = 10_000;
/// Bytes of a request's head, at most.
const HEAD_MAX: usize = 16 << 10;
/// How long to wait when the process has no descriptor left.
const SHORTAGE: Duration = Duration::from_millis(200);
/// The thread takes what others leave.
const NICE: i32 = 19;

/// How a page is served.
#[derive(Clone, Debug)]
pub struct WebConfig {
    /// Where.
    pub address: WebAddress,
    /// What one has to know; `None`: everybody who reaches it sees it.
    pub token: Option<Token>,
    /// Whether it may change devices.
    pub actions: bool,
    /// Whether it may also make them smaller, which loses what lies behind their new end.
    pub shrink: bool,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// The address.
    #[error("{address}: {source}{hint}")]
    Listen {
        /// Which.
        address: WebAddress,
        /// Why not.
        source: io::Error,
        /// What to do about it.
        hint: &'static str,
    },
    /// Everybody on the network would see it.
    #[error(
        "{0} can be reached from the network, and without a token everybody there would see the page (listen on 127.0.0.1, or leave out --web-token none)"
    )]
    Open(WebAddress),
    /// The system.
    #[error("no thread for it: {0}")]
    Thread(#[source] io::Error),
}

/// A page that is served, until this is dropped.
pub struct Page {
    url: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Page {
    /// What to open in a browser, with the token.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It cannot have panicked without having said so.
            let _ = thread.join();
        }
    }
}

/// An address that is listened on. Who connects waits until it is served.
#[derive(Debug)]
pub struct Listening {
    config: WebConfig,
    listener: TcpListener,
    bound: SocketAddr,
}

impl Listening {
    /// Listen.
    ///
    /// # Errors
    /// [`WebError::Listen`] and [`WebError::Open`].
    pub fn open(config: WebConfig) -> Result<Listening, WebError> {
        let address = config.address;
        if config.token.is_none() && !address.is_local() {
            return Err(WebError::Open(address));
        }
        let failed = |source: io::Error| {
            let hint = match source.kind() {
                io::ErrorKind::AddrInUse => " (choose another port, or 0 for any)",
                io::ErrorKind::PermissionDenied => " (choose a port from 1024 on)",
                io::ErrorKind::AddrNotAvailable => " (no address of this machine: try 127.0.0.1)",
                _ => "",
            };
            WebError::Listen { address, source, hint }
        };
        let listener = TcpListener::bind(address.0).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        Ok(Listening { config, listener, bound })
    }

    /// Where that is: the port is one.
    pub fn address(&self) -> SocketAddr {
        self.bound
    }

    /// How it is to be served.
    pub fn config(&self) -> &WebConfig {
        &self.config
    }

    /// Show the devices of a process there. `control` is the runtime on which they are changed.
    ///
    /// # Errors
    /// [`WebError::Thread`].
    pub fn serve(self, yard: Arc<dyn Yard>, control: Handle) -> Result<Page, WebError> {
        let Listening { config: WebConfig { token, actions, shrink, .. }, listener, bound } = self;
        let url = match &token {
            Some(token) => format!("http://{bound}/?token={}", token.text()),
            None => format!("http://{bound}/"),
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(WebError::Thread)?;
        let (viewers, latest) = (Arc::new(Viewers::default()), Arc::new(Mutex::new(Latest::default())));
        let collector = Collector::new(yard.clone(), viewers.clone(), latest.clone());
        let pages = Pages { yard, control, token, actions, shrink, viewers, latest };
        let (stop, stopped) = oneshot::channel::<()>();
        let work = move || {
            // Where that is not allowed it goes on as it is: it may take its turn like any thread.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
            runtime.block_on(async move {
                tokio::select! {
                    _ = stopped => {}
                    () = collector.run() => {}
                    why = accept(listener, Arc::new(pages)) => tracing::error!("the page ended: {why}"),
                }
            });
            // Connections go with it.
        };
        let thread = std::thread::Builder::new().name("web".to_owned()).spawn(work);
        Ok(Page { url, stop: Some(stop), thread: Some(thread.map_err(WebError::Thread)?) })
    }
}

/// Take connections in; returns why no more come.
async fn accept(listener: TcpListener, pages: Arc<Pages>) -> io::Error {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(why) => return why,
    };
    let places = Arc::new(Places::new(CONNECTIONS_MAX));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // Of a client that is gone already, or for want of descriptors: others may have more luck.
            Err(_) => {
                tokio::time::sleep(SHORTAGE).await;
                continue;
            }
        };
        // Where all have the token, one too many is closed at once.
        let Some(place) = places.enter() else { continue };
        // Without these a connection is only slower, or stays longer.
        let _ = set_tcp_nodelay(&stream, true);
        let _ = set_tcp_user_timeout(&stream, UNSENT_TIME_MS);
        let (pages, places) = (pages.clone(), places.clone());
        tokio::spawn(async move {
            serve(stream, pages, &place).await;
            places.leave(&place);
        });
    }
}

async fn serve(stream: tokio::net::TcpStream, pages: Arc<Pages>, place: &Arc<Place>) {
    let cut = Arc::new(Notify::new());
    let (told, known) = (cut.clone(), place.clone());
    let service = service_fn(move |request| {
        let (pages, cut, known) = (pages.clone(), cut.clone(), known.clone());
        async move { Ok::<_, Infallible>(pages.answer(request, cut, &known).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // What went wrong on it is its client's matter.
        _ = connection => {}
        () = told.notified() => {}
        () = place.cut() => {}
    }
}
