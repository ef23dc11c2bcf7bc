//! The logical unit: the state that all sessions share.

use crate::attention::Attention;
use crate::mode::Modes;
use crate::nexus::Restrictions;
use crate::reserve::Guards;
use crate::{Access, AttributeError, Attributes, Can, Identity, Lun, Media, Nexus, NexusLoss, NexusName};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Maximum number of names of lost nexuses that a unit remembers, to report the loss when they reconnect.
const LOST_MAX: usize = 64;

/// Kind of reset of a logical unit: SAM-6 section 6.3.3, RFC 7143 section 11.5.1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reset {
    /// LOGICAL UNIT RESET.
    Unit,
    /// TARGET WARM RESET.
    Warm,
    /// TARGET COLD RESET.
    Cold,
}

/// Properties that commands other than plain reads and writes use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) media: Media,
    pub(crate) attributes: Attributes,
    pub(crate) modes: Modes,
    /// TPGS of the target port on which a command arrived: bit 0 implicit, bit 1 explicit access states.
    pub(crate) tpgs: u8,
}

impl Facts {
    /// Returns whether UNMAP, or WRITE SAME with UNMAP, deallocates blocks (LBPME).
    pub(crate) fn is_thin(&self) -> bool {
        self.can_unmap() || self.can_unmap_same()
    }

    /// Returns whether UNMAP is supported.
    pub(crate) fn can_unmap(&self) -> bool {
        let most = self.attributes.max_unmap_lba_count.min(self.attributes.max_unmap_block_desc_count);
        self.attributes.emulate_tpu && self.media.can.contains(Can::UNMAP) && most > 0
    }

    /// Returns whether WRITE SAME with UNMAP is supported.
    pub(crate) fn can_unmap_same(&self) -> bool {
        self.attributes.emulate_tpws && self.media.can.contains(Can::UNMAP)
    }

    /// Returns whether unmapped blocks read as zeroes (LBPRZ), because discarded ranges do or because UNMAP
    /// writes zeroes.
    pub(crate) fn unmaps_to_zeroes(&self) -> bool {
        let can = self.media.can;
        let wanted = self.attributes.unmap_zeroes_data && can.contains(Can::WRITE_ZEROES);
        self.is_thin() && (wanted || can.contains(Can::UNMAP_ZEROES))
    }

    /// Returns whether SANITIZE with BLOCK ERASE is supported.
    pub(crate) fn can_block_erase(&self) -> bool {
        crate::sanitize::supports(&self.media, self.is_thin(), crate::sanitize::action::BLOCK_ERASE)
    }

    /// Returns whether EXTENDED COPY is supported. It writes in any order, so zoned units have none.
    pub(crate) fn can_copy(&self) -> bool {
        self.attributes.emulate_3pc && self.media.zones.is_none()
    }

    /// Returns the maximum number of blocks of a WRITE SAME; 0: no limit. On a zoned unit it is at most a
    /// zone.
    pub(crate) fn write_same_max(&self) -> u64 {
        let most = u64::from(self.attributes.max_write_same_len);
        match self.media.zones {
            Some(zoned) if most == 0 || most > zoned.zone_blocks => zoned.zone_blocks,
            _ => most,
        }
    }

    /// Returns whether writes fail for every nexus.
    pub(crate) fn is_write_protected(&self) -> bool {
        self.media.read_only || self.modes.software_write_protect
    }

    /// Returns whether the DPO and FUA bits of reads and writes are valid.
    pub(crate) fn has_fua(&self) -> bool {
        self.attributes.emulate_fua_write
    }

    /// Returns the maximum number of blocks of a COMPARE AND WRITE, or 0 if it is not supported.
    pub(crate) fn compare_and_write_max(&self) -> u8 {
        const BYTES_MAX: u32 = 1 << 20;
        let fits = self.media.blocks_of(BYTES_MAX).min(self.media.blocks_of(self.media.transfer_max));
        match self.attributes.emulate_caw && self.media.zones.is_none() {
            true => self.attributes.max_compare_and_write_len.min(u8::try_from(fits).unwrap_or(u8::MAX)),
            false => 0,
        }
    }
}

/// State behind the lock: everything that reads and writes do not need.
#[derive(Debug)]
struct State {
    facts: Facts,
    nexuses: Vec<Weak<Nexus>>,
    /// Names of lost nexuses, oldest first.
    lost: VecDeque<NexusName>,
    is_ejected: bool,
    /// Identifying information by type: peripheral device, text.
    identifying: [Vec<u8>; 2],
}

