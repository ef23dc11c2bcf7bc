//! Describes LUNs and their sessions for `show`, `list`, `top`, the page and the metrics.

use super::session::{ConnectionInfo, Session, SessionInfo};
use super::targets::Targets;
use super::tree::{Group, GroupId};
use super::unit::Unit;
use engine::control::{ClientConnection, ClientSession, ExportInfo};
use engine::device::Device;
use scsi::reservation::Kind;
use spec::PortalAddress;
use std::collections::BTreeMap;

/// Most sessions that `show` lists for a LUN; further ones are only counted.
const SESSIONS_MAX: usize = 32;

/// Describes a LUN at a portal, or at all portals of its group.
pub(super) fn export_info(
    targets: &Targets,
    id: &GroupId,
    lun: u16,
    portal: Option<&PortalAddress>,
    device: &Device,
) -> ExportInfo {
    let state = targets.lock();
    let group = state.tree.group(id).ok();
    let unit = state.units.get(&super::tree::UnitId(device.number())).cloned();
    let first = group.and_then(|group| group.portals.first());
    let address = portal.or(first).map(|portal| portal.uri(&id.target, lun));
    let all = state.sessions.list.values().filter(|session| session.info.group.as_ref() == Some(id));
    let sees = |session: &SessionInfo| session.luns.iter().any(|lun| lun.unit.0 == device.number());
    let of_unit: Vec<(&Session, SessionInfo)> =
        all.map(|session| (session, session.info())).filter(|(_, info)| sees(info)).collect();
    let at_portal = |session: &SessionInfo| {
        let is_here = |at: &PortalAddress| portal.is_none_or(|portal| portal == at);
        session.connections.iter().filter(|connection| is_here(&connection.portal)).count() as u64
    };
    let here = of_unit.iter().filter(|(_, info)| at_portal(info) > 0);
    let clients: Vec<ClientSession> =
        here.map(|(session, info)| client_session(session, info, unit.as_deref())).collect();
    let sessions: Vec<SessionInfo> = of_unit.into_iter().map(|(_, info)| info).collect();
    let counts = counts(unit.as_deref(), clients.len());
    let details = group.map(|group| details(id, group, lun, unit.as_deref(), &sessions)).unwrap_or_default();
    ExportInfo {
        kind: "iscsi".to_owned(),
        address: address.unwrap_or_else(|| format!("{}/{lun}", id.target)),
        connections: sessions.iter().map(at_portal).sum(),
        tls: "off".to_owned(),
        counts,
        details,
        sessions: clients,
    }
}

/// Describes a session for the metrics, `top`, the page and traces, without secrets.
fn client_session(session: &Session, info: &SessionInfo, unit: Option<&Unit>) -> ClientSession {
    let reservations = unit.map(|unit| unit.logical().reservations());
    let nexus = &session.nexus_name;
    let is_registered = reservations.as_ref().is_some_and(|reservations| {
        reservations.registrations().iter().any(|known| known.registrant.covers(nexus))
    });
    let has_reservation = reservations.as_ref().is_some_and(|reservations| {
        let held = reservations.held();
        let holds = held
            .is_some_and(|held| held.holder.as_ref().map_or(is_registered, |holder| holder.covers(nexus)));
        holds || reservations.reserved() == Some(nexus)
    });
    let connections = info.connections.iter().map(|connection| ClientConnection {
        cid: connection.cid,
        peer: connection.peer.to_string(),
        portal: connection.portal.authority(),
        local: connection.local.to_string(),
    });
    ClientSession {
        number: info.tsih,
        initiator: info.initiator.clone(),
        isid: info.isid.to_string(),
        target: nexus.target.clone(),
        portal_group: nexus.portal_group,
        user: info.user.clone().unwrap_or_default(),
        digests: digests(info).to_owned(),
        connections: connections.collect(),
        has_reservation,
        is_registered,
        counts: info.counts.named().into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
    }
}

/// Names the digests of a session.
fn digests(session: &SessionInfo) -> &'static str {
    let header = session.connections.iter().any(|c| c.parameters.header_digest);
    let data = session.connections.iter().any(|c| c.parameters.data_digest);
    match (header, data) {
        (true, true) => "header,data",
        (true, false) => "header",
        (false, true) => "data",
        (false, false) => "none",
    }
}

fn counts(unit: Option<&Unit>, sessions: usize) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::from([("sessions".to_owned(), sessions as u64)]);
    if let Some(unit) = unit {
        let reservations = unit.logical().reservations();
        let is_reserved = reservations.held().is_some() || reservations.reserved().is_some();
        counts.insert("registrations".to_owned(), reservations.registrations().len() as u64);
        counts.insert("reservations".to_owned(), is_reserved.into());
    }
    counts
}

