//! Hands a login to a session on a reactor, and back: opens sessions, adds and removes their LUNs, and ends
//! them.
//!
//! Runs on the control plane's runtime. Closures change a session on its reactor; they check on that thread
//! that the session and the queues of its LUNs still exist, since the numbers of both are reused.

use super::session::{ConnectionInfo, ReactorSession, Session, SessionCounts, SessionInfo, SessionLun};
use super::targets::{Event, Targets};
use super::tree::{GroupId, VisibleLun};
use super::unit::Unit;
use engine::reactor::QueueHandle;
use exports::iscsi::{
    ConnectionSetup, EndReason, LunSetup, Pings, SendTargets, SessionCounters, SessionSetup,
};
use exports::{Fronts, Turn};
use proto::iscsi::login::{Join, LoginDone, SessionType, Status};
use queue::QueueId;
use scsi::{Access, Lun, NexusLoss, NexusName};
use spec::PortalAddress;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// Longest wait for a session that a login replaces.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait of a login for a session of another port that is ending: requests may be in the stack.
const ENDS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for sessions to see changed LUNs before the command that changed them is answered.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(2);

/// The initiator's and our own address of a connection, and its portal.
#[derive(Clone)]
pub(super) struct Ends {
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    pub(super) portal: PortalAddress,
}

/// Why a complete login got no session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum NoSession {
    #[error("the target was removed or changed during the login")]
    Removed,
    #[error("the session that it joins has ended")]
    Ended,
    #[error("the session that it replaces did not end")]
    Stuck,
    #[error("the connection that it replaces was lost with its session, as at error recovery level 0")]
    Level0,
}

impl NoSession {
    /// Returns the login status that the initiator receives.
    pub(super) fn status(self) -> Status {
        match self {
            NoSession::Removed => Status::TargetRemoved,
            NoSession::Stuck => Status::OutOfResources,
            NoSession::Ended | NoSession::Level0 => Status::NoSession,
        }
    }
}

impl Targets {
    /// Opens the session of a login, after the session that it replaces has ended, or finds the one that
    /// the connection joins. Returns the session's number.
    pub(super) async fn establish(self: &Arc<Self>, done: &LoginDone, ends: &Ends) -> Result<u64, NoSession> {
        match done.join {
            Join::New | Join::Reinstate { .. } => self.open_session(done, ends).await,
            Join::AddConnection => {
                let (id, reactor, on_reactor) = {
                    let state = self.lock();
                    let session = state.sessions.by_tsih(done.tsih).ok_or(NoSession::Ended)?;
                    (session.info.id, session.reactor, session.reactor_session.clone())
                };
                if self.is_ending(reactor, on_reactor).await { Err(NoSession::Ended) } else { Ok(id) }
            }
            Join::ReinstateConnection => {
                let (id, has_others) = {
                    let state = self.lock();
                    let session = state.sessions.by_tsih(done.tsih).ok_or(NoSession::Removed)?;
                    let mut connections = session.connections.values();
                    (session.info.id, connections.any(|connection| connection.cid != done.cid))
                };
                if has_others {
                    self.end_connection(id, done.cid).await?;
                    return Ok(id);
                }
                // At error recovery level 0 a session ends with its last connection (section 7.1.4.1): the
                // initiator begins a new one.
                self.end_session_and_wait(id, EndReason::ConnectionLost).await?;
                Err(NoSession::Level0)
            }
        }
    }

    async fn open_session(self: &Arc<Self>, done: &LoginDone, ends: &Ends) -> Result<u64, NoSession> {
        let group = match &done.session {
            SessionType::Discovery => None,
            SessionType::Normal { target } => {
                let target = target.parse().map_err(|_| NoSession::Removed)?;
                Some(GroupId::new(target, done.portal_group_tag))
            }
        };
        // Another login of this initiator port may have opened a session while this one waited.
        if let Some(group) = &group {
            loop {
                let old =
                    self.lock().sessions.of_port(&done.initiator, done.isid, group).next().map(|s| s.info.id);
                let Some(old) = old else { break };
                self.end_session_and_wait(old, EndReason::Reinstated).await?;
            }
        }
        if let Some(group) = &group {
            self.await_ends(&done.initiator, group).await;
        }
        let id = self.add_session(done, group, ends)?;
        self.change_luns(id).await;
        Ok(id)
    }

