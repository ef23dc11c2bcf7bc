//! `--ublk[=N][,OPTION…]`: an export as `/dev/ublkbN`, a block device of the kernel's ublk driver.

use super::{Conflict, ExportOptions, ExportRow, NbdOptions};
use crate::SpecError;
use block::Bytes;
use exports::ublk::DataMode;
use options::{OptionRow, Options, split};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The largest number of tags of a queue that the driver allows.
const DEPTH_MAX: u16 = ublk::QUEUE_DEPTH_MAX - 1;
/// The smallest value of `io`: the driver requires a page.
const IO_MAX_LEAST: Bytes = Bytes(4096);
/// The largest value of `io` that the driver allows.
const IO_MAX_MOST: Bytes = Bytes(ublk::IO_BUFFER_BYTES_MAX as u64);

/// The driver's policy for a device and its requests when the server dies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Recovery {
    /// The device is removed, and requests fail.
    None,
    /// The device waits for a new server. Requests that the old one had received fail, and all others wait.
    Requeue,
    /// The device waits for a new server, which receives the requests of the old one again.
    Reissue,
    /// The device waits for a new server, and requests fail until it starts.
    FailIo,
}

impl Recovery {
    /// The policies with their names in descriptions.
    pub const WORDS: [(&'static str, Recovery); 4] = [
        ("none", Recovery::None),
        ("requeue", Recovery::Requeue),
        ("reissue", Recovery::Reissue),
        ("fail-io", Recovery::FailIo),
    ];

    /// The driver's features that select this policy.
    pub const fn features(self) -> ublk::Features {
        use ublk::Features;
        match self {
            Recovery::None => Features::NONE,
            Recovery::Requeue => Features::USER_RECOVERY,
            Recovery::Reissue => Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE),
            Recovery::FailIo => Features::USER_RECOVERY.with(Features::USER_RECOVERY_FAIL_IO),
        }
    }

    /// Returns the policy of a device with these features.
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

/// An export as a ublk device.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct UblkSpec {
    /// The N of `/dev/ublkbN`; `None`: any that is free.
    pub number: Option<u32>,
    /// Hardware queues; `None`: one per I/O thread.
    pub queues: Option<u16>,
    /// Tags of each queue; `None`: the device's depth.
    pub depth: Option<u16>,
    /// The size of the largest request; `None`: the host's default.
    pub io_max: Option<Bytes>,
    /// How request data is transferred; `None`: the best mode that the driver and the stack support.
    pub mode: Option<DataMode>,
    /// The policy when the server dies; `None`: the best one that the stack supports.
    pub recovery: Option<Recovery>,
    /// Whether the device is created without privilege, for its owner only.
    pub unprivileged: bool,
    /// Whether every I/O thread serves every queue, each with a share of its tags.
    pub per_io_daemon: bool,
    /// Whether the kernel's partition scan is switched off.
    pub no_part_scan: bool,
    /// Whether one command fetches and completes many requests; `None`: the host decides.
    pub batch: Option<bool>,
    /// A file that clients map as memory for the data of their requests; `None`: clients share no memory.
    pub shmem: Option<PathBuf>,
}

const OPTIONS: &[OptionRow] = &[
    OptionRow::value("queues", "1..256", "one per I/O thread", "hardware queues"),
    OptionRow::value("depth", "1..4095", "the device's", "tags of each queue"),
    OptionRow::value("io", "4K..32M", "512K or less, see show", "the largest request, in whole pages of 4K"),
    OptionRow::value(
        "mode",
        "auto|copy|get-data|user-copy|zero-copy|auto-zero-copy",
        "auto",
        "how data moves between the kernel and the server",
    ),
    OptionRow::value(
        "recovery",
        "none|requeue|reissue|fail-io",
        "reissue if the contents outlive the process, else none",
        "when the server dies: remove the device; or keep it for blockyard recover, and fail requests in flight \
         (requeue), issue them again (reissue), or fail all until then (fail-io)",
    ),
    OptionRow::flag("unprivileged", "create the device as an ordinary user, who owns it"),
    OptionRow::flag(
        "per-io-daemon",
        "every I/O thread serves every queue, each with a share of its tags (Linux 6.16)",
    ),
    OptionRow::flag("no-part-scan", "the kernel does not scan the device for partitions"),
    OptionRow::value("batch", "yes|no", "no", "fetch and complete many requests by one command (Linux 7.0)"),
    OptionRow::value(
        "shmem",
        "FILE",
        "",
        "memory that clients map, too: requests with buffers in it are not copied",
    ),
];

/// The values of `batch`.
const YES_OR_NO: [(&str, bool); 2] = [("yes", true), ("no", false)];

impl FromStr for UblkSpec {
    type Err = SpecError;

    /// Parses `[N][,OPTION…]`. The number may be omitted with its comma.
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
        let mut options = Options::new("ublk", OPTIONS, items.into_iter())?;
        let mode = options.text("mode")?.filter(|word| word != "auto");
        Ok(UblkSpec {
            number,
            queues: in_range("queues", options.value("queues", "2")?, 1, crate::QUEUES_MAX)?,
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

impl ExportOptions for UblkSpec {
    const ROW: ExportRow = ExportRow {
        kind: "ublk",
        value_name: "N",
        value_optional: true,
        repeats: false,
        summary: "A kernel block device, /dev/ublkbN",
        usage: "--ublk[=N][,OPTION...]",
        about: "the kernel block device /dev/ublkbN",
        example: "blockyard add file:disk.img --ublk",
        options: OPTIONS,
        is_kernel_device: true,
        page: "ublk.md",
    };
    /// The fastest export comes first.
    const DEFAULT_RANK: Option<u8> = Some(0);

    fn parse(text: &str, _nbd: &NbdOptions) -> Result<UblkSpec, SpecError> {
        text.parse()
    }

    fn address(&self) -> Option<String> {
        self.number.map(|number| format!("/dev/ublkb{number}"))
    }

    fn conflicts(&self, _earlier: &UblkSpec, is_same_device: bool) -> Vec<Conflict> {
        if !is_same_device {
            return Vec::new();
        }
        let why = "the device is shown by ublk already (leave one out)".to_owned();
        vec![Conflict { key: "ublk", why }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ublk_export_parses_back_from_its_text() {
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
    fn an_invalid_option_is_refused_with_the_valid_values() {
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
    fn the_recovery_of_a_device_follows_from_its_features() {
        for (_, recovery) in Recovery::WORDS {
            assert_eq!(Recovery::of(recovery.features()), recovery);
        }
    }
}
