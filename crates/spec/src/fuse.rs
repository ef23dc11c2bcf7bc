//! `--fuse FILE[,KEY…]` and `--loop[=N][,KEY…]`: a device as a file, and a loop device above it.

use super::SpecError;
use options::{Escaped, Options, split};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Whether what the kernel asks of a file of ours comes through io_uring.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum OverUring {
    /// Where the kernel offers it and it pays.
    #[default]
    Auto,
    /// Or refuse.
    On,
    /// Through `/dev/fuse`.
    Off,
}

const URING: [(&str, OverUring); 3] =
    [("auto", OverUring::Auto), ("on", OverUring::On), ("off", OverUring::Off)];

impl OverUring {
    fn read(options: &mut Options) -> Result<OverUring, SpecError> {
        Ok(options.choice("uring", &URING)?.unwrap_or_default())
    }

    fn item(self) -> Option<String> {
        let name = URING.iter().find(|(_, value)| *value == self).map_or("", |(name, _)| name);
        (self != OverUring::Auto).then(|| format!("uring={name}"))
    }
}

/// Where a device is shown as a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FuseSpec {
    /// The file that is mounted on.
    pub path: PathBuf,
    /// Reads and writes go past us to the file behind the device.
    pub passthrough: bool,
    /// By which way requests come to us.
    pub uring: OverUring,
}

impl FuseSpec {
    /// The same, with a relative path taken from `base` on.
    #[must_use]
    pub fn rooted(self, base: &Path) -> FuseSpec {
        FuseSpec { path: base.join(self.path), ..self }
    }
}

impl FromStr for FuseSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<FuseSpec, SpecError> {
        let mut items = split(text).into_iter();
        let path = items.next().unwrap_or_default();
        let mut options = Options::new("fuse", &["passthrough", "uring"], items)?;
        if path.is_empty() {
            return Err(SpecError::new("the file has no path", "write --fuse FILE"));
        }
        let uring = OverUring::read(&mut options)?;
        Ok(FuseSpec { path: path.into(), passthrough: options.flag("passthrough")?, uring })
    }
}

impl fmt::Display for FuseSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Escaped(&self.path.to_string_lossy()))?;
        if self.passthrough {
            f.write_str(",passthrough")?;
        }
        self.uring.item().map_or(Ok(()), |item| write!(f, ",{item}"))
    }
}

/// How a device is shown as a loop device.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct LoopSpec {
    /// Its number; none: any that is free.
    pub number: Option<u32>,
    /// The kernel looks for partitions.
    pub partscan: bool,
    /// Reads and writes go past us to the file behind the device.
    pub passthrough: bool,
    /// By which way requests come to us.
    pub uring: OverUring,
}

impl FromStr for LoopSpec {
    type Err = SpecError;

    /// `[N][,partscan][,passthrough][,uring=auto|on|off]`; nothing at all is `LoopSpec::default()`.
    fn from_str(text: &str) -> Result<LoopSpec, SpecError> {
        let mut items: Vec<String> = split(text).into_iter().filter(|item| !item.is_empty()).collect();
        let number = match items.first().filter(|item| item.starts_with(|c: char| c.is_ascii_digit())) {
            None => None,
            // The kernel's numbers of devices have 20 bits.
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
        let mut options = Options::new("loop", &["partscan", "passthrough", "uring"], items.into_iter())?;
        Ok(LoopSpec {
            number,
            partscan: options.flag("partscan")?,
            passthrough: options.flag("passthrough")?,
            uring: OverUring::read(&mut options)?,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_a_comma_reads_back() {
        let spec = FuseSpec { path: "/a,b".into(), passthrough: true, uring: OverUring::On };
        assert_eq!(spec.to_string(), "/a,,b,passthrough,uring=on");
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }

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
