//! Text requests in the full-feature phase (RFC 7143, sections 6.4 and 11.10): SendTargets, and new values of
//! MaxRecvDataSegmentLength.
//!
//! A connection has one exchange at a time. Its text may span requests (C bit), and so may the answer: each
//! part but the last carries a target transfer tag, and the initiator asks for the next part with an empty request.
//!
//! *Invariants:* a text in progress has at most [`super::text::MAX_TEXT`] bytes, the answer that waits to be fetched
//! at most [`MAX_ANSWER`]. A new exchange drops the earlier one.

use super::keys::{Key, find};
use super::pdu::{RESERVED_TAG, RejectReason, Text};
use super::text::{self, Collector, NOT_UNDERSTOOD, REJECT, put};

/// Longest answer to a text request, in bytes: about 10000 targets.
pub const MAX_ANSWER: usize = 1 << 20;

/// Longest part of an answer, in bytes, however long data segments may be.
pub const MAX_PART: u32 = 64 << 10;

/// Answers SendTargets: takes the value of the key, and returns the text of the records that the initiator may see
/// (see [`super::discovery`]), or `None` if the value is not valid.
pub type AnswerSendTargets<'a> = &'a dyn Fn(&[u8]) -> Option<Vec<u8>>;

/// A text response: the fields that the exchange decides. The LUN is 0, and the initiator task tag is the
/// request's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// F bit.
    pub is_final: bool,
    /// C bit.
    pub continues: bool,
    /// Target transfer tag.
    pub ttt: u32,
    /// Text: at most the initiator's MaxRecvDataSegmentLength, and [`MAX_PART`].
    pub text: Vec<u8>,
}

/// The text exchange of a connection.
#[derive(Clone, Debug)]
pub struct Exchange {
    incoming: Collector,
    /// The answer; `answer[sent..]` has not been fetched yet.
    answer: Vec<u8>,
    sent: usize,
    /// Target transfer tag of the exchange in progress.
    tag: Option<u32>,
    next_tag: u32,
    send_segment_limit: u32,
}

impl Exchange {
    /// Creates the state of a new connection. `send_segment_limit` is the longest data segment to send in
    /// bytes, even if the initiator accepts longer ones.
    pub fn new(send_segment_limit: u32) -> Exchange {
        Exchange {
            incoming: Collector::default(),
            answer: Vec::new(),
            sent: 0,
            tag: None,
            next_tag: 1,
            send_segment_limit,
        }
    }

    /// Returns whether no exchange is in progress.
    pub fn is_idle(&self) -> bool {
        self.tag.is_none()
    }

    /// Drops the exchange in progress.
    pub fn reset(&mut self) {
        self.incoming.clear();
        self.answer = Vec::new();
        self.sent = 0;
        self.tag = None;
    }

    /// Answers a text request whose data segment is `data`. `max_send_segment` bounds the answer; a new
    /// MaxRecvDataSegmentLength of the initiator changes it.
    ///
    /// # Errors
    /// Returns the reason for a Reject PDU, and drops the exchange. A request whose keys are all unknown,
    /// or whose SendTargets value is invalid, is rejected as well: so does LIO, and libiscsi takes a Reject
    /// for a failed request rather than a failed connection.
    pub fn request(
        &mut self,
        request: &Text,
        data: &[u8],
        max_send_segment: &mut u32,
        send_targets: AnswerSendTargets<'_>,
    ) -> Result<Reply, RejectReason> {
        let reply = self.reply(request, data, max_send_segment, send_targets);
        if reply.is_err() {
            self.reset();
        }
        reply
    }

    fn reply(
        &mut self,
        request: &Text,
        data: &[u8],
        max_send_segment: &mut u32,
        send_targets: AnswerSendTargets<'_>,
    ) -> Result<Reply, RejectReason> {
        if request.is_final && request.continues {
            return Err(RejectReason::ProtocolError);
        }
        if request.ttt == RESERVED_TAG {
            // A new exchange drops the previous one (section 6.4).
            self.reset();
        } else if self.tag != Some(request.ttt) {
            // All requests of an exchange carry one initiator task tag (section 11.10.3). As a connection
            // has only one exchange, a changed tag is tolerated.
            return Err(RejectReason::InvalidPduField);
        }
        let fetches = self.sent < self.answer.len();
        if fetches && !data.is_empty() {
            return Err(RejectReason::ProtocolError);
        }
        self.incoming.push(data).map_err(|_| RejectReason::ProtocolError)?;
        if request.continues {
            let ttt = self.keep();
            return Ok(Reply { is_final: false, continues: false, ttt, text: Vec::new() });
        }
        if !fetches {
            let text = self.incoming.take();
            self.sent = 0;
            self.answer = Vec::new();
            let pairs = text::pairs(&text).map_err(|_| RejectReason::ProtocolError)?;
            self.answer = self.answer_pairs(&pairs, max_send_segment, send_targets)?;
        }
        Ok(self.part(request, *max_send_segment))
    }

