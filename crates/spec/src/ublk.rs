//! How a device is shown as a kernel block device by ublk: `--ublk[=N][,key=value…]`.

use super::SpecError;
use block::Bytes;
use exports::ublk::DataMode;
use options::{Options, split};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Tags of a queue, at most, by the driver.
const DEPTH_MAX: u16 = ublk::QUEUE_DEPTH_MAX - 1;
/// The smallest largest request: the driver wants a page.
const IO_MAX_LEAST: Bytes = Bytes(4096);
/// The most that one request may move, by the driver.
const IO_MAX_MOST: Bytes = Bytes(ublk::IO_BUFFER_BYTES_MAX as u64);

/// What becomes of a block device and its requests when its server dies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Recovery {
    /// The device goes, requests fail.
    None,
    /// The device waits for a new server. Requests that the old one had fail, all others wait.
    Requeue,
    /// The device waits for a new server, which gets the requests of the old one again.
    Reissue,
    /// The device waits for a new server, and requests fail until there is one.
    FailIo,
}

impl Recovery {
    /// The words for them.
    pub const WORDS: [(&'static str, Recovery); 4] = [
        ("none", Recovery::None),
        ("requeue", Recovery::Requeue),
        ("reissue", Recovery::Reissue),
        ("fail-io", Recovery::FailIo),
    ];

    /// The features that stand for it.
    pub const fn features(self) -> ublk::Features {
        use ublk::Features;
        match self {
            Recovery::None => Features::NONE,
            Recovery::Requeue => Features::USER_RECOVERY,
            Recovery::Reissue => Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE),
            Recovery::FailIo => Features::USER_RECOVERY.with(Features::USER_RECOVERY_FAIL_IO),
        }
    }

    /// That of a device with these features.
    pub const fn of(features: ublk::Features) -> Recovery {
        use ublk::Features;
        if !features.has(Features::USER_RECOVERY) {
            Recovery::None
        } else if features.has(Features::USER_RECOVERY_REISSUE) {
            Recovery::Reissue
        } else if features.has(Features::USER_RECOVERY_FAIL_IO) {
            Recovery::FailIo
        } else {
            Recovery::Requeue
        }
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Recovery::WORDS.iter().find(|(_, recovery)| recovery == self).map(|(word, _)| *word);
        f.pad(word.unwrap_or_default())
    }
}

/// A ublk device that shall be made.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct UblkSpec {
    /// The N of `/dev/ublkbN`; none: any that is free.
    pub number: Option<u32>,
    /// Hardware queues; none: one for each I/O thread.
    pub queues: Option<u16>,
    /// Tags of each; none: the device's depth.
    pub depth: Option<u16>,
    /// The most that one request may move; none: the host's default.
    pub io_max: Option<Bytes>,
    /// The way of data; none: the best there is.
    pub mode: Option<DataMode>,
    /// What happens when the server dies; none: what the stack can bear.
    pub recovery: Option<Recovery>,
    /// Made without privilege, and for its owner only.
    pub unprivileged: bool,
    /// Every queue is served by all I/O threads, each with its share of the tags.
    pub per_io_daemon: bool,
    /// Do not look for partitions.
    pub no_part_scan: bool,
    /// Whether one command is about many requests; none: where that is faster.
    pub batch: Option<bool>,
    /// A file whose pages clients have mapped for their requests' data; none: they share no memory.
    pub shmem: Option<PathBuf>,
}

const KEYS: &[&str] = &[
    "queues",
    "depth",
    "io",
    "mode",
    "recovery",
    "unprivileged",
    "per-io-daemon",
    "no-part-scan",
    "batch",
    "shmem",
];

/// The words for whether.
const YES_OR_NO: [(&str, bool); 2] = [("yes", true), ("no", false)];

impl FromStr for UblkSpec {
    type Err = SpecError;

