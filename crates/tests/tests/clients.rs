//! Real clients against the real binary: nbdinfo, nbdcopy, qemu-img, qemu-io, fio, the kernel's client.
//!
//! Each result is checked by other means: a copy in is compared with the file behind the server, a copy out
//! with its source. The core set runs on both ring engines.

use blockyard_tests::on_both_engines;
use blockyard_tests::server::{Engine, Sandbox, Server};
use blockyard_tests::tools::{command, missing, missing_libnbd, run, run_within, skip};
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

const MIB: u64 = 1 << 20;

on_both_engines!(
    nbdcopy_copies_a_file_unchanged,
    nbdcopy_copies_memory_unchanged,
    nbdcopy_keeps_holes,
    qemu_io_reads_back_what_it_wrote,
    fio_verifies_a_file,
    fio_verifies_memory,
);

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|why| panic!("{why}: {text}"))
}

fn words(path: &Path) -> &str {
    path.to_str().expect("a sandbox has plain paths")
}

fn file_stack(path: &Path) -> String {
    format!("file:{}", path.display())
}

#[track_caller]
fn assert_same(one: &Path, other: &Path) {
    run(&mut command(&["cmp", words(one), words(other)])).ok();
}

#[test]
fn nbdinfo_shows_the_exports_properties() {
    if missing(&["nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:64M", &[]);
    let reported = json(&run(&mut command(&["nbdinfo", "--json", server.uri()])).ok());
    assert_eq!(reported["protocol"], "newstyle-fixed");
    assert_eq!(reported["TLS"], false);
    assert_eq!(reported["structured"], true);
    let export = &reported["exports"][0];
    assert_eq!(export["export-name"], "disk");
    assert_eq!(export["export-size"], 64 * MIB);
    assert_eq!(export["contexts"][0], "base:allocation");
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["is_rotational"], false);
    for can in ["cache", "df", "fast_zero", "flush", "fua", "multi_conn", "trim", "zero"] {
        assert_eq!(export[format!("can_{can}")], true, "can_{can}: {export}");
    }
    let minimum = export["block_size_minimum"].as_u64().unwrap_or_else(|| panic!("no block sizes: {export}"));
    assert!(minimum <= 512, "{export}");
    assert_eq!(export["block_size_maximum"], 32 * MIB, "{export}");
}

#[test]
fn nbdinfo_options_report_each_property() {
    if missing(&["nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:3M", &[]);
    let ask = |question: &[&str]| run(&mut command(&[&["nbdinfo"], question, &[server.uri()]].concat()));
    assert_eq!(ask(&["--size"]).ok().trim(), (3 * MIB).to_string());
    for can in ["multi-conn", "flush", "fua", "trim", "zero", "fast-zero", "cache", "df", "connect", "write"]
    {
        ask(&["--can", can]).ok();
    }
    ask(&["--is", "read-only"]).failed_with(2);
    let listed = json(&run(&mut command(&["nbdinfo", "--json", "--list", server.uri()])).ok());
    let names: Vec<_> = listed["exports"].as_array().into_iter().flatten().collect();
    assert_eq!(names.len(), 1, "{listed}");
    assert_eq!(names[0]["export-name"], "disk");
}

#[test]
fn nbdinfo_maps_holes_and_data() {
    if missing(&["nbdinfo"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.image("image", 4 * MIB);
    let data = blockyard_tests::server::noise(1, MIB as usize);
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&image).unwrap(),
        &data,
        MIB,
    )
    .unwrap();
    for stack in [file_stack(&image), "ram:4M".into()] {
        let server = sandbox.serve(&stack, &[]);
        if stack.starts_with("ram") {
            let mut peer = blockyard_tests::peer::Peer::connect(&server.socket(), "disk");
            peer.write(MIB, &data, proto::nbd::CommandFlags::empty()).unwrap();
        }
        let map = json(&run(&mut command(&["nbdinfo", "--map", "--json", server.uri()])).ok());
        let found: Vec<_> = map
            .as_array()
            .into_iter()
            .flatten()
            .map(|extent| {
                (
                    extent["offset"].as_u64().unwrap(),
                    extent["length"].as_u64().unwrap(),
                    extent["type"].clone(),
                )
            })
            .collect();
        let wanted =
            [(0, MIB, Value::from(3)), (MIB, MIB, Value::from(0)), (2 * MIB, 2 * MIB, Value::from(3))];
        assert_eq!(found, wanted, "{stack}");
    }
}

#[test]
fn nbdsh_runs_a_script() {
    if missing(&["nbdsh"]) || missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &[]);
    let script = "h.pwrite(b'hello', 4096); h.flush(); print(h.get_size(), h.pread(5, 4096).decode())";
    // It uses the first python3 in `PATH`, which may not be the system's.
    let mut nbdsh = command(&["nbdsh", "-u", server.uri(), "-c", script]);
    let printed = run(nbdsh.env("PATH", "/usr/bin:/bin")).ok();
    assert_eq!(printed.trim(), "1048576 hello");
}

