//! The list of exports: one row and one type of options each.
//!
//! An export makes a device accessible: to NBD clients, as a block device of the kernel, as a file. Its
//! [`ExportRow`] describes it to help, completions, the topology parser and the reference; its type
//! implements [`ExportOptions`]. The control plane of each export is a module of crate `attach`, which
//! matches on [`ExportKind`], too.
//!
//! A new export is a module here and a line in `list!`.

mod fuse;
mod iscsi;
mod loop_device;
mod nbd;
mod nbd_device;
mod nbd_limits;
mod row;
mod tls;
mod ublk;
mod vhost_user;

pub use fuse::{FuseSpec, OverUring};
pub use iscsi::{AclSpec, CdbMax, Digests, ISCSI_PORT, IscsiName, IscsiSpec, PortalAddress};
pub use loop_device::LoopSpec;
pub use nbd::{NBD_EXPORT_KEYS, NBD_PORT, NbdAddress, NbdExportSpec, NbdOptions, nbd_uri};
pub use nbd_device::NbdDeviceSpec;
pub use nbd_limits::{NBD_LIMITS, NbdLimits};
pub use row::ExportRow;
pub use tls::{TlsMode, TlsSpec};
pub use ublk::{Recovery, UblkSpec};
pub use vhost_user::{SocketMode, VhostUserSpec};

use crate::{DeviceName, SpecError, StackSpec};
use std::fmt;
use std::path::{Path, PathBuf};

/// The options of one kind of export.
///
/// `Display` formats them as the shortest text that [`parse`](ExportOptions::parse) reads as the same options.
pub trait ExportOptions: Clone + PartialEq + Eq + fmt::Debug + fmt::Display {
    /// The description of the export for help, completions and parsers.
    const ROW: ExportRow;

    /// The rank of the kind for a device whose description names no export: of the possible kinds, the one
    /// with the lowest rank is chosen. `None`: never chosen.
    const DEFAULT_RANK: Option<u8> = None;

    /// Parses the value of `--KIND` and of the key `KIND` in a topology; empty where the value was omitted. `nbd` are the
    /// options that apply if the device is exported to NBD clients.
    ///
    /// # Errors
    /// An option is unknown, invalid or given twice, or two options contradict each other.
    fn parse(text: &str, nbd: &NbdOptions) -> Result<Self, SpecError>;

    /// Returns these options with relative paths resolved against `base`.
    #[must_use]
    fn rooted(self, base: &Path) -> Self {
        let _ = base;
        self
    }

    /// Returns the URI or path at which clients reach the device, as far as the options determine it.
    fn address(&self) -> Option<String>;

    /// Adapts names that were derived from the device's name.
    fn device_renamed(&mut self, from: &DeviceName, to: &DeviceName) {
        let _ = (from, to);
    }

    /// Returns why a process cannot have this export beside an earlier one of the kind.
    fn conflicts(&self, earlier: &Self, is_same_device: bool) -> Vec<Conflict> {
        let _ = (earlier, is_same_device);
        Vec::new()
    }

    /// Returns why a device with that stack cannot have this export; `None` if it can.
    fn refuses(&self, stack: &StackSpec) -> Option<String> {
        let _ = stack;
        None
    }

    /// Returns the files that the export creates or reads when it starts.
    fn files(&self) -> Vec<ExportFile> {
        Vec::new()
    }
}

/// Why two exports exclude each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conflict {
    /// The key of the export that must be changed: `name`.
    pub key: &'static str,
    /// The problem, with a correction in brackets.
    pub why: String,
}

/// A file that an export needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExportFile {
    /// The key of the export whose value is the file: `tls-certificates`.
    pub key: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The access that the export needs.
    pub access: FileAccess,
}

/// The access that an export needs to a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileAccess {
    /// The file is created, in a directory that must be writable.
    Create,
    /// The file is created unless it exists.
    CreateMissing,
    /// The file is read.
    Read,
    /// The file is read and holds a private key, which other users must not be able to read.
    ReadKey,
}

