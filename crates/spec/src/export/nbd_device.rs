//! `--nbd-device[=N][,OPTION…]`: an export as `/dev/nbdN` of the kernel's nbd driver.

use super::{ExportOptions, ExportRow, NbdOptions};
use crate::SpecError;
use options::{OptionRow, Options, split};
use options::{format_time, parse_time};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The most connections of one device: the largest number of I/O threads of a process.
const CONNECTIONS_MAX: u16 = 256;
/// The largest timeout in seconds: the driver stores times in 32-bit ticks, at up to 1000 ticks a second.
const SECONDS_MAX: u64 = 4_000_000;
/// The default request timeout, that of the block layer.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// The default of `dead_conn_timeout`.
const DEAD_DEFAULT: Duration = Duration::from_secs(30);

/// An export as a device of the kernel's nbd driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdDeviceSpec {
    /// The N of `/dev/nbdN`; `None`: any that is free.
    pub number: Option<u32>,
    /// Connections, each a hardware queue in the kernel; `None`: one per I/O thread.
    pub connections: Option<u16>,
    /// How long a request may stay unanswered before the kernel closes its connection and sends it on
    /// another one. Requests that a killed server had received are sent again only after this time.
    pub timeout: Duration,
    /// How long the kernel holds requests while no server is connected.
    pub dead_timeout: Duration,
    /// The block size that the kernel uses; `None`: the device's.
    pub block: Option<u32>,
}

impl Default for NbdDeviceSpec {
    fn default() -> Self {
        NbdDeviceSpec {
            number: None,
            connections: None,
            timeout: TIMEOUT_DEFAULT,
            dead_timeout: DEAD_DEFAULT,
            block: None,
        }
    }
}

const OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "connections",
        "1..256",
        "one per I/O thread",
        "connections, each a hardware queue in the kernel",
    ),
    OptionRow::value(
        "timeout",
        "TIME",
        "30s",
        "send a request that is unanswered for so long again on another connection; whole seconds",
    ),
    OptionRow::value(
        "dead_conn_timeout",
        "TIME",
        "30s",
        "how long requests wait for the next server when this one dies; 0: they fail at once",
    ),
    OptionRow::value("block", "512..64K", "the device's", "the block size that the kernel uses"),
];

/// Takes a time in whole seconds.
fn seconds(options: &mut Options, key: &'static str, least: u64) -> Result<Option<Duration>, SpecError> {
    let Some(text) = options.text(key)? else { return Ok(None) };
    let time = parse_time(&text)?;
    if time.subsec_nanos() != 0 || !(least..=SECONDS_MAX).contains(&time.as_secs()) {
        return Err(SpecError::new(
            format!("option {key} cannot be {text}"),
            format!("the kernel counts whole seconds, from {least} to {SECONDS_MAX}"),
        ));
    }
    Ok(Some(time))
}

impl FromStr for NbdDeviceSpec {
    type Err = SpecError;

    /// Parses `3`, `3,connections=2,dead_conn_timeout=60s`, `connections=2`, or an empty text.
    fn from_str(text: &str) -> Result<NbdDeviceSpec, SpecError> {
        let mut items = split(text);
        let number = match items[0].as_str() {
            "" => {
                items.remove(0);
                None
            }
            option if option.contains('=') => None,
            word => {
                let number = word.parse().map_err(|_| {
                    SpecError::new(
                        format!("\"{word}\" is not the number of an nbd device"),
                        "for /dev/nbd3 write 3",
                    )
                })?;
                items.remove(0);
                Some(number)
            }
        };
        let mut options = Options::new("nbd-device", OPTIONS, items.into_iter())?;
        let connections: Option<u16> = options.value("connections", "4")?;
        if connections.is_some_and(|count| !(1..=CONNECTIONS_MAX).contains(&count)) {
            return Err(SpecError::new(
                "option connections is out of range",
                format!("use a number from 1 to {CONNECTIONS_MAX}"),
            ));
        }
        let block: Option<block::Bytes> = options.value("block", "4096")?;
        if let Some(block) = block
            && !(block.0.is_power_of_two() && (512..=65536).contains(&block.0))
        {
            return Err(SpecError::new(
                format!("a block cannot be {block} bytes"),
                "use a power of two from 512 to 64K",
            ));
        }
        Ok(NbdDeviceSpec {
            number,
            connections,
            timeout: seconds(&mut options, "timeout", 1)?.unwrap_or(TIMEOUT_DEFAULT),
            dead_timeout: seconds(&mut options, "dead_conn_timeout", 0)?.unwrap_or(DEAD_DEFAULT),
            block: block.map(|block| block.0 as u32),
        })
    }
}

impl fmt::Display for NbdDeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(number) = self.number {
            write!(f, "{number}")?;
        }
        if let Some(connections) = self.connections {
            write!(f, ",connections={connections}")?;
        }
        if self.timeout != TIMEOUT_DEFAULT {
            write!(f, ",timeout={}", format_time(self.timeout))?;
        }
        if self.dead_timeout != DEAD_DEFAULT {
            write!(f, ",dead_conn_timeout={}", format_time(self.dead_timeout))?;
        }
        self.block.map_or(Ok(()), |block| write!(f, ",block={block}"))
    }
}

impl ExportOptions for NbdDeviceSpec {
    const ROW: ExportRow = ExportRow {
        kind: "nbd-device",
        value_name: "N",
        value_optional: true,
        repeats: true,
        summary: "/dev/nbdN of the kernel's nbd driver; as root",
        usage: "--nbd-device[=N][,OPTION...]",
        about: "/dev/nbdN of the kernel's nbd driver. If the server dies, the device stays and the next server \
                of that name takes it over",
        example: "blockyard add file:disk.img --nbd-device",
        options: OPTIONS,
        is_kernel_device: true,
        page: "nbd-device.md",
    };

    fn parse(text: &str, _nbd: &NbdOptions) -> Result<NbdDeviceSpec, SpecError> {
        text.parse()
    }

    fn address(&self) -> Option<String> {
        self.number.map(|number| format!("/dev/nbd{number}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nbd_device_parses_back_from_its_text() {
        for text in ["", "0", "7,connections=4", ",timeout=90s,dead_conn_timeout=0,block=4096"] {
            let spec: NbdDeviceSpec = text.parse().unwrap();
            assert_eq!(spec.to_string().parse::<NbdDeviceSpec>(), Ok(spec), "{text}");
        }
        assert_eq!("".parse::<NbdDeviceSpec>(), Ok(NbdDeviceSpec::default()));
        assert_eq!("3".parse::<NbdDeviceSpec>().unwrap().number, Some(3));
        let spec: NbdDeviceSpec = "connections=2,timeout=1s".parse().unwrap();
        assert_eq!(
            (spec.number, spec.connections),
            (None, Some(2)),
            "the number may be left out with its comma"
        );
    }

    #[test]
    fn an_invalid_nbd_device_is_refused() {
        for (text, why) in [
            ("nbd3", "write 3"),
            ("3,connections=0", "from 1 to 256"),
            ("3,timeout=0", "whole seconds"),
            ("3,timeout=1500ms", "whole seconds"),
            ("3,dead_conn_timeout=5000000s", "whole seconds"),
            ("3,block=768", "a block cannot be 768"),
            ("3,persist", "no option"),
            ("persist=1", "no option"),
            ("3,block=128K", "from 512 to 64K"),
        ] {
            let refusal = text.parse::<NbdDeviceSpec>().expect_err(text).to_string();
            assert!(refusal.contains(why), "{text}: {refusal}");
        }
    }
}
