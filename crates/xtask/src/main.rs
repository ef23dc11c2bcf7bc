//! Chores of the project, run as `./x CHORE`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use xtask::{chores, guest, tidy};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let chore = arguments.next().unwrap_or_default();
    let rest: Vec<String> = arguments.collect();
    // The manifest's folder is crates/xtask; the tree's root is two above.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let done = match (chore.as_str(), rest.as_slice()) {
        ("tidy", []) => tidy::report(&root),
        ("check", []) => chores::check(&root),
        ("test", []) => chores::test(&root, false),
        ("test", [word]) if word == "full" => chores::test(&root, true),
        ("fuzz", rest) => chores::fuzz(&root, rest),
        ("guest", rest) => return ExitCode::from(guest::main(&root, rest)),
        ("soak", rest) => chores::soak(&root, rest),
        _ => {
            eprintln!("xtask: no chore '{chore} {}': ./x help lists them", rest.join(" "));
            return ExitCode::from(2);
        }
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
