//! Fuzzes `blockyard_proto::iscsi::fuzzing::login`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::iscsi::fuzzing::login(data));
