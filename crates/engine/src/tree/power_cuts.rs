//! Commits of overlays, cut short by the power or a kill at every step: all that the origin and the overlay are told is written down,
//! then disks are made of the first steps of it, with any sectors of what was not flushed, and opened.

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

/// What a disk was told, once it had done it.
enum Step {
    /// Empty: a flush.
    Write {
        disk: usize,
        at: usize,
        data: Vec<u8>,
        durable: bool,
    },
    Flush {
        disk: usize,
    },
}

type Steps = Arc<Mutex<Vec<Step>>>;

/// Writes down what goes to a disk.
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
        Ok(Profile { lends: false, ..below[0].clone() })
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
        let durable = req.flags.has(block::Flags::FUA);
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

/// A seeded generator: each run is the same.
struct Chance(fastrand::Rng);

impl Chance {
    fn new(seed: u64) -> Chance {
        Chance(fastrand::Rng::with_seed(seed))
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

    /// Which has these contents.
    fn of(images: &[Vec<u8>; 2]) -> Pair {
        let pair = Pair { dir: tempfile::tempdir().unwrap() };
        images.iter().enumerate().for_each(|(disk, image)| std::fs::write(pair.path(disk), image).unwrap());
        pair
    }

    /// One that is new, with something in it; also what the device holds.
    fn new() -> (Pair, Vec<u8>) {
        let mut chance = Chance::new(7);
        let pair = Pair { dir: tempfile::tempdir().unwrap() };
        std::fs::write(pair.path(BASE), chance.bytes(LEN)).unwrap();
        let tree = pair.open(&pair.path(BASE), false, true).unwrap();
        let mut device = Scratch::new(&tree).unwrap();
        for (at, len) in [(0, 4096), (20480, 512), (65536 + 1024, 9000 / 512 * 512), (LEN - 4096, 4096)] {
            device.write(at as u64, &chance.bytes(len)).unwrap();
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
        cow::open(Tree::leaf(Source::open(&stack)?), &spec)
    }

    /// The same, whose disks' steps are written down.
    fn recorded(&self, steps: &Steps) -> Tree {
        let Tree { element, extent, .. } = self.open(&self.path(BASE), true, false).unwrap();
        let Element::Layer(layer, below) = element else { panic!("an overlay is a layer") };
        let below = below.into_iter().enumerate().map(|(disk, tree)| {
            Tree::over(Arc::new(Recorder { disk, steps: steps.clone() }), vec![tree]).unwrap()
        });
        Tree::over(layer, below.collect()).unwrap().sized_by(extent)
    }

    fn images(&self) -> [Vec<u8>; 2] {
        [BASE, STORE].map(|disk| std::fs::read(self.path(disk)).unwrap())
    }
}

fn content(device: &mut Scratch) -> Vec<u8> {
    let mut all = vec![0; LEN];
    device.read(0, &mut all).unwrap();
    all
}

/// What the disks hold when the power goes after these steps, or, every third time, the process is killed.
fn cut(before: &[Vec<u8>; 2], steps: &[Step], chance: &mut Chance) -> [Vec<u8>; 2] {
    let mut images = before.clone();
    let is_kill = chance.next().is_multiple_of(3);
    for (disk, image) in images.iter_mut().enumerate() {
        let is_flush = |step: &Step| matches!(step, Step::Flush { disk: of } if *of == disk);
        let flushed = steps.iter().rposition(is_flush).unwrap_or(0);
        for (number, step) in steps.iter().enumerate() {
            let Step::Write { disk: of, at, data, durable } = step else { continue };
            if *of != disk {
                continue;
            }
            // None of it, all of it, or any.
            let odds = [0, 2, 1][(chance.next() % 3) as usize];
            for (sector, bytes) in data.chunks(SECTOR).enumerate() {
                if is_kill || number < flushed || *durable || chance.next() % 2 < odds {
                    let at = at + sector * SECTOR;
                    image[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
    }
    images
}

/// Every sector is that of one of these.
fn is_either(now: &[u8], one: &[u8], other: &[u8]) -> bool {
    let sectors = now.chunks(SECTOR).zip(one.chunks(SECTOR)).zip(other.chunks(SECTOR));
    sectors.into_iter().all(|((now, one), other)| now == one || now == other)
}

/// Cut it short after every step, in several ways. What is read is `old` or `new`, and a second commit brings it down.
fn cut_everywhere(before: &[Vec<u8>; 2], steps: &[Step], old: &[u8], new: &[u8]) -> usize {
    let mut chance = Chance::new(99);
    let mut refused = 0;
    for count in 0..=steps.len() {
        let images = cut(before, &steps[..count], &mut chance);
        let pair = Pair::of(&images);
        let header = Header::read(&images[STORE]).unwrap_or_else(|why| panic!("after {count} steps: {why}"));
        if header.committing {
            // As long, and something else.
            let stranger = pair.dir.path().join("stranger");
            std::fs::write(&stranger, chance.bytes(LEN)).unwrap();
            let said = pair.open(&stranger, false, false).map(drop).unwrap_err().to_string();
            assert!(said.contains("not what it was being written to"), "after {count} steps: {said}");
            refused += 1;
        }
        let opened = pair.open(&pair.path(BASE), false, false);
        let tree = opened.unwrap_or_else(|why| panic!("after {count} steps of {}: {why}", steps.len()));
        let now = content(&mut Scratch::new(&tree).unwrap());
        assert!(is_either(&now, old, new), "after {count} steps of {} something else is read", steps.len());
        assert!(count < steps.len() || now == new, "after all of it");
        drop(tree);
        commit_opened(pair.open(&pair.path(BASE), true, false).unwrap()).unwrap();
        assert!(std::fs::read(pair.path(BASE)).unwrap() == now, "after {count} steps and a second commit");
    }
    refused
}

#[test]
fn a_commit_that_the_power_cuts_short_loses_nothing_and_knows_its_origin() {
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
fn a_commit_beside_its_clients_that_the_power_cuts_short_loses_nothing() {
    let (pair, model) = Pair::new();
    let before = pair.images();
    let steps = Steps::default();
    let tree = pair.recorded(&steps);
    let base = tree.children()[BASE].clone();
    let mut commit = Commit::of_parts(&tree, base).unwrap();
    commit.carry(&tree, Clients::GoOn).unwrap();
    let mut new = model.clone();
    let mut device = Scratch::new(&tree).unwrap();
    // Beside what is there, over what is there, and at the end of what nobody has written yet: where the origin is
    // recognised, too, for it is by all of so small a one.
    for (at, len) in [(4096, 1024), (20480, 4096), (200_704, 65536), (LEN - 8192, 4096)] {
        let data = Chance::new(at as u64).bytes(len);
        device.write(at as u64, &data).unwrap();
        new[at..at + len].copy_from_slice(&data);
    }
    drop(device);
    commit.carry(&tree, Clients::GoOn).unwrap();
    commit.finish(&tree).unwrap();
    let emptied = commit.settle(&tree).unwrap();
    give_back(&emptied).unwrap();
    let steps = std::mem::take(&mut *steps.lock().unwrap());
    assert!(pair.images()[BASE] == new);
    cut_everywhere(&before, &steps, &model, &new);
}
