//! `dust <device> <offset> <block>`: blocks that fail to be read until they are written, as on an ageing disk.
//!
//! Blocks are numbered from the device's first sector, as in the kernel. Nothing fails before the message `enable`. The
//! list is behind a lock, which is taken only while failing is enabled and there is a bad block.

use super::{
    Area, Devices, Kind, MessageError, Names, Place, Status, Target, TargetError, long_number, number, stack,
};
use crate::Layer;
use block::{Bytes, Cookie, LimitsError, Op, Profile, Request, Sectors};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The largest block: the kernel's 1 GiB.
const BLOCK_MAX: Sectors = Sectors(2_097_152);

pub(super) fn kind<R: Ring>() -> Kind<R> {
    Kind::new("dust", [1, 0, 0], make)
}

#[derive(Default)]
struct Badness {
    enabled: AtomicBool,
    quiet: AtomicBool,
    /// How many there are.
    count: AtomicU64,
    /// Bad blocks, and how many writes to each fail before one makes it good.
    blocks: Mutex<BTreeMap<u64, u8>>,
}

impl Badness {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u8>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self, blocks: &BTreeMap<u64, u8>) {
        self.count.store(blocks.len() as u64, Release);
    }

    /// Whether a request that begins in a block fails.
    #[inline]
    fn strikes(&self, block: u64, write: bool) -> bool {
        self.enabled.load(Relaxed) && self.count.load(Relaxed) > 0 && self.strikes_listed(block, write)
    }

    #[cold]
    fn strikes_listed(&self, block: u64, write: bool) -> bool {
        let mut blocks = self.lock();
        let Entry::Occupied(mut bad) = blocks.entry(block) else { return false };
        if !write {
            return true;
        }
        if *bad.get() > 0 {
            *bad.get_mut() -= 1;
            return true;
        }
        bad.remove();
        self.changed(&blocks);
        false
    }
}

struct Dust {
    len: Sectors,
    start: Sectors,
    block: Sectors,
    device_len: Sectors,
    badness: Arc<Badness>,
}

fn make<R: Ring>(
    place: Place,
    words: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device, start, block] = words else { return Err(TargetError::new("Invalid argument count")) };
    let block = number(block).filter(|block| *block > 0);
    let block = Bytes(block.ok_or(TargetError::new("Invalid block size parameter"))?.into());
    if block.0 < 512 {
        return Err(TargetError::new("Block size must be at least 512"));
    }
    if !block.0.is_power_of_two() {
        return Err(TargetError::new("Block size must be a power of 2"));
    }
    if block.sectors() > place.len.min(BLOCK_MAX) {
        return Err(TargetError::new("Block size is too large"));
    }
    let start = long_number(start).ok_or(TargetError::new("Invalid device offset sector"))?;
    let device = devices
        .open(device)
        .map_err(|why| TargetError::lookup("Device lookup failed", why).with_errno(libc::EINVAL))?;
    Ok(Arc::new(Dust {
        len: place.len,
        start: Sectors(start),
        block: block.sectors(),
        device_len: devices.profile(device).size.sectors(),
        badness: Arc::default(),
    }))
}

impl Dust {
    fn area(&self) -> Area {
        Area { device: 0, start: self.start, len: self.len }
    }

    /// A message of one word.
    fn heed(&self, word: &str) -> Result<Option<String>, MessageError> {
        let badness = &self.badness;
        match word {
            "enable" | "disable" => {
                badness.enabled.store(word == "enable", Relaxed);
                Ok(None)
            }
            "quiet" => {
                badness.quiet.fetch_xor(true, Relaxed);
                Ok(None)
            }
            "countbadblocks" => {
                Ok(Some(format!("countbadblocks: {} badblock(s) found", badness.count.load(Relaxed))))
            }
            "clearbadblocks" => {
                let mut blocks = badness.lock();
                let found = if blocks.is_empty() { "no badblocks found" } else { "badblocks cleared" };
                blocks.clear();
                badness.changed(&blocks);
                Ok(Some(format!("dust_clear_badblocks: {found}")))
            }
            "listbadblocks" => {
                let blocks = badness.lock();
                let list: String = blocks.keys().map(|block| format!("{block}\n")).collect();
                Ok(Some(if list.is_empty() { "No blocks in badblocklist".to_owned() } else { list }))
            }
            _ => Err(MessageError::Invalid),
        }
    }

