//! `./x ceph`: a real Ceph cluster of one node on loopback, for tests and experiments: one monitor, OSDs of
//! bluestore over sparse files, cephx.
//!
//! `./x test` starts a cluster for the tests of `rbd:` devices and stops it, even if the tests are
//! interrupted.
//!
//! Needs Debian's ceph-mon, ceph-osd and ceph-common, which `./x ceph` installs. Uses no manager, systemd
//! or network. All files of a cluster are in its folder; the daemons' process ids are in `*.pid` there.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// The default folder, relative to the root.
const FOLDER: &str = "target/ceph";
/// The folder of the cluster for tests.
const TEST_FOLDER: &str = "target/ceph-test";
/// Programs that a cluster runs.
const PROGRAMS: &[&str] = &["ceph-mon", "ceph-osd", "ceph", "rbd", "monmaptool", "ceph-authtool"];
/// Time limit of a step, generous for a busy machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Size of an OSD's sparse file.
const OSD_SIZE: u64 = 10 << 30;

/// Runs `up [DIR] [OSDS]`, `down [DIR]` or `test [ARGUMENTS]`; returns the exit status.
pub fn main(root: &Path, rest: &[String]) -> u8 {
    let words: Vec<&str> = rest.iter().map(String::as_str).collect();
    let folder = |given: Option<&&str>| given.map_or_else(|| root.join(FOLDER), PathBuf::from);
    let done = match &words[..] {
        ["up", more @ ..] if more.len() <= 2 => {
            let osds = more.get(1).map_or(Ok(2), |count| count.parse());
            let Ok(osds @ 1..=8) = osds else { return usage() };
            up(&folder(more.first()), osds).map(|conf| println!("{}", conf.display()))
        }
        ["down", more @ ..] if more.len() <= 1 => down(&folder(more.first())),
        ["test", more @ ..] => return test(root, more),
        _ => return usage(),
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("xtask: ceph {}: {error}", words.join(" "));
            1
        }
    }
}

fn usage() -> u8 {
    eprintln!("usage: ./x ceph up [DIR] [OSDS] | down [DIR] | test [ARGUMENTS of the test program]");
    2
}

/// A running cluster, which is stopped when this is dropped.
pub(crate) struct Cluster {
    folder: PathBuf,
}

impl Cluster {
    /// Starts a cluster below the target directory, after stopping one that an interrupted run has left
    /// there.
    pub(crate) fn start(root: &Path) -> io::Result<Cluster> {
        let folder = root.join(TEST_FOLDER);
        down(&folder)?;
        up(&folder, 2)?;
        Ok(Cluster { folder: fs::canonicalize(folder)? })
    }

    /// Returns the folder of the cluster, which tests get as `BLOCKYARD_CEPH`.
    pub(crate) fn folder(&self) -> String {
        self.folder.to_string_lossy().into_owned()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = down(&self.folder) {
            eprintln!("xtask: ending the cluster in {} failed: {error}", self.folder.display());
        }
    }
}

/// Returns the first program of Ceph that is not installed.
pub(crate) fn missing_program() -> Option<&'static str> {
    PROGRAMS.iter().copied().find(|name| !is_installed(name))
}

/// Starts a cluster, runs the tests that need one, and stops it.
fn test(root: &Path, arguments: &[&str]) -> u8 {
    let cluster = match Cluster::start(root) {
        Ok(cluster) => cluster,
        Err(error) => {
            eprintln!("xtask: ceph test: {error}");
            return 1;
        }
    };
    let mut tests = Command::new("cargo");
    tests.args([
        "test",
        "--locked",
        "-p",
        "blockyard-tests",
        "--test",
        "rbd",
        "--test",
        "rbd_gateways",
        "--",
    ]);
    tests.args(arguments).current_dir(root);
    let passed = tests.env("BLOCKYARD_CEPH", cluster.folder()).status();
    u8::from(!passed.is_ok_and(|status| status.success()))
}

fn failed(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

/// Returns a command for a program of Ceph, with the options that name the cluster.
fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(arguments[0]);
    command.args(&arguments[1..]).current_dir(folder).env("CEPH_CONF", folder.join("ceph.conf"));
    command.stdin(Stdio::null());
    command
}

/// Runs a program until it exits; returns its output.
fn run(folder: &Path, arguments: &[&str]) -> io::Result<String> {
    run_with(folder, arguments, None)
}

