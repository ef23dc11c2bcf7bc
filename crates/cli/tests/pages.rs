//! The manual page, the help and the completions come from the parser's table and list the same commands and options.

mod common;

use common::Sandbox;
use std::io::Write;
use std::process::{Command, Stdio};

/// Returns the long options in a command's help.
fn options(sandbox: &Sandbox, command: &str) -> Vec<String> {
    let help = sandbox.done(&[command, "--help"]);
    let tokens =
        help.lines().filter(|line| line.trim_start().starts_with('-')).flat_map(str::split_whitespace);
    // An optional value follows its option as `[=<N>]`.
    let name = |token: &str| token.split(['[', ',', '=']).next().unwrap_or_default().to_owned();
    tokens.filter(|token| token.starts_with("--")).map(name).collect()
}

const COMMANDS: [&str; 31] = [
    "serve",
    "add",
    "up",
    "apply",
    "save",
    "check",
    "list",
    "show",
    "del",
    "recover",
    "upgrade",
    "resize",
    "commit",
    "set",
    "inflight",
    "limits",
    "suspend",
    "resume",
    "table",
    "status",
    "message",
    "stat",
    "top",
    "trace",
    "replay-log",
    "crash",
    "losetup",
    "dmsetup",
    "targetcli",
    "completions",
    "man",
];

/// Escapes `-` as roff requires, where a plain `-` becomes a hyphen.
fn roff(text: &str) -> String {
    text.replace('-', "\\-")
}

#[test]
fn the_man_page_has_every_command_and_option() {
    let sandbox = Sandbox::new();
    let page = sandbox.done(&["man"]);
    assert!(page.contains(".TH blockyard 1"), "{page}");
    for command in COMMANDS {
        // A command's name can be the prefix of another's.
        let heading = |end: &str| page.split(&format!(".SS \"blockyard {}{end}", roff(command))).nth(1);
        let section = heading(" ").or_else(|| heading("\""));
        let section = section.unwrap_or_else(|| panic!("no section for {command}"));
        let section = section.split(".SS ").next().unwrap_or_default();
        for option in options(&sandbox, command) {
            assert!(section.contains(&roff(&option)), "{command} {option}");
        }
    }
    for part in ["Exit status", "BLOCKYARD_RUN", "NAME.control", ".SH STACKS", ".SH EXAMPLES"] {
        assert!(page.contains(part), "{part}");
    }
    for absent in ["vduse", "EXTRA", "loop\\-device"] {
        assert!(!page.contains(absent), "{absent} is not in the page");
    }
    assert_eq!(page.matches("ram:SIZE").count(), 1, "each table is printed once");
}

#[test]
fn the_man_page_has_no_warnings() {
    let sandbox = Sandbox::new();
    let page = sandbox.write("blockyard.1", &sandbox.done(&["man"]));
    match Command::new("groff").args(["-ww", "-man", "-Tutf8"]).arg(page).output() {
        Ok(output) => assert_eq!(String::from_utf8_lossy(&output.stderr), "", "troff warns"),
        Err(why) => println!("skipped: groff: {why}"),
    }
}

#[test]
fn the_man_page_is_clean_roff() {
    let sandbox = Sandbox::new();
    let page = sandbox.done(&["man"]);
    // Each line that begins with a dot must be a macro of man(7) or of clap_mangen's preamble.
    let known = [
        ".ie", ".el", ".TH", ".SH", ".SS", ".TP", ".RS", ".RE", ".PP", ".IP", ".br", ".nf", ".fi", ".ad",
        ".B", ".I", ".RI",
    ];
    for line in page.lines().filter(|line| line.starts_with('.')) {
        let name = line.split_whitespace().next().unwrap_or_default();
        assert!(known.contains(&name), "{line}");
    }
}

#[test]
fn help_lists_topics_and_suggests_the_nearest_one() {
    let sandbox = Sandbox::new();
    for topic in
        ["stacks", "layers", "exports", "tables", "topology", "schedulers", "limits", "crash", "environment"]
    {
        assert!(sandbox.done(&["help"]).contains(&format!("\n  {topic}")), "{topic}");
        assert!(sandbox.done(&["help", topic]).lines().count() > 5, "{topic}");
    }
    assert_eq!(sandbox.done(&["help", "serve"]), sandbox.done(&["serve", "--help"]));
    let wrong = sandbox.ask(&["help", "stack"]);
    let expected =
        "blockyard: help failed: stack: no such command or topic (did you mean stacks? see blockyard help)\n";
    assert_eq!((wrong.code, wrong.err.as_str()), (2, expected));
}

