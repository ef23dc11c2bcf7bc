//! Tests that a raw disk stays raw: writes to the head that are refused.

use super::*;
use crate::{Backend, HEAD_LEN};
use block::Request;
use queue::Ring as _;

const QCOW2: &[u8] = b"QFI\xfb\0\0\0\x03";

fn protected(path: &std::path::Path, facts: Facts) -> (Arc<FileState>, Harness) {
    let head = (HEAD_LEN as u64 - facts.start.0) as u32;
    with_facts(path, Facts { head, ..facts })
}

/// Returns a sector that begins with these bytes.
fn sector(beginning: &[u8]) -> Vec<u8> {
    let mut sector = vec![0x55; HEAD_LEN];
    sector[..beginning.len()].copy_from_slice(beginning);
    sector
}

fn begins(path: &std::path::Path) -> Vec<u8> {
    std::fs::read(path).unwrap()[..HEAD_LEN].to_vec()
}

#[test]
fn no_write_gives_a_raw_disk_an_image_header() {
    let (_dir, path) = image();
    let direct = Some(Alignment { memory: 512, offset: 512 });
    for facts in
        [buffered_facts(), Facts { memory: true, ..buffered_facts() }, Facts { direct, ..buffered_facts() }]
    {
        let (shared, mut disk) = protected(&path, facts);
        let before = begins(&path);
        for beginning in [QCOW2, b"KDMV", b"vhdxfile", b"conectix", b"# Disk DescriptorFile", b"QED\0"] {
            for len in [HEAD_LEN, 8192] {
                let mut data = sector(beginning);
                data.resize(len, 7);
                for flags in [Flags::empty(), Flags::FUA] {
                    assert_eq!(disk.write(0, &data, flags), Status::NotPermitted, "{beginning:?}");
                }
                assert_eq!(begins(&path), before);
            }
        }
        assert!(shared.refused_head().is_some());
        // Raw disks commonly begin with these bytes.
        for beginning in [&b"\xeb\x63\x90"[..], b"LUKS\xba\xbe", b"\x1f\x8b", b"QFI"] {
            assert_eq!(disk.write(0, &sector(beginning), Flags::FUA), Status::Ok);
            assert_eq!(begins(&path), sector(beginning));
        }
        assert_eq!(
            disk.write(512, &sector(QCOW2), Flags::empty()),
            Status::Ok,
            "only the first sector counts"
        );
        assert_eq!(disk.write(0, &content(0, 4096), Flags::empty()), Status::Ok);
        assert_eq!(disk.ring.memory.live, 0, "no memory is kept");
    }
}

#[test]
fn several_writes_together_give_a_raw_disk_no_image_header() {
    let (_dir, path) = image();
    let (_, mut disk) = protected(&path, buffered_facts());
    let kept = begins(&path);
    assert_eq!(disk.write(0, b"QF", Flags::empty()), Status::Ok);
    assert_eq!(disk.write(2, b"I\xfb", Flags::empty()), Status::NotPermitted);
    assert_eq!(disk.write_segments(1, b"FI\xfb", &[1, 2]), Status::NotPermitted);
    assert_eq!(disk.write(3, b"\xfb", Flags::empty()), Status::Ok);
    assert_eq!(disk.write_segments(2, b"I\0\0", &[2, 1]), Status::Ok, "it overwrites what would complete it");
    assert_eq!(disk.write(3, b"\xfb", Flags::empty()), Status::NotPermitted);
    assert_eq!(begins(&path)[5..], kept[5..], "what is beside the bytes stays");
    // Zeroes can complete a header as well.
    assert_eq!(disk.write(0, b"QED1", Flags::empty()), Status::Ok);
    for op in [Op::WriteZeroes, Op::Discard] {
        assert_eq!(disk.bare(op, 3, 100), Status::NotPermitted, "{op:?}");
    }
    assert_eq!(begins(&path)[..4], *b"QED1");
    assert_eq!(disk.bare(Op::WriteZeroes, 0, 4096), Status::Ok);
    assert_eq!(disk.bare(Op::Discard, 0, 4096), Status::Ok);
    assert_eq!(begins(&path), [0; HEAD_LEN]);
}

#[test]
fn concurrent_requests_give_a_raw_disk_no_image_header() {
    let (_dir, path) = image();
    let (shared, mut disk) = protected(&path, buffered_facts());
    let node = FileNode::new(Arc::clone(&shared), FileId(0));
    let handle = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut other = Harness::with_files(Box::new(node), vec![handle]);
    let start = |disk: &mut Harness, at: u64, data: &[u8]| {
        let memory = disk.memory(data.len() as u32, 0);
        disk.ring.bytes_mut(memory).copy_from_slice(data);
        disk.submit(Request::new(Op::Write, Bytes(at), Bytes(data.len() as u64)), &[memory]);
    };
    // Both writes are in flight before either has read the head.
    start(&mut disk, 0, b"QF");
    start(&mut disk, 2, b"I\xfb");
    let statuses: Vec<Status> = disk.drain().into_iter().map(|end| end.0).collect();
    assert_eq!(statuses, [Status::Ok, Status::NotPermitted]);
    // Requests on two queues are refused alike.
    start(&mut disk, 0, b"KD");
    other.submit(Request::new(Op::WriteZeroes, Bytes(0), Bytes(4)), &[]);
    assert_eq!(disk.drain()[0].0, Status::Ok);
    assert_eq!(other.drain()[0].0, Status::Ok);
    assert_eq!(begins(&path)[..4], [0; 4], "they were done one after the other");
}

