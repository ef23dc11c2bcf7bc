use proptest::prelude::*;

use super::super::pdu::{DataOut, RESERVED_TAG};
use super::*;

fn rules() -> WriteRules {
    WriteRules {
        initial_r2t: false,
        immediate_data: true,
        first_burst_length: 4096,
        max_burst_length: 8192,
        max_outstanding_r2t: 2,
    }
}

fn data_out(ttt: u32, data_sn: u32, offset: u32, is_final: bool) -> DataOut {
    DataOut { is_final, lun: 0, itt: 1, ttt, exp_stat_sn: 0, data_sn, offset }
}

/// Begins a write of `expected` bytes, all of which are wanted.
fn begin(expected: u32, immediate: u32, is_final: bool) -> WritePlan {
    WritePlan::begin(&rules(), expected, expected, immediate, is_final).expect("allowed").0
}

fn kept(offset: u32, keep: u32) -> Result<Placement, TransferError> {
    Ok(Placement { offset, keep, discard: 0 })
}

#[test]
fn immediate_data_may_be_all_of_it() {
    let (mut plan, placement) = WritePlan::begin(&rules(), 512, 512, 512, true).expect("allowed");
    assert_eq!(Ok(placement), kept(0, 512));
    assert!(plan.is_complete());
    assert_eq!(plan.next_r2t(1), None);
}

#[test]
fn write_without_data_is_complete_at_once() {
    assert!(begin(0, 0, true).is_complete());
}

#[test]
fn r2ts_ask_for_bursts_in_order_within_the_outstanding_limit() {
    let mut plan = begin(20_000, 1000, true);
    let order = |r2t_sn, offset, len| Some(R2tOrder { r2t_sn, offset, len });
    assert_eq!(plan.next_r2t(10), order(0, 1000, 8192));
    assert_eq!(plan.next_r2t(11), order(1, 9192, 8192));
    assert_eq!(plan.next_r2t(12), None, "MaxOutstandingR2T");
    assert_eq!(plan.data_out(&data_out(10, 0, 1000, false), 8000), kept(1000, 8000));
    assert_eq!(plan.data_out(&data_out(10, 1, 9000, true), 192), kept(9000, 192));
    assert_eq!(plan.next_r2t(12), order(2, 17_384, 2616));
    assert_eq!(plan.data_out(&data_out(11, 0, 9192, true), 8192), kept(9192, 8192));
    assert!(!plan.is_complete());
    assert_eq!(plan.data_out(&data_out(12, 0, 17_384, true), 2616), kept(17_384, 2616));
    assert!(plan.is_complete());
    assert_eq!((plan.received(), plan.r2t_sn()), (20_000, 3));
}

#[test]
fn unsolicited_data_ends_with_its_final_bit_and_r2ts_ask_for_the_rest() {
    let mut plan = begin(10_000, 512, false);
    assert_eq!(plan.next_r2t(1), None, "unsolicited data comes first");
    assert_eq!(plan.data_out(&data_out(RESERVED_TAG, 0, 512, false), 1000), kept(512, 1000));
    assert_eq!(plan.data_out(&data_out(RESERVED_TAG, 1, 1512, true), 500), kept(1512, 500));
    assert_eq!(plan.next_r2t(1), Some(R2tOrder { r2t_sn: 0, offset: 2012, len: 7988 }));
    let late = plan.data_out(&data_out(RESERVED_TAG, 2, 2012, true), 1);
    assert_eq!(late, Err(TransferError::UnsolicitedNotAllowed));
}