fn details(
    id: &GroupId,
    group: &Group,
    lun: u16,
    unit: Option<&Unit>,
    sessions: &[SessionInfo],
) -> BTreeMap<String, String> {
    let mut details = BTreeMap::new();
    let mut put = |name: &str, value: String| drop(details.insert(name.to_owned(), value));
    put("target", id.target.to_string());
    put("portal group", id.tag.to_string());
    put("lun", lun.to_string());
    let portals: Vec<String> = group.portals.iter().map(PortalAddress::authority).collect();
    put("portals", portals.join(","));
    put(
        "chap",
        if group.attributes.is_on("authentication") { "required" } else { "not required" }.to_owned(),
    );
    put("access", access(group, lun));
    if let Some(unit) = unit {
        put("serial", unit.serial().to_owned());
        put("naa", unit.logical().identity().naa.iter().map(|byte| format!("{byte:02x}")).collect());
        put_reservations(&mut put, unit);
    }
    for session in sessions.iter().take(SESSIONS_MAX) {
        put(&format!("session {}", session.tsih), session_line(session));
    }
    if sessions.len() > SESSIONS_MAX {
        put("further sessions", (sessions.len() - SESSIONS_MAX).to_string());
    }
    details
}

/// Names the initiators that may use a LUN.
fn access(group: &Group, lun: u16) -> String {
    let mapped = group.acls.iter().flat_map(|(initiator, acl)| {
        let of_lun = acl.mapped.values().filter(move |mapped| mapped.lun == lun);
        of_lun.map(move |mapped| {
            format!("{initiator}{}", if mapped.write_protect { " (read-only)" } else { "" })
        })
    });
    let mut all: Vec<String> = mapped.collect();
    if group.is_demo() {
        let is_protected = group.attributes.is_on("demo_mode_write_protect");
        all.push(if is_protected { "all (read-only)" } else { "all" }.to_owned());
    }
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

fn put_reservations(put: &mut impl FnMut(&str, String), unit: &Unit) {
    let reservations = unit.logical().reservations();
    if let Some(held) = reservations.held() {
        let holder = held.holder.as_ref().map_or("all registrants", |holder| holder.initiator.as_str());
        put("reservation", format!("{} (type {}), held by {holder}", kind_name(held.kind), held.kind as u8));
    }
    if let Some(nexus) = reservations.reserved() {
        put("reservation", format!("SPC-2, held by {}", nexus.initiator));
    }
    if !reservations.registrations().is_empty() {
        let all = reservations.registrations().iter().map(|known| known.registrant.initiator.as_str());
        put("registrations", all.collect::<Vec<_>>().join(", "));
        put("reservations survive power loss", if reservations.persists() { "yes" } else { "no" }.to_owned());
    }
}

/// Returns the name of a type of reservation (SPC-6, table of PERSISTENT RESERVE types).
fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::WriteExclusive => "Write Exclusive",
        Kind::ExclusiveAccess => "Exclusive Access",
        Kind::WriteExclusiveRegistrantsOnly => "Write Exclusive, Registrants Only",
        Kind::ExclusiveAccessRegistrantsOnly => "Exclusive Access, Registrants Only",
        Kind::WriteExclusiveAllRegistrants => "Write Exclusive, All Registrants",
        Kind::ExclusiveAccessAllRegistrants => "Exclusive Access, All Registrants",
    }
}

fn session_line(session: &SessionInfo) -> String {
    let peer = |connection: &ConnectionInfo| format!("{}@{}", connection.peer, connection.portal.authority());
    let peers: Vec<String> = session.connections.iter().map(peer).collect();
    let parameters = &session.parameters;
    let (commands, read, written) =
        (session.counts.commands, session.counts.read_bytes, session.counts.written_bytes);
    let user = session.user.as_ref().map(|user| format!(" user={user}")).unwrap_or_default();
    let segments = session.connections.first().map(|connection| {
        let parameters = &connection.parameters;
        format!(" segments={}/{}", parameters.max_receive_segment, parameters.max_send_segment)
    });
    format!(
        "{} isid={} from {}{user} digests={} InitialR2T={} ImmediateData={} FirstBurstLength={} \
         MaxBurstLength={} MaxOutstandingR2T={}{} commands={commands} read={read} written={written} \
         errors={} aborts={} in-progress={} waited={} digest-errors={} rejects={}",
        session.initiator,
        session.isid,
        peers.join(","),
        digests(session),
        yes(parameters.initial_r2t),
        yes(parameters.immediate_data),
        parameters.first_burst_length,
        parameters.max_burst_length,
        parameters.max_outstanding_r2t,
        segments.unwrap_or_default(),
        session.counts.errors,
        session.counts.aborts,
        session.counts.in_progress,
        session.counts.waited,
        session.counts.digest_errors,
        session.counts.rejects,
    )
}

fn yes(is: bool) -> &'static str {
    if is { "Yes" } else { "No" }
}
