//! A single run of the model.

use super::disk::{Faults, MemoryDisk};
use super::rng::Rng;
use super::sectors::{Sectors, Stamp, ZEROES, fill};
use crate::cache::SECTOR;
use crate::{CreateOptions, Disk, Options, Report, SeededFault, Source, check, create};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of requests per run.
const REQUESTS: u64 = 60;
/// Stamp of a backing file's content.
const BASE: Stamp = 1;

/// A backing file in memory.
#[derive(Clone)]
pub(crate) struct Base(pub(crate) Arc<Vec<u8>>);

impl Source for Base {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        into.copy_from_slice(&self.0[at as usize..at as usize + into.len()]);
        Ok(())
    }

    fn mapping(&self, _: u64, len: u64) -> io::Result<(bool, u64)> {
        Ok((false, len))
    }
}

/// A directory for states that QEMU checks.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let memory = Path::new("/dev/shm");
        let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let folder =
            base.join(format!("blockyard-qcow2.{}.{}", std::process::id(), NEXT.fetch_add(1, Relaxed)));
        std::fs::create_dir_all(&folder).expect("a folder");
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) struct Run {
    rng: Rng,
    fault: SeededFault,
    /// Whether qemu-img is available; it checks one in `qemu_every` states.
    qemu: bool,
    qemu_every: u64,
    folder: Folder,
    options: Options,
    base: Option<Base>,
    size: u64,
    cluster: u64,
    disk: Arc<MemoryDisk>,
    image: Option<Disk>,
    sectors: Sectors,
    next: Stamp,
    shape: String,
    /// Content of an internal snapshot.
    snapshot: Option<Vec<u8>>,
    /// Whether a fault was injected, which may leak clusters.
    failed_once: bool,
    /// Number of states checked, and of those checked by QEMU.
    pub(crate) states: u64,
    pub(crate) by_qemu: u64,
}

/// Returns a random shape of an image, which is small, so that it has many tables.
pub(crate) fn shape(rng: &mut Rng) -> CreateOptions {
    let bits = *rng.pick(&[9, 9, 9, 10, 12, 12, 14, 16, 16]);
    let bits = if rng.chance(10) { 21 } else { bits };
    let cluster = 1u64 << bits;
    let sectors = match bits {
        9 => 1000 + rng.below(5000),
        21 => 3 << 12,
        _ => 800 + rng.below(4000),
    };
    let version = if rng.chance(250) { 2 } else { 3 };
    if rng.chance(150) {
        // The refcount table counts only 2 MiB, and has to grow.
        let size = (5000 + rng.below(3000)) * SECTOR as u64;
        return CreateOptions { cluster_size: 512, refcount_order: 6, ..CreateOptions::new(size) };
    }
    CreateOptions {
        version,
        cluster_size: cluster,
        refcount_order: if version == 2 { 4 } else { *rng.pick(&[0, 1, 2, 3, 4, 4, 5, 6, 6]) },
        extended_l2: version == 3 && bits >= 14 && rng.chance(300),
        ..CreateOptions::new(sectors * SECTOR as u64)
    }
}

/// Creates an image with QEMU, with data that may be compressed or in a snapshot. Returns its file, and
/// whether it has a snapshot.
fn made_by_qemu(
    rng: &mut Rng,
    options: &CreateOptions,
    folder: &Folder,
    stamps: &mut [Stamp],
) -> (Vec<u8>, bool) {
    let mut content = vec![0; options.size as usize];
    for (first, run) in stamps.chunks_mut(8).enumerate() {
        if rng.chance(500) {
            for (number, stamp) in run.iter_mut().enumerate() {
                let sector = first * 8 + number;
                *stamp = BASE;
                fill(&mut content[sector * SECTOR..(sector + 1) * SECTOR], sector as u64, BASE);
            }
        }
    }
    std::fs::write(folder.0.join("content.raw"), &content).expect("a file");
    let compat = if options.version == 2 { "0.10" } else { "1.1" };
    let (cluster, bits) = (options.cluster_size, 1 << options.refcount_order);
    let mut how = format!("cluster_size={cluster},compat={compat}");
    if options.version > 2 {
        how +=
            &format!(",refcount_bits={bits},extended_l2={}", if options.extended_l2 { "on" } else { "off" });
        how += *rng.pick(&["", ",compression_type=zstd", ",lazy_refcounts=on"]);
    }
    let run = |arguments: &[&str]| {
        let out = Command::new("qemu-img").current_dir(&folder.0).args(arguments).output();
        out.is_ok_and(|out| out.status.success())
    };
    let compress: &[&str] = if rng.chance(600) { &["-c"] } else { &[] };
    run(&[&["convert", "-f", "raw", "-O", "qcow2", "-o", &how], compress, &["content.raw", "made.qcow2"]]
        .concat());
    let is_snapshot = options.refcount_order > 0 && rng.chance(600);
    if is_snapshot {
        run(&["snapshot", "-c", "one", "made.qcow2"]);
    }
    (std::fs::read(folder.0.join("made.qcow2")).expect("a file"), is_snapshot)
}

