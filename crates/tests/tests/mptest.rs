//! The scenarios of mptest, by its names, on our devices: its load writes at random and verifies its data,
//! while paths fail and recover, by themselves and by messages.
//!
//! Each takes two seconds; `BLOCKYARD_SOAK_SECONDS` sets a longer time, as in `./x soak multipath`. mptest
//! removes paths every second for half a minute; here they fail more often, so that the short run has several
//! failures.

use blockyard_tests::remote::{serve_as, table_as};
use blockyard_tests::server::{Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, command, missing, until, wait_within};
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_millis(250);
const IMAGE: u64 = 64 << 20;
/// Least number of events on the paths, also on a slow machine.
const CALLS_MIN: usize = 2;

fn seconds() -> u64 {
    std::env::var("BLOCKYARD_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}

fn tell(sandbox: &Sandbox, words: &str) {
    let mut all = vec!["message", "m", "0"];
    all.extend(words.split(' '));
    sandbox.run(&all).ok();
}

/// Two priority groups of two paths each, as in mptest; the paths are four connections to one server each, of
/// one file. Empty where fio is missing.
struct Bed {
    sandbox: Sandbox,
    backs: Vec<Server>,
    front: Option<Server>,
    uris: Vec<String>,
}

/// Returns a table with two groups of these paths, the first half of them in the first one.
fn line(queue_mode: &str, paths: Vec<&str>) -> String {
    let group = |paths: &[&str]| format!("queue-length 0 {} 1 {} 1", paths.len(), paths.join(" 1 "));
    let (first, second) = paths.split_at(paths.len() / 2);
    format!(
        "0 {} multipath 4 queue_if_no_path retain_attached_hw_handler queue_mode {queue_mode} 0 2 1 {} {}",
        IMAGE / 512,
        group(first),
        group(second)
    )
}

impl Bed {
    fn new(queue_mode: &str, multipath: &str) -> Bed {
        let sandbox = Sandbox::default();
        let image = sandbox.image("image", IMAGE).to_string_lossy().into_owned();
        let names = ["a", "b", "c", "d"];
        let backs: Vec<Server> =
            names.iter().map(|name| serve_as(&sandbox, name, &format!("file:{image},share"), &[])).collect();
        let uris: Vec<String> = names
            .iter()
            .map(|name| {
                format!("nbd:nbd+unix:///{name}?socket={}", sandbox.path(&format!("{name}.sock")).display())
            })
            .collect();
        let line = line(queue_mode, uris.iter().map(String::as_str).collect());
        let front = table_as(&sandbox, "m", &line, &["--queues", "2", "--multipath", multipath]);
        Bed { sandbox, backs, front: Some(front), uris }
    }

    /// Runs mptest's fio job and calls `during` repeatedly, with the number of the call, until the time is up
    /// and the least number of calls is reached. Returns the number of calls.
    fn under_load(&mut self, mut during: impl FnMut(&mut Bed, usize)) -> usize {
        let seconds = seconds();
        let uri = self.front.as_ref().expect("it is up").uri().to_owned();
        let mut fio = command(&["fio"]);
        fio.args([
            "--name=mptest",
            "--ioengine=nbd",
            "--bs=512k",
            "--rw=randwrite",
            "--iodepth=2",
            "--time_based",
        ]);
        fio.args(["--size=64M", "--do_verify=1", "--verify=meta", "--verify_dump=1", "--verify_fatal=1"]);
        fio.args([&format!("--uri={uri}"), &format!("--runtime={seconds}")]);
        fio.args(["--output=/dev/null", "--verify_state_save=0"]).current_dir("/tmp");
        let mut load = fio.spawn().expect("fio starts");
        let start = Instant::now();
        let (end, bound) = (start + Duration::from_secs(seconds), start + PATIENCE);
        let mut calls = 0;
        while Instant::now() < end || calls < CALLS_MIN && Instant::now() < bound {
            std::thread::sleep(PERIOD);
            during(self, calls);
            calls += 1;
        }
        let ended = wait_within(&mut load, PATIENCE).expect("fio ends");
        let log = self.front.as_ref().expect("it is up").log();
        assert!(ended.success(), "{ended} after {calls} times: {log}");
        calls
    }

    fn status(&self) -> String {
        self.sandbox.run(&["status", "m"]).ok()
    }

    /// Replaces the table.
    fn swap(&self, line: &str, noflush: bool) {
        let table = self.sandbox.text("next.table", line);
        self.sandbox.run(&["table", "m", "--load", &table.to_string_lossy()]).ok();
        if noflush {
            self.sandbox.run(&["suspend", "m", "--noflush"]).ok();
        }
        self.sandbox.run(&["resume", "m"]).ok();
    }

    /// Ends the device like each of mptest's tests: an error table, without a flush, then removal.
    fn tear_down(mut self) {
        self.swap(&format!("0 {} error", IMAGE / 512), true);
        self.sandbox.run(&["del", "m"]).ok();
        drop(self.front.take());
        drop(self.backs);
    }
}

#[test]
fn test_00_no_failure() {
    if missing(&["fio"]) {
        return;
    }
    for queue_mode in ["mq", "bio"] {
        let mut bed = Bed::new(queue_mode, "checker=off");
        bed.under_load(|_, _| {});
        assert!(!bed.status().contains(" F "), "{}", bed.status());
        bed.tear_down();
    }
}

/// Paths become unreachable, one after the other, and return: servers that are stopped for good, and new ones
/// in their place.
#[test]
fn test_01_sdev_offline() {
    if missing(&["fio"]) {
        return;
    }
    let mut bed = Bed::new("mq", "checker=50ms,checker_max=200ms");
    let image = bed.sandbox.path("image").to_string_lossy().into_owned();
    let kills = bed.under_load(|bed, call| {
        let which = call % bed.backs.len();
        let name = ["a", "b", "c", "d"][which];
        bed.backs[which].kill();
        std::thread::sleep(Duration::from_millis(50));
        bed.backs[which] = serve_as(&bed.sandbox, name, &format!("file:{image},share"), &[]);
    });
    assert!(kills >= 2, "{kills}");
    let all = until(PATIENCE, || (!bed.status().contains(" F ")).then_some(()));
    assert!(all.is_some(), "a path did not come back: {}", bed.status());
    bed.tear_down();
}

/// Paths are deleted for good and others are added: a server ends with its socket, the next table omits it,
/// and the table after that has a server at another address, as multipathd reloads tables when a disk is
/// removed and added.
#[test]
fn test_02_sdev_delete() {
    if missing(&["fio"]) {
        return;
    }
    let mut bed = Bed::new("mq", "checker=50ms,checker_max=200ms");
    let image = bed.sandbox.path("image").to_string_lossy().into_owned();
    bed.under_load(|bed, call| {
        let which = call % bed.backs.len();
        bed.backs[which].terminate();
        let others = bed.uris.iter().enumerate().filter(|(number, _)| *number != which);
        bed.swap(&line("mq", others.map(|(_, uri)| uri.as_str()).collect()), true);
        let gone = bed.uris[which].clone();
        assert!(!bed.status().contains(&gone), "{gone}: {}", bed.status());
        let name = format!("path{call}");
        bed.backs[which] = serve_as(&bed.sandbox, &name, &format!("file:{image},share"), &[]);
        let socket = bed.sandbox.path(&format!("{name}.sock"));
        bed.uris[which] = format!("nbd:nbd+unix:///{name}?socket={}", socket.display());
        bed.swap(&line("mq", bed.uris.iter().map(String::as_str).collect()), true);
    });
    let works = |uri: &String| bed.status().contains(&format!("{uri} A "));
    let all = until(PATIENCE, || bed.uris.iter().all(works).then_some(()));
    assert!(all.is_some(), "not all paths work: {}", bed.status());
    bed.tear_down();
}

/// All paths of the device fail at once and are reinstated: requests sent meanwhile wait.
#[test]
fn test_03_dm_failpath() {
    if missing(&["fio"]) {
        return;
    }
    let mut bed = Bed::new("mq", "checker=off");
    bed.under_load(|bed, call| {
        for uri in bed.uris.clone() {
            let word = if call % 2 == 0 { "fail_path" } else { "reinstate_path" };
            tell(&bed.sandbox, &format!("{word} {uri}"));
        }
        if call % 2 == 0 {
            assert_eq!(bed.status().matches(" F ").count(), 4, "{}", bed.status());
            for uri in bed.uris.clone() {
                tell(&bed.sandbox, &format!("reinstate_path {uri}"));
            }
        }
    });
    bed.tear_down();
}

#[test]
fn test_04_dm_switchpg() {
    if missing(&["fio"]) {
        return;
    }
    let mut bed = Bed::new("bio", "checker=off");
    let switches = bed.under_load(|bed, call| {
        tell(&bed.sandbox, if call % 2 == 0 { "disable_group 1" } else { "enable_group 1" });
    });
    assert!(switches >= 2 && !bed.status().contains(" F "), "{switches}: {}", bed.status());
    tell(&bed.sandbox, "enable_group 1");
    bed.tear_down();
}

/// Loads the same table repeatedly under the load, and each of the paths alone.
#[test]
fn tables_are_swapped_under_load() {
    if missing(&["fio"]) {
        return;
    }
    let mut bed = Bed::new("mq", "checker=off");
    let swaps = bed.under_load(|bed, call| {
        let uri = &bed.uris[call % bed.uris.len()];
        let line =
            format!("0 {} multipath 1 queue_if_no_path 0 1 1 service-time 0 1 2 {uri} 1 1", IMAGE / 512);
        bed.swap(&line, call % 2 == 0);
        assert!(bed.status().contains(uri.as_str()), "{}", bed.status());
    });
    assert!(swaps >= 2, "{swaps}");
    bed.tear_down();
}
