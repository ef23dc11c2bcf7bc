//! The snapshots of each origin in this process, and the stores in use.
//!
//! A store belongs to its COW device. A table that is loaded while another table of the same snapshot is
//! active gets the store in memory: the content of the device at load time would be outdated when the new
//! table becomes active.

use super::store::Store;
use block::Sectors;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A snapshot as its origin sees it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) store: Arc<Store>,
    /// The COW device's name in the table line.
    pub(super) cow: String,
    /// The length of the origin that it covers.
    pub(super) len: Sectors,
    /// Whether the COW device supports FUA.
    pub(super) fua: bool,
}

impl Member {
    pub(super) fn new(store: Arc<Store>, cow: &str, len: Sectors, fua: bool) -> Member {
        Member { store, cow: cow.to_owned(), len, fua }
    }
}

/// The snapshots of one origin.
#[derive(Debug, Default)]
pub(super) struct Group {
    members: Mutex<Vec<Arc<Member>>>,
    /// The number of times that a snapshot became active.
    generation: AtomicU64,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Member>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the members and the generation.
    pub(super) fn members(&self) -> (Vec<Arc<Member>>, u64) {
        let members = self.lock();
        (members.clone(), self.generation.load(Acquire))
    }

    /// Returns the number of times that a snapshot became active.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Acquire)
    }
}

/// Groups by the identity of the origin. A group exists while a table holds it.
static GROUPS: Mutex<BTreeMap<String, Weak<Group>>> = Mutex::new(BTreeMap::new());

/// Returns the group of an origin, by its identity; creates it if there is none.
pub(super) fn group(origin: &str) -> Arc<Group> {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(group) = groups.get(origin).and_then(Weak::upgrade) {
        return group;
    }
    // Removes the entries of groups that no table holds any more.
    groups.retain(|_, group| group.strong_count() > 0);
    let group = Arc::default();
    groups.insert(origin.to_owned(), Arc::downgrade(&group));
    group
}

/// A store in use, and the number of tables that use it.
struct StoreInUse {
    group: Arc<Group>,
    member: Arc<Member>,
    tables: usize,
}

/// Stores in use, by the identity of the COW device.
static STORES: Mutex<BTreeMap<String, StoreInUse>> = Mutex::new(BTreeMap::new());

fn stores() -> MutexGuard<'static, BTreeMap<String, StoreInUse>> {
    STORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The use of a store by one table. When the last one is dropped, the origin stops copying for the snapshot.
pub(super) struct Lease {
    cow: String,
    group: Arc<Group>,
    pub(super) member: Arc<Member>,
}

impl Lease {
    fn of(cow: &str, store: &mut StoreInUse) -> Lease {
        store.tables += 1;
        Lease { cow: cow.to_owned(), group: store.group.clone(), member: store.member.clone() }
    }

    /// Returns whether the snapshot has this origin.
    pub(super) fn has_origin(&self, origin: &str) -> bool {
        Arc::ptr_eq(&self.group, &group(origin))
    }

    /// Marks the table that uses the store as active. From now on, a write through an origin that does not
    /// know the snapshot makes the snapshot invalid.
    pub(super) fn activate(&self) {
        if self.member.store.activate() {
            self.group.generation.fetch_add(1, AcqRel);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut stores = stores();
        let Some(store) = stores.get_mut(&self.cow) else { return };
        store.tables -= 1;
        if store.tables == 0 {
            self.member.store.deactivate();
            self.group.lock().retain(|member| !Arc::ptr_eq(member, &self.member));
            stores.remove(&self.cow);
        }
    }
}

/// Returns a lease of the store of a COW device if the store is in use.
pub(super) fn find(cow: &str) -> Option<Lease> {
    stores().get_mut(cow).map(|store| Lease::of(cow, store))
}

/// Registers a snapshot with its origin. If its COW device was registered meanwhile, returns that snapshot.
pub(super) fn register(origin: &str, cow: &str, member: Member) -> Lease {
    let (mut stores, group) = (stores(), group(origin));
    let store = stores.entry(cow.to_owned()).or_insert_with(|| {
        let member = Arc::new(member);
        group.lock().push(member.clone());
        StoreInUse { group, member, tables: 0 }
    });
    Lease::of(cow, store)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_removed_after_its_last_table() {
        let first = group("registry-test-gone");
        assert!(Arc::ptr_eq(&first, &group("registry-test-gone")));
        drop(first);
        let _other = group("registry-test-other");
        let groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!groups.contains_key("registry-test-gone"));
        assert!(groups.contains_key("registry-test-other"));
    }
}