impl Run {
    pub(crate) fn new(seed: u64, fault: SeededFault) -> Run {
        let mut rng = Rng::new(seed);
        let mut options = shape(&mut rng);
        let size = options.size;
        let base_len = rng.chance(400).then(|| (rng.below(size / SECTOR as u64) + 1) * SECTOR as u64);
        let base = base_len.map(|len| {
            let mut bytes = vec![0; len as usize];
            for (sector, bytes) in bytes.chunks_exact_mut(SECTOR).enumerate() {
                fill(bytes, sector as u64, BASE);
            }
            Base(Arc::new(bytes))
        });
        options.backing = base.as_ref().map(|_| (b"base.raw".to_vec(), b"raw".to_vec()));
        if options.cluster_size < 1024 && base.is_some() {
            // The name of the backing file has to fit into the first cluster.
            options.cluster_size = 1024;
        }
        let folder = Folder::new();
        if let Some(base) = &base {
            std::fs::write(folder.0.join("base.raw"), &*base.0).expect("a file");
        }
        let qemu = Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_ok();
        let mut stamps: Vec<Stamp> = (0..size / SECTOR as u64)
            .map(|sector| {
                let in_base = base.as_ref().is_some_and(|base| sector * (SECTOR as u64) < base.size());
                if in_base { BASE } else { 0 }
            })
            .collect();
        let mut snapshot = None;
        let file = if qemu && base.is_none() && rng.chance(350) {
            let (made, is_snapshot) = made_by_qemu(&mut rng, &options, &folder, &mut stamps);
            snapshot = is_snapshot.then(|| std::fs::read(folder.0.join("content.raw")).expect("a file"));
            made
        } else {
            Vec::new()
        };
        let is_new = file.is_empty();
        let disk = Arc::new(MemoryDisk::new(file, Rng::new(seed ^ 0x5a5a)));
        if is_new {
            create(&*disk, &options).expect("an image");
        }
        let caches = *rng.pick(&[0, 0, 16 << 10, 32 << 20]);
        Run {
            qemu,
            qemu_every: if super::number("BLOCKYARD_QCOW2_STATES").is_some() { 1 } else { 5 },
            snapshot,
            options: Options { writable: true, l2_cache_len: caches, refcount_cache_len: caches },
            shape: format!("{options:?}"),
            sectors: Sectors::new(stamps.into_iter()),
            cluster: options.cluster_size,
            next: BASE + 1,
            image: None,
            failed_once: false,
            states: 0,
            by_qemu: 0,
            rng,
            fault,
            folder,
            base,
            size,
            disk,
        }
    }

    pub(crate) fn without_qemu(mut self) -> Run {
        self.qemu = false;
        self
    }

    pub(crate) fn go(mut self) -> Result<Run, String> {
        let shape = self.shape.clone();
        self.requests().map_err(|why| format!("{why}\n{shape}"))?;
        Ok(self)
    }

    fn backing(&self) -> Option<Box<dyn Source>> {
        self.base.clone().map(|base| Box::new(base) as Box<dyn Source>)
    }

    fn open(&self, disk: Arc<MemoryDisk>) -> io::Result<Disk> {
        let mut image = Disk::open(disk, self.backing(), self.options)?;
        image.fault = self.fault;
        Ok(image)
    }

