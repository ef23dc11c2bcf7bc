//! Counters of the kernel for a process (processor time, memory, wake-ups) and for the whole machine.
//!
//! Processor time comes from `/proc/PID/task/*/schedstat` in nanoseconds while the threads live, and from
//! `/proc/PID/stat` in ticks where threads may have ended in between. Kernel workers of io_uring are threads
//! of the process that owns the ring, so both count them.

use std::fs;
use std::io;
use std::time::Duration;

/// `USER_HZ`: the unit of `/proc/PID/stat` and `/proc/stat`; 100 on every architecture that Linux runs Rust on.
const TICKS_PER_SECOND: u64 = 100;

fn bad(path: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{path}: not as proc(5) has it"))
}

/// Returns the processor time of all threads that live now.
pub(crate) fn cpu_of_threads(pid: u32) -> io::Result<Duration> {
    let mut total = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ends meanwhile leaves an entry that cannot be read.
        if let Ok(text) = fs::read_to_string(entry?.path().join("schedstat")) {
            total += text.split(' ').next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(Duration::from_nanos(total))
}

/// Returns the processor time of those live threads whose names contain a word.
pub(crate) fn cpu_of_threads_named(pid: u32, word: &str) -> io::Result<Duration> {
    let mut total = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = entry?.path();
        if fs::read_to_string(path.join("comm")).is_ok_and(|name| name.contains(word)) {
            let text = fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            total += text.split(' ').next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(Duration::from_nanos(total))
}

/// Returns the processor time of the process, including threads that have ended; exact to a tick of 10 ms.
pub(crate) fn cpu_of_process(pid: u32) -> io::Result<Duration> {
    // utime and stime
    ticks_of(&pid.to_string(), 14)
}

/// Returns the processor time of the children of this process that have ended and were waited for, and of
/// their children.
pub(crate) fn cpu_of_children() -> io::Result<Duration> {
    // cutime and cstime
    ticks_of("self", 16)
}

/// Returns the sum of a field of `/proc/PID/stat` and the next; fields count from 1.
fn ticks_of(pid: &str, field: usize) -> io::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path)?;
    // The second field is the name in brackets and may hold blanks, so counting starts behind it.
    let fields = text.rsplit_once(')').map(|(_, rest)| rest).ok_or_else(|| bad(&path))?;
    let mut ticks = fields.split_whitespace().skip(field - 3).map_while(|word| word.parse::<u64>().ok());
    let (user, system) = ticks.next().zip(ticks.next()).ok_or_else(|| bad(&path))?;
    Ok(Duration::from_millis((user + system) * 1000 / TICKS_PER_SECOND))
}

/// Returns the context switches of the whole machine since it was started.
pub(crate) fn context_switches() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().find_map(|line| line.strip_prefix("ctxt "));
    line.and_then(|number| number.trim().parse().ok()).ok_or_else(|| bad("/proc/stat"))
}

/// Returns how often the threads that live now gave up the processor by waiting.
pub(crate) fn waits(pid: u32) -> io::Result<u64> {
    let mut total = 0;
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = fs::read_to_string(entry?.path().join("status")).unwrap_or_default();
        total += field(&status, "voluntary_ctxt_switches:").unwrap_or(0);
    }
    Ok(total)
}

/// Memory of a process in KiB.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    /// Resident memory.
    pub(crate) rss_kib: u64,
    /// Resident memory, with each shared page divided by its users.
    pub(crate) pss_kib: u64,
}

/// Returns the process's present memory.
pub(crate) fn memory(pid: u32) -> io::Result<Memory> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path)?;
    let of = |name| field(&text, name).ok_or_else(|| bad(&path));
    Ok(Memory { rss_kib: of("Rss:")?, pss_kib: of("Pss:")? })
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Processor time of the whole machine since its start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Machine {
    /// Time used by processes.
    pub(crate) busy: Duration,
    /// Time that the host gave to others.
    pub(crate) stolen: Duration,
}

/// Reads `/proc/stat`.
pub(crate) fn machine() -> io::Result<Machine> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().ok_or_else(|| bad("/proc/stat"))?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let [user, nice, system, _, _, _, _, stolen, ..] = ticks[..] else { return Err(bad("/proc/stat")) };
    let time = |ticks: u64| Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND);
    Ok(Machine { busy: time(user + nice + system), stolen: time(stolen) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_process_has_counters() {
        let pid = std::process::id();
        assert!(memory(pid).unwrap().rss_kib > 100);
        assert!(cpu_of_process(pid).unwrap() < Duration::from_secs(3600));
        let before = cpu_of_threads(pid).unwrap();
        let mut sum = 0u64;
        while cpu_of_threads(pid).unwrap() <= before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
    }

    #[test]
    fn the_machines_time_includes_our_own() {
        let own = cpu_of_process(std::process::id()).unwrap();
        assert!(machine().unwrap().busy + Duration::from_millis(20) >= own);
    }

    #[test]
    fn a_missing_process_is_an_error() {
        assert!(cpu_of_process(u32::MAX).is_err());
    }
}
