//! The model against a second implementation of its rules, which is slow and simple: states of random logs are
//! legal, and their contents are those of a device that executed the writes one by one.

use blockyard_crash::{CHUNK, Event, Explorer, Kind, Log, Model, Piece, State, Variant, View, WHOLE};
use fastrand::Rng;
use std::sync::Arc;

const SECTOR: u64 = 512;
const SIZE: u64 = 64 << 10;

/// A random log, with its data.
fn random_log(rng: &mut Rng) -> (Log, Vec<u8>) {
    let mut log = Log { size: SIZE, ..Log::default() };
    let mut data = Vec::new();
    let (mut writing, mut flushing) = (Vec::new(), Vec::new());
    for time in 0..rng.u64(1..60) {
        match rng.u32(0..10) {
            0..=3 => {
                let sectors = if rng.bool() { rng.u64(1..20) } else { 8 * rng.u64(1..4) };
                let align = if rng.bool() { 8 } else { 1 };
                let start = rng.u64(0..(SIZE / SECTOR - sectors) / align) * align;
                let kind = [Kind::Data, Kind::Data, Kind::Data, Kind::Discard, Kind::Zeroes][rng.usize(0..5)];
                let at = data.len() as u64;
                if kind == Kind::Data {
                    for sector in 0..sectors {
                        let mut bytes = vec![rng.u8(1..); SECTOR as usize];
                        bytes[0] = sector as u8;
                        data.extend(bytes);
                    }
                }
                let fua = rng.u32(0..6) == 0;
                writing.push(log.submit(start * SECTOR, sectors * SECTOR, at, time, 0, kind, fua));
            }
            4..=6 if !writing.is_empty() => {
                let at = rng.usize(0..writing.len());
                log.complete(writing.swap_remove(at));
            }
            7 => flushing.push(log.flush(time)),
            8 if !flushing.is_empty() => {
                let at = rng.usize(0..flushing.len());
                log.flushed(flushing.swap_remove(at));
            }
            9 => log.mark(format!("mark {time}"), time),
            _ => {}
        }
    }
    (log, data)
}

/// Returns whether each write is durable at a cut: executes the events again for each write.
fn must_be_present(log: &Log, model: &Model, cut: usize, write: u32) -> bool {
    let events = &log.events[..cut];
    let Some(done) = events.iter().position(|event| *event == Event::Complete(write)) else { return false };
    if log.writes[write as usize].fua {
        return true;
    }
    for (at, event) in events.iter().enumerate() {
        if let Event::Flush(number) = event
            && at > done
            && events.contains(&Event::Flushed(*number))
        {
            return true;
        }
    }
    let Some(cache) = model.cache else { return false };
    // The bytes of writes that entered the cache with this one or after it, and were not written out.
    let unbounded = Model { cache: None, ..*model };
    let newer = events[done..].iter().filter_map(|event| match event {
        Event::Complete(other) if !must_be_present(log, &unbounded, cut, *other) => Some(*other),
        _ => None,
    });
    let held: u64 = newer.map(|other| log.writes[other as usize].data_len()).sum();
    held > cache
}

/// Checks a state by the rules of the documentation, one by one.
fn check_legal(log: &Log, model: &Model, state: &State) {
    let cut = state.cut as usize;
    for piece in &state.lost {
        let submitted = log.events[..cut].contains(&Event::Submit(piece.write));
        assert!(submitted, "{state:?}: {piece:?} was not submitted");
        assert!(!must_be_present(log, model, cut, piece.write), "{state:?}: {piece:?} is durable");
        assert!(piece.unit == WHOLE || model.variant == Variant::Torn, "{state:?}: {piece:?} is a part");
    }
    if model.variant == Variant::Prefix
        && let Some(first) = state.lost.first()
    {
        let submitted = log.events[..cut].iter().filter_map(|event| match event {
            Event::Submit(number) => Some(*number),
            _ => None,
        });
        for write in submitted.filter(|write| *write > first.write) {
            assert!(state.lost.contains(&Piece::whole(write)), "{state:?}: {write} is out of order");
        }
    }
}

