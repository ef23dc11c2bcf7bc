//! `--web`: the words that ask for a page of the process's devices.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use engine::ublk::KeptPage;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use web::{Listening, Token, WebAddress, WebConfig, WebError};

/// How the page is asked for.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Page")]
pub(crate) struct WebArgs {
    /// Show the devices on a page, live: 127.0.0.1:PORT. Its address is printed, with the token that one has to know
    #[arg(long, value_name = "ADDRESS")]
    web: Option<String>,
    /// The file of the token, which is made if it is not there; none: without [default: a new one each time]
    #[arg(long, value_name = "FILE|none", requires = "web")]
    web_token: Option<PathBuf>,
    /// What the page may do besides showing [default: nothing]
    #[arg(long, value_name = "WHAT", requires = "web")]
    web_allow: Option<Allowed>,
}

/// What a page may do.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Allowed {
    /// Fail and reinstate paths, suspend, resume and resize devices, switch direct I/O
    Actions,
}

impl WebArgs {
    /// Listen where they say, if they do. What makes no sense is found out before anything else is touched.
    ///
    /// # Errors
    /// The address or the token.
    pub(crate) fn listen(&self, what: &str) -> Result<Option<Listening>, Failure> {
        let Some(text) = &self.web else { return Ok(None) };
        let address: WebAddress = text.parse().map_err(|why| Failure::usage(what, "--web", why))?;
        let token = match self.web_token.as_deref() {
            Some(file) if file == Path::new("none") => None,
            Some(file) => Some(Token::of_file(file)),
            None => Some(Token::random()),
        };
        let token = token.transpose().map_err(|why| Failure::new(what, "--web-token", why))?;
        let config = WebConfig { address, token, actions: self.web_allow.is_some() };
        Listening::open(config).map(Some).map_err(|why| Failure::new(what, "--web", why))
    }
}

/// What a process needs that is to bring this page back.
pub(crate) fn kept(page: &Listening) -> KeptPage {
    let config = page.config();
    KeptPage {
        address: page.address(),
        token: config.token.as_ref().map(|token| token.text().to_owned()),
        actions: config.actions,
    }
}

/// Listen where the page of a process was that is gone, with its token. Where another one is by now, which may be that of
/// a device that was brought back before, a port beside it is found.
///
/// # Errors
/// The address; a record that somebody wrote in.
pub(crate) fn again(kept: &KeptPage) -> Result<Listening, Failure> {
    let fail = |why: &dyn std::fmt::Display| Failure::new("recover", "--web", why);
    let token = match &kept.token {
        Some(text) => Some(Token::known(text).ok_or_else(|| fail(&"its record has no token of a page"))?),
        None => None,
    };
    let config = WebConfig { address: WebAddress(kept.address), token, actions: kept.actions };
    let page = Listening::open(config.clone()).or_else(|why| match why {
        WebError::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
            Listening::open(WebConfig {
                address: WebAddress(SocketAddr::new(kept.address.ip(), 0)),
                ..config
            })
        }
        other => Err(other),
    });
    page.map_err(|why| fail(&why))
}