    /// Keeps the exchange open, and returns its target transfer tag.
    fn keep(&mut self) -> u32 {
        let next = self.next_tag;
        *self.tag.get_or_insert_with(|| {
            self.next_tag = if next + 1 == RESERVED_TAG { 1 } else { next + 1 };
            next
        })
    }

    /// Takes the next part of the answer.
    fn part(&mut self, request: &Text, max: u32) -> Reply {
        let rest = self.answer.get(self.sent..).unwrap_or_default();
        let max = max.min(MAX_PART) as usize;
        let (part, after) = rest.split_at_checked(max).unwrap_or((rest, &[]));
        let (text, continues) = (part.to_vec(), !after.is_empty());
        self.sent += text.len();
        // The exchange continues if more of the answer follows, or if the initiator has more to negotiate.
        if continues || !request.is_final {
            let ttt = self.keep();
            return Reply { is_final: false, continues, ttt, text };
        }
        self.reset();
        Reply { is_final: true, continues: false, ttt: RESERVED_TAG, text }
    }

    fn answer_pairs(
        &self,
        pairs: &[(&str, &str)],
        max_send_segment: &mut u32,
        send_targets: AnswerSendTargets<'_>,
    ) -> Result<Vec<u8>, RejectReason> {
        let mut out = Vec::new();
        let mut understood = pairs.is_empty();
        for (key, value) in pairs {
            match (*key, find(key)) {
                ("SendTargets", _) => {
                    out.extend(send_targets(value.as_bytes()).ok_or(RejectReason::ProtocolError)?);
                    understood = true;
                }
                (_, Some(rule)) if rule.key == Key::MaxRecvDataSegmentLength => {
                    let declared = rule.number(value).ok_or(RejectReason::ProtocolError)?;
                    *max_send_segment = declared.min(self.send_segment_limit);
                    understood = true;
                }
                // The initiator may declare its alias again; nothing depends on it.
                ("InitiatorAlias", _) => understood = true,
                // All other keys are negotiated during the login only.
                (_, Some(_)) | ("AuthMethod" | "SessionType" | "InitiatorName" | "TargetName", _) => {
                    put(&mut out, key, REJECT);
                    understood = true;
                }
                _ => {
                    put(&mut out, key, NOT_UNDERSTOOD);
                    understood |= ["X-", "X#", "Y-", "Z-"].iter().any(|prefix| key.starts_with(prefix));
                }
            }
        }
        match understood {
            true if out.len() <= MAX_ANSWER => Ok(out),
            true => Err(RejectReason::LongOperationReject),
            false => Err(RejectReason::ProtocolError),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::discovery::{Record, SendTargets, put_record};
    use super::super::login::SessionType;
    use super::*;

    const TARGET: &str = "iqn.2026-11.io.blockyard:disk";

    fn text(is_final: bool, continues: bool, ttt: u32) -> Text {
        Text { is_final, continues, lun: 0, itt: 9, ttt, cmd_sn: 0, exp_stat_sn: 0 }
    }

    /// Answers SendTargets for a portal with 100 targets, in a discovery session.
    fn targets(value: &[u8]) -> Option<Vec<u8>> {
        answer(value, &SessionType::Discovery)
    }

    /// Answers SendTargets for that portal in a session with target 7.
    fn own(value: &[u8]) -> Option<Vec<u8>> {
        answer(value, &SessionType::Normal { target: format!("{TARGET}7") })
    }

    fn answer(value: &[u8], session: &SessionType) -> Option<Vec<u8>> {
        let wanted = SendTargets::parse(std::str::from_utf8(value).ok()?, session)?;
        let mut out = Vec::new();
        records(&wanted).iter().for_each(|record| put_record(&mut out, record));
        Some(out)
    }

    fn records(wanted: &SendTargets) -> Vec<Record> {
        let all = (0..100).map(|index| Record {
            target: format!("{TARGET}{index}"),
            portals: vec![("192.0.2.1:3260".parse().expect("an address"), 1)],
        });
        match wanted {
            SendTargets::All => all.collect(),
            SendTargets::One(name) => all.filter(|record| record.target == *name).collect(),
        }
    }

    /// Sends one final request on a fresh connection of a normal session.
    fn ask(data: &str) -> Result<String, RejectReason> {
        let request = text(true, false, RESERVED_TAG);
        let reply = Exchange::new(1 << 16).request(&request, data.as_bytes(), &mut (1 << 16), &own)?;
        assert!(reply.is_final && !reply.continues && reply.ttt == RESERVED_TAG);
        Ok(String::from_utf8(reply.text).expect("text").replace('\0', " "))
    }

    #[test]
    fn send_targets_in_a_normal_session_returns_its_target_or_a_named_one() {
        let one = |index| format!("TargetName={TARGET}{index} TargetAddress=192.0.2.1:3260,1 ");
        assert_eq!(ask("SendTargets=\0"), Ok(one(7)));
        assert_eq!(ask(&format!("SendTargets={TARGET}8\0")), Ok(one(8)));
        assert_eq!(ask("SendTargets=iqn.2001-04.com.example:none\0"), Ok(String::new()));
        assert_eq!(ask("SendTargets=All\0"), Ok(one(7)));
    }

    /// libiscsi's iSCSISendTargets.Invalid: each of these must fail, and the session must survive.
    #[test]
    fn invalid_send_targets_requests_are_rejected() {
        for bad in
            ["SendTargetsPlease=All\0", "SendTargets=Alle\0", "SendTargets=A\0", "sENDtARGETS=aLL\0", "x"]
        {
            assert_eq!(ask(bad), Err(RejectReason::ProtocolError), "{bad}");
        }
    }

    #[test]
    fn private_keys_are_not_understood_and_login_keys_rejected() {
        assert_eq!(ask("X-com.example=1\0").as_deref(), Ok("X-com.example=NotUnderstood "));
        assert_eq!(
            ask("MaxBurstLength=512\0AuthMethod=None\0").as_deref(),
            Ok("MaxBurstLength=Reject AuthMethod=Reject ")
        );
        assert_eq!(ask("Unknown=1\0InitiatorAlias=a\0").as_deref(), Ok("Unknown=NotUnderstood "));
    }

    #[test]
    fn segment_length_changes_at_once() {
        let (mut max, mut exchange) = (8192, Exchange::new(100_000));
        let mut declare = |value: &str| {
            let data = format!("MaxRecvDataSegmentLength={value}\0");
            let request = text(true, false, RESERVED_TAG);
            let reply = exchange.request(&request, data.as_bytes(), &mut max, &targets);
            (reply.map(|reply| reply.text), max)
        };
        assert_eq!(declare("4096"), (Ok(Vec::new()), 4096));
        assert_eq!(declare("1000000"), (Ok(Vec::new()), 100_000));
        assert_eq!(declare("1"), (Err(RejectReason::ProtocolError), 100_000));
    }

    #[test]
    fn text_and_answer_may_span_pdus() {
        let (mut max, mut exchange) = (512, Exchange::new(512));
        let mut send = |request: Text, data: &[u8]| exchange.request(&request, data, &mut max, &targets);
        let reply = send(text(false, true, RESERVED_TAG), b"SendTar").expect("the first part");
        assert!(!reply.is_final && !reply.continues && reply.text.is_empty() && reply.ttt != RESERVED_TAG);
        let mut reply = send(text(true, false, reply.ttt), b"gets=All\0").expect("the second part");
        let mut answer = Vec::new();
        while reply.continues {
            assert!(!reply.is_final && reply.text.len() == 512);
            answer.extend_from_slice(&reply.text);
            reply = send(text(true, false, reply.ttt), b"").expect("a further part");
        }
        assert!(reply.is_final && reply.ttt == RESERVED_TAG);
        answer.extend_from_slice(&reply.text);
        assert_eq!(Some(answer), targets(b"All"));
    }

    #[test]
    fn unknown_tags_and_contradictory_bits_are_rejected() {
        let (mut max, mut exchange) = (512, Exchange::new(512));
        let mut send = |request: Text, data: &[u8]| exchange.request(&request, data, &mut max, &targets);
        assert_eq!(send(text(true, false, 77), b""), Err(RejectReason::InvalidPduField));
        assert_eq!(send(text(true, true, RESERVED_TAG), b""), Err(RejectReason::ProtocolError));
        let reply = send(text(true, false, RESERVED_TAG), b"SendTargets=All\0").expect("the first part");
        assert_eq!(send(text(true, false, reply.ttt), b"x=y\0"), Err(RejectReason::ProtocolError));
        assert_eq!(
            send(text(true, false, reply.ttt), b""),
            Err(RejectReason::InvalidPduField),
            "it was dropped"
        );
        assert_eq!(send(text(false, true, RESERVED_TAG), &[b'x'; 20_000]), Err(RejectReason::ProtocolError));
    }

    #[test]
    fn exchange_continues_while_the_initiator_has_more() {
        let (mut max, mut exchange) = (512, Exchange::new(512));
        let mut send = |request: Text, data: &[u8]| exchange.request(&request, data, &mut max, &targets);
        let reply = send(text(false, false, RESERVED_TAG), b"X-a=1\0").expect("an answer");
        assert!(!reply.is_final && reply.ttt != RESERVED_TAG);
        let reply = send(text(true, false, reply.ttt), b"X-b=1\0").expect("an answer");
        assert_eq!((reply.is_final, reply.text.as_slice()), (true, &b"X-b=NotUnderstood\0"[..]));
        assert!(exchange.is_idle());
    }

    proptest! {
        #[test]
        fn arbitrary_requests_never_panic(requests: Vec<(bool, bool, u8, Vec<u8>)>) {
            let (mut max, mut exchange) = (512, Exchange::new(512));
            for (is_final, continues, ttt, data) in requests {
                let ttt = if ttt > 3 { RESERVED_TAG } else { ttt.into() };
                let request = text(is_final, continues, ttt);
                if let Ok(reply) = exchange.request(&request, &data, &mut max, &targets) {
                    prop_assert!(reply.text.len() <= 512);
                    prop_assert_eq!(reply.ttt == RESERVED_TAG, reply.is_final);
                }
            }
        }
    }
}
