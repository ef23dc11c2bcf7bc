//! The description of an export for help, completions, parsers and the reference.

use crate::SpecError;
use options::OptionRow;

/// A kind of export, as users see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExportRow {
    /// Its name: the flag `--KIND`, the key in a topology and the second word of the ready line.
    pub kind: &'static str,
    /// The placeholder of the flag's value.
    pub value_name: &'static str,
    /// Whether the flag may be given without a value, so that the key may be `true` or a number.
    pub value_optional: bool,
    /// Whether the flag may be given several times.
    pub repeats: bool,
    /// The purpose, for the list of options of a command: one line of at most 50 columns.
    pub summary: &'static str,
    /// The flag with its value: `--nbd unix:PATH | tcp:HOST:PORT`.
    pub usage: &'static str,
    /// The purpose, in a sentence.
    pub about: &'static str,
    /// A command line that works.
    pub example: &'static str,
    /// The options that may follow the value, after commas.
    pub options: &'static [OptionRow],
    /// Whether it creates a block device of the kernel, so that the process must never wait for writeback
    /// to that device.
    pub is_kernel_device: bool,
    /// The docs page about the export: `nbd-server.md`.
    pub page: &'static str,
}

/// Returns the row of a kind.
pub(super) fn of(kind: &str) -> Option<&'static ExportRow> {
    super::export_rows().iter().find(|row| row.kind == kind)
}

/// Returns the error for an unknown kind.
pub(super) fn unknown(kind: &str) -> SpecError {
    let kinds: Vec<&str> = super::export_rows().iter().map(|row| row.kind).collect();
    let near = options::did_you_mean(kind, kinds.iter().copied());
    SpecError::new(format!("unknown export \"{kind}\""), format!("{near}exports: {}", kinds.join(", ")))
}

#[cfg(test)]
mod tests {
    use crate::{DeviceName, ExportKind, NbdOptions, TlsSpec, default_exports, export_rows};
    use std::path::Path;

    fn nbd() -> NbdOptions {
        let device: DeviceName = "disk".parse().expect("a name");
        NbdOptions { name: device.to_string(), tls: TlsSpec::default() }
    }

    #[test]
    fn every_row_has_what_help_needs_and_an_example_that_parses() {
        for row in export_rows() {
            let flag = format!("--{}", row.kind);
            assert!(row.usage.starts_with(&flag) && !row.about.is_empty(), "{row:?}");
            assert!(!row.summary.is_empty() && row.summary.len() <= 50, "{row:?}");
            let mut words = row.example.split(' ').skip_while(|word| !word.starts_with(&flag));
            let value = match words.next().expect("the example has the flag").split_once('=') {
                Some((_, value)) => value,
                None if row.value_optional => "",
                None => words.next().expect("the example has a value"),
            };
            let kind = ExportKind::parse(row.kind, value, &nbd()).expect("the example parses");
            assert_eq!(kind.row(), Some(row));
            assert_eq!(ExportKind::parse(row.kind, &kind.value(), &nbd()), Ok(kind), "the text parses back");
            assert_eq!(ExportKind::parse(row.kind, "", &nbd()).is_ok(), row.value_optional, "{row:?}");
        }
    }

    #[test]
    fn every_option_of_a_row_is_known_to_the_parser() {
        for row in export_rows() {
            for option in row.options {
                let value = if option.form.is_empty() { "" } else { "=?" };
                let text = format!("0,{}{value}", option.key);
                if let Err(why) = ExportKind::parse(row.kind, &text, &nbd()) {
                    let why = why.to_string();
                    assert!(!why.contains("no option"), "{text}: {why}");
                }
            }
            let unknown = ExportKind::parse(row.kind, "0,no-such-option=1", &nbd());
            assert!(row.options.is_empty() || unknown.is_err(), "{row:?}");
        }
    }

    #[test]
    fn the_default_export_is_ublk_else_loop_else_nbd() {
        let kinds: Vec<&str> = default_exports().iter().map(|row| row.kind).collect();
        assert_eq!(kinds, ["ublk", "loop", "nbd"]);
    }

    #[test]
    fn every_export_has_a_page_of_the_docs() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        for row in export_rows() {
            let page = std::fs::read_to_string(docs.join(row.page)).expect(row.page);
            assert!(page.contains(&format!("--{}", row.kind)), "{} does not show --{}", row.page, row.kind);
        }
    }

    #[test]
    fn an_unknown_export_names_the_nearest_one() {
        let why = ExportKind::parse("ubkl", "", &nbd()).expect_err("unknown").to_string();
        assert!(why.starts_with("unknown export \"ubkl\" (did you mean ublk? exports: nbd, ublk, "), "{why}");
    }
}
