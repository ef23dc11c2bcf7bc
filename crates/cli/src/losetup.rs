//! `blockyard losetup`: the options, columns and exit statuses of losetup(8) for our devices and the
//! kernel's.
//!
//! Setting up a file creates a device with a loop export. A device is identified by its node, or by its name
//! in `blockyard list`. The kernel's own loop devices are listed with ours; changes to them are passed on to
//! the system's losetup.
//!
//! The loop export itself is in the crate `attach`.

mod options;
mod rows;
mod table;

use crate::add;
use crate::del;
use crate::failure::{FAILED, Failure, print, print_bytes};
use crate::listing::{block_on, devices, run_dir};
use crate::locale;
use attach::loop_device::is_orphaned;
use engine::change::Change;
use engine::control::ClientError;
use engine::rundir::RunDir;
use engine::spec::{Bytes, Direct, FileFormat, Format, StackSpec};
use options::{Action, Options};
use rows::{BackingFile, Row};
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use table::{Column, listing, old_format};

/// An error in losetup's format.
#[derive(Debug)]
pub(crate) struct Refusal {
    why: String,
    /// Whether a hint at `--help` follows.
    usage: bool,
}

impl Refusal {
    fn plain(why: String) -> Refusal {
        Refusal { why, usage: false }
    }

    fn usage(why: String) -> Refusal {
        Refusal { why, usage: true }
    }

    fn of(name: &str, what: &str, why: impl Display) -> Refusal {
        Refusal::plain(format!("{name}: {what}: {why}"))
    }

    fn report(&self) -> ExitCode {
        // The text is empty where the system's losetup prints nothing, or has printed its own error.
        if !self.why.is_empty() {
            eprintln!("losetup: {}", self.why);
        }
        if self.usage {
            eprintln!("Try 'losetup --help' for more information.");
        }
        ExitCode::from(FAILED)
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        Refusal::plain(failure.to_string())
    }
}

impl From<ClientError> for Refusal {
    fn from(error: ClientError) -> Refusal {
        Refusal::plain(error.to_string())
    }
}

pub(crate) fn losetup(args: &[String]) -> ExitCode {
    match options::parse(args).and_then(|options| run(&options)) {
        Ok(code) => code,
        Err(refusal) => refusal.report(),
    }
}

