//! What another process needs to take a ublk device over: written before the device can be used, removed with it.
//!
//! ```text
//! NAME.ublk    in the run directory, JSON, mode 0600: the device's number, its server, and the words that made it
//! ```
//!
//! It is written beside its place, synced and renamed, so that whoever kills its writer finds all of it or none.

use crate::rundir::RunDir;
use crate::spec::{LayerSpec, TableSpec, format_time};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The format; another one is not read.
const VERSION: u32 = 1;

/// Why there is no record to be had, or none to be written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// There is none.
    #[error(
        "there is no ublk device of that name that waits for a server (what was shown by other means is served again by add)"
    )]
    None,
    /// It makes no sense.
    #[error("{}: {why} (remove it, and the device by what blockyard list then calls it: blockyard del ublkbN)", path.display())]
    Broken {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// It cannot be written or read.
    #[error("{}: {source} (is the run directory yours, and is there room?)", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The words that made a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Words {
    /// Of a command line, without the program's name.
    Line(Vec<String>),
    /// Of a topology, and where it lay.
    Topology {
        /// All of it.
        text: String,
        /// The file that it was read from: its paths start there.
        file: PathBuf,
    },
}

/// The page that showed a device, as it can be served again: whoever has it open goes on with the same address.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPage {
    /// Where it was, with the port that it had.
    pub address: SocketAddr,
    /// What one had to know; `None`: nothing.
    pub token: Option<KeptToken>,
    /// Whether it changed devices.
    pub actions: bool,
    /// Whether it made them smaller, too. Of an older record: no.
    #[serde(default)]
    pub shrink: bool,
}

/// Where the token of a page is.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum KeptToken {
    /// Here: the record is as private as a file of its own would be.
    Text(String),
    /// In a file of the user's, who may write another one there.
    File {
        /// Which, from the root on.
        file: PathBuf,
    },
}

impl fmt::Debug for KeptPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptPage({})", self.address)
    }
}

/// What is known of a ublk device by those who do not serve it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The device's name.
    pub name: String,
    /// The N of `/dev/ublkbN`.
    pub number: u32,
    /// When that number was given: the kernel's name for each of its starts.
    boot: String,
    /// The process that serves it, or did.
    pub pid: u32,
    /// Whether another process watches over that one.
    pub supervised: bool,
    /// Where that one was started.
    pub folder: PathBuf,
    /// What it was told.
    pub words: Words,
    /// The file in the place of the one that the words name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// The format that it was served in from the start, for words that left that to the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The page of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<KeptPage>,
}

impl Record {
    /// For a device that is yet to be made.
    pub fn new(name: &str, folder: PathBuf, words: Words, supervised: bool) -> Record {
        Record {
            version: VERSION,
            name: name.to_owned(),
            number: 0,
            boot: boot(),
            pid: 0,
            supervised,
            folder,
            words,
            file: None,
            format: None,
            page: None,
        }
    }

    /// Whether it was written since the machine was started: device numbers mean nothing later.
    pub fn is_of_this_boot(&self) -> bool {
        self.boot == boot()
    }

    /// Its place.
    pub fn path(run: &RunDir, name: &str) -> PathBuf {
        run.path().join(format!("{name}.ublk"))
    }

    /// Puts it there, whole.
    pub(super) fn save(&self, run: &RunDir) -> Result<(), RecordError> {
        let path = Record::path(run, &self.name);
        write(&path, self).map_err(|source| RecordError::Io { path, source })
    }

    /// The same for a device that is called something else from now on: the old one goes.
    pub(super) fn renamed(&self, run: &RunDir, name: &str) -> Result<Record, RecordError> {
        if matches!(self.words, Words::Topology { .. }) {
            let why = "the topology that made it names it (change it there)".to_owned();
            return Err(RecordError::Broken { path: Record::path(run, &self.name), why });
        }
        let record = Record { name: name.to_owned(), ..self.clone() };
        record.save(run)?;
        self.remove(run);
        Ok(record)
    }