#[test]
fn help_fits_its_terminal() {
    let sandbox = Sandbox::new();
    for width in ["80", "100"] {
        for command in COMMANDS {
            let output =
                sandbox.command(&[command, "--help"]).env("COLUMNS", width).output().expect("it runs");
            for line in String::from_utf8_lossy(&output.stdout).lines() {
                assert!(line.chars().count() <= width.parse().expect("a number"), "{command}: {line}");
            }
        }
    }
}

/// Returns the completions of the last of `arguments`.
fn offered(sandbox: &Sandbox, arguments: &[&str]) -> Vec<String> {
    let mut command = sandbox.command(&["--"]);
    let last = arguments.len() - 1;
    command.args(arguments).env("COMPLETE", "fish").env("_CLAP_COMPLETE_INDEX", last.to_string());
    let output = command.output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn completions_include_commands_options_devices_and_values() {
    let sandbox = Sandbox::new();
    let _server = sandbox.serve(&["serve", "ram:1M", "--name", "scratch"], 1);
    let has = |arguments: &[&str], expected: &str| {
        let all = offered(&sandbox, arguments);
        assert!(all.iter().any(|offer| offer == expected), "{arguments:?}: {expected} is not in {all:?}");
    };
    for command in COMMANDS {
        has(&["blockyard", ""], command);
    }
    has(&["blockyard", "serve", "--tls-c"], "--tls-certificates");
    has(&["blockyard", "show", ""], "scratch");
    has(&["blockyard", "del", "scr"], "scratch");
    has(&["blockyard", "serve", "ra"], "ram:");
    has(&["blockyard", "serve", "ram:1G,h"], "ram:1G,hugepages");
    has(&["blockyard", "serve", "ram:1G", "--tls", ""], "require");
    has(&["blockyard", "serve", "ram:1G", "--layer", "delay,r"], "delay,read=");
    has(&["blockyard", "set", "scratch", "dir"], "direct=on");
    has(&["blockyard", "limits", "scratch", "max_sec"], "max_sectors=");
    let all = offered(&sandbox, &["blockyard", "serve", "--"]);
    assert!(all.contains(&"--vhost-user".to_owned()) && !all.contains(&"--detached".to_owned()), "{all:?}");
}

#[test]
fn set_completes_options_of_the_devices_layers() {
    let sandbox = Sandbox::new();
    let arguments = ["serve", "ram:1M", "--name", "slow", "--layer", "delay,read=1ms"];
    let _server = sandbox.serve(&arguments, 1);
    let layers = |name: &str| {
        let keys = offered(&sandbox, &["blockyard", "set", name, ""]);
        assert!(keys.contains(&"direct=on".to_owned()), "{keys:?}");
        let mut layers: Vec<_> =
            keys.iter().filter_map(|key| Some(key.split_once('.')?.0.to_owned())).collect();
        layers.dedup();
        layers
    };
    assert_eq!(layers("slow"), ["delay"]);
    assert!(layers("absent").contains(&"throttle".to_owned()), "no server, so all layers");
}

#[test]
fn completion_scripts_exist_for_every_shell() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = sandbox.done(&["completions", shell]);
        assert!(script.contains("blockyard"), "{shell}");
        // The program moves with an upgrade, the script stays.
        assert!(!script.contains(env!("CARGO_BIN_EXE_blockyard")), "{shell}: {script}");
    }
    assert_eq!(sandbox.ask(&["completions", "tcsh"]).code, 2);
}

/// Types each of `typed` in an interactive bash with the completion script; returns the lines that readline then
/// holds, or nothing without bash. `\t` completes, `\x1b*` inserts every completion.
fn lines_of_bash(sandbox: &Sandbox, typed: &[&str]) -> Option<Vec<String>> {
    sandbox.write("script.bash", &sandbox.done(&["completions", "bash"]));
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_blockyard"));
    let folder = program.parent().expect("a folder").display();
    let inherited = std::env::var("PATH").unwrap_or_default();
    // Ctrl-O writes the line to a file and empties it.
    let mut input = ". ./script.bash\n".to_owned()
        + r#"bind -x '"\C-o": printf "%s\n" "$READLINE_LINE" >> lines; READLINE_LINE='"#
        + "\n";
    for keys in typed {
        input += keys;
        input.push('\x0f');
    }
    let mut bash = match Command::new("bash")
        .args(["--norc", "--noprofile", "-i"])
        .current_dir(sandbox.path())
        .env("PATH", format!("{folder}:{inherited}"))
        .env("HOME", sandbox.path())
        .env("BLOCKYARD_RUN", sandbox.run(""))
        .env("INPUTRC", "/dev/null")
        .env_remove("HISTFILE")
        .env_remove("COMP_WORDBREAKS")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
    {
        Ok(bash) => bash,
        Err(why) => {
            println!("skipped: bash: {why}");
            return None;
        }
    };
    let mut stdin = bash.stdin.take().expect("it is piped");
    stdin.write_all(input.as_bytes()).expect("bash reads");
    drop(stdin);
    let output = bash.wait_with_output().expect("bash ends");
    let lines = std::fs::read_to_string(sandbox.path().join("lines"));
    let lines = lines.unwrap_or_else(|why| panic!("{why}: {}", String::from_utf8_lossy(&output.stderr)));
    Some(lines.lines().map(str::to_owned).collect())
}

