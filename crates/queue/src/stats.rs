//! Counters of a hardware queue: the kernel's seventeen `stat` fields with their meanings, and a latency
//! histogram for each operation. The queue's thread writes them with plain stores; any thread reads them.

use crate::histogram::{Counts, Histograms};
use crate::{BusyTogether, Nanos};
use block::Op;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// A counter for each operation.
type ByOp = [AtomicU64; Op::COUNT];

/// Returns counters of 0.
const fn none() -> ByOp {
    [const { AtomicU64::new(0) }; Op::COUNT]
}

/// Number of size classes: up to 512 bytes, up to 1 KiB, up to 2 KiB and so on.
pub const SIZES: usize = 56;

/// Returns the size class of a length in bytes.
#[inline]
fn size_of_len(len: u64) -> usize {
    // 512 and below: 0; 513 to 1024: 1.
    ((len.saturating_sub(1) | 511) >> 8).ilog2() as usize
}

/// Number of nodes of a stack with counters of their own.
pub(crate) const NODES: usize = 32;

/// The counters of a node.
#[derive(Default, Debug)]
pub(crate) struct NodeStats {
    ios: AtomicU64,
    ticks_ns: AtomicU64,
    inside: AtomicU64,
}

impl NodeStats {
    pub(crate) fn store(&self, (ios, ticks_ns, inside): (u64, u64, u64)) {
        self.ios.store(ios, Relaxed);
        self.ticks_ns.store(ticks_ns, Relaxed);
        self.inside.store(inside, Relaxed);
    }
}

/// Counters of one hardware queue. The number of requests is the sum over their sizes.
#[derive(Debug)]
pub struct QueueStats {
    bytes: ByOp,
    ticks_ns: ByOp,
    merges: ByOp,
    /// Requests by size class and operation.
    sizes: [ByOp; SIZES],
    latency: Histograms,
    nodes: [NodeStats; NODES],
    errors: AtomicU64,
    in_flight: AtomicU64,
    busy_ns: AtomicU64,
    /// When the queue last became busy; 0 while nothing is in flight.
    busy_since_ns: AtomicU64,
    /// Busy time of all queues of the device. Empty for the only queue of a device.
    together: OnceLock<Arc<BusyTogether>>,
}

impl Drop for QueueStats {
    fn drop(&mut self) {
        self.in_flight(0, Nanos(self.busy_since_ns.load(Relaxed)));
    }
}

impl Default for QueueStats {
    fn default() -> Self {
        QueueStats {
            bytes: none(),
            ticks_ns: none(),
            merges: none(),
            sizes: [const { none() }; SIZES],
            latency: Histograms::default(),
            nodes: Default::default(),
            errors: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
            busy_since_ns: AtomicU64::new(0),
            together: OnceLock::new(),
        }
    }
}

/// A completed request that is not counted yet: its latency is known when the clock is read, once for many
/// requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) start: Nanos,
    pub(crate) len: u64,
    pub(crate) op: Op,
    pub(crate) failed: bool,
}

#[inline]
fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed) + by, Relaxed);
}

impl QueueStats {
    pub(crate) fn count(&self, ended: &[Ended], now: Nanos) {
        let Some(first) = ended.first() else { return };
        // The clock is read once for many requests, so most have the same start time and length as the one
        // before. Their buckets are looked up only if that changes.
        let (mut start, mut len) = (first.start, first.len);
        let mut latency = now.since(start);
        let (mut latencies, mut sizes) = (self.latency.row(latency), &self.sizes[size_of_len(len)]);
        let mut errors = 0;
        for end in ended {
            if end.start != start {
                start = end.start;
                latency = now.since(start);
                latencies = self.latency.row(latency);
            }
            if end.len != len {
                len = end.len;
                sizes = &self.sizes[size_of_len(len)];
            }
            let op = end.op as usize;
            bump(&self.bytes[op], len);
            bump(&self.ticks_ns[op], latency);
            bump(&sizes[op], 1);
            bump(&latencies[op], 1);
            errors += u64::from(end.failed);
        }
        if errors > 0 {
            bump(&self.errors, errors);
        }
    }

    /// Adds merges by operation, and sets `merges` to 0.
    #[cold]
    pub(crate) fn count_merges(&self, merges: &mut [u64; Op::COUNT]) {
        for (sum, count) in self.merges.iter().zip(merges) {
            bump(sum, std::mem::take(count));
        }
    }

    /// Makes the queue count towards the busy time of its device. Call it once, before the first request.
    pub fn share(&self, together: Arc<BusyTogether>) {
        debug_assert!(self.busy_since_ns.load(Relaxed) == 0, "a queue is shared before it is used");
        // A second call has no effect.
        let _ = self.together.set(together);
    }

