//! Fuzzes `blockyard_virtio::fuzzing::packed`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    blockyard_virtio::fuzzing::packed(data);
});