#[test]
fn the_bash_script_completes() {
    let sandbox = Sandbox::new();
    sandbox.write("rnd.img", "");
    sandbox.write("my disk.img", "");
    let program = env!("CARGO_BIN_EXE_blockyard");
    let by_path = [format!("{program} serve ram:1G,h\t"), format!("{program} serve ram:1G,hugepages ")];
    let cases = [
        ("blockyard se\x1b*", "blockyard serve set "),
        ("blockyard serve --tls-c\t", "blockyard serve --tls-certificates "),
        ("blockyard serve file:rn\t", "blockyard serve file:rnd.img "),
        ("blockyard serve file:my\t", "blockyard serve file:my\\ disk.img "),
        ("blockyard serve file:my\\ d\t", "blockyard serve file:my\\ disk.img "),
        ("blockyard serve null:,irq\t", "blockyard serve null:,irqmode="),
        ("blockyard serve ra\t", "blockyard serve ram:"),
        ("blockyard set disk1 direct=o\x1b*", "blockyard set disk1 direct=on off "),
        ("blockyard set disk1 direct=\x1b*", "blockyard set disk1 direct=on off auto "),
        ("blockyard serve ram:1G --layer=del\t", "blockyard serve ram:1G --layer=delay "),
        ("blockyard serve ram:1G --layer del\t", "blockyard serve ram:1G --layer delay "),
        ("blockyard serve ram:1G --layer \"del\t", "blockyard serve ram:1G --layer \"delay\" "),
        ("blockyard serve ram:1G --tls=re\t", "blockyard serve ram:1G --tls=require "),
        (
            "blockyard serve ram:1G --limits max_sectors=1,max_segment_s\t",
            "blockyard serve ram:1G --limits max_sectors=1,max_segment_size=",
        ),
        // The cursor is in the middle of the line.
        ("blockyard serve file:rn --tls on\x1bb\x1bb\x02\x02\x02\t", "blockyard serve file:rnd.img --tls on"),
        (by_path[0].as_str(), by_path[1].as_str()),
    ];
    let Some(lines) = lines_of_bash(&sandbox, &cases.map(|(typed, _)| typed)) else { return };
    assert_eq!(lines, cases.map(|(_, expected)| expected));
}

/// Runs a shell with its completion script in the sandbox; `None`, with the reason printed, if it is not installed.
fn run_shell(sandbox: &Sandbox, shell: &str, mut command: Command) -> Option<String> {
    sandbox.write(&format!("script.{shell}"), &sandbox.done(&["completions", shell]));
    if Command::new(shell).arg("--version").output().is_err() {
        println!("skipped: {shell} is not installed");
        return None;
    }
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_blockyard"));
    let folder = program.parent().expect("a folder").display();
    let inherited = std::env::var("PATH").unwrap_or_default();
    let output = command
        .current_dir(sandbox.path())
        .env("PATH", format!("{folder}:{inherited}"))
        .env("HOME", sandbox.path())
        .env("BLOCKYARD_RUN", sandbox.run(""))
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) => Some(String::from_utf8_lossy(&output.stdout).into_owned()),
        Err(why) => {
            println!("skipped: {shell}: {why}");
            None
        }
    }
}

