//! Tests that need a kernel of their own, run by `./x guest --suite`: `guest [--list | BEGINNING OF
//! NAME...]`.
#![forbid(unsafe_code)]

use blockyard_tests::guest::{runner, tests};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    runner::main(&tests(), &words)
}
