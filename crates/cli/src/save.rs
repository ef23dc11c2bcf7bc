//! `save`: writes the served devices as a topology file.

use crate::apply::texts;
use crate::args::SaveArgs;
use crate::failure::{Failure, print};
use crate::listing::{block_on, client_of, run_dir};
use engine::apply::TopologyText;
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

/// A topology, and the settings that it cannot express.
struct Saved {
    text: String,
    /// Settings that a topology cannot express, with their device or process.
    left_out: Vec<String>,
    has_secrets: bool,
}

pub(crate) fn save(args: &SaveArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("save")?;
    for name in &args.names {
        // A device that no process serves is reported as in other commands.
        client_of(&run, "save", name)?;
    }
    let all = block_on("save", texts(&run))?;
    let texts: Vec<TopologyText> = all.into_iter().map(|(_, text)| text).collect();
    let saved = topology(&texts, &args.names);
    if saved.text.is_empty() {
        return Err(Failure::new("save", "", "there is no device to save (see blockyard list)"));
    }
    match &args.output {
        None => drop(print(&saved.text)),
        Some(path) => {
            let mode = if saved.has_secrets { 0o600 } else { 0o666 };
            write(path, &saved.text, mode).map_err(|why| Failure::new("save", path.display(), why))?;
        }
    }
    for what in &saved.left_out {
        eprintln!("blockyard: save: left out: {what}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Joins the devices of these processes, or the named ones, to one topology; its text is empty if there are none.
fn topology(processes: &[TopologyText], names: &[String]) -> Saved {
    let is_wanted = |name: &str| names.is_empty() || names.iter().any(|other| other == name);
    let used: Vec<&TopologyText> = processes
        .iter()
        .filter(|process| process.devices.iter().any(|device| is_wanted(&device.name)))
        .collect();
    let settings = used.first().map_or("", |process| process.settings.as_str());
    let mut saved = Saved { text: settings.to_owned(), left_out: Vec::new(), has_secrets: false };
    for process in &used {
        let devices = process.devices.iter().filter(|device| is_wanted(&device.name));
        let names = devices.clone().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ");
        saved.left_out.extend(process.left_out.iter().map(|what| format!("{names}: {what}")));
        if process.settings != settings {
            let own = if process.settings.is_empty() { "none".to_owned() } else { joined(&process.settings) };
            saved
                .left_out
                .push(format!("{names}: the settings of its process: {own} (a file has one process)"));
        }
        for device in devices {
            saved.has_secrets |= device.has_secrets;
            saved.left_out.extend(device.left_out.iter().map(|what| format!("{}: {what}", device.name)));
            if device.text.is_empty() {
                continue;
            }
            if !saved.text.is_empty() {
                saved.text.push('\n');
            }
            saved.text += &device.text;
        }
    }
    if !used.is_empty() {
        let comments: String =
            saved.left_out.iter().map(|what| format!("# left out: {}\n", joined(what))).collect();
        saved.text = format!("{comments}{}", saved.text);
    }
    saved
}

/// Joins lines to one line.
fn joined(lines: &str) -> String {
    lines.lines().collect::<Vec<_>>().join("; ")
}

/// Replaces a file in one step: a reader finds the old content or the new one. `mode`: its mode before the umask.
fn write(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let beside = Path::new(&beside);
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(beside, flags, Mode::from_bits_truncate(mode))?;
    let mut file = File::from(file);
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(beside, path));
    written.inspect_err(|_| {
        // The temporary file is incomplete.
        let _ = fs::remove_file(beside);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::apply::DeviceText;
    use std::os::unix::fs::PermissionsExt;

    fn process(pid: u32, settings: &str, names: &[&str]) -> TopologyText {
        let device = |name: &&str| DeviceText {
            name: (*name).to_owned(),
            text: format!("[device.{name}]\nstack = \"null:1M\"\n"),
            left_out: Vec::new(),
            has_secrets: *name == "secret",
        };
        let devices = names.iter().map(device).collect();
        TopologyText { pid, settings: settings.to_owned(), devices, ..TopologyText::default() }
    }

    #[test]
    fn devices_of_several_processes_make_one_topology() {
        let all = [process(1, "queues = 2\n", &["a", "b"]), process(2, "queues = 2\n", &["c"])];
        let saved = topology(&all, &[]);
        let read = engine::topology::Topology::parse(&saved.text, Path::new("/x.toml")).expect("it is one");
        assert_eq!((read.devices.len(), read.queues), (3, Some(2)));
        assert!(saved.left_out.is_empty() && !saved.has_secrets);
        let one = topology(&all, &["c".to_owned()]);
        assert_eq!(one.text, "queues = 2\n\n[device.c]\nstack = \"null:1M\"\n");
        assert!(topology(&all, &["x".to_owned()]).text.is_empty());
    }

    #[test]
    fn what_cannot_be_expressed_is_a_comment() {
        let mut page = process(1, "", &["a"]);
        page.left_out.push("its page".to_owned());
        let saved = topology(&[page, process(2, "queues = 2\npoll = true\n", &["secret"])], &[]);
        let first: Vec<&str> = saved.text.lines().take(2).collect();
        assert_eq!(first[0], "# left out: a: its page");
        assert!(
            first[1].contains("secret: the settings of its process: queues = 2; poll = true"),
            "{first:?}"
        );
        assert_eq!(saved.left_out.len(), 2);
        assert!(saved.has_secrets);
    }

    #[test]
    fn a_file_is_replaced_whole_with_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lab.toml");
        fs::write(&path, "old").expect("a file");
        write(&path, "new", 0o600).expect("it is written");
        assert_eq!(fs::read_to_string(&path).expect("it exists"), "new");
        let mode = fs::metadata(&path).expect("it exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(write(&folder.path().join("no/such.toml"), "new", 0o600).is_err());
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left beside it");
    }
}
