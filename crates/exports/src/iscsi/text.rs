//! Text requests in the full feature phase: SendTargets, and MaxRecvDataSegmentLength of the initiator
//! (RFC 7143, sections 11.10 and 11.11). The rules are those of [`proto::iscsi::exchange`].

use super::{Front, Turn};
use block::Segment;
use proto::iscsi::exchange::Exchange;
use proto::iscsi::pdu::{Bhs, Text, TextResponse};
use queue::Ring;

/// A text exchange of several PDUs.
pub(super) type TextExchange = Exchange;

impl Front {
    /// Handles a text request.
    pub(super) fn text_request(
        &mut self,
        index: u32,
        pdu: &Text,
        data: Option<Segment>,
        turn: &mut Turn<'_>,
    ) {
        let Some(connection) = self.connections.get_mut(index as usize).and_then(Option::as_mut) else {
            return;
        };
        let session = self.sessions.get(connection.session as usize).and_then(Option::as_ref);
        let Some(session) = session else { return };
        let limit = connection.send_limit;
        let mut exchange = connection.text.take().unwrap_or_else(|| Box::new(Exchange::new(limit)));
        let bytes = data.map_or(&[][..], |data| turn.ring.bytes(data));
        let reply = exchange.request(pdu, bytes, &mut connection.send_max, &*session.send_targets);
        if !exchange.is_idle() {
            connection.text = Some(exchange);
        }
        let reply = match reply {
            Ok(reply) => reply,
            Err(reason) => return self.reject_current(index, reason, turn),
        };
        let (itt, lun, len) = (pdu.itt, pdu.lun, reply.text.len() as u32);
        let encode = |numbers, out: &mut Bhs| {
            let (is_final, continues, ttt) = (reply.is_final, reply.continues, reply.ttt);
            TextResponse { is_final, continues, lun, itt, ttt, numbers }.encode(out, len);
        };
        self.send(index, true, encode, &reply.text, turn);
    }
}
