//! The record of a ublk device, from which another process can take it over. It is written before the device
//! can be used and removed with it.
//!
//! ```text
//! NAME.ublk    in the run directory, JSON, mode 0600: number, server process, and the invocation that
//! created the device
//! ```
//!
//! The file is written under another name, synced and renamed, so that a reader finds all of it or none.

use engine::rundir::RunDir;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use spec::{LayerSpec, StackSpec, TableSpec, format_time};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Format version; other versions are not read.
const VERSION: u32 = 1;

/// Why a record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// There is no record.
    #[error(
        "no ublk device of that name waits for a server (exports of other kinds are served again by add)"
    )]
    None,
    /// The content is malformed.
    #[error("{}: {why} (remove the file, and the device by its name in blockyard list: blockyard del ublkbN)", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// Reason for the refusal.
        why: String,
    },
    /// An I/O error.
    #[error("{}: {source} (is the run directory yours, and is there free space?)", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// How a device was created.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Invocation {
    /// A command line, without the program's name.
    #[serde(rename = "line")]
    CommandLine(Vec<String>),
    /// A topology.
    Topology {
        /// The whole text of the topology.
        text: String,
        /// The topology file, from whose directory relative paths start.
        file: PathBuf,
    },
}

/// The web page that showed a device. The next server opens it again at its address for browsers that have
/// it open.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRecord {
    /// Address of the page, with the port that it had.
    pub address: SocketAddr,
    /// Token of the page; `None`: the page needed none.
    pub token: Option<PageToken>,
    /// Whether the page could change devices.
    pub actions: bool,
    /// Whether the page could shrink devices. Older records lack this field, which means no.
    #[serde(default)]
    pub shrink: bool,
}

/// Where the token of a page is stored.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PageToken {
    /// In the record itself, which is as private as a token file.
    Text(String),
    /// In a file of the user, whose content may change.
    File {
        /// Absolute path.
        file: PathBuf,
    },
}

impl fmt::Debug for PageRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageRecord({})", self.address)
    }
}

/// The record of a ublk device, as other processes read it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// Name of the device.
    pub name: String,
    /// The N of `/dev/ublkbN`.
    pub number: u32,
    /// Boot ID of the kernel that assigned the number.
    boot: String,
    /// Process ID of its server, alive or dead.
    pub pid: u32,
    /// Whether a supervisor restarts that process.
    pub supervised: bool,
    /// Working directory of that process, from which relative paths start.
    pub folder: PathBuf,
    /// Command line or topology of that process.
    #[serde(rename = "words")]
    pub invocation: Invocation,
    /// File that replaced the one named there (`set file=`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Stack to which the contents moved (`move`), as a user would type it, with absolute paths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    /// Format of the file, if it was detected rather than given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The page of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page: Option<PageRecord>,
}

impl Record {
    /// Creates the record of a device that does not exist yet.
    pub fn new(name: &str, folder: PathBuf, invocation: Invocation, supervised: bool) -> Record {
        Record {
            version: VERSION,
            name: name.to_owned(),
            number: 0,
            boot: boot(),
            pid: 0,
            supervised,
            folder,
            invocation,
            file: None,
            stack: None,
            format: None,
            page: None,
        }
    }

    /// Whether the record was written since the last boot: older device numbers mean nothing.
    pub fn is_of_this_boot(&self) -> bool {
        self.boot == boot()
    }

    /// Path of a record.
    pub fn path(run: &RunDir, name: &str) -> PathBuf {
        run.path().join(format!("{name}.ublk"))
    }

    /// Writes the record.
    pub(super) fn save(&self, run: &RunDir) -> Result<(), RecordError> {
        let path = Record::path(run, &self.name);
        write(&path, self).map_err(|source| RecordError::Io { path, source })
    }

    /// Replaces the record of a device that is renamed.
    pub(super) fn renamed(&self, run: &RunDir, name: &str) -> Result<Record, RecordError> {
        if matches!(self.invocation, Invocation::Topology { .. }) {
            let why = "the topology that created it names it (change it there)".to_owned();
            return Err(RecordError::Broken { path: Record::path(run, &self.name), why });
        }
        let record = Record { name: name.to_owned(), ..self.clone() };
        record.save(run)?;
        self.remove(run);
        Ok(record)
    }

