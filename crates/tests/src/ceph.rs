//! Images on a Ceph of one node, which `./x ceph` starts.
//!
//! *Invariant:* an image is removed with its handle.

use crate::server::Sandbox;
use crate::tools::{PATIENCE, command, run_within, skip, until};
use std::path::{Path, PathBuf};

/// The cluster, and an image that is removed at the end.
pub struct Image {
    /// The cluster's configuration.
    pub conf: PathBuf,
    /// The image, of the pool `rbd`.
    pub name: &'static str,
}

impl Image {
    /// Creates an image; `None`: there is no cluster, and the test is skipped.
    pub fn new(name: &'static str, mib: u64, options: &[&str]) -> Option<Image> {
        let Some(folder) = folder() else {
            skip("no cluster (./x ceph test starts one)");
            return None;
        };
        let image = Image { conf: folder.join("ceph.conf"), name };
        let place = format!("rbd/{name}");
        let size = format!("{mib}M");
        image.rbd(&[&["create", "--size", &size][..], options, &[&place]].concat());
        Some(image)
    }

    /// Runs a program as a client of the cluster; returns its output.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> String {
        run_within(command(arguments).env("CEPH_CONF", &self.conf), PATIENCE).ok()
    }

    /// Runs `rbd`; returns its output.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn rbd(&self, arguments: &[&str]) -> String {
        self.run(&[&["rbd"][..], arguments].concat())
    }

    /// Returns the image as a stack, with options.
    pub fn stack(&self, options: &str) -> String {
        format!("rbd:rbd/{}{options},conf={}", self.name, self.conf.display())
    }

    /// Returns what another client reads, of the image or `@SNAPSHOT`.
    ///
    /// # Panics
    /// If the image cannot be exported.
    pub fn exported(&self, sandbox: &Sandbox, snapshot: &str) -> Vec<u8> {
        let file = sandbox.path("exported");
        let _ = std::fs::remove_file(&file);
        self.rbd(&["export", &format!("rbd/{}{snapshot}", self.name), &file.to_string_lossy()]);
        std::fs::read(file).unwrap()
    }
}

/// Returns the folder of the cluster, if there is one.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os("BLOCKYARD_CEPH").map(|folder| Path::new(&folder).to_owned())
}

impl Drop for Image {
    fn drop(&mut self) {
        let place = format!("rbd/{}", self.name);
        for words in [["snap", "purge", &place].as_slice(), &["rm", &place]] {
            // A client that was killed is recorded as a user of the image until its watch has timed out.
            let gone = || {
                let words = [&["rbd"][..], words].concat();
                let outcome = run_within(command(&words).env("CEPH_CONF", &self.conf), PATIENCE);
                outcome.status.success().then_some(())
            };
            if until(PATIENCE, gone).is_none() && !std::thread::panicking() {
                panic!("{place} cannot be removed");
            }
        }
    }
}
