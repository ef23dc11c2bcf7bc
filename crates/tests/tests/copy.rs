//! `blockyard copy`: data, holes, verification, resuming, rate limit and refusals, without another server.

use blockyard_tests::remote::serve_as;
use blockyard_tests::server::{Engine, Sandbox, noise};
use blockyard_tests::tools::{PATIENCE, run_within, until};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// Creates a sparse file with data in two places.
fn sparse(sandbox: &Sandbox, name: &str) -> PathBuf {
    let path = sandbox.image(name, 64 * MIB);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&noise(1, 3 << 20), 5 * MIB + 4096).unwrap();
    file.write_all_at(&noise(2, 4096), 64 * MIB - 4096).unwrap();
    path
}

fn file(path: &Path) -> String {
    format!("file:{}", path.display())
}

fn copied(sandbox: &Sandbox, arguments: &[&str]) -> String {
    run_within(&mut sandbox.blockyard(&[&["copy"][..], arguments].concat()), PATIENCE).ok()
}

#[test]
fn data_is_copied_and_holes_stay_holes() {
    let sandbox = Sandbox::new(Engine::Auto);
    let source = sparse(&sandbox, "source");
    let target = sandbox.path("target");
    let outcome =
        copied(&sandbox, &[&file(&source), &format!("{},size=64M,create", file(&target)), "--verify"]);
    assert!(outcome.starts_with("copied 64M: ") && outcome.contains("verified"), "{outcome}");
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap());
    let allocated = std::fs::metadata(&target).unwrap().blocks() * 512;
    assert!(allocated < 8 * MIB, "{allocated} bytes are allocated");
}

#[test]
fn old_data_of_the_target_is_zeroed_in_holes() {
    let sandbox = Sandbox::new(Engine::Auto);
    let source = sparse(&sandbox, "source");
    let target = sandbox.noise("target", 64 << 20);
    copied(&sandbox, &[&file(&source), &file(&target)]);
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap());
}

#[test]
fn a_copy_over_nbd_into_an_image_and_back_is_equal() {
    let sandbox = Sandbox::new(Engine::Auto);
    let source = sparse(&sandbox, "source");
    let server = serve_as(&sandbox, "disk", &file(&source), &[]);
    let image = format!("file:{},format=qcow2", sandbox.path("image.qcow2").display());
    let remote = format!("nbd:{}", server.uri());
    copied(&sandbox, &[&remote, &format!("{image},size=64M,create"), "--verify"]);
    let back = sandbox.path("back");
    copied(&sandbox, &[&image, &format!("{},size=64M,create", file(&back))]);
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&back).unwrap());
}

#[test]
fn a_killed_copy_resumes_where_it_was_flushed() {
    let sandbox = Sandbox::new(Engine::Auto);
    let source = sandbox.noise("source", 48 << 20);
    let (target, state) = (sandbox.image("target", 48 * MIB), sandbox.path("state"));
    let (from, to, kept) = (file(&source), file(&target), state.to_string_lossy().into_owned());
    let words = ["copy", &from, &to, "--resume", &kept];
    // Slow enough that a checkpoint, which flushes, comes long before the end, also on a disk that is busy.
    let mut child = sandbox.blockyard(&[&words[..], &["--rate", "1M"]].concat()).spawn().unwrap();
    let offset = || {
        let text = std::fs::read_to_string(&state).ok()?;
        let state: serde_json::Value = serde_json::from_str(&text).ok()?;
        state["offset"].as_u64().filter(|offset| *offset > 0)
    };
    let offset = until(PATIENCE, offset).expect("a checkpoint");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(offset < 48 * MIB);
    let (ours, theirs) = (std::fs::read(&source).unwrap(), std::fs::read(&target).unwrap());
    assert!(ours[..offset as usize] == theirs[..offset as usize], "what was recorded is copied");
    // Data before the checkpoint is not copied again.
    std::fs::OpenOptions::new().write(true).open(&target).unwrap().write_all_at(&[0; 512], 0).unwrap();
    copied(&sandbox, &words[1..]);
    let theirs = std::fs::read(&target).unwrap();
    assert!(theirs[..512] == [0; 512] && theirs[512..] == ours[512..]);
    assert!(!state.exists(), "the file is removed at the end");
}

#[test]
fn a_served_source_is_only_read() {
    let sandbox = Sandbox::new(Engine::Auto);
    let source = sparse(&sandbox, "source");
    // A running read-only device has the image open, too.
    let _server = serve_as(&sandbox, "disk", &format!("{},ro", file(&source)), &[]);
    let target = sandbox.path("target");
    copied(&sandbox, &[&file(&source), &format!("{},size=64M,create", file(&target))]);
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap());
}

#[test]
fn the_rate_is_kept() {
    let sandbox = Sandbox::new(Engine::Auto);
    let source = sandbox.noise("source", 12 << 20);
    let target = sandbox.image("target", 12 * MIB);
    let started = Instant::now();
    copied(&sandbox, &[&file(&source), &file(&target), "--rate", "8M"]);
    // The last chunk starts after the eleven before it.
    assert!(started.elapsed().as_secs_f64() >= 11.0 / 8.0, "{:?}", started.elapsed());
}

#[test]
fn what_cannot_be_copied_is_refused_with_a_reason() {
    let sandbox = Sandbox::new(Engine::Auto);
    let (source, small) = (sandbox.image("source", 2 * MIB), sandbox.image("small", MIB));
    for (from, to, why) in [
        (file(&source), file(&small), "the target's size 1M is less than the source's size 2M"),
        (file(&source), format!("{},ro", file(&source)), "the target is read-only"),
        ("ram:1M".to_owned(), "file:/nonexistent/file".to_owned(), "No such file"),
    ] {
        let outcome = run_within(&mut sandbox.blockyard(&["copy", &from, &to]), PATIENCE).failed();
        assert!(outcome.contains(why), "{from} to {to}: {outcome}");
    }
}
