//! Tests images that are damaged or full, or have properties that the model does not cover.

use crate::header::{AT_AUTOCLEAR, AT_INCOMPATIBLE, CORRUPT, DIRTY, word};
use crate::model::disk::{Faults, MemoryDisk};
use crate::model::rng::Rng;
use crate::{CreateOptions, Disk, Options, Report, Storage, check, create};
use std::io::{self, ErrorKind};
use std::sync::Arc;

const LEN: u64 = 1 << 20;
const CLUSTER: u64 = 4096;

fn disk(file: Vec<u8>) -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(file, Rng::new(1)))
}

fn open(disk: &Arc<MemoryDisk>, writable: bool) -> io::Result<Disk> {
    Disk::open(disk.clone(), None, Options { writable, ..Options::default() })
}

/// Returns a closed image with some data.
fn image() -> Arc<MemoryDisk> {
    let disk = disk(Vec::new());
    create(&*disk, &CreateOptions { cluster_size: CLUSTER, ..CreateOptions::new(LEN) }).unwrap();
    let image = open(&disk, true).unwrap();
    image.write(&[7; 8 * 4096], 0).unwrap();
    image.write(&[8; 4096], LEN - CLUSTER).unwrap();
    drop(image);
    disk
}

fn put(disk: &MemoryDisk, at: u64, value: u64) {
    disk.write_at(&value.to_be_bytes(), at).unwrap();
}

fn header(disk: &MemoryDisk, at: usize) -> u64 {
    word(&disk.now(), at)
}

/// Returns whether the image has the data of [`image`], and keeps it when more is written.
fn keeps_its_data(disk: &Arc<MemoryDisk>) -> bool {
    let image = open(disk, true).unwrap();
    image.write(&[9; 40 * 4096], 64 << 10).unwrap();
    image.flush().unwrap();
    let (mut first, mut last) = ([0; 8 * 4096], [0; 4096]);
    image.read(&mut first, 0).unwrap();
    image.read(&mut last, LEN - CLUSTER).unwrap();
    drop(image);
    first == [7; 8 * 4096] && last == [8; 4096] && check(&**disk).unwrap() == Report::default()
}

#[test]
fn low_refcounts_are_repaired_before_any_write() {
    let disk = image();
    let table = header(&disk, 48);
    let block = word(&disk.now(), table as usize);
    disk.write_at(&[0; 4000], block + 8).unwrap();
    assert!(check(&*disk).unwrap().too_low > 8);
    assert!(keeps_its_data(&disk));
    // The whole refcount block is missing.
    let disk = image();
    put(&disk, table, 0);
    assert!(keeps_its_data(&disk));
}

#[test]
fn a_wrong_copied_flag_is_cleared() {
    let disk = image();
    let l2 = word(&disk.now(), header(&disk, 40) as usize) & 0x00ff_ffff_ffff_fe00;
    let first = word(&disk.now(), l2 as usize);
    // Two entries refer to one cluster, both with the COPIED flag.
    put(&disk, l2 + 100 * 8, first);
    let image = open(&disk, true).unwrap();
    image.write(&[1; 4096], 100 * CLUSTER).unwrap();
    let mut bytes = [0; 4096];
    image.read(&mut bytes, 0).unwrap();
    assert!(bytes == [7; 4096], "it is written elsewhere");
}

#[test]
fn images_that_writing_would_destroy_are_read_only() {
    let l1 = |disk: &MemoryDisk| header(disk, 40);
    let l2 = |disk: &MemoryDisk| word(&disk.now(), l1(disk) as usize) & 0x00ff_ffff_ffff_fe00;
    type Damage<'a> = &'a dyn Fn(&MemoryDisk);
    let damages: [(&str, Damage<'_>); 7] = [
        ("refers to another table", &|disk| put(disk, l2(disk), l1(disk) | 1 << 63)),
        ("refers past the end", &|disk| put(disk, l2(disk), 1 << 40 | 1 << 63)),
        ("unaligned offset", &|disk| put(disk, l2(disk), 0x200 | 1 << 63)),
        ("without a table", &|disk| put(disk, l1(disk), 1 << 40 | 1 << 63)),
        ("overlap", &|disk| put(disk, 40, header(disk, 48))),
        ("marked as corrupt", &|disk| put(disk, AT_INCOMPATIBLE as u64, CORRUPT)),
        ("past the end of the file", &|disk| put(disk, header(disk, 48), 1 << 40)),
    ];
    for (expected, damage) in damages {
        let disk = image();
        damage(&disk);
        let before = disk.now();
        let refused = open(&disk, true).map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidData, "{refused}");
        assert!(refused.to_string().contains(expected), "{refused}");
        assert!(disk.now() == before, "{expected}: nothing is written");
        assert!(open(&disk, false).is_ok(), "{expected}");
    }
}