/// Bits of [`LogicalUnit::fast`].
mod fast {
    pub(super) const SHIFT_MASK: u32 = 0x1F;
    pub(super) const PROTECTED: u32 = 1 << 5;
    pub(super) const FUA_VALID: u32 = 1 << 6;
    pub(super) const WRITE_THROUGH: u32 = 1 << 7;
    pub(super) const CAN_FUA: u32 = 1 << 8;
    pub(super) const FUA_FLUSHES: u32 = 1 << 11;
    pub(super) const ZONED: u32 = 1 << 12;
    pub(super) const DESCRIPTOR_SENSE: u32 = 1 << 9;
    pub(super) const TASK_ABORTED_STATUS: u32 = 1 << 10;
}

/// Properties that reads and writes use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FastFacts {
    pub(crate) blocks: u64,
    /// Maximum number of blocks of a command.
    pub(crate) blocks_max: u32,
    pub(crate) block_shift: u8,
    pub(crate) is_protected: bool,
    /// Whether DPO and FUA are valid bits.
    pub(crate) fua_valid: bool,
    /// Whether each write must be on stable storage when it completes (WCE is 0).
    pub(crate) write_through: bool,
    /// Whether a durable write is a write with FUA.
    pub(crate) can_fua: bool,
    /// Whether a durable write is a write followed by a flush. If neither is set, every write is durable.
    pub(crate) fua_flushes: bool,
    pub(crate) descriptor_sense: bool,
    /// Whether the unit has zones, whose rules the slow path checks.
    pub(crate) is_zoned: bool,
}

/// A logical unit.
#[derive(Debug)]
pub struct LogicalUnit {
    identity: Identity,
    /// Capacity in blocks.
    blocks: AtomicU64,
    /// Maximum number of blocks of a command.
    blocks_max: AtomicU32,
    /// Copy of some facts, as bits of `fast`.
    fast: AtomicU32,
    state: Mutex<State>,
    pub(crate) guards: Guards,
}

