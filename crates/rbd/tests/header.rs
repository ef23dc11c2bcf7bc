//! Checks the declarations of librados and librbd against their headers: a C compiler compares every type and
//! value.
//!
//! Skipped where there is no compiler or no header (Debian: librbd-dev).

#![forbid(unsafe_code)]

use blockyard_rbd::{Library, declarations, values};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

const HEADER: &str = "/usr/include/rbd/librbd.h";

/// Compiles a text; returns the compiler's messages if it is refused, and `None` if there is no compiler.
fn compile(source: &str) -> Option<Result<(), String>> {
    let spawned = Command::new("cc")
        .args(["-std=c11", "-Werror=incompatible-pointer-types", "-fsyntax-only", "-x", "c", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut compiler = spawned.ok()?;
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let ended = compiler.wait_with_output().unwrap();
    let messages = String::from_utf8_lossy(&ended.stderr).into_owned();
    Some(if ended.status.success() { Ok(()) } else { Err(messages) })
}

fn source(break_one: bool) -> String {
    let mut text = "#include <rados/librados.h>\n#include <rbd/librbd.h>\n\
        typedef int (*diff_callback_t)(uint64_t, size_t, int, void *);\n"
        .to_owned();
    for (number, declaration) in declarations().into_iter().enumerate() {
        let mut arguments = declaration.arguments;
        if break_one && number == 0 {
            arguments.pop();
        }
        let (name, result, arguments) = (declaration.name, declaration.result, arguments.join(", "));
        writeln!(text, "{result} (*check_{name})({arguments}) = {name};").unwrap();
    }
    for (name, value) in values() {
        writeln!(text, "_Static_assert({name} == {value}ULL, \"{name}\");").unwrap();
    }
    text
}

#[test]
fn every_declaration_matches_the_header() {
    if !std::path::Path::new(HEADER).exists() {
        println!("skipped every_declaration_matches_the_header: there is no {HEADER} (package librbd-dev)");
        return;
    }
    match compile(&source(false)) {
        None => println!("skipped every_declaration_matches_the_header: there is no C compiler (cc)"),
        Some(Err(messages)) => panic!("{messages}"),
        Some(Ok(())) => {
            let broken = compile(&source(true)).expect("a compiler");
            assert!(broken.is_err(), "a wrong declaration has to be refused");
        }
    }
}

#[test]
fn an_installed_library_has_every_function() {
    match Library::load() {
        Ok(library) => assert!(library.version().starts_with("1."), "{}", library.version()),
        Err(error) => println!("skipped an_installed_library_has_every_function: {error}"),
    }
}
