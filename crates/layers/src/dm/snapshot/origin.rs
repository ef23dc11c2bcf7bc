//! The target `snapshot-origin <device>`: a write first copies the old chunk for each snapshot of the device.

use super::super::{
    Area, Devices, Names, Simulated, Status, Target, TargetError, TargetRange, TargetRow, stack,
};
use super::copy::{ChunkCopy, Copier, Progress};
use super::registry::{self, Group, Member};
use super::store::{ChunkState, Store};
use crate::Layer;
use block::{Cookie, Fact, LimitsError, Profile, Request, Sectors, Status as End};
use queue::{Cx, HeldRequests, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

pub(in super::super) const ROW: TargetRow = TargetRow {
    name: "snapshot-origin",
    version: [1, 9, 0],
    usage: "snapshot-origin <device>",
    about: "the origin of snapshots: copies chunks before writes",
    example: "0 2097152 snapshot-origin disk.img",
    singleton: false,
    immutable: false,
    simulated: Simulated::Apart,
};

/// The shared part of an origin. Children: the device, then the COW device of each snapshot.
struct Origin {
    len: Sectors,
    group: Arc<Group>,
    members: Vec<Arc<Member>>,
    /// The group's generation when the members were read.
    generation: u64,
}

pub(in super::super) fn construct<R: Ring>(
    place: TargetRange,
    arguments: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device] = arguments else { return Err(TargetError::new("incorrect number of arguments")) };
    let lookup = |text| move |why| TargetError::lookup(text, why);
    let device = devices.open(device).map_err(lookup("Cannot get target device"))?;
    let group = registry::group(devices.identity(device));
    let (members, generation) = group.members();
    for member in &members {
        devices.open(&member.cow).map_err(lookup("Cannot get COW device of a snapshot"))?;
    }
    Ok(Arc::new(Origin { len: place.len, group, members, generation }))
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

    fn child_requests(&self, depth: u16) -> u16 {
        if self.members.is_empty() { 0 } else { depth.max(2) }
    }

    fn accesses_data(&self) -> bool {
        false
    }

    fn describe(&self) -> Vec<Fact> {
        let (members, _) = self.group.members();
        let failing = members.iter().filter(|member| member.store.is_header_failing());
        let fact = |member: &Arc<Member>| {
            let text = format!(
                "fail where the invalid snapshot on {} needs a copy, as its header cannot be written",
                member.cow
            );
            ("writes", text)
        };
        failing.map(fact).collect()
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        let copier = |(member, &cow): (&Arc<Member>, &NodeId)| Copier {
            store: member.store.clone(),
            origin: below[0],
            cow,
            origin_len: member.len.bytes(),
            fua: member.fua,
            for_origin: true,
            held: HeldRequests::default(),
        };
        Box::new(OriginNode {
            device: below[0],
            copiers: self.members.iter().zip(&below[1..]).map(copier).collect(),
            group: self.group.clone(),
            generation: self.generation,
            missed: Vec::new(),
            requests: Box::default(),
        })
    }
}

impl<R: Ring> Target<R> for Origin {
    fn areas(&self) -> Vec<Area> {
        vec![self.area()]
    }

    /// Returns the smallest chunk of all snapshots. A write is then within one chunk of each, because chunks
    /// are powers of two.
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

/// The state of a write: the snapshot that it copies for, and the progress of that copy.
#[derive(Clone, Copy)]
struct RequestState {
    snapshot: usize,
    copy: ChunkCopy,
}

/// An invalid snapshot that was created after the table was loaded, so that the table does not know it.
struct Missed {
    store: Arc<Store>,
    /// Writes that wait for the snapshot's header.
    held: HeldRequests,
}

struct OriginNode {
    device: NodeId,
    copiers: Box<[Copier]>,
    group: Arc<Group>,
    generation: u64,
    /// Invalid snapshots that this table does not know, whose headers do not say so yet.
    missed: Vec<Missed>,
    requests: Box<[RequestState]>,
}

impl OriginNode {
    /// Invalidates snapshots that this table does not know: it does not copy for them.
    #[cold]
    fn invalidate_missed(&mut self) {
        let (members, generation) = self.group.members();
        for Member { store, .. } in members.iter().map(|member| &**member) {
            if store.is_active() && !self.copiers.iter().any(|copier| Arc::ptr_eq(&copier.store, store)) {
                store.invalidate();
                let mut held = HeldRequests::default();
                held.reserve(self.requests.len());
                self.missed.push(Missed { store: store.clone(), held });
            }
        }
        self.generation = generation;
    }

