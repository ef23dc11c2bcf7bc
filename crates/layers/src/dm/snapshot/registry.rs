//! Which snapshots an origin has in this process, and which stores are in use.
//!
//! A store belongs to its COW device: a table that is loaded while another one of the same snapshot is in use gets the store
//! that is in memory, with all that it knows, and not what lay on the device when it was loaded.

use super::store::Store;
use block::Sectors;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A snapshot, as its origin needs to know it.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) store: Arc<Store>,
    /// The COW device, as the line names it.
    pub(super) cow: String,
    /// How much of the origin it covers.
    pub(super) len: Sectors,
    /// The COW device takes FUA.
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
    /// How often one was put to use.
    joined: AtomicU64,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Member>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those there are, and how often one was put to use until now.
    pub(super) fn members(&self) -> (Vec<Arc<Member>>, u64) {
        let members = self.lock();
        (members.clone(), self.joined.load(Acquire))
    }

    /// How often one was put to use.
    #[inline]
    pub(super) fn joined(&self) -> u64 {
        self.joined.load(Acquire)
    }
}

/// By the identity of the origin. A group is there for as long as a table has it.
static GROUPS: Mutex<BTreeMap<String, Weak<Group>>> = Mutex::new(BTreeMap::new());

/// The group of an origin, by its identity.
pub(super) fn group(origin: &str) -> Arc<Group> {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(group) = groups.get(origin).and_then(Weak::upgrade) {
        return group;
    }
    // Whoever comes clears away what those left who went.
    groups.retain(|_, group| group.strong_count() > 0);
    let group = Arc::default();
    groups.insert(origin.to_owned(), Arc::downgrade(&group));
    group
}

/// A store that tables use.
struct Used {
    group: Arc<Group>,
    member: Arc<Member>,
    tables: usize,
}

/// By the identity of the COW device.
static STORES: Mutex<BTreeMap<String, Used>> = Mutex::new(BTreeMap::new());

fn stores() -> MutexGuard<'static, BTreeMap<String, Used>> {
    STORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A table uses a store. With the last of these the snapshot is gone, and nothing is copied for it any more.
pub(super) struct Lease {
    cow: String,
    group: Arc<Group>,
    pub(super) member: Arc<Member>,
}

impl Lease {
    fn of(cow: &str, used: &mut Used) -> Lease {
        used.tables += 1;
        Lease { cow: cow.to_owned(), group: used.group.clone(), member: used.member.clone() }
    }

    /// Whether it is one of a snapshot of that origin.
    pub(super) fn is_of(&self, origin: &str) -> bool {
        Arc::ptr_eq(&self.group, &group(origin))
    }

    /// Its table is put to use: an origin that does not know of it passes it by from now on.
    pub(super) fn activate(&self) {
        if self.member.store.activate() {
            self.group.joined.fetch_add(1, AcqRel);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut stores = stores();
        let Some(used) = stores.get_mut(&self.cow) else { return };
        used.tables -= 1;
        if used.tables == 0 {
            self.member.store.retire();
            self.group.lock().retain(|member| !Arc::ptr_eq(member, &self.member));
            stores.remove(&self.cow);
        }
    }
}

/// The store of a COW device that is in use.
pub(super) fn used(cow: &str) -> Option<Lease> {
    stores().get_mut(cow).map(|used| Lease::of(cow, used))
}

/// A snapshot of that origin is there. One that came meanwhile on the same COW device is it then.
pub(super) fn join(origin: &str, cow: &str, member: Member) -> Lease {
    let (mut stores, group) = (stores(), group(origin));
    let used = stores.entry(cow.to_owned()).or_insert_with(|| {
        let member = Arc::new(member);
        group.lock().push(member.clone());
        Used { group, member, tables: 0 }
    });
    Lease::of(cow, used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_goes_with_the_last_table_that_has_it() {
        let first = group("registry-test-gone");
        assert!(Arc::ptr_eq(&first, &group("registry-test-gone")));
        drop(first);
        let _other = group("registry-test-other");
        let groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!groups.contains_key("registry-test-gone"));
        assert!(groups.contains_key("registry-test-other"));
    }
}