fn run_with(folder: &Path, arguments: &[&str], input: Option<&str>) -> io::Result<String> {
    let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("log/setup.log"))?;
    let mut command = command(folder, arguments);
    // Output goes to a file: a daemon keeps standard output and error open, so waiting for their end would
    // hang.
    let printed = folder.join("log/printed");
    command.stdout(fs::File::create(&printed)?).stderr(log);
    let mut child = match input {
        None => command.spawn()?,
        Some(text) => {
            let mut child = command.stdin(Stdio::piped()).spawn()?;
            child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(text.as_bytes()))?;
            child
        }
    };
    let until = Instant::now() + STEP_TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > until {
            child.kill()?;
            return Err(failed(format!("{} took longer than {STEP_TIMEOUT:?}", arguments.join(" "))));
        }
        thread::sleep(Duration::from_millis(20));
    };
    if !status.success() {
        let said = fs::read_to_string(folder.join("log/setup.log")).unwrap_or_default();
        let last: Vec<&str> = said.lines().rev().take(5).collect();
        let said = last.into_iter().rev().collect::<Vec<_>>().join("\n");
        return Err(failed(format!("{} failed ({status}):\n{said}", arguments.join(" "))));
    }
    fs::read_to_string(printed)
}

/// Returns the configuration of a cluster in that folder.
fn configuration(folder: &Path, fsid: &str, address: &str, osds: usize) -> String {
    let dir = folder.display();
    // Two copies if there are two OSDs, so that one of them may die.
    let copies = osds.min(2);
    let mut text = String::from("[global]\n");
    let mut add = |name: &str, value: &str| {
        let _ = writeln!(text, "{name} = {value}");
    };
    add("fsid", fsid);
    add("mon host", address);
    add("mon initial members", "a");
    add("public addr", "127.0.0.1");
    add("cluster addr", "127.0.0.1");
    for service in ["cluster", "service", "client"] {
        add(&format!("auth {service} required"), "cephx");
    }
    add("osd pool default size", &copies.to_string());
    add("osd pool default min size", "1");
    add("osd pool default pg num", "8");
    add("mon allow pool size one", "true");
    add("mon warn on pool no redundancy", "false");
    add("osd crush chooseleaf type", "0");
    add("ms bind msgr1", "false");
    add("ms bind ipv6", "false");
    add("keyring", &format!("{dir}/keyring"));
    add("log file", &format!("{dir}/log/$name.log"));
    add("admin socket", &format!("{dir}/run/$name.$pid.asok"));
    add("run dir", &format!("{dir}/run"));
    add("crash dir", &format!("{dir}/log"));
    add("auth allow insecure global id reclaim", "false");
    add("[mon]\nmon data", &format!("{dir}/mon/$id"));
    add("pid file", &format!("{dir}/$name.pid"));
    // A developer's disk may be nearly full.
    add("mon data avail crit", "1");
    add("mon data avail warn", "2");
    // A dead OSD is detected in seconds, not in 20 to 60.
    add("mon osd min down reporters", "1");
    add("[osd]\nosd data", &format!("{dir}/osd/$id"));
    add("pid file", &format!("{dir}/$name.pid"));
    add("keyring", &format!("{dir}/osd/$id/keyring"));
    add("osd objectstore", "bluestore");
    add("bluestore block size", &OSD_SIZE.to_string());
    add("bluestore fsck on mount", "false");
    add("osd memory target", "939524096");
    add("osd op num shards", "2");
    add("osd op num threads per shard", "1");
    // The watch of a client that exited without closing its images times out after 6 s instead of 30 s.
    add("osd client watch timeout", "6");
    add("osd heartbeat grace", "6");
    add("osd heartbeat interval", "2");
    add("osd max backfills", "1");
    text
}

/// Returns a port on loopback that is free now.
fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn uuid() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned())
}

/// Starts a cluster; returns its configuration file.
fn up(folder: &Path, osds: usize) -> io::Result<PathBuf> {
    let missing: Vec<&str> = PROGRAMS.iter().copied().filter(|name| !is_installed(name)).collect();
    if !missing.is_empty() {
        let why = format!("{} missing: install ceph-mon, ceph-osd and ceph-common", missing.join(", "));
        return Err(failed(why));
    }
    if folder.join("ceph.conf").exists() {
        return Err(failed(format!("{} holds a cluster (./x ceph down ends it)", folder.display())));
    }
    for part in ["mon", "log", "run", "osd"] {
        fs::create_dir_all(folder.join(part))?;
    }
    let folder = &fs::canonicalize(folder)?;
    let done = build(folder, osds);
    if done.is_err() {
        let _ = down(folder);
    }
    done
}

