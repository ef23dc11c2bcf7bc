//! `--vhost-user unix:PATH[,OPTION...]`: an export as a disk of a virtual machine.

use super::{Conflict, ExportFile, ExportOptions, ExportRow, FileAccess, NbdOptions};
use crate::{QUEUES_MAX, SpecError};
use options::{Escaped, OptionRow, Options, split, write_flag};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest ID string of a virtio block device, in bytes (`VIRTIO_BLK_ID_BYTES`).
const SERIAL_LEN_MAX: usize = 20;
/// Longest path of a Unix socket: `sun_path` holds 108 bytes, the last one 0.
const PATH_LEN_MAX: usize = 107;

/// Which side opens the connection.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum SocketMode {
    /// The virtual machine monitor connects to a socket that this process creates.
    #[default]
    Server,
    /// This process connects to the monitor's socket, and again whenever the connection is lost.
    Client,
}

const ON_OFF: &[(&str, bool)] = &[("on", true), ("off", false)];
const MODE: &[(&str, SocketMode)] = &[("server", SocketMode::Server), ("client", SocketMode::Client)];

const OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "mode",
        "server|client",
        "server",
        "who opens the connection: the virtual machine monitor (server), or Blockyard, to the monitor's socket",
    ),
    OptionRow::value(
        "queues",
        "1..256",
        "one for each I/O thread",
        "the number of virtqueues that a driver may use; each is served by one I/O thread",
    ),
    OptionRow::value(
        "threads",
        "N[+N...]",
        "the least busy ones",
        "the numbers of the I/O threads that serve the virtqueues, in turn, from 0 on",
    ),
    OptionRow::value(
        "serial",
        "TEXT",
        "the device's name",
        "the ID string that the guest sees, up to 20 bytes",
    ),
    OptionRow::value(
        "packed",
        "on|off",
        "on",
        "whether packed virtqueues are offered; the driver of user-mode Linux needs off",
    ),
    OptionRow::flag("ro", "the guest may only read"),
];

/// An export as a disk of a virtual machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VhostUserSpec {
    /// The Unix socket.
    pub path: PathBuf,
    /// Which side opens the connection.
    pub mode: SocketMode,
    /// Number of virtqueues; `None`: one for each I/O thread.
    pub queues: Option<u16>,
    /// Numbers of the I/O threads that serve the virtqueues, in turn; empty: the least busy ones.
    pub threads: Vec<usize>,
    /// The ID string; `None`: the device's name.
    pub serial: Option<String>,
    /// Whether packed virtqueues are offered besides split ones.
    pub packed: bool,
    /// Whether the guest may only read.
    pub read_only: bool,
}

impl FromStr for VhostUserSpec {
    type Err = SpecError;

    /// Parses `unix:/run/vm.sock,mode=client,queues=2`.
    fn from_str(text: &str) -> Result<VhostUserSpec, SpecError> {
        let mut items = split(text).into_iter();
        let address = items.next().unwrap_or_default();
        let mut options = Options::new("vhost-user", OPTIONS, items)?;
        let path = match address.strip_prefix("unix:") {
            Some(path) if !path.is_empty() => path,
            _ => {
                return Err(SpecError::new(format!("\"{address}\" is not a Unix socket"), "write unix:PATH"));
            }
        };
        if path.len() > PATH_LEN_MAX {
            let why = format!("the path has {} bytes; a Unix socket's may have {PATH_LEN_MAX}", path.len());
            return Err(SpecError::new(why, "use a shorter path"));
        }
        let queues: Option<u16> = options.value("queues", "2")?;
        if queues.is_some_and(|queues| !(1..=QUEUES_MAX).contains(&queues)) {
            return Err(SpecError::new("option queues is out of range", format!("use 1 to {QUEUES_MAX}")));
        }
        let threads = options.text("threads")?.map_or(Ok(Vec::new()), |text| threads_of(&text))?;
        let serial = options.text("serial")?;
        if serial.as_ref().is_some_and(|serial| !is_serial(serial)) {
            let fix = format!("use 1 to {SERIAL_LEN_MAX} printable ASCII characters");
            return Err(SpecError::new("option serial is not an ID string", fix));
        }
        Ok(VhostUserSpec {
            path: path.into(),
            mode: options.choice("mode", MODE)?.unwrap_or_default(),
            queues,
            threads,
            serial,
            packed: options.choice("packed", ON_OFF)?.unwrap_or(true),
            read_only: options.flag("ro")?,
        })
    }
}

