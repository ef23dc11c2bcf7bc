//! Fuzzes `blockyard_virtio::fuzzing::split`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    blockyard_virtio::fuzzing::split(data);
});
