//! Replays the fuzz corpora: passes every committed input, and mutations of it, through the body of its
//! target.
//!
//! Inputs found by a fuzzer are kept in `fuzz/corpus/TARGET/` and replayed by every test run.

use std::path::Path;

use blockyard_proto::exec;
use blockyard_proto::fuse;
use blockyard_proto::iscsi::fuzzing as iscsi;
use blockyard_proto::nbd::fuzzing;
use blockyard_proto::vhost_user;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

type Body = fn(&[u8]);

const TARGETS: [(&str, Body); 12] = [
    ("exec_replies", exec::fuzzing::replies),
    ("iscsi_pdu", iscsi::headers),
    ("iscsi_login", iscsi::login),
    ("iscsi_initiator", iscsi::initiator),
    ("nbd_server_handshake", fuzzing::server_handshake),
    ("nbd_request", fuzzing::request),
    ("nbd_client_handshake", fuzzing::client_handshake),
    ("nbd_replies", fuzzing::replies),
    ("nbd_uri", fuzzing::uri),
    ("fuse_call", fuse::fuzzing::call),
    ("fuse_entry", fuse::fuzzing::entry),
    ("vhost_user", vhost_user::fuzzing::session),
];

/// Returns all inputs kept for a target, with their names. Fails if there are none.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut inputs: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("the folder is readable").path())
        .filter(|path| path.is_file())
        .map(|path| (path.display().to_string(), std::fs::read(&path).expect("the input is readable")))
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty: nothing would be tested", folder.display());
    inputs
}

#[test]
fn kept_inputs_do_not_panic() {
    for (target, body) in TARGETS {
        for (name, input) in corpus(target) {
            println!("{name}");
            body(&input);
        }
    }
}

#[test]
fn every_target_has_a_corpus_and_every_corpus_a_target() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let mut folders: Vec<_> = std::fs::read_dir(root.join("corpus"))
        .expect("there are corpora")
        .map(|entry| entry.expect("the folder is readable").file_name().into_string().expect("a plain name"))
        .filter(|name| {
            ["exec_", "nbd_", "fuse_", "iscsi_", "vhost_"].iter().any(|protocol| name.starts_with(protocol))
        })
        .collect();
    folders.sort();
    let mut targets = TARGETS.map(|(target, _)| target);
    targets.sort();
    assert_eq!(folders, targets);
    for target in targets {
        assert!(root.join("fuzz_targets").join(format!("{target}.rs")).is_file(), "{target} has no target");
    }
}

/// Mutates an input: overwrites, inserts, removes or truncates at a random place.
fn mutate(input: &mut Vec<u8>, kind: u8, place: Index, byte: u8) {
    if input.is_empty() {
        return input.push(byte);
    }
    let at = place.index(input.len());
    match kind % 5 {
        0 => input[at] = byte,
        1 => input[at] ^= 1 << (byte % 8),
        2 => input.insert(at, byte),
        3 => drop(input.remove(at)),
        _ => input.truncate(at),
    }
}

#[test]
fn mutated_inputs_do_not_panic() {
    for (target, body) in TARGETS {
        let inputs = corpus(target);
        let changes = proptest::collection::vec((any::<u8>(), any::<Index>(), any::<u8>()), 1..6);
        // The second byte of a state machine's input is the size of the chunks in which it is fed.
        let strategy = (any::<Index>(), changes, any::<u8>());
        TestRunner::new(ProptestConfig { cases: 2000, ..ProptestConfig::default() })
            .run(&strategy, |(which, changes, piece)| {
                let mut input = which.get(&inputs).1.clone();
                let is_stream = ["handshake", "login", "initiator"].iter().any(|end| target.ends_with(end));
                if is_stream && input.len() > 1 {
                    input[1] = piece;
                }
                for (kind, place, byte) in changes {
                    mutate(&mut input, kind, place, byte);
                }
                body(&input);
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{target}: {error}"));
    }
}

#[test]
fn random_bytes_do_not_panic() {
    for (target, body) in TARGETS {
        TestRunner::new(ProptestConfig { cases: 2000, ..ProptestConfig::default() })
            .run(&proptest::collection::vec(any::<u8>(), 0..300), |input| {
                body(&input);
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{target}: {error}"));
    }
}
