//! device-mapper's control interface for a device with a table: two slots, suspend and resume, status,
//! messages, events ([ADR 22](../../../docs/adr/0022-tables.md)).
//!
//! A device has an active table, which serves, and may have an inactive one, which `load` created and the
//! next resume activates under I/O. Runs on the control plane; a switch of tables takes the steps of any
//! [`change`](crate::change).
//!
//! *Invariant:* a loaded table has everything open that it needs: a resume can fail only for lack of memory,
//! or because requests in flight do not finish.

pub mod background;
pub mod path_status;
pub mod paths;

pub use crate::change::slots::TableRefusal;
pub use layers::dm::{TargetRow, rows as target_rows};

use crate::change::migrate::check_not_moving;
use crate::change::slots::{active, check_blocks, slot};
use crate::device::tree::targets::for_each_target;

use crate::change::blocking;
use crate::change::cycles::TableSet;
use crate::device::tree::{self, Loaded, LoadedTarget, OpenContext};
use crate::device::{Composition, Device, DeviceError};
use crate::host::{Host, HostError};
use crate::rundir::RunDir;
use crate::spec::{DeviceName, LayerSpec, StackSpec, TableSpec};
use layers::dm::{MessageError, Names, Status};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Interval at which event counters are polled for waiting clients.
const EVENT_POLL: Duration = Duration::from_millis(10);

/// A call of the control interface.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TableCall {
    /// Load a table into the inactive slot.
    Load {
        /// The table's lines, as typed.
        text: String,
        /// Directory that its relative paths start from.
        base: PathBuf,
    },
    /// Clear the inactive slot.
    Clear,
    /// Report the status of the targets.
    Status,
    /// Report the table's lines.
    Table {
        /// Whether those of the inactive table.
        inactive: bool,
    },
    /// Send a message to the target at a sector.
    Message {
        /// The sector.
        sector: u64,
        /// The message's arguments.
        #[serde(rename = "words")]
        arguments: Vec<String>,
    },
    /// Report the device's state.
    Info,
    /// Remove the device as soon as nobody uses it.
    RemoveLater,
    /// Rename the device.
    Rename {
        /// The new name.
        to: String,
    },
    /// Set the device's UUID, unless it has one.
    SetUuid {
        /// The UUID.
        uuid: String,
    },
    /// Wait until the event number differs from the given one.
    Wait {
        /// The known event number.
        event: u32,
    },
}

/// Answer to a [`TableCall`].
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TableAnswer {
    /// The targets, for `Status` and `Table`.
    #[serde(default)]
    pub targets: Vec<TargetAnswer>,
    /// A target's answer to a message.
    #[serde(default)]
    pub text: Option<String>,
    /// State of the device.
    pub info: TableInfo,
}

/// A target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TargetAnswer {
    /// First sector.
    pub start: u64,
    /// Length in sectors.
    pub len: u64,
    /// Target type.
    pub kind: String,
    /// Status or arguments, as the kernel prints them.
    pub params: String,
}

/// State of a device with a table.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TableInfo {
    /// Whether it is suspended.
    pub suspended: bool,
    /// Whether the active table has targets.
    pub active: bool,
    /// Whether an inactive table is loaded.
    pub inactive: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Event number.
    pub events: u32,
    /// Number of targets of the active table.
    pub targets: u32,
    /// Number of the device in its process.
    pub number: usize,
    /// Devices that the active table uses, as they are shown.
    pub devices: Vec<String>,
    /// Devices that the inactive table uses.
    #[serde(default)]
    pub inactive_devices: Vec<String>,
    /// Size in bytes.
    pub size: u64,
    /// UUID; empty without one.
    #[serde(default)]
    pub uuid: String,
}

