//! Tracks the possible content of each sector of the disk, now and after a power cut.

use crate::cache::SECTOR;

/// Identifies a write and its content: the bytes of [`fill`] with this number, or zeroes for 0 and from
/// [`ZEROES`] on.
pub(crate) type Stamp = u64;

/// The first stamp of writes of zeroes. Each has its own number, because one may be durable and another
/// not.
pub(crate) const ZEROES: Stamp = 1 << 40;

fn content(stamp: Stamp) -> Stamp {
    if stamp >= ZEROES { 0 } else { stamp }
}

/// Fills a sector with bytes that contain its number and its stamp.
pub(crate) fn fill(into: &mut [u8], sector: u64, stamp: Stamp) {
    if stamp == 0 {
        return into.fill(0);
    }
    for (number, word) in into.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = ((stamp << 32) | (sector << 8) | (number as u64)).to_be_bytes();
    }
}

/// Returns the stamp of a sector, or an error if no single write produced all of it.
pub(crate) fn stamp(bytes: &[u8], sector: u64) -> Result<Stamp, String> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(0);
    }
    let first = u64::from_be_bytes(bytes[..8].try_into().expect("eight"));
    let stamp = first >> 32;
    let mut expected = [0; SECTOR];
    fill(&mut expected, sector, stamp);
    if stamp != 0 && bytes == expected {
        Ok(stamp)
    } else {
        Err(format!("bytes of another sector, {first:#x}"))
    }
}

#[derive(Clone, Debug)]
struct Sector {
    now: Vec<Stamp>,
    /// Stamp of the write in flight.
    in_flight: Option<Stamp>,
    /// Stamps that are possible after a power cut, in the order of the writes.
    cut: Vec<Stamp>,
}

/// The possible content of all sectors.
#[derive(Clone, Debug)]
pub(crate) struct Sectors(Vec<Sector>);

fn add(list: &mut Vec<Stamp>, stamp: Stamp) {
    if !list.contains(&stamp) {
        list.push(stamp);
    }
}

impl Sectors {
    pub(crate) fn new(stamps: impl Iterator<Item = Stamp>) -> Sectors {
        Sectors(stamps.map(|stamp| Sector { now: vec![stamp], in_flight: None, cut: vec![stamp] }).collect())
    }

    /// Starts a write: its content is possible after a power cut.
    pub(crate) fn begin(&mut self, sectors: std::ops::Range<u64>, stamp: Stamp) {
        for sector in &mut self.0[sectors.start as usize..sectors.end as usize] {
            add(&mut sector.cut, stamp);
            sector.in_flight = Some(stamp);
        }
    }

    /// Ends a write. `sure`: it certainly took effect.
    pub(crate) fn end(&mut self, sectors: std::ops::Range<u64>, stamp: Stamp, sure: bool) {
        for sector in &mut self.0[sectors.start as usize..sectors.end as usize] {
            sector.in_flight = None;
            if sure {
                sector.now = vec![stamp];
            } else {
                add(&mut sector.now, stamp);
            }
        }
    }

    /// Records the success of a flush that started when `before` was copied.
    pub(crate) fn flushed(&mut self, before: &Sectors) {
        for (sector, before) in self.0.iter_mut().zip(&before.0) {
            // Writes started since then may also be present.
            let later = sector.cut.iter().filter(|stamp| !before.cut.contains(stamp)).copied();
            let mut cut = before.now.clone();
            cut.extend(before.in_flight);
            later.for_each(|stamp| add(&mut cut, stamp));
            sector.cut = cut;
        }
    }

    /// Records that the content is known, now and after a power cut.
    pub(crate) fn settle(&mut self, stamps: &[Stamp]) {
        *self = Sectors::new(stamps.iter().copied());
    }

    /// Checks data that was read, and excludes other content from then on.
    pub(crate) fn read(&mut self, first: u64, bytes: &[u8]) -> Result<(), String> {
        for (number, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
            let sector = &mut self.0[number as usize];
            let found = stamp(bytes, number).map_err(|why| format!("sector {number}: {why}"))?;
            let before = sector.now.clone();
            sector.now.retain(|stamp| content(*stamp) == found);
            if sector.now.is_empty() {
                return Err(format!("sector {number}: {found} is read, not one of {before:?}"));
            }
        }
        Ok(())
    }

    /// Checks the content after a power cut.
    pub(crate) fn after_cut(&self, bytes: &[u8]) -> Result<Vec<Stamp>, String> {
        let check = |(number, (bytes, sector)): (usize, (&[u8], &Sector))| {
            let found =
                stamp(bytes, number as u64).map_err(|why| format!("sector {number} after a cut: {why}"))?;
            if sector.cut.iter().any(|stamp| content(*stamp) == found) {
                return Ok(found);
            }
            Err(format!("sector {number} after a cut: {found}, not one of {:?}", sector.cut))
        };
        bytes.chunks_exact(SECTOR).zip(&self.0).enumerate().map(check).collect()
    }
}

impl Sectors {
    /// Adds the content that is possible after a power cut of `others`.
    pub(crate) fn merge(&mut self, others: &Sectors) {
        for (sector, other) in self.0.iter_mut().zip(&others.0) {
            other.cut.iter().for_each(|stamp| add(&mut sector.cut, *stamp));
        }
    }
}
