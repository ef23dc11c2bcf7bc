//! What made the devices of this process, so that another process can serve them when this one is gone.

use engine::rundir::RunDir;
use engine::spec::{FileFormat, FileSpec, StackSpec};
use engine::topology::Topology;
use engine::ublk::{KeptPage, Origin, Record, Words};
use std::path::Path;

/// The words, where they were said, and whether a device is made by them or taken over.
pub(crate) struct Made {
    folder: std::path::PathBuf,
    words: Words,
    /// The file in the place of the one that the words name.
    file: Option<std::path::PathBuf>,
    /// What the words of a topology say.
    topology: Option<Topology>,
    supervised: bool,
    /// The number of the ublk device that waits for this process.
    waits: Option<u32>,
    /// The page of this process, or that of the one before.
    pub(crate) page: Option<KeptPage>,
}

impl Made {
    /// By the command line of this process.
    pub(crate) fn by_line(supervised: bool) -> Made {
        let line = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
        Made {
            folder: here(),
            words: Words::Line(line.collect()),
            file: None,
            topology: None,
            supervised,
            waits: None,
            page: None,
        }
    }

    /// By a topology as it stands at the moment.
    pub(crate) fn by_topology(file: &Path) -> Made {
        // It was read a moment ago; what cannot be read again cannot be recovered.
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        // With the paths that the next server will see.
        let topology = Topology::parse(&text, &file).ok();
        Made {
            folder: here(),
            words: Words::Topology { text, file },
            file: None,
            topology,
            supervised: false,
            waits: None,
            page: None,
        }
    }

    /// By what another process wrote down before it died.
    pub(crate) fn by_record(record: &Record, supervised: bool) -> Made {
        let Record { folder, words, file, number, page, .. } = record.clone();
        Made { folder, words, file, topology: None, supervised, waits: Some(number), page }
    }

    /// Whether a device waits for this process.
    pub(crate) fn takes_over(&self) -> bool {
        self.waits.is_some()
    }

    /// How its ublk device comes to be.
    pub(crate) fn origin(&self) -> Origin {
        self.waits.map_or(Origin::New, Origin::Waits)
    }

    /// What to write down, and where, for whoever takes a device over.
    pub(crate) fn record(&self, run: &RunDir, name: &str, stack: &StackSpec) -> Option<(RunDir, Record)> {
        let words = match (&self.words, &self.topology) {
            (Words::Topology { text, file }, Some(topology)) => {
                Words::Topology { text: topology.text_of(text, file, name), file: file.clone() }
            }
            (words, _) => words.clone(),
        };
        let mut record = Record::new(name, self.folder.clone(), words, self.supervised);
        record.page.clone_from(&self.page);
        record.file.clone_from(&self.file);
        if let StackSpec::File(FileSpec { format: FileFormat::Given(format), .. }) = stack {
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
    use engine::spec::Bytes;
    use engine::ublk::KeptToken;

    #[test]
    fn a_page_that_could_not_be_brought_back_stays_in_the_record() {
        let mut record = Record::new("disk", "/".into(), Words::Line(vec!["serve".into()]), false);
        let token = Some(KeptToken::Text("0123456789abcdef".to_owned()));
        record.page = Some(KeptPage {
            address: "127.0.0.1:7070".parse().expect("one"),
            token,
            actions: false,
            shrink: false,
        });
        let made = Made::by_record(&record, false);
        let (_, next) =
            made.record(&RunDir::at("/nowhere"), "disk", &StackSpec::Zero(Bytes(512))).expect("there is one");
        assert_eq!(next.page, record.page);
    }
}
