//! The harness of docs/benchmarks: `./x bench core`, `./x bench nbd`, `./x bench loop`, `./x bench multipath`,
//! `./x bench ublk`, `./x bench observability`, `./x bench limits`.
#![forbid(unsafe_code)]

mod core;
mod devices;
mod error;
mod figures;
mod fio;
mod limits;
mod loops;
mod multipath;
mod nbd;
mod observability;
mod options;
mod proc;
mod realtime;
mod tools;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((word, rest)) if word == "core" => core::main(rest),
        Some((word, rest)) if word == "instructions" => core::instructions(rest),
        Some((word, rest)) if word == "nbd" => nbd::main(rest),
        Some((word, rest)) if word == "limits" => limits::main(rest),
        Some((word, rest)) if word == "loop" => loops::main(rest),
        Some((word, rest)) if word == "multipath" => multipath::main(rest),
        Some((word, rest)) if word == "observability" => observability::main(rest),
        Some((word, rest)) if word == "devices" => devices::main(rest),
        _ => {
            eprintln!(
                "usage: blockyard-bench core|instructions|limits|nbd|loop|multipath|devices|observability [OPTIONS]"
            );
            ExitCode::from(2)
        }
    }
}
