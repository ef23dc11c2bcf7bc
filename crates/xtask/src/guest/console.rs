//! Watches the kernel's console for messages that no job may cause.
//!
//! Only lines with the kernel's time stamp count, so that a job may print such messages itself. The messages
//! of all supported kernels are in [`SIGNS`]. A job that provokes one deliberately writes `guest expects
//! NAME` to `/dev/kmsg` before, and `guest expects nothing` after.

use std::fmt;

/// A message that indicates a problem.
struct Sign {
    /// Name of the problem.
    name: &'static str,
    /// Beginning of the message, after the time stamp.
    begins: &'static str,
    /// Text that it must also contain.
    holds: &'static str,
}

const fn sign(name: &'static str, begins: &'static str, holds: &'static str) -> Sign {
    Sign { name, begins, holds }
}

/// In order: the first match names the finding. Source: kernel/panic.c, kernel/hung_task.c,
/// kernel/watchdog.c, kernel/rcu/tree_stall.h, kernel/locking/lockdep.c, lib/ubsan.c, mm/oom_kill.c.
const SIGNS: &[Sign] = &[
    sign("panic", "Kernel panic - not syncing", ""),
    sign("soft lockup", "watchdog: BUG: soft lockup", ""),
    sign("hard lockup", "watchdog: Watchdog detected hard LOCKUP", ""),
    sign("sanitizer", "BUG: KASAN", ""),
    sign("sanitizer", "BUG: KFENCE", ""),
    sign("sanitizer", "UBSAN: ", ""),
    sign("oops", "BUG: ", ""),
    sign("oops", "Oops: ", ""),
    sign("oops", "Oops: general protection fault", ""),
    sign("oops", "general protection fault", ""),
    sign("oops", "kernel BUG at ", ""),
    sign("hung task", "INFO: task ", " blocked for more than "),
    sign("hung task", "INFO: task ", " blocked in I/O wait for more than "),
    sign("rcu stall", "rcu: INFO: ", "detected "),
    sign("rcu stall", "INFO: rcu_", "stall"),
    sign("lockdep", "WARNING: possible ", ""),
    sign("lockdep", "WARNING: inconsistent lock state", ""),
    sign("lockdep", "WARNING: suspicious RCU usage", ""),
    sign("lockdep", "WARNING: bad unlock balance", ""),
    sign("warning", "WARNING: ", " at "),
    sign("out of memory", "Out of memory: ", "illed process"),
    sign("out of memory", "Memory cgroup out of memory: ", "illed process"),
];

/// A problem that no job may cause.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Its name in [`SIGNS`].
    pub name: &'static str,
    /// The kernel's line, without the time stamp.
    pub line: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.line)
    }
}

/// Findings on one console so far.
#[derive(Default, Debug)]
pub struct Watcher {
    /// The incomplete last line.
    partial: Vec<u8>,
    /// All lines, for the tail in a report.
    lines: Vec<String>,
    /// The problem announced by the job; empty if none.
    expected: String,
    /// In order, without duplicates.
    pub findings: Vec<Finding>,
    /// The kernel has panicked.
    pub is_dead: bool,
    /// The guest's first program has started.
    pub is_up: bool,
    /// The guest has finished everything.
    pub is_done: bool,
}

/// Text that the guest's `init` prints on the console when it starts.
const UP: &str = "guest is up";

/// Text that the guest's `init` prints on the console once the results are complete.
pub const DONE: &str = "guest is done";

impl Watcher {
    /// Processes further bytes of the console.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.partial.extend_from_slice(bytes);
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            self.line(String::from_utf8_lossy(&line).trim_end());
        }
    }

    fn line(&mut self, line: &str) {
        self.lines.push(line.into());
        let Some(message) = message_of(line) else { return };
        if let Some(what) = message.strip_prefix("guest expects ") {
            self.expected = if what == "nothing" { String::new() } else { what.into() };
        }
        self.is_up |= message == UP;
        self.is_done |= message == DONE;
        let fits = |sign: &&Sign| message.starts_with(sign.begins) && message.contains(sign.holds);
        let Some(Sign { name, .. }) = SIGNS.iter().find(fits) else { return };
        self.is_dead |= *name == "panic";
        if self.expected != *name
            && !self.findings.iter().any(|finding| subject(&finding.line) == subject(message))
        {
            self.findings.push(Finding { name, line: message.into() });
        }
    }

    /// The last `count` lines.
    pub fn tail(&self, count: usize) -> &[String] {
        &self.lines[self.lines.len().saturating_sub(count)..]
    }
}

