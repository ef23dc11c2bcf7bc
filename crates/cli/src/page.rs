//! `--web`: the words that ask for a page of the process's devices.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use engine::ublk::{KeptPage, KeptToken};
use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use web::{Listening, Token, WebAddress, WebConfig, WebError, is_ours};

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
    #[arg(long, value_name = "WHAT,...", requires = "web", value_delimiter = ',')]
    web_allow: Vec<Allowed>,
}

/// What a page may do.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Allowed {
    /// Fail and reinstate paths, suspend, resume and grow devices, switch direct I/O
    Actions,
    /// All that, and make devices smaller: what lies behind the new end is lost
    Shrink,
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
        let (actions, shrink) = (!self.web_allow.is_empty(), self.web_allow.contains(&Allowed::Shrink));
        let config = WebConfig { address, token, actions, shrink };
        Listening::open(config).map(Some).map_err(|why| Failure::new(what, "--web", why))
    }
}

/// What a process needs that is to bring this page back.
pub(crate) fn kept(page: &Listening) -> KeptPage {
    let config = page.config();
    let token = config.token.as_ref().map(|token| match token.file() {
        // Whoever named a file writes another token there when this one is to be no more.
        Some(file) if file.to_str().is_some() => KeptToken::File { file: file.to_owned() },
        // What is kept is text.
        _ => KeptToken::Text(token.text().to_owned()),
    });
    KeptPage { address: page.address(), token, actions: config.actions, shrink: config.shrink }
}

/// Listen where the page of a process was that is gone, with its token. Where another one is by now, which may be that of
/// a device that was brought back before, a port beside it is found.
///
/// # Errors
/// The address; a record that somebody wrote in; the file of the token.
pub(crate) fn again(kept: &KeptPage) -> Result<Listening, Failure> {
    let fail = |why: &dyn Display| Failure::new("recover", "--web", why);
    let token = match &kept.token {
        Some(KeptToken::Text(text)) => {
            Some(Token::known(text).ok_or_else(|| fail(&"its record has no token of a page"))?)
        }
        Some(KeptToken::File { file }) => Some(Token::of_file(file).map_err(|why| fail(&why))?),
        None => None,
    };
    let (actions, shrink) = (kept.actions, kept.shrink);
    let config = WebConfig { address: WebAddress(kept.address), token, actions, shrink };
    match Listening::open(config.clone()) {
        Err(WebError::Listen { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {
            beside(config, is_ours(kept.address.port()))
        }
        page => page.map_err(|why| fail(&why)),
    }
}

/// Listen on another port. `ours`: whoever has that of the page is of this user. Browsers that have the page open send its
/// token to whoever that is, so what another user may have been told is no secret any more.
fn beside(config: WebConfig, ours: bool) -> Result<Listening, Failure> {
    let fail = |why: &dyn Display| Failure::new("recover", "--web", why);
    let mut token = config.token;
    if !ours && token.is_some() {
        let why = "another user may have been sent the token of the page by a browser that had it open";
        eprintln!("blockyard: recover: --web: {}: {why}: it has a new one", config.address);
        token = Some(Token::random().map_err(|why| fail(&why))?);
    }
    let address = WebAddress(SocketAddr::new(config.address.0.ip(), 0));
    Listening::open(WebConfig { address, token, ..config }).map_err(|why| fail(&why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(page: &Listening) -> String {
        page.config().token.as_ref().expect("a token").text().to_owned()
    }

    fn page(token: Option<Token>) -> Listening {
        let address = "127.0.0.1:0".parse().expect("an address");
        Listening::open(WebConfig { address, token, actions: true, shrink: true }).expect("it listens")
    }

    #[test]
    fn a_page_comes_back_with_what_the_file_of_its_token_holds_by_now() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("token");
        let first = page(Some(Token::of_file(&file).expect("it is made")));
        let kept = kept(&first);
        assert!(!serde_json::to_string(&kept).expect("JSON").contains(&text(&first)), "only the file has it");
        drop(first);
        std::fs::write(&file, "another-token-of-the-user\n").expect("it is written");
        let second = again(&kept).expect("it comes back");
        assert_eq!(text(&second), "another-token-of-the-user");
        assert!(second.config().actions && second.config().shrink && self::kept(&second).token == kept.token);
        drop(second);
        std::fs::write(&file, "short").expect("it is written");
        let why = again(&kept).expect_err("it is no token").to_string();
        assert!(why.contains(&*file.to_string_lossy()) && why.contains("it holds no token"), "{why}");
    }

    #[test]
    fn a_page_whose_address_another_one_of_the_same_user_has_keeps_its_token() {
        let first = page(Some(Token::random().expect("a token")));
        let second = again(&kept(&first)).expect("it comes back");
        assert_ne!(second.address(), first.address());
        assert_eq!(text(&second), text(&first));
    }

    #[test]
    fn a_page_whose_address_another_user_has_gets_a_new_token() {
        let first = page(Some(Token::random().expect("a token")));
        let config = WebConfig { address: WebAddress(first.address()), ..first.config().clone() };
        let second = beside(config.clone(), false).expect("it comes back");
        assert_ne!(text(&second), text(&first));
        let kept = kept(&second);
        assert!(kept.token == Some(KeptToken::Text(text(&second))) && kept.address == second.address());
        let open = beside(WebConfig { token: None, ..config }, false).expect("it comes back");
        assert!(open.config().token.is_none(), "there was nothing to be told");
    }
}
