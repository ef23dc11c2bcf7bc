//! The front-end of a simulation: creates random requests with their memory, and checks their results.

use block::{Bytes, Data, Extent, Flags, Op, Request, Sectors, Segment, Status, Tag};
use queue::{Queue, Ring as _};
use sim::{Content, Model, Rng, SECTOR_LEN, SimRing, Ticket, fill_sector, read_sector};

/// Guard bytes around the memory of a request, which show stray writes.
const GUARD: u8 = 0x5C;
const GUARD_LEN: u32 = 64;
/// Length of the memory for replies of extents.
const EXTENTS_LEN: u32 = 8 * Extent::RECORD_LEN as u32;

/// Requests that a device accepts, and results that it may return.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceRules {
    pub(super) sectors: Sectors,
    /// Most sectors of one request.
    pub(super) sectors_max: u64,
    pub(super) segments_per_tag: u16,
    /// Memory consists of whole sectors.
    pub(super) even_memory: bool,
    /// It supports extents.
    pub(super) tells_extents: bool,
    /// Requests may fail without a fault of the stack.
    pub(super) can_fail: bool,
    /// Discard or write zeroes may be refused.
    pub(super) can_refuse: bool,
    /// Requests that take too long are cancelled.
    pub(super) has_timeout: bool,
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Flying {
    pub(super) ticket: Ticket,
    pub(super) req: Request,
    /// Its allocations.
    memory: Vec<Segment>,
    pub(super) owner: u32,
}

impl Flying {
    /// Returns whether it changes one of these sectors.
    pub(super) fn is_write_of(&self, first: u64, count: u64) -> bool {
        let Request { op, offset, .. } = self.req;
        op.is_write() && offset.0 < (first + count) << 9 && first << 9 < self.req.end().0
    }
}

/// Creates a request for `tag`. Returns `None` if there is no memory, or `is_taken` reports the sectors as in
/// use for this kind.
pub(super) fn request(
    tag: Tag,
    queue: &mut Queue<SimRing>,
    rules: &DeviceRules,
    rng: &mut Rng,
    ring: &mut SimRing,
    model: &mut Model,
    is_taken: impl Fn(Op, u64, u64) -> bool,
) -> Option<Flying> {
    let op = match random_op(rng) {
        Op::Extents if !rules.tells_extents => Op::Read,
        op => op,
    };
    let (first, count) =
        if op == Op::Flush { (0, 0) } else { random_range(rng, rules.sectors.0, rules.sectors_max) };
    let flags = random_flags(rng, op);
    if is_taken(op, first, count) {
        return None;
    }
    let memory_len = match op {
        Op::Read | Op::Write => (count as u32) << 9,
        Op::Extents => EXTENTS_LEN,
        _ => 0,
    };
    let most = if op == Op::Extents { 1 } else { u64::from(rules.segments_per_tag) };
    let (memory, segments) = allocate(memory_len, rng.between(1, most), rules.even_memory, rng, ring)?;
    let data = queue.run(tag, &segments).expect("no more segments than the queue was made for");
    let ticket = model.begin(op, flags, Sectors(first), Sectors(count));
    match op {
        Op::Write => {
            let mut bytes = vec![0; memory_len as usize];
            for (sector, content) in (first..).zip(bytes.chunks_mut(SECTOR_LEN)) {
                fill_sector(content, sector, ticket.start);
            }
            let mut rest = &bytes[..];
            for &segment in &segments {
                let (head, tail) = rest.split_at(segment.len as usize);
                ring.bytes_mut(segment).copy_from_slice(head);
                rest = tail;
            }
        }
        Op::Extents => ring.bytes_mut(segments[0]).fill(0),
        _ => {}
    }
    let (offset, len) = (Bytes(first << 9), Bytes(count << 9));
    Some(Flying { ticket, req: Request { offset, len, data, op, flags }, memory, owner: ticket.start as u32 })
}

fn random_op(rng: &mut Rng) -> Op {
    match rng.below(100) {
        0..=34 => Op::Read,
        35..=74 => Op::Write,
        75..=82 => Op::Flush,
        83..=87 => Op::Discard,
        88..=93 => Op::WriteZeroes,
        94..=95 => Op::Prefetch,
        _ => Op::Extents,
    }
}

/// Draws a range: mostly a few sectors at a few places, so that requests overlap; sometimes many.
fn random_range(rng: &mut Rng, sectors: u64, sectors_max: u64) -> (u64, u64) {
    let most = *rng.pick(&[1, 8, 8, 16, 16, 64, 256]).min(&sectors).min(&sectors_max);
    let count = rng.between(1, most);
    let place = if rng.chance(500) { (sectors - count).min(32) } else { sectors - count };
    (rng.between(0, place), count)
}

fn random_flags(rng: &mut Rng, op: Op) -> Flags {
    let mut flags = Flags::empty();
    let mut maybe = |chance, flag| {
        if rng.chance(chance) {
            flags = flags.union(flag);
        }
    };
    maybe(70, Flags::NOWAIT);
    match op {
        Op::Read => maybe(300, Flags::ZERO_COPY),
        Op::Write | Op::Discard => maybe(150, Flags::FUA),
        Op::WriteZeroes => {
            maybe(150, Flags::FUA);
            maybe(300, Flags::NO_UNMAP);
            maybe(100, Flags::FAST_ZERO);
        }
        _ => {}
    }
    flags
}

