//! The harness of docs/benchmarks: `./x bench core`, `./x bench nbd`, `./x bench loop`, `./x bench multipath`,
//! `./x bench file`, `./x bench iscsi`, `./x bench rbd`, `./x bench vhost`, `./x bench ublk`,
//! `./x bench observability`, `./x bench limits`, and all of the published comparisons in one: `./x bench report`,
//! `./x bench compare`.
#![forbid(unsafe_code)]

mod core;
mod devices;
mod error;
mod figures;
mod file;
mod fio;
mod iscsi;
mod left_out;
mod limits;
mod loops;
mod multipath;
mod nbd;
mod observability;
mod options;
mod proc;
mod rbd;
mod realtime;
mod report;
mod tools;
mod vhost;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((word, rest)) if word == "core" => core::main(rest),
        Some((word, rest)) if word == "instructions" => core::instructions(rest),
        Some((word, rest)) if word == "nbd" => nbd::main(rest),
        Some((word, rest)) if word == "iscsi" => iscsi::main(rest),
        Some((word, rest)) if word == "file" => file::main(rest),
        Some((word, rest)) if word == "limits" => limits::main(rest),
        Some((word, rest)) if word == "loop" => loops::main(rest),
        Some((word, rest)) if word == "multipath" => multipath::main(rest),
        Some((word, rest)) if word == "observability" => observability::main(rest),
        Some((word, rest)) if word == "rbd" => rbd::main(rest),
        Some((word, rest)) if word == "vhost" => vhost::main(rest),
        Some((word, rest)) if word == "report" => report::main(rest),
        Some((word, rest)) if word == "compare" => report::compare(rest),
        Some((word, rest)) if word == "devices" => devices::main(rest),
        _ => {
            eprintln!(
                "usage: blockyard-bench core|compare|devices|file|instructions|iscsi|limits|loop|multipath|nbd|\
                 observability|rbd|report|vhost [OPTIONS]"
            );
            ExitCode::from(2)
        }
    }
}