impl LogicalUnit {
    /// Creates a logical unit.
    pub fn new(identity: Identity, media: Media, attributes: Attributes) -> Arc<LogicalUnit> {
        let facts = Facts { media, attributes, modes: Modes::new(&media, &attributes), tpgs: 0 };
        let state = State {
            facts,
            nexuses: Vec::new(),
            lost: VecDeque::new(),
            is_ejected: false,
            identifying: Default::default(),
        };
        let unit = LogicalUnit {
            identity,
            blocks: AtomicU64::new(0),
            blocks_max: AtomicU32::new(0),
            fast: AtomicU32::new(0),
            state: Mutex::new(state),
            guards: Guards::default(),
        };
        unit.publish(&facts);
        Arc::new(unit)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds the lock of the state until the result is dropped.
    #[cfg(test)]
    pub(crate) fn hold_state(&self) -> impl Drop + '_ {
        struct Held<'a>(#[expect(dead_code, reason = "held until it is dropped")] MutexGuard<'a, State>);
        impl Drop for Held<'_> {
            fn drop(&mut self) {}
        }
        Held(self.state())
    }

    /// Copies the facts that the fast path needs.
    fn publish(&self, facts: &Facts) {
        let media = &facts.media;
        let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
        let bits = (media.block_shift() & fast::SHIFT_MASK)
            | bit(facts.is_write_protected(), fast::PROTECTED)
            | bit(facts.has_fua(), fast::FUA_VALID)
            | bit(media.write_cache && !facts.modes.write_cache, fast::WRITE_THROUGH)
            | bit(media.can.contains(Can::FUA), fast::CAN_FUA)
            | bit(media.write_cache && !media.can.contains(Can::FUA), fast::FUA_FLUSHES)
            | bit(media.zones.is_some(), fast::ZONED)
            | bit(facts.modes.descriptor_sense, fast::DESCRIPTOR_SENSE)
            | bit(facts.modes.task_aborted_status, fast::TASK_ABORTED_STATUS);
        self.blocks.store(media.blocks, Ordering::Release);
        self.blocks_max.store(media.blocks_of(media.transfer_max), Ordering::Release);
        self.fast.store(bits, Ordering::Release);
    }

    /// Returns the properties that reads and writes use: three loads, no lock.
    pub(crate) fn fast_facts(&self) -> FastFacts {
        let bits = self.fast.load(Ordering::Acquire);
        FastFacts {
            blocks: self.blocks.load(Ordering::Acquire),
            blocks_max: self.blocks_max.load(Ordering::Acquire),
            block_shift: (bits & fast::SHIFT_MASK) as u8,
            is_protected: bits & fast::PROTECTED != 0,
            fua_valid: bits & fast::FUA_VALID != 0,
            write_through: bits & fast::WRITE_THROUGH != 0,
            can_fua: bits & fast::CAN_FUA != 0,
            fua_flushes: bits & fast::FUA_FLUSHES != 0,
            descriptor_sense: bits & fast::DESCRIPTOR_SENSE != 0,
            is_zoned: bits & fast::ZONED != 0,
        }
    }

    /// Returns the properties that all other commands use, for a target port.
    pub(crate) fn facts(&self, port: u16) -> Facts {
        let tpgs = self.tpgs(port);
        Facts { tpgs, ..self.state().facts }
    }

    /// Returns the names of the unit.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the medium.
    pub fn media(&self) -> Media {
        self.state().facts.media
    }

    /// Replaces the medium, for example after a resize. A new capacity is reported to every nexus (2A/09);
    /// other changes that INQUIRY shows are reported as changed mode parameters (2A/01). The block size
    /// must not change.
    pub fn set_media(&self, media: Media) {
        let mut state = self.state();
        let before = std::mem::replace(&mut state.facts.media, media);
        if before.write_cache != media.write_cache {
            state.facts.modes.write_cache = media.write_cache;
        }
        self.publish(&state.facts);
        drop(state);
        if before.blocks != media.blocks {
            self.raise_all(Attention::CAPACITY_CHANGED, None);
        }
        if before.read_only != media.read_only || before.write_cache != media.write_cache {
            self.raise_all(Attention::MODE_CHANGED, None);
        }
    }

    /// Returns the attributes.
    pub fn attributes(&self) -> Attributes {
        self.state().facts.attributes
    }

    /// Sets an attribute by its LIO name.
    ///
    /// # Errors
    /// The attribute does not exist, or does not allow this value.
    pub fn set_attribute(&self, name: &str, value: u64) -> Result<(), AttributeError> {
        let mut state = self.state();
        let facts = &mut state.facts;
        facts.attributes.set(name, value)?;
        if matches!(name, "emulate_tas" | "emulate_ua_intlck_ctrl" | "emulate_write_cache") {
            let defaults = Modes::new(&facts.media, &facts.attributes);
            facts.modes.task_aborted_status = defaults.task_aborted_status;
            facts.modes.attention_interlock = defaults.attention_interlock;
            facts.modes.write_cache = defaults.write_cache;
        }
        self.publish(&state.facts);
        Ok(())
    }

    /// Replaces the mode parameters. Returns whether they differ from the previous ones; if so, all nexuses
    /// except `by` are notified.
    pub(crate) fn set_modes(&self, modes: Modes, by: &Nexus) -> bool {
        let mut state = self.state();
        let differ = state.facts.modes != modes;
        state.facts.modes = modes;
        self.publish(&state.facts);
        drop(state);
        if differ {
            self.raise_all(Attention::MODE_CHANGED, Some(by));
        }
        differ
    }

    /// Adds a nexus. It gets a unit attention: 29/07 if a nexus with this name was lost before, otherwise
    /// 29/00.
    pub fn attach_nexus(self: &Arc<Self>, name: NexusName, lun: Lun, access: Access) -> Arc<Nexus> {
        self.add_port(name.relative_port);
        let mut state = self.state();
        let before = state.lost.len();
        state.lost.retain(|other| *other != name);
        let was_lost = state.lost.len() < before;
        let nexus = Nexus::new(self.clone(), name, lun, access);
        nexus.raise(if was_lost { Attention::NEXUS_LOSS } else { Attention::POWER_ON });
        nexus.restrict(Restrictions::NO_MEDIUM, state.is_ejected);
        state.nexuses.retain(|other| other.strong_count() > 0);
        state.nexuses.push(Arc::downgrade(&nexus));
        drop(state);
        self.enforce_on(&nexus);
        nexus
    }

    /// Removes a nexus: aborts its commands, and releases its reservation by RESERVE.
    pub fn detach_nexus(&self, nexus: &Nexus, loss: NexusLoss) {
        nexus.advance_epoch();
        let mut state = self.state();
        state.nexuses.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), nexus));
        if loss == NexusLoss::Loss {
            if state.lost.len() >= LOST_MAX {
                state.lost.pop_front();
            }
            state.lost.push_back(nexus.name().clone());
        }
        drop(state);
        self.release_reserved(Some(nexus));
        self.guards.copies.forget(Some(nexus.name()));
    }

    /// Returns the attached nexuses.
    pub fn nexuses(&self) -> Vec<Arc<Nexus>> {
        self.state().nexuses.iter().filter_map(Weak::upgrade).collect()
    }

    /// Establishes a unit attention condition for every nexus except `except`.
    pub fn raise_all(&self, attention: Attention, except: Option<&Nexus>) {
        for nexus in self.nexuses() {
            if !except.is_some_and(|except| std::ptr::eq(except, &*nexus)) {
                nexus.raise(attention);
            }
        }
    }

    /// Makes the commands of those nexuses for which `applies` returns `true` take the slow path for this
    /// reason, and removes this reason from all other nexuses.
    pub(crate) fn restrict_all(&self, reason: Restrictions, applies: impl Fn(&Nexus) -> bool) {
        self.nexuses().iter().for_each(|nexus| nexus.restrict(reason, applies(nexus)));
    }

    /// Resets the unit: aborts the commands of all nexuses, releases the reservation by RESERVE, restores
    /// the default mode parameters, permits medium removal, and raises a unit attention for every nexus.
    pub fn reset(&self, how: Reset) {
        let mut state = self.state();
        state.facts.modes = Modes::new(&state.facts.media, &state.facts.attributes);
        self.publish(&state.facts);
        drop(state);
        self.release_reserved(None);
        self.guards.copies.forget(None);
        let attention = match how {
            Reset::Unit => Attention::UNIT_RESET,
            Reset::Warm => Attention::WARM_RESET,
            Reset::Cold => Attention::POWER_ON,
        };
        for nexus in self.nexuses() {
            nexus.advance_epoch();
            nexus.prevents_removal.store(false, Ordering::Relaxed);
            nexus.raise(attention);
        }
    }

    /// Executes CLEAR TASK SET: aborts the commands of all nexuses. All except `by` get the unit attention
    /// 2F/00.
    pub fn clear_task_set(&self, by: &Nexus) {
        for nexus in self.nexuses() {
            nexus.advance_epoch();
            if !std::ptr::eq(by, &*nexus) {
                nexus.raise(Attention::COMMANDS_CLEARED);
            }
        }
    }

    /// Returns whether a command that another nexus aborted ends with TASK ABORTED (TAS), instead of
    /// without a response.
    pub fn reports_aborted_tasks(&self) -> bool {
        self.fast.load(Ordering::Relaxed) & fast::TASK_ABORTED_STATUS != 0
    }

    /// Ejects or loads the medium of a removable unit. All nexuses except `by` are notified of a loaded
    /// medium (28/00).
    pub(crate) fn eject(&self, ejects: bool, by: &Nexus) {
        let was_ejected = std::mem::replace(&mut self.state().is_ejected, ejects);
        self.restrict_all(Restrictions::NO_MEDIUM, |_| ejects);
        if was_ejected && !ejects {
            self.raise_all(Attention::MEDIUM_CHANGED, Some(by));
        }
    }

    /// Returns whether any nexus prevents the removal of the medium.
    pub(crate) fn is_removal_prevented(&self) -> bool {
        self.nexuses().iter().any(|nexus| nexus.prevents_removal.load(Ordering::Relaxed))
    }

    /// Returns the identifying information of a type.
    pub(crate) fn identifying(&self, kind: usize) -> Vec<u8> {
        self.state().identifying.get(kind).cloned().unwrap_or_default()
    }

    /// Replaces identifying information.
    pub(crate) fn set_identifying(&self, kind: usize, information: &[u8]) {
        if let Some(held) = self.state().identifying.get_mut(kind) {
            *held = information.to_vec();
        }
    }

    pub(crate) fn has_descriptor_sense(&self) -> bool {
        self.fast.load(Ordering::Relaxed) & fast::DESCRIPTOR_SENSE != 0
    }
}
