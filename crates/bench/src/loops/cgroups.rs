//! A cgroup of its own for each process of a fio job.
//!
//! The loop driver has one worker thread for each cgroup whose requests it gets, so four jobs in four cgroups
//! get four workers. The controller is `io` of cgroup v2, or `blkio` of v1 where v2 lacks `io`.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::tools::run;

/// Prefix of a cgroup's name, before the process ID.
const PREFIX: &str = "blockyard-bench-";

/// A mounted hierarchy; dropping the value removes the mount.
pub(super) struct Cgroups {
    mount: PathBuf,
    /// Whether this value enabled the controller, and so disables it.
    enabled: bool,
}

impl Cgroups {
    /// Mounts the hierarchy of the controller on `mount`.
    pub(super) fn new(mount: PathBuf) -> Result<Cgroups> {
        std::fs::create_dir_all(&mount).map_err(Error::at(&mount))?;
        let on = mount.to_string_lossy().into_owned();
        run(&["mount", "-t", "cgroup2", "none", &on])?;
        let mut groups = Cgroups { mount, enabled: false };
        if groups.controllers("cgroup.controllers").is_ok_and(|names| has_io(&names)) {
            if !has_io(&groups.controllers("cgroup.subtree_control")?) {
                groups.control("+io")?;
                groups.enabled = true;
            }
            return Ok(groups);
        }
        run(&["umount", &on])?;
        run(&["mount", "-t", "cgroup", "-o", "blkio", "none", &on])?;
        Ok(groups)
    }

    fn controllers(&self, file: &str) -> Result<String> {
        let path = self.mount.join(file);
        std::fs::read_to_string(&path).map_err(Error::at(&path))
    }

    fn control(&self, word: &str) -> Result<()> {
        let path = self.mount.join("cgroup.subtree_control");
        std::fs::write(&path, word).map_err(Error::at(&path))
    }

    /// Returns fio's option that moves each process of a job into a cgroup. fio appends a redirection of the
    /// output, so the commands are in parentheses.
    pub(super) fn option(&self) -> String {
        let group = quoted(&self.mount.join(PREFIX));
        format!("--exec_prerun=(mkdir {group}$PPID && echo $PPID >{group}$PPID/cgroup.procs)")
    }

    /// Removes the cgroups of jobs that ended.
    pub(super) fn clear(&self) -> Result<()> {
        for entry in std::fs::read_dir(&self.mount).map_err(Error::at(&self.mount))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                std::fs::remove_dir(entry.path()).map_err(Error::at(&entry.path()))?;
            }
        }
        Ok(())
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        // An interrupted job may have left its cgroups.
        let _ = self.clear();
        if self.enabled {
            let _ = self.control("-io");
        }
        let _ = run(&["umount", &self.mount.to_string_lossy()]);
        let _ = std::fs::remove_dir(&self.mount);
    }
}

fn has_io(names: &str) -> bool {
    names.split_whitespace().any(|name| name == "io")
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_is_a_whole_word() {
        assert!(has_io("cpu io memory\n"));
        assert!(!has_io("cpuio hugetlb\n") && !has_io(""));
    }

    #[test]
    fn a_shell_understands_the_command_with_the_redirection_of_fio() {
        let folder = std::env::temp_dir().join(format!("blockyard 'groups-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        // Dropping the value would unmount.
        let groups = std::mem::ManuallyDrop::new(Cgroups { mount: folder.clone(), enabled: false });
        let option = groups.option();
        let (_, command) = option.split_once('=').unwrap();
        run(&["sh", "-c", &format!("{command} > /dev/null 2>&1")]).unwrap();
        let group = folder.join(format!("{PREFIX}{}", std::process::id()));
        let member = group.join("cgroup.procs");
        assert_eq!(std::fs::read_to_string(&member).unwrap().trim(), std::process::id().to_string());
        // In the kernel's file system a cgroup can be removed with its files.
        std::fs::remove_file(member).unwrap();
        groups.clear().unwrap();
        assert!(!group.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
