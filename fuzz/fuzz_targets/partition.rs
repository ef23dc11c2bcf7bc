//! Fuzzes `blockyard_partition::fuzzing::partition`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_partition::fuzzing::partition(data));
