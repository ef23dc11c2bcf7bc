//! The target `dust <device> <offset> <block>`: emulates bad blocks, whose reads fail until they are written.
//!
//! Blocks are numbered from the device's first sector, as in the kernel. No read fails before the message
//! `enable`. The list has a lock, which requests take only while failing is enabled and a bad block exists.

use super::{
    Area, Devices, MessageError, Names, RandomLine, Simulated, Status, Target, TargetError, TargetRange,
    TargetRow, parse_u32, parse_u64, stack,
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

pub(super) const ROW: TargetRow = TargetRow {
    name: "dust",
    version: [1, 0, 0],
    usage: "dust <device> <offset> <block>",
    about: "emulates bad blocks that a write repairs",
    example: "0 2097152 dust disk.img 0 512",
    singleton: false,
    immutable: false,
    simulated: Simulated::InStacks { random, fails: false },
};

fn random(below: &mut dyn FnMut(u64) -> u64, len: Sectors) -> RandomLine {
    let block = Sectors(1 << below(4));
    let len = len.max(block);
    RandomLine::over_one(len, "", below(33), len, &block.bytes().0.to_string())
}

#[derive(Default)]
struct BadBlocks {
    enabled: AtomicBool,
    quiet: AtomicBool,
    /// The length of the list.
    count: AtomicU64,
    /// Bad blocks, each with the number of writes that still fail before one repairs it.
    blocks: Mutex<BTreeMap<u64, u8>>,
}

impl BadBlocks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u8>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_count(&self, blocks: &BTreeMap<u64, u8>) {
        self.count.store(blocks.len() as u64, Release);
    }

    /// Returns whether a request that begins in this block fails.
    #[inline]
    fn fails(&self, block: u64, write: bool) -> bool {
        self.enabled.load(Relaxed) && self.count.load(Relaxed) > 0 && self.fails_listed(block, write)
    }

    #[cold]
    fn fails_listed(&self, block: u64, write: bool) -> bool {
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
        self.update_count(&blocks);
        false
    }
}

struct Dust {
    len: Sectors,
    start: Sectors,
    block: Sectors,
    device_len: Sectors,
    bad_blocks: Arc<BadBlocks>,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    devices: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    let [device, start, block] = args else { return Err(TargetError::new("Invalid argument count")) };
    let block = parse_u32(block).filter(|block| *block > 0);
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
    let start = parse_u64(start).ok_or(TargetError::new("Invalid device offset sector"))?;
    let device = devices
        .open(device)
        .map_err(|why| TargetError::lookup("Device lookup failed", why).with_errno(libc::EINVAL))?;
    Ok(Arc::new(Dust {
        len: place.len,
        start: Sectors(start),
        block: block.sectors(),
        device_len: devices.profile(device).size.sectors(),
        bad_blocks: Arc::default(),
    }))
}

impl Dust {
    fn area(&self) -> Area {
        Area { device: 0, start: self.start, len: self.len }
    }

    /// Executes a message without arguments.
    fn command(&self, command: &str) -> Result<Option<String>, MessageError> {
        let bad_blocks = &self.bad_blocks;
        match command {
            "enable" | "disable" => {
                bad_blocks.enabled.store(command == "enable", Relaxed);
                Ok(None)
            }
            "quiet" => {
                bad_blocks.quiet.fetch_xor(true, Relaxed);
                Ok(None)
            }
            "countbadblocks" => {
                Ok(Some(format!("countbadblocks: {} badblock(s) found", bad_blocks.count.load(Relaxed))))
            }
            "clearbadblocks" => {
                let mut blocks = bad_blocks.lock();
                let found = if blocks.is_empty() { "no badblocks found" } else { "badblocks cleared" };
                blocks.clear();
                bad_blocks.update_count(&blocks);
                Ok(Some(format!("dust_clear_badblocks: {found}")))
            }
            "listbadblocks" => {
                let blocks = bad_blocks.lock();
                let list: String = blocks.keys().map(|block| format!("{block}\n")).collect();
                Ok(Some(if list.is_empty() { "No blocks in badblocklist".to_owned() } else { list }))
            }
            _ => Err(MessageError::Invalid),
        }
    }

