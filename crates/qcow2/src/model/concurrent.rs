//! Runs several threads at once, each with its own sectors in clusters shared with the others, and applies
//! power cuts to copies of the disk.

use super::disk::{Faults, Medium, MemoryDisk};
use super::rng::Rng;
use super::run::{Base, shape};
use super::sectors::{Sectors, ZEROES, fill};
use crate::cache::SECTOR;
use crate::{CreateOptions, Disk, Options, SeededFault, Source, check, create};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

const THREADS: u64 = 4;
/// Number of consecutive sectors owned by one thread.
const PIECE: u64 = 8;

struct Shared {
    image: Disk,
    disk: Arc<MemoryDisk>,
    sectors: Mutex<Sectors>,
    all: u64,
    ended: AtomicBool,
}

fn stamps(base: Option<&Base>, all: u64) -> impl Iterator<Item = u64> {
    let in_base = base.map_or(0, Source::size) / SECTOR as u64;
    (0..all).map(move |sector| u64::from(sector < in_base))
}

impl Shared {
    /// Executes one request of one thread, and checks the data read.
    fn request(&self, rng: &mut Rng, thread: u64, number: u64) -> Result<(), String> {
        let pieces = self.all / PIECE / THREADS;
        // Half of the requests are close together, so that threads share clusters.
        let most = if rng.chance(500) { pieces } else { pieces.min(4) };
        let piece = rng.below(most);
        let start = (piece * THREADS + thread) * PIECE;
        let sectors = start..start + 1 + rng.below(PIECE);
        let (offset, len) = (start * SECTOR as u64, (sectors.end - start) * SECTOR as u64);
        let change = |stamp: u64, sure: bool, act: &dyn Fn() -> std::io::Result<()>| {
            self.sectors.lock().expect("no panic").begin(sectors.clone(), stamp);
            act().map_err(|error| error.to_string())?;
            self.sectors.lock().expect("no panic").end(sectors.clone(), stamp, sure);
            Ok(())
        };
        let zeroes = ZEROES + number * THREADS + thread;
        match rng.below(100) {
            0..45 => {
                let stamp = 2 + number * THREADS + thread;
                let mut bytes = vec![0; len as usize];
                for (sector, bytes) in sectors.clone().zip(bytes.chunks_exact_mut(SECTOR)) {
                    fill(bytes, sector, stamp);
                }
                change(stamp, true, &|| self.image.write(&bytes, offset))
            }
            45..60 => {
                change(zeroes, true, &|| self.image.write_zeroes(offset, len, number.is_multiple_of(7)))
            }
            60..70 => change(zeroes, false, &|| self.image.discard(offset, len)),
            70..78 => {
                let before = self.sectors.lock().expect("no panic").clone();
                self.image.flush().map_err(|error| error.to_string())?;
                self.sectors.lock().expect("no panic").flushed(&before);
                Ok(())
            }
            _ => {
                let mut bytes = vec![0; len as usize];
                self.image.read(&mut bytes, offset).map_err(|error| error.to_string())?;
                self.sectors.lock().expect("no panic").read(sectors.start, &bytes)
            }
        }
    }

    /// Returns copies of the disk, with the content that each may have.
    fn cuts(&self, wanted: usize) -> Vec<(Medium, Sectors)> {
        let mut cuts = Vec::new();
        while cuts.len() < wanted && !self.ended.load(SeqCst) {
            {
                // Everything on the disk was started before this point.
                let sectors = self.sectors.lock().expect("no panic");
                cuts.push((self.disk.medium(), sectors.clone()));
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        cuts
    }
}

fn check_cut(
    medium: &Medium,
    sectors: &Sectors,
    base: Option<&Base>,
    size: u64,
    rng: &mut Rng,
) -> Result<(), String> {
    let disk = Arc::new(MemoryDisk::new(medium.cut(rng), Rng::new(0)));
    let report = check(&*disk).map_err(|error| error.to_string())?;
    if report.too_low + report.flags > 0 {
        return Err(format!("after a cut: {report:?}"));
    }
    let backing = base.cloned().map(|base| Box::new(base) as Box<dyn Source>);
    let image = Disk::open(disk, backing, Options { writable: true, ..Options::default() });
    let image = image.map_err(|error| error.to_string())?;
    let mut bytes = vec![0; size as usize];
    image.read(&mut bytes, 0).map_err(|error| error.to_string())?;
    sectors.after_cut(&bytes).map(drop)
}

/// Runs the threads on one image, and returns the number of states checked.
fn run(seed: u64, fault: SeededFault, requests: u64) -> Result<usize, String> {
    let mut rng = Rng::new(seed);
    let mut options: CreateOptions = shape(&mut rng);
    if fault != SeededFault::None {
        // Use few clusters, shared by all threads.
        options = CreateOptions::new(512 << 10);
    }
    let size = options.size - options.size % (PIECE * THREADS * SECTOR as u64);
    let base = rng.chance(400).then(|| {
        let mut bytes = vec![0; rng.below(size / SECTOR as u64) as usize * SECTOR + SECTOR];
        for (sector, bytes) in bytes.chunks_exact_mut(SECTOR).enumerate() {
            fill(bytes, sector as u64, 1);
        }
        Base(Arc::new(bytes))
    });
    options.size = size;
    let disk = Arc::new(MemoryDisk::new(Vec::new(), Rng::new(seed)));
    create(&*disk, &options).map_err(|error| error.to_string())?;
    let backing = base.clone().map(|base| Box::new(base) as Box<dyn Source>);
    let caches = *rng.pick(&[0, 32 << 20]);
    let how = Options { writable: true, l2_cache_len: caches, refcount_cache_len: caches };
    let mut image = Disk::open(disk.clone(), backing, how).map_err(|error| error.to_string())?;
    image.fault = fault;
    disk.set_faults(Faults { len_max: u64::MAX, pauses: 60, ..Faults::default() });
    let all = size / SECTOR as u64;
    let sectors = Mutex::new(Sectors::new(stamps(base.as_ref(), all)));
    let shared = Shared { image, disk, sectors, all, ended: AtomicBool::new(false) };
    let cuts = std::thread::scope(|scope| {
        let shared = &shared;
        let work = |thread: u64| {
            let mut rng = Rng::new(seed << 8 | thread);
            (0..requests).try_for_each(|number| shared.request(&mut rng, thread, number))
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        let cutter = scope.spawn(|| shared.cuts(30));
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        shared.ended.store(true, SeqCst);
        let cuts = cutter.join().expect("no panic");
        results.into_iter().collect::<Result<Vec<_>, _>>().map(|_| cuts)
    })?;
    let mut bytes = vec![0; size as usize];
    shared.image.read(&mut bytes, 0).map_err(|error| error.to_string())?;
    shared.sectors.lock().expect("no panic").read(0, &bytes)?;
    for (medium, sectors) in &cuts {
        check_cut(medium, sectors, base.as_ref(), size, &mut rng)?;
    }
    Ok(cuts.len())
}

#[test]
fn threads_sharing_clusters_lose_no_data_and_power_cuts_preserve_flushed_data() {
    let states = super::number("BLOCKYARD_QCOW2_STATES").unwrap_or(60) as usize;
    let (mut checked, mut seed) = (0, 1);
    while checked < states {
        checked += run(seed, SeededFault::None, 200).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        seed += 1;
    }
    println!("{checked} crash states of {} runs, 0 bad", seed - 1);
}

#[test]
fn missing_range_locks_are_detected() {
    let found = (1..400).find_map(|seed| run(seed, SeededFault::NoRanges, 200).err());
    println!("{}", found.expect("a race is found"));
}
