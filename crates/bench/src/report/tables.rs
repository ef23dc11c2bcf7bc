//! The results that the five texts published, and the figures of this machine with which they are compared.

use super::results::{Figure, Results};
use crate::figures::ratio;

/// The kind of system that a line measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// The system of the text, in its current version.
    Original,
    /// Another program for the same purpose.
    Alternative,
    Ours,
}

/// A figure that a text published.
pub(super) struct Published {
    pub(super) name: &'static str,
    pub(super) figure: &'static str,
}

/// One line of a chart.
pub(super) struct Line {
    pub(super) name: &'static str,
    pub(super) role: Role,
    pub(super) subject: &'static str,
}

/// A claim of a text about two lines: the first has more of the chart's column than the second.
pub(super) struct Order {
    pub(super) more: &'static str,
    pub(super) less: &'static str,
    pub(super) column: &'static str,
}

/// A chart of one job: its figures side by side.
pub(super) struct Chart {
    pub(super) title: &'static str,
    pub(super) part: &'static str,
    pub(super) job: &'static str,
    /// The column that is drawn.
    pub(super) column: &'static str,
    /// The first measured line is the reference of the ratios.
    pub(super) lines: &'static [Line],
    pub(super) orders: &'static [Order],
    /// A sentence on the scope of the comparison.
    pub(super) note: &'static str,
}

/// The charts of one text.
pub(super) struct Table {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) origin: &'static str,
    pub(super) published: &'static [Published],
    pub(super) charts: &'static [Chart],
}

/// Whether this run confirms an order that a text found.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Verdict {
    Reproduced(f64),
    NotReproduced(f64),
    NotMeasured,
}

impl Chart {
    pub(super) fn figure<'a>(&self, results: &'a Results, line: &Line) -> Option<&'a Figure> {
        results
            .find(self.part, line.subject, self.job)
            .filter(|figure| !figure.values(self.column).is_empty())
    }

    /// Whether the part runs on a kernel of its own.
    pub(super) fn is_in_guest(&self) -> bool {
        matches!(self.part, "fabrics" | "servers" | "multipath" | "splits")
    }

    /// Returns the lines without a figure whose subject was left out, each with the reason.
    pub(super) fn left_out<'a>(&self, results: &'a Results) -> Vec<(&'static Line, &'a str)> {
        let lines = self.lines.iter().filter(|line| self.figure(results, line).is_none());
        lines.filter_map(|line| Some((line, results.why_left_out(self.part, line.subject)?))).collect()
    }

    pub(super) fn verdict(&self, results: &Results, order: &Order) -> Verdict {
        let values = |subject| results.find(self.part, subject, self.job).map(|one| one.values(order.column));
        let times = match (values(order.more), values(order.less)) {
            (Some(more), Some(less)) => ratio(&more, &less),
            _ => f64::NAN,
        };
        match times {
            times if times.is_nan() => Verdict::NotMeasured,
            times if times > 1.0 => Verdict::Reproduced(times),
            times => Verdict::NotReproduced(times),
        }
    }
}

const fn line(name: &'static str, role: Role, subject: &'static str) -> Line {
    Line { name, role, subject }
}

const fn published(name: &'static str, figure: &'static str) -> Published {
    Published { name, figure }
}

const fn order(more: &'static str, less: &'static str, column: &'static str) -> Order {
    Order { more, less, column }
}

use Role::{Alternative, Original, Ours};

const LOOPS: &[Line] = &[
    line("kernel loop, buffered", Original, "loop-buffered"),
    line("kernel loop, direct I/O", Original, "loop-direct"),
    line("nbdfuse and nbdkit under loop", Alternative, "nbdfuse"),
    line("qemu-storage-daemon under loop", Alternative, "qemu"),
    line("Blockyard, file, --loop", Ours, "ours"),
    line("Blockyard, direct file, --loop", Ours, "ours-direct"),
];

const WORKERS: &[Line] = &[
    line("kernel loop, buffered, one worker", Original, "loop-buffered"),
    line("kernel loop, buffered, four workers", Original, "loop-workers"),
    line("kernel loop, direct I/O", Original, "loop-direct"),
    line("Blockyard, file, --loop, one thread", Ours, "ours-one-thread"),
    line("Blockyard, file, --loop, one a processor", Ours, "ours"),
];

const FABRICS: &[Line] = &[
    line("kernel loop, buffered", Original, "loop-buffered"),
    line("LIO fileio, tcm_loop", Original, "lio-fileio"),
    line("LIO ramdisk, tcm_loop", Original, "lio-ramdisk"),
    line("Blockyard, file, ublk", Ours, "file"),
    line("Blockyard, RAM, ublk", Ours, "ram"),
];

