//! Metrics of iSCSI sessions. A session can see several devices: its counters are its own, its reservations
//! those of each device.

use super::Gathered;
use crate::control::ClientSession;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::collections::BTreeMap;
use std::fmt;

/// A counter of a session: name, help, its name among the session's counters.
const COUNTERS: [(&str, &str, &str); 8] = [
    ("blockyard_iscsi_commands", "SCSI commands that ended", "commands"),
    ("blockyard_iscsi_command_errors", "SCSI commands that ended with another status than GOOD", "errors"),
    ("blockyard_iscsi_command_aborts", "SCSI commands that were aborted", "aborts"),
    ("blockyard_iscsi_command_waits", "Waits of SCSI commands for memory or a tag", "waited"),
    ("blockyard_iscsi_read_bytes", "Bytes of data sent to the initiator", "bytes-read"),
    ("blockyard_iscsi_written_bytes", "Bytes of data received from the initiator", "bytes-written"),
    ("blockyard_iscsi_digest_errors", "Headers and data segments with a wrong digest", "digest-errors"),
    ("blockyard_iscsi_rejects", "PDUs that were rejected", "rejects"),
];

/// Labels that identify a session. They are the same after the initiator has logged in again.
fn labels(session: &ClientSession) -> [(&'static str, String); 4] {
    [
        ("target", session.target.clone()),
        ("portal_group", session.portal_group.to_string()),
        ("initiator", session.initiator.clone()),
        ("isid", session.isid.clone()),
    ]
}

/// A session of a device, listed once although each portal reports it.
fn of_device(device: &Gathered) -> BTreeMap<u16, &ClientSession> {
    let all = device.info.exports.iter().flat_map(|export| &export.sessions);
    all.map(|session| (session.number, session)).collect()
}

pub(super) fn encode(devices: &[Gathered], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let sessions: BTreeMap<u16, &ClientSession> = devices.iter().flat_map(of_device).collect();
    let gauge = |encoder: &mut DescriptorEncoder<'_>, name, help, value: fn(&ClientSession) -> u64| {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for session in sessions.values() {
            ConstGauge::new(value(session)).encode(family.encode_family(&labels(session))?)?;
        }
        Ok(())
    };
    let help = "An iSCSI session, with its address, portal, digests and CHAP user";
    let mut family =
        encoder.encode_descriptor("blockyard_iscsi_session_info", help, None, MetricType::Gauge)?;
    for session in sessions.values() {
        let of_all = |part: fn(&crate::control::ClientConnection) -> &str| {
            session.connections.iter().map(part).collect::<Vec<_>>().join(",")
        };
        let more = [
            ("session", session.number.to_string()),
            ("peer", of_all(|connection| &connection.peer)),
            ("portal", of_all(|connection| &connection.portal)),
            ("digests", session.digests.clone()),
            ("user", session.user.clone()),
        ];
        let all: Vec<(&str, String)> = labels(session).into_iter().chain(more).collect();
        ConstGauge::new(1_u64).encode(family.encode_family(&all)?)?;
    }
    gauge(encoder, "blockyard_iscsi_session_connections", "Connections of the session", |session| {
        session.connections.len() as u64
    })?;
    gauge(encoder, "blockyard_iscsi_commands_in_progress", "SCSI commands in progress", |session| {
        count(session, "in-progress")
    })?;
    for (name, help, counter) in COUNTERS {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for session in sessions.values() {
            let value = ConstCounter::new(count(session, counter));
            value.encode(family.encode_family(&labels(session))?)?;
        }
    }
    of_reservations(devices, encoder)
}

fn of_reservations(devices: &[Gathered], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    type Holds = (&'static str, &'static str, fn(&ClientSession) -> bool);
    let gauges: [Holds; 2] = [
        (
            "blockyard_iscsi_session_registered",
            "Whether the initiator is registered for persistent reservations: 0 or 1",
            |session| session.is_registered,
        ),
        (
            "blockyard_iscsi_session_reservation",
            "Whether the initiator holds the reservation of the device: 0 or 1",
            |session| session.has_reservation,
        ),
    ];
    for (name, help, holds) in gauges {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for device in devices {
            for session in of_device(device).values() {
                let device = [("device", device.info.name.clone())];
                let all: Vec<(&str, String)> = device.into_iter().chain(labels(session)).collect();
                ConstGauge::new(u64::from(holds(session))).encode(family.encode_family(&all)?)?;
            }
        }
    }
    Ok(())
}

fn count(session: &ClientSession, name: &str) -> u64 {
    session.counts.get(name).copied().unwrap_or_default()
}
