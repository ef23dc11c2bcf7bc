//! Access control, decided on the head of a request before anything else is read.
//!
//! Requests come from a person or a script with the token, or from a browser in which a page of another
//! origin runs. Against such pages, `Host` must be an address or `localhost`, which rules out a foreign
//! domain that resolves to this machine (DNS rebinding), and requests that change something must have this
//! origin.

use crate::token::Token;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, ORIGIN};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use std::net::IpAddr;

/// The reason why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// The token is missing or wrong.
    Stranger,
    /// `Host` is a domain name, or missing.
    Host,
    /// The request was sent by a page of another origin.
    Origin,
    /// The body is not JSON. Pages of other origins can send other types without a preflight request.
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
            Refusal::Host => "the host must be an address or localhost",
            Refusal::Origin => "the request comes from another page",
            Refusal::ContentType => "the content type must be application/json",
        }
    }
}

fn text(parts: &Parts, name: HeaderName) -> Option<&str> {
    parts.headers.get(name)?.to_str().ok()
}

/// Returns a parameter of the query, without percent-decoding.
pub(crate) fn query<'a>(parts: &'a Parts, name: &str) -> Option<&'a str> {
    let pairs = parts.uri.query().unwrap_or_default().split('&');
    pairs.filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// Returns whether a `Host` is an address or `localhost`, which no foreign DNS server can resolve to this
/// machine.
fn is_own_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(inside, _)| inside),
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// Checks a request. Cookies are ignored: browsers send them to all ports of an address, and another user may
/// listen on one of those.
///
/// # Errors
/// [`Refusal`].
pub(crate) fn admit(parts: &Parts, token: Option<&Token>) -> Result<(), Refusal> {
    let host = text(parts, HOST).filter(|host| is_own_host(host)).ok_or(Refusal::Host)?;
    if let Some(token) = token {
        let bearer = text(parts, AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
        let named = query(parts, "token").filter(|_| parts.method == Method::GET);
        if !bearer.or(named).is_some_and(|given| token.is(given)) {
            return Err(Refusal::Stranger);
        }
    }
    same_origin(parts, host)
}

/// Checks that a request that changes something comes from this page, or from a script outside a browser,
/// which sends no origin.
fn same_origin(parts: &Parts, host: &str) -> Result<(), Refusal> {
    if parts.method == Method::GET || parts.method == Method::HEAD {
        return Ok(());
    }
    let is_json = text(parts, CONTENT_TYPE).is_some_and(|value| value.starts_with("application/json"));
    match text(parts, ORIGIN) {
        Some(origin) if origin.strip_prefix("http://") != Some(host) => Err(Refusal::Origin),
        None if parts.headers.contains_key("sec-fetch-site") => Err(Refusal::Origin),
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

    fn ask(method: &str, uri: &str, headers: &[(&str, &str)]) -> Result<(), Refusal> {
        admit(&parts(method, uri, headers), Some(&token()))
    }

    const HERE: (&str, &str) = ("host", "127.0.0.1:80");
    const JSON: (&str, &str) = ("content-type", "application/json");
    const BEARER: (&str, &str) = ("authorization", "Bearer 0123456789abcdef");
    const OWN: (&str, &str) = ("origin", "http://127.0.0.1:80");

    #[test]
    fn a_request_without_the_token_is_refused() {
        assert_eq!(ask("GET", "/", &[HERE]), Err(Refusal::Stranger));
        assert_eq!(ask("GET", "/?token=0123456789abcdee", &[HERE]), Err(Refusal::Stranger));
        assert_eq!(ask("POST", "/?token=0123456789abcdef", &[HERE, OWN, JSON]), Err(Refusal::Stranger));
    }

    #[test]
    fn the_token_is_accepted_in_the_address_and_the_header_but_not_in_a_cookie() {
        assert_eq!(ask("GET", "/?token=0123456789abcdef", &[HERE]), Ok(()));
        assert_eq!(ask("GET", "/metrics", &[HERE, BEARER]), Ok(()));
        let cookies = ("cookie", "token=0123456789abcdef; blockyard-80=0123456789abcdef");
        assert_eq!(ask("GET", "/", &[HERE, cookies]), Err(Refusal::Stranger));
    }

    #[test]
    fn a_foreign_host_name_is_refused_even_with_the_token() {
        for host in ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "["] {
            assert_eq!(ask("GET", "/", &[("host", host), BEARER]), Err(Refusal::Host), "{host}");
        }
        assert_eq!(ask("GET", "/", &[BEARER]), Err(Refusal::Host));
        for host in ["localhost:1", "[::1]:80", "192.0.2.7:80", "127.0.0.1"] {
            assert_eq!(ask("GET", "/", &[("host", host), BEARER]), Ok(()), "{host}");
        }
    }

    #[test]
    fn changes_are_accepted_from_this_page_and_from_scripts_with_the_token() {
        let change = |headers: &[(&str, &str)]| ask("POST", "/devices/disk/actions", headers);
        assert_eq!(change(&[HERE, BEARER, OWN, JSON]), Ok(()));
        assert_eq!(change(&[HERE, BEARER, JSON]), Ok(()));
        for origin in ["http://evil.example", "http://127.0.0.1:81", "null"] {
            assert_eq!(change(&[HERE, BEARER, ("origin", origin), JSON]), Err(Refusal::Origin), "{origin}");
        }
        assert_eq!(change(&[HERE, BEARER, OWN, ("content-type", "text/plain")]), Err(Refusal::ContentType));
    }

    #[test]
    fn without_any_token_changes_from_other_pages_are_still_refused() {
        let change = |headers: &[(&str, &str)]| admit(&parts("POST", "/x", headers), None);
        assert_eq!(change(&[HERE, JSON]), Ok(()));
        assert_eq!(change(&[HERE, OWN, JSON]), Ok(()));
        assert_eq!(change(&[HERE, JSON, ("origin", "http://evil.example")]), Err(Refusal::Origin));
        assert_eq!(change(&[HERE, JSON, ("sec-fetch-site", "cross-site")]), Err(Refusal::Origin));
        assert_eq!(change(&[("host", "evil.example"), JSON]), Err(Refusal::Host));
    }
}
