//! iscsi-test-cu 1.20 of libiscsi against our target: every suite of every family, each as a process of its
//! own, with data loss and sanitize allowed, on three stores.
//!
//! No test may fail, and each skipped one is in [`SKIPS`] with its reason; `docs/iscsi-conformance.md`
//! explains them. Suites that need another device than a plain disk get one of their own ([`Kind`]). The
//! stores run at once, each with several lanes, because many suites sleep most of their time. `./x
//! conformance` fetches the program and shows the table.

use blockyard_tests::iscsi::conformance::{Skip, Suite, faults, joined, program, run, suites, table, tests};
use blockyard_tests::iscsi::{Target, chap_file, free_port, lacks_export};
use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::tools::skip;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// The families of libiscsi. `ALL` has all tests but one, which is in `SCSI`.
const FAMILIES: [&str; 4] = ["ALL", "SCSI", "iSCSI", "LINUX"];

/// Size of the devices: more than the largest EXTENDED COPY, and small enough for SANITIZE OVERWRITE.
const SIZE: &str = "64M";
const LEN: u64 = 64 << 20;

/// Suites that run at once on a store, on devices of their own.
const LANES: usize = 3;

/// Suites whose tests run one by one. `Sanitize`: one of them needs a slow device. `iSCSITMF`: the first one
/// closes the session, and the others then skip themselves.
const ONE_BY_ONE: [&str; 2] = ["Sanitize", "iSCSITMF"];

/// A test that sleeps for a minute if SANITIZE still runs after a few seconds, as it must here: it runs in a
/// lane of its own.
const SLEEPER: &str = "Sanitize.Reset";

const ATOMIC: &str = "memory, the page cache and overlays cannot promise that a write survives a power loss \
                      as a whole or not at all";
const CRYPTO: &str =
    "no backend encrypts, so that CRYPTO ERASE has no key to change; the rest of the test runs";
const ZERO_BLOCKS: &str =
    "WRITE SAME of 0 blocks is refused (WSNZ), as by LIO; the test checks that before it skips itself";

const fn skipped(test: &'static str, reason: &'static str) -> Skip {
    Skip { test, stores: &[], reason }
}

/// Tests that skip themselves, and why they cannot run. A test that is listed and runs is a failure as well.
const SKIPS: &[Skip] = &[
    skipped(
        "CompareAndWrite.InvalidDataOutSize",
        "with several logical blocks per physical block it runs, but changes no SCSI command (a `!=` that should be \
         `==`), and expects an error of a valid one",
    ),
    skipped("ExtendedCopy.Large", "segments of type 0Ah (block to block with offset) are not supported"),
    skipped("Sanitize.CryptoErase", CRYPTO),
    skipped("Sanitize.Readonly", CRYPTO),
    skipped("Sanitize.Reservations", CRYPTO),
    skipped("WriteAtomic16.Simple", ATOMIC),
    skipped("WriteAtomic16.BeyondEol", ATOMIC),
    skipped("WriteAtomic16.ZeroBlocks", ATOMIC),
    skipped("WriteAtomic16.WriteProtect", ATOMIC),
    skipped("WriteAtomic16.DpoFua", ATOMIC),
    skipped("WriteAtomic16.VPD", ATOMIC),
    skipped("WriteSame10.ZeroBlocks", ZERO_BLOCKS),
    skipped("WriteSame16.ZeroBlocks", ZERO_BLOCKS),
];

/// A device that some suites need. All are of the same store.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A disk with physical blocks of 512 bytes at two portals.
    Disk,
    /// Initiators may only read.
    ReadOnly,
    /// Initiators authenticate with CHAP.
    Secret,
    /// Its medium can be ejected.
    Removable,
    /// Physical blocks of eight logical ones.
    Physical,
    /// Without WRITE SAME(32), whose description libiscsi misreads: it keeps 16 bytes of the usage data only,
    /// and then compares memory that it did not fill.
    ShortCdbs,
    /// OVERWRITE takes half a minute.
    Slow,
}

impl Kind {
    /// The kinds of devices in a lane.
    const ALL: [Kind; 6] =
        [Kind::Disk, Kind::ReadOnly, Kind::Secret, Kind::Removable, Kind::Physical, Kind::ShortCdbs];