macro_rules! list {
    ($($kind:ident($options:ty)),* $(,)?) => {
        /// How a device is exported.
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub enum ExportKind {
            /// No export was given: the device gets the best one that the host offers. The options apply if that is NBD.
            Default(NbdOptions),
            $(#[doc = concat!("An export with the options of [`", stringify!($options), "`].")] $kind($options)),*
        }

        /// All exports, in the order of the help.
        pub fn export_rows() -> &'static [ExportRow] {
            const ROWS: &[ExportRow] = &[$(<$options as ExportOptions>::ROW),*];
            ROWS
        }

        /// Returns the exports that a device without a given export can get, by preference.
        pub fn default_exports() -> Vec<&'static ExportRow> {
            let ranks = [$(<$options as ExportOptions>::DEFAULT_RANK),*];
            let ranked = ranks.into_iter().zip(export_rows());
            let mut ranked: Vec<_> = ranked.filter_map(|(rank, row)| Some((rank?, row))).collect();
            ranked.sort_by_key(|(rank, _)| *rank);
            ranked.into_iter().map(|(_, row)| row).collect()
        }

        impl ExportKind {
            /// Parses the value of an export of the list, as [`ExportOptions::parse`] does.
            ///
            /// # Errors
            /// No export has that name, or its value is invalid.
            pub fn parse(kind: &str, text: &str, nbd: &NbdOptions) -> Result<ExportKind, SpecError> {
                $(if kind == <$options as ExportOptions>::ROW.kind {
                    return <$options as ExportOptions>::parse(text, nbd).map(ExportKind::$kind);
                })*
                Err(row::unknown(kind))
            }

            /// Returns the row of the export; `None` for [`ExportKind::Default`].
            pub fn row(&self) -> Option<&'static ExportRow> {
                let kind = match self {
                    ExportKind::Default(_) => return None,
                    $(ExportKind::$kind(_) => <$options as ExportOptions>::ROW.kind,)*
                };
                row::of(kind)
            }

            /// Returns the export with relative paths resolved against `base`.
            #[must_use]
            pub fn rooted(self, base: &Path) -> ExportKind {
                match self {
                    ExportKind::Default(options) => ExportKind::Default(options),
                    $(ExportKind::$kind(options) => ExportKind::$kind(options.rooted(base)),)*
                }
            }

            /// Returns the URI or path at which clients reach the device, as far as the description
            /// determines it.
            pub fn address(&self) -> Option<String> {
                match self {
                    ExportKind::Default(_) => None,
                    $(ExportKind::$kind(options) => options.address(),)*
                }
            }

            /// Adapts names that were derived from the device's name.
            pub fn device_renamed(&mut self, from: &DeviceName, to: &DeviceName) {
                match self {
                    ExportKind::Default(options) => options.device_renamed(from, to),
                    $(ExportKind::$kind(options) => options.device_renamed(from, to),)*
                }
            }

            /// Returns why a process cannot have this export beside an earlier one.
            pub fn conflicts(&self, earlier: &ExportKind, is_same_device: bool) -> Vec<Conflict> {
                match (self, earlier) {
                    $((ExportKind::$kind(options), ExportKind::$kind(earlier)) => {
                        options.conflicts(earlier, is_same_device)
                    })*
                    _ => Vec::new(),
                }
            }

            /// Returns why a device with that stack cannot have this export; `None` if it can.
            pub fn refuses(&self, stack: &StackSpec) -> Option<String> {
                match self {
                    ExportKind::Default(_) => None,
                    $(ExportKind::$kind(options) => options.refuses(stack),)*
                }
            }

            /// Returns the files that the export creates or reads when it starts.
            pub fn files(&self) -> Vec<ExportFile> {
                match self {
                    ExportKind::Default(options) => options.files(),
                    $(ExportKind::$kind(options) => options.files(),)*
                }
            }

            /// Returns the value of `--KIND`; empty for [`ExportKind::Default`].
            pub fn value(&self) -> String {
                match self {
                    ExportKind::Default(_) => String::new(),
                    $(ExportKind::$kind(options) => options.to_string(),)*
                }
            }
        }
    };
}

list!(
    Nbd(NbdExportSpec),
    Ublk(UblkSpec),
    Loop(LoopSpec),
    NbdDevice(NbdDeviceSpec),
    Fuse(FuseSpec),
    Iscsi(IscsiSpec),
    VhostUser(VhostUserSpec)
);

impl ExportKind {
    /// Returns the options that apply to NBD clients; `None` for an export of another kind.
    pub fn nbd_options(&self) -> Option<&NbdOptions> {
        match self {
            ExportKind::Default(options) | ExportKind::Nbd(NbdExportSpec { options, .. }) => Some(options),
            _ => None,
        }
    }
}

impl fmt::Display for ExportKind {
    /// Formats the export in a few words: `nbd unix:/run/disk.sock`, `ublk 3,depth=64`, `the default export`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(row) = self.row() else { return f.write_str("the default export") };
        let value = self.value();
        f.write_str(row.kind)?;
        if value.is_empty() { Ok(()) } else { write!(f, " {value}") }
    }
}