fn copy_in_and_out(sandbox: &Sandbox, server: &Server) {
    // Not a multiple of any copier's block.
    let source = sandbox.noise("source", 24 * MIB as usize + 512);
    let copy = sandbox.path("copy");
    run(&mut command(&["nbdcopy", "--flush", words(&source), server.uri()])).ok();
    run(&mut command(&["nbdcopy", server.uri(), words(&copy)])).ok();
    run(&mut command(&["truncate", "-s", &(24 * MIB + 512).to_string(), words(&copy)])).ok();
    assert_same(&source, &copy);
    for synchronous in [false, true] {
        std::fs::remove_file(&copy).unwrap();
        let way: &[&str] =
            if synchronous { &["--synchronous"] } else { &["--connections=4", "--requests=32"] };
        run(&mut command(&[&["nbdcopy"], way, &[server.uri(), words(&copy)]].concat())).ok();
        run(&mut command(&["truncate", "-s", &(24 * MIB + 512).to_string(), words(&copy)])).ok();
        assert_same(&source, &copy);
    }
}

fn nbdcopy_copies_a_file_unchanged(engine: Engine) {
    if missing(&["nbdcopy", "cmp"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("image", 24 * MIB + 512);
    let mut server = sandbox.serve(&file_stack(&image), &[]);
    copy_in_and_out(&sandbox, &server);
    server.terminate();
    assert_same(&sandbox.path("source"), &image);
}

fn nbdcopy_copies_memory_unchanged(engine: Engine) {
    if missing(&["nbdcopy", "cmp"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let server = sandbox.serve("ram:25M", &[]);
    copy_in_and_out(&sandbox, &server);
}

fn nbdcopy_keeps_holes(engine: Engine) {
    if missing(&["nbdcopy", "cmp"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    // 64 MiB with a megabyte of data in the middle.
    let source = sandbox.image("source", 64 * MIB);
    let data = blockyard_tests::server::noise(3, MIB as usize);
    let file = std::fs::File::options().write(true).open(&source).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &data, 32 * MIB).unwrap();
    let allocated = |path: &Path| path.metadata().unwrap().blocks() * 512;

    let image = sandbox.image("image", 64 * MIB);
    let copy = sandbox.path("copy");
    let mut server = sandbox.serve(&file_stack(&image), &[]);
    run(&mut command(&["nbdcopy", words(&source), server.uri()])).ok();
    run(&mut command(&["nbdcopy", server.uri(), words(&copy)])).ok();
    server.terminate();
    for path in [&image, &copy] {
        assert_same(&source, path);
        assert!(allocated(path) <= 2 * MIB, "{}: {} bytes are allocated", path.display(), allocated(path));
    }
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    if missing(&["qemu-img", "cmp"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let source = sandbox.noise("source", 8 * MIB as usize);
    let image = sandbox.image("image", 8 * MIB);
    let server = sandbox.serve(&file_stack(&image), &[]);
    let uri = server.uri();
    run(&mut command(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", words(&source), uri])).ok();
    run(&mut command(&["qemu-img", "compare", "-f", "raw", "-F", "raw", words(&source), uri])).ok();
    let copy = sandbox.path("copy.qcow2");
    run(&mut command(&["qemu-img", "convert", "-f", "raw", "-O", "qcow2", uri, words(&copy)])).ok();
    run(&mut command(&["qemu-img", "compare", "-f", "raw", "-F", "qcow2", uri, words(&copy)])).ok();
    let info = json(&run(&mut command(&["qemu-img", "info", "--output=json", "-f", "raw", uri])).ok());
    assert_eq!(info["virtual-size"], 8 * MIB);

    run(&mut command(&["qemu-io", "-f", "raw", "-c", "discard 2M 4M", uri])).ok();
    let map = json(&run(&mut command(&["qemu-img", "map", "--output=json", "-f", "raw", uri])).ok());
    let data: Vec<_> = map.as_array().into_iter().flatten().map(|extent| extent["data"].clone()).collect();
    assert_eq!(data, [true, false, true], "{map}");
    assert_eq!(map[1]["start"], 2 * MIB);
    assert_eq!(map[1]["length"], 4 * MIB);
    assert_eq!(map[1]["zero"], true);
    run(&mut command(&["qemu-img", "compare", "-f", "raw", "-F", "raw", words(&source), uri])).failed_with(1);
}

fn qemu_io_reads_back_what_it_wrote(engine: Engine) {
    if missing(&["qemu-io"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("image", 8 * MIB);
    for stack in [file_stack(&image), "ram:8M".into()] {
        let server = sandbox.serve(&stack, &[]);
        let script = [
            "write -P 0xaa 0 1M",
            "write -f -P 0xbb 1M 64k",
            "aio_write -P 0xcc 2M 1M",
            "aio_write -P 0xdd 3M 1M",
            "aio_flush",
            "read -P 0xaa 0 1M",
            "read -P 0xbb 1M 64k",
            "read -P 0xcc 2M 1M",
            "read -P 0xdd 3M 1M",
            // Zeroes that keep their blocks, zeroes that may lose them, and a discard.
            "write -z 512 4k",
            "read -P 0 512 4k",
            "read -P 0xaa 4608 4k",
            "write -z -u 2M 512k",
            "read -P 0 2M 512k",
            "read -P 0xcc 2560k 512k",
            "discard 3M 1M",
            "read -P 0 3M 1M",
            "writev -P 0xee 4M 4k 512 64k",
            "readv -P 0xee 4M 512 68k",
            "flush",
        ];
        let mut qemu = command(&["qemu-io", "-f", "raw"]);
        script.iter().for_each(|line| _ = qemu.args(["-c", line]));
        let outcome = run(qemu.arg(server.uri()));
        assert!(!outcome.stdout.contains("Pattern verification failed"), "{stack}: {outcome}");
        assert!(!outcome.stdout.contains("failed:"), "{stack}: {outcome}");
        outcome.ok();
    }
}

fn verify_with_fio(server: &Server) {
    let uri = format!("--uri={}", server.uri());
    let job = [
        "fio",
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randrw",
        "--bsrange=4k-64k",
        "--bs_unaligned=0",
        "--iodepth=16",
        "--numjobs=4",
        "--thread",
        // Each job has a quarter of its own, so that none overwrites another's data.
        "--size=8M",
        "--offset_increment=8M",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--do_verify=1",
        "--output-format=json",
    ];
    let outcome = run_within(&mut command(&job), Duration::from_secs(60));
    let text = outcome.ok();
    let report = json(&text[text.find('{').unwrap_or(0)..]);
    let jobs = report["jobs"].as_array().expect("fio reports its jobs");
    assert_eq!(jobs.len(), 4);
    for job in jobs {
        assert_eq!(job["error"], 0);
        assert!(
            job["write"]["io_bytes"].as_u64() > Some(MIB) && job["read"]["io_bytes"].as_u64() > Some(MIB)
        );
    }
}

fn fio_verifies_a_file(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("image", 32 * MIB);
    verify_with_fio(&sandbox.serve(&file_stack(&image), &[]));
}

fn fio_verifies_memory(engine: Engine) {
    if missing(&["fio"]) {
        return;
    }
    let sandbox = Sandbox::new(engine);
    verify_with_fio(&sandbox.serve("ram:32M", &[]));
}

#[test]
fn the_kernels_client_attaches() {
    if missing(&["nbd-client", "cmp"]) || blockyard_tests::server::missing_root() {
        return;
    }
    let device = Path::new("/dev/nbd0");
    if !device.exists() {
        return skip("the kernel has no nbd devices here (modprobe nbd)");
    }
    if std::fs::read_to_string("/sys/block/nbd0/size").is_ok_and(|size| size.trim() != "0") {
        return skip("/dev/nbd0 is in use");
    }
    let sandbox = Sandbox::default();
    let source = sandbox.noise("source", 4 * MIB as usize);
    let server = sandbox.serve("ram:4M", &[]);
    let socket = server.socket();
    run(&mut command(&["nbd-client", "-unix", words(&socket), "/dev/nbd0", "-N", "disk"])).ok();
    let copied = run(&mut command(&[
        "dd",
        &format!("if={}", words(&source)),
        "of=/dev/nbd0",
        "bs=1M",
        "oflag=direct",
    ]));
    let compared = run(&mut command(&["cmp", words(&source), "/dev/nbd0"]));
    run(&mut command(&["nbd-client", "-d", "/dev/nbd0"])).ok();
    copied.ok();
    compared.ok();
}