/// Identifies a message: a hung task is reported repeatedly, with different times.
fn subject(message: &str) -> &str {
    message.split(" blocked ").next().unwrap_or(message)
}

/// The text after the kernel's time stamp, `[   12.345678] ` or with the caller `[   12.345678][    T1] `;
/// `None` for a line that the kernel did not print.
fn message_of(line: &str) -> Option<&str> {
    let (stamp, rest) = line.trim_start_matches('\r').strip_prefix('[')?.split_once(']')?;
    let (seconds, fraction) = stamp.trim_start().split_once('.')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(seconds) || !digits(fraction) {
        return None;
    }
    let rest =
        rest.strip_prefix('[').and_then(|caller| caller.split_once(']')).map_or(rest, |(_, rest)| rest);
    rest.strip_prefix(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(text: &str) -> Watcher {
        let mut watcher = Watcher::default();
        // In small chunks, as a console is read.
        for piece in text.as_bytes().chunks(7) {
            watcher.feed(piece);
        }
        watcher
    }

    fn names(text: &str) -> Vec<&'static str> {
        watched(text).findings.iter().map(|finding| finding.name).collect()
    }

    #[test]
    fn each_sign_is_found_by_name() {
        for (line, name) in [
            ("[    1.234567] Kernel panic - not syncing: Fatal exception\r\n", "panic"),
            ("[   12.000000] BUG: kernel NULL pointer dereference, address: 0000000000000008\n", "oops"),
            ("[   12.000000] Oops: general protection fault, probably for non-canonical address\n", "oops"),
            ("[  121.000000] INFO: task fio:321 blocked for more than 30 seconds.\n", "hung task"),
            (
                "[    2.000000][  T12] WARNING: CPU: 1 PID: 12 at block/blk-mq.c:100 blk_mq_x+0x1/0x2\n",
                "warning",
            ),
            (
                "[    2.000000] WARNING: drivers/block/ublk_drv.c:12 at ublk_x+0x1/0x2, CPU#0: x/1\n",
                "warning",
            ),
            ("[    2.000000] WARNING: possible circular locking dependency detected\n", "lockdep"),
            ("[    9.000000] watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [fio:1]\n", "soft lockup"),
            ("[    9.000000] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n", "rcu stall"),
            ("[    9.000000] BUG: KASAN: slab-use-after-free in ublk_x+0x1/0x2\n", "sanitizer"),
            ("[    9.000000] Out of memory: Killed process 12 (blockyard) total-vm:1kB\n", "out of memory"),
        ] {
            assert_eq!(names(line), [name], "{line}");
        }
    }

    #[test]
    fn output_of_a_job_is_ignored() {
        assert!(names("Kernel panic - not syncing\n[test] WARNING: x at y\n[1.2.3] BUG: x\n").is_empty());
        assert!(names("[    1.000000] EXT4-fs (ublkb0): mounted filesystem\n").is_empty());
    }

    #[test]
    fn announced_problems_are_no_findings_until_revoked() {
        let oom = |id: u32| format!("[    9.000000] Out of memory: Killed process {id} (fio)\n");
        let text = format!(
            "[    8.000000] guest expects out of memory\n{}[    9.000000] guest expects nothing\n{}",
            oom(1),
            oom(2)
        );
        assert_eq!(watched(&text).findings.len(), 1);
        assert!(watched(&text).findings[0].line.contains("process 2"));
    }

    #[test]
    fn a_task_that_hangs_repeatedly_is_one_finding() {
        let line = |pid, seconds| {
            format!("[  121.000000] INFO: task fio:{pid} blocked for more than {seconds} seconds.\n")
        };
        assert_eq!(names(&[line(1, 30), line(1, 60), line(2, 30)].concat()), ["hung task"; 2]);
    }

    #[test]
    fn a_panic_ends_the_run_and_is_in_the_tail() {
        let watcher = watched("a\nb\n[    1.000000] Kernel panic - not syncing: VFS\nc\n");
        assert!(watcher.is_dead && !watcher.is_done);
        assert_eq!(watcher.tail(2), ["[    1.000000] Kernel panic - not syncing: VFS", "c"]);
    }

    #[test]
    fn the_end_of_the_guest_is_recognised() {
        let console = watched("[    1.000000] guest is up\n[    5.000000] guest is done\n");
        assert!(console.is_up && console.is_done);
        assert!(!watched("[    1.000000] guest is done\n").is_up);
        assert!(!watched("guest is done\n").is_done);
    }
}
