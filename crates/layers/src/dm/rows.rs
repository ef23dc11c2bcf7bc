//! The list of target types, with one row for each type. `dmsetup targets`, the table parser, error hints,
//! help, the simulation and the check of docs/targets iterate over the list; none of them names a target.
//!
//! A new target is a file with a [`TargetRow`] and a constructor, and a line in `list!`.

use super::{Construct, TargetError};
use block::Sectors;
use queue::Ring;

/// The description of a target type for users, help and tests.
#[derive(Clone, Copy, Debug)]
pub struct TargetRow {
    /// Name of the target in tables.
    pub name: &'static str,
    /// The version of the kernel's target whose arguments, status and messages it implements.
    pub version: [u32; 3],
    /// The syntax of the table line after start and length, one form per line: `linear <device> <offset>`.
    pub usage: &'static str,
    /// The purpose of the target, in at most 60 bytes.
    pub about: &'static str,
    /// A complete table line, valid where its devices exist.
    pub example: &'static str,
    /// Whether the target must be the only one of its table (`DM_TARGET_SINGLETON`).
    pub singleton: bool,
    /// Whether a table that contains it can only be replaced by tables that contain it
    /// (`DM_TARGET_IMMUTABLE`).
    pub immutable: bool,
    /// How the seeded simulation covers the target.
    pub simulated: Simulated,
}

/// How the seeded simulation exercises a target.
#[derive(Clone, Copy, Debug)]
pub enum Simulated {
    /// Random table lines of the target are part of random stacks.
    InStacks {
        /// Returns a random line of at least this length. `below(n)` returns a random number less than `n`.
        random: fn(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine,
        /// Whether the target fails requests that its device would complete. Lines of such a target begin at
        /// sector 0 of one device, so that the simulation can omit the target while no request may fail.
        fails: bool,
    },
    /// The target has state that outlives a request: the simulation has separate scenarios for it.
    Apart,
    /// The simulation does not cover the target: data written to it cannot be read back.
    KeepsNothing,
}

/// A table line for the simulation.
#[derive(Clone, Debug)]
pub struct RandomLine {
    /// The length of the target.
    pub len: Sectors,
    /// The arguments. The first device is called `a`, the next `b`, and so on.
    pub args: String,
    /// The minimum length of each device, in this order.
    pub devices: Vec<Sectors>,
}

impl RandomLine {
    /// Returns a line over part of one device: `<first> a <offset> <last>`.
    pub(super) fn over_one(
        len: Sectors,
        first: &str,
        offset: u64,
        device_len: Sectors,
        last: &str,
    ) -> RandomLine {
        let args = [first, "a", &offset.to_string(), last].join(" ").trim().to_owned();
        RandomLine { len, args, devices: vec![Sectors(offset + device_len.0)] }
    }

    /// Returns a line over `count` devices that uses `device_len` of each, from a random sector on:
    /// `<first> a <offset> b <offset>`.
    pub(super) fn over_many(
        below: &mut dyn FnMut(u64) -> u64,
        len: Sectors,
        first: String,
        count: u64,
        device_len: Sectors,
    ) -> RandomLine {
        let (mut args, mut devices) = (first, Vec::new());
        for device in (b'a'..).take(count as usize) {
            let offset = below(33);
            args.push_str(&format!(" {} {offset}", char::from(device)));
            devices.push(Sectors(offset + device_len.0));
        }
        RandomLine { len, args, devices }
    }
}

/// A target type: its description and its constructor.
pub struct TargetType<R: Ring> {
    /// Description of the target.
    pub row: &'static TargetRow,
    /// Constructor of the target.
    pub construct: Construct<R>,
}

impl<R: Ring> TargetType<R> {
    /// Returns the target type of that name.
    ///
    /// # Errors
    /// If the name is unknown; the message suggests the nearest one and lists all.
    pub fn find(name: &str) -> Result<TargetType<R>, TargetError> {
        target_types().into_iter().find(|kind| kind.row.name == name).ok_or_else(|| unknown(name))
    }
}

macro_rules! list {
    ($($($path:ident)::+),* $(,)?) => {
        /// Returns the descriptions of all target types, sorted by name.
        pub fn rows() -> &'static [TargetRow] {
            const ROWS: &[TargetRow] = &[$($($path)::+::ROW),*];
            ROWS
        }

        /// Returns all target types, in the order of [`rows`].
        pub fn target_types<R: Ring>() -> Vec<TargetType<R>> {
            let constructors: Vec<Construct<R>> = vec![$($($path)::+::construct),*];
            rows().iter().zip(constructors).map(|(row, construct)| TargetType { row, construct }).collect()
        }
    };
}

