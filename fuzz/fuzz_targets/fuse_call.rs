//! Fuzzes `blockyard_proto::fuse::fuzzing::call`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::fuse::fuzzing::call(data));