fn is_installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

fn build(folder: &Path, osds: usize) -> io::Result<PathBuf> {
    let (conf, fsid) = (folder.join("ceph.conf"), uuid()?);
    let address = format!("[v2:127.0.0.1:{}/0]", free_port()?);
    fs::write(&conf, configuration(folder, &fsid, &address, osds))?;
    let run = |arguments: &[&str]| run(folder, arguments);
    run(&[
        "ceph-authtool",
        "--create-keyring",
        "keyring",
        "--gen-key",
        "-n",
        "mon.",
        "--cap",
        "mon",
        "allow *",
    ])?;
    let caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"];
    run(&[&["ceph-authtool", "keyring", "--gen-key", "-n", "client.admin"][..], &caps].concat())?;
    run(&["monmaptool", "--create", "--clobber", "--fsid", &fsid, "--addv", "a", &address, "monmap"])?;
    run(&["ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring"])?;
    run(&["ceph-mon", "-i", "a"])?;
    run(&["ceph", "-s"])?;
    for number in 0..osds {
        start_new_osd(folder, number)?;
    }
    run(&["ceph", "osd", "pool", "create", "rbd", "8", "8"])?;
    let until = Instant::now() + STEP_TIMEOUT;
    while !run(&["ceph", "osd", "stat"])?.contains(&format!("{osds} up")) {
        if Instant::now() > until {
            return Err(failed(format!("{osds} OSDs are not up after {STEP_TIMEOUT:?}")));
        }
        thread::sleep(Duration::from_millis(200));
    }
    run(&["rbd", "pool", "init", "rbd"])?;
    Ok(conf)
}

fn start_new_osd(folder: &Path, number: usize) -> io::Result<()> {
    let (number, uuid) = (number.to_string(), uuid()?);
    fs::create_dir_all(folder.join("osd").join(&number))?;
    let key = run(folder, &["ceph-authtool", "--gen-print-key"])?;
    let key = key.trim();
    let secret = format!("{{\"cephx_secret\": \"{key}\"}}");
    run_with(folder, &["ceph", "osd", "new", &uuid, &number, "-i", "-"], Some(&secret))?;
    let (keyring, name) = (format!("osd/{number}/keyring"), format!("osd.{number}"));
    run(folder, &["ceph-authtool", "--create-keyring", &keyring, "--name", &name, "--add-key", key])?;
    run(folder, &["ceph-osd", "-i", &number, "--mkfs", "--osd-uuid", &uuid])?;
    run(folder, &["ceph-osd", "-i", &number])?;
    Ok(())
}

/// Stops a cluster and removes its folder. A folder without a cluster is not touched.
fn down(folder: &Path) -> io::Result<()> {
    if !folder.join("ceph.conf").exists() {
        return Ok(());
    }
    let mut pids = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "pid") {
            let text = fs::read_to_string(&path)?;
            pids.extend(text.trim().parse::<u32>().ok().filter(|pid| is_ceph(*pid)));
        }
    }
    for signal in ["-TERM", "-KILL"] {
        pids.retain(|pid| is_ceph(*pid));
        for pid in &pids {
            let _ = Command::new("kill").args([signal, &pid.to_string()]).stderr(Stdio::null()).status();
        }
        let until = Instant::now() + Duration::from_secs(10);
        while pids.iter().any(|pid| is_ceph(*pid)) && Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
        }
    }
    fs::remove_dir_all(folder)
}

/// Whether the process is a daemon of Ceph: its number may have been reused by now.
fn is_ceph(pid: u32) -> bool {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    name.starts_with("ceph-") && !state.contains(") Z ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_stays_in_its_folder_and_on_loopback() {
        let text = configuration(Path::new("/tmp/cluster"), "id", "[v2:127.0.0.1:1/0]", 2);
        let paths = text.lines().filter_map(|line| line.split_once(" = /"));
        let outside: Vec<_> = paths.filter(|(_, path)| !path.starts_with("tmp/cluster/")).collect();
        assert_eq!(outside, []);
        assert!(text.contains("\npublic addr = 127.0.0.1\n") && text.contains("osd pool default size = 2"));
        assert!(configuration(Path::new("/c"), "id", "a", 1).contains("osd pool default size = 1"));
    }

    #[test]
    fn a_folder_without_a_cluster_is_left_alone() {
        let folder = std::env::temp_dir().join(format!("no-cluster-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        down(&folder).unwrap();
        assert!(folder.exists());
        fs::remove_dir(&folder).unwrap();
    }
}
