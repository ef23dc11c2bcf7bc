//! Large logs: each step of the exploration ends soon after it should, and takes bounded memory.

use blockyard_crash::{Explorer, Kind, Log, Model, Piece, Seen, State, Variant, View, minimise};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the device; no data is stored for it.
const SIZE: u64 = 10 << 30;

/// A log of `count` writes, one after the other on the device, that are never flushed.
fn view(count: u64, len: u64, kind: Kind, model: Model) -> Arc<View> {
    let mut log = Log { size: SIZE, ..Log::default() };
    for number in 0..count {
        let write = log.submit(number * len % (SIZE - len + 1), len, 0, number, 0, kind, false);
        log.complete(write);
    }
    Arc::new(View::new(Arc::new(log), Arc::new(Vec::new()), Arc::new(Vec::new()), SIZE, model))
}

const TORN: Model = Model { variant: Variant::Torn, atomic: 512, cache: None };

/// Answers "go on" a few times.
fn times(count: u32) -> impl Fn() -> bool {
    let left = Cell::new(count);
    move || {
        left.set(left.get().saturating_sub(1));
        left.get() > 0
    }
}

#[test]
fn the_hash_of_ten_gibibytes_is_interrupted_and_continued() {
    let view = view(10_240, 1 << 20, Kind::Data, TORN);
    let last = State::all_present(view.log().events.len() as u32);
    let mut seen = Seen::default();
    let start = Instant::now();
    let mut interrupted = 0;
    while seen.hash(&view, &State::all_present(800), &times(100)).expect("no I/O").is_none() {
        interrupted += 1;
    }
    assert!(interrupted > 2, "it took {interrupted} turns");
    let until = start.elapsed() + Duration::from_millis(200);
    assert_eq!(seen.add(&view, &last, &|| start.elapsed() < until).expect("no I/O"), None);
    assert!(start.elapsed() < until + Duration::from_secs(1), "{:?} after {until:?}", start.elapsed());
    // Interruptions do not change the hash.
    let state = State::new(800, vec![Piece::whole(3)]);
    let whole = Seen::default().hash(&view, &state, &|| true).expect("no I/O");
    assert_eq!(seen.hash(&view, &state, &|| true).expect("no I/O"), whole);
}

#[test]
fn parts_of_a_huge_discard_take_no_memory() {
    let view = view(20, 64 << 20, Kind::Discard, TORN);
    let mut explorer = Explorer::new(view, 1);
    let largest = (0..2000).map(|_| explorer.next().expect("a state").lost.len()).max();
    assert!(largest <= Some(20), "{largest:?} lost pieces");
}

#[test]
fn prefixes_of_many_optional_writes_are_bounded() {
    let view = view(20_000, 4096, Kind::Data, Model { variant: Variant::Prefix, ..TORN });
    let mut explorer = Explorer::new(view, 1);
    let lost: usize = (0..200).map(|_| explorer.next().expect("a state").lost.len()).sum();
    assert!(lost < 200 * 20_000, "{lost} lost pieces");
    assert!(explorer.next_while(&|| false).is_none_or(|state| state.lost.len() < 20_000));
}

#[test]
fn ten_thousand_losses_are_minimised_to_the_two_that_matter() {
    let view = view(10_240, 4096, Kind::Data, TORN);
    let cut = view.log().events.len() as u32;
    let all = State::new(cut, (0..10_240).map(Piece::whole).collect());
    let (first, second) = (Piece::whole(17), Piece::whole(9999));
    let mut checks = 0;
    let start = Instant::now();
    let smallest = minimise(&view, &all, |state| {
        checks += 1;
        Some(state.lost.contains(&first) && state.lost.contains(&second))
    });
    assert_eq!(smallest.lost, [first, second]);
    assert!(checks < 300 && start.elapsed() < Duration::from_secs(20), "{checks}, {:?}", start.elapsed());
}