    /// One about a block.
    fn heed_of(&self, word: &str, block: u64, fails: Option<u8>) -> Result<Option<String>, MessageError> {
        let mut blocks = self.badness.lock();
        let answer = match (word, fails) {
            ("addbadblock", fails) => match blocks.entry(block) {
                Entry::Occupied(_) => return Err(MessageError::Invalid),
                Entry::Vacant(entry) => {
                    entry.insert(fails.unwrap_or(0));
                    None
                }
            },
            ("removebadblock", None) => {
                blocks.remove(&block).ok_or(MessageError::Invalid)?;
                None
            }
            ("queryblock", None) => {
                let found = if blocks.contains_key(&block) { "found" } else { "not found" };
                Some(format!("dust_query_block: block {block} {found} in badblocklist"))
            }
            _ => return Err(MessageError::Invalid),
        };
        self.badness.changed(&blocks);
        Ok(answer)
    }
}

impl<R: Ring> Layer<R> for Dust {
    fn name(&self) -> &'static str {
        "dust"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        stack(self.len, &[self.area()], below)
    }

    fn looks_at_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(DustNode {
            child: below[0],
            start: self.start.bytes(),
            shift: self.block.bytes().0.trailing_zeros(),
            badness: self.badness.clone(),
            offsets: Box::default(),
        })
    }
}

impl<R: Ring> Target<R> for Dust {
    fn areas(&self) -> Vec<Area> {
        vec![self.area()]
    }

    fn max_io_len(&self) -> Option<Sectors> {
        Some(self.block)
    }

    fn status(&self, what: Status, names: &Names) -> String {
        let said = |is: &AtomicBool, yes, no| if is.load(Relaxed) { yes } else { no };
        match what {
            Status::Info => format!(
                "{} {} {}",
                names.shown(0),
                said(&self.badness.enabled, "fail_read_on_bad_block", "bypass"),
                said(&self.badness.quiet, "quiet", "verbose")
            ),
            Status::Table => format!("{} {} {}", names.shown(0), self.start.0, self.block.bytes().0),
        }
    }

    fn message(&self, words: &[&str], _: &Names) -> Result<Option<String>, MessageError> {
        let (word, args) = words.split_first().ok_or(MessageError::Invalid)?;
        let word = word.to_ascii_lowercase();
        let (block, fails) = match args {
            [] => return self.heed(&word),
            [block] => (block, None),
            [block, fails] => {
                let fails = number(fails).and_then(|fails| u8::try_from(fails).ok());
                (block, Some(fails.ok_or(MessageError::Invalid)?))
            }
            _ => return Err(MessageError::Invalid),
        };
        let block = long_number(block).ok_or(MessageError::Invalid)?;
        if block > self.device_len.0 / self.block.0 {
            return Err(MessageError::Invalid);
        }
        self.heed_of(&word, block, fails)
    }
}

struct DustNode {
    child: NodeId,
    start: Bytes,
    shift: u32,
    badness: Arc<Badness>,
    /// By tag: where a request began before.
    offsets: Box<[Bytes]>,
}

impl<R: Ring> Node<R> for DustNode {
    fn attach(&mut self, _: NodeId, tags: usize) {
        self.offsets = vec![Bytes::ZERO; tags].into();
    }

    #[inline]
    fn submit(&mut self, io: Cookie, req: &mut Request, _: &mut Cx<'_, R>) -> Verdict {
        if req.op == Op::Flush {
            return Verdict::Down(self.child);
        }
        let at = req.offset + self.start;
        let asks = req.op == Op::Read || req.op.is_write();
        if asks && self.badness.strikes(at.0 >> self.shift, req.op.is_write()) {
            return Verdict::Up(block::Status::IoError);
        }
        self.offsets[io.tag.index()] = req.offset;
        req.offset = at;
        Verdict::Down(self.child)
    }

    #[inline]
    fn end_io(&mut self, io: Cookie, req: &mut Request, status: block::Status, _: &mut Cx<'_, R>) -> Verdict {
        if req.op != Op::Flush {
            req.offset = self.offsets[io.tag.index()];
        }
        Verdict::Up(status)
    }
}