    /// Records another table. The record of a topology is left as it is.
    pub(super) fn with_table(&self, run: &RunDir, table: &TableSpec) -> Result<Record, RecordError> {
        let Invocation::CommandLine(words) = &self.invocation else { return Ok(self.clone()) };
        let (mut kept, _) = without(words, &["--table", "--table-text", "--table-base"]);
        kept.retain(|word| word != "--no-table");
        kept.push(format!("--table-text={}", table.text()));
        // Relative paths outside the table still start from the recorded directory.
        match table.base.to_str() {
            Some("") => {}
            Some(base) => kept.push(format!("--table-base={base}")),
            None => {
                let why = format!("the folder of its table, {}, is not UTF-8", table.base.display());
                return Err(RecordError::Broken { path: Record::path(run, &self.name), why });
            }
        }
        let record = Record { invocation: Invocation::CommandLine(kept), ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// Returns this record with another topology that describes the device, its file included, and saves it.
    pub(super) fn with_topology(&self, run: &RunDir, text: &str, file: &Path) -> Result<Record, RecordError> {
        let invocation = Invocation::Topology { text: text.to_owned(), file: file.to_owned() };
        let record = Record { invocation, file: None, stack: None, ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// Records another file, for command lines and topologies.
    pub(super) fn with_file(&self, run: &RunDir, file: &Path) -> Result<Record, RecordError> {
        let record = Record { file: Some(file.to_owned()), ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// Records another stack, for command lines and topologies.
    pub(super) fn with_stack(&self, run: &RunDir, stack: &StackSpec) -> Result<Record, RecordError> {
        let record = Record { stack: Some(stack.to_string()), file: None, format: None, ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// Records other layers, limits, scheduler and timeouts. The record of a topology is left as it is.
    pub(super) fn with_layers(
        &self,
        run: &RunDir,
        layers: &[LayerSpec],
        [slow, io_timeout]: [Option<Duration>; 2],
    ) -> Result<Record, RecordError> {
        let Invocation::CommandLine(words) = &self.invocation else { return Ok(self.clone()) };
        let (kept, _) = without(words, &["--scheduler", "--limits", "--slow", "--io-timeout"]);
        let (mut kept, was) = without(&kept, &["--layer"]);
        // Layers below the changeable ones stay as the user wrote them.
        let changes = |layer: &LayerSpec| matches!(layer, LayerSpec::Split(_) | LayerSpec::Scheduler(_));
        let lowest = layers.iter().rposition(|layer| !changes(layer)).map_or(0, |at| at + 1);
        for (was, layer) in was.iter().take(lowest).zip(layers) {
            match layer {
                // The options of the driver may have changed, and it creates no file.
                LayerSpec::Driver(words) if words.files().is_empty() => kept.push(format!("--layer={words}")),
                _ => kept.push(format!("--layer={was}")),
            }
        }
        kept.extend(layers[lowest..].iter().map(|layer| format!("--layer={layer}")));
        kept.extend(slow.map(|slow| format!("--slow={}", format_time(slow))));
        kept.extend(io_timeout.map(|time| format!("--io-timeout={}", format_time(time))));
        let record = Record { invocation: Invocation::CommandLine(kept), ..self.clone() };
        record.save(run)?;
        Ok(record)
    }

    /// Reads the record of a device.
    ///
    /// # Errors
    /// [`RecordError`].
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

    /// Reads all records. Unreadable records are skipped.
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

    /// Removes the record.
    pub fn remove(&self, run: &RunDir) {
        // A file that stays is detected as stale when it is read.
        let _ = fs::remove_file(Record::path(run, &self.name));
    }
}

/// Splits arguments into those without these options, and the options' values.
fn without(arguments: &[String], options: &[&str]) -> (Vec<String>, Vec<String>) {
    let (mut kept, mut values) = (Vec::new(), Vec::new());
    let mut arguments = arguments.iter();
    while let Some(word) = arguments.next() {
        match word.split_once('=') {
            Some((option, value)) if options.contains(&option) => values.push(value.to_owned()),
            None if options.contains(&word.as_str()) => values.extend(arguments.next().cloned()),
            _ => kept.push(word.clone()),
        }
    }
    (kept, values)
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
            // Serialized to memory first: streaming would write every line of a topology separately.
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
        let invocation =
            Invocation::CommandLine(vec!["serve".into(), "file:disk.img".into(), "--ublk".into()]);
        Record { number: 3, pid: 77, ..Record::new(name, "/srv".into(), invocation, true) }
    }

    fn run() -> (tempfile::TempDir, RunDir) {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::at(folder.path());
        (folder, run)
    }

    #[test]
    fn a_record_survives_a_round_trip_and_is_private() {
        let (_guard, run) = run();
        record("disk").save(&run).unwrap();
        assert_eq!(Record::load(&run, "disk").unwrap(), record("disk"));
        let mode = fs::metadata(Record::path(&run, "disk")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 1, "nothing is left beside it");
        let topology = Invocation::Topology { text: "[device.a]\n".into(), file: "/srv/a.toml".into() };
        let mut other = Record::new("a", "/".into(), topology, false);
        let tokens =
            [PageToken::Text("0123456789abcdef".to_owned()), PageToken::File { file: "/srv/token".into() }];
        for token in tokens.map(Some).into_iter().chain([None]) {
            other.page = Some(PageRecord {
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
    fn malformed_records_are_refused() {
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
    fn a_failed_write_leaves_the_old_record() {
        let (_guard, run) = run();
        record("disk").save(&run).unwrap();
        let gone = RunDir::at(run.path().join("missing"));
        assert!(matches!(record("disk").save(&gone), Err(RecordError::Io { .. })));
        assert!(Record::load(&run, "disk").is_ok());
    }

    #[test]
    fn a_renamed_device_is_found_under_its_new_name_only() {
        let (_guard, run) = run();
        record("disk").save(&run).unwrap();
        let next = record("disk").renamed(&run, "other").unwrap();
        assert_eq!(next, Record { name: "other".into(), ..record("disk") });
        assert_eq!(Record::all(&run), [next]);
        let invocation = Invocation::Topology { text: "[device.a]\n".into(), file: "/srv/a.toml".into() };
        let made = Record::new("a", "/".into(), invocation, false);
        made.save(&run).unwrap();
        assert!(made.renamed(&run, "b").unwrap_err().to_string().contains("topology"));
        assert_eq!(Record::load(&run, "a").unwrap(), made, "it is what it was");
    }

    #[test]
    fn a_table_change_is_recorded() {
        let (_guard, run) = run();
        let line = |arguments: &[&str]| {
            Invocation::CommandLine(arguments.iter().map(|&word| word.to_owned()).collect())
        };
        let table: TableSpec = "0 8 linear a.img 0 # comment".parse().unwrap();
        let table = table.rooted("/data".as_ref());
        for before in [
            &["serve", "--table", "t", "--ublk"][..],
            &["serve", "--ublk", "--table-text=0 8 zero", "--table-base=/old"],
            &["serve", "--no-table", "--ublk"],
        ] {
            let made = Record::new("disk", "/srv".into(), line(before), false);
            let next = made.with_table(&run, &table).unwrap();
            let text = "--table-text=0 8 linear a.img 0\n";
            assert_eq!(next.invocation, line(&["serve", "--ublk", text, "--table-base=/data/"]));
            assert_eq!(next.folder, std::path::Path::new("/srv"), "its other paths start where they did");
            assert_eq!(Record::load(&run, "disk").unwrap(), next);
        }
    }

    #[test]
    fn a_file_change_is_recorded() {
        let (_guard, run) = run();
        let invocation = Invocation::Topology { text: "[device.disk]\n".into(), file: "/srv/a.toml".into() };
        for made in [record("disk"), Record { invocation, ..record("disk") }] {
            made.save(&run).unwrap();
            assert_eq!(Record::load(&run, "disk").unwrap().file, None);
            let once = made.with_file(&run, "/b.img".as_ref()).unwrap();
            let twice = once.with_file(&run, "/c.img".as_ref()).unwrap();
            assert_eq!(twice, Record { file: Some("/c.img".into()), ..made });
            assert_eq!(Record::load(&run, "disk").unwrap(), twice);
        }
    }

    #[test]
    fn another_topology_is_recorded() {
        let (_guard, run) = run();
        let before = record("disk").with_file(&run, "/b.img".as_ref()).unwrap();
        let next = before.with_topology(&run, "[device.disk]\n", "/srv/a.toml".as_ref()).unwrap();
        let invocation = Invocation::Topology { text: "[device.disk]\n".into(), file: "/srv/a.toml".into() };
        assert_eq!(next, Record { invocation, file: None, ..before });
        assert_eq!(Record::load(&run, "disk").unwrap(), next);
    }

    #[test]
    fn changed_scheduler_and_limits_are_recorded() {
        let (_guard, run) = run();
        let line = |arguments: &[&str]| {
            Invocation::CommandLine(arguments.iter().map(|&word| word.to_owned()).collect())
        };
        let layers =
            |texts: &[&str]| -> Vec<LayerSpec> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let before = ["serve", "a.img", "--layer", "delay,read=1ms", "--layer=split,max_sectors=8", "--ublk"];
        let more = ["--scheduler", "kyber", "--limits=max_sectors=4", "--slow", "1s"];
        let made = Record::new("disk", "/srv".into(), line(&[&before[..], &more].concat()), false);
        let now = layers(&["delay,read=1ms", "mq-deadline,fifo_batch=4", "split,max_sectors=16"]);
        let kept = ["serve", "a.img", "--ublk", "--layer=delay,read=1ms"];
        let next = made.with_layers(&run, &now, [Some(Duration::from_millis(250)), None]).unwrap();
        let set = ["--layer=mq-deadline,fifo_batch=4", "--layer=split,max_sectors=16", "--slow=250ms"];
        assert_eq!(next.invocation, line(&[&kept[..], &set].concat()));
        assert_eq!(Record::load(&run, "disk").unwrap(), next);
        let last = next.with_layers(&run, &now[..1], [None; 2]).unwrap();
        assert_eq!(last.invocation, line(&kept));
        let text = "[device.disk]\n".to_owned();
        let of_topology = Record {
            invocation: Invocation::Topology { text, file: "/srv/a.toml".into() },
            ..record("disk")
        };
        assert_eq!(of_topology.with_layers(&run, &now, [None; 2]).unwrap(), of_topology);
    }
}
