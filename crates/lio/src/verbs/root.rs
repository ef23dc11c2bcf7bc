//! Commands of the root: saving, restoring, clearing, sessions.

use super::flag;
use crate::config::{Selection, StorageId};
use crate::run::{Done, Run, Stop};
use crate::store;
use crate::system::Session;
use crate::tree::first_acl;
use crate::words::Arguments;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

impl Run<'_, '_> {
    pub(super) fn root(&mut self, name: &str, arguments: &Arguments) -> Done {
        match name {
            "saveconfig" => self.save(arguments.get("savefile")),
            "restoreconfig" => self.restore(arguments),
            "clearconfig" => {
                let confirmed = flag(arguments, "confirm", false)?;
                if !confirmed {
                    return Err("As a precaution, confirm=True needs to be set".into());
                }
                if !self.editor.config.is_empty() {
                    self.changes()?;
                    self.editor.clear(Selection::default())?;
                }
                self.info("All configuration cleared");
                Ok(())
            }
            "version" => {
                self.info(format!("targetcli of blockyard {}", env!("CARGO_PKG_VERSION")));
                Ok(())
            }
            "sessions" => self.list_sessions(arguments),
            name => Err(format!("Command not found {name}").into()),
        }
    }

    fn save_file(&self, given: Option<&str>) -> PathBuf {
        match given.filter(|path| !path.is_empty()) {
            Some(path) => PathBuf::from(self.file(path)),
            None => self.call.save_file.clone(),
        }
    }

    fn save(&mut self, given: Option<&str>) -> Done {
        let path = self.save_file(given);
        self.back_up(&path);
        store::write(&path, &self.editor.config.dump())?;
        self.info(format!("Configuration saved to {}", path.display()));
        Ok(())
    }

    /// Backs up the default file before it is replaced. A failure is a warning, as in targetcli.
    fn back_up(&mut self, path: &Path) {
        if path != self.call.save_file {
            return;
        }
        let keep = self.prefs.max_backup_files;
        match store::back_up(path, keep) {
            Ok(Some(folder)) => self.info(format!("Last {keep} configs saved in {}/.", folder.display())),
            Ok(None) => {}
            Err(why) => self.warning(format!("Could not create backup file {why}.")),
        }
    }

    fn restore(&mut self, arguments: &Arguments) -> Done {
        let path = self.save_file(arguments.get("savefile"));
        if !path.is_file() {
            let lios = Path::new("/etc/target/saveconfig.json");
            let hint = match arguments.get("savefile").is_none() && lios.is_file() {
                true => format!(" (LIO's: restoreconfig {})", lios.display()),
                false => String::new(),
            };
            return Err(format!("Restore file {} not found{hint}", path.display()).into());
        }
        // targetcli accepts any text here; a misspelt "false" must not remove a configuration.
        let clear = flag(arguments, "clear_existing", false)?;
        self.changes()?;
        let saved = store::read(&path)?;
        let given = |name| arguments.get(name).filter(|value: &&str| !value.is_empty());
        let selection = Selection { target: given("target"), storage_object: given("storage_object") };
        let restored = self.editor.restore(&saved, clear, selection)?;
        if restored.errors.is_empty() {
            self.info(format!("Configuration restored from {}", path.display()));
            return Ok(());
        }
        let count = restored.errors.len();
        Err(format!("Configuration restored, {count} recoverable errors:\n{}", restored.errors.join("\n"))
            .into())
    }

    /// Saves one storage object, and the first target with a LUN for it, into a file that may hold other
    /// objects.
    pub(super) fn save_storage(&mut self, id: &StorageId, given: Option<&str>) -> Done {
        let path = self.save_file(given);
        self.back_up(&path);
        self.merge(id, &path)?;
        self.info(format!(
            "Storage Object '{}:{}' config saved to {}.",
            id.plugin.name(),
            id.name,
            path.display()
        ));
        Ok(())
    }

    /// Replaces, adds or removes a storage object and its target in a saved file.
    pub(super) fn merge(&mut self, id: &StorageId, path: &Path) -> Result<(), Stop> {
        let mut saved = match path.exists() {
            true => store::read(path)?,
            false => json!({ "storage_objects": [], "targets": [], "fabric_modules": [] }),
        };
        let object = self.editor.config.object(id).map(|object| object.dump());
        let is_object = |entry: &Value| {
            entry.get("plugin") == Some(&json!(id.plugin.name()))
                && entry.get("name") == Some(&json!(id.name))
        };
        put(&mut saved, "storage_objects", is_object, object);
        let user = self.editor.config.users(id).next();
        if let Some((group, _)) = user {
            let target = self.editor.config.dump_target(&group.target);
            let is_target = |entry: &Value| entry.get("wwn") == Some(&json!(group.target.wwn));
            put(&mut saved, "targets", is_target, target);
        } else {
            remove_luns(&mut saved, &id.saved_path());
        }
        Ok(store::write(path, &saved)?)
    }

