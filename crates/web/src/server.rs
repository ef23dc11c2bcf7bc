//! The listener and its thread, which accepts a bounded number of connections and closes idle ones.

use crate::address::{WebAddress, reachable};
use crate::collect::{Collector, Latest};
use crate::routes::Pages;
use crate::token::Token;
use crate::viewers::Viewers;
use engine::connection_slots::{ConnectionSlot, ConnectionSlots};
use engine::control::HostView;
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

/// Largest number of connections: a browser opens up to six. Beyond it, connections that have not sent the
/// token are closed first.
const CONNECTIONS_MAX: usize = 512;
/// Longest time in which the head of a request may arrive, and for which a connection may be idle.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Longest time for which sent data may stay unacknowledged, in milliseconds.
const UNSENT_TIME_MS: u32 = 10_000;
/// Longest head of a request, in bytes.
const HEAD_MAX: usize = 16 << 10;
/// Pause after a failure to accept a connection, for example if the process has no descriptor left.
const SHORTAGE: Duration = Duration::from_millis(200);
/// Nice value of the thread: the lowest priority.
const NICE: i32 = 19;

/// Configuration of a page.
#[derive(Clone, Debug)]
pub struct WebConfig {
    /// Address to listen on.
    pub address: WebAddress,
    /// Secret of the users; `None`: everybody who can reach the address may see the page.
    pub token: Option<Token>,
    /// Whether users of the page may change devices.
    pub actions: bool,
    /// Whether they may also shrink devices, which loses the data behind the new end.
    pub shrink: bool,
}

/// The reason why a page cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// Listening on the address failed.
    #[error("{address}: {source}{hint}")]
    Listen {
        /// The address.
        address: WebAddress,
        /// The error of the operating system.
        source: io::Error,
        /// Advice for the user; may be empty.
        hint: &'static str,
    },
    /// The address can be reached from the network, and no token is configured.
    #[error(
        "{0} can be reached from the network, and without a token everybody there would see the page (listen on 127.0.0.1, or leave out --web-token none)"
    )]
    Open(WebAddress),
    /// The operating system could not create a thread or an epoll descriptor.
    #[error("could not start its thread: {0}")]
    Thread(#[source] io::Error),
}

/// A page in service. Dropping this ends the service.
pub struct Page {
    url: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Page {
    /// Returns the address to open in a browser, with the token.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by its hook.
            let _ = thread.join();
        }
    }
}

/// A socket that listens. Connections wait in its backlog until [`serve`](Listening::serve) is called.
#[derive(Debug)]
pub struct Listening {
    config: WebConfig,
    listener: TcpListener,
    bound: SocketAddr,
}

impl Listening {
    /// Listens on the address of a configuration.
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

    /// Returns the address that the socket is bound to, with the port that the kernel chose for port 0.
    pub fn address(&self) -> SocketAddr {
        self.bound
    }

    /// Returns the configuration.
    pub fn config(&self) -> &WebConfig {
        &self.config
    }

    /// Serves a page that shows the devices of `view`. Actions run on the runtime `control`.
    ///
    /// # Errors
    /// [`WebError::Thread`].
    pub fn serve(self, view: Arc<dyn HostView>, control: Handle) -> Result<Page, WebError> {
        let Listening { config: WebConfig { token, actions, shrink, .. }, listener, bound } = self;
        let reached = reachable(bound);
        let url = match &token {
            Some(token) => format!("http://{reached}/?token={}", token.text()),
            None => format!("http://{reached}/"),
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(WebError::Thread)?;
        let (viewers, latest) = (Arc::new(Viewers::default()), Arc::new(Mutex::new(Latest::default())));
        let collector = Collector::new(view.clone(), viewers.clone(), latest.clone());
        let pages = Pages { view, control, token, actions, shrink, viewers, latest };
        let (stop, stopped) = oneshot::channel::<()>();
        let work = move || {
            // Without permission the thread keeps its priority.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE);
            runtime.block_on(async move {
                tokio::select! {
                    _ = stopped => {}
                    () = collector.run() => {}
                    why = accept(listener, Arc::new(pages)) => tracing::error!("the page ended: {why}"),
                }
            });
            // The connections end with the runtime.
        };
        let thread = std::thread::Builder::new().name("web".to_owned()).spawn(work);
        Ok(Page { url, stop: Some(stop), thread: Some(thread.map_err(WebError::Thread)?) })
    }
}

/// Accepts connections until the future is dropped. Returns an error only if the runtime cannot register the
/// listener.
async fn accept(listener: TcpListener, pages: Arc<Pages>) -> io::Error {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(why) => return why,
    };
    let slots = Arc::new(ConnectionSlots::new(CONNECTIONS_MAX));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // The client has disconnected already, or no descriptor is left: later connections may succeed.
            Err(_) => {
                tokio::time::sleep(SHORTAGE).await;
                continue;
            }
        };
        // If all connections have sent the token, this one is closed at once.
        let Some(slot) = slots.take() else { continue };
        // Failures are ignored: without these options a connection is slower, or ends later.
        let _ = set_tcp_nodelay(&stream, true);
        let _ = set_tcp_user_timeout(&stream, UNSENT_TIME_MS);
        let (pages, slots) = (pages.clone(), slots.clone());
        tokio::spawn(async move {
            serve(stream, pages, &slot).await;
            slots.release(&slot);
        });
    }
}

async fn serve(stream: tokio::net::TcpStream, pages: Arc<Pages>, slot: &Arc<ConnectionSlot>) {
    let cut = Arc::new(Notify::new());
    let (was_cut, known) = (cut.clone(), slot.clone());
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
        // Errors of a connection concern its client only.
        _ = connection => {}
        () = was_cut.notified() => {}
        () = slot.evicted() => {}
    }
}
