use super::*;
use proptest::prelude::*;

fn groups() -> AccessGroups {
    let mut groups = AccessGroups::default();
    groups.add_port(1);
    groups.create("second", 0).unwrap();
    groups.move_port(2, "second").unwrap();
    groups
}

#[test]
fn both_data_formats_list_every_group_with_its_ports() {
    let mut groups = groups();
    groups.set_attribute("second", "preferred", 1).unwrap();
    groups.set_attribute("second", "alua_access_state", 2).unwrap();
    groups.set_attribute(DEFAULT_GROUP, "implicit_trans_secs", 9).unwrap();
    let (data, allocation) = groups.report(&[0xA3, 0x0A, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], 1).unwrap();
    assert_eq!(allocation, 256);
    let first = [0x00, 0xCF, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1];
    let second = [0x82, 0xCF, 0, 1, 0, 2, 0, 1, 0, 0, 0, 2];
    assert_eq!(data, [&[0, 0, 0, 24][..], &first, &second].concat());
    let (data, _) = groups.report(&[0xA3, 0x2A, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], 1).unwrap();
    assert_eq!(data[..8], [0, 0, 0, 28, 0x10, 9, 0, 0], "the extended header");
    assert_eq!(groups.report(&[0xA3, 0x4A], 1), Err(Sense::cdb_field(1, Some(7))));
}

#[test]
fn states_admit_the_commands_of_their_list() {
    let not_ready = |code| Err(Sense::new(Key::NotReady, 0x04, code));
    // Columns: state and qualifier of its sense data; then INQUIRY, MODE SENSE, WRITE BUFFER, TEST UNIT
    // READY and READ(10).
    let table = [
        (AccessState::ActiveOptimized, 0, [true, true, true, true, true]),
        (AccessState::ActiveNonOptimized, 0, [true, true, true, true, true]),
        (AccessState::Standby, 0x0B, [true, true, true, false, false]),
        (AccessState::Unavailable, 0x0C, [true, false, true, false, false]),
        (AccessState::Offline, 0x12, [true, false, false, false, false]),
        (AccessState::Transitioning, 0x0A, [true, false, true, false, false]),
    ];
    for (state, code, allowed) in table {
        for (opcode, allowed) in [0x12, 0x1A, 0x3B, 0x00, 0x28].into_iter().zip(allowed) {
            let expected = if allowed { Ok(()) } else { not_ready(code) };
            assert_eq!(state.check(&[opcode, 0, 0, 0, 0, 0]), expected, "{state:?} {opcode:02x}");
        }
        assert!(state.check(&[0xA3, 0x0A]).is_ok(), "REPORT TARGET PORT GROUPS always");
        let can_leave = !matches!(state, AccessState::Offline | AccessState::Transitioning);
        assert_eq!(state.check(&[0xA4, 0x0A]).is_ok(), can_leave, "SET TARGET PORT GROUPS");
    }
}

#[test]
fn set_target_port_groups_changes_all_or_nothing() {
    let mut groups = groups();
    let list = |states: &[(u8, u8)]| {
        let descriptors = states.iter().flat_map(|&(state, id)| [state, 0, 0, id]);
        [0; 4].into_iter().chain(descriptors).collect::<Vec<u8>>()
    };
    assert_eq!(
        groups.set(&list(&[(2, 0), (5, 1)])),
        Err(Sense::parameter_field(8, Some(3))),
        "reserved state"
    );
    assert_eq!(groups.set(&list(&[(2, 0), (0, 7)])), Err(Sense::parameter_field(10, None)), "no such group");
    assert_eq!(groups.set(&list(&[(15, 0)])), Err(Sense::parameter_field(4, Some(3))), "transitioning");
    assert_eq!(groups.set(&[0; 7]), Err(Sense::PARAMETER_LIST_LENGTH));
    assert_eq!(groups.state_of(1), AccessState::ActiveOptimized);
    assert_eq!(groups.set(&list(&[(2, 0), (1, 1)])), Ok(true));
    assert_eq!(
        (groups.state_of(1), groups.state_of(2)),
        (AccessState::Standby, AccessState::ActiveNonOptimized)
    );
    assert_eq!(groups.of_port(1).status, StateStatus::Explicit);
    assert_eq!(groups.set(&list(&[(2, 0)])), Ok(false), "no change, no unit attention");
    groups.set_attribute(DEFAULT_GROUP, "alua_support_unavailable", 0).unwrap();
    assert!(groups.set(&list(&[(3, 0)])).is_err(), "an unsupported state");
}

#[test]
fn without_explicit_access_set_target_port_groups_does_not_exist() {
    let mut groups = groups();
    assert_eq!((groups.tpgs(1), groups.set_list_len(&[0xA4, 0x0A, 0, 0, 0, 0, 0, 0, 0, 8], 1)), (3, Ok(8)));
    groups.set_attribute(DEFAULT_GROUP, "alua_access_type", 1).unwrap();
    assert_eq!((groups.tpgs(1), groups.set_list_len(&[0xA4, 0x0A], 1)), (1, Err(Sense::INVALID_OPCODE)));
    assert!(groups.set(&[0, 0, 0, 0, 2, 0, 0, 0]).is_err(), "from a port of another group, too");
}

#[test]
fn attributes_have_lios_names_and_ranges() {
    let mut groups = groups();
    for name in ATTRIBUTES {
        let value = groups.of_port(2).attribute(name).unwrap();
        let result = groups.set_attribute("second", name, value);
        assert_eq!(result.is_ok(), name != "alua_support_lba_dependent", "{name}");
        assert!(groups.set_attribute("second", name, 1 << 20).is_err(), "{name}");
    }
    let default = groups.of_port(1);
    assert_eq!(default.attribute("nonop_delay_msecs"), Some(100));
    assert_eq!(default.attribute("tg_pt_gp_id"), Some(0));
    assert_eq!(groups.set_attribute("second", "tg_pt_gp_id", 16), Ok(false));
    assert!(groups.set_attribute("second", "tg_pt_gp_id", 0).is_err());
    assert!(groups.set_attribute(DEFAULT_GROUP, "tg_pt_gp_id", 5).is_err());
    assert_eq!(groups.set_attribute("second", "alua_access_state", 1), Ok(true));
    assert_eq!(groups.of_port(2).status, StateStatus::Implicit);
}

#[test]
fn the_ports_of_a_removed_group_return_to_the_default_group() {
    let mut groups = groups();
    assert!(groups.remove(DEFAULT_GROUP).is_err() && groups.remove("third").is_err());
    assert!(groups.create("second", 0).is_err() && groups.create("a/b", 0).is_err());
    assert!(groups.create("third", 1).is_err(), "the identifier is taken");
    groups.remove("second").unwrap();
    assert_eq!(groups.groups()[0].ports, [1, 2]);
    groups.remove_port(1);
    assert_eq!(groups.groups()[0].ports, [2]);
}

proptest! {
    #[test]
    fn foreign_lists_never_panic(cdb in any::<[u8; 12]>(), list in prop::collection::vec(any::<u8>(), 0..40)) {
        let mut groups = groups();
        let _ = groups.set(&list);
        let _ = groups.report(&cdb, 1);
        for state in AccessState::ALL {
            let _ = state.check(&cdb);
        }
    }
}
