//! What device-mapper's control surface asks of a device that is made from a table: two slots, suspending and resuming,
//! status, messages, events ([ADR 22](../../../docs/adr/0022-tables.md)).
//!
//! A device has an active table, which serves, and may have an inactive one, which `load` made and the next resume puts to
//! use under I/O. Runs on the control plane; the steps of a swap are those of any [`change`](crate::change).
//!
//! *Invariant:* a table that is loaded has everything open that it needs: a resume can fail only for want of memory, or
//! because requests that are under way do not end.

use crate::change::{ChangeError, off_the_runtime};
use crate::chores::Below;
use crate::device::{Device, DeviceError, Form, Slot};
use crate::host::{Host, HostError};
use crate::rundir::RunDir;
use crate::spec::{Bytes, DeviceName, LayerSpec, StackSpec, TableSpec};
use crate::stacking::{Coming, Which};
use crate::tree::{self, Loaded, LoadedTarget, Surroundings, Tree};
use layers::dm::{MessageError, Names, Status};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// How often it is looked for events that someone waits for.
const EVENT_LOOK: Duration = Duration::from_millis(10);

/// The kinds of targets that there are, with the versions of the kernel's whose words they take.
pub fn kinds() -> Vec<(&'static str, [u32; 3])> {
    layers::dm::kinds::<ring::KernelRing>().into_iter().map(|kind| (kind.name, kind.version)).collect()
}

/// What is asked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TableCall {
    /// Put a table into the inactive slot.
    Load {
        /// Its text.
        text: String,
        /// Where relative paths in it begin.
        base: PathBuf,
    },
    /// Empty the inactive slot.
    Clear,
    /// How the targets are.
    Status,
    /// What they were made from.
    Table {
        /// Those of the inactive table.
        inactive: bool,
    },
    /// Tell the target at that sector something.
    Message {
        /// The sector.
        sector: u64,
        /// What.
        words: Vec<String>,
    },
    /// What there is to know about the device itself.
    Info,
    /// Remove the device as soon as nobody uses it.
    RemoveLater,
    /// Call the device something else.
    Rename {
        /// Its next name.
        to: String,
    },
    /// Call it that besides its name, if it has no such name yet.
    SetUuid {
        /// What.
        uuid: String,
    },
    /// Answer when another event than that number has happened.
    Wait {
        /// The number of the event that is known.
        event: u32,
    },
}

/// What is answered.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TableAnswer {
    /// Of `Status` and `Table`: the targets.
    #[serde(default)]
    pub targets: Vec<TargetAnswer>,
    /// Of a message that is answered.
    #[serde(default)]
    pub text: Option<String>,
    /// The device.
    pub info: TableInfo,
}

/// One target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TargetAnswer {
    /// Its first sector.
    pub start: u64,
    /// How many there are.
    pub len: u64,
    /// What it is.
    pub kind: String,
    /// What it says, as the kernel's does.
    pub params: String,
}

/// The device itself.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TableInfo {
    /// Its requests are held back.
    pub suspended: bool,
    /// A table is in use.
    pub active: bool,
    /// A table is loaded.
    pub inactive: bool,
    /// It cannot be written.
    pub read_only: bool,
    /// How many things have happened that someone may wait for.
    pub events: u32,
    /// Targets of the table in use.
    pub targets: u32,
    /// Its number in its process.
    pub number: usize,
    /// Devices that its table uses, as they are shown.
    pub devices: Vec<String>,
    /// Those of the table that is loaded.
    #[serde(default)]
    pub inactive_devices: Vec<String>,
    /// Its size in bytes.
    pub size: u64,
    /// What it is called besides its name.
    #[serde(default)]
    pub uuid: String,
}

