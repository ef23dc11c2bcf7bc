//! The parameters of schedulers as help and the reference show them, with the kernel's names, units and
//! defaults.

use super::Policy;
use options::OptionRow;

const ASYNC_DEPTH: OptionRow = OptionRow::value(
    "async_depth",
    "0..4096",
    "0",
    "writes in the scheduler and at the device at once; 0: all, or 75 % of the requests under kyber",
);
const QUEUE_DEPTH: OptionRow =
    OptionRow::value("queue_depth", "1..4096", "32", "requests of each queue at the device at once");
const NOMERGES: OptionRow = OptionRow::value(
    "nomerges",
    "0|1|2",
    "0",
    "merge requests with any that wait (0), with the last one only (1), or never (2)",
);

const MQ_DEADLINE: &[OptionRow] = &[
    OptionRow::value("read_expire", "MS", "500", "milliseconds that a read may wait before it is preferred"),
    OptionRow::value(
        "write_expire",
        "MS",
        "5000",
        "milliseconds that a write may wait before it is preferred",
    ),
    OptionRow::value("writes_starved", "N", "2", "batches of reads that may go before writes that wait"),
    OptionRow::value("front_merges", "0|1", "1", "whether requests are merged in front of others, too"),
    OptionRow::value("fifo_batch", "N", "16", "requests of a batch"),
    ASYNC_DEPTH,
    QUEUE_DEPTH,
    NOMERGES,
];

const KYBER: &[OptionRow] = &[
    OptionRow::value("read_lat_nsec", "NS", "2000000", "the target latency of reads, in nanoseconds"),
    OptionRow::value("write_lat_nsec", "NS", "10000000", "the target latency of writes, in nanoseconds"),
    ASYNC_DEPTH,
    QUEUE_DEPTH,
    NOMERGES,
];

impl Policy {
    /// Returns the parameters, each with its value, default and purpose.
    pub const fn options(self) -> &'static [OptionRow] {
        match self {
            Policy::MqDeadline => MQ_DEADLINE,
            Policy::Kyber => KYBER,
        }
    }

    /// Returns a description of the policy, half a line long.
    pub const fn about(self) -> &'static str {
        match self {
            Policy::MqDeadline => "requests in the order of sectors, with deadlines; reads go before writes",
            Policy::Kyber => "as many requests at the device as the target latencies allow",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Choice;
    use super::*;

    #[test]
    fn every_parameter_has_a_row_with_the_default_of_the_scheduler() {
        for policy in Policy::ALL {
            let plain = Choice::of(policy);
            let mut given = plain;
            for row in policy.options() {
                given.set(row.key, row.default).unwrap_or_else(|why| panic!("{row:?}: {why}"));
            }
            assert_eq!(given.shown(64), plain.shown(64));
            let mut keys: Vec<&str> = policy.options().iter().map(|row| row.key).collect();
            let mut known: Vec<&str> = plain.shown(64).into_iter().map(|(name, _)| name).collect();
            keys.sort_unstable();
            known.sort_unstable();
            assert_eq!(keys, known, "{policy:?}");
        }
    }
}
