//! Who may ask for what. Decided on the head of a request, before anything else is looked at.
//!
//! Three ways lead here: the person who was given the token; a script with it; and a browser that another page sent.
//! Against the last, the host that was asked for must be an address or `localhost`, which no name of a foreign domain
//! can be made to look like (DNS rebinding), and what changes something must come from a page of this very origin.

use crate::token::Token;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, COOKIE, HOST, HeaderName, ORIGIN};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use std::net::IpAddr;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// Somebody with the token, or nobody needs one.
    Granted,
    /// The token was in the address: it is put where it is not seen.
    Introduced,
}

/// Why not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// No token, or another.
    Stranger,
    /// It was asked for under a name.
    Host,
    /// Another page sent the browser.
    Origin,
    /// It is no JSON, which other pages could send unasked.
    ContentType,
}

impl Refusal {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Refusal::Stranger => StatusCode::UNAUTHORIZED,
            Refusal::Host | Refusal::Origin => StatusCode::FORBIDDEN,
            Refusal::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        }
    }

    pub(crate) fn why(self) -> &'static str {
        match self {
            Refusal::Stranger => {
                "the token is missing or wrong (open the address that was printed at the start)"
            }
            Refusal::Host => "it is to be asked for by its address, or as localhost",
            Refusal::Origin => "another page asked for this",
            Refusal::ContentType => "this takes application/json",
        }
    }
}

fn text(parts: &Parts, name: HeaderName) -> Option<&str> {
    parts.headers.get(name)?.to_str().ok()
}

/// Browsers keep cookies of all ports of an address together: each page has one of its own.
pub(crate) fn cookie_name(port: u16) -> String {
    format!("blockyard-{port}")
}

/// One word of a query, as it stands.
pub(crate) fn query<'a>(parts: &'a Parts, name: &str) -> Option<&'a str> {
    let pairs = parts.uri.query().unwrap_or_default().split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

fn cookie<'a>(parts: &'a Parts, name: &str) -> Option<&'a str> {
    let all = parts.headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// Whether a `Host` is none that a foreign name server could have had a hand in.
