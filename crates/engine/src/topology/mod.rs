//! Reads topologies (types of the crate `spec`) from files, checks the files that they name, and turns them
//! into the configuration of a host and its devices.
//!
//! Nothing here opens a file for writing.

mod check;
mod start;

pub use check::check_files;
pub use spec::topology::*;
pub use start::{device_config, host_config};

use std::path::Path;

/// Reads the text of a topology file.
///
/// # Errors
/// The file cannot be read.
pub fn read(file: &Path) -> Result<String, TopologyError> {
    std::fs::read_to_string(file).map_err(|why| TopologyError {
        file: file.to_owned(),
        problems: vec![Problem::new(0, "", format_args!("{why} (is the path right?)"))],
    })
}

/// Reads a topology file. Relative paths in it start from the file's directory.
///
/// # Errors
/// The file cannot be read, is not TOML, or contradicts itself.
pub fn load(file: &Path) -> Result<Topology, TopologyError> {
    Topology::parse(&read(file)?, file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checking_files_creates_none() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("small.img"), [0; 4096]).unwrap();
        let text = r#"
[device.good]
stack = "file:small.img,share"
[device.twice]
stack = "file:small.img"
[device.missing]
stack = "file:missing.img"
[device.made]
stack = "file:made.img,size=1M,create"
[device.nowhere]
stack = "file:no/where.img,size=1M,create"
[device.past]
stack = "file:small.img,share,offset=4096"
[device.directory]
stack = "file:."
[[export]]
device = "good"
nbd = "unix:no/such.sock"
tls-certificates = "pki"
"#;
        let topology = Topology::parse(text, &at("t.toml")).unwrap();
        let problems = check_files(&topology);
        let got: Vec<_> = problems.iter().map(|p| (p.line, p.key.as_str(), p.why.as_str())).collect();
        let expected = [
            (4, "device.twice.stack", "device.good uses the same file"),
            (6, "device.missing.stack", "there is no such file (to create it, add size=10G,create)"),
            (10, "device.nowhere.stack", "cannot create a file in"),
            (12, "device.past.stack", "it has 4096 bytes, and the device starts at 4096"),
            (12, "device.past.stack", "device.twice uses the same file"),
            (14, "device.directory.stack", "it is neither a regular file nor a block device"),
            (16, "export.nbd", "cannot create a file in"),
            (16, "export.tls-certificates", "server-cert.pem: No such file"),
            (16, "export.tls-certificates", "server-key.pem: No such file"),
        ];
        assert_eq!(got.len(), expected.len(), "{got:#?}");
        for (got, expected) in got.iter().zip(expected) {
            assert!(
                got.0 == expected.0 && got.1 == expected.1 && got.2.contains(expected.2),
                "{got:?} {expected:?}"
            );
        }
        assert!(!at("made.img").exists());
    }
}
