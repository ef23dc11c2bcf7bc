//! Statistics of the real binary compared with iostat's, and metrics parsed like a scraper.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, noise, signal};
use blockyard_tests::tools::{PATIENCE, command, missing, run, wait_within};
use proto::nbd::CommandFlags;
use rustix::process::Signal;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::process::{Child, Stdio};

fn served(sandbox: &Sandbox) -> blockyard_tests::server::Server {
    let server =
        sandbox.serve("ram:64M", &["--name", "disk", "--limits", "max_sectors=64,physical_block_size=512"]);
    let mut peer = Peer::connect(&server.socket(), "disk");
    for n in 0..50 {
        peer.write(n << 16, &noise(n, 1 << 16), CommandFlags::default()).expect("written");
        peer.read(n << 16, 4096).expect("read");
    }
    server
}

#[test]
fn columns_and_keys_are_iostats() {
    if missing(&["iostat"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let _server = served(&sandbox);
    for option in ["-x", "-d"] {
        let theirs = run(&mut command(&["iostat", "-d", option])).ok();
        let header = |text: &str| text.lines().find(|line| line.starts_with("Device")).map(str::to_owned);
        let ours =
            if option == "-x" { sandbox.run(&["stat", "-x"]).ok() } else { sandbox.run(&["stat"]).ok() };
        assert_eq!(header(&ours), header(&theirs));
    }
    let document = |text: &str| serde_json::from_str::<Value>(text).expect("it is JSON");
    let theirs = document(&run(&mut command(&["iostat", "-d", "-x", "-t", "-o", "JSON"])).ok());
    let ours = document(&sandbox.run(&["stat", "-x", "-t", "-o", "JSON", "1", "2"]).ok());
    let reports = |document: &Value| document["sysstat"]["hosts"][0]["statistics"].clone();
    let keys = |report: &Value| -> Option<Vec<String>> {
        let mut keys: Vec<String> = report["disk"][0].as_object()?.keys().cloned().collect();
        keys.sort();
        Some(keys)
    };
    assert_eq!(reports(&ours).as_array().map(Vec::len), Some(2));
    let names = |of: &Value| -> Vec<String> {
        let mut names: Vec<String> = of.as_object().expect("an object").keys().cloned().collect();
        names.sort();
        names
    };
    let host = |document: &Value| document["sysstat"]["hosts"][0].clone();
    assert_eq!(names(&host(&ours)), names(&host(&theirs)));
    assert_eq!(names(&reports(&ours)[0]), names(&reports(&theirs)[0]));
    // A machine without disks has none to compare with.
    if let Some(theirs) = keys(&reports(&theirs)[0]) {
        assert_eq!(keys(&reports(&ours)[0]), Some(theirs));
    }
}

#[test]
fn queues_and_layers_have_separate_statistics() {
    let sandbox = Sandbox::default();
    let _server = served(&sandbox);
    let reported: Value =
        serde_json::from_str(&sandbox.run(&["stat", "-q", "-l", "--json"]).ok()).expect("JSON");
    let names: Vec<&str> =
        reported["disk"].as_array().unwrap().iter().filter_map(|d| d["disk_device"].as_str()).collect();
    assert_eq!(names[..2], ["disk", "disk.0"]);
    let layers = reported["layer"].as_array().unwrap();
    let ios = |at: usize| layers[at]["io/s"].as_f64().unwrap();
    assert_eq!((layers[0]["layer"].as_str(), layers[1]["layer"].as_str()), (Some("split"), Some("ram")));
    // Each write of 64 KiB is two children below the split, each read one.
    assert!((ios(1) / ios(0) - 1.5).abs() < 0.01, "{reported}");
    let paths = sandbox.run(&["stat", "-p"]).ok();
    assert!(paths.contains("disk/1") && !paths.contains("disk/0"), "{paths}");
}

/// An exposition, parsed by a strict scraper's rules.
struct Exposition {
    /// By family.
    types: HashMap<String, String>,
    /// By name and labels.
    samples: BTreeMap<String, f64>,
}

impl Exposition {
    /// Requests the metrics of the process with that device.
    fn scrape(sandbox: &Sandbox, device: &str) -> Exposition {
        let socket = sandbox.run_dir().join(format!("{device}.control"));
        let mut curl = command(&["curl", "-sf", "--unix-socket"]);
        curl.arg(socket).args(["-H", "Accept: application/openmetrics-text", "http://localhost/metrics"]);
        Exposition::parse(&run(&mut curl).ok())
    }

    /// Checks OpenMetrics' rules: a help and a type of each family, once, before its samples, which are
    /// consecutive; names with the suffix of their type; no duplicate sample; histograms with buckets that
    /// increase in bound and in count up to `+Inf`, which is their count; an end.
    fn parse(text: &str) -> Exposition {
        let mut types = HashMap::new();
        let mut helps = std::collections::HashSet::new();
        let mut samples = BTreeMap::new();
        let mut family = String::new();
        let mut last_bucket: Option<(String, f64, f64)> = None;
        for line in text.lines() {
            let comment = |word: &str| line.strip_prefix(word).and_then(|rest| rest.split_once(' '));
            if let Some((name, help)) = comment("# HELP ") {
                assert!(helps.insert(name.to_owned()) && !help.is_empty(), "{line}: twice, or empty");
                continue;
            }
            if let Some((name, kind)) = comment("# TYPE ") {
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
                family = name.to_owned();
                continue;
            }
            if line.starts_with('#') {
                assert_eq!(line, "# EOF");
                continue;
            }
            let (sample, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            let name = sample.split('{').next().unwrap_or_default();
            let end = name.strip_prefix(family.as_str()).unwrap_or_else(|| panic!("{line}: within {family}"));
            match (types[&family].as_str(), end) {
                ("counter", "_total") | ("histogram", "_bucket" | "_sum" | "_count") | ("gauge", "") => {}
                other => panic!("{line}: {other:?}"),
            }
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
            assert!(value >= 0.0 && value.is_finite(), "{line}");
            assert!(samples.insert(sample.to_owned(), value).is_none(), "{line} twice");
            if end == "_bucket" {
                let (bound, labels) =
                    sample.split_once("le=\"").and_then(|(_, rest)| rest.split_once('"')).expect(line);
                let bound: f64 = bound.replace("+Inf", "inf").parse().expect(line);
                if let Some((of, below, count)) = &last_bucket
                    && of == labels
                {
                    assert!(bound > *below && value >= *count, "{line}: after {below}: {count}");
                }
                last_bucket = Some((labels.to_owned(), bound, value));
            }
        }
        for (sample, count) in samples.iter().filter(|(sample, _)| sample.contains("_count{")) {
            let last = sample.replacen("_count{", "_bucket{le=\"+Inf\",", 1);
            assert_eq!(samples.get(&last), Some(count), "{last}: all that were counted");
        }
        assert_eq!(text.lines().last(), Some("# EOF"));
        assert!(types.keys().all(|name| helps.contains(name)));
        Exposition { types, samples }
    }

    #[track_caller]
    fn of(&self, sample: &str) -> f64 {
        *self.samples.get(sample).unwrap_or_else(|| panic!("{sample}\n{:#?}", self.samples))
    }

    /// Checks that no counter has decreased or disappeared.
    #[track_caller]
    fn has_grown_from(&self, before: &Exposition) {
        let gauge = |sample: &str| {
            let name = sample.split('{').next().unwrap_or_default();
            self.types.get(name).is_some_and(|kind| kind == "gauge")
        };
        for (sample, value) in before.samples.iter().filter(|(sample, _)| !gauge(sample)) {
            assert!(self.of(sample) >= *value, "{sample} went down from {value} to {}", self.of(sample));
        }
    }
}

#[test]
fn metrics_are_an_openmetrics_exposition() {
    let sandbox = Sandbox::default();
    let _server = served(&sandbox);
    if missing(&["curl"]) {
        return;
    }
    let scraped = Exposition::scrape(&sandbox, "disk");
    for (name, read_size) in [("size_bytes", 4096.0 * 50.0), ("duration_seconds", -1.0)] {
        let labels = "device=\"disk\",op=\"read\"";
        let count = scraped.of(&format!("blockyard_request_{name}_count{{{labels}}}"));
        let last = scraped.of(&format!("blockyard_request_{name}_bucket{{le=\"+Inf\",{labels}}}"));
        assert_eq!((count, last), (50.0, 50.0));
        let sum = scraped.of(&format!("blockyard_request_{name}_sum{{{labels}}}"));
        assert!(read_size < 0.0 || sum == read_size, "{name}: {sum}");
    }
    let sized = |le: &str| {
        scraped.of(&format!("blockyard_request_size_bytes_bucket{{le=\"{le}\",device=\"disk\",op=\"read\"}}"))
    };
    assert_eq!((sized("2048.0"), sized("4096.0")), (0.0, 50.0));
    assert_eq!(scraped.of("node_disk_reads_completed_total{device=\"disk\"}"), 50.0);
    assert_eq!(scraped.of("node_disk_written_bytes_total{device=\"disk\"}"), 50.0 * 65536.0);
}

/// A scraper takes a decreased counter for a restart, and counts all of it again.
#[test]
fn counters_never_decrease_through_changes_of_a_device() {
    if missing(&["curl"]) {
        return;
    }
    let sandbox = Sandbox::default();
    sandbox.image("disk.img", 16 << 20);
    let server = sandbox.serve("file:disk.img", &["--name", "disk"]);
    let use_it = |server: &blockyard_tests::server::Server| {
        let mut peer = Peer::connect(&server.socket(), "disk");
        for n in 0..20 {
            peer.write(n << 12, &[7; 4096], CommandFlags::default()).expect("written");
            peer.read(n << 12, 4096).expect("read");
        }
        peer.disconnect();
    };
    use_it(&server);
    let mut before = Exposition::scrape(&sandbox, "disk");
    for words in [
        &["set", "disk", "direct=off"][..],
        &["suspend", "disk"],
        &["resume", "disk"],
        &["resize", "disk", "32M"],
    ] {
        sandbox.run(words).ok();
        let after = Exposition::scrape(&sandbox, "disk");
        after.has_grown_from(&before);
        if words[0] != "suspend" {
            use_it(&server);
        }
        before = after;
    }
    let reads = "node_disk_reads_completed_total{device=\"disk\"}";
    let all = Exposition::scrape(&sandbox, "disk");
    assert_eq!(all.of(reads), 80.0, "of clients that are gone, too");

    let table = sandbox.text("next.table", "0 2048 zero");
    let line = "0 2048 linear ram:1M 0";
    let _swapped = blockyard_tests::remote::table_as(&sandbox, "t", line, &[]);
    let before = Exposition::scrape(&sandbox, "t");
    sandbox.run(&["table", "t", "--load", &table.to_string_lossy()]).ok();
    sandbox.run(&["resume", "t"]).ok();
    let after = Exposition::scrape(&sandbox, "t");
    let whole = |e: &Exposition| e.of("node_disk_reads_completed_total{device=\"t\"}");
    assert!(whole(&after) >= whole(&before));
}

/// iostat closes its document when it is interrupted; so does `stat`, also when its device is removed.
#[test]
fn an_interrupted_json_document_is_closed() {
    let sandbox = Sandbox::default();
    let mut server = sandbox.serve("ram:1M", &["--name", "disk"]);
    let start = |interval: &str| {
        let mut command = sandbox.blockyard(&["stat", "-o", "JSON", "disk", interval]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary runs")
    };
    let reports = |mut child: Child, end: &mut dyn FnMut(u32)| {
        let mut stdout = child.stdout.take().expect("it is piped");
        let mut text = vec![0; 200];
        // Waits for the beginning of the document.
        let count = stdout.read(&mut text).expect("it writes");
        text.truncate(count);
        end(child.id());
        stdout.read_to_end(&mut text).expect("it ends");
        let status = wait_within(&mut child, PATIENCE).expect("it ends");
        let document: Value = serde_json::from_slice(&text)
            .unwrap_or_else(|why| panic!("{why}: {}", String::from_utf8_lossy(&text)));
        let reports = document["sysstat"]["hosts"][0]["statistics"].as_array().map(Vec::len);
        (status.code(), reports.is_some_and(|reports| reports >= 1))
    };
    for which in [Signal::INT, Signal::TERM] {
        assert_eq!(reports(start("100"), &mut |pid| signal(pid, which)), (Some(0), true));
    }
    assert_eq!(reports(start("1"), &mut |_| server.terminate()), (Some(1), true));
}