    /// The device for a suite or test, named `FAMILY.SUITE` or `FAMILY.SUITE.TEST`.
    fn of(name: &str) -> Kind {
        match name.split_once('.').map_or("", |(_, name)| name) {
            SLEEPER => Kind::Slow,
            name => match name.split('.').next().unwrap_or_default() {
                "ReadOnly" => Kind::ReadOnly,
                "iSCSICHAP" => Kind::Secret,
                "NoMedia" | "PreventAllow" | "StartStopUnit" => Kind::Removable,
                "WriteSame10" | "WriteSame16" => Kind::Physical,
                "ReportSupportedOpcodes" => Kind::ShortCdbs,
                _ => Kind::Disk,
            },
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Disk => "disk",
            Kind::ReadOnly => "read-only",
            Kind::Secret => "secret",
            Kind::Removable => "removable",
            Kind::Physical => "physical",
            Kind::ShortCdbs => "short-cdbs",
            Kind::Slow => "slow",
        }
    }
}

/// The backend of the devices.
#[derive(Clone, Copy, Debug)]
enum Store {
    File,
    Ram,
    /// An overlay over a file.
    Thin,
}

impl Store {
    const ALL: [Store; 3] = [Store::File, Store::Ram, Store::Thin];

    fn name(self) -> &'static str {
        match self {
            Store::File => "fileio",
            Store::Ram => "ramdisk",
            Store::Thin => "thin",
        }
    }

    /// The lines of a device of a topology.
    fn device(self, sandbox: &Sandbox, kind: Kind) -> String {
        let name = kind.name();
        let stack = match self {
            Store::Ram => format!("ram:{SIZE}"),
            _ => format!("file:{}", sandbox.image(&format!("{name}.img"), LEN).display()),
        };
        let mut layers = Vec::new();
        if matches!(self, Store::Thin) {
            layers.push(format!("cow,file={},create", sandbox.path(&format!("{name}.cow")).display()));
        }
        if kind == Kind::Slow {
            layers.push("throttle,bps_write=2M".to_owned());
        }
        // The physical blocks of memory are its pages, unless something else is given.
        let physical = if kind == Kind::Physical { 4096 } else { 512 };
        format!(
            "[device.{name}]\nstack = \"{stack}\"\nlayers = {layers:?}\nlimits = \"physical_block_size={physical}\"\n"
        )
    }
}

/// The devices of one lane of a store, served by one process, or the target that the environment names.
struct Lane {
    /// The server is dropped before its sandbox, which kills processes that still run.
    _served: Option<(Server, Sandbox)>,
    /// The URLs of each kind; the first ones are for all others.
    urls: Vec<(Kind, Vec<String>)>,
}

impl Lane {
    fn new(store: Store, kinds: &[Kind]) -> Lane {
        let sandbox = Sandbox::new(Engine::Auto);
        let (user, password) = ("one", "0123456789abcdef");
        let port = free_port();
        let mut topology = String::new();
        let mut exports = Vec::new();
        for kind in kinds {
            topology += &store.device(&sandbox, *kind);
            let options = match kind {
                Kind::ReadOnly => ",ro".to_owned(),
                Kind::Secret => format!(",chap={}", chap_file(&sandbox, user, password)),
                Kind::Removable => ",removable".to_owned(),
                Kind::ShortCdbs => ",cdb-max=16".to_owned(),
                _ => String::new(),
            };
            exports.push((*kind, port, options));
        }
        exports.push((kinds[0], free_port(), String::new()));
        for (kind, port, options) in &exports {
            let device = kind.name();
            let export = format!("tcp:127.0.0.1:{port}{options}");
            let _ = write!(topology, "[[export]]\ndevice = \"{device}\"\niscsi = \"{export}\"\n");
        }
        let server = sandbox.up(&topology, exports.len());
        let mut urls: Vec<(Kind, Vec<String>)> = Vec::new();
        for (number, (kind, ..)) in exports.iter().enumerate() {
            let url = match kind {
                Kind::Secret => server.uri_of(number).replacen("://", &format!("://{user}%{password}@"), 1),
                _ => server.uri_of(number).to_owned(),
            };
            match urls.iter_mut().find(|(known, _)| known == kind) {
                Some((_, known)) => known.push(url),
                None => urls.push((*kind, vec![url])),
            }
        }
        Lane { _served: Some((server, sandbox)), urls }
    }

    fn foreign(url: &str) -> Lane {
        Lane { _served: None, urls: vec![(Kind::Disk, vec![url.to_owned(), url.to_owned()])] }
    }

    /// Runs a suite or test on the device that it needs.
    fn run(&self, program: &Path, name: &str) -> Result<Suite, String> {
        let kind = Kind::of(name);
        let (_, urls) = self.urls.iter().find(|(known, _)| *known == kind).unwrap_or(&self.urls[0]);
        let paths = if name.contains(".MultipathIO") { 2 } else { 1 };
        let urls: Vec<&str> = urls.iter().take(paths).map(String::as_str).collect();
        run(program, name, &urls)
    }
}

