//! Fuzzes `blockyard_proto::exec::fuzzing::replies`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::exec::fuzzing::replies(data));
