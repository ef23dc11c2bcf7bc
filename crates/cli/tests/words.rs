//! Words that make no sense, and how that is said: status 2, one line on stderr, nothing started.

mod common;

use common::{Answer, Sandbox};

fn refused(words: &[&str]) -> String {
    let sandbox = Sandbox::new();
    let Answer { code, out, err } = sandbox.ask(words);
    assert_eq!((code, out.as_str()), (2, ""), "{words:?}: {err}");
    assert!(sandbox.run_names().is_empty(), "{words:?} left {:?}", sandbox.run_names());
    err
}

#[test]
fn a_stack_that_cannot_be_says_why_and_what_to_write() {
    for command in ["serve", "add"] {
        for (stack, why) in [
            ("disk.img", "\"disk.img\" has no kind (for a file write file:disk.img)"),
            ("ram:x", "\"x\" is not a size: it does not start with a digit (for example ram:1G)"),
            (
                "file:d,dirct=on",
                "file has no option \"dirct\": did you mean direct? (file has direct, offset, sizelimit, block, ro, size, create, \
                 cluster_size, backing_file, backing_fmt, share, part, format, snapshot, backing, autosize, autoclear, partscan; a comma within a path is written twice)",
            ),
            (
                "rbd:pool/disk",
                "rbd: is not in this build (there are file:PATH, ram:SIZE, null:SIZE, zero:SIZE, error:SIZE, nbd:URI)",
            ),
        ] {
            let expected = format!("blockyard: {command} failed: {stack}: {why}\n");
            assert_eq!(refused(&[command, stack]), expected);
        }
    }
}

#[test]
fn options_that_cannot_be_say_why() {
    for (words, expected) in [
        (
            &["--nbd", "here"][..],
            "here: \"here\" is not where an NBD server listens (write unix:PATH or tcp:HOST:PORT)",
        ),
        (
            &["--layer", "dealy,read=5ms"],
            "dealy,read=5ms: there is no layer \"dealy\": did you mean delay? (for example delay,read=5ms)",
        ),
        (
            &["--tls", "require"],
            "ram: TLS is require, and there are no certificates (name the directory of server-cert.pem and \
             server-key.pem with tls-certificates)",
        ),
        (&["--tls", "maybe"], "maybe: TLS cannot be \"maybe\" (use off, on or require)"),
        (
            &["--nbd", "tcp:h:1", "--nbd", "tcp:h:1"],
            "ram: tcp:h:1 has an export \"ram\" already (give one another name)",
        ),
        (
            &["--name", "a/b"],
            "a/b: \"a/b\" is not a device name (use 1 to 64 of A-Z a-z 0-9 . _ + - and do not start with . or -)",
        ),
    ] {
        let words = [&["serve", "ram:1M"], words].concat();
        assert_eq!(refused(&words), format!("blockyard: serve failed: {expected}\n"));
    }
}

#[test]
fn exports_that_are_not_there_yet_are_refused_by_name() {
    for words in [&["--iscsi", "tcp:h:1,iqn=x"][..], &["--vhost-user", "p"]] {
        let option = words[0].split('=').next().unwrap_or_default();
        assert_eq!(
            refused(&[&["serve", "ram:1M"], words].concat()),
            format!(
                "blockyard: serve failed: {option}: is not in this build (blockyard serve --help lists what is)
"
            )
        );
    }
}

#[test]
fn what_the_parser_refuses_begins_like_every_error() {
    for words in [&["what"][..], &[], &["serve", "ram:1M", "--depth", "0"], &["del"], &["list", "--jsn"]] {
        let said = refused(words);
        assert!(said.starts_with("blockyard: ") || words.is_empty(), "{words:?}: {said}");
        assert!(words.is_empty() || said.contains("try '--help'"), "{words:?}: {said}");
    }
    assert!(refused(&["del", "x", "--all"]).contains("cannot be used with"));
    assert_eq!(
        refused(&["serve"]),
        "blockyard: serve failed: there is no stack (give one, or --table FILE)\n"
    );
}

#[test]
fn stat_takes_a_name_an_interval_and_a_count() {
    assert_eq!(
        refused(&["stat", "x", "y"]),
        "blockyard: stat failed: \"y\" is not an interval in seconds from 0.1 on (write [NAME] [INTERVAL [COUNT]])\n"
    );
    assert!(refused(&["stat", "0"]).contains("\"0\" is not an interval in seconds"));
    assert!(refused(&["stat", "1", "2", "3"]).contains("\"3\" is one word too many"));
}

#[test]
fn help_lists_every_command_and_only_what_works() {
    let sandbox = Sandbox::new();
    let help = sandbox.done(&["--help"]);
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(
        commands,
        "serve add up check list show del recover upgrade uses resize set inflight limits commit suspend resume table status message stat top trace replay-log losetup dmsetup completions man help"
            .split(' ')
            .collect::<Vec<_>>()
    );
    let serve = sandbox.done(&["serve", "--help"]);
    assert_eq!(sandbox.done(&["help", "serve"]), serve);
    for absent in ["--iscsi", "--vhost-user", "--detached"] {
        assert!(!serve.contains(absent), "{absent}");
    }
    for there in [
        "--ublk[=<N,KEY=VALUE...>]",
        "--nbd <ADDRESS>",
        "--tls-certificates <DIR>",
        "--layer",
        "file:PATH",
        "drain and flush",
    ] {
        assert!(serve.contains(there), "{there}");
    }
}

#[test]
fn version_is_an_answer() {
    assert_eq!(Sandbox::new().done(&["--version"]), format!("blockyard {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn without_a_run_directory_the_error_says_what_to_set() {
    // Root has /run/blockyard; everyone else needs to be told where.
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["list"]);
    command.env_remove("BLOCKYARD_RUN").env_remove("XDG_RUNTIME_DIR");
    let output = command.output().expect("the binary starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_root = std::fs::metadata("/proc/self")
        .is_ok_and(|metadata| std::os::unix::fs::MetadataExt::uid(&metadata) == 0);
    let expected =
        "blockyard: list failed: there is no run directory (set BLOCKYARD_RUN or XDG_RUNTIME_DIR)\n";
    assert_eq!(
        (output.status.code(), said.as_str()),
        if is_root { (Some(0), "") } else { (Some(1), expected) }
    );
}

#[test]
fn a_layer_that_there_is_not_is_refused_with_those_there_are() {
    let why = refused(&["serve", "ram:1M", "--layer", "raid,level=5"]);
    assert!(why.contains("there is no layer \"raid\" (there are split, part, cow, delay, "), "{why}");
    for row in engine::spec::layer_rows() {
        assert!(why.contains(row.name), "{why}");
    }
}
