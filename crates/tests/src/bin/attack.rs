//! Attacks on the optimised binary: `attack [PART...] [--seed=N] [--count=N] [--seconds=N] [--workers=N]
//! [--store=NAME,…] [--canary]`. Without a part it runs all of them. It ends with status 1 if there are
//! findings; with `--canary`, if there are none.
#![forbid(unsafe_code)]

use blockyard_tests::attack::Part;
use blockyard_tests::attack::options::{Options, USAGE};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let mut options = Options::new(0);
    let mut parts = Vec::new();
    for word in std::env::args().skip(1) {
        let taken = match Part::named(&word) {
            Some(part) => {
                parts.push(part);
                Ok(())
            }
            None if word.starts_with("--") => options.take(&word),
            None => Err(format!("unknown part \"{word}\"; parts: {}; {USAGE}", Part::names())),
        };
        if let Err(why) = taken {
            eprintln!("attack: {why}");
            return ExitCode::from(2);
        }
    }
    if parts.is_empty() {
        parts.extend(Part::ALL);
    }
    println!("binary {}", blockyard_tests::server::binary().display());
    // One line for a panic is sufficient: a client here panics when a server breaks the protocol or closes,
    // which is counted.
    std::panic::set_hook(Box::new(|panic| println!("  {panic}")));
    let mut failed = false;
    for part in parts {
        let count = match (options.count, options.canary) {
            (0, true) => part.canary_count(),
            (0, false) => part.count(),
            (count, _) => count,
        };
        println!("{}: seed {} count {count}", part.name(), options.seed);
        let start = Instant::now();
        let tally = part.run(&options.with_count(count));
        let seconds = start.elapsed().as_secs_f64();
        println!("{}: {tally} ({seconds:.0} s)", part.name());
        if options.canary {
            let found = if tally.is_clean() { "NOT found" } else { "found" };
            println!("{}: the canary was {found}", part.name());
        }
        failed |= tally.is_clean() == options.canary;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
