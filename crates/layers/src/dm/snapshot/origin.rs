//! `snapshot-origin <device>`: what is written to it is copied for its snapshots first.

use super::super::{Area, Devices, Kind, Names, Place, Status, Target, TargetError, stack};
use super::copy::{Copier, Copy, Progress};
use super::registry::{self, Group, Member};
use super::store::{Found, Store};
use crate::Layer;
use block::{Cookie, Fact, LimitsError, Profile, Request, Sectors, Status as End};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

/// How long a write waits for reads of a snapshot that are at the origin, before it looks again.
const LOOK_NS: u64 = 50_000;
/// The same while the header of a snapshot that is lost is written.
const SETTLE_NS: u64 = 10_000_000;

pub(in super::super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("snapshot-origin", [1, 9, 0], make)
}

/// Children: the device, then the COW device of each snapshot.
struct Origin {
    len: Sectors,
    group: Arc<Group>,
    members: Vec<Arc<Member>>,
    /// How often a snapshot had joined when those were looked at.
    joined: u64,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device] = words else { return Err(TargetError::new("incorrect number of arguments")) };
    let lookup = |text| move |why| TargetError::lookup(text, why);
    let device = devices.open(device).map_err(lookup("Cannot get target device"))?;
    let group = registry::group(devices.identity(device));
    let (members, joined) = group.members();
    for member in &members {
        devices.open(&member.cow).map_err(lookup("Cannot get COW device of a snapshot"))?;
    }
    Ok(Arc::new(Origin { len: place.len, group, members, joined }))
}

impl Origin {
    fn area(&self) -> Area {
        Area { device: 0, start: Sectors(0), len: self.len }
    }
}

impl<R: Ring> Layer<R> for Origin {
    fn name(&self) -> &'static str {
        "snapshot-origin"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.len, &[self.area()], &below[..1])?;
        whole.opaque &= self.members.is_empty();
        Ok(whole)
    }

    fn spares(&self, depth: u16) -> u16 {
        if self.members.is_empty() { 0 } else { depth.max(2) }
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn describe(&self) -> Vec<Fact> {
        let (members, _) = self.group.members();
        let stuck = members.iter().filter(|member| member.store.is_stuck());
        let fact = |member: &Arc<Member>| {
            let text = format!(
                "fail where the lost snapshot on {} would need a copy, as its header cannot be written",
                member.cow
            );
            ("writes", text)
        };
        stuck.map(fact).collect()
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        let copier = |(member, &cow): (&Arc<Member>, &NodeId)| Copier {
            store: member.store.clone(),
            origin: below[0],
            cow,
            origin_len: member.len.bytes(),
            fua: member.fua,
            for_origin: true,
        };
        Box::new(OriginNode {
            device: below[0],
            copiers: self.members.iter().zip(&below[1..]).map(copier).collect(),
            group: self.group.clone(),
            joined: self.joined,
            passed: Vec::new(),
            slots: Box::default(),
        })
    }
}

impl<R: Ring> Target<R> for Origin {
    fn areas(&self) -> Vec<Area> {
        vec![self.area()]
    }

    /// A write lies within one chunk of each snapshot: chunks are powers of two.
    fn max_io_len(&self) -> Option<Sectors> {
        self.members.iter().map(|member| member.store.chunk).min()
    }

    fn status(&self, what: Status, names: &Names) -> String {
        match what {
            Status::Info => String::new(),
            Status::Table => names.shown(0).to_owned(),
        }
    }
}

/// What a write does: which snapshot it copies for, and how far that is.
#[derive(Clone, Copy)]
struct Slot {
    snapshot: usize,
    copy: Copy,
}

struct OriginNode {
    device: NodeId,
    copiers: Box<[Copier]>,
    group: Arc<Group>,
    joined: u64,
    /// Snapshots that this table does not know of, and whose headers do not say that they are lost yet.
    passed: Vec<Arc<Store>>,
    /// By tag.
    slots: Box<[Slot]>,
}

impl OriginNode {
    /// Snapshots that this table does not know of are not what they were any more.
    #[cold]
    fn pass_by(&mut self) {
        let (members, joined) = self.group.members();
        for Member { store, .. } in members.iter().map(|member| &**member) {
            if store.is_active() && !self.copiers.iter().any(|copier| Arc::ptr_eq(&copier.store, store)) {
                store.invalidate();
                self.passed.push(store.clone());
            }
        }
        self.joined = joined;
    }

    /// Copy for one snapshot after the other, then write.
    fn go_on<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        self.passed.retain(|store| store.is_settling());
        if self.passed.iter().any(|store| store.is_stuck()) {
            return Verdict::Up(End::IoError);
        }
        if !self.passed.is_empty() {
            cx.timer(io, cx.now().after(SETTLE_NS));
            return Verdict::Held;
        }
        let slot = &mut self.slots[io.tag.index()];
        while let Some(copier) = self.copiers.get(slot.snapshot) {
            let store = &copier.store;
            let chunk = req.offset.0 / store.chunk.bytes().0;
            let covered = req.offset < copier.origin_len && store.is_active();
            if covered && store.is_valid() && !matches!(store.find(chunk), Found::Copied(_)) {
                match copier.begin(&mut slot.copy, io, chunk, None, cx) {
                    Progress::Held => return Verdict::Held,
                    Progress::Failed(End::Requeue) => return Verdict::Up(End::Requeue),
                    Progress::Done | Progress::Failed(_) => {}
                }
            }
            let is_copied = || matches!(store.find(chunk), Found::Copied(_));
            let waits = match store.is_valid() {
                true if covered && store.is_read(chunk) => Some(LOOK_NS),
                // A chunk with an exception on disk may change: the snapshot is right without the header, too.
                false if covered && !is_copied() && store.is_stuck() => return Verdict::Up(End::IoError),
                false if covered && !is_copied() && store.is_settling() => Some(SETTLE_NS),
                _ => None,
            };
            if let Some(nanos) = waits {
                slot.copy = Copy::NONE;
                cx.timer(io, cx.now().after(nanos));
                return Verdict::Held;
            }
            slot.snapshot += 1;
        }
        Verdict::Down(self.device)
    }

    /// A copy is as far as that.
    fn after<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        progress: Progress,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match progress {
            Progress::Held => Verdict::Held,
            Progress::Failed(End::Requeue) => Verdict::Up(End::Requeue),
            Progress::Done | Progress::Failed(_) => self.go_on(io, req, cx),
        }
    }
}

impl<R: Ring> Node<R> for OriginNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.slots = vec![Slot { snapshot: 0, copy: Copy::NONE }; tags].into();
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !req.op.is_write() {
            return Verdict::Down(self.device);
        }
        if self.joined != self.group.joined() {
            self.pass_by();
        }
        if self.copiers.is_empty() && self.passed.is_empty() {
            return Verdict::Down(self.device);
        }
        self.slots[io.tag.index()] = Slot { snapshot: 0, copy: Copy::NONE };
        self.go_on(io, req, cx)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        if !slot.copy.is_ours() {
            if result < 0 {
                return Verdict::Up(End::from_result(result, 0));
            }
            return self.go_on(io, req, cx);
        }
        let progress = self.copiers[slot.snapshot].look(&mut slot.copy, io, None, cx);
        self.after(io, req, progress, cx)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: End,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        let slot = &mut self.slots[io.tag.index()];
        let progress = self.copiers[slot.snapshot].child_ended(&mut slot.copy, io, None, status, cx);
        self.after(io, req, progress, cx)
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        cx.cancel(io);
    }
}