/// Why a call is refused, beyond what may be wrong with any change.
#[derive(Debug, thiserror::Error)]
pub enum TableRefusal {
    /// There are no targets.
    #[error("it is {0}, and no table (make it with --table)")]
    NoTable(String),
    /// There is nothing in the slot.
    #[error("no table is loaded (load one with blockyard table NAME --load FILE)")]
    NothingLoaded,
    /// There is no target.
    #[error("there is no target at sector {0}")]
    NoTarget(u64),
    /// The target does not heed it.
    #[error("{words}: {why}")]
    Message {
        /// What it was told.
        words: String,
        /// Why not.
        why: MessageError,
    },
    /// That is said once.
    #[error("it cannot be {wanted} because its uuid is {now} already")]
    HasUuid {
        /// What it is called.
        now: String,
        /// What it was to be called.
        wanted: String,
    },
    /// Its layers were made for the table that there is.
    #[error("a layer ({0}) that belongs to the table it was made over stands above it")]
    Layer(String),
    /// The exports cannot tell their users of larger blocks.
    #[error("its blocks would be of {now} bytes, and users were told of {was}")]
    Blocks {
        /// As users know them.
        was: Bytes,
        /// As they would be.
        now: Bytes,
    },
}

impl TableRefusal {
    /// What the kernel's ioctl would answer with, positive.
    fn errno(&self) -> i32 {
        match self {
            TableRefusal::NothingLoaded => libc::ENXIO,
            TableRefusal::Message { why, .. } => why.errno(),
            _ => libc::EINVAL,
        }
    }
}

/// What the kernel's ioctl would answer with in place of an error, positive.
pub(crate) fn errno_of(error: &HostError) -> i32 {
    match error {
        HostError::NoDevice => libc::ENXIO,
        HostError::Table(refusal) => refusal.errno(),
        HostError::Device(DeviceError::Table(error)) => error.why.errno(),
        HostError::Change(ChangeError::Cycle(_)) => libc::ELOOP,
        HostError::NameTaken | HostError::Stood(_) | HostError::Change(ChangeError::NotDrained) => {
            libc::EBUSY
        }
        error if error.is_in_use() => libc::EBUSY,
        _ => libc::EINVAL,
    }
}

