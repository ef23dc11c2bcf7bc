//! Tests that check one rule each.

use super::super::parameters::Destination;
use super::*;
use proptest::prelude::*;

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

fn covers(change: &Change, sense: Sense) -> Vec<u8> {
    let of = |(port, attention): &(Registrant, Sense)| {
        (*attention == sense).then(|| port.isid.map(|isid| isid[5]))
    };
    change.attentions.iter().filter_map(of).flatten().collect()
}

#[test]
fn register_needs_the_key_that_the_nexus_has() {
    let (mut unit, a) = (Unit::default(), nexus(1, 1));
    let register = |key, action_key| Out { action_key, ..command(Action::Register, key) };
    assert_eq!(unit.out(&a, &register(7, 8)), Err(Failure::Conflict), "not registered: the key must be zero");
    assert_eq!(unit.out(&a, &register(0, 0)).unwrap().next, Reservations::default(), "no effect");
    unit.out(&a, &register(0, 8)).unwrap();
    assert_eq!(unit.out(&a, &register(0, 9)), Err(Failure::Conflict), "registered: its key is needed");
    unit.out(&a, &register(8, 9)).unwrap();
    assert_eq!(unit.keys(), [9]);
    unit.out(&a, &register(9, 0)).unwrap();
    assert_eq!((unit.keys(), unit.state.generation()), (vec![], 3));
}

#[test]
fn reserve_and_release_do_not_count_in_prgeneration() {
    let (mut unit, a) = (Unit::default(), nexus(1, 1));
    unit.register(&a, 1);
    for kind in Kind::ALL {
        unit.reserve(&a, 1, kind).unwrap();
        unit.out(&a, &Out { kind: kind as u8, ..command(Action::Release, 1) }).unwrap();
        assert_eq!((unit.state.held(), unit.state.generation()), (None, 1));
    }
    unit.out(&a, &command(Action::Clear, 1)).unwrap();
    assert_eq!(unit.state.generation(), 2);
}

#[test]
fn each_type_admits_the_reads_and_writes_of_table_64() {
    use Kind::*;
    // Columns: type; then reads and writes of another registered nexus, and of one without registration.
    let table = [
        (WriteExclusive, [true, false], [true, false]),
        (ExclusiveAccess, [false, false], [false, false]),
        (WriteExclusiveRegistrantsOnly, [true, true], [true, false]),
        (ExclusiveAccessRegistrantsOnly, [true, true], [false, false]),
        (WriteExclusiveAllRegistrants, [true, true], [true, false]),
        (ExclusiveAccessAllRegistrants, [true, true], [false, false]),
    ];
    for (kind, registered, stranger) in table {
        let (mut unit, a, b, c) = (Unit::default(), nexus(1, 1), nexus(2, 1), nexus(3, 1));
        unit.register(&a, 1);
        unit.register(&b, 2);
        unit.reserve(&a, 1, kind).unwrap();
        assert_eq!([unit.reads(&a), unit.writes(&a)], [true, true], "{kind:?}");
        assert_eq!([unit.reads(&b), unit.writes(&b)], registered, "{kind:?}");
        assert_eq!([unit.reads(&c), unit.writes(&c)], stranger, "{kind:?}");
        assert_eq!(unit.state.restriction(&a), Restriction::None);
        assert_eq!(
            unit.state.restriction(&c),
            if stranger[0] { Restriction::Writes } else { Restriction::All }
        );
        assert!(unit.state.check(&c, &[0x12]).is_ok() && unit.state.check(&c, &[0x5F]).is_ok());
    }
}

#[test]
fn the_end_of_the_holders_registration_ends_its_reservation_but_not_one_of_all_registrants() {
    for kind in Kind::ALL {
        let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
        unit.register(&a, 1);
        unit.register(&b, 2);
        unit.reserve(&a, 1, kind).unwrap();
        let change = unit.out(&a, &command(Action::Register, 1)).unwrap();
        assert_eq!(unit.state.held().is_some(), kind.is_all_registrants(), "{kind:?}");
        let is_reported = kind.admits_registered() && !kind.is_all_registrants();
        assert_eq!(covers(&change, RESERVATIONS_RELEASED), if is_reported { vec![2] } else { vec![] });
        unit.out(&b, &command(Action::Register, 2)).unwrap();
        assert_eq!(unit.state.held(), None);
    }
}

