//! Invalid arguments: status 2, one line on stderr, no process started.

mod common;

use common::{Answer, Sandbox};

/// Runs a command that must be refused; returns its stderr.
fn refused(arguments: &[&str]) -> String {
    let sandbox = Sandbox::new();
    let Answer { code, out, err } = sandbox.ask(arguments);
    assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
    assert!(sandbox.run_names().is_empty(), "{arguments:?} left {:?}", sandbox.run_names());
    err
}

#[test]
fn an_invalid_stack_is_refused_with_the_reason_and_a_fix() {
    for command in ["serve", "add"] {
        for (stack, why) in [
            ("disk.img", "\"disk.img\" has no kind (for a file write file:disk.img)"),
            ("ram:x", "\"x\" is not a size: it does not start with a digit (for example ram:1G)"),
            (
                "file:d,dirct=on",
                "file has no option \"dirct\": did you mean direct? (file has direct, offset, sizelimit, block, ro, size, create, \
                 cluster_size, backing_file, backing_fmt, share, sync, part, format, snapshot, backing, autosize, autoclear, partscan; a comma within a path is written twice)",
            ),
            (
                "tape:disk",
                "unknown backend \"tape\" (backends: file:PATH, ram:SIZE, null:[SIZE], zero:[SIZE], error:[SIZE], nbd:URI, \
                 rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT], exec:COMMAND, nbdkit:PLUGIN ARGS...)",
            ),
        ] {
            let expected = format!("blockyard: {command} failed: {stack}: {why}\n");
            assert_eq!(refused(&[command, stack]), expected);
        }
    }
}

#[test]
fn invalid_options_are_refused_with_the_reason() {
    let layers: Vec<&str> = engine::spec::layer_rows().iter().map(|row| row.name).collect();
    let unknown_layer = format!(
        "dealy,read=5ms: unknown layer \"dealy\" (did you mean delay? layers: {})",
        layers.join(", ")
    );
    for (options, expected) in [
        (
            &["--nbd", "here"][..],
            "here: \"here\" is not where an NBD server listens (write unix:PATH or tcp:HOST:PORT)",
        ),
        (&["--layer", "dealy,read=5ms"], &unknown_layer),
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
        let arguments = [&["serve", "ram:1M"], options].concat();
        assert_eq!(refused(&arguments), format!("blockyard: serve failed: {expected}\n"));
    }
}

#[test]
fn the_parsers_errors_begin_like_all_others() {
    for arguments in [&["what"][..], &[], &["serve", "ram:1M", "--depth", "0"], &["del"], &["list", "--jsn"]]
    {
        let stderr = refused(arguments);
        assert!(stderr.starts_with("blockyard: ") || arguments.is_empty(), "{arguments:?}: {stderr}");
        assert!(arguments.is_empty() || stderr.contains("try '--help'"), "{arguments:?}: {stderr}");
    }
    assert!(refused(&["del", "x", "--all"]).contains("cannot be used with"));
    assert_eq!(refused(&["serve"]), "blockyard: serve failed: no stack given (give one, or --table FILE)\n");
}

#[test]
fn stat_takes_a_name_an_interval_and_a_count() {
    assert_eq!(
        refused(&["stat", "x", "y"]),
        "blockyard: stat failed: \"y\" is not an interval of at least 0.1 seconds (usage: [NAME] [INTERVAL [COUNT]])\n"
    );
    assert!(refused(&["stat", "0"]).contains("\"0\" is not an interval of at least 0.1"));
    assert!(refused(&["stat", "1", "2", "3"]).contains("unexpected argument \"3\""));
}

#[test]
fn help_lists_all_commands_and_no_option_that_is_not_built() {
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
        "serve add up apply save check exec-test list show del recover upgrade resize set inflight limits commit suspend resume table status message stat top trace replay-log crash copy move losetup dmsetup targetcli completions man help"
            .split(' ')
            .collect::<Vec<_>>()
    );
    let serve = sandbox.done(&["serve", "--help"]);
    assert_eq!(sandbox.done(&["help", "serve"]), serve);
    assert!(!serve.contains("--detached"));
    for present in [
        "--ublk[=<N>]",
        "--nbd <ADDRESS>",
        "--iscsi <ADDRESS>",
        "--vhost-user <SOCKET>",
        "--tls-certificates <DIR>",
        "--layer",
    ] {
        assert!(serve.contains(present), "{present}");
    }
}

#[test]
fn version_is_printed_on_stdout() {
    assert_eq!(Sandbox::new().done(&["--version"]), format!("blockyard {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn without_a_run_directory_the_error_names_the_variables_to_set() {
    // Root uses /run/blockyard; other users must set a variable.
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["list"]);
    command.env_remove("BLOCKYARD_RUN").env_remove("XDG_RUNTIME_DIR");
    let output = command.output().expect("the binary starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_root = std::fs::metadata("/proc/self")
        .is_ok_and(|metadata| std::os::unix::fs::MetadataExt::uid(&metadata) == 0);
    let expected =
        "blockyard: list failed: there is no run directory (set BLOCKYARD_RUN or XDG_RUNTIME_DIR)\n";
    assert_eq!(
        (output.status.code(), stderr.as_str()),
        if is_root { (Some(0), "") } else { (Some(1), expected) }
    );
}

#[test]
fn an_unknown_layer_is_refused_with_a_list_of_all_layers() {
    let why = refused(&["serve", "ram:1M", "--layer", "raid,level=5"]);
    assert!(why.contains("unknown layer \"raid\" (layers: split, part, cow, delay, "), "{why}");
    for row in engine::spec::layer_rows() {
        assert!(why.contains(row.name), "{why}");
    }
}