    fn list_sessions(&mut self, arguments: &Arguments) -> Done {
        let action = arguments.get("action").unwrap_or("list");
        if !matches!(action, "list" | "detail") {
            return Err("action must be one of: list, detail".into());
        }
        let wanted = match arguments.get("sid") {
            None => None,
            Some(text) => {
                Some(text.parse::<u64>().map_err(|_| format!("sid must be a number, '{text}' given"))?)
            }
        };
        let mut sessions = self.editor.system.sessions();
        sessions.sort_by_key(|session| session.id);
        sessions.retain(|session| wanted.is_none_or(|id| session.id == id));
        if sessions.is_empty() {
            return match wanted {
                None => {
                    self.print("(no open sessions)");
                    Ok(())
                }
                Some(id) => Err(format!("no session found with sid {id}").into()),
            };
        }
        for session in sessions {
            self.print(&format!(
                "alias: {}\tsid: {} type: {} session-state: {}",
                session.alias, session.id, session.kind, session.state
            ));
            if action == "detail" {
                self.session_detail(&session);
            }
        }
        Ok(())
    }

    fn session_detail(&mut self, session: &Session) {
        let auth = if session.authenticated { "authenticated" } else { "NOT AUTHENTICATED" };
        self.print(&format!("    name: {} ({auth})", session.initiator));
        let id = crate::config::GroupId { target: session.target.clone(), tag: session.tag };
        let config = &*self.editor.config;
        let mapped = first_acl(config, &id, &session.initiator).into_iter().flat_map(|(_, acl)| &acl.luns);
        let lines: Vec<String> = mapped
            .filter_map(|(index, mapped)| {
                let lun = config.group(&id)?.luns.get(&mapped.lun)?;
                let mode = if mapped.write_protect { "r" } else { "rw" };
                Some(format!("    mapped-lun: {index} backstore: {} mode: {mode}", lun.storage))
            })
            .collect();
        lines.iter().for_each(|line| self.print(line));
        for connection in &session.connections {
            self.print(&format!(
                "    address: {} ({})  cid: {} connection-state: {}",
                connection.address, connection.transport, connection.cid, connection.state
            ));
        }
    }
}

/// Replaces an entry of a list, adds it, or removes it.
fn put(saved: &mut Value, key: &str, is_it: impl Fn(&Value) -> bool, value: Option<Value>) {
    let Some(map) = saved.as_object_mut() else { return };
    let list = map.entry(key).or_insert_with(|| json!([]));
    let Some(list) = list.as_array_mut() else { return };
    let place = list.iter().position(is_it);
    match (place, value) {
        (Some(place), Some(value)) => list[place] = value,
        (None, Some(value)) => list.push(value),
        (Some(place), None) => {
            list.remove(place);
        }
        (None, None) => {}
    }
}

/// Removes the LUNs, with their mappings, of a storage object that the file does not contain any more.
fn remove_luns(saved: &mut Value, path: &str) {
    let targets = saved.get_mut("targets").and_then(Value::as_array_mut);
    for target in targets.into_iter().flatten() {
        let groups = target.get_mut("tpgs").and_then(Value::as_array_mut);
        for group in groups.into_iter().flatten() {
            let mut gone = Vec::new();
            if let Some(luns) = group.get_mut("luns").and_then(Value::as_array_mut) {
                luns.retain(|lun| {
                    let is_it = lun.get("storage_object") == Some(&json!(path));
                    if is_it {
                        gone.extend(lun.get("index").cloned());
                    }
                    !is_it
                });
            }
            let acls = group.get_mut("node_acls").and_then(Value::as_array_mut);
            for acl in acls.into_iter().flatten() {
                if let Some(mapped) = acl.get_mut("mapped_luns").and_then(Value::as_array_mut) {
                    mapped.retain(|mapped| !mapped.get("tpg_lun").is_some_and(|lun| gone.contains(lun)));
                }
            }
        }
    }
}