fn is_own_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(inside, _)| inside),
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Whether a request may go on, and how it was recognised. `port`: the listener's.
pub(crate) fn admit(parts: &Parts, token: Option<&Token>, port: u16) -> Result<Access, Refusal> {
    let host = text(parts, HOST).filter(|host| is_own_host(host)).ok_or(Refusal::Host)?;
    let Some(token) = token else { return same_origin(parts, host, false).map(|()| Access::Granted) };
    let bearer = text(parts, AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
    if bearer.is_some_and(|given| token.is(given)) {
        return same_origin(parts, host, false).map(|()| Access::Granted);
    }
    let named = query(parts, "token").filter(|_| parts.method == Method::GET);
    if cookie(parts, &cookie_name(port)).is_some_and(|given| token.is(given)) {
        // Also who is known already is not to keep the token in the address bar and the history.
        let again = named.is_some() && parts.uri.path() == "/";
        let access = if again { Access::Introduced } else { Access::Granted };
        return same_origin(parts, host, true).map(|()| access);
    }
    if named.is_some_and(|given| token.is(given)) { Ok(Access::Introduced) } else { Err(Refusal::Stranger) }
}

/// What changes something comes from this page. `ambient`: the browser itself said who it is, and so must say from
/// where it comes; a script that has the token need not.
fn same_origin(parts: &Parts, host: &str, ambient: bool) -> Result<(), Refusal> {
    if parts.method == Method::GET || parts.method == Method::HEAD {
        return Ok(());
    }
    let is_json = text(parts, CONTENT_TYPE).is_some_and(|value| value.starts_with("application/json"));
    match text(parts, ORIGIN) {
        Some(origin) if origin.strip_prefix("http://") != Some(host) => Err(Refusal::Origin),
        None if ambient || parts.headers.contains_key("sec-fetch-site") => Err(Refusal::Origin),
        _ if !is_json => Err(Refusal::ContentType),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Request;

    const TOKEN: &str = "0123456789abcdef";

    fn token() -> Token {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        Token::of_file(&path).unwrap();
        std::fs::write(&path, TOKEN).unwrap();
        Token::of_file(&path).unwrap()
    }

    fn parts(method: &str, uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn ask(method: &str, uri: &str, headers: &[(&str, &str)]) -> Result<Access, Refusal> {
        admit(&parts(method, uri, headers), Some(&token()), 80)
    }

    const HERE: (&str, &str) = ("host", "127.0.0.1:80");
    const JSON: (&str, &str) = ("content-type", "application/json");
    const KNOWN: (&str, &str) = ("cookie", "a=b; blockyard-80=0123456789abcdef");
    const BEARER: (&str, &str) = ("authorization", "Bearer 0123456789abcdef");
    const OWN: (&str, &str) = ("origin", "http://127.0.0.1:80");

    #[test]
    fn without_the_token_nothing_is_answered() {
        assert_eq!(ask("GET", "/", &[HERE]), Err(Refusal::Stranger));
        assert_eq!(ask("GET", "/?token=0123456789abcdee", &[HERE]), Err(Refusal::Stranger));
        assert_eq!(
            ask("GET", "/", &[HERE, ("cookie", "blockyard-81=0123456789abcdef")]),
            Err(Refusal::Stranger)
        );
        assert_eq!(ask("POST", "/?token=0123456789abcdef", &[HERE, OWN, JSON]), Err(Refusal::Stranger));
    }

    #[test]
    fn address_cookie_and_header_all_carry_it() {
        assert_eq!(ask("GET", "/?token=0123456789abcdef", &[HERE]), Ok(Access::Introduced));
        assert_eq!(ask("GET", "/", &[HERE, KNOWN]), Ok(Access::Granted));
        assert_eq!(ask("GET", "/metrics", &[HERE, BEARER]), Ok(Access::Granted));
    }

    #[test]
    fn who_is_known_already_is_introduced_again_where_the_token_shows() {
        for token in ["0123456789abcdef", "another"] {
            let page = format!("/?token={token}");
            assert_eq!(ask("GET", &page, &[HERE, KNOWN]), Ok(Access::Introduced), "{token}");
        }
        assert_eq!(ask("GET", "/devices?token=0123456789abcdef", &[HERE, KNOWN]), Ok(Access::Granted));
        assert_eq!(ask("GET", "/?token=0123456789abcdef", &[HERE, BEARER]), Ok(Access::Granted));
        let post = ask("POST", "/?token=0123456789abcdef", &[HERE, KNOWN, JSON]);
        assert_eq!(post, Err(Refusal::Origin));
    }

    #[test]
    fn a_foreign_name_is_refused_even_with_the_token() {
        for host in ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "["] {
            assert_eq!(ask("GET", "/", &[("host", host), KNOWN]), Err(Refusal::Host), "{host}");
        }
        assert_eq!(ask("GET", "/", &[KNOWN]), Err(Refusal::Host));
        for host in ["localhost:1", "[::1]:80", "192.0.2.7:80", "127.0.0.1"] {
            assert_eq!(ask("GET", "/", &[("host", host), KNOWN]), Ok(Access::Granted), "{host}");
        }
    }

    #[test]
    fn what_changes_something_comes_from_this_page_or_from_a_script_with_the_token() {
        let change = |headers: &[(&str, &str)]| ask("POST", "/devices/disk/actions", headers);
        assert_eq!(change(&[HERE, KNOWN, OWN, JSON]), Ok(Access::Granted));
        assert_eq!(change(&[HERE, KNOWN, JSON]), Err(Refusal::Origin));
        let evil = ("origin", "http://evil.example");
        assert_eq!(change(&[HERE, KNOWN, evil, JSON]), Err(Refusal::Origin));
        assert_eq!(change(&[HERE, KNOWN, ("origin", "http://127.0.0.1:81"), JSON]), Err(Refusal::Origin));
        assert_eq!(change(&[HERE, KNOWN, ("origin", "null"), JSON]), Err(Refusal::Origin));
        assert_eq!(change(&[HERE, KNOWN, OWN, ("content-type", "text/plain")]), Err(Refusal::ContentType));
        assert_eq!(change(&[HERE, BEARER, JSON]), Ok(Access::Granted));
        assert_eq!(change(&[HERE, BEARER, JSON, evil]), Err(Refusal::Origin));
    }

    #[test]
    fn without_any_token_other_pages_still_change_nothing() {
        let change = |headers: &[(&str, &str)]| admit(&parts("POST", "/x", headers), None, 80);
        assert_eq!(change(&[HERE, JSON]), Ok(Access::Granted));
        assert_eq!(change(&[HERE, OWN, JSON]), Ok(Access::Granted));
        assert_eq!(change(&[HERE, JSON, ("origin", "http://evil.example")]), Err(Refusal::Origin));
        assert_eq!(change(&[HERE, JSON, ("sec-fetch-site", "cross-site")]), Err(Refusal::Origin));
        assert_eq!(change(&[("host", "evil.example"), JSON]), Err(Refusal::Host));
    }
}