    fn requests(&mut self) -> Result<(), String> {
        self.image = Some(self.open(self.disk.clone()).map_err(|error| format!("opening: {error}"))?);
        for number in 0..REQUESTS {
            let before = self.disk.mark();
            let fault = self.rng.chance(60);
            if fault {
                self.failed_once = true;
                let (writes, syncs) = *self.rng.pick(&[(100, 0), (500, 0), (1000, 0), (0, 500), (50, 50)]);
                let len_max = if self.rng.chance(500) { self.disk.now().len() as u64 } else { u64::MAX };
                self.disk.set_faults(Faults { writes, syncs, len_max, pauses: 0 });
            }
            let then = self.sectors.clone();
            let what = self.request().map_err(|why| format!("request {number}: {why}"))?;
            self.disk.set_faults(Faults { len_max: u64::MAX, ..Faults::default() });
            let events = self.disk.events();
            let mut medium = before;
            for (count, event) in events.iter().enumerate() {
                medium.event(event);
                let wanted = if count + 1 == events.len() { 600 } else { 3000 / (events.len() as u32 + 20) };
                if self.rng.chance(wanted) {
                    // Before the request completes, its effect is possible but not guaranteed.
                    let mut during = then.clone();
                    let last = count + 1 == events.len();
                    if last {
                        during = self.sectors.clone()
                    } else {
                        during.merge(&self.sectors)
                    }
                    let state = medium.cut(&mut self.rng);
                    self.state(state, &during)
                        .map_err(|why| format!("request {number}, {what}, event {count}: {why}"))?;
                }
            }
            let failed = self.image.as_ref().is_some_and(Disk::has_failed);
            if failed || self.rng.chance(30) {
                self.cut_power(failed)
                    .map_err(|why| format!("request {number}, {what}, and a cut: {why}"))?;
            }
        }
        self.close()
    }

    /// Closes the image cleanly, and checks that all data is present and nothing needs repair.
    fn close(&mut self) -> Result<(), String> {
        self.image = None;
        let file = self.disk.now();
        let found = check(&MemoryDisk::new(file.clone(), Rng::new(0)))
            .map_err(|error| format!("at the end: {error}"))?;
        if found.too_low + found.flags > 0 || (found.leaked > 0 && !self.failed_once) {
            return Err(format!("at the end: {found:?}"));
        }
        if let Some(held) = &self.snapshot {
            std::fs::write(self.folder.0.join("end.qcow2"), &file).map_err(|error| error.to_string())?;
            let words = ["convert", "-f", "qcow2", "-l", "one", "-O", "raw", "end.qcow2", "snapshot.raw"];
            let status = Command::new("qemu-img").current_dir(&self.folder.0).args(words).status();
            let is_whole =
                std::fs::read(self.folder.0.join("snapshot.raw")).is_ok_and(|found| found == *held);
            if !is_whole || !status.is_ok_and(|status| status.success()) {
                return Err("at the end: the snapshot is not what it was".into());
            }
        }
        let mut now = self.sectors.clone();
        let image = self
            .open(Arc::new(MemoryDisk::new(file, Rng::new(0))))
            .map_err(|error| format!("at the end: {error}"))?;
        let mut bytes = vec![0; self.size as usize];
        image.read(&mut bytes, 0).map_err(|error| format!("at the end: {error}"))?;
        now.read(0, &bytes).map_err(|why| format!("at the end: {why}"))
    }

    /// Continues with the content after a power cut, or after a kill.
    fn cut_power(&mut self, power: bool) -> Result<(), String> {
        // Drop the old server: its flush only writes to the old disk, which is not used any more.
        let medium = self.disk.medium();
        let file = if power || self.rng.chance(500) { medium.cut(&mut self.rng) } else { self.disk.now() };
        let stamps = self.state(file.clone(), &self.sectors.clone())?;
        self.image = None;
        self.disk = Arc::new(MemoryDisk::new(file, Rng::new(self.rng.word())));
        self.sectors.settle(&stamps);
        let before = self.disk.mark();
        self.image = Some(self.open(self.disk.clone()).map_err(|error| format!("opening again: {error}"))?);
        // A power cut may also happen during repair.
        let mut medium = before;
        for event in self.disk.events() {
            medium.event(&event);
            if self.rng.chance(300) {
                let state = medium.cut(&mut self.rng);
                self.state(state, &self.sectors.clone()).map_err(|why| format!("in repair: {why}"))?;
            }
        }
        Ok(())
    }

