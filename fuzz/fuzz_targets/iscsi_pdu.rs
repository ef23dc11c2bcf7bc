//! Fuzzes `blockyard_proto::iscsi::fuzzing::headers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::iscsi::fuzzing::headers(data));
