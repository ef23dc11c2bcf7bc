//! `blockyard dmsetup` compared with dmsetup: equal commands, one after the other, on the same loop devices.
//! Output, errors and exit statuses must be equal, except for device numbers.

use super::When::{self, Always, Soak};
use super::disk::tool;
use super::dm::{Loops, prepare};
use super::{Done, Test, soak, test};
use crate::peer::Peer;
use crate::tools::{Outcome, run};

/// The tests of this module.
pub const TESTS: &[Test] = &[
    test("dm/dmsetup", "dmsetup's commands print and fail as the real one's, character for character", few),
    soak("dm/dmsetup_all", "many more commands, character for character", all),
];

/// Commands in order, and when they are run. `{0}` … are loop devices.
const COMMANDS: &[(When, &[&str])] = &[
    (Soak, &["ls"]),
    (Soak, &["info"]),
    (Always, &["create", "one", "--table", "0 4096 linear {0} 0\n4096 64 zero"]),
    (Always, &["create", "two", "-u", "UUID-two", "--table", "0 100 error"]),
    (Always, &["create", "five", "-r", "--table", "0 4096 striped 2 16 {0} 0 {1} 0"]),
    (Always, &["create", "--concise", "c1,CU1,,rw,0 8 zero, 8 8 error;c2,,,ro,0 8 zero"]),
    (Soak, &["create", "--concise", "c3,,"]),
    (Soak, &["create", "one", "--table", "0 8 zero"]),
    (Always, &["create", "dup", "-u", "UUID-two", "--table", "0 8 zero"]),
    (Soak, &["create", "a/b", "--table", "0 8 zero"]),
    (Always, &["create", "bad", "--table", "0 8 nosuch"]),
    (Soak, &["create", "bad", "--table", "0 8"]),
    (Soak, &["create", "bad", "--table", "0 80000 linear {0} 0"]),
    (Soak, &["create", "bad", "/nosuch"]),
    (Soak, &["create"]),
    (Soak, &["ls"]),
    (Soak, &["ls", "--target", "zero"]),
    (Soak, &["ls", "--target", "mirror"]),
    (Always, &["ls", "--tree"]),
    (Soak, &["ls", "-o", "devname"]),
    (Always, &["info", "one"]),
    (Soak, &["info", "-u", "UUID-two"]),
    (Soak, &["info", "-u", "none"]),
    (Always, &["info", "-c", "-o", "name,attr,open,segments,events,uuid"]),
    (Soak, &["info", "-c", "-o", "name,uuid", "--noheadings"]),
    (Soak, &["info", "-c", "-o", "name,attr,segments", "--noheadings", "--separator", ",", "one"]),
    (
        Soak,
        &["info", "-c", "-o", "suspended,readonly,tables_loaded,read_ahead,device_count,name", "-O", "-name"],
    ),
    (Soak, &["info", "-c", "-o", "name,segments,uuid", "--nameprefixes", "two"]),
    (Soak, &["info", "-c", "-o", "devnos_used,blkdevs_used,name", "five"]),
    (Always, &["info", "-c", "-o", "name,uuid,attr", "-S", "name=~\"^(one|two)$\" && segments>=1"]),
    (Soak, &["info", "-c", "-o", "name", "-S", "!(name=one),(uuid=\"\"||open=7)"]),
    (Soak, &["info", "-c", "-o", "name", "-S", "name=one && (open<1"]),
    (Soak, &["info", "-c", "-o", "name", "-S", "!name=one"]),
    (Soak, &["info", "-c", "-o", "name", "-S", "open=x"]),
    (Soak, &["info", "-c", "-o", "name", "-S", "name=nosuch"]),
    (Soak, &["table", "-S", "name=one"]),
    (Always, &["info", "-c", "-o", "name,segments,uuid", "--rows"]),
    (Soak, &["info", "-c", "-o", "name,segments", "--rows", "--nameprefixes", "--noheadings", "--unquoted"]),
    (Soak, &["info", "-c", "-o", "name,subsystem,vg_name,mangled_name,unmangled_uuid", "two"]),
    (Soak, &["info", "--nolockfs", "two"]),
    (Soak, &["ls", "--tree", "-o", "inverted"]),
    (Soak, &["ls", "-o", "nosuch"]),
    (Soak, &["table", "-v", "one"]),
    (Soak, &["deps", "-v", "two"]),
    (Soak, &["mknodes"]),
    (Soak, &["load"]),
    (Soak, &["target-version"]),
    (Soak, &["wipe_table", "nosuch"]),
    (Soak, &["remove", "-f", "nosuch"]),
    (Soak, &["remove", "-u", "nosuch"]),
    (Soak, &["create", "--addnodeoncreate", "node", "--table", "0 8 zero"]),
    (Soak, &["deps", "five"]),
    (Always, &["deps"]),
    (Soak, &["deps", "-o", "devname", "five"]),
    (Always, &["table"]),
    (Soak, &["table", "--target", "zero", "one"]),
    (Soak, &["table", "--concise", "c1"]),
    (Always, &["status", "two", "one"]),
    (Soak, &["table", "--inactive", "one"]),
    (Always, &["rename", "one", "uno"]),
    (Always, &["rename", "uno", "two"]),
    (Soak, &["rename", "uno", "uno"]),
    (Soak, &["rename", "nosuch", "more"]),
    (Soak, &["rename", "uno", "--setuuid", "U-1"]),
    (Soak, &["rename", "uno", "--setuuid", "U-2"]),
    (Always, &["info", "-c", "-o", "name,attr,events,uuid", "uno"]),
    (Soak, &["table", "one"]),
    (Soak, &["status", "one"]),
    (Soak, &["remove", "one"]),
    (Soak, &["message", "one", "0", "x"]),
    (Always, &["message", "two", "0", "hello"]),
    (Soak, &["message", "two", "5000", "hello"]),
    (Soak, &["message", "two", "z", "hello"]),
    (Soak, &["message", "two", "0"]),
    (Soak, &["message", "two", "0", "@cancel_deferred_remove"]),
    (Always, &["load", "two", "--table", "0 200 zero"]),
    (Always, &["table", "--inactive", "two"]),
    (Soak, &["info", "two"]),
    (Soak, &["clear", "two"]),
    (Soak, &["clear", "two"]),
    (Soak, &["suspend", "-v", "two"]),
    (Soak, &["suspend", "two"]),
    (Always, &["resume", "-v", "two"]),
    (Soak, &["reload", "two", "--table", "0 8 zero\n16 8 zero"]),
    (Soak, &["wipe_table", "uno"]),
    (Soak, &["table", "uno"]),
    (Soak, &["wait", "-v", "two", "7"]),
    (Soak, &["target-version", "zero", "nosuch"]),
    (Always, &["remove", "uno"]),
    (Soak, &["create", "dust", "--table", "0 4096 dust {0} 0 512"]),
    (Soak, &["message", "dust", "0", "addbadblock", "7"]),
    (Soak, &["message", "dust", "0", "addbadblock", "7"]),
    (Soak, &["message", "dust", "0", "addbadblock", "9", "3"]),
    (Soak, &["message", "dust", "0", "addbadblock", "99999"]),
    (Soak, &["message", "dust", "0", "queryblock", "7"]),
    (Soak, &["message", "dust", "0", "queryblock", "8"]),
    (Soak, &["message", "dust", "0", "countbadblocks"]),
    (Soak, &["message", "dust", "0", "listbadblocks"]),
    (Soak, &["message", "dust", "0", "removebadblock", "7"]),
    (Soak, &["message", "dust", "0", "removebadblock", "7"]),
    (Soak, &["message", "dust", "0", "enable"]),
    (Soak, &["message", "dust", "0", "quiet"]),
    (Soak, &["status", "dust"]),
    (Soak, &["message", "dust", "0", "clearbadblocks"]),
    (Soak, &["message", "dust", "0", "listbadblocks"]),
    (Soak, &["message", "dust", "0", "disable"]),
    (Soak, &["message", "dust", "0", "bogus"]),
    (Soak, &["message", "dust", "0", "addbadblock"]),
    (Soak, &["status", "dust"]),
    (Soak, &["create", "switch", "--table", "0 4096 switch 2 64 0 {0} 0 {1} 0"]),
    (Soak, &["message", "switch", "0", "set_region_mappings", "0:1", ":0", "R2,10"]),
    (Soak, &["message", "switch", "0", "set_region_mappings", "0:2"]),
    (Soak, &["message", "switch", "0", "set_region_mappings", "fff:1"]),
    (Soak, &["message", "switch", "0", "set_region_mappings"]),
    (Soak, &["message", "switch", "0", "bogus"]),
    (Soak, &["status", "switch"]),
    (Soak, &["create", "log-writes", "--table", "0 4096 log-writes {0} {1}"]),
    (Soak, &["message", "log-writes", "0", "mark", "here"]),
    (Soak, &["message", "log-writes", "0", "mark"]),
    (Soak, &["status", "log-writes"]),
    (Always, &["remove_all"]),
    (Soak, &["ls"]),
];