#[cfg(test)]
mod tests {
    use super::super::rig::{Memory, Rig};
    use super::super::testing::{error, made, names};
    use super::super::{MessageError, Status, Target};
    use block::Status as End;

    fn tell(target: &dyn Target<Memory>, words: &str) -> Result<Option<String>, MessageError> {
        let words: Vec<&str> = words.split(' ').collect();
        target.message(&words, &names(&["8:0"]))
    }

    #[test]
    fn a_line_is_read_and_shown_again() {
        let target = made("dust", "8:0 16 4096");
        assert_eq!(target.status(Status::Table, &names(&["8:0"])), "8:0 16 4096");
        assert_eq!(target.status(Status::Info, &names(&["8:0"])), "8:0 bypass verbose");
    }

    #[test]
    fn what_is_wrong_is_said_in_the_kernels_words() {
        for (words, text) in [
            ("a 0", "Invalid argument count"),
            ("a 0 x", "Invalid block size parameter"),
            ("a 0 0", "Invalid block size parameter"),
            ("a 0 511", "Block size must be at least 512"),
            ("a 0 1536", "Block size must be a power of 2"),
            ("a 0 1048576", "Block size is too large"),
            ("a x 512", "Invalid device offset sector"),
            ("missing 0 512", "Device lookup failed: missing: it is not there"),
        ] {
            assert_eq!(error("dust", words), text, "{words}");
        }
    }

    #[test]
    fn a_bad_block_cannot_be_read_until_it_is_written() {
        let mut rig = Rig::new("dust", "a 16 4096");
        let target = rig.target.clone();
        assert_eq!(tell(&*target, "addbadblock 3"), Ok(None));
        assert_eq!(tell(&*target, "AddBadBlock 4 2"), Ok(None));
        assert_eq!(rig.read(8, 4096).0, End::Ok, "nothing fails before it is enabled");
        tell(&*target, "enable").unwrap();
        // Block 3 of the device begins 8 sectors into the target, which begins at sector 16.
        assert_eq!(rig.read(8, 512).0, End::IoError);
        assert_eq!(rig.read(0, 4096).0, End::Ok);
        assert_eq!(rig.read(0, 16384).0, End::IoError, "it is cut at blocks");
        assert_eq!(rig.write(8, &[1; 512]), End::Ok);
        assert_eq!(rig.read(8, 512), (End::Ok, vec![1; 512]));
        for end in [End::IoError, End::IoError, End::Ok] {
            assert_eq!(rig.write(16, &[1; 512]), end);
        }
        assert_eq!(rig.target.status(Status::Info, &names(&["8:0"])), "8:0 fail_read_on_bad_block verbose");
        tell(&*target, "disable").unwrap();
    }

    #[test]
    fn messages_are_answered_in_the_kernels_words() {
        let rig = Rig::new("dust", "a 0 512");
        let target = &*rig.target;
        let said = |words| tell(target, words).unwrap().unwrap();
        assert_eq!(said("listbadblocks"), "No blocks in badblocklist");
        assert_eq!(said("clearbadblocks"), "dust_clear_badblocks: no badblocks found");
        for block in [60, 67, 72] {
            tell(target, &format!("addbadblock {block}")).unwrap();
        }
        assert_eq!(said("countbadblocks"), "countbadblocks: 3 badblock(s) found");
        assert_eq!(said("listbadblocks"), "60\n67\n72\n");
        assert_eq!(said("queryblock 67"), "dust_query_block: block 67 found in badblocklist");
        assert_eq!(tell(target, "removebadblock 67"), Ok(None));
        assert_eq!(said("queryblock 67"), "dust_query_block: block 67 not found in badblocklist");
        assert_eq!(said("clearbadblocks"), "dust_clear_badblocks: badblocks cleared");
        assert_eq!(tell(target, "quiet"), Ok(None));
        assert_eq!(target.status(Status::Info, &names(&["8:0"])), "8:0 bypass quiet");
        tell(target, "addbadblock 1").unwrap();
        for words in [
            "addbadblock",
            "addbadblock 1",
            "addbadblock x",
            "addbadblock 8193",
            "addbadblock 2 256",
            "removebadblock 2",
            "removebadblock 1 1",
            "enable 1",
            "blow",
            "queryblock 1 2 3",
        ] {
            assert_eq!(tell(target, words), Err(MessageError::Invalid), "{words}");
        }
    }
}
