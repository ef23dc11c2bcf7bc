use super::*;

#[test]
fn the_documents_examples_are_parsed() {
    for (text, export) in [
        ("nbd://example.com/disk", "disk"),
        ("nbd+unix:///disk?socket=sock", "disk"),
        ("nbd://example.com/", ""),
        ("nbd://example.com", ""),
        ("nbd://example.com//disk", "/disk"),
        ("nbd://example.com/hello%20world", "hello world"),
    ] {
        assert_eq!(text.parse::<Uri>().unwrap().export, export, "{text}");
    }
}

#[test]
fn hosts_and_ports_are_parsed() {
    for (text, host, port) in [
        ("nbd://h", "h", 10809),
        ("nbd://h:1", "h", 1),
        ("nbd://h:/x", "h", 10809),
        ("nbd://127.0.0.1:65535/", "127.0.0.1", 65535),
        ("nbd://[::1]", "::1", 10809),
        ("nbd://[fe80::1%25eth0]:2/x", "fe80::1%eth0", 2),
        ("nbd:///x", "localhost", 10809),
        ("NBD://h", "h", 10809),
    ] {
        let server = Server::Tcp { host: host.into(), port };
        assert_eq!(text.parse::<Uri>().unwrap().server, server, "{text}");
    }
}

#[test]
fn a_socket_is_a_path_or_an_abstract_name() {
    let uri: Uri = "nbd+unix:///?socket=/run/a%20b.sock".parse().unwrap();
    assert_eq!(uri.server, Server::Unix("/run/a b.sock".into()));
    let uri: Uri = "nbds+unix:///x?socket=%00/abstract".parse().unwrap();
    assert_eq!((uri.server, uri.tls), (Server::Unix("\0/abstract".into()), true));
}

#[test]
fn tls_and_experimental_parameters_are_kept() {
    let text = "nbds://user@h/x?tls-certificates=/etc/pki&x-a=%26&tls-verify-peer=0";
    let uri: Uri = text.parse().unwrap();
    assert!(uri.tls);
    assert_eq!(uri.user.as_deref(), Some("user"));
    assert_eq!(uri.param("tls-certificates"), Some("/etc/pki"));
    assert_eq!(uri.param("x-a"), Some("&"));
    assert_eq!(uri.param("tls-type"), None);
    assert_eq!(uri.to_string(), text);
}

#[test]
fn invalid_uris_are_refused_with_a_reason() {
    for (text, why) in [
        ("", "://"),
        ("disk.img", "://"),
        ("http://h/x", "scheme"),
        ("nbd+vsock://1/x", "scheme"),
        ("nbd://h:port/x", "port"),
        ("nbd://h:65536/x", "65535"),
        ("nbd://::1/x", "brackets"),
        ("nbd://[::1/x", "]"),
        ("nbd://[::1]1/x", "]"),
        ("nbd://[h]/x", "brackets"),
        ("nbd://h/%0", "hex"),
        ("nbd://h/%zz", "hex"),
        ("nbd://h/%ff", "UTF-8"),
        ("nbd://h/%00", "NUL"),
        ("nbd://h/a#b", "%23"),
        ("nbd://h/?socket=/s", "nbd+unix"),
        ("nbd+unix:///x", "socket"),
        ("nbd+unix:///x?socket=", "socket"),
        ("nbd+unix:///x?socket=a&socket=b", "two"),
        ("nbd+unix://h/x?socket=a", "host"),
        ("nbd://h/?colour=blue", "unknown parameter"),
    ] {
        let error = text.parse::<Uri>().unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
    assert!(format!("nbd://h/{}", "x".repeat(4097)).parse::<Uri>().is_err());
}

#[test]
fn a_socket_that_is_not_text_survives_printing() {
    let path = PathBuf::from(OsString::from_vec(vec![b'/', 0xff, b'%']));
    let uri = Uri::unix(path, "");
    assert_eq!(uri.to_string(), "nbd+unix:///?socket=/%FF%25");
    assert_eq!(uri.to_string().parse(), Ok(uri));
}

proptest::proptest! {
    #[test]
    fn a_printed_uri_parses_to_an_equal_one(
        host in "[a-z0-9.-]{1,20}", port: u16, export in "[^\0]{0,40}", user in proptest::option::of(".{0,9}"),
        tls: bool, param in proptest::option::of(".{0,20}"),
    ) {
        let params = param.map(|value| ("x-p".to_owned(), value)).into_iter().collect();
        let uri = Uri { tls, user, params, ..Uri::tcp(host, port, export) };
        proptest::prop_assert_eq!(uri.to_string().parse(), Ok(uri));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "(nbds?(\\+unix)?://)?\\PC{0,60}") {
        if let Ok(uri) = text.parse::<Uri>() {
            proptest::prop_assert_eq!(uri.to_string().parse(), Ok(uri));
        }
    }
}
