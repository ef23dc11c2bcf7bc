//! The arguments of a `multipath` table line, parsed and formatted as device-mapper does.
//!
//! ```text
//! <#features> [<feature> [<value>]]*  <#handler args> [<handler> [<arg>]*]  <#groups> <initial group>
//!     [ <selector> <#selector args> [<arg>]*  <#paths> <#args per path>  [ <device> [<arg>]* ]+ ]+
//! ```
//!
//! Features are case-insensitive, selector names are not. Errors have the kernel's text
//! (drivers/md/dm-mpath.c, dm-table.c), so that scripts which search for it find it.

use super::select::{PathArgs, SelectorArgs};
use crate::dm::{Args, TargetError};
use std::fmt::Write as _;

/// The hardware handler of this project: it runs a program that activates paths.
const EXEC: &str = "exec";

/// The queue mode of the kernel's target. It has little effect here (handlers, the shown table), and is kept
/// to be shown again.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum QueueMode {
    /// `rq` and `mq`; the default.
    #[default]
    Request,
    /// `bio`.
    Bio,
}

/// One path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathConfig {
    /// The device as specified.
    pub device: String,
    /// The selector's arguments for the path.
    pub args: PathArgs,
}

/// One priority group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupConfig {
    /// The path selector.
    pub selector: SelectorArgs,
    /// The paths, at least one, with arguments that fit the selector.
    pub paths: Vec<PathConfig>,
}

/// The arguments of a table line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Queue requests while no path is usable instead of failing them.
    pub queue_if_no_path: bool,
    /// Largest number of retries of a path's activation; 0: not specified.
    pub pg_init_retries: u32,
    /// Delay between retries in milliseconds; `None`: 2000.
    pub pg_init_delay_ms: Option<u32>,
    /// The queue mode.
    pub queue_mode: QueueMode,
    /// The hardware handler with its arguments. Only `exec` has an effect; others are kept to be shown.
    pub handler: Vec<String>,
    /// The priority groups, highest priority first.
    pub groups: Vec<GroupConfig>,
    /// The initial group, from 0; unused without groups.
    pub initial: usize,
}

impl Config {
    /// Parses the arguments that follow the target name `multipath`.
    ///
    /// # Errors
    /// [`TargetError`] with the text that the kernel's constructor would set.
    pub fn parse(arguments: &[&str]) -> Result<Config, TargetError> {
        let mut arguments = Args::new(arguments);
        let mut config = Config {
            queue_if_no_path: false,
            pg_init_retries: 0,
            pg_init_delay_ms: None,
            queue_mode: QueueMode::Request,
            handler: Vec::new(),
            groups: Vec::new(),
            initial: 0,
        };
        config.features(&mut arguments)?;
        let count = arguments.count(1024, "invalid number of hardware handler args")?;
        let mut handler = arguments.take(count);
        let handler: Vec<_> = std::iter::from_fn(|| handler.take_next()).map(str::to_owned).collect();
        // The kernel drops its handlers in bio mode, too: they need requests.
        if config.queue_mode == QueueMode::Request || handler.first().is_some_and(|name| name == EXEC) {
            config.handler = handler;
        }
        if let [EXEC, program @ ..] = config.handler.iter().map(String::as_str).collect::<Vec<_>>().as_slice()
            && !matches!(program, [path] if path.starts_with('/'))
        {
            return Err(TargetError::new("exec: takes one argument, a program by its absolute path"));
        }
        let groups = arguments.number(0, 1024, "invalid number of priority groups")? as usize;
        let initial = arguments.number(0, 1024, "invalid initial priority group number")? as usize;
        if (groups == 0) != (initial == 0) {
            return Err(TargetError::new("invalid initial priority group"));
        }
        config.initial = initial.saturating_sub(1);
        while !arguments.is_empty() {
            config.groups.push(group(&mut arguments)?);
        }
        if config.groups.len() != groups {
            return Err(TargetError::new("priority group count mismatch"));
        }
        // As in the kernel, a number beyond the last group means the first.
        if config.initial >= groups {
            config.initial = 0;
        }
        Ok(config)
    }

    fn features(&mut self, arguments: &mut Args<'_>) -> Result<(), TargetError> {
        let count = arguments.count(8, "invalid number of feature args")?;
        let mut features = arguments.take(count);
        while let Some(feature) = features.take_next() {
            let has_value = !features.is_empty();
            match feature.to_ascii_lowercase().as_str() {
                "queue_if_no_path" => self.queue_if_no_path = true,
                // The kernel accepts this feature and ignores it.
                "retain_attached_hw_handler" => {}
                "pg_init_retries" if has_value => {
                    let error = "pg_init_retries must be between 1 and 50";
                    self.pg_init_retries = features.number(1, 50, error)?;
                }
                "pg_init_delay_msecs" if has_value => {
                    let error = "pg_init_delay_msecs must be between 0 and 60000";
                    self.pg_init_delay_ms = Some(features.number(0, 60_000, error)?);
                }
                "queue_mode" if has_value => {
                    self.queue_mode =
                        match features.take_next().unwrap_or_default().to_ascii_lowercase().as_str() {
                            "bio" => QueueMode::Bio,
                            "rq" | "mq" => QueueMode::Request,
                            _ => return Err(TargetError::new("Unknown 'queue_mode' requested")),
                        };
                }
                _ => return Err(TargetError::new("Unrecognised multipath feature request")),
            }
        }
        Ok(())
    }