fn threads_of(text: &str) -> Result<Vec<usize>, SpecError> {
    let numbers = text.split('+').map(str::parse).collect::<Result<Vec<usize>, _>>();
    numbers.map_err(|_| SpecError::new("option threads is no list of I/O threads", "write threads=0+1"))
}

fn is_serial(text: &str) -> bool {
    (1..=SERIAL_LEN_MAX).contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

impl fmt::Display for VhostUserSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:{}", Escaped(&self.path.to_string_lossy()))?;
        if self.mode == SocketMode::Client {
            f.write_str(",mode=client")?;
        }
        if let Some(queues) = self.queues {
            write!(f, ",queues={queues}")?;
        }
        for (at, thread) in self.threads.iter().enumerate() {
            write!(f, "{}{thread}", if at == 0 { ",threads=" } else { "+" })?;
        }
        if let Some(serial) = &self.serial {
            write!(f, ",serial={}", Escaped(serial))?;
        }
        if !self.packed {
            f.write_str(",packed=off")?;
        }
        write_flag(f, self.read_only, "ro")
    }
}

impl ExportOptions for VhostUserSpec {
    const ROW: ExportRow = ExportRow {
        kind: "vhost-user",
        value_name: "SOCKET",
        value_optional: false,
        repeats: true,
        summary: "A disk of a virtual machine, by vhost-user",
        usage: "--vhost-user unix:PATH[,OPTION...]",
        about: "a virtio disk of a virtual machine, whose memory is shared with Blockyard (vhost-user-blk)",
        example: "blockyard serve file:disk.img --vhost-user unix:/tmp/vm.sock",
        options: OPTIONS,
        is_kernel_device: false,
        page: "vhost-user.md",
    };

    fn parse(text: &str, _nbd: &NbdOptions) -> Result<VhostUserSpec, SpecError> {
        text.parse()
    }

    fn rooted(self, base: &Path) -> VhostUserSpec {
        VhostUserSpec { path: base.join(self.path), ..self }
    }

    fn address(&self) -> Option<String> {
        Some(self.path.display().to_string())
    }

    fn conflicts(&self, earlier: &VhostUserSpec, _is_same_device: bool) -> Vec<Conflict> {
        if earlier.path != self.path {
            return Vec::new();
        }
        let why = format!("{} has a device already (give each its own socket)", self.path.display());
        vec![Conflict { key: "vhost-user", why }]
    }

    fn files(&self) -> Vec<ExportFile> {
        // The monitor may create its socket later.
        let is_created = self.mode == SocketMode::Server;
        let file = || ExportFile { key: "vhost-user", path: self.path.clone(), access: FileAccess::Create };
        is_created.then(file).into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_parses_back() {
        let spec = VhostUserSpec {
            path: "/run/a,b.sock".into(),
            mode: SocketMode::Client,
            queues: Some(4),
            threads: vec![1, 0],
            serial: Some("disk,1".to_owned()),
            packed: false,
            read_only: true,
        };
        assert_eq!(
            spec.to_string(),
            "unix:/run/a,,b.sock,mode=client,queues=4,threads=1+0,serial=disk,,1,packed=off,ro"
        );
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }

    #[test]
    fn invalid_sockets_and_options_are_refused() {
        let long = format!("unix:/{}", "x".repeat(107));
        for text in [
            "",
            "/run/vm.sock",
            "unix:",
            &long,
            "unix:/s,queues=0",
            "unix:/s,queues=257",
            "unix:/s,serial=123456789012345678901",
            "unix:/s,mode=both",
            "unix:/s,packed=maybe",
            "unix:/s,threads=",
            "unix:/s,threads=0+x",
        ] {
            assert!(text.parse::<VhostUserSpec>().is_err(), "{text}");
        }
    }
}