    /// Returns the counters of nodes by number.
    pub(crate) fn nodes(&self) -> &[NodeStats] {
        &self.nodes
    }

    /// Records the number of requests in flight. Called at most once a turn, and when the queue becomes busy.
    #[inline]
    pub(crate) fn in_flight(&self, in_flight: usize, now: Nanos) {
        self.in_flight.store(in_flight as u64, Relaxed);
        let since = self.busy_since_ns.load(Relaxed);
        match (since, in_flight) {
            (0, 0) => {}
            (0, _) => {
                self.busy_since_ns.store(now.0.max(1), Relaxed);
                if let Some(together) = self.together.get() {
                    together.enter(now);
                }
            }
            (_, 0) => {
                bump(&self.busy_ns, now.since(Nanos(since)));
                self.busy_since_ns.store(0, Relaxed);
                if let Some(together) = self.together.get() {
                    together.leave(now);
                }
            }
            _ => {}
        }
    }

    /// Returns the counters. `now` is on the ring's clock: it closes the busy time of a queue that
    /// has requests in flight.
    pub fn snapshot(&self, now: Nanos) -> Snapshot {
        let mut snapshot = Snapshot::default();
        for (op, into) in snapshot.ops.iter_mut().enumerate() {
            into.merges = self.merges[op].load(Relaxed);
            into.bytes = self.bytes[op].load(Relaxed);
            into.ticks_ns = self.ticks_ns[op].load(Relaxed);
            self.latency.add_to(op, &mut into.latency);
            for (sum, row) in into.sizes.iter_mut().zip(&self.sizes) {
                *sum = row[op].load(Relaxed);
            }
            into.ios = into.sizes.iter().sum();
        }
        for (into, node) in snapshot.nodes.iter_mut().zip(&self.nodes) {
            into.ios = node.ios.load(Relaxed);
            into.ticks_ns = node.ticks_ns.load(Relaxed);
            into.in_flight = node.inside.load(Relaxed);
        }
        snapshot.errors = self.errors.load(Relaxed);
        snapshot.in_flight = self.in_flight.load(Relaxed);
        let since = self.busy_since_ns.load(Relaxed);
        let running = if since == 0 { 0 } else { now.since(Nanos(since)) };
        snapshot.busy_ns = self.busy_ns.load(Relaxed) + running;
        snapshot
    }
}

/// Counters of one operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpCounts {
    /// Requests completed, with or without an error.
    pub ios: u64,
    /// Adjacent requests that were merged into them.
    pub merges: u64,
    /// Bytes requested.
    pub bytes: u64,
    /// Sum of latencies in nanoseconds.
    pub ticks_ns: u64,
    /// Histogram of latencies in nanoseconds.
    pub latency: Counts,
    /// Requests by size class: see [`SIZES`].
    pub sizes: [u64; SIZES],
}

impl Default for OpCounts {
    fn default() -> Self {
        OpCounts { ios: 0, merges: 0, bytes: 0, ticks_ns: 0, latency: Counts::default(), sizes: [0; SIZES] }
    }
}

/// Counters of a node of the stack.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct NodeCounts {
    /// Requests that it completed. A retry counts again in the nodes below.
    pub ios: u64,
    /// Time that requests spent in it and below, up to the last turn, in nanoseconds.
    pub ticks_ns: u64,
    /// Requests that were in it or below at that time.
    pub in_flight: u64,
}

/// A copy of the counters of a device or of one of its queues.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// By [`Op`] number.
    pub ops: [OpCounts; Op::COUNT],
    /// By node number.
    pub nodes: [NodeCounts; NODES],
    /// Requests that failed.
    pub errors: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Time with at least one request in flight, in nanoseconds.
    pub busy_ns: u64,
}

/// Operations that the kernel's `op_stat_group` counts as writes.
const WRITES: [Op; 8] = [
    Op::Write,
    Op::WriteZeroes,
    Op::ZoneAppend,
    Op::ZoneReset,
    Op::ZoneResetAll,
    Op::ZoneOpen,
    Op::ZoneClose,
    Op::ZoneFinish,
];

impl Snapshot {
    /// Adds another queue of the same device. Busy time becomes the longest of any queue, not their sum;
    /// [`BusyTogether`] has that of the device.
    pub fn add(&mut self, other: &Snapshot) {
        for (sum, op) in self.ops.iter_mut().zip(&other.ops) {
            sum.ios += op.ios;
            sum.merges += op.merges;
            sum.bytes += op.bytes;
            sum.ticks_ns += op.ticks_ns;
            sum.latency.add(&op.latency);
            for (sum, count) in sum.sizes.iter_mut().zip(op.sizes) {
                *sum += count;
            }
        }
        for (sum, node) in self.nodes.iter_mut().zip(&other.nodes) {
            sum.ios += node.ios;
            sum.ticks_ns += node.ticks_ns;
            sum.in_flight += node.in_flight;
        }
        self.errors += other.errors;
        self.in_flight += other.in_flight;
        self.busy_ns = self.busy_ns.max(other.busy_ns);
    }