const ISCSI: &[Line] = &[
    line("LIO fileio, iSCSI", Original, "lio-iscsi-file"),
    line("tgtd file, iSCSI", Alternative, "tgtd-file"),
    line("Blockyard, file, iSCSI", Ours, "iscsi-file"),
];

const SERVERS: &[Line] = &[
    line("kernel nbd, nbdkit memory", Original, "nbd-nbdkit"),
    line("rublk loop, ublk", Original, "rublk-loop"),
    line("kernel nbd, qemu-nbd file", Alternative, "nbd-qemu"),
    line("SPDK memory, ublk", Alternative, "spdk-ram"),
    line("Blockyard, RAM, kernel nbd", Ours, "nbd-ram"),
    line("Blockyard, RAM, ublk", Ours, "ram"),
    line("Blockyard, file, ublk", Ours, "file"),
];

const SELECTORS: &[Line] = &[
    line("null_blk alone", Original, "null_blk"),
    line("dm-multipath, service-time", Original, "dm-service-time"),
    line("dm-multipath, queue-length", Original, "dm-queue-length"),
    line("dm-multipath, round-robin", Original, "dm-round-robin"),
    line("dm-multipath, historical-service-time", Original, "dm-historical-service-time"),
    line("dm-multipath, io-affinity", Original, "dm-io-affinity"),
    line("Blockyard, service-time, ublk", Ours, "multipath-service-time"),
    line("Blockyard, queue-length, ublk", Ours, "multipath-queue-length"),
    line("Blockyard, round-robin, ublk", Ours, "multipath-round-robin"),
    line("Blockyard, historical-service-time, ublk", Ours, "multipath-historical-service-time"),
    line("Blockyard, io-affinity, ublk", Ours, "multipath-io-affinity"),
];

const QUEUES: &[Line] = &[
    line("dm-multipath, round-robin, 1 queue", Original, "queues-dm-1"),
    line("dm-multipath, round-robin, 2 queues", Original, "dm-round-robin"),
    line("Blockyard, round-robin, ublk, 1 queue", Ours, "queues-ours-1"),
    line("Blockyard, round-robin, ublk, 2 queues", Ours, "multipath-round-robin"),
];

macro_rules! inside {
    ($threads:literal) => {
        &[
            line("null alone", Ours, concat!("raw null/", $threads)),
            line("service-time, one mutex", Original, concat!("service-time/4/mutex/", $threads)),
            line("queue-length, one mutex", Original, concat!("queue-length/4/mutex/", $threads)),
            line("round-robin, one mutex", Original, concat!("round-robin/4/mutex/", $threads)),
            line(
                "historical-service-time, one mutex",
                Original,
                concat!("historical-service-time/4/mutex/", $threads),
            ),
            line("io-affinity, one mutex", Original, concat!("io-affinity/4/mutex/", $threads)),
            line("service-time, no lock", Ours, concat!("service-time/4/", $threads)),
            line("queue-length, no lock", Ours, concat!("queue-length/4/", $threads)),
            line("round-robin, no lock", Ours, concat!("round-robin/4/", $threads)),
            line("historical-service-time, no lock", Ours, concat!("historical-service-time/4/", $threads)),
            line("io-affinity, no lock", Ours, concat!("io-affinity/4/", $threads)),
        ]
    };
}

/// A line for each number of queues and threads; those beyond the machine's processors are not drawn.
macro_rules! scaling {
    ($($threads:literal),*) => {
        &[
            $(line(
                concat!("round-robin, one mutex, threads: ", $threads),
                Original,
                concat!("round-robin/4/mutex/", $threads)
            ),)*
            $(line(concat!("round-robin, no lock, threads: ", $threads), Ours, concat!("round-robin/4/", $threads)),)*
        ]
    };
}

const LOOP_NOTE: &str = "One job, 64 requests of 4 KiB in flight, files in memory with XFS. The driver before \
                         blk-mq exists in no current kernel, so today's driver stands for the one after it.";
const DISK_NOTE: &str = "Four jobs with one request each, images on this machine's disk with XFS. The orders are \
                         those of buffered and direct I/O.";

const WORKERS_NOTE: &str = "Four jobs with one request each, files in memory with XFS. Today's driver has a worker \
                            for each cgroup, so four workers are four jobs in cgroups of their own; the text's \
                            storage was slower than memory.";

macro_rules! deep {
    ($job:literal, $title:literal) => {
        Chart {
            title: $title,
            part: "memory",
            job: $job,
            column: "iops",
            lines: LOOPS,
            orders: &[],
            note: LOOP_NOTE,
        }
    };
}