impl Host {
    /// Executes a call on a device with a table.
    ///
    /// # Errors
    /// There is no such device, a target refuses the call, or a table to be loaded is refused.
    pub async fn table(&self, name: &str, call: TableCall) -> Result<TableAnswer, HostError> {
        let device = self.device(name).ok_or_else(HostError::no_device)?;
        let mut answer = TableAnswer::default();
        match call {
            TableCall::Load { text, base } => self.load(&device, &text, &base).await?,
            TableCall::Clear => slot(&device).inactive = None,
            TableCall::Status => answer.targets = targets(active(&device)?.as_ref(), Status::Info),
            TableCall::Table { inactive: false } => {
                answer.targets = targets(active(&device)?.as_ref(), Status::Table);
            }
            TableCall::Table { inactive: true } => {
                let loaded =
                    slot(&device).inactive.as_ref().and_then(|composition| composition.table.clone());
                answer.targets = loaded.map(|loaded| targets(&loaded, Status::Table)).unwrap_or_default();
            }
            TableCall::Message { sector, arguments } => answer.text = message(&device, sector, &arguments)?,
            // The owner of the device's names removes and renames devices.
            TableCall::Info | TableCall::RemoveLater | TableCall::Rename { .. } => {}
            TableCall::SetUuid { uuid } => set_uuid(&device, uuid)?,
            TableCall::Wait { event } => {
                while events(&device) == event && self.has(&device) {
                    tokio::time::sleep(EVENT_POLL).await;
                }
                if !self.has(&device) {
                    return Err(HostError::no_device());
                }
            }
        }
        answer.info = info(&device);
        Ok(answer)
    }

    fn has(&self, device: &Arc<Device>) -> bool {
        self.device(device.name().as_str()).is_some_and(|now| Arc::ptr_eq(&now, device))
    }

    async fn load(&self, device: &Arc<Device>, text: &str, base: &Path) -> Result<(), HostError> {
        let _lock = device.change_lock.lock().await;
        check_not_moving(device)?;
        let before = active(device)?;
        let spec = text.parse::<TableSpec>().map_err(|error| {
            let why = layers::dm::TargetError::of(error.to_string());
            DeviceError::from(tree::TableError { line: 0, kind: String::new(), why })
        })?;
        let mut spec = spec.rooted(base);
        if let StackSpec::Table(now) = &device.composition().stack {
            (spec.paths, spec.read_only, spec.uuid) = (now.paths, now.read_only, now.uuid.clone());
        }
        // These layers are those of the whole device, with any table.
        let above = device.layers().to_vec();
        let stays = |layer: &LayerSpec| matches!(layer, LayerSpec::Split(_) | LayerSpec::Scheduler(_));
        if let Some(bound) = above.iter().find(|layer| !stays(layer)) {
            return Err(TableRefusal::Layer(bound.to_string()).into());
        }
        let (devices, pool) = (self.devices(), self.pool.clone());
        // Opening may wait for a server.
        let own = device.name();
        let composition = blocking(move || {
            let find = |name: &str| devices.iter().find(|device| device.name().as_str() == name).cloned();
            let context = OpenContext { pool: &pool, device: &find, name: Some(own.as_str()) };
            tree::open_table(&spec, &above, "", &context)
        })
        .await?;
        if let Some(loaded) = &composition.table {
            before.admits(loaded).map_err(DeviceError::from)?;
        }
        check_blocks(device, &composition)?;
        let _one_at_a_time = self.stacking.lock().await;
        self.check_stacking(device, Arc::new(composition.tree.dependencies()), TableSet::Planned).await?;
        slot(device).inactive = Some(Arc::new(composition));
        Ok(())
    }

    /// Renames a device, and its files in the run directory. Addresses of exports, and names in them, stay.
    ///
    /// # Errors
    /// There is no such device, the name is taken, another device uses the device by its name, or an export
    /// refuses: nothing has changed.
    pub async fn rename(&self, name: &str, to: &DeviceName, run: &RunDir) -> Result<(), HostError> {
        let device = self.device(name).ok_or_else(HostError::no_device)?;
        let _lock = device.change_lock.lock().await;
        if self.device(to.as_str()).is_some() {
            return Err(HostError::name_taken());
        }
        // Tables show the devices that they use by name.
        if let Some(above) =
            self.devices().iter().find(|other| !Arc::ptr_eq(other, &device) && other.uses(&device))
        {
            return Err(HostError::held_by(above.name().as_str()));
        }
        let exports = self.exports_of(&device);
        for (done, export) in exports.iter().enumerate() {
            if let Err(refused) = export.renamed(run, name, to.as_str()) {
                for export in &exports[..done] {
                    // It was renamed a moment ago, so this succeeds.
                    let _ = export.renamed(run, to.as_str(), name);
                }
                return Err(refused);
            }
        }
        device.set_name(to.clone());
        let mut slot = slot(&device);
        slot.past_events = slot.past_events.wrapping_add(1);
        Ok(())
    }
}