fn few() -> Done {
    compare(COMMANDS.iter().filter(|(when, _)| *when == Always).map(|(_, words)| *words).collect())
}

fn all() -> Done {
    compare(COMMANDS.iter().map(|(_, words)| *words).collect())
}

/// Runs the same commands on both sides; `io NAME`, which dmsetup does not have, reads a block of a device.
pub(super) fn compare(commands: Vec<&[&str]>) -> Done {
    let loops = prepare()?;
    // Devices of targets that a kernel may lack have the target's name.
    let has = |arguments: &&[&str]| {
        let lacks = |target: &&str| arguments.contains(target) && !loops.has(target);
        !["dust", "switch", "log-writes"].iter().any(lacks)
    };
    let commands: Vec<&[&str]> = commands.into_iter().filter(has).collect();
    let theirs: Vec<String> = commands.iter().map(|words| real(&loops, words)).collect();
    let ours: Vec<String> = commands.iter().map(|words| our(&loops, words)).collect();
    tool(&["dmsetup", "remove_all", "--noudevsync"]);
    let differ = commands.iter().zip(theirs.iter().zip(&ours)).filter(|(_, (theirs, ours))| theirs != ours);
    let differ: Vec<String> = differ
        .map(|(words, (theirs, ours))| {
            format!("{words:?}\n--- dmsetup\n{theirs}--- blockyard dmsetup\n{ours}")
        })
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
    Ok(())
}