    /// Returns the program that activates paths, if the handler is `exec`.
    pub fn activator(&self) -> Option<&str> {
        match self.handler.as_slice() {
            [name, program] if name == EXEC => Some(program),
            _ => None,
        }
    }

    /// Returns the number of paths in all groups.
    pub fn path_count(&self) -> usize {
        self.groups.iter().map(|group| group.paths.len()).sum()
    }

    /// Formats the table line as `dmsetup table` shows it: with the current values of `queue_if_no_path` and
    /// the chosen group, from 1; `name` returns the name of a path by its number over all groups. Every word
    /// is followed by a space.
    pub(super) fn table(
        &self,
        queue_if_no_path: bool,
        group: usize,
        mut name: impl FnMut(usize) -> String,
    ) -> String {
        let mut text = String::new();
        let count = u32::from(queue_if_no_path)
            + 2 * u32::from(self.pg_init_retries > 0)
            + 2 * u32::from(self.pg_init_delay_ms.is_some())
            + 2 * u32::from(self.queue_mode == QueueMode::Bio);
        // Writing to a string does not fail.
        let _ = write!(text, "{count} ");
        if queue_if_no_path {
            text += "queue_if_no_path ";
        }
        if self.pg_init_retries > 0 {
            let _ = write!(text, "pg_init_retries {} ", self.pg_init_retries);
        }
        if let Some(delay_ms) = self.pg_init_delay_ms {
            let _ = write!(text, "pg_init_delay_msecs {delay_ms} ");
        }
        if self.queue_mode == QueueMode::Bio {
            text += "queue_mode bio ";
        }
        match (self.activator(), self.handler.first()) {
            // `exec` needs its argument; the kernel shows no arguments of its own handlers.
            (Some(program), _) => {
                let _ = write!(text, "2 {EXEC} {program} ");
            }
            (None, Some(handler)) => {
                let _ = write!(text, "1 {handler} ");
            }
            (None, None) => text += "0 ",
        }
        let _ = write!(text, "{} {group} ", self.groups.len());
        let mut number = 0;
        for group in &self.groups {
            let _ = write!(text, "{} {}", group.selector.name(), group.selector.table());
            let _ = write!(text, "{} {} ", group.paths.len(), group.selector.table_args());
            for path in &group.paths {
                let _ = write!(text, "{} {}", name(number), path.args.table());
                number += 1;
            }
        }
        text
    }
}

