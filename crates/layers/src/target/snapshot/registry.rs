//! Which snapshots an origin has in this process.

use super::store::Store;
use block::Sectors;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

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
    members: Mutex<Vec<Weak<Member>>>,
    /// How often one joined.
    joined: AtomicU64,
}

impl Group {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Member>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those there are, and how often one joined until now.
    pub(super) fn members(&self) -> (Vec<Arc<Member>>, u64) {
        let mut members = self.lock();
        members.retain(|member| member.strong_count() > 0);
        (members.iter().filter_map(Weak::upgrade).collect(), self.joined.load(Acquire))
    }

    /// How often one joined.
    #[inline]
    pub(super) fn joined(&self) -> u64 {
        self.joined.load(Acquire)
    }
}

type Groups = Mutex<BTreeMap<String, Arc<Group>>>;

static GROUPS: OnceLock<Groups> = OnceLock::new();

/// The group of an origin, by its identity.
pub(super) fn group(origin: &str) -> Arc<Group> {
    let groups = GROUPS.get_or_init(Groups::default);
    let mut groups = groups.lock().unwrap_or_else(PoisonError::into_inner);
    groups.entry(origin.to_owned()).or_default().clone()
}

/// A snapshot of that origin is there, for as long as what comes back.
pub(super) fn join(origin: &str, member: Member) -> Arc<Member> {
    let (group, member) = (group(origin), Arc::new(member));
    group.lock().push(Arc::downgrade(&member));
    group.joined.fetch_add(1, AcqRel);
    member
}
