//! Finds the file that a lost block belongs to, on ext2, ext3 and ext4 with `debugfs`.

use super::checker::Checker;
use super::device::tool;
use crash::report::Lost;
use crash::{State, View};
use std::process::Command;

/// The most blocks that are looked up.
const LOST_MAX: usize = 8;

/// Names the files of lost blocks, looked up in the state in which the cut lost nothing. Without `debugfs`,
/// or on another file system, no file is named.
pub(super) fn name(checker: &mut Checker, view: &View, state: &State, lost: &mut [Lost]) {
    let full = State::all_present(state.cut);
    let mut head = [0; 2048];
    if view.read(&full, 0, &mut head).is_err() || head[1024 + 56..1024 + 58] != [0x53, 0xef] {
        return;
    }
    let block_len = 1024_u64 << (head[1024 + 24] & 7);
    let Ok(device) = checker.set(&full) else { return };
    let debugfs = |request: String| {
        // -c: without reading bitmaps, which may be inconsistent there.
        tool(Command::new("debugfs").args(["-c", "-R", &request]).arg(&device)).ok()
    };
    for one in lost.iter_mut().take(LOST_MAX) {
        let block = one.offset / block_len;
        let Some(inode) = debugfs(format!("icheck {block}")).and_then(|answer| second(&answer)) else {
            continue;
        };
        let Ok(number) = inode.parse::<u64>() else { continue };
        let name = match number {
            8 => Some("the journal".to_owned()),
            7 => Some("the resize inode".to_owned()),
            2 => Some("the root directory".to_owned()),
            _ => debugfs(format!("ncheck {number}")).and_then(|answer| second(&answer)),
        };
        one.file = Some(name.unwrap_or_else(|| format!("inode {number}")));
    }
}

/// Returns the second column of the last line of a table.
fn second(answer: &str) -> Option<String> {
    let line = answer.lines().rfind(|line| !line.trim().is_empty())?;
    Some(line.split_once('\t')?.1.trim().to_owned())
}
