//! The invocation that created this process's devices, recorded so that another process can take them over.

use attach::ublk::{Invocation, Origin, PageRecord, Record};
use engine::rundir::RunDir;
use engine::spec::{DiskFileSpec, FileFormat, StackSpec};
use engine::topology::Topology;
use std::path::Path;

/// The invocation, its working directory, and whether a device is created or taken over.
pub(crate) struct Launch {
    folder: std::path::PathBuf,
    invocation: Invocation,
    /// The file that replaced the one in the invocation (`set NAME file=PATH`).
    file: Option<std::path::PathBuf>,
    /// The stack to which the contents of a device that is taken over moved.
    stack: Option<String>,
    /// The parsed topology, if the devices were described by one.
    topology: Option<Topology>,
    supervised: bool,
    /// The number of the ublk device that waits for this process.
    waits: Option<u32>,
    /// The page of this process, or of the previous server.
    pub(crate) page: Option<PageRecord>,
}

impl Launch {
    /// Describes devices by the command line of this process.
    pub(crate) fn by_line(supervised: bool) -> Launch {
        let line = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned());
        Launch {
            folder: here(),
            invocation: Invocation::CommandLine(line.collect()),
            file: None,
            stack: None,
            topology: None,
            supervised,
            waits: None,
            page: None,
        }
    }

    /// Describes devices by the text of a topology. `file`: its absolute path.
    pub(crate) fn by_topology(text: &str, file: &Path) -> Launch {
        let (text, file) = (text.to_owned(), file.to_owned());
        // The text is parsed with absolute paths, as the next server will parse it.
        let topology = Topology::parse(&text, &file).ok();
        Launch {
            folder: here(),
            invocation: Invocation::Topology { text, file },
            file: None,
            stack: None,
            topology,
            supervised: false,
            waits: None,
            page: None,
        }
    }

    /// Describes devices by the record of a previous server.
    pub(crate) fn by_record(record: &Record, supervised: bool) -> Launch {
        let Record { folder, invocation, file, stack, number, page, .. } = record.clone();
        Launch { folder, invocation, file, stack, topology: None, supervised, waits: Some(number), page }
    }

    /// Returns the topology of `up`, with absolute paths.
    pub(crate) fn topology(&self) -> Option<&Topology> {
        self.topology.as_ref()
    }

    /// Returns the absolute path of the topology file of `up`; `None` after a takeover from another process.
    pub(crate) fn file(&self) -> Option<&Path> {
        match &self.invocation {
            Invocation::Topology { file, .. } if !self.takes_over() => Some(file),
            _ => None,
        }
    }

    /// Whether this process takes over a device of a previous server.
    pub(crate) fn takes_over(&self) -> bool {
        self.waits.is_some()
    }

    /// Returns whether the ublk device is created or recovered.
    pub(crate) fn origin(&self) -> Origin {
        self.waits.map_or(Origin::New, Origin::Recover)
    }

    /// Returns the record with which another process can take the device over, and its run directory.
    pub(crate) fn record(&self, run: &RunDir, name: &str, stack: &StackSpec) -> Option<(RunDir, Record)> {
        let invocation = match (&self.invocation, &self.topology) {
            (Invocation::Topology { text, file }, Some(topology)) => {
                Invocation::Topology { text: topology.text_of(text, file, name), file: file.clone() }
            }
            (invocation, _) => invocation.clone(),
        };
        let mut record = Record::new(name, self.folder.clone(), invocation, self.supervised);
        record.page.clone_from(&self.page);
        record.file.clone_from(&self.file);
        record.stack.clone_from(&self.stack);
        if let StackSpec::File(DiskFileSpec { format: FileFormat::Given(format), .. }) = stack {
            record.format = Some(format.to_string());
        }
        Some((run.clone(), record))
    }
}

fn here() -> std::path::PathBuf {
    std::env::current_dir().unwrap_or_else(|_| "/".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use attach::ublk::PageToken;
    use engine::spec::Bytes;

    #[test]
    fn a_page_that_could_not_be_restored_stays_in_the_record() {
        let mut record =
            Record::new("disk", "/".into(), Invocation::CommandLine(vec!["serve".into()]), false);
        let token = Some(PageToken::Text("0123456789abcdef".to_owned()));
        record.page = Some(PageRecord {
            address: "127.0.0.1:7070".parse().expect("one"),
            token,
            actions: false,
            shrink: false,
        });
        let launch = Launch::by_record(&record, false);
        let (_, next) = launch
            .record(&RunDir::at("/nowhere"), "disk", &StackSpec::Zero(Bytes(512)))
            .expect("there is one");
        assert_eq!(next.page, record.page);
    }
}
