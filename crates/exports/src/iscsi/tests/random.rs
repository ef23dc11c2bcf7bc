//! Sends PDUs in random order, with random contents and lengths, over several connections that may break:
//! nothing may panic or leak, and another session must not be disturbed.

use super::client::{FIRST, Options, Session, read10, unit, write10};
use super::rig::{self, Reactor};
use crate::iscsi::EndReason;
use proto::iscsi::Parameters;
use proto::iscsi::parameters::ConnectionParameters;
use proto::iscsi::pdu::{DataOut, RESERVED_TAG, Request, Response, TaskAttribute, TaskFunction};
use sim::Rng;
use std::io::{Read as _, Write as _};
use std::time::Duration;

/// Reads everything that the target has sent, and remembers the tags of its R2Ts.
fn drain(client: &mut super::client::Client, r2ts: &mut Vec<(u32, u32, u32, u32)>, raw: &mut Vec<u8>) {
    let mut bytes = [0; 65_536];
    while let Ok(got) = client.stream.read(&mut bytes) {
        if got == 0 {
            break;
        }
        raw.extend_from_slice(&bytes[..got]);
    }
    while let Some(bhs) = raw.first_chunk::<48>() {
        let (_, len) = proto::iscsi::pdu::lengths(bhs);
        let whole = 48 + proto::iscsi::pdu::padded(len) as usize;
        if raw.len() < whole {
            break;
        }
        if let Ok(header) = proto::iscsi::pdu::parse_response(bhs)
            && let Response::R2t(r2t) = header.pdu
        {
            r2ts.push((r2t.itt, r2t.ttt, r2t.offset, r2t.desired_len));
        }
        raw.drain(..whole);
    }
}