    /// The same for a device that has another table from now on. One that a topology made keeps that.
    pub(super) fn with_table(&self, run: &RunDir, table: &TableSpec) -> Result<Record, RecordError> {
        let Words::Line(words) = &self.words else { return Ok(self.clone()) };
        let (mut kept, _) = without(words, &["--table", "--table-text", "--table-base"]);
        kept.retain(|word| word != "--no-table");
        kept.push(format!("--table-text={}", table.text()));
        // What else was told starts where it did: only the table's own paths may start elsewhere.
        match table.base.to_str() {
            Some("") => {}
            Some(base) => kept.push(format!("--table-base={base}")),
            None => {
                let why = format!("the folder of its table, {}, is not UTF-8", table.base.display());
                return Err(RecordError::Broken { path: Record::path(run, &self.name), why });
            }
        }
        let record = Record { words: Words::Line(kept), ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// The same for a device that has another file in the place of the one that its words name, whoever said those.
    pub(super) fn with_file(&self, run: &RunDir, file: &Path) -> Result<Record, RecordError> {
        let record = Record { file: Some(file.to_owned()), ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// The same for a device that has another scheduler, other limits or another limit for slow requests from now on. One
    /// that a topology made keeps those.
    pub(super) fn with_layers(
        &self,
        run: &RunDir,
        layers: &[LayerSpec],
        [slow, io_timeout]: [Option<Duration>; 2],
    ) -> Result<Record, RecordError> {
        let Words::Line(words) = &self.words else { return Ok(self.clone()) };
        let (kept, _) = without(words, &["--scheduler", "--limits", "--slow", "--io-timeout"]);
        let (mut kept, was) = without(&kept, &["--layer"]);
        // What lies below those that change stays as it was written.
        let changes = |layer: &LayerSpec| matches!(layer, LayerSpec::Split(_) | LayerSpec::Scheduler(_));
        let lowest = layers.iter().rposition(|layer| !changes(layer)).map_or(0, |at| at + 1);
        for (was, layer) in was.iter().take(lowest).zip(layers) {
            match layer {
                // Its options can be changed, and it makes no file.
                LayerSpec::Driver(words) if words.files().is_empty() => kept.push(format!("--layer={words}")),
                _ => kept.push(format!("--layer={was}")),
            }
        }
        kept.extend(layers[lowest..].iter().map(|layer| format!("--layer={layer}")));
        kept.extend(slow.map(|slow| format!("--slow={}", format_time(slow))));
        kept.extend(io_timeout.map(|time| format!("--io-timeout={}", format_time(time))));
        let record = Record { words: Words::Line(kept), ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// Reads that of a device.
    ///
    /// # Errors
    /// See [`RecordError`].
    pub fn load(run: &RunDir, name: &str) -> Result<Record, RecordError> {
        let path = Record::path(run, name);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Err(RecordError::None),
            Err(source) => return Err(RecordError::Io { path, source }),
        };
        let broken = |why: String| RecordError::Broken { path: path.clone(), why };
        let record: Record = serde_json::from_slice(&text).map_err(|why| broken(why.to_string()))?;
        if record.version != VERSION || record.name != name {
            return Err(broken(format!("it is of version {} and for {}", record.version, record.name)));
        }
        Ok(record)
    }

    /// All that there are. What cannot be read is left out.
    pub fn all(run: &RunDir) -> Vec<Record> {
        let entries = fs::read_dir(run.path()).into_iter().flatten().flatten();
        let load = |entry: fs::DirEntry| {
            let name = entry.file_name();
            Record::load(run, name.to_str()?.strip_suffix(".ublk")?).ok()
        };
        let mut all: Vec<Record> = entries.filter_map(load).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Takes it away.
    pub fn remove(&self, run: &RunDir) {
        // One that stays is found to be about nothing the next time it is looked at.
        let _ = fs::remove_file(Record::path(run, &self.name));
    }
}

/// The words without those options, and what these said.
fn without(words: &[String], options: &[&str]) -> (Vec<String>, Vec<String>) {
    let (mut kept, mut said) = (Vec::new(), Vec::new());
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.split_once('=') {
            Some((option, value)) if options.contains(&option) => said.push(value.to_owned()),
            None if options.contains(&word.as_str()) => said.extend(words.next().cloned()),
            _ => kept.push(word.clone()),
        }
    }
    (kept, said)
}

fn boot() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

fn write(path: &Path, record: &Record) -> io::Result<()> {
    let beside = path.with_extension(format!("ublk.{}", std::process::id()));
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let written = rustix::fs::open(&beside, flags, Mode::RUSR | Mode::WUSR)
        .map_err(io::Error::from)
        .and_then(|file| {
            let mut file = File::from(file);
            // In one piece: as it is told, every line of a topology's text would be a call of its own.
            let mut text = serde_json::to_vec_pretty(record)?;
            text.push(b'\n');
            file.write_all(&text)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn record(name: &str) -> Record {
        let words = Words::Line(vec!["serve".into(), "file:disk.img".into(), "--ublk".into()]);
        Record { number: 3, pid: 77, ..Record::new(name, "/srv".into(), words, true) }
    }

    fn run() -> (tempfile::TempDir, RunDir) {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::at(folder.path());
        (folder, run)
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_is_private() {
        let (_guard, run) = run();
        record("disk").save(&run).unwrap();
        assert_eq!(Record::load(&run, "disk").unwrap(), record("disk"));
        let mode = fs::metadata(Record::path(&run, "disk")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 1, "nothing is left beside it");
        let topology = Words::Topology { text: "[device.a]\n".into(), file: "/srv/a.toml".into() };
        let mut other = Record::new("a", "/".into(), topology, false);
        let tokens =
            [KeptToken::Text("0123456789abcdef".to_owned()), KeptToken::File { file: "/srv/token".into() }];
        for token in tokens.map(Some).into_iter().chain([None]) {
            other.page = Some(KeptPage {
                address: "127.0.0.1:7070".parse().unwrap(),
                token,
                actions: true,
                shrink: false,
            });
            other.save(&run).unwrap();
            assert_eq!(Record::all(&run), [other.clone(), record("disk")]);
        }
        record("disk").remove(&run);
        assert!(matches!(Record::load(&run, "disk"), Err(RecordError::None)));
    }

    #[test]
    fn what_is_not_a_record_is_not_taken_for_one() {
        let (_guard, run) = run();
        for text in ["", "{", "{\"version\":9}", "[]"] {
            fs::write(Record::path(&run, "disk"), text).unwrap();
            assert!(matches!(Record::load(&run, "disk"), Err(RecordError::Broken { .. })), "{text}");
        }
        record("other").save(&run).unwrap();
        fs::rename(Record::path(&run, "other"), Record::path(&run, "disk")).unwrap();
        let error = Record::load(&run, "disk").unwrap_err().to_string();
        assert!(error.contains("for other"), "{error}");
        assert!(Record::all(&run).is_empty());
    }

    #[test]
    fn a_record_that_cannot_be_written_leaves_the_old_one() {
        let (_guard, run) = run();
        record("disk").save(&run).unwrap();
        let gone = RunDir::at(run.path().join("missing"));
        assert!(matches!(record("disk").save(&gone), Err(RecordError::Io { .. })));
        assert!(Record::load(&run, "disk").is_ok());
    }

    #[test]
    fn a_device_that_is_renamed_is_found_under_its_new_name_only() {
        let (_guard, run) = run();
        record("disk").save(&run).unwrap();
        let next = record("disk").renamed(&run, "other").unwrap();
        assert_eq!(next, Record { name: "other".into(), ..record("disk") });
        assert_eq!(Record::all(&run), [next]);
        let words = Words::Topology { text: "[device.a]\n".into(), file: "/srv/a.toml".into() };
        let made = Record::new("a", "/".into(), words, false);
        made.save(&run).unwrap();
        assert!(made.renamed(&run, "b").unwrap_err().to_string().contains("topology"));
        assert_eq!(Record::load(&run, "a").unwrap(), made, "it is what it was");
    }

    #[test]
    fn a_device_that_got_another_table_is_recovered_with_that() {
        let (_guard, run) = run();
        let words = |words: &[&str]| Words::Line(words.iter().map(|&word| word.to_owned()).collect());
        let table: TableSpec = "0 8 linear a.img 0 # comment".parse().unwrap();
        let table = table.rooted("/data".as_ref());
        for before in [
            &["serve", "--table", "t", "--ublk"][..],
            &["serve", "--ublk", "--table-text=0 8 zero", "--table-base=/old"],
            &["serve", "--no-table", "--ublk"],
        ] {
            let made = Record::new("disk", "/srv".into(), words(before), false);
            let next = made.with_table(&run, &table).unwrap();
            let text = "--table-text=0 8 linear a.img 0\n";
            assert_eq!(next.words, words(&["serve", "--ublk", text, "--table-base=/data/"]));
            assert_eq!(next.folder, std::path::Path::new("/srv"), "its other paths start where they did");
            assert_eq!(Record::load(&run, "disk").unwrap(), next);
        }
    }

    #[test]
    fn a_device_that_got_another_file_is_recovered_with_that() {
        let (_guard, run) = run();
        let words = Words::Topology { text: "[device.disk]\n".into(), file: "/srv/a.toml".into() };
        for made in [record("disk"), Record { words, ..record("disk") }] {
            made.save(&run).unwrap();
            assert_eq!(Record::load(&run, "disk").unwrap().file, None);
            let once = made.with_file(&run, "/b.img".as_ref()).unwrap();
            let twice = once.with_file(&run, "/c.img".as_ref()).unwrap();
            assert_eq!(twice, Record { file: Some("/c.img".into()), ..made });
            assert_eq!(Record::load(&run, "disk").unwrap(), twice);
        }
    }

    #[test]
    fn a_device_whose_scheduler_and_limits_were_changed_is_recovered_with_those() {
        let (_guard, run) = run();
        let words = |words: &[&str]| Words::Line(words.iter().map(|&word| word.to_owned()).collect());
        let layers =
            |texts: &[&str]| -> Vec<LayerSpec> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let before = ["serve", "a.img", "--layer", "delay,read=1ms", "--layer=split,max_sectors=8", "--ublk"];
        let more = ["--scheduler", "kyber", "--limits=max_sectors=4", "--slow", "1s"];
        let made = Record::new("disk", "/srv".into(), words(&[&before[..], &more].concat()), false);
        let now = layers(&["delay,read=1ms", "mq-deadline,fifo_batch=4", "split,max_sectors=16"]);
        let kept = ["serve", "a.img", "--ublk", "--layer=delay,read=1ms"];
        let next = made.with_layers(&run, &now, [Some(Duration::from_millis(250)), None]).unwrap();
        let set = ["--layer=mq-deadline,fifo_batch=4", "--layer=split,max_sectors=16", "--slow=250ms"];
        assert_eq!(next.words, words(&[&kept[..], &set].concat()));
        assert_eq!(Record::load(&run, "disk").unwrap(), next);
        let last = next.with_layers(&run, &now[..1], [None; 2]).unwrap();
        assert_eq!(last.words, words(&kept));
        let text = "[device.disk]\n".to_owned();
        let of_topology =
            Record { words: Words::Topology { text, file: "/srv/a.toml".into() }, ..record("disk") };
        assert_eq!(of_topology.with_layers(&run, &now, [None; 2]).unwrap(), of_topology);
    }
}