    /// Returns the seventeen fields of `/sys/block/X/stat`, in its order and units (sectors, milliseconds).
    /// As there, write zeroes and zone operations count as writes, and failed requests count too.
    pub fn fields(&self) -> [u64; 17] {
        let group = |ops: &[Op]| {
            let mut sum = [0; 4];
            for op in ops.iter().map(|&op| &self.ops[op as usize]) {
                sum[0] += op.ios;
                sum[1] += op.merges;
                sum[2] += op.bytes;
                sum[3] += op.ticks_ns;
            }
            [sum[0], sum[1], sum[2] >> 9, sum[3] / 1_000_000]
        };
        let (read, write) = (group(&[Op::Read]), group(&WRITES));
        let (discard, flush) = (group(&[Op::Discard]), group(&[Op::Flush]));
        let in_queue = [Op::Read, Op::Discard, Op::Flush]
            .iter()
            .chain(&WRITES)
            .map(|&op| self.ops[op as usize].ticks_ns)
            .sum::<u64>()
            / 1_000_000;
        let mut fields = [0; 17];
        fields[..4].copy_from_slice(&read);
        fields[4..8].copy_from_slice(&write);
        fields[8..11].copy_from_slice(&[self.in_flight, self.busy_ns / 1_000_000, in_queue]);
        fields[11..15].copy_from_slice(&discard);
        fields[15..].copy_from_slice(&[flush[0], flush[3]]);
        fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(op: Op, len: u64, start: u64) -> Ended {
        Ended { start: Nanos(start), len, op, failed: false }
    }

    #[test]
    fn the_seventeen_fields_have_the_kernels_order_and_units() {
        let stats = QueueStats::default();
        let ms = 1_000_000;
        stats.in_flight(5, Nanos(10 * ms));
        stats.count(
            &[
                ended(Op::Read, 4096, 10 * ms),
                ended(Op::Write, 1024, 11 * ms),
                ended(Op::WriteZeroes, 512, 12 * ms),
                ended(Op::Discard, 1 << 20, 8 * ms),
                ended(Op::Flush, 0, 5 * ms),
            ],
            Nanos(12 * ms),
        );
        stats.in_flight(0, Nanos(12 * ms));
        let fields = stats.snapshot(Nanos(99 * ms)).fields();
        assert_eq!(fields, [1, 0, 8, 2, 2, 0, 3, 1, 0, 2, 14, 1, 0, 2048, 4, 1, 7]);
    }

    #[test]
    fn size_classes_are_powers_of_two() {
        for (len, place) in
            [(0, 0), (1, 0), (512, 0), (513, 1), (1024, 1), (4096, 3), (1 << 30, 21), (u64::MAX, 55)]
        {
            assert_eq!(size_of_len(len), place, "{len}");
        }
        let stats = QueueStats::default();
        stats.count(&[ended(Op::Read, 4096, 0), ended(Op::Read, 4096, 0)], Nanos(1));
        assert_eq!(stats.snapshot(Nanos(1)).ops[0].sizes[3], 2);
    }

    #[test]
    fn zone_appends_and_zone_operations_count_as_writes() {
        let stats = QueueStats::default();
        stats.count(
            &[
                ended(Op::ZoneAppend, 4096, 0),
                ended(Op::ZoneReset, 0, 0),
                ended(Op::ZoneFinish, 0, 0),
                ended(Op::ReportZones, 1 << 20, 0),
            ],
            Nanos(1_000_000),
        );
        let fields = stats.snapshot(Nanos(1_000_000)).fields();
        assert_eq!(fields[4..8], [3, 0, 8, 3], "the kernel does not count zone reports");
        assert_eq!((fields[0], fields[10]), (0, 3));
    }

    #[test]
    fn busy_time_grows_while_a_request_is_in_flight() {
        let stats = QueueStats::default();
        stats.in_flight(1, Nanos(100));
        stats.in_flight(2, Nanos(150));
        assert_eq!(stats.snapshot(Nanos(400)).busy_ns, 300);
        stats.in_flight(0, Nanos(500));
        assert_eq!(stats.snapshot(Nanos(900)).busy_ns, 400);
    }

    #[test]
    fn a_failed_request_counts_as_request_and_as_error() {
        let stats = QueueStats::default();
        stats.count(&[Ended { failed: true, ..ended(Op::Read, 512, 0) }], Nanos(7));
        let snapshot = stats.snapshot(Nanos(7));
        assert_eq!((snapshot.fields()[0], snapshot.errors), (1, 1));
    }
}