#[test]
fn release_needs_the_type_of_the_reservation_and_is_without_effect_for_others() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    unit.register(&a, 1);
    unit.register(&b, 2);
    unit.reserve(&a, 1, Kind::ExclusiveAccessRegistrantsOnly).unwrap();
    let release = |key, kind: Kind| Out { kind: kind as u8, ..command(Action::Release, key) };
    assert_eq!(unit.out(&a, &release(1, Kind::WriteExclusive)), Err(Failure::Check(INVALID_RELEASE)));
    let change = unit.out(&b, &release(2, Kind::ExclusiveAccessRegistrantsOnly)).unwrap();
    assert!(unit.state.held().is_some() && change.attentions.is_empty());
    let change = unit.out(&a, &release(1, Kind::ExclusiveAccessRegistrantsOnly)).unwrap();
    assert_eq!((unit.state.held(), covers(&change, RESERVATIONS_RELEASED)), (None, vec![2]));
}

#[test]
fn preempt_of_the_holder_takes_the_reservation_and_reports_to_both() {
    let (mut unit, a, b, c) = (Unit::default(), nexus(1, 1), nexus(2, 1), nexus(3, 1));
    (1..).zip([&a, &b, &c]).for_each(|(key, nexus)| unit.register(nexus, key));
    unit.reserve(&a, 1, Kind::WriteExclusive).unwrap();
    let kind = Kind::ExclusiveAccessRegistrantsOnly;
    let preempt = Out { action_key: 1, kind: kind as u8, ..command(Action::PreemptAndAbort, 2) };
    let change = unit.out(&b, &preempt).unwrap();
    assert_eq!(unit.state.held().map(|held| held.kind), Some(kind));
    assert_eq!(unit.keys(), [2, 3]);
    assert_eq!(covers(&change, REGISTRATIONS_PREEMPTED), [1]);
    assert_eq!(covers(&change, RESERVATIONS_RELEASED), [3], "the type changed");
    assert_eq!(change.aborts.len(), 1);
    assert!(!unit.reads(&a) && unit.writes(&b) && unit.writes(&c));
}

#[test]
fn preempt_of_another_key_removes_registrations_and_ignores_the_type() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    unit.register(&a, 1);
    unit.register(&b, 2);
    let preempt = |action_key| Out { action_key, kind: 0xF, scope: 3, ..command(Action::Preempt, 2) };
    assert_eq!(unit.out(&b, &preempt(9)), Err(Failure::Conflict), "no such key");
    assert_eq!(unit.out(&b, &preempt(0)), Err(Failure::Check(Sense::parameter_field(8, None))));
    unit.out(&b, &preempt(1)).unwrap();
    assert_eq!((unit.keys(), unit.state.held(), unit.state.generation()), (vec![2], None, 3));
}

#[test]
fn preempt_of_key_zero_takes_a_reservation_of_all_registrants() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    unit.register(&a, 1);
    unit.register(&b, 2);
    unit.reserve(&a, 1, Kind::WriteExclusiveAllRegistrants).unwrap();
    let preempt = Out { kind: Kind::ExclusiveAccess as u8, ..command(Action::Preempt, 2) };
    let change = unit.out(&b, &preempt).unwrap();
    assert_eq!((unit.keys(), covers(&change, REGISTRATIONS_PREEMPTED)), (vec![2], vec![1]));
    assert!(unit.writes(&b) && !unit.reads(&a));
}

#[test]
fn clear_reports_reservations_preempted_to_the_others() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    unit.register(&a, 1);
    unit.register(&b, 2);
    let change = unit.out(&b, &command(Action::Clear, 2)).unwrap();
    assert_eq!((unit.keys(), covers(&change, RESERVATIONS_PREEMPTED)), (vec![], vec![1]));
}