#[test]
fn the_head_is_that_of_the_file_not_of_the_device() {
    let (_dir, path) = image();
    let facts = Facts { start: Bytes(100), ..buffered_facts() };
    std::fs::write(&path, [&b"# Disk"[..], &[b' '; 94], &content(0, 1 << 20)].concat()).unwrap();
    let (_, mut disk) = protected(&path, facts);
    assert_eq!(disk.write(0, QCOW2, Flags::empty()), Status::Ok, "the file begins elsewhere");
    assert_eq!(disk.write(0, b"\nversion=1\n", Flags::empty()), Status::NotPermitted);
    assert_eq!(disk.write(0, &sector(b"\nversion=1\n"), Flags::empty()), Status::NotPermitted);
    let (_, mut far) = with_facts(&path, Facts { start: Bytes(512), ..buffered_facts() });
    assert_eq!(far.write(0, &sector(QCOW2), Flags::empty()), Status::Ok);
}

#[test]
fn requests_outside_the_head_are_served_as_usual() {
    let (_dir, path) = image();
    let (_, mut disk) = protected(&path, buffered_facts());
    assert_eq!(disk.write(512, &[1; 512], Flags::empty()), Status::Ok);
    assert_eq!(disk.read(0, 4096).0, Status::Ok);
    // A write that covers the head needs no read.
    disk.ring.files.asked.clear();
    assert_eq!(disk.write(0, &[1; 4096], Flags::empty()), Status::Ok);
    // The write is done inline or by the ring: after a write of more than a millisecond the ring does the
    // next one.
    let ops: Vec<FileOp> = disk.ring.files.asked.iter().map(|asked| asked.op).collect();
    assert_eq!(ops, [FileOp::Write { offset: 0, durable: false }]);
}

#[test]
fn memory_that_only_the_kernel_can_access_is_copied_and_checked() {
    let (_dir, path) = image();
    let shared = FileState::new(Facts { head: HEAD_LEN as u32, ..buffered_facts() });
    let node = FileNode::new(shared, FileId(0)).with_sync_file(FileId(1)).with_scratch_file(FileId(2));
    let open = || std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut disk = Harness::with_files(Box::new(node), vec![open(), open(), tempfile::tempfile().unwrap()]);
    disk.ring.files.opaque = true;
    let before = begins(&path);
    let mut data = sector(QCOW2);
    data.resize(8192, 7);
    assert_eq!(disk.write(0, &data, Flags::empty()), Status::NotPermitted);
    assert_eq!(begins(&path), before);
    data[0] = b'q';
    for flags in [Flags::empty(), Flags::FUA] {
        assert_eq!(disk.write(0, &data, flags), Status::Ok);
        assert_eq!(std::fs::read(&path).unwrap()[..8192], data);
    }
    assert_eq!(disk.ring.memory.live, 0);
    // Without a scratch file, data that cannot be checked is not written.
    let shared = FileState::new(Facts { head: HEAD_LEN as u32, ..buffered_facts() });
    let node = FileNode::new(shared, FileId(0)).with_sync_file(FileId(1));
    let mut disk = Harness::with_files(Box::new(node), vec![open(), open()]);
    disk.ring.files.opaque = true;
    assert_eq!(disk.write(0, &data, Flags::empty()), Status::NotPermitted);
}

#[test]
fn a_file_with_an_image_header_is_opened_only_with_format_raw() {
    let (_dir, path) = image();
    let spec = FileSpec { stays_raw: true, ..FileSpec::new(&path) };
    let file = File::open(&spec).unwrap();
    assert!(file.describe().iter().any(|(name, what)| *name == "format" && what.contains("none was given")));
    drop(file);
    for (beginning, hint) in [(QCOW2, "add format=qcow2"), (b"vhdxfile", "convert it with qemu-img")] {
        std::fs::write(&path, [beginning, &content(0, 1 << 20)].concat()).unwrap();
        let why = File::open(&spec).unwrap_err().to_string();
        assert!(why.contains("it begins as a ") && why.contains(hint), "{why}");
        assert!(why.contains("add format=raw to serve the file as it is"), "{why}");
        let file = File::open(&FileSpec::new(&path)).unwrap();
        assert_eq!(file.shared().facts().head, 0);
    }
}