fn round(seed: u64) {
    let mut rng = Rng::new(seed);
    let memory = if rng.below(2) == 0 { 64 << 20 } else { 1 << 20 };
    let reactor = Reactor::new(rig::Options {
        disks: 2,
        depth: 1 + rng.below(8) as u16,
        memory,
        inline: rng.below(2) == 0,
    });
    let units = [unit(), unit()];
    let parameters = Parameters {
        max_connections: 4,
        initial_r2t: rng.below(2) == 0,
        immediate_data: rng.below(4) > 0,
        first_burst_length: 16_384,
        max_burst_length: 32_768,
        max_outstanding_r2t: 1 + rng.below(4) as u16,
        ..Parameters::default()
    };
    let connection = ConnectionParameters {
        max_receive_segment: 32_768,
        max_send_segment: 4096,
        ..ConnectionParameters::default()
    };
    let options = Options { parameters, connection, depth: 8, ..Options::default() };
    let session = Session::open(&reactor, &units, options);
    let neighbour = Options { initiator: "iqn.2026-11.example:neighbour", ..Options::default() };
    let neighbour = Session::open(&reactor, &units, neighbour);
    let mut witness = neighbour.connect(&reactor);
    let mut clients: Vec<_> =
        (1..=1 + rng.below(3) as u16).map(|cid| session.connect_as(&reactor, cid)).collect();
    for client in &mut clients {
        client.stream.set_read_timeout(Some(Duration::from_micros(200))).unwrap();
        client.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    }
    let mut next = FIRST;
    let mut r2ts = Vec::new();
    let mut raw = vec![Vec::new(); clients.len()];
    let mut recent = Vec::new();
    for _ in 0..120 {
        let which = rng.below(clients.len() as u64) as usize;
        let client = &mut clients[which];
        client.cmd_sn = match rng.below(10) {
            0 => next.wrapping_add(rng.below(20) as u32).wrapping_sub(5),
            _ => next,
        };
        let cmd_sn = client.cmd_sn;
        let lun = rng.below(3) as u16;
        let blocks = 1 + rng.below(200) as u16;
        let bytes = match rng.below(12) {
            0..3 => {
                let command = client.command(
                    lun,
                    &read10(rng.below(1000) as u32, blocks),
                    u32::from(blocks) * 512,
                    false,
                );
                client.encode(Request::ScsiCommand(command), rng.below(8) == 0, &[])
            }
            3..6 => {
                let len = u32::from(blocks) * 512;
                let mut command = client.command(lun, &write10(rng.below(1000) as u32, blocks), len, true);
                command.is_final = rng.below(4) > 0;
                command.attribute = match rng.below(8) {
                    0 => TaskAttribute::Ordered,
                    1 => TaskAttribute::HeadOfQueue,
                    _ => TaskAttribute::Simple,
                };
                recent.push(command.itt);
                let immediate = vec![1; rng.below(u64::from(len.min(8192))) as usize];
                client.encode(Request::ScsiCommand(command), false, &immediate)
            }
            6..9 => {
                let (itt, ttt, offset, len) = match r2ts.pop() {
                    Some(r2t) => r2t,
                    None => (recent.last().copied().unwrap_or(0), RESERVED_TAG, rng.below(9000) as u32, 4096),
                };
                let wrong = u32::from(rng.below(10) == 0);
                let pdu = DataOut {
                    is_final: rng.below(8) > 0,
                    lun: 0,
                    itt,
                    ttt,
                    exp_stat_sn: 0,
                    data_sn: wrong,
                    offset: offset + wrong,
                };
                client.encode(Request::DataOut(pdu), false, &vec![2; len.min(32_768) as usize])
            }
            9 => {
                let function = TaskFunction::from_code(1 + rng.below(6) as u8);
                let task = recent.last().copied().unwrap_or(0);
                client.management(function, lun, task, cmd_sn.wrapping_sub(1));
                Vec::new()
            }
            10 => {
                let mut bytes = vec![0; 48];
                bytes.iter_mut().for_each(|byte| *byte = rng.below(256) as u8);
                // The segment is short enough to be in a single PDU.
                (bytes[0], bytes[4], bytes[5], bytes[6]) = (bytes[0] & 0x4F, 0, 0, 0);
                let len = usize::from(bytes[7]).next_multiple_of(4);
                bytes.resize(48 + len, 3);
                bytes
            }
            _ => {
                reactor.disks[rng.below(2) as usize].hold(rng.below(2) == 0);
                Vec::new()
            }
        };
        if client.cmd_sn != cmd_sn && cmd_sn == next {
            next = client.cmd_sn;
        }
        // Send the bytes in two parts, so that PDUs also arrive in chunks.
        let cut = rng.below(bytes.len() as u64 + 1) as usize;
        if client
            .stream
            .write_all(&bytes[..cut])
            .and_then(|()| client.stream.write_all(&bytes[cut..]))
            .is_err()
        {
            break;
        }
        drain(client, &mut r2ts, &mut raw[which]);
        if rng.below(60) == 0 {
            break;
        }
    }
    drop(clients);
    reactor.release(0);
    reactor.release(1);
    let why = session.gone();
    assert!(
        matches!(
            why,
            EndReason::ConnectionLost | EndReason::Protocol | EndReason::Logout | EndReason::ColdReset
        ),
        "{why:?}"
    );
    while witness_has_attention(&neighbour) {
        let ended = witness.read(0, &[0; 16], 0);
        assert!(ended.status == 0 || ended.sense.0 == 6);
        witness.read(1, &[0; 16], 0);
    }
    assert_eq!(witness.read(0, &read10(0, 8), 4096).status, 0, "a neighbour is not disturbed");
    reactor.holds_no_memory();
    let left = reactor.with(|front, _| front.tasks.iter().count());
    assert_eq!(left, 0, "tasks are left");
}

fn witness_has_attention(session: &Session) -> bool {
    session.nexuses.iter().any(|nexus| nexus.has_attention())
}

#[test]
fn random_pdus_and_lost_connections_leave_nothing_behind() {
    // Set BLOCKYARD_SEEDS=1000 for a longer run.
    let seeds = std::env::var("BLOCKYARD_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(12);
    for seed in 0..seeds {
        let outcome = std::panic::catch_unwind(|| round(seed));
        if let Err(panic) = outcome {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