#[test]
fn all_tg_pt_registers_the_initiator_at_every_target_port() {
    let (mut unit, a) = (Unit::default(), nexus(1, 1));
    unit.out(&a, &Out { action_key: 5, all_ports: true, ..command(Action::Register, 0) }).unwrap();
    assert_eq!(unit.keys(), [5, 5]);
    unit.reserve(&nexus(1, 2), 5, Kind::ExclusiveAccess).unwrap();
    assert!(!unit.reads(&a), "the reservation belongs to the nexus of the other port");
    unit.out(&a, &Out { all_ports: true, ..command(Action::Register, 5) }).unwrap();
    assert_eq!((unit.keys(), unit.state.held()), (vec![], None));
}

/// Tests both orders in which the ports can be removed.
#[test]
fn ports_that_are_unregistered_together_are_not_notified_of_the_end_of_their_reservation() {
    for (sender, holder) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let (mut unit, other) = (Unit::default(), nexus(2, 1));
        unit.register(&other, 9);
        let all = |action, key, action_key| Out { action_key, all_ports: true, ..command(action, key) };
        unit.out(&nexus(1, 1), &all(Action::Register, 0, 5)).unwrap();
        unit.reserve(&nexus(1, holder), 5, Kind::WriteExclusiveRegistrantsOnly).unwrap();
        let change = unit.out(&nexus(1, sender), &all(Action::Register, 5, 0)).unwrap();
        assert_eq!(change.attentions.len(), 1);
        assert!(change.attentions[0].0.covers(&other));
    }
}

#[test]
fn spec_i_pt_registers_the_listed_initiators_or_nothing() {
    let (mut unit, a, b, c) = (Unit::default(), nexus(1, 1), nexus(2, 1), nexus(3, 1));
    unit.register(&c, 3);
    let id = |nexus: &NexusName| TransportId { initiator: nexus.initiator.clone(), isid: Some(nexus.isid) };
    let register = |initiators| Out { action_key: 5, initiators, ..command(Action::Register, 0) };
    assert_eq!(unit.out(&a, &register(Some(vec![id(&b), id(&c)]))), Err(Failure::Conflict));
    assert_eq!(unit.keys(), [3]);
    unit.out(&a, &register(Some(vec![id(&b)]))).unwrap();
    assert_eq!(unit.keys(), [3, 5, 5]);
    let again = Out { initiators: Some(vec![]), ..command(Action::Register, 5) };
    assert_eq!(unit.out(&a, &again), Err(Failure::Check(Sense::INVALID_FIELD_IN_CDB)), "a registered nexus");
}

#[test]
fn register_and_move_gives_the_reservation_to_another_nexus() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 2));
    unit.register(&a, 1);
    let to = |nexus: &NexusName, port| Destination {
        port,
        initiator: TransportId { initiator: nexus.initiator.clone(), isid: Some(nexus.isid) },
        unregister: true,
    };
    let moving = |to| Out { action_key: 7, destination: Some(to), ..command(Action::RegisterAndMove, 1) };
    assert_eq!(
        unit.out(&a, &moving(to(&b, 2))),
        Err(Failure::Check(Sense::INVALID_FIELD_IN_CDB)),
        "no reservation"
    );
    unit.reserve(&a, 1, Kind::ExclusiveAccess).unwrap();
    assert_eq!(unit.out(&a, &moving(to(&b, 9))), Err(Failure::Check(Sense::parameter_field(18, None))));
    assert_eq!(unit.out(&a, &moving(to(&a, 1))), Err(Failure::Check(Sense::parameter_field(24, None))));
    unit.out(&a, &moving(to(&b, 2))).unwrap();
    assert_eq!(unit.keys(), [7]);
    assert!(unit.writes(&b) && !unit.reads(&a));
}

