//! iostat's arithmetic and iostat's columns (sysstat 12): plain, extended, JSON.

use engine::control::{DeviceStats, OpStats};
use serde_json::{Map, Value};
use std::fmt::Write;

/// The counters of one kind of request in one interval.
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    ios: u64,
    merges: u64,
    bytes: u64,
    ticks_ns: u64,
}

impl Counts {
    fn sum(stats: &DeviceStats, operations: &[&str]) -> Counts {
        let mut sum = Counts::default();
        for OpStats { ios, merges, bytes, ticks_ns, .. } in
            operations.iter().filter_map(|name| stats.operations.get(*name))
        {
            sum.ios += ios;
            sum.merges += merges;
            sum.bytes += bytes;
            sum.ticks_ns += ticks_ns;
        }
        sum
    }

    fn since(self, before: Counts) -> Counts {
        Counts {
            ios: self.ios.saturating_sub(before.ios),
            merges: self.merges.saturating_sub(before.merges),
            bytes: self.bytes.saturating_sub(before.bytes),
            ticks_ns: self.ticks_ns.saturating_sub(before.ticks_ns),
        }
    }

    fn kib(self) -> f64 {
        self.bytes as f64 / 1024.0
    }

    /// Returns the average time of a request in milliseconds.
    fn await_ms(self) -> f64 {
        ratio(self.ticks_ns as f64 / 1e6, self.ios as f64)
    }

    /// Returns the average size of a request in KiB.
    fn request_kib(self) -> f64 {
        ratio(self.kib(), self.ios as f64)
    }

    /// Returns the percentage of requests that were merged.
    fn merged_percent(self) -> f64 {
        ratio(100.0 * self.merges as f64, (self.merges + self.ios) as f64)
    }
}

/// Divides; returns 0 if `by` is 0.
fn ratio(value: f64, by: f64) -> f64 {
    if by > 0.0 { value / by } else { 0.0 }
}

/// The operations that the kernel counts as writes, zone commands included.
const WRITES: [&str; 8] = [
    "write",
    "write-zeroes",
    "zone-append",
    "zone-reset",
    "zone-reset-all",
    "zone-open",
    "zone-close",
    "zone-finish",
];

/// The format of a report.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Form {
    pub(super) extended: bool,
    /// Whether amounts are in megabytes instead of kilobytes; request sizes are always in kilobytes.
    pub(super) megabytes: bool,
}

impl Form {
    /// Converts the value of a column from kilobytes.
    fn amount(self, name: &str, value: f64) -> f64 {
        if self.megabytes && name.contains("kB") { value / 1024.0 } else { value }
    }

    fn name(self, name: &str) -> String {
        if self.megabytes { name.replace("kB", "MB") } else { name.to_owned() }
    }
}

/// The activity of a device in one interval.
pub(crate) struct Rates {
    name: String,
    seconds: f64,
    read: Counts,
    write: Counts,
    discard: Counts,
    flush: Counts,
    busy_ns: u64,
}

/// The rates of a device per second.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(crate) struct EachSecond {
    pub(crate) reads: f64,
    pub(crate) writes: f64,
    pub(crate) discards: f64,
    pub(crate) flushes: f64,
    pub(crate) read_bytes: f64,
    pub(crate) written_bytes: f64,
    /// Average number of requests in flight.
    pub(crate) queued: f64,
    /// Percentage of time with at least one request in flight.
    pub(crate) busy_percent: f64,
}

impl Rates {
    /// Computes the difference of two samples; without an earlier one, the totals since the device was added.
    /// A device that was removed and added again has no earlier sample either.
    pub(crate) fn new(before: Option<&DeviceStats>, now: &DeviceStats) -> Rates {
        let before = before.filter(|before| before.uptime_ns < now.uptime_ns);
        let kind = |operations: &[&str]| {
            let earlier = before.map(|before| Counts::sum(before, operations)).unwrap_or_default();
            Counts::sum(now, operations).since(earlier)
        };
        let earlier = |field: fn(&DeviceStats) -> u64| before.map_or(0, field);
        Rates {
            name: now.name.clone(),
            seconds: now.uptime_ns.saturating_sub(earlier(|stats| stats.uptime_ns)) as f64 / 1e9,
            read: kind(&["read"]),
            write: kind(&WRITES),
            discard: kind(&["discard"]),
            flush: kind(&["flush"]),
            busy_ns: now.busy_ns.saturating_sub(earlier(|stats| stats.busy_ns)),
        }
    }