/// The suites and tests to run.
struct Plan {
    program: PathBuf,
    /// Suites, and tests that run one by one.
    jobs: Vec<String>,
    /// Whether these are all.
    is_whole: bool,
}

impl Plan {
    /// The plan that the environment asks for, or `None` if the test is skipped.
    fn new() -> Option<Plan> {
        let Some(program) = program() else {
            assert!(std::env::var_os("CI").is_none(), "no iscsi-test-cu: ./x test fetches it");
            skip("no iscsi-test-cu (./x conformance fetches it)");
            return None;
        };
        let words = std::env::var("BLOCKYARD_ISCSI_SUITES").unwrap_or_default();
        let words: Vec<&str> = words.split_whitespace().collect();
        let is_whole = words.is_empty();
        let mut jobs = Vec::new();
        for suite in suites(&program, if is_whole { &FAMILIES[..] } else { &words }) {
            let is_split = suite.split_once('.').is_some_and(|(_, name)| ONE_BY_ONE.contains(&name));
            jobs.extend(if is_split { tests(&program, &suite) } else { vec![suite] });
        }
        Some(Plan { program, jobs, is_whole })
    }

    /// Runs the jobs in these lanes, and each job that sleeps in a lane of its own.
    fn run(&self, store: &str, lanes: usize, lane: impl Fn(&[Kind]) -> Lane + Sync) -> Report {
        let done = Mutex::new((Vec::new(), Vec::new()));
        let carry_out = |lane: &Lane, job: &str| {
            let result = lane.run(&self.program, job);
            let (results, broken) = &mut *done.lock().expect("no lane panicked");
            match result {
                Ok(result) => results.push(result),
                Err(why) => broken.push(format!("{store}: {job}: {why}")),
            }
        };
        let (sleepers, others): (Vec<&String>, Vec<&String>) =
            self.jobs.iter().partition(|job| Kind::of(job) == Kind::Slow);
        // The last one is taken first.
        let queue = Mutex::new(others.into_iter().rev().collect::<Vec<_>>());
        let next = || queue.lock().expect("no lane panicked").pop();
        std::thread::scope(|scope| {
            for job in sleepers {
                let (lane, carry_out) = (&lane, &carry_out);
                scope.spawn(move || carry_out(&lane(&[Kind::Slow]), job));
            }
            for _ in 0..lanes {
                scope.spawn(|| {
                    let lane = lane(&Kind::ALL);
                    while let Some(job) = next() {
                        carry_out(&lane, job);
                    }
                });
            }
        });
        let (results, broken) = done.into_inner().expect("no lane panicked");
        let results = joined(results);
        let table = table(store, &results, &FAMILIES);
        Report { table, faults: [faults(store, &results, SKIPS, self.is_whole), broken].concat() }
    }
}

/// Results of a store.
struct Report {
    table: String,
    faults: Vec<String>,
}

impl Report {
    #[track_caller]
    fn assert(&self) {
        print!("{}", self.table);
        assert!(self.faults.is_empty(), "{} faults:\n{}", self.faults.len(), self.faults.join("\n"));
    }
}

/// Checks a store. The first test that calls this runs all of them, at once: they sleep most of the time.
#[track_caller]
fn conforms(store: Store) {
    static REPORTS: OnceLock<Vec<Report>> = OnceLock::new();
    if Target::foreign().is_some() {
        return skip("a_foreign_target_conforms runs instead");
    }
    if lacks_export() {
        return;
    }
    let Some(plan) = Plan::new() else { return };
    let reports = REPORTS.get_or_init(|| {
        std::thread::scope(|scope| {
            let plan = &plan;
            let start = |store: Store| {
                scope.spawn(move || plan.run(store.name(), LANES, |kinds| Lane::new(store, kinds)))
            };
            let running = Store::ALL.map(start);
            running.into_iter().map(|store| store.join().expect("the store ran")).collect()
        })
    });
    reports[store as usize].assert();
}

#[test]
fn a_file_conforms() {
    conforms(Store::File);
}

#[test]
fn memory_conforms() {
    conforms(Store::Ram);
}

#[test]
fn an_overlay_conforms() {
    conforms(Store::Thin);
}

/// For comparison with other targets: `./x conformance --url URL`.
#[test]
fn a_foreign_target_conforms() {
    let Some(target) = Target::foreign() else { return };
    let Some(plan) = Plan::new() else { return };
    plan.run("foreign", 1, |_| Lane::foreign(&target.url)).assert();
}