#[test]
fn registrations_without_isids_belong_to_all_sessions_of_the_initiator() {
    let policy = Policy { with_isid: false, ..POLICY };
    let (a, second) = (nexus(1, 1), NexusName { isid: [9; 6], ..nexus(1, 1) });
    let register = Out { action_key: 5, ..command(Action::Register, 0) };
    let change = Reservations::default().out(&a, &policy, &register).unwrap();
    let reserve = Out { kind: 3, ..command(Action::Reserve, 5) };
    let state = change.next.out(&second, &policy, &reserve).unwrap().next;
    assert_eq!(state.restriction(&a), Restriction::None);
    assert_eq!(state.restriction(&nexus(2, 1)), Restriction::All);
}

#[test]
fn lio_18_release_of_a_nexus_that_holds_nothing_succeeds_without_effect() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    assert_eq!(unit.state.reserve(&a, &[0x16]), Ok(()));
    assert_eq!(unit.state.reserve(&a, &[0x16]), Ok(()), "again");
    assert_eq!(unit.state.reserve(&b, &[0x56]), Err(Failure::Conflict));
    assert_eq!(unit.state.release(&b, &[0x17]), Ok(()));
    assert!(!unit.reads(&b) && unit.reads(&a), "still reserved");
    unit.state.end_nexus(&a);
    assert!(unit.reads(&b));
    assert_eq!(unit.state.reserve(&a, &[0x16, 0x11]), Err(Failure::Check(Sense::cdb_field(1, Some(4)))));
}

#[test]
fn lio_19_persistent_reserve_conflicts_while_a_nexus_holds_reserve() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    unit.state.reserve(&a, &[0x16]).unwrap();
    for opcode in [0x5E, 0x5F] {
        assert_eq!(unit.state.check(&a, &[opcode]), Err(Failure::Conflict), "even of the holder");
        assert_eq!(unit.state.check(&b, &[opcode]), Err(Failure::Conflict));
    }
    unit.state.reset();
    assert!(unit.state.check(&b, &[0x5E]).is_ok());
}

#[test]
fn reserve_changes_nothing_where_registrations_exist() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    unit.register(&a, 1);
    assert_eq!(unit.state.reserve(&a, &[0x16]), Err(Failure::Conflict), "registered, but nothing reserved");
    unit.reserve(&a, 1, Kind::ExclusiveAccess).unwrap();
    assert_eq!(unit.state.reserve(&a, &[0x16]), Ok(()), "the holder");
    assert_eq!(unit.state.release(&a, &[0x17]), Ok(()));
    assert_eq!(unit.state.reserve(&b, &[0x16]), Err(Failure::Conflict));
    assert_eq!(unit.state.reserved(), None);
    assert!(unit.state.held().is_some());
}

#[test]
fn aptpl_follows_the_latest_registration_and_asks_for_the_store() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 1));
    let register = |key, persist| Out { action_key: key, persist, ..command(Action::RegisterAndIgnore, 0) };
    assert!(!unit.out(&a, &register(1, false)).unwrap().store);
    assert_eq!(unit.state.image(), None);
    assert!(unit.out(&b, &register(2, true)).unwrap().store);
    assert!(unit.reserve(&a, 1, Kind::WriteExclusive).unwrap().store, "RESERVE is stored, too");
    let again = unit.reserve(&a, 1, Kind::WriteExclusive).unwrap();
    assert!(!again.store, "nothing changed");
    let change = unit.out(&a, &register(1, false)).unwrap();
    assert!(change.store && change.next.image().is_none(), "the stored image is removed");
}

#[test]
fn aptpl_is_refused_where_it_cannot_be_stored_and_forced_where_the_attribute_says_so() {
    let register = Out { action_key: 1, persist: true, ..command(Action::Register, 0) };
    let policy = Policy { can_persist: false, ..POLICY };
    let result = Reservations::default().out(&nexus(1, 1), &policy, &register);
    assert_eq!(result, Err(Failure::Check(Sense::parameter_field(20, Some(0)))));
    let policy = Policy { force_aptpl: true, ..POLICY };
    let register = Out { persist: false, ..register };
    assert!(Reservations::default().out(&nexus(1, 1), &policy, &register).unwrap().next.persists());
}