list!(
    super::delay,
    super::dust,
    super::error_target,
    super::flakey,
    super::linear,
    super::log_writes,
    super::mirror,
    crate::multipath::shared,
    super::snapshot,
    super::snapshot::origin,
    super::striped,
    super::switch,
    super::unstriped,
    super::zero,
);

/// Returns the error for a name that is not in the list: the kernel's text and a suggestion.
fn unknown(name: &str) -> TargetError {
    let names: Vec<&str> = rows().iter().map(|row| row.name).collect();
    let near = options::did_you_mean(name, names.iter().copied());
    TargetError::of(format!("{name}: unknown target type ({near}targets: {})", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::testing::FakeDevices;
    use super::super::{Target, TargetRange};
    use super::*;
    use crate::testing::Clock;
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;

    fn construct(row: &TargetRow, len: Sectors, args: &[&str]) -> Arc<dyn Target<Clock>> {
        let kind = TargetType::<Clock>::find(row.name).expect("it is in the list");
        let target =
            (kind.construct)(TargetRange { start: Sectors(0), len }, args, &mut FakeDevices::default());
        target.unwrap_or_else(|why| panic!("{} {args:?}: {why}", row.name))
    }

    #[test]
    fn every_row_has_help_texts_and_a_valid_example() {
        for row in rows() {
            assert!(!row.about.is_empty() && row.about.len() <= 60, "{row:?}");
            for usage in row.usage.lines() {
                assert_eq!(usage.split(' ').next(), Some(row.name), "{row:?}");
            }
            let args: Vec<&str> = row.example.split(' ').collect();
            let ["0", len, name, args @ ..] = &args[..] else { panic!("{row:?}") };
            assert_eq!(*name, row.name);
            construct(row, Sectors(len.parse().expect("a length")), args);
        }
        assert!(rows().is_sorted_by(|one, next| one.name < next.name), "by name, each once");
    }

    #[test]
    fn random_lines_are_valid_and_stay_within_their_devices() {
        let mut random = fastrand::Rng::with_seed(1);
        for row in rows() {
            let Simulated::InStacks { random: line, fails } = row.simulated else { continue };
            for _ in 0..200 {
                let len = Sectors(random.u64(1..2000));
                let line = line(&mut |below| random.u64(..below), len);
                let args: Vec<&str> = line.args.split(' ').collect();
                let target = construct(row, line.len, &args);
                assert!(line.len >= len, "{row:?} {line:?}");
                for area in target.areas() {
                    let device = line.devices[area.device.min(line.devices.len() - 1)];
                    assert!(area.start.0 + area.len.0 <= device.0, "{row:?} {line:?} {area:?}");
                }
                if fails {
                    let areas = target.areas();
                    assert!(areas.len() == 1 && areas[0].start.0 == 0, "{row:?} {line:?}");
                }
            }
        }
    }

    #[test]
    fn every_target_is_in_the_docs_with_its_usage() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/targets");
        let list = fs::read_to_string(folder.join("README.md")).expect("the list");
        let files = fs::read_dir(&folder).expect("docs of targets").map(|file| file.expect("a file").path());
        let pages: Vec<(String, String)> = files
            .map(|file| {
                let text = fs::read_to_string(&file).expect("a page");
                (file.file_name().expect("a name").to_string_lossy().into_owned(), text)
            })
            .collect();
        let mut named = Vec::new();
        for row in rows() {
            let lines: Vec<String> =
                row.usage.lines().map(|usage| format!("    <start> <length> {usage}")).collect();
            let has = |text: &str| lines.iter().all(|line| text.lines().any(|of_page| of_page == line));
            let page = pages.iter().find(|(_, text)| has(text));
            let Some((page, _)) = page else { panic!("no page of docs/targets has {lines:#?}") };
            named.push(page.clone());
            let link = if page == "README.md" { format!("#{}", row.name) } else { page.clone() };
            let listed = format!("| [{}]({link}) | {} |", row.name, row.about);
            assert!(list.lines().any(|line| line == listed), "docs/targets/README.md lacks {listed}");
        }
        for (page, _) in &pages {
            assert!(page == "README.md" || named.contains(page), "docs/targets/{page} names no target");
        }
    }

    #[test]
    fn an_unknown_target_is_refused_with_the_nearest_name() {
        let why = |name| TargetType::<Clock>::find(name).err().expect("refused").to_string();
        assert!(
            why("dleay")
                .starts_with("dleay: unknown target type (did you mean delay? targets: delay, dust, "),
            "{}",
            why("dleay")
        );
        assert!(why("swim").starts_with("swim: unknown target type (targets: delay, "), "{}", why("swim"));
    }
}
