//! PDUs other than SCSI commands and their data: pings, logouts, and everything that is rejected.

use super::connection::Sink;
use super::intake::{Source, Taken};
use super::session::HeldPdu;
use super::setup::EndReason;
use super::task::Fate;
use super::{Front, Turn};
use block::Segment;
use proto::iscsi::pdu::{
    BHS_LEN, Bhs, Header, Logout, LogoutReason, LogoutResponse, LogoutResult, NopIn, NopOut, RESERVED_TAG,
    RejectReason, Request,
};
use proto::iscsi::sequence::Arrival;
use queue::Ring;

/// Maximum total data, in bytes, of pings and text requests that a session sends before their CmdSN is
/// next.
const HELD_DATA_MAX: u64 = 1 << 20;

impl Front {
    /// Processes a PDU. `source` has its complete data; `None` if it has no data, or the data is still to
    /// come.
    #[inline]
    pub(super) fn dispatch(
        &mut self,
        index: u32,
        header: &Header<Request>,
        ahs_len: usize,
        source: Option<Source>,
        turn: &mut Turn<'_>,
    ) -> Taken {
        match &header.pdu {
            Request::ScsiCommand(command) => self.command(index, header, command, ahs_len, source, turn),
            Request::DataOut(pdu) => self.data_out(index, pdu, header.data_len, source, turn),
            pdu => {
                if header.data_len > 0 && source.is_none() {
                    return Taken::Into(match pdu {
                        Request::NopOut(_) | Request::Text(_) => self.own_sink(index, header.data_len, turn),
                        _ => Sink::Discard,
                    });
                }
                self.other(index, pdu, header.immediate, source, turn);
                Taken::Done
            }
        }
    }

    /// Continues after the data segment of a PDU that does not use it has been skipped.
    pub(super) fn skipped_data_complete(
        &mut self,
        index: u32,
        pdu: &Request,
        immediate: bool,
        turn: &mut Turn<'_>,
    ) {
        if !matches!(pdu, Request::ScsiCommand(_) | Request::DataOut(_)) {
            self.other(index, pdu, immediate, None, turn);
        }
    }

    /// Handles a PDU that is neither a command nor data: it is processed when its CmdSN is next.
    fn other(
        &mut self,
        index: u32,
        pdu: &Request,
        immediate: bool,
        source: Option<Source>,
        turn: &mut Turn<'_>,
    ) {
        let Some(session_index) = self.connection(index).map(|connection| connection.session) else { return };
        let Some(session) = self.session_mut(session_index).filter(|session| session.is_alive()) else {
            return;
        };
        // The answer to a ping is not numbered.
        let is_pong = matches!(pdu, Request::NopOut(nop) if nop.itt == RESERVED_TAG);
        let cmd_sn = pdu.cmd_sn().filter(|_| !immediate && !is_pong);
        let Some(cmd_sn) = cmd_sn else {
            let data = source.map(|source| source.data);
            return self.process(index, pdu, true, data, turn);
        };
        match session.window.receive(cmd_sn) {
            Arrival::Ignored => {}
            Arrival::Held => {
                let len = source.map_or(0, |source| u64::from(source.data.len));
                let kept = session.held.iter().filter_map(|(_, held)| match held {
                    HeldPdu::Pdu(_, _, data) => data.map(|data| u64::from(data.len)),
                    HeldPdu::Task(_) => None,
                });
                if kept.sum::<u64>() + len > HELD_DATA_MAX {
                    return self.lose(index, EndReason::Evicted, turn);
                }
                let data = source.and_then(|source| self.keep_data(index, source, turn));
                if let Some(session) = self.session_mut(session_index) {
                    session.held.push((cmd_sn, HeldPdu::Pdu(index, *pdu, data)));
                }
            }
            Arrival::InOrder => {
                self.process(index, pdu, false, source.map(|source| source.data), turn);
                self.release_held(session_index, turn);
            }
        }
    }

    /// Processes a held PDU whose CmdSN is next.
    pub(super) fn held_pdu(
        &mut self,
        _session: u32,
        index: u32,
        pdu: &Request,
        data: Option<Segment>,
        turn: &mut Turn<'_>,
    ) {
        self.process(index, pdu, false, data, turn);
        data.into_iter().for_each(|data| self.release(index, data, turn.ring));
    }

