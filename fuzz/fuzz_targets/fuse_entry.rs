//! Fuzzes `blockyard_proto::fuse::fuzzing::entry`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::fuse::fuzzing::entry(data));