    /// Computes the rates of each hardware queue from the kernel's fields, whose times are whole
    /// milliseconds. A queue without an earlier sample counts from its creation.
    pub(super) fn of_queues(before: Option<&DeviceStats>, now: &DeviceStats) -> Vec<Rates> {
        let before = before.filter(|before| before.uptime_ns < now.uptime_ns);
        let seconds = Rates::new(before, now).seconds;
        let of_queue = |(number, fields): (usize, &[u64; 17])| {
            let earlier = before.and_then(|before| before.queues.get(number)).copied().unwrap_or_default();
            let since = |at: usize| fields[at].saturating_sub(earlier[at]);
            let kind = |at: usize| Counts {
                ios: since(at),
                merges: since(at + 1),
                bytes: since(at + 2) << 9,
                ticks_ns: since(at + 3) * 1_000_000,
            };
            Rates {
                name: format!("{}.{number}", now.name),
                seconds,
                read: kind(0),
                write: kind(4),
                discard: kind(11),
                flush: Counts { ios: since(15), ticks_ns: since(16) * 1_000_000, ..Counts::default() },
                busy_ns: since(9) * 1_000_000,
            }
        };
        now.queues.iter().enumerate().map(of_queue).collect()
    }

    /// Returns whether no request completed and none was in flight.
    pub(super) fn is_idle(&self) -> bool {
        let kinds = [self.read, self.write, self.discard, self.flush];
        self.busy_ns == 0 && kinds.iter().all(|kind| kind.ios == 0)
    }

    /// Returns the rates per second.
    pub(crate) fn each_second(&self) -> EachSecond {
        let [flushes, _, queued, busy_percent] = self.tail();
        let ios = |kind: Counts| self.per_second(kind.ios as f64);
        EachSecond {
            reads: ios(self.read),
            writes: ios(self.write),
            discards: ios(self.discard),
            flushes,
            read_bytes: self.per_second(self.read.bytes as f64),
            written_bytes: self.per_second(self.write.bytes as f64),
            queued,
            busy_percent,
        }
    }

    fn per_second(&self, value: f64) -> f64 {
        ratio(value, self.seconds)
    }