#[test]
fn refcounts_of_a_dirty_image_are_rebuilt() {
    let disk = image();
    put(&disk, AT_INCOMPATIBLE as u64, DIRTY);
    let block = word(&disk.now(), header(&disk, 48) as usize);
    disk.write_at(&[0, 5, 0, 0, 0, 9], block + 8).unwrap();
    assert!(open(&disk, false).is_ok() && header(&disk, AT_INCOMPATIBLE) == DIRTY);
    assert!(keeps_its_data(&disk));
    assert_eq!(header(&disk, AT_INCOMPATIBLE), 0);
}

#[test]
fn autoclear_features_go_before_the_first_write() {
    let disk = image();
    put(&disk, AT_AUTOCLEAR as u64, 0b111);
    let image = open(&disk, true).unwrap();
    assert_eq!(header(&disk, AT_AUTOCLEAR), 1, "unknown features are cleared on opening");
    image.write(&[1; 512], 0).unwrap();
    assert_eq!(header(&disk, AT_AUTOCLEAR), 0);
}

#[test]
fn the_refcount_table_grows_with_the_image() {
    let disk = disk(Vec::new());
    let options = CreateOptions { cluster_size: 512, refcount_order: 6, ..CreateOptions::new(9 << 20) };
    create(&*disk, &options).unwrap();
    let before = header(&disk, 48);
    let content: Vec<u8> = (0..9 << 17u32).flat_map(|word: u64| word.to_be_bytes()).collect();
    let image = open(&disk, true).unwrap();
    image.write(&content, 0).unwrap();
    image.flush().unwrap();
    assert_ne!(header(&disk, 48), before);
    drop(image);
    assert_eq!(check(&*disk).unwrap(), Report::default());
    let mut read = vec![0; content.len()];
    open(&disk, false).unwrap().read(&mut read, 0).unwrap();
    assert!(read == content);
}

#[test]
fn a_write_without_space_fails_and_succeeds_once_there_is_space() {
    let disk = image();
    let image = open(&disk, true).unwrap();
    let len_max = disk.len().unwrap();
    disk.set_faults(Faults { len_max, ..Faults::default() });
    assert_eq!(image.write(&[1; 64 << 10], 512 << 10).unwrap_err().kind(), ErrorKind::StorageFull);
    image.flush().unwrap();
    image.write(&[2; 4096], 0).expect("in place");
    // Discarded clusters provide space without a flush by the client.
    image.discard(CLUSTER, 4 * CLUSTER).unwrap();
    image.write(&[3; 4096], 600 << 10).unwrap();
    disk.set_faults(Faults { len_max: u64::MAX, ..Faults::default() });
    image.write(&[1; 64 << 10], 512 << 10).unwrap();
    drop(image);
    assert_eq!(check(&*disk).unwrap(), Report::default());
}

#[test]
fn nothing_is_written_after_a_failed_sync() {
    let disk = image();
    let image = open(&disk, true).unwrap();
    image.write(&[1; 512], 512 << 10).unwrap();
    disk.set_faults(Faults { syncs: 1000, len_max: u64::MAX, ..Faults::default() });
    assert!(image.flush().is_err() && image.has_failed());
    disk.set_faults(Faults { len_max: u64::MAX, ..Faults::default() });
    let before = disk.now();
    assert!(image.flush().is_err() && image.write(&[1; 512], 0).is_err() && image.discard(0, LEN).is_err());
    assert!(image.read(&mut [0; 512], 0).is_ok());
    drop(image);
    assert!(disk.now() == before);
}

#[test]
fn the_end_of_a_disk_within_a_cluster_is_zeroed() {
    let disk = disk(Vec::new());
    let size = 3 * 65536 + 5 * 512;
    create(&*disk, &CreateOptions::new(size)).unwrap();
    let image = open(&disk, true).unwrap();
    for (offset, keep) in [(size - 512, false), (size - 1024, true), (size - 5 * 512, false), (65536, false)]
    {
        image.write(&vec![7; size as usize], 0).unwrap();
        image.write_zeroes(offset, size - offset, keep).unwrap();
        let mut read = vec![1; size as usize];
        image.read(&mut read, 0).unwrap();
        let zeroes = read.iter().rev().take_while(|byte| **byte == 0).count() as u64;
        assert_eq!(zeroes, size - offset);
        image.discard(offset, size - offset).unwrap();
    }
}
