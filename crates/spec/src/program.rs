//! `exec:COMMAND[,key=value…]` and `nbdkit:PLUGIN ARGS…[,key=value…]`: programs that the server starts.

use super::{DeviceName, SpecError};
use options::{Escaped, OptionRow, Options, format_time, parse_time, write_flag};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The default of `timeout`: the kernel's timeout of a disk request.
pub const PROGRAM_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// The default of `reconnect`.
pub const PROGRAM_RECONNECT_DEFAULT: Duration = Duration::from_secs(30);

/// A program that serves the blocks of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProgramSpec {
    /// The command or the arguments of nbdkit, as typed.
    pub command: String,
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// The working directory of the program; `None`: that of the server.
    pub dir: Option<PathBuf>,
    /// How long a request may stay unanswered before the program is killed; `None`: forever. Never 0.
    pub timeout: Option<Duration>,
    /// How long requests wait for a restarted program; 0: they fail at once.
    pub reconnect: Duration,
    /// Whether the program is restarted when it exits.
    pub restart: bool,
    /// Whether the device is read-only.
    pub ro: bool,
}

/// The options of `exec:` and `nbdkit:`.
pub(super) const OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "timeout",
        "TIME",
        "30s",
        "give a program up that leaves requests unanswered for so long; 0: never",
    ),
    OptionRow::value(
        "reconnect",
        "TIME",
        "30s",
        "how long requests wait for the program that is started again; 0: they fail",
    ),
    OptionRow::value("restart", "on|off", "on", "start the program again when it has ended"),
    OptionRow::value("dir", "PATH", "that of the server", "the working directory of the program"),
    OptionRow::flag("ro", "read-only"),
];

const RESTART: [(&str, bool); 2] = [("on", true), ("off", false)];

impl ProgramSpec {
    pub(super) fn parse(
        kind: &'static str,
        what: &str,
        items: impl Iterator<Item = String>,
    ) -> Result<ProgramSpec, SpecError> {
        let mut options = Options::new(kind, OPTIONS, items)?;
        let argv = split_command(what)?;
        if argv.first().is_none_or(String::is_empty) {
            let fix = if kind == "exec" { "write exec:./driver.py" } else { "write nbdkit:memory 1G" };
            return Err(SpecError::new(format!("{kind}: names no program"), fix));
        }
        let time = |text: Option<String>| text.map(|text| parse_time(&text)).transpose();
        let timeout = time(options.text("timeout")?)?.unwrap_or(PROGRAM_TIMEOUT_DEFAULT);
        Ok(ProgramSpec {
            command: what.to_owned(),
            argv,
            dir: options.text("dir")?.map(PathBuf::from),
            timeout: Some(timeout).filter(|time| !time.is_zero()),
            reconnect: time(options.text("reconnect")?)?.unwrap_or(PROGRAM_RECONNECT_DEFAULT),
            restart: options.choice("restart", &RESTART)?.unwrap_or(true),
            ro: options.flag("ro")?,
        })
    }

    /// Returns the name for a device without a given one: the name of the program without its last
    /// extension, or of the plugin.
    pub(super) fn derived_name(&self, kind: &'static str) -> DeviceName {
        let mut argv = self.argv.iter().filter(|word| kind == "exec" || !word.starts_with('-'));
        let stem = argv.next().and_then(|word| Path::new(word).file_stem());
        DeviceName::nearest(&stem.map(|stem| stem.to_string_lossy()).unwrap_or_default(), kind)
    }

    /// Sets the working directory of the program to `base`, or to the given directory relative to `base`.
    pub(super) fn rooted(&mut self, base: &Path) {
        self.dir = Some(self.dir.as_ref().map_or_else(|| base.to_owned(), |dir| base.join(dir)));
    }

    pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, kind: &str) -> fmt::Result {
        write!(f, "{kind}:{}", Escaped(&self.command))?;
        if self.timeout != Some(PROGRAM_TIMEOUT_DEFAULT) {
            write!(f, ",timeout={}", format_time(self.timeout.unwrap_or_default()))?;
        }
        if self.reconnect != PROGRAM_RECONNECT_DEFAULT {
            write!(f, ",reconnect={}", format_time(self.reconnect))?;
        }
        f.write_str(if self.restart { "" } else { ",restart=off" })?;
        if let Some(dir) = &self.dir {
            write!(f, ",dir={}", Escaped(&dir.to_string_lossy()))?;
        }
        write_flag(f, self.ro, "ro")
    }
}

/// Splits a command into arguments at blanks, as a shell does: quotes and backslashes keep blanks. Nothing is
/// expanded, and no shell runs.
fn split_command(text: &str) -> Result<Vec<String>, SpecError> {
    let (mut argv, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, ' ' | '\t' | '\n') => argv.extend(word.take()),
            (None, '\'' | '"') => {
                word.get_or_insert_default();
                quote = Some(c);
            }
            (Some(open), c) if c == open => quote = None,
            (None | Some('"'), '\\') => {
                let Some(next) = chars.next() else {
                    return Err(SpecError::new("the command ends in a backslash", "write \\\\ for one"));
                };
                word.get_or_insert_default().push(next);
            }
            (_, '\0') => return Err(SpecError::new("the command has a zero byte", "leave it out")),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if let Some(open) = quote {
        return Err(SpecError::new(format!("the command ends within {open}"), "close the quote"));
    }
    argv.extend(word);
    Ok(argv)
}

#[cfg(test)]
mod tests {
    use super::split_command;
    use crate::StackSpec;
    use std::path::Path;

    #[test]
    fn words_are_split_as_a_shell_splits_them() {
        let split = |text: &str| split_command(text).unwrap();
        assert_eq!(split("a  'b c' \"d\\\"e\" f\\ g ''"), ["a", "b c", "d\"e", "f g", ""]);
        assert_eq!(split("python3 'it'\"'s\".py $HOME"), ["python3", "it's.py", "$HOME"]);
        assert!(split_command("a 'b").unwrap_err().to_string().contains("within '"));
        assert!(split_command("a\\").unwrap_err().to_string().contains("backslash"));
    }

    #[test]
    fn a_program_parses_prints_and_has_a_name() {
        for (text, name) in [
            ("exec:./mem.py --size 1G,timeout=5s,reconnect=60s,restart=off,dir=/srv,ro", "mem"),
            ("exec:python3 'a,,b.py'", "python3"),
            ("nbdkit:--filter=delay memory 1G rdelay=1", "memory"),
        ] {
            let stack: StackSpec = text.parse().unwrap();
            assert_eq!(stack.to_string(), text);
            assert_eq!(stack.derived_name().as_str(), name);
        }
        let rooted = "exec:./mem.py".parse::<StackSpec>().unwrap().rooted(Path::new("/srv"));
        assert_eq!(rooted.to_string(), "exec:./mem.py,dir=/srv");
    }

    #[test]
    fn what_names_no_program_is_refused() {
        for (text, why) in [
            ("exec:", "names no program"),
            ("nbdkit: ", "names no program"),
            ("exec:''", "names no program"),
            ("exec:a,restart=maybe", "restart"),
        ] {
            let refused = text.parse::<StackSpec>().expect_err(text).to_string();
            assert!(refused.contains(why), "{text}: {refused}");
        }
    }
}
