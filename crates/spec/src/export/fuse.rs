//! `--fuse FILE[,OPTION…]`: an export as one file.

use super::{Conflict, ExportFile, ExportOptions, ExportRow, FileAccess, NbdOptions};
use crate::SpecError;
use options::{Escaped, OptionRow, Options, split};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The transport of FUSE requests.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum OverUring {
    /// Through io_uring where the kernel offers it and it is faster.
    #[default]
    Auto,
    /// Through io_uring; the export is refused where that is impossible.
    On,
    /// Through `/dev/fuse`.
    Off,
}

const URING: [(&str, OverUring); 3] =
    [("auto", OverUring::Auto), ("on", OverUring::On), ("off", OverUring::Off)];

impl OverUring {
    pub(super) fn parse(options: &mut Options) -> Result<OverUring, SpecError> {
        Ok(options.choice("uring", &URING)?.unwrap_or_default())
    }

    /// Returns the option as text; `None` for the default.
    pub(super) fn item(self) -> Option<String> {
        let name = URING.iter().find(|(_, value)| *value == self).map_or("", |(name, _)| name);
        (self != OverUring::Auto).then(|| format!("uring={name}"))
    }
}

pub(super) const PASSTHROUGH: OptionRow = OptionRow::flag(
    "passthrough",
    "the kernel reads and writes the file behind the device itself; nothing is counted",
);
pub(super) const URING_ROW: OptionRow = OptionRow::value(
    "uring",
    "auto|on|off",
    "auto",
    "whether requests come through io_uring (Linux 6.14, fuse.enable_uring=Y, as root)",
);
const OPTIONS: &[OptionRow] = &[PASSTHROUGH, URING_ROW];

/// An export as a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FuseSpec {
    /// The file that the export is mounted on.
    pub path: PathBuf,
    /// Whether the kernel reads and writes the backing file itself.
    pub passthrough: bool,
    /// The transport of requests.
    pub uring: OverUring,
}

impl FromStr for FuseSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<FuseSpec, SpecError> {
        let mut items = split(text).into_iter();
        let path = items.next().unwrap_or_default();
        let mut options = Options::new("fuse", OPTIONS, items)?;
        if path.is_empty() {
            return Err(SpecError::new("the file has no path", "write --fuse FILE"));
        }
        let uring = OverUring::parse(&mut options)?;
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

impl ExportOptions for FuseSpec {
    const ROW: ExportRow = ExportRow {
        kind: "fuse",
        value_name: "FILE",
        value_optional: false,
        repeats: true,
        summary: "One file, by FUSE; FILE is empty or missing",
        usage: "--fuse FILE[,OPTION...]",
        about: "one file, by FUSE: as root, or for others with fusermount3",
        example: "blockyard add file:disk.img --fuse /tmp/disk.raw",
        options: OPTIONS,
        is_kernel_device: false,
        page: "loop.md",
    };

    fn parse(text: &str, _nbd: &NbdOptions) -> Result<FuseSpec, SpecError> {
        text.parse()
    }

    fn rooted(self, base: &Path) -> FuseSpec {
        FuseSpec { path: base.join(self.path), ..self }
    }

    fn address(&self) -> Option<String> {
        Some(self.path.display().to_string())
    }

    fn conflicts(&self, earlier: &FuseSpec, _is_same_device: bool) -> Vec<Conflict> {
        if earlier.path != self.path {
            return Vec::new();
        }
        let why = format!("{} is mounted on twice (name another file)", self.path.display());
        vec![Conflict { key: "fuse", why }]
    }

    fn files(&self) -> Vec<ExportFile> {
        vec![ExportFile { key: "fuse", path: self.path.clone(), access: FileAccess::CreateMissing }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_a_comma_parses_back() {
        let spec = FuseSpec { path: "/a,b".into(), passthrough: true, uring: OverUring::On };
        assert_eq!(spec.to_string(), "/a,,b,passthrough,uring=on");
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }
}