#[test]
fn negotiated_rules_forbid_immediate_and_unsolicited_data() {
    let no_immediate = WriteRules { immediate_data: false, ..rules() };
    let r2t_first = WriteRules { initial_r2t: true, ..rules() };
    let first = |rules: &WriteRules, immediate, is_final| {
        WritePlan::begin(rules, 9000, 9000, immediate, is_final).map(|(plan, _)| plan.received())
    };
    assert_eq!(first(&no_immediate, 1, true), Err(TransferError::ImmediateNotAllowed));
    assert_eq!(first(&no_immediate, 0, false), Ok(0));
    assert_eq!(first(&r2t_first, 0, false), Err(TransferError::UnsolicitedNotAllowed));
    assert_eq!(first(&r2t_first, 4096, true), Ok(4096));
    assert_eq!(first(&rules(), 4097, true), Err(TransferError::TooMuch), "FirstBurstLength");
}

#[test]
fn data_beyond_the_expected_length_or_the_first_burst_is_refused() {
    assert_eq!(WritePlan::begin(&rules(), 100, 100, 101, true).err(), Some(TransferError::TooMuch));
    let mut plan = begin(9000, 4000, false);
    let error = plan.data_out(&data_out(RESERVED_TAG, 0, 4000, true), 97);
    assert_eq!(error, Err(TransferError::TooMuch));
    assert!(plan.data_out(&data_out(RESERVED_TAG, 0, 4000, true), 96).is_ok());
}

/// As in libiscsi's iSCSIdatasn.Invalid: DataSN is repeated, ahead, behind, or exchanged.
#[test]
fn wrong_data_sn_is_refused() {
    for wrong in [[0, 0], [27, 0], [u32::MAX, 0], [1, 0]] {
        let mut plan = begin(1024, 0, true);
        plan.next_r2t(5).expect("an R2T");
        let results = [(0, false), (512, true)].iter().zip(wrong).map(|((offset, is_final), data_sn)| {
            plan.data_out(&data_out(5, data_sn, *offset, *is_final), 512)
        });
        let errors: Vec<_> = results.filter_map(Result::err).collect();
        assert_eq!(errors.first(), Some(&TransferError::DataSn), "{wrong:?}");
        assert!(!plan.is_complete());
    }
}

#[test]
fn wrong_tags_offsets_and_lengths_are_refused_and_change_nothing() {
    let mut plan = begin(16_384, 0, true);
    plan.next_r2t(5).expect("an R2T");
    plan.next_r2t(6).expect("an R2T");
    let before = plan;
    for (pdu, len, error) in [
        (data_out(7, 0, 0, true), 8192, TransferError::UnknownTag),
        (data_out(6, 0, 8192, true), 8192, TransferError::UnknownTag),
        (data_out(5, 0, 512, false), 512, TransferError::Offset),
        (data_out(5, 0, 0, true), 512, TransferError::TooShort),
        (data_out(5, 0, 0, true), 8193, TransferError::TooMuch),
        (data_out(5, 0, 0, true), u32::MAX, TransferError::TooMuch),
        (data_out(5, 1, 0, true), 8192, TransferError::DataSn),
    ] {
        assert_eq!(plan.data_out(&pdu, len), Err(error));
        assert_eq!(plan, before);
    }
}

#[test]
fn bytes_beyond_what_the_command_takes_are_not_asked_for_or_discarded() {
    // The initiator expects to transfer 8192 bytes, but the command takes only 512.
    let (mut plan, placement) = WritePlan::begin(&rules(), 8192, 512, 1024, true).expect("allowed");
    assert_eq!(placement, Placement { offset: 0, keep: 512, discard: 512 });
    assert_eq!((plan.next_r2t(1), plan.is_complete(), plan.received()), (None, true, 512));

    // A command that fails at once waits only for its unsolicited data.
    let (mut plan, _) = WritePlan::begin(&rules(), 8192, 8192, 0, false).expect("allowed");
    plan.want(0);
    assert!(!plan.is_complete());
    let placement = plan.data_out(&data_out(RESERVED_TAG, 0, 0, true), 4096);
    assert_eq!(placement, Ok(Placement { offset: 0, keep: 0, discard: 4096 }));
    assert!(plan.is_complete());
}