#[test]
fn an_image_brings_registrations_and_the_reservation_back() {
    for kind in Kind::ALL {
        let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 2));
        unit.out(&a, &Out { action_key: 1, persist: true, ..command(Action::Register, 0) }).unwrap();
        unit.out(&b, &Out { action_key: 2, persist: true, ..command(Action::Register, 0) }).unwrap();
        unit.reserve(&b, 2, kind).unwrap();
        let text = unit.state.image().unwrap();
        let back = Reservations::parse_image(&text).unwrap();
        assert_eq!((back.registrations(), back.held()), (unit.state.registrations(), unit.state.held()));
        assert_eq!((back.generation(), back.persists()), (0, true));
        assert_eq!(back.image().unwrap(), text);
    }
}

#[test]
fn the_image_in_the_documentation_is_a_valid_one() {
    let page = include_str!("../../../../../docs/iscsi-reservations.md");
    let (_, image) = page.split_once("```text\n").unwrap();
    let (image, _) = image.split_once("```").unwrap();
    let state = Reservations::parse_image(image).unwrap();
    assert_eq!(state.held().map(|held| held.kind), Some(Kind::WriteExclusiveRegistrantsOnly));
    assert_eq!(state.image().as_deref(), Some(image));
}

#[test]
fn a_cut_or_edited_image_is_not_taken_for_the_truth() {
    let mut unit = Unit::default();
    unit.out(&nexus(1, 1), &Out { action_key: 1, persist: true, ..command(Action::Register, 0) }).unwrap();
    let text = unit.state.image().unwrap();
    for cut in 0..text.len() {
        assert!(Reservations::parse_image(&text[..cut]).is_err(), "cut at {cut}");
    }
    for at in 0..text.len() {
        let mut bytes = text.clone().into_bytes();
        bytes[at] ^= 1;
        assert!(Reservations::parse_image(std::str::from_utf8(&bytes).unwrap()).is_err(), "changed at {at}");
    }
    let later = text.replace("reservations 1", "reservations 2");
    assert_eq!(Reservations::parse_image(&later), Err(ImageError::Title));
}

#[test]
fn read_keys_tells_the_full_length_whatever_the_allocation_length() {
    let mut unit = Unit::default();
    unit.register(&nexus(1, 1), 0x1122);
    let (data, allocation) = unit.state.report(&[0x5E, 0, 0, 0, 0, 0, 0, 0, 8, 0], true).unwrap();
    assert_eq!((data[..8].to_vec(), allocation), (vec![0, 0, 0, 1, 0, 0, 0, 8], 8));
    assert_eq!(data[8..], 0x1122_u64.to_be_bytes());
}

#[test]
fn read_reservation_tells_the_holders_key_and_zero_for_all_registrants() {
    for kind in Kind::ALL {
        let (mut unit, a) = (Unit::default(), nexus(1, 1));
        unit.register(&a, 0x55);
        unit.reserve(&a, 0x55, kind).unwrap();
        let (data, _) = unit.state.report(&[0x5E, 1, 0, 0, 0, 0, 0, 0, 64, 0], true).unwrap();
        assert_eq!((data.len(), data[7], data[21]), (24, 16, kind as u8));
        assert_eq!(data[15], if kind.is_all_registrants() { 0 } else { 0x55 });
    }
}

#[test]
fn read_full_status_names_each_registrant_and_the_holder() {
    let (mut unit, a, b) = (Unit::default(), nexus(1, 1), nexus(2, 2));
    unit.register(&a, 1);
    unit.register(&b, 2);
    unit.reserve(&b, 2, Kind::ExclusiveAccess).unwrap();
    let (data, _) = unit.state.report(&[0x5E, 3, 0, 0, 0, 0, 0, 8, 0, 0], true).unwrap();
    let id = Registrant::of(&a, true).transport_id();
    let second = 8 + 24 + id.len();
    assert_eq!(data.len(), second + 24 + id.len());
    assert_eq!((data[8 + 12], data[8 + 19], data[8 + 23]), (0, 1, id.len() as u8));
    assert_eq!(data[32..second], id);
    assert_eq!((data[second + 12], data[second + 13], data[second + 19]), (1, 3, 2));
}

