//! Tests random sequences of data commands against a model of sectors that shares no code with them.

use super::data::{unmap, unmap_list};
use super::*;
use proptest::prelude::*;

/// Number of blocks in which the test's commands start; they end within twice as many.
const SPAN: u64 = 24;

#[derive(Clone, Debug)]
enum Act {
    Read,
    Write { fill: u8, fua: bool },
    WriteSame { fill: u8, unmap: bool, ndob: bool },
    Or { fill: u8 },
    CompareAndWrite { fill: u8, spoilt: Option<usize> },
    WriteVerify { fill: u8 },
    Verify { spoilt: Option<usize>, same: bool },
    Unmap,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        Just(Act::Read),
        (any::<u8>(), any::<bool>()).prop_map(|(fill, fua)| Act::Write { fill, fua }),
        (any::<u8>(), any::<bool>(), any::<bool>()).prop_map(|(fill, unmap, ndob)| Act::WriteSame {
            fill: fill & 3,
            unmap,
            ndob
        }),
        any::<u8>().prop_map(|fill| Act::Or { fill }),
        (any::<u8>(), prop::option::of(any::<usize>()))
            .prop_map(|(fill, spoilt)| Act::CompareAndWrite { fill, spoilt }),
        any::<u8>().prop_map(|fill| Act::WriteVerify { fill }),
        (prop::option::of(any::<usize>()), any::<bool>())
            .prop_map(|(spoilt, same)| Act::Verify { spoilt, same }),
        Just(Act::Unmap),
    ]
}

/// Returns data in which each byte depends on its position.
fn data(fill: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| fill.wrapping_add((at / 5) as u8)).collect()
}

/// Runs one command and changes the model.
fn run(world: &mut World, model: &mut [u8], act: &Act, lba: u64, count: usize) {
    let range = lba as usize * BLOCK..(lba as usize + count) * BLOCK;
    let (len, blocks) = (count * BLOCK, count as u32);
    let now = &mut model[range];
    match act {
        Act::Read => assert_eq!(world.run(&cdb16(0x88, 0, lba, blocks)).good(), now),
        Act::Write { fill, fua } => {
            let new = data(*fill, len);
            world.send(&cdb16(0x8A, u8::from(*fua) << 3, lba, blocks), &new).good();
            now.copy_from_slice(&new);
        }
        Act::WriteSame { fill, unmap, ndob } => {
            let block = if *fill == 0 || *ndob { vec![0; BLOCK] } else { data(*fill, BLOCK) };
            let sent = if *ndob { &[][..] } else { &block };
            let flags = u8::from(*unmap) << 3 | u8::from(*ndob);
            world.send(&cdb16(0x93, flags, lba, blocks), sent).good();
            now.chunks_mut(BLOCK).for_each(|one| one.copy_from_slice(&block));
        }
        Act::Or { fill } => {
            let operand = data(*fill, len);
            world.send(&cdb16(0x8B, 0, lba, blocks), &operand).good();
            now.iter_mut().zip(operand).for_each(|(byte, operand)| *byte |= operand);
        }
        Act::CompareAndWrite { fill, spoilt } => {
            let (mut old, new) = (now.to_vec(), data(*fill, len));
            if let Some(at) = spoilt {
                old[at % len] ^= 0x40;
            }
            let end = world.send(&compare_and_write(lba, count as u8), &[old, new.clone()].concat());
            match spoilt {
                Some(at) => assert_eq!(end.outcome.sense.information, Some((at % len) as u64)),
                None => {
                    end.good();
                    now.copy_from_slice(&new);
                }
            }
        }
        Act::WriteVerify { fill } => {
            let new = data(*fill, len);
            world.send(&cdb16(0x8E, 0x02, lba, blocks), &new).good();
            now.copy_from_slice(&new);
        }
        Act::Verify { spoilt, same } => {
            let mut expected = if *same { now[..BLOCK].to_vec() } else { now.to_vec() };
            if let Some(at) = spoilt {
                let at = at % expected.len();
                expected[at] ^= 1;
            }
            let full: Vec<u8> = expected.iter().copied().cycle().take(len).collect();
            let differs = now.iter().zip(&full).position(|(one, other)| one != other);
            let end = world.send(&cdb16(0x8F, if *same { 6 } else { 2 }, lba, blocks), &expected);
            assert_eq!(end.outcome.sense.information, differs.map(|at| at as u64));
            assert_eq!(end.outcome.status == ScsiStatus::Good, differs.is_none());
        }
        Act::Unmap => {
            unmap(world, &unmap_list(&[(lba, blocks)])).good();
            now.fill(0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn data_commands_do_what_the_model_does(
        acts in prop::collection::vec((act(), 0..SPAN, 1..SPAN as usize), 1..40),
        can in any::<u8>(),
        write_cache in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let can = Can::from_bits_truncate(can).difference(Can::UNMAP_ZEROES) | Can::UNMAP | Can::WRITE_ZEROES;
        let mut world = World::with(Media { can, write_cache, ..media() }, Attributes::default());
        world.seed = seed;
        let mut model = world.disk.bytes.clone();
        for (act, lba, count) in &acts {
            run(&mut world, &mut model, act, *lba, *count);
            prop_assert!(world.disk.bytes == model, "{act:?} at {lba} of {count}");
        }
    }
}
