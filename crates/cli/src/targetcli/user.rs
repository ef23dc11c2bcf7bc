//! Files of the user who runs targetcli: preferences, history, and the path of the saved configuration.

use crate::failure::Failure;
use lio::prefs::Prefs;
use lio::run::Call;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Widest tree, as in configshell.
const WIDTH_MAX: u16 = 132;
/// Lines of history that are kept.
const HISTORY_MAX: usize = 1000;

/// A user's files and preferences.
pub(super) struct User {
    /// The directory of the files; `None`: the user has no home.
    folder: Option<PathBuf>,
    pub(super) prefs: Prefs,
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn config_folder() -> Option<PathBuf> {
    let own = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")))?;
    Some(own.join("blockyard"))
}

/// Returns the file that `saveconfig` writes by default. It differs from LIO's own file: both may be in use
/// on one machine.
fn save_file() -> PathBuf {
    if let Some(path) = variable("BLOCKYARD_SAVECONFIG") {
        return std::path::absolute(&path).unwrap_or(path);
    }
    let folder = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/etc/blockyard"),
        false => config_folder().unwrap_or_else(|| "/etc/blockyard".into()),
    };
    folder.join("saveconfig.json")
}

/// Whether the environment permits colours (no-color.org).
pub(super) fn has_colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

impl User {
    pub(super) fn load() -> User {
        let folder = variable("TARGETCLI_HOME").or_else(config_folder);
        let text = folder.as_deref().and_then(|folder| std::fs::read_to_string(prefs_file(folder)).ok());
        let prefs = text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        User { folder, prefs }
    }

    /// Stores changed preferences, but not the current node of the shell.
    pub(super) fn save(&self, prefs: &Prefs) -> Result<(), Failure> {
        let settings = |prefs: &Prefs| Prefs {
            last: None,
            path_history: Vec::new(),
            path_history_index: 0,
            ..prefs.clone()
        };
        let prefs = settings(prefs);
        let Some(folder) = self.folder.as_deref().filter(|_| prefs != settings(&self.prefs)) else {
            return Ok(());
        };
        let fail = |why: &dyn std::fmt::Display| Failure::new("targetcli", "preferences", why);
        let value = serde_json::to_value(&prefs).map_err(|why| fail(&why))?;
        lio::store::write(&prefs_file(folder), &value).map_err(|why| fail(&why))
    }

    /// Returns an empty command line of this user.
    pub(super) fn call(&self) -> Call {
        let stdout = std::io::stdout();
        let width = rustix::termios::tcgetwinsize(&stdout).map_or(WIDTH_MAX, |size| size.ws_col);
        let width = if width == 0 { WIDTH_MAX } else { width.min(WIDTH_MAX) };
        Call {
            line: String::new(),
            node: "/".to_owned(),
            folder: std::env::current_dir().unwrap_or_else(|_| "/".into()),
            home: variable("HOME"),
            save_file: save_file(),
            width: width.into(),
            colour: stdout.is_terminal() && has_colours(),
            prefs: self.prefs.clone(),
        }
    }

    /// Returns the command lines of earlier shells.
    pub(super) fn history(&self) -> Vec<String> {
        let file = self.folder.as_deref().map(history_file);
        let text = file.and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Stores the history with mode 0600. Errors are ignored, as the shell is ending.
    pub(super) fn save_history(&self, lines: &[String]) {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let Some(folder) = self.folder.as_deref() else { return };
        let start = lines.len().saturating_sub(HISTORY_MAX);
        let mut options = std::fs::OpenOptions::new();
        let opened = std::fs::create_dir_all(folder).and_then(|()| {
            options.write(true).create(true).truncate(true).mode(0o600).open(history_file(folder))
        });
        if let Ok(mut file) = opened {
            let _ = file.write_all((lines[start..].join("\n") + "\n").as_bytes());
        }
    }
}

fn prefs_file(folder: &Path) -> PathBuf {
    folder.join("targetcli.json")
}

fn history_file(folder: &Path) -> PathBuf {
    folder.join("targetcli_history")
}
