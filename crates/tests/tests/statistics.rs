//! Statistics of the real binary beside iostat's, and metrics as a scraper reads them.

use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, noise};
use blockyard_tests::tools::{command, missing, run};
use proto::nbd::CommandFlags;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

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
    let theirs = document(&run(&mut command(&["iostat", "-d", "-x", "-o", "JSON"])).ok());
    let ours = document(&sandbox.run(&["stat", "-x", "-o", "JSON", "1", "2"]).ok());
    let reports = |document: &Value| document["sysstat"]["hosts"][0]["statistics"].clone();
    let keys = |report: &Value| -> Option<Vec<String>> {
        let mut keys: Vec<String> = report["disk"][0].as_object()?.keys().cloned().collect();
        keys.sort();
        Some(keys)
    };
    assert_eq!(reports(&ours).as_array().map(Vec::len), Some(2));
    // A machine without disks has none to compare with.
    if let Some(theirs) = keys(&reports(&theirs)[0]) {
        assert_eq!(keys(&reports(&ours)[0]), Some(theirs));
    }
}

#[test]
fn queues_and_layers_are_told_apart() {
    let sandbox = Sandbox::default();
    let _server = served(&sandbox);
    let told: Value = serde_json::from_str(&sandbox.run(&["stat", "-q", "-l", "--json"]).ok()).expect("JSON");
    let names: Vec<&str> =
        told["disk"].as_array().unwrap().iter().filter_map(|d| d["disk_device"].as_str()).collect();
    assert_eq!(names[..2], ["disk", "disk.0"]);
    let layers = told["layer"].as_array().unwrap();
    let ios = |at: usize| layers[at]["io/s"].as_f64().unwrap();
    assert_eq!((layers[0]["layer"].as_str(), layers[1]["layer"].as_str()), (Some("split"), Some("ram")));
    // Each write of 64 KiB is two pieces below the split, each read one.
    assert!((ios(1) / ios(0) - 1.5).abs() < 0.01, "{told}");
    let paths = sandbox.run(&["stat", "-p"]).ok();
    assert!(paths.contains("disk/1") && !paths.contains("disk/0"), "{paths}");
}

/// What a scraper holds an exposition to: types before samples, names that end as their types say, histograms that
/// only grow and whose last bucket is their count, no sample twice, an end.
#[test]
fn metrics_are_an_openmetrics_exposition() {
    let sandbox = Sandbox::default();
    let _server = served(&sandbox);
    if missing(&["curl"]) {
        return;
    }
    let socket = sandbox.run_dir().join("disk.control");
    let text =
        run(command(&["curl", "-s", "--unix-socket"]).arg(socket).arg("http://localhost/metrics")).ok();
    let mut types = HashMap::new();
    let mut samples = BTreeMap::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a name and a type");
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
        } else if !line.starts_with('#') {
            let (sample, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
            let name = sample.split('{').next().unwrap_or_default();
            let family = ["_total", "_bucket", "_sum", "_count"].iter().find_map(|end| {
                let base = name.strip_suffix(end)?;
                types.get(base).map(|kind| (base, *end, kind.as_str()))
            });
            match family {
                Some((_, "_total", "counter")) | Some((_, "_bucket" | "_sum" | "_count", "histogram")) => {}
                None => assert_eq!(types.get(name).map(String::as_str), Some("gauge"), "{line}"),
                other => panic!("{line}: {other:?}"),
            }
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
            assert!(samples.insert(sample.to_owned(), value).is_none(), "{line} twice");
        }
    }
    assert_eq!(text.lines().last(), Some("# EOF"));
    let of = |sample: &str| *samples.get(sample).unwrap_or_else(|| panic!("{sample}\n{text}"));
    for (name, read_size) in [("size_bytes", 4096.0 * 50.0), ("duration_seconds", -1.0)] {
        let labels = "device=\"disk\",op=\"read\"";
        let count = of(&format!("blockyard_request_{name}_count{{{labels}}}"));
        let last = of(&format!("blockyard_request_{name}_bucket{{le=\"+Inf\",{labels}}}"));
        assert_eq!((count, last), (50.0, 50.0));
        let sum = of(&format!("blockyard_request_{name}_sum{{{labels}}}"));
        assert!(read_size < 0.0 || sum == read_size, "{name}: {sum}");
    }
    assert_eq!(of("blockyard_request_size_bytes_bucket{le=\"2048.0\",device=\"disk\",op=\"read\"}"), 0.0);
    assert_eq!(of("blockyard_request_size_bytes_bucket{le=\"4096.0\",device=\"disk\",op=\"read\"}"), 50.0);
    assert_eq!(of("node_disk_reads_completed_total{device=\"disk\"}"), 50.0);
    assert_eq!(of("node_disk_written_bytes_total{device=\"disk\"}"), 50.0 * 65536.0);
}
