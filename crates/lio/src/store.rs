//! The file of a saved configuration: written atomically with mode 0600, backed up before it changes.

use crate::json;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Largest file that is read, in bytes. A target with 10,000 LUNs takes about 40 MB.
const LEN_MAX: u64 = 256 << 20;

fn named(path: &Path) -> impl FnOnce(io::Error) -> String {
    move |why| format!("{}: {why}", path.display())
}

/// Reads a saved configuration.
///
/// # Errors
/// The file cannot be read, is too large, or is not a JSON object.
pub fn read(path: &Path) -> Result<Value, String> {
    let file = File::open(path).map_err(named(path))?;
    let mut text = String::new();
    file.take(LEN_MAX + 1).read_to_string(&mut text).map_err(named(path))?;
    if text.len() as u64 > LEN_MAX {
        return Err(format!("{}: larger than {} MiB", path.display(), LEN_MAX >> 20));
    }
    let value: Value = serde_json::from_str(&text).map_err(|why| {
        // The error has only the position, since serde_json's message could quote a secret.
        format!("{}: line {}, column {}: not valid JSON", path.display(), why.line(), why.column())
    })?;
    if value.is_object() { Ok(value) } else { Err(format!("{}: not a JSON object", path.display())) }
}

/// Writes a configuration: into a new file of mode 0600, which then replaces the old one. Missing directories are
/// created with mode 0700.
///
/// # Errors
/// The file cannot be written; an existing file is unchanged.
pub fn write(path: &Path, value: &Value) -> Result<(), String> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    create_folder(folder)?;
    let mut name = path.file_name().ok_or_else(|| format!("{}: not a file name", path.display()))?.to_owned();
    name.push(".temp");
    let temporary = path.with_file_name(name);
    // A process that died may have left the temporary file, perhaps with another mode.
    let _ = fs::remove_file(&temporary);
    write_new(&temporary, json::text(value).as_bytes()).map_err(named(&temporary))?;
    let renamed = fs::rename(&temporary, path).map_err(named(path));
    if renamed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    // Syncing the directory makes the new name survive a power cut.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(named(folder))
}

fn create_folder(folder: &Path) -> Result<(), String> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(named(folder))
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // The mode is set explicitly, as the umask may have cleared bits.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Backs up a configuration that is about to be replaced, as `backup/saveconfig-TIME-json.gz` in the same
/// directory, unless the newest backup is equal. Keeps the `keep` newest backups. Returns the directory if
/// a backup was made.
///
/// # Errors
/// The backup could not be made.
pub fn back_up(path: &Path, keep: u32) -> Result<Option<PathBuf>, String> {
    let Ok(current) = fs::read(path) else { return Ok(None) };
    let folder = path.parent().unwrap_or(Path::new(".")).join("backup");
    create_folder(&folder)?;
    let mut backups = backups(&folder);
    if backups.last().and_then(|newest| content(newest).ok()).is_some_and(|newest| newest == current) {
        return Ok(None);
    }
    let time = jiff::Zoned::now().strftime("%Y%m%d-%H:%M:%S").to_string();
    let backup = folder.join(format!("saveconfig-{time}-json.gz"));
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let packed = encoder.write_all(&current).and_then(|()| encoder.finish()).map_err(named(&backup))?;
    // A second backup within one second replaces the first.
    let _ = fs::remove_file(&backup);
    write_new(&backup, &packed).map_err(named(&backup))?;
    backups.retain(|other| *other != backup);
    let excess = (backups.len() + 1).saturating_sub(keep.max(1) as usize);
    for old in backups.iter().take(excess) {
        let _ = fs::remove_file(old);
    }
    Ok(Some(folder))
}

/// Returns the backups in a directory, oldest first.
fn backups(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("saveconfig-") && name.contains("json")
        })
        .map(|entry| entry.path())
        .collect();
    all.sort();
    all
}

fn content(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path)?;
    match path.extension().is_some_and(|extension| extension == "gz") {
        true => GzDecoder::new(file).take(LEN_MAX).read_to_end(&mut bytes)?,
        false => file.take(LEN_MAX).read_to_end(&mut bytes)?,
    };
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_saved_file_is_private_and_replaces_the_old_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("new/saveconfig.json");
        for number in 0..2 {
            write(&path, &json!({ "number": number })).expect("it is written");
            let mode = fs::metadata(&path).expect("it exists").permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            assert_eq!(read(&path), Ok(json!({ "number": number })));
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("a mode");
        write(&path, &json!({})).expect("it is written");
        assert_eq!(fs::metadata(&path).expect("it exists").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().expect("one")).expect("entries").count(), 1);
    }

    #[test]
    fn backups_are_made_of_changed_files_only_and_the_oldest_go() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("saveconfig.json");
        assert_eq!(back_up(&path, 3), Ok(None));
        let backup = folder.path().join("backup");
        fs::create_dir(&backup).expect("a folder");
        for day in 1..=5 {
            fs::write(backup.join(format!("saveconfig-2020010{day}-00:00:00-json.gz")), "old")
                .expect("a file");
        }
        write(&path, &json!({ "a": 1 })).expect("it is written");
        assert_eq!(back_up(&path, 3), Ok(Some(backup.clone())));
        let left = backups(&backup);
        assert_eq!(left.len(), 3);
        assert_eq!(content(left.last().expect("one")).expect("it is read"), fs::read(&path).expect("bytes"));
        assert_eq!(back_up(&path, 3), Ok(None), "nothing has changed since");
    }

    #[test]
    fn a_broken_file_is_reported_without_its_content() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("broken.json");
        fs::write(&path, "{\"chap_password\": \"geheim").expect("a file");
        let why = read(&path).expect_err("refused");
        assert!(why.contains("line 1") && !why.contains("geheim"), "{why}");
        fs::write(&path, "[]").expect("a file");
        assert!(read(&path).is_err());
    }
}
