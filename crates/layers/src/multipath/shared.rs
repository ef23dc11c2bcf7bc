//! The target `multipath`: a device over one child for each path.

use super::{Config, Multipath, MultipathNode, PathFailure};
use crate::Layer;
use crate::dm::{
    Area, Devices, MessageError, Names, Simulated, Status, Target, TargetError, TargetRange, TargetRow, stack,
};
use block::{Fact, LimitsError, Profile, Sectors};
use queue::{Node, NodeId, Ring};
use std::sync::Arc;

pub(crate) const ROW: TargetRow = TargetRow {
    name: "multipath",
    version: [1, 15, 0],
    usage: concat!(
        "multipath <#features> [<feature>…] <#handler args> [<arg>…] <groups> <first group> ",
        "[<selector> <#args> [<arg>…] <paths> <#path args> [<device> [<arg>…]]+]+",
    ),
    about: "several paths to one device",
    example: "0 2097152 multipath 0 0 1 1 round-robin 0 2 1 a.img 1 b.img 1",
    singleton: true,
    immutable: true,
    simulated: Simulated::Apart,
};

/// Multipath over one child for each path, in order over all groups.
#[derive(Clone)]
pub struct MultipathLayer {
    /// The state of paths and groups.
    pub shared: Arc<Multipath>,
    /// Length of the device; each path is at least this long.
    pub len: Sectors,
}

pub(crate) fn construct<R: Ring>(
    place: TargetRange,
    arguments: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let config = Config::parse(arguments)?;
    let mut away = Vec::new();
    for path in config.groups.iter().flat_map(|group| &group.paths) {
        let opened = devices.open_later(&path.device, place.len);
        let (path, is_there) = opened.map_err(|why| TargetError::lookup("error getting device", why))?;
        if !is_there {
            away.push(path);
        }
    }
    let shared = Multipath::new(config);
    for path in away {
        let _ = shared.fail_path_for(path, PathFailure::Unreachable);
    }
    Ok(Arc::new(MultipathLayer { shared, len: place.len }))
}

impl MultipathLayer {
    /// Returns the area of each path: all start at sector 0 of the same disk.
    fn whole(&self) -> Vec<Area> {
        let paths = 0..self.shared.config().path_count();
        paths.map(|device| Area { device, start: Sectors(0), len: self.len }).collect()
    }
}

impl<R: Ring> Layer<R> for MultipathLayer {
    fn name(&self) -> &'static str {
        "multipath"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.len, &self.whole(), below)?;
        whole.inline = below.iter().all(|path| path.inline);
        whole.sparse = !below.is_empty() && below.iter().all(|path| path.sparse);
        Ok(whole)
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(MultipathNode::new(self.shared.clone(), below))
    }

    fn describe(&self) -> Vec<Fact> {
        let paths = self.shared.config().path_count();
        let mut facts = vec![("multipath", format!("{} of {paths} paths work", self.shared.valid_paths()))];
        if let Some(longest_ns) = self.shared.longest_wait_ns() {
            facts.push(("longest wait for a path", format!("{} ms", longest_ns.div_ceil(1_000_000))));
        }
        facts
    }
}

impl<R: Ring> Target<R> for MultipathLayer {
    fn areas(&self) -> Vec<Area> {
        self.whole()
    }

    fn status(&self, what: Status, names: &Names) -> String {
        let name = |path| names.shown(path).to_owned();
        match what {
            Status::Info => self.shared.status(name),
            Status::Table => self.shared.table(name),
        }
    }

    fn messages(&self) -> &'static [&'static str] {
        &[
            "queue_if_no_path",
            "fail_if_no_path",
            "disable_group",
            "enable_group",
            "switch_group",
            "fail_path",
            "reinstate_path",
        ]
    }

    fn message(&self, arguments: &[&str], names: &Names) -> Result<Option<String>, MessageError> {
        self.shared.message(arguments, |word| names.find(word)).map(|()| None)
    }

    fn events(&self) -> u32 {
        self.shared.events()
    }

    fn presuspend(&self, noflush: bool) {
        self.shared.presuspend(noflush);
    }

    fn resume(&self) {
        self.shared.resume();
    }

    fn paths(&self) -> Option<Arc<Multipath>> {
        Some(self.shared.clone())
    }
}