    fn process(
        &mut self,
        index: u32,
        pdu: &Request,
        immediate: bool,
        data: Option<Segment>,
        turn: &mut Turn<'_>,
    ) {
        let session = self.connection(index).map(|connection| connection.session);
        // Only task management takes longer than its PDU.
        if !immediate && let Some(session) = session.and_then(|session| self.session_mut(session)) {
            session.open_window();
        }
        match pdu {
            Request::NopOut(pdu) => self.nop_out(index, pdu, data, turn),
            Request::Text(pdu) => self.text_request(index, pdu, data, turn),
            Request::Logout(pdu) => self.logout(index, pdu, turn),
            Request::TaskManagement(pdu) => self.task_management(index, pdu, immediate, turn),
            // At ErrorRecoveryLevel 0 nothing is retransmitted (section 11.16).
            Request::Snack(_) => self.reject_current(index, RejectReason::SnackReject, turn),
            Request::Login(_) => {
                self.reject_current(index, RejectReason::ProtocolError, turn);
                self.lose_after_sending(index, EndReason::Protocol, turn);
            }
            Request::ScsiCommand(_) | Request::DataOut(_) => {}
        }
    }

    /// Rejects the PDU whose header arrived last.
    pub(super) fn reject_current(&mut self, index: u32, reason: RejectReason, turn: &mut Turn<'_>) {
        let bhs = self.connection(index).map_or([0; BHS_LEN], |connection| connection.bhs);
        self.reject(index, &bhs, reason, turn);
    }

    /// Ends the session because its initiator violated the protocol, after the replies of this connection
    /// were sent.
    pub(super) fn lose_after_sending(&mut self, index: u32, why: EndReason, turn: &mut Turn<'_>) {
        if let Some(session) = self.connection(index).map(|connection| connection.session) {
            self.finish_session(session, why, Some(index), turn);
        }
    }

    /// Handles a ping, which is returned with its data, or the answer to our ping (section 11.18).
    fn nop_out(&mut self, index: u32, pdu: &NopOut, data: Option<Segment>, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        if pdu.ttt != RESERVED_TAG {
            connection.pinged = false;
        }
        if pdu.itt == RESERVED_TAG {
            return;
        }
        let most = connection.send_max;
        let data = data.map(|data| turn.ring.bytes(data.slice(0, data.len.min(most))).to_vec());
        let data = data.unwrap_or_default();
        let (itt, len) = (pdu.itt, data.len() as u32);
        let encode = |numbers, out: &mut Bhs| {
            NopIn { lun: 0, itt, ttt: RESERVED_TAG, numbers }.encode(out, len);
        };
        self.send(index, true, encode, &data, turn);
    }

    /// Pings the initiator.
    pub(super) fn ping(&mut self, index: u32, turn: &mut Turn<'_>) {
        let Some(connection) = self.connection_mut(index) else { return };
        connection.pinged = true;
        let encode = |numbers, out: &mut Bhs| {
            // Any tag except the reserved one will do, as a connection has only one ping in flight.
            NopIn { lun: 0, itt: RESERVED_TAG, ttt: index, numbers }.encode(out, 0);
        };
        self.send(index, false, encode, &[], turn);
    }

    /// Handles a logout request (section 11.14).
    fn logout(&mut self, index: u32, pdu: &Logout, turn: &mut Turn<'_>) {
        let Some(session_index) = self.connection(index).map(|connection| connection.session) else { return };
        let Some(session) = self.session(session_index) else { return };
        let by_cid = |cid: u16| {
            let mut own = session.connections.iter().copied();
            own.find(|other| self.connection(*other).is_some_and(|other| other.cid == cid && !other.ending))
        };
        match pdu.reason {
            LogoutReason::CloseSession => {
                self.answer_logout(index, pdu, LogoutResult::Closed, turn);
                self.finish_session(session_index, EndReason::Logout, Some(index), turn);
            }
            LogoutReason::CloseConnection => match by_cid(pdu.cid) {
                Some(other) => {
                    self.end_tasks_of(session_index, other, turn);
                    self.answer_logout(index, pdu, LogoutResult::Closed, turn);
                    self.end_after_sending(other, turn);
                }
                None => self.answer_logout(index, pdu, LogoutResult::NoConnection, turn),
            },
            LogoutReason::RemoveForRecovery => {
                self.answer_logout(index, pdu, LogoutResult::RecoveryNotSupported, turn);
            }
            LogoutReason::Other(_) => self.reject_current(index, RejectReason::InvalidPduField, turn),
        }
    }

    fn answer_logout(&mut self, index: u32, pdu: &Logout, result: LogoutResult, turn: &mut Turn<'_>) {
        let session = self.connection(index).and_then(|connection| self.session(connection.session));
        let time2wait = session.map_or(0, |session| session.time2wait);
        let itt = pdu.itt;
        let encode = |numbers, out: &mut Bhs| {
            LogoutResponse { result, itt, numbers, time2wait, time2retain: 0 }.encode(out);
        };
        self.send(index, true, encode, &[], turn);
    }

    /// Ends the tasks of a connection that is being closed, without a response.
    pub(super) fn end_tasks_of(&mut self, session: u32, connection: u32, turn: &mut Turn<'_>) {
        self.abort_where(|task| task.connection == connection, Fate::Silent, turn);
        self.drop_held(session, |other| other == connection, turn);
    }
}
