//! The flags of exports: one for each row of the list of exports, and those of NBD.

use crate::complete;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use clap_complete::ArgValueCompleter;
use engine::spec::{ExportRow, export_rows};

/// The heading of the flags in help.
const HEADING: &str = "Exports";

/// The exports of a command line: each flag that was given, with its value; the value is empty where it was omitted.
#[derive(Clone, Default, Debug)]
pub(crate) struct ExportArgs {
    /// Flags in the order of the rows, and within a row in the order of the command line.
    pub(crate) given: Vec<(&'static ExportRow, String)>,
}

impl ExportArgs {
    /// Whether an export of that kind was given.
    pub(crate) fn has(&self, kind: &str) -> bool {
        self.given.iter().any(|(row, _)| row.kind == kind)
    }
}

fn flag(row: &'static ExportRow) -> Arg {
    let action = if row.repeats { ArgAction::Append } else { ArgAction::Set };
    let flag = Arg::new(row.kind)
        .long(row.kind)
        .value_name(row.value_name)
        .help(row.summary)
        .help_heading(HEADING)
        .action(action)
        .add(ArgValueCompleter::new(move |typed: &std::ffi::OsStr| complete::export(row, typed)));
    if row.value_optional {
        flag.num_args(0..=1).require_equals(true).default_missing_value("")
    } else {
        flag
    }
}

impl Args for ExportArgs {
    fn augment_args(command: Command) -> Command {
        export_rows().iter().fold(command, |command, row| command.arg(flag(row)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        ExportArgs::augment_args(command)
    }
}

impl FromArgMatches for ExportArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<ExportArgs, clap::Error> {
        let values = |row: &'static ExportRow| {
            let values = matches.get_many::<String>(row.kind).unwrap_or_default();
            values.map(move |value| (row, value.clone())).collect::<Vec<_>>()
        };
        Ok(ExportArgs { given: export_rows().iter().flat_map(values).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = ExportArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(arguments: &[&str]) -> Vec<(&'static str, String)> {
        let command = ExportArgs::augment_args(Command::new("serve"));
        let matches = command.no_binary_name(true).try_get_matches_from(arguments).expect("flags");
        let args = ExportArgs::from_arg_matches(&matches).expect("exports");
        args.given.into_iter().map(|(row, value)| (row.kind, value)).collect()
    }

    #[test]
    fn every_export_is_a_flag() {
        for row in export_rows() {
            let flag = format!("--{}", row.kind);
            let words = if row.value_optional { vec![format!("{flag}=7")] } else { vec![flag, "7".into()] };
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            assert_eq!(given(&words), [(row.kind, "7".to_owned())]);
        }
    }

    #[test]
    fn an_omitted_value_is_empty_and_a_flag_may_repeat() {
        assert_eq!(given(&["--ublk"]), [("ublk", String::new())]);
        let two = [("nbd", "unix:a".to_owned()), ("nbd", "tcp::1".to_owned())];
        assert_eq!(given(&["--nbd", "unix:a", "--nbd", "tcp::1"]), two);
        assert!(!ExportArgs::default().has("nbd"));
    }
}