fn targets(loaded: &Loaded, what: Status) -> Vec<TargetAnswer> {
    let one = |loaded: &LoadedTarget| TargetAnswer {
        start: loaded.place.start.0,
        len: loaded.place.len.0,
        kind: loaded.kind.to_owned(),
        params: loaded.target.status(what, &loaded.names),
    };
    loaded.targets.iter().map(one).collect()
}

fn message(device: &Device, sector: u64, arguments: &[String]) -> Result<Option<String>, HostError> {
    let loaded = active(device)?;
    let at = |loaded: &&LoadedTarget| {
        (loaded.place.start.0..).contains(&sector) && sector - loaded.place.start.0 < loaded.place.len.0
    };
    let target = loaded.targets.iter().find(at).ok_or(TableRefusal::NoTarget(sector))?;
    // A path may be given for the numbers of its device.
    let named: Vec<String> = arguments
        .iter()
        .map(|word| match target.names.find(word).is_empty() {
            true => tree::numbers_of(Path::new(word)).unwrap_or_else(|| word.clone()),
            false => word.clone(),
        })
        .collect();
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let answered = target.target.message(&named, &target.names);
    answered.map_err(|why| {
        let text = refused_message(why, arguments, target);
        TableRefusal::Message { arguments: arguments.join(" "), text, why }.into()
    })
}

/// Returns why a target refuses a message: names a missing device and those that exist, or an unknown message
/// and the known ones.
fn refused_message(why: MessageError, arguments: &[String], target: &LoadedTarget) -> String {
    let command = arguments.first().map_or("", String::as_str);
    let messages = target.target.messages();
    if why.errno() == libc::ENOENT
        && let Some(device) = arguments.get(1)
    {
        let mut all: Vec<&str> = (0..target.names.len()).map(|number| target.names.shown(number)).collect();
        all.dedup();
        return format!("there is no device \"{device}\" in the table (devices: {})", all.join(", "));
    }
    if why == MessageError::Invalid && !messages.iter().any(|known| known.eq_ignore_ascii_case(command)) {
        return match messages {
            [] => "the target has no messages".to_owned(),
            _ => {
                let near = spec::did_you_mean(command, messages.iter().copied());
                format!("unknown message \"{command}\" ({near}messages: {})", messages.join(", "))
            }
        };
    }
    why.to_string()
}

fn events(device: &Device) -> u32 {
    let now = device.composition().table.as_ref().map_or(0, |loaded| loaded.events());
    now.wrapping_add(slot(device).past_events)
}

fn info(device: &Device) -> TableInfo {
    let composition = device.composition();
    let inactive = slot(device).inactive.clone();
    let used = |composition: &Composition| {
        let mut shown: Vec<String> = Vec::new();
        for_each_target(composition, |target| shown.extend(names(&target.names)));
        let mut seen = std::collections::HashSet::new();
        shown.retain(|name| seen.insert(name.clone()));
        shown
    };
    TableInfo {
        uuid: uuid(device),
        suspended: device.is_suspended(),
        active: composition.table.as_ref().is_some_and(|loaded| !loaded.targets.is_empty()),
        inactive: inactive.is_some(),
        read_only: device.read_only(),
        events: events(device),
        targets: composition.table.as_ref().map_or(0, |loaded| loaded.targets.len() as u32),
        number: device.number(),
        devices: used(&composition),
        inactive_devices: inactive.map(|composition| used(&composition)).unwrap_or_default(),
        size: device.size().0,
    }
}

fn uuid(device: &Device) -> String {
    let given = slot(device).uuid.clone();
    given.unwrap_or_else(|| match &device.composition().stack {
        StackSpec::Table(spec) => spec.uuid.clone(),
        _ => String::new(),
    })
}

fn set_uuid(device: &Device, wanted: String) -> Result<(), TableRefusal> {
    let now = uuid(device);
    if !now.is_empty() {
        return Err(TableRefusal::HasUuid { now, wanted });
    }
    let mut slot = slot(device);
    slot.uuid = Some(wanted);
    slot.past_events = slot.past_events.wrapping_add(1);
    Ok(())
}

fn names(names: &Names) -> impl Iterator<Item = String> {
    (0..names.len()).map(|device| names.shown(device).to_owned())
}
