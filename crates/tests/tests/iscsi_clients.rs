//! libiscsi's tools, qemu-img and qemu-io, and fio against our iSCSI target.
//!
//! Each result is checked by other means: what a client wrote is compared with the file behind the target.

use blockyard_tests::iscsi::{NAME, Target, chap_file, file_stack, lacks_export};
use blockyard_tests::on_both_engines;
use blockyard_tests::server::{Engine, Sandbox};
use blockyard_tests::tools::{Outcome, command, missing, run, run_within, skip};
use std::path::Path;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const INITIATOR: &str = "iqn.2026-11.io.blockyard.test:client";

on_both_engines!(qemu_img_copies_in_and_out, qemu_io_reads_back_what_it_wrote, iscsi_perf_reads_and_writes);

fn words(path: &Path) -> &str {
    path.to_str().expect("a sandbox has plain paths")
}

#[track_caller]
fn tool(arguments: &[&str]) -> Outcome {
    run_within(&mut command(arguments), Duration::from_secs(60))
}

#[test]
fn iscsi_ls_lists_target_portal_and_size() {
    if missing(&["iscsi-ls"]) || lacks_export() {
        return;
    }
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:64M", "", &[]);
    let portal = format!("iscsi://{}", target.portal());
    let list = tool(&["iscsi-ls", "--show-luns", &portal]).ok();
    assert!(list.contains(&format!("Target:{NAME} Portal:{},1", target.portal())), "{list}");
    let is_disk = |line: &str| line.contains("DIRECT_ACCESS") && line.contains("63M");
    assert!(list.lines().any(is_disk), "{list}");
}

#[test]
fn iscsi_readcapacity16_reports_size_and_block_size() {
    if missing(&["iscsi-readcapacity16"]) || lacks_export() {
        return;
    }
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:10M", "", &[]);
    let text = tool(&["iscsi-readcapacity16", &target.url]).ok();
    let field = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
        let value = line.and_then(|rest| rest.trim_start_matches(':').trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {name}: {text}"))
    };
    assert_eq!(field("Total size"), 10 * MIB);
    assert_eq!(field("LOGICAL BLOCK LENGTH IN BYTES"), 512);
    assert_eq!(field("RETURNED LOGICAL BLOCK ADDRESS"), 10 * MIB / 512 - 1);
}

#[test]
fn iscsi_inq_reads_every_listed_page() {
    if missing(&["iscsi-inq"]) || lacks_export() {
        return;
    }
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:64M", "", &[]);
    let standard = tool(&["iscsi-inq", &target.url]).ok();
    assert!(standard.contains("Peripheral Device Type:DIRECT_ACCESS"), "{standard}");
    let pages = tool(&["iscsi-inq", "-e", "1", "-c", "0", &target.url]).ok();
    let codes: Vec<&str> = pages
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Page:")?.split_whitespace().next())
        .collect();
    for expected in ["0x80", "0x83", "0xb0", "0xb1", "0xb2"] {
        assert!(codes.contains(&expected), "{expected} is not listed: {pages}");
        // The tool takes the page in decimal.
        let code = u8::from_str_radix(&expected[2..], 16).expect("it is hexadecimal");
        tool(&["iscsi-inq", "-e", "1", "-c", &code.to_string(), &target.url]).ok();
    }
}

