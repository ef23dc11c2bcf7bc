//! The single coarse timer of a reactor's iSCSI sessions, for stalled connections, pings, and requested
//! logouts. It runs only while one of these has to be watched.

use super::session::Life;
use super::setup::{EndReason, Pings};
use super::{Front, Turn};
use crate::budget::GRACE;
use queue::Nanos;
use std::time::Duration;

/// Interval of the checks while logouts are pending, and until the first check of a session.
pub(super) const PING_CHECK: Duration = Duration::from_secs(1);
/// Longest interval of the checks while there are sessions with pings, and so the longest delay of a ping.
/// Each check wakes an idle process.
const PING_CHECK_MAX: Duration = Duration::from_secs(5);

/// A session that [`Front::tick`] ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Dropped {
    /// The name of its target.
    pub target: String,
    /// The reason: [`EndReason::Silent`] or [`EndReason::Evicted`].
    pub why: EndReason,
    /// Bytes that the connection held.
    pub held: u64,
    /// Time for which the connection made no progress.
    pub still: Duration,
}

impl Front {
    /// Handles the alarm: pings silent initiators, and ends sessions whose initiators do not answer, stall
    /// within a PDU, or hold memory that others wait for.
    pub fn tick(&mut self, now: Nanos, turn: &mut Turn<'_>) -> Vec<Dropped> {
        let passed = self.budget.passed(now);
        let (wanted, stall) = (self.budget.wanted(), self.budget.limits.stall);
        let (mut lost, mut owed, mut holders, mut pings) = (Vec::new(), false, Vec::new(), Vec::new());
        let mut next_ping = PING_CHECK_MAX;
        let mut owing = vec![false; self.connections.len()];
        for (_, task) in self.tasks.iter().filter(|(_, task)| task.open > 0) {
            owing.get_mut(task.connection as usize).into_iter().for_each(|owes| *owes = true);
        }
        for index in 0..self.connections.len() as u32 {
            let Some(connection) = self.connection(index).filter(|c| !c.closed) else { continue };
            let schedule = self.session(connection.session).and_then(|session| session.pings);
            let owes_data = owing.get(index as usize).copied().unwrap_or(false);
            let Some(connection) = self.connection_mut(index) else { continue };
            let owes_input =
                connection.is_inside_pdu() || owes_data && !connection.paused && !connection.ending;
            let owes = owes_input || connection.outbox.is_sending();
            let moved = std::mem::take(&mut connection.moved) || !owes;
            connection.still = if moved { Duration::ZERO } else { connection.still + passed };
            let heard = std::mem::take(&mut connection.heard);
            connection.silent = if heard { Duration::ZERO } else { connection.silent + passed };
            let (still, held) = (connection.still, connection.held);
            connection.slow |= owes_input && !still.is_zero();
            owed |= owes_input;
            if heard {
                connection.pinged = false;
            }
            if let Some(Pings { after, timeout }) = schedule.filter(|_| !connection.ending) {
                if connection.pinged && connection.silent >= after + timeout {
                    lost.push((index, EndReason::Silent, held, connection.silent));
                    continue;
                }
                let is_due = !connection.pinged && connection.silent >= after;
                if is_due {
                    pings.push(index);
                }
                let timeout = if is_due || connection.pinged { timeout } else { Duration::ZERO };
                next_ping = next_ping.min((after + timeout).saturating_sub(connection.silent));
            }
            if owes_input && stall.is_some_and(|stall| still >= stall) {
                lost.push((index, EndReason::Silent, held, still));
            } else if wanted.is_some() && held > 0 && still >= GRACE {
                holders.push((index, EndReason::Evicted, held, still));
            }
        }
        // Connections without progress for the longest time are closed first.
        holders.sort_by_key(|(_, _, _, still)| std::cmp::Reverse(*still));
        let mut wanted = wanted.unwrap_or(0);
        for holder in holders {
            if wanted == 0 {
                break;
            }
            wanted = wanted.saturating_sub(holder.2);
            lost.push(holder);
        }
        let mut dropped = Vec::new();
        for (index, why, held, still) in lost {
            let session = self.connection(index).and_then(|connection| self.session(connection.session));
            if let Some(session) = session.filter(|session| session.is_alive()) {
                dropped.push(Dropped { target: session.target.clone(), why, held, still });
            }
            self.lose(index, why, turn);
        }
        pings.into_iter().for_each(|index| self.ping(index, turn));
        let asked = self.end_asked(passed, turn);
        self.budget.schedule_next_check(owed);
        if asked {
            self.budget.check_within(PING_CHECK);
        } else if self.sessions.iter().flatten().any(|session| session.pings.is_some()) {
            self.budget.check_later(next_ping.max(PING_CHECK));
        }
        dropped
    }

    /// Ends the sessions whose initiators did not log out in time. Returns whether other initiators still
    /// have time.
    fn end_asked(&mut self, passed: Duration, turn: &mut Turn<'_>) -> bool {
        let (mut over, mut asked) = (Vec::new(), false);
        for (index, session) in self.sessions.iter_mut().enumerate() {
            let Some(Life::LogoutRequested(why, left)) = session.as_mut().map(|session| &mut session.life)
            else {
                continue;
            };
            *left = left.saturating_sub(passed);
            if left.is_zero() {
                over.push((index as u32, *why));
            } else {
                asked = true;
            }
        }
        over.into_iter().for_each(|(index, why)| self.finish_session(index, why, None, turn));
        asked
    }
}
