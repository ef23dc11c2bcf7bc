//! Tests programs that must be atomic: their requests, and those of other commands, in all orders.

use super::*;
use crate::program::{Program, ProgramIo};

/// An actor: a program with its memory, or a plain write.
struct Actor {
    program: Option<Box<Program>>,
    data_out: Vec<u8>,
    scratch: Vec<u8>,
    pending: Option<ProgramIo>,
    exclusive: Option<std::ops::Range<u64>>,
    holds: bool,
    outcome: Option<Outcome>,
}

fn actor(world: &World, cdb: &[u8], data_out: Vec<u8>) -> Actor {
    let command =
        Command { cdb, data_in: 0, data_out: data_out.len() as u32, attribute: TaskAttribute::Simple };
    let Begin::Program(program) = begin(&world.nexus, &command, &world.luns) else { panic!("no program") };
    let needs = program.needs();
    let scratch = vec![0; needs.scratch as usize];
    Actor {
        program: Some(program),
        data_out,
        scratch,
        pending: None,
        exclusive: needs.exclusive,
        holds: false,
        outcome: None,
    }
}

/// Advances an actor by one request. Returns `false` if it has to wait for the range, or has ended.
fn advance(actors: &mut [Actor], index: usize, disk: &mut Disk, guarded: bool) -> bool {
    if actors[index].outcome.is_some() {
        return false;
    }
    let is_held = actors.iter().enumerate().any(|(other, actor)| other != index && actor.holds);
    if guarded && !actors[index].holds && actors[index].exclusive.is_some() && is_held {
        return false;
    }
    let actor = &mut actors[index];
    actor.holds = guarded && actor.exclusive.is_some();
    let mut completed = None;
    if let Some(io) = actor.pending.take() {
        let mut data = match &io.buffer {
            Buffer::None => Vec::new(),
            Buffer::DataOut(range) => actor.data_out[range.start as usize..range.end as usize].to_vec(),
            Buffer::Scratch(range) => actor.scratch[range.start as usize..range.end as usize].to_vec(),
        };
        let status = disk.request(io.op, io.offset, io.len, io.flags, &mut data);
        if let Buffer::Scratch(range) = &io.buffer {
            actor.scratch[range.start as usize..range.end as usize].copy_from_slice(&data);
        }
        completed = Some(Completed { slot: io.slot, status });
    }
    loop {
        let mut memory = ProgramMemory { data_out: &actor.data_out, scratch: &mut actor.scratch };
        let Some(program) = &mut actor.program else { return false };
        match program.step(completed.take(), &mut memory) {
            Step::Submit(io) => actor.pending = Some(io),
            Step::Wait => return true,
            Step::Respond(_) => panic!("these commands end when they are done"),
            Step::Finished(outcome) => {
                actor.outcome = Some(outcome);
                actor.holds = false;
                return true;
            }
        }
    }
}

/// Runs all orders of the requests of two COMPARE AND WRITE commands, each of which adds one to a counter.
/// Returns the final counters, with the number of commands that succeeded.
/// `guarded`: commands wait for exclusive access; `compares`: the backend compares and writes.
fn all_orders(guarded: bool, compares: bool) -> Vec<(u8, usize)> {
    let mut ends = Vec::new();
    for order in 0..1_u32 << 8 {
        let mut world = World::new();
        world.disk.bytes[..BLOCK].fill(0);
        world.disk.compares = compares;
        let data = [vec![0; BLOCK], vec![1; BLOCK]].concat();
        let mut actors = vec![
            actor(&world, &compare_and_write(0, 1), data.clone()),
            actor(&world, &compare_and_write(0, 1), data),
        ];
        for step in 0..32 {
            let first = (order >> (step % 8) & 1) as usize;
            if !advance(&mut actors, first, &mut world.disk, guarded) {
                advance(&mut actors, 1 - first, &mut world.disk, guarded);
            }
        }
        let good = actors
            .iter()
            .filter(|actor| actor.outcome.as_ref().expect("both end").status == ScsiStatus::Good)
            .count();
        ends.push((world.disk.bytes[0], good));
    }
    ends
}

