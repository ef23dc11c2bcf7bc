//! `--web`: options of the process's web page, and its restoration after `recover`.

use crate::failure::Failure;
use crate::holder;
use attach::ublk::{PageRecord, PageToken};
use clap::{Args, ValueEnum};
use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use web::{Listening, Token, WebAddress, WebConfig, WebError, is_ours};

/// Options of the web page.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Page")]
pub(crate) struct WebArgs {
    /// A live page at 127.0.0.1:PORT; prints its URL
    #[arg(long, value_name = "ADDRESS")]
    web: Option<String>,
    /// The page's token is in FILE; none: no token
    #[arg(long, value_name = "FILE", requires = "web")]
    web_token: Option<PathBuf>,
    /// The page may change devices: actions, shrink
    #[arg(
        long,
        value_name = "WHAT,...",
        hide_possible_values = true,
        requires = "web",
        value_delimiter = ','
    )]
    web_allow: Vec<Allowed>,
}

/// Changes that the page may make.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Allowed {
    /// Fail and reinstate paths, suspend, resume and grow devices, switch direct I/O
    Actions,
    /// All that, and make devices smaller: what lies behind the new end is lost
    Shrink,
}

impl WebArgs {
    /// Opens the page's listening socket, if the options ask for a page. Called before any device is opened, so that
    /// invalid options have no effect.
    ///
    /// # Errors
    /// The address is invalid or in use, or the token cannot be read.
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
        let listening = Listening::open(config)
            .map_err(|why| Failure::new(what, "--web", holder::with_listener(why.to_string())))?;
        if !address.is_local() {
            eprintln!("blockyard: --web {}: {}", listening.address(), reach(!self.web_allow.is_empty()));
        }
        Ok(Some(listening))
    }
}

/// Returns the warning for a page on an address that other machines can reach.
fn reach(may_change: bool) -> String {
    let what = if may_change { "see and change the devices" } else { "see the devices" };
    format!(
        "other machines can reach this page; all who have its token can {what}, and nothing is encrypted (for this machine only: \
         --web 127.0.0.1:PORT)"
    )
}

/// Returns the record with which another process can restore this page.
pub(crate) fn kept(page: &Listening) -> PageRecord {
    let config = page.config();
    let token = config.token.as_ref().map(|token| match token.file() {
        // Only the path of the file is recorded, as the user revokes a token by replacing the file's
        // content.
        Some(file) if file.to_str().is_some() => PageToken::File { file: file.to_owned() },
        // A record is UTF-8 text, which cannot hold every path, so the token itself is recorded.
        _ => PageToken::Text(token.text().to_owned()),
    });
    PageRecord { address: page.address(), token, actions: config.actions, shrink: config.shrink }
}

/// Restores the page of a dead process at its address, with its token. If the address is in use, for example by the
/// page of another recovered device, another port is chosen.
///
/// # Errors
/// The address cannot be bound, the record has no valid token, or the token's file cannot be read.
pub(crate) fn again(kept: &PageRecord) -> Result<Listening, Failure> {
    let fail = |why: &dyn Display| Failure::new("recover", "--web", why);
    let token = match &kept.token {
        Some(PageToken::Text(text)) => Some(
            Token::known(text).ok_or_else(|| fail(&"the device's record has no valid token for the page"))?,
        ),
        Some(PageToken::File { file }) => Some(Token::of_file(file).map_err(|why| fail(&why))?),
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

/// Opens the page on another port. `ours`: the process on the page's old port belongs to this user. Open browsers send
/// the token to that process, so if it belongs to another user, the token is replaced.
fn beside(config: WebConfig, ours: bool) -> Result<Listening, Failure> {
    let fail = |why: &dyn Display| Failure::new("recover", "--web", why);
    let mut token = config.token;
    if !ours && token.is_some() {
        let why = "a browser may have sent the token to another user's process on the old port";
        eprintln!("blockyard: recover: --web: {}: {why}: the page has a new token", config.address);
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
    fn a_restored_page_reads_its_token_file_again() {
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
        assert!(
            why.contains(&*file.to_string_lossy()) && why.contains("it does not contain a token"),
            "{why}"
        );
    }

    #[test]
    fn a_page_keeps_its_token_if_its_address_is_used_by_the_same_user() {
        let first = page(Some(Token::random().expect("a token")));
        let second = again(&kept(&first)).expect("it comes back");
        assert_ne!(second.address(), first.address());
        assert_eq!(text(&second), text(&first));
    }

    #[test]
    fn a_page_gets_a_new_token_if_its_address_is_used_by_another_user() {
        let first = page(Some(Token::random().expect("a token")));
        let config = WebConfig { address: WebAddress(first.address()), ..first.config().clone() };
        let second = beside(config.clone(), false).expect("it comes back");
        assert_ne!(text(&second), text(&first));
        let kept = kept(&second);
        assert!(kept.token == Some(PageToken::Text(text(&second))) && kept.address == second.address());
        let open = beside(WebConfig { token: None, ..config }, false).expect("it comes back");
        assert!(open.config().token.is_none(), "a page without a token needs no new one");
    }
}
