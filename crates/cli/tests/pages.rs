//! The manual page and the completions come from the same table as the parser: what one knows, all know.

mod common;

use common::Sandbox;
use std::io::Write;
use std::process::{Command, Stdio};

/// The long options of a command, as its help lists them.
fn options(sandbox: &Sandbox, command: &str) -> Vec<String> {
    let help = sandbox.done(&[command, "--help"]);
    let words =
        help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(str::split_whitespace);
    // A value that may be left out follows its option as `[=<N>]`.
    let name = |word: &str| word.split(['[', ',', '=']).next().unwrap_or_default().to_owned();
    words.filter(|word| word.starts_with("--")).map(name).collect()
}

const COMMANDS: [&str; 20] = [
    "serve",
    "add",
    "up",
    "check",
    "list",
    "show",
    "del",
    "recover",
    "upgrade",
    "resize",
    "commit",
    "set",
    "suspend",
    "resume",
    "stat",
    "trace",
    "replay-log",
    "losetup",
    "completions",
    "man",
];

/// Text as roff writes it, where a plain `-` would become a hyphen.
fn roff(text: &str) -> String {
    text.replace('-', "\\-")
}

#[test]
fn the_man_page_has_every_command_and_option() {
    let sandbox = Sandbox::new();
    let page = sandbox.done(&["man"]);
    assert!(page.contains(".TH blockyard 1"), "{page}");
    for command in COMMANDS {
        // Its name may begin another's.
        let heading = |end: &str| page.split(&format!(".SS \"blockyard {}{end}", roff(command))).nth(1);
        let section = heading(" ").or_else(|| heading("\""));
        let section = section.unwrap_or_else(|| panic!("no section for {command}"));
        let section = section.split(".SS ").next().unwrap_or_default();
        for option in options(&sandbox, command) {
            assert!(section.contains(&roff(&option)), "{command} {option}");
        }
    }
    for part in ["Exit status", "BLOCKYARD_RUN", "NAME.control"] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("iscsi"), "what is not in this build is not in the page");
}

#[test]
fn the_man_page_is_clean_roff() {
    let sandbox = Sandbox::new();
    let page = sandbox.done(&["man"]);
    // Every line that begins with a dot is a macro that man(7) or clap_mangen's preamble has.
    let known = [".ie", ".el", ".TH", ".SH", ".SS", ".TP", ".RS", ".RE", ".PP", ".IP", ".br", ".nf", ".fi"];
    for line in page.lines().filter(|line| line.starts_with('.')) {
        let name = line.split_whitespace().next().unwrap_or_default();
        assert!(known.contains(&name), "{line}");
    }
}

#[test]
fn completions_know_every_command_and_option() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = sandbox.done(&["completions", shell]);
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
        // fish writes `-l nbd-name`.
        assert!(script.contains("nbd-name") && script.contains("tls-certificates"), "{shell}");
        assert!(!script.contains("vhost-user") && !script.contains("detached"), "{shell}");
    }
    assert_eq!(sandbox.ask(&["completions", "tcsh"]).code, 2);
}

#[test]
fn the_bash_script_completes() {
    let sandbox = Sandbox::new();
    let script = sandbox.done(&["completions", "bash"]);
    let ask = "COMP_WORDS=(blockyard se); COMP_CWORD=1; _blockyard blockyard se blockyard; echo ${COMPREPLY[@]}\n\
               COMP_WORDS=(blockyard serve --tls-c); COMP_CWORD=2; _blockyard blockyard --tls-c serve\n\
               echo ${COMPREPLY[@]}\n";
    let mut bash = match Command::new("bash").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() {
        Ok(bash) => bash,
        Err(why) => return println!("skipped: bash: {why}"),
    };
    let mut stdin = bash.stdin.take().expect("it is piped");
    stdin.write_all(script.as_bytes()).and_then(|()| stdin.write_all(ask.as_bytes())).expect("bash reads");
    drop(stdin);
    let output = bash.wait_with_output().expect("bash ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "serve set\n--tls-certificates\n");
}

#[test]
fn an_answer_that_cannot_be_written_is_no_success() {
    let sandbox = Sandbox::new();
    let full = || std::fs::File::create("/dev/full").expect("/dev/full");
    for words in [&["help"][..], &["man"], &["losetup", "--help"], &["completions", "bash"]] {
        let ended = sandbox.command(words).stdout(full()).output().expect("it runs");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{words:?}: {said}");
        assert_eq!(said.matches("writing the answer failed: No space left on device").count(), 1, "{said}");
    }
}
