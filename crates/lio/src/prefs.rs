//! Preferences of a user: targetcli's `global` group.

use serde::{Deserialize, Serialize};

/// Preferences. They belong to the user who runs a command, not to the configuration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Prefs {
    /// Whether the product in INQUIRY is the storage object's name.
    pub export_backstore_name_as_model: bool,
    /// Whether new portal groups are enabled.
    pub auto_enable_tpgt: bool,
    /// Whether ACLs get mapped LUNs when a LUN or an ACL is created.
    pub auto_add_mapped_luns: bool,
    /// Whether the shell changes to a node that it created.
    pub auto_cd_after_create: bool,
    /// Whether the shell saves the configuration when it exits.
    pub auto_save_on_exit: bool,
    /// Whether new portal groups listen at every address.
    pub auto_add_default_portal: bool,
    /// Number of backups of the saved configuration that are kept.
    pub max_backup_files: u32,
    /// Whether nodes of the tree are shown as `o-`; else `+-`.
    pub tree_round_nodes: bool,
    /// Whether the tree shows the summaries of nodes.
    pub tree_status_mode: bool,
    /// Levels of the tree that `ls` shows; 0: all.
    pub tree_max_depth: u32,
    /// Whether `ls` shows the node at which it begins.
    pub tree_show_root: bool,
    /// Whether output on a terminal has colours.
    pub color_mode: bool,
    /// Longest path in the prompt; 0: any.
    pub prompt_length: u32,
    /// Which messages are shown: `info`, `warning` or `error`.
    pub loglevel_console: String,
    /// The path of the last node that was created.
    pub last: Option<String>,
    /// The history of `cd`: paths of nodes.
    pub path_history: Vec<String>,
    /// Index of the current node in the history.
    pub path_history_index: usize,
}

impl Default for Prefs {
    fn default() -> Prefs {
        Prefs {
            export_backstore_name_as_model: true,
            auto_enable_tpgt: true,
            auto_add_mapped_luns: true,
            auto_cd_after_create: false,
            auto_save_on_exit: true,
            auto_add_default_portal: true,
            max_backup_files: 10,
            tree_round_nodes: true,
            tree_status_mode: true,
            tree_max_depth: 0,
            tree_show_root: true,
            color_mode: true,
            prompt_length: 30,
            loglevel_console: "info".to_owned(),
            last: None,
            path_history: Vec::new(),
            path_history_index: 0,
        }
    }
}

/// The type of a preference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Bool,
    Number,
    LogLevel,
}

/// Preferences that users can set: name, type, purpose.
pub(crate) const ROWS: [(&str, Kind, &str); 14] = [
    ("auto_add_default_portal", Kind::Bool, "New portal groups listen at every address."),
    ("auto_add_mapped_luns", Kind::Bool, "New LUNs are mapped in all ACLs, and new ACLs get all LUNs."),
    ("auto_cd_after_create", Kind::Bool, "The shell enters objects that were created."),
    ("auto_enable_tpgt", Kind::Bool, "New portal groups are enabled."),
    ("auto_save_on_exit", Kind::Bool, "The configuration is saved at the end of the shell."),
    ("color_mode", Kind::Bool, "Output on a terminal has colours."),
    ("export_backstore_name_as_model", Kind::Bool, "Initiators see a storage object's name as the product."),
    ("loglevel_console", Kind::LogLevel, "Messages that are shown."),
    ("max_backup_files", Kind::Number, "Backups of the saved configuration that are kept."),
    ("prompt_length", Kind::Number, "Longest path in the prompt; 0: any."),
    ("tree_max_depth", Kind::Number, "Levels of the tree that ls shows; 0: all."),
    ("tree_round_nodes", Kind::Bool, "ls shows nodes as o-, else as +-."),
    ("tree_show_root", Kind::Bool, "ls shows the node it begins at."),
    ("tree_status_mode", Kind::Bool, "ls shows what nodes are."),
];

/// Levels of messages, the most important first.
pub(crate) const LEVELS: [&str; 6] = ["critical", "error", "warning", "info", "verbose", "debug"];

impl Prefs {
    fn flag(&mut self, name: &str) -> Option<&mut bool> {
        Some(match name {
            "auto_add_default_portal" => &mut self.auto_add_default_portal,
            "auto_add_mapped_luns" => &mut self.auto_add_mapped_luns,
            "auto_cd_after_create" => &mut self.auto_cd_after_create,
            "auto_enable_tpgt" => &mut self.auto_enable_tpgt,
            "auto_save_on_exit" => &mut self.auto_save_on_exit,
            "color_mode" => &mut self.color_mode,
            "export_backstore_name_as_model" => &mut self.export_backstore_name_as_model,
            "tree_round_nodes" => &mut self.tree_round_nodes,
            "tree_show_root" => &mut self.tree_show_root,
            "tree_status_mode" => &mut self.tree_status_mode,
            _ => return None,
        })
    }

    fn number(&mut self, name: &str) -> Option<&mut u32> {
        Some(match name {
            "max_backup_files" => &mut self.max_backup_files,
            "prompt_length" => &mut self.prompt_length,
            "tree_max_depth" => &mut self.tree_max_depth,
            _ => return None,
        })
    }

    /// Returns a preference as text.
    pub(crate) fn get(&self, name: &str) -> String {
        let mut prefs = self.clone();
        if let Some(flag) = prefs.flag(name) {
            return flag.to_string();
        }
        match prefs.number(name) {
            Some(number) => number.to_string(),
            None => self.loglevel_console.clone(),
        }
    }

    /// Sets a preference of [`ROWS`].
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        if let Some(flag) = self.flag(name) {
            *flag = boolean(value)?;
        } else if let Some(number) = self.number(name) {
            *number = value.parse().map_err(|_| format!("Syntax error, '{value}' is not a NUMBER."))?;
        } else if LEVELS.contains(&value) {
            value.clone_into(&mut self.loglevel_console);
        } else {
            return Err(format!("Syntax error, '{value}' is not {}", LEVELS.join("|")));
        }
        Ok(())
    }

    /// Returns whether messages of a level are shown.
    pub fn shows(&self, level: &str) -> bool {
        let place = |level: &str| LEVELS.iter().position(|known| *known == level);
        place(level) <= place(&self.loglevel_console)
    }
}

/// Parses configshell's `bool`.
pub(crate) fn boolean(value: &str) -> Result<bool, String> {
    match value.to_lowercase().as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(format!("Syntax error, '{value}' is not true|false.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preference_can_be_read_and_set() {
        let mut prefs = Prefs::default();
        for (name, kind, about) in ROWS {
            assert!(about.ends_with('.'), "{name}");
            let value = match kind {
                Kind::Bool => (!boolean(&prefs.get(name)).expect("a flag")).to_string(),
                Kind::Number => "7".to_owned(),
                Kind::LogLevel => "warning".to_owned(),
            };
            prefs.set(name, &value).expect("it is set");
            assert_eq!(prefs.get(name), value, "{name}");
        }
        assert!(prefs.set("tree_max_depth", "x").is_err() && prefs.set("color_mode", "1").is_err());
        assert!(prefs.shows("warning") && !prefs.shows("info"));
    }
}