fn slot(device: &Device) -> MutexGuard<'_, Slot> {
    device.slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    /// Ask something of a device that is made from a table, or change it.
    ///
    /// # Errors
    /// [`HostError::NoDevice`], [`HostError::Table`], and what a table that is loaded is refused for.
    pub async fn table(&self, name: &str, call: TableCall) -> Result<TableAnswer, HostError> {
        let device = self.device(name).ok_or(HostError::NoDevice)?;
        let mut answer = TableAnswer::default();
        match call {
            TableCall::Load { text, base } => self.load(&device, &text, &base).await?,
            TableCall::Clear => slot(&device).inactive = None,
            TableCall::Status => answer.targets = targets(active(&device)?.as_ref(), Status::Info),
            TableCall::Table { inactive: false } => {
                answer.targets = targets(active(&device)?.as_ref(), Status::Table);
            }
            TableCall::Table { inactive: true } => {
                let loaded = slot(&device).inactive.as_ref().and_then(|form| form.table.clone());
                answer.targets = loaded.map(|loaded| targets(&loaded, Status::Table)).unwrap_or_default();
            }
            TableCall::Message { sector, words } => answer.text = message(&device, sector, &words)?,
            // Who keeps the devices' names removes and renames devices.
            TableCall::Info | TableCall::RemoveLater | TableCall::Rename { .. } => {}
            TableCall::SetUuid { uuid } => set_uuid(&device, uuid)?,
            TableCall::Wait { event } => {
                while events(&device) == event && self.is_there(&device) {
                    tokio::time::sleep(EVENT_LOOK).await;
                }
                if !self.is_there(&device) {
                    return Err(HostError::NoDevice);
                }
            }
        }
        answer.info = info(&device);
        Ok(answer)
    }

    fn is_there(&self, device: &Arc<Device>) -> bool {
        self.device(device.name().as_str()).is_some_and(|now| Arc::ptr_eq(&now, device))
    }

    async fn load(&self, device: &Arc<Device>, text: &str, base: &Path) -> Result<(), HostError> {
        let _turn = device.turn.lock().await;
        let before = active(device)?;
        let spec = text.parse::<TableSpec>().map_err(|error| {
            let why = layers::dm::TargetError::of(error.to_string());
            DeviceError::from(tree::TableError { line: 0, kind: String::new(), why })
        })?;
        let mut spec = spec.rooted(base);
        if let StackSpec::Table(now) = &device.form().stack {
            (spec.paths, spec.read_only, spec.uuid) = (now.paths, now.read_only, now.uuid.clone());
        }
        // They are those of the whole device, whatever it is made of.
        let above = device.layers().to_vec();
        let stays = |layer: &LayerSpec| matches!(layer, LayerSpec::Split(_) | LayerSpec::Scheduler(_));
        if let Some(bound) = above.iter().find(|layer| !stays(layer)) {
            return Err(TableRefusal::Layer(bound.to_string()).into());
        }
        let (devices, pool) = (self.devices(), self.pool.clone());
        // Opening may wait for a server.
        let form = off_the_runtime(move || {
            let find = |name: &str| devices.iter().find(|device| device.name().as_str() == name).cloned();
            tree::open_table(&spec, &above, "", &Surroundings { pool: &pool, device: &find })
        })
        .await?;
        if let Some(loaded) = &form.table {
            before.admits(loaded).map_err(DeviceError::from)?;
        }
        check_blocks(device, &form)?;
        let _one_at_a_time = self.stacking.lock().await;
        self.check_stacking(device, Arc::new(form.tree.footing()), Which::Planned).await?;
        slot(device).inactive = Some(Arc::new(form));
        Ok(())
    }

    /// Call a device something else. What bears its name in the run directory follows; where an export was said to be, it
    /// stays, and so does what it was called there.
    ///
    /// # Errors
    /// [`HostError::NoDevice`], [`HostError::NameTaken`], [`HostError::Stood`] when another device names it, and
    /// what an export refuses: nothing has changed.
    pub async fn rename(&self, name: &str, to: &DeviceName, run: &RunDir) -> Result<(), HostError> {
        let device = self.device(name).ok_or(HostError::NoDevice)?;
        let _turn = device.turn.lock().await;
        if self.device(to.as_str()).is_some() {
            return Err(HostError::NameTaken);
        }
        // Tables show what they stand on by its name.
        if let Some(above) =
            self.devices().iter().find(|other| !Arc::ptr_eq(other, &device) && other.uses(&device))
        {
            return Err(HostError::Stood(above.name().to_string()));
        }
        let exports = self.exports_of(&device);
        for (done, export) in exports.iter().enumerate() {
            if let Err(refused) = export.renamed(run, name, to.as_str()) {
                for export in &exports[..done] {
                    // It could be renamed a moment ago.
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

    /// What is loaded and waits for a resume, on its way into use from here on.
    ///
    /// # Errors
    /// The device would stand on itself: the table stays loaded.
    pub(crate) async fn take_loaded(
        &self,
        device: &Arc<Device>,
    ) -> Result<Option<(Arc<Form>, Coming)>, HostError> {
        let Some(loaded) = slot(device).inactive.clone() else { return Ok(None) };
        let coming = self.comes_to_stand_on(device, loaded.tree.footing()).await?;
        // It may have been cleared meanwhile.
        Ok(slot(device).inactive.take().map(|form| (form, coming)))
    }

    /// It could not be put to use, and waits on.
    pub(crate) fn put_back(&self, device: &Device, form: Arc<Form>) {
        slot(device).inactive.get_or_insert(form);
    }
}

/// Users were told of blocks as long as those of the form, or longer, or of none.
fn check_blocks(device: &Device, form: &Form) -> Result<(), TableRefusal> {
    let (was, now) = (device.limits().logical_block_size, form.tree.profile().limits.logical_block_size);
    match now > was && !active(device)?.targets.is_empty() {
        true => Err(TableRefusal::Blocks { was, now }),
        false => Ok(()),
    }
}

/// A table that was loaded, below the layers that the device has by now: they may have changed since.
///
/// # Errors
/// What does not stack or fit any more.
pub(crate) fn below_present_layers(device: &Device, loaded: &Arc<Form>) -> Result<Arc<Form>, HostError> {
    let layers = device.layers();
    if loaded.layers == layers {
        return Ok(loaded.clone());
    }
    let tree = loaded.tree.relayered(loaded.layers.len(), &layers)?;
    let form = Form { stack: loaded.stack.clone(), layers, tree, table: loaded.table.clone() };
    check_blocks(device, &form)?;
    Ok(Arc::new(form))
}

/// Have the targets of a table that is about to be put to use read what lies on their devices.
///
/// # Errors
/// What a target is missing: the table is not to be used.
pub(crate) fn prepare(form: &Form) -> Result<(), DeviceError> {
    for loaded in form.table.iter().flat_map(|loaded| &loaded.targets) {
        let devices = loaded.devices.iter().map(Tree::rebased).collect::<Result<_, _>>()?;
        let prepared = loaded.target.prepare(&mut Below::new(devices));
        prepared.map_err(|why| tree::TableError { line: 0, kind: loaded.kind.to_owned(), why })?;
    }
    Ok(())
}

/// The table is about to be held back, or not any more.
pub(crate) fn presuspend(form: &Form, noflush: bool) {
    each(form, |target| target.target.presuspend(noflush));
}

/// The device is taken away, and nobody waits for its requests any more: those that wait for a path fail.
pub(crate) fn give_up(form: &Form) {
    each(form, |target| {
        if let Some(paths) = target.target.paths() {
            paths.give_up();
        }
    });
}

/// It goes on.
pub(crate) fn resume(form: &Form) {
    each(form, |target| target.target.resume());
}

/// A table is gone: what happened in it has happened.
pub(crate) fn retire(device: &Device, form: &Form) {
    let events = form.table.as_ref().map_or(0, |loaded| loaded.events());
    let mut slot = slot(device);
    slot.past_events = slot.past_events.wrapping_add(events);
}

fn each(form: &Form, mut tell: impl FnMut(&LoadedTarget)) {
    form.table.iter().flat_map(|loaded| &loaded.targets).for_each(&mut tell);
}

fn active(device: &Device) -> Result<Arc<Loaded>, TableRefusal> {
    let form = device.form();
    form.table.clone().ok_or_else(|| TableRefusal::NoTable(form.stack.to_string()))
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

fn message(device: &Device, sector: u64, words: &[String]) -> Result<Option<String>, HostError> {
    let loaded = active(device)?;
    let at = |loaded: &&LoadedTarget| {
        (loaded.place.start.0..).contains(&sector) && sector - loaded.place.start.0 < loaded.place.len.0
    };
    let target = loaded.targets.iter().find(at).ok_or(TableRefusal::NoTarget(sector))?;
    // A path is as good as the numbers that it has.
    let named: Vec<String> = words
        .iter()
        .map(|word| match target.names.find(word).is_empty() {
            true => tree::numbers_of(Path::new(word)).unwrap_or_else(|| word.clone()),
            false => word.clone(),
        })
        .collect();
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let answered = target.target.message(&named, &target.names);
    answered.map_err(|why| TableRefusal::Message { words: words.join(" "), why }.into())
}

fn events(device: &Device) -> u32 {
    let now = device.form().table.as_ref().map_or(0, |loaded| loaded.events());
    now.wrapping_add(slot(device).past_events)
}

fn info(device: &Device) -> TableInfo {
    let form = device.form();
    let inactive = slot(device).inactive.clone();
    let used = |form: &Form| {
        let mut shown: Vec<String> = Vec::new();
        each(form, |target| shown.extend(names(&target.names)));
        let mut seen = std::collections::HashSet::new();
        shown.retain(|name| seen.insert(name.clone()));
        shown
    };
    TableInfo {
        uuid: uuid(device),
        suspended: device.is_suspended(),
        active: form.table.as_ref().is_some_and(|loaded| !loaded.targets.is_empty()),
        inactive: inactive.is_some(),
        read_only: device.read_only(),
        events: events(device),
        targets: form.table.as_ref().map_or(0, |loaded| loaded.targets.len() as u32),
        number: device.number(),
        devices: used(&form),
        inactive_devices: inactive.map(|form| used(&form)).unwrap_or_default(),
        size: device.size().0,
    }
}

fn uuid(device: &Device) -> String {
    let given = slot(device).uuid.clone();
    given.unwrap_or_else(|| match &device.form().stack {
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