fn run(options: &Options) -> Result<ExitCode, Refusal> {
    match &options.action {
        Action::Help => {
            print(&help());
        }
        Action::Version => {
            print(&format!("losetup from blockyard {}\n", env!("CARGO_PKG_VERSION")));
        }
        Action::ShowAll { file } => show_all(options, file.as_deref())?,
        Action::ShowOne(arg) => return show_one(options, arg),
        Action::FindFree => {
            let free = rows::first_free();
            let free = free.ok_or_else(|| Refusal::plain("cannot find an unused loop device".to_owned()))?;
            print(&format!("{free}\n"));
        }
        Action::Create { device, file } => create(options, device.as_deref(), file)?,
        Action::Detach(args) => return detach(args),
        Action::DetachAll => return detach_all(),
        Action::SetCapacity(arg) => {
            let change = Change::Resize { size: None, shrink: true };
            return change_one(arg, "set capacity failed", &change, &["--set-capacity", arg]);
        }
        Action::SetDirect(arg, on) => {
            let (direct, flag) =
                if *on { (Direct::On, "--direct-io=on") } else { (Direct::Off, "--direct-io=off") };
            return change_one(arg, "set direct io failed", &Change::Direct(direct), &[flag, arg]);
        }
        Action::SetBlock(arg, block) => return set_block(arg, *block),
        Action::Remove(args) => return remove(args),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns all devices in use.
fn used() -> Result<Vec<Row>, Refusal> {
    let run = run_dir("losetup")?;
    Ok(rows::used(block_on("losetup", devices(&run))??))
}

/// Returns the device that an argument names: one in use, or an unbound loop device of the kernel.
fn find(arg: &str) -> Result<Row, Refusal> {
    if let Some(row) = used()?.into_iter().find(|row| row.is(arg)) {
        return Ok(row);
    }
    let name = arg.strip_prefix("/dev/").unwrap_or(arg);
    Row::of_kernel(name).ok_or_else(|| Refusal::of(arg, "failed to use device", "No such device"))
}

fn show_all(options: &Options, file: Option<&str>) -> Result<(), Refusal> {
    let mut rows = used()?;
    if let Some(file) = file {
        // A missing file backs no device.
        let back = BackingFile::of(file);
        rows.retain(|row| back.is_some_and(|back| row.is_over(back, options.offset)));
    }
    print_bytes(&shown(options, &rows));
    Ok(())
}

fn shown(options: &Options, rows: &[Row]) -> Vec<u8> {
    let how = &options.listing;
    match how.list {
        true => listing(rows, &how.columns, how.style, how.headings, locale::is_utf8()).into_bytes(),
        false => rows.iter().flat_map(old_format).collect(),
    }
}

fn show_one(options: &Options, arg: &str) -> Result<ExitCode, Refusal> {
    let row = find(arg)?;
    if row.back_file.is_none() && !options.listing.list {
        return Err(Refusal::plain(format!("{}: No such device or address", row.name)));
    }
    print_bytes(&shown(options, &[row]));
    Ok(ExitCode::SUCCESS)
}

/// Returns the stack that the options describe.
fn stack(options: &Options, file: &Path) -> Result<StackSpec, Refusal> {
    let name = file.display().to_string();
    let failed = |why: &dyn Display| Refusal::of(&name, "failed to set up loop device", why);
    let absolute = std::path::absolute(file).map_err(|why| failed(&why))?;
    let mut stack: StackSpec = "file:disk".parse().map_err(|why| failed(&why))?;
    if let StackSpec::File(spec) = &mut stack {
        // losetup ignores the format of a file.
        spec.format = FileFormat::Given(Format::Raw);
        spec.file.path = absolute;
        spec.file.offset = Bytes(options.offset.unwrap_or(0));
        spec.file.sizelimit = options.sizelimit.filter(|&limit| limit > 0).map(Bytes);
        spec.file.direct = if options.direct == Some(true) { Direct::On } else { Direct::Off };
        spec.file.block =
            options.block.and_then(|block| u32::try_from(block).ok()).filter(|&block| block > 0);
        // As in losetup, a file that is not writable is set up read-only.
        let write = rustix::fs::access(file, rustix::fs::Access::WRITE_OK);
        spec.file.ro =
            options.read_only || matches!(write, Err(rustix::io::Errno::ROFS | rustix::io::Errno::ACCESS));
        spec.partscan = options.partscan;
    }
    Ok(stack)
}

fn create(options: &Options, device: Option<&str>, file: &str) -> Result<(), Refusal> {
    let failed = |why: &dyn Display| Refusal::of(file, "failed to set up loop device", why);
    if file.is_empty() {
        return Err(Refusal::of(file, "failed to use backing file", "No such file or directory"));
    }
    let meta = std::fs::metadata(file).map_err(|why| failed(&plain(&why)))?;
    if meta.is_dir() {
        return Err(failed(&"Is a directory"));
    }
    // The kernel uses signed offsets.
    if [options.offset, options.sizelimit].into_iter().flatten().any(|len| len > i64::MAX as u64) {
        return Err(failed(&"Value too large for defined data type"));
    }
    if let Some(block) = options.block.filter(|&block| block > 0)
        && !(block.is_power_of_two() && (512..=65536).contains(&block))
    {
        let why = format!("Invalid argument (a block cannot be {block} bytes: use 512, 1K, 2K, … 64K)");
        return Err(failed(&why));
    }
    if options.no_overlap
        && let Some(there) = overlapping(options, file, meta.size())?
    {
        if options.show {
            print(&format!("{}\n", there.name));
        }
        return Ok(());
    }
    let export = match device {
        None => "--loop".to_owned(),
        Some(arg) => export_at(arg, file)?,
    };
    let stack = stack(options, Path::new(file))?.to_string();
    let args: [OsString; 3] = [stack.into(), export.into(), "--json".into()];
    let started = add::start(args).map_err(|why| failed(&why))?;
    if started.ready.is_empty() {
        let line = started.stderr.lines().next().unwrap_or("its process ended");
        let why = line.strip_prefix("blockyard: add failed: ").unwrap_or(line);
        return Err(failed(&why));
    }
    warn_of_size(options, file, meta.size());
    if options.show {
        print(&node_of(&started.ready));
    }
    Ok(())
}

/// Returns the address of the first export with a device node from the output of `add --json`.
fn node_of(ready: &str) -> String {
    let lines = ready.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let addresses: Vec<String> =
        lines.filter_map(|line| line["address"].as_str().map(str::to_owned)).collect();
    let node = addresses.iter().find(|address| address.starts_with("/dev/")).or(addresses.first());
    node.map(|node| format!("{node}\n")).unwrap_or_default()
}

/// Returns the export option for a device name: `/dev/loopN` or `/dev/ublkbN`.
fn export_at(arg: &str, file: &str) -> Result<String, Refusal> {
    let name = arg.strip_prefix("/dev/").unwrap_or(arg);
    if used()?.iter().any(|row| row.is(arg)) {
        return Err(Refusal::of(file, "failed to set up loop device", "Device or resource busy"));
    }
    for (prefix, flag) in [("loop", "--loop"), ("ublkb", "--ublk")] {
        if let Some(number) = name.strip_prefix(prefix)
            && let Ok(number) = number.parse::<u32>()
        {
            return Ok(format!("{flag}={number}"));
        }
    }
    let (node, what) = (Path::new("/dev").join(name), "failed to set up loop device");
    Err(match node.exists() {
        true => Refusal::of(file, what, "Inappropriate ioctl for device"),
        false => Refusal::of(&node.display().to_string(), what, "No such file or directory"),
    })
}

/// `--nooverlap`: returns the device that already has these settings.
fn overlapping(options: &Options, file: &str, size: u64) -> Result<Option<Row>, Refusal> {
    let Some(back) = BackingFile::of(file) else { return Ok(None) };
    let range = |offset: u64, limit: u64| {
        let end = if limit > 0 { offset.saturating_add(limit) } else { u64::MAX };
        (offset, end.min(size.max(offset)))
    };
    let (offset, limit) = (options.offset.unwrap_or(0), options.sizelimit.unwrap_or(0));
    let (start, end) = range(offset, limit);
    for row in used()?.into_iter().filter(|row| row.is_over(back, None)) {
        let (other_offset, other_limit) = (row.offset.unwrap_or(0), row.sizelimit.unwrap_or(0));
        if (other_offset, other_limit, row.read_only) == (offset, limit, options.read_only) {
            return Ok(Some(row));
        }
        let (other_start, other_end) = range(other_offset, other_limit);
        if start < other_end && other_start < end {
            return Err(Refusal::plain(format!("{file}: overlapping loop device exists")));
        }
    }
    Ok(None)
}

fn warn_of_size(options: &Options, file: &str, size: u64) {
    let size = size.saturating_sub(options.offset.unwrap_or(0));
    let size = options.sizelimit.filter(|&limit| limit > 0).map_or(size, |limit| size.min(limit));
    if size < 512 {
        eprintln!(
            "losetup: {file}: Warning: file is smaller than 512 bytes; the loop device may be useless or \
             invisible for system tools."
        );
    } else if !size.is_multiple_of(512) {
        eprintln!(
            "losetup: {file}: Warning: file does not fit into a 512-byte sector; the end of the file will be \
             ignored."
        );
    }
}

fn detach(args: &[String]) -> Result<ExitCode, Refusal> {
    // An error does not stop the following devices.
    let mut code = ExitCode::SUCCESS;
    for arg in args {
        let done = find(arg).and_then(|row| match &row.ours {
            Some((client, name)) => block_on("losetup", client.delete(name))?
                .map_err(|why| Refusal::of(&row.name, "detach failed", why)),
            None if row.back_file.is_none() => {
                Err(Refusal::of(&row.name, "detach failed", "No such device or address"))
            }
            None => match left_behind(&row)? {
                Some((run, name)) => {
                    let gone = Failure::new("losetup", &name, "the device no longer exists");
                    del::clear_left_behind(&run, &name, gone)
                        .map_err(|why| Refusal::of(&row.name, "detach failed", why.reason()))
                        .map(drop)
                }
                None => run_system_losetup(&["--detach", &row.name]),
            },
        });
        if let Err(refusal) = done {
            code = refusal.report();
        }
    }
    Ok(code)
}

/// Returns the name of our device if its server has died and left this loop device; `None`: the device is the
/// kernel's.
fn left_behind(row: &Row) -> Result<Option<(RunDir, String)>, Refusal> {
    let run = run_dir("losetup")?;
    let file = row.back_file.as_deref().map(Path::new);
    let name =
        file.and_then(Path::file_name).and_then(OsStr::to_str).and_then(|name| name.strip_suffix(".fuse"));
    let Some((file, name)) = file.zip(name) else { return Ok(None) };
    // The kernel resolves links in paths.
    let own = run.loop_file(name);
    let own = own.parent().and_then(|folder| folder.canonicalize().ok()).zip(own.file_name());
    let is_own = own.is_some_and(|(folder, last)| folder.join(last) == file);
    Ok((is_own && is_orphaned(file)).then(|| (run, name.to_owned())))
}

/// Detaches all devices with nodes, as losetup would find them. Devices without a node stay.
fn detach_all() -> Result<ExitCode, Refusal> {
    let nodes = used()?.into_iter().filter(|row| row.name.starts_with("/dev/"));
    detach(&nodes.map(|row| row.name).collect::<Vec<_>>())
}

/// Changes one of our devices. If the device is the kernel's, runs the system's losetup with `args`.
fn change_one(arg: &str, what: &str, change: &Change, args: &[&str]) -> Result<ExitCode, Refusal> {
    let row = find(arg)?;
    match &row.ours {
        Some((client, name)) => block_on("losetup", client.change(name, change))?
            .map_err(|why| Refusal::of(&row.name, what, why))?,
        None if row.back_file.is_none() => {
            return Err(Refusal::of(&row.name, what, "No such device or address"));
        }
        None => run_system_losetup(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn set_block(arg: &str, block: u64) -> Result<ExitCode, Refusal> {
    let row = find(arg)?;
    if row.ours.is_none() {
        let text = block.to_string();
        return run_system_losetup(&["--sector-size", &text, &row.name]).map(|()| ExitCode::SUCCESS);
    }
    if u64::from(row.block) == block {
        return Ok(ExitCode::SUCCESS);
    }
    let why =
        "the block size of a bound device cannot change (detach it, and set it up again with --sector-size)";
    Err(Refusal::of(&row.name, "set logical block size failed", why))
}

/// Removes unused loop devices from `/dev`, as `LOOP_CTL_REMOVE` does.
fn remove(args: &[String]) -> Result<ExitCode, Refusal> {
    let mut code = ExitCode::SUCCESS;
    for arg in args {
        let name = arg.strip_prefix("/dev/").unwrap_or(arg);
        let number = name.strip_prefix("loop").and_then(|number| number.parse().ok());
        let done = match number {
            _ if used()?.iter().any(|row| row.is(arg)) => {
                Err(Refusal::of(arg, "remove failed", "Device or resource busy"))
            }
            Some(number) => {
                attach::remove_loop(number).map_err(|why| Refusal::of(arg, "remove failed", plain(&why)))
            }
            None => Err(Refusal::of(arg, "remove failed", "No such device")),
        };
        if let Err(refusal) = done {
            code = refusal.report();
        }
    }
    Ok(code)
}

/// Runs the system's losetup, which prints its own errors.
fn run_system_losetup(args: &[&str]) -> Result<(), Refusal> {
    let status = Command::new("losetup").args(args).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(Refusal::plain(String::new())),
        Err(why) => {
            let why =
                format!("this is the kernel's own device, and the system's losetup cannot be run: {why}");
            Err(Refusal::plain(why))
        }
    }
}

/// Returns the error text without Rust's suffix.
fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

fn help() -> String {
    let mut text = format!("{USAGE}Options:\n{OPTIONS}\nAvailable output columns:\n");
    for column in Column::ALL {
        let (name, description) = column.named();
        text.push_str(&format!("{name:>13}  {description}\n"));
    }
    text.push_str("\nFor more details see losetup(8).\n");
    text
}

const USAGE: &str = "
Usage:
 losetup [options] [<loopdev>]
 losetup [options] -f | <loopdev> <file>

Set up and control loop devices.

";

/// The options in losetup's own help.
pub(crate) const OPTIONS: &str = " -a, --all                     list all used devices
 -d, --detach <loopdev>...     detach one or more devices
 -D, --detach-all              detach all used devices
 -f, --find                    find first unused device
 -c, --set-capacity <loopdev>  resize the device
 -j, --associated <file>       list all devices associated with <file>
 -L, --nooverlap               avoid possible conflict between devices
     --remove <loopdev>...     remove one or more unused devices

 -o, --offset <num>            start at offset <num> into file
     --sizelimit <num>         device is limited to <num> bytes of the file
 -b, --sector-size <num>       set the logical sector size to <num>
 -P, --partscan                create a partitioned loop device
 -r, --read-only               set up a read-only loop device
     --direct-io[=<on|off>]    open backing file with O_DIRECT
     --show                    print device name after setup (with -f)
 -v, --verbose                 verbose mode

 -J, --json                    use JSON --list output format
 -l, --list                    list info about all or specified (default)
 -n, --noheadings              don't print headings for --list output
 -O, --output <cols>           specify columns to output for --list
     --output-all              output all columns
     --raw                     use raw --list output format

 -h, --help                    display this help
 -V, --version                 display version
";
