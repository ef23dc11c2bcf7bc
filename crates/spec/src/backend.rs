//! The list of backends: one row each. The parser, messages, help and completions iterate over it.

use super::stack::{self, StackSpec};
use super::{NbdSpec, ProgramSpec, SpecError, nbd, null, program, rbd};
use block::Bytes;
use options::OptionRow;

/// A backend, as users see it.
#[derive(Clone, Copy, Debug)]
pub struct BackendRow {
    /// The name, before the colon.
    pub kind: &'static str,
    /// The syntax without options: `ram:SIZE`.
    pub usage: &'static str,
    /// The purpose, in half a line.
    pub about: &'static str,
    /// A stack that parses.
    pub example: &'static str,
    /// Every option, in the order in which help and messages list them.
    pub options: &'static [OptionRow],
    /// The page of the docs about the backend, where one exists: `null.md`.
    pub page: Option<&'static str>,
    /// Returns a random stack for the simulation. `None`: the simulation provides its own disk or server
    /// for the backend, or the backend does not store written data.
    pub random: Option<RandomStack>,
    pub(super) parse: fn(&str, Vec<String>) -> Result<StackSpec, SpecError>,
}

/// A function that returns a stack of the given size with random options. Its second argument returns a
/// random number less than the number that it is given.
pub type RandomStack = fn(Bytes, &mut dyn FnMut(u64) -> u64) -> StackSpec;

const ROWS: &[BackendRow] = &[
    BackendRow {
        kind: "file",
        usage: "file:PATH",
        about: "a regular file, a block device, or a disk image",
        example: "file:disk.img",
        options: stack::FILE_OPTIONS,
        page: Some("images.md"),
        random: None,
        parse: |what, items| stack::parse_file(what, items.into_iter()).map(StackSpec::File),
    },
    BackendRow {
        kind: "ram",
        usage: "ram:SIZE",
        about: "memory; the contents go with the process",
        example: "ram:1G",
        options: stack::RAM_OPTIONS,
        page: None,
        random: Some(stack::random_ram),
        parse: |what, items| stack::parse_ram(what, items.into_iter()).map(StackSpec::Ram),
    },
    BackendRow {
        kind: "null",
        usage: "null:[SIZE]",
        about: "null_blk: requests complete, nothing is kept",
        example: "null:250G",
        options: null::OPTIONS,
        page: Some("null.md"),
        random: Some(null::random),
        parse: |what, items| null::parse(what, items.into_iter()).map(StackSpec::Null),
    },
    BackendRow {
        kind: "zero",
        usage: "zero:[SIZE]",
        about: "reads return zeroes, writes are dropped",
        example: "zero:1T",
        options: &[],
        page: None,
        random: None,
        parse: |what, items| stack::parse_bare("zero", what, items.into_iter()).map(StackSpec::Zero),
    },
    BackendRow {
        kind: "error",
        usage: "error:[SIZE]",
        about: "every request fails",
        example: "error:1G",
        options: &[],
        page: None,
        random: None,
        parse: |what, items| stack::parse_bare("error", what, items.into_iter()).map(StackSpec::Error),
    },
    BackendRow {
        kind: "nbd",
        usage: "nbd:URI",
        about: "an export of an NBD server",
        example: "nbd:nbd://host/disk",
        options: nbd::OPTIONS,
        page: Some("nbd-client.md"),
        random: None,
        parse: |what, items| NbdSpec::parse(what, items.into_iter()).map(StackSpec::Nbd),
    },
    BackendRow {
        kind: "rbd",
        usage: "rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]",
        about: "an image of a Ceph cluster",
        example: "rbd:rbd/disk",
        options: rbd::OPTIONS,
        page: Some("ceph.md"),
        random: None,
        parse: |what, items| rbd::parse(what, items.into_iter()).map(StackSpec::Rbd),
    },
    BackendRow {
        kind: "exec",
        usage: "exec:COMMAND",
        about: "a driver as a program, in any language",
        example: "exec:./driver.py",
        options: program::OPTIONS,
        page: Some("exec.md"),
        random: None,
        parse: |what, items| ProgramSpec::parse("exec", what, items.into_iter()).map(StackSpec::Exec),
    },
    BackendRow {
        kind: "nbdkit",
        usage: "nbdkit:PLUGIN ARGS...",
        about: "a plugin of nbdkit, which the server starts",
        example: "nbdkit:memory 1G",
        options: program::OPTIONS,
        page: Some("exec.md"),
        random: None,
        parse: |what, items| ProgramSpec::parse("nbdkit", what, items.into_iter()).map(StackSpec::Nbdkit),
    },
];

/// All backends, in the order of the help.
pub fn backend_rows() -> &'static [BackendRow] {
    ROWS
}

pub(super) fn row(kind: &str) -> Option<&'static BackendRow> {
    ROWS.iter().find(|row| row.kind == kind)
}

/// Returns the syntax of all backends in one line.
pub(super) fn usages() -> String {
    ROWS.iter().map(|row| row.usage).collect::<Vec<_>>().join(", ")
}

/// Returns the error for an unknown kind.
pub(super) fn unknown(kind: &str) -> SpecError {
    let near = options::did_you_mean(kind, ROWS.iter().map(|row| row.kind));
    SpecError::new(format!("unknown backend \"{kind}\""), format!("{near}backends: {}", usages()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_what_help_needs_and_an_example_that_parses() {
        for row in backend_rows() {
            assert!(row.usage.starts_with(row.kind) && !row.about.is_empty(), "{row:?}");
            let stack: StackSpec = row.example.parse().expect("the example parses");
            assert_eq!((stack.kind(), stack.to_string().as_str()), (row.kind, row.example));
        }
    }

    #[test]
    fn random_stacks_are_of_their_kind_and_parse() {
        let mut random = fastrand::Rng::with_seed(13);
        for row in backend_rows() {
            let Some(draw) = row.random else { continue };
            for _ in 0..200 {
                let stack = draw(Bytes::mib(1), &mut |below| random.u64(..below));
                assert_eq!(stack.kind(), row.kind);
                let text = stack.to_string();
                assert_eq!(text.parse::<StackSpec>().map(|again| again.to_string()), Ok(text));
            }
        }
    }

    #[test]
    fn every_option_of_a_row_is_known_to_the_parser() {
        for row in backend_rows() {
            for option in row.options {
                let value = if option.form.is_empty() { "" } else { "=?" };
                let text = format!("{},{}{value}", row.example, option.key);
                if let Err(why) = text.parse::<StackSpec>() {
                    assert!(!why.to_string().contains("no option"), "{text}: {why}");
                }
            }
        }
    }

    #[test]
    fn the_pages_of_the_docs_show_their_backends() {
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        for (row, page) in backend_rows().iter().filter_map(|row| Some((row, row.page?))) {
            let text = std::fs::read_to_string(docs.join(page)).expect(page);
            assert!(text.contains(&format!("{}:", row.kind)), "{page} does not show {}:", row.kind);
        }
    }

    #[test]
    fn an_unknown_kind_names_the_nearest_one() {
        let why = "flie:disk.img".parse::<StackSpec>().expect_err("refused").to_string();
        assert!(
            why.starts_with("unknown backend \"flie\" (did you mean file? backends: file:PATH, "),
            "{why}"
        );
        let why = "tape:disk".parse::<StackSpec>().expect_err("refused").to_string();
        assert!(why.starts_with("unknown backend \"tape\" (backends: file:PATH, ram:SIZE"), "{why}");
    }
}
