//! Fuzzes `blockyard_proto::nbd::fuzzing::replies`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::nbd::fuzzing::replies(data));