    /// Checks a state, and returns the stamps read.
    fn state(&mut self, file: Vec<u8>, sectors: &Sectors) -> Result<Vec<Stamp>, String> {
        self.states += 1;
        if self.qemu && self.states.is_multiple_of(self.qemu_every) {
            self.by_qemu += 1;
            let path = self.folder.0.join("state.qcow2");
            std::fs::write(&path, &file).map_err(|error| error.to_string())?;
            let out = Command::new("qemu-img").args(["check", "-q", "-f", "qcow2"]).arg(&path).output();
            let out = out.map_err(|error| error.to_string())?;
            // Exit code 3 means that clusters are leaked.
            if !matches!(out.status.code(), Some(0 | 3)) {
                let text =
                    String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout);
                return Err(format!("qemu-img check: {}: {text}", out.status));
            }
        }
        let disk = Arc::new(MemoryDisk::new(file, Rng::new(0)));
        let report = check(&*disk).map_err(|error| format!("it cannot be checked: {error}"))?;
        if report.too_low + report.flags > 0 {
            return Err(format!("it is inconsistent: {report:?}"));
        }
        let image = self.open(disk.clone()).map_err(|error| format!("it cannot be opened: {error}"))?;
        let mut bytes = vec![0; self.size as usize];
        image.read(&mut bytes, 0).map_err(|error| format!("it cannot be read: {error}"))?;
        let stamps = sectors.after_cut(&bytes)?;
        drop(image);
        let report = check(&*disk).map_err(|error| format!("repaired, it cannot be checked: {error}"))?;
        if report.too_low + report.flags > 0 {
            return Err(format!("it is not repaired: {report:?}"));
        }
        Ok(stamps)
    }

    /// Returns a random range of sectors: a short one, whole clusters, or a long one.
    fn range(&mut self) -> std::ops::Range<u64> {
        let all = self.size / SECTOR as u64;
        let per_cluster = (self.cluster / SECTOR as u64).max(1);
        // Some offsets are more frequent than others.
        let places = if self.rng.chance(500) { all } else { all.min(per_cluster * 6) };
        let first = self.rng.below(places);
        let (first, len) = match self.rng.below(4) {
            0 => (first, 1 + self.rng.below(8)),
            1 => (first - first % per_cluster, per_cluster * (1 + self.rng.below(4))),
            2 => (first, 1 + self.rng.below(per_cluster * 3)),
            _ => (first, 1 + self.rng.below(all / 2)),
        };
        first..(first + len).min(all)
    }

    fn zeroes(&mut self) -> Stamp {
        self.next += 1;
        ZEROES + self.next
    }

    fn request(&mut self) -> Result<String, String> {
        let sectors = self.range();
        let (offset, len) = (sectors.start * SECTOR as u64, (sectors.end - sectors.start) * SECTOR as u64);
        let image = self.image.take().expect("it is open");
        let choice = self.rng.below(100);
        let what = format!("{choice} of {sectors:?}");
        let before_failed = image.has_failed();
        let result = match choice {
            0..40 => {
                let stamp = self.next;
                self.next += 1;
                let mut bytes = vec![0; len as usize];
                for (sector, bytes) in sectors.clone().zip(bytes.chunks_exact_mut(SECTOR)) {
                    fill(bytes, sector, stamp);
                }
                self.sectors.begin(sectors.clone(), stamp);
                let result = image.write(&bytes, offset);
                self.sectors.end(sectors, stamp, result.is_ok());
                result
            }
            40..55 => {
                let stamp = self.zeroes();
                self.sectors.begin(sectors.clone(), stamp);
                let result = image.write_zeroes(offset, len, choice < 43);
                self.sectors.end(sectors, stamp, result.is_ok());
                result
            }
            55..65 => {
                let stamp = self.zeroes();
                self.sectors.begin(sectors.clone(), stamp);
                let result = image.discard(offset, len);
                self.sectors.end(sectors, stamp, false);
                result
            }
            65..80 => {
                let before = self.sectors.clone();
                let result = image.flush();
                if result.is_ok() {
                    self.sectors.flushed(&before);
                }
                result
            }
            _ => {
                let mut bytes = vec![0; len as usize];
                let result = image.read(&mut bytes, offset);
                if result.is_ok() {
                    self.sectors.read(sectors.start, &bytes)?;
                }
                result
            }
        };
        if before_failed && choice < 80 && result.is_ok() {
            return Err(format!("{what}: it succeeded after a failed sync"));
        }
        self.image = Some(image);
        Ok(what)
    }
}

/// Leaks are freed when an image is opened for writing.
#[test]
fn leaks_are_freed_when_an_image_is_opened() {
    let disk = Arc::new(MemoryDisk::new(Vec::new(), Rng::new(1)));
    create(&*disk, &CreateOptions::new(8 << 20)).expect("an image");
    let image =
        Disk::open(disk.clone(), None, Options { writable: true, ..Options::default() }).expect("an image");
    image.write(&[7; 65536], 0).expect("a write");
    image.flush().expect("a flush");
    image.write_zeroes(0, 65536, false).expect("zeroes");
    image.flush().expect("a flush");
    // The process is killed before the refcount is decremented on disk.
    let killed = Arc::new(MemoryDisk::new(disk.now(), Rng::new(1)));
    assert_eq!(check(&*killed).expect("it is sound"), Report { leaked: 1, ..Report::default() });
    drop(
        Disk::open(killed.clone(), None, Options { writable: true, ..Options::default() }).expect("an image"),
    );
    assert_eq!(check(&*killed).expect("it is sound"), Report::default());
}