#[test]
fn the_parameter_list_has_24_bytes_unless_it_names_initiators() {
    let cdb = |action: u8, len: u8| [0x5F, action, 0, 0, 0, 0, 0, 0, len, 0];
    let length = Err(Failure::Check(Sense::PARAMETER_LIST_LENGTH));
    assert_eq!(Out::parse(&cdb(0, 23), &[0; 23]), length);
    assert_eq!(Out::parse(&cdb(0, 25), &[0; 25]), length);
    assert_eq!(Out::parse(&cdb(0, 24), &[0; 23]), length, "the initiator sent less");
    assert!(Out::parse(&cdb(0, 24), &[0; 24]).is_ok());
    let mut list = vec![0; 28];
    list[20] = 0x08;
    let spec_i_pt = Failure::Check(Sense::parameter_field(20, Some(3)));
    assert_eq!(Out::parse(&cdb(6, 28), &list), Err(spec_i_pt), "only REGISTER has SPEC_I_PT");
    assert_eq!(Out::parse(&cdb(0, 28), &list).unwrap().initiators, Some(vec![]));
    assert_eq!(Out::parse(&cdb(8, 24), &[0; 24]), Err(Failure::Check(Sense::cdb_field(1, Some(4)))));
}

proptest! {
    /// Arbitrary bytes lead to sense data, not to a panic, and an image can still represent the state.
    #[test]
    fn parameter_lists_of_any_bytes_never_panic(
        lists in prop::collection::vec((0..9_u8, any::<u8>(), prop::collection::vec(any::<u8>(), 24..120)), 1..8),
        flags in any::<u8>(),
    ) {
        let mut unit = Unit::default();
        for (action, kind, mut list) in lists {
            list[20] = flags & 0x0D;
            list[..8].fill(0);
            if flags & 0x80 != 0 {
                let len = list.len() as u32;
                list[20..24].copy_from_slice(&(len - 24).to_be_bytes());
            }
            let len = list.len() as u8;
            if let Ok(out) = Out::parse(&[0x5F, action, kind, 0, 0, 0, 0, 0, len, 0], &list) {
                let _ = unit.out(&nexus(1, 1), &out);
            }
            if let Some(image) = unit.state.image() {
                let back = Reservations::parse_image(&image).unwrap();
                prop_assert_eq!(back.registrations(), unit.state.registrations());
                prop_assert_eq!(back.held(), unit.state.held());
            }
            let _ = unit.state.check(&nexus(2, 1), &READ);
        }
    }

    /// Images with a valid checksum and arbitrary content are read or refused; a state that was read is
    /// written back unchanged.
    #[test]
    fn images_of_any_lines_never_panic(lines in prop::collection::vec(any_line(), 0..6)) {
        let mut text = String::from("blockyard reservations 1\n");
        lines.iter().for_each(|line| text.extend([line, "\n"]));
        let checksum = crc32fast::hash(text.as_bytes());
        text.push_str(&format!("checksum {checksum:08x}\n"));
        if let Ok(state) = Reservations::parse_image(&text) {
            let image = state.image().unwrap();
            prop_assert_eq!(Reservations::parse_image(&image), Ok(state));
        }
    }
}

fn any_line() -> impl Strategy<Value = String> {
    prop_oneof![
        "reservation type=[0-9] holder=(all|[0-9]{1,2})",
        "registration key=0x[0-9a-f]{1,17} port=[0-9]{1,6} initiator=[a-c]{0,2} isid=(any|[0-9a-f]{11,13})",
        "registration key=0x1 port=[12] initiator=[ab] isid=any",
        "\\PC{0,40}",
    ]
}
