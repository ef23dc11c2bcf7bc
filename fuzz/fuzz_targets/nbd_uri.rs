//! Fuzzes `blockyard_proto::nbd::fuzzing::uri`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::nbd::fuzzing::uri(data));
