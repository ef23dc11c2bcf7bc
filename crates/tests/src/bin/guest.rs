//! Tests that need a kernel of their own, run by `./x guest --suite`: `guest [--list | BEGINNING OF
//! NAME...]`. Virtual machines of other tests run `guest --write DEVICE FILE`.
#![forbid(unsafe_code)]

use blockyard_tests::guest::{runner, tests, writer};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [option, device, end] = &words[..]
        && option == "--write"
    {
        writer::write_until(Path::new(device), Path::new(end));
        return ExitCode::SUCCESS;
    }
    runner::main(&tests(), &words)
}