#[test]
fn of_two_compare_and_writes_of_one_block_exactly_one_succeeds() {
    assert!(all_orders(true, false).iter().all(|end| *end == (1, 1)));
    // Two processes, which do not exclude each other, on a backend that compares and writes.
    assert!(all_orders(false, true).iter().all(|end| *end == (1, 1)));
    // The canary: without the exclusive range both commands can succeed, which shows that the test can
    // fail.
    assert!(all_orders(false, false).iter().any(|end| end.1 == 2));
}

#[test]
fn programs_that_read_and_write_ask_for_their_range() {
    let world = World::new();
    let range = Some(5 * 512..7 * 512);
    assert_eq!(actor(&world, &compare_and_write(5, 2), vec![0; 4 * BLOCK]).exclusive, range);
    assert_eq!(actor(&world, &cdb16(0x8B, 0, 5, 2), vec![0; 2 * BLOCK]).exclusive, range);
    assert_eq!(actor(&world, &cdb16(0x8E, 0, 5, 2), vec![0; 2 * BLOCK]).exclusive, range);
    assert_eq!(actor(&world, &cdb16(0x8F, 2, 5, 2), vec![0; 2 * BLOCK]).exclusive, None);
    assert_eq!(actor(&world, &cdb16(0x93, 0, 5, 2), vec![0; BLOCK]).exclusive, None);
}

/// Begins COMPARE AND WRITE of the first block, which contains zeroes, and executes its first request on a
/// backend that compares and writes.
fn compared(world: &mut World, flags: u8) -> Vec<Actor> {
    world.disk.bytes[..BLOCK].fill(0);
    world.disk.compares = true;
    let mut cdb = compare_and_write(0, 1);
    cdb[1] |= flags;
    let mut actors = vec![actor(world, &cdb, [vec![0; BLOCK], vec![1; BLOCK]].concat())];
    advance(&mut actors, 0, &mut world.disk, true);
    actors
}

#[test]
fn a_backend_that_compares_gets_one_request_with_the_flags_of_the_command() {
    let mut world = World::new();
    let mut actors = compared(&mut world, 0x08);
    assert!(advance(&mut actors, 0, &mut world.disk, true));
    assert_eq!(actors[0].outcome.as_ref().expect("it ended").status, ScsiStatus::Good);
    assert_eq!(world.disk.log, [(Op::CompareAndWrite, 0, BLOCK as u64, Flags::FUA)]);
    assert_eq!(world.disk.bytes[..BLOCK], [1; BLOCK]);
}

#[test]
fn a_difference_that_the_backend_finds_is_reported_with_its_offset() {
    let mut world = World::new();
    let mut actors = compared(&mut world, 0);
    world.disk.bytes[77] = 5;
    while actors[0].outcome.is_none() {
        advance(&mut actors, 0, &mut world.disk, true);
    }
    let outcome = actors[0].outcome.take().expect("it ended");
    assert_eq!(outcome.sense, Sense::miscompare(77));
    assert!(world.disk.log.iter().all(|(op, ..)| *op != Op::Write), "{:?}", world.disk.log);
}

#[test]
fn a_difference_that_is_gone_has_the_backend_compare_again_and_ends_with_busy_at_last() {
    let mut world = World::new();
    let mut actors = compared(&mut world, 0);
    // Another process changes the block before every comparison, and restores it before every read.
    for attempt in 1.. {
        world.disk.bytes[0] = 9;
        advance(&mut actors, 0, &mut world.disk, true);
        world.disk.bytes[0] = 0;
        advance(&mut actors, 0, &mut world.disk, true);
        if let Some(outcome) = &actors[0].outcome {
            assert_eq!((outcome.status, attempt), (ScsiStatus::Busy, 16));
            break;
        }
    }
    assert_eq!(world.disk.bytes[..BLOCK], [0; BLOCK]);
}
