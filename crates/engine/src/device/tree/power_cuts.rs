//! Commits of overlays, interrupted by a power cut or a kill after every step. All writes and flushes of the
//! origin and the overlay are recorded; then disk images are built from the first steps, with arbitrary
//! sectors of unflushed writes, and opened.

use super::commit::commit_opened;
use super::*;
use crate::spec::{LayerSpec, StackSpec};
use block::{Cookie, Op, Request, Segment, Status};
use layers::cow::format::Header;
use queue::{Cx, Node, Ring, Verdict};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const LEN: usize = 1 << 20;
const SECTOR: usize = 512;
const BASE: usize = 0;
const STORE: usize = 1;

/// An operation that a disk has completed.
enum Step {
    Write { disk: usize, at: usize, data: Vec<u8>, durable: bool },
    Flush { disk: usize },
}

type Steps = Arc<Mutex<Vec<Step>>>;

/// A layer that records the operations of a disk.
struct Recorder {
    disk: usize,
    steps: Steps,
}

struct RecorderNode {
    disk: usize,
    steps: Steps,
    child: NodeId,
}

impl Layer<KernelRing> for Recorder {
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        Ok(Profile { zero_copy_reads: false, ..below[0].clone() })
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<KernelRing>> {
        Box::new(RecorderNode { disk: self.disk, steps: self.steps.clone(), child: below[0] })
    }
}

impl Node<KernelRing> for RecorderNode {
    fn submit(&mut self, _: Cookie, _: &mut Request, _: &mut Cx<'_, KernelRing>) -> Verdict {
        Verdict::Down(self.child)
    }

    fn end_io(
        &mut self,
        _: Cookie,
        req: &mut Request,
        status: Status,
        cx: &mut Cx<'_, KernelRing>,
    ) -> Verdict {
        let (disk, at) = (self.disk, req.offset.0 as usize);
        let durable = req.flags.contains(block::Flags::FUA);
        let step = match req.op {
            Op::Write => {
                let pieces: Vec<Segment> = cx.segments(req.data, req.len.0).collect();
                let data = pieces.iter().flat_map(|piece| cx.ring.bytes(*piece).to_vec()).collect();
                Some(Step::Write { disk, at, data, durable })
            }
            Op::WriteZeroes => Some(Step::Write { disk, at, data: vec![0; req.len.0 as usize], durable }),
            Op::Flush => Some(Step::Flush { disk }),
            _ => None,
        };
        if status.is_ok() {
            self.steps.lock().unwrap_or_else(PoisonError::into_inner).extend(step);
        }
        Verdict::Up(status)
    }
}

/// A seeded generator: every run is the same.
struct Random(fastrand::Rng);

impl Random {
    fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// An origin and an overlay over it.
struct Pair {
    dir: tempfile::TempDir,
}

impl Pair {
    fn path(&self, disk: usize) -> PathBuf {
        self.dir.path().join(["base", "over"][disk])
    }

    /// Creates a pair with these contents.
    fn of(images: &[Vec<u8>; 2]) -> Pair {
        let pair = Pair { dir: tempfile::tempdir().unwrap() };
        images.iter().enumerate().for_each(|(disk, image)| std::fs::write(pair.path(disk), image).unwrap());
        pair
    }

    /// Creates a new pair with some data. Also returns the content of the device.
    fn new() -> (Pair, Vec<u8>) {
        let mut random = Random::new(7);
        let pair = Pair { dir: tempfile::tempdir().unwrap() };
        std::fs::write(pair.path(BASE), random.bytes(LEN)).unwrap();
        let tree = pair.open(&pair.path(BASE), false, true).unwrap();
        let mut device = SyncIo::new(&tree).unwrap();
        for (at, len) in [(0, 4096), (20480, 512), (65536 + 1024, 9000 / 512 * 512), (LEN - 4096, 4096)] {
            device.write(at as u64, &random.bytes(len)).unwrap();
        }
        device.write_zeroes(40960, 8192).unwrap();
        device.flush().unwrap();
        let model = content(&mut device);
        drop(device);
        (pair, model)
    }

    fn open(&self, base: &Path, writable: bool, create: bool) -> Result<Tree, DeviceError> {
        let ro = if writable { "" } else { ",ro" };
        let stack: StackSpec = format!("file:{}{ro}", base.display()).parse().unwrap();
        let made = if create { ",create" } else { "" };
        let layer: LayerSpec = format!("cow,file={}{made}", self.path(STORE).display()).parse().unwrap();
        let LayerSpec::Cow(spec) = layer else { panic!("an overlay") };
        cow::open(Tree::leaf(source::open(&stack, None)?), &spec)
    }

    /// Opens the pair with recorders below the overlay.
    fn recorded(&self, steps: &Steps) -> Tree {
        let Tree { element, extent, .. } = self.open(&self.path(BASE), true, false).unwrap();
        let Element::Layer(layer, below) = element else { panic!("an overlay is a layer") };
        let below = below.into_iter().enumerate().map(|(disk, tree)| {
            Tree::over(Arc::new(Recorder { disk, steps: steps.clone() }), vec![tree]).unwrap()
        });
        Tree::over(layer, below.collect()).unwrap().with_extent(extent)
    }

