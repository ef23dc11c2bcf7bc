//! The cost of a request inside the process: with one thread alone, and with several at once.
//!
//! Each thread drives its own queue of one device, like a reactor; the threads share only the state that
//! the device's queues share. With several threads the time of the slowest one counts, from a common start:
//! it shows the cost of a lock.

use super::stacks::{Shared, Subject};
use crate::core::{BenchRing, DEPTH, Mix, Rig};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Barrier;
use std::time::Instant;

/// Requests of one round on each thread.
const ROUND: u64 = 1_000_000;

/// All rounds of one subject with a number of threads.
pub(super) struct Series {
    pub(super) subject: Subject,
    pub(super) threads: u16,
    /// Processor time of a thread for a request, in nanoseconds.
    pub(super) cpu_ns: Vec<f64>,
    /// Requests a second, all threads together, in millions.
    pub(super) mega_iops: Vec<f64>,
}

fn processor_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Measures one round: processor time for a request, and millions of requests a second. All memory is
/// allocated anew, as its place has a large effect.
fn round(subject: Subject, threads: u16) -> (f64, f64) {
    let shared = Shared::new::<BenchRing>(subject, threads, DEPTH);
    let start = Barrier::new(usize::from(threads));
    let carry = |number: u16| {
        let mut rig = Rig::of_multipath(&shared, number);
        rig.run(Mix::Reads, ROUND / 20);
        start.wait();
        let (before, began) = (processor_ns(), Instant::now());
        rig.run(Mix::Reads, ROUND);
        (processor_ns() - before, began.elapsed().as_secs_f64())
    };
    let carry = &carry;
    let times: Vec<(f64, f64)> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|number| scope.spawn(move || carry(number))).collect();
        running.into_iter().map(|thread| thread.join().expect("a thread that carries requests")).collect()
    });
    let requests = (ROUND * u64::from(threads)) as f64;
    let cpu_ns = times.iter().map(|time| time.0).sum::<f64>() / requests;
    let seconds = times.iter().map(|time| time.1).fold(0.0, f64::max);
    (cpu_ns, requests / seconds / 1e6)
}

/// Measures all subjects with each number of threads, in interleaved rounds.
pub(super) fn measure(subjects: &[Subject], threads: &[u16], rounds: usize) -> Vec<Series> {
    let mut all = Vec::new();
    for &threads in threads {
        let first = all.len();
        let series =
            |&subject: &Subject| Series { subject, threads, cpu_ns: Vec::new(), mega_iops: Vec::new() };
        all.extend(subjects.iter().map(series));
        for number in 0..rounds {
            for turn in 0..subjects.len() {
                let series: &mut Series = &mut all[first + (turn + number) % subjects.len()];
                let (cpu_ns, mega_iops) = round(series.subject, threads);
                series.cpu_ns.push(cpu_ns);
                series.mega_iops.push(mega_iops);
            }
        }
    }
    all
}