    /// Copies for one snapshot after the other, then sends the write.
    fn copy_and_write<R: Ring>(&mut self, io: Cookie, req: &Request, cx: &mut Cx<'_, R>) -> Verdict {
        if self.missed.iter().any(|missed| missed.store.is_header_failing()) {
            return Verdict::Up(End::IoError);
        }
        if let Some(missed) = self.missed.iter_mut().find(|missed| missed.store.is_header_pending()) {
            return missed.held.wait(&missed.store.waiting, io, cx);
        }
        let request = &mut self.requests[io.tag.index()];
        while let Some(copier) = self.copiers.get_mut(request.snapshot) {
            let store = &copier.store;
            let chunk = req.offset.0 / store.chunk.bytes().0;
            let covered = req.offset < copier.origin_len && store.is_active();
            if covered && store.is_valid() && !matches!(store.find(chunk), ChunkState::Copied(_)) {
                match copier.begin(&mut request.copy, io, chunk, None, cx) {
                    Progress::Held => return Verdict::Held,
                    Progress::Failed(End::Requeue) => return Verdict::Up(End::Requeue),
                    Progress::Done | Progress::Failed(_) => {}
                }
            }
            let store = &copier.store;
            let is_copied = || matches!(store.find(chunk), ChunkState::Copied(_));
            let waits = match store.is_valid() {
                true => covered && store.is_read(chunk),
                // A chunk with an exception on disk may be written: the snapshot stays correct whatever the
                // header says.
                false if covered && !is_copied() && store.is_header_failing() => {
                    return Verdict::Up(End::IoError);
                }
                false => covered && !is_copied() && store.is_header_pending(),
            };
            if waits {
                request.copy = ChunkCopy::NONE;
                return copier.wait(io, cx);
            }
            request.snapshot += 1;
        }
        Verdict::Down(self.device)
    }

    /// Continues a write after progress of its copy.
    fn after_copy<R: Ring>(
        &mut self,
        io: Cookie,
        req: &Request,
        progress: Progress,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        match progress {
            Progress::Held => Verdict::Held,
            Progress::Failed(End::Requeue) => Verdict::Up(End::Requeue),
            Progress::Done | Progress::Failed(_) => self.copy_and_write(io, req, cx),
        }
    }
}

impl<R: Ring> Node<R> for OriginNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.requests = vec![RequestState { snapshot: 0, copy: ChunkCopy::NONE }; tags].into();
        self.copiers.iter_mut().for_each(|copier| copier.held.reserve(tags));
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        if !req.op.is_write() {
            return Verdict::Down(self.device);
        }
        if self.generation != self.group.generation() {
            self.invalidate_missed();
        }
        if self.copiers.is_empty() && self.missed.is_empty() {
            return Verdict::Down(self.device);
        }
        self.requests[io.tag.index()] = RequestState { snapshot: 0, copy: ChunkCopy::NONE };
        self.copy_and_write(io, req, cx)
    }

    fn reap(&mut self, io: Cookie, req: &mut Request, result: i64, cx: &mut Cx<'_, R>) -> Verdict {
        let request = &mut self.requests[io.tag.index()];
        if !request.copy.has_claim() {
            if result < 0 {
                return Verdict::Up(End::from_result(result, 0));
            }
            return self.copy_and_write(io, req, cx);
        }
        let progress = self.copiers[request.snapshot].retry(&mut request.copy, io, None, cx);
        self.after_copy(io, req, progress, cx)
    }

    fn child_end(
        &mut self,
        io: Cookie,
        req: &mut Request,
        _: &Request,
        status: End,
        cx: &mut Cx<'_, R>,
    ) -> Verdict {
        // A child request is spare again.
        self.copiers.iter_mut().for_each(|copier| copier.held.resume_all());
        let request = &mut self.requests[io.tag.index()];
        let progress = self.copiers[request.snapshot].child_ended(&mut request.copy, io, None, status, cx);
        self.after_copy(io, req, progress, cx)
    }

    fn cancel(&mut self, io: Cookie, cx: &mut Cx<'_, R>) {
        let of_copiers = self.copiers.iter_mut().map(|copier| &mut copier.held);
        let mut all = of_copiers.chain(self.missed.iter_mut().map(|missed| &mut missed.held));
        if !all.any(|held| held.cancel(io, cx)) {
            cx.cancel(io);
        }
    }

    fn commit(&mut self, cx: &mut Cx<'_, R>) {
        self.copiers.iter_mut().for_each(|copier| copier.held.resume_woken(cx));
        if !self.missed.is_empty() {
            self.missed.iter_mut().for_each(|missed| missed.held.resume_woken(cx));
            self.missed.retain(|missed| missed.store.is_header_pending() || !missed.held.is_empty());
        }
    }
}