    /// Waits, not for long, until an initiator's sessions whose connections it has closed have ended: one that logs in
    /// by another port finds nothing of its old session, such as PREVENT ALLOW MEDIUM REMOVAL or a reservation by
    /// RESERVE.
    async fn await_ends(&self, initiator: &str, group: &GroupId) {
        let sessions: Vec<(u64, usize, Arc<ReactorSession>)> = {
            let state = self.lock();
            let sessions = state.sessions.of_initiator(initiator, group);
            sessions
                .map(|session| (session.info.id, session.reactor, session.reactor_session.clone()))
                .collect()
        };
        for (id, reactor, on_reactor) in sessions {
            if self.is_ending(reactor, on_reactor).await {
                let ended = self.end_session_and_wait(id, EndReason::ConnectionLost);
                let _ = tokio::time::timeout(ENDS_TIMEOUT, ended).await;
            }
        }
    }

    /// Returns whether a session is ending, or has ended, as its connections were closed before now.
    async fn is_ending(&self, reactor: usize, on_reactor: Arc<ReactorSession>) -> bool {
        let reactor = &self.host().reactors()[reactor];
        // A turn that has begun may not see the end of a connection. The next one does.
        let _ = reactor.next_turn().await;
        let _ = reactor.next_turn().await;
        let (answer, is_ending) = oneshot::channel();
        let ask = move |fronts: &mut Fronts, _: &mut Turn<'_>| {
            let is_ending = on_reactor.session().is_none_or(|session| fronts.iscsi.is_ending(session));
            let _ = answer.send(is_ending);
        };
        reactor.run(Box::new(ask));
        is_ending.await.unwrap_or(true)
    }

    /// Adds a session without LUNs and connections to the list and to the reactor with the fewest connections.
    fn add_session(
        self: &Arc<Self>,
        done: &LoginDone,
        group: Option<GroupId>,
        ends: &Ends,
    ) -> Result<u64, NoSession> {
        let mut state = self.lock();
        let (mut relative_port, mut pings, mut reactor) = (0, None, None);
        if let Some(id) = &group {
            let known = state.tree.group(id).map_err(|_| NoSession::Removed)?;
            if !known.is_enabled || !known.admits(&done.initiator) {
                return Err(NoSession::Removed);
            }
            relative_port = known.relative_port;
            pings = pings_of(
                known.acl_attribute(&done.initiator, "nopin_timeout"),
                known.acl_attribute(&done.initiator, "nopin_response_timeout"),
            );
            let units = known.luns.values().filter_map(|lun| state.units.get(&lun.unit));
            reactor = units.filter_map(|unit| self.host().reactor_of(unit.device())).next();
        }
        let load = state.sessions.load(self.host().reactors().len());
        let least = load.iter().enumerate().min_by_key(|(_, load)| **load).map_or(0, |(number, _)| number);
        let reactor = reactor.unwrap_or(least);
        let id = state.sessions.new_id();
        let nexus_name = NexusName {
            initiator: done.initiator.clone(),
            isid: done.isid.0,
            target: group.as_ref().map(|group| group.target.to_string()).unwrap_or_default(),
            portal_group: done.portal_group_tag,
            relative_port,
        };
        let info = SessionInfo {
            id,
            tsih: done.tsih,
            group: group.clone(),
            initiator: done.initiator.clone(),
            alias: done.initiator_alias.clone(),
            isid: done.isid,
            user: done.user.clone(),
            parameters: done.parameters,
            connections: Vec::new(),
            luns: Vec::new(),
            counts: SessionCounts::default(),
        };
        let (counters, reactor_session) =
            (Arc::<SessionCounters>::default(), Arc::<ReactorSession>::default());
        let session = Session {
            info,
            reactor,
            nexus_name,
            luns: BTreeMap::new(),
            reactor_session: reactor_session.clone(),
            exp_cmd_sn: done.cmd_sn,
            connections: BTreeMap::new(),
            counters: counters.clone(),
            changed: watch::channel(false).0,
        };
        state.sessions.list.insert(id, session);
        let events = self.events();
        let gone = reactor_session.clone();
        let setup = SessionSetup {
            number: done.tsih,
            target: group.as_ref().map(|group| group.target.to_string()).unwrap_or_default(),
            parameters: done.parameters,
            luns: Vec::new(),
            exp_cmd_sn: done.cmd_sn,
            queue_depth: done.window.clamp(1, u16::MAX.into()) as u16,
            send_targets: self.send_targets(group, done.initiator.clone(), ends.local),
            pings,
            exchange: self.exchange().clone(),
            counters,
            when_gone: Some(Box::new(move |why| {
                gone.is_gone.store(true, Relaxed);
                // At the end of the process the receiver does not exist any more.
                let _ = events.send(Event::SessionGone(id, why));
            })),
        };
        let open = move |fronts: &mut Fronts, _: &mut Turn<'_>| {
            let _ = reactor_session.id.set(fronts.iscsi.open_session(setup));
        };
        self.host().reactors()[reactor].run(Box::new(open));
        tracing::debug!(
            initiator = %done.initiator,
            peer = %ends.peer,
            tsih = done.tsih,
            target_name = %state.sessions.list[&id].nexus_name.target,
            "an iSCSI session began"
        );
        Ok(id)
    }

    /// Hands a connection to the reactor of its session, after the last login response was sent.
    pub(super) fn adopt(
        self: &Arc<Self>,
        id: u64,
        fd: OwnedFd,
        leftover: Vec<u8>,
        done: &LoginDone,
        ends: Ends,
    ) {
        let mut state = self.lock();
        let number = state.sessions.new_connection();
        let Some(session) = state.sessions.list.get_mut(&id) else { return };
        let Ends { peer, local, portal } = ends;
        let info = ConnectionInfo { cid: done.cid, peer, local, portal, parameters: done.connection };
        session.connections.insert(number, info);
        let events = self.events();
        let gone = move || drop(events.send(Event::ConnectionGone(id, number)));
        // A connection that is not adopted counts as closed, too: the reactor drops the closure.
        let gone = Gone(Some(Box::new(gone)));
        let setup = ConnectionSetup {
            cid: done.cid,
            parameters: done.connection,
            stat_sn: done.stat_sn,
            when_gone: Some(Box::new(move || drop(gone))),
        };
        let reactor_session = session.reactor_session.clone();
        let adopt = move |fronts: &mut Fronts, turn: &mut Turn<'_>| {
            let Some(session) = reactor_session.session() else { return };
            if let Err(error) = fronts.iscsi.adopt(session, fd, setup, &leftover, turn) {
                tracing::error!(%error, "an iSCSI connection could not be taken over");
                fronts.iscsi.end_session(session, EndReason::ConnectionLost, turn);
            }
        };
        self.host().reactors()[session.reactor].run(Box::new(adopt));
    }

    /// Updates a session to the LUNs that its initiator may see now. An initiator whose LUNs change gets a
    /// unit attention (3F/0E).
    pub(super) async fn change_luns(self: &Arc<Self>, id: u64) {
        let Some(reactor_session) =
            self.lock().sessions.list.get(&id).map(|session| session.reactor_session.clone())
        else {
            return;
        };
        let _turn = reactor_session.changing.lock().await;
        let Some(plan) = self.plan_luns(id) else { return };
        if plan.added.is_empty() && plan.removed.is_empty() {
            return;
        }
        let mut added = Vec::new();
        for (visible, unit) in plan.added {
            match self.queue_of(&unit, plan.reactor).await {
                Some((queue, clients)) => {
                    let access = if visible.read_only { Access::ReadOnly } else { Access::ReadWrite };
                    let lun = Lun::new(visible.lun);
                    let nexus = unit.logical().attach_nexus(plan.nexus_name.clone(), lun, access);
                    added.push(SessionLun { visible, nexus, queue, clients });
                }
                None => tracing::warn!(
                    device = %unit.device().name(),
                    lun = visible.lun,
                    "a LUN is not shown to a session: its device is being removed or has its only queue elsewhere"
                ),
            }
        }
        let all = {
            let mut state = self.lock();
            let Some(session) = state.sessions.list.get_mut(&id) else {
                // The session, and with it its nexuses, ended meanwhile.
                drop(state);
                added.iter().for_each(|lun| lun.nexus.unit().detach_nexus(&lun.nexus, NexusLoss::Loss));
                return;
            };
            for removed in &plan.removed {
                session.luns.remove(&removed.visible.lun);
            }
            let new = added.into_iter().map(|lun| (lun.visible.lun, lun));
            session.luns.extend(new);
            session.luns.values().cloned().collect::<Vec<_>>()
        };
        let (done, is_done) = oneshot::channel::<()>();
        let on_reactor = reactor_session.clone();
        let is_first = plan.is_first;
        let change = move |fronts: &mut Fronts, _: &mut Turn<'_>| {
            if let Some(session) = on_reactor.session() {
                let is_same = |lun: &SessionLun| {
                    fronts
                        .iscsi
                        .queue_clients(lun.queue)
                        .is_some_and(|clients| Arc::ptr_eq(clients, &lun.clients))
                };
                let luns = all.iter().filter(|lun| is_same(lun)).map(|lun| LunSetup {
                    lun: Lun::new(lun.visible.lun),
                    queue: lun.queue,
                    nexus: lun.nexus.clone(),
                });
                let luns = luns.collect();
                fronts.iscsi.change_luns(session, luns);
            }
            // The unit attention comes last: REPORT LUNS clears it, and must return the new list then.
            if !is_first {
                all.iter().for_each(|lun| lun.nexus.report_luns_changed());
            }
            let _ = done.send(());
        };
        self.host().reactors()[plan.reactor].run(Box::new(change));
        let _ = is_done.await;
        for lun in plan.removed {
            lun.nexus.unit().detach_nexus(&lun.nexus, NexusLoss::Loss);
        }
    }

    /// Waits until all sessions of a group see its LUNs, so that a rescan after the command that changed them
    /// finds them.
    pub async fn sessions_follow(self: &Arc<Self>, group: &GroupId) {
        // Each session is changed by a task of its own: a change of LUNs must not be dropped half-way.
        let sessions = self.lock().sessions.of_group(group);
        let changes = sessions.into_iter().map(|session| {
            let targets = self.clone();
            tokio::spawn(async move { targets.change_luns(session).await })
        });
        let changes: Vec<_> = changes.collect();
        let all = async {
            for change in changes {
                let _ = change.await;
            }
        };
        if tokio::time::timeout(FOLLOW_TIMEOUT, all).await.is_err() {
            tracing::warn!(%group, "sessions do not see the changed LUNs yet");
        }
    }

    /// Compares the LUNs that a session has with those that it may see.
    fn plan_luns(&self, id: u64) -> Option<LunPlan> {
        let state = self.lock();
        let session = state.sessions.list.get(&id)?;
        let group = state.tree.group(session.info.group.as_ref()?).ok()?;
        let visible = group.visible(&session.info.initiator)?;
        let has = |lun: &VisibleLun| session.luns.get(&lun.lun).is_some_and(|known| known.visible == *lun);
        let new = visible.iter().filter(|lun| !has(lun));
        let added = new.filter_map(|lun| Some((*lun, state.units.get(&lun.unit)?.clone()))).collect();
        let lost = session.luns.values().filter(|known| !visible.contains(&known.visible));
        Some(LunPlan {
            added,
            removed: lost.cloned().collect(),
            reactor: session.reactor,
            nexus_name: session.nexus_name.clone(),
            is_first: session.connections.is_empty(),
        })
    }

    /// Returns the queue of a device on a reactor and its LUN counter, which are created if needed; `None`:
    /// the device is being removed, or its only queue is on another reactor.
    async fn queue_of(&self, unit: &Arc<Unit>, reactor: usize) -> Option<(QueueId, Arc<AtomicU32>)> {
        if self.host().reactor_of(unit.device()).is_some_and(|only| only != reactor) {
            return None;
        }
        unit.guarded().await;
        let (answer, queue) = oneshot::channel();
        let attach = move |handle: &QueueHandle, fronts: &mut Fronts, _: &mut Turn<'_>| {
            let front = &mut fronts.iscsi;
            if !front.has_queue(handle.queue) {
                front.add_queue(handle.queue, handle.facts, Arc::default());
            }
            let clients = front.queue_clients(handle.queue).cloned();
            let _ = answer.send(clients.map(|clients| (handle.queue, clients)));
        };
        self.host().reactors()[reactor].attach(unit.device().clone(), Box::new(attach));
        queue.await.ok().flatten()
    }

    /// Ends a session. It is removed from the list when its reactor has released it.
    pub(super) fn end_session(&self, id: u64, why: EndReason) {
        let state = self.lock();
        let Some(session) = state.sessions.list.get(&id) else { return };
        let reactor_session = session.reactor_session.clone();
        let end = move |fronts: &mut Fronts, turn: &mut Turn<'_>| {
            if let Some(session) = reactor_session.session() {
                fronts.iscsi.end_session(session, why, turn);
            }
        };
        self.host().reactors()[session.reactor].run(Box::new(end));
    }

    /// Ends a session whose connection was lost before the reactor adopted it, if the session has no other
    /// connection.
    pub(super) fn end_empty_session(&self, id: u64) {
        let state = self.lock();
        if state.sessions.list.get(&id).is_some_and(|session| session.connections.is_empty()) {
            drop(state);
            self.end_session(id, EndReason::ConnectionLost);
        }
    }

    /// Ends a session and waits until its reactor has released it.
    async fn end_session_and_wait(&self, id: u64, why: EndReason) -> Result<(), NoSession> {
        let watcher = self.lock().sessions.list.get(&id).map(|session| session.changed.subscribe());
        let Some(mut watcher) = watcher else { return Ok(()) };
        self.end_session(id, why);
        let ended = watcher.wait_for(|is_gone| *is_gone);
        match tokio::time::timeout(END_TIMEOUT, ended).await {
            // The sender is dropped with the session.
            Ok(_) => Ok(()),
            Err(_) => Err(NoSession::Stuck),
        }
    }

    /// Closes a connection that a login replaces, and waits until the reactor has released it.
    async fn end_connection(&self, id: u64, cid: u16) -> Result<(), NoSession> {
        let (mut watcher, reactor, reactor_session) = {
            let state = self.lock();
            let session = state.sessions.list.get(&id).ok_or(NoSession::Removed)?;
            (session.changed.subscribe(), session.reactor, session.reactor_session.clone())
        };
        let end = move |fronts: &mut Fronts, turn: &mut Turn<'_>| {
            if let Some(session) = reactor_session.session() {
                fronts.iscsi.end_connection(session, cid, turn);
            }
        };
        self.host().reactors()[reactor].run(Box::new(end));
        let gone = async {
            loop {
                {
                    let state = self.lock();
                    let session = state.sessions.list.get(&id).ok_or(NoSession::Removed)?;
                    if !session.connections.values().any(|connection| connection.cid == cid) {
                        return Ok(());
                    }
                }
                watcher.changed().await.map_err(|_| NoSession::Removed)?;
            }
        };
        tokio::time::timeout(END_TIMEOUT, gone).await.unwrap_or(Err(NoSession::Stuck))
    }

    /// Handles an event that a reactor reported.
    pub(super) fn happened(&self, event: Event) {
        let mut state = self.lock();
        match event {
            Event::ConnectionGone(id, number) => {
                if let Some(session) = state.sessions.list.get_mut(&id) {
                    session.connections.remove(&number);
                    session.changed.send_replace(false);
                }
            }
            Event::SessionGone(id, why) => {
                let Some(session) = state.sessions.list.remove(&id) else { return };
                state.sessions.release_tsih(session.info.tsih);
                // With the state locked: a login that finds the session gone finds its nexuses gone, too.
                let loss = if why == EndReason::Logout { NexusLoss::Logout } else { NexusLoss::Loss };
                for lun in session.luns.values() {
                    lun.nexus.unit().detach_nexus(&lun.nexus, loss);
                }
                drop(state);
                let Session { info, changed, .. } = session;
                tracing::debug!(initiator = %info.initiator, tsih = info.tsih, ?why, "an iSCSI session ended");
                changed.send_replace(true);
            }
        }
    }

    fn send_targets(
        self: &Arc<Self>,
        group: Option<GroupId>,
        initiator: String,
        local: SocketAddr,
    ) -> SendTargets {
        let targets = Arc::downgrade(self);
        Arc::new(move |wanted| {
            let targets = targets.upgrade()?;
            let state = targets.lock();
            super::discovery::send_targets(&state.tree, wanted, group.as_ref(), &initiator, local)
        })
    }
}

/// The LUNs to add to and to remove from a session.
struct LunPlan {
    added: Vec<(VisibleLun, Arc<Unit>)>,
    removed: Vec<SessionLun>,
    reactor: usize,
    nexus_name: NexusName,
    /// Whether the session has no connection yet, so that its initiator has seen no LUN.
    is_first: bool,
}

/// Calls a function when it is dropped.
struct Gone(Option<Box<dyn FnOnce() + Send>>);

impl Drop for Gone {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

impl ReactorSession {
    /// Returns the session's number on its reactor; `None`: it has ended. Must be called on the reactor's
    /// thread.
    fn session(&self) -> Option<exports::iscsi::SessionId> {
        self.id.get().copied().filter(|_| !self.is_gone.load(Relaxed))
    }
}

fn pings_of(after_s: i64, timeout_s: i64) -> Option<Pings> {
    let seconds = |number: i64| Duration::from_secs(number.unsigned_abs());
    (after_s > 0).then(|| Pings { after: seconds(after_s), timeout: seconds(timeout_s) })
}