/// Executes the writes of a state on an array, sector by sector.
fn execute(log: &Log, data: &[u8], base: &[u8], model: &Model, state: &State) -> Vec<u8> {
    let mut disk = base.to_vec();
    for event in &log.events[..state.cut as usize] {
        let Event::Submit(number) = event else { continue };
        let write = log.writes[*number as usize];
        if state.lost.contains(&Piece::whole(*number)) {
            continue;
        }
        for sector in 0..write.len / SECTOR {
            let at = write.offset + sector * SECTOR;
            let unit = (at / model.atomic - write.offset / model.atomic) as u32;
            if state.lost.contains(&Piece { write: *number, unit }) {
                continue;
            }
            let into = &mut disk[at as usize..(at + SECTOR) as usize];
            if write.kind == Kind::Data {
                let from = (write.data_at + sector * SECTOR) as usize;
                into.copy_from_slice(&data[from..from + SECTOR as usize]);
            } else {
                into.fill(0);
            }
        }
    }
    disk
}

#[test]
fn every_generated_state_is_legal_and_has_its_content() {
    let mut checked = 0;
    for seed in 0..150 {
        let mut rng = Rng::with_seed(seed);
        let (log, data) = random_log(&mut rng);
        let base: Vec<u8> = (0..SIZE).map(|at| (at / SECTOR) as u8 | 0x80).collect();
        for variant in [Variant::Prefix, Variant::Subset, Variant::Torn] {
            let atomic = [512, 4096, 8192][rng.usize(0..3)];
            let cache = [None, Some(8192), Some(0)][rng.usize(0..3)];
            let model = Model { variant, atomic, cache };
            let (log, data) = (Arc::new(log.clone()), Arc::new(data.clone()));
            let view = View::new(log.clone(), data.clone(), Arc::new(base.clone()), SIZE, model);
            let view = Arc::new(view);
            for state in Explorer::new(view.clone(), seed).take(120) {
                check_legal(&log, &model, &state);
                assert_eq!(view.allows(&state), Ok(()), "{state:?}");
                let mut read = vec![0; SIZE as usize];
                view.read(&state, 0, &mut read).unwrap();
                let wanted = execute(&log, &data, &base, &model, &state);
                assert!(read == wanted, "seed {seed}, {model:?}, {state:?}");
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 150 * 3 * 120);
}

#[test]
fn the_model_permits_no_less_than_the_rules() {
    for seed in 0..150 {
        let mut rng = Rng::with_seed(seed);
        let (log, data) = random_log(&mut rng);
        let model =
            Model { variant: Variant::Subset, atomic: 4096, cache: [None, Some(8192)][rng.usize(0..2)] };
        let base = Arc::new(Vec::new());
        let view = View::new(Arc::new(log.clone()), Arc::new(data), base, SIZE, model);
        for cut in 0..=log.events.len() as u32 {
            let before = 0..log.writes_before(cut);
            let wanted: Vec<u32> =
                before.filter(|write| !must_be_present(&log, &model, cut as usize, *write)).collect();
            assert_eq!(view.optional(cut), wanted, "seed {seed}, cut {cut}");
        }
    }
}

#[test]
fn equal_hashes_are_equal_contents() {
    let mut rng = Rng::with_seed(7);
    let (log, data) = random_log(&mut rng);
    let model = Model { variant: Variant::Torn, atomic: 512, cache: None };
    let base = Arc::new(vec![9; SIZE as usize]);
    let view = Arc::new(View::new(Arc::new(log), Arc::new(data), base, SIZE, model));
    let mut seen = blockyard_crash::Seen::default();
    let mut contents = std::collections::HashMap::new();
    for state in Explorer::new(view.clone(), 1).take(500) {
        let mut content = vec![0; SIZE as usize];
        view.read(&state, 0, &mut content).unwrap();
        let hash = seen.hash(&view, &state, &|| true).unwrap().unwrap();
        let other = contents.entry(content).or_insert(hash);
        assert_eq!(*other, hash, "{state:?}");
    }
    let hashes: std::collections::HashSet<_> = contents.values().collect();
    assert_eq!(hashes.len(), contents.len());
    assert!(contents.len() > 10 && SIZE.is_multiple_of(CHUNK));
}