    /// Returns the plain columns except for the last three, which are whole numbers.
    fn plain(&self) -> [(&'static str, f64); 4] {
        let transfers = (self.read.ios + self.write.ios + self.discard.ios) as f64;
        [
            ("tps", self.per_second(transfers)),
            ("kB_read/s", self.per_second(self.read.kib())),
            ("kB_wrtn/s", self.per_second(self.write.kib())),
            ("kB_dscd/s", self.per_second(self.discard.kib())),
        ]
    }

    fn totals(&self) -> [(&'static str, u64); 3] {
        [
            ("kB_read", self.read.bytes >> 10),
            ("kB_wrtn", self.write.bytes >> 10),
            ("kB_dscd", self.discard.bytes >> 10),
        ]
    }

    /// Returns the six columns of reads, writes or discards: `r/s rkB/s rrqm/s %rrqm r_await rareq-sz`.
    fn group(&self, kind: Counts) -> [f64; 6] {
        [
            self.per_second(kind.ios as f64),
            self.per_second(kind.kib()),
            self.per_second(kind.merges as f64),
            kind.merged_percent(),
            kind.await_ms(),
            kind.request_kib(),
        ]
    }

    /// Returns `f/s f_await aqu-sz %util`.
    fn tail(&self) -> [f64; 4] {
        let queued = [self.read, self.write, self.discard, self.flush];
        let queued_ns: u64 = queued.iter().map(|kind| kind.ticks_ns).sum();
        [
            self.per_second(self.flush.ios as f64),
            self.flush.await_ms(),
            self.per_second(queued_ns as f64 / 1e9),
            self.per_second(100.0 * self.busy_ns as f64 / 1e9).min(100.0),
        ]
    }

    fn extended(&self) -> [f64; 22] {
        let groups = [self.group(self.read), self.group(self.write), self.group(self.discard)];
        let mut values = [0.0; 22];
        for (i, group) in groups.iter().enumerate() {
            values[6 * i..6 * i + 6].copy_from_slice(group);
        }
        values[18..].copy_from_slice(&self.tail());
        values
    }
}

/// The extended columns: name, and width including the space before it.
const EXTENDED: [(&str, usize); 22] = [
    ("r/s", 8),
    ("rkB/s", 10),
    ("rrqm/s", 9),
    ("%rrqm", 7),
    ("r_await", 8),
    ("rareq-sz", 9),
    ("w/s", 8),
    ("wkB/s", 10),
    ("wrqm/s", 9),
    ("%wrqm", 7),
    ("w_await", 8),
    ("wareq-sz", 9),
    ("d/s", 8),
    ("dkB/s", 10),
    ("drqm/s", 9),
    ("%drqm", 7),
    ("d_await", 8),
    ("dareq-sz", 9),
    ("f/s", 8),
    ("f_await", 8),
    ("aqu-sz", 8),
    ("%util", 7),
];

/// Formats a report: a header, a line for each device, and an empty line.
pub(super) fn text_report(rates: &[Rates], form: Form) -> String {
    let mut text = format!("{:<13}", "Device");
    // Writing to a string does not fail.
    if form.extended {
        for (name, width) in EXTENDED {
            let _ = write!(text, "{:>width$}", form.name(name));
        }
    } else {
        let _ = write!(text, "{:>9}", "tps");
        for name in ["kB_read/s", "kB_wrtn/s", "kB_dscd/s"] {
            let _ = write!(text, "{:>13}", form.name(name));
        }
        for name in ["kB_read", "kB_wrtn", "kB_dscd"] {
            let _ = write!(text, "{:>11}", form.name(name));
        }
    }
    text.push('\n');
    for rates in rates {
        let _ = write!(text, "{:<13}", rates.name);
        if form.extended {
            for (value, (name, width)) in rates.extended().into_iter().zip(EXTENDED) {
                let _ = write!(text, " {:>1$.2}", form.amount(name, value), width - 1);
            }
        } else {
            for (i, (name, value)) in rates.plain().into_iter().enumerate() {
                let _ = write!(text, " {:>1$.2}", form.amount(name, value), if i == 0 { 8 } else { 12 });
            }
            for (name, value) in rates.totals() {
                let _ = write!(text, " {:>10}", form.amount(name, value as f64) as u64);
            }
        }
        text.push('\n');
    }
    text.push('\n');
    text
}

/// Returns the disks of a report with the keys of `iostat -o JSON`.
pub(super) fn disks(rates: &[Rates], form: Form) -> Value {
    rates.iter().map(|rates| Value::Object(json_disk(rates, form))).collect()
}

fn json_disk(rates: &Rates, form: Form) -> Map<String, Value> {
    let mut disk = Map::new();
    disk.insert("disk_device".into(), rates.name.clone().into());
    let hundredths = |value: f64| Value::from((value * 100.0).round() / 100.0);
    if form.extended {
        for (value, (name, _)) in rates.extended().into_iter().zip(EXTENDED) {
            disk.insert(form.name(name.trim_start_matches('%')), hundredths(form.amount(name, value)));
        }
    } else {
        for (name, value) in rates.plain() {
            disk.insert(form.name(name), hundredths(form.amount(name, value)));
        }
        for (name, value) in rates.totals() {
            disk.insert(form.name(name), (form.amount(name, value as f64) as u64).into());
        }
    }
    disk
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENDED_FORM: Form = Form { extended: true, megabytes: false };

    fn stats(uptime_s: u64, read: (u64, u64, u64), write: (u64, u64, u64)) -> DeviceStats {
        let operation =
            |(ios, bytes, ticks_ns), merges| OpStats { ios, merges, bytes, ticks_ns, ..OpStats::default() };
        DeviceStats {
            name: "disk".into(),
            uptime_ns: uptime_s * 1_000_000_000,
            stat: [0; 17],
            errors: 0,
            in_flight: 0,
            busy_ns: uptime_s * 250_000_000,
            operations: [
                ("read".to_owned(), operation(read, 0)),
                ("write".to_owned(), operation(write, write.0)),
                ("write-zeroes".to_owned(), operation((10, 10240, 0), 0)),
                ("flush".to_owned(), operation((4, 0, 8_000_000), 0)),
            ]
            .into(),
            queues: Vec::new(),
            layers: Vec::new(),
        }
    }

    #[test]
    fn the_plain_report_has_iostats_columns() {
        let now = stats(2, (200, 819_200, 0), (0, 0, 0));
        let expected = "\
Device             tps    kB_read/s    kB_wrtn/s    kB_dscd/s    kB_read    kB_wrtn    kB_dscd
disk            105.00       400.00         5.00         0.00        800         10          0

";
        assert_eq!(text_report(&[Rates::new(None, &now)], Form::default()), expected);
    }

    #[test]
    fn the_extended_report_has_iostats_columns_and_formulas() {
        let before = stats(1, (0, 0, 0), (0, 0, 0));
        let now = stats(3, (100, 409_600, 50_000_000), (20, 20_480, 10_000_000));
        let expected = "\
Device            r/s     rkB/s   rrqm/s  %rrqm r_await rareq-sz     w/s     wkB/s   wrqm/s  %wrqm w_await \
wareq-sz     d/s     dkB/s   drqm/s  %drqm d_await dareq-sz     f/s f_await  aqu-sz  %util
disk            50.00    200.00     0.00   0.00    0.50     4.00   10.00     10.00    10.00  50.00    0.50     \
1.00    0.00      0.00     0.00   0.00    0.00     0.00    0.00    0.00    0.03  25.00

";
        assert_eq!(text_report(&[Rates::new(Some(&before), &now)], EXTENDED_FORM), expected);
    }

    #[test]
    fn megabytes_are_1024_kilobytes_and_idle_devices_are_detected() {
        let (before, now) = (stats(1, (0, 0, 0), (0, 0, 0)), stats(3, (100, 4 << 20, 0), (0, 0, 0)));
        let rates = [Rates::new(Some(&before), &now)];
        let text = text_report(&rates, Form { extended: false, megabytes: true });
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(
            (words[2], words[5], words[10], words[13]),
            ("MB_read/s", "MB_read", "2.00", "4"),
            "{text}"
        );
        let extended = disks(&rates, Form { megabytes: true, ..EXTENDED_FORM });
        assert_eq!((&extended[0]["rMB/s"], &extended[0]["rareq-sz"]), (&2.0.into(), &40.96.into()));
        assert!(!rates[0].is_idle());
        let still = DeviceStats { uptime_ns: now.uptime_ns + 1, ..now.clone() };
        assert!(Rates::new(Some(&now), &still).is_idle());
    }

    #[test]
    fn a_device_added_again_counts_from_its_start() {
        let now = stats(1, (100, 409_600, 0), (0, 0, 0));
        let rates = Rates::new(Some(&stats(9, (500, 0, 0), (0, 0, 0))), &now);
        assert_eq!(rates.read.ios, 100);
        assert!((rates.seconds - 1.0).abs() < 1e-9);
    }

    #[test]
    fn an_empty_interval_does_not_divide_by_zero() {
        let now = stats(0, (0, 0, 0), (0, 0, 0));
        let text = text_report(&[Rates::new(None, &now)], EXTENDED_FORM);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert_eq!(text_report(&[], EXTENDED_FORM).lines().count(), 2);
    }

    #[test]
    fn json_has_iostats_keys() {
        let now = stats(2, (200, 819_200, 0), (0, 0, 0));
        let plain = disks(&[Rates::new(None, &now)], Form::default());
        assert_eq!((&plain[0]["tps"], &plain[0]["kB_read"]), (&105.0.into(), &800.into()));
        let extended = disks(&[Rates::new(None, &now)], EXTENDED_FORM);
        assert_eq!((&extended[0]["util"], &extended[0]["rareq-sz"]), (&25.0.into(), &4.0.into()));
    }

    #[test]
    fn queues_have_rows() {
        let mut now = stats(2, (0, 0, 0), (0, 0, 0));
        now.queues = vec![[0; 17], [200, 0, 1600, 100, 0, 0, 0, 0, 0, 500, 100, 0, 0, 0, 0, 0, 0]];
        let rows = Rates::of_queues(None, &now);
        assert_eq!(
            (rows[1].name.as_str(), rows[1].extended()[0], rows[1].extended()[4]),
            ("disk.1", 100.0, 0.5)
        );
        assert_eq!(rows[1].extended()[21], 25.0);
    }
}