#[test]
fn command_that_takes_more_than_expected_gets_what_was_expected() {
    let (mut plan, _) = WritePlan::begin(&rules(), 512, 1 << 20, 0, true).expect("allowed");
    assert_eq!(plan.next_r2t(1), Some(R2tOrder { r2t_sn: 0, offset: 0, len: 512 }));
}

#[test]
fn last_data_without_final_bit_is_ended_by_an_empty_pdu() {
    let mut plan = begin(512, 0, true);
    plan.next_r2t(1).expect("an R2T");
    assert_eq!(plan.data_out(&data_out(1, 0, 0, false), 512), kept(0, 512));
    assert!(!plan.is_complete());
    assert_eq!(plan.data_out(&data_out(1, 1, 512, true), 0), kept(512, 0));
    assert!(plan.is_complete());
}

proptest! {
    /// With a well-behaved initiator every byte arrives once, in order, whatever is negotiated.
    #[test]
    fn every_byte_of_a_write_arrives_once(
        len in 0u32..60_000,
        (initial_r2t, immediate_data) in any::<(bool, bool)>(),
        first in 512u32..9000,
        burst in 512u32..20_000,
        max_outstanding_r2t in 1u16..8,
        segment in 512u32..9000,
    ) {
        let rules = WriteRules {
            initial_r2t, immediate_data, first_burst_length: first, max_burst_length: burst, max_outstanding_r2t,
        };
        let first = first.min(len);
        let immediate = if immediate_data { first.min(segment) } else { 0 };
        let unsolicited = !initial_r2t && immediate < first;
        let (mut plan, placement) = WritePlan::begin(&rules, len, len, immediate, !unsolicited).expect("allowed");
        prop_assert_eq!((placement.offset, placement.keep), (0, immediate));
        let mut at = immediate;
        let mut queue = std::collections::VecDeque::new();
        if unsolicited {
            queue.push_back((RESERVED_TAG, first));
        }
        let (mut tag, mut r2ts) = (100, 0);
        loop {
            while let Some(order) = plan.next_r2t(tag) {
                prop_assert_eq!(order.r2t_sn, r2ts);
                prop_assert!(order.len > 0 && order.len <= burst);
                queue.push_back((tag, order.offset + order.len));
                prop_assert!(queue.len() <= usize::from(max_outstanding_r2t).min(MAX_R2TS));
                (tag, r2ts) = (tag + 1, r2ts + 1);
            }
            let Some((ttt, end)) = queue.pop_front() else { break };
            let mut data_sn = 0;
            while at < end {
                let part = (end - at).min(segment);
                let pdu = data_out(ttt, data_sn, at, at + part == end);
                prop_assert_eq!(plan.data_out(&pdu, part), kept(at, part));
                (at, data_sn) = (at + part, data_sn + 1);
            }
        }
        prop_assert!(plan.is_complete());
        prop_assert_eq!((at, plan.received(), plan.r2t_sn()), (len, len, r2ts));
    }

    #[test]
    fn arbitrary_data_out_pdus_never_panic_and_never_exceed_the_expected_length(
        expected: u32,
        wanted: u32,
        is_final: bool,
        pdus: Vec<(u8, u8, u32, bool, u32)>,
    ) {
        let Ok((mut plan, _)) = WritePlan::begin(&rules(), expected, wanted, 0, is_final) else { return Ok(()) };
        for (ttt, data_sn, offset, is_final, len) in pdus {
            plan.next_r2t(u32::from(ttt));
            let ttt = if ttt > 128 { RESERVED_TAG } else { ttt.into() };
            if let Ok(placement) = plan.data_out(&data_out(ttt, data_sn.into(), offset, is_final), len) {
                prop_assert!(placement.offset + placement.keep <= expected.min(wanted).max(placement.offset));
                prop_assert_eq!(placement.keep + placement.discard, len);
            }
        }
    }
}
