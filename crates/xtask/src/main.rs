//! Tasks of the project, run as `./x TASK`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use xtask::{ceph, commands, guest, package, tidy};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    // This crate's directory is crates/xtask, two levels below the root.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let done = match (command.as_str(), rest.as_slice()) {
        ("tidy", []) => tidy::report(&root),
        ("check", []) => commands::check(&root),
        ("test", []) => commands::test(&root, false),
        ("test", [word]) if word == "full" => commands::test(&root, true),
        ("fuzz", rest) => commands::fuzz(&root, rest),
        ("conformance", rest) => commands::conformance(&root, rest),
        ("vhost-clients", []) => commands::vhost_clients(&root),
        ("user-mode-linux", []) => commands::user_mode_linux(&root),
        ("guest", rest) => return ExitCode::from(guest::main(&root, rest)),
        ("ceph", rest) => return ExitCode::from(ceph::main(&root, rest)),
        ("package", rest) => package::main(&root, rest),
        ("soak", rest) => commands::soak(&root, rest),
        _ => {
            eprintln!("xtask: no command '{command} {}': ./x help lists them", rest.join(" "));
            return ExitCode::from(2);
        }
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
