//! Tests changes of how an open file is served: LOOP-5 and LOOP-6 at run time, capacity, another file.

use super::*;
use crate::Backend;
use std::sync::atomic::Ordering;

fn fact(file: &File, name: &str) -> String {
    file.describe().into_iter().find(|fact| fact.0 == name).map(|fact| fact.1).unwrap_or_default()
}

fn buffered(path: &std::path::Path) -> Arc<File> {
    File::open(&FileSpec { direct: Direct::Off, ..FileSpec::new(path) }).unwrap()
}

fn set_len(path: &std::path::Path, len: u64) {
    std::fs::File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn direct_io_is_switched_on_the_open_file_and_back() {
    let (_dir, path) = image();
    let file = buffered(&path);
    assert_eq!(opened(&file).write(0, &[7; 4096], Flags::empty()), Status::Ok);
    let direct = match file.with_direct(Direct::On) {
        Ok(direct) => direct,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    assert_eq!((fact(&file, "dio"), fact(&direct, "dio")), ("0".to_owned(), "1".to_owned()));
    let mut disk = opened(&direct);
    assert_eq!(disk.read(0, 4096), (Status::Ok, vec![7; 4096]));
    assert_eq!(disk.write(100, &[8; 1000], Flags::empty()), Status::Ok, "a part of a block too");
    let back = direct.with_direct(Direct::Off).unwrap();
    assert_eq!(fact(&back, "dio"), "0");
    assert_eq!(back.shared().facts(), file.shared().facts(), "all is as it was");
    assert_eq!(opened(&back).read(100, 1000), (Status::Ok, vec![8; 1000]));
    assert!(File::open(&FileSpec::new(&path)).is_err(), "the lock was held throughout");
}

#[test]
fn lost_locks_are_reported_after_every_change() {
    let (_dir, path) = image();
    let file = File::open(&FileSpec { ro: true, direct: Direct::Off, ..FileSpec::new(&path) }).unwrap();
    assert_eq!(fact(&file, "locked"), "against other writers");
    let ours = file.reopened_for_writing().unwrap();
    let later = file.remeasured().unwrap();
    let other = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    drop(ours);
    let byte = crate::file::lock::DENIES + crate::file::lock::WRITE;
    crate::file::sys::take_byte(&other, byte).unwrap();
    assert!(file.deny_writers().is_err());
    assert!(fact(&later, "locked").starts_with("no longer: another program"), "{}", fact(&later, "locked"));
    drop(other);
    file.deny_writers().unwrap();
    assert_eq!(fact(&later, "locked"), "against other writers");
}

#[test]
fn impossible_direct_io_leaves_the_file_unchanged() {
    let (_dir, path) = image();
    let spec = FileSpec { direct: Direct::Off, offset: Bytes(1), ..FileSpec::new(&path) };
    let file = File::open(&spec).unwrap();
    let why = file.with_direct(Direct::On).expect_err("refused").to_string();
    assert!(why.contains("direct=on is not possible"), "{why}");
    assert_eq!(opened(&file).read(0, 512), (Status::Ok, content(1, 512)));
}

#[test]
fn learned_facts_of_a_file_survive_a_change() {
    let (_dir, path) = image();
    let file = buffered(&path);
    assert!(file.features().discard && fact(&file, "withdrawn").is_empty());
    file.shared().no_punch.store(true, Ordering::Relaxed);
    file.shared().fail_flushes();
    let changed = file.remeasured().unwrap();
    assert!(changed.shared().flush_failed() && !changed.features().discard);
    assert_eq!(changed.limits().max_discard_sectors.0, 0, "LOOP-10");
    assert_eq!(changed.limits().discard_granularity, Bytes::ZERO);
    assert!(fact(&changed, "withdrawn").starts_with("discard: "));
    assert_eq!(opened(&changed).write(0, &[1; 512], Flags::empty()), Status::IoError);
}

#[test]
fn a_grown_file_is_larger_only_after_it_is_measured_again() {
    let (_dir, path) = image();
    let file = buffered(&path);
    set_len(&path, (2 << 20) + 100);
    assert_eq!(file.size(), Bytes::mib(1), "LOOP-4");
    let longer = file.remeasured().unwrap();
    assert_eq!(longer.size(), Bytes::mib(2));
    assert_eq!(opened(&longer).write(2 << 20, &[1; 512], Flags::empty()), Status::IoError);
    assert_eq!(opened(&longer).write((2 << 20) - 512, &[1; 512], Flags::empty()), Status::Ok);
    assert_eq!(opened(&file).read(1 << 20, 512).0, Status::IoError, "past what it was served as");
}

#[test]
fn resizing_sets_the_length_of_a_file_and_never_cuts_behind_a_limit() {
    let (_dir, path) = image();
    let file = buffered(&path);
    assert_eq!(file.resized(Bytes::mib(3)).unwrap().size(), Bytes::mib(3));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 << 20);
    let shorter = file.resized(Bytes::mib(2)).unwrap();
    assert_eq!(shorter.size(), Bytes::mib(2));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 << 20, "as long as someone may use the end");
    shorter.cut().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
    for (size, words) in [(1000, "give a multiple"), (0, "give a multiple"), (1 << 63, "give less")] {
        let why = file.resized(Bytes(size)).expect_err("refused").to_string();
        assert!(why.contains(words), "{why}");
    }
    drop((file, shorter));
    let spec = FileSpec { sizelimit: Some(Bytes::mib(1)), direct: Direct::Off, ..FileSpec::new(&path) };
    let limited = File::open(&spec).unwrap();
    let shorter = limited.resized(Bytes(65536)).unwrap();
    assert_eq!((shorter.size(), fact(&shorter, "sizelimit")), (Bytes(65536), "65536".to_owned()));
    shorter.cut().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20, "what lies behind stays");
    assert_eq!(shorter.resized(Bytes::mib(4)).unwrap().size(), Bytes::mib(4));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 << 20);
}

#[test]
fn a_read_only_file_is_replaced_by_one_of_equal_size_only() {
    let (dir, path) = image();
    let other = dir.path().join("other.img");
    std::fs::write(&other, vec![5; 1 << 20]).unwrap();
    let why = buffered(&path).replaced(other.clone()).expect_err("refused").to_string();
    assert!(why.contains("only a device with ro can change its file"), "{why}");
    let spec = FileSpec { ro: true, direct: Direct::Off, ..FileSpec::new(&path) };
    let file = File::open(&spec).unwrap();
    let changed = file.replaced(other.clone()).unwrap();
    assert_eq!(opened(&changed).read(0, 512), (Status::Ok, vec![5; 512]));
    assert_eq!(fact(&changed, "backing_file"), other.canonicalize().unwrap().display().to_string());
    set_len(&other, (1 << 20) + 512);
    let why = file.replaced(other.clone()).expect_err("refused").to_string();
    assert!(why.contains("give a file of equal size"), "{why}");
    std::fs::remove_file(&other).unwrap();
    assert!(file.replaced(other).is_err());
    assert!(fact(&changed, "backing_file").ends_with("other.img (deleted)"));
}
