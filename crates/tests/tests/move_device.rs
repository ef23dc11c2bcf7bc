//! `blockyard move`: the contents of a served device move to another stack under a load that verifies.

use blockyard_tests::remote::serve_as;
use blockyard_tests::server::{Engine, Sandbox, Server, noise};
use blockyard_tests::tools::{PATIENCE, run_within, until};
use std::path::Path;
use std::process::Child;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 48 * MIB;

fn file(path: &Path) -> String {
    format!("file:{},format=raw", path.display())
}

/// Starts writers that verify what they wrote, for some seconds.
fn load(server: &Server, seconds: u32) -> Child {
    let uri = format!("--uri={}", server.uri());
    let runtime = format!("--runtime={seconds}");
    let words = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        "--rw=randwrite",
        "--bs=4k",
        "--iodepth=16",
        "--size=24M",
        "--offset=12M",
        "--verify=crc32c",
        "--verify_backlog=512",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--time_based",
        &runtime,
    ];
    std::process::Command::new("fio").args(words).stdout(std::process::Stdio::null()).spawn().expect("fio")
}

fn moved(sandbox: &Sandbox, arguments: &[&str]) -> String {
    run_within(&mut sandbox.blockyard(&[&["move", "disk"][..], arguments].concat()), PATIENCE).ok()
}

fn stack(sandbox: &Sandbox) -> serde_json::Value {
    let text = run_within(&mut sandbox.blockyard(&["show", "disk", "--json"]), PATIENCE).ok();
    serde_json::from_str(&text).expect("JSON")
}

fn read(sandbox: &Sandbox, server: &Server) -> Vec<u8> {
    let copy = sandbox.path("read-back");
    let words = [server.uri(), &copy.display().to_string()];
    run_within(std::process::Command::new("nbdcopy").args(words), PATIENCE).ok();
    std::fs::read(copy).unwrap()
}

#[test]
fn a_device_moves_under_load_to_each_kind_of_stack() {
    let sandbox = Sandbox::new(Engine::Auto);
    let other = sandbox.image("remote", SIZE);
    let remote = serve_as(&sandbox, "remote", &file(&other), &[]);
    let first = sandbox.noise("first", SIZE as usize);
    let server = serve_as(&sandbox, "disk", &file(&first), &["--layer", "delay,write=50us"]);
    let second = sandbox.path("second");
    for to in [
        format!("file:{},size={SIZE},create", second.display()),
        format!("ram:{SIZE}"),
        format!("file:{},size={SIZE},create,format=qcow2", sandbox.path("third.qcow2").display()),
        format!("nbd:{}", remote.uri()),
    ] {
        let mut fio = load(&server, 4);
        let told = moved(&sandbox, &[&to]);
        assert!(told.starts_with("disk moved to "), "{told}");
        assert!(fio.wait().unwrap().success(), "{to}: fio found an error");
        let before = read(&sandbox, &server);
        assert_eq!(before.len() as u64, SIZE);
        assert!(before[..12 << 20] == std::fs::read(&first).unwrap()[..12 << 20], "{to}");
        let shown = stack(&sandbox);
        let kind = to.split(':').next().unwrap();
        assert!(shown["stack"].as_str().unwrap().starts_with(kind), "{shown}");
        assert!(shown["backend"].get("moving").is_none(), "{shown}");
    }
    let at_the_end = read(&sandbox, &server);
    drop(server);
    assert!(at_the_end == std::fs::read(&other).unwrap(), "the last destination has everything");
}

#[test]
fn a_cancelled_and_a_failed_move_leave_the_source() {
    let sandbox = Sandbox::new(Engine::Auto);
    let first = sandbox.noise("first", SIZE as usize);
    let server = serve_as(&sandbox, "disk", &file(&first), &[]);
    let second = sandbox.image("second", SIZE);
    let mut slow = sandbox.blockyard(&["move", "disk", &file(&second), "--rate", "2M"]).spawn().unwrap();
    until(PATIENCE, || stack(&sandbox)["backend"].get("moving").map(drop)).expect("it moves");
    let refused = run_within(&mut sandbox.blockyard(&["resize", "disk", "64M"]), PATIENCE).failed();
    assert!(refused.contains("its contents are being moved to file:"), "{refused}");
    moved(&sandbox, &["--cancel"]);
    assert!(!slow.wait().unwrap().success());
    assert!(stack(&sandbox)["stack"].as_str().unwrap().contains("first"));
    assert!(read(&sandbox, &server) == std::fs::read(&first).unwrap());
    // The file is free again, and an error of the destination ends the next move.
    let failing = format!("null:{SIZE},memory_backed,badblocks=+50000-50007");
    let refused = run_within(&mut sandbox.blockyard(&["move", "disk", &failing]), PATIENCE).failed();
    assert!(refused.contains("the destination at offset") && refused.contains("as before"), "{refused}");
    let moved_after = moved(&sandbox, &[&file(&second)]);
    assert!(moved_after.starts_with("disk moved"), "{moved_after}");
    assert!(std::fs::read(&first).unwrap() == std::fs::read(&second).unwrap());
}

#[test]
fn a_server_killed_while_it_moves_leaves_the_source_with_every_write() {
    let sandbox = Sandbox::new(Engine::Auto);
    let first = sandbox.noise("first", SIZE as usize);
    let mut server = serve_as(&sandbox, "disk", &file(&first), &[]);
    let second = sandbox.image("second", SIZE);
    let mut slow = sandbox.blockyard(&["move", "disk", &file(&second), "--rate", "8M"]).spawn().unwrap();
    until(PATIENCE, || stack(&sandbox)["backend"].get("moving").map(drop)).expect("it moves");
    let data = noise(7, 1 << 20);
    let source = sandbox.path("data");
    std::fs::write(&source, &data).unwrap();
    let program = format!(
        "h.connect_uri(uri)\nd = open({:?}, 'rb').read()\nfor i in range(4): h.pwrite(d, i * 11534336)\nh.flush()\n",
        source.display().to_string()
    );
    blockyard_tests::tools::python(server.uri(), &program);
    server.kill();
    let _ = slow.wait();
    let content = std::fs::read(&first).unwrap();
    for at in (0..4).map(|i| i * 11_534_336) {
        assert!(content[at..at + data.len()] == data[..], "the write at {at}");
    }
}

#[test]
fn what_cannot_move_is_refused_with_a_reason() {
    let sandbox = Sandbox::new(Engine::Auto);
    let first = sandbox.image("first", SIZE);
    let _server = serve_as(&sandbox, "disk", &file(&first), &[]);
    for (to, why) in [
        (format!("ram:{}", 2 * SIZE), "the destination has size 96M, and the device 48M"),
        ("flie:x".to_owned(), "did you mean file?"),
        (format!("zero:{SIZE}"), "the destination does not store data"),
        (file(&first), "first"),
        (file(&sandbox.path("missing")), "missing"),
    ] {
        let outcome = run_within(&mut sandbox.blockyard(&["move", "disk", &to]), PATIENCE);
        let text = outcome.failed();
        assert!(text.contains(why), "{to}: {text}");
    }
    let cancelled = run_within(&mut sandbox.blockyard(&["move", "disk", "--cancel"]), PATIENCE).failed();
    assert!(cancelled.contains("its contents are not being moved"), "{cancelled}");
}