    fn images(&self) -> [Vec<u8>; 2] {
        [BASE, STORE].map(|disk| std::fs::read(self.path(disk)).unwrap())
    }
}

fn content(device: &mut SyncIo) -> Vec<u8> {
    let mut all = vec![0; LEN];
    device.read(0, &mut all).unwrap();
    all
}

/// Returns the content of the disks after a power cut, or, in a third of the cases, a kill after these steps.
fn cut(before: &[Vec<u8>; 2], steps: &[Step], random: &mut Random) -> [Vec<u8>; 2] {
    let mut images = before.clone();
    let is_kill = random.next().is_multiple_of(3);
    for (disk, image) in images.iter_mut().enumerate() {
        let is_flush = |step: &Step| matches!(step, Step::Flush { disk: of } if *of == disk);
        let flushed = steps.iter().rposition(is_flush).unwrap_or(0);
        for (number, step) in steps.iter().enumerate() {
            let Step::Write { disk: of, at, data, durable } = step else { continue };
            if *of != disk {
                continue;
            }
            // None of it, all of it, or any.
            let odds = [0, 2, 1][(random.next() % 3) as usize];
            for (sector, bytes) in data.chunks(SECTOR).enumerate() {
                if is_kill || number < flushed || *durable || random.next() % 2 < odds {
                    let at = at + sector * SECTOR;
                    image[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
    }
    images
}

/// Whether every sector is from one of two versions.
fn is_either(now: &[u8], one: &[u8], other: &[u8]) -> bool {
    let sectors = now.chunks(SECTOR).zip(one.chunks(SECTOR)).zip(other.chunks(SECTOR));
    sectors.into_iter().all(|((now, one), other)| now == one || now == other)
}

/// Interrupts a commit after every step, in several ways. Reads must return `old` or `new`, and a second
/// commit must complete it.
fn cut_everywhere(before: &[Vec<u8>; 2], steps: &[Step], old: &[u8], new: &[u8]) -> usize {
    let mut random = Random::new(99);
    let mut refused = 0;
    for count in 0..=steps.len() {
        let images = cut(before, &steps[..count], &mut random);
        let pair = Pair::of(&images);
        let header = Header::read(&images[STORE]).unwrap_or_else(|why| panic!("after {count} steps: {why}"));
        if header.committing {
            // Another origin of the same length.
            let stranger = pair.dir.path().join("stranger");
            std::fs::write(&stranger, random.bytes(LEN)).unwrap();
            let refusal = pair.open(&stranger, false, false).map(drop).unwrap_err().to_string();
            assert!(
                refusal.contains("not the origin that it was being written to"),
                "after {count} steps: {refusal}"
            );
            refused += 1;
        }
        let opened = pair.open(&pair.path(BASE), false, false);
        let tree = opened.unwrap_or_else(|why| panic!("after {count} steps of {}: {why}", steps.len()));
        let now = content(&mut SyncIo::new(&tree).unwrap());
        assert!(is_either(&now, old, new), "after {count} steps of {} other data is read", steps.len());
        assert!(count < steps.len() || now == new, "after all steps");
        drop(tree);
        commit_opened(pair.open(&pair.path(BASE), true, false).unwrap()).unwrap();
        assert!(std::fs::read(pair.path(BASE)).unwrap() == now, "after {count} steps and a second commit");
    }
    refused
}

#[test]
fn a_power_cut_during_a_commit_loses_nothing_and_the_origin_is_recognised() {
    let (pair, model) = Pair::new();
    let before = pair.images();
    let steps = Steps::default();
    commit_opened(pair.recorded(&steps)).unwrap();
    let steps = std::mem::take(&mut *steps.lock().unwrap());
    assert!(pair.images()[BASE] == model);
    let refused = cut_everywhere(&before, &steps, &model, &model);
    assert!(refused > 4, "a stranger was tried {refused} times");
}

#[test]
fn a_power_cut_during_a_commit_with_running_clients_loses_nothing() {
    let (pair, model) = Pair::new();
    let before = pair.images();
    let steps = Steps::default();
    let tree = pair.recorded(&steps);
    let base = tree.children()[BASE].clone();
    let mut commit = Commit::of_parts(&tree, base).unwrap();
    commit.copy_down(&tree, Clients::Running).unwrap();
    let mut new = model.clone();
    let mut device = SyncIo::new(&tree).unwrap();
    // Beside data, over data, and at the end of what was never written: also in sampled chunks, as so small
    // an origin is sampled everywhere.
    for (at, len) in [(4096, 1024), (20480, 4096), (200_704, 65536), (LEN - 8192, 4096)] {
        let data = Random::new(at as u64).bytes(len);
        device.write(at as u64, &data).unwrap();
        new[at..at + len].copy_from_slice(&data);
    }
    drop(device);
    commit.copy_down(&tree, Clients::Running).unwrap();
    commit.copy_rest(&tree).unwrap();
    let emptied = commit.complete(&tree).unwrap();
    free_space(&emptied).unwrap();
    let steps = std::mem::take(&mut *steps.lock().unwrap());
    assert!(pair.images()[BASE] == new);
    cut_everywhere(&before, &steps, &model, &new);
}