fn group(arguments: &mut Args<'_>) -> Result<GroupConfig, TargetError> {
    if arguments.len() < 2 {
        return Err(TargetError::new("not enough priority group arguments"));
    }
    let name = arguments.take_next().unwrap_or_default();
    if !SelectorArgs::is_known(name) {
        return Err(TargetError::new("unknown path selector type"));
    }
    let count = arguments.count(1024, "invalid number of path selector args")?;
    let selector = SelectorArgs::parse(name, arguments.take(count))?;
    let paths = arguments.number(1, 1024, "invalid number of paths")?;
    let per_path = 1 + arguments.number(0, 1024, "invalid number of selector args")? as usize;
    let mut group = GroupConfig { selector, paths: Vec::new() };
    for _ in 0..paths {
        if arguments.len() < per_path {
            return Err(TargetError::new("not enough path parameters"));
        }
        let mut path = arguments.take(per_path);
        let device = path.take_next().unwrap_or_default().to_owned();
        let args = group.selector.parse_path(path)?;
        group.paths.push(PathConfig { device, args });
    }
    Ok(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Config, TargetError> {
        Config::parse(&line.split_whitespace().collect::<Vec<_>>())
    }

    fn shown(line: &str) -> String {
        let config = parse(line).unwrap();
        let names: Vec<String> =
            config.groups.iter().flat_map(|g| g.paths.iter().map(|p| p.device.clone())).collect();
        let group = if config.groups.is_empty() { 0 } else { config.initial + 1 };
        config.table(config.queue_if_no_path, group, |number| names[number].clone())
    }

    #[test]
    fn table_lines_are_parsed_and_formatted() {
        assert_eq!(
            shown("0 0 1 1 service-time 0 1 2 /dev/nullb0 1 1"),
            "0 0 1 1 service-time 0 1 2 /dev/nullb0 1 1 "
        );
        let line = "4 queue_if_no_path retain_attached_hw_handler queue_mode mq 0 2 1 \
                    queue-length 0 2 1 8:0 1 8:16 1 queue-length 0 2 1 8:32 1 8:48 1";
        let again =
            "1 queue_if_no_path 0 2 1 queue-length 0 2 1 8:0 1 8:16 1 queue-length 0 2 1 8:32 1 8:48 1 ";
        assert_eq!(shown(line), again);
    }

    #[test]
    fn omitted_path_arguments_are_shown_as_defaults() {
        assert_eq!(shown("0 0 1 1 round-robin 0 1 0 8:0"), "0 0 1 1 round-robin 0 1 1 8:0 1 ");
        assert_eq!(shown("0 0 1 1 service-time 0 1 0 8:0"), "0 0 1 1 service-time 0 1 2 8:0 1 1 ");
        assert_eq!(
            shown("0 0 1 1 historical-service-time 0 1 0 8:0"),
            "0 0 1 1 historical-service-time 2 972 0 1 1 8:0 0 "
        );
        assert_eq!(
            shown("2 queue_mode bio 0 1 1 historical-service-time 2 512 3 1 1 8:0 1"),
            "2 queue_mode bio 0 1 1 historical-service-time 2 512 3 1 1 8:0 0 "
        );
    }

    #[test]
    fn features_are_counted_and_kept() {
        let line = "7 PG_INIT_RETRIES 50 pg_init_delay_msecs 0 Queue_If_No_Path queue_mode BIO 1 alua 0 0";
        assert_eq!(
            shown(line),
            "7 queue_if_no_path pg_init_retries 50 pg_init_delay_msecs 0 queue_mode bio 0 0 0 "
        );
        assert_eq!(shown("0 2 rdac x 0 0"), "0 1 rdac 0 0 ");
        assert_eq!(shown("0 2 exec /bin/true 0 0"), "0 2 exec /bin/true 0 0 ");
        assert_eq!(shown("2 queue_mode bio 2 exec /a 0 0"), "2 queue_mode bio 2 exec /a 0 0 ");
    }

    #[test]
    fn errors_have_the_kernels_text() {
        let cases = [
            ("", "invalid number of feature args"),
            ("9 0", "invalid number of feature args"),
            ("1", "invalid number of feature args"),
            ("1 swim 0 0 0", "Unrecognised multipath feature request"),
            ("1 queue_mode 0 0 0", "Unrecognised multipath feature request"),
            ("2 queue_mode fast 0 0 0", "Unknown 'queue_mode' requested"),
            ("2 pg_init_retries 0 0 0 0", "pg_init_retries must be between 1 and 50"),
            ("2 pg_init_delay_msecs 60001 0 0 0", "pg_init_delay_msecs must be between 0 and 60000"),
            ("0 x", "invalid number of hardware handler args"),
            ("0 0", "invalid number of priority groups"),
            ("0 0 1025 1", "invalid number of priority groups"),
            ("0 0 1", "invalid initial priority group number"),
            ("0 0 1 0", "invalid initial priority group"),
            ("0 0 0 1", "invalid initial priority group"),
            ("0 0 1 1", "priority group count mismatch"),
            ("0 0 2 1 round-robin 0 1 0 8:0", "priority group count mismatch"),
            ("0 1 exec 0 0", "exec: takes one argument, a program by its absolute path"),
            ("0 2 exec true 0 0", "exec: takes one argument, a program by its absolute path"),
            ("0 3 exec /a b 0 0", "exec: takes one argument, a program by its absolute path"),
            ("0 0 1 1 round-robin", "not enough priority group arguments"),
            ("0 0 1 1 Round-Robin 0 1 0 8:0", "unknown path selector type"),
            ("0 0 1 1 round-robin x", "invalid number of path selector args"),
            ("0 0 1 1 historical-service-time 1 1024 1 0 8:0", "path selector constructor failed"),
            ("0 0 1 1 round-robin 0 0 0", "invalid number of paths"),
            ("0 0 1 1 round-robin 0 1 x 8:0", "invalid number of selector args"),
            ("0 0 1 1 round-robin 0 2 0 8:0", "not enough path parameters"),
            ("0 0 1 1 round-robin 0 1 2 8:0 1 1", "round-robin ps: incorrect number of arguments"),
            ("0 0 1 1 round-robin 0 1 1 8:0 x", "round-robin ps: invalid repeat count"),
            ("0 0 1 1 queue-length 0 1 2 8:0 1 1", "queue-length ps: incorrect number of arguments"),
            ("0 0 1 1 service-time 0 1 2 8:0 1 101", "service-time ps: invalid relative_throughput value"),
            ("0 0 1 1 io-affinity 0 1 0 8:0", "io-affinity ps: invalid number of arguments"),
        ];
        for (line, error) in cases {
            assert_eq!(parse(line), Err(TargetError::new(error)), "{line}");
        }
    }

    #[test]
    fn an_initial_group_beyond_the_last_is_the_first() {
        assert_eq!(parse("0 0 1 7 round-robin 0 1 0 8:0").unwrap().initial, 0);
        assert_eq!(parse("0 0 2 2 round-robin 0 1 0 a round-robin 0 1 0 b").unwrap().initial, 1);
    }
}