fn real(loops: &Loops, arguments: &[&str]) -> String {
    let arguments: Vec<String> = arguments.iter().map(|word| loops.table(word)).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["io", name] = arguments[..] {
        let from = format!("if=/dev/mapper/{name}");
        let read = tool(&["dd", &from, "of=/dev/null", "bs=4096", "count=1", "iflag=direct", "status=none"]);
        return format!("{}\n", read.status.success());
    }
    let reported =
        result_text(&tool(&[&["dmsetup"], &arguments[..], &["--noudevsync", "--noudevrules"]].concat()));
    if matches!(arguments[0], "create" | "rename") {
        // There is no udev to create nodes, which some commands check.
        tool(&["dmsetup", "mknodes"]);
    }
    reported
}

fn our(loops: &Loops, arguments: &[&str]) -> String {
    let arguments: Vec<String> = arguments.iter().map(|word| loops.table(word)).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["io", name] = arguments[..] {
        let socket = loops.sandbox.run_dir().join(format!("{name}.sock"));
        let mut peer = Peer::connect(&socket, name);
        let read = peer.read(0, 4096);
        peer.disconnect();
        return format!("{}\n", read.is_ok());
    }
    let mut command = loops.sandbox.blockyard(&[&["dmsetup"], &arguments[..]].concat());
    result_text(&run(command.env("BLOCKYARD_EXPORT", "nbd")))
}

/// Returns the result as text: status, output, and messages without our additions to dmsetup's text.
fn result_text(outcome: &Outcome) -> String {
    let complaints: String = outcome
        .stderr
        .lines()
        .take_while(|line| !line.starts_with("Usage:"))
        .filter(|line| !line.starts_with("blockyard: "))
        .map(|line| format!("! {line}\n"))
        .collect();
    let status = outcome.status.code();
    unnumbered(&format!("{}{complaints}status {status:?}\n", outcome.stdout))
}

/// Replaces numbers of mapped devices: `(252:3)`, `(252, 3)`, the line of `info`, and the third field of a
/// concise line.
fn unnumbered(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let line = if line.starts_with("Major, minor:") { "Major, minor:" } else { line };
        let concise: Vec<&str> = line.splitn(4, ',').collect();
        let shorter = match concise.as_slice() {
            [name, uuid, minor, rest] if minor.parse::<u32>().is_ok() => format!("{name},{uuid},,{rest}"),
            _ => line.to_owned(),
        };
        let line = shorter.as_str();
        for (number, part) in line.split('(').enumerate() {
            let Some((inner, rest)) = part.split_once(')').filter(|_| number > 0) else {
                out += &format!("{}{part}", if number > 0 { "(" } else { "" });
                continue;
            };
            let numbers = inner.split_once(':').or(inner.split_once(", "));
            let is_pair = numbers.is_some_and(|(major, minor)| {
                major != "7" && [major, minor].iter().all(|half| half.parse::<u32>().is_ok())
            });
            out += &format!("({}){rest}", if is_pair { "N" } else { inner });
        }
        out.push('\n');
    }
    out
}
