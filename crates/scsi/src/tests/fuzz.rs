//! Tests that arbitrary commands never panic, never access the device past its end, and respect lengths.

use super::*;
use proptest::prelude::*;

/// Generates a CDB of a known command with some arbitrary bytes, or of arbitrary bytes only.
fn cdb() -> impl Strategy<Value = Vec<u8>> {
    let known = (0..crate::opcodes::TABLE.len(), prop::collection::vec((0_usize..32, any::<u8>()), 0..6))
        .prop_map(|(row, changes)| {
            let row = &crate::opcodes::TABLE[row];
            let mut cdb = vec![0; row.len()];
            cdb[0] = row.opcode;
            match row.action {
                Some(action) if row.opcode == 0x7F => (cdb[7], cdb[9]) = (24, action as u8),
                Some(action) => cdb[1] = action as u8,
                None => {}
            }
            for (at, byte) in changes {
                let len = cdb.len();
                cdb[at % len] = byte;
            }
            cdb
        });
    prop_oneof![3 => known, 1 => prop::collection::vec(any::<u8>(), 0..40)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn commands_of_any_bytes_end(
        cdbs in prop::collection::vec((cdb(), 0_usize..3000, any::<bool>(), 0_u32..70_000), 1..6),
        byte in any::<u8>(),
    ) {
        let mut world = World::with(Media { removable: true, atomic_max: 4096, ..media() }, Attributes::default());
        for (cdb, len, is_whole, data_in) in cdbs {
            let len = if is_whole { len / BLOCK * BLOCK } else { len };
            let end = world.run_with(&cdb, &vec![byte; len], data_in);
            prop_assert!(end.data.len() <= data_in as usize);
            let mut bytes = [0; Sense::LEN_MAX];
            prop_assert!(end.outcome.sense_bytes(&mut bytes) <= Sense::LEN_MAX);
            prop_assert!(end.outcome.wanted < 1 << 42);
            end.outcome.residual(data_in);
        }
    }
}

/// The types of the fast path own no memory, and the path takes no lock: it completes while another thread
/// holds the locks.
#[test]
fn reads_and_writes_neither_allocate_nor_lock() {
    const fn owns_nothing<T: Copy>() {}
    owns_nothing::<BlockIo>();
    let world = World::new();
    let held = world.unit.hold_state();
    let nexus = world.nexus.clone();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let luns = Luns(Vec::new());
        for cdb in [
            &cdb10(0x28, 0, 5, 1)[..],
            &cdb16(0x8A, 0x08, 5, 1),
            &[0x08, 0, 0, 5, 1, 0],
            &cdb12(0xA8, 0, 5, 1),
        ] {
            let command = Command { cdb, data_in: 512, data_out: 512, attribute: TaskAttribute::Simple };
            let Begin::Io(io) = begin(&nexus, &command, &luns) else {
                panic!("{cdb:02x?} is no block request")
            };
            assert_eq!((io.offset, io.len, io.transfer), (5 * 512, 512, 512));
            assert_eq!(complete(&io, Status::Ok).data.capacity(), 0);
        }
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(std::time::Duration::from_secs(20)).expect("the fast path took a lock, or failed");
    drop(held);
}