#[test]
fn the_zsh_script_completes() {
    let sandbox = Sandbox::new();
    sandbox.write("rnd.img", "");
    std::fs::create_dir(sandbox.path().join("images")).expect("a folder");
    let cases = [
        ("blockyard recov", "blockyard recover "),
        ("blockyard serve --tls-c", "blockyard serve --tls-certificates "),
        ("blockyard serve ra", "blockyard serve ram:"),
        ("blockyard serve ram:1G,h", "blockyard serve ram:1G,hugepages "),
        ("blockyard serve null:,irq", "blockyard serve null:,irqmode="),
        ("blockyard serve file:rn", "blockyard serve file:rnd.img "),
        ("blockyard serve file:ima", "blockyard serve file:images/"),
        ("blockyard serve ram:1G --tls re", "blockyard serve ram:1G --tls require "),
        ("blockyard serve ram:1G --layer del", "blockyard serve ram:1G --layer delay "),
    ];
    sandbox.write("typed", &cases.map(|(typed, _)| typed).join("\n"));
    sandbox.write(
        ".zshrc",
        r#"
autoload -Uz compinit && compinit -u -d ./dump
source ./script.zsh
typed() {
    for line in "${(@f)$(<./typed)}"; do
        BUFFER=$line CURSOR=$#line
        zle complete-word
        print -r -- "$BUFFER" >> ./lines
    done
    exit
}
zle -N zle-line-init typed
"#,
    );
    let mut script = Command::new("script");
    script.args(["-qfec", "zsh -i", "/dev/null"]).env("TERM", "xterm").env("ZDOTDIR", sandbox.path());
    let Some(output) = run_shell(&sandbox, "zsh", script) else { return };
    let lines = std::fs::read_to_string(sandbox.path().join("lines"));
    let lines = lines.unwrap_or_else(|why| panic!("{why}: {output}"));
    assert_eq!(lines.lines().collect::<Vec<_>>(), cases.map(|(_, expected)| expected));
}

#[test]
fn the_fish_script_completes() {
    let sandbox = Sandbox::new();
    sandbox.write("rnd.img", "");
    let cases = [
        ("blockyard recov", "recover"),
        ("blockyard serve --tls-c", "--tls-certificates"),
        ("blockyard serve ra", "ram:"),
        ("blockyard serve ram:1G,h", "ram:1G,hugepages"),
        ("blockyard serve null:,irqmode=ti", "null:,irqmode=timer"),
        ("blockyard serve file:rn", "file:rnd.img"),
        ("blockyard serve ram:1G --tls re", "require"),
    ];
    let mut lines = "source script.fish\n".to_owned();
    for (typed, _) in cases {
        lines += &format!("complete -C '{typed}'\n");
    }
    let mut fish = Command::new("fish");
    fish.args(["--no-config", "-c", &lines]);
    let Some(output) = run_shell(&sandbox, "fish", fish) else { return };
    let offered: Vec<&str> = output.lines().map(|line| line.split('\t').next().unwrap_or_default()).collect();
    assert_eq!(offered, cases.map(|(_, expected)| expected));
}

#[test]
fn help_longer_than_the_terminal_is_shown_in_the_pager() {
    let sandbox = Sandbox::new();
    let in_terminal = |rows: u32, pager: &str, arguments: &str| {
        let program = env!("CARGO_BIN_EXE_blockyard");
        let line = format!("stty rows {rows} cols 100; {program} {arguments}");
        let mut script = Command::new("script");
        script.args(["-qfec", &line, "/dev/null"]).env("TERM", "xterm").env("PAGER", pager);
        let output = script.stdin(Stdio::null()).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let Some(paged) = in_terminal(10, "echo in the pager; head -n 1; true", "help stacks") else {
        println!("skipped: script is not installed");
        return;
    };
    assert!(paged.starts_with("in the pager\r\n") && paged.lines().count() == 2, "{paged}");
    let whole = sandbox.done(&["help", "stacks"]).lines().count();
    for (rows, pager) in [(10, "cat"), (10, ""), (10, "no-such-pager"), (500, "echo in the pager")] {
        let shown = in_terminal(rows, pager, "help stacks").expect("script runs");
        assert!(!shown.contains("in the pager") && shown.lines().count() >= whole, "{rows} {pager}: {shown}");
    }
}

#[test]
fn an_answer_that_cannot_be_written_is_a_failure() {
    let sandbox = Sandbox::new();
    let full = || std::fs::File::create("/dev/full").expect("/dev/full");
    for arguments in [&["help"][..], &["man"], &["losetup", "--help"], &["completions", "bash"]] {
        let ended = sandbox.command(arguments).stdout(full()).output().expect("it runs");
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {stderr}");
        let message = "writing the answer failed: No space left on device";
        assert_eq!(stderr.matches(message).count(), 1, "{stderr}");
    }
}
