use super::*;
use crate::DiskConfig;
use block::Tag;

fn ring(faults: Faults) -> (SimRing, FileId) {
    let mut ring = SimRing::new(Rng::new(3), faults, Tracer::default());
    let file = ring.add_disk(Disk::new(DiskConfig {
        len: 1 << 20,
        punch: true,
        zero_range: false,
        align: 1,
        align_memory: 1,
    }));
    (ring, file)
}

fn id(tag: u16) -> IoId {
    IoId { queue: QueueId(0), cookie: Cookie { tag: Tag(tag), generation: 1 } }
}

fn reap_all(ring: &mut SimRing) -> Vec<(u16, i64)> {
    let mut ended = Vec::new();
    while ring.advance() {
        ended.extend(ring.reap().map(|(_, cookie, result)| (cookie.tag.0, result)));
    }
    ended
}

fn write(offset: u64) -> FileOp {
    FileOp::Write { offset, durable: false }
}

#[test]
fn written_data_is_read_back_and_operations_take_time() {
    let (mut ring, file) = ring(Faults::NONE);
    let from = ring.allocate(4096).expect("memory");
    ring.bytes_mut(from).fill(7);
    let start = ring.now();
    assert_eq!(ring.start(id(0), file, write(512), &[from]), Ok(()));
    assert_eq!(ring.reap(), None);
    assert_eq!(reap_all(&mut ring), [(0, 4096)]);
    assert!(ring.now().since(start) >= 1000);
    let into = ring.allocate(8192).expect("memory");
    let got = ring.try_now(file, FileOp::Read { offset: 0 }, &[into], Blocking::Allowed);
    assert_eq!(got, Some(8192));
    let bytes = ring.bytes(into);
    assert!(bytes.iter().enumerate().all(|(at, &b)| b == if (512..4608).contains(&at) { 7 } else { 0 }));
    ring.free(from);
    ring.free(into);
    assert_eq!((ring.memory_in_use(), ring.pending()), (0, 0));
}

#[test]
fn operations_complete_in_random_order_that_a_seed_reproduces() {
    let order = || {
        let (mut ring, file) = ring(Faults::NONE);
        (0..20).for_each(|tag| ring.start(id(tag), file, FileOp::Sync, &[]).expect("room"));
        reap_all(&mut ring)
    };
    let got = order();
    assert_eq!(got.len(), 20);
    assert!(!got.is_sorted());
    assert_eq!(got, order());
}

#[test]
fn a_lost_operation_completes_once_it_is_cancelled() {
    let (mut ring, file) = ring(Faults { lost: 1000, ..Faults::NONE });
    (0..40).for_each(|tag| ring.start(id(tag), file, FileOp::Sync, &[]).expect("room"));
    assert!(!ring.advance());
    (0..40).for_each(|tag| ring.cancel(id(tag)));
    let ended = reap_all(&mut ring);
    let cancelled = ended.iter().filter(|end| end.1 == -i64::from(libc::ECANCELED)).count();
    assert_eq!(ended.len(), 40);
    assert!((1..40).contains(&cancelled), "some complete normally: {cancelled}");
}

#[test]
fn memory_under_an_operation_cannot_be_freed() {
    let (mut ring, file) = ring(Faults::NONE);
    let from = ring.allocate(4096).expect("memory");
    ring.start(id(0), file, write(0), &[from]).expect("room");
    let freed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ring.free(from)));
    assert!(freed.is_err());
}

#[test]
fn short_transfers_stay_within_the_request_and_writes_end_with_a_sector() {
    let (mut ring, file) = ring(Faults { short: 1000, ..Faults::NONE });
    let memory = ring.allocate(4096).expect("memory");
    for _ in 0..100 {
        let got = ring.try_now(file, write(0), &[memory], Blocking::Allowed).expect("inline");
        assert!(got > 0 && got <= 4096 && got % 512 == 0, "{got}");
        let got = ring.try_now(file, FileOp::Read { offset: 3 }, &[memory], Blocking::Allowed);
        assert!(got.is_some_and(|got| got > 0 && got < 4096));
    }
}

#[test]
fn a_started_write_survives_a_power_cut_in_part_at_most_by_whole_sectors() {
    let mut seen = [0; 3];
    for seed in 0..60 {
        let mut ring = SimRing::new(Rng::new(seed), Faults::NONE, Tracer::default());
        let config = DiskConfig { len: 8192, punch: true, zero_range: true, align: 512, align_memory: 512 };
        let file = ring.add_disk(Disk::new(config));
        let from = ring.allocate(8192).expect("memory");
        ring.bytes_mut(from).fill(9);
        ring.start(id(0), file, write(0), &[from]).expect("room");
        ring.power_cut();
        assert_eq!((ring.pending(), ring.memory_in_use()), (0, 0));
        let mut bytes = [0; 8192];
        ring.disk(file).read(0, &mut bytes);
        let kept = bytes.chunks(512).filter(|sector| sector.iter().all(|&byte| byte == 9)).count();
        let blank = bytes.chunks(512).filter(|sector| sector.iter().all(|&byte| byte == 0)).count();
        assert_eq!(kept + blank, 16);
        seen[usize::from(kept > 0) + usize::from(kept == 16)] += 1;
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

#[test]
fn unsupported_operations_of_a_file_are_refused() {
    let (mut ring, file) = ring(Faults::NONE);
    let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    let zero = FileOp::Allocate { mode, offset: 0, len: 4096 };
    assert_eq!(ring.try_now(file, zero, &[], Blocking::Allowed), Some(-i64::from(libc::EOPNOTSUPP)));
    assert_eq!(ring.try_now(file, zero, &[], Blocking::Never), None);
    let past = FileOp::Seek { offset: 1 << 20, hole: false };
    assert_eq!(ring.try_now(file, past, &[], Blocking::Allowed), Some(-i64::from(libc::ENXIO)));
    let direct = DiskConfig { len: 8192, punch: true, zero_range: true, align: 512, align_memory: 512 };
    let file = ring.add_disk(Disk::new(direct));
    let memory = ring.allocate(4096).expect("memory");
    let odd = FileOp::Read { offset: 100 };
    assert_eq!(ring.try_now(file, odd, &[memory], Blocking::Allowed), Some(-i64::from(libc::EINVAL)));
}