    /// `[N][,key=value…]`; the first item may be left out with its comma.
    fn from_str(text: &str) -> Result<UblkSpec, SpecError> {
        let mut items = split(text);
        let number = match items[0].as_str() {
            "" => {
                items.remove(0);
                None
            }
            first if first.starts_with(|c: char| c.is_ascii_digit()) => {
                let number = first.parse().map_err(|_| {
                    SpecError::new(
                        format!("\"{first}\" is not a device number"),
                        "for example 0 for /dev/ublkb0",
                    )
                })?;
                items.remove(0);
                Some(number)
            }
            _ => None,
        };
        let mut options = Options::new("ublk", KEYS, items.into_iter())?;
        let mode = options.text("mode")?.filter(|word| word != "auto");
        Ok(UblkSpec {
            number,
            queues: in_range("queues", options.value("queues", "2")?, 1, super::QUEUES_MAX)?,
            depth: in_range("depth", options.value("depth", "128")?, 1, DEPTH_MAX)?,
            io_max: options.value("io", "512K")?.map(io_max).transpose()?,
            mode: mode.map(|word| mode_of(&word)).transpose()?,
            recovery: options.choice("recovery", &Recovery::WORDS)?,
            unprivileged: options.flag("unprivileged")?,
            per_io_daemon: options.flag("per-io-daemon")?,
            no_part_scan: options.flag("no-part-scan")?,
            batch: options.choice("batch", &YES_OR_NO)?,
            shmem: options.text("shmem")?.map(PathBuf::from),
        })
    }
}

fn mode_of(word: &str) -> Result<DataMode, SpecError> {
    word.parse().map_err(|_| {
        let words: Vec<_> = DataMode::ALL.iter().map(|mode| mode.name()).collect();
        SpecError::new(
            format!("option mode does not know \"{word}\""),
            format!("use one of auto, {}", words.join(", ")),
        )
    })
}

fn in_range(key: &str, value: Option<u16>, least: u16, most: u16) -> Result<Option<u16>, SpecError> {
    match value {
        Some(value) if !(least..=most).contains(&value) => Err(SpecError::new(
            format!("option {key}: {value} is out of range"),
            format!("choose {least} to {most}"),
        )),
        value => Ok(value),
    }
}

fn io_max(value: Bytes) -> Result<Bytes, SpecError> {
    let fits = (IO_MAX_LEAST..=IO_MAX_MOST).contains(&value) && value.0.is_multiple_of(IO_MAX_LEAST.0);
    if fits {
        Ok(value)
    } else {
        Err(SpecError::new(
            format!("option io: {value} is out of range"),
            "choose 4K to 32M, in whole pages of 4K",
        ))
    }
}

impl fmt::Display for UblkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items: Vec<String> = self.number.map(|number| number.to_string()).into_iter().collect();
        let mut add =
            |key: &str, value: Option<String>| items.extend(value.map(|value| format!("{key}={value}")));
        add("queues", self.queues.map(|n| n.to_string()));
        add("depth", self.depth.map(|n| n.to_string()));
        add("io", self.io_max.map(|size| size.to_string()));
        add("mode", self.mode.map(|mode| mode.to_string()));
        add("recovery", self.recovery.map(|recovery| recovery.to_string()));
        let word =
            |given: bool| YES_OR_NO.iter().find(|(_, is)| *is == given).map(|(word, _)| (*word).to_owned());
        add("batch", self.batch.and_then(word));
        add("shmem", self.shmem.as_ref().map(|path| path.display().to_string()));
        for (key, given) in [
            ("unprivileged", self.unprivileged),
            ("per-io-daemon", self.per_io_daemon),
            ("no-part-scan", self.no_part_scan),
        ] {
            items.extend(given.then(|| key.to_owned()));
        }
        f.write_str(&items.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ublk_export_reads_as_it_is_written() {
        for text in [
            "",
            "7",
            "0,queues=2,depth=64,io=1M,mode=user-copy,recovery=fail-io,batch=no,shmem=/dev/shm/memory,unprivileged,per-io-daemon,no-part-scan",
            "batch=yes",
            "recovery=none",
        ] {
            assert_eq!(text.parse::<UblkSpec>().unwrap().to_string(), text);
        }
        assert_eq!("mode=auto".parse::<UblkSpec>().unwrap(), UblkSpec::default());
        assert_eq!(",depth=8".parse::<UblkSpec>().unwrap().depth, Some(8));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_does() {
        for (text, says) in [
            ("4294967296", "is not a device number"),
            ("0,depth=4096", "choose 1 to 4095"),
            ("0,depth=0", "choose 1 to 4095"),
            ("io=1000", "4K to 32M"),
            ("io=64M", "4K to 32M"),
            ("mode=fast", "use one of auto, copy"),
            ("recovery=maybe", "use one of none, requeue, reissue, fail-io"),
            ("0,speed=9", "ublk has queues"),
            ("queues=0", "choose 1 to 256"),
        ] {
            let error = text.parse::<UblkSpec>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn the_recovery_of_a_device_is_read_from_its_features() {
        for (_, recovery) in Recovery::WORDS {
            assert_eq!(Recovery::of(recovery.features()), recovery);
        }
    }
}
