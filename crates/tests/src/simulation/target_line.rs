//! Lines of targets in random stacks: the random arguments of the rows of the target list, and the targets
//! created from them.
//!
//! Each queue has a target of its own: no message changes one, and its status is not read.

use block::{Bytes, Profile, Sectors};
use layers::dm::{
    Devices, LookupError, RandomLine, Simulated, TableTarget, Target, TargetRange, TargetRow, TargetType,
    rows,
};
use queue::Ring;
use sim::{Rng, SimRing};
use std::fmt;
use std::io;
use std::sync::Arc;

/// A line of a table that begins at sector 0.
#[derive(Clone, Debug)]
pub(super) struct TargetLine {
    name: &'static str,
    pub(super) line: RandomLine,
    /// The target fails requests that its device would execute.
    pub(super) fails: bool,
    /// How a table splits requests for it.
    pub(super) row: TableTarget,
    pub(super) accesses_data: bool,
}

impl TargetLine {
    /// Returns a target at least that long over devices of this kind.
    pub(super) fn random(rng: &mut Rng, len: Sectors, device: &Profile) -> TargetLine {
        let in_stacks = |row: &TargetRow| match row.simulated {
            Simulated::InStacks { random, fails } => Some((row.name, random, fails)),
            Simulated::Apart | Simulated::KeepsNothing => None,
        };
        let targets: Vec<_> = rows().iter().filter_map(in_stacks).collect();
        let &(name, random, fails) = rng.pick(&targets);
        let line = random(&mut |below| rng.below(below), len);
        let place = TargetRange { start: Sectors(0), len: line.len };
        let row = TableTarget { place, max_io_len: None, splits_discards: false };
        let bare = TargetLine { name, line, fails, row, accesses_data: false };
        let (target, _) = bare.build::<SimRing>(device);
        let row =
            TableTarget { max_io_len: target.max_io_len(), splits_discards: target.splits_discards(), ..row };
        TargetLine { row, accesses_data: target.accesses_data(), ..bare }
    }

    /// Returns the target and, for each of its children, the number of the line's device that it is.
    pub(super) fn build<R: Ring>(&self, device: &Profile) -> (Arc<dyn Target<R>>, Vec<usize>) {
        let words: Vec<&str> = self.line.args.split(' ').collect();
        let mut opening =
            DeviceOpener { device: Profile { size: Bytes(1 << 40), ..device.clone() }, opened: vec![] };
        let kind = TargetType::<R>::find(self.name).expect("it is in the list");
        let made = (kind.construct)(self.row.place, &words, &mut opening);
        let target = made.unwrap_or_else(|why| panic!("{self}: {why}"));
        (target, opening.opened)
    }
}

impl fmt::Display for TargetLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0 {} {} {}", self.line.len.0, self.name, self.line.args)
    }
}

/// The devices of a line, which are named `a`, `b`, and so on, and are below the target in this order.
struct DeviceOpener {
    device: Profile,
    opened: Vec<usize>,
}

impl Devices for DeviceOpener {
    fn open(&mut self, word: &str) -> Result<usize, LookupError> {
        let [letter] = word.as_bytes() else { panic!("{word} is no device of a random line") };
        self.opened.push(usize::from(letter - b'a'));
        Ok(self.opened.len() - 1)
    }

    fn profile(&self, _: usize) -> &Profile {
        &self.device
    }

    fn identity(&self, device: usize) -> &str {
        ["a", "b", "c"][self.opened[device]]
    }

    fn read(&mut self, _: usize, _: Bytes, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn write(&mut self, _: usize, _: Bytes, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn flush(&mut self, _: usize) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Targets with state, which have scenarios of their own: those of `targets`, and parts of random stacks.
    const APART: [&str; 5] = ["log-writes", "mirror", "multipath", "snapshot", "snapshot-origin"];

    #[test]
    fn every_target_that_keeps_data_is_in_the_simulation() {
        let mut limits = block::QueueLimits::default();
        limits.validate().expect("limits that fit");
        let device = Profile {
            size: Bytes(0),
            read_only: false,
            abilities: block::Abilities::MEMORY,
            limits,
            bytewise: false,
            zero_copy_reads: false,
            inline: false,
            sparse: false,
            opaque: false,
        };
        let mut rng = Rng::new(1);
        let lines = (0..500).map(|_| TargetLine::random(&mut rng, Sectors(100), &device).name);
        let simulated: BTreeSet<&str> = lines.chain(APART).collect();
        let keeping = rows().iter().filter(|row| !matches!(row.simulated, Simulated::KeepsNothing));
        assert_eq!(simulated, keeping.map(|row| row.name).collect());
    }
}
