//! The examples as programs: served over NBD, and ended by a signal.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Returns an example, which cargo builds with the tests.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its path");
    test.ancestors().nth(2).expect("it lies in target/PROFILE/deps").join("examples").join(name)
}

fn start(name: &str, arguments: &[&str], run: &Path) -> (Child, String) {
    let mut command = Command::new(example(name));
    command.args(arguments).env("BLOCKYARD_RUN", run).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the example starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("it prints its address");
    (child, line.trim().to_owned())
}

fn end(mut child: Child) {
    let ended = Command::new("kill").arg(child.id().to_string()).status().expect("kill runs");
    assert!(ended.success());
    assert!(child.wait().expect("it ends").success());
}

/// Copies between an export and a file with nbdcopy. Returns `false` if there is no nbdcopy.
fn copy(from: &str, to: &str) -> bool {
    match Command::new("nbdcopy").args([from, to]).status() {
        Ok(status) => {
            assert!(status.success(), "nbdcopy {from} {to}: {status}");
            true
        }
        Err(error) => {
            eprintln!("skipped: nbdcopy: {error}");
            false
        }
    }
}

fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
}

#[test]
fn the_memory_driver_returns_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("memory.sock").display());
    let (child, line) = start("memory", &[&socket], folder.path());
    let uri = line.strip_prefix("memory nbd ").unwrap_or_else(|| panic!("{line}")).to_owned();
    let (before, after) = (folder.path().join("before"), folder.path().join("after"));
    std::fs::write(&before, noise(1 << 20)).unwrap();
    if copy(before.to_str().unwrap(), &uri) && copy(&uri, after.to_str().unwrap()) {
        let found = std::fs::read(&after).unwrap();
        assert_eq!(found.len(), 64 << 20);
        assert!(found[..1 << 20] == noise(1 << 20)[..] && found[1 << 20..].iter().all(|byte| *byte == 0));
    }
    end(child);
}

#[test]
fn the_xor_layer_stores_what_was_written_under_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, data) = (folder.path().join("disk"), folder.path().join("data"));
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    std::fs::write(&data, noise(1 << 20)).unwrap();
    let socket = format!("unix:{}", folder.path().join("xor.sock").display());
    let (child, line) = start("xor", &[disk.to_str().unwrap(), &socket], folder.path());
    let uri = line.strip_prefix("xor nbd ").unwrap_or_else(|| panic!("{line}")).to_owned();
    if copy(data.to_str().unwrap(), &uri) {
        let stored: Vec<u8> = std::fs::read(&disk).unwrap().iter().map(|byte| byte ^ 0x5a).collect();
        assert!(stored == noise(1 << 20), "the file has other bytes");
        let back = folder.path().join("back");
        copy(&uri, back.to_str().unwrap());
        assert!(std::fs::read(&back).unwrap() == noise(1 << 20));
    }
    end(child);
}
