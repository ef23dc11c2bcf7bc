//! `--web`: the words that ask for a page of the process's devices.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use web::{Listening, Token, WebAddress, WebConfig};

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
    /// Whether the page of a device whose server is brought back, and whose new lines nobody reads, is found again.
    ///
    /// # Errors
    /// It would have another token, or another port, each time.
    pub(crate) fn check_supervised(&self, what: &str, supervised: bool) -> Result<(), Failure> {
        let Some(text) = self.web.as_ref().filter(|_| supervised) else { return Ok(()) };
        if self.web_token.is_none() {
            let why = "with --supervise, a server that is brought back would make a token that nobody is told \
                       (give --web-token FILE, which keeps it)";
            return Err(Failure::usage(what, "--web", why));
        }
        if text.parse::<WebAddress>().is_ok_and(|address| address.0.port() == 0) {
            let why = "with --supervise, a server that is brought back would choose a port that nobody is told \
                       (name one)";
            return Err(Failure::usage(what, "--web", why));
        }
        Ok(())
    }

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