fn iscsi_perf_reads_and_writes(engine: Engine) {
    if missing(&["iscsi-perf"]) || lacks_export() {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let target = Target::serve(&sandbox, "ram:64M", "", &[]);
    let load = |more: &[&str]| {
        let usual = ["iscsi-perf", "--max", "32", "--blocks", "8", "--runtime", "1", "-i", INITIATOR];
        let outcome = tool(&[&usual[..], more, &[&target.url]].concat());
        let text = format!("{}{}", outcome.stdout, outcome.stderr);
        outcome.ok();
        assert!(text.contains("iops average"), "{text}");
    };
    load(&["--random"]);
    load(&[]);
}

fn qemu_img_copies_in_and_out(engine: Engine) {
    if missing(&["qemu-img"]) || lacks_iscsi_of_qemu() || lacks_export() {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let image = sandbox.image("disk.img", 32 * MIB);
    let target = Target::serve(&sandbox, &file_stack(&image), "", &[]);
    let info = tool(&["qemu-img", "info", "-f", "raw", &target.url]).ok();
    assert!(info.contains("32 MiB (33554432 bytes)"), "{info}");
    let source = sandbox.noise("source", 32 << 20);
    tool(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", words(&source), &target.url]).ok();
    tool(&["qemu-img", "compare", "-f", "raw", "-F", "raw", words(&source), &target.url]).ok();
    let copy = sandbox.path("copy");
    tool(&["qemu-img", "convert", "-f", "raw", "-O", "raw", &target.url, words(&copy)]).ok();
    run(&mut command(&["cmp", words(&source), words(&copy)])).ok();
    run(&mut command(&["cmp", words(&source), words(&image)])).ok();
}

fn qemu_io_reads_back_what_it_wrote(engine: Engine) {
    if missing(&["qemu-io"]) || lacks_iscsi_of_qemu() || lacks_export() {
        return;
    }
    let sandbox = Sandbox::new(engine);
    let target = Target::serve(&sandbox, "ram:32M", "", &[]);
    let script = [
        "write -P 0x11 0 1M",
        "write -f -P 0x22 1M 4k",
        "aio_write -P 0x33 2M 3M",
        "aio_write -P 0x44 8M 512",
        "aio_flush",
        "write -z 64k 64k",
        "discard 4M 1M",
        "flush",
        "read -P 0x11 0 64k",
        "read -P 0 64k 64k",
        "read -P 0x11 128k 896k",
        "read -P 0x22 1M 4k",
        "read -P 0x33 2M 2M",
        "read -P 0 4M 1M",
        "read -P 0x44 8M 512",
        "read -P 0 8389120 512",
    ];
    let mut words = vec!["qemu-io", "-f", "raw", "-d", "unmap"];
    script.iter().for_each(|line| words.extend(["-c", line]));
    words.push(&target.url);
    let outcome = tool(&words);
    assert!(!outcome.stdout.contains("verification failed"), "{outcome}");
    outcome.ok();
}

#[test]
fn digests_are_used_when_the_initiator_wants_them() {
    if missing(&["qemu-io"]) || lacks_iscsi_of_qemu() || lacks_export() {
        return;
    }
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:32M", "", &[]);
    for digest in ["crc32c", "none", "crc32c-none", "none-crc32c"] {
        let options = format!(
            "driver=raw,file.driver=iscsi,file.transport=tcp,file.portal={},file.target={NAME},file.lun={},\
             file.header-digest={digest}",
            target.portal(),
            target.url.rsplit('/').next().unwrap_or_default(),
        );
        let words =
            ["qemu-io", "--image-opts", &options, "-c", "write -P 7 0 256k", "-c", "read -P 7 0 256k"];
        let outcome = tool(&words);
        assert!(!outcome.stdout.contains("verification failed"), "{digest}: {outcome}");
        outcome.ok();
    }
}

#[test]
fn only_the_right_secret_logs_in() {
    if missing(&["iscsi-inq"]) || lacks_export() {
        return;
    }
    let sandbox = Sandbox::default();
    let file = chap_file(&sandbox, "one", "0123456789abcdef");
    let target = Target::serve(&sandbox, "ram:1M", &format!(",chap={file}"), &[]);
    tool(&["iscsi-inq", &target.url_as("one", "0123456789abcdef")]).ok();
    for url in [
        target.url_as("one", "0123456789abcdeX"),
        target.url_as("two", "0123456789abcdef"),
        target.url_as("one", "0123456789"),
        target.url.clone(),
    ] {
        let outcome = tool(&["iscsi-inq", &url]);
        assert!(!outcome.status.success(), "{outcome}");
        assert!(!outcome.stdout.contains("Peripheral"), "{outcome}");
    }
    tool(&["iscsi-inq", &target.url_as("one", "0123456789abcdef")]).ok();
    let log = target.server.as_ref().map(|server| server.log()).unwrap_or_default();
    assert!(!log.contains("0123456789"), "a secret is logged: {log}");
}

#[test]
fn unknown_initiators_are_refused() {
    if missing(&["iscsi-inq"]) || lacks_export() {
        return;
    }
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:1M", &format!(",acl={INITIATOR}"), &[]);
    tool(&["iscsi-inq", "-i", INITIATOR, &target.url]).ok();
    let other = tool(&["iscsi-inq", "-i", "iqn.2026-11.io.blockyard.test:other", &target.url]);
    assert!(!other.status.success(), "{other}");
}

#[test]
fn fio_verifies_over_libiscsi() {
    if missing(&["fio"]) || lacks_export() {
        return;
    }
    if !tool(&["fio", "--enghelp"]).ok().lines().any(|line| line.trim() == "libiscsi") {
        return skip("this fio has no engine libiscsi");
    }
    let sandbox = Sandbox::default();
    let target = Target::serve(&sandbox, "ram:32M", "", &[]);
    // A colon in a file name separates names.
    let file = format!("--filename={}", target.url.replace(':', "\\:"));
    let words = ["fio", "--name=job", "--ioengine=libiscsi", "--rw=randwrite", "--bs=4k", "--size=16M"];
    let more = ["--iodepth=32", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", &file];
    run_within(sandbox.tool(&words).args(more), Duration::from_secs(60)).ok();
}

/// Returns whether QEMU's iSCSI driver, a package of its own, is missing; then the test is skipped.
fn lacks_iscsi_of_qemu() -> bool {
    let formats = tool(&["qemu-img", "--help"]).stdout;
    let list = formats.lines().find_map(|line| line.strip_prefix("Supported formats: ")).unwrap_or_default();
    let lacks = !list.split_whitespace().any(|word| word == "iscsi");
    if lacks {
        assert!(std::env::var_os("CI").is_none(), "QEMU's iSCSI driver is not installed (qemu-block-extra)");
        skip("QEMU's iSCSI driver is not installed (qemu-block-extra)");
    }
    lacks
}