    /// Executes a message about a block.
    fn block_command(
        &self,
        command: &str,
        block: u64,
        fails: Option<u8>,
    ) -> Result<Option<String>, MessageError> {
        let mut blocks = self.bad_blocks.lock();
        let answer = match (command, fails) {
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
        self.bad_blocks.update_count(&blocks);
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

    fn accesses_data(&self) -> bool {
        false
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(DustNode {
            child: below[0],
            start: self.start.bytes(),
            shift: self.block.bytes().0.trailing_zeros(),
            bad_blocks: self.bad_blocks.clone(),
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
        let state = |is: &AtomicBool, yes, no| if is.load(Relaxed) { yes } else { no };
        match what {
            Status::Info => format!(
                "{} {} {}",
                names.shown(0),
                state(&self.bad_blocks.enabled, "fail_read_on_bad_block", "bypass"),
                state(&self.bad_blocks.quiet, "quiet", "verbose")
            ),
            Status::Table => format!("{} {} {}", names.shown(0), self.start.0, self.block.bytes().0),
        }
    }

    fn messages(&self) -> &'static [&'static str] {
        &[
            "addbadblock",
            "removebadblock",
            "queryblock",
            "enable",
            "disable",
            "countbadblocks",
            "clearbadblocks",
            "listbadblocks",
            "quiet",
        ]
    }

    fn message(&self, message: &[&str], _: &Names) -> Result<Option<String>, MessageError> {
        let (command, args) = message.split_first().ok_or(MessageError::Invalid)?;
        let command = command.to_ascii_lowercase();
        let (block, fails) = match args {
            [] => return self.command(&command),
            [block] => (block, None),
            [block, fails] => {
                let fails = parse_u32(fails).and_then(|fails| u8::try_from(fails).ok());
                (block, Some(fails.ok_or(MessageError::Invalid)?))
            }
            _ => return Err(MessageError::Invalid),
        };
        let block = parse_u64(block).ok_or(MessageError::Invalid)?;
        if block > self.device_len.0 / self.block.0 {
            return Err(MessageError::Invalid);
        }
        self.block_command(&command, block, fails)
    }
}

struct DustNode {
    child: NodeId,
    start: Bytes,
    shift: u32,
    bad_blocks: Arc<BadBlocks>,
    /// By tag: the original offset of the request.
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
        let is_affected = req.op == Op::Read || req.op.is_write();
        if is_affected && self.bad_blocks.fails(at.0 >> self.shift, req.op.is_write()) {
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
    use super::super::harness::{Harness, Memory};
    use super::super::testing::{build, error, names};
    use super::super::{MessageError, Status, Target};
    use block::Status as End;

    fn send(target: &dyn Target<Memory>, args: &str) -> Result<Option<String>, MessageError> {
        let args: Vec<&str> = args.split(' ').collect();
        target.message(&args, &names(&["8:0"]))
    }

    #[test]
    fn table_status_repeats_the_line() {
        let target = build("dust", "8:0 16 4096");
        assert_eq!(target.status(Status::Table, &names(&["8:0"])), "8:0 16 4096");
        assert_eq!(target.status(Status::Info, &names(&["8:0"])), "8:0 bypass verbose");
    }

    #[test]
    fn bad_arguments_are_refused_with_the_kernels_text() {
        for (args, text) in [
            ("a 0", "Invalid argument count"),
            ("a 0 x", "Invalid block size parameter"),
            ("a 0 0", "Invalid block size parameter"),
            ("a 0 511", "Block size must be at least 512"),
            ("a 0 1536", "Block size must be a power of 2"),
            ("a 0 1048576", "Block size is too large"),
            ("a x 512", "Invalid device offset sector"),
            ("missing 0 512", "Device lookup failed: missing: no such device"),
        ] {
            assert_eq!(error("dust", args), text, "{args}");
        }
    }

    #[test]
    fn reads_of_a_bad_block_fail_until_it_is_written() {
        let mut harness = Harness::new("dust", "a 16 4096");
        let target = harness.target.clone();
        assert_eq!(send(&*target, "addbadblock 3"), Ok(None));
        assert_eq!(send(&*target, "AddBadBlock 4 2"), Ok(None));
        assert_eq!(harness.read(8, 4096).0, End::Ok, "nothing fails before it is enabled");
        send(&*target, "enable").unwrap();
        // Block 3 of the device begins 8 sectors into the target, which begins at sector 16.
        assert_eq!(harness.read(8, 512).0, End::IoError);
        assert_eq!(harness.read(0, 4096).0, End::Ok);
        assert_eq!(harness.read(0, 16384).0, End::IoError, "it is cut at blocks");
        assert_eq!(harness.write(8, &[1; 512]), End::Ok);
        assert_eq!(harness.read(8, 512), (End::Ok, vec![1; 512]));
        for end in [End::IoError, End::IoError, End::Ok] {
            assert_eq!(harness.write(16, &[1; 512]), end);
        }
        assert_eq!(
            harness.target.status(Status::Info, &names(&["8:0"])),
            "8:0 fail_read_on_bad_block verbose"
        );
        send(&*target, "disable").unwrap();
    }

    #[test]
    fn messages_return_the_kernels_text() {
        let harness = Harness::new("dust", "a 0 512");
        let target = &*harness.target;
        let reply = |args| send(target, args).unwrap().unwrap();
        assert_eq!(reply("listbadblocks"), "No blocks in badblocklist");
        assert_eq!(reply("clearbadblocks"), "dust_clear_badblocks: no badblocks found");
        for block in [60, 67, 72] {
            send(target, &format!("addbadblock {block}")).unwrap();
        }
        assert_eq!(reply("countbadblocks"), "countbadblocks: 3 badblock(s) found");
        assert_eq!(reply("listbadblocks"), "60\n67\n72\n");
        assert_eq!(reply("queryblock 67"), "dust_query_block: block 67 found in badblocklist");
        assert_eq!(send(target, "removebadblock 67"), Ok(None));
        assert_eq!(reply("queryblock 67"), "dust_query_block: block 67 not found in badblocklist");
        assert_eq!(reply("clearbadblocks"), "dust_clear_badblocks: badblocks cleared");
        assert_eq!(send(target, "quiet"), Ok(None));
        assert_eq!(target.status(Status::Info, &names(&["8:0"])), "8:0 bypass quiet");
        send(target, "addbadblock 1").unwrap();
        for args in [
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
            assert_eq!(send(target, args), Err(MessageError::Invalid), "{args}");
        }
    }
}