macro_rules! psync {
    ($job:literal, $title:literal, $orders:expr) => {
        Chart {
            title: $title,
            part: "disk",
            job: $job,
            column: "iops",
            lines: LOOPS,
            orders: $orders,
            note: DISK_NOTE,
        }
    };
}

macro_rules! workers {
    ($job:literal, $title:literal, $orders:expr) => {
        Chart {
            title: $title,
            part: "workers",
            job: $job,
            column: "iops",
            lines: WORKERS,
            orders: $orders,
            note: WORKERS_NOTE,
        }
    };
}

const DIRECT_IS_FASTER: &[Order] = &[order("loop-direct", "loop-buffered", "iops")];

macro_rules! served {
    ($job:literal, $title:literal, $orders:expr) => {
        Chart {
            title: $title,
            part: "servers",
            job: $job,
            column: "iops",
            lines: SERVERS,
            orders: $orders,
            note: "The text's NBD server and its ublk target are older than those measured here, and its machine \
                   ran 32 queues; here both have one. qemu-nbd serves a file in memory, since it has no memory of \
                   its own to serve.",
        }
    };
}

/// All texts, in the order of the page.
pub(super) const TABLES: &[Table] = &[
    Table {
        id: "lio",
        title: "Loop against LIO",
        origin: "fio 2.20 on Linux 4.11.3 (2017), a Sony VAIO SVP1121A1J: 4 KiB, half reads, 4 jobs with 16 requests \
                 in flight on 8 files each, XFS on devices over tmpfs. Reads and writes together.",
        published: &[
            published(
                "loop",
                "244,000 IOPS, 956 MiB/s, p99 322 us (reads); CPU 12.7 + 40.5 %; 18.2 M switches",
            ),
            published(
                "LIO fileio, tcm_loop",
                "107,200 IOPS, 420 MiB/s, p99 692 us; CPU 7.3 + 45.4 %; 19.3 M switches",
            ),
            published(
                "LIO ramdisk, tcm_loop",
                "115,400 IOPS, 450 MiB/s, p99 628 us; CPU 7.5 + 46.2 %; 20.8 M switches",
            ),
            published("LIO with SCSI multi-queue", "181,500 IOPS, 709 MiB/s, p99 406 us; 32.0 M switches"),
        ],
        charts: &[
            Chart {
                title: "The text's job on loop, LIO and ublk",
                part: "fabrics",
                job: "randrw-files",
                column: "iops",
                lines: FABRICS,
                orders: &[
                    order("loop-buffered", "lio-fileio", "iops"),
                    order("loop-buffered", "lio-ramdisk", "iops"),
                    order("lio-ramdisk", "lio-fileio", "iops"),
                ],
                note: "The file system is ext4, and LIO always uses multi-queue SCSI today; the text's single-queue \
                       LIO no longer exists.",
            },
            Chart {
                title: "The text's job on iSCSI targets",
                part: "fabrics",
                job: "randrw-files",
                column: "iops",
                lines: ISCSI,
                orders: &[],
                note: "The text compares no iSCSI targets; tgtd, the usual alternative to LIO, has no other way to a \
                       local disk. All through the kernel's initiator, with equal parameters, on a file in memory.",
            },
            Chart {
                title: "The text's job on loop devices of this kernel",
                part: "memory",
                job: "files-randrw",
                column: "iops",
                lines: LOOPS,
                orders: &[],
                note: "LIO is missing here, because this kernel may lack it; the chart before has it.",
            },
        ],
    },
    Table {
        id: "loop",
        title: "The loop driver's changes",
        origin: "Commit messages of the loop driver: blk-mq (b5dd2f6047, 2015, on 3.19-rc2, ext4 on an SSD), one \
                 worker thread (e03a3d7a94, 2015) and direct I/O with AIO (bc07c10a36, 2015, KVM with 4 processors \
                 and 2 GiB).",
        published: &[
            published("blk-mq, random reads", "1,740 before, 25,318 IOPS after"),
            published("blk-mq, reads", "42,196 before, 51,771 IOPS after"),
            published("blk-mq, random writes", "35,709 before, 34,624 IOPS after"),
            published("blk-mq, writes", "39,137 before, 40,326 IOPS after"),
            published(
                "one worker instead of many",
                "no figures: many improve random reads, may hurt sequential reads, and cost context switches",
            ),
            published("direct I/O, random reads", "8,015 buffered, 8,136 IOPS direct"),
            published("direct I/O, reads", "113,811 buffered, 125,040 IOPS direct"),
            published("direct I/O, random writes", "67,442 buffered, 67,811 IOPS direct"),
            published("direct I/O, writes", "106,978 buffered, 111,376 IOPS direct"),
            published("direct I/O", "half the context switches; page cache 1.6 GB instead of twice 0.95 GB"),
        ],
        charts: &[
            deep!("randread-64", "Random reads, 64 in flight"),
            deep!("read-64", "Reads, 64 in flight"),
            deep!("randwrite-64", "Random writes, 64 in flight"),
            deep!("write-64", "Writes, 64 in flight"),
            psync!("randread-psync-4", "Random reads, buffered and direct", DIRECT_IS_FASTER),
            psync!("read-psync-4", "Reads, buffered and direct", DIRECT_IS_FASTER),
            psync!("randwrite-psync-4", "Random writes, buffered and direct", DIRECT_IS_FASTER),
            psync!("write-psync-4", "Writes, buffered and direct", DIRECT_IS_FASTER),
            workers!(
                "randread-psync-4",
                "Workers: random reads of four jobs",
                &[
                    order("loop-workers", "loop-buffered", "iops"),
                    order("loop-workers", "loop-buffered", "switches"),
                ]
            ),
            workers!(
                "read-psync-4",
                "Workers: sequential reads of four jobs",
                &[
                    order("loop-buffered", "loop-workers", "iops"),
                    order("loop-buffered", "loop-direct", "switches"),
                ]
            ),
            Chart {
                title: "Growth of the page cache while reading, MiB",
                part: "disk",
                job: "read-psync-4",
                column: "cached_mib",
                lines: LOOPS,
                orders: &[],
                note: "The growth during the runs, of the whole machine: after the first round of a buffered device \
                       its data is in the cache already.",
            },
        ],
    },
    Table {
        id: "multipath",
        title: "dm-multipath without a lock",
        origin: "Four patches of 2016, over null_blk on a machine of 4 nodes and 192 processors: random reads of 4 KiB, \
                 32 jobs pinned to processors with 32 requests in flight each, 32 queues.",
        published: &[
            published("null_blk alone", "6,055,900 IOPS"),
            published("service-time", "1,655,500 with the lock, 2,778,300 IOPS without"),
            published("queue-length", "1,728,400 with the lock, 2,729,100 IOPS without"),
            published("round-robin", "2,083,900 with the lock, 4,169,100 IOPS without"),
            published("12 queues, round-robin", "1,931,500 with the lock, 2,675,200 IOPS without"),
        ],
        charts: &[
            Chart {
                title: "Selectors of the kernel and ours, one job",
                part: "multipath",
                job: "randread-32",
                column: "iops",
                lines: SELECTORS,
                orders: &[
                    order("null_blk", "dm-round-robin", "iops"),
                    order("dm-round-robin", "dm-service-time", "iops"),
                    order("dm-round-robin", "dm-queue-length", "iops"),
                ],
                note: "Ours is measured through ublk, which costs more than multipath itself; the kernel's is called \
                       as a function.",
            },
            Chart {
                title: "Two jobs, each on a processor of its own",
                part: "multipath",
                job: "pinned-2",
                column: "iops",
                lines: SELECTORS,
                orders: &[order("dm-round-robin", "dm-service-time", "iops")],
                note: "Two queues instead of 32.",
            },
            Chart {
                title: "Queue counts: two jobs, each on a processor of its own",
                part: "multipath",
                job: "pinned-2",
                column: "iops",
                lines: QUEUES,
                orders: &[order("dm-round-robin", "queues-dm-1", "iops")],
                note: "1 and 2 queues instead of 12 and 32, of the multipath device and of each path: the guest has two \
                       processors, and a kernel has no more queues than those.",
            },
            Chart {
                title: "Inside one process, one thread",
                part: "paths",
                job: "inside",
                column: "iops",
                lines: inside!("1"),
                orders: &[],
                note: "The lock is one mutex around our own state, as the kernel's was before the patches; without \
                       another thread it costs little.",
            },
            Chart {
                title: "Inside one process, two threads",
                part: "paths",
                job: "inside",
                column: "iops",
                lines: inside!("2"),
                orders: &[
                    order("round-robin/4/2", "round-robin/4/mutex/2", "iops"),
                    order("service-time/4/2", "service-time/4/mutex/2", "iops"),
                    order("queue-length/4/2", "queue-length/4/mutex/2", "iops"),
                ],
                note: "Two threads instead of 32, without a kernel.",
            },
            Chart {
                title: "Inside one process, by threads with a queue each",
                part: "paths",
                job: "inside",
                column: "iops",
                lines: scaling!("1", "2", "4", "8", "16", "32", "64"),
                orders: &[
                    order("round-robin/4/2", "round-robin/4/1", "iops"),
                    order("round-robin/4/mutex/1", "round-robin/4/mutex/2", "iops"),
                ],
                note: "Round-robin, without a kernel, with as many threads and queues as this machine has processors.",
            },
        ],
    },
    Table {
        id: "ublk",
        title: "ublk against NBD",
        origin: "fio 3.33 in 2022 on a Ryzen 9 3950X: 4 KiB, half reads, 4 jobs with 16 requests in flight on 8 files \
                 each, ext4, on ublk's loop target over a RAM disk and on the kernel's nbd with a memory server.",
        published: &[
            published(
                "ublk, loop target",
                "360,000 IOPS, 1,407 MiB/s, p99 322 us; CPU 8.5 + 31.4 %; 29.9 M switches",
            ),
            published(
                "nbd, memory server",
                "332,000 IOPS, 1,296 MiB/s, p99 255 us; CPU 5.5 + 34.4 %; 23.0 M switches",
            ),
        ],
        charts: &[
            served!(
                "randrw-files",
                "The text's job",
                &[order("rublk-loop", "nbd-nbdkit", "iops"), order("rublk-loop", "nbd-nbdkit", "p99_us")]
            ),
            served!("randread-1", "Random reads, one in flight", &[]),
            served!("randread-32", "Random reads, 32 in flight", &[]),
            served!("randwrite-32", "Random writes, 32 in flight", &[]),
            served!("read-128k", "Reads of 128 KiB", &[]),
        ],
    },
    Table {
        id: "limits",
        title: "A memory driver with and without queue limits",
        origin: "A sample block driver on Linux 4.6: two jobs write 2 MiB of a device of 5 MiB again and again. A driver \
                 that sets no limits had 255 sectors and 128 segments then.",
        published: &[
            published(
                "default limits",
                "about 8,000 requests of 220 sectors a second, 900 MB/s, wait 0.10 to 0.15 ms",
            ),
            published(
                "no limits",
                "742 to 799 requests of 2,730 to 2,980 sectors a second, 1,065 to 1,097 MB/s, wait 0.26 to 0.29 ms",
            ),
        ],
        charts: &[
            Chart {
                title: "Bytes a second",
                part: "limits",
                job: "write",
                column: "bytes",
                lines: &[
                    line("255 sectors, 128 segments", Ours, "limits"),
                    line("no limits", Ours, "no-limits"),
                ],
                orders: &[
                    order("no-limits", "limits", "bytes"),
                    order("limits", "no-limits", "iops"),
                    order("no-limits", "limits", "wait_ms"),
                ],
                note: "Our RAM disk over NBD without a file system; the figures are those of blockyard stat.",
            },
            Chart {
                title: "Bytes a second of kernel devices",
                part: "splits",
                job: "write-1m",
                column: "bytes",
                lines: &[
                    line("null_blk in memory", Original, "memory-no-limits"),
                    line("null_blk in memory, 255 sectors", Original, "memory-255"),
                    line("Blockyard, RAM, ublk", Ours, "ram-no-limits"),
                    line("Blockyard, RAM, ublk, 255 sectors", Ours, "ram-255"),
                ],
                orders: &[
                    order("memory-no-limits", "memory-255", "bytes"),
                    order("memory-255", "memory-no-limits", "requests_per_mib"),
                    order("memory-no-limits", "memory-255", "wait_ms"),
                ],
                note: "null_blk in memory stands for the text's driver, which no kernel contains.",
            },
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::super::parts::PARTS;
    use super::super::results::example;
    use super::*;

    #[test]
    fn charts_name_parts_that_exist_and_orders_name_their_lines() {
        for chart in TABLES.iter().flat_map(|table| table.charts) {
            assert!(PARTS.iter().any(|part| part.name == chart.part), "{}", chart.title);
            for order in chart.orders {
                for subject in [order.more, order.less] {
                    assert!(
                        chart.lines.iter().any(|line| line.subject == subject),
                        "{}: {subject}",
                        chart.title
                    );
                }
            }
        }
    }

    #[test]
    fn an_order_is_judged_by_the_ratio_within_each_round() {
        let results = example();
        let chart = &TABLES[0].charts[0];
        let judge = |more, less| chart.verdict(&results, &order(more, less, "iops"));
        assert_eq!(judge("loop-buffered", "lio-fileio"), Verdict::Reproduced(2.5));
        assert_eq!(judge("lio-fileio", "file"), Verdict::NotReproduced(0.2361111111111111));
        assert_eq!(judge("loop-buffered", "lio-ramdisk"), Verdict::NotMeasured);
    }
}