/// Allocates memory of `len` bytes in `count` segments: the allocations, and the segments within them.
fn allocate(
    len: u32,
    count: u64,
    even: bool,
    rng: &mut Rng,
    ring: &mut SimRing,
) -> Option<(Vec<Segment>, Vec<Segment>)> {
    let (mut memory, mut segments, mut left) = (Vec::new(), Vec::new(), len);
    for number in 0..count {
        let others = (count - number - 1) as u32;
        // Many odd segments would be written in several steps, and a power cut between them tears a sector.
        let unit = if !even && count <= 8 && rng.chance(300) { 4 } else { 512 };
        let most = left.saturating_sub(others * 512) / unit;
        let piece = if others == 0 || most == 0 { left } else { rng.between(1, most.into()) as u32 * unit };
        if piece == 0 {
            break;
        }
        let Some(whole) = ring.allocate(piece + 2 * GUARD_LEN) else {
            memory.into_iter().for_each(|segment| ring.free(segment));
            return None;
        };
        let skip = if rng.chance(500) { GUARD_LEN } else { 0 };
        let segment = whole.slice(skip, piece);
        ring.bytes_mut(whole).fill(GUARD);
        ring.bytes_mut(segment).fill(0xEE);
        memory.push(whole);
        segments.push(segment);
        left -= piece;
    }
    Some((memory, segments))
}

/// Checks the result of a completed request, and frees its memory.
pub(super) fn judge(
    tag: Tag,
    flying: &Flying,
    status: Status,
    queue: &Queue<SimRing>,
    rules: &DeviceRules,
    ring: &mut SimRing,
    model: &mut Model,
) -> Result<(), String> {
    let Flying { ticket, req, .. } = flying;
    if !may_end(req, status, rules) {
        return Err(format!("{req:?} ended with {status:?}, and nothing was wrong"));
    }
    let own = data(queue, req.data, req.len, req.op, ring);
    match req.op {
        Op::Read => {
            let answer = data(queue, queue.request(tag).data, req.len, req.op, ring);
            model
                .end_read(*ticket, status, answer.chunks(SECTOR_LEN))
                .map_err(|violation| format!("{violation} ({req:?})"))?;
        }
        Op::Extents if status.is_ok() => extents(&own, req, *ticket, model)?,
        Op::Write => {
            for (sector, bytes) in (req.offset.0 >> 9..).zip(own.chunks(SECTOR_LEN)) {
                if read_sector(bytes) != (Content::Data { sector, version: ticket.start }) {
                    return Err(format!("the data of {req:?} was changed in the submitter's memory"));
                }
            }
        }
        _ => {}
    }
    if req.op != Op::Read {
        model.end(*ticket, status);
    }
    guards(flying, own.len(), ring)
}

fn may_end(req: &Request, status: Status, rules: &DeviceRules) -> bool {
    let again = status == Status::Again && req.flags.contains(Flags::NOWAIT);
    let refusal = status == Status::NotSupported
        && (req.flags.contains(Flags::FAST_ZERO)
            || rules.can_refuse && matches!(req.op, Op::Discard | Op::WriteZeroes));
    let timeout = status == Status::Timeout && rules.has_timeout;
    status.is_ok() || again || refusal || timeout || rules.can_fail
}

fn data(queue: &Queue<SimRing>, data: Data, len: Bytes, op: Op, ring: &SimRing) -> Vec<u8> {
    let len = match op {
        Op::Read | Op::Write => len.0,
        Op::Extents => EXTENTS_LEN.into(),
        _ => 0,
    };
    let mut bytes = Vec::new();
    queue.segments(data, len).for_each(|segment| bytes.extend_from_slice(ring.bytes(segment)));
    bytes
}

/// Checks the reply of an extents request: within the range, and zero only where zeroes may be.
fn extents(records: &[u8], req: &Request, ticket: Ticket, model: &Model) -> Result<(), String> {
    let (mut at, mut count) = (req.offset.0, 0);
    for extent in records.chunks(Extent::RECORD_LEN).map_while(Extent::from_record) {
        let end = at.checked_add(extent.len.0).ok_or("an extent overflows")?;
        let known = end.min(model.device_len().bytes().0);
        for sector in at.div_ceil(512)..known / 512 {
            if extent.zero && !model.may_be_zero(Sectors(sector), ticket) {
                return Err(format!("sector {sector} is reported as zero, and is not ({req:?})"));
            }
        }
        if at >= req.end().0 {
            return Err(format!("extents of {req:?} go on past its end"));
        }
        (at, count) = (end, count + 1);
    }
    if count == 0 { Err(format!("no extents for {req:?}")) } else { Ok(()) }
}

/// Checks that the bytes around the segments are unchanged.
fn guards(flying: &Flying, len: usize, ring: &mut SimRing) -> Result<(), String> {
    let all: usize = flying.memory.iter().map(|whole| whole.len as usize).sum();
    let guards = all - len;
    let mut intact = 0;
    for &whole in &flying.memory {
        let bytes = ring.bytes(whole);
        let head = bytes.iter().take(GUARD_LEN as usize).take_while(|&&byte| byte == GUARD).count();
        let tail = bytes.iter().rev().take_while(|&&byte| byte == GUARD).count();
        intact += head + tail;
        ring.free(whole);
    }
    if intact < guards { Err(format!("{:?} wrote outside its memory", flying.req)) } else { Ok(()) }
}
