//! `--loop[=N][,OPTION…]`: an export as a loop device of the kernel, over a FUSE file.

use super::fuse::{PASSTHROUGH, URING_ROW};
use super::{ExportOptions, ExportRow, NbdOptions, OverUring};
use crate::{SpecError, StackSpec};
use options::{OptionRow, Options, split};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

const OPTIONS: &[OptionRow] =
    &[OptionRow::flag("partscan", "the kernel scans the device for partitions"), PASSTHROUGH, URING_ROW];

/// An export as a loop device.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct LoopSpec {
    /// The N of `/dev/loopN`; `None`: any that is free.
    pub number: Option<u32>,
    /// Whether the kernel scans for partitions.
    pub partscan: bool,
    /// Whether the kernel reads and writes the backing file itself.
    pub passthrough: bool,
    /// The transport of FUSE requests.
    pub uring: OverUring,
}

impl FromStr for LoopSpec {
    type Err = SpecError;

    /// `[N][,partscan][,passthrough][,uring=auto|on|off]`; an empty text is `LoopSpec::default()`.
    fn from_str(text: &str) -> Result<LoopSpec, SpecError> {
        let mut items: Vec<String> = split(text).into_iter().filter(|item| !item.is_empty()).collect();
        let number = match items.first().filter(|item| item.starts_with(|c: char| c.is_ascii_digit())) {
            None => None,
            // Device numbers of the kernel have 20 bits.
            Some(text) => match text.parse() {
                Ok(number) if number < 1 << 20 => Some(number),
                _ => {
                    let why = format!("there is no loop device {text}");
                    return Err(SpecError::new(why, "use a number below 1048576, or none"));
                }
            },
        };
        if number.is_some() {
            items.remove(0);
        }
        let mut options = Options::new("loop", OPTIONS, items.into_iter())?;
        Ok(LoopSpec {
            number,
            partscan: options.flag("partscan")?,
            passthrough: options.flag("passthrough")?,
            uring: OverUring::parse(&mut options)?,
        })
    }
}

impl fmt::Display for LoopSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items: Vec<String> = self.number.iter().map(u32::to_string).collect();
        items.extend(self.partscan.then(|| "partscan".to_owned()));
        items.extend(self.passthrough.then(|| "passthrough".to_owned()));
        items.extend(self.uring.item());
        f.write_str(&items.join(","))
    }
}

impl ExportOptions for LoopSpec {
    const ROW: ExportRow = ExportRow {
        kind: "loop",
        value_name: "N",
        value_optional: true,
        repeats: false,
        summary: "A loop device, /dev/loopN or a free one; as root",
        usage: "--loop[=N][,OPTION...]",
        about: "a loop device of the kernel over a FUSE file, on any kernel; as root",
        example: "blockyard add file:disk.img --loop",
        options: OPTIONS,
        is_kernel_device: true,
        page: "loop.md",
    };
    /// Slower than ublk, but works on any kernel, for root.
    const DEFAULT_RANK: Option<u8> = Some(1);

    fn parse(text: &str, _nbd: &NbdOptions) -> Result<LoopSpec, SpecError> {
        text.parse()
    }

    fn address(&self) -> Option<String> {
        self.number.map(|number| format!("/dev/loop{number}"))
    }

    /// Refuses a loop device whose file is its own node (LOOP-15).
    fn refuses(&self, stack: &StackSpec) -> Option<String> {
        let StackSpec::File(file) = stack else { return None };
        let is_own = self.address().is_some_and(|node| file.file.path == Path::new(&node));
        is_own.then(|| "the loop device would use itself (choose another number, or another file)".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_device_has_a_number_or_none() {
        assert_eq!("".parse(), Ok(LoopSpec::default()));
        let spec = LoopSpec { number: Some(7), partscan: true, ..LoopSpec::default() };
        assert_eq!("7,partscan".parse(), Ok(spec));
        assert_eq!(spec.to_string(), "7,partscan");
        let spec = LoopSpec { uring: OverUring::Off, ..LoopSpec::default() };
        assert_eq!((spec.to_string().as_str(), "uring=off".parse()), ("uring=off", Ok(spec)));
        assert!("uring=perhaps".parse::<LoopSpec>().is_err());
        assert!("9999999".parse::<LoopSpec>().is_err());
        assert!("x".parse::<LoopSpec>().is_err());
    }
}
